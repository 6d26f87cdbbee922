"""Parity on an NVIDIA GPU: within two levels of the CPU, and serving equals validation, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gpuflow.config import read_config
from gpuflow.parity import study
from gpuflow.parity.report import Pair, Report, verdict
from gpuflow.stages import STAGES
from tests.datasets import RAW, VAL, Entries
from tests.parity.conftest import read

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no NVIDIA GPU"),
]

HALF = [*RAW, {"normalize": {"dtype": "bfloat16", "layout": "nhwc"}}]


def explained(report: Report) -> str:
    """The verdict, what decodes in each way, and the images that differ most after the last stage."""
    ways = [f"{way.name}: {way.missing or way.about}" for way in report.ways]
    most = [
        f"{pair.a} and {pair.b}: {picture.name}, {picture.difference.max():g} levels"
        for pair in report.judged
        for picture in pair.pictures
    ]
    return "\n".join([verdict(report), *ways, *most])


@pytest.mark.parametrize("stages", [VAL, RAW, HALF], ids=["float32", "uint8", "bfloat16"])
def test_the_gpu_is_within_two_levels_and_serves_what_it_validates(
    stages: Entries, photos: Path, tmp_path: Path
) -> None:
    report = study(read(photos, tmp_path, stages, stages), count=12)
    assert not report.breach, explained(report)
    pairs = {(pair.a, pair.b): pair for pair in report.pairs}
    assert pairs["val", "val@cuda"].asked.startswith("at most 2 levels")
    assert [row.allowed for row in pairs["val", "val@cuda"].rows] == [2] * len(stages)
    levels = [found for row in pairs["val", "val@cuda"].rows for found in (row.own, row.hostile) if found is not None]
    assert levels and all(found.mean < 0.25 for found in levels)
    assert pairs["val@cuda", "serve@cuda"].asked == "equal: both run on the same device"
    assert all(row.differ == 0 and row.images == 50 for row in pairs["val@cuda", "serve@cuda"].rows)


def test_torchvisions_decoder_on_the_gpu_is_further_away(photos: Path, tmp_path: Path) -> None:
    report = study(read(photos, tmp_path), count=12)
    pairs: dict[str, Pair] = {pair.b: pair for pair in report.pairs}
    ours, theirs = (pairs[way].rows[0].hostile for way in ("val@cuda", "torchvision@cuda"))
    assert ours is not None and theirs is not None
    assert ours.max <= 2 < theirs.max, explained(report)


def test_a_preset_of_the_gpu_is_trained_and_served_alike(photos: Path, tmp_path: Path) -> None:
    block = "{preset: torchpipe_gpu, height: 20, width: 30, stages: [normalize]}"
    path = tmp_path / "x.yaml"
    path.write_text(f"source: {{folder: {photos}}}\npipelines: {{val: {block}}}\nserve: {block}\n")
    report = study(read_config(path, STAGES), count=12)
    assert not report.breach, explained(report)
    (pair,) = report.judged
    assert (pair.a, pair.b) == ("val@cuda", "serve@cuda")
    assert all(row.images >= 40 for row in pair.rows)
