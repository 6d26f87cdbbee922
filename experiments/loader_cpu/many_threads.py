"""Measures many decoding threads on few cores: `python experiments/loader_cpu/many_threads.py [FOLDER]`.

Decoding and resampling are replaced by sleeps that release the interpreter. What remains is the threads' work in the
interpreter, and about 0.2 ms of other work per image. Prints images per second by threads and processes; README.md
explains why.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
DECODE_US, RESAMPLE_US = 1100, 450
CASES = ((4, 0), (8, 0), (8, 2), (16, 0), (16, 4))
"""(threads, processes) of each measurement."""
WARM_UP, SECONDS = 1.0, 4.0


def stand_in() -> None:
    """Replace the calls of libjpeg-turbo and torch in this process by sleeps."""
    import gpuflow.execute.resample
    from gpuflow.decode import libjpeg_turbo

    sleep = ctypes.CDLL(None).usleep
    if refusal := libjpeg_turbo.libjpeg_turbo_refusal():
        sys.exit(f"needs libjpeg-turbo: {refusal}; {libjpeg_turbo.REMEDY}")

    def decompress(*call: object) -> int:
        return int(sleep(DECODE_US))

    def resample(image: Any, size: Any, interpolation: str, antialias: bool, out: Any) -> Any:
        sleep(RESAMPLE_US)
        return out

    libjpeg_turbo._decode = decompress
    gpuflow.execute.resample.resample = resample


def measure(folder: str, threads: int, processes: int) -> float:
    """Measure images per second after the processes have started."""
    import gpuflow
    import gpuflow.runtime.worker_pool

    begin = "from gpuflow.runtime.worker_pool import serve\n"
    there = f"sys.path.insert(0, {str(HERE)!r})\nfrom many_threads import stand_in\nstand_in()\n"
    gpuflow.runtime.worker_pool._PROGRAM = gpuflow.runtime.worker_pool._PROGRAM.replace(begin, there + begin)
    stand_in()
    overrides = [f"source.folder={folder}", f"run.threads={threads}", f"run.processes={processes}"]
    loader = gpuflow.load(HERE / "photos.yaml", overrides=overrides)
    count, start = 0, None
    for images, _ in itertools.chain.from_iterable(itertools.repeat(loader)):
        now = time.perf_counter()
        if start is None:
            if not loader.stats().get("processes", {}).get("starting"):
                start = now + WARM_UP
        elif now >= start:
            count += len(images)
            if now >= start + SECONDS:
                break
    assert start is not None
    return count / (time.perf_counter() - start)


def main() -> None:
    folder, *case = sys.argv[1:] or ["data/bench"]
    if case:
        print(measure(folder, int(case[0]), int(case[1])), flush=True)
        os._exit(0)
    print(f"{len(os.sched_getaffinity(0))} cores, {folder}")
    for threads, processes in CASES:
        command = [sys.executable, __file__, folder, str(threads), str(processes)]
        done = subprocess.run(command, check=True, timeout=120, stdout=subprocess.PIPE, text=True)
        print(f"{threads:2} threads, {processes} processes: {float(done.stdout):6,.0f} images/s", flush=True)


if __name__ == "__main__":
    main()
