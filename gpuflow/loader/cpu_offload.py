"""CPU offload: next to a GPU, threads or worker processes decode a part of each batch (`decode.cpu_share`)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpuflow.loader.batch import Assembly, Chunk
from gpuflow.loader.cpu_share import Share
from gpuflow.loader.decode import ChunkDecoder, Faults, Sizes, WorkerDecoder
from gpuflow.loader.plan import LoaderPlan
from gpuflow.loader.read import ChunkReader
from gpuflow.pipeline.image_spec import STORAGE, as_batch, slot_shape
from gpuflow.pipeline.program import Program
from gpuflow.pipeline.stage import Keys
from gpuflow.runtime import memory
from gpuflow.runtime.buffers import BytePool
from gpuflow.runtime.metrics import Meter, nvtx

__all__ = ["CpuOffload"]

_KEPT_BYTES = 1 << 30


class CpuOffload:
    """Decodes the last rows of each batch on the CPU, for one loader. `meter` counts what it did.

    The pixels go to pinned memory that worker processes can map, and from there to the GPU.
    """

    def __init__(
        self, plan: LoaderPlan, share: Share, reader: ChunkReader, decoder: ChunkDecoder, workers: WorkerDecoder
    ) -> None:
        assert isinstance(plan.program, Program), "no GPU decodes views"
        self.share, self._result = share, plan.program.result
        self._plan, self._reader, self._decoder, self._workers = plan, reader, decoder, workers
        self.meter = Meter("decode_cpu", share.threads, after=decoder.meter.after, ranges=nvtx(plan.nvtx))
        self._pinned = BytePool(keep=_KEPT_BYTES, make=memory.shared_and_pinned)

    def rows(self, count: int) -> int:
        """Rows that the CPU decodes of a batch of `count`: none before workers are ready, if the share may change."""
        if self.share.adapts and self._workers.started and not self._workers.ready():
            return 0
        return self.share.rows(count)

    def decode(self, chunk: Chunk, keys: Keys, sizes: Sizes = None) -> tuple[Faults, NDArray[Any]]:
        """Read and decode a chunk; its faults and its slots."""
        batch = chunk.batch
        start, pixels = chunk.start - batch.own, self._pixels(batch)
        faults = self._workers.decode(chunk, keys, self.meter, pixels, start, sizes)
        slots = pixels[start : start + len(chunk)]
        if faults is None:
            payload = self._reader.read(chunk.indices)
            self._reader.meter.add(samples=len(chunk), read_bytes=sum(payload.sizes), cpu_s=payload.cpu_s)
            faults = self._decoder.run_on_cpu(payload, keys, slots, sizes)
        return faults, slots

    def send(self, batch: Assembly) -> None:
        """Queue the copy of a batch's pixels that the CPU decoded into its slots on the GPU."""
        device_stream = self._plan.device_stream
        if batch.memory is not None and device_stream is not None:
            device_stream.copy_into(batch.slots[batch.own :], as_batch(self._pixels(batch), self._result))
            device_stream.retain_until_done(batch.memory, self._pinned.release)
            batch.memory = None

    def _pixels(self, batch: Assembly) -> NDArray[Any]:
        """Where the CPU puts its rows of a batch: [shared, *slot_shape]."""
        shape, dtype = slot_shape(self._result), np.dtype(STORAGE[self._result.dtype])
        size = batch.shared * math.prod(shape) * dtype.itemsize
        with batch.lock:
            if batch.memory is None:
                batch.memory = self._pinned.acquire(size)
        return batch.memory[:size].view(dtype).reshape(-1, *shape)

    def close(self) -> None:
        """Free the memory."""
        self._pinned.clear()
