"""Laws of incomplete annotations: the instance is left out and counted, and every other one stays as it is."""

from __future__ import annotations

import io
import json
import math
import random
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

import gpuflow
from gpuflow.errors import SourceError
from gpuflow.pipeline.records import Ragged
from gpuflow.sources import KINDS, Source, SourceSpec, left_out_of, open_source, records_of, source_spec, subset
from tests.datasets import jpeg

COUNT = 12
FIELDS: dict[str, Any] = {
    "image": {"column": "path"},
    "boxes": {"labels": "labels"},
    "mask": {"kind": "polygons"},
    "keypoints": {},
}
BROKEN_BOXES: tuple[Any, ...] = (
    None, [], [4, 5, 4, 9], [4, 5, 9, 5], [9, 9, 4, 5], [math.nan, 0, 1, 1], [0, 0, math.inf, 1]
)  # fmt: skip
BROKEN_MASKS: tuple[Any, ...] = (None, [], [[]], [[1, 1, 2, 2]], [[1, 1, 5, math.nan, 5, 5]])
BROKEN_POINTS: tuple[Any, ...] = ([[math.nan, 1, 2]], [[1, 1, 3]])

Rows = list[tuple[list[float], str, list[list[float]], list[list[float]]]]


def written(seed: int) -> tuple[list[Rows], list[Rows]]:
    """The instances of each sample: all of them, some incomplete; and the complete ones alone."""
    rng = random.Random(seed)
    whole, sound = list[Rows](), list[Rows]()
    for _ in range(COUNT):
        rows, kept = Rows(), Rows()
        for _ in range(rng.randint(0, 5)):
            x, y, w, h = (rng.randint(1, 15) for _ in range(4))
            box, mask = [x, y, x + w, y + h], [[x, y, x + w, y, x + w, y + h]]
            one: Any = (box, rng.choice("abc"), mask, [[x, y, 2]])
            complete = one
            if rng.random() < 0.4:
                place, values = rng.choice([(0, BROKEN_BOXES), (2, BROKEN_MASKS), (3, BROKEN_POINTS)])
                one = (*one[:place], rng.choice(values), *one[place + 1 :])
            rows.append(one)
            kept += [complete] if one is complete else []
        whole.append(rows)
        sound.append(kept)
    whole[0].append(([0, 0, 9, 9], "a", [[0, 0, 9, 0, 9, 9]], [[1, 1, 1]]))  # each class and field is there
    sound[0].append(whole[0][-1])
    return whole, sound


def columns_of(rows: Rows) -> dict[str, Any]:
    names = ("boxes", "labels", "mask", "keypoints")
    return {name: [row[i] for row in rows] for i, name in enumerate(names)}


def listing(samples: list[Rows], folder: Path) -> SourceSpec:
    lines = (json.dumps({"path": f"{i}.jpg", **columns_of(rows)}) for i, rows in enumerate(samples))
    (folder / "list.jsonl").write_text("\n".join(lines) + "\n")
    return source_spec(listing=str(folder / "list.jsonl"), fields=FIELDS, classes=("a", "b", "c"))


def tar(samples: list[Rows], folder: Path) -> SourceSpec:
    with tarfile.open(folder / "s.tar", "w") as archive:
        for i, rows in enumerate(samples):
            for name, data in ((f"{i:02}.jpg", b"i"), (f"{i:02}.json", json.dumps(columns_of(rows)).encode())):
                member = tarfile.TarInfo(name)
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))
    fields = {name: field for name, field in FIELDS.items() if name != "image"}
    return source_spec(tar=str(folder / "s.tar"), fields=fields, classes=("a", "b", "c"))


def coco(samples: list[Rows], folder: Path) -> SourceSpec:
    def of_box(box: Any) -> Any:
        return [box[0], box[1], box[2] - box[0], box[3] - box[1]] if box else box

    annotations = [
        {
            "image_id": i,
            "category_id": ord(label),
            "bbox": of_box(box),
            "segmentation": mask,
            "keypoints": points[0],
        }
        for i, rows in enumerate(samples)
        for box, label, mask, points in rows
    ]
    content = {
        "images": [{"id": i, "file_name": f"{i}.jpg"} for i in range(COUNT)],
        "annotations": annotations,
        "categories": [{"id": ord(name), "name": name} for name in "abc"],
    }
    (folder / "coco.json").write_text(json.dumps(content))
    return source_spec(coco=str(folder / "coco.json"), images=str(folder))


def parquet(samples: list[Rows], folder: Path) -> SourceSpec:
    pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [columns_of(sample) for sample in samples]
    pq.write_table(
        pa.table(
            {
                "path": [{"bytes": b"i", "path": f"{i}.jpg"} for i in range(COUNT)],
                "boxes": pa.array([row["boxes"] for row in rows], pa.list_(pa.list_(pa.float64()))),
                "labels": pa.array([row["labels"] for row in rows], pa.list_(pa.string())),
                "mask": pa.array([row["mask"] for row in rows], pa.list_(pa.list_(pa.list_(pa.float64())))),
                "keypoints": pa.array([row["keypoints"] for row in rows], pa.list_(pa.list_(pa.list_(pa.float64())))),
            }
        ),
        folder / "t.parquet",
    )
    return source_spec(hf=str(folder / "t.parquet"), fields=FIELDS, classes=("a", "b", "c"))


WRITE: dict[str, Callable[[list[Rows], Path], SourceSpec]] = {
    "listing": listing,
    "tar": tar,
    "coco": coco,
    "hf": parquet,
}
WITH_INSTANCES = [kind for kind in KINDS if kind not in ("folder", "mix")]
"""A folder has images alone; the test makes a mix of each of the others."""


def values_of(source: Source) -> list[tuple[Any, ...]]:
    """The values of each sample's instances."""
    records = records_of(source, range(len(source)))
    assert records.errors == [None] * len(source)
    masks, rows = records.columns["mask"], [records.columns[name] for name in ("boxes", "labels", "keypoints")]
    assert isinstance(masks, list) and all(isinstance(column, Ragged) for column in rows)
    return [
        (*(column[i].tolist() for column in rows), [[part.tolist() for part in one.outlines] for one in masks[i]])
        for i in range(len(source))
    ]


@pytest.mark.parametrize("kind", WITH_INSTANCES)
@pytest.mark.parametrize("seed", range(4))
def test_complete_instances_are_those_of_a_file_without_the_others(kind: str, seed: int, tmp_path: Path) -> None:
    whole, sound = written(seed)
    (tmp_path / "sound").mkdir()
    expected = open_source(WRITE[kind](sound, tmp_path / "sound"))
    spec = WRITE[kind](whole, tmp_path)
    source = open_source(spec)
    assert values_of(source) == values_of(expected) and not left_out_of(expected)
    missing = [len(rows) - len(kept) for rows, kept in zip(whole, sound, strict=True)]
    assert {i: left_out.instances for i, left_out in left_out_of(source).items()} == {
        i: n for i, n in enumerate(missing) if n
    }
    mixed = open_source(source_spec(mix=({"source": source_keys(spec)}, {"source": source_keys(spec)})))
    assert {i % COUNT for i in left_out_of(mixed)} == set(left_out_of(source))
    assert sum(each.instances for each in left_out_of(mixed).values()) == 2 * sum(missing)


def source_keys(spec: SourceSpec) -> dict[str, Any]:
    """The keys of a source of one kind."""
    values = {name: getattr(spec, name, None) for name in ("listing", "tar", "coco", "images", "hf", "classes")}
    keys = {name: value for name, value in values.items() if value}
    fields = {name: field for name, field in FIELDS.items() if name != "image" or "tar" not in keys}
    return keys if "coco" in keys else keys | {"fields": fields}


def test_a_part_counts_its_own_samples(tmp_path: Path) -> None:
    spec = listing(written(0)[0], tmp_path)
    keys = source_keys(spec) | {"split": {"train": 0.5, "val": 0.5}}
    parted = source_spec(**{**keys, "classes": spec.classes})
    whole = left_out_of(open_source(spec))
    found = []
    for part in ("train", "val"):
        source = subset(open_source(parted), parted, part)
        found += [(source.path(i), left_out) for i, left_out in left_out_of(source).items()]
    names = open_source(spec)
    assert sorted(found) == sorted((names.path(i), left_out) for i, left_out in whole.items())


def test_an_instance_that_two_fields_leave_out_is_one_and_has_the_reason_of_the_first(tmp_path: Path) -> None:
    sound: Any = ([0, 0, 9, 9], "a", [[0, 0, 9, 0, 9, 9]], [[1, 1, 1]])
    broken: Any = ([4, 5, 4, 9], "a", [], [[math.nan, 1, 2]])
    [left_out] = left_out_of(open_source(listing([[sound, broken, sound]], tmp_path))).values()
    assert left_out.instances == 1
    assert "boxes" in left_out.reason and "mask" not in left_out.reason


def test_they_are_counted_in_stats_and_raise_where_that_is_asked_for(tmp_path: Path) -> None:
    whole, sound = written(1)
    listing(whole, tmp_path)
    for i in range(COUNT):
        (tmp_path / f"{i}.jpg").write_bytes(jpeg(0, i))
    stages = [{"decode": {}}, {"resize": {"height": 16, "width": 16}}]
    config = {
        "source": {"listing": str(tmp_path / "list.jsonl"), "fields": FIELDS, "classes": ["a", "b", "c"]},
        "pipelines": {"val": {"stages": stages, "batch": {"size": 4}, "targets": {"min_area": 0}}},
    }
    path = tmp_path / "x.yaml"
    path.write_text(yaml.safe_dump(config))
    count = sum(map(len, whole)) - sum(map(len, sound))
    with gpuflow.load(path, "val") as loader:
        batches = list(loader)
        assert loader.stats()["bad"] == 0 and loader.stats()["instances_left_out"] == count
    assert np.sum([len(boxes) for batch in batches for boxes in batch["boxes"]]) == sum(map(len, sound))
    with pytest.raises(SourceError) as caught:
        gpuflow.load(path, "val", overrides=["pipelines.val.targets.invalid=raise"])
    assert str(caught.value).startswith(f"{path}: pipelines.val.targets.invalid is raise, and {count} instances of ")
    assert str(caught.value).endswith("; correct them, or set invalid: drop")
