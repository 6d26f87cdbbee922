"""A source with one file per sample: the result of indexing a folder or a listing, and the spec of the latter."""

from __future__ import annotations

import random
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import final

from gpuflow.arrays import Array
from gpuflow.errors import SourceError, redacted
from gpuflow.sources.base import fingerprint, is_read_remotely
from gpuflow.sources.record_table import NO_FIELDS, RecordTable, TableSource
from gpuflow.sources.spec import Cached, Extent, NotMeasuredError
from gpuflow.sources.storage import Allocate, PathTable, Payload, Storage


@final
class FileSource(TableSource):
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
        super().__init__(classes, labels, has_labels, table)
        self.storage = storage
        self._paths = paths
        self._root = root
        self.note = note
        self.splits = dict(splits or {})

    @cached_property
    def fingerprint(self) -> str:
        """See `gpuflow.sources.base.fingerprint`."""
        return fingerprint(self.entries, self.labels, self.classes, known=self._table.digest())

    @property
    def entries(self) -> bytes:
        """See `gpuflow.sources.base.entries_of`."""
        return self._paths.entries_below(self._root)

    @property
    def storages(self) -> tuple[Storage, ...]:
        """Return what its images, and the files of its masks, are read from."""
        return (self.storage, *self._table.storages)

    def path(self, index: int) -> str:
        return redacted(self._paths[index])

    def read(self, indices: Sequence[int], allocate: Allocate) -> Payload:
        return self.storage.read(self._paths.take(indices), allocate)

    def close(self) -> None:
        self.storage.close()
        self._table.close()


@dataclass(frozen=True, kw_only=True)
class Listed(Cached):
    """A source whose images are the files that one file lists, which may be URLs."""

    lists_urls = True

    @abstractmethod
    def index(self) -> FileSource:
        """Index the source. Raises SourceError."""

    def open(self) -> FileSource:
        source = self.index()
        if self.cache is not None and not any(storage.remote for storage in source.storages):
            source.close()
            raise SourceError(
                f"source.cache must go with URLs, got {self.where!r}, which lists local files, and these are not "
                "copied; remove cache"
            )
        return source

    def find_images(self, limit: int, deadline: float, chance: random.Random) -> list[Extent]:
        source = self.open()
        try:
            if is_read_remotely(source):
                raise NotMeasuredError(f"{redacted(self.where)} lists files behind URLs")
            return [Extent(source.path(i)) for i in chance.sample(range(len(source)), min(limit, len(source)))]
        finally:
            source.close()
