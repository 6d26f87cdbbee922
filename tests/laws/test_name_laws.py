"""Laws of the names of a batch's samples, and of sources without labels: over all kinds of sources."""

from __future__ import annotations

import io
import json
import pickle
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

import gpuflow
from gpuflow.config import read_config
from gpuflow.sources import KINDS, fields_of, has_labels
from gpuflow.stages import STAGES
from gpuflow.tools.show import samples_of
from tests.commands import command_here
from tests.datasets import RAW, jpeg, truncate, write_config

pytestmark = pytest.mark.filterwarnings("ignore:.* samples are bad so far:UserWarning")

COUNT = 7
BAD = 2
"""The index of the sample whose file is damaged."""


def images(folder: Path) -> list[Path]:
    files = [folder / f"{i % 2}" / f"{i}.jpg" for i in range(COUNT)]
    for i, file in enumerate(files):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(jpeg(i % 2, i))
    truncate(sorted(files)[BAD])
    return sorted(files)


def folder(root: Path) -> dict[str, Any]:
    return {"folder": str(root / "photos")}


def listing(root: Path) -> dict[str, Any]:
    (root / "list.csv").write_text("".join(f"{file},{file.parent.name}\n" for file in images(root / "photos")))
    return {"listing": str(root / "list.csv")}


def tar(root: Path) -> dict[str, Any]:
    with tarfile.open(root / "s.tar", "w") as archive:
        for i, file in enumerate(images(root / "photos")):
            for suffix, data in (("jpg", file.read_bytes()), ("cls", file.parent.name.encode())):
                member = tarfile.TarInfo(f"{i}.{suffix}")
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))
    return {"tar": str(root / "s.tar")}


def coco(root: Path) -> dict[str, Any]:
    names = [str(file.relative_to(root / "photos")) for file in images(root / "photos")]
    content = {
        "images": [{"id": i, "file_name": name} for i, name in enumerate(names)],
        "annotations": [],
        "categories": [{"id": 1, "name": "a"}],
    }
    (root / "coco.json").write_text(json.dumps(content))
    return {"coco": str(root / "coco.json"), "images": str(root / "photos")}


def hf(root: Path) -> dict[str, Any]:
    pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    import pyarrow.parquet as pq

    files = images(root / "photos")
    cells = [{"bytes": file.read_bytes(), "path": file.name} for file in files]
    pq.write_table(pa.table({"image": cells, "label": [int(file.parent.name) for file in files]}), root / "t.parquet")
    return {"hf": str(root / "t.parquet")}


def mix(root: Path) -> dict[str, Any]:
    return {"mix": [{"source": folder(root)}, {"source": folder(root)}]}


MAKE: dict[str, Callable[[Path], dict[str, Any]]] = {
    "folder": folder,
    "listing": listing,
    "tar": tar,
    "coco": coco,
    "hf": hf,
    "mix": mix,
}


def config_of(root: Path, source: dict[str, Any]) -> Path:
    return write_config(root / "x.yaml", "", source=source, batch={"size": 4}, train=list(RAW))


@pytest.fixture(params=KINDS)
def config(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    images(tmp_path / "photos")
    return config_of(tmp_path, MAKE[request.param](tmp_path))


@pytest.mark.parametrize("policy", ["replace", "skip"])
def test_names_are_the_paths_of_the_samples_that_came(policy: str, config: Path) -> None:
    overrides = [f"run.on_error={policy}", "pipelines.train.shuffle=true"]
    with gpuflow.load(config, "train", overrides=overrides) as loader:
        source, batches = loader.dataset, list(loader)
        bad = source.path(BAD)
    for batch in batches:
        names: Any = batch.names
        assert type(names) is list and {type(name) for name in names} == {str}
        assert names == [source.path(i) for i in batch.indices.tolist()] and bad not in names
        assert pickle.loads(pickle.dumps(batch)).names == names
        names.clear()
        assert batch.names, "each call makes a new list"
    counts = [len(batch.names) for batch in batches]
    copies = max(1, config.read_text().count("source:") - 1)
    assert sum(counts) == copies * (COUNT - (policy == "skip")), "those that were replaced have names"


def test_names_are_looked_up_only_where_they_are_asked_for(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with gpuflow.load(config, "train", overrides=["run.on_error=skip"]) as loader:
        asked = list[int]()
        kind = type(loader.dataset)
        path = kind.path

        def counted(self: Any, index: int) -> str:
            asked.append(index)
            return str(path(self, index))

        monkeypatch.setattr(kind, "path", counted)
        batches = list(loader)
        before = len(asked)
        assert before < COUNT, "those of damaged files, for their errors"
        assert len(batches[0].names) == len(asked) - before


def test_without_a_label_only_images_are_read(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same key for all kinds: fields of an image alone."""
    document = yaml.safe_load(config.read_text())
    for block in [entry["source"] for entry in document["source"].get("mix", ())] or [document["source"]]:
        block["fields"] = {"image": {}}
    if "listing" in document["source"]:
        listing = Path(document["source"]["listing"])
        listing.write_text("".join(row.rpartition(",")[0] + "\n" for row in listing.read_text().splitlines()))
    config.write_text(yaml.safe_dump(document))
    with gpuflow.load(config, "train", overrides=["run.on_error=skip"]) as loader:
        source = loader.dataset
        assert not has_labels(source) and not fields_of(source)
        names = [name for batch in loader for name in batch.names]
        assert sorted(names) == sorted(source.path(i) for i in range(len(source)) if i % COUNT != BAD)
    command = command_here(monkeypatch, capsys)
    assert command("check", config).code == 0
    assert "no label" in command("explain", config).out
    shown = samples_of(read_config(config, STAGES), "train", COUNT)
    assert len(shown) == COUNT and {one.label for one in shown} == {""} and {one.path for one in shown} <= {*names}
