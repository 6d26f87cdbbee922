"""The results of a study: as values with their JSON form, for the terminal, and as one self-contained HTML page."""

from __future__ import annotations

import base64
import html
import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from gpuflow.arrays import Bytes
from gpuflow.parity.measure import Levels
from gpuflow.parity.others import NAIVE, is_library
from gpuflow.runtime.files import atomic_write


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """Compares two ways after one of the stages.

    stage: the stage. number: how many stages have run, this one included.
    images: how many images were compared. differ: how many of them are not equal.
    own, hostile: differences over all images of that kind; None if there are none.
    allowed: the limit in levels, 0 for equal, None for no limit. noise: levels that rounding to 16 or 32 bits may add.
    refused: images that both refuse. alone: images that only one of them refuses, or for which the results differ in
    shape or dtype, with the reason.
    reference_refuses: images that only the reference refuses, with the reason; they do not count against the other way.
    causes: why images differ by more than allowed, or only one way accepts them, with these images' names.
    pixels: the share of pixels that are apart by more than the rounding of floats. value: the largest difference of the
    results themselves, after normalize for instance; infinite where one of two values is NaN or infinite.
    """

    stage: str
    number: int
    allowed: float | None
    noise: float
    images: int
    differ: int
    own: Levels | None
    hostile: Levels | None
    refused: tuple[str, ...]
    alone: tuple[tuple[str, str], ...]
    reference_refuses: tuple[tuple[str, str], ...]
    causes: tuple[tuple[str, tuple[str, ...]], ...] = ()
    pixels: float = 0.0
    value: float = 0.0

    @property
    def max(self) -> float:
        """Return the largest difference, in levels."""
        return max((levels.max for levels in (self.own, self.hostile) if levels is not None), default=0.0)

    @property
    def apart(self) -> bool:
        """Return True if the two ways differ by more than allowed."""
        if self.allowed is None:
            return False
        return self.differ > 0 if self.allowed == 0 else not self.max <= self.allowed + self.noise

    @property
    def breach(self) -> bool:
        """Return True if the ways differ by more than allowed or in the images they accept, or none was compared."""
        return self.allowed is not None and (self.images == 0 or self.apart or bool(self.alone))


@dataclass(frozen=True, kw_only=True, slots=True)
class Logits:
    """Sums up how a model's logits differ for two ways' images of one kind, `own` or `hostile`.

    max, mean: of the differences of logits; infinite where one of two logits is NaN or infinite. flips: the number of
    images whose top prediction differs.
    """

    kind: str
    images: int
    max: float
    mean: float
    flips: int


@dataclass(frozen=True, slots=True, eq=False)
class Picture:
    """Shows one image from both ways, uint8 HWC in RGB. difference [H, W]: each pixel's largest, in levels."""

    name: str
    a: Bytes
    b: Bytes
    difference: NDArray[np.float32]


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """Compares two ways, stage by stage; the last row is the whole pipeline.

    asked: the limit as text; empty if the pair has no limit and is only shown for information.
    skipped: stages that one of them cannot run, with the reason. pictures: the images that differ most.
    faults: differences that make the pair a breach although no image shows them. notes: others that do not.
    """

    a: str
    b: str
    asked: str
    rows: tuple[Row, ...]
    logits: tuple[Logits, ...] = ()
    skipped: tuple[tuple[str, str], ...] = ()
    pictures: tuple[Picture, ...] = ()
    faults: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def breach(self) -> bool:
        """Return True if an image or a fault shows that the pair exceeds its limit."""
        return bool(self.faults) or any(row.breach for row in self.rows)

    def as_dict(self) -> dict[str, Any]:
        """Return everything but the pictures as plain values; None for numbers that are not finite."""
        found = asdict(replace(self, pictures=()))
        del found["pictures"]
        return {
            **found,
            "verdict": ("breach" if self.breach else "pass") if self.asked else None,
            "rows": [
                {
                    **_finite(asdict(row)),
                    **{key: dict(getattr(row, key)) for key in ("alone", "reference_refuses", "causes")},
                    "breach": row.breach,
                }
                for row in self.rows
            ],
            "logits": [_finite(asdict(logits)) for logits in self.logits],
            "skipped": [{"stage": stage, "reason": reason} for stage, reason in self.skipped],
        }


def _finite(values: dict[str, Any]) -> dict[str, Any]:
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in values.items()
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class WayNote:
    """Describes a way. about: its decoder and resizer, with versions. missing: why it did not run, or None."""

    name: str
    about: str
    missing: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """Holds all results of a study.

    stages, preprocessing: the pipeline's lines and its fingerprint. images: the number of images of each kind, `own`,
    `hostile` and `bad`. model: the model that computed logits, or why there was none.
    """

    file: str
    pipeline: str
    stages: tuple[str, ...]
    preprocessing: str
    images: Mapping[str, int]
    model: str
    pairs: tuple[Pair, ...]
    ways: tuple[WayNote, ...]
    versions: Mapping[str, str]
    date: str
    command: str

    @property
    def breach(self) -> bool:
        """Return True if any pair exceeds its limit."""
        return any(pair.breach for pair in self.pairs)

    @property
    def judged(self) -> tuple[Pair, ...]:
        """Return the pairs that have a limit."""
        return tuple(pair for pair in self.pairs if pair.asked)

    @property
    def naive(self) -> tuple[Pair, ...]:
        """Return the pairs that have no limit and are shown for information."""
        return tuple(pair for pair in self.pairs if not pair.asked)

    def as_dict(self) -> dict[str, Any]:
        """Return everything but the pictures as plain values for JSON."""
        return {
            "version": 1,
            "verdict": "breach" if self.breach else "pass",
            **{field.name: getattr(self, field.name) for field in fields(self)},
            "pairs": [pair.as_dict() for pair in self.pairs],
            "ways": [asdict(way) for way in self.ways],
        }


# --- for the terminal -------------------------------------------------------------------------------------------------

NAIVE_TITLE = "What naive sharing would have cost"
_LISTED = 6
_WIDTHS = (18, 6, 8, 8, 9, 8, 8, 8, 7)
_HEADINGS = (
    ("", "own", "", "", "hostile", "", "", "", ""),
    ("after", "max", "99.9 %", "mean", "max", "99.9 %", "mean", "differ", "limit"),
)


def render(report: Report) -> RenderableType:
    """Render the whole report, for 80 columns or more."""
    parts: list[RenderableType] = [
        Text(f"{report.file}, pipeline {report.pipeline}, preprocessing {report.preprocessing}", style="bold"),
        *(Padding(Text(line, style="dim"), (0, 0, 0, 2)) for line in report.stages),
        Text(f"\nDifferences in levels of 0-255, over {_counts(report)} images, up to each stage"),
        *_pair_grids(report, report.judged),
    ]
    if report.naive:
        parts += [Text(f"\n{NAIVE_TITLE}, which is not judged", style="bold"), *_pair_grids(report, report.naive)]
    for title, rows in sections(report):
        table = Table.grid(padding=(0, 2))
        for row in rows:
            table.add_row(*map(Text, row))
        parts += [Text(f"\n{title}", style="bold"), Padding(table, (0, 0, 0, 2))]
    parts.append(Text(f"\n{verdict(report)}", style="bold red" if report.breach else "bold green"))
    return Group(*parts)


def verdict(report: Report) -> str:
    """Return the outcome: `PASS: ...`, or a line `BREACH: ...` for each pair that exceeds its limit."""
    if not report.breach:
        held = ", ".join(f"{pair.a} and {pair.b}" for pair in report.judged)
        skipped = ", ".join(way.name for way in report.ways if way.missing is not None and way.name not in NAIVE)
        summary = f": {figures(report.judged[0])}" if any(is_library(pair.b) for pair in report.judged) else ""
        return f"PASS: {held} agree as they must{summary}{f'; skipped: {skipped}' if skipped else ''}"
    return "\n".join(f"BREACH: {line}" for pair in report.judged for line in breaches(pair))


def figures(pair: Pair) -> str:
    """Say how large a pair's differences are, in levels and of the results themselves, and how many pixels differ."""
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


def sections(report: Report) -> list[tuple[str, list[tuple[str, ...]]]]:
    """Return the sections after the pairs, each with its title and its rows."""
    ways = [(way.name, way.about if way.missing is None else f"skipped: {way.missing}") for way in report.ways]
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    return [("What decodes", [*ways]), ("Notes", [(note,) for note in notes(report)]), ("Versions", [(versions,)])]


def _counts(report: Report) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in report.images.items())


def notes(report: Report) -> Iterator[str]:
    """Yield notes on the comparison that do not fit into a table."""
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
    """Format a number of levels.

    Examples:
        >>> [show_levels(value) for value in (0, 1, 12.5812, 0.0291, 0.0001)]
        ['0', '1', '12.58', '0.029', '<0.001']
    """
    if value == 0:
        return "0"
    return "<0.001" if value < 0.001 else f"{value:.3f}" if value < 1 else f"{value:.4g}"


def row_cells(row: Row, report: Report) -> list[str]:
    """Format a row: the stage; maximum, 99.9th percentile and mean of own and of hostile images; differing; limit."""
    name = f"{row.stage}, whole" if row.number == len(report.stages) else row.stage
    levels = [
        cell
        for one in (row.own, row.hostile)
        for cell in (["-"] * 3 if one is None else map(show_levels, (one.max, one.p999, one.mean)))
    ]
    return [name, *levels, f"{row.differ}/{row.images}", show_allowed(row)]


def logit_cells(pair: Pair) -> list[list[str]]:
    """Format the largest and the mean difference of logits, and the flips, of own and of hostile images."""
    found = {one.kind: one for one in pair.logits}
    return [
        [show_logit(one.max), show_logit(one.mean), f"{one.flips}/{one.images}"] if one is not None else ["-"] * 3
        for one in (found.get("own"), found.get("hostile"))
    ]


def show_allowed(row: Row) -> str:
    """Format a row's limit; empty if it has none."""
    return "" if row.allowed is None else f"{row.allowed:g}" if row.allowed else "equal"


def show_logit(difference: float) -> str:
    """Format a difference of logits in six characters: two significant digits, or one if it is small.

    Examples:
        >>> [show_logit(value) for value in (12.34, 0.1234, 0.0001234)]
        ['12', '0.12', '1e-04']
    """
    if difference >= 10:
        return f"{difference:.0f}"
    return f"{difference:.2g}" if difference >= 0.001 or not difference else f"{difference:.0e}"


def _pair_grids(report: Report, pairs: Sequence[Pair]) -> Iterator[RenderableType]:
    heading = _grid()
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
        table = _grid()
        for row in pair.rows:
            name, *cells = row_cells(row, report)
            table.add_row(f"  {name}", *cells, style="red" if row.breach else "")
        if pair.logits:
            both = logit_cells(pair)
            table.add_row("  logits", *(cell for largest, mean, _ in both for cell in (largest, "", mean)))
            table.add_row("  top-1 flips", *(cell for *_, flips in both for cell in ("", flips, "")))
        yield table


def _grid() -> Table:
    table = Table.grid()
    for i, width in enumerate(_WIDTHS):
        table.add_column(width=width, justify="left" if i == 0 else "right", overflow="fold")
    return table


# --- as a page --------------------------------------------------------------------------------------------------------


_WHITE = 255


def write_report(report: Report, folder: Path) -> tuple[Path, Path]:
    """Write parity.json and report.html into a folder, which is created if it does not exist."""
    folder.mkdir(parents=True, exist_ok=True)
    figures, shown = folder / "parity.json", folder / "report.html"
    for path, text in (
        (figures, json.dumps(report.as_dict(), indent=2, allow_nan=False) + "\n"),
        (shown, page(report)),
    ):
        with atomic_write(path, text=True) as file:
            file.write(text)
    return figures, shown


def page(report: Report) -> str:
    """Render the report as HTML."""
    outcome = "breach" if report.breach else "pass"
    facts = {
        "pipeline": _code("\n".join(report.stages)),
        "preprocessing": _code(report.preprocessing),
        "images": html.escape(_counts(report)),
        "model": html.escape(report.model),
        **({"command": _code(report.command)} if report.command else {}),
        "date": html.escape(report.date),
    }
    body = [
        f"<header><h1>Parity of {html.escape(report.file)}</h1>",
        f'<p class="verdict {outcome}">{html.escape(verdict(report))}</p>',
        f"<dl>{''.join(f'<dt>{key}</dt><dd>{value}</dd>' for key, value in facts.items())}</dl></header>",
        "<h2>What must agree</h2>",
        "<p>Differences in levels of 0-255, up to each stage: of the values as they are where these are pixels, and of "
        "normalized values as the levels that they stand for. 99.9 % of the values are no further apart than the "
        "middle column says. <em>Own</em> images are yours; <em>hostile</em> ones are made to tell decoders and "
        "resizers apart.</p>",
        *(_pair(report, pair) for pair in report.judged),
    ]
    if report.naive:
        body += [
            f"<h2>{NAIVE_TITLE}</h2>",
            "<p>The same images, had training and serving shared no more than a description. Nothing is judged "
            "here.</p>",
            _summary(report.naive),
            *(_pair(report, pair) for pair in report.naive),
        ]
    for title, rows in sections(report):
        escaped = [("", [html.escape(cell) for cell in row]) for row in rows]
        if len(rows[0]) == 1:
            shown = f"<ul>{''.join(f'<li>{line}</li>' for _, (line,) in escaped)}</ul>"
        else:
            shown = _table([], escaped).replace("<table>", '<table class="text">')
        body += [f"<h2>{title}</h2>", shown]
    return html_page(f"{outcome.upper()}: parity of {report.file}", _STYLE, body)


def html_page(title: str, style: str, body: Sequence[str]) -> str:
    """Return a page without links to other files. style: CSS. body: lines of HTML.

    Examples:
        >>> "<title>a &amp; b</title>" in html_page("a & b", "p { margin: 0; }", ["<p>text</p>"])
        True
    """
    head = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{style}</style></head>"
    )
    return "\n".join([head, "<body><main>", *body, "</main></body></html>", ""])


def _code(text: str) -> str:
    return f"<code>{html.escape(text)}</code>"


def _table(head: Sequence[Sequence[str]], rows: Sequence[tuple[str, Sequence[str]]]) -> str:
    """Render a table from rows of (CSS class, cells). Cells are HTML; the first cell of a row is its heading."""
    heads = "".join(f"<tr>{''.join(cells)}</tr>" for cells in head)
    lines = (
        f'<tr class="{kind}"><th scope="row">{cells[0]}</th>{"".join(f"<td>{cell}</td>" for cell in cells[1:])}</tr>'
        for kind, cells in rows
    )
    scroll = '<div class="scroll" tabindex="0" role="group" aria-label="table">'  # which the keyboard can scroll
    return f"{scroll}<table><thead>{heads}</thead><tbody>{''.join(lines)}</tbody></table></div>"


def _heads(name: str, figures: Sequence[str], rest: Sequence[str]) -> list[list[str]]:
    """Return two heading lines, with the figures once for own images and once for hostile images."""
    groups = [f'<th colspan="{len(figures)}">{kind} images</th>' for kind in ("own", "hostile")]
    return [
        [f'<th rowspan="2">{name}</th>', *groups, *(f'<th rowspan="2">{one}</th>' for one in rest)],
        [f"<th>{figure}</th>" for figure in (*figures, *figures)],
    ]


def _pair(report: Report, pair: Pair) -> str:
    rows = []
    for row in pair.rows:
        cells = row_cells(row, report)[: None if pair.asked else -1]
        rows.append(("breach" if row.breach else "", [html.escape(cell) for cell in cells]))
    badge = ""
    if pair.asked:
        outcome = "breach" if pair.breach else "pass"
        badge = f'<span class="badge {outcome}">{outcome.upper()}</span>'
    about = pair.asked or next(way.about for way in report.ways if way.name == pair.b)
    rest = ["images that differ", *(["allowed"] if pair.asked else [])]
    parts = [f"<h3>{html.escape(f'{pair.a} against {pair.b}')} {badge}</h3><p class='about'>{html.escape(about)}</p>"]
    parts.append(_table(_heads("after", ("max", "99.9 %", "mean"), rest), rows))
    if pair.logits:
        cells = ["logits", *itertools.chain.from_iterable(logit_cells(pair))]
        parts.append(_table(_heads("the model", ("max", "mean", "flips"), []), [("", cells)]))
    differing = [picture for picture in pair.pictures if picture.difference.any()]
    parts += [_picture(pair, picture) for picture in differing or pair.pictures[:1]]
    return f"<section>{''.join(parts)}</section>"


def _summary(pairs: Sequence[Pair]) -> str:
    """Render a line per naive way: its mean difference on the user's own images as a bar, and its flips."""
    means = {
        pair.b: levels.mean for pair in pairs if pair.rows and (levels := pair.rows[-1].own or pair.rows[-1].hostile)
    }
    largest = max([*means.values(), 1e-9])
    rows = []
    for pair in pairs:
        flips = next((f"{one.flips} of {one.images}" for one in pair.logits), "-")
        mean = means.get(pair.b, 0.0)
        bar = f'<span class="bar" style="width:{max(100 * mean / largest, 0.5):.1f}%"></span>'
        rows.append(("", [html.escape(pair.b), bar, show_levels(mean), flips]))
    head = ["<th>instead of val</th>", '<th class="wide"></th>', "<th>mean, levels</th>", "<th>top-1 flips</th>"]
    return _table([head], rows)


def _picture(pair: Pair, picture: Picture) -> str:
    """Render both ways' images and their difference, times the largest power of two that keeps it below white."""
    largest = float(picture.difference.max(initial=0))
    factor = 1
    while largest > 0 and 2 * factor * largest <= _WHITE:
        factor *= 2
    amplified = np.clip(picture.difference * factor, 0, _WHITE).astype(np.uint8)
    heat: Any = cv2.cvtColor(cv2.applyColorMap(amplified, cv2.COLORMAP_INFERNO), cv2.COLOR_BGR2RGB)
    amplification = f"difference &times;{factor}; the largest is {show_levels(largest)}"
    figures = (
        (picture.a, html.escape(pair.a)),
        (picture.b, html.escape(pair.b)),
        (heat, amplification if largest else "no difference"),
    )
    shown = "".join(
        f'<figure><img src="{data_uri(pixels)}" alt="{caption}"><figcaption>{caption}</figcaption></figure>'
        for pixels, caption in figures
    )
    return f'<div class="images"><p>{html.escape(picture.name)}</p>{shown}</div>'


def data_uri(pixels: Bytes) -> str:
    """Encode RGB or gray pixels, uint8 HWC, as the data URI of a PNG.

    Examples:
        >>> data_uri(np.zeros((2, 2, 3), np.uint8))
        'data:image/png;base64,iVBOR...'
    """
    encoded = cv2.imencode(".png", np.ascontiguousarray(pixels[..., ::-1]))[1]
    return f"data:image/png;base64,{base64.b64encode(encoded.tobytes()).decode()}"


# The colours of the figures in plots/.
_STYLE = """
:root { color-scheme: light dark; --ink: #222; --gray: #6b6b6b; --rule: #ddd; --paper: #fff; --card: #f7f7f5;
  --pass: #00704f; --breach: #b3440a; --bar: #0072b2; }
@media (prefers-color-scheme: dark) { :root { --ink: #e8e6e3; --gray: #a09d98; --rule: #3a3a3c; --paper: #17181a;
  --card: #1f2023; --pass: #3fb68b; --breach: #f08a4b; --bar: #5aa9dd; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 16px/1.5 system-ui, "DejaVu Sans", sans-serif; }
main { max-width: 62rem; margin: 0 auto; padding: 1.5rem 1rem 4rem; }
h1 { font-size: 1.6rem; margin: 0 0 .5rem; }
h2 { font-size: 1.25rem; margin: 2.5rem 0 .5rem; }
h3 { font-size: 1.05rem; margin: 0; }
.about { color: var(--gray); font-size: .9rem; margin: 0 0 .5rem; }
code { font: .85em/1.45 ui-monospace, "DejaVu Sans Mono", monospace; white-space: pre-wrap; overflow-wrap: anywhere; }
.verdict { font-size: 1.15rem; font-weight: 600; padding: .7rem 1rem; border-left: .35rem solid;
  background: var(--card); margin: .8rem 0 1.2rem; white-space: pre-wrap; }
.pass { color: var(--pass); } .breach { color: var(--breach); }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .25rem 1rem; margin: 0; }
dt { color: var(--gray); } dd { margin: 0; min-width: 0; }
section { background: var(--card); border: 1px solid var(--rule); border-radius: .5rem; padding: 1rem; margin: 1rem 0; }
.badge { font-size: .8rem; border: 1px solid; border-radius: 1rem; padding: .05rem .6rem; margin-left: .3rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .92rem; font-variant-numeric: tabular-nums; width: 100%;
  margin: .3rem 0; }
th, td { padding: .22rem .6rem; text-align: right; border-bottom: 1px solid var(--rule); vertical-align: bottom; }
th { font-weight: 600; } thead th { color: var(--gray); font-weight: normal; } th[colspan] { text-align: center; }
tbody th, thead tr:first-child th:first-child { text-align: left; padding-left: 0; white-space: nowrap; }
tbody tr:last-child > * { border-bottom: 0; }
tr.breach > * { color: var(--breach); font-weight: 600; }
.text td { text-align: left; width: 100%; overflow-wrap: anywhere; }
.wide { width: 50%; } td:has(.bar) { vertical-align: middle; }
.bar { display: block; height: .8rem; background: var(--bar); border-radius: .15rem; }
.images { display: grid; grid-template-columns: repeat(3, minmax(0, 14rem)); gap: .3rem .8rem; margin-top: .8rem; }
.images p { grid-column: 1 / -1; margin: 0; font-size: .85rem; overflow-wrap: anywhere; }
figure { margin: 0; } figcaption { font-size: .8rem; color: var(--gray); }
img { width: 100%; max-height: 22rem; object-fit: contain; object-position: left top; image-rendering: pixelated;
  background: #000; display: block; }
li { overflow-wrap: anywhere; }
"""
