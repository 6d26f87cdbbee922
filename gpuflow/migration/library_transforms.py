"""The transforms of other libraries as functions that run, to compare with: `gpuflow parity --against SOURCE`."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpuflow.errors import ConfigError, Problem
from gpuflow.migration.from_timm import data_config
from gpuflow.migration.imported import named_transform, needs, read_document

if TYPE_CHECKING:
    import torch


LIBRARIES = ("torchvision", "timm", "hf", "albumentations")
"""The libraries that a source may begin with."""


@dataclass(frozen=True, slots=True)
class LibraryTransform:
    """A transform of a PIL image to a tensor [C, H, W]. about: what runs, with versions.

    converts: whether it converts images to RGB itself, so that it gets what Image.open gives; else it gets what
    Image.open(path).convert("RGB") gives, as the loaders of torchvision and timm do.
    other: another implementation of it, with the name that tells them apart, such as `slow`.
    """

    run: Callable[[Any], torch.Tensor]
    about: str
    converts: bool = False
    other: tuple[str, LibraryTransform] | None = None


def library_transform(source: str) -> LibraryTransform:
    """The transform of a source that begins with one of LIBRARIES.

    Raises:
        ConfigError: there is no such source. MissingLibrary: its library is not installed.
    """
    library, _, name = source.partition(":")
    if library not in _OPENERS:
        action = f"known: {', '.join(f'{known}:...' for known in _OPENERS)}"
        raise ConfigError([Problem("--against:", "names no library to run", source, action, code="import.source")])
    return _OPENERS[library](name)


def _torchvision(name: str) -> LibraryTransform:
    return LibraryTransform(_to_tensor(named_transform(name)), f"{name} on PIL images, {_version('torchvision')}")


def _timm(name: str) -> LibraryTransform:
    config, _ = data_config(name)
    timm = needs("timm.data", f"timm:{name}")
    return LibraryTransform(
        _to_tensor(timm.create_transform(**dataclasses.asdict(config))),
        f"create_transform on PIL images, {_version('timm')}",
    )


def _huggingface(name: str) -> LibraryTransform:
    transformers, path = needs("transformers", f"hf:{name}"), Path(name)
    document = read_document(str(path / "preprocessor_config.json" if path.is_dir() else path))
    backends = ("torchvision", "pil")
    if int(transformers.__version__.partition(".")[0]) >= 5:
        choices: tuple[dict[str, Any], ...] = tuple({"backend": backend} for backend in backends)
    else:
        choices = ({"use_fast": True}, {"use_fast": False})
    folder = str(Path(document.path).parent)
    fast, slow = (
        transformers.AutoImageProcessor.from_pretrained(folder, local_files_only=True, **choice) for choice in choices
    )

    def run(processor: Any) -> Callable[[Any], torch.Tensor]:
        return lambda image: processor(images=image, return_tensors="pt")["pixel_values"][0]

    version = _version("transformers")
    return LibraryTransform(
        run(fast),
        f"{type(fast).__name__}, the fast processor, {version}",
        True,
        ("slow", LibraryTransform(run(slow), f"{type(slow).__name__}, the slow processor, {version}", True)),
    )


def _albumentations(name: str) -> LibraryTransform:
    albumentations = needs("albumentations", f"albumentations:{name}")
    import numpy as np
    import torch

    transform = albumentations.from_dict(json.loads(json.dumps(read_document(name).data)))

    def run(image: Any) -> torch.Tensor:
        found = transform(image=np.array(image))["image"]
        if isinstance(found, torch.Tensor):
            return found
        return torch.from_numpy(np.atleast_3d(found)).permute(2, 0, 1)  # a gray image may have no axis of channels

    return LibraryTransform(run, f"{_version('albumentations')}, OpenCV's resize")


_OPENERS: dict[str, Callable[[str], LibraryTransform]] = dict(
    zip(LIBRARIES, (_torchvision, _timm, _huggingface, _albumentations), strict=True)
)


def _to_tensor(transform: Callable[[Any], Any]) -> Callable[[Any], torch.Tensor]:
    """The transform, with a PIL image among its results as a tensor."""
    import torch
    from torchvision.transforms.v2 import functional

    def run(image: Any) -> torch.Tensor:
        found = transform(image)
        tensor: torch.Tensor = found if isinstance(found, torch.Tensor) else functional.pil_to_tensor(found)
        return tensor.as_subclass(torch.Tensor)

    return run


def _version(package: str) -> str:
    return f"{package} {importlib.metadata.version(package).partition('+')[0]}"
