"""gpuflow's own stages, one file per stage. `STAGES` maps each key of a YAML list of stages to its class."""

from gpuflow.pipeline.stage import Stage
from gpuflow.stages.affine import Affine
from gpuflow.stages.auto_augment import AutoAugment
from gpuflow.stages.autocontrast import Autocontrast
from gpuflow.stages.brightness import Brightness
from gpuflow.stages.center_crop import CenterCrop
from gpuflow.stages.color_jitter import ColorJitter
from gpuflow.stages.contrast import Contrast
from gpuflow.stages.cover_resize import CoverResize
from gpuflow.stages.cutmix import Cutmix
from gpuflow.stages.decode import Decode
from gpuflow.stages.equalize import Equalize
from gpuflow.stages.flip import Flip
from gpuflow.stages.gaussian_blur import GaussianBlur
from gpuflow.stages.grayscale import Grayscale
from gpuflow.stages.hue import Hue
from gpuflow.stages.invert import Invert
from gpuflow.stages.iou_crop import IouCrop
from gpuflow.stages.letterbox import Letterbox
from gpuflow.stages.mixup import Mixup
from gpuflow.stages.noise_erasing import NoiseErasing
from gpuflow.stages.normalize import Normalize
from gpuflow.stages.pad import Pad
from gpuflow.stages.perspective import Perspective
from gpuflow.stages.posterize import Posterize
from gpuflow.stages.rand_augment import RandAugment
from gpuflow.stages.random_crop import RandomCrop
from gpuflow.stages.random_erasing import RandomErasing
from gpuflow.stages.random_resized_crop import RandomResizedCrop
from gpuflow.stages.resize import Resize
from gpuflow.stages.rotate import Rotate
from gpuflow.stages.saturation import Saturation
from gpuflow.stages.scale_jitter import ScaleJitter
from gpuflow.stages.sharpness import Sharpness
from gpuflow.stages.solarize import Solarize
from gpuflow.stages.torchvision import Torchvision
from gpuflow.stages.trivial_augment import TrivialAugment
from gpuflow.stages.warp_affine import WarpAffine
from gpuflow.stages.zoom_out import ZoomOut

__all__ = [
    "STAGES",
    "Affine",
    "AutoAugment",
    "Autocontrast",
    "Brightness",
    "CenterCrop",
    "ColorJitter",
    "Contrast",
    "CoverResize",
    "Cutmix",
    "Decode",
    "Equalize",
    "Flip",
    "GaussianBlur",
    "Grayscale",
    "Hue",
    "Invert",
    "IouCrop",
    "Letterbox",
    "Mixup",
    "NoiseErasing",
    "Normalize",
    "Pad",
    "Perspective",
    "Posterize",
    "RandAugment",
    "RandomCrop",
    "RandomErasing",
    "RandomResizedCrop",
    "Resize",
    "Rotate",
    "Saturation",
    "ScaleJitter",
    "Sharpness",
    "Solarize",
    "Torchvision",
    "TrivialAugment",
    "WarpAffine",
    "ZoomOut",
]

STAGES: dict[str, type[Stage]] = {
    stage.stage_name: stage
    for stage in (
        Decode,
        Resize,
        CenterCrop,
        RandomCrop,
        RandomResizedCrop,
        CoverResize,
        ScaleJitter,
        IouCrop,
        Flip,
        Rotate,
        Affine,
        Perspective,
        WarpAffine,
        Pad,
        ZoomOut,
        Letterbox,
        ColorJitter,
        Brightness,
        Contrast,
        Saturation,
        Hue,
        Grayscale,
        Autocontrast,
        Equalize,
        Posterize,
        Solarize,
        Invert,
        RandomErasing,
        Sharpness,
        GaussianBlur,
        RandAugment,
        TrivialAugment,
        AutoAugment,
        Normalize,
        NoiseErasing,
        Torchvision,
        Mixup,
        Cutmix,
    )
}
