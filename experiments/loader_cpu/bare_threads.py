"""The upper bound for the loader: threads that only read, decode, crop, resample and normalize.

There is no order, chunk, batch, queue or bad file: each thread processes its part of the files repeatedly.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import cv2
import numpy as np
import torch
from numpy.typing import NDArray

from gpuflow.decode.codecs import CpuDecoder, probe
from gpuflow.pipeline.stage import Crop, Keys
from gpuflow.stages import Normalize, RandomResizedCrop
from gpuflow.tools.bench import Job

__all__ = ["run"]

_DRAWN = 4096


def run(job: Job) -> Iterator[int]:
    """The number of images done since the last call, summed over `job.workers` threads."""
    import gpuflow

    source = gpuflow.load(job.path, job.pipeline, overrides=job.overrides).dataset
    paths = [source.path(index) for index in range(len(source))]
    counts = [0] * job.workers
    for number in range(job.workers):
        threading.Thread(target=_walk, args=(paths[number :: job.workers], counts, number), daemon=True).start()
    before = 0
    while True:
        time.sleep(0.05)
        now = sum(counts)
        yield now - before
        before = now


def _walk(paths: list[str], counts: list[int], number: int) -> None:
    torch.set_num_threads(1)
    resample: Any = torch._C._nn._upsample_bilinear2d_aa
    crop, normalize = RandomResizedCrop(size=224), Normalize()
    decoder, table = CpuDecoder("rgb"), normalize.table()
    shape, flipped = np.empty((224, 224, 3), np.uint8), np.empty((224, 224, 3), np.uint8)
    slots = np.empty((64, 3, 224, 224), np.float32)
    keys = Keys(number, 0, np.arange(_DRAWN)).stage("crop", 0)
    boxes: dict[tuple[int, int], list[list[int]]] = {}
    turn = 0
    while True:
        for path in paths:
            data = np.fromfile(path, np.uint8)
            header = probe(data)
            height, width = header.height, header.width
            if (height, width) not in boxes:
                move = crop.draw(keys, np.full(_DRAWN, height), np.full(_DRAWN, width))[0]
                assert isinstance(move, Crop)
                boxes[height, width] = np.stack([move.y, move.x, move.height, move.width], axis=1).tolist()
            y, x, box_height, box_width = boxes[height, width][turn % _DRAWN]
            image, (top, left) = decoder.decode(data, header, (y, x, box_height, box_width))
            part = image[y - top : y - top + box_height, x - left : x - left + box_width]
            source, target = (torch.from_numpy(image).permute(2, 0, 1)[None] for image in (part, shape))
            resample(source, (224, 224), False, None, None, out=target)
            pixels: NDArray[Any] = shape
            if turn % 2:
                pixels = cv2.flip(pixels, 1, dst=flipped)
            for plane, row, target in zip(cv2.split(pixels), table, slots[turn % 64], strict=True):
                cv2.LUT(plane, row, dst=target)
            turn += 1
            counts[number] += 1
