"""The law of elastic training, the same for every launcher: along the checkpoints that survive, each sample counts
once, and steps that are made again see the same pixels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

from tests.datasets import make_photos
from tests.experiments.scripts import imported

RESUME = Path(__file__).parents[1] / "experiments" / "resume"
EPOCHS, PHOTOS = 2, 96


@contextmanager
def resume_scripts() -> Iterator[Any]:
    """The modules of experiments/resume, as attributes."""
    with imported(RESUME, ["law", "arms", "training", "launch", "run"]) as modules:
        yield SimpleNamespace(**modules)


def require_each_sample_once(
    scripts: Any, launch: Callable[[Any], None], folder: Path, *, kill: Literal["worker", "node"], kill_at: int
) -> None:
    """Train on two ranks, one of which is killed after a step. On one node less, one rank goes on."""
    make_photos(folder / "photos", classes=2, each=PHOTOS // 2)
    job = scripts.training.Job(
        arm="gpuflow",
        data=str(folder / "photos"),
        folder=str(folder / "run"),
        epochs=EPOCHS,
        kill=kill,
        kill_at=kill_at,
    )
    launch(job)
    found = scripts.law.outcome(folder / "run" / "logs", samples=PHOTOS, epochs=EPOCHS)
    assert (found.missing, found.repeated, found.changed) == (0, 0, 0), found
    after_checkpoint = kill_at % scripts.training.EVERY
    assert found.replayed == after_checkpoint * scripts.arms.BATCH
    assert found.ranks == ((2, 1) if kill == "node" else (2, 2)), found
