"""Loops of masks: numba compiles them, where it is installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.datasets import python

CODE = """
import sys
sys.modules["numba"] = None  # as if it were not installed
import numpy as np
from gpuflow.execute import masks
from gpuflow.execute.jit import loops_of
from gpuflow.pipeline.records import Polygons
outline = np.array([[2.5, 1], [30, 8], [12, 28]])
pixels = masks.instance_mask(Polygons((outline,)), (30, 40)).sum()
print(pixels, loops_of("mask_loops"))
"""


def test_without_numba_the_results_are_the_same() -> None:
    from gpuflow.execute.masks import instance_mask
    from gpuflow.pipeline.records import Polygons

    done = python(CODE, seconds=60)
    pixels = instance_mask(Polygons((np.array([[2.5, 1], [30, 8], [12, 28]]),)), (30, 40)).sum()
    assert (done.stdout, done.stderr) == (f"{pixels} None\n", "")


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
from gpuflow.execute import masks
print(masks.compile_loops())
"""
    done = python(code, NUMBA_CACHE_DIR=str(tmp_path))
    assert (done.stdout, done.stderr) == ("None\n", "")
