"""The common style of all figures: fonts, one colour per arm, reading results.csv, writing files.

A figure is a function of one results.csv: the same file gives the same bytes, without a date or a random id.
plots/ reads files of results, mostly CSV, and never imports gpuflow.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import math
import textwrap
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

INK = "#222222"
GRAY = "#6b6b6b"
_RULE = "#dddddd"

_STYLE: Any = {
    "axes.axisbelow": True,
    "axes.edgecolor": GRAY,
    "axes.labelcolor": INK,
    "axes.linewidth": 0.8,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlecolor": GRAY,
    "axes.titlelocation": "left",
    "axes.titlesize": 12,
    "figure.dpi": 100,
    "figure.facecolor": "white",
    "font.family": "DejaVu Sans",  # part of matplotlib, so it is the same on every machine
    "font.size": 13,
    "grid.color": _RULE,
    "grid.linewidth": 0.8,
    "legend.fontsize": 12,
    "legend.frameon": False,
    "lines.linewidth": 2.6,
    "lines.markersize": 7,
    "savefig.dpi": 160,
    "svg.fonttype": "path",
    "svg.hashsalt": "gpuflow",
    "text.color": INK,
    "xtick.color": GRAY,
    "xtick.labelcolor": INK,
    "ytick.color": GRAY,
    "ytick.labelcolor": INK,
}


@dataclass(frozen=True, slots=True)
class Arm:
    """Says how one arm of a comparison is drawn in every figure."""

    label: str
    color: str
    marker: str


# The colours of Okabe and Ito, which colour-blind readers can distinguish; darkened where text needs it.
ARMS: dict[str, Arm] = {
    "gpuflow": Arm("gpuflow", "#0072b2", "o"),
    "gpuflow (processes)": Arm("gpuflow, processes", "#004c7a", "p"),
    "gpuflow (no antialias)": Arm("gpuflow, no antialias", "#3d9fd9", "v"),
    "dataloader": Arm("DataLoader", "#d55e00", "s"),
    "dataloader-uint8": Arm("DataLoader, uint8", "#b0578d", "P"),
    "dataloader-uint8-raw": Arm("DataLoader, uint8, late", "#a07400", "X"),
    "spdl": Arm("SPDL", "#00845f", "D"),
    "dali": Arm("DALI 2.4", "#4f7a28", "h"),
    "engines": Arm("JPEG engines alone", "#8a8a8a", "*"),
    "engines sorted": Arm("JPEG engines, sorted", "#b9b9b9", "8"),
    "bare threads": Arm("bare threads", "#555555", "^"),
    "gpuflow default": Arm("gpuflow, default", "#3d9fd9", "*"),
    "gpuflow-processes": Arm("gpuflow, processes", "#004c7a", "p"),
    "processes": Arm("independent processes", "#555555", "^"),
    "decode": Arm("decoding alone", "#8a8a8a", "X"),
    "dataloader-pil": Arm("DataLoader, PIL", "#d55e00", "s"),
    "dataloader-tensors": Arm("DataLoader, tensors", "#b0578d", "P"),
    "spdl-io": Arm("SPDL, padded by FFmpeg", "#6ab592", "d"),
    "spdl-io-stretch": Arm("SPDL with FFmpeg", "#005a41", ">"),
    "spdl-cv2": Arm("SPDL with OpenCV", "#00845f", "D"),
    "gpuflow-gpu": Arm("gpuflow, GPU decode", "#56b4e9", "^"),
    "dali-cpu": Arm("DALI, CPU decode", "#a07400", "X"),
    "dali-mixed": Arm("DALI, GPU decode", "#e69f00", "h"),
    "plain": Arm("cv2, one lock", "#c23b22", "s"),
    "plain-eager": Arm("cv2, no CUDA graphs", "#7a5195", "<"),
    "graph-cpu": Arm("graph, CPU decode", "#5b7fc7", "o"),
    "graph-gpu": Arm("graph, GPU decode", "#1b3a8a", "D"),
    "service": Arm("service", "#2a7f9e", "o"),
}
_SPARE = (("#9a6a2f", "<"), ("#222222", ">"), ("#8c564b", "d"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """Holds one row of a results.csv: one value with its spread over the repeats."""

    arm: str
    workload: str
    metric: str
    value: float
    unit: str
    low: float
    high: float
    repeats: int
    machine: str
    versions: str
    commit: str
    date: str


def read_results(path: Path, *, metric: str, may_lack: bool = False) -> list[Result]:
    """Read the rows of one metric, in the order of the file. An empty `low` or `high` equals the value.

    may_lack: return no rows for a metric that the file does not have.

    Raises:
        ValueError: a column or the metric is missing, or a number cannot be read.
    """
    names = [field.name for field in fields(Result)]
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        if missing := [name for name in names if name not in (reader.fieldnames or [])]:
            raise ValueError(f"{path} must have the columns {', '.join(names)}; it lacks {', '.join(missing)}")
        rows = [(reader.line_num, row) for row in reader if row["metric"] == metric]
    if not rows and not may_lack:
        raise ValueError(f"{path} must have rows of the metric {metric}, found none; run the experiment that writes it")
    results = []
    for line, row in rows:
        try:
            numbers = {name: float(row[name] or row["value"]) for name in ("value", "low", "high")}
            values: Any = {name: row[name] for name in names} | numbers
            results.append(Result(**values | {"repeats": int(row["repeats"])}))
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path}:{line} value, low, high and repeats must be numbers: {error}") from error
    return results


def split_workload(workload: str) -> tuple[str, dict[str, str]]:
    """Split `"train 224; batch=64; workers=2"` into the text before the settings, and the settings."""
    parts = [part.strip() for part in workload.split(";")]
    settings = dict(part.split("=", 1) for part in parts if "=" in part)
    return "; ".join(part for part in parts if "=" not in part), settings


def keys_of(path: Path, result: Result, setting: str) -> tuple[str, str, int]:
    """Return a result's workload without a setting that is a number, its arm, and that number.

    Raises:
        ValueError: the workload has no such setting.
    """
    text, settings = split_workload(result.workload)
    count = settings.pop(setting, "")
    if not count.isdecimal():
        raise ValueError(f"{path} workload must end in `; {setting}=N`, got {result.workload!r}")
    workload = "; ".join(filter(None, [text, *(f"{key}={value}" for key, value in settings.items())]))
    return workload, result.arm, int(count)


def table(path: Path, results: Iterable[Result], keys: Callable[[Result], Sequence[Hashable]]) -> dict[Any, Any]:
    """Arrange results in nested dictionaries, by the keys of each.

    Raises:
        ValueError: two results have the same keys.
    """
    nested: dict[Any, Any] = {}
    for result in results:
        *outer, last = keys(result)
        inner = nested
        for key in outer:
            inner = inner.setdefault(key, {})
        if inner.setdefault(last, result) is not result:
            raise ValueError(f"{path} must have one row for {result.arm!r} in {result.workload!r}, got several")
    return nested


def arms_of(results: Iterable[Result]) -> dict[str, Arm]:
    """Return how to draw each arm of these results, known arms first. Unknown arms get spare colours in order."""
    names = list(dict.fromkeys(result.arm for result in results))
    spare = itertools.cycle(_SPARE)
    known = {name: arm for name, arm in ARMS.items() if name in names}
    return known | {name: Arm(name, *next(spare)) for name in names if name not in ARMS}


@contextmanager
def new_figure(width: float, height: float) -> Iterator[Figure]:
    """Yield a figure of this size in inches. The common style applies to what is drawn and saved inside the block."""
    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update(_STYLE)
        yield Figure(figsize=(width, height))


def title(figure: Figure, text: str, subtitle: str = "") -> None:
    """Draw a title at the figure's left edge, and a smaller line below it."""
    height = figure.get_figheight()
    figure.text(0.02, 1 - 0.14 / height, text, fontsize=17, fontweight="bold", va="top")
    figure.text(0.02, 1 - 0.5 / height, subtitle, fontsize=12, color=GRAY, va="top")


def footer(figure: Figure, results: Sequence[Result]) -> None:
    """Draw machine and date of the measurement in small type at the lower left."""
    parts = []
    for name in ("machine", "versions", "date", "commit"):
        values = list(dict.fromkeys(value for result in results if (value := str(getattr(result, name)))))
        if name == "versions":  # an arm with a library more repeats all the others
            shared = min(values, key=len, default="") + " "
            values = [value.removeprefix(shared) for value in values]
        parts += [", ".join(values)] if values else []
    text = textwrap.fill("  |  ".join(parts), width=int(figure.get_figwidth() * 13.5))
    text = text.replace("\n|  ", "\n").replace("  |\n", "\n")  # no separator at the ends of a line
    figure.text(0.02, 0.08 / figure.get_figheight(), text, fontsize=9.5, color=GRAY, va="bottom", linespacing=1.35)


def text_width(texts: Iterable[str]) -> float:
    """Estimate the width in inches of the longest of these texts in bold."""
    return 0.11 * max(map(len, texts))


def count_axis(axes: Axes, which: str) -> None:
    """Set the x or y axis to start at zero and to show thousands with commas."""
    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_major_locator(MaxNLocator(6, integer=True))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axis.grid(True)


def without_x(axes: Axes) -> None:
    """Hide the x axis of a panel whose bars have their values next to them."""
    axes.set_xticks([])
    axes.spines["bottom"].set_visible(False)


def ranges(results: Sequence[Result]) -> list[list[float]]:
    """Return how far the repeats of results are below and above their values, as matplotlib takes it: [2, N]."""
    return [[max(0.0, one.value - one.low) for one in results], [max(0.0, one.high - one.value) for one in results]]


def spread(axes: Axes, result: Result, place: float, color: str, capsize: float = 3) -> None:
    """Draw the range of a result's repeats as a horizontal line at `place`."""
    axes.errorbar(result.value, place, xerr=ranges([result]), color=color, linewidth=1.3, capsize=capsize)


def bars(
    axes: Axes,
    results: Sequence[Result],
    arms: Mapping[str, Arm],
    texts: Iterable[str],
    *,
    height: float,
    capsize: float,
    gap: float,
    fontsize: float | None = None,
) -> None:
    """Draw a bar for each result from the top down, with its spread, a text at its end and its arm's name.

    Args:
        axes: to draw in.
        results: of which each gets a bar.
        arms: how to draw each arm.
        texts: what is written at the ends.
        height: of a bar, as a part of its row.
        capsize: of the spread's ends, in points.
        gap: between a bar and its text, in points.
        fontsize: of texts and names; None for the figure's.
    """
    for place, (result, text) in enumerate(zip(results, texts, strict=True)):
        axes.barh(place, result.value, height=height, color=arms[result.arm].color)
        spread(axes, result, place, INK, capsize)
        how: Any = {"va": "center", "fontsize": fontsize, "fontweight": "bold", "annotation_clip": False}
        axes.annotate(text, (result.high, place), (gap, 0), "data", "offset points", **how)
    axes.set_yticks(range(len(results)), [arms[result.arm].label for result in results], fontsize=fontsize)
    axes.set_ylim(len(results) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)


def margins(figure: Figure, *, left: float, right: float, top: float, bottom: float, **between: float) -> None:
    """Set the margins around a figure's panels in inches. between: `wspace` and `hspace`, in sizes of a panel."""
    width, height = figure.get_size_inches()
    figure.subplots_adjust(left / width, bottom / height, 1 - right / width, 1 - top / height, **between)


def spread_apart(places: Sequence[float], gap: float, lowest: float = -math.inf) -> list[float]:
    """Move positions as little as needed to be `gap` apart and not below `lowest`, and keep their order."""
    order = sorted(range(len(places)), key=places.__getitem__)
    moved = list(places)
    groups: list[list[int]] = []
    for i in order:
        group = [i]
        while True:
            half = (len(group) - 1) / 2 * gap
            first = max(sum(places[j] for j in group) / len(group) - half, lowest)
            for k, j in enumerate(group):
                moved[j] = first + k * gap
            if not groups or moved[groups[-1][-1]] + gap <= moved[group[0]]:
                break
            group = groups.pop() + group
        groups.append(group)
    return moved


def finish(figure: Figure, stem: Path, results: Sequence[Result], heading: str, subtitle: str) -> list[Path]:
    """Add the title and the footer, and save the figure. Return what `save` does."""
    title(figure, heading, subtitle)
    footer(figure, results)
    return save(figure, stem)


def save(figure: Figure, stem: Path, dpi: float | None = None) -> list[Path]:
    """Write stem.svg and stem.png, byte for byte the same for the same figure, and return their paths.

    dpi: pixels of the PNG in an inch; by default those of the common style.
    """
    stem.parent.mkdir(parents=True, exist_ok=True)
    varying = {"svg": "Date", "png": "Software"}
    paths = [stem.with_name(f"{stem.name}.{ending}") for ending in varying]
    for path, key in zip(paths, varying.values(), strict=True):
        figure.savefig(path, metadata={key: None}, dpi=dpi)
    return paths


Draw = Callable[[Path, Path], list[Path]]
"""Draws the figure of a results.csv as OUT_STEM.svg and OUT_STEM.png, and returns their paths."""


def main(prog: str, *figures: Draw, arguments: Sequence[str] | None = None) -> None:
    """Run the command line of a module: RESULTS OUT_STEM, with a figure's name before them if there are several."""
    parser = argparse.ArgumentParser(prog=f"python -m {prog}", description="Draw results.csv as OUT_STEM.svg and .png.")
    named = {draw.__name__: draw for draw in figures}
    if len(figures) > 1:
        parser.add_argument("figure", choices=named, help="which figure")
    parser.add_argument("results", type=Path, help="a results.csv")
    parser.add_argument("out_stem", type=Path, help="where to write, without the ending")
    parsed = parser.parse_args(arguments)
    try:
        paths = named.get(getattr(parsed, "figure", ""), figures[0])(parsed.results, parsed.out_stem)
    except (OSError, ValueError) as error:
        parser.exit(1, f"{error}\n")
    print(*paths, sep="\n")
