"""How long a GPU waits for batches, with events at made-up times."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Literal

import pytest

from gpuflow.execute.gpu.runner import GpuRunner
from gpuflow.loader.iterator import GpuWait
from gpuflow.loader.lowering import _FIRST_BATCHES, Feed


class Event:
    """A timed event that the GPU comes to at a time in milliseconds, if it has."""

    def __init__(self, at: float, passed: bool = True) -> None:
        self.at, self.passed = at, passed

    def query(self) -> bool:
        return self.passed

    def elapsed_time(self, other: Event) -> float:
        assert self.passed and other.passed, "CUDA raises"
        return other.at - self.at


def wait_of(waits: list[float], step: float = 20.0) -> GpuWait:
    """After steps of `step` milliseconds, before each of which the GPU waited for its batch."""
    measured, now = GpuWait(), 0.0
    for wait in waits:
        asked: Any = Event(now)
        begun: Any = Event(now + wait)
        measured.add(asked, begun)
        now += wait + step
    return measured


@pytest.mark.parametrize(("wait", "share"), [(0.0, 0.0), (5.0, 0.2), (20.0, 0.5), (180.0, 0.9)])
def test_the_share_is_that_of_the_gpus_time(wait: float, share: float) -> None:
    assert wait_of([wait] * 40).share == pytest.approx(share)


def test_the_first_batches_do_not_count() -> None:
    assert wait_of([500.0] * 7).share == 0.0
    assert wait_of([500.0] * 8).share > 0.9


def test_what_was_long_ago_is_forgotten() -> None:
    assert wait_of([200.0] * 50 + [0.0] * 100).share < 0.05
    assert wait_of([0.0] * 100 + [200.0] * 50).share > 0.85


def test_a_loop_that_does_nothing_waits_all_the_time() -> None:
    assert wait_of([8.0] * 40, step=0.01).share > 0.99


def test_batches_count_once_the_gpu_has_come_to_them() -> None:
    measured = GpuWait()
    events: list[Any] = [Event(30.0 * i, passed=False) for i in range(40)]
    for asked, begun in zip(events[::2], events[1::2], strict=True):
        measured.add(asked, begun)
    assert measured.share == 0.0
    for event in events:
        event.passed = True
    measured.add(Event(1200.0), Event(1230.0))  # type: ignore[arg-type]
    assert measured.share == pytest.approx(0.5)


class FakeRunner:
    """Has the attributes of a `GpuRunner` that `set_gpu_wait` uses, and is its own decoders and buffers: records the
    calls that these receive."""

    def __init__(self, decoder_calls: int | Literal["auto"] = "auto") -> None:
        self._decoder_calls = decoder_calls
        self._decoders = self._buffers = self
        self._long_waits = self._settled = 0
        self.starved: list[bool] = []
        self.grown: list[int] = []
        self.freed: list[str] = []

    def set_starved(self, starved: bool) -> None:
        self.starved.append(starved)

    def grow(self, most: int) -> None:
        self.grown.append(most)

    def release_second(self) -> None:
        self.freed.append("a decoder")

    def shrink(self, most: int) -> None:
        self.freed.append(f"buffers over {most}")


@pytest.mark.parametrize(
    ("share", "starved", "grown"), [(0.0, False, []), (0.1, False, [2]), (0.49, False, [2]), (0.9, True, [3])]
)
def test_a_second_call_is_for_a_gpu_that_waits_most_of_its_time(share: float, starved: bool, grown: list[int]) -> None:
    """A training step that waits a little has no use for it: two calls at a time slow the step."""
    runner: Any = FakeRunner()
    for _ in range(40):
        GpuRunner.set_gpu_wait(runner, share)
    assert (runner.starved[-1:], runner.grown[-1:]) == ([starved], grown)


@pytest.mark.parametrize(("decoder_calls", "starved", "grown"), [(1, False, 2), (2, True, 3)])
def test_the_number_of_calls_may_be_fixed(decoder_calls: int, starved: bool, grown: int) -> None:
    runner: Any = FakeRunner(decoder_calls)
    for share in [0.1] + [0.9] * 40 + [0.1] * 300:
        GpuRunner.set_gpu_wait(runner, share)
    assert set(runner.starved) == {starved} and set(runner.grown) == {grown}
    assert bool(runner.freed) == (decoder_calls == 1)


def test_the_first_batches_of_a_training_are_late_and_begin_no_second_call() -> None:
    runner: Any = FakeRunner()
    for share in [0.9] * 31 + [0.4] + [0.9] * 31:
        GpuRunner.set_gpu_wait(runner, share)
    assert not any(runner.starved) and set(runner.grown) == {2}
    GpuRunner.set_gpu_wait(runner, 0.9)
    assert runner.starved[-1]


def test_memory_for_a_second_call_is_given_back_after_many_batches_without_long_waits() -> None:
    runner: Any = FakeRunner()
    for share in [0.9] * 40 + [0.3] * 255 + [0.9] + [0.3] * 255:
        GpuRunner.set_gpu_wait(runner, share)
    assert runner.freed == []
    GpuRunner.set_gpu_wait(runner, 0.0)
    assert runner.freed == ["a decoder", "buffers over 2"]
    for _ in range(256):
        GpuRunner.set_gpu_wait(runner, 0.0)
    assert runner.freed == ["a decoder", "buffers over 2"] * 2, "what was in use the first time"


class FakeRunnerAndAdmission:
    """Takes the place of a runner and of the limit on batches in flight: records the shares of waiting time that the
    runner is given, and how often the limit is raised."""

    def __init__(self) -> None:
        self.shares: list[float] = []
        self.grown = 0

    def set_gpu_wait(self, share: float) -> None:
        self.shares.append(share)

    def grow(self) -> None:
        self.grown += 1


def test_late_batches_at_first_take_no_memory() -> None:
    """Memory taken for them would be kept for the whole run."""
    fake = FakeRunnerAndAdmission()
    feed: Any = SimpleNamespace(_first_batches_left=_FIRST_BATCHES, _plan=SimpleNamespace(gpu=fake))

    def after_batches(count: int, share: float) -> tuple[set[float], int]:
        """Measure the same share `count` times: the shares that the runner was given, and the raises of the limit."""
        fake.shares, fake.grown = [], 0
        for _ in range(count):
            Feed.set_gpu_wait(feed, share, fake.grow)
        return set(fake.shares), fake.grown

    assert after_batches(_FIRST_BATCHES - 1, 0.9) == ({0.0}, 0), "a loader's first batches"
    assert after_batches(3, 0.9) == ({0.9}, 3)
    assert after_batches(3, 0.4) == ({0.4}, 0), "a training that waits less often gains nothing by it"
