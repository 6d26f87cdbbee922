"""How a kernel's launch is read from a CUDA graph, with a driver that is written down here."""

from __future__ import annotations

import contextlib
import ctypes
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from gpuflow.execute.gpu.gpu_call import KernelLaunch, capture_launch
from tests.host_stream import HostStream

STREAM, GRAPH, NODE, FUNCTION, KERNEL = 3, 5, 6, 8, 9
PLAN = torch.zeros(1, 4, dtype=torch.int64)
ADDRESS = PLAN.data_ptr()


def of(handle: Any) -> int:
    value: int = handle.value
    return value


@dataclass
class Driver:
    """nodes: how many the graph has, of the kind `kind`. sizes: of the kernel's parameters, whose values are `values`.

    function: what the node says; without it `KERNEL` is asked. made, open: streams and graphs, and those not destroyed.
    """

    nodes: int = 1
    kind: int = 0
    grid: tuple[int, int, int] = (12, 1, 1)
    block: tuple[int, int, int] = (64, 1, 1)
    sizes: tuple[int, ...] = (8, 4, 8)
    values: tuple[int, ...] = (ADDRESS, 77, 123)
    function: int | None = FUNCTION
    end_status: int = 0
    capturing: bool = False
    made: list[int] = field(default_factory=list)
    open: list[int] = field(default_factory=list)

    def cuStreamCreate(self, handle: Any, flags: int) -> int:
        assert flags == 1, "one that does not wait for the default stream"
        handle._obj.value = STREAM
        self._make(STREAM)
        return 0

    def _make(self, handle: int) -> None:
        self.made.append(handle)
        self.open.append(handle)

    def cuStreamDestroy_v2(self, handle: Any) -> int:
        self.open.remove(of(handle))
        return 0

    cuGraphDestroy = cuStreamDestroy_v2

    def cuStreamBeginCapture_v2(self, handle: Any, mode: int) -> int:
        assert (of(handle), mode) == (STREAM, 1)
        self.capturing = True
        return 0

    def cuStreamEndCapture(self, handle: Any, graph: Any) -> int:
        assert self.capturing
        self.capturing = False
        if self.end_status == 0:
            graph._obj.value = GRAPH
            self._make(GRAPH)
        return self.end_status

    def cuGraphGetNodes(self, graph: Any, nodes: Any, count: Any) -> int:
        assert of(graph) == GRAPH
        if nodes is None:
            count._obj.value = self.nodes
        else:
            nodes[0] = NODE
        return 0

    def cuGraphNodeGetType(self, node: Any, kind: Any) -> int:
        assert of(node) == NODE
        kind._obj.value = self.kind
        return 0

    def cuGraphKernelNodeGetParams_v2(self, node: Any, found: Any) -> int:
        assert of(node) == NODE
        described = found._obj
        self.held = [ctypes.c_uint64(value) for value in self.values]
        self.addresses = (ctypes.c_void_p * len(self.held))(*(ctypes.addressof(value) for value in self.held))
        described.function, described.kernel, described.shared_bytes = self.function, KERNEL, 256
        described.grid[:], described.block[:] = self.grid, self.block
        described.parameters = ctypes.cast(self.addresses, ctypes.POINTER(ctypes.c_void_p))
        return 0

    def cuKernelGetFunction(self, function: Any, kernel: Any) -> int:
        assert of(kernel) == KERNEL
        function._obj.value = FUNCTION
        return 0

    def cuFuncGetParamInfo(self, function: Any, number: Any, offset: Any, size: Any) -> int:
        assert of(function) == FUNCTION
        if number.value >= len(self.sizes):
            return 1
        size._obj.value = self.sizes[number.value]
        return 0


def capture(monkeypatch: pytest.MonkeyPatch, driver: Driver) -> KernelLaunch:
    streams: list[int] = []
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda handle, device: handle)

    def use(handle: int) -> contextlib.nullcontext[None]:
        streams.append(handle)
        return contextlib.nullcontext()

    monkeypatch.setattr(torch.cuda, "stream", use)

    def launch(plan: torch.Tensor) -> None:
        assert plan is PLAN and driver.capturing and streams == [STREAM]

    anything: Any = driver
    stream: Any = HostStream()
    return capture_launch(anything, stream, launch, PLAN)


@pytest.mark.parametrize("function", [FUNCTION, None])
def test_a_launch_of_one_kernel(monkeypatch: pytest.MonkeyPatch, function: int | None) -> None:
    driver = Driver(function=function)
    found = capture(monkeypatch, driver)
    assert (found.function, found.parameter_of_plan, found.blocks, found.threads) == (FUNCTION, 0, 12, 64)
    assert (found.shared_bytes, found.count_of_parameters) == (256, 3)
    assert (ctypes.c_void_p * 3).from_address(found.parameters)[:] == driver.addresses[:]
    assert driver.open == [GRAPH], "the graph holds the parameters"
    del found
    assert driver.open == []


@pytest.mark.parametrize(
    ("driver", "error"),
    [
        (Driver(nodes=2), "2 operations instead of one kernel"),
        (Driver(kind=1), "1 operations instead of one kernel"),
        (Driver(grid=(3, 2, 1)), r"a kernel with a grid of \[3, 2, 1\] blocks of \[64, 1, 1\] threads"),
        (Driver(block=(32, 1, 2)), r"a kernel with a grid of \[12, 1, 1\] blocks of \[32, 1, 2\] threads"),
        (Driver(values=(1, 2, 3)), "0 parameters instead of one are the address of the plan"),
        (
            Driver(values=(ADDRESS, 2, ADDRESS)),
            "2 parameters instead of one are the address of the plan",
        ),
        (Driver(sizes=(4, 4, 4)), "0 parameters instead of one are the address of the plan"),
        (Driver(sizes=(8,) * 65, values=(1,) * 65), "a kernel with more than 64 parameters"),
        (Driver(end_status=901), "CUDA error: cuStreamEndCapture returned 901"),
    ],
)
def test_anything_else_is_refused(monkeypatch: pytest.MonkeyPatch, driver: Driver, error: str) -> None:
    with pytest.raises(RuntimeError, match=f"^{error}$"):
        capture(monkeypatch, driver)
    assert driver.made[0] == STREAM and driver.open == [], "nothing is left behind"


def test_an_error_of_the_launch_is_raised_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    driver, stream = Driver(), HostStream()
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda handle, device: handle)
    monkeypatch.setattr(torch.cuda, "stream", lambda handle: contextlib.nullcontext())

    def fail(plan: torch.Tensor) -> None:
        raise RuntimeError("out of memory")

    arguments: Any = (driver, stream, fail, PLAN)
    with pytest.raises(RuntimeError, match=r"^out of memory$"):
        capture_launch(*arguments)
    assert not driver.capturing and driver.open == []
