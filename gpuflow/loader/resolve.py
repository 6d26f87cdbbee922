"""Resolves bad samples: raises their error, replaces them by others or skips them, as `on_error` says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from gpuflow.errors import BadSampleError, LoaderError, TooManyBadSamples
from gpuflow.loader.batch import Chunk
from gpuflow.loader.decode import ChunkReader, Run, with_values
from gpuflow.loader.plan import LoaderPlan
from gpuflow.loader.records import RecordMapper
from gpuflow.pipeline.stage import Keys
from gpuflow.sources import cache_counts
from gpuflow.sources.storage import new_copies


class BadSampleResolver:
    """Applies a loader's policy to its bad samples, on any thread."""

    def __init__(self, plan: LoaderPlan, reader: ChunkReader, records: RecordMapper | None = None) -> None:
        self._plan, self._reader, self._records = plan, reader, records
        self._is_cached = cache_counts(plan.source) is not None

    def resolve(
        self,
        epoch: int,
        chunk: Chunk,
        keys: Keys,
        faults: Sequence[BadSampleError | None],
        run: Run,
        slots: Any,
        ended: Callable[[], bool],
    ) -> None:
        """Resolve a chunk's bad samples.

        Args:
            run: decodes what replaces them into their slots.
            ended: whether the epoch is being ended. Asked before each replacement: there may be as many as samples.

        Raises BadSampleError under `raise`, TooManyBadSamples above the limit or if every sample is bad, LoaderError
        once the epoch is being ended.
        """
        for i, fault in enumerate(faults):
            if fault is not None:
                self._resolve(chunk, chunk.start + i, epoch, fault, run, keys[i], slots[i : i + 1], ended)
                chunk.replacement = None

    def _resolve(
        self,
        chunk: Chunk,
        row: int,
        epoch: int,
        fault: BadSampleError,
        run: Run,
        keys: Keys,
        slot: Any,
        ended: Callable[[], bool],
    ) -> None:
        source, order, bad, batch = self._plan.source, self._plan.order, self._plan.bad, chunk.batch
        index = int(batch.indices[row])
        if fault.stage != "read" and self._is_cached:
            with new_copies():
                again = self._decode(chunk, row, index, run, keys, slot)
            if again is None:
                return
            fault = again
        fault = fault.located(index, source.path(index))
        if bad.policy == "raise":
            raise fault
        bad.record(fault)
        if bad.policy == "skip":
            batch.kept[row] = False
            return
        position = int(batch.positions[row])
        candidates = order.candidates(epoch, position)
        for attempt in range(candidates):
            if ended():
                raise LoaderError(f"epoch {epoch} was ended while {fault} was being replaced")
            index = chunk.replacement = order.replacement(epoch, position, attempt)
            new_fault = self._decode(chunk, row, index, run, keys, slot)
            if new_fault is None:
                return
            bad.record(new_fault.located(index, source.path(index)))
        raise TooManyBadSamples(
            f"all {candidates} samples are bad, so none can replace {fault}; run `gpuflow scan` to list them"
        )

    def _decode(self, chunk: Chunk, row: int, index: int, run: Run, keys: Keys, slot: Any) -> BadSampleError | None:
        """Put a sample into a row of the batch, or return why it is bad."""
        batch = chunk.batch
        with self._reader.meter.work(0):  # as part of decoding, whose samples these are
            payload = self._reader.read([index])
            self._reader.meter.add(read_bytes=sum(payload.sizes))
        sizes = np.empty((1, 3), np.int64) if self._records is not None else None
        own_keys, records = with_values(self._plan, keys, [index])
        faults = run(payload, own_keys, slot, sizes)
        if self._records is not None and sizes is not None:
            self._records.add(batch, row, [index], own_keys, sizes, faults, records)
        [fault] = faults
        if fault is None:
            batch.indices[row] = index
            batch.add_labels(row, payload.labels)
        return fault
