"""normalize as part of a model. Separate, because processes that only draw random numbers do not need torch."""

from __future__ import annotations

import torch


class NormalizeModule(torch.nn.Module):
    """Computes (image / 255 - mean) / std of uint8 images [N, C, H, W], as `Normalize.table` does for each level."""

    mean: torch.Tensor
    std: torch.Tensor

    def __init__(self, mean: tuple[float, ...], std: tuple[float, ...], dtype: torch.dtype) -> None:
        super().__init__()
        for name, values in (("mean", mean), ("std", std)):
            self.register_buffer(name, torch.tensor(values, dtype=torch.float32, device="cpu")[:, None, None])
        self._dtype = dtype

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return ((images.to(torch.float32) * (1.0 / 255) - self.mean) / self.std).to(self._dtype)
