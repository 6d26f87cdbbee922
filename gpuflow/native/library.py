"""Loads the C library of this package by ctypes, gives its functions types, and starts and ends its threads."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from gpuflow.errors import LoaderError, NativeLibraryError

POINTER, INTEGER, WORD = ctypes.c_void_p, ctypes.c_int64, ctypes.c_uint64
"""Types of parameters: an address, int64_t and uint64_t."""


def _is_whole(path: str) -> bool:
    """Return whether a file of ELF for 64 bits reaches to its table of sections, the end. Loading a part may crash."""
    with open(path, "rb") as file:
        sections, bytes_of_each, count = struct.unpack_from("=40xQ10xHH", file.read(64).ljust(64, b"\0"))
    return bool(os.path.getsize(path) >= sections + bytes_of_each * count)


def _load() -> ctypes.CDLL:
    found = importlib.util.find_spec("gpuflow.native._library")
    if found is None or found.origin is None:
        raise NativeLibraryError("is missing")
    try:
        if not _is_whole(found.origin):
            raise NativeLibraryError("is incomplete")
        return ctypes.CDLL(found.origin)
    except OSError as error:
        raise NativeLibraryError(f"cannot be loaded: {error}") from error


_LIBRARY = _load()


def function(
    name: str, *parameters: Any, result: Any = None, holds_interpreter: bool = False, library: ctypes.CDLL = _LIBRARY
) -> Callable[..., Any]:
    """Return a C function, which converts its arguments to the types of its parameters.

    Args:
        parameters: the types of all parameters, see `POINTER`. result: the type of what it returns; None for void.
        holds_interpreter: do not release the interpreter, which takes longer than a call of a few microseconds.

    Raises:
        NativeLibraryError: the library is that of another version.

    Examples:
        >>> length = function("strlen", ctypes.c_char_p, result=INTEGER, library=ctypes.CDLL(None))
        >>> length(b"four")
        4
    """
    kind = ctypes.PYFUNCTYPE if holds_interpreter else ctypes.CFUNCTYPE
    try:
        return kind(result, *parameters)((name, library))
    except AttributeError as error:
        raise NativeLibraryError(f"has no function {name}, so it is that of another version") from error


_new_pool = function("gpuflow_new_pool", INTEGER, result=POINTER)
_free_pool = function("gpuflow_free_pool", POINTER)


class NativePool:
    """Starts threads of C code, which share the images or files of each call. A forked child must not use this.

    Raises LoaderError if no thread can be started.

    Examples:
        >>> pool = NativePool(2)
        >>> with pool.in_use() as address:  # which is passed to a call of C code
        ...     assert address
        >>> pool.close()
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
    """Give a call the pool's address, as `NativePool.in_use`; or 0, so that the calling thread does the work.

    Examples:
        >>> with using(None) as address:
        ...     address
        0
    """
    return nullcontext(0) if pool is None else pool.in_use()
