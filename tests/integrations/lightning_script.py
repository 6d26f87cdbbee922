"""Trains with Lightning; checkpoints every second step. Arguments: a folder with x.yaml, the log, epochs, and more.

limit=N: the trainer's limit_train_batches. every=N: steps between checkpoints. devices=N: processes. resume: from
the last checkpoint. preempt: checkpoint after a scheduler's signal, and from that one if there is one.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

from gpuflow.integrations.lightning import DataModule, PreemptionCheckpoint
from tests.integrations.killing import Log

folder, log, epochs = Path(sys.argv[1]), Log(Path(sys.argv[2])), int(sys.argv[3])
options = dict(option.partition("=")[::2] for option in sys.argv[4:])


class Model(lightning.LightningModule):  # type: ignore[misc, unused-ignore]
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(48, 3))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        images, labels = batch
        log.write(epoch=self.current_epoch, of_loader=batch.epoch, step=batch_idx, indices=batch.indices.tolist())
        return nn.functional.cross_entropy(self.layers(images), labels)

    def on_train_batch_end(self, *_: Any) -> None:
        log.kill_if_due()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        images, labels = batch
        self.log("loss", nn.functional.cross_entropy(self.layers(images), labels))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


lightning.seed_everything(0, verbose=False)
model = Model()
checkpoints = ModelCheckpoint(folder / "checkpoints", every_n_train_steps=int(options.get("every", 2)), save_last=True)
preempted = folder / "preempted.ckpt"
trainer = lightning.Trainer(
    max_epochs=epochs,
    limit_train_batches=int(options["limit"]) if "limit" in options else 1.0,
    accelerator="cpu",
    devices=int(options.get("devices", 1)),
    strategy="ddp" if "devices" in options else "auto",
    logger=False,
    callbacks=[checkpoints, *([PreemptionCheckpoint(preempted)] if "preempt" in options else [])],
    enable_progress_bar=False,
    enable_model_summary=False,
    default_root_dir=folder,
)
data = DataModule(folder / "x.yaml")
last = folder / "checkpoints" / "last.ckpt" if "resume" in options else preempted if preempted.exists() else None
before = signal.getsignal(signal.SIGUSR1)
trainer.fit(model, data, ckpt_path=last)
assert signal.getsignal(signal.SIGUSR1) == before
torch.save(model.state_dict(), Path(sys.argv[2]).with_suffix(".pt"))
