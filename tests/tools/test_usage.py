"""Processor time and memory of processes, and which of them listen on a port, checked on this process."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time

import psutil
import pytest

from gpuflow.tools.machine import listeners, usage_of


def test_processor_time_and_memory_of_this_process() -> None:
    before, start = usage_of([os.getpid()]), time.process_time()
    assert before is not None
    assert before.cpu_s > start - 0.1, "clocks that tick every 10 ms; other tests may have started processes"
    while time.process_time() < start + 0.2:
        pass
    after = usage_of([os.getpid()])
    assert after is not None
    assert 0.15 < after.cpu_s - before.cpu_s < 0.4
    with open("/proc/self/status") as file:
        resident = next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmRSS"))
    assert after.rss_bytes > 0.8 * resident


def test_processes_together() -> None:
    one, two = usage_of([os.getpid()]), usage_of([os.getpid(), os.getppid()])
    assert one is not None and two is not None
    assert two.rss_bytes > one.rss_bytes


def test_processes_that_a_process_started_count() -> None:
    code = "kept = b'x' * (80 << 20); print(flush=True); input()"
    before = usage_of([os.getpid()])
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None and child.stdin is not None
        child.stdout.readline()
        during = usage_of([os.getpid()])
        child.stdin.close()
    assert before is not None and during is not None
    assert during.rss_bytes - before.rss_bytes > 60 << 20


def test_memory_that_processes_share_counts_once() -> None:
    code = """if True:
        import mmap, os
        shared = mmap.mmap(-1, 64 << 20)
        shared.write(b"x" * len(shared))
        if os.fork():
            print(flush=True)
            input()
            os.wait()
        else:
            sum(shared[::4096])
            os.read(0, 1)
    """
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdin is not None
        process.stdout.readline()
        until = time.monotonic() + 20
        while (used := usage_of([process.pid], pss=True)) is None or used.rss_bytes < 128 << 20:
            assert time.monotonic() < until
            time.sleep(0.01)
        process.stdin.close()
    assert used.pss_bytes is not None
    assert 64 << 20 <= used.pss_bytes <= 100 << 20
    assert usage_of([os.getpid()], pss=False).pss_bytes is None  # type: ignore[union-attr]


def test_a_process_whose_shares_are_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: psutil.Process) -> None:
        raise psutil.AccessDenied(self.pid)

    monkeypatch.setattr(psutil.Process, "memory_full_info", refuse)
    used = usage_of([os.getpid()], pss=True)
    assert used is not None and used.pss_bytes is None and used.rss_bytes > 0


def test_a_process_that_is_gone() -> None:
    assert usage_of([os.getpid(), 2**22 + 1]) is None


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6], ids=["v4", "v6"])
def test_who_listens(family: socket.AddressFamily) -> None:
    try:
        server = socket.create_server(("::1" if family == socket.AF_INET6 else "127.0.0.1", 0), family=family)
    except OSError:
        pytest.skip("this machine has no such addresses")
    with server:
        port = server.getsockname()[1]
        assert listeners("localhost", port) == (os.getpid(),)
        assert listeners(server.getsockname()[0], port) == (os.getpid(),)
        with socket.create_connection(server.getsockname()[:2]) as connection:
            assert listeners("127.0.0.1", connection.getsockname()[1]) == (), "a connection does not listen"
    assert listeners("localhost", port) == ()


def test_all_processes_that_share_a_socket_listen() -> None:
    code = "import socket, sys; shared = socket.socket(fileno=int(sys.argv[1])); print(flush=True); sys.stdin.read()"
    with socket.create_server(("127.0.0.1", 0)) as server:
        child = subprocess.Popen(
            [sys.executable, "-c", code, str(server.fileno())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # a warning about the socket that it leaves open
            pass_fds=[server.fileno()],
        )
        with child:
            assert child.stdout is not None
            child.stdout.readline()
            assert listeners("localhost", server.getsockname()[1]) == tuple(sorted([os.getpid(), child.pid]))
        assert listeners("localhost", server.getsockname()[1]) == (os.getpid(),)


def test_other_machines_are_not_looked_at() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert listeners("192.0.2.1", server.getsockname()[1]) == ()
        assert listeners("no.such.host.invalid", server.getsockname()[1]) == ()
