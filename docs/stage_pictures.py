"""Draws a small picture for each stage: a photograph, and what the stage makes of it at three magnitudes.

The build of the documentation calls it, so that the pictures are those of the code and the repository has none of them.
The magnitudes are those of experiments/augment/pictures.py.
"""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from PIL import Image

from gpuflow.pipeline.program import Program, fold, trace
from gpuflow.pipeline.stage import Keys, Mixing, Pipeline, Stage
from gpuflow.stages import STAGES, CenterCrop, Decode, Resize

__all__ = ["LARGEST_BYTES", "WITHOUT", "captions", "picture"]

WITHOUT = {
    "decode": "it reads files",
    "iou_crop": "it needs the boxes of a sample",
    "normalize": "its numbers are no colours",
}
"""The stages without a picture, and why."""
LARGEST_BYTES = 15_000

_SIDE, _GAP, _QUALITY = 96, 4, 70
_MORE: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "cover_resize": {f"scale {n}": {"size": _SIDE, "scale": (n, n), "probability": 1.0} for n in (1.0, 0.7, 0.4)},
    "scale_jitter": {f"scale {n}": {"size": _SIDE, "scale": (n, n)} for n in (0.4, 1.0, 1.6)},
    "zoom_out": {f"scale {n}": {"scale": (n, n), "fill": 114, "probability": 1.0} for n in (1.2, 2.0, 3.0)},
    "torchvision": {
        "ElasticTransform": {"name": "ElasticTransform", "parameters": (("alpha", 120.0),)},
        "RandomChannelPermutation": {"name": "RandomChannelPermutation"},
        "RandomVerticalFlip": {"name": "RandomVerticalFlip", "parameters": (("p", 1.0),)},
    },
}
"""Stages that the experiment does not draw."""


@cache
def _experiment() -> ModuleType:
    path = Path(__file__).parents[1] / "experiments/augment/pictures.py"
    spec = importlib.util.spec_from_file_location("augment_pictures", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _magnitudes(stage: str) -> Mapping[str, Mapping[str, Any]]:
    found: Mapping[str, Mapping[str, Any]] = {**_experiment().PICTURES, **_MORE}[stage]
    return found


def captions(stage: str) -> list[str]:
    """Return what the pictures of a stage show, after the photograph; an empty list if it has none."""
    return [] if stage in WITHOUT else [label or stage for label in _magnitudes(stage)]


def picture(stage: str) -> bytes:
    """Draw a stage. Return a JPEG: the photograph, then a square a caption, smaller results centred in it.

    Raises KeyError if nothing says with which parameters.
    """
    experiment = _experiment()
    photo, second = (experiment.photograph(name, _SIDE) for name in ("astronaut", "coffee"))
    squares = [photo]
    for number, parameters in enumerate(_magnitudes(stage).values()):
        if issubclass(STAGES[stage], Mixing):
            squares.append(experiment.mixed(stage, (photo, second), parameters["share"], torch.device("cpu"))[0])
        else:
            squares.append(
                experiment.on_cpu(_program(stage, parameters), photo, Keys(0, 0, np.array([3 + 5 * number])))
            )
    strip = Image.new("RGB", (len(squares) * (_SIDE + _GAP) - _GAP, _SIDE), "white")
    for number, square in enumerate(squares):
        image = Image.fromarray(square)
        if max(image.size) > _SIDE:
            image.thumbnail((_SIDE, _SIDE))
        left = number * (_SIDE + _GAP)
        strip.paste(image, (left + (_SIDE - image.width) // 2, (_SIDE - image.height) // 2))
    file = io.BytesIO()
    strip.save(file, "JPEG", quality=_QUALITY, optimize=True)
    return file.getvalue()


def _program(stage: str, parameters: Mapping[str, Any]) -> Program:
    """Return the stage alone on decoded pixels, and what makes images of one size where it gives images of any."""
    equal: dict[str, Stage] = {"cover_resize": CenterCrop(size=_SIDE), "scale_jitter": CenterCrop(size=_SIDE)}
    equal |= {"zoom_out": Resize(height=_SIDE, width=_SIDE)}
    after = (equal[stage],) if stage in equal else ()
    pipeline = Pipeline("pictures", (Decode(), CenterCrop(size=_SIDE), STAGES[stage](**parameters), *after))
    return fold(pipeline, trace(pipeline))
