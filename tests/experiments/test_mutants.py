"""experiments/mutants: which mutants there are, which of them are drawn, and what a run says of each."""

from __future__ import annotations

import ast
import csv
import importlib
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
HERE = ROOT / "experiments" / "mutants"


@pytest.fixture
def rules(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(HERE))
    return importlib.import_module("rules")


@pytest.fixture
def tool(rules: Any) -> Any:
    return importlib.import_module("run")


def changes(rules: Any, text: str) -> set[tuple[str, str]]:
    """(rule, text after it) of all mutants of a text, without blank lines."""
    text = textwrap.dedent(text)
    return {(mutant.rule, mutant.apply(text).strip()) for mutant in rules.mutants_of("a.py", text)}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("f(y)", {("swap_axis", "f(x)"), ("omit_call", "pass")}),
        ("a = box.height", {("swap_axis", "a = box.width")}),
        ("a = u[:, 0]", {("swap_axis", "a = u[:, 1]"), ("off_by_one", "a = u[:, 1]")}),
        ("a = b - c", {("drop_term", "a = (b)")}),
        ("a = b + c", {("drop_term", "a = (b)"), ("drop_term", "a = (c)")}),
        ("a = b and c", {("drop_term", "a = (b)"), ("drop_term", "a = (c)")}),
        ("a = b < c", {("off_by_one", "a = b <= c")}),
        ("a = max(b, c)", {("omit_call", "a = (b)"), ("omit_call", "a = (c)")}),
        ("a = key64('o', seed)", {("constant_for_draw", "a = key64('o', 0)")}),
        ("a = keys.uniform(n)", {("constant_for_draw", "a = (keys.uniform(n) * 0 + 0.5)")}),
        ("raise E(b)", {("omit_raise", "pass")}),
        ("a: int | None = None", set()),
        ("'''text'''; assert a < b; a = f'{b + c}'; __all__ = ['a' + 'b']", set()),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_rules(text: str, expected: set[tuple[str, str]], rules: Any) -> None:
    assert changes(rules, text) == expected


def test_functions_are_named_as_python_names_them(rules: Any) -> None:
    text = textwrap.dedent("""
        class A:
            a = b + c
            def f(self):
                if self:
                    def g():
                        return b - c
                return b * c
    """)
    assert {mutant.function for mutant in rules.mutants_of("a.py", text)} == {"A", "A.f", "A.f.<locals>.g"}


@pytest.mark.slow
def test_every_mutant_of_every_module_is_another_valid_program_with_a_name_of_its_own(tool: Any) -> None:
    mutants = tool.chosen(ROOT)
    assert len({mutant.id for mutant in mutants}) == len(mutants) >= 300
    assert {tool.area_of(mutant.path) for mutant in mutants} == set(tool.MODULES)
    texts = {mutant.path: (ROOT / mutant.path).read_text() for mutant in mutants}
    originals = {path: ast.dump(ast.parse(text)) for path, text in texts.items()}
    for mutant in mutants:
        assert ast.dump(ast.parse(mutant.apply(texts[mutant.path]))) != originals[mutant.path]


def test_the_same_seed_draws_the_same_mutants_and_another_line_in_a_file_changes_no_name(tool: Any, rules: Any) -> None:
    assert tool.chosen(ROOT) == tool.chosen(ROOT)
    text = "def f(a):\n    return a + 1\n"
    before, after = (rules.mutants_of("a.py", text) for text in (text, f"import os\n\n\n{text}"))
    assert [mutant.id for mutant in before] == [mutant.id for mutant in after]
    assert [mutant.line + 3 for mutant in before] == [mutant.line for mutant in after]


PROGRAM = """
import sys
from pathlib import Path
import hypothesis
import pytest
import run
copy = Path(sys.argv[1])
run.LEAST_SECONDS = 15
tests, calls = run.recorded(copy, ["loader"], copy.parent / "trace.jsonl")
run.run_all(copy, run.mutants_in(copy, "gpuflow/loader/sampler.py"), tests, calls, copy.parent / "outcomes.csv", 9)
"""


@pytest.mark.slow
def test_a_run_says_which_mutants_are_killed_survive_or_do_not_end(tmp_path: Path) -> None:
    for name, text in {
        "gpuflow/__init__.py": "",
        "gpuflow/loader/__init__.py": "",
        "gpuflow/loader/sampler.py": """
            def tested(a):
                return a + 1

            def loop(i):
                while i:
                    i -= 1

            def untested(b):
                return b - b
        """,
        "tests/loader/test_sampler.py": """
            from gpuflow.loader.sampler import loop, tested

            def test_tested():
                assert tested(2) == 3

            def test_loop():
                loop(3)
        """,
    }.items():
        (tmp_path / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "tree" / name).write_text(textwrap.dedent(text))
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "tree")]
    subprocess.run(command, check=True, timeout=120, cwd=HERE, env={"PYTHONPATH": str(HERE)}, stdout=subprocess.DEVNULL)
    with (tmp_path / "outcomes.csv").open() as file:
        found = {(row["function"], row["before"], row["after"]): row for row in csv.DictReader(file)}
    outcomes = {key: row["outcome"] for key, row in found.items()}
    assert outcomes == {
        ("tested", "a + 1", "(a)"): "killed",
        ("tested", "a + 1", "(1)"): "killed",
        ("tested", "1", "2"): "killed",
        ("loop", "1", "2"): "timed out",
        ("untested", "b - b", "(b)"): "survived",
    }
    assert found["tested", "1", "2"]["by"] == "tests/loader/test_sampler.py::test_tested"
    assert (tmp_path / "tree/gpuflow/loader/sampler.py").read_text().count("return a + 1") == 1


def test_the_recorded_outcomes_are_those_of_the_results_and_every_survivor_has_its_reason(tool: Any) -> None:
    outcomes = {row["id"]: row for row in tool.read_csv(HERE / "outcomes.csv")}
    survivors = {row["id"]: row for row in tool.read_csv(HERE / "survivors.csv")}
    assert len(outcomes) >= 100
    assert {id for id, row in outcomes.items() if row["outcome"] == "survived"} <= survivors.keys() <= outcomes.keys()
    assert {row["verdict"] for row in survivors.values()} <= {"killed since", "equivalent", "open"}
    assert all(row["why"] for row in survivors.values())
    values = {
        row["metric"]: int(row["value"]) for row in tool.read_csv(HERE / "results.csv") if row["workload"] == "all"
    }
    assert values["run"] == len(outcomes) == values["killed"] + values["timed_out"] + values["survived"]
    assert values["survived"] == len(survivors) == values["killed_since"] + values["equivalent"] + values["open"]
