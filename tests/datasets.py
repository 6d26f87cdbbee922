"""Small data and real stand-ins for the loader's tests: labelled photographs, YAML files, sources in memory.

Photographs are 48x40 to 90x70 pixels, each of its own size and pattern, in its class's colour.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import resource
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import accumulate
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar, final

import cv2
import numpy as np
import torch
import yaml
from numpy.typing import NDArray

import gpuflow
from gpuflow.execute.cpu.targets import TargetMapper
from gpuflow.loader.bad_samples import BadSamples
from gpuflow.loader.loader import Loader
from gpuflow.loader.plan import LoaderPlan
from gpuflow.loader.sampler import Order, ShuffledOrder
from gpuflow.pipeline.program import Program, fold, trace
from gpuflow.pipeline.stage import Pipeline
from gpuflow.pipeline.targets import TargetRules
from gpuflow.pipeline.views import View, ViewsPipeline, ViewsProgram, programs_of
from gpuflow.sources import Allocate, Payload, Source, fields_of
from gpuflow.sources.storage import Storage
from gpuflow.stages import STAGES

Entries = Sequence[Mapping[str, Any]]

COLOURS = ((200, 60, 60), (60, 200, 60), (60, 60, 200), (190, 190, 50))
"""RGB of each class, far apart."""

TRAIN: Entries = (
    {"decode": {"color": "rgb"}},
    {"random_resized_crop": {"size": 24}},
    {"flip": {"horizontal": 0.5}},
    {"color_jitter": {"brightness": 0.2, "contrast": 0.2}},
    {"normalize": {}},
)
VAL: Entries = ({"decode": {}}, {"resize": {"shorter": 32}}, {"center_crop": {"size": 24}}, {"normalize": {}})
RAW: Entries = VAL[:-1]
"""As VAL, but uint8 pixels."""


# --- photographs and files --------------------------------------------------------------------------------------------


def pixels(label: int, number: int) -> NDArray[np.uint8]:
    """One photograph, uint8 HWC in RGB."""
    height, width = 40 + number * 7 % 31, 48 + number * 11 % 43
    y, x = np.mgrid[:height, :width]
    waves = 25 * np.sin((x * (1 + number % 5) + y * (2 + number % 3)) / 15 + number)
    image: NDArray[np.uint8] = np.clip(np.array(COLOURS[label % len(COLOURS)]) + waves[..., None], 0, 255).astype(
        np.uint8
    )
    return image


def jpeg(label: int, number: int) -> bytes:
    """One photograph as a JPEG."""
    return bytes(cv2.imencode(".jpg", pixels(label, number)[..., ::-1], [cv2.IMWRITE_JPEG_QUALITY, 92])[1])


def make_photos(root: Path, *, classes: int = 3, each: int = 8) -> list[Path]:
    """A folder of `classes` directories with `each` photographs; returns the files in the source's order."""
    files = [root / f"class_{label}" / f"{number:03d}.jpg" for label in range(classes) for number in range(each)]
    for i, file in enumerate(files):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(jpeg(i // each, i))
    return files


def write_config(path: Path, folder: Path | str, **blocks: Any) -> Path:
    """A YAML file with the pipelines `train` (shuffled) and `val`.

    Args:
        path: the file to write. folder: the photographs.
        blocks: `train`, `val`: stages; `batch`; `split`; `run`; `fit`: the file's block `train`; others as they are.
    """
    batch = blocks.pop("batch", {"size": 4})
    source = {"folder": str(folder), "seed": blocks.pop("seed", 0)}
    if "split" in blocks:
        source["split"] = blocks.pop("split")
    document: dict[str, Any] = {
        "source": blocks.pop("source", source),
        "pipelines": {
            "train": {"stages": list(blocks.pop("train", TRAIN)), "batch": batch, "shuffle": True},
            "val": {"stages": list(blocks.pop("val", VAL)), "batch": batch},
        },
        "run": {"threads": 2, **blocks.pop("run", {})},
    }
    if "fit" in blocks:
        document["train"] = blocks.pop("fit")
    path.write_text(yaml.safe_dump({**document, **blocks}))
    return path


def truncate(file: Path) -> None:
    """Cut the last part of the pixels off."""
    file.write_bytes(file.read_bytes()[:-100])


def enlarge(file: Path, side: int = 60_000) -> None:
    """Let a JPEG's header promise `side` x `side` pixels."""
    data = bytearray(file.read_bytes())
    frame = data.index(b"\xff\xc0")
    data[frame + 5 : frame + 9] = struct.pack(">HH", side, side)
    file.write_bytes(bytes(data))


# --- sources in memory ------------------------------------------------------------------------------------------------


@final
class MemorySource:
    """A source of encoded images that are already in memory. An image that is None cannot be read."""

    shard_sizes = None

    def __init__(self, images: Iterable[bytes | None], labels: Iterable[int] | None = None) -> None:
        self.images = list(images)
        count = len(self.images)
        self.labels = np.array(list(labels) if labels is not None else [i % 3 for i in range(count)], np.int64)
        self.classes = tuple(f"class_{label}" for label in range(int(self.labels.max()) + 1))
        self.closed = False

    @classmethod
    def of(cls, count: int) -> MemorySource:
        """`count` photographs of three classes, which take turns."""
        return cls(jpeg(i % 3, i) for i in range(count))

    def __len__(self) -> int:
        return len(self.images)

    def path(self, index: int) -> str:
        return f"memory/{index}.jpg"

    def read(self, indices: Sequence[int], allocate: Allocate) -> Payload:
        found = [self.images[index] for index in indices]
        sizes = [len(data or b"") for data in found]
        offsets = [0, *accumulate(sizes)]
        buffer = allocate(offsets.pop())
        for offset, size, data in zip(offsets, sizes, found, strict=True):
            buffer[offset : offset + size] = np.frombuffer(data or b"", np.uint8)
        errors = [None if data is not None else "no such file" for data in found]
        return Payload(buffer=buffer, offsets=offsets, sizes=sizes, errors=errors)

    storage = None

    def close(self) -> None:
        self.closed = True


@final
class TappedSource:
    """A source that calls `before(index)` ahead of each sample that is read."""

    def __init__(self, source: Source, before: Callable[[int], None]) -> None:
        self.source, self.before = source, before
        self.classes, self.labels, self.shard_sizes = source.classes, source.labels, source.shard_sizes

    def __len__(self) -> int:
        return len(self.source)

    def path(self, index: int) -> str:
        return self.source.path(index)

    def read(self, indices: Sequence[int], allocate: Allocate) -> Payload:
        for index in indices:
            self.before(index)
        return self.source.read(indices, allocate)

    @property
    def storage(self) -> Storage | None:
        return self.source.storage

    def close(self) -> None:
        self.source.close()


@final
class Block:
    """A tap: the read of one sample waits for `release`. `reached` is set once it does."""

    def __init__(self, index: int) -> None:
        self.index, self.release, self.reached = index, threading.Event(), threading.Event()

    def __call__(self, index: int) -> None:
        if index == self.index:
            self.reached.set()
            self.release.wait()


@final
class Raise:
    """A tap: the read of one sample raises what `make` makes."""

    def __init__(self, index: int, make: Callable[[], BaseException]) -> None:
        self.index, self.make = index, make

    def __call__(self, index: int) -> None:
        if index == self.index:
            raise self.make()


@final
class Slow:
    """A tap: each read takes `seconds`."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __call__(self, index: int) -> None:
        time.sleep(self.seconds)


# --- loaders ----------------------------------------------------------------------------------------------------------


def program(entries: Entries = TRAIN) -> Program:
    """A folded pipeline from entries as they stand in YAML."""
    stages = tuple(STAGES[name](**parameters) for entry in entries for name, parameters in entry.items())
    pipeline = Pipeline("test", stages)
    return fold(pipeline, trace(pipeline))


def views_program(views: Mapping[str, tuple[int, Entries]]) -> ViewsProgram:
    """Folded views from their counts and entries, `decode` included."""
    programs = {name: program(entries) for name, (_, entries) in views.items()}
    several = tuple(View(name, count, programs[name].pipeline) for name, (count, _) in views.items())
    return ViewsProgram(pipeline=ViewsPipeline("test", several), programs=tuple(programs.values()))


def loader_of(
    source: Source,
    entries: Entries | ViewsProgram = TRAIN,
    *,
    batch_size: int = 4,
    threads: int = 2,
    prefetch: int = 2,
    shuffle: bool = True,
    seed: int = 0,
    drop_last: bool = False,
    rank: int = 0,
    world_size: int = 1,
    policy: str = "replace",
    limit: int | None = None,
    limit_of: int | None = None,
    bad_file: Path | None = None,
    timeout: float = 60.0,
    readers: int = 0,
    processes: int = 0,
    order: Order | None = None,
    rules: TargetRules = TargetRules(),  # noqa: B008  # a frozen value
) -> Loader:
    """A loader on any source, put together as `build_loader` does."""
    folded, fields = entries if isinstance(entries, ViewsProgram) else program(entries), fields_of(source)
    plan = LoaderPlan(
        program=folded,
        source=source,
        targets=TargetMapper(programs_of(folded)[0], fields, rules) if fields else None,
        order=order or ShuffledOrder(size=len(source), seed=seed, shuffle=shuffle),
        seed=seed,
        batch_size=batch_size,
        drop_last=drop_last,
        rank=rank,
        world_size=world_size,
        device=torch.device("cpu"),
        threads=threads,
        prefetch=prefetch,
        timeout_seconds=timeout,
        bad=BadSamples(policy=policy, limit=limit, path=str(bad_file) if bad_file else None, samples=limit_of),
        readers=readers,
        processes=processes,
        identity="test",
    )
    return Loader(plan)


T = TypeVar("T")
BUSY = 3
"""How many times as long as on an idle machine something may take on a busy one."""
Row = tuple[int, int, bool, bytes]
"""(index, label, valid, pixels) of one sample."""


def rows(batch: gpuflow.Batch) -> list[Row]:
    """Each sample of a batch as plain values, which compare bit for bit."""
    images: Any = batch[0]
    labels, views = batch.labels, list(images.values()) if isinstance(images, dict) else [images[None]]
    return [
        (
            int(index),
            int(label),
            bool(valid),
            b"".join(view[:, i].contiguous().view(torch.uint8).numpy().tobytes() for view in views),
        )
        for i, (index, label, valid) in enumerate(zip(batch.indices, labels, batch.valid, strict=True))
    ]


def epoch_rows(loader: Loader) -> list[list[Row]]:
    """One epoch, step by step."""
    return [rows(batch) for batch in loader]


def flat(steps: Iterable[list[T]]) -> list[T]:
    """Steps one after the other."""
    return [item for step in steps for item in step]


def interleave(ranks: Sequence[Sequence[list[Row]]]) -> list[Row]:
    """What all ranks together saw, in the order of the epoch's positions, without what was wrapped around."""
    return [row for step in zip(*ranks, strict=True) for batch in step for row in batch if row[2]]


def fault_of(loader: Loader) -> tuple[int, BaseException]:
    """Iterate until something is raised: how many batches came before, and what it is."""
    steps = 0
    try:
        for _ in loader:
            steps += 1
    except BaseException as error:
        return steps, error
    raise AssertionError("nothing was raised")


# --- deadlines and what is left behind --------------------------------------------------------------------------------


class TooSlow(BaseException):
    """A test did not end in time."""


@contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Ends the block with TooSlow once it has taken far more than `seconds`, what it may take on an idle machine.

    A block that even then goes on ends the process.
    """
    seconds *= BUSY

    def expire(number: int, frame: FrameType | None) -> None:
        faulthandler.dump_traceback(all_threads=True)
        raise TooSlow(f"took more than {seconds:g} s")

    before = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    faulthandler.dump_traceback_later(seconds + 30, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def one_torch_thread(seconds: float) -> Iterator[None]:
    """Compute with one thread of PyTorch, for a limited time: on busy cores, several threads wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with deadline(seconds):
            yield
    finally:
        torch.set_num_threads(before)


def open_things(*, collect: bool = True) -> tuple[set[int], dict[int, str], set[str]]:
    """What a loader might leave behind in this process: threads, file descriptors, mapped files of shared memory."""
    if collect:
        gc.collect()
    threads = {thread.ident or 0 for thread in threading.enumerate()}
    descriptors = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
            if not target.startswith("/dev/nvidia"):  # torch's look for a GPU opens the driver, once for the process
                descriptors[int(name)] = target
        except FileNotFoundError:  # the descriptor of the listing itself
            continue
    mapped = {line.split(maxsplit=5)[-1].strip() for line in Path("/proc/self/maps").read_text().splitlines()}
    return threads, descriptors, {path for path in mapped if path.startswith("/dev/shm/")}


@contextmanager
def nothing_left_behind(seconds: float = 5.0) -> Iterator[None]:
    """Asserts that the block leaves no thread, file descriptor or shared memory, at the latest after `seconds`."""
    before = open_things()
    yield
    end = time.monotonic() + seconds
    after = open_things(collect=False)
    while after != before and time.monotonic() < end:
        after = open_things()
        time.sleep(0.05)
    left = [thread.name for thread in threading.enumerate() if thread.ident not in before[0]]
    assert not left, f"threads left behind: {left}"
    assert set(after[1].values()) <= set(before[1].values())
    assert len(after[1]) <= len(before[1])
    assert after[2] <= before[2]


@contextmanager
def no_more_files() -> Iterator[None]:
    """Opening a file fails with EMFILE in this block, on every thread. Files that are open can be read."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    # No higher, or a file that any thread closes meanwhile would leave its descriptor to another one.
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def children() -> set[int]:
    """The processes that this one has started, or those have, and that are alive, by proc(5)."""
    found: set[int] = set()
    parents = [os.getpid()]
    while parents:
        threads = Path(f"/proc/{parents.pop()}/task")
        with suppress(FileNotFoundError):  # a process that has ended
            for thread in list(threads.iterdir()):
                with suppress(OSError):  # a thread or a process that has ended
                    parents += (new := set(map(int, (thread / "children").read_text().split())))
                    found |= new
    return found


def await_children(count: int, before: set[int]) -> set[int]:
    """Wait for `count` new child processes, and return them: the first of some forks the others when it is ready."""
    end = time.monotonic() + 90
    while len(new := children() - before) != count and time.monotonic() < end:
        time.sleep(0.05)
    assert len(new) == count
    return new


def resident_kib() -> int:
    """This process's resident memory."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * (os.sysconf("SC_PAGE_SIZE") // 1024)


def python(
    code: str | Path, *arguments: str, cwd: Path | None = None, seconds: float = 60.0, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a script, or source text, in a fresh interpreter. Kills it, which fails the test, once it has taken far more
    than `seconds`, what it may take on an idle machine."""
    command = [sys.executable, *([str(code)] if isinstance(code, Path) else ["-c", code]), *arguments]
    return subprocess.run(
        command,
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=BUSY * seconds,
        check=False,
    )
