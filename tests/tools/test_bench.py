"""Benchmarks: real measurements of a few milliseconds, the columns of a results file, a chart."""

from __future__ import annotations

import csv
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuflow.cli import main
from gpuflow.errors import GpuflowError
from gpuflow.tools import bench
from tests.datasets import deadline, make_photos, write_config

DESIGN = ["arm", "workload", "metric", "value", "unit", "low", "high", "repeats"]
DESIGN += ["machine", "versions", "commit", "date"]


@pytest.fixture(autouse=True)
def _in_time() -> Iterator[None]:
    with deadline(100):
        yield


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("bench")
    make_photos(root / "photos", classes=2, each=8)
    stages = [{"decode": {}}, {"random_resized_crop": {"size": 24}}, {"normalize": {}}]
    return write_config(root / "x.yaml", root / "photos", train=stages, val=stages)


def job(config: Path, arm: str, **changes: object) -> bench.Job:
    values = {"arm": arm, "path": str(config), "overrides": (), "pipeline": "train", "workers": 1, "seconds": 0.2}
    return bench.Job(**{**values, "warm_up": 0.1, **changes})  # type: ignore[arg-type]


def test_columns_are_those_of_the_design() -> None:
    assert bench.COLUMNS == DESIGN


@pytest.mark.parametrize("arm", bench.ARMS)
def test_every_arm_yields_batches(arm: str, config: Path) -> None:
    """Each in a new process, as in a benchmark: one of them forks workers."""
    (rates,) = bench.measure([job(config, arm)], repeats=1).values()
    assert len(rates) == 1
    assert rates[0] > 0


@pytest.mark.parametrize("batch", ["{size: 64}", "{global: 4}"])
def test_other_loaders_make_the_same_batches(batch: str, config: Path) -> None:
    """Also where the source does not fill one, and where the file gives the batch of all ranks."""
    (rates,) = bench.measure(
        [job(config, "dataloader", overrides=(f"pipelines.train.batch={batch}",))], repeats=1
    ).values()
    assert rates[0] > 0


def test_arms_take_turns(config: Path) -> None:
    turns: list[str] = []
    fast = tmp_arm(config)
    jobs = [job(config, f"{fast}:{name}") for name in ("one", "two")]
    rates = bench.measure(jobs, repeats=3, progress=lambda done, rate: turns.append(done.arm[-3:]))
    assert turns == ["one", "two", "two", "one", "one", "two"]
    assert [len(rates[j]) for j in jobs] == [3, 3]


def tmp_arm(config: Path) -> Path:
    path = config.with_name("arms.py")
    path.write_text("import itertools\ndef one(job): return itertools.repeat(1)\ntwo = one\n")
    return path


def test_a_measurement_that_fails_shows_why(config: Path) -> None:
    with pytest.raises(GpuflowError) as caught:
        bench.measure([job(config, "gpuflow", pipeline="vall")], repeats=1)
    first, *rest = str(caught.value).splitlines()
    assert first == "bench: gpuflow with 1 worker(s) failed:"
    assert rest and "has no pipeline 'vall'" in rest[0], "and no traceback"


def test_a_rate_counts_items_after_the_warm_up() -> None:
    class Clocked:
        """Hands over 2 items every 5 ms, the first hundred times faster."""

        def __iter__(self) -> Iterator[int]:
            import time

            while True:
                time.sleep(0.005)
                yield 2

    rate = bench.rate(Clocked(), warm_up=0.05, seconds=0.3)
    assert 40 < rate <= 400


def test_a_row_has_the_median_and_the_spread() -> None:
    row = bench.row("gpuflow", "x train", "images_per_s", [10.0, 30.0, 20.0], "images/s")
    assert set(row) == set(DESIGN)
    assert (row["value"], row["low"], row["high"], row["repeats"]) == ("20", "10", "30", 3)
    assert bench.row("a", "b", "c", [12345.678], "d")["value"] == "12346"
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", row["date"])
    assert re.fullmatch(r"\d+ cores of .+, \d+ GiB", row["machine"])
    assert re.fullmatch(r"python \S+ torch \S+ torchvision \S+ spdl \S+ opencv \S+", row["versions"])


def test_results_are_written_in_the_order_of_the_columns(tmp_path: Path) -> None:
    path = tmp_path / "new" / "results.csv"
    bench.write_results(path, [bench.row("a", "w", "m", [1.0], "u")])
    header, line = path.read_text().splitlines()
    assert header == ",".join(DESIGN)
    assert line.startswith("a,w,m,1,u,1,1,1,")


def test_the_command_writes_a_table_and_a_chart(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    arguments = ["--workers", "1,2", "--against", "", "--seconds", "0.2", "--repeats", "1", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["gpuflow", "bench", str(config), *arguments])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code in (None, 0)
    with (out / "worker_scaling.csv").open(newline="") as file:
        reader = csv.DictReader(file)
        rows = list(reader)
        assert reader.fieldnames == DESIGN
    assert [(row["arm"], row["workload"], row["metric"], row["repeats"]) for row in rows] == [
        ("gpuflow", f"x train; batch=4; workers={count}", "images_per_s", "1") for count in (1, 2)
    ]
    assert all(0 < float(row["low"]) <= float(row["value"]) <= float(row["high"]) for row in rows)
    assert (out / "worker_scaling.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (out / "worker_scaling.svg").read_text()[:1000]
    printed = capsys.readouterr().out
    for suffix in ("csv", "png", "svg"):
        assert f"wrote {out / 'worker_scaling'}.{suffix}" in printed
