"""Laws of the cache of remote files: it changes no batch, on any number of ranks and after a resume."""

from __future__ import annotations

import io
import tarfile
import warnings
from pathlib import Path
from typing import Any

import fsspec
import pytest

import gpuflow
from gpuflow.errors import SourceError
from gpuflow.sources import KINDS
from gpuflow.sources.storage import cached, disk_cache
from tests.datasets import epoch_rows, flat, interleave, jpeg, nothing_left_behind, write_config

SAMPLES = 22
CACHED = [kind for kind, spec in KINDS.items() if "cache" in spec.key_fields() and kind != "coco"]
"""An image of coco has no label to compare; it is read as one of a listing is."""


def shard(numbers: range) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        for i in numbers:
            for name, data in ((f"{i}.jpg", jpeg(i % 3, i)), (f"{i}.cls", str(i % 3).encode())):
                header = tarfile.TarInfo(name)
                header.size = len(data)
                archive.addfile(header, io.BytesIO(data))
    return stream.getvalue()


@pytest.mark.parametrize("kind", CACHED)
def test_a_cache_changes_no_batch(
    memory: fsspec.AbstractFileSystem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(cached, "BLOCK_BYTES", 2048)
    photos = [f"photos/{'abc'[i % 3]}/{i:02}.jpg" for i in range(SAMPLES)]
    memory.pipe({f"/{path}": jpeg(i % 3, i) for i, path in enumerate(photos)})
    memory.pipe({f"/{i}.tar": shard(range(SAMPLES)[10 * i : 10 * i + 10]) for i in range(3)})
    memory.pipe("/list.csv", "".join(f"{path},{i % 3}\n" for i, path in enumerate(photos)).encode())
    blocks: dict[str, dict[str, Any]] = {
        "folder": {"folder": "memory://photos"},
        "listing": {"listing": "memory://list.csv"},
        "tar": {"tar": "memory://{0..2}.tar", "window": 6},
    }
    source = blocks[kind]
    cache = {"cache": {"dir": str(tmp_path / "cache"), "size": "16 MiB"}}
    plain = write_config(tmp_path / "plain.yaml", "", source=source)
    keeping = write_config(tmp_path / "keeping.yaml", "", source={**source, **cache})

    def loader(path: Path, **ranks: Any) -> gpuflow.Loader:
        return gpuflow.load(path, "train", device="cpu", **ranks)

    with loader(plain) as without:
        expected = [epoch_rows(without) for _ in range(2)]
    with nothing_left_behind(), loader(keeping) as first:
        assert [epoch_rows(first) for _ in range(2)] == expected
        counts = first.stats()["cache"]
        assert counts["hits"] >= SAMPLES
        assert counts["damaged"] == 0
        first.set_epoch(0)
        batches = iter(first)
        for _ in range(3):
            next(batches)
        state = first.state_dict()
    with loader(keeping) as resumed:
        resumed.load_state_dict(state)
        assert epoch_rows(resumed) == expected[0][3:]
        assert resumed.stats()["cache"]["misses"] == 0
    with loader(keeping, rank=0, world_size=2) as zero, loader(keeping, rank=1, world_size=2) as one:
        assert interleave([epoch_rows(zero), epoch_rows(one)]) == flat(expected[0])


def test_the_counts_of_a_mix_are_those_of_all_its_sources(memory: fsspec.AbstractFileSystem, tmp_path: Path) -> None:
    memory.pipe({f"/{place}/{'ab'[i % 2]}/{i}.jpg": jpeg(i % 2, i) for place in ("one", "two") for i in range(4)})
    cache = {"cache": {"dir": str(tmp_path / "cache"), "size": "16 MiB"}}
    mix = [{"source": {"folder": f"memory://{place}", **cache}} for place in ("one", "two")]
    file = write_config(tmp_path / "mix.yaml", "", source={"mix": mix})
    with gpuflow.load(file, "train", device="cpu") as loader:
        read = {row[0] for row in flat(epoch_rows(loader))}
        assert loader.stats()["cache"]["misses"] == len(read) > 4


def test_the_cache_of_another_version_is_an_error_that_names_the_file(
    memory: fsspec.AbstractFileSystem, tmp_path: Path
) -> None:
    memory.pipe({f"/photos/a/{i}.jpg": jpeg(0, i) for i in range(4)})
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache/gpuflow-cache").write_text("gpuflow cache, format 0\n")
    source = {"folder": "memory://photos", "cache": {"dir": str(tmp_path / "cache"), "size": "1GB"}}
    path = write_config(tmp_path / "x.yaml", "", source=source)
    with pytest.raises(SourceError) as caught:
        gpuflow.load(path, "train", device="cpu")
    assert str(caught.value).startswith(f"{path}: source.cache.dir must have the format of this version")


@pytest.mark.parametrize("on_error", ["replace", "skip", "raise"])
@pytest.mark.parametrize("kind", ["folder", "tar"])
def test_what_cannot_be_decoded_is_downloaded_once_more(
    memory: fsspec.AbstractFileSystem, tmp_path: Path, kind: str, on_error: str
) -> None:
    """An entry that is whole, and of the right version, but not what the server has."""
    memory.pipe({f"/photos/{'ab'[i % 2]}/{i}.jpg": jpeg(i % 2, i) for i in range(6)})
    memory.pipe({"/0.tar": shard(range(6))})
    where = {"folder": "memory://photos"} if kind == "folder" else {"tar": "memory://0.tar"}
    cache = {"dir": str(tmp_path / "cache"), "size": "16 MiB"}
    run = {"on_error": on_error}
    file = write_config(tmp_path / "x.yaml", "", source={**where, "cache": cache}, run=run, batch={"size": 2})
    with gpuflow.load(file, "val", device="cpu") as loader:
        expected = epoch_rows(loader)
    names = [path for path in (tmp_path / "cache/entries").rglob("*") if path.is_file()]
    for path in names:
        whole = path.read_bytes()
        _, length, version, _ = disk_cache._HEAD.unpack_from(whole)
        data = bytes(length) if kind == "folder" else whole[-length:].replace(b"\xff\xd8\xff", b"abc")
        path.write_bytes(disk_cache._head(data, version) + data)
    with gpuflow.load(file, "val", device="cpu") as loader:
        assert epoch_rows(loader) == expected
        assert loader.stats()["bad"] == 0
        misses = loader.stats()["cache"]["misses"]
        assert len(names) <= misses <= len(names) + 1, "two threads may begin at the same time"
        assert epoch_rows(loader) == expected and loader.stats()["cache"]["misses"] == misses


def test_what_the_server_has_damaged_is_downloaded_once_more_in_a_run(
    memory: fsspec.AbstractFileSystem, tmp_path: Path
) -> None:
    memory.pipe({f"/photos/a/{i}.jpg": jpeg(0, i) if i else b"no image" for i in range(6)})
    cache = {"dir": str(tmp_path / "cache"), "size": "16 MiB"}
    file = write_config(tmp_path / "x.yaml", "", source={"folder": "memory://photos", "cache": cache})
    for misses in (7, 1):
        with gpuflow.load(file, "val", device="cpu") as loader, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for _ in range(3):
                assert sum(len(batch.indices) for batch in loader) == 5
            assert loader.stats()["cache"]["misses"] == misses
