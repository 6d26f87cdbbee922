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
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch

from gpuflow.decode.blank_images import round_up
from gpuflow.decode.nvjpeg import NvjpegError, find_nvjpeg
from gpuflow.execute.device_stream import DeviceStream
from gpuflow.execute.kernels.unwritten import unwritten
from gpuflow.execute.nvjpeg_decoders import JpegBatch, NvjpegDecoderPool
from gpuflow.tools.bench import row, write_results

HERE = Path(__file__).parent
HEIGHT, WIDTH = 375, 500
SPACE = HEIGHT * WIDTH * 3
BATCH = 16
ARMS = (("engines", "hardware", False), ("engines, blank images first", "hardware", True), ("kernels", "cuda", False))


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

    def __init__(self, backend: str, blanks: bool, seeds: range) -> None:
        self._device_stream = DeviceStream(torch.device("cuda"))
        self._decoders = NvjpegDecoderPool(self._device_stream, find_nvjpeg(), "rgb", backend)
        self._blanks, self._history = blanks, [photograph(seed) for seed in seeds]
        blank = int(np.prod(round_up(np.array([HEIGHT, WIDTH])))) * 3
        self._memory = torch.zeros(BATCH * SPACE + blank, dtype=torch.uint8, device="cuda")

    def decode(self, files: Sequence[bytes]) -> tuple[torch.Tensor, np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Decode files after the history: images [N, HEIGHT, WIDTH, 3], which were decoded, which are incomplete."""
        self._call(self._history, blanks=False)
        return self._call(files, blanks=self._blanks)

    def _call(
        self, files: Sequence[bytes], *, blanks: bool
    ) -> tuple[torch.Tensor, np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        device_stream, count, spare = self._device_stream, len(files), 16 if blanks else 0
        encoded = torch.frombuffer(bytearray(b"".join(data + bytes(spare) for data in files)), dtype=torch.uint8)
        encoded = encoded.pin_memory()
        lengths = np.array([len(data) + spare for data in files], np.uint64)
        images = np.zeros((count, 8), np.uint64)
        images[:, 0], images[:, 4] = self._memory.data_ptr() + SPACE * np.arange(count), WIDTH * 3
        frames = np.array([[HEIGHT, WIDTH, 0x22]], np.int64).repeat(count, axis=0)
        data = np.cumsum(lengths) - lengths + np.uint64(encoded.data_ptr())
        incomplete = np.zeros(count, bool)
        with device_stream.queued():
            with self._decoders.acquire() as decoder:
                blank = self._memory.data_ptr() + BATCH * SPACE if blanks else None
                good = decoder.decode(JpegBatch(data, lengths, images, frames), blank)
            if blanks:
                described = np.column_stack([images[:, [0, 4]].astype(np.int64), frames[:, :2], frames[:, 2] == 0])
                incomplete = unwritten(torch.from_numpy(described).cuda(), HEIGHT, color="rgb").cpu().numpy() > 0
        device_stream.synchronize()
        return self._memory[: count * SPACE].reshape(count, HEIGHT, WIDTH, 3).clone(), good, incomplete


def measure(name: str, backend: str, blanks: bool, files: int) -> list[dict[str, Any]]:
    rng, rows = random.Random(0), []
    try:
        arms = Arm(backend, blanks, range(1, 1 + BATCH)), Arm(backend, blanks, range(101, 101 + BATCH))
    except NvjpegError as error:
        print(f"{name}: {error}")
        return []
    subjects = [photograph(1000 + number) for number in range(8)]
    made = [list(damaged(subjects[number % 8], rng)) for number in range(files)]
    for kind, variants in ((kinds[0][0], [data for _, data in kinds]) for kinds in zip(*made, strict=True)):
        foreign, shares, refused, found = 0, [0.0], 0, 0
        for start in range(0, files, BATCH):
            (a, good_a, incomplete), (b, good_b, _) = (arm.decode(variants[start : start + BATCH]) for arm in arms)
            both = torch.from_numpy(good_a & good_b)
            apart = (a != b).any(dim=3).float().mean(dim=(1, 2)).cpu()[both]
            foreign += int((apart > 0).sum())
            shares += apart.tolist()
            refused += int((~good_a).sum())
            found += int(incomplete.sum())
        values = (("foreign_files", foreign), ("refused_files", refused), ("incomplete_files", found))
        for metric, value in values:
            rows.append(row(name, f"{files} files; damage: {kind}", metric, [value], "files"))
        rows.append(row(name, f"{files} files; damage: {kind}", "foreign_pixels", [max(shares)], "share"))
        print(f"{name:28} {kind:30} {dict(values)} largest share {max(shares):.3f}", flush=True)
    seconds: dict[bool, list[float]] = {}
    batch = [subjects[number % 8] for number in range(BATCH)]
    for _ in range(5):
        for blank in {False, blanks}:
            arms[0]._call(batch, blanks=blank)
            begun = time.perf_counter()
            for _ in range(20):
                arms[0]._call(batch, blanks=blank)
            seconds.setdefault(blank, []).append(20 * BATCH / (time.perf_counter() - begun))
    rows.append(row(name, f"calls of {BATCH} sound files", "images_per_s", seconds[blanks], "images/s"))
    print(f"{name:28} {np.median(seconds[blanks]):.0f} images/s in calls of {BATCH}, copied and looked at", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=64)
    files = parser.parse_args().files
    print(f"{torch.cuda.get_device_name()}, libnvjpeg {find_nvjpeg().version}", flush=True)
    write_results(HERE / "results.csv", [line for arm in ARMS for line in measure(*arm, files)])


if __name__ == "__main__":
    main()
