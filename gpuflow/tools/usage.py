"""Measures the processor time and memory of running processes, and finds processes that listen on a port."""

from __future__ import annotations

import socket
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import ip_address

import psutil


@dataclass(frozen=True, kw_only=True, slots=True)
class Usage:
    """Of several processes together. cpu_s: processor seconds since they began.

    rss_bytes: resident memory now, in which pages that processes share count for each of them. pss_bytes: the same with
    each page divided among all processes that share it; None if it was not asked for, or is not known of one of them.
    """

    cpu_s: float
    rss_bytes: int
    pss_bytes: int | None = None


def usage_of(pids: Iterable[int], *, pss: bool = False) -> Usage | None:
    """Return the processor time and memory of these processes and their children; None if one of them has ended.

    pss: also read `pss_bytes`, for which the system looks at every page.
    """
    try:
        named = {psutil.Process(pid) for pid in pids}
        started = {child for process in named for child in process.children(recursive=True)} - named
        used = [_usage(process, pss=pss) for process in named]
    except psutil.NoSuchProcess:
        return None
    for process in started:
        with suppress(psutil.NoSuchProcess):
            used.append(_usage(process, pss=pss))
    shares = [one.pss_bytes for one in used if one.pss_bytes is not None]
    return Usage(
        cpu_s=sum(one.cpu_s for one in used),
        rss_bytes=sum(one.rss_bytes for one in used),
        pss_bytes=sum(shares) if pss and len(shares) == len(used) else None,
    )


def _usage(process: psutil.Process, *, pss: bool) -> Usage:
    times = process.cpu_times()
    return Usage(
        cpu_s=times.user + times.system,
        rss_bytes=process.memory_info().rss,
        pss_bytes=_pss(process) if pss else None,
    )


def _pss(process: psutil.Process) -> int | None:
    """Return the proportional memory; None for a process of another user, and where the kernel does not count it."""
    try:
        return getattr(process.memory_full_info(), "pss", None)
    except psutil.AccessDenied:
        return None


def listeners(host: str, port: int) -> tuple[int, ...]:
    """Return the processes of this user that listen on a TCP port; none if the host is not this machine."""
    try:
        addresses = {entry[4][0] for entry in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
    except OSError:
        return ()
    if not any(ip_address(address).is_loopback for address in addresses):
        return ()
    return tuple(sorted(process.pid for process in psutil.process_iter() if _listens(process, port)))


def _listens(process: psutil.Process, port: int) -> bool:
    """Return True if a process has a listening socket on a port. False for processes of other users, which do not say.

    Each process is asked by itself, because several may share one socket, and a list of the machine's sockets names
    only one process for each.
    """
    try:
        sockets = process.net_connections(kind="tcp")
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False
    return any(found.status == psutil.CONN_LISTEN and found.laddr.port == port for found in sockets)
