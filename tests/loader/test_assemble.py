"""From a checked file to a loader: what the parts are made of, and what cannot be built."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import fsspec
import pytest
import torch

import gpuflow
from gpuflow.config import Config, read_config
from gpuflow.errors import ConfigError, LoaderError, SourceError
from gpuflow.loader.assemble import build_loader, open_split
from gpuflow.runtime.threads import available_threads, share_of_cores
from gpuflow.stages import STAGES
from tests.datasets import flat, make_photos, write_config


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("build")
    make_photos(root / "photos", classes=2, each=10)
    return write_config(root / "x.yaml", root / "photos")


def read(config: Path, *overrides: str) -> Config:
    return read_config(config, STAGES, overrides)


def test_threads_are_the_cores_shared_among_the_hosts_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    cores = len(os.sched_getaffinity(0))
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert available_threads() == cores
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert available_threads() == max(1, cores // 2)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(64 * cores))
    assert available_threads() == 1


@pytest.mark.parametrize(
    ("cores", "quota", "ranks", "threads"),
    [
        (64, None, 1, 64),
        (64, 4.0, 1, 4),
        (64, 3.5, 1, 4),
        (2, 4.0, 1, 2),
        (64, 0.5, 1, 1),
        (64, 8.0, 4, 2),
        (2, None, 8, 1),
    ],
)
def test_threads_are_no_more_than_the_control_groups_grant(
    cores: int, quota: float | None, ranks: int, threads: int
) -> None:
    assert share_of_cores(cores, quota, ranks) == threads


def test_a_pipeline_reads_the_split_of_its_name_else_everything(config: Path) -> None:
    split = "source.split={train: 0.8, val: 0.2}"
    assert [len(open_split(read(config, split), name)) for name in ("train", "val", "other")] == [16, 4, 20]
    assert len(open_split(read(config), "train")) == 20
    other = [split, "pipelines.train.split=val", "pipelines.val.split=all"]
    assert [len(open_split(read(config, *other), name)) for name in ("train", "val")] == [4, 20]
    with gpuflow.load(config, overrides=[split]) as named, gpuflow.load(config, overrides=other) as moved:
        assert named.state_dict()["config"] != moved.state_dict()["config"]
    train, val = (open_split(read(config, split), name) for name in ("train", "val"))
    paths = [{source.path(i) for i in range(len(source))} for source in (train, val)]
    assert not paths[0] & paths[1]
    with gpuflow.load(config, "val", overrides=[split]) as loader:
        assert sorted(int(label) for _, labels in loader for label in labels) == [0, 0, 1, 1]


def test_a_source_that_cannot_be_opened_names_the_file(config: Path, tmp_path: Path) -> None:
    with pytest.raises(SourceError) as caught:
        open_split(read(config, f"source.folder={tmp_path}/absent"), "train")
    assert str(caught.value) == (
        f"{config}: source.folder must be a directory, got '{tmp_path}/absent', which does not exist; check the path"
    )


def test_an_unknown_pipeline_is_located_with_the_closest_name(config: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        gpuflow.load(config, "trian")
    assert str(caught.value) == f"{config}: pipelines has no pipeline 'trian'; did you mean 'train'?"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_gpu_that_is_not_there(config: Path) -> None:
    with pytest.raises(LoaderError) as caught:
        gpuflow.load(config, device="cuda:1")
    assert str(caught.value) == "device 'cuda:1' needs CUDA, and torch sees no GPU here; use device='cpu'"


def test_decoding_on_a_gpu_needs_one(config: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        gpuflow.load(config, overrides=["pipelines.train.stages.decode.backend=gpu"])
    assert str(caught.value) == (
        f"{config}: pipelines.train.stages[0].decode.backend is gpu, but the loader's device is the CPU; "
        "use auto or cpu"
    )


def test_batches_are_on_the_device_asked_for(config: Path) -> None:
    for device in None, "cpu", torch.device("cpu"):
        with build_loader(read(config), "train", rank=0, world_size=1, device=device) as loader:
            images, labels = next(iter(loader))
            assert images.device == labels.device == torch.device("cpu")


def test_the_preprocessing_is_the_stages_fingerprint(config: Path) -> None:
    parsed = read(config)
    with gpuflow.load(config, "val") as loader:
        assert loader.preprocessing == parsed.programs["val"].pipeline.fingerprint
        assert len(loader.preprocessing) == 16


def test_shards_are_shuffled_within_windows(tmp_path: Path) -> None:
    import io
    import tarfile

    from tests.datasets import jpeg

    for shard in range(2):
        with tarfile.open(tmp_path / f"{shard}.tar", "w") as tar:
            for number in range(6):
                for suffix, data in (("jpg", jpeg(0, number)), ("cls", b"0")):
                    member = tarfile.TarInfo(f"{shard}{number:03d}.{suffix}")
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))
    source = {"tar": str(tmp_path / "{0..1}.tar"), "window": 3}
    config = write_config(tmp_path / "x.yaml", "", source=source, batch={"size": 3})
    with gpuflow.load(config, "train") as loader:
        orders = [[batch.indices.tolist() for batch in loader] for _ in range(2)]
        assert orders[0] != orders[1]
        for order in orders:
            assert sorted(flat(order)) == list(range(12))
            assert all(len({index // 6 for index in window}) == 1 for window in order), "a window stays in its shard"
    with gpuflow.load(config, "val") as loader:
        assert flat(batch.indices.tolist() for batch in loader) == list(range(12))


@pytest.mark.parametrize("split", ["", ", split: {train: 0.5}"])
@pytest.mark.parametrize(
    ("source", "remote"),
    [
        ("folder: photos", False),
        ("listing: list.csv", False),
        ("listing: urls.csv", True),
        ("listing: list.csv, root: 'memory://photos'", True),
        ("folder: 'memory://photos'", True),
    ],
)
def test_what_is_behind_urls_is_read_by_threads_alone(
    source: str, remote: bool, split: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A forked process cannot use this one's connections; where the index is does not matter, nor does a split."""
    monkeypatch.chdir(tmp_path)
    files = make_photos(tmp_path / "photos", classes=2, each=4)
    fsspec.filesystem("memory").put(str(tmp_path / "photos"), "/", recursive=True)
    names = [str(file.relative_to(tmp_path / "photos")) for file in files]
    prefix = "" if "root" in source else "photos/"
    (tmp_path / "list.csv").write_text("".join(f"{prefix}{name},0\n" for name in names))
    (tmp_path / "urls.csv").write_text("".join(f"memory://photos/{name},0\n" for name in names))
    stages = "[decode, {resize: {height: 8, width: 8}}]"
    path = tmp_path / "x.yaml"
    for run, readers, processes in (
        ("{threads: 3, processes: 2}", 16 if remote else 0, 0 if remote else 2),
        ("{threads: 3, processes: 2, readers: 0}", 0, 0 if remote else 2),
        ("{threads: 3, processes: 2, readers: 5}", 5, 0),
    ):
        path.write_text(
            f"source: {{{source}{split}}}\nrun: {run}\n"
            f"pipelines: {{train: {{stages: {stages}, batch: {{size: 4}}, on_error: raise}}}}\n"
        )
        with gpuflow.load(path) as loader:
            assert (loader._plan.readers, loader._plan.processes) == (readers, processes)
            if remote:
                assert sum(len(labels) for _, labels in loader) == (4 if split else 8)
                assert "processes" not in loader.stats()


@pytest.mark.parametrize(
    ("source", "run", "readers"),
    [("folder: photos", "{}", 0), ("folder: photos", "{readers: 3}", 3), ("folder: memory://photos", "{}", 16)],
)
def test_who_reads(source: str, run: str, readers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers read local files themselves; what is waited for is read by separate threads."""
    monkeypatch.chdir(tmp_path)
    make_photos(tmp_path / "photos", classes=2, each=4)
    if "memory://" in source:
        remote = fsspec.filesystem("memory")
        remote.put(str(tmp_path / "photos"), "/", recursive=True)
    stages = "[decode, {resize: {height: 8, width: 8}}]"
    path = tmp_path / "x.yaml"
    path.write_text(
        f"source: {{{source}}}\nrun: {run}\npipelines: {{train: {{stages: {stages}, batch: {{size: 4}}}}}}\n"
    )
    with gpuflow.load(path) as loader:
        batches = iter(loader)
        next(batches)
        names = [thread.name for thread in threading.enumerate()]
        assert sum(name.startswith("gpuflow_read") for name in names) == readers
        assert sum(len(labels) for _, labels in batches) == 4
