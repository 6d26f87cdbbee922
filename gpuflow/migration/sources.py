"""Which reader takes a source that a user names, such as `timm:resnet50.a1_in1k`."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from gpuflow.config import Config, read_config
from gpuflow.errors import ConfigError, Problem
from gpuflow.migration.from_albumentations import read_albumentations
from gpuflow.migration.from_huggingface import read_huggingface
from gpuflow.migration.from_timm import read_timm
from gpuflow.migration.from_torchpipe import read_torchpipe
from gpuflow.migration.from_torchvision import read_transform
from gpuflow.migration.imported import Entry, Imported, gap, named_transform
from gpuflow.migration.yaml_text import to_yaml
from gpuflow.pipeline.program import Program, WarpStep
from gpuflow.pipeline.stage import Stage
from gpuflow.version import __version__

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
    """A YAML file that `gpuflow check` accepts, and a problem for each thing that it leaves out."""

    text: str
    problems: tuple[Problem, ...]


def read_sources(sources: Sequence[str], table: Mapping[str, type[Stage]], *, partial: bool = False) -> Written:
    """Read one or two sources, and write them as one file.

    Args:
        sources: as in `read_source`; of two, one gives the pipeline `train` and the other `val`.
        table: the vocabulary.
        partial: whether a file is written although something has no equal stage. It is valid all the same.

    Raises:
        ConfigError: a source cannot be read, two give the same pipeline, or `gpuflow check` refuses the result; without
            `partial` also every problem of it.
    """
    found = [read_source(source, table) for source in sources]
    names = [name for one in found for name in one.pipelines]
    if len(set(names)) < len(names):
        rule = f"give the pipelines {', '.join(names)}; two sources must give train, which is random, and val"
        raise ConfigError(
            [Problem(f"{' '.join(sources)}:", rule, action="import them one by one", code="import.source")]
        )
    text = to_yaml(found, version=__version__)
    config = _checked(text, " ".join(sources), table)
    if partial and not isinstance(config, Config) and any(problem.code == "stage.size" for problem in config):
        found = list(map(_of_one_size, found))
        text = to_yaml(found, version=__version__)
        config = _checked(text, " ".join(sources), table)
    problems = tuple(problem for one in found for problem in one.gaps)
    if not isinstance(config, Config):
        raise ConfigError(problems + config)
    if any(map(_has_one_warp_for_several, config.programs.values())):
        text = to_yaml([replace(one, matches=(*one.matches, _ONE_WARP)) for one in found], version=__version__)
    if problems and not partial:
        raise ConfigError(problems)
    return Written(text, problems)


def _of_one_size(found: Imported) -> Imported:
    """Return what was imported with a crop behind each resize that leaves images of varying size, and a gap for it."""
    pipelines, gaps = {}, found.gaps
    for name, entries in found.pipelines.items():
        pipelines[name] = entries
        for i, entry in reversed(list(enumerate(entries))):
            sides = [entry.parameters.get(key) for key in ("max_size", "longer", "shorter")]
            if (side := next(filter(None, sides), None)) is not None:
                pipelines[name] = [*entries[: i + 1], Entry("center_crop", {"size": side}), *entries[i + 1 :]]
                rule = f"leaves images of varying size in {name}, which no batch can hold"
                nearest = f"center_crop: {{size: {side}}}, which centres smaller images on black"
                gaps = (*gaps, gap(f"{found.source}:", rule, nearest=nearest))
                break
    return replace(found, pipelines=pipelines, gaps=gaps)


def _has_one_warp_for_several(program: Program) -> bool:
    """Whether several stages that warp run as one."""
    steps = [step for step in program.steps if isinstance(step, WarpStep)]
    return any(sum(stage.warps is not None for stage in step.stages) > 1 for step in steps)


def _checked(text: str, sources: str, table: Mapping[str, type[Stage]]) -> Config | tuple[Problem, ...]:
    """The file as it is read, or what `gpuflow check` says of it."""
    with tempfile.TemporaryDirectory(prefix="gpuflow_") as folder:
        path = Path(folder) / "imported.yaml"
        path.write_text(text, encoding="utf-8")
        try:
            return read_config(path, table)
        except ConfigError as error:
            return tuple(replace(problem, place=f"{sources}, as YAML:") for problem in error.problems)
