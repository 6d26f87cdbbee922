"""Sizes in bytes, as texts with units: MB counts in thousands, MiB in 1,024s."""

from __future__ import annotations

import pytest

from gpuflow.config.models import RunSpec


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (5_000_000, 5_000_000),
        ("5000000 B", 5_000_000),
        ("3000 KB", 3_000_000),
        ("512MB", 512_000_000),
        ("2 GB", 2_000_000_000),
        ("4096KiB", 4096 << 10),
        ("512 MiB", 512 << 20),
        ("2gib", 2 << 30),
        ("1.5 MB", 1_500_000),
    ],
)
def test_units(text: str | int, size: int) -> None:
    assert RunSpec.model_validate({"memory_limit": text}).memory_limit == size
