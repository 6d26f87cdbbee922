"""The cache of built TensorRT engines ("plans"): files named by a hash of everything that the engine depends on."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from gpuflow.config import ModelSpec
from gpuflow.errors import ConfigError, Problem
from gpuflow.pipeline.stage import ImageSpec
from gpuflow.runtime.files import atomic_write, cache_folder

_FORMAT = 1  # of the files; part of every key
_DIGEST_BYTES = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class Platform:
    """The versions and the GPU that a built engine is tied to. capability: (major, minor) of the GPU."""

    tensorrt: str
    cuda: str
    gpu: str
    capability: tuple[int, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """How an engine is built.

    shape: (C, H, W) of an image. low, high: the smallest and largest batch; best: the batch that it is tuned for.
    maker: `python` or `torchpipe`, whose engines differ in their profiles. instances: profiles that torchpipe makes.
    """

    precision: Literal["float32", "float16", "bfloat16"]
    shape: tuple[int, int, int]
    low: int
    best: int
    high: int
    maker: str = "python"
    instances: int = 1

    @classmethod
    def of(cls, model: ModelSpec, image: ImageSpec) -> Settings:
        height, width, channels = image.shape
        assert height is not None and width is not None
        return cls(
            precision=model.precision,
            shape=(channels, height, width),
            low=model.tensorrt.min_batch,
            best=model.tensorrt.opt_batch or model.batch,
            high=model.batch,
            maker=model.via,
            instances=model.instances if model.via == "torchpipe" else 1,
        )


def cache_key(path: str, settings: Settings, platform: Platform) -> str:
    """SHA-256 over the model's bytes, including weights in separate files, and all that the engine is built for."""
    digest = hashlib.sha256(json.dumps([_FORMAT, asdict(settings), asdict(platform)]).encode())
    for file in (Path(path), *_side_files(path)):
        digest.update(f"\0{file.stat().st_size}\0".encode())
        with file.open("rb") as stream:
            while block := stream.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


def timing_key(platform: Platform) -> str:
    """The key of TensorRT's measured kernel times, which are valid for any model on a platform."""
    return hashlib.sha256(json.dumps([_FORMAT, asdict(platform)]).encode()).hexdigest()


def _side_files(path: str) -> list[Path]:
    """The separate files with weights of an ONNX model, in order of their names."""
    import onnx

    def tensors(graph: Any) -> Iterator[Any]:
        yield from graph.initializer
        for node in graph.node:
            for attribute in node.attribute:
                yield from (attribute.t, *attribute.tensors)
                for inner in (attribute.g, *attribute.graphs):
                    yield from tensors(inner)

    names = {
        entry.value
        for tensor in tensors(onnx.load(path, load_external_data=False).graph)
        for entry in tensor.external_data
        if entry.key == "location"
    }
    return [Path(path).parent / name for name in sorted(names)]


def cache_directory(model: ModelSpec) -> Path:
    """Where built engines are kept: `serve.model.tensorrt.cache`, else `gpuflow/tensorrt` in the user's cache."""
    if model.tensorrt.cache is not None:
        return Path(model.tensorrt.cache)
    folder = cache_folder()
    if folder.is_relative_to(os.devnull):
        rule = "must name a directory for built engines, because this user has no home directory; or set HOME"
        raise ConfigError([Problem("serve.model.tensorrt.cache", rule)])
    return folder / "tensorrt"


class PlanCache:
    """Files by key: a digest of key and content, then the content. A truncated or renamed file counts as missing."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def path(self, key: str, kind: str = "engine") -> Path:
        return self.directory / f"{key}.{kind}"

    def load(self, key: str, kind: str = "engine") -> bytes | None:
        """The content of this key, or None."""
        try:
            data = self.path(key, kind).read_bytes()
        except FileNotFoundError:
            return None
        content = data[_DIGEST_BYTES:]
        return content if data[:_DIGEST_BYTES] == _digest(key, content) else None

    def store(self, key: str, content: bytes, kind: str = "engine") -> None:
        """Write the content whole or not at all. Raises ConfigError where the directory cannot be written."""
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            with atomic_write(self.path(key, kind)) as file:
                file.write(_digest(key, content) + content)
        except OSError as error:
            rule = f"cannot be written: {error.strerror}: {str(self.directory)!r}; name a directory of yours"
            raise ConfigError([Problem("serve.model.tensorrt.cache", rule)]) from error


def _digest(key: str, content: bytes) -> bytes:
    return hashlib.sha256(key.encode() + content).digest()
