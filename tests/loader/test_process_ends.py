"""Ctrl-C, the end of a script and a fork in the middle of an epoch: the process ends, and says only what it must."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.datasets import deadline, make_photos, write_config
from tests.forking import Interpreter

CTRL_C_SECONDS = 60.0


@pytest.fixture(autouse=True)
def _in_time() -> Iterator[None]:
    with deadline(300):
        yield


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("ends")
    make_photos(root / "photos", classes=3, each=8)
    return write_config(root / "x.yaml", root / "photos")


# --- Ctrl-C -----------------------------------------------------------------------------------------------------------

CTRL_C = """
from tests.datasets import *
seconds, where = {seconds}, {where!r}
loader = loader_of(TappedSource(MemorySource.of(600), Slow(seconds)), batch_size=8, timeout=60)
if where == "first batch":
    threading.Timer(0.1, lambda: print("ready", flush=True)).start()
for epoch in range(1000):
    for images, labels in loader:
        if where == "iterating" and epoch == 0:
            print("ready", flush=True)
            where = ""
        if where == "body":
            print("ready", flush=True)
            time.sleep(60)
"""


def without_what_a_busy_machine_adds(noise: str) -> list[str]:
    """The lines of stderr without those that say that a thread, or SPDL, was too slow to end in time."""
    slow = "a thread stays behind", "RuntimeWarning: "
    return [line for line in noise.strip().splitlines() if not any(text in line for text in slow)]


@pytest.mark.parametrize(
    ("where", "seconds", "delay"),
    [("first batch", 0.05, 0.0), ("body", 0.0, 0.05), ("iterating", 0.0005, 0.0), ("iterating", 0.0, 0.33)],
)
def test_ctrl_c_ends_the_process(where: str, seconds: float, delay: float, interpreter: Interpreter) -> None:
    with interpreter.start(CTRL_C.format(seconds=seconds, where=where)) as process:
        process.await_output("ready\n")
        time.sleep(delay)
        os.kill(process.pid, signal.SIGINT)
        process.wait(CTRL_C_SECONDS)
    noise = process.stderr
    assert process.returncode == -signal.SIGINT, noise
    lines = without_what_a_busy_machine_adds(noise)
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[-1] == "KeyboardInterrupt"
    assert noise.count("Traceback") == 1, noise
    assert not [name for name in os.listdir("/dev/shm") if str(process.pid) in name]


def test_ctrl_c_while_an_epochs_thread_starts_leaves_nothing(interpreter: Interpreter) -> None:
    """`Thread.start` on the main thread leaves about one in 400 listed, and raises RuntimeError for one in 2,000."""
    code = """
import random, signal, threading, time
from gpuflow.loader.epoch import EpochRun

class Running:
    def stop(self, seconds):
        return True

interrupted = 0
interrupts = False

# Interrupts a trial once: the alarm of an earlier one may come late, as any thread may receive it.
def ring(*_):
    global interrupts
    if interrupts:
        interrupts = False
        signal.raise_signal(signal.SIGINT)

signal.signal(signal.SIGALRM, ring)
for trial in range(4000):
    try:
        interrupts = True
        signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-6, 3e-4))
        run = EpochRun(Running, str)
        interrupts = False
    except KeyboardInterrupt:
        interrupted += 1
signal.setitimer(signal.ITIMER_REAL, 0)
run = None
end = time.monotonic() + 8
while threading.active_count() > 1 and time.monotonic() < end:
    time.sleep(0.05)
print(interrupted > 100, [thread.name for thread in threading.enumerate()])
"""
    done = interpreter.run(code, seconds=100)
    assert (done.returncode, done.stdout) == (0, "True ['MainThread']\n"), done.stdout + done.stderr


def test_ctrl_c_while_an_epoch_begins_ends_the_program(config: Path, interpreter: Interpreter) -> None:
    """SPDL has the interpreter stop its thread before waiting for it, but just after that thread has started. Here the
    interpreter begins to end in between."""
    code = """
import os, signal, sys, threading, time
import gpuflow

register = threading._register_atexit

def interrupted(*arguments):
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(2)
    register(*arguments)

loader = gpuflow.load(sys.argv[1])
threading._register_atexit = interrupted
for batch in loader:
    pass
"""
    done = interpreter.run(code, str(config), seconds=20)
    assert without_what_a_busy_machine_adds(done.stderr)[-1] == "KeyboardInterrupt", done.stderr
    assert done.stderr.count("Traceback") == 1, done.stderr
    assert done.returncode in (-signal.SIGINT, 1), "1 if a thread has evaluated text since then"


def test_ctrl_c_at_any_moment_leaves_nothing(config: Path, interpreter: Interpreter) -> None:
    """Interrupts 40 loops of one process, each a little later and each three times, as an impatient user does.

    The later ones meet the cleaning up after the first. What was interrupted can go on.
    """
    code = """
import signal, sys
from tests.datasets import *
loader = gpuflow.load(sys.argv[1])
epoch_rows(loader)
before = set(os.listdir("/proc/self/fd"))
left = done = 0

def ring(*_):
    global left
    if left:
        left -= 1
        signal.raise_signal(signal.SIGINT)

# Interrupts a loop after `first` seconds and twice more. All of it is within `try`: an alarm may come late.
def absorb(depth, first):
    global left
    try:
        if depth:
            absorb(depth - 1, first)
        else:
            left = 3
            signal.setitimer(signal.ITIMER_REAL, first, 0.02)
        while left:
            for batch in loader:
                if not left:
                    break
    except KeyboardInterrupt:
        pass

signal.signal(signal.SIGALRM, ring)
for trial in range(40):
    absorb(3, 0.001 + 0.003 * trial)
    done += left == 0
signal.setitimer(signal.ITIMER_REAL, 0)
assert len(epoch_rows(loader)) == 6
loader.close()
gc.collect()
end = time.monotonic() + 8
while threading.active_count() > 1 and time.monotonic() < end:
    time.sleep(0.05)
print(done, [thread.name for thread in threading.enumerate()], len(set(os.listdir("/proc/self/fd")) - before))
"""
    done = interpreter.run(code, str(config), seconds=100)
    assert (done.returncode, done.stdout) == (0, "40 ['MainThread'] 0\n"), done.stdout + done.stderr
    assert "never awaited" not in done.stderr


@pytest.mark.parametrize("end", ["", "import sys; sys.exit()"])
def test_a_script_may_end_in_the_middle_of_an_epoch(end: str, interpreter: Interpreter) -> None:
    code = f"""
from tests.datasets import *
loader = loader_of(TappedSource(MemorySource.of(200), Slow(0.002)))
epoch = iter(loader)
next(epoch)
{end}
"""
    done = interpreter.run(code)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_script_that_fails_shows_its_own_error_alone(interpreter: Interpreter) -> None:
    code = """
from tests.datasets import *
loader = loader_of(TappedSource(MemorySource.of(200), Slow(0.002)))
for images, labels in loader:
    raise ValueError("mine")
"""
    done = interpreter.run(code, seconds=30)
    assert done.returncode == 1
    assert done.stderr.count("Traceback") == 1
    assert done.stderr.splitlines()[-1] == "ValueError: mine"


def test_a_script_that_holds_an_iterator_ends_silently(interpreter: Interpreter) -> None:
    """At the end of the process, when the module of its class has no globals any more."""
    code = "loader = loader_of(MemorySource.of(42), threads=2)\nbatches = iter(loader)\nnext(batches)\nprint('end')"
    done = interpreter.run(f"from tests.datasets import *\n{code}")
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")


# --- forks of the user ------------------------------------------------------------------------------------------------

FORKS = """
import sys, warnings, weakref
from tests.datasets import *

def locks_of(root):
    \"\"\"Every lock that is reachable from a loader through gpuflow's own objects.\"\"\"
    found, seen, queue = [], set(), [root]
    while queue:
        value = queue.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, weakref.ref):
            queue.append(value())
        elif hasattr(value, "acquire") and type(value).__module__ in ("_thread", "threading"):
            found.append(value)
        elif isinstance(value, (list, tuple, set, dict)):
            queue += list(value.values()) if isinstance(value, dict) else list(value)
        elif type(value).__module__.startswith("gpuflow"):
            queue += list(getattr(value, "__dict__", {}).values())
            slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
            queue += [getattr(value, name) for name in slots if name != "__weakref__" and hasattr(value, name)]
    return found

def hold(locks, held, release):
    for lock in locks:
        assert lock.acquire(timeout=20)
    held.set()
    release.wait(100)
    for lock in locks:
        lock.release()

def forked(end, loader, batches):
    \"\"\"The exit code of a child that ends in this way; -9 if it hangs.\"\"\"
    child = os.fork()
    if child == 0:
        end(loader, batches)
        sys.exit(3)
    deadline = time.monotonic() + 180
    while (found := os.waitpid(child, os.WNOHANG)) == (0, 0):
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
        time.sleep(0.01)
    return os.waitstatus_to_exitcode(found[1])

def leave(loader, batches):
    pass

def close(loader, batches):
    loader.close()

def drop(loader, batches):
    batches.end("dropped")

def go_on(loader, batches):
    for iterate in (lambda: next(batches), lambda: iter(loader)):
        try:
            iterate()
        except gpuflow.LoaderError as error:
            assert "does not work in its forked child" in str(error), error
        else:
            sys.exit(4)

warnings.simplefilter("ignore", DeprecationWarning)  # of forks in a process with threads, from Python 3.12 on
loader = loader_of(MemorySource.of(42), threads=4, processes=2)
batches = iter(loader)
next(batches)
locks = locks_of(loader)
held, release = threading.Event(), threading.Event()
holder = threading.Thread(target=hold, args=(locks, held, release))
holder.start()
assert held.wait(30)
codes = [forked(end, loader, batches) for end in (leave, close, drop, go_on)]
release.set()
holder.join()
print(codes, len(locks) >= 8, flush=True)
assert len(list(batches)) == 10
loader.close()
"""


@pytest.mark.slow
def test_a_forked_child_can_exit_whatever_lock_was_held_at_the_fork(interpreter: Interpreter) -> None:
    done = interpreter.run(FORKS, seconds=300)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[3, 3, 3, 3] True\n", "")
