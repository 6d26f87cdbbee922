"""What a reader finds in another library's transforms: stages, and what no stage equals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, Literal, TypeVar

import numpy as np

from gpuflow.errors import Key, Problem
from gpuflow.pipeline.parameters import IMAGENET

__all__ = [
    "IMAGENET_MEAN",
    "IMAGENET_STD",
    "PILLOW_13",
    "Entry",
    "Imported",
    "PresetEntry",
    "Step",
    "decode",
    "each_channel",
    "gap",
    "normalize",
    "number",
    "size_of",
]

PILLOW_13 = (
    "Pillow 13 resizes the columns of a tall image before its rows: with bicubic filters 3 to 16 levels apart at hard "
    "edges. CMYK files are up to 3 levels apart, because Pillow converts them by another formula."
)
IMAGENET_MEAN, IMAGENET_STD = IMAGENET["mean"], IMAGENET["std"]


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of a list of stages: the stage's key in YAML, its parameters, and a comment after it."""

    stage: str
    parameters: Mapping[str, Any]
    comment: str = ""

    @property
    def as_yaml(self) -> dict[str, Any]:
        """As `make_stage` takes it."""
        return {self.stage: dict(self.parameters)}


@dataclass(frozen=True, kw_only=True, slots=True)
class PresetEntry:
    """torchpipe's own operators, which decode and resize: the keys of a preset."""

    preset: str
    height: int
    width: int
    color: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Imported:
    """What a reader found.

    source: what was imported, as the user named it. matches: sentences that say which behaviour the stages have.
    pipelines: the entries of `train`, of `val`, or of both. gaps: what no stage equals, with the nearest stage, which
    is among the entries if its parameters are known. preset: of all pipelines. model: the keys of `serve.model`.
    """

    source: str
    matches: tuple[str, ...]
    pipelines: Mapping[Literal["train", "val"], Sequence[Entry]]
    gaps: tuple[Problem, ...] = ()
    preset: PresetEntry | None = None
    model: Mapping[str, Any] | None = None


State = TypeVar("State")


@dataclass(frozen=True, kw_only=True, slots=True)
class Step(Generic[State]):
    """What a transform becomes: the value that readers of chains of transforms fold.

    state: what is known of the image after it. entries: stages of levels. floats: what comes after those, from the
    entry on that makes floats. gaps: what no stage equals. notes: sentences on how the stages differ from it.
    """

    state: State
    entries: tuple[Entry, ...] = ()
    floats: tuple[Entry, ...] = ()
    gaps: tuple[Problem, ...] = ()
    notes: tuple[str, ...] = ()

    def then(self, after: Step[State]) -> Step[State]:
        """Return this step and the one that was read from its state, as one."""
        joined = {key: getattr(self, key) + getattr(after, key) for key in ("entries", "floats", "gaps", "notes")}
        return replace(after, **joined)


def gap(place: str, rule: str, *, nearest: str, apart: str = "", path: tuple[Key, ...] = ()) -> Problem:
    """The problem of something that no stage equals.

    Args:
        place: where it stands.
        rule: what it is, and why no stage equals it.
        nearest: the nearest stage, or what to do in its place.
        apart: how far that is from it.
        path: the keys that lead to it in its file.
    """
    action = f"nearest: {nearest}{f' ({apart})' if apart else ''}"
    return Problem(place, rule, action=action, path=path, code="import.stage")


def decode() -> Entry:
    """The first stage of all that is imported."""
    return Entry("decode", {"color": "rgb"})


def normalize(
    mean: Sequence[float] = (0, 0, 0), std: Sequence[float] = (1, 1, 1), *, dtype: str = "float32", named: bool = True
) -> Entry:
    """Return the stage that scales pixels to 0-1 and normalizes them.

    named: write `imagenet` where the numbers are those of ImageNet, which is right for RGB.
    """
    parameters: dict[str, Any] = {}
    for name, values in (("mean", mean), ("std", std)):
        numbers = [number(value) for value in values]
        parameters[name] = "imagenet" if named and tuple(numbers) == IMAGENET[name] else numbers
    if dtype != "float32":
        parameters["dtype"] = dtype
    return Entry("normalize", parameters)


def each_channel(numbers: Sequence[float], *, gray: bool) -> tuple[float, ...]:
    """Return a number for each channel, three or one; the libraries repeat a single one. gray: there is one channel."""
    return (*numbers,) * (3 if len(numbers) == 1 and not gray else 1)


def size_of(sides: float | Sequence[float]) -> int | list[int]:
    """A size as YAML has it: one number for a square, else [height, width]."""
    given = [int(side) for side in (sides if isinstance(sides, Sequence) else [sides])]
    height, width = given if len(given) == 2 else given * 2
    return height if height == width else [height, width]


def number(value: float) -> float | int:
    """A number as people write it: a float32 in as few digits as it needs, another one without its last digits."""
    exact = float(value)
    single = np.float32(exact)
    short = float(str(single)) if float(single) == exact else float(f"{exact:.10g}")
    return int(short) if short.is_integer() else short
