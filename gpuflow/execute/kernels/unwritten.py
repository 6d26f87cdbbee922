# mypy: disable-error-code="import-untyped, no-untyped-def, untyped-decorator"
"""Finds decoded images that still show unwritten blocks of the blank image decoded before them.

A JPEG decoder writes blocks of 8 by 8 pixels or more. In a block that it did not write, luma is still the blank image's
everywhere; chroma may be blended with that of the neighbours near the block's edges, but not in its middle.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from gpuflow.decode.blank_images import BLANK_COLOR, BLANK_LEVEL

__all__ = ["FIELDS", "unwritten"]

FIELDS = ("address", "pitch", "height", "width", "gray")
"""Columns of the images' description, int64 [N, len(FIELDS)]: device address, bytes per row, size in pixels, and
whether the file has luma only."""
_COLUMNS = 128
_SHOWN = tl.constexpr(4)
"""If a block at the image's edge shows fewer pixels than this, all of them may be blended with a neighbour's chroma."""
_LEVEL, _RED, _GREEN, _BLUE = (tl.constexpr(level) for level in (BLANK_LEVEL, *BLANK_COLOR))


@triton.jit
def _unwritten(
    images, found, FIELD_COUNT: tl.constexpr, CHANNELS: tl.constexpr, BGR: tl.constexpr, COLUMNS: tl.constexpr
):
    """Check one row of blocks of one image."""
    p = images + tl.program_id(0).to(tl.int64) * FIELD_COUNT
    image, pitch = tl.load(p).to(tl.pointer_type(tl.uint8)), tl.load(p + 1)
    height, width = tl.load(p + 2).to(tl.int32), tl.load(p + 3).to(tl.int32)
    gray = tl.load(p + 4).to(tl.int32)
    y = tl.program_id(1) * 8 + tl.arange(0, 8)[:, None]
    if tl.program_id(1) * 8 < height:
        for start in range(0, width, COLUMNS):
            x = start + tl.arange(0, COLUMNS)[None, :]
            inside = (y < height) & (x < width)
            pixel = image + y * pitch + x * CHANNELS
            if CHANNELS == 1:
                luma = tl.load(pixel, inside, 0).to(tl.float32)
                exact = inside
            else:
                r = tl.load(pixel + (2 if BGR else 0), inside, 0).to(tl.float32)
                g = tl.load(pixel + 1, inside, 0).to(tl.float32)
                b = tl.load(pixel + (0 if BGR else 2), inside, 0).to(tl.float32)
                luma = 0.299 * r + 0.587 * g + 0.114 * b
                near = (tl.abs(r - _RED) <= 2) & (tl.abs(g - _GREEN) <= 2) & (tl.abs(b - _BLUE) <= 2)
                exact = near | (x * 0 + gray > 0)
            # A block at the image's edge may show too few pixels to judge by its colour.
            narrow = (height - (y & -8) < _SHOWN) | (width - (x & -8) < _SHOWN)
            same = (tl.abs(luma - _LEVEL) <= 1.5) | (inside == 0)
            blocks = tl.reshape(same.to(tl.int32), (8, COLUMNS // 8, 8))
            whole = tl.min(tl.min(blocks, axis=2), axis=0)
            shown = tl.reshape(((exact | narrow) & inside).to(tl.int32), (8, COLUMNS // 8, 8))
            seen = tl.max(tl.max(shown, axis=2), axis=0)
            if tl.max(whole * seen, axis=0) > 0:
                tl.store(found + tl.program_id(0), 1)


def unwritten(images: torch.Tensor, tallest: int, *, color: str) -> torch.Tensor:
    """Find images that show a block of the blank image: uint8 [N], 0 or 1, for descriptions int64 [N, len(FIELDS)].

    tallest: the largest height of these images. color: their channels in memory: `rgb`, `bgr` or `gray`.
    """
    found = torch.zeros(len(images), dtype=torch.uint8, device=images.device)
    channels = 1 if color == "gray" else 3
    _unwritten[len(images), -(-tallest // 8)](
        images, found, FIELD_COUNT=len(FIELDS), CHANNELS=channels, BGR=color == "bgr", COLUMNS=_COLUMNS, num_warps=4
    )
    return found
