"""`gpuflow show`: what a pipeline's batches look like, as one self-contained HTML page."""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from gpuflow.arrays import Bools, Bytes, Floats
from gpuflow.config import Config
from gpuflow.loader.assemble import build_loader
from gpuflow.loader.batch import Batch
from gpuflow.parity.measure import Scale
from gpuflow.parity.report import data_uri, html_page
from gpuflow.pipeline.program import Program
from gpuflow.pipeline.records import GEOMETRIC, Field
from gpuflow.pipeline.views import named_programs
from gpuflow.sources import fields_of, has_labels

_NAMED_CLASSES = 3
"""Of a label with a weight for each class, the classes that are named."""
_COLOURS = ("#e69f00", "#56b4e9", "#009e73", "#f0e442", "#0072b2", "#d55e00", "#cc79a7")
"""Of classes, or of objects without one (Okabe and Ito's palette for colour-blind readers)."""
_DARK = "#0072b2"
"""The colour on which names are white; on the others they are black, so that each can be read."""
_PAIRED = ("#56b4e9", "#e69f00")
"""Of the first and the second keypoint of a pair that horizontal flips exchange."""
_MASK_SHARE = 0.45
_LETTER = 0.6
"""How wide a letter of a name is, in font sizes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """An object in an image, in pixels of the image. box: x1, y1, x2, y2. mask: bool [H, W]. keypoints: [K, 3].

    colour: a number; equal ones are drawn in the same colour. pairs: keypoints that horizontal flips exchange.
    """

    name: str = ""
    colour: int = 0
    box: tuple[float, float, float, float] | None = None
    mask: Bools | None = None
    keypoints: Floats | None = None
    pairs: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Shown:
    """A sample of a batch.

    images: uint8 HWC, RGB or gray, by the names of their views; of a pipeline without views the name is empty.
    label: in words; empty where the source has none. targets: the objects in its image. notes: its other fields.
    """

    index: int
    path: str
    label: str
    valid: bool
    images: Mapping[str, Bytes]
    targets: Sequence[Target] = field(default_factory=tuple)
    notes: Sequence[str] = field(default_factory=tuple)


def samples_of(config: Config, name: str, count: int, *, epoch: int = 0, device: str = "cpu") -> list[Shown]:
    """Return the first samples of an epoch as a loop gets them; those of an incomplete last batch, too.

    Args:
        count: how many; fewer if the epoch has fewer.
        device: where they are decoded and transformed.
    """
    shown: list[Shown] = []
    spec = config.pipelines[name]
    whole = spec.model_copy(update={"batch": spec.batch.model_copy(update={"drop_last": False})})
    config = replace(config, pipelines={**config.pipelines, name: whole})
    with build_loader(config, name, rank=0, world_size=1, device=device) as loader:
        views = [(*view, Scale.of(view[2])) for view in named_programs(config.any_program(name))]
        labelled, fields = has_labels(loader.dataset), fields_of(loader.dataset)
        loader.set_epoch(epoch)
        loader.audited = False
        for batch in loader:
            for i in range(len(batch.indices)):
                index = int(batch.indices[i])
                shown.append(
                    Shown(
                        index=index,
                        path=loader.dataset.path(index),
                        label=_label(batch.labels, i, loader.classes) if labelled else "",
                        valid=bool(batch.valid[i]),
                        images=dict(picture for view in views for picture in _pictures(*view, batch, i)),
                        targets=list(_targets(batch, i, fields)),
                        notes=_notes(batch, i, fields),
                    )
                )
                if len(shown) == count:
                    return shown
    return shown


def _pictures(
    view: str, count: int, program: Program, scale: Scale, batch: Batch, i: int
) -> Iterator[tuple[str, Bytes]]:
    """Yield each image of a view of sample i as a picture with its title. view: empty without views."""
    for number, images in enumerate(batch.views[view] if view else [batch.images], start=1):
        levels = scale.levels(images[i])
        image = np.ascontiguousarray(levels[..., ::-1]) if program.result.color == "bgr" else levels
        yield view if count == 1 else f"{view} {number}", image


def _targets(batch: Batch, i: int, fields: Sequence[Field]) -> Iterator[Target]:
    """Yield what is drawn on sample i: boxes, each class of masks of levels, masks of instances, and keypoints.

    Masks of instances and keypoints have the colours of the first field of boxes; without one, a colour a row.
    """
    colours: list[int] = []
    for one in sorted(fields, key=lambda one: one.type != "boxes"):
        if one.type not in GEOMETRIC:
            continue
        values = batch.fields[one.name][i].cpu().numpy()
        if one.type == "boxes":
            boxes = [_box(batch, i, one, number) for number in range(len(values))]
            colours = colours or [box.colour for box in boxes]
            yield from boxes
        elif one.type == "mask" and not one.instances:
            yield from (Target(colour=int(k) - 1, mask=values == k) for k in np.unique(values) if k > 0)
        else:
            for number, row in enumerate(values):
                drawn = {one.type: row > 0 if one.type == "mask" else row}
                yield Target(colour=colours[number] if colours else number, pairs=one.flip_pairs, **drawn)


def _box(batch: Batch, i: int, boxes: Field, number: int) -> Target:
    """Return a box; its colour is that of its class if it has one."""
    x1, y1, x2, y2 = batch.fields[boxes.name][i][number].tolist()
    label = int(batch.fields[boxes.labels][i][number]) if boxes.labels else number
    name = "" if not boxes.labels else boxes.classes[label] if label < len(boxes.classes) else str(label)
    return Target(name=name, colour=label, box=(x1, y1, x2, y2))


def _notes(batch: Batch, i: int, fields: Sequence[Field]) -> list[str]:
    """Return the fields that are not drawn, as text."""
    values = [(one.name, batch.fields[one.name][i]) for one in fields if one.type in ("number", "text", "any")]
    return [f"{name}: {value.item() if isinstance(value, torch.Tensor) else value}" for name, value in values]


def _label(labels: Any, i: int, classes: Sequence[str]) -> str:
    """Return a sample's label in words: a class, the classes with the largest weights, or numbers."""
    label = labels[i]
    if not label.is_floating_point() and label.ndim == 0:
        return classes[int(label)] if int(label) < len(classes) else str(int(label))
    if label.ndim == 1 and len(label) == len(classes):
        weights = sorted(zip(label.tolist(), classes, strict=True), reverse=True)
        named = [(weight, name) for weight, name in weights[:_NAMED_CLASSES] if weight > 0]
        return ", ".join(name if weight == 1 else f"{name} {weight:.2f}" for weight, name in named) or "none"
    return ", ".join(f"{value:g}" for value in label.reshape(-1).tolist())


# --- the page ---------------------------------------------------------------------------------------------------------


def page(title: str, stages: str, samples: Sequence[Shown]) -> str:
    """Render samples as one HTML page without links to other files. stages: one or several lines of text."""
    pairs = dict.fromkeys(pair for one in samples for target in one.targets for pair in target.pairs)
    legend = ", ".join(" and ".join(map(_LEGEND.format, _PAIRED, pair)) for pair in pairs)
    body = [
        f"<header><h1>{html.escape(title)}</h1><p><code>{html.escape(stages)}</code></p>",
        f"<p>Keypoints that horizontal flips exchange: {legend}</p></header>" if pairs else "</header>",
        f'<div class="{"samples views" if any(len(one.images) > 1 for one in samples) else "samples"}">',
        *map(_card, samples),
        "</div>",
    ]
    return html_page(title, _STYLE, body)


def _card(sample: Shown) -> str:
    pictures = "".join(_picture(name, image, sample) for name, image in sample.images.items())
    notes = "".join(f'<p class="note">{html.escape(note)}</p>' for note in sample.notes)
    wrapped = "" if sample.valid else '<span class="badge">wrapped</span>'
    several = len(sample.images) > 1  # a row that the keyboard can scroll
    scrolls = f' tabindex="0" role="group" aria-label="views of sample {sample.index}"' if several else ""
    return (
        f'<section><div class="row"{scrolls}>{pictures}</div>'
        f'<p class="label">{html.escape(sample.label)} {wrapped}</p>{notes}'
        f'<p class="path">{sample.index}: {html.escape(sample.path)}</p></section>'
    )


def _picture(view: str, image: Bytes, sample: Shown) -> str:
    height, width = image.shape[:2]
    objects = ", ".join(dict.fromkeys(target.name for target in sample.targets if target.name))
    spoken = "; ".join(filter(None, [f"sample {sample.index}", sample.label, view, objects]))  # for screen readers
    coloured = [(_COLOURS[target.colour % len(_COLOURS)], target) for target in sample.targets]
    for colour, target in coloured:
        if target.mask is not None:
            image = _tinted(image, target.mask, colour)
    marks = "".join(_marks(colour, target, height, width) for colour, target in coloured)
    marks += "".join(_name_tag(colour, target, height, width) for colour, target in coloured)
    caption = f"<figcaption>{html.escape(view)}</figcaption>" if view else ""
    return (
        f'<figure><svg viewBox="0 0 {width} {height}" role="img" aria-label="{html.escape(spoken)}">'
        f'<image width="{width}" height="{height}" href="{data_uri(image)}"/>{marks}</svg>{caption}</figure>'
    )


def _tinted(image: Bytes, mask: Bools, colour: str) -> Bytes:
    rgb = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)], np.float64)
    tinted = np.repeat(image, 3, axis=2) if image.shape[2] == 1 else image.copy()
    tinted[mask] = (tinted[mask] * (1 - _MASK_SHARE) + rgb * _MASK_SHARE).astype(np.uint8)
    return tinted


def _marks(colour: str, target: Target, height: int, width: int) -> str:
    """Render a target's box and visible keypoints, with their numbers, as SVG in an image of this size."""
    parts = []
    if target.box is not None:
        x1, y1, x2, y2 = target.box
        parts.append(
            f'<rect x="{x1:.2f}" y="{y1:.2f}" width="{x2 - x1:.2f}" height="{y2 - y1:.2f}" stroke="{colour}" '
            'fill="none" stroke-width="2" vector-effect="non-scaling-stroke"/>'
        )
    sides, size = dict[int, str](), max(height, width) / 90
    unpaired = "#fff" if target.pairs else colour
    for pair in target.pairs:
        sides |= zip(pair, _PAIRED, strict=True)
    for number, (x, y, visible) in enumerate(target.keypoints.tolist() if target.keypoints is not None else ()):
        if visible:
            parts.append(
                f'<circle cx="{x:.2f}" cy="{y:.2f}" r="{size:.2f}" fill="{sides.get(number, unpaired)}"/>'
                f'<text class="point" x="{x + 2.5 * size:.2f}" y="{y:.2f}" font-size="{4 * size:.2f}">{number}</text>'
            )
    return "".join(parts)


def _name_tag(colour: str, target: Target, height: int, width: int) -> str:
    """Render a box's name on a plate above it, or within it where that is outside the image, as SVG."""
    if target.box is None or not target.name:
        return ""
    x, y, *_ = target.box
    name, size = target.name, max(height, width) / 24
    plate = size * (_LETTER * len(name) + 0.6), size * 1.35
    left, top = max(min(x, width - plate[0]), 0), y - plate[1] if y >= plate[1] else max(y, 0)
    ink = "#fff" if colour == _DARK else "#111"
    return (
        f'<rect x="{left:.2f}" y="{top:.2f}" width="{plate[0]:.2f}" height="{plate[1]:.2f}" fill="{colour}"/>'
        f'<text x="{left + plate[0] / 2:.2f}" y="{top + size:.2f}" font-size="{size:.2f}" fill="{ink}">'
        f"{html.escape(name)}</text>"
    )


_LEGEND = '<b style="color:{}">\u25cf</b> {}'
_STYLE = """
:root { color-scheme: light dark; --ink: #222; --gray: #6b6b6b; --rule: #ddd; --paper: #fff; --card: #f7f7f5; }
@media (prefers-color-scheme: dark) { :root { --ink: #e8e6e3; --gray: #a09d98; --rule: #3a3a3c; --paper: #17181a;
  --card: #1f2023; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 15px/1.45 system-ui, "DejaVu Sans", sans-serif; }
main { max-width: 80rem; margin: 0 auto; padding: 1.5rem 1rem 4rem; }
header { margin-bottom: 1rem; }
h1 { font-size: 1.5rem; margin: 0; }
code { font: .85em/1.45 ui-monospace, "DejaVu Sans Mono", monospace; overflow-wrap: anywhere; white-space: pre-line;
  color: var(--gray); }
.samples { display: grid; grid-template-columns: repeat(auto-fill, minmax(14rem, 1fr)); gap: .8rem; }
.samples.views { grid-template-columns: 1fr; }
section { background: var(--card); border: 1px solid var(--rule); border-radius: .5rem; padding: .6rem; min-width: 0; }
.row { display: flex; flex-wrap: wrap; gap: .4rem; }
figure { margin: 0; flex: 1 1 0; } .views .row { flex-wrap: nowrap; overflow-x: auto; }
.views figure { flex: 0 1 9rem; min-width: 5rem; }
figcaption { font-size: .78rem; color: var(--gray); }
svg { display: block; width: 100%; height: auto; max-height: 30rem; background: #000; }
text { font-family: system-ui, "DejaVu Sans", sans-serif; font-weight: 600; text-anchor: middle; }
.point { fill: #fff; stroke: #111; stroke-width: .2em; paint-order: stroke; }
p { margin: .3rem 0 0; } .label { font-weight: 600; overflow-wrap: anywhere; }
.path, .note { font-size: .78rem; color: var(--gray); overflow-wrap: anywhere; }
.badge { font-size: .75rem; font-weight: normal; border: 1px solid; border-radius: 1rem; padding: 0 .5rem; }
"""
