"""Tables of a chunk: its files, and what nvJPEG decodes of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gpuflow.execute.gpu.chunk_scan import ChunkScan, ChunkScanner, regions_around
from gpuflow.execute.gpu.passes import passes_of_each
from gpuflow.pipeline import stage as s
from gpuflow.pipeline.views import outputs_of
from gpuflow.sources import SPARE_BYTES, Payload
from gpuflow.stages import Decode, Flip, Normalize, RandomResizedCrop
from tests import images
from tests.running import keys_of, program_of

COUNT = 12


def scan_of(*stages: s.Stage, with_regions: bool = True, damaged: int | None = None) -> tuple[Payload, ChunkScan]:
    files = [
        images.jpeg(images.photo(60 + 3 * i, 90 - 2 * i, seed=i), "4:4:4" if i % 3 else "4:2:0") for i in range(COUNT)
    ]
    if damaged is not None:
        files[damaged] = b"no image"
    program = program_of(*stages)
    passes = passes_of_each(program)
    assert not isinstance(passes, str), passes
    payload = Payload.of(files, lambda size: np.zeros(size, np.uint8))
    scanner = ChunkScanner(program.decoder, outputs_of(program), passes, with_regions=with_regions)
    return payload, scanner(payload, keys_of(COUNT))


@pytest.mark.parametrize("color", ["rgb", "gray"])
@pytest.mark.parametrize("with_regions", [True, False])
def test_entries_have_the_file_and_the_part_that_is_decoded(color: Any, with_regions: bool) -> None:
    stages = Decode(color=color), RandomResizedCrop(size=16), Flip(horizontal=0.5)
    payload, scan = scan_of(*stages, with_regions=with_regions, damaged=5)
    rows, tables, channels = [i for i in range(COUNT) if i != 5], scan.tables, 3 if color == "rgb" else 1
    assert scan.rows.tolist() == rows
    assert tables.entries[:, 0].tolist() == [payload.buffer.ctypes.data + payload.offsets[i] for i in rows]
    assert tables.entries[:, 1].tolist() == [payload.sizes[i] + SPARE_BYTES for i in rows]
    sizes = np.array([[60 + 3 * i, 90 - 2 * i] for i in rows])
    draw, upright = scan.draws[0][0], np.ones(len(rows), np.uint8)
    boxes = draw.box if with_regions else np.column_stack([0 * sizes, sizes])
    parts, steps = regions_around([boxes], sizes, channels, upright)
    assert np.array_equal(tables.entries[:, 3:], parts)
    assert np.array_equal(tables.entries[:, 2], parts[:, 2] * channels)
    needed = parts[:, 2:].prod(axis=1) * channels
    assert (tables.spaces % 256 == 0).all() and (tables.spaces >= needed).all()
    assert (tables.spaces < needed + 256).all()
    assert tables.pixels.tolist() == sizes.prod(axis=1).tolist()
    assert len(set(tables.samplings.tolist())) == 2 and np.array_equal(tables.steps, steps)


def test_some_of_the_files_have_the_tables_that_they_have_among_all() -> None:
    _, scan = scan_of(Decode(), RandomResizedCrop(size=16), Normalize())
    kept = np.arange(COUNT) % 4 > 0
    for one, other in zip(scan.tables.take(kept), scan.tables, strict=True):
        assert np.array_equal(one, other[kept])
