"""`gpuflow explain`: shows how gpuflow would run a configuration: stages, shapes, threads, decoder, device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, assert_never

import numpy as np
from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from gpuflow.arrays import Ints
from gpuflow.config import Config
from gpuflow.config.resources import decode_processes_of, parts_in_python, readers_of, threads_of
from gpuflow.decode.codecs import decoder_description
from gpuflow.decode.header import Header
from gpuflow.errors import BadSampleError, SourceError, redacted
from gpuflow.execute.cpu.runner import header_of
from gpuflow.loader.assemble import open_split, open_whole, order_of
from gpuflow.loader.plan import cpu_share_of, explain_gpu
from gpuflow.loader.records import turned_text
from gpuflow.pipeline.program import (
    LocalStep,
    OpaqueStep,
    PointwiseStep,
    Program,
    ResamplingStep,
    Step,
    WarpStep,
)
from gpuflow.pipeline.records import GEOMETRIC
from gpuflow.pipeline.stage import Decoder, ImageSpec, Policy
from gpuflow.pipeline.views import AnyProgram, ViewsProgram, named_programs, slot_bytes_of
from gpuflow.sources import (
    BalanceSpec,
    Mix,
    Source,
    balanced_groups,
    divide,
    fields_of,
    fingerprint_of,
    has_labels,
    has_one_class,
    is_read_remotely,
    left_out_of,
)
from gpuflow.sources.base import spread
from gpuflow.sources.record_table import TableSource
from gpuflow.sources.spec import Samples
from gpuflow.sources.storage import is_remote
from gpuflow.tools.parts import lacking_text

_GAP = 3
"""Columns between those of a table."""
_NAMED_GROUPS = 10
"""The most classes whose samples are counted one by one."""
_MOST_DRAWN = 1_000_000
"""The most samples of an epoch whose classes are counted."""
_LOOKED_AT = 100
"""Images of a source whose headers are read for their formats and EXIF orientations."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Explanation:
    """Says how the pipelines of a configuration run.

    facts: by pipeline and heading. error: why the source cannot be read, None if it can.
    """

    programs: Mapping[str, AnyProgram]
    facts: Mapping[str, Mapping[str, str]]
    error: SourceError | None

    def as_dict(self) -> dict[str, Any]:
        """Return each pipeline as plain values for JSON."""
        return {
            name: {
                "views": [
                    {
                        "name": view,
                        "count": count,
                        "stages": [
                            {"stage": stage, "gives": asdict(spec), "runs_as": runs_as}
                            for stage, spec, runs_as in _rows(one)
                        ],
                    }
                    for view, count, one in named_programs(program)
                ],
                "facts": {heading.lower().replace(" ", "_"): text for heading, text in self.facts[name].items()},
            }
            for name, program in self.programs.items()
        }

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for name, program in self.programs.items():
            yield Text(f"\n{name}", style="bold")
            for view, count, one in named_programs(program):
                if view:
                    yield Text(f"  {view} x {count}")
                yield _Stages(one)
            for heading, text in self.facts[name].items():
                yield Text(f"  {heading:14} {text}")


def explain(config: Config) -> Explanation:
    """Resolve the pipelines: stages, specs between them, folding, device, threads, decoder and its version.

    Opens the source, and reads the headers of a few images.
    """
    programs: dict[str, AnyProgram] = {**config.programs, **config.views}
    sources = {name: _source(config, name) for name in config.pipelines}
    facts = {name: dict(_facts(config, name, program, sources.get(name))) for name, program in programs.items()}
    error = next((source.error for source in sources.values() if source.error is not None), None)
    return Explanation(programs=programs, facts=facts, error=error)


@dataclass(frozen=True, slots=True)
class _Stages:
    """The stages of a pipeline: a table, or a list where the table would break words."""

    program: Program

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        rows = [(stage, str(spec), runs_as) for stage, spec, runs_as in _rows(self.program)]
        words = (word for stage, _, _ in rows for word in stage.split())
        columns = words, *([row[column] for row in rows] for column in (1, 2))
        if sum(max(map(len, column)) + _GAP for column in columns) > options.max_width:
            for stage, result, runs_as in rows:
                yield Text(f" {stage}")
                yield Padding(Text(f"gives {result}, runs as {runs_as}"), (0, 0, 0, 2 * _GAP))
            return
        table = Table("stage", box=box.SIMPLE_HEAD, pad_edge=False)
        for heading in ("gives", "runs as"):
            table.add_column(heading, no_wrap=True)
        for row in rows:
            table.add_row(*map(Text, row))
        yield table


def _rows(program: Program) -> list[tuple[str, ImageSpec, str]]:
    """Return for each stage its text, what it gives, and the number and kind of the step that runs it; for a policy,
    the numbers of its steps."""
    words, begun = ["1 decode"], 1
    last = {end: number for number, end in enumerate(program.ends, start=2)}
    for number, (step, end) in enumerate(zip(program.steps, program.ends, strict=True), start=2):
        stages = program.pipeline.stages[begun:end]
        for stage in stages:
            if isinstance(stage, Policy):
                words.append(f"{number}-{last[end]} its operations")
            else:
                words.append(f"{number} {_step_words(step, len(stages))}")
        begun = end
    words += [f"{number} on whole batches" for number, _ in enumerate(program.mixings, start=len(program.steps) + 2)]
    return list(zip(map(repr, program.pipeline.stages), program.specs[1:], words, strict=True))


def _step_words(step: Step, stages: int) -> str:
    match step:
        case ResamplingStep():
            return "one resampling" if stages > 1 else "resampling"
        case WarpStep():
            return "one warp" if stages > 1 else "warp"
        case PointwiseStep():
            return "pixel by pixel"
        case LocalStep():
            return "pixels and their neighbours"
        case OpaqueStep():
            return "in Python for each image"
        case _:
            assert_never(step)


def _facts(config: Config, name: str, program: AnyProgram, source: _SourceFacts | None) -> Iterator[tuple[str, str]]:
    """Yield each heading with its text. source: None for the block `serve`, which reads none."""
    yield "preprocessing", program.pipeline.fingerprint
    yield "conventions", _conventions(program.decoder)
    if source is None:
        assert config.serve is not None
        model = config.serve.model
        yield "model", f"{model.file} ({model.engine})" if model is not None else "none, images only"
        return
    pipeline, run = config.pipelines[name], config.run
    size = pipeline.batch.size or pipeline.batch.global_size or 0
    megabytes = size * slot_bytes_of(program) / 1e6
    yield from ((heading, text) for heading, text in source.facts.items() if text)
    yield "batch", f"{size} images of {_results(program)} ({megabytes:.1f} MB), {run.prefetch} ahead"
    if program.mixings:
        yield "labels", "float32, the probability of each class, as samples of a batch are mixed"
    yield "order", f"{_order(config, name)}, seed {config.source.seed}"
    yield "bad samples", " ".join(config.on_error_of(name))
    processes = decode_processes_of(config, name, source.samples, remote=source.remote)
    helpers = f", and {processes} decode process(es) that take over when started" if processes else ""
    yield "device", f"cpu, {threads_of(run)} decode thread(s){helpers}"
    if parts := parts_in_python(config, name):
        can_fork = not source.remote and not readers_of(config, gpu=False, remote=source.remote)
        yield "in Python", f"{', '.join(parts)}{_cost_text(processes, can_fork=can_fork)}"
    elif source.no_jpegs:
        yield "in Python", source.no_jpegs
    yield "decoder", program.decoder.library or decoder_description()
    yield "on a GPU", f"{explain_gpu(config, name)}{_cpu_share_text(config, name)}"


def _cost_text(processes: int, *, can_fork: bool) -> str:
    """Return what Python code for each image costs, and what avoids that."""
    cost, remedy = "for each image, between native calls", "stages of gpuflow and JPEGs avoid that"
    if processes:
        return f": {cost}, in all decode processes at once; {remedy}"
    return f": {cost}, on one thread at a time; {remedy}{', run.processes: N spreads it over cores' * can_fork}"


def _order(config: Config, name: str) -> str:
    spec = config.source
    if not config.pipelines[name].shuffle:
        return "as in the source"
    if isinstance(spec, Mix):
        return f"each {spec.by} drawn from {len(spec.mix)} sources in the proportions of their weights, shuffled"
    if spec.weights is not None:
        way = f"{'with' if spec.weights.replacement else 'without'} replacement"
        if (balance := spec.weights.balance) is None:
            return f"drawn by weights {way}"
        each = "class" if balance == "class" else f"value of {balance.column}"
        often = "equally often" if spec.weights.replacement else "equally often until its samples are used up"
        return f"each {each} drawn {often}, {way}"
    return "shuffled"


def _results(program: AnyProgram) -> str:
    if isinstance(program, ViewsProgram):
        return " and ".join(f"{view.name}, {view.count} x {result}" for view, result in program.results)
    return str(program.result)


def _conventions(decoder: Decoder) -> str:
    """Say what becomes of the parts of a file that are not its levels; docs/decoding.md says more."""
    if decoder.library is not None:
        return f"those of {decoder.library}"
    alpha = "ignored" if decoder.background is None else f"composited over {list(decoder.background)}"
    turned = "applied" if decoder.orientation == "apply" else "ignored"
    others = f"; also decodes {', '.join(decoder.formats)}" if decoder.formats else ""
    return f"alpha is {alpha}, EXIF orientation is {turned}, ICC profiles are ignored{others}"


def _cpu_share_text(config: Config, name: str) -> str:
    share = cpu_share_of(config, name)
    if share is None:
        return ""
    return f"; {share.part:.0%} of each batch {'at first ' * share.adapts}on the CPU, by {share.threads} thread(s)"


@dataclass(frozen=True, kw_only=True, slots=True)
class _SourceFacts:
    """Facts of a source as text by heading, empty where there is nothing to say.

    samples: how many it has. remote: whether it is read remotely. no_jpegs: which images are no JPEGs. error: why it
    cannot be read.
    """

    facts: dict[str, str]
    samples: int = 0
    remote: bool
    no_jpegs: str = ""
    error: SourceError | None = None


def _source(config: Config, name: str) -> _SourceFacts:
    """Open the source of a pipeline, and look at some of its images if it is not remote."""
    where = config.source.where
    try:
        whole = open_whole(config)
        source = open_split(config, name, whole)
        division = divide(whole, config.source, config.part_names)
        lacking = lacking_text(config, whole, division) if config.split_of(name) is not None else ""
    except SourceError as error:
        return _SourceFacts(facts={"source": redacted(f"{where}: {error}")}, remote=is_remote(where), error=error)
    part = config.split_of(name)
    unstratified = "" if has_one_class(whole) else " (not stratified: samples have not one class each)"
    moves = "; adding or removing files moves samples between the parts" if config.source.fractions else ""
    if config.source.rule is not None:
        unstratified = ""
    split = "" if part is None else f", split {part} of {division}{unstratified}{moves}"
    note = f"; {whole.note}" if isinstance(whole, TableSource) and whole.note else ""
    text = f"{where}: {len(source):,} samples, {len(source.classes)} classes{split}{note}"
    remote, decoder, fingerprint = is_read_remotely(source), config.any_program(name).decoder, fingerprint_of(source)
    headers = {} if remote else _headers(source, decoder)
    facts = {
        "source": redacted(text),
        "parts": lacking,
        "fields": _fields(config, source),
        "classes": _counts(source.classes, source.labels) if has_one_class(source) else "",
        "drawn": _drawn(config, name, source),
        "left out": _left_out(source),
        "turned": _turned(source, decoder, headers),
        "fingerprint": fingerprint and f"{fingerprint}; ranks of a process group compare it, this command does not",
    }
    return _SourceFacts(facts=facts, samples=len(source), remote=remote, no_jpegs=_no_jpegs(headers))


def _drawn(config: Config, name: str, source: Source) -> str:
    """Return how often an epoch draws each class, or what is balanced, where weights or a mix decide it; else empty."""
    spec, pipeline = config.source, config.pipelines[name]
    if not pipeline.shuffle or (spec.weights is None and not isinstance(spec, Mix)):
        return ""
    names, groups, of = source.classes, source.labels, ""
    try:
        if isinstance(spec, Samples) and spec.weights is not None and isinstance(spec.weights.balance, BalanceSpec):
            names, groups = balanced_groups(spec, source)
            of = f"; of {spec.weights.balance.column} there are {_counts(names, groups)}"
        elif not has_one_class(source):
            return ""
        order = order_of(config, source, pipeline, pipeline.batch.size or pipeline.batch.global_size or 1)
    except SourceError as error:
        return redacted(str(error))
    count = min(order.size, _MOST_DRAWN)
    part = "" if count == order.size else f"the first {count:,} samples of "
    return f"{_counts(names, groups[order.indices(0, np.arange(count))])} in {part}epoch 0{of}"


def _counts(names: Sequence[str], groups: Ints) -> str:
    """Return how many samples each group has; of many groups the largest and the smallest ones. groups: the number of
    each sample's."""
    counts = np.bincount(groups, minlength=len(names))
    texts = [f"{name}: {count:,}" for name, count in zip(names, counts.tolist(), strict=True)]
    if len(texts) > _NAMED_GROUPS:
        ranked = np.argsort(-counts, kind="stable").tolist()
        half = _NAMED_GROUPS // 2
        texts = [*(texts[i] for i in ranked[:half]), "...", *(texts[i] for i in ranked[-half:])]
    return ", ".join(texts)


def _headers(source: Source, decoder: Decoder) -> dict[int, Header]:
    """Return the headers of some images of a source by their indices, without those that are bad."""
    headers = {}
    for index in spread(len(source), _LOOKED_AT):
        payload = source.read([index], lambda size: np.empty(size, np.uint8))
        with suppress(BadSampleError):
            headers[index] = header_of(payload.sample(0), decoder, orientation=True)
    return headers


def _no_jpegs(headers: dict[int, Header]) -> str:
    """Return how many of some images are not decoded by native code, and what that costs; empty for none."""
    formats = [header.format for header in headers.values() if header.format != "jpeg"]
    formats += ["CMYK jpeg" for header in headers.values() if header.format == "jpeg" and header.channels == 4]
    if not formats:
        return ""
    some = f"{len(formats)} of {len(headers)} images that were looked at ({', '.join(sorted(set(formats)))})"
    return f"{some}: each is decoded whole, between native calls; JPEGs are decoded within them"


def _turned(source: Source, decoder: Decoder, headers: dict[int, Header]) -> str:
    """Return how many of some images EXIF data turn, where their fields have coordinates; empty for none."""
    if decoder.orientation is not None or all(field.type not in GEOMETRIC for field in fields_of(source)):
        return ""
    turned = [(index, header.orientation) for index, header in headers.items() if header.orientation != 1]
    if not turned:
        return ""
    index, tag = turned[0]
    return turned_text(f"{len(turned)} of {len(headers)} images that were looked at", source.path(index), tag)


def _left_out(source: Source) -> str:
    """Return how many instances the source leaves out, and why the first; empty if it leaves out none."""
    found = left_out_of(source).values()
    if not found:
        return ""
    count, first = sum(each.instances for each in found), next(iter(found)).reason
    return f"{count:,} instances of {len(found):,} samples, whose annotations are incomplete; the first: {first}"


def _fields(config: Config, source: Source) -> str:
    """Say what a sample carries, where its fields are declared; empty for an image and a label."""
    if not config.source.declared and not fields_of(source):
        return ""
    words = ["image"]
    if has_labels(source):
        kinds = {"i": "class", "u": "classes", "f": "number" if source.labels.ndim == 1 else "vector"}
        words.append(f"label ({kinds[source.labels.dtype.kind]})")
    for field in fields_of(source):
        details: list[str] = [field.type] if field.type != field.name else []
        details += [f"labels {field.labels!r} of {len(field.classes)} classes"] if field.labels else []
        details += ["an instance each"] if field.instances else []
        words.append(f"{field.name} ({', '.join(details)})" if details else field.name)
    return ", ".join(words) + ("" if has_labels(source) else "; no label")
