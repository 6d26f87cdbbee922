"""Measures an upper bound for `decode.cpu_share`: the engines' loader next to independent decoding processes.

    python experiments/gpu_path/cores_beside.py /dev/shm/photos [0 2 4 8 12]

The processes exchange no data with the loader, so no way to share a batch can be faster. Each of them reads, decodes,
crops and normalizes like a process of the CPU share. Prints images per second of the loader and of the processes.
"""

from __future__ import annotations

import functools
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from run import HERE, Batches, gpuflow_batches, rate

CHUNK, START_SECONDS, REPEATS = 16, 60.0, 2


def decode_on(folder: str, path: str, number: int) -> None:
    """Body of one process: counts the images that it has decoded, until it is killed."""
    from gpuflow.config import read_config
    from gpuflow.execute.cpu.runner import CpuRunner
    from gpuflow.pipeline.stage import Keys
    from gpuflow.pipeline.views import STORAGE, slot_shape
    from gpuflow.runtime.memory import BytePool
    from gpuflow.sources import open_source
    from gpuflow.stages import STAGES

    torch.set_num_threads(1)
    config = read_config(HERE / "photos.yaml", STAGES, [f"source.folder={folder}"])
    source, program, pool = open_source(config.source), config.programs["train"], BytePool()
    runner, rng = CpuRunner(program), np.random.default_rng(number)
    slots = np.empty((CHUNK, *slot_shape(program.result)), STORAGE[program.result.dtype])
    counts = np.memmap(path, np.int64, "r+")
    while True:
        indices = rng.integers(len(source), size=CHUNK).tolist()
        payload = source.read(indices, pool.acquire)
        runner.run(payload, Keys(0, 0, np.asarray(indices)), slots)
        pool.release(payload.buffer)
        counts[number] += CHUNK


def measure_alongside(folder: str, batches: Batches, processes: int) -> None:
    with tempfile.NamedTemporaryFile() as file:
        counts = np.memmap(file.name, np.int64, "w+", shape=(max(processes, 1),))
        command = [sys.executable, __file__, folder, "--decode", file.name]
        decoders = [subprocess.Popen([*command, str(number)]) for number in range(processes)]
        try:
            end = time.monotonic() + START_SECONDS
            while not counts[:processes].all():
                if time.monotonic() > end:
                    raise TimeoutError(f"{processes} processes have not begun within {START_SECONDS:g} s")
                next(batches)
            for _ in range(REPEATS):
                before, start = counts.sum(), time.perf_counter()
                engines, _ = rate(functools.partial(next, batches))
                cores = (counts.sum() - before) / (time.perf_counter() - start)
                print(
                    f"{processes:3} processes: engines {engines:7,.0f}, cores {cores:6,.0f}, "
                    f"together {engines + cores:7,.0f} images/s",
                    flush=True,
                )
        finally:
            for process in decoders:
                process.kill()
                process.wait()


def main() -> None:
    folder, *arguments = sys.argv[1:]
    if arguments[:1] == ["--decode"]:
        decode_on(folder, arguments[1], int(arguments[2]))
    batches = gpuflow_batches(folder, [])
    print(f"{torch.cuda.get_device_name()}, {Path('/proc/cpuinfo').read_text().count('processor')} cores")
    for processes in map(int, arguments or ["0", "2", "4", "8", "12"]):
        measure_alongside(folder, batches, processes)


if __name__ == "__main__":
    main()
