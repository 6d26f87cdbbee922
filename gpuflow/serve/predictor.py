"""The predictor: runs a configuration's block `serve` in this process, from encoded images to logits."""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NoReturn, Self, TypedDict, TypeVar, Unpack, overload

import torch

from gpuflow.config import Activation, Config, ModelSpec, ServeSpec
from gpuflow.config.resources import serving_processes_of, threads_of
from gpuflow.engines import (
    Engine,
    ModelInfo,
    class_names,
    open_engines,
    read_checked_info,
    warm_up_all,
)
from gpuflow.engines.base import activation_of, black_images, check_classes, check_logits, top_outputs
from gpuflow.engines.tensorrt import Platform
from gpuflow.errors import (
    BadSampleError,
    ConfigError,
    PredictorError,
    PredictorTimeout,
    Problem,
    is_system_fault,
    system_fault,
)
from gpuflow.execute.gpu.backend import gpu_decodes
from gpuflow.pipeline.program import Program
from gpuflow.pipeline.stage import Decoder, ImageSpec, Pipeline
from gpuflow.runtime.ranks import Ranks
from gpuflow.runtime.threads import use_torch_threads
from gpuflow.serve.model_input import matrices_of, require_known_moves
from gpuflow.torchpipe.graph import MODEL, NO_MODEL, PREDICT, Graph, chain
from gpuflow.torchpipe.request_queue import unchanged
from gpuflow.torchpipe.running_graph import RunningGraph, refuse_forked

Image = bytes | bytearray | memoryview | str | os.PathLike[str]
"""One encoded image: its bytes, or the path of its file."""
_BYTES = (bytes, bytearray, memoryview)
Labels = tuple[tuple[str, float], ...]
"""(label, probability), the most likely first."""

_ROUNDS_AHEAD = 4
"""For how many rounds of all instances a long list of images is submitted before its first answer is taken."""

NOT_FINITE = "the model gave logits that are not finite numbers"

T = TypeVar("T")
_Submit = Callable[..., Sequence[Future[T]]]
"""Submits images that belong together. more_follow: the caller submits more before it waits for these."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Prediction:
    """The model's output for one image.

    logits: float32 [K]. classes: the names of the K outputs, or None. activation: what makes probabilities of the
    logits, see `serve.model.activation`.
    """

    logits: torch.Tensor
    classes: tuple[str, ...] | None = None
    activation: Activation = "softmax"

    def top(self, k: int) -> Labels:
        """Return the k most likely labels, or all if there are fewer. Without names a label is its index.

        With the activation `none` these are all outputs in their order, with their numbers.

        Examples:
            >>> prediction = Prediction(logits=torch.tensor([0.0, 2.0]), classes=("cat", "dog"))
            >>> [(label, round(probability, 2)) for label, probability in prediction.top(1)]
            [('dog', 0.88)]

        Raises ValueError if k is negative, PredictorError as `require_finite`.
        """
        return tuple((label, probability) for _, label, probability in self.ranked(k))

    def ranked(self, k: int) -> tuple[tuple[int, str, float], ...]:
        """Return the labels of `top`, with the output's index first: (index, label, probability).

        Examples:
            >>> Prediction(logits=torch.zeros(2)).ranked(1)
            ((0, '0', 0.5),)
        """
        if k < 0:
            raise ValueError(f"k must be >= 0, got {k}")
        self.require_finite()
        values, rows = top_outputs(self.logits, self.activation, k)
        return tuple(
            (row, self.classes[row] if self.classes else str(row), value)
            for row, value in zip(rows.tolist(), values.tolist(), strict=True)
        )

    def require_finite(self) -> None:
        """Raise PredictorError if the logits have no probabilities: one is NaN or infinite, or all are -infinite.

        Examples:
            >>> Prediction(logits=torch.tensor([0.0, math.nan])).require_finite()
            Traceback (most recent call last):
            gpuflow.errors.PredictorError: the model gave logits that are not finite numbers
        """
        numbers = self.logits if self.activation == "none" else self.logits.max()  # of NaN and others, NaN
        if not numbers.isfinite().all():
            raise PredictorError(NOT_FINITE)


class _Submitted(TypedDict, total=False):
    """Arguments of `RunningGraph.submit` that describe the images."""

    more_follow: bool
    deadline: float


class Predictor:
    """Predicts from encoded images, in batches over all callers. Any thread may call any method.

    A list reaches the model as one batch, or as few as `serve.model.batch` allows. All instances work on the batches of
    a long list at the same time, a few batches ahead of its answers. Load a predictor once, not for each request:
    torchpipe never ends a graph's threads. While other threads run Python code, an instance waits for the interpreter
    up to its switch interval each time, 5 ms by default; `gpuflow serve` sets 0.02 ms. In your own process, call
    `sys.setswitchinterval`.

    Args:
        graph: of `lower` or `chain`.
        engines: warmed up, one for each instance of the model node; none if the graph ends with images, or torchpipe
            runs the model.
        image: the model's input.
        pipeline: the stages before the model, for showing that input as a picture.
        classes, activation: of the model's outputs: their names, and what makes probabilities of them.
        timeout_seconds: limit for each answer.

    gives_images: whether the graph can return the model's input. has_preset: whether a preset decodes. formats: what
    its decoder takes besides the ordinary formats, as `decode.formats` names it.
    """

    def __init__(
        self,
        graph: Graph,
        engines: Sequence[Engine] = (),
        *,
        image: ImageSpec,
        pipeline: Pipeline | None = None,
        classes: tuple[str, ...] | None = None,
        activation: Activation = "softmax",
        timeout_seconds: float = 120.0,
    ) -> None:
        self.image, self.pipeline, self.activation = image, pipeline, activation
        self.classes, self.preprocessing = classes, graph.preprocessing
        first_stage = pipeline.stages[0] if pipeline is not None else None
        self.has_preset = graph.preset is not None
        self.formats = first_stage.formats if isinstance(first_stage, Decoder) else ()
        self._graph, self._timeout = graph, timeout_seconds
        self._described = [engine.describe() for engine in engines]
        *_, last = graph.nodes.values()
        self.gives_images = last["backend"] in (MODEL, PREDICT)
        self._has_model = bool(engines) or not self.gives_images
        self._batch = int(last.get("batch", 1))
        self._window = _ROUNDS_AHEAD * graph.at_once
        self._running = RunningGraph(graph, engines)

    def __reduce__(self) -> NoReturn:
        raise TypeError("a predictor cannot be pickled or copied: it has threads; load it in the process that calls it")

    @overload
    def __call__(self, images: Image, *, top_k: None = None) -> torch.Tensor: ...
    @overload
    def __call__(self, images: Image, *, top_k: int) -> Labels: ...  # type: ignore[overload-overlap]  # str is iterable
    @overload
    def __call__(self, images: Iterable[Image], *, top_k: None = None) -> torch.Tensor: ...
    @overload
    def __call__(self, images: Iterable[Image], *, top_k: int) -> list[Labels]: ...
    def __call__(
        self, images: Image | Iterable[Image], *, top_k: int | None = None
    ) -> torch.Tensor | Labels | list[Labels]:
        """Return logits of one image, float32 [K], or of several, [N, K]; with `top_k`, the most likely labels instead.

        Raises:
            TypeError: what was given is neither a path nor the bytes of a file. ValueError: `top_k` is negative.
            BadSampleError: the first image that cannot be read or decoded. `predict` still returns the others.
            PredictorError: the predictor is closed or has no model, or the model failed or gave logits that are not
                finite numbers.
            PredictorTimeout: an answer did not come in time.
        """
        several, is_one = _several(images)
        found = self._each(several, self._submit)
        for prediction in found:
            prediction.require_finite()
        if top_k is not None:
            labels = [prediction.top(top_k) for prediction in found]
            return labels[0] if is_one else labels
        logits = [prediction.logits for prediction in found]
        if is_one:
            return logits[0]
        return torch.stack(logits) if logits else torch.empty(0, len(self.classes or ()), device="cpu")

    def predict(self, images: Iterable[Image]) -> list[Prediction | BadSampleError]:
        """Return the prediction for each image, or why it cannot be read or decoded.

        Raises PredictorError; TypeError for a single image, for which the predictor itself is called.
        """
        several, is_one = _several(images)
        if is_one:
            raise TypeError("predict takes several images, got one; put it in a list, or call the predictor itself")
        answers = self._answers(several, self._submit)
        found = list(answers)
        for answer in found:
            if isinstance(answer, Prediction):
                answer.require_finite()
        return found

    def submit(self, data: bytes, *, deadline: float = math.inf) -> Future[Prediction]:
        """Return a future of the prediction for one image. Does not wait, and accepts no path: for services.

        The future raises BadSampleError or PredictorError. If it is cancelled before the model starts, the image is
        dropped.

        Args:
            deadline: by `time.monotonic`. If the image cannot be answered before, it is dropped before the model runs,
                and the future raises PredictorTimeout.

        Raises:
            TypeError: `data` is not bytes. PredictorError: the predictor is closed or has no model.
        """
        return self._submit([_bytes_of(data, "submit")], deadline=deadline)[0]

    def submit_all(self, files: Sequence[bytes], *, deadline: float = math.inf) -> list[Future[Prediction]]:
        """Submit images that belong together, such as those of a form, each as `submit` does.

        The model gets them as one batch, or as few as `serve.model.batch` allows. A bad image is an error of its future
        alone.
        """
        return self._submit([_bytes_of(data, "submit_all") for data in files], deadline=deadline)

    def submit_image(self, data: bytes, *, deadline: float = math.inf) -> Future[torch.Tensor]:
        """Return a future of the model's input for one image, [C, H, W]. Otherwise as `submit`; needs no model."""
        return self._submit_images([_bytes_of(data, "submit_image")], deadline=deadline)[0]

    @overload
    def preprocess(self, images: Image | Iterable[Image], *, matrices: Literal[False] = False) -> torch.Tensor: ...
    @overload
    def preprocess(
        self, images: Image | Iterable[Image], *, matrices: Literal[True]
    ) -> tuple[torch.Tensor, torch.Tensor]: ...
    def preprocess(
        self, images: Image | Iterable[Image], *, matrices: bool = False
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Return the model's input: one image [C, H, W], or several [N, C, H, W].

        They are the graph's own images, bit for bit those of validation, in the pipeline's dtype and memory format.
        Raises as a call does.

        Args:
            matrices: return a pair, with float64 [3, 3] or [N, 3, 3] on the CPU as its second part. It maps a point (x,
                y, 1) of the model's input to the point of the upright image that was given. Both are in pixels from the
                corner at the top left. PredictorError if a stage may move pixels without saying where to.
        """
        if not matrices:
            return self._preprocess(images)
        pipeline = require_known_moves(self.pipeline, self._graph.origin)
        several, is_one = _several(images)
        listed = list(several)
        files = []
        for index, image in enumerate(listed):
            data = _read(image)
            if isinstance(data, BadSampleError):
                raise data.located(index, _path_of(image))
            files.append(data)
        try:
            batch = self._preprocess(files[0] if is_one else files)
        except BadSampleError as error:
            raise error.located(error.index, _path_of(listed[error.index])) from None
        maps = torch.from_numpy(matrices_of(pipeline, files))
        return batch, maps[0] if is_one else maps

    def _preprocess(self, images: Image | Iterable[Image]) -> torch.Tensor:
        self._require_images()
        several, is_one = _several(images)
        found = self._each(several, self._submit_images)
        if is_one:
            return found[0]
        batch = black_images(len(found), self.image, found[0].device if found else torch.device("cpu"))
        return torch.stack(found, out=batch) if found else batch

    # --- state ------------------------------------------------------------------------------------------------------

    @property
    def in_flight(self) -> int:
        """Return the number of images that are submitted and not answered yet."""
        return self._running.in_flight

    @property
    def newest_first(self) -> bool:
        """Return True if callers gave up in the last seconds, so that a new image does not wait for those before it."""
        return self._running.newest_first

    def seconds_for(self, images: int) -> float:
        """Predict how long it takes to answer this number of images, by the recent rate of answers.

        Returns 0 if that is not known, because there were few requests in the last seconds, or if the images are few.
        """
        return self._running.rate.seconds(images)

    @property
    def held_bytes(self) -> int:
        """Return the size of the encoded images that are submitted and not decoded yet."""
        return self._running.held_bytes

    @property
    def batches(self) -> dict[int, int]:
        """Return how often the model has run, by batch size."""
        return dict(self._running.session.batches)

    def check(self) -> None:
        """Have what decodes decode gpuflow's own test image, while requests go on.

        Raises:
            DecoderError: one fails, also with a new decoder. PredictorError: an instance of the model keeps failing.
        """
        self._running.check()

    def describe(self) -> dict[str, Any]:
        """Return plain values for reports: the file, the preprocessing's fingerprint and result, and each engine."""
        first, *_ = self._graph.nodes.values()
        return {
            "file": self._graph.origin,
            "preprocessing": self.preprocessing,
            "image": str(self.image),
            "threads": int(first.get("threads", first["instance_num"])),
            "processes": int(first.get("processes", 0)),
            "engines": self._described,
        }

    # --- answers ----------------------------------------------------------------------------------------------------

    def _submit(self, files: Sequence[bytes], **submitted: Unpack[_Submitted]) -> list[Future[Prediction]]:
        if not self._has_model:
            raise PredictorError(f"{self._graph.origin}: was loaded without a model; only preprocess works")
        return self._running.submit(files, wrap=self._prediction, **submitted)

    def _submit_images(self, files: Sequence[bytes], **submitted: Unpack[_Submitted]) -> list[Future[torch.Tensor]]:
        self._require_images()
        return self._running.submit(files, wrap=unchanged, wants_image=True, **submitted)

    def _require_images(self) -> None:
        if not self.gives_images:
            raise PredictorError("torchpipe's TensorrtTensor does not return its input; set serve.model.via=python")

    def _prediction(self, logits: torch.Tensor) -> Prediction:
        return Prediction(logits=logits, classes=self.classes, activation=self.activation)

    def _each(self, images: Iterable[Image], submit: _Submit[T]) -> list[T]:
        """Return the answers in order. Raise the first error."""
        found: list[T] = []
        for answer in self._answers(images, submit):
            if isinstance(answer, BadSampleError):
                raise answer
            found.append(answer)
        return found

    def _answers(self, images: Iterable[Image], submit: _Submit[T]) -> Iterator[T | BadSampleError]:
        """Yield the answers in order, with a limited number of images in flight. At the end, cancel what is left."""
        waiting: deque[tuple[int, str, Future[T]]] = deque()
        index = 0
        try:
            for part, more_follow in _parts(images, self._batch):
                while waiting and len(waiting) + len(part) > self._window:
                    answer = self._wait(*waiting.popleft())
                    yield answer
                for image, future in zip(part, _begin(part, submit, more_follow=more_follow), strict=True):
                    waiting.append((index, _path_of(image), future))
                    index += 1
            while waiting:
                answer = self._wait(*waiting.popleft())
                yield answer
        finally:
            for *_, future in waiting:
                future.cancel()

    def _wait(self, index: int, path: str, future: Future[T]) -> T | BadSampleError:
        try:
            return future.result(self._timeout)
        except BadSampleError as error:
            return error.located(index, path)
        except TimeoutError:
            in_flight = self.in_flight
            future.cancel()
            raise PredictorTimeout(
                f"no answer within {self._timeout:g} s, with {in_flight} images in flight; raise run.timeout_s "
                "or send fewer images at a time"
            ) from None

    # --- closing ----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Refuse new images, answer those in flight, release the model. Later calls do nothing.

        Raises PredictorTimeout if that takes longer than the limit for an answer; the model is not released then.
        """
        if not self._running.close(self._timeout):
            raise PredictorTimeout(
                f"{self.in_flight} images are still in flight after {self._timeout:g} s; the model is not released"
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _several(images: Image | Iterable[Image]) -> tuple[Iterable[Image], bool]:
    """Return the images, and whether a single one was given."""
    if isinstance(images, (*_BYTES, str, os.PathLike)):
        return [images], True
    if callable(getattr(images, "read", None)):  # iterating over it would give its lines
        raise TypeError("an image must be a path or the bytes of its file, got an open file; give its read()")
    if not (hasattr(images, "__iter__") or hasattr(images, "__getitem__")):
        raise _no_image(images)
    return images, False


def _no_image(given: object) -> TypeError:
    return TypeError(f"an image must be a path or the bytes of its file, got {type(given).__name__}")


def _path_of(image: Image) -> str:
    """Return an image's path, for messages."""
    return os.fspath(image) if isinstance(image, (str, os.PathLike)) else "bytes"


def _parts(images: Iterable[Image], size: int) -> Iterator[tuple[list[Image], bool]]:
    """Yield the images in lists of at most `size`, each with whether more follow."""
    rest = iter(images)
    part = list(islice(rest, size))
    while part:
        following = list(islice(rest, 1))
        yield part, bool(following)
        part = following + list(islice(rest, size - 1)) if following else []


def _begin(images: Sequence[Image], submit: _Submit[T], *, more_follow: bool) -> list[Future[T]]:
    """Submit images together. A file that cannot be read is a bad sample, as one that cannot be decoded.

    Raises SystemFault if the system cannot open any file.
    """
    read = [_read(image) for image in images]
    files = [data for data in read if isinstance(data, bytes)]
    submitted = iter(submit(files, more_follow=more_follow))
    return [next(submitted) if isinstance(data, bytes) else _failed(data) for data in read]


def _bytes_of(data: bytes | bytearray | memoryview, method: str) -> bytes:
    """Return the bytes of one image's file. Raise TypeError for all else: `bytes` of a number would be zeros."""
    if not isinstance(data, _BYTES):
        raise TypeError(f"{method} takes the bytes of one encoded image, got {type(data).__name__}")
    return bytes(data)


def _read(image: Image) -> bytes | BadSampleError:
    if isinstance(image, _BYTES):
        return bytes(image)
    if not isinstance(image, (str, os.PathLike)):
        raise _no_image(image)
    try:
        return Path(image).read_bytes()
    except OSError as error:
        if is_system_fault(error):
            raise system_fault(error, os.fspath(image)) from error
        return BadSampleError("read", error.strerror or str(error))
    except ValueError as error:  # a name that no file can have
        return BadSampleError("read", str(error))


def _failed(fault: BadSampleError) -> Future[Any]:
    unread: Future[Any] = Future()
    unread.set_exception(fault)
    return unread


# --- from a configuration ---------------------------------------------------------------------------------------------


class CallableEngine:
    """An engine around a user's callable: images [N, C, H, W] on the device to logits [N, K] on any device."""

    info = ModelInfo()

    def __init__(
        self, model: Callable[[torch.Tensor], torch.Tensor], *, image: ImageSpec, device: torch.device, batch: int
    ) -> None:
        if isinstance(model, torch.nn.Module):
            model.to(device).eval()
        self._model: Callable[[torch.Tensor], torch.Tensor] | None = model
        self._name, self._image, self._device, self.batch = type(model).__name__, image, device, batch
        self._threads = torch.get_num_threads()

    def warm_up(self) -> None:
        for count in (1, self.batch):
            self.run(black_images(count, self._image, self._device))

    def bind_thread(self) -> None:
        """Warm up on this thread: on a GPU, torch initialises libraries at a thread's first run."""
        if self._device.type == "cuda":
            self.warm_up()

    @torch.inference_mode()
    def run(self, images: torch.Tensor) -> torch.Tensor:
        assert self._model is not None, "a closed engine does not run"
        use_torch_threads(self._threads)
        return check_logits(self._model(images.to(self._device)), len(images)).float().cpu()

    def describe(self) -> dict[str, Any]:
        return {"engine": "own", "model": self._name, "device": str(self._device), "batch": self.batch}

    def close(self) -> None:
        self._model = None


def chain_here(
    config: Config, program: Program, model: ModelSpec | None, *, device: str, platform: Platform | None = None
) -> Graph:
    """Return the `chain` for this machine: if its GPU cannot run the program, threads preprocess in a separate node."""
    return chain(
        program,
        model,
        origin=config.path,
        threads=threads_of(config.run),
        processes=serving_processes_of(config.run, program),
        device=device,
        platform=platform,
        gpu_decodes=device != "cpu" and gpu_decodes(program),
    )


def check_block(config: Config, *, needs_model: bool = True) -> ServeSpec:
    """Return the block `serve` of a configuration. Raise ConfigError if it has none, or none with a model."""
    block = config.serve_block()
    if needs_model and block.model is None:
        problem = "has no model; add model: {file: ...}, or load it with model= or preprocess_only=True"
        raise ConfigError([Problem(f"{config.path}: serve", problem)])
    return block


def open_predictor(
    config: Config,
    *,
    device: str | torch.device | None = None,
    model: Callable[[torch.Tensor], torch.Tensor] | None = None,
    preprocess_only: bool = False,
) -> Predictor:
    """Return the predictor of a configuration's block `serve`. See `gpuflow.serve.load`."""
    block = check_block(config, needs_model=model is None and not preprocess_only).model
    refuse_forked()
    program = config.programs["serve"]
    target = Ranks.from_environment().device(device)
    engines: Sequence[Engine] = ()
    classes: tuple[str, ...] | None = None
    platform, name, info = None, "", ModelInfo()
    if preprocess_only:
        block = None
    elif model is not None:
        block = (block or NO_MODEL).model_copy(update={"instances": 1, "via": "python"})
        engines = [CallableEngine(model, image=program.result, device=target, batch=block.batch)]
        classes = class_names(block, info)
        name = f"model={type(model).__name__}"
        check_classes(engines[0], name, program.result, target, classes, activation_of(block, info))
    else:
        assert block is not None
        info = read_checked_info(block, program.pipeline)
        classes = class_names(block, info)
        if block.via == "torchpipe":
            from gpuflow.engines.tensorrt import platform_of

            platform = platform_of(target)
        else:
            engines, name = open_engines(block, image=program.result, device=target), block.file
    warm_up_all(engines, name)
    graph = chain_here(config, program, block, device=str(target), platform=platform)
    return Predictor(
        graph,
        engines,
        image=program.result,
        pipeline=program.pipeline,
        classes=classes,
        activation=activation_of(block or NO_MODEL, info),
        timeout_seconds=config.run.timeout_s,
    )
