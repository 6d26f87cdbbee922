"""Reads sources that a user names, such as `timm:resnet50.a1_in1k`; writes them as YAML; runs them for parity."""

from __future__ import annotations

import importlib.metadata
import json
import tempfile
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpuflow.config import Config, read_config
from gpuflow.config.yaml_file import in_one_line
from gpuflow.errors import ConfigError, Problem
from gpuflow.migration.from_albumentations import read_albumentations
from gpuflow.migration.from_huggingface import processor_document, read_huggingface
from gpuflow.migration.from_timm import data_config, read_timm
from gpuflow.migration.from_torchpipe import read_torchpipe
from gpuflow.migration.from_torchvision import read_transform
from gpuflow.migration.imported import (
    Entry,
    Imported,
    entry_of,
    gap,
    named_transform,
    needs,
    read_document,
    source_error,
)
from gpuflow.pipeline.program import Program, WarpStep
from gpuflow.pipeline.stage import Stage
from gpuflow.version import __version__

if TYPE_CHECKING:
    import torch

_READERS = {
    "timm": read_timm,
    "hf": read_huggingface,
    "albumentations": read_albumentations,
    "torchpipe": read_torchpipe,
}
_ONE_WARP = (
    "Warps in a row, such as two of rotate, affine and perspective, run as one warp, which samples once. That is "
    "sharper than one after the other, as other libraries run them: up to tens of levels apart at the image's edges."
)


def read_source(source: str, table: Mapping[str, type[Stage]]) -> Imported:
    """Read another library's transforms.

    Args:
        source: `torchvision:WEIGHTS`, `torchvision:module:attribute` or `module:attribute`, whose module's code runs,
            `timm:NAME`, `hf:DIR`, `albumentations:FILE` or `torchpipe:FILE`.
        table: the vocabulary.

    Raises:
        ConfigError: there is no such source, or it cannot be read.
        MissingLibrary: the library that it needs is not installed.
    """
    library, _, name = source.partition(":")
    if library in _READERS:
        return _READERS[library](name)
    name = name if library == "torchvision" else source
    return read_transform(named_transform(name), f"torchvision:{name}", table)


@dataclass(frozen=True, slots=True)
class Written:
    """Holds a YAML file that `gpuflow check` accepts, and a problem for each thing that it leaves out."""

    text: str
    problems: tuple[Problem, ...]


def read_sources(sources: Sequence[str], table: Mapping[str, type[Stage]], *, partial: bool = False) -> Written:
    """Read one or two sources, and write them as one file.

    Args:
        sources: as in `read_source`; of two, one gives the pipeline `train` and the other `val`.
        table: the vocabulary.
        partial: write a file although something has no equal stage. It is valid all the same.

    Raises:
        ConfigError: a source cannot be read, two give the same pipeline, or `gpuflow check` refuses the result; without
            `partial` also every problem of it.
    """
    found = [read_source(source, table) for source in sources]
    names = [name for one in found for name in one.pipelines]
    if len(set(names)) < len(names):
        rule = f"give the pipelines {', '.join(names)}; two sources must give train, which is random, and val"
        raise source_error(f"{' '.join(sources)}:", rule, action="import them one by one")
    text, config = _checked(found, table)
    if partial and not isinstance(config, Config) and any(problem.code == "stage.size" for problem in config):
        found = list(map(_of_one_size, found))
        text, config = _checked(found, table)
    problems = tuple(problem for one in found for problem in one.gaps)
    if not isinstance(config, Config):
        raise ConfigError(problems + config)
    if any(map(_has_one_warp_for_several, config.programs.values())):
        text = to_yaml([replace(one, matches=(*one.matches, _ONE_WARP)) for one in found])
    if problems and not partial:
        raise ConfigError(problems)
    return Written(text, problems)


def _of_one_size(found: Imported) -> Imported:
    """Return what was imported with a crop behind each resize that leaves images of varying size, and a gap for it."""
    pipelines, gaps = dict(found.pipelines), found.gaps
    for name, entries in found.pipelines.items():
        for i in reversed(range(len(entries))):
            sides = [entries[i].parameters.get(key) for key in ("max_size", "longer", "shorter")]
            if (side := next(filter(None, sides), None)) is not None:
                pipelines[name] = [*entries[: i + 1], entry_of("center_crop", size=side), *entries[i + 1 :]]
                rule = f"leaves images of varying size in {name}, which no batch can hold"
                nearest = f"center_crop: {{size: {side}}}, which centres smaller images on black"
                gaps = (*gaps, gap(f"{found.source}:", rule, nearest))
                break
    return replace(found, pipelines=pipelines, gaps=gaps)


def _has_one_warp_for_several(program: Program) -> bool:
    """Return True if several stages that warp run as one."""
    steps = [step for step in program.steps if isinstance(step, WarpStep)]
    return any(sum(stage.warps is not None for stage in step.stages) > 1 for step in steps)


def _checked(found: Sequence[Imported], table: Mapping[str, type[Stage]]) -> tuple[str, Config | tuple[Problem, ...]]:
    """Return what was imported as YAML, and as it is read, or what `gpuflow check` says of it."""
    text = to_yaml(found)
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", prefix="gpuflow_", suffix=".yaml") as file:
        file.write(text)
        file.flush()
        try:
            return text, read_config(file.name, table)
        except ConfigError as error:
            place = f"{' '.join(one.source for one in found)}, as YAML:"
            return text, tuple(replace(problem, place=place) for problem in error.problems)


_COLUMN, _WIDTH = 40, 118


def to_yaml(found: Sequence[Imported]) -> str:
    """Return what was imported as a YAML file with comments, which `gpuflow check` accepts.

    Of two sources, one gives the pipeline `train` and the other `val`.

    Examples:
        >>> resize = Entry("resize", {"shorter": 256}, "as in the paper")
        >>> print(to_yaml([Imported(source="x", matches=(), pipelines={"val": [resize]})]))
        # Imported by gpuflow ...
        preprocess: &eval ...
          - resize: {shorter: 256}                # as in the paper
        ...
    """
    text = "\n".join((*_header(found), *_body(found))) + "\n"
    return text.encode(errors="backslashreplace").decode()  # names of files, in comments, need not be text


def _header(found: Sequence[Imported]) -> Iterator[str]:
    yield f"# Imported by gpuflow {__version__}: gpuflow import {' '.join(one.source for one in found)}"
    yield "#"
    for sentence in dict.fromkeys(sentence for one in found for sentence in one.matches):
        yield from _comment(sentence)
    if gaps := [problem for one in found for problem in one.gaps]:
        yield "#"
        yield "# Not carried over:"
        for problem in gaps:
            yield from _comment(f"- {problem}", hang="  ")
    yield "#"
    yield "# Edit the source and the batch sizes; add serve.model when there is a model."
    for one in found:
        if "val" in one.pipelines:
            against = f" --against {one.source}" if one.preset is None else ""
            yield f"# Prove it on images of yours: gpuflow parity FILE{against}"
    yield ""


def _comment(text: str, hang: str = "") -> Iterator[str]:
    lines = textwrap.wrap(text, _WIDTH - 2, break_long_words=False, break_on_hyphens=False, subsequent_indent=hang)
    return (f"# {line}" for line in lines)


def _body(found: Sequence[Imported]) -> Iterator[str]:
    pipelines = {name: (one, entries) for one in found for name, entries in one.pipelines.items()}
    both = len(pipelines) == 2
    parts = "split: {train: 0.9, val: 0.1}, " if both else ""
    yield f"source: {{folder: data/photos, {parts}seed: {max(one.seed for one in found)}}}"
    if "val" in pipelines:
        entries = pipelines["val"][1]
        yield f"preprocess: &eval{'' if entries else ' []':24}# shared by val and serve: cannot diverge"
        yield from _entries(entries, "  ")
    yield "pipelines:"
    if "train" in pipelines:
        one, entries = pipelines["train"]
        yield "  train:"
        yield from _preset(one, "    ")
        yield "    stages:" if entries else "    stages: []"
        yield from _entries(entries, "      ")
        yield f"    batch: {{size: {one.batch_size}, drop_last: true}}"
        yield "    shuffle: true"
    if "val" in pipelines:
        one, _ = pipelines["val"]
        yield "  val:"
        yield from _preset(one, "    ")
        yield "    stages: *eval"
        yield f"    batch: {{size: {one.batch_size}}}"
        yield "serve:"
        yield from _preset(one, "  ")
        yield "  stages: *eval"
        if one.model is not None:
            yield f"  model: {in_one_line(one.model)}"


def _preset(one: Imported, indent: str) -> Iterator[str]:
    if one.preset is not None:
        for key, value in asdict(one.preset).items():
            yield f"{indent}{key}: {value}"


def _entries(entries: Sequence[Entry], indent: str) -> Iterator[str]:
    for entry in entries:
        line = f"{indent}- {entry.stage}{f': {in_one_line(entry.parameters)}' if entry.parameters else ''}"
        yield f"{line:{_COLUMN}}  # {entry.comment}" if entry.comment else line


# --- other libraries' transforms, to compare with: `gpuflow parity --against SOURCE` ----------------------------------


@dataclass(frozen=True, slots=True)
class LibraryTransform:
    """Runs a transform of a PIL image to a tensor [C, H, W]. about: what runs, with versions.

    converts: it converts images to RGB itself, so that it gets what Image.open gives; else it gets what
    Image.open(path).convert("RGB") gives, as the loaders of torchvision and timm do.
    other: another implementation of the same transform, and its name, such as `slow`.
    """

    run: Callable[[Any], torch.Tensor]
    about: str
    converts: bool = False
    other: tuple[str, LibraryTransform] | None = None


def library_transform(source: str) -> LibraryTransform:
    """Return the transform of a source as a function that runs.

    Raises:
        ConfigError: there is no such source. MissingLibrary: its library is not installed.
    """
    library, _, name = source.partition(":")
    if library not in _OPENERS:
        action = f"known: {', '.join(f'{known}:...' for known in _OPENERS)}"
        raise source_error("--against:", "names no library to run", source, action)
    return _OPENERS[library](name)


def _timm(name: str) -> LibraryTransform:
    config, _ = data_config(name)
    timm = needs("timm.data", f"timm:{name}")
    return LibraryTransform(
        _to_tensor(timm.create_transform(**config.model_dump())),
        f"create_transform on PIL images, {_version('timm')}",
    )


def _huggingface(name: str) -> LibraryTransform:
    transformers = needs("transformers", f"hf:{name}")
    folder = str(Path(processor_document(name).path).parent)
    choices: tuple[dict[str, Any], ...] = {"use_fast": True}, {"use_fast": False}
    if int(transformers.__version__.partition(".")[0]) >= 5:
        choices = {"backend": "torchvision"}, {"backend": "pil"}
    fast, slow = (
        transformers.AutoImageProcessor.from_pretrained(folder, local_files_only=True, **choice) for choice in choices
    )

    def run(processor: Any) -> Callable[[Any], torch.Tensor]:
        return lambda image: processor(images=image, return_tensors="pt")["pixel_values"][0]

    version = _version("transformers")
    return LibraryTransform(
        run(fast),
        f"{type(fast).__name__}, the fast processor, {version}",
        True,
        ("slow", LibraryTransform(run(slow), f"{type(slow).__name__}, the slow processor, {version}", True)),
    )


def _albumentations(name: str) -> LibraryTransform:
    albumentations = needs("albumentations", f"albumentations:{name}")
    import numpy as np
    import torch

    transform = albumentations.from_dict(json.loads(json.dumps(read_document(name).data)))

    def run(image: Any) -> torch.Tensor:
        found = transform(image=np.array(image))["image"]
        if isinstance(found, torch.Tensor):
            return found
        return torch.from_numpy(np.atleast_3d(found)).permute(2, 0, 1)  # a gray image may have no axis of channels

    return LibraryTransform(run, f"{_version('albumentations')}, OpenCV's resize")


_OPENERS: dict[str, Callable[[str], LibraryTransform]] = {
    "torchvision": lambda name: LibraryTransform(
        _to_tensor(named_transform(name)), f"{name} on PIL images, {_version('torchvision')}"
    ),
    "timm": _timm,
    "hf": _huggingface,
    "albumentations": _albumentations,
}


def _to_tensor(transform: Callable[[Any], Any]) -> Callable[[Any], torch.Tensor]:
    """Return the transform, with a PIL image among its results as a tensor."""
    import torch
    from torchvision.transforms.v2 import functional

    def run(image: Any) -> torch.Tensor:
        found = transform(image)
        tensor: torch.Tensor = found if isinstance(found, torch.Tensor) else functional.pil_to_tensor(found)
        return tensor.as_subclass(torch.Tensor)

    return run


def _version(package: str) -> str:
    return f"{package} {importlib.metadata.version(package).partition('+')[0]}"
