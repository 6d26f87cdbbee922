"""experiments/service: its commands start, its arms measure, its rows are kept and compared."""

from __future__ import annotations

import argparse
import csv
import runpy
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gpuflow.tools.bench import COLUMNS
from tests import images
from tests.datasets import make_photos
from tests.experiments.scripts import imported

ROOT = Path(__file__).parents[2]
HERE = ROOT / "experiments" / "service"
RUN, MEASURE, PLAIN = (runpy.run_path(str(HERE / f"{name}.py")) for name in ("run", "measure", "plain"))
TABLES = runpy.run_path(str(HERE / "tables.py"))


SIZES = ("500x375", "1080x1080")


def row(workload: str, arm: str, metric: str, value: float, machine: str = "here") -> dict[str, Any]:
    blank = dict.fromkeys(COLUMNS, "")
    return {**blank, "workload": workload, "arm": arm, "metric": metric, "value": str(value), "machine": machine}


def test_help() -> None:
    command = [sys.executable, "experiments/service/run.py", "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert "the same engine" in done.stdout
    assert {"--device", "--cores", "--repeats"} <= set(done.stdout.replace("[", " ").split())


def test_every_arm_of_the_run_is_one_that_measures() -> None:
    tables = (*RUN["ARMS"].values(), *RUN["LIST_ARMS"].values(), *RUN["BOUNDS"].values(), RUN["PROCESS_ARMS"])
    assert {arm.name for arms in tables for arm in RUN["expanded"](arms, None)} == set(MEASURE["ARMS"])


def test_the_plain_way_gives_the_engine_what_torchvision_gives_within_its_resize() -> None:
    """OpenCV resizes without antialiasing, but a flat image has nothing to filter."""
    seen: list[torch.Tensor] = []

    class Engine:
        def run(self, batch: torch.Tensor) -> torch.Tensor:
            seen.append(batch)
            return batch.mean(dim=(2, 3))

    flat = np.full((300, 400, 3), (200, 100, 50), np.uint8)
    logits = PLAIN["Plain"](Engine(), torch.device("cpu"))(images.png(flat))
    assert seen[0].shape == (1, 3, 224, 224)
    expected = (torch.tensor([200, 100, 50]) / 255 - torch.tensor(PLAIN["MEAN"])) / torch.tensor(PLAIN["STD"])
    torch.testing.assert_close(logits, expected)


def test_the_plain_way_takes_several_images_one_by_one_or_as_batches() -> None:
    counts: list[int] = []

    class Engine:
        batch = 2

        def run(self, batch: torch.Tensor) -> torch.Tensor:
            counts.append(len(batch))
            return batch.mean(dim=(2, 3))

    plain = PLAIN["Plain"](Engine(), torch.device("cpu"))
    files = [images.png(np.full((300, 400, 3), (value, 0, 0), np.uint8)) for value in (0, 100, 200)]
    one_by_one = plain.each(files)
    assert counts == [1, 1, 1]
    assert torch.equal(torch.stack(one_by_one), torch.stack(plain.batch(files)))
    assert counts == [1, 1, 1, 2, 1]


def test_requests_of_several_images() -> None:
    assert MEASURE["requests_of"]([b"a", b"b", b"c"], 1) == [b"a", b"b", b"c"]
    assert MEASURE["requests_of"]([b"a", b"b", b"c"], 2) == [(b"a", b"b"), (b"b", b"c"), (b"c", b"a")]
    assert MEASURE["requests_of"]([b"a", b"b"], 5)[1] == (b"b", b"a", b"b", b"a", b"b")


def test_one_arm_for_each_number_of_processes_where_the_cpu_decodes() -> None:
    arms = RUN["expanded"](("plain", "graph-cpu", "graph-gpu"), "0,auto")
    assert [(arm.name, arm.title, arm.overrides) for arm in arms] == [
        ("plain", "plain", ()),
        ("graph-cpu", "graph-cpu processes=0", ("run.processes=0",)),
        ("graph-cpu", "graph-cpu processes=auto", ("run.processes=auto",)),
        ("graph-gpu", "graph-gpu", ()),
    ]
    assert [arm.title for arm in RUN["expanded"](("graph-cpu",), None)] == ["graph-cpu"]
    (eager,) = RUN["expanded"](("plain-eager",), None)
    assert (eager.name, eager.title, eager.overrides) == ("plain", "plain-eager", ("serve.model.cuda_graphs=false",))


def test_a_run_that_was_cut_off_continues(tmp_path: Path) -> None:
    """Only what is missing is measured, and the medians are those of all rounds."""
    measured: list[str] = []

    def run(job: dict[str, Any]) -> dict[str, Any]:
        if len(measured) == 3:
            raise KeyboardInterrupt
        measured.append(job["arm"])
        return {"device": "cpu", "figures": {"500x375; clients=1": {"qps": float(len(measured))}}}

    module = runpy.run_path(str(HERE / "run.py"))
    names = module["Rounds"].measure.__globals__
    names["run"] = run
    out = tmp_path / "out.csv"
    settings = {"set": [], "device": "cpu", "clients": "1", "seconds": 1.0, "cores": 2, "tries": 1, "images": "1"}
    options = argparse.Namespace(**settings, out=out, label="", resume=False)
    models = [module["Model"](name="m", overrides=(), photographs=("p",))]
    arms = module["expanded"](("plain", "graph-cpu"), None)
    rounds = module["Rounds"](options, models)
    rounds.measure("round 0", arms)
    with pytest.raises(KeyboardInterrupt):
        rounds.measure("round 1", arms)
    assert measured == ["plain", "graph-cpu", "plain"]
    with out.with_suffix(".rounds.jsonl").open("a") as log:
        log.write('{"key": "round 1: ')  # cut off while it wrote
    options.resume = True
    for resumed in (lambda job: {"device": "cpu", "figures": {"500x375; clients=1": {"qps": 9.0}}}, None):
        names["run"] = resumed  # None: what was measured after the cut-off is in the log, too
        rounds = module["Rounds"](options, models)
        for number in range(2):
            rounds.measure(f"round {number}", arms)
        rows = {(row["arm"], row["low"], row["high"], row["repeats"]) for row in rounds.rows()}
        assert rows == {("plain", "1", "3", 2), ("graph-cpu", "2", "9", 2)}


def test_a_closed_loop() -> None:
    """Three clients of something that takes 10 ms."""
    figures = MEASURE["closed_loop"](lambda data: time.sleep(0.01), [b"a", b"b"], clients=3, seconds=0.4)
    assert 10 <= figures["tp50_ms"] <= figures["tp90_ms"] <= figures["tp99_ms"]
    assert figures["qps"] <= 300
    assert 0.5 * 3000 / figures["mean_ms"] < figures["qps"] < 1.5 * 3000 / figures["mean_ms"], "Little's law"
    assert figures["rss_mb"] > 50
    assert figures["cpu_percent"] < 90, "it sleeps"


def test_what_a_clients_thread_does_once_is_not_measured() -> None:
    known = threading.local()

    def predict(data: bytes) -> None:
        time.sleep(0.01 if hasattr(known, "before") else 0.6)
        known.before = True

    assert MEASURE["closed_loop"](predict, [b"a"], clients=2, seconds=0.2)["tp99_ms"] < 300


def test_a_failure_ends_the_measurement() -> None:
    def fail(data: bytes) -> None:
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        MEASURE["closed_loop"](fail, [b"a"], clients=2, seconds=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("arm", ["graph-cpu", "plain-batch", "engine only"])
def test_an_arm_measures(arm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """graph-cpu in a separate process, as run.py starts it; the others in this one, which has imported torch."""
    monkeypatch.chdir(tmp_path)
    make_photos(tmp_path / "photos", classes=1, each=2)
    job = {
        "arm": arm,
        "config": str(RUN["CONFIG"]),
        "overrides": [f"serve.model.file={RUN['make_checkpoint']('squeezenet1_1')}", "serve.model.batch=2"],
        "device": "cpu",
        "photographs": [str(tmp_path / "photos" / "class_0")],
        "clients": [1, 2],
        "seconds": 1.0,  # a busy core answers three images in more than 0.2 s
        "cores": 1,
        "images": [3],
    }
    if arm == "graph-cpu":
        answer = RUN["run"](job)
        assert answer["device"] == "cpu"
        found = answer["figures"]
        assert all(figures["cpu_percent"] < 130 for figures in found.values()), "one core, and a warm-up's tail"
        assert all(1 <= figures["mean_batch"] <= 2 for figures in found.values())
    else:
        given = {key: tuple(value) if isinstance(value, list) else value for key, value in job.items()}
        with imported(HERE, ["plain"]):
            found = dict(MEASURE["ARMS"][arm](MEASURE["Job"](**given)))
    if arm == "engine only":
        assert list(found) == ["batch=1", "batch=2"]
        assert all(figures["bound_per_s"] > 0 for figures in found.values())
    else:
        assert list(found) == ["class_0; images=3; clients=1", "class_0; images=3; clients=2"]
        assert all(figures["images_per_s"] == 3 * figures["qps"] > 0 for figures in found.values())


def test_results_of_other_machines_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "results.csv"
    RUN["write"](path, [row("w", "plain", "qps", 1), row("w", "plain", "qps", 2, machine="there")])
    RUN["write"](path, [row("w", "plain", "qps", 3), row("v", "plain", "qps", 4)])
    with path.open(newline="") as file:
        kept = [(entry["workload"], entry["machine"], entry["value"]) for entry in csv.DictReader(file)]
    assert kept == [("w", "there", "2"), ("w", "here", "3"), ("v", "here", "4")]


def test_arms_are_compared_with_the_plain_way() -> None:
    figures = {
        "plain": {"qps": 50, "tp50_ms": 20, "tp99_ms": 80},
        "graph-cpu": {"qps": 100, "tp50_ms": 10, "tp99_ms": 20},
    }
    rows = [row("w", arm, metric, value) for arm, metrics in figures.items() for metric, value in metrics.items()]
    [line] = RUN["compare"](rows)
    assert " ".join(line.split()) == "w graph-cpu throughput 2.00x TP50 0.50x TP99 0.25x of plain"


def test_tables_of_the_readme_are_those_of_results_csv() -> None:
    with (HERE / "results.csv").open(newline="") as file:
        expected = TABLES["tables"](csv.DictReader(file))
    _, shown, _ = TABLES["between"]((HERE / "README.md").read_text())
    assert shown.strip() == expected, "run python experiments/service/tables.py"


def test_a_table_has_a_row_for_each_arm_and_the_gain_over_the_earlier_arms() -> None:
    rates = {"graph-gpu": 300, "graph-cpu": 200, "plain": 100, "engine only": 900}
    rows = [row(f"m, 3 cores; {size}; clients=5", arm, "qps", qps) for size in SIZES for arm, qps in rates.items()]
    rows.append(row(f"m, 3 cores; {SIZES[0]}; clients=5", "graph-gpu", "gpu_percent", 31.4))
    rows.append(row("m, 3 cores; batch=8", "engine only", "bound_per_s", 900))
    _, _, titles, _, *lines = TABLES["tables"](rows).splitlines()
    assert titles == "| photographs | clients | arm | QPS | GPU, % | times plain | times graph-cpu |"
    assert lines[:3] == [
        "| 500x375 | 5 | plain | 100.0 | - | - | - |",
        "| 500x375 | 5 | graph-cpu | 200.0 | - | 2.00 | - |",
        "| 500x375 | 5 | graph-gpu | 300.0 | 31 | 3.00 | 1.50 |",
    ]
    assert [line.split()[1] for line in lines] == ["500x375"] * 3 + ["1080x1080"] * 3


def test_a_readme_without_a_place_for_the_tables_is_refused() -> None:
    with pytest.raises(ValueError, match="once each"):
        TABLES["between"](TABLES["BEGIN"])
