"""`train.tensorboard`: TensorBoard reads each epoch once, also of a run that was resumed."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from gpuflow.config import read_config
from gpuflow.stages import STAGES
from gpuflow.training.trainer import Trainer, TrainerEvents
from tests.datasets import make_photos, write_config

pytest.importorskip("tensorboard")
pytestmark = pytest.mark.integrations


def test_tensorboard_has_each_epoch_once(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    make_photos(tmp_path / "photos", classes=3, each=4)
    fit = {"model": "squeezenet1_1", "epochs": 2, "lr": 0.01, "out": str(tmp_path / "run"), "tensorboard": True}
    stages = [{"decode": {}}, {"center_crop": {"size": 32}}, {"normalize": {}}]
    config = read_config(
        write_config(tmp_path / "x.yaml", tmp_path / "photos", train=stages, val=stages, fit=fit), STAGES
    )
    Trainer(config, device="cpu").run(TrainerEvents(), max_steps=3)
    Trainer(config, device="cpu", resume=True).run(TrainerEvents())
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    rows = list(csv.DictReader((tmp_path / "run" / "metrics.csv").read_text().splitlines()))
    found = [(event.step, event.value) for event in events.Scalars("val/loss")]
    assert found == [(int(row["epoch"]), pytest.approx(float(row["val_loss"]))) for row in rows]
