"""`gpuflow export`: writes a trained checkpoint as ONNX or torch.export, with its metadata, and checks the result.

The check compares the written file, run by the engine that would serve it, with the checkpoint in torch: on random
images, and on real ones that pass through the pipeline. A file that fails is deleted, and an earlier one stays.
"""

from __future__ import annotations

import io
import os
import re
import secrets
import warnings
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from gpuflow.arrays import Bytes
from gpuflow.config import Config, ModelSpec
from gpuflow.config.models import refuse_record_fields
from gpuflow.engines import ModelInfo, open_engine, refuse_other_preprocessing
from gpuflow.engines.base import METADATA_KEY, black_images, class_difference
from gpuflow.engines.pytorch import EXTRA_FILE, load_checkpoint
from gpuflow.errors import (
    ConfigError,
    GpuflowError,
    MissingExtra,
    Problem,
    SourceError,
    is_system_fault,
    reason_of,
    system_fault,
)
from gpuflow.execute.cpu.runner import run_files
from gpuflow.loader.assemble import open_split
from gpuflow.pipeline.program import Program, fold, trace
from gpuflow.pipeline.stage import ImageSpec, Pipeline
from gpuflow.runtime.files import atomic_write, replaced_file
from gpuflow.sources.base import spread
from gpuflow.sources.folder import images_below

TOLERANCE = 1e-4
"""The largest difference of a logit, relative to the largest logit or to 1, whichever is greater."""
_OPSETS = (18, 25)  # the lowest and highest that torch's exporter writes
_REAL_IMAGES, _RANDOM_IMAGES, _BATCH = 32, 5, 4
_MOST_IN_ONNX = 1_500_000_000
"""From this many bytes of weights on, they go into a separate file: an ONNX file holds less than 2 GiB."""
_CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """A comparison of the exported model with torch on some images.

    difference: the largest of any logit; allowed: its limit. agree: images with the same top prediction.
    """

    images: str
    count: int
    difference: float
    allowed: float
    agree: int

    def __str__(self) -> str:
        return (
            f"{self.count} {self.images} images: logits differ by at most {self.difference:.2g}, "
            f"allowed {self.allowed:.2g}; top-1 agrees on {self.agree}"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Exported:
    """A model file that passed its checks.

    checkpoint: what it was made of. weights: the file in the same directory that holds the model's weights; None if the
    model file does. image: the model's input.
    """

    path: Path
    checkpoint: str
    weights: Path | None
    info: ModelInfo
    image: ImageSpec
    checks: tuple[Check, ...]


def export_model(
    config: Config,
    out: Path,
    *,
    checkpoint: Path | None = None,
    fold_normalize: bool = False,
    opset: int | None = None,
    data: Path | None = None,
) -> Exported:
    """Export a checkpoint of `gpuflow train`, with a dynamic batch axis.

    Args:
        out: `.onnx` for ONNX, `.pt2` for torch.export. A symbolic link stays, and the file that it leads to is written.
        checkpoint: by default `serve.model.file` where that is a checkpoint (.pt), else `<train.out>/last.pt`.
        fold_normalize: put the pipeline's last stage into the model, which then takes uint8 pixels [N, C, H, W].
        opset: of ONNX; torch's default otherwise.
        data: a directory of images to check on, instead of the source.

    Raises:
        ConfigError: checkpoint, options or data do not fit the configuration, or torch cannot export the model.
        GpuflowError: the exported model gives other logits. `out` is not changed.
        SystemFault: the disk is full. `out` is not changed.
    """
    if opset is not None and not _OPSETS[0] <= opset <= _OPSETS[1]:
        raise ConfigError([Problem("--opset", f"must be within {_OPSETS[0]} and {_OPSETS[1]}, got {opset}")])
    served = config.serve.model.file if config.serve is not None and config.serve.model is not None else ""
    path = str(checkpoint or (served if served.endswith(".pt") else Path(config.train.out) / "last.pt"))
    if not Path(path).is_file():
        rule = "no such checkpoint; run gpuflow train first, or name one with --checkpoint"
        raise ConfigError([Problem(f"{path}:", rule)])
    trained, info = load_checkpoint(path)
    whole = _program(config, info, path)
    refuse_record_fields(
        config, whole.pipeline.name, "a served model gets images alone", "name stages under serve that take no field"
    )
    if (dtype := whole.result.dtype) in ("float16", "bfloat16"):
        rule = f"gives {dtype}, which the checkpoint's float32 weights do not take in a file"
        action = "export with dtype: float32 in normalize, or serve the checkpoint itself"
        raise ConfigError([Problem(f"{config.path}: the pipeline {whole.pipeline.name}", rule, action=action)])
    program, model = whole, trained
    if fold_normalize:
        program, model, info = _folded(config, whole, trained, info)
    samples = _samples(config, whole, data, info.classes)
    suffix, out = out.suffix, replaced_file(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    with _locating(out), _weights_file(out) as weights, atomic_write(out, suffix=suffix) as file:
        partial = Path(file.name)
        images = black_images(2, program.result, _CPU)
        if suffix == ".onnx":
            _write_onnx(model, images, partial, weights, info, opset)
        else:
            partial.write_bytes(_program_bytes(model, images, info))
        checks = _check(partial, program, whole, model, trained, samples)
        for check in checks:
            if not check.difference <= check.allowed:  # also true for NaN
                raise GpuflowError(f"{out}: is not what {path} computes, so it is not written: {check}")
    return Exported(
        path=out,
        checkpoint=path,
        weights=weights if weights.exists() else None,
        info=info,
        image=program.result,
        checks=checks,
    )


def _program(config: Config, info: ModelInfo, path: str) -> Program:
    """Return the program that the checkpoint was trained for: that of `serve` or of `val`."""
    programs = [config.programs[name] for name in ("serve", "val") if name in config.programs]
    if not programs:
        rule = "must have a pipeline val or a block serve, whose stages the exported model goes with"
        raise ConfigError([Problem(f"{config.path}:", rule)])
    for program in programs:
        if program.pipeline.fingerprint == info.preprocessing:
            return program
    model = config.serve.model if config.serve is not None else None
    refuse_other_preprocessing(info, programs[0].pipeline, path, force=model is not None and model.force, trust=False)
    return programs[0]


def _folded(config: Config, whole: Program, model: nn.Module, info: ModelInfo) -> tuple[Program, nn.Module, ModelInfo]:
    """Return the program without its last stage, and the model with it."""
    *stages, last = whole.pipeline.stages
    inside = last.module()
    if inside is None:
        rule = f"ends with {last!r}, which has no form inside a model; export without --fold-normalize"
        raise ConfigError([Problem(f"{config.path}: the pipeline {whole.pipeline.name}", rule)])
    pipeline = Pipeline(whole.pipeline.name, tuple(stages))
    info = replace(info, folded=whole.pipeline.lines[-1])
    if (
        info.preprocessing == whole.pipeline.fingerprint
    ):  # otherwise the export was forced, and serving must be forced too
        info = replace(info, preprocessing=pipeline.fingerprint, stages=pipeline.lines)
    return fold(pipeline, trace(pipeline)), nn.Sequential(inside, model).eval(), info


# --- writing ----------------------------------------------------------------------------------------------------------


@contextmanager
def _exporting() -> Iterator[None]:
    """Hide torch's warnings about its own code, and locate its exceptions, which have no common base class."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except Exception as error:
        rule = f"cannot export this model: {reason_of(error)}; serve the checkpoint itself"
        raise ConfigError([Problem("torch", rule)]) from error


@contextmanager
def _locating(out: Path) -> Iterator[None]:
    """Name the file in errors of a full disk, and say what to do."""
    try:
        yield
    except OSError as error:
        if is_system_fault(error):
            raise system_fault(error, str(out)) from error
        raise


def _program_bytes(model: nn.Module, images: torch.Tensor, info: ModelInfo) -> bytes:
    """Return a `.pt2` file, made in memory, because torch ends the process if it cannot write one to a full disk."""
    data = io.BytesIO()
    with _exporting():
        batch = torch.export.Dim("batch")
        program = torch.export.export(model, (images,), dynamic_shapes=({0: batch},))
        torch.export.save(program, data, extra_files={EXTRA_FILE: info.to_json()})
    return data.getvalue()


@contextmanager
def _weights_file(out: Path) -> Iterator[Path]:
    """Give a new path for weights that `out` cannot hold; the weights of an earlier `out` stay until it is replaced.

    At the end the weights of the earlier `out` are deleted, or after an exception the new ones.
    """
    new, own = out.with_name(f"{out.name}.{secrets.token_hex(4)}.data"), re.escape(out.name) + r"\.[0-9a-f]{8}\.data"
    others = [file for file in out.parent.iterdir() if re.fullmatch(own, file.name)]
    model = out.read_bytes() if others and out.is_file() else b""
    former = [file for file in others if os.fsencode(file.name) in model]
    try:
        yield new
    except BaseException:
        new.unlink(missing_ok=True)
        raise
    for file in former:
        file.unlink(missing_ok=True)


def _write_onnx(
    model: nn.Module, images: torch.Tensor, path: Path, weights: Path, info: ModelInfo, opset: int | None
) -> None:
    """Write the model to `path`, and weights that are too large for that to `weights`, in the same directory."""
    try:
        import onnx  # noqa: F401
        import onnx_ir
        import onnxruntime  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise MissingExtra("exporting to ONNX", str(error.name), "export") from error
    with _exporting():
        batch = torch.export.Dim("batch")
        program: Any = torch.onnx.export(
            model,
            (images,),
            dynamo=True,
            input_names=["images"],
            output_names=["logits"],
            dynamic_shapes=({0: batch},),
            opset_version=opset,
            verbose=False,
        )
        program.model.metadata_props[METADATA_KEY] = info.to_json()
    if sum(value.const_value.nbytes for value in program.model.graph.initializers.values()) < _MOST_IN_ONNX:
        program.save(path, external_data=False)
    else:
        onnx_ir.save(program.model, path, external_data=weights.name)
        with weights.open("rb") as file:
            os.fsync(file.fileno())
    written = program.model.opset_imports[""]
    if opset not in (None, written):
        raise ConfigError([Problem("--opset", f"is {opset}, but torch could only write {written}; use that")])


# --- checking ---------------------------------------------------------------------------------------------------------


def _samples(config: Config, program: Program, data: Path | None, classes: Sequence[str] | None) -> list[Bytes]:
    """Return some encoded images, spread evenly over the source or over a directory, without bad ones.

    classes: those of the model. Raises ConfigError if the source has others.
    """
    if data is not None:
        files = images_below(data)
        found = [np.fromfile(files[i], np.uint8) for i in spread(len(files), _REAL_IMAGES)]
        place = f"{data}:"
    else:
        try:
            source = open_split(config, program.pipeline.name)
        except SourceError as error:
            raise SourceError(f"{error}; or name a directory of images to check the model on: --data") from error
        with closing(source):
            if difference := class_difference(source.classes, classes):
                raise ConfigError(
                    [Problem(f"{config.path}: source", f"must have the checkpoint's classes, {difference}")]
                )
            payload = source.read(spread(len(source), _REAL_IMAGES), lambda size: np.empty(size, np.uint8))
        found = [payload.sample(i) for i, error in enumerate(payload.errors) if error is None]
        place = f"{config.path}: source"
    good = _pixels(program, found)[1] if found else []
    if not good:
        raise ConfigError([Problem(place, "has no image that can be decoded to check the model on; try --data")])
    return [found[i] for i in good]


def _pixels(program: Program, samples: list[Bytes]) -> tuple[torch.Tensor, list[int]]:
    """Return the images [N, C, H, W] of the samples that can be decoded, and the indices of these samples."""
    images, faults = run_files(program, samples)
    good = [i for i, fault in enumerate(faults) if fault is None]
    return images[good], good


def _check(
    path: Path, program: Program, whole: Program, model: nn.Module, trained: nn.Module, samples: list[Bytes]
) -> tuple[Check, ...]:
    """Compare the file at `path`, fed by `program`, with the checkpoint, fed by the whole pipeline."""
    folded = program is not whole
    real, full = _pixels(program, samples)[0], _pixels(whole, samples)[0]
    if folded and not torch.equal(model[0](real), full):  # type: ignore[index]
        raise GpuflowError(f"{whole.pipeline.lines[-1]}: its form inside a model differs from the stage itself")
    shape = (_RANDOM_IMAGES, *real.shape[1:])
    generator = torch.Generator().manual_seed(0)
    if folded:
        noise = torch.randint(0, 256, shape, dtype=torch.uint8, device="cpu", generator=generator)
        references = (noise, model), (full, trained)
    else:
        noise = torch.randn(shape, device="cpu", generator=generator).to(real.dtype)
        references = (noise, trained), (full, trained)
    checks = []
    with closing(open_engine(ModelSpec(file=str(path), batch=_BATCH), image=program.result, device=_CPU)) as engine:
        for name, given, (images, reference) in zip(("random", "real"), (noise, real), references, strict=True):
            # One image first, so that a batch of one is checked too.
            found = torch.cat([engine.run(batch) for batch in (given[:1], *_batches(given[1:]))])
            with torch.inference_mode():
                expected = torch.cat([reference(batch) for batch in _batches(images)]).float()
            checks.append(
                Check(
                    images=name,
                    count=len(images),
                    difference=float((found - expected).abs().max()),
                    allowed=TOLERANCE * max(1.0, float(expected.abs().max())),
                    agree=int((found.argmax(dim=1) == expected.argmax(dim=1)).sum()),
                )
            )
    return tuple(checks)


def _batches(images: torch.Tensor) -> list[torch.Tensor]:
    return [images[start : start + _BATCH] for start in range(0, len(images), _BATCH)]
