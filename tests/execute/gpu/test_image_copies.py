"""Copies of images by C code: which images it takes, and where they end."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from gpuflow.execute.gpu.gpu_call import Transfer
from gpuflow.execute.gpu.launches import ImageCopies, ImageRows
from tests.execute.gpu.fake_driver import FakeDriver, copy_images, use_c_code
from tests.host_stream import HostStream


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    driver = FakeDriver()
    use_c_code(monkeypatch, copy_images, lambda library: driver)
    return driver


def copies_of(driver: FakeDriver) -> ImageCopies:
    stream: Any = HostStream()
    return ImageCopies(stream, driver.code())


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_rows_end_in_their_places(driver: FakeDriver, layout: torch.memory_format) -> None:
    source = torch.rand(5, 3, 4, 8).to(memory_format=layout)
    target = torch.zeros(9, 3, 4, 8).to(memory_format=layout)
    here, there = np.array([4, 0, 2]), np.array([1, 8, 3])
    copies = copies_of(driver)
    for _ in range(2):  # with memory for plans that is new, then used again
        assert copies.queue([(ImageRows.of(source, here), ImageRows.of(target, there))])
    driver.check()
    expected = torch.zeros_like(target)
    expected[there.tolist()] = source[here.tolist()]
    assert torch.equal(target, expected)
    assert copies._memory.qsize() == 1


def test_pinned_results_are_transferred_first(driver: FakeDriver) -> None:
    results, memory = torch.arange(96, dtype=torch.uint8).view(2, 48), torch.zeros(2, 48, dtype=torch.uint8)
    target = torch.zeros(4, 3, 4, 4, dtype=torch.uint8)
    source = ImageRows(memory.data_ptr(), 48, 48, np.arange(2))
    assert copies_of(driver).queue([(source, ImageRows.of(target, np.array([3, 1])))], Transfer(results, memory))
    driver.check()
    assert torch.equal(target[[3, 1]].reshape(2, 48), results) and not target[[0, 2]].any()


def test_what_it_does_not_take(driver: FakeDriver) -> None:
    """The caller then copies by other means; nothing is queued."""
    rows, target = np.array([0]), torch.zeros(1, 3, 4, 8)
    part = torch.zeros(1, 3, 4, 16)[..., :8]
    assert ImageRows.of(part, rows) is None, "an image with gaps"
    odd = torch.zeros(2, 3, 3, 3, dtype=torch.uint8)
    copies = copies_of(driver)
    driver.calls.clear()
    whole = ImageRows.of(target, rows)
    assert not copies.queue([(whole, whole), (ImageRows.of(part, rows), whole)])
    assert not copies.queue([(ImageRows.of(odd, rows), ImageRows.of(odd, rows + 1))]), "27 bytes"
    assert driver.calls == []
    stream: Any = HostStream()
    assert not ImageCopies(stream, None).queue([(whole, whole)])


def test_a_kernel_that_cannot_be_captured(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any) -> None:
        raise RuntimeError("no graph")

    monkeypatch.setattr("gpuflow.execute.gpu.launches.capture_launch", fail)
    whole = ImageRows.of(torch.zeros(1, 3, 4, 8), np.array([0]))
    assert not copies_of(driver).queue([(whole, whole)])
