"""Laws of all kinds of sources: which keys they have, and what one line in `KINDS` gives a new one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, final

import numpy as np
import pytest

import gpuflow
from gpuflow.config import read_config
from gpuflow.errors import ConfigError
from gpuflow.sources import KINDS, Allocate, NotMeasuredError, Payload, Source, all_kinds, source_spec
from gpuflow.sources.spec import Listed, Named
from gpuflow.stages import STAGES
from gpuflow.tools.rates import find_images
from tests.commands import command_here
from tests.datasets import jpeg

BASE: dict[str, dict[str, Any]] = {
    "coco": {"coco": "s3://a.json", "images": "s3://images"},
    "mix": {"mix": [{"source": {"folder": "a", "splits": ["x"]}}]},
}
VALUES: dict[str, Any] = {
    "seed": 3,
    "split": {"train": 0.5},
    "weights": {"file": "weights.txt"},
    "fields": {"image": None},
    "cache": {"dir": "cache", "size": 1 << 30},
    "splits": ["train", "val"],
    "extensions": ["heic"],
    "classes": ["a", "b"],
    "root": "folder",
    "window": 9,
    "images": "images",
    "image": "photo",
    "label": "kind",
    "by": "batch",
    "samples": 5,
    "unite_classes": True,
}
KEYS = {key for kind in KINDS.values() for key in kind.key_fields()} - set(KINDS)


def test_each_key_has_a_value_here() -> None:
    assert set(VALUES) == KEYS


@pytest.mark.parametrize("key", sorted(KEYS))
@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_has_a_key_or_refuses_it_and_names_the_kinds_that_have_it(
    kind: str, key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    block = BASE.get(kind, {kind: "s3://photos"}) | {key: VALUES[key]}
    document = {"source": block, "pipelines": {"train": {"stages": ["decode", {"center_crop": {"size": 8}}]}}}
    Path("x.yaml").write_text(json.dumps(document))
    if key in KINDS[kind].key_fields():
        spec = read_config("x.yaml", STAGES).source
        assert type(spec) is KINDS[kind] and spec == source_spec(**block)
        return
    with pytest.raises(ConfigError) as caught:
        read_config("x.yaml", STAGES)
    [problem] = caught.value.problems
    assert (problem.path, problem.code) == (("source", key), "config.conflict")
    owners = [name for name, spec in KINDS.items() if key in spec.key_fields()]
    text = str(problem)
    assert all(f"source.{name}" in text.partition(", got")[0] for name in owners)
    assert f"got source.{kind}; " in text
    with pytest.raises(ConfigError) as again:
        source_spec(**block)
    assert again.value.problems[0].path == problem.path


@pytest.mark.parametrize("key", ["photos", "window"])
def test_a_key_of_no_kind_is_unknown(key: str) -> None:
    for kind in KINDS:
        with pytest.raises(ConfigError, match=rf"^source.{key}z is not a key here"):
            source_spec(**BASE.get(kind, {kind: "x"}), **{f"{key}z": 1})


@pytest.mark.parametrize("place", ["photos", "/data/photos"])
@pytest.mark.parametrize("kind", [kind for kind, spec in KINDS.items() if "cache" in spec.key_fields()])
def test_local_files_take_no_cache(kind: str, place: str) -> None:
    """A file that lists images may list URLs; what it lists shows when it is opened."""
    block = {**BASE.get(kind, {}), kind: place, "cache": VALUES["cache"]}
    if issubclass(KINDS[kind], Listed):
        source_spec(**block)
        return
    with pytest.raises(ConfigError, match=r"^source.cache must go with URLs, got '.*'.*; remove cache$"):
        source_spec(**block)


# --- a new kind -------------------------------------------------------------------------------------------------------


class StoredImages:
    """Encoded images in memory."""

    shard_sizes = None
    storage = None

    def __init__(self, count: int, classes: tuple[str, ...]) -> None:
        self.classes, self.labels = classes, np.arange(count) % len(classes)

    def __len__(self) -> int:
        return len(self.labels)

    def path(self, index: int) -> str:
        return f"store/{index}"

    def read(self, indices: Sequence[int], allocate: Allocate) -> Payload:
        return Payload.of([jpeg(i % 3, i) for i in indices], allocate)

    def close(self) -> None:
        pass


@final
@dataclass(frozen=True, kw_only=True)
class Store(Named):
    """Images in a store.

    Args:
        store: where the store is.
        table: the table of the images.
    """

    kind: ClassVar[str] = "store"

    store: str
    table: str = "photos"

    def open(self) -> Source:
        assert isinstance(self.classes, tuple)
        return StoredImages(12, self.classes)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A file that reads a kind of source that is entered by one line."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(KINDS, "store", Store)
    return write({"store": "a.db", "classes": ["x", "y", "z"], "split": {"train": 0.75, "val": 0.25}, "table": "t"})


def write(source: dict[str, Any]) -> Path:
    stages = ["decode", {"center_crop": {"size": 8}}, "normalize"]
    pipelines = {"train": {"stages": stages, "batch": {"size": 4}, "shuffle": True}}
    path = Path("store.yaml")
    path.write_text(json.dumps({"source": source, "pipelines": pipelines, "run": {"threads": 1}}))
    return path


def test_a_new_kind_is_checked_loaded_and_described(
    store: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = command_here(monkeypatch, capsys)
    assert command("check", store).code == 0
    assert "a.db: 9 samples, 3 classes, split train" in " ".join(command("explain", store).out.split())
    with gpuflow.load(store, "train") as loader:
        assert sorted(label for batch in loader for label in batch.labels.tolist()) == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    schema = json.loads(command("schema").out)
    assert schema["$defs"]["source.store"]["required"] == ["store"]
    assert schema["$defs"]["source.store"]["properties"]["table"] == {
        "description": "The table of the images.",
        "type": "string",
        "default": "photos",
    }


def test_a_new_kind_is_not_measured_unless_it_says_where_its_files_are(store: Path) -> None:
    with pytest.raises(NotMeasuredError, match=r"^a.db is no folder of images$"):
        find_images(read_config(store, STAGES).source, limit=9)


@pytest.mark.usefixtures("store")
@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            {"store": "a", "folder": "b"},
            f"needs exactly one of {', '.join(KINDS)} and store, got folder and store",
        ),
        ({"stor": "a"}, ".stor is not a key here; did you mean 'store'?"),
        ({"store": "a", "tabel": "b"}, ".tabel is not a key here; did you mean 'table'?"),
        ({"store": 3}, ".store must be text, got 3"),
        ({"store": "a", "window": 3}, ".window must go with source.tar or source.hf, got source.store; remove window"),
        ({"folder": "a", "table": "b"}, ".table must go with source.store, got source.folder; remove table"),
        ({"mix": [{"source": {"store": 3}}]}, ".mix[0].source.store must be text, got 3"),
    ],
)
def test_mistakes_in_a_new_kind_are_located(source: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_config(write(source), STAGES)
    [problem] = caught.value.problems
    assert f": source{'' if message[0] == '.' else ' '}{message}" in str(problem)


def test_all_kinds_are_those_of_gpuflow_without_other_packages() -> None:
    assert all_kinds() == KINDS
