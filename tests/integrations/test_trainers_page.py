"""The examples of the pages about trainers run as they stand."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.datasets import make_photos

ROOT = Path(__file__).parents[2]
PAGES = [
    (ROOT / f"docs/{name}.md").read_text() for name in ("trainers", "metrics", "from_timm", "transformers_trainer")
]
[FILE] = re.findall(r"```yaml\n(.*?)```", PAGES[0], flags=re.DOTALL)
EXAMPLES = re.findall(r"^## (\S+).*?$|```python\n(.*?)```", "\n".join(PAGES), flags=re.DOTALL | re.MULTILINE)
NEEDED = {"Lightning": "lightning", "Accelerate": "accelerate", "create_loader": "timm", "torchdata": "torchdata"}
NEEDED |= {"transformers": "transformers"}


def examples() -> list[tuple[str, str]]:
    """The heading and the code of each."""
    found, heading = [], ""
    for title, code in EXAMPLES:
        heading = title or heading
        if code:
            found.append((heading, code))
    return found


@pytest.mark.parametrize(("heading", "code"), examples(), ids=[heading for heading, _ in examples()])
def test_an_example_runs(heading: str, code: str, tmp_path: Path) -> None:
    if heading in NEEDED:
        pytest.importorskip(NEEDED[heading], reason=f"{NEEDED[heading]} is not installed")
    make_photos(tmp_path / "data" / "photos", classes=10, each=4)
    (tmp_path / "photos.yaml").write_text(FILE)
    (tmp_path / "example.py").write_text(code)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "example.py"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
