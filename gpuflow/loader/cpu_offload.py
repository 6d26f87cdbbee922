"""CPU offload: next to a GPU, threads decode a part of each batch (`decode.cpu_share`)."""

from __future__ import annotations

from typing import Any

import torch

from gpuflow.arrays import Bytes
from gpuflow.loader.batch import Assembly, Chunk
from gpuflow.loader.cpu_share import Share
from gpuflow.loader.decode import ChunkDecoder, Faults, Sizes
from gpuflow.loader.plan import LoaderPlan
from gpuflow.loader.read import ChunkReader
from gpuflow.pipeline.stage import Keys
from gpuflow.pipeline.views import slot_bytes_of, slot_of, slots_of, split
from gpuflow.runtime import memory
from gpuflow.runtime.buffers import BytePool
from gpuflow.runtime.metrics import Meter, nvtx

_KEPT_BYTES = 1 << 30


class CpuOffload:
    """Decodes the last rows of each batch on the CPU, for one loader. `meter` counts what it did.

    The pixels go to pinned memory, and from there to the GPU.
    """

    def __init__(self, plan: LoaderPlan, share: Share, reader: ChunkReader, decoder: ChunkDecoder) -> None:
        self.share = share
        self._plan, self._reader, self._decoder = plan, reader, decoder
        self.meter = Meter("decode_cpu", share.threads, after=decoder.meter.after, ranges=nvtx(plan.nvtx))
        self._pinned = BytePool(keep=_KEPT_BYTES, make=memory.pinned)

    def decode(self, chunk: Chunk, keys: Keys, sizes: Sizes = None) -> tuple[Faults, Any]:
        """Read and decode a chunk; its faults and its slots."""
        batch, (shape, dtype) = chunk.batch, slot_of(self._plan.program)
        start = chunk.start - batch.first_offloaded
        whole = slots_of(self._plan.program, self._memory(batch).view(dtype).reshape(-1, *shape))
        slots = whole[start : start + len(chunk)]
        payload = self._reader.read(chunk.indices)
        batch.add_labels(chunk.start, payload.labels)
        self._reader.meter.add(samples=len(chunk), read_bytes=sum(payload.sizes))
        return self._decoder.run_on_cpu(payload, keys, slots, sizes), slots

    def send(self, batch: Assembly) -> None:
        """Queue the copy of a batch's pixels that the CPU decoded into its slots on the GPU: one for each output."""
        device_stream = self._plan.device_stream
        if batch.offload_memory is not None and device_stream is not None:
            held = slots_of(self._plan.program, torch.from_numpy(self._memory(batch)))
            for target, pixels in zip(split(batch.slots[batch.first_offloaded :]), split(held), strict=True):
                device_stream.copy_into(target, pixels)
            device_stream.retain_until_done(batch.offload_memory, self._pinned.release)
            batch.offload_memory = None

    def _memory(self, batch: Assembly) -> Bytes:
        """The memory into which the CPU decodes its rows of a batch: [offloaded, bytes of a slot]."""
        slot_bytes = slot_bytes_of(self._plan.program)
        with batch.lock:
            if batch.offload_memory is None:
                batch.offload_memory = self._pinned.acquire(batch.offloaded * slot_bytes)
        return batch.offload_memory[: batch.offloaded * slot_bytes].reshape(batch.offloaded, slot_bytes)

    def close(self) -> None:
        """Free the memory."""
        self._pinned.clear()
