"""Files read by processes: the same payloads, also when a process is lost, and nothing left of any."""

from __future__ import annotations

import gc
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import types
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from gpuflow.decode.baseline import rewrite_progressive
from gpuflow.errors import SourceError
from gpuflow.execute.chunk_scan import ChunkScan, ChunkScanner, Prescan
from gpuflow.execute.passes import passes_of
from gpuflow.loader.read_workers import ProcessStorage, scanned
from gpuflow.pipeline.stage import Keys
from gpuflow.pipeline.views import outputs_of
from gpuflow.runtime.buffers import BytePool
from gpuflow.runtime.memory import shared, shared_block
from gpuflow.sources import SPARE_BYTES, Payload, open_source, source_spec
from gpuflow.sources.storage import LocalStorage, Shard
from gpuflow.stages import Decode, Flip, Normalize, RandomResizedCrop, Torchvision
from tests import images
from tests.datasets import await_children, children
from tests.running import keys_of, program_of


@pytest.fixture
def files(tmp_path: Path) -> list[bytes]:
    """Files of many sizes, and what is no file or cannot be read."""
    rng = np.random.default_rng(0)
    for i in range(40):
        (tmp_path / f"{i}.jpg").write_bytes(rng.bytes(1 + 977 * i))
    (tmp_path / "empty.jpg").touch()
    (tmp_path / "directory.jpg").mkdir()
    names = [f"{i}.jpg" for i in range(40)]
    names[7:7] = ["empty.jpg", "directory.jpg", "missing.jpg"]
    return [os.fsencode(tmp_path / name) for name in names]


@pytest.fixture
def storage() -> Iterator[ProcessStorage]:
    storage = ProcessStorage(2)
    yield storage
    storage.close()


def alive(process: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{process}/status").read_text()
    except OSError:
        return False


def samples(payload: Payload) -> list[bytes | str]:
    return [error or payload.sample(i).tobytes() for i, error in enumerate(payload.errors)]


def read_here(paths: list[bytes]) -> list[bytes | str]:
    return samples(LocalStorage().read(paths, lambda size: np.empty(size, np.uint8)))


class Taken:
    """Counts what is asked for. Raises where it is to fail."""

    def __init__(self, failure: BaseException | None = None) -> None:
        self.sizes: list[int] = []
        self.failure = failure

    def __call__(self, size: int) -> NDArray[np.uint8]:
        self.sizes.append(size)
        if self.failure is not None:
            raise self.failure
        return shared(size + 9)


def test_files_are_read_elsewhere_into_memory_that_is_here(storage: ProcessStorage, files: list[bytes]) -> None:
    taken = Taken()
    payload = storage.read(files, taken)
    assert samples(payload) == read_here(files)
    assert payload.errors[7:10] == ["empty file", "is a directory", "no such file"]
    assert taken.sizes == [sum(payload.sizes) + SPARE_BYTES * len(payload)]
    assert shared_block(payload.buffer) is not None
    assert payload.cpu_s > 0, "this process did not read"


def test_ranges_are_read_elsewhere(storage: ProcessStorage, files: list[bytes]) -> None:
    status = os.stat(files[-1])
    shard = Shard(path=os.fsdecode(files[-1]), size=status.st_size, stamp=str(status.st_mtime_ns))
    missing = Shard(path="nowhere", size=shard.size, stamp="0")
    ranges = ([shard, shard, missing], [5, 20_000, 0], [1000, 7, 10])
    payload = storage.read_ranges(*ranges, Taken())
    here = LocalStorage().read_ranges(*ranges, lambda size: np.empty(size, np.uint8))
    assert samples(payload) == samples(here)
    assert payload.errors[2] == "no such file"
    assert payload.cpu_s > 0


def test_many_threads_read_at_a_time_also_more_than_there_are_processes(
    storage: ProcessStorage, files: list[bytes]
) -> None:
    pool = BytePool(make=shared)

    def work(number: int) -> tuple[int, list[bytes | str]]:
        payload = storage.read(files[number:], pool.acquire)
        found = samples(payload)
        pool.release(payload.buffer)
        return number, found

    with ThreadPoolExecutor(6) as threads:
        for number, found in threads.map(work, [*range(20)] * 10):
            assert found == read_here(files[number:])


def test_memory_that_no_other_process_can_map_is_filled_here(storage: ProcessStorage, files: list[bytes]) -> None:
    for _ in range(3):
        payload = storage.read(files, lambda size: np.empty(size, np.uint8))
        assert samples(payload) == read_here(files)
        assert payload.cpu_s == 0
    assert storage.read(files, Taken()).cpu_s > 0, "the process is still of use"


def test_released_memory_is_released_in_every_process(files: list[bytes]) -> None:
    before = children()
    storage = ProcessStorage(1)
    (child,) = children() - before
    descriptors = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        storage.read(files, Taken())
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= descriptors + 1
    payload = storage.read(files, Taken())  # tells the process
    assert shared_block(payload.buffer) is not None
    maps = Path(f"/proc/{child}/maps").read_text()
    assert maps.count("memfd:gpuflow") <= 2
    storage.close()


def test_what_a_killed_process_should_have_read_is_read_here(
    files: list[bytes], caplog: pytest.LogCaptureFixture
) -> None:
    before = children()
    storage = ProcessStorage(1)
    (child,) = children() - before
    assert storage.read(files, Taken()).cpu_s > 0
    os.kill(child, signal.SIGKILL)
    taken = Taken()
    assert samples(storage.read(files, taken)) == read_here(files)
    assert len(taken.sizes) == 1
    assert "a process that reads has ended" in caplog.text
    caplog.clear()
    assert samples(storage.read(files, Taken())) == read_here(files)
    assert not caplog.text
    storage.close()
    assert children() == before


def test_a_process_that_dies_with_a_buffer_in_its_hands(files: list[bytes], caplog: pytest.LogCaptureFixture) -> None:
    before = children()
    storage = ProcessStorage(1)
    (child,) = children() - before
    sizes = []

    def take(size: int) -> NDArray[np.uint8]:
        sizes.append(size)
        os.kill(child, signal.SIGKILL)
        return shared(size)

    assert samples(storage.read(files, take)) == read_here(files)
    assert len(sizes) == 1, "the buffer is not lost"
    assert "a process that reads has ended" in caplog.text
    storage.close()


def test_an_error_of_the_caller_ends_the_process_that_waits_for_it(files: list[bytes]) -> None:
    before = children()
    storage = ProcessStorage(1)
    with pytest.raises(MemoryError, match="no more"):
        storage.read(files, Taken(MemoryError("no more")))
    assert children() == before
    assert samples(storage.read(files, Taken())) == read_here(files)
    storage.close()


def test_what_a_process_cannot_read_the_thread_reads_or_raises(
    storage: ProcessStorage, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """And the process stays."""
    shard = tmp_path / "s.tar"
    shard.write_bytes(b"indexed" * 100)
    (inspected,) = storage.inspect([str(shard)])
    assert isinstance(inspected, Shard)
    assert storage.read_ranges([inspected], [7], [7], Taken()).cpu_s > 0
    os.utime(shard, ns=(1, 1))
    before = children()
    for _ in range(3):
        with pytest.raises(SourceError, match="shard must stay as it was indexed, but has changed"):
            storage.read_ranges([inspected], [7], [7], Taken())
    assert children() == before
    (inspected,) = storage.inspect([str(shard)])
    assert isinstance(inspected, Shard)
    assert storage.read_ranges([inspected], [7], [7], Taken()).cpu_s > 0
    assert not caplog.text


def test_where_no_process_can_be_started_a_thread_reads(
    files: list[bytes], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    storage = ProcessStorage(2)
    assert "no process to read with" in caplog.text
    assert samples(storage.read(files, Taken())) == read_here(files)
    storage.close()


def test_processes_end_with_their_storage_and_with_this_process(files: list[bytes], tmp_path: Path) -> None:
    before = children()
    storage = ProcessStorage(2)
    await_children(2, before)
    storage.close()
    assert children() == before
    storage = ProcessStorage(2)
    await_children(2, before)
    del storage
    gc.collect()
    assert children() == before
    script = tmp_path / "script.py"  # without a guard around what it does
    script.write_text(
        "import os\n"
        "from gpuflow.runtime.memory import shared\n"
        "from gpuflow.loader.read_workers import ProcessStorage\n"
        "from gpuflow.sources.storage import LocalStorage\n"
        "storage = ProcessStorage(1)\n"
        f"assert storage.read([{files[-1]!r}], shared).cpu_s > 0\n"
        "print(open(f'/proc/self/task/{os.getpid()}/children').read(), flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60, check=False)
    child = int(done.stdout)
    deadline = time.monotonic() + 180
    while alive(child) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not alive(child), done.stderr


def test_a_forked_child_reads_by_itself(storage: ProcessStorage, files: list[bytes]) -> None:
    storage.read(files, Taken())
    child = os.fork()
    if not child:
        payload = storage.read(files, Taken())
        storage.close()  # which ends no process of the parent's
        os._exit(0 if payload.cpu_s == 0 and samples(payload) == read_here(files) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert storage.read(files, Taken()).cpu_s > 0


def test_closing_does_not_wait_for_a_read(tmp_path: Path) -> None:
    """One that never ends, of a pipe that nobody writes into; its thread learns that there is no more to do."""
    storage = ProcessStorage(1)
    path = tmp_path / "0.jpg"
    path.write_bytes(b"image")
    reached, faults = threading.Event(), []
    hold = threading.Event()

    def take(size: int) -> NDArray[np.uint8]:
        reached.set()
        hold.wait(120)
        return shared(size)

    def work() -> None:
        try:
            storage.read([os.fsencode(path)], take)
        except (OSError, EOFError) as error:
            faults.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    assert reached.wait(20)
    storage.close()
    assert thread.is_alive(), "the read goes on"
    hold.set()
    thread.join(20)
    assert len(faults) == 1


def test_a_worker_finds_out_what_this_process_would(tmp_path: Path) -> None:
    listing, names = tmp_path / "list.csv", [f"{i}.jpg" for i in range(50)]
    for i, name in enumerate(names):
        pixels = images.photo(20 + i, 90 - i, seed=i)
        (tmp_path / name).write_bytes(images.jpeg(pixels, "4:2:0", progressive=i % 10 == 3))
    (tmp_path / names[7]).write_bytes(b"no image at all")
    listing.write_text("path,label\n" + "".join(f"{name},{i % 2}\n" for i, name in enumerate(names)))
    program = program_of(Decode(max_pixels=2_500), RandomResizedCrop(size=16), Flip(horizontal=0.5), Normalize())
    passes = passes_of(program)
    assert not isinstance(passes, str)
    scanner, keys = ChunkScanner(program.decoder, outputs_of(program), (passes,), threads=2), keys_of(50)
    data, unchecked = (tmp_path / names[4]).read_bytes(), np.arange(50) % 3 > 0
    (tmp_path / names[4]).write_bytes(data[:-9] + data[-2:])
    source = open_source(source_spec(listing=str(listing)))
    here: ChunkScan = scanner(source.read(range(50), lambda size: shared(3 * size)), keys, unchecked)
    source = source.on(ProcessStorage(1, scanner))
    assert source.read(range(50), Taken()).prescan is None, "no keys, no scan"
    with scanned(keys):
        assert source.read(range(50), Taken()).prescan.found is None, "nothing to check, nothing checked"
    with scanned(keys, unchecked):
        payload = source.read(range(50), Taken())
    with scanned(keys_of(49)):
        assert source.read(range(50), Taken()).prescan is None, "nor with those of other samples"
    source.close()
    there: ChunkScan = payload.prescan
    assert there.is_of(payload)
    assert not there.is_of(replace(payload, offsets=payload.offsets[::-1], sizes=payload.sizes[::-1]))
    assert not there.is_of(replace(payload, errors=["has no image", *payload.errors[1:]]))
    assert there.headers.faults[7] is not None and there.headers.faults[6] is None
    assert list(map(repr, there.headers.faults)) == list(map(repr, here.headers.faults))
    assert there.headers.progressive[3]
    for name in ("sizes", "engine", "sampling", "scans", "intervals", "progressive"):
        assert np.array_equal(getattr(there.headers, name), getattr(here.headers, name)), name
    assert np.array_equal(there.rows, here.rows)
    *tables, plans = there.tables
    *expected, plans_here = here.tables
    for one, other in zip([*tables, *plans], [*expected, *plans_here], strict=True):
        assert one is not None and other is not None and np.array_equal(one, other)
    assert there.found is not None and here.found is not None
    assert np.array_equal(there.found.checked, unchecked[there.rows])
    assert there.rows[there.found.complete].tolist() == [i for i in there.rows.tolist() if i % 3 and i != 4]
    assert np.array_equal(there.found.complete, here.found.complete)
    for field in ("box", "grid", "window", "flips"):
        assert np.array_equal(getattr(there.draws[0][0], field), getattr(here.draws[0][0], field)), field


def test_a_worker_rewrites_progressive_files_where_the_buffer_has_room(tmp_path: Path) -> None:
    """It asks for that room from the second chunk on. What it cannot rewrite is left out."""
    listing, names = tmp_path / "list.csv", [f"{i}.jpg" for i in range(20)]
    for i, name in enumerate(names):
        pixels = images.photo(64, 90 + i, seed=i)
        (tmp_path / name).write_bytes(images.jpeg(pixels, "4:2:2" if i % 8 else "4:4:4", progressive=i % 4 == 0))
    data = (tmp_path / names[12]).read_bytes()
    (tmp_path / names[12]).write_bytes(data[:-9] + data[-2:])
    listing.write_text("path,label\n" + "".join(f"{name},{i % 2}\n" for i, name in enumerate(names)))
    program = program_of(Decode(), RandomResizedCrop(size=16))
    passes = passes_of(program)
    assert not isinstance(passes, str)
    scanner, keys, taken = ChunkScanner(program.decoder, outputs_of(program), (passes,)), keys_of(20), Taken()
    source = open_source(source_spec(listing=str(listing))).on(ProcessStorage(1, scanner))
    with scanned(keys):
        first, second = (source.read(range(20), taken) for _ in range(2))
    source.close()
    scan, later = first.prescan, second.prescan
    assert not scan.rewritten and scan.progressive.sum() == 5 and later.rewritten and later.progressive.sum() == 4
    assert taken.sizes[1] - taken.sizes[0] == scan.room == later.room > sum(first.sizes[::4])
    assert scan.rows.tolist() == list(range(20)) and later.rows.tolist() == [i for i in range(20) if i != 12]
    right = rewrite_progressive(first, scan.rows[scan.progressive], shared, 1)
    assert right is not None
    at, size = right.offsets, right.sizes
    rewritten = [right.buffer[start : start + count] for start, count in zip(at, size, strict=True)]
    places = later.rows.tolist()
    for number, file, sampling in zip(scan.rows[scan.progressive].tolist(), rewritten, right.sampling, strict=True):
        if number == 12:
            assert not len(file)
            continue
        row = places.index(number)
        start, length = later.tables.entries[row, :2]
        assert np.array_equal(second.buffer[start : start + length - SPARE_BYTES], file)
        assert not second.buffer[start + length - SPARE_BYTES : start + length].any()
        assert later.tables.samplings[row] == sampling
    for one, other in zip(later.tables[:4], scan.tables[:4], strict=True):
        assert np.array_equal(one[~later.progressive], other[~scan.progressive])
    assert [bytes(second.sample(i)) for i in range(20)] == [bytes(first.sample(i)) for i in range(20)]


def stumble(payload: Payload, keys: Keys, unchecked: object) -> ChunkScan:
    raise RuntimeError("this prescan fails")


class Unpicklable:
    """As a script of torch.jit, whose pickling raises what it likes."""

    def __call__(self, payload: Payload, keys: Keys, unchecked: object) -> ChunkScan:
        raise AssertionError("no worker has it")

    def __reduce__(self) -> tuple[object, ...]:
        raise RuntimeError("cannot be pickled")


WAYS_TO_FAIL = ["raises", "is a lambda", "cannot be pickled", "is in a module that workers cannot import"]


@pytest.mark.parametrize("what", WAYS_TO_FAIL)
def test_a_scan_that_fails_spoils_no_read(what: str, files: list[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    made: dict[str, Prescan] = {"raises": stumble, "cannot be pickled": Unpicklable()}
    prescan = made.get(what, lambda payload, keys, unchecked: stumble(payload, keys, unchecked))
    if what.startswith("is in"):
        prescan.__module__, prescan.__qualname__ = "only_here", "scan"
        monkeypatch.setitem(sys.modules, "only_here", types.SimpleNamespace(scan=prescan))
    before = children()
    storage = ProcessStorage(1, prescan)
    (worker,) = await_children(1, before) - before
    for _ in range(2):
        with scanned(keys_of(len(files))):
            read = storage.read(files, Taken())
        assert samples(read) == read_here(files)
        assert read.prescan is None and read.cpu_s > 0
    assert children() - before == {worker}
    storage.close()


def test_processes_that_read_do_not_import_torch() -> None:
    """It would take seconds until they read."""
    stages = (RandomResizedCrop(size=16), Torchvision(name="GaussianBlur", parameters=(("kernel_size", 3),)))
    program = program_of(Decode(), *stages, Normalize())
    passes = passes_of(program)
    assert not isinstance(passes, str)
    scanner = pickle.dumps(ChunkScanner(program.decoder, outputs_of(program), (passes,)))
    code = """
import pickle, sys
import numpy as np
import gpuflow.loader.read_workers, gpuflow.stages
from gpuflow.pipeline.stage import Keys
scanner = pickle.load(sys.stdin.buffer)
((_, seeds, *_),) = scanner.draw(Keys(0, 0, np.arange(3)), np.arange(3), np.full((3, 2), 40))
assert len(set(seeds.tolist())) == 3
sys.exit("torch" in sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], input=scanner, check=True, timeout=60)


def test_sources_on_this_machine_leave_their_reading_to_processes(
    storage: ProcessStorage, files: list[bytes], tmp_path: Path
) -> None:
    listing = tmp_path / "list.csv"
    listing.write_text("path,label\n" + "".join(f"{i}.jpg,{i % 2}\n" for i in range(40)))
    source = open_source(source_spec(listing=str(listing)))
    plain = source.read(range(40), Taken())
    source = source.on(storage)
    read = source.read(range(40), Taken())
    assert samples(read) == samples(plain)
    assert (plain.cpu_s, read.cpu_s > 0) == (0, True)
    source.close()
