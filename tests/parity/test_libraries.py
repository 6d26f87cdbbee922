"""`gpuflow parity FILE --against SOURCE`: the real transforms of another library on the same images."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import PIL
import pytest
from PIL import Image

from gpuflow.parity.others import libraries_of
from tests.commands import Run, command_here
from tests.datasets import VAL, deadline
from tests.images import jpeg, photo
from tests.parity.conftest import read

THEIRS = "torchvision:tests.migration.their_transforms"


@pytest.fixture(autouse=True)
def _in_time() -> Iterator[None]:
    with deadline(60):
        yield


@pytest.fixture
def parity(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    return command_here(monkeypatch, capsys, "parity", tmp_path / "x.yaml", "--out", tmp_path / "out", "--images", 3)


@pytest.fixture
def imported(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> str:
    """A file with the transforms of validation."""
    source = f"{THEIRS}:val"
    assert command_here(monkeypatch, capsys, "import")(source, "--out", tmp_path / "x.yaml").code == 0
    return source


def test_an_imported_file_agrees_with_its_source(parity: Run, imported: str, photos: Path, tmp_path: Path) -> None:
    done = parity("--against", imported, "--data", photos)
    assert done.code == 0, done.out
    words = " ".join(done.out.split())
    most = r"highest difference in levels [01] on your images, [12] on hostile ones \([\d.]+ after normalize, "
    assert re.search(rf"PASS: val and {imported} agree as they must: {most}[\d.]+% of the pixels\); limit 2", words)
    assert "Pillow" in words and "libjpeg-turbo" in words
    (pair,) = json.loads((tmp_path / "out" / "parity.json").read_text())["pairs"]
    first, last = pair["rows"]
    assert (first["stage"], first["own"]["max"], last["stage"]) == ("decode", 0, "normalize")
    assert 0 < last["pixels"] < 0.2
    assert last["value"] == pytest.approx(last["hostile"]["max"] / 255 / 0.225, rel=0.05)


def test_another_filter_is_a_breach(parity: Run, imported: str, photos: Path) -> None:
    bicubic = "preprocess.resize.interpolation=bicubic"
    done = parity("--against", "val", imported, "--data", photos, bicubic)
    assert done.code == 1
    assert f"BREACH: val against {imported} after normalize: " in " ".join(done.out.split())
    assert parity(f"--against={imported}", "--data", photos, "--tolerance", 255, bicubic).code == 0


def test_random_transforms_cannot_be_compared(parity: Run, imported: str, photos: Path) -> None:
    done = parity("--against", f"{THEIRS}:train", "--data", photos)
    assert done.code == 1
    assert "train cannot run here: it draws random numbers; name the transforms of validation" in done.err


FAILING = "torchvision:tests.parity.failing_transforms"


def test_transforms_that_take_no_image_cannot_be_compared(parity: Run, imported: str, photos: Path) -> None:
    done = parity("--against", f"{FAILING}:always", "--data", photos)
    assert done.code == 1
    assert "always cannot run here: it fails on every image of gpuflow's own: no image is good enough" in done.err


def test_transparent_pixels_that_the_library_puts_on_white_are_a_breach_with_their_cause(
    parity: Run, imported: str, photos: Path, tmp_path: Path
) -> None:
    """The library gets what torchvision's loader gives, in which Pillow leaves a gray file's transparency noted."""
    done = parity("--against", "val", f"{FAILING}:on_white", "--data", photos)
    assert done.code == 1
    words = " ".join(done.out.split())
    assert "because of png gray, one level transparent: transparent pixels: Image.convert(" in words
    (pair,) = json.loads((tmp_path / "out" / "parity.json").read_text())["pairs"]
    ((cause, images),) = pair["rows"][-1]["causes"].items()
    assert images == ["png gray, one level transparent"]
    assert "decode: {background: [255, 255, 255]}" in cause


def test_the_order_of_pillows_passes_is_named_as_the_cause(
    parity: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A tall image with hard edges, whose bicubic overshoot is clamped between the passes."""
    source = f"{THEIRS}:bicubic"
    assert command_here(monkeypatch, capsys, "import")(source, "--out", tmp_path / "x.yaml").code == 0
    y, x = np.mgrid[:800, :300]
    tall = ((x // 3 + y // 5) % 2)[..., None] * np.array([255, 200, 255])
    (tmp_path / "data").mkdir()
    Image.fromarray(tall.astype(np.uint8)).save(tmp_path / "data" / "tall.png")
    done = parity("--against", source, "--data", tmp_path / "data")
    (pair,) = json.loads((tmp_path / "out" / "parity.json").read_text())["pairs"]
    causes = {image: cause for cause, images in pair["rows"][-1].get("causes", {}).items() for image in images}
    if int(PIL.__version__.partition(".")[0]) >= 13:
        assert done.code == 1
        assert causes["tall.png"].startswith("Pillow 13 resizes the columns of a tall image before its rows")
    else:
        assert "tall.png" not in causes


def test_a_filter_that_differs_is_no_fault_of_decoding(parity: Run, imported: str, photos: Path) -> None:
    done = parity("--against", "val", imported, "--data", photos, "preprocess.resize.interpolation=bicubic")
    assert "the stages differ from the library's transforms; compare their" in " ".join(done.out.split())


def test_an_image_of_yours_that_only_the_library_refuses_is_a_breach(
    parity: Run, imported: str, tmp_path: Path
) -> None:
    (tmp_path / "data").mkdir()
    for number in range(3):
        (tmp_path / "data" / f"{number}.jpg").write_bytes(jpeg(photo(40, 40 + number // 2)))
    source = f"{FAILING}:photographs"
    done = parity("--against", source, "--data", tmp_path / "data")
    assert done.code == 1
    words = " ".join(done.out.split())
    assert f"BREACH: val against {source} after normalize: " in words
    assert "2 images that only one of them accepts or gives in this form" in words
    (pair,) = json.loads((tmp_path / "out" / "parity.json").read_text())["pairs"]
    reason = f"{source} refuses it: library: not this size"
    assert pair["rows"][-1]["alone"] == {"0.jpg": reason, "1.jpg": reason}
    assert not pair["rows"][0]["breach"]


def test_a_source_that_names_no_library(photos: Path, tmp_path: Path) -> None:
    program = read(photos, tmp_path, VAL).program("val")
    with pytest.raises(
        ValueError, match=r"--against: names no library to run, got 'dali:x'; known: torchvision:\.\.\., timm"
    ):
        libraries_of(["val", "dali:x"], program)
