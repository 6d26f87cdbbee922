"""The layout of encoded samples in one buffer."""

from __future__ import annotations

import numpy as np

from gpuflow.sources.payload import SPARE_BYTES, Payload, lay_out


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
