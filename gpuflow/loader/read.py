"""Reading: the encoded bytes of a chunk's samples, into memory that is used again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gpuflow.arrays import Bytes
from gpuflow.loader.batch import Chunk
from gpuflow.loader.plan import LoaderPlan
from gpuflow.pipeline.records import Records, values_of
from gpuflow.pipeline.stage import Keys
from gpuflow.runtime import memory
from gpuflow.runtime.buffers import BytePool
from gpuflow.runtime.metrics import Meter, nvtx
from gpuflow.sources import Payload, records_of

_KEPT_BYTES = 1 << 30
"""A chunk for a GPU has 16 to 32 MB, and a dozen of them are in flight. Pinning memory takes longer than reading."""


def keys_of(plan: LoaderPlan, epoch: int, chunk: Chunk) -> Keys:
    """The random keys of a chunk's samples, with what stages take from their records."""
    if chunk.keys is None:
        keys = Keys(plan.seed, epoch, chunk.batch.positions[chunk.start : chunk.stop])
        chunk.keys, chunk.records = with_values(plan, keys, chunk.indices)
    return chunk.keys


def with_values(plan: LoaderPlan, keys: Keys, indices: Sequence[int]) -> tuple[Keys, Records | None]:
    """The keys with what stages take from these samples' records, and the records; None if stages take nothing.

    A record is bad, too, if a stage cannot use its numbers.
    """
    if not plan.record_values:
        return keys, None
    records = records_of(plan.source, indices)
    values, errors = values_of(plan.record_values, records)
    return replace(keys, values=values), replace(records, errors=errors)


class ChunkReader:
    """Reads for one loader, on any thread. `meter` counts what it did."""

    def __init__(self, plan: LoaderPlan) -> None:
        self._plan = plan
        self.meter = Meter("read", plan.readers or plan.threads, ranges=nvtx(plan.nvtx))
        self._bytes = BytePool(keep=_KEPT_BYTES, make=memory.heap if plan.gpu is None else memory.pinned)

    def read(self, indices: Sequence[int]) -> Payload:
        """The bytes of these samples. `release` the payload's buffer once they are decoded."""
        return self._plan.source.read(indices, self._bytes.acquire)

    def read_chunk(self, epoch: int, chunk: Chunk) -> None:
        """Read a chunk's samples into its payload and prepare that for the GPU, if there is one."""
        gpu = self._plan.gpu
        chunk.payload = payload = self.read(chunk.indices)
        if gpu is not None:
            samples = chunk.batch.indices[chunk.start : chunk.stop]
            chunk.prepared = gpu.prepare(payload, keys_of(self._plan, epoch, chunk), samples)
        chunk.batch.add_labels(chunk.start, payload.labels)
        self.meter.add(read_bytes=sum(payload.sizes))

    def release(self, buffer: Bytes) -> None:
        """Use a payload's buffer again."""
        self._bytes.release(buffer)

    def close(self) -> None:
        """Free the buffers, and close the source."""
        self._bytes.clear()
        self._plan.source.close()
