"""Equal and similar samples: which copies of photographs are found, and how many other ones are taken for copies."""

from __future__ import annotations

import io
import itertools
import json
import re
from collections.abc import Callable
from pathlib import Path

import fsspec
import numpy as np
import pytest
from PIL import Image, ImageOps

from gpuflow.sources import Division
from gpuflow.stages import STAGES
from gpuflow.tools.duplicates import Contents, Pair, _turned, equal_pairs, near_pairs
from gpuflow.tools.samples import load_photos
from gpuflow.tools.scan import scan
from tests.commands import Run, command_here
from tests.datasets import MemorySource, write_config

DECODER = STAGES["decode"]()
Picture = Image.Image


def encode(picture: Picture, form: str = "JPEG", **options: object) -> bytes:
    stream = io.BytesIO()
    picture.save(stream, form, **options)
    return stream.getvalue()


def scaled(picture: Picture, width: float, height: float | None = None) -> Picture:
    return picture.resize(
        (round(picture.width * width), round(picture.height * (height or width))), Image.Resampling.LANCZOS
    )


def tagged(picture: Picture, orientation: int) -> bytes:
    """A JPEG that is upright once its EXIF orientation is applied."""
    undo = {3: 3, 6: 8, 8: 6}[orientation]
    exif = Image.Exif()
    exif[0x0112] = undo
    copy = picture.copy()
    copy.getexif()[0x0112] = undo
    stored = ImageOps.exif_transpose(copy)
    exif[0x0112] = orientation
    return encode(stored, exif=exif)


def noisy(picture: Picture) -> Picture:
    levels = np.asarray(picture, np.int64)
    return Image.fromarray(
        np.clip(levels + np.random.default_rng(0).normal(0, 8, levels.shape), 0, 255).astype(np.uint8)
    )


def cut(picture: Picture, share: float) -> Picture:
    x, y = round(picture.width * share / 2), round(picture.height * share / 2)
    return picture.crop((x, y, picture.width - x, picture.height - y))


COPIES: dict[str, tuple[Callable[[Picture], bytes], float]] = {
    "JPEG, quality 90": (lambda one: encode(one, quality=90), 0.99),
    "JPEG, quality 50": (lambda one: encode(one, quality=50), 0.95),
    "JPEG, quality 20": (lambda one: encode(one, quality=20), 0.8),
    "WebP, quality 50": (lambda one: encode(one, "WEBP", quality=50), 0.95),
    "PNG, gray": (lambda one: encode(one.convert("L"), "PNG"), 0.99),
    "half as large": (lambda one: encode(scaled(one, 0.5)), 0.95),
    "twice as large": (lambda one: encode(scaled(one, 2)), 0.99),
    "stretched": (lambda one: encode(scaled(one, 1, 0.6)), 0.95),
    "brighter": (lambda one: encode(one.point(lambda level: min(255, level * 1.2 + 10))), 0.9),
    "noisy": (lambda one: encode(noisy(one)), 0.95),
    "rotated, pixels": (lambda one: encode(one.transpose(Image.Transpose.ROTATE_90)), 0.99),
    "mirrored, pixels": (lambda one: encode(ImageOps.mirror(one)), 0.99),
    "turned, EXIF 6": (lambda one: tagged(one, 6), 0.99),
    "turned, EXIF 3": (lambda one: tagged(one, 3), 0.99),
    "2% cut off": (lambda one: encode(cut(one, 0.02)), 0.85),
    "5% cut off": (lambda one: encode(cut(one, 0.05)), 0.3),
    "rotated by 5 degrees": (lambda one: encode(one.rotate(5)), 0.0),
}
"""How copies are made, and the fraction of them that must be found."""


def crops(side: int) -> list[Picture]:
    """Squares of photographs that do not overlap. Those of the retina, a disc, would be alike."""
    return [
        Image.fromarray(np.asarray(photo.convert("RGB"))[y : y + side, x : x + side])
        for name, photo in load_photos().items()
        if name != "retina"
        for y in range(0, photo.height - side + 1, side)
        for x in range(0, photo.width - side + 1, side)
    ]


def contents_of(images: list[bytes]) -> Contents:
    """What a scan keeps of images, which are all sound."""
    contents = Contents(len(images))
    assert not [one for one in scan(MemorySource(images), DECODER, threads=2, contents=contents) if one.bad]  # type: ignore[arg-type]
    return contents


def joined(*parts: Contents) -> Contents:
    contents = Contents(0)
    for name in ("digests", "hashes", "frequencies"):
        setattr(contents, name, np.concatenate([getattr(part, name) for part in parts]))
    return contents


def parts_of(*sizes: int) -> Division:
    return Division(tuple(f"part {i}" for i in range(len(sizes))), np.repeat(np.arange(len(sizes)), sizes))


def test_of_a_thousand_unrelated_crops_none_is_taken_for_another() -> None:
    contents = contents_of([encode(crop, quality=95) for crop in crops(60)])
    count = len(contents.digests)
    assert count > 1000 and contents.frequencies.any(axis=(1, 2)).sum() > 900
    pairs = [len(near_pairs(contents, parts_of(count), max_bits)[1]) for max_bits in (6, 8, 10)]
    assert pairs[0] == 0 and pairs[2] <= 2


@pytest.fixture(scope="module")
def originals() -> tuple[list[Picture], Contents]:
    """Photographs that are not too smooth to be compared: a sky is."""
    photos = crops(160)
    contents = contents_of([encode(photo, quality=95) for photo in photos])
    kept = np.flatnonzero(contents.frequencies.any(axis=(1, 2)))
    assert len(kept) > 0.94 * len(photos)
    photos = [photos[i] for i in kept]
    return photos, contents_of([encode(photo, quality=95) for photo in photos])


@pytest.mark.parametrize("kind", COPIES)
def test_copies_in_another_part_are_found(kind: str, originals: tuple[list[Picture], Contents]) -> None:
    (make, least), (photos, first) = COPIES[kind], originals
    count = len(photos)
    contents = joined(first, contents_of(list(map(make, photos))))
    across, within = near_pairs(contents, parts_of(count, count), 6)
    right = [pair for pair in across if pair.index - pair.other == count]
    assert len(right) >= least * count
    assert len(across) - len(right) + len(within) <= 0.02 * count
    turned = sum(pair.turned for pair in right)
    assert turned >= 0.97 * len(right) if kind.startswith(("mirrored", "rotated, p", "turned")) else turned < 3
    assert equal_pairs(contents.digests, parts_of(count, count)) == ([], 0)


def test_similar_images_are_those_that_a_comparison_of_all_pairs_finds() -> None:
    rng = np.random.default_rng(0)
    count, contents = 300, Contents(300)
    base = rng.integers(0, 256, (60, 32, 32, 1))
    for i in range(count):
        image = np.clip(base[i % 60] + rng.normal(0, 5 * (i // 60), (32, 32, 1)), 0, 255).astype(np.uint8)
        turned = np.rot90(image, i % 3).copy()
        contents.add(i, turned.ravel(), turned if i % 7 else None, "gray")
    parts = Division(("a", "b", "c"), rng.integers(-1, 3, count))
    compared = [int(i) for i in np.flatnonzero(contents.frequencies.any(axis=(1, 2)) & (parts.parts >= 0))]
    for max_bits in (0, 3, 6, 10):
        best: list[dict[int, int]] = [{}, {}]
        for i, j in itertools.permutations(compared, 2):
            late = (parts.parts[i], i) > (parts.parts[j], j)
            if late and (bits := difference(contents, i, j)) <= max_bits:
                own = best[int(parts.parts[i] == parts.parts[j])]
                own[i] = min(bits, own.get(i, bits))
        found = near_pairs(contents, parts, max_bits)
        assert [{pair.index: pair.bits for pair in pairs} for pairs in found] == best
        assert any(found)


def difference(contents: Contents, i: int, j: int) -> int:
    """The bits that differ in two images, one of which may be turned; 99 if they do not correlate."""
    least = 99
    for a, b in ((i, j), (j, i)):
        bits = np.bitwise_count(contents.hashes[a] ^ contents.hashes[b, 0])
        for turn in np.flatnonzero(bits <= 10).tolist():
            one = _turned(contents.frequencies[a].astype(np.float32), turn)
            if (one * contents.frequencies[b]).sum() >= 0.95:
                least = min(least, int(bits[turn]))
    return least


def test_equal_bytes_are_leaks_in_two_parts_and_counted_in_one() -> None:
    digests = np.array([5, 7, 5, 0, 7, 5, 0, 5, 8, 8], np.uint64)
    parts = Division(("a", "b", "c"), np.array([1, 0, 0, 0, 0, 1, 1, 2, -1, 0]))
    assert equal_pairs(digests, parts) == ([Pair(0, 2), Pair(5, 2), Pair(7, 2)], 2)


@pytest.mark.parametrize("shape", [(1, 65_500, 3), (65_500, 1, 3), (1, 1, 1), (9, 7, 3)])
def test_any_size_is_compared_unless_it_is_too_smooth(shape: tuple[int, int, int]) -> None:
    image = np.random.default_rng(0).integers(0, 256, shape).astype(np.uint8)
    contents = Contents(2)
    for i in range(2):
        contents.add(i, image[:1].ravel(), image, "rgb" if shape[2] == 3 else "gray")
    assert len(near_pairs(contents, parts_of(1, 1), 0)[0]) == (shape == (9, 7, 3))


# --- commands ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def gpuflow(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    monkeypatch.chdir(tmp_path)
    return command_here(monkeypatch, capsys)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """Six photographs in each part: one is equal, one is a smaller copy, and one is twice in val."""
    photos = [scaled(photo, 200 / photo.width) for photo in load_photos().values()]
    files = {f"{part}/{k}/{i}.jpg": encode(photos[i]) for i, (part, k) in enumerate(PLACES)}
    files["val/0/equal.jpg"] = files["train/0/0.jpg"]
    files["val/1/near.jpg"] = encode(scaled(ImageOps.mirror(photos[5]), 0.5))
    files["val/1/again.jpg"] = files["val/0/6.jpg"]
    for name, data in files.items():
        (file := tmp_path / "photos" / name).parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
    source = {"folder": "photos", "splits": ["train", "val"]}
    return write_config(tmp_path / "x.yaml", "", source=source)


PLACES = [(part, k) for part in ("train", "val") for k in (0, 1) for _ in range(3)]


def test_scan_reports_leaks_and_shows_similar_images(gpuflow: Run, config: Path) -> None:
    done = gpuflow("scan", config)
    assert done.code == 1
    leak, near = map(json.loads, done.out.splitlines())
    assert leak == {
        "index": 9,
        "path": "photos/val/0/equal.jpg",
        "kind": "leak",
        "bad": False,
        "other": 0,
        "reason": "has the bytes of sample 0 (train), photos/train/0/0.jpg",
    }
    assert (near["index"], near["path"], near["kind"], near["bad"]) == (14, "photos/val/1/near.jpg", "near", False)
    assert near["reason"].startswith("looks like sample 5 (train), photos/train/1/5.jpg: ")
    assert near["reason"].endswith(" of 64 bits differ, mirrored or rotated") and near["other"] == 5
    *_, page, leaks, repeated, across, within, last = done.err.splitlines()
    assert page == "wrote runs/scan.html: 2 pairs of similar images"
    assert [leaks, repeated, across, within, last] == [
        "samples with the bytes of one in an earlier part: 1",
        "samples with the bytes of one in their own part: 1",
        "warning: samples that look like one in an earlier part: 1",
        "samples that look like one in their own part: 1",
        "15 samples, 0 bad",
    ]
    text = Path("runs/scan.html").read_text()
    assert text.count("<image ") == 4 and text.count("photos/val/1/near.jpg") == 1
    assert "sample 14 (val)" in text and "http" not in text.replace("http-equiv", "")


def test_scan_of_similar_images_alone_exits_0(gpuflow: Run, config: Path) -> None:
    Path("photos/val/0/equal.jpg").unlink()
    done = gpuflow("scan", config, "--out", "pages/near.html")
    assert (done.code, [json.loads(line)["kind"] for line in done.out.splitlines()]) == (0, ["near"])
    assert Path("pages/near.html").exists() and not Path("runs").exists()


def test_scan_of_a_source_without_parts_finds_no_leaks(gpuflow: Run, config: Path) -> None:
    done = gpuflow("scan", config, "source.splits=[val]", "pipelines.train.split=all")
    assert (done.code, done.out) == (0, "")


def test_check_finds_leaks_without_decoding(gpuflow: Run, config: Path) -> None:
    Path("photos/val/0/6.jpg").write_bytes(b"")
    done = gpuflow("check", config, "--leaks")
    assert done.code == 1
    leak = "leak: sample 9 (val), photos/val/0/equal.jpg, has the bytes of sample 0 (train), photos/train/0/0.jpg"
    unread = "note: samples that cannot be read, which gpuflow scan names: 1"
    count = "samples with the bytes of one in an earlier part: 1; remove these files, or divide with group: content"
    assert done.out.splitlines()[-3:] == [leak, unread, count]
    Path("photos/val/0/equal.jpg").unlink()
    done = gpuflow("check", config, "--leaks")
    assert done.code == 0 and "samples with the bytes of one in an earlier part: 0" in done.out
    assert "earlier part" not in gpuflow("check", config).out


def test_leaks_are_found_where_a_column_names_the_parts(gpuflow: Run, config: Path) -> None:
    paths = sorted(path.relative_to("photos") for path in Path("photos").rglob("*.jpg"))
    rows = [f"{path},{path.parts[1]},{path.parts[0]}" for path in paths]
    Path("list.csv").write_text("\n".join(["path,label,part", *rows]))
    source = "source={listing: list.csv, root: photos, split: {column: part}}"
    assert "has the bytes of sample 0 (train), " in gpuflow("check", config, "--leaks", source).out
    done = gpuflow("scan", config, source)
    assert (done.code, [json.loads(line)["kind"] for line in done.out.splitlines()]) == (1, ["leak", "near"])


def test_check_of_leaks_needs_parts(gpuflow: Run, config: Path) -> None:
    done = gpuflow("check", config, "--leaks", "source.splits=null")
    assert done.code == 1
    text = "source must have parts; add source.split or source.splits"
    assert done.err == f"error: {config}: {text}\n"


def test_check_of_leaks_behind_urls_says_what_the_limit_left_out(gpuflow: Run, config: Path) -> None:
    fs = fsspec.filesystem("memory")
    fs.put("photos", "/leaks", recursive=True)  # a folder that no other test has: put would write below it
    where = "source.folder=memory://leaks"
    assert "part: 1" in gpuflow("check", config, "--leaks", where).out
    done = gpuflow("check", config, "--leaks", "--max-requests", 4, where)
    fs.store.clear()
    skipped = re.search(r"note: samples behind URLs that were not compared: (\d+); raise --max-requests, or ", done.out)
    assert skipped is not None, done
    assert int(skipped[1]) >= 11
