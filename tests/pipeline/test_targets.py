"""Boxes, keypoints and masks follow moves as torchvision v2's TVTensors do, for all samples at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torchvision import tv_tensors
from torchvision.transforms.v2 import functional as F

from gpuflow.execute.cpu.masks import MaskMap, mask_maps
from gpuflow.pipeline.moves import Crop, Flip, Move, Pad, Resize, Warp, forward
from gpuflow.pipeline.records import Field, Ragged
from gpuflow.pipeline.stage import Keys, StageKeys
from gpuflow.pipeline.targets import (
    PlacedMove,
    TargetRules,
    boxes_at_fault,
    carry_problem,
    keypoints_at_fault,
    map_boxes,
    map_keypoints,
    moves_of,
)
from gpuflow.stages import Flip as FlipStage
from gpuflow.stages import Perspective
from tests.datasets import Entries, program
from tests.records import random_boxes, torchvision_moves

ALL = TargetRules(min_area=0.0)


def placed(moves: Sequence[Move], sizes: NDArray[np.int64]) -> list[PlacedMove]:
    height, width = sizes[:, 0], sizes[:, 1]
    found = []
    for move in moves:
        found.append(PlacedMove.of(move, height, width))
        height, width = found[-1].after
    return found


def random_moves(rng: np.random.Generator, sizes: NDArray[np.int64], count: int) -> list[Move]:
    height, width = sizes[:, 0], sizes[:, 1]
    n, moves = len(sizes), list[Move]()
    for _ in range(count):
        kind = rng.integers(4)
        move: Move
        if kind == 0:
            h, w = rng.integers(2, height + 3), rng.integers(2, width + 3)
            move = Crop(rng.integers(-2, 4, n), rng.integers(-2, 4, n), h, w, margin=9)
        elif kind == 1:
            move = Flip(rng.random(n) < 0.5, rng.random(n) < 0.5)
        elif kind == 2:
            move = Resize(rng.integers(5, 60, n), rng.integers(5, 60, n), "bilinear", True)
        else:
            top, bottom, left, right = (rng.integers(0, 4, n) for _ in range(4))
            move = Pad(top, bottom, left, right)
        moves.append(move)
        _, height, width = forward(move, height, width)
    return moves


@pytest.mark.parametrize("seed", range(20))
def test_boxes_and_masks_equal_torchvisions(seed: int) -> None:
    rng = np.random.default_rng(seed)
    sizes = rng.integers(6, 50, (5, 2))
    parts = [random_boxes(rng, int(rng.integers(0, 5)), *size) for size in sizes.tolist()]
    boxes = Ragged.of(parts, np.empty((0, 4), np.float32))
    moves = random_moves(rng, sizes, 5)
    mapped = map_boxes(boxes, placed(moves, sizes), sizes, ALL)
    maps = [MaskMap(*size) for size in sizes.tolist()]
    for i, size in enumerate(sizes.tolist()):
        canvas: Any = tuple(size)
        theirs = tv_tensors.BoundingBoxes(torch.from_numpy(parts[i]), format="XYXY", canvas_size=canvas)
        theirs = F.clamp_bounding_boxes(torchvision_moves(theirs, moves, i))
        area = (theirs[:, 2] - theirs[:, 0]) * (theirs[:, 3] - theirs[:, 1])
        kept = mapped.kept_of(i)
        np.testing.assert_allclose(mapped.boxes[i], theirs[torch.from_numpy(kept)], rtol=1e-5, atol=2e-5)
        assert ((area > 1e-3).numpy() <= kept).all() and (kept <= (area > 0).numpy() | (area > -1e-3).numpy()).all()
        mask = rng.integers(0, 200, size).astype(np.uint8)
        for move in moves:
            assert not isinstance(move, Warp)
            maps[i].move(move, i)
        theirs = torchvision_moves(tv_tensors.Mask(torch.from_numpy(mask)), moves, i)
        np.testing.assert_array_equal(maps[i].apply(mask), theirs.numpy())


@pytest.mark.parametrize("seed", range(5))
def test_keypoints_equal_torchvisions_but_for_the_pixel_that_a_flip_counts_to(seed: int) -> None:
    """torchvision's keypoints are pixels' numbers: its flip takes x to W - 1 - x, ours takes x to W - x."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(6, 50, (4, 2))
    parts = [rng.uniform(0, size.min(), (2, 3, 3)).astype(np.float32) for size in sizes]
    for part in parts:
        part[..., 2] = 2
    points = Ragged.of(parts, np.empty((0, 3, 3), np.float32))
    moves = [move for move in random_moves(rng, sizes, 6) if not isinstance(move, Flip)]
    chain = placed(moves, sizes)
    mapped = map_keypoints(points, chain, sizes)
    for i, size in enumerate(sizes.tolist()):
        canvas: Any = tuple(size)
        theirs = tv_tensors.KeyPoints(torch.from_numpy(parts[i][..., :2]), canvas_size=canvas)
        theirs = torchvision_moves(theirs, moves, i)
        np.testing.assert_allclose(mapped[i][..., :2], theirs, rtol=1e-5, atol=2e-5)
        height, width = chain[-1].after[0][i], chain[-1].after[1][i]
        outside = ~((mapped[i][..., :2] >= 0) & (mapped[i][..., :2] <= [width, height])).all(axis=-1)
        assert (mapped[i][outside][:, 2] == 0).all()
    flip = placed([Flip(np.ones(4, bool), np.zeros(4, bool))], sizes)
    flipped = map_keypoints(points, flip, sizes)
    for i, size in enumerate(sizes.tolist()):
        canvas = tuple(size)
        theirs = F.horizontal_flip(tv_tensors.KeyPoints(torch.from_numpy(parts[i][..., :2] - 0.5), canvas_size=canvas))
        np.testing.assert_allclose(flipped[i][..., :2], theirs + 0.5, rtol=1e-5, atol=2e-5)


PAIRS = ((1, 2), (5, 3))


def flipped_plainly(points: NDArray[np.float32], width: int) -> NDArray[np.float32]:
    """Keypoints [K, 3] of a mirrored image, one by one."""
    mirrored = [[width - x, y, visibility] for x, y, visibility in points.tolist()]
    for left, right in PAIRS:
        mirrored[left], mirrored[right] = mirrored[right], mirrored[left]
    return np.array(mirrored, np.float32)


def test_keypoints_change_places_with_their_visibility_in_a_horizontal_flip() -> None:
    rng, sizes = np.random.default_rng(0), np.array([(30, 40), (20, 25), (9, 9)])
    parts = [rng.uniform(0, 9, (count, 6, 3)).astype(np.float32) for count in (2, 1, 0)]
    for part in parts:
        part[..., 2] = rng.integers(0, 3, part.shape[:2])
    points = Ragged.of(parts, np.empty((0, 6, 3), np.float32))
    horizontal, vertical = np.array([True, False, True]), np.array([False, True, False])
    chain = placed([Flip(horizontal, vertical)], sizes)
    mapped = map_keypoints(points, chain, sizes, PAIRS)
    for row, before in zip(mapped[0], parts[0], strict=True):
        np.testing.assert_array_equal(row, flipped_plainly(before, 40))
    np.testing.assert_array_equal(mapped[1], map_keypoints(points, chain, sizes)[1])
    none = Ragged(np.empty((0, 0, 3), np.float32), np.zeros(4, np.int64))
    assert map_keypoints(none, chain, sizes, PAIRS).values.shape == (0, 0, 3)


@pytest.mark.parametrize(
    "stages",
    [
        ({"flip": {"horizontal": 0.5, "vertical": 0.5}},) * 3,
        ({"affine": {"degrees": 9}}, *({"flip": {"horizontal": 0.5}},) * 2, {"rotate": {"degrees": 9}}),
    ],
    ids=["moves", "one warp"],
)
def test_an_odd_number_of_flips_exchanges_keypoints(stages: Entries) -> None:
    count, size = 40, (50, 60)
    folded = program(({"decode": {}}, *stages, {"center_crop": {"size": [40, 44]}}))
    keys, sizes = Keys(3, 1, np.arange(count)), np.array([size] * count)
    moves = moves_of(folded, keys, sizes)
    parts = list(np.random.default_rng(0).uniform(0, 50, (count, 1, 6, 3)).astype(np.float32))
    points = Ragged.of(parts, np.empty((0, 6, 3), np.float32))
    flips = [stage for stage in folded.pipeline.stages if isinstance(stage, FlipStage)]
    drawn = [flip.draw(keys.stage("flip", i), *sizes.T)[0] for i, flip in enumerate(flips)]
    odd = np.logical_xor.reduce([move.horizontal for move in drawn if isinstance(move, Flip)])
    assert len(drawn) >= 2 and 0 < odd.sum() < count
    plain = map_keypoints(points, moves, sizes).values
    wanted = np.where(odd[:, None, None], plain[:, [0, 2, 1, 5, 4, 3]], plain)
    np.testing.assert_array_equal(map_keypoints(points, moves, sizes, PAIRS).values, wanted)


def inverse(matrix: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.linalg.inv(matrix).astype(np.float64)


def affine(angle: float, translate: list[float], scale: float, size: tuple[int, int]) -> NDArray[np.float64]:
    """torchvision's affine map from input points to output points around the centre."""
    from torchvision.transforms.v2.functional._geometry import _get_inverse_affine_matrix

    center = [size[1] / 2, size[0] / 2]
    vector = _get_inverse_affine_matrix(center, angle, translate, scale, [0.0, 0.0], inverted=False)
    return np.array([*vector, 0, 0, 1]).reshape(3, 3)


@pytest.mark.parametrize("seed", range(8))
def test_warps_take_boxes_where_torchvisions_affine_does(seed: int) -> None:
    rng = np.random.default_rng(seed)
    size = (int(rng.integers(20, 50)), int(rng.integers(20, 50)))
    sizes = np.array([size])
    angle, move, scale = float(rng.uniform(-60, 60)), [3.0, -2.0], float(rng.uniform(0.7, 1.4))
    there = affine(angle, move, scale, size)
    warp = Warp(inverse(there)[None], sizes[:, 0], sizes[:, 1])
    boxes = random_boxes(rng, 6, *size)
    chain = placed([warp], sizes)
    mapped = map_boxes(Ragged.of([boxes], np.empty((0, 4), np.float32)), chain, sizes, ALL)
    theirs = F.affine(
        tv_tensors.BoundingBoxes(torch.from_numpy(boxes), format="XYXY", canvas_size=size), angle, move, scale, [0, 0]
    )
    np.testing.assert_allclose(mapped.boxes.values, theirs[torch.from_numpy(mapped.kept)], atol=1e-3)


def test_what_lies_beyond_the_horizon_of_a_perspective_is_kept_where_torchvision_shows_it() -> None:
    """The horizon may lie between the result's first pixel and the image: its third coordinates are then negative."""
    size, count = (100, 140), 200
    sizes = np.array([size] * count)
    (warp,) = Perspective(distortion_scale=0.9, probability=1.0).draw(StageKeys(1, 0, np.arange(count)), *sizes.T)
    assert isinstance(warp, Warp)
    box = np.array([[50, 30, 90, 70]], np.float32)
    point = np.array([[[70, 50, 2]]], np.float32)
    chain = placed([warp], sizes)
    corners = np.array([[0, 0, 1], [140, 0, 1], [140, 100, 1], [0, 100, 1]])
    beyond = np.flatnonzero((chain[0].matrix[:, 2] @ corners.T < 0).all(axis=1))
    assert len(beyond) > 5
    mapped = map_boxes(Ragged.of([box] * count, box[:0]), chain, sizes, ALL)
    points = map_keypoints(Ragged.of([point] * count, point[:0]), chain, sizes)
    for i in beyond.tolist():
        coefficients = (warp.matrix[i] / warp.matrix[i, 2, 2]).reshape(-1)[:8].tolist()
        boxes = tv_tensors.BoundingBoxes(torch.from_numpy(box), format="XYXY", canvas_size=size)
        theirs = F.clamp_bounding_boxes(F.perspective(boxes, None, None, coefficients=coefficients))
        np.testing.assert_allclose(mapped.boxes[i], theirs, atol=1e-2)
        keypoints = tv_tensors.KeyPoints(torch.from_numpy(point[..., :2]), canvas_size=size)
        theirs = F.perspective(keypoints, None, None, coefficients=coefficients)
        np.testing.assert_allclose(points[i][..., :2], theirs, atol=1e-2)
        assert points[i][0, 0, 2] == 2


def test_inactive_warps_leave_targets_alone() -> None:
    sizes = np.array([[20, 20], [20, 20]])
    there = np.stack([affine(90.0, [0.0, 0.0], 1.0, (20, 20))] * 2)
    warp = Warp(inverse(there), sizes[:, 0], sizes[:, 1], active=np.array([False, True]))
    box = np.array([[1, 2, 5, 9]], np.float32)
    mapped = map_boxes(Ragged.of([box, box], box[:0]), placed([warp], sizes), sizes, ALL)
    np.testing.assert_allclose(mapped.boxes[0], box)
    np.testing.assert_allclose(mapped.boxes[1], [[11, 1, 18, 5]], atol=1e-5)


WARPS: dict[str, Entries] = {
    "back again": ({"decode": {}}, {"affine": {"scale": [1.6, 1.6]}}, {"affine": {"scale": [0.625, 0.625]}}),
    "turned": (
        {"decode": {}},
        {"rotate": {"degrees": 45}},
        {"flip": {"horizontal": 0.5}},
        {"affine": {"translate": [0.2, 0.2], "scale": [0.5, 1.0]}},
        {"center_crop": {"size": [48, 50]}},
    ),
    "cropped": (
        {"decode": {}},
        {"random_crop": {"size": [50, 52]}},
        {"rotate": {"degrees": 30}},
        {"random_crop": {"size": [40, 44]}},
        {"affine": {"degrees": 20}},
        {"pad": {"padding": 3}},
    ),
}


@pytest.mark.parametrize("name", WARPS)
def test_warps_in_a_row_take_targets_where_they_take_pixels(name: str) -> None:
    """As one warp: what the first one moves out of the image, the next one may move back."""
    size, count = (60, 64), 40
    rng = np.random.default_rng(5)
    folded = program((*WARPS[name], {"center_crop": {"size": [46, 48]}}))
    keys, sizes = Keys(3, 1, np.arange(count)), np.array([size] * count)
    moves = moves_of(folded, keys, sizes)
    edges = np.sort(np.stack([rng.integers(0, side, (count, 4, 2)) for side in (64, 60)], axis=2), axis=3)
    boxes = (edges.transpose(0, 1, 3, 2).reshape(count, 4, 4) + np.array([0, 0, 1, 1])).astype(np.float32)
    empty, points = np.empty((0, 4), np.float32), np.empty((0, 1, 3), np.float32)
    mapped = map_boxes(Ragged.of(list(boxes), empty), moves, sizes, TargetRules(min_area=0.0))
    centres = np.concatenate([(boxes[..., :2] + boxes[..., 2:]) / 2, np.full((count, 4, 1), 2)], axis=2)
    keypoints = map_keypoints(Ragged.of(list(centres[:, :, None].astype(np.float32)), points), moves, sizes)
    seen = 0
    for i, mask_map in enumerate(mask_maps(folded, keys, sizes)):
        kept = iter(mapped.boxes[i])
        for j, ((x1, y1, x2, y2), is_kept) in enumerate(zip(boxes[i].astype(int), mapped.kept_of(i), strict=True)):
            mask = np.zeros(size, np.uint8)
            mask[y1:y2, x1:x2] = 1
            rows, columns = np.nonzero(mask_map.apply(mask))
            box = next(kept) if is_kept else None
            if len(rows):
                assert box is not None, "it is in the result"
                left, top, right, bottom = box + np.array([-1, -1, 1, 1])
                assert left <= columns.min() and columns.max() + 1 <= right, (i, j)
                assert top <= rows.min() and rows.max() + 1 <= bottom, (i, j)
            x, y, visible = keypoints[i][j, 0]
            if visible and 1 <= x <= 47 and 1 <= y <= 45 and min(x2 - x1, y2 - y1) > 4:
                assert mask_map.apply(mask)[int(y), int(x)] == 1, "a box's centre shows the box"
                seen += 1
    assert seen > 30
    if name == "back again":
        cropped = moves_of(program(({"decode": {}}, {"center_crop": {"size": [46, 48]}})), keys, sizes)
        alone = map_boxes(Ragged.of(list(boxes), empty), cropped, sizes, TargetRules(min_area=0.0))
        np.testing.assert_allclose(mapped.boxes.values, alone.boxes.values, atol=1e-3)


@pytest.mark.parametrize(
    ("rules", "kept"),
    [
        (TargetRules(), [True, True, False, False]),
        (TargetRules(min_area=17.0), [True, False, False, False]),
        (TargetRules(min_visibility=0.3), [True, False, False, False]),
        (TargetRules(min_visibility=1.0), [True, False, False, False]),
        (TargetRules(min_area=0.0), [True, True, True, False]),
    ],
)
def test_boxes_that_crops_leave_too_little_of_are_dropped_with_their_labels(
    rules: TargetRules, kept: list[bool]
) -> None:
    sizes = np.array([[40, 40]])
    boxes = np.array([[2, 2, 12, 12], [16, 2, 32, 6], [19.5, 3, 29, 4], [25, 25, 30, 30]], np.float32)
    corner, side = np.array([0]), np.array([20])
    crop = Crop(corner, corner, side, side)
    ragged = Ragged.of([boxes], boxes[:0])
    mapped = map_boxes(ragged, placed([crop], sizes), sizes, rules)
    assert mapped.kept.tolist() == kept
    labels = mapped.select(Ragged(np.arange(4), ragged.offsets))
    assert labels[0].tolist() == np.flatnonzero(kept).tolist()


def test_moves_are_those_that_the_program_draws() -> None:
    entries: Entries = (
        {"decode": {}},
        {"random_resized_crop": {"size": 24}},
        {"flip": {}},
        {"random_crop": {"size": 16}},
    )
    keys, sizes = Keys(3, 1, np.arange(4)), np.array([[40, 50]] * 4)
    kinds = [type(one.move) for one in moves_of(program(entries), keys, sizes)]
    assert kinds == [Crop, Resize, Flip, Crop]
    assert [one.after[0].tolist() for one in moves_of(program(entries), keys, sizes)][-1] == [16] * 4


@pytest.mark.parametrize(
    ("box", "reason"),
    [
        ([np.nan, 0, 1, 1], "boxes[0] must have finite numbers, got [nan, 0, 1, 1]"),
        ([5, 5, 5, 9], "boxes[0] must have x1 < x2 and y1 < y2, got [5, 5, 5, 9]"),
        ([50, 5, 60, 9], "boxes[0] lies outside the image of 40x50 pixels, got [50, 5, 60, 9]"),
    ],
)
def test_boxes_at_fault_are_named(box: list[float], reason: str) -> None:
    good = np.array([[0, 0, 1, 1]], np.float32)
    boxes = Ragged.of([good, np.array([box], np.float32)], good[:0])
    assert list(boxes_at_fault("boxes", boxes, np.array([[40, 50], [40, 50]]))) == [(1, reason)]


def test_keypoints_at_fault_are_named() -> None:
    points = Ragged.of([np.full((2, 1, 3), np.nan, np.float32)], np.empty((0, 1, 3), np.float32))
    assert next(keypoints_at_fault("points", points)) == (0, "points[0] must have finite numbers")
    points = Ragged.of([np.ones((count, 2, 3), np.float32) for count in (0, 3)], np.empty((0, 2, 3), np.float32))
    assert list(keypoints_at_fault("points", points, ((0, 1),))) == []
    assert list(keypoints_at_fault("points", points, ((0, 1), (2, 3)))) == [
        (1, "points must have at least 4 keypoints, which its flip_pairs name, got 2")
    ]


def test_a_stage_that_may_move_pixels_carries_no_boxes() -> None:
    boxes, text = Field(name="boxes", type="boxes"), Field(name="caption", type="text")
    turning = program(({"decode": {}}, {"center_crop": {"size": 8}}, {"torchvision": _parameters("RandomRotation", 9)}))
    colour = program(({"decode": {}}, {"center_crop": {"size": 8}}, {"torchvision": {"name": "RandomInvert"}}))
    problem = carry_problem(turning, [text, boxes], ("stages",))
    assert problem is not None and problem.code == "stage.order"
    assert str(problem) == (
        "stages[2].torchvision may move pixels, and boxes cannot follow; "
        "use a geometry stage of gpuflow, or leave the field out of source.fields"
    )
    assert carry_problem(turning, [text]) is None
    assert carry_problem(colour, [text, boxes]) is None


def _parameters(name: str, degrees: int) -> dict[str, Any]:
    return {"name": name, "parameters": (("degrees", degrees),)}
