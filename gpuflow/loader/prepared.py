"""The chunks of an epoch that are ready for the GPU, so that one launch can decode images of several of them."""

from __future__ import annotations

import threading
from typing import Any

from gpuflow.loader.batch import Chunk

__all__ = ["PreparedChunks"]


class PreparedChunks:
    """What was prepared for the GPU and is not being launched yet, in one epoch. Any thread may call any method.

    The queues between reading and launching bound how much that is: about eight chunks.
    """

    def __init__(self) -> None:
        self._prepared: dict[tuple[int, int], Any] = {}
        self._lock = threading.Lock()

    def add(self, chunk: Chunk) -> None:
        """A chunk was read, and prepared if a GPU decodes it."""
        if chunk.prepared is not None:
            with self._lock:
                self._prepared[chunk.batch.step, chunk.start] = chunk.prepared

    def take(self, chunk: Chunk) -> list[Any]:
        """A chunk is about to be launched. Returns what was prepared of the others, in the order of their launches."""
        with self._lock:
            self._prepared.pop((chunk.batch.step, chunk.start), None)
            return [self._prepared[key] for key in sorted(self._prepared)]
