"""gpuflow's nodes of a torchpipe graph: preprocess, run the model, or both.

torchpipe constructs a node class without arguments and then passes its parameters, all of them text, to `init`. An item
is a dict with `data`; a node writes `result`. An error of one item is written into that item as `error` and its result
stays empty, because torchpipe fails a whole batch for an exception that a node raises.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch.utils.dlpack import from_dlpack

from gpuflow.decode.preset import Preset
from gpuflow.errors import BadSampleError, DecoderError, PredictorError
from gpuflow.execute.cpu import CpuRunner
from gpuflow.pipeline.image_spec import STORAGE, as_batch, slot_shape
from gpuflow.pipeline.program import Program
from gpuflow.pipeline.stage import Keys
from gpuflow.runtime.cpu_budget import available_threads
from gpuflow.runtime.threads import use_torch_threads
from gpuflow.sources import Payload
from gpuflow.torchpipe.adapter import keep_thread_state
from gpuflow.torchpipe.graph import program_from_json
from gpuflow.torchpipe.request_queue import Backlog, Request, RequestQueue, callers, joined

if TYPE_CHECKING:
    from gpuflow.engines import Engine

__all__ = ["SESSIONS", "ModelNode", "PredictNode", "PreprocessNode", "Preprocessor", "Session"]

Item = MutableMapping[str, Any]

_MAX_BATCH = 2
"""Images that an instance accepts at once. With 1, torchpipe blocks the caller until an instance is free."""
_FILE_THREADS = 16
"""The largest number of threads that check or rewrite the files of a batch, before a GPU decodes them."""
_MOST_FAILURES, _FAILED_SECONDS = 3, 60.0
_EMPTY, _CANCELLED = torch.empty(0, device="cpu"), PredictorError("cancelled")
_LONGEST_DECODE_SECONDS = 60.0
"""A decoder that takes longer for an image hangs: one of 50 million pixels takes about four seconds."""
_ONE = Keys(0, 0, np.zeros(1, np.int64))
"""The random keys of one image, which serving stages do not use."""


class Preprocessor(Protocol):
    """Preprocesses several images at a time. Any thread may call any method."""

    def run(self, files: Sequence[bytes]) -> list[torch.Tensor | BadSampleError]:
        """Each file's image [1, C, H, W], or why it is bad. What else one of the files raises is raised for all."""
        ...

    def check(self) -> None:
        """Decode gpuflow's own test image. Raises DecoderError if that fails."""

    def close(self) -> None: ...


class Session:
    """State that the instances of one graph's nodes share.

    engines: one for each instance of the model; none if the graph ends with images. batches: how often the model ran,
    by batch size. queue: of the model's node where a `RunningGraph` forms its batches; None where torchpipe does.
    undecoded: the requests that wait for a separate node, which takes one for each item that torchpipe gives it.
    """

    queue: RequestQueue | None = None

    def __init__(self, engines: Sequence[Engine]) -> None:
        self.engines = tuple(engines)
        self.undecoded = Backlog()
        self.batches: Counter[int] = Counter()
        self._lock = threading.Lock()
        self._nodes: list[PreprocessNode | ModelNode] = []
        self._preprocessors: list[Preprocessor | None] = []

    def add_node(self, node: PreprocessNode | ModelNode) -> None:
        self._nodes.append(node)

    def count_batch(self, images: int) -> None:
        with self._lock:
            self.batches[images] += 1

    def preprocessor(self, make: Callable[[], Preprocessor | None]) -> Preprocessor | None:
        """The preprocessor that all instances share, made by the first; None if each instance has its own decoder."""
        with self._lock:
            if not self._preprocessors:
                self._preprocessors.append(make())
            return self._preprocessors[0]

    def check(self) -> None:
        """Have every instance that decodes decode gpuflow's own test image. Raises DecoderError if one fails, and
        PredictorError if an instance of the model keeps failing."""
        for node in tuple(self._nodes):
            node.check()
        for preprocessor in tuple(self._preprocessors):
            if preprocessor is not None:
                preprocessor.check()

    def close(self) -> None:
        """Release engines and buffers; no item may be in flight. torchpipe never frees the nodes themselves."""
        for node in self._nodes:
            node.release()
        for engine in self.engines:
            engine.close()
        for preprocessor in self._preprocessors:
            if preprocessor is not None:
                preprocessor.close()
        self._nodes.clear()
        self._preprocessors.clear()
        self.engines = ()


SESSIONS: dict[str, Session] = {}
"""By the nodes' parameter `session`. Nodes of a graph that torchpipe reads from a file lack it and open their own."""
_lock = threading.Lock()


def _session(parameters: Mapping[str, str], program: Program) -> Session:
    with _lock:
        name = parameters.get("session") or f"of node {parameters['node_name']}"
        if name not in SESSIONS:
            SESSIONS[name] = Session(_engines(parameters, program))
        return SESSIONS[name]


def _engines(parameters: Mapping[str, str], program: Program) -> Sequence[Engine]:
    """The engines of a model node that torchpipe reads from a file, warmed up."""
    if "model" not in parameters:
        return ()
    from gpuflow.config import ModelSpec
    from gpuflow.engines import open_engines, read_checked_info, warm_up_all

    model = ModelSpec.model_validate_json(parameters["model"])
    read_checked_info(model, program.pipeline)
    engines = open_engines(model, image=program.result, device=torch.device(parameters["device"]))
    warm_up_all(engines, model.file)
    return engines


def _program(parameters: Mapping[str, str]) -> Program:
    from gpuflow.vocabulary import stage_table  # torchpipe makes the nodes, so it cannot be an argument

    return program_from_json(parameters["stages"], stage_table())


class PreprocessNode:
    """Encoded bytes to an image [1, C, H, W] in the pipeline's dtype and layout, by the code that validation runs.

    Parameters: stages (JSON), device of the image, on_error: `pass` or `raise`, session. processes: if given, worker
    processes preprocess batches of at most `batch` instead of this thread, and the images are on the CPU.
    """

    def init(self, params: Any, options: object = None) -> None:
        parameters = dict(params.items())
        keep_thread_state()
        use_torch_threads(1)
        program = _program(parameters)
        processes = int(parameters.get("processes", 0))
        self._spec, self._device = program.result, torch.device("cpu" if processes else parameters["device"])
        self._raises = parameters["on_error"] == "raise"
        self._program, self._lock, self._begun = program, threading.Lock(), math.inf
        self._runner: CpuRunner | None = CpuRunner(program)
        on_gpu = self._device.type == "cuda"
        session = _session(parameters, program) if on_gpu or processes or "session" in parameters else None
        batch = int(parameters.get("batch", _MAX_BATCH))
        self._batched: Preprocessor | None = None
        self._session = session
        if session is not None:
            session.add_node(self)
            if on_gpu:
                self._batched = session.preprocessor(partial(_gpu_preprocessor, program, batch, self._device))
            elif processes:
                self._batched = session.preprocessor(partial(_cpu_preprocessor, program, batch, processes))
        self._accepted = 1 if self._raises else _MAX_BATCH

    def max(self) -> int:
        return self._accepted

    def forward(self, items: Sequence[Item]) -> None:
        queue = self._session.queue if self._session is not None else None
        if self._session is not None and queue is not None:
            for item in items:
                item["result"] = _EMPTY
            self._decode(self._session.undecoded.take(len(items)), queue)
            return
        wanted = []
        for item in items:
            data = item["request"].take_data() if "request" in item else item["data"]
            if data is not None:
                wanted.append((item, data))
            else:
                _write(item, _CANCELLED)
        for (item, _), image in zip(wanted, self.images([data for _, data in wanted]), strict=True):
            if "request" in item:
                item["request"].release_data()
            if isinstance(image, Exception):
                if "request" in item:
                    item["request"].fault = image
                if self._raises:
                    raise image
            _write(item, image)

    def _decode(self, requests: Sequence[Request], queue: RequestQueue) -> None:
        """Decode requests and queue them for the model. An error is the answer to its request."""
        files = {request: data for request in requests if (data := request.take_data()) is not None}
        for request, image in zip(files, self.images(list(files.values())), strict=True):
            request.image = None if isinstance(image, Exception) else image
            request.release_data()
            if isinstance(image, Exception):
                request.set_result(image)
            elif not request.ended:
                queue.add_decoded(request)

    def images(self, files: Sequence[bytes]) -> Sequence[torch.Tensor | Exception]:
        """Each file's image [1, C, H, W], or its error. Raises nothing.

        If several files at a time raise an exception, each half of them is run again, so that only the file that raises
        it gets it. Such a file is bad if it is so on this thread.
        """
        if self._batched is None or not files:
            return [self._image(data) for data in files]
        try:
            return self._batched.run(files)
        except BaseException as error:  # a caller waits for each item, so every error becomes an answer
            if len(files) > 1:
                half = len(files) // 2
                return [*self.images(files[:half]), *self.images(files[half:])]
            on_this_thread = self._image(files[0])
            return [on_this_thread if isinstance(on_this_thread, BadSampleError) else _failed(error)]

    def _image(self, data: bytes) -> torch.Tensor | Exception:
        assert self._runner is not None, "a graph that was closed gets no items"
        slots = np.empty((1, *slot_shape(self._spec)), STORAGE[self._spec.dtype])
        try:
            with self._lock:
                self._begun = time.monotonic()
                try:
                    (fault,) = self._runner.run(Payload.of([data]), _ONE, slots)
                finally:
                    self._begun = math.inf
            return fault if fault is not None else as_batch(slots, self._spec).to(self._device)
        except BaseException as error:  # as above
            return _failed(error)

    def check(self) -> None:
        """Decode gpuflow's own test image, with a new runner if this one fails. A node that is decoding works.

        Raises DecoderError if both fail, or if the node has decoded one image for longer than any takes.
        """
        if not self._lock.acquire(blocking=False):  # an image is being decoded, or another check runs
            if (seconds := time.monotonic() - self._begun) > _LONGEST_DECODE_SECONDS:
                raise DecoderError(f"a decoder has decoded one image for {seconds:.0f} s; restart the service")
            return
        try:
            if self._runner is None or self._batched is not None:
                return
            try:
                self._runner.check()
            except DecoderError:
                self._runner = CpuRunner(self._program)
                self._runner.check()
        finally:
            self._lock.release()

    def release(self) -> None:
        self._runner = self._batched = None


def _failed(error: BaseException) -> Exception:
    """The answer to an exception of preprocessing: a bad image as it is, all else as a fault of the predictor."""
    if isinstance(error, BadSampleError):
        return error
    failed = PredictorError(f"preprocessing failed: {error!r}")
    failed.__cause__ = error
    return failed


def _cpu_preprocessor(program: Program, batch: int, processes: int) -> Preprocessor:
    from gpuflow.torchpipe.cpu_preprocessor import CpuPreprocessor

    return CpuPreprocessor(program, batch=batch, processes=processes)


def _gpu_preprocessor(program: Program, batch: int, device: torch.device) -> Preprocessor | None:
    """The preprocessor on a GPU, or None if the GPU cannot run the program; the CPU preprocesses then."""
    from gpuflow.execute.device_stream import DeviceStream
    from gpuflow.execute.gpu_backend import place_on_gpu
    from gpuflow.runtime.buffers import BytePool
    from gpuflow.runtime.memory import pinned
    from gpuflow.torchpipe.gpu_preprocessor import GpuPreprocessor

    device_stream = DeviceStream(device)
    threads = min(available_threads(), _FILE_THREADS)
    runner = place_on_gpu(program, device_stream, images=batch, check_threads=threads, rewrite_threads=threads).gpu
    pool = BytePool(make=pinned)
    if runner is None:
        return None
    return GpuPreprocessor(runner, device_stream, acquire=pool.acquire, release=pool.release)


class ModelNode:
    """Runs the model on a batch of images: logits [K] for each item. Without a model, the images themselves.

    Parameters: stages (JSON), batch, device of the model, model (JSON of `serve.model`), session.
    patience, with a queue: milliseconds that callers who just got an answer have to send their next requests before the
    next batch starts. Without it they would miss that batch, and the callers would split into two halves that alternate
    in batches of half the size.
    """

    def init(self, params: Any, options: object = None) -> None:
        parameters = dict(params.items())
        keep_thread_state()
        use_torch_threads(1)  # an engine that needs more sets it in `run`
        program = _program(parameters)
        self._session = _session(parameters, program)
        self._session.add_node(self)
        engines, self._batch = self._session.engines, int(parameters["batch"])
        self._engine = engines[int(parameters["_independent_index"])] if engines else None
        self._device, self._result = torch.device(parameters["device"]), program.result
        self._patience = int(parameters.get("patience", 0)) / 1000
        if self._engine is not None:
            self._engine.bind_thread()
        self._failures, self._failed_at, self._fault = 0, 0.0, ""
        self._preset: list[torch.nn.Module] | None = None
        if isinstance(program.decoder, Preset):
            self._preset = [stage.module() for stage in program.pipeline.stages[1:]]

    def max(self) -> int:
        return self._batch

    def forward(self, items: Sequence[Item]) -> None:
        items = list(items)
        queue = self._session.queue
        if queue is None:
            self._run_items(items)
        else:
            for item in items:
                item["result"] = _EMPTY
            self._run_requests([item["requests"] for item in items], queue)

    def _run_items(self, items: Sequence[Item]) -> None:
        """A batch that torchpipe formed."""
        images = [_fault_of(item) if "error" in item else from_dlpack(item["data"]) for item in items]
        requests = [item["request"] if "request" in item else None for item in items]  # noqa: SIM401  # not a dict
        for item, answer in zip(items, self.answer(images, requests), strict=True):
            _write(item, answer)

    def _run_requests(self, parts: Sequence[Sequence[Request]], queue: RequestQueue) -> None:
        """Each part as a batch or within one, then what waits in the queue, until nothing is left."""
        queue.mark_started(len(parts))
        *first, batch = joined(parts, self._batch)
        for each in first:
            self._run_measured(each, queue)
        while batch:
            arrived = queue.arrived
            self._run_measured(batch, queue)
            batch = queue.next_batch(arrived=arrived + callers(batch), seconds=self._patience)

    def _run_measured(self, batch: Sequence[Request], queue: RequestQueue) -> None:
        begun = time.monotonic()
        self._run_batch(batch)
        queue.measured(len(batch), time.monotonic() - begun)

    def _run_batch(self, batch: Sequence[Request]) -> None:
        """Run the model on requests that another node decoded."""
        images = []
        for request in batch:
            image, request.image = request.image, None
            images.append(_CANCELLED if image is None else image)
        self.answer(images, batch)

    def answer(
        self, images: Sequence[torch.Tensor | Exception], requests: Sequence[Request | None]
    ) -> list[torch.Tensor | Exception]:
        """Each image's logits [K], or the image [C, H, W] if its request wants that, or its error.

        Also sets the results of the requests.
        """
        begun = [request is None or request.begin() for request in requests]
        wanted = [image if begins else _CANCELLED for image, begins in zip(images, begun, strict=True)]
        answers = self._answers(wanted, [request is not None and request.wants_image for request in requests])
        for request, answer in zip(requests, answers, strict=True):
            if request is not None:
                request.set_result(answer)
        return answers

    def _answers(
        self, images: Sequence[torch.Tensor | Exception], as_images: Sequence[bool]
    ) -> list[torch.Tensor | Exception]:
        good = {row: image for row, image in enumerate(images) if isinstance(image, torch.Tensor)}
        found: Sequence[torch.Tensor | Exception] = ()
        try:
            if good:
                found = self._run(list(good.values()), [as_images[row] for row in good])
            self._failures = 0
        except BaseException as error:  # a caller waits for each item, so every error becomes an answer
            self._failures, self._failed_at, self._fault = self._failures + 1, time.monotonic(), repr(error)
            failed = PredictorError(f"the model failed on a batch of {len(good)}: {error!r}")
            failed.__cause__ = error
            found = [failed] * len(good)
        answers = list(images)
        for row, answer in zip(good, found, strict=True):
            answers[row] = answer
        return answers

    @torch.no_grad()
    def _run(self, images: Sequence[torch.Tensor], as_images: Sequence[bool]) -> list[torch.Tensor]:
        images = self._images(images)
        wanted = [self._engine is None or as_image for as_image in as_images]
        rows = [row for row, image_wanted in enumerate(wanted) if not image_wanted]
        answers = {
            row: image.to(self._device, copy=image.is_cuda)[0]  # preprocessing reuses its memory
            for row, image in enumerate(images)
            if wanted[row]
        }
        if answers and self._device.type == "cuda":
            # The copies are read on any stream, and the memory that they are made from is used again at once.
            torch.cuda.current_stream(self._device).synchronize()
        if self._engine is not None and rows:
            batch = torch.cat([images[row] for row in rows]) if len(rows) > 1 else images[rows[0]]
            # A copy, because users could not modify inference tensors.
            logits = self._engine.run(batch.to(self._device)).clone()
            self._session.count_batch(len(rows))
            answers |= zip(rows, logits, strict=True)
        return [answers[row] for row in range(len(images))]

    def _images(self, images: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """The model's input: each image [1, C, H, W] in the pipeline's dtype and memory format."""
        if self._preset is None:
            return images
        batch = torch.cat([image if image.ndim == 4 else image.permute(2, 0, 1)[None] for image in images])
        if self._result.dtype == "uint8":
            batch = batch.round().to(torch.uint8)
        for module in self._preset:
            batch = module.to(batch.device)(batch)
        planes = self._result.layout == "nchw"
        batch = batch.contiguous(memory_format=torch.contiguous_format if planes else torch.channels_last)
        return [batch[row : row + 1] for row in range(len(batch))]

    def check(self) -> None:
        """Raises PredictorError if the model failed several times in a row, unless the last time is a minute ago: where
        a service that is not ready gets no requests, only another request can show that it works again."""
        if self._failures >= _MOST_FAILURES and time.monotonic() - self._failed_at < _FAILED_SECONDS:
            raise PredictorError(f"the model failed on the last {self._failures} batches: {self._fault}")

    def release(self) -> None:
        self._engine = None


class PredictNode(ModelNode):
    """Encoded bytes to logits [K]: preprocesses a batch, then runs the model on it. Parameters: those of both nodes."""

    def init(self, params: Any, options: object = None) -> None:
        self._preprocess = PreprocessNode()
        self._preprocess.init(params)
        super().init(params)

    def _run_items(self, items: Sequence[Item]) -> None:
        images = self._preprocess.images([item["data"] for item in items])
        for item, answer in zip(items, self.answer(images, [None] * len(items)), strict=True):
            _write(item, answer)

    def _run_batch(self, batch: Sequence[Request]) -> None:
        """Decode a batch of requests, run the model and set their results. Those that were dropped are not decoded."""
        files = {request: data for request in batch if (data := request.take_data()) is not None}
        images = dict(zip(files, self._preprocess.images(list(files.values())), strict=True))
        for request in files:
            request.release_data()
        del files
        self.answer([images.get(request, _CANCELLED) for request in batch], batch)


def _write(item: Item, answer: torch.Tensor | Exception) -> None:
    if isinstance(answer, Exception):
        item["error"], item["result"] = str(answer), _EMPTY
    else:
        item["result"] = answer


def _fault_of(item: Item) -> Exception:
    """The exception that the previous node raised for an item; without a request, an error of the same text."""
    if "request" in item and item["request"].fault is not None:
        fault: Exception = item["request"].fault
        return fault
    return PredictorError(item["error"])
