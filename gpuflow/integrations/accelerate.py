"""A loader for Hugging Face Accelerate: rank and device from an Accelerator, state in what `save_state` writes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gpuflow
from gpuflow.integrations import LoaderAdapter
from gpuflow.loader.batch import Batch
from gpuflow.loader.loader import Loader

if TYPE_CHECKING:
    from accelerate import Accelerator
    from accelerate.state import GradientState


def load(
    accelerator: Accelerator, path: str | Path, name: str = "train", *, overrides: Sequence[str] = ()
) -> AccelerateLoader:
    """Load as `gpuflow.load`, for the process and device of an Accelerator, with the state in its checkpoints.

    `accelerator.prepare` returns the loader unchanged. `accelerator.load_state` sets it back to the next batch, so
    `skip_first_batches` is not needed: the next `for` continues within the epoch.

    Args:
        accelerator: the Accelerator. Objects are checkpointed in the order in which they were made.
        path: the YAML file.
        name: the pipeline.
        overrides: dotted assignments such as `run.threads=8`.

    Raises:
        ConfigError, SourceError: as `gpuflow.load`.
    """
    loader = gpuflow.load(
        path,
        name,
        rank=accelerator.process_index,
        world_size=accelerator.num_processes,
        device=accelerator.device if accelerator.device.type == "cuda" else None,
        overrides=overrides,
    )
    own = AccelerateLoader(loader, accelerator.gradient_state)
    accelerator.register_for_checkpointing(own)
    return own


class AccelerateLoader(LoaderAdapter):
    """A `Loader` that says to Accelerate when an epoch ends, for `accumulate`, and how many samples of the last step
    are not wrapped around, for `gather_for_metrics`.

    end_of_dataloader: whether the last batch was handed out. remainder: samples of all ranks in the last step, 0 if it
    is full; -1 between epochs.
    """

    def __init__(self, loader: Loader, state: GradientState) -> None:
        super().__init__(loader)
        self._state = state
        self.end_of_dataloader, self.remainder = False, -1

    def __iter__(self) -> Iterator[Batch]:
        loader = self.loader
        left = loader.steps_left
        samples_left = loader.samples_per_epoch - loader.upcoming_position
        self.end_of_dataloader = False
        self.remainder = -1 if loader.drop_last else samples_left % loader.samples_per_step
        self._state._add_dataloader(self)
        try:
            for batch in loader:
                self.end_of_dataloader = batch.step + 1 == left
                yield batch
                del batch  # so that its memory can be used again while the next one is awaited
        finally:
            self._state._remove_dataloader(self)
            self.end_of_dataloader, self.remainder = False, -1

    @property
    def total_batch_size(self) -> int:
        """Return the batch size of all processes."""
        return self.loader.samples_per_step

    @property
    def sampler(self) -> Any:
        """Raise AttributeError: there is none. `skip_first_batches` asks for it."""
        raise AttributeError(
            "a gpuflow loader has no sampler: skip_first_batches is not needed, because accelerator.load_state sets "
            "the loader back to the next batch; iterate the loader itself"
        )
