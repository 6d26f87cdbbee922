"""Loaders for the trainers of other libraries, and what these loaders have in common.

lightning.py    a LightningDataModule
accelerate.py   a loader that takes its rank, its device and its checkpoints from an Accelerator
timm.py         timm's `create_loader`
ray.py          a loader in each worker of Ray Train, checkpoints with its state, and `--on ray`
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpuflow.loader.loader import Loader
from gpuflow.sources import Source


class LoaderAdapter:
    """The methods of a `Loader` that trainers call, passed on to `loader`. Subclasses say how it is iterated."""

    def __init__(self, loader: Loader) -> None:
        self.loader = loader

    def __len__(self) -> int:
        return len(self.loader)

    @property
    def dataset(self) -> Source:
        return self.loader.dataset

    @property
    def batch_size(self) -> int:
        return self.loader.batch_size

    def state_dict(self) -> dict[str, Any]:
        return self.loader.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `Loader.load_state_dict`."""
        self.loader.load_state_dict(state)

    def set_epoch(self, epoch: int) -> None:
        """See `Loader.set_epoch`."""
        self.loader.set_epoch(epoch)

    def stats(self) -> dict[str, Any]:
        return self.loader.stats()

    def close(self) -> None:
        self.loader.close()
