"""Meters: what a stage did, what it is at, and whose fault a wait is."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import pytest
import torch

from gpuflow.runtime.metrics import Meter, Stats, nvtx, oldest_operation
from tests.datasets import deadline


def test_a_meter_counts_samples_bytes_and_time() -> None:
    meter, begun = Meter("decode", 2), time.perf_counter()
    with meter.work(3):
        time.sleep(0.02)
    with meter.work(2):
        pass
    took = time.perf_counter() - begun
    meter.add(read_bytes=100, cpu_s=0.0)
    read = meter.read(10 * took)
    assert (read["samples"], read["bytes"], read["threads"]) == (5, 100, 2)
    assert read["images_per_s"] == round(0.5 / took, 1)
    assert 0.02 / (20 * took) <= read["busy_share"] + 1e-4 <= 1 / 20 + 2e-4


def test_a_meter_counts_work_that_failed() -> None:
    meter = Meter("decode", 1)
    with pytest.raises(KeyError), meter.work(3):
        raise KeyError
    assert meter.read(1.0)["samples"] == 3
    assert meter.operations() == []


def test_a_meters_share_is_of_all_its_threads_and_never_above_one() -> None:
    meter = Meter("decode", 4)

    def work() -> None:
        with meter.work(1):
            time.sleep(0.05)

    threads, begun = [threading.Thread(target=work) for _ in range(4)], time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    took = time.perf_counter() - begun
    assert meter.read(0.04)["busy_share"] == 1.0
    assert 0.05 / (10 * took) <= meter.read(10 * took)["busy_share"] + 1e-4 <= 0.1 + 2e-4


def test_before_any_time_has_passed() -> None:
    assert Meter("decode", 1).read(0.0) == {
        "samples": 0,
        "images_per_s": 0.0,
        "busy_share": 0.0,
        "cpu_s": 0.0,
        "threads": 1,
        "bytes": 0,
    }


def test_processor_time_is_that_of_the_operation() -> None:
    meter = Meter("decode", 1)
    with meter.work(1):
        time.sleep(0.05)
        end = time.thread_time() + 0.03
        while time.thread_time() < end:
            pass
    assert 0.03 <= meter.read(0.1)["cpu_s"] <= 0.05


def test_the_culprit_is_the_stage_that_is_longest_at_one_operation() -> None:
    read, decode = Meter("read", 1), Meter("decode", 1)
    assert oldest_operation(read, decode) is None
    with decode.work(1, "a.jpg"), read.work(1):
        oldest = oldest_operation(read, decode)
        assert oldest is not None
        assert (oldest.stage, oldest.subject, oldest.thread) == ("decode", "a.jpg", threading.get_ident())
        assert re.fullmatch(r"the stage '(decode|read)' has been at one operation for \d+\.\d s", str(oldest))
    assert oldest_operation(read, decode) is None


def test_an_operation_within_another_is_the_culprit_if_most_time_went_to_it() -> None:
    """As where decoding reads one replacement after another, each of them in a moment."""
    read, decode = Meter("read", 1), Meter("decode", 1)

    def culprit() -> str:
        oldest = oldest_operation(read, decode)
        assert oldest is not None
        return oldest.slowest()

    with decode.work(1):
        for _ in range(5):
            with read.work(0):
                time.sleep(0.02)
                assert culprit() == "read"
        assert culprit() == "read"
        with deadline(20):
            while culprit() == "read":
                time.sleep(0.02)
    with decode.work(1):
        assert culprit() == "decode", "what was before does not count"


def test_an_epoch_starts_from_zero_and_ends_its_clock() -> None:
    meter = Meter("read", 1)
    stats = Stats(meter)
    with meter.work(5):
        pass
    stats.count_batch(0.5)
    stats.start_epoch(3)
    read = stats.read()
    assert (read["epoch"], read["batches"], read["consumer_wait_s"]) == (3, 0, 0.0)
    assert read["stages"]["read"]["samples"] == 0
    stats.count_batch(0.25)
    stats.count_batch(0.25)
    stats.end_epoch()
    at_end = stats.read()
    time.sleep(0.01)
    assert stats.read() == at_end
    assert (at_end["batches"], at_end["consumer_wait_s"]) == (2, 0.5)


# --- totals, the sentence, ranges -------------------------------------------------------------------------------------


def test_totals_run_on_over_epochs() -> None:
    meter = Meter("decode", 1)
    stats = Stats(meter)
    for epoch in range(2):
        stats.start_epoch(epoch)
        meter.add(samples=3, read_bytes=10, busy_s=0.5)
        stats.count_batch(0.25)
    assert (meter.read(1.0)["samples"], stats.read()["batches"]) == (3, 1)
    totals = meter.totals
    assert (totals.samples, totals.read_bytes, totals.busy_s) == (6, 20, 1.0)
    assert stats.totals() == (2, 0.5)


def test_the_sentence_names_the_wait_and_the_busiest_stage() -> None:
    read, decode = Meter("read", 1), Meter("decode", 2)
    stats = Stats(read, decode)
    assert stats.summary() == ""
    time.sleep(0.01)
    stats.count_batch(1000.0)
    read.add(busy_s=0.001)
    decode.add(busy_s=1000.0)
    assert stats.summary() == "the step waited 100% on data; decode is busy 100%"
    stats.gpu_wait_share = 0.124
    assert stats.summary() == "the step waited 12% on data; decode is busy 100%"
    stats.start_epoch(1)
    assert stats.summary() == ""


def test_ranges_surround_each_operation() -> None:
    seen: list[str] = []

    @contextmanager
    def ranges(name: str) -> Iterator[None]:
        seen.append(f"begin {name}")
        yield
        seen.append(f"end {name}")

    meter = Meter("decode", 1, ranges=ranges)
    with meter.work(2):
        seen.append("work")
    assert seen == ["begin gpuflow.decode", "work", "end gpuflow.decode"]


def test_nvtx_is_off_by_default_and_without_a_gpu() -> None:
    assert nvtx(False) is nullcontext
    if not torch.cuda.is_available():
        assert nvtx(True) is nullcontext


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_nvtx_ranges_nest_on_a_gpu() -> None:
    ranges = nvtx(True)
    with ranges("gpuflow.outer"), ranges("gpuflow.inner"):
        pass
