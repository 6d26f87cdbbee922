"""Worker processes: what they import, what they do without, and that they end with the process that started them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpuflow.runtime.memory import _SharedMemory, memory_file, shared, shared_block
from tests.datasets import await_children, children, python
from tests.runtime.pool_worker import SECONDS, ask, pids_of, pool_of, state, wait_until

ROOT = Path(__file__).parents[2]


def poison(folder: Path) -> Path:
    """A folder of modules that note it if they are imported, named as modules that each start imports."""
    folder.mkdir()
    for name in ("json", "pickle", "signal", "torch", "numpy", "sitecustomize"):
        (folder / f"{name}.py").write_text(f"open({str(folder / 'imported')!r}, 'a').write({name!r})\n")
    return folder


START = """
import os, sys
from tests.runtime.pool_worker import ask, pool_of
if len(sys.argv) > 1:
    os.chdir(sys.argv[1])
with pool_of(2) as pool:
    assert len(pool) == 2
    file, _, paths = ask(pool, "mine")
    print(file, all(map(os.path.isabs, paths)))
"""


# --- imports ----------------------------------------------------------------------------------------------------------


def test_workers_import_nothing_from_the_current_directory(tmp_path: Path) -> None:
    bad, script = poison(tmp_path / "bad"), tmp_path / "script.py"
    script.write_text(START)
    (tmp_path / "mine.py").touch()
    done = python(script, cwd=bad, PYTHONPATH=str(ROOT))
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{tmp_path / 'mine.py'} True\n", "")
    assert not (bad / "imported").exists()


def test_a_module_beside_an_interactive_start_is_found_after_a_change_of_directory(tmp_path: Path) -> None:
    """There sys.path begins with '', which for this process now is another directory, and a worker must not see."""
    bad = poison(tmp_path / "bad")
    (tmp_path / "mine.py").touch()
    done = python(START, str(bad), cwd=tmp_path, PYTHONPATH=str(ROOT))
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{tmp_path / 'mine.py'} True\n", "")
    assert not (bad / "imported").exists()


def test_import_paths_may_be_relative_or_no_text(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "path", [tmp_path, *sys.path, "some/where", ""])
    with pool_of(1) as pool:
        assert len(pool) == 1
        _, _, paths = ask(pool, "json")
        assert all(map(os.path.isabs, paths))


# --- without shared memory --------------------------------------------------------------------------------------------


def refuse(name: str, flags: int = 0) -> int:
    """As a sandbox does."""
    raise PermissionError(1, "Operation not permitted")


@pytest.fixture
def no_regions(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process has no shared memory yet: what earlier tests still refer to would be cut up further."""
    monkeypatch.setattr("gpuflow.runtime.memory._memory", _SharedMemory())


@pytest.mark.usefixtures("no_regions")
def test_without_files_in_memory_there_are_no_workers_and_one_message(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(os, "memfd_create", refuse)
    before = children()
    with pool_of(2) as pool:
        assert len(pool) == 0
        memory = shared(100)
    assert len(memory) == 100 and shared_block(memory) is None
    assert [record.message for record in caplog.records] == [
        "no process to answer with: [Errno 1] Operation not permitted; threads answer instead"
    ]
    assert children() == before


@pytest.mark.usefixtures("no_regions")
def test_where_python_knows_no_file_in_memory_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    with pytest.raises(OSError, match=r"this Python has no os\.memfd_create"):
        memory_file("test")
    assert shared_block(shared(100)) is None


# --- the end ----------------------------------------------------------------------------------------------------------


def test_a_worker_that_is_lost_costs_the_others_nothing() -> None:
    before = children()
    with pool_of(3) as pool:
        assert len(await_children(3, before)) == 3
        pool._servers[0].kill(0)  # the fork server
        assert wait_until(lambda: len(children() - before) <= 1), "its children have another parent now"
        answers = [ask(pool, "json") for _ in range(3)]
        assert len([answer for answer in answers if answer is not None]) >= 2
        left = pids_of(pool)[1:]
        assert all(state(pid) for pid in left)
    assert wait_until(lambda: all(state(pid) in ("", "Z") for pid in left))


KILLED = """
import os, signal, time
from tests.runtime.pool_worker import pids_of, pool_of
with pool_of(3) as pool:
    pids = pids_of(pool)
    child = os.fork()
    if child == 0:
        time.sleep(300)
    print(child, *pids, flush=True)
    os.close(1)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_workers_end_with_a_process_that_is_killed_and_leaves_a_child() -> None:
    """The child has copies of the ends of the workers' connections."""
    with subprocess.Popen(
        [sys.executable, "-c", KILLED], cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stdout is not None
        child, *pids = map(int, process.stdout.readline().split())
        try:
            assert process.wait(SECONDS) == -9
            assert len(pids) == 3 and state(child) in "SRD"
            assert wait_until(lambda: all(state(pid) in ("", "Z") for pid in pids)), [state(pid) for pid in pids]
        finally:
            os.kill(child, 9)


CONTAINER = """
import os, sys
from tests.runtime.pool_worker import pool_of, state
assert os.getpid() == 1
for trial in range(6):
    with pool_of(4) as pool:
        if trial == 5:
            pool._servers[0].kill(0)
    left = {int(name): state(int(name)) for name in os.listdir("/proc") if name.isdecimal() and name != "1"}
    if any(left.values()):
        sys.exit(f"left behind: {left}")
print("nothing left")
"""
NAMESPACE = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc"]


def test_process_1_keeps_no_zombies() -> None:
    """In a container the training often is process 1, which becomes the parent of each process that loses its own."""
    permitted = subprocess.run([*NAMESPACE, "true"], capture_output=True, check=False, timeout=SECONDS)
    if permitted.returncode:
        pytest.skip(f"no namespace of processes can be made here: {permitted.stderr.decode()}")
    done = subprocess.run(
        [*NAMESPACE, sys.executable, "-c", CONTAINER],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=2 * SECONDS,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "nothing left\n"), done.stderr
