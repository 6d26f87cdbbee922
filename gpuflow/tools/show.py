"""`gpuflow show`: what a pipeline's batches look like, as one self-contained HTML page."""

from __future__ import annotations

import base64
import html
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import cv2
import numpy as np
import torch
from numpy.typing import NDArray

from gpuflow.config import Config
from gpuflow.loader.assemble import build_loader
from gpuflow.loader.batch import Batch
from gpuflow.parity.measure import Scale

__all__ = ["Shown", "Target", "page", "samples_of"]

_NAMED_CLASSES = 3
"""Of a label with a weight for each class, the classes that are named."""
_COLOURS = ("#e69f00", "#56b4e9", "#009e73", "#f0e442", "#0072b2", "#d55e00", "#cc79a7")
"""Of boxes, masks and keypoints, one after the other (Okabe and Ito's palette for colour-blind readers)."""
_MASK_SHARE = 0.45


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """An object in an image, in pixels of the image. box: x1, y1, x2, y2. mask: bool [H, W]. keypoints: [K, 3]."""

    name: str = ""
    box: tuple[float, float, float, float] | None = None
    mask: NDArray[np.bool_] | None = None
    keypoints: NDArray[np.float64] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Shown:
    """A sample of a batch.

    images: uint8 HWC, RGB or gray, by the names of their views; of a pipeline without views the name is empty.
    label: in words. targets: the objects in its image.
    """

    index: int
    path: str
    label: str
    valid: bool
    images: Mapping[str, NDArray[np.uint8]]
    targets: Sequence[Target] = field(default_factory=tuple)


def samples_of(config: Config, name: str, count: int, *, epoch: int = 0, device: str = "cpu") -> list[Shown]:
    """The first samples of an epoch of a pipeline, as a loop gets them.

    Args:
        count: how many; fewer if the epoch has fewer.
        device: where they are decoded and transformed.
    """
    shown: list[Shown] = []
    with build_loader(config, name, rank=0, world_size=1, device=device) as loader:
        scales: dict[str, Scale] = {}
        loader.set_epoch(epoch)
        for batch in loader:
            for i in range(len(batch.indices)):
                images = {}
                for view, tensor in _views(batch, i):
                    key = view.split(" ")[0]
                    if key not in scales:
                        scales[key] = Scale.of(config.program(name))
                    images[view] = _rgb(scales[key].levels(tensor), config.program(name).result.color)
                index = int(batch.indices[i])
                shown.append(
                    Shown(
                        index=index,
                        path=loader.dataset.path(index),
                        label=_label(batch.labels, i, loader.classes),
                        valid=bool(batch.valid[i]),
                        images=images,
                    )
                )
                if len(shown) == count:
                    return shown
    return shown


def _views(batch: Batch, i: int) -> Iterator[tuple[str, torch.Tensor]]:
    yield "", batch.images[i]


def _rgb(image: NDArray[np.uint8], color: str) -> NDArray[np.uint8]:
    return np.ascontiguousarray(image[..., ::-1]) if color == "bgr" else image


def _label(labels: Any, i: int, classes: Sequence[str]) -> str:
    """A sample's label in words: a class, the classes with the largest weights, or numbers."""
    label = labels[i]
    if not label.is_floating_point() and label.ndim == 0:
        return classes[int(label)] if int(label) < len(classes) else str(int(label))
    if label.ndim == 0:
        return f"{float(label):g}"
    if len(label) == len(classes):
        weights = sorted(((float(weight), name) for weight, name in zip(label, classes, strict=True)), reverse=True)
        named = [(weight, name) for weight, name in weights[:_NAMED_CLASSES] if weight > 0]
        return ", ".join(name if weight == 1 else f"{name} {weight:.2f}" for weight, name in named) or "none"
    return ", ".join(f"{float(value):g}" for value in label)


# --- the page ---------------------------------------------------------------------------------------------------------


def page(title: str, stages: str, samples: Sequence[Shown]) -> str:
    """Render samples as one HTML page without links to other files."""
    head = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style></head>"
    )
    body = [
        f"<header><h1>{html.escape(title)}</h1><p><code>{html.escape(stages)}</code></p></header>",
        f'<div class="{"samples views" if any(len(one.images) > 1 for one in samples) else "samples"}">',
        *map(_card, samples),
        "</div>",
    ]
    return "\n".join([head, "<body><main>", *body, "</main></body></html>", ""])


def _card(sample: Shown) -> str:
    pictures = "".join(_picture(name, image, sample.targets) for name, image in sample.images.items())
    wrapped = "" if sample.valid else '<span class="badge">wrapped</span>'
    return (
        f'<section><div class="row">{pictures}</div><p class="label">{html.escape(sample.label)} {wrapped}</p>'
        f'<p class="path">{sample.index}: {html.escape(sample.path)}</p></section>'
    )


def _picture(view: str, image: NDArray[np.uint8], targets: Sequence[Target]) -> str:
    height, width = image.shape[:2]
    coloured = [(_COLOURS[i % len(_COLOURS)], target) for i, target in enumerate(targets)]
    for colour, target in coloured:
        if target.mask is not None:
            image = _tinted(image, target.mask, colour)
    marks = "".join(_marks(colour, target, max(height, width)) for colour, target in coloured)
    caption = f"<figcaption>{html.escape(view)}</figcaption>" if view else ""
    return (
        f'<figure><svg viewBox="0 0 {width} {height}" role="img">'
        f'<image width="{width}" height="{height}" href="{_data_uri(image)}"/>{marks}</svg>{caption}</figure>'
    )


def _tinted(image: NDArray[np.uint8], mask: NDArray[np.bool_], colour: str) -> NDArray[np.uint8]:
    rgb = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)], np.float64)
    tinted = np.repeat(image, 3, axis=2) if image.shape[2] == 1 else image.copy()
    tinted[mask] = (tinted[mask] * (1 - _MASK_SHARE) + rgb * _MASK_SHARE).astype(np.uint8)
    return tinted


def _marks(colour: str, target: Target, side: int) -> str:
    """A target's box, name and visible keypoints as SVG."""
    parts = []
    if target.box is not None:
        x1, y1, x2, y2 = target.box
        parts.append(
            f'<rect x="{x1:.2f}" y="{y1:.2f}" width="{x2 - x1:.2f}" height="{y2 - y1:.2f}" stroke="{colour}" '
            'fill="none" stroke-width="2" vector-effect="non-scaling-stroke"/>'
        )
        if target.name:
            size = side / 20
            parts.append(
                f'<text x="{x1 + size / 4:.2f}" y="{max(y1, 0) + size:.2f}" font-size="{size:.2f}" fill="{colour}">'
                f"{html.escape(target.name)}</text>"
            )
    for x, y, visible in target.keypoints.tolist() if target.keypoints is not None else ():
        if visible:
            parts.append(f'<circle cx="{x:.2f}" cy="{y:.2f}" r="{side / 90:.2f}" fill="{colour}"/>')
    return "".join(parts)


def _data_uri(pixels: NDArray[np.uint8]) -> str:
    """Encode RGB or gray pixels as the data URI of a PNG."""
    encoded = cv2.imencode(".png", np.ascontiguousarray(pixels[..., ::-1]))[1]
    return f"data:image/png;base64,{base64.b64encode(encoded.tobytes()).decode()}"


_STYLE = """
:root { color-scheme: light dark; --ink: #222; --gray: #6b6b6b; --rule: #ddd; --paper: #fff; --card: #f7f7f5; }
@media (prefers-color-scheme: dark) { :root { --ink: #e8e6e3; --gray: #a09d98; --rule: #3a3a3c; --paper: #17181a;
  --card: #1f2023; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 15px/1.45 system-ui, "DejaVu Sans", sans-serif; }
main { max-width: 80rem; margin: 0 auto; padding: 1.5rem 1rem 4rem; }
header { margin-bottom: 1rem; }
h1 { font-size: 1.5rem; margin: 0; }
code { font: .85em/1.45 ui-monospace, "DejaVu Sans Mono", monospace; overflow-wrap: anywhere; color: var(--gray); }
.samples { display: grid; grid-template-columns: repeat(auto-fill, minmax(14rem, 1fr)); gap: .8rem; }
.samples.views { grid-template-columns: 1fr; }
section { background: var(--card); border: 1px solid var(--rule); border-radius: .5rem; padding: .6rem; min-width: 0; }
.row { display: flex; flex-wrap: wrap; gap: .4rem; }
figure { margin: 0; flex: 1 1 0; } .views figure { flex: 0 0 9rem; }
figcaption { font-size: .78rem; color: var(--gray); }
svg { display: block; width: 100%; height: auto; max-height: 30rem; background: #000; }
text { font-family: system-ui, "DejaVu Sans", sans-serif; font-weight: 600; paint-order: stroke; stroke: #000a;
  stroke-width: .15em; }
p { margin: .3rem 0 0; } .label { font-weight: 600; overflow-wrap: anywhere; }
.path { font-size: .78rem; color: var(--gray); overflow-wrap: anywhere; }
.badge { font-size: .75rem; font-weight: normal; border: 1px solid; border-radius: 1rem; padding: 0 .5rem; }
"""
