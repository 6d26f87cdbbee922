"""The source `hf` on what the real `datasets` and pyarrow write: samples, order, workers, resume, and damaged files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from numpy.typing import NDArray

import gpuflow
from gpuflow.errors import SourceError
from gpuflow.loader.sampler import ShardedOrder
from gpuflow.sources import (
    HfSource,
    Source,
    fields_of,
    open_source,
    records_of,
    source_spec,
    subset,
    weights_of,
)
from gpuflow.sources.base import fingerprint_of
from gpuflow.sources.hf_tables import ParquetCells
from tests.datasets import RAW, Row, deadline, epoch_rows, flat, interleave, jpeg, nothing_left_behind

datasets = pytest.importorskip("datasets", reason="the package datasets is not installed")
pa = pytest.importorskip("pyarrow", reason="the package pyarrow is not installed")

COUNT = 57
NAMES = ["cat", "dog", "owl"]


@pytest.fixture(autouse=True)
def _in_time() -> Iterator[None]:
    with deadline(120):
        yield


def images(count: int = COUNT, first: int = 0) -> list[bytes]:
    return [jpeg(i % 3, i) for i in range(first, first + count)]


def dataset(count: int = COUNT, first: int = 0, **columns: Any) -> Any:
    """Photographs, their classes, a weight, a caption, and objects with boxes and classes."""
    held = {
        "image": [{"bytes": data, "path": None} for data in images(count, first)],
        "label": [i % 3 for i in range(count)],
        "w": [float(i % 5) for i in range(count)],
        "caption": [f"photo {first + i}" for i in range(count)],
        "objects": [[{"bbox": [0, 0, i + 1, 2], "kind": i % 2}] * (i % 3) for i in range(count)],
        **columns,
    }
    features = datasets.Features(
        image=datasets.Image(),
        label=datasets.ClassLabel(names=NAMES),
        w=datasets.Value("float32"),
        caption=datasets.Value("string"),
        objects=datasets.List(
            {"bbox": datasets.List(datasets.Value("float32")), "kind": datasets.ClassLabel(names=["a", "b"])}
        ),
    )
    return datasets.Dataset.from_dict(held, features=features)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same samples as a saved dataset in two files, one Parquet file, and Parquet files in a directory."""
    root = tmp_path_factory.mktemp("hf")
    data = dataset()
    data.save_to_disk(root / "saved", num_shards=2)
    data.to_parquet(root / "one.parquet", batch_size=8)
    (root / "many").mkdir()
    for number in range(3):
        data.shard(3, number).to_parquet(root / "many" / f"train-{number:05d}-of-00003.parquet", batch_size=5)
    dataset(6, 1000).to_parquet(root / "many" / "test-00000-of-00001.parquet", batch_size=4)
    datasets.DatasetDict({"train": data, "test": dataset(6, 1000)}).save_to_disk(root / "parts")
    return root


FORMS = {"saved": "saved", "one file": "one.parquet", "a pattern": "many/train-*.parquet"}
forms = pytest.mark.parametrize("form", FORMS)


def allocate(size: int) -> NDArray[np.uint8]:
    return np.empty(size, np.uint8)


def contents(source: Source, indices: list[int]) -> list[bytes | str]:
    payload = source.read(indices, allocate)
    return [payload.errors[i] or payload.sample(i).tobytes() for i in range(len(payload))]


@forms
def test_samples_labels_and_paths(form: str, root: Path) -> None:
    source = open_source(source_spec(hf=str(root / FORMS[form])))
    assert (len(source), source.classes) == (COUNT, tuple(NAMES))
    assert source.labels.tolist() == [i % 3 for i in range(COUNT)]
    wanted = [40, 3, 56, 0, 3, 21]
    assert contents(source, wanted) == [images()[i] for i in wanted]
    assert contents(source, list(range(COUNT))) == images()
    last = {"saved": "saved/data-00001-of-00002.arrow[27]", "one file": "one.parquet[56]"}
    assert source.path(56) == str(root / last.get(form, "many/train-00002-of-00003.parquet[18]"))
    assert source.shard_sizes is None if form == "saved" else sum(source.shard_sizes or ()) == COUNT


@pytest.mark.parametrize("name", ["parts", "many"])
def test_splits_of_the_dataset_are_parts(name: str, root: Path) -> None:
    spec = source_spec(hf=str(root / name), splits=("train", "test"))
    source = open_source(spec)
    train, test = subset(source, spec, "train"), subset(source, spec, "test")
    assert (len(source), len(train), len(test)) == (COUNT + 6, COUNT, 6)
    assert contents(test, [5, 0]) == [images(6, 1000)[5], images(6, 1000)[0]]
    assert contents(train, [56]) == [images()[56]]


def test_other_columns_and_types(tmp_path: Path) -> None:
    pq = pytest.importorskip("pyarrow.parquet")
    data = images(9)
    table = {"picture": data, "name": ["b", "a", "c"] * 3, "number": [2, 0, 1] * 3}
    pq.write_table(pa.table(table), tmp_path / "x.parquet", row_group_size=4, compression="zstd")
    named = open_source(source_spec(hf=str(tmp_path / "x.parquet"), label="name"))
    assert (named.classes, named.labels.tolist()) == (("a", "b", "c"), [1, 0, 2] * 3)
    numbered = open_source(source_spec(hf=str(tmp_path), image="picture", label="number"))
    assert (numbered.classes, numbered.labels.tolist()) == (("0", "1", "2"), [2, 0, 1] * 3)
    assert contents(numbered, [8, 0]) == [data[8], data[0]]
    with pytest.raises(
        SourceError, match=r"must have a column of labels, got picture, name, number; name it with label"
    ):
        open_source(source_spec(hf=str(tmp_path / "x.parquet")))
    with pytest.raises(
        SourceError, match=r"the column 'name' must hold encoded images .*got string; name another .*pict"
    ):
        open_source(source_spec(hf=str(tmp_path / "x.parquet"), image="name", label="number"))
    with pytest.raises(
        SourceError, match=r"must have the column of images 'pictur', got picture.*did you mean 'picture'"
    ):
        open_source(source_spec(hf=str(tmp_path / "x.parquet"), image="pictur", label="number"))


@forms
def test_fields_by_column(form: str, root: Path) -> None:
    fields = {
        "image": None,
        "boxes": {"column": "objects.bbox", "labels": "objects.kind"},
        "caption": {"type": "text"},
        "w": {"type": "number"},
    }
    source = open_source(source_spec(hf=str(root / FORMS[form]), fields=fields))
    boxes, _, _ = fields_of(source)
    assert (boxes.classes, boxes.labels) == (("a", "b"), "objects.kind")
    records = records_of(source, [50, 1])
    assert records.columns["caption"] == ["photo 50", "photo 1"]
    found: Any = records.columns["boxes"]
    assert found[0].tolist() == [[0, 0, 51, 2]] * 2
    assert np.asarray(records.columns["w"]).tolist() == [0, 1]


def test_masks_are_cells(tmp_path: Path) -> None:
    data = dataset(6).add_column("mask", [{"bytes": bytes([i] * 9), "path": None} for i in range(6)])
    data = data.cast_column("mask", datasets.Image(decode=False))
    data.save_to_disk(tmp_path / "saved")
    data.to_parquet(tmp_path / "x.parquet", batch_size=2)
    for name in ("saved", "x.parquet"):
        source = open_source(source_spec(hf=str(tmp_path / name), fields={"image": None, "label": None, "mask": None}))
        masks: Any = records_of(source, [4, 0]).columns["mask"]
        assert [mask.data for mask in masks] == [bytes([4] * 9), bytes(9)]


@forms
def test_weights_are_a_column(form: str, root: Path) -> None:
    spec = source_spec(hf=str(root / FORMS[form]), weights={"column": "w"})
    found = weights_of(spec, open_source(spec))
    assert found is not None and found.tolist() == [i % 5 for i in range(COUNT)]


def config(path: Path, source: dict[str, Any], **run: Any) -> Path:
    train = {"stages": list(RAW), "batch": {"size": 4}, "shuffle": True}
    file = path / "x.yaml"
    file.write_text(yaml.safe_dump({"source": source, "pipelines": {"train": train}, "run": {"threads": 2, **run}}))
    return file


@forms
def test_ranks_threads_processes_and_resume_change_nothing(form: str, root: Path, tmp_path: Path) -> None:
    window = {} if form == "saved" else {"window": 10}
    path = config(tmp_path, {"hf": str(root / FORMS[form]), **window})

    def load(*overrides: str, rank: int = 0, world_size: int = 1) -> gpuflow.Loader:
        return gpuflow.load(path, "train", rank=rank, world_size=world_size, overrides=overrides)

    with load("run.threads=1", "run.processes=0") as loader:
        whole: list[list[Row]] = [flat(epoch_rows(loader)) for _ in range(2)]
        assert isinstance(loader._plan.order, ShardedOrder) == (form != "saved")
    assert [sorted(row[0] for row in epoch) for epoch in whole] == [list(range(COUNT))] * 2
    with nothing_left_behind(), load("run.threads=2", "run.processes=2") as loader:
        for epoch in whole:
            assert flat(epoch_rows(loader)) == epoch
    ranks, state = [], dict[str, Any]()
    for rank in range(2):
        with load(rank=rank, world_size=2) as loader:
            ranks.append(epoch_rows(loader))
            loader.set_epoch(1)
            next(iter(loader))
            state = json.loads(json.dumps(loader.state_dict()))
    assert interleave(ranks) == whole[0]
    with load("run.threads=3") as loader:
        loader.load_state_dict(state)
        assert flat(epoch_rows(loader)) == whole[1][8:]


def test_windows_read_each_row_group_few_times(root: Path, tmp_path: Path) -> None:
    """Over an epoch in small batches, each row group once for each window that it is in, at most."""
    source = open_source(source_spec(hf=str(root / "one.parquet"), window=16))
    assert isinstance(source, HfSource) and isinstance(source.files, ParquetCells)
    sizes = source.shard_sizes
    assert sizes is not None and len(sizes) == 8
    order = ShardedOrder(shard_sizes=sizes, seed=0, window=16)
    for start in range(0, COUNT, 4):
        contents(source, order.indices(0, np.arange(start, min(start + 4, COUNT))).tolist())
    assert source.files.cache.loads <= 8 + COUNT // 16 + 1


def test_the_window_of_parquet_files_is_what_fits_into_memory(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = source_spec(hf=str(root / "one.parquet"))
    assert spec.shard_window(open_source(spec)) == 8192, "small images"
    mean = sum(map(len, images())) / COUNT
    monkeypatch.setattr("gpuflow.sources.hf_tables._WINDOW_BYTES", int(mean * 20))
    assert 15 <= spec.shard_window(open_source(spec)) <= 20
    assert source_spec(hf=spec.where, window=7).shard_window(open_source(spec)) == 7


def test_a_fingerprint_knows_files_labels_and_fields(root: Path, tmp_path: Path) -> None:
    specs = [source_spec(hf=str(root / FORMS[form])) for form in FORMS]
    specs.append(source_spec(hf=str(root / "saved"), fields={"image": None, "label": None, "w": {"type": "number"}}))
    specs.append(source_spec(hf=str(root / "parts"), splits=("train", "test")))
    assert len({fingerprint_of(open_source(spec)) for spec in specs}) == len(specs)
    for name in ("saved", "many"):
        shutil.copytree(root / name, tmp_path / name)
    assert fingerprint_of(open_source(source_spec(hf=str(tmp_path / "saved")))) == fingerprint_of(open_source(specs[0]))
    assert fingerprint_of(open_source(source_spec(hf=str(tmp_path / "many/train-*")))) == fingerprint_of(
        open_source(specs[2])
    )


def test_a_mix_with_a_folder(root: Path, tmp_path: Path) -> None:
    for name, data in zip(("cat", "emu"), images(2, 500), strict=True):
        (tmp_path / "photos" / name).mkdir(parents=True)
        (tmp_path / "photos" / name / "0.jpg").write_bytes(data)
    parts: list[dict[str, Any]] = [
        {"source": {"hf": str(root / "one.parquet")}, "weight": 3},
        {"source": {"folder": str(tmp_path / "photos")}},
    ]
    path = config(tmp_path, {"mix": parts, "unite_classes": True, "samples": 20, "by": "batch"})
    with gpuflow.load(path, "train", rank=0, world_size=1) as loader:
        assert loader.classes == ("cat", "dog", "owl", "emu")
        batches = epoch_rows(loader)
        sound = {index: label for batch in batches for index, label, _, _ in batch}
    assert [len(batch) for batch in batches] == [4] * 5
    assert sorted(len({row[0] >= COUNT for row in batch}) for batch in batches) == [1] * 5
    assert {index: sound[index] for index in sound if index >= COUNT} == {COUNT: 0, COUNT + 1: 3}


# --- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", [1, 100, 5000])
@pytest.mark.parametrize("form", ["saved", "one file"])
def test_a_file_that_is_cut_short(form: str, cut: int, root: Path, tmp_path: Path) -> None:
    target = tmp_path / "x"
    shutil.copytree(root / "saved", target) if form == "saved" else shutil.copy(root / "one.parquet", target)
    file = target / "data-00001-of-00002.arrow" if form == "saved" else target
    file.write_bytes(file.read_bytes()[:-cut])
    with pytest.raises(SourceError) as error:
        open_source(source_spec(hf=str(target)))
    kind = "Arrow" if form == "saved" else "Parquet"
    assert str(error.value).startswith(f"{file}: must be a whole {kind} file, got an error: ")
    assert str(error.value).endswith("; copy or write it again")


@pytest.mark.parametrize("form", ["saved", "x.parquet"])
def test_a_null_image_is_a_bad_sample(form: str, tmp_path: Path) -> None:
    held = [{"bytes": data, "path": None} for data in images(9)]
    data = dataset(9, image=[*held[:4], None, *held[5:]])
    data.save_to_disk(tmp_path / "saved")
    data.to_parquet(tmp_path / "x.parquet", batch_size=3)
    source = open_source(source_spec(hf=str(tmp_path / form)))
    expected = [images(9)[3], "has no image: its cell is null, or a path without the image", images(9)[5]]
    assert contents(source, [3, 4, 5]) == expected
    path = config(tmp_path, {"hf": str(tmp_path / form)}, on_error="skip")
    with pytest.warns(UserWarning, match="1 of 9 samples are bad"), gpuflow.load(path, "train") as loader:
        assert sorted(row[0] for row in flat(epoch_rows(loader))) == [0, 1, 2, 3, 5, 6, 7, 8]
    with (
        gpuflow.load(path, "train", overrides=["run.on_error=raise"]) as loader,
        pytest.raises(gpuflow.BadSampleError, match=r"\[4\] \(sample 4\): read: has no image: its cell is null"),
    ):
        list(loader)


def test_a_damaged_row_group_makes_its_samples_bad(tmp_path: Path) -> None:
    pq = pytest.importorskip("pyarrow.parquet")
    table = pa.table({"image": images(9), "label": [0] * 9})
    pq.write_table(table, tmp_path / "x.parquet", row_group_size=3, compression="snappy", use_dictionary=False)
    about = pq.ParquetFile(tmp_path / "x.parquet").metadata.row_group(1).column(0)
    data = bytearray((tmp_path / "x.parquet").read_bytes())
    start = about.data_page_offset
    data[start : start + 200] = b"\xff" * 200
    (tmp_path / "x.parquet").write_bytes(data)
    source = open_source(source_spec(hf=str(tmp_path / "x.parquet")))
    found = contents(source, list(range(9)))
    assert found[:3] + found[6:] == images(9)[:3] + images(9)[6:]
    assert all(isinstance(error, str) and error.startswith("its row group 1 cannot be read: ") for error in found[3:6])


@forms
def test_a_file_that_changes_while_it_is_read(form: str, root: Path, tmp_path: Path) -> None:
    shutil.copytree(root, tmp_path / "copy")
    source = open_source(source_spec(hf=str(tmp_path / "copy" / FORMS[form])))
    first = Path(source.path(0).rpartition("[")[0])
    first.write_bytes(first.read_bytes() + b"more")
    with pytest.raises(SourceError, match="shard must stay as it was indexed, but has changed"):
        source.read([0], allocate)


@pytest.mark.parametrize(
    ("label", "expected"),
    [
        ([0, 1, -1], r"x\.parquet\[2\]: label must be one of the 3 classes, 0\.\.2, got -1; correct it, or declare"),
        ([0, None, 1], r"x\.parquet\[1\]: label must be an integer or a class name, got null; correct it"),
    ],
)
def test_a_label_that_is_none(label: list[int | None], expected: str, tmp_path: Path) -> None:
    dataset(3, label=label).to_parquet(tmp_path / "x.parquet")
    with pytest.raises(SourceError, match=expected):
        open_source(source_spec(hf=str(tmp_path / "x.parquet")))
    source = open_source(source_spec(hf=str(tmp_path / "x.parquet"), fields={"image": None}))
    assert len(source) == 3


def test_paths_and_splits_that_are_wrong(root: Path, tmp_path: Path) -> None:
    cases = [
        (str(root / "parts"), (), "holds the splits train, test; name those to read: splits: [train, test], or give"),
        (str(root / "parts"), ("tran",), "has no split 'tran'; did you mean 'train'?"),
        (str(root / "saved"), ("train",), "is one split without parts of its own; leave out splits, or divide it"),
        (str(root / "many"), ("val",), "no file of the split 'val', such as val-00000-of-00001.parquet, among 4 files"),
        (str(root / "savd"), (), "which does not exist; did you mean"),
        (str(tmp_path), (), "must hold state.json or dataset_dict.json, which save_to_disk writes, or .parquet files"),
        ("s3://bucket/x", (), "source.hf must be a path of this machine, got 's3://bucket/x'; copy the dataset"),
    ]
    for path, splits, expected in cases:
        with pytest.raises(SourceError) as error:
            open_source(source_spec(hf=path, splits=splits))
        assert expected in str(error.value)


def test_a_row_group_that_is_too_large(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpuflow.sources.hf_tables._LARGEST_GROUP", 1000)
    with pytest.raises(SourceError, match=r"row group 0 must have at most 1 GiB, .*write smaller row groups"):
        open_source(source_spec(hf=str(root / "one.parquet")))


def test_datasets_that_a_selection_was_saved_of(tmp_path: Path) -> None:
    dataset(9).select([8, 2, 5]).save_to_disk(tmp_path / "saved")
    source = open_source(source_spec(hf=str(tmp_path / "saved")))
    assert contents(source, [0, 1, 2]) == [images(9)[i] for i in (8, 2, 5)]
    state = json.loads((tmp_path / "saved/state.json").read_text())
    (tmp_path / "saved/state.json").write_text(json.dumps({**state, "_indices_data_files": [{"filename": "i.arrow"}]}))
    with pytest.raises(SourceError, match="holds a selection of rows in a file of its own; load it and save it again"):
        open_source(source_spec(hf=str(tmp_path / "saved")))
