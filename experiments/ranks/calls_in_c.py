"""Calls of nvJPEG that a thread without Python makes, to learn what Python's part in a loader costs a training.

Compiles calls_in_c.c, which needs a C compiler.
"""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch
from numpy.typing import NDArray

from gpuflow.decode.nvjpeg import BatchedDecoder, find_nvjpeg
from gpuflow.execute.gpu.launches import FirstPasses

SOURCE = Path(__file__).with_suffix(".c")
_FUNCTIONS = ("cudaSetDevice", "cudaEventCreateWithFlags", "cudaEventRecord", "cudaEventSynchronize")


def _compiled() -> ctypes.CDLL:
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "calls_in_c.so"
        subprocess.run(["cc", "-O3", "-fPIC", "-shared", "-std=gnu11", "-o", library, SOURCE], check=True)
        return ctypes.CDLL(str(library))


class _Recorded(NamedTuple):
    """A call that a launch made: the decoder and copies of what `BatchedDecoder.decode` got."""

    decoder: BatchedDecoder
    data: NDArray[np.uint64]
    lengths: NDArray[np.uint64]
    images: NDArray[np.uint64]
    regions: NDArray[np.int64]


def _recorded(launch: Callable[[], object]) -> list[_Recorded]:
    """The calls that a launch makes."""
    found: list[_Recorded] = []
    decode = BatchedDecoder.decode

    def recording(decoder: BatchedDecoder, *arguments: Any) -> None:
        data, lengths, images, _, regions = arguments
        if regions is None:
            raise RuntimeError("this libnvjpeg does not decode parts of images")
        found.append(_Recorded(decoder, data.copy(), lengths.copy(), images.copy(), regions.copy()))
        decode(decoder, *arguments)

    by_python = patch.object(FirstPasses, "captured", lambda *arguments: None)
    with patch.object(BatchedDecoder, "decode", recording), by_python:
        launch()
    torch.cuda.synchronize()
    return found


@contextmanager
def calls_in_c(
    launch: Callable[[], object], device: torch.device, *, ahead: int, seconds: float
) -> Iterator[Callable[[], object]]:
    """A thread without Python makes the calls of a launch again, each time that the function is called.

    The function waits while `ahead` of its calls are not answered. The encoded bytes that the launch decodes must stay
    where they are. Raises RuntimeError if a call failed, or took longer than `seconds`. CalledProcessError or OSError
    if the C code cannot be compiled.
    """
    recorded, library = _recorded(launch), _compiled()
    spaces = [int(one.images[:, 0].max() - one.images[:, 0].min()) + (1 << 27) for one in recorded]
    memory = torch.empty(max(spaces), dtype=torch.uint8, device=device)
    decoders = {id(one.decoder): BatchedDecoder(find_nvjpeg(), "rgb") for one in recorded}
    numbers = {key: number for number, key in enumerate(decoders)}
    rows: list[Sequence[int]] = []
    kept: list[object] = []
    for one in recorded:
        one.images[:, 0] = one.images[:, 0] - one.images[:, 0].min() + np.uint64(memory.data_ptr())
        own, count = decoders[id(one.decoder)], len(one.data)
        parameters = own.parameters(count)
        kept.append(parameters)
        state = [own._handle.value or 0, own._state.value or 0, numbers[id(one.decoder)], count, own._format]
        arrays = [array.ctypes.data for array in (one.data, one.lengths, one.images)]
        rows.append([*state, *arrays, ctypes.addressof(parameters), one.regions.ctypes.data])
    table = np.array(rows, np.uint64)
    runtime, nvjpeg = ctypes.CDLL(f"libcudart.so.{(torch.version.cuda or '').split('.')[0]}"), find_nvjpeg()
    calls = nvjpeg.initialize, nvjpeg.set_region, nvjpeg.decode_regions
    pointers = [*(getattr(runtime, name) for name in _FUNCTIONS), *calls]
    addresses = [ctypes.cast(function, ctypes.c_void_p).value or 0 for function in pointers]
    functions = np.array(addresses, np.uint64)
    stream = torch.cuda.Stream(device, priority=0)  # type: ignore[no-untyped-call]
    library.calls_ask.argtypes = [ctypes.c_int64, ctypes.c_int64]
    library.calls_stop.restype = ctypes.c_int64
    library.calls_start.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_void_p]
    library.calls_start(functions.ctypes.data, table.ctypes.data, len(table), device.index or 0, stream.cuda_stream)

    def ask() -> None:
        if library.calls_ask(ahead, int(seconds)):
            raise RuntimeError(f"the calls were not made within {seconds:g} s")

    try:
        yield ask
    finally:
        failures = library.calls_stop()
        torch.cuda.synchronize()
    if failures:
        raise RuntimeError(f"{failures} calls of nvJPEG failed")
