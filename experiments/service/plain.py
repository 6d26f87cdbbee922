"""The plain way, as in guides for beginners: OpenCV and numpy, then the model under one lock."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import cv2
import numpy as np
import torch

from gpuflow.engines import Engine

MEAN = np.array([0.485, 0.456, 0.406], np.float32)
STD = np.array([0.229, 0.224, 0.225], np.float32)


class Plain:
    """Logits of one image at a time. Any thread may call it; one at a time uses the engine."""

    def __init__(self, engine: Engine, device: torch.device) -> None:
        self._engine, self._device, self._lock = engine, device, threading.Lock()

    def __call__(self, data: bytes) -> torch.Tensor:
        image = self._image(data)
        with self._lock:
            return self._engine.run(image.to(self._device))[0]

    def each(self, files: Sequence[bytes]) -> list[torch.Tensor]:
        """Several images, one after the other."""
        return [self(data) for data in files]

    def batch(self, files: Sequence[bytes]) -> list[torch.Tensor]:
        """Several images, prepared one after the other, then the model on batches of them."""
        images = torch.cat([self._image(data) for data in files])
        most = self._engine.batch
        with self._lock:
            parts = [images[begin : begin + most].to(self._device) for begin in range(0, len(files), most)]
            return [logits for part in parts for logits in self._engine.run(part)]

    def _image(self, data: bytes) -> torch.Tensor:
        image: Any = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR)
        image = cv2.cvtColor(image, cv2.COLOR_BGR2RGB)
        height, width = image.shape[:2]
        scale = 256 / min(height, width)
        image = cv2.resize(image, (round(width * scale), round(height * scale)))
        top, left = (image.shape[0] - 224) // 2, (image.shape[1] - 224) // 2
        image = image[top : top + 224, left : left + 224]
        pixels = (image.astype(np.float32) / 255 - MEAN) / STD
        return torch.from_numpy(np.ascontiguousarray(pixels.transpose(2, 0, 1)))[None]
