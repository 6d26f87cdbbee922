"""gpuflow's own stages, one file per stage. `STAGES` maps each key of a YAML list of stages to its class."""

from gpuflow.pipeline.stage import Stage
from gpuflow.stages.center_crop import CenterCrop
from gpuflow.stages.color_jitter import ColorJitter
from gpuflow.stages.decode import Decode
from gpuflow.stages.flip import Flip
from gpuflow.stages.normalize import Normalize
from gpuflow.stages.random_crop import RandomCrop
from gpuflow.stages.random_resized_crop import RandomResizedCrop
from gpuflow.stages.resize import Resize
from gpuflow.stages.solarize import Solarize
from gpuflow.stages.torchvision import Torchvision

__all__ = [
    "STAGES",
    "CenterCrop",
    "ColorJitter",
    "Decode",
    "Flip",
    "Normalize",
    "RandomCrop",
    "RandomResizedCrop",
    "Resize",
    "Solarize",
    "Torchvision",
]

STAGES: dict[str, type[Stage]] = {
    "decode": Decode,
    "resize": Resize,
    "center_crop": CenterCrop,
    "random_crop": RandomCrop,
    "random_resized_crop": RandomResizedCrop,
    "flip": Flip,
    "color_jitter": ColorJitter,
    "solarize": Solarize,
    "normalize": Normalize,
    "torchvision": Torchvision,
}
