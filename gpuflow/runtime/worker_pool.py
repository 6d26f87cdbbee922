"""Worker processes: a pool starts them, gives each request to a free one, and does without those that are lost.

For work that threads cannot do in parallel because each of them needs the interpreter too often. A fork server is
started as a new Python process, which does not import the script that is running, and forks the workers, so that all
share what it has imported and unpickled. They ignore a Ctrl-C in the terminal and end when their connections do, so
with this process in any case.

A module that worker processes run has two functions: `prepare(setup)` unpickles the setup, in the fork server before
it forks; `work(connection, prepared)` answers requests until `connection.recv` raises, on one thread a connection.
"""

from __future__ import annotations

import itertools
import json
import logging
import mmap
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from gpuflow.runtime.memory import SharedBlock, shared_block, shared_keys

__all__ = ["READY", "ForkServer", "ParentConnection", "Pending", "WorkerConnection", "WorkerPool", "serve"]

READY = "ready"
"""The first message of a worker whose pool waits for it."""

T = TypeVar("T")

_LOG = logging.getLogger(__name__)
_PROGRAM = """\
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from gpuflow.runtime.worker_pool import serve
serve(*sys.argv[2:])
"""
_ANSWER_SECONDS, _END_SECONDS, _POLL_SECONDS, _MAX_PIDS_BYTES = 300.0, 2.0, 0.02, 1 << 16


# --- this process -----------------------------------------------------------------------------------------------------


class ForkServer:
    """A process and the workers that it forks, itself being the first of them. Raises OSError if it cannot be started.

    Args:
        module: what the workers run, see this module's docstring. connections: how many each worker has. setup: bytes.
    """

    def __init__(self, module: str, *, connections: Sequence[int], setup: bytes) -> None:
        pipes = [[Pipe() for _ in range(count)] for count in connections]
        descriptors = [[theirs.fileno() for _, theirs in own] for own in pipes]
        shared_file = os.memfd_create("gpuflow_setup")  # the setup, then the workers' process ids
        try:
            with open(shared_file, "wb", closefd=False) as file:
                file.write(setup)
            command = [sys.executable or "python3", "-c", _PROGRAM, json.dumps(sys.path), module, str(shared_file)]
            self._process = subprocess.Popen(
                [*command, json.dumps(descriptors)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[shared_file, *itertools.chain(*descriptors)],
                start_new_session=True,
            )
        except BaseException:
            os.close(shared_file)
            raise
        finally:
            for _, theirs in itertools.chain(*pipes):
                theirs.close()
        self.connections = [WorkerConnection(ours, self, worker) for worker, own in enumerate(pipes) for ours, _ in own]
        self._pids, self._close = (shared_file, len(setup)), weakref.finalize(self, os.close, shared_file)
        self._ending = threading.RLock()  # the garbage collector may call `end` on a thread that is in `kill`

    def kill(self, worker: int) -> None:
        """Kill one worker, or the whole group if it has not forked yet. Its connections then raise."""
        shared_file, start = self._pids
        group = self._process.pid  # cannot be another process's: this one is not waited for before the end
        with self._ending, suppress(ProcessLookupError):
            if not self._close.alive:
                return
            try:
                pid: int = json.loads(os.pread(shared_file, _MAX_PIDS_BYTES, start))[worker]
            except ValueError:
                os.killpg(group, signal.SIGKILL)
            else:
                if os.getpgid(pid) == group:
                    os.kill(pid, signal.SIGKILL)

    def end(self) -> None:
        """Kill all workers. They hold nothing that could be lost. Calling it again does nothing."""
        with self._ending:
            if not self._close.alive:
                return
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_SECONDS)
            self._close()


class WorkerConnection:
    """The pool's end of a connection to a worker, for one thread at a time.

    Its methods raise OSError or EOFError if the worker has ended, TimeoutError if it does not answer.
    """

    def __init__(self, connection: Connection[Any, Any], server: ForkServer, worker: int) -> None:
        self._connection, self.worker = connection, (server, worker)
        self._known: set[int] = set()

    def send(self, value: object) -> None:
        self._connection.send(value)

    def has_answer(self) -> bool:
        return self._connection.poll()

    def answer(self) -> Any:
        """Wait for the worker's next message."""
        if not self._connection.poll(_ANSWER_SECONDS):
            raise TimeoutError(f"no answer within {_ANSWER_SECONDS:g} s")
        return self._connection.recv()

    def share(self, memory: NDArray[Any]) -> bool:
        """Let the worker map memory that `memory.shared` allocated. False if it is other memory; the worker then gets
        None from `ParentConnection.memory`."""
        block = shared_block(memory)
        if block is None:
            self.send(None)
            return False
        gone = self._known - shared_keys()
        known = block.key in self._known
        self._known = self._known - gone | {block.key}
        self.send((block, known, gone))
        if not known:
            send_handle(self._connection, block.descriptor, 0)  # Linux ignores the process id
        return True

    def close(self) -> None:
        """Only the thread that uses it may call this: another one's descriptor could be reused under it."""
        self._connection.close()


class WorkerPool:
    """Worker processes, each asked by one thread at a time. Any thread may call any method.

    A worker that ends, hangs or cannot start costs no request: `request` returns None, and the caller does the work
    itself. Log messages say so once a worker.

    Args:
        module: what the workers run, see this module's docstring.
        connections: requests that each worker takes at a time; its length is the number of workers.
        setup: pickled for `prepare`.
        task: what they do, as a verb for log messages: `read` or `decode`.
        handshake: whether workers send READY, or else why they cannot start, before they take requests.
    """

    def __init__(
        self, module: str, *, connections: Sequence[int], setup: object, task: str, handshake: bool = True
    ) -> None:
        self._task, self._pid, self._servers = task, os.getpid(), list[ForkServer]()
        self._workers: set[tuple[ForkServer, int]] = set()
        self._idle: queue.SimpleQueue[WorkerConnection] = queue.SimpleQueue()
        self._starting, self._starting_lock = list[WorkerConnection](), threading.Lock()
        self._refusals: set[str] = set()
        self._end = weakref.finalize(self, _end, self._servers, self._pid)
        try:
            server = ForkServer(module, connections=connections, setup=pickle.dumps(setup, pickle.HIGHEST_PROTOCOL))
        except Exception as error:  # a stage or a source raises what it likes when it is pickled
            _LOG.warning("no process to %s with: %s; threads %s instead", task, error, task)
            return
        self._servers.append(server)
        self._workers |= {connection.worker for connection in server.connections}
        if handshake:
            self._starting += server.connections
        else:
            for connection in server.connections:
                self._idle.put(connection)

    def __len__(self) -> int:
        """Workers that are not lost."""
        return len(self._workers)

    @property
    def closed(self) -> bool:
        return not self._end.alive

    def counts(self) -> dict[str, int]:
        """Workers `at_work`, and `starting`: those that cannot be asked yet."""
        starting = {connection.worker for connection in list(self._starting)}
        return {"at_work": len(self) - len(starting), "starting": len(starting)}

    def ready(self) -> bool:
        """Whether there is a worker that can be asked."""
        self._welcome_started()
        return self.counts()["at_work"] > 0

    def wait_until_ready(self, seconds: float) -> None:
        """Wait until no worker is starting any more. Those that still are after so many seconds are discarded."""
        deadline = time.monotonic() + seconds
        while self._starting and time.monotonic() < deadline:
            self._welcome_started()
            time.sleep(_POLL_SECONDS)
        with self._starting_lock:
            for connection in self._starting:
                self._refuse(connection, f"it did not start within {seconds:g} s")
            self._starting.clear()

    def request(self, exchange: Callable[[WorkerConnection], T]) -> T | None:
        """The result of `exchange` with a free worker; None if none is free, or it was lost meanwhile."""
        connection = self._acquire()
        return None if connection is None else self._finish(connection, exchange)

    def begin(self, send: Callable[[WorkerConnection], bool]) -> Pending | None:
        """Send a request to a free worker without waiting for the answer; None if that is not possible.

        send: returns whether the worker will answer.
        """
        connection = self._acquire()
        if connection is None or not self._finish(connection, send, keep=True):
            return None
        return Pending(self, connection)

    def each_idle(self, exchange: Callable[[WorkerConnection], object]) -> None:
        """`exchange` with each worker that is free now."""
        for connection in list(iter(self._acquire, None)):
            self._finish(connection, exchange)

    def close(self) -> None:
        """Kill the workers. Threads that wait for an answer get an error."""
        self._end()
        while (connection := self._acquire()) is not None:
            connection.close()
        with self._starting_lock:
            for connection in self._starting:
                connection.close()
            self._starting.clear()

    def _acquire(self) -> WorkerConnection | None:
        """A free connection, or None; always None in a forked child of the process that the workers belong to."""
        if os.getpid() != self._pid:
            return None
        self._welcome_started()
        try:
            return self._idle.get_nowait()
        except queue.Empty:
            return None

    def _finish(
        self, connection: WorkerConnection, exchange: Callable[[WorkerConnection], T], *, keep: bool = False
    ) -> T | None:
        """Run an exchange, then free the connection (unless `keep`) or discard it."""
        try:
            result = exchange(connection)
        except (OSError, EOFError) as error:
            self._lose(connection, error)
            return None
        except BaseException:
            self._discard(connection)  # in the middle of an answer that nobody will read
            raise
        if not keep or not result:
            self._idle.put(connection)
        return result

    def _welcome_started(self) -> None:
        """Find out which of the starting workers can be asked by now."""
        if self._starting and os.getpid() == self._pid:
            with self._starting_lock:
                for connection in filter(WorkerConnection.has_answer, list(self._starting)):
                    self._starting.remove(connection)
                    self._welcome(connection)

    def _welcome(self, connection: WorkerConnection) -> None:
        try:
            message = connection.answer()
        except (OSError, EOFError) as error:
            self._lose(connection, error)
            return
        if message == READY:
            self._idle.put(connection)
        else:
            self._refuse(connection, message)

    def _lose(self, connection: WorkerConnection, error: BaseException) -> None:
        if self._discard(connection):
            _LOG.warning("a process that %ss has ended: %r; threads %s instead", self._task, error, self._task)

    def _refuse(self, connection: WorkerConnection, reason: str) -> None:
        if self._discard(connection) and reason not in self._refusals:  # most have the same reason
            self._refusals.add(reason)
            _LOG.warning("a process cannot %s: %s; threads %s instead", self._task, reason, self._task)

    def _discard(self, connection: WorkerConnection) -> bool:
        """Kill a connection's worker. Returns whether that is worth a message: the first time, in an open pool."""
        server, worker = connection.worker
        server.kill(worker)
        connection.close()
        try:
            self._workers.remove(connection.worker)
        except KeyError:
            return False
        if not self._workers:
            server.end()
        return not self.closed


class Pending:
    """A request that a worker is at."""

    def __init__(self, pool: WorkerPool, connection: WorkerConnection) -> None:
        self._pool, self._connection = pool, connection

    def result(self) -> Any:
        """Wait for the answer; None if the worker is lost."""
        return self._pool._finish(self._connection, WorkerConnection.answer)

    def abandon(self) -> None:
        """Give up the answer, and with it the worker."""
        self._pool._discard(self._connection)


def _end(servers: Sequence[ForkServer], owner: int) -> None:
    for server in tuple(servers):
        if os.getpid() == owner:  # and not a forked child, at its exit
            server.end()


# --- the worker -------------------------------------------------------------------------------------------------------


def serve(name: str, setup: str, descriptors: str) -> None:
    """The main function of a fork server, called by its command line: module, file descriptor of the setup, and the
    descriptors of each worker's connections as JSON."""
    module = import_module(name)
    with open(int(setup), "rb", closefd=False) as file:
        file.seek(0)
        prepared = module.prepare(file.read())
    shares: list[list[int]] = json.loads(descriptors)
    mine = _fork(shares, int(setup))
    for descriptor in itertools.chain(*(share for share in shares if share is not mine)):
        os.close(descriptor)  # or the other worker's end would go unnoticed
    threads = [
        threading.Thread(target=_converse, args=(module.work, descriptor, prepared), daemon=True) for descriptor in mine
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    os._exit(0)


def _fork(shares: Sequence[list[int]], shared_file: int) -> list[int]:
    """Fork one process for each further share; returns the share of this process. Writes their ids behind the setup.

    No other thread may have been started before.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    pids = [os.getpid()]
    for share in shares[1:]:
        if (pid := os.fork()) == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            return share
        pids.append(pid)
    os.write(shared_file, json.dumps(pids).encode())
    return shares[0]


def _converse(work: Callable[[ParentConnection, Any], None], descriptor: int, prepared: Any) -> None:
    with suppress(EOFError, OSError), Connection(descriptor) as connection:
        work(ParentConnection(connection), prepared)


class ParentConnection:
    """The worker's end of a connection. Its methods raise EOFError or OSError once the other end is closed."""

    def __init__(self, connection: Connection[Any, Any]) -> None:
        self._connection = connection
        self._mapped: dict[int, NDArray[np.uint8]] = {}

    def recv(self) -> Any:
        return self._connection.recv()

    def send(self, value: object) -> None:
        self._connection.send(value)

    def memory(self) -> NDArray[np.uint8] | None:
        """The memory that `WorkerConnection.share` got, from its first byte on, mapped here; None if not shared."""
        message: tuple[SharedBlock, bool, set[int]] | None = self._connection.recv()
        if message is None:
            return None
        block, known, gone = message
        for key in gone:
            del self._mapped[key]
        if not known:
            descriptor = recv_handle(self._connection)
            try:
                self._mapped[block.key] = np.frombuffer(mmap.mmap(descriptor, block.size), np.uint8)
            finally:
                os.close(descriptor)
        return self._mapped[block.key][block.start : block.start + block.length]
