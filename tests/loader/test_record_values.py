"""Each sample is warped by the map in its own record, in every way of loading; what is wrong there is a bad sample."""

from __future__ import annotations

import csv
import io
import json
import tarfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import gpuflow
from gpuflow.errors import ConfigError
from gpuflow.sources.record_table import TableSource
from tests.datasets import deadline, epoch_rows, fault_of, flat, interleave
from tests.faces import (
    COUNT,
    FIELDS,
    SIZE,
    TARGET,
    box_of,
    by_opencv,
    by_points,
    face_config,
    image_of,
    landmarks_of,
    make_faces,
    matrix_of,
)
from tests.reference.warping import opencv_5

ALIGN = {"matrix": {"field": "align"}}
POINTS = {**FIELDS, "points": {"type": "keypoints"}}
ON_A_LINE = [[0, 0], [1, 2], [2, 4], [9, 9]]


@pytest.fixture(autouse=True)
def _in_time() -> Iterator[None]:
    with deadline(60):
        yield


@pytest.fixture(scope="module")
def listing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_faces(tmp_path_factory.mktemp("faces"))


def of_matrix(i: int) -> NDArray[np.uint8]:
    return by_opencv(image_of(i), matrix_of(i))


def of_landmarks(i: int) -> NDArray[np.uint8]:
    return by_opencv(image_of(i), by_points(landmarks_of(i)[:3], TARGET))


def check(batch: gpuflow.Batch, expected: Callable[[int], NDArray[np.uint8]]) -> None:
    """Every image of a batch is at most one level from OpenCV's."""
    for index, image in zip(batch.indices.tolist(), batch.images, strict=True):
        found = image.permute(1, 2, 0).numpy().astype(int)
        assert np.abs(found - expected(index)).max() <= 1, index


@pytest.mark.parametrize(
    ("warp", "fields", "expected"),
    [
        (ALIGN, FIELDS, of_matrix),
        (
            {**ALIGN, "inverse_map": True},
            FIELDS,
            lambda i: by_opencv(image_of(i), matrix_of(i), inverse=True),
        ),
        ({"source": {"field": "landmarks"}, "target": TARGET}, FIELDS, of_landmarks),
        ({"source": {"field": "points"}, "target": TARGET}, POINTS, of_landmarks),
        (
            {"source": TARGET, "target": {"field": "landmarks"}},
            FIELDS,
            lambda i: by_opencv(image_of(i), by_points(TARGET, landmarks_of(i)[:3])),
        ),
        (
            {"source": {"field": "landmarks"}, "target": {"field": "points"}, "inverse_map": True},
            POINTS,
            lambda i: by_opencv(image_of(i), np.eye(2, 3)),
        ),
    ],
    ids=["matrix", "inverse", "points", "keypoints", "target", "both"],
)
def test_images_are_those_of_opencv(listing: Path, tmp_path: Path, warp: Any, fields: Any, expected: Any) -> None:
    path = face_config(tmp_path / "x.yaml", listing, warp, fields=fields)
    with gpuflow.load(path) as loader:
        batches = list(loader)
    assert sorted(i for batch in batches for i in batch.indices.tolist()) == list(range(COUNT))
    for batch in batches:
        check(batch, expected)


def test_the_same_images_on_threads_and_processes_and_ranks_and_after_a_resume(listing: Path, tmp_path: Path) -> None:
    path = face_config(tmp_path / "x.yaml", listing, ALIGN)
    with gpuflow.load(path, overrides=["run.threads=1"]) as loader:
        reference = epoch_rows(loader)
    with gpuflow.load(path, overrides=["run.threads=3", "run.prefetch=1"]) as loader:
        states = [loader.state_dict(), *(loader.state_dict() for _ in loader)]
    for step, state in enumerate(states[:-1]):
        with gpuflow.load(path) as loader:
            loader.load_state_dict(json.loads(json.dumps(state)))
            assert epoch_rows(loader) == reference[step:]
    ranks = []
    for rank in range(2):
        with gpuflow.load(path, rank=rank, world_size=2, overrides=["pipelines.train.batch.size=2"]) as loader:
            ranks.append(epoch_rows(loader))
    assert interleave(ranks) == flat(reference)
    with gpuflow.load(path, overrides=["run.processes=1"]) as loader:
        loader._feed.decoder.start_workers()
        workers = loader._feed.decoder.workers
        assert workers is not None
        while not workers.counts()["at_work"]:  # within the deadline
            time.sleep(0.02)
        assert epoch_rows(loader) == reference


@opencv_5
def test_a_size_that_an_earlier_stage_decides_keeps_each_samples_map(listing: Path, tmp_path: Path) -> None:
    """Behind a stage whose result's size only it knows, moves are drawn image by image."""
    before = ({"torchvision": {"name": "Pad", "padding": 3}},)
    path = face_config(tmp_path / "x.yaml", listing, ALIGN, before=before)
    with gpuflow.load(path) as loader:
        for batch in loader:
            check(batch, lambda i: by_opencv(np.pad(image_of(i), ((3, 3), (3, 3), (0, 0))), matrix_of(i)))


def test_views_share_the_records_map(listing: Path, tmp_path: Path) -> None:
    path = face_config(tmp_path / "x.yaml", listing, ALIGN)
    text = path.read_text().partition("pipelines:")[0] + "run: {threads: 2}\n"
    warp = "{warp_affine: {matrix: {field: align}, size: [28, 32], border: edge}}"
    views = f"{{plain: {{stages: [{warp}]}}, mirrored: {{count: 2, stages: [{warp}, {{flip: {{horizontal: 1.0}}}}]}}}}"
    path.write_text(f"{text}pipelines: {{train: {{views: {views}, batch: {{size: 4}}}}}}\n")
    with gpuflow.load(path) as loader:
        for batch in loader:
            for i, index in enumerate(batch.indices.tolist()):
                plain = batch.views["plain"][0, i]
                assert np.abs(plain.permute(1, 2, 0).numpy().astype(int) - of_matrix(index)).max() <= 1
                for view in batch.views["mirrored"][:, i]:
                    assert (view.flip(-1).int() - plain.int()).abs().max() <= 1


def test_boxes_masks_and_keypoints_follow_their_samples_map(listing: Path, tmp_path: Path) -> None:
    """The map is by keypoints, which therefore come to lie at `target`, half a pixel from the image's corner."""
    fields = {**POINTS, "boxes": None, "mask": None}
    warp = {"source": {"field": "points"}, "target": TARGET}
    with gpuflow.load(face_config(tmp_path / "x.yaml", listing, warp, fields=fields)) as loader:
        for batch in loader:
            check(batch, of_landmarks)
            for i, index in enumerate(batch.indices.tolist()):
                assert np.abs(batch["points"][i][0, :3, :2].numpy() - (np.array(TARGET) + 0.5)).max() < 1e-4
                matrix = by_points(landmarks_of(index)[:3], TARGET)
                x1, y1, x2, y2 = box_of(index)
                corners = np.array([[x1, y1, 1], [x2, y1, 1], [x2, y2, 1], [x1, y2, 1]]) - [0.5, 0.5, 0]
                mapped = corners @ matrix.T + 0.5
                box = np.concatenate([mapped.min(axis=0), mapped.max(axis=0)]).clip(0, [*SIZE[::-1]] * 2)
                assert np.abs(batch["boxes"][i][0].numpy() - box).max() < 1e-3
                mask = (image_of(index)[..., 0] > 100).astype(np.uint8)
                border = {"flags": cv2.INTER_NEAREST, "borderMode": cv2.BORDER_REPLICATE}
                seen = cv2.warpAffine(mask, matrix, SIZE[::-1], **border)  # type: ignore[call-overload]
                assert (batch["mask"][i].numpy() != seen).mean() < 0.05


# --- other kinds of sources -------------------------------------------------------------------------------------------


def as_csv(root: Path) -> dict[str, Any]:
    """The matrix is JSON in a cell."""
    make_faces(root)
    with open(root / "list.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["path", "label", "align"])
        writer.writerows([f"{i}.png", i % 3, json.dumps(matrix_of(i).tolist())] for i in range(COUNT))
    return {"listing": str(root / "list.csv")}


def as_tar(root: Path) -> dict[str, Any]:
    make_faces(root)
    with tarfile.open(root / "0.tar", "w") as file:
        for i in range(COUNT):
            entry = json.dumps({"label": i % 3, "align": matrix_of(i).tolist()}).encode()
            for name, data in ((f"{i:03d}.png", (root / f"{i}.png").read_bytes()), (f"{i:03d}.json", entry)):
                member = tarfile.TarInfo(name)
                member.size = len(data)
                file.addfile(member, io.BytesIO(data))
    return {"tar": str(root / "0.tar")}


def as_coco(root: Path) -> dict[str, Any]:
    make_faces(root)
    images = [
        {"id": i, "file_name": f"{i}.png", "height": image_of(i).shape[0], "width": image_of(i).shape[1]}
        | {"align": matrix_of(i).tolist()}
        for i in range(COUNT)
    ]
    (root / "coco.json").write_text(json.dumps({"images": images, "annotations": [], "categories": []}))
    return {"coco": str(root / "coco.json"), "images": str(root)}


def as_mix(root: Path) -> dict[str, Any]:
    one = {"listing": str(make_faces(root)), "fields": {"label": None, "align": {"type": "any"}}}
    return {"mix": [{"source": one}, {"source": one, "weight": 2.0}]}


@pytest.mark.parametrize("make", [as_csv, as_tar, as_coco, as_mix], ids=["csv", "tar", "coco", "mix"])
def test_every_kind_of_source_with_fields_gives_maps(tmp_path: Path, make: Callable[[Path], dict[str, Any]]) -> None:
    source = make(tmp_path / "data")
    if "mix" not in source:
        label = {} if "coco" in source else {"label": None}
        source["fields"] = {**label, "align": {"type": "any"}}
    with gpuflow.load(face_config(tmp_path / "x.yaml", "", ALIGN, source=source), "val") as loader:
        for batch in loader:
            for index, image in zip(batch.indices.tolist(), batch.images, strict=True):
                found = image.permute(1, 2, 0).numpy().astype(int)
                assert np.abs(found - of_matrix(index % COUNT)).max() <= 1


# --- bad records ------------------------------------------------------------------------------------------------------

BAD: dict[str, tuple[str, Any, str]] = {
    "none": (
        "align",
        None,
        "align must be two rows of three numbers, each finite and at most 1e+09, got null",
    ),
    "text": (
        "align",
        "turned",
        "align must be two rows of three numbers, each finite and at most 1e+09, got 'turned'",
    ),
    "shape": (
        "align",
        [[1, 0], [0, 1]],
        "align must be two rows of three numbers, each finite and at most 1e+09, got [[1, 0], [0, 1]]",
    ),
    "nan": (
        "align",
        [[1, 0, float("nan")], [0, 1, 0]],
        "align must be two rows of three numbers, each finite and at most 1e+09, got [[1, 0, nan], [0, 1, 0]]",
    ),
    "huge": (
        "align",
        [[1, 0, 1e300], [0, 1, 0]],
        "align must be two rows of three numbers, each finite and at most 1e+09, got [[1, 0, 1e+300], [0, 1, 0]]",
    ),
    "singular": ("align", [[1, 2, 0], [2, 4, 0]], "align must be invertible, got [[1, 2, 0], [2, 4, 0]]"),
    "zero": ("align", [[0, 0, 0], [0, 0, 0]], "align must be invertible, got [[0, 0, 0], [0, 0, 0]]"),
    "few": (
        "landmarks",
        [[1, 2], [3, 4]],
        "landmarks must be at least three points [x, y], each finite and at most 1e+09, got [[1, 2], [3, 4]]",
    ),
    "line": (
        "landmarks",
        ON_A_LINE,
        "landmarks must be points that do not lie on one line, got [[0, 0], [1, 2], [2, 4], [9, 9]]",
    ),
    "no face": ("points", [], "points must have one instance, whose keypoints are points of the warp, got 0"),
    "unseen": (
        "points",
        [[[1, 2, 0], [3, 4, 2], [5, 9, 2], [1, 1, 2], [2, 2, 2]]],
        "points must have the first 3 keypoints labelled: visibility 1 or 2",
    ),
    "points on a line": (
        "points",
        [[[1, 2, 2], [2, 4, 2], [3, 6, 2], [1, 1, 2], [2, 2, 2]]],
        "points must be points that do not lie on one line, got [[1.0, 2.0], [2.0, 4.0], [3.0, 6.0]]",
    ),
}


def warp_of(field: str) -> dict[str, Any]:
    return ALIGN if field == "align" else {"source": {"field": field}, "target": TARGET}


@pytest.mark.filterwarnings("ignore:.* samples are bad so far:UserWarning")
@pytest.mark.parametrize("field", ["align", "landmarks", "points"])
def test_maps_that_cannot_be_are_bad_samples(tmp_path: Path, field: str) -> None:
    """Other samples take their places, with their own maps; the first one is raised where the policy says so."""
    bad = dict(enumerate(value for name, value, _ in BAD.values() if name == field))
    reasons = [reason for name, _, reason in BAD.values() if name == field]
    listing = make_faces(tmp_path / "data", {i: {field: value} for i, value in bad.items()})
    fields = POINTS if field == "points" else FIELDS
    path = face_config(tmp_path / "x.yaml", listing, warp_of(field), fields=fields)
    with gpuflow.load(path, overrides=[f"run.bad_file={tmp_path / 'bad.jsonl'}"]) as loader:
        batches = list(loader)
    listed = {row["index"]: row for row in map(json.loads, (tmp_path / "bad.jsonl").read_text().splitlines())}
    assert {i: row["reason"] for i, row in listed.items()} == dict(enumerate(reasons))
    assert {row["stage"] for row in listed.values()} == {"record"}
    indices = [i for batch in batches for i in batch.indices.tolist()]
    assert len(indices) == COUNT and not set(bad) & set(indices)
    for batch in batches:
        check(batch, of_matrix if field == "align" else of_landmarks)
    with gpuflow.load(path, "val", overrides=["run.on_error=raise", "run.threads=1"]) as loader:
        _, error = fault_of(loader)
    assert isinstance(error, gpuflow.BadSampleError)
    assert (error.index, error.path, error.reason) == (0, str(tmp_path / "data" / "0.png"), reasons[0])


@pytest.mark.filterwarnings("ignore:.* samples are bad so far:UserWarning")
def test_a_damaged_images_replacement_has_its_own_map_and_skipping_leaves_the_others(tmp_path: Path) -> None:
    listing = make_faces(tmp_path / "data", {2: {"align": None}})
    (tmp_path / "data" / "7.png").write_bytes(b"no image")
    fields = {**FIELDS, "boxes": None}
    path = face_config(tmp_path / "x.yaml", listing, ALIGN, fields=fields)
    for policy, count in (("replace", COUNT), ("skip", COUNT - 2)):
        with gpuflow.load(path, overrides=[f"run.on_error={policy}"]) as loader:
            batches = list(loader)
        indices = [i for batch in batches for i in batch.indices.tolist()]
        assert len(indices) == count and not {2, 7} & set(indices)
        for batch in batches:
            check(batch, of_matrix)
            assert len(batch["boxes"]) == len(batch.indices)


def test_a_record_with_another_fault_names_that_one(tmp_path: Path) -> None:
    scores: dict[int, dict[str, Any]] = {i: {"score": float("nan") if i == 5 else 1.0} for i in range(COUNT)}
    scores[5]["points"] = []
    listing = make_faces(tmp_path / "data", scores)
    fields = {**POINTS, "score": {"type": "number"}}
    path = face_config(tmp_path / "x.yaml", listing, warp_of("points"), fields=fields)
    with gpuflow.load(path, overrides=["run.on_error=raise"]) as loader:
        _, error = fault_of(loader)
    assert isinstance(error, gpuflow.BadSampleError)
    assert error.reason == f"{listing}:6: score must be finite, got nan"


def test_records_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    records = TableSource.records

    def counted(source: Any, indices: Any) -> Any:
        asked.extend(indices)
        return records(source, indices)

    monkeypatch.setattr(TableSource, "records", counted)
    fields = {**FIELDS, "mask": None}
    with gpuflow.load(face_config(tmp_path / "x.yaml", make_faces(tmp_path / "data"), ALIGN, fields=fields)) as loader:
        for _ in loader:
            pass
    assert sorted(asked) == list(range(COUNT))


# --- without a loader -------------------------------------------------------------------------------------------------


def test_a_transform_takes_the_fields_values(listing: Path, tmp_path: Path) -> None:
    path = face_config(tmp_path / "x.yaml", listing, ALIGN)
    with gpuflow.load(path, "val") as loader, gpuflow.transform(path, "val") as transform:
        for batch in loader:
            indices = batch.indices.tolist()
            images = [torch.from_numpy(image_of(i)).permute(2, 0, 1) for i in indices]
            for fields in (
                batch.fields,
                {"align": np.array([matrix_of(i) for i in indices])},
                {"align": torch.from_numpy(np.array([matrix_of(i) for i in indices]))},
                {"align": [torch.from_numpy(matrix_of(i)).requires_grad_() for i in indices]},
            ):
                assert torch.equal(transform(images, epoch=0, positions=indices, fields=fields), batch.images)


def test_a_transform_takes_points_from_keypoints(listing: Path, tmp_path: Path) -> None:
    warp = {"source": {"field": "points"}, "target": TARGET}
    path = face_config(tmp_path / "x.yaml", listing, warp, fields=POINTS)
    with gpuflow.load(path, "val") as loader, gpuflow.transform(path, "val") as transform:
        for batch in loader:
            indices = batch.indices.tolist()
            images = [torch.from_numpy(image_of(i)).permute(2, 0, 1) for i in indices]
            # As a source has them: from the corner of the image, with a visibility.
            points = [np.column_stack([landmarks_of(i) + 0.5, np.full(5, 2)])[None] for i in indices]
            found: Any = transform(images, epoch=0, positions=indices, fields={"points": points})
            assert torch.equal(found[0], batch.images)
            expected: Any = batch["points"]
            assert torch.equal(found[1]["points"].values, expected.values)


@pytest.mark.parametrize(
    ("fields", "kind", "text"),
    [
        (None, ValueError, "fields must have 'align', which a stage takes from each record, got none"),
        ({"label": [1]}, ValueError, "fields must have 'align', which a stage takes from each record, got label"),
        ({"align": [None]}, ValueError, "fields['align'] must have 2 values, one for each image, got 1"),
        ({"align": 3}, ValueError, "fields['align'] must have 2 values, one for each image, got 3"),
        (
            {"align": [np.eye(2, 3), np.zeros((2, 3))]},
            gpuflow.BadSampleError,
            "images[1] (sample 1): record: align must be invertible, got [[0.0, 0.0, 0.0], [0.0, 0.0, 0.0]]",
        ),
    ],
    ids=["none", "another", "count", "no list", "singular"],
)
def test_a_transform_without_usable_values_says_so(
    listing: Path, tmp_path: Path, fields: Any, kind: type[Exception], text: str
) -> None:
    images = torch.zeros((2, 3, 40, 40), dtype=torch.uint8)
    path = face_config(tmp_path / "x.yaml", listing, ALIGN)
    with gpuflow.transform(path) as transform, pytest.raises(kind) as caught:
        transform(images, epoch=0, positions=[0, 1], fields=fields)
    assert text in str(caught.value)


def test_a_source_whose_fields_are_known_late_is_checked_once_it_is_open(tmp_path: Path) -> None:
    source = as_coco(tmp_path / "data")
    path = face_config(tmp_path / "x.yaml", "", ALIGN, source=source)
    with pytest.raises(ConfigError) as caught:
        gpuflow.load(path)
    assert str(caught.value) == (
        f"{path}: pipelines.train.stages[1].warp_affine.matrix.field must name a field of source.fields, got 'align'; "
        "declare it there: align: {type: any}"
    )
