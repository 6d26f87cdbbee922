"""Processes of gpuflow's own: started beside this one, spoken with over connections, given memory to write into.

For what threads cannot do beside each other because each of them needs the interpreter too often. One is started anew,
does not import the script that started this one, and forks the others, so that all share what it has imported and
unpickled. A Ctrl-C in the terminal is not theirs. They end when their connections do, so with this process in any case.
"""

from __future__ import annotations

import itertools
import json
import mmap
import os
import queue
import signal
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

from gpuflow.runtime.buffers import SharedBlock, shared_block, shared_keys

__all__ = ["Channel", "Crew", "Family", "Peer", "serve"]

_PROGRAM = """\
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from gpuflow.runtime.worker_pool import serve
serve(*sys.argv[2:])
"""
_ANSWER_SECONDS, _END_SECONDS, _MOST_NUMBERS = 300.0, 2.0, 1 << 16


class Family:
    """Processes that were forked from one. Raises OSError where that cannot be started.

    Args:
        module: its `prepare(setup)` runs in the first of them before it forks, its `work(peer, prepared)` in each, on a
            thread for each connection.
        connections: how many each process has. setup: bytes.
    """

    def __init__(self, module: str, *, connections: Sequence[int], setup: bytes = b"") -> None:
        pipes = [[Pipe() for _ in range(count)] for count in connections]
        shares = [[there.fileno() for _, there in own] for own in pipes]
        told = os.memfd_create("gpuflow_setup")  # the setup, then the processes' numbers
        try:
            with open(told, "wb", closefd=False) as file:
                file.write(setup)
            command = [sys.executable or "python3", "-c", _PROGRAM, json.dumps(sys.path), module, str(told)]
            self._process = subprocess.Popen(
                [*command, json.dumps(shares)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[told, *itertools.chain(*shares)],
                start_new_session=True,
            )
        except BaseException:
            os.close(told)
            raise
        finally:
            for _, there in itertools.chain(*pipes):
                there.close()
        self.channels = [Channel(here, self, member) for member, own in enumerate(pipes) for here, _ in own]
        self._numbers, self._close = (told, len(setup)), weakref.finalize(self, os.close, told)
        self._ending = threading.RLock()  # the collector may end them on a thread that kills one

    def kill(self, member: int) -> None:
        """One of them, whatever it is at; all if they have not parted yet. Who waits at its channels learns of it."""
        told, start = self._numbers
        group = self._process.pid  # nobody else's: the first of them is not waited for before the end
        with self._ending, suppress(ProcessLookupError):
            if not self._close.alive:
                return
            try:
                pid: int = json.loads(os.pread(told, _MOST_NUMBERS, start))[member]
            except ValueError:
                os.killpg(group, signal.SIGKILL)
            else:
                if os.getpgid(pid) == group:
                    os.kill(pid, signal.SIGKILL)

    def end(self) -> None:
        """All of them, whatever they are at. They hold nothing that could be lost. Again does nothing."""
        with self._ending:
            if not self._close.alive:
                return
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_SECONDS)
            self._close()


class Channel:
    """This end of a connection, for one thread at a time.

    Raises OSError or EOFError where the process has ended or does not answer.
    """

    def __init__(self, connection: Connection[Any, Any], family: Family, member: int) -> None:
        self._connection, self.process = connection, (family, member)
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
            send_handle(self._connection, block.descriptor, 0)  # Linux does not ask whose it will be
        return True

    def close(self) -> None:
        """By the thread that uses it alone: another one would go on with whatever gets its descriptor next."""
        self._connection.close()


class Crew:
    """Processes that threads ask by turns: who takes a channel has it alone until it gives it back or loses it.

    Any thread may call any method. They end with the crew.
    """

    def __init__(self) -> None:
        self._pid, self._families = os.getpid(), list[Family]()
        self._processes: set[tuple[Family, int]] = set()
        self._idle: queue.SimpleQueue[Channel] = queue.SimpleQueue()
        self._end = weakref.finalize(self, _end, self._families, self._pid)

    def __len__(self) -> int:
        """Processes of which no channel was lost."""
        return len(self._processes)

    @property
    def closed(self) -> bool:
        return not self._end.alive

    @property
    def here(self) -> bool:
        """Whether this is the process that they work for, and not a forked child of it."""
        return os.getpid() == self._pid

    def hire(self, module: str, *, connections: Sequence[int], setup: bytes = b"") -> list[Channel]:
        """Start some, see `Family`. Their channels are taken; `give` them once they can be asked."""
        family = Family(module, connections=connections, setup=setup)
        self._families.append(family)
        self._processes |= {channel.process for channel in family.channels}
        return family.channels

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
        family, member = channel.process
        family.kill(member)
        channel.close()
        try:
            self._processes.remove(channel.process)
        except KeyError:
            return False
        if not any(other is family for other, _ in list(self._processes)):
            family.end()
        return not self.closed

    def close(self) -> None:
        """End the processes, whatever they are at."""
        self._end()
        while (channel := self.take()) is not None:
            channel.close()


def _end(families: Sequence[Family], owner: int) -> None:
    for family in tuple(families):
        if os.getpid() == owner:  # and not a forked child, at its exit
            family.end()


# --- in the process ---------------------------------------------------------------------------------------------------


def serve(name: str, setup: str, connections: str) -> None:
    """The life of a process, told on its command line: the module, and the descriptors, those of each process apart."""
    module = import_module(name)
    with open(int(setup), "rb", closefd=False) as file:
        file.seek(0)
        prepared = module.prepare(file.read())
    shares: list[list[int]] = json.loads(connections)
    mine = _fork(shares, int(setup))
    for descriptor in itertools.chain(*(share for share in shares if share is not mine)):
        os.close(descriptor)  # else nobody would learn of the other's end
    threads = [
        threading.Thread(target=_converse, args=(module.work, descriptor, prepared), daemon=True) for descriptor in mine
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    os._exit(0)


def _fork(shares: Sequence[list[int]], told: int) -> list[int]:
    """One process for each share; returns which is this one's. Their numbers go behind the setup. No other thread may
    be there yet."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    numbers = [os.getpid()]
    for share in shares[1:]:
        if (number := os.fork()) == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            return share
        numbers.append(number)
    os.write(told, json.dumps(numbers).encode())
    return shares[0]


def _converse(work: Callable[[Peer, Any], None], descriptor: int, prepared: Any) -> None:
    with suppress(EOFError, OSError), Connection(descriptor) as connection:
        work(Peer(connection), prepared)


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
