"""How much processor time and memory running processes use, and which processes listen on a port."""

from __future__ import annotations

import socket
from collections.abc import Iterable
from dataclasses import dataclass
from ipaddress import ip_address

import psutil

__all__ = ["Usage", "listeners", "usage_of"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Usage:
    """Of several processes together. cpu_s: processor seconds since they began. rss_bytes: resident memory now."""

    cpu_s: float
    rss_bytes: int


def usage_of(pids: Iterable[int]) -> Usage | None:
    """Processor time and memory of these processes; None if one of them has ended."""
    cpu_s, rss_bytes = 0.0, 0
    try:
        for pid in pids:
            process = psutil.Process(pid)
            times = process.cpu_times()
            cpu_s += times.user + times.system
            rss_bytes += process.memory_info().rss
    except psutil.NoSuchProcess:
        return None
    return Usage(cpu_s=cpu_s, rss_bytes=rss_bytes)


def listeners(host: str, port: int) -> tuple[int, ...]:
    """The processes of this user that listen on a TCP port of this machine; none if the host is not this machine."""
    try:
        local = ip_address(socket.gethostbyname(host)).is_loopback
    except OSError:
        return ()
    if not local:
        return ()
    return tuple(sorted(process.pid for process in psutil.process_iter() if _listens(process, port)))


def _listens(process: psutil.Process, port: int) -> bool:
    """Whether a process has a listening socket on a port. False for processes of other users, which do not say.

    Each process is asked by itself, because several may share one socket, and a list of the machine's sockets names
    only one process for each.
    """
    try:
        sockets = process.net_connections(kind="tcp")
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False
    return any(found.status == psutil.CONN_LISTEN and found.laddr.port == port for found in sockets)
