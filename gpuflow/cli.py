"""The command line. Every command reads its own `--help`; results go to stdout, progress and errors to stderr."""

from __future__ import annotations

import _thread
import importlib.util
import io
import json
import os
import re
import shlex
import signal
import sys
import threading
import time
import warnings
from collections import Counter
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import typer
from rich.console import Console, RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Column
from rich.text import Text
from typer.core import TyperCommand, TyperGroup

from gpuflow.errors import (
    ConfigError,
    ExitCode,
    GpuflowError,
    MissingExtra,
    Problem,
    SourceError,
    is_system_fault,
    json_value,
)
from gpuflow.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from gpuflow.config import Config
    from gpuflow.loader.loader import Loader
    from gpuflow.pipeline.views import AnyProgram
    from gpuflow.tools.predict import RowPredictor
    from gpuflow.tools.scan import Finding


_out = Console(highlight=False, markup=False, emoji=False)
_err = Console(stderr=True, highlight=False, markup=False, emoji=False)
_standard_format_warning = warnings.formatwarning


def _print(content: RenderableType, console: Console = _out) -> None:
    """Print a text or a table: on a terminal in lines that end between words, elsewhere in whole lines."""
    if console.is_terminal:
        console.print(content)
    else:
        console.print(content, soft_wrap=True, width=_NO_TERMINAL)


_NO_TERMINAL = 10_000
"""Columns of a file or a pipe, so that no line is broken there."""
_print_err = partial(_print, console=_err)


class _Commands(TyperGroup):
    """Ends a command without a traceback: exit 1 with a line for each fault, exit 130 after Ctrl-C.

    With --json, `ctx.obj` holds the results of the command, which are printed when it ends, errors included.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.obj = {} if "--json" in args else None  # also where the command then refuses its options
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        try:
            super().invoke(ctx)
        except typer.Exit as end:
            raise _ended(ctx, end.exit_code) from None
        except KeyboardInterrupt:
            raise _interrupted(ctx) from None
        except Exception as error:
            if isinstance(error, _UsageError):
                _ended(ctx, ExitCode.USAGE, [{**Problem("", error.format_message()).as_dict(), "code": "usage"}])
                raise
            if not _is_fault(error):
                if isinstance(error.__context__, KeyboardInterrupt):  # it left one of torch's contexts half closed
                    raise _interrupted(ctx) from None
                raise
            problems = error.problems if isinstance(error, ConfigError) else (Problem("", _text_of(error)),)
            rank = os.environ.get("RANK", "")  # torchrun lets all its processes print to one terminal
            for problem in problems:
                _say("error", f"rank {rank}: {problem}" if rank else str(problem))
            code = {} if isinstance(error, ConfigError) else {"code": getattr(error, "code", type(error).__name__)}
            raise _ended(ctx, ExitCode.FAILED, [{**problem.as_dict(), **code} for problem in problems]) from error
        _ended(ctx, ExitCode.DONE)


_UsageError: Any = typer.BadParameter.__base__


def _ended(ctx: Any, code: int, errors: Sequence[dict[str, Any]] = ()) -> typer.Exit:
    """Print the JSON document of a command that was asked for one, and return how the command ends."""
    if ctx.obj is not None and (code or ctx.obj):  # --help leaves it empty
        document = {"version": 1, "exit_code": code, "errors": errors, **ctx.obj}
        print(json.dumps(json_value(document), indent=2))
    return typer.Exit(code)


app = typer.Typer(
    cls=_Commands,
    help="Turns images into tensors, as one YAML file describes, for PyTorch training and for serving.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    add_completion=False,
)

_Function = TypeVar("_Function", bound="Callable[..., None]")
_FILES, _DATA, _TRAIN = "Write and check a file", "Look at data", "Train"
_SERVE, _MEASURE = "Predict and serve", "Measure and compare"
"""Which jobs commands are for, as `gpuflow --help` groups them."""


def _command(
    job: str, example: str, *, name: str | None = None, cls: type[TyperCommand] = TyperCommand
) -> Callable[[_Function], _Function]:
    """Return a decorator that adds a command to those of a job. The example ends its help."""
    return app.command(name, cls=cls, rich_help_panel=job, epilog=f"Example: `{example}`")


ConfigFile = Annotated[Path, typer.Argument(metavar="FILE", help="The YAML file, such as configs/photos.yaml.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY.KEY=VALUE]...", help="Overrides of the file, such as run.threads=8."),
]
AsJson = Annotated[
    bool, typer.Option("--json", help="Print the results as one JSON document, with the errors if there are any.")
]
"""`_Commands` looks for the option, and the commands at the document that it begins."""
WhichPipeline = Annotated[str, typer.Option("--pipeline", help="Which pipeline to run.")]
SourcePart = Annotated[str, typer.Option("--pipeline", help="The pipeline whose part of the source is read.")]
ModelDevice = Annotated[str | None, typer.Option(help="cpu, cuda or cuda:1; by default a GPU if there is one.")]
OtherImages = Annotated[Path | None, typer.Option(metavar="DIR", help="Images in place of those of the source.")]
Seconds = Annotated[float, typer.Option(min=0.1, max=1e6, help="Length of a measurement.")]


_positive = partial(typer.Option, min=0.001, max=1e6)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"gpuflow {__version__}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Take the options of gpuflow itself, which `_print_version` has answered."""


def main() -> None:
    """Run the console script."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as stderr: file names need not be text
    warnings.formatwarning = _format_warning
    sys.unraisablehook = partial(_interrupt_again, sys.unraisablehook)
    app()


_HOW_TO_GO_ON = "gpuflow.how_to_go_on"


def _interrupted(ctx: Any) -> typer.Exit:
    """Say how to go on after a Ctrl-C, where the command put that into `ctx.meta`, and return how it ends."""
    _print_err("interrupted" + ctx.meta.get(_HOW_TO_GO_ON, str)())
    return _ended(ctx, ExitCode.INTERRUPTED)


def _interrupt_again(report: Callable[[sys.UnraisableHookArgs], object], unraisable: sys.UnraisableHookArgs) -> None:
    """Repeat a Ctrl-C that came in a `__del__` or a weak reference's callback: Python prints it there and continues."""
    if issubclass(unraisable.exc_type, KeyboardInterrupt):
        _thread.start_new_thread(_interrupt_soon, (threading.get_ident(),))
    else:
        report(unraisable)


def _interrupt_soon(thread: int) -> None:
    time.sleep(0.01)  # until the callback has ended
    signal.pthread_kill(thread, signal.SIGINT)


def _format_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """Return a warning about gpuflow's input as one line, as errors are; others with their line of code."""
    if issubclass(category, UserWarning) and Path(filename).is_relative_to(Path(__file__).parent):
        return f"warning: {message}\n"
    return _standard_format_warning(message, category, filename, lineno, line)


def _is_fault(error: Exception) -> bool:
    """Return True for a fault of the input or the machine, False for one of this code or of the pipe behind stdout."""
    if isinstance(error, BrokenPipeError):
        return isinstance(error, GpuflowError)
    return isinstance(error, (GpuflowError, ValueError, OSError)) or is_system_fault(error)


def _text_of(error: Exception) -> str:
    """Return the text of an exception; of a failed system call its file and the reason, without its number."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror if error.filename is None else f"{error.filename}: {error.strerror}"
    return str(error) or type(error).__name__


_STYLES = {"error": "red", "valid": "green"}


def _labelled(label: str, text: str) -> Text:
    """Return a text behind a coloured label."""
    return Text.assemble((f"{label}:", _STYLES.get(label, "yellow")), " ", text)


def _say(label: str, text: str) -> None:
    _print_err(_labelled(label, text))


def _show(ctx: typer.Context, *contents: RenderableType, **values: Any) -> None:
    """Print results, or add them as values to the document of --json."""
    if ctx.obj is not None:
        ctx.obj |= values
        return
    for content in contents:
        _print(content)


def _show_written(ctx: typer.Context, *files: Path | str) -> None:
    _show(ctx, *(f"wrote {file}" for file in files), files=list(map(str, files)))


def _fail_if(failed: object) -> None:
    """End a command that has shown its results with the exit code of a check that did not pass."""
    if failed:
        raise typer.Exit(ExitCode.FAILED)


def _order_note(config: Config) -> str:
    """Return what to change if a training gets the images of one class after those of another; empty otherwise."""
    pipeline, sources = config.pipelines.get("train"), config.sources
    if pipeline is None or pipeline.shuffle or not any(source.by_class for source in sources):
        return ""
    return "pipelines.train takes one class of the folder after the other; set pipelines.train.shuffle to true"


def _check_output(option: str, path: Path, *, folder: bool = False, new: bool = False) -> None:
    """Check that a file, or files in a folder, can be written, before the work whose results they hold.

    Raises:
        ConfigError: what stands there is a directory, a device or a pipe, or none can be made or written to. With
            `new` also that there is a file.
    """
    from gpuflow.runtime.files import replaced_file

    place = path if folder else replaced_file(path).parent
    while not place.exists():
        place = place.parent
    if not folder and path.exists() and not path.is_file():
        rule = f"must be a file, and is a {'directory' if path.is_dir() else 'device or a pipe'}"
    elif not place.is_dir():
        rule = "must be a directory" if place == path else f"must be in a directory, and {place} is none"
    elif not os.access(place, os.W_OK | os.X_OK):
        rule = f"must be in a directory that can be written to, and {place} cannot"
    elif new and path.exists():
        rule = "exists and is not overwritten; remove it, or name another"
    else:
        return
    raise ConfigError([Problem(f"{option}:", f"{path} {rule}")])


def _write(path: Path, text: str) -> None:
    """Write a text file, and the directories that it lies in."""
    from gpuflow.runtime.files import atomic_write, replaced_file

    replaced_file(path).parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path, text=True) as file:
        file.write(text)


def _read(path: Path, overrides: list[str] | None) -> Config:
    from gpuflow.config import read_config
    from gpuflow.vocabulary import stage_table

    return read_config(path, stage_table(), overrides or [])


class _NoteColumn(ProgressColumn):
    """The note of a task, cut to what the other columns leave of the line.

    A bar has one line: rich draws it from two threads, and leaves lines on the screen where its height changes.
    """

    def render(self, task: Task) -> Text:
        return Text(task.fields["note"], no_wrap=True, overflow="ellipsis")


@contextmanager
def _bar(*, quiet: bool = False) -> Iterator[Progress]:
    """Show a progress bar on stderr. What fails before its first step leaves none behind.

    Where stdout is a terminal, too, the bar is that console's, which prints results above it.
    """
    one_terminal = _out.is_terminal and _err.is_terminal
    console = Console(quiet=True) if quiet else _out if one_terminal else _err
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=console.width // 6),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        _NoteColumn(Column()),  # a column that may be narrowed
    )
    with Progress(*columns, console=console, redirect_stdout=one_terminal) as bar:
        try:
            yield bar
        except BaseException:
            for task in bar.tasks:
                bar.update(task.id, visible=task.completed > 0)
            raise


@contextmanager
def _task(description: str, total: int | None = None, *, quiet: bool = False) -> Iterator[Callable[..., None]]:
    """Show a bar for one task. Give what updates it: `completed` or `advance`, `total`, `note`."""
    with _bar(quiet=quiet) as bar:
        task = bar.add_task(description, total=total, note="", visible=total is not None)
        yield partial(bar.update, task, visible=True)


@_command(_DATA, "gpuflow samples data/photos -n 2000")
def samples(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Where to put them: one directory a class.")],
    count: Annotated[int, typer.Option("-n", "--count", min=1, help="How many photographs.")] = 2000,
    seed: Annotated[int, typer.Option(min=0, help="Another seed gives other crops.")] = 0,
    kind: Annotated[
        Literal["classes", "detection"],
        typer.Option(help="Photographs in a directory a class, or shapes on them with boxes and masks."),
    ] = "classes",
) -> None:
    """Make a small labelled data set: JPEGs of about 500x375 pixels, cut from photographs that Python packages ship.

    With --kind detection, photographs of about 320x240 pixels with coloured shapes: boxes, outlines and masks stand in
    instances.json (COCO's format) and listing.jsonl, masks of levels in masks/.

    The same kind, count and seed give the same files, byte for byte.
    """
    from gpuflow.tools.samples import make_detection_samples, make_samples

    _check_output("DIR", directory, folder=True)
    make = make_detection_samples if kind == "detection" else make_samples
    with _task("photographs", count) as update:
        summary = make(directory, count, seed=seed, progress=update)
    _print(str(summary))


@_command(_FILES, "gpuflow check configs/demo.yaml run.threads=8")
def check(
    ctx: typer.Context,
    path: ConfigFile,
    overrides: Overrides = None,
    leaks: Annotated[
        bool, typer.Option("--leaks", help="Also open the source, and exit 1 if two of its parts have equal files.")
    ] = False,
    max_requests: Annotated[
        int, typer.Option(min=1, help="With --leaks: the most requests to servers for sizes, for ends and for files.")
    ] = 10_000,
    as_json: AsJson = False,
) -> None:
    """Check a file: says that it is valid, or lists every error with its place and exits 1. Reads no image.

    It does not open the source, which may be on another machine; gpuflow scan does. A file of weights is read if it is
    on this one, and so is the index of a source that source.split divides by a rule, for the sizes of its parts.

    With --leaks it compares the bytes of the source's parts: sizes, then the last 4 KiB of files of equal size, then
    the files whose ends are equal.
    """
    from gpuflow.pipeline.views import named_programs
    from gpuflow.sources import check_weights_file
    from gpuflow.sources.storage.local import missing_file
    from gpuflow.tools.parts import parts_text

    config = _read(path, overrides)
    notes = [f"the source is not on this machine: {hint}" for one in config.sources if (hint := one.missing())]
    problems = []
    for weights in (one.weights for one in config.sources if one.weights is not None):
        try:
            check_weights_file(weights)
        except SourceError as error:
            problems.append(Problem(f"{path}:", str(error)))
        if weights.file is not None and (hint := missing_file(weights.file)):
            notes.append(f"source.weights.file is not on this machine: {hint}")
    if problems:
        raise ConfigError(problems)
    if config.source_block is not None and (shares := dict(config.source_block.fractions)):
        text = ", ".join(f"{name}: {share:g}" for name, share in shares.items())
        notes.append(f"files that are added move samples between parts; not with split: {{parts: {{{text}}}}}")
    notes += [note] if (note := _order_note(config)) else []
    pipelines: dict[str, Any] = {}
    lines: list[RenderableType] = []
    programs: dict[str, AnyProgram] = {**config.programs, **config.views}
    for name, program in programs.items():
        on_error = config.on_error_of(name)[0] if name in config.pipelines else None
        pipelines[name] = {"views": [], "on_error": on_error}
        for view, count, one in named_programs(program):
            stages = list(map(repr, one.pipeline.stages))
            pipelines[name]["views"] += [{"name": view, "count": count, "stages": stages, "gives": asdict(one.result)}]
            place, times = (f"{name}.{view}", f"{count} x ") if view else (name, "")
            lines.append(f"{place}: {' -> '.join(stages)}  gives {times}{one.result}")
    parts = parts_text(config)
    lines += [f"source.split: {parts}"] if parts else []
    lines += [f"{name}: on_error {' '.join(config.on_error_of(name))}" for name in config.pipelines]
    found = _leaks_of(config, max_requests, notes) if leaks else []
    lines += [_labelled("leak", leak) for leak in found]
    lines += [_labelled("note", note) for note in notes]
    action = "; remove these files, or divide with group: content" * bool(found)
    lines += [f"samples with the bytes of one in an earlier part: {len(found):,}{action}"] if leaks else []
    values = {"leaks": found} if leaks else {}
    lines += [] if found else [_labelled("valid", str(path))]
    _show(ctx, *lines, file=str(path), pipelines=pipelines, parts=parts, notes=notes, **values)
    _fail_if(found)


def _leaks_of(config: Config, max_requests: int, notes: list[str]) -> list[str]:
    """Return a line for each sample with the bytes of one in an earlier part. Adds what was not compared to `notes`."""
    from gpuflow.tools.duplicates import find_leaks
    from gpuflow.tools.parts import divided

    with divided(config) as (source, division), _task("samples") as update:
        found = find_leaks(source, division, max_requests=max_requests, progress=update)
        lines = [
            f"{division.describe(pair.index)}, {source.path(pair.index)}, {pair.describe(source, division)}"
            for pair in found.pairs
        ]
    if found.unread:
        notes.append(f"samples that cannot be read, which gpuflow scan names: {found.unread:,}")
    if found.skipped:
        action = "raise --max-requests, or run gpuflow scan, which reads all"
        notes.append(f"samples behind URLs that were not compared: {found.skipped:,}; {action}")
    return lines


@_command(_FILES, "gpuflow import torchvision:ResNet50_Weights.IMAGENET1K_V2 --out imported.yaml", name="import")
def import_(
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="SOURCE...",
            help="module:attribute, torchvision:WEIGHTS, timm:NAME, hf:DIR, albumentations:FILE or torchpipe:FILE; "
            "two, if one is random (train) and one is not (val).",
        ),
    ],
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a new file here, not to stdout.")] = None,
    partial: Annotated[
        bool, typer.Option("--partial", help="Write what can be carried over, with the nearest stage for the rest.")
    ] = False,
) -> None:
    """Write a YAML file with another library's transforms: torchvision, timm, transformers, Albumentations, torchpipe.

    module:attribute names a transform in Python, such as train:transform. It runs that module's code, as import does:
    name modules that you trust. So does torchvision:module:attribute; torchvision:ResNet50_Weights.IMAGENET1K_V2 are
    the transforms of weights. timm:NAME is a model of timm, or a JSON file with its configuration; hf:DIR the folder of
    a preprocessor_config.json; albumentations:FILE what A.save wrote; torchpipe:FILE a TOML file.

    Exits 1, and writes nothing, if something has no equal stage: each is named with the nearest stage, and how far
    apart they are. --partial writes the rest. gpuflow parity FILE --against SOURCE then compares both on your images.
    """
    from gpuflow.migration import read_sources
    from gpuflow.vocabulary import stage_table

    if out is not None:
        _check_output("--out", out, new=True)
    found = read_sources(sources, stage_table(), partial=partial)
    for problem in found.problems:
        _say("not carried over", str(problem))
    if out is None:
        print(found.text, end="")
        return
    _write(out, found.text)
    _print_err(f"wrote {out}")


@_command(_FILES, "gpuflow schema")
def schema() -> None:
    """Print the JSON Schema of the YAML file, with all stages that are installed, for editors that check keys."""
    from gpuflow.config.schema import json_schema
    from gpuflow.sources import all_kinds
    from gpuflow.vocabulary import stage_table

    print(json.dumps(json_schema(stage_table(), all_kinds()), indent=2, ensure_ascii=False))


@_command(_FILES, "gpuflow explain configs/demo.yaml --json")
def explain(ctx: typer.Context, path: ConfigFile, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Show what a file resolves to: stages, what flows between them, folding, threads, the decoder and its version.

    Exits 1 if the source cannot be read, once it has shown the rest.
    """
    from gpuflow.tools.explain import explain as explanation

    found = explanation(_read(path, overrides))
    _show(ctx, found, file=str(path), pipelines=found.as_dict())
    if found.error is not None:
        raise found.error


@_command(_DATA, "gpuflow split configs/demo.yaml --out parts.csv")
def split(
    path: ConfigFile,
    overrides: Overrides = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the part of each sample to this file.")
    ] = None,
) -> None:
    """Say how many samples each part of the source has; with --out, write a CSV file: path, label, part (and fold).

    source.split: {column: part, file: FILE} then reads the parts from that file. A file that exists is not overwritten.
    """
    from gpuflow.sources import parts_csv
    from gpuflow.tools.parts import divided

    config = _read(path, overrides)
    if out is not None:
        _check_output("--out", out, new=True)
    with divided(config) as (source, division):
        _print(str(division))
        if out is not None:
            _write(out, parts_csv(source, division))
            _print(f"wrote {out}: {len(division.parts):,} samples")


@_command(_DATA, "gpuflow show configs/demo.yaml -n 16 --out page.html")
def show(
    path: ConfigFile,
    overrides: Overrides = None,
    count: Annotated[int, typer.Option("-n", "--count", min=1, help="How many samples.")] = 16,
    pipeline: WhichPipeline = "train",
    epoch: Annotated[int, typer.Option(min=0, help="Another epoch has another order and other draws.")] = 0,
    device: Annotated[str, typer.Option(help="Where images are decoded and transformed: cpu or cuda.")] = "cpu",
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("runs/show.html"),
) -> None:
    """Write a page that shows what a pipeline's batches look like: images or views, labels, boxes, masks, keypoints.

    The samples are those that a training loop gets first in that epoch.
    """
    from gpuflow.pipeline.views import ViewsPipeline
    from gpuflow.tools.show import page, samples_of

    config = _read(path, overrides)
    described = config.any_program(pipeline).pipeline
    _check_output("--out", out)
    shown = samples_of(config, pipeline, count, epoch=epoch, device=device)
    stages = "\n".join(described.texts) if isinstance(described, ViewsPipeline) else repr(described)
    _write(out, page(f"{path.name}: {pipeline}, epoch {epoch}", stages, shown))
    _print(f"wrote {out}: {len(shown)} samples of {pipeline}")


@_command(_MEASURE, "gpuflow doctor configs/demo.yaml")
def doctor(
    ctx: typer.Context,
    path: Annotated[
        Path | None, typer.Argument(metavar="FILE", help="A YAML file, whose source is read and whose `run` counts.")
    ] = None,
    data: Annotated[Path | None, typer.Option(metavar="DIR", help="Images or tar shards to read instead.")] = None,
    as_json: AsJson = False,
) -> None:
    """Look at this machine, measure how fast images are read and decoded, and say what to change.

    The files that it reads are dropped from the page cache first, so that the disk is measured and not the memory.

    Exits 1 if there is a problem: something that makes gpuflow fail, or far slower than it could be.
    """
    from gpuflow.sources import Folder
    from gpuflow.tools.doctor import judge, report
    from gpuflow.tools.machine import broken_modules, gather

    if data is not None and not data.is_dir():
        raise ConfigError([Problem("--data:", f"must be a directory, got {str(data)!r}")])
    with _err.status(Text("looking around")) as status:
        config = _read(path, None) if path is not None and not broken_modules() else None
        source = Folder(folder=str(data)) if data is not None else config.source_block if config is not None else None
        run = {} if config is None else {"threads": config.run.threads, "readers": config.run.readers}
        machine = gather(
            source=source,
            progress=lambda text: status.update(Text(text)),
            **{name: count for name, count in run.items() if count != "auto"},
        )
    findings = judge(machine)
    _show(ctx, report(findings), machine=asdict(machine), findings=list(map(asdict, findings)))
    _fail_if(any(finding.status == "problem" for finding in findings))


class _TrainCommand(TyperCommand):
    """Takes --resume without a value as --resume=checkpoint."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if dict(pairwise([*args, ""])).get("--resume") not in ("checkpoint", "auto"):
            args = ["--resume=checkpoint" if arg == "--resume" else arg for arg in args]
        return super().parse_args(ctx, args)


@_command(_TRAIN, "gpuflow train configs/demo.yaml --resume auto", cls=_TrainCommand)
def train(
    ctx: typer.Context,
    path: ConfigFile,
    overrides: Overrides = None,
    max_steps: Annotated[int | None, typer.Option(min=1, help="Stop after this many steps, with a checkpoint.")] = None,
    resume: Annotated[
        Literal["checkpoint", "auto"] | None,
        typer.Option(help="Go on from the checkpoint in train.out; auto: if there is one."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Start anew, over a checkpoint in train.out.")] = False,
    device: ModelDevice = None,
    metrics_port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Serve Prometheus metrics there; rank r of a host at port + r.")
    ] = None,
) -> None:
    """Train the model that `train:` names on the pipeline `train`, and validate on `val`: a small reference trainer.

    It trains classifiers of torchvision, and of timm as timm:NAME, on classes or numbers. For more, iterate
    gpuflow.load in a loop of your own.

    Writes <train.out>/last.pt after each epoch, and within it as train.save_every says, with the weights, the loader's
    state and the preprocessing's hash; a copy of the best one, best.pt; metrics.csv with a row for each epoch; and
    classes.csv. If there are such files already, exits 1 unless --resume or --force is given.

    One process a GPU: torchrun --nproc-per-node 2 -m gpuflow train FILE. Batch sizes are those of a process.

    After a SIGTERM or SIGUSR1 to any of the processes, all save after the same step and exit 75; a second one ends a
    process at once.
    """
    from gpuflow.runtime.preemption import Preemption

    preemption = ctx.with_resource(Preemption())  # before torch is imported, which takes seconds
    from gpuflow.loader.metrics_server import serve_metrics
    from gpuflow.runtime.ranks import Ranks, device_named
    from gpuflow.training.trainer import PassResult, Trainer, TrainerEvents

    class Bar(TrainerEvents):
        """Shows each pass as a bar, and its result as a line."""

        task: TaskID
        loader: Loader

        def begin_pass(self, name: str, epoch: int, steps: int) -> None:
            self.loader = trainer.loaders[name]
            self.task = bar.add_task(f"epoch {epoch + 1} {name:5}", total=steps, note="")

        def step(self, loss: float, images_per_s: float) -> None:
            note = f"loss {loss:.3f}  {images_per_s:,.0f} images/s  {self.loader.summary()}"
            bar.update(self.task, advance=1, note=note)

        def end_pass(self, name: str, epoch: int, result: PassResult) -> None:
            bar.remove_task(self.task)
            bad = self.loader.stats()["bad_distinct"]
            whose = "" if ranks.world_size == 1 else " on rank 0"
            steps, total = result.steps, result.steps_in_pass
            _print(
                f"epoch {epoch + 1}  {name:5}  loss {result.loss:.3f}  "
                + "".join(f"{measure} {value:.3f}  " for measure, value in result.measures.items())
                + f"{result.images_per_s:,.0f} images/s"
                + (f"  (steps {steps.start + 1} to {steps.stop} of {total})" if len(steps) < total else "")
                + (f"  bad samples so far{whose}: {bad:,}, which gpuflow scan lists" if bad else "")
            )

    if resume and force:
        raise ValueError("train: needs at most one of --resume and --force, got both")
    ranks = Ranks.from_environment()
    if device is not None:
        device_named(device)
    config = _read(path, overrides)
    trainer = Trainer(
        config,
        device=device,
        resume="auto" if resume == "auto" else resume is not None,
        force=force,
        ranks=ranks,
        preemption=preemption,
    )
    first, start = ranks.rank == 0, trainer.step
    if first:
        kept = trainer.checkpoint
        ctx.meta[_HOW_TO_GO_ON] = lambda: (
            f"; --resume goes on from {kept}" if kept.exists() else "; nothing was saved yet"
        )
        if note := _order_note(config):
            _say("note", note)
        _print_err("\n".join(trainer.header))
    with ExitStack() as stack:
        if metrics_port is not None:
            stack.enter_context(serve_metrics(trainer.loaders, port=metrics_port))
        bar = stack.enter_context(_bar(quiet=not first))
        trainer.run(Bar() if first else TrainerEvents(), max_steps=max_steps)
    if first:
        text = f"saved {trainer.checkpoint} at step {trainer.step}, preprocessing {trainer.preprocessing}"
        if trainer.step == start:
            done = f"{trainer.checkpoint} is at step {start}, after train.epochs = {config.train.epochs}"
            text = f"nothing left to train: {done}; raise train.epochs to go on"
        _print(text)
        next_command = shlex.join(trainer.next_command(str(path), overrides or ()))
        _print_err("stopped by a signal; --resume goes on" if trainer.preempted else f"next: {next_command}")
    if trainer.preempted:
        raise typer.Exit(ExitCode.SAVED)


@_command(_TRAIN, "gpuflow audit runs/demo/audit-0.jsonl")
def audit(
    ctx: typer.Context,
    logs: Annotated[list[Path], typer.Argument(metavar="LOG...", help="The files of all ranks, of all restarts.")],
    as_json: AsJson = False,
) -> None:
    """Prove from the files of run.audit that a training got each sample of each epoch exactly once.

    After a restart, what was delivered after the restored checkpoint does not count, and comes again. Exits 1 if
    samples are missing or came several times, and names them.
    """
    from gpuflow.tools import audit as audits

    lines, damaged = audits.read_lines(logs)
    for place in damaged:
        _say("note", f"{place} is incomplete, as a kill leaves it, and was left out")
    epochs = audits.audit(lines)
    _show(ctx, *map(str, epochs), epochs=[epoch.as_dict() for epoch in epochs], damaged=damaged)
    _fail_if(any(epoch.faults for epoch in epochs))


@_command(_MEASURE, "gpuflow bench configs/demo.yaml --workers 1,2,4 --against dataloader,spdl")
def bench(
    ctx: typer.Context,
    path: ConfigFile,
    overrides: Overrides = None,
    workers: Annotated[str, typer.Option(help="Numbers of workers, separated by commas.")] = "1,2",
    against: Annotated[
        str, typer.Option(help="What to compare with: dataloader, dataloader-uint8, spdl; separated by commas.")
    ] = "dataloader",
    workloads: Annotated[
        str,
        typer.Option(
            help="What to measure, separated by commas. pipeline: the file's pipeline as it is; decode: decode and "
            "resize to its size, one image a batch; batch: the same in its batches; normalize: these normalized; "
            "transfer: these copied to the GPU. By default all that this machine and the pipeline allow."
        ),
    ] = "",
    pipeline: WhichPipeline = "train",
    repeats: Annotated[int, typer.Option(min=1, help="Measurements of each point; the median counts.")] = 3,
    seconds: Seconds = 4.0,
    out: Annotated[Path, typer.Option(help="Where to write worker_scaling.csv, .png and .svg.")] = Path("plots/out"),
    as_json: AsJson = False,
) -> None:
    """Measure images a second against the number of workers, for gpuflow and for others on the same work.

    The arms take turns, each measurement in a fresh process. Prints a table of each workload with the ratio of gpuflow
    to each other arm; writes a CSV and a plot of medians and spread. Warns if other processes use more than a tenth of
    this machine.
    """
    from gpuflow.tools import bench as b

    counts = _counts("--workers", workers)
    arms = ["gpuflow", *b.names_of("--against", against, [arm for arm in b.ARMS if arm != "gpuflow"])]
    wanted = b.names_of("--workloads", workloads, b.WORKLOADS)
    config = _read(path, overrides)
    config.program(pipeline)
    _check_output("--out", out, folder=True)
    problems = {name: b.workload_problem(config, pipeline, name) for name in wanted or b.WORKLOADS}
    notes = []
    for name, problem in problems.items():
        if problem and wanted:
            raise ConfigError([Problem("--workloads:", f"{name} {problem}", action="leave it out")])
        if problem:
            notes.append(f"{name} is left out: it {problem}")
            _say("note", notes[-1])
    jobs = [
        b.Job(
            arm=arm,
            path=str(path),
            overrides=tuple(overrides or ()),
            pipeline=pipeline,
            workers=count,
            seconds=seconds,
            workload=name,
        )
        for name, problem in problems.items()
        for count in counts
        for arm in arms
        if not problem
    ]
    busy: dict[b.Job, float] = {}
    with _task("measurements", repeats * len(jobs)) as update:

        def note(job: b.Job, rate: float) -> None:
            update(advance=1, note=f"{job.workload}, {job.arm}, {job.workers} worker(s): {rate:,.0f} images/s")

        def warn(job: b.Job, share: float) -> None:
            if not busy:
                text = f"other processes use {share:.0%} of this machine, so that rates are too low; end them, or wait"
                notes.append(text)
                _say("warning", text)
            busy[job] = max(share, busy.get(job, 0.0))

        rates = b.measure(jobs, repeats=repeats, progress=note, busy=warn)
    source = " and ".join(Path(one.where).name for one in config.sources)
    titles = {name: f"pipeline {pipeline}" if name == "pipeline" else name for name in problems}
    rows = [
        b.row(job.arm, f"{titles[job.workload]}: {source}; workers={job.workers}", "images_per_s", values, "images/s")
        for job, values in rates.items()
    ]
    results = out / "worker_scaling.csv"
    b.write_results(results, rows)
    figures = b.figures(rates, busy)
    for name in dict.fromkeys(job.workload for job in jobs):
        table = b.table([figure for figure in figures if figure.workload == name])
        _show(ctx, f"{titles[name]}: {source}", table)
    where = {key: rows[0][key] for key in ("machine", "versions", "commit", "date")}
    _show(ctx, file=str(path), pipeline=pipeline, results=list(map(asdict, figures)), notes=notes, **where)
    _show_written(ctx, results, *_plot("lines", "worker_scaling", results))


def _counts(option: str, text: str) -> list[int]:
    """Return the numbers in a text such as `1,2,4`."""
    counts = [int(word) if word.strip().isdecimal() else 0 for word in text.split(",")]
    rule = "must be numbers >= 1 separated by commas, each once"
    if min(counts) < 1 or len(set(counts)) < len(counts):
        raise ConfigError([Problem(f"{option}:", rule, text, code="config.range")])
    return counts


def _plot(module: str, function: str, results: Path) -> list[str]:
    """Draw results next to their file, by a function of a module in plots. Return the files that it wrote."""
    try:
        draw = getattr(importlib.import_module(f"gpuflow.plots.{module}"), function)
    except ImportError as error:
        raise MissingExtra("the plot", "matplotlib", "plots") from error
    return list(map(str, draw(results, results.with_suffix(""))))


@_command(_DATA, "gpuflow scan configs/demo.yaml --json")
def scan(
    ctx: typer.Context,
    path: ConfigFile,
    overrides: Overrides = None,
    near: Annotated[
        int, typer.Option(min=0, max=10, help="The most bits, of 64, in which the hashes of similar images differ.")
    ] = 6,
    out: Annotated[Path, typer.Option(help="The page of similar images to write, if there are any.")] = Path(
        "runs/scan.html"
    ),
    as_json: AsJson = False,
) -> None:
    """Read and decode the whole source once; print bad, CMYK and misnamed samples as JSON lines.

    Files of a format that `decode.formats` must name say so in `needs`, and the last line gives the key to add.

    Then compares all samples: the kind `leak` has the bytes of a sample of an earlier part of the source, `near` looks
    like one. A page shows similar images, also those within one part.

    Exits 1 if a sample is in two parts, or if any is bad, that is, cannot be decoded within the limits of the file's
    first decode stage, or within run.timeout_s.
    """
    from gpuflow.config.models import require_record_fields
    from gpuflow.config.resources import threads_of
    from gpuflow.loader.assemble import division_of, open_whole
    from gpuflow.loader.records import TURNED_REMEDY, target_mapper
    from gpuflow.sources import fields_of
    from gpuflow.tools.duplicates import Contents
    from gpuflow.tools.scan import Duplicates
    from gpuflow.tools.scan import scan as findings
    from gpuflow.tools.show import page

    config = _read(path, overrides)
    _check_output("--out", out)
    source = open_whole(config)
    division, contents = division_of(config, source), Contents(len(source))
    first = next(iter(config.pipelines))
    program = config.any_program(first)
    require_record_fields(config, first, source)
    threads = threads_of(config.run)
    rows: list[dict[str, Any]] = []
    bad = 0

    def add(finding: Finding) -> None:
        rows.append(finding.row())
        if ctx.obj is None:
            _out.print(json.dumps(rows[-1]), soft_wrap=True)

    with _task("samples", len(source)) as update:
        found = findings(
            source,
            program.decoder,
            threads=threads,
            record_values=program.record_values,
            mapper=target_mapper(config, first, fields_of(source)),
            contents=contents,
            timeout_seconds=config.run.timeout_s,
            progress=lambda n: update(advance=n),
        )
        for finding in found:
            add(finding)
            bad += finding.bad
            update(note=f"{bad} bad")
        duplicates = Duplicates(source, division, contents, near)
        for finding in duplicates.findings():
            add(finding)
    turned = sum(row["kind"] == "turned" for row in rows)
    needed = Counter(row["needs"] for row in rows if "needs" in row)
    values = {"leaks": len(duplicates.leaks), "findings": rows}
    _show(ctx, file=str(path), samples=len(source), bad=bad, turned=turned, needs=needed, **values)
    if pictures := duplicates.pictures(program.decoder):
        _write(out, page(f"{path.name}: similar images", f"at most {near} of 64 bits differ", pictures))
        _print_err(f"wrote {out}: {len(pictures)} pairs of similar images")
    for note in duplicates.notes():
        _print_err(note)
    _print_err(f"{len(source):,} samples, {bad} bad")
    if turned:
        _print_err(f"{turned:,} turned: {TURNED_REMEDY}")
    if needed:
        counts = ", ".join(f"{count:,} {name}" for name, count in sorted(needed.items()))
        names = ", ".join(sorted({*program.decoder.formats, *needed}))
        _print_err(f"{counts}: decode: {{formats: [{names}]}} has them decoded, with pip install 'gpuflow[formats]'")
    source.close()
    _fail_if(bad or duplicates.leaks)


@_command(_SERVE, "gpuflow export configs/demo.yaml --onnx model.onnx")
def export(
    path: ConfigFile,
    overrides: Overrides = None,
    onnx: Annotated[Path | None, typer.Option(metavar="OUT", help="Write the trained model as OUT.onnx.")] = None,
    pt2: Annotated[Path | None, typer.Option(metavar="OUT", help="Write it as OUT.pt2, for torch.export.load.")] = None,
    toml: Annotated[
        Path | None, typer.Option(metavar="OUT", help="Write the block serve as a torchpipe graph, OUT.toml.")
    ] = None,
    device: Annotated[str, typer.Option(help="Where the graph of --toml runs the model: cpu or cuda.")] = "cpu",
    checkpoint: Annotated[
        Path | None,
        typer.Option(metavar="CKPT", help="By default serve.model.file if it is a .pt, else <train.out>/last.pt."),
    ] = None,
    fold_normalize: Annotated[
        bool, typer.Option("--fold-normalize", help="Put normalize into the model, which then takes uint8 pixels.")
    ] = False,
    opset: Annotated[int | None, typer.Option(min=18, max=25, help="Of ONNX; torch's default otherwise.")] = None,
    data: OtherImages = None,
) -> None:
    """Write what the file describes for serving: the model that `gpuflow train` left, or the graph that serves it.

    A model has a dynamic batch axis, and is checked against torch on random images and on real ones that go through the
    pipeline. If a logit is off by more than 1e-4 of the largest one, nothing is written and the exit code is 1.
    """
    given = {"--onnx": onnx, "--pt2": pt2, "--toml": toml}
    chosen = {option: out for option, out in given.items() if out is not None}
    if len(chosen) != 1:
        got = " and ".join(chosen) or "none of them"
        raise ValueError(f"export: needs exactly one of {', '.join(given)}, got {got}")
    [(option, out)] = chosen.items()
    if (suffix := option.replace("--", ".")) != out.suffix:
        raise ValueError(f"{option}: must name a {suffix} file, got {str(out)!r}")
    config = _read(path, overrides)
    _check_output(option, out)
    if option == "--toml":
        from gpuflow.runtime.ranks import device_named
        from gpuflow.torchpipe.graph import lower, to_toml

        graph = lower(config, device=str(device_named(device)))
        _write(out, to_toml(graph, file=str(out)))
        _print(f"wrote {out}: preprocessing {graph.preprocessing}; its header says how to run it")
        return
    from gpuflow.serve.export import export_model

    done = export_model(config, out, checkpoint=checkpoint, fold_normalize=fold_normalize, opset=opset, data=data)
    for line in done.checks:
        _print(str(line))
    height, width, channels = done.image.shape
    takes = f"{done.image.dtype} [N, {channels}, {height}, {width}]"
    _print(f"wrote {done.path} from {done.checkpoint}: takes {takes}, preprocessing {done.info.preprocessing}")
    if done.weights is not None:
        _print(f"wrote {done.weights}: its weights; keep both files in one folder, under these names")
    if done.info.folded is not None:
        _print(f"{done.info.folded} is inside: serve it with stages that end before it")


class _ParityCommand(TyperCommand):
    """Takes one value of --against where that is another library's source: it is compared with `val`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        args = [part for arg in args for part in (arg.split("=", 1) if arg.startswith("--against=") else [arg])]
        at = args.index("--against") + 1 if "--against" in args else len(args)
        if at < len(args) and ":" in args[at]:
            args = [*args[:at], "val", *args[at:]]
        return super().parse_args(ctx, args)


@_command(_MEASURE, "gpuflow parity configs/demo.yaml --images 64", cls=_ParityCommand)
def parity(
    ctx: typer.Context,
    path: ConfigFile,
    overrides: Overrides = None,
    data: OtherImages = None,
    images: Annotated[int, typer.Option(min=0, help="How many of them; 0 leaves the hostile ones alone.")] = 64,
    against: Annotated[
        tuple[str, str] | None,
        typer.Option(
            metavar="A B",
            help="Two ways to compare, and no others: val opencv. Or one library: torchvision:WEIGHTS, "
            "torchvision:module:attribute (runs that module's code), timm:NAME, hf:DIR, albumentations:FILE.",
        ),
    ] = None,
    tolerance: Annotated[
        float | None,
        typer.Option(
            min=0, help="Levels that the two of --against may be apart; by default none, or what the stages declare."
        ),
    ] = None,
    model: Annotated[
        Path | None, typer.Option(metavar="MODEL", help="What gives the logits; by default the file's serve.model.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Where to write parity.json and report.html.")] = Path("runs/parity"),
    as_json: AsJson = False,
) -> None:
    """Prove that training and serving give the same tensors, and show what other ways would have cost.

    Runs the pipeline val, the serving graph and their forms on a GPU, and torchvision, over your images
    and hostile ones; stage by stage, in levels of 0-255. Then common ways to write the same stages down twice.

    Ways: val, serve, val@cuda, serve@cuda, torchvision, pillow, torchcodec, opencv, torchpipe_cpu, torchpipe_gpu,
    torchvision@cuda.

    --against a library runs its real transforms on the same images, which Pillow opens, and compares the decoded images
    and the final results with those of val.

    Exits 1 on a breach: val and serve differ on one device, the CPU and a GPU by more than 2 levels, or val and
    torchvision by more than the stages declare; or serve lacks the last normalize, and its model does not record it;
    or the decode of serve refuses formats or sizes that the decode of val accepts.
    """
    from gpuflow.parity import render, study, write_report
    from gpuflow.torchpipe.adapter import skip_cleanup

    if tolerance is not None and against is None:
        raise ConfigError([Problem("--tolerance:", f"goes with --against A B, got {tolerance:g} alone")])
    config = _read(path, overrides)
    _check_output("--out", out, folder=True)
    with _task("images") as update:
        report = study(
            config,
            count=images,
            data=data,
            against=against,
            tolerance=tolerance,
            model=model,
            command=shlex.join(["gpuflow", *sys.argv[1:]]),
            progress=lambda done, total, stage: update(completed=done, total=total, note=stage),
        )
    _show(ctx, render(report), **report.as_dict())
    _show_written(ctx, *write_report(report, out))
    skip_cleanup()
    _fail_if(report.breach)


class _OnCommand(TyperCommand):
    """Lets the address of `--on ray [ADDRESS]` be left out, which is then empty."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        at = args.index("--on") + 2 if "--on" in args else len(args)
        if not re.fullmatch(r"[^\s/=]+:\d+", "".join(args[at : at + 1])):
            args = [*args[:at], *([""] if "--on" in args else []), *args[at:]]
        return super().parse_args(ctx, args)


On = Annotated[
    tuple[str, str] | None,
    typer.Option(
        metavar="ray [ADDRESS]",
        help="Run on the cluster of Ray whose head is at HOST:PORT, by default RAY_ADDRESS; else on this machine.",
    ),
]


@contextmanager
def _ray(on: tuple[str, str]) -> Iterator[Any]:
    """Give the module of Ray, connected to a cluster."""
    if on[0] != "ray":
        raise ConfigError([Problem("--on:", "must be ray", on[0])])
    from gpuflow.integrations import ray as on_ray

    with on_ray.connected(on[1] or None):
        yield on_ray


@_command(_SERVE, "gpuflow serve configs/demo.yaml --port 8888", cls=_OnCommand)
def serve(
    path: ConfigFile,
    overrides: Overrides = None,
    host: Annotated[str, typer.Option(help="Where to listen; 0.0.0.0 lets other machines in.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes one that is free.")] = 8888,
    device: ModelDevice = None,
    max_queue: Annotated[int, typer.Option(min=1, help="Images in flight; more are refused by a 503.")] = 256,
    max_body_mb: Annotated[float, _positive(help="Of one request; more is refused by a 413.")] = 32.0,
    max_megapixels: Annotated[float, _positive(help="Of one image; a larger one is answered as a bad image.")] = 50.0,
    timeout_s: Annotated[float, _positive(help="For a request to arrive, and for its answer.")] = 30.0,
    max_connections: Annotated[
        int,
        typer.Option(min=1, help="Open at once; further ones take the place of those that wait for their client."),
    ] = 1000,
    cors: Annotated[
        list[str] | None, typer.Option(metavar="ORIGIN", help="Pages of this origin may send requests; * for all.")
    ] = None,
    access_log: Annotated[bool, typer.Option("--access-log", help="Log every request.")] = False,
    on: On = None,
) -> None:
    """Serve the file's block `serve` over HTTP: POST an image to /predict, or open the page at /.

    The first Ctrl-C, SIGTERM or SIGHUP answers what was taken and then exits 0; the second exits at once.

    With --on ray, replicas on the nodes of a cluster answer. The same command with another model replaces them.
    """
    from gpuflow.serve.http.app import RequestLimits
    from gpuflow.serve.http.server import run
    from gpuflow.serve.predictor import check_block, open_predictor

    config = _read(path, overrides)
    check_block(config)
    limits = RequestLimits(
        max_body_bytes=round(max_body_mb * 1e6),
        max_queue=max_queue,
        max_pixels=round(max_megapixels * 1e6),
        timeout_s=timeout_s,
        max_connections=max_connections,
    )
    options: dict[str, Any] = {
        "host": host,
        "port": port,
        "cors": cors or (),
        "access_log": access_log,
        "report": _print_err,
    }
    if on is None:
        run(lambda: open_predictor(config, device=device), name=str(path), limits=limits, **options)
    else:
        with _ray(on) as on_ray:
            on_ray.serve_replicas(config, overrides or (), device=device, limits=asdict(limits), **options)


@_command(_SERVE, "gpuflow predict configs/demo.yaml --out predictions", cls=_OnCommand)
def predict(
    ctx: typer.Context,
    path: ConfigFile,
    out: Annotated[Path, typer.Option(metavar="DIR", help="The folder for part-00000.parquet and so on.")],
    overrides: Overrides = None,
    data: Annotated[
        str | None,
        typer.Option(
            metavar="PATH",
            help="Images without labels, in place of the file's source: a folder of any depth, a CSV or JSON-lines "
            "file with the column path, tar shards or Parquet files; also a URL.",
        ),
    ] = None,
    pipeline: SourcePart = "val",
    top_k: Annotated[int, typer.Option(min=1, help="How many of the most likely classes a row has.")] = 5,
    form: Annotated[
        Literal["parquet", "csv"] | None,
        typer.Option("--format", help="Of the files; by default parquet if pyarrow is installed."),
    ] = None,
    part_rows: Annotated[
        int,
        typer.Option(min=1, help="Rows of a file, rounded up to whole batches. Ranks and actors take whole files."),
    ] = 4096,
    logits: Annotated[bool, typer.Option("--logits", help="Write the logits, too.")] = False,
    embeddings: Annotated[
        str | None,
        typer.Option(metavar="LAYER", help="Write the output of this layer of a checkpoint, such as avgpool."),
    ] = None,
    device: ModelDevice = None,
    on: On = None,
) -> None:
    """Run the model of the block `serve` over the source's part `val`, or another --pipeline, and write a row for each.

    A row has index, path, class and probability, those of less likely classes, and for a bad sample the stage that
    refused it and the reason. The loader reads and decodes, and batches are `serve.model.batch` samples.

    The same command goes on behind the last file of a run that was killed, and changes nothing once all are written.
    A folder of another model, source, preprocessing or options is an error. With --on ray, actors on the nodes of a
    cluster predict, and this process writes the same files.
    """
    from gpuflow.tools.predict import write_predictions

    _check_output("--out", out, folder=True)
    if form is None:
        form = "parquet" if importlib.util.find_spec("pyarrow") else "csv"
    options = {
        "pipeline": pipeline,
        "data": data,
        "device": device,
        "top_k": top_k,
        "logits": logits,
        "embeddings": embeddings,
    }
    ctx.meta[_HOW_TO_GO_ON] = lambda: "; the same command goes on"
    with _row_predictor(path, overrides, **options) as predictor:
        if on is None:
            write_predictions(predictor, out, form=form, part_rows=part_rows)
        else:
            with _ray(on) as on_ray:
                there = {"path": path, "overrides": overrides or (), **options}
                predict_parts = partial(on_ray.predict_parts, predictor, there)
                write_predictions(predictor, out, form=form, part_rows=part_rows, predict_parts=predict_parts)
    if predictor.done:
        _print(f"wrote {predictor.done:,} rows to {out}, {predictor.bad:,} of bad samples")
    else:
        _print(f"nothing left to predict: {out} has all rows")


@contextmanager
def _row_predictor(path: Path, overrides: list[str] | None, **given: Any) -> Iterator[RowPredictor]:
    """Give a predictor of rows whose progress is shown, on rank 0."""
    from gpuflow.tools.predict import RowPredictor

    with (
        _task("samples", quiet=os.environ.get("RANK", "0") != "0") as update,
        closing(RowPredictor(path, overrides or (), progress=update, **given)) as predictor,
    ):
        yield predictor


@_command(_SERVE, "gpuflow evaluate configs/demo.yaml")
def evaluate(
    ctx: typer.Context,
    path: ConfigFile,
    overrides: Overrides = None,
    pipeline: SourcePart = "val",
    device: ModelDevice = None,
    out: Annotated[
        Path, typer.Option(help="Where to write confusion.csv, its picture, classes.csv and bad.csv.")
    ] = Path("runs/evaluate"),
    as_json: AsJson = False,
) -> None:
    """Run the model of the file's block `serve` over a pipeline's samples, and compare it with their labels.

    Prints how often the label is the most likely class, and one of the five most likely ones, and the classes of the
    lowest recall. Where samples have several classes, it prints the mean average precision. Bad samples are left out,
    and listed in bad.csv.

    Several processes share the work, with the same result: torchrun --nproc-per-node 2 -m gpuflow evaluate FILE.
    """
    from gpuflow.runtime.ranks import process_group
    from gpuflow.tools.predict import evaluate as evaluation

    _check_output("--out", out, folder=True)
    with _row_predictor(path, overrides, pipeline=pipeline, device=device, logits=True) as predictor:
        seconds = 2 * predictor.config.run.timeout_s
        with process_group(predictor.ranks, predictor.device, timeout_seconds=seconds) as group:
            found = evaluation(predictor, group)
    if predictor.ranks.rank:
        return
    _show(ctx, str(found), file=str(path), **found.as_dict())
    first, *others = found.write(out)
    pictures = list[str]()
    if found.ranked is None and importlib.util.find_spec("matplotlib"):
        pictures = _plot("confusion", "draw", first)
    elif found.ranked is None:
        _say("note", f"the picture of {first} needs pip install 'gpuflow[plots]'")
    _show_written(ctx, *others, first, *pictures)


@_command(
    _MEASURE, "gpuflow load-test --data data/photos --url http://127.0.0.1:8888 --clients 1,5,10", name="load-test"
)
def load_test(
    ctx: typer.Context,
    data: Annotated[Path, typer.Option(metavar="DIR", help="Images to send, also from the directories below.")],
    url: Annotated[str, typer.Option(help="Of the service that is asked.")] = "http://127.0.0.1:8888",
    clients: Annotated[str, typer.Option(help="Numbers of clients, separated by commas.")] = "1,5,10,20",
    request_batch: Annotated[int, typer.Option(min=1, help="Images in a request; several are sent as a form.")] = 1,
    seconds: Seconds = 10.0,
    pid: Annotated[
        list[int] | None, typer.Option(help="A process of the service; by default what listens there, if it is here.")
    ] = None,
    name: Annotated[str, typer.Option(help="What the service is called in results and plot.")] = "service",
    out: Annotated[Path, typer.Option(help="Where to write load_test.csv, .png and .svg.")] = Path("plots/out"),
    as_json: AsJson = False,
) -> None:
    """Ask a service for predictions, by several numbers of clients, and measure how fast it answers.

    A closed loop: each client sends its next request when it has the answer to the last one. Prints and writes requests
    a second, latencies (TP99: 99% of the requests took no longer), errors, and what the service took of this machine.
    """
    from gpuflow.tools import load_test as loadtest
    from gpuflow.tools.bench import write_results
    from gpuflow.tools.machine import load_nvml

    _check_output("--out", out, folder=True)
    counts, files = _counts("--clients", clients), loadtest.choose_files(data)
    points: list[loadtest.Point] = []
    stopped: GpuflowError | None = None
    with _task("measurements", len(counts)) as update:
        for count in counts:
            update(note=f"{count} client(s)")
            load = loadtest.Load(url=url, clients=count, request_batch=request_batch, seconds=seconds)
            try:
                points.append(loadtest.measure(load, files, pids=pid))
            except GpuflowError as error:
                if not points:
                    raise
                stopped = error  # once what was measured is written
                break
            update(advance=1)
    notes = loadtest.notes(points, gpus_asked=load_nvml() is not None)
    answered = all(point.latency is not None for point in points)
    notes += [] if answered else ["there is no plot, as a measurement has no answers"]
    _show(ctx, loadtest.render(points), *notes, results=list(map(asdict, points)), notes=notes)
    results = out / "load_test.csv"
    write_results(results, loadtest.rows(points, arm=name, workload=data.name))
    _show_written(ctx, results, *(_plot("lines", "load_test", results) if answered else ()))
    if stopped is not None:
        raise stopped
