"""The CPU's share of a batch next to a GPU, for which a fake stands: the same samples and faults from both."""

from __future__ import annotations

import contextlib
import math
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import gpuflow
from gpuflow.config import read_config
from gpuflow.errors import BadSampleError, LoaderTimeout
from gpuflow.execute.cpu.runner import CpuRunner
from gpuflow.loader import iterator
from gpuflow.loader.bad_samples import BadSamples
from gpuflow.loader.batch import Assembly
from gpuflow.loader.iterator import BatchesInUse, GpuWait
from gpuflow.loader.lowering import Feed
from gpuflow.loader.plan import LoaderPlan, Share, cpu_share_of
from gpuflow.loader.sampler import ShuffledOrder, Steps
from gpuflow.pipeline.stage import Keys
from gpuflow.pipeline.views import ViewsProgram, outputs_of, slot_of, slots_of, split
from gpuflow.runtime.memory import heap
from gpuflow.runtime.metrics import Stats
from gpuflow.sources import Payload, Source
from gpuflow.stages import STAGES
from tests import datasets
from tests.datasets import (
    Entries,
    Raise,
    Row,
    Slow,
    TappedSource,
    deadline,
    epoch_rows,
    loader_of,
    make_photos,
    nothing_left_behind,
    program,
    truncate,
    views_program,
    write_config,
)
from tests.host_stream import FakeEvent

NHWC: Entries = [
    {"decode": {}},
    {"random_resized_crop": {"size": 24}},
    {"normalize": {"dtype": "float16", "layout": "nhwc"}},
]
VIEWS = views_program(
    {
        "global": (2, NHWC),
        "local": (3, [{"decode": {}}, {"random_resized_crop": {"size": [13, 11]}}]),
        "planes": (1, [{"decode": {}}, {"resize": {"height": 7, "width": 9}}, {"normalize": {}}]),
    }
)


class StandIn:
    """A GPU and the way to it: its memory is the host's, and the CPU's code decodes there."""

    device = torch.device("cpu")

    def __init__(self, entries: Any, delay: float = 0.0) -> None:
        self.program, self.delay = entries if isinstance(entries, ViewsProgram) else program(entries), delay
        self.engine_images, self.cpu_images, self.fills = 0, 0, 0
        self._counting = threading.Lock()  # several threads launch
        shape, dtype = slot_of(self.program)
        self.slot_bytes = math.prod(shape) * dtype.itemsize

    def set_gpu_wait(self, share: float) -> None: ...

    def prepare(self, payload: Payload, keys: Keys, indices: object = None) -> tuple[Payload, Keys]:
        return payload, keys

    def slots(self, count: int) -> Any:
        return slots_of(self.program, torch.zeros((count, self.slot_bytes), dtype=torch.uint8))

    def launch(
        self, chunk: tuple[Payload, Keys], slots: Any, ahead: Sequence[object] = ()
    ) -> list[BadSampleError | None]:
        (payload, keys), (shape, dtype) = chunk, slot_of(self.program)
        made = np.empty((len(payload), self.slot_bytes), np.uint8)
        own = slots_of(self.program, made.view(dtype).reshape(-1, *shape))
        faults = CpuRunner(self.program).run(payload, keys, own)
        for there, here in zip(split(slots), split(slots_of(self.program, torch.from_numpy(made))), strict=True):
            there.copy_(here)
        with self._counting:
            self.engine_images += len(payload)
        time.sleep(self.delay)
        return faults

    def record_event(self) -> None: ...

    def queued(self) -> contextlib.nullcontext[None]:
        return contextlib.nullcontext()

    def retain_until_done(self, memory: NDArray[Any], on_done: Callable[[NDArray[Any]], None] | None = None) -> None:
        if on_done is not None:
            on_done(memory)

    def copy_into(self, there: torch.Tensor, host: torch.Tensor) -> None:
        assert there.stride() == host.stride(), "one copy of bytes"
        with self._counting:
            self.fills += 1
        there.copy_(host)

    def send_all(self, arrays: Sequence[NDArray[Any]]) -> list[torch.Tensor]:
        return [torch.from_numpy(array) for array in arrays]

    def close(self) -> None: ...


@contextlib.contextmanager
def feed_of(
    source: Source,
    share: Share | None,
    entries: Any = NHWC,
    *,
    delay: float = 0.0,
    batch_size: int = 20,
    **options: Any,
) -> Iterator[tuple[Feed, StandIn, Callable[[int], Iterator[Assembly]]]]:
    """A feed for the stand-in, and what iterates an epoch of it."""
    gpu = StandIn(entries, delay)
    order = ShuffledOrder(size=len(source), seed=0, shuffle=options.pop("shuffle", True))
    substitutes: dict[str, Any] = {"gpu": gpu, "device_stream": gpu}
    plan = LoaderPlan(
        program=gpu.program,
        source=source,
        order=order,
        seed=0,
        batch_size=batch_size,
        threads=options.pop("threads", 3),
        prefetch=2,
        bad=BadSamples(policy=options.pop("policy", "replace"), limit=None, path=None),
        readers=2,
        share=share,
        device=torch.device("cpu"),
        **substitutes,
        **options,
    )
    feed = Feed(plan)

    def epoch(number: int) -> Iterator[Assembly]:
        steps = Steps(size=len(source), batch_size=batch_size, rank=0, world_size=1, drop_last=False)
        run = feed.start(number, steps)
        try:
            for _ in range(len(steps)):
                batch = run.get(20)
                assert batch is not None
                run.release()
                if batch.error is not None:
                    raise batch.error
                yield batch
        finally:
            run.stop()

    try:
        yield feed, gpu, epoch
    finally:
        feed.wait()
        feed.close()


def rows(batch: Assembly) -> list[Row]:
    kept = torch.from_numpy(batch.kept)
    labels, valid, indices = (torch.as_tensor(x)[kept] for x in (batch.labels, batch.valid, batch.indices))
    slots = batch.slots
    images = {name: view[:, kept] for name, view in slots.items()} if isinstance(slots, dict) else slots[kept]
    return datasets.rows(gpuflow.Batch((images, labels), valid=valid, indices=indices))


@pytest.fixture(autouse=True)
def _host_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("gpuflow.runtime.memory.pinned", heap)
    monkeypatch.setattr("torch.cuda.set_device", lambda device: None)
    with deadline(120):
        yield


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_photos(tmp_path / "photos", classes=3, each=29)
    return tmp_path / "photos"


def fixed(part: float, threads: int = 2) -> Share:
    return Share(part, threads=threads, adapts=False)


# --- how large it is --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("part", "count", "rows"), [(0.25, 256, 64), (0.3, 10, 3), (1.0, 8, 7), (0.9, 1, 0), (0.5, 0, 0), (0.001, 64, 0)]
)
def test_the_engines_keep_a_row_at_least(part: float, count: int, rows: int) -> None:
    assert fixed(part).rows(count) == rows


@pytest.mark.parametrize("part", [0.05, 0.6])
def test_it_goes_where_both_need_the_same_time(part: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines that do 30,000 images a second and cores that do 10,000: a quarter. Batches come in pairs."""
    share, now = Share(part, threads=1, adapts=True), [0.0]
    monkeypatch.setattr("gpuflow.loader.plan.time", SimpleNamespace(perf_counter=lambda: now[0]))
    for number in range(400):
        rows = share.rows(256)
        late = rows / 10_000 > (256 - rows) / 30_000
        share.update(256 - rows, late=late, wanted=True, rate=10_000)
        now[0] += 2 * max(rows / 10_000, (256 - rows) / 30_000) * (number % 2)
    assert 0.22 < share.part < 0.26


def test_it_stays_where_nobody_waits() -> None:
    share = Share(0.25, threads=1, adapts=True)
    for _ in range(10):
        share.update(192, late=False, wanted=False, rate=10_000)
    assert share.part == 0.25


def test_it_stays_where_it_is_not_to_adapt() -> None:
    share = fixed(0.25)
    for _ in range(10):
        share.update(192, late=True, wanted=True, rate=10_000)
        share.update(192, late=False, wanted=True, rate=10_000)
    assert share.part == 0.25


@pytest.mark.parametrize(("delay", "slow", "smaller"), [(0.0, 0.02, True), (0.02, 0.0, False)])
def test_the_slower_one_gets_less(delay: float, slow: float, smaller: bool, source: Source) -> None:
    """Which of the two is slow is said by a sleep; and somebody waits for every batch."""
    share = Share(0.5, threads=2, adapts=True)
    with feed_of(source, share, delay=delay, batch_size=4) as (feed, _, epoch):
        work = feed.decoder.decode_on_cpu

        def slowly(*arguments: Any) -> Any:
            time.sleep(slow)
            return work(*arguments)

        feed.decoder.decode_on_cpu = slowly  # type: ignore[assignment, method-assign]
        feed._gpu_wait = 1.0
        for _ in epoch(0):
            pass
        assert share.part < 0.5 if smaller else share.part > 0.5


# --- what comes out ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("part", "entries"), [(0.3, NHWC), (1.0, NHWC), (0.3, VIEWS)])
def test_batches_are_those_of_the_cpu(part: float, entries: Any, source: Source) -> None:
    """In each batch of 20 one chunk is the engines', up to two are the CPU's; in the last one of 7 too."""
    with loader_of(source, entries, batch_size=20) as loader:
        expected = [epoch_rows(loader) for _ in range(2)]
    with feed_of(source, fixed(part), entries) as (feed, gpu, epoch):
        gpu.engine_images = gpu.fills = 0
        assert [[rows(batch) for batch in epoch(number)] for number in range(2)] == expected
        assert gpu.engine_images == 2 * {0.3: 4 * 14 + 5, 1.0: 4 + 1}[part]
        assert gpu.fills == 2 * 5 * len(outputs_of(gpu.program)), "one copy a batch, or for each number of each view"
        read, decode_cpu, work = (meter.read(1.0) for meter in feed.meters)
        assert decode_cpu["samples"] + work["samples"] >= 2 * 87
        assert read["samples"] == decode_cpu["samples"] + work["samples"]


@pytest.mark.parametrize("policy", ["replace", "skip"])
@pytest.mark.parametrize("entries", [NHWC, VIEWS])
def test_bad_samples_are_judged_as_on_the_cpu(policy: str, entries: Any, folder: Path, source: Source) -> None:
    """Sample 4 is the engines', 15 and 18 the CPU's."""
    files = sorted(folder.rglob("*.jpg"))
    for number in (4, 15):
        truncate(files[number])
    files[18].unlink()
    with loader_of(source, entries, batch_size=20, shuffle=False, policy=policy) as loader:
        expected = epoch_rows(loader)
    with feed_of(source, fixed(0.5), entries, shuffle=False, policy=policy) as (feed, _, epoch):
        assert [rows(batch) for batch in epoch(0)] == expected
        assert feed._plan.bad.distinct == 3


@pytest.mark.parametrize("policy", ["replace", "skip"])
@pytest.mark.parametrize("mode", ["batch", "elem"])
@pytest.mark.parametrize("part", [0.0, 0.4])
def test_batches_are_mixed_on_a_gpu_as_on_the_cpu(
    part: float, mode: str, policy: str, folder: Path, source: Source
) -> None:
    """Once the CPU's rows are there, and bad samples were replaced or skipped."""
    files = sorted(folder.rglob("*.jpg"))
    for number in (4, 15):
        truncate(files[number])
    entries: Entries = [*NHWC, {"mixup": {"cutmix_alpha": 1.0, "mode": mode}}, {"cutmix": {"label_smoothing": 0.1}}]

    def values(images: torch.Tensor, labels: torch.Tensor) -> tuple[bytes, bytes]:
        return images.contiguous().view(torch.uint8).numpy().tobytes(), labels.numpy().tobytes()

    with loader_of(source, entries, batch_size=20, policy=policy) as loader:
        expected = [values(*batch) for batch in loader]
    with feed_of(source, fixed(part) if part else None, entries, policy=policy) as (_, _, epoch):
        found = []
        for batch in epoch(0):
            kept = torch.from_numpy(batch.kept)
            found.append(values(batch.slots[kept], torch.as_tensor(batch.labels)[kept]))
    assert found == expected


def test_a_bad_sample_of_the_share_is_raised(folder: Path, source: Source) -> None:
    truncate(sorted(folder.rglob("*.jpg"))[38])
    with feed_of(source, fixed(0.5), shuffle=False, policy="raise") as (_, _, epoch):
        steps = epoch(0)
        next(steps)
        with pytest.raises(BadSampleError, match=r"sample 38.*truncated"):
            next(steps)


@pytest.mark.parametrize("operation", ["prepare", "launch"])
def test_a_timeout_of_the_gpu_names_the_files_that_it_was_at(source: Source, operation: str) -> None:
    with feed_of(source, None, batch_size=4, shuffle=False) as (_, gpu, epoch):

        def late(*arguments: object) -> None:
            raise LoaderTimeout("nvJPEG did not end a call within 60 s")

        setattr(gpu, operation, late)
        text = "nvJPEG did not end a call within 60 s; it worked on one of 4 files: "
        with pytest.raises(LoaderTimeout, match=text) as raised:
            next(epoch(0))
        assert raised.value.paths == tuple(source.path(i) for i in range(4))


def test_what_a_source_raises_is_raised_at_its_step(source: Source) -> None:
    broken = TappedSource(source, Raise(38, lambda: OSError("the disk is gone")))
    with feed_of(broken, fixed(0.5), shuffle=False) as (_, _, epoch):
        steps = epoch(0)
        assert next(steps).step == 0
        with pytest.raises(OSError, match="the disk is gone"):
            next(steps)


# --- memory and batches in flight -------------------------------------------------------------------------------------


def test_it_is_made_ahead_of_batches_that_wait_for_their_memory(source: Source) -> None:
    """Nobody takes a batch, so launching threads wait for places; the CPU goes on until it is eight batches ahead."""
    with feed_of(source, fixed(0.5), batch_size=4) as (feed, _, _):
        run = feed.start(0, Steps(size=len(source), batch_size=4, rank=0, world_size=1, drop_last=False))
        with deadline(20):
            while feed.meters[1].read(1.0)["samples"] < 8 * 2:
                time.sleep(0.01)
        run.stop()


@pytest.mark.parametrize(
    ("earlier", "free"),
    [
        ([], 3),
        ([None], 2),
        ([FakeEvent(), None], 1),
        ([FakeEvent(), FakeEvent(), FakeEvent(), FakeEvent(), None], 0),
    ],
)
def test_batches_of_the_epoch_before_count_while_they_are_in_use(
    source: Source, monkeypatch: pytest.MonkeyPatch, earlier: list[FakeEvent | None], free: int
) -> None:
    """So an epoch's change takes no memory for further batches, which would be kept for the whole run."""
    allocated = queue.SimpleQueue[int]()
    slots = StandIn.slots

    def counted(self: StandIn, count: int) -> Any:
        allocated.put(count)
        return slots(self, count)

    monkeypatch.setattr(StandIn, "slots", counted)
    with feed_of(source, None, batch_size=4) as (feed, _, _):
        steps = Steps(size=len(source), batch_size=4, rank=0, world_size=1, drop_last=False)
        run = feed.start(0, steps, earlier)
        waiting = [one for one in earlier[-3:] if one is not None]

        def assert_allocated(batches: int) -> None:
            for _ in range(batches):
                allocated.get(timeout=20)
            time.sleep(0.05)
            assert allocated.empty()

        assert_allocated(free)
        for one in waiting:
            one.passed = True
        assert_allocated(len(waiting))
        if None in earlier:
            run.release()
            assert_allocated(1)
        run.stop()


class LateStream:
    """Takes the place of the consumer's stream: the GPU passes an event SECONDS after it was recorded."""

    SECONDS = 0.3

    def record_event(self) -> SimpleNamespace:
        recorded = time.monotonic()
        return SimpleNamespace(query=lambda: time.monotonic() >= recorded + self.SECONDS)

    def wait_event(self, event: object) -> None: ...


@pytest.mark.parametrize("way", ["a loop", "a loop that drops its last batch", "next"])
def test_three_batches_are_in_use_at_most_whatever_the_epoch(
    source: Source, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """By the consumer, ready, or in the making, next to a GPU that is behind the program that gives it work."""
    stream, most = LateStream(), 0
    in_use: dict[int, float] = {}  # until when the GPU works on the memory of each batch; without end while it is held
    slots = StandIn.slots

    def allocate(self: StandIn, count: int) -> torch.Tensor:
        nonlocal most
        memory: torch.Tensor = slots(self, count)
        with allocating:
            number = len(in_use)

            def drop(reference: object) -> None:
                in_use[number] = time.monotonic() + stream.SECONDS - 0.05  # which a thread may take to see an event

            references.append(weakref.ref(memory, drop))
            in_use[number] = math.inf
            most = max(most, sum(end > time.monotonic() for end in in_use.values()))
        return memory

    allocating = threading.Lock()  # threads allocate for several batches at the same time
    references: list[weakref.ref[torch.Tensor]] = []
    monkeypatch.setattr(StandIn, "slots", allocate)
    monkeypatch.setattr(StandIn, "record_event", lambda self: object())
    monkeypatch.setattr("torch.cuda.current_stream", lambda device: stream)
    monkeypatch.setattr("torch.Tensor.record_stream", lambda self, stream: None)
    monkeypatch.setattr(iterator, "_timed_event", LateStream.record_event)
    monkeypatch.setattr(GpuWait, "add", lambda self, asked, begun: None)
    steps = Steps(size=len(source), batch_size=20, rank=0, world_size=1, drop_last=False)
    with feed_of(source, None) as (feed, _, _):
        stats, progress, state = Stats(*feed.meters), iterator.Progress(), BatchesInUse()
        for epoch in range(4):
            batches = iterator.EpochIterator(None, feed._plan, feed, stats, progress, state, epoch, steps)
            if way == "next":
                for _ in range(len(steps)):
                    next(batches)
                batches.close()
                continue
            for images, _ in batches:
                assert len(images)
            if way != "a loop":
                del images
        assert len(in_use) == 4 * len(steps) and most == 3


def test_the_memory_is_used_again(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []

    def acquire(size: int) -> Any:
        taken.append(size)
        return heap(size)

    monkeypatch.setattr("gpuflow.runtime.memory.pinned", acquire)
    with feed_of(source, fixed(0.5), batch_size=2) as (feed, _, epoch):
        for _ in epoch(0):
            pass
        first = len(taken)
        for _ in epoch(1):
            pass
        assert len(taken) - first <= 8, "of 44 batches, whose bytes and pixels need memory"
        assert feed._offload is not None and feed._offload._pinned._held > 0


# --- the end of an epoch ----------------------------------------------------------------------------------------------


def test_a_break_in_the_middle_leaves_nothing(source: Source) -> None:
    slow = TappedSource(source, Slow(0.002))
    with nothing_left_behind(), feed_of(slow, fixed(0.9), batch_size=4) as (_, _, epoch):
        for number in range(3):
            steps = epoch(number)
            next(steps)
            steps.close()  # type: ignore[attr-defined]


# --- what the configuration says --------------------------------------------------------------------------------------


def test_what_the_configuration_asks_for(folder: Path, tmp_path: Path) -> None:
    def chosen(share: float, *overrides: str) -> Any:
        train = [{"decode": {"cpu_share": share}}, *NHWC[1:]]
        path = write_config(tmp_path / "x.yaml", folder, train=train, run={"threads": 6})
        config = read_config(str(path), STAGES, list(overrides))
        return cpu_share_of(config, "train")

    assert chosen(0.0) is None
    share = chosen(0.25)
    assert (share.part, share.threads, share.adapts) == (0.25, 6, True)
    assert not chosen(0.25, "run.deterministic=true").adapts
