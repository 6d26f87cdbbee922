"""`send_all` without a GPU; the rest of DeviceStream needs one: tests/execute/test_gpu.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from gpuflow.execute.device_stream import DeviceStream


class OnCpu:
    """The part of a device stream that `send_all` needs, on the CPU."""

    def __init__(self) -> None:
        self.transfers = 0

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.full(tuple(shape), 77, dtype=dtype)

    def send(self, host: torch.Tensor) -> torch.Tensor:
        self.transfers += 1
        return host.clone()


@pytest.mark.parametrize("count", [0, 1, 3, 7, 50, 256])
def test_arrays_of_any_dtype_and_shape_go_in_one_transfer(count: int) -> None:
    labels, plan = np.arange(count), np.arange(count * 21).reshape(count, 21)
    arrays = [labels, labels % 2 == 0, labels[::-1], plan, plan[:, ::3].astype(np.float64)]
    device: Any = OnCpu()
    sent = DeviceStream.send_all(device, arrays)
    assert device.transfers == 1
    for array, tensor in zip(arrays, sent, strict=True):
        expected = torch.from_numpy(array.copy())
        assert tensor.dtype == expected.dtype and torch.equal(tensor, expected)
