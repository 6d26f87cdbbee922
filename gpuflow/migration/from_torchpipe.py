"""Reads the TOML file of an older torchpipe integration, such as gpu_decode_train.toml. torchpipe is not needed."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from gpuflow.errors import ConfigError, Problem, suggest
from gpuflow.migration.files import read_toml
from gpuflow.migration.imported import Entry, Imported, PresetEntry, gap, normalize

__all__ = ["read_torchpipe"]

_MATCHES = (
    "Matches torchpipe's own operators by a preset. Their pixels differ from those of decode and resize: no "
    "antialiasing and, on a GPU, other chroma upsampling. To drop them, train and serve with decode and resize.",
)
_FALLBACK = (
    "Files that DecodeTensor refuses are decoded by DecodeMat, as in the file's fallback; they are then resized by "
    "ResizeTensor, where the fallback has ResizeMat."
)
_ON_GPU, _ON_CPU = ("decodetensor", "resizetensor", "cvtcolortensor"), ("decodemat", "resizemat", "cvtcolormat")
_KNOWN = (*_ON_GPU, *_ON_CPU, "mat2tensor", "synctensor", "streamguard", "torch", "tensorrttensor", "s", "sequential")
_KEYS = (
    *("backend", "next", "instance_num", "batching_timeout", "max", "min", "color", "resize_h", "resize_w", "filter"),
    *("or", "precision", "model", "model::cache", "mean", "std", "data_format", "Interpreter::backend"),
)
_MODEL = "tensorrttensor"
_NUMBERS_RULE = 'must be numbers separated by commas, such as "123.675, 116.28, 103.53"'


def read_torchpipe(path: str) -> Imported:
    """The preset, the normalization and the model of a TOML file.

    Raises:
        ConfigError: there is no such file, or it decodes no images.
    """
    return _Reader(path).read()


class _Reader:
    """Reads one file: nodes that decode, of which the second is the fallback, and a node with the model."""

    def __init__(self, path: str) -> None:
        self._path, data = path, read_toml(path)
        self._shared = {key: value for key, value in data.items() if not isinstance(value, dict)}
        self._nodes = {key: {**self._shared, **value} for key, value in data.items() if isinstance(value, dict)}
        self._gaps: list[Problem] = []

    def read(self) -> Imported:
        self._check_keys()
        decoders = {name: _operators(node) for name, node in self._nodes.items()}
        for name, operators in decoders.items():
            for operator in operators:
                if operator.lower() not in _KNOWN:
                    rule = f"{operator} is an operator that gpuflow has not"
                    self._gaps.append(gap(self._at(name), rule, nearest="leave it out", apart="not measured"))
        lower = {name: [operator.lower() for operator in operators] for name, operators in decoders.items()}
        decoding = [name for name, found in lower.items() if {_ON_GPU[0], _ON_CPU[0]} & set(found)]
        if not decoding:
            problem = Problem(
                f"{self._path}:", "has no node that decodes by DecodeTensor or DecodeMat", code="import.source"
            )
            raise ConfigError([problem])
        on_gpu = any(_ON_GPU[0] in lower[name] for name in decoding)
        fallback = on_gpu and any(_ON_CPU[0] in lower[name] for name in decoding)
        preset = self._preset(decoding, on_gpu=on_gpu)
        model = next((name for name in self._nodes if _MODEL in lower[name]), None)
        entries = self._normalization(model)
        return Imported(
            source=f"torchpipe:{self._path}",
            matches=(*_MATCHES, *((_FALLBACK,) if fallback else ()), *(() if entries else (_NO_NUMBERS,))),
            pipelines={"train": entries, "val": entries},
            gaps=tuple(self._gaps),
            preset=preset,
            model=None if model is None else self._served(model),
        )

    def _at(self, name: str) -> str:
        return f"{self._path}: [{name}]"

    def _check_keys(self) -> None:
        for name, node in self._nodes.items():
            for key in node.keys() - set(_KEYS):
                action = suggest(key, _KEYS, else_all=False) or "it is left out with --partial"
                rule = "is not a key of torchpipe that gpuflow knows"
                self._gaps.append(Problem(self._at(name), rule, node[key], action, (key,), "import.unknown_key"))

    def _preset(self, names: list[str], *, on_gpu: bool) -> PresetEntry:
        """The size and color, which all nodes that decode must share."""
        found = {}
        for name in names:
            node = self._nodes[name]
            try:
                found[name] = (int(node["resize_h"]), int(node["resize_w"]), str(node.get("color", "rgb")))
            except (KeyError, ValueError, TypeError) as error:
                problem = Problem(self._at(name), f"needs resize_h and resize_w: {error}", code="import.source")
                raise ConfigError([problem]) from error
        first = found[names[0]]
        for name, other in found.items():
            if other != first:
                rule = "resizes to another size or color than the node before it"
                self._gaps.append(
                    gap(self._at(name), rule, nearest=f"{first[0]}x{first[1]}, {first[2]}, for all files")
                )
        preset = "torchpipe_gpu" if on_gpu else "torchpipe_cpu"
        return PresetEntry(preset=preset, height=first[0], width=first[1], color=first[2])

    def _normalization(self, model: str | None) -> list[Entry]:
        """`mean` and `std` of the model's node, in levels."""
        if model is None or not {"mean", "std"} <= self._nodes[model].keys():
            return []
        mean, std = (
            [level / 255 for level in self._value(model, key, _numbers, _NUMBERS_RULE)] for key in ("mean", "std")
        )
        return [normalize(mean, std)]

    def _served(self, model: str) -> dict[str, Any]:
        """The keys of `serve.model`."""
        node = self._nodes[model]
        keys: dict[str, Any] = {"file": node.get("model", "model.onnx")}
        if (batch := re.match(r"\d+", str(node.get("max", "")))) is not None:
            keys["batch"] = int(batch[0])
        for key, ours, make, rule in (
            ("instance_num", "instances", int, "must be a whole number"),
            ("batching_timeout", "timeout_ms", float, "must be a number of milliseconds"),
        ):
            keys |= {ours: self._value(model, key, make, rule)} if key in node else {}
        return {**keys, "preprocessing": "trust"}

    def _value(self, name: str, key: str, make: Callable[[str], Any], rule: str) -> Any:
        """The value of a node's key, made from its text."""
        value = self._nodes[name][key]
        try:
            return make(str(value))
        except ValueError as error:
            raise ConfigError([Problem(self._at(name), rule, value, path=(key,), code="import.source")]) from error


def _numbers(text: str) -> list[float]:
    return [float(word) for word in text.split(",")]


_NO_NUMBERS = (
    "The file names no mean and std: add normalize, and for train the other stages of transforms_gpu, which "
    "gpuflow import module:attribute writes down."
)


def _operators(node: Mapping[str, Any]) -> list[str]:
    """The names in a backend such as SyncTensor[ Sequential[DecodeTensor,ResizeTensor] ]."""
    backend = str(node.get("backend") or node.get("Interpreter::backend") or "").replace("(or)", "")
    return re.findall(r"[A-Za-z_]\w*", backend)
