"""Draws bars of the values in a results.csv, in a panel for each workload or metric: four figures.

python -m plots.bars FIGURE experiments/FIGURE/results.csv OUT_STEM

loader_cpu   images per second of each loader, with the ratio to PyTorch's DataLoader; a panel for each workload
extension    the same for operators that warp images, with the ratio to cv2.warpAffine; a panel for each device
gpu_path     loaders on a GPU: images per second, the training step's speed, processor time and memory
epoch_time   the time of whole trainings as a share of DataLoader's; dashed: what the guide to DALI publishes
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from . import style


def loader_cpu(results_path: Path, out_stem: Path) -> list[Path]:
    """Draw the rates of loaders as OUT_STEM.svg and OUT_STEM.png, and return their paths."""
    return _rates(results_path, out_stem, "Images per second, loaded on the CPU", "dataloader", one_scale=True)


def extension(results_path: Path, out_stem: Path) -> list[Path]:
    """Draw the rates of operators as OUT_STEM.svg and OUT_STEM.png, and return their paths."""
    return _rates(results_path, out_stem, "Images per second, warped", "cv2", one_scale=False)


def _rates(results_path: Path, out_stem: Path, heading: str, baseline: str, *, one_scale: bool) -> list[Path]:
    """Draw a bar for each arm, the fastest on top. baseline: the arm of the ratios. one_scale: for all panels."""
    results = style.read_results(results_path, metric="images_per_s")
    arms = style.arms_of(results)
    panels = style.table(results_path, results, lambda one: (one.workload, one.arm))
    sides = style.text_width(arm.label for arm in arms.values()) + 0.2, style.text_width(["12,345   1.2x"]) + 0.1
    ends = 0.95 if len(panels) == 1 else 1.15, 1.15
    between = 0.5 if one_scale else 1.0
    with _stacked(9, list(map(len, panels.values())), sides, ends, bar=0.52, between=between) as (figure, column):
        for axes, (workload, panel) in zip(column, panels.items(), strict=True):
            ranked = sorted(panel.values(), key=lambda one: one.value, reverse=True)
            reference = panel[baseline].value if baseline in panel else None
            texts = [f"{one.value:,.0f}{_ratio(one, baseline, reference)}" for one in ranked]
            style.bars(axes, ranked, arms, texts, height=0.68, capsize=4, gap=9)
            style.count_axis(axes, "x")
            axes.set_xlim(0, 1.02 * max(one.high for one in (results if one_scale else ranked)))
            axes.tick_params(axis="x", labelbottom=not one_scale or axes is column[-1])
            if len(panels) > 1:
                axes.set_title(workload, fontsize=11)
        column[-1].set_xlabel("images per second")
        subtitle = f"ratios (x) to {arms[baseline].label}" if baseline in arms else ""
        if len(panels) == 1:
            subtitle = "; ".join(filter(None, [*panels, subtitle]))
        return style.finish(figure, out_stem, results, heading, subtitle)


def _ratio(one: style.Result, baseline: str, reference: float | None) -> str:
    """Return the ratio to the baseline's value, in two digits or more; nothing for the baseline."""
    if reference is None or one.arm == baseline:
        return ""
    ratio = one.value / reference
    return f"   {ratio:.1f}x" if ratio < 10 else f"   {ratio:.0f}x"


_GPU_PANELS = (
    ("loader alone: images per second", "images_per_s", "", "{:,.0f}"),
    ("ResNet-18 training: part of its speed on a resident batch", "step_ratio", "resnet18; ", "{:.3f}"),
    ("ResNet-50 training: part of its speed on a resident batch", "step_ratio", "resnet50; ", "{:.3f}"),
    (
        "ResNet-50 training: processor seconds of the loader for 1,000 images",
        "cpu_s_per_1000_of_loader",
        "resnet50; ",
        "{:.3f}",
    ),
    ("GPU memory of the loader in both trainings, MB", "gpu_mem_mb", "resnet50; ", "{:,.0f}"),
    ("GPU memory of the loader alone, MB", "gpu_mem_mb", "", "{:,.0f}"),
)
"""(heading, metric, start of the workload's name, format of a value)."""


def gpu_path(results_path: Path, out_stem: Path) -> list[Path]:
    """Draw loaders on a GPU as OUT_STEM.svg and OUT_STEM.png, without panels that have no results. Return the paths."""
    panels = []
    for heading, metric, begins, form in _GPU_PANELS:
        rows = style.read_results(results_path, metric=metric, may_lack=metric != "images_per_s")
        if rows := [
            row for row in rows if row.workload.startswith(begins) and row.workload.count("; ") == 1 + bool(begins)
        ]:
            panels.append((heading, form, rows))
    results = [row for _, _, rows in panels for row in rows]
    arms = style.arms_of(results)
    sides = style.text_width(arm.label for arm in arms.values()) + 0.2, 1.2
    counts = [len(rows) for *_, rows in panels]
    with _stacked(9, counts, sides, (1.34, 0.75), bar=0.42, between=0.62) as (figure, column):
        for axes, (heading, form, rows) in zip(column, panels, strict=True):
            style.bars(axes, rows, arms, [form.format(row.value) for row in rows], height=0.7, capsize=3, gap=9)
            axes.set_title(heading, pad=5)
            axes.set_xlim(0, max(row.high for row in rows))
            style.without_x(axes)
        return style.finish(figure, out_stem, results, "Loading on a GPU", results[0].workload)


def epoch_time(results_path: Path, out_stem: Path) -> list[Path]:
    """Draw the time of whole trainings as OUT_STEM.svg and OUT_STEM.png, and return their paths."""
    metrics = (style.read_results(results_path, metric=metric) for metric in ("time_share", "run_s", "accuracy"))
    shares, seconds, accuracy = (
        style.table(results_path, results, lambda one: (one.workload, one.arm)) for results in metrics
    )
    results = [one for panel in shares.values() for one in panel.values()]
    arms = style.arms_of(results)
    counts = list(map(len, shares.values()))
    with _stacked(11, counts, (2.2, 3.4), (1.05, 1.1), bar=0.42, between=0.65) as (figure, column):
        for axes, (workload, panel) in zip(column, shares.items(), strict=True):
            names = [name for name in arms if name in panel]
            for place, name in enumerate(names):
                one, run, right = panel[name], seconds[workload][name], accuracy[workload][name]
                spread = style.ranges([one])
                axes.barh(place, one.value, 0.66, xerr=spread, capsize=4, color=arms[name].color, ecolor=style.INK)
                text = f"{one.value:.0%}   {run.value:,.1f} s   accuracy {right.value:.1%}"
                axes.annotate(text, (1, place), (8, 0), ("axes fraction", "data"), "offset points", va="center")
            axes.axvline(0.8, color=style.GRAY, linestyle="--", linewidth=1.6)
            axes.set_yticks(range(len(names)), [arms[name].label for name in names])
            axes.set_ylim(len(names) - 0.5, -0.5)
            axes.set_xlim(0, 1.05 * max(one.high for one in panel.values()))
            axes.xaxis.set_major_formatter(PercentFormatter(1))
            axes.set_title(workload)
        note = (
            "first epoch included; medians and all repeats; dashed: 80%, published by the guide to DALI, other hardware"
        )
        title = "Time of a whole training, as a share of DataLoader's with PIL images"
        return style.finish(figure, out_stem, results, title, note)


@contextmanager
def _stacked(
    width: float,
    counts: Sequence[int],
    sides: tuple[float, float],
    ends: tuple[float, float],
    *,
    bar: float,
    between: float,
) -> Iterator[tuple[Figure, list[Axes]]]:
    """Give a figure with a panel below the other for each number of bars, and these panels. All lengths are in inches.

    Args:
        width: of the figure.
        counts: the number of bars in each panel.
        sides: the space left and right of all panels.
        ends: the space above and below them.
        bar: the height of one bar with its space.
        between: the space between two panels.
    """
    (left, right), (top, bottom) = sides, ends
    height = top + bottom + bar * sum(counts) + between * (len(counts) - 1)
    with style.new_figure(width, height) as figure:
        column, place = list[Axes](), height - top
        for tall in (bar * count for count in counts):
            place -= tall
            column.append(figure.add_axes((left / width, place / height, 1 - (left + right) / width, tall / height)))
            place -= between
        yield figure, column


if __name__ == "__main__":
    style.main("plots.bars", loader_cpu, extension, gpu_path, epoch_time)
