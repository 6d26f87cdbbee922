"""Draws a small picture for each stage: a photograph, and what the stage makes of it at three magnitudes.

The build of the documentation calls it, so that the pictures are those of the code and the repository has none of them.
The stages and their magnitudes are those of experiments/augment/pictures.py.
"""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from PIL import Image

from gpuflow.pipeline.stage import Mixing
from gpuflow.stages import STAGES

__all__ = ["LARGEST_BYTES", "captions", "picture", "pictured"]

LARGEST_BYTES = 15_000

_SIDE, _GAP, _QUALITY = 96, 4, 70


@cache
def _experiment() -> ModuleType:
    path = Path(__file__).parents[1] / "experiments/augment/pictures.py"
    spec = importlib.util.spec_from_file_location("augment_pictures", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def pictured() -> Mapping[str, Mapping[str, Mapping[str, Any]]]:
    """Return every stage with a picture, and its magnitudes by what is written below them."""
    found: Mapping[str, Mapping[str, Mapping[str, Any]]] = _experiment().picture_parameters()
    return found


def captions(stage: str) -> list[str]:
    """Return what the pictures of a stage show, after the photograph; an empty list if it has none."""
    return [label or stage for label in pictured().get(stage, {})]


def picture(stage: str) -> bytes:
    """Draw a stage. Return a JPEG: the photograph, then a square a caption, smaller results centred in it.

    Raises KeyError if the stage has no picture.
    """
    experiment = _experiment()
    photo, second = (experiment.photograph(name, _SIDE) for name in ("astronaut", "coffee"))
    squares = [photo]
    for number, (label, parameters) in enumerate(pictured()[stage].items()):
        if issubclass(STAGES[stage], Mixing):
            squares.append(experiment.mixed(stage, (photo, second), parameters["share"], torch.device("cpu"))[0])
        else:
            program = experiment.program(stage, parameters, _SIDE)
            keys = experiment.keys_of(program, stage, number, label, _SIDE)
            squares.append(experiment.on_cpu(program, photo, keys))
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
