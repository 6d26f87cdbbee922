"""The GPU runner against the CPU runner on an NVIDIA GPU: pixels, mixed batches, bad files, resume, memory, close."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

import gpuflow
from gpuflow.decode.nvjpeg import NvjpegError
from gpuflow.execute.gpu import backend as gpu_backend
from gpuflow.execute.gpu.chunk_scan import FileChecks
from gpuflow.execute.gpu.gpu_call import GpuCalls
from gpuflow.execute.gpu.nvjpeg_decoders import NvjpegDecoder
from tests import images
from tests.chaos.accounting import wait_for
from tests.datasets import nothing_left_behind, write_config

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no NVIDIA GPU"),
]

MEAN, STD = [0.0, 0.0, 0.0], [1 / 255] * 3  # so that a difference of 1 is a level
GEOMETRY: list[dict[str, Any]] = [{"random_resized_crop": {"size": 32}}, {"flip": {"horizontal": 0.5, "vertical": 0.5}}]
STAGES: list[dict[str, Any]] = [{"decode": {}}, *GEOMETRY, {"normalize": {"mean": MEAN, "std": STD}}]
BY_THE_GPU: list[dict[str, Any]] = [{"decode": {"backend": "gpu"}}, *STAGES[1:]]
BICUBIC = {"resize": {"height": 20, "width": 27, "interpolation": "bicubic"}}
CROPPED: list[dict[str, Any]] = [{"decode": {}}, {"resize": {"shorter": 40}}, {"center_crop": {"size": 40}}]
NHWC = {"normalize": {"mean": MEAN, "std": STD, "layout": "nhwc", "dtype": "float16"}}
PIPELINES: dict[str, list[dict[str, Any]]] = {
    "train": STAGES,
    "windowed": [*CROPPED, {"normalize": {"mean": MEAN, "std": STD}}],
    "channels_last": [*CROPPED, NHWC],
    "uint8": CROPPED,
    "turned": [{"decode": {"orientation": "apply"}}, *GEOMETRY],
    "bicubic": [{"decode": {}}, BICUBIC, {"normalize": {"mean": MEAN, "std": STD}}],
    "gray": [{"decode": {"color": "gray"}}, BICUBIC],
    "two resamplings": [
        {"decode": {}},
        BICUBIC,
        {"resize": {"height": 31, "width": 18}},
        {"random_crop": {"size": 17}},
    ],
    "other sizes": [
        {"decode": {"orientation": "apply"}},
        {"affine": {"degrees": 20, "scale": [0.7, 1.4], "fill": 114}},
        {"flip": {"horizontal": 0.5}},
        {"letterbox": {"size": 150}},
        {"normalize": {"mean": MEAN, "std": STD}},
    ],
}
JITTER = {"color_jitter": {"brightness": 0.4, "contrast": 0.4, "saturation": 0.4, "hue": 0.1}}
COLOURED = [{"decode": {}}, *GEOMETRY, JITTER, {"normalize": {"mean": MEAN, "std": STD}}]
TORCHVISION = {
    "random": {"torchvision": {"name": "RandomPerspective", "distortion_scale": 0.3, "p": 0.7}},
    "noise": {"torchvision": {"name": "RandomErasing", "p": 0.8, "value": 7}},
    "fixed": {"torchvision": {"name": "GaussianBlur", "kernel_size": 3, "sigma": 0.8}},
}


def encoded(number: int) -> tuple[str, bytes]:
    """(suffix, bytes) of one image: every subsampling and kind in turn, with odd and even sizes."""
    rng = random.Random(number)
    pixels = images.photo(rng.randint(20, 300), rng.randint(20, 300), seed=number)
    kinds = ["4:2:0", "4:2:0", "4:2:2", "4:4:4", "4:4:0", "progressive", "gray", "png", "cmyk"]
    match kinds[number % len(kinds)]:
        case "progressive":
            return "jpg", images.turned(images.jpeg(pixels, progressive=True), number % 8 + 1)
        case "gray":
            return "jpg", images.encode(Image.fromarray(pixels).convert("L"), "JPEG")
        case "png":
            return "png", images.png(pixels)
        case "cmyk":
            return "jpg", images.encode(Image.fromarray(pixels).convert("CMYK"), "JPEG")
        case subsampling:
            return "jpg", images.turned(images.jpeg(pixels, subsampling), number % 8 + 1)


@pytest.fixture(autouse=True)
def no_files_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test knows which files others found complete."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


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


def apart(some: Iterable[gpuflow.Batch], others: Iterable[gpuflow.Batch]) -> list[str]:
    """The images that differ: which samples they are of, in how many pixels, and by how much."""
    found = []
    for a, b in zip(some, others, strict=True):
        for index, one, other in zip(a.indices.tolist(), a.images, b.images, strict=True):
            if not torch.equal(one, other):
                difference = (one.float() - other.float()).abs().amax(0)
                found.append(f"sample {index}: {int((difference > 0).sum())} pixels, by up to {difference.max():.3f}")
    return found


@pytest.mark.parametrize("name", PIPELINES)
def test_pixels_are_within_two_levels_of_the_cpu(name: str, folder: Path) -> None:
    cpu, gpu, stats = both(folder, PIPELINES[name])
    assert stats["engine_images"] >= 100 and stats["cpu_images"] >= 40, stats
    assert stats["engine_images"] + stats["cpu_images"] == 207
    for a, b in zip(cpu, gpu, strict=True):
        assert b.images.device.type == "cuda" and b.labels.device.type == "cuda"
        assert torch.equal(a.labels, b.labels.cpu()) and torch.equal(a.indices, b.indices.cpu())
        assert (a.images.shape, a.images.dtype, a.images.stride()) == (
            b.images.shape,
            b.images.dtype,
            b.images.stride(),
        )
        apart = (a.images.float() - b.images.cpu().float()).abs()
        assert apart.max() <= 2 and apart.mean() < 0.25


@pytest.mark.parametrize("name", PIPELINES)
def test_parts_of_images_give_the_same_batches_as_whole_images(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches: list[list[gpuflow.Batch]] = []
    for parts in (True, False):
        if not parts:
            monkeypatch.setattr(NvjpegDecoder, "decodes_regions", lambda decoder: False)
        with load(folder, PIPELINES[name], "cuda") as loader:
            batches.append([batch for _ in range(2) for batch in loader])
            runner: Any = loader._plan.gpu
            if parts and not runner._scanner.with_regions:
                pytest.skip("this GPU has no JPEG engines, or its nvJPEG does not decode parts of images")
    for a, b in zip(*batches, strict=True):
        assert torch.equal(a.images, b.images)


@pytest.mark.parametrize("name", ["train", "channels_last", "uint8", "turned", "gray", "two resamplings"])
def test_c_code_gives_the_same_batches_as_python(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over two epochs; only the first of all calls is Python's in any case."""
    batches: list[list[gpuflow.Batch]] = []
    for found in (True, False):
        if not found:
            monkeypatch.setattr(GpuCalls, "find", classmethod(lambda *arguments: None))
        with load(folder, PIPELINES[name], "cuda") as loader:
            batches.append([batch for _ in range(2) for batch in loader])
            runner: Any = loader._plan.gpu
            assert (runner._first_passes._captured is not None) == found
            assert (runner._copies._launch is not None) == found
    for a, b in zip(*batches, strict=True):
        assert torch.equal(a.images, b.images) and torch.equal(a.indices, b.indices)


def test_a_bad_file_is_replaced_by_the_same_sample_as_on_the_cpu(tmp_path: Path) -> None:
    folder = tmp_path / "photos"
    for number in range(60):
        path = folder / "a" / f"{number:03}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        data = images.jpeg(images.photo(60, 80, seed=number))
        path.write_bytes(data[: len(data) // 2] if number in (5, 31) else data)
    for stages in (STAGES, [{"decode": {"cpu_share": 0.6}}, *STAGES[1:]]):
        cpu, gpu, stats = both(folder, stages)
        assert stats["bad_distinct"] == 2
        for a, b in zip(cpu, gpu, strict=True):
            assert torch.equal(a.indices, b.indices.cpu())
            apart = (a.images - b.images.cpu()).abs()
            assert apart.max() <= 2 and apart.mean() < 0.25


@pytest.mark.parametrize("name", ["train", "channels_last", "uint8"])
@pytest.mark.parametrize("processes", [0, 2])
def test_the_cpus_share_of_a_batch(name: str, processes: int, folder: Path, tmp_path: Path) -> None:
    """The CPU decodes half of each batch, with exactly its pixels; the order and the other half do not change."""
    first, *rest = PIPELINES[name]
    half = [{"decode": {**first["decode"], "cpu_share": 0.5}}, *rest]
    cpu, gpu, _ = both(folder, PIPELINES[name])
    with load(folder, half, "cuda", "run.deterministic=true", f"run.processes={processes}") as loader:
        shared: list[gpuflow.Batch] = []
        for _ in range(2):
            loader.set_epoch(0)
            shared = list(loader)
        assert loader.stats()["cpu_share"] == 0.5
        # A thread counts its work once the batch is delivered.
        wait_for(lambda: loader.stats()["stages"]["decode_cpu"]["samples"] == 4 * 25 + 4, "counts of 104 samples")
    for a, b, c in zip(cpu, gpu, shared, strict=True):
        own = len(a.images) - round(0.5 * len(a.images))
        assert torch.equal(a.indices, c.indices.cpu()) and torch.equal(a.labels, c.labels.cpu())
        assert c.images.stride() == b.images.stride()
        assert torch.equal(b.images[:own], c.images[:own])
        assert torch.equal(a.images[own:], c.images[own:].cpu())


def test_a_damaged_file_affects_no_other_sample(tmp_path: Path) -> None:
    """Files with valid headers and end markers and damaged entropy-coded data, whether or not the engines report it."""
    rng = np.random.default_rng(0)
    for damaged, folder in ((False, tmp_path / "whole" / "photos"), (True, tmp_path / "broken" / "photos")):
        for number in range(50):
            data = bytearray(images.jpeg(images.photo(90, 70, seed=number)))
            if damaged and number in (7, 23):
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


def test_colours_are_drawn_as_on_the_cpu(folder: Path) -> None:
    """Hue or contrast can amplify one level of the decoder to several levels, but not on average."""
    cpu, gpu, stats = both(folder, COLOURED)
    assert stats["engine_images"] >= 100
    for a, b in zip(cpu, gpu, strict=True):
        difference = (a.images - b.images.cpu()).abs()
        assert difference.mean() < 0.25 and (difference > 2).float().mean() < 0.005


@pytest.mark.parametrize("name", TORCHVISION)
def test_torchvision_stages_run_on_the_gpu_with_the_draws_of_the_cpu(name: str, folder: Path) -> None:
    stages = [{"decode": {}}, *GEOMETRY, TORCHVISION[name], {"normalize": {"mean": MEAN, "std": STD}}]
    cpu, gpu, stats = both(folder, stages)
    assert stats["engine_images"] >= 100
    for a, b in zip(cpu, gpu, strict=True):
        difference = (a.images - b.images.cpu()).abs()
        assert difference.mean() < 0.25 and (difference > 2).float().mean() < 0.01


def test_a_pipeline_without_a_form_for_the_gpu_runs_on_the_cpu(folder: Path) -> None:
    stages = [{"decode": {}}, JITTER, *STAGES[1:]]
    cpu, gpu, stats = both(folder, stages)
    assert "engine_images" not in stats
    for a, b in zip(cpu, gpu, strict=True):
        assert b.images.device.type == "cuda" and torch.equal(a.images, b.images.cpu())
        assert torch.equal(a.labels, b.labels.cpu()) and torch.equal(a.valid, b.valid.cpu())
    text = "is gpu, but color_jitter.* comes before the images have one size; .*; use auto or cpu"
    with pytest.raises(gpuflow.ConfigError, match=text):
        load(folder, [{"decode": {"backend": "gpu"}}, *stages[1:]], "cuda")


def test_decoding_in_parts_gives_the_same_pixels(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with load(folder, STAGES, "cuda", "pipelines.train.batch.size=70") as loader:
        whole = list(loader)
    with load(folder, STAGES, "cuda", "pipelines.train.batch.size=70", "run.memory_limit=8MB") as loader:
        parts = list(loader)
    assert not apart(whole, parts)


@pytest.mark.parametrize("processes", [0, 3])
def test_batches_do_not_depend_on_what_else_is_decoded_at_the_time(processes: int, folder: Path) -> None:
    """Calls filled up from the next batches, files decoded in other processes: the same batches in the same order."""
    alone = ("run.memory_limit=8MB", "run.processes=0")  # without memory for images of the next batches
    for size in (13, 64):
        with load(folder, STAGES, "cuda", f"pipelines.train.batch.size={size}", *alone) as loader:
            expected = [batch for _ in range(2) for batch in loader]
        overrides = (f"pipelines.train.batch.size={size}", f"run.processes={processes}")
        with load(folder, STAGES, "cuda", *overrides) as loader:
            found = [batch for _ in range(2) for batch in loader]
            stats = loader.stats()
        assert len(found) == len(expected) == 2 * -(-207 // size) and stats["cpu_images"] >= 30
        for a, b in zip(expected, found, strict=True):
            assert torch.equal(a.indices, b.indices) and torch.equal(a.images, b.images)


def test_a_huge_image_leaves_no_huge_buffer(tmp_path: Path) -> None:
    gc.collect()
    before = torch.cuda.memory_allocated()  # of other tests
    pixels = images.photo(90, 70, seed=1)
    huge, small = images.jpeg(np.tile(pixels, (80, 80, 1))), images.jpeg(pixels)
    (tmp_path / "photos" / "a").mkdir(parents=True)
    for number in range(20 * 128):  # so that many calls follow that of the huge image
        (tmp_path / "photos" / "a" / f"{number:04}.jpg").write_bytes(huge if number == 3 else small)
    with load(
        tmp_path / "photos", STAGES, "cuda", "pipelines.train.batch.size=128", "pipelines.train.shuffle=false"
    ) as loader:
        list(loader)
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated() - before < 100 << 20


def test_a_larger_decode_buffer_takes_the_place_of_a_smaller_one(folder: Path) -> None:
    gc.collect()
    with load(folder, STAGES, "cuda") as loader:
        list(loader)
        torch.cuda.synchronize()
        runner: Any = loader._plan.gpu
        with runner._buffers.acquire(40 << 20):
            pass
        reserved = torch.cuda.memory_reserved()
        with runner._buffers.acquire(80 << 20):
            pass
        assert torch.cuda.memory_reserved() - reserved == 40 << 20, "the smaller one is not kept"


def test_out_of_memory_is_an_error_and_the_loader_works_on(folder: Path) -> None:
    with load(folder, STAGES, "cuda") as loader:
        expected = list(loader)
        loader.set_epoch(0)
        torch.cuda.empty_cache()
        taken = torch.empty(torch.cuda.mem_get_info()[0] - (24 << 20), dtype=torch.uint8, device="cuda")
        big = load(folder, [{"decode": {}}, {"resize": {"height": 2048, "width": 2048}}], "cuda")
        with pytest.raises(torch.OutOfMemoryError):
            list(big)
        del taken
        torch.cuda.empty_cache()
        big.set_epoch(0)
        assert sum(len(batch.images) for batch in big) == 207
        big.close()
        assert not apart(expected, loader)


@pytest.mark.parametrize("batch", [50, 32])
def test_without_engines_cuda_kernels_decode_if_asked(
    batch: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU without JPEG engines."""
    monkeypatch.setattr(gpu_backend, "BACKENDS", {"cuda": "CUDA kernels"})
    size = f"pipelines.train.batch.size={batch}"
    with load(folder, STAGES, "cpu", size) as on_cpu, load(folder, BY_THE_GPU, "cuda", size) as on_gpu:
        cpu, gpu = list(on_cpu), list(on_gpu)
        assert on_gpu.stats()["engine_images"] >= 100
    worst = max((a.images - b.images.cpu()).abs().max().item() for a, b in zip(cpu, gpu, strict=True))
    assert worst <= 4


def test_without_engines_the_cpu_decodes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any, **options: Any) -> None:
        raise NvjpegError("nvjpegCreateEx", 7)

    monkeypatch.setattr("gpuflow.execute.gpu.runner.GpuRunner", refuse)
    with load(folder, STAGES, "cpu") as on_cpu, load(folder, STAGES, "cuda") as loader:
        for a, b in zip(on_cpu, loader, strict=True):
            assert b.images.is_cuda and torch.equal(a.images, b.images.cpu())


def test_batches_that_the_consumer_keeps_do_not_change(folder: Path) -> None:
    """A consumer keeps batches and reads them on another stream, first slower and then faster than the loader."""
    with load(folder, STAGES, "cuda", "pipelines.train.batch.size=8") as loader:
        kept, sums = [], []
        for epoch in range(3):
            side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            for batch in loader:
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):
                    if epoch != 1:
                        torch.cuda._sleep(2_000_000)  # type: ignore[no-untyped-call]
                    sums.append(batch.images.double().sum())
                batch.images.record_stream(side)
                kept.append(batch)
        torch.cuda.synchronize()
        assert [batch.images.double().sum().item() for batch in kept] == [total.item() for total in sums]
        loader.set_epoch(0)
        assert all(torch.equal(a.images, b.images) for a, b in zip(loader, kept, strict=False))


@pytest.mark.parametrize("backend", ["hardware", "cuda"])
def test_files_are_checked_in_the_first_epoch(backend: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Later epochs check none, and have the same pixels at the same epoch."""
    checked: list[int] = []

    def counted(checks: FileChecks, samples: NDArray[np.int64], results: NDArray[np.int64]) -> None:
        checked.append(len(samples))
        remember(checks, samples, results)

    remember = FileChecks.remember
    monkeypatch.setattr(FileChecks, "remember", counted)
    if backend == "cuda":
        monkeypatch.setattr(gpu_backend, "BACKENDS", {"cuda": "CUDA kernels"})
    with load(folder, BY_THE_GPU, "cuda") as loader:
        first = list(loader)
        assert sum(checked) >= loader.stats()["engine_images"] - 207 // 9 >= 100, "of a ninth, rewritten, none is"
        checked.clear()
        loader.set_epoch(0)
        again = list(loader)
        assert not sum(checked)
    assert not apart(first, again)


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
    assert not apart(whole[1:], rest)


@pytest.mark.parametrize(  # processes take a second to start
    ("share", "processes", "cycles"), [(0.0, 0, 16), (0.0, 2, 5), (0.4, 2, 5)]
)
def test_cycles_leave_no_memory(share: float, processes: int, cycles: int, folder: Path) -> None:
    stages = [{"decode": {"cpu_share": share}}, *STAGES[1:]]

    def cycle() -> None:
        with load(folder, stages, "cuda", f"run.processes={processes}") as loader:
            for _ in loader:
                break

    for _ in range(3):
        cycle()
    torch.cuda.synchronize()
    before = torch.cuda.mem_get_info()[0]
    with nothing_left_behind():
        for _ in range(cycles):
            cycle()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    assert torch.cuda.mem_get_info()[0] >= before - (8 << 20), "a decoder takes 8 MiB"
