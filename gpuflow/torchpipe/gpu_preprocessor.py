"""Preprocessing on the GPU where a model is served: by the runner that feeds training, so with the same pixels."""

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
    """Encoded images to images on the GPU, several at a time. Any thread may call it.

    Args:
        runner, device_stream: as training has them; this one's own.
        take, give: lend pinned memory of at least so many bytes, and take it back.
    """

    def __init__(
        self,
        runner: ChunkRunner,
        device_stream: DeviceStream,
        *,
        take: Callable[[int], NDArray[np.uint8]],
        give: Callable[[NDArray[np.uint8]], None],
    ) -> None:
        self._runner, self._device_stream, self._take, self._give = runner, device_stream, take, give

    def run(self, files: Sequence[bytes]) -> list[torch.Tensor | BadSampleError]:
        """For each file its image [1, C, H, W], ready for any stream, or why it is bad. Waits for the GPU."""
        payload = Payload.of(files, self._take)
        slots = self._runner.slots(len(files))
        try:
            prepared = self._runner.prepare(payload, Keys(0, 0, np.zeros(len(files), np.int64)))
            faults = self._runner.launch(prepared, slots)
        finally:
            self._device_stream.record_event(blocking=True).synchronize()  # the bytes are read, and the images written
            self._give(payload.buffer)
        return [slots[i : i + 1] if fault is None else fault for i, fault in enumerate(faults)]

    def check(self) -> None:
        """Have the runner decode gpuflow's own test image. Raises DecoderError where that fails."""
        self._runner.check()

    def close(self) -> None:
        """Wait until nothing is queued any more."""
        self._device_stream.close()
