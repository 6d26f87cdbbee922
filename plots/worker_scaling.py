"""Draws images per second against the number of workers, one line per arm, one panel per workload.

python -m plots.worker_scaling RESULTS OUT_STEM

Each row's workload contains the number of workers: `decode: photos; workers=2`.
"""

from __future__ import annotations

import re
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from . import style

Series = dict[int, style.Result]

_TITLES = {
    "decode": "decode and resize",
    "batch": "decode, resize, batch",
    "normalize": "decode, resize, batch, normalize",
    "transfer": "decode, resize, batch, normalize, transfer",
}
"""Titles of the workloads of `gpuflow bench`, each of which adds a step to the one before."""
_IDEAL = "ideal: gpuflow, 1 worker x N"
_PANELS, _PANEL, _HEIGHT = 11.0, 8.2, 3.4
"""Inches: the figure's width with two columns of panels and with one panel, and a panel's height."""
_LEFT, _TOP, _BETWEEN, _BELOW, _FOOTER, _LEGEND = 1.1, 1.35, 0.95, 0.65, 0.65, 0.29
"""Inches: the space left of a panel, above and between the panels, below them, for the footer and a line of the
legend."""


def draw(results_path: Path, out_stem: Path) -> list[Path]:
    """Draw results.csv as OUT_STEM.svg and OUT_STEM.png. Returns their paths."""
    results = style.read_results(results_path, metric="images_per_s")
    panels = _panels(results_path, results)
    arms = style.arms_of(results)
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    width = _PANELS if columns > 1 else _PANEL
    labels = {name: arm.label for name, arm in arms.items()}
    for series in panels.values() if len(panels) == 1 else ():
        labels = {name: f"{label}  {series[name][max(series[name])].value:,.0f}" for name, label in labels.items()}
    labels[_IDEAL] = _IDEAL
    in_line = max(1, int(width / (0.8 * style.text_width(labels.values()) + 0.8)))
    bottom = _BELOW + _FOOTER + _LEGEND * -(-len(labels) // in_line)
    height = _TOP + rows * _HEIGHT + (rows - 1) * _BETWEEN + bottom
    counts = sorted({count for series in panels.values() for points in series.values() for count in points})
    with style.figure_style():
        figure = Figure(figsize=(width, height))
        grid = figure.subplots(rows, columns, squeeze=False).ravel()
        figure.subplots_adjust(
            left=_LEFT / width,
            right=1 - 0.2 / width,
            top=1 - _TOP / height,
            bottom=bottom / height,
            wspace=_LEFT * columns / (width - 0.2 - _LEFT * columns),
            hspace=_BETWEEN / _HEIGHT,
        )
        lines: dict[str, Any] = {}
        for axes, (workload, series) in zip(grid, panels.items(), strict=False):
            lines |= _panel(axes, {name: arm for name, arm in arms.items() if name in series}, series, counts)
            kind, colon, rest = workload.partition(":")
            text = textwrap.fill(f"{_TITLES.get(kind, kind)}{colon}{rest}", 50)
            axes.set_title(text, loc="left", fontsize=12, color=style.GRAY, pad=6)
        for axes in grid[len(panels) :]:
            axes.remove()
        for axes in grid[max(0, len(panels) - columns) : len(panels)]:
            axes.set_xlabel("workers (threads or processes)")
        for axes in grid[: len(panels) : columns]:
            axes.set_ylabel("images/s")
        shown = [name for name in labels if name in lines]
        figure.legend(
            [lines[name] for name in shown],
            [labels[name] for name in shown],
            loc="lower left",
            bbox_to_anchor=(0.01, _FOOTER / height),
            ncols=in_line,
            frameon=False,
            fontsize=12,
        )
        note = "medians; the bars end at the lowest and highest value; both axes are logarithmic"
        style.title(figure, "Images per second by number of workers", note)
        style.footer(figure, results)
        return style.save(figure, out_stem)


def _panels(path: Path, results: list[style.Result]) -> dict[str, dict[str, Series]]:
    """For each workload and each of its arms the rows by number of workers.

    Raises:
        ValueError: a row has no number of workers, two rows are of the same measurement, or the rows of a workload are
            of several machines.
    """
    panels: dict[str, dict[str, Series]] = {}
    machines: dict[str, dict[str, None]] = {}
    for result in results:
        text, settings = style.split_workload(result.workload)
        workers = settings.pop("workers", "")
        if not workers.isdecimal():
            raise ValueError(f"{path} workload must end in `; workers=N`, got {result.workload!r}")
        workload = "; ".join(filter(None, [text, *(f"{key}={value}" for key, value in settings.items())]))
        points = panels.setdefault(workload, {}).setdefault(result.arm, {})
        if points.setdefault(int(workers), result) is not result:
            raise ValueError(f"{path} must have one row for {result.arm!r} with {workers} workers, got several")
        machines.setdefault(workload, {}).update(dict.fromkeys(result.machine.split(" / ")))
    for workload, names in machines.items():
        if len(names) > 1:
            several = " and ".join(names)
            raise ValueError(f"{path} must have {workload!r} of one machine, got {several}; measure all of it on one")
    return panels


def _panel(axes: Axes, arms: dict[str, style.Arm], series: dict[str, Series], counts: list[int]) -> dict[str, Any]:
    """Draw one workload: its arms' medians with their spread, and the ideal line. Returns what the legend shows."""
    lines: dict[str, Any] = {}
    for name, arm in arms.items():
        points = [series[name][count] for count in sorted(series[name])]
        spread = [[point.value - point.low for point in points], [point.high - point.value for point in points]]
        bars = axes.errorbar(
            sorted(series[name]),
            [point.value for point in points],
            yerr=spread,
            color=arm.color,
            marker=arm.marker,
            markeredgecolor="white",
            elinewidth=1.3,
            capsize=4,
            zorder=3,
        )
        lines[name] = bars.lines[0]
    powers = [2**i for i in range(counts[-1].bit_length()) if counts[0] <= 2**i]
    axes.set_xscale("log", base=2)
    axes.set_xlim(counts[0] / 1.12, counts[-1] * 1.12)
    axes.set_xticks(powers or counts, [str(count) for count in powers or counts])
    rows = [point for points in series.values() for point in points.values()]
    axes.set_yscale("log")
    axes.set_ylim(0.7 * min(row.low for row in rows if row.low > 0), 1.4 * max(row.high for row in rows))
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.grid(visible=True, axis="y")
    if (one := series.get("gpuflow", {}).get(1)) is not None:
        cores = re.match(r"(\d+) cores", one.machine)
        scaled = np.geomspace(1, min(counts[-1], int(cores[1])) if cores else counts[-1], 100)
        [lines[_IDEAL]] = axes.plot(scaled, one.value * scaled, "--", color=style.GRAY, linewidth=1.6, zorder=2)
    return lines


if __name__ == "__main__":
    style.main(draw, "plots.worker_scaling", sys.argv[1:])
