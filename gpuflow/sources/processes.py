"""Local files read by processes of their own, straight into memory that they share with this one.

A thread that reads lets go of the interpreter four times a file, and must get it back each time, from threads that
launch work on a GPU and from a training step that does the same. More such threads read no faster; processes do
(measured in experiments/gpu_path/NOTES.md). So where a GPU decodes, each reading thread hands its files to a process,
which reads them by the very code of `LocalStorage`. It waits twice: until the process knows how much memory it needs,
and until it has read.

A process that ends, or cannot be started, spoils no read: what it should have read is read here.
"""

from __future__ import annotations

import json
import logging
import mmap
import os
import queue
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any, TypeVar, final

import numpy as np
from numpy.typing import NDArray

from gpuflow.memory import shared_block, shared_keys
from gpuflow.sources.base import Allocate, Payload
from gpuflow.sources.storage import LocalStorage, ReadAt, Shard, Storage

__all__ = ["ProcessStorage", "in_processes", "work"]

T = TypeVar("T")

_PROGRAM = """\
import json, sys
sys.path[:] = json.loads(sys.argv[2])
from gpuflow.sources.processes import work
work(int(sys.argv[1]))
"""
_ANSWER_SECONDS, _END_SECONDS = 300.0, 2.0
_LOG = logging.getLogger(__name__)


def in_processes(storage: Storage, count: int) -> Storage:
    """The storage, read by `count` processes where it is this machine's; another one is waited for anyway."""
    return ProcessStorage(storage, count) if isinstance(storage, LocalStorage) else storage


@final
class ProcessStorage:
    """A local storage whose files are read by processes, as long as their buffers are of `memory.shared`.

    Args:
        local: reads where no process is free, or none can. count: processes to start.
    """

    def __init__(self, local: LocalStorage, count: int) -> None:
        self._local, self._pid = local, os.getpid()
        self._idle: queue.SimpleQueue[_Reader] = queue.SimpleQueue()
        readers = []
        for _ in range(count):
            try:
                readers.append(_Reader())
            except OSError as error:
                _LOG.warning("no process to read with: %s; a thread reads instead", error)
                break
        for reader in readers:
            self._idle.put(reader)
        self._end = weakref.finalize(self, _end, readers)

    def read(self, paths: Sequence[bytes], allocate: Allocate) -> Payload:
        return self._ask("read", (list(paths),), self._local.read, allocate)

    def read_ranges(
        self, shards: Sequence[Shard], starts: Sequence[int], sizes: Sequence[int], allocate: Allocate
    ) -> Payload:
        return self._ask("read_ranges", (list(shards), list(starts), list(sizes)), self._local.read_ranges, allocate)

    def _ask(self, name: str, arguments: tuple[Any, ...], here: Callable[..., Payload], allocate: Allocate) -> Payload:
        try:
            if os.getpid() != self._pid:  # a forked child, whose parent speaks with the processes
                raise queue.Empty
            reader = self._idle.get_nowait()
        except queue.Empty:
            return here(*arguments, allocate)
        taken: list[NDArray[np.uint8]] = []

        def take(size: int) -> NDArray[np.uint8]:
            if not taken:
                taken.append(allocate(size))
            return taken[0] if len(taken[0]) >= size else allocate(size)

        try:
            payload = reader.ask(name, arguments, take)
        except (OSError, EOFError) as error:
            reader.end()
            if not self._end.alive:
                raise
            _LOG.warning("a process that reads has ended: %r; a thread reads instead", error)
            return here(*arguments, take)
        except BaseException:
            reader.end()  # in the middle of an answer that nobody will take
            raise
        self._idle.put(reader)
        return payload if payload is not None else here(*arguments, take)

    def load(self, path: str) -> bytes:
        return self._local.load(path)

    def inspect(self, paths: Sequence[str]) -> list[Shard | str]:
        return self._local.inspect(paths)

    def scan(self, shards: Sequence[Shard], scanner: Callable[[Shard, ReadAt], T]) -> Any:
        return self._local.scan(shards, scanner)

    def close(self) -> None:
        self._end()
        self._local.close()


def _end(readers: Sequence[_Reader]) -> None:
    for reader in readers:
        reader.end()


class _Reader:
    """A process that reads, seen from here. One thread at a time asks it. Raises OSError where none can be started."""

    def __init__(self) -> None:
        self._connection, there = Pipe()
        with there:
            number = there.fileno()
            command = [sys.executable or "python3", "-c", _PROGRAM, str(number), json.dumps(sys.path)]
            # A session of its own: a Ctrl-C in the terminal is this process's to deal with.
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, pass_fds=[number], start_new_session=True
            )
        self._known: set[int] = set()

    def ask(self, name: str, arguments: tuple[Any, ...], allocate: Allocate) -> Payload | None:
        """What `LocalStorage` answers there, in a buffer of `allocate`; None if that is not shared memory.

        Raises OSError or EOFError where the process has ended, or does not answer.
        """
        gone = self._known - shared_keys()
        self._known -= gone
        self._connection.send((name, arguments, gone))
        size = self._answer()
        buffer = allocate(size)
        block = shared_block(buffer)
        if block is None:
            self._connection.send(None)
            return None
        self._connection.send((block.key, len(buffer), block.key in self._known))
        if block.key not in self._known:
            send_handle(self._connection, block.descriptor, self._process.pid)
            self._known.add(block.key)
        offsets, sizes, errors, cpu_s = self._answer()
        return Payload(buffer=buffer, offsets=offsets, sizes=sizes, errors=errors, cpu_s=cpu_s)

    def _answer(self) -> Any:
        if not self._connection.poll(_ANSWER_SECONDS):
            raise TimeoutError(f"no answer within {_ANSWER_SECONDS:g} s")
        return self._connection.recv()

    def end(self) -> None:
        """It holds nothing that could be lost."""
        self._process.kill()
        self._connection.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_SECONDS)


# --- in the process ---------------------------------------------------------------------------------------------------


class _Refused(Exception):
    """The buffer is not shared memory."""


def work(descriptor: int) -> None:
    """The life of a process that reads: it answers until the other end of its connection is closed."""
    with suppress(EOFError, OSError), Connection(descriptor) as connection:
        storage, buffers = LocalStorage(), _Buffers(connection)
        while True:
            name, arguments, gone = connection.recv()
            buffers.forget(gone)
            begun = time.process_time()
            with suppress(_Refused):
                payload: Payload = getattr(storage, name)(*arguments, buffers.take)
                cpu_s = time.process_time() - begun
                connection.send((payload.offsets, payload.sizes, payload.errors, cpu_s))


class _Buffers:
    """Memory of the process that asks, mapped here as it is first written to."""

    def __init__(self, connection: Connection[Any, Any]) -> None:
        self._connection = connection
        self._mapped: dict[int, NDArray[np.uint8]] = {}

    def take(self, size: int) -> NDArray[np.uint8]:
        """A buffer of at least `size` bytes, which the process that asks chooses."""
        self._connection.send(size)
        answer = self._connection.recv()
        if answer is None:
            raise _Refused
        key, length, known = answer
        if not known:
            descriptor = recv_handle(self._connection)
            try:
                self._mapped[key] = np.frombuffer(mmap.mmap(descriptor, length), np.uint8)
            finally:
                os.close(descriptor)
        return self._mapped[key]

    def forget(self, keys: set[int]) -> None:
        for key in keys:
            del self._mapped[key]
