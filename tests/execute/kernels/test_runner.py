"""The GPU runner in Triton's interpreter, with a fake stream and a fake libnvjpeg: see interpret_runner.py."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.execute.kernels.interpreted import lines_of


@pytest.fixture(scope="module")
def cases() -> dict[str, dict[str, Any]]:
    return {case["case"]: case for case in map(json.loads, lines_of("interpret_runner.py"))}


def test_pixels_and_faults_are_those_of_the_cpu(cases: dict[str, dict[str, Any]]) -> None:
    assert len(cases) == 31
    for case in cases.values():
        assert case["faults"] == [], case
        most = (
            2 if case["case"].startswith(("new colours", "other sizes")) else 1
        )  # which amplify a difference of one level
        assert case["max"] <= most and case["mean"] < 0.012, case


def test_what_the_engines_refuse_is_decoded_by_the_cpu(cases: dict[str, dict[str, Any]]) -> None:
    """Of 12 samples 3 are bad; the CPU decodes a PNG and a file that makes the call fail. A progressive JPEG is
    rewritten for the engines."""
    for name, case in cases.items():
        if not name.startswith(("misfits", "views", "served", "histories", "refusals", "windows")):
            assert (case["good"], case["engines"], case["cpu"]) == (9, 7, 2), case


def test_the_cpu_reports_a_crop_that_does_not_fit(cases: dict[str, dict[str, Any]]) -> None:
    case = cases["misfits, 1048576 bytes"]
    assert (case["good"], case["engines"], case["cpu"]) == (5, 5, 4)


def test_the_cpu_reports_a_resized_image_that_is_too_large(cases: dict[str, dict[str, Any]]) -> None:
    case = cases["misfits, too large, 1048576 bytes"]
    assert 0 < case["good"] < 9 and 0 < case["engines"] < 7, case


def test_calls_and_copies_do_not_depend_on_the_number_of_images(cases: dict[str, dict[str, Any]]) -> None:
    """One call for each of four samplings, then halves around the one of 5 that fails. Copies: a plan for each call,
    and twice pixels and rows."""
    assert (cases["crop, 1048576 bytes"]["decodes"], cases["crop, 1048576 bytes"]["copies"]) == (10, [8, 8])
    assert (cases["misfits, 1048576 bytes"]["decodes"], cases["misfits, 1048576 bytes"]["copies"]) == (4, [6, 6])
    assert cases["misfits, 1048576 bytes"]["images"] == [5, 5]


def test_the_engines_get_the_same_bytes_of_a_file_each_time(cases: dict[str, dict[str, Any]]) -> None:
    """With the zeros after it, because they read a little ahead."""
    for name in ("crop", "misfits"):
        assert cases[f"{name}, 1048576 bytes"]["new"] == 0


def test_a_file_gives_the_result_of_a_new_decoder_after_any_other_files(cases: dict[str, dict[str, Any]]) -> None:
    case = cases["histories"]
    assert case["wrong"] == 0
    assert case["max"] <= 1, "the CPU decodes a damaged file"
    assert case["cpu"] >= 8
    assert case["marked"] == [0, 1], "the engines never get a file with a marker that its scan should not have"


def test_images_that_an_opaque_stage_refuses_are_bad_and_no_others(cases: dict[str, dict[str, Any]]) -> None:
    """The stage gets halves of what it refuses. The others keep the result that they have in a chunk without these."""
    case, fault = cases["refusals"], "inverted: ValueError: the image is dark"
    assert case["found"] == ["None", "None", fault, "None", "None", fault, "None", fault]
    assert case["max"] == 0
    assert case["calls"] == [7, 3, 1, 2, 1, 1, 4, 2, 2, 1, 1]
    assert case["counts"] == [5, 3], "the CPU says whether an image that the stage refuses is bad"
    assert case["of_images"] == ["None", fault, "None"]
    assert case["of_dark_images"] == [fault] * 8


def test_what_no_image_causes_is_raised_as_it_is(cases: dict[str, dict[str, Any]]) -> None:
    raised = cases["refusals"]["raised"]
    assert raised["after writing"] == ["ValueError", "the image is dark", [7]], "the images are not what they were"
    assert raised["after an error of CUDA"] == [
        "RuntimeError",
        "CUDA error: an illegal memory access was encountered",
        [7],
    ]
    name, text, note, calls = raised["on the GPU"]
    assert (name, text) == ("RuntimeError", "it has no form for this device")
    assert note == "The stage inverted raised this on the GPU only." and len(calls) == 13


def test_views_are_made_of_images_that_are_decoded_once(cases: dict[str, dict[str, Any]]) -> None:
    """Of 11 files 2 cannot be decoded, and 1 is too small for a view. A call decodes images of a chunk and of the next,
    with any number of views. If the images of a view differ in size after its first pass, a call decodes only the
    images of its chunk."""
    for name, decoded in (("views", [4, 4]), ("views, other sizes", [2, 4])):
        case = cases[name]
        assert (case["good"], case["engines"], case["cpu"]) == (8, 6, 3)
        assert case["decoded"] == decoded


def test_launches_for_views_do_not_depend_on_the_number_of_images(cases: dict[str, dict[str, Any]]) -> None:
    """One call, one transfer of what the first passes read and one for the later ones of a view, and each pass of each
    number of each view once."""
    one, two = cases["views"]["counts"]
    assert one == two == {"resample_all": 4, "warp_all": 1, "adjust": 1, "copies": 2}
    one, two = cases["views, other sizes"]["counts"]
    assert one == two == {"resample_all": 5, "warp_all": 1, "adjust": 1, "copies": 3}


def test_less_memory_means_more_calls_and_the_same_pixels(cases: dict[str, dict[str, Any]]) -> None:
    for name in ("crop", "two resamplings", "colours", "new colours", "torchvision"):
        whole, parts = cases[f"{name}, 1048576 bytes"], cases[f"{name}, 6000 bytes"]
        assert parts["copies"] > whole["copies"]
        assert (parts["max"], parts["mean"]) == (whole["max"], whole["mean"])


def test_a_service_gets_the_same_images_and_gives_its_memory_back(cases: dict[str, dict[str, Any]]) -> None:
    assert cases["served"]["buffers"] == 1, "the second batch gets that of the first"


@pytest.mark.parametrize("name", ["crop", "colours"])
def test_a_chunk_does_not_depend_on_the_chunks_that_are_decoded_with_it(
    cases: dict[str, dict[str, Any]], name: str
) -> None:
    """For each window, order of launches, and place of the files that only the CPU decodes."""
    case = cases[f"windows, {name}"]
    assert (case["wrong"], case["wrong_faults"]) == (0, 0)
    assert case["images_of_others"] > 0, "no call was filled up"
    assert case["cycles"] == 0, "memory waits for the garbage collector"


@pytest.mark.parametrize("name", ["crop", "colours"])
def test_a_call_that_fails_is_an_error_of_all_its_chunks(cases: dict[str, dict[str, Any]], name: str) -> None:
    assert cases[f"windows, {name}"]["errors"] == ["no room for a call", "no room for a call", ""]


@pytest.mark.parametrize("name", ["crop", "colours"])
def test_without_memory_for_its_images_a_later_chunk_is_still_whole(
    cases: dict[str, dict[str, Any]], name: str
) -> None:
    assert cases[f"windows, {name}"]["no_memory"] == ["no room for images", True]


@pytest.mark.slow
def test_c_code_queues_the_same(cases: dict[str, dict[str, Any]]) -> None:
    """All but the transfers, and the first passes that Triton launches before they are known."""
    other = ("copies", "counts")
    found = [json.loads(line) for line in lines_of("interpret_runner.py", "C")]
    assert len(found) == 2 * 4 + 1 + 1
    for case in found:
        expected = cases[case["case"]]
        same = {name: value for name, value in case.items() if name not in other}
        assert same == {name: value for name, value in expected.items() if name not in other}
        if "copies" in case:
            assert sum(case["copies"]) < sum(expected["copies"]), "C code transfers the plans"
