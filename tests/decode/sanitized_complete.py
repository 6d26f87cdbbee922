"""Run by test_complete.py: gives sound and damaged files to complete.c, compiled with sanitizers as LIBRARY.

`python -m tests.decode.sanitized_complete LIBRARY`, with the sanitizers' own libraries loaded before. Each file lies at
the end of its memory, so a sanitizer ends this process if a byte after it is read. Prints how many files were read, and
how many of them are complete.
"""

from __future__ import annotations

import ctypes
import random
import sys

import numpy as np

from gpuflow.decode import chunk_files
from gpuflow.decode.chunk_files import read_headers
from gpuflow.decode.codecs import MAX_SCANS
from gpuflow.native.library import INTEGER, POINTER, function
from gpuflow.sources import Payload
from tests import damaged
from tests.images import jpeg, photo, with_restarts

KINDS = ["4:2:0", "4:2:2", "4:4:4", "4:4:0", "gray", "restarts 1", "restarts 7", "restarts 90"]
SPECIAL = [0x00, 0xFF, 0xC4, 0xD0, 0xDA]
"""Bytes that often mean something."""


def sound(kind: str, rng: random.Random, longest: int = 70) -> bytes:
    """A file of this kind, of at most `longest` pixels a side."""
    pixels = photo(rng.randint(9, longest), rng.randint(9, longest), seed=rng.randrange(1 << 30))
    if kind == "gray":
        return jpeg(pixels[..., 0])
    if kind.startswith("restarts"):
        return with_restarts(pixels, int(kind.split()[1]), rng.choice(["4:2:0", "4:4:4"]))
    return jpeg(pixels, kind)


def changed(data: bytes, rng: random.Random) -> bytes:
    """With other bytes at up to 40 places, and sometimes one byte less."""
    found = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 8, 40])):
        found[rng.randrange(len(found))] = rng.choice([*SPECIAL, rng.randrange(256)])
    if rng.random() < 0.3:
        del found[rng.randrange(len(found))]
    return bytes(found)


def main(path: str) -> None:
    sanitized = function("gpuflow_complete", POINTER, INTEGER, POINTER, POINTER, library=ctypes.CDLL(path))
    vars(chunk_files)["_find_complete"] = sanitized
    rng, read, whole = random.Random(0), 0, 0
    for _ in range(60):
        data = sound(rng.choice(KINDS), rng)
        for one in (data, *damaged.damages(data, rng), *(changed(data, rng) for _ in range(12))):
            payload = Payload(buffer=np.array(bytearray(one)), offsets=[0], sizes=[len(one)], errors=[None])
            headers = read_headers(payload, max_pixels=1 << 30, max_scans=MAX_SCANS, orientation=False)
            rows = np.flatnonzero(headers.engine)
            found = chunk_files.find_complete(rows, payload, headers)
            read, whole = read + len(rows), whole + int(found.sum())
    print(read, whole)


if __name__ == "__main__":
    main(sys.argv[1])
