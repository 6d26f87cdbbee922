"""Loads the same batches through gpuflow's workers or SPDL's: one measurement of run.py, in a separate process.

`python experiments/worker_pool/arms.py '{"arm": "gpuflow processes", "kill": false, "seconds": 2.5}'` prints a line of
JSON: metric -> value.
"""

from __future__ import annotations

import itertools
import json
import math
import multiprocessing
import os
import queue
import signal
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from numpy.typing import NDArray
from spdl.pipeline import AsyncQueue, PipelineBuilder, SharedMemorySegmentPool, run_pipeline_in_subprocess
from spdl.pipeline.defs import MAIN_PROCESS, ProcessPoolExecutorConfig

import gpuflow
from gpuflow.config import read_config
from gpuflow.execute.cpu.runner import CpuRunner
from gpuflow.loader.sampler import ShuffledOrder, Steps
from gpuflow.pipeline.program import Program
from gpuflow.pipeline.rng import Keys
from gpuflow.pipeline.views import as_batch, slot_shape
from gpuflow.sources import Source, open_source

__all__ = ["ARMS"]

CONFIG = Path(__file__).parent / "photos.yaml"
WORKERS = 2
CHUNK = 32
"""Images that a worker decodes in one call."""
BUFFERS = 5
"""Batches in memory that the consumer's process assembles; gpuflow has prefetch + 2 = 5."""
AFTER_KILL = 24
"""Batches to wait for after a worker was killed: more than any arm has finished by then."""
START_SECONDS = 120.0
"""All that comes before a worker is killed."""
HANG_SECONDS = 20.0
"""A loader that gives neither a batch nor an error for so long hangs."""
FORKED_WITH = ["torch", "cv2", "spdl.pipeline", "gpuflow.execute.cpu.runner", "gpuflow.sources"]
"""Modules that the fork server imports once, so that SPDL's workers start as warm as gpuflow's."""

Pixels = NDArray[np.uint8] | torch.Tensor


@dataclass(frozen=True, slots=True)
class Item:
    """Samples of one batch, from row `start` of it on. `batch` counts over the epochs."""

    batch: int
    start: int
    epoch: int
    positions: NDArray[np.int64]
    indices: NDArray[np.int64]


@dataclass(frozen=True)
class Workload:
    """What all arms load. Can be pickled."""

    program: Program
    source: Source
    seed: int
    batch_size: int

    @classmethod
    def read(cls) -> Workload:
        config = read_config(CONFIG, gpuflow.stage_table(), ())
        size = config.pipelines["train"].batch.size
        assert size is not None
        return cls(config.program("train"), open_source(config.source), config.source.seed, size)

    @property
    def steps(self) -> Steps:
        return Steps(size=len(self.source), batch_size=self.batch_size, drop_last=True)

    def batch(self, number: int) -> Item:
        """Batch `number` in the sampler's order, counted over the epochs."""
        epoch, step = divmod(number, len(self.steps))
        positions, _ = self.steps.positions(step)
        order = ShuffledOrder(size=len(self.source), seed=self.seed)
        return Item(number, 0, epoch, positions, order.indices(epoch, positions))

    def pixels(self, count: int) -> NDArray[np.uint8]:
        return np.empty((count, *slot_shape(self.program.result)), np.uint8)

    def tensor(self, pixels: NDArray[np.uint8]) -> torch.Tensor:
        """A batch as gpuflow hands it to the consumer: N, C, H, W, in the same memory."""
        return as_batch(pixels, self.program.result)


@dataclass(frozen=True)
class Items:
    """Batches without end, of every `every` the one numbered `first`, cut into items of `size` samples."""

    workload: Workload
    size: int
    first: int = 0
    every: int = 1

    def __iter__(self) -> Iterator[Item]:
        for number in itertools.count(self.first, self.every):
            whole = self.workload.batch(number)
            for start in range(0, len(whole.positions), self.size):
                part = slice(start, start + self.size)
                yield Item(number, start, whole.epoch, whole.positions[part], whole.indices[part])


class Decode:
    """Reads and decodes an item as gpuflow's own workers do. Can be pickled before its first call.

    shared: the pixels are a tensor in separate shared memory, which torch passes to another process by its handle;
    else an array.
    """

    def __init__(self, workload: Workload, *, shared: bool = False) -> None:
        self._workload, self._shared = workload, shared

    @cached_property
    def _runner(self) -> CpuRunner:
        return CpuRunner(self._workload.program)

    @cached_property
    def _encoded(self) -> NDArray[np.uint8]:
        return np.empty(16 << 20, np.uint8)

    def __call__(self, item: Item) -> tuple[Item, Pixels]:
        pixels = self._workload.pixels(0 if self._shared else len(item.indices))
        if not self._shared:
            self._fill(item, pixels)
            return item, pixels
        shape = (len(item.indices), *pixels.shape[1:])
        new_shared: Any = torch.UntypedStorage._new_shared  # what torch's own default_collate calls
        tensor: Any = torch.empty(0, dtype=torch.uint8)
        tensor.set_(new_shared(math.prod(shape)), 0, shape)
        self._fill(item, tensor.numpy())
        return item, tensor

    def _fill(self, item: Item, pixels: NDArray[np.uint8]) -> None:
        workload = self._workload
        for start in range(0, len(pixels), CHUNK):
            part = slice(start, start + CHUNK)
            payload = workload.source.read(item.indices[part].tolist(), self._allocate)
            faults = self._runner.run(payload, Keys(workload.seed, item.epoch, item.positions[part]), pixels[part])
            for fault in faults:
                if fault is not None:
                    raise RuntimeError(f"a photograph cannot be read: {fault}; make them anew with `gpuflow samples`")

    def _allocate(self, size: int) -> NDArray[np.uint8]:
        return self._encoded if size <= len(self._encoded) else np.empty(size, np.uint8)


# --- the arms ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Arm:
    """Batches without end in the sampler's order.

    ready: whether all workers have started by now. clean_up: removes what outlives the workers.
    """

    batches: Iterator[torch.Tensor]
    ready: Callable[[], bool] = lambda: True
    clean_up: Callable[[], None] = lambda: None


def gpuflow_workers(processes: int) -> Arm:
    """gpuflow's loader, by threads or by processes that write pixels into the batch's shared memory."""
    loader = gpuflow.load(CONFIG, overrides=[f"run.threads={WORKERS}", f"run.processes={processes}"])
    batches = (images for _ in itertools.count() for images, _ in loader)
    return Arm(batches, lambda: not loader.stats().get("processes", {}).get("starting"))


def region_with_arrays() -> Arm:
    """An SPDL region that decodes chunks; arrays come back pickled through its queue and are copied into the batch."""
    workload = Workload.read()
    chunks = _region(workload, Items(workload, CHUNK), Decode(workload))

    def batches() -> Iterator[torch.Tensor]:
        buffers = [workload.pixels(workload.batch_size) for _ in range(BUFFERS)]
        early: dict[tuple[int, int], Pixels] = {}
        for number in itertools.count():
            batch = buffers[number % BUFFERS]
            for start in range(0, workload.batch_size, CHUNK):
                np.copyto(batch[start : start + CHUNK], _await(chunks, early, (number, start)))
            yield workload.tensor(batch)

    return Arm(batches())


def region_with_shared_tensors() -> Arm:
    """An SPDL region that decodes whole batches into tensors that torch shares: no pixels are pickled."""
    workload = Workload.read()
    whole = _region(workload, Items(workload, workload.batch_size), Decode(workload, shared=True))

    def batches() -> Iterator[torch.Tensor]:
        early: dict[tuple[int, int], Pixels] = {}
        for number in itertools.count():
            pixels = _await(whole, early, (number, 0))
            assert isinstance(pixels, torch.Tensor)
            yield workload.tensor(pixels.numpy())

    return Arm(batches())


def subprocesses_with_segments() -> Arm:
    """An SPDL pipeline in each of two processes, which decode every other batch and copy it into a segment.

    The pool's lock belongs to the default start method, not to `mp_context`, so the default has to be set.
    """
    _prepare_fork_server()
    workload = Workload.read()
    bytes_of_a_batch = workload.pixels(workload.batch_size).nbytes

    pools = [SharedMemorySegmentPool(bytes_of_a_batch, BUFFERS) for _ in range(WORKERS)]

    def start(worker: int) -> Iterable[Any]:
        items = Items(workload, workload.batch_size, first=worker, every=WORKERS)
        builder: Any = PipelineBuilder()
        config = builder.add_source(items).pipe(Decode(workload)).add_sink(1).get_config()
        return run_pipeline_in_subprocess(
            config,
            num_threads=2,  # one for the source, one that decodes
            queue_class=AsyncQueue,
            task_hook_factory=_no_hooks,
            initializer=_one_thread,
            mp_context="forkserver",
            arena=pools[worker],
        )

    with ThreadPoolExecutor(WORKERS) as threads:  # each start waits until its process is ready
        started = list(threads.map(start, range(WORKERS)))

    def batches() -> Iterator[torch.Tensor]:
        by_worker = [iter(iterable) for iterable in started]
        for number in itertools.count():
            item, pixels = next(by_worker[number % WORKERS])
            assert item.batch == number
            yield workload.tensor(pixels)

    def clean_up() -> None:
        for pool in pools:
            pool.unlink()

    return Arm(batches(), clean_up=clean_up)


ARMS: Mapping[str, Callable[[], Arm]] = {
    "gpuflow threads": partial(gpuflow_workers, 0),
    "gpuflow processes": partial(gpuflow_workers, WORKERS),
    "spdl region, arrays": region_with_arrays,
    "spdl region, shared tensors": region_with_shared_tensors,
    "spdl subprocesses, segment pool": subprocesses_with_segments,
}


def _region(workload: Workload, items: Items, decode: Decode) -> Iterator[tuple[Item, Pixels]]:
    """What a region of two processes makes of the items, in the order in which they are finished."""
    _prepare_fork_server()
    builder: Any = PipelineBuilder()
    workers = ProcessPoolExecutorConfig(max_workers=WORKERS, mp_context="forkserver", initializer=_one_thread)
    pipeline = (
        builder.add_source(items)
        .to(workers)
        .pipe(decode)
        .to(MAIN_PROCESS)
        .add_sink(2)
        .build(num_threads=1, queue_class=AsyncQueue, task_hook_factory=_no_hooks, use_thread_output_queue=True)
    )
    with pipeline.auto_stop():
        yield from pipeline.get_iterator()


def _await(
    finished: Iterator[tuple[Item, Pixels]], early: dict[tuple[int, int], Pixels], wanted: tuple[int, int]
) -> Pixels:
    """The pixels of item `wanted` = (batch, start); `early` holds others that were finished before it."""
    while wanted not in early:
        item, pixels = next(finished)
        early[item.batch, item.start] = pixels
    return early.pop(wanted)


def _prepare_fork_server() -> None:
    multiprocessing.set_start_method("forkserver")
    multiprocessing.set_forkserver_preload(FORKED_WITH)


def _no_hooks(stage: object) -> list[Any]:
    """No statistics of SPDL, which gpuflow's own pipelines leave out, too."""
    return []


def _one_thread() -> None:
    torch.set_num_threads(1)


# --- measurements -----------------------------------------------------------------------------------------------------


def throughput(arm: Arm, opened: float, seconds: float) -> dict[str, float]:
    """images_per_s, cpu_s_per_1000 and first_batch_s. opened: when the arm began to be opened, by perf_counter."""
    next(arm.batches)
    first = time.perf_counter() - opened
    while not arm.ready():
        next(arm.batches)
    start = time.perf_counter()
    while time.perf_counter() - start < seconds / 4:  # warm-up
        next(arm.batches)
    count, before, start = 0, sum(cpu_seconds().values()), time.perf_counter()
    while (elapsed := time.perf_counter() - start) < seconds:
        count += len(next(arm.batches))
    used = sum(cpu_seconds().values()) - before
    return {"images_per_s": count / elapsed, "cpu_s_per_1000": 1000 * used / count, "first_batch_s": first}


def kill_one(arm: Arm) -> dict[str, float | str]:
    """What comes after a worker got SIGKILL, a quarter into an epoch.

    batches_after_kill: share of the next `AFTER_KILL` batches that arrive with the right pixels. hangs, errors: 1 or 0.
    """
    workload = Workload.read()
    steps = len(workload.steps)
    found: queue.SimpleQueue[tuple[int, int] | str] = queue.SimpleQueue()
    started, begin, killed = threading.Event(), threading.Event(), threading.Event()

    def consume() -> None:
        last = -1
        try:
            for number, images in enumerate(arm.batches):
                if killed.is_set():
                    found.put((number, checksum(images)))
                elif not started.is_set():
                    if arm.ready():
                        started.set()
                elif number % steps == steps // 4:
                    begin.set()
                    killed.wait()
                    last = number + AFTER_KILL
                if number == last:
                    return
        except Exception as error:
            if not killed.is_set():
                raise
            found.put(f"{type(error).__name__}: {error}".splitlines()[0])

    threading.Thread(target=consume, daemon=True).start()
    _wait(started)
    idle = cpu_seconds()
    _wait(begin)
    spent = {task: now - idle.get(task, 0.0) for task, now in cpu_seconds().items() if task != os.getpid()}
    os.kill(max(spent, key=lambda task: spent[task]), signal.SIGKILL)  # the process that decoded most meanwhile
    killed.set()
    arrived: list[tuple[int, int]] = []
    outcome = "went on"
    while len(arrived) < AFTER_KILL and outcome == "went on":
        try:
            answer = found.get(timeout=HANG_SECONDS)
        except queue.Empty:
            outcome = f"hang: nothing for {HANG_SECONDS:g} s"
        else:
            if isinstance(answer, str):
                outcome = f"error: {answer}"
            else:
                arrived.append(answer)
    _one_thread()
    decode, right = Decode(workload), 0
    for number, found_sum in arrived:
        pixels = decode(workload.batch(number))[1]
        assert isinstance(pixels, np.ndarray)
        right += found_sum == checksum(workload.tensor(pixels))
    return {
        "batches_after_kill": right / AFTER_KILL,
        "hangs_after_kill": float(outcome.startswith("hang")),
        "errors_after_kill": float(outcome.startswith("error")),
        "outcome": f"{right} of {AFTER_KILL} batches right; {outcome}",
    }


def _wait(event: threading.Event) -> None:
    if not event.wait(START_SECONDS):
        raise RuntimeError(f"no batch to begin with within {START_SECONDS:g} s; what was raised stands above")


def checksum(images: torch.Tensor) -> int:
    return zlib.crc32(images.contiguous().numpy().tobytes())


def cpu_seconds() -> dict[int, float]:
    """Processor seconds, of the user and the system, of this process and each that descends from it."""
    spent = {}
    own = psutil.Process()
    for process in (own, *own.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            spent[process.pid] = times.user + times.system
    return spent


def end_descendants() -> None:
    """End what an arm has started, which may hang; the resource tracker stays and unlinks what they shared."""
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if "multiprocessing.resource_tracker" not in " ".join(process.cmdline()):
                process.kill()


def main() -> None:
    job = json.loads(sys.argv[1])
    opened = time.perf_counter()
    arm = ARMS[job["arm"]]()
    try:
        found = kill_one(arm) if job["kill"] else throughput(arm, opened, job["seconds"])
        print(json.dumps(found), flush=True)
    finally:
        end_descendants()
        arm.clean_up()
    os._exit(0)  # no loader's threads are waited for


if __name__ == "__main__":
    main()
