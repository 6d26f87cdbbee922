"""Run by test_repeated_passes.py with TRITON_INTERPRET=1, in its own process: the passes of one batch after another.

Prints one line of JSON a case: for each batch how far its result is from that of `DevicePasses`, the faults of both,
and for how many samples passes drew by then; and how often work was captured.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from gpuflow.execute.gpu import repeated_passes
from gpuflow.execute.gpu.device_passes import DevicePasses, interleaved
from gpuflow.execute.gpu.device_stream import allocate_slots
from gpuflow.execute.gpu.passes import Pass, draw_passes, passes_of
from gpuflow.execute.gpu.repeated_passes import RepeatedPasses
from gpuflow.pipeline.program import Program
from gpuflow.pipeline.stage import Keys
from tests import images
from tests.datasets import Entries, program
from tests.execute.kernels.quick_interpreter import use_few_slices, use_large_tiles
from tests.host_stream import HostStream

PIPELINES: dict[str, Entries] = {
    "policy": (
        {"decode": {}},
        {"random_resized_crop": {"size": 14}},
        {"rand_augment": {"operations": 2, "magnitude": 20}},
        {"random_erasing": {"probability": 0.5, "value": "random"}},
        {"normalize": {}},
    ),
    "colours": (
        {"decode": {}},
        {"resize": {"height": 12, "width": 15}},
        {"color_jitter": {"brightness": 0.4, "contrast": 0.4, "saturation": 0.2, "hue": 0.1}},
        {"gaussian_blur": {"kernel_size": 3, "probability": 0.5}},
        {"solarize": {"threshold": 128, "probability": 0.5}},
        {"posterize": {"bits": 3, "probability": 0.5}},
        {"normalize": {"layout": "nhwc"}},
    ),
    "a warp at the end": (
        {"decode": {}},
        {"random_crop": {"size": 20}},
        {"sharpness": {"amount": 0.5, "probability": 0.5}},
        {"affine": {"degrees": 40}},
    ),
    "one pass": (
        {"decode": {}},
        {"random_resized_crop": {"size": 11}},
        {"flip": {"horizontal": 0.5}},
        {"normalize": {}},
    ),
    "other sizes": ({"decode": {}}, {"resize": {"shorter": 17}}, {"center_crop": {"size": 12}}, {"equalize": {}}),
}
Batch = tuple[Keys, list[tuple[int, int]]]
"""The keys of a batch and the size of each image."""
drawn: list[int] = []
captured: list[Callable[[], None]] = []


def batches() -> list[Batch]:
    """Batches in the order in which a program might ask for them."""
    same, other, small = [(30, 41)] * 2, [(33, 26), (24, 45)], [(30, 41), (9, 45)]
    in_order = [(Keys(5, 0, np.array([10, 11]) + 2 * i), same) for i in range(9)]
    views = [(Keys(5, 1, np.array([0, 4]) + 8 * (i // 2), ("local", i % 2)), same) for i in range(6)]
    return [
        *in_order,
        (in_order[2][0], same),  # one that was there already
        *((Keys(5, 1, np.array([10, 11]) + 2 * i), other) for i in range(4)),
        (Keys(5, 1, np.array([18, 19])), small),  # a crop of 20 does not fit the second image
        (Keys(5, 1, np.array([20, 21])), same),
        *views,
        (Keys(6, 1, np.array([7, 3])), same),
        (Keys(6, 1, np.array([2**63 - 3, 2**63 - 2])), same),
        (Keys(6, 1, np.array([0, 1, 2])), [*same, (25, 25)]),  # another size of a batch
        *((Keys(6, 1, np.array([3, 4, 5]) + 3 * i), [*same, (25, 25)]) for i in range(3)),
        (Keys(6, 1, np.empty(0, np.int64)), []),
        *((Keys(7, 1, np.array([position])), [(30, 41)]) for position in (40, 8, 30, 2, 25, 9, 17, 5)),  # one by one
        *((Keys(7, 1, np.array([6 + i])), [(30 + i, 41)]) for i in range(9)),  # in order, of several sizes
    ]


def counting(passes: Sequence[Pass], keys: Keys, sizes: Any) -> list[Any]:
    drawn.append(len(keys.positions))
    return draw_passes(passes, keys, sizes)


def capture(work: Callable[[], None]) -> Callable[[], None]:
    """Fails the third time, as CUDA may: for the second size of a batch here."""
    captured.append(work)
    if len(captured) == 3:
        raise RuntimeError("operation not permitted when stream is capturing")
    return work


def measure(folded: Program, passes: tuple[Pass, ...]) -> dict[str, Any]:
    stream: Any = HostStream()
    plain, repeated = DevicePasses(passes, stream), RepeatedPasses(passes, stream, capture)
    rows, buffers = [], {}
    for number, (keys, sizes) in enumerate(batches()):
        given = [
            torch.from_numpy(images.photo(*size, seed=number + i)).permute(2, 0, 1) for i, size in enumerate(sizes)
        ]
        found = []
        for place in ("plain", number % 2):  # two results in turn, as a program has that keeps one for a step
            if (len(given), place) not in buffers:
                buffers[len(given), place] = allocate_slots(stream, len(given), folded.result)
            found.append(buffers[len(given), place].fill_(0))
        with torch.inference_mode(number % 3 != 0):  # what was allocated in it must be usable outside it
            faults = [
                plain.run_images(interleaved(given, stream), keys, found[0]),
                repeated.run_images(interleaved(given, stream), keys, found[1]),
            ]
        good = [i for i, fault in enumerate(faults[0]) if fault is None] if not any(faults[0]) else []
        differences = (found[0].double() - found[1].double()).abs()[good]
        rows.append([float(differences.max()) if good else 0.0, *(list(map(str, one)) for one in faults), sum(drawn)])
    return {"batches": rows, "captured": len(captured)}


def main() -> None:
    use_large_tiles()
    use_few_slices()
    vars(repeated_passes).update(_BATCHES=3, draw_passes=counting)
    for name, entries in PIPELINES.items():
        folded = program(entries)
        passes = passes_of(folded)
        assert not isinstance(passes, str), passes
        drawn.clear()
        captured.clear()
        print(json.dumps({"case": name, "passes": len(passes), **measure(folded, passes)}), flush=True)


if __name__ == "__main__":
    main()
