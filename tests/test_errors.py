"""errors: problems travel as values, their text is made once."""

from __future__ import annotations

import pickle
import typing
from pathlib import Path

import pytest

import gpuflow.errors
from gpuflow.decode.nvjpeg import NvjpegError
from gpuflow.errors import (
    UNSET,
    BadSampleError,
    Code,
    ConfigError,
    MissingExtra,
    Problem,
    dotted,
    near_word,
    reason_of,
    show,
    suggest,
)


@pytest.mark.parametrize(
    ("problem", "text"),
    [
        (Problem("", "nowhere"), "nowhere"),
        (Problem("x.yaml:", "no such file"), "x.yaml: no such file"),
        (Problem("x.yaml:3:", "must be >= 1", 0, path=("run", "threads")), "x.yaml:3: run.threads must be >= 1, got 0"),
        (
            Problem.of((2, "flip"), "is not a stage", action="did you mean 'flop'?", code="stage.unknown"),
            "[2].flip is not a stage; did you mean 'flop'?",
        ),
        (
            Problem.of("size", "must be a list", None, "give one", code="config.type").below("a", 1),
            "a[1].size must be a list, got null; give one",
        ),
    ],
)
def test_the_text_of_a_problem(problem: Problem, text: str) -> None:
    assert str(problem) == text


def test_a_problem_is_seen_from_further_out() -> None:
    problem = Problem.of("height", "must be >= 1", 0, code="config.range")
    assert (problem.path, problem.value, problem.code, problem.action) == (("height",), 0, "config.range", "")
    assert problem.below("stages", 1, "resize").path == ("stages", 1, "resize", "height")
    assert Problem("here", "is wrong").value is UNSET


def test_errors_keep_their_values_between_processes() -> None:
    problem = Problem.of("size", "must be >= 1", 0, code="config.range")
    again = pickle.loads(pickle.dumps(ConfigError([problem, Problem("x:", "is wrong")])))
    assert again.problems == (problem, Problem("x:", "is wrong"))
    assert again.problems[1].value is UNSET
    fault = BadSampleError("decode", "huge", "sample.too_large").located(3, "a.jpg")
    found = pickle.loads(pickle.dumps(fault))
    assert str(found) == str(fault) == "a.jpg (sample 3): decode: huge"
    assert (found.stage, found.reason, found.code, found.index) == ("decode", "huge", "sample.too_large", 3)
    for error in (MissingExtra("source.hf", "datasets", "hf"), NvjpegError("nvjpegDecodeBatched", 6)):
        assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_each_code_is_explained() -> None:
    source = Path(gpuflow.errors.__file__).read_text(encoding="utf-8")
    for code in typing.get_args(Code):
        assert f"\n    {code}  " in source


@pytest.mark.parametrize(
    ("value", "text"),
    [(True, "true"), (None, "null"), (1, "1"), ("a", "'a'"), ((1, (2,)), "[1, [2]]"), ({"a": (1,)}, "{'a': [1]}")],
)
def test_values_are_shown_as_in_yaml(value: object, text: str) -> None:
    assert show(value) == text
    assert show("x" * 100) == "'" + "x" * 56 + "..."


def test_keys_and_suggestions() -> None:
    assert dotted(("pipelines", "a", "stages", 2, "resize")) == "pipelines.a.stages[2].resize"
    assert suggest("resie", ["resize", "flip"]) == "did you mean 'resize'?"
    assert suggest("zzz", ["resize", "flip"]) == "known: flip, resize"
    assert suggest("zzz", ["resize", "flip"], else_all=False) == ""
    assert suggest("resie", ["resize", "flip"], meant="flip") == "did you mean 'flip'?"


def test_texts_of_errors() -> None:
    problems = [Problem("a.yaml:3: run.threads", "must be >= 1, got 0"), Problem("", "nowhere")]
    error = ConfigError(problems)
    assert str(error) == "a.yaml:3: run.threads must be >= 1, got 0\nnowhere"
    assert error.problems == tuple(problems)
    bad = BadSampleError("decode", "empty")
    assert str(bad) == "decode: empty"
    assert str(bad.located(3, "x.jpg")) == "x.jpg (sample 3): decode: empty"
    assert (bad.located(3, "x.jpg").index, bad.index) == (3, -1)
    assert str(MissingExtra("a URL", "fsspec", "remote")) == (
        "a URL needs fsspec, which is not installed; pip install 'gpuflow[remote]'"
    )


@pytest.mark.parametrize(
    ("error", "reason", "with_type"),
    [
        (ValueError("too small\n  at line 3"), "too small", "ValueError: too small"),
        (
            RuntimeError("\n CUDA error: out of memory\r\n"),
            "CUDA error: out of memory",
            "RuntimeError: CUDA error: out of memory",
        ),
        (AssertionError(), "AssertionError", "AssertionError"),
        (KeyError("size"), "'size'", "KeyError: 'size'"),
    ],
)
def test_the_reason_of_an_error(error: Exception, reason: str, with_type: str) -> None:
    assert reason_of(error) == reason
    assert reason_of(error, with_type=True) == with_type


def test_suggest() -> None:
    assert near_word("resie", ["resize", "flip"]) == "; did you mean 'resize'?"
    assert near_word("zzz", ["resize", "flip"]) == "; known: flip, resize"
    assert suggest(3, ["3d", "x"]) == "did you mean '3d'?"
