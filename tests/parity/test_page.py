"""The report: JSON with all results, a self-contained page, and a table for 80 columns."""

from __future__ import annotations

import base64
import dataclasses
import json
import os
import re
from html.parser import HTMLParser
from pathlib import Path

import cv2
import numpy as np
import pytest
from rich.console import Console

from gpuflow.parity import Report, render, write_report
from gpuflow.parity.measure import Levels
from gpuflow.parity.report import Logits, Pair, Picture, Row, WayNote, page, show_levels, show_logit

BLACK = np.zeros((4, 6, 3), np.uint8)
SPOT = np.zeros((4, 6), np.float32)
SPOT[1, 2] = 9


def row(stage: str, number: int, allowed: float | None, most: float) -> Row:
    own = Levels(max=most, mean=most / 100, p999=most / 2)
    return Row(
        stage=stage,
        number=number,
        allowed=allowed,
        noise=0,
        images=12,
        differ=int(most > 0),
        own=own,
        hostile=None,
        refused=("empty file",),
        alone=(),
        reference_refuses=(),
    )


def report(served: float = 0) -> Report:
    """A report of val against serve, `served` levels apart after the whole pipeline, and of val against opencv."""
    picture = Picture("a<b>.jpg", BLACK, BLACK + 9, SPOT)
    same = Picture("same.jpg", BLACK, BLACK, np.zeros((4, 6), np.float32))
    serve = Pair(
        a="val",
        b="serve",
        asked="equal: both run on the same device",
        rows=(row("center_crop", 1, 0, 0), row("normalize", 2, 0, served)),
        logits=(Logits(kind="own", images=12, max=0.5, mean=0.25, flips=3),),
        skipped=(("decode", "a graph gives images of one size"),),
        pictures=(picture if served else same, same),
    )
    cv = Pair(a="val", b="opencv", asked="", rows=(row("normalize", 2, None, 80),), pictures=(picture,))
    return Report(
        file="configs/<x>.yaml",
        pipeline="val",
        stages=("center_crop(size=4)", "normalize()"),
        preprocessing="0123456789abcdef",
        pairs=(serve, cv),
        ways=(
            WayNote(name="val", about="libjpeg-turbo 3", missing=None),
            WayNote(name="serve", about="torchpipe", missing=None),
            WayNote(name="opencv", about="OpenCV", missing=None),
            WayNote(name="val@cuda", about="", missing="torch sees no NVIDIA GPU here"),
        ),
        images={"own": 12, "bad": 1},
        model="none: there is no model",
        versions={"torch": "2.11.0"},
        date="2026-01-01T00:00:00+00:00",
        command="gpuflow parity x.yaml",
    )


class Reader(HTMLParser):
    """Checks that every element is closed, and collects pictures and text."""

    VOID = ("meta", "img")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.pictures: list[np.ndarray] = []
        self.text = ""
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        if tag not in self.VOID:
            self.open.append(tag)
        if tag == "img":
            source = dict(attributes)["src"] or ""
            assert source.startswith("data:image/png;base64,")
            data = np.frombuffer(base64.b64decode(source.partition(",")[2]), np.uint8)
            picture = cv2.imdecode(data, cv2.IMREAD_COLOR_RGB)
            assert picture is not None
            self.pictures.append(picture)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.text += data + "\n"


def test_the_verdict_stands_at_the_top() -> None:
    text = Reader(page(report())).text
    lines = [line for line in text.splitlines() if line.strip()]
    assert lines[0] == "PASS: parity of configs/<x>.yaml"  # the title
    assert lines[1:3] == ["Parity of configs/<x>.yaml", "PASS: val and serve agree as they must; skipped: val@cuda"]
    breach = Reader(page(report(served=5))).text
    assert "BREACH: val against serve after normalize: 5 levels apart, limit equal" in breach
    assert breach.index("BREACH: val") < breach.index("What must agree") < breach.index("What naive sharing")


def test_a_page_is_self_contained_and_follows_light_and_dark() -> None:
    text = page(report(served=5))
    assert not re.search(r"https?:|<script|<link|@import|url\(", text)
    assert "prefers-color-scheme: dark" in text
    assert "color-scheme: light dark" in text


def test_pictures_stand_side_by_side_with_their_difference_amplified() -> None:
    found = Reader(page(report(served=5)))
    assert len(found.pictures) == 2 * 3  # nothing of the pair that is the same where another one differs
    a, b, difference = found.pictures[:3]
    assert np.array_equal(a, BLACK) and np.array_equal(b, BLACK + 9)
    level = np.zeros((1, 1), np.uint8)
    level[...] = 16 * 9
    heat = cv2.cvtColor(cv2.applyColorMap(level, cv2.COLORMAP_INFERNO), cv2.COLOR_BGR2RGB)
    assert difference[1, 2].tolist() == heat[0, 0].tolist()
    assert "difference \N{MULTIPLICATION SIGN}16; the largest is 9" in found.text
    assert "a<b>.jpg" in found.text


def test_one_picture_shows_that_nothing_differs() -> None:
    found = Reader(page(report()))
    assert len(found.pictures) == (1 + 1) * 3
    assert "no difference" in found.text


def test_a_report_of_files_whose_names_are_not_text(tmp_path: Path) -> None:
    named = dataclasses.replace(report(), file=os.fsdecode(b"caf\xe9.yaml"))
    _, shown = write_report(named, tmp_path)
    assert "Parity of caf\\udce9.yaml" in shown.read_text(encoding="utf-8")


def test_json_has_everything_but_the_pictures(tmp_path: Path) -> None:
    figures, shown = write_report(report(served=5), tmp_path / "new" / "folder")
    found = json.loads(figures.read_text())
    assert shown.read_text() == page(report(served=5))
    assert list(found) == [
        "version", "verdict", "file", "pipeline", "stages", "preprocessing", "images", "model", "pairs", "ways",
        "versions", "date", "command",
    ]  # fmt: skip
    assert (found["version"], found["verdict"], found["preprocessing"]) == (1, "breach", "0123456789abcdef")
    serve, cv = found["pairs"]
    assert (serve["verdict"], cv["verdict"]) == ("breach", None)
    assert serve["rows"][1] == {
        "stage": "normalize",
        "number": 2,
        "allowed": 0,
        "noise": 0,
        "images": 12,
        "differ": 1,
        "own": {"max": 5, "mean": 0.05, "p999": 2.5},
        "hostile": None,
        "refused": ["empty file"],
        "alone": {},
        "reference_refuses": {},
        "causes": {},
        "pixels": 0,
        "value": 0,
        "breach": True,
    }
    assert serve["logits"] == [{"kind": "own", "images": 12, "max": 0.5, "mean": 0.25, "flips": 3}]
    assert serve["skipped"] == [{"stage": "decode", "reason": "a graph gives images of one size"}]
    assert found["ways"][3] == {"name": "val@cuda", "about": "", "missing": "torch sees no NVIDIA GPU here"}


def lines_of(shown: Report) -> list[str]:
    console = Console(width=80, record=True, file=open("/dev/null", "w"), highlight=False)  # noqa: SIM115
    try:
        console.print(render(shown))
        return [line.rstrip() for line in console.export_text().splitlines()]
    finally:
        console.file.close()


def test_the_table_fits_80_columns() -> None:
    lines = lines_of(report(served=5))
    assert max(map(len, lines)) <= 80
    words = [line.split() for line in lines]
    assert ["after", "max", "99.9", "%", "mean", "max", "99.9", "%", "mean", "differ", "limit"] in words
    assert ["normalize,", "whole", "5", "2.5", "0.050", "-", "-", "-", "1/12", "equal"] in words
    assert ["normalize,", "whole", "80", "40", "0.800", "-", "-", "-", "1/12"] in words
    assert ["logits", "0.5", "0.25", "-", "-"] in words
    assert ["top-1", "flips", "3/12", "-"] in words
    assert "val against serve BREACH  equal: both run on the same device" in lines
    assert "  val against serve: not after decode: a graph gives images of one size" in lines
    assert "  refused by both: empty file" in lines
    assert "  val@cuda  skipped: torch sees no NVIDIA GPU here" in lines
    assert lines[-1] == "BREACH: val against serve after normalize: 5 levels apart, limit equal"


def test_a_long_list_of_images_is_cut() -> None:
    many = tuple((f"image {i}", "serve refuses it: decode: no") for i in range(9))
    shown = report()
    odd = dataclasses.replace(shown.pairs[0].rows[0], alone=many)
    pairs = (dataclasses.replace(shown.pairs[0], rows=(odd,)), shown.pairs[1])
    lines = lines_of(dataclasses.replace(shown, pairs=pairs))
    assert "  val against serve: image 5: serve refuses it: decode: no" in lines
    assert "  val against serve: and 3 images more" in lines
    assert " ".join(lines[-2:]) == (
        "BREACH: val against serve after center_crop: 9 images that only one of them accepts or gives in this form"
    )


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (1, "1"), (255.0, "255"), (12.5849, "12.58"), (0.0291, "0.029"), (0.9999, "1.000"), (1e-5, "<0.001")],
)
def test_levels_in_words(value: float, text: str) -> None:
    assert show_levels(value) == text


@pytest.mark.parametrize(
    ("difference", "shown"),
    [(0, "0"), (2.4e-5, "2e-05"), (0.00087, "9e-04"), (0.0254, "0.025"), (3.94, "3.9"), (99.6, "100"), (163.2, "163")],
)
def test_a_difference_of_logits_fits_its_column(difference: float, shown: str) -> None:
    assert show_logit(difference) == shown
    assert len(shown) <= 6
