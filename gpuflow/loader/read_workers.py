"""Local files read by processes of their own, straight into memory that they share with this one.

A thread that reads lets go of the interpreter four times a file, and must get it back each time, from threads that
launch work on a GPU and from a training step that does the same. More such threads read no faster; processes do
(measured in experiments/gpu_path/NOTES.md). So where a GPU decodes, each reading thread hands its files to a process,
which reads them by the very code of `LocalStorage`. It waits twice: until the process knows how much memory it needs,
and until it has read. What a decoder wants to know of the bytes beforehand is found out there too.

A process that ends, or cannot be started, spoils no read: what it should have read is read here.
"""

from __future__ import annotations

import logging
import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, TypeVar, final

import numpy as np
from numpy.typing import NDArray

from gpuflow.decode.header_scan import Prescan
from gpuflow.runtime.worker_pool import Channel, Crew, Peer
from gpuflow.sources.payload import Allocate, Payload
from gpuflow.sources.storage import LocalStorage, ReadAt, Shard

__all__ = ["ProcessStorage", "prepare", "work"]

T = TypeVar("T")

_LOG = logging.getLogger(__name__)


@final
class ProcessStorage:
    """A local storage whose files are read by processes, as long as their buffers are of `memory.shared`.

    Args:
        count: processes to start. prescan: what each does with what it has read; can be pickled, with its results.
    """

    def __init__(self, count: int, prescan: Prescan | None = None) -> None:
        self._local, self._crew = LocalStorage(), Crew()
        setup = pickle.dumps(prescan, pickle.HIGHEST_PROTOCOL)
        try:
            for channel in self._crew.hire(__name__, connections=[1] * count, setup=setup):
                self._crew.give(channel)
        except OSError as error:
            _LOG.warning("no process to read with: %s; a thread reads instead", error)

    def __reduce__(self) -> tuple[type[LocalStorage], tuple[()]]:
        return LocalStorage, ()  # in another process it needs none

    def read(self, paths: Sequence[bytes], allocate: Allocate) -> Payload:
        return self._ask("read", (list(paths),), self._local.read, allocate)

    def read_ranges(
        self, shards: Sequence[Shard], starts: Sequence[int], sizes: Sequence[int], allocate: Allocate
    ) -> Payload:
        return self._ask("read_ranges", (list(shards), list(starts), list(sizes)), self._local.read_ranges, allocate)

    def _ask(self, name: str, arguments: tuple[Any, ...], here: Callable[..., Payload], allocate: Allocate) -> Payload:
        channel = self._crew.take()
        if channel is None:
            return here(*arguments, allocate)
        taken: list[NDArray[np.uint8]] = []

        def take(size: int) -> NDArray[np.uint8]:
            if not taken:
                taken.append(allocate(size))
            return taken[0] if len(taken[0]) >= size else allocate(size)

        try:
            payload = _read_there(channel, name, arguments, take)
        except (OSError, EOFError) as error:
            self._crew.lose(channel)
            if self._crew.closed:
                raise
            _LOG.warning("a process that reads has ended: %r; a thread reads instead", error)
            return here(*arguments, take)
        except BaseException:
            self._crew.lose(channel)  # in the middle of an answer that nobody will take
            raise
        self._crew.give(channel)
        return payload if payload is not None else here(*arguments, take)

    def load(self, path: str) -> bytes:
        return self._local.load(path)

    def inspect(self, paths: Sequence[str]) -> list[Shard | str]:
        return self._local.inspect(paths)

    def scan(self, shards: Sequence[Shard], scanner: Callable[[Shard, ReadAt], T]) -> Iterator[T]:
        return self._local.scan(shards, scanner)

    def close(self) -> None:
        self._crew.close()
        self._local.close()


def _read_there(channel: Channel, name: str, arguments: tuple[Any, ...], allocate: Allocate) -> Payload | None:
    """What `LocalStorage` answers there, in a buffer of `allocate`; None if that is not shared memory."""
    channel.send((name, arguments))
    buffer = allocate(channel.answer())
    if not channel.share(buffer):
        return None
    offsets, sizes, errors, prescan, cpu_s = channel.answer()
    return Payload(buffer=buffer, offsets=offsets, sizes=sizes, errors=errors, prescan=prescan, cpu_s=cpu_s)


# --- in the process ---------------------------------------------------------------------------------------------------


class _Refused(Exception):
    """The buffer is not shared memory."""


def prepare(setup: bytes) -> Prescan | None:
    """What is to be done with what is read."""
    prescan: Prescan | None = pickle.loads(setup)
    return prescan


def work(peer: Peer, prescan: Prescan | None) -> None:
    """Answers until nobody asks any more."""
    storage = LocalStorage()

    def take(size: int) -> NDArray[np.uint8]:
        peer.send(size)
        memory = peer.memory()
        if memory is None:
            raise _Refused
        return memory

    while True:
        name, arguments = peer.recv()
        begun = time.thread_time()
        with suppress(_Refused):
            payload: Payload = getattr(storage, name)(*arguments, take)
            found = prescan(payload) if prescan is not None else None
            peer.send((payload.offsets, payload.sizes, payload.errors, found, time.thread_time() - begun))
