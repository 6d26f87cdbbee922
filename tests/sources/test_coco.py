"""The COCO source: pycocotools' conventions, and annotations that are wrong."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image

import gpuflow
from gpuflow.errors import ConfigError, SourceError
from gpuflow.pipeline.records import Field, Polygons, Ragged, Rle
from gpuflow.sources import (
    Source,
    fields_of,
    fingerprint_of,
    has_labels,
    left_out_of,
    open_source,
    records_of,
    source_spec,
    subset,
)
from gpuflow.sources.record_table import TableSource
from tests.texts import outline

Document = dict[str, Any]
Make = Callable[..., Source]


@pytest.fixture(autouse=True)
def in_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "images").mkdir()
    return tmp_path


def document() -> Document:
    """Three images in descending order of their ids, two categories, an annotation of a crowd."""
    return {
        "images": [
            {"id": 30, "file_name": "c.jpg", "height": 4, "width": 5},
            {"id": 20, "file_name": "b.jpg", "height": 4, "width": 5},
            {"id": 10, "file_name": "a.jpg", "height": 4, "width": 5},
        ],
        "annotations": [
            {"id": 1, "image_id": 30, "category_id": 7, "bbox": [1, 1, 2, 3], "segmentation": [[1, 1, 3, 1, 3, 4]]},
            {"id": 2, "image_id": 10, "category_id": 90, "bbox": [0, 0, 5, 4], "iscrowd": 1},
            {
                "id": 3,
                "image_id": 10,
                "category_id": 90,
                "bbox": [0.5, 1.25, 2, 2],
                "segmentation": {"size": [4, 5], "counts": "031O0O0140LO"},
            },
            {
                "id": 4,
                "image_id": 10,
                "category_id": 7,
                "bbox": [0, 0, 1, 1],
                "segmentation": {"size": [4, 5], "counts": [3, 17]},
            },
        ],
        "categories": [{"id": 90, "name": "cat"}, {"id": 7, "name": "dog"}],
    }


def opened(content: Document, **keys: Any) -> Source:
    Path("instances.json").write_text(json.dumps(content))
    return open_source(source_spec(coco="instances.json", images="images", **keys))


def refused(content: Document, **keys: Any) -> str:
    with pytest.raises(SourceError) as caught:
        opened(content, **keys)
    return outline(caught.value)


def rows(column: Any) -> list[Any]:
    assert isinstance(column, Ragged)
    return [column[i].tolist() for i in range(len(column))]


# What is read.


def test_images_in_the_order_of_their_ids_and_labels_in_that_of_the_categories() -> None:
    source = opened(document())
    assert [source.path(i) for i in range(len(source))] == ["images/a.jpg", "images/b.jpg", "images/c.jpg"]
    assert fields_of(source) == (
        Field(name="boxes", type="boxes", labels="labels", classes=("dog", "cat")),
        Field(name="mask", type="mask", instances=True),
    )
    assert source.classes == ("dog", "cat")
    assert not has_labels(source)
    assert source.labels.tolist() == [0, 0, 0]
    records = records_of(source, [2, 0, 1])
    assert records.errors == [None, None, None]
    assert rows(records.columns["boxes"]) == [[[1, 1, 3, 4]], [[0.5, 1.25, 2.5, 3.25], [0, 0, 1, 1]], []]
    assert rows(records.columns["labels"]) == [[0], [1, 0], []]
    assert isinstance(records.columns["boxes"], Ragged) and records.columns["boxes"].values.dtype == np.float32
    masks = records.columns["mask"]
    assert isinstance(masks, list)
    (polygons,) = masks[0]
    assert isinstance(polygons, Polygons)
    assert [outline.tolist() for outline in polygons.outlines] == [[[1, 1], [3, 1], [3, 4]]]
    compressed, plain = masks[1]
    assert isinstance(compressed, Rle) and isinstance(plain, Rle)
    assert compressed.size == plain.size == (4, 5)
    assert compressed.counts.tolist() == [0, 3, 1, 2, 1, 1, 1, 2, 5, 2, 1, 1]
    assert plain.counts.tolist() == [3, 17]
    assert compressed.counts.dtype == np.int64
    assert masks[2] == ()


def test_the_note_counts_what_is_left_out() -> None:
    source = opened(document())
    assert isinstance(source, TableSource)
    assert source.note == "3 annotations, 1 images without any, 1 annotations of crowds left out"


def test_keypoints_that_differ_in_number_matter_only_where_they_are_read() -> None:
    content = document()
    for k, count in ((0, 1), (2, 2)):
        content["annotations"][k]["keypoints"] = [1, 2, 2] * count
    assert len(opened(content, fields={"boxes": None})) == len(content["images"])
    assert refused(content) == "instances.json, got 3 and 6 numbers"


def test_keypoints_with_visibility_and_annotations_without() -> None:
    content = document()
    content["annotations"][0] |= {"keypoints": [1, 2, 2, 0, 0, 0]}
    records = records_of(opened(content), [0, 1, 2])
    points = records.columns["keypoints"]
    assert isinstance(points, Ragged)
    assert points.values.shape == (3, 2, 3) and points.values.dtype == np.float32
    assert points[2].tolist() == [[[1, 2, 2], [0, 0, 0]]]
    assert not points[0].any()


def test_where_no_annotation_has_keypoints_their_number_is_that_of_the_categories() -> None:
    fields = {"boxes": None, "keypoints": None}
    content = document()
    assert refused(content, fields=fields) == "instances.json, got none"
    content["categories"][0]["keypoints"] = ["nose", "tail"]
    points = records_of(opened(content, fields=fields), [0, 1, 2]).columns["keypoints"]
    assert rows(points) == [[[[0, 0, 0], [0, 0, 0]]] * 2, [], [[[0, 0, 0], [0, 0, 0]]]]
    content["categories"][1]["keypoints"] = ["nose"]
    assert refused(content, fields=fields) == "instances.json, got several numbers of them in categories"
    content["annotations"] = []
    assert rows(records_of(opened(content, fields=fields), [0]).columns["keypoints"]) == [[]]


def test_keypoints_that_flips_exchange() -> None:
    content = document()
    content["annotations"][0] |= {"keypoints": [1, 2, 2, 0, 0, 0]}
    source = opened(content, fields={"keypoints": {"flip_pairs": [[0, 1]]}})
    assert fields_of(source) == (Field(name="keypoints", type="keypoints", flip_pairs=((0, 1),)),)
    with pytest.raises(ConfigError) as caught:
        opened(content, fields={"keypoints": {"column": "points", "flip_pairs": [[0, 1]]}})
    assert outline(caught.value) == "source.fields.keypoints config.conflict"


def test_keypoints_of_crowds_are_not_counted() -> None:
    content = document()
    content["annotations"][0] |= {"keypoints": [1, 2, 2, 0, 0, 0]}
    content["annotations"][1] |= {"keypoints": [0, 0, 0]}
    points = records_of(opened(content), [2]).columns["keypoints"]
    assert isinstance(points, Ragged) and points[0].tolist() == [[[1, 2, 2], [0, 0, 0]]]


def test_keys_of_images_do_not_take_the_place_of_those_of_annotations() -> None:
    content = document()
    for image in content["images"]:
        image["bbox"] = [[0, 0, 5, 4]]
    assert refused(content, fields={"boxes": None, "crop": {"type": "any", "column": "bbox"}}) == "instances.json"


def test_a_null_is_a_key_that_is_missing() -> None:
    content = document()
    content["annotations"][0] |= {"keypoints": [1, 2, 2]}
    content["annotations"][2] |= {"segmentation": None, "keypoints": None, "iscrowd": None}
    source = opened(content)
    records = records_of(source, [0])
    assert records.errors == [None]
    masks, points = records.columns["mask"], records.columns["keypoints"]
    assert isinstance(masks, list) and len(masks[0]) == 1 and isinstance(points, Ragged)
    assert points[0].tolist() == [[[0, 0, 0]]]
    reason = "instances.json: annotations[2].segmentation must have an outline or run lengths, got []"
    assert left_out_of(source) == {0: (1, reason)}


@pytest.mark.parametrize("value", [0, False, None])
def test_an_annotation_that_is_no_crowd_is_kept(value: Any) -> None:
    content = document()
    content["annotations"][1]["iscrowd"] = value
    assert rows(records_of(opened(content, fields={"boxes": {}}), [0]).columns["labels"]) == [[1, 1, 0]]


def test_declared_fields_are_all_there_is() -> None:
    source = opened(document(), fields={"image": {}, "boxes": {}, "width": {"type": "number"}, "id": {"type": "any"}})
    records = records_of(source, [0, 2])
    assert sorted(records.columns) == ["boxes", "id", "labels", "width"]
    assert np.asarray(records.columns["width"]).tolist() == [5, 5]
    assert records.columns["id"] == [10, 30]


def test_a_file_of_images_alone() -> None:
    source = opened(document() | {"annotations": []})
    records = records_of(source, [0, 1])
    assert rows(records.columns["boxes"]) == [[], []]
    assert rows(records.columns["labels"]) == [[], []]


def test_a_split_is_not_stratified_and_keeps_records() -> None:
    content = document()
    spec = source_spec(coco="instances.json", images="images", split={"train": 2 / 3, "val": 1 / 3})
    whole = opened(content)
    train, val = (subset(whole, spec, name) for name in ("train", "val"))
    assert sorted(part.path(i) for part in (train, val) for i in range(len(part))) == [
        "images/a.jpg",
        "images/b.jpg",
        "images/c.jpg",
    ]
    assert fields_of(val) == fields_of(whole) and not has_labels(val)
    for part in (train, val):
        for i in range(len(part)):
            boxes = {"images/a.jpg": 2, "images/b.jpg": 0, "images/c.jpg": 1}[part.path(i)]
            assert len(rows(records_of(part, [i]).columns["boxes"])[0]) == boxes


def test_the_fingerprint_says_which_annotations() -> None:
    first = fingerprint_of(opened(document()))
    assert fingerprint_of(opened(document())) == first
    content = document()
    content["annotations"][0]["bbox"][0] = 2
    assert fingerprint_of(opened(content)) != first
    assert fingerprint_of(opened(document(), fields={"boxes": {}})) != first


# What is refused, and what is left out.


def test_a_box_without_area_is_left_out() -> None:
    content = document()
    content["annotations"][3]["bbox"] = [1, 1, 0, 2]
    source = opened(content)
    records = records_of(source, [2, 0])
    reason = "instances.json: annotations[3].bbox must have a width and a height above 0, got [1.0, 1.0, 0.0, 2.0]"
    assert records.errors == [None, None] and left_out_of(source) == {0: (1, reason)}
    assert rows(records.columns["boxes"])[1] == [[0.5, 1.25, 2.5, 3.25]] and rows(records.columns["labels"])[1] == [1]
    assert isinstance(records.columns["mask"], list) and len(records.columns["mask"][1]) == 1


@pytest.mark.parametrize(
    ("segmentation", "reason"),
    [
        ([[1, 1, 2, 2]], "must have outlines of at least 3 points, got 2"),
        ([[]], "must have outlines of at least 3 points, got 0"),
        ([], "must have an outline or run lengths, got []"),
        ({"size": [4, 5], "counts": [20]}, "must have at least one pixel, got none"),
        ([[1, 1, 2, float("nan"), 3, 3]], "must have finite numbers"),
        ({"size": [4, 5], "counts": [3, 4]}, "must have run lengths >= 0 that add up to 4 x 5, got 7 in all"),
        ({"size": [4, 5], "counts": [-3, 23]}, "must have run lengths >= 0 that add up to 4 x 5, got 20 in all"),
        (
            {"size": [4, 5], "counts": [2**62, 2**62, 2**62, 2**62, 20]},
            f"must have run lengths >= 0 that add up to 4 x 5, got {2**64 + 20} in all",
        ),
        (
            {"size": [4, 5], "counts": "0i"},
            "must have the run lengths of COCO as counts, got the last run length is cut off",
        ),
    ],
)
def test_a_mask_that_cannot_be_is_left_out(segmentation: Any, reason: str) -> None:
    content = document()
    content["annotations"][0]["segmentation"] = segmentation
    source = opened(content)
    assert left_out_of(source) == {2: (1, f"instances.json: annotations[0].segmentation {reason}")}
    assert rows(records_of(source, [2]).columns["boxes"]) == [[]]


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (
            ("annotations", 2, "image_id"),
            99,
            "instances.json, got 99",
        ),
        (
            ("annotations", 2, "category_id"),
            1,
            "instances.json, got 1",
        ),
        (
            ("annotations", 2, "bbox"),
            [1, 2, 3],
            "instances.json, got [1, 2, 3]",
        ),
        (
            ("annotations", 2, "bbox"),
            [1, 2, 3, "4"],
            "instances.json, got [1, 2, 3, '4']",
        ),
        (
            ("annotations", 2, "segmentation"),
            [[1, 2, 3]],
            "instances.json, got [1, 2, 3]",
        ),
        (
            ("annotations", 2, "segmentation"),
            {"counts": [20]},
            "instances.json, got null",
        ),
        *(
            (
                ("annotations", 2, "iscrowd"),
                value,
                f"instances.json, got {value!r}",
            )
            for value in ("0", 2, [0])
        ),
        (("images", 1, "id"), 30, "instances.json, got 30 twice"),
        (("images", 1, "file_name"), "", "instances.json, got ''"),
        (
            ("categories", 1, "id"),
            90,
            "instances.json, got 90 twice",
        ),
        (
            ("categories", 1, "name"),
            document()["categories"][0]["name"],
            "instances.json, got 'cat' twice",
        ),
        (("images",), [], "instances.json, got none"),
        (("images",), {}, "instances.json, got {}"),
    ],
)
def test_structural_faults(place: tuple[Any, ...], value: Any, message: str) -> None:
    content = document()
    *above, key = place
    at: Any = content
    for step in above:
        at = at[step]
    at[key] = value
    assert refused(content) == message


def test_a_misspelt_list_a_missing_file_and_a_missing_directory() -> None:
    content = document()
    content["annotation"] = content.pop("annotations")
    assert refused(content) == "instances.json, got null"
    with pytest.raises(SourceError) as caught:
        open_source(source_spec(coco="x.json", images="images"))
    assert outline(caught.value) == "source.coco, got 'x.json', which does not exist"
    Path("instances.json").write_text(json.dumps(document()))
    with pytest.raises(SourceError) as caught:
        open_source(source_spec(coco="instances.json", images="image"))
    assert outline(caught.value) == "source.images, got 'image'"
    Path("instances.json").write_text('{"images": ' + "[" * 100_000 + "]" * 100_000 + "}")
    with pytest.raises(SourceError) as caught:
        open_source(source_spec(coco="instances.json", images="images"))
    assert outline(caught.value) == "instances.json, got an error: it is nested too deeply"
    Path("instances.json").write_text("{\n[")
    with pytest.raises(SourceError, match=r"instances.json:2: must be JSON, got an error"):
        open_source(source_spec(coco="instances.json", images="images"))
    with pytest.raises(SourceError) as caught:
        open_source(source_spec(coco="images", images="images"))
    assert outline(caught.value) == "images"


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({}, "source config.missing_key"),
        ({"images": "i", "fields": {"label": {}}}, "source.fields.label config.conflict"),
        ({"images": "i", "fields": {"boxes": {"format": "xyxy"}}}, "source.fields.boxes config.conflict"),
    ],
)
def test_keys_that_do_not_go_with_it(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        source_spec(coco="x.json", **keys)
    assert outline(caught.value) == message


# The sizes of images.


def test_sizes_of_images_are_known_where_entries_give_both() -> None:
    content = document()
    content["images"][0] |= {"height": None}
    content["images"][1] |= {"height": 0}
    sizes = records_of(opened(content), [2, 0, 1]).sizes
    assert sizes is not None
    assert sizes.tolist() == [[0, 0], [4, 5], [0, 0]]


def test_a_mix_has_the_sizes_of_its_sources() -> None:
    opened(document())
    Path("a.jsonl").write_text('{"path": "a.jpg", "boxes": [], "labels": []}\n')
    boxes = {"boxes": {"labels": "labels", "classes": ["dog", "cat"]}}
    entries: list[dict[str, Any]] = [
        {"source": {"listing": "a.jsonl", "fields": boxes}},
        {"source": {"coco": "instances.json", "images": "images", "fields": {"boxes": {}}}},
    ]
    sizes = records_of(open_source(source_spec(mix=tuple(entries))), [3, 0, 1]).sizes
    assert sizes is not None
    assert sizes.tolist() == [[4, 5], [0, 0], [4, 5]]


@pytest.mark.parametrize(
    ("orientation", "stored", "reason"),
    [
        ("ignore", (5, 4), "must have 4x5 pixels as its entry says, got 5x4; set decode: {orientation: apply}"),
        ("apply", (5, 4), "must have 4x5 pixels as its entry says, got 5x4; set decode: {orientation: ignore}"),
        ("ignore", (8, 10), "must have 4x5 pixels as its entry says, got 8x10; correct its width and height"),
        ("ignore", (4, 5), None),
    ],
)
def test_an_image_of_another_size_than_its_entry_says_is_bad(
    orientation: str, stored: tuple[int, int], reason: str | None
) -> None:
    """Its boxes would lie elsewhere, also where all of them are inside of it."""
    content = document()
    for annotation in content["annotations"]:
        annotation.pop("segmentation", None)
    config = {
        "source": {"coco": "instances.json", "images": "images"},
        "pipelines": {
            "val": {"stages": [{"decode": {"orientation": orientation}}, {"resize": {"height": 8, "width": 8}}]}
        },
    }
    opened(content)
    Path("coco.yaml").write_text(yaml.safe_dump(config))
    for name in "abc":
        Image.fromarray(np.zeros((*stored, 3), np.uint8)).save(f"images/{name}.jpg")
    with gpuflow.load("coco.yaml", "val", overrides=["run.on_error=raise"]) as loader:
        if reason is None:
            assert [len(images) for images, _ in loader] == [3]
            return
        with pytest.raises(gpuflow.BadSampleError, match=f"record: image {re.escape(reason)}"):
            next(iter(loader))
