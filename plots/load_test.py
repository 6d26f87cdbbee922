"""Draws requests per second and latency against the number of clients: a line per arm, a row of panels per workload.

python -m plots.load_test RESULTS OUT_STEM

Each row's workload contains the number of clients: `500x375; batch=1; clients=10`.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter, NullLocator

from . import style

Series = dict[str, dict[int, style.Result]]
"""For each arm its rows by number of clients."""

_WIDTH, _LEFT, _PANEL, _GAP, _TOP, _BOTTOM = 13.0, 0.85, 2.9, 0.95, 1.65, 1.35  # inches
_HOW = "each client asks again when it has its answer; TP99: 99% of the answers took no longer; shaded: all repeats"
_METRICS = {"tp50_ms": "TP50", "tp99_ms": "TP99"}
_TICKS = [digit * 10.0**power for power in range(-2, 6) for digit in (1, 2, 5)]


def draw(results_path: Path, out_stem: Path) -> list[Path]:
    """Draw results.csv as OUT_STEM.svg and OUT_STEM.png. Returns their paths."""
    rates = style.read_results(results_path, metric="qps")
    arms = style.arms_of(rates)
    throughput = _panels(results_path, rates)
    found = {name: style.read_results(results_path, metric=metric) for metric, name in _METRICS.items()}
    latencies = {name: _panels(results_path, results) for name, results in found.items()}
    rows = len(throughput)
    height = _TOP + _BOTTOM + rows * _PANEL + (rows - 1) * _GAP
    with style.figure_style():
        figure = Figure(figsize=(_WIDTH, height))
        grid = figure.subplots(rows, 2, squeeze=False)
        names = style.text_width(f"{arms[result.arm].label}  {result.value:,.0f}" for result in rates)
        numbers = style.text_width(f"TP99  {result.value:,.0f}" for results in found.values() for result in results)
        between, width = names + _LEFT, (_WIDTH - 2 * _LEFT - names - numbers - 0.2) / 2
        figure.subplots_adjust(
            left=_LEFT / _WIDTH,
            right=1 - (numbers + 0.2) / _WIDTH,
            top=1 - _TOP / height,
            bottom=_BOTTOM / height,
            wspace=between / width,
            hspace=_GAP / _PANEL,
        )
        for (left, right), (workload, series) in zip(grid, throughput.items(), strict=True):
            _rates(left, arms, series)
            _latencies(right, arms, {name: panels.get(workload, {}) for name, panels in latencies.items()})
            for axes in (left, right):
                _clients(axes, series)
            left.set_title(workload, loc="left", fontsize=12, color=style.GRAY, pad=9)
        for axes, name in zip(grid[0], ("requests per second", "latency in milliseconds"), strict=True):
            x = axes.get_position().x0
            figure.text(x, 1 - 1.1 / height, name, fontweight="bold", va="center")
        for axes in grid[-1]:
            axes.set_xlabel("clients")
        style.title(figure, "Throughput and latency by number of clients", _HOW)
        style.footer(figure, rates)
        return style.save(figure, out_stem)


def _panels(path: Path, results: list[style.Result]) -> dict[str, Series]:
    """For each workload, without the number of clients, its lines."""
    panels: dict[str, Series] = {}
    for result in results:
        text, settings = style.split_workload(result.workload)
        clients = settings.pop("clients", "")
        if not clients.isdecimal():
            raise ValueError(f"{path} workload must end in `; clients=N`, got {result.workload!r}")
        workload = "; ".join(filter(None, [text, *(f"{key}={value}" for key, value in settings.items())]))
        line = panels.setdefault(workload, {}).setdefault(result.arm, {})
        if line.setdefault(int(clients), result) is not result:
            raise ValueError(f"{path} must have one row for {result.arm!r} in {result.workload!r}, got several")
    return panels


def _line(axes: Axes, arm: style.Arm, points: dict[int, style.Result], dashed: bool = False) -> None:
    """Draw the values with their spread over the repeats."""
    counts = sorted(points)
    lows, values, highs = ([getattr(points[n], side) for n in counts] for side in ("low", "value", "high"))
    axes.fill_between(counts, lows, highs, color=arm.color, alpha=0.14, linewidth=0)
    how = "--" if dashed else "-"
    axes.plot(counts, values, how, color=arm.color, marker=arm.marker, markeredgecolor="white", zorder=3)


def _rates(axes: Axes, arms: dict[str, style.Arm], series: Series) -> None:
    ends = []
    for name, arm in arms.items():
        if name in series:
            _line(axes, arm, series[name])
            last = series[name][max(series[name])]
            ends.append((arm, f"{arm.label}  {last.value:,.0f}", last.value))
    axes.set_ylim(0, 1.1 * max(point.high for points in series.values() for point in points.values()) or 1)
    style.count_axis(axes, "y")
    top = axes.get_ylim()[1]
    places = style.spread_apart([value / top for *_, value in ends], gap=0.085, lowest=0)
    _label(axes, ends, places)


def _latencies(axes: Axes, arms: dict[str, style.Arm], metrics: dict[str, Series]) -> None:
    """Draw on a logarithmic scale, because the arms differ widely."""
    ends = []
    for label, series in metrics.items():
        for name, arm in arms.items():
            if name in series:
                _line(axes, arm, series[name], dashed=label == "TP99")
                last = series[name][max(series[name])]
                ends.append((arm, f"{label}  {_milliseconds(last.value)}", last.value))
    values = [
        value
        for series in metrics.values()
        for points in series.values()
        for p in points.values()
        for value in (p.low, p.high)
    ]
    least = max((tick for tick in _TICKS if tick <= min(values)), default=_TICKS[0])
    most = min((tick for tick in _TICKS if tick > max(values)), default=_TICKS[-1])
    axes.set_yscale("log")
    axes.set_ylim(least, most)
    axes.yaxis.set_major_locator(FixedLocator([tick for tick in _TICKS if least <= tick <= most]))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _milliseconds(value)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.grid(True)
    heights = [math.log(value / least) / math.log(most / least) for *_, value in ends]
    _label(axes, ends, style.spread_apart(heights, gap=0.085, lowest=0))


def _label(axes: Axes, ends: list[tuple[style.Arm, str, float]], places: list[float]) -> None:
    """Label each line at its end, to the right of the panel; positions are fractions of its height."""
    for (arm, text, _), place in zip(ends, places, strict=True):
        axes.annotate(
            text,
            xy=(1, place),
            xycoords="axes fraction",
            xytext=(8, 0),
            textcoords="offset points",
            color=arm.color,
            fontweight="bold",
            fontsize=12,
            va="center",
            annotation_clip=False,
        )


def _milliseconds(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def _clients(axes: Axes, series: Series) -> None:
    counts = sorted({count for points in series.values() for count in points})
    margin = 0.03 * (counts[-1] - counts[0]) or 0.5
    axes.set_xlim(counts[0] - margin, counts[-1] + margin)
    axes.set_xticks(counts)


if __name__ == "__main__":
    style.main(draw, "plots.load_test", sys.argv[1:])
