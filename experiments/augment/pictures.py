"""Runs every stage that changes an image on one photograph, each at three magnitudes, in its CPU and its GPU form.

    python experiments/augment/pictures.py pictures.npz
    python -m plots.augmentations pictures.npz plots/augmentations

Without a GPU the kernels of the GPU form run in Triton's interpreter, which takes minutes; the file says so.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from gpuflow.execute import packing
from gpuflow.pipeline.program import Program, fold, trace
from gpuflow.pipeline.stage import Geometry, ImageSpec, Keys, Mixing, Mixture, Pipeline, Stage
from gpuflow.stages import STAGES, CenterCrop, Decode, Letterbox
from gpuflow.tools.samples import load_photos

SIDE = 96
"""The photograph's side in pixels."""
WITHOUT = {"decode": "it reads files", "normalize": "its numbers are no colours"}
"""The stages without a picture, and why. `picture_parameters` has all others."""

Pixels = NDArray[np.uint8]
Parameters = Mapping[str, Any]
_TURN = ((0.8, -0.3, 24.0), (0.3, 0.8, -4.0))
_MIRROR = ((-1.0, 0.2, 90.0), (0.0, 1.0, 0.0))
_OBJECT = (0.15, 0.04, 0.9, 1.0)
"""The person in the photograph, as a box whose sides are parts of the image's: what `iou_crop` crops by."""
_CORNERS = {"source": ((0.0, 0.0), (95.0, 0.0), (0.0, 95.0)), "target": ((12.0, 20.0), (90.0, 4.0), (4.0, 70.0))}

PICTURES: dict[str, dict[str, Parameters]] = {
    "resize": {f"shorter {n}": {"shorter": n} for n in (64, 32, 16)},
    "center_crop": {f"size {n}": {"size": n} for n in (80, 56, 32)},
    "random_crop": {f"size {n}": {"size": n} for n in (80, 56, 32)},
    "random_resized_crop": {f"scale {n}": {"size": SIDE, "scale": (n, n)} for n in (0.6, 0.3, 0.08)},
    "cover_resize": {f"scale {n}": {"size": SIDE, "scale": (n, n), "probability": 1.0} for n in (1.0, 0.7, 0.4)},
    "scale_jitter": {f"scale {n}": {"size": SIDE, "scale": (n, n)} for n in (0.4, 1.0, 1.6)},
    "iou_crop": {f"overlap {n}": {"overlaps": (n,)} for n in (0.1, 0.5, 0.8)},
    "flip": {
        "horizontal": {"horizontal": 1.0},
        "vertical": {"horizontal": 0.0, "vertical": 1.0},
        "both": {"horizontal": 1.0, "vertical": 1.0},
    },
    "rotate": {f"{n} degrees": {"degrees": (n, n)} for n in (10, 30, 75)},
    "affine": {
        "shear 15": {"shear": (15, 15)},
        "scale 0.6": {"scale": (0.6, 0.6), "degrees": (20, 20)},
        "scale 1.5": {"scale": (1.5, 1.5), "degrees": (40, 40), "shear": (20, 20)},
    },
    "perspective": {f"scale {n}": {"distortion_scale": n, "probability": 1.0} for n in (0.2, 0.5, 0.9)},
    "warp_affine": {
        "turn": {"matrix": _TURN},
        "mirror, edge": {"matrix": _MIRROR, "border": "edge"},
        "three points": {**_CORNERS, "border": "reflect"},
    },
    "pad": {
        "6, constant": {"padding": 6, "fill": 114},
        "16, edge": {"padding": 16, "border": "edge"},
        "32, reflect": {"padding": 32, "border": "reflect"},
    },
    "zoom_out": {f"scale {n}": {"scale": (n, n), "fill": 114, "probability": 1.0} for n in (1.2, 2.0, 3.0)},
    "letterbox": {
        "72 x 96": {"size": (72, 96)},
        "96 x 48": {"size": (96, 48)},
        "32 x 96": {"size": (32, 96)},
    },
    "random_erasing": {
        "5%, one level": {"probability": 1.0, "scale": (0.05, 0.05), "value": 0},
        "20%, mean": {"probability": 1.0, "scale": (0.2, 0.2), "value": "imagenet"},
        "40%, random": {"probability": 1.0, "scale": (0.4, 0.4), "value": "random"},
    },
    "noise_erasing": {
        "5%, pixel": {"probability": 1.0, "scale": (0.05, 0.05)},
        "20%, box": {"probability": 1.0, "scale": (0.2, 0.2), "noise": "box"},
        "40%, three": {"probability": 1.0, "scale": (0.4, 0.4), "count": 3},
    },
    "brightness": {f"factor {n}": {"amount": (n, n)} for n in (0.5, 1.5, 2.5)},
    "contrast": {f"factor {n}": {"amount": (n, n)} for n in (0.3, 1.5, 3.0)},
    "saturation": {f"factor {n}": {"amount": (n, n)} for n in (0.3, 2.0, 4.0)},
    "hue": {f"{n} turns": {"amount": (n, n)} for n in (0.1, 0.25, 0.5)},
    "color_jitter": {
        f"{n} each": {"brightness": n, "contrast": n, "saturation": n, "hue": n / 4} for n in (0.2, 0.5, 0.9)
    },
    "grayscale": {"": {}},
    "autocontrast": {"": {}},
    "equalize": {"": {}},
    "invert": {"": {}},
    "posterize": {f"{n} bits": {"bits": n} for n in (5, 3, 1)},
    "solarize": {f"threshold {n}": {"threshold": n} for n in (192, 128, 64)},
    "sharpness": {f"factor {n}": {"amount": (n, n)} for n in (0.0, 3.0, 8.0)},
    "gaussian_blur": {f"sigma {n}": {"kernel_size": 23, "sigma": (n, n)} for n in (0.5, 1.5, 4.0)},
    "rand_augment": {f"magnitude {n}": {"magnitude": n} for n in (5, 15, 30)},
    "trivial_augment": {f"draw {n}": {"bins": 31} for n in (1, 2, 3)},
    "auto_augment": {f"draw {n}": {} for n in (1, 2, 3)},
    "torchvision": {
        "ElasticTransform": {"name": "ElasticTransform", "parameters": (("alpha", 120.0),)},
        "channels": {"name": "RandomChannelPermutation"},
        "RandomVerticalFlip": {"name": "RandomVerticalFlip", "parameters": (("p", 1.0),)},
    },
    "mixup": {f"{n:.0%} own": {"share": n} for n in (0.8, 0.6, 0.4)},
    "cutmix": {f"{n:.0%} own": {"share": n} for n in (0.9, 0.7, 0.4)},
}
"""For each stage its three magnitudes, by what is written below them; a stage without one has a single entry."""


def picture_parameters() -> dict[str, Mapping[str, Parameters]]:
    """Every stage with a picture, in the order of PICTURES, and its magnitudes: examples if it is not named there."""
    other = [name for name in STAGES if name not in PICTURES and name not in WITHOUT]
    return {**PICTURES, **{name: _examples(STAGES[name]) for name in other}}


def _examples(stage: type[Stage]) -> Mapping[str, Parameters]:
    shown = stage.examples()[:3]
    labels = [f"example {number}" for number in (1, 2, 3)] if len(shown) == 3 else [""]
    return {label: vars(one) for label, one in zip(labels, shown, strict=False)}


class CpuStream:
    """What stands in for a `DeviceStream` where there is no GPU: queued work runs at once."""

    device = torch.device("cpu")

    def queued(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def send_all(self, arrays: Sequence[NDArray[Any]]) -> list[torch.Tensor]:
        return packing.send_all(arrays, self.device)


def photograph(name: str, side: int) -> Pixels:
    """A square of one of the sample photographs, [side, side, 3]."""
    image = load_photos()[name].convert("RGB")
    short = min(image.size)
    left, top = (image.width - short) // 2, (image.height - short) // 2
    square = image.crop((left, top, left + short, top + short)).resize((side, side), Image.Resampling.BOX)
    return np.array(square)


def program(name: str, parameters: Parameters, side: int) -> Program:
    """Images get one size first, since a GPU needs it; the crop keeps every pixel.

    A result of another size for each sample is put into a square; one that was resampled keeps its scale there.
    """
    stage = STAGES[name](**parameters)
    stages: tuple[Stage, ...] = (Decode(), CenterCrop(size=side), stage)
    if not stage.output(ImageSpec(shape=(side, side, 3))).fixed:
        resizes = isinstance(stage, Geometry) and stage.resizes
        stages += (CenterCrop(size=side) if resizes else Letterbox(size=side),)
    pipeline = Pipeline("pictures", stages)
    return fold(pipeline, trace(pipeline))


def keys_of(folded: Program, name: str, number: int, label: str, side: int) -> Keys:
    """The random keys of a stage's picture, by its number and what is written below it; and the image's objects."""
    place = 3 + 5 * number if "draw" in label else 4 if name == "rand_augment" else 3
    box = np.array(_OBJECT).reshape(1, 1, 4) * side
    return Keys(0, 0, np.array([place]), values=dict.fromkeys(folded.record_values, box))


def on_cpu(folded: Program, image: Pixels, keys: Keys) -> Pixels:
    from gpuflow.execute.cpu.runner import CpuRunner
    from gpuflow.pipeline.views import slot_shape

    slots = np.empty((1, *slot_shape(folded.result)), np.uint8)
    (fault,) = CpuRunner(folded).run_images([image], keys, slots)
    if fault is not None:
        raise fault
    pixels: Pixels = slots[0]
    return pixels


def on_gpu(folded: Program, image: Pixels, keys: Keys, stream: Any) -> Pixels:
    from gpuflow.execute.gpu.device_passes import DevicePasses, interleaved
    from gpuflow.execute.gpu.device_stream import allocate_slots
    from gpuflow.execute.gpu.passes import passes_of

    passes = passes_of(folded)
    assert not isinstance(passes, str), passes
    slots = allocate_slots(stream, 1, folded.result)
    held = interleaved([torch.from_numpy(image).to(stream.device).permute(2, 0, 1)], stream)
    with stream.queued():
        (fault,) = DevicePasses(passes, stream).run_images(held, keys, slots)
    if fault is not None:
        raise fault
    return np.ascontiguousarray(slots[0].permute(1, 2, 0).cpu().numpy())


def mixture(name: str, share: float, side: int) -> Mixture:
    """What `mixup` and `cutmix` draw when the share of own pixels is this one, for two images."""
    cut = round(side * (1 - share) ** 0.5)
    corner = (side - cut) // 2
    box, weight = ((corner, corner, cut, cut), 1.0) if name == "cutmix" else ((0, 0, 0, 0), float(np.float32(share)))
    pairs = (np.array([1, 0]), np.array([weight] * 2), np.array([box] * 2), np.array([share] * 2))
    return Mixture(partners=pairs[0], weights=pairs[1], boxes=pairs[2], shares=pairs[3])


def mixed(name: str, images: Sequence[Pixels], share: float, device: torch.device) -> tuple[Pixels, Pixels]:
    """The first of two images mixed with the second one, on the CPU and by the operators of a GPU, in whole levels."""
    from gpuflow.execute.mixing import arrays_of, mix_images, mix_images_at_once

    how = mixture(name, share, len(images[0]))
    on_cpu = torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).float().contiguous()
    at_once = on_cpu.to(device, copy=True)
    mix_images(on_cpu, how)
    sent = [torch.from_numpy(array).to(device) for array in arrays_of(how)]
    mix_images_at_once(at_once, sent, blends=bool((how.weights != 1).any()))
    first, second = (np.ascontiguousarray(x[0].permute(1, 2, 0).round().byte().cpu()) for x in (on_cpu, at_once))
    return first, second


def pictures(names: Sequence[str], side: int) -> tuple[dict[str, Pixels], str]:
    """The arrays `stage/number/label/form`, and on what the GPU form ran."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    stream: Any = CpuStream()
    if device.type == "cuda":
        from gpuflow.execute.gpu.device_stream import DeviceStream

        stream = DeviceStream(device, torch.cuda.current_stream())
    photo, second = photograph("astronaut", side), photograph("coffee", side)
    found = {"photograph": photo, "second photograph": second}
    for name in names:
        for number, (label, parameters) in enumerate(picture_parameters()[name].items()):
            if issubclass(STAGES[name], Mixing):
                forms = mixed(name, (photo, second), parameters["share"], device)
            else:
                folded = program(name, parameters, side)
                keys = keys_of(folded, name, number, label, side)
                forms = on_cpu(folded, photo, keys), on_gpu(folded, photo, keys, stream)
            for form, pixels in zip(("cpu", "gpu"), forms, strict=True):
                found[f"{name}/{number}/{label}/{form}"] = pixels
            print(f"{name:20} {label:15} differs by {np.abs(np.subtract(*forms, dtype=np.int16)).max()}", flush=True)
    ran = torch.cuda.get_device_name() if device.type == "cuda" else "Triton's interpreter on a CPU"
    return found, ran


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--stages", nargs="+", choices=picture_parameters(), default=list(picture_parameters()))
    parser.add_argument("--side", type=int, default=SIDE)
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported, which nothing has done yet
    torch.set_num_threads(1)
    found, ran = pictures(options.stages, options.side)
    about = {"gpu": ran, "stages": options.stages}
    np.savez_compressed(options.out, about=np.array(json.dumps(about)), **found)  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
