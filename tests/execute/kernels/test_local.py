"""The kernels of local stages in Triton's interpreter, which needs numpy < 2.4 and its own process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
SCRIPT = Path(__file__).parent / "interpret_local.py"


def test_kernels_equal_their_reference() -> None:
    """Sharpening bit for bit, blurring within a level; two launches for any number of images."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, str(SCRIPT)], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    differences = {name: float(text) for name, text in (line.rsplit(": ", 1) for line in done.stdout.splitlines())}
    assert len(differences) == 2 * 2 * 7 + 6 + 2
    allowed = {name: 1.0 if name.startswith("gaussian_blur") else 0.0 for name in differences}
    assert {name: value for name, value in differences.items() if value > allowed[name]} == {}
