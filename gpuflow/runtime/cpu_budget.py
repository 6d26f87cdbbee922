"""How many processor cores this process may use: those it may run on, what control groups grant, its share of a host.

How they are divided among threads and processes is decided in `gpuflow.config.resources`.
"""

from __future__ import annotations

import math
import os
from pathlib import Path, PurePosixPath

from gpuflow.runtime.ranks import Ranks


def available_threads() -> int:
    """Return the number of threads for this process: its cores, shared among the ranks of the host."""
    return share_of_cores(len(os.sched_getaffinity(0)), cpu_quota(), Ranks.on_host().local_world_size)


def share_of_cores(cores: int, quota: float | None, ranks: int) -> int:
    """Return the threads that each of `ranks` processes gets of `cores`. quota: of processor time, in cores; None for
    none."""
    granted = cores if quota is None else min(cores, math.ceil(quota))
    return max(1, granted // ranks)


def cpu_quota(root: Path = Path("/")) -> float | None:
    """Return the processor time that control groups (v1 or v2) grant this process, in cores; None without a limit.

    The smallest limit of its own group and the groups around it counts. root: the folder with `proc` and `sys`.
    """
    quotas = []
    for line in (_text(root / "proc/self/cgroup") or "").splitlines():
        _, controllers, group = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        for mount in {root / "sys/fs/cgroup" / name for name in ((controllers, "cpu") if controllers else ("",))}:
            own = PurePosixPath(group.lstrip("/"))
            quotas += [_group_quota(mount / around) for around in (own, *own.parents)]
    return min((quota for quota in quotas if quota is not None), default=None)


def _group_quota(folder: Path) -> float | None:
    """`cpu.max` holds `400000 100000` or `max 100000` microseconds; version 1 has a file for each and -1."""
    if (both := _text(folder / "cpu.max")) is not None:
        quota, period = both.split()
    else:
        quota = (_text(folder / "cpu.cfs_quota_us") or "-1").strip()
        period = (_text(folder / "cpu.cfs_period_us") or "100000").strip()
    return None if quota in ("max", "-1") else int(quota) / int(period)


def _text(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:
        return None
