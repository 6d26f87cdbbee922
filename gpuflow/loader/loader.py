"""The iterator that users hold: length, epochs, state, statistics, shutdown."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any, Self

from gpuflow.errors import LoaderError, StateError
from gpuflow.loader.batch import Batch
from gpuflow.loader.iterator import EpochIterator, Progress
from gpuflow.loader.lowering import Feed
from gpuflow.loader.plan import LoaderPlan
from gpuflow.pipeline.stage import Pipeline
from gpuflow.runtime.metrics import Stats
from gpuflow.sources import Source

__all__ = ["Loader"]


class Loader:
    """Iterates batches of one pipeline, epoch after epoch: `for images, labels in loader`.

    Each `for` runs one epoch and the next `for` the next one, also after a break; `set_epoch` says otherwise. It
    needs neither start nor stop. `close`, or leaving a `with` block, ends its threads; so does collection.

    Made by `gpuflow.load`; not for two threads at once.
    """

    def __init__(self, plan: LoaderPlan) -> None:
        self._plan, self._steps = plan, plan.steps
        self._feed = Feed(plan)
        self._stats = Stats(*self._feed.meters)
        self._progress = Progress()
        self._next_epoch, self._next_start = 0, 0
        self._active: weakref.ref[EpochIterator] | None = None
        self._finalizer = weakref.finalize(self, self._feed.close)

    # --- what it is ---------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Steps of a whole epoch, the same on every rank."""
        return len(self._steps)

    @property
    def dataset(self) -> Source:
        """The source: its length is the number of samples, `classes` its class names."""
        return self._plan.source

    @property
    def classes(self) -> tuple[str, ...]:
        """Class names; a label is a place in this tuple."""
        return self._plan.source.classes

    @property
    def batch_size(self) -> int:
        """Samples a rank takes in a step."""
        return self._steps.batch_size

    @property
    def pipeline(self) -> Pipeline:
        """The stages, as a value."""
        return self._plan.program.pipeline

    @property
    def preprocessing(self) -> str:
        """The fingerprint of the pipeline's stages and all their parameters, 16 hex digits."""
        return self._plan.program.pipeline.fingerprint

    def __repr__(self) -> str:
        s, pipeline = self._steps, self._plan.program.pipeline
        return (
            f"<gpuflow.Loader {pipeline!r}; {s.size:,} samples in {len(s):,} steps of {s.batch_size}, "
            f"rank {s.rank} of {s.world_size}, on {self._plan.device}, next epoch {self._next_epoch}"
            f"{'' if self._finalizer.alive else ', closed'}>"
        )

    # --- iteration ----------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Batch]:
        if not self._finalizer.alive:
            raise LoaderError("this loader is closed; make another one with gpuflow.load")
        self._end_active("another one began")
        epoch, start = self._next_epoch, self._next_start
        self._next_epoch, self._next_start = epoch + 1, 0
        self._progress.move_to(epoch, start)
        self._stats.start_epoch(epoch)
        steps = dataclasses.replace(self._steps, start=start)
        iterator = EpochIterator(self._plan, self._feed, self._stats, self._progress, epoch, steps)
        self._active = weakref.ref(iterator)
        return iterator

    def set_epoch(self, epoch: int) -> None:
        """Make the next `for` run this epoch. A position restored within the same epoch is kept."""
        if epoch < 0:
            raise ValueError(f"epoch must be >= 0, got {epoch}")
        if epoch != self._next_epoch:
            self._next_epoch, self._next_start = epoch, 0
            active = self._active() if self._active is not None else None
            if active is None or active.ended:
                self._progress.move_to(epoch, 0)

    def _end_active(self, reason: str) -> None:
        active = self._active() if self._active is not None else None
        if active is not None:
            active.end(reason)

    # --- state --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Where training stands, as a small JSON value. It counts the batches that the consumer got, no others."""
        epoch, position = self._progress.epoch, self._progress.position
        seed, identity = self._plan.seed, self._plan.identity
        return {"version": 1, "seed": seed, "epoch": epoch, "position": position, "config": identity}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on exactly where `state` was taken, on any number of ranks and threads.

        Raises:
            StateError: the state is of another seed, source or preprocessing, or no state at all.
        """
        try:
            version, seed, epoch, position = (int(state[key]) for key in ("version", "seed", "epoch", "position"))
            config = str(state["config"])
        except (KeyError, TypeError, ValueError) as error:
            raise StateError(f"not a loader's state: {error!r}; pass what state_dict() returned") from error
        if version != 1:
            raise StateError(f"the state is of version {version}, this gpuflow reads version 1; upgrade gpuflow")
        if seed != self._plan.seed or config != self._plan.identity:
            raise StateError(
                f"the state was taken with seed {seed} and configuration {config}, this loader has seed "
                f"{self._plan.seed} and {self._plan.identity}; restore the source, stages and seed it was taken with, "
                f"or start a new epoch with set_epoch({epoch + 1})"
            )
        if not 0 <= position <= self._steps.size:
            raise StateError(f"the state's position {position} is outside the epoch's {self._steps.size} samples")
        self._end_active("a state was loaded")
        self._next_epoch, self._next_start = epoch, position
        self._progress.move_to(epoch, position)

    # --- statistics and shutdown ----------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """What the stages did in this or the last epoch, the consumer's wait, the number of bad samples so far."""
        plan, extra = self._plan, dict[str, Any]()
        if plan.gpu is not None:
            extra = {"engine_images": plan.gpu.engine_images, "cpu_images": plan.gpu.cpu_images}
        if plan.share is not None:
            extra["cpu_share"] = round(plan.share.part, 4)
        if workers := self._feed.workers.counts():
            extra["processes"] = workers
        return {**self._stats.read(), **extra, "bad": plan.bad.count, "bad_distinct": plan.bad.distinct}

    def close(self) -> None:
        """End the threads and free the memory. Batches that the loop already has stay valid."""
        self._end_active("the loader was closed")
        self._feed.wait()
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
