"""Draws by how much recall differs where images are served in another way than in training.

python -m plots.consistency RESULTS OUT_STEM

A column for each task, a row for each training. Workloads are `TASK; train=WAY; data=SHARE; engine=torch; ...`.
"""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from . import style

_PUBLISHED = {"all": 0.33, "5%": 2.58}
"""Differences of recall in the document of the training integration: CPU decode in training, GPU decode served."""
_SHARES = {"all": ("#0072b2", "o", -0.17), "5%": ("#d55e00", "s", 0.17)}
"""Of each share of the training data the colour, the marker, and where it is drawn in a line."""
_OWN_WAY = "validation"
_LABELS = {
    "cpu decode": "CPU decode (OpenCV)",
    "gpu decode": "GPU decode",
    "gpu decode (emulated)": "GPU decode (emulated)",
    "gpu decode, fast DCT (emulated)": "  with fast DCT (emulated)",
    "repeated chroma, antialiased (emulated)": "  antialiased (emulated)",
    "opencv": "OpenCV",
    "pillow": "Pillow",
    "torchvision": "torchvision v2",
    "hugging face slow": "Hugging Face, slow",
    "hugging face fast": "Hugging Face, fast",
    "dali cpu": "DALI, CPU",
    "dali mixed": "DALI, mixed",
    "gpuflow": "gpuflow",
    "gpuflow cuda": "gpuflow on a GPU",
}
_LINE, _LEFT, _PANEL, _TOP, _BOTTOM, _BETWEEN = 0.27, 2.3, 3.4, 1.35, 1.35, 0.65
"""Inches: a line of a panel, the labels, a panel's width, the margins, the space between panels."""

Series = dict[tuple[str, str], style.Result]


def draw(results_path: Path, out_stem: Path) -> list[Path]:
    """Draw results.csv as OUT_STEM.svg and OUT_STEM.png. Return their paths."""
    results = style.read_results(results_path, metric="recall_difference")
    panels, model = _panels(results_path, results)
    tasks, trainings = (list(dict.fromkeys(key[part] for key in panels)) for part in (0, 1))
    ways = [way for way in _LABELS if any((way, share) in series for series in panels.values() for share in _SHARES)]
    panel_height = _LINE * len(ways)
    height = _TOP + _BOTTOM + len(trainings) * panel_height + (len(trainings) - 1) * _BETWEEN
    width = _LEFT + len(tasks) * _PANEL + 0.3
    with style.new_figure(width, height) as figure:
        grid = figure.subplots(len(trainings), len(tasks), sharex="col", sharey=True, squeeze=False)
        hspace = _BETWEEN / panel_height
        style.margins(figure, left=_LEFT, right=0.2, top=_TOP, bottom=_BOTTOM, wspace=0.06, hspace=hspace)
        for line, training in enumerate(trainings):
            for column, task in enumerate(tasks):
                axes = grid[line][column]
                _panel(axes, panels.get((task, training), {}), ways, is_published=training == "cpu decode")
                if line == 0:
                    axes.annotate(task, (0, 1), (0, 24), "axes fraction", "offset points", fontweight="bold")
                if column == 0:
                    text = f"trained with {_LABELS.get(training, training).strip()}"
                    axes.annotate(text, (0, 1), (0, 5), "axes fraction", "offset points", color=style.GRAY, fontsize=12)
        for axes in grid[-1]:
            axes.set_xlabel("difference of recall, points")
        seeds = max(result.repeats for result in results)
        subtitle = f"points against validation; means and 95% t intervals over {seeds} seeds; {model}"
        _legend(figure, height)
        heading = "What recall loses when serving prepares images in another way"
        return style.finish(figure, out_stem, results, heading, subtitle)


def _panels(path: Path, results: list[style.Result]) -> tuple[dict[tuple[str, str], Series], str]:
    """Return the results of each task and training by way and share of the data, and what the model is."""
    panels: dict[tuple[str, str], Series] = {}
    models = set()
    for result in results:
        task, settings = style.split_workload(result.workload)
        if settings["engine"] != "torch" or result.arm == _OWN_WAY:
            continue
        models.add(f"{settings['model']} at {settings['size']} pixels, {settings['images']} images")
        panels.setdefault((task, settings["train"]), {})[result.arm, settings["data"]] = result
    if len(models) != 1:
        raise ValueError(f"{path} must have the rows of one model, size and number of images, got {sorted(models)}")
    return panels, models.pop()


def _panel(axes: Axes, series: Series, ways: list[str], *, is_published: bool) -> None:
    """Draw one task and training: a line for each way, a point with its interval for each share of the data."""
    axes.axvline(0, color=style.INK, linewidth=1)
    for share, (color, marker, shift) in _SHARES.items():
        if is_published:
            axes.axvline(_PUBLISHED[share], color=color, linewidth=1.4, linestyle="--")
        places = [place for place, way in enumerate(ways) if (way, share) in series]
        found = [series[ways[place], share] for place in places]
        axes.errorbar(
            [result.value for result in found],
            [place + shift for place in places],
            xerr=style.ranges(found),
            color=color,
            marker=marker,
            markersize=5.5,
            linestyle="none",
            elinewidth=1.4,
            capsize=2.5,
            zorder=3,
        )
    axes.set_yticks(range(len(ways)), [_LABELS[way] for way in ways], fontsize=11.5)
    axes.set_ylim(len(ways) - 0.4, -0.6)
    axes.grid(True, axis="x")
    axes.tick_params(axis="x", labelbottom=True, labelsize=11)


def _legend(figure: Figure, height: float) -> None:
    handles = [
        Line2D([], [], color=color, marker=marker, linestyle="none", label=f"{share} of the training data")
        for share, (color, marker, _) in _SHARES.items()
    ]
    handles.append(
        Line2D([], [], color=style.GRAY, linestyle="--", linewidth=1.4, label="published for GPU decode, on other data")
    )
    place = (0.015, 0.48 / height)
    figure.legend(handles=handles, loc="lower left", bbox_to_anchor=place, ncols=3)


if __name__ == "__main__":
    style.main("plots.consistency", draw)
