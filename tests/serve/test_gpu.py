"""Serving on an NVIDIA GPU: the same images as validation, bad images among good ones, many callers."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import gpuflow
import gpuflow.serve
from gpuflow.errors import BadSampleError
from tests import images
from tests.datasets import write_config
from tests.serve.models import Models

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no NVIDIA GPU"),
]

STAGES = [{"decode": {}}, {"resize": {"shorter": 40}}, {"center_crop": {"size": 32}}, {"normalize": {}}]
KINDS = ("4:2:0", "4:2:2", "4:4:4", "4:4:0")


def keep_busy(cycles: int) -> None:
    """Have the default stream wait on the GPU."""
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """40 photographs, of which some are progressive or PNG."""
    for number in range(40):
        pixels = images.photo(50 + number, 90 - number, seed=number)
        path = tmp_path / "photos" / "a" / f"{number:02}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        if number % 10 == 7:
            path.write_bytes(images.png(pixels))
        else:
            path.write_bytes(images.jpeg(pixels, KINDS[number % 4], progressive=number % 10 == 3))
    return write_config(
        tmp_path / "x.yaml", tmp_path / "photos", val=STAGES, serve={"stages": STAGES}, batch={"size": 16}
    )


def test_images_equal_those_of_validation(config: Path, tmp_path: Path) -> None:
    with gpuflow.load(config, "val", device="cuda") as loader:
        expected = torch.cat([batch.images for batch in loader])
        assert loader.stats()["engine_images"] > 0
    files = sorted((tmp_path / "photos" / "a").iterdir())
    with gpuflow.serve.load(config, device="cuda", preprocess_only=True) as predictor:
        assert torch.equal(predictor.preprocess(files), expected)
        for file, image in zip(files[:9], expected, strict=False):
            assert torch.equal(predictor.preprocess(file), image)


def test_all_threads_preprocess_if_the_gpu_cannot(config: Path, tmp_path: Path) -> None:
    files = sorted((tmp_path / "photos" / "a").iterdir())
    pad = {"torchvision": {"name": "Pad", "padding": 2}}
    stages = [STAGES[0], pad, *STAGES[1:]]
    padded = write_config(
        tmp_path / "y.yaml", tmp_path / "photos", val=stages, serve={"stages": stages}, batch={"size": 40}
    )
    with gpuflow.load(padded, "val", device="cpu") as loader:
        (expected,) = [batch.images for batch in loader]
    with gpuflow.serve.load(padded, device="cuda", preprocess_only=True, overrides=["run.threads=3"]) as predictor:
        assert predictor.describe()["threads"] == 3
        assert torch.equal(predictor.preprocess(files).cpu(), expected)


def test_bad_images_leave_the_others_alone(config: Path, tmp_path: Path) -> None:
    files = [path.read_bytes() for path in sorted((tmp_path / "photos" / "a").iterdir())]
    mixed = [*files[:5], b"no image", *files[5:9], files[9][:200], b"", *files[10:]]
    with gpuflow.serve.load(config, device="cuda", model=torch.nn.Flatten()) as predictor:
        answers = predictor.predict(mixed)
        again = predictor.predict(files)
    bad = [i for i, answer in enumerate(answers) if isinstance(answer, BadSampleError)]
    assert bad == [5, 10, 11]
    good = [answer for answer in answers if not isinstance(answer, BadSampleError)]
    kept = [answer for i, answer in enumerate(again) if i != 9 and not isinstance(answer, BadSampleError)]
    assert all(torch.equal(a.logits, b.logits) for a, b in zip(good, kept, strict=True))


def test_a_list_is_one_batch(config: Path, tmp_path: Path) -> None:
    files = [path.read_bytes() for path in sorted((tmp_path / "photos" / "a").iterdir())]
    with gpuflow.serve.load(config, device="cuda", model=torch.nn.Flatten()) as predictor:
        for count, batches in (
            (1, {1: 1}),
            (4, {1: 1, 4: 1}),
            (16, {1: 1, 4: 1, 16: 1}),
            (40, {1: 1, 4: 1, 16: 3, 8: 1}),
        ):
            found = predictor([*files[:count]])
            assert predictor.batches == batches
            assert torch.equal(found, predictor.preprocess(files[:count]).flatten(1).cpu())
        predictor.predict([*files[:3], b"no image", *files[3:7]])
        assert predictor.batches == {**batches, 7: 1}


def test_a_served_checkpoint_is_replayed_as_cuda_graphs(models: Models) -> None:
    files = sorted(models.photos.rglob("*.jpg"))
    plain = ["serve.model.cuda_graphs=false"]
    with (
        gpuflow.serve.load(models.config, device="cuda") as graphs,
        gpuflow.serve.load(models.config, device="cuda", overrides=plain) as eager,
    ):
        assert graphs.describe()["engines"][0]["cuda_graphs"] == [1, 2, 4, 8, 16]
        assert eager.describe()["engines"][0]["cuda_graphs"] == []
        for count in (1, 3, len(files)):
            assert torch.equal(graphs(files[:count]), eager(files[:count]))


def test_many_callers_get_their_own_answers(config: Path, tmp_path: Path) -> None:
    files = [path.read_bytes() for path in sorted((tmp_path / "photos" / "a").iterdir())]
    with gpuflow.serve.load(config, device="cuda", model=torch.nn.Flatten()) as predictor:
        expected = [predictor(data) for data in files]
        with ThreadPoolExecutor(20) as callers:
            for _ in range(10):
                found = list(callers.map(predictor, files, timeout=60))
                assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("head", ["decode", "torchpipe_gpu"])
def test_images_of_earlier_requests_stay_while_the_gpu_is_busy(head: str, config: Path, tmp_path: Path) -> None:
    files = [path.read_bytes() for path in sorted((tmp_path / "photos" / "a").iterdir())[:7]]
    if head == "torchpipe_gpu":
        block = "{preset: torchpipe_gpu, height: 32, width: 32, stages: [normalize]}"
        config = tmp_path / "y.yaml"
        config.write_text(f"source: {{folder: {tmp_path / 'photos'}}}\npipelines: {{val: {block}}}\nserve: {block}\n")
    with gpuflow.serve.load(config, device="cuda", preprocess_only=True) as predictor:
        expected = [predictor.preprocess(data).cpu() for data in files]
        keep_busy(2_000_000_000)  # about a second: what is queued after it waits
        found = [predictor.preprocess(data) for data in files]
        assert all(torch.equal(a.cpu(), b) for a, b in zip(found, expected, strict=True))


def test_an_image_is_ready_on_another_stream(config: Path, tmp_path: Path) -> None:
    data = sorted((tmp_path / "photos" / "a").iterdir())[0].read_bytes()
    with gpuflow.serve.load(config, device="cuda", preprocess_only=True) as predictor:
        expected = predictor.preprocess(data).cpu()
        keep_busy(500_000_000)
        image = predictor.preprocess(data)
        with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
            assert torch.equal(image.cpu(), expected)
