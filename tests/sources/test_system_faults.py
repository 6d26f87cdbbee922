"""Faults of the environment while samples are read: raised with what to do, and never an error of a sample."""

from __future__ import annotations

import ctypes
import errno
import os
import pickle
import resource
import tarfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from gpuflow.errors import SystemFault, is_system_fault, system_fault
from gpuflow.sources import Source, open_source, source_spec
from gpuflow.sources.storage import local, remote, time_limit
from tests.datasets import make_photos, no_more_files
from tests.sources.conftest import FileServer, ReadAll

RAISED = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.ENOSPC, errno.EDQUOT, errno.EPIPE)
OF_THE_FILE = (errno.ENOENT, errno.EACCES, errno.EIO, errno.ESTALE, errno.ELOOP, errno.EISDIR, errno.ETIMEDOUT)


def new_array(size: int) -> NDArray[np.uint8]:
    return np.empty(size, np.uint8)


def caused(error: BaseException, cause: BaseException) -> BaseException:
    error.__cause__ = cause
    return error


class OutOfMemoryError(RuntimeError):
    """As torch's, by its name."""


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        *((OSError(number, "why"), True) for number in RAISED),
        *((OSError(number, "why"), False) for number in OF_THE_FILE),
        (MemoryError(), True),
        (OutOfMemoryError(), True),
        (caused(ValueError("by a library"), OSError(errno.EMFILE, "why")), True),
        (caused(ValueError("by a library"), OSError(errno.EIO, "why")), False),
        (RuntimeError("why"), False),
        (None, False),
    ],
    ids=repr,
)
def test_what_is_a_fault_of_the_environment(error: BaseException | None, expected: bool) -> None:
    assert is_system_fault(error) == expected


def test_a_context_counts_unless_it_is_suppressed() -> None:
    def fails(*, suppressed: bool) -> BaseException:
        try:
            try:
                raise OSError(errno.EMFILE, "why")
            except OSError:
                if suppressed:
                    raise ValueError from None
                raise ValueError  # noqa: B904
        except ValueError as error:
            return error

    assert is_system_fault(fails(suppressed=False))
    assert not is_system_fault(fails(suppressed=True))


def test_the_error_names_the_file_and_what_to_do() -> None:
    fault = system_fault(OSError(errno.EMFILE, "Too many open files"), "a.jpg")
    assert isinstance(fault, SystemFault) and isinstance(fault, OSError)
    assert (fault.errno, fault.filename) == (errno.EMFILE, "a.jpg")
    assert str(fault) == (
        f"[Errno {errno.EMFILE}] Too many open files; raise the limit of open files (ulimit -n), or lower run.threads "
        "and run.readers: 'a.jpg'"
    )
    again = pickle.loads(pickle.dumps(fault))
    assert (type(again), str(again)) == (SystemFault, str(fault))
    memory = MemoryError()
    assert system_fault(memory, "a.jpg") is memory


def folder_of(root: Path) -> Source:
    make_photos(root / "photos", classes=2, each=20)
    return open_source(source_spec(folder=str(root / "photos")))


def shard_of(root: Path) -> Source:
    make_photos(root / "photos", classes=1, each=4)
    with tarfile.open(root / "s.tar", "w") as archive:
        for file in sorted((root / "photos").rglob("*.jpg")):
            archive.add(file, f"{file.stem}.jpg")
            (root / "label").write_text("0")
            archive.add(root / "label", f"{file.stem}.cls")
    return open_source(source_spec(tar=str(root / "s.tar")))


def listed_on_server(root: Path, server: FileServer) -> Source:
    server.files.update({f"/{i}.jpg": b"x" for i in range(4)})
    (root / "list.csv").write_text("".join(f"{server.url}/{i}.jpg,0\n" for i in range(4)))
    return open_source(source_spec(listing=str(root / "list.csv")))


@pytest.fixture(params=["folder", "tar", "server"])
def source(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Source:
    monkeypatch.setattr(local, "LOCAL_DELAYS", (0.0, 0.01, 0.02, 0.05))
    match request.param:
        case "folder":
            return folder_of(tmp_path)
        case "tar":
            return shard_of(tmp_path)
        case _:
            with time_limit(1.0):
                found = listed_on_server(tmp_path, request.getfixturevalue("server"))
            found.read([0], new_array)  # starts the threads that fsspec needs
            return found


def test_without_file_descriptors_reading_raises(source: Source, read_all: ReadAll, tmp_path: Path) -> None:
    path = source.path(2)
    with no_more_files(), pytest.raises(SystemFault) as caught:
        source.read([2], new_array)
    assert caught.value.errno == errno.EMFILE
    assert caught.value.filename in (path, str(tmp_path / "s.tar"))
    assert all(isinstance(data, bytes) for data in read_all(source)), "and goes on once there are some again"


def test_with_few_file_descriptors_files_are_opened_one_at_a_time(tmp_path: Path, read_all: ReadAll) -> None:
    source, before = folder_of(tmp_path), resource.getrlimit(resource.RLIMIT_NOFILE)
    expected, lowest = read_all(source), os.open(os.devnull, os.O_RDONLY)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + 5, before[1]))
    try:
        found = read_all(source)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert found == expected and all(isinstance(data, bytes) for data in found)


def refusing(call: Callable[..., int], faults: Callable[[], dict[int, int]]) -> Callable[..., int]:
    """A function of read.c, after which the system seems to have refused these files, by number, with these errors."""

    def refuse(base: bytes, prefix: bytes, entries: bytes, address: int, count: int, last: int) -> int:
        failed, refused = call(base, prefix, entries, address, count, last), faults()
        block: Any = (ctypes.c_char * (count * local._PIECE.itemsize)).from_address(address)
        files = np.frombuffer(block, local._PIECE)
        for i, number in refused.items():
            if files["descriptor"][i] >= 0:
                os.close(files["descriptor"][i])
            files["fault"][i], files["descriptor"][i] = number, -1
        return failed + len(refused)

    return refuse


def test_every_other_error_stays_with_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those of a file that is opened only when it is read."""
    source = folder_of(tmp_path)
    monkeypatch.setattr(local, "_OPENED_IN_ADVANCE", 2)
    monkeypatch.setattr(local, "LOCAL_DELAYS", (0.0, 0.001, 0.001, 0.001))
    for place, name in ((0, "_open_files"), (5, "_read_files")):
        for number in (*RAISED, *OF_THE_FILE):
            with monkeypatch.context() as patch:
                patch.setattr(local, name, refusing(getattr(local, name), partial(dict, {place: number})))
                if number in RAISED:
                    with pytest.raises(SystemFault) as caught:
                        source.read(range(8), new_array)
                    assert (caught.value.errno, caught.value.filename) == (number, source.path(place))
                else:
                    errors = source.read(range(8), new_array).errors
                    assert [i for i, error in enumerate(errors) if error is not None] == [place]


def test_a_shortage_that_ends_in_time_is_no_error(
    tmp_path: Path, read_all: ReadAll, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, left = folder_of(tmp_path), [3]

    def faults() -> dict[int, int]:
        left[0] -= 1
        return {1: errno.ENFILE} if left[0] >= 0 else {}

    monkeypatch.setattr(local, "_open_files", refusing(local._open_files, faults))
    assert all(isinstance(data, bytes) for data in read_all(source))
    assert left[0] < 0


def test_a_file_system_that_has_no_memory_raises(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a library of fsspec reports it."""
    if not isinstance(source.storage, remote.RemoteStorage):
        pytest.skip("local reading allocates by the caller's function alone")

    async def fail(*arguments: Any) -> None:
        raise MemoryError("no more")

    monkeypatch.setattr(source.storage._http, "get", fail)
    with pytest.raises(MemoryError, match="no more"):
        source.read([0], new_array)


def test_the_limit_is_restored() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    with no_more_files(), pytest.raises(OSError, match="Too many open files"):
        open("/dev/null").close()
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == before
