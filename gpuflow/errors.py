"""Every exception that gpuflow raises on purpose.

    GpuflowError
    ├── ConfigError (ValueError)      a YAML file, an override or a stage's parameters are wrong
    ├── SourceError (ValueError)      the source cannot be indexed: missing root, empty folder, bad listing
    ├── StateError (ValueError)       a saved state does not belong to this loader
    ├── BadSampleError (ValueError)   one encoded image cannot become a tensor
    ├── LoaderError (RuntimeError)    the loader cannot go on
    │   ├── TooManyBadSamples         more bad samples than `run.max_bad`, or nothing left to replace one with
    │   └── LoaderTimeout (TimeoutError)  a batch did not come within `run.timeout_s`
    ├── PredictorError (RuntimeError) the predictor cannot answer: it is closed, or its model failed
    │   └── PredictorTimeout (TimeoutError)  an answer did not come within `run.timeout_s`
    ├── DecoderError (RuntimeError)   a decoder of this process fails on gpuflow's own test image
    └── MissingExtra (ImportError)    an optional dependency is used but not installed

A text names the place, the rule, the value and the next action; tests pin them.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

__all__ = [
    "BadSampleError",
    "ConfigError",
    "DecoderError",
    "GpuflowError",
    "LoaderError",
    "LoaderTimeout",
    "MissingExtra",
    "PredictorError",
    "PredictorTimeout",
    "Problem",
    "SourceError",
    "StateError",
    "TooManyBadSamples",
    "did_you_mean",
]


class GpuflowError(Exception):
    """Base of every exception that gpuflow raises on purpose."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One located fault: `place` says where, `message` says the rule, the value and what to do."""

    place: str
    message: str

    def __str__(self) -> str:
        return f"{self.place} {self.message}" if self.place else self.message


class ConfigError(GpuflowError, ValueError):
    """One or more located problems of a configuration, all of them reported at once."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))


class SourceError(GpuflowError, ValueError):
    """The source cannot be indexed."""


class StateError(GpuflowError, ValueError):
    """A saved state does not belong to this loader."""


class BadSampleError(GpuflowError, ValueError):
    """One encoded image cannot become a tensor.

    `stage` is the stage that gave it up (`read`, `decode`, or a stage's name) and `reason` the rule it broke.
    `index` and `path` say which sample it is, once that is known.
    """

    def __init__(self, stage: str, reason: str, *, index: int = -1, path: str = "") -> None:
        self.stage, self.reason, self.index, self.path = stage, reason, index, path
        place = f"{path} (sample {index}): " if path else ""
        super().__init__(f"{place}{stage}: {reason}")

    def located(self, index: int, path: str) -> BadSampleError:
        """The same fault with its sample named."""
        return BadSampleError(self.stage, self.reason, index=index, path=path)


class LoaderError(GpuflowError, RuntimeError):
    """The loader cannot go on."""


class TooManyBadSamples(LoaderError):
    """More bad samples than `run.max_bad` allows, or nothing left to replace one with."""


class LoaderTimeout(LoaderError, TimeoutError):
    """A batch did not come within `run.timeout_s`."""


class PredictorError(GpuflowError, RuntimeError):
    """The predictor cannot answer."""


class PredictorTimeout(PredictorError, TimeoutError):
    """An answer did not come within `run.timeout_s`."""


class DecoderError(GpuflowError, RuntimeError):
    """A decoder of this process fails on gpuflow's own test image, so that its verdict on other images is worthless."""


class MissingExtra(GpuflowError, ImportError):
    """An optional dependency is used but not installed."""

    def __init__(self, feature: str, package: str, extra: str) -> None:
        super().__init__(f"{feature} needs {package}, which is not installed; pip install 'gpuflow[{extra}]'")


def did_you_mean(word: object, known: Iterable[str]) -> str:
    """A clause that names the closest known word, else the known words: `; did you mean 'resize'?`."""
    names = sorted(known)
    close = difflib.get_close_matches(str(word), names, n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(names)}"
