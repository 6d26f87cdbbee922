"""A source's fingerprint: equal wherever the same files lie, different if a file, a label or its part differs."""

from __future__ import annotations

import io
import pickle
import tarfile
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest

from gpuflow.arrays import Array
from gpuflow.sources import Source, Subset, fingerprint_of, open_source, source_spec, subset
from gpuflow.sources.base import fingerprint
from tests.datasets import MemorySource, TappedSource

Labels = Mapping[str, int]
Open = Callable[[Path, Labels], Source]

LABELS = {"a/1.jpg": 0, "a/2.jpg": 0, "a/3.jpg": 0, "b/1.jpg": 1, "b/2.jpg": 1}
CHANGES: dict[str, Labels] = {
    "renamed": {**{name: label for name, label in LABELS.items() if name != "a/2.jpg"}, "a/2a.jpg": 0},
    "removed": {name: label for name, label in LABELS.items() if name != "a/2.jpg"},
    "added": {**LABELS, "b/3.jpg": 1},
}


def write_files(root: Path, labels: Labels) -> None:
    for name in labels:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"image")


def open_folder(root: Path, labels: Labels) -> Source:
    write_files(root, labels)
    return open_source(source_spec(folder=str(root)))


def open_listing(root: Path, labels: Labels, prefix: str = "") -> Source:
    write_files(root, labels)
    (root / "all.csv").write_text("".join(f"{prefix}{name},{label}\n" for name, label in labels.items()))
    return open_source(source_spec(listing=str(root / "all.csv")))


def open_listing_of_whole_paths(root: Path, labels: Labels) -> Source:
    return open_listing(root, labels, f"{root}/")


def open_shards(root: Path, labels: Labels) -> Source:
    root.mkdir(parents=True, exist_ok=True)
    for shard in "ab":
        with tarfile.open(root / f"{shard}.tar", "w") as tar:
            for name, label in labels.items():
                if name.startswith(shard):
                    for member, data in ((name, b"image"), (name.replace(".jpg", ".cls"), str(label).encode())):
                        header = tarfile.TarInfo(member)
                        header.size = len(data)
                        tar.addfile(header, io.BytesIO(data))
    return open_source(source_spec(tar=f"{root}/{{a,b}}.tar"))


def open_half(root: Path, labels: Labels) -> Source:
    return subset(open_folder(root, labels), source_spec(folder="x", split={"train": 0.5}), "train")


class _Plain:
    """A source that knows no fingerprint."""

    def __init__(self, root: Path, labels: Labels) -> None:
        self._paths = [f"{root}/{name}" for name in labels]
        self.labels, self.classes = np.array(list(labels.values()), np.int64), ("a", "b")

    def __len__(self) -> int:
        return len(self.labels)

    def path(self, index: int) -> str:
        return self._paths[index]


OPEN: list[Open] = [
    open_folder,
    open_listing,
    open_listing_of_whole_paths,
    open_shards,
    open_half,
    _Plain,  # type: ignore[list-item]
]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


@pytest.mark.parametrize("opened", OPEN)
def test_the_same_files_elsewhere_have_the_same(opened: Open, tmp_path: Path) -> None:
    here = fingerprint_of(opened(tmp_path / "here", LABELS))
    assert len(here) == 16
    assert fingerprint_of(opened(tmp_path / "there" / "deeper", LABELS)) == here


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("opened", OPEN)
def test_other_files_have_another(opened: Open, change: str, tmp_path: Path) -> None:
    here = fingerprint_of(opened(tmp_path / "here", LABELS))
    assert fingerprint_of(opened(tmp_path / "there", CHANGES[change])) != here


@pytest.mark.parametrize("opened", [open_listing, open_shards, _Plain])
def test_other_labels_have_another(opened: Open, tmp_path: Path) -> None:
    here = fingerprint_of(opened(tmp_path / "here", LABELS))
    assert fingerprint_of(opened(tmp_path / "there", {**LABELS, "a/1.jpg": 1})) != here


def test_labels_of_the_same_bytes_and_another_form_have_another_and_classes_of_any_type_the_same() -> None:
    def of(labels: Array) -> str:
        return fingerprint(b"a\0b\0", labels, ("x", "y"))

    wide, narrow = np.zeros((2, 4), np.float32), np.zeros((2, 2), np.float64)
    assert wide.tobytes() == narrow.tobytes() and of(wide) != of(narrow)
    assert of(np.zeros((2, 4), np.int32)) != of(np.zeros((2, 2), np.int64))
    assert len({of(np.array([0, 1], kind)) for kind in (np.uint8, np.int32, np.int64)}) == 1


def test_the_order_counts(tmp_path: Path) -> None:
    here = fingerprint_of(open_listing(tmp_path / "here", LABELS))
    assert fingerprint_of(open_listing(tmp_path / "there", dict(reversed(LABELS.items())))) != here


def test_names_do_not_run_into_each_other(tmp_path: Path) -> None:
    """Neither paths into paths, nor paths into class names."""
    sources = [MemorySource([b""], [0]) for _ in range(2)]
    sources[0].classes, sources[1].classes = ("ab", "c"), ("a", "bc")
    assert len({fingerprint_of(source) for source in sources}) == 2
    listed = [open_listing(tmp_path / str(i), labels) for i, labels in enumerate([{"ab.jpg": 0}, {"b.jpg": 0}])]
    assert len({fingerprint_of(source) for source in listed}) == 2


def test_members_of_another_size_have_another(tmp_path: Path) -> None:
    here = open_shards(tmp_path / "here", LABELS)
    data = (tmp_path / "here" / "a.tar").read_bytes()
    there = tmp_path / "there"
    open_shards(there, LABELS)
    with tarfile.open(there / "a.tar", "w") as tar, tarfile.open(fileobj=io.BytesIO(data)) as original:
        for member in original:
            content = original.extractfile(member)
            assert content is not None
            longer = content.read() + (b"s" if member.name == "a/2.jpg" else b"")
            member.size = len(longer)
            tar.addfile(member, io.BytesIO(longer))
    changed = open_source(source_spec(tar=f"{there}/{{a,b}}.tar"))
    assert [changed.path(i)[len(str(there)) :] for i in range(5)] == [
        here.path(i)[len(str(tmp_path / "here")) :] for i in range(5)
    ]
    assert fingerprint_of(changed) != fingerprint_of(here)


def test_parts_of_one_source_differ(tmp_path: Path) -> None:
    whole = open_folder(tmp_path, LABELS)
    parts = [Subset(whole, np.array(indices)) for indices in ([0, 3], [1, 3], [0, 3, 4])]
    assert len({fingerprint_of(source) for source in (whole, *parts)}) == 4


@pytest.mark.parametrize("opened", OPEN[:-1])
def test_it_is_the_same_in_another_process(opened: Open, tmp_path: Path) -> None:
    source = opened(tmp_path, LABELS)
    assert fingerprint_of(pickle.loads(pickle.dumps(source))) == fingerprint_of(source)


def test_a_source_around_another_one_is_known_by_its_paths(tmp_path: Path) -> None:
    def tapped(root: Path, labels: Labels) -> Source:
        return TappedSource(open_folder(root, labels), lambda index: None)

    here = fingerprint_of(tapped(tmp_path / "here", LABELS))
    assert fingerprint_of(tapped(tmp_path / "there", LABELS)) == here
    assert fingerprint_of(tapped(tmp_path / "other", CHANGES["renamed"])) != here
