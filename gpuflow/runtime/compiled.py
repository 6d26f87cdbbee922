"""Compiles a C file of this package once with the machine's compiler, and keeps the library in the cache folder.

A wheel that carries compiled code would fit one kind of machine. Where this code runs, Triton has needed the compiler
before, for the code that launches its kernels.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import logging
import os
import platform
import shlex
import stat
import subprocess
import tempfile
import threading
from functools import lru_cache
from pathlib import Path

from gpuflow.runtime.files import cache_folder

__all__ = ["compiled"]

_LOG = logging.getLogger(__name__)
_one_at_a_time = threading.Lock()
_FLAGS, _COMPILE_SECONDS = ("-O3", "-fPIC", "-shared", "-std=gnu11"), 60.0


@lru_cache
def compiled(source: Path) -> ctypes.CDLL | None:
    """The library of a C file, whose functions release the interpreter; None, logged, where it cannot be compiled.

    It may include the headers of its folder, and is compiled anew if one of them changes.

    The environment variable CC names the compiler, by default `cc`. Without a folder for the cache it is compiled for
    this process alone.
    """
    try:
        with _one_at_a_time:  # threads that need the library at the same time wait for the one that compiles
            return _library(source)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        detail = getattr(error, "stderr", None) or str(error)
        _LOG.info("%s is not compiled, so Python code does its work: %s", source.name, detail)
        return None


def _library(source: Path) -> ctypes.CDLL:
    """The compiled file. Raises OSError, SubprocessError or, for a CC that is no command, ValueError."""
    text = [path.read_bytes() for path in (source, *sorted(source.parent.glob("*.h")))]
    key = hashlib.sha256(repr((text, _FLAGS, platform.machine(), platform.libc_ver())).encode()).hexdigest()[:16]
    name = f"{source.stem}-{key}.so"
    try:
        kept = _own_folder(cache_folder() / "compiled")
        if not (kept / name).exists():
            _compile(source, kept, name)
        return ctypes.CDLL(str(kept / name))
    except OSError as error:
        _LOG.info("nothing compiled is kept: %s", error)
        with tempfile.TemporaryDirectory() as folder:
            _compile(source, Path(folder), name)
            return ctypes.CDLL(str(Path(folder) / name))


def _own_folder(folder: Path) -> Path:
    """Make the folder, if need be. Raises OSError if another user may write to it: its libraries run here."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    status = folder.stat()
    if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(errno.EPERM, "other users may write to this folder", str(folder))
    return folder


def _compile(source: Path, folder: Path, name: str) -> None:
    """Compile to a file in the folder, which is there as a whole or not at all."""
    command = [*shlex.split(os.environ.get("CC") or "cc"), *_FLAGS]
    with tempfile.TemporaryDirectory(dir=folder) as own:
        result = Path(own) / name
        subprocess.run(
            [*command, "-o", str(result), str(source)],
            check=True,
            capture_output=True,
            text=True,
            timeout=_COMPILE_SECONDS,
        )
        result.replace(folder / name)
