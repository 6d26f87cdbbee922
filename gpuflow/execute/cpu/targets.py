"""Maps records of samples to the targets of a batch: boxes, masks and keypoints, and which of them are kept."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, assert_never

import cv2
import numpy as np

from gpuflow.arrays import Bools, Bytes, Ints
from gpuflow.execute.cpu.masks import Instance, MaskMap, decode_mask, draw_instance, mask_fault, mask_maps
from gpuflow.pipeline import stage as s
from gpuflow.pipeline.program import Program
from gpuflow.pipeline.records import GEOMETRIC, Column, Field, MaskFile, Ragged, Records, taken
from gpuflow.pipeline.targets import (
    MappedBoxes,
    TargetRules,
    boxes_at_fault,
    keypoints_at_fault,
    map_boxes,
    map_keypoints,
    moves_of,
    sizes_at_fault,
)

_BITS = 8
"""Of a pixel of a mask."""


class Targets(NamedTuple):
    """The targets of some of N samples.

    good: which samples these are. columns: a row for each of them, by name. errors [N]: None, or why a record is bad.
    """

    good: Ints
    columns: Mapping[str, Column]
    errors: Sequence[str | None]


@dataclass(frozen=True, slots=True)
class TargetMapper:
    """Maps records of `fields` through a program. Any thread may call `map`.

    Masks of instances and keypoints belong to the first field of boxes, if there is one: a row for each of its boxes.
    Masks become uint8: [N, H, W], or with instances a `Ragged` of [M, H, W]. Their size is that of the result.
    """

    program: Program
    fields: tuple[Field, ...]
    rules: TargetRules

    @property
    def boxes(self) -> Field | None:
        """Return the field that instances' masks and keypoints belong to."""
        return next((field for field in self.fields if field.type == "boxes"), None)

    @property
    def names(self) -> list[str]:
        """Return the names of the columns of a batch."""
        return [name for field in self.fields for name in (field.name, field.labels) if name]

    @property
    def upright(self) -> bool:
        """Return True if `decode` applies orientations."""
        return self.program.decoder.orientation == "apply"

    @property
    def leaves_orientation_open(self) -> bool:
        """Return True if fields have coordinates or masks, and `decode` does not say what EXIF orientations mean."""
        return self.program.decoder.orientation is None and any(field.type in GEOMETRIC for field in self.fields)

    def map(self, records: Records, keys: s.Keys, sizes: Ints) -> Targets:
        """Map the records of N samples to targets. sizes [N, 2]: height and width of their upright images."""
        errors = self._errors(records, sizes)
        while True:  # again without those whose masks cannot be decoded
            good = np.array([i for i, error in enumerate(errors) if error is None], np.int64)
            chosen = {name: taken(column, good) for name, column in records.columns.items()}
            columns, found = self._map(chosen, keys.take(good), sizes[good])
            if not found:
                return Targets(good, columns, errors)
            for sample, reason in found.items():
                errors[good[sample]] = reason

    def check(self, records: Records, sizes: Ints) -> list[str | None]:
        """Return for each of N samples None, or why its record is bad, as `map` does. sizes [N, 2]: as in `map`."""
        errors = self._errors(records, sizes)
        boxes = None if self.boxes is None else records.columns[self.boxes.name]
        for field in self.fields:
            for i, size in enumerate(sizes.tolist()) if field.type == "mask" else ():
                if errors[i] is None:
                    try:
                        rows = None if boxes is None or not field.instances else len(boxes[i])
                        mask = records.columns[field.name][i]
                        _check_masks(mask, (size[0], size[1]), rows, field.formats, upright=self.upright)
                    except ValueError as error:
                        errors[i] = f"{field.name} {error}"
        return errors

    # --- faults that are known before anything is mapped ----------------------------------------------------------

    def _errors(self, records: Records, sizes: Ints) -> list[str | None]:
        errors = list(records.errors)
        for sample, reason in self._faults(records, sizes):
            errors[sample] = errors[sample] or reason
        return errors

    def _faults(self, records: Records, sizes: Ints) -> Iterator[tuple[int, str]]:
        columns, first = records.columns, self.boxes
        if records.sizes is not None and any(field.type in GEOMETRIC for field in self.fields):
            yield from sizes_at_fault(records.sizes, sizes, upright=self.upright)
        for field in self.fields:
            column = columns[field.name]
            if field.type == "boxes":
                assert isinstance(column, Ragged)
                yield from boxes_at_fault(field.name, column, sizes)
                if field.labels:
                    yield from _unequal(field.labels, columns[field.labels], field.name, column)
            if field.type == "keypoints":
                assert isinstance(column, Ragged)
                yield from keypoints_at_fault(field.name, column, field.flip_pairs)
            if first is not None and (field.type == "keypoints" or field.instances):
                yield from _unequal(field.name, column, first.name, columns[first.name])

    # --- mapping --------------------------------------------------------------------------------------------------

    def _map(
        self, columns: Mapping[str, Column], keys: s.Keys, sizes: Ints
    ) -> tuple[dict[str, Column], dict[int, str]]:
        """Return the targets of sound samples, and the samples whose masks turn out to be bad, and why."""
        moved = any(field.type in GEOMETRIC for field in self.fields)
        moves = moves_of(self.program, keys, sizes) if moved else ()
        masks = self._masks(keys, sizes)
        mapped: dict[str, Column] = {}
        faults: dict[int, str] = {}
        owner: MappedBoxes | None = None
        for field in sorted(self.fields, key=lambda field: field.type != "boxes"):  # what belongs to boxes after them
            column = columns[field.name]
            match field.type:
                case "boxes":
                    assert isinstance(column, Ragged)
                    boxes = map_boxes(column, moves, sizes, self.rules)
                    owner = owner or boxes
                    mapped[field.name] = boxes.boxes
                    if field.labels:
                        labels = columns[field.labels]
                        assert isinstance(labels, Ragged)
                        mapped[field.labels] = boxes.select(labels)
                case "keypoints":
                    assert isinstance(column, Ragged)
                    keypoints = map_keypoints(column, moves, sizes, field.flip_pairs)
                    mapped[field.name] = keypoints if owner is None else owner.select(keypoints)
                case "mask":
                    assert isinstance(column, list)
                    mapped[field.name] = self._mapped_masks(field, column, masks, owner, faults)
                case "number" | "text" | "any":
                    mapped[field.name] = column
                case unknown:
                    assert_never(unknown)
        return mapped, faults

    def _masks(self, keys: s.Keys, sizes: Ints) -> Sequence[_Masks]:
        """Return what maps the masks of each sample; empty if no field has masks."""
        if all(field.type != "mask" for field in self.fields):
            return ()
        result, maps = _result_size(self.program), mask_maps(self.program, keys, sizes)
        return [_Masks(*both, result, self.upright) for both in zip(sizes.tolist(), maps, strict=True)]

    def _mapped_masks(
        self,
        field: Field,
        column: Sequence[Any],
        masks: Sequence[_Masks],
        owner: MappedBoxes | None,
        faults: dict[int, str],
    ) -> Column:
        """Map one field of masks. Adds the samples whose masks are bad, and why, to `faults`."""
        kept = [None if owner is None else owner.kept_of(i) for i in range(len(column))]
        made: list[Bytes] = []
        room = _room(column, kept, self.program) if field.instances else None
        for i, (value, sample) in enumerate(zip(column, masks, strict=True)):
            try:
                if not field.instances:
                    made.append(sample.levels(value, field.formats, field.fill))
                elif isinstance(value, MaskFile):
                    made.append(sample.levels_of_instances(value, field.formats, kept[i]))
                else:
                    made.append(sample.instances(value, kept[i], None if room is None else room[i]))
            except ValueError as error:
                faults.setdefault(i, f"{field.name} {error}")
        return room if room is not None else _joined(made, field, self.program)


class _Masks(NamedTuple):
    """The masks of one sample: of the size of its image, through its map, to the size of the result.

    upright: whether `decode` applies orientations.
    """

    size: Sequence[int]
    map: MaskMap
    result: tuple[int, int]
    upright: bool

    def levels(self, mask: MaskFile | Bytes, formats: Sequence[str], fill: int = 0) -> Bytes:
        """Return levels [H, W]. formats: see `Field`. fill: the level outside the image. Raises ValueError."""
        return self.map.apply(self._decoded(mask, formats), fill)

    def levels_of_instances(self, mask: MaskFile, formats: Sequence[str], kept: Bools | None) -> Bytes:
        """Return the kept instances, [M, H, W] of 0 and 1; instance i is the level i + 1. Raises ValueError."""
        decoded = self._decoded(mask, formats)
        highest = _highest_level(decoded, None if kept is None else len(kept))
        levels = 1 + (np.arange(highest) if kept is None else np.flatnonzero(kept))
        instances: Bytes = (self.map.apply(decoded) == levels[:, None, None]).astype(np.uint8)
        return instances

    def instances(self, masks: Sequence[Instance], kept: Bools | None, out: Bytes | None) -> Bytes:
        """Return the kept instances, [M, H, W] of 0 and 1, in `out` if that is given. Raises ValueError."""
        height, width = self.size
        _check_masks(masks, (height, width))
        chosen = [mask for i, mask in enumerate(masks) if kept is None or kept[i]]
        result = np.empty((len(chosen), *self.result), np.uint8) if out is None else out
        for first in range(0, len(chosen), _BITS):  # moves this many instances at once, a bit each
            down = np.zeros((width, height), np.uint8)
            for bit, mask in enumerate(chosen[first : first + _BITS]):
                draw_instance(mask, bit, down)
            moved = self.map.apply(np.asarray(cv2.transpose(down), np.uint8))
            for bit, target in enumerate(result[first : first + _BITS]):
                np.right_shift(moved, bit, out=target)
                target &= 1
        return result

    def _decoded(self, mask: MaskFile | Bytes, formats: Sequence[str]) -> Bytes:
        height, width = self.size
        return decode_mask(mask, (height, width), formats, upright=self.upright)


def _check_masks(
    masks: Any,
    size: tuple[int, int],
    rows: int | None = None,
    formats: Sequence[str] = (),
    *,
    upright: bool = False,
) -> None:
    """Raise ValueError unless a mask, or each of those of instances, belongs to an image of this size.

    rows: how many boxes the image has, if the levels of a mask are its instances. formats, upright: as `decode_mask`
    has them.
    """
    if isinstance(masks, list | tuple):
        for i, mask in enumerate(masks):
            if (fault := mask_fault(mask, size)) is not None:
                raise ValueError(f"[{i}] {fault}")
    else:
        _highest_level(decode_mask(masks, size, formats, upright=upright), rows)


def _highest_level(levels: Bytes, rows: int | None) -> int:
    """Return how many instances a mask has by its levels. Raises ValueError if these are more than `rows`."""
    highest = int(levels.max(initial=0))
    if rows is not None and highest > rows:
        raise ValueError(f"has {highest} instances, and its image {rows} boxes")
    return highest


def _result_size(program: Program) -> tuple[int, int]:
    height, width, _ = program.result.shape
    assert height is not None and width is not None
    return height, width


def _room(column: Sequence[Any], kept: Sequence[Bools | None], program: Program) -> Ragged | None:
    """Allocate memory for the masks of all instances. Return None if their number is not known yet."""
    if any(isinstance(value, MaskFile) for value in column):
        return None
    counts = [len(value) if one is None else int(one.sum()) for value, one in zip(column, kept, strict=True)]
    offsets = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
    return Ragged(np.empty((int(offsets[-1]), *_result_size(program)), np.uint8), offsets)


def _joined(made: Sequence[Bytes], field: Field, program: Program) -> Column:
    """Join masks of the samples to one column."""
    empty = np.empty((0, *_result_size(program)), np.uint8)
    return Ragged.of(made, empty) if field.instances else np.concatenate([empty, *(one[None] for one in made)])


def _unequal(name: str, column: Column, other: str, others: Column) -> Iterator[tuple[int, str]]:
    """Yield samples with another number of rows in one column than in another, and why that is a fault."""
    for i in range(len(column)):
        if isinstance(column, list) and isinstance(column[i], MaskFile):
            continue  # it is counted once it is decoded
        if len(column[i]) != len(others[i]):
            yield i, f"{name} has {len(column[i])} rows, and {other} has {len(others[i])}"
