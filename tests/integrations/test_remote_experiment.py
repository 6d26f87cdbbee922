"""experiments/remote: its server answers late and counts, and its arms are what its README says."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

import pytest

from tests.datasets import make_photos

pytest.importorskip("aiohttp", reason="needs aiohttp, which is not installed")

ROOT = Path(__file__).parents[2]


def test_the_arms(tmp_path: Path) -> None:
    make_photos(tmp_path / "photos", classes=2, each=8)
    options = ["--latency", "1", "--repeats", "1", "--out", str(tmp_path / "results.csv")]
    command = [sys.executable, "experiments/remote/run.py", str(tmp_path / "photos"), *options]
    subprocess.run(command, cwd=ROOT, check=True, timeout=300)
    with (tmp_path / "results.csv").open(newline="") as file:
        rows = {(row["workload"], row["arm"], row["metric"]): float(row["value"]) for row in csv.DictReader(file)}
    requests = {
        workload: [rows[f"{workload}, 1 ms", arm, "requests"] for arm in ARMS] for workload in ("files", "shards")
    }
    assert requests == {"files": [16, 32, 0, 16], "shards": [16, 8, 0, 0]}
    assert all(rows[f"{workload}, 1 ms", arm, "images_per_s"] > 0 for workload in requests for arm in ARMS)


ARMS = ("without a cache", "first epoch", "second epoch", "another run")
