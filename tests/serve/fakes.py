"""Fake engines, which compute little, and hooks that make them slow, hang or fail."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, final

import torch

from gpuflow.engines import ModelInfo

CLASSES = ("red", "green", "blue")


def mean_color(images: torch.Tensor) -> torch.Tensor:
    """The mean of each channel: float32 [N, C]."""
    return images.float().mean(dim=(2, 3))


def threads_of_a_new_thread() -> int:
    """How many threads torch's operators use on a new thread."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(torch.get_num_threads).result(timeout=30)


@final
class FakeEngine:
    """Calls `before(count)`, returns `model(images)`, and records the calls."""

    info = ModelInfo(classes=CLASSES)

    def __init__(
        self,
        model: Callable[[torch.Tensor], torch.Tensor] = mean_color,
        *,
        before: Callable[[int], object] = lambda count: None,
        batch: int = 4,
    ) -> None:
        self._model, self._before, self.batch = model, before, batch
        self.counts: list[int] = []
        self.threads: set[int] = set()
        self.torch_threads = self.bound_thread = 0
        self.closed = self.warm = False

    def warm_up(self) -> None:
        self.warm = True

    def bind_thread(self) -> None:
        self.bound_thread = threading.get_native_id()

    def run(self, images: torch.Tensor) -> torch.Tensor:
        assert not self.closed and 1 <= len(images) <= self.batch
        self.counts.append(len(images))
        self.threads.add(threading.get_native_id())
        self.torch_threads = torch.get_num_threads()
        self._before(len(images))
        return self._model(images)

    def describe(self) -> dict[str, Any]:
        return {"engine": "fake", "batch": self.batch}

    def close(self) -> None:
        assert not self.closed
        self.closed = True


@final
class Gate:
    """For `before`: the model waits until `open` is called. `reached` is set when it waits."""

    def __init__(self) -> None:
        self.reached, self._opened = threading.Event(), threading.Event()

    def __call__(self, count: int) -> None:
        self.reached.set()
        assert self._opened.wait(timeout=60)

    def open(self) -> None:
        self._opened.set()


@final
class Nap:
    """For `before`: every batch takes `seconds`."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __call__(self, count: int) -> None:
        time.sleep(self.seconds)


@final
class Break:
    """For `before`: the model raises this."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __call__(self, count: int) -> None:
        raise self.error
