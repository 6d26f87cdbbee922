"""Compares what the ranks of a process group load, through the group's store.

Ranks that listed different files make different steps, deliver samples twice or never, and then wait for each other
forever. Each rank writes what it loads into the store of the group when its loader is made, and reads what the others
wrote at the first `for`. That is no collective: a loader that only some ranks make waits for the others for a limited
time, then warns and continues. A rank that begins later still compares itself with those that wrote before.

At each `for` the first rank also writes where it begins, and the others compare themselves with it, without waiting: a
state that only some ranks loaded would give samples twice or never, too.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import secrets
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from gpuflow.arrays import Bytes
from gpuflow.errors import LoaderError, reason_of
from gpuflow.loader.plan import LoaderPlan
from gpuflow.runtime.memory import memory_file
from gpuflow.runtime.ranks import group_ranks

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


_BOOT = Path("/proc/sys/kernel/random/boot_id")
"""Holds the kernel's boot ID, a text that differs between hosts."""
_NAME = "gpuflow-ranks-"


def shared_by_ranks(store: Store, key: str, size: int) -> Bytes | None:
    """Return memory [size], zeros at first, which all ranks of this host share that ask with the same key.

    None if this system cannot share memory in this way.

    Raises RuntimeError if the store does not answer, or has no `compare_set`.
    """
    with suppress(OSError), ExitStack() as opened:
        token = secrets.token_hex(8)
        descriptor = memory_file(f"{_NAME}{token}")
        opened.callback(os.close, descriptor)
        os.ftruncate(descriptor, size)
        own = f"{os.getpid()} {descriptor} {token}"
        found = store.compare_set(f"{key}/{_BOOT.read_text().strip()}", "", own).decode()
        if found != own:
            return _opened(found, size)
        memory = _mapped(descriptor, size)
        # Other ranks can open the file only while this descriptor is open.
        weakref.finalize(memory, opened.pop_all().close).atexit = False
        return memory
    return None


def _opened(found: str, size: int) -> Bytes | None:
    """Return the memory that another rank made. found: its process, the descriptor there, and the file's name."""
    process, number, token = found.split()
    with suppress(OSError), ExitStack() as opened:
        descriptor = os.open(f"/proc/{process}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
        opened.callback(os.close, descriptor)
        name = os.readlink(f"/proc/self/fd/{descriptor}")
        # In another container this may be another process's file.
        if name.startswith(f"/memfd:{_NAME}{token}") and os.fstat(descriptor).st_size == size:
            return _mapped(descriptor, size)
    return None


def _mapped(descriptor: int, size: int) -> Bytes:
    return np.frombuffer(mmap.mmap(descriptor, size), np.uint8)


WAIT_SECONDS = 10.0
"""How long the first `for` waits for the other ranks to make the same loader, if `run.timeout_s` is not less."""

_UNKNOWN = "it is not known whether all ranks load the same samples"
_FIRST_POLL_SECONDS, _LONGEST_POLL_SECONDS = 0.005, 0.5

Announcements = list[tuple[int, str]]
"""The descriptions of a rank's loaders of one pipeline, in order: for each run of equal ones the number of the last
one."""

_announced: dict[str, Announcements] = {}
"""Holds the announcements of this process, by the store's key of the pipeline."""
_announced_lock = threading.Lock()


class RankAgreement:
    """Compares what one loader delivers with the loaders of other ranks.

    Nothing is compared without a process group of several ranks, nor for a loader that was given another rank or
    number of ranks than the group's: which processes share its epochs is then not known here.

    describe, in each method: says in words what must be equal on all ranks. Called only if that is compared.
    """

    def __init__(self, plan: LoaderPlan) -> None:
        self._plan = plan
        self._pipeline_key = f"gpuflow/{plan.program.pipeline.name}/{plan.world_size}"
        self._key: str | None = None
        """The store's key for this loader, once it is announced."""
        self._own, self._number = "", 0
        self._loops = 0
        self._done = False

    def announce(self, describe: Callable[[], str]) -> None:
        """Write what this rank loads into the group's store, if there is a group already. Waits for no rank."""
        with suppress(_store_error()):  # `check` warns of it
            self._announce(describe)

    def _announce(self, describe: Callable[[], str]) -> None:
        plan = self._plan
        if self._key is not None or plan.world_size == 1 or group_ranks() != (plan.rank, plan.world_size):
            return
        self._own = describe()
        with _announced_lock:
            announced = _announced.setdefault(self._pipeline_key, [])
            self._number = 1 + max((last for last, _ in announced), default=0)
            if announced and announced[-1][1] == self._own:
                announced.pop()
            announced.append((self._number, self._own))
            _store().set(f"{self._pipeline_key}/{plan.rank}", json.dumps(announced))
        self._key = f"{self._pipeline_key}/{self._number}/{hashlib.sha256(self._own.encode()).hexdigest()}"

    def check(self, describe: Callable[[], str]) -> bool:
        """Compare this rank with the others, once. Returns whether this call did.

        Raises:
            LoaderError: ranks differ, or the group is one that this loader was made too early to know.
        """
        plan, group = self._plan, group_ranks()
        if self._done or group is None:
            return False
        if group != (plan.rank, plan.world_size) and not plan.rank_given:
            raise LoaderError(
                f"this loader is rank {plan.rank} of {plan.world_size}, and this process is rank {group[0]} of "
                f"{group[1]} of a process group that was initialised later; make the loader after "
                "init_process_group, or pass rank= and world_size="
            )
        try:
            self._announce(describe)
            if self._key is not None:
                self._compare(_store())
        except _store_error() as error:
            warnings.warn(f"{_UNKNOWN}: the process group's store does not answer: {reason_of(error)}", stacklevel=3)
        self._done = True
        return self._key is not None

    def begin(self, epoch: int, position: int) -> None:
        """Compare where this rank's next loop begins with where another rank began its loop of the same number.

        Raises:
            LoaderError: they differ.
        """
        if self._key is None or group_ranks() is None:  # the group may have been destroyed since the first loop
            return
        self._loops += 1
        rank, own = self._plan.rank, f"epoch {epoch} at sample {position:,}"
        try:
            first = json.loads(_store().compare_set(f"{self._key}/loop {self._loops}", "", json.dumps([rank, own])))
        except RuntimeError:  # the store does not answer, or cannot do this
            return
        if first[1] != own:
            raise LoaderError(
                f"the ranks differ in where they begin: rank {first[0]} began {first[1]}, rank {rank} begins {own}; "
                "load the same state and set the same epoch on every rank, and pass rank= and world_size= to a loader "
                "that not all ranks make"
            )

    def memory(self, size: int) -> Bytes | None:
        """Return memory for what this host's ranks find out about the samples of this loader, see `shared_by_ranks`.

        Ranks that load other samples have other memory. None for a loader that is not compared.
        """
        if self._key is None:
            return None
        with suppress(RuntimeError):  # the store does not answer, or cannot do this
            return shared_by_ranks(_store(), self._key, size)
        return None

    def _compare(self, store: Store) -> None:
        name, world_size = self._plan.program.pipeline.name, self._plan.world_size
        wait = min(WAIT_SECONDS, self._plan.timeout_seconds)
        deadline, pause = time.monotonic() + wait, _FIRST_POLL_SECONDS
        while True:  # and no Store.wait, which lets no Ctrl-C through
            announced = _read(store, [f"{self._pipeline_key}/{rank}" for rank in range(world_size)])
            found = list(map(self._counterpart, announced))
            left = deadline - time.monotonic()
            if None not in found or left <= 0:
                break
            time.sleep(min(pause, left))
            pause = min(2 * pause, _LONGEST_POLL_SECONDS)
        ranks = {text: [rank for rank, other in enumerate(found) if other == text] for text in dict.fromkeys(found)}
        missing = ranks.pop(None, [])
        if ranks.keys() - {self._own}:
            raise LoaderError(
                f"the ranks differ in what they load as {name!r}: "
                + "; ".join(f"{_ranks(own)}: {text}" for text, own in ranks.items())
                + "; give every rank the same files, labels, configuration and gpuflow, then start all of them again"
            )
        if missing:
            warnings.warn(
                f"{_UNKNOWN}: {_ranks(missing)} of {world_size} did not make the loader {name!r} within "
                f"{wait:g} s; pass rank= and world_size= to a loader that not all ranks make",
                stacklevel=4,
            )

    def _counterpart(self, announced: Announcements) -> str | None:
        """Return what another rank, which announced these loaders, loads in place of this one; None before it does.

        If some ranks made loaders that others did not make, the number of its loader may be another one.
        """
        texts = [text for _, text in announced]
        if self._own in texts and announced[-1][0] != self._number:
            return self._own
        return next((text for last, text in announced if last >= self._number), None)


def _store() -> Store:
    """Return the store of the default process group.

    If torchrun restarts the ranks, it keeps its own store with all keys, so the keys of each attempt differ.
    """
    import torch.distributed as dist

    store: Store = dist.distributed_c10d._get_default_store()
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return dist.distributed_c10d.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", ""), store)
    return store


def _store_error() -> type[Exception]:
    """Return the class of what a store raises once its server is gone."""
    import torch.distributed as dist

    return dist.DistError


def _read(store: Store, keys: list[str]) -> list[Announcements]:
    """Return what each rank announced of its loaders of one pipeline; nothing for a rank that made none."""
    present = keys if store.check(keys) else [key for key in keys if store.check([key])]
    values = dict(zip(present, store.multi_get(present), strict=True)) if present else {}
    return [json.loads(values.get(key, "[]")) for key in keys]


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank{'s' * (len(ranks) > 1)} {shown}"
