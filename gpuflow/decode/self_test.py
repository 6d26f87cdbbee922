"""The test image that shows whether a decoder still works.

It is a baseline JPEG of 64x48 pixels, 4:2:0, with waves and an edge. A decoder that refuses many files in a row is
tested on it.
"""

from __future__ import annotations

import base64
import hashlib
from functools import cache

import cv2
import numpy as np

from gpuflow.arrays import Bytes
from gpuflow.decode.header import OPENCV_FLAGS

HEIGHT, WIDTH, SAMPLING = 48, 64, 0x22
JPEG = np.frombuffer(
    base64.b64decode(
        "/9j/4AAQSkZJRgABAQAAAQABAAD/2wBDABcQERQRDhcUEhQaGBcbIjklIh8fIkYyNSk5UkhXVVFIUE5bZoNvW2F8Yk5QcptzfIeLkpSSWG2grJ+O"
        "qoOPko3/2wBDARgaGiIeIkMlJUONXlBejY2NjY2NjY2NjY2NjY2NjY2NjY2NjY2NjY2NjY2NjY2NjY2NjY2NjY2NjY2NjY2NjY3/wAARCAAwAEAD"
        "ASIAAhEBAxEB/8QAGQAAAgMBAAAAAAAAAAAAAAAAAwQAAQIF/8QAJRAAAwEAAQEIAwEAAAAAAAAAAAECAwQREhMhMWFxobEUQlKB/8QAGgEAAwAD"
        "AQAAAAAAAAAAAAAAAwQFAAECBv/EAB0RAQADAQADAQEAAAAAAAAAAAEAAgMRBBIxIXH/2gAMAwEAAhEDEQA/AOpFIKrRzp2NPf1OjLkNXFCO1ohf"
        "TVCmnJ9Rd71ddmfFs215FdqcjV6oz3iFXOz/AE+UWo2/n5QC52IetV+x2KQeKRzVo5rpXg0HjYUtmrKeGH52AVMxWjDPNgdIZZtclO1gIvpoyuJb"
        "fLhe/wBE0hk4kNcuH7/QG1xJM8i41Z0yEILyLE9m/wAiv8+i5bC3l2tWy+6YWlRnqfGQyr/CP1kL6ZD1tC2jQk6rJ+uqRG8jM5Oa6z4MafQkpGFl"
        "k62isHM6Pzr4Dxi35hM5Q1EoKLGMq1fpF54/oaeI2kjFNBqqR109a8J//9k="
    ),
    np.uint8,
)
_SHA256 = {
    "rgb": "cf80df5c29c7dea96ad42b339d81b42ab150e485abd6e49dae5b0cb0244f383c",
    "gray": "052fc57fb2fd284873a1822d6e02823e408bd6ee368b49756671aacf1f8ca708",
}
"""SHA-256 of the pixels that libjpeg-turbo gives."""


def is_right(image: Bytes | None, color: str) -> bool:
    """Return True if an image equals the CPU decoders' pixels of JPEG, uint8 [HEIGHT, WIDTH, C]."""
    if image is None or image.shape[:2] != (HEIGHT, WIDTH):
        return False
    ordered = np.ascontiguousarray(image[..., ::-1] if color == "bgr" else image)
    return hashlib.sha256(ordered.tobytes()).hexdigest() == _SHA256["gray" if color == "gray" else "rgb"]


@cache
def pixels(color: str) -> Bytes:
    """Return OpenCV's pixels of the test image: uint8 [HEIGHT, WIDTH, C]. `color`: rgb, bgr or gray."""
    image = np.asarray(cv2.imdecode(JPEG, OPENCV_FLAGS[color]), np.uint8)
    return image.reshape(HEIGHT, WIDTH, -1)
