"""Draws images per second against the number of workers, one line per arm.

python -m plots.worker_scaling RESULTS OUT_STEM

Each row's workload contains the number of workers: `train 224; batch=64; workers=2`.
"""

from __future__ import annotations

import sys
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from . import style

__all__ = ["draw"]

Series = dict[int, style.Result]


def draw(results_path: Path, out_stem: Path) -> list[Path]:
    """Draw results.csv as OUT_STEM.svg and OUT_STEM.png. Returns their paths."""
    results = style.read_results(results_path, metric="images_per_s")
    workload, series = _series(results_path, results)
    arms = style.arms_of(results)
    with style.figure_style():
        figure = Figure(figsize=(9, 5.2))
        axes = figure.subplots()
        figure.subplots_adjust(
            left=0.09, right=1 - (style.text_width(_labels(arms, series)) + 0.45) / 9, top=0.8, bottom=0.21
        )
        for name, arm in arms.items():
            points = series[name]
            counts = sorted(points)
            rates = [points[count].value for count in counts]
            lows, highs = ([getattr(points[count], side) for count in counts] for side in ("low", "high"))
            axes.fill_between(counts, lows, highs, color=arm.color, alpha=0.16, linewidth=0)
            axes.plot(counts, rates, color=arm.color, marker=arm.marker, markeredgecolor="white", zorder=3)
        _limits(axes, results, series)
        _ideal(axes, series)
        _end_labels(axes, arms, series)
        style.title(figure, "Images per second by number of workers", workload)
        style.footer(figure, results)
        return style.save(figure, out_stem)


def _series(path: Path, results: list[style.Result]) -> tuple[str, dict[str, Series]]:
    """The workload that all rows share, and for each arm its rows by number of workers."""
    series: dict[str, Series] = {}
    workloads: dict[str, None] = {}
    for result in results:
        text, settings = style.split_workload(result.workload)
        workers = settings.pop("workers", "")
        if not workers.isdecimal():
            raise ValueError(f"{path} workload must end in `; workers=N`, got {result.workload!r}")
        workloads["; ".join([text, *(f"{key}={value}" for key, value in settings.items())])] = None
        if series.setdefault(result.arm, {}).setdefault(int(workers), result) is not result:
            raise ValueError(f"{path} must have one row for {result.arm!r} with {workers} workers, got several")
    if len(workloads) > 1:
        raise ValueError(f"{path} must hold one workload besides `workers`, got {', '.join(map(repr, workloads))}")
    return next(iter(workloads)).strip("; "), series


def _limits(axes: Axes, results: list[style.Result], series: dict[str, Series]) -> None:
    counts = sorted({count for points in series.values() for count in points})
    axes.set_xticks(counts)
    margin = 0.03 * (counts[-1] - counts[0]) or 0.5
    axes.set_xlim(counts[0] - margin, counts[-1] + margin)
    axes.set_ylim(0, 1.12 * max(result.high for result in results))
    axes.set_xlabel("workers")
    style.count_axis(axes, "y")


def _ideal(axes: Axes, series: dict[str, Series]) -> None:
    """Draw a dotted line: the rate of the fastest arm at its fewest workers, scaled in proportion to the workers."""
    fewest = min(count for points in series.values() for count in points)
    rate = max(points[fewest].value for points in series.values() if fewest in points) / fewest
    most, top = max(max(points) for points in series.values()), axes.get_ylim()[1]
    end = min(most, top / rate)
    if end <= fewest:
        return
    axes.plot([fewest, end], [rate * fewest, rate * end], ":", color=style.GRAY, linewidth=1.8, zorder=2)
    axes.annotate(
        "ideal scaling",
        xy=(end, rate * end),
        xytext=(6, -2) if end < most else (-12, 6),
        textcoords="offset points",
        ha="left" if end < most else "right",
        va="top" if end < most else "bottom",
        color=style.GRAY,
        fontsize=11.5,
    )


def _labels(arms: dict[str, style.Arm], series: dict[str, Series]) -> list[str]:
    """For each arm a label with its name and last value."""
    return [f"{arm.label}  {series[name][max(series[name])].value:,.0f}" for name, arm in arms.items()]


def _end_labels(axes: Axes, arms: dict[str, style.Arm], series: dict[str, Series]) -> None:
    """Draw each arm's label in its colour, to the right of its line's end."""
    most = max(max(points) for points in series.values())
    ends = [max(series[name]) for name in arms]
    rates = [series[name][end].value for name, end in zip(arms, ends, strict=True)]
    places = style.spread_apart(rates, gap=0.07 * axes.get_ylim()[1], lowest=0)
    for arm, text, end, rate, place in zip(arms.values(), _labels(arms, series), ends, rates, places, strict=True):
        axes.annotate(
            text,
            xy=(end, rate),
            xytext=(14, place if end == most else rate),
            textcoords=("offset points", "data"),
            color=arm.color,
            fontweight="bold",
            va="center",
            annotation_clip=False,
        )


if __name__ == "__main__":
    style.main(draw, "plots.worker_scaling", sys.argv[1:])
