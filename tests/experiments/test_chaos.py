"""experiments/chaos: its page names every round and metric, and its rows say what the rounds counted."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

from gpuflow.tools.bench import COLUMNS
from tests.chaos import rounds
from tests.chaos.rounds import ROUNDS

ROOT = Path(__file__).parents[2]
HERE = ROOT / "experiments" / "chaos"
RUN = runpy.run_path(str(HERE / "run.py"))


def done(name: str, seed: int, **report: float) -> Any:
    return RUN["Done"](name, seed, 1.5 + seed, report or None, "" if report else "exit code 1\nIt broke")


@pytest.mark.parametrize("name", ROUNDS)
def test_the_page_names_every_round(name: str) -> None:
    first_cells = [
        line.split("|")[1] for line in (HERE / "README.md").read_text().splitlines() if line.startswith("| ")
    ]
    assert name in {part.strip() for cell in first_cells for part in cell.split(",")}


def test_counts_are_added_up_and_latencies_are_not() -> None:
    rounds = [
        done("kills", 0, samples=10.0),
        done("kills", 1, samples=20.0),
        done("kills", 2),
        done("disk", 0, steps=6.0),
    ]
    found = {(row["arm"], row["metric"]): row for row in RUN["rows_of"](rounds, "1 minutes")}
    assert all(set(row) == set(COLUMNS) for row in found.values())
    values = {key: float(row["value"]) for key, row in found.items()}
    assert values["kills", "rounds"] == 3
    assert values["kills", "failures"] == 1
    assert values["kills", "samples"] == 30
    assert values["kills", "round_s"] == 2.5
    assert values["disk", "failures"] == 0
    (row,) = [
        one
        for one in RUN["rows_of"]([done("service", n, tp50_ms=n + 1.0) for n in range(3)], "")
        if "ms" in one["unit"]
    ]
    assert [float(row[key]) for key in ("low", "value", "high")] == [1, 2, 3]


def test_a_failure_says_how_to_replay_it() -> None:
    assert done("fuzz-tars", 7).replay == "python -m tests.chaos.rounds fuzz-tars 7"


@pytest.mark.slow
def test_rounds_run_and_are_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["rounds", "--list"])
    rounds.main()
    known = capsys.readouterr().out.split()
    assert known == list(ROUNDS)
    command = [str(HERE / "run.py"), "--minutes", "0", "--seed", "0", "--only", "fuzz-listings"]
    monkeypatch.setattr(sys, "argv", [*command, "--out", str(tmp_path)])
    monkeypatch.setitem(RUN["main"].__globals__, "names", lambda: known)
    with pytest.raises(SystemExit) as end:
        RUN["main"]()
    assert end.value.code == 0
    assert "1 rounds, 0 failed" in capsys.readouterr().out
    assert (tmp_path / "results.csv").read_text().startswith(",".join(COLUMNS))
    assert (tmp_path / "failures.log").read_text() == ""
