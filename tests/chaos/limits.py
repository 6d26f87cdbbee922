"""Rounds without file descriptors and without space on the disk, each in a separate process. See rounds.py."""

from __future__ import annotations

import errno
import json
import os
import random
import resource
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

import gpuflow
from gpuflow.config import read_config
from gpuflow.errors import BadSampleError, GpuflowError, TooManyBadSamples
from gpuflow.stages import STAGES
from gpuflow.training.trainer import Trainer, TrainerEvents
from tests.chaos.accounting import Consumer, Report, Setting, Undisturbed, nothing_left, own_threads, wait_for
from tests.datasets import Entries, epoch_rows, flat, make_photos, rows, truncate, write_config

ROOT = Path(__file__).parents[2]
SMALL: Entries = ({"decode": {}}, {"resize": {"shorter": 36}}, {"center_crop": {"size": 32}}, {"normalize": {}})
_DISK_BYTES = 32 << 20
_SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC, errno.EFBIG)


# --- file descriptors -------------------------------------------------------------------------------------------------


def descriptors(seed: int, directory: Path) -> Report:
    """No file can be opened any more, in the middle of an epoch and before one: an error, and no sample is called bad.

    Once files can be opened again, the epoch goes on without a gap.
    """
    rng, counts = random.Random(seed), Counter[str]()
    make_photos(directory / "photos", classes=3, each=16)
    config = write_config(directory / "few.yaml", directory / "photos")
    undisturbed = Undisturbed(config)
    undisturbed.epoch(0)
    with nothing_left():
        policy = rng.choice(("replace", "skip"))
        with Consumer(config, undisturbed, Setting(threads=rng.randint(1, 4), batch=2), policy=policy) as consumer:
            for _ in range(3):
                _run_short(consumer, rng)
            counts += consumer.counts
    counts["kept"] = _keep_batches(config, undisturbed)
    return {name: float(count) for name, count in counts.items()}


def _run_short(consumer: Consumer, rng: random.Random) -> None:
    """An epoch that loses its descriptors, one that cannot begin, and the rest of the first."""
    consumer.begin()
    assert consumer.run(rng.randint(1, 4)) == "batch"
    with no_descriptors():
        error = _error_of(consumer)
    _check_shortage(error)
    assert [loader.stats()["bad"] for loader in consumer.loaders] == [0]
    consumer.restore()
    threads = own_threads()
    with no_descriptors():
        try:
            consumer.begin()
        except Exception as refused:
            _check_shortage(refused)
    consumer.leave()
    wait_for(lambda: own_threads() <= threads, "an epoch that could not begin leaves no thread")
    consumer.resume(Setting(threads=rng.randint(1, 4), batch=2))
    consumer.begin()
    assert consumer.run() == "over"


@contextmanager
def no_descriptors(spare: int | None = None) -> Iterator[None]:
    """This process can open no file, or only about `spare` files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = 3 if spare is None else max(map(int, os.listdir("/proc/self/fd"))) + spare
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def _error_of(consumer: Consumer) -> Exception:
    """What ends an epoch; the batches before it are checked."""
    try:
        while consumer.step() == "batch":
            pass
    except Exception as error:
        return error
    raise AssertionError("an epoch ended well although no file could be opened")


def _check_shortage(error: BaseException) -> None:
    """It is an error of ours or of the system, and blames no sample."""
    assert not isinstance(error, (AssertionError, BadSampleError, TooManyBadSamples)), repr(error)
    system = isinstance(error, OSError) and error.errno in _SHORTAGES
    assert isinstance(error, GpuflowError) or system, f"neither an error of ours nor of the system: {error!r}"


def _keep_batches(config: Path, undisturbed: Undisturbed) -> int:
    """Keep every batch of an epoch where processes decode, with hardly more descriptors than one of them needs."""
    overrides = ("run.threads=2", "run.processes=1", "pipelines.train.batch.size=1")
    with gpuflow.load(config, overrides=overrides) as loader:
        flat(epoch_rows(loader))  # so that what stays open for good is open
        loader.set_epoch(0)
        with no_descriptors(spare=40):
            kept = list(loader)
        assert flat([rows(batch) for batch in kept]) == undisturbed.epoch(0)
    return len(kept)


# --- space on the disk ------------------------------------------------------------------------------------------------


def disk(seed: int, directory: Path) -> Report:
    """The disk is full while bad samples are listed and while a checkpoint is written.

    The first is an error that names `bad_file`; after the second the last checkpoint is whole, alone, and resumed.
    """
    rng = random.Random(seed)
    photos = make_photos(directory / "photos", classes=3, each=4)
    counts: Report = {"mounted": float(_mount(directory / "disk"))}
    for path in rng.sample(photos, 2):
        truncate(path)
    config = write_config(
        directory / "bad.yaml", directory / "photos", run={"threads": 2, "bad_file": "/dev/full", "on_error": "replace"}
    )
    with nothing_left():
        text = _text_of_error(config)
    assert "bad_file" in text, text
    make_photos(directory / "photos", classes=3, each=4)
    counts["steps"] = _fill_disk(directory, mounted=bool(counts["mounted"]))
    return counts


def _text_of_error(config: Path) -> str:
    try:
        with gpuflow.load(config) as loader:
            for _ in loader:
                pass
    except GpuflowError as error:
        return str(error)
    raise AssertionError("the list of bad samples was lost in silence")


def _fill_disk(directory: Path, *, mounted: bool) -> float:
    torch.set_num_threads(1)
    out = directory / "disk" / "run"
    fit = {"model": "squeezenet1_1", "epochs": 8, "lr": 0.01, "out": str(out)}
    config = write_config(directory / "train.yaml", directory / "photos", train=SMALL, val=SMALL, fit=fit)
    read = read_config(config, STAGES)
    trainer = Trainer(read, device="cpu")
    trainer.run(TrainerEvents(), max_steps=2)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    full = _file_of_all_space(directory / "disk") if mounted else None
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if full is None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        Trainer(read, device="cpu", resume=True).run(TrainerEvents(), max_steps=2)
    except (GpuflowError, OSError):
        pass
    else:
        raise AssertionError("a checkpoint was written to a full disk")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before, "the last checkpoint is not as it was"
    if full is not None:
        full.unlink()
    again = Trainer(read, device="cpu", resume=True)
    again.run(TrainerEvents(), max_steps=4)
    return float(again.step)


def _mount(path: Path) -> bool:
    """Whether a small file system could be mounted there. Otherwise the size of files is limited."""
    path.mkdir()
    if os.environ.get("GPUFLOW_MAY_MOUNT") != "1":
        return False
    options = ["-t", "tmpfs", "-o", f"size={_DISK_BYTES}", "tmpfs", str(path)]
    return subprocess.run(["mount", *options], capture_output=True, check=False).returncode == 0


def _file_of_all_space(directory: Path) -> Path:
    """A file that takes what is free."""
    path = directory / "full"
    with suppress(OSError), path.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(65_536))
    return path


# --- in a separate process --------------------------------------------------------------------------------------------


def in_child(name: str, seed: int, directory: Path) -> Report:
    """Run a round in another process, with its own mounts where the system allows that."""
    command = [sys.executable, "-m", "tests.chaos.rounds", name, str(seed), "--here", str(directory)]
    alone = ["unshare", "--mount"] if shutil.which("unshare") else []
    may_mount = bool(alone) and subprocess.run([*alone, "true"], capture_output=True, check=False).returncode == 0
    done = subprocess.run(
        [*alone, *command] if may_mount else command,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "GPUFLOW_MAY_MOUNT": str(int(may_mount))},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, f"{name} {seed}: {done.stderr[-6000:]}"
    report: Report = json.loads(done.stdout.splitlines()[-1])
    return report
