"""Draws loaders on a GPU: images per second, the training step's speed, processor time and memory. One panel each.

python -m plots.gpu_path experiments/gpu_path/results.csv OUT_STEM
"""

from __future__ import annotations

import sys
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from . import style

_LOADER_CPU = "cpu_s_per_1000_of_loader"
PANELS = (
    ("loader alone: images per second", "images_per_s", "", "{:,.0f}"),
    ("ResNet-18 training: part of its speed on a resident batch", "step_ratio", "resnet18; ", "{:.3f}"),
    ("ResNet-50 training: part of its speed on a resident batch", "step_ratio", "resnet50; ", "{:.3f}"),
    ("ResNet-50 training: processor seconds of the loader for 1,000 images", _LOADER_CPU, "resnet50; ", "{:.3f}"),
    ("GPU memory of the loader in both trainings, MB", "gpu_mem_mb", "resnet50; ", "{:,.0f}"),
    ("GPU memory of the loader alone, MB", "gpu_mem_mb", "", "{:,.0f}"),
)  # fmt: skip
"""(heading, metric, start of the workload's name, format of a value)."""

_BAR, _HEADING, _TOP, _BOTTOM = 0.42, 0.62, 0.72, 0.75  # inches


def draw(results_path: Path, out_stem: Path) -> list[Path]:
    """Draw results.csv as OUT_STEM.svg and OUT_STEM.png. Returns their paths. Panels without results are left out."""
    panels = []
    for heading, metric, begins, form in PANELS:
        try:
            rows = style.read_results(results_path, metric=metric)
        except ValueError:
            if metric == PANELS[0][1]:
                raise
            continue
        found = [
            row for row in rows if row.workload.startswith(begins) and row.workload.count("; ") == 1 + bool(begins)
        ]
        if found:
            panels.append((heading, form, found))
    results = [row for _, _, found in panels for row in found]
    arms = style.arms_of(results)
    heights = [_HEADING + _BAR * len(found) for _, _, found in panels]
    height = _TOP + _BOTTOM + sum(heights)
    with style.figure_style():
        figure = Figure(figsize=(9, height))
        top = height - _TOP
        left = style.text_width(arm.label for arm in arms.values()) + 0.2
        for (heading, form, found), whole in zip(panels, heights, strict=True):
            bars = _BAR * len(found)
            place = (left / 9, (top - whole) / height, (9 - left - 1.2) / 9, bars / height)
            _bars(figure.add_axes(place), heading, form, found, arms)
            top -= whole
        workload = next(row.workload for row in results)
        style.title(figure, "Loading on a GPU", workload)
        style.footer(figure, results)
        return style.save(figure, out_stem)


def _bars(axes: Axes, heading: str, form: str, found: list[style.Result], arms: dict[str, style.Arm]) -> None:
    for place, row in enumerate(found):
        axes.barh(place, row.value, height=0.7, color=arms[row.arm].color)
        spread = [[max(0.0, row.value - row.low)], [max(0.0, row.high - row.value)]]
        axes.errorbar(row.value, place, xerr=spread, color=style.INK, linewidth=1.3, capsize=3)
        axes.annotate(
            form.format(row.value),
            xy=(row.high, place),
            xytext=(9, 0),
            textcoords="offset points",
            va="center",
            fontweight="bold",
            annotation_clip=False,
        )
    axes.set_title(heading, loc="left", fontsize=12, color=style.GRAY, pad=5)
    axes.set_yticks(range(len(found)), [arms[row.arm].label for row in found])
    axes.set_ylim(len(found) - 0.5, -0.5)
    axes.set_xlim(0, max(row.high for row in found))
    axes.set_xticks([])
    axes.spines["bottom"].set_visible(False)
    axes.tick_params(axis="y", length=0)


if __name__ == "__main__":
    style.main(draw, "plots.gpu_path", sys.argv[1:])
