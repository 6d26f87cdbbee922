"""A source of another package: a key of the block `source`, with all that a source of gpuflow's promises."""

from __future__ import annotations

import importlib.metadata
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

import gpuflow
from gpuflow.config import read_config
from gpuflow.errors import ConfigError, GpuflowError, SourceError
from gpuflow.loader.loader import Loader
from gpuflow.sources import all_kinds, open_source
from gpuflow.spec import SourceSpec, source_spec
from gpuflow.stages import STAGES
from tests.commands import command_here
from tests.datasets import jpeg
from tests.texts import outline

PACKAGE = Path(__file__).parent / "toning"
CLASSES = ("red", "green", "blue")
STAGE_LIST = [{"decode": {}}, {"random_crop": {"size": 24}}, {"normalize": {}}]


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package, as pip would have installed it."""
    monkeypatch.syspath_prepend(PACKAGE)
    monkeypatch.delitem(sys.modules, "toning", raising=False)


def write(path: Path, source: dict[str, Any], **run: Any) -> Path:
    pipeline = {"stages": STAGE_LIST, "batch": {"size": 4}, "shuffle": True}
    path.write_text(yaml.safe_dump({"source": source, "pipelines": {"train": pipeline}, "run": {"threads": 2, **run}}))
    return path


def npz(path: Path, count: int = 20, bad: int | None = None) -> dict[str, Any]:
    """A file of photographs, as the block `source` that reads it."""
    images: dict[str, Any] = {
        str(i): np.frombuffer(b"" if i == bad else jpeg(i % 3, i), np.uint8) for i in range(count)
    }
    np.savez(path, labels=np.arange(count) % 3, **images)
    return {"npz_images": str(path), "classes": list(CLASSES)}


def rows(loader: Loader) -> list[tuple[list[int], list[int], torch.Tensor]]:
    return [(batch.indices.tolist(), batch.labels.tolist(), batch.images.clone()) for batch in loader]


def equal(a: Any, b: Any) -> bool:
    return len(a) == len(b) and all(x[:2] == y[:2] and torch.equal(x[2], y[2]) for x, y in zip(a, b, strict=True))


@pytest.mark.usefixtures("package")
def test_it_loads_resumes_and_works_in_processes(tmp_path: Path) -> None:
    source = npz(tmp_path / "a.npz")
    file = write(tmp_path / "x.yaml", source)
    with gpuflow.load(file, "train") as loader:
        whole = rows(loader)
        assert loader.classes == CLASSES
        assert loader.dataset.path(3) == f"{tmp_path}/a.npz/3"
        assert sorted(i for indices, _, _ in whole for i in indices) == list(range(20))
        assert all(label == i % 3 for indices, labels, _ in whole for i, label in zip(indices, labels, strict=True))
        loader.set_epoch(0)
        taken = iter(loader)
        next(taken), next(taken)
        state = json.loads(json.dumps(loader.state_dict()))
    with gpuflow.load(file, "train", overrides=["run.processes=2"]) as loader:
        assert equal(rows(loader), whole)
    with gpuflow.load(file, "train") as loader:
        loader.load_state_dict(state)
        assert equal(rows(loader), whole[2:])
    other = write(tmp_path / "y.yaml", npz(tmp_path / "b.npz", 24))
    with gpuflow.load(other, "train") as loader, pytest.raises(GpuflowError, match="source"):
        loader.load_state_dict(state)


@pytest.mark.usefixtures("package")
def test_its_bad_samples_are_replaced_and_its_parts_are_those_of_split(tmp_path: Path) -> None:
    source = npz(tmp_path / "a.npz", bad=7) | {"split": {"train": 0.5, "val": 0.5}, "seed": 3}
    file = write(tmp_path / "x.yaml", source)
    part = "pipelines.train.split=all"
    with gpuflow.load(file, "train", overrides=[part, "run.on_error=replace"]) as loader:
        found = [index for indices, _, _ in rows(loader) for index in indices]
        assert len(found) == 20 and 7 not in found
    with (
        gpuflow.load(file, "train", overrides=[part, "run.on_error=raise"]) as loader,
        pytest.raises(GpuflowError, match=r"a.npz/7.*has no bytes"),
    ):
        rows(loader)
    with gpuflow.load(file, "train", overrides=["run.on_error=replace"]) as loader:
        assert 8 <= len(loader.dataset) <= 12


@pytest.mark.usefixtures("package")
def test_the_commands_know_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gpuflow_command = command_here(monkeypatch, capsys)
    file = write(tmp_path / "x.yaml", npz(tmp_path / "a.npz", bad=5))
    assert gpuflow_command("check", file).code == 0
    explained = gpuflow_command("explain", file)
    assert explained.code == 0
    text = " ".join(explained.out.split())
    assert f"npz_images: {tmp_path}/a.npz: 20 samples, 3 classes" in text
    assert "in Python source.npz_images: for each image, " in text, "which processes may do at once"
    scanned = gpuflow_command("scan", file)
    assert scanned.code == 1 and "20 samples, 1 bad" in scanned.err
    assert gpuflow_command("show", file, "run.on_error=replace", "--out", tmp_path / "x.html").code == 0
    schema = json.loads(gpuflow_command("schema").out)
    described = schema["$defs"]["source.npz_images"]["properties"]["npz_images"]
    assert described == {"description": "A source of another package: toning:open_npz."}
    assert {"$ref": "#/$defs/source.npz_images"} in schema["$defs"]["source"]["oneOf"]


@pytest.mark.usefixtures("package")
def test_mistakes_are_located(tmp_path: Path) -> None:
    def problem(source: dict[str, Any]) -> str:
        with pytest.raises(ConfigError) as caught:
            read_config(write(tmp_path / "x.yaml", source), STAGES)
        return outline(caught.value)

    assert "x.yaml:" in problem({"npz_image": "x"})
    assert "source.npz_image config.unknown_key" in problem({"npz_image": "x"})
    assert "source config.conflict" in problem({"npz_images": "x", "folder": "y"})
    assert "source.root config.conflict" in problem({"npz_images": "x", "root": "y"})
    assert "source.other config.unknown_key" in problem({"other": {"npz_images": "x"}})

    def fault(spec: SourceSpec) -> str:
        with pytest.raises(SourceError) as caught:
            open_source(spec)
        return str(caught.value)

    npz(tmp_path / "a.npz")
    windowed = source_spec(npz_images=str(tmp_path / "a.npz"), classes=CLASSES, window=9)
    assert fault(windowed).startswith("source.window must go with shards or Parquet files, got 'npz_images: ")
    block = {"npz_images": [1, {"a": [2]}], "classes": ["x"]}
    assert fault(read_config(write(tmp_path / "x.yaml", block), STAGES).source).endswith("got [1, {'a': [2]}]")
    assert "No such file" in fault(source_spec(npz_images=str(tmp_path / "gone.npz")))
    assert fault(source_spec(npz_images=[1, 2])) == "npz_images must be the path of an .npz file, got [1, 2]"


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize(
    ("labels", "fault"),
    [
        (np.arange(19) % 3, "as many as the samples, 20, got 19"),
        (np.arange(20) % 4, "in 0..2, got 3 for "),
        (np.arange(20) - 1, "in 0..2, got -1 for "),
        (np.zeros(20), "int64 for classes, got float64"),
    ],
)
def test_wrong_labels_are_found_where_it_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, labels: Any, fault: str
) -> None:
    source = source_spec(**npz(tmp_path / "a.npz"))
    made = type(source).entry.load()(str(tmp_path / "a.npz"), source)  # type: ignore[attr-defined]
    made.labels = labels
    monkeypatch.setattr(importlib.metadata.EntryPoint, "load", lambda entry: lambda value, spec: made)
    with pytest.raises(SourceError, match=rf"^source\.npz_images: labels must be {fault}.*; repair toning:open_npz"):
        source.open()


def no_source(value: Any, spec: SourceSpec) -> object:
    return [value, spec]


def test_packages_at_fault_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def entry(name: str, value: str) -> importlib.metadata.EntryPoint:
        return importlib.metadata.EntryPoint(name, value, "gpuflow.sources")

    def fault(entry: importlib.metadata.EntryPoint) -> str:
        monkeypatch.setattr("gpuflow.sources.spec.entry_points", lambda group: [entry])
        with pytest.raises(SourceError) as caught:
            source_spec(x=1).open()
        return str(caught.value)

    assert fault(entry("x", "absent_module:f")).startswith(
        "source.x: absent_module:f cannot be used: No module named 'absent_module'"
    )
    assert "must return a source, and its result has no classes, labels" in fault(
        Made("x", "package:f", "gpuflow.sources")
    )
    for names in (["x", "x"], ["folder"]):
        entries = [entry(name, f"p{i}:f") for i, name in enumerate(names)]
        monkeypatch.setattr("gpuflow.sources.spec.entry_points", lambda group, entries=entries: entries)
        with pytest.raises(
            GpuflowError, match=rf"source '{names[-1]}' of p{len(names) - 1}:f is already known; rename"
        ):
            all_kinds()


class Made(importlib.metadata.EntryPoint):
    """An entry point that is imported already."""

    def load(self) -> Any:
        return no_source
