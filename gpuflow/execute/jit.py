"""Loops that numba compiles, where it is installed. It is imported when the first of them runs, as that takes time."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from types import ModuleType
from typing import Any, cast

__all__ = ["compiled", "loops_of"]


@cache
def loops_of(module: str) -> ModuleType | None:
    """A module of loops of this package, such as `mask_loops`; None without numba."""
    try:
        return importlib.import_module(f"gpuflow.execute.{module}")
    except ImportError:
        return None


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function at its first call for the types that it gets; a call leaves the interpreter to other threads.

    The machine code is kept on disk, next to the function's file or in the user's cache, where one can be written. If
    that fails, as on a full disk, it is not kept. Nothing is rounded in another way than numpy rounds it: there is no
    `fastmath`.
    """
    from numba import njit

    try:
        loop: Any = njit(nogil=True, cache=True)(function)
    except RuntimeError:  # numba found no folder that it can write to
        return cast(Callable[..., Any], njit(nogil=True)(function))
    if (kept := getattr(loop, "_cache", None)) is not None:  # None with NUMBA_DISABLE_JIT
        kept.save_overload = _without_os_errors(kept.save_overload)  # numba calls it once it has the machine code
    return cast(Callable[..., Any], loop)


def _without_os_errors(save: Callable[..., None]) -> Callable[..., None]:
    def run(*arguments: Any) -> None:
        with suppress(OSError):
            save(*arguments)

    return run
