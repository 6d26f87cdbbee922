"""Writes what was imported as a YAML file with comments, which `gpuflow check` accepts."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gpuflow.migration.imported import Entry, Imported

_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_./-]*")
_WORDS = ("true", "false", "null", "yes", "no", "on", "off", "y", "n")
_COLUMN, _WIDTH = 40, 118
_BATCH = {"train": "{size: 64, drop_last: true}", "val": "{size: 64}"}


def to_yaml(found: Sequence[Imported], *, version: str) -> str:
    """The file. found: what was imported, of which one gives the pipeline `train` and one `val`, or one both.

    version: gpuflow's.
    """
    text = "\n".join((*_header(found, version), *_body(found))) + "\n"
    return text.encode(errors="backslashreplace").decode()  # names of files, in comments, need not be text


def _header(found: Sequence[Imported], version: str) -> Iterator[str]:
    yield f"# Imported by gpuflow {version}: gpuflow import {' '.join(one.source for one in found)}"
    yield "#"
    for sentence in dict.fromkeys(sentence for one in found for sentence in one.matches):
        yield from _comment(sentence)
    if gaps := [problem for one in found for problem in one.gaps]:
        yield "#"
        yield "# Not carried over:"
        for problem in gaps:
            yield from _comment(f"- {problem}", hang="  ")
    yield "#"
    yield "# Edit the source and the batch sizes; add serve.model when there is a model."
    for one in found:
        if "val" in one.pipelines:
            against = f" --against {one.source}" if one.preset is None else ""
            yield f"# Prove it on images of yours: gpuflow parity FILE{against}"
    yield ""


def _comment(text: str, hang: str = "") -> Iterator[str]:
    lines = textwrap.wrap(text, _WIDTH - 2, break_long_words=False, break_on_hyphens=False, subsequent_indent=hang)
    return (f"# {line}" for line in lines)


def _body(found: Sequence[Imported]) -> Iterator[str]:
    pipelines = {name: (one, entries) for one in found for name, entries in one.pipelines.items()}
    both = len(pipelines) == 2
    parts = "split: {train: 0.9, val: 0.1}, " if both else ""
    yield f"source: {{folder: data/photos, {parts}seed: 0}}"
    if "val" in pipelines:
        entries = pipelines["val"][1]
        yield f"preprocess: &eval{'' if entries else ' []':24}# shared by val and serve: cannot diverge"
        yield from _entries(entries, "  ")
    yield "pipelines:"
    if "train" in pipelines:
        one, entries = pipelines["train"]
        yield "  train:"
        yield from _preset(one, "    ")
        yield "    stages:" if entries else "    stages: []"
        yield from _entries(entries, "      ")
        yield f"    batch: {_BATCH['train']}"
        yield "    shuffle: true"
    if "val" in pipelines:
        one, _ = pipelines["val"]
        yield "  val:"
        yield from _preset(one, "    ")
        yield "    stages: *eval"
        yield f"    batch: {_BATCH['val']}"
        yield "serve:"
        yield from _preset(one, "  ")
        yield "  stages: *eval"
        if one.model is not None:
            yield f"  model: {_flow(one.model)}"


def _preset(one: Imported, indent: str) -> Iterator[str]:
    if one.preset is not None:
        for key in ("preset", "height", "width", "color"):
            yield f"{indent}{key}: {_flow(getattr(one.preset, key))}"


def _entries(entries: Sequence[Entry], indent: str) -> Iterator[str]:
    for entry in entries:
        line = f"{indent}- {entry.stage}: {_flow(entry.parameters)}" if entry.parameters else f"{indent}- {entry.stage}"
        yield f"{line:{_COLUMN}}  # {entry.comment}" if entry.comment else line


def _flow(value: Any) -> str:
    """A value on one line of YAML."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_flow(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_flow, value)) + "]"
    if isinstance(value, str) and _PLAIN.fullmatch(value) and value.lower() not in _WORDS:
        return value
    return json.dumps(value, ensure_ascii=False)
