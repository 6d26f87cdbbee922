"""The tables of a chunk that a process makes which reads its files."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gpuflow.execute.gpu.chunk_scan import ChunkScan, ChunkScanner, Regions
from gpuflow.execute.gpu.passes import passes_of_each
from gpuflow.execute.tables import FIELDS
from gpuflow.pipeline import stage as s
from gpuflow.pipeline.views import outputs_of
from gpuflow.sources import SPARE_BYTES, Payload
from gpuflow.stages import CenterCrop, Decode, Flip, Normalize, RandomResizedCrop, Resize, Rotate
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
    assert tables.entries[:, 0].tolist() == [payload.offsets[i] for i in rows]
    assert tables.entries[:, 1].tolist() == [payload.sizes[i] + SPARE_BYTES for i in rows]
    sizes = np.array([[60 + 3 * i, 90 - 2 * i] for i in rows])
    draw, upright = scan.draws[0][0], np.ones(len(rows), np.uint8)
    parts = Regions.around([draw.box], sizes, channels, upright)
    if not with_regions:
        parts = Regions.whole(sizes, channels, upright)
    assert np.array_equal(tables.entries[:, 3:], np.column_stack([parts.x, parts.y, parts.width, parts.height]))
    assert np.array_equal(tables.entries[:, 2], parts.width * channels)
    assert (tables.spaces % 256 == 0).all() and (tables.spaces >= parts.width * parts.height * channels).all()
    assert (tables.spaces < parts.width * parts.height * channels + 256).all()
    assert tables.pixels.tolist() == sizes.prod(axis=1).tolist()
    assert len(set(tables.samplings.tolist())) == 2 and np.array_equal(tables.steps, parts.steps)
    (plan,) = tables.plans
    assert plan is not None and plan.shape == (len(rows), len(FIELDS))
    assert np.array_equal(plan[:, :3], parts.steps) and not plan[:, -1].any()
    assert np.array_equal(plan[:, 3:7], draw.box) and np.array_equal(plan[:, -3:-1], draw.flips)


def test_some_of_the_files_have_the_tables_that_they_have_among_all() -> None:
    _, scan = scan_of(Decode(), RandomResizedCrop(size=16), Normalize())
    kept = np.arange(COUNT) % 4 > 0
    *taken, plans = scan.tables.take(kept)
    *tables, whole = scan.tables
    for one, other in zip([*taken, *plans], [*tables, *whole], strict=True):
        assert one is not None and other is not None and np.array_equal(one, other[kept])


@pytest.mark.parametrize(
    "stages", [(Rotate(degrees=20), CenterCrop(size=16)), (Resize(shorter=20), Rotate(degrees=20), CenterCrop(size=16))]
)
def test_other_passes_get_their_plan_where_the_gpu_is(stages: tuple[s.Stage, ...]) -> None:
    """That of a warp needs torch, and results that differ in size are divided into tiles first."""
    _, scan = scan_of(Decode(), *stages, Normalize())
    assert scan.tables.plans == [None] and len(scan.tables.steps) == COUNT
