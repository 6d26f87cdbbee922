"""The interface of a model engine, the metadata of a model file, and the checks before a model runs."""

from __future__ import annotations

import difflib
import json
import logging
import pickle
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, Protocol, TypeVar, assert_never, get_args

import torch

from gpuflow.config import Activation, ModelSpec
from gpuflow.errors import ConfigError, GpuflowError, Problem, reason_of, show
from gpuflow.pipeline.stage import ImageSpec, Pipeline
from gpuflow.runtime.threads import DaemonPool, available_threads

_LOG = logging.getLogger(__name__)
METADATA_KEY = "gpuflow"
"""The key under which an exported file holds its `ModelInfo`, as JSON."""

_THREAD_SECONDS = 1800.0
_UNSTABLE, _UNSTABLE_AT_LEAST = 0.1, 1e-3
"""The tolerances between two results for one image: relative to the largest logit, and absolute. Rounding stays far
below them; batch statistics and dropout exceed them."""

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelInfo:
    """Holds the metadata of a model file; None for what the file does not state.

    classes: names of the outputs. preprocessing, stages: `Pipeline.fingerprint` and `Pipeline.lines` of the pipeline
    before the model. folded: the line of a stage that is inside the model, which then takes uint8 images. activation:
    as `ModelSpec.activation`.
    """

    classes: tuple[str, ...] | None = None
    preprocessing: str | None = None
    stages: tuple[str, ...] | None = None
    folded: str | None = None
    activation: Activation | None = None

    def to_json(self) -> str:
        """Return JSON, with the version of gpuflow that writes it."""
        from gpuflow.version import __version__

        return json.dumps({"gpuflow": __version__, **asdict(self)}, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str | None) -> ModelInfo:
        """Read what `to_json` wrote; unknown keys are ignored. None and "" give an empty `ModelInfo`.

        Raises ValueError for anything else.

        Examples:
            >>> ModelInfo.from_json(ModelInfo(classes=("cat", "dog")).to_json()).classes
            ('cat', 'dog')
        """
        return cls.of(json.loads(text) if text else {})

    @classmethod
    def of(cls, fields: Any) -> ModelInfo:
        """Read the values of a mapping; unknown keys are ignored. Raises ValueError if they are of other types.

        Names of classes may be names of folders that are not UTF-8; U+FFFD replaces what is not text in them.
        """
        if not isinstance(fields, Mapping):
            raise ValueError(f"its metadata must be a mapping, got {show(fields)}")
        values = {key: fields[key] for key in cls.__dataclass_fields__ if fields.get(key) is not None}
        for key, value in values.items():
            is_list = key in ("classes", "stages")
            texts = value if is_list else [value]
            if not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
                rule = "a list of texts" if is_list else "a text"
                raise ValueError(f"{key} in its metadata must be {rule}, got {show(value)}")
            if is_list:
                values[key] = tuple(map(_readable, texts) if key == "classes" else texts)
        if values.get("activation", "none") not in get_args(Activation):
            raise ValueError(
                f"activation in its metadata must be softmax, sigmoid or none, got {show(values['activation'])}"
            )
        return cls(**values)


def _readable(name: str) -> str:
    return re.sub("[\ud800-\udfff]", "\ufffd", name)


class Engine(Protocol):
    """A loaded model. One thread at a time uses an engine; several engines may share weights.

    A graph calls it on a thread where torch computes with one core; an engine that needs more sets it by
    `use_torch_threads`.
    """

    info: ModelInfo
    batch: int
    """The largest batch that `run` takes."""

    def warm_up(self) -> None:
        """Run once what requests will run, so that the first request is not slow. On any thread."""

    def bind_thread(self) -> None:
        """Initialise per-thread library state, on the thread that will call `run`, after `warm_up`."""

    def run(self, images: torch.Tensor) -> torch.Tensor:
        """Turn images [N, C, H, W] of the pipeline, on the engine's device, into float32 logits [N, K] on the CPU.

        Raises ValueError unless 1 <= N <= batch and the images are of the pipeline's shape and dtype.
        """
        ...

    def describe(self) -> dict[str, Any]:
        """Return plain values for reports: engine, versions of its libraries, device, precision, batch and file."""
        ...

    def close(self) -> None:
        """Release the model. A closed engine cannot run again."""


# --- helpers of engines -----------------------------------------------------------------------------------------------


def cores_per_instance(instances: int) -> int:
    """Return the number of threads for each of several engines, which share the cores that this process may use."""
    return max(1, available_threads() // instances)


def run_in_thread(work: Callable[[], T]) -> T:
    """Call `work` on a new thread, and return its result.

    An engine limits the thread that runs it to its share of the cores, which must not change the caller's thread. And
    torch keeps a group of OpenMP threads for each thread that ever computed in parallel. These threads spin, and so
    react fast, only while there are no more of them than cores. A ResNet-18 on two cores takes 16 ms instead of 12 if
    the main thread has such a group, too.
    """
    with DaemonPool(1, "engine") as pool:
        return pool.submit(work).result(_THREAD_SECONDS)


def black_images(count: int, image: ImageSpec, device: torch.device) -> torch.Tensor:
    """Return black images [count, C, H, W] in the dtype and memory layout that the pipeline gives."""
    height, width, channels = image.shape
    assert height is not None and width is not None
    images = torch.zeros((count, channels, height, width), dtype=getattr(torch, image.dtype), device=device)
    return images if image.layout == "nchw" else images.to(memory_format=torch.channels_last)


def noise_images(count: int, image: ImageSpec, device: torch.device) -> torch.Tensor:
    """Return images as `black_images`, with random pixels that are the same at every call."""
    images = black_images(count, image, torch.device("cpu"))
    generator = torch.Generator().manual_seed(count)
    if image.dtype == "uint8":
        noise = torch.randint(0, 256, images.shape, dtype=torch.uint8, device="cpu", generator=generator)
    else:
        noise = torch.randn(images.shape, device="cpu", generator=generator)
    return images.copy_(noise).to(device)


def difference(replayed: torch.Tensor, plain: torch.Tensor) -> float:
    """Return the largest difference of two tensors of logits; infinite where only one of them is infinite or no
    number.

    Examples:
        >>> difference(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.5]))
        0.5
    """
    if replayed.shape != plain.shape:
        return float("inf")
    same = (replayed == plain) | (replayed.isnan() & plain.isnan())
    apart = (replayed - plain).abs()[~same]
    return float(apart.nan_to_num(nan=float("inf"), posinf=float("inf")).max()) if len(apart) else 0.0


# --- checks -----------------------------------------------------------------------------------------------------------


def model_error(path: str, text: str) -> ConfigError:
    """Return the error that a model file cannot be used."""
    return ConfigError([Problem(f"{path}:", text)])


def read_model(path: str, read: Callable[[], T], what: str) -> T:
    """Return what `read` returns for the file. Any exception of the library, which have no common base, names the
    file."""
    try:
        return read()
    except Exception as error:
        raise model_error(path, f"cannot be read as {what}: {reading_fault(error)}") from error


def reading_fault(error: Exception) -> str:
    """Return why a library could not read a file, in one line."""
    if isinstance(error, pickle.UnpicklingError):  # whose text advises torch.load(weights_only=False), which runs code
        return "it is damaged, or holds more than tensors and plain values"
    if isinstance(error, KeyError):
        return "it is damaged, or of another kind"
    return reason_of(error)


def check_input(path: str, image: ImageSpec, info: ModelInfo, *, shape: Sequence[int | None], dtype: str) -> None:
    """Raise ConfigError unless a model with this input, shape [N, C, H, W], takes the images of the pipeline.

    None, or a name, in the shape means any length.
    """
    height, width, channels = image.shape
    gives = f"{image.dtype} {channels}x{height}x{width}"
    fits = len(shape) == 4 and all(
        not isinstance(side, int) or side == ours
        for side, ours in zip(shape[1:], (channels, height, width), strict=True)
    )
    if fits and dtype == image.dtype:
        return
    if info.folded is not None and dtype == "uint8" != image.dtype:
        raise _folded_stage_repeated(path, info.folded, "serve")
    takes = "x".join(str(side) if isinstance(side, int) else "?" for side in shape[1:])
    if len(shape) == 4 and shape[3] == channels != shape[1]:
        rule = f"takes images of {dtype} {takes} (height x width x channels), serve.stages give {gives}"
        raise model_error(path, f"{rule}; export it with the channels before height and width, as [N, C, H, W]")
    raise model_error(
        path,
        f"takes images of {dtype} {takes} (channels x height x width), serve.stages give {gives}; "
        "change the stages or export the model for them",
    )


def check_batch_sizes(path: str, batch: int, *, fewest: int, most: int | None) -> None:
    """Raise ConfigError unless a model that takes `fewest` to `most` images at a time takes 1 to `batch`."""
    if fewest > 1:
        takes = f"batches of {fewest}" if fewest == most else f"batches of {fewest} or more"
        raise model_error(path, f"takes only {takes}; export it with a dynamic batch axis")
    if most is not None and batch > most:
        rule = f"takes at most {most} image(s) at a time, serve.model.batch is {batch}"
        raise model_error(path, f"{rule}; set it to {most}, or export the model with a larger dynamic batch axis")


def check_batch(images: torch.Tensor, image: ImageSpec, batch: int) -> None:
    """Raise ValueError unless these are 1 to `batch` images [N, C, H, W] with the pipeline's shape and dtype."""
    height, width, channels = image.shape
    count = images.shape[0]
    if images.shape[1:] != (channels, height, width) or images.dtype != getattr(torch, image.dtype):
        got = f"{str(images.dtype).removeprefix('torch.')} {list(images.shape)}"
        raise ValueError(f"an engine takes {image.dtype} [N, {channels}, {height}, {width}], got {got}")
    if not 1 <= count <= batch:
        raise ValueError(f"an engine takes 1 to {batch} images, its serve.model.batch, got {count}")


def check_logits(output: object, count: int) -> torch.Tensor:
    """Return what a model gave for `count` images, if it is a tensor with a row for each. Raises ValueError."""
    if not isinstance(output, torch.Tensor):
        raise ValueError(f"its output must be one tensor, logits [N, classes], got a {type(output).__name__}")
    if output.ndim == 0 or len(output) != count:
        raise ValueError(f"its output must have a row for each of {count} images, got the shape {list(output.shape)}")
    return output


def class_names(model: ModelSpec, info: ModelInfo) -> tuple[str, ...] | None:
    """Return the names of the model's outputs: those of `serve.model.classes`, else those that the file records.

    Raises:
        ConfigError: the file of names cannot be read, or has an empty line between names, or the names are those that
            the model's file records in another order.
    """
    names = _given_names(model)
    if names is None or info.classes is None:
        return names or info.classes
    if names != info.classes and sorted(names) == sorted(info.classes):
        pairs = zip(names, info.classes, strict=True)
        i = next(i for i, (given, recorded) in enumerate(pairs) if given != recorded)
        rule = f"must not name the outputs of {model.file} in another order than the file records"
        difference_at = f"output {i} is {info.classes[i]!r} there, {names[i]!r} here"
        raise ConfigError([Problem("serve.model.classes", f"{rule}: {difference_at}", action="leave the key out")])
    return names


def activation_of(model: ModelSpec, info: ModelInfo) -> Activation:
    """Return `serve.model.activation`, else what the file records, else softmax."""
    return model.activation or info.activation or "softmax"


def activated(logits: torch.Tensor, activation: Activation) -> torch.Tensor:
    """Return probabilities [..., K] in place of logits, or the numbers as they are.

    Examples:
        >>> activated(torch.tensor([0.0, 0.0]), "sigmoid").tolist()
        [0.5, 0.5]
    """
    match activation:
        case "softmax":
            return logits.softmax(-1)
        case "sigmoid":
            return logits.sigmoid()
        case "none":
            return logits
        case unknown:
            assert_never(unknown)


def top_outputs(logits: torch.Tensor, activation: Activation, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the k most likely outputs of logits [..., K]: their values, the highest first, and their numbers.

    With the activation `none` these are all K outputs in their order.

    Examples:
        >>> top_outputs(torch.tensor([1.5, 2.5]), "none", 1)[1].tolist()
        [0, 1]
    """
    values = activated(logits, activation)
    if activation == "none":
        return values, torch.arange(values.shape[-1]).expand(values.shape)
    found = values.topk(min(k, values.shape[-1]))
    return found.values, found.indices


def class_difference(classes: Sequence[str], wanted: Sequence[str] | None) -> str:
    """Return where class names differ from those that are wanted, and what to do, as the end of an error.

    Empty if they are equal, or if one has no names, as labels that are numbers.

    Examples:
        >>> class_difference(["cat"], ["cat", "dog"])
        "got 1 where 2 are wanted, and class 1, 'dog', is missing; name all in each source: ..."
    """
    pairs = enumerate(zip_longest(map(_readable, classes), map(_readable, wanted or ()), fillvalue=None))
    different = next(((i, pair) for i, pair in pairs if pair[0] != pair[1]), None)
    if not classes or not wanted or different is None:
        return ""
    i, (name, other) = different
    if name is None:
        first = f"class {i}, {other!r}, is missing"
    elif other is None:
        first = f"class {i}, {name!r}, is not among them"
    else:
        first = f"class {i} is {name!r} in place of {other!r}"
    return (
        f"got {len(classes)} where {len(wanted)} are wanted, and {first}; name all in each source: classes: [...], or "
        "read both as parts of one source"
    )


def _given_names(model: ModelSpec) -> tuple[str, ...] | None:
    """Return the names in `serve.model.classes`, or in the file that it names. Raises ConfigError."""
    if model.classes is None or isinstance(model.classes, tuple):
        return model.classes
    try:
        text = Path(model.classes).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        rule = f"must be a list of names, or a text file with one on each line, or a JSON file: {error}"
        raise ConfigError([Problem("serve.model.classes", rule)]) from error
    if Path(model.classes).suffix.lower() == ".json":
        return _names_in_json(model.classes, text)
    names = text.rstrip().splitlines()
    if not all(map(str.strip, names)) or not names:
        at = next((i for i, name in enumerate(names, start=1) if not name.strip()), 1)
        raise ConfigError(
            [Problem(f"{model.classes}:{at}:", "must be the name of a class, got an empty line", line=at)]
        )
    return tuple(map(str.strip, names))


def _with_keys_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object. Raise ValueError if a key stands there twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key stands twice in an object")
    return found


def _names_in_json(path: str, text: str) -> tuple[str, ...]:
    """Return the names of a JSON file: a list, or an object from each output's number to its name, which may be the
    value of `id2label`. A name may be a list that ends with it: `["n01440764", "tench"]`. Raises ConfigError."""

    def fault(rule: str, at: int | None = None) -> ConfigError:
        return ConfigError([Problem(f"{path}:" if at is None else f"{path}:{at}:", rule, line=at)])

    try:
        found = json.loads(text, object_pairs_hook=_with_keys_once)
    except json.JSONDecodeError as error:
        raise fault(f"is not valid JSON: {error.msg}", error.lineno) from error
    except (RecursionError, ValueError) as error:  # nested too deep; an integer of too many digits
        raise fault(f"cannot be read as JSON: {error}") from error
    place = ""
    if isinstance(found, dict) and "id2label" in found:
        place, found = "id2label ", found["id2label"]
    if isinstance(found, dict):
        numbers = list(map(str, range(len(found))))
        if others := found.keys() - set(numbers):
            rule = f"must have the numbers of all outputs as keys, 0 to {len(found) - 1}, got {min(others)!r}"
            raise fault(f"{place}{rule}")
        found = [found[number] for number in numbers]
    if not isinstance(found, list) or not found:
        raise fault(f"{place}must be a list of names, or an object of them by the numbers of outputs")
    names = [value[-1] if isinstance(value, list) and value else value for value in found]
    for number, name in enumerate(names):
        if not isinstance(name, str) or not name.strip():
            raise fault(f"{place}must name output {number} by a text that is not empty, got {show(name)}")
    return tuple(map(str.strip, names))


def check_classes(
    engine: Engine,
    path: str,
    image: ImageSpec,
    device: torch.device,
    classes: tuple[str, ...] | None,
    activation: Activation,
) -> torch.Tensor:
    """Run one image of noise. Raise ConfigError unless the result is logits, one for each of the classes. Returns them,
    [1, classes]."""
    height, width, channels = image.shape
    try:
        logits = run_in_thread(lambda: engine.run(noise_images(1, image, device)))
    except Exception as error:  # of the libraries and of a model's own code, which have no common base
        rule = f"fails on an image of {image.dtype} {channels}x{height}x{width}: {reason_of(error)}"
        raise model_error(path, rule) from error
    if logits.ndim != 2:
        raise model_error(path, f"must give logits [N, classes], gives {logits.ndim} axes: {list(logits.shape)}")
    if logits.shape[1] == 1 and activation == "softmax":
        _LOG.warning(
            "%s gives one output for an image, whose probability among all outputs is always 1: take the logits of a "
            "prediction, or export a model with an output for each class",
            path,
        )
    if classes is not None and len(classes) != logits.shape[1]:
        if classes != engine.info.classes:
            rule = f"must name each of the {logits.shape[1]} outputs of {path}, names {len(classes)}"
            raise ConfigError([Problem("serve.model.classes", rule)])
        raise model_error(path, f"names {len(classes)} classes but gives {logits.shape[1]} logits; export it again")
    return logits


def check_answers(engine: Engine, path: str, image: ImageSpec, device: torch.device, alone: torch.Tensor) -> None:
    """Raise ConfigError if an image's logits depend on the other images of its batch, or differ when it runs again, or
    if the model gives probabilities, of which `Prediction` would compute the softmax again.

    alone: the logits of one image of noise, as `check_classes` returns them.
    """
    batch = black_images(min(2, engine.batch), image, device)
    batch[-1:] = noise_images(1, image, device)
    with _locating_batches(engine, path):
        together = run_in_thread(lambda: engine.run(batch))
    apart, largest = difference(together[-1:], alone), float(alone.abs().max().nan_to_num())
    if apart > max(_UNSTABLE_AT_LEAST, _UNSTABLE * largest):
        when = "next to another one than alone" if len(batch) > 1 else "the second time"
        rule = f"gives an image other logits {when}, by up to {apart:.3g}"
        raise model_error(path, f"{rule}, as models in training mode do; export it in eval mode (model.eval())")
    sums = together.sum(dim=1)
    if together.shape[1] > 1 and bool((together >= 0).all() & ((sums - 1).abs() < _UNSTABLE_AT_LEAST).all()):
        rule = "must give logits, gives probabilities: its outputs are not negative and their sum is 1"
        raise model_error(path, f"{rule}; export it without its softmax, or with a logarithm after it")


def warm_up_all(engines: Iterable[Engine], path: str) -> None:
    """Call `warm_up` of each engine. Raises ConfigError where one cannot run the batches that it will get."""
    for engine in engines:
        with _locating_batches(engine, path):
            engine.warm_up()


@contextmanager
def _locating_batches(engine: Engine, path: str) -> Iterator[None]:
    """Name the file, and the batches, in errors of a model that cannot run them."""
    try:
        yield
    except GpuflowError:
        raise
    except Exception as error:  # of the libraries and of a model's own code, which have no common base
        rule = f"fails on batches of up to {engine.batch} images: {reason_of(error)}"
        raise model_error(path, f"{rule}; set serve.model.batch to fewer, or export the model for them") from error


def refuse_other_preprocessing(info: ModelInfo, pipeline: Pipeline, path: str, *, force: bool, trust: bool) -> None:
    """Raise ConfigError, with a diff, if the pipeline is not the one that the model was trained with.

    Args:
        info: the file's metadata.
        pipeline: runs before the model.
        path: the model's file.
        force: accept any pipeline.
        trust: accept any pipeline before a file that does not record its preprocessing.
    """
    if force or info.preprocessing == pipeline.fingerprint or (trust and info.preprocessing is None):
        return
    if info.preprocessing is None:
        raise model_error(
            path,
            f"does not record what preprocessing it was trained with, so that the stages of {pipeline.name} cannot be "
            "checked: write it with gpuflow train, gpuflow.save_checkpoint or gpuflow export, or, if you know that the "
            "stages are right, set serve.model.preprocessing=trust and name its classes in serve.model.classes",
        )
    if info.folded is not None and pipeline.lines == (*(info.stages or ()), info.folded):
        raise _folded_stage_repeated(path, info.folded, pipeline.name)
    lines = [
        f"was trained with preprocessing {info.preprocessing}, the stages of {pipeline.name} are "
        f"{pipeline.fingerprint}; take the stages that it was trained with, or set serve.model.force=true"
    ]
    if info.stages is not None:
        trained, ours = "what the model was trained with", f"the stages of {pipeline.name}"
        every = len(info.stages) + len(pipeline.lines)
        lines += difflib.unified_diff(info.stages, pipeline.lines, trained, ours, lineterm="", n=every)
    raise model_error(path, "\n".join(lines))


def _folded_stage_repeated(path: str, folded: str, pipeline: str) -> ConfigError:
    """Return the error that a pipeline contains a stage that is also inside the model."""
    return model_error(path, f"has {folded} inside and takes uint8 pixels; remove that stage from {pipeline}.stages")
