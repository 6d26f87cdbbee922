"""Processes of gpuflow's own: started beside this one, spoken with over connections, given memory to write into.

For what threads cannot do beside each other because each of them needs the interpreter too often. They are started
anew, not forked, and do not import the script that started this one. A Ctrl-C in the terminal is not theirs. They end
when their connections do, so with this process in any case.
"""

from __future__ import annotations

import json
import mmap
import os
import queue
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpuflow.memory import SharedBlock, shared_block, shared_keys

__all__ = ["Channel", "Child", "Crew", "Peer", "serve"]

_PROGRAM = """\
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from gpuflow.processes import serve
serve(*sys.argv[2:])
"""
_ANSWER_SECONDS, _END_SECONDS = 300.0, 2.0


class Child:
    """A process. Raises OSError where it cannot be started.

    Args:
        module: its `work(peer, setup)` runs there, on a thread for each connection.
        connections: how many. setup: bytes that each of them gets.
    """

    def __init__(self, module: str, *, connections: int = 1, setup: bytes = b"") -> None:
        pairs = [Pipe() for _ in range(connections)]
        numbers = [there.fileno() for _, there in pairs]
        told = os.memfd_create("gpuflow_setup")
        try:
            with open(told, "wb", closefd=False) as file:
                file.write(setup)
            command = [sys.executable or "python3", "-c", _PROGRAM, json.dumps(sys.path), module, str(told)]
            self._process = subprocess.Popen(
                [*command, *map(str, numbers)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[told, *numbers],
                start_new_session=True,
            )
        finally:
            os.close(told)
            for _, there in pairs:
                there.close()
        self.channels = [Channel(here, self) for here, _ in pairs]

    @property
    def pid(self) -> int:
        return self._process.pid

    def end(self) -> None:
        """Whatever it is at. It holds nothing that could be lost. Who waits at a channel of it learns of its end."""
        self._process.kill()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_SECONDS)


class Channel:
    """This end of a connection, for one thread at a time.

    Raises OSError or EOFError where the process has ended or does not answer.
    """

    def __init__(self, connection: Connection[Any, Any], child: Child) -> None:
        self._connection, self.child = connection, child
        self._known: set[int] = set()

    def send(self, value: object) -> None:
        self._connection.send(value)

    def answered(self) -> bool:
        """Whether an answer is there."""
        return self._connection.poll()

    def answer(self) -> Any:
        if not self._connection.poll(_ANSWER_SECONDS):
            raise TimeoutError(f"no answer within {_ANSWER_SECONDS:g} s")
        return self._connection.recv()

    def share(self, memory: NDArray[Any]) -> bool:
        """Let the process write into what `memory.shared` gave. Returns whether it is that; the process is told."""
        block = shared_block(memory)
        if block is None:
            self.send(None)
            return False
        gone = self._known - shared_keys()
        known = block.key in self._known
        self._known = self._known - gone | {block.key}
        self.send((block, known, gone))
        if not known:
            send_handle(self._connection, block.descriptor, self.child.pid)
        return True

    def close(self) -> None:
        """By the thread that uses it alone: another one would go on with whatever gets its descriptor next."""
        self._connection.close()


class Crew:
    """Processes that threads ask by turns: who takes a channel has it alone until it gives it back or loses it.

    Any thread may call any method. They end with the crew.
    """

    def __init__(self) -> None:
        self._pid, self._children = os.getpid(), list[Child]()
        self._idle: queue.SimpleQueue[Channel] = queue.SimpleQueue()
        self._end = weakref.finalize(self, _end, self._children)

    def __len__(self) -> int:
        """Processes that were not lost."""
        return len(self._children)

    @property
    def closed(self) -> bool:
        return not self._end.alive

    @property
    def here(self) -> bool:
        """Whether this is the process that they work for, and not a forked child of it."""
        return os.getpid() == self._pid

    def hire(self, module: str, *, connections: int = 1, setup: bytes = b"") -> list[Channel]:
        """Start one, see `Child`. Its channels are taken; `give` them once they can be asked."""
        child = Child(module, connections=connections, setup=setup)
        self._children.append(child)
        return child.channels

    def take(self) -> Channel | None:
        """A channel that nobody has, or None."""
        try:
            return self._idle.get_nowait() if self.here else None
        except queue.Empty:
            return None

    def give(self, channel: Channel) -> None:
        self._idle.put(channel)

    def lose(self, channel: Channel) -> bool:
        """Do without the process of a taken channel: its other channels fail when they are used. Returns whether it is
        the first of them, and the crew not closed: whether it is news."""
        channel.child.end()
        channel.close()
        with suppress(ValueError):
            self._children.remove(channel.child)
            return not self.closed
        return False

    def close(self) -> None:
        """End the processes, whatever they are at."""
        self._end()
        while (channel := self.take()) is not None:
            channel.close()


def _end(children: Sequence[Child]) -> None:
    for child in tuple(children):
        child.end()


# --- in the process ---------------------------------------------------------------------------------------------------


def serve(module: str, setup: str, *connections: str) -> None:
    """The life of a process, told on its command line: the module and the descriptors."""
    work: Callable[[Peer, bytes], None] = import_module(module).work
    with open(int(setup), "rb") as file:
        file.seek(0)
        told = file.read()
    threads = [
        threading.Thread(target=_converse, args=(work, int(descriptor), told), daemon=True)
        for descriptor in connections
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    os._exit(0)


def _converse(work: Callable[[Peer, bytes], None], descriptor: int, setup: bytes) -> None:
    with suppress(EOFError, OSError), Connection(descriptor) as connection:
        work(Peer(connection), setup)


class Peer:
    """The other end of a channel. Raises EOFError or OSError once there is nobody at this one."""

    def __init__(self, connection: Connection[Any, Any]) -> None:
        self._connection = connection
        self._mapped: dict[int, NDArray[np.uint8]] = {}

    def recv(self) -> Any:
        return self._connection.recv()

    def send(self, value: object) -> None:
        self._connection.send(value)

    def memory(self) -> NDArray[np.uint8] | None:
        """What `Channel.share` was given, from its first byte on, mapped here; None if it cannot be shared."""
        told: tuple[SharedBlock, bool, set[int]] | None = self._connection.recv()
        if told is None:
            return None
        block, known, gone = told
        for key in gone:
            del self._mapped[key]
        if not known:
            descriptor = recv_handle(self._connection)
            try:
                self._mapped[block.key] = np.frombuffer(mmap.mmap(descriptor, block.size), np.uint8)
            finally:
                os.close(descriptor)
        return self._mapped[block.key]
