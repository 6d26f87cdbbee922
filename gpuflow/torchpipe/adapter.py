"""Runs torchpipe: the only module that imports it, or that depends on how it works inside.

torchpipe's scheduler is the package omniback, which is all that gpuflow's own nodes need. torchpipe itself has the
operators that presets and `via: torchpipe` need; on a machine with a GPU it compiles parts of them at its first import.

What this module works around:

- Node names are global to a process, and neither nodes nor their threads are ever freed. Each graph gets a prefix of
  its own. A closed graph releases its models and buffers; its threads stay, asleep.
- Freeing a graph joins its threads with the GIL held, which they may be waiting for, and takes half a second. So no
  graph is freed.
- At exit, omniback waits 0.1 s for each thread, and a forked child waits for threads that it does not have. Both skip
  that clean-up.
- It logs to stdout, errors of requests included, and has no setting for that. Its logger is turned off in memory;
  errors are raised anyway.
- Its batching makes callers wait for a lock. The nodes that run a model do without it, see
  `request_queue.py`.
- Python would discard its state for each of torchpipe's threads after every batch. It is kept.
- Its wheel has operators for some versions of torch. For others each process would compile them: for minutes, with
  thousands of lines of output, and in the end without success. It does so only where the user asks for it.
"""

from __future__ import annotations

import atexit
import ctypes
import importlib.metadata
import importlib.util
import itertools
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gpuflow.errors import MissingExtra, PredictorError

_LOGGER_LEVEL_OFFSETS = {"0.2.24": 64}
"""The byte offset of the level in omniback's logger object (spdlog), by omniback's version. Before the level are a
pointer to virtual functions, a string and a vector."""
TESTED_VERSIONS: Mapping[str, frozenset[str]] = {
    "torchpipe": frozenset({"0.2.25"}),
    "omniback": frozenset(_LOGGER_LEVEL_OFFSETS),
}
"""The versions that this module was written for. Others run too, but their logger is left alone."""
_LEVEL_INFO, _LEVEL_OFF = 2, 6
_SKIP = "TORCHPIPE_SKIP_ALL"
"""The environment variable by which torchpipe is imported without operators: `1`. With `0` it compiles missing ones."""

_lock = threading.Lock()
_numbers = itertools.count()
_omniback: Any = None


def register_nodes(classes: Mapping[str, type], *, at_exit: Callable[[], None]) -> None:
    """Import omniback and make node classes known to it by name. Later calls do nothing.

    Args:
        at_exit: called when the process exits, before omniback's own clean-up.

    Raises:
        MissingExtra: omniback is not installed.
    """
    global _omniback
    with _lock:
        if _omniback is not None:
            return
        if (missing := missing_scheduler()) is not None:
            raise missing
        os.environ.setdefault("TORCHPIPE_SKIP_TENSORRT", str(int(importlib.util.find_spec("tensorrt") is None)))
        if missing_operators("") is not None:
            os.environ.setdefault(_SKIP, "1")  # also where the user imports torchpipe
        import omniback

        turn_off_logger(omniback, importlib.metadata.version("omniback"))
        for name, node in classes.items():
            omniback.register(name, node)
        atexit.unregister(omniback.ffi.cleanup)
        atexit.register(omniback.ffi.cleanup)  # omniback does it in an assert, which `python -O` leaves out
        os.register_at_fork(after_in_child=skip_cleanup)
        atexit.register(at_exit)  # functions run in reverse order: before omniback's
        _omniback = omniback


def import_operators() -> None:
    """Import torchpipe, which makes its operators known to omniback.

    Raises:
        MissingExtra: torchpipe is not installed.
        PredictorError: torchpipe has no operators for this version of torch.
    """
    if (missing := missing_operators("a preset or via: torchpipe")) is not None:
        raise missing
    import torchpipe  # noqa: F401


def missing_scheduler() -> MissingExtra | None:
    """Return an error that says that omniback is not installed; None if it is."""
    return MissingExtra("serving", "omniback", "serve") if importlib.util.find_spec("omniback") is None else None


def missing_operators(feature: str) -> MissingExtra | PredictorError | None:
    """Return an error that says why torchpipe's operators cannot run here; None if they can.

    Args:
        feature: what needs them.
    """
    spec = importlib.util.find_spec("torchpipe")
    if spec is None or spec.origin is None:
        return MissingExtra(feature, "torchpipe (x86-64 only)", "serve")
    torch = ".".join(importlib.metadata.version("torch").split(".")[:2])
    cache = Path(os.environ.get("OMNIBACK_CACHE_DIR", "~/.cache/omniback")).expanduser()
    folders = Path(spec.origin).parent / "lib", cache
    library = f"torchpipe_core-torch{torch.replace('.', '')}-*.so"
    if os.environ.get(_SKIP) == "0" or any(next(folder.glob(library), None) for folder in folders):
        return None
    version = importlib.metadata.version("torchpipe")
    return PredictorError(
        f"{feature} needs torchpipe's operators, and torchpipe {version} has none for torch {torch}; install torch "
        f"2.11 or 2.12, or set {_SKIP}=0: then torchpipe compiles them, which takes minutes and may fail"
    )


def turn_off_logger(omniback: Any, version: str) -> bool:
    """Turn omniback's logger off. Returns False, and leaves it alone, where this version's memory layout is unknown."""
    offset = _LOGGER_LEVEL_OFFSETS.get(version)
    if offset is None:
        return False
    logger = omniback.libomniback._ZN2om18default_logger_rawEv
    logger.restype = ctypes.c_void_p
    level = ctypes.c_int.from_address(logger() + offset)
    if level.value == _LEVEL_INFO:
        level.value = _LEVEL_OFF
    return True


def skip_cleanup() -> None:
    """Let this process exit without omniback's clean-up, which waits 0.1 s for each thread, one after the other.

    The exit handlers of other C libraries are skipped too, so call it only in gpuflow's own processes, after `close`.
    """
    if _omniback is not None:
        atexit.unregister(_omniback.ffi.cleanup)
        libc = ctypes.CDLL(None)
        libc.on_exit(libc._exit, None)  # runs before the destructors, which would wait too


def unique_prefix() -> str:
    """Return a prefix for the node names of one graph."""
    return f"gpuflow{next(_numbers)}"


def keep_thread_state() -> None:
    """Let Python keep its state for the calling thread, one of torchpipe's, which makes and runs an instance of a node.

    Otherwise Python would create that state again for each batch, with memory from the system: a fifth fewer requests
    a second.
    """
    ctypes.pythonapi.PyGILState_Ensure()  # without PyGILState_Release: these threads last as long as the process


class Pipe:
    """A graph that torchpipe runs, until the process ends. Any thread may call any method.

    Call `register_nodes` first.

    Args:
        nodes: parameters by node name. Raises what torchpipe raises where it does not accept them.
    """

    def __init__(self, nodes: Mapping[str, Mapping[str, str]]) -> None:
        self._pipe = _omniback.pipe({name: dict(parameters) for name, parameters in nodes.items()})
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._pipe))  # never freed, also not when the interpreter ends

    def start(self, requests: Sequence[object]) -> None:
        """Queue an item of these requests and return at once. The nodes answer them."""
        self._pipe(_omniback.Dict({"data": b"", "requests": requests, "event": _omniback.Event()}))

    def run(self, item: Mapping[str, Any]) -> Any:
        """Run an item and wait. Returns its `result`, a tensor for `torch.from_dlpack`. Raises what a node raises."""
        items = _omniback.Dict(dict(item))
        self._pipe(items)
        return items["result"]
