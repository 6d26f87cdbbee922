"""Measures whether nvJPEG's pixels for a damaged file depend on images decoded before.

    python experiments/decoder_history/run.py [--files 60]

Photographs of 375x500 pixels are damaged in several ways. Two decoders decode the same damaged files, each after
different photographs; pixels that differ between the two come from these photographs. Needs an NVIDIA GPU and
libnvjpeg. Writes results.csv in this file's folder.
"""

from __future__ import annotations

import argparse
import random
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch

from gpuflow.decode.chunk_files import read_headers
from gpuflow.decode.codecs import MAX_SCANS
from gpuflow.decode.nvjpeg import NvjpegError, find_nvjpeg
from gpuflow.execute.gpu.chunk_scan import FileChecks
from gpuflow.execute.gpu.device_stream import DeviceStream
from gpuflow.execute.gpu.nvjpeg_decoders import JpegBatch, NvjpegDecoderPool
from gpuflow.sources import Payload
from gpuflow.tools.bench import row, write_results

HERE = Path(__file__).parent
HEIGHT, WIDTH = 375, 500
SPACE = HEIGHT * WIDTH * 3
BATCH = 16
ARMS = (("engines", "hardware"), ("kernels", "cuda"))


def photograph(seed: int) -> bytes:
    """A 4:2:0 JPEG of smooth waves, edges and noise, HEIGHT x WIDTH."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[0:HEIGHT, 0:WIDTH]
    waves = [np.sin(x / rng.uniform(9, 40) + y / rng.uniform(9, 40) + rng.uniform(0, 6)) for _ in range(3)]
    pixels = np.stack(waves, axis=-1) * 90 + 128 + rng.normal(0, 12, (HEIGHT, WIDTH, 3))
    top, left = rng.integers(0, HEIGHT // 2), rng.integers(0, WIDTH // 2)
    pixels[top : top + HEIGHT // 3, left : left + WIDTH // 3] = rng.integers(0, 256, 3)
    return bytes(cv2.imencode(".jpg", np.clip(pixels, 0, 255).astype(np.uint8))[1].tobytes())


def segments(data: bytes) -> list[tuple[int, int, int]]:
    """(marker, start, stop) of every segment up to the scan, which begins at the last `stop`."""
    found: list[tuple[int, int, int]] = []
    at = 2
    while not found or found[-1][0] != 0xDA:
        stop = at + 2 + struct.unpack_from(">H", data, at + 2)[0]
        found.append((data[at + 1], at, stop))
        at = stop
    return found


def without(data: bytes, marker: int, which: slice) -> bytes:
    """The file without some of its segments of one kind."""
    for start, stop in reversed([(start, stop) for kind, start, stop in segments(data) if kind == marker][which]):
        data = data[:start] + data[stop:]
    return data


def damaged(data: bytes, rng: random.Random) -> Iterator[tuple[str, bytes]]:
    """Yield (kind of damage, file)."""
    scan, end = segments(data)[-1][2], len(data) - 2
    at = rng.randrange(scan, end)
    stop = min(end, at + rng.randrange(2, 4000))
    yield "none", data
    yield "no quantisation tables", without(data, 0xDB, slice(None))
    yield "no Huffman tables", without(data, 0xC4, slice(None))
    yield "a bit of the scan flipped", data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]
    yield "the scan cut off", data[:at] + data[end:]
    yield "a part of the scan zero", data[:at] + bytes(stop - at) + data[stop:]
    yield "a part of the scan missing", data[:at] + data[stop:]
    yield "an end marker in the scan", data[:at] + b"\xff\xd9" + data[at + 2 :]
    yield "a restart marker in the scan", data[:at] + b"\xff\xd3" + data[at + 2 :]


class Arm:
    """One decoder and its history: the photographs that it decodes before each batch."""

    def __init__(self, backend: str, seeds: range) -> None:
        self._device_stream = DeviceStream(torch.device("cuda"))
        self._decoders = NvjpegDecoderPool(self._device_stream, find_nvjpeg(), "rgb", backend)
        self._checks, self._history = FileChecks(), [photograph(seed) for seed in seeds]
        self._memory = torch.zeros(BATCH * SPACE, dtype=torch.uint8, device="cuda")

    def decode(self, files: Sequence[bytes]) -> tuple[torch.Tensor, np.ndarray[Any, Any]]:
        """Decode files after the history: images [N, HEIGHT, WIDTH, 3], and which files were decoded."""
        self.call(self._history)
        return self.call(files)

    def incomplete(self, files: Sequence[bytes]) -> int:
        """How many files gpuflow does not give to nvJPEG."""
        payload = Payload.of(files, lambda size: np.zeros(size, np.uint8))
        headers = read_headers(payload, max_pixels=HEIGHT * WIDTH, max_scans=MAX_SCANS, orientation=False)
        rows = np.flatnonzero(headers.engine)
        return len(files) - int(self._checks.complete(rows, payload, headers, None).sum())

    def call(self, files: Sequence[bytes]) -> tuple[torch.Tensor, np.ndarray[Any, Any]]:
        device_stream, count = self._device_stream, len(files)
        encoded = torch.frombuffer(bytearray(b"".join(files)), dtype=torch.uint8).pin_memory()
        lengths = np.array([len(data) for data in files], np.uint64)
        images = np.zeros((count, 8), np.uint64)
        images[:, 0], images[:, 4] = self._memory.data_ptr() + SPACE * np.arange(count), WIDTH * 3
        data = np.cumsum(lengths) - lengths + np.uint64(encoded.data_ptr())
        with device_stream.queued(), self._decoders.acquire() as decoder:
            good = decoder.decode(JpegBatch(data, lengths, images, 0x22))
        device_stream.synchronize()
        return self._memory[: count * SPACE].reshape(count, HEIGHT, WIDTH, 3).clone(), good


def measure(name: str, backend: str, files: int) -> list[dict[str, Any]]:
    rng, rows = random.Random(0), []
    try:
        arms = Arm(backend, range(1, 1 + BATCH)), Arm(backend, range(101, 101 + BATCH))
    except NvjpegError as error:
        print(f"{name}: {error}")
        return []
    subjects = [photograph(1000 + number) for number in range(8)]
    made = [list(damaged(subjects[number % 8], rng)) for number in range(files)]
    for kind, variants in ((kinds[0][0], [data for _, data in kinds]) for kinds in zip(*made, strict=True)):
        foreign, shares, refused, kept = 0, [0.0], 0, 0
        for start in range(0, files, BATCH):
            chosen = variants[start : start + BATCH]
            (a, good_a), (b, good_b) = (arm.decode(chosen) for arm in arms)
            both = torch.from_numpy(good_a & good_b)
            apart = (a != b).any(dim=3).float().mean(dim=(1, 2)).cpu()[both]
            foreign += int((apart > 0).sum())
            shares += apart.tolist()
            refused += int((~good_a).sum())
            kept += arms[0].incomplete(chosen)
        values = (("foreign_files", foreign), ("refused_files", refused), ("incomplete_files", kept))
        for metric, value in values:
            rows.append(row(name, f"{files} files; damage: {kind}", metric, [value], "files"))
        rows.append(row(name, f"{files} files; damage: {kind}", "foreign_pixels", [max(shares)], "share"))
        print(f"{name:10} {kind:30} {dict(values)} largest share {max(shares):.3f}", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=64)
    files = parser.parse_args().files
    print(f"{torch.cuda.get_device_name()}, libnvjpeg {find_nvjpeg().version}", flush=True)
    write_results(HERE / "results.csv", [line for arm in ARMS for line in measure(*arm, files)])


if __name__ == "__main__":
    main()
