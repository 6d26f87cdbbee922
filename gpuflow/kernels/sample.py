# mypy: disable-error-code="import-untyped, no-untyped-def, untyped-decorator"
"""One launch a chunk: crop, resample, flip, and a table of 256 results a channel, from decoded images to a batch.

The kernel follows torch's antialiased interpolation (aten/native/UpSample.h): centres at (i + 0.5) * scale, a triangle
or cubic filter that widens with the scale when it shrinks, weights normalized over the taps inside the box. Rows are
resampled first and rounded to levels of 0-255, then columns, as torch does on uint8 images. The result is looked up in
a table, so normalize costs one load and equals the CPU's bit for bit.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

__all__ = ["FIELDS", "sample", "sample_reference"]

FIELDS = (
    "address", "pitch",
    "box_y", "box_x", "box_height", "box_width",
    "mirror_y", "mirror_x",
    "grid_height", "grid_width",
    "shown_y", "shown_x", "shown_height", "shown_width",
    "window_y", "window_x", "window_height", "window_width",
    "flip_y", "flip_x",
    "row",
)  # fmt: skip
"""Columns of a chunk's plan, int64 [N, len(FIELDS)]: the image's device address, bytes a row of it, fold.Sampling's
fields, and the row of the batch that it fills."""
_BLOCK = 256
_NEAREST, _BILINEAR, _BICUBIC = 0, 1, 2
_KINDS = {"nearest": _NEAREST, "bilinear": _BILINEAR, "bicubic": _BICUBIC}


@triton.jit
def _weight(distance, KIND: tl.constexpr, ANTIALIAS: tl.constexpr):
    """The filter at a distance in units of its scale: triangle, or Keys's cubic, a = -0.5 (antialiased) or -0.75."""
    x = tl.abs(distance)
    if KIND == 1:
        return tl.maximum(1.0 - x, 0.0)
    a = -0.5 if ANTIALIAS else -0.75
    near = ((a + 2.0) * x - (a + 3.0)) * x * x + 1.0
    far = (((x - 5.0) * x + 8.0) * x - 4.0) * a
    return tl.where(x < 1.0, near, tl.where(x < 2.0, far, 0.0))


@triton.jit
def _level(value):
    """Rounded to a level of 0-255, still as a float."""
    return tl.minimum(tl.maximum(tl.floor(value + 0.5), 0.0), 255.0)


@triton.jit
def _sample(
    plan, table, out, stride_n, stride_c, stride_y, stride_x,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr, FIELD_COUNT: tl.constexpr,
    KIND: tl.constexpr, ANTIALIAS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < HEIGHT * WIDTH
    row, column = at // WIDTH, at % WIDTH
    p = plan + n.to(tl.int64) * FIELD_COUNT
    image = tl.load(p).to(tl.pointer_type(tl.uint8))
    pitch = tl.load(p + 1)
    out += tl.load(p + 20) * stride_n
    box_y, box_x = tl.load(p + 2).to(tl.int32), tl.load(p + 3).to(tl.int32)
    box_h, box_w = tl.load(p + 4).to(tl.int32), tl.load(p + 5).to(tl.int32)
    grid_h, grid_w = tl.load(p + 8).to(tl.int32), tl.load(p + 9).to(tl.int32)
    shown_y, shown_x = tl.load(p + 10).to(tl.int32), tl.load(p + 11).to(tl.int32)
    shown_h, shown_w = tl.load(p + 12).to(tl.int32), tl.load(p + 13).to(tl.int32)
    gy = tl.where(tl.load(p + 18) > 0, HEIGHT - 1 - row, row) + tl.load(p + 14).to(tl.int32)
    gx = tl.where(tl.load(p + 19) > 0, WIDTH - 1 - column, column) + tl.load(p + 15).to(tl.int32)
    seen = inside & (gy >= shown_y) & (gy < shown_y + shown_h) & (gx >= shown_x) & (gx < shown_x + shown_w)

    scale_y, scale_x = box_h.to(tl.float32) / grid_h, box_w.to(tl.float32) / grid_w
    if KIND == 0:
        y = tl.minimum((gy.to(tl.float32) * scale_y).to(tl.int32), box_h - 1)
        x = tl.minimum((gx.to(tl.float32) * scale_x).to(tl.int32), box_w - 1)
        y = tl.where(tl.load(p + 6) > 0, box_h - 1 - y, y) + box_y
        x = tl.where(tl.load(p + 7) > 0, box_w - 1 - x, x) + box_x
        for c in tl.static_range(CHANNELS):
            level = tl.load(image + y * pitch + x * CHANNELS + c, seen, 0).to(tl.int32)
            value = tl.load(table + c * 256 + level, inside)
            tl.store(out + c * stride_c + row * stride_y + column * stride_x, value, inside)
        return

    wide_y = tl.maximum(scale_y, 1.0) if ANTIALIAS else scale_y * 0.0 + 1.0
    wide_x = tl.maximum(scale_x, 1.0) if ANTIALIAS else scale_x * 0.0 + 1.0
    reach_y, reach_x = wide_y * KIND, wide_x * KIND
    center_y, center_x = (gy.to(tl.float32) + 0.5) * scale_y, (gx.to(tl.float32) + 0.5) * scale_x
    if ANTIALIAS:
        first_y = tl.maximum((center_y - reach_y + 0.5).to(tl.int32), 0)
        first_x = tl.maximum((center_x - reach_x + 0.5).to(tl.int32), 0)
        end_y = tl.minimum((center_y + reach_y + 0.5).to(tl.int32), box_h)
        end_x = tl.minimum((center_x + reach_x + 0.5).to(tl.int32), box_w)
    else:
        first_y = tl.floor(center_y - 0.5).to(tl.int32) - (KIND - 1)
        first_x = tl.floor(center_x - 0.5).to(tl.int32) - (KIND - 1)
        end_y, end_x = first_y + 2 * KIND, first_x + 2 * KIND
    taps_y = (2 * reach_y).to(tl.int32) + 2
    taps_x = (2 * reach_x).to(tl.int32) + 2

    sum_0 = tl.zeros([BLOCK], tl.float32)
    sum_1 = tl.zeros([BLOCK], tl.float32)
    sum_2 = tl.zeros([BLOCK], tl.float32)
    total_y = tl.zeros([BLOCK], tl.float32)
    for j in range(taps_y):
        y = first_y + j
        weight_y = tl.where(y < end_y, _weight((y.to(tl.float32) + 0.5 - center_y) / wide_y, KIND, ANTIALIAS), 0.0)
        used = seen & (weight_y != 0.0)
        line = image + (tl.minimum(tl.maximum(y, 0), box_h - 1) + box_y) * pitch
        line_0 = tl.zeros([BLOCK], tl.float32)
        line_1 = tl.zeros([BLOCK], tl.float32)
        line_2 = tl.zeros([BLOCK], tl.float32)
        total_x = tl.zeros([BLOCK], tl.float32)
        for i in range(taps_x):
            x = first_x + i
            weight = tl.where(x < end_x, _weight((x.to(tl.float32) + 0.5 - center_x) / wide_x, KIND, ANTIALIAS), 0.0)
            tap = used & (weight != 0.0)
            pixel = line + (tl.minimum(tl.maximum(x, 0), box_w - 1) + box_x) * CHANNELS
            line_0 += weight * tl.load(pixel, tap, 0).to(tl.float32)
            if CHANNELS == 3:
                line_1 += weight * tl.load(pixel + 1, tap, 0).to(tl.float32)
                line_2 += weight * tl.load(pixel + 2, tap, 0).to(tl.float32)
            total_x += weight
        share = 1.0 / tl.where(used, total_x, 1.0)
        sum_0 += weight_y * _level(line_0 * share)
        sum_1 += weight_y * _level(line_1 * share)
        sum_2 += weight_y * _level(line_2 * share)
        total_y += weight_y
    total_y = tl.where(seen, total_y, 1.0)
    target = out + row * stride_y + column * stride_x
    for c in tl.static_range(CHANNELS):
        summed = sum_0 if c == 0 else (sum_1 if c == 1 else sum_2)
        level = _level(summed / total_y).to(tl.int32)
        tl.store(target + c * stride_c, tl.load(table + c * 256 + level, inside), inside)


def sample(plan: torch.Tensor, table: torch.Tensor, out: torch.Tensor, *, interpolation: str, antialias: bool) -> None:
    """Fill a chunk's slots.

    Args:
        plan: int64 [N, len(FIELDS)] on the device. Images are uint8, interleaved, C channels.
        table: [C, 256] on the device in the dtype of `out`: what each level becomes.
        out: [B, C, H, W] with any strides; every sample's window is H by W. Rows that no plan names stay as they are.
    """
    _, channels, height, width = out.shape
    grid: Any = (len(plan), triton.cdiv(height * width, _BLOCK))
    _sample[grid](
        plan, table, out, *out.stride(),
        HEIGHT=height, WIDTH=width, CHANNELS=channels, FIELD_COUNT=len(FIELDS),
        KIND=_KINDS[interpolation], ANTIALIAS=antialias, BLOCK=_BLOCK,
    )  # fmt: skip


def sample_reference(
    images: list[torch.Tensor], plan: torch.Tensor, table: torch.Tensor, *, interpolation: str, antialias: bool
) -> torch.Tensor:
    """The same in plain PyTorch. images: uint8 [H_i, W_i, C]; plan as above, addresses and pitches unused."""
    results = []
    for image, row in zip(images, plan.tolist(), strict=True):
        _, _, y, x, height, width, mirror_y, mirror_x, *grid, sy, sx, sh, sw, wy, wx, wh, ww, flip_y, flip_x, _ = row
        box = image[y : y + height, x : x + width].permute(2, 0, 1)[None].float()
        box = box.flip([axis for axis, on in ((2, mirror_y), (3, mirror_x)) if on])
        smooth = {"antialias": antialias, "align_corners": False} if interpolation != "nearest" else {}
        for size in ((height, grid[1]), grid):
            resized = torch.nn.functional.interpolate(box, size, mode=interpolation, **smooth)
            box = resized.add(0.5).floor().clamp(0, 255)
        levels = box[0].long()
        shown = torch.zeros_like(levels)
        rows, columns = slice(max(sy, 0), max(sy + sh, 0)), slice(max(sx, 0), max(sx + sw, 0))
        shown[:, rows, columns] = levels[:, rows, columns]
        window = torch.zeros((len(levels), wh, ww), dtype=torch.long)
        y0, x0, y1, x1 = max(wy, 0), max(wx, 0), min(wy + wh, grid[0]), min(wx + ww, grid[1])
        if y1 > y0 and x1 > x0:
            window[:, y0 - wy : y1 - wy, x0 - wx : x1 - wx] = shown[:, y0:y1, x0:x1]
        window = window.flip([axis for axis, on in ((1, flip_y), (2, flip_x)) if on])
        results.append(torch.stack([values[channel] for values, channel in zip(table, window, strict=True)]))
    return torch.stack(results)
