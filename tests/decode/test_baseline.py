"""Progressive JPEGs that are rewritten have the same coefficients, so every decoder gives the same pixels for both."""

from __future__ import annotations

import io
import random
from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from gpuflow.decode import chunk_files
from gpuflow.decode.chunk_files import engine_sampling, rewrite_progressive
from gpuflow.decode.codecs import CpuDecoder, probe
from gpuflow.errors import BadSampleError
from gpuflow.native.library import NativePool
from gpuflow.sources import SPARE_BYTES, Payload
from tests import damaged, images


@pytest.fixture(params=[2, 1, 0], ids=["BMI2", "BMI", "plain"], autouse=True)
def instructions(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The C code has a function for each."""
    monkeypatch.setattr(chunk_files, "_MOST_INSTRUCTIONS", request.param)


SAMPLINGS = ("4:2:0", "4:2:2", "4:4:0", "4:4:4")
SIZES = ((40, 60), (33, 51), (8, 9), (1, 5), (200, 201), (17, 400))


def rewritten(files: Sequence[bytes], pool: NativePool | None = None) -> list[NDArray[np.uint8] | None]:
    """Each file as it is rewritten, or None."""
    payload = Payload.of(files, lambda size: np.empty(size, np.uint8))
    found = rewrite_progressive(payload, np.arange(len(files)), lambda size: np.empty(size, np.uint8), pool)
    results = []
    for offset, size, sampling in zip(found.offsets, found.sizes, found.sampling, strict=True):
        assert not found.buffer[offset + size : offset + size + SPARE_BYTES].any()
        data = found.buffer[offset : offset + size].copy() if size else None
        if data is not None:
            header = probe(data)
            assert not header.progressive and engine_sampling(data) == sampling
        results.append(data)
    return results


def pixels(data: bytes | NDArray[np.uint8], color: str = "rgb") -> NDArray[np.uint8]:
    array = np.frombuffer(data, np.uint8) if isinstance(data, bytes) else data
    return CpuDecoder(color).decode(array, probe(array))[0].copy()


def whole() -> list[bytes]:
    """Of every subsampling and gray, noise and photographs, few and many levels."""
    rng, found = np.random.default_rng(0), []
    for number, (height, width) in enumerate(SIZES):
        photo = images.photo(height, width, seed=number)
        noise = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
        found += [images.jpeg(picture, kind, progressive=True) for picture in (photo, noise) for kind in SAMPLINGS]
        found.append(images.jpeg(photo[..., 0], progressive=True))
        for quality in (1, 40, 98):
            encoded = io.BytesIO()
            Image.fromarray(photo).save(encoded, "JPEG", quality=quality, progressive=True, comment=b"a comment")
            found.append(encoded.getvalue())
    extreme = rng.integers(0, 2, (97, 131), dtype=np.uint8) * 255
    found += [images.encode(Image.fromarray(extreme), "JPEG", quality=100, progressive=True)]
    return found


@pytest.mark.parametrize("threads", [0, 3])
def test_every_decoder_gives_the_same_pixels(threads: int) -> None:
    files, pool = whole(), NativePool(threads) if threads else None
    copies = rewritten(files, pool)
    if pool is not None:
        pool.close()
    for data, copy in zip(files, copies, strict=True):
        assert copy is not None
        assert np.array_equal(pixels(copy), pixels(data))
        assert np.array_equal(pixels(copy, "gray"), pixels(data, "gray"))
        found, expected = (np.asarray(Image.open(io.BytesIO(one)).convert("RGB")) for one in (copy.tobytes(), data))
        assert np.array_equal(found, expected)


def test_what_the_engines_do_not_decode_is_left_alone() -> None:
    photo = images.photo(40, 60)
    files = [
        images.jpeg(photo),
        images.png(photo),
        b"",
        b"\xff\xd8\xff\xd9",
        images.encode(Image.fromarray(photo).convert("CMYK"), "JPEG", progressive=True),
        images.encode(Image.fromarray(photo), "JPEG", progressive=True, keep_rgb=True),
        images.jpeg(photo[:, :4], progressive=True),  # too narrow
        images.encode(Image.fromarray(photo), "JPEG", progressive=True, restart_marker_blocks=3),
    ]
    assert [copy is None for copy in rewritten(files)] == [True] * len(files)


def test_a_file_without_all_of_its_data_is_left_alone() -> None:
    data = images.jpeg(images.photo(40, 60), progressive=True)
    scans = [at for kind, at, _ in damaged.segments(data) if kind == damaged.SCAN]
    assert len(scans) > 5
    earlier = [data[:at] + b"\xff\xd9" for at in scans]  # without its last scans
    cut = [data[: len(data) - lost] + b"\xff\xd9" for lost in (3, 9, 200)]
    assert all(copy is None for copy in rewritten([*earlier, *cut, data[:-2]]))


@pytest.mark.parametrize("seed", range(8))
def test_a_damaged_file_that_is_rewritten_has_the_pixels_that_the_cpu_decodes(seed: int) -> None:
    """Where the CPU's decoder finds nothing wrong, neither file differs; what it refuses is not rewritten."""
    rng = random.Random(seed)
    sound = [images.jpeg(images.photo(40, 57, seed=seed), kind, progressive=True) for kind in SAMPLINGS]
    files = []
    for _ in range(400):
        changed = bytearray(rng.choice(sound))
        for _ in range(rng.randint(1, 3)):
            changed[rng.randrange(2, len(changed))] ^= 1 << rng.randrange(8)
        files.append(bytes(changed))
    kept = 0
    for data, copy in zip(files, rewritten(files), strict=True):
        if copy is None:
            continue
        kept += 1
        try:
            expected = pixels(data)
        except BadSampleError:
            pytest.fail("the CPU refuses a file that was rewritten")
        assert np.array_equal(pixels(copy), expected)
    assert kept > 10


def test_a_file_that_grows_by_too_much_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    data = images.jpeg(images.photo(200, 300), progressive=True)
    (copy,) = rewritten([data])
    assert copy is not None
    for room in range(0, len(copy), max(1, len(copy) // 50)):
        monkeypatch.setattr(chunk_files, "_ROOM", 0)
        monkeypatch.setattr(chunk_files, "_MORE_ROOM", room)
        assert rewritten([data]) == [None], room
