"""Which prepared chunks a launch gets, besides its own."""

from __future__ import annotations

from typing import Any

import numpy as np

from gpuflow.loader.batch import Assembly, Chunk
from gpuflow.loader.lowering import PreparedChunks


def chunk(step: int, start: int, prepared: Any) -> Chunk:
    none = np.empty(0, np.int64)
    batch = Assembly(step, none, none, none.astype(bool), none.astype(bool), 1)
    return Chunk(batch, start, start + 2, last=False, prepared=prepared)


def test_the_others_come_in_the_order_of_their_launches() -> None:
    prepared = PreparedChunks()
    chunks = [chunk(step, start, f"{step}.{start}") for step, start in ((2, 0), (0, 2), (1, 0), (0, 0), (10, 0))]
    for one in chunks:
        prepared.add(one)
    assert prepared.take(chunks[3]) == ["0.2", "1.0", "2.0", "10.0"]
    assert prepared.take(chunks[2]) == ["0.2", "2.0", "10.0"], "a chunk may overtake another one"
    assert prepared.take(chunks[2]) == ["0.2", "2.0", "10.0"], "again it takes nothing"


def test_chunks_that_no_gpu_decodes_are_not_kept() -> None:
    prepared = PreparedChunks()
    prepared.add(chunk(0, 0, None))
    assert prepared.take(chunk(1, 0, None)) == []
