"""Threads of C code: they make images, rewrite files and check files for one loader or service."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from gpuflow.errors import LoaderError
from gpuflow.native.library import INTEGER, POINTER, function

_new_pool = function("gpuflow_new_pool", INTEGER, result=POINTER)
_free_pool = function("gpuflow_free_pool", POINTER)


class NativePool:
    """Threads of C code that share the images or files of each call. A forked child has none, and must not use this.

    Raises LoaderError if no thread can be started.
    """

    def __init__(self, threads: int) -> None:
        self._address = _new_pool(threads)
        if not self._address:
            raise LoaderError("no thread can be started; lower run.threads, or raise this process's limit (ulimit -u)")
        self._lock, self._calls, self._closed, self._pid = threading.Lock(), 0, False, os.getpid()

    @contextmanager
    def in_use(self) -> Iterator[int]:
        """Give the pool's address to a call. The threads end after the calls that use them."""
        with self._lock:
            if self._closed:
                raise LoaderError("the epoch was ended")
            self._calls += 1
        try:
            yield self._address
        finally:
            with self._lock:
                self._calls -= 1
            self._free_if_unused()

    def close(self) -> None:
        """End the threads, at once or after the last call that uses them."""
        if self._pid == os.getpid():
            with self._lock:
                self._closed = True
            self._free_if_unused()

    def _free_if_unused(self) -> None:
        with self._lock:
            if not self._closed or self._calls:
                return
            address, self._address = self._address, None
        if address:
            _free_pool(address)


def using(pool: NativePool | None) -> AbstractContextManager[int]:
    """Give a call the pool's address, as `NativePool.in_use`; or 0, so that the calling thread does the work."""
    return nullcontext(0) if pool is None else pool.in_use()
