"""Benchmarks: real measurements of a few milliseconds, the columns of a results file, a chart."""

from __future__ import annotations

import csv
import io
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from rich.console import Console

from gpuflow.cli import main
from gpuflow.config import read_config
from gpuflow.errors import GpuflowError, LoaderError
from gpuflow.stages import STAGES
from gpuflow.tools import bench
from tests.datasets import deadline, make_photos, write_config
from tests.forking import Interpreter

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


OTHER_BATCHES = ("{size: 64}", "{global: 4}")
"""Larger than the source, and of all ranks."""
ARMS_PROGRAM = """
import json, os, sys, traceback
from gpuflow.tools import bench

for fields in json.loads(sys.argv[1]):
    try:
        found = bench.rate_of(fields)[0]
    except Exception:
        found = traceback.format_exc()
    print(json.dumps(found), flush=True)
os._exit(0)
"""


@pytest.fixture(scope="module")
def found_rates(config: Path, interpreter: Interpreter) -> dict[str, Any]:
    """By arm: its rate, or why there is none. All in one process.

    Those that fork workers come first, before the process has threads.
    """
    arms = sorted(bench.ARMS, key=lambda arm: not arm.startswith("dataloader"))
    return dict(zip(arms, rates_in_new_process([job(config, arm) for arm in arms], interpreter), strict=True))


@pytest.fixture(scope="module")
def rates_of_batches(config: Path, interpreter: Interpreter) -> dict[str, Any]:
    """By batch: the rate of a DataLoader, or why there is none."""
    jobs = [job(config, "dataloader", overrides=(f"pipelines.train.batch={batch}",)) for batch in OTHER_BATCHES]
    return dict(zip(OTHER_BATCHES, rates_in_new_process(jobs, interpreter), strict=True))


def rates_in_new_process(jobs: list[bench.Job], interpreter: Interpreter) -> list[Any]:
    done = interpreter.run(ARMS_PROGRAM, json.dumps([asdict(one) for one in jobs]), seconds=100)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("arm", bench.ARMS)
def test_every_arm_yields_batches(arm: str, found_rates: dict[str, Any]) -> None:
    found = found_rates[arm]
    assert isinstance(found, float), found
    assert found > 0


@pytest.mark.parametrize("batch", OTHER_BATCHES)
def test_other_loaders_make_the_same_batches(batch: str, rates_of_batches: dict[str, Any]) -> None:
    """Also where the source does not fill one, and where the file gives the batch of all ranks."""
    found = rates_of_batches[batch]
    assert isinstance(found, float), found
    assert found > 0


def test_arms_take_turns(config: Path) -> None:
    turns: list[str] = []
    fast = tmp_arm(config)
    jobs = [job(config, f"{fast}:{name}") for name in ("one", "two")]
    rates = bench.measure(jobs, repeats=3, progress=lambda done, rate: turns.append(done.arm[-3:]))
    assert turns == ["one", "two", "two", "one", "one", "two"]
    assert [len(rates[j]) for j in jobs] == [3, 3]


def test_busy_machine_is_reported(config: Path) -> None:
    shares: dict[str, float] = {}
    arm = f"{tmp_arm(config)}:one"
    count = 1 + (psutil.cpu_count() or 1) // 5
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        bench.measure([job(config, arm)], repeats=1, busy=lambda job, share: shares.update({job.arm: share}))
    finally:
        for process in others:
            process.kill()
            process.wait(10)
    assert 0.1 < shares[arm] <= 1


def test_a_measurement_leaves_no_process_behind(config: Path) -> None:
    """It would use the cores during the next one."""
    marker = config.with_name("left_behind.py")
    marker.write_text("import time\ntime.sleep(60)\n")
    arm = config.with_name("starting.py")
    arm.write_text(
        "import itertools, subprocess, sys\n"
        f"def one(job): subprocess.Popen([sys.executable, {str(marker)!r}]); return itertools.repeat(1)\n"
    )
    bench.measure([job(config, f"{arm}:one")], repeats=1)
    running = [process for process in psutil.process_iter(["cmdline", "status"]) if process.info["cmdline"]]
    left = [process for process in running if str(marker) in process.info["cmdline"]]
    assert [process for process in left if process.info["status"] != psutil.STATUS_ZOMBIE] == []


def test_share_of_others_is_of_all_cores_without_ones_own() -> None:
    begin = bench.CpuTimes(clock=10.0, busy=100.0, own=2.0)
    end = bench.CpuTimes(clock=14.0, busy=110.0, own=8.0)
    assert bench.share_of_others(begin, end, cores=4) == 0.25
    counted_later = end._replace(own=13.0)
    assert bench.share_of_others(begin, counted_later, cores=4) == 0.0


WORKLOADS = {
    "pipeline": ("random_resized_crop", 4, "float32"),
    "decode": ("resize", 1, "uint8"),
    "batch": ("resize", 4, "uint8"),
    "normalize": ("resize", 4, "float32"),
    "transfer": ("resize", 4, "float32"),
}


@pytest.mark.parametrize("workload", bench.WORKLOADS)
def test_workload_is_the_same_for_all_arms(workload: str, config: Path) -> None:
    """A workload changes the pipeline of the file, which every arm reads. It keeps the size, and how decode is set."""
    second, size, dtype = WORKLOADS[workload]
    asked = job(config, "gpuflow", workload=workload, overrides=("pipelines.train.stages.decode.max_scans=7",))
    found = bench._config_of(asked, "run.threads=3")
    stages = found.programs["train"].pipeline.stages
    assert (stages[1].stage_name, found.pipelines["train"].batch.size, found.run.threads) == (second, size, 3)
    assert (stages[0].max_scans, found.programs["train"].result.shape) == (7, (24, 24, 3))  # type: ignore[attr-defined]
    assert found.programs["train"].result.dtype == dtype
    for pil in (True, False):
        image, _ = bench._Samples(asked, pil=pil, normalize=True)[0]
        assert (image.shape, str(image.dtype)) == ((3, 24, 24), f"torch.{dtype}")


def test_gpuflow_yields_batches_of_the_workload(config: Path) -> None:
    for workload in ("decode", "normalize"):
        batches = bench.ARMS["gpuflow"](job(config, "gpuflow", workload=workload))
        assert list(islice(batches, 2)) == [WORKLOADS[workload][1]] * 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_arms_copy_batches_to_the_gpu(config: Path, interpreter: Interpreter) -> None:
    jobs = [job(config, arm, workload="transfer") for arm in ("gpuflow", "dataloader", "dataloader-uint8", "spdl")]
    for one, found in zip(jobs, rates_in_new_process(jobs, interpreter), strict=True):
        assert isinstance(found, float), (one.arm, found)
        assert found > 0


@pytest.mark.parametrize(
    ("overrides", "workload", "text"),
    [
        (["pipelines.train.stages.2=flip"], "normalize", "needs a stage that normalizes, and train has none"),
        (
            ["pipelines.train={preset: torchpipe_cpu, height: 24, width: 24, stages: []}"],
            "batch",
            "needs gpuflow's decoder, and train begins with preset",
        ),
    ],
)
def test_workloads_that_a_pipeline_cannot_have(overrides: list[str], workload: str, text: str, config: Path) -> None:
    found = read_config(config, STAGES, overrides)
    assert bench.workload_problem(found, "train", workload).startswith(text)
    assert bench.workload_problem(found, "train", "pipeline") == ""


def test_table_has_the_ratio_of_gpuflow_to_each_other_arm(config: Path) -> None:
    rates = {
        job(config, "gpuflow"): [1000.0, 1200.0, 1100.0],
        job(config, "spdl"): [275.0],
        job(config, "gpuflow", workers=2): [2000.0],
        job(config, "spdl", workers=2): [500.0],
    }
    figures = bench.figures(rates, {job(config, "spdl", workers=2): 0.34})
    printed = Console(width=200, file=io.StringIO())
    printed.print(bench.table(figures))
    lines = [line.split() for line in printed.file.getvalue().splitlines()]  # type: ignore[attr-defined]
    assert lines[1:] == [
        ["1", "gpuflow", "1,100", "1,000", "1,200"],
        ["1", "spdl", "275", "275", "275", "4.00"],
        ["2", "gpuflow", "2,000", "2,000", "2,000"],
        ["2", "spdl", "500", "500", "500", "4.00", "34%"],
    ]
    assert bench.table(bench.figures(rates, {})).columns[-1].header == "gpuflow / arm"
    assert [(one.ratio, one.other_processes) for one in figures] == [(1, None), (4, None), (1, None), (4, 0.34)]


def tmp_arm(config: Path) -> Path:
    path = config.with_name("arms.py")
    path.write_text("import itertools\ndef one(job): return itertools.repeat(1)\ntwo = one\n")
    return path


def test_a_measurement_that_fails_shows_why(config: Path) -> None:
    arm = config.with_name("failing.py")
    arm.write_text("from gpuflow.errors import GpuflowError\ndef one(job): raise GpuflowError('no such pipeline')\n")
    with pytest.raises(GpuflowError) as caught:
        bench.measure([job(config, f"{arm}:one")], repeats=1)
    assert str(caught.value) == f"bench: {arm}:one with 1 worker(s) failed:\nno such pipeline", "and no traceback"


def test_other_loaders_take_another_sample_for_a_bad_one(tmp_path: Path) -> None:
    """As gpuflow's own does; where all are bad, the message says so."""
    files = make_photos(tmp_path / "photos", classes=1, each=3)
    stages = [{"decode": {}}, {"random_resized_crop": {"size": 24}}, {"normalize": {}}]
    config = write_config(tmp_path / "x.yaml", tmp_path / "photos", train=stages, val=stages)
    files[0].write_bytes(b"no image")
    files[1].write_bytes(files[1].read_bytes()[:100])
    samples = bench._Samples(job(config, "dataloader"), pil=True, normalize=True)
    assert [samples[i][0].shape for i in range(3)] == [(3, 24, 24)] * 3
    files[2].write_bytes(b"")
    with pytest.raises(LoaderError, match=r"^100 samples in a row are bad; gpuflow scan lists them; the last one: "):
        samples[1]


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


def test_a_log_drops_a_line_that_was_written_in_part(tmp_path: Path) -> None:
    path = tmp_path / "out" / "measurements.jsonl"
    log = bench.Log(path)
    assert log.records == []
    log.append({"repeat": 0})
    log.append({"repeat": 1})
    assert bench.Log(path).records == log.records == [{"repeat": 0}, {"repeat": 1}]
    path.write_text(path.read_text()[:-1])
    bench.Log(path).append({"repeat": 2})
    assert bench.Log(path).records == [{"repeat": 0}, {"repeat": 2}]


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


@pytest.mark.slow
def test_the_command_writes_a_table_and_a_chart(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    arguments = ["--workers", "1,2", "--against", "", "--seconds", "0.2", "--repeats", "1", "--out", str(out)]
    arguments += ["--workloads", "pipeline,batch"]
    monkeypatch.setattr(sys, "argv", ["gpuflow", "bench", str(config), *arguments])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code in (None, 0)
    with (out / "worker_scaling.csv").open(newline="") as file:
        reader = csv.DictReader(file)
        rows = list(reader)
        assert reader.fieldnames == DESIGN
    workloads = [f"{name}: photos; workers={count}" for name in ("pipeline train", "batch") for count in (1, 2)]
    assert [(row["arm"], row["workload"], row["metric"], row["repeats"]) for row in rows] == [
        ("gpuflow", workload, "images_per_s", "1") for workload in workloads
    ]
    assert all(0 < float(row["low"]) <= float(row["value"]) <= float(row["high"]) for row in rows)
    assert (out / "worker_scaling.png").read_bytes().startswith(b"\x89PNG")
    svg = (out / "worker_scaling.svg").read_text()
    printed = capsys.readouterr().out
    assert "<!-- decode, resize, batch: photos -->" in svg and "\nbatch: photos\nworkers" in printed
    for suffix in ("csv", "png", "svg"):
        assert f"wrote {out / 'worker_scaling'}.{suffix}" in printed
