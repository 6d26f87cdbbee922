"""Accounts for every sample that loaders hand over while something disturbs them.

`Truth` says what may come at each position of an epoch. `Consumer` is the loop of a training over all ranks: it takes
steps, checks every row against the truth, and resumes in other loaders. The scenarios of this folder and the state
machine in tests/laws drive it.
"""

from __future__ import annotations

import gc
import json
import os
import random
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, Self, final

import gpuflow
from gpuflow.errors import BadSampleError, GpuflowError, LoaderError, SourceError
from gpuflow.loader.sampler import Steps
from tests.datasets import Row, epoch_rows, flat, rows

LIMIT_SECONDS, LEAVE_SECONDS = 60.0, 20.0
"""For every condition that is waited for, and for what is closed: far more than it takes on a machine that is busy."""

Report = dict[str, float]
"""What a round counted, by metric."""


def wait_for(condition: Callable[[], bool], what: str, seconds: float = LIMIT_SECONDS) -> None:
    """Wait until a condition holds. Fails, and names it, if it never does."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds:g} s: {what}"
        time.sleep(0.02)


# --- what is there, and what is left ----------------------------------------------------------------------------------


def descendants(root: int | None = None) -> set[int]:
    """The living processes that a process (by default this one) has started, or those have, by proc(5)."""
    found: set[int] = set()
    parents = [os.getpid() if root is None else root]
    while parents:
        for task in Path(f"/proc/{parents.pop()}/task").glob("*"):
            with suppress(OSError):  # a thread or a process that has ended
                parents += (new := set(map(int, (task / "children").read_text().split())))
                found |= new
    return {pid for pid in found if is_alive(pid)}


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and was not waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def own_threads() -> set[int]:
    """The threads of gpuflow in this process."""
    return {thread.ident or 0 for thread in threading.enumerate() if thread.name.startswith("gpuflow")}


def open_files() -> Counter[str]:
    """What the file descriptors of this process lead to; numbers of sockets and pipes left out."""
    gc.collect()  # batches in cycles still hold memory
    found: Counter[str] = Counter()
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the descriptor of the listing itself
            found[os.readlink(f"/proc/self/fd/{name}").partition(":[")[0]] += 1
    return found


@contextmanager
def nothing_left(*, descriptors: bool = True) -> Iterator[None]:
    """Asserts that the block leaves no thread of gpuflow, no process and no file descriptor.

    descriptors: False where other libraries keep connections open.
    """
    threads, processes, files = own_threads(), descendants(), open_files()
    yield
    wait_for(lambda: own_threads() <= threads, "threads of gpuflow end")
    wait_for(lambda: descendants() <= processes, "worker processes end")
    if descriptors:
        end = time.monotonic() + LEAVE_SECONDS
        while (left := open_files() - files) and time.monotonic() < end:
            time.sleep(0.1)
        assert not left, f"file descriptors are left open: {dict(left)}"


@final
class Disturber:
    """Kills worker processes of this process, or stops them for a while. Counts what it did."""

    def __init__(self, rng: random.Random, counts: Counter[str]) -> None:
        self._rng, self._counts = rng, counts
        self._others = descendants()
        self._timers: list[threading.Timer] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for timer in self._timers:
            timer.join()

    def kill(self) -> None:
        """Kill one worker, if there is one."""
        if workers := self._workers():
            self._send(self._rng.choice(workers), "KILL")
            self._counts["kills"] += 1

    def pause(self) -> None:
        """Stop one worker, if there is one, and let it go on up to half a second later."""
        if workers := self._workers():
            pid = self._rng.choice(workers)
            self._send(pid, "STOP")
            self._timers.append(threading.Timer(self._rng.uniform(0.01, 0.5), self._send, (pid, "CONT")))
            self._timers[-1].start()
            self._counts["pauses"] += 1

    def _workers(self) -> list[int]:
        return sorted(descendants() - self._others)

    @staticmethod
    def _send(pid: int, name: Literal["KILL", "STOP", "CONT"]) -> None:
        with suppress(ProcessLookupError):
            os.kill(pid, {"KILL": 9, "STOP": 19, "CONT": 18}[name])


# --- what may come ----------------------------------------------------------------------------------------------------


class Truth(Protocol):
    """What loaders may hand over."""

    @property
    def size(self) -> int:
        """Samples in an epoch."""

    @property
    def suspects(self) -> set[int]:
        """The indices of samples that may be bad."""

    def index(self, epoch: int, position: int) -> int:
        """The index of the sample that belongs at a position."""

    def check(self, epoch: int, position: int, row: Row) -> None:
        """Assert that a row may come at a position: this sample, or another one in place of a bad one."""


@final
class Undisturbed:
    """The rows of each epoch by position, from one loader on one thread that nothing disturbs.

    As a Truth it allows nothing but these rows.
    """

    def __init__(self, config: Path) -> None:
        self._config = config
        self._epochs: dict[int, list[Row]] = {}
        with self._open() as loader:
            self._order = loader._plan.order

    def _open(self) -> gpuflow.Loader:
        alone = ("run.threads=1", "run.processes=0")
        return gpuflow.load(self._config, rank=0, world_size=1, overrides=alone)

    def epoch(self, number: int) -> list[Row]:
        if number not in self._epochs:
            with self._open() as loader:
                loader.set_epoch(number)
                self._epochs[number] = flat(epoch_rows(loader))
        return self._epochs[number]

    @property
    def size(self) -> int:
        return self._order.size

    @property
    def suspects(self) -> set[int]:
        return set()

    def index(self, epoch: int, position: int) -> int:
        """A function of the seed alone: no file is read."""
        return int(self._order.indices(epoch, [position])[0])

    def check(self, epoch: int, position: int, row: Row) -> None:
        index, label, _, pixels = self.epoch(epoch)[position]
        assert (row[0], row[1]) == (index, label), f"epoch {epoch}, position {position}: sample {row[0]}, not {index}"
        assert row[3] == pixels, f"epoch {epoch}, position {position}: other pixels of sample {index}"


@final
class Versions:
    """Samples whose files change: each may have the pixels of any version that its file had, or be bad.

    The pipeline draws nothing at random, so that a version always has the same pixels.

    Args:
        undisturbed: the files as they are at first. others: each file's other version, by index.
    """

    def __init__(self, undisturbed: Undisturbed, others: Undisturbed | None = None) -> None:
        self._undisturbed = undisturbed
        self._first = {index: (label, pixels) for index, label, _, pixels in undisturbed.epoch(0)}
        self._other = {index: pixels for index, _, _, pixels in (others.epoch(0) if others is not None else ())}
        self.suspects: set[int] = set()
        self._allowed: dict[int, set[bytes]] = {}
        self.forget()

    @property
    def size(self) -> int:
        return len(self._first)

    def forget(self) -> None:
        """All files have their first version again, and no epoch is under way."""
        self.suspects.clear()
        self._allowed = {index: {pixels} for index, (_, pixels) in self._first.items()}

    def suspect(self, *indices: int) -> None:
        """From now on these samples may be bad."""
        self.suspects.update(indices)

    def allow_other(self, index: int) -> None:
        """From now on this sample may have its other version."""
        self._allowed[index].add(self._other[index])

    def index(self, epoch: int, position: int) -> int:
        return self._undisturbed.index(epoch, position)

    def check(self, epoch: int, position: int, row: Row) -> None:
        index, label, _, pixels = row
        wanted = self.index(epoch, position)
        assert index == wanted or wanted in self.suspects, f"position {position}: sample {index}, not {wanted}"
        assert label == self._first[index][0], f"sample {index} has label {label}"
        assert pixels in self._allowed[index], f"sample {index} has the pixels of no version of its file"


# --- the loop of a training -------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """How many load, and with what. None of it may change what comes."""

    ranks: int = 1
    threads: int = 2
    processes: int = 0
    readers: int | Literal["auto"] = "auto"
    prefetch: int = 2
    batch: int = 4

    @classmethod
    def draw(cls, rng: random.Random, *, processes: Sequence[int] = (0,)) -> Setting:
        count = rng.choice(processes)
        return cls(
            ranks=rng.randint(1, 4 if count == 0 else 2),
            threads=max(count, rng.randint(1, 4)),
            processes=count,
            readers="auto" if count else rng.choice(("auto", 0, 2)),
            prefetch=rng.randint(1, 3),
            batch=rng.choice((3, 4, 8)),
        )

    @property
    def overrides(self) -> tuple[str, ...]:
        run = ("threads", "processes", "readers", "prefetch")
        return (*(f"run.{key}={getattr(self, key)}" for key in run), f"pipelines.train.batch.size={self.batch}")


Outcome = Literal["batch", "over", "failed"]
"""Of a step: every rank got a batch; the epoch is over; a bad sample ended it, as the policy says."""


@final
class Consumer:
    """Iterates the pipeline `train` on all ranks in turns, and checks all that comes.

    After each step `state` is the state of the loaders, the same on all ranks.

    Args:
        policy: `on_error` of the pipeline.
        overrides: dotted assignments for every loader.
    """

    def __init__(
        self, config: Path, truth: Truth, setting: Setting, *, policy: str = "replace", overrides: Sequence[str] = ()
    ) -> None:
        self._config, self._truth, self._policy = config, truth, policy
        self._overrides = (*overrides, f"pipelines.train.on_error={policy}")
        self._epoch, self._start, self._step = 0, 0, 0
        self._next_epoch, self._next_start = 0, 0
        self._later: int | None = None
        self._covered: list[int] = []
        self._iterators: list[Iterator[gpuflow.Batch]] | None = None
        self.loaders: list[gpuflow.Loader] = []
        self.counts: Counter[str] = Counter()
        self._open(setting)
        self.state = self._common_state()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self, setting: Setting) -> None:
        self.setting = setting
        for rank in range(setting.ranks):
            place: dict[str, Any] = {"rank": rank, "world_size": setting.ranks}
            self.loaders.append(gpuflow.load(self._config, overrides=(*setting.overrides, *self._overrides), **place))

    @property
    def running(self) -> bool:
        """Whether an epoch is under way."""
        return self._iterators is not None

    def begin(self) -> None:
        """`for ... in loader` on every rank."""
        self._epoch, self._start, self._step = self._next_epoch, self._next_start, 0
        self._next_epoch, self._next_start, self._later = self._epoch + 1, 0, None
        self._covered = list(range(self._start))
        self._iterators = [iter(loader) for loader in self.loaders]

    def step(self) -> Outcome:
        """Take a batch on every rank and check it."""
        assert self._iterators is not None
        batches: list[gpuflow.Batch | None] = []
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # many samples are bad
                for iterator in self._iterators:
                    batches.append(next(iterator, None))
        except GpuflowError as error:
            self._check_error(error, rank=len(batches))
            self._iterators = None
            return "failed"
        found = [batch for batch in batches if batch is not None]
        if self._policy == "skip" and self.setting.ranks == 1:
            while self._step < (found[0].step if found else len(self._steps(0))):
                self._check_rows(0, [])
                self._step += 1
        assert len(found) in (0, len(batches)), "ranks make different numbers of steps"
        steps = self._steps(0)
        assert (self._step < len(steps)) == bool(found), f"{self._step} steps of {len(steps)}"
        if not found:
            self._iterators = None
            self.state = self._common_state()
            self._check_place(self.state)
            assert sorted(self._covered) == list(range(self._truth.size)), "not every position came exactly once"
            self.counts["epochs"] += 1
            return "over"
        for rank, batch in enumerate(found):
            self._check_batch(rank, batch)
        self._step += 1
        self.state = self._common_state()
        self._check_place(self.state)
        return "batch"

    def leave(self) -> None:
        """`break` on every rank. The next epoch is the following one."""
        self._iterators = None

    def set_epoch(self, epoch: int) -> None:
        """`set_epoch` on every rank: the next `begin` runs this epoch."""
        for loader in self.loaders:
            loader.set_epoch(epoch)
        if epoch != self._next_epoch:
            self._next_epoch, self._next_start = epoch, 0
        self._later = epoch
        if not self.running:
            self.state = self._common_state()

    def resume(self, setting: Setting) -> None:
        """Close all loaders and go on from the last whole step in new ones."""
        self.close()
        self._open(setting)
        self._load(self.state)
        self.counts["resumes"] += 1

    def restore(self) -> None:
        """Go on from the last whole step in the same loaders."""
        self.leave()
        self._load(self.state)

    def _load(self, state: str) -> None:
        for loader in self.loaders:
            loader.load_state_dict(json.loads(state))
        assert json.loads(self._common_state()) == json.loads(state)
        self._later = None
        self._next_epoch, self._next_start = _place(state)

    def run(self, steps: int | None = None) -> Outcome:
        """Take steps until the epoch is over, fails, or `steps` are taken."""
        outcome: Outcome = "batch"
        taken = 0
        while outcome == "batch" and (steps is None or taken < steps):
            outcome, taken = self.step(), taken + 1
        return outcome

    def await_workers(self) -> None:
        """Run epochs, checked as others, until no worker process is starting any more; then go back to the state."""
        state, end = self.state, time.monotonic() + LIMIT_SECONDS
        while True:
            self.set_epoch(0)
            self.begin()
            while self.step() == "batch":
                time.sleep(0.02)
            if not any(loader.stats().get("processes", {"starting": 0})["starting"] for loader in self.loaders):
                break
            assert time.monotonic() < end, "worker processes neither start nor give up"
        self.state = state
        self.restore()

    def close(self) -> None:
        self._iterators = None
        for loader in self.loaders:
            loader.close()
        self.loaders.clear()

    # --- checks -------------------------------------------------------------------------------------------------------

    def _steps(self, rank: int) -> Steps:
        s = self.setting
        size = self._truth.size
        return Steps(size=size, batch_size=s.batch, rank=rank, world_size=s.ranks, start=self._start)

    def _check_batch(self, rank: int, batch: gpuflow.Batch) -> None:
        """Every position of the batch has its row, or was skipped as bad. A short batch lacks no other sample."""
        assert (batch.epoch, batch.step) == (self._epoch, self._step)
        self._check_rows(rank, rows(batch))

    def _check_rows(self, rank: int, came: list[Any]) -> None:
        """The rows that came of the step; of one that is left out, none."""
        positions, valid = self._steps(rank).positions(self._step)
        for position, is_valid in zip(positions.tolist(), valid.tolist(), strict=True):
            wanted = self._truth.index(self._epoch, position)
            self._covered += [position] * is_valid
            if self._policy == "skip" and wanted in self._truth.suspects and (not came or came[0][0] != wanted):
                self.counts["skipped"] += is_valid
                continue
            assert came, f"epoch {self._epoch}, position {position}: sample {wanted} is missing"
            row = came.pop(0)
            assert row[2] == is_valid
            self._truth.check(self._epoch, position, row)
            self.counts["samples"] += is_valid
            self.counts["replaced"] += is_valid and row[0] != wanted
        assert not came, f"epoch {self._epoch}, step {self._step}: {len(came)} samples too many"

    def _check_error(self, error: GpuflowError, rank: int) -> None:
        """The error that the policy demands, for a sample that may be bad."""
        self.counts["errors"] += 1
        if self._policy == "raise" and isinstance(error, BadSampleError):
            assert error.index in self._truth.suspects, f"a good sample is called bad: {error}"
            return
        if isinstance(error, SourceError) and "must stay as it was indexed" in str(error):
            assert self._truth.suspects, f"no shard has changed: {error}"
            return
        positions, _ = self._steps(rank).positions(self._step)
        wanted = {self._truth.index(self._epoch, position) for position in positions.tolist()}
        all_bad = isinstance(error, LoaderError) and "nothing but bad samples" in str(error)
        if not (self._policy == "skip" and self.setting.ranks > 1 and all_bad and wanted <= self._truth.suspects):
            raise error

    def _check_place(self, state: str) -> None:
        """The state says how far the loop is. Where `set_epoch` named another epoch, it may say that already."""
        done = self._step == len(self._steps(0))
        stride = self._steps(0).stride
        after = self._epoch + 1 if self._later is None else self._later
        allowed = [(after, 0) if done else (self._epoch, self._start + self._step * stride)]
        if self._later is not None:
            allowed.append((self._later, 0))
        assert _place(state) in allowed, f"the state says {_place(state)}, not {allowed}"

    def _common_state(self) -> str:
        states = {json.dumps(loader.state_dict(), sort_keys=True) for loader in self.loaders}
        assert len(states) == 1, f"ranks have different states: {states}"
        return states.pop()


def _place(state: str) -> tuple[int, int]:
    values = json.loads(state)
    return values["epoch"], values["position"]
