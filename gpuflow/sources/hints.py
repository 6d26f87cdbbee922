"""Hints at the end of error messages: the name or path that was probably meant."""

from __future__ import annotations

import difflib
import os
from collections.abc import Collection

from gpuflow.errors import did_you_mean

__all__ = ["missing_path", "near_word"]


def near_word(word: str, known: Collection[str]) -> str:
    """A clause that suggests the closest known word, or lists the known words if they are few; else empty."""
    if len(known) > 20:
        known = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    return did_you_mean(word, known) if known else ""


def missing_path(path: str) -> str:
    """A clause for a local path that does not exist: suggests a similar name, or says where relative paths start."""
    parent, name = os.path.split(path.rstrip("/"))
    while parent and not os.path.isdir(parent):
        parent, name = os.path.split(parent)
    siblings = os.listdir(parent or ".") if os.access(parent or ".", os.R_OK) else []
    close = difflib.get_close_matches(name, siblings, n=1, cutoff=0.6)
    if close:
        rest = path.rstrip("/")[len(os.path.join(parent, name)) :]
        return f"; did you mean {os.path.join(parent, close[0]) + rest!r}?"
    return "; check the path" if os.path.isabs(path) else f"; relative paths start from {os.getcwd()}"
