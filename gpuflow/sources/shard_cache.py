"""Caches the index of tar shards, as arrays in the user's cache folder, until a shard changes."""

from __future__ import annotations

import hashlib
import json
import os
import zipfile
from collections.abc import Mapping, Sequence
from tokenize import TokenError
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpuflow.runtime.files import atomic_write, cache_folder
from gpuflow.sources.storage import Shard, is_remote

__all__ = ["DAMAGED_ARRAY", "cache_path", "load_arrays", "save_arrays"]

DAMAGED_ARRAY = (ValueError, TypeError, EOFError, SyntaxError, TokenError)
"""What numpy raises for a damaged .npy file: it parses its header as Python."""


def cache_path(name: str, shards: Sequence[Shard], *asked: Any) -> str | None:
    """The file for these very shards, and for what was asked of them; another size or time of a shard is another file.

    A file that was copied, moved or given other rights counts as another one, too. None if a server does not say when a
    shard was changed: otherwise the index of an older shard would be taken for its own.

    asked: values of JSON, the version of the arrays' form among them.
    """
    if not all(shard.stamp for shard in shards):
        return None
    version, *rest = asked
    files = [(s.path if is_remote(s.path) else os.path.abspath(s.path), s.size, s.stamp, s.made) for s in shards]
    digest = hashlib.blake2b(json.dumps([version, files, *rest]).encode(), digest_size=16).hexdigest()
    return str(cache_folder() / f"{name}-{digest}.npz")


def load_arrays(path: str | None) -> dict[str, NDArray[Any]] | None:
    """The cached arrays, or None if there are none or they are damaged."""
    if path is None:
        return None
    try:
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as arrays:
            return dict(arrays)
    except (OSError, KeyError, RuntimeError, zipfile.BadZipFile, *DAMAGED_ARRAY):
        return None


def save_arrays(path: str | None, arrays: Mapping[str, NDArray[Any]]) -> None:
    """Write the cache. If that fails, or without a path, the next run indexes the shards again."""
    if path is None:
        return
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with atomic_write(path) as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]
    except OSError:
        return
