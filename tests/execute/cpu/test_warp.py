"""warp: at most half a level, and rounding errors, from the exact result; exact copies where no pixel is resampled."""

from __future__ import annotations

import itertools
from typing import Any, get_args

import cv2
import numpy as np
import pytest
from numpy.typing import NDArray

from gpuflow.pipeline.parameters import Border
from gpuflow.pipeline.program import Warping
from gpuflow.pipeline.stage import Lookup
from tests.execute.kernels.references import warp_reference
from tests.images import photo
from tests.reference.warping import opencv_5
from tests.running import warped

BORDERS = get_args(Border)
LOOKUPS = [Lookup(way, border, (7, 99, 200)) for way, border in itertools.product(("nearest", "bilinear"), BORDERS)]
every_lookup = pytest.mark.parametrize("lookup", LOOKUPS, ids=lambda lookup: f"{lookup.interpolation}, {lookup.border}")
BILINEAR = Lookup("bilinear", "constant", (0,))

MAPS = {
    "turned": [[0.8, 0.6, -7.3], [-0.6, 0.8, 21.4], [0, 0, 1]],
    "enlarged": [[0.21, 0.03, 5.01], [-0.02, 0.19, 3.3], [0, 0, 1]],
    "shrunk": [[5.3, 0.9, -40.0], [1.2, 6.1, -90.0], [0, 0, 1]],
    "mirrored": [[-1.1, 0.2, 50.0], [0.1, 0.9, 2.2], [0, 0, 1]],
    "perspective": [[0.9, 0.2, 3.0], [0.1, 1.1, -4.0], [0.004, 0.002, 1.0]],
    "half a pixel": [[1, 0, 0.5], [0, 1, -0.5], [0, 0, 1]],
    "quarter turn": [[6e-17, 1, 1e-14], [-1, 6e-17, 50], [0, 0, 1]],
    "far outside": [[1, 0, 3000.25], [0, 1, -5000.5], [0, 0, 1]],
}


def run(
    image: NDArray[np.uint8],
    matrix: Any,
    size: tuple[int, int],
    lookup: Lookup,
    shown: tuple[int, int, int, int] | None = None,
) -> NDArray[np.uint8]:
    """shown: the part of the result that is not black; by default all of it."""
    box, part = np.array([[0, 0, *image.shape[:2]]]), np.array([shown or (0, 0, *size)])
    height, width = np.array(size)[:, None]
    matrices = np.array([matrix], np.float64)
    warping = Warping(box=box, matrix=matrices, height=height, width=width, shown=part, misfits=(), lookup=lookup)
    return warp_reference(image, warping, 0)


def exact(image: NDArray[np.uint8], matrix: Any, size: tuple[int, int], lookup: Lookup) -> NDArray[np.float64]:
    return warped(image.transpose(2, 0, 1), np.array(matrix, np.float64), size, lookup).transpose(1, 2, 0)


@every_lookup
@pytest.mark.parametrize("matrix", MAPS.values(), ids=MAPS)
@pytest.mark.parametrize("size", [(50, 61), (1, 1), (1, 9), (2, 3)], ids=str)
def test_the_result_is_the_exact_one_rounded(size: tuple[int, int], matrix: Any, lookup: Lookup) -> None:
    image = photo(*size)
    apart = np.abs(run(image, matrix, (48, 57), lookup) - exact(image, matrix, (48, 57), lookup))
    assert apart.max() <= (0.5 + 0.2 if lookup.interpolation == "bilinear" else 0)


@every_lookup
def test_large_results_have_no_seams(lookup: Lookup) -> None:
    image, matrix = photo(400, 333), MAPS["perspective"]
    apart = np.abs(run(image, matrix, (530, 610), lookup) - exact(image, matrix, (530, 610), lookup))
    assert apart.max() <= (0.5 + 0.2 if lookup.interpolation == "bilinear" else 0)


@every_lookup
def test_a_part_of_the_result_is_that_of_the_whole(lookup: Lookup) -> None:
    image = photo(60, 70)
    for matrix in (MAPS["turned"], MAPS["perspective"], [[-1, 0, 40], [0, 1, -9], [0, 0, 1]]):
        whole, part = run(image, matrix, (64, 64), lookup), run(image, matrix, (64, 64), lookup, (9, 17, 20, 31))
        apart = np.abs(part[9:29, 17:48].astype(int) - whole[9:29, 17:48])
        assert apart.max() <= (1 if lookup.interpolation == "bilinear" else 0)
        assert np.count_nonzero(apart) < 0.02 * apart.size  # the last bit of a place in float32 may round a level


@every_lookup
def test_whole_pixels_are_copied(lookup: Lookup) -> None:
    image = photo(30, 41)
    for a, d, x, y in itertools.product((1, -1), (1, -1), (0, 41, -7, 60, 200), (0, 30, 11, -50)):
        matrix = [[a, 0, x], [0, d, y], [0, 0, 1]]
        assert np.array_equal(run(image, matrix, (36, 33), lookup), exact(image, matrix, (36, 33), lookup))
    for height, width in ((1, 1), (1, 5), (5, 1)):
        image, matrix = photo(height, width), [[1, 0, -3], [0, 1, -2], [0, 0, 1]]
        assert np.array_equal(run(image, matrix, (9, 9), lookup), exact(image, matrix, (9, 9), lookup))


@every_lookup
def test_the_identity_changes_nothing(lookup: Lookup) -> None:
    image = photo(40, 50)
    assert np.array_equal(run(image, np.eye(3), (40, 50), lookup), image)
    assert np.array_equal(run(image, [[1, 0, 1e-13], [0, 1, -1e-13], [0, 0, 1]], (40, 50), lookup), image)


@every_lookup
@pytest.mark.parametrize(
    "matrix",
    [[[0, 0, 0], [0, 0, 0], [0, 0, 0]], [[1, 0, 0], [0, 1, 0], [1, 0, -5.5]], [[1e300, 0, 0], [0, 1, 0], [0, 0, 1]]],
)
def test_points_without_an_image_are_harmless(matrix: Any, lookup: Lookup) -> None:
    assert run(photo(20, 30), matrix, (20, 30), lookup).shape == (20, 30, 3)


@opencv_5
@pytest.mark.parametrize("border", ["edge", "reflect", "symmetric"])
@pytest.mark.parametrize("matrix", [value for name, value in MAPS.items() if name not in ("far outside",)])
def test_the_result_is_opencvs(matrix: Any, border: str) -> None:
    """OpenCV's coordinates are indices of pixels, which lie half a pixel further to the top left."""
    image, half = photo(50, 61), np.array([[1, 0, 0.5], [0, 1, 0.5], [0, 0, 1]])
    borders = {"edge": cv2.BORDER_REPLICATE, "reflect": cv2.BORDER_REFLECT_101, "symmetric": cv2.BORDER_REFLECT}
    flags = cv2.INTER_LINEAR | cv2.WARP_INVERSE_MAP
    expected = cv2.warpPerspective(
        image, np.linalg.inv(half) @ np.array(matrix) @ half, (57, 48), flags=flags, borderMode=borders[border]
    )
    apart = np.abs(run(image, matrix, (48, 57), Lookup("bilinear", border, (0,))).astype(int) - expected)
    assert apart.max() <= 1


def test_gray_images() -> None:
    image = photo(40, 50)[..., :1]
    found = run(image, MAPS["turned"], (33, 44), BILINEAR)
    assert np.abs(found - exact(image, MAPS["turned"], (33, 44), BILINEAR)).max() <= 0.7


def test_a_result_may_have_more_rows_than_15_bits_count() -> None:
    """Nearest pixels of a long panorama that is turned, or enlarged."""
    image, rows = np.random.default_rng(0).integers(0, 256, (20, 20, 3), np.uint8), 40_000
    lookup = Lookup("nearest", "constant", (0.0,) * 3)
    matrix = np.array([[1, 0.0001, 0], [0, 20 / rows, 0], [0, 0, 1]])
    out, middle = (run(image, matrix, (rows, 20), lookup, shown) for shown in (None, (20_000, 0, 200, 20)))
    assert np.array_equal(out[20_000:20_200], middle[20_000:20_200]) and len(np.unique(out)) > 100
