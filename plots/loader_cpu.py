"""Draws images per second of each arm as bars, with the ratio to PyTorch's DataLoader. One panel per workload.

python -m plots.loader_cpu experiments/loader_cpu/results.csv OUT_STEM
"""

from __future__ import annotations

import sys
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from . import style

BASELINE = "dataloader"
"""The arm that ratios are relative to: torch.utils.data.DataLoader with PIL and torchvision's transforms."""

_BAR, _PANEL, _TOP, _BOTTOM = 0.52, 0.5, 0.95, 1.15  # inches: a bar's row, a panel's heading, the margins


def draw(
    results_path: Path,
    out_stem: Path,
    *,
    heading: str = "Images per second, loaded on the CPU",
    baseline: str = BASELINE,
    one_scale: bool = True,
) -> list[Path]:
    """Draw results.csv as OUT_STEM.svg and OUT_STEM.png. Returns their paths. one_scale: for all panels."""
    results = style.read_results(results_path, metric="images_per_s")
    arms = style.arms_of(results)
    panels: dict[str, dict[str, style.Result]] = {}
    for result in results:
        panel = panels.setdefault(result.workload, {})
        if panel.setdefault(result.arm, result) is not result:
            raise ValueError(f"{results_path} must have one row for {result.arm!r} in {result.workload!r}, got several")
    rows = [len(panel) for panel in panels.values()]
    top = _TOP + (0.2 if len(panels) > 1 else 0)
    height = top + _BOTTOM + _BAR * sum(rows) + (_PANEL if one_scale else 2 * _PANEL) * (len(rows) - 1)
    with style.figure_style():
        figure = Figure(figsize=(9, height))
        axes_column = figure.subplots(len(rows), 1, sharex=one_scale, squeeze=False, height_ratios=rows)[:, 0]
        figure.subplots_adjust(
            left=(style.text_width(arm.label for arm in arms.values()) + 0.2) / 9,
            right=1 - (style.text_width(["12,345   1.2x"]) + 0.1) / 9,
            top=1 - top / height,
            bottom=_BOTTOM / height,
            hspace=(_PANEL if one_scale else 2 * _PANEL) / (_BAR * sum(rows) / len(rows)),
        )
        for axes, (workload, panel) in zip(axes_column, panels.items(), strict=True):
            _bars(axes, arms, panel, baseline)
            axes.set_xlim(0, 1.02 * max(result.high for result in (results if one_scale else panel.values())))
            if len(panels) > 1:
                axes.set_title(workload, loc="left", fontsize=11, color=style.GRAY, pad=6)
        axes_column[-1].set_xlabel("images per second")
        subtitle = f"ratios (x) to {arms[baseline].label}" if baseline in arms else ""
        if len(panels) == 1:
            subtitle = "; ".join(filter(None, [*panels, subtitle]))
        style.title(figure, heading, subtitle)
        style.footer(figure, results)
        return style.save(figure, out_stem)


def _bars(axes: Axes, arms: dict[str, style.Arm], panel: dict[str, style.Result], baseline: str) -> None:
    """Draw one bar per arm, the fastest on top, with its spread, its rate and its ratio."""
    ranked = sorted(panel, key=lambda name: panel[name].value, reverse=True)
    for place, name in enumerate(ranked):
        result = panel[name]
        axes.barh(place, result.value, height=0.68, color=arms[name].color)
        spread = [[result.value - result.low], [result.high - result.value]]
        axes.errorbar(result.value, place, xerr=spread, color=style.INK, linewidth=1.3, capsize=4)
        text = f"{result.value:,.0f}"
        if baseline in panel and name != baseline:
            ratio = result.value / panel[baseline].value
            text += f"   {ratio:.1f}x" if ratio < 10 else f"   {ratio:.0f}x"
        axes.annotate(
            text,
            xy=(result.high, place),
            xytext=(9, 0),
            textcoords="offset points",
            va="center",
            fontweight="bold",
            annotation_clip=False,
        )
    axes.set_yticks(range(len(ranked)), [arms[name].label for name in ranked])
    axes.set_ylim(len(ranked) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    style.count_axis(axes, "x")


if __name__ == "__main__":
    style.main(draw, "plots.loader_cpu", sys.argv[1:])
