"""Runs graphs on torchpipe. The only file that imports it, and the place where its traps are dealt with:

- The names of nodes are global to a process; neither they nor their threads are ever freed. Each graph gets a prefix of
  its own. A closed one lets go of models and buffers, and its threads sleep on.
- Freeing a graph joins its threads with the GIL held, which they may be waiting for, and takes half a second. None is.
- It logs on stdout, errors of requests too. Its logger is turned off; what goes wrong is raised anyway.
- A forked child waits for threads that it does not have, at its exit at the latest.

Its scheduler is the package omniback, which is all that gpuflow's own nodes need. torchpipe, whose operators presets
and TensorRT need, compiles parts of itself when it is first imported where there is a GPU.
"""

from __future__ import annotations

import atexit
import ctypes
import importlib.metadata
import importlib.util
import itertools
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch.utils.dlpack import from_dlpack

from gpuflow.decode import self_test
from gpuflow.decode.preset import CANNOT_DECODE
from gpuflow.errors import BadSampleError, DecoderError, MissingExtra, PredictorError
from gpuflow.runtime.threads import DaemonPool
from gpuflow.torchpipe.graph import OURS, PREDICT, Graph
from gpuflow.torchpipe.nodes import SESSIONS, ModelNode, PredictNode, PreprocessNode, Session
from gpuflow.torchpipe.request_queue import Backlog, Request

if TYPE_CHECKING:
    from gpuflow.engines import Engine

__all__ = ["RunningGraph", "register", "skip_cleanup"]

T = TypeVar("T")

_EXIT_SECONDS = 10.0
_MOST_CALLERS = 64
_LOGGER_LEVELS = {"0.2.24": 64}
"""By omniback's version, where in spdlog's logger its level is, in bytes: after a vtable, a string and a vector."""
_LEVEL_INFO, _LEVEL_OFF = 2, 6

_lock = threading.Lock()
_numbers = itertools.count()
_omniback: Any = None
_open: weakref.WeakSet[RunningGraph] = weakref.WeakSet()


def register() -> None:
    """Make gpuflow's nodes known to torchpipe, which a graph that it reads from a file needs. Again does nothing.

    Raises:
        MissingExtra: torchpipe is not installed.
    """
    global _omniback
    with _lock:
        if _omniback is None:
            os.environ.setdefault("TORCHPIPE_SKIP_TENSORRT", str(int(importlib.util.find_spec("tensorrt") is None)))
            try:
                import omniback
            except ModuleNotFoundError as error:
                raise _missing(error) from error
            _silence(omniback)
            for node, kind in zip(OURS, (PreprocessNode, ModelNode, PredictNode), strict=True):
                omniback.register(node, kind)
            os.register_at_fork(after_in_child=skip_cleanup)
            atexit.register(_close_all)  # after omniback's own clean-up was registered, so it runs before that
            _omniback = omniback


def _missing(error: ModuleNotFoundError) -> ImportError:
    """What to raise where torchpipe, or something that it needs, is not installed."""
    return MissingExtra("serving", "torchpipe", "serve") if error.name in ("omniback", "torchpipe") else error


def _silence(omniback: Any) -> None:
    """Turn its logger off. It has no setting for that; where the level is in memory is known for some versions."""
    offset = _LOGGER_LEVELS.get(importlib.metadata.version("omniback"))
    if offset is not None:
        logger = omniback.libomniback._ZN2om18default_logger_rawEv
        logger.restype = ctypes.c_void_p
        level = ctypes.c_int.from_address(logger() + offset)
        if level.value == _LEVEL_INFO:
            level.value = _LEVEL_OFF


def skip_cleanup() -> None:
    """Let this process exit without torchpipe's clean-up, which waits 0.1 s for each thread, one after the other.

    Other C libraries' handlers are skipped with it, so this is for processes of our own, after `close`.
    """
    if _omniback is not None:
        atexit.unregister(_omniback.ffi.cleanup)
        libc = ctypes.CDLL(None)
        libc.on_exit(libc._exit, None)  # before the destructors, which would wait too


def _close_all() -> None:
    """At exit: what waits is cancelled, what runs may end. A model that hangs does not keep the process."""
    ended = [graph.close(_EXIT_SECONDS, cancel=True) for graph in list(_open)]
    if not all(ended):
        skip_cleanup()


def _release(name: str) -> None:
    SESSIONS.pop(name).close()


def _start(pipe: Any, data: bytes, request: Request) -> None:
    """Hand a request to a graph of gpuflow's own nodes, and do not wait for it."""
    pipe(_omniback.Dict({"data": data, "request": request, "event": _omniback.Event()}))


class RunningGraph:
    """A graph at work. Any thread may submit.

    Args:
        graph: what to run. engines: one for each instance of its model node, warmed up; none if it ends with images.

    Raises:
        MissingExtra: torchpipe is not installed. PredictorError: torchpipe does not take the graph.
    """

    def __init__(self, graph: Graph, engines: Sequence[Engine] = ()) -> None:
        register()
        if graph.native:
            try:
                import torchpipe  # noqa: F401  # brings its operators
            except ModuleNotFoundError as error:
                raise _missing(error) from error
        name = f"gpuflow{next(_numbers)}"
        nodes = graph.as_dict(f"{name}.")
        for node in nodes.values():
            if node["backend"] in OURS:
                node["session"] = name
            if node["backend"] == PREDICT:
                node["batching_timeout"] = "0"  # off: a request starts an instance, or waits in the backlog
        self._pid = os.getpid()
        self._idle, self._closed = threading.Condition(), False
        self._under_way: set[Request] = set()
        self._session = SESSIONS[name] = Session(engines)
        try:
            self._pipe = _omniback.pipe(nodes)
        except Exception as error:
            del SESSIONS[name]
            raise PredictorError(f"torchpipe does not take the graph of {graph.origin}: {error}") from error
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._pipe))  # kept for ever, also when the interpreter ends
        # Errors of torchpipe's own operators reach only those who wait in the call.
        callers = sum(int(node["instance_num"]) * int(node.get("batch", 1)) for node in nodes.values())
        self._callers = DaemonPool(min(callers, _MOST_CALLERS), "serve") if graph.native else None
        head = next(iter(nodes.values()))
        if head["backend"] == PREDICT:
            instances, batch = int(head["instance_num"]), int(head["batch"])
            self._session.backlog = Backlog(partial(_start, self._pipe), instances=instances, batch=batch)
        self._preset = graph.preset
        self._release = weakref.finalize(self, _release, name)  # nothing is under way once nobody knows the graph
        self._release.atexit = False
        _open.add(self)

    def submit(self, data: bytes, *, wrap: Callable[[torch.Tensor], T], wants_image: bool = False) -> Future[T]:
        """What `wrap` makes of the logits [K] of one image, or of the image itself as the model gets it, [C, H, W].

        The future raises BadSampleError for bytes that are no image, PredictorError where the model failed. Cancelled
        before the model has begun, the image is dropped.

        Raises:
            PredictorError: the graph is closed, or was made in the parent of this process.
        """
        if os.getpid() != self._pid:
            raise PredictorError(
                f"the predictor was made in process {self._pid} and does not work in its forked child {os.getpid()}; "
                "load it after the fork, or start processes by spawn"
            )
        request = Request(self._done, wrap=wrap, wants_image=wants_image)
        with self._idle:
            if self._closed:
                raise PredictorError("the predictor is closed; load it again")
            self._under_way.add(request)
        try:
            if self._session.backlog is not None:
                self._session.backlog.add(data, request)
            elif self._callers is None:
                _start(self._pipe, data, request)
            else:
                self._callers.submit(self._call, {"data": data, "request": request}, request)
        except BaseException:
            self._done(request)
            raise
        return request.future

    def _call(self, item: dict[str, Any], request: Request) -> None:
        """Run an item and wait, for graphs with nodes that know nothing of requests."""
        answer: torch.Tensor | Exception
        try:
            if self._preset is not None:
                self._preset.check(np.frombuffer(item["data"], np.uint8))
            items = _omniback.Dict(item)
            self._pipe(items)
            answer = from_dlpack(items["result"])
        except BadSampleError as fault:
            answer = fault
        except Exception as error:
            if self._preset is not None:
                answer = BadSampleError(self._preset.stage_name, CANNOT_DECODE)
                answer.__cause__ = error
            else:
                answer = request.fault or PredictorError(f"torchpipe: {str(error).strip().splitlines()[-1]}")
        if not request.settled:
            request.settle(answer if isinstance(answer, Exception) else answer.float().cpu().flatten())

    def check(self) -> None:
        """Have every instance that decodes decode gpuflow's own test image.

        Raises:
            DecoderError: one fails, also after a new start.
        """
        self._session.check()
        if self._preset is not None:
            try:
                self._pipe(_omniback.Dict({"data": self_test.JPEG.tobytes()}))  # through the model, too
            except Exception as error:  # whatever torchpipe's operators raise
                raise DecoderError(
                    "torchpipe does not decode gpuflow's test image; end this process and start another one"
                ) from error

    def _done(self, request: Request) -> None:
        with self._idle:
            self._under_way.discard(request)
            if not self._under_way:
                self._idle.notify_all()

    @property
    def in_flight(self) -> int:
        """How many images are under way."""
        return len(self._under_way)

    @property
    def batches(self) -> dict[int, int]:
        """How often the model ran on so many images at a time."""
        return dict(self._session.batches)

    def close(self, timeout: float, *, cancel: bool = False) -> bool:
        """Take no more images, let those under way end, then let go of models and buffers. Again does nothing.

        Args:
            timeout: seconds. cancel: what the model has not begun is dropped.

        Returns:
            Whether all ended in time. If not, nothing is let go of.
        """
        if os.getpid() != self._pid:
            return True
        with self._idle:
            self._closed = True
            waiting = list(self._under_way) if cancel else []
        for request in waiting:
            request.future.cancel()
        with self._idle:
            if not self._idle.wait_for(lambda: not self._under_way, timeout):
                return False
        self._release()
        if self._callers is not None:
            self._callers.end(timeout)
        return True
