"""Iterates batches, epoch after epoch, with state, statistics and shutdown: the `Loader` of users."""

from __future__ import annotations

import dataclasses
import json
import operator
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, Self

import numpy as np

from gpuflow.errors import LoaderError, StateError, reason_of
from gpuflow.loader.agreement import RankAgreement
from gpuflow.loader.batch import Assembly, Batch
from gpuflow.loader.iterator import BatchesInUse, EpochIterator, Progress
from gpuflow.loader.lowering import Feed
from gpuflow.loader.plan import LoaderPlan
from gpuflow.loader.sampler import MixedOrder, Order, Steps, WeightedOrder
from gpuflow.pipeline.rng import epoch_number, key64
from gpuflow.pipeline.stage import Pipeline
from gpuflow.pipeline.views import ViewsPipeline
from gpuflow.runtime.metrics import StageTotals, Stats
from gpuflow.sources import Source, cache_counts, fingerprint_of
from gpuflow.version import __version__

_EPOCH_BITS = 62
"""Of an epoch that may be named. Random keys hold it, and the one that follows it, in 64 bits."""


class LoaderTotals(NamedTuple):
    """Counts what a loader did since it was made. stages: by name, what each did and on how many threads."""

    epoch: int
    batches: int
    waited_s: float
    bad: int
    stages: dict[str, tuple[StageTotals, int]]


class Loader:
    """Iterates batches of one pipeline, epoch after epoch: `for images, labels in loader`.

    Each `for` runs one epoch and the next `for` the next one, also after a break; `set_epoch` says otherwise. It
    needs neither start nor stop. `close`, or leaving a `with` block, ends its threads; so does collection.

    Made by `gpuflow.load`; not for two threads at once.

    audited: whether `run.audit` lists what the next `for` delivers; false for batches that nothing is trained on.
    """

    audited = True

    def __init__(self, plan: LoaderPlan) -> None:
        self._plan, self._steps = plan, plan.steps
        self._feed = Feed(plan)
        self._stats = Stats(*self._feed.meters)
        self._progress, self._in_use = Progress(), BatchesInUse()
        self._active: Callable[[], EpochIterator | None] = lambda: None
        self._agreement = RankAgreement(plan)
        self._finalizer = weakref.finalize(self, self._feed.close)
        self._agreement.announce(self._shared_facts)

    # --- what it is ---------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Return the number of steps of a whole epoch, the same on every rank."""
        return len(self._steps)

    @property
    def upcoming_epoch(self) -> int:
        """Return the epoch that the next `for` runs."""
        return self._progress.upcoming[0]

    @property
    def upcoming_position(self) -> int:
        """Return the position of that epoch with which the next `for` begins; of a wrapped DataLoader the number of a
        step."""
        return self._progress.upcoming[1]

    @property
    def steps_left(self) -> int:
        """Return how many steps the next `for` makes: all of an epoch, or what a restored state leaves of it."""
        return self._steps.left(self._progress.upcoming[1])

    @property
    def drop_last(self) -> bool:
        """Return whether an incomplete last step is left out."""
        return self._plan.drop_last

    @property
    def dataset(self) -> Source:
        """Return the source: its length is the number of samples, `classes` its class names."""
        return self._plan.source

    @property
    def classes(self) -> tuple[str, ...]:
        """Return the names of the classes; a label is a place in this tuple."""
        return self._plan.source.classes

    @property
    def batch_size(self) -> int:
        """Return the number of samples that a rank takes in a step."""
        return self._steps.batch_size

    @property
    def rank(self) -> int:
        """Return which of the ranks this is, from 0."""
        return self._steps.rank

    @property
    def world_size(self) -> int:
        """Return how many ranks share each epoch."""
        return self._steps.world_size

    @property
    def samples_per_step(self) -> int:
        """Return the number of samples that all ranks together take in a step."""
        return self._steps.stride

    @property
    def samples_per_epoch(self) -> int:
        """Return the number of samples of an epoch on all ranks, of a wrapped DataLoader on this one.

        With weights or a mix it is not that of the source.
        """
        return self._steps.size

    @property
    def pipeline(self) -> Pipeline | ViewsPipeline:
        """Return the stages, or the views and their stages, as a value."""
        return self._plan.program.pipeline

    @property
    def preprocessing(self) -> str:
        """Return the fingerprint of the pipeline's stages and all their parameters, 16 hex digits."""
        return self._plan.program.pipeline.fingerprint

    def __reduce__(self) -> NoReturn:
        raise TypeError("a loader cannot be pickled or copied: it has threads; make it in the process that iterates it")

    def __repr__(self) -> str:
        s, pipeline = self._steps, self._plan.program.pipeline
        return (
            f"<gpuflow.Loader {pipeline!r}; {s.size:,} samples in {len(s):,} steps of {s.batch_size}, "
            f"rank {s.rank} of {s.world_size}, on {self._plan.device}, next epoch {self._progress.upcoming[0]}"
            f"{'' if self._finalizer.alive else ', closed'}>"
        )

    # --- iteration ----------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Batch]:
        if not self._finalizer.alive:
            raise LoaderError("this loader is closed; make another one with gpuflow.load")
        self._end_active("another one began")
        if self._agreement.check(self._shared_facts) and self._plan.gpu is not None:
            self._plan.gpu.share_checks(len(self._plan.source), self._agreement.memory)
        epoch, start = self._progress.upcoming
        self._agreement.begin(epoch, start)
        self._stats.start_epoch(epoch)
        steps = self._steps.begin(epoch, start)
        self._plan.bad.begin_epoch(len(steps) * self.batch_size)
        audit = None
        if self.audited and self._plan.audit is not None and isinstance(steps, Steps):
            audit = audit_log(self._plan.audit, self.pipeline.name, self._plan.order, steps, epoch)
        iterator = EpochIterator(
            self, self._plan, self._feed, self._stats, self._progress, self._in_use, epoch, steps, audit
        )
        self._progress.begin()
        self._active = weakref.ref(iterator)
        return iterator

    def set_epoch(self, epoch: int) -> None:
        """Make the next `for` run this epoch, as that of `torch.utils.data.DistributedSampler` does.

        An epoch that is running continues to its end. A position that was restored within the same epoch is kept.

        Raises:
            ValueError: it is not an integer, of Python, numpy or a tensor, within [0, 2**62).
        """
        epoch = epoch_number(epoch, _EPOCH_BITS)
        progress = self._progress
        if progress.begun and (active := self._active()) is not None and not active.ended:
            progress.following = epoch
        elif progress.begun or epoch != progress.epoch:
            progress.move_to(epoch)

    def reset(self) -> None:
        """End the running epoch, if there is one; the next `for` begins the next one.

        Scripts of other loaders call it after each epoch; nothing needs it.
        """
        self._end_active("the loader was reset")
        if self._progress.begun:
            self._progress.finish()

    def _end_active(self, reason: str) -> None:
        if (active := self._active()) is not None:
            active.end(reason)

    # --- state --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return where training stands, as a small JSON value. It counts the batches that the consumer got, no others.

        `epoch` and `position` are those of the next sample, `next_epoch` is the epoch after that one, `source` says
        which files there are.
        """
        plan, progress = self._plan, self._progress
        return {
            "version": 1,
            "seed": plan.seed,
            "epoch": progress.epoch,
            "position": progress.position,
            "next_epoch": progress.following,
            "config": plan.identity,
            "source": self._source_fingerprint,
        }

    @cached_property
    def _source_fingerprint(self) -> str:
        """Return the fingerprint of the files and labels, and of the weights where samples are drawn by weights."""
        own, drawn = fingerprint_of(self._plan.source), self._plan.order.digest
        return f"{key64(own, drawn):016x}" if drawn else own

    def _shared_facts(self) -> str:
        """Return what must be equal on all ranks."""
        s = self._steps
        return (
            f"{s.size:,} samples with the fingerprint {self._source_fingerprint} in {len(s):,} steps of "
            f"{s.batch_size}, seed {self._plan.seed}, stages and order {self._plan.identity}, gpuflow {__version__}"
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue exactly where `state` was taken, on any number of ranks and threads.

        The source may have moved to another folder, and must hold the same files with the same labels.

        Raises:
            StateError: the state is of another seed, source or preprocessing, or no state at all.
        """
        try:
            version, seed, epoch, position = (_whole(state, key) for key in ("version", "seed", "epoch", "position"))
            config, source, following = str(state["config"]), str(state["source"]), _whole(state, "next_epoch")
        except (KeyError, TypeError, ValueError) as error:
            fault = f"it has no {error}" if isinstance(error, KeyError) else error
            raise StateError(f"not a loader's state: {fault}; pass what state_dict() returned") from error
        if version != 1:
            raise StateError(f"the state is of version {version}, this gpuflow reads version 1; upgrade gpuflow")
        if seed != self._plan.seed or config != self._plan.identity:
            raise StateError(
                f"the state was taken with seed {seed} and configuration {config}, this loader has seed "
                f"{self._plan.seed} and {self._plan.identity}; restore the source, stages and seed it was taken with, "
                f"or start a new epoch with set_epoch({epoch + 1})"
            )
        if source != self._source_fingerprint:
            raise StateError(
                f"the state was taken with other files or labels: its source has the fingerprint {source}, this "
                f"loader's {self._source_fingerprint} ({self._steps.size} samples); restore the files it was taken "
                f"with, or start a new epoch with set_epoch({epoch + 1})"
            )
        if not 0 <= position <= self._steps.size:
            raise StateError(
                f"the state's position {position} is outside the epoch's {self._steps.size} samples; restore the files "
                f"that it was taken with, or start a new epoch with set_epoch({epoch + 1})"
            )
        self._end_active("a state was loaded")
        self._progress.move_to(epoch, position, following)

    # --- statistics and shutdown ----------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Return what the loader did in this or the last epoch.

        Returns:
            `epoch`, `batches`, `elapsed_s`; `consumer_wait_s`, seconds for which the loop waited for batches;
            `gpu_wait_share`, the part of its time for which the consumer's GPU waited, if that was measured.
            `stages`: by name `samples`, `images_per_s`, `busy_share` of the stage's threads, `cpu_s`, `threads`
            and `bytes` that it read.
            `bad` and `bad_distinct`: since the loader was made, how often a sample was bad, and how many samples were.
            `instances_left_out`: of the samples that it reads, because their annotations are incomplete.
            `turned_images`: how many images with boxes, masks or keypoints EXIF data turn, where `decode.orientation`
            is not set; since the loader was made.
            Where they apply: `engine_images` and `cpu_images`, decoded by the GPU and for it by the CPU; `cpu_share`;
            `cache`, what came from `source.cache` and from the server since the source was opened; `processes`, the
            state of the worker processes.
        """
        plan, extra = self._plan, dict[str, Any]()
        if plan.gpu is not None:
            extra = {"engine_images": plan.gpu.engine_images, "cpu_images": plan.gpu.cpu_images}
        if plan.share is not None:
            extra["cpu_share"] = round(plan.share.part, 4)
        if plan.targets is not None:
            extra["instances_left_out"] = plan.left_out
        if plan.turned is not None:
            extra["turned_images"] = plan.turned.count
        if (counts := cache_counts(plan.source)) is not None:
            extra["cache"] = counts
        if (workers := self._feed.decoder.workers) is not None:
            extra["processes"] = workers.counts()
        return {**self._stats.read(), **extra, "bad": plan.bad.count, "bad_distinct": plan.bad.distinct}

    def summary(self) -> str:
        """Describe this or the last epoch in a sentence: "the step waited 12% on data; decode is busy 98%".

        First the share of the time for which the loop (where a GPU decodes: the GPU) waited for batches, then the stage
        whose threads worked most. Empty before the first batch.
        """
        return self._stats.summary()

    def totals(self) -> LoaderTotals:
        """Return what the loader did since it was made, for counters that never decrease."""
        batches, waited = self._stats.totals()
        stages = {meter.name: (meter.totals, meter.threads) for meter in self._stats.meters}
        return LoaderTotals(self._stats.epoch, batches, waited, self._plan.bad.count, stages)

    def close(self) -> None:
        """End the threads and free the memory. Batches that the loop already has stay valid."""
        self._end_active("the loader was closed")
        self._feed.wait()
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _whole(state: Mapping[str, Any], key: str) -> int:
    """Return the number under a key of a state.

    Raises KeyError, TypeError or ValueError if it is none that `state_dict` could give.
    """
    value = operator.index(state[key])
    if "epoch" in key and not 0 <= value < 2 << _EPOCH_BITS:
        raise ValueError(f"{key} is {value}")
    return value


def audit_log(path: str, pipeline: str, order: Order, steps: Steps, epoch: int) -> Callable[[Assembly], None]:
    """Return what appends a line of JSON for each batch of a `for`, to a file of this rank: of rank 3 `audit.3.jsonl`.

    A line has `pipeline`, `epoch`, `begun` (the time of the `for`), `drawn` (whether a sample may come several times in
    an epoch) and the fields of `Steps`, such as `rank` and `start`. Of the step it has the number `step` within the
    `for`, `positions` [from, up to] and `indices`, the sample at each of these positions, -1 where a bad one was left
    out. `bad` are pairs: a place in `indices`, and the bad sample that belongs there. Samples that fill the last step
    of several ranks are not listed.

    Args:
        path: `run.audit`.
        order, steps: of the samples, and of the `for`.

    Raises:
        LoaderError: a line cannot be written.
    """
    of_rank = Path(path).with_suffix(f".{steps.rank}{Path(path).suffix}")
    drawn = isinstance(order, WeightedOrder | MixedOrder)
    of_loop = {"pipeline": pipeline, "epoch": epoch, "begun": time.time(), "drawn": drawn, **dataclasses.asdict(steps)}

    def append(batch: Assembly) -> None:
        positions = batch.positions[batch.valid]
        indices = np.where(batch.kept, batch.indices, -1)[batch.valid]
        expected = order.indices(epoch, positions)
        bad = np.flatnonzero(indices != expected)
        of_step = {
            "step": batch.step,
            "positions": [int(positions[0]), int(positions[-1]) + 1] if len(positions) else [0, 0],
            "indices": indices.tolist(),
            "bad": np.stack((bad, expected[bad]), axis=1).tolist(),
        }
        try:
            of_rank.parent.mkdir(parents=True, exist_ok=True)
            with of_rank.open("a") as file:  # the line before may be incomplete, if its process was killed
                file.write("\n" + json.dumps({**of_loop, **of_step}, separators=(",", ":")))
        except OSError as error:
            raise LoaderError(f"run.audit cannot be written: {reason_of(error)}; name another file") from error

    return append
