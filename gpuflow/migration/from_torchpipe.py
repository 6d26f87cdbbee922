"""Reads the TOML file of an older torchpipe integration, such as gpu_decode_train.toml. torchpipe is not needed."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from gpuflow.errors import Problem, suggest
from gpuflow.migration.imported import (
    Entry,
    Imported,
    PresetEntry,
    gap,
    normalize,
    read_toml,
    source_error,
    unknown_key,
)

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
_PRECISIONS = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
_NO_PRECISION = (
    "The model's node names no precision: torchpipe builds its engine for fp16, and gpuflow runs the model in float32. "
    "For fp16 write serve.model.engine: tensorrt and precision: float16."
)
_CACHE = (
    "model::cache = {} is the file of one engine. gpuflow keeps engines in the folder serve.model.tensorrt.cache: {}, "
    "by the model and its settings, and builds its own there."
)
_WITHOUT_TENSORRT = "Without TensorRT: gpuflow serve FILE serve.model.engine=onnxruntime serve.model.precision=float32"
_NUMBERS_RULE = 'must be numbers separated by commas, such as "123.675, 116.28, 103.53"'


def read_torchpipe(path: str) -> Imported:
    """Return the preset, the normalization and the model of a TOML file.

    Raises:
        ConfigError: there is no such file, or it decodes no images.
    """
    return _Reader(path).read()


class _Reader:
    """Reads one file: nodes that `next` joins, of which one or two decode, and one is the model."""

    def __init__(self, path: str) -> None:
        self._path, data = path, read_toml(path)
        self._shared = {key: value for key, value in data.items() if not isinstance(value, dict)}
        self._nodes = {key: {**self._shared, **value} for key, value in data.items() if isinstance(value, dict)}
        self._gaps: list[Problem] = []
        self._notes: list[str] = []

    def read(self) -> Imported:
        lower: dict[str, set[str]] = {}
        for name, node in self._nodes.items():
            unknown = [key for key in node if key not in _KEYS]
            self._gaps += [unknown_key(self._at(name), (key,), node[key], _KEYS, "torchpipe") for key in unknown]
            backend = str(node.get("backend") or node.get("Interpreter::backend") or "").replace("(or)", "")
            operators = re.findall(r"[A-Za-z_]\w*", backend)  # such as SyncTensor[Sequential[DecodeTensor]]
            lower[name] = {operator.lower() for operator in operators}
            for operator in operators:
                if operator.lower() not in _KNOWN:
                    rule = f"{operator} is an operator that gpuflow has not"
                    self._gap(name, rule, "leave it out")
        decoding = [name for name, found in lower.items() if {_ON_GPU[0], _ON_CPU[0]} & found]
        if not decoding:
            raise source_error(f"{self._path}:", "has no node that decodes by DecodeTensor or DecodeMat")
        paths = {name: self._path_from(name) for name in self._nodes}
        on_gpu = any(_ON_GPU[0] in lower[name] for name in decoding)
        fallback = on_gpu and any(_ON_CPU[0] in lower[name] for name in decoding)
        preset = self._preset({name: paths[name] for name in decoding}, on_gpu=on_gpu)
        ahead = paths[decoding[0]]
        model, *others = dict.fromkeys(name for name in (*ahead, *self._nodes) if _MODEL in lower[name]) or (None,)
        for other in others:
            self._gap(other, "is a second model", f"serve.model of [{model}] alone")
        entries = self._normalization([*ahead, *([model] if model else [])], named=preset.color == "rgb")
        served = None if model is None else self._served(model)
        if not entries:
            self._notes.insert(0, _NO_NUMBERS)
        if fallback:
            self._notes.insert(0, _FALLBACK)
        return Imported(
            source=f"torchpipe:{self._path}",
            matches=(*_MATCHES, *self._notes),
            pipelines={"train": entries, "val": entries},
            gaps=tuple(self._gaps),
            preset=preset,
            model=served,
        )

    def _at(self, name: str) -> str:
        return f"{self._path}: [{name}]"

    def _gap(self, name: str, rule: str, nearest: str, *path: str) -> None:
        """Note what of a node is not carried over. path: its key."""
        self._gaps.append(gap(self._at(name), rule, nearest, path=path))

    def _path_from(self, name: str) -> list[str]:
        """Return the nodes that an image passes from a node on, which `next` joins.

        Raises:
            ConfigError: `next` names no node, or leads back.
        """
        path = [name]
        while (after := self._nodes[path[-1]].get("next")) is not None:
            names = [word.strip() for word in str(after).split(",")]
            for wrong in [one for one in names if one not in self._nodes or one in path]:
                rule = f"{wrong!r} leads back to a node before it" if wrong in path else f"{wrong!r} names no node"
                action = "" if wrong in path else suggest(wrong, [*(self._nodes.keys() - path)] or self._nodes)
                raise source_error(self._at(path[-1]), rule, action=action, path=("next",))
            if len(names) > 1 and path == [name]:
                rule = "leads to several nodes"
                self._gap(name, rule, f"[{names[0]}] alone", "next")
            path.append(names[0])
        return path

    def _preset(self, paths: Mapping[str, list[str]], *, on_gpu: bool) -> PresetEntry:
        """Return the size and color, which all nodes that decode must share. paths: from each of these nodes on."""
        found = {}
        for name, path in paths.items():
            following = [one for one in path if one == name or one not in paths]
            color = next((self._nodes[one]["color"] for one in following if "color" in self._nodes[one]), "rgb")
            found[name] = (self._side(following, "resize_h"), self._side(following, "resize_w"), str(color))
        (height, width, color), *_ = found.values()
        for name, other in found.items():
            if other != (height, width, color):
                rule = "resizes to another size or color than the node before it"
                self._gap(name, rule, f"{height}x{width}, {color}, for all files")
        preset = "torchpipe_gpu" if on_gpu else "torchpipe_cpu"
        return PresetEntry(preset=preset, height=height, width=width, color=color)

    def _side(self, path: list[str], key: str) -> int:
        """Return the number of pixels that the first node with this key has."""
        holder = next((name for name in path if key in self._nodes[name]), None)
        if holder is None:
            action = "write it there or in a node that follows by next"
            raise source_error(self._at(path[0]), f"leads to no node with {key}", action=action)
        side: int = self._value(holder, key, int, "must be a whole number of pixels")
        return side

    def _normalization(self, path: list[str], *, named: bool) -> list[Entry]:
        """Return `mean` and `std`, in levels, of the first node on the way to the model that has them.

        named: ImageNet's numbers may be called imagenet.
        """
        for name in path:
            if {"mean", "std"} <= self._nodes[name].keys():
                mean, std = (np.divide(self._value(name, key, _numbers, _NUMBERS_RULE), 255) for key in ("mean", "std"))
                return [normalize(mean.tolist(), std.tolist(), named=named)]
        return []

    def _served(self, model: str) -> dict[str, Any] | None:
        """Return the keys of `serve.model`; None if its file is none that gpuflow serves."""
        node = self._nodes[model]
        keys: dict[str, Any] = {"file": str(node.get("model", "model.onnx"))}
        if Path(keys["file"]).suffix != ".onnx":
            rule, nearest = "is no ONNX file, of which gpuflow builds engines", "serve without a model"
            self._gap(model, f"{keys['file']} {rule}", nearest, "model")
            return None
        if (batch := _first_side(node, "max")) is not None:
            keys["batch"] = batch
        if "instance_num" in node:
            keys["instances"] = self._value(model, "instance_num", int, "must be a whole number")
        if "batching_timeout" in node:
            keys["timeout_ms"] = self._value(model, "batching_timeout", float, "must be a number of milliseconds")
        return {**keys, **self._engine(model, keys.get("batch", 1)), "preprocessing": "trust"}

    def _engine(self, model: str, batch: int) -> dict[str, Any]:
        """Return the keys of the engine: its precision, smallest batch and cache."""
        node = self._nodes[model]
        keys: dict[str, Any] = {}
        if "precision" not in node:
            self._notes.append(_NO_PRECISION)
        elif (precision := _PRECISIONS.get(str(node["precision"]))) is None:
            rule = f"is {node['precision']}, which gpuflow builds no engine of"
            self._gap(model, rule, "precision: float16", "precision")
            keys["precision"] = "float16"
        elif precision != "float32":
            keys["precision"] = precision
        settings: dict[str, Any] = {}
        if (least := _first_side(node, "min")) is not None and least > batch:
            rule = f"is {least}, but max is {batch}"
            self._gap(model, rule, "batches from 1 on", "min")
        elif least is not None and least > 1:
            settings["min_batch"] = least
        if (cache := node.get("model::cache")) is not None:
            settings["cache"] = str(Path(str(cache)).parent)
            self._notes.append(_CACHE.format(cache, settings["cache"]))
        keys |= {"tensorrt": settings} if settings else {}
        if not keys:
            return {}
        self._notes.append(_WITHOUT_TENSORRT)
        return {"engine": "tensorrt", **keys}

    def _value(self, name: str, key: str, make: Callable[[str], Any], rule: str) -> Any:
        """Return the value of a node's key, made from its text."""
        value = self._nodes[name][key]
        try:
            return make(str(value))
        except ValueError as error:
            raise source_error(self._at(name), rule, value, path=(key,)) from error


def _first_side(node: Mapping[str, Any], key: str) -> int | None:
    """Return the batch size of `max` or `min`: 4, or the first side of 4x3x224x224."""
    found = re.match(r"\d+", str(node.get(key, "")))
    return None if found is None else int(found[0])


def _numbers(text: str) -> list[float]:
    return list(map(float, text.split(",")))


_NO_NUMBERS = (
    "The file names no mean and std: add normalize, and for train the other stages of transforms_gpu, which "
    "gpuflow import module:attribute writes down."
)
