"""Records for tests: sources in memory whose samples have boxes, masks, keypoints, numbers and texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, assert_never, final

import cv2
import numpy as np
from numpy.typing import NDArray

from gpuflow.pipeline.moves import Crop, Flip, Move, Pad, Resize, Warp
from gpuflow.pipeline.records import Column, Field, MaskFile, Polygons, Ragged, Records, Rle
from gpuflow.sources import Allocate, Payload
from tests.datasets import MemorySource

__all__ = ["FIELDS", "MemoryRecords", "png", "random_boxes", "rle", "torchvision_moves"]

FIELDS = (
    Field(name="boxes", type="boxes", labels="box_labels", classes=("a", "b", "c")),
    Field(name="masks", type="mask", instances=True),
    Field(name="levels", type="mask"),
    Field(name="points", type="keypoints"),
    Field(name="weight", type="number"),
    Field(name="caption", type="text"),
    Field(name="extra", type="any"),
)


def png(mask: NDArray[np.uint8]) -> MaskFile:
    """A mask as a file."""
    done, data = cv2.imencode(".png", mask)
    assert done
    return MaskFile(data.tobytes())


def rle(mask: NDArray[np.uint8]) -> Rle:
    """A mask of 0 and 1 as run lengths."""
    flat = mask.T.ravel().astype(np.int64)
    turns = np.flatnonzero(np.diff(flat, prepend=0))
    return Rle(mask.shape, np.diff(np.concatenate([[0], turns, [flat.size]])))


@final
class MemoryRecords:
    """A source in memory of JPEGs with records; sample i has i % 4 boxes."""

    shard_sizes, storage = None, None

    def __init__(self, source: MemorySource, fields: tuple[Field, ...], rows: Sequence[dict[str, Any]]) -> None:
        self.source, self.fields, self.rows = source, fields, list(rows)
        self.classes, self.labels = source.classes, source.labels
        self.has_labels = True
        self.errors: dict[int, str] = {}

    @classmethod
    def of(cls, count: int, fields: tuple[Field, ...] = FIELDS) -> MemoryRecords:
        source, rows = MemorySource.of(count), []
        for i in range(count):
            rng = np.random.default_rng(i)
            image = cv2.imdecode(np.frombuffer(source.images[i] or b"", np.uint8), cv2.IMREAD_COLOR)
            assert image is not None
            height, width = image.shape[:2]
            boxes = random_boxes(rng, i % 4, height, width)
            outline = np.array([[1.0, 1.0], [width - 2.0, 2.0], [width / 2, height - 1.0]])
            one = rng.integers(0, 2, (height, width)).astype(np.uint8)
            rows.append(
                {
                    "boxes": boxes,
                    "box_labels": rng.integers(0, 3, len(boxes)),
                    "masks": tuple(Polygons((outline,)) if k % 2 else rle(one) for k in range(len(boxes))),
                    "levels": png(rng.integers(0, 9, (height, width)).astype(np.uint8)),
                    "points": rng.uniform(0, min(height, width), (len(boxes), 2, 3)).astype(np.float32),
                    "weight": i / 2,
                    "caption": f"number {i}",
                    "extra": {"number": i},
                }
            )
        return cls(source, fields, rows)

    def __len__(self) -> int:
        return len(self.source)

    def path(self, index: int) -> str:
        return self.source.path(index)

    def read(self, indices: Sequence[int], allocate: Allocate) -> Payload:
        return self.source.read(indices, allocate)

    def records(self, indices: Sequence[int]) -> Records:
        columns: dict[str, Column] = {}
        rows = [self.rows[i] for i in indices]
        for field in self.fields:
            values = [row[field.name] for row in rows]
            match field.type:
                case "boxes":
                    columns[field.name] = Ragged.of(values, np.empty((0, 4), np.float32))
                    if field.labels:
                        labels = [row[field.labels] for row in rows]
                        columns[field.labels] = Ragged.of(labels, np.empty(0, np.int64))
                case "keypoints":
                    columns[field.name] = Ragged.of(values, np.empty((0, 2, 3), np.float32))
                case "number":
                    columns[field.name] = np.array(values, np.float64)
                case _:
                    columns[field.name] = values
        return Records(columns, [self.errors.get(i) for i in indices])

    def without_records(self) -> MemorySource:
        return self.source

    def close(self) -> None:
        self.source.close()


def random_boxes(rng: np.random.Generator, count: int, height: int, width: int) -> NDArray[np.float32]:
    """Boxes inside an image, a pixel or more a side."""
    x1, y1 = rng.uniform(0, width - 2, count), rng.uniform(0, height - 2, count)
    x2, y2 = rng.uniform(x1 + 1, width), rng.uniform(y1 + 1, height)
    return np.stack([x1, y1, x2, y2], axis=1).astype(np.float32)


def torchvision_moves(tensor: Any, moves: Sequence[Move], i: int) -> Any:
    """Sample i's moves of one TVTensor by torchvision's own functions."""
    from torchvision.transforms import InterpolationMode
    from torchvision.transforms.v2 import functional as F

    for move in moves:
        match move:
            case Crop():
                tensor = F.crop(tensor, *(int(x[i]) for x in (move.y, move.x, move.height, move.width)))
            case Flip():
                tensor = F.horizontal_flip(tensor) if move.horizontal[i] else tensor
                tensor = F.vertical_flip(tensor) if move.vertical[i] else tensor
            case Resize():
                size = [int(move.height[i]), int(move.width[i])]
                tensor = F.resize(tensor, size, InterpolationMode.BILINEAR)
            case Pad():
                tensor = F.pad(tensor, [int(x[i]) for x in (move.left, move.top, move.right, move.bottom)])
            case Warp():
                if move.active is None or move.active[i]:
                    matrix = move.matrix[i] / move.matrix[i, 2, 2]
                    tensor = F.perspective(tensor, None, None, coefficients=matrix.ravel()[:8].tolist())
            case _:
                assert_never(move)
    return tensor
