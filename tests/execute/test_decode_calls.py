"""How the images of a chunk, and of the chunks after it, are divided into nvJPEG calls."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuflow.execute.decode_calls import CALL_IMAGES, LARGE_PIXELS, DecodeCall, Undecoded, kinds_of, plan_calls, split

MB = 1 << 20
KINDS = st.sampled_from([0x11, 0x22, 0x22, 0x22, 0x22 + (1 << 8)])


@pytest.mark.parametrize(
    ("count", "most", "sizes"),
    [(256, 128, [128, 128]), (255, 128, [128, 127]), (129, 128, [65, 64]), (1, 128, [1]), (0, 128, [])],
)
def test_calls_are_of_one_size(count: int, most: int, sizes: list[int]) -> None:
    assert [call.stop - call.start for call in split(np.full(count, 10), most, MB)] == sizes


def test_no_call_needs_more_memory_than_allowed_but_for_one_large_image() -> None:
    calls = split(np.array([30, 30, 30, 200, 30, 60, 20]), 128, 100)
    assert [(call.start, call.stop) for call in calls] == [(0, 3), (3, 4), (4, 6), (6, 7)]


def test_a_kind_is_a_sampling_a_size_and_whether_the_file_is_known() -> None:
    side = int(LARGE_PIXELS**0.5)
    sizes = [
        (side, side - 1),
        (side, side),
        (2 * side, 2 * side),
        (2 * side, 2 * side - 1),
        (4 * side, 4 * side),
        (5, 9),
    ]
    frames = np.array([(*size, 0x22) for size in sizes])
    small, large, larger, *rest = kinds_of(frames).tolist()
    assert len({small, large, larger, rest[1]}) == 4 and rest[0] == large and rest[2] == small
    frames[:, 2] = 0
    assert not set(kinds_of(frames).tolist()) & {small, large, larger, *rest}


def chunk(kinds: list[int], spaces: list[int] | None = None) -> Undecoded:
    return Undecoded.all_of(np.array(kinds, np.int64), np.array(spaces or [10] * len(kinds), np.int64))


def held(calls: list[DecodeCall]) -> list[list[tuple[int, int]]]:
    return [list(zip(call.chunks.tolist(), call.rows.tolist(), strict=True)) for call in calls]


def test_images_of_later_chunks_fill_the_calls_of_a_mixed_chunk() -> None:
    chunks = [chunk([0x22] * 100 + [0x11] * 3), chunk([0x22] * 60), chunk([0x11] * 2 + [0x22] * 60)]
    first, second = plan_calls(chunks, max_bytes=MB)
    assert len(first.rows) == 5 and first.chunks.tolist() == [0, 0, 0, 2, 2]
    assert len(second.rows) == CALL_IMAGES and np.bincount(second.chunks).tolist() == [100, 28]
    assert [one.left.sum() for one in chunks] == [0, 32, 60]


def test_a_chunk_of_one_kind_is_decoded_alone() -> None:
    chunks = [chunk([0x22] * 100), chunk([0x22] * 100)]
    (call,) = plan_calls(chunks, max_bytes=MB)
    assert len(call.rows) == 100 and chunks[1].left.all()


def test_every_call_has_an_image_of_the_first_chunk() -> None:
    """Where memory ends a call early, what was to fill it up may be left over: it is left to its own chunk."""
    own, other = chunk([0x22, 0x22, 0x11], [60, 60, 10]), chunk([0x22] * 8, [30] * 8)
    calls = plan_calls([own, other], max_bytes=100)
    assert [call.chunks.tolist() for call in calls] == [[0], [0], [0, 1]]
    assert not own.left.any() and other.left.tolist() == [False] + [True] * 7


def test_few_large_images_share_a_call() -> None:
    large = 0x22 + (1 << 8)
    calls = plan_calls([chunk([large, 0x22]), *(chunk([large, 0x22]) for _ in range(40))], max_bytes=MB)
    assert sorted(len(call.rows) for call in calls) == [32, 41]


@st.composite
def windows(draw: st.DrawFn) -> list[Undecoded]:
    found = []
    for _ in range(draw(st.integers(1, 4))):
        kinds = draw(st.lists(KINDS, min_size=1, max_size=300))
        spaces = draw(st.lists(st.integers(1, 300), min_size=len(kinds), max_size=len(kinds)))
        one = chunk(kinds, spaces)
        one.left[:] = draw(st.lists(st.booleans(), min_size=len(kinds), max_size=len(kinds)))
        found.append(one)
    return found


@given(windows(), st.sampled_from([100, 5_000, MB]))
def test_every_image_that_is_needed_is_in_one_call_of_its_kind(chunks: list[Undecoded], max_bytes: int) -> None:
    before = [one.left.copy() for one in chunks]
    calls = plan_calls(chunks, max_bytes=max_bytes)
    taken = [pair for call in held(calls) for pair in call]
    assert len(taken) == len(set(taken)), "no image twice"
    assert not chunks[0].left.any() and all(before[number][row] for number, row in taken)
    for number, one in enumerate(chunks):
        assert {row for chosen, row in taken if chosen == number} == set(np.flatnonzero(before[number] & ~one.left))
    for call, pairs in zip(calls, held(calls), strict=True):
        assert len({int(chunks[number].kinds[row]) for number, row in pairs}) == 1
        assert 0 in call.chunks
        spaces = [int(chunks[number].spaces[row]) for number, row in pairs]
        assert spaces == sorted(spaces, reverse=True) and sum(spaces) == call.space
        assert len(pairs) <= CALL_IMAGES and (call.space <= max_bytes or len(pairs) == 1)
