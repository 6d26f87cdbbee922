"""A source with one file per sample: the result of indexing a folder or a listing."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import final

import numpy as np
from numpy.typing import NDArray

from gpuflow.sources.fingerprint import fingerprint
from gpuflow.sources.paths import PathTable
from gpuflow.sources.payload import Allocate, Payload
from gpuflow.sources.storage import Storage

__all__ = ["FileSource"]


@final
class FileSource:
    """A source with one file per sample, all on one storage. `open_folder` and `open_listing` create it.

    Args:
        root: the folder that whole paths may lie below; of no matter to the fingerprint.
        note: how its index was read, for `gpuflow explain`; empty if there was nothing to decide.
    """

    shard_sizes = None

    def __init__(
        self,
        storage: Storage,
        paths: PathTable,
        labels: NDArray[np.int64],
        classes: tuple[str, ...],
        *,
        root: str = "",
        note: str = "",
    ) -> None:
        self.storage, self._paths, self._root = storage, paths, root
        self.labels, self.classes, self.note = labels, classes, note

    @cached_property
    def fingerprint(self) -> str:
        """See `gpuflow.sources.fingerprint`."""
        return fingerprint(self._paths.entries_below(self._root), self.labels, self.classes)

    def __len__(self) -> int:
        return len(self.labels)

    def path(self, index: int) -> str:
        return self._paths[index]

    def read(self, indices: Sequence[int], allocate: Allocate) -> Payload:
        return self.storage.read(self._paths.take(indices), allocate)

    def on(self, storage: Storage) -> FileSource:
        return FileSource(storage, self._paths, self.labels, self.classes, root=self._root, note=self.note)

    def close(self) -> None:
        self.storage.close()
