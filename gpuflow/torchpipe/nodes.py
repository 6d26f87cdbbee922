"""gpuflow's nodes of a torchpipe graph: preprocess, run the model, or both.

torchpipe constructs a node class without arguments and then passes its parameters, all of them text, to `init`. An item
is a dict with `data`; a node writes `result`. An error of one item is written into that item as `error` and its result
stays empty, because torchpipe fails a whole batch for an exception that a node raises.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.utils.dlpack import from_dlpack

from gpuflow.decode.preset import Preset
from gpuflow.errors import BadSampleError, PredictorError
from gpuflow.pipeline.program import Program
from gpuflow.runtime.cpu_budget import available_threads
from gpuflow.runtime.threads import use_torch_threads
from gpuflow.torchpipe.adapter import keep_thread_state
from gpuflow.torchpipe.graph import program_from_json
from gpuflow.torchpipe.preprocessors import CpuPreprocessor
from gpuflow.torchpipe.request_queue import Request, RequestQueue, unchanged

if TYPE_CHECKING:
    from gpuflow.engines import Engine


Item = MutableMapping[str, Any]

_FILE_THREADS = 16
"""The largest number of threads that check or rewrite the files of a batch, before a GPU decodes them."""
_MOST_FAILURES, _FAILED_SECONDS = 3, 60.0
_EMPTY = torch.empty(0, device="cpu")


class SessionPart(Protocol):
    """A part of a running graph that a session checks and closes. Any thread may call any method."""

    def check(self) -> None:
        """Raise DecoderError or PredictorError if this part does not work."""

    def close(self) -> None: ...


class Preprocessor(SessionPart, Protocol):
    """Preprocesses several images at a time. Any thread may call any method. `check` decodes gpuflow's test image."""

    def run(self, files: Sequence[bytes]) -> list[torch.Tensor | BadSampleError]:
        """Return each file's image [1, C, H, W], or why it is bad. Raise what else one of the files raises."""
        ...


class Session:
    """State that the instances of one graph's nodes share.

    engines: one for each instance of the model; none if the graph ends with images. batches: how often the model ran,
    by batch size. queue, undecoded: of the model's node, and of a separate node that decodes before it, where a
    `RunningGraph` forms their batches; None where torchpipe does. preprocessor: of all instances.
    """

    queue: RequestQueue | None = None
    undecoded: RequestQueue | None = None
    preprocessor: Preprocessor | None = None

    def __init__(self, engines: Sequence[Engine]) -> None:
        self.engines = tuple(engines)
        self.batches: Counter[int] = Counter()
        self._lock = threading.Lock()
        self._parts: list[SessionPart] = []

    def add(self, part: SessionPart) -> None:
        self._parts.append(part)

    def count_batch(self, images: int) -> None:
        with self._lock:
            self.batches[images] += 1

    def open_preprocessor(self, make: Callable[[], Preprocessor]) -> None:
        """Make the preprocessor, unless another instance has done so."""
        with self._lock:
            self.preprocessor = self.preprocessor or make()

    def check(self) -> None:
        """Have what decodes decode gpuflow's own test image.

        Raises:
            DecoderError: that fails. PredictorError: an instance of the model keeps failing.
        """
        for part in tuple(self._parts):
            part.check()
        if (preprocessor := self.preprocessor) is not None:
            preprocessor.check()

    def close(self) -> None:
        """Release engines and buffers; no item may be in flight. torchpipe never frees the nodes themselves."""
        for part in self._parts:
            part.close()
        for engine in self.engines:
            engine.close()
        if self.preprocessor is not None:
            self.preprocessor.close()
        self._parts.clear()
        self.engines, self.preprocessor = (), None


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

    Parameters: stages (JSON), batch, device of the image, on_error: `pass` or `raise`, session. threads: that share the
    images of a batch on the CPU; all cores by default. processes: that do so instead, if given.
    """

    def init(self, params: Any, options: object = None) -> None:
        parameters = dict(params.items())
        keep_thread_state()
        use_torch_threads(1)
        program = _program(parameters)
        batch, processes = int(parameters.get("batch", 1)), int(parameters.get("processes", 0))
        threads = int(parameters.get("threads", 0)) or available_threads()
        device = torch.device(parameters["device"])
        self._program, self._raises = program, parameters["on_error"] == "raise"
        self._batch = 1 if self._raises else batch
        self._session = _session(parameters, program)
        on_cpu = partial(CpuPreprocessor, program, batch=batch, threads=threads, processes=processes, device=device)
        if device.type == "cuda":
            self._session.open_preprocessor(lambda: _gpu_preprocessor(program, batch, device) or on_cpu())
        else:
            self._session.open_preprocessor(on_cpu)

    def max(self) -> int:
        return self._batch

    def forward(self, items: Sequence[Item]) -> None:
        items = list(items)
        parts = [_requests_of(item) for item in items]
        if (queue := self._session.undecoded) is not None:
            queue.work(parts, self._decode_for_model)
            return
        self.decode([request for (request,) in parts])
        for item, (request,) in zip(items, parts, strict=True):
            if (image := request.take_image()) is not None:
                item["result"] = image
            elif self._raises:
                request.future.result(timeout=0)

    def _decode_for_model(self, requests: Sequence[Request]) -> None:
        self.decode(requests)
        assert self._session.queue is not None
        self._session.queue.add_decoded([request for request in requests if request.image is not None])

    def decode(self, requests: Sequence[Request]) -> None:
        """Set the image of each request. An error is the answer to its request. Cancelled requests are left out."""
        files = {request: data for request in requests if (data := request.begin_decoding()) is not None}
        for request, image in zip(files, self.images(list(files.values())), strict=True):
            request.image = None if isinstance(image, Exception) else image
            request.end_decoding()
            if isinstance(image, Exception):
                request.set_result(image)

    def images(self, files: Sequence[bytes]) -> Sequence[torch.Tensor | Exception]:
        """Return each file's image [1, C, H, W], or its error. Raise nothing.

        If several files at a time raise an exception, each half of them is run again, so that only the file that raises
        it gets it. Such a file is bad if it is so on the CPU.
        """
        preprocessor = self._session.preprocessor
        assert preprocessor is not None, "a graph that was closed gets no items"
        if not files:
            return []
        try:
            return preprocessor.run(files)
        except BaseException as error:  # a caller waits for each item, so every error becomes an answer
            if len(files) > 1:
                half = len(files) // 2
                return [*self.images(files[:half]), *self.images(files[half:])]
            failed = PredictorError(f"preprocessing failed: {error!r}")
            failed.__cause__ = error
            with suppress(BaseException):
                images = CpuPreprocessor(self._program, batch=1, threads=1).run(files)
                return [image if isinstance(image, BadSampleError) else failed for image in images]
            return [failed]


def _gpu_preprocessor(program: Program, batch: int, device: torch.device) -> Preprocessor | None:
    """The preprocessor on a GPU, or None if the GPU cannot run the program; the CPU preprocesses then."""
    from gpuflow.execute.gpu.backend import place_on_gpu
    from gpuflow.execute.gpu.device_stream import DeviceStream
    from gpuflow.runtime.memory import BytePool, pinned
    from gpuflow.torchpipe.preprocessors import GpuPreprocessor

    device_stream = DeviceStream(device)
    threads = min(available_threads(), _FILE_THREADS)
    runner = place_on_gpu(program, device_stream, images=batch, threads=threads).gpu
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

    _preprocess: PreprocessNode | None = None

    def init(self, params: Any, options: object = None) -> None:
        parameters = dict(params.items())
        keep_thread_state()
        use_torch_threads(1)  # an engine that needs more sets it in `run`
        program = _program(parameters)
        self._session = _session(parameters, program)
        self._session.add(self)
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
        parts = [_requests_of(item) for item in items]
        if (queue := self._session.queue) is not None:
            queue.work(parts, self._run_batch, seconds=self._patience)
            return
        if self._preprocess is None:
            for item, (request,) in zip(items, parts, strict=True):
                request.image = None if "error" in item else from_dlpack(item["data"])
        self._run_batch([request for (request,) in parts])

    def _run_batch(self, batch: Sequence[Request]) -> None:
        queue, begun = self._session.queue, time.monotonic()
        if self._preprocess is not None:
            self._preprocess.decode(batch)
        self.answer(batch)
        if queue is not None:
            queue.measured(len(batch), time.monotonic() - begun)

    def answer(self, batch: Sequence[Request]) -> None:
        """Answer each request that has an image: with logits [K], or the image [C, H, W] if it wants that; or an error.

        Requests without an image have an answer already, or are cancelled.
        """
        images = {
            request: image for request in batch if (image := request.take_image()) is not None and request.begin()
        }
        if not images:
            return
        answers: Sequence[torch.Tensor | Exception]
        try:
            answers = self._run(list(images.values()), [request.wants_image for request in images])
            self._failures = 0
        except BaseException as error:  # a caller waits for each request, so every error becomes an answer
            self._failures, self._failed_at, self._fault = self._failures + 1, time.monotonic(), repr(error)
            failed = PredictorError(f"the model failed on a batch of {len(images)}: {error!r}")
            failed.__cause__ = error
            answers = [failed] * len(images)
        for request, answer in zip(images, answers, strict=True):
            request.set_result(answer)

    @torch.no_grad()
    def _run(self, images: Sequence[torch.Tensor], as_images: Sequence[bool]) -> list[torch.Tensor]:
        images = self._images(images)
        wanted = [self._engine is None or as_image for as_image in as_images]
        rows = [row for row, image_wanted in enumerate(wanted) if not image_wanted]
        answers = {
            row: image.to(self._device, copy=True)[0]  # its memory is that of a batch, and is used again
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

    def close(self) -> None:
        self._engine = None


class PredictNode(ModelNode):
    """Encoded bytes to logits [K]: preprocesses a batch, then runs the model on it. Parameters: those of both nodes."""

    def init(self, params: Any, options: object = None) -> None:
        self._preprocess = PreprocessNode()
        self._preprocess.init(params)
        super().init(params)


def _requests_of(item: Item) -> Sequence[Request]:
    """Return the requests of a `RunningGraph` that an item stands for. Any other item becomes a request, whose answer
    is written into it."""
    item["result"] = _EMPTY
    if "requests" in item:
        requests: Sequence[Request] = item["requests"]
        return requests
    request = Request(item["data"], lambda request: None, wrap=unchanged)
    request.future.add_done_callback(partial(_write, item))
    return [request]


def _write(item: Item, answer: Future[torch.Tensor]) -> None:
    if (error := answer.exception()) is not None:
        item["error"] = str(error)
    else:
        item["result"] = answer.result()
