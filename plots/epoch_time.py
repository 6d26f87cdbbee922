"""Draws the time of whole trainings as a share of DataLoader's: a bar per arm, a panel per workload.

python -m plots.epoch_time RESULTS OUT_STEM

The dashed line is the figure that the guide to DALI publishes, of other hardware.
"""

from __future__ import annotations

import sys
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from . import style

_WIDTH, _LEFT, _RIGHT, _TOP, _BOTTOM, _BAR, _BETWEEN = 11, 2.2, 3.4, 1.05, 1.1, 0.42, 0.65  # inches
_PUBLISHED = 0.8
_HOW = "first epoch included; medians and all repeats; dashed: 80%, published by the guide to DALI, other hardware"


def draw(results_path: Path, out_stem: Path) -> list[Path]:
    """Draw results.csv as OUT_STEM.svg and OUT_STEM.png. Returns their paths."""
    shares = style.read_results(results_path, metric="time_share")
    seconds, accuracy = (
        {(one.arm, one.workload): one.value for one in style.read_results(results_path, metric=metric)}
        for metric in ("run_s", "accuracy")
    )
    arms = style.arms_of(shares)
    panels: dict[str, dict[str, style.Result]] = {}
    for result in shares:
        panels.setdefault(result.workload, {})[result.arm] = result
    counts = [len(panel) for panel in panels.values()]
    height = _TOP + _BOTTOM + _BAR * sum(counts) + _BETWEEN * (len(panels) - 1)
    with style.figure_style():
        figure = Figure(figsize=(_WIDTH, height))
        top = height - _TOP
        for (workload, panel), count in zip(panels.items(), counts, strict=True):
            bottom = top - _BAR * count
            box = (_LEFT / _WIDTH, bottom / height, 1 - (_LEFT + _RIGHT) / _WIDTH, _BAR * count / height)
            axes, top = figure.add_axes(box), bottom - _BETWEEN
            names = [name for name in arms if name in panel]
            for place, name in enumerate(names):
                one, key = panel[name], (name, workload)
                spread = [[one.value - one.low], [one.high - one.value]]
                axes.barh(place, one.value, 0.66, xerr=spread, capsize=4, color=arms[name].color, ecolor=style.INK)
                text = f"{one.value:.0%}   {seconds[key]:,.1f} s   accuracy {accuracy[key]:.1%}"
                axes.annotate(text, (1, place), (8, 0), ("axes fraction", "data"), "offset points", va="center")
            axes.axvline(_PUBLISHED, color=style.GRAY, linestyle="--", linewidth=1.6)
            axes.set_yticks(range(count), [arms[name].label for name in names])
            axes.set_ylim(count - 0.5, -0.5)
            axes.set_xlim(0, 1.05 * max(one.high for one in panel.values()))
            axes.xaxis.set_major_formatter(PercentFormatter(1))
            axes.set_title(workload, loc="left", fontsize=12, color=style.GRAY, pad=6)
        style.title(figure, "Time of a whole training, as a share of DataLoader's with PIL images", _HOW)
        style.footer(figure, shares)
        return style.save(figure, out_stem)


if __name__ == "__main__":
    style.main(draw, "plots.epoch_time", sys.argv[1:])
