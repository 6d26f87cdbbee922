"""Runs a program on the CPU: the reference for every other lowering.

If all steps are native, one call of C code decodes the JPEGs of a chunk and runs the steps on them; other files are
decoded in Python first, one after the other. If a step is not native, images are decoded and go through the steps one
by one. Training and serving both call this code, so on a CPU their results are equal bit for bit.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple, assert_never

import numpy as np
import torch

from gpuflow.arrays import Array, Bools, Bytes, Ints
from gpuflow.decode.chunk_files import Headers, read_headers
from gpuflow.decode.codecs import CpuDecoder, Header, probe
from gpuflow.decode.libjpeg_turbo import find_libjpeg_turbo
from gpuflow.errors import BadSampleError, GpuflowError, LoaderError, is_system_fault, reason_of
from gpuflow.execute.cpu.native_chunk import (
    DONE,
    REFUSED,
    RUNNING,
    Inputs,
    NativeSteps,
    Records,
    in_rows,
    run_chunk,
    run_records,
)
from gpuflow.native.library import NativePool
from gpuflow.pipeline import stage as s
from gpuflow.pipeline.program import (
    LocalStep,
    NativeStep,
    OpaqueStep,
    PointwiseStep,
    Program,
    Resampling,
    ResamplingStep,
    Warping,
    WarpStep,
    add_misfits,
    any_misfit,
    misfits_of,
    too_large,
)
from gpuflow.pipeline.views import STORAGE, AnyProgram, as_batch, outputs_of, programs_of, slot_shape, split
from gpuflow.runtime.threads import DaemonPool, stop_flag, use_stop_flag, use_torch_threads
from gpuflow.sources import Payload

_WORTH = 0.9
"""Only a region of a JPEG is decoded if its area is at most this fraction of the image."""
_NO_MEMORY = "can't allocate memory"
"""In the text of torch's RuntimeError for a CPU without memory."""
_END_SECONDS, _LONGEST_SECONDS = 3.0, 3600.0
"""How long threads may take to end, and at most to run the images of a chunk."""

_Faults = list[BadSampleError | None]


class _Drawn:
    """The draws of one output for N images. Draws are None for steps whose images' sizes are not known yet.

    sizes [N, 2]: heights and widths of the images. slots [N, ...]: receives the results. together: make the records
    of all steps, which are native, in place of those of each step.
    """

    def __init__(self, lowered: NativeSteps, keys: s.Keys, sizes: Ints, slots: Array, *, together: bool) -> None:
        self.lowered, self.keys, self.slots, self.draws = lowered, keys, slots, list[Any]()
        known, (height, width) = True, sizes.T
        for step in lowered.steps:
            needs_sizes = isinstance(step, ResamplingStep | WarpStep | PointwiseStep)
            draw = step.draw(keys, height, width) if known or not needs_sizes else None
            if isinstance(draw, Resampling | Warping):
                height, width = draw.size
            known = known and not isinstance(step, OpaqueStep)
            self.draws.append(draw)
        self.whole = lowered.records(self.draws) if together else None
        """Records of all steps at once, or None."""
        pairs = [] if together else zip(lowered.steps, self.draws, strict=True)
        self.each = [
            lowered.records([draw], n) if isinstance(step, NativeStep) and draw is not None else None
            for n, (step, draw) in enumerate(pairs)
        ]
        """Records of each step; None if it is not native, or its draws are not known."""

    @property
    def first(self) -> Resampling | Warping | None:
        """Return the first step's draws if it is a resampling or a warp, which leave the decoded image as it is."""
        first = self.draws[0] if self.draws else None
        return first if isinstance(first, Resampling | Warping) else None


class _Chunk(NamedTuple):
    """N images that become outputs.

    decode: returns the pixels of image i that hold its region, and where they begin. shared: the pixels are read by
    several outputs, or belong to the caller, so no stage may write to them.
    """

    decode: Callable[[CpuDecoder, int], tuple[Bytes, tuple[int, int]]]
    outputs: Sequence[_Drawn]
    inputs: Inputs
    faults: _Faults
    shared: bool

    @property
    def native_outputs(self) -> list[tuple[Records, Array]]:
        """Return the records and the slots of each output, as `run_chunk` takes them, if all its steps are native."""
        return [(output.whole, output.slots) for output in self.outputs if output.whole is not None]


class CpuRunner:
    """Decodes each image once and makes all outputs of a program from it. Any thread may call any method.

    Args:
        threads: that share the images of each call; with 0 the calling thread does all.
        count_cpu: is called with the processor seconds of these threads.
    """

    def __init__(
        self, program: AnyProgram, threads: int = 0, count_cpu: Callable[[float], None] = lambda seconds: None
    ) -> None:
        self._stage, self._outputs = program.decoder, outputs_of(program)
        self._lowered = [NativeSteps(one.steps) for one in programs_of(program)]
        self._spec = programs_of(program)[0].specs[1]
        for step in [step for one in programs_of(program) for step in one.steps if isinstance(step, OpaqueStep)]:
            step.stage.prepare()
        self._is_native = all(lowered.are_native for lowered in self._lowered)
        self._has_library = self._stage.library is None and find_libjpeg_turbo() is not None
        self._threads, self._count_cpu = threads, count_cpu
        self._lock = threading.Lock()
        self._decoders = list[CpuDecoder]()
        self._native_pool: NativePool | None = None
        self._python_pool: DaemonPool | None = None
        self._running: dict[int, Inputs] = {}

    def place(self, thread: int) -> int | None:
        """Return the number of a sample that a call on a thread works on; None if there is none."""
        inputs = self._running.get(thread)
        numbers = [] if inputs is None else np.flatnonzero(inputs.statuses == RUNNING).tolist()
        return numbers[0] if numbers else None

    def check(self) -> None:
        """Decode gpuflow's own test image with each idle decoder, or a new one. Raises DecoderError if one fails."""
        if self._stage.library is not None:
            return
        for decoder in [self._acquire_decoder() for _ in range(max(1, len(self._decoders)))]:
            decoder.check()
            self._release_decoder(decoder)

    def clear(self) -> None:
        """End the threads and free the memory. Only while no call runs; a later call starts threads again."""
        with self._lock:
            native, python = self._native_pool, self._python_pool
            self._native_pool = self._python_pool = None
            self._decoders.clear()
        if native is not None:
            native.close()
        if python is not None:
            python.end(_END_SECONDS)

    def run(self, payload: Payload, keys: s.Keys, slots: Any, sizes: Ints | None = None) -> _Faults:
        """Decode N samples and run all steps on them.

        Args:
            payload: the encoded bytes of each sample.
            keys: the samples' random keys (N = len(payload)).
            slots: receives the results, see `slots_of`.
            sizes: receives, of samples with a valid header, the upright images' heights and widths, and the EXIF
                orientation if `decode` does not say what becomes of it, else 1: [N, 3].

        Returns:
            For each sample None, or why it is bad, as it is if one of its outputs is; its slots' content is undefined.
        """
        stage = self._stage
        if stage.library is not None:
            return self._run_by_stage(payload, keys, slots)
        headers = read_headers(
            payload,
            max_pixels=stage.max_pixels,
            max_scans=stage.max_scans,
            orientation=None if stage.orientation is None and sizes is not None else stage.orientation == "apply",
            formats=stage.formats,
        )
        upright = np.maximum(headers.upright_sizes, 1)  # those of bad samples are 0
        if sizes is not None:
            sizes[:] = np.column_stack([upright, headers.tags])
        outputs, faults = self._draw(keys, upright, slots), headers.faults
        add_misfits([output.first for output in outputs], faults)
        regions, inputs = _regions(outputs, headers), Inputs(len(payload))
        if self._is_native and self._has_library:
            valid = headers.jpegs & [fault is None for fault in faults] & ~_misfit(outputs)
            inputs.set_encoded(valid, payload, headers.sizes, headers.orientations, regions)

        def decode(decoder: CpuDecoder, i: int) -> tuple[Bytes, tuple[int, int]]:
            data = payload.sample(i)
            return decoder.decode(data, header_of(data, stage), tuple(regions[i].tolist()))

        return self._run(_Chunk(decode, outputs, inputs, faults, len(outputs) > 1))

    def run_images(self, images: Sequence[Bytes], keys: s.Keys, slots: Any) -> _Faults:
        """Run all steps on N decoded images, uint8 [H_i, W_i, C], which stay as they are. The rest is as in `run`."""
        sizes = np.array([image.shape[:2] for image in images], np.int64).reshape(-1, 2)
        outputs, inputs = self._draw(keys, sizes, slots), Inputs(len(images))
        faults: _Faults = [None] * len(images)
        add_misfits([output.first for output in outputs], faults)
        if self._is_native:
            images = list(map(in_rows, images))
            for i in np.flatnonzero(~_misfit(outputs)).tolist():
                if faults[i] is None:
                    inputs.set_pixels(i, images[i], (0, 0))
        return self._run(_Chunk(lambda decoder, i: (images[i], (0, 0)), outputs, inputs, faults, shared=True))

    def _run_by_stage(self, payload: Payload, keys: s.Keys, slots: Any) -> _Faults:
        """Decode by the stage's own library, which gives images of one size."""
        outputs = self._draw(keys, np.tile(np.array(self._spec.shape[:2]), (len(payload), 1)), slots)
        faults = [None if error is None else BadSampleError("read", error) for error in payload.errors]
        return self._run(
            _Chunk(
                lambda decoder, i: (self._stage.decode(payload.sample(i)), (0, 0)),
                outputs,
                Inputs(len(payload)),
                faults,
                shared=len(outputs) > 1,
            )
        )

    def _draw(self, keys: s.Keys, sizes: Ints, slots: Any) -> list[_Drawn]:
        """Draw the parameters of each output for N images of these upright sizes."""
        pairs = zip(self._outputs, split(slots), strict=True)
        return [
            _Drawn(self._lowered[output.program], output.keys_of(keys), sizes, own, together=self._is_native)
            for output, own in pairs
        ]

    def _run(self, chunk: _Chunk) -> _Faults:
        """Make all outputs, and find faults: by one call of C code, and of other images on threads of Python meanwhile.

        What the C code refuses comes last.
        """
        thread, inputs = threading.get_ident(), chunk.inputs
        self._running[thread] = inputs
        try:
            encoded = np.asarray(inputs.rows.any(axis=1))
            futures = self._begin_each(chunk, ~encoded)
            if encoded.any():
                threads = self.native_threads()
                self._count_cpu(run_chunk(inputs, chunk.native_outputs, self._stage.color, pool=threads))
            futures += self._begin_each(chunk, encoded & (inputs.statuses == REFUSED))
            errors = [error for future in futures if (error := future.exception(_LONGEST_SECONDS)) is not None]
        finally:
            del self._running[thread]
        if errors:
            raise errors[0]
        return chunk.faults

    def _begin_each(self, chunk: _Chunk, which: Bools) -> list[Future[None]]:
        """Begin `_run_each` of some images [N] on threads of Python; or run it here, if there are none."""
        numbers = [i for i in np.flatnonzero(which).tolist() if chunk.faults[i] is None]
        if not numbers:
            return []
        if not self._threads:
            self._run_each(chunk, numbers)
            return []
        stop, pool = stop_flag(), self._python_threads()

        def run(part: Sequence[int]) -> None:
            use_stop_flag(stop)
            begun = time.thread_time()
            self._run_each(chunk, part)
            self._count_cpu(time.thread_time() - begun)

        parts = (numbers[first :: self._threads] for first in range(min(self._threads, len(numbers))))
        return [pool.submit(run, part) for part in parts]

    def native_threads(self) -> NativePool | None:
        """Return the threads of C code, also for other work; None with 0 threads."""
        if not self._threads:
            return None
        with self._lock:
            self._native_pool = self._native_pool or NativePool(self._threads)
            return self._native_pool

    def _python_threads(self) -> DaemonPool:
        with self._lock:
            self._python_pool = self._python_pool or DaemonPool(self._threads, "python", lambda: use_torch_threads(1))
            return self._python_pool

    def _acquire_decoder(self) -> CpuDecoder:
        try:
            return self._decoders.pop()
        except IndexError:
            return CpuDecoder(self._stage.color, background=self._stage.background)

    def _release_decoder(self, decoder: CpuDecoder) -> None:
        """Use a decoder again, and libjpeg-turbo no more if it has failed on gpuflow's own test image."""
        self._has_library = self._has_library and decoder.library is not None
        self._decoders.append(decoder)

    def _run_each(self, chunk: _Chunk, numbers: Sequence[int]) -> None:
        """Make the outputs of these images one after the other, and add their faults. A decoder that raises is lost."""
        decoder, statuses = self._acquire_decoder(), chunk.inputs.statuses
        inputs = Inputs(len(statuses))  # C code may read the chunk's at the same time
        for i in numbers:
            if stop_flag():
                raise LoaderError("the epoch was ended")
            statuses[i] = RUNNING
            try:
                image, origin = chunk.decode(decoder, i)
                if self._is_native:
                    for output in chunk.outputs:
                        _check(output.draws, i)
                    image = in_rows(image)
                    inputs.set_pixels(i, image, origin)
                    run_chunk(inputs, chunk.native_outputs, self._stage.color, only=i)
                else:
                    for output in chunk.outputs:
                        is_copied = chunk.shared and output.first is None  # a stage may write to what it gets
                        self._run_steps(np.array(image, order="C") if is_copied else image, origin, i, output)
            except BadSampleError as fault:
                chunk.faults[i] = fault.with_traceback(None)  # which refers to this frame, and that to all samples
            statuses[i] = DONE
        self._release_decoder(decoder)

    def _run_steps(self, image: Array, origin: tuple[int, int], i: int, output: _Drawn) -> None:
        """Run all steps on the region of upright image i that begins at (top, left) = origin. Raises BadSampleError."""
        slot, steps = output.slots[i], output.lowered.steps
        for n, (step, draw) in enumerate(zip(steps, output.draws, strict=True)):
            row, records, out = i, output.each[n], slot if n == len(steps) - 1 else None
            if draw is None:
                draw, row = step.draw(output.keys[i], *np.array(image.shape[:2])[:, None]), 0
                records = output.lowered.records([draw], n)
            _check([draw], row)
            match step:
                case ResamplingStep() | WarpStep() | PointwiseStep() | LocalStep():
                    assert records is not None
                    image = run_records(records, row, image, _room_for(step, draw, row, image, out), origin)
                case OpaqueStep():
                    image = call_opaque(step, image, int(draw[row]))
                case _:
                    assert_never(step)
            origin = (0, 0)
        if image is not slot:
            np.copyto(slot, image.reshape(slot.shape))


def run_files(program: Program, files: Sequence[bytes | Bytes]) -> tuple[torch.Tensor, _Faults]:
    """Return the images [N, C, H, W] of encoded files with the random keys of epoch 0, and None or the fault of each.

    The image of a file with a fault is undefined.
    """
    slots = np.zeros((len(files), *slot_shape(program.result)), STORAGE[program.result.dtype])
    faults = CpuRunner(program).run(Payload.of(files), s.Keys(0, 0, np.arange(len(files))), slots)
    return as_batch(slots, program.result), faults


def _misfit(outputs: Sequence[_Drawn]) -> Bools:
    """Return which images a step cannot be run on, [N]."""
    return any_misfit([draw for output in outputs for draw in output.draws], len(outputs[0].slots))


def _check(draws: Sequence[Any], i: int) -> None:
    """Raise BadSampleError if one of these draws cannot be run on sample i."""
    for misfit in misfits_of(draws):
        if (fault := misfit.fault(i)) is not None:
            raise fault


def _regions(outputs: Sequence[_Drawn], headers: Headers) -> Ints:
    """Return y, x, height, width of what all outputs need of the images as stored, [N, 4].

    Images that EXIF data turn, and those of which most is needed, are decoded whole.
    """
    whole: Ints = np.concatenate([np.zeros_like(headers.sizes), headers.sizes], axis=1)
    boxes = [output.first.box for output in outputs if output.first is not None]
    if len(boxes) < len(outputs):
        return whole
    begins, ends = union_of(boxes)
    sides = ends - begins
    small = (sides.prod(axis=1) <= _WORTH * headers.sizes.prod(axis=1)) & (headers.orientations == 1)
    return np.asarray(np.where(small[:, None], np.concatenate([begins, sides], axis=1), whole), np.int64)


def union_of(boxes: Sequence[Ints]) -> tuple[Ints, Ints]:
    """Return where the smallest box around several begins and ends, [N, 2] each. boxes [N, 4]: as `Resampling.box`."""
    begins, ends = boxes[0][:, :2], boxes[0][:, :2] + boxes[0][:, 2:]
    for box in boxes[1:]:
        begins, ends = np.minimum(begins, box[:, :2]), np.maximum(ends, box[:, :2] + box[:, 2:])
    return begins, ends


def _room_for(step: NativeStep, draw: Any, row: int, image: Array, out: Array | None) -> Array:
    """Return `out`, or memory for the result of a native step."""
    if out is not None:
        return out
    height, width, channels = image.shape
    if isinstance(step, ResamplingStep | WarpStep):
        height, width = (int(side[row]) for side in draw.size)
    elif isinstance(step, PointwiseStep) and (table := step.table) is not None:
        shape = (channels, height, width) if step.after.layout == "nchw" else image.shape
        return np.empty(shape, table.dtype)
    return np.empty((height, width, channels), np.uint8)


def header_of(data: Bytes, decoder: s.Decoder, *, orientation: bool = False) -> Header:
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


def call_opaque(step: OpaqueStep, image: Array, seed: int) -> Array:
    """Run an opaque stage on one image. `step.before` and `step.after` say how the images lie in memory.

    Raises BadSampleError if the result would be larger than an image may be, and for a ValueError or a RuntimeError of
    the stage, by which torch's functions refuse an image, such as one that is too small. Other exceptions, which are
    faults of the stage or of the environment, are raised as they are. Raises LoaderError as `require_declared`.
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
    require_declared(step, result)
    result = (result if step.after.layout == "nchw" else result.permute(1, 2, 0)).contiguous()
    return (result.view(torch.uint16) if STORAGE[step.after.dtype] is np.uint16 else result).numpy()


def require_declared(step: OpaqueStep, result: Any, *count: int) -> None:
    """Raise LoaderError unless an opaque stage returned an image of its output's spec, or a batch of `count` images.

    Nothing else compares them: what reads the images takes their size and type from the spec.
    """
    height, width, channels = step.after.shape
    sides = (*count, channels, height, width)
    got = type(result).__name__
    if isinstance(result, torch.Tensor):
        found = result.shape
        equal = len(found) == len(sides) and all(b in (None, a) for a, b in zip(found, sides, strict=True))
        if equal and result.dtype == getattr(torch, step.after.dtype):
            return
        got = f"{str(result.dtype).removeprefix('torch.')} {[*found[-3:]]}"
    wanted = [name if side is None else side for side, name in zip(sides[-3:], "CHW", strict=True)]
    rule = f"must return {step.after.dtype} [{', '.join(map(str, wanted))}], as its output says"
    name = f"{step.stage.stage_name}: {type(step.stage).__name__}.apply"
    raise LoaderError(f"{name} {rule}, got {got}; return that, or override output")


def bad_by_stage(step: OpaqueStep, error: Exception) -> BadSampleError | None:
    """Return why a sample is bad for which an opaque stage raised this; None if something else is at fault."""
    if isinstance(error, BadSampleError):
        return error
    if isinstance(error, GpuflowError | NotImplementedError) or not isinstance(error, ValueError | RuntimeError):
        return None
    if is_system_fault(error) or _NO_MEMORY in str(error):
        return None
    fault = BadSampleError(step.stage.stage_name, reason_of(error, with_type=True))
    # without the traceback, which refers to the frames of the call, and these to all samples
    fault.__cause__ = error.with_traceback(None)
    return fault
