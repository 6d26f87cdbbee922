"""YAML to values, with every error located: file, line, key, rule, value, next action. All errors at once.

The only file that imports yaml or pydantic. YAML is loaded safely: it names stages from a table and nothing else.
"""

from __future__ import annotations

import dataclasses
import math
import re
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic
import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from gpuflow.decode.preset import Preset
from gpuflow.errors import UNSET, Code, ConfigError, Key, Problem, show, suggest
from gpuflow.pipeline.program import Program, fold
from gpuflow.pipeline.stage import Pipeline, Stage
from gpuflow.pipeline.validate import trace
from gpuflow.sources import SourceSpec

__all__ = [
    "BatchSpec",
    "Config",
    "ModelSpec",
    "PipelineSpec",
    "RunSpec",
    "ServeSpec",
    "TensorrtSpec",
    "TrainSpec",
    "read_config",
]

OnError = Literal["raise", "replace", "skip"]
Positive = Annotated[int, Field(ge=1)]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, protected_namespaces=(), allow_inf_nan=False)


class BatchSpec(_Model):
    """`batch`: samples a step. `size` counts a rank's, `global` all ranks' together."""

    size: Positive | None = None
    global_size: Positive | None = Field(default=None, alias="global")
    drop_last: bool = False


class TrainSpec(_Model):
    """`train`: what `gpuflow train` needs."""

    model: str = "resnet18"
    epochs: Positive = 10
    lr: Annotated[float, Field(gt=0)] = 0.1
    weight_decay: Annotated[float, Field(ge=0)] = 1e-4
    out: str = "runs/train"
    size: Positive | None = None


class TensorrtSpec(_Model):
    """`serve.model.tensorrt`: batch sizes that engines are built for, besides `batch`, and where they are kept."""

    min_batch: Positive = 1
    opt_batch: Positive | None = None
    cache: str | None = None


class ModelSpec(_Model):
    """`serve.model`."""

    file: str
    engine: Literal["auto", "torch", "onnxruntime", "tensorrt"] = "auto"
    batch: Positive = 16
    instances: Positive = 1
    timeout_ms: Annotated[float, Field(ge=0)] = 2.0
    compile: bool = False
    cuda_graphs: bool = False
    precision: Literal["float32", "float16", "bfloat16"] = "float32"
    force: bool = False
    via: Literal["python", "torchpipe"] = "python"
    tensorrt: TensorrtSpec = TensorrtSpec()

    @property
    def runtime(self) -> str:
        """`engine`, with `auto` decided by the file's suffix; empty where the suffix is none that an engine takes."""
        takes = (name for name, suffixes in _SUFFIXES.items() if Path(self.file).suffix in suffixes)
        return next(takes, "") if self.engine == "auto" else self.engine

    def problems(self) -> Iterator[Problem]:
        """A problem for each broken rule between keys, its path from this block on."""
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
            yield _conflict("engine", rule, action="use auto")
        for key in ("compile", "cuda_graphs"):
            if getattr(self, key) and runtime != "torch":
                yield _conflict(key, f"is for the engine torch, but this one is {runtime}")
        if self.precision != "float32" and runtime != "tensorrt" and suffix != ".pt":
            rule = f"is {self.precision}, but {runtime} runs {suffix} files as they were exported"
            yield _conflict("precision", rule)
        if self.via == "torchpipe" and runtime != "tensorrt":
            yield _conflict("via", f"is for the engine tensorrt, but this one is {runtime}")
        if self.via == "torchpipe" and self.precision == "bfloat16":
            rule = "is bfloat16, which torchpipe does not build"
            yield _conflict("precision", rule, action="use float16, float32 or via: python")
        low, best = self.tensorrt.min_batch, self.tensorrt.opt_batch
        if low > self.batch:
            rule = f"must be <= serve.model.batch, which is {self.batch}"
            yield Problem.of(("tensorrt", "min_batch"), rule, low, code="config.conflict")
        elif best is not None and not low <= best <= self.batch:
            rule = f"must be within min_batch and batch, {low} to {self.batch}"
            yield Problem.of(("tensorrt", "opt_batch"), rule, best, code="config.conflict")
        if best is not None and self.via == "torchpipe":
            rule = "has no effect with via: torchpipe, which tunes for batch"
            yield _conflict(("tensorrt", "opt_batch"), rule)


def _conflict(path: str | tuple[str, ...], rule: str, action: str = "remove it") -> Problem:
    return Problem.of(path, rule, action=action, code="config.conflict")


_SUFFIXES = {"torch": (".pt", ".pt2"), "onnxruntime": (".onnx",), "tensorrt": (".onnx",)}
"""The files that each engine takes; the first engine to take one is `auto`'s choice."""


class PresetKeys(_Model):
    """`preset` and its parameters, in a block with `stages`: torchpipe's own operators, which the stages follow."""

    preset: Literal["torchpipe_cpu", "torchpipe_gpu"] | None = None
    height: Positive | None = None
    width: Positive | None = None
    color: Literal["rgb", "bgr"] | None = None

    def problems(self) -> Iterator[Problem]:
        """A problem for each broken rule between keys, its path from this block on."""
        for key in ("height", "width"):
            if self.preset is not None and getattr(self, key) is None:
                yield Problem.of("preset", f"needs the key {key!r} beside it: an integer", code="config.missing_key")
        for key in ("height", "width", "color"):
            if self.preset is None and getattr(self, key) is not None:
                action = "remove it or add preset: torchpipe_cpu"
                yield _conflict(key, "belongs to a preset, and there is none", action)

    def head(self) -> tuple[Preset, ...]:
        """The preset as the first stage of a pipeline; nothing where there is none."""
        if self.preset is None:
            return ()
        assert self.height is not None and self.width is not None
        return (Preset(name=self.preset, height=self.height, width=self.width, color=self.color or "rgb"),)


class PipelineSpec(PresetKeys):
    """One entry of `pipelines`."""

    stages: tuple[Any, ...]
    batch: BatchSpec = BatchSpec(size=64)
    shuffle: bool = False
    on_error: OnError | None = None


class ServeSpec(PresetKeys):
    """`serve`: the stages that the served model sees, and the model; without one only images are prepared."""

    stages: tuple[Any, ...] = ()
    model: ModelSpec | None = None


_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}


def _bytes(value: Any) -> Any:
    """`512MB`, `2 GiB` as a number of bytes."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]+)", value.strip()) if isinstance(value, str) else None
    if match is not None and (unit := _UNITS.get(match[2].upper())):
        return int(float(match[1]) * unit)
    if value is None or (isinstance(value, int) and not isinstance(value, bool)):
        return value
    raise ValueError("bytes, or text with a unit such as 512MB or 2GiB")


class RunSpec(_Model):
    """`run`: how to run, never what comes out."""

    threads: Positive | Literal["auto"] = "auto"
    readers: Annotated[int, Field(ge=0)] | Literal["auto"] = "auto"
    processes: Annotated[int, Field(ge=0)] | Literal["auto"] = "auto"
    prefetch: Positive = 3
    on_error: OnError = "replace"
    max_bad: Annotated[int, Field(ge=0)] | Annotated[float, Field(ge=0, le=1)] | None = None
    bad_file: str | None = None
    timeout_s: Annotated[float, Field(gt=0)] = 120.0
    memory_limit: Annotated[Positive | None, BeforeValidator(_bytes)] = None
    deterministic: bool = False


def _source_keys() -> type[_Model]:
    """The keys of `source`: the fields of SourceSpec, which checks their values. In YAML a split is a mapping."""
    hints = typing.get_type_hints(SourceSpec)
    keys: dict[str, Any] = {field.name: (hints[field.name], field.default) for field in dataclasses.fields(SourceSpec)}
    return pydantic.create_model("SourceKeys", __base__=_Model, **{**keys, "split": (dict[str, float], {})})


SourceKeys = _source_keys()


class _Document(_Model):
    source: SourceKeys  # type: ignore[valid-type]
    preprocess: Any = None
    pipelines: dict[str, PipelineSpec]
    train: TrainSpec = TrainSpec()
    serve: ServeSpec | None = None
    run: RunSpec = RunSpec()


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """A whole file, checked: its values, and one folded program a pipeline.

    programs: by pipeline name; `serve` stands among them where the file has that block.
    """

    path: str
    source: SourceSpec
    pipelines: Mapping[str, PipelineSpec]
    programs: Mapping[str, Program]
    train: TrainSpec
    serve: ServeSpec | None
    run: RunSpec

    def program(self, name: str) -> Program:
        """The program of the pipeline of this name. Raises ConfigError, with the closest name, if there is none."""
        if name not in self.pipelines:
            action = suggest(name, self.pipelines)
            problem = Problem.of("pipelines", f"has no pipeline {name!r}", action=action, code="config.unknown_key")
            raise ConfigError([replace(problem, place=f"{self.path}:")])
        return self.programs[name]


def read_config(path: str | Path, stages: Mapping[str, type[Stage]], overrides: Sequence[str] = ()) -> Config:
    """Read, override, check and fold a YAML file.

    Args:
        path: the file.
        stages: the vocabulary, name to class.
        overrides: dotted assignments such as `run.threads=8` or `pipelines.train.stages.resize.shorter=160`. The
            value is YAML. A list is entered by number, or by the name of the stage in it.

    Raises:
        ConfigError: with every located problem of the file.
    """
    return _Reader(str(path), stages).read(overrides)


# --- YAML with line numbers ------------------------------------------------------------------------------------------


class _Yaml(yaml.SafeLoader):  # type: ignore[misc]
    """Safe YAML in which 1e-3 is a number and a key that stands twice is an error."""

    def compose_mapping_node(self, anchor: str | None) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen: dict[tuple[str, str], yaml.Mark] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == "tag:yaml.org,2002:merge":
                continue
            if (first := seen.setdefault((key.tag, key.value), key.start_mark)) is not key.start_mark:
                raise yaml.MarkedYAMLError(
                    problem=f"key {key.value!r} stands twice, first on line {first.line + 1}; keep one",
                    problem_mark=key.start_mark,
                )
        return node


_Yaml.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:[0-9][0-9_]*)(?:\.[0-9_]*)?[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)


def _lines(loader: _Yaml, node: yaml.Node | None, at: tuple[Key, ...] = ()) -> Iterator[tuple[tuple[Key, ...], int]]:
    """(path, line) of every value in a YAML tree; a key's line for a value in a mapping."""
    if isinstance(node, yaml.MappingNode):
        for key_node, value in node.value:
            key = loader.construct_object(key_node, deep=True)
            yield (*at, key), key_node.start_mark.line + 1
            yield from _lines(loader, value, (*at, key))
    elif isinstance(node, yaml.SequenceNode):
        for i, value in enumerate(node.value):
            yield (*at, i), value.start_mark.line + 1
            yield from _lines(loader, value, (*at, i))


class _Reader:
    """Reads one file, collecting problems until all is seen."""

    def __init__(self, path: str, stages: Mapping[str, type[Stage]]) -> None:
        self._path, self._stages = path, stages
        self._lines: dict[tuple[Key, ...], int] = {}
        self._data: dict[str, Any] = {}
        self._overridden: list[tuple[Any, Key, str]] = []
        """(container, key, override): YAML's aliases share containers, so an override may show in several places."""
        self._problems: list[tuple[float, Problem]] = []

    def read(self, overrides: Sequence[str]) -> Config:
        data = self._data = self._parse()
        for override in overrides:
            self._override(data, override)
        self._stop_if_faulty()
        values = _tuples(data)
        document = None
        try:
            document = _Document.model_validate(values)
        except pydantic.ValidationError as error:
            for fault in _group(error, values):
                self._report(_describe(fault, _Document))
        source = self._source(values.get("source"))
        pipelines = data.get("pipelines")
        blocks = {("pipelines", name): block for name, block in _items(pipelines)} | {("serve",): data.get("serve")}
        programs: dict[str, Program] = {}
        for at, block in blocks.items():
            head = self._head(block) if isinstance(block, dict) and "preset" in block else ()
            stages = block.get("stages", [] if head else None) if isinstance(block, dict) else None
            if isinstance(stages, list):
                program = self._program((*at, "stages"), str(at[-1]), stages, head)
                if program is not None:
                    programs[str(at[-1])] = program
        if document is not None:
            self._check_values(document)
        self._stop_if_faulty()
        assert document is not None and source is not None
        return Config(
            path=self._path,
            source=source,
            pipelines=document.pipelines,
            programs=programs,
            train=document.train,
            serve=document.serve,
            run=document.run,
        )

    # --- problems ---------------------------------------------------------------------------------------------------

    def _report(self, problem: Problem) -> None:
        """Note a problem at its path's line, `x.yaml:12:`, or at the override that set the value."""
        at = problem.path
        if override := self._override_at(at):
            self._complain(override, problem)
            return
        line = next((self._lines[at[:end]] for end in range(len(at), 0, -1) if at[:end] in self._lines), None)
        place = f"{self._path}:{line}:" if line else f"{self._path}:"
        self._problems.append((line or 0, replace(problem, place=place)))

    def _complain(self, override: str, problem: Problem) -> None:
        """Note a problem of an override; those of the file come before them."""
        self._problems.append((math.inf, replace(problem, place=f"override {override!r}:")))

    def _override_at(self, at: Sequence[Key]) -> str | None:
        """The override that set the value at a place, or one that it lies in."""
        found = None
        value: Any = self._data
        for key in at:
            found = next((text for held, k, text in reversed(self._overridden) if held is value and k == key), found)
            inside = key in value if isinstance(value, dict) else isinstance(value, list) and isinstance(key, int)
            if not inside:
                break
            value = value[key]
        return found

    def _stop_if_faulty(self) -> None:
        """Raise what was found: in the order of the file's lines, then what overrides did."""
        if self._problems:
            raise ConfigError([problem for _, problem in sorted(self._problems, key=lambda found: found[0])])

    # --- text to data -----------------------------------------------------------------------------------------------

    def _parse(self) -> dict[str, Any]:
        try:
            text = Path(self._path).read_text(encoding="utf-8")
            loader = _Yaml(text)
            node = loader.get_single_node()
            data = loader.construct_document(node) if node is not None else None
            self._lines = dict(_lines(loader, node))
        except FileNotFoundError:
            siblings = sorted(str(p) for p in Path(self._path).parent.glob("*.yaml"))
            action = suggest(self._path, siblings) if siblings else "give the path of a YAML file"
            raise self._no_file("no such file", action=action) from None
        except (OSError, UnicodeDecodeError) as error:
            raise self._no_file(f"cannot be read as UTF-8 text: {error}") from error
        except yaml.MarkedYAMLError as error:
            line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
            raise self._no_file(f"is not valid YAML: {error.problem}", line=line, code="config.yaml") from error
        except RecursionError:
            rule = "is nested too deeply, or an alias stands inside what it names"
            raise self._no_file(rule, code="config.yaml") from None
        except (yaml.YAMLError, ValueError) as error:
            raise self._no_file(f"is not valid YAML: {error}", code="config.yaml") from error
        if not isinstance(data, dict):
            raise self._no_file("must be a mapping with source and pipelines", data, code="config.type")
        return data

    def _no_file(
        self, rule: str, value: object = UNSET, action: str = "", *, line: str = "", code: Code = "config.file"
    ) -> ConfigError:
        return ConfigError([Problem(f"{self._path}{line}:", rule, value, action, code=code)])

    def _override(self, data: dict[str, Any], override: str) -> None:
        """Apply one `a.b.c=value` in place."""
        dotted_keys, equals, text = override.partition("=")
        if not equals or not dotted_keys.strip():
            rule = "must be of the form key.key=value, such as run.threads=8"
            self._complain(override, Problem.of((), rule, code="config.override"))
            return
        try:
            value = yaml.load(text, _Yaml) if text else ""
        except (yaml.YAMLError, ValueError) as error:
            rule = f"the value is not valid YAML: {getattr(error, 'problem', None) or error}"
            self._complain(override, Problem.of((), rule, code="config.yaml"))
            return
        at: list[Key] = []
        holder: Any = None
        target: Any = data
        for word in dotted_keys.strip().split("."):
            if target is None:
                target = holder[at[-1]] = {}
                self._overridden.append((holder, at[-1], override))
            keys = _enter(target, word)
            if isinstance(keys, Problem):
                self._complain(override, keys.below(*at))
                return
            for key in keys:
                at.append(key)
                holder, target = target, target.get(key) if isinstance(target, dict) else target[key]
        holder[at[-1]] = value
        self._overridden.append((holder, at[-1], override))

    # --- the source and the stages ----------------------------------------------------------------------------------

    def _source(self, data: Any) -> SourceSpec | None:
        """The block `source`; None where its keys are at fault, which the document's check tells."""
        try:
            keys = SourceKeys.model_validate(data)
        except pydantic.ValidationError:
            return None
        try:
            return SourceSpec(**keys.model_dump())
        except ConfigError as error:
            for problem in error.problems:
                self._report(problem)
        return None

    def _head(self, block: dict[Any, Any]) -> tuple[Preset, ...] | None:
        """What stands before a block's stages; None where its keys are at fault, which the document's check tells."""
        known = {key: value for key, value in block.items() if key in PresetKeys.model_fields}
        try:
            keys = PresetKeys.model_validate(known)
        except pydantic.ValidationError:
            return None
        return None if list(keys.problems()) else keys.head()

    def _program(
        self, at: tuple[Key, ...], name: str, entries: list[Any], head: tuple[Preset, ...] | None
    ) -> Program | None:
        stages = [self._stage((*at, i), entry) for i, entry in enumerate(entries)]
        made = [stage for stage in stages if stage is not None]
        if len(made) < len(stages) or head is None:
            return None
        serving = at[0] == "serve"
        for preset in head:
            for i, stage in enumerate(made):
                if (rule := preset.refuses(stage, serving=serving)) is not None:
                    self._report(Problem.of((*at, i), rule, code="stage.order"))
                    return None
        pipeline = Pipeline(name, (*head, *made))
        try:
            return fold(pipeline, trace(pipeline, at=(), serving=serving))
        except ConfigError as error:
            for problem in error.problems:
                self._report(replace(problem, path=(*at, *_behind(problem.path, len(head)))))
        return None

    def _stage(self, at: tuple[Key, ...], entry: Any) -> Stage | None:
        """One entry of a list of stages: `- resize: {shorter: 256}`, or just a name."""
        if isinstance(entry, str):
            entry = {entry: None}
        if not isinstance(entry, dict) or len(entry) != 1:
            rule = "must be one stage such as `resize: {shorter: 256}`"
            self._report(Problem.of(at, rule, entry, code="config.type"))
            return None
        ((name, given),) = entry.items()
        if name not in self._stages:
            action = suggest(name, self._stages)
            self._report(Problem.of((*at, name), "is not a stage", action=action, code="stage.unknown"))
            return None
        stage = self._stages[name]
        if given is not None and not isinstance(given, dict):
            self._report(Problem.of((*at, name), "must be a mapping of parameters", given, code="config.type"))
            return None
        parameters = _tuples(given or {})
        problems = [problem.below(*at, name) for problem in _misfits(stage, name, parameters)]
        if not problems:
            try:
                return stage(**_with_open_field(stage, parameters))
            except ConfigError as error:
                problems = [problem.below(*at) for problem in error.problems]
        for problem in problems:
            self._report(problem)
        return None

    # --- rules between keys -----------------------------------------------------------------------------------------

    def _check_values(self, document: _Document) -> None:
        if not document.pipelines:
            rule = "must name at least one pipeline, such as train, got none"
            self._report(Problem.of("pipelines", rule, code="config.missing_key"))
        if "serve" in document.pipelines:
            rule, action = "takes the name of the block serve", "give this pipeline another one"
            self._report(Problem.of(("pipelines", "serve"), rule, action=action, code="config.conflict"))
        for name, pipeline in document.pipelines.items():
            batch = pipeline.batch
            if (batch.size is None) == (batch.global_size is None):
                rule = "needs size (of a rank) or global (of all ranks), one of them"
                self._report(Problem.of(("pipelines", name, "batch"), rule, code="config.conflict"))
            for problem in pipeline.problems():
                self._report(problem.below("pipelines", name))
        if document.serve is not None:
            self._check_serve(document.serve)

    def _check_serve(self, serve: ServeSpec) -> None:
        if serve.preset is None and "stages" not in serve.model_fields_set:
            self._report(Problem.of("serve", "needs the key 'stages': a list, or a preset", code="config.missing_key"))
        for problem in serve.problems():
            self._report(problem.below("serve"))
        for problem in serve.model.problems() if serve.model is not None else ():
            self._report(problem.below("serve", "model"))


def _behind(path: tuple[Key, ...], heads: int) -> tuple[Key, ...]:
    """A path into all stages of a pipeline, as one into the stages behind its first ones, which stand elsewhere."""
    match path:
        case (int(number), *rest) if number >= heads:
            return (number - heads, *rest)
    return ()


def _misfits(stage: type[Stage], name: str, parameters: Mapping[Any, Any]) -> Iterator[Problem]:
    """A problem for each parameter that the stage does not know, lacks, or cannot take."""
    fields = {field.name: field for field in dataclasses.fields(stage) if field.name != stage.open_field}
    for key in parameters:
        if key in fields:
            continue
        if stage.open_field is None:
            yield Problem.of(key, f"is not a key of {name}", action=suggest(key, fields), code="config.unknown_key")
        elif not isinstance(key, str):
            yield Problem.of((), "takes keys that are text", key, code="config.unknown_key")
    hints = typing.get_type_hints(stage)
    for key, field in fields.items():
        if key not in parameters:
            if field.default is dataclasses.MISSING:
                yield Problem.of((), f"needs the key {key!r}: {_expected(hints[key])}", code="config.missing_key")
        elif not _fits(parameters[key], hints[key]):
            yield Problem.of(key, f"must be {_expected(hints[key])}", parameters[key], code="config.type")


def _with_open_field(stage: type[Stage], parameters: dict[str, Any]) -> dict[str, Any]:
    """The parameters, with those that the stage has no field for gathered in its open field."""
    if stage.open_field is None:
        return parameters
    fields = {field.name for field in dataclasses.fields(stage)} - {stage.open_field}
    rest = {key: value for key, value in parameters.items() if key not in fields}
    return {key: parameters[key] for key in parameters if key in fields} | {stage.open_field: _hashable(rest)}


def _items(value: Any) -> list[tuple[Any, Any]]:
    return list(value.items()) if isinstance(value, dict) else []


def _enter(target: Any, word: str) -> list[Key] | Problem:
    """The keys that lead from `target` to what a word of a dotted path means, or what is wrong with it.

    A stage that stands in a list as no more than its name is given a mapping to hold parameters.
    """

    def problem(rule: str, action: str = "") -> Problem:
        return Problem.of((), rule, action=action, code="config.override")

    if isinstance(target, dict):
        return [word]
    if not isinstance(target, list):
        return problem(f"is {show(target)}, neither a mapping nor a list, and has no {word!r}")
    if word.isdecimal():
        entries = f"its entries are 0 to {len(target) - 1}" if target else "it is empty"
        return [int(word)] if int(word) < len(target) else problem(f"has no entry {word}", entries)
    if word in target:
        target[target.index(word)] = {word: None}
    names = [str(name) for entry in target for name in (entry if isinstance(entry, dict) else [entry])]
    if word not in names:
        return problem(f"has no {word!r}", suggest(word, names) if names else "it is empty")
    return [next(i for i, entry in enumerate(target) if isinstance(entry, dict) and word in entry), word]


def _tuples(value: Any) -> Any:
    """YAML data with lists as tuples, so that values are hashable."""
    if isinstance(value, list):
        return tuple(map(_tuples, value))
    if isinstance(value, dict):
        return {key: _tuples(item) for key, item in value.items()}
    return value


def _hashable(value: Any) -> Any:
    if isinstance(value, dict):
        return tuple((key, _hashable(value[key])) for key in sorted(value, key=str))
    return tuple(map(_hashable, value)) if isinstance(value, (list, tuple)) else value


# --- types in words ---------------------------------------------------------------------------------------------------

_BOUNDS = {"greater_than_equal": ("ge", ">="), "greater_than": ("gt", ">"), "less_than_equal": ("le", "<=")}
_WORDS = {int: "an integer", float: "a number", bool: "true or false", str: "text", type(None): "null"}


def _expected(hint: Any) -> str:
    """A type in words: `an integer or [an integer, an integer]`."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return _expected(arguments[0])
    if origin is Literal:
        return "one of " + ", ".join(map(str, arguments)) if len(arguments) > 1 else str(arguments[0])
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_expected(part) for part in arguments if part is not type(None))
    if origin is tuple:
        if arguments[-1] is Ellipsis:
            if arguments[0] is Any:
                return "a list"
            return f"a list, each {_expected(arguments[0])}"
        return f"[{', '.join(map(_expected, arguments))}]"
    if origin is dict:
        return f"a mapping, each value {_expected(arguments[1])}"
    if isinstance(hint, type) and issubclass(hint, BaseModel):
        return f"a mapping with {', '.join(field.alias or name for name, field in hint.model_fields.items())}"
    return _WORDS.get(hint, "a mapping or list")


def _fits(value: Any, hint: Any) -> bool:
    """Whether pydantic, strictly, takes the value for the type."""
    try:
        pydantic.TypeAdapter(hint, config=ConfigDict(strict=True, allow_inf_nan=False)).validate_python(value)
    except pydantic.ValidationError:
        return False
    return True


def _group(error: pydantic.ValidationError, data: Any) -> list[Any]:
    """Pydantic's faults, one a place: the branches of a union fail one by one but are one fault.

    A location names branches beside keys; the keys are the ones that lead into the data, or that are missing there.
    """
    by_place: dict[tuple[Key, ...], Any] = {}
    faults = sorted(error.errors(), key=lambda fault: (len(fault["loc"]), fault["type"] not in _BOUNDS))
    for fault in faults:
        at: list[Key] = []
        value = data
        for key in fault["loc"]:
            inside = key in value if isinstance(value, dict) else isinstance(key, int) and isinstance(value, tuple)
            if inside:
                value = value[key]
            if inside or (fault["type"] == "missing" and key == fault["loc"][-1]):
                at.append(key)
        if fault["type"] == "missing" or not any(tuple(at[:end]) in by_place for end in range(len(at) + 1)):
            by_place[tuple(at)] = {**fault, "loc": tuple(at), "input": value, "is_key": fault["loc"][-1:] == ("[key]",)}
    return list(by_place.values())


def _describe(fault: Any, model: type[BaseModel]) -> Problem:
    """One of pydantic's faults, in this project's words."""
    at, kind, value = fault["loc"], fault["type"], fault["input"]
    parent, hint = _hint_at(model, at)
    if kind == "invalid_key" or fault["is_key"]:
        return Problem.of(at, "is a key that is not text", action="put it in quotes", code="config.unknown_key")
    if kind == "extra_forbidden":
        assert parent is not None
        known = [field.alias or name for name, field in parent.model_fields.items()]
        return Problem.of(at, "is not a key here", action=suggest(at[-1], known), code="config.unknown_key")
    if kind == "missing":
        return Problem.of(at[:-1], f"needs the key {at[-1]!r}: {_expected(hint)}", code="config.missing_key")
    if kind in _BOUNDS:
        name, sign = _BOUNDS[kind]
        return Problem.of(at, f"must be {sign} {fault['ctx'][name]:g}", value, code="config.range")
    if kind == "literal_error" and isinstance(value, str) and hint is not None:
        action = suggest(value, _choices(hint), else_all=False)
        return Problem.of(at, f"must be {_expected(hint)}", value, action, code="config.range")
    rule = f"must be {fault['ctx']['error'] if kind == 'value_error' else _expected(hint)}"
    return Problem.of(at, rule, value, code="config.type")


def _choices(hint: Any) -> list[str]:
    """The words that a type names one by one."""
    if typing.get_origin(hint) is Literal:
        return [word for word in typing.get_args(hint) if isinstance(word, str)]
    return [word for part in typing.get_args(hint) for word in _choices(part)]


def _hint_at(model: type[BaseModel], at: Sequence[Key]) -> tuple[type[BaseModel] | None, Any]:
    """The model that holds the key at a place, and the key's type, as far as they are known."""
    parent: type[BaseModel] | None = None
    hint: Any = model
    for key in at:
        if typing.get_origin(hint) in (typing.Union, types.UnionType):
            hint = next((part for part in typing.get_args(hint) if _is_model(part)), hint)
        if _is_model(hint):
            parent = hint
            hint = next((f.annotation for n, f in hint.model_fields.items() if key in (n, f.alias)), None)
        elif typing.get_origin(hint) is dict:
            hint = typing.get_args(hint)[1]
        else:
            return parent, hint
    return parent, hint


def _is_model(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, BaseModel)
