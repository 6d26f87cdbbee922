"""The results of a study as values, with their JSON form."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpuflow.parity.measure import Levels

__all__ = ["Logits", "Pair", "Picture", "Report", "Row", "WayNote"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """The comparison of two ways after one of the stages.

    stage: the stage. number: how many stages have run, this one included.
    images: how many images were compared. differ: how many of them are not equal.
    own, hostile: differences over all images of that kind; None if there are none.
    allowed: the limit in levels, 0 for equal, None for no limit. noise: levels that rounding to 16 or 32 bits may add.
    refused: images that both refuse. alone: images that only one of them refuses, or for which the results differ in
    shape or dtype, with the reason.
    reference_refuses: images that only the reference refuses, with the reason; they do not count against the other way.
    causes: why images differ by more than allowed, or only one way accepts them, with these images' names.
    pixels: the share of pixels that are apart by more than the rounding of floats. value: the largest difference of the
    results themselves, after normalize for instance; infinite where one of two values is NaN or infinite.
    """

    stage: str
    number: int
    allowed: float | None
    noise: float
    images: int
    differ: int
    own: Levels | None
    hostile: Levels | None
    refused: tuple[str, ...]
    alone: tuple[tuple[str, str], ...]
    reference_refuses: tuple[tuple[str, str], ...]
    causes: tuple[tuple[str, tuple[str, ...]], ...] = ()
    pixels: float = 0.0
    value: float = 0.0

    @property
    def max(self) -> float:
        """The largest difference, in levels."""
        return max((levels.max for levels in (self.own, self.hostile) if levels is not None), default=0.0)

    @property
    def apart(self) -> bool:
        """Whether the two ways differ by more than allowed."""
        if self.allowed is None:
            return False
        return self.differ > 0 if self.allowed == 0 else not self.max <= self.allowed + self.noise

    @property
    def breach(self) -> bool:
        """Whether the two ways differ by more than allowed, or do not accept the same images, or none was compared."""
        return self.allowed is not None and (self.images == 0 or self.apart or bool(self.alone))


@dataclass(frozen=True, kw_only=True, slots=True)
class Logits:
    """Differences between a model's logits for two ways' images of one kind, `own` or `hostile`.

    max, mean: of the differences of logits; infinite where one of two logits is NaN or infinite. flips: the number of
    images whose top prediction differs.
    """

    kind: str
    images: int
    max: float
    mean: float
    flips: int


@dataclass(frozen=True, slots=True, eq=False)
class Picture:
    """One image from both ways, uint8 HWC in RGB. difference [H, W]: each pixel's largest difference, in levels."""

    name: str
    a: NDArray[np.uint8]
    b: NDArray[np.uint8]
    difference: NDArray[np.float32]


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """The comparison of two ways, stage by stage; the last row is the whole pipeline.

    asked: the limit as text; empty if the pair has no limit and is only shown for information.
    skipped: stages that one of them cannot run, with the reason. pictures: the images that differ most.
    faults: differences that make the pair a breach although no image shows them. notes: others that do not.
    """

    a: str
    b: str
    asked: str
    rows: tuple[Row, ...]
    logits: tuple[Logits, ...] = ()
    skipped: tuple[tuple[str, str], ...] = ()
    pictures: tuple[Picture, ...] = ()
    faults: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def breach(self) -> bool:
        return bool(self.faults) or any(row.breach for row in self.rows)

    def as_dict(self) -> dict[str, Any]:
        """Everything but the pictures, as plain values; None for numbers that are not finite, which JSON cannot say."""
        return {
            "a": self.a,
            "b": self.b,
            "asked": self.asked,
            "verdict": ("breach" if self.breach else "pass") if self.asked else None,
            "rows": [
                {
                    **{key: value for key, value in _finite(asdict(row)).items() if key != "causes"},
                    "alone": dict(row.alone),
                    "reference_refuses": dict(row.reference_refuses),
                    **({"causes": dict(row.causes)} if row.causes else {}),
                    "breach": row.breach,
                }
                for row in self.rows
            ],
            "logits": [_finite(asdict(logits)) for logits in self.logits],
            "skipped": [{"stage": stage, "reason": reason} for stage, reason in self.skipped],
            "faults": list(self.faults),
            "notes": list(self.notes),
        }


def _finite(values: dict[str, Any]) -> dict[str, Any]:
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in values.items()
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class WayNote:
    """A way in the report. about: its decoder and resizer, with versions. missing: why it did not run, or None."""

    name: str
    about: str
    missing: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """All results of a study.

    stages, preprocessing: the pipeline's lines and its fingerprint. images: the number of images of each kind, `own`,
    `hostile` and `bad`. model: the model that computed logits, or why there was none.
    """

    file: str
    pipeline: str
    stages: tuple[str, ...]
    preprocessing: str
    pairs: tuple[Pair, ...]
    ways: tuple[WayNote, ...]
    images: Mapping[str, int]
    model: str
    versions: Mapping[str, str]
    date: str
    command: str

    @property
    def breach(self) -> bool:
        return any(pair.breach for pair in self.pairs)

    @property
    def judged(self) -> tuple[Pair, ...]:
        """The pairs that have a limit."""
        return tuple(pair for pair in self.pairs if pair.asked)

    @property
    def naive(self) -> tuple[Pair, ...]:
        """The pairs that have no limit and are shown for information."""
        return tuple(pair for pair in self.pairs if not pair.asked)

    def as_dict(self) -> dict[str, Any]:
        """Everything but the pictures, as plain values for JSON."""
        return {
            "version": 1,
            "verdict": "breach" if self.breach else "pass",
            "file": self.file,
            "pipeline": self.pipeline,
            "stages": self.stages,
            "preprocessing": self.preprocessing,
            "images": dict(self.images),
            "model": self.model,
            "pairs": [pair.as_dict() for pair in self.pairs],
            "ways": [asdict(way) for way in self.ways],
            "versions": dict(self.versions),
            "date": self.date,
            "command": self.command,
        }
