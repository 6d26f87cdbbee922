"""Small arrays in one transfer, without a GPU; the rest of DeviceStream needs one: tests/execute/test_gpu.py."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest
import torch

from gpuflow.execute.device_stream import DeviceStream, send_array


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
    for array, tensor in zip([*arrays, plan], [*sent, send_array(device, plan)], strict=True):
        expected = torch.from_numpy(array.copy())
        assert tensor.dtype == expected.dtype and torch.equal(tensor, expected)
