"""Compares settings of gpuflow's loader in turns: `python experiments/real_data/compare.py FOLDER a b:run.prefetch=1`.

A setting is a name, or a name and what differs from photos.yaml and from gpuflow's own values, separated by commas:
a key of the YAML file (`run.prefetch=1`), an environment variable (`CUDA_DEVICE_MAX_CONNECTIONS=32`), or a constant of
one of gpuflow's modules (`gpuflow.execute.gpu.runner.LONG_WAIT=-1.0`), which the loader's worker processes do not see.
Each setting is measured in its own process, or in several with --processes: two processes of one setting may differ by
several hundredths. Only one process measures at a time; the others wait with their batches loaded.
"""

from __future__ import annotations

import argparse
import itertools
import re
import statistics
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import run

_VARIABLE = re.compile(r"[A-Z][A-Z0-9_]*\Z")
_CONSTANT = re.compile(r"gpuflow(\.\w+)+\Z")


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting by its name: keys of the YAML file as KEY=VALUE, constants and environment variables by name."""

    name: str
    keys: list[str] = field(default_factory=list)
    constants: dict[str, str] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)


def setting_of(text: str) -> Setting:
    """Read a setting, see this module's docstring. Raises SystemExit with the reason."""
    name, _, rest = text.partition(":")
    setting = Setting(name)
    for part in filter(None, rest.split(",")):
        key, equals, value = part.partition("=")
        if not equals:
            raise SystemExit(f"{text}: {part!r} must be KEY=VALUE")
        if _VARIABLE.match(key):
            setting.environment[key] = value
        elif _CONSTANT.match(key):
            setting.constants[key] = value
        else:
            setting.keys.append(part)
    return setting


Measured = dict[tuple[str, str], list[run.Record]]
"""What each process measured, by its name and the workload, in order."""


def process_name(setting: str, number: int) -> str:
    """The name of a setting's process, the first one's is the setting's own."""
    return setting if number == 0 else f"{setting}/{number + 1}"


def summary(measured: Measured, workloads: Iterable[str], settings: Iterable[str], processes: int) -> Iterator[str]:
    """For each workload and setting the median and all values: of the part of the training's speed, or images/s. The
    values of a process stand together; of several processes it is the median of their medians."""
    for workload, setting in itertools.product(workloads, settings):
        names = [process_name(setting, number) for number in range(processes)]
        each = [metrics for name in names if (metrics := measured.get((name, workload)))]
        if not each:
            continue
        metric = "step_ratio" if "step_ratio" in each[0][0] else "images_per_s"
        values = [[one[metric] for one in metrics] for metrics in each]
        digits = 3 if metric == "step_ratio" else 0
        listed = "; ".join(", ".join(f"{value:,.{digits}f}" for value in own) for own in values)
        median = statistics.median(map(statistics.median, values))
        memory = f"  {each[-1][-1]['gpu_mem_mb']:,.0f} MB" if each[-1][-1].get("gpu_mem_mb") else ""
        yield f"{workload:18} {setting:15} {median:>10,.{digits}f}  ({listed}){memory}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="photographs, in a folder for each class")
    parser.add_argument("settings", nargs="+", type=setting_of, metavar="NAME[:KEY=VALUE,...]")
    parser.add_argument("--workloads", nargs="+", choices=run.WORKLOADS, default=["resnet18", "alone"])
    parser.add_argument("--repeats", type=int, default=5, help="of each process (default: %(default)s)")
    parser.add_argument("--processes", type=int, default=1, help="of each setting (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=0.8, help="of each measurement (default: %(default)s)")
    parser.add_argument("--warm-up", type=float, default=0.5, help="seconds before a workload (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options = parser.parse_args(arguments)
    names = [setting.name for setting in options.settings]
    if len(set(names)) < len(names):
        raise SystemExit(f"the settings' names must differ, got {', '.join(names)}")
    measured: Measured = {}

    def record(arm: run.Arm, workload: str, repeat: int, metrics: dict[str, float]) -> None:
        measured.setdefault((arm.name, workload), []).append(metrics)
        print(f"{workload:18} {arm.name:15} {run.brief(metrics)}", flush=True)

    common = {name: getattr(options, name) for name in ("device", "batch", "seconds", "warm_up")}
    common |= {"folder": str(options.folder.resolve()), "arm": "gpuflow", "first_epoch": False}
    processes, opened, failures = list[run.ArmProcess](), list[run.Arm](), list[str]()
    try:
        for number, setting in itertools.product(range(options.processes), options.settings):
            job = {**common, "set": setting.keys, "constants": setting.constants}
            name = process_name(setting.name, number)
            processes.append(run.ArmProcess(job, name=name, environment=setting.environment))
        for process in processes:
            try:
                process.open()
                opened.append(process)
            except run.ArmFailed as error:
                failures.append(f"{process.name}: {error}")
        all_names = [process.name for process in processes]
        missing = set(itertools.product(all_names, options.workloads, range(options.repeats)))
        failures += run.take_turns(opened, options.workloads, options.repeats, missing, record)
    finally:
        for process in processes:
            process.close()
    print(*summary(measured, options.workloads, names, options.processes), sep="\n", flush=True)
    if failures:
        sys.exit("\n".join(["Failed:", *failures]))


if __name__ == "__main__":
    main()
