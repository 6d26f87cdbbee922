"""Colour arithmetic: loops that numba compiles give what PyTorch and torchvision give, for every colour."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from gpuflow.execute import colors
from gpuflow.execute.jit import loops_of
from tests.datasets import MemorySource, loader_of, python, views_program

MATRIX = np.array([[0.7, 0.4, -0.2, 9.5], [0.3, 0.9, 0.1, -20.0], [-0.5, 0.2, 1.1, 3.0]])
CHANGES = {
    "adjust_saturation": (0.0, 0.3, 0.9, 1.0, 1.15, 1.7),
    "adjust_hue": (0.0, 0.03, -0.1, 0.37, 0.5, -0.5),
    "multiply_colors": (MATRIX, 3 * MATRIX, np.eye(3, 4)),
}


@pytest.fixture(scope="module")
def every_fourth() -> NDArray[np.uint8]:
    """Every fourth of the colours whose channels are uint8, [3, 2^22]."""
    numbers = np.arange(2, 2**24, 4)
    return np.stack([numbers >> 16, numbers >> 8, numbers]).astype(np.uint8)


@pytest.fixture
def loops() -> Any:
    pytest.importorskip("numba", reason="the loops need numba")
    from gpuflow.execute import color_loops

    return color_loops


def test_the_luma_is_equal(loops: Any, every_fourth: NDArray[np.uint8]) -> None:
    ours, theirs = (np.empty(every_fourth.shape[1], np.float32) for _ in range(2))
    loops.luma(every_fourth, ours)
    colors.IN_PYTORCH["luma"](every_fourth, theirs)
    assert np.array_equal(ours, theirs)


@pytest.mark.parametrize(("name", "by"), [(name, by) for name, changes in CHANGES.items() for by in changes])
def test_colours_are_equal(loops: Any, every_fourth: NDArray[np.uint8], name: str, by: Any) -> None:
    ours, theirs = every_fourth.copy(), every_fourth.copy()
    getattr(loops, name)(ours, by)
    colors.IN_PYTORCH[name](theirs, by)
    assert np.array_equal(ours, theirs)


@pytest.mark.parametrize(("name", "by"), [("adjust_saturation", 1.3), ("adjust_hue", 0.2)])
def test_pytorchs_are_torchvisions(every_fourth: NDArray[np.uint8], name: str, by: float) -> None:
    """They run on some pixels after the other."""
    from torchvision.transforms.v2 import functional as F

    ours = every_fourth.copy()
    assert ours.shape[1] > colors._STRIP
    colors.IN_PYTORCH[name](ours, by)
    reference: Callable[..., torch.Tensor] = getattr(F, name)
    assert torch.equal(torch.from_numpy(ours)[:, None], reference(torch.from_numpy(every_fourth)[:, None], by))


def test_loops_that_differ_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong:
        @staticmethod
        def luma(planes: Any, out: Any) -> None:
            out[:] = 0

    monkeypatch.setattr(colors, "loops_of", lambda _: Wrong)
    colors._chosen.cache_clear()
    try:
        assert colors._chosen("luma") is colors.IN_PYTORCH["luma"]
        assert colors.compiled_by() is None
    finally:
        colors._chosen.cache_clear()


@pytest.mark.parametrize("views", [False, True])
def test_a_loader_compiles_its_loops_before_its_threads_begin(views: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that ends while a thread of its compiles is aborted."""
    asking = list[threading.Thread]()

    def noting(module: str) -> Any:
        asking.append(threading.current_thread())
        return loops_of(module)

    monkeypatch.setattr(colors, "loops_of", noting)
    colors._chosen.cache_clear()
    begin: list[Any] = [{"decode": {"color": "rgb"}}, {"resize": {"height": 8, "width": 8}}]
    jitter = {"saturation": 0.5, "hue": 0.1}
    both = [*begin, {"grayscale": {"probability": 0.2}}, {"color_jitter": jitter}]
    program = views_program({"a": (1, both), "b": (2, [*begin, {"color_jitter": jitter}])}) if views else both
    with loader_of(MemorySource.of(8), program) as loader:
        assert len(list(loader)) == 2
    assert len(asking) == 3 and set(asking) == {threading.main_thread()}


CODE = """
import sys
sys.modules["numba"] = None  # as if it were not installed
import numpy as np
from gpuflow.execute import colors, masks
from gpuflow.execute.jit import loops_of
from gpuflow.pipeline.records import Polygons
planes = np.random.default_rng(0).integers(0, 256, (3, 1000), np.uint8)
colors.adjust_saturation(planes, 1.3)
outline = np.array([[2.5, 1], [30, 8], [12, 28]])
pixels = masks.instance_mask(Polygons((outline,)), (30, 40)).sum()
print(colors.compiled_by(), planes.sum(), pixels, loops_of("mask_loops"))
"""


def test_without_numba_the_results_are_the_same() -> None:
    from gpuflow.execute.masks import instance_mask
    from gpuflow.pipeline.records import Polygons

    done = python(CODE, seconds=60)
    planes = np.random.default_rng(0).integers(0, 256, (3, 1000), np.uint8)
    colors.adjust_saturation(planes, 1.3)
    pixels = instance_mask(Polygons((np.array([[2.5, 1], [30, 8], [12, 28]]),)), (30, 40)).sum()
    assert (done.stdout, done.stderr) == (f"None {planes.sum()} {pixels} None\n", "")


def test_a_loop_is_compiled_where_nothing_can_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("numba", reason="the loops need numba")
    import numba

    from gpuflow.execute import jit

    def njit(*, cache: bool = False, **options: Any) -> Any:
        if cache:
            raise RuntimeError("cannot cache function: no locator available for this file")
        return lambda function: (function, options)

    def loop() -> None: ...

    monkeypatch.setattr(numba, "njit", njit)
    found: Any = jit.compiled(loop)
    assert found == (loop, {"nogil": True})


def test_a_loop_is_compiled_where_the_disk_is_full(tmp_path: Path) -> None:
    pytest.importorskip("numba", reason="the loops need numba")
    code = """
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
from gpuflow.execute import colors
print(colors.compiled_by() is not None)
"""
    done = python(code, NUMBA_CACHE_DIR=str(tmp_path))
    assert (done.stdout, done.stderr) == ("True\n", "")
