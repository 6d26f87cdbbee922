"""gpuflow's own stages, one file per stage. `STAGES` maps each key of a YAML list of stages to its class."""

from gpuflow.pipeline.stage import Stage
from gpuflow.stages.affine import Affine
from gpuflow.stages.center_crop import CenterCrop
from gpuflow.stages.color_jitter import ColorJitter
from gpuflow.stages.decode import Decode
from gpuflow.stages.flip import Flip
from gpuflow.stages.letterbox import Letterbox
from gpuflow.stages.normalize import Normalize
from gpuflow.stages.pad import Pad
from gpuflow.stages.perspective import Perspective
from gpuflow.stages.random_crop import RandomCrop
from gpuflow.stages.random_resized_crop import RandomResizedCrop
from gpuflow.stages.resize import Resize
from gpuflow.stages.rotate import Rotate
from gpuflow.stages.torchvision import Torchvision
from gpuflow.stages.warp_affine import WarpAffine

__all__ = [
    "STAGES",
    "Affine",
    "CenterCrop",
    "ColorJitter",
    "Decode",
    "Flip",
    "Letterbox",
    "Normalize",
    "Pad",
    "Perspective",
    "RandomCrop",
    "RandomResizedCrop",
    "Resize",
    "Rotate",
    "Torchvision",
    "WarpAffine",
]

STAGES: dict[str, type[Stage]] = {
    "decode": Decode,
    "resize": Resize,
    "center_crop": CenterCrop,
    "random_crop": RandomCrop,
    "random_resized_crop": RandomResizedCrop,
    "flip": Flip,
    "rotate": Rotate,
    "affine": Affine,
    "perspective": Perspective,
    "warp_affine": WarpAffine,
    "pad": Pad,
    "letterbox": Letterbox,
    "color_jitter": ColorJitter,
    "normalize": Normalize,
    "torchvision": Torchvision,
}
