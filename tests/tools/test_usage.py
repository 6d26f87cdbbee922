"""What processes take: this one, which is known to work and to listen; GPUs by a stand-in for NVML."""

from __future__ import annotations

import ctypes
import os
import socket
import time
from typing import Any, final

import pytest

from gpuflow.tools.usage import Gpus, listeners, usage_of


def test_processor_time_and_memory_of_this_process() -> None:
    before, start = usage_of([os.getpid()]), time.process_time()
    assert before is not None
    assert abs(before.cpu_s - start) < 0.1, "clocks that tick every 10 ms"
    while time.process_time() < start + 0.2:
        pass
    after = usage_of([os.getpid()])
    assert after is not None
    assert 0.15 < after.cpu_s - before.cpu_s < 0.4
    with open("/proc/self/status") as file:
        resident = next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmRSS"))
    assert after.rss_bytes == pytest.approx(resident, rel=0.2)


def test_processes_together() -> None:
    one, two = usage_of([os.getpid()]), usage_of([os.getpid(), os.getppid()])
    assert one is not None and two is not None
    assert two.rss_bytes > one.rss_bytes


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
        with socket.create_connection(server.getsockname()[:2]) as connection:
            assert listeners("127.0.0.1", connection.getsockname()[1]) == (), "a connection does not listen"
    assert listeners("localhost", port) == ()


def test_other_machines_are_not_looked_at() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert listeners("192.0.2.1", server.getsockname()[1]) == ()
        assert listeners("no.such.host.invalid", server.getsockname()[1]) == ()


@final
class FakeNvml:
    """Three GPUs that are busy for 10%, 20% and 30%. lost: one that answers no more. status: of the start."""

    def __init__(self, *, status: int = 0, lost: int | None = None) -> None:
        self._status, self._lost = status, lost

    def nvmlInit_v2(self) -> int:
        return self._status

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:
        count._obj.value = 3
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: int, handle: Any) -> int:
        handle._obj.value = 1000 + index
        return 0

    def nvmlDeviceGetUtilizationRates(self, handle: ctypes.c_void_p, rates: Any) -> int:
        assert handle.value is not None
        index = handle.value - 1000
        rates._obj[0], rates._obj[1] = 10 * (index + 1), 99
        return 15 if index == self._lost else 0


def test_gpus() -> None:
    assert Gpus(lambda name: FakeNvml()).percents() == [10, 20, 30]
    assert Gpus(lambda name: FakeNvml(lost=1)).percents() == [10, 30]


def test_no_gpus() -> None:
    def absent(name: str) -> Any:
        raise OSError(name)

    assert Gpus(absent).percents() == []
    assert Gpus(lambda name: FakeNvml(status=9)).percents() == []
