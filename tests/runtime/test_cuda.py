"""The hardware queues that CUDA uses: asked for when gpuflow is imported, unless the environment says how many."""

from __future__ import annotations

import logging
import os
import subprocess
import sys

import pytest
import torch

from gpuflow.runtime import cuda
from gpuflow.runtime.cuda import QUEUES, QUEUES_VARIABLE, request_queues, warn_if_late


def import_gpuflow(monkeypatch: pytest.MonkeyPatch, *, after_the_gpu_was_used: bool) -> None:
    """What importing it does, in an environment that does not set the variable."""
    monkeypatch.delenv(QUEUES_VARIABLE, raising=False)
    monkeypatch.setattr(cuda, "_late", False)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: after_the_gpu_was_used)
    request_queues()


@pytest.mark.parametrize(("before", "after"), [(None, str(QUEUES)), ("1", "1"), ("8", "8")])
def test_importing_gpuflow_asks_for_all_queues_unless_the_environment_says_how_many(
    before: str | None, after: str
) -> None:
    environment = {name: value for name, value in os.environ.items() if name != QUEUES_VARIABLE}
    environment |= {} if before is None else {QUEUES_VARIABLE: before}
    code = f"import gpuflow, os, sys; print(os.environ['{QUEUES_VARIABLE}'], 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == [after, "False"], done.stderr


def test_a_process_that_used_the_gpu_before_is_warned_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import_gpuflow(monkeypatch, after_the_gpu_was_used=True)
    assert QUEUES_VARIABLE not in os.environ, "it would have no effect any more"
    with caplog.at_level(logging.WARNING):
        warn_if_late()
        warn_if_late()
    (record,) = caplog.records
    text, line = record.getMessage().split(" before the first use of CUDA, or begin the script with ")
    assert text.endswith("kept 0.69 of its speed, with 32 queues 0.94; put `import gpuflow`")
    exec(line)
    assert os.environ[QUEUES_VARIABLE] == str(QUEUES), "the line sets it"


def test_no_warning_where_the_queues_were_asked_for_in_time(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import_gpuflow(monkeypatch, after_the_gpu_was_used=False)
    assert os.environ[QUEUES_VARIABLE] == str(QUEUES)
    warn_if_late()
    assert not caplog.records
