"""The layout of encoded samples in one buffer."""

from __future__ import annotations

import numpy as np
import pytest

from gpuflow.errors import SourceError
from gpuflow.sources.storage import SPARE_BYTES, Payload, lay_out
from tests.texts import outline


def test_spare_bytes_follow_each_sample() -> None:
    assert SPARE_BYTES == 16
    assert lay_out([3, 0, 5]) == ([0, 19, 35], 56)
    assert lay_out([]) == ([], 0)


def test_of_files_in_memory() -> None:
    payload = Payload.of([b"abc", np.array([7], np.uint8), b""], lambda size: np.zeros(size, np.uint8))
    assert len(payload) == 3
    assert [payload.sample(i).tobytes() for i in range(3)] == [b"abc", b"\x07", b""]
    assert payload.errors == [None, None, None]
    spare = np.ones(len(payload.buffer), bool)
    for offset, size in zip(payload.offsets, payload.sizes, strict=True):
        spare[offset : offset + size] = False
    assert not payload.buffer[spare].any()
    assert len(payload.buffer) == 3 * SPARE_BYTES + 4


@pytest.mark.parametrize("size", [-1, -40, -(2**31), 2**40])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_damaged_size_is_an_error_of_its_sample_alone(place: int, size: int) -> None:
    """As a source of another package reads: sizes from its own index, then the bytes into their places."""
    files, memory = [b"first", b"second", b"third"], np.zeros(200, np.uint8)
    sizes = [len(data) for data in files]
    sizes[place] = size
    offsets, end = lay_out(sizes)
    buffer = memory[: min(end, len(memory))]
    for i, (offset, data) in enumerate(zip(offsets, files, strict=True)):
        if i != place and offset + len(data) <= len(buffer):
            buffer[offset : offset + len(data)] = np.frombuffer(data, np.uint8)
    payload = Payload(buffer=buffer, offsets=offsets, sizes=sizes, errors=[None] * 3)
    assert (payload.sizes[place], payload.sample(place).tobytes()) == (0, b"")
    error = payload.errors[place]
    assert error is not None and outline(SourceError(error)) == f"its, got {size} bytes at {offsets[place]}"
    for i, data in enumerate(files):
        assert payload.errors[i] is not None or payload.sample(i).tobytes() == data
    assert size > 0 or [error is None for error in payload.errors].count(True) == 2


def test_a_place_outside_of_the_buffer_is_an_error() -> None:
    offsets, sizes = [-5, 0, 8, 2**63], [3, 8, 3, 1]
    buffer, errors = np.arange(10, dtype=np.uint8), ["gone", None, None, None]
    payload = Payload(buffer=buffer, offsets=offsets, sizes=sizes, errors=errors)
    outlines = [error and outline(SourceError(error)) for error in payload.errors]
    assert outlines == ["gone", None, "its, got 3 bytes at 8", f"its, got 1 bytes at {2**63}"]
    assert [payload.sample(i).tobytes() for i in range(4)] == [b"", bytes(range(8)), b"", b""]
