"""Run by test_complete.py with TRITON_INTERPRET=1, in its own process: which files the kernels find complete.

Prints a line of JSON for each case: whether the kernels, the reference and libjpeg-turbo find its files complete.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import triton.language as tl

from gpuflow.decode.chunk_headers import read_headers
from gpuflow.decode.codecs import MAX_SCANS, scan_start
from gpuflow.execute import file_checks
from gpuflow.execute.file_checks import FileChecks
from gpuflow.execute.kernels import complete
from gpuflow.sources import Payload
from tests import damaged, images
from tests.execute.kernels import quick_interpreter  # noqa: F401  # replaces parts of Triton's interpreter
from tests.host_stream import HostStream
from tests.huffman import is_accepted, reads_to_its_end

PART_BITS = 300
"""Few, so that a small file has several parts."""


def small(rng: random.Random, kind: str, seed: int) -> bytes:
    """A sound file of a few hundred bytes."""
    pixels = images.photo(rng.randint(9, 33), rng.randint(9, 33), seed=seed)
    if kind == "gray":
        return images.jpeg(pixels[..., 0])
    if kind.startswith("restarts"):
        return images.with_restarts(pixels, int(kind.split()[1]), rng.choice(["4:2:0", "4:4:4"]))
    return images.jpeg(pixels, kind)


def without_last(data: bytes, missing: int) -> bytes:
    """The file without the last bytes before its end marker."""
    return data[: -2 - missing] + data[-2:]


def in_the_scan(data: bytes, inserted: bytes, replaced: int) -> bytes:
    """The file with other bytes in the middle of its scan, next to no byte 0xFF."""
    at = (scan_start(images.as_array(data))[0] + len(data)) // 2
    while 0xFF in data[at - 1 : at + replaced + 2]:
        at += 1
    return data[:at] + inserted + data[at + replaced :]


def cases() -> Iterator[tuple[str, list[bytes]]]:
    rng = random.Random(0)
    for kind in ("4:2:0", "4:2:2", "4:4:4", "4:4:0", "gray", "restarts 1", "restarts 3", "restarts 50"):
        sound = [small(rng, kind, seed) for seed in range(2)]
        yield f"sound, {kind}", sound
        yield f"bytes missing, {kind}", [without_last(data, n) for data in sound for n in (1, rng.randint(2, 12))]
        yield f"damaged, {kind}", list(damaged.damages(sound[0], rng))
    data, restarts = small(rng, "4:2:0", 9), images.with_restarts(images.photo(20, 40, seed=8), 2)
    yield "data after the end, fill bytes before it", [data + b"\xff\xd0more", data[:-2] + b"\xff\xff" + data[-2:]]
    markers = [bytes((0xFF, code)) for code in (0x01, 0xC4, 0xD0, 0xD7, 0xD9, 0xFF)]
    yield "markers in the scan", [in_the_scan(one, x, n) for x in markers for one, n in ((data, 0), (restarts, 2))]
    start = scan_start(images.as_array(restarts))[0]
    mark = next(at for at in range(start, len(restarts)) if restarts[at] == 0xFF and restarts[at + 1] == 0xD1)
    swapped = restarts[: mark + 1] + b"\xd0" + restarts[mark + 2 :]
    yield "restart markers", [swapped, restarts[:mark] + restarts[mark + 2 :], restarts[:-2], restarts[:-1]]
    behind_fill = in_the_scan(data, b"\xff\xff\xd7", 2)
    yield "a restart marker behind a fill byte", [behind_fill, data[:-2] + b"\xff\xff\x00" + data[-2:]]
    for kind in ("4:2:0", "4:4:4"):
        plain = images.jpeg(np.full((90, 130, 3), 96, np.uint8), kind)
        yield f"one colour, {kind}", [plain, without_last(plain, 1), without_last(plain, 9)]
    renamed = bytearray(data)  # uses table 2 for what table 1 was
    for marker, at, _ in damaged.segments(data):
        if marker == damaged.HUFFMAN and data[at + 4] & 15 == 1:
            renamed[at + 4] += 1
        if marker == damaged.SCAN:
            renamed[at + 8] = renamed[at + 10] = 0x22
    yield "table 2", [bytes(renamed)]


def found_complete(files: Sequence[bytes]) -> list[bool | None]:
    """Whether the kernels find each file complete; None for one that the engines may not decode."""
    payload = Payload.of(files, lambda size: np.full(size, 0xAB, np.uint8))
    headers = read_headers(payload, max_pixels=1 << 20, max_scans=MAX_SCANS, orientation=False)
    rows = np.flatnonzero(headers.engine)
    stream: Any = HostStream()
    complete_rows = FileChecks(stream).complete(rows, payload, headers, None)
    found: list[bool | None] = [None] * len(files)
    for row, is_complete in zip(rows.tolist(), complete_rows.tolist(), strict=True):
        found[row] = is_complete
    return found


def limited(name: str, limit: int, data: bytes) -> None:
    """Print which result a file has under a lower limit of the kernels."""
    module = vars(complete)
    former, module[name] = module[name], tl.constexpr(limit)
    print(json.dumps({"case": name, "kernels": found_complete([data]), "others": [[False, is_accepted(data)]]}))
    module[name] = former


if __name__ == "__main__":
    complete._PART_BITS = PART_BITS
    file_checks._PART_FILES = 5
    for name, files in cases():
        kernels = found_complete(files)
        pairs = zip(files, kernels, strict=True)
        others = [
            None if mine is None else (name != "table 2" and reads_to_its_end(data), is_accepted(data))
            for data, mine in pairs
        ]
        print(json.dumps({"case": name, "kernels": kernels, "others": others}), flush=True)
    rng = random.Random(0)
    limited("_MAX_BITS", 2 * PART_BITS, images.jpeg(images.photo(60, 60, seed=1), "4:2:0"))
    limited("_MAX_TABLES", 3, small(rng, "4:2:0", 1))
    limited("_MAX_SEGMENTS", 4, small(rng, "4:2:0", 1))
    data = small(rng, "4:2:0", 1)
    limited("_MAX_FILL", 2, data[:-2] + b"\xff" * 4 + data[-2:])
