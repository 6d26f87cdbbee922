"""What every source passes on to its storage."""

from __future__ import annotations

import io
import pickle
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpuflow.errors import SourceError
from gpuflow.sources import SourceSpec, open_source, source_spec, subset
from gpuflow.sources.storage.local import LocalStorage
from tests.sources.conftest import ReadAll, tar_bytes
from tests.texts import outline


def folder(root: Path) -> SourceSpec:
    for name in ("a", "b"):
        (root / name).mkdir()
        for number in range(4):
            (root / name / f"{number}.jpg").write_bytes(b"x")
    return source_spec(folder=str(root), split={"train": 0.5})


def listing(root: Path) -> SourceSpec:
    (root / "list.csv").write_text("".join(f"{number}.jpg,0\n" for number in range(4)))
    return source_spec(listing=str(root / "list.csv"), split={"train": 0.5})


def tar(root: Path) -> SourceSpec:
    with tarfile.open(root / "s.tar", "w") as archive:
        for number in range(4):
            for name in (f"{number}.jpg", f"{number}.cls"):
                header = tarfile.TarInfo(name)
                header.size = 1
                archive.addfile(header, io.BytesIO(b"0"))
    return source_spec(tar=str(root / "s.tar"), split={"train": 0.5})


@pytest.mark.parametrize("make", [folder, listing, tar])
def test_closing_a_source_or_a_part_of_it_closes_its_storage(
    make: Callable[[Path], SourceSpec], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[LocalStorage] = []
    monkeypatch.setattr(LocalStorage, "close", lambda self: closed.append(self))
    spec = make(tmp_path)
    whole = open_source(spec)
    for number, source in enumerate((whole, subset(whole, spec, "train"))):
        source.close()
        assert closed == [source.storage] * (number + 1)


def test_a_listing_of_two_remote_file_systems(tmp_path: Path) -> None:
    (tmp_path / "list.csv").write_text("memory://a.jpg,0\nhttp://b.jpg,0\n")
    with pytest.raises(SourceError) as caught:
        open_source(source_spec(listing=str(tmp_path / "list.csv")))
    assert outline(caught.value) == f"{tmp_path}/list.csv:2, got 'http://b.jpg'"


def test_a_member_of_an_unknown_type_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """POSIX: an archive may hold members of types that a reader does not know, and their data is there all the same."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with tarfile.open(tmp_path / "s.tar", "w") as archive:
        for name, kind, data in (
            ("1.jpg", tarfile.REGTYPE, b"one"),
            ("1.cls", tarfile.REGTYPE, b"0"),
            ("other", b"Z", b"no header" * 100),
            ("2.jpg", tarfile.REGTYPE, b"two"),
            ("2.cls", tarfile.REGTYPE, b"0"),
        ):
            header = tarfile.TarInfo(name)
            header.size, header.type = len(data), kind
            archive.addfile(header, io.BytesIO(data))
    source = open_source(source_spec(tar=str(tmp_path / "s.tar")))
    payload = source.read([0, 1], lambda size: np.zeros(size, np.uint8))
    assert [payload.sample(i).tobytes() for i in range(2)] == [b"one", b"two"]


@pytest.mark.parametrize(
    "keys", [{"folder": "a"}, {"listing": "a/list.csv"}, {"tar": "a/s.tar"}], ids=lambda keys: next(iter(keys))
)
def test_relative_paths_start_from_the_directory_in_which_a_source_was_opened(
    keys: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read_all: ReadAll
) -> None:
    """Also in a worker process that starts later, and where files of the same names are in the other directory."""
    for place in ("here", "there"):
        photos = tmp_path / place / "a" / "dog"
        photos.mkdir(parents=True)
        (photos / "1.jpg").write_bytes(place.encode())
        (photos.parent / "list.csv").write_text("dog/1.jpg,dog\n")
        (photos.parent / "s.tar").write_bytes(tar_bytes([("1.jpg", place.encode()), ("1.cls", b"dog")]))
    monkeypatch.chdir(tmp_path / "here")
    source = open_source(source_spec(**keys))
    monkeypatch.chdir(tmp_path / "there")
    assert read_all(source) == read_all(pickle.loads(pickle.dumps(source))) == [b"here"]
    assert source.path(0).startswith("a/")
