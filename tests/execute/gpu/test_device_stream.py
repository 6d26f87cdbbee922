"""Small arrays in one transfer, without a GPU; test_batches_gpu.py tests the rest of DeviceStream on one."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gpuflow.execute.gpu.device_stream import DeviceStream


class OnCpu:
    """The part of a device stream that `send_all` needs, on the CPU."""

    device = torch.device("cpu")

    def queued(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    send_all = DeviceStream.send_all


@pytest.mark.parametrize("count", [0, 1, 3, 7, 50, 256])
def test_arrays_of_any_dtype_and_shape_go_in_one_transfer(count: int) -> None:
    labels, plan = np.arange(count), np.arange(count * 21).reshape(count, 21)
    arrays = [labels, labels % 2 == 0, labels[::-1], plan, plan[:, ::3].astype(np.float64)]
    device: Any = OnCpu()
    sent = device.send_all(arrays)
    assert len({tensor.untyped_storage().data_ptr() for tensor in sent}) == 1
    for array, tensor in zip([*arrays, plan], [*sent, *device.send_all([plan])], strict=True):
        expected = torch.from_numpy(array.copy())
        assert tensor.dtype == expected.dtype and torch.equal(tensor, expected)


class Calls(TorchDispatchMode):
    """Counts the operations of torch."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.number = 0

    def __torch_dispatch__(
        self, operation: Any, types: Any, arguments: Sequence[Any] = (), named: Mapping[str, Any] | None = None
    ) -> Any:
        self.number += 1
        return operation(*arguments, **(named or {}))


@pytest.mark.skipif(torch.__version__.startswith("2.9."), reason="torch 2.9 detaches a tensor twice in numpy()")
def test_small_arrays_take_few_calls_of_torch() -> None:
    """Each lets another thread have Python's interpreter, for which the training's thread then waits."""
    device: Any = OnCpu()
    plan, labels = np.zeros((256, 21), np.int64), np.arange(256)
    with Calls() as calls:
        device.send_all([plan])
    assert calls.number <= 2, "memory and the copy"
    with Calls() as calls:
        device.send_all([labels, labels + 1, labels % 2 == 0])
    assert calls.number <= 10, "memory, a view for each dtype, a slice for each array; 13 with views for each array"
