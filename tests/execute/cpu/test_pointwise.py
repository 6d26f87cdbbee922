"""Colour operations: the C code gives what torchvision gives, to the bit, on each kind of processor."""

from __future__ import annotations

import ctypes
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torchvision.transforms.v2 import functional as tv

from gpuflow.execute.cpu import native_chunk
from gpuflow.execute.cpu.native_chunk import run_pointwise
from gpuflow.native.library import INTEGER, POINTER, function
from gpuflow.pipeline.pointwise import Operation, Operations

NOTHING = Operations.join(1, [])
SIZES = [(1, 1), (1, 511), (1, 513), (3, 7), (64, 48), (67, 83), (131, 1), (224, 224)]
MATRIX = np.array([[0.7, 0.4, -0.2, 9.5], [0.3, 0.9, 0.1, -20.0], [-0.5, 0.2, 1.1, 3.0]])


@pytest.fixture(scope="module", params=["fastest", "portable"], autouse=True)
def variant(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The functions of this processor, and of one without AVX2: those of a copy of the library, loaded once more."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "portable":
            patch.setenv("GPUFLOW_NATIVE", "portable")
            copy = tmp_path_factory.mktemp("library") / "library.so"
            shutil.copy(next(Path(native_chunk.__file__).parents[2].glob("native/_library*.so")), copy)
            library = ctypes.CDLL(str(copy))
            run = function("gpuflow_run_chunk", POINTER, INTEGER, INTEGER, library=library)
            patch.setattr(native_chunk, "_run_chunk", run)
        yield request.param


@pytest.fixture(scope="module")
def colors() -> NDArray[np.uint8]:
    """Every fifteenth of all colours, [1024, 1024, 3]."""
    numbers = np.arange(2**20) * 15
    return np.stack([numbers >> 16, numbers >> 8, numbers], axis=-1).astype(np.uint8).reshape(1024, 1024, 3)


# --- the reference ----------------------------------------------------------------------------------------------------


def multiplied(image: torch.Tensor, rows: NDArray[np.float64]) -> torch.Tensor:
    """Each channel is a sum of (red, green, blue, 1) with a row's weights; of a gray image the first one."""
    red, green, blue = image.float().expand(3, *image.shape[1:])
    sums = [
        red.mul(x).add_(green, alpha=y).add_(blue, alpha=z).add_(rest + 0.5) for x, y, z, rest in rows[: len(image)]
    ]
    return torch.stack(sums).clamp(0, 255).to(torch.uint8)


def expected(image: torch.Tensor, operations: Operations, i: int) -> torch.Tensor:
    """What sample i's operations make of its image [C, H, W], one after the other, by torchvision's own functions."""
    for code, factor in zip(operations.codes[i].tolist(), operations.factors[i].tolist(), strict=True):
        match Operation(code):
            case Operation.BRIGHTNESS:
                image = tv.adjust_brightness(image, factor)
            case Operation.CONTRAST:
                image = tv.adjust_contrast(image, factor)
            case Operation.SATURATION:
                image = tv.adjust_saturation(image, factor)
            case Operation.HUE:
                image = tv.adjust_hue(image, factor)
            case Operation.GRAYSCALE:
                image = tv.rgb_to_grayscale(image, len(image)) if len(image) == 3 else image
            case Operation.AUTOCONTRAST:
                image = tv.autocontrast(image)
            case Operation.EQUALIZE:
                image = tv.equalize(image)
            case Operation.TABLE:
                tables = torch.from_numpy(operations.tables[int(factor)])
                image = torch.stack([table[plane.long()] for table, plane in zip(tables, image, strict=False)])
            case Operation.MATRIX:
                image = multiplied(image, operations.values[int(factor)].reshape(3, 4))
            case Operation.ERASE:
                y, x, height, width = operations.values[int(factor), :4].astype(int)
                color = torch.from_numpy(operations.values[int(factor), 4:7])[: len(image)]
                image = image.clone()
                image[:, y : y + height, x : x + width] = color[:, None, None].to(torch.uint8)
            case Operation.NONE:
                pass
    return image


def programs(rng: np.random.Generator, count: int, size: tuple[int, int]) -> Operations:
    """Six operations of any kind for each sample, with factors that change nothing, little or much."""
    height, width = size
    codes = rng.choice([int(operation) for operation in Operation], (count, 6))
    factors = rng.choice([0.0, 1.0, 0.5, 1 + 1e-6, *rng.uniform(0, 3, 8)], codes.shape)
    hues = rng.choice([0.0, 0.5, -0.5, 1e-9, *rng.uniform(-0.5, 0.5, 8)], codes.shape)
    tables = rng.integers(0, 256, (4, 3, 256)).astype(np.uint8)
    values = np.zeros((8, 12))
    values[:4] = rng.normal(0, 0.7, (4, 12)) * ([1, 1, 1, 50] * 3)
    for row in values[4:]:
        y, x = rng.integers(0, height + 1), rng.integers(0, width + 1)
        row[:4] = y, x, rng.integers(0, height + 1 - y), rng.integers(0, width + 1 - x)
        row[4:7] = rng.integers(0, 256, 3)
    factors = np.where(codes == Operation.HUE, hues, factors)
    rows = rng.integers(0, 4, codes.shape)
    factors = np.where((codes == Operation.TABLE) | (codes == Operation.MATRIX), rows, factors)
    factors = np.where(codes == Operation.ERASE, 4 + rows, factors)
    return Operations.of(codes, factors, kinds=Operation, tables=tables, values=values)


def pictures(rng: np.random.Generator, shape: tuple[int, int, int]) -> list[NDArray[np.uint8]]:
    """Random levels, some levels, three levels, one colour, grays."""
    return [
        rng.integers(0, 256, shape, np.uint8),
        rng.integers(90, 140, shape, np.uint8),
        rng.choice(rng.integers(0, 256, 3, np.uint8), shape),
        np.full(shape, 77, np.uint8),
        np.repeat(rng.integers(0, 256, (*shape[:2], 1), np.uint8), shape[2], axis=2),
    ]


def planes_of(image: NDArray[np.uint8]) -> torch.Tensor:
    return torch.from_numpy(image).permute(2, 0, 1).contiguous()


# --- tests ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_any_operations_in_any_order(size: tuple[int, int], channels: int) -> None:
    rng, count = np.random.default_rng(size), 8
    operations = programs(rng, count, size)
    for image in pictures(rng, (*size, channels)):
        before = image.copy()
        for i in range(count):
            result = run_pointwise(image, operations, i, None, planes=False)
            assert torch.equal(planes_of(result), expected(planes_of(image), operations, i)), operations.codes[i]
        assert np.array_equal(image, before)


@pytest.mark.parametrize(
    ("operation", "factors"),
    [
        (Operation.SATURATION, (0.0, 0.3, 0.9, 1.0, 1.15, 1.7)),
        (Operation.HUE, (0.0, 0.03, -0.1, 0.37, 0.5, -0.5)),
        (Operation.GRAYSCALE, (0.0,)),
        (Operation.MATRIX, (0.0, 1.0, 2.0)),
    ],
    ids=str,
)
def test_every_fifteenth_colour(colors: NDArray[np.uint8], operation: Operation, factors: tuple[float, ...]) -> None:
    matrices = np.stack([MATRIX, 3 * MATRIX, np.eye(3, 4)]).reshape(3, 12)
    for factor in factors:
        operations = Operations.of(np.array([[operation]]), np.array([[factor]]), kinds=[operation], values=matrices)
        result = run_pointwise(colors, operations, 0, None, planes=False)
        assert torch.equal(planes_of(result), expected(planes_of(colors), operations, 0))


def test_contrast_of_a_large_image_uses_its_exact_mean() -> None:
    """torch's own sum of floats rounds, in a way that depends on the number of its threads."""
    image = np.random.default_rng(0).integers(0, 256, (1024, 1024, 3), np.uint8)
    mean = tv.rgb_to_grayscale(planes_of(image)).double().mean().to(torch.float32)
    for factor in (0.3, 1.7):
        operations = Operations.one(Operation.CONTRAST, np.ones(1, np.bool_), factor)
        floats = planes_of(image).float().mul_(factor).add_(mean, alpha=1.0 - factor)
        result = run_pointwise(image, operations, 0, None, planes=False)
        assert torch.equal(planes_of(result), floats.clamp_(0, 255).to(torch.uint8))


@pytest.mark.parametrize("channels", [1, 3])
def test_rows_that_lie_apart(channels: int) -> None:
    rng, size = np.random.default_rng(channels), (45, 61)
    operations = programs(rng, 30, size)
    for i in range(30):
        around = rng.integers(0, 256, (60, 90, channels), np.uint8)
        view = around[7:52, 11:72]
        result = run_pointwise(view, operations, i, None, planes=False)
        assert torch.equal(planes_of(result), expected(planes_of(view), operations, i))


def test_a_box_is_erased_within_the_image_alone() -> None:
    boxes = np.array([[-2, 3, 4, 9], [3, -1, 9, 3]])
    operations = Operations.erase(np.ones(2, np.bool_), boxes, np.full((2, 1), 9.0))
    image = np.zeros((5, 6, 1), np.uint8)
    first, second = (run_pointwise(image, operations, i, None, planes=False)[..., 0] for i in range(2))
    assert (first[:2, 3:] == 9).all() and first.sum() == 6 * 9
    assert (second[3:, :2] == 9).all() and second.sum() == 4 * 9


@pytest.mark.parametrize("planes", [True, False], ids=["planes", "interleaved"])
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("dtype", ["uint8", "uint16", "float32", "int64"])
def test_a_table_of_each_type(dtype: str, channels: int, planes: bool) -> None:
    rng = np.random.default_rng(0)
    table = rng.integers(0, 256, (channels, 256)).astype(dtype)
    for size in SIZES:
        image = rng.integers(0, 256, (*size, channels), np.uint8)
        wanted = np.stack([table[channel][image[..., channel]] for channel in range(channels)], 0 if planes else 2)
        assert np.array_equal(run_pointwise(image, NOTHING, 0, table, planes=planes), wanted)
