"""Prepares a batch whose chunks are all decoded for the consumer, and mixes its samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from gpuflow.config import Config
from gpuflow.config.models import mixing_problems
from gpuflow.errors import ConfigError, LoaderError
from gpuflow.execute.gpu.device_stream import DeviceStream
from gpuflow.execute.mixing import arrays_of, mix_images, mix_images_at_once, mix_labels, soft_labels
from gpuflow.loader.batch import Assembly
from gpuflow.loader.decode import CpuOffload
from gpuflow.loader.plan import LoaderPlan
from gpuflow.loader.records import Blocks, RecordMapper, to_tensors
from gpuflow.pipeline.program import Program
from gpuflow.pipeline.stage import Keys, Mixture
from gpuflow.pipeline.views import ViewSlots, ViewsProgram, as_batch, as_images
from gpuflow.sources import Source, fields_of, has_one_class

if TYPE_CHECKING:
    from gpuflow.execute.gpu.device_stream import DeviceStream


def require_classes(config: Config, name: str, source: Source) -> None:
    """Raise ConfigError if a pipeline mixes samples whose labels are not one class each, or that carry more fields.

    For a source whose fields are not declared, this is known once it is open.
    """
    fields, classes = [field.name for field in fields_of(source)], has_one_class(source) and bool(source.classes)
    problems = list(mixing_problems(name, config.any_program(name), fields, one_class=classes))
    if has_one_class(source) and not source.classes and not fields:
        rule, action = "mixes labels, but how many classes there are is not known", "give the dataset `classes`, a list"
        problems = [replace(problem, rule=rule, action=f"{action} of their names") for problem in problems]
    if problems:
        raise ConfigError([replace(problem, place=f"{config.path}:") for problem in problems])


class Delivery:
    """Delivers the batches of one loader, on any thread.

    Samples are mixed alike wherever they are: partners come from the rank's own batch, and a wrapped or skipped sample
    is no sample's partner.

    records: maps the records of the batch's chunks; None if the source has no fields. offload: decodes a part of each
    batch on the CPU; None if the GPU decodes all of it.
    """

    def __init__(self, plan: LoaderPlan, records: RecordMapper | None, offload: CpuOffload | None) -> None:
        self._plan, self._records, self._offload = plan, records, offload
        self._blocks = Blocks(keep=plan.prefetch + 2)

    def deliver(self, epoch: int, batch: Assembly) -> None:
        """Look up the labels of a batch, mix it, and queue the copies to the GPU that are left."""
        known = batch.read_labels
        batch.labels = self._plan.source.labels[batch.indices] if known is None else known
        if batch.labels.dtype == np.uint8:  # several classes a sample, of which losses want floats
            batch.labels = batch.labels.astype(np.float32)
        keys = Keys(self._plan.seed, epoch, batch.positions)
        mixtures = [step.draw(keys, batch.valid).among(batch.kept) for step in self._plan.program.mixings]
        fields = {} if self._records is None else self._records.join(batch)
        device_stream = self._plan.device_stream
        if device_stream is None:
            self._mix(batch, mixtures)
            batch.fields = to_tensors(fields, self._blocks.pack)
            return
        if self._plan.gpu is None:
            self._mix(batch, mixtures)
            self._send_pixels(batch, device_stream)
        else:
            self._complete_on_gpu(batch, mixtures, device_stream)
        batch.sent = device_stream.send_all([batch.labels, batch.valid, batch.indices])
        batch.fields = to_tensors(fields, device_stream.send_all)
        batch.ready = device_stream.record_event()

    def _mix(self, batch: Assembly, mixtures: Sequence[Mixture]) -> None:
        """Mix a batch whose pixels are in memory of the CPU."""
        if mixtures:
            program = self._plan.program
            assert isinstance(program, Program), "views are not mixed"
            images = as_batch(batch.slots, program.result)
            for mixture in mixtures:
                mix_images(images, mixture)
        self._mix_labels(batch, mixtures)

    def _mix_labels(self, batch: Assembly, mixtures: Sequence[Mixture]) -> None:
        """Replace the labels of a batch by probabilities, if samples are mixed."""
        if not mixtures:
            return
        source, labels = self._plan.source, np.asarray(batch.labels, np.int64)
        count = len(source.classes)
        unknown = np.flatnonzero((labels < 0) | (labels >= count))
        if unknown.size:
            i = int(unknown[0])
            raise LoaderError(
                f"{source.path(int(batch.indices[i]))} has the label {labels[i]}, which is none of the {count} classes "
                f"0 to {count - 1}; correct the label, or `classes` of the dataset"
            )
        probabilities = soft_labels(labels, count)
        for step, mixture in zip(self._plan.program.mixings, mixtures, strict=True):
            probabilities = mix_labels(probabilities, mixture, step.stage.label_smoothing)
        batch.labels = probabilities

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
        for mixture in mixtures:
            if mixture.changed.any():
                sent = device_stream.send_all(arrays_of(mixture))
                with device_stream.queued():
                    mix_images_at_once(batch.slots, sent, blends=bool((mixture.weights != 1).any()))
        self._mix_labels(batch, mixtures)  # they are not sent yet
        if isinstance(batch.slots, ViewSlots):
            batch.slots = as_images(self._plan.program, batch.slots.memory)

    def close(self) -> None:
        """Free the memory that no batch holds."""
        self._blocks.clear()
