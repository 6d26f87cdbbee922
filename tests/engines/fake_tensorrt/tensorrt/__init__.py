"""A fake of TensorRT 10's Python package, on the CPU: the calls that gpuflow makes, with their rules.

An engine is the model's bytes with its profile. It runs them by onnxruntime, on addresses in host memory, when its
stream is synchronized. Calls out of order, or with arguments that TensorRT does not have, fail.
`log` lists the calls in order. `faults` names calls that shall fail as TensorRT's do: by returning False or None.
"""

from __future__ import annotations

import ctypes
import enum
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import onnxruntime

__version__ = "10.16.1.11"

log: list[tuple[Any, ...]] = []
faults: set[str] = set()
queued: dict[int, list[Callable[[], None]]] = {}
"""Queued work by the handle of its stream."""


class MemoryPoolType(enum.Enum):
    WORKSPACE = 0


class BuilderFlag(enum.Enum):
    FP16 = 0
    TF32 = 6
    BF16 = 17


class TensorIOMode(enum.Enum):
    NONE = 0
    INPUT = 1
    OUTPUT = 2


class DataType(enum.Enum):
    FLOAT = 0
    HALF = 1
    INT32 = 3
    UINT8 = 5


_TYPES = {"tensor(float)": DataType.FLOAT, "tensor(float16)": DataType.HALF, "tensor(uint8)": DataType.UINT8}
_NUMPY = {DataType.FLOAT: np.float32, DataType.HALF: np.float16, DataType.UINT8: np.uint8}


class Stream:
    """As much of `torch.cuda.Stream` as an engine uses."""

    def __init__(self, handle: int) -> None:
        self.cuda_stream = handle

    def synchronize(self) -> None:
        for work in queued.pop(self.cuda_stream, []):
            work()


class Logger:
    WARNING = 2

    def __init__(self, min_severity: int) -> None:
        assert min_severity == self.WARNING


class HostMemory:
    def __init__(self, data: bytes) -> None:
        self._data = data

    def __bytes__(self) -> bytes:
        return self._data


class _Tensor:
    def __init__(self, name: str) -> None:
        self.name = name


class Network:
    model: bytes = b""

    @property
    def _inputs(self) -> list[Any]:
        return list(onnxruntime.InferenceSession(self.model).get_inputs())

    @property
    def num_inputs(self) -> int:
        return len(self._inputs)

    def get_input(self, index: int) -> _Tensor:
        return _Tensor(self._inputs[index].name)


class OnnxParser:
    def __init__(self, network: Network, logger: Logger) -> None:
        self._network = network
        assert isinstance(logger, Logger)

    def parse_from_file(self, model: str) -> bool:
        log.append(("parse_from_file", model))
        if "parse_from_file" in faults:
            return False
        with open(model, "rb") as file:
            self._network.model = file.read()
        return True

    @property
    def num_errors(self) -> int:
        return 2 if "parse_from_file" in faults else 0

    def get_error(self, index: int) -> str:
        return f"node {index}: no importer"


class TimingCache:
    def __init__(self, data: bytes) -> None:
        self.data = data

    def serialize(self) -> HostMemory:
        return HostMemory(self.data)


class OptimizationProfile:
    shapes: tuple[str, Any, Any, Any] | None = None

    def set_shape(self, input: str, min: tuple[int, ...], opt: tuple[int, ...], max: tuple[int, ...]) -> None:
        assert all(low <= best <= high for low, best, high in zip(min, opt, max, strict=True))
        self.shapes = (input, min, opt, max)
        log.append(("set_shape", *self.shapes))


class BuilderConfig:
    def __init__(self) -> None:
        self.flags = {BuilderFlag.TF32}
        self.profiles: list[OptimizationProfile] = []
        self._timing: TimingCache | None = None

    def set_memory_pool_limit(self, pool: MemoryPoolType, pool_size: int) -> None:
        assert pool is MemoryPoolType.WORKSPACE
        assert pool_size > 0

    def set_flag(self, flag: BuilderFlag) -> None:
        self.flags.add(flag)

    def clear_flag(self, flag: BuilderFlag) -> None:
        self.flags.remove(flag)

    def create_timing_cache(self, serialized_timing_cache: bytes) -> TimingCache:
        log.append(("create_timing_cache", serialized_timing_cache))
        return TimingCache(serialized_timing_cache)

    def set_timing_cache(self, cache: TimingCache, ignore_mismatch: bool) -> bool:
        assert ignore_mismatch is False
        self._timing = cache
        return True

    def get_timing_cache(self) -> TimingCache:
        assert self._timing is not None
        return self._timing

    def add_optimization_profile(self, profile: OptimizationProfile) -> int:
        assert profile.shapes is not None, "the profile has no shape yet"
        self.profiles.append(profile)
        return len(self.profiles) - 1


class Builder:
    def __init__(self, logger: Logger) -> None:
        assert isinstance(logger, Logger)

    def create_network(self, flags: int = 0) -> Network:
        assert flags == 0
        return Network()

    def create_builder_config(self) -> BuilderConfig:
        return BuilderConfig()

    def create_optimization_profile(self) -> OptimizationProfile:
        return OptimizationProfile()

    def build_serialized_network(self, network: Network, config: BuilderConfig) -> HostMemory | None:
        flags = sorted(flag.name for flag in config.flags)
        log.append(("build_serialized_network", *flags))
        if "build_serialized_network" in faults:
            return None
        (profile,) = config.profiles
        config.get_timing_cache().data += b"measured;"
        head = json.dumps({"version": __version__, "flags": flags, "profile": profile.shapes}).encode()
        return HostMemory(len(head).to_bytes(4, "big") + head + network.model)


class Runtime:
    def __init__(self, logger: Logger) -> None:
        assert isinstance(logger, Logger)

    def deserialize_cuda_engine(self, serialized_engine: bytes) -> CudaEngine | None:
        log.append(("deserialize_cuda_engine",))
        return None if "deserialize_cuda_engine" in faults else CudaEngine(serialized_engine)


class CudaEngine:
    def __init__(self, data: bytes) -> None:
        length = 4 + int.from_bytes(data[:4], "big")
        head = json.loads(data[4:length])
        assert head["version"] == __version__
        _, self._low, _, self._high = head["profile"]
        self._session = onnxruntime.InferenceSession(data[length:])
        self._ends: dict[str, tuple[TensorIOMode, Any]] = {
            end.name: (TensorIOMode.INPUT, end) for end in self._session.get_inputs()
        }
        self._ends |= {end.name: (TensorIOMode.OUTPUT, end) for end in self._session.get_outputs()}

    @property
    def num_io_tensors(self) -> int:
        return len(self._ends)

    def get_tensor_name(self, index: int) -> str:
        return list(self._ends)[index]

    def get_tensor_mode(self, name: str) -> TensorIOMode:
        return self._ends[name][0]

    def get_tensor_dtype(self, name: str) -> DataType:
        return _TYPES.get(self._ends[name][1].type, DataType.INT32)

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return tuple(side if isinstance(side, int) else -1 for side in self._ends[name][1].shape)

    def create_execution_context(self) -> ExecutionContext | None:
        log.append(("create_execution_context",))
        return None if "create_execution_context" in faults else ExecutionContext(self)


class ExecutionContext:
    def __init__(self, engine: CudaEngine) -> None:
        self._engine = engine
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._addresses: dict[str, int] = {}

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        engine = self._engine
        fits = all(low <= side <= high for low, side, high in zip(engine._low, shape, engine._high, strict=True))
        if not fits or "set_input_shape" in faults:
            return False
        self._shapes = {name: shape}
        self._addresses = {}
        return True

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        if name in self._shapes:
            return self._shapes[name]
        (given,) = self._shapes.values()  # the input's shape comes first
        return tuple(given[0] if side == -1 else side for side in self._engine.get_tensor_shape(name))

    def set_tensor_address(self, name: str, memory: int) -> bool:
        assert name in self._engine._ends and memory > 0
        self._addresses[name] = memory
        return True

    def execute_async_v3(self, stream_handle: int) -> bool:
        log.append(("execute_async_v3", stream_handle, *self._shapes.values()))
        assert set(self._addresses) == set(self._engine._ends), "a tensor has no address"
        if "execute_async_v3" in faults:
            return False
        queued.setdefault(stream_handle, []).append(self._run)
        return True

    def _run(self) -> None:
        arrays = {name: self._array(name) for name in self._addresses}
        (given,) = self._shapes
        results = self._engine._session.run(None, {given: arrays.pop(given)})
        for array, result in zip(arrays.values(), results, strict=True):
            array[...] = result

    def _array(self, name: str) -> Any:
        """The host memory at a tensor's address."""
        shape = self.get_tensor_shape(name)
        dtype = np.dtype(_NUMPY[self._engine.get_tensor_dtype(name)])
        size = int(np.prod(shape)) * dtype.itemsize
        memory = (ctypes.c_char * size).from_address(self._addresses[name])
        return np.frombuffer(memoryview(memory), dtype).reshape(shape)
