"""How the images of a chunk, and of the chunks after it, are divided into nvJPEG calls."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuflow.execute.gpu.decode_calls import CALL_IMAGES, DecodeCall, Undecoded, deal, plan_calls

MB, LATER = 1 << 20, 1000
SAMPLINGS = st.sampled_from([0x11, 0x22, 0x22, 0x22, 0])


@pytest.mark.parametrize(
    ("count", "most", "sizes"),
    [(256, 128, [128, 128]), (255, 128, [128, 127]), (129, 128, [65, 64]), (1, 128, [1]), (0, 128, [])],
)
def test_calls_have_equally_many_images(count: int, most: int, sizes: list[int]) -> None:
    assert [len(call) for call in deal(np.arange(count), np.full(count, 10), most, MB)] == sizes


def test_no_call_needs_more_memory_than_allowed_but_for_one_larger_image() -> None:
    spaces = np.array([30, 30, 30, 200, 30, 60, 20])
    calls = [spaces[call].tolist() for call in deal(spaces, spaces, 128, 100)]
    assert calls == [[200], [60, 30], [30, 30], [30, 20]]


def test_calls_of_images_of_many_sizes_need_about_equal_memory() -> None:
    spaces = (np.random.default_rng(0).lognormal(size=256) * 1e5).astype(np.int64)
    first, second = (int(spaces[call].sum()) for call in deal(spaces, spaces, 128, int(spaces.sum())))
    assert second < first < 1.1 * second


def test_the_engines_get_images_of_most_pixels_first_whatever_part_of_them_is_kept() -> None:
    pixels, spaces = np.array([50, 90, 70, 80]), np.array([40, 10, 300, 20])
    assert [call.tolist() for call in deal(pixels, spaces, 128, 100)] == [[2], [1, 3, 0]]


def chunk(samplings: list[int], spaces: list[int] | None = None) -> Undecoded:
    """Of images whose space is that of all their pixels."""
    size = np.array(spaces or [10] * len(samplings), np.int64)
    return Undecoded(np.array(samplings, np.int64), size, size)


def left(one: Undecoded) -> set[int]:
    """The images that no call has taken."""
    rows = [one.take(sampling) for sampling in one.samplings_left()]
    for own in rows:
        one.give_back(own)
    return {row for own in rows for row in own.tolist()}


def held(call: DecodeCall) -> list[tuple[int, int]]:
    """The chunk of each of its images, and the image's number there."""
    pairs = np.full((len(call), 2), -1)
    for part in call.parts:
        pairs[part.where, 0], pairs[part.where, 1] = part.chunk, part.rows
    return [(chunk, row) for chunk, row in pairs.tolist()]


def chunks_of(call: DecodeCall) -> list[int]:
    return [chunk for chunk, _ in held(call)]


def test_images_of_later_chunks_fill_the_calls_of_a_mixed_chunk() -> None:
    chunks = [chunk([0x22] * 100 + [0x11] * 3), chunk([0x22] * 60), chunk([0x11] * 2 + [0x22] * 60)]
    first, second = plan_calls(chunks, max_bytes=MB, max_later=LATER)
    assert chunks_of(first) == [0, 0, 0, 2, 2]
    assert len(second) == CALL_IMAGES and np.bincount(chunks_of(second)).tolist() == [100, 28]
    assert [len(left(one)) for one in chunks] == [0, 32, 60]


@pytest.mark.parametrize(("most", "of_rare", "of_common"), [(0, 0, 0), (1, 1, 0), (2, 2, 0), (7, 2, 5)])
def test_calls_of_rare_samplings_get_the_images_of_later_chunks_first(most: int, of_rare: int, of_common: int) -> None:
    chunks = [chunk([0x22] * 100 + [0x11] * 3), chunk([0x22] * 60), chunk([0x11] * 2 + [0x22] * 60)]
    first, second = plan_calls(chunks, max_bytes=MB, max_later=most)
    assert [len(first), len(second)] == [3 + of_rare, 100 + of_common]
    assert sum(len(left(one)) for one in chunks[1:]) == 122 - most


def test_a_chunk_of_one_sampling_is_decoded_alone() -> None:
    chunks = [chunk([0x22] * 100), chunk([0x22] * 100)]
    (call,) = plan_calls(chunks, max_bytes=MB, max_later=LATER)
    assert len(call) == 100 and len(left(chunks[1])) == 100


def test_every_call_has_an_image_of_the_first_chunk() -> None:
    """Where what was to fill a call up does not fit after all, it is left to its own chunk."""
    own, other = chunk([0x22, 0x22, 0x11], [60, 60, 10]), chunk([0x22] * 8, [30] * 8)
    calls = plan_calls([own, other], max_bytes=100, max_later=LATER)
    assert sorted(chunks_of(call) for call in calls) == [[0], [0, 1], [0, 1]]
    assert not left(own) and left(other) == set(range(2, 8))


def test_the_images_of_a_call_that_nobody_runs_are_left_again() -> None:
    chunks = [chunk([0x22] * 3 + [0x11]), chunk([0x22] * 3)]
    for call in plan_calls(chunks, max_bytes=MB, max_later=LATER):
        call.give_back(chunks)
    assert [left(one) for one in chunks] == [{0, 1, 2, 3}, {0, 1, 2}]


@st.composite
def windows(draw: st.DrawFn) -> list[Undecoded]:
    found = []
    for _ in range(draw(st.integers(1, 4))):
        samplings = draw(st.lists(SAMPLINGS, min_size=1, max_size=300))
        spaces = draw(st.lists(st.integers(1, 300), min_size=len(samplings), max_size=len(samplings)))
        one = chunk(samplings, spaces)
        one.take(draw(SAMPLINGS), draw(st.integers(0, 300)), MB)
        found.append(one)
    return found


@given(windows(), st.sampled_from([100, 5_000, MB]), st.sampled_from([0, 9, 150, LATER]))
def test_every_image_that_is_needed_is_in_one_call_of_its_sampling(
    chunks: list[Undecoded], max_bytes: int, max_later: int
) -> None:
    before = [left(one) for one in chunks]
    calls = plan_calls(chunks, max_bytes=max_bytes, max_later=max_later)
    taken = [pair for call in calls for pair in held(call)]
    assert len(taken) == len(set(taken)), "no image twice"
    assert not left(chunks[0])
    assert sum(chosen > 0 for chosen, _ in taken) <= max_later
    for number, one in enumerate(chunks):
        assert {row for chosen, row in taken if chosen == number} == before[number] - left(one)
    for call in calls:
        pairs = held(call)
        assert len({int(chunks[number].samplings[row]) for number, row in pairs}) == 1
        assert call.parts[0].chunk == 0
        assert [part.chunk for part in call.parts] == sorted({number for number, _ in pairs})
        spaces = [int(chunks[number].spaces[row]) for number, row in pairs]
        assert spaces == sorted(spaces, reverse=True) and call.spaces.tolist() == spaces
        assert len(pairs) <= CALL_IMAGES and (sum(spaces) <= max_bytes or len(pairs) == 1)
