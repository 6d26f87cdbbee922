"""Loads the C library of this package by ctypes, and gives its functions types."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import struct
from collections.abc import Callable
from typing import Any

from gpuflow.errors import NativeLibraryError

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
    """
    kind = ctypes.PYFUNCTYPE if holds_interpreter else ctypes.CFUNCTYPE
    try:
        return kind(result, *parameters)((name, library))
    except AttributeError as error:
        raise NativeLibraryError(f"has no function {name}, so it is that of another version") from error
