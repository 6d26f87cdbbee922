"""Moving in: an existing training script and the same script on gpuflow differ in one line, and both train."""

from __future__ import annotations

import difflib
import re
from pathlib import Path

import pytest

from tests.datasets import make_photos, python, write_config

SCRIPTS = Path(__file__).parent / "scripts"
IMPORT = "import gpuflow"
STAGES = [
    {"decode": {}},
    {"random_resized_crop": {"size": 24}},
    {"normalize": {"mean": [0.5, 0.5, 0.5], "std": [0.25, 0.25, 0.25]}},
]


def changes() -> tuple[list[str], list[str]]:
    """Lines that only `before.py` has, and lines that only `after.py` has, but for blank ones."""
    before, after = ((SCRIPTS / name).read_text().splitlines() for name in ("before.py", "after.py"))
    marked = list(difflib.ndiff(before, after))
    removed, added = ([line[2:] for line in marked if line[0] == sign and line[2:].strip()] for sign in "-+")
    return removed, added


def test_one_line_changes_beside_the_import() -> None:
    removed, added = changes()
    assert removed == ["loader = torch.utils.data.DataLoader(dataset, batch_size=8, shuffle=True)"]
    assert sorted(added) == [IMPORT, 'loader = gpuflow.load("photos.yaml", "train")']


@pytest.mark.slow
@pytest.mark.parametrize("script", ["before.py", "after.py"])
def test_both_train(script: str, tmp_path: Path) -> None:
    make_photos(tmp_path / "photos", classes=3, each=12)
    write_config(tmp_path / "photos.yaml", tmp_path / "photos", train=STAGES, val=STAGES, batch={"size": 8})
    done = python(SCRIPTS / script, str(tmp_path / "photos"), cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    epochs = re.findall(r"^epoch (\d): 36 images, accuracy ([01]\.\d{3})$", done.stdout, flags=re.MULTILINE)
    assert [number for number, _ in epochs] == ["0", "1"]
    assert float(epochs[-1][1]) > 0.6, "three colours are easy to tell apart"
