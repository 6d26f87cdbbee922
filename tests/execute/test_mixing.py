"""Mixing a batch by given numbers: equal to timm and torchvision, in place and at once, in every dtype and layout."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuflow.execute.mixing import arrays_of, mix_images, mix_images_at_once, mix_labels, soft_labels
from gpuflow.pipeline.stage import Mixture
from gpuflow.stages import Cutmix, Mixup
from tests.mixing import (
    CLASSES,
    Box,
    batch_of,
    by_definition,
    mixed,
    mixture_of,
    timm_batch,
    timm_box,
    timm_rows,
    timm_target,
    torchvision_box,
)

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def flipped(count: int) -> list[int]:
    return list(range(count))[::-1]


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lam", [0.0, 0.25, 0.3, 0.9999, 1.0])
def test_blending_a_batch_equals_timm_bit_for_bit(lam: float, dtype: torch.dtype, smoothing: float) -> None:
    images, labels = batch_of(6, dtype=dtype)
    lam = float(np.float32(lam))
    result, probabilities = mixed(Mixup(label_smoothing=smoothing), mixture_of(flipped(6), [lam] * 6), images, labels)
    assert torch.equal(result, timm_batch(images, lam, None))
    torch.testing.assert_close(torch.from_numpy(probabilities), timm_target(labels, lam, smoothing), rtol=0, atol=1e-7)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.uint8])
@pytest.mark.parametrize("lam", [0.0, 0.3, 0.97])
def test_boxes_of_a_batch_equal_timm_bit_for_bit(lam: float, dtype: torch.dtype) -> None:
    images, labels = batch_of(6, dtype=dtype)
    for y, x in [(0, 0), (6, 9), (12, 16)]:
        box, share = timm_box(13, 17, lam, y, x)
        mixture = mixture_of(flipped(6), [1.0] * 6, [box] * 6, [share] * 6)
        result, probabilities = mixed(Cutmix(label_smoothing=0.1), mixture, images, labels)
        assert torch.equal(result, timm_batch(images, lam, box))
        expected = timm_target(labels, share, 0.1)
        torch.testing.assert_close(torch.from_numpy(probabilities), expected, rtol=0, atol=1e-7)


def test_numbers_of_each_sample_equal_timm_bit_for_bit() -> None:
    images, labels = batch_of(6)
    lams = [float(np.float32(lam)) for lam in (0.3, 1.0, 0.7, 0.5, 0.01, 0.9)]
    boxes: list[Box | None] = [None, None, (2, 3, 5, 4), None, (0, 0, 13, 1), None]
    shares = [lam if box is None else 1 - box[2] * box[3] / (13 * 17) for lam, box in zip(lams, boxes, strict=True)]
    weights = [lam if box is None else 1.0 for lam, box in zip(lams, boxes, strict=True)]
    mixture = mixture_of(flipped(6), weights, [box or (0, 0, 0, 0) for box in boxes], shares)
    result, probabilities = mixed(Mixup(label_smoothing=0.1), mixture, images, labels)
    assert torch.equal(result, timm_rows(images, lams, boxes))
    expected = timm_target(labels, torch.tensor(shares, dtype=torch.float32)[:, None], 0.1)
    torch.testing.assert_close(torch.from_numpy(probabilities), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("lam", [0.1, 0.5, 0.83])
def test_mixup_and_cutmix_of_torchvision_on_its_own_partners(lam: float) -> None:
    """torchvision's partner is the sample before; the formulas are the same."""
    from torchvision.transforms import v2

    images, labels = batch_of(5)
    classes = torch.from_numpy(labels)
    lam, before = float(np.float32(lam)), [4, 0, 1, 2, 3]
    box, share = torchvision_box(13, 17, lam, 4, 15)
    ours = {
        v2.MixUp: mixture_of(before, [lam] * 5),
        v2.CutMix: mixture_of(before, [1.0] * 5, [box] * 5, [share] * 5),
    }
    for transform, mixture in ours.items():
        theirs = transform(num_classes=CLASSES)
        y, x, height, width = box
        parameters = {
            "labels": classes,
            "batch_size": 5,
            "lam": lam,
            "box": (x, y, x + width, y + height),
            "lam_adjusted": share,
        }
        result, probabilities = mixed(Mixup(), mixture, images, labels)
        assert torch.equal(result, theirs.transform(images, parameters))
        expected = theirs.transform(classes, parameters)
        torch.testing.assert_close(torch.from_numpy(probabilities), expected, rtol=0, atol=1e-7)


# --- any mixture ------------------------------------------------------------------------------------------------------


@st.composite
def mixtures(draw: st.DrawFn, *, boxes_only: bool = False) -> Mixture:
    """Any partners, also several samples with one; any weights and boxes."""
    count = draw(st.integers(1, 7))
    rows = st.integers(0, count - 1)
    share = st.sampled_from([0.0, 0.3, 0.5, 1.0]) if not boxes_only else st.just(1.0)
    corners = [st.integers(0, limit) for limit in (13, 17, 13, 17)]
    box = st.builds(lambda y, x, height, width: (y, x, min(height, 13 - y), min(width, 17 - x)), *corners)
    none = st.just((0, 0, 0, 0))
    return mixture_of(
        [draw(rows) for _ in range(count)],
        [draw(share) for _ in range(count)],
        [draw(none | box) for _ in range(count)],
    )


@settings(max_examples=150)
@given(mixture=mixtures(), dtype=st.sampled_from(DTYPES), nhwc=st.booleans())
def test_images_in_place_and_by_definition(mixture: Mixture, dtype: torch.dtype, nhwc: bool) -> None:
    images, _ = batch_of(len(mixture.partners), dtype=dtype, nhwc=nhwc)
    result = images.clone()
    mix_images(result, mixture)
    assert torch.equal(result, by_definition(images, mixture))
    same = mixture.changed == 0
    assert torch.equal(result[same], images[same])


def at_once(images: torch.Tensor, mixture: Mixture, device: str = "cpu") -> torch.Tensor:
    result = images.to(device, copy=True)
    sent = [torch.from_numpy(array).to(device) for array in arrays_of(mixture)]
    mix_images_at_once(result, sent, blends=bool((mixture.weights != 1).any()))
    assert result.stride() == images.stride()
    return result.cpu()


@settings(max_examples=150)
@given(mixture=mixtures(), dtype=st.sampled_from(DTYPES), nhwc=st.booleans(), drop=st.integers(0, 7))
def test_a_batch_at_once_equals_one_image_after_the_other(
    mixture: Mixture, dtype: torch.dtype, nhwc: bool, drop: int
) -> None:
    """Also where skipped samples hold anything."""
    images, _ = batch_of(len(mixture.partners), dtype=dtype, nhwc=nhwc)
    mixture = either_blend_or_box(mixture)
    kept = np.arange(len(images)) != drop
    if drop < len(images):
        images[drop] = float("nan")
    mixture = mixture.among(kept)
    expected = images.clone()
    mix_images(expected, mixture)
    assert torch.equal(at_once(images, mixture)[kept], expected[kept])


@settings(max_examples=30)
@given(mixture=mixtures(boxes_only=True), nhwc=st.booleans())
def test_boxes_of_uint8_at_once(mixture: Mixture, nhwc: bool) -> None:
    images, _ = batch_of(len(mixture.partners), dtype=torch.uint8, nhwc=nhwc)
    assert torch.equal(at_once(images, mixture), by_definition(images, mixture))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("nhwc", [False, True])
def test_a_gpu_gives_the_same_bits(dtype: torch.dtype, nhwc: bool) -> None:
    images, _ = batch_of(16, size=(64, 48), dtype=dtype, nhwc=nhwc)
    weights = [1.0 if i % 3 == 0 else i / 16 for i in range(16)]
    boxes = [(i, 2, 20, 30) if i % 3 == 0 else (0, 0, 0, 0) for i in range(16)]
    mixture = mixture_of(flipped(16), weights, boxes)
    assert torch.equal(at_once(images, mixture, "cuda"), by_definition(images, mixture))


def either_blend_or_box(mixture: Mixture) -> Mixture:
    boxed = mixture.boxes[:, 2:].all(axis=1)
    weights = np.where(boxed, 1.0, mixture.weights)
    return Mixture(partners=mixture.partners, weights=weights, boxes=mixture.boxes, shares=mixture.shares)


# --- labels, and samples that are left out ----------------------------------------------------------------------------


@given(mixture=mixtures(), smoothing=st.sampled_from([0.0, 0.1, 1.0]))
def test_probabilities_add_up_to_one(mixture: Mixture, smoothing: float) -> None:
    _, labels = batch_of(len(mixture.partners))
    probabilities = soft_labels(labels, CLASSES)
    for _ in range(3):
        probabilities = mix_labels(probabilities, mixture, smoothing)
    assert probabilities.dtype == np.float32
    assert np.allclose(probabilities.sum(axis=1), 1, atol=1e-5)


@given(mixture=mixtures(), kept=st.lists(st.booleans(), min_size=7, max_size=7))
def test_samples_that_are_left_out_are_nobodys_partners(mixture: Mixture, kept: list[bool]) -> None:
    count = len(mixture.partners)
    there = np.array(kept[:count])
    rest = mixture.among(there)
    for i in range(count):
        if there[i] and there[mixture.partners[i]] and mixture.partners[i] != i:
            assert (rest.partners[i], rest.weights[i], rest.shares[i]) == (
                mixture.partners[i],
                mixture.weights[i],
                mixture.shares[i],
            )
            assert (rest.boxes[i] == mixture.boxes[i]).all()
        else:
            assert (rest.partners[i], rest.weights[i], rest.shares[i]) == (i, 1, 1)
            assert not rest.changed[i]
