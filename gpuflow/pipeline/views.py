"""Views: several pipelines that share one decoding of each image, and the memory of a batch that holds them all.

Each view is a separate pipeline, `decode` included, and folds into a separate program. A view may be drawn several
times: its number, from 0, and its name are part of its random keys, so other views do not change what it draws.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from gpuflow.arrays import Array
from gpuflow.pipeline.program import MixingStep, Program
from gpuflow.pipeline.stage import Decoder, ImageSpec, Keys, Pipeline, RecordValue

if TYPE_CHECKING:
    import torch


STORAGE = {"uint8": np.uint8, "float32": np.float32, "float16": np.uint16, "bfloat16": np.uint16}
"""The numpy dtype that stores each dtype; 16-bit floats are stored as their bits."""


def slot_shape(spec: ImageSpec) -> tuple[int, int, int]:
    """Return the shape of one image in a batch's memory: [C, H, W] for `nchw`; [H, W, C] for `nhwc` and `hwc`.

    Examples:
        >>> slot_shape(ImageSpec(shape=(224, 256, 3), dtype="float32", layout="nchw"))
        (3, 224, 256)
    """
    height, width, channels = spec.shape
    assert height is not None and width is not None
    return (channels, height, width) if spec.layout == "nchw" else (height, width, channels)


def as_batch(slots: Array, spec: ImageSpec) -> torch.Tensor:
    """View slots [N, *slot_shape] as a tensor with axes N, C, H, W that shares memory; channels_last unless `nchw`."""
    import torch

    return _channels_first(torch.from_numpy(slots).view(getattr(torch, spec.dtype)), spec)


def _channels_first(slots: torch.Tensor, spec: ImageSpec) -> torch.Tensor:
    """View slots [..., *slot_shape] as images [..., C, H, W]."""
    return slots if spec.layout == "nchw" else slots.movedim(-1, -3)


_ALIGN = 16


@dataclass(frozen=True, slots=True)
class View:
    """One pipeline, `decode` included, that is drawn `count` times of each image, under a name."""

    name: str
    count: int
    pipeline: Pipeline


@dataclass(frozen=True, slots=True)
class ViewsPipeline:
    """The views of one pipeline, whose stages begin with the same decoder: a value like `Pipeline`."""

    name: str
    views: tuple[View, ...]

    def __repr__(self) -> str:
        return f"{self.name}: {'; '.join(self.texts)}"

    @property
    def texts(self) -> tuple[str, ...]:
        """Return each view in a line: its name, how often it is drawn, and its stages."""
        return tuple(f"{view.name} x {view.count} ({repr(view.pipeline).partition(': ')[2]})" for view in self.views)

    @property
    def fingerprint(self) -> str:
        """Return a hash of everything that affects the pixels (SHA-256, 16 hex digits). The order of views does not."""
        parts = sorted((view.name, view.count, view.pipeline.fingerprint) for view in self.views)
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]

    @property
    def lines(self) -> tuple[str, ...]:
        """Return the parameters that the fingerprint covers, as text: one line per stage of each view."""
        return tuple(f"{view.name} x {view.count}: {line}" for view in self.views for line in view.pipeline.lines)


@dataclass(frozen=True, kw_only=True, slots=True)
class ViewsProgram:
    """The views of a pipeline, each folded. programs: one for each view, in the same order."""

    pipeline: ViewsPipeline
    programs: tuple[Program, ...]

    @property
    def decoder(self) -> Decoder:
        return self.programs[0].decoder

    @property
    def results(self) -> tuple[tuple[View, ImageSpec], ...]:
        """Return each view with the spec of its images in a batch."""
        return tuple((view, one.result) for view, one in zip(self.pipeline.views, self.programs, strict=True))

    @property
    def record_values(self) -> tuple[RecordValue, ...]:
        """Return what the stages of all views take from each sample's record, without repetitions."""
        return tuple(dict.fromkeys(value for one in self.programs for value in one.record_values))

    @property
    def mixings(self) -> tuple[MixingStep, ...]:
        """Return an empty tuple: no view may have mixing stages."""
        return ()

    def blocks(self, count: int) -> Iterator[tuple[View, ImageSpec, slice, tuple[int, ...]]]:
        """Yield each view, its spec, and the bytes and the shape of its block in the memory of `count` samples.

        A view's images of all samples are contiguous.
        """
        begin = 0
        for view, result in self.results:
            shape = (view.count, count, *slot_shape(result))
            size = math.prod(shape) * np.dtype(STORAGE[result.dtype]).itemsize
            yield view, result, slice(begin, begin + size), shape
            begin += _bytes_of(view, result) * count

    @property
    def slot_bytes(self) -> int:
        """Return how many bytes all views of one sample take."""
        return sum(_bytes_of(view, result) for view, result in self.results)


AnyProgram = Program | ViewsProgram


def programs_of(program: AnyProgram) -> tuple[Program, ...]:
    """Return the program itself, or those of its views."""
    return program.programs if isinstance(program, ViewsProgram) else (program,)


def named_programs(program: AnyProgram) -> list[tuple[str, int, Program]]:
    """Return each view's name, count and program; of a pipeline without views an empty name, 1 and the program."""
    if not isinstance(program, ViewsProgram):
        return [("", 1, program)]
    pairs = zip(program.pipeline.views, program.programs, strict=True)
    return [(view.name, view.count, one) for view, one in pairs]


@dataclass(frozen=True, slots=True)
class Output:
    """One of the images that are made of each sample: one number of a view, or the only image without views.

    program: which of `programs_of` makes it.
    """

    program: int = 0
    view: View | None = None
    number: int = 0

    def keys_of(self, keys: Keys) -> Keys:
        """Return the keys that this output of the samples is drawn with."""
        return keys if self.view is None else keys.of_view(self.view.name, self.number)


def outputs_of(program: AnyProgram) -> tuple[Output, ...]:
    """Return the outputs of a program, in the order of `split`."""
    if not isinstance(program, ViewsProgram):
        return (Output(),)
    views = enumerate(program.pipeline.views)
    return tuple(Output(i, view, number) for i, view in views for number in range(view.count))


@dataclass(frozen=True, slots=True)
class ViewSlots:
    """Where the results of N samples of a program with views go.

    memory: uint8 [B, slot_bytes], of the whole batch: an array or a tensor. views: for each view an array
    [count, N, *slot_shape] in it, or a tensor [count, N, C, H, W].
    """

    memory: Any
    views: tuple[Any, ...]

    def __getitem__(self, rows: slice) -> ViewSlots:
        """Return the slots of some samples."""
        return ViewSlots(self.memory, tuple(view[:, rows] for view in self.views))


def _bytes_of(view: View, result: ImageSpec) -> int:
    """Return how many bytes one sample's images of a view take, a multiple of what any dtype is aligned to."""
    size = view.count * math.prod(slot_shape(result)) * np.dtype(STORAGE[result.dtype]).itemsize
    return -(-size // _ALIGN) * _ALIGN


def slot_of(program: AnyProgram) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Return the shape and dtype of one sample's memory in a batch's."""
    if isinstance(program, ViewsProgram):
        return (program.slot_bytes,), np.dtype(np.uint8)
    return slot_shape(program.result), np.dtype(STORAGE[program.result.dtype])


def slot_bytes_of(program: AnyProgram) -> int:
    """Return the size of one sample's memory in a batch's, in bytes."""
    shape, dtype = slot_of(program)
    return math.prod(shape) * dtype.itemsize


def slots_of(program: AnyProgram, memory: Array | torch.Tensor) -> Any:
    """Return the slots in a batch's memory [B, ...]: the array itself, of a tensor its images [B, C, H, W], or
    `ViewSlots`.
    """
    if not isinstance(memory, np.ndarray):
        images = as_images(program, memory)
        return ViewSlots(memory, tuple(images.values())) if isinstance(images, dict) else images
    if not isinstance(program, ViewsProgram):
        return memory
    flat = memory.reshape(-1)
    blocks = program.blocks(len(memory))
    return ViewSlots(
        memory, tuple(flat[block].view(STORAGE[result.dtype]).reshape(shape) for _, result, block, shape in blocks)
    )


def split(slots: Any) -> list[Any]:
    """Return the slots [N, ...] of each output, see `outputs_of`."""
    if not isinstance(slots, ViewSlots):
        return [slots]
    return [view[number] for view in slots.views for number in range(len(view))]


def as_images(program: AnyProgram, memory: Array | torch.Tensor) -> torch.Tensor | dict[str, torch.Tensor]:
    """View a batch's memory as what the loop gets: [B, C, H, W], or for each view a tensor [count, B, C, H, W].

    memory: an array [B, ...], or a tensor of its bytes on any device.
    """
    import torch

    tensor = torch.from_numpy(memory) if isinstance(memory, np.ndarray) else memory
    if not isinstance(program, ViewsProgram):
        one = tensor.view(getattr(torch, program.result.dtype)).view(-1, *slot_shape(program.result))
        return _channels_first(one, program.result)
    flat = tensor.reshape(-1)
    images = {}
    for view, result, block, shape in program.blocks(len(tensor)):
        images[view.name] = _channels_first(flat[block].view(getattr(torch, result.dtype)).view(shape), result)
    return images
