"""How much processor time and memory running processes use, and which processes listen on a port."""

from __future__ import annotations

import socket
from collections.abc import Iterable
from contextlib import suppress
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
    """Processor time and memory of these processes, and of those that they started; None if one of them has ended."""
    try:
        named = {psutil.Process(pid) for pid in pids}
        started = {child for process in named for child in process.children(recursive=True)} - named
        used = [_usage(process) for process in named]
    except psutil.NoSuchProcess:
        return None
    for process in started:
        with suppress(psutil.NoSuchProcess):
            used.append(_usage(process))
    return Usage(cpu_s=sum(one.cpu_s for one in used), rss_bytes=sum(one.rss_bytes for one in used))


def _usage(process: psutil.Process) -> Usage:
    times = process.cpu_times()
    return Usage(cpu_s=times.user + times.system, rss_bytes=process.memory_info().rss)


def listeners(host: str, port: int) -> tuple[int, ...]:
    """The processes of this user that listen on a TCP port of this machine; none if the host is not this machine."""
    try:
        addresses = {entry[4][0] for entry in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
    except OSError:
        return ()
    if not any(ip_address(address).is_loopback for address in addresses):
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
