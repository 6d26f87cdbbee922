"""Says how many threads a process should have, runs calls on daemon threads, and sets torch's and Python's threads.

`concurrent.futures.ThreadPoolExecutor` joins its threads at exit without a limit: one read that hangs on a dead network
mount would hang the interpreter.
"""

from __future__ import annotations

import ctypes
import math
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextvars import ContextVar
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, ParamSpec, TypeVar

from gpuflow.runtime.ranks import Ranks

_START_SECONDS, _SHUTDOWN_SECONDS = 30.0, 10.0

_torch_locks: dict[int, threading.Lock] = {}
"""A lock for each process id. A forked child needs a separate one: its copy of the parent's may be locked forever."""

P = ParamSpec("P")
T = TypeVar("T")


class StopFlag:
    """Is true once it is set. C code reads it at `address`, an int32_t that is not 0 then.

    Examples:
        >>> flag = StopFlag()
        >>> flag.set()
        >>> bool(flag), ctypes.c_int32.from_address(flag.address).value
        (True, 1)
    """

    def __init__(self) -> None:
        self._value = ctypes.c_int32(0)
        self.address = ctypes.addressof(self._value)

    def set(self) -> None:
        self._value.value = 1

    def __bool__(self) -> bool:
        return self._value.value != 0


_stop_flag: ContextVar[StopFlag] = ContextVar("_stop_flag", default=StopFlag())  # noqa: B039  # which nothing sets


def stop_flag() -> StopFlag:
    """Return the flag that is set once the result of this thread's work is not needed.

    Its pool, or the epoch that it works for, was ended. Long waits and long calls of C code ask it, and give up.
    """
    return _stop_flag.get()


def use_stop_flag(flag: StopFlag) -> None:
    """Set what `stop_flag` returns on this thread."""
    _stop_flag.set(flag)


class DaemonPool(Executor):
    """Runs submitted calls in order on `threads` daemon threads. Any thread may call any method.

    It uses a queue and no lock, because a Ctrl-C cannot leave a queue locked.

    initializer: called once on each thread, before the constructor returns. If it raises, or not all threads can be
        started, so does the constructor, and no thread is left.

    Examples:
        >>> with DaemonPool(2, "squares") as pool:
        ...     list(pool.map(lambda number: number**2, range(4)))
        [0, 1, 4, 9]
    """

    def __init__(self, threads: int, name: str, initializer: Callable[[], None] = lambda: None) -> None:
        self._initializer, self._begun = initializer, queue.SimpleQueue[BaseException | None]()
        self._work: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._closing = StopFlag()
        self._threads = list[threading.Thread]()
        try:
            for i in range(threads):
                thread = threading.Thread(target=self._serve, name=f"gpuflow_{name}_{i}", daemon=True)
                thread.start()
                self._threads.append(thread)
            for _ in self._threads:
                if (error := self._begun.get(timeout=_START_SECONDS)) is not None:
                    raise error
        except BaseException as error:
            self.end(_SHUTDOWN_SECONDS)
            if isinstance(error, queue.Empty):
                raise TimeoutError(f"a thread did not start within {_START_SECONDS:g} s") from None
            raise

    def _serve(self) -> None:
        use_stop_flag(self._closing)
        try:
            self._initializer()
        except BaseException as error:
            self._begun.put(error)
            return
        self._begun.put(None)
        while (call := self._work.get()) is not None:
            future, function = call
            if self._closing:
                _cancel(future)
            elif future.set_running_or_notify_cancel():
                try:
                    future.set_result(function())
                except BaseException as error:
                    future.set_exception(error)
            del call, future, function
        self._work.put(None)  # ends the next thread

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Run a call on one of the threads. Raises RuntimeError if the pool was ended."""
        if self._closing:
            raise RuntimeError("these threads were ended; they take no more calls")
        future: Future[T] = Future()
        self._work.put((future, partial(fn, *args, **kwargs)))
        self._cancel_if_ended()  # after the check above
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = True) -> None:
        self.end(timeout=_SHUTDOWN_SECONDS if wait else 0.0)

    def end(self, timeout: float) -> bool:
        """End the threads and cancel calls that have not begun. Returns whether all ended within `timeout` seconds."""
        self._closing.set()
        self._cancel_if_ended()
        deadline = time.monotonic() + timeout
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _cancel_if_ended(self) -> None:
        """Cancel the calls in the queue if the pool was ended, and leave the item in it that ends the threads."""
        if not self._closing:
            return
        try:
            while True:
                call = self._work.get_nowait()
                if call is not None:
                    _cancel(call[0])
        except queue.Empty:
            pass
        finally:
            self._work.put(None)


def _cancel(future: Future[Any]) -> None:
    """Cancel a call that has not begun; wakes the threads that wait for it."""
    if future.cancel():
        future.set_running_or_notify_cancel()


def torch_threads_lock() -> threading.Lock:
    """Return the lock to hold while torch's default number of threads is changed, until it is restored."""
    return _torch_locks.setdefault(os.getpid(), threading.Lock())


def use_torch_threads(count: int) -> None:
    """Make torch use `count` threads for what it computes on this thread. OpenMP threads spin for a while after work.

    torch.set_num_threads also changes the default of later threads, so another thread restores that.
    """
    import torch

    if torch.get_num_threads() == count:  # which also ties this thread to the default, so that what is set next stays
        return
    with torch_threads_lock(), DaemonPool(1, "torch_threads") as other:
        default = other.submit(torch.get_num_threads).result(_START_SECONDS)
        torch.set_num_threads(count)
        other.submit(torch.set_num_threads, default).result(_START_SECONDS)


class QuickSwitching:
    """Sets Python's switch interval to `seconds`, or keeps it if it is shorter, until `end` is called.

    A thread that returns from the GPU or from C code waits for the interpreter while another one computes, up to the
    switch interval, and what it should start waits with it (measured in experiments/gpu_path/NOTES.md,
    experiments/real_data/NOTES.md and experiments/worker_scaling/README.md). Of several objects the shortest counts.
    """

    _lock = threading.Lock()
    _seconds: dict[QuickSwitching, float] = {}  # noqa: RUF012  # of all objects
    _before = 0.0

    def __init__(self, seconds: float) -> None:
        with self._lock:
            if not self._seconds:
                QuickSwitching._before = sys.getswitchinterval()
            self._seconds[self] = seconds
            self._set()

    def end(self) -> None:
        """Restore the switch interval if this is the last one. Later calls do nothing."""
        with self._lock:
            if self._seconds.pop(self, None) is not None:
                self._set()

    def _set(self) -> None:
        sys.setswitchinterval(min(self._before, *self._seconds.values(), math.inf))


def available_threads() -> int:
    """Return the number of threads for this process: its cores, shared among the ranks of the host."""
    return share_of_cores(len(os.sched_getaffinity(0)), cpu_quota(), Ranks.on_host().local_world_size)


def share_of_cores(cores: int, quota: float | None, ranks: int) -> int:
    """Return the threads that each of `ranks` processes gets of `cores`.

    quota: the processor time that is granted, in cores; None if it is not limited.

    Examples:
        >>> share_of_cores(16, 6.5, ranks=2)
        3
    """
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
    """Return the processor time that one group grants, in cores; None without a limit.

    `cpu.max` holds `400000 100000` or `max 100000` microseconds. Version 1 has a file for each number, and -1.
    """
    if (both := _text(folder / "cpu.max")) is None:
        both = f"{_text(folder / 'cpu.cfs_quota_us') or -1} {_text(folder / 'cpu.cfs_period_us') or 100000}"
    quota, period = both.split()
    return None if quota in ("max", "-1") else int(quota) / int(period)


def _text(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:
        return None
