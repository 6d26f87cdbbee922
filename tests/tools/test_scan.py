"""Scanning a source: what is bad, what is odd, in order, on any number of threads."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

import gpuflow
from gpuflow.config import read_config
from gpuflow.decode.codecs import CpuDecoder
from gpuflow.errors import SystemFault
from gpuflow.loader.assemble import open_whole
from gpuflow.loader.records import target_mapper
from gpuflow.sources import fields_of, open_source, source_spec
from gpuflow.stages import STAGES
from gpuflow.tools.scan import Finding, scan
from tests.datasets import (
    Block,
    MemorySource,
    TappedSource,
    deadline,
    enlarge,
    jpeg,
    make_photos,
    no_more_files,
    nothing_left_behind,
    pixels,
    truncate,
)

DECODER = STAGES["decode"]()


@pytest.fixture(autouse=True)
def _in_time() -> Iterator[None]:
    with deadline(60):
        yield


def encoded(kind: str, mode: str = "RGB") -> bytes:
    stream = io.BytesIO()
    Image.fromarray(pixels(0, 3)).convert(mode).save(stream, kind)
    return stream.getvalue()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """24 photographs of which seven are worth a look."""
    files = make_photos(tmp_path / "photos", classes=3, each=8)
    truncate(files[1])
    files[2].write_bytes(b"")
    enlarge(files[5])
    files[9].write_bytes(encoded("JPEG", "CMYK"))
    files[10].write_bytes(encoded("PNG"))
    files[12].write_bytes(b"hello")
    files[20].write_bytes(encoded("GIF"))
    return tmp_path / "photos"


def test_only_a_suffix_of_another_image_format_is_a_wrong_name() -> None:
    """Rows of a table have names such as `train.parquet[0]`."""
    images = [encoded("JPEG"), encoded("JPEG"), encoded("PNG")]
    source = MemorySource(images)
    names = ["train.parquet[0]", "a/7.dat", "b.jpeg"]
    with patch.object(MemorySource, "path", lambda _, index: names[index]):
        found = list(scan(source, DECODER, threads=1))  # type: ignore[arg-type]
    assert [(one.path, one.kind) for one in found] == [("b.jpeg", "misnamed")]


@pytest.mark.parametrize("threads", [1, 4])
def test_findings_come_in_order(threads: int, folder: Path) -> None:
    source = open_source(source_spec(folder=str(folder)))
    seen: list[int] = []
    with nothing_left_behind():
        findings = list(scan(source, DECODER, threads=threads, progress=seen.append))  # type: ignore[arg-type]
    assert [(f.index, f.kind, f.bad) for f in findings] == [
        (1, "corrupt", True),
        (2, "unreadable", True),
        (5, "oversize", True),
        (9, "cmyk", False),
        (10, "misnamed", False),
        (12, "corrupt", True),
        (20, "format", True),
    ]
    assert [f.path for f in findings] == [source.path(f.index) for f in findings]
    assert [f.reason for f in findings][1:] == [
        "empty file",
        "60000x60000 = 3,600,000,000 pixels are more than max_pixels = 179,000,000",
        "CMYK JPEG; it is converted to RGB, other decoders may refuse it",
        "is PNG but is named .jpg",
        "not an image: begins with 68 65 6c 6c; gpuflow decodes JPEG, PNG, WebP, BMP and PNM",
        "GIF is not supported; gpuflow decodes JPEG, PNG, WebP, BMP and PNM; "
        "to have it decoded, name it in decode.formats: [gif]",
    ]
    assert [f.needs for f in findings] == [""] * 6 + ["gif"]
    assert [f.row().get("needs") for f in findings] == [None] * 6 + ["gif"]
    assert findings[0].reason.startswith("truncated: no end-of-image marker within ")
    assert sum(seen) == 24


def test_without_file_descriptors_a_scan_raises(folder: Path) -> None:
    """A report of sound files as unreadable would be worse than none."""
    source = open_source(source_spec(folder=str(folder)))
    findings = scan(source, DECODER, threads=1)  # type: ignore[arg-type]
    next(findings)
    source = open_source(source_spec(folder=str(folder)))
    with no_more_files(), pytest.raises(SystemFault):
        list(scan(source, DECODER, threads=1))  # type: ignore[arg-type]


def test_the_decoders_limit_counts() -> None:
    source = MemorySource.of(3)
    small = STAGES["decode"](max_pixels=60 * 50)  # type: ignore[call-arg]
    findings = list(scan(source, small, threads=1))  # type: ignore[arg-type]
    assert {f.kind for f in findings} == {"oversize"}
    assert findings[-1].reason == "70x54 = 3,780 pixels are more than max_pixels = 3,000"


def test_a_file_whose_reading_hangs_is_named_and_the_rest_is_scanned() -> None:
    images = [b"" if i in (3, 60) else jpeg(0, i) for i in range(70)]
    tap = Block(40)
    seen: list[int] = []
    source = TappedSource(MemorySource(images), tap)
    with nothing_left_behind():
        found = list(scan(source, DECODER, threads=1, timeout_seconds=0.5, progress=seen.append))  # type: ignore[arg-type]
        tap.release.set()
    assert [(f.index, f.kind, f.bad) for f in found] == [
        (3, "corrupt", True),
        (40, "timeout", True),
        (60, "corrupt", True),
    ]
    assert (found[1].path, found[1].reason) == (source.path(40), "the stage 'read' did not end within 0.5 s")
    assert sum(seen) == 70


def test_a_file_whose_decoding_hangs_is_named_and_the_rest_is_scanned(monkeypatch: pytest.MonkeyPatch) -> None:
    images = [b"" if i in (3, 60) else jpeg(0, i) for i in range(70)]
    taps, decode = [Block(2), Block(40)], CpuDecoder.decode

    def stuck(self: CpuDecoder, data: NDArray[np.uint8], *arguments: Any) -> Any:
        for tap in taps:
            tap(images.index(data.tobytes()))
        return decode(self, data, *arguments)

    monkeypatch.setattr(CpuDecoder, "decode", stuck)
    with nothing_left_behind():
        source = MemorySource(images)
        found = list(scan(source, DECODER, threads=2, timeout_seconds=0.5))  # type: ignore[arg-type]
        for tap in taps:
            tap.release.set()
    assert [(f.index, f.kind) for f in found] == [(2, "timeout"), (3, "corrupt"), (40, "timeout"), (60, "corrupt")]
    assert (found[2].path, found[2].reason) == (source.path(40), "the stage 'decode' did not end within 0.5 s")


def test_a_clean_source_has_no_findings() -> None:
    assert list(scan(MemorySource.of(70), DECODER, threads=3)) == []  # type: ignore[arg-type]


def test_a_row_is_json() -> None:
    finding = Finding(3, "a.jpg", "corrupt", True, "why")
    assert finding.row() == {"index": 3, "path": "a.jpg", "kind": "corrupt", "bad": True, "reason": "why"}


def test_a_scan_that_is_left_ends_its_threads() -> None:
    images = [b"" if i == 0 else jpeg(0, i) for i in range(400)]
    with nothing_left_behind():
        findings = scan(MemorySource(images), DECODER, threads=2)  # type: ignore[arg-type]
        assert next(findings).index == 0
        findings.close()  # type: ignore[attr-defined]


def test_an_incomplete_annotation_is_a_finding_and_no_bad_sample(tmp_path: Path) -> None:
    files = make_photos(tmp_path / "photos", classes=1, each=4)
    truncate(files[3])
    boxes = [[[0, 0, 1, 1]], [[2, 0, 1, 1]], [], [[2, 0, 1, 1]]]
    rows = [{"path": str(file), "boxes": held} for file, held in zip(files, boxes, strict=True)]
    listing = tmp_path / "list.jsonl"
    listing.write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = open_source(source_spec(listing=str(listing), fields={"boxes": {}}))
    found = list(scan(source, DECODER, threads=2))  # type: ignore[arg-type]
    assert [(finding.index, finding.kind, finding.bad) for finding in found] == [
        (1, "incomplete", False),
        (3, "corrupt", True),
        (3, "incomplete", False),
    ]
    reason = f"{listing}:2: boxes[0] must have x1 < x2 and y1 < y2, got [2.0, 0.0, 1.0, 1.0]"
    assert found[0].reason == f"1 instance(s) left out; the first: {reason}"


def test_a_record_must_fit_its_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loader and the scan find the same."""
    monkeypatch.chdir(tmp_path)
    files = make_photos(tmp_path / "photos", classes=1, each=7)
    for file in files[1:]:
        file.write_bytes(files[0].read_bytes())
    with Image.open(files[0]) as image:
        width, height = image.size
    Image.new("L", (width, height)).save("mask.png")
    Image.new("L", (width + 1, height)).save("wide.png")
    Path("text.png").write_text("x")
    runs = {"size": [height, width], "counts": [0, height * width]}
    sound = {"boxes": [[1, 1, 9, 9]], "levels": "mask.png", "runs": [runs], "lines": [[[1, 1, 9, 1, 9, 9]]]}
    rows = [{"path": f"photos/{file.relative_to(tmp_path / 'photos')}", **sound} for file in files]
    rows[1]["boxes"] = [[width, 1, width + 9, 9]]
    rows[2]["levels"] = "wide.png"
    rows[3]["levels"] = "text.png"
    rows[4]["runs"] = [{"size": [height, width + 1], "counts": [0, height * (width + 1)]}]
    rows[5]["lines"] = [[[1, 1, 2e6, 1, 9, 9]]]
    Path("list.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    masks = "levels: {type: mask}, runs: {type: mask, kind: rle}, lines: {type: mask, kind: polygons}"
    Path("x.yaml").write_text(
        f"source: {{listing: list.jsonl, fields: {{boxes: null, {masks}}}}}\n"
        "pipelines: {val: {stages: [decode, {resize: {height: 8, width: 8}}], on_error: skip}}\n"
        "run: {bad_file: bad.jsonl, threads: 1}\n"
    )
    with (
        gpuflow.load("x.yaml", "val") as loader,
        pytest.warns(UserWarning, match="of 7 samples are bad"),
    ):
        assert [index for batch in loader for index in batch.indices.tolist()] == [0, 6]
    config = read_config("x.yaml", STAGES)
    source = open_whole(config)
    mapper = target_mapper(config, "val", fields_of(source))
    found = list(scan(source, DECODER, threads=2, mapper=mapper))  # type: ignore[arg-type]
    listed = [json.loads(line) for line in Path("bad.jsonl").read_text().splitlines()]
    assert {one.index: one.reason for one in found} == {row["index"]: row["reason"] for row in listed}
    assert [(one.index, one.kind) for one in found] == [(index, "record") for index in range(1, 6)]


def test_files_of_other_formats_say_what_would_have_them_decoded() -> None:
    files = {"a.jpg": "TIFF", "b.jpg": "AVIF", "c.jpg": "GIF", "d.jpg": "PNG"}
    images = [encoded(kind) for kind in files.values()] + [encoded("TIFF")[:100]]
    source = MemorySource(images)
    found = list(scan(source, DECODER, threads=2))  # type: ignore[arg-type]
    assert [(f.index, f.kind, f.needs) for f in found if f.bad] == [
        (0, "format", "tiff"),
        (1, "format", "avif"),
        (2, "format", "gif"),
        (4, "corrupt", ""),
    ]
    named = STAGES["decode"](formats=("tiff", "avif", "gif"))  # type: ignore[call-arg]
    found = list(scan(source, named, threads=2))  # type: ignore[arg-type]
    assert [(f.index, f.kind) for f in found if f.bad] == [(4, "corrupt")]
