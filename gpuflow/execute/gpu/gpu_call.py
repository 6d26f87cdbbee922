"""Queues a call of nvJPEG, the transfer before it and the kernels after it at once, without Python's interpreter.

Each call of torch and Triton releases the interpreter and acquires it again. Each time a training that launches its
kernels from Python waits for it: that cost a ResNet-18 a fifth of its speed (measured in experiments/ranks/NOTES.md).
The C code of gpu_call.c makes all calls that a batch of images needs while Python's threads run.

Which kernel Triton launches, and with which parameters, is read from a CUDA graph into which one launch is captured.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, final

import numpy as np
import torch
from numpy.typing import NDArray

from gpuflow.arrays import Ints
from gpuflow.decode.nvjpeg import BatchedDecoder, NvjpegError, NvjpegLibrary
from gpuflow.execute import packing
from gpuflow.execute.gpu.device_stream import DeviceStream
from gpuflow.native.library import INTEGER, POINTER, WORD, function

_LOG = logging.getLogger(__name__)
_NON_BLOCKING, _THREAD_LOCAL, _KERNEL_NODE = 1, 1, 0
"""CU_STREAM_NON_BLOCKING, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL and CU_GRAPH_NODE_TYPE_KERNEL."""
_MOST_PARAMETERS = 64
"""As in gpu_call.c."""
_STEPS = (
    "nvjpegDecodeBatchedInitialize",
    "nvjpegDecodeBatched",
    "cuEventRecord",
    "cuEventSynchronize",
    "cuMemcpyHtoDAsync",
    "cuLaunchKernel",
    "cuStreamWaitEvent",
    "nvjpegDecodeParamsSetROI",
    "nvjpegDecodeBatchedEx",
)
"""Names the functions that can fail, in the order of their numbers in gpu_call.c, from 1 on."""
_queue = function("gpuflow_queue", POINTER, POINTER, result=INTEGER)


_OF_DRIVER = ("cuEventSynchronize", "cuEventRecord", "cuStreamWaitEvent", "cuMemcpyHtoDAsync_v2", "cuLaunchKernel")
_OF_LIBRARY = ("initialize", "decode", "set_region", "decode_regions")
"""The functions that gpu_call.c calls, of CUDA's driver and of `NvjpegLibrary`."""
_NEWEST = "cuFuncGetParamInfo"
"""The newest function of the driver that this module calls."""


class _Functions(ctypes.Structure):
    _fields_ = [(name, POINTER) for name in _OF_DRIVER + _OF_LIBRARY]


class KernelLaunch(ctypes.Structure):
    """A launch of a kernel that can be repeated with other plans, of any number of rows: see gpu_call.c.

    function: a CUfunction. parameters: the addresses of its parameters. parameter_of_plan: which of them is the address
    of the plan. blocks: for each row of the plan, or of a whole one. threads, shared_bytes: of a block. kept: objects
    that hold the memory of the parameters.
    """

    _fields_ = [
        (name, WORD)
        for name in (
            "function",
            "parameters",
            "count_of_parameters",
            "parameter_of_plan",
            "plan",
            "blocks",
            "threads",
            "shared_bytes",
        )
    ]
    kept: object = None

    def of_plan(self, address: int, rows: int) -> KernelLaunch:
        """Return the launch for a plan in device memory. It does not keep the memory of the parameters."""
        launch = KernelLaunch.from_buffer_copy(self)
        launch.plan, launch.blocks = address, self.blocks * rows
        return launch


class _Call(ctypes.Structure):
    """A call, as gpu_call.c describes it. Each field has 64 bits: an address, a handle or a number."""

    _fields_ = [
        (name, WORD)
        for name in (
            "free",
            "source",
            "plans",
            "plans_on_device",
            "bytes_of_plans",
            "pixels",
            "pixels_on_device",
            "bytes_of_pixels",
            "handle",
            "state",
            "images",
            "format",
            "initialize",
            "data",
            "lengths",
            "destinations",
            "regions",
            "parameters",
            "decoding_stream",
            "decoded",
            "stream",
            "done",
            "launches",
            "count_of_launches",
        )
    ]


class _KernelNode(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS_v2 of cuda.h."""

    _fields_ = [
        ("function", POINTER),
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("parameters", ctypes.POINTER(POINTER)),
        ("extra", POINTER),
        ("kernel", POINTER),
        ("context", POINTER),
    ]


@lru_cache(maxsize=1)
def find_driver() -> ctypes.CDLL | None:
    """Return CUDA's driver; None if there is none, or one that is older than CUDA 12.4."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        getattr(driver, _NEWEST)
    except (OSError, AttributeError) as error:
        _LOG.info("Python code queues the work of a GPU: %s", error)
        return None
    return driver


# --- a kernel and its parameters --------------------------------------------------------------------------------------


class _Graph:
    """A CUgraph, or a null pointer; destroyed with this object."""

    def __init__(self, driver: ctypes.CDLL, handle: ctypes.c_void_p) -> None:
        self._driver, self.handle = driver, handle

    def __del__(self) -> None:
        if self.handle.value:
            self._driver.cuGraphDestroy(self.handle)


def capture_launch(
    driver: ctypes.CDLL, device_stream: DeviceStream, launch: Callable[[torch.Tensor], None], plan: torch.Tensor
) -> KernelLaunch:
    """Capture the kernel that `launch` launches for a plan of one row, int64 [1, F] on the device. It does not run.

    launch: a function that has launched the same kernel before, so that it is compiled and loaded.

    Raises:
        RuntimeError: it does something else than to launch one kernel with the address of the plan, in blocks and
            threads of one dimension; or CUDA fails.
    """
    graph = _captured(driver, device_stream, launch, plan)
    count = ctypes.c_size_t()
    _checked(driver, "cuGraphGetNodes", graph.handle, None, ctypes.byref(count))
    nodes, kind = (POINTER * count.value)(), ctypes.c_int(-1)
    _checked(driver, "cuGraphGetNodes", graph.handle, nodes, ctypes.byref(count))
    if count.value == 1:
        _checked(driver, "cuGraphNodeGetType", POINTER(nodes[0]), ctypes.byref(kind))
    if kind.value != _KERNEL_NODE:
        raise RuntimeError(f"{count.value} operations instead of one kernel")
    node = _KernelNode()
    _checked(driver, "cuGraphKernelNodeGetParams_v2", POINTER(nodes[0]), ctypes.byref(node))
    function = POINTER(node.function)
    if not function.value:
        _checked(driver, "cuKernelGetFunction", ctypes.byref(function), POINTER(node.kernel))
    if node.grid[1:] != [1, 1] or node.block[1:] != [1, 1] or not node.parameters:
        raise RuntimeError(f"a kernel with a grid of {node.grid[:]} blocks of {node.block[:]} threads")
    parameters, address = _parameters(driver, function, node), plan.data_ptr()
    plans = [
        i for i, (at, size) in enumerate(parameters) if size == 8 and ctypes.c_uint64.from_address(at).value == address
    ]
    if len(plans) != 1:
        raise RuntimeError(f"{len(plans)} parameters instead of one are the address of the plan")
    addresses = (POINTER * len(parameters))(*(at for at, _ in parameters))
    found = KernelLaunch(
        function=function.value,
        parameters=ctypes.addressof(addresses),
        count_of_parameters=len(parameters),
        parameter_of_plan=plans[0],
        blocks=node.grid[0],
        threads=node.block[0],
        shared_bytes=node.shared_bytes,
    )
    found.kept = graph, launch, addresses
    return found


def _captured(
    driver: ctypes.CDLL, device_stream: DeviceStream, launch: Callable[[torch.Tensor], None], plan: torch.Tensor
) -> _Graph:
    """Capture the work that `launch` queues as a CUDA graph, on a new stream.

    The driver creates the stream, because torch takes streams from a pool and may return one that other code uses.
    """
    handle, graph = POINTER(), POINTER()
    with device_stream.queued():  # which makes the device current
        _checked(driver, "cuStreamCreate", ctypes.byref(handle), _NON_BLOCKING)
        try:
            stream = torch.cuda.ExternalStream(handle.value, device_stream.device)  # type: ignore[no-untyped-call]
            with torch.cuda.stream(stream):
                _checked(driver, "cuStreamBeginCapture_v2", handle, _THREAD_LOCAL)
                try:
                    launch(plan)
                finally:
                    status = driver.cuStreamEndCapture(handle, ctypes.byref(graph))
                    captured = _Graph(driver, graph)
            _check("cuStreamEndCapture", status)
        finally:
            driver.cuStreamDestroy_v2(handle)
    return captured


def _parameters(driver: ctypes.CDLL, function: ctypes.c_void_p, node: _KernelNode) -> list[tuple[int, int]]:
    """Return the address of each parameter's value, and its size in bytes."""
    found: list[tuple[int, int]] = []
    offset, size = ctypes.c_size_t(), ctypes.c_size_t()
    while (
        driver.cuFuncGetParamInfo(function, ctypes.c_size_t(len(found)), ctypes.byref(offset), ctypes.byref(size)) == 0
    ):
        if len(found) == _MOST_PARAMETERS:
            raise RuntimeError(f"a kernel with more than {_MOST_PARAMETERS} parameters")
        found.append((node.parameters[len(found)] or 0, size.value))
    return found


def _checked(driver: ctypes.CDLL, name: str, *arguments: Any) -> None:
    """Call a function of the driver. Raises RuntimeError if it fails."""
    _check(name, getattr(driver, name)(*arguments))


def _check(call: str, status: int) -> None:
    if status:
        raise RuntimeError(f"CUDA error: {call} returned {status}")


# --- a call -----------------------------------------------------------------------------------------------------------


class PlanMemory:
    """Memory for the plans of one call at a time, pinned and on the device.

    done: an event after the work of the call before. sources: memory that this work reads.
    """

    def __init__(self, device_stream: DeviceStream, size: int) -> None:
        with device_stream.queued():
            self._host = device_stream.pinned([size], torch.uint8)
            self._device = torch.empty(size, dtype=torch.uint8, device=device_stream.device)
        self.size, self.host, self.device = size, self._host.data_ptr(), self._device.data_ptr()
        self.done = device_stream.record_event(blocking=True)
        self.sources: list[object] = []


class Transfer(NamedTuple):
    """A copy of pinned memory to the device."""

    host: torch.Tensor
    device: torch.Tensor


@final
class GpuCall:
    """Work that is queued at once: the transfer of the plans, one for each kernel, a call of nvJPEG, and the kernels.

    memory: for the plans. The calling thread sleeps until the previous work on this memory is done. transfer: queued
    after the plans. queued: whether the work was queued.
    """

    def __init__(
        self,
        calls: GpuCalls,
        memory: PlanMemory,
        plans: Sequence[Ints],
        launches: Sequence[KernelLaunch],
        transfer: Transfer | None = None,
    ) -> None:
        starts, block = packing.in_one_block(plans)
        used = [
            launch.of_plan(memory.device + start, len(plan))
            for launch, start, plan in zip(launches, starts, plans, strict=True)
            if len(plan)
        ]
        self._launches = (KernelLaunch * len(used))(*used)
        self._kept = memory, launches, block, transfer
        self._calls, self.queued = calls, False
        self._call = _Call(
            free=memory.done.cuda_event,
            source=block.ctypes.data,
            plans=memory.host,
            plans_on_device=memory.device,
            bytes_of_plans=len(block),
            stream=calls.stream,
            done=memory.done.cuda_event,
            launches=ctypes.addressof(self._launches),
            count_of_launches=len(used),
        )
        if transfer is not None:
            self._call.pixels, self._call.pixels_on_device = transfer.host.data_ptr(), transfer.device.data_ptr()
            self._call.bytes_of_pixels = transfer.host.nbytes

    def queue(self) -> None:
        """Queue the plans and the kernels. Raises RuntimeError if CUDA fails."""
        failure: int = _queue(ctypes.addressof(self._calls.functions), ctypes.addressof(self._call))
        if failure:
            step, status = failure >> 32, failure & 0xFFFFFFFF
            name = _STEPS[step - 1]
            if name.startswith("nvjpeg"):
                raise NvjpegError(name, status)
            _check(name, status)
        self.queued = True

    def queue_decoding(
        self,
        decoder: BatchedDecoder,
        data: NDArray[np.uint64],
        lengths: NDArray[np.uint64],
        images: NDArray[np.uint64],
        stream: int,
        decoded: torch.cuda.Event,
        regions: Ints | None = None,
    ) -> None:
        """Queue the plans, a call of nvJPEG and the kernels.

        Args:
            data, lengths, images, stream, regions: as `BatchedDecoder.decode` has them.
            decoded: an event after the last call that used the decoder; recorded after this one, even if it fails.

        Raises:
            NvjpegError: see `BatchedDecoder.decode`. No kernel is queued then.
            RuntimeError: CUDA failed.
        """
        call = self._call
        call.images, call.decoding_stream, call.decoded = len(data), stream, decoded.cuda_event
        call.data, call.lengths, call.destinations = data.ctypes.data, lengths.ctypes.data, images.ctypes.data

        if regions is not None:
            parameters = decoder.parameters(len(data))
            call.regions, call.parameters = regions.ctypes.data, ctypes.addressof(parameters)

        def queue(handle: int, state: int, form: int, *, initialize: bool) -> None:
            call.handle, call.state, call.format, call.initialize = handle, state, form, initialize
            self.queue()

        decoder.decode_by(queue, len(data))


@final
class GpuCalls:
    """Queues the work of one loader's stream through C code. Any thread may call any method.

    stream: a cudaStream_t.
    """

    def __init__(self, driver: ctypes.CDLL, library: NvjpegLibrary, stream: int) -> None:
        self.driver = driver
        functions = [getattr(driver, name) for name in _OF_DRIVER] + [getattr(library, name) for name in _OF_LIBRARY]
        self.functions = _Functions(*(ctypes.cast(function, POINTER) for function in functions))
        self.stream = stream

    @classmethod
    def find(cls, device_stream: DeviceStream, library: NvjpegLibrary) -> GpuCalls | None:
        """Return one for a loader's stream; None, logged, without a driver that is new enough."""
        if device_stream.device.type != "cuda":
            return None
        driver = find_driver()
        return None if driver is None else cls(driver, library, device_stream.stream.cuda_stream)
