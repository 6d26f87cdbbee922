"""Samples for detection: boxes, outlines, masks and pixels that agree, the same on any number of threads."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from gpuflow.errors import ConfigError
from gpuflow.pipeline.records import MaskFile, Ragged
from gpuflow.sources import Source, fields_of, open_source, records_of, source_spec
from gpuflow.tools.samples import SHAPES, make_detection_samples, make_samples

COUNT = 6
LISTING: dict[str, Any] = {
    "boxes": {"labels": "labels", "classes": tuple(SHAPES)},
    "polygons": {"type": "mask", "kind": "polygons"},
}


def tree(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*.*") if path.is_file()}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("samples") / "shapes"
    assert str(make_detection_samples(root, COUNT)).startswith(f"{root}: {COUNT} images, 3 classes, ")
    return root


def column(source: Source, name: str) -> list[Any]:
    records = records_of(source, range(len(source)))
    assert not any(records.errors)
    values = records.columns[name]
    return [values[i].tolist() if isinstance(values, Ragged) else values[i] for i in range(len(source))]


def test_files_are_a_pure_function_of_count_and_seed(made: Path, tmp_path: Path) -> None:
    make_detection_samples(tmp_path / "again", COUNT)
    assert tree(tmp_path / "again") == tree(made)
    (tmp_path / "again" / "masks" / "000003.png").unlink()
    assert make_detection_samples(tmp_path / "again", COUNT).made == 1
    assert tree(tmp_path / "again") == tree(made)
    make_detection_samples(tmp_path / "other", COUNT, seed=1)
    assert tree(tmp_path / "other")["instances.json"] != tree(made)["instances.json"]


def test_both_files_of_annotations_say_the_same(made: Path) -> None:
    coco = open_source(source_spec(coco=str(made / "instances.json"), images=str(made / "images")))
    fields: Any = {**LISTING, "mask": {}}
    listed = open_source(source_spec(listing=str(made / "listing.jsonl"), fields=fields))
    assert fields_of(coco)[0].classes == fields_of(listed)[0].classes == tuple(SHAPES)
    assert column(coco, "boxes") == column(listed, "boxes")
    assert column(coco, "labels") == column(listed, "labels")
    outlines = [
        [[[part.tolist() for part in shape.outlines] for shape in shapes] for shapes in column(source, name)]
        for source, name in ((coco, "mask"), (listed, "polygons"))
    ]
    assert outlines[0] == outlines[1]
    assert all(1 <= len(boxes) <= 4 for boxes in column(coco, "boxes"))
    assert {label for labels in column(coco, "labels") for label in labels} == {0, 1, 2}


def test_boxes_are_the_extents_of_the_masks_and_areas_theirs(made: Path) -> None:
    listed = open_source(source_spec(listing=str(made / "listing.jsonl"), fields={**LISTING, "mask": {}}))
    document = json.loads((made / "instances.json").read_text())
    areas = iter(annotation["area"] for annotation in document["annotations"])
    for i, (boxes, labels) in enumerate(zip(column(listed, "boxes"), column(listed, "labels"), strict=True)):
        mask = column(listed, "mask")[i]
        assert isinstance(mask, MaskFile)
        levels = np.asarray(Image.open(io.BytesIO(mask.data)))
        with Image.open(made / "images" / f"{i:06d}.jpg") as image:
            assert levels.shape == (image.height, image.width)
        for (x1, y1, x2, y2), label in zip(boxes, labels, strict=True):
            inside = levels[int(y1) : int(y2), int(x1) : int(x2)] == label + 1
            assert inside.any(axis=0).sum() >= (x2 - x1) - 2 and inside.any(axis=1).sum() >= (y2 - y1) - 2
            assert inside.sum() == pytest.approx(next(areas), rel=0.05)
    assert sum(len(boxes) for boxes in column(listed, "boxes")) == len(document["annotations"])


def test_other_samples_are_not_overwritten(made: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="must be absent, empty or filled by the same command before"):
        make_samples(made, COUNT)
    make_samples(tmp_path / "photos", 3)
    with pytest.raises(ConfigError, match="must be absent, empty or filled by the same command before"):
        make_detection_samples(tmp_path / "photos", 3)
