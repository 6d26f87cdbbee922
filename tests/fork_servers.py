"""Starts the fork servers of worker pools as forks of one interpreter that has imported what they need.

A fork server of gpuflow is a new Python process, which imports torch and gpuflow for some seconds. The tests start
hundreds of them. Here such a process is forked instead, from one that has imported these, with the command line, the
environment, directory, session and open files of a new one. Scripts that tests start (also those of tests/forking.py)
are not affected: their loaders start new ones.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, final

import pytest

from gpuflow.runtime import worker_pool

__all__ = ["forked_servers"]

ROOT = str(Path(__file__).parents[1])
_OWN_DESCRIPTOR = 500
"""The interpreter's descriptors are numbered from here on, so that a fork can have the numbers of a new process."""
_START_SECONDS = 300.0
_MOST_BYTES, _MOST_DESCRIPTORS = 1 << 20, 250
_PROGRAM = f"""
import fcntl, gc, json, os, signal, socket, struct, sys
import gpuflow.loader.decode, gpuflow.torchpipe.nodes

requests = socket.socket(fileno=fcntl.fcntl(int(sys.argv[1]), fcntl.F_DUPFD, {_OWN_DESCRIPTOR}))
os.close(int(sys.argv[1]))
signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the forks
gc.collect()
gc.freeze()
assert len(os.listdir("/proc/self/task")) == 1, "a fork would lack this process's other threads"
requests.sendall(b"1")
while True:
    data, descriptors, _, _ = socket.recv_fds(requests, {_MOST_BYTES}, {_MOST_DESCRIPTORS})
    if not data:
        os._exit(0)
    started, start = os.pipe()
    pid = os.fork()
    if pid == 0:
        break
    os.close(start)
    os.read(started, 1)
    for descriptor in (started, *descriptors):
        os.close(descriptor)
    requests.sendall(struct.pack("i", pid))
os.setsid()
os.write(start, b"1")
requests.close()
task = json.loads(data)
moved = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, {_OWN_DESCRIPTOR}) for descriptor in descriptors]
for descriptor in (started, start, *descriptors):
    os.close(descriptor)
for source, number in zip(moved, task["numbers"]):
    os.dup2(source, number)
    os.close(source)
signal.signal(signal.SIGCHLD, signal.SIG_DFL)
os.environ.clear()
os.environ.update(task["environment"])
os.chdir(task["directory"])
sys.argv = ["-c", *task["arguments"]]
exec(compile(task["program"], "<string>", "exec"), {{"__name__": "__main__"}})
"""


@final
class _Forked:
    """A forked process, with what gpuflow uses of subprocess.Popen."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def wait(self, timeout: float) -> None:
        """Wait for its end. Raises subprocess.TimeoutExpired."""
        deadline = time.monotonic() + timeout
        with suppress(ProcessLookupError):
            while time.monotonic() < deadline:
                os.kill(self.pid, 0)
                time.sleep(0.002)
            raise subprocess.TimeoutExpired("a fork", timeout)


@final
class _Template:
    """The interpreter that is forked. It ends with this process. Any thread may call any method."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._socket, other = socket.socketpair()
        self._socket.settimeout(_START_SECONDS)
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", _PROGRAM, str(other.fileno())],
            env={**os.environ, "PYTHONPATH": os.pathsep.join([ROOT, *sys.path]), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=[other.fileno()],
        )
        other.close()
        self._ready = False

    def popen(
        self, command: Sequence[str], *, pass_fds: Sequence[int], env: Mapping[str, str], **others: Any
    ) -> _Forked:
        """As subprocess.Popen starts a fork server."""
        executable, _, _, program, *arguments = command
        if not os.access(executable, os.X_OK):
            raise FileNotFoundError(executable)
        nothing = os.open(os.devnull, os.O_RDWR)
        try:
            numbers = [0, 1, 2, *pass_fds]
            task = {
                "program": program,
                "arguments": arguments,
                "numbers": numbers,
                "environment": dict(env),
                "directory": os.getcwd(),
            }
            with self._lock:
                if not self._ready:
                    self._ready = self._socket.recv(1) == b"1"
                    if not self._ready:  # an AssertionError would only be logged by the pool
                        pytest.fail("the interpreter to fork could not start")
                socket.send_fds(self._socket, [json.dumps(task).encode()], [nothing, nothing, 2, *pass_fds])
                return _Forked(int.from_bytes(self._socket.recv(4), sys.byteorder))
        finally:
            os.close(nothing)

    def end(self) -> None:
        self._socket.close()
        self._process.kill()
        self._process.wait(_START_SECONDS)


@contextmanager
def forked_servers() -> Iterator[None]:
    """Fork servers are forks in this block."""
    template = _Template()
    stand_in = SimpleNamespace(
        Popen=template.popen, DEVNULL=subprocess.DEVNULL, TimeoutExpired=subprocess.TimeoutExpired
    )
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(worker_pool, "subprocess", stand_in)
            yield
    finally:
        template.end()
