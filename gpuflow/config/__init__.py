"""YAML to a checked configuration."""

from gpuflow.config.models import (
    Activation,
    BatchSpec,
    Config,
    ModelSpec,
    PipelineSpec,
    RunSpec,
    ServeSpec,
    TensorrtSpec,
    TrainSpec,
)
from gpuflow.config.reader import AddedStages, check_config, read_config

__all__ = [
    "Activation",
    "AddedStages",
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
