"""Triton's interpreter at half its time: imported by the scripts that run kernels in it.

For each call of one kernel function by another, the interpreter looks through all of triton.language for what it has to
replace. The launch of the outer one has replaced it already; the functions of triton.language itself need that once.
"""

from __future__ import annotations

from typing import Any

import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpretedFunction, InterpreterError

__all__: list[str] = []

_replaced: list[Any] = []


def _call(self: Any, *arguments: Any, **options: Any) -> Any:
    """As InterpretedFunction.__call__ of Triton 3.6, but without looking through the language each time."""
    if not _replaced and tl not in self.fn.__globals__.values():
        _replaced.append(interpreter._patch_lang(self.fn))
    try:
        return self.rewrite()(*arguments, **options)
    except Exception as error:
        raise InterpreterError(repr(error)) from error


InterpretedFunction.__call__ = _call
