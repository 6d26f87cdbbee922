"""Runs a graph: submits requests to torchpipe, tracks them until they are answered, closes the graph."""

from __future__ import annotations

import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch
from torch.utils.dlpack import from_dlpack

from gpuflow.decode import self_test
from gpuflow.decode.preset import CANNOT_DECODE
from gpuflow.errors import BadSampleError, DecoderError, PredictorError
from gpuflow.runtime.threads import DaemonPool
from gpuflow.torchpipe.adapter import (
    Pipe,
    import_operators,
    register_nodes,
    skip_cleanup,
    turn_off_batching,
    unique_prefix,
)
from gpuflow.torchpipe.graph import OURS, Graph
from gpuflow.torchpipe.nodes import SESSIONS, ModelNode, PredictNode, PreprocessNode, Session
from gpuflow.torchpipe.request_queue import AnswerRate, Request, RequestGroup, RequestQueue

if TYPE_CHECKING:
    from gpuflow.engines import Engine


T = TypeVar("T")

_EXIT_SECONDS = 10.0
_MAX_CALLERS = 64
_WORKS_SECONDS = 10.0
"""For how long an answered image shows that torchpipe's operators decode, while further ones wait."""

_open: weakref.WeakSet[RunningGraph] = weakref.WeakSet()
_loaded_in: set[int] = set()
"""The ids of the processes that have loaded a predictor: this one, and those that it was forked from."""


def register() -> None:
    """Make gpuflow's nodes known to torchpipe, which a graph that it reads from a file needs. Later calls do nothing.

    Raises:
        MissingExtra: torchpipe is not installed.
    """
    classes = (PreprocessNode, ModelNode, PredictNode)
    register_nodes(dict(zip(OURS, classes, strict=True)), at_exit=_close_all)


def refuse_forked() -> None:
    """Record that this process loads a predictor.

    Raises:
        PredictorError: a process that this one was forked from has loaded one. The threads that torch, onnxruntime and
            torchpipe started there do not exist here, and the libraries would hang or end the process.
    """
    pid = os.getpid()
    if before := _loaded_in - {pid}:
        raise PredictorError(
            f"process {pid} cannot load a predictor: process {min(before)}, which it was forked from, has loaded one; "
            "fork before the first one is loaded, or start processes by spawn"
        )
    _loaded_in.add(pid)


def _close_all() -> None:
    """At exit: cancel what waits and let what runs finish. A model that hangs does not keep the process alive."""
    ended = [graph.close(_EXIT_SECONDS, cancel=True) for graph in list(_open)]
    if not all(ended):
        skip_cleanup()


def _close_session(name: str) -> None:
    SESSIONS.pop(name).close()


def _open_pipe(nodes: Mapping[str, Mapping[str, str]], graph: Graph) -> Pipe:
    try:
        return Pipe(nodes)
    except Exception as error:
        raise PredictorError(f"torchpipe does not take the graph of {graph.origin}: {error}") from error


def _open_nodes(graph: Graph, nodes: Mapping[str, dict[str, str]], session: Session) -> RequestQueue:
    """Start nodes of gpuflow, each with a queue in the session. Return the queue of the first one.

    torchpipe does not connect them: its own batching between two nodes would not keep the images of a list together.
    """
    queues = []
    for name, node in nodes.items():
        node.pop("next", None)
        node.setdefault("patience", node["batching_timeout"])
        turn_off_batching(node)  # requests start an instance, or wait in the RequestQueue
        pipe = _open_pipe({name: node}, graph)
        queues.append(RequestQueue(pipe.start, instances=int(node["instance_num"]), batch=int(node["batch"])))
    session.queue = queues[-1]
    if len(queues) > 1:
        session.undecoded = queues[0]
    return queues[0]


def _open_native_nodes(graph: Graph, nodes: Mapping[str, dict[str, str]], session: Session) -> RequestQueue:
    """Start nodes of which some run torchpipe's own operators, as a part of the session. Return their queue."""
    import_operators()
    native = NativeNodes(graph, _open_pipe(nodes, graph))
    session.add(native)
    return native.queue


class NativeNodes:
    """Nodes of which some run torchpipe's own operators. These answer no requests, and an error reaches only the thread
    that waits in the call. So each image is a call of its own.

    queue: takes requests, one by one.
    """

    def __init__(self, graph: Graph, pipe: Pipe) -> None:
        self._pipe, self._preset = pipe, graph.preset
        self._decoded_at = -math.inf
        self._running = set[Request]()
        count = min(graph.at_once, _MAX_CALLERS)
        callers = self._callers = DaemonPool(count, "serve")
        self.queue = RequestQueue(lambda part: callers.submit(self._work, part), instances=count, batch=1)

    def _work(self, requests: Sequence[Request]) -> None:
        """Run a request, then those that wait."""
        self.queue.work([requests], self._run)

    def _run(self, requests: Sequence[Request]) -> None:
        (request,) = requests
        # torchpipe's operators get the data in the item; a node of gpuflow takes them from the request.
        data = b"" if self._preset is None else request.begin_decoding()
        if data is None:
            return
        self._running.add(request)
        answer: torch.Tensor | Exception
        try:
            if self._preset is not None:
                self._preset.check(np.frombuffer(data, np.uint8))
            answer = from_dlpack(self._pipe.run({"data": data, "requests": requests})).float().cpu().flatten()
            self._decoded_at = time.monotonic()
        except BadSampleError as fault:
            answer = fault
        except Exception as error:
            if self._preset is not None:
                answer = BadSampleError(self._preset.stage_name, CANNOT_DECODE)
                answer.__cause__ = error
            else:
                answer = PredictorError(f"torchpipe: {str(error).strip().splitlines()[-1]}")
        self._running.discard(request)
        request.end_decoding()
        if not request.answered:
            request.set_result(answer)

    def check(self) -> None:
        """Have a preset decode gpuflow's own test image. While requests wait, the image would wait for those before it;
        then an answer of the last seconds is enough.

        Raises:
            DecoderError: it fails.
        """
        busy = self._running and time.monotonic() - self._decoded_at < _WORKS_SECONDS
        if self._preset is None or busy:
            return
        try:
            self._pipe.run({"data": self_test.JPEG.tobytes()})  # through the model, too
        except Exception as error:  # torchpipe's operators raise any exception
            raise DecoderError(
                "torchpipe does not decode gpuflow's test image; end this process and start another one"
            ) from error

    def close(self) -> None:
        """End the threads. No request may be in flight."""
        self._callers.shutdown()


class RunningGraph:
    """A graph that torchpipe runs. Any thread may submit.

    Args:
        graph: what to run.
        engines: one for each instance of its model node, warmed up; none if it ends with images.

    Raises:
        MissingExtra: torchpipe is not installed. PredictorError: torchpipe does not take the graph.
    """

    def __init__(self, graph: Graph, engines: Sequence[Engine] = ()) -> None:
        register()
        self._pid = os.getpid()
        self._idle, self._closed = threading.Condition(), False
        self._requests: set[Request] = set()
        self._rate = AnswerRate(graph.at_once)
        name = unique_prefix()
        nodes = graph.as_dict(f"{name}.")
        for node in nodes.values():
            if node["backend"] in OURS:
                node["session"] = name
        self._session = SESSIONS[name] = Session(engines)
        start = _open_native_nodes if graph.native else _open_nodes
        try:
            self._head = start(graph, nodes, self._session)
        except BaseException:
            del SESSIONS[name]
            raise
        self._batch = (self._session.queue or self._head).batch
        # An unreferenced graph has no request in flight, so its session can be closed.
        self._release = weakref.finalize(self, _close_session, name)
        self._release.atexit = False
        _open.add(self)

    def submit(self, data: bytes, *, wrap: Callable[[torch.Tensor], T], wants_image: bool = False) -> Future[T]:
        """As `submit_all`, for one image."""
        (future,) = self.submit_all([data], wrap=wrap, wants_image=wants_image)
        return future

    def submit_all(
        self,
        files: Sequence[bytes],
        *,
        wrap: Callable[[torch.Tensor], T],
        wants_image: bool = False,
        more_follow: bool = False,
        deadline: float = math.inf,
    ) -> list[Future[T]]:
        """For each image what `wrap` returns for its logits [K], or for the image [C, H, W] that the model gets.

        The model gets the images as one batch, or as few as its largest batch allows; with operators of torchpipe's own
        each image by itself. A future raises BadSampleError for bytes that are no image, PredictorError where the model
        failed. If a request is cancelled before the model starts on it, it is dropped, at once or once it is decoded.

        Args:
            more_follow: the caller will submit more images before it waits for these.
            deadline: by `time.monotonic`. An image that cannot be answered before is dropped before the model runs; its
                future raises PredictorTimeout.

        Raises:
            PredictorError: the graph is closed, or was made in the parent of this process.
        """
        if os.getpid() != self._pid:
            raise PredictorError(
                f"the predictor was made in process {self._pid} and does not work in its forked child {os.getpid()}; "
                "fork before the first one is loaded, or start processes by spawn"
            )
        requests: list[Request] = []
        for begin in range(0, len(files), self._batch):
            part = files[begin : begin + self._batch]
            group = RequestGroup(len(part)) if len(part) > 1 else None
            requests += (
                Request(
                    data,
                    self._done,
                    wrap=wrap,
                    wants_image=wants_image,
                    group=group,
                    row=row,
                    ends_call=False,
                    deadline=deadline,
                )
                for row, data in enumerate(part)
            )
        if requests:
            requests[-1].ends_call = not more_follow
        with self._idle:
            if self._closed:
                raise PredictorError("the predictor is closed; load it again")
            self._requests.update(requests)
        try:
            for begin in range(0, len(requests), self._batch):
                self._head.add(requests[begin : begin + self._batch])
        except BaseException:
            for request in requests:
                request.future.cancel()
            raise
        return [request.future for request in requests]

    def check(self) -> None:
        """Have what decodes decode gpuflow's own test image.

        Raises:
            DecoderError: one fails, also with a new decoder. PredictorError: an instance of the model keeps failing.
        """
        self._session.check()

    def _done(self, request: Request) -> None:
        self._head.remove(request)
        if self._session.queue is not None:
            self._session.queue.discard(request)
        with self._idle:
            self._requests.discard(request)
            if not (request.dropped or request.future.cancelled()):
                self._rate.count(len(self._requests))
            if not self._requests:
                self._idle.notify_all()

    @property
    def in_flight(self) -> int:
        """Number of images that are submitted and not answered yet."""
        return len(self._requests)

    @property
    def newest_first(self) -> bool:
        """Whether callers gave up in the last seconds, so that a new request does not wait for those before it."""
        queue = self._session.queue
        return self._head.newest_first or (queue is not None and queue.newest_first)

    def seconds_for(self, images: int) -> float:
        """Predict how long the graph takes to answer this number of images by its recent rate.

        Returns 0 if it was not busy in the last seconds, so that its rate is not known, or if the images are few.
        """
        return self._rate.seconds(images)

    @property
    def held_bytes(self) -> int:
        """Size of the encoded images that are submitted and not decoded yet."""
        return sum(request.held_bytes for request in list(self._requests))

    @property
    def batches(self) -> dict[int, int]:
        """How often the model ran, by batch size."""
        return dict(self._session.batches)

    def close(self, timeout: float, *, cancel: bool = False) -> bool:
        """Refuse new images, wait for those in flight, then release models and buffers. Later calls do nothing.

        Args:
            timeout: seconds.
            cancel: drop what the model has not started on.

        Returns:
            Whether all ended in time. If not, nothing is released.
        """
        if os.getpid() != self._pid:
            return True
        deadline = time.monotonic() + timeout
        with self._idle:
            self._closed = True
            futures = [request.future for request in self._requests]
        if cancel:
            for future in futures:
                future.cancel()
        with self._idle:
            if not self._idle.wait_for(lambda: not self._requests, timeout):
                return False
        if wait(futures, max(0.0, deadline - time.monotonic())).not_done:  # each is set just after its request is done
            return False
        self._release()
        return True
