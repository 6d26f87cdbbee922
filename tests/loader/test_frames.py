"""How many calls of Python lie between a thread of a loader and the C code that decodes a chunk."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from gpuflow.execute.cpu import native_chunk
from gpuflow.runtime import threads
from gpuflow.sources import open_source, source_spec
from tests.datasets import loader_of, make_photos

MOST = 10


@pytest.mark.parametrize("readers", [0, 2])
def test_few_calls_lead_to_the_decoder(readers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_photos(tmp_path, classes=2, each=4)
    found: set[tuple[str, ...]] = set()
    run_chunk = native_chunk._run_chunk

    def noted(*arguments: object) -> object:
        frame, calls = sys._getframe(1), list[str]()
        while frame.f_code.co_filename != threads.__file__:
            calls.append(frame.f_code.co_qualname)
            assert frame.f_back is not None, calls
            frame = frame.f_back
        found.add(tuple(calls))
        return run_chunk(*arguments)

    monkeypatch.setattr(native_chunk, "_run_chunk", noted)
    source = open_source(source_spec(folder=str(tmp_path)))
    with loader_of(source, threads=2, readers=readers) as loader:
        assert len(list(loader)) > 0
    source.close()
    assert found
    for calls in found:
        assert len(calls) <= MOST, calls
