"""experiments/migrate, whole: each pair of scripts trains or tests a model, before and after the move."""

from __future__ import annotations

import csv
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from gpuflow.tools.bench import COLUMNS
from tests.experiments.scripts import imported

pytestmark = pytest.mark.skipif(find_spec("torchpipe") is None, reason="the served model runs in torchpipe")

HERE = Path(__file__).parents[2] / "experiments" / "migrate"


def test_every_pair_runs_and_the_served_model_is_the_validated_one(tmp_path: Path) -> None:
    results = tmp_path / "results.csv"
    with imported(HERE, ["run"]) as modules:
        run: Any = modules["run"]
        run.main(["--photos", "75", "--results", str(results)])
    with results.open(newline="") as file:
        reader = csv.DictReader(file)
        rows = list(reader)
    assert reader.fieldnames == COLUMNS
    found = {(row["workload"].partition(",")[0], row["arm"], row["metric"]): float(row["value"]) for row in rows}
    assert {name for name, _, _ in found} == set(run.PAIRS)
    assert {arm for _, arm, _ in found} == {"before", "after"}
    served, validated = found["one_graph", "after", "loss"], found["validation", "after", "loss"]
    assert served == pytest.approx(validated, abs=1e-3), "the graph gives what validation saw"
    assert found["two_parts", "after", "loss"] == pytest.approx(validated, abs=1e-3)
