"""Which rank a loader is, and whether the ranks of a real process group load the same samples."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import DistNetworkError

import gpuflow
from gpuflow.loader import agreement
from tests.datasets import VAL, MemorySource, deadline, jpeg, loader_of, make_photos, nothing_left_behind, write_config
from tests.loader.rank_scenarios import RANKS

ROOT = Path(__file__).parents[2]
PHOTOS = 12
Reports = list[dict[str, Any]]


@pytest.fixture(autouse=True)
def _in_time() -> Iterator[None]:
    with deadline(150):
        yield


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Reports:
    """What two processes of one Gloo group reported, none of which has RANK or WORLD_SIZE in its environment."""
    directory = tmp_path_factory.mktemp("ranks")
    make_photos(directory / "photos", classes=3, each=PHOTOS // 3)
    write_config(directory / "same.yaml", directory / "photos")
    write_config(directory / "alone.yaml", directory / "photos", train=VAL)
    for rank in range(RANKS):
        own = directory / f"own_{rank}"
        make_photos(own / "others", classes=3, each=PHOTOS // 3)
        write_config(own / "x.yaml", own / "others", seed=3)  # as no loader before
        copy, named = directory / f"copy_{rank}", directory / f"named_{rank}"
        make_photos(copy / f"copy_{rank}", classes=3, each=PHOTOS // 3)
        write_config(copy / "x.yaml", copy / f"copy_{rank}")
        make_photos(named / f"photos_{rank}", classes=3, each=PHOTOS // 3 + 1 + rank)
        write_config(named / "x.yaml", named / f"photos_{rank}")
    (directory / "own_1" / "others" / "class_2" / "late.jpg").write_bytes(jpeg(2, 99))
    environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.loader.rank_scenarios", str(rank), str(directory)],
            cwd=ROOT,
            env={**environment, "OMP_NUM_THREADS": "1"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(RANKS)
    ]
    try:
        errors = [process.communicate(timeout=120)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [0] * RANKS, "\n".join(errors)
    return [json.loads((directory / f"{rank}.json").read_text()) for rank in range(RANKS)]


def each(reports: Reports, scenario: str) -> list[Any]:
    return [report[scenario] for report in reports]


# --- which rank -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scenario", ["spawned", "validation", "same_environment", "part_of_an_environment"])
def test_ranks_that_no_launcher_named_share_the_epoch(scenario: str, reports: Reports) -> None:
    found = each(reports, scenario)
    assert [one["rank"] for one in found] == [[0, 2], [1, 2]]
    assert sorted(found[0]["samples"] + found[1]["samples"]) == list(range(PHOTOS))
    assert [one["warnings"] for one in found] == [[], []]


def test_ranks_share_what_they_find_out_about_files(reports: Reports) -> None:
    """It is asked for once, and has one place for each sample."""
    shared = [10, 11] + [0] * (PHOTOS - 2)
    assert each(reports, "checks") == [{"found": shared}] * RANKS


def test_a_loader_goes_on_after_the_group_was_destroyed(reports: Reports) -> None:
    """As for a last validation."""
    found = each(reports, "without_the_group")
    assert sorted(found[0]["samples"] + found[1]["samples"]) == list(range(PHOTOS))


def test_arguments_win_over_the_group(reports: Reports) -> None:
    for rank, one in enumerate(each(reports, "subgroup")):
        assert (one["rank"], sorted(one["samples"]), one["warnings"]) == ([0, 1], list(range(PHOTOS)), []), rank
    assert [one["rank"] for one in each(reports, "one_argument")] == [[0, 3], [1, 3]]
    assert [one["rank"] for one in each(reports, "other_environment_and_arguments")] == [[0, 2], [1, 2]]


def test_only_a_rank_outside_the_world_is_an_error(reports: Reports) -> None:
    for one in each(reports, "outside"):
        assert one["text"] == "rank must be within [0, world_size), got rank 2 of 2; give both, or neither"


def test_an_environment_that_contradicts_the_group(reports: Reports) -> None:
    texts = [one["text"].splitlines() for one in each(reports, "other_environment")]
    action = "unset it, or pass rank= and world_size="
    size = f"environment variable WORLD_SIZE must be 2 as in the initialised process group, got 1; {action}"
    rank = f"environment variable RANK must be 1 as in the initialised process group, got 0; {action}"
    assert texts == [[size], [rank, size]]
    assert [one["error"] for one in each(reports, "other_environment")] == ["ConfigError"] * 2


def test_a_loader_that_was_made_before_the_group(reports: Reports) -> None:
    assert [one["text"] for one in each(reports, "early")] == [
        f"this loader is rank 0 of 1, and this process is rank {rank} of 2 of a process group that was initialised "
        "later; make the loader after init_process_group, or pass rank= and world_size="
        for rank in range(2)
    ]


def test_without_a_group_nothing_is_compared(tmp_path: Path) -> None:
    make_photos(tmp_path / "photos")
    config = write_config(tmp_path / "x.yaml", tmp_path / "photos")
    with nothing_left_behind(), gpuflow.load(config, rank=1, world_size=2) as loader:
        assert len(list(loader)) == 3


# --- the same samples -------------------------------------------------------------------------------------------------


def test_ranks_with_other_files_are_told_so_before_the_first_batch(reports: Reports) -> None:
    first, second = each(reports, "other_files")
    assert "samples" not in first and "samples" not in second
    assert first["error"] == second["error"] == "LoaderError"
    assert first["text"] == second["text"]
    start, zero, one, end = first["text"].split(": rank", 1)[0], *_facts(first["text"])
    assert start == "the ranks differ in what they load as 'train'"
    assert zero.startswith(" 0: 12 samples with the fingerprint ")
    assert one.startswith(" 1: 13 samples with the fingerprint ")
    assert " in 2 steps of 4, seed 3, stages and order " in zero
    assert end == " give every rank the same files, labels, configuration and gpuflow, then start all of them again"


def test_folders_may_have_other_names(reports: Reports) -> None:
    found = each(reports, "other_names")
    assert sorted(found[0]["samples"] + found[1]["samples"]) == list(range(PHOTOS))
    assert [(one["warnings"], one["seconds"] < 8) for one in found] == [([], True)] * RANKS, "neither waits to the end"


def test_ranks_with_other_files_in_folders_of_other_names_are_refused(reports: Reports) -> None:
    for one in each(reports, "other_files_and_names"):
        assert (one["error"], one["warnings"]) == ("LoaderError", [])
        start, zero, other = one["text"].partition("; give")[0].replace("; rank", ": rank").split(": rank")
        assert start == "the ranks differ in what they load as 'val'"
        assert zero.startswith(" 0: 15 samples with the fingerprint ")
        assert other.startswith(" 1: 18 samples with the fingerprint ")


def _facts(text: str) -> list[str]:
    return [part.removeprefix(" rank") for part in text.split("as 'train':")[1].split(";")]


def test_a_subgroup_is_not_compared(reports: Reports) -> None:
    assert [len(one["samples"]) for one in each(reports, "other_files_of_a_subgroup")] == [PHOTOS, PHOTOS + 1]


@pytest.mark.parametrize(
    "scenario", ["other_seed", "other_order", "other_steps", "other_stages", "other_split", "other_version"]
)
def test_a_rank_with_another_configuration_is_told_so_at_once(scenario: str, reports: Reports) -> None:
    """The other one may have made such a loader before, and need not wait then."""
    one = reports[1][scenario]
    zero, own, _ = _facts(one["text"])
    assert zero.removeprefix(" 0:") != own.removeprefix(" 1:") and one["seconds"] < 5
    assert ", seed 0, " in zero and (", seed 1, " if scenario == "other_seed" else ", seed 0, ") in own


def test_ranks_that_begin_at_different_places_are_told_so(reports: Reports) -> None:
    """The one that comes first cannot know, and is ended by its launcher."""
    first, second = each(reports, "other_state")
    assert len(first["samples"]) == 4
    assert second["text"] == (
        "the ranks differ in where they begin: rank 0 began epoch 1 at sample 4, rank 1 begins epoch 0 at sample 0; "
        "load the same state and set the same epoch on every rank, and pass rank= and world_size= to a loader that not "
        "all ranks make"
    )
    assert [len(one["samples"]) for one in each(reports, "same_state")] == [4, 4]


def test_restarted_ranks_are_not_compared_with_those_before(reports: Reports) -> None:
    assert [len(one["samples"]) for one in each(reports, "restarted")] == [4, 4]


def test_the_warning_says_for_how_long_it_waited() -> None:
    plan: Any = SimpleNamespace(
        program=SimpleNamespace(pipeline=SimpleNamespace(name="train")),
        world_size=2,
        timeout_seconds=0.05,
    )
    store: Any = SimpleNamespace(check=lambda keys: False)
    one = agreement.RankAgreement(plan)
    one._own, one._number = "4 samples", 1
    with pytest.warns(UserWarning, match=r"ranks 0, 1 of 2 did not make the loader 'train' within 0\.05 s; pass rank="):
        one._compare(store)


def test_a_loader_that_only_one_rank_makes_goes_on_with_a_warning(reports: Reports) -> None:
    alone = reports[0]["alone"]
    assert len(alone["samples"]) == 8
    assert alone["warnings"] == [
        "it is not known whether all ranks load the same samples: rank 1 of 2 did not make the loader 'train' within "
        "0.3 s; pass rank= and world_size= to a loader that not all ranks make"
    ]


def test_a_rank_may_make_one_loader_more_of_the_same_samples(reports: Reports) -> None:
    again = reports[0]["again_alone"]
    assert (len(again["samples"]), again["warnings"]) == (8, [])


def test_loaders_may_be_made_and_iterated_in_any_order(reports: Reports) -> None:
    """Neither rank waits for the other: each has announced both loaders when it iterates the first."""
    for name in "train", "val":
        assert sorted(index for one in each(reports, "any_order") for index in one[name]) == list(range(PHOTOS))


def test_a_rank_that_begins_later_still_compares_itself(reports: Reports) -> None:
    first, second = reports[0]["first"], reports[1]["second"]
    assert len(first["samples"]) == 8
    assert len(first["warnings"]) == 1
    assert second["text"].startswith("the ranks differ in what they load as 'val': rank 0: 12 samples")


class GoneStore:
    """Stands where the store of a process group does whose rank 0 has ended."""

    def set(self, key: str, value: str) -> None:
        raise DistNetworkError("connection reset by peer\nand a stack of frames")


def test_a_store_that_is_gone_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "group_ranks", lambda: (1, 2))
    monkeypatch.setattr(agreement, "_store", GoneStore)
    with loader_of(MemorySource.of(12), rank=1, world_size=2) as loader:
        with pytest.warns(UserWarning, match="not known") as caught:
            assert len(list(loader)) == 2
        assert [str(warning.message) for warning in caught] == [
            "it is not known whether all ranks load the same samples: the process group's store does not answer: "
            "connection reset by peer"
        ]
        assert len(list(loader)) == 2, "once is enough"
