"""Compares settings of gpuflow's loader in turns: `python experiments/real_data/compare.py FOLDER a b:run.prefetch=1`.

A setting is a name, or a name and what differs from photos.yaml and from gpuflow's own values, separated by commas:
a key of the YAML file (`run.prefetch=1`), an environment variable (`CUDA_DEVICE_MAX_CONNECTIONS=32`), or a constant of
one of gpuflow's modules (`gpuflow.execute.gpu._LONG_WAIT=-1.0`), which the loader's worker processes do not see. Each
setting is measured in its own process. Only one process measures at a time; the others wait with their batches loaded.
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


def summary(measured: dict[tuple[str, str], list[run.Record]], workloads: Iterable[str]) -> Iterator[str]:
    """For each workload and setting the median and all values: of the part of the training's speed, or images/s."""
    for workload in workloads:
        for (name, other), metrics in measured.items():
            if other != workload:
                continue
            metric = "step_ratio" if "step_ratio" in metrics[0] else "images_per_s"
            values = [one[metric] for one in metrics]
            digits = 3 if metric == "step_ratio" else 0
            listed = ", ".join(f"{value:,.{digits}f}" for value in values)
            memory = f"  {metrics[-1]['gpu_mem_mb']:,.0f} MB" if metrics[-1].get("gpu_mem_mb") else ""
            yield f"{workload:18} {name:15} {statistics.median(values):>10,.{digits}f}  ({listed}){memory}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="photographs, in a folder for each class")
    parser.add_argument("settings", nargs="+", type=setting_of, metavar="NAME[:KEY=VALUE,...]")
    parser.add_argument("--workloads", nargs="+", choices=run.WORKLOADS, default=["resnet18", "alone"])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.8, help="of each measurement (default: %(default)s)")
    parser.add_argument("--warm-up", type=float, default=0.5, help="seconds before a workload (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options = parser.parse_args(arguments)
    names = [setting.name for setting in options.settings]
    if len(set(names)) < len(names):
        raise SystemExit(f"the settings' names must differ, got {', '.join(names)}")
    measured: dict[tuple[str, str], list[run.Record]] = {}

    def record(arm: run.Arm, workload: str, repeat: int, metrics: dict[str, float]) -> None:
        measured.setdefault((arm.name, workload), []).append(metrics)
        print(f"{workload:18} {arm.name:15} {run.brief(metrics)}", flush=True)

    common = {name: getattr(options, name) for name in ("device", "batch", "seconds", "warm_up")}
    common |= {"folder": str(options.folder.resolve()), "arm": "gpuflow", "first_epoch": False}
    processes, opened, failures = list[run.ArmProcess](), list[run.Arm](), list[str]()
    try:
        for setting in options.settings:
            job = {**common, "set": setting.keys, "constants": setting.constants}
            processes.append(run.ArmProcess(job, name=setting.name, environment=setting.environment))
        for process in processes:
            try:
                process.open()
                opened.append(process)
            except run.ArmFailed as error:
                failures.append(f"{process.name}: {error}")
        missing = set(itertools.product(names, options.workloads, range(options.repeats)))
        failures += run.take_turns(opened, options.workloads, options.repeats, missing, record)
    finally:
        for process in processes:
            process.close()
    print(*summary(measured, options.workloads), sep="\n", flush=True)
    if failures:
        sys.exit("\n".join(["Failed:", *failures]))


if __name__ == "__main__":
    main()
