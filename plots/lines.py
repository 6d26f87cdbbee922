"""Draws rates against a number of workers or clients, one line for each arm: two figures.

python -m plots.lines FIGURE RESULTS OUT_STEM

worker_scaling   images per second against workers, a panel for each workload; rows end in `; workers=2`
load_test        requests per second and latency against clients, two panels each; rows end in `; clients=10`
"""

from __future__ import annotations

import math
import re
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

from . import style

Series = dict[str, dict[int, style.Result]]
"""For each arm its rows by number of workers or clients."""


def _panels(path: Path, results: list[style.Result], setting: str) -> dict[str, Series]:
    """Return the lines of each workload, whose number has the name `setting`."""
    return style.table(path, results, lambda result: style.keys_of(path, result, setting))


def _points(series: Series) -> list[style.Result]:
    return [point for points in series.values() for point in points.values()]


# --- images per second by number of workers ---------------------------------------------------------------------------

_TITLES = {
    "decode": "decode and resize",
    "batch": "decode, resize, batch",
    "normalize": "decode, resize, batch, normalize",
    "transfer": "decode, resize, batch, normalize, transfer",
}
"""Titles of the workloads of `gpuflow bench`, each of which adds a step to the one before."""
_IDEAL = "ideal: gpuflow, 1 worker x N"


def worker_scaling(results_path: Path, out_stem: Path) -> list[Path]:
    """Draw rates by number of workers as OUT_STEM.svg and OUT_STEM.png, and return their paths."""
    results = style.read_results(results_path, metric="images_per_s")
    panels = _panels(results_path, results, "workers")
    _check_machines(results_path, panels)
    arms = style.arms_of(results)
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    panel, left, top, between, footer = 3.4, 1.1, 1.35, 0.95, 0.65  # inches
    width = 11.0 if columns > 1 else 8.2
    labels = {name: arm.label for name, arm in arms.items()}
    for series in panels.values() if len(panels) == 1 else ():
        labels = {name: f"{label}  {series[name][max(series[name])].value:,.0f}" for name, label in labels.items()}
    labels[_IDEAL] = _IDEAL
    in_line = max(1, int(width / (0.8 * style.text_width(labels.values()) + 0.8)))
    bottom = 0.65 + footer + 0.29 * -(-len(labels) // in_line)
    height = top + rows * panel + (rows - 1) * between + bottom
    counts = sorted({count for series in panels.values() for points in series.values() for count in points})
    with style.new_figure(width, height) as figure:
        grid = figure.subplots(rows, columns, squeeze=False).ravel()
        wspace = left * columns / (width - 0.2 - left * columns)
        style.margins(figure, left=left, right=0.2, top=top, bottom=bottom, wspace=wspace, hspace=between / panel)
        lines: dict[str, Any] = {}
        for axes, (workload, series) in zip(grid, panels.items(), strict=False):
            lines |= _scaling(axes, {name: arm for name, arm in arms.items() if name in series}, series, counts)
            kind, colon, rest = workload.partition(":")
            text = textwrap.fill(f"{_TITLES.get(kind, kind)}{colon}{rest}", 50)
            axes.set_title(text)
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
            bbox_to_anchor=(0.01, footer / height),
            ncols=in_line,
        )
        note = "medians; the bars end at the lowest and highest value; both axes are logarithmic"
        return style.finish(figure, out_stem, results, "Images per second by number of workers", note)


def _check_machines(path: Path, panels: dict[str, Series]) -> None:
    """Raise ValueError if the rows of a workload are of several machines."""
    for workload, series in panels.items():
        names = dict.fromkeys(name for point in _points(series) for name in point.machine.split(" / "))
        if len(names) > 1:
            several = " and ".join(names)
            raise ValueError(f"{path} must have {workload!r} of one machine, got {several}; measure all of it on one")


def _scaling(axes: Axes, arms: dict[str, style.Arm], series: Series, counts: list[int]) -> dict[str, Any]:
    """Draw one workload: its arms' medians with their spread, and the ideal line. Return what the legend shows."""
    lines: dict[str, Any] = {}
    for name, arm in arms.items():
        points = [series[name][count] for count in sorted(series[name])]
        bars = axes.errorbar(
            sorted(series[name]),
            [point.value for point in points],
            yerr=style.ranges(points),
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
    rows = _points(series)
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


# --- requests per second and latency by number of clients -------------------------------------------------------------

_HOW = "each client asks again when it has its answer; TP99: 99% of the answers took no longer; shaded: all repeats"
_METRICS = {"tp50_ms": "TP50", "tp99_ms": "TP99"}
_TICKS = [digit * 10.0**power for power in range(-2, 6) for digit in (1, 2, 5)]

Ends = list[tuple[style.Arm, str, float]]
"""For each line its arm, the label at its end, and its last value."""


def load_test(results_path: Path, out_stem: Path) -> list[Path]:
    """Draw rates and latencies by number of clients as OUT_STEM.svg and OUT_STEM.png, and return their paths."""
    rates = style.read_results(results_path, metric="qps")
    arms = style.arms_of(rates)
    throughput = _panels(results_path, rates, "clients")
    times = {name: style.read_results(results_path, metric=metric) for metric, name in _METRICS.items()}
    latencies = {name: _panels(results_path, results, "clients") for name, results in times.items()}
    width, panel, left, gap, top, bottom = 13.0, 2.9, 0.85, 0.95, 1.65, 1.35  # inches
    rows = len(throughput)
    height = top + bottom + rows * panel + (rows - 1) * gap
    with style.new_figure(width, height) as figure:
        grid = figure.subplots(rows, 2, squeeze=False)
        names = style.text_width(f"{arms[result.arm].label}  {result.value:,.0f}" for result in rates)
        numbers = style.text_width(f"TP99  {result.value:,.0f}" for results in times.values() for result in results)
        wspace = (names + left) / ((width - 2 * left - names - numbers - 0.2) / 2)
        right = numbers + 0.2
        style.margins(figure, left=left, right=right, top=top, bottom=bottom, wspace=wspace, hspace=gap / panel)
        for (rate, latency), (workload, series) in zip(grid, throughput.items(), strict=True):
            _rates(rate, arms, series)
            _latencies(latency, arms, {name: panels.get(workload, {}) for name, panels in latencies.items()})
            counts = sorted({count for points in series.values() for count in points})
            margin = 0.03 * (counts[-1] - counts[0]) or 0.5
            for axes in (rate, latency):
                axes.set_xlim(counts[0] - margin, counts[-1] + margin)
                axes.set_xticks(counts)
            rate.set_title(workload, pad=9)
        for axes, name in zip(grid[0], ("requests per second", "latency in milliseconds"), strict=True):
            figure.text(axes.get_position().x0, 1 - 1.1 / height, name, fontweight="bold", va="center")
        for axes in grid[-1]:
            axes.set_xlabel("clients")
        return style.finish(figure, out_stem, rates, "Throughput and latency by number of clients", _HOW)


def _lines(axes: Axes, arms: dict[str, style.Arm], series: Series, how: str = "-") -> Ends:
    """Draw the lines with their spread over the repeats. Return their ends, without labels."""
    ends = []
    for name, arm in arms.items():
        if (points := series.get(name)) is not None:
            counts = sorted(points)
            lows, values, highs = ([getattr(points[n], side) for n in counts] for side in ("low", "value", "high"))
            axes.fill_between(counts, lows, highs, color=arm.color, alpha=0.14, linewidth=0)
            axes.plot(counts, values, how, color=arm.color, marker=arm.marker, markeredgecolor="white", zorder=3)
            ends.append((arm, arm.label, values[-1]))
    return ends


def _rates(axes: Axes, arms: dict[str, style.Arm], series: Series) -> None:
    ends = [(arm, f"{label}  {value:,.0f}", value) for arm, label, value in _lines(axes, arms, series)]
    axes.set_ylim(0, 1.1 * max(point.high for point in _points(series)) or 1)
    style.count_axis(axes, "y")
    top = axes.get_ylim()[1]
    _label(axes, ends, [value / top for *_, value in ends])


def _latencies(axes: Axes, arms: dict[str, style.Arm], metrics: dict[str, Series]) -> None:
    """Draw on a logarithmic scale, because the arms differ widely."""
    ends = [
        (arm, f"{label}  {_milliseconds(value)}", value)
        for label, series in metrics.items()
        for arm, _, value in _lines(axes, arms, series, "--" if label == "TP99" else "-")
    ]
    values = [value for series in metrics.values() for point in _points(series) for value in (point.low, point.high)]
    least = max((tick for tick in _TICKS if tick <= min(values)), default=_TICKS[0])
    most = min((tick for tick in _TICKS if tick > max(values)), default=_TICKS[-1])
    axes.set_yscale("log")
    axes.set_ylim(least, most)
    axes.yaxis.set_major_locator(FixedLocator([tick for tick in _TICKS if least <= tick <= most]))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _milliseconds(value)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.grid(True)
    _label(axes, ends, [math.log(value / least) / math.log(most / least) for *_, value in ends])


def _label(axes: Axes, ends: Ends, places: list[float]) -> None:
    """Label each line at its end, to the right of the panel; places are fractions of its height, moved apart here."""
    for (arm, text, _), place in zip(ends, style.spread_apart(places, gap=0.085, lowest=0), strict=True):
        how: Any = {"color": arm.color, "fontweight": "bold", "fontsize": 12, "va": "center"}
        axes.annotate(text, (1, place), (8, 0), "axes fraction", "offset points", **how)


def _milliseconds(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


if __name__ == "__main__":
    style.main("plots.lines", worker_scaling, load_test)
