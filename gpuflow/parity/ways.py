"""The table of all ways by name: gpuflow's own, the reference, and common alternatives.

val, val@cuda           training's loader on a device
serve, serve@cuda       the serving graph on a device
torchvision             the reference: Pillow decodes, torchvision's v2 transforms of uint8 tensors run the stages
pillow                  the same transforms of PIL images, as in most training scripts
torchcodec              torchcodec decodes, and applies EXIF rotation; then torchvision's transforms of tensors
opencv                  cv2.imdecode and cv2.resize, with the same moves as the stages
torchpipe_cpu, _gpu     torchpipe's own operators, straight to the final size
torchvision@cuda        torchvision's decode_jpeg on the GPU, then its transforms there
"""

from __future__ import annotations

from collections.abc import Mapping

from gpuflow.config import Config
from gpuflow.parity.base import Way
from gpuflow.parity.others import OpenCv, Reference, TorchpipeOperators
from gpuflow.parity.ours import Serving, Training

__all__ = ["NAIVE", "ways_of"]

NAIVE = ("pillow", "torchcodec", "opencv", "torchpipe_cpu", "torchpipe_gpu", "torchvision@cuda")
"""Ways that are often mixed between training and serving without a check that they agree."""


def ways_of(config: Config, name: str) -> Mapping[str, Way]:
    """All ways to run a pipeline of a configuration, by name."""
    program = config.programs[name]
    return {
        "val": Training(config, name, "cpu"),
        "serve": Serving(config, name, "cpu"),
        "val@cuda": Training(config, name, "cuda"),
        "serve@cuda": Serving(config, name, "cuda"),
        "torchvision": Reference(program, "tensor"),
        "pillow": Reference(program, "pil"),
        "torchcodec": Reference(program, "torchcodec"),
        "opencv": OpenCv(program, config.source.seed),
        "torchpipe_cpu": TorchpipeOperators(config, program, "torchpipe_cpu"),
        "torchpipe_gpu": TorchpipeOperators(config, program, "torchpipe_gpu"),
        "torchvision@cuda": Reference(program, "cuda"),
    }
