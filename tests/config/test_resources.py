"""Who gets how many threads and processes: what is decided by numbers alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Literal

import pytest

from gpuflow.config import RunSpec
from gpuflow.config.resources import readers_of, serving_processes_of
from gpuflow.stages import CenterCrop, Decode, Resize
from tests.running import program_of


@pytest.mark.parametrize(
    ("decoder", "threads", "processes", "expected"),
    [
        (Decode(), 16, "auto", 0),
        (Decode(), 16, 3, 3),
        (Decode(), 2, 8, 2),
        (Decode(formats=("tiff",)), 1, "auto", 0),
        (Decode(formats=("tiff",)), 2, "auto", 2),
        (Decode(formats=("tiff",)), 16, 0, 0),
    ],
)
def test_how_many_processes_decode_for_a_service(
    decoder: Decode, threads: int, processes: int | Literal["auto"], expected: int
) -> None:
    program = program_of(decoder, Resize(shorter=8), CenterCrop(size=8), serving=True)
    assert serving_processes_of(RunSpec(threads=threads, processes=processes), program) == expected


@pytest.mark.parametrize(("threads", "expected"), [(1, 2), (11, 2), (12, 3), (64, 3)])
def test_how_many_threads_read_where_a_gpu_decodes(threads: int, expected: int) -> None:
    config: Any = SimpleNamespace(run=RunSpec(threads=threads))
    assert readers_of(config, gpu=True, remote=False) == expected
    assert readers_of(config, gpu=False, remote=False) == 0 and readers_of(config, gpu=True, remote=True) == 16
    config.run = RunSpec(threads=threads, readers=1)
    assert readers_of(config, gpu=True, remote=True) == 1
