"""Where the threads of a training wait for locks, and how long each has Python's interpreter.

    python experiments/ranks/lock_waits.py /dev/shm/photos [--arms resident gpuflow]

Compiles lock_waits.c, which is loaded before other libraries and records each wait for a lock of pthreads: of CUDA's
driver, of Python's interpreter, of torch; and when threads take the interpreter and give it away. Recording takes time,
so waits and steps are longer than without it. Needs gcc.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import subprocess
import sys
import tempfile
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import torch
from one_rank import ARMS, WARM_UP_STEPS, only_rank

SOURCE = Path(__file__).with_suffix(".c")
PRELOAD = "LD_PRELOAD"
HAS_INTERPRETER = "has the interpreter"
"""In place of a kind of lock in the lines that lock_waits.c writes."""
INTERPRETER, OTHERS = "Python's interpreter", ("libc.so", "libcuda.so", "libpthread")
"""What a wait in Python's own code is called, and libraries whose functions do not say what waits."""
SHORTEST_MS = 0.02
"""Shorter waits per step are not printed."""


def compiled(folder: str) -> Path:
    library = Path(folder) / "lock_waits.so"
    subprocess.run(["gcc", "-O2", "-fPIC", "-shared", "-o", library, SOURCE, "-ldl", "-lpthread"], check=True)
    return library


def lines(path: Path, steps: int) -> Iterator[str]:
    """How long threads have the interpreter, and the waits of a written file, for each thread the longest first."""
    names = {thread.native_id: thread.name for thread in threading.enumerate()}
    waits: dict[str, dict[tuple[str, str], list[float]]] = defaultdict(lambda: defaultdict(lambda: [0.0, 0.0]))
    held: dict[str, tuple[float, float]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        number, kind, holds_interpreter, count, ns, places = line.split("\t")
        thread = names.get(int(number), f"thread {number} of a library")
        often, ms = int(count) / steps, int(ns) / 1e6 / steps
        if kind == HAS_INTERPRETER:
            held[thread] = often, ms
            continue
        frames = [frame for frame in places.split("|") if frame]
        named = (frame for frame in frames if not frame.startswith(OTHERS) and not frame.endswith(":?"))
        place = next(named, frames[-1] if frames else "?")
        if kind.endswith("limit") and frames and frames[0].startswith(("python", "libpython")):
            kind = INTERPRETER
        elif holds_interpreter == "1":
            kind += " while it has Python's interpreter"
        entry = waits[thread][kind, place]
        entry[0] += often
        entry[1] += ms
    if held:
        yield f"  the interpreter is in use for {sum(ms for _, ms in held.values()):.2f} ms a step"
    for thread, (often, ms) in sorted(held.items(), key=lambda item: -item[1][1]):
        yield f"    {often:7.1f} times a step, {ms:6.2f} ms a step: {thread}"
    for thread, found in sorted(waits.items()):
        long_ones = [(ms, often, where) for where, (often, ms) in found.items() if ms >= SHORTEST_MS]
        if long_ones:
            yield f"  {thread}"
        for ms, often, (kind, place) in sorted(long_ones, reverse=True):
            yield f"    {often:7.1f} a step, {ms:6.2f} ms a step: {kind}, {place}"


def measure(options: argparse.Namespace) -> None:
    """Train with each arm, in a process that has the library."""
    library = ctypes.CDLL(os.environ[PRELOAD])
    device = torch.device("cuda", 0) if options.device == "cuda" else torch.device("cpu")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        rank = only_rank(options, device, options.arms, stack)
        for name in options.arms:
            rank.measure(name, WARM_UP_STEPS)
            library.lock_waits_start()
            figures = rank.measure(name, options.steps)
            library.lock_waits_write(os.fsencode(folder / "waits"))
            print(f"{name}: {figures.images_per_s:,.0f} images/s, {figures.interval_ms:.1f} ms a step (median)")
            print(*lines(folder / "waits", options.steps + WARM_UP_STEPS), sep="\n", flush=True)
    os._exit(0)  # without waiting for threads of NCCL


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("photos", type=Path, help="photographs, in a folder for each class")
    parser.add_argument(
        "--arms", nargs="+", choices=ARMS, default=["resident", "gpuflow"], metavar="ARM", help=", ".join(ARMS)
    )
    parser.add_argument("--model", default="resnet18", help="of torchvision")
    parser.add_argument("--steps", type=int, default=50, help="of a measurement")
    parser.add_argument("--warm-up", type=int, default=200, help="batches that are loaded first")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu: only to see that the script runs"
    )
    options = parser.parse_args()
    if PRELOAD in os.environ:
        measure(options)
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, PRELOAD: str(compiled(folder))}
        sys.exit(subprocess.run([sys.executable, *sys.argv], env=environment).returncode)


if __name__ == "__main__":
    main()
