"""The interface of a model engine, what a model file says of itself, and what is checked before one runs."""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol, TypeVar

import torch

from gpuflow.errors import ConfigError, Problem
from gpuflow.pipeline.stage import ImageSpec, Pipeline
from gpuflow.runtime.threads import DaemonPool

__all__ = [
    "METADATA_KEY",
    "Engine",
    "ModelInfo",
    "aside",
    "black_images",
    "check_batch",
    "check_classes",
    "check_input",
    "cores_each",
    "model_error",
    "read_model",
    "refuse_other_preprocessing",
]

METADATA_KEY = "gpuflow"
"""Under which name an exported file carries its `ModelInfo`, as JSON."""

_ASIDE_SECONDS = 1800.0

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelInfo:
    """What a model file says of itself; None where it does not.

    classes: names of the outputs. preprocessing, stages: `Pipeline.fingerprint` and `Pipeline.lines` of what must stand
    before the model. folded: the line of the stage that is inside the model, which then takes its uint8 images.
    """

    classes: tuple[str, ...] | None = None
    preprocessing: str | None = None
    stages: tuple[str, ...] | None = None
    folded: str | None = None

    def to_json(self) -> str:
        """With the version of gpuflow that writes it."""
        from gpuflow.version import __version__

        return json.dumps({"gpuflow": __version__, **asdict(self)}, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str | None) -> ModelInfo:
        """The opposite of `to_json`; keys of later versions are passed over. None and "" say nothing."""
        fields = json.loads(text) if text else {}
        classes, stages = fields.get("classes"), fields.get("stages")
        return cls(
            classes=None if classes is None else tuple(classes),
            preprocessing=fields.get("preprocessing"),
            stages=None if stages is None else tuple(stages),
            folded=fields.get("folded"),
        )


class Engine(Protocol):
    """A loaded model. One thread at a time uses an engine; several engines may share weights.

    torch computes with one thread where a graph calls it, unless it asks for more (`use_torch_threads`).
    """

    info: ModelInfo
    batch: int
    """The largest batch that `run` takes."""

    def warm_up(self) -> None:
        """Run what `run` will run, so that the first request is not a slow one. On any thread."""

    def bind_thread(self) -> None:
        """Make what libraries keep for each thread. On the thread that is to call `run`, once the engine is warm."""

    def run(self, images: torch.Tensor) -> torch.Tensor:
        """Images [N, C, H, W] as the pipeline gives them, on the engine's device, to float32 logits [N, K] on the CPU.

        Raises ValueError unless 1 <= N <= batch and the images are of the pipeline's shape and dtype.
        """
        ...

    def describe(self) -> dict[str, Any]:
        """Engine, versions of its libraries, device, precision, batch, file: plain values for reports."""
        ...

    def close(self) -> None:
        """Let go of the model. An engine that was closed does not run again."""


# --- helpers of engines -----------------------------------------------------------------------------------------------


def cores_each(instances: int) -> int:
    """Threads for each of so many engines: the cores that this process may use, shared among them."""
    return max(1, len(os.sched_getaffinity(0)) // instances)


def aside(work: Callable[[], T]) -> T:
    """What `work` gives on a thread of its own.

    An engine binds the thread that runs it to its share of the cores. And OpenMP's threads, of which torch keeps a team
    for each thread that ever used one, spin only while there are no more of them than cores: a ResNet-18 on two cores
    takes 16 ms instead of 12 where the main thread has such a team besides.
    """
    with DaemonPool(1, "engine") as pool:
        return pool.submit(work).result(_ASIDE_SECONDS)


def black_images(count: int, image: ImageSpec, device: torch.device) -> torch.Tensor:
    """[count, C, H, W] as the pipeline gives them, in its dtype and memory layout."""
    height, width, channels = image.shape
    assert height is not None and width is not None
    images = torch.zeros((count, channels, height, width), dtype=getattr(torch, image.dtype), device=device)
    return images if image.layout == "nchw" else images.contiguous(memory_format=torch.channels_last)


# --- checks -----------------------------------------------------------------------------------------------------------


def model_error(path: str, text: str) -> ConfigError:
    """A fault of a model file."""
    return ConfigError([Problem(f"{path}:", text)])


def read_model(path: str, read: Callable[[], T], what: str) -> T:
    """What `read` makes of the file. Whatever the library raises, which has no common base, becomes a located error."""
    try:
        return read()
    except Exception as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise model_error(path, f"cannot be read as {what}: {reason}") from error


def check_input(path: str, image: ImageSpec, info: ModelInfo, *, shape: Sequence[int | None], dtype: str) -> None:
    """Raise ConfigError unless a model that declares this input, shape [N, C, H, W], takes what the pipeline gives.

    None in the shape, or a name, stands for any length.
    """
    height, width, channels = image.shape
    gives = f"{image.dtype} {channels}x{height}x{width}"
    fits = len(shape) == 4 and all(
        not isinstance(side, int) or side == ours
        for side, ours in zip(shape[1:], (channels, height, width), strict=True)
    )
    if fits and dtype == image.dtype:
        return
    if info.folded is not None and dtype == "uint8" != image.dtype:
        raise _twice(path, info.folded, "serve")
    takes = "x".join(str(side) if isinstance(side, int) else "?" for side in shape[1:])
    raise model_error(
        path,
        f"takes images of {dtype} {takes} (channels x height x width), serve.stages give {gives}; "
        "change the stages or export the model for them",
    )


def check_batch(images: torch.Tensor, image: ImageSpec, batch: int) -> None:
    """Raise ValueError unless these are 1 to `batch` images [N, C, H, W] of what the pipeline gives."""
    height, width, channels = image.shape
    count = images.shape[0]
    if images.shape[1:] != (channels, height, width) or images.dtype != getattr(torch, image.dtype):
        got = f"{str(images.dtype).removeprefix('torch.')} {list(images.shape)}"
        raise ValueError(f"an engine takes {image.dtype} [N, {channels}, {height}, {width}], got {got}")
    if not 1 <= count <= batch:
        raise ValueError(f"an engine takes 1 to {batch} images, its serve.model.batch, got {count}")


def check_classes(engine: Engine, path: str, image: ImageSpec, device: torch.device) -> None:
    """Run one black image. Raise ConfigError unless that gives logits, one for each class that the file names."""
    height, width, channels = image.shape
    try:
        logits = aside(lambda: engine.run(black_images(1, image, device)))
    except (RuntimeError, ValueError, AssertionError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise model_error(path, f"fails on an image of {image.dtype} {channels}x{height}x{width}: {reason}") from error
    if logits.ndim != 2:
        raise model_error(path, f"must give logits [N, classes], gives {logits.ndim} axes: {list(logits.shape)}")
    classes = engine.info.classes
    if classes is not None and len(classes) != logits.shape[1]:
        raise model_error(path, f"names {len(classes)} classes but gives {logits.shape[1]} logits; export it again")


def refuse_other_preprocessing(info: ModelInfo, pipeline: Pipeline, path: str, force: bool) -> None:
    """Raise ConfigError, with a diff, where a model is to get other images than it was trained with.

    Args:
        info: what the model's file says; one that does not name its preprocessing passes.
        pipeline: what the model would get. path: the model's file. force: let it pass.
    """
    if force or info.preprocessing in (None, pipeline.fingerprint):
        return
    if info.folded is not None and pipeline.lines == (*(info.stages or ()), info.folded):
        raise _twice(path, info.folded, pipeline.name)
    lines = [
        f"was trained with preprocessing {info.preprocessing}, the stages of {pipeline.name} are "
        f"{pipeline.fingerprint}; take the stages that it was trained with, or set serve.model.force=true"
    ]
    if info.stages is not None:
        trained, ours = "what the model was trained with", f"the stages of {pipeline.name}"
        every = len(info.stages) + len(pipeline.lines)
        lines += difflib.unified_diff(info.stages, pipeline.lines, trained, ours, lineterm="", n=every)
    raise model_error(path, "\n".join(lines))


def _twice(path: str, folded: str, pipeline: str) -> ConfigError:
    """A stage stands in a pipeline and is inside the model behind it."""
    return model_error(path, f"has {folded} inside and takes uint8 pixels; remove that stage from {pipeline}.stages")
