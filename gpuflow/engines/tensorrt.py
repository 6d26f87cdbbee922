"""The engine `tensorrt`: an `.onnx` file built into an engine for this GPU by TensorRT's Python API.

A built engine is stored in a file named by a hash of everything that it depends on, so that it is never used for
another model, other settings, another version or another GPU. The calls follow TensorRT 10's Python API reference.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch

from gpuflow.config import ModelSpec
from gpuflow.engines.base import ModelInfo, black_images, check_batch, check_input, model_error
from gpuflow.engines.onnx import info_of
from gpuflow.errors import ConfigError, GpuflowError, MissingExtra, Problem
from gpuflow.pipeline.stage import ImageSpec
from gpuflow.runtime.files import atomic_write, cache_folder

_FORMAT = 1  # of the files; part of every key
_DIGEST_BYTES = 32
_MAJOR = 10
_WORKSPACE_BYTES = 2 << 30
_DTYPES = {"FLOAT": torch.float32, "HALF": torch.float16, "BF16": torch.bfloat16, "UINT8": torch.uint8}


@dataclass(frozen=True, kw_only=True, slots=True)
class Platform:
    """The versions and the GPU that a built engine is tied to. capability: (major, minor) of the GPU."""

    tensorrt: str
    cuda: str
    gpu: str
    capability: tuple[int, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Settings for building an engine.

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
    """Return a SHA-256 over all that an engine is built from and for, such as the model's bytes and those of weight
    files."""
    digest = hashlib.sha256(json.dumps([_FORMAT, asdict(settings), asdict(platform)]).encode())
    for file in (Path(path), *_side_files(path)):
        with file.open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()


def timing_key(platform: Platform) -> str:
    """Return the key of TensorRT's measured kernel times, which are valid for any model on a platform."""
    return hashlib.sha256(json.dumps([_FORMAT, asdict(platform)]).encode()).hexdigest()


def _side_files(path: str) -> list[Path]:
    """Return the separate files with weights of an ONNX model, in order of their names."""
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
    """Return where built engines are kept: `serve.model.tensorrt.cache`, else `gpuflow/tensorrt` in the user's
    cache."""
    if model.tensorrt.cache is not None:
        return Path(model.tensorrt.cache)
    folder = cache_folder()
    if folder.is_relative_to(os.devnull):
        rule = "must name a directory for built engines, because this user has no home directory; or set HOME"
        raise ConfigError([Problem("serve.model.tensorrt.cache", rule)])
    return folder / "tensorrt"


class PlanCache:
    """Files by key: a digest of key and content, then the content. A truncated or renamed file counts as missing.

    Examples:
        >>> cache = PlanCache(Path("engines"))
        >>> cache.store("key", b"a built engine")
        >>> cache.load("key"), cache.load("another key")
        (b'a built engine', None)
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def path(self, key: str, kind: str = "engine") -> Path:
        return self.directory / f"{key}.{kind}"

    def load(self, key: str, kind: str = "engine") -> bytes | None:
        """Return the content of this key, or None."""
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


def platform_of(device: torch.device) -> Platform:
    """Return the platform of engines for this GPU. Raises MissingExtra without TensorRT, ConfigError without a GPU."""
    if device.type != "cuda":
        rule = f"is tensorrt, which needs an NVIDIA GPU, but the device is {device}; use onnxruntime or torch"
        raise ConfigError([Problem("serve.model.engine", rule)])
    return Platform(
        tensorrt=_tensorrt().__version__,
        cuda=str(torch.version.cuda),
        gpu=torch.cuda.get_device_name(device),
        capability=torch.cuda.get_device_capability(device),
    )


# --- building ---------------------------------------------------------------------------------------------------------


def build(path: str, settings: Settings, timing: bytes) -> tuple[bytes, bytes]:
    """Build an engine.

    Args:
        timing: kernel times that TensorRT measured in earlier builds; empty the first time.

    Returns:
        The serialized engine, and the kernel times including those of this build.

    Raises:
        ConfigError: TensorRT cannot parse or build the model.
    """
    trt = _tensorrt()
    logger = trt.Logger(trt.Logger.WARNING)
    builder = trt.Builder(logger)
    network = builder.create_network(0)  # TensorRT 10 knows explicit batches only
    parser = trt.OnnxParser(network, logger)
    if not parser.parse_from_file(path):
        reasons = "; ".join(str(parser.get_error(i)) for i in range(parser.num_errors))
        raise model_error(path, f"cannot be parsed by TensorRT {trt.__version__}: {reasons}")
    if network.num_inputs != 1:
        raise model_error(path, f"must take one input, images [N, C, H, W], takes {network.num_inputs}")
    config = builder.create_builder_config()
    config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, _WORKSPACE_BYTES)
    if settings.precision == "float32":
        config.clear_flag(trt.BuilderFlag.TF32)  # on by default, with 10 bits of mantissa
    else:
        config.set_flag(trt.BuilderFlag.FP16 if settings.precision == "float16" else trt.BuilderFlag.BF16)
    measured = config.create_timing_cache(timing)
    config.set_timing_cache(measured, ignore_mismatch=False)
    profile = builder.create_optimization_profile()
    low, best, high = ((count, *settings.shape) for count in (settings.low, settings.best, settings.high))
    profile.set_shape(network.get_input(0).name, low, best, high)
    config.add_optimization_profile(profile)
    content = builder.build_serialized_network(network, config)
    if content is None:
        raise model_error(path, f"cannot be built by TensorRT {trt.__version__}; its log on stderr says why")
    return bytes(content), bytes(config.get_timing_cache().serialize())


# --- running ----------------------------------------------------------------------------------------------------------


class Stream(Protocol):
    """The part of `torch.cuda.Stream` that the engine uses."""

    cuda_stream: int

    def synchronize(self) -> None: ...


class TensorrtEngine:
    """One execution context of a built engine.

    Args:
        built: the deserialized engine (`tensorrt.ICudaEngine`), which contexts share.
        info: its model's metadata.
        image: what the pipeline gives.
        low, high: the smallest and largest batch that it was built for.
        device: of the tensors.
        stream: that runs the work.
        about: values that `describe` adds.
    """

    def __init__(
        self,
        built: Any,
        *,
        info: ModelInfo,
        image: ImageSpec,
        low: int,
        high: int,
        device: torch.device,
        stream: Stream,
        about: dict[str, Any],
    ) -> None:
        trt = _tensorrt()
        self.info, self.batch = info, high
        self._image, self._low, self._device, self._stream, self._about = image, low, device, stream, about
        names = [built.get_tensor_name(i) for i in range(built.num_io_tensors)]
        self._input = next(name for name in names if built.get_tensor_mode(name) == trt.TensorIOMode.INPUT)
        self._outputs = [name for name in names if built.get_tensor_mode(name) == trt.TensorIOMode.OUTPUT]
        dtypes = {name: built.get_tensor_dtype(name).name for name in names}
        shape = [None if side == -1 else int(side) for side in built.get_tensor_shape(self._input)]
        dtype = _torch_dtype(about["file"], dtypes[self._input])
        check_input(about["file"], image, info, shape=shape, dtype=str(dtype).removeprefix("torch."))
        self._dtypes = {name: _torch_dtype(about["file"], dtypes[name]) for name in self._outputs}
        self._context: Any = built.create_execution_context()
        if self._context is None:
            raise model_error(about["file"], "leaves TensorRT no memory for an instance; lower serve.model.batch")

    def warm_up(self) -> None:
        for size in {self._low, self.batch}:
            self.run(black_images(size, self._image, self._device))

    def bind_thread(self) -> None:
        """Do nothing: TensorRT has no per-thread state."""

    def run(self, images: torch.Tensor) -> torch.Tensor:
        check_batch(images, self._image, self.batch)
        count = len(images)
        size = max(count, self._low)
        if size > count:
            images = torch.nn.functional.pad(images, (0, 0, 0, 0, 0, 0, 0, size - count))
        images = images.contiguous()
        context = self._context
        _require_success(context.set_input_shape(self._input, tuple(images.shape)), "set_input_shape")
        _require_success(context.set_tensor_address(self._input, images.data_ptr()), "set_tensor_address")
        outputs = []
        for name in self._outputs:
            shape = tuple(context.get_tensor_shape(name))
            outputs.append(torch.empty(shape, dtype=self._dtypes[name], device=self._device))
            _require_success(context.set_tensor_address(name, outputs[-1].data_ptr()), "set_tensor_address")
        with torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext():
            if self._device.type == "cuda":  # until the images are ready and the memory of `outputs` is free
                torch.cuda.current_stream(self._device).synchronize()
            _require_success(context.execute_async_v3(self._stream.cuda_stream), "execute_async_v3")
            self._stream.synchronize()
        return outputs[0][:count].float().cpu()

    def describe(self) -> dict[str, Any]:
        return {"engine": "tensorrt", "tensorrt": _tensorrt().__version__, "batch": self.batch, **self._about}

    def close(self) -> None:
        self._context = None


def _torch_dtype(path: str, name: str) -> torch.dtype:
    if name not in _DTYPES:
        raise model_error(path, f"has an input or output of {name}; known: {', '.join(_DTYPES)}")
    return _DTYPES[name]


def _require_success(success: bool, call: str) -> None:
    if not success:
        raise GpuflowError(f"TensorRT: {call} failed; its log on stderr says why")


def open_all(model: ModelSpec, *, image: ImageSpec, device: torch.device) -> list[TensorrtEngine]:
    """Return engines as `open_engines` does. They are contexts of one built engine, each on its own stream."""
    platform = platform_of(device)
    streams = [torch.cuda.Stream(device) for _ in range(model.instances)]  # type: ignore[no-untyped-call]
    with torch.cuda.device(device):
        return open_on_streams(model, image=image, device=device, platform=platform, streams=streams)


def open_on_streams(
    model: ModelSpec, *, image: ImageSpec, device: torch.device, platform: Platform, streams: Sequence[Stream]
) -> list[TensorrtEngine]:
    """Return one engine for each stream, from the cache if it was built before."""
    trt = _tensorrt()
    path, info, settings = model.file, info_of(model.file), Settings.of(model, image)
    cache, key, start = PlanCache(cache_directory(model)), cache_key(path, settings, platform), time.perf_counter()
    content = cache.load(key)
    cached = content is not None
    if content is None:
        content, timing = build(path, settings, cache.load(timing_key(platform), "timing") or b"")
        cache.store(timing_key(platform), timing, "timing")
        if cache_key(path, settings, platform) == key:  # the file did not change while it was built
            cache.store(key, content)
    built = trt.Runtime(trt.Logger(trt.Logger.WARNING)).deserialize_cuda_engine(content)
    if built is None:
        raise model_error(path, f"cannot be loaded by TensorRT from {cache.path(key)}; delete that file")
    about = {
        "file": path,
        "device": platform.gpu,
        "cuda": platform.cuda,
        "precision": model.precision,
        "batches": [settings.low, settings.best, settings.high],
        "cached": cached,
        "ready_seconds": round(time.perf_counter() - start, 1),
    }
    low, high = settings.low, settings.high
    return [
        TensorrtEngine(built, info=info, image=image, low=low, high=high, device=device, stream=stream, about=about)
        for stream in streams
    ]


def _tensorrt() -> Any:
    try:
        import tensorrt
    except ImportError as error:
        raise MissingExtra("the engine tensorrt", "tensorrt", "tensorrt") from error
    if tensorrt.__version__.split(".")[0] != str(_MAJOR):
        raise GpuflowError(
            f"gpuflow runs TensorRT {_MAJOR}, found {tensorrt.__version__}; pip install 'gpuflow[tensorrt]'"
        )
    return tensorrt
