"""Starts worker processes, gives each request to the least busy one, and continues without lost ones.

For Python code, which threads cannot run in parallel because only one at a time has the interpreter. A fork server is
started as a new Python process, which does not import the script that is running, and forks the workers, so that all
share what it has imported and unpickled. They ignore a Ctrl-C in the terminal, and end when this process ends, for any
reason, even if other children of it live on: they wait for a record lock that this process holds and that its children
do not inherit (fcntl(2)).

Workers import from this process's import paths, made absolute, never from its current directory. A relative path or
`''` in `sys.path` stands for the directory in which this module was imported.

A module that worker processes run has two functions: `prepare(setup)` unpickles the setup, in the fork server before
it forks; `work(connection, prepared)` answers requests until `connection.recv` raises, on one thread a connection.
"""

from __future__ import annotations

import fcntl
import itertools
import json
import logging
import mmap
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any, TypeVar, cast

import numpy as np

from gpuflow.arrays import Array, Bytes
from gpuflow.runtime.memory import SharedBlock, memory_file, shared_block, shared_keys

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
_ANSWER_SECONDS, _END_SECONDS, _POLL_SECONDS, _SHORT_POLL_SECONDS = 300.0, 2.0, 0.02, 0.002
_KILLED_SECONDS = 20.0
"""How long a killed process may take to end: one that runs where cores are idle needs some time of a core for it."""
_MAX_PIDS_BYTES = 1 << 16
_HEADER, _READ_BYTES = struct.Struct("!i"), 1 << 20
"""What `multiprocessing.connection.Connection` writes before a message of less than 2 GiB: its length."""


def _current_directory() -> str:
    try:
        return os.getcwd()
    except OSError:  # it was deleted
        return ""


_START_DIRECTORY = _current_directory()


# --- this process -----------------------------------------------------------------------------------------------------


class ForkServer:
    """Starts a process and the workers that it forks, itself being the first. Raises OSError if it cannot be started.

    Args:
        module: what the workers run, see this module's docstring.
        connections: how many each worker has.
        setup: bytes.
    """

    def __init__(self, module: str, *, connections: Sequence[int], setup: bytes) -> None:
        pipes = [[Pipe() for _ in range(count)] for count in connections]
        descriptors = [[worker_end.fileno() for _, worker_end in own] for own in pipes]
        shared_file = memory_file("gpuflow_setup")  # the setup, then the workers' process ids
        try:
            fcntl.lockf(shared_file, fcntl.LOCK_EX)  # until this process ends; see `_end_with_parent`
            with open(shared_file, "wb", closefd=False) as file:
                file.write(setup)
            command = [sys.executable or "python3", "-P", "-c", _PROGRAM]
            command += [json.dumps(_import_paths()), module, str(shared_file)]
            self._process = subprocess.Popen(
                [*command, json.dumps(descriptors)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[shared_file, *itertools.chain(*descriptors)],
                start_new_session=True,
                env={key: value for key, value in os.environ.items() if key != "PYTHONPATH"},  # part of sys.path
            )
        except BaseException:
            os.close(shared_file)
            raise
        finally:
            for _, worker_end in itertools.chain(*pipes):
                worker_end.close()
        self.connections = [
            WorkerConnection(parent_end, self, worker) for worker, own in enumerate(pipes) for parent_end, _ in own
        ]
        self._pids, self._close = (shared_file, len(setup)), weakref.finalize(self, os.close, shared_file)
        self._ending = threading.RLock()  # the garbage collector may call `end` on a thread that is in `kill`

    def kill(self, worker: int) -> None:
        """Kill one worker, or the whole group if it has not forked yet. Its connections then raise."""
        with self._ending:
            if not self._close.alive:
                return
            workers = self._workers()
            if workers:
                self._kill([workers[worker]])
            else:
                self._kill_all()

    def end(self) -> None:
        """Kill all workers. They hold nothing that could be lost. Calling it again does nothing.

        The fork server is the last: it waits for those that it forked. Without it they would become children of
        process 1, which in a container often waits for none, and stay zombies. If this is process 1, it waits itself.
        """
        with self._ending:
            if not self._close.alive:
                return
            forked, deadline = self._workers()[1:], time.monotonic() + _END_SECONDS
            self._kill(forked)
            while any(map(self._is_worker, forked)) and time.monotonic() < deadline:
                for pid in forked:
                    with suppress(ChildProcessError):
                        os.waitpid(pid, os.WNOHANG)
                time.sleep(_SHORT_POLL_SECONDS)
            self._kill_all()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_KILLED_SECONDS)
            with suppress(ChildProcessError):  # forked while it was killed
                while os.waitpid(-self._process.pid, os.WNOHANG) == (0, 0) and time.monotonic() < deadline:
                    time.sleep(_SHORT_POLL_SECONDS)
            self._close()

    def _workers(self) -> list[int]:
        """Return the process ids of all workers, the fork server's first; empty if it has not forked yet."""
        shared_file, start = self._pids
        try:
            pids: list[int] = json.loads(os.pread(shared_file, _MAX_PIDS_BYTES, start))
        except ValueError:
            return []
        return pids

    def _is_worker(self, pid: int) -> bool:
        """Return whether a process id still is of this group. A process id that is free is given to other processes."""
        try:
            return os.getpgid(pid) == self._process.pid
        except ProcessLookupError:
            return False

    def _kill(self, pids: Sequence[int]) -> None:
        for pid in filter(self._is_worker, pids):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _kill_all(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # not another's: this one is not waited for before the end


def _import_paths() -> list[str]:
    """Return where this process imports from, as absolute paths. Python ignores what is no text."""
    texts = [path for path in cast(list[object], sys.path) if isinstance(path, str)]
    return [*filter(os.path.isabs, (os.path.join(_START_DIRECTORY, path) for path in texts))]


class WorkerConnection:
    """Sends requests to a worker and receives its answers, for one thread at a time: the pool's end of a connection.

    Its methods raise OSError or EOFError if the worker has ended, TimeoutError if it does not answer.
    """

    def __init__(self, connection: Connection[Any, Any], server: ForkServer, worker: int) -> None:
        self._connection, self.worker = connection, (server, worker)
        self._known: set[int] = set()
        with socket.socket(fileno=os.dup(connection.fileno())) as same:
            seconds, rest = divmod(_ANSWER_SECONDS, 1)
            same.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", int(seconds), int(rest * 1e6)))

    def send(self, value: object, *memory: Array) -> bool:
        """Send a value, and let the worker map memory that `memory.shared` allocated, in one message.

        Returns False if some of it is other memory, for which the worker gets None from `ParentConnection.memory`.
        """
        released = self._known - shared_keys()
        self._known -= released
        blocks = list(map(shared_block, memory))
        self._connection.send((value, blocks, released))
        for block in filter(None, blocks):
            if block.key not in self._known:
                self._known.add(block.key)
                send_handle(self._connection, block.descriptor, 0)  # Linux ignores the process id
        return None not in blocks

    def has_answer(self) -> bool:
        return self._connection.poll()

    def answer(self) -> Any:
        """Wait for the worker's next message, which it sends before any other.

        `Connection.recv` calls the system three times, and each call releases Python's interpreter.
        """
        data = bytearray()
        while len(data) < _HEADER.size or len(data) < _HEADER.size + _HEADER.unpack_from(data)[0]:
            try:
                more = os.read(self._connection.fileno(), _READ_BYTES)
            except BlockingIOError:
                raise TimeoutError(f"no answer within {_ANSWER_SECONDS:g} s") from None
            if not more:
                raise EOFError("the worker has ended")
            data += more
        return pickle.loads(memoryview(data)[_HEADER.size :])

    def close(self) -> None:
        """Close the connection. Only the thread that uses it may call this: another one's descriptor could be reused
        under it."""
        self._connection.close()


class WorkerPool:
    """Gives requests to worker processes, each over a connection of one thread. Any thread may call any method.

    A worker that ends, hangs or cannot start costs no request: `request` returns None, and the caller does the work
    itself. Log messages say so once a worker.

    Args:
        module: what the workers run, see this module's docstring.
        connections: requests that each worker takes at once; its length is the number of workers, which may be 0.
        setup: pickled for `prepare`.
        task: what they do, as a verb for log messages: `read` or `decode`.
        restart_seconds: if given, later requests start workers again that were lost, at most once in this time. Those
            that cannot start are not started again.
    """

    def __init__(
        self,
        module: str,
        *,
        connections: Sequence[int],
        setup: object,
        task: str,
        restart_seconds: float | None = None,
    ) -> None:
        self._module, self._connections = module, tuple(connections)
        self._restart_seconds, self._next_restart, self._restarting = restart_seconds, 0.0, threading.Lock()
        self._task, self._pid, self._servers = task, os.getpid(), list[ForkServer]()
        self._workers: set[tuple[ForkServer, int]] = set()
        self._idle, self._idle_lock = list[WorkerConnection](), threading.Lock()
        self._requests: Counter[tuple[ForkServer, int]] = Counter()
        """For each worker, how many of its connections are in use, or are starting."""
        self._starting, self._starting_lock = list[WorkerConnection](), threading.Lock()
        self._refusals: set[str] = set()
        self._end = weakref.finalize(self, _end, self._servers, self._pid)
        if not connections:
            return
        try:
            self._setup = pickle.dumps(setup, pickle.HIGHEST_PROTOCOL)
            self._start(connections)
        except Exception as error:  # a stage or a source may raise any exception when it is pickled
            self._restart_seconds = None
            self._warn(f"no process to {self._task} with: {error}")

    def _warn(self, what: str) -> None:
        """Log what happened, and that threads of this process do the work instead."""
        _LOG.warning("%s; threads %s instead", what, self._task)

    def _start(self, connections: Sequence[int]) -> None:
        server = ForkServer(self._module, connections=connections, setup=self._setup)
        self._servers.append(server)
        with self._idle_lock:
            self._requests.update(connection.worker for connection in server.connections)
        self._workers |= {connection.worker for connection in server.connections}
        self._starting += server.connections

    def _restart_lost(self) -> None:
        """Start workers in place of those that were lost, if that is wanted and the last time is long enough ago."""
        lost = len(self._connections) - len(self)
        if self._restart_seconds is None or not lost or time.monotonic() < self._next_restart:
            return
        if not self._restarting.acquire(blocking=False):
            return
        try:
            if not self.closed:
                self._next_restart = time.monotonic() + self._restart_seconds
                self._start(self._connections[:lost])
                _LOG.warning("%d processes that %s are started again", lost, self._task)
        except OSError as error:
            self._warn(f"no process to {self._task} with: {error}")
        finally:
            self._restarting.release()

    def __len__(self) -> int:
        """Return the number of workers that are not lost."""
        return len(self._workers)

    @property
    def closed(self) -> bool:
        return not self._end.alive

    def counts(self) -> dict[str, int]:
        """Return the numbers of workers `at_work`, and `starting`: those that cannot be asked yet."""
        self._accept_started()
        starting = {connection.worker for connection in list(self._starting)}
        return {"at_work": len(self) - len(starting), "starting": len(starting)}

    def wait_until_ready(self, seconds: float) -> None:
        """Wait until no worker is starting any more. Discard those that still are after `seconds`."""
        deadline = time.monotonic() + seconds
        while self._starting and time.monotonic() < deadline:
            self._accept_started()
            time.sleep(_POLL_SECONDS)
        with self._starting_lock:
            for connection in self._starting:
                self._refuse(connection, f"it did not start within {seconds:g} s")
            self._starting.clear()

    def request(self, exchange: Callable[[WorkerConnection], T]) -> T | None:
        """Return the result of `exchange` with the least busy worker; None if none is free, or it was lost
        meanwhile."""
        connection = self._acquire()
        return None if connection is None else self._finish(connection, exchange)

    def begin(self, send: Callable[[WorkerConnection], bool]) -> Pending | None:
        """Send a request to the least busy worker without waiting for the answer; None if that is not possible.

        send: returns whether the worker will answer.
        """
        connection = self._acquire()
        if connection is None or not self._finish(connection, send, keep=True):
            return None
        return Pending(self, connection)

    def each_idle(self, exchange: Callable[[WorkerConnection], object]) -> None:
        """Run `exchange` with each worker that is free now."""
        for connection in list(iter(self._acquire, None)):
            self._finish(connection, exchange)

    def close(self) -> None:
        """Kill the workers. Threads that wait for an answer get an error. Does nothing in a forked child."""
        if os.getpid() != self._pid:
            return
        with self._restarting:
            self._end()
        while (connection := self._acquire()) is not None:
            connection.close()
        with self._starting_lock:
            for connection in self._starting:
                connection.close()
            self._starting.clear()

    def _acquire(self) -> WorkerConnection | None:
        """Return a free connection to the worker with the fewest requests, or None.

        It is always None in a forked child of the process that the workers belong to.
        """
        if os.getpid() != self._pid:
            return None
        self._restart_lost()
        self._accept_started()
        with self._idle_lock:
            if not self._idle:
                return None
            connection = min(self._idle, key=lambda connection: self._requests[connection.worker])
            self._idle.remove(connection)
            self._requests[connection.worker] += 1
        return connection

    def _release(self, connection: WorkerConnection) -> None:
        """Free a connection, or close it if its worker was lost meanwhile."""
        with self._idle_lock:
            if connection.worker in self._workers:
                self._requests[connection.worker] -= 1
                self._idle.append(connection)
            else:
                connection.close()

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
            self._discard(connection)  # in the middle of an answer that will not be read
            raise
        if not keep or not result:
            self._release(connection)
        return result

    def _accept_started(self) -> None:
        """Find out which of the starting workers can be asked now."""
        if self._starting and os.getpid() == self._pid:
            with self._starting_lock:
                for connection in filter(WorkerConnection.has_answer, list(self._starting)):
                    self._starting.remove(connection)
                    self._accept(connection)

    def _accept(self, connection: WorkerConnection) -> None:
        try:
            message = connection.answer()
        except (OSError, EOFError) as error:
            self._lose(connection, error)
            return
        if message == READY:
            self._release(connection)
        else:
            self._restart_seconds = None  # another one could not start either
            self._refuse(connection, message)

    def _lose(self, connection: WorkerConnection, error: BaseException) -> None:
        if self._discard(connection):
            self._warn(f"a process that {self._task}s has ended: {error!r}")

    def _refuse(self, connection: WorkerConnection, reason: str) -> None:
        if self._discard(connection) and reason not in self._refusals:  # most have the same reason
            self._refusals.add(reason)
            self._warn(f"a process cannot {self._task}: {reason}")

    def _discard(self, connection: WorkerConnection) -> bool:
        """Kill a connection's worker. Returns whether that is worth a message: the first time, in an open pool."""
        server, worker = connection.worker
        server.kill(worker)
        connection.close()
        with self._idle_lock:
            if connection.worker not in self._workers:
                return False
            self._workers.remove(connection.worker)
            del self._requests[connection.worker]
            for other in [one for one in self._idle if one.worker == connection.worker]:
                self._idle.remove(other)
                other.close()
        if not any(one is server for one, _ in list(self._workers)):
            server.end()
            with suppress(ValueError):  # another thread was faster
                self._servers.remove(server)
        return not self.closed


@dataclass(frozen=True, slots=True)
class Pending:
    """Stands for a request that was sent to a worker and is not answered yet."""

    pool: WorkerPool
    connection: WorkerConnection

    def result(self) -> Any:
        """Wait for the answer; None if the worker is lost."""
        return self.pool._finish(self.connection, WorkerConnection.answer)

    def abandon(self) -> None:
        """Give up the answer, and with it the worker."""
        self.pool._discard(self.connection)


def _end(servers: Sequence[ForkServer], owner: int) -> None:
    for server in tuple(servers):
        if os.getpid() == owner:  # and not a forked child, at its exit
            server.end()


# --- the worker -------------------------------------------------------------------------------------------------------


def serve(name: str, setup: str, descriptors: str) -> None:
    """Run a fork server, called by its command line: module, file descriptor of the setup, and the descriptors of each
    worker's connections as JSON."""
    module = import_module(name)
    with open(int(setup), "rb", closefd=False) as file:
        file.seek(0)
        prepared = module.prepare(file.read())
    shares: list[list[int]] = json.loads(descriptors)
    own_descriptors = _fork(shares, int(setup))
    threading.Thread(target=_end_with_parent, args=(int(setup),), daemon=True).start()
    for descriptor in itertools.chain(*(share for share in shares if share is not own_descriptors)):
        os.close(descriptor)  # or the other worker's end would go unnoticed
    threads = [
        threading.Thread(target=_converse, args=(module.work, descriptor, prepared), daemon=True)
        for descriptor in own_descriptors
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with suppress(ChildProcessError):
        os.wait()  # the fork server: until all that it forked have ended, as SIGCHLD is ignored
    os._exit(0)


def _end_with_parent(shared_file: int) -> None:
    """Wait until the process that started the fork server has ended, then end this one.

    Its connections do not say so: a child that it forked holds copies of their ends. A record lock is not inherited.
    """
    fcntl.lockf(shared_file, fcntl.LOCK_SH)
    deadline = time.monotonic() + _END_SECONDS
    with suppress(ChildProcessError):
        while time.monotonic() < deadline:  # the fork server waits for those that it forked
            os.waitpid(-1, os.WNOHANG)
            time.sleep(_POLL_SECONDS)
        os.killpg(0, signal.SIGKILL)
    os._exit(0)


def _fork(shares: Sequence[list[int]], shared_file: int) -> list[int]:
    """Fork one process for each further share; returns the share of this process. Writes their ids after the setup.

    Each process waits until their ids are there: without them `ForkServer.kill` kills the whole group. No other thread
    may have been started before.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # they are not waited for
    pids = [os.getpid()]
    until_written, end = os.pipe()
    for share in shares[1:]:
        if (pid := os.fork()) == 0:
            os.close(end)
            os.read(until_written, 1)  # until the fork server has closed its end, or has ended
            os.close(until_written)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            return share
        pids.append(pid)
    os.write(shared_file, json.dumps(pids).encode())
    os.close(end)
    os.close(until_written)
    return shares[0]


def _converse(work: Callable[[ParentConnection, Any], None], descriptor: int, prepared: Any) -> None:
    with suppress(EOFError, OSError), Connection(descriptor) as connection:
        work(ParentConnection(connection), prepared)


class ParentConnection:
    """Receives requests in a worker and sends answers. Raises EOFError or OSError once the other end is closed."""

    def __init__(self, connection: Connection[Any, Any]) -> None:
        self._connection = connection
        self._blocks = deque[SharedBlock | None]()
        self._mapped: dict[int, Bytes] = {}

    def recv(self) -> Any:
        value, blocks, released = self._connection.recv()
        for key in released:
            del self._mapped[key]
        for block in blocks:
            if block is not None and block.key not in self._mapped:
                descriptor = recv_handle(self._connection)
                try:
                    self._mapped[block.key] = np.frombuffer(mmap.mmap(descriptor, block.size), np.uint8)
                finally:
                    os.close(descriptor)
        self._blocks.extend(blocks)
        return value

    def send(self, value: object) -> None:
        self._connection.send(value)

    def memory(self) -> Bytes | None:
        """Return the next memory that `WorkerConnection.send` got, from its first byte on, mapped here; None if not
        shared."""
        block = self._blocks.popleft()
        return None if block is None else self._mapped[block.key][block.start : block.start + block.length]
