"""What gpuflow uses of TensorRT's Python package, as the package itself declares it.

Source: the docstrings and enums of the wheel tensorrt_cu13_bindings 10.16.1.11 of PyPI (pybind11 writes each function's
signature there). Of overloaded functions the first one that gpuflow's calls fit.
"""

from __future__ import annotations

METHODS: dict[str, dict[str, tuple[str, ...]]] = {
    "Builder": {
        "__init__": ("logger",),
        "create_network": ("flags=0",),
        "create_builder_config": (),
        "create_optimization_profile": (),
        "build_serialized_network": ("network", "config"),
    },
    "INetworkDefinition": {"get_input": ("index",)},
    "OnnxParser": {
        "__init__": ("network", "logger"),
        "parse_from_file": ("model",),
        "get_error": ("index",),
    },
    "IBuilderConfig": {
        "set_memory_pool_limit": ("pool", "pool_size"),
        "set_flag": ("flag",),
        "clear_flag": ("flag",),
        "create_timing_cache": ("serialized_timing_cache",),
        "set_timing_cache": ("cache", "ignore_mismatch"),
        "get_timing_cache": (),
        "add_optimization_profile": ("profile",),
    },
    "ITimingCache": {"serialize": ()},
    "IOptimizationProfile": {"set_shape": ("input", "min", "opt", "max")},
    "Runtime": {"__init__": ("logger",), "deserialize_cuda_engine": ("serialized_engine",)},
    "ICudaEngine": {
        "get_tensor_name": ("index",),
        "get_tensor_mode": ("name",),
        "get_tensor_dtype": ("name",),
        "get_tensor_shape": ("name",),
        "create_execution_context": (),
    },
    "IExecutionContext": {
        "set_input_shape": ("name", "shape"),
        "get_tensor_shape": ("name",),
        "set_tensor_address": ("name", "memory"),
        "execute_async_v3": ("stream_handle",),
    },
}
PROPERTIES: dict[str, tuple[str, ...]] = {
    "INetworkDefinition": ("num_inputs",),
    "OnnxParser": ("num_errors",),
    "ICudaEngine": ("num_io_tensors",),
}
ENUMS: dict[str, dict[str, int]] = {
    "MemoryPoolType": {"WORKSPACE": 0},
    "BuilderFlag": {"FP16": 0, "TF32": 6, "BF16": 17},
    "TensorIOMode": {"NONE": 0, "INPUT": 1, "OUTPUT": 2},
    "DataType": {"FLOAT": 0, "HALF": 1, "INT32": 3, "UINT8": 5},
}
"""Those members that gpuflow or the fake names."""
WARNING = 2
"""Logger.WARNING."""
VERSION = "10.16.1.11"
