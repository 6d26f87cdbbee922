"""A batch as a mapping of its fields, and what torch.save keeps of it."""

from __future__ import annotations

import io
import pickle
from typing import Any

import pytest
import torch
from torchvision import tv_tensors

from gpuflow.loader.batch import Batch, RaggedTensor


@pytest.fixture
def batch() -> Any:
    """Two samples. Fields of several dtypes lie in one block of memory, as in a loader's batches."""
    block = torch.arange(96, dtype=torch.uint8)
    boxes = RaggedTensor(block[:48].view(torch.float32).reshape(3, 4), block[48:72].view(torch.int64))
    boxes.offsets.copy_(torch.tensor([0, 1, 3]))
    boxes = RaggedTensor(boxes.values, boxes.offsets)
    score = block[72:88].view(torch.float64)
    targets = [{"boxes": tv_tensors.BoundingBoxes(boxes[i], format="XYXY", canvas_size=(4, 4))} for i in range(2)]
    known: dict[str, Any] = {"fields": {"boxes": boxes, "score": score, "note": ["a", "b"]}, "step": 3, "epoch": 1}
    return Batch((torch.zeros(2, 3, 4, 4), targets), **known)


def test_a_batch_is_a_mapping_of_its_fields(batch: Any) -> None:
    assert "boxes" in batch and "box" not in batch
    assert list(batch.keys()) == ["boxes", "score", "note"]
    assert batch.get("note") == batch["note"] == ["a", "b"] and batch.get("notes", 1) == 1
    assert dict(batch) == dict(batch.fields)
    with pytest.raises(KeyError, match="no field 'scor'; did you mean 'score'"):
        batch["scor"]


def test_rows_are_those_of_one_sample(batch: Any) -> None:
    boxes = batch["boxes"]
    assert torch.equal(boxes[torch.tensor(1)], boxes[-1]) and len(boxes[0]) == 1
    for wrong in (slice(0, 2), [0], 1.0):
        with pytest.raises(TypeError, match=r"as an integer|only integer"):
            boxes[wrong]


def test_a_batch_without_fields_says_so() -> None:
    plain: Any = Batch((torch.zeros(2, 3, 4, 4), torch.zeros(2)))
    assert "boxes" not in plain
    with pytest.raises(KeyError, match="no field 'boxes'; the source declares no fields"):
        plain["boxes"]


@pytest.mark.parametrize("way", ["torch", "pickle"])
def test_a_batch_can_be_saved(way: str, batch: Any) -> None:
    found: Any
    if way == "torch":
        file = io.BytesIO()
        torch.save(batch, file)
        file.seek(0)
        found = torch.load(file, weights_only=False)
    else:
        found = pickle.loads(pickle.dumps(batch))
    assert type(found) is Batch
    saved: Any = found
    assert (saved.step, saved.epoch) == (3, 1)
    assert torch.equal(saved["boxes"].values, batch["boxes"].values) and torch.equal(saved["score"], batch["score"])
    assert torch.equal(saved["boxes"][1], batch["boxes"][1]) and saved["note"] == ["a", "b"]
    assert isinstance(saved[1][0]["boxes"], tv_tensors.BoundingBoxes)
    assert saved[1][1]["boxes"].canvas_size == (4, 4)
