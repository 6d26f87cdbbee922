"""A Lightning trainer on a DataModule: fit, validate, test and predict; killed and resumed at any step; ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integrations.killing import make_data, run, steps, weights_equal

pytest.importorskip("lightning", reason="lightning is not installed")

SCRIPT = Path(__file__).with_name("lightning_script.py")
EPOCHS = 3
STEPS = 8
"""In an epoch of 30 photographs in batches of 4."""


def interrupted(folder: Path, kill_at: int, *options: str, epochs: int = EPOCHS) -> list[dict[str, Any]]:
    """The steps up to the last checkpoint of a run that is killed, and those of the run that goes on."""
    run(SCRIPT, folder, folder / "killed.jsonl", str(epochs), *options, kill_at=kill_at)
    run(SCRIPT, folder, folder / "resumed.jsonl", str(epochs), "resume", *options)
    killed, resumed = steps(folder / "killed.jsonl"), steps(folder / "resumed.jsonl")
    done = [(one["epoch"], one["step"]) for one in killed]
    first = resumed[0]["epoch"], resumed[0]["step"]
    kept = done.index(first) if first in done else len(done)
    return killed[:kept] + resumed


@pytest.mark.parametrize(
    ("kill_at", "options"),
    [(3, ()), (8, ()), (9, ()), (13, ()), (7, ("limit=5",)), (8, ("every=8",)), (11, ("limit=5", "every=5"))],
)
def test_a_killed_run_goes_on_with_the_next_step(kill_at: int, options: tuple[str, ...], tmp_path: Path) -> None:
    make_data(tmp_path / "whole")
    make_data(tmp_path / "cut")
    run(SCRIPT, tmp_path / "whole", tmp_path / "whole" / "all.jsonl", str(EPOCHS), *options)
    expected = steps(tmp_path / "whole" / "all.jsonl")
    assert interrupted(tmp_path / "cut", kill_at, *options) == expected
    assert [one["of_loader"] for one in expected] == [one["epoch"] for one in expected]
    assert weights_equal(tmp_path / "whole" / "all.pt", tmp_path / "cut" / "resumed.pt")
