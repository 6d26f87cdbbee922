"""`gpuflow.transform` moves the boxes, masks and keypoints that a caller holds with the images, as a loader does."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from torchvision import tv_tensors
from torchvision.transforms.v2 import functional

import gpuflow
from gpuflow.errors import BadSampleError, ConfigError
from gpuflow.pipeline.records import Polygons
from tests.datasets import Entries, deadline, pixels, write_config
from tests.masks import instance_mask
from tests.texts import pin

COUNT = 7
CROP: Entries = (
    {"decode": {}},
    {"random_resized_crop": {"size": [24, 20], "scale": [0.3, 1.0]}},
    {"flip": {"horizontal": 0.5}},
)
WARP: Entries = ({"decode": {}}, {"affine": {"degrees": 25, "translate": [0.1, 0.1]}}, {"letterbox": {"size": 40}})
FIELDS = {
    "image": None,
    "boxes": {"labels": "kinds", "classes": 3},
    "mask": {"kind": "polygons"},
    "depth": {"type": "mask", "fill": 7},
    "keypoints": {"flip_pairs": [[1, 0]]},
    "caption": {"type": "text"},
}


@pytest.fixture(autouse=True)
def _in_time() -> Iterator[None]:
    with deadline(60):
        yield


@pytest.fixture(scope="module")
def listing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sample i has i % 4 boxes, an outline and two keypoints for each, a mask of levels, and a caption."""
    folder, lines = tmp_path_factory.mktemp("listed"), []
    for i in range(COUNT):
        rng, image = np.random.default_rng(i), pixels(0, i)
        height, width = image.shape[:2]
        cv2.imwrite(str(folder / f"{i}.png"), image[..., ::-1])
        cv2.imwrite(str(folder / f"{i}_depth.png"), rng.integers(0, 256, (height, width)).astype(np.uint8))
        corners = np.sort(rng.uniform(0, 1, (i % 4, 2, 2)), axis=1)
        corners[:, 1] += 0.05
        boxes = (corners * [width, height]).reshape(-1, 4)
        line: dict[str, Any] = {"image": f"{i}.png", "depth": f"{i}_depth.png", "caption": f"number {i}"}
        line |= {"boxes": boxes.tolist(), "kinds": rng.integers(0, 3, len(boxes)).tolist()}
        line |= {"mask": [[[x1, y1, x2, y1, x1, y2]] for x1, y1, x2, y2 in boxes.tolist()]}
        points = [[[x, y, 2], [x / 2, y / 2, 1]] for x, y, _, _ in boxes.tolist()]
        lines.append({**line, "keypoints": points})
    path = folder / "list.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def config_of(folder: Path, listing: Path, stages: Entries, **source: Any) -> Path:
    given = source or {"listing": str(listing), "fields": FIELDS}
    targets = {"min_area": 9, "min_visibility": 0.3}
    train = {"stages": list(stages), "batch": {"size": COUNT}, "shuffle": False, "targets": targets}
    return write_config(folder / "x.yaml", listing.parent, source=given, pipelines={"train": train}, run={"threads": 2})


def held(listing: Path) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """The samples as someone else's loader may give them: decoded images, and targets for torchvision."""
    images, fields = [], {name: list[Any]() for name in ("boxes", "kinds", "mask", "depth", "keypoints", "caption")}
    for line in map(json.loads, listing.read_text().splitlines()):
        image = np.asarray(cv2.imread(str(listing.parent / line["image"])))[..., ::-1]
        height, width = image.shape[:2]
        images.append(torch.from_numpy(image.copy()).permute(2, 0, 1))
        outlines = [np.array(outline).reshape(-1, 2) for (outline,) in line["mask"]]
        masks = [instance_mask(Polygons((outline,)), (height, width)) for outline in outlines]
        fields["boxes"].append(torch.tensor(line["boxes"]).reshape(-1, 4))
        fields["kinds"].append(torch.tensor(line["kinds"], dtype=torch.int64))
        fields["mask"].append(torch.from_numpy(np.stack([*masks, np.zeros((height, width), np.uint8)])[:-1]))
        depth = cv2.imread(str(listing.parent / line["depth"]), cv2.IMREAD_GRAYSCALE)
        fields["depth"].append(torch.from_numpy(depth))
        fields["keypoints"].append(torch.tensor(line["keypoints"]).reshape(-1, 2, 3))
        fields["caption"].append(line["caption"])
    return images, fields


@pytest.mark.parametrize("stages", [CROP, WARP], ids=["crop", "warp"])
def test_fields_are_those_of_the_loader(listing: Path, tmp_path: Path, stages: Entries) -> None:
    path = config_of(tmp_path, listing, stages)
    images, fields = held(listing)
    forms = [
        fields,
        {
            name: [value.numpy() if isinstance(value, torch.Tensor) else value for value in column]
            for name, column in fields.items()
        },
        {
            **fields,
            "mask": [mask.bool() for mask in fields["mask"]],
            "depth": [tv_tensors.Mask(x) for x in fields["depth"]],
        },
        {**fields, "keypoints": [value.double().requires_grad_() for value in fields["keypoints"]]},
        {**fields, "boxes": [value.tolist() for value in fields["boxes"]], "kinds": [x.int() for x in fields["kinds"]]},
    ]
    kept, filled = 0, 0
    with gpuflow.load(path) as loader, gpuflow.transform(path) as transform:
        for epoch in range(3):
            (batch,) = loader
            for given in forms:
                result, moved = transform(images, epoch=epoch, positions=range(COUNT), fields=given)
                assert torch.equal(result, batch.images)
                assert list(moved) == list(given) and moved["caption"] == batch.fields["caption"]
                for name in ("boxes", "kinds", "mask", "keypoints"):
                    assert torch.equal(moved[name].values, batch.fields[name].values), name
                    assert moved[name].values.dtype == batch.fields[name].values.dtype
                    assert moved[name].offsets.tolist() == batch.fields[name].offsets.tolist()
                assert torch.equal(moved["depth"], batch.fields["depth"])
            filled += int((batch.fields["depth"] == 7).sum())
            kept += len(batch.fields["boxes"].values)
    assert 0 < kept < 3 * sum(i % 4 for i in range(COUNT)), "some boxes are dropped, and what belongs to them"
    assert (filled > 2000) == (stages is WARP), "besides the pixels that have this level"


def test_boxes_of_torchvision_in_any_format_give_the_same(listing: Path, tmp_path: Path) -> None:
    images, fields = held(listing)
    with gpuflow.transform(config_of(tmp_path, listing, CROP)) as transform:
        expected, expected_fields = transform(images, epoch=0, positions=range(COUNT), fields=fields)
        for form in ("XYWH", "CXCYWH"):
            boxes = [
                tv_tensors.BoundingBoxes(
                    functional.convert_bounding_box_format(
                        rows,
                        old_format=tv_tensors.BoundingBoxFormat.XYXY,
                        new_format=tv_tensors.BoundingBoxFormat[form],
                    ),
                    format=form,
                    canvas_size=image.shape[1:],
                )
                for rows, image in zip(fields["boxes"], images, strict=True)
            ]
            _, moved = transform(images, epoch=0, positions=range(COUNT), fields={**fields, "boxes": boxes})
            torch.testing.assert_close(moved["boxes"].values, expected_fields["boxes"].values, atol=1e-5, rtol=0)
        assert expected.shape == (COUNT, 3, 24, 20)


def test_a_batchs_own_fields_can_be_given(listing: Path, tmp_path: Path) -> None:
    """A first pipeline's batches go through a second one."""
    letterbox: Entries = ({"decode": {}}, {"letterbox": {"size": 40}})
    path = config_of(tmp_path, listing, letterbox)
    with gpuflow.load(path) as loader, gpuflow.transform(config_of(tmp_path, listing, CROP)) as transform:
        (batch,) = loader
        result, moved = transform(batch.images, epoch=0, positions=range(COUNT), fields=batch.fields)
        assert result.shape == (COUNT, 3, 24, 20)
        assert len(moved["boxes"]) == COUNT and moved["depth"].shape == (COUNT, 24, 20)
        assert [len(rows) for rows in moved["boxes"]] == [len(masks) for masks in moved["mask"]]


def test_only_what_is_given_is_moved_and_the_rest_comes_back(listing: Path, tmp_path: Path) -> None:
    images, fields = held(listing)
    with gpuflow.transform(config_of(tmp_path, listing, CROP)) as transform:
        _, whole = transform(images, epoch=0, positions=range(COUNT), fields=fields)
        ids = object()
        given = {"boxes": fields["boxes"], "ids": ids, "kinds": fields["kinds"]}
        _, moved = transform(images, epoch=0, positions=range(COUNT), fields=given)
        assert list(moved) == ["boxes", "ids", "kinds"] and moved["ids"] is ids
        assert torch.equal(moved["boxes"].values, whole["boxes"].values)
        _, alone = transform(images, epoch=0, positions=range(COUNT), fields={"boxes": fields["boxes"]})
        assert torch.equal(alone["boxes"].values, whole["boxes"].values)
        _, depth = transform(images, epoch=0, positions=range(COUNT), fields={"depth": fields["depth"]})
        assert torch.equal(depth["depth"], whole["depth"])
        result, nothing = transform(images, epoch=0, positions=range(COUNT))
        assert nothing == {} and len(result) == COUNT
        none, empty = transform([], epoch=0, positions=[], fields={name: [] for name in fields})
        assert len(none) == 0 and len(empty["boxes"]) == 0 and empty["depth"].shape == (0, 24, 20)


def test_coco_needs_no_file(listing: Path, tmp_path: Path) -> None:
    path = config_of(tmp_path, listing, CROP, coco=str(tmp_path / "missing.json"), images=str(tmp_path))
    images, fields = held(listing)
    given = {"boxes": fields["boxes"], "labels": fields["kinds"], "mask": fields["mask"]}
    with gpuflow.transform(path) as transform:
        _, moved = transform(images, epoch=0, positions=range(COUNT), fields=given)
    with gpuflow.transform(config_of(tmp_path, listing, CROP)) as transform:
        _, expected = transform(images, epoch=0, positions=range(COUNT), fields=fields)
    assert torch.equal(moved["boxes"].values, expected["boxes"].values)
    assert torch.equal(moved["labels"].values, expected["kinds"].values)
    assert torch.equal(moved["mask"].values, expected["mask"].values)


def test_fields_of_coco_have_the_names_that_the_file_gives_them(listing: Path, tmp_path: Path) -> None:
    declared = {"image": None, "people": {"type": "boxes"}, "outlines": {"type": "mask"}}
    path = config_of(tmp_path, listing, CROP, coco="missing.json", images="photos", fields=declared)
    images, fields = held(listing)
    given = {"people": fields["boxes"], "labels": fields["kinds"], "outlines": fields["mask"], "mask": fields["depth"]}
    with gpuflow.transform(path) as transform:
        _, moved = transform(images, epoch=0, positions=range(COUNT), fields=given)
    with gpuflow.transform(config_of(tmp_path, listing, CROP)) as transform:
        _, expected = transform(images, epoch=0, positions=range(COUNT), fields=fields)
    for name, own in (("people", "boxes"), ("labels", "kinds"), ("outlines", "mask")):
        assert torch.equal(moved[name].values, expected[own].values)
    assert moved["mask"] is fields["depth"], "which the file does not declare"


def test_images_without_instances_keep_the_number_of_keypoints(listing: Path, tmp_path: Path) -> None:
    images, _ = held(listing)
    with gpuflow.transform(config_of(tmp_path, listing, CROP)) as transform:
        none: Any
        for none in ([], np.zeros((0, 2, 3)), torch.zeros(0, 2, 3)):
            given = {"keypoints": [none, torch.zeros(0, 2, 3)]}
            _, moved = transform(images[:2], epoch=0, positions=range(2), fields=given)
            assert moved["keypoints"].values.shape == (0, 2, 3)


def refused(transform: Any, images: Any, fields: Any, place: str, shown: str) -> None:
    """Check that the transform refuses the fields, and names the place and the value."""
    with pytest.raises(ValueError, match=r"^fields") as found:
        transform(images, epoch=0, positions=range(COUNT), fields=fields)
    text = pin(found.value)
    assert text.startswith(place) and text.endswith(f"got {shown}")


def changed(fields: dict[str, Any], name: str, i: int, value: Any) -> dict[str, Any]:
    return {**fields, name: [value if i == j else other for j, other in enumerate(fields[name])]}


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("boxes", torch.zeros(2, 5), "float32 [2, 5]"),
        ("boxes", [["a", "b", "c", "d"]], "<U1 [1, 4]"),
        ("boxes", [[1, 2, 3], [1, 2, 3, 4]], "rows of several lengths"),
        ("kinds", torch.zeros(2), "float32 [2]"),
        ("kinds", np.array([2**63], np.uint64), "9223372036854775808"),
        ("mask", torch.zeros(2, 3, 3), "float32 [2, 3, 3]"),
        ("depth", torch.zeros(3, 3), "float32 [3, 3]"),
        ("keypoints", torch.zeros(2, 2), "float32 [2, 2]"),
        ("keypoints", torch.zeros(2, 5, 3), "2, 5"),
    ],
)
def test_values_of_another_form_are_refused(listing: Path, tmp_path: Path, name: str, value: Any, shown: str) -> None:
    images, fields = held(listing)
    with gpuflow.transform(config_of(tmp_path, listing, CROP)) as transform:
        refused(transform, images, changed(fields, name, 2, value), f"fields['{name}']", shown)
        fields[name].pop()
        refused(transform, images, fields, f"fields['{name}']", "6")
        refused(transform, images, {**fields, name: None}, f"fields['{name}']", "null")


@pytest.mark.parametrize(("form", "numbers"), [("XYWHR", 5), ("CXCYWHR", 5), ("XYXYXYXY", 8)])
def test_rotated_boxes_are_named(listing: Path, tmp_path: Path, form: str, numbers: int) -> None:
    images, fields = held(listing)
    size = tuple(images[2].shape[1:])
    boxes = tv_tensors.BoundingBoxes(torch.full((2, numbers), 5.0), format=form, canvas_size=size)
    with gpuflow.transform(config_of(tmp_path, listing, CROP)) as transform:
        refused(transform, images, changed(fields, "boxes", 2, boxes), "fields['boxes'][2]", f"the format {form}")


def test_levels_above_255_are_refused(listing: Path, tmp_path: Path) -> None:
    images, fields = held(listing)
    for value in (fields["depth"][2].int() + 300, fields["depth"][2].int() - 400, fields["depth"][2].float()):
        with (
            gpuflow.transform(config_of(tmp_path, listing, CROP)) as transform,
            pytest.raises(ValueError, match=r"^fields\['depth'\]\[2\] .*, got (int|float)") as found,
        ):
            transform(images, epoch=0, positions=range(COUNT), fields=changed(fields, "depth", 2, value))
        pin(found.value)


@pytest.mark.parametrize(
    ("name", "value", "place"),
    [
        ("boxes", [[1, 2, 9, 9], [1, 2, 1, 9]], "boxes[1]"),
        ("boxes", [[1, 2, float("nan"), 9], [1, 2, 3, 9]], "boxes[0]"),
        ("kinds", [1], "kinds"),
        ("keypoints", np.zeros((1, 2, 3)), "keypoints"),
        ("keypoints", [[[1, 2, 0], [3, 4, 1]], [[1, 2, 7], [3, 4, -1]]], "keypoints[1]"),
        ("keypoints", [[[1, 2, 0], [3, 4, 0.5]]], "keypoints[0]"),
        ("keypoints", [[[1, 2, 2], [3, 4, float("nan")]]] * 2, "keypoints[0]"),
    ],
)
def test_a_bad_record_is_named(listing: Path, tmp_path: Path, name: str, value: Any, place: str) -> None:
    images, fields = held(listing)
    with gpuflow.transform(config_of(tmp_path, listing, CROP)) as transform:
        with pytest.raises(BadSampleError) as found:
            transform(images, epoch=0, positions=range(COUNT), fields=changed(fields, name, 2, value))
        assert pin(found.value).startswith(f"images[2] (sample 2): record: {place} ")
        assert (found.value.stage, found.value.index, found.value.path) == ("record", 2, "images[2]")
        assert len(transform(images, epoch=0, positions=range(COUNT), fields=fields)) == 2, "it works on"


def test_views_carry_no_boxes(listing: Path, tmp_path: Path) -> None:
    views = {"a": {"count": 2, "stages": list(CROP[1:])}}
    train = {"views": views, "batch": {"size": 2}}
    source = {"coco": "missing.json", "images": "."}
    path = write_config(tmp_path / "x.yaml", listing.parent, source=source, pipelines={"train": train})
    with pytest.raises(ConfigError, match=r"x\.yaml: pipelines\.train\.views"):
        gpuflow.transform(path)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no NVIDIA GPU")
def test_on_a_gpu_fields_are_those_of_the_cpu(listing: Path, tmp_path: Path) -> None:
    path, (images, fields) = config_of(tmp_path, listing, CROP), held(listing)
    with gpuflow.transform(path) as here, gpuflow.transform(path, device="cuda") as there:
        _, expected = here(images, epoch=0, positions=range(COUNT), fields=fields)
        for given in (fields, {**fields, "boxes": [rows.cuda() for rows in fields["boxes"]]}):
            _, moved = there([image.cuda() for image in images], epoch=0, positions=range(COUNT), fields=given)
            for name in ("boxes", "kinds", "mask", "keypoints"):
                assert moved[name].values.device.type == "cuda"
                assert torch.equal(moved[name].values.cpu(), expected[name].values)
            assert torch.equal(moved["depth"].cpu(), expected["depth"])


def test_a_name_of_targets_is_not_taken_for_another_field(tmp_path: Path, listing: Path) -> None:
    """It would come back as it is, next to images that were moved."""
    images, fields = held(listing)
    boxes: Any = [{"boxes": fields["boxes"][0]}]
    with gpuflow.transform(config_of(tmp_path, listing, CROP)) as transform:
        for own, name in (("mask", "masks"), ("kinds", "labels")):
            given = {name if key == own else key: values for key, values in fields.items()}
            with pytest.raises(ValueError, match=f"^fields .*'{own}'.*'{name}'") as found:
                transform(images, epoch=0, positions=range(COUNT), fields=given)
            pin(found.value)
        refused(transform, images, boxes, "fields", "list")
