"""Everything that decides how a loader runs, as one value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from gpuflow.loader.bad_samples import BadSamples
from gpuflow.loader.placement import Share
from gpuflow.loader.records import TurnedImages
from gpuflow.loader.sampler import ListedEpochs, Order, Steps
from gpuflow.pipeline.views import AnyProgram
from gpuflow.sources import Source

if TYPE_CHECKING:
    from gpuflow.execute.cpu.targets import TargetMapper
    from gpuflow.execute.gpu.device_stream import ChunkRunner, DeviceStream


_CALLERS = 4
"""While one reads and draws, and others wait for images that Python decodes, another keeps all threads at work."""
_LARGEST_CHUNK, _LARGEST_SHARED_CHUNK = 32, 256


@dataclass(frozen=True, kw_only=True, slots=True)
class LoaderPlan:
    """What a loader delivers, and how. `gpuflow.loader.assemble` makes it from a configuration.

    Args:
        program, source: what is done to which samples.
        order: which sample comes when.
        seed: of all random draws.
        batch_size: samples a step.
        drop_last: leave out an incomplete last step.
        rank, world_size: of this process.
        rank_given: whether the caller chose them, perhaps those of a subgroup; else they are those of the process.
        device: where batches are delivered.
        device_stream: to that device if it is a GPU, else None.
        gpu: decodes on the GPU; None where the CPU decodes.
        threads: that decode, or that launch work on the GPU.
        readers: threads that only read, for storage that is waited for; with 0 each decoding thread reads its own
            chunks, which spares a hand-over.
        processes: worker processes that the decoding threads leave chunks to where the CPU decodes; they read, too.
        share: the part of each batch that the CPU decodes next to `gpu`, on separate threads, or None.
        prefetch: finished batches that wait for the consumer.
        timeout_seconds: how long the consumer waits for one.
        bad: counts bad samples and says what becomes of them.
        audit: `run.audit`, the file that lists what is delivered.
        targets: maps the fields of the source's records; None if it has no fields besides image and label.
        turned: counts images that EXIF data turn, where that may matter for `targets`; None elsewhere.
        left_out: how many instances of its samples the source leaves out, because their annotations are incomplete.
        nvtx: mark the stages' operations and the consumer's wait for a profiler.
        identity: names all that decides which samples come when and as what, except for the files themselves; states of
            other loaders are refused by it.
        shared_name: the loader's name among those of this process, the same on every rank.
    """

    program: AnyProgram
    source: Source
    order: Order
    seed: int
    batch_size: int
    drop_last: bool = False
    rank: int = 0
    world_size: int = 1
    rank_given: bool = True
    device: torch.device
    device_stream: DeviceStream | None = None
    gpu: ChunkRunner | None = None
    threads: int
    readers: int = 0
    processes: int = 0
    share: Share | None = None
    prefetch: int
    timeout_seconds: float = 120.0
    bad: BadSamples
    audit: str | None = None
    targets: TargetMapper | None = None
    turned: TurnedImages | None = None
    left_out: int = 0
    nvtx: bool = False
    identity: str = ""
    shared_name: str = ""

    @property
    def steps(self) -> Steps | ListedEpochs:
        """Return the steps of a whole epoch."""
        if isinstance(self.order, ListedEpochs):
            return self.order
        return Steps(
            size=self.order.size,
            batch_size=self.batch_size,
            rank=self.rank,
            world_size=self.world_size,
            drop_last=self.drop_last,
        )

    @property
    def shares_chunks(self) -> bool:
        """Return True if the threads share the images of each chunk: on the CPU, if no worker processes decode."""
        return self.gpu is None and not self.processes

    @property
    def callers(self) -> int:
        """Return how many threads of Python work on chunks at a time: a few if others share the images of these."""
        return min(self.threads, _CALLERS) if self.shares_chunks else self.threads

    @property
    def chunk_size(self) -> int:
        """Return the number of samples of a chunk. Large chunks are few items for SPDL, and for the interpreter."""
        if self.gpu is not None or (self.shares_chunks and not self.readers):
            return min(_LARGEST_SHARED_CHUNK, self.batch_size)
        in_flight = self.batch_size * (self.prefetch + 1)
        return min(_LARGEST_CHUNK, self.batch_size, -(-in_flight // self.threads))
