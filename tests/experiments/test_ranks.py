"""experiments/ranks: its arms leave parts of the loader out, its figures are those of all ranks, its log is resumed."""

from __future__ import annotations

import csv
import json
import math
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from gpuflow.execute.gpu.passes import passes_of
from gpuflow.execute.gpu.runner import GpuRunner
from gpuflow.pipeline.program import fold, trace
from gpuflow.pipeline.stage import Pipeline
from gpuflow.stages import Decode, RandomResizedCrop
from gpuflow.tools.bench import COLUMNS
from tests import images
from tests.datasets import make_photos
from tests.experiments.scripts import imported
from tests.host_stream import HostStream

ROOT = Path(__file__).parents[2]
HERE = ROOT / "experiments" / "ranks"
SCRIPTS = ("run", "one_rank")


@pytest.fixture(scope="module")
def scripts() -> Iterator[dict[str, Any]]:
    with imported(HERE, SCRIPTS) as modules:
        yield modules


@pytest.fixture
def run(scripts: dict[str, Any]) -> Any:
    return scripts["run"]


@pytest.fixture
def one_rank(scripts: dict[str, Any]) -> Any:
    return scripts["one_rank"]


def record(arm: str, repeat: int, workload: str = "2 GPUs", commit: str = "a", **metrics: float) -> dict[str, Any]:
    origin = {"machine": "here", "versions": "1", "commit": commit, "date": "2000-01-01"}
    return {"workload": workload, "arm": arm, "repeat": repeat, "metrics": metrics, **origin}


# --- the command line and what is missing -----------------------------------------------------------------------------


def test_arguments(run: Any) -> None:
    options = run.parsed(["--gpus", "1,2,4", "--arms", "gpuflow", "decoding only"])
    assert (options.gpus, options.arms, options.repeats) == ([1, 2, 4], ["gpuflow", "decoding only"], 5)
    assert run.parsed(["--device", "cpu"]).arms == list(run.ON_CPU)
    for wrong in (["--gpus", "0"], ["--gpus", "two"], ["--arms", "dali"], ["--repeats", "0"]):
        with pytest.raises(SystemExit):
            run.parsed(wrong)


def test_the_resident_batch_comes_first_and_the_others_in_both_orders(run: Any) -> None:
    missing = {(arm, repeat) for arm in ("resident", "gpuflow", "decoding only") for repeat in (0, 1)}
    assert run.turns(missing) == (
        (0, ("resident", "gpuflow", "decoding only")),
        (1, ("resident", "decoding only", "gpuflow")),
    )


def test_only_what_the_log_lacks_is_measured_and_the_resident_batch_with_it(run: Any) -> None:
    options = run.parsed(["--arms", "gpuflow", "busy interpreter", "--repeats", "2", "--photos", "some/web"])
    workload = run.workload_of(options, 2, "resnet18")
    assert workload == "2 GPUs; resnet18; web; batch=256 a rank"
    done = [record(arm, repeat, workload) for arm in ("resident", "gpuflow") for repeat in (0, 1)]
    job = run.job_of(options, 2, "resnet18", [*done, record("busy interpreter", 1, workload)], {})
    assert job.arms == ((0, ("resident", "busy interpreter")),)
    assert job.missing == {("busy interpreter", 0)}, "the figure of the resident batch is not written twice"
    assert run.job_of(options, 1, "resnet18", done, {}).missing == {
        (arm, repeat) for arm in ("resident", "gpuflow", "busy interpreter") for repeat in (0, 1)
    }, "another workload has nothing in the log"


# --- the log and its table --------------------------------------------------------------------------------------------


def test_rows_are_medians_over_the_repeats(run: Any) -> None:
    found = run.rows_of(
        [record("gpuflow", i, commit="ab"[i % 2], step_ratio=value) for i, value in enumerate([0.9, 0.7, 0.8])]
        + [record("resident", 0, step_ratio=1.0)]
    )
    assert all(set(row) == set(COLUMNS) for row in found)
    assert [(row["arm"], row["value"], row["low"], row["high"], row["repeats"]) for row in found] == [
        ("gpuflow", "0.8", "0.7", "0.9", 3),
        ("resident", "1", "1", "1", 1),
    ]
    assert (found[0]["commit"], found[0]["machine"], found[0]["unit"]) == ("a / b", "here", "ratio")


def test_rows_of_other_workloads_stay(run: Any, tmp_path: Path) -> None:
    table = tmp_path / "results.csv"
    run.write_table(table, [record("gpuflow", 0, name, step_ratio=0.5) for name in ("1 GPU", "2 GPUs")])
    run.write_table(table, [record("gpuflow", 0, step_ratio=0.9)])
    with table.open(newline="") as file:
        found = {row["workload"]: row["value"] for row in csv.DictReader(file)}
    assert found == {"1 GPU": "0.5", "2 GPUs": "0.9"}


def test_the_page_names_every_arm_and_metric_and_the_table_holds_no_others(run: Any) -> None:
    page = (HERE / "README.md").read_text()
    assert all(f"`{name}`" in page for name in [*run.ARMS, *run.UNITS])
    with (HERE / "results.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            assert row["arm"] in run.ARMS and run.UNITS[row["metric"]] == row["unit"], row


# --- figures ----------------------------------------------------------------------------------------------------------


def test_the_slowest_rank_counts(one_rank: Any) -> None:
    none = float("nan")
    ranks = [one_rank.Figures(100.0, 20.0, 25.0, 5.0, 0.0), one_rank.Figures(90.0, 22.0, 24.0, 7.0, 0.5)]
    assert one_rank.combined(ranks) == {
        "images_per_s": 180.0,
        "interval_ms": 22.0,
        "interval_p95_ms": 25.0,
        "call_ms": 6.0,
        "two_at_a_time": 0.25,
    }
    without_calls = one_rank.combined([one_rank.Figures(100.0, 20.0, 25.0, none, none)])
    assert set(without_calls) == {"images_per_s", "interval_ms", "interval_p95_ms"}


@pytest.mark.parametrize(
    ("spans", "share"),
    [
        ([(0, 1), (1, 2), (3, 4)], 0),
        ([(0, 2), (1, 3), (4, 5), (6, 7)], 0.5),
        ([(0, 9), (1, 2), (3, 4), (10, 11)], 0.75),
        ([(3, 4), (0, 9)], 1),
    ],
)
def test_share_of_calls_that_overlap_another(spans: list[tuple[float, float]], share: float, one_rank: Any) -> None:
    calls = one_rank.Calls()
    calls.spans = spans
    assert calls.overlapping == share


def test_duration_of_calls(one_rank: Any) -> None:
    calls = one_rank.Calls()
    assert math.isnan(calls.median_ms) and math.isnan(calls.overlapping)
    calls.spans = [(0.0, 0.004), (1.0, 1.006), (2.0, 2.005)]
    assert calls.median_ms == pytest.approx(5.0)


# --- arms -------------------------------------------------------------------------------------------------------------


class Library:
    """Replaces libnvjpeg: decodes nothing and counts the calls."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            self.calls[name] += 1
            return 0

        return call


@pytest.fixture
def library() -> Library:
    return Library()


@pytest.fixture
def runner(library: Library) -> GpuRunner:
    pipeline = Pipeline("train", (Decode(), RandomResizedCrop(size=8)))
    program = fold(pipeline, trace(pipeline))
    passes = passes_of(program)
    assert not isinstance(passes, str), passes
    substitutes: Any = (HostStream(), library)
    return GpuRunner(program, [passes], *substitutes, backend="cuda", decode_bytes=1 << 20)


CPU = torch.device("cpu")
FILES = [images.jpeg(images.photo(30 + i, 44, seed=i)) for i in range(3)]


def test_every_part_that_an_arm_leaves_out_is_left_out_of_the_runner_alone(
    one_rank: Any, runner: GpuRunner, library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    resamplings: list[Any] = []
    kernel = "gpuflow.execute.gpu.device_passes.resample_all"
    monkeypatch.setattr(kernel, lambda *arguments, **options: resamplings.append(arguments))
    calls, decode = one_rank.Calls(), one_rank.NvjpegDecoder.decode
    done: dict[str, tuple[int, int, int]] = {}
    with calls.recorded():
        for name in ("gpuflow", "gpuflow without decoding", "gpuflow without decoding and sampling", "gpuflow"):
            library.calls.clear()
            resamplings.clear()
            calls.spans.clear()
            with (
                one_rank.left_out(one_rank.ARMS[name].without),
                one_rank.decoding(one_rank.one_chunk(runner, FILES, CPU), CPU) as decode_one_more,
            ):
                decode_one_more()
                decode_one_more()
            done[name] = library.calls["decode"], len(resamplings), len(calls.spans)
    assert done == {
        "gpuflow": (2, 2, 2),
        "gpuflow without decoding": (0, 2, 0),
        "gpuflow without decoding and sampling": (0, 0, 0),
    }
    assert one_rank.NvjpegDecoder.decode is decode, "all is as it was"


def test_an_error_of_the_thread_that_decodes_is_raised(one_rank: Any, runner: GpuRunner) -> None:
    with (
        pytest.raises(AssertionError, match="decode"),
        one_rank.left_out(["decoding", "resampling"]),
        one_rank.decoding(one_rank.one_chunk(runner, [*FILES, b"no image"], CPU), CPU) as decode_one_more,
    ):
        decode_one_more()


def test_a_thread_computes_until_the_arm_ends(one_rank: Any) -> None:
    before = threading.active_count()
    with one_rank.computing(0.3) as before_step:
        before_step()
        assert threading.active_count() == before + 1
    assert threading.active_count() == before


# --- a run ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_two_ranks_are_measured_on_a_cpu_and_not_again(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    make_photos(tmp_path / "photos")
    command = [str(HERE / "run.py"), "--gpus", "2", "--device", "cpu", "--models", "shufflenet_v2_x0_5"]
    command += ["--batch", "2", "--repeats", "1", "--seconds", "0.01", "--warm-up", "1", "--resume"]
    command += ["--arms", "gpuflow", "--photos", str(tmp_path / "photos"), "--out", str(tmp_path / "out")]
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit) as end:
        run.main()
    assert end.value.code == 0
    assert "2 GPUs; shufflenet_v2_x0_5; photos; batch=2 a rank: gpuflow" in capfd.readouterr().out
    with pytest.raises(SystemExit) as end:
        run.main()
    assert end.value.code == 0
    assert capfd.readouterr().out == "2 GPUs; shufflenet_v2_x0_5; photos; batch=2 a rank: is measured already\n"
    lines = (tmp_path / "out" / "measurements.jsonl").read_text().splitlines()
    assert [json.loads(line)["arm"] for line in lines] == ["resident", "gpuflow"]
    with (tmp_path / "out" / "results.csv").open(newline="") as file:
        found = {(row["arm"], row["metric"]) for row in csv.DictReader(file)}
    metrics = ("images_per_s", "step_ratio", "interval_ms", "interval_p95_ms")
    assert found == {(arm, metric) for arm in ("resident", "gpuflow") for metric in metrics}


def test_a_line_of_steps_has_means_medians_and_95th_percentiles() -> None:
    with imported(HERE, ["one_rank", "steps"]) as modules:
        one = modules["steps"].Steps(12_345.6, working=[20.0, 20.0, 22.0], waiting=[0.0, 0.0, 3.0], getting=[1.0] * 3)
    assert str(one) == (
        " 12,346 images/s; GPU works 20.7 (p50 20.0, p95 21.8); GPU waits 1.0 (p50 0.0, p95 2.7); "
        "loop waits 1.0 (p50 1.0, p95 1.0) ms"
    )
