"""The blocks of a YAML file as values: keys, types, defaults, the rules between keys; `Config` holds them all.

The last functions compare the fields of records with the stages that take numbers from them, or cannot mix them.

Only this package imports pydantic. What the keys mean for people stands in the docstrings; `gpuflow schema` prints it.
"""

from __future__ import annotations

import dataclasses
import re
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic
from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag

from gpuflow.decode.preset import Preset
from gpuflow.errors import ConfigError, Key, Problem, suggest
from gpuflow.pipeline.bounds import UNIONS
from gpuflow.pipeline.program import Program
from gpuflow.pipeline.records import RecordValue, field_problems_of
from gpuflow.pipeline.stage import Mixing
from gpuflow.pipeline.targets import TargetRules
from gpuflow.pipeline.views import AnyProgram, ViewsProgram, named_programs
from gpuflow.sources import KINDS, Source, SourceSpec, fields_of
from gpuflow.sources.field_spec import conflict
from gpuflow.sources.split_spec import SplitSpec, is_rule
from gpuflow.sources.storage import CacheSpec

OnError = Literal["raise", "replace", "skip"]
Positive = Annotated[int, Field(ge=1)]
Samples = Annotated[int, Field(ge=1, le=1_000_000)]
Workers = Annotated[int, Field(ge=1, le=1024)]
"""Threads, processes, queues: far more than any machine has use for, so that a mistyped number is found at once."""
Pixels = Annotated[int, Field(ge=1, le=65_535)]
Seconds = Annotated[float, Field(gt=0, le=1_000_000)]
"""Eleven days: a longer wait is none that anyone means."""


class _Block(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, protected_namespaces=(), allow_inf_nan=False)

    def problems(self) -> Iterator[Problem]:
        """Yield a problem for each broken rule between keys, of inner blocks too, its path from this block on."""
        yield from self.broken_rules()
        for name, value in self:
            if isinstance(value, _Block):
                yield from (problem.below(name) for problem in value.problems())

    def broken_rules(self) -> Iterator[Problem]:
        """Yield a problem for each broken rule between the keys of this block."""
        yield from ()


class BatchSpec(_Block):
    """How many samples make a batch: `size` or `global`, one of them.

    Args:
        size: samples of a batch on each rank.
        global: samples of a batch on all ranks together; the number of ranks must divide it.
        drop_last: leave out the last batch of an epoch where it would be smaller than the others.
    """

    size: Samples | None = None
    global_size: Samples | None = Field(default=None, alias="global")
    drop_last: bool = False

    def broken_rules(self) -> Iterator[Problem]:
        if (self.size is None) == (self.global_size is None):
            rule = "needs size (of a rank) or global (of all ranks), one of them"
            yield conflict((), rule)


class SaveSpec(_Block):
    """How often `gpuflow train` writes a checkpoint within an epoch: by `steps` or by `minutes`, one of them.

    Args:
        steps: after this many steps.
        minutes: after this many minutes.
    """

    steps: Positive | None = None
    minutes: Annotated[float, Field(gt=0, le=1_000_000)] | None = None

    def broken_rules(self) -> Iterator[Problem]:
        if (self.steps is None) == (self.minutes is None):
            yield conflict((), "needs steps or minutes, one of them")


class TrainSpec(_Block):
    """What `gpuflow train` trains, how, and how long.

    Args:
        model: a classification model of torchvision, by name, or of timm as `timm:NAME`.
        pretrained: the weights to start from. `true`: the library's own, from its cache on this machine, without a
            download; `download`: the same, downloaded where they are not in the cache; the name of weights of
            torchvision, such as IMAGENET1K_V1, from the cache; or a file (.pt, .pth, .safetensors).
        epochs: how many times the pipeline `train` is run through.
        loss: `auto` is cross_entropy for one class a sample, bce (binary cross entropy) for several, and mse for
            numbers.
        label_smoothing: the share of each label that is spread over the classes in training; for cross_entropy, bce.
        optimizer: SGD with Nesterov momentum 0.9, or AdamW.
        lr: the highest learning rate, after the warm-up; by default 0.1 for 256 samples in a step of all ranks with sgd
            and 0.001 for 1024 with adamw, and in proportion for more or fewer.
        weight_decay: the optimizer's weight decay; by default 0.0001 with sgd, and with adamw 0.05, there without
            biases and the weights of norms.
        schedule: how the learning rate falls after the warm-up: along a cosine to 0, or in steps.
        step_epochs: for the schedule step: the epochs from one step to the next; by default a third of all.
        step_factor: for the schedule step: what the rate is multiplied by at each step; 0.1 by default.
        warmup_epochs: the epochs in which the learning rate rises, which may be a part of one; by default 5% of all
            steps, in short runs 100 steps or 30%.
        amp: compute the model in bfloat16 where torch's autocast allows it. Weights stay float32.
        ema: the decay of an exponential moving average of the weights, such as 0.999, which is then validated and
            served. Over the first steps it rises to this value.
        tensorboard: also write the numbers of each epoch for TensorBoard, to the folder `tensorboard` in `out`.
        out: the directory for checkpoints and results, of one run at a time.
        save_every: how often a checkpoint is written within an epoch; one is also written after each epoch.
        size: the `size` in pixels of every stage of train and val that has one, also where YAML's anchors share their
            stages with others; by default what the stages say.
    """

    model: str = "resnet18"
    pretrained: bool | Annotated[str, Field(min_length=1)] = False
    epochs: Annotated[int, Field(ge=1, le=1_000_000)] = 10
    loss: Literal["auto", "cross_entropy", "bce", "mse", "l1", "smooth_l1"] = "auto"
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0
    optimizer: Literal["sgd", "adamw"] = "sgd"
    lr: Annotated[float, Field(gt=0)] | None = None
    weight_decay: Annotated[float, Field(ge=0)] | None = None
    schedule: Literal["cosine", "step"] = "cosine"
    step_epochs: Positive | None = None
    step_factor: Annotated[float, Field(gt=0, lt=1)] | None = None
    warmup_epochs: Annotated[float, Field(ge=0)] | None = None
    amp: Literal["bf16"] | None = None
    ema: Annotated[float, Field(gt=0, lt=1)] | None = None
    tensorboard: bool = False
    out: str = "runs/train"
    save_every: SaveSpec = SaveSpec(minutes=10.0)
    size: Pixels | None = None

    def broken_rules(self) -> Iterator[Problem]:
        for key in ("step_epochs", "step_factor"):
            if getattr(self, key) is not None and self.schedule != "step":
                action = "remove it, or set train.schedule=step"
                yield conflict(key, "is for the schedule step, but this one is cosine", action)
        if self.label_smoothing and self.loss in ("mse", "l1", "smooth_l1"):
            yield conflict("label_smoothing", f"is for cross_entropy and bce, but the loss is {self.loss}", _REMOVE)
        if self.warmup_epochs is not None and self.warmup_epochs > self.epochs:
            rule = f"must be <= train.epochs, which is {self.epochs}"
            yield Problem.of("warmup_epochs", rule, self.warmup_epochs, code="config.conflict")


class TensorrtSpec(_Block):
    """The batch sizes that TensorRT engines are built for, besides `batch`, and where the engines are kept.

    Args:
        min_batch: the smallest batch that an engine takes.
        opt_batch: the batch size that an engine is tuned for; by default `batch`.
        cache: the directory for built engines; by default one in the user's cache folder.
    """

    min_batch: Samples = 1
    opt_batch: Samples | None = None
    cache: str | None = None


Activation = Literal["softmax", "sigmoid", "none"]


class ModelSpec(_Block):
    """The model that is served, and how it runs.

    Args:
        file: a checkpoint of `gpuflow train` (.pt), or what `gpuflow export` makes of it (.onnx, .pt2).
        engine: the library that runs the model; `auto` chooses it by the file's suffix.
        batch: the most images that the model runs on at a time.
        instances: how many copies of the model run at the same time.
        timeout_ms: how long the model waits, after a batch, for the next requests of the callers that it answered, in
            milliseconds.
        compile: compile the model with torch.compile; for the engine torch.
        cuda_graphs: replay the model as CUDA graphs; for the engine torch on a GPU. `auto`: for the batch sizes where
            that can be captured and gives the same logits; `true`: it is an error where not.
        precision: the data type that the model computes in.
        force: serve a model that was trained with other preprocessing, which is an error otherwise.
        preprocessing: `check`: the file must record that it was trained with these stages; `trust`: serve a file that
            records nothing, such as one that gpuflow did not write. A record is checked in either case.
        classes: the names of the model's outputs, as a list, as a text file with one name on each line, or as a JSON
            file: a list, an object by number such as index_to_name.json, or a config.json with id2label; by default
            those that the file records.
        activation: what becomes of the model's outputs: `softmax` gives the probability of each class among all,
            `sigmoid` that of each class alone, as an image may have several; `none` keeps numbers as they are. By
            default what the file records, or softmax.
        via: what runs a TensorRT engine: gpuflow's own code, or torchpipe's node.
        tensorrt: settings of the engine tensorrt.

    Examples:
        >>> ModelSpec(file="resnet50.onnx").runtime
        'onnxruntime'
    """

    file: str
    engine: Literal["auto", "torch", "onnxruntime", "tensorrt"] = "auto"
    batch: Samples = 16
    instances: Workers = 1
    timeout_ms: Annotated[float, Field(ge=0, le=60_000)] = 2.0
    compile: bool = False
    cuda_graphs: bool | Literal["auto"] = "auto"
    precision: Literal["float32", "float16", "bfloat16"] = "float32"
    force: bool = False
    preprocessing: Literal["check", "trust"] = "check"
    classes: Annotated[str, Field(min_length=1)] | Annotated[tuple[str, ...], Field(min_length=1)] | None = None
    activation: Activation | None = None
    via: Literal["python", "torchpipe"] = "python"
    tensorrt: TensorrtSpec = TensorrtSpec()

    @property
    def runtime(self) -> str:
        """Return `engine`, or, if it is `auto`, the engine that takes the file's suffix; an empty text if none does."""
        takes = (name for name, suffixes in _SUFFIXES.items() if Path(self.file).suffix in suffixes)
        return next(takes, "") if self.engine == "auto" else self.engine

    def broken_rules(self) -> Iterator[Problem]:
        suffix = Path(self.file).suffix
        known = sorted({known for suffixes in _SUFFIXES.values() for known in suffixes})
        if suffix not in known:
            rule = f"must end in {', '.join(known[:-1])} or {known[-1]}"
            yield Problem.of("file", rule, self.file, code="config.range")
            return
        runtime = self.runtime
        if suffix not in _SUFFIXES[runtime]:
            takes = " and ".join(_SUFFIXES[runtime])
            rule = f"is {runtime}, which takes {takes} files, but the model's file is {self.file!r}"
            yield conflict("engine", rule, "use auto")
        for key in ("compile", "cuda_graphs"):
            if getattr(self, key) is True and runtime != "torch":
                yield conflict(key, f"is for the engine torch, but this one is {runtime}", _REMOVE)
        if self.precision != "float32" and runtime != "tensorrt" and suffix != ".pt":
            rule = f"is {self.precision}, but {runtime} runs {suffix} files as they were exported"
            yield conflict("precision", rule, _REMOVE)
        if self.via == "torchpipe" and runtime != "tensorrt":
            yield conflict("via", f"is for the engine tensorrt, but this one is {runtime}", _REMOVE)
        if self.via == "torchpipe" and self.precision == "bfloat16":
            action = "use float16, float32 or via: python"
            yield conflict("precision", "is bfloat16, which torchpipe does not build", action)
        low = self.tensorrt.min_batch
        best = self.tensorrt.opt_batch
        if low > self.batch:
            rule = f"must be <= serve.model.batch, which is {self.batch}"
            yield Problem.of(("tensorrt", "min_batch"), rule, low, code="config.conflict")
        elif best is not None and not low <= best <= self.batch:
            rule = f"must be within min_batch and batch, {low} to {self.batch}"
            yield Problem.of(("tensorrt", "opt_batch"), rule, best, code="config.conflict")
        if best is not None and self.via == "torchpipe":
            rule = "has no effect with via: torchpipe, which tunes for batch"
            yield conflict(("tensorrt", "opt_batch"), rule, _REMOVE)


_REMOVE = "remove it"
_SUFFIXES = {"torch": (".pt", ".pt2"), "onnxruntime": (".onnx",), "tensorrt": (".onnx",)}
"""The files that each engine takes; the first engine to take one is `auto`'s choice."""


class PresetKeys(_Block):
    """torchpipe's own operators in place of the first stages, to match an old deployment.

    Args:
        preset: decode and resize with torchpipe's own operators, on the CPU or on a GPU, before the stages.
        height: the height of the preset's result in pixels; a preset needs it.
        width: the width of the preset's result in pixels; a preset needs it.
        color: the preset's order of channels; rgb by default.
    """

    preset: Literal["torchpipe_cpu", "torchpipe_gpu"] | None = None
    height: Pixels | None = None
    width: Pixels | None = None
    color: Literal["rgb", "bgr"] | None = None

    def broken_rules(self) -> Iterator[Problem]:
        for key, value in (("height", self.height), ("width", self.width), ("color", self.color)):
            if value is not None and self.preset is None:
                action = "remove it or add preset: torchpipe_cpu"
                yield conflict(key, "belongs to a preset, and there is none", action)
            if value is None and self.preset is not None and key != "color":
                yield Problem.of("preset", f"needs the key {key!r} next to it: an integer", code="config.missing_key")

    def head(self) -> tuple[Preset, ...]:
        """Return the preset as the first stage of a pipeline; an empty tuple if there is none."""
        if self.preset is None:
            return ()
        assert self.height is not None and self.width is not None
        return (Preset(name=self.preset, height=self.height, width=self.width, color=self.color or "rgb"),)


class ViewSpec(_Block):
    """A view: stages that make one or more images of each decoded image.

    Args:
        count: how many images the view makes of each decoded image; each draws different random numbers.
        stages: what happens to each decoded image, in this order.
    """

    count: Annotated[int, Field(ge=1, le=1000)] = 1
    stages: tuple[Any, ...]


class TargetsSpec(_Block):
    """Which boxes of a sample a batch keeps; the labels, masks and keypoints of others are left out with them.

    Args:
        invalid: what happens to an instance whose annotation is incomplete, such as a box without area or no mask:
            `drop` leaves it out and counts it, `raise` is an error when the pipeline is loaded.
        min_area: the least area of a box in pixels of the result.
        min_visibility: the least part of a box, 0 to 1, that crops and warps leave inside the image.
    """

    invalid: Literal["drop", "raise"] = "drop"
    min_area: Annotated[float, Field(ge=0)] = 1.0
    min_visibility: Annotated[float, Field(ge=0, le=1)] = 0.0

    @property
    def rules(self) -> TargetRules:
        """Return the rules for the code that maps records."""
        return TargetRules(min_area=self.min_area, min_visibility=self.min_visibility)


class PipelineSpec(PresetKeys):
    """A pipeline: a part of the source, through these stages, in batches.

    Args:
        split: the part of `source.split` that it reads, or `all` for the whole source; by default the part that has the
            pipeline's name.
        stages: what happens to each image, in this order; the first stage is decode, or there is a preset.
        views: in place of `stages`: several lists of stages by name, which share one decoding of each image. The batch
            then has a mapping of these names to tensors [count, N, C, H, W].
        decode: the parameters of decode for `views`.
        batch: how many samples make a batch.
        shuffle: draw a new order of the samples for each epoch.
        on_error: what happens to a bad sample in this pipeline; by default what `run.on_error` says.
        targets: which boxes of a sample a batch keeps.
    """

    split: str | None = None
    stages: tuple[Any, ...] = ()
    views: dict[str, ViewSpec] | None = None
    decode: dict[str, Any] | None = None
    batch: BatchSpec = BatchSpec(size=64)
    shuffle: bool = False
    on_error: OnError | None = None
    targets: TargetsSpec = TargetsSpec()

    def broken_rules(self) -> Iterator[Problem]:
        yield from super().broken_rules()
        if self.views is None:
            if "stages" not in self.model_fields_set:
                others = "" if self.preset is not None else ", or views"
                yield Problem.of((), f"needs the key 'stages': a list{others}", code="config.missing_key")
            if self.decode is not None:
                yield conflict("decode", "is for views, and there are none", "put decode before the stages")
            return
        if not self.views:
            yield Problem.of("views", "must name at least one view, got none", code="config.missing_key")
        if "stages" in self.model_fields_set:
            yield conflict("views", "stands in place of stages, and there are both", "remove one of them")
        if self.preset is not None:
            yield conflict("views", "cannot follow a preset", "remove the preset, or use stages")


class ServeSpec(PresetKeys):
    """The stages whose result the served model gets, and the model; without a model only images are prepared.

    Args:
        stages: what happens to each image, in this order; random stages cannot serve.
        model: the model that is served, and how it runs.
    """

    stages: tuple[Any, ...] = ()
    model: ModelSpec | None = None

    def broken_rules(self) -> Iterator[Problem]:
        yield from super().broken_rules()
        if self.preset is None and "stages" not in self.model_fields_set:
            yield Problem.of((), "needs the key 'stages': a list, or a preset", code="config.missing_key")


_AMOUNT = r"(\d{1,18}(?:\.\d{1,18})?)\s*([A-Za-z]+)"
_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}


def _bytes(value: Any) -> Any:
    """Convert `512MB` or `2 GiB` to a number of bytes."""
    match = re.fullmatch(_AMOUNT, value.strip()) if isinstance(value, str) else None
    if match is not None and (unit := _UNITS.get(match[2].upper())):
        return int(float(match[1]) * unit)
    if value is None or (isinstance(value, int) and not isinstance(value, bool)):
        return value
    raise ValueError("bytes, or text with a unit such as 512MB or 2GiB")


Bytes = Positive | Annotated[str, Field(pattern=rf"^\s*{_AMOUNT}\s*$")]


class RunSpec(_Block):
    """How pipelines run; none of these keys changes what becomes of a sound image.

    Args:
        threads: threads that decode on the CPU and run the stages, a chunk of samples in each call of C code; `auto`:
            the cores that this process may use, shared among the ranks.
        readers: threads that only read; `auto`: none for local files, 16 for URLs, 2 where a GPU decodes (3 from 12
            threads on).
        processes: worker processes that read and decode instead of the threads; `auto`: one for each thread, from two
            threads and 10,000 samples on, where Python code runs for each image, else none. A service where the CPU
            decodes counts as many samples. Where a GPU decodes there are none.
        decoder_calls: how many chunks of images a GPU's decoder gets at a time; `auto`: two while the GPU waits for
            batches most of its time. Two load more images, which slows a training whose steps are no CUDA graphs.
        prefetch: finished batches that wait for the training loop.
        on_error: what happens to a bad sample: `raise` stops, `replace` takes another one, `skip` leaves it out; by
            default `replace` in pipelines with `shuffle` or `batch.drop_last`, and `skip` in others.
        max_bad: the most bad samples that are allowed: a number of each process, or a fraction of the source; by
            default no limit.
        bad_file: a file that lists each bad sample, as JSON lines.
        audit: a file that lists the samples of each step, as JSON lines for `gpuflow audit`; each rank has its own,
            such as audit.0.jsonl for audit.jsonl.
        timeout_s: the longest wait for a batch or an answer, in seconds. A server that files come from is tried for
            0.7 of it.
        ray_wait_s: with `--on ray`, how long the cluster may run none of the command's processes, in seconds.
        memory_limit: the most GPU memory of the loader's batches and buffers, in bytes or with a unit, such as 2GB.
        deterministic: keep `decode.cpu_share` fixed, so that every run decodes the same images by the same means.
        nvtx: mark what each stage does, and the loop's wait, as NVTX ranges for Nsight Systems, where there is a GPU.
    """

    threads: Workers | Literal["auto"] = "auto"
    readers: Annotated[int, Field(ge=0, le=1024)] | Literal["auto"] = "auto"
    processes: Annotated[int, Field(ge=0, le=1024)] | Literal["auto"] = "auto"
    decoder_calls: Annotated[int, Field(ge=1, le=2)] | Literal["auto"] = "auto"
    prefetch: Workers = 3
    on_error: OnError | None = None
    max_bad: Annotated[int, Field(ge=0)] | Annotated[float, Field(ge=0, le=1)] | None = None
    bad_file: str | None = None
    audit: Annotated[str, Field(min_length=1)] | None = None
    timeout_s: Seconds = 120.0
    ray_wait_s: Seconds = 600.0
    memory_limit: Annotated[Positive | None, BeforeValidator(_bytes, json_schema_input_type=Bytes | None)] = None
    deterministic: bool = False
    nvtx: bool = False


@cache
def keys_of(spec: type[Any]) -> type[BaseModel]:
    """Return a block with a key for each field of a dataclass, which checks the types of values, not their bounds.

    What a kind of source must have is not required here: `spec_class` reports it.
    """
    if spec is CacheSpec:
        return CacheKeys
    hints = typing.get_type_hints(spec)
    missing = None if issubclass(spec, SourceSpec) else ...
    keys: dict[str, Any] = {
        field.name: (_yaml_type(hints[field.name]), missing if field.default is dataclasses.MISSING else field.default)
        for field in dataclasses.fields(spec)
    }
    return pydantic.create_model(spec.__name__, __base__=_Block, __doc__=spec.__doc__, **keys)


def _yaml_type(hint: Any) -> Any:
    """Return the type of a dataclass's field as YAML gives it: blocks for dataclasses, without pairs for mappings."""
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if hint is SourceSpec:
        return dict
    if dataclasses.is_dataclass(hint):
        return keys_of(hint)  # type: ignore[arg-type]
    if origin is Mapping:
        return dict[parts[0], _yaml_type(parts[1])]  # type: ignore[misc,valid-type]
    if origin in UNIONS:
        if SplitSpec in parts:
            return _SPLIT
        return typing.Union[tuple(map(_yaml_type, alternatives(parts)))]  # noqa: UP007  # of a tuple
    return tuple[_yaml_type(parts[0]), ...] if origin is tuple and parts[-1] is Ellipsis else hint  # type: ignore[misc]


def alternatives(parts: Sequence[Any]) -> Sequence[Any]:
    """Return what a union's value may be in YAML, which has mappings where Python may have pairs."""
    mappings = [part for part in parts if typing.get_origin(part) is Mapping]
    return [*mappings, *filter(dataclasses.is_dataclass, parts)] if mappings else parts


class CacheKeys(_Block):
    __doc__ = CacheSpec.__doc__

    dir: str
    size: Annotated[int, BeforeValidator(_bytes, json_schema_input_type=Bytes)]


_SPLIT: Any = Annotated[
    Annotated[dict[str, float], Tag("fractions")] | Annotated[keys_of(SplitSpec), Tag("rule")],
    Discriminator(lambda block: "rule" if isinstance(block, BaseModel) or is_rule(block) else "fractions"),
]

SourceKeys = pydantic.create_model(
    "SourceKeys",
    __doc__="The keys of all kinds of sources.",
    **dict.fromkeys(KINDS, (str, None)),  # type: ignore[call-overload]
    **{
        name: (field.annotation, None)
        for spec in KINDS.values()
        for name, field in keys_of(spec).model_fields.items()
        if name not in KINDS
    },
)


class Document(_Block):
    """A file of gpuflow: how an image becomes a tensor, for training and for serving, or `serve` alone.

    Args:
        source: where the samples are.
        preprocess: a place for a list of stages that pipelines and serve share by a YAML anchor.
        pipelines: by name, such as train and val.
        train: what `gpuflow train` trains, and how long.
        serve: the stages and the model that answer requests.
        run: how pipelines run.
    """

    source: pydantic.SkipValidation[SourceKeys] = None  # type: ignore[valid-type]
    preprocess: Any = None
    pipelines: dict[str, PipelineSpec] = {}
    train: TrainSpec = TrainSpec()
    serve: ServeSpec | None = None
    run: RunSpec = RunSpec()

    def problems(self, source: SourceSpec | None = None) -> Iterator[Problem]:
        """Yield a problem for each broken rule between keys. source: None where there is no block, or it is wrong."""
        parts = _part_names(self.pipelines, source)
        key = "splits" if source is not None and source.splits else "split"
        blocks = "source", "pipelines"
        given = [name for name in blocks if name in self.model_fields_set and getattr(self, name) is not None]
        for name in blocks if given or self.serve is None else ():
            if name not in given:
                rule = f"needs the key {name!r}; only a file with neither source nor pipelines may have serve alone"
                yield Problem.of((), rule, code="config.missing_key")
        if "pipelines" in given and not self.pipelines:
            rule = "must name at least one pipeline, such as train, got none"
            yield Problem.of("pipelines", rule, code="config.missing_key")
        if "serve" in self.pipelines:
            rule = "takes the name of the block serve"
            yield conflict(("pipelines", "serve"), rule, "give this pipeline another one")
        for name, pipeline in self.pipelines.items():
            found = [*pipeline.problems(), *(_part_problems(name, pipeline, parts, key) if source is not None else ())]
            yield from (problem.below("pipelines", name) for problem in found)
        if _WHOLE in parts:
            rule = f"takes the name that means the whole source, {_WHOLE}"
            by_rule = source.rule if source is not None else None
            inner = () if by_rule is None else ("parts" if by_rule.parts else "files",)
            yield conflict(("source", key, *inner, _WHOLE), rule, "give this part another one")
        yield from super().problems()


def _part_names(pipelines: Mapping[str, PipelineSpec], source: SourceSpec | None) -> tuple[str, ...]:
    """Return the names of the source's parts; where a column has them, those that pipelines read."""
    if source is None or source.part_names or source.rule is None:
        return source.part_names if source is not None else ()
    return tuple(dict.fromkeys(block.split or name for name, block in pipelines.items() if block.split != _WHOLE))


def _part_problems(name: str, pipeline: PipelineSpec, parts: Sequence[str], key: str) -> Iterator[Problem]:
    """Yield a problem where a pipeline does not read a part of the source, and does not ask for the whole source.

    key: of the source's parts, split or splits.
    """
    if pipeline.split is None and parts and name not in parts:
        some = ", ".join(parts[:20]) + ", ..." * (len(parts) > 20)
        rule = f"is not a part of source.{key}, which has {some}"
        action = f"{suggest(name, parts, else_all=False)} set split: NAME, or split: {_WHOLE} for the whole source"
        yield conflict((), rule, action.strip())
    if pipeline.split is not None and pipeline.split not in (*parts, _WHOLE):
        rule = f"must name a part of source.{key}, or {_WHOLE}"
        yield Problem.of("split", rule, pipeline.split, suggest(pipeline.split, (*parts, _WHOLE)), code="config.range")


_WHOLE = "all"


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """A whole file, checked: its values, and one folded program a pipeline.

    source_block: None where the file has `serve` alone.
    programs: by pipeline name; `serve` stands among them where the file has that block.
    views: by pipeline name, those of the pipelines that have views; they are not among `programs`.
    """

    path: str
    source_block: SourceSpec | None
    pipelines: Mapping[str, PipelineSpec]
    programs: Mapping[str, Program]
    train: TrainSpec
    serve: ServeSpec | None
    run: RunSpec
    views: Mapping[str, ViewsProgram]

    @property
    def source(self) -> SourceSpec:
        """Return the block `source`. Raises ConfigError if there is none."""
        if self.source_block is None:
            raise self._without("source")
        return self.source_block

    @property
    def sources(self) -> tuple[SourceSpec, ...]:
        """Return the source, or those of a mix; none where the file has `serve` alone."""
        return () if self.source_block is None else self.source_block.sources

    def program(self, name: str) -> Program:
        """Return the program of the pipeline of this name, for what takes one image of each sample.

        Raises ConfigError if there is none, with the closest name, or if it has views.
        """
        program = self.any_program(name)
        if isinstance(program, ViewsProgram):
            rule = "are several images of each sample, and this takes one"
            problem = conflict(("pipelines", name, "views"), rule, "name a pipeline with stages")
            raise ConfigError([replace(problem, place=f"{self.path}:")])
        return program

    def any_program(self, name: str) -> AnyProgram:
        """Return the program of the pipeline of this name.

        Raises ConfigError, with the closest name, if there is none.
        """
        if self.source_block is None:
            raise self._without("source")
        if name not in self.pipelines:
            action = suggest(name, self.pipelines)
            problem = Problem.of("pipelines", f"has no pipeline {name!r}", action=action, code="config.unknown_key")
            raise ConfigError([replace(problem, place=f"{self.path}:")])
        return self.views[name] if name in self.views else self.programs[name]

    def serve_block(self) -> ServeSpec:
        """Return the block `serve`. Raises ConfigError if there is none."""
        if self.serve is None:
            raise self._without("serve")
        return self.serve

    def _without(self, block: Literal["source", "serve"]) -> ConfigError:
        examples = {
            "source": "source: {folder: ...} and pipelines: {val: ...}",
            "serve": "serve: {stages: ..., model: ...}",
        }
        action = f"add {examples[block]}"
        return ConfigError(
            [Problem(f"{self.path}:", f"has no block {block}", action=action, code="config.missing_key")]
        )

    def split_of(self, name: str) -> str | None:
        """Return the part of `source.split` that a pipeline reads; None if it reads the whole source, as `serve`
        does."""
        split = self.pipelines[name].split if name in self.pipelines else None
        part = name if split is None else split
        return part if part in self.part_names else None

    @property
    def part_names(self) -> tuple[str, ...]:
        """Return the names of the source's parts; where a column has them, those that pipelines read."""
        return _part_names(self.pipelines, self.source)

    def on_error_of(self, name: str, *, drawn: bool | None = None) -> tuple[OnError, str]:
        """Return what happens to bad samples of a pipeline, and what decides it.

        That is the pipeline's own `on_error`, else `run.on_error`, else the default. By default bad samples are
        replaced where samples are drawn or batches must be full. Elsewhere each sample comes once, so they are skipped.

        drawn: whether a sampler in place of the file's keys draws the samples. None: the file's keys decide.
        """
        pipeline = self.pipelines[name]
        if pipeline.on_error is not None:
            return pipeline.on_error, f"(pipelines.{name}.on_error)"
        if self.run.on_error is not None:
            return self.run.on_error, "(run.on_error)"
        if drawn or (drawn is None and pipeline.shuffle):
            return "replace", "(by default, as samples are drawn)"
        if drawn is None and pipeline.batch.drop_last:
            return "replace", "(by default, as batch.drop_last is true)"
        return "skip", "(by default, as samples are not drawn and batch.drop_last is false)"


# --- the fields of records, against the stages ------------------------------------------------------------------------


def declared_problems(name: str, program: AnyProgram, source: SourceSpec) -> Iterator[Problem]:
    """Yield a problem for each field that a pipeline takes and the source does not declare, or with another type, and
    for each mixing stage where the declared fields cannot be mixed.

    Where fields need no declaration, they are known once the source is open.
    """
    declared = source.declared
    if declared or not any(spec.has_other_fields for spec in source.sources):
        yield from field_problems_of(_taken(name, program), {name: spec.type for name, spec in declared})
    if fields := source.fields_in_full:
        others = [name for name, spec in fields if spec.type not in ("image", "label")]
        classes = any(spec.type == "label" and spec.kind in (None, "class") for _, spec in fields)
        # without a declaration, the others need not be there
        yield from mixing_problems(name, program, others if declared else others[:1], one_class=classes)


def mixing_problems(name: str, program: AnyProgram, fields: Sequence[str], *, one_class: bool) -> Iterator[Problem]:
    """Yield a problem for each mixing stage of a pipeline, if samples have these fields besides image and label, or not
    one class each."""
    if isinstance(program, ViewsProgram) or (one_class and not fields):
        return
    rule, action = "mixes labels, but the samples do not have one class each", "remove the stage or declare a class"
    if fields:
        rule = f"mixes images and labels, but samples also have {', '.join(fields)}"
        action = "remove the stage or these fields"
    for i, stage in enumerate(program.pipeline.stages):
        if isinstance(stage, Mixing):
            at = ("pipelines", name, "stages", i - program.pipeline.heads, stage.stage_name)
            yield conflict(at, rule, action)


def require_record_fields(config: Config, name: str, source: Source) -> None:
    """Raise ConfigError if a source lacks a field that a pipeline takes, or has it with another type."""
    types = {field.name: field.type for field in fields_of(source)}
    problems = list(field_problems_of(_taken(name, config.any_program(name)), types))
    if problems:
        raise ConfigError([replace(problem, place=f"{config.path}:") for problem in problems])


def refuse_record_fields(config: Config, name: str, rule: str, action: str) -> None:
    """Raise ConfigError if the stages of a pipeline, or of `serve`, take numbers from records.

    rule: why they must not, after "takes numbers from each sample's record, and".
    """
    rule = f"takes numbers from each sample's record, and {rule}"
    problems = [
        Problem(f"{config.path}:", rule, action=action, path=at, code="config.conflict")
        for at in _taken(name, config.programs[name])
    ]
    if problems:
        raise ConfigError(problems)


def _taken(name: str, program: AnyProgram) -> Mapping[tuple[Key, ...], RecordValue]:
    """Return what the stages of a pipeline take, by the keys that lead to the parameters in a file."""
    found = dict[tuple[Key, ...], RecordValue]()
    for view, _, one in named_programs(program):
        at, heads = (("views", view), 1) if view else ((), one.pipeline.heads)
        for (i, stage, parameter), value in one.pipeline.record_values.items():
            found["pipelines", name, *at, "stages", i - heads, stage, parameter] = value
    return found
