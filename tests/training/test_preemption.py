"""Signals of a scheduler: a training saves after its step and exits 75, and resumed it ends with the same weights."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from gpuflow import Preemption
from gpuflow.config import read_config
from gpuflow.stages import STAGES
from gpuflow.tools.audit import EpochAudit, audit, read_lines
from gpuflow.training.trainer import Trainer, TrainerEvents
from tests.datasets import make_photos, write_config

pytestmark = pytest.mark.usefixtures("one_thread")
STEPS = 6
"""Of an epoch, of two. A step has 8 samples, on any number of ranks."""
PAUSED = """
import os, pathlib, time
from gpuflow.runtime.preemption import Preemption
begun, method, calls = pathlib.Path({begun!r}), getattr(Preemption, {method!r}), []
def paused(self):
    result = method(self) if {method!r} == "__enter__" else None
    calls.append(self)
    if len(calls) == {call} and os.environ.get("RANK", "0") == "{rank}":
        begun.touch()
        while begun.exists():
            time.sleep(0.01)
    return method(self) if result is None else result
setattr(Preemption, {method!r}, paused)
"""
"""Lets one rank wait in a call of a method, in the signal's block, until the file `begun` is removed."""
REQUESTED, ENTER = "requested", "__enter__"


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("preemption") / "photos"
    make_photos(root, classes=3, each=8 * STEPS // 3)
    return root


@pytest.fixture
def config(photos: Path, tmp_path: Path) -> Path:
    fit = {"model": "squeezenet1_1", "epochs": 2, "lr": 0.01, "out": str(tmp_path / "run")}
    run = {"audit": str(tmp_path / "logs" / "audit.jsonl"), "threads": 1}
    stages = [{"decode": {}}, {"random_resized_crop": {"size": 32}}, {"normalize": {}}]
    val = [{"decode": {}}, {"resize": {"shorter": 36}}, {"center_crop": {"size": 32}}, {"normalize": {}}]
    return write_config(tmp_path / "x.yaml", photos, train=stages, val=val, fit=fit, batch={"global": 8}, run=run)


class Training:
    """Processes of `gpuflow train`.

    pause: the rank that waits for signals, and in which call of which method of Preemption it does.
    """

    def __init__(
        self, config: Path, *arguments: str, ranks: int = 1, pause: tuple[int, str, int] | None = None
    ) -> None:
        self.begun = config.parent / "begun"
        variables = {"OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
        code = ""
        if pause is not None:
            rank, method, call = pause
            code = PAUSED.format(begun=str(self.begun), method=method, call=call, rank=rank)
        command = [sys.executable, "-c", f"{code}\nfrom gpuflow.cli import main; main()", "train", str(config)]
        self.processes = [
            subprocess.Popen(
                [*command, "--device", "cpu", *arguments],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env={**os.environ, **variables, **({"RANK": f"{rank}", "WORLD_SIZE": f"{ranks}"} if ranks > 1 else {})},
            )
            for rank in range(ranks)
        ]

    def __enter__(self) -> Training:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.communicate()

    def signal(self, number: int, rank: int = 0) -> None:
        """Send a signal to a rank once it waits."""
        while not self.begun.exists():
            assert self.processes[rank].poll() is None, self.processes[rank].communicate()
            time.sleep(0.01)
        self.processes[rank].send_signal(number)

    def end(self) -> tuple[list[int], str, str]:
        """Let the rank go on; return all exit codes, and what was printed to stdout and stderr."""
        self.begun.unlink(missing_ok=True)
        texts = [process.communicate(timeout=240) for process in self.processes]
        out, err = ("".join(parts) for parts in zip(*texts, strict=True))
        return [process.returncode for process in self.processes], out, err


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def train(config: Path, ranks: int, **options: Any) -> dict[str, torch.Tensor]:
    """Train to the end, one rank in this process, and return the weights."""
    if ranks == 1:
        trainer = Trainer(read_config(config, STAGES), device="cpu", **options)
        trainer.run(TrainerEvents())
        assert trainer.step == 2 * STEPS
    else:
        with Training(config, *(f"--{name}={value}" for name, value in options.items()), ranks=ranks) as training:
            codes, out, err = training.end()
        assert codes == [0] * ranks, err
        assert f"at step {2 * STEPS}" in out
    return dict(saved(config)["model"])


def saved(config: Path) -> dict[str, Any]:
    return dict(torch.load(config.parent / "run" / "last.pt", weights_only=True))


@pytest.fixture(scope="module")
def uninterrupted() -> dict[int, dict[str, torch.Tensor]]:
    """The weights of runs that were not interrupted, by their number of ranks."""
    return {}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "number", "pause", "step"),
    [  # the steps of training and of validation ask, STEPS each
        pytest.param(1, signal.SIGTERM, (0, REQUESTED, 2 * STEPS + 2), STEPS + 2, id="in an epoch"),
        pytest.param(1, signal.SIGUSR1, (0, REQUESTED, STEPS), STEPS, id="at the last step of an epoch"),
        pytest.param(1, signal.SIGUSR1, (0, REQUESTED, STEPS + 2), STEPS, id="in the validation"),
        pytest.param(1, signal.SIGTERM, (0, ENTER, 1), 1, id="before the first step"),
        pytest.param(2, signal.SIGUSR1, (1, REQUESTED, 3), 3, id="rank 1 of 2"),
        pytest.param(2, signal.SIGTERM, (0, REQUESTED, STEPS + 2), STEPS, id="rank 0 of 2, in the validation"),
    ],
)
def test_a_signal_saves_and_a_resumed_run_ends_with_the_same_weights(
    ranks: int,
    number: int,
    pause: tuple[int, str, int],
    step: int,
    config: Path,
    uninterrupted: dict[int, dict[str, torch.Tensor]],
) -> None:
    if ranks not in uninterrupted:
        uninterrupted[ranks] = train(config, ranks, resume="auto")
    with Training(config, "--force", ranks=ranks, pause=pause) as training:
        training.signal(number, pause[0])
        codes, out, err = training.end()
    assert codes == [os.EX_TEMPFAIL] * ranks, err
    assert out.splitlines()[-1].startswith(f"saved {config.parent}/run/last.pt at step {step}, ")
    assert err.endswith("stopped by a signal; --resume goes on\n")
    assert "Traceback" not in err
    assert saved(config)["step"] == step
    resumed = train(config, ranks, resume="auto")
    assert all(torch.equal(uninterrupted[ranks][name], value) for name, value in resumed.items())
    assert [each.name for each in audits(config) if each.faults] == []


def audits(config: Path) -> list[EpochAudit]:
    lines, damaged = read_lines((config.parent / "logs").iterdir())
    assert damaged == []
    return audit(lines)


@pytest.mark.slow
def test_after_a_rank_was_killed_one_rank_goes_on_and_each_sample_counts_once(config: Path) -> None:
    pause = (1, REQUESTED, 4)
    with Training(config, "train.save_every={steps: 3}", ranks=2, pause=pause) as training:
        training.signal(signal.SIGKILL, 1)
        codes, _, err = training.end()
    assert codes == [1, -signal.SIGKILL], err
    assert saved(config)["step"] == 3
    train(config, 1, resume=True)
    found = audits(config)
    assert [(each.name, each.reached, each.faults) for each in found] == [
        (f"{pipeline} epoch {epoch}", 8 * STEPS, {}) for pipeline in ("train", "val") for epoch in (0, 1)
    ]
    assert [each.lost for each in found] in ([8, 0, 0, 0], [12, 0, 0, 0])  # rank 0 may have begun another step


@pytest.mark.slow
@pytest.mark.parametrize("pause", [0.0, 1.2])
def test_a_second_signal_ends_at_once_unless_it_is_the_same_one_twice(pause: float, config: Path) -> None:
    with Training(config, pause=(0, REQUESTED, 3)) as training:
        training.signal(signal.SIGTERM)
        time.sleep(pause)
        training.signal(signal.SIGTERM)
        if pause:  # without leaving the call
            assert training.processes[0].wait(60) == -signal.SIGTERM
            assert not (config.parent / "run" / "last.pt").exists()
        else:
            assert training.end()[0] == [os.EX_TEMPFAIL]


def test_handlers_of_before_are_restored() -> None:
    before = signal.getsignal(signal.SIGUSR1)
    with Preemption() as preemption:
        assert not preemption.requested()
        signal.raise_signal(signal.SIGUSR1)
        assert preemption.requested()
        assert preemption.requested()
    assert signal.getsignal(signal.SIGUSR1) is before
