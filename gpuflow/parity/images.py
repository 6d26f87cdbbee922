"""The images to compare: some of the user's own images, and generated hostile and bad ones.

Hostile images are images on which decoders and resizers are known to differ. Bad ones are not valid images: every way
must refuse them.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, final

import cv2
import numpy as np

from gpuflow.arrays import Bytes
from gpuflow.config import Config
from gpuflow.engines.base import class_difference
from gpuflow.errors import ConfigError, Problem, SourceError
from gpuflow.loader.assemble import open_split
from gpuflow.sources import Allocate, Payload
from gpuflow.sources.base import spread
from gpuflow.sources.folder import images_below

Encoded = Bytes
"""The bytes of one file, [n]."""
Kind = Literal["own", "hostile", "bad"]

_SUBSAMPLINGS = {
    "4:4:4": cv2.IMWRITE_JPEG_SAMPLING_FACTOR_444,
    "4:2:2": cv2.IMWRITE_JPEG_SAMPLING_FACTOR_422,
    "4:2:0": cv2.IMWRITE_JPEG_SAMPLING_FACTOR_420,
    "4:4:0": cv2.IMWRITE_JPEG_SAMPLING_FACTOR_440,
    "4:1:1": cv2.IMWRITE_JPEG_SAMPLING_FACTOR_411,
}
_QUALITY = (cv2.IMWRITE_JPEG_QUALITY, 90)
_ORIENTATION = 0x0112
_HUGE = 60_000


@dataclass(frozen=True, slots=True, eq=False)
class ParityImage:
    """Holds one encoded image. kind: `own` for the user's images, `hostile`, or `bad` for bytes that are no image."""

    name: str
    kind: Kind
    data: Encoded


def own_images(
    config: Config, name: str, count: int, *, data: Path | None = None, classes: Sequence[str] | None = None
) -> list[ParityImage]:
    """Read at most `count` encoded images, spread evenly over a pipeline's source or over the directory `data`.

    classes: those of a model, if there is one.

    Raises:
        SourceError: the source cannot be indexed. ConfigError: there is no image, or the source has other classes.
    """
    if count == 0:
        return []
    if data is not None:
        files = images_below(data)
        if not files:
            raise ConfigError([Problem("--data", f"must be a directory with images, got {str(data)!r}")])
        chosen = [files[i] for i in spread(len(files), count)]
        return [ParityImage(str(file.relative_to(data)), "own", np.fromfile(file, np.uint8)) for file in chosen]
    try:
        source = open_split(config, name)
    except SourceError as error:
        raise SourceError(f"{error}; or name a directory of images: --data, or take none: --images 0") from error
    indices = spread(len(source), count)
    with closing(source):
        if difference := class_difference(source.classes, classes):
            raise ConfigError([Problem(f"{config.path}: source", f"must have the model's classes, {difference}")])
        payload = source.read(indices, lambda size: np.empty(size, np.uint8))
        names = [source.path(index) for index in indices]
    found = [ParityImage(names[i], "own", payload.sample(i)) for i, error in enumerate(payload.errors) if error is None]
    if not found:
        raise ConfigError([Problem(f"{config.path}: source", f"cannot be read: {payload.errors[0]}; try --data")])
    return found


@final
class InMemory:
    """Offers images in memory as a source. All have the same label.

    Examples:
        >>> source = InMemory([np.frombuffer(b"encoded", np.uint8)])
        >>> len(source), source.path(0)
        (1, '0')
    """

    shard_sizes = storage = None
    classes = ("image",)

    def __init__(self, images: Sequence[Encoded]) -> None:
        self._images = images
        self.labels = np.zeros(len(images), np.int64)

    def __len__(self) -> int:
        return len(self._images)

    def path(self, index: int) -> str:
        return str(index)

    def read(self, indices: Sequence[int], allocate: Allocate) -> Payload:
        return Payload.of([self._images[index] for index in indices], allocate)

    def close(self) -> None:
        pass


# --- hostile images ---------------------------------------------------------------------------------------------------


def hostile_images() -> list[ParityImage]:
    """Generate hostile images and bad ones, the same bytes each time.

    Hostile: every subsampling, odd sizes, gray, CMYK, EXIF 1-8, progressive, 1x1, extreme aspect ratios, upscaling,
    other formats, transparency.
    """
    kinds: tuple[tuple[Kind, Iterator[tuple[str, bytes]]], ...] = (("hostile", _hostile()), ("bad", _bad()))
    return [ParityImage(name, kind, np.frombuffer(data, np.uint8)) for kind, made in kinds for name, data in made]


def _hostile() -> Iterator[tuple[str, bytes]]:
    for i, name in enumerate(_SUBSAMPLINGS):
        yield f"jpeg {name}", _jpeg(_picture(61, 83, seed=i), name)
    for name in ("4:4:4", "4:2:0"):
        yield f"jpeg {name}, progressive", _jpeg(_picture(61, 83), name, (cv2.IMWRITE_JPEG_PROGRESSIVE, 1))
    for height, width in ((1, 1), (2, 1), (5, 7), (33, 17), (480, 641), (3, 400), (300, 2)):
        yield f"jpeg {width}x{height}", _jpeg(_picture(height, width))
    yield "jpeg 16x16, upscaled", _jpeg(_picture(16, 16), "4:4:4")
    yield "jpeg gray", _jpeg(_picture(50, 70)[..., 0])
    yield "jpeg CMYK", _by_pillow(_picture(48, 49), "JPEG", mode="CMYK")
    yield "jpeg quality 5", _jpeg(_picture(64, 64), "4:2:0", (cv2.IMWRITE_JPEG_QUALITY, 5))
    yield "jpeg with restarts", _jpeg(_picture(64, 80), "4:2:0", (cv2.IMWRITE_JPEG_RST_INTERVAL, 3))
    for orientation in range(1, 9):
        yield f"jpeg EXIF {orientation}", _by_pillow(_picture(40, 60), "JPEG", orientation=orientation, quality=90)
    rgb = _picture(45, 71)
    yield "png", _by_pillow(rgb, "PNG")
    yield "png gray", _by_pillow(rgb, "PNG", mode="L")
    yield "png with alpha", _by_pillow(_with_alpha(45, 71), "PNG")
    yield "png with a palette", _by_pillow(rgb, "PNG", mode="P")
    levels = bytes((0, 127, 255)) * 85
    yield "png with alpha in its palette", _by_pillow(rgb, "PNG", mode="P", transparency=levels)
    gray = rgb[..., 0]
    yield "png gray, one level transparent", _by_pillow(gray, "PNG", mode="L", transparency=int(gray[15, 35]))
    yield "png EXIF 6", _by_pillow(_picture(40, 60), "PNG", orientation=6)
    for name, lossless in (("webp", False), ("webp lossless", True)):
        yield name, _by_pillow(_picture(52, 70), "WEBP", lossless=lossless)
    yield "webp with alpha", _by_pillow(_with_alpha(52, 70), "WEBP")
    yield "bmp", _by_pillow(_picture(31, 29), "BMP")


def _bad() -> Iterator[tuple[str, bytes]]:
    whole = _jpeg(_picture(375, 500))
    yield "empty file", b""
    yield "text", b"hello, world"
    yield "jpeg cut short", whole[: len(whole) // 2]
    frame = whole.index(b"\xff\xc0") + 5
    yield f"jpeg of {_HUGE}x{_HUGE}", whole[:frame] + struct.pack(">HH", _HUGE, _HUGE) + whole[frame + 4 :]


def _picture(height: int, width: int, *, seed: int = 0) -> Bytes:
    """Return RGB pixels with gradients, a hard coloured edge and some noise: uint8 [height, width, 3]."""
    rng = np.random.default_rng((seed, height, width))
    y, x = np.mgrid[:height, :width]
    waves = np.stack([np.sin(x / rng.uniform(3, 17) + y / rng.uniform(3, 17) + k) for k in range(3)], axis=-1)
    pixels = 128 + 90 * waves + rng.normal(0, 10, (height, width, 3))
    pixels[height // 4 : height // 2, width // 3 : 2 * width // 3] = rng.integers(0, 256, 3)
    return np.clip(pixels, 0, 255).astype(np.uint8)


def _with_alpha(height: int, width: int) -> Bytes:
    """Return RGBA pixels, transparent at the left edge and opaque at the right: uint8 [height, width, 4]."""
    alpha = np.linspace(0, 255, width).astype(np.uint8)
    return np.dstack([_picture(height, width), np.broadcast_to(alpha, (height, width))])


def _jpeg(pixels: Bytes, subsampling: str = "4:2:0", option: tuple[int, int] = _QUALITY) -> bytes:
    """Encode RGB pixels, or gray ones [H, W], as a JPEG. option: an option of OpenCV, by default quality 90."""
    factors = (cv2.IMWRITE_JPEG_SAMPLING_FACTOR, _SUBSAMPLINGS[subsampling])
    bgr = pixels if pixels.ndim == 2 else np.ascontiguousarray(pixels[..., ::-1])
    return cv2.imencode(".jpg", bgr, [*factors, *option])[1].tobytes()


def _by_pillow(pixels: Bytes, form: str, *, mode: str = "RGB", orientation: int = 0, **options: Any) -> bytes:
    """Encode RGB, RGBA or gray pixels with Pillow. mode: Pillow's mode of the file; RGB leaves the pixels as they are.

    orientation: the EXIF orientation; 0 for no such tag.
    """
    from PIL import Image

    image = Image.fromarray(pixels)
    if orientation:
        exif = Image.Exif()
        exif[_ORIENTATION] = orientation
        options["exif"] = exif
    stream = io.BytesIO()
    (image if mode == "RGB" else image.convert(mode)).save(stream, form, **options)
    return stream.getvalue()
