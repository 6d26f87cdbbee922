"""Crops that depend on boxes: the same batches on threads, in processes and by a transform; faulty files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cv2
import pytest
import torch
import yaml

import gpuflow
from gpuflow.errors import ConfigError
from gpuflow.sources import records_of
from gpuflow.tools.samples import make_detection_samples
from tests.texts import outline

STAGES: list[Any] = [
    {"zoom_out": {"fill": 9}},
    {"iou_crop": {}},
    {"flip": {"horizontal": 0.5}},
    {"resize": {"height": 60, "width": 70}},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made: Path = tmp_path_factory.mktemp("boxes")
    make_detection_samples(made, 12)
    return made


def file_of(folder: Path, tmp_path: Path, stages: list[Any], fields: Any = None) -> Path:
    source: dict[str, Any] = {"coco": str(folder / "instances.json"), "images": str(folder / "images")}
    source |= {"fields": fields} if fields else {}
    pipeline = {"stages": [{"decode": {}}, *stages], "batch": {"size": 4}, "shuffle": True}
    path = tmp_path / "x.yaml"
    path.write_text(yaml.safe_dump({"source": source, "pipelines": {"train": pipeline}}))
    return path


def batches(path: Path, **overrides: Any) -> list[Any]:
    given = [f"run.{name}={value}" for name, value in overrides.items()]
    with gpuflow.load(path, "train", overrides=given) as loader:
        return [_copied(batch) for batch in loader]


def _copied(batch: Any) -> tuple[torch.Tensor, ...]:
    return batch.images.clone(), batch["boxes"].values.clone(), batch["mask"].values.clone()


def test_threads_processes_and_a_transform_give_the_same_crops(folder: Path, tmp_path: Path) -> None:
    path = file_of(folder, tmp_path, STAGES)
    expected = batches(path, threads=1, processes=0)
    for found in (batches(path, threads=2, processes=0), batches(path, threads=2, processes=2)):
        for ours, theirs in zip(found, expected, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert len({len(boxes) for _, boxes, _ in expected}) > 1
    with gpuflow.load(path, "train") as loader, gpuflow.transform(path, "train") as transform:
        for step, batch in enumerate(loader):
            indices = batch.indices.tolist()
            pixels: list[Any] = [cv2.imread(loader.dataset.path(i), cv2.IMREAD_COLOR_RGB) for i in indices]
            images = [torch.from_numpy(one).permute(2, 0, 1) for one in pixels]
            records: Any = records_of(loader.dataset, indices).columns
            boxes = [torch.from_numpy(records["boxes"][i]) for i in range(len(images))]
            labels = [torch.from_numpy(records["labels"][i]) for i in range(len(images))]
            positions = list(range(4 * step, 4 * step + 4))
            made, fields = transform(images, epoch=0, positions=positions, fields={"boxes": boxes, "labels": labels})
            assert torch.equal(fields["boxes"].values, expected[step][1])
            assert torch.equal(made, expected[step][0])


@pytest.mark.parametrize(
    ("fields", "stage", "expected"),
    [
        ({"mask": None}, {}, "pipelines.train.stages[1].iou_crop.boxes config.conflict, got 'boxes'"),
        (
            {"boxes": None},
            {"boxes": "bboxes"},
            "pipelines.train.stages[1].iou_crop.boxes config.conflict, got 'bboxes'",
        ),
    ],
    ids=["no boxes", "another name"],
)
def test_a_source_without_these_boxes_is_refused(
    fields: Any, stage: Any, expected: str, folder: Path, tmp_path: Path
) -> None:
    path = file_of(folder, tmp_path, [{"iou_crop": stage}, {"center_crop": {"size": 20}}], fields)
    with pytest.raises(ConfigError) as caught, gpuflow.load(path, "train"):
        pass
    assert outline(caught.value).endswith(expected)
