"""Local files read by worker processes, straight into memory that they share with this one.

A thread that reads releases the interpreter four times a file, and must get it back each time, from threads that
launch work on a GPU and from a training step that does the same. More such threads read no faster; processes do
(measured in experiments/gpu_path/NOTES.md). So where a GPU decodes, each reading thread hands its files to a worker,
which reads them with the code of `LocalStorage`. The thread waits twice: until the worker knows how much memory it
needs, and until it has read. The worker also reads the images' headers for the decoder (`Prescan`).
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar, final

import numpy as np
from numpy.typing import NDArray

from gpuflow.decode.header_scan import Prescan
from gpuflow.errors import GpuflowError
from gpuflow.runtime.worker_pool import ParentConnection, WorkerConnection, WorkerPool
from gpuflow.sources import Allocate, Payload, Source, without_records
from gpuflow.sources.storage import LocalStorage, ReadAt, Shard

__all__ = ["ProcessReader", "ProcessStorage", "prepare", "work"]

T = TypeVar("T")
_GetPrescan = Callable[[], Prescan | None]


def _no_prescan() -> None:
    """Workers only read."""


@final
class ProcessStorage:
    """A local storage whose files are read by worker processes into buffers of `memory.shared`.

    A request that no worker can take, that fails there, or that is for a buffer that cannot be shared, is read on the
    caller's thread, which raises what it has to.

    Args:
        count: workers to start. prescan: returns what a worker does with what it reads next, or None; that can be
            pickled, and so can its results.
    """

    remote = False

    def __init__(self, count: int, prescan: _GetPrescan = _no_prescan) -> None:
        self._local = LocalStorage()
        self._workers = _Workers(count, prescan, self._local)

    def __reduce__(self) -> tuple[type[LocalStorage], tuple[()]]:
        return LocalStorage, ()  # in another process it needs no workers

    def read(self, paths: Sequence[bytes], allocate: Allocate) -> Payload:
        return self._workers.request("read", (list(paths),), self._local.read, allocate)

    def read_ranges(
        self, shards: Sequence[Shard], starts: Sequence[int], sizes: Sequence[int], allocate: Allocate
    ) -> Payload:
        arguments = (list(shards), list(starts), list(sizes))
        return self._workers.request("read_ranges", arguments, self._local.read_ranges, allocate)

    def load(self, path: str) -> bytes:
        return self._local.load(path)

    def inspect(self, paths: Sequence[str]) -> list[Shard | str]:
        return self._local.inspect(paths)

    def scan(self, shards: Sequence[Shard], scanner: Callable[[Shard, ReadAt], T]) -> Iterator[T]:
        return self._local.scan(shards, scanner)

    def close(self) -> None:
        self._workers.close()
        self._local.close()


@final
class ProcessReader:
    """A source that worker processes read, as those of `ProcessStorage` do: one whose samples are in several storages,
    or in files whose format it reads by itself.

    Args:
        source: each worker has a copy. Closing this does not close it.
    """

    def __init__(self, source: Source, count: int, prescan: _GetPrescan = _no_prescan) -> None:
        self._source = source
        self._workers = _Workers(count, prescan, without_records(source))

    def read(self, indices: Sequence[int], allocate: Allocate) -> Payload:
        """See `Source.read`."""
        return self._workers.request("read", (list(indices),), self._source.read, allocate)

    def close(self) -> None:
        """Kill the workers."""
        self._workers.close()


@final
class _Workers:
    """Worker processes that each have a copy of a storage or a source, and call its methods."""

    def __init__(self, count: int, prescan: _GetPrescan, reader: LocalStorage | Source) -> None:
        self._prescan = prescan
        self._pool = WorkerPool(__name__, connections=[1] * count, setup=reader, task="read", handshake=False)

    def request(
        self, method: str, arguments: tuple[Any, ...], read_here: Callable[..., Payload], allocate: Allocate
    ) -> Payload:
        allocated: list[NDArray[np.uint8]] = []

        def allocate_once(size: int) -> NDArray[np.uint8]:
            """The buffer that a lost worker was to fill is not lost."""
            if not allocated:
                allocated.append(allocate(size))
            return allocated[0] if len(allocated[0]) >= size else allocate(size)

        def exchange(worker: WorkerConnection) -> Payload | None:
            worker.send((method, arguments, self._prescan()))
            size = worker.answer()
            if size is None:
                return None
            buffer = allocate_once(size)
            if not worker.share(buffer):
                return None
            answer = worker.answer()
            if answer is None:
                return None
            offsets, sizes, errors, prescan, cpu_s = answer
            return Payload(buffer=buffer, offsets=offsets, sizes=sizes, errors=errors, prescan=prescan, cpu_s=cpu_s)

        payload = self._pool.request(exchange)
        if payload is None and self._pool.closed:
            raise ConnectionAbortedError("this storage was closed while a worker process read from it")
        return payload if payload is not None else read_here(*arguments, allocate_once)

    def close(self) -> None:
        self._pool.close()


# --- the worker -------------------------------------------------------------------------------------------------------


class _NotShared(Exception):
    """The buffer is not shared memory."""


def prepare(setup: bytes) -> LocalStorage | Source:
    """What reads, unpickled."""
    reader: LocalStorage | Source = pickle.loads(setup)
    return reader


def work(connection: ParentConnection, reader: LocalStorage | Source) -> None:
    """Answers requests until the connection is closed."""

    def allocate(size: int) -> NDArray[np.uint8]:
        connection.send(size)
        memory = connection.memory()
        if memory is None:
            raise _NotShared
        return memory

    while True:
        method, arguments, prescan = connection.recv()
        start = time.thread_time()
        answer = None
        try:
            payload: Payload = getattr(reader, method)(*arguments, allocate)
            found = prescan(payload) if prescan is not None else None
            answer = payload.offsets, payload.sizes, payload.errors, found, time.thread_time() - start
        except _NotShared:
            continue
        except (GpuflowError, MemoryError):  # raised again by the thread that reads instead
            pass
        connection.send(answer)
