"""Prefixes of a pipeline: programs whose images, cropped to their sizes, equal the results of their stages."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gpuflow.decode.preset import Preset
from gpuflow.parity.images import hostile_images
from gpuflow.parity.ways import LARGEST_CANVAS, Prefix, prefixes_of
from gpuflow.pipeline import stage as s
from gpuflow.stages import CenterCrop, Decode, Flip, Normalize, RandomCrop, Resize, Torchvision
from tests.images import as_array, jpeg, photo
from tests.running import alone, decoded, keys_of, program_of, run

FILES = [jpeg(photo(40, 61)), b"no image", jpeg(photo(70, 33))]


def prefixes(*stages: s.Stage, files: list[bytes] = FILES) -> list[Prefix]:
    return list(prefixes_of(program_of(*stages), [as_array(data) for data in files]))


def test_images_cut_to_their_sizes_are_what_the_stages_make() -> None:
    decode, resize, crop, whole = prefixes(Decode(), Resize(shorter=20), CenterCrop(size=24 - 4), Normalize())
    assert [prefix.count for prefix in (decode, resize, crop, whole)] == [1, 2, 3, 4]
    assert decode.sizes == ((40, 61), None, (70, 33))
    assert resize.sizes == ((20, 30), None, (42, 20))
    assert crop.sizes == whole.sizes == ((20, 20), None, (20, 20))
    assert decode.program.result.shape == (70, 61, 3)
    assert whole.program.pipeline.stages[-1] == Normalize()
    for i in (0, 2):
        for prefix, expected in (
            (decode, decoded(FILES[i])),
            (resize, resized_by_hand(FILES[i])),
        ):
            images, faults = run(prefix.program, FILES)
            rows, columns = prefix.sizes[i] or (0, 0)
            assert torch.equal(images[i, :, :rows, :columns], expected)
            assert not images[i, :, rows:].any() and not images[i, :, :, columns:].any()
            assert [fault is None for fault in faults] == [True, False, True]


def resized_by_hand(data: bytes) -> torch.Tensor:
    """The image resized by a pipeline to a shorter side of 20."""
    _, height, width = decoded(data).shape
    return alone(Resize(height=20 * height // min(height, width), width=20 * width // min(height, width)), data)


def test_of_larger_images_the_upper_left_is_compared() -> None:
    wide = jpeg(photo(3, LARGEST_CANVAS + 500))
    (decode, _) = prefixes(Decode(), CenterCrop(size=2), files=[wide])
    assert decode.sizes == ((3, LARGEST_CANVAS),)
    images, _ = run(decode.program, [wide])
    assert torch.equal(images[0], decoded(wide)[:, :, :LARGEST_CANVAS])


@pytest.mark.parametrize(
    ("files", "canvas"),
    [
        ([(61, 40), (40, 61)], (54, 55)),  # 55 is the root of 3,000, rounded up
        ([(300, 2), (3, 400)], (54, 55)),
        ([(10, 300), (20, 40)], (20, 150)),
        ([(300, 10), (40, 20)], (150, 20)),
        ([(50, 60), (60, 50)], (54, 55)),
        ([(50, 60)], (50, 60)),
    ],
)
def test_a_canvas_has_at_most_max_pixels(files: list[tuple[int, int]], canvas: tuple[int, int]) -> None:
    data = [jpeg(photo(height, width)) for height, width in files]
    (decode, _) = prefixes(Decode(max_pixels=3000), CenterCrop(size=2), files=data)
    assert decode.program.result.shape == (*canvas, 3)
    assert decode.sizes == tuple((min(height, canvas[0]), min(width, canvas[1])) for height, width in files)
    images, faults = run(decode.program, data)
    assert faults == [None] * len(data)
    for image, file, size in zip(images, data, decode.sizes, strict=True):
        assert size is not None
        assert torch.equal(image[:, : size[0], : size[1]], decoded(file)[:, : size[0], : size[1]])


def test_hostile_images_under_any_limit_of_pixels() -> None:
    files = [image.data.tobytes() for image in hostile_images()]
    for limit in (1, 3, 4096, 10_000, 307_680, 500_000):
        assert len(prefixes(Decode(max_pixels=limit), Resize(shorter=1), CenterCrop(size=1), files=files)) == 3


def test_draws_are_those_of_the_place_in_the_epoch() -> None:
    crop = RandomCrop(size=30)
    _, cropped, flipped = prefixes(Decode(), crop, Flip(horizontal=0.5), files=[FILES[0]] * 8)
    images, _ = run(cropped.program, [FILES[0]] * 8, keys_of(8))
    assert len(torch.unique(images.flatten(1), dim=0)) > 1
    whole, _ = run(flipped.program, [FILES[0]] * 8, keys_of(8))
    assert all(torch.equal(a, b) or torch.equal(a, b.flip(2)) for a, b in zip(images, whole, strict=True))


def test_a_prefix_with_unknown_sizes_is_left_out() -> None:
    pad = Torchvision(name="Pad", parameters=(("padding", 2),))
    assert [prefix.count for prefix in prefixes(Decode(), pad, Resize(height=9, width=8))] == [1, 3]


def test_a_decoder_that_decodes_itself_gives_one_size() -> None:
    head, whole = prefixes(Preset(name="torchpipe_cpu", height=9, width=8), Normalize())
    assert head.sizes == whole.sizes == ((9, 8),) * 3
    assert head.program.pipeline.stages == (Preset(name="torchpipe_cpu", height=9, width=8),)


def test_nothing_but_bad_images() -> None:
    (decode, _) = prefixes(Decode(), CenterCrop(size=2), files=[b"", b"no image"])
    assert (decode.sizes, decode.program.result.shape) == ((None, None), (1, 1, 3))


def test_orientation_counts_where_it_is_applied() -> None:
    data = {sample.name: sample.data for sample in hostile_images()}["jpeg EXIF 6"]
    for orientation, size in (("ignore", (40, 60)), ("apply", (60, 40))):
        decoder = Decode(orientation=orientation)  # type: ignore[arg-type]
        (decode, _) = prefixes_of(program_of(decoder, CenterCrop(size=2)), [np.array(data)])
        assert decode.sizes == (size,)
