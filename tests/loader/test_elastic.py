"""torchrun restarts ranks, on as many nodes as are left, and they go on with the samples that are left."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest

from tests.elastic import require_each_sample_once, resume_scripts


@pytest.mark.slow
@pytest.mark.parametrize(("kill", "kill_at"), [("worker", 8), ("node", 17)])
def test_under_torchrun_each_sample_counts_once(kill: Literal["worker", "node"], kill_at: int, tmp_path: Path) -> None:
    with resume_scripts() as scripts:
        require_each_sample_once(scripts, scripts.launch.by_torchrun, tmp_path, kill=kill, kill_at=kill_at)
