"""A LightningDataModule of the pipelines of one file: ranks and device from the trainer, state in its checkpoints.

PreemptionCheckpoint is the callback that saves such a checkpoint after a scheduler's signal.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from gpuflow.config import Config, read_config
from gpuflow.errors import MissingExtra, StateError
from gpuflow.integrations import LoaderAdapter
from gpuflow.loader.assemble import build_loader, open_whole
from gpuflow.loader.batch import Batch
from gpuflow.loader.loader import Loader
from gpuflow.runtime.preemption import Preemption
from gpuflow.runtime.threads import cpu_quota, share_of_cores
from gpuflow.sources import Source
from gpuflow.vocabulary import stage_table

try:
    from lightning.pytorch import Callback, LightningDataModule
except ImportError:
    try:
        from pytorch_lightning import Callback, LightningDataModule
    except ImportError as error:
        raise MissingExtra("the DataModule", "lightning", "lightning") from error


class DataModule(LightningDataModule):  # type: ignore[misc, unused-ignore]
    """The pipelines of a YAML file for a Lightning `Trainer`.

    Rank, number of ranks and device are the trainer's. Each epoch is the trainer's `current_epoch`, and a checkpoint
    of the trainer holds the training loader's state, also within an epoch: `fit(..., ckpt_path=...)` goes on with the
    next batch. The batches are already on the device. With the trainer's `overfit_batches` each epoch has the first
    batches of epoch 0.

    Args:
        config: the YAML file.
        train, val, test, predict: the pipelines for the trainer's four loops. Without a pipeline `val` there is no
            validation.
        overrides: dotted assignments such as `run.threads=8`.

    Raises:
        ConfigError: the file, with every located problem.
    """

    def __init__(
        self,
        config: str | Path,
        *,
        train: str = "train",
        val: str = "val",
        test: str = "test",
        predict: str = "predict",
        overrides: Sequence[str] = (),
    ) -> None:
        super().__init__()
        self._config = read_config(config, stage_table(), overrides)
        self._names = {"fit": train, "validate": val, "test": test, "predict": predict}
        self._whole: Source | None = None
        self._loaders: dict[str, EpochLoader] = {}

    def train_dataloader(self) -> EpochLoader:
        return self._loader("fit")

    def val_dataloader(self) -> EpochLoader | list[EpochLoader]:
        return self._loader("validate") if self._names["validate"] in self._config.pipelines else []

    def test_dataloader(self) -> EpochLoader:
        return self._loader("test")

    def predict_dataloader(self) -> EpochLoader:
        return self._loader("predict")

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Return a loader's batch as it is, with its indices and fields, where it is on the device already."""
        if isinstance(batch, Batch) and batch.indices.device == device:
            return batch
        return super().transfer_batch_to_device(batch, device, dataloader_idx)

    def teardown(self, stage: str = "") -> None:
        """End the loaders' threads. The trainer calls this after each of `fit`, `validate`, `test` and `predict`."""
        self._whole = None
        while self._loaders:
            self._loaders.popitem()[1].close()

    def on_exception(self, exception: BaseException) -> None:
        self.teardown()

    def _loader(self, loop: str) -> EpochLoader:
        if loop not in self._loaders:
            trainer = self.trainer
            if self._whole is None:
                self._whole = open_whole(self._config)
            device = trainer.strategy.root_device if trainer is not None else None
            loader = build_loader(
                _of_rank(self._config, trainer.num_devices if trainer is not None else 1),
                self._names[loop],
                rank=trainer.global_rank if trainer is not None else 0,
                world_size=trainer.world_size if trainer is not None else 1,
                device=device if device is not None and device.type == "cuda" else None,
                whole=self._whole,
            )
            self._loaders[loop] = EpochLoader(
                loader,
                lambda: None if trainer is None else trainer.current_epoch,
                repeats=trainer is not None and trainer.overfit_batches > 0,
            )
        return self._loaders[loop]


class PreemptionCheckpoint(Callback):  # type: ignore[misc, unused-ignore]
    """After a SIGTERM or SIGUSR1 to any rank, write a checkpoint after the training step, and exit 75 on all ranks.

    While `fit` trains, it takes the place of Lightning's own handlers of both signals, also in a Slurm job.

    path: where the checkpoint is written, for the `ckpt_path` of the next `fit`.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = path

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._preemption = Preemption().__enter__()  # when `fit` ends, Lightning sets the handlers of before it

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if self._preemption.requested():
            trainer.save_checkpoint(self._path)
            sys.exit(os.EX_TEMPFAIL)


class EpochLoader(LoaderAdapter):
    """A `Loader` whose epoch is the trainer's: each `for` runs the epoch that `epoch` returns, from its start or from a
    restored position within it.

    `epoch` is called with the first batch. Lightning makes iterators earlier, more than once for an epoch, and before
    it has counted the epoch that a checkpoint completes.

    repeats: each `for` runs epoch 0 from its start instead.
    """

    def __init__(self, loader: Loader, epoch: Callable[[], int | None], *, repeats: bool = False) -> None:
        super().__init__(loader)
        self._epoch, self._repeats = epoch, repeats
        self._restored: Mapping[str, Any] = {}

    def __iter__(self) -> Iterator[Batch]:
        if self._repeats:
            self.loader.set_epoch(1)  # so that a position that was restored within epoch 0 is given up
            self.loader.set_epoch(0)
        elif (epoch := self._epoch()) is not None:
            if self._restored:
                self._require_equal_steps(epoch)
                self._restored = {}
            self.loader.set_epoch(epoch)
        yield from self.loader

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's state, and the samples of a step on all ranks."""
        return {**super().state_dict(), "samples_per_step": self.loader.samples_per_step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `Loader.load_state_dict`."""
        super().load_state_dict(state)
        self._restored = state

    def _require_equal_steps(self, epoch: int) -> None:
        """Refuse to continue within an epoch whose steps had other numbers of samples: the trainer counts steps."""
        state, current = self._restored, self.loader.samples_per_step
        saved = state.get("samples_per_step", current)
        if saved != current and state["position"] and state["epoch"] == epoch:
            raise StateError(
                f"the checkpoint is of the middle of an epoch whose steps have {saved} samples on all ranks, here they "
                f"have {current}, and Lightning counts steps; restore it with the same batch size and number of ranks, "
                "or restore a checkpoint of an epoch's end"
            )


def _of_rank(config: Config, ranks: int) -> Config:
    """Return `config` with this rank's share of the cores.

    It stays as it is if the file sets the threads, or torchrun says how many ranks the host has.
    """
    if config.run.threads != "auto" or "LOCAL_WORLD_SIZE" in os.environ:
        return config
    threads = share_of_cores(len(os.sched_getaffinity(0)), cpu_quota(), ranks)
    return dataclasses.replace(config, run=config.run.model_copy(update={"threads": threads}))
