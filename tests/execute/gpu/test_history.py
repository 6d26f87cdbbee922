"""On an NVIDIA GPU, a file's result depends only on its bytes: on engines, with CUDA kernels, in a service.

A decoder that has seen nothing is costly to make here, so most files are compared between two decoders of different
histories, and some with a new one.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import gpuflow
import gpuflow.serve
from gpuflow.errors import BadSampleError
from gpuflow.pipeline.stage import Keys
from gpuflow.sources import Payload
from gpuflow.stages import CenterCrop, Decode, Resize
from tests import damaged
from tests.datasets import write_config
from tests.images import jpeg, photo, with_restarts
from tests.running import program_of, run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no NVIDIA GPU"),
]

PROGRAM = program_of(Decode(), Resize(shorter=64), CenterCrop(size=64))


@cache
def pool() -> tuple[bytes, ...]:
    """Photographs of many sizes and samplings, valid and damaged ones, and some files of other formats."""
    rng = random.Random(0)
    found: list[bytes] = []
    for number in range(24):
        sampling = rng.choice(["4:2:0", "4:2:0", "4:2:0", "4:4:4", "4:2:2", "4:4:0"])
        data = jpeg(photo(rng.randint(17, 400), rng.randint(17, 500), seed=number), sampling)
        found += [
            data,
            jpeg(photo(60, 90, seed=number)[..., 0]),
            *damaged.damages(data, rng),
            *damaged.damages(data, rng),
        ]
        found += [
            damaged.without(data, damaged.QUANTISATION),
            damaged.without(data, damaged.QUANTISATION, slice(1, None)),
        ]
        found.append(damaged.without(data, damaged.HUFFMAN, slice(2, None)))
        found += [data[: -2 - missing] + data[-2:] for missing in (1, 2, 3, 5, 8)]
        found.append(with_restarts(photo(60, 90, seed=number), rng.choice([1, 4, 9])))
        found += damaged.damages(found[-1], rng)
    found += damaged.pool(60)
    rng.shuffle(found)
    return tuple(found)


def new_runner(backend: str) -> Any:
    from gpuflow.decode.nvjpeg import NvjpegError, find_nvjpeg
    from gpuflow.execute.gpu.device_stream import DeviceStream
    from gpuflow.execute.gpu.passes import passes_of
    from gpuflow.execute.gpu.runner import GpuRunner

    passes = passes_of(PROGRAM)
    assert not isinstance(passes, str)
    device_stream = DeviceStream(torch.device("cuda"))
    try:
        return GpuRunner(PROGRAM, [passes], device_stream, find_nvjpeg(), backend=backend, decode_bytes=1 << 27)
    except NvjpegError as error:
        pytest.skip(f"this GPU has no {backend} backend of nvJPEG: {error}")


def decode(runner: Any, numbers: Sequence[int], *, known: bool) -> list[torch.Tensor | str]:
    """The results of a runner for files of the pool. known: it gets their indices."""
    device_stream = runner._device_stream
    payload = Payload.of([pool()[i] for i in numbers], lambda size: device_stream.pinned([size], torch.uint8).numpy())
    prepared = runner.prepare(payload, Keys(0, 0, np.zeros(len(numbers), np.int64)), numbers if known else None)
    slots = runner.slots(len(numbers))
    faults = runner.launch(prepared, slots)
    device_stream.synchronize()
    images = slots.cpu()
    return [image if fault is None else str(fault) for image, fault in zip(images, faults, strict=True)]


def same(a: torch.Tensor | str, b: torch.Tensor | str) -> bool:
    if isinstance(a, str) or isinstance(b, str):
        return a == b
    return torch.equal(a, b)


def difference(a: torch.Tensor | str, b: torch.Tensor | str) -> str:
    """How two results of a file differ, in words."""
    if isinstance(a, str) or isinstance(b, str):
        return f"{a if isinstance(a, str) else 'an image'}, then {b if isinstance(b, str) else 'an image'}"
    levels = (a.int() - b.int()).abs().amax(0)
    rows, columns = levels.nonzero(as_tuple=True)
    return (
        f"{len(rows)} of {levels.numel()} pixels differ by up to {levels.max()} levels, in rows {rows.min()} to "
        f"{rows.max()}, columns {columns.min()} to {columns.max()}"
    )


@pytest.mark.parametrize("backend", ["hardware", "cuda", "cuda_few"])
def test_a_file_gives_what_it_gives_a_new_decoder(backend: str) -> None:
    rng, first, second = random.Random(1), new_runner(backend), new_runner(backend)
    everything = list(range(len(pool())))
    expected: dict[int, torch.Tensor | str] = {}
    for turn, (runner, known) in enumerate(((first, False), (second, True), (first, True), (second, True))):
        rng.shuffle(everything)
        start = 0
        while start < len(everything):
            numbers = everything[start : start + rng.choice([1, 3, 40, 100, 128])]
            start += len(numbers)
            for number, image in zip(numbers, decode(runner, numbers, known=known), strict=True):
                former = expected.setdefault(number, image)
                if not same(former, image):
                    size = len(pool()[number])
                    pytest.fail(f"turn {turn}, file {number} of {size} bytes: {difference(former, image)}")
    assert first.engine_images > 100, "they did take part"
    for number in rng.sample(everything, 10):
        (alone,) = decode(new_runner(backend), [number], known=False)
        assert same(alone, expected[number]), number


@pytest.mark.parametrize("backend", ["hardware", "cuda"])
def test_the_cpu_decodes_damaged_files(backend: str) -> None:
    """The CPU decodes files that the engines refuse or leave incomplete, and only those equal the CPU's pixels."""
    runner = new_runner(backend)
    images, faults = run(PROGRAM, pool())
    apart = []
    for number, mine in enumerate(decode(runner, range(len(pool())), known=True)):
        fault = faults[number]
        if isinstance(mine, str) or fault is not None:
            assert str(fault) == mine, number
        else:
            apart.append(float((images[number].int() - mine.int()).abs().max()))
    assert np.mean(np.array(apart) <= 2) > 0.7
    print(f"{backend}: {len(apart)} images, {np.mean(np.array(apart) <= 2):.3f} within two levels of the CPU")


def test_two_calls_at_a_time_keep_their_images_apart() -> None:
    runner = new_runner("hardware")
    expected = dict(enumerate(decode(runner, range(len(pool())), known=False)))
    for _ in range(40):
        runner.set_gpu_wait(1.0)
    wrong: list[int] = []

    def work(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(12):
            numbers = [rng.randrange(len(pool())) for _ in range(rng.choice([5, 60, 128]))]
            found = decode(runner, numbers, known=False)
            wrong.extend(i for i, image in zip(numbers, found, strict=True) if not same(expected[i], image))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert wrong == []


def served(tmp_path: Path, block: dict[str, Any]) -> Path:
    folder = tmp_path / "photos" / "a"
    folder.mkdir(parents=True)
    (folder / "0.jpg").write_bytes(jpeg(photo(40, 50)))
    return write_config(tmp_path / "x.yaml", folder.parent, serve=block)


def outcomes(predictor: gpuflow.serve.Predictor, numbers: Sequence[int], callers: int) -> list[torch.Tensor | str]:
    def ask(number: int) -> torch.Tensor | str:
        try:
            return predictor.submit_image(pool()[number]).result(60).cpu()
        except BadSampleError as fault:
            return str(fault)

    with ThreadPoolExecutor(callers) as threads:
        return list(threads.map(ask, numbers))


@pytest.mark.parametrize("kind", ["gpuflow", "torchpipe_gpu"])
def test_callers_of_a_service_get_their_own_images(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("omniback")
    block: dict[str, Any] = {"stages": [{"decode": {}}, {"resize": {"shorter": 64}}, {"center_crop": {"size": 64}}]}
    if kind != "gpuflow":
        block = {"preset": kind, "height": 64, "width": 64}
    path, rng = served(tmp_path, block), random.Random(2)
    numbers = list(range(len(pool())))
    found: dict[int, torch.Tensor | str] = {}
    with gpuflow.serve.load(path, device="cuda", preprocess_only=True) as predictor:
        for callers in (1, 20, 20):
            rng.shuffle(numbers)
            for number, mine in zip(numbers, outcomes(predictor, numbers, callers), strict=True):
                assert same(found.setdefault(number, mine), mine), number
        predictor.check()


def new_decoder(backend: str) -> Any:
    from gpuflow.decode.nvjpeg import NvjpegError, find_nvjpeg
    from gpuflow.execute.gpu.device_stream import DeviceStream
    from gpuflow.execute.gpu.nvjpeg_decoders import NvjpegDecoder

    try:
        return NvjpegDecoder(DeviceStream(torch.device("cuda")), find_nvjpeg(), "rgb", backend, second=False)
    except NvjpegError as error:
        pytest.skip(f"this GPU has no {backend} backend of nvJPEG: {error}")


@pytest.mark.parametrize("backend", ["hardware", "cuda", "cuda_few"])
def test_calls_of_any_size_give_the_same_pixels(backend: str) -> None:
    """nvJPEG's CUDA kernels get a few values of most photographs otherwise in calls of few images."""
    from gpuflow.execute.gpu.nvjpeg_decoders import JpegBatch

    height, width, count = 480, 640, 160
    decoder = new_decoder(backend)
    contents = [jpeg(photo(height, width, seed=number), "4:2:0") for number in range(count)]
    buffers = [torch.frombuffer(bytearray(data), dtype=torch.uint8).pin_memory() for data in contents]
    addresses = np.array([data.data_ptr() for data in buffers], np.uint64)
    lengths = np.array([len(data) for data in contents], np.uint64)

    def decoded(at_once: int) -> torch.Tensor:
        images = torch.zeros((count, height, width, 3), dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()
        for start in range(0, count, at_once):
            part = slice(start, start + at_once)
            images_at = np.zeros((len(lengths[part]), 8), np.uint64)
            images_at[:, 0], images_at[:, 4] = [image.data_ptr() for image in images[part]], 3 * width
            assert decoder.decode(JpegBatch(addresses[part], lengths[part], images_at, 0x22)).all()
        torch.cuda.synchronize()
        return images

    expected = decoded(128)
    for at_once in (7, 49, 50, 101):
        assert torch.equal(decoded(at_once), expected), at_once


@pytest.mark.parametrize("sampling", ["4:2:0", "4:4:4"])
@pytest.mark.parametrize("backend", ["hardware", "cuda", "cuda_few"])
def test_calls_in_a_row_of_one_decoder_keep_their_images_apart(backend: str, sampling: str) -> None:
    """Also if the GPU is busy when they are queued, and all have as many files."""
    from gpuflow.execute.gpu.nvjpeg_decoders import JpegBatch

    height, width, count, calls = 120, 160, 24, 4
    decoder, cuda = new_decoder(backend), torch.cuda
    device_stream = decoder._device_stream
    contents = [jpeg(photo(height, width, seed=number), sampling) for number in range(calls * count)]
    buffers = [torch.frombuffer(bytearray(data), dtype=torch.uint8).pin_memory() for data in contents]
    addresses = np.array([data.data_ptr() for data in buffers], np.uint64).reshape(calls, count)
    lengths = np.array([len(data) for data in contents], np.uint64).reshape(calls, count)
    kind = {"4:2:0": 0x22, "4:4:4": 0x11}[sampling]

    def decoded(*, wait: bool) -> torch.Tensor:
        images = torch.zeros((calls, count, height, width, 3), dtype=torch.uint8, device="cuda")
        cuda.synchronize()
        with device_stream.queued():
            keep_busy: Any = cuda._sleep
            keep_busy(10**8)
            for call in range(calls):
                images_at = np.zeros((count, 8), np.uint64)
                images_at[:, 0], images_at[:, 4] = [image.data_ptr() for image in images[call]], 3 * width
                files = JpegBatch(addresses[call], lengths[call], images_at, kind)
                assert decoder.decode(files).all()
                if wait:
                    cuda.synchronize()
        cuda.synchronize()
        return images

    expected = decoded(wait=True)
    for _ in range(5):
        assert torch.equal(decoded(wait=False), expected)
