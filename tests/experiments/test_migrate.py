"""experiments/migrate: each script has its pair, only what loads differs, and the results are tidy."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import gpuflow
from gpuflow.config import read_config
from gpuflow.stages import STAGES
from gpuflow.tools.bench import COLUMNS
from tests.experiments.scripts import imported

HERE = Path(__file__).parents[2] / "experiments" / "migrate"


@pytest.fixture(scope="module")
def run() -> Iterator[Any]:
    with imported(HERE, ["run"]) as modules:
        yield modules["run"]


def test_every_script_has_its_pair(run: Any) -> None:
    scripts = {path.name for path in HERE.glob("*.py")} - {"run.py", "loop.py"}
    assert scripts == {f"{pair}_{arm}.py" for pair in run.PAIRS for arm in ("before", "after")}
    for name in sorted(scripts):
        assert ("import gpuflow" in (HERE / name).read_text()) == name.endswith("_after.py")


def test_the_eight_steps_are_marked_and_the_file_is_checked() -> None:
    script = (HERE / "one_gpu_after.py").read_text()
    assert [step for step in range(1, 9) if f"step {step}" in script] == list(range(1, 9))
    config = read_config(HERE / "photos.yaml", STAGES)
    assert set(config.pipelines) == {"train", "val"} and "serve" in config.programs


@pytest.mark.parametrize("pair", ["one_gpu", "dp", "ddp", "validation"])
def test_only_what_loads_differs(pair: str) -> None:
    """The model, the optimizer and the loop of a script stay; `reset` and the checkpoint may be added."""
    before, after = ((HERE / f"{pair}_{arm}.py").read_text() for arm in ("before", "after"))
    kept = before[before.index("\nmodel = ") :].splitlines()
    lines = after.splitlines()
    assert [line for line in kept if line not in lines] == []


def test_the_results_are_tidy_and_both_arms_train(run: Any) -> None:
    with (HERE / "results.csv").open(newline="") as file:
        reader = csv.DictReader(file)
        rows = list(reader)
    assert reader.fieldnames == COLUMNS
    figures = {(row["workload"].partition(",")[0], row["arm"], row["metric"]): float(row["value"]) for row in rows}
    assert len(figures) == len(rows) == len(run.PAIRS) * 2 * 3
    for pair in run.PAIRS:
        for arm in ("before", "after"):
            assert figures[pair, arm, "accuracy"] > 5 / 15, "guessing is right for 1 in 15"
    assert figures["one_graph", "after", "loss"] == pytest.approx(figures["validation", "after", "loss"], abs=1e-3)


def test_the_scripts_names_are_public() -> None:
    used = {word for path in HERE.glob("*_after.py") for word in path.read_text().replace("(", " ").split()}
    names = {word.removeprefix("gpuflow.").rstrip(",)") for word in used if word.startswith("gpuflow.")}
    assert names - {"serve", "serve.load"} <= set(gpuflow.__all__)
