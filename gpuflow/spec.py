"""What a package that brings stages of its own needs: the kinds of stages, and the values that they get and give.

Documented in `gpuflow.pipeline`; these names stay here from one version to the next.
"""

from gpuflow.errors import Problem
from gpuflow.pipeline.stage import (
    ENCODED,
    Bounds,
    Crop,
    Decoder,
    Filters,
    Flip,
    Geometry,
    ImageSpec,
    Keys,
    Local,
    Move,
    Opaque,
    Operation,
    Operations,
    Pad,
    Pipeline,
    Pointwise,
    Resize,
    Stage,
    StageKeys,
    Warp,
    require_pixels,
)

__all__ = [
    "ENCODED",
    "Bounds",
    "Crop",
    "Decoder",
    "Filters",
    "Flip",
    "Geometry",
    "ImageSpec",
    "Keys",
    "Local",
    "Move",
    "Opaque",
    "Operation",
    "Operations",
    "Pad",
    "Pipeline",
    "Pointwise",
    "Problem",
    "Resize",
    "Stage",
    "StageKeys",
    "Warp",
    "require_pixels",
]
