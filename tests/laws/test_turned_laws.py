"""Laws of EXIF orientations next to boxes, masks and keypoints: what nobody decided is counted, and said once."""

from __future__ import annotations

import io
import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image

import gpuflow
from gpuflow.config import read_config
from gpuflow.decode.chunk_files import read_headers
from gpuflow.decode.codecs import probe
from gpuflow.sources import Payload, lay_out
from gpuflow.stages import STAGES
from tests.commands import command_here
from tests.datasets import deadline

ORIENTATIONS = range(1, 9)
FORMATS = ("JPEG", "PNG", "WEBP")
FIELDS: dict[str, Any] = {
    "boxes": {"boxes": {}},
    "mask": {"mask": {"kind": "polygons"}},
    "keypoints": {"keypoints": {}},
}
VALUES = {"boxes": [[4, 5, 20, 25]], "mask": [[[4, 5, 20, 5, 20, 25]]], "keypoints": [[4, 5, 2]], "weight": 1.0}


@pytest.fixture(autouse=True)
def _in_time() -> Any:
    with deadline(120):
        yield


def encoded(kind: str, orientation: int) -> bytes:
    """A square image, whose size does not show that it is turned."""
    exif, stream = Image.Exif(), io.BytesIO()
    exif[0x0112] = orientation
    Image.fromarray(np.full((40, 40, 3), 90, np.uint8)).save(stream, kind, exif=exif)
    return stream.getvalue()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An image of each format and orientation, and a listing of them."""
    root = tmp_path_factory.mktemp("turned")
    lines = []
    for kind in FORMATS:
        for orientation in ORIENTATIONS:
            name = f"{kind}{orientation}.img"
            (root / name).write_bytes(encoded(kind, orientation))
            lines.append(json.dumps({"path": name, **VALUES}))
    (root / "list.jsonl").write_text("\n".join(lines) + "\n")
    return root


def config_of(folder: Path, target: Path, fields: dict[str, Any], decode: dict[str, Any]) -> Path:
    stages = [{"decode": decode}, {"resize": {"height": 16, "width": 16}}]
    source = {"listing": str(folder / "list.jsonl"), "fields": {"image": {"column": "path"}, **fields}}
    pipeline = {"stages": stages, "batch": {"size": 5}}
    path = target / "x.yaml"
    path.write_text(yaml.safe_dump({"source": source, "pipelines": {"val": pipeline}, "run": {"threads": 2}}))
    return path


def loaded(path: Path, *overrides: str) -> tuple[list[Any], dict[str, Any], list[str]]:
    """The boxes, or other values, of two epochs; the statistics; and what was warned of."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with gpuflow.load(path, "val", overrides=overrides) as loader:
            batches = [batch for _ in range(2) for batch in loader]
            images = [batch.images.numpy().tobytes() for batch in batches]
            return images, loader.stats(), [str(one.message) for one in said]


@pytest.mark.parametrize("processes", [0, 1])
@pytest.mark.parametrize("field", FIELDS)
def test_images_of_which_nobody_said_what_their_coordinates_mean_are_counted(
    field: str, processes: int, folder: Path, tmp_path: Path
) -> None:
    path = config_of(folder, tmp_path, FIELDS[field], {})
    images, stats, said = loaded(path, f"run.processes={processes}")
    assert stats["turned_images"] == len(FORMATS) * 7
    [text] = said
    assert "decode: {orientation: apply} if" in text and "decode: {orientation: ignore} if" in text
    assert str(folder) in text
    decided = config_of(folder, tmp_path, FIELDS[field], {"orientation": "ignore"})
    same, stats, said = loaded(decided)
    assert same == images and "turned_images" not in stats and not said


@pytest.mark.parametrize(
    ("fields", "decode"),
    [
        (FIELDS["boxes"], {"orientation": "apply"}),
        (FIELDS["boxes"], {"orientation": "ignore"}),
        ({"weight": {"type": "number"}}, {}),
    ],
)
def test_nothing_is_said_where_it_is_decided_or_does_not_matter(
    fields: dict[str, Any], decode: dict[str, Any], folder: Path, tmp_path: Path
) -> None:
    _, stats, said = loaded(config_of(folder, tmp_path, fields, decode))
    assert "turned_images" not in stats and not said


def test_the_default_has_the_fingerprint_of_ignore(folder: Path, tmp_path: Path) -> None:
    found = {}
    for orientation in (None, "ignore", "apply"):
        decode = {} if orientation is None else {"orientation": orientation}
        path = config_of(folder, tmp_path, FIELDS["boxes"], decode)
        found[orientation] = read_config(path, STAGES).programs["val"].pipeline.fingerprint
    assert found[None] == found["ignore"] != found["apply"]


def test_the_header_scan_finds_the_same_tags_as_probe() -> None:
    files = [np.frombuffer(encoded(kind, one), np.uint8) for kind in FORMATS for one in ORIENTATIONS]
    sizes = [len(data) for data in files]
    offsets, end = lay_out(sizes)
    buffer = np.zeros(end + 64, np.uint8)
    for data, offset in zip(files, offsets, strict=True):
        buffer[offset : offset + len(data)] = data
    payload = Payload(buffer=buffer, offsets=offsets, sizes=sizes, errors=[None] * len(files))
    headers = read_headers(payload, max_pixels=10**6, max_scans=10, orientation=None)
    assert headers.tags.tolist() == [probe(data, orientation=True).orientation for data in files]
    assert set(headers.orientations.tolist()) == {1} and headers.upright_sizes.tolist() == headers.sizes.tolist()


@pytest.mark.filterwarnings("ignore:EXIF data turn:UserWarning")
def test_scan_explain_and_show_say_it(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gpuflow_command = command_here(monkeypatch, capsys)
    path = config_of(folder, tmp_path, FIELDS["boxes"], {})
    done = gpuflow_command("scan", path)
    turned = [json.loads(line) for line in done.out.splitlines() if json.loads(line)["kind"] == "turned"]
    assert len(turned) == len(FORMATS) * 7 and not any(one["bad"] for one in turned)
    assert "21 turned: set decode: {orientation: apply} if" in " ".join(done.err.split())
    text = " ".join(gpuflow_command("explain", path).out.split())
    assert "turned EXIF data turn 21 of 24 images that were looked at with boxes, masks or keypoints" in text
    with pytest.warns(UserWarning, match="EXIF data turn"):
        gpuflow_command("show", path, "--pipeline", "val", "--out", tmp_path / "x.html")
    decided = config_of(folder, tmp_path, FIELDS["boxes"], {"orientation": "ignore"})
    assert not gpuflow_command("scan", decided).out
    assert "EXIF data turn" not in " ".join(gpuflow_command("explain", decided).out.split())
