"""Runs a graph: submits requests to torchpipe, tracks them until they are answered, closes the graph.

A preset on a GPU runs as such a graph in training, too.
"""

from __future__ import annotations

import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch
from torch.utils.dlpack import from_dlpack

from gpuflow.arrays import Bytes
from gpuflow.decode.codecs import TEST_JPEG
from gpuflow.decode.preset import CANNOT_DECODE
from gpuflow.errors import BadSampleError, DecoderError, LoaderTimeout, PredictorError
from gpuflow.execute.gpu.device_stream import DeviceStream, allocate_slots
from gpuflow.pipeline.program import Program, Resampling, ResamplingStep, fold, trace
from gpuflow.pipeline.stage import Geometry, Keys, Mixing, Pipeline
from gpuflow.runtime.threads import DaemonPool
from gpuflow.sources import Payload
from gpuflow.torchpipe.adapter import (
    Pipe,
    import_operators,
    register_nodes,
    skip_cleanup,
    unique_prefix,
)
from gpuflow.torchpipe.graph import MODEL, OURS, PREDICT, PREPROCESS, Graph, chain
from gpuflow.torchpipe.nodes import SESSIONS, ModelNode, PredictNode, PreprocessNode, Session
from gpuflow.torchpipe.request_queue import AnswerRate, Request, RequestGroup, RequestQueue, unchanged

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
    register_nodes({PREPROCESS: PreprocessNode, MODEL: ModelNode, PREDICT: PredictNode}, at_exit=_close_all)


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
    """Cancel what waits and let what runs finish, at exit. A model that hangs does not keep the process alive."""
    ended = [graph.close(_EXIT_SECONDS, cancel=True) for graph in list(_open)]
    if not all(ended):
        skip_cleanup()


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
        node["batching_timeout"] = "0"  # torchpipe passes each request on at once; others wait in the RequestQueue
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
    that waits in the call. So each image gets a separate call.

    queue: takes requests, one by one.
    """

    def __init__(self, graph: Graph, pipe: Pipe) -> None:
        self._pipe, self._preset = pipe, graph.preset
        self._decoded_at = -math.inf
        self._running = set[Request]()
        count = min(graph.at_once, _MAX_CALLERS)
        callers = self._callers = DaemonPool(count, "serve")
        self.queue = RequestQueue(
            lambda part: callers.submit(self.queue.work, [part], self._run), instances=count, batch=1
        )

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
        if not request.future.done():
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
            self._pipe.run({"data": TEST_JPEG.tobytes()})  # through the model, too
        except Exception as error:  # torchpipe's operators raise any exception
            raise DecoderError(
                "torchpipe does not decode gpuflow's test image; end this process and start another one"
            ) from error

    def close(self) -> None:
        """End the threads. No request may be in flight."""
        self._callers.shutdown()


class RunningGraph:
    """A graph that torchpipe runs. Any thread may submit.

    session: the state of its nodes. rate: of its recent answers.

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
        self.rate = AnswerRate(graph.at_once)
        name = unique_prefix()
        nodes = graph.as_dict(f"{name}.")
        for node in nodes.values():
            if node["backend"] in OURS:
                node["session"] = name
        self.session = SESSIONS[name] = Session(engines)
        start = _open_native_nodes if graph.native else _open_nodes
        try:
            self._head = start(graph, nodes, self.session)
        except BaseException:
            del SESSIONS[name]
            raise
        self._batch = (self.session.queue or self._head).batch
        # An unreferenced graph has no request in flight, so its session can be closed.
        self._release = weakref.finalize(self, lambda: SESSIONS.pop(name).close())
        self._release.atexit = False
        _open.add(self)

    def submit(
        self,
        files: Sequence[bytes],
        *,
        wrap: Callable[[torch.Tensor], T],
        wants_image: bool = False,
        more_follow: bool = False,
        deadline: float = math.inf,
    ) -> list[Future[T]]:
        """Return for each image a future of what `wrap` returns for its logits [K], or for the model's input [C, H, W].

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
        requests = [Request(data, self._done, wrap=wrap, wants_image=wants_image, deadline=deadline) for data in files]
        for request in requests if more_follow else requests[:-1]:
            request.ends_call = False
        parts = [requests[begin : begin + self._batch] for begin in range(0, len(requests), self._batch)]
        for part in parts:
            if len(part) > 1:
                RequestGroup(part)
        with self._idle:
            if self._closed:
                raise PredictorError("the predictor is closed; load it again")
            self._requests.update(requests)
        try:
            for part in parts:
                self._head.add(part)
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
        self.session.check()

    def _done(self, request: Request) -> None:
        self._head.backlog.discard(request)
        if self.session.queue is not None:
            self.session.queue.discard(request)
        with self._idle:
            self._requests.discard(request)
            if not (request.dropped or request.future.cancelled()):
                self.rate.count(len(self._requests))
            if not self._requests:
                self._idle.notify_all()

    @property
    def in_flight(self) -> int:
        """Return the number of images that are submitted and not answered yet."""
        return len(self._requests)

    @property
    def newest_first(self) -> bool:
        """Return True if callers gave up in the last seconds: a new request then does not wait for those before it."""
        queues = self._head, self.session.queue
        return any(queue is not None and queue.backlog.newest_first for queue in queues)

    @property
    def held_bytes(self) -> int:
        """Return the size of the encoded images that are submitted and not decoded yet."""
        return sum(request.held_bytes for request in list(self._requests))

    def close(self, timeout: float, *, cancel: bool = False) -> bool:
        """Refuse new images, wait for those in flight, then release models and buffers. Later calls do nothing.

        Args:
            timeout: seconds.
            cancel: drop what the model has not started on.

        Returns:
            True if all ended in time. If not, nothing is released.
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


@dataclass(frozen=True, slots=True)
class _Prepared:
    """images: of each sample, [C, H, W] as a served model gets it, or why it is bad. draws: its crops and flips."""

    images: Sequence[torch.Tensor | BadSampleError]
    draws: Sequence[Resampling]


class PresetRunner:
    """Runs a program that begins with a preset, with the interface of `GpuRunner`. Any thread may call any method.

    Crops and flips run after the pointwise stages here: these are modules in the graph, and treat each pixel alike.

    Args:
        program: its stages pass `Preset.refuses`.
        device_stream: to the device that the preset's operators run on.
        origin: the configuration's file.
        threads: instances of the operators.
        timeout_seconds: limit for each image.

    Raises:
        MissingExtra: torchpipe is not installed. PredictorError: it does not take the operators.
    """

    def __init__(
        self, program: Program, device_stream: DeviceStream, *, origin: str, threads: int, timeout_seconds: float
    ) -> None:
        self._program, self._device_stream, self._timeout = program, device_stream, timeout_seconds
        served = tuple(stage for stage in program.pipeline.stages if not isinstance(stage, Geometry | Mixing))
        pipeline = Pipeline(program.pipeline.name, served)
        graph = fold(pipeline, trace(pipeline))
        self._graph = RunningGraph(chain(graph, None, origin=origin, threads=threads, device=device_stream.device.type))
        self._moves = [step for step in program.steps if isinstance(step, ResamplingStep)]
        self._lock = threading.Lock()
        self.engine_images, self.cpu_images = 0, 0
        """torchpipe does not say which images it decoded on the CPU instead; all are counted as the GPU's."""

    def check(self) -> None:
        """Decode gpuflow's own test image by torchpipe's operators. Raises DecoderError if that fails."""
        self._graph.check()

    def set_gpu_wait(self, share: float) -> None:
        """Do nothing: no work is delayed here."""

    def share_checks(self, samples: int, memory_of: Callable[[int], Bytes | None]) -> None:
        """Do nothing: torchpipe checks no files."""

    def prepare(self, payload: Payload, keys: Keys, indices: object = None) -> _Prepared:
        """Run everything but the crops and flips, and wait for it."""
        waiting: list[Future[torch.Tensor] | BadSampleError] = [
            BadSampleError("read", error)
            if (error := payload.errors[i]) is not None
            else self._graph.submit([payload.sample(i).tobytes()], wrap=unchanged, wants_image=True)[0]
            for i in range(len(payload))
        ]
        height, width, _ = self._program.specs[1].shape
        assert height is not None and width is not None
        sizes = np.full(len(payload), height), np.full(len(payload), width)
        draws = []
        for step in self._moves:
            draws.append(step.draw(keys, *sizes))
            sizes = draws[-1].box[:, 2], draws[-1].box[:, 3]
        images = [self._image(one) for one in waiting]
        with self._lock:
            self.engine_images += sum(isinstance(image, torch.Tensor) for image in images)
        return _Prepared(images, draws)

    def _image(self, waiting: Future[torch.Tensor] | BadSampleError) -> torch.Tensor | BadSampleError:
        if isinstance(waiting, BadSampleError):
            return waiting
        try:
            return waiting.result(self._timeout)
        except BadSampleError as fault:
            return fault
        except TimeoutError:
            raise LoaderTimeout(
                f"torchpipe gave no image within run.timeout_s = {self._timeout:g} s; raise that if it is too short"
            ) from None

    def slots(self, count: int) -> torch.Tensor:
        """Return memory on the device for `count` results: [count, C, H, W] in the result's dtype and memory format."""
        return allocate_slots(self._device_stream, count, self._program.result)

    def launch(
        self, chunk: _Prepared, slots: torch.Tensor, ahead: Sequence[_Prepared] = ()
    ) -> list[BadSampleError | None]:
        """Queue the crops and flips into the slots [N, C, H, W]. Return why each sample is bad, or None."""
        with self._device_stream.queued():
            for i, image in enumerate(chunk.images):
                if isinstance(image, BadSampleError):
                    continue
                if image.is_cuda:
                    image.record_stream(torch.cuda.current_stream(image.device))
                for draw in chunk.draws:
                    image = _crop_and_flip(image, draw, i)
                slots[i].copy_(image)
        return [image if isinstance(image, BadSampleError) else None for image in chunk.images]

    def close(self) -> None:
        """Do nothing: the graph ends with this runner."""


def _crop_and_flip(image: torch.Tensor, resampling: Resampling, i: int) -> torch.Tensor:
    """Apply sample i's crop and flips to an image [C, H, W], without resampling."""
    y, x, height, width = resampling.box[i].tolist()
    dims = [dim for dim, flip in zip((1, 2), resampling.flips[i].tolist(), strict=True) if flip]
    cropped = image[:, y : y + height, x : x + width]
    return cropped.flip(dims) if dims else cropped
