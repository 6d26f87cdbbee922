"""The images to compare: hostile images of every kind, and an even selection of the user's own."""

from __future__ import annotations

import dataclasses
import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from gpuflow.decode.codecs import Header, probe
from gpuflow.errors import BadSampleError, ConfigError, SourceError
from gpuflow.parity.images import InMemory, ParityImage, hostile_images, own_images
from gpuflow.sources import source_spec
from tests.parity.conftest import read

SAMPLES = hostile_images()


def named(kind: str) -> dict[str, ParityImage]:
    return {sample.name: sample for sample in SAMPLES if sample.kind == kind}


def headers() -> dict[str, Header]:
    return {name: probe(sample.data, orientation=True) for name, sample in named("hostile").items()}


def factors(data: bytes) -> int:
    """The first component's sampling factors in a baseline or progressive JPEG."""
    frame = max(data.find(b"\xff\xc0"), data.find(b"\xff\xc2"))
    return data[frame + 11]


@pytest.mark.parametrize(
    ("name", "expected"), [("4:4:4", 0x11), ("4:2:2", 0x21), ("4:2:0", 0x22), ("4:4:0", 0x12), ("4:1:1", 0x41)]
)
def test_every_subsampling_is_what_it_says(name: str, expected: int) -> None:
    assert factors(named("hostile")[f"jpeg {name}"].data.tobytes()) == expected


def test_hostile_images_are_of_every_kind() -> None:
    found = headers()
    assert {header.format for header in found.values()} == {"jpeg", "png", "webp", "bmp"}
    assert {found[f"jpeg EXIF {turn}"].orientation for turn in range(1, 9)} == set(range(1, 9))
    assert {header.channels for header in found.values() if header.format == "jpeg"} == {1, 3, 4}
    assert sum(header.progressive for header in found.values()) == 2
    sizes = {(header.width, header.height) for header in found.values()}
    assert {(1, 1), (1, 2), (7, 5), (17, 33), (400, 3), (2, 300), (16, 16)} <= sizes
    assert {header.channels for header in found.values() if header.format == "png"} == {1, 3, 4}
    assert b"\xff\xdd" in named("hostile")["jpeg with restarts"].data.tobytes()


def test_hostile_images_have_transparent_pixels_of_every_kind() -> None:
    found = set()
    for sample in named("hostile").values():
        with Image.open(io.BytesIO(sample.data.tobytes())) as image:
            if image.has_transparency_data:
                assert image.convert("RGBA").getchannel("A").getextrema() == (0, 255), sample.name
                found.add((image.format, image.mode))
    assert found == {("PNG", "RGBA"), ("PNG", "P"), ("PNG", "L"), ("WEBP", "RGBA")}


def test_bad_images_are_refused_each_for_its_own_reason() -> None:
    reasons = {}
    for name, sample in named("bad").items():
        with pytest.raises(BadSampleError) as caught:
            probe(sample.data)
        reasons[name] = caught.value.reason
    assert reasons == {
        "empty file": "empty: the file has no bytes",
        "text": "not an image: begins with 68 65 6c 6c; gpuflow decodes JPEG, PNG, WebP, BMP and PNM",
        "jpeg cut short": f"truncated: no end-of-image marker within {len(named('bad')['jpeg cut short'].data)} bytes",
        "jpeg of 60000x60000": "60000x60000 = 3,600,000,000 pixels are more than max_pixels = 179,000,000",
    }


def test_they_are_the_same_each_time() -> None:
    again = hostile_images()
    assert [(sample.name, sample.kind) for sample in again] == [(sample.name, sample.kind) for sample in SAMPLES]
    assert all(np.array_equal(a.data, b.data) for a, b in zip(again, SAMPLES, strict=True))
    assert len({sample.name for sample in SAMPLES}) == len(SAMPLES) == 42


def test_own_images_are_spread_over_the_source(photos: Path, tmp_path: Path) -> None:
    found = own_images(read(photos, tmp_path), "val", 3)
    files = sorted(photos.rglob("*.jpg"))
    assert [sample.name for sample in found] == [str(files[i]) for i in (0, 5, 11)]
    assert found[1].data.tobytes() == files[5].read_bytes()
    assert {sample.kind for sample in found} == {"own"}
    assert len(own_images(read(photos, tmp_path), "val", 100)) == 12


def test_own_images_of_a_directory(photos: Path, tmp_path: Path) -> None:
    found = own_images(read(tmp_path / "nowhere", tmp_path), "val", 4, data=photos)
    assert [sample.name for sample in found][:2] == ["class_0/000.jpg", "class_0/003.jpg"]


def test_none_are_asked_for(tmp_path: Path) -> None:
    assert own_images(read(tmp_path / "nowhere", tmp_path), "val", 0) == []


def test_no_images(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        own_images(read(tmp_path, tmp_path), "val", 4, data=tmp_path)
    assert str(caught.value) == f"--data must be a directory with images, got {str(tmp_path)!r}"
    with pytest.raises(SourceError, match=r"or name a directory of images: --data, or take none: --images 0$"):
        own_images(read(tmp_path / "nowhere", tmp_path), "val", 4)


def test_a_source_that_is_all_unreadable(photos: Path, tmp_path: Path) -> None:
    listing = tmp_path / "list.csv"
    listing.write_text("path,label\nmissing.jpg,0\n")
    config = dataclasses.replace(read(photos, tmp_path), source_block=source_spec(listing=str(listing)))
    with pytest.raises(ConfigError, match=r"y\.yaml: source cannot be read: .*; try --data$"):
        own_images(config, "val", 4)


def test_images_in_memory_are_a_source() -> None:
    source = InMemory([np.frombuffer(data, np.uint8) for data in (b"one", b"", b"three")])
    payload = source.read([2, 0, 1], lambda size: np.zeros(size + 4, np.uint8))
    assert [payload.sample(i).tobytes() for i in range(3)] == [b"three", b"one", b""]
    assert (len(source), source.labels.tolist(), source.path(2)) == (3, [0, 0, 0], "2")
    source.close()
