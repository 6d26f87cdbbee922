"""Transforms that fail, for `gpuflow parity FILE --against torchvision:tests.parity.failing_transforms:NAME`."""

from __future__ import annotations

from typing import Any

from PIL import Image

from tests.migration.their_transforms import val


def always(image: Any) -> Any:
    raise ValueError("no image is good enough")


def photographs(image: Any) -> Any:
    """Raises for the size that the tests' photographs have."""
    if image.size == (40, 40):
        raise ValueError("not this size")
    return val(image)


def on_white(image: Any) -> Any:
    """Puts what Pillow takes for transparent on white, as transformers does."""
    if image.has_transparency_data:
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA")).convert("RGB")
    return val(image)
