"""What the C code calls, in which order and with what, and what a failure leaves behind."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from gpuflow.decode.nvjpeg import BatchedDecoder, NvjpegError
from gpuflow.execute.gpu.gpu_call import GpuCall, PlanMemory, Transfer
from tests.execute.gpu.fake_driver import DONE, STREAM, FakeDriver
from tests.host_stream import HostStream

HANDLE, STATE, DECODED, SECOND_STREAM = 11, 22, 33, 44


class Event:
    cuda_event = DECODED


class Decoder:
    """Replaces `BatchedDecoder`; it has only the methods that a call uses."""

    batch_size = 0

    def parameters(self, count: int) -> Any:
        return (ctypes.c_void_p * count)(*range(100, 100 + count))

    def decode_by(self, run: Any, count: int) -> None:
        former, self.batch_size = self.batch_size, 0
        run(HANDLE, STATE, 5, initialize=count != former)
        self.batch_size = count


def memory() -> PlanMemory:
    stream: Any = HostStream()
    return PlanMemory(stream, 4096)


def plan(rows: int) -> NDArray[np.int64]:
    return np.arange(3 * rows, dtype=np.int64).reshape(rows, 3)


def queue(
    call: GpuCall, decoder: Decoder, count: int = 2, stream: int = STREAM, regions: NDArray[np.int64] | None = None
) -> None:
    values = np.arange(1, count + 1, dtype=np.uint64)
    anything: Any = decoder
    event: Any = Event()
    call.queue_decoding(anything, values, values * 10, np.ones((count, 8), np.uint64), stream, event, regions)


def test_the_calls_in_their_order() -> None:
    decoded: list[tuple[Any, ...]] = []

    def decode(*arrays: NDArray[np.uint64]) -> int:
        decoded.append(tuple(array.tolist() for array in arrays))
        return 0

    driver = FakeDriver(decode)
    seen: list[list[list[int]]] = []
    kernel = driver.kernel(lambda rows: seen.append(rows.tolist()), 3)
    decoder, calls = Decoder(), driver.code()
    for count in (2, 2, 1):
        call = GpuCall(calls, memory(), [plan(2), plan(1)], [kernel, kernel])
        queue(call, decoder, count)
        assert call.queued
    first = [
        ("wait", DONE),
        ("transfer", 2 * 3 * 8 + 3 * 8 + 8, STREAM),  # each plan begins at a multiple of 16 bytes
        ("wait", DECODED),
        ("initialize", HANDLE, STATE, 2, 1, 5),
        ("decode", HANDLE, STATE, STREAM),
        ("record", DECODED, STREAM),
        ("launch", 1, 2, 32, 64, STREAM),
        ("launch", 1, 1, 32, 64, STREAM),
        ("record", DONE, STREAM),
    ]
    later = [one for one in first if one[0] != "initialize" and one != ("wait", DECODED)]
    last = [one if one[0] != "initialize" else ("initialize", HANDLE, STATE, 1, 1, 5) for one in first]
    driver.check()
    assert driver.calls == [*first, *later, *last]
    assert seen == [plan(2).tolist(), plan(1).tolist()] * 3
    assert decoded[0] == ([1, 2], [10, 20], [[1] * 8] * 2) and len(decoded[2][0]) == 1


def test_parts_of_images() -> None:
    driver, decoder = FakeDriver(), Decoder()
    call = GpuCall(driver.code(), memory(), [plan(1)], [driver.kernel(lambda rows: None, 3)])
    queue(call, decoder, regions=np.array([(1, 2, 3, 4), (5, 6, 7, 8)], np.int64))
    driver.check()
    assert driver.calls[4:-3] == [
        ("set region", 100, 1, 2, 3, 4),
        ("set region", 101, 5, 6, 7, 8),
        ("with", [100, 101]),
        ("decode", HANDLE, STATE, STREAM),
    ]


def test_a_transfer_and_kernels_without_decoding() -> None:
    driver = FakeDriver()
    seen: list[int] = []
    pixels, target = torch.arange(40, dtype=torch.uint8), torch.zeros(40, dtype=torch.uint8)
    kernels = [driver.kernel(lambda rows: seen.append(len(rows)), 3)] * 3
    GpuCall(driver.code(), memory(), [plan(0), plan(4), plan(0)], kernels, Transfer(pixels, target)).queue()
    driver.check()
    assert torch.equal(pixels, target)
    assert [name for name, *_ in driver.calls] == ["wait", "transfer", "transfer", "launch", "record"]
    assert seen == [4], "a plan without rows launches nothing"


def test_a_second_decoder_has_its_own_stream() -> None:
    driver = FakeDriver()
    queue(
        GpuCall(driver.code(), memory(), [plan(1)], [driver.kernel(lambda rows: None, 3)]), Decoder(), 2, SECOND_STREAM
    )
    assert driver.calls[4:] == [
        ("decode", HANDLE, STATE, SECOND_STREAM),
        ("record", DECODED, SECOND_STREAM),
        ("wait in stream", STREAM, DECODED, 0),
        ("launch", 1, 1, 32, 64, STREAM),
        ("record", DONE, STREAM),
    ]


@pytest.mark.parametrize(
    ("name", "error", "after"),
    [
        ("initialize", r"^nvJPEG: nvjpegDecodeBatchedInitialize returned 5 \(allocation failed\)$", []),
        ("decode", r"^nvJPEG: nvjpegDecodeBatched returned 5 \(allocation failed\)$", ["record"]),
    ],
)
def test_a_failure_of_nvjpeg_launches_nothing(name: str, error: str, after: list[str]) -> None:
    driver, decoder = FakeDriver(), Decoder()
    kernel = driver.kernel(lambda rows: None, 3)
    driver.status[name] = 5
    call = GpuCall(driver.code(), memory(), [plan(1)], [kernel])
    with pytest.raises(NvjpegError, match=error):
        queue(call, decoder)
    assert not call.queued
    names = [one for one, *_ in driver.calls]
    assert names[names.index(name) + 1 :] == after, "the event says when the state is free again"
    driver.status.clear()
    queue(GpuCall(driver.code(), memory(), [plan(1)], [kernel]), decoder)
    assert ("initialize", HANDLE, STATE, 2, 1, 5) in driver.calls[len(names) :]


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("set region", r"^nvJPEG: nvjpegDecodeParamsSetROI returned 2 \(invalid parameter\)$"),
        ("decode", r"^nvJPEG: nvjpegDecodeBatchedEx returned 2 \(invalid parameter\)$"),
    ],
)
def test_parts_that_nvjpeg_refuses(name: str, error: str) -> None:
    driver = FakeDriver()
    driver.status[name] = 2
    call = GpuCall(driver.code(), memory(), [plan(1)], [driver.kernel(lambda rows: None, 3)])
    with pytest.raises(NvjpegError, match=error):
        queue(call, Decoder(), regions=np.ones((2, 4), np.int64))
    assert not call.queued and driver.calls[-1] == ("record", DECODED, STREAM)


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("wait", "cuEventSynchronize"),
        ("transfer", "cuMemcpyHtoDAsync"),
        ("launch", "cuLaunchKernel"),
        ("record", "cuEventRecord"),
        ("wait in stream", "cuStreamWaitEvent"),
    ],
)
def test_a_failure_of_cuda_is_no_failure_of_a_file(name: str, step: str) -> None:
    driver = FakeDriver()
    driver.status[name] = 719
    call = GpuCall(driver.code(), memory(), [plan(1)], [driver.kernel(lambda rows: None, 3)])
    with pytest.raises(RuntimeError, match=f"^CUDA error: {step} returned 719$") as caught:
        queue(call, Decoder(), stream=SECOND_STREAM)
    assert not isinstance(caught.value, NvjpegError) and not call.queued


def test_the_real_decoder_says_when_its_state_must_be_set_up() -> None:
    class Library:
        def create(self, *arguments: Any) -> int:
            return 0

        create_state = destroy = destroy_state = create

    library: Any = Library()
    decoder, asked = BatchedDecoder(library, "gray"), []

    def run(handle: int, state: int, form: int, *, initialize: bool) -> None:
        asked.append((form, initialize))
        if len(asked) == 3:
            raise NvjpegError("nvjpegDecodeBatched", 6)

    for count in (4, 4):
        decoder.decode_by(run, count)
    with pytest.raises(NvjpegError):
        decoder.decode_by(run, 4)
    decoder.decode_by(run, 4)
    assert asked == [(2, True), (2, False), (2, False), (2, True)]
