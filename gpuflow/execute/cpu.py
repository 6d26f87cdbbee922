"""Runs a program on the CPU, one image at a time: the reference for every other lowering.

Training and serving both call this code, so on a CPU their results are equal bit for bit.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, assert_never, cast

import cv2
import numpy as np
import torch
from numpy.typing import NDArray

from gpuflow.decode.codecs import CpuDecoder, Header, probe
from gpuflow.errors import BadSampleError, GpuflowError, is_system_fault, reason_of
from gpuflow.execute.local import run_filters
from gpuflow.execute.pointwise import run_pointwise
from gpuflow.execute.resample import resample_part
from gpuflow.execute.warp import warp
from gpuflow.pipeline import stage as s
from gpuflow.pipeline.image_spec import STORAGE, as_batch
from gpuflow.pipeline.program import (
    ApplyStep,
    LocalStep,
    OpaqueStep,
    PointwiseStep,
    Program,
    Resampling,
    ResamplingStep,
    Warping,
    WarpStep,
    too_large,
)
from gpuflow.pipeline.views import AnyProgram, outputs_of, programs_of, split

__all__ = [
    "CpuRunner",
    "CpuRunners",
    "bad_by_stage",
    "call_opaque",
    "header_of",
    "tagged_header_of",
]

_KEPT_BYTES = 1 << 24
"""Scratch memory of at most this size is kept for images that need much less."""
_Box = tuple[int, int, int, int]
"""Top, left, height and width."""
_NO_MEMORY = "can't allocate memory"
"""In the text of torch's RuntimeError for a CPU without memory."""


class _ResamplingRows:
    """One resampling as lists of Python integers, with one row per sample."""

    def __init__(self, resampling: Resampling) -> None:
        self.geometry = resampling
        self.boxes, self.grids = resampling.box.tolist(), resampling.grid.tolist()
        self.shown, self.windows = resampling.shown.tolist(), resampling.window.tolist()
        self.mirrors, self.flips = resampling.mirrors.tolist(), resampling.flips.tolist()


class _WarpingRows:
    """One warp as lists of Python integers, with one row per sample."""

    def __init__(self, warping: Warping) -> None:
        self.geometry = warping
        self.boxes, self.shown = warping.box.tolist(), warping.shown.tolist()
        sizes = np.stack(warping.size, axis=1)
        self.sizes = sizes.tolist()
        same = (warping.matrix == np.eye(3)).all(axis=(1, 2)) & (warping.shown[:, 2:] == sizes).all(axis=1)
        self.same = same.tolist()
        """Which samples' maps change no pixel, if the image has the size of the result."""


def _check(drawn: _ResamplingRows | _WarpingRows, i: int) -> None:
    """Raise BadSampleError if this resampling cannot be run on sample i."""
    for misfit in drawn.geometry.misfits:
        if (fault := misfit.fault(i)) is not None:
            raise fault


def _draw(
    step: ResamplingStep | WarpStep, keys: s.Keys, height: s.Ints, width: s.Ints
) -> _ResamplingRows | _WarpingRows:
    if isinstance(step, ResamplingStep):
        return _ResamplingRows(step.draw(keys, height, width))
    return _WarpingRows(step.draw(keys, height, width))


class _Steps:
    """Runs the steps of one program on decoded images, with scratch memory of one thread."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._scratch: dict[tuple[str, int], NDArray[np.uint8]] = {}

    def first(self, drawn: Sequence[Any]) -> _ResamplingRows | _WarpingRows | None:
        """The first step's draws if it is a resampling or a warp, which leave the decoded image as it is."""
        steps = self._program.steps
        rows: _ResamplingRows | _WarpingRows | None = None
        if steps and isinstance(steps[0], ResamplingStep | WarpStep):
            rows = drawn[0]
        return rows

    def draw(self, keys: s.Keys, height: s.Ints, width: s.Ints) -> list[Any]:
        """Each step's random parameters for all samples; None for steps whose images' sizes are not known yet."""
        drawn: list[Any] = []
        known = True
        for step in self._program.steps:
            match step:
                case ApplyStep() | LocalStep():
                    drawn.append(step.draw(keys))
                case OpaqueStep():
                    drawn.append(step.draw(keys))
                    known = False
                case ResamplingStep() | WarpStep() | PointwiseStep() if not known:
                    drawn.append(None)
                case PointwiseStep():
                    drawn.append(step.draw(keys, height, width))
                case ResamplingStep() | WarpStep():
                    rows = _draw(step, keys, height, width)
                    height, width = rows.geometry.size
                    drawn.append(rows)
                case _:
                    assert_never(step)
        return drawn

    def run(
        self,
        image: NDArray[Any],
        origin: tuple[int, int],
        i: int,
        drawn: Sequence[Any],
        keys: s.Keys,
        slot: NDArray[Any],
    ) -> None:
        """Run all steps on the region of the upright image that begins at (top, left) = origin."""
        steps, first, (top, left) = self._program.steps, self.first(drawn), origin
        for n, (step, draw) in enumerate(zip(steps, drawn, strict=True)):
            out = slot if n == len(steps) - 1 else None
            match step:
                case ResamplingStep() | WarpStep():
                    row = i
                    if draw is None:
                        draw, row = _draw(step, keys[i], *_size(image)), 0
                    if draw is not first:
                        _check(draw, row)
                    run = self._resample if isinstance(draw, _ResamplingRows) else self._warp
                    image = run(image, draw, row, top, left, out, n)
                    top = left = 0
                case PointwiseStep():
                    operations, row = (step.draw(keys[i], *_size(image)), 0) if draw is None else (draw, i)
                    planes = step.after.layout == "nchw"
                    scratch = functools.partial(self._buffer, n=n)
                    image = run_pointwise(image, operations, row, step.table, planes=planes, out=out, scratch=scratch)
                case LocalStep():
                    image = run_filters(image, draw, i)
                case ApplyStep(stage):
                    image = stage.apply(image, draw[i], out)
                case OpaqueStep():
                    image = call_opaque(step, image, int(draw[i]))
                case _:
                    assert_never(step)
        if image is not slot:
            np.copyto(slot, image.reshape(slot.shape))

    def _resample(
        self,
        image: NDArray[np.uint8],
        draw: _ResamplingRows,
        i: int,
        top: int,
        left: int,
        out: NDArray[Any] | None,
        n: int,
    ) -> NDArray[np.uint8]:
        """Run one resampling. `image` is the region of the upright image that begins at (top, left)."""
        (y, x, height, width), window = draw.boxes[i], draw.windows[i]
        box = image[y - top : y - top + height, x - left : x - left + width]
        if any(draw.mirrors[i]):
            box = _mirror(box, draw.mirrors[i], self._buffer("mirrored", box.shape, n))
        flipped = any(draw.flips[i])
        shape = (window[2], window[3], image.shape[2])
        result = out if out is not None else self._buffer("resampled", shape, n)
        kept = self._buffer("flipped", shape, n) if flipped else result
        self._fill(kept, box, draw, i, n)
        if flipped:
            _mirror(kept, draw.flips[i], result)
        return result

    def _warp(
        self,
        image: NDArray[np.uint8],
        draw: _WarpingRows,
        i: int,
        top: int,
        left: int,
        out: NDArray[Any] | None,
        n: int,
    ) -> NDArray[np.uint8]:
        """Run one warp. `image` is the region of the upright image that begins at (top, left)."""
        (y, x, height, width), warping = draw.boxes[i], draw.geometry
        box = image[y - top : y - top + height, x - left : x - left + width]
        shape = (*draw.sizes[i], image.shape[2])
        if n and draw.same[i] and out is None and image.shape == box.shape == shape:
            return image  # and not what a decoder or a caller gave, which a later stage must not write to
        result = out if out is not None else self._buffer("warped", shape, n)
        shown = y, x, height, width = draw.shown[i]
        if (height, width) != shape[:2]:
            result.fill(0)
        if height and width:  # a crop may show padding alone
            warp(box, warping.matrix[i], shown, warping.lookup, result[y : y + height, x : x + width])
        return result

    def _fill(self, out: NDArray[np.uint8], box: NDArray[np.uint8], draw: _ResamplingRows, i: int, n: int) -> None:
        """Write the window of the resampled box, and no more of it. Its pixels outside the box get the fill."""
        (y, x, height, width), (top, left, rows, columns) = draw.windows[i], draw.shown[i]
        y0, x0 = max(y, top), max(x, left)
        y1, x1 = max(min(y + height, top + rows), y0), max(min(x + width, left + columns), x0)
        if (y1 - y0, x1 - x0) != (height, width):
            out[...] = draw.geometry.fill
        if y1 > y0 and x1 > x0:
            resample_part(
                box,
                draw.grids[i],
                (y0, x0, y1 - y0, x1 - x0),
                draw.geometry.interpolation,
                draw.geometry.antialias,
                out[y0 - y : y1 - y, x0 - x : x1 - x],
                functools.partial(self._buffer, n=n),
            )

    def _buffer(self, name: str, shape: tuple[int, ...], n: int) -> NDArray[np.uint8]:
        """Scratch memory of this shape for step n, used again by the next image; not if that is much smaller."""
        need, held = math.prod(shape), self._scratch.get((name, n))
        if held is None or not need <= len(held) <= max(16 * need, _KEPT_BYTES):
            held = self._scratch[name, n] = np.empty(need, np.uint8)
        return held[:need].reshape(shape)


@dataclass(frozen=True, slots=True)
class _Drawn:
    """The draws of one output for N images. slots [N, ...]: receives its results."""

    steps: _Steps
    keys: s.Keys
    draws: list[Any]
    slots: NDArray[Any]

    @property
    def first(self) -> _ResamplingRows | _WarpingRows | None:
        return self.steps.first(self.draws)

    def run(self, image: NDArray[np.uint8], origin: tuple[int, int], i: int, *, shared: bool) -> None:
        """Run all steps on image i. shared: others need it as it is. Raises BadSampleError."""
        if shared:  # a stage that is neither a resampling nor a warp may write to what it gets
            image = np.ascontiguousarray(image) if self.first is not None else np.array(image, order="C")
        self.steps.run(image, origin, i, self.draws, self.keys, self.slots[i])


class CpuRunner:
    """Decodes each image once and makes all outputs of a program from it. Each thread needs its own runner."""

    def __init__(self, program: AnyProgram) -> None:
        self._stage, programs = program.decoder, programs_of(program)
        self._decoder = CpuDecoder(self._stage.color, background=self._stage.background)
        self._steps, self._outputs = [_Steps(one) for one in programs], outputs_of(program)
        self._size = programs[0].specs[1].shape[:2] if self._stage.library is not None else (1, 1)
        self.place = 0
        """The number of the sample that `run` works on."""

    def check(self) -> None:
        """Decode gpuflow's own test image. Raises DecoderError if that fails."""
        if self._stage.library is None:
            self._decoder.check()

    def run(
        self,
        samples: Sequence[NDArray[np.uint8]],
        keys: s.Keys,
        slots: Any,
        sizes: NDArray[np.int64] | None = None,
    ) -> list[BadSampleError | None]:
        """Decode N samples and run all steps on them.

        Args:
            samples: the encoded bytes of each sample, uint8 [n_i].
            keys: the samples' random keys (N = len(samples)).
            slots: receives the results, see `slots_of`.
            sizes: receives, of samples with a valid header, the upright images' heights and widths, and the EXIF
                orientation if `decode` does not say what becomes of it, else 1: [N, 3].

        Returns:
            For each sample None, or why it is bad, as it is if one of its outputs is; its slots' content is undefined.
        """
        faults: list[BadSampleError | None] = [None] * len(samples)
        headers: list[Header | None] = [None] * len(samples)
        tags = np.ones(len(samples), np.int64)
        if self._stage.library is None:
            for i, data in enumerate(samples):
                self.place = i
                try:
                    headers[i], tags[i] = tagged_header_of(data, self._stage, tagged=sizes is not None)
                except BadSampleError as fault:
                    faults[i] = fault.with_traceback(None)  # which refers to this frame, and that to all samples
        upright = np.array([header.upright_size if header else self._size for header in headers], np.int64)
        upright = upright.reshape(-1, 2)
        if sizes is not None:
            sizes[:] = np.column_stack([upright, tags])

        def decode(i: int, region: _Box | None) -> tuple[NDArray[np.uint8], tuple[int, int]]:
            if (header := headers[i]) is None:
                return self._stage.decode(samples[i]), (0, 0)
            return self._decoder.decode(samples[i], header, region)

        return self._run(decode, self._draw(keys, upright, slots), faults, shared=len(self._outputs) > 1)

    def run_images(self, images: Sequence[NDArray[np.uint8]], keys: s.Keys, slots: Any) -> list[BadSampleError | None]:
        """Run all steps on N decoded images, uint8 [H_i, W_i, C], which stay as they are. The rest is as in `run`."""
        sizes = np.array([image.shape[:2] for image in images], np.int64).reshape(-1, 2)
        outputs = self._draw(keys, sizes, slots)
        return self._run(lambda i, region: (images[i], (0, 0)), outputs, [None] * len(images), shared=True)

    def _draw(self, keys: s.Keys, sizes: NDArray[np.int64], slots: Any) -> list[_Drawn]:
        """Draw the parameters of each output for N images of these upright sizes."""
        drawn = []
        for output, own in zip(self._outputs, split(slots), strict=True):
            steps, own_keys = self._steps[output.program], output.keys_of(keys)
            drawn.append(_Drawn(steps, own_keys, steps.draw(own_keys, sizes[:, 0], sizes[:, 1]), own))
        return drawn

    def _run(
        self,
        decode: Callable[[int, _Box | None], tuple[NDArray[np.uint8], tuple[int, int]]],
        outputs: Sequence[_Drawn],
        faults: list[BadSampleError | None],
        *,
        shared: bool,
    ) -> list[BadSampleError | None]:
        """Make the outputs of each image that is not bad, and return `faults` with those that are found.

        decode: returns the pixels of image i that hold a region of it, and where they begin; None asks for all pixels.
        shared: the pixels are read by several outputs, or belong to the caller, so no stage may write to them.
        """
        firsts = [output.first for output in outputs]
        for i in range(len(faults)):
            self.place = i
            if faults[i] is None:
                try:
                    for first in firsts:
                        if first is not None:
                            _check(first, i)
                    region = None if shared or firsts[0] is None else cast(_Box, tuple(firsts[0].boxes[i]))
                    image, origin = decode(i, region)
                    for output in outputs:
                        output.run(image, origin, i, shared=shared)
                except BadSampleError as fault:
                    faults[i] = fault.with_traceback(None)  # which refers to this frame, and that to all samples
        return faults


class CpuRunners:
    """A pool of runners: any thread may call its methods, and each call uses a runner that no other call uses."""

    def __init__(self, program: AnyProgram) -> None:
        self._program, self._idle = program, list[CpuRunner]()
        self._busy: dict[int, CpuRunner] = {}

    def run(
        self,
        samples: Sequence[NDArray[np.uint8]],
        keys: s.Keys,
        slots: Any,
        sizes: NDArray[np.int64] | None = None,
    ) -> list[BadSampleError | None]:
        """See `CpuRunner.run`."""
        with self._runner() as runner:
            return runner.run(samples, keys, slots, sizes)

    def run_images(self, images: Sequence[NDArray[np.uint8]], keys: s.Keys, slots: Any) -> list[BadSampleError | None]:
        """See `CpuRunner.run_images`."""
        with self._runner() as runner:
            return runner.run_images(images, keys, slots)

    @contextmanager
    def _runner(self) -> Iterator[CpuRunner]:
        """Lend a runner to this thread. A runner that raises is not used again."""
        runner, thread = self._acquire(), threading.get_ident()
        self._busy[thread] = runner
        try:
            yield runner
        finally:
            del self._busy[thread]
        self._idle.append(runner)

    def place(self, thread: int) -> int | None:
        """The number of the sample that a thread in `run` works on; None if it is not in `run`."""
        runner = self._busy.get(thread)
        return None if runner is None else runner.place

    def check(self) -> None:
        """Decode gpuflow's own test image with each idle runner, or a new one. Raises DecoderError if one fails."""
        for runner in [self._acquire() for _ in range(max(1, len(self._idle)))]:
            runner.check()
            self._idle.append(runner)

    def _acquire(self) -> CpuRunner:
        try:
            return self._idle.pop()
        except IndexError:
            return CpuRunner(self._program)

    def clear(self) -> None:
        """Free the memory of idle runners."""
        self._idle.clear()


def header_of(data: NDArray[np.uint8], decoder: s.Decoder, *, orientation: bool = False) -> Header:
    """Return a file's header, within the decoder's limits. Raises BadSampleError.

    orientation: read the EXIF orientation, also where the decoder does not apply it.
    """
    return probe(
        data,
        max_pixels=decoder.max_pixels,
        max_scans=decoder.max_scans,
        orientation=orientation or decoder.orientation == "apply",
        formats=decoder.formats,
    )


def tagged_header_of(data: NDArray[np.uint8], decoder: s.Decoder, *, tagged: bool) -> tuple[Header, int]:
    """Return a file's header, and the EXIF orientation that `decode` ignores without saying so; else 1.

    tagged: False if that is not of interest. Raises BadSampleError.
    """
    if not tagged or decoder.orientation is not None:
        return header_of(data, decoder), 1
    return header_of(data, decoder, orientation=True).untagged()


def call_opaque(step: OpaqueStep, image: NDArray[Any], seed: int) -> NDArray[Any]:
    """Run an opaque stage on one image. `step.before` and `step.after` say how the images lie in memory.

    Raises BadSampleError if the result would be larger than an image may be, and for a ValueError or a RuntimeError of
    the stage, by which torch's functions refuse an image, such as one that is too small. Other exceptions, which are
    faults of the stage or of the environment, are raised as they are.
    """
    tensor = as_batch(image[None], step.before)[0]
    try:
        size = None if step.after.fixed else step.stage.result_size(tensor, seed)
        if size is not None and math.prod(size) > step.max_pixels:
            raise too_large(step.stage.stage_name, *size, step.max_pixels)
        result = step.stage.apply(tensor, seed)
    except (ValueError, RuntimeError) as error:
        if (fault := bad_by_stage(step, error)) is None or fault is error:
            raise
        raise fault from fault.__cause__
    result = (result if step.after.layout == "nchw" else result.permute(1, 2, 0)).contiguous()
    return (result.view(torch.uint16) if STORAGE[step.after.dtype] is np.uint16 else result).numpy()


def bad_by_stage(step: OpaqueStep, error: Exception) -> BadSampleError | None:
    """Why a sample is bad for which an opaque stage raised this; None if that is a fault of something else."""
    if isinstance(error, BadSampleError):
        return error
    if isinstance(error, GpuflowError) or not isinstance(error, ValueError | RuntimeError):
        return None
    if is_system_fault(error) or _NO_MEMORY in str(error):
        return None
    fault = BadSampleError(step.stage.stage_name, reason_of(error, with_type=True))
    # without the traceback, which refers to the frames of the call, and these to all samples
    fault.__cause__ = error.with_traceback(None)
    return fault


def _size(image: NDArray[Any]) -> tuple[s.Ints, s.Ints]:
    """Height and width, each [1], of an image in HWC."""
    return np.array(image.shape[:1]), np.array(image.shape[1:2])


def _mirror(image: NDArray[np.uint8], flips: Sequence[bool], out: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Mirror an image top-bottom, left-right, or both, into `out`. At least one of the two flips must be set."""
    vertical, horizontal = flips
    cv2.flip(image, -1 if vertical and horizontal else 0 if vertical else 1, dst=out)
    return out
