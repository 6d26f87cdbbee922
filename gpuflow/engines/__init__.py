"""Model engines: turn a batch of images into logits. One small interface, three libraries.

pytorch    a gpuflow checkpoint (`.pt`) or an exported program (`.pt2`), optionally compiled or as CUDA graphs
onnx       `.onnx` by onnxruntime, on its CPU or CUDA provider
tensorrt   `.onnx` built into a TensorRT engine
"""

from gpuflow.engines.base import Engine, ModelInfo, class_names, refuse_other_preprocessing, warm_up_all
from gpuflow.engines.factory import open_engine, open_engines, read_checked_info, read_info

__all__ = [
    "Engine",
    "ModelInfo",
    "class_names",
    "open_engine",
    "open_engines",
    "read_checked_info",
    "read_info",
    "refuse_other_preprocessing",
    "warm_up_all",
]
