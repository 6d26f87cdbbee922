"""Maps the records of some samples to the targets of their results: all columns, with every rule applied."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gpuflow.execute.mask_maps import MaskMap, mask_maps
from gpuflow.execute.masks import decode_mask, instance_mask, mask_fault
from gpuflow.pipeline import stage as s
from gpuflow.pipeline.program import Program
from gpuflow.pipeline.records import GEOMETRIC, Column, Field, MaskFile, Polygons, Ragged, Records, Rle, taken
from gpuflow.pipeline.targets import (
    MappedBoxes,
    TargetRules,
    boxes_at_fault,
    keypoints_at_fault,
    map_boxes,
    map_keypoints,
    moves_of,
)

__all__ = ["TargetMapper", "Targets"]


@dataclass(frozen=True, slots=True)
class Targets:
    """The targets of some of N samples.

    good: which samples these are. columns: a row for each of them, by name. errors [N]: None, or why a record is bad.
    """

    good: NDArray[np.int64]
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
        """The field that instances' masks and keypoints belong to."""
        return next((field for field in self.fields if field.type == "boxes"), None)

    @property
    def names(self) -> list[str]:
        """The columns of a batch."""
        return [name for field in self.fields for name in (field.name, field.labels) if name]

    def map(self, records: Records, keys: s.Keys, sizes: s.Ints) -> Targets:
        """The targets of N samples. sizes [N, 2]: height and width of their upright images."""
        errors = list(records.errors)
        for sample, reason in self._faults(records.columns, sizes):
            errors[sample] = errors[sample] or reason
        while True:  # again without those whose masks cannot be decoded
            good = np.array([i for i, error in enumerate(errors) if error is None], np.int64)
            chosen = {name: taken(column, good) for name, column in records.columns.items()}
            columns, found = self._map(chosen, keys.take(good), sizes[good])
            if not found:
                return Targets(good, columns, errors)
            for sample, reason in found.items():
                errors[good[sample]] = reason

    # --- faults that are known before anything is mapped ----------------------------------------------------------

    def _faults(self, columns: Mapping[str, Column], sizes: s.Ints) -> Iterator[tuple[int, str]]:
        first = self.boxes
        for field in self.fields:
            column = columns[field.name]
            match field.type:
                case "boxes":
                    assert isinstance(column, Ragged)
                    yield from boxes_at_fault(field.name, column, sizes)
                    if field.labels:
                        yield from _unequal(field.labels, columns[field.labels], field.name, column)
                case "keypoints":
                    assert isinstance(column, Ragged)
                    yield from keypoints_at_fault(field.name, column)
                    if first is not None:
                        yield from _unequal(field.name, column, first.name, columns[first.name])
                case "mask" if field.instances and first is not None:
                    yield from _unequal(field.name, column, first.name, columns[first.name])

    # --- mapping --------------------------------------------------------------------------------------------------

    def _map(
        self, columns: Mapping[str, Column], keys: s.Keys, sizes: s.Ints
    ) -> tuple[dict[str, Column], dict[int, str]]:
        """The targets of sound samples, and the samples whose masks turn out to be bad, and why."""
        moved = any(field.type in GEOMETRIC for field in self.fields)
        moves = moves_of(self.program, keys, sizes) if moved else ()
        mapped: dict[str, Column] = {}
        faults: dict[int, str] = {}
        owner: MappedBoxes | None = None
        for field in self.fields:
            column = columns[field.name]
            if field.type == "boxes":
                assert isinstance(column, Ragged)
                boxes = map_boxes(column, moves, sizes, self.rules)
                owner = owner or boxes
                mapped[field.name] = boxes.boxes
                if field.labels:
                    labels = columns[field.labels]
                    assert isinstance(labels, Ragged)
                    mapped[field.labels] = boxes.select(labels)
        masks: list[_Masks] = []
        if any(field.type == "mask" for field in self.fields):
            height, width, _ = self.program.result.shape
            assert height is not None and width is not None
            masks = [
                _Masks(*both, (height, width))
                for both in zip(sizes.tolist(), mask_maps(self.program, keys, sizes), strict=True)
            ]
        for field in self.fields:
            column = columns[field.name]
            if field.type == "keypoints":
                assert isinstance(column, Ragged)
                keypoints = map_keypoints(column, moves, sizes)
                mapped[field.name] = keypoints if owner is None else owner.select(keypoints)
            elif field.type == "mask":
                assert isinstance(column, list)
                made: list[NDArray[np.uint8]] = []
                for i, (value, sample) in enumerate(zip(column, masks, strict=True)):
                    try:
                        kept = None if owner is None else owner.kept_of(i)
                        made.append(sample.instances(value, kept) if field.instances else sample.levels(value))
                    except ValueError as error:
                        faults.setdefault(i, f"{field.name} {error}")
                mapped[field.name] = _joined(made, field, self.program)
            elif field.type != "boxes":
                mapped[field.name] = column
        return mapped, faults


@dataclass(frozen=True, slots=True)
class _Masks:
    """The masks of one sample: of the size of its image, through its map, to the size of the result."""

    size: Sequence[int]
    map: MaskMap
    result: tuple[int, int]

    def levels(self, mask: MaskFile) -> NDArray[np.uint8]:
        """[H, W]. Raises ValueError."""
        return self.map.apply(self._decoded(mask))

    def instances(
        self, masks: MaskFile | Sequence[Polygons | Rle], kept: NDArray[np.bool_] | None
    ) -> NDArray[np.uint8]:
        """[M, H, W] of 0 and 1, of the kept instances alone. Raises ValueError.

        An encoded image holds instance i as the level i + 1.
        """
        height, width = self.size
        if isinstance(masks, MaskFile):
            result = self.levels(masks)
            highest = int(self._decoded(masks).max(initial=0))
            if kept is not None and highest > len(kept):
                raise ValueError(f"has {highest} instances, and its image {len(kept)} boxes")
            chosen = np.arange(highest) if kept is None else np.flatnonzero(kept)
            instances: NDArray[np.uint8] = (result == (chosen + 1)[:, None, None]).astype(np.uint8)
            return instances
        for i, mask in enumerate(masks):
            if (fault := mask_fault(mask, (height, width))) is not None:
                raise ValueError(f"[{i}] {fault}")
        parts = [
            self.map.apply(instance_mask(mask, (height, width)))
            for i, mask in enumerate(masks)
            if kept is None or kept[i]
        ]
        return np.array(parts, np.uint8).reshape(-1, *self.result)

    def _decoded(self, mask: MaskFile) -> NDArray[np.uint8]:
        height, width = self.size
        return decode_mask(mask, (height, width))


def _joined(made: Sequence[NDArray[np.uint8]], field: Field, program: Program) -> Column:
    """Masks of the samples as one column."""
    height, width, _ = program.result.shape
    assert height is not None and width is not None
    empty = np.empty((0, height, width), np.uint8)
    return Ragged.of(made, empty) if field.instances else np.concatenate([empty, *(one[None] for one in made)])


def _unequal(name: str, column: Column, other: str, others: Column) -> Iterator[tuple[int, str]]:
    """Samples with another number of rows in one column than in another, and why that is a fault."""
    for i in range(len(column)):
        if isinstance(column, list) and isinstance(column[i], MaskFile):
            continue  # it is counted once it is decoded
        if len(column[i]) != len(others[i]):
            yield i, f"{name} has {len(column[i])} rows, and {other} has {len(others[i])}"
