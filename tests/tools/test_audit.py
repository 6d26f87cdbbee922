"""Audits of trainings: exact ones, restarted ones, and logs in which lines are missing, doubled or damaged."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

import gpuflow
from gpuflow.tools.audit import EpochAudit, audit, read_lines
from tests.commands import Run, command_here, document_of
from tests.datasets import deadline, make_photos, write_config

PHOTOS = 60


@pytest.fixture(autouse=True)
def _in_time() -> Iterator[None]:
    with deadline(100):
        yield


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("audit") / "photos"
    make_photos(root, classes=3, each=PHOTOS // 3)
    return root


@pytest.fixture
def config(photos: Path, tmp_path: Path) -> Path:
    run = {"audit": str(tmp_path / "logs" / "audit.jsonl"), "threads": 1}
    return write_config(tmp_path / "x.yaml", photos, batch={"global": 8}, run=run)


def logs(config: Path) -> list[Path]:
    return sorted((config.parent / "logs").iterdir())


def audits(config: Path) -> list[EpochAudit]:
    lines, damaged = read_lines(logs(config))
    assert damaged == []
    return list(audit(lines))


class Ranks:
    """Loaders that make their steps together. Those of a killed run are closed."""

    def __init__(self, config: Path, count: int, state: dict[str, object] | None = None, *overrides: str) -> None:
        self.loaders = [
            gpuflow.load(config, "train", rank=rank, world_size=count, overrides=overrides) for rank in range(count)
        ]
        for loader in self.loaders if state else []:
            loader.load_state_dict(state or {})

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for loader in self.loaders:
            loader.close()

    def run(self, steps: int | None = None, *, ahead: int = 0) -> dict[str, object]:
        """Make steps of an epoch, the first rank some more, and return the state before those."""
        batches = [iter(loader) for loader in self.loaders]
        for _ in islice(zip(*batches, strict=True), steps):
            pass
        state = self.loaders[0].state_dict()
        for _ in islice(batches[0], ahead):
            pass
        return state


def test_epochs_without_a_restart_are_exact(config: Path) -> None:
    with Ranks(config, 2) as ranks:
        ranks.run()
        ranks.run()
    assert [path.name for path in logs(config)] == ["audit.0.jsonl", "audit.1.jsonl"]
    assert list(map(str, audits(config))) == [
        f"train epoch {epoch}: 60 of 60 samples; each exactly once" for epoch in (0, 1)
    ]


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (2, 2), (2, 4)])
def test_restarts_on_other_numbers_of_ranks_are_exact(before: int, after: int, config: Path) -> None:
    """One run is killed three steps after its checkpoint, its first rank a step ahead, and the next one, too."""
    with Ranks(config, before) as ranks:
        state = ranks.run(2)
    with Ranks(config, before, state) as ranks:
        ranks.run(3, ahead=1)
    with Ranks(config, after, state) as ranks:
        ranks.run(1)
    with Ranks(config, after, state) as ranks:
        ranks.run()
        ranks.run(2, ahead=1)
    first, second = audits(config)
    lost = 3 * 8 + 8 // before + 8
    assert (
        str(first)
        == f"train epoch 0: 60 of 60 samples; each exactly once; {lost} deliveries lost at a restart are not counted"
    )
    assert (second.reached, second.faults, second.lost) == ((16, {}, 8 // after) if after > 1 else (24, {}, 0))


def test_an_older_checkpoint_replaces_all_that_came_after_it(config: Path) -> None:
    with Ranks(config, 2) as ranks:
        state = ranks.run(2)
    with Ranks(config, 2, state) as ranks:
        ranks.run()
        ranks.run(2)
    with Ranks(config, 2, state) as ranks:
        ranks.run(1)
    [only] = audits(config)
    assert (only.name, only.reached, only.faults) == ("train epoch 0", 24, {})


def test_a_run_that_resumes_too_far_on_misses_samples(config: Path) -> None:
    with Ranks(config, 2) as ranks:
        state = ranks.run(2)
    with Ranks(config, 2, {**state, "position": 32}) as ranks:
        ranks.run()
    [only] = audits(config)
    assert only.faults["missing at positions"].tolist() == list(range(16, 32))
    assert len(only.faults["missing samples"]) == 16


def changed(path: Path, change: Callable[[list[str]], list[str]]) -> None:
    lines = [line for line in path.read_text().splitlines() if line]
    path.write_text("\n".join(change(lines)))


def test_the_command_finds_lines_that_are_missing_or_doubled(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command: Run = command_here(monkeypatch, capsys, "audit")
    with Ranks(config, 2) as ranks:
        ranks.run()
        ranks.run()
    files = logs(config)
    done = command(*files)
    assert (done.code, done.err) == (0, "")
    removed = json.loads(files[1].read_text().splitlines()[3])  # the first line is empty, so of step 2
    changed(files[1], lambda lines: [*lines[:2], *lines[3:]])
    doubled = json.loads(files[0].read_text().splitlines()[9])  # step 0 of epoch 1
    changed(files[0], lambda lines: [*lines, lines[8]])
    done = command(*files)
    assert done.code == 1
    assert done.out.splitlines() == [
        "train epoch 0: 60 of 60 samples; missing at positions 20-23; missing samples "
        + re.sub(r"[\[\],]", "", str(sorted(removed["indices"]))),
        f"train epoch 1: 60 of 60 samples; repeated samples {' '.join(map(str, sorted(doubled['indices'])))}",
    ]
    done = command(*files, "--json")
    first, second = document_of("audit", done)["epochs"]
    assert (done.code, first["name"], first["samples"], first["reached"]) == (1, "train epoch 0", 60, 60)
    assert first["faults"]["missing at positions"] == [20, 21, 22, 23]
    assert second["faults"] == {"repeated samples": sorted(doubled["indices"])}
    done = command(files[0])
    assert done.code == 1
    assert "missing at positions 4-7 12-15 20-23 28-31 36-39 44-47 52-55" in done.out


def test_a_line_that_a_kill_left_incomplete_is_said_and_left_out(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with Ranks(config, 2) as ranks:
        state = ranks.run(2)
        ranks.run(0)
    file = logs(config)[1]
    file.write_bytes(file.read_bytes()[:-20])
    done = command_here(monkeypatch, capsys, "audit")(*logs(config))
    assert done.code == 0
    assert done.out == (
        "train epoch 0: 8 of 60 samples; each exactly once; 4 deliveries lost at a restart are not counted\n"
    )
    assert done.err == f"note: {file}:3 is incomplete, as a kill leaves it, and was left out\n"
    with Ranks(config, 2, state) as ranks:
        ranks.run()
    lines, damaged = read_lines(logs(config))
    assert damaged == [f"{file}:3"]
    [only] = audit(lines)
    assert only.faults["missing at positions"].tolist() == [12, 13, 14, 15]


def test_bad_samples_are_named_with_what_replaced_them(photos: Path, tmp_path: Path) -> None:
    make_photos(tmp_path / "photos", classes=3, each=8)
    bad = sorted((tmp_path / "photos").rglob("*.jpg"))[5]
    bad.write_bytes(b"no image")
    run = {"audit": str(tmp_path / "logs" / "audit.jsonl"), "threads": 1}
    config = write_config(tmp_path / "x.yaml", tmp_path / "photos", batch={"size": 8}, run=run)
    replaced = set()
    for policy in ("replace", "skip"):
        with gpuflow.load(config, overrides=[f"run.on_error={policy}"]) as loader:
            loader.set_epoch(int(policy == "skip"))
            delivered = np.concatenate([batch.indices.numpy() for batch in loader])
        replaced |= {int(index) for index in np.flatnonzero(np.bincount(delivered) > 1)}
    [stand_in] = replaced
    assert list(map(str, audits(config))) == [
        f"train epoch 0: 24 of 24 samples; each exactly once; bad sample 5 replaced by {stand_in}",
        "train epoch 1: 24 of 24 samples; each exactly once; bad sample 5 left out",
    ]
    found = [epoch.as_dict()["bad"] for epoch in audits(config)]
    assert found == [[{"sample": 5, "replaced_by": stand_in}], [{"sample": 5, "replaced_by": None}]]


def test_weighted_draws_may_repeat_a_sample_and_not_a_position(config: Path) -> None:
    weights = config.parent / "weights.txt"
    weights.write_text("".join(f"{1 + (i % 7)}\n" for i in range(PHOTOS)))
    override = f"source.weights={{file: {weights}, replacement: true, samples: 40}}"
    with Ranks(config, 2, None, override) as ranks:
        state = ranks.run(2, ahead=1)
    with Ranks(config, 1, state, override) as ranks:
        ranks.run()
    [only] = audits(config)
    assert (only.faults, only.reached, only.steps.size, only.lost) == ({}, 40, 40, 4)


def test_dropped_last_steps_are_not_missing(config: Path) -> None:
    override = "pipelines.train.batch={size: 16, drop_last: true}"
    with Ranks(config, 1, None, override) as ranks:
        ranks.run()
    assert list(map(str, audits(config))) == ["train epoch 0: 48 of 60 samples; each exactly once"]


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"index": 3}\n')
    with pytest.raises(ValueError, match=r"audit: needs files that run\.audit names, got no line of one"):
        read_lines([tmp_path / "x.jsonl"])
