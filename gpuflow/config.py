"""YAML to values, with every error located: file, line, key, rule, value, next action. All errors at once.

The only file that imports yaml or pydantic. YAML is loaded safely: it names stages from a table and nothing else.
"""

from __future__ import annotations

import dataclasses
import re
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic
import yaml
from pydantic import BaseModel, ConfigDict, Field

from gpuflow.check import trace
from gpuflow.errors import ConfigError, Problem, did_you_mean
from gpuflow.fold import Program, fold
from gpuflow.sources import SourceSpec
from gpuflow.spec import Pipeline, Stage

__all__ = ["BatchSpec", "Config", "PipelineSpec", "RunSpec", "ServeSpec", "TrainSpec", "read_config"]

OnError = Literal["raise", "replace", "skip"]
Positive = Annotated[int, Field(ge=1)]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, protected_namespaces=())


class BatchSpec(_Model):
    """`batch`: samples a step. `size` counts a rank's, `global` all ranks' together."""

    size: Positive | None = None
    global_size: Positive | None = Field(default=None, alias="global")
    drop_last: bool = False


class PipelineSpec(_Model):
    """One entry of `pipelines`."""

    stages: tuple[Any, ...]
    batch: BatchSpec = BatchSpec(size=64)
    shuffle: bool = False
    on_error: OnError | None = None


class TrainSpec(_Model):
    """`train`: what `gpuflow train` needs."""

    model: str = "resnet18"
    epochs: Positive = 10
    lr: Annotated[float, Field(gt=0)] = 0.1
    weight_decay: Annotated[float, Field(ge=0)] = 1e-4
    out: str = "runs/train"
    size: Positive | None = None


class ModelSpec(_Model):
    """`serve.model`."""

    file: str
    engine: Literal["auto", "torch", "onnxruntime", "tensorrt"] = "auto"
    batch: Positive = 16
    instances: Positive = 1
    timeout_ms: Annotated[float, Field(ge=0)] = 2.0
    compile: bool = False


class ServeSpec(_Model):
    """`serve`: the stages that the served model sees, and the model."""

    stages: tuple[Any, ...]
    model: ModelSpec


class RunSpec(_Model):
    """`run`: how to run, never what comes out."""

    threads: Positive | Literal["auto"] = "auto"
    prefetch: Positive = 3
    on_error: OnError = "replace"
    max_bad: Annotated[int, Field(ge=0)] | Annotated[float, Field(ge=0, le=1)] | None = None
    bad_file: str | None = None
    timeout_s: Annotated[float, Field(gt=0)] = 120.0
    memory_limit: str | Positive | None = None
    deterministic: bool = False


class _SourceModel(_Model):
    folder: str | None = None
    listing: str | None = None
    tar: str | None = None
    root: str | None = None
    classes: Positive | tuple[str, ...] | None = None
    split: dict[str, float] = {}
    seed: Annotated[int, Field(ge=0)] = 0
    window: Positive = 8192


class _Document(_Model):
    source: _SourceModel
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
            place = f"{self.path}: pipelines"
            raise ConfigError([Problem(place, f"has no pipeline {name!r}{did_you_mean(name, self.pipelines)}")])
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

Key = str | int


class _Yaml(yaml.SafeLoader):  # type: ignore[misc]
    """Safe YAML in which 1e-3 is a number and a key that stands twice is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: dict[Any, yaml.Mark] = {}
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key_node.tag != "tag:yaml.org,2002:merge" and key in seen:
                raise yaml.MarkedYAMLError(
                    problem=f"key {key!r} stands twice, first on line {seen[key].line + 1}; keep one",
                    problem_mark=key_node.start_mark,
                )
            seen[key] = key_node.start_mark
        return super().construct_mapping(node, deep=deep)  # type: ignore[no-any-return]


_Yaml.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:[0-9][0-9_]*)(?:\.[0-9_]*)?[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)


def _lines(node: yaml.Node | None, at: tuple[Key, ...] = ()) -> Iterator[tuple[tuple[Key, ...], int]]:
    """(path, line) of every value in a YAML tree; a key's line for a value in a mapping."""
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield (*at, key.value), key.start_mark.line + 1
            yield from _lines(value, (*at, key.value))
    elif isinstance(node, yaml.SequenceNode):
        for i, value in enumerate(node.value):
            yield (*at, i), value.start_mark.line + 1
            yield from _lines(value, (*at, i))


def _dotted(at: Sequence[Key]) -> str:
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in at).lstrip(".")


class _Reader:
    """Reads one file, collecting problems until all is seen."""

    def __init__(self, path: str, stages: Mapping[str, type[Stage]]) -> None:
        self._path, self._stages = path, stages
        self._lines: dict[tuple[Key, ...], int] = {}
        self._overridden: dict[tuple[Key, ...], str] = {}
        self._problems: list[Problem] = []

    def read(self, overrides: Sequence[str]) -> Config:
        data = self._parse()
        for override in overrides:
            self._override(data, override)
        self._stop_if_faulty()
        values = _tuples(data)
        document = None
        try:
            document = _Document.model_validate(values)
        except pydantic.ValidationError as error:
            for fault in _group(error, values):
                self._report(*_describe(fault, _Document))
        pipelines = data.get("pipelines")
        blocks = {("pipelines", name): block for name, block in _items(pipelines)} | {("serve",): data.get("serve")}
        programs: dict[str, Program] = {}
        for at, block in blocks.items():
            if isinstance(block, dict) and isinstance(block.get("stages"), list):
                program = self._program((*at, "stages"), str(at[-1]), block["stages"])
                if program is not None:
                    programs[str(at[-1])] = program
        if document is not None:
            self._check_values(document)
        self._stop_if_faulty()
        assert document is not None
        source = document.source
        return Config(
            path=self._path,
            source=SourceSpec(**{**source.model_dump(), "split": tuple(source.split.items())}),
            pipelines=document.pipelines,
            programs=programs,
            train=document.train,
            serve=document.serve,
            run=document.run,
        )

    # --- problems ---------------------------------------------------------------------------------------------------

    def _report(self, at: Sequence[Key], message: str) -> None:
        self._problems.append(Problem(self._place(at), message))

    def _place(self, at: Sequence[Key]) -> str:
        """`configs/x.yaml:12: pipelines.train.stages[2].resize.height`, or the override that set it."""
        at = tuple(at)
        for end in range(len(at), 0, -1):
            if at[:end] in self._overridden:
                return f"override {self._overridden[at[:end]]!r}: {_dotted(at)}"
        line = next((self._lines[at[:end]] for end in range(len(at), 0, -1) if at[:end] in self._lines), None)
        return f"{self._path}:{line}: {_dotted(at)}" if line else f"{self._path}: {_dotted(at)}".rstrip(": ")

    def _stop_if_faulty(self) -> None:
        if self._problems:
            raise ConfigError(self._problems)

    # --- text to data -----------------------------------------------------------------------------------------------

    def _parse(self) -> dict[str, Any]:
        try:
            text = Path(self._path).read_text(encoding="utf-8")
            loader = _Yaml(text)
            node = loader.get_single_node()
            self._lines = dict(_lines(node))
            data = loader.construct_document(node) if node is not None else None
        except FileNotFoundError:
            siblings = sorted(str(p) for p in Path(self._path).parent.glob("*.yaml"))
            hint = did_you_mean(self._path, siblings) if siblings else "; give the path of a YAML file"
            raise ConfigError([Problem(f"{self._path}:", f"no such file{hint}")]) from None
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError([Problem(f"{self._path}:", f"cannot be read as UTF-8 text: {error}")]) from error
        except yaml.MarkedYAMLError as error:
            line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
            raise ConfigError([Problem(f"{self._path}{line}:", f"is not valid YAML: {error.problem}")]) from error
        except yaml.YAMLError as error:
            raise ConfigError([Problem(f"{self._path}:", f"is not valid YAML: {error}")]) from error
        if not isinstance(data, dict):
            raise ConfigError(
                [Problem(f"{self._path}:", f"must be a mapping with source and pipelines, got {_show(data)}")]
            )
        return data

    def _override(self, data: dict[str, Any], override: str) -> None:
        """Apply one `a.b.c=value` in place."""
        dotted, equals, text = override.partition("=")
        place = f"override {override!r}:"
        if not equals or not dotted.strip():
            self._problems.append(Problem(place, "must be of the form key.key=value, such as run.threads=8"))
            return
        try:
            value = yaml.load(text, _Yaml) if text else ""
        except yaml.YAMLError as error:
            self._problems.append(Problem(place, f"the value is not valid YAML: {error}"))
            return
        at: list[Key] = []
        target: Any = data
        *parents, last = dotted.strip().split(".")
        for word in parents:
            key = _enter(target, word)
            if key is None:
                known = (
                    [next(iter(x)) for x in target if isinstance(x, dict)] if isinstance(target, list) else ["mappings"]
                )
                self._problems.append(
                    Problem(place, f"{_dotted(at) or 'the file'} has no {word!r}{did_you_mean(word, known)}")
                )
                return
            at.append(key)
            if isinstance(target, dict) and target.get(key) is None:
                target[key] = {}
            target = target[key]
            if isinstance(target, dict) and isinstance(key, int) and list(target) == [word]:
                at.append(word)
                target[word] = target[word] if target[word] is not None else {}
                target = target[word]
        key = _enter(target, last)
        if key is None:
            self._problems.append(Problem(place, f"{_dotted(at)} has no {last!r} that could be set"))
            return
        at.append(key)
        target[key] = value
        self._overridden[tuple(at)] = override

    # --- stages -----------------------------------------------------------------------------------------------------

    def _program(self, at: tuple[Key, ...], name: str, entries: list[Any]) -> Program | None:
        made = [self._stage((*at, i), entry) for i, entry in enumerate(entries)]
        if None in made:
            return None
        pipeline = Pipeline(name, tuple(made))  # type: ignore[arg-type]
        try:
            return fold(pipeline, trace(pipeline, place="", serving=at[0] == "serve"))
        except ConfigError as error:
            (problem,) = error.problems
            number = re.match(r"\S*\[(\d+)\]", problem.place)
            where = (*at, int(number[1]), pipeline.stages[int(number[1])].stage_name) if number else at
            self._report(where, problem.message)
        return None

    def _stage(self, at: tuple[Key, ...], entry: Any) -> Stage | None:
        """One entry of a list of stages: `- resize: {shorter: 256}`, or just a name."""
        if isinstance(entry, str):
            entry = {entry: None}
        if not isinstance(entry, dict) or len(entry) != 1:
            self._report(at, f"must be one stage such as `resize: {{shorter: 256}}`, got {_show(entry)}")
            return None
        ((name, given),) = entry.items()
        if name not in self._stages:
            self._report((*at, name), f"is not a stage{did_you_mean(name, self._stages)}")
            return None
        at, stage = (*at, name), self._stages[name]
        if given is not None and not isinstance(given, dict):
            self._report(at, f"must be a mapping of parameters, got {_show(given)}")
            return None
        parameters = _tuples(given or {})
        fields = {field.name: field for field in dataclasses.fields(stage) if field.name != stage.open_field}
        before = len(self._problems)
        if stage.open_field is not None:
            rest = sorted((key, parameters.pop(key)) for key in list(parameters) if key not in fields)
            parameters[stage.open_field] = _hashable(rest)
        for key in parameters:
            if key not in fields and key != stage.open_field:
                self._report((*at, key), f"is not a key of {name}{did_you_mean(key, fields)}")
        hints = typing.get_type_hints(stage)
        for key, field in fields.items():
            if key not in parameters:
                if field.default is dataclasses.MISSING:
                    self._report(at, f"needs the key {key!r}: {_expected(hints[key])}")
            elif not _fits(parameters[key], hints[key]):
                expected = _expected(hints[key])
                self._report((*at, key), f"must be {expected}, got {_show(parameters[key])}")
        if len(self._problems) > before:
            return None
        try:
            return stage(**parameters)
        except ConfigError as error:
            for problem in error.problems:
                field_name = problem.place.partition(".")[2]
                self._report((*at, field_name) if field_name else at, problem.message)
        return None

    # --- rules between keys -----------------------------------------------------------------------------------------

    def _check_values(self, document: _Document) -> None:
        source = document.source
        kinds = [kind for kind in ("folder", "listing", "tar") if getattr(source, kind) is not None]
        if len(kinds) != 1:
            got = " and ".join(kinds) or "none of them"
            self._report(("source",), f"needs exactly one of folder, listing and tar, got {got}")
        for name, part in source.split.items():
            if not 0 < part <= 1:
                self._report(("source", "split", name), f"must be a fraction within (0, 1], got {part}")
        if (total := sum(source.split.values())) > 1 + 1e-9:
            self._report(("source", "split"), f"must add up to at most 1, got {total:g}")
        if not document.pipelines:
            self._report(("pipelines",), "must name at least one pipeline, such as train, got none")
        for name, pipeline in document.pipelines.items():
            batch = pipeline.batch
            if (batch.size is None) == (batch.global_size is None):
                self._report(
                    ("pipelines", name, "batch"), "needs size (of a rank) or global (of all ranks), one of them"
                )


def _items(value: Any) -> list[tuple[Any, Any]]:
    return list(value.items()) if isinstance(value, dict) else []


def _enter(target: Any, word: str) -> Key | None:
    """The key of `target` that a word of a dotted path means, or None."""
    if isinstance(target, dict):
        return word
    if not isinstance(target, list):
        return None
    if word.isdigit():
        return int(word) if int(word) < len(target) else None
    return next((i for i, entry in enumerate(target) if isinstance(entry, dict) and word in entry), None)


def _tuples(value: Any) -> Any:
    """YAML data with lists as tuples, so that values are hashable."""
    if isinstance(value, list):
        return tuple(map(_tuples, value))
    if isinstance(value, dict):
        return {key: _tuples(item) for key, item in value.items()}
    return value


def _hashable(value: Any) -> Any:
    if isinstance(value, dict):
        return tuple(sorted((key, _hashable(item)) for key, item in value.items()))
    return tuple(map(_hashable, value)) if isinstance(value, (list, tuple)) else value


# --- types in words ---------------------------------------------------------------------------------------------------

_WORDS = {int: "an integer", float: "a number", bool: "true or false", str: "text", type(None): "null"}


def _show(value: Any) -> str:
    """A value as a reader of YAML knows it, cut to length."""
    if isinstance(value, tuple):
        value = list(value)
    text = {True: "true", False: "false", None: "null"}.get(value) if isinstance(value, (bool, type(None))) else None
    text = text or repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


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
        pydantic.TypeAdapter(hint, config=ConfigDict(strict=True)).validate_python(value)
    except pydantic.ValidationError:
        return False
    return True


def _group(error: pydantic.ValidationError, data: Any) -> list[Any]:
    """Pydantic's faults, one a place: the branches of a union fail one by one but are one fault.

    A location names branches beside keys; the keys are the ones that lead into the data, or that are missing there.
    """
    by_place: dict[tuple[Key, ...], Any] = {}
    for fault in error.errors():
        at: list[Key] = []
        value = data
        for key in fault["loc"]:
            inside = key in value if isinstance(value, dict) else isinstance(key, int) and isinstance(value, tuple)
            if inside:
                value = value[key]
            if inside or (fault["type"] == "missing" and key == fault["loc"][-1]):
                at.append(key)
        by_place.setdefault(tuple(at), {**fault, "loc": tuple(at), "input": value})
    return list(by_place.values())


def _describe(fault: Any, model: type[BaseModel]) -> tuple[tuple[Key, ...], str]:
    """(place, message) of one of pydantic's faults, in this project's words."""
    at, kind, value = fault["loc"], fault["type"], fault["input"]
    parent, hint = _hint_at(model, at)
    if kind == "extra_forbidden":
        assert parent is not None
        known = [field.alias or name for name, field in parent.model_fields.items()]
        return at, f"is not a key here{did_you_mean(at[-1], known)}"
    if kind == "missing":
        return at[:-1], f"needs the key {at[-1]!r}: {_expected(hint)}"
    bounds = {"greater_than_equal": ("ge", ">="), "greater_than": ("gt", ">"), "less_than_equal": ("le", "<=")}
    if kind in bounds:
        name, sign = bounds[kind]
        return at, f"must be {sign} {fault['ctx'][name]:g}, got {_show(value)}"
    if kind == "literal_error" and isinstance(value, str) and hint is not None:
        words = re.findall(r"\w+", _expected(hint).replace("one of ", ""))
        return at, f"must be {_expected(hint)}, got {_show(value)}{_close(value, words)}"
    return at, f"must be {_expected(hint)}, got {_show(value)}"


def _close(word: str, known: Sequence[str]) -> str:
    hint = did_you_mean(word, known)
    return hint if "did you mean" in hint else ""


def _hint_at(model: type[BaseModel], at: Sequence[Key]) -> tuple[type[BaseModel] | None, Any]:
    """The model that holds the key at a place, and the key's type, as far as they are known."""
    parent: type[BaseModel] | None = None
    hint: Any = model
    for key in at:
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
