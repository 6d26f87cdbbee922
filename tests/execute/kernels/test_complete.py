"""Which files the kernels find complete, in Triton's interpreter (its own process, numpy < 2.4) and on a GPU."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest
import torch

from gpuflow.decode.chunk_headers import read_headers
from gpuflow.decode.codecs import MAX_SCANS
from gpuflow.sources import Payload
from tests import damaged
from tests.execute.kernels.interpreted import lines_of
from tests.huffman import is_accepted, reads_to_its_end
from tests.images import jpeg, photo, with_restarts

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cases() -> dict[str, dict[str, Any]]:
    return {case["case"]: case for case in map(json.loads, lines_of("interpret_complete.py"))}


def test_files_are_complete_if_one_code_after_the_other_can_be_read(cases: dict[str, dict[str, Any]]) -> None:
    """On sound and damaged files, with the same result as the reference for each."""
    assert len(cases) == 3 * 8 + 7 + 4
    found = [
        (mine, other[0])
        for case in cases.values()
        for mine, other in zip(case["kernels"], case["others"], strict=True)
        if mine is not None
    ]
    assert len(found) > 100
    assert {mine for mine, _ in found} == {True, False}
    assert [pair for pair in found if pair[0] != pair[1]] == []


def test_sound_files_are_complete_and_files_that_lack_bytes_are_not(cases: dict[str, dict[str, Any]]) -> None:
    for name, case in cases.items():
        if name.startswith("sound"):
            assert case["kernels"] == [True] * 2, name
        elif name.startswith("bytes missing"):
            assert case["kernels"] == [False] * 4, name


def test_markers_that_do_not_belong_there_make_a_file_incomplete(cases: dict[str, dict[str, Any]]) -> None:
    """On an H200's engines, a file with a restart marker behind a fill byte once had other pixels after other files."""
    for name in ("markers in the scan", "a restart marker behind a fill byte", "restart markers"):
        assert True not in cases[name]["kernels"], name
    assert cases["data after the end, fill bytes before it"]["kernels"] == [True, True]


def test_what_takes_too_long_to_read_is_left_to_the_cpu(cases: dict[str, dict[str, Any]]) -> None:
    """Sound files, under lower limits than gpuflow's."""
    for name in ("_MAX_BITS", "_MAX_TABLES", "_MAX_SEGMENTS", "_MAX_FILL"):
        assert (cases[name]["kernels"], cases[name]["others"]) == ([False], [[False, True]]), name


def test_files_with_other_tables_are_left_to_the_cpu(cases: dict[str, dict[str, Any]]) -> None:
    """A baseline JPEG has tables 0 and 1; libjpeg-turbo takes four."""
    assert (cases["table 2"]["kernels"], cases["table 2"]["others"]) == ([False], [[False, True]])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no NVIDIA GPU")
def test_on_a_gpu() -> None:
    """Files of up to several hundred parts, sound ones, damaged ones, and ones that lack their last bytes."""
    from gpuflow.execute.device_stream import DeviceStream
    from gpuflow.execute.file_checks import FileChecks

    rng, files, sound = random.Random(0), list[bytes](), set[bytes]()
    for number in range(40):
        longest = 1500 if number % 10 == 9 else 400
        pixels = photo(rng.randint(17, longest), rng.randint(17, longest), seed=number)
        sampling = rng.choice(["4:2:0", "4:2:0", "4:4:4", "4:2:2", "4:4:0"])
        data = with_restarts(pixels, rng.choice([1, 7, 90]), sampling) if number % 4 == 1 else jpeg(pixels, sampling)
        sound.add(data)
        files += [data, *damaged.damages(data, rng), *(data[: -2 - n] + data[-2:] for n in (1, 2, 5, 12))]
    device_stream = DeviceStream(torch.device("cuda"))
    payload = Payload.of(files, lambda size: device_stream.pinned([size], torch.uint8).numpy())
    headers = read_headers(payload, max_pixels=1 << 30, max_scans=MAX_SCANS, orientation=False)
    rows = np.flatnonzero(headers.engine)
    complete = FileChecks(device_stream).complete(rows, payload, headers, None)
    right = np.array([reads_to_its_end(files[row]) for row in rows.tolist()])
    assert np.array_equal(complete, right)
    assert {files[row] for row in rows[complete].tolist()} >= sound
    accepted = np.array([is_accepted(files[row]) for row in rows.tolist()])
    assert (complete == accepted).mean() > 0.9
