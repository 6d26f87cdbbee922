"""Rounds in which `gpuflow train` is killed and stopped at any moment, and resumed. See rounds.py."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Self, final

import torch

from gpuflow.config import read_config
from gpuflow.stages import STAGES
from gpuflow.training.trainer import Trainer, TrainerEvents
from tests.chaos.accounting import LIMIT_SECONDS, Report, descendants, is_alive, wait_for
from tests.datasets import Entries, make_photos, write_config

ROOT = Path(__file__).parents[2]
EPOCHS, STEPS = 3, 3
TRAIN: Entries = (
    {"decode": {}},
    {"random_resized_crop": {"size": 32}},
    {"flip": {"horizontal": 0.5}},
    {"normalize": {}},
)
VAL: Entries = ({"decode": {}}, {"resize": {"shorter": 36}}, {"center_crop": {"size": 32}}, {"normalize": {}})


@final
class Command:
    """A command of gpuflow as a separate process; what it writes goes to a file."""

    def __init__(self, log: Path, *arguments: object) -> None:
        self.log = log
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, *map(str, arguments)],
                cwd=ROOT,
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        self.pid = self._process.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for pid in descendants(self.pid) if self.running else ():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.kill()
        self._process.wait(LIMIT_SECONDS)

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    @property
    def text(self) -> str:
        """All that it has written."""
        return self.log.read_text(errors="replace")

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def pause(self, seconds: float) -> None:
        """Stop it for so long."""
        self.signal(signal.SIGSTOP)
        time.sleep(seconds)
        self.signal(signal.SIGCONT)

    def kill(self) -> None:
        """Kill it. The processes that it has started end by themselves."""
        started = descendants(self.pid)
        self._process.kill()
        self._process.wait(LIMIT_SECONDS)
        wait_for(lambda: not any(map(is_alive, started)), f"workers end with the process that was killed: {started}")

    def wait(self, seconds: float = 4 * LIMIT_SECONDS) -> int:
        """Its exit code."""
        return self._process.wait(seconds)


def training(seed: int, directory: Path) -> Report:
    """A training is killed at any moment and resumed, several times: it ends with the weights of one that was not."""
    rng = random.Random(seed)
    make_photos(directory / "photos", classes=3, each=4)
    fit = {"model": "squeezenet1_1", "epochs": EPOCHS, "lr": 0.01, "out": str(directory / "run")}
    config = write_config(directory / "train.yaml", directory / "photos", train=TRAIN, val=VAL, fit=fit)
    expected = _checkpoint(_finished(config, directory / "whole"))
    assert expected["step"] == EPOCHS * STEPS
    out, kills = directory / "killed", 0
    for _ in range(2):
        last = out / "last.pt"
        before = last.stat().st_mtime_ns if last.exists() else None
        with Command(directory / f"{kills}.log", *_arguments(config, out, rng.choice((0, 1)))) as command:

            def saved_or_over(last: Path = last, before: int | None = before, command: Command = command) -> bool:
                new = last.exists() and last.stat().st_mtime_ns != before
                return new or not command.running

            if rng.random() < 0.5:
                time.sleep(rng.uniform(0.0, 3.0))
                command.pause(rng.uniform(0.0, 1.0))
            if rng.random() < 0.8:
                wait_for(saved_or_over, "a training saves a checkpoint", 4 * LIMIT_SECONDS)
            time.sleep(rng.uniform(0.0, 0.2))
            if command.running:
                command.kill()
                kills += 1
            else:
                assert command.wait() == 0, command.text
        if last.exists():
            assert _checkpoint(last)["step"] <= EPOCHS * STEPS
    found = _checkpoint(_finished(config, out))
    assert found["step"] == expected["step"]
    for name, weights in expected["model"].items():
        assert torch.equal(found["model"][name], weights), f"{name} differs from that of an uninterrupted training"
    return {"kills": float(kills), "steps": float(found["step"])}


def _arguments(config: Path, out: Path, processes: int) -> list[object]:
    """The command that trains, or goes on where there is a checkpoint."""
    resume = ["--resume"] if (out / "last.pt").exists() else []
    overrides = [f"train.out={out}", f"run.processes={processes}"]
    return ["-m", "gpuflow", "train", config, "--device", "cpu", *resume, *overrides]


def _finished(config: Path, out: Path) -> Path:
    """Train to the end, in this process: another one would import torch again."""
    threads, last = torch.get_num_threads(), out / "last.pt"
    torch.set_num_threads(1)
    read = read_config(config, STAGES, (f"train.out={out}", "run.processes=0"))
    try:
        Trainer(read, device="cpu", resume=last.exists()).run(TrainerEvents())
    finally:
        torch.set_num_threads(threads)
    return last


def _checkpoint(path: Path) -> dict[str, Any]:
    """A checkpoint, which must be whole at any moment."""
    found: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return found
