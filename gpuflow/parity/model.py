"""Runs a model on the results of different ways, and measures differences of logits and flipped predictions.

Also reads from the model's file whether the model contains a stage that serving lacks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from gpuflow.config import Config, ModelSpec
from gpuflow.engines import Engine, class_names, open_engine, read_info, refuse_other_preprocessing
from gpuflow.engines.base import black_images
from gpuflow.errors import ConfigError, MissingExtra, Problem
from gpuflow.parity.base import Result
from gpuflow.parity.measure import differences
from gpuflow.parity.report import Logits
from gpuflow.pipeline.program import Program
from gpuflow.pipeline.stage import Pipeline
from gpuflow.runtime.threads import DaemonPool

__all__ = ["Answers", "Classifier", "LogitTally", "StudyModel", "find_model", "missing_stage"]

_SECONDS = 600.0
_CPU = torch.device("cpu")

Answers = Sequence[torch.Tensor | None]
"""Logits [K] of several images; None for a result that the model cannot take."""


@dataclass(frozen=True, slots=True)
class StudyModel:
    """A model file, the number of the pipeline's stages that precede the model, and the classes of its training."""

    file: str
    count: int
    classes: tuple[str, ...] | None


def find_model(config: Config, program: Program, path: Path | None) -> tuple[StudyModel | None, str]:
    """Find the model at `path`, else the model that `serve` names; None if there is none. Also returns a description.

    Raises:
        ConfigError: the file is no model, or was trained with other preprocessing and `force` is not set, or the names
            of classes do not go with it.
        MissingExtra: `path` is given and the library to run it is not installed.
    """
    block = config.serve.model if config.serve is not None else None
    if path is None and block is None:
        return None, "none: the file names no model; name one with --model"
    file = str(path) if path is not None or block is None else block.file
    if path is None and not Path(file).is_file():
        return None, f"none: {file} is not there; train or export it, or name another one with --model"
    if problems := [replace(problem, place="--model:", path=()) for problem in ModelSpec(file=file).problems()]:
        raise ConfigError(problems)
    if path is not None and not path.is_file():
        action = "train or export the model, or leave the option out"
        raise ConfigError([Problem("--model:", "must be the file of a model, and there is no such file", file, action)])
    try:
        info, stages = read_info(file), program.pipeline.stages
    except MissingExtra as error:
        if path is not None:
            raise
        return None, f"none: {error}"
    prefixes = [Pipeline(program.pipeline.name, stages[:count]) for count in range(len(stages), 0, -1)]
    served = config.programs["serve"].pipeline.lines if path is None else program.pipeline.lines
    default = next((one for one in prefixes if one.lines == served), program.pipeline)
    before = next((one for one in prefixes if one.fingerprint == info.preprocessing), default)
    force = block is not None and block.force
    trust = path is not None or (block is not None and block.preprocessing == "trust")
    refuse_other_preprocessing(info, before, file, force=force, trust=trust)
    if path is None and block is not None:
        class_names(block, info)
    note = f"{file}, on the CPU, on the output of {before.stages[-1].stage_name}"
    if force and info.preprocessing not in (None, before.fingerprint):
        note += "; serve.model.force is set: the file records other preprocessing than these stages"
    return StudyModel(file, len(before.stages), info.classes), note


def missing_stage(config: Config, program: Program, path: Path | None) -> str | None:
    """A text that says that serving lacks a program's last stage; None if it has it, or its model records that one.

    Only of a stage that a model can contain (`gpuflow export --fold-normalize`). A file without a record may lack it.
    The model is the one that `serve` names, or the one at `path` if there is none.
    """
    last, before = program.pipeline.stages[-1], program.pipeline.lines[:-1]
    if config.serve is None or config.programs["serve"].pipeline.lines != before or last.module() is None:
        return None
    named = config.serve.model
    file = named.file if named is not None and (path is None or Path(named.file).is_file()) else path
    folded, reason = None, "no model is named" if file is None else f"{file} is not there"
    if file is not None and Path(file).is_file():
        try:
            folded = read_info(str(file)).folded
            reason = f"{file} records {'no such stage' if folded is None else folded}"
        except MissingExtra as error:
            reason = f"{file} cannot be read: {error}"
    if folded == program.pipeline.lines[-1]:
        return None
    return (
        f"{config.path}: serve.stages must end with {last!r} as {program.pipeline.name} does, unless the model "
        f"contains it, and {reason}; add the stage, or name a model that gpuflow export --fold-normalize wrote, by "
        "serve.model.file or --model"
    )


class Classifier:
    """Runs a model on the CPU. All batches have one size, so that equal images get equal logits.

    Args:
        file: the model file.
        program: the program whose results are its input.
        batch: the batch size.
    """

    def __init__(self, file: str, program: Program, *, batch: int) -> None:
        model = ModelSpec(file=file, batch=batch)
        self._image, self._batch = program.result, batch
        self._thread = DaemonPool(1, "parity_model")  # an engine sets torch's thread count for its thread
        try:
            opening = self._thread.submit(open_engine, model, image=self._image, device=_CPU)
            self._engine: Engine = opening.result(_SECONDS)
        except BaseException:
            self._thread.shutdown()
            raise

    def __call__(self, results: Sequence[Result]) -> Answers:
        """Compute the logits of at most `batch` results."""
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
    """Gathers differences of logits over images of one kind, `own` or `hostile`."""

    def __init__(self) -> None:
        self._images, self._flips, self._values = 0, 0, 0
        self._max, self._sum = 0.0, 0.0

    def add(self, a: torch.Tensor, b: torch.Tensor) -> None:
        """Add the logits [K] of one image from both ways."""
        apart = differences(a, b)
        self._images += 1
        self._flips += int(a.argmax() != b.argmax())
        self._max, self._sum = max(self._max, float(apart.max())), self._sum + float(apart.sum())
        self._values += apart.numel()

    def result(self, kind: str) -> Logits | None:
        """The summary; None if there was no image."""
        if self._images == 0:
            return None
        mean = self._sum / self._values
        return Logits(kind=kind, images=self._images, max=self._max, mean=mean, flips=self._flips)
