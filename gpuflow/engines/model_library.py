"""Builds models of torchvision and timm by name, and gives them pretrained weights from files of this machine."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from importlib import import_module
from pathlib import Path, PurePath
from typing import Any
from urllib.parse import urlsplit

import torch
from torch import nn

from gpuflow.engines.base import reading_fault
from gpuflow.errors import ConfigError, GpuflowError, MissingExtra, Problem, reason_of, suggest

TIMM = "timm:"
"""What the names of timm's models begin with."""
_INSIDE = "ema", "state_dict_ema", "model_ema", "state_dict", "model"
"""Under which of these keys a file of a training holds the weights; the first one that is there."""
_WRAPPERS = re.compile(r"^(_orig_mod\.|module\.)+")
_OLD_DENSENET = re.compile(r"(denselayer\d+\.(?:norm|relu|conv))\.([12])\.")


def build_model(arch: str, outputs: int) -> nn.Module:
    """Return a classification model with new weights: of torchvision, by name, or of timm, by `timm:` and its name.

    Raises ValueError or RuntimeError if there is none, MissingExtra if timm is not installed.
    """
    if arch.startswith(TIMM):
        timm_model: nn.Module = import_timm().create_model(arch.removeprefix(TIMM), num_classes=outputs)
        return timm_model
    from torchvision import models

    build: Callable[..., nn.Module] = models.get_model_builder(arch)
    with warnings.catch_warnings():
        # GoogLeNet's and Inception v3's, about how their weights will be drawn one day.
        warnings.filterwarnings("ignore", "The default weight initialization", FutureWarning)
        return build(weights=None, num_classes=outputs)


def import_timm() -> Any:
    """Return the library timm. Raises MissingExtra if it is not installed."""
    try:
        import timm
    except ImportError as error:
        raise MissingExtra("a model of timm", "timm", "timm") from error
    return timm


def known_models(like: str = "") -> list[str]:
    """Return the names of torchvision's classification models; if `like` begins with `timm:`, those of timm.

    Examples:
        >>> [name for name in known_models() if name.startswith("squeezenet")]
        ['squeezenet1_0', 'squeezenet1_1']
    """
    if like.startswith(TIMM):
        return [f"{TIMM}{name}" for name in import_timm().list_models()]
    from torchvision import models

    return models.list_models(module=models)  # type: ignore[no-any-return]


def is_model(name: str) -> bool:
    """Return True if torchvision or timm has a model of this name, which for timm may end in a tag such as
    `.a1_in1k`."""
    return (name.partition(".")[0] if name.startswith(TIMM) else name) in known_models(name)


def usual_sizes(arch: str) -> list[int]:
    """Return the sides in pixels of the images that the library's weights for this model were trained for, ascending.

    Examples:
        >>> usual_sizes("vit_h_14")
        [224, 518]
    """
    if arch.startswith(TIMM):
        return [import_timm().get_pretrained_cfg(arch.removeprefix(TIMM)).input_size[-1]]
    from torchvision import models

    return sorted({weights.transforms().crop_size[0] for weights in models.get_model_weights(arch)})


@lru_cache(maxsize=4)
def shapes_of(arch: str, outputs: int) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of a model's weights."""
    try:
        with torch.device("meta"):  # which has shapes and no values
            model = build_model(arch, outputs)
    except (NotImplementedError, RuntimeError):  # RegNet and models of timm compute their widths with tensors
        model = build_model(arch, outputs)
    return {name: tuple(value.shape) for name, value in model.state_dict().items()}


def named_model(name: str, outputs: int, place: str) -> nn.Module:
    """Return the model that `train.model` names, with new weights.

    place: of the configuration, for errors.

    Raises:
        ConfigError: there is no such model. MissingExtra: it is one of timm, which is not installed.
    """
    path, is_timm = ("train", "model"), name.startswith(TIMM)
    if not is_model(name):
        rule = f"is not a {'model of timm' if is_timm else 'torchvision classification model'}"
        action = suggest(name, known_models(name), else_all=not is_timm) or "timm.list_models() lists them"
        raise ConfigError([Problem(place, rule, name, action, path, "config.range")])
    try:
        return build_model(name, outputs)
    except RuntimeError as error:  # timm's, about the tag
        rule, action = f"cannot be built: {reason_of(error)}", "name another tag, or none"
        raise ConfigError([Problem(place, rule, name, action, path, "config.range")]) from error


def size_fault(model: nn.Module, height: int, width: int, *, training: bool) -> str:
    """Return why a model does not take images of this size; empty if it does. Runs it on tensors that have no
    values."""
    weights = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    shapes = {name: torch.empty_like(value, device="meta") for name, value in weights.items()}
    model.train(training)
    try:
        torch.func.functional_call(model, shapes, torch.empty(2, 3, height, width, device="meta"))
    except (RuntimeError, ValueError, AssertionError) as error:
        return reason_of(error)
    finally:
        model.train()
    return ""


# --- pretrained weights -----------------------------------------------------------------------------------------------


def load_pretrained(model: nn.Module, arch: str, outputs: int, wanted: str | bool, place: str) -> str:
    """Give a model the weights that `train.pretrained` names, which is `wanted`. Return what they are, for people.

    The layers whose shapes depend on the number of outputs keep their new weights, unless the file's have their shapes.
    Nothing is downloaded unless the key is `download`.

    place: of the configuration, for errors.

    Raises:
        ConfigError: the file is not there, cannot be read, or has the weights of another model.
    """

    def refused(rule: str, action: str) -> ConfigError:
        return ConfigError([Problem(place, rule, wanted, action, ("train", "pretrained"), "config.rule")])

    if wanted is False:
        return "new weights"
    try:
        weights, origin = _pretrained(arch, wanted, refused)
    except GpuflowError:
        raise
    except Exception as error:  # of the readers of torch, timm and safetensors, which have no common base
        raise refused(f"cannot be read: {reading_fault(error)}", "name another file") from error
    weights = {_OLD_DENSENET.sub(r"\1\2.", _WRAPPERS.sub("", name)): value for name, value in weights.items()}
    ours, others = shapes_of(arch, outputs), shapes_of(arch, outputs + 1)
    head = {name for name, shape in ours.items() if others[name] != shape}
    fitting = {name: value for name, value in weights.items() if tuple(getattr(value, "shape", ())) == ours.get(name)}
    absent = [name for name in ours if name not in fitting.keys() | head and not name.endswith("num_batches_tracked")]
    if absent:
        fault = f"has {absent[0]} in another shape" if absent[0] in weights else f"lacks {absent[0]}"
        rule = f"must hold the weights of {arch}, but {origin} {fault} ({len(absent)} of {len(ours)} do not fit)"
        raise refused(rule, "name weights of this model, or set train.model to theirs")
    model.load_state_dict(fitting, strict=False)
    return f"weights of {origin}" + ("" if head <= fitting.keys() else f" but for {', '.join(sorted(head))}")


def _pretrained(
    arch: str, wanted: str | bool, refused: Callable[[str, str], ConfigError]
) -> tuple[Mapping[str, Any], str]:
    """Return the weights that `train.pretrained` names, and where they are from.

    Raises `refused` with a rule and an action if there are none, and what the readers raise.
    """
    of_library = _of_timm if arch.startswith(TIMM) else _of_torchvision
    for load, places in of_library(arch, wanted):
        found = next((place for place in places if os.path.exists(place)), "")
        if found or wanted == "download":
            return load(found).state_dict(), found or f"{arch}, downloaded"
        rule = f"must be on this machine, no such file: {' or '.join(places)}"
        raise refused(rule, "copy it there, name a file, or set train.pretrained=download")
    path = Path(str(wanted)).absolute()
    if not path.is_file():
        names = "" if arch.startswith(TIMM) else f", the name of weights of {arch} ({', '.join(_names(arch))})"
        rule = f"must be true, download{names} or a file, and there is no file {path}"
        raise refused(rule, "correct the path")
    return _weights_in(path), str(path)


_Load = Callable[[str], nn.Module]


def _names(arch: str) -> list[str]:
    from torchvision import models

    return list(models.get_model_weights(arch).__members__)


def _of_torchvision(arch: str, wanted: str | bool) -> Iterator[tuple[_Load, list[str]]]:
    """Yield what loads torchvision's weights, and where their file is in torch's cache; nothing for a file's name."""
    from torchvision import models

    name = "DEFAULT" if wanted in (True, "download") else str(wanted)
    if name in _names(arch):
        weights = models.get_model_weights(arch)[name]
        file = PurePath(urlsplit(weights.url).path).name
        place = os.path.join(torch.hub.get_dir(), "checkpoints", file)
        yield lambda _: models.get_model(arch, weights=weights), [place]


def _of_timm(arch: str, wanted: str | bool) -> Iterator[tuple[_Load, list[str]]]:
    """Yield what loads timm's weights, and where their file may be in the caches; nothing for a file's name."""
    if wanted not in (True, "download"):
        return
    timm, name = import_timm(), arch.removeprefix(TIMM)
    about = timm.get_pretrained_cfg(name)
    places = []
    if about.hf_hub_id:
        hub, constants = map(import_module, ("huggingface_hub", "huggingface_hub.constants"))  # which timm needs
        for file in ("model.safetensors", "pytorch_model.bin"):
            folder = os.path.join(constants.HF_HUB_CACHE, f"models--{about.hf_hub_id.replace('/', '--')}")
            cached = hub.try_to_load_from_cache(about.hf_hub_id, file)
            places.append(cached if isinstance(cached, str) else os.path.join(folder, "snapshots", "*", file))
    if about.url:
        places.append(os.path.join(torch.hub.get_dir(), "checkpoints", PurePath(urlsplit(about.url).path).name))

    def load(file: str) -> nn.Module:
        overlay = {"pretrained_cfg_overlay": {"file": file}} if file else {}
        model: nn.Module = timm.create_model(name, pretrained=True, **overlay)
        return model

    yield load, places


def _weights_in(path: Path) -> Mapping[str, Any]:
    """Return the weights in a file: a mapping of tensors, which may be inside a checkpoint."""
    if path.suffix == ".safetensors":
        try:
            safetensors: Any = import_module("safetensors.torch")
        except ImportError as error:
            raise MissingExtra("reading .safetensors", "safetensors", "timm") from error
        state = safetensors.load_file(path)
    else:
        state = torch.load(path, map_location="cpu", weights_only=True)
    inside = next((state[key] for key in _INSIDE if isinstance(state.get(key), Mapping)), state)
    weights: Mapping[str, Any] = inside
    return weights
