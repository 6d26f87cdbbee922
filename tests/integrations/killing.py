"""Trains with a trainer of another library in processes that are killed, and reads which samples they trained on.

A script appends one line of JSON to a log for each step that it trained on; `KILL_AT` in its environment is the number
of lines after which it sends itself the signal `KILL_BY`.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from tests.datasets import make_photos, write_config

ROOT = Path(__file__).parents[2]


def make_data(folder: Path, *, batch: int = 4) -> Path:
    """30 photographs and a file with the pipelines train and val."""
    make_photos(folder / "photos", classes=3, each=10)
    return write_config(folder / "x.yaml", folder / "photos", batch={"size": batch})


class Log:
    """Written by the script that trains."""

    def __init__(self, path: Path) -> None:
        self.path, self._lines = path, 0
        self._kill_at = int(os.environ.get("KILL_AT", "0"))

    def write(self, **line: Any) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        self._lines += 1

    def kill_if_due(self) -> None:
        """Send the signal to this process. Of several ranks, rank 1 gets it."""
        if self._lines == self._kill_at and os.environ.get("RANK", "1") == "1":
            os.kill(os.getpid(), int(os.environ["KILL_BY"]))


def run(
    script: Path | list[str], *arguments: str | Path, kill_at: int = 0, by: signal.Signals = signal.SIGKILL
) -> None:
    """Run a script, or what Python gets in its place, to its end, or until it gets a signal after this number of steps.

    The first argument is the folder that it works in. After another signal than SIGKILL, it must exit 75. torchrun
    names that code, and exits 1.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    environment |= {"KILL_AT": str(kill_at), "KILL_BY": str(int(by))}
    done = subprocess.run(
        [sys.executable, *(script if isinstance(script, list) else [str(script)]), *map(str, arguments)],
        cwd=arguments[0],
        env=environment,
        capture_output=True,
        text=True,
        timeout=720,  # on a machine that does much else, too
        check=False,
    )
    ended = -signal.SIGKILL if by == signal.SIGKILL else os.EX_TEMPFAIL
    if kill_at and isinstance(script, list) and "torch.distributed.run" in script:
        assert done.returncode == 1 and f"exitcode  : {ended} " in done.stderr, done.stdout + done.stderr
    else:
        assert done.returncode == (ended if kill_at else 0), done.stdout + done.stderr


def steps(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text().splitlines()]


def hashes(images: torch.Tensor) -> list[str]:
    """A hash of the pixels of each image."""
    return [hashlib.sha256(image.contiguous().numpy().tobytes()).hexdigest() for image in images]


def weights_equal(one: Path, other: Path) -> bool:
    first, second = (torch.load(path, weights_only=True) for path in (one, other))
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
