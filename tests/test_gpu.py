"""The GPU's way against the CPU's on an NVIDIA GPU: pixels, mixed batches, bad files, resume, memory, shutdown."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import gpuflow
from tests import images
from tests.datasets import TRAIN, nothing_left_behind, write_config

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no NVIDIA GPU"),
]

MEAN, STD = [0.0, 0.0, 0.0], [1 / 255] * 3  # so that a difference of 1 is a level
GEOMETRY = [{"random_resized_crop": {"size": 32}}, {"flip": {"horizontal": 0.5, "vertical": 0.5}}]
STAGES = [{"decode": {}}, *GEOMETRY, {"normalize": {"mean": MEAN, "std": STD}}]
BICUBIC = {"resize": {"height": 20, "width": 27, "interpolation": "bicubic"}}
CROPPED = [{"decode": {}}, {"resize": {"shorter": 40}}, {"center_crop": {"size": 40}}]
NHWC = {"normalize": {"mean": MEAN, "std": STD, "layout": "nhwc", "dtype": "float16"}}
PIPELINES = {
    "train": STAGES,
    "windowed": [*CROPPED, {"normalize": {"mean": MEAN, "std": STD}}],
    "channels_last": [*CROPPED, NHWC],
    "uint8": CROPPED,
    "bicubic": [{"decode": {}}, BICUBIC, {"normalize": {"mean": MEAN, "std": STD}}],
    "gray": [{"decode": {"color": "gray"}}, BICUBIC],
}


def encoded(number: int) -> tuple[str, bytes]:
    """(suffix, bytes) of one image: every subsampling and kind in turn, sizes odd and even."""
    rng = random.Random(number)
    pixels = images.photo(rng.randint(20, 300), rng.randint(20, 300), seed=number)
    kinds = ["4:2:0", "4:2:0", "4:2:2", "4:4:4", "4:4:0", "progressive", "gray", "png", "cmyk"]
    match kinds[number % len(kinds)]:
        case "progressive":
            return "jpg", images.jpeg(pixels, progressive=True)
        case "gray":
            return "jpg", images.encode(Image.fromarray(pixels).convert("L"), "JPEG")
        case "png":
            return "png", images.png(pixels)
        case "cmyk":
            return "jpg", images.encode(Image.fromarray(pixels).convert("CMYK"), "JPEG")
        case subsampling:
            return "jpg", images.jpeg(pixels, subsampling)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("kinds") / "photos"
    for number in range(207):
        suffix, data = encoded(number)
        path = root / f"class_{number % 3}" / f"{number:03}.{suffix}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return root


def load(folder: Path, stages: Any, device: str, *overrides: str, **settings: Any) -> gpuflow.Loader:
    path = write_config(folder.parent / "x.yaml", folder, train=stages, batch={"size": 50}, **settings)
    return gpuflow.load(path, device=device, overrides=["pipelines.train.shuffle=true", *overrides])


def both(folder: Path, stages: Any, *overrides: str) -> tuple[list[gpuflow.Batch], list[gpuflow.Batch], dict[str, Any]]:
    with load(folder, stages, "cpu", *overrides) as loader:
        cpu = list(loader)
    with load(folder, stages, "cuda", *overrides) as loader:
        gpu = list(loader)
        stats = loader.stats()
    return cpu, gpu, stats


@pytest.mark.parametrize("name", PIPELINES)
def test_pixels_are_within_two_levels_of_the_cpu(name: str, folder: Path) -> None:
    cpu, gpu, stats = both(folder, PIPELINES[name])
    assert stats["engine_images"] >= 100 and stats["cpu_images"] >= 60, stats
    assert stats["engine_images"] + stats["cpu_images"] == 207
    for a, b in zip(cpu, gpu, strict=True):
        assert b.images.device.type == "cuda" and b.labels.device.type == "cuda"
        assert torch.equal(a.labels, b.labels.cpu()) and torch.equal(a.indices, b.indices.cpu())
        assert (a.images.shape, a.images.dtype, a.images.stride()) == (
            b.images.shape,
            b.images.dtype,
            b.images.stride(),
        )
        assert (a.images.float() - b.images.cpu().float()).abs().max() <= 2


def test_a_bad_file_is_replaced_by_the_same_sample_as_on_the_cpu(tmp_path: Path) -> None:
    folder = tmp_path / "photos"
    for number in range(60):
        path = folder / "a" / f"{number:03}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        data = images.jpeg(images.photo(60, 80, seed=number))
        path.write_bytes(data[: len(data) // 2] if number in (5, 31) else data)
    cpu, gpu, stats = both(folder, STAGES)
    assert stats["bad_distinct"] == 2
    for a, b in zip(cpu, gpu, strict=True):
        assert torch.equal(a.indices, b.indices.cpu())
        assert (a.images - b.images.cpu()).abs().max() <= 2


def test_a_broken_stream_spoils_no_neighbour(tmp_path: Path) -> None:
    """Headers and end markers are whole, the entropy-coded data is not; whatever the engines say of it."""
    rng = np.random.default_rng(0)
    for broken, folder in ((False, tmp_path / "whole" / "photos"), (True, tmp_path / "broken" / "photos")):
        for number in range(50):
            data = bytearray(images.jpeg(images.photo(90, 70, seed=number)))
            if broken and number in (7, 23):
                middle = len(data) // 2
                data[middle : middle + 60] = rng.integers(1, 255, 60, dtype=np.uint8).tobytes()
            path = folder / "a" / f"{number:03}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(bytes(data))
    results = []
    for folder in (tmp_path / "whole" / "photos", tmp_path / "broken" / "photos"):
        with load(folder, STAGES, "cuda") as loader:
            (batch,) = loader
            results.append(dict(zip(batch.indices.tolist(), batch.images.cpu(), strict=True)))
    whole, broken = results
    assert all(torch.equal(whole[i], broken[i]) for i in whole if i not in (7, 23) and i in broken)


def test_other_pipelines_take_the_cpus_way(folder: Path) -> None:
    with load(folder, TRAIN, "cuda") as loader:
        batch = next(iter(loader))
        assert batch.images.device.type == "cuda" and "engine_images" not in loader.stats()
    text = "is gpu, but its stages are not one sampling followed by at most a table, such as normalize; use auto or cpu"
    with pytest.raises(gpuflow.ConfigError, match=text):
        load(folder, [{"decode": {"backend": "gpu"}}, *TRAIN[1:]], "cuda")


def test_kept_batches_stay_as_they_are_whatever_the_consumer_does(folder: Path) -> None:
    """Batches are kept, read on a side stream, by a consumer slower and then faster than the loader."""
    with load(folder, STAGES, "cuda", "pipelines.train.batch.size=8") as loader:
        kept, sums = [], []
        for epoch in range(3):
            side = torch.cuda.Stream()
            for batch in loader:
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):
                    if epoch != 1:
                        torch.cuda._sleep(2_000_000)
                    sums.append(batch.images.double().sum())
                batch.images.record_stream(side)
                kept.append(batch)
        torch.cuda.synchronize()
        assert [batch.images.double().sum().item() for batch in kept] == [total.item() for total in sums]
        loader.set_epoch(0)
        assert all(torch.equal(a.images, b.images) for a, b in zip(loader, kept, strict=False))


def test_resumed_on_the_gpu_equals_uninterrupted(folder: Path) -> None:
    with load(folder, STAGES, "cuda") as loader:
        whole = list(loader)
    with load(folder, STAGES, "cuda") as loader:
        batches = iter(loader)
        next(batches)
        state = loader.state_dict()
    with load(folder, STAGES, "cuda") as loader:
        loader.load_state_dict(state)
        rest = list(loader)
    assert len(rest) == len(whole) - 1
    assert all(torch.equal(a.images, b.images) for a, b in zip(whole[1:], rest, strict=True))


def test_cycles_leave_no_memory(folder: Path) -> None:
    def cycle() -> None:
        with load(folder, STAGES, "cuda") as loader:
            for _ in loader:
                break

    for _ in range(5):
        cycle()
    torch.cuda.synchronize()
    before = torch.cuda.mem_get_info()[0]
    with nothing_left_behind():
        for _ in range(60):
            cycle()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    assert torch.cuda.mem_get_info()[0] >= before - (8 << 20)
