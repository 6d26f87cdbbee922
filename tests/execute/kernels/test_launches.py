"""What each kernel is launched with, without a GPU: grids that CUDA allows, and code that compiles for a GPU.

Triton's interpreter, in which other tests run the kernels, knows no limit on grids and compiles nothing.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any, Final, NamedTuple, get_args

import numpy as np
import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from gpuflow.execute import kernels
from gpuflow.execute.kernels import color, copy, local, resample, warp
from gpuflow.pipeline.parameters import Border
from gpuflow.pipeline.pointwise import Operation, Operations
from gpuflow.pipeline.stage import Filters, Lookup

MOST = 65_535
"""The largest size of a grid's second and third axis; that of the first one is 2^31 - 1."""
MANY = 100_000
"""More images, or tiles of images, than the second axis takes."""
INTERPOLATIONS: Final = ("nearest", "bilinear")
BORDERS: Final = get_args(Border)
OUTSIDE: Final = ("reflect", "keep")
TARGET = GPUTarget("cuda", 80, 32)
TYPES = {
    torch.uint8: "u8", torch.int16: "i16", torch.int32: "i32", torch.int64: "i64", torch.float32: "fp32",
    torch.float64: "fp64",
}  # fmt: skip


class Launch(NamedTuple):
    kernel: Any
    grid: tuple[int, ...]
    positional: tuple[Any, ...]
    named: dict[str, Any]


class Recorder:
    """Takes the place of a kernel and notes its launches."""

    def __init__(self, kernel: Any, launches: list[Launch]) -> None:
        self.kernel, self.launches = kernel, launches

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*positional: Any, **named: Any) -> None:
            self.launches.append(Launch(self.kernel, grid, positional, named))

        return launch


def kernels_of(module: Any) -> dict[str, Any]:
    """The functions of a module that are launched: those that ask which program they are."""
    functions = {name: value for name, value in vars(module).items() if isinstance(value, JITFunction)}
    return {name: value for name, value in functions.items() if "tl.program_id" in inspect.getsource(value.fn)}


ALL = {
    (module.name, name): kernel
    for module in iter_modules(kernels.__path__)
    for name, kernel in kernels_of(import_module(f"{kernels.__name__}.{module.name}")).items()
}


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """The launches from now on, none of which runs anything."""
    found: list[Launch] = []
    for (module, name), kernel in ALL.items():
        monkeypatch.setattr(f"{kernels.__name__}.{module}.{name}", Recorder(kernel, found))
    return found


def memory(*shape: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    """A tensor of any size that takes no memory."""
    return torch.empty(shape, dtype=dtype, device="meta")


def launch_all(count: int, side: int) -> None:
    """Launch all kernels on this many images or tiles: each variant that differs by more than sizes."""
    table, out = memory(3, 256, dtype=torch.float32), memory(1, 3, side, side, dtype=torch.float32)
    images, rows, each = memory(count, side, side, 3), np.arange(count), np.ones(count)

    def described(fields: tuple[str, ...]) -> torch.Tensor:
        return memory(count, len(fields), dtype=torch.int64)

    for kind, antialias in itertools.product(("nearest", "bilinear", "bicubic"), (True, False)):
        resample.resample_all(described(resample.FIELDS), table, out, interpolation=kind, antialias=antialias)
    for interpolation, border in itertools.product(INTERPOLATIONS, BORDERS):
        warp.warp_all(described(warp.FIELDS), table, out, lookup=Lookup(interpolation, border, (0,)))
    weights, active = np.ones((count, 5)), each.astype(bool)
    for outside in OUTSIDE:
        filters = Filters(rows=weights, columns=weights, centre=each, factor=each, active=active, border=outside)
        plan = torch.from_numpy(local.smooth_plan_of(rows, filters)).to("meta")
        local.smooth(images, plan, filters, table, out)
    codes = np.zeros((count, 2), np.int64)
    for kinds in (set(Operation), {Operation.CONTRAST, Operation.HUE}):  # the latter need no histogram
        operations = Operations.of(codes, codes.astype(float), kinds=kinds, statistics=2)
        plans = [torch.from_numpy(x).to("meta") for x in color.adjust_plan_of(rows, operations)]
        color.adjust(images, plans, operations, table, out)
    copy.interleave(described(copy.IMAGE_FIELDS), side * side, channels=3)
    copy.copy_images(described(copy.FIELDS))


@pytest.mark.parametrize(("count", "side"), [(MANY, 8), (2, 13_000)])
def test_many_and_large_images_are_within_cudas_limits_on_grids(launches: list[Launch], count: int, side: int) -> None:
    launch_all(count, side)
    assert {launch.kernel for launch in launches} == set(ALL.values())
    for kernel, (first, *others), _, _ in launches:
        assert first < 1 << 31 and all(size <= MOST for size in others), kernel


def source_of(launch: Launch) -> tuple[ASTSource, dict[str, Any]]:
    """What Triton compiles for a launch, and its options."""
    kernel, _, positional, named = launch
    names = kernel.arg_names
    values = {**dict(zip(names, positional, strict=False)), **{k: v for k, v in named.items() if k in names}}
    options = {key: value for key, value in named.items() if key not in names}
    signature, constants = {}, {}
    for place, (parameter, name) in enumerate(zip(kernel.params, names, strict=True)):
        value = values[name]
        if parameter.is_constexpr:
            signature[name], constants[place,] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[name] = f"*{TYPES[value.dtype]}"
        else:
            signature[name] = "fp32" if isinstance(value, float) else "i32"
    return ASTSource(kernel, signature, constants), options


@pytest.mark.slow
def test_every_kernel_compiles_for_a_gpu(
    launches: list[Launch], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    launch_all(2, 24)
    compiled = set()
    for launch in launches:
        source, options = source_of(launch)
        compiled.add(launch.kernel)
        assert "enable_fp_fusion" in options, f"{launch.kernel.fn.__name__}: Triton's versions choose differently"
        assert triton.compile(source, target=TARGET, options=options).asm["ptx"]
    assert compiled == set(ALL.values())
