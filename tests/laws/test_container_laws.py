"""Laws of damaged containers: a flipped bit changes the sample that it hits, makes samples bad, or is refused at open.

The other samples come as from the undamaged file, bit for bit: encoded bytes, labels and records.
"""

from __future__ import annotations

import io
import json
import tarfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from types import MappingProxyType
from typing import Any, final

import numpy as np
import pytest

from gpuflow.errors import GpuflowError
from gpuflow.pipeline.records import MaskFile
from gpuflow.sources import SourceSpec, open_source, records_of, source_spec
from gpuflow.sources.base import fields_of
from gpuflow.sources.storage import Allocate, Payload, lay_out
from tests.datasets import MemorySource, loader_of

COUNT, ROWS = 12, 5
FLIPS = 120
MOST = 2
"""The samples that one bit may hit: an offset between two samples is of both, and so is the end of a line."""
UNCHECKED = ("Parquet", "Parquet, zstd")
"""Without checksums, the levels or the compressed bytes of a page may be damaged so that all of a row group changes."""
FIELDS: dict[str, Any] = {"image": None, "label": {"kind": "class"}, "boxes": None, "caption": {"type": "text"}}


def encoded(i: int) -> bytes:
    """Bytes that stand for an image; none is decoded here."""
    return np.random.default_rng(i).integers(0, 256, 20 + 3 * i, np.uint8).tobytes()


def row(i: int) -> dict[str, Any]:
    boxes = [[float(i), 2.0, i + 5.0, 9.5 + j] for j in range(i % 3)]
    return {"label": f"class {i % 4}", "boxes": boxes, "caption": f"caption {i}"}


# --- containers: each returns the file to damage, and the source ------------------------------------------------------

Container = Callable[[Path], tuple[Path, SourceSpec]]


def images(folder: Path) -> list[str]:
    for i in range(COUNT):
        (folder / f"{i:02d}.jpg").write_bytes(encoded(i))
    return [f"{i:02d}.jpg" for i in range(COUNT)]


def json_lines(folder: Path) -> tuple[Path, SourceSpec]:
    lines = [json.dumps({"image": name, **row(i)}) for i, name in enumerate(images(folder))]
    (path := folder / "list.jsonl").write_text("\n".join(lines) + "\n")
    return path, source_spec(listing=str(path), fields=FIELDS)


def csv(folder: Path) -> tuple[Path, SourceSpec]:
    lines = [
        f'{name},class {i % 4},"{json.dumps(row(i)["boxes"])}",caption {i}' for i, name in enumerate(images(folder))
    ]
    (path := folder / "list.csv").write_text("\n".join(["image,label,boxes,caption", *lines]) + "\n")
    return path, source_spec(listing=str(path), fields=FIELDS)


def coco(folder: Path) -> tuple[Path, SourceSpec]:
    names, boxes = images(folder), [(i, box) for i in range(COUNT) for box in row(i)["boxes"]]
    document = {
        "images": [{"id": 10 + i, "file_name": name, "width": 99, "height": 99} for i, name in enumerate(names)],
        "annotations": [
            {"id": n, "image_id": 10 + i, "category_id": 1 + i % 4, "bbox": box, "area": 9.0, "iscrowd": 0}
            for n, (i, box) in enumerate(boxes)
        ],
        "categories": [{"id": 1 + k, "name": f"class {k}"} for k in range(4)],
    }
    (path := folder / "instances.json").write_text(json.dumps(document))
    return path, source_spec(coco=str(path), images=str(folder))


def folder(folder: Path) -> tuple[Path, SourceSpec]:
    for k in range(4):
        (folder / "photos" / f"class {k}").mkdir(parents=True)
    for i in range(COUNT):
        (folder / "photos" / f"class {i % 4}" / f"{i:02d}.jpg").write_bytes(encoded(i))
    return folder / "photos" / "class 1" / "05.jpg", source_spec(folder=str(folder / "photos"))


def tar(folder: Path, form: int) -> tuple[Path, SourceSpec]:
    path = folder / "0.tar"
    with tarfile.open(path, "w", format=form) as shard:
        for i in range(COUNT):
            stem = f"{'long' * 30 if i % 5 == 0 else 'a'}/{i:02d}"
            for suffix, data in (("jpg", encoded(i)), ("json", json.dumps(row(i)).encode())):
                member = tarfile.TarInfo(f"{stem}.{suffix}")
                member.size = len(data)
                shard.addfile(member, io.BytesIO(data))
    fields = {**FIELDS, "label": {"column": "label"}, "caption": {"type": "text", "column": "caption"}}
    return path, source_spec(tar=str(path), fields=fields)


def table(*, structs: bool, nulls: bool) -> Any:
    pa = pytest.importorskip("pyarrow")
    cells = [None if nulls and i % 5 == 2 else encoded(i) for i in range(COUNT)]
    image: Any = pa.array(cells, pa.binary())
    if structs:
        image = pa.array([{"bytes": cell, "path": f"{i}.jpg"} for i, cell in enumerate(cells)])
    rows = [row(i) for i in range(COUNT)]
    columns = {key: [one[key] for one in rows] for key in rows[0]}
    boxes = pa.array(columns.pop("boxes"), pa.list_(pa.list_(pa.float64())))
    return pa.table({"image": image, "boxes": boxes, **columns})


def arrow(folder: Path, *, structs: bool) -> tuple[Path, SourceSpec]:
    pa = pytest.importorskip("pyarrow")
    data = table(structs=structs, nulls=True)
    with pa.OSFile(str(folder / "data.arrow"), "wb") as file, pa.ipc.new_stream(file, data.schema) as writer:
        writer.write_table(data, max_chunksize=ROWS)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data.arrow"}]}))
    return folder / "data.arrow", source_spec(hf=str(folder), fields=FIELDS)


def parquet(folder: Path, **options: Any) -> tuple[Path, SourceSpec]:
    pq = pytest.importorskip("pyarrow.parquet")
    path = folder / "0.parquet"
    pq.write_table(table(structs=False, nulls=True), path, row_group_size=ROWS, **options)
    return path, source_spec(hf=str(path), fields=FIELDS)


CONTAINERS: dict[str, Container] = {
    "JSON lines": json_lines,
    "CSV": csv,
    "COCO": coco,
    "folder": folder,
    "tar, pax": partial(tar, form=tarfile.PAX_FORMAT),
    "tar, GNU": partial(tar, form=tarfile.GNU_FORMAT),
    "Arrow": partial(arrow, structs=False),
    "Arrow, datasets' images": partial(arrow, structs=True),
    "Parquet, with checksums": partial(parquet, write_page_checksum=True),
    "Parquet": partial(parquet, compression="none", use_dictionary=False),
    "Parquet, zstd": partial(parquet, compression="zstd"),
}


# --- the law ----------------------------------------------------------------------------------------------------------


def read(spec: SourceSpec) -> dict[str, Any]:
    """What comes of each sample, by its name; a text if it is bad."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        source = open_source(spec)
    try:
        indices = range(len(source))
        payload, records = source.read(indices, lambda size: np.zeros(size, np.uint8)), records_of(source, indices)
        found: dict[str, Any] = {}
        for i in indices:
            values = {name: plain(column[i]) for name, column in records.columns.items()}
            for field in fields_of(source):
                if field.labels:
                    values[field.labels] = [field.classes[k] for k in np.asarray(records.columns[field.labels][i])]
            label = source.classes[int(source.labels[i])] if spec.kind != "coco" else None
            sound = (payload.sample(i).tobytes(), label, values)
            found[source.path(i)] = payload.errors[i] or records.errors[i] or sound
        return found
    finally:
        source.close()


def plain(value: Any) -> Any:
    return value.tobytes() if isinstance(value, np.ndarray) else value.data if isinstance(value, MaskFile) else value


@pytest.mark.parametrize("container", CONTAINERS)
def test_a_flipped_bit_changes_no_other_sample(container: str, tmp_path: Path) -> None:
    path, spec = CONTAINERS[container](tmp_path)
    sound, data = read(spec), path.read_bytes()
    rng = np.random.default_rng(len(data))
    hit, refused, most = 0, 0, ROWS if container in UNCHECKED else MOST
    for place in rng.choice(8 * len(data), min(FLIPS, 8 * len(data)), replace=False).tolist():
        damaged = bytearray(data)
        damaged[place // 8] ^= 1 << place % 8
        path.write_bytes(damaged)
        try:
            found = read(spec)
        except GpuflowError:
            refused += 1
            continue
        silent = [name for name in sound if not isinstance(found.get(name), str)]
        other = [name for name in silent if found.get(name) != sound[name]]
        new = [name for name in found if name not in sound]
        assert len(other) <= most and len(new) <= most, f"bit {place % 8} of byte {place // 8}: {other}, {new}"
        hit += bool(other)
    assert hit + refused


# --- sources of other packages ----------------------------------------------------------------------------------------


@final
class IndexedSource:
    """As another package may write one: an index says where each image of one file begins, and how long it is."""

    shard_sizes = storage = None

    def __init__(self, photographs: MemorySource, damaged: Mapping[int, int] = MappingProxyType({})) -> None:
        self.labels, self.classes, self.path = photographs.labels, photographs.classes, photographs.path
        files = [data or b"" for data in photographs.images]
        self.data = np.frombuffer(b"".join(files), np.uint8)
        self.starts = [0, *accumulate(map(len, files))]
        self.sizes = [damaged.get(i, len(data)) for i, data in enumerate(files)]

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, indices: Sequence[int], allocate: Allocate) -> Payload:
        sizes = [self.sizes[i] for i in indices]
        offsets, end = lay_out(sizes)
        buffer = allocate(end)
        for i, offset, size in zip(indices, offsets, sizes, strict=True):
            found = self.data[self.starts[i] :][: max(size, 0)]
            buffer[offset : offset + len(found)] = found
        return Payload(buffer=buffer, offsets=offsets, sizes=sizes, errors=[None] * len(sizes))

    def close(self) -> None: ...


@pytest.mark.parametrize("size", [-1, -500, -(2**31)])
def test_a_damaged_size_in_an_index_makes_its_sample_bad_and_changes_no_other(size: int) -> None:
    def epoch(damaged: Mapping[int, int]) -> tuple[dict[int, bytes], int]:
        source = IndexedSource(MemorySource.of(COUNT), damaged)
        with loader_of(source, shuffle=False, policy="skip") as loader, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # one of twelve is bad
            pairs = [pair for batch in loader for pair in zip(batch.indices.tolist(), batch.images, strict=True)]
            return {index: image.numpy().tobytes() for index, image in pairs}, loader.stats()["bad"]

    sound, none = epoch({})
    assert none == 0 and len(sound) == COUNT
    for place in (0, 5, COUNT - 1):
        found, bad = epoch({place: size})
        assert bad == 1 and found == {index: image for index, image in sound.items() if index != place}
