"""Chunks decoded by processes: the same batches and faults, also when a process is lost, and nothing left of any."""

from __future__ import annotations

import gc
import os
import pickle
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import fsspec
import pytest
from numpy.typing import NDArray

import gpuflow
from gpuflow.config import RunSpec
from gpuflow.config.resources import processes_of
from gpuflow.errors import BadSampleError
from gpuflow.execute.cpu.workers import Outcome
from gpuflow.loader.batch import Chunk
from gpuflow.loader.decode import ChunkReader, DecodeWorkers
from gpuflow.loader.loader import Loader
from gpuflow.pipeline.stage import Keys
from gpuflow.sources import Allocate, Payload, Source, open_source, source_spec
from tests.datasets import (
    Entries,
    MemorySource,
    Raise,
    TappedSource,
    await_children,
    children,
    deadline,
    epoch_rows,
    fault_of,
    loader_of,
    make_photos,
    nothing_left_behind,
    program,
    rows,
    truncate,
    write_config,
)
from tests.forking import Interpreter

ROOT = Path(__file__).parents[2]
COLOURED: Entries = [
    {"decode": {}},
    {"random_resized_crop": {"size": 24}},
    {"flip": {"horizontal": 0.5}},
    {"color_jitter": {"brightness": 0.4, "hue": 0.1}},
    {"torchvision": {"name": "RandomPerspective", "parameters": (("p", 0.7),)}},
    {"normalize": {"dtype": "bfloat16", "layout": "nhwc"}},
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_photos(tmp_path / "photos", classes=3, each=14)
    return tmp_path / "photos"


@pytest.fixture(scope="module")
def others(interpreter: Interpreter) -> set[int]:
    """The processes that are not those of `shared_loader`."""
    return children()


@pytest.fixture(scope="module")
def shared_loader(others: set[int], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loader]:
    """Of the photographs of `source`, for tests that leave its processes as they are: they take seconds to start."""
    folder = tmp_path_factory.mktemp("shared") / "photos"
    make_photos(folder, classes=3, each=14)
    photos = open_source(source_spec(folder=str(folder)))
    with loader_of(photos, threads=5, processes=3, batch_size=4, prefetch=3) as loader:
        yield loader
    photos.close()


def made_elsewhere(loader: Loader, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each chunk from now on was decoded by a process."""
    found: list[bool] = []
    decode = DecodeWorkers.decode

    def counted(
        self: DecodeWorkers,
        indices: Sequence[int],
        keys: Keys,
        slots: NDArray[Any],
        start: int,
        *,
        sizes: bool = False,
    ) -> Outcome | None:
        outcome = decode(self, indices, keys, slots, start, sizes=sizes)
        found.append(outcome is not None)
        return outcome

    monkeypatch.setattr(DecodeWorkers, "decode", counted)
    with deadline(180):
        while (workers := loader._feed.decoder.workers) is None or workers.counts()["starting"]:
            with suppress(BadSampleError):
                for _ in loader:
                    time.sleep(0.05)
    loader._feed.wait()  # an epoch that an error ended may keep the processes busy for a while
    found.clear()
    loader.set_epoch(0)
    return found


def test_batches_are_those_of_threads(source: Source, shared_loader: Loader, monkeypatch: pytest.MonkeyPatch) -> None:
    with loader_of(source, threads=2) as by_threads:
        expected = [epoch_rows(by_threads) for _ in range(2)]
    elsewhere = made_elsewhere(shared_loader, monkeypatch)
    assert [epoch_rows(shared_loader) for _ in range(2)] == expected
    assert sum(elsewhere) >= 0.9 * len(elsewhere), "hardly any by a thread that found no process free"


def test_coloured_batches_are_those_of_threads(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    with loader_of(source, COLOURED, threads=2) as by_threads:
        expected = [epoch_rows(by_threads) for _ in range(2)]
    with loader_of(source, COLOURED, threads=5, processes=2, batch_size=4, prefetch=3) as loader:
        elsewhere = made_elsewhere(loader, monkeypatch)
        assert [epoch_rows(loader) for _ in range(2)] == expected
        assert sum(elsewhere) >= 0.9 * len(elsewhere), "hardly any by a thread that found no process free"
        stages = loader.stats()["stages"]
        assert stages["read"]["samples"] == stages["decode"]["samples"] == 42
        assert stages["read"]["bytes"] > 0 < stages["decode"]["cpu_s"]
        assert stages["decode"]["busy_share"] > 0


@pytest.mark.filterwarnings("ignore:3 of 42 samples are bad")
@pytest.mark.parametrize("policy", ["replace", "skip", "raise"])
def test_bad_samples_are_those_of_threads(
    policy: str, folder: Path, source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = sorted(folder.rglob("*.jpg"))
    truncate(files[3])
    files[20].unlink()
    files[30].write_bytes(b"no image")

    def result(loader: Loader) -> Any:
        if policy != "raise":
            return epoch_rows(loader)
        step, fault = fault_of(loader)
        return step, type(fault), str(fault)

    with loader_of(source, shuffle=False, policy=policy) as loader:
        expected = result(loader)
    with loader_of(source, shuffle=False, policy=policy, processes=2) as loader:
        elsewhere = made_elsewhere(loader, monkeypatch)
        assert result(loader) == expected
        if policy == "raise":  # which abandons the chunks that processes are at
            assert any(elsewhere)
        else:
            assert sum(elsewhere) >= 0.8 * len(elsewhere)
        assert loader.stats()["bad_distinct"] == (0 if policy == "raise" else 3)


def test_a_source_behind_urls_is_not_sent_to_processes(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Even where a plan asks for them: in a process, this file system would be empty."""
    memory = fsspec.filesystem("memory")
    memory.put(str(folder), "/", recursive=True)
    before = children()
    with loader_of(open_source(source_spec(folder="memory://photos")), policy="raise", processes=2) as loader:
        assert sum(len(step) for step in epoch_rows(loader)) == 42
        assert children() == before
    assert "no process to decode with: files behind URLs are read by the process that opened them" in caplog.text
    memory.rm("/photos", recursive=True)


def test_an_epoch_can_be_resumed(source: Source, shared_loader: Loader, monkeypatch: pytest.MonkeyPatch) -> None:
    with loader_of(source) as loader:
        expected = epoch_rows(loader)
    made_elsewhere(shared_loader, monkeypatch)
    iterator = iter(shared_loader)
    for _ in range(3):
        next(iterator)
    state = shared_loader.state_dict()
    shared_loader.load_state_dict(state)
    assert epoch_rows(shared_loader) == expected[3:]


def test_a_killed_process_is_done_without(
    source: Source, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with loader_of(source) as loader:
        expected = epoch_rows(loader)
    before = children()
    with loader_of(source, threads=4, processes=2) as loader:
        elsewhere = made_elsewhere(loader, monkeypatch)
        assert loader.stats()["processes"] == {"at_work": 2, "starting": 0}
        for number, _ in enumerate(loader):
            if number == 2:
                for child in await_children(2, before):
                    os.kill(child, signal.SIGKILL)
        loader.set_epoch(0)
        elsewhere.clear()
        assert epoch_rows(loader) == expected
        assert not any(elsewhere)
        assert loader.stats()["processes"] == {"at_work": 0, "starting": 0}
    assert caplog.text.count("a process that decodes has ended") == 2
    assert "a process that decodes has ended" in caplog.text
    assert children() == before


def test_what_a_process_cannot_do_a_thread_does(
    source: Source, caplog: pytest.LogCaptureFixture, interpreter: Interpreter
) -> None:
    """A source with a lock, which cannot be pickled; and one whose class a worker process cannot import."""
    photos = MemorySource.of(9)
    with loader_of(photos) as loader:
        expected = epoch_rows(loader)
    photos.lock = threading.Lock()  # type: ignore[attr-defined]
    with loader_of(photos, processes=2) as loader:
        assert epoch_rows(loader) == expected
    assert "no process to decode with: cannot pickle '_thread.lock' object" in caplog.text
    code = """
from tests.datasets import *
class Mine(MemorySource): pass
if __name__ == "__main__":
    import logging; logging.basicConfig()
    with loader_of(Mine.of(9), processes=3, threads=4) as loader:
        end = time.monotonic() + 90
        while (workers := loader._feed.decoder.workers) is None or (
            workers.counts()["starting"] and time.monotonic() < end
        ):
            assert len(epoch_rows(loader)) == 3
    print("done")
"""
    done = interpreter.run(code)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
    assert "a process cannot decode: AttributeError(" in done.stderr
    assert done.stderr.count("a process cannot decode") == 1, "three have the same reason"


def test_what_a_stage_raises_is_raised_at_its_step(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    tapped = TappedSource(source, Raise(21, lambda: OSError("the disk is gone")))
    with loader_of(tapped, shuffle=False) as loader:
        expected = fault_of(loader)
    monkeypatch.setattr("gpuflow.loader.decode.DecodeWorkers.__init__", fixed_setup)
    with loader_of(tapped, threads=4, processes=2, shuffle=False) as loader:
        step, fault = fault_of(loader)
    assert (step, repr(fault)) == (expected[0], repr(expected[1]))


def fixed_setup(self: DecodeWorkers, program: Any, source: Any, **options: Any) -> None:
    """A lambda cannot be pickled: the processes get a source that raises by itself."""
    faulty: Any = Faulty(source.source)
    real_init(self, program, faulty, **options)


real_init = DecodeWorkers.__init__


class Faulty:
    """Raises where the sample 21 is read."""

    def __init__(self, source: Source) -> None:
        self.source = source

    def read(self, indices: Sequence[int], allocate: Allocate) -> Payload:
        if 21 in indices:
            raise OSError("the disk is gone")
        return self.source.read(indices, allocate)


def test_nothing_is_left_behind(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    before = children()
    with nothing_left_behind():
        loader = loader_of(source, threads=4, processes=2)
        assert children() == before, "nothing before the first epoch"
        made_elsewhere(loader, monkeypatch)
        next(iter(loader))
        loader.close()
        assert children() == before
    with nothing_left_behind():
        loader = loader_of(source, threads=4, processes=2)
        iterator = iter(loader)
        next(iterator)
        await_children(2, before)
        del iterator, loader
        gc.collect()
    assert children() == before


def test_batches_that_are_kept_hold_no_descriptors(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither here nor in the processes: `list(loader)` may be as long as there is memory."""
    before = children()
    with loader_of(source, threads=4, processes=2, batch_size=1) as loader:
        elsewhere = made_elsewhere(loader, monkeypatch)
        processes = ["self", *map(str, await_children(2, before))]
        first = list(loader)
        held = [len(os.listdir(f"/proc/{process}/fd")) for process in processes]
        kept = [batch for _ in range(3) for batch in loader]
        assert sum(elsewhere) >= 0.9 * len(elsewhere)
        after = [len(os.listdir(f"/proc/{process}/fd")) for process in processes]
        assert len(kept) == 3 * len(first) == 126
        assert all(now <= then + 6 for now, then in zip(after, held, strict=True)), (held, after)
        loader.set_epoch(0)
        assert [rows(batch) for batch in first] == epoch_rows(loader)


def test_processes_share_what_they_have_imported(
    shared_loader: Loader, others: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that was started alone has 280 MB, nearly all torch's."""
    made_elsewhere(shared_loader, monkeypatch)
    for child in await_children(3, others):
        rows = (line.split() for line in Path(f"/proc/{child}/smaps_rollup").read_text().splitlines()[1:])
        kib = {name: int(value) for name, value, *_ in rows}
        assert kib["Private_Dirty:"] + kib["Private_Clean:"] < 0.3 * kib["Rss:"]


def test_nothing_is_decoded_in_place_of_a_process_once_the_epoch_was_ended(
    source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that then began to decode could outlive the interpreter, which ends the process by an abort."""
    asked, ended, read = threading.Event(), threading.Event(), list[Chunk]()

    def no_answer(self: DecodeWorkers, *arguments: Any, **options: Any) -> None:
        asked.set()
        assert ended.wait(60)

    def release() -> None:
        end = time.monotonic() + 60
        while not admission.stop and time.monotonic() < end:
            time.sleep(0.01)
        ended.set()

    with loader_of(source, processes=2) as loader:
        made_elsewhere(loader, monkeypatch)
        monkeypatch.setattr(DecodeWorkers, "decode", no_answer)
        monkeypatch.setattr(ChunkReader, "read_chunk", lambda self, epoch, chunk: read.append(chunk))
        batches: Any = iter(loader)
        assert asked.wait(60)
        admission = batches._run._running.admission
        releasing = threading.Thread(target=release)
        releasing.start()
        loader.reset()
        releasing.join(60)
        loader._feed.wait()
        assert admission.stop and read == []


def test_ctrl_c_ends_a_loop_and_leaves_no_process(folder: Path, tmp_path: Path, interpreter: Interpreter) -> None:
    config = write_config(tmp_path / "x.yaml", folder, run={"threads": 4, "processes": 2})
    code = """
import os, signal, sys, threading, time
import gpuflow
with gpuflow.load(sys.argv[1]) as loader:
    batches = 0
    try:
        while True:
            for batch in loader:
                time.sleep(0.01)
                batches += loader.stats()["processes"]["at_work"] == 2
                if batches == 30:  # by then each has answered, which takes long for the first time on a busy machine
                    batches += 1
                    threading.Timer(0.2, os.kill, [os.getpid(), signal.SIGINT]).start()
    except KeyboardInterrupt:
        print("interrupted")
print(open(f"/proc/self/task/{os.getpid()}/children").read().split())
"""
    done = interpreter.run(code, str(config))
    assert (done.returncode, done.stdout, done.stderr) == (0, "interrupted\n[]\n", "")


@pytest.mark.parametrize(
    ("threads", "processes", "samples", "in_python", "expected"),
    [
        (1, "auto", 1_000_000, True, 0),
        (2, "auto", 1_000_000, True, 2),
        (16, "auto", 10_000, True, 16),
        (16, "auto", 9_999, True, 0),
        (16, "auto", 1_000_000, False, 0),
        (16, 0, 1_000_000, True, 0),
        (16, 3, 10, False, 3),
        (2, 5, 10, True, 2),
    ],
)
def test_how_many_processes(threads: int, processes: Any, samples: int, in_python: bool, expected: int) -> None:
    assert processes_of(RunSpec(threads=threads, processes=processes), samples, in_python=in_python) == expected


def test_the_configuration_says_how_many(folder: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path / "x.yaml", folder)
    before = children()
    for overrides, expected in ((["run.processes=1"], 1), ([], 0), (["run.processes=2", "run.readers=1"], 0)):
        with gpuflow.load(config, overrides=overrides) as loader:
            epoch_rows(loader)
            await_children(expected, before)


def test_slots_in_the_middle_of_a_batch(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    """With more threads than chunks of one batch, and chunks that do not divide it."""
    options: dict[str, Any] = {"batch_size": 10, "drop_last": False}
    with loader_of(source, **options) as loader:
        expected = epoch_rows(loader)
    with loader_of(source, threads=7, processes=1, prefetch=1, **options) as loader:
        assert loader._feed._plan.chunk_size == 3
        made_elsewhere(loader, monkeypatch)
        assert epoch_rows(loader) == expected


@pytest.mark.parametrize(
    "entries", [COLOURED, [{"decode": {}}, {"resize": {"shorter": 30}}, {"center_crop": {"size": 20}}]]
)
def test_a_program_can_be_told_to_a_process(entries: Any) -> None:
    made = program(entries)
    assert repr(pickle.loads(pickle.dumps(made))) == repr(made)
