"""Delivery: prepares a batch whose chunks are all decoded for the consumer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from gpuflow.execute.device_stream import DeviceStream
from gpuflow.loader.batch import Assembly
from gpuflow.loader.cpu_offload import CpuOffload
from gpuflow.loader.mixing import Mixer
from gpuflow.loader.plan import LoaderPlan
from gpuflow.loader.records import Blocks, RecordMapper, to_tensors
from gpuflow.pipeline.image_spec import as_batch
from gpuflow.pipeline.stage import Mixture
from gpuflow.pipeline.views import ViewSlots, ViewsProgram, as_images

__all__ = ["Delivery"]


class Delivery:
    """Delivers the batches of one loader, on any thread.

    records: maps the records of the batch's chunks; None if the source has no fields. offload: decodes a part of each
    batch on the CPU; None if the GPU decodes all of it.
    """

    def __init__(self, plan: LoaderPlan, records: RecordMapper | None, offload: CpuOffload | None) -> None:
        self._plan, self._records, self._offload = plan, records, offload
        self._mixer = Mixer(plan)
        self._blocks = Blocks(keep=plan.prefetch + 2)

    def deliver(self, epoch: int, batch: Assembly) -> None:
        """Look up the labels of a batch, mix it, and queue the copies to the GPU that are left."""
        known = batch.read_labels
        batch.labels = self._plan.source.labels[batch.indices] if known is None else known
        if batch.labels.dtype == np.uint8:  # several classes a sample, of which losses want floats
            batch.labels = batch.labels.astype(np.float32)
        mixtures = self._mixer.draw(epoch, batch)
        fields = {} if self._records is None else self._records.join(batch)
        device_stream = self._plan.device_stream
        if device_stream is None:
            self._mixer.mix(batch, mixtures)
            batch.fields = to_tensors(fields, self._blocks.pack)
            return
        if self._plan.gpu is None:
            self._mixer.mix(batch, mixtures)
            self._send_pixels(batch, device_stream)
        else:
            self._complete_on_gpu(batch, mixtures, device_stream)
        batch.sent = device_stream.send_all([batch.labels, batch.valid, batch.indices])
        batch.fields = to_tensors(fields, device_stream.send_all)
        batch.ready = device_stream.record_event()

    def _send_pixels(self, batch: Assembly, device_stream: DeviceStream) -> None:
        """Queue the transfer of pixels that the CPU decoded."""
        program, slots = self._plan.program, batch.slots
        if isinstance(program, ViewsProgram):
            pixels = slots.memory
            batch.slots = as_images(program, device_stream.send(torch.from_numpy(pixels)))
        else:
            pixels = slots
            batch.slots = device_stream.send(as_batch(pixels, program.result))
        device_stream.retain_until_done(pixels)

    def _complete_on_gpu(self, batch: Assembly, mixtures: Sequence[Mixture], device_stream: DeviceStream) -> None:
        """Queue the transfer of the CPU's part of pixels that the GPU decoded, and the mixing of all."""
        if self._offload is not None:
            self._offload.send(batch)
        self._mixer.queue(batch, mixtures, device_stream)
        if isinstance(batch.slots, ViewSlots):
            batch.slots = as_images(self._plan.program, batch.slots.memory)

    def close(self) -> None:
        """Free the memory that no batch holds."""
        self._blocks.clear()
