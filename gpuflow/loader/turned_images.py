"""Counts images whose coordinates may be those of the upright photograph, while EXIF orientations are ignored."""

from __future__ import annotations

import threading

import numpy as np

from gpuflow.sources import Source

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
    """Counts distinct images of a source. Any thread may call `add`."""

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
