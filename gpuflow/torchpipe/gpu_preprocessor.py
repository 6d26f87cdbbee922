"""Preprocesses images on the GPU for serving, with the runner that feeds training, so the pixels are the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from gpuflow.errors import BadSampleError
from gpuflow.pipeline.stage import Keys
from gpuflow.sources import Payload

if TYPE_CHECKING:
    from gpuflow.execute.device_stream import ChunkRunner, DeviceStream

__all__ = ["GpuPreprocessor"]


class GpuPreprocessor:
    """Encoded images to images on the GPU, several at a time. Any thread may call any method.

    Args:
        runner, device_stream: as in training; used by this preprocessor alone.
        acquire, release: get pinned memory of at least that many bytes, and return it.
    """

    def __init__(
        self,
        runner: ChunkRunner,
        device_stream: DeviceStream,
        *,
        acquire: Callable[[int], NDArray[np.uint8]],
        release: Callable[[NDArray[np.uint8]], None],
    ) -> None:
        self._runner, self._device_stream, self._acquire, self._release = runner, device_stream, acquire, release

    def run(self, files: Sequence[bytes]) -> list[torch.Tensor | BadSampleError]:
        """Each file's image [1, C, H, W], ready for any stream, or why it is bad. Waits for the GPU."""
        payload = Payload.of(files, self._acquire)
        slots = self._runner.slots(len(files))
        try:
            prepared = self._runner.prepare(payload, Keys(0, 0, np.zeros(len(files), np.int64)))
            faults = self._runner.launch(prepared, slots)
        finally:
            self._device_stream.record_event(blocking=True).synchronize()  # bytes are read, images written
            self._release(payload.buffer)
        return [slots[i : i + 1] if fault is None else fault for i, fault in enumerate(faults)]

    def check(self) -> None:
        """Decode gpuflow's own test image. Raises DecoderError if that fails."""
        self._runner.check()

    def close(self) -> None:
        """Wait until the GPU has finished all queued work."""
        self._device_stream.close()
