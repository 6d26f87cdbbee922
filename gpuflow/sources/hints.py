"""Hints at the end of error messages: the name or path that was probably meant."""

from __future__ import annotations

import difflib
import os
from collections.abc import Collection
from typing import TYPE_CHECKING

from gpuflow.errors import did_you_mean
from gpuflow.sources.storage import is_remote

if TYPE_CHECKING:
    from gpuflow.sources.base import SourceSpec, WeightsSpec


def near_word(word: str, known: Collection[str]) -> str:
    """A clause that suggests the closest known word, or lists the known words if they are few; else empty."""
    if len(known) > 20:
        known = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    return did_you_mean(word, known) if known else ""


def missing_path(path: str) -> str:
    """A clause for a local path that does not exist: suggests a similar name, or says where relative paths start."""
    if "$" in path:
        return "; variables such as $HOME are not replaced, write the path itself"
    parent, name = os.path.split(path.rstrip("/"))
    while parent and not os.path.isdir(parent):
        parent, name = os.path.split(parent)
    siblings = os.listdir(parent or ".") if os.access(parent or ".", os.R_OK) else []
    close = difflib.get_close_matches(name, siblings, n=1, cutoff=0.6)
    if close:
        rest = path.rstrip("/")[len(os.path.join(parent, name)) :]
        return f"; did you mean {os.path.join(parent, close[0]) + rest!r}?"
    return "; check the path" if os.path.isabs(path) else f"; relative paths start from {os.getcwd()}"


def missing_source(spec: SourceSpec) -> str:
    """What a source names that does not exist, and a hint; empty if it exists, or is not a single local path."""
    path = spec.where
    if not spec.is_path or is_remote(path) or any(mark in path for mark in "*?[{"):
        return ""
    return _missing(path)


def missing_weights(spec: WeightsSpec) -> str:
    """The file of weights if it does not exist, and a hint; empty if it exists, or if none is named."""
    return _missing(spec.file) if spec.file is not None else ""


def _missing(path: str) -> str:
    return "" if os.path.exists(os.path.expanduser(path)) else f"{path!r}{missing_path(path)}"
