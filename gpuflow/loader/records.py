"""Makes the fields of a batch: maps the records of its samples chunk by chunk, joins them, and packs them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np
import torch

from gpuflow.arrays import Array, Ints
from gpuflow.config import Config
from gpuflow.errors import BadSampleError, ConfigError
from gpuflow.execute import packing
from gpuflow.execute.cpu.targets import TargetMapper
from gpuflow.loader.batch import Assembly, RaggedTensor
from gpuflow.pipeline.records import Column, Field, Ragged, Records, taken
from gpuflow.pipeline.stage import Keys
from gpuflow.pipeline.targets import carry_problem, views_carry_problem
from gpuflow.pipeline.views import ViewsProgram
from gpuflow.runtime.memory import SlotPool, heap
from gpuflow.sources import Source, records_of

_LARGE = 2**20
"""Bytes from which on a block is used again: such memory is mapped anew each time, which takes as long as filling it.
A small block is no larger than what it holds, for a loop may keep the boxes of an epoch."""


def target_mapper(config: Config, name: str, fields: tuple[Field, ...]) -> TargetMapper | None:
    """Return what maps these fields of records through a pipeline of a configuration; None if there are none.

    Raises ConfigError, with the stage's place, if a stage cannot carry a field.
    """
    if not fields:
        return None
    program, rules = config.any_program(name), config.pipelines[name].targets.rules
    if isinstance(program, ViewsProgram):
        problem, program = views_carry_problem(fields), program.programs[0]
    else:
        at = ("stages",) if config.pipelines[name].preset is None else ()  # a preset is not in the list
        problem = carry_problem(program, fields, at)
    if problem is not None:
        raise ConfigError([replace(problem, place=f"{config.path}:", path=("pipelines", name, *problem.path))])
    return TargetMapper(program, fields, rules)


@dataclass(frozen=True, slots=True)
class RecordMapper:
    """Reads and maps the records of one loader, on any thread."""

    source: Source
    mapper: TargetMapper
    turned: TurnedImages | None = None

    def add(
        self,
        batch: Assembly,
        start: int,
        indices: Sequence[int],
        keys: Keys,
        sizes: Ints,
        faults: list[BadSampleError | None],
        records: Records | None = None,
    ) -> None:
        """Map the records of n samples, rows [start, start + n) of a batch, and add them to it.

        sizes [n, 3]: as `CpuRunner.run` has them. faults [n]: why samples are bad; gets the bad records, too.
        records: of the n samples, if they are read already.
        """
        sound = np.array([i for i, fault in enumerate(faults) if fault is None], np.int64)
        if not len(sound):
            return
        if records is None:
            records = records_of(self.source, [indices[i] for i in sound.tolist()])
        else:
            records = records.take(sound)
        if self.turned is not None:
            for i in sound[sizes[sound, 2] != 1].tolist():
                self.turned.add(indices[i], int(sizes[i, 2]))
        targets = self.mapper.map(records, keys.take(sound), sizes[sound, :2])
        for i, error in zip(sound.tolist(), targets.errors, strict=True):
            if error is not None:
                faults[i] = BadSampleError("record", error)
        if len(targets.good):
            with batch.lock:
                batch.pieces.append((start + sound[targets.good], targets.columns))

    def join(self, batch: Assembly) -> dict[str, Column]:
        """Return the columns of a whole batch, with a row for each sample that was kept, in the batch's order."""
        pieces, batch.pieces = sorted(batch.pieces, key=lambda piece: int(piece[0][0])), []
        place = np.full(len(batch.positions), -1, np.int64)
        if not pieces:
            return {}
        rows = np.concatenate([rows for rows, _ in pieces])
        place[rows] = np.arange(len(rows))
        order = place[batch.kept]
        return {name: _ordered([columns[name] for _, columns in pieces], order) for name in self.mapper.names}


def _ordered(parts: Sequence[Any], order: Ints) -> Column:
    """Join the parts of a column, and return these of its rows, in this order."""
    whole = parts[0] if len(parts) == 1 else _joined(parts)
    return whole if np.array_equal(order, np.arange(len(whole))) else taken(whole, order)


def _joined(parts: Sequence[Any]) -> Column:
    """Return the parts of a column one after the other."""
    if isinstance(parts[0], Ragged):
        counts = np.concatenate([np.diff(part.offsets) for part in parts])
        return Ragged(np.concatenate([part.values for part in parts]), np.concatenate([[0], np.cumsum(counts)]))
    return [*chain(*parts)] if isinstance(parts[0], list) else np.concatenate(parts)


def to_tensors(
    columns: Mapping[str, Column], send: Callable[[Sequence[Array]], Sequence[torch.Tensor]]
) -> dict[str, Any]:
    """Return columns as the values of a batch: tensors, `RaggedTensor`s and lists.

    send: turns arrays into tensors, in one block of memory.
    """
    arrays: list[Array] = []
    for column in columns.values():
        if isinstance(column, Ragged):
            arrays += [column.values, column.offsets]
        elif not isinstance(column, list):
            arrays.append(column)
    tensors = iter(send(arrays) if arrays else ())
    values: dict[str, Any] = {}
    for name, column in columns.items():
        if isinstance(column, Ragged):
            values[name] = RaggedTensor(next(tensors), next(tensors), column.offsets.tolist())
        else:
            values[name] = column if isinstance(column, list) else next(tensors)
    return values


class Blocks:
    """Copies the arrays of a batch into one block of memory. Large blocks are used again. Any thread may call `pack`.

    keep: free large blocks that are kept.

    Examples:
        >>> first, second = Blocks(keep=1).pack([np.arange(2), np.ones(3)])
        >>> second.tolist(), first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
        ([1.0, 1.0, 1.0], True)
    """

    def __init__(self, keep: int) -> None:
        self._large = SlotPool((_LARGE,), np.uint8, keep)

    def pack(self, arrays: Sequence[Array]) -> list[torch.Tensor]:
        """Return copies of arrays as tensors that share one block of memory."""
        starts, size = packing.layout(arrays)
        block = self._large.acquire(-(-size // _LARGE) * _LARGE) if size >= _LARGE else heap(size)
        packing.write(block, starts, arrays)
        return packing.tensors_in(torch.from_numpy(block), starts, arrays)

    def clear(self) -> None:
        """Free the blocks that no batch holds."""
        self._large.clear()


TURNED_REMEDY = (
    "set decode: {orientation: apply} if the annotations are those of the upright photograph, or decode: {orientation: "
    "ignore} if they are those of the pixels as stored"
)


def turned_text(count: str, path: str, orientation: int) -> str:
    """Return what such images mean, with an example and both remedies. count: how many images, in words."""
    return (
        f"EXIF data turn {count} with boxes, masks or keypoints, such as {path} (orientation {orientation}), and "
        f"decode ignores that by default; {TURNED_REMEDY}"
    )


class TurnedImages:
    """Counts distinct images that EXIF data turn, while orientations are ignored. Any thread may call `add`."""

    def __init__(self, source: Source) -> None:
        self._source, self._lock = source, threading.Lock()
        self._known = np.zeros(0, bool)
        self._first: tuple[int, int] | None = None
        self.count = 0

    def add(self, index: int, orientation: int) -> None:
        """Count an image of this EXIF orientation, once."""
        with self._lock:
            if self._first is None:
                self._known, self._first = np.zeros(len(self._source), bool), (index, orientation)
            self.count += not self._known[index]
            self._known[index] = True

    @property
    def text(self) -> str:
        """Return what they mean; empty without any."""
        if self._first is None:
            return ""
        index, orientation = self._first
        return turned_text(f"{self.count:,} image(s) so far", self._source.path(index), orientation)
