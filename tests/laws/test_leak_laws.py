"""Laws of leaks: reading sizes, ends and few files finds the equal bytes of two parts that reading everything finds."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest

from gpuflow.sources import Division, Source, SourceSpec, Subset, divide, open_source, source_spec, subset
from gpuflow.tools.duplicates import find_leaks
from tests.datasets import MemorySource
from tests.laws import test_container_laws as containers
from tests.laws.test_container_laws import CONTAINERS, COUNT
from tests.sources.conftest import tar_bytes

SEEDS = range(6)
SPLITS = ({"train": 0.5, "val": 0.5}, {"train": 0.4, "val": 0.3, "test": 0.2})


def encoded(i: int) -> bytes:
    """Bytes of 6,000 or a few bytes, some of them equal, others equal in their size or their end alone."""
    rng = np.random.default_rng(i % 5 if i % 4 else 0)
    head = rng.integers(0, 256, 1500 if i % 3 else 0, np.uint8).tobytes()
    return head + (b"the same end of many bytes" * 200)[: 4500 if i % 2 else 40 + i % 3]


@pytest.fixture(autouse=True)
def _equal_bytes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(containers, "encoded", encoded)


def parts_of(source: Source, spec: SourceSpec) -> dict[str, Source]:
    return {name: subset(source, spec, name) for name in spec.part_names}


def contents_of(source: Source) -> list[tuple[str, bytes]]:
    payload = source.read(range(len(source)), lambda size: np.empty(size, np.uint8))
    return [(source.path(i), payload.sample(i).tobytes()) for i in range(len(source))]


def leaks_of(source: Source, parts: Mapping[str, Source]) -> list[tuple[int, int]]:
    """Each sample whose bytes an earlier part has, and the first sample there: by reading everything."""
    indices = {path: i for i, (path, _) in enumerate(contents_of(source))}
    first, found = dict[bytes, tuple[str, int]](), []
    for name, part in parts.items():
        own = sorted((indices[path], data) for path, data in contents_of(part) if data)
        for i, data in own:
            owner, other = first.setdefault(data, (name, i))
            if owner != name:
                found.append((i, other))
    return sorted(found)


def check(spec: SourceSpec) -> int:
    """Returns how many samples leak."""
    source = open_source(spec)
    parts = parts_of(source, spec)
    division = divide(source, spec)
    for number, part in enumerate(parts.values()):
        own = np.flatnonzero(division.parts == number)
        assert [source.path(i) for i in own] == [part.path(i) for i in range(len(part))]
    seen: list[tuple[int, ...]] = []
    found = find_leaks(source, division, max_requests=1000, progress=lambda **step: seen.append(tuple(step.values())))
    assert [(pair.index, pair.other) for pair in found.pairs] == leaks_of(source, parts)
    assert all(done <= count for done, count in seen) and seen[0][1] <= len(source)
    in_parts = np.flatnonzero(division.parts >= 0)
    empty = [i for i, (_, data) in enumerate(contents_of(source)) if not data and i in in_parts]
    assert (found.unread, found.skipped) == (len(empty), 0)
    source.close()
    return len(found.pairs)


@pytest.mark.parametrize("split", SPLITS, ids=["all", "some"])
@pytest.mark.parametrize("container", CONTAINERS)
def test_all_leaks_are_found(container: str, split: dict[str, float], tmp_path: Path) -> None:
    _, spec = CONTAINERS[container](tmp_path)
    assert sum(check(dataclasses.replace(spec, split=split, seed=seed)) for seed in SEEDS) > 0


def plain(kind: str, folder: Path) -> SourceSpec:
    """A source without fields."""
    folder.mkdir()
    _, spec = CONTAINERS[kind](folder)
    changes: dict[str, Any] = (
        {} if kind == "folder" else {"fields": (), "classes": tuple(f"class {i}" for i in range(4))}
    )
    if kind == "CSV":
        lines = (folder / "list.csv").read_text().splitlines()
        (folder / "list.csv").write_text("\n".join(",".join(line.split(",")[:2]) for line in lines[1:]) + "\n")
    return dataclasses.replace(spec, **changes)


@pytest.mark.parametrize(
    "kinds", [("folder", "CSV"), ("tar", "folder"), ("folder", "Parquet"), ("CSV", "Arrow", "tar")]
)
def test_all_leaks_between_the_sources_of_a_mix_are_found(kinds: tuple[str, ...], tmp_path: Path) -> None:
    names = [next(name for name in CONTAINERS if name.startswith(kind)) for kind in kinds]
    parts = [plain(name, tmp_path / str(i)) for i, name in enumerate(names)]
    mix = [{"source": part} for part in parts]
    for seed in SEEDS:
        assert check(source_spec(mix=mix, split={"train": 0.5, "val": 0.5}, seed=seed)) > 0


def test_all_leaks_are_found_in_a_source_that_reads_whole_samples_only() -> None:
    source = MemorySource([None if i == 4 else encoded(i) for i in range(COUNT)])
    halves = np.split(np.arange(COUNT), 2)
    parts: dict[str, Source] = {name: Subset(source, half) for name, half in zip(("train", "val"), halves, strict=True)}
    found = find_leaks(source, Division(("train", "val"), np.repeat([0, 1], list(map(len, halves)))), max_requests=1)
    assert [(pair.index, pair.other) for pair in found.pairs] == leaks_of(source, parts) != []
    assert (found.unread, found.skipped) == (1, 0)


@pytest.fixture
def remote() -> Iterator[Any]:
    fs = fsspec.filesystem("memory")
    for i in range(COUNT):
        fs.pipe(f"/photos/class {i % 4}/{i:02d}.jpg", encoded(i))
    members = [(f"{i:02d}.{name}", data) for i in range(COUNT) for name, data in (("cls", b"1"), ("jpg", encoded(i)))]
    fs.pipe("/0.tar", tar_bytes(sorted(members)))
    yield fs
    fs.store.clear()


@pytest.mark.usefixtures("remote")
@pytest.mark.parametrize("source", [{"folder": "memory://photos"}, {"tar": "memory://0.tar"}])
def test_behind_urls_all_leaks_are_found_unless_there_is_a_limit(source: dict[str, str]) -> None:
    spec = source_spec(**source, split={"train": 0.5, "val": 0.5})
    assert check(spec) > 0
    opened = open_source(spec)
    found = find_leaks(opened, divide(opened, spec), max_requests=3)
    assert found.skipped >= COUNT - 3 if "folder" in source else found.skipped > 0
    assert {(pair.index, pair.other) for pair in found.pairs} <= set(leaks_of(opened, parts_of(opened, spec)))
