"""The nvJPEG binding with a fake library that records the calls: their order, arguments and failures."""

from __future__ import annotations

import ctypes
import gc
from typing import Any

import numpy as np
import pytest

from gpuflow.decode.nvjpeg import BatchedDecoder, NvjpegError


class FakeLibrary:
    """Replaces `nvjpeg.NvjpegLibrary`. `bad`: addresses of JPEGs that make a batched call fail."""

    version = "0.0.0"

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

    def initialize(self, handle: Any, state: Any, size: int, threads: int, output: int) -> int:
        self.calls.append(("initialize", handle.value, state.value, size, threads, output))
        return 0

    def decode(self, handle: Any, state: Any, data: int, lengths: int, images: int, stream: int) -> int:
        size = next(call[3] for call in reversed(self.calls) if call[0] == "initialize")
        given = np.ctypeslib.as_array((ctypes.c_uint64 * size).from_address(data)).tolist()
        pitches = np.ctypeslib.as_array((ctypes.c_uint64 * (8 * size)).from_address(images)).reshape(size, 8)[:, 4]
        self.calls.append(("decode", given, pitches.tolist(), stream))
        return 6 if self._bad & set(given) else 0

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


def test_cuda_kernels_are_asked_for_the_same_pixels() -> None:
    library: Any = FakeLibrary()
    BatchedDecoder(library, "rgb", "cuda")
    assert library.calls[0] == ("create", 2, 1 << 5)


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
