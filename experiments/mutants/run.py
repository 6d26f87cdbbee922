"""Runs the tests against mutants of gpuflow: copies with one small fault each, which some test should notice.

    python experiments/mutants/run.py                 # go on where the last run stopped, then write the results
    python experiments/mutants/run.py --count 50      # at most 50 mutants now
    python experiments/mutants/run.py --areas stages  # those of some modules
    python experiments/mutants/run.py --only ID ...   # run these again
    python experiments/mutants/run.py --only ID ... --tests sources laws/test_source_laws.py   # by some tests alone
    python experiments/mutants/run.py --list          # the mutants that have no row in outcomes.csv yet
    python experiments/mutants/run.py --report        # only write the results, of a run that was stopped, too

The mutants are made by rules.py and drawn by a fixed seed, in proportion to the length of the modules below. A first
run records which test calls which function (about as long as the tests themselves). For each mutant, the tests that
call the function around the change run until one fails; those of the module's own test file first, then the fast ones.
A mutant is `killed` if a test fails, `timed out` if they do not end, `survived` if all pass.

Writes outcomes.csv (one row a mutant) and results.csv in this file's folder. A report leaves out each mutant that the
rules no longer make of the modules, because the text has changed: that one is no kill. survivors.csv says by hand what
became of each mutant that survived: the test that now kills it, or why it changes nothing. A whole run begins it anew,
and keeps the reasons for those that change nothing.
"""

from __future__ import annotations

import argparse
import csv
import ctypes
import hashlib
import json
import os
import random
import resource
import runpy
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rules import Mutant, mutants_of

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
SEED, TOTAL = 15, 340
MODULES = {
    "order": ["gpuflow/loader/sampler.py", "gpuflow/loader/epoch.py", "gpuflow/pipeline/rng.py"],
    "folding": [
        f"gpuflow/{name}.py"
        for name in ("pipeline/program", "pipeline/bounds", "execute/cpu/runner", "execute/cpu/native_chunk")
    ],
    "stages": ["stages/*.py"],
    "sources": ["gpuflow/sources/*.py", "gpuflow/sources/storage/*.py"],
    "workers": ["gpuflow/runtime/worker_pool.py", "gpuflow/loader/decode.py", "gpuflow/execute/cpu/workers.py"],
    "distributed": ["gpuflow/runtime/ranks.py"],
    "service": [f"gpuflow/serve/http/{name}.py" for name in ("body", "app", "server", "limits")],
}
TESTS = (
    "sources", "stages", "pipeline", "execute", "runtime", "serve/http", "loader", "laws",
    "torchpipe/test_cpu_preprocessor.py", "torchpipe/test_preset.py", "torchpipe/test_preset_runner.py",
    "test_existing_script.py",
)  # fmt: skip
"""Test files, and folders of them, that run. The others call the same modules from further off."""
WITHOUT = ("_gpu.py", "kernels/")
COPIED = ("gpuflow", "stages", "tests", "configs", "docs", "experiments", "plots", "pyproject.toml", "README.md")
IMPORTS = (
    "torch", "torchvision.transforms.v2", "spdl.pipeline", "cv2", "numpy", "hypothesis", "pydantic", "yaml", "fastapi",
    "uvicorn", "PIL.Image", "skimage", "sklearn", "onnxruntime",
)  # fmt: skip
"""What the tests import besides gpuflow: once, in the process that forks those that run them."""
FIELDS = ("id", "module", "function", "line", "rule", "before", "after", "outcome", "by", "tests", "seconds")
SURVIVOR_FIELDS = ("id", "module", "function", "line", "rule", "before", "after", "verdict", "why")
FIRST_SECONDS, ALL_SECONDS = 12.0, 60.0
"""Tests that take this long run against each mutant, and then as many more against those that survived."""
LEAST_SECONDS = 30.0
"""A test may take this long with a mutant, and ten times as long as the slowest one takes without."""
MAX_BYTES = 16 << 30
NO_TESTS, NOT_RUN = 5, 99
"""Exit status of pytest where it finds no test, and of a process that could not start it."""
MARK = "GPUFLOW_MUTANT"


@dataclass(frozen=True)
class Test:
    name: str
    seconds: float

    @property
    def file(self) -> str:
        return self.name.partition("::")[0]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, metavar="N")
    parser.add_argument("--areas", nargs="+", choices=MODULES, default=list(MODULES))
    parser.add_argument("--only", nargs="+", metavar="ID")
    parser.add_argument("--tests", nargs="+", default=list(TESTS), help="files and folders of tests/ that run")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--report", action="store_true")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "gpuflow_mutants")
    options = parser.parse_args()
    if options.list:
        known = {row["id"] for row in read_csv(HERE / "outcomes.csv")}
        for mutant in chosen(ROOT):
            if mutant.id not in known and area_of(mutant.path) in options.areas:
                print(mutant.id, f"{mutant.path}:{mutant.line}", mutant.rule)
        return
    if not options.report:
        for module in IMPORTS:
            _import(module)
        copy = copied(options.work)
        tests, calls = recorded(copy, options.tests, options.work / "trace.jsonl")
        progress = options.work / "outcomes.csv"
        mutants = chosen(copy)
        if options.only:
            again = [mutant for mutant in mutants if mutant.id in options.only]
            run_all(copy, again, tests, calls, HERE / "outcomes.csv", ALL_SECONDS)
        else:
            done = {row["id"] for row in read_csv(progress)}
            left = [m for m in mutants if m.id not in done and area_of(m.path) in options.areas]
            run_all(copy, left[: options.count], tests, calls, progress, FIRST_SECONDS)
            if not {mutant.id for mutant in mutants} <= {row["id"] for row in read_csv(progress)}:
                return
            passed = unfinished(progress)
            run_all(copy, [m for m in mutants if m.id in passed], tests, calls, progress, ALL_SECONDS, passed)
            ids = {mutant.id for mutant in mutants}
            write_csv(HERE / "outcomes.csv", FIELDS, [row for row in read_csv(progress) if row["id"] in ids])
            progress.unlink()
            begin_survivors()
    else:
        take_over(options.work / "outcomes.csv")
    report()


def _import(name: str) -> None:
    try:
        __import__(name)
    except ImportError:
        print(f"without {name}")


def copied(work: Path) -> Path:
    """A copy of this checkout, which mutants are written into."""
    copy = work / "tree"
    shutil.rmtree(copy, ignore_errors=True)
    copy.mkdir(parents=True)
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, copy / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(source, copy / name)
    return copy


# --- which mutants ----------------------------------------------------------------------------------------------------


def chosen(root: Path) -> list[Mutant]:
    """The mutants to run: TOTAL of them, in proportion to how many each module has, and its rules in turn."""
    random_ = random.Random(SEED)
    groups = {path: mutants_in(root, path) for path in module_paths(root)}
    groups = {path: mutants for path, mutants in groups.items() if mutants}
    all_of_them = sum(map(len, groups.values()))
    found: list[Mutant] = []
    for mutants in groups.values():
        wanted = max(3, round(TOTAL * len(mutants) / all_of_them))
        by_rule: dict[str, list[Mutant]] = {}
        for mutant in random_.sample(mutants, len(mutants)):
            by_rule.setdefault(mutant.rule, []).append(mutant)
        turns = [by_rule[rule][i] for i in range(len(mutants)) for rule in sorted(by_rule) if i < len(by_rule[rule])]
        found += turns[:wanted]
    random_.shuffle(found)
    return found


def mutants_in(root: Path, path: str) -> list[Mutant]:
    found: list[Mutant] = mutants_of(path, (root / path).read_text())
    return found


def module_paths(root: Path) -> list[str]:
    paths = [path for patterns in MODULES.values() for pattern in patterns for path in sorted(root.glob(pattern))]
    return [str(path.relative_to(root)) for path in paths]


def area_of(path: str) -> str:
    return next(area for area, patterns in MODULES.items() if any(Path(path).match(pattern) for pattern in patterns))


# --- which tests ------------------------------------------------------------------------------------------------------


def recorded(copy: Path, names: Sequence[str], path: Path) -> tuple[dict[str, Test], dict[str, set[str]]]:
    """The tests that pass, and the tests that call each function, named "file:qualified name".

    What `path` says of test files that have not changed since is taken from there.
    """
    known = {line["file"]: line for line in map(json.loads, path.read_text().splitlines())} if path.exists() else {}
    tests: dict[str, Test] = {}
    calls_of: dict[str, set[str]] = {}
    for file in test_files(copy, names):
        digest = hashlib.sha256((copy / file).read_bytes()).hexdigest()[:16]
        if known.get(file, {}).get("digest") != digest:
            known[file] = {"file": file, "digest": digest, **record(copy, file)}
            with path.open("a") as rows:
                rows.write(json.dumps(known[file]) + "\n")
        tests.update({name: Test(name, seconds) for name, seconds in known[file]["tests"].items()})
        for test, function in known[file]["calls"]:
            if test in known[file]["tests"]:
                calls_of.setdefault(function, set()).add(test)
    return tests, calls_of


def record(copy: Path, file: str) -> dict[str, Any]:
    """The tests of a file that pass, their seconds, and (test, function) of all that they call."""
    calls = copy.parent / "calls"
    calls.unlink(missing_ok=True)
    outcome = in_child(copy, [file], None, limit=1800, trace=calls)
    pairs = {tuple(line.split("\t")) for line in calls.read_text().splitlines()} if calls.exists() else set()
    print(f"{file}: {len(outcome['passed'])} tests, exit {outcome['code']}, {outcome['seconds']:.0f} s", flush=True)
    return {"tests": outcome["passed"], "calls": sorted(pair for pair in pairs if len(pair) == 2)}


def test_files(root: Path, names: Sequence[str]) -> list[str]:
    found = [(root / "tests" / name) for name in names]
    files = [file for path in found for file in (sorted(path.rglob("test_*.py")) if path.is_dir() else [path])]
    found_names = [str(file.relative_to(root)) for file in files]
    return [name for name in found_names if not any(part in name for part in WITHOUT)]


def tests_for(mutant: Mutant, tests: dict[str, Test], calls: dict[str, set[str]]) -> list[Test]:
    """Tests that could notice a mutant: those of the module's own file, then the others; the fast ones first."""
    path = mutant.path.replace("stages/", "gpuflow/stages/", 1) if mutant.path.startswith("stages/") else mutant.path
    own = f"/test_{Path(mutant.path).stem}.py"
    names = calls.get(f"{path}:{mutant.function}")
    if names is None:  # outside of functions, or called in no traced process: every test that uses the module
        names = {name for function, of in calls.items() if function.startswith(f"{path}:") for name in of}
    names = names | {name for name, test in tests.items() if test.file.endswith(own)}
    return sorted((tests[name] for name in names), key=lambda t: (not t.file.endswith(own), t.seconds, t.name))


def within(tests: Iterable[Test], seconds: float) -> list[Test]:
    """The first tests, until they take so long."""
    starts = accumulate((test.seconds for test in tests), initial=0.0)
    return [test for test, start in zip(tests, starts, strict=False) if start < seconds]


# --- running ----------------------------------------------------------------------------------------------------------


def run_all(
    copy: Path,
    mutants: Sequence[Mutant],
    tests: dict[str, Test],
    calls: dict[str, set[str]],
    path: Path,
    seconds: float,
    passed: Mapping[str, int] = MappingProxyType({}),
) -> None:
    """Run tests against mutants, one after the other, and put the rows into the file `path`.

    seconds: tests are taken until they take this long without a mutant.
    passed: of each mutant's id, how many of its tests have passed before; they are not run again.
    """
    for number, mutant in enumerate(mutants):
        skipped, possible = passed.get(mutant.id, 0), tests_for(mutant, tests, calls)
        row = run_one(copy, mutant, within(possible[skipped:], seconds), number)
        row["tests"] = f"{skipped + int(row['tests'])} of {len(possible)}"
        write_csv(path, FIELDS, [*(old for old in read_csv(path) if old["id"] != row["id"]), row])
        print(f"{number + 1:4}/{len(mutants)} {row['outcome']:9} {row['seconds']:>6} s  {mutant.path}:{mutant.line} "
              f"{mutant.rule}: {row['before']} -> {row['after']}", flush=True)  # fmt: skip


def unfinished(path: Path) -> dict[str, int]:
    """Of mutants that survived some of their tests: the id, and how many."""
    counts = {row["id"]: row["tests"].split(" of ") for row in read_csv(path) if row["outcome"] == "survived"}
    return {id: int(done) for id, (done, of) in counts.items() if int(done) < int(of)}


def run_one(copy: Path, mutant: Mutant, tests: Sequence[Test], number: int) -> dict[str, str]:
    path = copy / mutant.path
    original, slowest = path.read_text(), max((test.seconds for test in tests), default=0.0)
    path.write_text(mutant.apply(original))
    os.utime(path, (time.time(), 1_000_000_000 + number))  # or a cached .pyc would be taken
    outcome: dict[str, Any] = {"code": 0, "seconds": 0.0}
    try:
        if tests:
            outcome = in_child(copy, [test.name for test in tests], mutant.id, limit=LEAST_SECONDS + 10 * slowest)
    finally:
        path.write_text(original)
    if outcome["code"] in (NO_TESTS, NOT_RUN):
        raise SystemExit(f"the tests of {mutant.id} could not be run: see {copy.parent / 'output.log'}")
    word = {0: "survived", None: "timed out"}.get(outcome["code"], "killed")
    return {
        "id": mutant.id,
        "module": mutant.path,
        "function": mutant.function,
        "line": str(mutant.line),
        "rule": mutant.rule,
        "before": short(mutant.statement),
        "after": short(mutant.after),
        "outcome": word,
        "by": "" if word == "survived" else str(outcome.get("failed") or outcome.get("at") or "import"),
        "tests": str(len(outcome.get("passed", {}))),
        "seconds": f"{outcome['seconds']:.1f}",
    }


def short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 120 else f"{text[:117]}..."


def in_child(
    copy: Path, names: Sequence[str], mark: str | None, *, limit: float, trace: Path | None = None
) -> dict[str, Any]:
    """Run tests in a forked process. code: pytest's exit status, or None if a test did not end within the limit."""
    work, begin = copy.parent, time.monotonic()
    answer = work / "answer.jsonl"
    answer.unlink(missing_ok=True)
    pid = os.fork()
    if pid == 0:
        try:
            _child(copy, names, mark, answer, trace)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(NOT_RUN)
    code: int | None = None
    size, since = 0, time.monotonic()
    while time.monotonic() < since + limit:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            code = os.waitstatus_to_exitcode(status)
            break
        if answer.exists() and answer.stat().st_size != size:  # another test has begun or ended
            size, since = answer.stat().st_size, time.monotonic()
        time.sleep(0.05)
    else:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    _end_leftovers(mark or "trace")
    shutil.rmtree(work / "pytest", ignore_errors=True)
    result: dict[str, Any] = {"code": code, "seconds": time.monotonic() - begin, "passed": {}}
    for line in answer.read_text().splitlines() if answer.exists() else []:
        name, passed, seconds = json.loads(line)
        if passed is None:
            result["at"] = name
        elif passed:
            result["passed"][name] = seconds
        else:
            result["failed"] = name
    return result


def _end_leftovers(mark: str) -> None:
    """Kill what the tests have started and left behind, recognised by its environment."""
    wanted = f"{MARK}={mark}".encode()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if wanted in (entry / "environ").read_bytes().split(b"\0"):
                    os.kill(int(entry.name), signal.SIGKILL)
            except OSError:
                continue


def _child(copy: Path, names: Sequence[str], mark: str | None, answer: Path, trace: Path | None) -> None:
    import pytest

    os.chdir(copy)
    os.setsid()
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: end when the process that forked this one does
    resource.setrlimit(resource.RLIMIT_DATA, (MAX_BYTES, MAX_BYTES))
    output = os.open(copy.parent / "output.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    sys.path[:] = [str(copy), *(entry for entry in sys.path if entry not in (str(HERE), str(ROOT), ""))]
    os.environ.update({"PYTHONPATH": str(copy), MARK: mark or "trace"})
    if trace is not None:
        os.environ.update({"PYTHONPATH": f"{copy}:{HERE / 'tracing'}", "GPUFLOW_TRACE": str(trace)})
        runpy.run_path(str(HERE / "tracing" / "sitecustomize.py"))

    class Plugin:
        @pytest.hookimpl(trylast=True)
        def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
            if mark is not None:
                places = {name: place for place, name in enumerate(names)}
                items[:] = sorted((item for item in items if item.nodeid in places), key=lambda i: places[i.nodeid])

        @pytest.hookimpl
        def pytest_runtest_logstart(self, nodeid: str) -> None:
            add([nodeid, None, 0.0])

        @pytest.hookimpl
        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            if report.failed:
                add([report.nodeid, False, report.duration])
            elif report.when == "call" and report.passed:
                add([report.nodeid, True, report.duration])

    def add(line: list[Any]) -> None:
        with answer.open("a") as file:
            file.write(json.dumps(line) + "\n")

    files = list(dict.fromkeys(name.partition("::")[0] for name in names))
    options = ["-x"] if mark is not None else []
    arguments = [
        *options,
        "-W",
        "ignore::pytest.PytestAssertRewriteWarning",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        f"--basetemp={copy.parent / 'pytest'}",
        *files,
    ]
    code = int(pytest.main(arguments, plugins=[Plugin()]))
    os._exit(code)


# --- results ----------------------------------------------------------------------------------------------------------


def read_csv(path: Path) -> list[dict[str, str]]:
    if not path.exists():
        return []
    with path.open() as file:
        return list(csv.DictReader(file))


def write_csv(path: Path, fields: Sequence[str], rows: Iterable[Mapping[str, str]]) -> None:
    part = path.with_suffix(".partial")
    with part.open("w") as file:
        writer = csv.DictWriter(file, fields, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    part.replace(path)


def take_over(progress: Path) -> None:
    """Put the rows of a run that was stopped into outcomes.csv, in place of older ones of the same mutants."""
    rows = read_csv(progress)
    ids = {row["id"] for row in rows}
    write_csv(
        HERE / "outcomes.csv",
        FIELDS,
        [*(old for old in read_csv(HERE / "outcomes.csv") if old["id"] not in ids), *rows],
    )


def begin_survivors() -> None:
    """After a whole run: forget who survived an earlier one, but why some are equivalent."""
    survived = {row["id"] for row in read_csv(HERE / "outcomes.csv") if row["outcome"] == "survived"}
    rows = [row for row in read_csv(HERE / "survivors.csv") if row["id"] in survived and row["verdict"] == "equivalent"]
    write_csv(HERE / "survivors.csv", SURVIVOR_FIELDS, rows)


def report() -> None:
    """Write results.csv from outcomes.csv and survivors.csv, and add the survivors that are new to the latter."""
    from gpuflow.tools.bench import row, write_results

    made = {mutant.id for path in module_paths(ROOT) for mutant in mutants_in(ROOT, path)}
    outcomes = [outcome for outcome in read_csv(HERE / "outcomes.csv") if outcome["id"] in made]
    write_csv(HERE / "outcomes.csv", FIELDS, outcomes)
    known = {survivor["id"]: survivor for survivor in read_csv(HERE / "survivors.csv")}
    ids = {outcome["id"] for outcome in outcomes}
    known = {id: survivor for id, survivor in known.items() if id in ids}
    for outcome in outcomes:
        if outcome["outcome"] == "survived" and outcome["id"] not in known:
            known[outcome["id"]] = {**{key: outcome[key] for key in SURVIVOR_FIELDS[:-2]}, "verdict": "open", "why": ""}
    write_csv(HERE / "survivors.csv", SURVIVOR_FIELDS, known.values())
    rows = []
    for area in ("all", *MODULES):
        own = [outcome for outcome in outcomes if area in ("all", area_of(outcome["module"]))]
        generated = [m for path in module_paths(ROOT) if area in ("all", area_of(path)) for m in mutants_in(ROOT, path)]
        verdicts = Counter(known[outcome["id"]]["verdict"] for outcome in own if outcome["id"] in known)
        at_first = Counter(outcome["outcome"] for outcome in own if outcome["id"] not in known)
        counts = {
            "generated": len(generated),
            "run": len(own),
            "killed": at_first["killed"],
            "timed_out": at_first["timed out"],
            "survived": verdicts.total(),
            **{name: verdicts[name.replace("_", " ")] for name in ("killed_since", "equivalent", "open")},
        }
        rows += [row("tests", area, metric, [value], "mutants") for metric, value in counts.items()]
        print(f"{area:12} " + "  ".join(f"{metric} {value}" for metric, value in counts.items()))
    write_results(HERE / "results.csv", rows)


if __name__ == "__main__":
    main()
