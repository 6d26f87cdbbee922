"""What the loader's threads do while a ResNet-18 trains: `python experiments/real_data/next_to_training.py FOLDER`.

Prints for each measurement the training's rate, its ratio to the rate on a resident batch measured just before, the
intervals between the launches of steps, and for each part of the loader's work how often a batch needs it, how long
that takes, waiting included, and how much of it a processor computes. Parts contain those below them that are indented
further. Needs an NVIDIA GPU.
"""

from __future__ import annotations

import argparse
import ast
import functools
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import arms
import numpy as np
import torch

HERE = Path(__file__).parent
PARTS = {
    "gpuflow.loader.decode.ChunkReader.read_chunk": "read and prepare",
    "gpuflow.loader.decode.ChunkReader.read": "  read",
    "gpuflow.execute.gpu.runner.GpuRunner.prepare": "  prepare",
    "gpuflow.execute.gpu.chunk_scan.FileChecks.complete": "    check new files",
    "gpuflow.execute.cpu.decode_pool.CpuDecodePool.begin": "    begin to decode on the CPU",
    "gpuflow.execute.gpu.runner.GpuRunner.launch": "launch",
    "gpuflow.execute.gpu.runner.GpuRunner._place": "  wait for the CPU's images",
    "gpuflow.execute.gpu.runner.GpuRunner._new_calls": "  form calls",
    "gpuflow.execute.gpu.nvjpeg_decoders.NvjpegDecoderPool._acquire_place": "  wait for a decoder",
    "gpuflow.execute.gpu.nvjpeg_decoders.NvjpegDecoder.decode": "  decode",
    "gpuflow.decode.nvjpeg.BatchedDecoder.decode_by": "    one call of nvJPEG",
}
"""Functions of the loader, and what they do."""
RESIDENT_SECONDS, SETTLING_STEPS = 0.5, 24
"""Of a training on a resident batch; and steps until a loader has taken over another value."""


class Parts:
    """Durations in ms of each part of the work while `timed` is open, in all threads: by the clock, and computing."""

    def __init__(self) -> None:
        self.spans: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)

    def _timing(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        @functools.wraps(function)
        def run(*arguments: Any, **named: Any) -> Any:
            start, computed = time.perf_counter(), time.thread_time()
            try:
                return function(*arguments, **named)
            finally:
                self.spans[name].append(((time.perf_counter() - start) * 1e3, (time.thread_time() - computed) * 1e3))

        return run

    @contextmanager
    def timed(self) -> Iterator[None]:
        with ExitStack() as patches:
            for place, name in PARTS.items():
                owner, _, method = place.rpartition(".")
                module, _, kind = owner.rpartition(".")
                function = getattr(getattr(sys.modules[module], kind), method)
                patches.enter_context(patch(place, self._timing(function, name)))
            yield

    def lines(self, batches: int) -> Iterator[str]:
        for name in PARTS.values():
            if spans := self.spans[name]:
                spans_ms, computing_ms = np.array(spans).T
                middle, most = np.percentile(spans_ms, [50, 95])
                yield (
                    f"    {name:34} {len(spans) / batches:5.2f} a batch, {spans_ms.sum() / batches:6.2f} ms a batch, "
                    f"computing {computing_ms.sum() / batches:5.2f}; p50 {middle:.2f}, p95 {most:.2f}"
                )


class Run(NamedTuple):
    """batches: launched. rate: images/s. intervals: ms between the launches of two steps. ahead: by how many ms the
    loop was ahead of the GPU at the end."""

    batches: int
    rate: float
    intervals: np.ndarray[Any, Any]
    ahead: float


def run_for(step: Callable[[], object], seconds: float, batch: int) -> Run:
    torch.cuda.synchronize()
    start, marks = time.perf_counter(), []
    while time.perf_counter() - start < seconds:
        step()
        marks.append(time.perf_counter())
    torch.cuda.synchronize()
    end = time.perf_counter()
    return Run(len(marks), len(marks) * batch / (end - start), np.diff(marks) * 1e3, (end - marks[-1]) * 1e3)


def measure(title: str, training: arms.Training, loader: arms.Gpuflow, options: argparse.Namespace) -> None:
    resident = run_for(training.resident_step, RESIDENT_SECONDS, options.batch)
    parts = Parts()
    for _ in range(arms.WARM_STEPS):
        training.fed_step(loader)
    with parts.timed():
        fed = run_for(lambda: training.fed_step(loader), options.seconds, options.batch)
    middle, most = np.percentile(fed.intervals, [50, 95])
    print(
        f"{title}: {fed.rate:,.0f} images/s, {fed.rate / resident.rate:.3f}; steps p50 {middle:.1f}, p95 {most:.1f} ms"
    )
    print(*parts.lines(fed.batches), sep="\n", flush=True)


def decodes_nothing(decoder: object, *arguments: object) -> None:
    """Takes the place of a call of nvJPEG."""


def knows_none(checks: object, samples: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.zeros(len(samples), np.int64)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="photographs, in a folder for each class")
    parser.add_argument("--seconds", type=float, default=1.5, help="of each measurement (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument(
        "--switch-intervals", type=float, nargs="+", default=[0.02], metavar="MS", help="of Python's threads, in turns"
    )
    parser.add_argument(
        "--try",
        dest="tried",
        nargs="+",
        default=[],
        metavar="NAME=VALUE",
        help="constants of gpuflow's modules, each tried in turns, such as gpuflow.execute.gpu.runner.LONG_WAIT=0.1",
    )
    parser.add_argument("--check-again", action="store_true", help="in turns, check every file as in a first epoch")
    parser.add_argument("--without-decoding", action="store_true", help="in turns, leave nvJPEG's calls out")
    options = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    loader = arms.Gpuflow({"folder": options.folder, "batch": options.batch, "device": "cuda", "set": []})
    training = arms.Training("resnet18", arms.Meter("cuda", options.batch, options.seconds), loader.dtype)
    for _ in range(20):
        training.resident_step()
    loader.next()
    while not loader.is_started():
        loader.next()
    measure("first epoch", training, loader, options)
    while not loader.is_warm():
        loader.next()
    for _ in range(options.repeats):
        for interval in options.switch_intervals:
            sys.setswitchinterval(interval / 1e3)
            measure(f"later, threads switch after {interval:g} ms", training, loader, options)
        if options.check_again:
            with patch("gpuflow.execute.gpu.chunk_scan.FileChecks.known", knows_none):
                for _ in range(SETTLING_STEPS):
                    training.fed_step(loader)
                measure("later, every file checked", training, loader, options)
        if options.without_decoding:
            with patch("gpuflow.decode.nvjpeg.BatchedDecoder.decode", decodes_nothing):
                for _ in range(SETTLING_STEPS):
                    training.fed_step(loader)
                measure("later, without calls of nvJPEG", training, loader, options)
        for text in options.tried:
            name, _, value = text.partition("=")
            with patch(name, ast.literal_eval(value)):
                for _ in range(SETTLING_STEPS):
                    training.fed_step(loader)
                measure(f"later, {text}", training, loader, options)
    loader.close()


if __name__ == "__main__":
    main()
