"""timm's train.py, patched as docs/timm_train.md says: it trains as the page shows, and a killed run is resumed.

TIMM_TRAIN names the file, which is in timm's repository and not in its wheel.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.datasets import make_photos
from tests.integrations.killing import ROOT, run, steps

pytest.importorskip("timm", reason="timm is not installed")
TRAIN = Path(os.environ.get("TIMM_TRAIN", ""))
if not TRAIN.is_file():
    pytest.skip("TIMM_TRAIN does not name train.py of timm's repository", allow_module_level=True)

SCRIPT = Path(__file__).with_name("timm_train_script.py")
PATCH, FIRST, RESUMED = re.findall(r"```bash\n(.*?)```", (ROOT / "docs/timm_train.md").read_text(), flags=re.DOTALL)
[DIFFERENCES] = re.findall(r"```text\n(.*?)```", (ROOT / "docs/timm_train.md").read_text(), flags=re.DOTALL)
[FILE] = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs/trainers.md").read_text(), flags=re.DOTALL)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """40 photographs and the patched script: epochs of five steps."""
    make_photos(tmp_path / "data" / "photos", classes=10, each=4)
    (tmp_path / "photos.yaml").write_text(FILE)
    shutil.copy(TRAIN, tmp_path / "train.py")
    subprocess.run(PATCH, shell=True, cwd=tmp_path, check=True)
    return tmp_path


def train(folder: Path, log: str, command: str, *more: str, kill_at: int = 0) -> Path:
    """Run a command of the page on the CPU, and return the log."""
    python, *arguments = shlex.split(command.replace("\\\n", " "))
    assert python == "python"
    run(SCRIPT, folder, folder / log, *arguments, "--device", "cpu", *more, kill_at=kill_at)
    return folder / log


def test_the_patch_has_the_differences_of_the_page(folder: Path) -> None:
    done = subprocess.run(
        ["diff", "train.py", "train_gpuflow.py"], cwd=folder, capture_output=True, text=True, check=False
    )
    changes = [line.rstrip() for line in done.stdout.splitlines() if line[0] in "<>"]
    assert changes == [line.rstrip() for line in DIFFERENCES.splitlines() if line[0] in "<>"]


def test_a_killed_run_is_resumed_with_the_samples_and_pixels_of_a_whole_one(folder: Path) -> None:
    whole = train(folder, "whole.jsonl", FIRST, "--epochs", "3", "--experiment", "whole")
    killed = train(folder, "killed.jsonl", FIRST, "--epochs", "3", kill_at=8)
    resumed = train(folder, "resumed.jsonl", RESUMED)
    expected = steps(whole)
    assert [step["epoch"] for step in expected] == [0] * 5 + [1] * 5 + [2] * 5
    assert len({step["pixels"] for step in expected}) == 15
    assert steps(killed) == expected[:8] and steps(resumed) == expected[5:]
