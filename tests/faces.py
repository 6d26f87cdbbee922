"""Images, each with its own map: a JSON-lines listing with matrices, landmarks, boxes and masks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import yaml
from numpy.typing import NDArray

from tests.datasets import pixels

COUNT = 11
SIZE = (28, 32)
TARGET = [[9.0, 8.0], [21.0, 8.5], [15.0, 20.0]]
FIELDS: dict[str, Any] = {"label": None, "align": {"type": "any"}, "landmarks": {"type": "any"}}


def matrix_of(i: int) -> NDArray[np.float64]:
    """The map of sample i in OpenCV's terms, [2, 3]."""
    angle, scale = 0.4 * np.sin(i), 0.6 + 0.05 * i
    turn: NDArray[np.float64] = scale * np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    matrix: NDArray[np.float64] = np.column_stack([turn, [3.0 - i / 2, 1.5 + i / 3]])
    return matrix


def landmarks_of(i: int) -> NDArray[np.float64]:
    """Five points of sample i in numbers of pixels, [5, 2]."""
    known = np.array([[14.0, 15.0], [31.0, 14.0], [24.0, 26.0], [17.0, 33.0], [29.0, 34.0]])
    points: NDArray[np.float64] = known + 2 * np.sin(np.arange(10).reshape(5, 2) + i)
    return points


def image_of(i: int) -> NDArray[np.uint8]:
    return pixels(i % 3, i)


def box_of(i: int) -> list[float]:
    return [5.0 + i / 4, 6.0, 30.0, 28.0 - i / 4]


def make_faces(root: Path, rows: Mapping[int, Mapping[str, Any]] | None = None) -> Path:
    """Write images as PNG, and the listing. rows: what differs in some of its lines."""
    root.mkdir(parents=True, exist_ok=True)
    lines = []
    for i in range(COUNT):
        image = image_of(i)
        cv2.imwrite(str(root / f"{i}.png"), image[..., ::-1])
        cv2.imwrite(str(root / f"mask_{i}.png"), (image[..., 0] > 100).astype(np.uint8))
        points = landmarks_of(i)
        row = {
            "path": f"{i}.png",
            "label": i % 3,
            "align": matrix_of(i).tolist(),
            "landmarks": points.tolist(),
            "points": [np.column_stack([points + 0.5, np.full(5, 2)]).tolist()],
            "boxes": [box_of(i)],
            "mask": f"mask_{i}.png",
        }
        lines.append(json.dumps({**row, **(rows or {}).get(i, {})}))
    (root / "list.jsonl").write_text("\n".join(lines) + "\n")
    return root / "list.jsonl"


def face_config(
    path: Path,
    listing: Path | str,
    warp: Mapping[str, Any],
    *,
    fields: Mapping[str, Any] = FIELDS,
    before: tuple[Any, ...] = (),
    source: Mapping[str, Any] | None = None,
    **blocks: Any,
) -> Path:
    """A YAML file whose pipelines `train`, shuffled, and `val` warp each image to `SIZE`."""
    stages = ["decode", *before, {"warp_affine": {"size": list(SIZE), "border": "edge", **warp}}]
    document = {
        "source": source or {"listing": str(listing), "fields": dict(fields), "seed": 3},
        "pipelines": {
            "train": {"stages": stages, "batch": {"size": 4}, "shuffle": True},
            "val": {"stages": stages, "batch": {"size": 4}},
        },
        "run": {"threads": 2, **blocks.pop("run", {})},
        **blocks,
    }
    path.write_text(yaml.safe_dump(document, sort_keys=False))
    return path


def by_opencv(image: NDArray[np.uint8], matrix: NDArray[np.float64], *, inverse: bool = False) -> NDArray[np.uint8]:
    """cv2.warpAffine's result, HWC."""
    flags = cv2.INTER_LINEAR | (cv2.WARP_INVERSE_MAP if inverse else 0)
    warped = cv2.warpAffine(image, matrix, SIZE[::-1], flags=flags, borderMode=cv2.BORDER_REPLICATE)
    return np.asarray(warped, np.uint8)


def by_points(source: Any, target: Any) -> NDArray[np.float64]:
    """cv2.getAffineTransform of three pairs of points, [2, 3]."""
    return np.asarray(cv2.getAffineTransform(np.array(source, np.float32), np.array(target, np.float32)), np.float64)
