"""Run by test_images.py with TRITON_INTERPRET=1, in its own process: passes on images that are not from nvJPEG.

Prints one line of JSON a case: differences from the CPU runner in levels, faults, and the number of launches.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch

from gpuflow.execute.cpu.runner import CpuRunner
from gpuflow.execute.gpu import device_passes
from gpuflow.execute.gpu import results as results_of_passes
from gpuflow.execute.gpu.device_passes import DevicePasses, interleaved
from gpuflow.execute.gpu.device_stream import allocate_slots
from gpuflow.execute.gpu.passes import passes_of
from gpuflow.pipeline.stage import Keys
from gpuflow.pipeline.views import STORAGE, as_batch, slot_shape
from tests import images
from tests.datasets import Entries, program
from tests.execute.kernels.quick_interpreter import use_large_tiles
from tests.host_stream import HostStream

PIPELINES: dict[str, Entries] = {
    "crop": ({"decode": {}}, {"random_resized_crop": {"size": 13}}, {"flip": {"horizontal": 0.5}}),
    "two resamplings": (
        {"decode": {}},
        {"resize": {"height": 20, "width": 17}},
        {"resize": {"height": 9, "width": 12}},
        {"normalize": {"mean": (0, 0, 0), "std": (1 / 255,) * 3, "layout": "nhwc"}},
    ),
    "gray": ({"decode": {"color": "gray"}}, {"resize": {"height": 9, "width": 11}}),
    "warps": (
        {"decode": {}},
        {"flip": {"horizontal": 0.5}},
        {"perspective": {"probability": 0.7, "border": "edge"}},
        {"affine": {"degrees": 90, "scale": (0.5, 1.5), "border": "edge"}},
        {"center_crop": {"size": 24}},
        {"letterbox": {"size": (14, 18)}},
    ),
    "a warp to other sizes": (
        {"decode": {}},
        {"affine": {"degrees": 40, "translate": (0.1, 0.1), "scale": (0.7, 1.4), "fill": 114}},
        {"flip": {"horizontal": 0.5}},
        {"letterbox": {"size": 29, "fill": 114}},
    ),
    "three other sizes": (
        {"decode": {}},
        {"resize": {"shorter": 37}},
        {"flip": {"horizontal": 0.5, "vertical": 0.5}},
        {"affine": {"degrees": 30, "border": "reflect"}},
        {"resize": {"shorter": 19, "interpolation": "nearest"}},
        {"resize": {"height": 24, "width": 15}},
        {"normalize": {"mean": (0, 0, 0), "std": (1 / 255,) * 3}},
    ),
    "a warp that expands": (
        {"decode": {}},
        {"rotate": {"degrees": 60, "expand": True, "fill": 114}},
        {"flip": {"vertical": 0.5}},
        {"resize": {"shorter": 24, "max_size": 30}},
        {"random_crop": {"size": 27, "padding": (1, 0, 2, 4), "pad_if_needed": True, "fill": 114}},
    ),
    "crops of padded images": (
        {"decode": {}},
        {"random_crop": {"size": (33, 42), "padding": (2, 5), "pad_if_needed": True, "border": "reflect"}},
        {"random_crop": {"size": (30, 50), "padding": 3, "pad_if_needed": True, "fill": (9, 200, 50)}},
        {"rotate": {"degrees": 40, "center": (3.0, 9.5), "border": "edge"}},
        {"gaussian_blur": {"kernel_size": (3, 7)}},
    ),
    "few images changed": (
        {"decode": {}},
        {"random_resized_crop": {"size": (14, 17)}},
        {"color_jitter": {"contrast": 0.9, "saturation": 0.9, "hue": 0.4, "probability": 0.4}},
        {"gaussian_blur": {"kernel_size": 5, "probability": 0.4}},
        {"equalize": {"probability": 0.4}},
        {"sharpness": {"amount": 0.9, "probability": 0.4}},
        {"affine": {"degrees": 40}},
        {"grayscale": {"probability": 0.4}},
        {"normalize": {"mean": (0, 0, 0), "std": (1 / 255,) * 3}},
    ),
    "misfits": ({"decode": {}}, {"random_crop": {"size": 30}}),
}
ALONE = (
    "few images changed",
    "a warp to other sizes",
    "three other sizes",
    "a warp that expands",
    "crops of padded images",
)
"""These run on interleaved images alone, for the interpreter is slow."""
launches: Counter[str] = Counter()


def counted(name: str) -> Callable[..., Any]:
    kernel = getattr(device_passes, name)

    def run(*arguments: Any, **named: Any) -> Any:
        launches[name] += 1
        return kernel(*arguments, **named)

    return run


def forms(arrays: Sequence[Any]) -> Iterator[tuple[str, list[torch.Tensor]]]:
    """Tensors [C, H, W] of the same pixels in several kinds of memory."""
    interleaved = [torch.from_numpy(array).permute(2, 0, 1) for array in arrays]
    planes = [image.contiguous() for image in interleaved]
    yield "interleaved", interleaved
    yield "planes", planes
    yield "mixed", [*interleaved[:2], *planes[2:]]
    yield "parts of larger images", [torch.nn.functional.pad(image, (3, 2, 1, 4))[:, 1:-4, 3:-2] for image in planes]


def main() -> None:
    results_of_passes.TILE = 16  # so that images have several tiles
    use_large_tiles()
    for kernel in ("resample_all", "warp_all", "adjust", "interleave"):
        setattr(device_passes, kernel, counted(kernel))
    for name, entries in PIPELINES.items():
        folded = program(entries)
        passes = passes_of(folded)
        assert not isinstance(passes, str), passes
        stream: Any = HostStream()
        runner, result = DevicePasses(passes, stream), folded.result
        for count in (3, 6):
            arrays = [images.photo(31 + i, 44 - 2 * i, seed=i) for i in range(count)]
            arrays = [array[..., :1].copy() if name == "gray" else array for array in arrays]
            if name == "misfits":
                arrays[1] = arrays[1][:17].copy()
            keys = Keys(3, 1, np.arange(40, 40 + count))
            slots = np.zeros((count, *slot_shape(result)), STORAGE[result.dtype])
            rights = CpuRunner(folded).run_images(arrays, keys, slots)
            for form, tensors in islice(forms(arrays), 1 if name in ALONE else None):
                launches.clear()
                found = allocate_slots(stream, count, result).fill_(0)
                faults = runner.run_images(interleaved(tensors, stream), keys, found)
                difference = 0.0
                if not any(rights):
                    difference = float((found.double() - as_batch(slots, result).double()).abs().max())
                case = {"case": f"{name}, {form}", "count": count, "difference": difference, "launches": dict(launches)}
                print(json.dumps({**case, "faults": list(map(str, faults)), "rights": list(map(str, rights))}))


if __name__ == "__main__":
    main()
