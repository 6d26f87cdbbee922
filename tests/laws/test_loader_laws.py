"""Laws of the loader: equal batches for any threads and ranks, exact resume, every sample once, isolated faults."""

from __future__ import annotations

import io
import json
import shutil
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gpuflow
from gpuflow.loader.sampler import ShuffledOrder
from tests.datasets import (
    RAW,
    Entries,
    MemorySource,
    Row,
    deadline,
    epoch_rows,
    flat,
    interleave,
    jpeg,
    loader_of,
    make_photos,
    rows,
    write_config,
)

COUNT = 23
CLASSES = 3

TORCHVISION: Entries = (
    {"decode": {}},
    {"random_crop": {"size": 32, "padding": 4}},
    {"torchvision": {"name": "RandomErasing", "parameters": (("p", 0.9),)}},
    {"normalize": {"dtype": "bfloat16", "layout": "nhwc"}},
)


@pytest.fixture(autouse=True)
def _in_time() -> Iterator[None]:
    with deadline(120):
        yield


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("photos")
    files = make_photos(root / "photos", classes=CLASSES, each=8)
    files[-1].unlink()
    return write_config(root / "photos.yaml", root / "photos", batch={"size": 3})


def load(config: Path, *overrides: str, rank: int = 0, world_size: int = 1, state: Any = None) -> gpuflow.Loader:
    loader = gpuflow.load(config, "train", rank=rank, world_size=world_size, overrides=overrides)
    if state:
        loader.load_state_dict(json.loads(json.dumps(state)))
    return loader


def epochs(count: int, make: Callable[[], gpuflow.Loader]) -> list[list[list[Row]]]:
    with make() as loader:
        return [epoch_rows(loader) for _ in range(count)]


@pytest.fixture(scope="module")
def reference(config: Path) -> list[list[list[Row]]]:
    """The batches of two epochs on one rank and one thread."""
    return epochs(2, lambda: load(config, "run.threads=1", "run.prefetch=1"))


# --- bad samples under the default policy -----------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.* samples are bad so far:UserWarning")
@pytest.mark.parametrize("name", ["train", "val", "test", "predict", "all_of_them"])
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("kind", ["folder", "weights", "mix"])
def test_a_pass_that_does_not_draw_delivers_no_sample_twice(
    name: str, shuffle: bool, drop_last: bool, kind: str, tmp_path: Path
) -> None:
    """Bad samples are left out there. Where samples are drawn or batches must be full, they are replaced."""
    files = make_photos(tmp_path / "photos", classes=3, each=5)
    for i in (1, 7, 14):
        files[i].write_bytes(b"no image")
    (tmp_path / "weights.txt").write_text("1\n" * len(files))
    folder: dict[str, Any] = {"folder": str(tmp_path / "photos")}
    weights = folder | {"weights": {"file": str(tmp_path / "weights.txt")}}
    source = {"folder": folder, "weights": weights, "mix": {"mix": [{"source": folder}, {"source": folder}]}}[kind]
    pipeline = {"stages": list(RAW), "shuffle": shuffle, "batch": {"size": 4, "drop_last": drop_last}}
    config = tmp_path / "x.yaml"
    config.write_text(json.dumps({"source": source, "pipelines": {name: pipeline}}))
    with gpuflow.load(config, name) as loader:
        sizes, indices = [], []
        for batch in loader:
            sizes.append(len(batch.indices))
            indices += batch.indices.tolist()
        assert loader.stats()["bad"]
        if shuffle or drop_last:
            assert sizes[:-1] == [4] * (len(loader) - 1)
        else:
            bad = {str(files[i]) for i in (1, 7, 14)}
            assert indices == [i for i in range(len(loader.dataset)) if loader.dataset.path(i) not in bad]


# --- the same batches -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefetch", [1, 2, 3, 4])
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_threads_and_prefetch_change_nothing(
    threads: int, prefetch: int, config: Path, reference: list[list[list[Row]]]
) -> None:
    run = f"run.threads={threads}", f"run.prefetch={prefetch}"
    assert epochs(2, lambda: load(config, *run)) == reference


@pytest.mark.parametrize("batch", [1, 2, 7, 23, 64])
def test_batch_and_chunk_size_change_no_sample(batch: int, config: Path, reference: list[list[list[Row]]]) -> None:
    """With two threads a batch of 64 is divided into chunks of 32, and a batch of 7 into chunks of 4 and 3."""
    (epoch,) = epochs(1, lambda: load(config, f"pipelines.train.batch.size={batch}"))
    assert [len(step) for step in epoch[:-1]] == [batch] * (len(epoch) - 1)
    assert flat(epoch) == flat(reference[0])


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_ranks_together_see_the_one_sequence(world_size: int, config: Path, reference: list[list[list[Row]]]) -> None:
    ranks = [
        epochs(2, lambda rank=rank: load(config, rank=rank, world_size=world_size))  # type: ignore[misc]
        for rank in range(world_size)
    ]
    for epoch in range(2):
        assert len({len(rank[epoch]) for rank in ranks}) == 1
        assert interleave([rank[epoch] for rank in ranks]) == flat(reference[epoch])


def test_the_sequence_is_the_order_of_the_seed_and_the_epoch(reference: list[list[list[Row]]]) -> None:
    order = ShuffledOrder(size=COUNT, seed=0)
    for epoch in range(2):
        assert [row[0] for row in flat(reference[epoch])] == order.indices(epoch, np.arange(COUNT)).tolist()


def test_another_seed_is_another_epoch(config: Path, reference: list[list[list[Row]]]) -> None:
    (other,) = epochs(1, lambda: load(config, "source.seed=1"))
    assert [row[0] for row in flat(other)] != [row[0] for row in flat(reference[0])]


@pytest.mark.parametrize("threads", [2, 5])
def test_opaque_random_stages_are_as_pure(threads: int) -> None:
    source = MemorySource.of(13)
    run = {"entries": TORCHVISION, "batch_size": 5}
    alone = epochs(1, lambda: loader_of(source, threads=1, **run))  # type: ignore[arg-type]
    assert epochs(1, lambda: loader_of(source, threads=threads, **run)) == alone  # type: ignore[arg-type]


# --- resume -----------------------------------------------------------------------------------------------------------


def saved_states(config: Path, world_size: int, steps: int) -> list[dict[str, Any]]:
    """The state before the first step and after each of `steps` steps of epoch 0, the same on every rank."""
    loaders = [load(config, rank=rank, world_size=world_size) for rank in range(world_size)]
    states = [[loader.state_dict()] for loader in loaders]
    for loader, mine in zip(loaders, states, strict=True):
        for _, _batch in zip(range(steps), loader, strict=False):
            mine.append(loader.state_dict())
        loader.close()
    assert all(mine == states[0] for mine in states)
    return states[0]


@pytest.mark.parametrize(("before", "after"), [(1, 1), (1, 2), (2, 1), (2, 3)])
def test_resume_at_every_step_equals_no_interruption(
    before: int, after: int, config: Path, reference: list[list[list[Row]]]
) -> None:
    """Resume on another number of ranks and threads, and continue into the next epoch."""
    whole = flat(reference[0]), flat(reference[1])
    steps = -(-COUNT // (3 * before))
    states = saved_states(config, before, steps)
    assert len(states) == steps + 1
    for step, state in enumerate(states):
        seen = min(step * 3 * before, COUNT)
        loaders = [
            load(config, f"run.threads={1 + step % 3}", rank=rank, world_size=after, state=state)
            for rank in range(after)
        ]
        if seen < COUNT:
            assert interleave([epoch_rows(loader) for loader in loaders]) == whole[0][seen:], f"step {step}"
        firsts = []
        for loader in loaders:
            firsts.append([rows(next(iter(loader)))])
            loader.close()
        assert interleave(firsts) == whole[1][: 3 * after], f"the epoch after step {step}"


def test_resume_upon_resume_equals_no_interruption(config: Path, reference: list[list[list[Row]]]) -> None:
    """Run one step per process over two epochs, each with another number of threads."""
    state: dict[str, Any] = {}
    for epoch in range(2):
        for step, expected in enumerate(reference[epoch]):
            with load(config, f"run.threads={1 + step % 2}", state=state) as loader:
                assert rows(next(iter(loader))) == expected
                state = loader.state_dict()
    assert (state["epoch"], state["position"]) == (2, 0)


# --- the files that a state is of -------------------------------------------------------------------------------------


def open_copy(kind: str, photos: Path, root: Path, renamed: str = "") -> list[str]:
    """Overrides that read a copy of the photographs under `root`; `renamed`: a file that has another name there."""
    shutil.copytree(photos, root / "photos")
    if renamed:
        (root / "photos" / renamed).rename((root / "photos" / renamed).with_name("other.jpg"))
    files = sorted((root / "photos").rglob("*.jpg"))
    if kind == "listing":
        (root / "all.csv").write_text(
            "".join(f"photos/{file.parent.name}/{file.name},{file.parent.name}\n" for file in files)
        )
        return [f"source={{listing: {root / 'all.csv'}}}"]
    if kind == "tar":
        with tarfile.open(root / "all.tar", "w") as tar:
            for file in files:
                tar.add(file, f"{file.parent.name}/{file.name}")
                label = tarfile.TarInfo(f"{file.parent.name}/{file.stem}.cls")
                label.size = len(file.parent.name)
                tar.addfile(label, io.BytesIO(file.parent.name.encode()))
        return [f"source={{tar: {root / 'all.tar'}}}"]
    split = ", split: {train: 0.7, val: 0.3}" if kind == "split" else ""
    return [f"source={{folder: {root / 'photos'}{split}}}"]


@pytest.mark.parametrize("kind", ["folder", "listing", "tar", "split"])
def test_a_state_goes_on_with_the_same_files_elsewhere_and_with_no_others(
    kind: str, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Saved at each step on two ranks, restored on one."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    photos = config.parent / "photos"
    here = open_copy(kind, photos, tmp_path / "here")
    there = open_copy(kind, photos, tmp_path / "there" / "deeper")
    other = open_copy(kind, photos, tmp_path / "other", renamed="class_1/002.jpg")
    with load(config, *here) as loader:
        whole = flat(epoch_rows(loader))
        count = len(loader.dataset)
    for step in range(-(-count // 6)):
        with load(config, *here, world_size=2) as loader:
            for _, _batch in zip(range(step), loader, strict=False):
                pass
            state = loader.state_dict()
        with load(config, *there, state=state) as loader:
            assert flat(epoch_rows(loader)) == whole[6 * step :]
        with load(config, *other) as loader, pytest.raises(gpuflow.StateError, match="other files or labels"):
            loader.load_state_dict(state)


# --- every sample once ------------------------------------------------------------------------------------------------


@settings(max_examples=15, deadline=None, derandomize=True)
@given(count=st.integers(1, 20), world_size=st.integers(1, 3), batch=st.integers(1, 6), threads=st.integers(1, 3))
def test_every_sample_is_delivered_once_as_valid(count: int, world_size: int, batch: int, threads: int) -> None:
    source = MemorySource.of(count)
    ranks = []
    for rank in range(world_size):
        with loader_of(source, RAW, batch_size=batch, threads=threads, rank=rank, world_size=world_size) as loader:
            ranks.append(epoch_rows(loader))
            assert len(ranks[-1]) == len(loader) == -(-count // (batch * world_size))
    valid = interleave(ranks)
    assert sorted(row[0] for row in valid) == list(range(count))
    assert all(row[1] == source.labels[row[0]] for row in valid)
    if world_size > 1:
        assert {len(step) for rank in ranks for step in rank} == {batch}


# --- bad samples ------------------------------------------------------------------------------------------------------


def with_bad(bad: set[int], count: int) -> MemorySource:
    """Photographs, some of them truncated and some unreadable."""
    data = [jpeg(i % CLASSES, i) for i in range(count)]
    return MemorySource((None if i % 2 else data[i][:200]) if i in bad else data[i] for i in range(count))


@pytest.fixture(scope="module")
def sound() -> list[Row]:
    with loader_of(MemorySource.of(24), batch_size=5) as loader:
        return flat(epoch_rows(loader))


@pytest.mark.parametrize("place", range(24))
def test_a_bad_sample_changes_no_other(place: int, sound: list[Row]) -> None:
    bad = sound[place][0]
    with loader_of(with_bad({bad}, 24), batch_size=5, policy="replace") as loader:
        replaced = flat(epoch_rows(loader))
    rest = sound[:place] + sound[place + 1 :]
    assert replaced[:place] + replaced[place + 1 :] == rest
    assert replaced[place][0] != bad
    assert replaced[place][1] == replaced[place][0] % CLASSES
    with loader_of(with_bad({bad}, 24), batch_size=5, policy="skip") as loader:
        skipped = epoch_rows(loader)
    assert flat(skipped) == rest
    assert [len(step) for step in skipped] == [5 - (step == place // 5) - (step == 4) for step in range(5)]


@pytest.mark.filterwarnings("ignore:.* samples are bad so far:UserWarning")
@settings(max_examples=8, deadline=None, derandomize=True)
@given(bad=st.sets(st.integers(0, 23), max_size=20), threads=st.integers(1, 4))
def test_bad_samples_change_no_others(bad: set[int], threads: int) -> None:
    with loader_of(MemorySource.of(24), batch_size=24, threads=threads) as loader:
        (sound,) = epoch_rows(loader)
    with loader_of(with_bad(bad, 24), batch_size=24, threads=threads, policy="skip") as loader:
        assert epoch_rows(loader) == [[row for row in sound if row[0] not in bad]]
    with loader_of(with_bad(bad, 24), batch_size=24, threads=threads, policy="replace") as loader:
        (replaced,) = epoch_rows(loader)
        assert loader.stats()["bad_distinct"] == len(bad)
    for before, after in zip(sound, replaced, strict=True):
        assert after[0] not in bad
        assert before == after or before[0] in bad


@pytest.mark.filterwarnings("ignore:.* samples are bad so far:UserWarning")
def test_replacements_do_not_depend_on_threads_and_ranks() -> None:
    source = with_bad({2, 5, 11, 17}, 24)
    with loader_of(source, batch_size=6, threads=1) as loader:
        alone = flat(epoch_rows(loader))
    ranks = []
    for rank in range(2):
        with loader_of(source, batch_size=3, threads=3, rank=rank, world_size=2) as loader:
            ranks.append(epoch_rows(loader))
    assert interleave(ranks) == alone
