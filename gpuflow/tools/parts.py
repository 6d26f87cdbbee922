"""Says how many samples the parts of a source have, and which classes they lack. `gpuflow split` writes the parts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager

from gpuflow.config import Config
from gpuflow.errors import ConfigError, Problem, SourceError
from gpuflow.sources import Division, Source, divide, open_source
from gpuflow.sources.split_spec import CONTENT, TRAIN, VAL
from gpuflow.sources.storage import is_remote, time_limit

_NAMED = 5
"""Classes that a text names."""


@contextmanager
def divided(config: Config) -> Iterator[tuple[Source, Division]]:
    """Open the whole source of a configuration, and divide it. Errors name the file."""
    if not config.part_names:
        rule, action = "must have parts", "add source.split or source.splits"
        raise ConfigError(
            [Problem(f"{config.path}:", rule, action=action, path=("source",), code="config.missing_key")]
        )
    try:
        with time_limit(config.run.timeout_s), closing(open_source(config.source)) as whole:
            yield whole, divide(whole, config.source, config.part_names)
    except SourceError as error:
        raise SourceError(f"{config.path}: {error}") from error


def parts_text(config: Config) -> str:
    """Return the sizes of the parts that a rule divides the source into, and the classes that they lack.

    Empty without a rule, or where the source is not on this machine or its images would have to be read. Raises
    SourceError: the source cannot be divided.
    """
    rule = None if config.source_block is None else config.source.rule
    if rule is None or rule.group == CONTENT:
        return ""
    if any(is_remote(one.where) or is_remote(one.folder_of_images) or one.missing() for one in config.sources):
        return ""
    with divided(config) as (whole, division):
        lacking = lacking_text(config, whole, division)
        return f"{division}; {lacking}" if lacking else str(division)


def lacking_text(config: Config, whole: Source, division: Division) -> str:
    """Return which parts lack classes of the whole source; empty if none does.

    Raises SourceError: `stratify` is given, and train lacks a class that val has.
    """
    lacking = division.lacking(whole)
    rule = config.source.rule
    if rule is not None and rule.stratify and VAL in division.names:
        only = [name for name in lacking.get(TRAIN, ()) if name not in lacking.get(VAL, ())]
        if only:
            raise SourceError(
                f"source.split.stratify must leave {TRAIN} each class that {VAL} has, and it lacks {only[0]!r} "
                f"({len(only)} such classes); choose smaller groups or other shares, or add samples"
            )
    return ", ".join(
        f"{name} lacks {len(classes)} of {len(whole.classes)} classes: {', '.join(classes[:_NAMED])}"
        + ", ..." * (len(classes) > _NAMED)
        for name, classes in lacking.items()
    )
