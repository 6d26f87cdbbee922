"""A YAML file to a `Config`, with every error located: file, line, key, rule, value, next action. All errors at once.

yaml_file.py      text to data with line numbers; `run.threads=8` on the command line
models.py         the blocks of a file: keys, types, defaults, rules between keys
stage_entries.py  `- resize: {shorter: 256}` to a stage
words.py          types and faults in words
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pydantic

from gpuflow.config.models import Config, Document, Pixels, PresetKeys, SourceKeys, declared_problems, keys_of
from gpuflow.config.stage_entries import as_tuples, make_stage
from gpuflow.config.words import fits, meant_key, problems_of, type_in_words
from gpuflow.config.yaml_file import Overrides, read_yaml
from gpuflow.errors import ConfigError, Key, Problem, show
from gpuflow.pipeline.program import Program, fold, trace
from gpuflow.pipeline.records import GEOMETRIC, Field
from gpuflow.pipeline.stage import Decoder, Mixing, Pipeline, Stage
from gpuflow.pipeline.targets import carry_problem, views_carry_problem
from gpuflow.pipeline.views import AnyProgram, View, ViewsPipeline, ViewsProgram
from gpuflow.sources import SourceSpec, all_kinds, spec_class


def make_source(block: Any, kinds: Mapping[str, type[SourceSpec]]) -> SourceSpec:
    """Return the spec of a block `source`, as YAML gives it. kinds: classes by name.

    Raises:
        ConfigError: every problem of the block, its path from `source` on.
    """
    if not isinstance(block, dict):
        rule, action = f"must be {type_in_words(SourceKeys)}", f"write {{folder: {block}}}"
        action = action if isinstance(block, str) else ""
        raise ConfigError([Problem.of("source", rule, block, action, code="config.type")])
    texts = {key: value for key, value in block.items() if isinstance(key, str)}
    spec, problems = spec_class(texts, kinds, partial(meant_key, document=Document))
    problems += (
        Problem.of(key, "is a key that is not text", action="put it in quotes", code="config.unknown_key")
        for key in block
        if key not in texts
    )
    values: dict[str, Any] = {}
    if spec is not None:
        fields = spec.key_fields()
        keys = {
            key: value if fields[key].type is Any else as_tuples(value)  # another package gets its value as YAML has it
            for key, value in texts.items()
            if key in fields and value is not None
        }
        try:
            values = keys_of(spec).model_validate(keys).model_dump(exclude_unset=True)
        except pydantic.ValidationError as error:
            problems += problems_of(error, keys_of(spec), keys, Document)
    if spec is None or problems:
        raise ConfigError([problem.below("source") for problem in problems])
    return spec.of(values, partial(make_source, kinds=kinds))


_MOST_PROBLEMS = 100
"""Listed of one file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AddedStages:
    """Stages that follow those of a pipeline and come from elsewhere than the file.

    pipeline: its name. entries: as they would stand in YAML. place, path: of what they were made of, for problems.
    """

    pipeline: str
    entries: Sequence[Mapping[str, Any]]
    place: str
    path: tuple[Key, ...]


def read_config(
    path: str | Path,
    stages: Mapping[str, type[Stage]],
    overrides: Sequence[str] = (),
    added: AddedStages | None = None,
) -> Config:
    """Read, override, check and fold a YAML file.

    Args:
        path: the file.
        stages: the vocabulary, name to class.
        overrides: dotted assignments such as `run.threads=8` or `pipelines.train.stages.resize.shorter=160`. The
            value is YAML. A list is entered by number, or by the name of the stage in it.
        added: more stages of one pipeline, which has `stages` and not `views`.

    Raises:
        ConfigError: with every located problem of the file.
        TypeError: `path` is no path, or `overrides` is no list of texts.

    Examples:
        >>> from gpuflow.stages import STAGES
        >>> _ = Path("x.yaml").write_text("serve: {stages: [decode, resize: {shorter: 256}, center_crop: {size: 96}]}")
        >>> config = read_config("x.yaml", STAGES, ["serve.stages.center_crop.size=64"])
        >>> config.programs["serve"].pipeline
        serve: decode() -> resize(shorter=256) -> center_crop(size=64)
    """
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"path must be that of a YAML file, got {show(path)}")
    if isinstance(overrides, str):
        raise TypeError(f"overrides must be a list such as [{overrides!r}], got a text")
    for i, override in enumerate(overrides):
        if not isinstance(override, str):
            raise TypeError(f"overrides[{i}] must be a text such as 'run.threads=8', got {show(override)}")
    return _Reader(os.fspath(path), stages, added).read(overrides)


def check_config(data: dict[str, Any], stages: Mapping[str, type[Stage]], *, place: str) -> Config:
    """Check and fold what a file would hold, as `read_config` does. place: what errors name in the file's place.

    Raises:
        ConfigError: with every located problem.

    Examples:
        >>> from gpuflow.stages import STAGES
        >>> stages = ["decode", {"resize": {"height": 224, "width": 224}}, "normalize"]
        >>> check_config({"serve": {"stages": stages}}, STAGES, place="a dictionary").programs["serve"].result.shape
        (224, 224, 3)
    """
    return _Reader(place, stages, data=data).read(())


class _Reader:
    """Reads one file, or `data` in its place, collecting problems until all is seen."""

    def __init__(
        self,
        path: str,
        stages: Mapping[str, type[Stage]],
        added: AddedStages | None = None,
        data: dict[str, Any] | None = None,
    ) -> None:
        self._path, self._stages, self._added = path, stages, added
        self._data, self._lines = read_yaml(path) if data is None else (data, {})
        self._overrides = Overrides(self._data)
        self._problems: list[tuple[float, Problem]] = []

    def read(self, overrides: Sequence[str]) -> Config:
        for override in overrides:
            try:
                self._overrides.apply(override)
            except ConfigError as error:
                for problem in error.problems:
                    self._report_override(override, problem)
        for at, text in _texts(self._data):
            if not _is_text(text):
                self._report(Problem.of(at, "must be text without NUL or lone surrogates", text, code="config.type"))
        self._stop_if_faulty()
        self._apply_train_size()
        source = self._source()
        document = self._document(source)
        programs, views = self._programs()
        if source is not None:
            self._check_fields(source, programs, views)
        self._stop_if_faulty()
        assert document is not None
        return Config(
            path=self._path,
            source_block=source,
            pipelines=document.pipelines,
            programs=programs,
            views=views,
            train=document.train,
            serve=document.serve,
            run=document.run,
        )

    def _apply_train_size(self) -> None:
        """Set the `size` of the stages of train and val that have one to `train.size`, where that is set."""
        size = _value_at(self._data, "train", "size")
        if not fits(size, Pixels):
            return  # which `_document` reports, unless there is none
        for name in ("train", "val"):
            entries = _value_at(self._data, "pipelines", name, "stages")
            for entry in entries if isinstance(entries, list) else ():
                for parameters in entry.values() if isinstance(entry, dict) else ():
                    if isinstance(parameters, dict) and parameters.get("size") is not None:
                        parameters["size"] = size

    # --- problems ---------------------------------------------------------------------------------------------------

    def _report_all(self, problems: Iterable[Problem]) -> None:
        """Note problems one by one, so that none is searched for after the last that is listed."""
        for problem in problems:
            self._report(problem)

    def _report(self, problem: Problem) -> None:
        """Note a problem at its path's line, `x.yaml:12:`, at the override that set the value, or where an added stage
        comes from."""
        at = problem.path
        if self._added is not None and (origin := self._place_of_added(self._added, at)) is not None:
            self._add(math.inf, replace(problem, place=self._added.place, path=origin))
        elif override := self._overrides.at(at):
            self._report_override(override, problem)
        else:
            line = next((self._lines[at[:end]] for end in range(len(at), 0, -1) if at[:end] in self._lines), 0)
            place = f"{self._path}:{line}:" if line else f"{self._path}:"
            self._add(line, replace(problem, place=place, line=line or None))

    def _place_of_added(self, added: AddedStages, at: tuple[Key, ...]) -> tuple[Key, ...] | None:
        """Turn a path into the added stages into one into what they were made of. Return None for any other path."""
        match at:
            case ("pipelines", name, "stages", int(number), *rest) if name == added.pipeline:
                entries = self._data["pipelines"][name].get("stages") or ()
                return (*added.path, *rest) if number >= len(entries) else None
        return None

    def _report_override(self, override: str, problem: Problem) -> None:
        """Note a problem of an override; those of the file come before them."""
        self._add(math.inf, replace(problem, place=f"override {override!r}:"))

    def _add(self, line: float, problem: Problem) -> None:
        """Note a problem; the last that is listed ends the check, because each costs a search for what was meant."""
        self._problems.append((line, problem))
        if len(self._problems) == _MOST_PROBLEMS:
            rule, action = f"may have more faults than these {_MOST_PROBLEMS}", "correct these first"
            self._problems.append((math.inf, Problem(f"{self._path}:", rule, action=action)))
            self._stop_if_faulty()

    def _stop_if_faulty(self) -> None:
        """Raise what was found: in the order of the file's lines, then what overrides did."""
        if self._problems:
            raise ConfigError([problem for _, problem in sorted(self._problems, key=lambda found: found[0])])

    # --- blocks -----------------------------------------------------------------------------------------------------

    def _source(self) -> SourceSpec | None:
        """Return the block `source`; None where it is missing or wrong, which is reported."""
        if self._data.get("source") is None:
            return None  # which `_document` reports
        try:
            return make_source(self._data["source"], all_kinds())
        except ConfigError as error:
            self._report_all(error.problems)
        return None

    def _document(self, source: SourceSpec | None) -> Document | None:
        """Return all blocks; None where a key or a type is wrong."""
        values = as_tuples(self._data)
        try:
            document = Document.model_validate(values)
        except pydantic.ValidationError as error:
            self._report_all(problems_of(error, Document, values))
            return None
        self._report_all(document.problems(source))
        return document

    # --- stages -----------------------------------------------------------------------------------------------------

    def _programs(self) -> tuple[dict[str, Program], dict[str, ViewsProgram]]:
        """Return the folded stages of each pipeline that has no problem, and of `serve`; and folded views."""
        pipelines = self._data.get("pipelines")
        blocks: dict[tuple[Key, ...], Any] = {("serve",): self._data.get("serve")}
        if isinstance(pipelines, dict):
            blocks = {("pipelines", name): block for name, block in pipelines.items()} | blocks
        programs, programs_of_views = dict[str, Program](), dict[str, ViewsProgram]()
        for at, block in blocks.items():
            if not isinstance(block, dict):
                continue
            name, views = str(at[-1]), block.get("views")
            head = self._head(block) if "preset" in block else ()
            entries = block.get("stages", [] if head else None)
            if isinstance(entries, list):
                if self._added is not None and at == ("pipelines", self._added.pipeline):
                    entries = [*entries, *self._added.entries]
                program = self._program((*at, "stages"), name, entries, head)
                if program is not None:
                    programs[name] = program
            if isinstance(views, dict) and views and at[0] == "pipelines":
                program_of_views = self._views_program(at, name, block.get("decode"), views)
                if program_of_views is not None:
                    programs_of_views[name] = program_of_views
        return programs, programs_of_views

    def _views_program(
        self, at: tuple[Key, ...], name: str, decode: Any, blocks: dict[Any, Any]
    ) -> ViewsProgram | None:
        """Return views with the decoding that they share; None if something is wrong, which is reported."""
        if decode is not None and not isinstance(decode, dict):
            return None
        decoder = self._stage(at, {"decode": decode})
        if not isinstance(decoder, Decoder):
            return None
        views, programs = [], []
        for view, block in blocks.items():
            entries = block.get("stages") if isinstance(block, dict) else None
            if not isinstance(entries, list):
                continue  # which `_document` reports
            path = (*at, "views", view, "stages")
            program = self._program(path, f"{name}.{view}", entries, (decoder,))
            if program is None or self._mixes(path, program):
                continue
            count = block.get("count", 1)
            if isinstance(count, int):
                views.append(View(str(view), count, program.pipeline))
                programs.append(program)
        if len(views) < len(blocks):
            return None
        return ViewsProgram(pipeline=ViewsPipeline(name, tuple(views)), programs=tuple(programs))

    def _mixes(self, at: tuple[Key, ...], program: Program) -> bool:
        """Report the stages of a view that mix samples. at: the keys that lead to the view's list of stages."""
        rule, action = "mixes the samples of a batch, and views are not mixed", "remove the stage, or use no views"
        for i, stage in enumerate(program.pipeline.stages[1:]):
            if isinstance(stage, Mixing):
                self._report(Problem.of((*at, i, stage.stage_name), rule, action=action, code="config.conflict"))
        return bool(program.mixings)

    def _check_fields(
        self, source: SourceSpec, programs: Mapping[str, Program], views: Mapping[str, ViewsProgram]
    ) -> None:
        """Report the first stage of each pipeline, or its views, that cannot carry the declared fields, the stages that
        take a field that is not declared, and those that mix samples which cannot be mixed.

        `serve` carries and takes none.
        """
        either: dict[str, AnyProgram] = {**programs, **views}
        for name, one in either.items():
            self._report_all(declared_problems(name, one, source) if name != "serve" else ())
        fields = [
            Field(name=name, type=kind) for name, spec in source.declared for kind in GEOMETRIC if kind == spec.type
        ]
        for name, program in programs.items():
            if name != "serve" and (problem := carry_problem(program, fields)) is not None:
                place = _after_heads(problem.path, program.pipeline.heads)
                self._report(replace(problem, path=("pipelines", name, "stages", *place)))
        for name in views:
            if (problem := views_carry_problem(fields)) is not None:
                self._report(problem.below("pipelines", name))

    def _head(self, block: dict[Any, Any]) -> tuple[Decoder, ...] | None:
        """Return what stands before a block's stages; None if its keys are at fault, which `_document` reports."""
        known = {key: value for key, value in block.items() if key in PresetKeys.model_fields}
        try:
            keys = PresetKeys.model_validate(known)
        except pydantic.ValidationError:
            return None
        return None if list(keys.problems()) else keys.head()

    def _program(
        self, at: tuple[Key, ...], name: str, entries: list[Any], head: tuple[Decoder, ...] | None
    ) -> Program | None:
        made = [self._stage((*at, i), entry) for i, entry in enumerate(entries)]
        stages = [stage for stage in made if stage is not None]
        if len(stages) < len(made) or head is None or self._report_misplaced(at, stages, head):
            return None
        pipeline = Pipeline(name, (*head, *stages))
        try:
            return fold(pipeline, trace(pipeline, at=(), serving=at[0] == "serve"))
        except ConfigError as error:
            for problem in error.problems:
                self._report(replace(problem, path=(*at, *_after_heads(problem.path, len(head)))))
        return None

    def _stage(self, at: tuple[Key, ...], entry: Any) -> Stage | None:
        try:
            return make_stage(entry, self._stages)
        except ConfigError as error:
            self._report_all(problem.below(*at) for problem in error.problems)
            return None

    def _report_misplaced(self, at: tuple[Key, ...], stages: Sequence[Stage], head: Sequence[Decoder]) -> bool:
        """Report decoders in a view, or the first stage that a preset refuses. Return whether there is one."""
        of_view = at[2:3] == ("views",)  # and not of a pipeline with that name
        decoders = [i for i, stage in enumerate(stages) if of_view and isinstance(stage, Decoder)]
        for i in decoders:
            action = "write its parameters as decode: {...} next to views"
            place = (*at, i, stages[i].stage_name)
            self._report(Problem.of(place, "is shared by all views", action=action, code="stage.order"))
        if decoders:
            return True
        for decoder in head:
            for i, stage in enumerate(stages):
                if (rule := decoder.refuses(stage, serving=at[0] == "serve")) is not None:
                    self._report(Problem.of((*at, i), rule, code="stage.order"))
                    return True
        return False


def _texts(data: Any, at: tuple[Key, ...] = ()) -> Iterator[tuple[tuple[Key, ...], str]]:
    """Yield (path, text) of every text among nested values."""
    if isinstance(data, str):
        yield at, data
    elif isinstance(data, dict | list):
        for key, value in data.items() if isinstance(data, dict) else enumerate(data):
            yield from _texts(value, (*at, key))


def _is_text(text: str) -> bool:
    """Return True if a text can be printed, or can name a file, whose bytes need not be valid text."""
    try:
        return b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        return False


def _value_at(data: Any, *keys: str) -> Any:
    """Return the value that these keys lead to in nested mappings; None if there is none."""
    for key in keys:
        data = data.get(key) if isinstance(data, dict) else None
    return data


def _after_heads(path: tuple[Key, ...], heads: int) -> tuple[Key, ...]:
    """Turn a path into all stages of a pipeline into one into those that follow its heads, which stand elsewhere."""
    match path:
        case (int(number), *rest) if number >= heads:
            return (number - heads, *rest)
    return ()
