"""Runs the mixing stages of a pipeline on a whole batch, after bad samples were replaced or skipped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from gpuflow.config import Config
from gpuflow.config.record_fields import mixing_problems
from gpuflow.errors import ConfigError, LoaderError
from gpuflow.execute.mixing import arrays_of, mix_images, mix_images_at_once, mix_labels, soft_labels
from gpuflow.loader.batch import Assembly
from gpuflow.loader.plan import LoaderPlan
from gpuflow.pipeline.image_spec import as_batch
from gpuflow.pipeline.program import Program
from gpuflow.pipeline.stage import Keys, Mixture
from gpuflow.sources import Source, fields_of, has_one_class

if TYPE_CHECKING:
    from gpuflow.execute.device_stream import DeviceStream

__all__ = ["Mixer", "require_classes"]


class Mixer:
    """Mixes the batches of one loader, on any thread. Does nothing where the pipeline has no mixing stages.

    All ways give the same batch: partners come from the rank's own batch, and a wrapped or skipped sample is no
    sample's partner.
    """

    def __init__(self, plan: LoaderPlan) -> None:
        self._plan = plan

    def draw(self, epoch: int, batch: Assembly) -> list[Mixture]:
        """The mixture of each mixing stage. The partner of a skipped sample stays as it is."""
        keys = Keys(self._plan.seed, epoch, batch.positions)
        return [step.draw(keys, batch.valid).among(batch.kept) for step in self._plan.program.mixings]

    def mix(self, batch: Assembly, mixtures: Sequence[Mixture]) -> None:
        """Mix a batch whose pixels are in memory of the CPU."""
        if mixtures:
            program = self._plan.program
            assert isinstance(program, Program), "views are not mixed"
            images = as_batch(batch.slots, program.result)
            for mixture in mixtures:
                mix_images(images, mixture)
            self._mix_labels(batch, mixtures)

    def queue(self, batch: Assembly, mixtures: Sequence[Mixture], device_stream: DeviceStream) -> None:
        """Queue the mixing of a batch whose pixels are on the GPU; labels are mixed at once, and not sent yet."""
        for mixture in mixtures:
            if mixture.changed.any():
                sent = device_stream.send_all(arrays_of(mixture))
                with device_stream.queued():
                    mix_images_at_once(batch.slots, sent, blends=bool((mixture.weights != 1).any()))
        if mixtures:
            self._mix_labels(batch, mixtures)

    def _mix_labels(self, batch: Assembly, mixtures: Sequence[Mixture]) -> None:
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
