"""Every exception that gpuflow raises on purpose.

    GpuflowError
    ├── ConfigError (ValueError)      a YAML file, an override or a stage's parameters are wrong
    ├── SourceError (ValueError)      the source cannot be indexed: missing root, empty folder, bad listing; or a shard
    │                                 changed since
    ├── StateError (ValueError)       a saved state does not belong to this loader
    ├── BadSampleError (ValueError)   one encoded image cannot become a tensor
    ├── SystemFault (OSError)         no more open files, memory or disk space, or a broken pipe: no sample's fault
    │   └── ServerFault               a server is away, throttles or fails for as long as it was tried
    ├── LoaderError (RuntimeError)    the loader cannot continue
    │   ├── TooManyBadSamples         more bad samples than `run.max_bad`, or nothing left to replace one with
    │   └── LoaderTimeout (TimeoutError)  a batch did not come within `run.timeout_s`
    ├── PredictorError (RuntimeError) the predictor cannot answer: it is closed, or its model failed
    │   └── PredictorTimeout (TimeoutError)  an answer did not come within `run.timeout_s`
    ├── DecoderError (RuntimeError)   a decoder of this process fails on gpuflow's own test image
    ├── NativeLibraryError (ImportError)  the C library of this package is missing or damaged
    └── MissingExtra (ImportError)    an optional dependency is used but not installed

A fault of a configuration is a `Problem`: place, path, rule, value, next action and code, each as a value. Its text is
made once, by `str()`; no code reads a text to learn what happened. The codes are those of `Code`.
"""

from __future__ import annotations

import difflib
import enum
import errno
import json
import math
import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, Literal


class GpuflowError(Exception):
    """Base of every exception that gpuflow raises on purpose. Its text holds no credentials, see `redacted`.

    Examples:
        >>> raise GpuflowError("http://me:secret@host/1.jpg: no such file")
        Traceback (most recent call last):
        gpuflow.errors.GpuflowError: http://***@host/1.jpg: no such file
    """

    def __init__(self, *args: object) -> None:
        super().__init__(*(redacted(arg) if isinstance(arg, str) else arg for arg in args))


class ExitCode(enum.IntEnum):
    """How a command ends. After any other signal N than Ctrl-C, the code is 128 + N.

    DONE: it did its work. FAILED: there is an error, or the check that it makes did not pass. USAGE: the command line
    is wrong. SAVED: it stopped at a scheduler's signal, after a checkpoint. INTERRUPTED: by Ctrl-C.
    """

    DONE = 0
    FAILED = 1
    USAGE = 2
    SAVED = os.EX_TEMPFAIL
    INTERRUPTED = 130


Key = str | int
"""A key of a mapping, or a number in a list."""

Code = Literal[
    "config.file",
    "config.yaml",
    "config.override",
    "config.unknown_key",
    "config.missing_key",
    "config.type",
    "config.range",
    "config.conflict",
    "config.rule",
    "stage.unknown",
    "stage.order",
    "stage.random",
    "stage.size",
    "sample.bad",
    "sample.format",
    "sample.unsupported",
    "sample.too_large",
    "import.source",
    "import.stage",
    "import.unknown_key",
]
"""Which kind of rule is broken; a code keeps its meaning when its text changes.

    config.file           the file is missing, or is no UTF-8 text that holds a mapping
    config.yaml           the text is not valid YAML
    config.override       an override is not of the form key.key=value, or leads nowhere
    config.unknown_key    a key that is not known at its place, or is not text
    config.missing_key    a key that must be there is not
    config.type           a value of the wrong type
    config.range          a value of the right type that is out of bounds or none of the choices
    config.conflict       keys or values that do not go together
    config.rule           any other rule, such as what the machine, the environment or a model's file demands
    stage.unknown         no stage has this name
    stage.order           a stage cannot take what it gets, or cannot stand at its place
    stage.random          a random stage where a model is served
    stage.size            images of varying size at the end of a pipeline
    sample.bad            an encoded image that cannot become a tensor
    sample.format         an encoded image of a format that `decode.formats` would have to name
    sample.unsupported    an encoded image that may be sound, but of a kind that gpuflow does not decode
    sample.too_large      an encoded image of more pixels than `max_pixels`, or more scans than `max_scans`
    import.source         another library's transforms that cannot be read
    import.stage          a transform of another library that no stage equals
    import.unknown_key    a key of another library's file that is not known
"""


class _Unset(enum.Enum):
    UNSET = "no value"


UNSET: Final = _Unset.UNSET
"""Stands where a problem has no value to show."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One broken rule. Its text is `<place> <path> <rule>, got <value>; <action>`, without the parts that it lacks.

    Examples:
        >>> print(Problem("x.yaml:7:", "must be >= 1", 0, "leave it out", path=("run", "threads")))
        x.yaml:7: run.threads must be >= 1, got 0; leave it out

    Args:
        place: where people find it: `configs/x.yaml:12:`, `override 'run.threads=0':`, `--model:`.
        rule: what must hold, or what is wrong: `must be >= 1`.
        value: what is there instead.
        action: what to do about it.
        path: the keys that lead to the value, from where its finder stands; each caller puts its own before them.
        code: which kind of rule it is.
        line: the line of the file that `place` names; None if no line is known.
    """

    place: str
    rule: str
    value: object = UNSET
    action: str = ""
    path: tuple[Key, ...] = ()
    code: Code = "config.rule"
    line: int | None = None

    @classmethod
    def of(
        cls, path: Key | tuple[Key, ...], rule: str, value: object = UNSET, action: str = "", *, code: Code
    ) -> Problem:
        """Return a problem of the value at `path`, whose file and line are not known yet.

        Examples:
            >>> print(Problem.of("size", "must be >= 1", 0, code="config.range"))
            size must be >= 1, got 0
        """
        return cls("", rule, value, action, path if isinstance(path, tuple) else (path,), code)

    def below(self, *keys: Key) -> Problem:
        """Return the problem with these keys before its path.

        Examples:
            >>> print(Problem.of("size", "must be >= 1", code="config.range").below("pipelines", "train", "batch"))
            pipelines.train.batch.size must be >= 1
        """
        return replace(self, path=(*keys, *self.path))

    def __str__(self) -> str:
        got = "" if self.value is UNSET else f", got {show(self.value)}"
        action = f"; {self.action}" if self.action else ""
        return redacted(" ".join(part for part in (self.place, dotted(self.path), f"{self.rule}{got}{action}") if part))

    def as_dict(self) -> dict[str, Any]:
        """Return the parts and the text as values that JSON has.

        Examples:
            >>> problem = Problem("x.yaml:7:", "must be >= 1", 0, path=("run", "threads"), code="config.range", line=7)
            >>> found = problem.as_dict()
            >>> found["place"], found["path"], found["line"], found["value"]
            ('x.yaml:7', 'run.threads', 7, 0)
        """
        parts: dict[str, Any] = {
            "place": self.place.removesuffix(":"),
            "path": dotted(self.path),
            "line": self.line,
            "code": self.code,
            "value": None if self.value is UNSET else self.value,
            "action": self.action,
            "text": str(self),
        }
        return dict(json_value(parts))


class ConfigError(GpuflowError, ValueError):
    """One or more located problems of a configuration, all of them reported at once.

    Examples:
        >>> error = ConfigError([Problem("x.yaml:", "has no source"), Problem("x.yaml:", "has no pipelines")])
        >>> len(error.problems), str(error)
        (2, 'x.yaml: has no source\\nx.yaml: has no pipelines')
    """

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.problems,)


class SourceError(GpuflowError, ValueError):
    """The source cannot be indexed, or a shard changed after it was."""


class StateError(GpuflowError, ValueError):
    """A saved state does not belong to this loader."""


class BadSampleError(GpuflowError, ValueError):
    """One encoded image cannot become a tensor.

    `stage` is the stage that gave it up (`read`, `decode`, or a stage's name) and `reason` the rule it broke.
    `index` and `path` say which sample it is, once that is known; `code` says which kind of rule it broke.

    Examples:
        >>> BadSampleError("decode", "empty: the file has no bytes").located(3, "cat/3.jpg")
        BadSampleError('cat/3.jpg (sample 3): decode: empty: the file has no bytes')
    """

    def __init__(self, stage: str, reason: str, code: Code = "sample.bad", *, index: int = -1, path: str = "") -> None:
        self.stage, self.reason, self.code, self.index, self.path = stage, redacted(reason), code, index, redacted(path)
        place = f"{path} (sample {index}): " if path else ""
        super().__init__(f"{place}{stage}: {reason}")

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the values: worker processes send these errors to the loader."""
        return partial(BadSampleError, index=self.index, path=self.path), (self.stage, self.reason, self.code)

    def located(self, index: int, path: str) -> BadSampleError:
        """Return the same fault with its sample named, and with the cause where a path of Windows names no file."""
        from_windows = self.reason == "no such file" and "\\" in path
        cause = "; its path has backslashes, as on Windows: write / in place of them" if from_windows else ""
        return BadSampleError(self.stage, self.reason + cause, self.code, index=index, path=path)


class SystemFault(GpuflowError, OSError):
    """The system has no more open files, memory or disk space to give, or a pipe broke.

    No sample is at fault, so none is counted as bad. `errno` and `filename` are those of the refused call.
    """


class ServerFault(SystemFault):
    """A server could not be reached, asked to wait, or answered 5xx, for as long as `run.timeout_s` lets it be tried.

    It names the server. No sample is at fault.
    """


class LoaderError(GpuflowError, RuntimeError):
    """The loader cannot continue."""


class TooManyBadSamples(LoaderError):
    """More bad samples than `run.max_bad` allows, or nothing left to replace one with."""


class LoaderTimeout(LoaderError, TimeoutError):
    """A batch did not come within `run.timeout_s`.

    `paths` are the files of the operation that has run for the longest time, one of which does not end.
    """

    def __init__(self, text: str, paths: Sequence[str] = ()) -> None:
        self.paths = tuple(map(redacted, paths))
        super().__init__(text)


class PredictorError(GpuflowError, RuntimeError):
    """The predictor cannot answer."""


class PredictorTimeout(PredictorError, TimeoutError):
    """An answer did not come within `run.timeout_s`."""


class DecoderError(GpuflowError, RuntimeError):
    """A decoder of this process fails on gpuflow's own test image, so its other results cannot be trusted."""


class NativeLibraryError(GpuflowError, ImportError):
    """The C library of this package is missing or damaged."""

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"gpuflow's C library {reason}; install it again: pip install --force-reinstall --no-deps gpuflow, or in "
            "a clone, where it needs a C compiler, pip install --no-deps -e ."
        )


class MissingExtra(GpuflowError, ImportError):
    """An optional dependency is used but not installed.

    Examples:
        >>> print(MissingExtra("serving", "omniback", "serve"))
        serving needs omniback, which is not installed; pip install 'gpuflow[serve]'
    """

    def __init__(self, feature: str, package: str, extra: str) -> None:
        self._given = feature, package, extra
        super().__init__(f"{feature} needs {package}, which is not installed; pip install 'gpuflow[{extra}]'")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self._given


_SYSTEM_FAULTS = {
    errno.EMFILE: "raise the limit of open files (ulimit -n), or lower run.threads and run.readers",
    errno.ENFILE: "close files of other programs, or raise the machine's limit (fs.file-max)",
    errno.ENOMEM: "free memory, or lower run.threads, run.prefetch and batch.size",
    errno.ENOBUFS: "free memory, or lower run.threads, run.prefetch and batch.size",
    errno.ENOSPC: "free disk space",
    errno.EDQUOT: "free disk space, or raise the quota",
    errno.EPIPE: "check why the process or server at its other end has ended",
}
"""Errors of system calls that say nothing about the file they were called for, and what to do about each."""


def is_system_fault(error: BaseException | None) -> bool:
    """Return True if an exception, or one that caused it, is a fault of the environment and not of a sample.

    Every place that turns an exception into a `BadSampleError` asks this first, and raises such a fault instead.

    Examples:
        >>> is_system_fault(OSError(errno.EMFILE, "Too many open files")), is_system_fault(FileNotFoundError())
        (True, False)
    """
    while error is not None:
        if isinstance(error, MemoryError | SystemFault) or type(error).__name__ == "OutOfMemoryError":  # or torch's
            return True
        if isinstance(error, OSError) and error.errno in _SYSTEM_FAULTS:
            return True
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return False


def system_fault(error: BaseException, path: str) -> BaseException:
    """Return a fault of the environment for raising. A failed system call gets its file and what to do.

    Examples:
        >>> print(system_fault(OSError(errno.ENOSPC, "No space left on device"), "out.csv"))
        [Errno 28] No space left on device; free disk space: 'out.csv'
    """
    if not isinstance(error, OSError) or error.errno not in _SYSTEM_FAULTS:
        return error
    fault = SystemFault(error.errno, f"{error.strerror or error}; {_SYSTEM_FAULTS[error.errno]}", path)
    fault.__cause__ = error
    return fault


def reason_of(error: BaseException, *, with_type: bool = False) -> str:
    """Return the first line of the text of a library's exception; its type if there is no text.

    with_type: put the type before it, for texts that are not clear without it.

    Examples:
        >>> reason_of(ValueError("bad header\\nat byte 7")), reason_of(KeyError("size"), with_type=True)
        ('bad header', "KeyError: 'size'")
    """
    name, lines = type(error).__name__, str(error).strip().splitlines()
    if not lines:
        return name
    return f"{name}: {lines[0]}" if with_type else lines[0]


_URL = re.compile(r"\b[a-zA-Z][\w+.-]*://\S+")
_USER = re.compile(r"://[^/?#]*@|://[^/?#:]*:(?!\d*(?:[/?#]|$)).*@")
"""A name and a password before the host, also where the password holds a slash or another mark that ends a host."""
_END = r"(?=[:,.)\]'\"]*(?:[\s&;#]|$))"
_PARAMETER = re.compile(rf"([?&;#][^=&;#?\s]+=)([^&;#\s]+?){_END}")
_NAMELESS = re.compile(rf"(^|&)([^=&;#\s]+?){_END}")
_NUMBER, _SECRET = re.compile(r"\d{1,12}"), re.compile(r"(?i)sig|token|key|secret|pass|pwd|auth|cred|code|pin")
_HIDDEN = "***"


def redacted(text: str) -> str:
    """Return the text with the credentials of its URLs replaced by `***`. Every message and path passes through this.

    Hidden are a name and a password before the host, and what a query holds but numbers, as in `?id=7`: the parameters
    of signed URLs have many names. Parameters are hidden behind a URL, too, because a URL may hold spaces.

    Examples:
        >>> redacted("https://me:secret@host/1.jpg?id=7&sig=Zm9v: no such file")
        'https://***@host/1.jpg?id=7&sig=***: no such file'
    """
    start = text.find("://")
    if start < 0:
        return text
    return _URL.sub(_url, text[:start] + _PARAMETER.sub(_parameter, text[start:]))


def _url(found: re.Match[str]) -> str:
    """Return a URL whose named parameters are hidden already."""
    address, mark, query = _USER.sub(f"://{_HIDDEN}@", found[0]).partition("?")
    return f"{address}{mark}{_NAMELESS.sub(_parameter, query)}"


def _parameter(found: re.Match[str]) -> str:
    name, value = found.groups()
    return found[0] if _NUMBER.fullmatch(value) and not _SECRET.search(name) else f"{name}{_HIDDEN}"


def suggest(word: object, known: Iterable[str], *, else_all: bool = True, meant: str = "") -> str:
    """Name the closest known word. If none is close, name all known words, or nothing without `else_all`.

    meant: what the word is known to stand for, which is named in place of a close one.

    Examples:
        >>> suggest("resise", ["resize", "rotate"]), suggest("x", ["resize", "rotate"])
        ("did you mean 'resize'?", 'known: resize, rotate')
        >>> suggest("prat", ["part", "path"])
        "did you mean 'part'?"
    """
    if meant:
        return f"did you mean {meant!r}?"
    names = sorted(known)
    text = str(word)[:4096]
    if close := difflib.get_close_matches(text, names, cutoff=0.6):
        same_letters = [name for name in close if sorted(name) == sorted(text)]  # of equal ratio where two are swapped
        return f"did you mean {(same_letters or close)[0]!r}?"
    return f"known: {', '.join(names)}" if else_all else ""


def near_word(word: str, known: Collection[str]) -> str:
    """Return a clause with the closest known word, or with all known words if they are few; else an empty text."""
    text = suggest(word, known, else_all=len(known) <= 20) if known else ""
    return f"; {text}" if text else ""


def dotted(path: Iterable[Key]) -> str:
    """Return keys as people write them, each cut to 60 characters.

    Examples:
        >>> dotted(("pipelines", "train", "stages", 2, "resize"))
        'pipelines.train.stages[2].resize'
    """
    return "".join(f"[{key}]" if isinstance(key, int) else f".{_cut(str(key))}" for key in path).lstrip(".")


def show(value: object) -> str:
    """Return a value as a reader of YAML knows it, cut to 60 characters.

    Examples:
        >>> show((1, None)), show(True), show("x" * 99)[-5:]
        ('[1, None]', 'true', 'xx...')
    """
    text = json.dumps(value) if value is None or isinstance(value, bool) else repr(_lists(value))
    return _cut(redacted(text))


def json_value(value: Any) -> Any:
    """Return a value that JSON has: lists in place of tuples, text in place of other types, no passwords.

    Examples:
        >>> json_value({"shape": (2, None), "rate": math.nan, "url": "http://me:secret@host/"})
        {'shape': [2, None], 'rate': 'nan', 'url': 'http://***@host/'}
    """
    if isinstance(value, Mapping):
        return {str(key): json_value(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return list(map(json_value, value))
    if isinstance(value, str):
        return redacted(value)
    known = value is None or isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))
    return value if known else redacted(str(value))


_MOST_SHOWN = 60
"""Characters of a value or a key."""


def _cut(text: str) -> str:
    return text if len(text) <= _MOST_SHOWN else text[: _MOST_SHOWN - 3] + "..."


def _lists(value: Any) -> Any:
    """Return a value with lists in place of tuples, which YAML does not have."""
    if isinstance(value, (tuple, list)):
        return list(map(_lists, value))
    if isinstance(value, dict):
        return {key: _lists(item) for key, item in value.items()}
    return value
