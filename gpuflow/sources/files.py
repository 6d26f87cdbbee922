"""A source with one file per sample: the result of indexing a folder or a listing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import final

from gpuflow.arrays import Array
from gpuflow.errors import redacted
from gpuflow.pipeline.records import Field, LeftOut, Records
from gpuflow.sources.fingerprint import fingerprint
from gpuflow.sources.paths import PathTable
from gpuflow.sources.payload import Allocate, Payload
from gpuflow.sources.record_table import NO_FIELDS, RecordTable
from gpuflow.sources.storage import Storage


@final
class FileSource:
    """A source with one file per sample, all on one storage. Folders, listings and COCO files are such sources.

    Args:
        root: the folder that whole paths may lie below; of no matter to the fingerprint.
        note: how its index was read, for `gpuflow explain`; empty if there was nothing to decide.
        has_labels: whether its samples have labels.
        table: the declared fields besides image and label.
        splits: for each split that the source itself has, by name, the range of its indices (first, after the last).
    """

    shard_sizes = None

    def __init__(
        self,
        storage: Storage,
        paths: PathTable,
        labels: Array,
        classes: tuple[str, ...],
        *,
        root: str = "",
        note: str = "",
        has_labels: bool = True,
        table: RecordTable = NO_FIELDS,
        splits: Mapping[str, tuple[int, int]] | None = None,
    ) -> None:
        self.storage, self._paths, self._root = storage, paths, root
        self.labels, self.classes, self.note = labels, classes, note
        self.has_labels, self._table, self.splits = has_labels, table, dict(splits or {})

    @property
    def fields(self) -> tuple[Field, ...]:
        return self._table.fields

    @cached_property
    def fingerprint(self) -> str:
        """See `gpuflow.sources.fingerprint`."""
        return fingerprint(self.entries, self.labels, self.classes, known=self._table.digest())

    @property
    def entries(self) -> bytes:
        """See `gpuflow.sources.fingerprint.entries_of`."""
        return self._paths.entries_below(self._root)

    @property
    def storages(self) -> tuple[Storage, ...]:
        """Return what its images, and the files of its masks, are read from."""
        return (self.storage, *self._table.storages)

    def __len__(self) -> int:
        return len(self.labels)

    def path(self, index: int) -> str:
        return redacted(self._paths[index])

    def read(self, indices: Sequence[int], allocate: Allocate) -> Payload:
        return self.storage.read(self._paths.take(indices), allocate)

    def records(self, indices: Sequence[int]) -> Records:
        return self._table.records(indices)

    @property
    def left_out(self) -> Mapping[int, LeftOut]:
        return self._table.left_out

    def without_records(self) -> FileSource:
        return FileSource(
            self.storage,
            self._paths,
            self.labels,
            self.classes,
            root=self._root,
            note=self.note,
            has_labels=self.has_labels,
            table=NO_FIELDS,
            splits=self.splits,
        )

    def close(self) -> None:
        self.storage.close()
        self._table.close()
