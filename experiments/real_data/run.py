"""Measures loading and training on photographs of several kinds: `python experiments/real_data/run.py --resume`.

Makes the photographs that are missing. In each row every arm is a process with its own loader and training. The arms
measure in turns, one at a time, while the loaders of the others are full and idle. Each figure is printed and appended
to measurements.jsonl as soon as it is measured; --resume measures only what is missing there. After each row
results.csv is written. See README.md.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import datetime
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from pathlib import Path
from typing import Any, Protocol

import dali_loader
import photos

from gpuflow.errors import suggest
from gpuflow.runtime.files import atomic_write
from gpuflow.tools.bench import COLUMNS, Log, commit, machine, spread, versions

HERE = Path(__file__).parent
TRAININGS, COMPILED, GRAPHED = ("resnet18", "resnet50"), "compiled_resnet18", "graphed_resnet18"
WORKLOADS = (*TRAININGS, COMPILED, GRAPHED, "alone")
COMPILED_ROWS = ("same", "web")
ARM_PROGRAM = HERE / "arms.py"
ARMS = ("resident", "gpuflow", "dali", "engines", "engines sorted")
UNITS = {
    "images_per_s": "images/s",
    "resident_images_per_s": "images/s",
    "step_ratio": "ratio",
    "engine_share": "ratio",
    "cpu_s_per_1000": "s",
    "gpu_mem_mb": "MB",
}
EXTRA_COLUMNS = ("setting", "command")
LIMIT_SECONDS = 400.0
"""How long an arm may take for one message; compiling a model and finding the files that DALI decodes take longest."""
Record = dict[str, Any]


# --- the log ----------------------------------------------------------------------------------------------------------


def key_of(record: Record) -> tuple[str, str, str, int]:
    return record["row"], record["arm"], record["workload"], record["repeat"]


def done(log: Log) -> set[tuple[str, str, str, int]]:
    return {key_of(record) for record in log.records}


def rows_of(records: Iterable[Record]) -> list[dict[str, Any]]:
    """The rows of results.csv: median and range over the repeats, and where they were measured."""
    groups: dict[tuple[str, str, str], list[Record]] = {}
    for record in records:
        for metric in record["metrics"]:
            groups.setdefault((record["arm"], f"{record['row']}; {record['workload']}", metric), []).append(record)
    made = []
    for (arm, workload, metric), members in groups.items():
        origin = ("machine", "versions", "commit", "date", *EXTRA_COLUMNS)
        made.append(
            {
                "arm": arm,
                "workload": workload,
                "metric": metric,
                "unit": UNITS[metric],
                **spread([member["metrics"][metric] for member in members]),
                **{name: " / ".join(dict.fromkeys(member[name] for member in members)) for name in origin},
            }
        )
    return made


def write_csv(path: Path, records: Iterable[Record]) -> None:
    with atomic_write(path, text=True) as file:
        writer = csv.DictWriter(file, [*COLUMNS, *EXTRA_COLUMNS], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows_of(records))


def comparisons(records: Iterable[Record], row: str) -> Iterator[str]:
    """gpuflow's medians relative to those of the other arms of a row."""
    rates = {
        (entry["workload"].partition("; ")[2], entry["arm"]): float(entry["value"])
        for entry in rows_of(record for record in records if record["row"] == row)
        if entry["metric"] == "images_per_s"
    }
    for (workload, arm), rate in rates.items():
        if arm != "gpuflow" and (workload, "gpuflow") in rates:
            yield f"{row:14} {workload:18} gpuflow / {arm}: {rates[workload, 'gpuflow'] / rate:.3f}"


# --- turns ------------------------------------------------------------------------------------------------------------


class ArmFailed(Exception):
    """An arm ended, answered with an error, or did not answer in time."""


class Arm(Protocol):
    """Something that can be measured."""

    name: str

    def prepare(self, workload: str) -> None:
        """Start what the workload needs; unmeasured."""

    def measure(self, workload: str) -> dict[str, float]: ...


def turns(
    arms: Sequence[Arm], workload: str, repeats: int, missing: Collection[tuple[str, str, int]]
) -> Iterator[tuple[Arm, int | None]]:
    """The order in which arms prepare (None) and then measure their missing repeats.

    In a repeat each arm has one turn. Every other repeat has the reverse order, so that a machine that becomes slower
    affects all arms alike.
    """
    for arm in arms:
        if any((arm.name, workload, repeat) in missing for repeat in range(repeats)):
            yield arm, None
    for repeat in range(repeats):
        for arm in arms if repeat % 2 == 0 else reversed(arms):
            if (arm.name, workload, repeat) in missing:
                yield arm, repeat


def take_turns(
    arms: Sequence[Arm],
    workloads: Sequence[str],
    repeats: int,
    missing: Collection[tuple[str, str, int]],
    record: Callable[[Arm, str, int, dict[str, float]], None],
) -> list[str]:
    """Measure each missing (arm, workload, repeat), and return what failed. An arm that fails has no further turn."""
    failures: dict[str, str] = {}
    for workload in workloads:
        for arm, repeat in turns(arms, workload, repeats, missing):
            if arm.name in failures:
                continue
            try:
                if repeat is None:
                    arm.prepare(workload)
                else:
                    record(arm, workload, repeat, arm.measure(workload))
            except ArmFailed as error:
                failures[arm.name] = f"{arm.name}, {workload}: {error}"
    return list(failures.values())


class ArmProcess:
    """An arm in a separate process, which starts at once; `open` makes it ready to measure.

    name: by default the arm's. environment: variables besides those of this process.
    about: its device, setting, versions and choice, as `open_arm` of arms.py says.
    """

    def __init__(self, job: dict[str, Any], *, name: str = "", environment: Mapping[str, str] | None = None) -> None:
        self.name = name or str(job["arm"])
        self.about: dict[str, Any] = {}
        self._connection, child_end = Pipe()
        command = [sys.executable, str(ARM_PROGRAM), str(child_end.fileno())]
        self._process = subprocess.Popen(
            command, pass_fds=[child_end.fileno()], stdin=subprocess.DEVNULL, env={**os.environ, **(environment or {})}
        )
        child_end.close()
        self._job = job

    def open(self) -> dict[str, Any]:
        """Give the process its job and wait until it can measure."""
        self.about = self._ask(self._job, "its job")
        return self.about

    def prepare(self, workload: str) -> None:
        self.about = self._ask(("prepare", workload), workload)

    def measure(self, workload: str) -> dict[str, float]:
        return dict(self._ask(("measure", workload), workload))

    def _ask(self, message: Any, what: str) -> Any:
        """The answer to a message. A process that does not answer is killed, because it would disturb other arms."""
        try:
            self._connection.send(message)
            if not self._connection.poll(LIMIT_SECONDS):
                self._process.kill()
                raise ArmFailed(f"did not answer within {LIMIT_SECONDS:g} s to {what}")
            status, value = self._connection.recv()
        except (EOFError, OSError) as error:
            raise ArmFailed(f"its process ended with {self._process.wait(10)}") from error
        if status != "ok":
            raise ArmFailed(value)
        return value

    def close(self) -> None:
        """End the process."""
        with contextlib.suppress(OSError):
            self._connection.send(None)
        self._connection.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(20)


# --- a row ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the table: the photographs in a folder, and what each arm does with them."""

    name: str
    folder: Path
    arms: tuple[str, ...]
    workloads: tuple[str, ...]

    def workloads_of(self, arm: str) -> tuple[str, ...]:
        """The workloads of an arm: all, but no training for the engines, and no loading for a resident batch."""
        if arm.startswith("engines"):
            return tuple(name for name in self.workloads if name == "alone")
        return tuple(name for name in self.workloads if arm != "resident" or name != "alone")

    def missing(self, repeats: int, done: set[tuple[str, str, str, int]]) -> set[tuple[str, str, int]]:
        """Each (arm, workload, repeat) that is not done."""
        return {
            (arm, workload, repeat)
            for arm in self.arms
            for workload in self.workloads_of(arm)
            for repeat in range(repeats)
            if (self.name, arm, workload, repeat) not in done
        }


def measure_row(row: Row, options: argparse.Namespace, log: Log) -> list[str]:
    """Measure what is missing of a row. Returns what failed."""
    missing = row.missing(options.repeats, done(log))
    command = shlex.join(["python", os.path.relpath(sys.argv[0]), *sys.argv[1:]])
    job = {name: getattr(options, name) for name in ("device", "batch", "seconds", "warm_up", "first_epoch", "set")}
    job |= {"folder": str(row.folder.resolve())}
    origin = {"machine": machine(), "commit": commit(), "date": datetime.date.today().isoformat(), "command": command}
    known = versions()

    def record(arm: Arm, workload: str, repeat: int, metrics: dict[str, float]) -> None:
        assert isinstance(arm, ArmProcess)
        about = arm.about
        log.append(
            {
                "row": row.name,
                "arm": arm.name,
                "workload": workload,
                "repeat": repeat,
                "metrics": metrics,
                "choice": about["choice"],
                **origin,
                "machine": ", ".join(filter(None, [about["device"], origin["machine"]])),
                "versions": " ".join(filter(None, [known, about["versions"]])),
                "setting": ", ".join(
                    filter(
                        None,
                        [
                            f"batch={options.batch}, {options.seconds:g} s",
                            "from the first epoch on" if options.first_epoch else "",
                            about["setting"],
                        ],
                    )
                ),
            }
        )
        print(f"{row.name:14} {workload:18} {arm.name:15} {brief(metrics)}", flush=True)

    failures: list[str] = []
    processes: list[ArmProcess] = []
    opened: list[Arm] = []
    try:
        for arm in [arm for arm in row.arms if any(arm == name for name, *_ in missing)]:
            start = {**job, "arm": arm, **choice_of(log, row.name, arm)}
            try:
                tuned = ask_once({**start, "arm": "tune dali"}) if arm == "dali" else {}
                processes.append(ArmProcess({**start, "tuned": tuned}))
            except ArmFailed as error:
                failures.append(f"{arm}: {error}")
        for process in processes:
            try:
                process.open()
                opened.append(process)
            except ArmFailed as error:
                failures.append(f"{process.name}: {error}")
        failures += take_turns(opened, row.workloads, options.repeats, missing, record)
    finally:
        for process in processes:
            process.close()
    return [f"{row.name}: {failure}" for failure in failures]


def choice_of(log: Log, row: str, arm: str) -> dict[str, Any]:
    """What an arm chose by measurement in the turns before, such as DALI's hw_decoder_load; empty before the first."""
    choices = [record["choice"] for record in log.records if (record["row"], record["arm"]) == (row, arm)]
    return dict(choices[-1]) if choices else {}


def ask_once(job: dict[str, Any]) -> dict[str, Any]:
    """The answer of a process that only prepares something."""
    process = ArmProcess(job)
    try:
        return process.open()
    finally:
        process.close()


def brief(metrics: dict[str, float]) -> str:
    words = [f"{metrics['images_per_s']:10,.0f} images/s"]
    if "step_ratio" in metrics:
        words.append(f"{metrics['step_ratio']:.3f} of {metrics['resident_images_per_s']:,.0f}")
    words += [f"{metrics['gpu_mem_mb']:,.0f} MB"] if metrics.get("gpu_mem_mb") else []
    words += [f"engines {metrics['engine_share']:.1%}"] if "engine_share" in metrics else []
    return "  ".join(words)


def provide_photographs(options: argparse.Namespace, row: str) -> None:
    """Make a row's photographs if their folder is absent. A folder that is already there is taken as it is, unless
    --count, --names or --from say what it must hold."""
    folder = options.photos / row
    chosen = [options.count, options.names, options.source]
    if folder.exists() and (chosen == [None] * 3 or not photos.is_made(folder)):
        return
    if row not in photos.KINDS:
        raise SystemExit(f"--rows {row}: no such kind and no folder {folder}; {suggest(row, photos.KINDS)}")
    folder.parent.mkdir(parents=True, exist_ok=True)
    count, names = options.count or photos.COUNT, options.names or photos.NAMES
    if made := photos.make_photos(row, folder, count=count, names=names, source=options.source):
        print(f"{row}: made {made} photographs in {folder}, each under {names} names", flush=True)


def arms_here(options: argparse.Namespace) -> tuple[str, ...]:
    """The chosen arms that this machine can measure."""
    arms = [arm for arm in ARMS if arm in options.arms]
    if options.device == "cpu":
        arms = [arm for arm in arms if arm in ("resident", "gpuflow")]
    elif "dali" in arms and not dali_loader.is_installed():
        print("DALI is not installed (pip install nvidia-dali-cuda130): its arm is left out", flush=True)
        arms.remove("dali")
    return tuple(arms)


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--resume", action="store_true", help="keep what is measured already and measure the rest")
    parser.add_argument("--rows", nargs="+", default=list(photos.KINDS), help="kinds, or names of folders in --photos")
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=ARMS)
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, help="by default all of a row")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.5, help="of each measurement (default: %(default)s)")
    parser.add_argument("--warm-up", type=float, default=2.0, help="seconds before a workload (default: %(default)s)")
    parser.add_argument("--first-epoch", action="store_true", help="measure from the loader's first epoch on")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--photos", type=Path, default=Path("/dev/shm/real"), help="default: %(default)s")
    parser.add_argument("--from", dest="source", type=Path, metavar="DIR", help="cut photographs from your pictures")
    parser.add_argument("--count", type=int, help=f"files of each kind (default: {photos.COUNT})")
    parser.add_argument("--names", type=int, help=f"names of each file (default: {photos.NAMES})")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="overrides of photos.yaml")
    parser.add_argument("--out", type=Path, default=HERE, help="folder of measurements.jsonl and results.csv")
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu: only to see that the script runs"
    )
    return parser.parse_args(arguments)


def row_of(name: str, options: argparse.Namespace, arms: tuple[str, ...]) -> Row:
    default = [*TRAININGS, *([COMPILED] if name in COMPILED_ROWS else []), "alone"]
    chosen = tuple(one for one in WORKLOADS if one in (options.workloads or default))
    return Row(name, options.photos / name, arms, chosen)


def main() -> None:
    options = parsed()
    log, failures = Log(options.out / "measurements.jsonl"), list[str]()
    arms = arms_here(options)
    if not options.resume:
        chosen = options.workloads or WORKLOADS
        log.discard(lambda old: old["row"] in options.rows and old["arm"] in arms and old["workload"] in chosen)
    for row in [row_of(name, options, arms) for name in options.rows]:
        if row.missing(options.repeats, done(log)):
            provide_photographs(options, row.name)
            failures += measure_row(row, options, log)
        write_csv(options.out / "results.csv", log.records)
        for line in comparisons(log.records, row.name):
            print(line, flush=True)
    if failures:
        sys.exit("\n".join(["Failed; the same command with --resume measures the rest:", *failures]))


if __name__ == "__main__":
    main()
