"""Runs the steps of programs on a chunk of samples by one call of the C library, which does not hold the interpreter.

`NativeSteps` turns the steps' draws into records of fixed size; native/chunk.c, whose structures these are, runs them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, assert_never

import numpy as np

from gpuflow.arrays import Array, Bools, Bytes, Ints
from gpuflow.errors import LoaderError
from gpuflow.execute.packing import table_of
from gpuflow.execute.warp import BORDERS
from gpuflow.native.library import INTEGER, POINTER, NativePool, function, using
from gpuflow.pipeline import stage as s
from gpuflow.pipeline.pointwise import Filters, Operations
from gpuflow.pipeline.program import (
    LocalStep,
    NativeStep,
    PointwiseStep,
    Resampling,
    ResamplingStep,
    Step,
    Warping,
    WarpStep,
)
from gpuflow.runtime.threads import stop_flag
from gpuflow.sources import Payload

_run_chunk = function("gpuflow_run_chunk", POINTER, INTEGER, INTEGER)
DONE, NO_MEMORY, STOPPED, REFUSED, RUNNING = range(5)
"""What becomes of a sample. REFUSED: libjpeg-turbo did not decode it, or C code was not asked to."""
_RESAMPLE, _OPERATE, _LOOK_UP, _WARP, _FILTER = range(5)
"""The kinds of steps."""
_INTERPOLATIONS = {"nearest": 0, "bilinear": 1, "bicubic": 2}
_COLORS = {"rgb": 0, "bgr": 1, "gray": 2}
_HEIGHT, _WIDTH, _COLUMNS = 2, 3, 10
"""Of `struct input`."""
_UPRIGHT = 1
_WARPING, _FILTER_NUMBERS = 19, 7
"""Numbers of `struct warping` and `struct local_filter`."""


class Inputs:
    """The images of N samples, encoded or not. Samples that nothing is set for are left out.

    rows [N, 10]: see `struct input`. statuses [N]: what became of the samples, REFUSED at first. Callers keep the
    memory of the images.
    """

    def __init__(self, count: int) -> None:
        self.rows = np.zeros((count, _COLUMNS), np.int64)
        self.statuses = np.full(count, REFUSED)

    def set_encoded(self, which: Bools, payload: Payload, sizes: Ints, orientations: Array, regions: Ints) -> None:
        """Set JPEGs of a payload.

        Args:
            which: which of the N samples they are.
            sizes, orientations: heights and widths as stored, and EXIF orientations to apply: [N, 2], [N].
            regions: y, x, height, width of what is decoded of the image as stored: [N, 4].
        """
        offsets, lengths = (np.asarray(x, np.int64) for x in (payload.offsets, payload.sizes))
        addresses, channels = offsets + _address_of(payload.buffer), 0  # the file says how many
        table = table_of(len(which), [addresses, lengths, sizes, channels, orientations, regions])
        self.rows[which] = table[which]

    def set_pixels(self, i: int, image: Bytes, origin: tuple[int, int]) -> None:
        """Set the region of an image that begins at (top, left) = origin: see `in_rows`."""
        self.rows[i] = (_address_of(image), image.strides[0], *image.shape, _UPRIGHT, *origin, *image.shape[:2])


def in_rows(image: Bytes) -> Bytes:
    """Return an image [H, W, C] as one whose rows are contiguous: itself if they are."""
    _, width, channels = image.shape
    has_rows = image.strides[1:] == (channels, 1) and image.strides[0] >= width * channels
    return image if has_rows else np.ascontiguousarray(image)


class NativeSteps:
    """The steps of a program, and what those that are native have in common for all chunks."""

    def __init__(self, steps: Sequence[Step]) -> None:
        self.steps = steps
        self.are_native = all(isinstance(step, NativeStep) for step in steps)
        self._tables = [_table_of(step) for step in steps]

    def records(self, draws: Sequence[Any], first: int = 0) -> Records:
        """Return the records of some steps, which must be native.

        draws: for each step from number `first` on, as many as there are draws, what its `draw` returned.
        """
        records = Records()
        for n, draw in enumerate(draws, first):
            step, table = self.steps[n], self._tables[n]
            assert isinstance(step, NativeStep)
            match step:
                case ResamplingStep():
                    records.add_resampling(draw)
                case WarpStep():
                    records.add_warping(draw)
                case LocalStep():
                    records.add_filters(draw)
                case PointwiseStep():
                    records.add_operations(draw)
                case _:
                    assert_never(step)
            if table is not None:
                records.add_table(*table)
        return records


def _table_of(step: Step) -> tuple[Array, bool] | None:
    """Return the table of levels of a step that has one, and whether its result has the layout of planes."""
    if not isinstance(step, PointwiseStep) or (table := step.table) is None:
        return None
    return np.ascontiguousarray(table), step.after.layout == "nchw"


class Records:
    """Native steps as records of fixed size: see `struct step`. Keeps the memory that they refer to."""

    def __init__(self) -> None:
        self._held: list[Array] = []
        self._rows: list[tuple[int, int, int]] = []

    @cached_property
    def place(self) -> tuple[int, int]:
        """Give the records memory, and return its address and their number. No record may be added any more."""
        return self._hold(self._rows), len(self._rows)

    def _hold(self, values: Any, dtype: Any = np.int64) -> int:
        """Keep values in memory, and return their address."""
        self._held.append(np.ascontiguousarray(values, dtype))
        return _address_of(self._held[-1])

    def add_resampling(self, draw: Resampling) -> None:
        parts = (draw.box, draw.mirrors, draw.grid, draw.shown, draw.window, draw.flips)
        rows = np.concatenate(parts, axis=1, dtype=np.int64, casting="unsafe")
        numbers = [_INTERPOLATIONS[draw.interpolation], draw.antialias, _levels(draw.fill)]
        self._rows.append((_RESAMPLE, self._hold(rows), self._hold(numbers)))

    def add_warping(self, draw: Warping) -> None:
        rows = np.empty((len(draw.box), _WARPING), np.int64)
        rows[:, :9] = np.ascontiguousarray(draw.matrix, np.float64).reshape(-1, 9).view(np.int64)
        rows[:, 9:] = np.column_stack([draw.box, *draw.size, draw.shown])
        lookup = draw.lookup
        numbers = [lookup.interpolation == "bilinear", BORDERS[lookup.border], lookup.as_torchvision]
        self._rows.append((_WARP, self._hold(rows), self._hold([*numbers, _levels(lookup.fill)])))

    def add_filters(self, draw: s.Filters) -> None:
        rows = np.empty((len(draw.active), _FILTER_NUMBERS), np.int64)
        for column, weights in enumerate((draw.rows, draw.columns)):
            taps = weights.shape[1]
            first = self._hold(weights, np.float64)
            rows[:, column] = first + np.arange(len(rows)) * (8 * taps)
            rows[:, column + 2] = taps
        rows[~draw.active, 0] = 0
        rows[:, 4], rows[:, 5] = (numbers.astype(np.float64).view(np.int64) for numbers in (draw.centre, draw.factor))
        rows[:, 6] = draw.border == "keep"
        self._rows.append((_FILTER, self._hold(rows), 0))

    def add_operations(self, operations: s.Operations) -> None:
        if not operations.kinds:
            return
        codes, factors = self._hold(operations.codes), self._hold(operations.factors, np.float64)
        tables, values = self._hold(operations.tables, np.uint8), self._hold(operations.values, np.float64)
        fields = [codes, factors, operations.codes.shape[1], tables, values]
        self._rows.append((_OPERATE, self._hold(fields), 0))

    def add_table(self, table: Array, planes: bool) -> None:
        fields = [self._hold(table, table.dtype), table.itemsize, planes]
        self._rows.append((_LOOK_UP, self._hold(fields), 0))


def _levels(fill: Sequence[float]) -> int:
    """Return levels, one for each channel or one for all, as the bytes of a number."""
    levels = np.zeros(8, np.uint8)
    levels[:3] = np.asarray(fill).astype(np.uint8)
    return int(levels.view(np.int64)[0])


def run_chunk(
    inputs: Inputs,
    outputs: Sequence[tuple[Records, Array]],
    color: str,
    *,
    only: int | None = None,
    pool: NativePool | None = None,
) -> float:
    """Make the outputs of the inputs, or of one input alone, and write their statuses.

    Args:
        outputs: for each the records of its steps, and the slots [N, ...] that receive the results.
        color: of decoded images.
        pool: whose threads do that; by default the calling thread does.

    Returns:
        The processor seconds of the pool's threads.

    Raises:
        MemoryError: there is not enough memory for a sample. LoaderError: this thread's `stop_flag` was set.
    """
    rows = np.array([(*records.place, _address_of(slots), slots.strides[0]) for records, slots in outputs], np.int64)
    fields = [_address_of(inputs.rows), _address_of(rows), len(outputs), _COLORS[color]]
    with using(pool) as threads:
        chunk = np.array([*fields, _address_of(inputs.statuses), stop_flag().address, threads, 0], np.int64)
        _run_chunk(_address_of(chunk), len(inputs.rows), -1 if only is None else only)
    statuses = inputs.statuses if only is None else inputs.statuses[only : only + 1]
    if (statuses == NO_MEMORY).any():
        number = int(np.argmax(inputs.statuses == NO_MEMORY))
        height, width = inputs.rows[number, _HEIGHT : _WIDTH + 1].tolist()
        raise MemoryError(f"not enough memory for an image of {width}x{height} pixels")
    if (statuses == STOPPED).any():
        raise LoaderError("the epoch was ended")
    return float(chunk[-1]) * 1e-9


def run_records(records: Records, i: int, image: Bytes, out: Array, origin: tuple[int, int] = (0, 0)) -> Array:
    """Run sample i's steps on the region of its image that begins at (top, left) = origin: [H, W, C].

    Returns `out`, which receives the result. Raises what `run_chunk` raises.
    """
    inputs, image = Inputs(i + 1), in_rows(image)
    inputs.set_pixels(i, image, origin)
    slots = np.broadcast_to(out, (i + 1, *out.shape))
    run_chunk(inputs, [(records, slots)], "rgb", only=i)  # the color is for encoded images
    return out


def _address_of(array: Array) -> int:
    """Return the address of an array's memory, in a quarter of the time that `ctypes.data` takes."""
    address: int = array.__array_interface__["data"][0]
    return address


def run_pointwise(image: Bytes, operations: Operations, i: int, table: Array | None, *, planes: bool) -> Array:
    """Run sample i's operations on its image [H, W, C], then look levels up in a table, if there is one.

    Args:
        image: is not changed. C is 1, or 3: red, green, blue.
        operations: of all samples.
        table: [C, 256] in the result's dtype.
        planes: the result of the table is [C, H, W], and [H, W, C] otherwise.
    """
    records, shape = Records(), image.shape
    records.add_operations(operations)
    if table is None:
        return run_records(records, i, image, np.empty(shape, np.uint8))
    records.add_table(table, planes)
    return run_records(records, i, image, np.empty((shape[2], *shape[:2]) if planes else shape, table.dtype))


def run_filters(image: Bytes, filters: Filters, i: int) -> Bytes:
    """Return sample i's result for its image [H, W, C], which is not changed."""
    records = Records()
    records.add_filters(filters)
    return run_records(records, i, image, np.empty(image.shape, np.uint8))
