"""What users see of a loader: epochs, lengths, batches, statistics."""

from __future__ import annotations

import copy
import gc
import json
import os
import pickle
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import gpuflow
from gpuflow.errors import ConfigError, LoaderError
from gpuflow.loader.batch import Batch
from gpuflow.loader.epoch import Admission
from gpuflow.native.library import NativePool
from tests.datasets import (
    COLOURS,
    RAW,
    VAL,
    Entries,
    MemorySource,
    Slow,
    TappedSource,
    deadline,
    epoch_rows,
    jpeg,
    loader_of,
    make_photos,
    rows,
    write_config,
)


@pytest.fixture(autouse=True)
def _in_time() -> Iterator[None]:
    with deadline(60):
        yield


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("photos")
    make_photos(root, classes=3, each=4)
    return root


@pytest.fixture
def config(photos: Path, tmp_path: Path) -> Path:
    return write_config(tmp_path / "x.yaml", photos, batch={"size": 5})


def order_of(loader: gpuflow.Loader) -> list[int]:
    return [row[0] for step in epoch_rows(loader) for row in step]


# --- epochs -----------------------------------------------------------------------------------------------------------


def test_each_for_is_the_next_epoch() -> None:
    with loader_of(MemorySource.of(12)) as loader:
        epochs = [epoch_rows(loader) for _ in range(3)]
        orders = [[row[0] for step in epoch for row in step] for epoch in epochs]
        assert all(sorted(order) == list(range(12)) for order in orders)
        assert len(set(map(tuple, orders))) == 3
        assert "next epoch 3" in repr(loader)


def test_batches_know_their_step_and_epoch() -> None:
    with loader_of(MemorySource.of(10)) as loader:
        for epoch in range(2):
            assert [(b.step, b.epoch) for b in loader] == [(step, epoch) for step in range(3)]


def test_after_a_break_the_next_for_is_the_next_epoch() -> None:
    with loader_of(MemorySource.of(12)) as loader, loader_of(MemorySource.of(12)) as whole:
        for _ in loader:
            break
        epoch_rows(whole)
        assert epoch_rows(loader) == epoch_rows(whole)


def test_set_epoch_names_the_epoch() -> None:
    with loader_of(MemorySource.of(12)) as loader:
        first = order_of(loader)
        second = order_of(loader)
        loader.set_epoch(0)
        assert order_of(loader) == first
        assert order_of(loader) == second
        loader.set_epoch(7)
        assert [batch.epoch for batch in loader] == [7] * 3


@pytest.mark.parametrize(
    "epoch", [-1, 1.0, "1", None, 2**62, torch.tensor(2.7), torch.tensor([1, 2]), np.array([1, 2]), np.float32(1)]
)
def test_set_epoch_refuses_what_is_no_epoch(epoch: Any) -> None:
    with loader_of(MemorySource.of(4)) as loader:
        with pytest.raises(ValueError, match=r"^epoch must be an integer within \[0, 2\*\*62\), got "):
            loader.set_epoch(epoch)
        assert loader.state_dict()["epoch"] == 0


@pytest.mark.parametrize("one", [np.int64(1), np.uint8(1), torch.tensor(1), True])
def test_any_integer_names_an_epoch_and_leaves_a_state_that_loads(one: Any) -> None:
    with loader_of(MemorySource.of(12)) as loader:
        loader.set_epoch(1)
        expected = order_of(loader)
        loader.set_epoch(one)
        assert json.loads(json.dumps(loader.state_dict()))["epoch"] == 1
        assert order_of(loader) == expected
        loader.load_state_dict(loader.state_dict())


def test_the_last_epoch_leaves_a_state_that_loads() -> None:
    with loader_of(MemorySource.of(12)) as loader:
        loader.set_epoch(2**62 - 1)
        assert len(order_of(loader)) == 12
        loader.load_state_dict(loader.state_dict())


def test_without_shuffle_the_order_is_the_sources() -> None:
    with loader_of(MemorySource.of(10), shuffle=False) as loader:
        assert order_of(loader) == list(range(10)) == order_of(loader)


def test_a_second_for_ends_the_first() -> None:
    with loader_of(MemorySource.of(12)) as loader:
        first = iter(loader)
        next(first)
        second = iter(loader)
        with pytest.raises(LoaderError) as caught:
            next(first)
        assert str(caught.value) == "epoch 0 was ended because another one began; iterate the loader anew"
        assert [batch.epoch for batch in second] == [1] * 3


def test_an_iterator_that_is_over_stays_over() -> None:
    with loader_of(MemorySource.of(4)) as loader:
        epoch = iter(loader)
        next(epoch)
        for _ in range(3):
            with pytest.raises(StopIteration):
                next(epoch)
        assert iter(epoch) is epoch


def test_a_closed_loader_says_so() -> None:
    loader = loader_of(MemorySource.of(4))
    epoch = iter(loader)
    loader.close()
    loader.close()
    with pytest.raises(LoaderError) as caught:
        iter(loader)
    assert str(caught.value) == "this loader is closed; make another one with gpuflow.load"
    with pytest.raises(LoaderError) as caught:
        next(epoch)
    assert str(caught.value) == "epoch 0 was ended because the loader was closed; iterate the loader anew"
    assert repr(loader).endswith(", next epoch 1, closed>")


def test_closing_closes_the_source() -> None:
    source = MemorySource.of(4)
    with loader_of(source) as loader:
        assert not source.closed
        assert loader.dataset is source
    assert source.closed


def test_a_loader_that_is_forgotten_closes_its_source() -> None:
    source = MemorySource.of(12)
    loader = loader_of(source)
    for _ in loader:
        break
    del loader
    gc.collect()
    end = time.monotonic() + 5
    while not source.closed and time.monotonic() < end:  # its threads end meanwhile
        time.sleep(0.01)
    assert source.closed


# --- lengths ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "batch", "drop_last", "sizes"),
    [(10, 4, False, [4, 4, 2]), (10, 4, True, [4, 4]), (8, 4, False, [4, 4]), (3, 4, False, [3]), (3, 4, True, [])],
)
def test_length_and_batch_sizes(count: int, batch: int, drop_last: bool, sizes: list[int]) -> None:
    with loader_of(MemorySource.of(count), batch_size=batch, drop_last=drop_last) as loader:
        assert len(loader) == len(sizes)
        assert [len(labels) for _, labels in loader] == sizes
        assert loader.batch_size == batch


@pytest.mark.parametrize("rank", [0, 1])
def test_on_several_ranks_a_short_tail_is_wrapped_and_marked(rank: int) -> None:
    with loader_of(MemorySource.of(10), shuffle=False, rank=rank, world_size=2) as loader:
        batches = list(loader)
        assert len(batches) == len(loader) == 2
        last = batches[-1]
        assert len(last.labels) == 4
        expected = [([8, 9, 0, 1], [True, True, False, False]), ([2, 3, 4, 5], [False] * 4)][rank]
        assert (last.indices.tolist(), last.valid.tolist()) == expected
        assert batches[0].valid.all()


def test_drop_last_on_several_ranks_leaves_the_tail_out() -> None:
    with loader_of(MemorySource.of(10), shuffle=False, drop_last=True, rank=1, world_size=2) as loader:
        assert [batch.indices.tolist() for batch in loader] == [[4, 5, 6, 7]]


def test_fewer_samples_than_ranks() -> None:
    for rank in range(3):
        with loader_of(MemorySource.of(2), RAW, batch_size=2, rank=rank, world_size=3) as loader:
            (batch,) = loader
            assert batch.indices.tolist() == [0, 1] or sorted(batch.indices.tolist()) == [0, 1]
            assert batch.valid.tolist() == [rank == 0] * 2


# --- what a batch holds -----------------------------------------------------------------------------------------------


def test_labels_classes_and_indices_are_right(config: Path) -> None:
    with gpuflow.load(
        config, "val", overrides=["pipelines.val.stages=[{decode: {}}, {center_crop: {size: 24}}]"]
    ) as val:
        assert val.classes == ("class_0", "class_1", "class_2")
        for batch in val:
            colours = batch.images.to(torch.float32).mean(dim=(2, 3))
            closest = torch.cdist(colours, torch.tensor(COLOURS, dtype=torch.float32)).argmin(dim=1)
            assert torch.equal(closest, batch.labels)
            assert torch.equal(batch.labels, torch.from_numpy(val.dataset.labels)[batch.indices])
            assert [val.dataset.path(i).split("/")[-2] for i in batch.indices.tolist()] == [
                val.classes[label] for label in batch.labels.tolist()
            ]


def test_a_batch_is_a_pair() -> None:
    with loader_of(MemorySource.of(4)) as loader:
        for batch in loader:
            images, labels = batch
            assert isinstance(batch, tuple)
            assert len(batch) == 2
            assert images is batch.images and labels is batch.labels
            assert (labels.dtype, batch.valid.dtype, batch.indices.dtype) == (torch.int64, torch.bool, torch.int64)


def test_float_batches_are_planes() -> None:
    with loader_of(MemorySource.of(4)) as loader:
        (batch,) = loader
        assert (batch.images.dtype, tuple(batch.images.shape)) == (torch.float32, (4, 3, 24, 24))
        assert batch.images.is_contiguous()


def test_without_normalize_batches_are_uint8_in_channels_last_memory() -> None:
    with loader_of(MemorySource.of(4), RAW, shuffle=False) as loader:
        (batch,) = loader
        assert (batch.images.dtype, tuple(batch.images.shape)) == (torch.uint8, (4, 3, 24, 24))
        assert batch.images.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_dtype_and_layout(dtype: str, layout: str) -> None:
    entries = (*RAW, {"normalize": {"dtype": dtype, "layout": layout}})
    with loader_of(MemorySource.of(4), entries) as loader, loader_of(MemorySource.of(4), VAL) as reference:
        (batch,), (expected,) = loader, reference
        assert batch.images.dtype == getattr(torch, dtype)
        assert torch.equal(batch.images, expected.images.to(batch.images.dtype))
        memory = torch.channels_last if layout == "nhwc" else torch.contiguous_format
        assert batch.images.is_contiguous(memory_format=memory)


@pytest.mark.parametrize("entries", [RAW, VAL, (*RAW, {"normalize": {"layout": "nhwc", "dtype": "float16"}})])
@pytest.mark.filterwarnings("ignore:1 of 4 samples are bad so far:UserWarning")
def test_a_skipped_sample_leaves_the_memory_layout_as_it_is(entries: Any) -> None:
    source = MemorySource([jpeg(0, 0), None, jpeg(2, 2), jpeg(0, 3)])
    with loader_of(source, entries, shuffle=False, policy="skip") as loader:
        (batch,) = loader
    with loader_of(MemorySource.of(4), entries, shuffle=False) as loader:
        (whole,) = loader
    assert torch.equal(batch.images, whole.images[[0, 2, 3]])
    for memory in torch.channels_last, torch.contiguous_format:
        assert batch.images.is_contiguous(memory_format=memory) == whole.images.is_contiguous(memory_format=memory)
    assert batch.indices.tolist() == [0, 2, 3]


def test_gray_batches_have_one_channel() -> None:
    entries: Entries = (
        {"decode": {"color": "gray"}},
        {"center_crop": {"size": 24}},
        {"normalize": {"mean": (0.5,), "std": (0.25,)}},
    )
    with loader_of(MemorySource.of(4), entries) as loader:
        (batch,) = loader
        assert tuple(batch.images.shape) == (4, 1, 24, 24)


def test_batches_stay_as_they_are_while_more_are_taken() -> None:
    """Memory is used again, but never under a tensor that is still referenced; not even after the loader is gone."""
    kept: list[tuple[torch.Tensor, float, list[Any]]] = []
    source = TappedSource(MemorySource.of(24), lambda index: None)
    with loader_of(source, batch_size=4, prefetch=1) as loader:
        for epoch in range(4):
            for batch in loader:
                if batch.step % 2 == epoch % 2:  # the others' memory comes back
                    kept.append((batch.images, float(batch.images.double().sum()), rows(batch)))
        held = {images.data_ptr() for images, *_ in kept}
        assert len(held) == len(kept) == 12
    del loader
    gc.collect()
    with loader_of(source, batch_size=4) as other:
        epoch_rows(other)
    for images, total, before in kept:
        assert float(images.double().sum()) == total
        assert [row[3] for row in before] == [
            image.contiguous().view(torch.uint8).numpy().tobytes() for image in images
        ]


def test_a_thread_that_is_late_finds_memory_for_its_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other threads, with later batches, came first; the consumer waits for the late one alone."""
    acquire = Admission.acquire

    def late(admission: Admission, number: int) -> bool:
        time.sleep(0.3 if number == 1 else 0)
        return acquire(admission, number)

    monkeypatch.setattr(Admission, "acquire", late)
    with loader_of(MemorySource.of(24), batch_size=2, prefetch=1, threads=6, shuffle=False) as loader:
        assert order_of(loader) == list(range(24))


def test_a_view_of_a_batch_holds_its_memory() -> None:
    with loader_of(MemorySource.of(24), RAW, batch_size=4, prefetch=1) as loader:
        epoch = iter(loader)
        view = next(epoch)[0][1:3, 0].numpy()
        before = view.copy()
        for _ in range(3):
            for _batch in loader:
                del _batch
    assert np.array_equal(view, before)


def test_memory_of_released_batches_is_used_again() -> None:
    places = set()
    with loader_of(MemorySource.of(240), RAW, batch_size=4, prefetch=1) as loader:
        for images, _ in loader:
            places.add(images.data_ptr())
            del images
    assert len(places) <= 20, "60 batches take no more memory than what is in flight at once"


# --- where it runs ----------------------------------------------------------------------------------------------------


def test_rank_and_world_size_come_from_the_environment(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with gpuflow.load(config, "train") as loader, gpuflow.load(config, "train", rank=0, world_size=1) as alone:
        assert "rank 1 of 2" in repr(loader)
        assert len(loader) == 2
        assert order_of(loader)[:5] == order_of(alone)[5:10]


@pytest.mark.parametrize(("rank", "world_size"), [(2, 2), (-1, 1), (0, 0)])
def test_refuses_a_rank_outside_the_world(rank: int, world_size: int, config: Path) -> None:
    with pytest.raises(ValueError, match=r"^rank must be within") as caught:
        gpuflow.load(config, rank=rank, world_size=world_size)
    assert (
        str(caught.value)
        == f"rank must be within [0, world_size), got rank {rank} of {world_size}; give both, or neither"
    )


def test_refuses_a_number_of_ranks_if_nothing_says_which_one_this_is(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each process would take itself for rank 0, and load the same samples."""
    with pytest.raises(ValueError, match=r"^rank must be given with world_size=2: nothing says which rank this proc"):
        gpuflow.load(config, world_size=2)
    with gpuflow.load(config, world_size=1) as loader:
        assert (loader.rank, loader.world_size) == (0, 1)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with gpuflow.load(config, world_size=2) as loader:
        assert (loader.rank, loader.world_size) == (1, 2)


@pytest.mark.parametrize(("rank", "world_size"), [(0.5, 2), (0, "2"), (0, 2.0)])
def test_refuses_ranks_that_are_no_integers(rank: Any, world_size: Any, config: Path) -> None:
    with pytest.raises(ValueError, match=r"^rank and world_size must be integers, got "):
        gpuflow.load(config, rank=rank, world_size=world_size)


def test_a_global_batch_is_shared_among_the_ranks(photos: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path / "x.yaml", photos, batch={"global": 6})
    for world_size, size in (1, 6), (2, 3), (3, 2):
        with gpuflow.load(config, rank=0, world_size=world_size) as loader:
            assert (loader.batch_size, len(loader)) == (size, 2)
    with pytest.raises(ConfigError) as caught:
        gpuflow.load(config, rank=0, world_size=4)
    assert str(caught.value) == f"{config}: pipelines.train.batch.global must be divisible by the 4 ranks, got 6"


def test_drop_last_must_leave_a_step(photos: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path / "x.yaml", photos, batch={"size": 7, "drop_last": True})
    with gpuflow.load(config, rank=0, world_size=1) as loader:
        assert len(loader) == 1
    with pytest.raises(ConfigError) as caught:
        gpuflow.load(config, rank=0, world_size=2)
    assert str(caught.value) == (
        f"{config}: pipelines.train.batch leaves no step: 12 samples do not fill one of 7 x 2 rank(s); "
        "take a smaller size or drop_last: false"
    )


def test_repr_names_what_matters(config: Path) -> None:
    with gpuflow.load(config, "val") as loader:
        assert repr(loader) == (
            "<gpuflow.Loader val: decode() -> resize(shorter=32) -> center_crop(size=24) -> normalize(); "
            "12 samples in 3 steps of 5, rank 0 of 1, on cpu, next epoch 0>"
        )


def test_the_users_random_generators_are_left_alone(config: Path) -> None:
    torch.manual_seed(0)
    np.random.seed(0)
    before = torch.get_rng_state(), np.random.get_state()[1].copy()  # type: ignore[index]
    with gpuflow.load(config) as loader:
        epoch_rows(loader)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.array_equal(np.random.get_state()[1], before[1])  # type: ignore[index]


def test_two_loaders_run_at_once(config: Path) -> None:
    with gpuflow.load(config, "train") as train, gpuflow.load(config, "val") as val:
        expected = epoch_rows(train), epoch_rows(val)
        train.set_epoch(0)
        together = [(rows(a), rows(b)) for a, b in zip(train, val, strict=True)]
        assert ([a for a, _ in together], [b for _, b in together]) == expected


def test_a_loader_can_be_made_in_one_thread_and_iterated_in_another() -> None:
    loader = loader_of(MemorySource.of(12))
    seen: list[int] = []
    thread = threading.Thread(target=lambda: seen.extend(order_of(loader)))
    thread.start()
    thread.join()
    loader.close()
    assert sorted(seen) == list(range(12))


# --- statistics -------------------------------------------------------------------------------------------------------


def test_threads_that_share_an_iterator_take_turns_and_all_come_to_its_end() -> None:
    with loader_of(MemorySource.of(64), batch_size=2) as loader, ThreadPoolExecutor(4) as pool:
        for _ in range(3):
            each = [iter(loader)] * 4
            found = pool.map(lambda batches: [batch.indices.tolist() for batch in batches], each, timeout=60)
            assert sorted(index for one in found for batch in one for index in batch) == list(range(64))


@pytest.mark.filterwarnings("ignore:.* samples are bad so far:UserWarning")
def test_statistics_count_the_bytes_of_what_replaces_bad_samples() -> None:
    images = [jpeg(0, 0), jpeg(1, 1)[:-200], jpeg(2, 2), jpeg(0, 3)]
    with loader_of(MemorySource(images), shuffle=False, policy="replace") as loader:
        (batch,) = loader
        replacement = int(batch.indices[1])
        assert replacement != 1
        assert loader.stats()["stages"]["read"]["bytes"] == sum(map(len, images)) + len(images[replacement])


def test_statistics_of_a_whole_epoch() -> None:
    source = TappedSource(MemorySource.of(12), Slow(0.003))
    with loader_of(source, batch_size=5) as loader:
        epoch_rows(loader)
        epoch_rows(loader)
        stats = loader.stats()
    assert list(stats) == ["epoch", "batches", "elapsed_s", "consumer_wait_s", "stages", "bad", "bad_distinct"]
    assert (stats["epoch"], stats["batches"], stats["bad"], stats["bad_distinct"]) == (1, 3, 0, 0)
    assert list(stats["stages"]) == ["read", "decode"]
    for stage in stats["stages"].values():
        assert list(stage) == ["samples", "images_per_s", "busy_share", "cpu_s", "threads", "bytes"]
        assert stage["samples"] == 12
        assert 0 < stage["busy_share"] <= 1
        assert 0 < stage["cpu_s"] <= stats["elapsed_s"] * stage["threads"]
        assert stage["images_per_s"] == pytest.approx(12 / stats["elapsed_s"], rel=0.01)
    assert stats["stages"]["read"]["bytes"] == sum(len(jpeg(i % 3, i)) for i in range(12))
    assert stats["stages"]["read"]["busy_share"] * stats["elapsed_s"] * 2 >= 12 * 0.003 * 0.99
    assert 0 < stats["consumer_wait_s"] <= stats["elapsed_s"]


def test_statistics_count_what_is_prefetched_too() -> None:
    with loader_of(MemorySource.of(40), prefetch=3) as loader:
        epoch = iter(loader)
        next(epoch)
        end = time.monotonic() + 5
        while loader.stats()["stages"]["decode"]["samples"] < 8 and time.monotonic() < end:
            time.sleep(0.01)
        stats = loader.stats()
        assert stats["batches"] == 1
        assert 8 <= stats["stages"]["decode"]["samples"] <= stats["stages"]["read"]["samples"] <= 40
        del epoch
        at_end = loader.stats()["elapsed_s"]
        time.sleep(0.02)
        assert loader.stats()["elapsed_s"] == at_end, "the clock stops with the epoch"


def test_the_consumers_wait_is_the_loaders_fault_alone() -> None:
    with loader_of(TappedSource(MemorySource.of(8), Slow(0.01)), prefetch=1, threads=1) as loader:
        for _ in loader:
            time.sleep(0.1)
        stats = loader.stats()
    assert 0 < stats["consumer_wait_s"] <= stats["elapsed_s"] - 0.19


def test_statistics_before_the_first_epoch() -> None:
    with loader_of(MemorySource.of(4)) as loader:
        stats = loader.stats()
    assert (stats["epoch"], stats["batches"], stats["consumer_wait_s"]) == (0, 0, 0.0)


def test_threads_follow_the_configuration(config: Path) -> None:
    for text, threads in ("3", 3), ("auto", len(os.sched_getaffinity(0))):
        with gpuflow.load(config, overrides=[f"run.threads={text}"]) as loader:
            assert loader.stats()["stages"]["decode"]["threads"] == threads


def test_a_batch_can_be_pickled_and_rebuilt(tmp_path: Path) -> None:
    images, labels = torch.zeros(2, 3, 4, 4), torch.tensor([0, 1])
    batch = Batch((images, labels), valid=torch.tensor([True, False]), indices=torch.tensor([7, 8]), step=3, epoch=1)
    again = pickle.loads(pickle.dumps(batch))
    assert type(again) is Batch and torch.equal(again.valid, batch.valid) and (again.step, again.epoch) == (3, 1)
    moved = type(batch)([tensor.clone() for tensor in batch])
    assert torch.equal(moved.labels, labels) and not hasattr(moved, "valid")


@pytest.mark.parametrize("copied", [pickle.dumps, copy.copy, copy.deepcopy])
def test_a_loader_cannot_be_pickled_or_copied(copied: Callable[[object], object]) -> None:
    with loader_of(MemorySource.of(4)) as loader, pytest.raises(TypeError, match="make it in the process that"):
        copied(loader)


# --- the way to the decoder -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("readers", [0, 2])
def test_few_frames_are_between_a_thread_and_the_native_call(readers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    found = list[list[str]]()
    in_use = NativePool.in_use

    def noted(self: NativePool) -> AbstractContextManager[int]:
        found.append([frame.name for frame in traceback.extract_stack()])
        return in_use(self)

    monkeypatch.setattr(NativePool, "in_use", noted)
    with loader_of(MemorySource.of(4), readers=readers) as loader:
        for _ in loader:
            pass
    names = next(names for names in found if "run_chunk" in names)
    between = names[names.index("_serve") + 1 : names.index("run_chunk") + 1]
    assert len(between) <= 10, between
