"""Starts processes as torchrun does, and is what they run: `torchrun ... -m tests.ranks CONFIG OUT DEVICE MAX_STEPS`.

Each rank trains, and writes to OUT/<rank>.json what it saw and where it left its mark.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

import gpuflow
from gpuflow.config import read_config
from gpuflow.execute.gpu.chunk_scan import FileChecks
from gpuflow.runtime.ranks import Ranks
from gpuflow.stages import STAGES
from gpuflow.training.trainer import PassResult, Trainer, TrainerEvents
from tests.forking import Interpreter

ROOT = Path(__file__).parents[1]
_MARK = "GPUFLOW_TEST"
_LEAVE_SECONDS = 5.0


# --- starting them ----------------------------------------------------------------------------------------------------


class Done(NamedTuple):
    """How a launch ended. left: processes that it left behind. seconds: that it took, from Ctrl-C if there was one."""

    code: int
    out: str
    err: str
    left: list[int]
    seconds: float


def torchrun(*arguments: object, ranks: int = 2, seconds: float = 60.0, interrupt_at: str | None = None) -> Done:
    """Run a module in `ranks` processes: `torchrun -m <arguments>`. It and all its processes are killed in the end.

    Args:
        interrupt_at: send Ctrl-C once this stands in the output.
    """
    mark = uuid.uuid4().hex
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m"]
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        with subprocess.Popen(
            [*launcher, *map(str, arguments)],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", _MARK: mark},
            stdout=out,
            stderr=err,
        ) as process:
            start = time.monotonic()
            try:
                if interrupt_at is not None:
                    while interrupt_at not in text_of(out):
                        assert process.poll() is None, f"it ended: {text_of(err)}"
                        assert time.monotonic() < start + seconds, f"it does not say {interrupt_at!r}: {text_of(err)}"
                        time.sleep(0.05)
                    start = time.monotonic()
                    process.send_signal(signal.SIGINT)
                try:
                    code = process.wait(seconds)
                except subprocess.TimeoutExpired:
                    raise AssertionError(f"it goes on after {seconds:g} s: {text_of(out)}{text_of(err)}") from None
                took = time.monotonic() - start
                while (left := marked(mark)) and time.monotonic() < start + took + _LEAVE_SECONDS:
                    time.sleep(0.05)
            finally:
                for pid in marked(mark):
                    os.kill(pid, signal.SIGKILL)
        return Done(code, text_of(out), text_of(err), left, took)


_FORKED = """
import os, runpy, signal, socket, sys
ranks, module = int(sys.argv[1]), sys.argv[2]
sys.argv[:] = sys.argv[2:]
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
children = {}
for rank in reversed(range(ranks)):
    if rank == 0:
        break
    if (child := os.fork()) == 0:
        children.clear()
        break
    children[rank] = child
os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
try:
    runpy.run_module(module, run_name="__main__", alter_sys=True)
except BaseException:
    for child in children.values():
        os.kill(child, signal.SIGKILL)
    raise
for rank, child in children.items():
    if code := os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
        sys.exit(f"rank {rank} ended with {code}")
"""


def forked(interpreter: Interpreter, *arguments: object, ranks: int = 2, seconds: float = 60.0) -> Done:
    """Run a module in `ranks` processes with the environment that torchrun gives them, but as forks of an interpreter.

    torchrun and its ranks would import torch anew, for 4 s each.
    """
    mark, start = uuid.uuid4().hex, time.monotonic()
    try:
        done = interpreter.run(_FORKED, str(ranks), *map(str, arguments), seconds=seconds, GPUFLOW_TEST=mark)
        left, took = marked(mark), time.monotonic() - start
    finally:
        for pid in marked(mark):
            os.kill(pid, signal.SIGKILL)
    assert done.returncode is not None
    return Done(done.returncode, done.stdout, done.stderr, left, took)


def text_of(file: Any) -> str:
    file.seek(0)
    return str(file.read())


def marked(mark: str) -> list[int]:
    """The processes that carry this mark in their environment: those of a launch, whoever started them."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdecimal() and f"{_MARK}={mark}".encode() in (entry / "environ").read_bytes():
                found.append(int(entry.name))
        except OSError:  # it ended meanwhile, or is another user's
            continue
    return found


def reports(out: Path, ranks: int = 2) -> list[dict[str, Any]]:
    """What each rank wrote."""
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(ranks)]


# --- what they run ----------------------------------------------------------------------------------------------------


@final
class Seen:
    """A loader that notes which samples it hands over as valid, by epoch."""

    def __init__(self, loader: gpuflow.Loader) -> None:
        self.loader = loader
        self.samples: dict[int, list[int]] = {}

    def __iter__(self) -> Iterator[gpuflow.Batch]:
        for batch in self.loader:
            self.samples.setdefault(batch.epoch, []).extend(batch.indices[batch.valid].tolist())
            yield batch

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)


class Notes(TrainerEvents):
    """What a trainer tells, and the weights after its third step."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.results: list[tuple[str, int, PassResult]] = []
        self.losses: list[float] = []
        self.early: list[float] = []

    def step(self, loss: float, images_per_s: float) -> None:
        self.losses.append(loss)
        if self.trainer.step == 3 and not self.early:
            self.early = sample_of(self.trainer.model)

    def end_pass(self, name: str, epoch: int, result: PassResult) -> None:
        self.results.append((name, epoch, result))


def without_dropout(model: nn.Module) -> None:
    """So that ranks, which draw their own numbers, learn what a single process does."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0


def sample_of(model: nn.Module) -> list[float]:
    """A few of each parameter's values."""
    return [value for parameter in model.parameters() for value in parameter.detach().flatten()[:4].tolist()]


def digest(model: nn.Module) -> str:
    """A hash of all parameters, bit for bit."""
    values = b"".join(parameter.detach().cpu().contiguous().numpy().tobytes() for parameter in model.parameters())
    return hashlib.sha256(values).hexdigest()


def gpus_in_use() -> list[int]:
    """The GPUs on which this process has a context, as the driver says: there it holds memory, whoever allocated it."""
    driver = ctypes.CDLL("libcuda.so.1")
    found = []
    for index in range(torch.cuda.device_count()):
        device, flags, active = ctypes.c_int(), ctypes.c_uint(), ctypes.c_int()
        assert driver.cuDeviceGet(ctypes.byref(device), index) == 0
        assert driver.cuDevicePrimaryCtxGetState(device, ctypes.byref(flags), ctypes.byref(active)) == 0
        if active.value:
            found.append(index)
    return found


def main(path: str, out: str, device: str, max_steps: str) -> None:
    ranks = Ranks.from_environment()
    report: dict[str, Any] = {}
    if device == "cuda":  # first of all, and as a script does that never chooses a device
        with gpuflow.load(path, "train", device=device) as loader:
            devices = {str(tensor.device) for batch in loader for tensor in (*batch, batch.valid, batch.indices)}
        report |= {"loaded_to": sorted(devices), "in_use_after_loading": gpus_in_use()}
    checked: list[int] = []
    remember = FileChecks.remember

    def counted(checks: FileChecks, samples: NDArray[np.int64], results: NDArray[np.int64]) -> None:
        checked.append(len(samples))
        remember(checks, samples, results)

    FileChecks.remember = counted  # type: ignore[method-assign, assignment]
    trainer = Trainer(read_config(path, STAGES), device=device, ranks=ranks)
    without_dropout(trainer.model)
    notes, loaders = Notes(trainer), (Seen(trainer.train_loader), Seen(trainer.val_loader))  # type: ignore[arg-type]
    trainer.train_loader, trainer.val_loader = loaders  # type: ignore[assignment]
    trainer.run(notes, max_steps=int(max_steps))
    if device == "cuda":
        report["in_use_after_training"] = gpus_in_use()
        report["reserved"] = [torch.cuda.memory_reserved(index) for index in range(torch.cuda.device_count())]
    report |= {
        "checked": sum(checked),
        "device": str(trainer.device),
        "step": trainer.step,
        "train": loaders[0].samples,
        "val": loaders[1].samples,
        "early": notes.early,
        "weights": digest(trainer.model),
        "finite": all(map(math.isfinite, notes.losses)),
        "results": [(name, epoch, r.loss, r.measures["accuracy"], r.images_per_s) for name, epoch, r in notes.results],
    }
    (Path(out) / f"{ranks.rank}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main(*sys.argv[1:])
