"""Remembers between runs which files a GPU decodes completely, by a hash of their bytes, in a file of gpuflow's cache.

Neither a file's path nor its time says that it is the file that was decoded; its bytes do. So a data set may move, and
a file that was replaced is unknown again. Hashes have 64 bits: with all `MAX_FILES` remembered, a damaged file is
mistaken for another one with a probability of 1e-12. They are not cryptographic: SECURITY.md says what follows from it.
"""

from __future__ import annotations

import errno
import logging
import re
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from gpuflow.runtime.files import atomic_write, cache_folder, lock_within
from gpuflow.sources import Payload

__all__ = ["MAX_FILES", "CompleteContents", "path_of"]

_LOG = logging.getLogger(__name__)
MAX_FILES = 1 << 24
"""The largest number of files that are remembered, with eight bytes each."""
_VERSION = 1
"""Of the file's format and of what counts as complete: whoever changes either of them raises it."""
_DIGEST_BYTES = 16
_LOCK_SECONDS, _END_SECONDS = 5.0, 10.0


def path_of(*checked_by: str) -> Path:
    """Where the hashes of the files are kept that this decoder found complete. Each decoder has its own file."""
    words = re.sub(r"[^a-z0-9.]+", "-", " ".join(checked_by).lower()).strip("-")
    return cache_folder() / f"complete-files-{_VERSION}-{words}"


class CompleteContents:
    """Which files were complete in an earlier run; what was learned in this one is added for later runs.

    It decides on speed alone: a file that is not known is checked again. A file of hashes that is damaged or foreign
    is ignored, and written anew. If it cannot be read or written, this run adds nothing, after one warning.

    Any thread may call any method, also where the garbage collector interrupts another of them.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._head = f"gpuflow {path.name}\n".encode()
        self._new: deque[NDArray[np.uint64]] = deque()
        self._saving, self._writable = threading.Lock(), True
        self._thread: threading.Thread | None = None
        self._held = np.empty(0, np.uint64)
        try:
            self._held = self._read()
        except OSError as error:
            self._give_up(error)

    @staticmethod
    def hashes(payload: Payload, rows: NDArray[np.int64]) -> NDArray[np.uint64]:
        """The hashes [n] of these samples' bytes. Other threads may run during that of a file of more than 64 KiB."""
        view, hash_of = payload.buffer.data, xxhash.xxh3_64_intdigest
        starts = np.asarray(payload.offsets, np.int64)[rows]
        ends = starts + np.asarray(payload.sizes, np.int64)[rows]
        parts = zip(starts.tolist(), ends.tolist(), strict=True)
        return np.fromiter((hash_of(view[start:end]) for start, end in parts), np.uint64, len(rows))

    def known(self, hashes: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Which of these files [n] were complete in an earlier run."""
        return _are_in(self._held, hashes)

    def add(self, hashes: NDArray[np.uint64]) -> None:
        """These files [n] are complete."""
        if self._writable and len(hashes):
            self._new.append(hashes)

    def save_soon(self) -> None:
        """Save what was added, on a thread of its own, unless one is doing so."""
        if self._new and (self._thread is None or not self._thread.is_alive()):
            thread = threading.Thread(target=self.save, name="gpuflow_complete_files", daemon=True)
            former, self._thread = self._thread, thread
            try:
                thread.start()
            except RuntimeError:  # the process may have no more threads; `close` saves
                self._thread = former

    def save(self) -> None:
        """Merge what was added with what is on the disk now, where other processes may have added some, too."""
        if not self._saving.acquire(timeout=_LOCK_SECONDS):
            return
        added: list[NDArray[np.uint64]] = []
        try:
            with suppress(IndexError):
                while True:
                    added.append(self._new.popleft())
            if added and self._writable:
                self._merge(np.unique(np.concatenate(added)))
        except TimeoutError:  # another process is at it
            self._new.extend(added)
        except OSError as error:
            self._give_up(error)
        finally:
            self._saving.release()

    def _give_up(self, error: OSError) -> None:
        self._writable = False
        _LOG.warning(
            "which files are complete cannot be kept for later runs in %s: %s; make room there, set XDG_CACHE_HOME to "
            "another folder, or set run.remember_complete_files: false",
            self._path.parent,
            error.strerror or error,
        )

    def close(self) -> None:
        """Save what was added, and end the thread that does so."""
        if self._thread is threading.current_thread():  # where the garbage collector closes the loader; it is saving
            return
        if self._thread is not None:
            self._thread.join(_END_SECONDS)
        self.save()

    # --- the file ---------------------------------------------------------------------------------------------------

    def _merge(self, added: NDArray[np.uint64]) -> None:
        """Add sorted hashes to the file. Raises OSError, or TimeoutError where another process holds it."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._locked():
            old = self._read()
            added = added[~_are_in(old, added)][:MAX_FILES]
            if not len(added):
                return
            kept = old[: MAX_FILES - len(added)]  # hashes are random, so these are any files
            merged = np.sort(np.concatenate([kept, added]), kind="stable")
            with atomic_write(self._path) as file:
                file.write(self._head + self._digest(merged))
                file.write(merged.data)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the file against other processes, where its file system has locks. Raises TimeoutError if one holds it
        for long."""
        with open(self._path.with_name(f"{self._path.name}.lock"), "ab") as file:
            try:
                if not lock_within(file.fileno(), _LOCK_SECONDS):
                    raise TimeoutError
            except OSError as error:
                if error.errno not in (errno.ENOLCK, errno.ENOTSUP):
                    raise
            else:
                for partial in self._path.parent.glob(f".{self._path.name}.*.partial"):  # of processes that were killed
                    partial.unlink(missing_ok=True)
            yield

    def _read(self) -> NDArray[np.uint64]:
        """The hashes on the disk, sorted; none if there is no file, or with a warning if it is not to be trusted.

        Raises OSError if there is a file that cannot be read.
        """
        most = len(self._head) + _DIGEST_BYTES + 8 * MAX_FILES
        try:
            with open(self._path, "rb") as file:
                data = file.read(most + 1)
        except (FileNotFoundError, NotADirectoryError):
            return np.empty(0, np.uint64)
        start = len(self._head) + _DIGEST_BYTES
        if data.startswith(self._head) and start <= len(data) <= most and (len(data) - start) % 8 == 0:
            found = np.frombuffer(data, "<u8", offset=start).astype(np.uint64, copy=False)
            if data[len(self._head) : start] == self._digest(found):
                return found
        _LOG.warning("%s is damaged, or not gpuflow's; it is not used, and written anew", self._path)
        return np.empty(0, np.uint64)

    def _digest(self, hashes: NDArray[np.uint64]) -> bytes:
        digest = xxhash.xxh3_128(self._head)
        digest.update(hashes.data)
        return digest.digest()


def _are_in(held: NDArray[np.uint64], hashes: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """Which of these hashes are among the sorted ones."""
    if not len(held):
        return np.zeros(len(hashes), bool)
    places = np.searchsorted(held, hashes)
    found: NDArray[np.bool_] = held[np.minimum(places, len(held) - 1)] == hashes
    return found
