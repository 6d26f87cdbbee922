"""Renders a report as one self-contained HTML file: tables, and pictures of the images that differ most."""

from __future__ import annotations

import base64
import html
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

from gpuflow.parity.report import Logits, Pair, Picture, Report
from gpuflow.parity.text import (
    NAIVE_TITLE,
    notes,
    show_allowed,
    show_figures,
    show_levels,
    show_logit,
    stage_of,
    verdict,
)
from gpuflow.runtime.files import atomic_write

__all__ = ["data_uri", "page", "write_report"]

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
    counts = ", ".join(f"{count} {kind}" for kind, count in report.images.items())
    facts = {
        "pipeline": _code("\n".join(report.stages)),
        "preprocessing": _code(report.preprocessing),
        "images": html.escape(counts),
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
    body += ["<h2>What decodes</h2>", _ways(report), "<h2>Notes</h2>", _list(notes(report))]
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    body.append(f"<h2>Versions</h2><p>{html.escape(versions)}</p>")
    head = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{outcome.upper()}: parity of {html.escape(report.file)}</title><style>{_STYLE}</style></head>"
    )
    return "\n".join([head, "<body><main>", *body, "</main></body></html>", ""])


def _code(text: str) -> str:
    return f"<code>{html.escape(text)}</code>"


def _list(lines: Iterator[str]) -> str:
    return f"<ul>{''.join(f'<li>{html.escape(line)}</li>' for line in lines)}</ul>"


# --- tables -----------------------------------------------------------------------------------------------------------


def _table(head: Sequence[Sequence[str]], rows: Sequence[tuple[str, Sequence[str]]]) -> str:
    """Render a table from rows of (CSS class, cells). Cells are HTML; the first cell of a row is its heading."""
    heads = "".join(f"<tr>{''.join(cells)}</tr>" for cells in head)
    lines = (
        f'<tr class="{kind}"><th scope="row">{cells[0]}</th>{"".join(f"<td>{cell}</td>" for cell in cells[1:])}</tr>'
        for kind, cells in rows
    )
    return f'<div class="scroll"><table><thead>{heads}</thead><tbody>{"".join(lines)}</tbody></table></div>'


def _heads(name: str, figures: Sequence[str], rest: Sequence[str]) -> list[list[str]]:
    """Two heading lines, with the figures once for own images and once for hostile images."""
    groups = [f'<th colspan="{len(figures)}">{kind} images</th>' for kind in ("own", "hostile")]
    return [
        [f'<th rowspan="2">{name}</th>', *groups, *(f'<th rowspan="2">{one}</th>' for one in rest)],
        [f"<th>{figure}</th>" for figure in (*figures, *figures)],
    ]


def _pair(report: Report, pair: Pair) -> str:
    rows = []
    for row in pair.rows:
        cells = [
            stage_of(row, report),
            *show_figures(row.own),
            *show_figures(row.hostile),
            f"{row.differ} of {row.images}",
        ]
        cells += [show_allowed(row)] if pair.asked else []
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
        found = {logits.kind: logits for logits in pair.logits}
        cells = [cell for kind in ("own", "hostile") for cell in _logit_figures(found.get(kind))]
        parts.append(_table(_heads("the model", ("max", "mean", "flips"), []), [("", ["logits", *cells])]))
    differing = [picture for picture in pair.pictures if picture.difference.any()]
    parts += [_picture(pair, picture) for picture in differing or pair.pictures[:1]]
    return f"<section>{''.join(parts)}</section>"


def _logit_figures(logits: Logits | None) -> list[str]:
    if logits is None:
        return ["-"] * 3
    return [show_logit(logits.max), show_logit(logits.mean), f"{logits.flips} of {logits.images}"]


def _summary(pairs: Sequence[Pair]) -> str:
    """One line per naive way: its mean difference on the user's own images as a bar, and its flips."""
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


def _ways(report: Report) -> str:
    rows = [
        (
            "" if way.missing is None else "skipped",
            [html.escape(way.name), html.escape(way.about or f"skipped: {way.missing}")],
        )
        for way in report.ways
    ]
    return _table([], rows).replace("<table>", '<table class="text">')


# --- pictures ---------------------------------------------------------------------------------------------------------


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


def data_uri(pixels: NDArray[np.uint8]) -> str:
    """Encode RGB or gray pixels, uint8 HWC, as the data URI of a PNG."""
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
.text td { text-align: left; width: 100%; overflow-wrap: anywhere; } .skipped > * { color: var(--gray); }
.wide { width: 50%; } td:has(.bar) { vertical-align: middle; }
.bar { display: block; height: .8rem; background: var(--bar); border-radius: .15rem; }
.images { display: grid; grid-template-columns: repeat(3, minmax(0, 14rem)); gap: .3rem .8rem; margin-top: .8rem; }
.images p { grid-column: 1 / -1; margin: 0; font-size: .85rem; overflow-wrap: anywhere; }
figure { margin: 0; } figcaption { font-size: .8rem; color: var(--gray); }
img { width: 100%; max-height: 22rem; object-fit: contain; object-position: left top; image-rendering: pixelated;
  background: #000; display: block; }
li { overflow-wrap: anywhere; }
"""
