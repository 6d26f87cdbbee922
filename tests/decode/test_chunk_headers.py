"""`read_headers` of a chunk equals `probe` of each file: every kind of file, whole, truncated and damaged."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import pytest
from PIL import Image

from gpuflow.decode.chunk_files import engine_sampling, read_headers
from gpuflow.decode.codecs import MAX_SCANS, CpuDecoder, Header, probe
from gpuflow.errors import BadSampleError
from gpuflow.sources import Payload
from tests import damaged, images
from tests.reference.headers import reference_sampling, scan_start

MAX_PIXELS = 40_000


def payload(files: Sequence[bytes], errors: Sequence[str | None] = ()) -> Payload:
    """A payload of the files, one after another, with random bytes after the last."""
    sizes = [len(data) for data in files]
    buffer = np.frombuffer(b"".join(files) + b"\xff\xd8" * 40, np.uint8)
    offsets = [0, *accumulate(sizes)][:-1]
    return Payload(buffer=buffer, offsets=offsets, sizes=sizes, errors=errors or [None] * len(files))


def expected(data: bytes, orientation: bool) -> Header | str:
    try:
        return probe(np.frombuffer(data, np.uint8), max_pixels=MAX_PIXELS, orientation=orientation)
    except BadSampleError as fault:
        return fault.reason


def assert_as_probe(files: Sequence[bytes], orientation: bool) -> int:
    """Returns how many of the files the engines decode."""
    headers = read_headers(payload(files), max_pixels=MAX_PIXELS, max_scans=MAX_SCANS, orientation=orientation)
    for i, data in enumerate(files):
        match expected(data, orientation):
            case str(reason):
                fault = headers.faults[i]
                assert fault is not None and fault.reason == reason, (i, headers.faults[i])
                assert not headers.engine[i]
            case header:
                assert headers.faults[i] is None, (i, headers.faults[i])
                factors = reference_sampling(np.frombuffer(data, np.uint8), header)
                assert headers.engine[i] == (factors is not None)
                assert headers.sampling[i] == (factors or 0)
                rewritable = header.format == "jpeg" and header.progressive and header.channels in (1, 3)
                assert headers.progressive[i] == rewritable
                assert headers.orientations[i] == header.orientation
                assert headers.upright_sizes[i].tolist() == list(header.upright_size)
                if factors is not None:
                    scan = headers.scans[i], headers.intervals[i]
                    assert scan == scan_start(np.frombuffer(data, np.uint8))
                assert headers.sizes[i].tolist() == [header.height, header.width]
    return int(headers.engine.sum())


def kinds() -> list[bytes]:
    """Files of every kind, with odd and even sizes."""
    found = []
    for number, (height, width) in enumerate([(40, 60), (33, 51), (1, 1), (7, 5), (8, 200), (200, 201)]):
        pixels = images.photo(height, width, seed=number)
        found += [images.jpeg(pixels, sampling) for sampling in ("4:2:0", "4:2:2", "4:4:0", "4:4:4")]
        found += [images.jpeg(pixels, progressive=True), images.png(pixels)]
        found += [images.encode(Image.fromarray(pixels).convert(mode), "JPEG") for mode in ("L", "CMYK")]
        for turn, progressive in ((6, False), (1, False), (3, True)):
            exif = Image.Exif()
            exif[0x0112] = turn
            exif[0x010F] = "a camera"
            picture = Image.fromarray(pixels)
            found.append(images.encode(picture, "JPEG", exif=exif.tobytes(), progressive=progressive))
        found.append(images.encode(Image.fromarray(pixels), "JPEG", comment=b"x" * 3000, optimize=True))
        found.append(images.encode(Image.fromarray(pixels), "JPEG", keep_rgb=True))
        found += [images.with_restarts(pixels, interval) for interval in (1, 3, 700)]
    return found


@pytest.mark.parametrize("orientation", [False, True])
def test_every_kind_is_read_as_probe_reads_it(orientation: bool) -> None:
    assert assert_as_probe(kinds(), orientation) >= 20


@pytest.mark.parametrize("seed", range(40))
def test_damaged_files_are_read_as_probe_reads_them(seed: int) -> None:
    rng = random.Random(seed)
    files = []
    for data in kinds():
        damaged = bytearray(data)
        for _ in range(rng.randint(0, 3)):
            damaged[rng.randrange(min(len(damaged), 700))] = rng.choice(
                [0, 0xFF, 0xD9, 0xDA, 0xC0, 0xEE, rng.randrange(256)]
            )
        files.append(bytes(damaged[: rng.choice([len(damaged), len(damaged), rng.randrange(len(damaged))])]))
    assert_as_probe(files, orientation=bool(seed % 2))


def narrow() -> list[bytes]:
    """Every subsampling and gray, 1 to 6 pixels wide."""
    sized = [images.photo(300, width, seed=width) for width in range(1, 7)]
    colored = [images.jpeg(pixels, sampling) for pixels in sized for sampling in images.SUBSAMPLINGS]
    return colored + [images.jpeg(pixels[..., 0]) for pixels in sized]


@pytest.mark.parametrize("orientation", [False, True])
def test_the_cpu_decodes_narrow_files_in_chunks_of_every_size(orientation: bool) -> None:
    """Only two widths go to the engines: 4:4:4, 4:2:2, 4:2:0, 4:4:0 and gray."""
    files = narrow()
    for count in (len(files), 7, 1):
        assert sum(assert_as_probe(files[i : i + count], orientation) for i in range(0, len(files), count)) == 2 * 5


def test_a_file_of_more_segments_than_usual_is_read_too() -> None:
    data = images.jpeg(images.photo(40, 60, seed=0))
    assert assert_as_probe([data[:2] + b"\xff\xfe\x00\x04ab" * 40 + data[2:]], orientation=False) == 1


def test_unreadable_files_are_faults_of_reading() -> None:
    data = images.jpeg(images.photo(40, 60, seed=0))
    chunk = payload([data, b"", data], [None, "no such file", None])
    headers = read_headers(chunk, max_pixels=MAX_PIXELS, max_scans=MAX_SCANS, orientation=False)
    fault = headers.faults[1]
    assert fault is not None and (fault.stage, fault.reason) == ("read", "no such file")
    assert headers.engine.tolist() == [True, False, True]


def test_the_cpu_decodes_every_file_that_the_engines_get(capfd: pytest.CaptureFixture[str]) -> None:
    """20,000 files with one flipped bit in the header: a file that libjpeg refuses does not go to the engines."""
    rng, decoder = random.Random(0), CpuDecoder("rgb")
    sound = [images.jpeg(images.photo(40, 56), sampling) for sampling in ("4:2:0", "4:4:4", "4:2:2")]
    sound += [
        images.jpeg(images.photo(40, 56)[..., 0]),
        images.encode(images.photo(40, 56), "JPEG", restart_marker_rows=1),
    ]
    taken = 0
    for _ in range(20_000):
        data = rng.choice(sound)
        noisy = images.as_array(damaged.flipped(data, 2, damaged.first(data, damaged.SCAN)[1], rng))
        try:
            header = probe(noisy, max_pixels=10**6)
        except BadSampleError:
            continue
        if engine_sampling(noisy) is not None:
            taken += 1
            decoder.decode(noisy, header)
    assert taken > 12_000
    capfd.readouterr()  # the libraries' own complaints


def test_exif_data_turn_images_only_where_they_are_applied() -> None:
    pixels = images.photo(40, 60)
    files = [images.with_orientation(pixels, "JPEG", 6) if i % 3 == 0 else images.jpeg(pixels) for i in range(40)]
    for orientation in (False, True):
        headers = read_headers(payload(files), max_pixels=MAX_PIXELS, max_scans=MAX_SCANS, orientation=orientation)
        turned = np.flatnonzero(headers.orientations == 6).tolist()
        assert turned == (list(range(0, 40, 3)) if orientation else [])
        assert headers.engine.all()


def test_named_formats_are_left_to_the_cpu() -> None:
    """The JPEG engines decode the JPEG, and the worker processes for other files the rest."""
    pixels = images.photo(30, 40)
    files = [images.jpeg(pixels), images.encode(pixels, "TIFF"), images.encode(pixels, "GIF")]
    limits = {"max_pixels": MAX_PIXELS, "max_scans": MAX_SCANS}
    headers = read_headers(payload(files), **limits, orientation=False, formats=("tiff",))
    assert headers.engine.tolist() == [True, False, False]
    assert not headers.progressive.any()
    assert [fault and fault.code for fault in headers.faults] == [None, None, "sample.format"]
    assert headers.upright_sizes[:2].tolist() == [[30, 40]] * 2


@pytest.mark.parametrize("seed", range(4))
def test_damaged_exif_data_are_read_as_probe_reads_them(seed: int) -> None:
    """Bytes of the TIFF block are changed, also those of the prefix, lengths, and places of entries."""
    rng = random.Random(seed)
    sound = []
    for turn in range(1, 9):
        for order in (">", "<"):
            exif = Image.Exif()
            exif.endian = order
            exif[0x0112], exif[0x010F] = turn, "a camera"
            block = exif.tobytes()
            block = block if turn % 2 else block[:6] + block  # some programs write the prefix twice
            sound.append(images.encode(Image.fromarray(images.photo(16, 24, seed=turn)), "JPEG", exif=block))
    files = []
    for _ in range(600):
        changed = bytearray(rng.choice(sound))
        for _ in range(rng.randint(0, 3)):
            changed[rng.randrange(20, 90)] = rng.choice([0, 1, 2, 6, 0xFF, rng.randrange(256)])
        files.append(bytes(changed))
    assert assert_as_probe(files, orientation=True) >= 200
    turned = read_headers(payload(files), max_pixels=MAX_PIXELS, max_scans=MAX_SCANS, orientation=True).orientations
    assert set(turned.tolist()) == set(range(1, 9))


def test_the_first_of_several_exif_segments_counts_as_in_probe() -> None:
    data = images.jpeg(images.photo(40, 60))
    files = [images.turned(images.turned(data, second), first) for first in range(1, 9) for second in range(1, 9)]
    assert assert_as_probe(files, orientation=True) == 64
    headers = read_headers(payload(files), max_pixels=MAX_PIXELS, max_scans=MAX_SCANS, orientation=True)
    assert headers.orientations.tolist() == [first for first in range(1, 9) for _ in range(8)]
