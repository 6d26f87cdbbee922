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
from collections.abc import Callable, Mapping
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
"""The descriptions of a rank's loaders of one name, in order: for each run of equal ones the number of the last one."""

_announced: dict[str, dict[str, Announcements]] = {}
"""What this process announced: for each pipeline by its key, the loaders by name. Ranks whose sources are in folders of
other names find each other's loaders by it."""
_announced_lock = threading.Lock()


class RankAgreement:
    """Compares what one loader delivers with the loaders of other ranks.

    Nothing is compared without a process group of several ranks, nor for a loader that was given another rank or
    number of ranks than the group's: which processes share its epochs is then not known here.

    describe, in each method: says in words what must be equal on all ranks. Called only if that is compared.
    """

    def __init__(self, plan: LoaderPlan) -> None:
        self._plan = plan
        self._key: str | None = None
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
            loaders = _announced.setdefault(self._pipeline_key, {})
            announced = loaders.setdefault(plan.shared_name, [])
            self._number = _count(announced) + 1
            if announced and announced[-1][1] == self._own:
                announced.pop()
            announced.append((self._number, self._own))
            _store().set(f"{self._pipeline_key}/{plan.rank}", json.dumps(loaders))
        self._key = f"gpuflow/{plan.shared_name}/{plan.world_size}"

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
        key = f"{self._key}/{self._number}/{self._digest}/loop {self._loops}"
        try:
            first = json.loads(_store().compare_set(key, "", json.dumps([rank, own])))
        except RuntimeError:  # the store does not answer, or cannot do this
            return
        if first[1] != own:
            raise LoaderError(
                f"the ranks differ in where they begin: rank {first[0]} began {first[1]}, rank {rank} begins {own}; "
                "load the same state and set the same epoch on every rank, and pass rank= and world_size= to a loader "
                "that not all ranks make"
            )

    @property
    def _digest(self) -> str:
        """Return the digest of what this rank loads."""
        return hashlib.sha256(self._own.encode()).hexdigest()

    @property
    def _pipeline_key(self) -> str:
        """Return the store's key for all loaders of one pipeline. The keys of a single loader begin with `gpuflow/`."""
        return f"gpuflow loaders/{self._plan.program.pipeline.name}/{self._plan.world_size}"

    def memory(self, size: int) -> Bytes | None:
        """Return memory for what this host's ranks find out about the samples of this loader, see `shared_by_ranks`.

        Ranks that load other samples have other memory. None for a loader that is not compared.
        """
        if self._key is None:
            return None
        with suppress(RuntimeError):  # the store does not answer, or cannot do this
            return shared_by_ranks(_store(), f"{self._key}/{self._number}/{self._digest}", size)
        return None

    def _compare(self, store: Store) -> None:
        name, world_size = self._plan.program.pipeline.name, self._plan.world_size
        wait = min(WAIT_SECONDS, self._plan.timeout_seconds)
        deadline, pause = time.monotonic() + wait, _FIRST_POLL_SECONDS
        while True:  # and no Store.wait, which lets no Ctrl-C through
            loaders = _read(store, [f"{self._pipeline_key}/{rank}" for rank in range(world_size)])
            found = list(map(self._counterpart, loaders))
            late = any(text != self._own and self._is_late(own) for text, own in zip(found, loaders, strict=True))
            left = deadline - time.monotonic()
            if not late or left <= 0:
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

    def _is_late(self, loaders: Mapping[str, Announcements]) -> bool:
        """Return True if another rank, which made these loaders, has made fewer of this name."""
        return _count(loaders.get(self._plan.shared_name, [])) < self._number

    def _counterpart(self, loaders: Mapping[str, Announcements]) -> str | None:
        """Return what another rank, which made these loaders, loads with the one that is this loader; None before that.

        If some ranks made loaders that others did not make, the number of its loader may be another one. The name may
        be another one, too, because the folder of its source has another name. Then, of the loaders whose names only
        one of the two ranks has, it is the one of the same number.
        """
        name = self._plan.shared_name
        announced = loaders.get(name, [])
        texts = [text for _, text in announced]
        if _count(announced) != self._number and self._own in texts:
            return self._own
        if not self._is_late(loaders):
            return texts[-1]
        if announced:
            return None
        with _announced_lock:
            own = _last(_announced[self._pipeline_key])
        last = _last(loaders)
        names, others = ([one for one in these if one not in those] for these, those in ((own, last), (last, own)))
        here, there = [own[one] for one in names], [last[one] for one in others]
        if self._own in there:
            return self._own
        number = names.index(name)
        return there[number] if number < len(there) and there[number] not in here else None


def _count(announced: Announcements) -> int:
    return announced[-1][0] if announced else 0


def _last(loaders: Mapping[str, Announcements]) -> dict[str, str]:
    """Return the last description of the loaders of each name."""
    return {name: announced[-1][1] for name, announced in loaders.items()}


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


def _read(store: Store, keys: list[str]) -> list[dict[str, Announcements]]:
    """Return what each rank announced of its loaders of one pipeline; nothing for a rank that made none."""
    present = keys if store.check(keys) else [key for key in keys if store.check([key])]
    values = dict(zip(present, store.multi_get(present), strict=True)) if present else {}
    return [json.loads(values[key]) if key in values else {} for key in keys]


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank{'s' * (len(ranks) > 1)} {shown}"
