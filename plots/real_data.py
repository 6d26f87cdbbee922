"""Draws loading and training on photographs of several kinds: a row of panels for each kind.

python -m plots.real_data experiments/real_data/results.csv OUT_STEM

On the left the rates of the loaders alone and of the JPEG engines, which bound them; on the right the rates of the
trainings that they feed, as parts of the rate on a resident batch. Each row's workload names the kind of photographs
and what is done with them: `web; resnet18`.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator

from . import style

KINDS = {
    "web": "80 to 3,000 pixels, 15% 4:4:4, 5% 4:2:2, 3% progressive, some gray, PNG, CMYK",
    "same": "about 500x375 pixels, 4:2:0",
    "samplings": "about 500x375 pixels, 15% 4:4:4, 5% 4:2:2",
    "sizes": "80 to 3,000 pixels, 4:2:0",
    "progressive": "about 500x375 pixels, 3% progressive",
    "progressive20": "about 500x375 pixels, 20% progressive",
    "turned": "about 500x375 pixels, half of them turned by EXIF data",
}
"""What each kind is, in the order of the figure. Other kinds follow in the order of the file."""
TRAININGS = {"resnet18": "ResNet-18", "resnet50": "ResNet-50", "compiled_resnet18": "ResNet-18, compiled"}

_HOW = "JPEG engines: nothing else runs, calls of one chroma sampling; lines: all repeats"

_WIDTH, _LINE, _HEADING, _TOP, _BOTTOM = 13.0, 0.3, 0.72, 1.2, 1.05  # inches
_NUMBERS, _NAMES, _GAP, _COLUMN, _MARGIN = 0.75, 1.85, 0.2, 0.85, 0.3  # inches


def draw(results_path: Path, out_stem: Path) -> list[Path]:
    """Draw results.csv as OUT_STEM.svg and OUT_STEM.png. Return their paths."""
    rates = [row for row in style.read_results(results_path, metric="images_per_s") if row.workload.endswith("; alone")]
    if not rates:
        raise ValueError(f"{results_path} must have a workload that ends in `; alone`, found none")
    ratios = style.read_results(results_path, metric="step_ratio", may_lack=True)
    ratios = [row for row in ratios if not row.workload.endswith("; alone")]
    alone, fed = (_table(results_path, rows) for rows in (rates, ratios))
    kinds = sorted({**alone, **fed}, key=lambda kind: [*KINDS, kind].index(kind))
    arms, trained = style.arms_of(rates), style.arms_of(ratios)
    lines = [max(len(alone.get(kind, {}).get("alone", {})), len(fed.get(kind, {})), 1) for kind in kinds]
    height = _TOP + _BOTTOM + sum(_HEADING + _LINE * count for count in lines)
    labels = style.text_width(arm.label for arm in arms.values()) * 0.85 + 0.2
    columns = (_NAMES + _COLUMN * len(trained) + _MARGIN) if fed else 0.0
    wide = (_WIDTH - labels - 2 * _NUMBERS - columns) / (2 if fed else 1) - (_GAP if fed else 0.0)
    right = labels + wide + _NUMBERS + _GAP + _NAMES
    fastest = max(row.high for row in rates)
    slowest = min([0.9, *(math.floor(row.low * 10) / 10 for row in ratios)])
    with style.new_figure(_WIDTH, height) as figure:
        top = height - _TOP
        for kind, count in zip(kinds, lines, strict=True):
            top -= _HEADING
            text = f"{kind}: {KINDS[kind]}" if kind in KINDS else kind
            figure.text(0.02, (top + 0.14) / height, text, fontsize=12, fontweight="bold", va="bottom")
            bottom, tall = (top - _LINE * count) / height, _LINE * count / height
            if kind in alone:
                axes = figure.add_axes((labels / _WIDTH, bottom, wide / _WIDTH, tall))
                rows = [alone[kind]["alone"][name] for name in arms if name in alone[kind]["alone"]]
                style.bars(
                    axes, rows, arms, [f"{row.value:,.0f}" for row in rows], height=0.72, capsize=3, gap=7, fontsize=12
                )
                axes.set_xlim(0, fastest or 1)
                style.without_x(axes)
                axes.set_ylim(count - 0.5, -0.5)  # as many lines as the panel on the right
            if kind in fed:
                part = len(fed[kind]) / count
                axes = figure.add_axes((right / _WIDTH, bottom + tall * (1 - part), wide / _WIDTH, tall * part))
                _ratios(axes, fed[kind], trained, slowest, wide)
            top -= _LINE * count
        place = 1 - (_TOP - 0.04) / height
        headings = [(labels, "loader alone: images per second")]
        headings += [(right, "training: part of its speed on a resident batch")] if fed else []
        for x, text in headings:
            figure.text(x / _WIDTH, place, text, fontsize=12, color=style.GRAY, va="bottom")
        return style.finish(figure, out_stem, [*rates, *ratios], "Loading and training on ordinary photographs", _HOW)


def _table(path: Path, results: list[style.Result]) -> dict[str, Any]:
    """Return the results by the kind of photographs, what is done with them, and the arm."""
    return style.table(path, results, lambda row: (*row.workload.rpartition("; ")[::2], row.arm))


def _ratios(
    axes: Axes,
    trainings: dict[str, dict[str, style.Result]],
    arms: dict[str, style.Arm],
    slowest: float,
    width: float,
) -> None:
    """Draw a line for each training with a point for each arm; the values stand in columns on the right."""
    shown = sorted(trainings, key=lambda training: [*TRAININGS, training].index(training))
    for place, training in enumerate(shown):
        found = trainings[training]
        values = [row.value for row in found.values()]
        axes.plot([min(values), max(values)], [place, place], color=style.GRAY, linewidth=1.2, zorder=1)
        for column, (name, arm) in enumerate(arms.items()):
            if name not in found:
                continue
            style.spread(axes, found[name], place, arm.color)
            axes.plot(found[name].value, place, arm.marker, color=arm.color, markeredgecolor="white", zorder=3)
            _in_column(axes, column, place, f"{found[name].value:.3f}", arm, width)
    for column, arm in enumerate(arms.values()):
        _in_column(axes, column, -0.95, arm.label, arm, width)
    axes.set_yticks(range(len(shown)), [TRAININGS.get(name, name) for name in shown], fontsize=12)
    axes.set_xlim(slowest, max(1.0, *(row.high for found in trainings.values() for row in found.values())))
    axes.xaxis.set_major_locator(FixedLocator([tenth / 10 for tenth in range(round(slowest * 10), 11)]))
    axes.xaxis.grid(True)
    axes.tick_params(axis="x", labelsize=10, length=0)
    axes.axvline(1.0, color=style.GRAY, linewidth=1.2)
    axes.spines[["bottom", "left"]].set_visible(False)
    axes.set_ylim(len(shown) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)


def _in_column(axes: Axes, column: int, place: float, text: str, arm: style.Arm, width: float) -> None:
    """Write a text to the right of a panel of this width in inches."""
    x = 1 + (0.2 + _COLUMN * column) / width
    axes.text(
        x,
        place,
        text,
        transform=axes.get_yaxis_transform(),
        color=arm.color,
        fontsize=12,
        fontweight="bold",
        va="center",
        clip_on=False,
    )


if __name__ == "__main__":
    style.main("plots.real_data", draw)
