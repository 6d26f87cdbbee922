"""The ways in which a file becomes the model's input: of trainings, and of services.

A way is a function of (folder, size, device). It returns float32 [N, 3, size, size], normalized as for ImageNet, of the
files in a folder of classes, in the order of their sorted paths. Ways that are named `emulated` compute on the CPU what
other software computes on a GPU.
"""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch.nn import functional

import gpuflow
import gpuflow.serve

__all__ = ["LEFT_OUT", "TRAINING", "Way", "files_of", "missing", "serving"]

HERE = Path(__file__).parent
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
LEFT_OUT = {"torchcodec": "torchcodec 0.11, the version for torch 2.11, does not import without CUDA's NPP"}

Way = Callable[[Path, int, str], torch.Tensor]
Pixels = NDArray[np.uint8]


def files_of(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/*.jpg"))


# --- gpuflow and torchpipe --------------------------------------------------------------------------------------------


def _sizes(config: str, size: int) -> list[str]:
    if config == "gpuflow.yaml":
        return [f"pipelines.val.stages.resize.{side}={size}" for side in ("height", "width")]
    return [f"{block}.{side}={size}" for block in ("pipelines.val", "serve") for side in ("height", "width")]


def loaded(config: str, *overrides: str, device: str = "cpu") -> Way:
    """Return the way of a training: batches of `gpuflow.load`."""

    def way(folder: Path, size: int, _: str) -> torch.Tensor:
        values = [f"source.folder={folder}", *_sizes(config, size), *overrides]
        with gpuflow.load(HERE / config, "val", device=device, overrides=values) as loader:
            return torch.cat([images.cpu() for images, _ in loader])

    return way


def served(config: str, *overrides: str, device: str = "cpu") -> Way:
    """Return the way of a service: the model's input by `gpuflow.serve.load(...).preprocess`."""

    def way(folder: Path, size: int, _: str) -> torch.Tensor:
        values = [f"source.folder={folder}", *_sizes(config, size), *overrides]
        with gpuflow.serve.load(HERE / config, device=device, overrides=values, preprocess_only=True) as predictor:
            return predictor.preprocess(files_of(folder)).cpu()

    return way


# --- other libraries --------------------------------------------------------------------------------------------------


def each(pixels_of: Callable[[bytes, int], Any]) -> Way:
    """Return a way of a function that gives levels of 0-255 [size, size, 3] of one file."""

    def way(folder: Path, size: int, _: str) -> torch.Tensor:
        levels_NHWC = np.stack([np.asarray(pixels_of(path.read_bytes(), size)) for path in files_of(folder)])
        images_NCHW = torch.from_numpy(levels_NHWC).permute(0, 3, 1, 2).to(torch.float32) / 255
        mean, std = (torch.tensor(values)[:, None, None] for values in (MEAN, STD))
        return ((images_NCHW - mean) / std).contiguous()

    return way


def pillow(data: bytes, size: int) -> Any:
    with Image.open(io.BytesIO(data)) as image:
        return image.convert("RGB").resize((size, size), Image.Resampling.BILINEAR)


def opencv(data: bytes, size: int) -> Any:
    image = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR)
    assert image is not None
    return cv2.cvtColor(cv2.resize(image, (size, size)), cv2.COLOR_BGR2RGB)


def torchvision(data: bytes, size: int) -> Any:
    from torchvision.io import ImageReadMode, decode_image
    from torchvision.transforms.v2 import functional as transforms

    image = decode_image(torch.frombuffer(bytearray(data), dtype=torch.uint8), ImageReadMode.RGB)
    return transforms.resize(image, [size, size], antialias=True).permute(1, 2, 0)


def hugging_face(name: str) -> Way:
    """Return the way of an image processor of transformers: a resize to the size, bilinear, and normalization."""

    def way(folder: Path, size: int, _: str) -> torch.Tensor:
        import transformers

        processor: Any = getattr(transformers, name)(
            size={"height": size, "width": size}, resample=2, image_mean=list(MEAN), image_std=list(STD)
        )
        images = [Image.open(path).convert("RGB") for path in files_of(folder)]
        return torch.cat([processor(image, return_tensors="pt")["pixel_values"] for image in images])

    return way


def dali(decoder: str) -> Way:
    """Return the way of a DALI pipeline. decoder: `cpu` or `mixed`."""

    def way(folder: Path, size: int, _: str) -> torch.Tensor:
        from nvidia.dali import fn, pipeline_def, types

        files = files_of(folder)

        @pipeline_def  # type: ignore[untyped-decorator]  # DALI ships no types
        def pipeline() -> Any:
            encoded, _ = fn.readers.file(files=list(map(str, files)), random_shuffle=False)
            images = fn.decoders.image(encoded, device=decoder, output_type=types.RGB)
            images = fn.resize(images, resize_x=size, resize_y=size, interp_type=types.INTERP_LINEAR)
            mean, std = ([value * 255 for value in values] for values in (MEAN, STD))
            return fn.crop_mirror_normalize(images, dtype=types.FLOAT, output_layout="CHW", mean=mean, std=std)

        device = None if decoder == "cpu" else 0
        pipe = pipeline(batch_size=len(files), num_threads=2, device_id=device, prefetch_queue_depth=1)
        pipe.build()
        (batch,) = pipe.run()
        return torch.from_numpy(np.array((batch if decoder == "cpu" else batch.as_cpu()).as_array()))

    return way


# --- emulated ---------------------------------------------------------------------------------------------------------


def repeated_chroma(data: bytes) -> Pixels:
    """Decode a JPEG in 4:2:0 with each sample of chroma repeated, as nvJPEG does by default and torchpipe with it.

    At half the size, libjpeg decodes luma smaller and leaves chroma as the file has it.
    """
    whole, half = Image.open(io.BytesIO(data)), Image.open(io.BytesIO(data))
    height, width = whole.height, whole.width
    whole.draft("YCbCr", (width, height))
    half.draft("YCbCr", (-(-width // 2), -(-height // 2)))
    chroma = np.asarray(half)[..., 1:].repeat(2, axis=0).repeat(2, axis=1)[:height, :width]
    assert chroma.shape == (height, width, 2), "the chroma must be 4:2:0"
    pixels = np.dstack([np.asarray(whole)[..., 0], chroma])
    return np.asarray(Image.fromarray(pixels, "YCbCr").convert("RGB"))


def fast_dct(data: bytes) -> Pixels:
    """Decode as `repeated_chroma`, with libjpeg's fast inverse transform."""
    import simplejpeg

    return np.asarray(simplejpeg.decode_jpeg(data, "RGB", fastdct=True, fastupsample=True))


def antialiased(decode: Callable[[bytes], Pixels]) -> Callable[[bytes, int], Any]:
    return lambda data, size: Image.fromarray(decode(data)).resize((size, size), Image.Resampling.BILINEAR)


def not_antialiased(decode: Callable[[bytes], Pixels]) -> Callable[[bytes, int], Any]:
    """Return a function that decodes, and resizes as torchpipe's ResizeTensor: float levels, corners aligned."""

    def pixels_of(data: bytes, size: int) -> Any:
        image = torch.tensor(decode(data), dtype=torch.float32).permute(2, 0, 1)[None]
        resized = functional.interpolate(image, (size, size), mode="bilinear", align_corners=True)
        return resized[0].permute(1, 2, 0)

    return pixels_of


# --- which there are --------------------------------------------------------------------------------------------------

_ON_GPU = ("pipelines.val.preset=torchpipe_gpu", "serve.preset=torchpipe_gpu")
EMULATED = each(not_antialiased(repeated_chroma))
TRAINING: dict[str, Way] = {
    "cpu decode": loaded("preset.yaml"),
    "gpu decode": loaded("preset.yaml", *_ON_GPU, device="cuda"),
    "gpu decode (emulated)": EMULATED,
    "gpuflow": loaded("gpuflow.yaml"),
    "gpuflow cuda": loaded("gpuflow.yaml", device="cuda"),
}
_SERVING: dict[str, Way] = {
    "cpu decode": served("preset.yaml"),
    "gpu decode": served("preset.yaml", *_ON_GPU, device="cuda"),
    "gpu decode (emulated)": EMULATED,
    "gpu decode, fast DCT (emulated)": each(not_antialiased(fast_dct)),
    "repeated chroma, antialiased (emulated)": each(antialiased(repeated_chroma)),
    "opencv": each(opencv),
    "pillow": each(pillow),
    "torchvision": each(torchvision),
    "hugging face slow": hugging_face("ViTImageProcessorPil"),
    "hugging face fast": hugging_face("ViTImageProcessor"),
    "dali cpu": dali("cpu"),
    "dali mixed": dali("mixed"),
    "gpuflow": served("gpuflow.yaml"),
    "gpuflow cuda": served("gpuflow.yaml", device="cuda"),
}
_PACKAGES = {"fast DCT": "simplejpeg", "hugging face": "transformers", "dali": "nvidia.dali", "decode": "torchpipe"}


def missing(name: str) -> str | None:
    """Return why a way cannot run here, or None."""
    if name in ("gpu decode", "gpuflow cuda", "dali mixed") and not torch.cuda.is_available():
        return "torch sees no NVIDIA GPU here"
    package = next((package for part, package in _PACKAGES.items() if part in name), None)
    if package is None or name == "gpu decode (emulated)":
        return None
    is_found = all(importlib.util.find_spec(module) for module in _parents(package))
    return None if is_found else f"{package} is not installed"


def _parents(package: str) -> Sequence[str]:
    parts = package.split(".")
    return [".".join(parts[: count + 1]) for count in range(len(parts))]


def serving() -> dict[str, Way]:
    """Return the ways of services that run here; the emulated GPU decode only where there is no real one."""
    return {
        name: way
        for name, way in _SERVING.items()
        if missing(name) is None and not (name == "gpu decode (emulated)" and missing("gpu decode") is None)
    }
