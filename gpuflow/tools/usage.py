"""What running processes take of this machine: processor time and memory by /proc, GPUs by NVML.

Sources: proc(5) of the Linux manual pages; `nvml.h`.
"""

from __future__ import annotations

import ctypes
import os
import socket
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any

__all__ = ["Gpus", "Usage", "listeners", "usage_of"]

_LISTENS = "0A"  # TCP_LISTEN


@dataclass(frozen=True, kw_only=True, slots=True)
class Usage:
    """Of some processes together. cpu_s: processor seconds since they began. rss_bytes: their resident memory now."""

    cpu_s: float
    rss_bytes: int


def usage_of(pids: Iterable[int]) -> Usage | None:
    """What these processes have taken; None if one of them is gone."""
    ticks = pages = 0
    try:
        for pid in pids:
            with open(f"/proc/{pid}/stat") as file:
                fields = file.read().rpartition(")")[2].split()  # the name before it may hold spaces
            ticks += int(fields[11]) + int(fields[12])  # utime, stime
            pages += int(fields[21])  # rss
    except (FileNotFoundError, ProcessLookupError):
        return None
    return Usage(cpu_s=ticks / os.sysconf("SC_CLK_TCK"), rss_bytes=pages * os.sysconf("SC_PAGE_SIZE"))


def listeners(host: str, port: int) -> tuple[int, ...]:
    """The processes of this user that listen on a TCP port of this machine; none if the host is not this machine."""
    try:
        local = ip_address(socket.gethostbyname(host)).is_loopback
    except OSError:
        return ()
    sockets = _listening(port) if local else frozenset[str]()
    return tuple(sorted(pid for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))) if _holds(pid, sockets)))


def _listening(port: int) -> frozenset[str]:
    """The sockets that listen on a port, as /proc/PID/fd names them."""
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        if os.path.exists(table):
            with open(table) as file:
                for line in file.readlines()[1:]:
                    _, local, _, state, *_, inode = line.split()[:10]
                    if state == _LISTENS and int(local.rpartition(":")[2], 16) == port:
                        found.add(f"socket:[{inode}]")
    return frozenset(found)


def _holds(pid: int, sockets: frozenset[str]) -> bool:
    """Whether a process has one of these open. Those of other users do not tell."""
    try:
        return any(_target(f"/proc/{pid}/fd/{name}") in sockets for name in os.listdir(f"/proc/{pid}/fd"))
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return False


def _target(link: str) -> str:
    try:
        return os.readlink(link)
    except FileNotFoundError:  # closed meanwhile
        return ""


class Gpus:
    """The NVIDIA GPUs of this machine, as NVML sees them. There may be none."""

    def __init__(self, load: Callable[[str], Any] = ctypes.CDLL) -> None:
        self._handles: list[ctypes.c_void_p] = []
        try:
            self._nvml = load("libnvidia-ml.so.1")
        except OSError:
            return
        if self._nvml.nvmlInit_v2():
            return
        count = ctypes.c_uint()
        self._nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
        for index in range(count.value):
            handle = ctypes.c_void_p()
            if self._nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)) == 0:
                self._handles.append(handle)

    def percents(self) -> list[int]:
        """Of each GPU the share of the last moments, 1/6 to 1 s, in which a kernel ran. Empty where none tells."""
        rates = (ctypes.c_uint * 2)()  # nvmlUtilization_t: gpu, memory
        return [
            rates[0]
            for handle in self._handles
            if self._nvml.nvmlDeviceGetUtilizationRates(handle, ctypes.byref(rates)) == 0
        ]
