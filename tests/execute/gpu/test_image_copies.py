"""Copies of images: which of them C code makes, and where they end."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from gpuflow.execute.gpu.gpu_call import Transfer
from gpuflow.execute.gpu.launches import ImageCopies
from gpuflow.execute.gpu.results import ImageRows
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
        copies.queue([(ImageRows(source, here), ImageRows(target, there))])
    driver.check()
    expected = torch.zeros_like(target)
    expected[there.tolist()] = source[here.tolist()]
    assert torch.equal(target, expected)
    assert copies._memory.qsize() == 1


@pytest.mark.parametrize("by_c", [True, False])
def test_pinned_results_are_transferred_first(driver: FakeDriver, by_c: bool) -> None:
    results, memory = torch.arange(96, dtype=torch.uint8).view(2, 48), torch.zeros(2, 48, dtype=torch.uint8)
    target = torch.zeros(4, 3, 4, 4, dtype=torch.uint8)
    source = ImageRows(memory.view(2, 3, 4, 4), np.arange(2))
    stream: Any = HostStream()
    copies = ImageCopies(stream, driver.code() if by_c else None)
    driver.calls.clear()
    copies.queue([(source, ImageRows(target, np.array([3, 1])))], Transfer(results, memory))
    driver.check()
    assert torch.equal(target[[3, 1]].reshape(2, 48), results) and not target[[0, 2]].any()
    assert [call[0] for call in driver.calls].count("transfer") == (2 if by_c else 0), "of the plans and the results"


PART = torch.rand(2, 3, 4, 16)[..., :8]
WHOLE = torch.rand(2, 3, 4, 8)
ODD = torch.randint(0, 256, (2, 3, 3, 3), dtype=torch.uint8)


@pytest.mark.parametrize(
    "sources", [[WHOLE, PART], [PART, WHOLE], [ODD]], ids=["gaps in one", "gaps in the first", "27 bytes"]
)
def test_torch_copies_what_c_code_does_not_take(driver: FakeDriver, sources: list[torch.Tensor]) -> None:
    copies, targets = copies_of(driver), [torch.zeros_like(source) for source in sources]
    driver.calls.clear()
    here, there = np.array([1]), np.array([0])
    copies.queue([(ImageRows(a, here), ImageRows(b, there)) for a, b in zip(sources, targets, strict=True)])
    assert driver.calls == []
    for source, target in zip(sources, targets, strict=True):
        assert torch.equal(target[0], source[1]) and not target[1].any()


def test_a_kernel_that_cannot_be_captured(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any) -> None:
        raise RuntimeError("no graph")

    monkeypatch.setattr("gpuflow.execute.gpu.launches.capture_launch", fail)
    copies, target = copies_of(driver), torch.zeros_like(WHOLE)
    driver.calls.clear()
    copies.queue([(ImageRows(WHOLE, np.array([0])), ImageRows(target, np.array([1])))])
    assert torch.equal(target[1], WHOLE[0]) and driver.calls == []
