"""The iterator that users hold: length, epochs, state, statistics, shutdown."""

from __future__ import annotations

import dataclasses
import sys
import time
import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from numpy.typing import NDArray

from gpuflow.errors import LoaderError, LoaderTimeout, StateError
from gpuflow.execute.device_stream import gpu_is_idle
from gpuflow.loader.bad_samples import BadSamples
from gpuflow.loader.batch import Assembly
from gpuflow.loader.lowering import Feed
from gpuflow.loader.sampler import Order, Steps
from gpuflow.pipeline.image_spec import as_batch
from gpuflow.pipeline.program import Program
from gpuflow.runtime.metrics import Stats
from gpuflow.sources import Source

if TYPE_CHECKING:
    from gpuflow.execute.device_stream import ChunkRunner, DeviceStream
    from gpuflow.loader.cpu_share import Share

__all__ = ["Batch", "Loader"]

_MANY_BAD = 0.05


class Batch(tuple[torch.Tensor, torch.Tensor]):
    """The pair (images, labels), which is what a training loop unpacks, and what else is known of it.

    images: [N, C, H, W] in the dtype and memory layout that the pipeline ends with. labels: int64 [N].
    valid: bool [N], false where a sample was wrapped around to fill the last step of several ranks.
    indices: int64 [N], each sample's index in the source. step: of the epoch, from 0. epoch: from 0.
    """

    valid: torch.Tensor
    indices: torch.Tensor
    step: int
    epoch: int

    def __new__(cls, pair: Iterable[torch.Tensor], **known: Any) -> Batch:
        """As `tuple(pair)`, for tools that rebuild a container around moved tensors; other knowledge is then lost."""
        self = super().__new__(cls, pair)
        vars(self).update(known)
        return self

    @property
    def images(self) -> torch.Tensor:
        return self[0]

    @property
    def labels(self) -> torch.Tensor:
        return self[1]


class Loader:
    """Iterates batches of one pipeline, epoch after epoch: `for images, labels in loader`.

    Each `for` runs one epoch and the next `for` the next one, also after a break; `set_epoch` says otherwise. It
    needs neither start nor stop. `close`, or leaving a `with` block, ends its threads; so does collection.

    Made by `gpuflow.load`; not for two threads at once.
    """

    def __init__(
        self,
        *,
        program: Program,
        source: Source,
        order: Order,
        seed: int,
        batch_size: int,
        drop_last: bool,
        rank: int,
        world_size: int,
        device: torch.device,
        threads: int,
        prefetch: int,
        timeout_seconds: float,
        bad: BadSamples,
        readers: int,
        processes: int = 0,
        share: Share | None = None,
        identity: str,
        device_stream: DeviceStream | None = None,
        gpu: ChunkRunner | None = None,
    ) -> None:
        self._program, self._source, self._order = program, source, order
        self._steps = Steps(
            size=order.size, batch_size=batch_size, rank=rank, world_size=world_size, drop_last=drop_last
        )
        self._device, self._timeout, self._identity, self._seed = device, timeout_seconds, identity, seed
        self._bad, self._warned = bad, False
        self._feed = Feed(
            program=program,
            source=source,
            order=order,
            seed=seed,
            batch_size=batch_size,
            threads=threads,
            prefetch=prefetch,
            bad=bad,
            readers=readers,
            processes=processes,
            share=share,
            device_stream=device_stream,
            gpu=gpu,
        )
        self._gpu = gpu
        self._stats = Stats(*self._feed.meters)
        self._next_epoch, self._next_start = 0, 0
        self._place = (0, 0)
        self._active: weakref.ref[_Epoch] | None = None
        self._finalizer = weakref.finalize(self, self._feed.close)

    # --- what it is ---------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Steps of a whole epoch, the same on every rank."""
        return len(self._steps)

    @property
    def dataset(self) -> Source:
        """The source: its length is the number of samples, `classes` its class names."""
        return self._source

    @property
    def classes(self) -> tuple[str, ...]:
        """Class names; a label is a place in this tuple."""
        return self._source.classes

    @property
    def batch_size(self) -> int:
        """Samples a rank takes in a step."""
        return self._steps.batch_size

    @property
    def preprocessing(self) -> str:
        """The fingerprint of the pipeline's stages and all their parameters, 16 hex digits."""
        return self._program.pipeline.fingerprint

    def __repr__(self) -> str:
        s = self._steps
        return (
            f"<gpuflow.Loader {self._program.pipeline!r}; {s.size:,} samples in {len(s):,} steps of {s.batch_size}, "
            f"rank {s.rank} of {s.world_size}, on {self._device}, next epoch {self._next_epoch}"
            f"{'' if self._finalizer.alive else ', closed'}>"
        )

    # --- iteration ----------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Batch]:
        if not self._finalizer.alive:
            raise LoaderError("this loader is closed; make another one with gpuflow.load")
        self._end_active("another one began")
        epoch, start = self._next_epoch, self._next_start
        self._next_epoch, self._next_start = epoch + 1, 0
        self._place = (epoch, start)
        self._stats.start_epoch(epoch)
        under_way = _Epoch(self, epoch, dataclasses.replace(self._steps, start=start))
        self._active = weakref.ref(under_way)
        return under_way

    def set_epoch(self, epoch: int) -> None:
        """Make the next `for` run this epoch. A position restored within the same epoch is kept."""
        if epoch < 0:
            raise ValueError(f"epoch must be >= 0, got {epoch}")
        if epoch != self._next_epoch:
            self._next_epoch, self._next_start = epoch, 0
            active = self._active() if self._active is not None else None
            if active is None or active._end is not None:
                self._place = (epoch, 0)

    def _end_active(self, reason: str) -> None:
        active = self._active() if self._active is not None else None
        if active is not None:
            active.close(reason)

    # --- state --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Where training stands, as a small JSON value. It counts the batches that the consumer got, no others."""
        epoch, position = self._place
        return {"version": 1, "seed": self._seed, "epoch": epoch, "position": position, "config": self._identity}

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
        if seed != self._seed or config != self._identity:
            raise StateError(
                f"the state was taken with seed {seed} and configuration {config}, this loader has seed {self._seed} "
                f"and {self._identity}; restore the source, stages and seed it was taken with, or start a new epoch "
                f"with set_epoch({epoch + 1})"
            )
        if not 0 <= position <= self._steps.size:
            raise StateError(f"the state's position {position} is outside the epoch's {self._steps.size} samples")
        self._end_active("a state was loaded")
        self._next_epoch, self._next_start = epoch, position
        self._place = (epoch, position)

    # --- statistics and shutdown ----------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """What the stages did in this or the last epoch, the consumer's wait, the number of bad samples so far."""
        shares: dict[str, Any] = {}
        if self._gpu is not None:
            shares = {"engine_images": self._gpu.engine_images, "cpu_images": self._gpu.cpu_images}
        if self._feed.share is not None:
            shares["cpu_share"] = round(self._feed.share.part, 4)
        if processes := self._feed.processes():
            shares["processes"] = processes
        return {**self._stats.read(), **shares, "bad": self._bad.count, "bad_distinct": self._bad.distinct}

    def close(self) -> None:
        """End the threads and let go of the memory. Batches already handed over stay valid."""
        self._end_active("the loader was closed")
        self._feed.wait()
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Epoch(Iterator[Batch]):
    """One epoch under way. The loader refers to it weakly, so that a `break` ends it."""

    def __init__(self, loader: Loader, epoch: int, steps: Steps) -> None:
        self._loader, self._epoch, self._steps = loader, epoch, steps
        self._run = loader._feed.start(epoch, steps)
        self._step = 0
        self._end: str | None = None
        self._last: tuple[torch.cuda.Event, torch.cuda.Event] | None = None

    def __next__(self) -> Batch:
        if self._end is None and self._step == len(self._steps):
            self._loader._place = (self._epoch + 1, 0)
            self.close("over", wait=False)
        if self._end == "over":
            raise StopIteration
        if self._end is not None:
            raise LoaderError(f"epoch {self._epoch} was ended because {self._end}; iterate the loader anew")
        loader, start = self._loader, time.perf_counter()
        try:
            assembly = self._get()
            batch = self._batch(assembly)
        except BaseException:
            self.close("an error was raised")
            raise
        self._step += 1
        s = self._steps
        over = self._step == len(s)
        loader._place = (self._epoch + 1, 0) if over else (self._epoch, s.start + self._step * s.stride)
        loader._stats.hand_over(time.perf_counter() - start, len(assembly.positions))
        self._warn_of_many_bad()
        return batch

    def _get(self) -> Assembly:
        loader = self._loader
        try:
            assembly = self._run.get(loader._timeout, None if loader._gpu is None else self._starved)
        except TimeoutError:
            raise LoaderTimeout(
                f"no batch within run.timeout_s = {loader._timeout:g} s at step {self._step} of epoch {self._epoch}: "
                f"{loader._feed.culprit()}; raise run.timeout_s if that is to be expected"
            ) from None
        if isinstance(assembly.error, StopIteration):  # as itself it would end the consumer's `for` in silence
            raise LoaderError(
                f"a stage raised StopIteration at step {self._step} of epoch {self._epoch}; its cause is above"
            ) from assembly.error
        if assembly.error is not None:
            raise assembly.error
        return assembly

    def _batch(self, assembly: Assembly) -> Batch:
        images, *rows = self._tensors(assembly)
        if self._step > 0:  # the batch before is not needed any more, once the GPU has come as far as this one
            self._run.leave(None if assembly.ready is None else self._stream().record_event())
        if not assembly.kept.all():
            kept = np.flatnonzero(assembly.kept)
            if len(kept) == 0:
                raise LoaderError(
                    f"step {assembly.step} of epoch {self._epoch} holds nothing but bad samples; "
                    "run `gpuflow scan` to list them, or set on_error: replace"
                )
            images, rows = _select(images, kept), [x[torch.from_numpy(kept)] for x in rows]
        labels, valid, indices = rows
        return Batch((images, labels), valid=valid, indices=indices, step=assembly.step, epoch=self._epoch)

    def _tensors(self, assembly: Assembly) -> list[torch.Tensor]:
        """The batch's images [B, C, H, W], labels, valid, indices; on a GPU safe to use on the current stream."""
        if assembly.ready is None:
            rows = (torch.from_numpy(x) for x in (assembly.labels, assembly.valid, assembly.indices))
            return [as_batch(assembly.slots, self._loader._program.result), *rows]
        tensors = [assembly.slots, *assembly.there]
        stream = self._stream()
        self._last = stream.record_event(), assembly.ready
        stream.wait_event(assembly.ready)
        for tensor in tensors:
            tensor.record_stream(stream)
        return tensors

    def _starved(self) -> bool:
        return gpu_is_idle(self._stream(), self._last)

    def _stream(self) -> torch.cuda.Stream:
        """The consumer's."""
        return torch.cuda.current_stream(self._loader._device)

    def _warn_of_many_bad(self) -> None:
        loader = self._loader
        distinct, size = loader._bad.distinct, loader._steps.size
        if not loader._warned and distinct > _MANY_BAD * size:
            loader._warned = True
            warnings.warn(
                f"{distinct} of {size} samples are bad so far; run `gpuflow scan` to list them, or set run.max_bad",
                stacklevel=3,
            )

    def close(self, reason: str, *, wait: bool = True) -> None:
        """End the epoch once, which takes a tenth of a second; without `wait` it goes on beside the caller."""
        if self._end is not None:
            return
        self._end = reason
        self._loader._stats.end_epoch()
        if wait:
            self._run.stop()
        else:
            self._run.let_go()

    def __del__(self) -> None:
        """Does not wait: the collector may run this on a thread of the pipeline, and a Ctrl-C during it is lost."""
        if hasattr(self, "_end") and not sys.is_finalizing():
            self.close("it was left", wait=False)


def _select(images: torch.Tensor, rows: NDArray[np.int64]) -> torch.Tensor:
    """These rows of a batch, in the same memory format."""
    channels_last = images.is_contiguous(memory_format=torch.channels_last) and not images.is_contiguous()
    chosen = images[torch.from_numpy(rows)]
    return chosen.contiguous(memory_format=torch.channels_last) if channels_last else chosen
