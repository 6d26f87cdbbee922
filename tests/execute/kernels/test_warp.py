"""The kernel of warps in Triton's interpreter, which needs numpy < 2.4 and its own process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
SCRIPT = Path(__file__).parent / "interpret_warp.py"


def test_kernel_equals_the_cpus_form() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, str(SCRIPT)], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    differences = {name: float(text) for name, text in (line.rsplit(": ", 1) for line in done.stdout.splitlines())}
    assert len(differences) >= 40
    assert {name: levels for name, levels in differences.items() if levels > 1} == {}
