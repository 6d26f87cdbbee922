"""What runs in a graph's nodes, as torchpipe wants it: classes without arguments, told everything as text.

An item is a dict with `data`; a node writes `result`. What is wrong with one item is written into it as `error`, its
result stays empty, and its neighbours go on: torchpipe fails a whole batch for what a node raises.
"""

from __future__ import annotations

import ctypes
import threading
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
from gpuflow.runtime.threads import use_torch_threads
from gpuflow.torchpipe.graph import program_from_json
from gpuflow.torchpipe.request_queue import Backlog, Request, Waiting

if TYPE_CHECKING:
    from gpuflow.engines import Engine

__all__ = ["SESSIONS", "ModelNode", "PredictNode", "PreprocessNode", "Preprocessor", "Session"]

Item = MutableMapping[str, Any]

_QUEUED = 2
"""How many images an instance takes at a time. With 1, torchpipe would let a caller wait until an instance is free."""
_EMPTY, _CANCELLED = torch.empty(0), PredictorError("cancelled")
_ONE = Keys(0, 0, np.zeros(1, np.int64))
"""The keys of one image. Nothing is drawn where a model is served."""


class Preprocessor(Protocol):
    """What preprocesses several images at a time. Any thread may call any method."""

    def run(self, files: Sequence[bytes]) -> list[torch.Tensor | BadSampleError]:
        """For each file its image [1, C, H, W], or why it is bad."""
        ...

    def check(self) -> None:
        """Have it decode gpuflow's own test image. Raises DecoderError where that fails."""

    def close(self) -> None: ...


class Session:
    """What the instances of one graph's nodes share.

    engines: one for each instance of the model; none where the images are all that is wanted.
    batches: how often the model ran on so many images at a time. backlog: of a node that does everything, where
    requests come from a `RunningGraph`.
    """

    backlog: Backlog | None = None

    def __init__(self, engines: Sequence[Engine]) -> None:
        self.engines = tuple(engines)
        self.batches: Counter[int] = Counter()
        self._lock = threading.Lock()
        self._nodes: list[PreprocessNode | ModelNode] = []
        self._preprocessors: list[Preprocessor | None] = []

    def join(self, node: PreprocessNode | ModelNode) -> None:
        self._nodes.append(node)

    def count(self, images: int) -> None:
        with self._lock:
            self.batches[images] += 1

    def preprocessor(self, make: Callable[[], Preprocessor | None]) -> Preprocessor | None:
        """What all instances preprocess with, made by the first; None where each has to by itself."""
        with self._lock:
            if not self._preprocessors:
                self._preprocessors.append(make())
            return self._preprocessors[0]

    def check(self) -> None:
        """Have every instance that decodes decode gpuflow's own test image. Raises DecoderError where one fails."""
        for node in tuple(self._nodes):
            node.check()
        for preprocessor in tuple(self._preprocessors):
            if preprocessor is not None:
                preprocessor.check()

    def close(self) -> None:
        """Let go of engines and buffers; no item may be under way. torchpipe keeps the nodes themselves for ever."""
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
"""By the nodes' parameter `session`. Nodes of a graph that torchpipe reads from a file have none and open their own."""
_lock = threading.Lock()


def _session(parameters: Mapping[str, str], program: Program) -> Session:
    with _lock:
        name = parameters.get("session") or f"of node {parameters['node_name']}"
        if name not in SESSIONS:
            SESSIONS[name] = Session(_engines(parameters, program))
        return SESSIONS[name]


def _engines(parameters: Mapping[str, str], program: Program) -> Sequence[Engine]:
    """The engines of a model node that stands in a file, ready to run."""
    if "model" not in parameters:
        return ()
    from gpuflow.config import ModelSpec
    from gpuflow.engines import open_engines, read_info, refuse_other_preprocessing

    model = ModelSpec.model_validate_json(parameters["model"])
    refuse_other_preprocessing(read_info(model.file), program.pipeline, model.file, model.force)
    engines = open_engines(model, image=program.result, device=torch.device(parameters["device"]))
    for engine in engines:
        engine.warm_up()
    return engines


def _stay_known() -> None:
    """Let Python keep what it knows of this thread, one of torchpipe's, on which an instance is made and runs.

    It would make that anew for each batch, with memory from the system: a fifth fewer requests a second.
    """
    ctypes.pythonapi.PyGILState_Ensure()  # and no PyGILState_Release: these threads last as long as the process


def _program(parameters: Mapping[str, str]) -> Program:
    from gpuflow.vocabulary import stage_table  # torchpipe makes the nodes, so nobody can hand the table in

    return program_from_json(parameters["stages"], stage_table())


class PreprocessNode:
    """Encoded bytes to an image, by the code that validation runs: a tensor [1, C, H, W] as the pipeline gives it.

    Parameters: stages (JSON), device of the image, on_error: `pass` or `raise`, session. processes: that do it in this
    thread's place, for batches of `batch` at most; then the images are on the CPU.
    """

    def init(self, params: Any, options: object = None) -> None:
        parameters = dict(params.items())
        _stay_known()
        use_torch_threads(1)
        program = _program(parameters)
        processes = int(parameters.get("processes", 0))
        self._spec, self._device = program.result, torch.device("cpu" if processes else parameters["device"])
        self._raises = parameters["on_error"] == "raise"
        self._program, self._lock = program, threading.Lock()
        self._runner: CpuRunner | None = CpuRunner(program)
        on_gpu = self._device.type == "cuda"
        session = _session(parameters, program) if on_gpu or processes or "session" in parameters else None
        self._batched: Preprocessor | None = None
        if session is not None:
            session.join(self)
            if on_gpu:
                self._batched = session.preprocessor(partial(_gpu_preprocessor, program, self._device))
            elif processes:
                batch = int(parameters["batch"])
                self._batched = session.preprocessor(partial(_cpu_preprocessor, program, batch, processes))
        self._at_a_time = 1 if self._raises else _QUEUED

    def max(self) -> int:
        return self._at_a_time

    def forward(self, items: Sequence[Item]) -> None:
        wanted = []
        for item in items:
            if "request" in item and item["request"].future.cancelled():
                _write(item, _CANCELLED)
            else:
                wanted.append(item)
        for item, image in zip(wanted, self.images([item["data"] for item in wanted]), strict=True):
            if isinstance(image, Exception):
                if "request" in item:
                    item["request"].fault = image
                if self._raises:
                    raise image
            _write(item, image)

    def images(self, files: Sequence[bytes]) -> Sequence[torch.Tensor | Exception]:
        """For each file its image [1, C, H, W], or what is wrong with it. Raises nothing."""
        if self._batched is None or not files:
            return [self._image(data) for data in files]
        try:
            return self._batched.run(files)
        except BaseException as error:  # somebody waits for each item, whatever is raised
            return [_failed(error)] * len(files)

    def _image(self, data: bytes) -> torch.Tensor | Exception:
        assert self._runner is not None, "a graph that was closed gets no items"
        slots = np.empty((1, *slot_shape(self._spec)), STORAGE[self._spec.dtype])
        try:
            with self._lock:
                (fault,) = self._runner.run([np.frombuffer(data, np.uint8)], _ONE, slots)
            return fault if fault is not None else as_batch(slots, self._spec).to(self._device)
        except BaseException as error:  # as above
            return _failed(error)

    def check(self) -> None:
        """Decode gpuflow's own test image, with a new runner if need be. Raises DecoderError where that fails too."""
        with self._lock:
            if self._runner is None or self._batched is not None:
                return
            try:
                self._runner.check()
            except DecoderError:
                self._runner = CpuRunner(self._program)
                self._runner.check()

    def release(self) -> None:
        self._runner = self._batched = None


def _failed(error: BaseException) -> Exception:
    """An unforeseen error as one of the sample, unless it says nothing of the sample."""
    if isinstance(error, BadSampleError):
        return error
    if isinstance(error, (DecoderError, MemoryError, OSError)):
        failed: Exception = PredictorError(f"preprocessing failed: {error!r}")
    else:
        failed = BadSampleError("preprocess", repr(error))
    failed.__cause__ = error
    return failed


def _cpu_preprocessor(program: Program, batch: int, processes: int) -> Preprocessor:
    from gpuflow.torchpipe.cpu_preprocessor import CpuPreprocessor

    return CpuPreprocessor(program, batch=batch, processes=processes)


def _gpu_preprocessor(program: Program, device: torch.device) -> Preprocessor | None:
    """What preprocesses on a GPU, or None where it cannot: the CPU does then."""
    from gpuflow.execute.device_stream import DeviceStream
    from gpuflow.execute.gpu_backend import place_on_gpu
    from gpuflow.runtime.buffers import BytePool
    from gpuflow.runtime.memory import pinned
    from gpuflow.torchpipe.gpu_preprocessor import GpuPreprocessor

    device_stream = DeviceStream(device)
    runner = place_on_gpu(program, device_stream).gpu
    pool = BytePool(make=pinned)
    return GpuPreprocessor(runner, device_stream, take=pool.acquire, give=pool.release) if runner is not None else None


class ModelNode:
    """A batch of images through the model: logits [K] for each item. Without a model, the images themselves.

    Parameters: stages (JSON), batch, device of the model, model (JSON of `serve.model`), session.
    """

    def init(self, params: Any, options: object = None) -> None:
        parameters = dict(params.items())
        _stay_known()
        use_torch_threads(1)  # until the engine says otherwise
        program = _program(parameters)
        self._session = _session(parameters, program)
        self._session.join(self)
        engines, self._batch = self._session.engines, int(parameters["batch"])
        self._engine = engines[int(parameters["_independent_index"])] if engines else None
        self._device, self._result = torch.device(parameters["device"]), program.result
        if self._engine is not None:
            self._engine.settle()
        self._preset: list[torch.nn.Module] | None = None
        if isinstance(program.decoder, Preset):
            self._preset = [stage.module() for stage in program.pipeline.stages[1:]]

    def max(self) -> int:
        return self._batch

    def forward(self, items: Sequence[Item]) -> None:
        items = list(items)
        images = [_fault_of(item) if "error" in item else from_dlpack(item["data"]) for item in items]
        requests = [item["request"] if "request" in item else None for item in items]  # noqa: SIM401  # not a dict
        for item, answer in zip(items, self.answer(images, requests), strict=True):
            _write(item, answer)

    def answer(
        self, images: Sequence[torch.Tensor | Exception], requests: Sequence[Request | None]
    ) -> list[torch.Tensor | Exception]:
        """For each image its logits [K], or itself [C, H, W] where that is wanted, or what is wrong with it.

        Those who ask are told.
        """
        begun = [request is None or request.begin() for request in requests]
        wanted = [image if begins else _CANCELLED for image, begins in zip(images, begun, strict=True)]
        answers = self._answers(wanted, [request is not None and request.wants_image for request in requests])
        for request, answer in zip(requests, answers, strict=True):
            if request is not None:
                request.settle(answer)
        return answers

    def _answers(
        self, images: Sequence[torch.Tensor | Exception], as_images: Sequence[bool]
    ) -> list[torch.Tensor | Exception]:
        good = {row: image for row, image in enumerate(images) if isinstance(image, torch.Tensor)}
        found: Sequence[torch.Tensor | Exception] = ()
        try:
            if good:
                found = self._run(list(good.values()), [as_images[row] for row in good])
        except BaseException as error:  # somebody waits for each item, whatever is raised
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
            row: image.to(self._device, copy=image.is_cuda)[0]  # preprocessing uses its memory again
            for row, image in enumerate(images)
            if wanted[row]
        }
        if self._engine is not None and rows:
            batch = torch.cat([images[row] for row in rows]) if len(rows) > 1 else images[rows[0]]
            logits = self._engine.run(batch.to(self._device)).clone()  # no inference tensors, which users cannot change
            self._session.count(len(rows))
            answers |= zip(rows, logits, strict=True)
        return [answers[row] for row in range(len(images))]

    def _images(self, images: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """What the model gets: for each image [1, C, H, W] in the pipeline's dtype and memory format."""
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
        """It decodes nothing."""

    def release(self) -> None:
        self._engine = None


class PredictNode(ModelNode):
    """Encoded bytes to logits [K]: both of the above, one after the other on the same batch.

    Parameters: of both, and patience: milliseconds that those who have their answers are given to ask again, before the
    next batch is taken. Without it they would miss that batch, and all that ask would split in two halves that run by
    turns.
    """

    def init(self, params: Any, options: object = None) -> None:
        self._preprocess = PreprocessNode()
        self._preprocess.init(params)
        super().init(params)
        self._patience = int(params["patience"]) / 1000

    def forward(self, items: Sequence[Item]) -> None:
        items = list(items)
        backlog = self._session.backlog
        if backlog is None:
            for item, answer in zip(items, self._predict([(item["data"], None) for item in items]), strict=True):
                _write(item, answer)
            return
        backlog.begin(len(items))
        batch: list[Waiting] = [(item["data"], item["request"]) for item in items]
        while batch:
            arrived = backlog.arrived
            self._predict(batch)
            batch = backlog.take(arrived=arrived + len(batch), seconds=self._patience)

    def _predict(self, batch: Sequence[tuple[bytes, Request | None]]) -> list[torch.Tensor | Exception]:
        """As `answer`. What was cancelled meanwhile is not decoded."""
        wanted = [request is None or not request.future.cancelled() for _, request in batch]
        images = iter(
            self._preprocess.images([data for (data, _), is_wanted in zip(batch, wanted, strict=True) if is_wanted])
        )
        return self.answer(
            [next(images) if is_wanted else _CANCELLED for is_wanted in wanted], [request for _, request in batch]
        )


def _write(item: Item, answer: torch.Tensor | Exception) -> None:
    if isinstance(answer, Exception):
        item["error"], item["result"] = str(answer), _EMPTY
    else:
        item["result"] = answer


def _fault_of(item: Item) -> Exception:
    """What the node before raised for an item, or what its text says of that."""
    if "request" in item and item["request"].fault is not None:
        fault: Exception = item["request"].fault
        return fault
    stage, _, reason = item["error"].partition(": ")
    return BadSampleError(stage, reason)
