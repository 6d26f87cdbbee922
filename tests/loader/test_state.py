"""A loader's state: what it counts, what it refuses, how it goes on."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import gpuflow
from gpuflow.errors import LoaderError, StateError
from tests.datasets import MemorySource, deadline, epoch_rows, loader_of, make_photos, rows, write_config
from tests.texts import pin


@pytest.fixture(autouse=True)
def _in_time() -> Iterator[None]:
    with deadline(60):
        yield


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("state")
    make_photos(root / "photos", classes=3, each=4)
    return write_config(root / "x.yaml", root / "photos", batch={"size": 5})


def take(loader: gpuflow.Loader, steps: int) -> None:
    for step, _ in enumerate(loader, start=1):
        if step == steps:
            break


def place(loader: gpuflow.Loader) -> tuple[int, int]:
    state = loader.state_dict()
    return state["epoch"], state["position"]


def test_a_state_is_a_small_json_value(config: Path) -> None:
    with gpuflow.load(config) as loader:
        state = loader.state_dict()
        assert list(state) == ["version", "seed", "epoch", "position", "next_epoch", "config", "source"]
        assert json.loads(json.dumps(state)) == state
        assert (state["version"], state["seed"], state["epoch"], state["position"]) == (1, 0, 0, 0)
        assert state["next_epoch"] == 1
        assert len(state["config"]) == len(state["source"]) == 16


def test_a_state_counts_what_was_handed_over() -> None:
    with loader_of(MemorySource.of(40), prefetch=4) as loader:
        places = [place(loader)]
        for _ in loader:
            places.append(place(loader))
    assert places == [(0, 4 * step) for step in range(10)] + [(1, 0)]


def test_a_state_on_several_ranks_counts_all_of_them() -> None:
    with loader_of(MemorySource.of(20), rank=1, world_size=2) as loader:
        assert [place(loader) for _ in loader] == [(0, 8), (0, 16), (1, 0)]


def test_a_new_for_begins_a_new_epoch_in_the_state() -> None:
    with loader_of(MemorySource.of(12)) as loader:
        take(loader, 2)
        assert place(loader) == (0, 8)
        epoch = iter(loader)
        assert place(loader) == (1, 0)
        next(epoch)
        assert place(loader) == (1, 4)


def test_set_epoch_shows_in_the_state() -> None:
    with loader_of(MemorySource.of(12)) as loader:
        loader.set_epoch(5)
        assert place(loader) == (5, 0)


def test_set_epoch_of_the_same_epoch_keeps_a_restored_position() -> None:
    """The idiom `for epoch in range(start, n): loader.set_epoch(epoch)` must not spoil a resume."""
    source = MemorySource.of(12)
    with loader_of(source) as loader:
        whole = epoch_rows(loader), epoch_rows(loader)
        loader.set_epoch(0)
        take(loader, 1)
        state = loader.state_dict()
    with loader_of(source) as loader:
        loader.load_state_dict(state)
        loader.set_epoch(0)
        assert place(loader) == (0, 4)
        assert epoch_rows(loader) == whole[0][1:]
        loader.set_epoch(1)
        assert epoch_rows(loader) == whole[1]
        loader.load_state_dict(state)
        loader.set_epoch(1)
        assert place(loader) == (1, 0)
        assert epoch_rows(loader) == whole[1]


@pytest.mark.parametrize("step", range(3))
def test_set_epoch_within_an_epoch_is_for_the_next_one(step: int) -> None:
    """As with DistributedSampler: the epoch under way goes on; the state and the next `for` agree on what follows."""
    source = MemorySource.of(12)
    with loader_of(source) as loader:
        loader.set_epoch(5)
        fifth = epoch_rows(loader)
        sixth = epoch_rows(loader)
        loader.set_epoch(0)
        whole = epoch_rows(loader)
        loader.set_epoch(0)
        seen, states = [], []
        for batch in loader:
            seen.append(rows(batch))
            if batch.step == step:
                loader.set_epoch(5)
            states.append(loader.state_dict())
        assert seen == whole
        assert place(loader) == (5, 0)
        assert epoch_rows(loader) == fifth
    for taken, state in enumerate(states[step:], start=step + 1):
        with loader_of(source) as loader:
            loader.load_state_dict(json.loads(json.dumps(state)))
            assert loader.state_dict() == state
            if taken < 3:
                assert epoch_rows(loader) == whole[taken:]
            assert [epoch_rows(loader), epoch_rows(loader)] == [fifth, sixth]


def test_set_epoch_after_a_break_shows_in_the_state() -> None:
    with loader_of(MemorySource.of(12)) as loader:
        take(loader, 1)
        loader.set_epoch(1)
        assert place(loader) == (1, 0)
        assert [batch.epoch for batch in loader] == [1, 1, 1]


def test_loading_a_state_ends_the_epoch_under_way() -> None:
    with loader_of(MemorySource.of(12)) as loader:
        start = loader.state_dict()
        epoch = iter(loader)
        next(epoch)
        loader.load_state_dict(start)
        assert loader.state_dict() == start
        with pytest.raises(LoaderError) as caught:
            next(epoch)
        assert str(caught.value) == "epoch 0 was ended because a state was loaded; iterate the loader anew"
        assert [(batch.epoch, batch.step) for batch in loader] == [(0, 0), (0, 1), (0, 2)]


def test_a_loaded_state_is_the_state() -> None:
    with loader_of(MemorySource.of(12)) as loader:
        take(loader, 2)
        state = loader.state_dict()
        with loader_of(MemorySource.of(12), threads=1, rank=1, world_size=2) as other:
            other.load_state_dict(state)
            assert other.state_dict() == state
            assert "next epoch 0" in repr(other)


def test_length_is_of_a_whole_epoch_also_after_a_resume() -> None:
    with loader_of(MemorySource.of(12)) as loader:
        loader.load_state_dict({**loader.state_dict(), "position": 8})
        assert len(loader) == 3
        assert len(list(loader)) == 1


@pytest.mark.parametrize(("position", "drop_last", "world_size"), [(12, False, 1), (6, True, 3)])
def test_where_nothing_is_left_of_an_epoch_the_next_one_follows(
    position: int, drop_last: bool, world_size: int
) -> None:
    with loader_of(MemorySource.of(12), drop_last=drop_last, world_size=world_size) as loader:
        loader.load_state_dict({**loader.state_dict(), "position": position})
        assert list(loader) == []
        assert place(loader) == (1, 0)
        assert {batch.epoch for batch in loader} == {1}


def test_the_batch_size_may_change_at_a_resume(config: Path) -> None:
    with gpuflow.load(config) as loader:
        order = [row[0] for step in epoch_rows(loader) for row in step]
        loader.set_epoch(0)
        take(loader, 1)
        state = loader.state_dict()
    with gpuflow.load(config, overrides=["pipelines.train.batch.size=2"]) as loader:
        loader.load_state_dict(state)
        assert [row[0] for step in epoch_rows(loader) for row in step] == order[5:]


@pytest.mark.parametrize(
    "override",
    [
        "run.threads=1",
        "run.prefetch=1",
        "run.on_error=skip",
        "train.epochs=3",
        "pipelines.train.stages.decode.backend=cpu",
        "pipelines.train.stages.decode.cpu_share=0.1",
    ],
)
def test_how_it_runs_does_not_count(override: str, config: Path) -> None:
    with gpuflow.load(config) as loader, gpuflow.load(config, overrides=[override]) as other:
        other.load_state_dict(loader.state_dict())


@pytest.mark.parametrize(
    "override",
    [
        "source.seed=1",
        "source.split={train: 0.5}",
        "source.split={train: 0.5, val: 0.5}",
        "pipelines.train.shuffle=false",
        "pipelines.train.stages.random_resized_crop.size=28",
        "pipelines.train.stages.flip.horizontal=0.4",
    ],
)
def test_what_comes_out_counts(override: str, config: Path) -> None:
    overrides = [override, "pipelines.val.split=all"]
    with gpuflow.load(config) as loader, gpuflow.load(config, overrides=overrides) as other:
        ours, theirs = loader.state_dict(), other.state_dict()
        with pytest.raises(StateError) as caught:
            other.load_state_dict(ours)
    assert str(caught.value) == (
        f"the state was taken with seed 0 and configuration {ours['config']}, this loader has seed "
        f"{theirs['seed']} and {theirs['config']}; restore the source, stages and seed it was taken with, or start "
        "a new epoch with set_epoch(1)"
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"version": 2},
        {"position": 13},
        {"position": -1},
        {"epoch": "soon"},
        {"epoch": -1},
        {"next_epoch": float("inf")},
        {"epoch": 1 << 70},
    ],
)
def test_refuses_a_wrong_state(changes: dict[str, Any]) -> None:
    with loader_of(MemorySource.of(12)) as loader:
        before = loader.state_dict()
        with pytest.raises(StateError) as caught:
            loader.load_state_dict({**before, **changes})
        pin(caught.value)
        assert loader.state_dict() == before


# --- the files --------------------------------------------------------------------------------------------------------


def test_other_files_of_the_same_number_are_refused(config: Path, tmp_path: Path) -> None:
    with gpuflow.load(config) as loader:
        state = loader.state_dict()
    copy = tmp_path / "copy"
    shutil.copytree(config.parent / "photos", copy)
    (copy / "class_0" / "000.jpg").rename(copy / "class_0" / "new.jpg")
    with gpuflow.load(config, overrides=[f"source.folder={copy}"]) as loader:
        before = loader.state_dict()
        with pytest.raises(StateError) as caught:
            loader.load_state_dict(state)
        assert loader.state_dict() == before
    assert str(caught.value) == (
        f"the state was taken with other files or labels: its source has the fingerprint {state['source']}, this "
        f"loader's {before['source']} (12 samples); restore the files it was taken with, or start a new epoch with "
        "set_epoch(1)"
    )


def test_a_root_that_moved_resumes(config: Path, tmp_path: Path) -> None:
    with gpuflow.load(config) as loader:
        whole = epoch_rows(loader)
        loader.set_epoch(0)
        take(loader, 1)
        state = loader.state_dict()
    shutil.copytree(config.parent / "photos", tmp_path / "moved")
    with gpuflow.load(config, overrides=[f"source.folder={tmp_path / 'moved'}"]) as loader:
        loader.load_state_dict(state)
        assert epoch_rows(loader) == whole[1:]


@pytest.mark.parametrize(
    ("state", "what"),
    [
        ({}, "'version'"),
        ({"version": 1, "seed": 0, "epoch": 3, "position": 5, "config": "a26d5c1b88fc9bc4"}, "'source'"),
    ],
)
def test_refuses_what_is_no_state(state: dict[str, Any], what: str) -> None:
    with loader_of(MemorySource.of(4)) as loader, pytest.raises(StateError) as caught:
        loader.load_state_dict(state)
    assert what in pin(caught.value)
