"""`preprocess(..., matrices=True)`: points of the model's input go back to where they were in the given image."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
import yaml

import gpuflow.serve
from gpuflow.errors import BadSampleError, PredictorError
from gpuflow.serve.model_input import most_pixels
from gpuflow.stages import CenterCrop, Decode, Resize
from tests.running import program_of

LETTERBOX = [{"letterbox": {"size": [60, 80]}}]
RESIZE = [{"resize": {"shorter": 40}}, {"center_crop": {"size": 32}}]
WARP = [{"warp_affine": {"matrix": [[0.8, 0.3, 5.0], [-0.2, 1.1, 2.0]], "size": [70, 50]}}, *LETTERBOX]
SIZES = [(48, 96), (90, 70), (64, 64)]
"""height, width"""


def write(path: Path, stages: list[Any]) -> Path:
    """A file that serves these stages."""
    serve = {"stages": [{"decode": {}}, *stages]} if stages[0] != "preset" else stages[1]
    pipelines = {"val": {"stages": [{"decode": {}}, {"center_crop": {"size": 8}}], "batch": {"size": 4}}}
    document = {"source": {"folder": "x"}, "pipelines": pipelines, "serve": serve, "run": {"threads": 1}}
    path.write_text(yaml.safe_dump(document))
    return path


def image(height: int, width: int) -> bytes:
    """A white square of 4 pixels a side around the point (30, 26), on black."""
    pixels = np.zeros((height, width, 3), np.uint8)
    pixels[24:28, 28:32] = 255
    return cv2.imencode(".png", pixels)[1].tobytes()


def expected(stages: list[Any], height: int, width: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Where points of the given image go, by hand."""
    if stages is RESIZE:
        after = [int(side * 40 / min(height, width)) for side in (height, width)]
        top, left = (round((side - 32) / 2.0) for side in after)
        return np.array([[after[1] / width, 0, -left], [0, after[0] / height, -top], [0, 0, 1]])
    first = np.eye(3)
    if stages is WARP:
        half = np.array([[1, 0, 0.5], [0, 1, 0.5], [0, 0, 1.0]])  # from the centres of OpenCV to corners
        first = half @ np.array([[0.8, 0.3, 5.0], [-0.2, 1.1, 2.0], [0, 0, 1]]) @ np.linalg.inv(half)
        height, width = 70, 50
    scale = min(60 / height, 80 / width)
    inner = [round(height * scale), round(width * scale)]
    top, left = (60 - inner[0]) // 2, (80 - inner[1]) // 2
    box = np.array([[inner[1] / width, 0, left], [0, inner[0] / height, top], [0, 0, 1]])
    return box @ first


@pytest.mark.parametrize("stages", [LETTERBOX, RESIZE, WARP], ids=["letterbox", "resize and crop", "warp"])
def test_points_go_there_and_back(stages: list[Any], tmp_path: Path) -> None:
    files = [image(*size) for size in SIZES]
    with gpuflow.serve.load(write(tmp_path / "x.yaml", stages), preprocess_only=True) as predictor:
        images, matrices = predictor.preprocess(files, matrices=True)
        assert torch.equal(images, predictor.preprocess(files))
        one, matrix = predictor.preprocess(files[1], matrices=True)
        none = predictor.preprocess([], matrices=True)
    assert (matrices.shape, matrices.dtype) == ((3, 3, 3), torch.float64)
    assert torch.equal(one, images[1]) and torch.equal(matrix, matrices[1])
    assert [len(part) for part in none] == [0, 0]
    points = np.random.default_rng(0).uniform(0, 90, (20, 2))
    for back, (height, width) in zip(matrices.numpy(), SIZES, strict=True):
        there = np.c_[points, np.ones(20)] @ expected(stages, height, width).T
        again = there @ back.T
        assert np.abs(again[:, :2] / again[:, 2:] - points).max() < 1e-9


@pytest.mark.parametrize("stages", [LETTERBOX, RESIZE, WARP], ids=["letterbox", "resize and crop", "warp"])
def test_what_is_seen_in_the_result_is_where_the_matrix_says(stages: list[Any], tmp_path: Path) -> None:
    with gpuflow.serve.load(write(tmp_path / "x.yaml", stages), preprocess_only=True) as predictor:
        images, matrices = predictor.preprocess([image(*size) for size in SIZES], matrices=True)
    for pixels, back in zip(images.double().numpy(), matrices.numpy(), strict=True):
        light = np.where(pixels[0] == 114, 0, pixels[0])
        rows, columns = np.indices(light.shape) + 0.5
        centre = back @ [(light * columns).sum() / light.sum(), (light * rows).sum() / light.sum(), 1]
        assert np.abs(centre[:2] / centre[2] - (30, 26)).max() < 0.6


def test_a_file_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is replaced meanwhile would give a matrix of another image."""
    path, reads = tmp_path / "a.png", list[Path]()
    path.write_bytes(image(48, 96))
    read_bytes = Path.read_bytes

    def read(self: Path) -> bytes:
        reads.append(self)
        return read_bytes(self)

    with gpuflow.serve.load(write(tmp_path / "x.yaml", LETTERBOX), preprocess_only=True) as predictor:
        monkeypatch.setattr(Path, "read_bytes", read)
        predictor.preprocess(path, matrices=True)
    assert reads == [path]


def test_bad_images_and_stages_that_do_not_say(tmp_path: Path) -> None:
    file = write(tmp_path / "x.yaml", LETTERBOX)
    with gpuflow.serve.load(file, preprocess_only=True) as predictor:
        (tmp_path / "cut.png").write_bytes(image(50, 50)[:60])
        for bad in (image(50, 50)[:60], b"", str(tmp_path / "gone.png"), str(tmp_path / "cut.png")):
            reasons = []
            for matrices in (False, True):
                with pytest.raises(BadSampleError) as caught:
                    predictor.preprocess([image(50, 50), bad], matrices=matrices)
                reasons.append(str(caught.value))
            assert reasons[0] == reasons[1]
    opaque = [{"torchvision": {"name": "CenterCrop", "size": 20}}]
    preset = ["preset", {"preset": "torchpipe_cpu", "height": 20, "width": 30}]
    for stages, place in ((opaque, "serve.stages[1].torchvision"), (preset, "serve.stages[0].")):
        with gpuflow.serve.load(write(tmp_path / "y.yaml", stages), preprocess_only=True) as predictor:
            assert len(predictor.preprocess([image(50, 50)])) == 1
            with pytest.raises(PredictorError) as refused:
                predictor.preprocess([image(50, 50)], matrices=True)
        assert place in str(refused.value) and "may move pixels without saying where to" in str(refused.value)


@pytest.mark.parametrize(
    ("size", "most"),
    [
        ((40, 30), 256 * 341),
        ((2700, 1), 256 * 691_200),
        ((1, 300), 256 * 76_800),
        ((65_500, 1), 65_500),
        ((600, 600), 360_000),
    ],
)
def test_the_most_pixels_that_an_image_has(size: tuple[int, int], most: int) -> None:
    """Of 1 x 65,500 pixels, decode.max_pixels lets no resized image be."""
    pipeline = program_of(Decode(), Resize(shorter=256), CenterCrop(size=224)).pipeline
    assert most_pixels(pipeline, *size) == most
