"""The nvJPEG binding with a fake library that records the calls: their order, arguments and failures."""

from __future__ import annotations

import ctypes
import gc
import inspect
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gpuflow.decode import nvjpeg
from gpuflow.decode.nvjpeg import BACKENDS, BatchedDecoder, NvjpegError, NvjpegLibrary, for_chunks_of
from tests.decode import nvjpeg_header as header


class FakeLibrary:
    """Replaces `nvjpeg.NvjpegLibrary`. `bad`: addresses of JPEGs that make a batched call fail."""

    version, version_info = "13.3.2", (13, 3, 2)

    def __init__(self, *, create_status: int = 0, bad: frozenset[int] = frozenset()) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self._create_status, self._bad = create_status, bad

    def create(self, backend: int, device: None, pinned: None, flags: int, handle: Any) -> int:
        self.calls.append(("create", backend, flags))
        handle._obj.value = 11
        return self._create_status

    def create_state(self, handle: ctypes.c_void_p, state: Any) -> int:
        self.calls.append(("create_state", handle.value))
        state._obj.value = 22
        return 0

    def initialize(self, handle: int, state: int, size: int, threads: int, output: int) -> int:
        self.calls.append(("initialize", handle, state, size, threads, output))
        return 0

    def decode(self, handle: int, state: int, data: int, lengths: int, images: int, stream: int) -> int:
        size = next(call[3] for call in reversed(self.calls) if call[0] == "initialize")
        given = np.ctypeslib.as_array((ctypes.c_uint64 * size).from_address(data)).tolist()
        pitches = np.ctypeslib.as_array((ctypes.c_uint64 * (8 * size)).from_address(images)).reshape(size, 8)[:, 4]
        self.calls.append(("decode", given, pitches.tolist(), stream))
        return 6 if self._bad & set(given) else 0

    def create_parameters(self, handle: ctypes.c_void_p, parameters: Any) -> int:
        parameters._obj.value = 100 + sum(call[0] == "create_parameters" for call in self.calls)
        self.calls.append(("create_parameters", handle.value))
        return 0

    def set_format(self, parameters: ctypes.c_void_p, form: int) -> int:
        self.calls.append(("set_format", parameters.value, form))
        return 0

    def set_region(self, parameters: int, x: int, y: int, width: int, height: int) -> int:
        self.calls.append(("set_region", parameters, x, y, width, height))
        return 2 if width <= 0 else 0

    def decode_regions(
        self, handle: int, state: int, data: int, lengths: int, images: int, parameters: int, stream: int
    ) -> int:
        status = self.decode(handle, state, data, lengths, images, stream)
        count = len(self.calls[-1][1])
        self.calls.append(("with", (ctypes.c_uint64 * count).from_address(parameters)[:]))
        return status

    def destroy_parameters(self, parameters: ctypes.c_void_p) -> int:
        self.calls.append(("destroy_parameters", parameters.value))
        return 0

    def destroy_state(self, state: Any) -> int:
        self.calls.append(("destroy_state", state.value))
        return 0

    def destroy(self, handle: Any) -> int:
        self.calls.append(("destroy", handle.value))
        return 0


def batch(*addresses: int) -> tuple[Any, Any, Any]:
    images = np.zeros((len(addresses), 8), np.uint64)
    images[:, 4] = 30
    return np.array(addresses, np.uint64), np.full(len(addresses), 9, np.uint64), images


def test_calls_in_order_with_their_arguments() -> None:
    library: Any = FakeLibrary()
    engines = BatchedDecoder(library, "rgb")
    for addresses in ((1, 2), (3, 4), (5,)):
        engines.decode(*batch(*addresses), stream=77)
    del engines
    assert library.calls == [
        ("create", 3, 1 | 1 << 5),
        ("create_state", 11),
        ("initialize", 11, 22, 2, 1, 5),
        ("decode", [1, 2], [30, 30], 77),
        ("decode", [3, 4], [30, 30], 77),
        ("initialize", 11, 22, 1, 1, 5),
        ("decode", [5], [30], 77),
        ("destroy_state", 22),
        ("destroy", 11),
    ]


def test_parts_of_images() -> None:
    library: Any = FakeLibrary()
    engines = BatchedDecoder(library, "rgb")
    regions = np.array([(1, 2, 3, 4), (5, 6, 7, 8)], np.int64)
    engines.decode(*batch(1, 2), stream=77, regions=regions)
    engines.decode(*batch(3), stream=77, regions=regions[1:])
    del engines
    assert library.calls[2:] == [
        ("initialize", 11, 22, 2, 1, 5),
        ("create_parameters", 11),
        ("set_format", 100, 5),
        ("create_parameters", 11),
        ("set_format", 101, 5),
        ("set_region", 100, 1, 2, 3, 4),
        ("set_region", 101, 5, 6, 7, 8),
        ("decode", [1, 2], [30, 30], 77),
        ("with", [100, 101]),
        ("initialize", 11, 22, 1, 1, 5),
        ("set_region", 100, 5, 6, 7, 8),
        ("decode", [3], [30], 77),
        ("with", [100]),
        ("destroy_parameters", 100),
        ("destroy_parameters", 101),
        ("destroy_state", 22),
        ("destroy", 11),
    ]


def test_a_part_that_nvjpeg_refuses() -> None:
    library: Any = FakeLibrary()
    engines = BatchedDecoder(library, "rgb")
    with pytest.raises(NvjpegError, match=r"^nvJPEG: nvjpegDecodeParamsSetROI returned 2 \(invalid parameter\)$"):
        engines.decode(*batch(1), stream=0, regions=np.zeros((1, 4), np.int64))
    assert engines.batch_size == 0, "the next call initializes the state again"


def test_cuda_kernels_are_asked_for_the_same_pixels() -> None:
    library: Any = FakeLibrary()
    BatchedDecoder(library, "rgb", "cuda")
    assert library.calls[0] == ("create", 2, 1 << 5)


def test_few_images_are_decoded_with_the_processors_help() -> None:
    library: Any = FakeLibrary()
    kinds = [for_chunks_of(images, backend) for images in (49, 50) for backend in BACKENDS]
    assert kinds == ["hardware", "cuda_few", "hardware", "cuda"]
    BatchedDecoder(library, "rgb", "cuda_few")
    assert library.calls[0] == ("create", 1, 1 << 5)


def test_a_gpu_without_engines() -> None:
    library: Any = FakeLibrary(create_status=7)
    with pytest.raises(NvjpegError, match=r"^nvJPEG: nvjpegCreateEx returned 7 \(architecture mismatch\)$"):
        BatchedDecoder(library, "rgb")
    gc.collect()
    assert [call[0] for call in library.calls] == ["create", "destroy"]


def test_after_a_failed_call_the_state_is_initialized_again() -> None:
    library: Any = FakeLibrary(bad=frozenset({2}))
    engines = BatchedDecoder(library, "gray")
    with pytest.raises(NvjpegError, match=r"^nvJPEG: nvjpegDecodeBatched returned 6 \(execution failed\)$"):
        engines.decode(*batch(1, 2), stream=0)
    engines.decode(*batch(1, 3), stream=0)
    assert [call[0] for call in library.calls] == [
        "create", "create_state", "initialize", "decode", "initialize", "decode",
    ]  # fmt: skip


# --- nvJPEG's own header ----------------------------------------------------------------------------------------------


def kind_of(parameter: str) -> type[Any]:
    """The ctypes type of a parameter of the header."""
    name = parameter.split()[0]
    if "*" in parameter or name in header.POINTERS:
        return ctypes.c_void_p
    if name in header.ENUMS or name == "int":
        return ctypes.c_int
    assert parameter.startswith("unsigned int ")
    return ctypes.c_uint


class Functions(dict[str, SimpleNamespace]):
    """A library of any functions, by name."""

    def __getattr__(self, name: str) -> SimpleNamespace:
        return self.setdefault(name, SimpleNamespace())


def test_the_binding_declares_the_functions_of_the_header(monkeypatch: pytest.MonkeyPatch) -> None:
    functions = Functions()
    monkeypatch.setattr(ctypes, "CDLL", lambda path: functions)
    library: Any = NvjpegLibrary("libnvjpeg.so")
    declared = {name: vars(function) for name, function in functions.items()}
    assert declared == {
        name: {"argtypes": [kind_of(parameter) for parameter in parameters]}
        for name, parameters in header.FUNCTIONS.items()
    }, "and no restype: ctypes takes an int, which is what an nvjpegStatus_t is"
    names = {id(function): name for name, function in functions.items()}
    for attribute in vars(library).keys() - {"path", "_version"}:
        parameters = header.FUNCTIONS[names[id(getattr(library, attribute))]]
        fake = inspect.signature(getattr(FakeLibrary(), attribute))
        assert len(fake.parameters) == len(parameters), f"the fake's {attribute}"


def test_the_constants_are_those_of_the_header() -> None:
    backend, output, flags = header.NVJPEG_BACKEND, header.NVJPEG_OUTPUT, header.NVJPEG_FLAGS
    constants = {"hardware": backend["HARDWARE"], "cuda": backend["GPU_HYBRID"], "cuda_few": backend["HYBRID"]}
    assert constants == nvjpeg._BACKENDS
    assert {"rgb": output["RGBI"], "bgr": output["BGRI"], "gray": output["Y"]} == nvjpeg.FORMATS
    assert flags["HW_DECODE_NO_PIPELINE"] == nvjpeg._FLAG_NO_PIPELINE
    assert flags["UPSAMPLING_WITH_INTERPOLATION"] == nvjpeg._FLAG_INTERPOLATION
    assert set(nvjpeg._STATUS) == set(header.NVJPEG_STATUS.values()) - {0}
    assert len(header.NVJPEG_IMAGE) * 4 == batch(1)[2].shape[1], "channels, then pitches, of 8 bytes each"
