"""Draws images per second against the number of workers, one line per arm, one panel per workload.

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

_WIDTH, _TOP, _BOTTOM, _BETWEEN = 9, 1.05, 1.15, 0.5
_PANEL, _LABEL = 3.1, 0.22
"""Inches: the figure's width, its margins, the space between panels, a panel's least height, and that of a label."""


def draw(results_path: Path, out_stem: Path) -> list[Path]:
    """Draw results.csv as OUT_STEM.svg and OUT_STEM.png. Returns their paths."""
    results = style.read_results(results_path, metric="images_per_s")
    panels = _panels(results_path, results)
    arms = style.arms_of(results)
    panel_height = max(_PANEL, _LABEL * max(len(series) for series in panels.values()))
    top = _TOP + (0.2 if len(panels) > 1 else 0)
    height = top + _BOTTOM + panel_height * len(panels) + _BETWEEN * (len(panels) - 1)
    with style.figure_style():
        figure = Figure(figsize=(_WIDTH, height))
        axes_column = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
        labels = [text for series in panels.values() for text in _labels(arms, series)]
        figure.subplots_adjust(
            left=0.09,
            right=1 - (style.text_width(labels) + 0.45) / _WIDTH,
            top=1 - top / height,
            bottom=_BOTTOM / height,
            hspace=_BETWEEN / panel_height,
        )
        counts = sorted({count for series in panels.values() for points in series.values() for count in points})
        for axes, (workload, series) in zip(axes_column, panels.items(), strict=True):
            _panel(axes, {name: arm for name, arm in arms.items() if name in series}, series, counts, panel_height)
            if len(panels) > 1:
                axes.set_title(workload, loc="left", fontsize=12, color=style.GRAY, pad=6)
        axes_column[-1].set_xlabel("workers (threads or processes)")
        subtitle = next(iter(panels)) if len(panels) == 1 else "medians; the bars end at the lowest and highest value"
        style.title(figure, "Images per second by number of workers", subtitle)
        style.footer(figure, results)
        return style.save(figure, out_stem)


def _panels(path: Path, results: list[style.Result]) -> dict[str, dict[str, Series]]:
    """For each workload and each of its arms the rows by number of workers."""
    panels: dict[str, dict[str, Series]] = {}
    for result in results:
        text, settings = style.split_workload(result.workload)
        workers = settings.pop("workers", "")
        if not workers.isdecimal():
            raise ValueError(f"{path} workload must end in `; workers=N`, got {result.workload!r}")
        workload = "; ".join(filter(None, [text, *(f"{key}={value}" for key, value in settings.items())]))
        points = panels.setdefault(workload, {}).setdefault(result.arm, {})
        if points.setdefault(int(workers), result) is not result:
            raise ValueError(f"{path} must have one row for {result.arm!r} with {workers} workers, got several")
    return panels


def _panel(
    axes: Axes, arms: dict[str, style.Arm], series: dict[str, Series], counts: list[int], panel_height: float
) -> None:
    """Draw one workload: its arms' medians with their spread, the ideal line, a label at each line's end.

    panel_height: of the axes, in inches.
    """
    for name, arm in arms.items():
        points = [series[name][count] for count in sorted(series[name])]
        spread = [[point.value - point.low for point in points], [point.high - point.value for point in points]]
        axes.errorbar(
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
    axes.set_xticks(counts)
    margin = 0.03 * (counts[-1] - counts[0]) or 0.5
    axes.set_xlim(counts[0] - margin, counts[-1] + margin)
    axes.set_ylim(0, 1.12 * max(point.high for points in series.values() for point in points.values()))
    style.count_axis(axes, "y")
    _ideal(axes, series)
    _end_labels(axes, arms, series, panel_height)


def _ideal(axes: Axes, series: dict[str, Series]) -> None:
    """Draw a dotted line: the rate of the fastest arm at its fewest workers, scaled in proportion to the workers."""
    fewest = min(count for points in series.values() for count in points)
    rate = max(points[fewest].value for points in series.values() if fewest in points) / fewest
    most, top = max(max(points) for points in series.values()), axes.get_ylim()[1]
    end = min(most, top / rate)
    if end <= fewest:
        return
    axes.plot([fewest, end], [rate * fewest, rate * end], ":", color=style.GRAY, linewidth=1.8, zorder=2)
    has_space = end - fewest < 0.6 * (most - fewest)  # to the right, before the arms' labels begin
    axes.annotate(
        "ideal scaling",
        xy=(end, rate * end),
        xytext=(6 if has_space else -22, -3 if end < most else 6),
        textcoords="offset points",
        ha="left" if has_space else "right",
        va="top" if end < most else "bottom",
        color=style.GRAY,
        fontsize=11.5,
    )


def _labels(arms: dict[str, style.Arm], series: dict[str, Series]) -> list[str]:
    """For each arm a label with its name and last value."""
    return [
        f"{arm.label}  {series[name][max(series[name])].value:,.0f}" for name, arm in arms.items() if name in series
    ]


def _end_labels(axes: Axes, arms: dict[str, style.Arm], series: dict[str, Series], panel_height: float) -> None:
    """Draw each arm's label in its colour, to the right of its line's end."""
    gap = _LABEL / panel_height * axes.get_ylim()[1]
    most = max(max(points) for points in series.values())
    ends = [max(series[name]) for name in arms]
    rates = [series[name][end].value for name, end in zip(arms, ends, strict=True)]
    places = style.spread_apart(rates, gap=gap, lowest=0)
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
