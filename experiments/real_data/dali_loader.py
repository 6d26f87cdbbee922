"""The same work with NVIDIA DALI: mixed decoder with a fused random crop, resize, flip, normalization to 16 bits.

DALI ends a pipeline with an error at the first file that it cannot decode, so it gets a list of files that it can.
"""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from engines import distinct_files

__all__ = ["LOADS", "batches", "is_installed", "kind_of", "readable", "without_unreadable"]

LOADS = (0.65, 0.8, 0.9)
"""Values of hw_decoder_load, the part of a batch for the JPEG engines, from which the fastest is taken."""
_THREADS, _QUEUE = 16, 3
_TRIED = 4
"""Files of each kind that are decoded to find out whether DALI decodes that kind."""


def is_installed() -> bool:
    return importlib.util.find_spec("nvidia") is not None and importlib.util.find_spec("nvidia.dali") is not None


def batches(
    files: Sequence[str], labels: Sequence[int], batch: int, load: float
) -> Generator[tuple[Any, Any], None, None]:
    """Images [batch, 3, 224, 224] in channels_last memory and labels [batch], without end."""
    from nvidia.dali import fn, pipeline_def, types
    from nvidia.dali.plugin.pytorch import DALIGenericIterator

    @pipeline_def  # type: ignore[untyped-decorator]  # DALI ships no types
    def pipeline() -> Any:
        encoded, classes = fn.readers.file(files=list(files), labels=list(labels), random_shuffle=True, name="files")
        images = fn.decoders.image_random_crop(
            encoded,
            device="mixed",
            output_type=types.RGB,
            random_aspect_ratio=[3 / 4, 4 / 3],
            random_area=[0.08, 1.0],
            hw_decoder_load=load,
        )
        images = fn.resize(images, resize_x=224, resize_y=224, interp_type=types.INTERP_TRIANGULAR)
        images = fn.crop_mirror_normalize(
            images,
            dtype=types.FLOAT16,
            output_layout="HWC",
            mirror=fn.random.coin_flip(),
            mean=[123.675, 116.28, 103.53],
            std=[58.395, 57.12, 57.375],
        )
        return images, classes.gpu()

    pipe = pipeline(batch_size=batch, num_threads=_THREADS, device_id=0, prefetch_queue_depth=_QUEUE)
    pipe.build()
    for (found,) in DALIGenericIterator(pipe, ["images", "labels"], size=-1):
        yield found["images"].permute(0, 3, 1, 2), found["labels"].flatten().long()


def readable(folder: Path) -> tuple[list[str], list[int], int]:
    """The files of a folder that DALI decodes, in a random order, with their labels; and how many it does not decode.

    All names of a file count. The order is random because DALI shuffles only a part of the list at a time.
    """
    refused = {path.stat().st_ino for path in without_unreadable(distinct_files(folder), decodes)[1]}
    names = sorted(path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("."))
    taken = [path for path in names if path.stat().st_ino not in refused]
    classes = {name: label for label, name in enumerate(sorted({path.parent.name for path in names}))}
    random.Random(0).shuffle(taken)
    return [str(path) for path in taken], [classes[path.parent.name] for path in taken], len(names) - len(taken)


def without_unreadable(
    paths: Sequence[Path], decodes: Callable[[Sequence[Path]], bool]
) -> tuple[list[Path], list[Path]]:
    """Split files into those that `decodes` accepts and those that it does not.

    A few files of each kind are tried first. Where none of them is accepted, the kind is left out as a whole. Others
    are searched by halves.
    """
    kinds: dict[tuple[Any, ...], list[Path]] = {}
    for path in paths:
        kinds.setdefault(kind_of(path), []).append(path)
    candidates, refused = [], []
    for members in kinds.values():
        if any(decodes([path]) for path in members[:_TRIED]):
            candidates += members
        else:
            refused += members
    bad = set(_search(candidates, decodes))
    return [path for path in candidates if path not in bad], [*refused, *sorted(bad)]


def _search(paths: Sequence[Path], decodes: Callable[[Sequence[Path]], bool]) -> Iterator[Path]:
    if not paths or decodes(paths):
        return
    if len(paths) == 1:
        yield paths[0]
        return
    middle = len(paths) // 2
    yield from _search(paths[:middle], decodes)
    yield from _search(paths[middle:], decodes)


def kind_of(path: Path) -> tuple[Any, ...]:
    """What the header of a file says: format, number of channels, whether it is progressive. Empty for a bad header."""
    from gpuflow.decode.codecs import probe
    from gpuflow.errors import BadSampleError

    try:
        header = probe(np.fromfile(path, np.uint8))
    except BadSampleError:
        return ()
    return header.format, header.channels, header.progressive


def decodes(paths: Sequence[Path]) -> bool:
    """Whether DALI decodes each of these files."""
    from nvidia.dali import fn, pipeline_def, types

    batch = min(len(paths), 128)

    @pipeline_def  # type: ignore[untyped-decorator]  # DALI ships no types
    def pipeline() -> Any:
        encoded, _ = fn.readers.file(files=[str(path) for path in paths], labels=[0] * len(paths))
        return fn.decoders.image(encoded, device="mixed", output_type=types.RGB)

    pipe = pipeline(batch_size=batch, num_threads=_THREADS, device_id=0, prefetch_queue_depth=1)
    try:
        pipe.build()
        for _ in range(-(-len(paths) // batch)):
            pipe.run()
    except RuntimeError:
        return False
    return True
