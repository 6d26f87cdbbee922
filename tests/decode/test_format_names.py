"""Files of formats that gpuflow does not decode are called by their names, and are unsupported, not corrupt."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from gpuflow.decode.codecs import CpuDecoder, format_of, imdecode, probe
from gpuflow.decode.header import OPENCV_FLAGS
from gpuflow.errors import BadSampleError
from gpuflow.tools.scan import scan
from stages.decode import Decode
from tests.datasets import MemorySource
from tests.images import encode, photo

PIXELS = photo(9, 14)
OTHERS: dict[str, bytes] = {
    "TGA": encode(PIXELS, "TGA"),
    "TGA, gray": encode(PIXELS[..., 0], "TGA"),
    "TGA, compressed": encode(PIXELS, "TGA", compression="tga_rle"),
    "TGA, with a palette": encode(Image.fromarray(PIXELS).convert("P"), "TGA"),
    "ICO": encode(PIXELS, "ICO"),
    "QOI": b"qoif\0\0\0\x02\0\0\0\x02\3\0" + bytes(20),
    "PCX": encode(PIXELS, "PCX"),
    "SGI": encode(PIXELS, "SGI"),
    "DDS": encode(PIXELS, "DDS"),
    "ICNS": encode(PIXELS, "ICNS"),
    "PostScript": encode(PIXELS, "EPS"),
    "PDF": encode(PIXELS, "PDF"),
    "PSD": b"8BPS\0\1" + bytes(30),
    "CUR": b"\0\0\2\0\1\0" + bytes(30),
    "DICOM": bytes(128) + b"DICM",
}


@pytest.mark.parametrize("name", OTHERS)
def test_it_is_unsupported_by_its_name(name: str) -> None:
    data = np.frombuffer(OTHERS[name], np.uint8)
    with pytest.raises(BadSampleError) as caught:
        probe(data)
    assert caught.value.code == "sample.unsupported"
    assert caught.value.reason.startswith(f"{name.partition(',')[0]} is not supported; ")
    assert format_of(data.data) == ("", name.partition(",")[0])


def test_scan_tells_unsupported_from_corrupt() -> None:
    animated = encode(PIXELS, "PNG", save_all=True, append_images=[Image.fromarray(255 - PIXELS)])
    source = MemorySource([OTHERS["ICO"], animated, encode(PIXELS, "PNG")[:99], b"hello", encode(PIXELS, "PPM")])
    found = list(scan(source, Decode(), threads=1))
    kinds = ["unsupported", "unsupported", "corrupt", "corrupt"]
    assert [finding.kind for finding in found if finding.bad] == kinds


@pytest.mark.parametrize("data", [bytes(64), b"\0\0\2" + bytes(60), bytes(range(64)), b"a text that is long enough"])
def test_other_bytes_are_no_image(data: bytes) -> None:
    assert format_of(memoryview(data))[1] == ""


@pytest.mark.parametrize("name", ["TIFF", "GIF", "JPEG2000", "SUN", "PPM", "HDR"])
def test_opencv_gets_only_formats_whose_header_is_checked(name: str) -> None:
    """It has decoders for all of these."""
    data = {
        "SUN": b"\x59\xa6\x6a\x95" + np.array([1, 1, 24, 3, 1, 0, 0], ">u4").tobytes() + bytes(4),
        "HDR": b"#?RADIANCE\nFORMAT=32-bit_rle_rgbe\n\n-Y 1 +X 1\n" + bytes(4),
    }
    encoded = data.get(name) or encode(PIXELS, name)
    assert imdecode(np.frombuffer(encoded, np.uint8), OPENCV_FLAGS["rgb"]) is None


def test_a_webp_of_few_bytes_decodes() -> None:
    """OpenCV takes no fewer than 32 for a WebP."""
    data = b"RIFF\x14\0\0\0WEBPVP8L\x08\0\0\0\x2f\0\0\0\0\x88\x88\x08"
    assert len(data) == 28
    encoded = np.frombuffer(data, np.uint8)
    pixels, _ = CpuDecoder("rgb").decode(encoded, probe(encoded))
    with Image.open(io.BytesIO(data), formats=["WEBP"]) as image:
        assert np.array_equal(pixels, np.asarray(image.convert("RGB")))
