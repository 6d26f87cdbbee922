"""Masks: polygons and run lengths to pixels as COCO's tools do, files, and the way of a mask through a program."""

from __future__ import annotations

import errno
import io
import struct
import zlib
from dataclasses import dataclass
from typing import Any, ClassVar

import cv2
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from torchvision import tv_tensors
from torchvision.transforms.v2 import functional as F

from gpuflow.arrays import Ints
from gpuflow.execute.cpu import masks as masks_module
from gpuflow.execute.cpu.masks import decode_mask, mask_fault, mask_maps
from gpuflow.execute.cpu.targets import TargetMapper
from gpuflow.pipeline import stage as s
from gpuflow.pipeline.records import Field, MaskFile, Polygons, Records, Rle
from gpuflow.pipeline.targets import TargetRules
from gpuflow.stages import (
    Affine,
    CenterCrop,
    Decode,
    Flip,
    Letterbox,
    Pad,
    Perspective,
    RandomCrop,
    Resize,
    Rotate,
    WarpAffine,
)
from tests.execute.cpu.outline_reference import filled
from tests.images import encode, png
from tests.masks import instance_mask
from tests.records import rle
from tests.running import images, keys_of, program_of
from tests.stages.policies import Fixed

PARAMETERS = {
    "a square at half pixels": (
        [[1.5, 1.5], [5.5, 1.5], [5.5, 4.5], [1.5, 4.5]],
        ["........", "........", "..####..", "..####..", "..####..", "........"],
    ),
    "a triangle": (
        [[0, 0], [7, 0], [0, 5]],
        ["######..", "#####...", "###.....", "##......", "#.......", "........"],
    ),
    "outside on two sides": (
        [[-3, 2], [20, 2], [20, 4], [-3, 4]],
        ["........", "........", "########", "########", "........", "........"],
    ),
}
"""What pycocotools 2.0.11 gives for these outlines, in a mask of 6 rows and 8 columns."""


def test_any_outline_is_filled_as_by_the_reference() -> None:
    rng = np.random.default_rng(0)
    for number in range(400):
        height, width = rng.integers(1, 90, 2).tolist()
        outline = rng.uniform(-20, 110, (rng.integers(1, 9), 2))
        outline = np.round(2 * outline) / 2 if number % 3 == 0 else outline
        ours = instance_mask(Polygons((outline,)), (height, width))
        assert np.array_equal(ours, filled(outline, height, width)), (height, width, outline)


@pytest.mark.parametrize(("outline", "rows"), PARAMETERS.values(), ids=PARAMETERS)
def test_polygons_are_filled_as_by_pycocotools(outline: list[list[float]], rows: list[str]) -> None:
    ours = instance_mask(Polygons((np.array(outline, np.float64),)), (6, 8))
    assert ["".join(".#"[pixel] for pixel in row) for row in ours] == rows


def test_outlines_of_an_instance_are_united() -> None:
    left, right = (np.array([[x, 0], [x + 3, 0], [x + 3, 3], [x, 3]], np.float64) for x in (0, 2))
    both = instance_mask(Polygons((left, right)), (4, 6))
    np.testing.assert_array_equal(
        both, instance_mask(Polygons((left,)), (4, 6)) | instance_mask(Polygons((right,)), (4, 6))
    )


def test_run_lengths_go_down_the_columns() -> None:
    mask = np.random.default_rng(0).integers(0, 2, (5, 7)).astype(np.uint8)
    np.testing.assert_array_equal(instance_mask(rle(mask), (5, 7)), mask)


@pytest.mark.parametrize(
    ("mask", "reason"),
    [
        (Rle((5, 7), np.array([36])), "has run lengths that do not add up to 5x7 pixels"),
        (Rle((7, 5), np.array([35])), "has 7x5 pixels, and its image 5x7"),
        (Polygons((np.array([[0, 0], [np.inf, 1], [1, 1]]),)), "must have finite coordinates"),
        (Rle((5, 7), np.array([2**62] * 4 + [35])), "has run lengths that do not add up to 5x7 pixels"),
        (Rle((5, 7), np.array([30, 5])), None),
        (Polygons((np.array([[0, 0], [2.0**20, 1], [1, -(2.0**20)]]),)), None),
        *(
            (Polygons((np.array([[0, 0], [far, 1], [1, 1]]),)), "must have coordinates of at most 1048576 pixels")
            for far in (2.0**20 + 1, -1e12, 1e300)
        ),
    ],
)
def test_masks_at_fault(mask: Polygons | Rle, reason: str | None) -> None:
    assert mask_fault(mask, (5, 7)) == reason


def encoded(image: Image.Image) -> MaskFile:
    data = io.BytesIO()
    image.save(data, "PNG")
    return MaskFile(data.getvalue())


def huge(side: int) -> MaskFile:
    """A PNG whose header gives `side` pixels to each row and column."""
    data = encoded(Image.new("L", (7, 5))).data
    header = b"IHDR" + struct.pack(">II", side, side) + data[24:29]
    return MaskFile(data[:12] + header + struct.pack(">I", zlib.crc32(header)) + data[33:])


def test_a_palettes_indices_are_the_levels() -> None:
    levels = np.random.default_rng(0).integers(0, 20, (5, 7)).astype(np.uint8)
    image = Image.fromarray(levels)
    image.putpalette(list(range(255, -1, -1)) * 3)
    np.testing.assert_array_equal(decode_mask(encoded(image), (5, 7)), levels)


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_gray_levels_of_few_bits_are_what_the_file_holds(bits: int) -> None:
    """Pillow, which decodes them, fills 8 bits."""
    levels = (np.arange(35).reshape(5, 7) % 2**bits).astype(np.uint8)
    rows = [np.unpackbits(row[:, None], axis=1)[:, 8 - bits :].reshape(-1) for row in levels]
    scan = b"".join(b"\0" + np.packbits(row).tobytes() for row in rows)
    chunks = (
        (b"IHDR", struct.pack(">IIBBBBB", 7, 5, bits, 0, 0, 0, 0)),
        (b"IDAT", zlib.compress(scan)),
        (b"IEND", b""),
    )
    data = b"".join(
        struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body)) for name, body in chunks
    )
    np.testing.assert_array_equal(decode_mask(MaskFile(b"\x89PNG\r\n\x1a\n" + data), (5, 7)), levels)


def gray_tiff(levels: NDArray[np.uint8], bits: int, *, white_is_zero: bool = False) -> bytes:
    """levels: as the file stores them, with a multiple of 8 columns."""
    packed = np.packbits(np.unpackbits(levels[..., None], axis=2)[..., 8 - bits :]).tobytes()
    (height, width), interpretation = levels.shape, 0 if white_is_zero else 1
    tags = {256: width, 257: height, 258: bits, 259: 1, 262: interpretation, 273: 110, 277: 1, 279: len(packed)}
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items())
    return b"II*\0" + struct.pack("<IH", 8, len(tags)) + entries + bytes(4) + packed


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_gray_levels_of_a_tiff_are_what_the_file_holds(bits: int) -> None:
    levels = (np.arange(40).reshape(5, 8) % 2**bits).astype(np.uint8)
    np.testing.assert_array_equal(decode_mask(MaskFile(gray_tiff(levels, bits)), (5, 8), ("tiff",)), levels)


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_levels_of_a_file_that_stores_white_as_0_are_from_black_to_white_as_pillows(bits: int) -> None:
    levels = (np.arange(40).reshape(5, 8) % 2**bits).astype(np.uint8)
    stored = (2**bits - 1) - levels
    files = [gray_tiff(stored, bits, white_is_zero=True)]
    if bits == 1:
        files += [
            b"P4\n8 5\n" + np.packbits(stored).tobytes(),
            b"P1\n8 5\n" + " ".join(map(str, stored.ravel())).encode(),
        ]
    for data in files:
        np.testing.assert_array_equal(decode_mask(MaskFile(data), (5, 8), ("pnm", "tiff")), levels)
        if bits in (1, 8):  # Pillow scales 2 and 4 bits to 8
            with Image.open(io.BytesIO(data)) as image:
                np.testing.assert_array_equal(np.array(image), levels)


def test_gray_levels_of_a_pgm_are_what_the_file_holds() -> None:
    for top in range(1, 256):
        levels = (np.arange(256).reshape(16, 16) % (top + 1)).astype(np.uint8)
        binary = b"P5\n16 16\n%d\n" % top + levels.tobytes()
        plain = b"P2\n16 16\n%d\n" % top + " ".join(map(str, levels.ravel())).encode()
        for data in (binary, plain):
            np.testing.assert_array_equal(decode_mask(MaskFile(data), (16, 16), ("pnm",)), levels)


@pytest.mark.parametrize("orientation", ["ignore", "apply"])
@pytest.mark.parametrize("tag", range(1, 9))
def test_a_tiffs_orientation_turns_a_mask_where_it_turns_its_image(tag: int, orientation: Any) -> None:
    data = encode(np.arange(35, dtype=np.uint8).reshape(5, 7), "TIFF", tiffinfo={0x0112: tag})
    size = (7, 5) if tag >= 5 and orientation == "apply" else (5, 7)
    program = program_of(Decode(color="gray", formats=("tiff",), orientation=orientation), CenterCrop(size=size))
    mapper = TargetMapper(program, (Field(name="mask", type="mask", formats=("tiff",)),), TargetRules())
    records, keys, sizes = Records({"mask": [MaskFile(data)]}, [None]), keys_of(1), np.array([size])
    targets = mapper.map(records, keys, sizes)
    assert list(targets.errors) == mapper.check(records, sizes) == [None]
    (image,) = images(program, [data], keys)
    np.testing.assert_array_equal(np.asarray(targets.columns["mask"])[0], image[0].numpy())


@pytest.mark.parametrize("upright", [False, True])
def test_xmp_data_turn_no_mask(upright: bool) -> None:
    """Pillow turns a TIFF by them; images are turned by the tag alone."""
    levels = np.arange(35, dtype=np.uint8).reshape(5, 7)
    data = encode(levels, "TIFF", tiffinfo={700: b'<x tiff:Orientation="3"/>'})
    with Image.open(io.BytesIO(data)) as image:
        assert np.array_equal(np.asarray(image), levels[::-1, ::-1])
    np.testing.assert_array_equal(decode_mask(MaskFile(data), (5, 7), ("tiff",), upright=upright), levels)


@pytest.mark.parametrize(
    ("mask", "reason"),
    [
        (MaskFile(b"GIF"), r"^must be a PNG, got bytes that begin with b'GIF'; convert it to PNG$"),
        (
            MaskFile(b"GIF89a"),
            r"^must be a PNG, got GIF; name it in the field's formats: \[gif\], or convert it to PNG$",
        ),
        (MaskFile(b"%!PS-Adobe-3.0 EPSF-3.0\n"), r"^must be a PNG, got PostScript; convert it to PNG$"),
        (MaskFile(b"\x89PNG\r\n\x1a\n" + bytes(30)), "^cannot be decoded: the header of the PNG is damaged$"),
        (encoded(Image.new("RGB", (7, 5))), "must have one channel of 8 bits, got an image of mode RGB"),
        (encoded(Image.new("L", (5, 7))), "has 7x5 pixels, and its image 5x7"),
        (MaskFile(encoded(Image.effect_noise((7, 5), 9)).data[:60]), "cannot be decoded: "),
        (encoded(Image.new("I;16", (7, 5))), "must have one channel of 8 bits, got an image of mode I;16"),
        (MaskFile(b"P5 7 5 65535\n" + bytes(70)), "must have one channel of 8 bits, got an image of mode I"),
        (
            MaskFile(b"P5 7 5 15\n" + bytes(34) + b"\x14"),
            "cannot be decoded: levels must be at most 15, the highest value in its header, got 20; correct it",
        ),
        (huge(20_000), "cannot be decoded: Image size .400000000 pixels. exceeds limit"),
        (huge(10_000), r"^(has 10000x10000 pixels, and its image 5x7|cannot be decoded: Image size .100000000 pixels)"),
    ],
)
def test_files_at_fault(mask: MaskFile, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        decode_mask(mask, (5, 7), ("pnm",))


@pytest.mark.parametrize("fault", [OSError(errno.EMFILE, "Too many open files"), MemoryError()], ids=repr)
def test_a_fault_of_the_environment_is_none_of_the_file(fault: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any, **options: Any) -> None:
        raise fault

    monkeypatch.setattr(Image, "open", fail)
    with pytest.raises(type(fault)) as caught:
        decode_mask(encoded(Image.new("L", (7, 5))), (5, 7))
    assert caught.value is fault


# --- through a program ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, repr=False)
class Turn(s.Geometry):
    """Turns around the centre, for tests."""

    stage_name: ClassVar[str] = "turn"

    angle: float
    border: str = "constant"

    @property
    def warps(self) -> s.Lookup:
        return s.Lookup("nearest", self.border, (0,))

    def output(self, spec: s.ImageSpec) -> s.ImageSpec:
        return spec

    def draw(self, keys: s.StageKeys, height: Ints, width: Ints) -> tuple[s.Move, ...]:
        cos, sin = np.cos(np.deg2rad(self.angle)), np.sin(np.deg2rad(self.angle))
        matrix = np.zeros((len(height), 3, 3))
        matrix[:] = [[cos, -sin, 0], [sin, cos, 0], [0, 0, 1]]
        centre = np.stack([width / 2, height / 2], axis=1)
        matrix[:, :2, 2] = centre - np.einsum("nij,nj->ni", matrix[:, :2, :2], centre)
        return (s.Warp(matrix, height, width, "nearest", self.border),)


PROGRAMS: dict[str, tuple[s.Stage, ...]] = {
    "crop and flip": (CenterCrop(size=(40, 40)), Flip(horizontal=0.5, vertical=0.5), CenterCrop(size=(30, 20))),
    "resize": (Flip(horizontal=0.5), Resize(height=90, width=31, interpolation="nearest"), Flip(vertical=0.5)),
    "two resizes": tuple(Resize(height=a, width=b, interpolation="nearest") for a, b in ((20, 90), (33, 33))),
    "turns": (Turn(angle=33), Flip(horizontal=0.5), Turn(angle=-12), CenterCrop(size=(30, 20))),
    "turns with edges": (CenterCrop(size=(40, 40)), Turn(angle=50, border="edge"), Turn(angle=9, border="edge")),
    "turns of two borders": (Turn(angle=40, border="reflect"), Turn(angle=20), CenterCrop(size=(30, 20))),
    "a turn, then larger": (
        Turn(angle=33),
        CenterCrop(size=(80, 90)),
        Resize(height=20, width=20, interpolation="nearest"),
    ),
    "a turn, then wider than 15 bits count": (
        Turn(angle=33),
        Resize(height=3, width=40_000, interpolation="nearest"),
    ),
    "larger, then a turn": (CenterCrop(size=(80, 90)), Turn(angle=33)),
    "wider than 16 bits count, then a turn": (
        Resize(height=20, width=50_000, interpolation="nearest"),
        Turn(angle=0.01),
        CenterCrop(size=(20, 50_000)),
    ),
}


@pytest.mark.parametrize("stages", PROGRAMS.values(), ids=PROGRAMS)
def test_a_mask_is_sampled_where_its_image_is(stages: tuple[s.Stage, ...]) -> None:
    """An image that is sampled by the nearest pixel, and a mask of the same levels, become the same."""
    program = program_of(Decode(color="gray"), *stages)
    rng, sizes = np.random.default_rng(0), np.array([(50 + i, 63 - i) for i in range(6)])
    masks = [rng.integers(0, 256, size).astype(np.uint8) for size in sizes.tolist()]
    keys = keys_of(len(masks))
    wanted = images(program, [bytes(cv2.imencode(".png", mask)[1]) for mask in masks], keys)
    for mask, map, image in zip(masks, mask_maps(program, keys, sizes), wanted, strict=True):
        np.testing.assert_array_equal(map.apply(mask), image[0].numpy())


def test_masks_of_more_pixels_than_32_bits_count_are_mapped_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    mask = np.random.default_rng(0).integers(0, 256, (50, 63)).astype(np.uint8)
    for name in ("turns", "turns of two borders"):
        program, results = program_of(Decode(color="gray"), *PROGRAMS[name]), []
        for most in (2**31, 0):
            monkeypatch.setattr(masks_module, "_MOST_IN_INT32", most)
            results += [one.apply(mask, 9) for one in mask_maps(program, keys_of(1), np.array([mask.shape]))]
        np.testing.assert_array_equal(results[0], results[1])


NEAREST: Any = {"interpolation": "nearest", "fill": 200}
FILLING: dict[str, tuple[s.Stage, ...]] = {
    "pad": (Pad(padding=(30, 40, 2, 5), fill=200),),
    "random_crop": (RandomCrop(size=(70, 80), padding=(2, 2, 2, 2), pad_if_needed=True, fill=200),),
    "letterbox": (Letterbox(size=(90, 40), interpolation="nearest", fill=200),),
    "affine": (Affine(degrees=30, translate=(0.3, 0.3), **NEAREST),),
    "rotate": (Rotate(degrees=90, expand=True, **NEAREST),),
    "perspective": (Perspective(distortion_scale=0.9, probability=1, **NEAREST),),
    "warp_affine": (WarpAffine(matrix=((1.2, 0.3, -9), (0.1, 0.8, 4)), size=(60, 60), **NEAREST),),
    "pad, then turn": (Pad(padding=(3, 5, 8, 0), fill=200), Affine(degrees=40, **NEAREST)),
    "turn, then pad": (Affine(degrees=40, **NEAREST), Pad(padding=(3, 5, 8, 0), fill=200)),
    "wider than 16 bits count": (
        Resize(height=44, width=40_000, interpolation="nearest"),
        Affine(translate=(0, 0.5), **NEAREST),
    ),
}


@pytest.mark.parametrize("stages", FILLING.values(), ids=FILLING)
def test_a_mask_has_its_fill_where_its_image_has(stages: tuple[s.Stage, ...]) -> None:
    program = program_of(Decode(color="gray"), *stages, CenterCrop(size=(40, 40)))
    rng, size = np.random.default_rng(0), (50, 63)
    levels = [rng.integers(0, 100, size).astype(np.uint8) for _ in range(4)]
    keys, sizes = keys_of(len(levels)), np.array([size] * len(levels))
    fields = (Field(name="filled", type="mask", fill=200), Field(name="black", type="mask"))
    columns: Any = {field.name: [MaskFile(png(mask)) for mask in levels] for field in fields}
    targets = TargetMapper(program, fields, TargetRules()).map(Records(columns, [None] * len(levels)), keys, sizes)
    filled, black = (np.asarray(targets.columns[field.name]) for field in fields)
    wanted = images(program, [png(mask) for mask in levels], keys)
    np.testing.assert_array_equal(filled, np.stack([image[0].numpy() for image in wanted]))
    assert 0 < (filled == 200).sum() < filled.size
    np.testing.assert_array_equal(black, np.where(filled == 200, 0, filled))


@pytest.mark.parametrize(("name", "magnitude"), [("ShearX", 0.2), ("ShearY", -0.28), ("Rotate", 45.0)])
def test_a_mask_is_sampled_where_a_policy_samples_its_image(name: str, magnitude: float) -> None:
    """Also where points lie exactly between two pixels."""
    mask = np.random.default_rng(0).integers(0, 256, (50, 63)).astype(np.uint8)
    program = program_of(Decode(), Fixed(name=name, magnitude=magnitude), CenterCrop(size=mask.shape))
    (image,) = images(program, [png(np.repeat(mask[..., None], 3, axis=2))])
    (ours,) = [one.apply(mask) for one in mask_maps(program, keys_of(1), np.array([mask.shape]))]
    np.testing.assert_array_equal(ours, image[0].numpy())


def test_a_turned_mask_is_torchvisions() -> None:
    mask = np.random.default_rng(0).integers(0, 9, (40, 52)).astype(np.uint8)
    program = program_of(Decode(), Turn(angle=33), CenterCrop(size=(40, 52)))
    ((ours,)) = [one.apply(mask) for one in mask_maps(program, keys_of(1), np.array([mask.shape]))]
    theirs: Any = F.rotate(tv_tensors.Mask(torch.from_numpy(mask)), 33.0)
    assert (ours != theirs.numpy()).mean() < 1e-3
    assert both_inside(ours)


def both_inside(mask: NDArray[np.uint8]) -> bool:
    """The corners are turned away from, and the centre is not."""
    return bool(mask[0, 0] == 0 and mask[15:25, 20:30].any())
