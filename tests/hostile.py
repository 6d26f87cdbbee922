"""Encoded images that tell decoders and resizers apart, and bytes that are no images: for parity and for services.

HOSTILE     decodable: every subsampling, odd sizes, gray, CMYK, EXIF 1-8, progressive, 1x1, huge ratios, other formats
BAD         not decodable, with the reason that gpuflow gives
"""

from __future__ import annotations

from PIL import Image

from tests.images import (
    SUBSAMPLINGS,
    encode,
    interlaced_png,
    jpeg,
    patch_jpeg,
    photo,
    png,
    tiny_jpeg,
    with_orientation,
)

HOSTILE: dict[str, bytes] = {
    **{f"jpeg {name}": jpeg(photo(61, 83, seed=i), name) for i, name in enumerate(SUBSAMPLINGS)},
    **{f"jpeg {name}, progressive": jpeg(photo(61, 83), name, progressive=True) for name in ("4:4:4", "4:2:0")},
    **{f"jpeg {width}x{height}": jpeg(photo(height, width)) for height, width in ((1, 1), (1, 2), (7, 5), (17, 33))},
    "jpeg 700x3": jpeg(photo(3, 700)),
    "jpeg 2x640": jpeg(photo(640, 2)),
    "jpeg 500x375": jpeg(photo(375, 500)),
    "jpeg gray": jpeg(photo(50, 70)[..., 0]),
    "jpeg CMYK": encode(Image.fromarray(photo(48, 49)).convert("CMYK"), "JPEG"),
    "jpeg quality 5": jpeg(photo(64, 64), quality=5),
    "jpeg factors 4x1": tiny_jpeg(70, 40, [(4, 1), (1, 1), (1, 1)]),
    "jpeg in three scans": tiny_jpeg(40, 40, [(2, 2), (1, 1), (1, 1)], separate=True),
    **{f"jpeg EXIF {turn}": with_orientation(photo(40, 60), "JPEG", turn) for turn in range(1, 9)},
    "png": png(photo(45, 71)),
    "png gray": png(photo(45, 71)[..., 0]),
    "png with alpha": encode(Image.fromarray(photo(45, 71)).convert("RGBA"), "PNG"),
    "png with a palette": encode(Image.fromarray(photo(45, 71)).convert("P"), "PNG"),
    "png interlaced": interlaced_png(photo(33, 47)),
    "png EXIF 6": with_orientation(photo(40, 60), "PNG", 6),
    "webp": encode(photo(52, 70), "WEBP"),
    "webp lossless": encode(photo(52, 70), "WEBP", lossless=True),
    "bmp": encode(photo(31, 29), "BMP"),
}
BAD: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "decode: empty: the file has no bytes"),
    "text": (
        b"hello, world",
        "decode: not an image: begins with 68 65 6c 6c; gpuflow decodes JPEG, PNG, WebP, BMP and PNM",
    ),
    "gif": (
        encode(photo(8, 8), "GIF"),
        "decode: GIF is not supported; gpuflow decodes JPEG, PNG, WebP, BMP and PNM; "
        "to have it decoded, name it in decode.formats: [gif]",
    ),
    "cut short": (
        HOSTILE["jpeg 500x375"][:2000],
        "decode: truncated: no end-of-image marker within 2000 bytes",
    ),
    "huge": (
        patch_jpeg(jpeg(photo(16, 16)), width=60_000, height=60_000),
        "decode: 60000x60000 = 3,600,000,000 pixels are more than max_pixels = 179,000,000",
    ),
}
