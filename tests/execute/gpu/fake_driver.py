"""Replaces CUDA's driver and nvJPEG for gpu_call.c: device memory is the host's, and queued work runs at once."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gpuflow.execute.gpu import launches
from gpuflow.execute.gpu.gpu_call import GpuCalls, KernelLaunch

__all__ = ["DONE", "STREAM", "FakeDriver", "copy_images", "use_c_code"]

STREAM, DONE, ROW_BLOCKS = 7, 9, 3
"""The handles of the loader's stream and of each event; the blocks of a row of a plan."""
_POINTER, _INT, _UNSIGNED, _LONG = ctypes.c_void_p, ctypes.c_int, ctypes.c_uint, ctypes.c_size_t

Kernel = Callable[[NDArray[np.int64]], None]
Decode = Callable[[NDArray[np.uint64], NDArray[np.uint64], NDArray[np.uint64]], int]


def _array(address: int, shape: tuple[int, ...]) -> NDArray[np.uint64]:
    count = int(np.prod(shape))
    return np.ctypeslib.as_array((ctypes.c_uint64 * count).from_address(address)).reshape(shape)


class FakeDriver:
    """calls: the name of each call and what identifies it. status: what a call of this name returns, by default 0.

    decode: what nvjpegDecodeBatched does with addresses, lengths and destinations [N, 8]. library: does that instead,
        with the methods of `NvjpegLibrary`.
    """

    def __init__(self, decode: Decode = lambda data, lengths, images: 0, library: Any = None) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.status: dict[str, int] = {}
        self.errors: list[BaseException] = []
        self._decode, self._library, self._counts = decode, library, dict[int, int]()
        self._kernels: list[tuple[Kernel, int]] = []
        self.cuEventSynchronize = self._function(partial(self._noted, "wait"), _POINTER)
        self.cuEventRecord = self._function(partial(self._noted, "record"), _POINTER, _POINTER)
        self.cuStreamWaitEvent = self._function(partial(self._noted, "wait in stream"), _POINTER, _POINTER, _UNSIGNED)
        self.cuMemcpyHtoDAsync_v2 = self._function(self._transfer, ctypes.c_uint64, _POINTER, _LONG, _POINTER)
        launched = _POINTER, *[_UNSIGNED] * 7, _POINTER, ctypes.POINTER(_POINTER), _POINTER
        self.cuLaunchKernel = self._function(self._launch, *launched)
        self.initialize = self._function(self._initialize, _POINTER, _POINTER, _INT, _INT, _INT)
        self.decode = self._function(self._decode_batch, *[_POINTER] * 6)
        self.set_region = self._function(self._set_region, _POINTER, *[_INT] * 4)
        self.decode_regions = self._function(self._decode_parts, *[_POINTER] * 7)

    def code(self) -> GpuCalls:
        """The C code with these functions."""
        driver: Any = self
        return GpuCalls(driver, driver, STREAM)

    def kernel(self, run: Kernel, columns: int) -> KernelLaunch:
        """A kernel that gets plans with this number of columns. Its second parameter is the plan's address."""
        self._kernels.append((run, columns))
        values = (ctypes.c_uint64 * 2)(5, 0)
        parameters = (_POINTER * 2)(ctypes.addressof(values), ctypes.addressof(values) + 8)
        launch = KernelLaunch(
            function=len(self._kernels),
            parameters=ctypes.addressof(parameters),
            count_of_parameters=2,
            parameter_of_plan=1,
            blocks=ROW_BLOCKS,
            threads=32,
            shared_bytes=64,
        )
        launch.kept = parameters, values
        return launch

    def _function(self, call: Callable[..., int], *types: Any) -> Any:
        """A function for C. What it raises is kept for `check`, as C code knows no exceptions."""

        def run(*arguments: Any) -> int:
            try:
                return call(*arguments)
            except BaseException as error:
                self.errors.append(error)
                return 999

        return ctypes.CFUNCTYPE(_INT, *types)(run)

    def check(self) -> None:
        """Raise what was raised in a call."""
        if self.errors:
            raise self.errors[0]

    def _noted(self, name: str, *arguments: Any) -> int:
        self.calls.append((name, *arguments))
        return self.status.get(name, 0)

    def _transfer(self, target: int, source: int, size: int, stream: int) -> int:
        ctypes.memmove(target, source, size)
        return self._noted("transfer", size, stream)

    def _launch(self, function: int, *rest: Any) -> int:
        (blocks, *others, threads, _, _, shared), stream, parameters = rest[:7], rest[7], rest[8]
        assert others == [1, 1]
        run, columns = self._kernels[function - 1]
        first, plan = (ctypes.c_uint64.from_address(parameters[i]).value for i in range(2))
        rows, rest_of_blocks = divmod(blocks, ROW_BLOCKS)
        assert rest_of_blocks == 0
        assert first == 5, "parameters other than the plan are as they were"
        run(_array(plan, (rows, columns)).view(np.int64).copy())
        return self._noted("launch", function, rows, threads, shared, stream)

    def _initialize(self, handle: int, state: int, images: int, threads: int, form: int) -> int:
        self._counts[state] = images
        if self._library is not None:
            self._library.initialize(handle, state, images, threads, form)
        return self._noted("initialize", handle, state, images, threads, form)

    def _decode_batch(self, handle: int, state: int, data: int, lengths: int, images: int, stream: int) -> int:
        if self._library is not None:
            self._noted("decode", handle, state, stream)
            status: int = self._library.decode(handle, state, data, lengths, images, stream)
            return status
        count = self._counts[state]
        found = self._decode(_array(data, (count,)), _array(lengths, (count,)), _array(images, (count, 8)))
        self._noted("decode", handle, state, stream)
        return self.status.get("decode", found)

    def _set_region(self, parameters: int, *region: int) -> int:
        if self._library is not None:
            self._library.set_region(parameters, *region)
        return self._noted("set region", parameters, *region)

    def _decode_parts(
        self, handle: int, state: int, data: int, lengths: int, images: int, parameters: int, stream: int
    ) -> int:
        if self._library is None:
            count = self._counts[state]
            self._noted("with", _array(parameters, (count,)).tolist())
            return self._decode_batch(handle, state, data, lengths, images, stream)
        self._noted("decode", handle, state, stream)
        status: int = self._library.decode_regions(handle, state, data, lengths, images, parameters, stream)
        return status


def use_c_code(monkeypatch: Any, copy: Callable[[torch.Tensor], None], driver_of: Callable[[Any], FakeDriver]) -> None:
    """Have every new runner use the C code.

    copy: what copies images, as `copy_images` does. driver_of: gives the driver for a runner's nvJPEG library.
    """

    def capture(driver: Any, stream: Any, launch: Callable[[torch.Tensor], None], plan: torch.Tensor) -> KernelLaunch:
        launch_of: KernelLaunch = driver.kernel(lambda rows: launch(torch.from_numpy(rows)), plan.shape[1])
        return launch_of

    monkeypatch.setattr(GpuCalls, "find", classmethod(lambda cls, stream, library: driver_of(library).code()))
    monkeypatch.setattr(launches, "copy_images", copy)
    monkeypatch.setattr(launches, "capture_launch", capture)


def copy_images(plan: torch.Tensor) -> None:
    """As the kernel does, in the host's memory."""
    for source, target, size in plan.tolist():
        ctypes.memmove(target, source, size)
