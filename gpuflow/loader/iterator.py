"""Iterates one epoch: waits for batches, counts them, warns of bad samples, and ends the epoch.

It knows which batches the consumer or queued GPU work may still use, and measures how long the consumer's GPU waits.
"""

from __future__ import annotations

import sys
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch

from gpuflow.arrays import Ints
from gpuflow.errors import LoaderError, LoaderTimeout, TooManyBadSamples
from gpuflow.loader.batch import Assembly, Batch, RaggedTensor, targets_of
from gpuflow.loader.epoch import Completion
from gpuflow.loader.lowering import Feed
from gpuflow.loader.plan import LoaderPlan
from gpuflow.loader.sampler import EpochSteps
from gpuflow.pipeline.views import ViewSlots, as_images
from gpuflow.runtime.metrics import Stats, nvtx
from gpuflow.sources import Source, has_labels, is_read_remotely

_BATCHES = 16
_FIRST_BATCHES = 8
"""The first batches of an epoch are always late and are not measured."""


class GpuWait:
    """Measures for which part of its time the GPU of one consumer waits, over the last sixteen batches or so.

    A loop may ask for batches long before the GPU needs them, or launch too little for the GPU. So what counts is the
    time between two events with timing: `asked`, recorded before the consumer waits for a batch, and `begun`, recorded
    after its stream waits for it.
    """

    def __init__(self) -> None:
        self._marks: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        self._last: torch.cuda.Event | None = None
        self._waited = self._total = 0.0
        self._count = 0

    def add(self, asked: torch.cuda.Event, begun: torch.cuda.Event) -> None:
        """Add a batch."""
        self._marks.append((asked, begun))
        while self._marks and self._marks[0][1].query():  # type: ignore[no-untyped-call]
            asked, begun = self._marks.popleft()
            if self._last is not None:
                self._waited += asked.elapsed_time(begun) - self._waited / _BATCHES
                self._total += self._last.elapsed_time(begun) - self._total / _BATCHES
            self._last, self._count = begun, self._count + 1

    @property
    def share(self) -> float:
        """Return the share, 0 to 1; 0 for the first batches."""
        if self._count < _FIRST_BATCHES or self._total <= 0:
            return 0.0
        return min(1.0, max(0.0, self._waited / self._total))


Images = torch.Tensor | dict[str, torch.Tensor]
"""[B, C, H, W], or of a pipeline with views for each a tensor [count, B, C, H, W]."""

_MOST_QUERIES = 4
"""How often to ask, a millisecond or more apart, whether the consumer still refers to the images of a batch that the
GPU has finished with. If it still holds them then, it is assumed to keep them, and the loader continues."""


@dataclass(eq=False, slots=True)
class Unused:
    """Says when a batch is not in use: the GPU has passed `event`, and the consumer does not refer to the images.

    Most loops drop a batch just after they get the next one. Without waiting for that, the loader would allocate memory
    for one more batch and keep it for the whole run. Images that the consumer keeps delay this by a few queries.
    """

    event: Completion
    images: weakref.ref[torch.Tensor]
    queries_left: int = _MOST_QUERIES

    def query(self) -> bool:
        if not self.event.query():
            return False
        self.queries_left -= 1
        return self.images() is None or self.queries_left <= 0


@dataclass(slots=True)
class BatchesInUse:
    """Lists the batches that the consumer got and that it, or GPU work that it queued, may still use.

    Their memory is not free when the next epoch begins, so they count as batches in flight there.

    last: the images of the newest one, if any. earlier: for each one before it, when it is not in use any more.
    """

    last: weakref.ref[torch.Tensor] | None = None
    earlier: list[Completion] = field(default_factory=list)

    def add(self, images: Images, event: Completion) -> Completion | None:
        """Add a batch that the consumer gets now. Returns when the one before is not in use any more, if there is one.

        event: after all work that the consumer has queued so far.
        """
        unused = None if self.last is None else Unused(event, self.last)
        if unused is not None:
            self.earlier = [*self._pending(), unused]
        self.last = weakref.ref(next(iter(images.values())) if isinstance(images, dict) else images)
        return unused

    def in_flight(self, event: Completion) -> list[Completion | None]:
        """Return for each batch in use when it is not any more; None for the newest one, if the consumer still refers
        to it.

        event: as for `add`.
        """
        self.earlier = self._pending()
        if self.last is not None and self.last() is None:  # queued work may still use it
            self.last = None
            self.earlier.append(event)
        return [*self.earlier, *([] if self.last is None else [None])]

    def _pending(self) -> list[Completion]:
        return [one for one in self.earlier if not one.query()]


_MANY_BAD = 0.05


@dataclass(slots=True)
class Progress:
    """Holds the position of a loader: what its state says, and what the next `for` runs.

    epoch, position: of the next sample that the consumer gets. following: the epoch to run after that one.
    begun: whether a `for` has begun this epoch and its last batch is not delivered yet.
    """

    epoch: int = 0
    position: int = 0
    following: int = 1
    begun: bool = False
    warned_of_many_bad: bool = False
    warned_of_turned: bool = False

    @property
    def upcoming(self) -> tuple[int, int]:
        """Return the epoch that the next `for` runs, and the position from which on."""
        return (self.following, 0) if self.begun else (self.epoch, self.position)

    def move_to(self, epoch: int, position: int = 0, following: int | None = None) -> None:
        """Stand before `position` of an epoch that no `for` has begun."""
        self.epoch, self.position, self.begun = epoch, position, False
        self.following = epoch + 1 if following is None else following

    def begin(self) -> None:
        """Note that a `for` has begun the upcoming epoch."""
        self.finish()
        self.begun = True

    def finish(self) -> None:
        """Note that the last batch of the epoch was delivered."""
        if self.begun:
            self.move_to(self.following)


@dataclass(eq=False, repr=False)
class EpochIterator(Iterator[Batch]):
    """Iterates the batches of one epoch. The loader refers to it weakly, so that a `break` ends it.

    loader: is not collected, and so not closed, before the epoch has ended: a `for` may hold nothing but this iterator.
    audit: gets each batch before it is delivered.
    """

    loader: object
    plan: LoaderPlan
    feed: Feed
    stats: Stats
    progress: Progress
    in_use: BatchesInUse
    epoch: int
    steps: EpochSteps
    audit: Callable[[Assembly], None] | None = None

    def __post_init__(self) -> None:
        stream = self._stream
        in_flight = [] if stream is None else self.in_use.in_flight(stream.record_event())
        self._run = self.feed.start(self.epoch, self.steps, in_flight)
        self._step = 0
        self._end: str | None = None
        self._turn = threading.Lock()
        self._gpu_wait = GpuWait()
        self._ranges = nvtx(self.plan.nvtx)

    @property
    def _stream(self) -> torch.cuda.Stream | None:
        """Return the consumer's stream, if batches are on a GPU."""
        return torch.cuda.current_stream(self.plan.device) if self.plan.device_stream is not None else None

    @property
    def ended(self) -> bool:
        """Return True once it gives no more batches."""
        return self._end is not None

    def __next__(self) -> Batch:
        """Return the next batch. Several threads take turns."""
        if self.feed.forked:
            raise self.feed.error_in_child()
        timeout = self.plan.timeout_seconds
        if not self._turn.acquire(timeout=timeout):
            raise LoaderTimeout(f"another thread has waited for a batch for run.timeout_s = {timeout:g} s")
        try:
            return self._next_step()
        finally:
            self._turn.release()

    def _next_step(self) -> Batch:
        """Return the batch of the next step. Raises TooManyBadSamples if all of its samples are bad and skipped."""
        if self._end is None and self._step == len(self.steps):
            self.progress.finish()
            self.end("over", wait=False)
        if self._end == "over":
            raise StopIteration
        if self._end is not None:
            raise self._ended_early()
        start, stream = time.perf_counter(), self._stream
        try:
            asked = _timed_event(stream) if stream is not None and self.plan.gpu is not None else None
            assembly = self._get()
            batch = self._batch(assembly, stream, asked)
            self._warn_of_turned()
            self._warn_of_many_bad()  # which raises where warnings are errors
            if self.audit is not None:
                self.audit(assembly)
        except BaseException:
            self.end("an error was raised")
            raise
        self._step += 1
        if self._step == len(self.steps):
            self.progress.finish()
        else:
            self.progress.position = self.steps.reached(self._step)
        self.stats.count_batch(time.perf_counter() - start)
        return batch

    def _get(self) -> Assembly:
        timeout = self.plan.timeout_seconds
        try:
            with self._ranges("gpuflow.wait"):
                try:
                    assembly = self._run.get(timeout)
                except TimeoutError:  # a server's own error names the cause, and comes soon
                    assembly = self._run.get(timeout if is_read_remotely(self.plan.source) else 0)
        except TimeoutError:
            culprit, paths = self.feed.under_way()
            raise LoaderTimeout(
                f"no batch within run.timeout_s = {timeout:g} s at step {self._step} of epoch {self.epoch}: "
                f"{culprit}; raise run.timeout_s if that is to be expected",
                paths,
            ) from None
        if assembly is None or self._end is not None:  # another thread has ended the epoch meanwhile
            raise self._ended_early()
        if isinstance(assembly.error, StopIteration):  # as itself it would end the consumer's `for` in silence
            raise LoaderError(
                f"a stage raised StopIteration at step {self._step} of epoch {self.epoch}; its cause is above"
            ) from assembly.error
        if assembly.error is not None:
            raise assembly.error
        return assembly

    def _ended_early(self) -> LoaderError:
        return LoaderError(f"epoch {self.epoch} was ended because {self._end}; iterate the loader anew")

    def _batch(self, assembly: Assembly, stream: torch.cuda.Stream | None, asked: torch.cuda.Event | None) -> Batch:
        """Return the batch as the consumer gets it. Raises TooManyBadSamples as `_next_step`.

        stream: the consumer's, on a GPU. asked: if the GPU decodes, an event recorded before that wait.
        """
        images, rows = self._tensors(assembly, stream)
        if stream is None:
            if self._step > 0:  # the batch before is not needed any more
                self._run.release()
        else:
            begun = stream.record_event() if asked is None else _timed_event(stream)
            if (unused := self.in_use.add(images, begun)) is not None:
                self._run.release(unused)
            if asked is not None:
                self._gpu_wait.add(asked, begun)
                self.feed.set_gpu_wait(self._gpu_wait.share, self._run.grow)
                self.stats.gpu_wait_share = self._gpu_wait.share
        if not assembly.kept.all():
            if not assembly.kept.any() and self.plan.bad.report is None:
                steps = self.plan.steps  # of a wrapped DataLoader, these alone know of other ranks
                where = f" on rank {steps.rank}" if steps.world_size > 1 else ""
                raise TooManyBadSamples(
                    f"step {assembly.step} of epoch {self.epoch} holds nothing but bad samples{where}; the first bad "
                    f"ones: {self.plan.bad.first}; run `gpuflow scan` to list all, or set on_error: replace"
                )
            kept = torch.from_numpy(np.flatnonzero(assembly.kept))
            if isinstance(images, dict):
                images = {name: _select(view, kept) for name, view in images.items()}
            else:
                images = _select(images, kept)
            rows = [x[kept] for x in rows]
        labels, valid, indices = rows
        second: Any = labels
        known: dict[str, Any] = {}
        if (mapper := self.plan.targets) is not None:
            fields, known = assembly.fields, {"fields": assembly.fields, "_schema": mapper.fields}
            if not has_labels(self.plan.source):
                only = next(iter(fields.values())) if len(fields) == 1 else None
                second = targets_of(images, indices, fields, mapper.fields) if only is None else only
        known |= {"valid": valid, "indices": indices, "step": assembly.step, "epoch": self.epoch}
        names = partial(_names_of, self.plan.source, assembly.indices[assembly.kept])
        return Batch((images, second), _names=names, **known)

    def _tensors(self, assembly: Assembly, stream: torch.cuda.Stream | None) -> tuple[Images, list[torch.Tensor]]:
        """Return the batch's images or views, and labels, valid, indices; on a GPU safe to use on the stream."""
        if stream is None or assembly.ready is None:
            rows = [torch.from_numpy(x) for x in (assembly.labels, assembly.valid, assembly.indices)]
            slots = assembly.slots
            return as_images(self.plan.program, slots.memory if isinstance(slots, ViewSlots) else slots), rows
        images: Images = assembly.slots
        stream.wait_event(assembly.ready)
        tensors = images.values() if isinstance(images, dict) else [images]
        for value in (*tensors, *assembly.sent[:1], *assembly.fields.values()):
            if isinstance(value, torch.Tensor | RaggedTensor):
                value.record_stream(stream)
        return images, list(assembly.sent)

    def _warn_of_many_bad(self) -> None:
        bad, samples = self.plan.bad, len(self.plan.source)
        known = bad.report is not None or self.progress.warned_of_many_bad
        if not known and bad.distinct > bad.allowed(_MANY_BAD * samples, samples):
            self.progress.warned_of_many_bad = True
            warnings.warn(
                f"{bad.distinct} of {samples} samples are bad so far; run `gpuflow scan` to list them, or set "
                "run.max_bad",
                stacklevel=4,
            )

    def _warn_of_turned(self) -> None:
        turned = self.plan.turned
        if turned is not None and turned.count and not self.progress.warned_of_turned:
            self.progress.warned_of_turned = True
            warnings.warn(turned.text, stacklevel=4)

    def close(self) -> None:
        """End the epoch, as `yield from` does with the iterator of a generator that is closed."""
        self.end("it was closed")

    def end(self, reason: str, *, wait: bool = True) -> None:
        """End the epoch once, which takes a tenth of a second; without `wait` that happens in the background.

        Does nothing in a forked child, as the epoch is the parent's.
        """
        if self._end is not None or self.feed.forked:
            return
        self._end = reason
        self._run.wake()
        self.stats.end_epoch()
        if wait:
            self._run.stop()
        else:
            self._run.request_stop()
        self.loader = None

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:  # `sys` is None at the end
        """End the epoch without waiting: the collector may run this on a thread of the pipeline, where a Ctrl-C is
        lost."""
        if hasattr(self, "_end") and not is_finalizing():
            self.end("it was left", wait=False)


def _names_of(source: Source, indices: Ints) -> list[str]:
    return [source.path(index) for index in indices.tolist()]


def _timed_event(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(stream)
    return event


def _select(images: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return these rows of images [B, C, H, W] or views [count, B, C, H, W], whose channels may be last in memory."""
    axis, rows = images.ndim - 4, rows.to(images.device)
    if images.is_contiguous():
        return images.index_select(axis, rows)
    return images.movedim(-3, -1).index_select(axis, rows).movedim(-1, -3)
