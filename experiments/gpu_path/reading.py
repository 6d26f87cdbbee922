"""Measures files per second read by threads, and by threads that delegate to processes. Needs no GPU.

    gpuflow samples /dev/shm/photos -n 2048
    python experiments/gpu_path/reading.py /dev/shm/photos

Reads chunks of 256 files from the page cache into reused buffers, as the loader does.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path

from gpuflow.loader.read_workers import ProcessStorage
from gpuflow.runtime.buffers import BytePool
from gpuflow.runtime.memory import shared
from gpuflow.runtime.threads import QuickSwitching
from gpuflow.sources.storage import LocalStorage, Storage

CHUNK, SECONDS = 256, 2.0
COUNTS = (1, 2, 3, 4)


def rate(storage: Storage, paths: list[bytes], threads: int) -> float:
    """Measure files per second."""
    pool, counts = BytePool(make=shared), [0] * threads
    begin = time.perf_counter() + 0.5
    end = begin + SECONDS

    def work(number: int) -> None:
        place = number * 7919
        while (now := time.perf_counter()) < end:
            place = (place + CHUNK) % max(1, len(paths) - CHUNK)
            payload = storage.read(paths[place : place + CHUNK], pool.acquire)
            pool.release(payload.buffer)
            counts[number] += len(payload) if now >= begin else 0

    workers = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return sum(counts) / (time.perf_counter() - begin)


def main() -> None:
    paths = [os.fsencode(path) for path in sorted(Path(sys.argv[1]).rglob("*.jpg"))]
    print(f"{len(paths)} files, {len(os.sched_getaffinity(0))} cores")
    switching = QuickSwitching(0.00002)  # as in a loader for a GPU
    for threads in COUNTS:
        alone = rate(LocalStorage(), paths, threads)
        storage = ProcessStorage(threads)
        by_processes = rate(storage, paths, threads)
        storage.close()
        print(f"{threads} thread(s): {alone:,.0f} files/s; with a process each: {by_processes:,.0f}", flush=True)
    switching.end()


if __name__ == "__main__":
    main()
