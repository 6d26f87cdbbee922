"""YAML to a checked configuration."""

from gpuflow.config.models import (
    BatchSpec,
    Config,
    ModelSpec,
    PipelineSpec,
    RunSpec,
    ServeSpec,
    TensorrtSpec,
    TrainSpec,
)
from gpuflow.config.reader import check_config, read_config

__all__ = [
    "BatchSpec",
    "Config",
    "ModelSpec",
    "PipelineSpec",
    "RunSpec",
    "ServeSpec",
    "TensorrtSpec",
    "TrainSpec",
    "check_config",
    "read_config",
]
