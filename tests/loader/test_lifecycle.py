"""Closing, breaking and an exception in the loop leave nothing behind, and memory does not grow."""

from __future__ import annotations

import gc
import json
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import ArrayLike, NDArray

import gpuflow
from tests.datasets import (
    Block,
    Entries,
    MemorySource,
    TappedSource,
    deadline,
    epoch_rows,
    loader_of,
    make_photos,
    nothing_left_behind,
    resident_kib,
    write_config,
)
from tests.forking import Interpreter

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _in_time() -> Iterator[None]:
    with deadline(300):
        yield


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("lifecycle")
    make_photos(root / "photos", classes=3, each=8)
    return write_config(root / "x.yaml", root / "photos")


# --- the ways in which a loop ends ------------------------------------------------------------------------------------


class Unexpected(Exception):
    """Raised by a loop's body."""


def whole_epoch(loader: gpuflow.Loader) -> None:
    epoch_rows(loader)
    loader.close()


def left_by_break(loader: gpuflow.Loader) -> None:
    for _ in loader:
        break
    loader.close()


def exception_in_the_body(loader: gpuflow.Loader) -> None:
    def loop() -> None:
        with loader:
            for _ in loader:
                raise Unexpected

    with pytest.raises(Unexpected):
        loop()


def closed_in_the_body(loader: gpuflow.Loader) -> None:
    batches = iter(loader)
    next(batches)
    loader.close()
    with pytest.raises(gpuflow.LoaderError, match="the loader was closed"):
        next(batches)


def never_iterated(loader: gpuflow.Loader) -> None:
    loader.close()


def closed_at_once(loader: gpuflow.Loader) -> None:
    iter(loader)
    epoch = iter(loader)
    loader.close()
    del epoch


def forgotten_after_an_epoch(loader: gpuflow.Loader) -> None:
    epoch_rows(loader)


def forgotten_after_a_break(loader: gpuflow.Loader) -> None:
    for _ in loader:
        break


def forgotten_in_an_epoch(loader: gpuflow.Loader) -> None:
    next(iter(loader))


def forgotten_in_a_cycle(loader: gpuflow.Loader) -> None:
    cycle: list[object] = [loader, iter(loader)]
    cycle.append(cycle)


def over_after_a_restored_state(loader: gpuflow.Loader) -> None:
    loader.load_state_dict({**loader.state_dict(), "position": 20})
    whole_epoch(loader)


ENDS = [
    whole_epoch,
    left_by_break,
    exception_in_the_body,
    closed_in_the_body,
    never_iterated,
    closed_at_once,
    forgotten_after_an_epoch,
    forgotten_after_a_break,
    forgotten_in_an_epoch,
    forgotten_in_a_cycle,
    over_after_a_restored_state,
]


@pytest.mark.parametrize("end", ENDS, ids=lambda end: end.__name__)
def test_nothing_is_left_behind(end: Callable[[gpuflow.Loader], None], config: Path, tmp_path: Path) -> None:
    with nothing_left_behind():
        end(gpuflow.load(config, overrides=[f"run.bad_file={tmp_path / 'bad.jsonl'}"]))


@pytest.mark.parametrize("last", [2, 20])  # of the steps 0 to 19
def test_a_loader_that_only_its_loop_holds_is_closed_when_the_loop_ends(last: int) -> None:
    """As in `for images, labels in gpuflow.load(file)`."""
    closed = threading.Event()

    def loader() -> gpuflow.Loader:
        made = loader_of(MemorySource.of(60), batch_size=3)
        weakref.finalize(made, closed.set)
        return made

    with nothing_left_behind():
        for batch in loader():
            assert not closed.is_set()
            if batch.step == last:
                break
        assert closed.is_set()


def test_closing_wakes_a_thread_that_waits_for_a_batch() -> None:
    tap, errors = Block(4), list[BaseException]()
    loader = loader_of(TappedSource(MemorySource.of(60), tap), shuffle=False)

    def consume(batches: Iterator[gpuflow.Batch]) -> None:
        try:
            list(batches)
        except BaseException as error:
            errors.append(error)

    with nothing_left_behind(seconds=20.0):
        consumer = threading.Thread(target=consume, args=(iter(loader),))  # which has begun the epoch
        consumer.start()
        assert tap.reached.wait(20)
        closing = threading.Thread(target=loader.close)
        closing.start()
        consumer.join(20)
        tap.release.set()
        closing.join(20)
    assert not consumer.is_alive()
    assert [str(error) for error in errors] == [
        "epoch 0 was ended because the loader was closed; iterate the loader anew"
    ]


def test_a_break_ends_the_threads_and_does_not_wait_for_them(config: Path) -> None:
    with gpuflow.load(config) as loader:
        with nothing_left_behind(seconds=20.0):
            waits = []
            for _ in range(15):
                start = 0.0
                for _batch in loader:
                    assert threading.active_count() > 1
                    start = time.monotonic()
                    break
                waits.append(time.monotonic() - start)
            assert min(waits) < 0.05
        with nothing_left_behind(seconds=0.0):
            for _ in loader:
                break
            loader.close()


class CollectingOrder:
    """An order that runs Python's garbage collector on the thread that asks for indices."""

    def __init__(self, size: int) -> None:
        self.size, self.armed = size, False

    def indices(self, epoch: int, positions: ArrayLike) -> NDArray[np.int64]:
        if self.armed:
            gc.collect()
        return np.array(positions, np.int64)

    digest = ""

    def candidates(self, epoch: int, position: int) -> int:
        return self.size

    def replacement(self, epoch: int, position: int, attempt: int) -> int:
        return attempt


@pytest.mark.parametrize("where", ["in the pipeline's event loop", "in a reading thread"])
def test_an_epoch_may_be_collected_on_the_pipelines_own_threads(where: str) -> None:
    """A forgotten epoch in a reference cycle is collected on the thread that allocates next."""
    order = CollectingOrder(4000)

    def before(index: int) -> None:
        time.sleep(0.002)
        if order.armed and where == "in a reading thread":
            gc.collect()

    source = TappedSource(repeated(40, 100), before)
    with nothing_left_behind():
        loader = loader_of(source, shuffle=False, order=None if where == "in a reading thread" else order)
        gc.collect()
        gc.disable()
        try:
            cycle: list[object] = [iter(loader)]
            cycle.append(cycle)
            del cycle
            order.armed = True
            end = time.monotonic() + 10
            while loader._active() is not None and time.monotonic() < end:
                time.sleep(0.01)
            assert loader._active() is None
        finally:
            gc.enable()
        loader.close()


def repeated(count: int, times: int) -> MemorySource:
    """`count` photographs, over and over."""
    return MemorySource(MemorySource.of(count).images * times)


# --- an epoch that cannot begin ---------------------------------------------------------------------------------------


class FewThreads:
    """Lets only a limited number of threads run at once, as the kernel does. refused: whether one more was wanted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._start, self._most, self.refused = threading.Thread.start, 0, False
        monkeypatch.setattr(threading.Thread, "start", lambda thread: self._start_one(thread))

    def allow(self, more: int) -> None:
        self._most, self.refused = threading.active_count() + more, False

    def _start_one(self, thread: threading.Thread) -> None:
        if threading.active_count() >= self._most:
            self.refused = True
            raise RuntimeError("can't start new thread")
        self._start(thread)


@pytest.mark.parametrize("readers", [0, 2])
def test_threads_that_cannot_start(readers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever thread of an epoch it is: a clear error, nothing left behind, and the epoch can be run later."""
    with loader_of(MemorySource.of(12), threads=2, readers=readers) as loader:
        whole = epoch_rows(loader)
    few = FewThreads(monkeypatch)
    with nothing_left_behind(), loader_of(MemorySource.of(12), threads=2, readers=readers) as loader:
        for allowed in range(5 + readers):
            few.allow(allowed)
            with nothing_left_behind(seconds=0.0), pytest.raises(gpuflow.LoaderError) as caught:
                iter(loader)
            assert few.refused
            assert str(caught.value) == (
                "epoch 0 cannot begin: can't start new thread; lower run.threads, or raise this process's limits of "
                "threads (ulimit -u, a container's pids), open files (ulimit -n) and memory"
            )
            del caught
            assert (loader.state_dict()["epoch"], loader.state_dict()["position"]) == (0, 0)
        few.allow(5 + readers)  # the epoch's own thread, those that read and decode, and two of SPDL
        assert epoch_rows(loader) == whole
        assert not few.refused


def test_file_descriptors_that_there_are_not(interpreter: Interpreter) -> None:
    code = """
import resource, time
from tests.datasets import *
with loader_of(MemorySource.of(12)) as loader:
    whole = epoch_rows(loader)
loader = loader_of(MemorySource.of(12))
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
first_free = os.dup(0)
os.close(first_free)
texts, start = [], time.monotonic()
for more in range(20):
    resource.setrlimit(resource.RLIMIT_NOFILE, (first_free + more, hard))
    try:
        iter(loader)
        break
    except gpuflow.LoaderError as error:
        texts.append(str(error))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert [thread.name for thread in threading.enumerate()] == ["MainThread"]
assert time.monotonic() - start < 25, "it waits for nothing that cannot come"
print(len(texts), set(texts))
loader.set_epoch(0)
assert epoch_rows(loader) == whole
loader.close()
"""
    done = interpreter.run(code)
    assert done.returncode == 0, done.stderr
    count, texts = done.stdout.split(" ", 1)
    assert int(count) >= 3
    assert texts.strip() == str(
        {
            "epoch 0 cannot begin: [Errno 24] Too many open files; lower run.threads, or raise this process's limits "
            "of threads (ulimit -u, a container's pids), open files (ulimit -n) and memory"
        }
    )
    assert done.stderr == ""


# --- many cycles ------------------------------------------------------------------------------------------------------

MEASURE = """
import json, sys, threading
from tests.datasets import *

def measure():
    gc.collect()
    return [threading.active_count(), len(os.listdir("/proc/self/fd")), resident_kib()]

gc.collect()
gc.freeze()  # or each collection would visit all of torch
cycles, epochs = [], []
for cycle in range(int(sys.argv[2])):
    with gpuflow.load(sys.argv[1]) as loader:
        for _ in loader:
            break
    if cycle % 5 == 4:
        cycles.append(measure())
with gpuflow.load(sys.argv[1], overrides=["run.threads=2"]) as loader:
    for epoch in range(23):
        for images, labels in loader:
            pass
        epochs.append(measure())
print(json.dumps({"cycles": cycles, "epochs": epochs}))
"""


def measured(cycles: int, config: Path, interpreter: Interpreter) -> dict[str, list[list[int]]]:
    """Threads, file descriptors and KiB of memory of a process, after every fifth of its loaders and after epochs."""
    done = interpreter.run(MEASURE, str(config), str(cycles), seconds=110)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return {name: [list(map(int, row)) for row in rows] for name, rows in json.loads(done.stdout).items()}


@pytest.mark.slow
def test_a_hundred_cycles_leave_nothing(config: Path, interpreter: Interpreter) -> None:
    rows = measured(100, config, interpreter)["cycles"]
    assert len(rows) == 20
    assert {threads for threads, _, _ in rows} == {1}
    assert len({descriptors for _, descriptors, _ in rows}) == 1
    kib = [kib for _, _, kib in rows]
    assert np.median(kib[-5:]) - np.median(kib[2:7]) < 3_000, kib


def test_memory_has_no_slope_over_epochs(config: Path, interpreter: Interpreter) -> None:
    kib = np.array([kib for _, _, kib in measured(10, config, interpreter)["epochs"]][3:])
    slope = np.polyfit(np.arange(len(kib)), kib, 1)[0]
    assert slope < 150, f"grows by {slope:.0f} KiB an epoch: {kib.tolist()}"


def test_memory_does_not_grow_with_what_the_consumer_lets_go() -> None:
    """400 batches of 2.4 MB would be nearly a gigabyte."""
    stages: Entries = ({"decode": {}}, {"resize": {"height": 256, "width": 256}}, {"normalize": {}})
    source = repeated(40, 30)
    with loader_of(source, stages, batch_size=3, threads=1) as loader:
        batches = iter(loader)
        for _ in range(30):
            next(batches)
        before = resident_kib()
        for _ in range(100):
            next(batches)
        assert resident_kib() - before < 60_000


# --- what a loop leaves as it is --------------------------------------------------------------------------------------


def test_torchs_threads_are_left_as_they_are(config: Path) -> None:
    before = torch.get_num_threads()
    with gpuflow.load(config) as loader:
        for _ in loader:
            assert torch.get_num_threads() == before
    assert torch.get_num_threads() == before


def test_torchs_threads_are_left_as_they_are_where_several_threads_begin_epochs(interpreter: Interpreter) -> None:
    """As where two models are trained, or one is validated, on separate threads."""
    done = interpreter.run(SEVERAL)
    assert done.stdout == "{4}\n", done.stderr


SEVERAL = """
import threading, torch
from tests.datasets import MemorySource, loader_of
torch.set_num_threads(4)
found = set()

def train(loader):  # beginning an epoch is the first thing for which this thread needs torch
    for _ in range(3):
        for _ in loader:
            pass
    found.add(torch.get_num_threads())

for _ in range(8):
    loaders = [loader_of(MemorySource.of(8)) for _ in range(4)]
    threads = [threading.Thread(target=train, args=[loader]) for loader in loaders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for loader in loaders:
        loader.close()
last = threading.Thread(target=lambda: found.add(torch.get_num_threads()))
last.start()
last.join()
print(found)
"""


def test_a_generator_that_yields_from_a_loader_can_be_closed() -> None:
    with nothing_left_behind():
        loader = loader_of(MemorySource.of(24))

        def batches() -> Iterator[gpuflow.Batch]:
            while True:
                yield from loader

        generator = batches()
        for _ in range(8):
            next(generator)
        generator.close()  # type: ignore[attr-defined]
        assert len(list(loader)) == 6, "the next epoch runs"
        loader.close()
