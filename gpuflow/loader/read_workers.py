"""Local files read by worker processes, straight into memory that they share with this one.

A thread that reads a chunk needs the interpreter between its native calls, and must get it back from threads that
launch work on a GPU and from a training step that does the same. While that happened four times a file, more threads
read no faster, and processes did (measured in experiments/gpu_path/NOTES.md). So where a GPU decodes, each reading
thread hands its files to a worker, which reads them with the code of `LocalStorage`. The thread waits twice: until the
worker knows how much memory it needs, and until it has read. The worker also scans what it reads and rewrites
progressive files, if the thread says for which samples (`scanned`).
"""

from __future__ import annotations

import logging
import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeVar, final

import numpy as np
from numpy.typing import NDArray

from gpuflow.execute.chunk_scan import ChunkScan, Prescan
from gpuflow.pipeline.stage import Keys
from gpuflow.runtime.worker_pool import ParentConnection, WorkerConnection, WorkerPool
from gpuflow.sources import Allocate, Payload, Source, without_records
from gpuflow.sources.storage import LocalStorage, ReadAt, Shard

__all__ = ["ProcessReader", "ProcessStorage", "prepare", "scanned", "work"]

_LOG = logging.getLogger(__name__)
_ROOM_KEPT = 16
"""A worker requests room after the files for rewritten progressive files: the largest that a recent chunk needed,
less a sixteenth for each chunk since then, and at most the size of the files themselves."""
T = TypeVar("T")
Wanted = tuple[Keys, NDArray[np.bool_] | None]
_wanted: ContextVar[Wanted | None] = ContextVar("wanted", default=None)


@contextmanager
def scanned(keys: Keys, unchecked: NDArray[np.bool_] | None = None) -> Iterator[None]:
    """Inside the block, a worker that reads files for this thread also scans them, for samples with these keys.

    The result is the payload's `prescan`, unless this thread had to read the files itself.

    unchecked: which of the samples' files are to be checked, too; None for none.
    """
    token = _wanted.set((keys, unchecked))
    try:
        yield
    finally:
        _wanted.reset(token)


@final
class ProcessStorage:
    """A local storage whose files are read by worker processes into buffers of `memory.shared`.

    A request that no worker can take, that fails there, or that is for a buffer that cannot be shared, is read on the
    caller's thread, which raises what it has to.

    Args:
        count: workers to start.
        prescan: what they call on what they read; they only read if it is None, or if it cannot be pickled, such as one
            with a stage that is defined in the script that is running.
    """

    remote = False

    def __init__(self, count: int, prescan: Prescan | None = None) -> None:
        self._local = LocalStorage()
        self._workers = _Workers(count, prescan, self._local)

    def __reduce__(self) -> tuple[Any, ...]:
        return self._local.__reduce__()  # in another process it needs no workers

    def read(self, paths: Sequence[bytes], allocate: Allocate) -> Payload:
        return self._workers.request("read", (paths,), self._local.read, allocate)

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

    def __init__(self, source: Source, count: int, prescan: Prescan | None = None) -> None:
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

    def __init__(self, count: int, prescan: Prescan | None, reader: LocalStorage | Source) -> None:
        setup = _Setup(reader, _pickled(prescan))
        self._pool = WorkerPool(__name__, connections=[1] * count, setup=setup, task="read", handshake=False)

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
            worker.send((method, arguments, _wanted.get()))
            size = worker.answer()
            if size is None:
                return None
            buffer = allocate_once(size)
            if not worker.send(None, buffer):
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


class _Setup(NamedTuple):
    """reader: what reads. prescan: a pickled `Prescan` or None."""

    reader: LocalStorage | Source
    prescan: bytes


def _pickled(prescan: Prescan | None) -> bytes:
    try:
        return pickle.dumps(prescan)
    except Exception as error:  # a stage's own pickling raises any exception
        _LOG.info("processes that read do nothing else, because the pipeline cannot be pickled: %s", error)
        return pickle.dumps(None)


# --- the worker -------------------------------------------------------------------------------------------------------


class _NotShared(Exception):
    """The buffer is not shared memory."""


class _Reader(NamedTuple):
    """What a worker reads with, and what it then calls on a payload, or None."""

    reader: LocalStorage | Source
    prescan: Prescan | None


def prepare(setup: bytes) -> _Reader:
    """The setup, unpickled."""
    reader, pickled = pickle.loads(setup)
    try:
        return _Reader(reader, pickle.loads(pickled))
    except Exception:  # such as a stage that is defined in the script that started the loader
        return _Reader(reader, None)


def work(connection: ParentConnection, prepared: _Reader) -> None:
    """Answers requests until the connection is closed."""
    reader, prescan = prepared
    room = 0

    def allocate(size: int) -> NDArray[np.uint8]:
        connection.send(size + min(room, size))
        connection.recv()
        memory = connection.memory()
        if memory is None:
            raise _NotShared
        return memory

    while True:
        method, arguments, wanted = connection.recv()
        start = time.thread_time()
        answer = None
        try:
            payload: Payload = getattr(reader, method)(*arguments, allocate)
            found = _scan(prescan, payload, wanted) if prescan is not None and wanted is not None else None
            room = room if found is None else max(found.room, room - room // _ROOM_KEPT)
            answer = payload.offsets, payload.sizes, payload.errors, found, time.thread_time() - start
        except _NotShared:
            continue
        except Exception:  # raised again by the thread that reads instead
            pass
        connection.send(answer)


def _scan(prescan: Prescan, payload: Payload, wanted: Wanted) -> ChunkScan | None:
    """The scan of a payload; None if that fails, or if its source reads other files than its samples' here."""
    keys, unchecked = wanted
    if len(keys.positions) != len(payload):
        return None
    try:
        return prescan(payload, keys, unchecked)
    except Exception:  # such as that of a stage's `draw`; raised again by the thread that then scans
        return None
