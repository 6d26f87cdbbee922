"""Writes a file whole or not at all, locks files between processes, and names the folder for cached files."""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import platformdirs

_POLL_SECONDS = 0.005


def cache_folder() -> Path:
    """Return the folder for files that can be made again: `gpuflow` in `$XDG_CACHE_HOME`, by default in `~/.cache`.

    A user without a home directory gets one below `/dev/null`, which cannot be made, so that nothing is kept.
    """
    with suppress(RuntimeError):  # newer versions of platformdirs; older ones give the path `~/.cache/gpuflow` as it is
        folder = platformdirs.user_cache_path("gpuflow", appauthor=False)
        if folder.is_absolute():
            return folder
    return Path(os.devnull, "gpuflow")


@contextmanager
def atomic_write(path: str | os.PathLike[str], *, text: bool = False, suffix: str = ".partial") -> Iterator[IO[Any]]:
    """Open a temporary file in the directory of `path`, which replaces `path` when the block ends without an exception.

    A symbolic link stays, and the file that it leads to is replaced (see `replaced_file`).

    Readers see the old file or the new one, never a part, and so does a machine that loses power. After an exception of
    any kind the old file is as it was and the temporary one is gone; an OSError that names no file, such as that of a
    full disk, gets `path`. Where several write at once, the last to end wins. The new file has the permissions of the
    old one; without an old one, those that the umask gives.

    Args:
        path: the file to write. Its directory must exist.
        text: open it for text in UTF-8, newlines as written; what is no text, such as bytes of a file's name, is
            escaped by backslashes. Otherwise for bytes.
        suffix: how the temporary file's name ends, for writers that open `file.name` and choose a format by it.

    Raises:
        OSError: what stands there is a device or a pipe, such as /dev/null, which root could replace.

    Examples:
        >>> with atomic_write("list.txt", text=True) as file:
        ...     print("a.jpg", file=file)
        >>> Path("list.txt").read_text(), os.listdir()
        ('a.jpg\\n', ['list.txt'])
    """
    path = Path(path)
    mode: int | None = None
    with suppress(FileNotFoundError):
        mode = stat.S_IMODE(path.stat().st_mode)
    if path.exists() and not path.is_file() and not path.is_dir():
        raise OSError(errno.EINVAL, "is a device or a pipe, which no file may replace", str(path))
    path = replaced_file(path)
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}{suffix}")

    def create(name: str, flags: int) -> int:
        """Open a file that no other user may read before it has the mode of the old one, if there is one."""
        return os.open(name, flags, 0o666 if mode is None else 0o600)

    of_text = {"mode": "x", "encoding": "utf-8", "errors": "backslashreplace", "newline": ""}
    form = of_text if text else {"mode": "xb"}
    file: IO[Any] = open(partial, **form, opener=create)  # type: ignore[call-overload]  # noqa: SIM115
    try:
        with file:
            yield file
            file.flush()
            if mode is not None:
                partial.chmod(mode)
            os.fsync(file.fileno())
        partial.replace(path)
        _sync_folder(path.parent)
    except BaseException as error:
        partial.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None:  # as that of a write to a full disk
            error.filename = str(path)
        raise


def replaced_file(path: Path) -> Path:
    """Return the file that `atomic_write` replaces: what a symbolic link leads to, be it missing or not; else
    `path`."""
    return Path(os.path.realpath(path)) if path.is_symlink() else path


def _sync_folder(folder: Path) -> None:
    """Have the disk keep the folder's entries, so that a renamed file is still there after a loss of power."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a file system that does not sync folders
            raise
    finally:
        os.close(descriptor)


@contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
    """Make a folder and hold it for this process alone while the block runs; prove first that files can be written.

    The lock is on a file `.lock` and ends with this process, however that ends. The file stays.

    Raises:
        BlockingIOError: another process holds the folder. OSError: files cannot be written there.

    Examples:
        >>> with locked_folder(Path("run")):
        ...     os.listdir("run")
        ['.lock']
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP):  # a file system without locks
                raise
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(bytes(4096))
        yield


def lock_within(descriptor: int, seconds: float) -> bool:
    """Lock an open file against other processes and threads that open it themselves; False if one of them holds it for
    this long. The lock ends with `fcntl.LOCK_UN`, when the file is closed, and with this process.

    Raises OSError where the file system has no locks.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_SECONDS)
        else:
            return True
