"""Replaces a GPU's stream, whose device memory is then the host's, and events on it."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

__all__ = ["FakeEvent", "HostStream"]


class FakeEvent:
    """Replaces a `torch.cuda.Event`, which the GPU has passed once a test sets `passed`."""

    passed = False

    def query(self) -> bool:
        return self.passed


class HostStream:
    """Replaces `DeviceStream`, its CUDA stream and the events on it. Queued work runs immediately.

    calls: counts `copies` to the device and calls of `synchronize`.
    """

    device, cuda_stream, cuda_event = torch.device("cpu"), 7, 9

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.stream = self

    def on_new_stream(self) -> HostStream:
        return HostStream()

    def wait_stream(self, other: HostStream) -> None:
        assert other is self, "there is one stream alone"

    def queued(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def record_event(self, *, blocking: bool = False, stream: Any = None) -> HostStream:
        return self

    def query(self) -> bool:
        """As an event: what it stands for has passed."""
        return True

    def synchronize(self) -> None:
        """As an event, too."""
        self.calls["synchronize"] += 1

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(tuple(shape), dtype=dtype)

    def send(self, host: torch.Tensor) -> torch.Tensor:
        self.calls["copies"] += 1
        return host.clone()

    def send_all(self, arrays: Sequence[NDArray[Any]]) -> list[torch.Tensor]:
        self.calls["copies"] += 1
        return [torch.from_numpy(np.array(array)) for array in arrays]

    def copy_into(self, target: torch.Tensor, host: torch.Tensor) -> None:
        self.calls["copies"] += 1
        target.copy_(host)

    def receive(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def retain_until_done(self, memory: Any, on_done: Callable[[Any], None] | None = None) -> None:
        """What was queued is done."""
        if on_done is not None:
            on_done(memory)
