"""gpuflow's nodes of a torchpipe graph: preprocess, run the model, or both.

torchpipe constructs a node class without arguments and then passes its parameters, all of them text, to `init`. An item
is a dict with `data`; a node writes `result`. An error of one item is written into that item as `error` and its result
stays empty, because torchpipe fails a whole batch for an exception that a node raises.

On the CPU a batch is one native call, or worker processes share its images. Processes are for stages that run Python
code for each image, and keep the model out of the memory of decoders. They get the encoded bytes and give the pixels
through memory that they share with this process. On a GPU the runner that feeds training preprocesses.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch.utils.dlpack import from_dlpack

from gpuflow.arrays import Array
from gpuflow.decode.preset import Preset
from gpuflow.errors import BadSampleError, DecoderError, PredictorError
from gpuflow.execute.cpu import workers
from gpuflow.execute.cpu.runner import CpuRunner
from gpuflow.execute.cpu.workers import DecodeRequest, Setup
from gpuflow.pipeline.program import Program
from gpuflow.pipeline.stage import Keys
from gpuflow.pipeline.views import STORAGE, as_batch, slot_shape
from gpuflow.runtime.memory import BytePool, SlotPool, heap, pinned, shared
from gpuflow.runtime.threads import available_threads, use_torch_threads
from gpuflow.runtime.worker_pool import Pending, WorkerConnection, WorkerPool
from gpuflow.sources import Payload
from gpuflow.torchpipe.adapter import keep_thread_state
from gpuflow.torchpipe.graph import program_from_json
from gpuflow.torchpipe.request_queue import Request, RequestQueue, unchanged

if TYPE_CHECKING:
    from gpuflow.engines import Engine
    from gpuflow.execute.gpu.device_stream import ChunkRunner, DeviceStream

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
            if self.preprocessor is None:
                self.preprocessor = make()
                self.add(self.preprocessor)

    def check(self) -> None:
        """Have what decodes decode gpuflow's own test image.

        Raises:
            DecoderError: that fails. PredictorError: an instance of the model keeps failing.
        """
        for part in tuple(self._parts):
            part.check()

    def close(self) -> None:
        """Release engines and buffers; no item may be in flight. torchpipe never frees the nodes themselves."""
        for part in self._parts:
            part.close()
        for engine in self.engines:
            engine.close()
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
    """Return the warmed-up engines of a model node that torchpipe reads from a file."""
    if "model" not in parameters:
        return ()
    from gpuflow.config import ModelSpec
    from gpuflow.engines import open_engines, read_checked_info, warm_up_all

    model = ModelSpec.model_validate_json(parameters["model"])
    read_checked_info(model, program.pipeline)
    engines = open_engines(model, image=program.result, device=torch.device(parameters["device"]))
    warm_up_all(engines, model.file)
    return engines


class _Node:
    """A node: its parameters, the program of its stages and the session of its graph.

    Parameters: stages (JSON), batch, device, session.
    """

    _batch: int

    def init(self, params: Any, options: object = None) -> None:
        from gpuflow.vocabulary import stage_table  # torchpipe makes the nodes, so it cannot be an argument

        keep_thread_state()
        use_torch_threads(1)  # an engine that needs more sets it in `run`
        self._parameters = dict(params.items())
        self._program = program_from_json(self._parameters["stages"], stage_table())
        self._session = _session(self._parameters, self._program)
        self._device = torch.device(self._parameters["device"])

    def max(self) -> int:
        return self._batch


class PreprocessNode(_Node):
    """Turns encoded bytes into an image [1, C, H, W] in the pipeline's dtype and layout, by the code of validation.

    Parameters: those of every node, the device being the image's. on_error: `pass` or `raise`. threads: that share the
    images of a batch on the CPU; all cores by default. processes: that do so instead, if given.
    """

    def init(self, params: Any, options: object = None) -> None:
        super().init(params)
        parameters, program, device = self._parameters, self._program, self._device
        batch, processes = int(parameters.get("batch", 1)), int(parameters.get("processes", 0))
        threads = int(parameters.get("threads", 0)) or available_threads()
        self._raises = parameters["on_error"] == "raise"
        self._batch = 1 if self._raises else batch
        on_cpu = partial(CpuPreprocessor, program, batch=batch, threads=threads, processes=processes, device=device)
        if device.type == "cuda":
            self._session.open_preprocessor(lambda: _gpu_preprocessor(program, batch, device) or on_cpu())
        else:
            self._session.open_preprocessor(on_cpu)

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
    """Return the preprocessor on a GPU, or None if the GPU cannot run the program; the CPU preprocesses then."""
    from gpuflow.execute.gpu.backend import place_on_gpu
    from gpuflow.execute.gpu.device_stream import DeviceStream

    device_stream = DeviceStream(device)
    threads = min(available_threads(), _FILE_THREADS)
    runner = place_on_gpu(program, device_stream, images=batch, threads=threads).gpu
    if runner is None:
        return None
    return GpuPreprocessor(runner, device_stream, BytePool(make=pinned))


class ModelNode(_Node):
    """Runs the model on a batch of images: logits [K] for each item. Without a model, the images themselves.

    Parameters: those of every node, the device being the model's. model: JSON of `serve.model`.
    patience, with a queue: milliseconds that callers who just got an answer have to send their next requests before the
    next batch starts. Without it they would miss that batch, and the callers would split into two halves that alternate
    in batches of half the size.
    """

    _preprocess: PreprocessNode | None = None

    def init(self, params: Any, options: object = None) -> None:
        super().init(params)
        self._session.add(self)
        engines, self._batch = self._session.engines, int(self._parameters["batch"])
        self._engine = engines[int(self._parameters["_independent_index"])] if engines else None
        self._patience = int(self._parameters.get("patience", 0)) / 1000
        if self._engine is not None:
            self._engine.bind_thread()
        self._failures, self._failed_at, self._fault = 0, 0.0, ""
        self._preset: list[torch.nn.Module] | None = None
        if isinstance(self._program.decoder, Preset):
            self._preset = [stage.module() for stage in self._program.pipeline.stages[1:]]

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
            queue.backlog.measured(len(batch), time.monotonic() - begun)

    def answer(self, batch: Sequence[Request]) -> None:
        """Answer each request that has an image: with logits [K], or the image [C, H, W] if it wants that; or an error.

        Requests without an image have an answer already, or are cancelled.
        """
        images = {
            request: image for request in batch if (image := request.take_image()) is not None and request.begin()
        }
        if not images:
            return
        answers: Mapping[Request, torch.Tensor | Exception]
        try:
            answers = self._run(images)
            self._failures = 0
        except BaseException as error:  # a caller waits for each request, so every error becomes an answer
            self._failures, self._failed_at, self._fault = self._failures + 1, time.monotonic(), repr(error)
            failed = PredictorError(f"the model failed on a batch of {len(images)}: {error!r}")
            failed.__cause__ = error
            answers = dict.fromkeys(images, failed)
        for request in images:
            request.set_result(answers[request])

    @torch.no_grad()
    def _run(self, decoded: Mapping[Request, torch.Tensor]) -> dict[Request, torch.Tensor]:
        images = dict(zip(decoded, self._images(list(decoded.values())), strict=True))
        batch = [request for request in images if self._engine is not None and not request.wants_image]
        answers = {
            request: image.to(self._device, copy=True)[0]  # its memory is that of a batch, and is used again
            for request, image in images.items()
            if self._engine is None or request.wants_image
        }
        if answers and self._device.type == "cuda":
            # The copies are read on any stream, and the memory that they are made from is used again at once.
            torch.cuda.current_stream(self._device).synchronize()
        if self._engine is not None and batch:
            rows = torch.cat([images[request] for request in batch]) if len(batch) > 1 else images[batch[0]]
            # A copy, because users could not modify inference tensors.
            logits = self._engine.run(rows.to(self._device)).clone()
            self._session.count_batch(len(batch))
            answers |= zip(batch, logits, strict=True)
        return answers

    def _images(self, images: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Return the model's input: each image [1, C, H, W] in the pipeline's dtype and memory format."""
        if self._preset is None:
            return images
        batch = torch.cat([image if image.ndim == 4 else image.permute(2, 0, 1)[None] for image in images])
        if self._program.result.dtype == "uint8":
            batch = batch.round().to(torch.uint8)
        for module in self._preset:
            batch = module.to(batch.device)(batch)
        planes = self._program.result.layout == "nchw"
        batch = batch.contiguous(memory_format=torch.contiguous_format if planes else torch.channels_last)
        return [batch[row : row + 1] for row in range(len(batch))]

    def check(self) -> None:
        """Raise PredictorError if the model failed several times in a row, unless the last time is a minute ago: where
        a service that is not ready gets no requests, only another request can show that it works again."""
        if self._failures >= _MOST_FAILURES and time.monotonic() - self._failed_at < _FAILED_SECONDS:
            raise PredictorError(f"the model failed on the last {self._failures} batches: {self._fault}")

    def close(self) -> None:
        self._engine = None


class PredictNode(ModelNode):
    """Preprocesses a batch, then runs the model on it. Parameters: those of both nodes."""

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


_START_SECONDS, _RESTART_SECONDS = 30.0, 10.0
_KEPT_BATCHES = 4
_LONGEST_SECONDS = 60.0
"""A decoder that takes longer for an image hangs: one of 50 million pixels takes about four seconds."""


class CpuPreprocessor:
    """Encoded images to images, several at a time. Any thread may call any method.

    With processes it waits until they have started, for half a minute at most. What no worker can do, this process
    does. Workers that are lost are started again, at most every ten seconds.

    Args:
        program: of the block `serve`.
        batch: how many files `run` gets at most.
        threads: that share the files of a call. One file is preprocessed by the thread that calls `run`.
        processes: that do so instead; 0 for none.
        device: of the images that `run` returns.
    """

    def __init__(
        self,
        program: Program,
        *,
        batch: int,
        threads: int,
        processes: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        self._program, self._threads, self._device = program, threads, device
        self._runners = CpuRunner(program), CpuRunner(program, threads if threads > 1 else 0)
        """Of one file, and of several."""
        self._running: dict[int, tuple[float, int]] = {}
        """When the call on each thread began, and its number of files."""
        make = shared if processes else heap
        self._bytes = BytePool(make=make)
        dtype = np.dtype(STORAGE[program.result.dtype])
        self._slots = SlotPool((batch, *slot_shape(program.result)), dtype, keep=_KEPT_BATCHES, make=make)
        self._pool = WorkerPool(
            workers.__name__,
            connections=[1] * processes,
            setup=Setup(program),
            task="decode",
            restart_seconds=_RESTART_SECONDS,
        )
        self._pool.wait_until_ready(_START_SECONDS)

    def run(self, files: Sequence[bytes]) -> list[torch.Tensor | BadSampleError]:
        """Return each file's image [1, C, H, W], or why it is bad. The images are rows of one batch in memory.

        Raises what preprocessing one of them raises besides that.
        """
        payload = Payload.of([memoryview(file) for file in files], self._bytes.acquire)
        slots = self._slots.acquire(len(files))
        parts = _parts(len(files), max(1, self._pool.counts()["at_work"]))
        requests = [(part, self._begin(payload, part, slots)) for part in parts]
        faults: list[BadSampleError | None] = [None] * len(files)
        errors: list[Exception] = []
        thread = threading.get_ident()
        self._running[thread] = time.monotonic(), len(files)
        requests.sort(key=lambda request: request[1] is None)  # this process does its parts while the workers do others
        try:
            while requests:
                part, pending = requests.pop()
                answer: list[BadSampleError | None] | None = None if pending is None else pending.result()
                try:
                    faults[part] = self._run(payload, part, slots) if answer is None else answer
                except Exception as error:  # raised once all workers have answered, which can work on
                    errors.append(error)
        except BaseException:
            for _, pending in requests:
                if pending is not None:
                    pending.abandon()
            raise
        finally:
            del self._running[thread]
        self._bytes.release(payload.buffer)
        if errors:
            raise errors[0]
        batch = as_batch(slots, self._program.result).to(self._device)
        return [batch[i : i + 1] if fault is None else fault for i, fault in enumerate(faults)]

    def _begin(self, payload: Payload, part: slice, slots: Array) -> Pending | None:
        """Have a worker decode a part of the files, if one is free."""

        def send(worker: WorkerConnection) -> bool:
            sizes = payload.sizes[part]
            job = DecodeRequest(payload.offsets[part], sizes, _keys(len(sizes)), part.start, len(payload))
            return worker.send(job, payload.buffer, slots)

        return self._pool.begin(send)

    def check(self) -> None:
        """Have each worker that is idle, and this process, decode gpuflow's own test image. One that fails is killed.

        Raises DecoderError if this process fails twice, or has decoded for longer than any image takes.
        """
        for begun, files in list(self._running.values()):
            seconds = time.monotonic() - begun
            if seconds > _LONGEST_SECONDS * math.ceil(files / self._threads):
                raise DecoderError(f"a decoder has worked on {files} image(s) for {seconds:.0f} s; restart the service")

        def exchange(worker: WorkerConnection) -> None:
            worker.send(None)
            worker.answer()

        self._pool.each_idle(exchange)
        for runner in self._runners:
            try:
                runner.check()
            except DecoderError:  # which has discarded the decoders that the runner had
                runner.check()

    def _run(self, payload: Payload, part: slice, slots: Array) -> list[BadSampleError | None]:
        """Preprocess a part of the files in this process."""
        use_torch_threads(1)
        samples = payload.take(range(part.start, part.stop))
        return self._runners[len(samples) > 1].run(samples, _keys(len(samples)), slots[part])

    def close(self) -> None:
        """Kill the workers, end the threads and free the memory."""
        self._pool.close()
        self._bytes.clear()
        self._slots.clear()
        for runner in self._runners:
            runner.clear()


def _parts(count: int, most: int) -> Iterator[slice]:
    """Yield at most `most` parts of neighbours, whose lengths differ by one at most."""
    parts = min(count, most)
    ends = [count * (number + 1) // parts for number in range(parts)]
    return itertools.starmap(slice, itertools.pairwise([0, *ends]))


def _keys(count: int) -> Keys:
    """Return keys for stages that draw nothing, as those of a served model."""
    return Keys(0, 0, np.zeros(count, np.int64))


class GpuPreprocessor:
    """Encoded images to images on the GPU, several at a time. Any thread may call any method.

    Args:
        runner, device_stream: as in training; used by this preprocessor alone.
        pool: of pinned memory, for the files of a batch.
    """

    def __init__(self, runner: ChunkRunner, device_stream: DeviceStream, pool: BytePool) -> None:
        self._runner, self._device_stream, self._pool = runner, device_stream, pool

    def run(self, files: Sequence[bytes]) -> list[torch.Tensor | BadSampleError]:
        """Return each file's image [1, C, H, W], ready for any stream, or why it is bad. Wait for the GPU."""
        payload = Payload.of([memoryview(file) for file in files], self._pool.acquire)
        slots = self._runner.slots(len(files))
        try:
            prepared = self._runner.prepare(payload, _keys(len(files)))
            faults = self._runner.launch(prepared, slots)
        finally:
            self._device_stream.record_event(blocking=True).synchronize()  # bytes are read, images written
            self._pool.release(payload.buffer)
        return [slots[i : i + 1] if fault is None else fault for i, fault in enumerate(faults)]

    def check(self) -> None:
        """Decode gpuflow's own test image. Raises DecoderError if that fails."""
        self._runner.check()

    def close(self) -> None:
        """Wait until the GPU has finished all queued work."""
        self._device_stream.close()
