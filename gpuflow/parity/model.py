"""What a model makes of images that came different ways: its logits, and where its first choice flips."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from gpuflow.config import Config, ModelSpec
from gpuflow.engines import Engine, open_engine, read_info, refuse_other_preprocessing
from gpuflow.engines.base import black_images
from gpuflow.errors import ConfigError, MissingExtra
from gpuflow.parity.base import Result
from gpuflow.parity.report import Logits
from gpuflow.pipeline.program import Program
from gpuflow.pipeline.stage import Pipeline
from gpuflow.runtime.threads import DaemonPool

__all__ = ["Answers", "Classifier", "Fed", "LogitTally", "find_model"]

_SECONDS = 600.0
_CPU = torch.device("cpu")

Answers = Sequence[torch.Tensor | None]
"""Logits [K] of some images, None for what is no image that the model takes."""


@dataclass(frozen=True, slots=True)
class Fed:
    """A model file, and how many of the pipeline's stages stand before it."""

    file: str
    count: int


def find_model(config: Config, program: Program, path: Path | None) -> tuple[Fed | None, str]:
    """The model at `path`, else the one that serves; None where it is not there. And that in words.

    Raises:
        ConfigError: it is no model, or it was trained with other preprocessing and nothing forces it.
        MissingExtra: its library is not installed, and it was asked for.
    """
    block = config.serve.model if config.serve is not None else None
    if path is None and block is None:
        return None, "none: the file names no model; name one with --model"
    file = str(path) if path is not None or block is None else block.file
    if path is None and not Path(file).is_file():
        return None, f"none: {file} is not there; train or export it, or name another one with --model"
    if problems := [replace(problem, place="--model:", path=()) for problem in ModelSpec(file=file).problems()]:
        raise ConfigError(problems)
    try:
        info, stages = read_info(file), program.pipeline.stages
    except MissingExtra as error:
        if path is not None:
            raise
        return None, f"none: {error}"
    prefixes = [Pipeline(program.pipeline.name, stages[:count]) for count in range(len(stages), 0, -1)]
    before = next((one for one in prefixes if one.fingerprint == info.preprocessing), program.pipeline)
    refuse_other_preprocessing(info, before, file, force=block is not None and block.force)
    return Fed(file, len(before.stages)), f"{file}, on the CPU, on what comes out of {before.stages[-1].stage_name}"


class Classifier:
    """A model on the CPU. All its batches are of one size, so that equal images get equal logits.

    Args:
        file: the model's. program: what feeds it. batch: how many images it gets at a time.
    """

    def __init__(self, file: str, program: Program, *, batch: int) -> None:
        model = ModelSpec(file=file, batch=batch)
        self._image, self._batch = program.result, batch
        self._thread = DaemonPool(1, "parity_model")  # an engine ties its thread to the cores
        try:
            opening = self._thread.submit(open_engine, model, image=self._image, device=_CPU)
            self._engine: Engine = opening.result(_SECONDS)
        except BaseException:
            self._thread.shutdown()
            raise

    def __call__(self, results: Sequence[Result]) -> Answers:
        """The logits of at most `batch` results."""
        batch = black_images(self._batch, self._image, _CPU)
        taken = []
        for row, result in enumerate(results):
            if isinstance(result, torch.Tensor) and (result.shape, result.dtype) == (batch.shape[1:], batch.dtype):
                batch[row] = result.cpu()
                taken.append(row)
        logits = self._thread.submit(self._engine.run, batch).result(_SECONDS)
        return [logits[row] if row in taken else None for row in range(len(results))]

    def __enter__(self) -> Classifier:
        return self

    def __exit__(self, *error: object) -> None:
        self._engine.close()
        self._thread.shutdown()


class LogitTally:
    """Gathers differences of logits over images of one kind."""

    def __init__(self) -> None:
        self._images, self._flips, self._values = 0, 0, 0
        self._max, self._sum = 0.0, 0.0

    def add(self, a: torch.Tensor, b: torch.Tensor) -> None:
        """The logits [K] of one image, both ways."""
        apart = (a - b).abs()
        self._images += 1
        self._flips += int(a.argmax() != b.argmax())
        self._max, self._sum = max(self._max, float(apart.max())), self._sum + float(apart.sum())
        self._values += apart.numel()

    def result(self, kind: str) -> Logits | None:
        """None where there was no image."""
        if self._images == 0:
            return None
        mean = self._sum / self._values
        return Logits(kind=kind, images=self._images, max=self._max, mean=mean, flips=self._flips)
