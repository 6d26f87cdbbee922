"""Renders a report for the terminal: pairs with limits, then naive ways, then notes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from gpuflow.parity.libraries import is_library
from gpuflow.parity.measure import Levels
from gpuflow.parity.report import Logits, Pair, Report, Row
from gpuflow.parity.ways import NAIVE

__all__ = [
    "NAIVE_TITLE",
    "breaches",
    "figures",
    "notes",
    "render",
    "show_allowed",
    "show_figures",
    "show_levels",
    "show_logit",
    "stage_of",
    "verdict",
]

NAIVE_TITLE = "What naive sharing would have cost"
_LISTED = 6
_WIDTHS = (18, 6, 8, 8, 9, 8, 8, 8, 7)
_HEADINGS = (
    ("", "own", "", "", "hostile", "", "", "", ""),
    ("after", "max", "99.9 %", "mean", "max", "99.9 %", "mean", "differ", "limit"),
)


def render(report: Report) -> RenderableType:
    """Render the whole report, for 80 columns or more."""
    counts = ", ".join(f"{count} {kind}" for kind, count in report.images.items())
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    parts: list[RenderableType] = [
        Text(f"{report.file}, pipeline {report.pipeline}, preprocessing {report.preprocessing}", style="bold"),
        *(Padding(Text(line, style="dim"), (0, 0, 0, 2)) for line in report.stages),
        Text(f"\nDifferences in levels of 0-255, over {counts} images, up to each stage"),
        *_pairs(report, report.judged),
    ]
    if report.naive:
        parts += [Text(f"\n{NAIVE_TITLE}, which is not judged", style="bold"), *_pairs(report, report.naive)]
    parts += _section("Notes", [Text(line) for line in notes(report)])
    parts += _section("What decodes", [_ways(report)])
    parts += _section("Versions", [Text(versions)])
    parts.append(Text(f"\n{verdict(report)}", style="bold red" if report.breach else "bold green"))
    return Group(*parts)


def verdict(report: Report) -> str:
    """The outcome: `PASS: ...`, or a line `BREACH: ...` for each pair that exceeds its limit."""
    if not report.breach:
        held = ", ".join(f"{pair.a} and {pair.b}" for pair in report.judged)
        skipped = ", ".join(way.name for way in report.ways if way.missing is not None and way.name not in NAIVE)
        summary = f": {figures(report.judged[0])}" if any(is_library(pair.b) for pair in report.judged) else ""
        return f"PASS: {held} agree as they must{summary}{f'; skipped: {skipped}' if skipped else ''}"
    return "\n".join(f"BREACH: {line}" for pair in report.judged for line in breaches(pair))


def figures(pair: Pair) -> str:
    """A pair's largest difference, in levels and of the results themselves, and how many pixels are apart."""
    row = pair.rows[-1]
    if row.max == 0:
        return f"all {row.images} images are equal"
    kinds = (("your images", row.own), ("hostile ones", row.hostile))
    most = ", ".join(f"{show_levels(levels.max)} on {kind}" for kind, levels in kinds if levels is not None)
    return f"highest difference in levels {most} ({_in_results(row)}); limit {show_allowed(row)}"


def _in_results(row: Row) -> str:
    return f"{row.value:.3g} after {row.stage}, {100 * row.pixels:.3g}% of the pixels"


def breaches(pair: Pair) -> Iterator[str]:
    """Describe how a pair exceeds its limit, one line per stage, and differences that no image shows."""
    for row in pair.rows:
        if row.breach:
            more = f" ({_in_results(row)})" if is_library(pair.b) and row.pixels else ""
            apart = f"{show_levels(row.max)} levels apart{more}, limit {show_allowed(row)}" if row.apart else ""
            alone = f"{len(row.alone)} images that only one of them accepts or gives in this form" if row.alone else ""
            none = "no image could be compared" if row.images == 0 and not row.alone else ""
            causes = (f"because of {_some(images)}: {cause}" for cause, images in row.causes)
            faults = "; ".join(filter(None, (apart, alone, none, *causes)))
            yield f"{pair.a} against {pair.b} after {row.stage}: {faults}"
    for fault in pair.faults:
        yield f"{pair.a} against {pair.b}: {fault}"


def _some(images: Sequence[str]) -> str:
    """Return the first of these names, and how many there are."""
    return images[0] if len(images) == 1 else f"{images[0]} and {len(images) - 1} more"


def notes(report: Report) -> Iterator[str]:
    """Notes on the comparison that do not fit into a table."""
    yield f"the model for logits: {report.model}"
    for pair in report.pairs:
        name = f"{pair.a} against {pair.b}"
        yield from (f"{name}: {note}" for note in pair.notes)
        for reason in dict.fromkeys(reason for _, reason in pair.skipped):
            stages = ", ".join(stage for stage, other in pair.skipped if other == reason)
            yield f"{name}: not after {stages}: {reason}"
        alone = dict(entry for row in pair.rows for entry in (*row.alone, *row.reference_refuses))
        for image, reason in list(alone.items())[:_LISTED]:
            yield f"{name}: {image}: {reason}"
        if len(alone) > _LISTED:
            yield f"{name}: and {len(alone) - _LISTED} images more"
    if refused := {image for pair in report.pairs for row in pair.rows for image in row.refused}:
        yield f"refused by both: {', '.join(sorted(refused))}"


def show_levels(value: float) -> str:
    """Format a number of levels: `0`, `1`, `12.58`, `0.029`, `<0.001`."""
    if value == 0:
        return "0"
    return "<0.001" if value < 0.001 else f"{value:.3f}" if value < 1 else f"{value:.4g}"


def show_figures(levels: Levels | None) -> list[str]:
    """Format maximum, 99.9th percentile and mean."""
    return ["-"] * 3 if levels is None else [show_levels(x) for x in (levels.max, levels.p999, levels.mean)]


def show_allowed(row: Row) -> str:
    """Format a row's limit; empty if it has none."""
    return "" if row.allowed is None else f"{row.allowed:g}" if row.allowed else "equal"


def stage_of(row: Row, report: Report) -> str:
    """The name of the row's stage; the last stage is marked as the whole pipeline."""
    return f"{row.stage}, whole" if row.number == len(report.stages) else row.stage


def show_logit(difference: float) -> str:
    """Format a difference of logits in six characters: two significant digits, or one if it is small."""
    if difference >= 10:
        return f"{difference:.0f}"
    return f"{difference:.2g}" if difference >= 0.001 or not difference else f"{difference:.0e}"


def _pairs(report: Report, pairs: Sequence[Pair]) -> Iterator[RenderableType]:
    heading = _table()
    for line in _HEADINGS:
        heading.add_row(*line, style="dim")
    yield heading
    yield Rule(style="dim")
    for pair in pairs:
        title = Text(f"{pair.a} against {pair.b}", style="bold")
        if pair.asked:
            title.append(" BREACH" if pair.breach else " PASS", style="bold red" if pair.breach else "bold green")
            title.append(f"  {pair.asked}", style="dim")
        yield title
        table = _table()
        for row in pair.rows:
            cells = [
                *show_figures(row.own),
                *show_figures(row.hostile),
                f"{row.differ}/{row.images}",
                show_allowed(row),
            ]
            table.add_row(f"  {stage_of(row, report)}", *cells, style="red" if row.breach else "")
        found = {logits.kind: logits for logits in pair.logits}
        if found:
            both = [found.get(kind) for kind in ("own", "hostile")]
            table.add_row("  logits", *(cell for logits in both for cell in _logit_cells(logits)))
            table.add_row("  top-1 flips", *(cell for logits in both for cell in ("", _flips(logits), "")))
        yield table


def _table() -> Table:
    table = Table.grid()
    for i, width in enumerate(_WIDTHS):
        table.add_column(width=width, justify="left" if i == 0 else "right", overflow="fold")
    return table


def _logit_cells(logits: Logits | None) -> list[str]:
    return ["-", "", "-"] if logits is None else [show_logit(logits.max), "", show_logit(logits.mean)]


def _flips(logits: Logits | None) -> str:
    return "-" if logits is None else f"{logits.flips}/{logits.images}"


def _section(title: str, lines: Sequence[RenderableType]) -> list[RenderableType]:
    return [Text(f"\n{title}", style="bold"), *(Padding(line, (0, 0, 0, 2)) for line in lines)]


def _ways(report: Report) -> Table:
    table = Table.grid(padding=(0, 2))
    for way in report.ways:
        table.add_row(way.name, way.about if way.missing is None else f"skipped: {way.missing}")
    return table
