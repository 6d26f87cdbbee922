"""Colour arithmetic on planes of levels, each function equal to torchvision v2's on uint8 tensors, to the bit.

Where numba is installed, loops that it compiles take the place of PyTorch's operations: one call each, which leaves the
interpreter to other threads, instead of some ten that wait for it after each other.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gpuflow.execute.jit import loops_of

__all__ = ["IN_PYTORCH", "adjust_hue", "adjust_saturation", "compile_loop", "compiled_by", "luma", "multiply_colors"]

_STRIP = 2**19
"""How many pixels PyTorch's operations process at a time, which limits the memory of their float32 copies."""


def luma(planes: NDArray[np.uint8], out: NDArray[np.float32]) -> None:
    """Write the Rec. 601 luma of planes [3, N], rounded down, to `out` [N]."""
    _chosen("luma")(planes, out)


def adjust_saturation(planes: NDArray[np.uint8], factor: float) -> None:
    """Blend planes [3, N] with their luma; factor 0 gives the luma, and 1 the image itself."""
    _chosen("adjust_saturation")(planes, factor)


def adjust_hue(planes: NDArray[np.uint8], shift: float) -> None:
    """Shift the hue of planes [3, N]. shift: in turns of the colour circle, -0.5 to 0.5."""
    _chosen("adjust_hue")(planes, shift)


def multiply_colors(planes: NDArray[np.uint8], rows: NDArray[np.float64]) -> None:
    """Multiply the colours of planes [3, N] by a matrix [3, 4], whose last column is added.

    It is computed in float32, rounded to the nearest level (a half up) and clamped to 0-255.
    """
    _chosen("multiply_colors")(planes, rows)


# --- in PyTorch -------------------------------------------------------------------------------------------------------


def _luma(planes: NDArray[np.uint8], out: NDArray[np.float32]) -> None:
    for part in _strips(planes):
        out[part] = _gray(planes[:, part]).numpy()


def _adjust_saturation(planes: NDArray[np.uint8], factor: float) -> None:
    for part in _strips(planes):
        strip = planes[:, part]
        floats = torch.from_numpy(strip).to(torch.float32)
        _write_levels(floats.mul_(factor).add_(_gray(strip), alpha=1.0 - factor), strip)


def _adjust_hue(planes: NDArray[np.uint8], shift: float) -> None:
    from torchvision.transforms.v2.functional import adjust_hue_image

    with torch.device("cpu"):  # torchvision makes tensors on torch's default device
        for part in _strips(planes):
            planes[:, part] = adjust_hue_image(torch.from_numpy(planes[:, None, part]), shift)[:, 0].numpy()


def _multiply_colors(planes: NDArray[np.uint8], rows: NDArray[np.float64]) -> None:
    for part in _strips(planes):
        r, g, b = torch.from_numpy(planes[:, part]).to(torch.float32)
        sums = [r.mul(x).add_(g, alpha=y).add_(b, alpha=z).add_(rest + 0.5) for x, y, z, rest in rows.tolist()]
        for total, plane in zip(sums, planes, strict=True):
            _write_levels(total, plane[part])


def _strips(planes: NDArray[np.uint8]) -> Iterator[slice]:
    """The pixels of planes [3, N] in groups of at most _STRIP."""
    return (slice(first, first + _STRIP) for first in range(0, planes.shape[1], _STRIP))


def _gray(planes: NDArray[np.uint8]) -> torch.Tensor:
    r, g, b = torch.from_numpy(planes).to(torch.float32)  # else mul would give torch's default dtype
    gray: torch.Tensor = r.mul_(0.2989).add_(g, alpha=0.587).add_(b, alpha=0.114)
    return gray.floor_()


def _write_levels(values: torch.Tensor, out: NDArray[np.uint8]) -> None:
    np.copyto(out, values.clamp_(0, 255).numpy(), casting="unsafe")


IN_PYTORCH: dict[str, Callable[..., None]] = {
    "luma": _luma,
    "adjust_saturation": _adjust_saturation,
    "adjust_hue": _adjust_hue,
    "multiply_colors": _multiply_colors,
}
"""The reference of each function."""


# --- the choice -------------------------------------------------------------------------------------------------------

_TRIED = 2**16
_TRIALS: dict[str, tuple[Any, ...]] = {
    "luma": (np.zeros(_TRIED, np.float32),),
    "adjust_saturation": (1.3,),
    "adjust_hue": (0.1,),
    "multiply_colors": (np.array([[0.7, 0.4, -0.2, 9.5], [0.3, 0.9, 0.1, -20.0], [-0.5, 0.2, 1.1, 3.0]]),),
}


@cache
def _chosen(name: str) -> Callable[..., None]:
    """The loop, if there is one that gives what PyTorch gives on this processor; else PyTorch's function."""
    loops, reference = loops_of("color_loops"), IN_PYTORCH[name]
    if loops is None:
        return reference
    loop: Callable[..., None] = getattr(loops, name)
    colors = np.random.default_rng(0).integers(0, 256, (3, _TRIED), np.uint8)
    found, expected = ([colors.copy(), *copy.deepcopy(_TRIALS[name])] for _ in range(2))
    loop(*found)
    reference(*expected)
    equal = all(np.array_equal(one, other) for one, other in zip(found, expected, strict=True))
    return loop if equal else reference


def compile_loop(name: str) -> None:
    """Compile the loop of a function of this module, if that has not been done yet."""
    _chosen(name)


def compiled_by() -> str | None:
    """Numba's version, if all of its loops are used; else None. Compiles the loops that are not compiled yet."""
    if any(_chosen(name) is IN_PYTORCH[name] for name in IN_PYTORCH):
        return None
    return str(importlib.import_module("numba").__version__)
