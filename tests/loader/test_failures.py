"""What goes wrong with samples and their reading: every kind of fault under every policy, no wait without end."""

from __future__ import annotations

import io
import json
import os
import pickle
import re
import resource
import tarfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import gpuflow
from gpuflow.decode.codecs import CpuDecoder
from gpuflow.errors import (
    BadSampleError,
    ConfigError,
    LoaderError,
    LoaderTimeout,
    ServerFault,
    SourceError,
    SystemFault,
    TooManyBadSamples,
)
from gpuflow.loader.sampler import ShuffledOrder
from gpuflow.sources import Allocate, Payload, Source, open_source, source_spec
from gpuflow.sources.storage import Storage, open_storage
from tests.datasets import (
    RAW,
    Block,
    MemorySource,
    Raise,
    Slow,
    TappedSource,
    deadline,
    enlarge,
    epoch_rows,
    fault_of,
    jpeg,
    loader_of,
    make_photos,
    no_more_files,
    nothing_left_behind,
    truncate,
    write_config,
)
from tests.forking import Interpreter
from tests.images import png

ROOT = Path(__file__).parents[2]
EACH = 8
BAD = 9
"""The bad sample: the second of the third batch of four."""

many_bad = pytest.mark.filterwarnings("ignore:.* samples are bad so far:UserWarning")


@pytest.fixture(autouse=True)
def _in_time() -> Iterator[None]:
    with deadline(60):
        yield


def empty(file: Path) -> None:
    file.write_bytes(b"")


def become_directory(file: Path) -> None:
    file.unlink()
    file.mkdir()


def become_text(file: Path) -> None:
    file.write_text("<html>")


def become_gif(file: Path) -> None:
    file.write_bytes(b"GIF89a" + bytes(100))


def cut_header(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:25])


KINDS: dict[str, tuple[Callable[[Path], None], str, str]] = {
    "truncated": (truncate, "decode", r"truncated: no end-of-image marker within \d+ bytes"),
    "cut header": (cut_header, "decode", r"truncated: the header breaks off after 25 bytes"),
    "empty": (empty, "read", r"empty file"),
    "enormous": (
        enlarge,
        "decode",
        r"60000x60000 = 3,600,000,000 pixels are more than max_pixels = 179,000,000",
    ),
    "deleted": (Path.unlink, "read", r"no such file"),
    "directory": (become_directory, "read", r"is a directory"),
    "text": (
        become_text,
        "decode",
        r"not an image: begins with 3c 68 74 6d; gpuflow decodes JPEG, PNG, WebP, BMP and PNM",
    ),
    "gif": (
        become_gif,
        "decode",
        r"GIF is not supported; gpuflow decodes JPEG, PNG, WebP, BMP and PNM; "
        r"to have it decoded, name it in decode.formats: \[gif\]",
    ),
}


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """Photographs on disk; of 24 samples one bad one stays below the warning."""
    return make_photos(tmp_path / "photos", classes=3, each=EACH)


@pytest.fixture
def config(files: list[Path], tmp_path: Path) -> Path:
    return write_config(tmp_path / "x.yaml", tmp_path / "photos")


each_kind = pytest.mark.parametrize("kind", KINDS)


@each_kind
def test_raise_names_the_sample_at_its_step(kind: str, files: list[Path], config: Path) -> None:
    damage, stage, reason = KINDS[kind]
    with gpuflow.load(config, "val", overrides=["run.on_error=raise"]) as loader:
        damage(files[BAD])
        steps, error = fault_of(loader)
        assert steps == 2
        assert isinstance(error, BadSampleError)
        assert re.fullmatch(f"{files[BAD]} \\(sample {BAD}\\): {stage}: {reason}", str(error))
        assert (error.index, error.path, error.stage) == (BAD, str(files[BAD]), stage)
        assert re.fullmatch(reason, error.reason)


@each_kind
@pytest.mark.parametrize("policy", ["replace", "skip"])
def test_bad_samples_are_counted_and_listed(
    kind: str, policy: str, files: list[Path], config: Path, tmp_path: Path
) -> None:
    damage, stage, reason = KINDS[kind]
    listed = tmp_path / "bad.jsonl"
    overrides = [f"pipelines.val.on_error={policy}", f"run.bad_file={listed}"]
    with gpuflow.load(config, "val", overrides=overrides) as loader:
        damage(files[BAD])
        for epoch in range(2):
            steps = epoch_rows(loader)
            assert [len(step) for step in steps] == [4, 4, 4 if policy == "replace" else 3, 4, 4, 4]
            indices = [row[0] for step in steps for row in step]
            assert BAD not in indices
            assert set(range(24)) - set(indices) == {BAD}
            assert [row[1] for step in steps for row in step] == [index // EACH for index in indices]
            assert (loader.stats()["bad"], loader.stats()["bad_distinct"]) == (epoch + 1, 1)
    (row,) = map(json.loads, listed.read_text().splitlines())
    assert list(row) == ["index", "path", "stage", "reason"]
    assert (row["index"], row["path"], row["stage"]) == (BAD, str(files[BAD]), stage)
    assert re.fullmatch(reason, row["reason"])


def test_replace_is_the_default_and_skip_that_of_val(files: list[Path], config: Path) -> None:
    truncate(files[BAD])
    with gpuflow.load(config, "train") as train, gpuflow.load(config, "val") as val:
        assert [len(labels) for _, labels in train] == [4] * 6
        assert [len(labels) for _, labels in val] == [4, 4, 3, 4, 4, 4]


def test_a_pipelines_own_policy_comes_first(files: list[Path], config: Path) -> None:
    truncate(files[BAD])
    with gpuflow.load(config, overrides=["run.on_error=raise", "pipelines.train.on_error=skip"]) as loader:
        assert sum(len(labels) for _, labels in loader) == 23


def test_a_listing_with_a_directory_among_its_images(files: list[Path], tmp_path: Path) -> None:
    (tmp_path / "x.jpg").mkdir()
    listing = tmp_path / "list.csv"
    listing.write_text("path,label\n" + "".join(f"{file},0\n" for file in [*files[:3], tmp_path / "x.jpg"]))
    config = write_config(tmp_path / "y.yaml", "", source={"listing": str(listing)})
    with gpuflow.load(config, "val", overrides=["pipelines.val.on_error=raise"]) as loader:
        steps, error = fault_of(loader)
    assert (steps, str(error)) == (0, f"{tmp_path / 'x.jpg'} (sample 3): read: is a directory")


@many_bad
def test_a_source_that_shrinks_between_epochs(files: list[Path], config: Path) -> None:
    with gpuflow.load(config, "train") as loader:
        assert loader.stats()["bad"] == 0
        epoch_rows(loader)
        for file in files[:EACH]:
            file.unlink()
        steps = epoch_rows(loader)
        assert [len(step) for step in steps] == [4] * 6
        assert {row[1] for step in steps for row in step} == {1, 2}
        assert loader.stats()["bad_distinct"] == EACH


def test_a_batch_takes_memory_for_the_samples_that_there_are(files: list[Path], config: Path) -> None:
    """And says what to change where there is not enough for them."""
    with gpuflow.load(config, "train", overrides=["pipelines.train.batch.size=1000000"]) as loader:
        assert [len(batch.indices) for batch in loader] == [len(files)]
    huge = ["pipelines.train.stages=[decode, {resize: {height: 12000, width: 12000}}, normalize]"]
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    with gpuflow.load(config, "train", overrides=["pipelines.train.batch.size=1000000", *huge]) as loader:
        resource.setrlimit(resource.RLIMIT_AS, (20 << 30, hard))
        try:
            with pytest.raises(MemoryError) as caught:
                next(iter(loader))
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    assert str(caught.value) == (
        f"not enough memory for a batch of {len(files)} samples, which needs {len(files) * 1_728_000_000:,} bytes; set "
        "a smaller pipelines.train.batch"
    )


def test_an_image_that_is_too_small_for_a_crop(tmp_path: Path) -> None:
    make_photos(tmp_path / "photos", classes=1, each=4)
    stages = [{"decode": {}}, {"random_crop": {"size": 45}}]
    config = write_config(tmp_path / "x.yaml", tmp_path / "photos", val=stages)
    with gpuflow.load(config, "val", overrides=["pipelines.val.on_error=raise"]) as loader:
        _, error = fault_of(loader)
    assert str(error) == (
        f"{tmp_path / 'photos/class_0/000.jpg'} (sample 0): random_crop: the crop is larger than the image, "
        "which has 40x48 pixels here"
    )


# --- too many ---------------------------------------------------------------------------------------------------------


@many_bad
def test_a_part_as_max_bad_is_exact_in_decimal(tmp_path: Path) -> None:
    """0.29 * 100 is 28.999999999999996 in floating point."""
    make_photos(tmp_path / "photos", classes=4, each=25)
    config = write_config(tmp_path / "x.yaml", tmp_path / "photos")
    with gpuflow.load(config, "val", overrides=["run.max_bad=0.29"]) as loader:
        assert loader._plan.bad.limit == 29


@pytest.mark.parametrize(("max_bad", "limit"), [("1", 1), ("0", 0), ("0.1", 2), ("0.0", 0)])
def test_more_than_max_bad(max_bad: str, limit: int, files: list[Path], config: Path) -> None:
    overrides = [f"run.max_bad={max_bad}", "run.threads=1"]
    with gpuflow.load(config, "val", overrides=overrides) as loader:
        for file in files[: limit + 1]:
            file.unlink()
        steps, error = fault_of(loader)
    assert isinstance(error, TooManyBadSamples)
    assert (steps, str(error)) == (
        0,
        f"{limit + 1} bad samples are more than run.max_bad allows ({limit}); the last: "
        f"{files[limit]} (sample {limit}): read: no such file; run `gpuflow scan` to list them all",
    )


@many_bad
@pytest.mark.parametrize("bad", [8, 10, 24])
def test_a_rank_stops_when_it_finds_more_than_its_part_of_max_bad(bad: int) -> None:
    """240 samples, of which 24 may be bad; of the 60 that one of four ranks draws in an epoch 6, and 9 by chance."""
    images = [None if i % 8 == 0 and i < 8 * bad else jpeg(i % 3, i) for i in range(240)]  # all come to rank 0
    ranks: dict[str, Any] = {"world_size": 4, "batch_size": 2, "shuffle": False, "policy": "skip"}
    ranks |= {"limit": 24, "limit_of": 240}
    with loader_of(MemorySource(images), RAW, rank=1, **ranks) as other:
        assert sum(len(batch.indices) for batch in other) == 60
    with loader_of(MemorySource(images), RAW, rank=0, **ranks) as loader:
        if bad < 24:
            assert sum(len(batch.indices) for batch in loader) == 60 - bad
            return
        _, error = fault_of(loader)
    assert isinstance(error, TooManyBadSamples)
    assert "more than run.max_bad allows (24 of 240 samples: 15 of the 60 that this process drew)" in str(error)


@many_bad
def test_max_bad_counts_each_sample_once(files: list[Path], config: Path) -> None:
    with gpuflow.load(config, "train", overrides=["run.max_bad=2"]) as loader:
        for file in files[:2]:
            file.unlink()
        for _ in range(3):
            epoch_rows(loader)
        assert loader.stats()["bad_distinct"] == 2
        assert loader.stats()["bad"] >= 6


def test_a_warning_above_five_percent_once() -> None:
    """What is prefetched counts: the read of a third bad sample waits until two batches have come."""
    tap = Block(39)
    images = [jpeg(i % 3, i) if i not in (0, 1, 39) else None for i in range(40)]
    source = TappedSource(MemorySource(images), tap)
    with loader_of(source, RAW, shuffle=False, policy="skip") as loader:
        batches = iter(loader)
        for _ in range(9):
            next(batches)  # two of 40 are just 5%
        tap.release.set()
        with pytest.warns(UserWarning, match="bad so far") as caught:
            for _ in batches:
                pass
        assert [str(warning.message) for warning in caught] == [
            "3 of 40 samples are bad so far; run `gpuflow scan` to list them, or set run.max_bad"
        ]
        assert caught[0].filename == __file__
        epoch_rows(loader)


@pytest.mark.filterwarnings("error:.* samples are bad so far:UserWarning")
def test_where_warnings_are_errors_no_batch_is_lost() -> None:
    """The state is that of before the batch whose bad samples are reported."""
    images = [jpeg(i % 3, i) if i != 5 else None for i in range(8)]
    with loader_of(MemorySource(images), RAW, shuffle=False, policy="skip", threads=1, prefetch=1) as loader:
        with pytest.raises(UserWarning, match="bad so far"):
            list(loader)
        state = loader.state_dict()
        loader.load_state_dict(state)
        rest = [int(index) for batch in loader for index in batch.indices]
    assert [*range(state["position"]), *rest] == [0, 1, 2, 3, 4, 6, 7]


@many_bad
def test_where_every_sample_is_bad_replacing_ends() -> None:
    with loader_of(MemorySource([b"", None, b"GIF8", None]), shuffle=False, threads=1) as loader:
        steps, error = fault_of(loader)
    assert isinstance(error, TooManyBadSamples)
    assert (steps, str(error)) == (
        0,
        "all 4 samples are bad, so none can replace memory/0.jpg (sample 0): decode: empty: the file has no "
        "bytes; run `gpuflow scan` to list them",
    )


def test_a_source_that_breaks_its_contract_does_so_at_its_step() -> None:
    """Batches before it come whole, however much later they are decoded."""
    source = MemorySource.of(24)
    source.labels = source.labels[:10]
    with loader_of(TappedSource(source, Slow(0.02)), shuffle=False, batch_size=4) as loader:
        steps, error = fault_of(loader)
    assert (steps, type(error)) == (2, IndexError)


@many_bad
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("bad", [{0}, {4, 5}, {8, 9, 10, 11}, set(range(12))])
@pytest.mark.parametrize("batch_size", [1, 2])
def test_a_batch_of_nothing_but_bad_samples_raises(bad: set[int], batch_size: int, world_size: int) -> None:
    """The batches before it are delivered."""
    images = [None if i in bad else jpeg(0, i) for i in range(12)]
    for rank in range(world_size):
        firsts = range(rank * batch_size, 12, batch_size * world_size)
        steps = [set(range(first, first + batch_size)) for first in firsts]
        sound = next((k for k, step in enumerate(steps) if step <= bad), len(steps))
        with (
            loader_of(
                MemorySource(images, [0] * 12),
                RAW,
                shuffle=False,
                policy="skip",
                batch_size=batch_size,
                rank=rank,
                world_size=world_size,
            ) as loader,
            nothing_left_behind(),
        ):
            batches = iter(loader)
            assert [next(batches).step for _ in range(sound)] == list(range(sound))
            with pytest.raises(StopIteration if sound == len(steps) else TooManyBadSamples):
                next(batches)


@many_bad
@pytest.mark.parametrize(("world_size", "where"), [(1, ""), (2, " on rank 0")])
def test_a_batch_of_nothing_but_bad_samples_gives_the_first_reasons(world_size: int, where: str) -> None:
    source = MemorySource([None, None, jpeg(0, 2), jpeg(0, 3)], [0] * 4)
    with loader_of(source, shuffle=False, policy="skip", batch_size=2, world_size=world_size) as loader:
        _, error = fault_of(loader)
    first, second = (f"{source.path(i)} (sample {i}): read: no such file" for i in range(2))
    assert str(error) == (
        f"step 0 of epoch 0 holds nothing but bad samples{where}; the first bad ones: {first}; {second}; run `gpuflow "
        "scan` to list all, or set on_error: replace"
    )


@many_bad
@pytest.mark.parametrize("policy", ["raise", "replace", "skip"])
def test_a_listing_of_windows_is_named_as_the_cause(policy: str, tmp_path: Path) -> None:
    make_photos(tmp_path / "photos", classes=1, each=3)
    listing = tmp_path / "list.csv"
    listing.write_text("path,label\n" + "".join(f"photos\\class_0\\{i}.jpg,0\n" for i in range(3)))
    config = write_config(tmp_path / "x.yaml", "", source={"listing": str(listing)})
    with gpuflow.load(config, "val", overrides=[f"run.on_error={policy}"]) as loader:
        _, error = fault_of(loader)
    assert "read: no such file; its path has backslashes, as on Windows: write / in place of them" in str(error)


@many_bad
def test_replacing_goes_on_until_one_is_sound() -> None:
    images = [jpeg(0, 0) if i == 7 else None for i in range(12)]
    with loader_of(MemorySource(images)) as loader:
        assert [[row[0] for row in step] for step in epoch_rows(loader)] == [[7] * 4] * 3


def test_a_bad_file_that_cannot_be_written_is_located(config: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        gpuflow.load(config, overrides=[f"run.bad_file={tmp_path}/nowhere/bad.jsonl"])
    assert str(caught.value) == (
        f"{config}: run.bad_file cannot be written: No such file or directory: '{tmp_path}/nowhere/bad.jsonl'; "
        "name a file in a directory that exists"
    )


@pytest.mark.parametrize("name", ["rows.csv", "other.csv"])
def test_a_bad_file_that_is_the_listing_is_an_error(name: str, files: list[Path], config: Path, tmp_path: Path) -> None:
    listing, text = tmp_path / "rows.csv", f"path,label\n{files[0]},0\n"
    listing.write_text(text)
    (tmp_path / "other.csv").symlink_to(listing)
    source = {"listing": str(listing)}
    with pytest.raises(ConfigError, match=r"run\.bad_file must not be the file of source\.listing, got '.*csv'; name"):
        gpuflow.load(config, overrides=[f"source={json.dumps(source)}", f"run.bad_file={tmp_path / name}"])
    assert listing.read_text() == text


def test_a_bad_file_is_appended_to(files: list[Path], config: Path, tmp_path: Path) -> None:
    listed = tmp_path / "bad.jsonl"
    listed.write_text("a line of before\n")
    truncate(files[BAD])
    for _ in range(2):
        with gpuflow.load(config, "val", overrides=[f"run.bad_file={listed}"]) as loader:
            epoch_rows(loader)
    first, *rows = listed.read_text().splitlines()
    assert first == "a line of before"
    assert [json.loads(row)["index"] for row in rows] == [BAD, BAD], "a line for each loader"


def test_a_full_disk_under_a_bad_file_is_located(files: list[Path], config: Path) -> None:
    truncate(files[BAD])
    with gpuflow.load(config, "val", overrides=["run.bad_file=/dev/full"]) as loader:
        _, error = fault_of(loader)
    assert type(error) is LoaderError
    assert str(error) == (
        "run.bad_file cannot be written: No space left on device: '/dev/full'; free space, name a file elsewhere, or "
        "remove the key"
    )


# --- what a source raises against its contract ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        lambda: OSError("the disk is gone"),
        lambda: TimeoutError("the network is slow"),
        lambda: SystemExit(3),
        lambda: KeyboardInterrupt(),
        lambda: GeneratorExit(),
        lambda: MemoryError(),
        lambda: RuntimeError("cannot schedule new futures after shutdown"),
    ],
    ids=lambda make: type(make()).__name__,
)
@pytest.mark.parametrize("threads", [1, 3])
def test_what_a_read_raises_comes_out_at_its_step(threads: int, make: Callable[[], BaseException]) -> None:
    raised: list[BaseException] = []

    def remember() -> BaseException:
        raised.append(make())
        return raised[-1]

    source = TappedSource(MemorySource.of(24), Raise(BAD, remember))
    with loader_of(source, shuffle=False, threads=threads, policy="skip") as loader:
        steps, error = fault_of(loader)
        assert (steps, error) == (2, raised[0])


@pytest.mark.parametrize("policy", ["replace", "skip"])
def test_without_file_descriptors_the_loader_raises(policy: str, files: list[Path]) -> None:
    """Sound samples would be replaced, or left out, without an error."""
    source = open_source(source_spec(folder=str(files[0].parents[1])))
    with ExitStack() as stack:

        def before(index: int) -> None:
            if index == BAD:
                stack.enter_context(no_more_files())

        tapped = TappedSource(source, before)
        with loader_of(tapped, shuffle=False, policy=policy, threads=1) as loader:
            steps, error = fault_of(loader)
            stack.close()
            assert (steps, type(error)) == (2, SystemFault)
            assert loader.stats()["bad"] == 0


def test_a_shard_that_is_rewritten_ends_the_epoch(files: list[Path], tmp_path: Path) -> None:
    """Its labels do not belong to its bytes any more, with any `on_error`."""
    shard = tmp_path / "s.tar"

    def write(order: list[Path]) -> None:
        with tarfile.open(shard, "w") as archive:
            for number, file in enumerate(order):
                for name, data in ((f"{number:03d}.jpg", file.read_bytes()), (f"{number:03d}.cls", b"0")):
                    header = tarfile.TarInfo(name)
                    header.size = len(data)
                    archive.addfile(header, io.BytesIO(data))

    write(files)
    source = open_source(source_spec(tar=str(shard)))
    with loader_of(source, shuffle=False) as loader:
        epoch_rows(loader)
        before = shard.stat()
        write(files[::-1])
        os.utime(shard, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
        assert shard.stat().st_ino == before.st_ino
        steps, error = fault_of(loader)
        assert (steps, type(error)) == (0, SourceError)
        assert str(error).startswith(f"{shard}: shard must stay as it was indexed, but has changed (")
        assert loader.stats()["bad"] == 0


def test_stop_iteration_does_not_pass_for_the_end_of_an_epoch() -> None:
    with loader_of(TappedSource(MemorySource.of(24), Raise(BAD, StopIteration)), shuffle=False) as loader:
        steps, error = fault_of(loader)
    assert type(error) is LoaderError
    assert isinstance(error.__cause__, StopIteration)
    assert (steps, str(error)) == (2, "a stage raised StopIteration at step 2 of epoch 0; its cause is above")


def test_after_an_error_the_iterator_says_so_and_the_loader_goes_on() -> None:
    faults = Raise(BAD, lambda: OSError("the disk is gone"))
    with loader_of(TappedSource(MemorySource.of(24), faults), shuffle=False) as loader:
        epoch = iter(loader)
        with pytest.raises(OSError, match="the disk is gone"):
            list(epoch)
        with pytest.raises(LoaderError) as caught:
            next(epoch)
        assert str(caught.value) == "epoch 0 was ended because an error was raised; iterate the loader anew"
        assert loader.state_dict()["position"] == 8
        faults.index = -1
        assert [batch.epoch for batch in loader] == [1] * 6


# --- waits ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("remote", [False, True])
def test_a_stuck_read_ends_in_a_timeout_that_names_the_stage(remote: bool, caplog: pytest.LogCaptureFixture) -> None:
    tap = Block(BAD)
    source = TappedSource(MemorySource.of(24), tap)
    with loader_of(source, shuffle=False, timeout=0.5, readers=16 if remote else 0) as loader:
        start = time.monotonic()
        steps, error = fault_of(loader)
        assert time.monotonic() - start < 30
        assert steps == 2
        assert isinstance(error, LoaderTimeout) and isinstance(error, TimeoutError)
        assert re.fullmatch(
            r"no batch within run.timeout_s = 0.5 s at step 2 of epoch 0: the stage 'read' has been at one operation "
            r"for \d\.\d s, on one of 4 files: memory/8.jpg, memory/9.jpg, memory/10.jpg, memory/11.jpg; raise "
            r"run.timeout_s if that is to be expected",
            str(error),
        )
        assert error.paths == ("memory/8.jpg", "memory/9.jpg", "memory/10.jpg", "memory/11.jpg")
        assert re.fullmatch(
            r"a thread stays behind: the stage 'read' has been at one operation for \d\.\d s, on one of 4 files: "
            "memory/8.jpg, memory/9.jpg, memory/10.jpg, memory/11.jpg",
            caplog.messages[-1],
        )
        tap.release.set()
        tap.index = -1
        assert [batch.epoch for batch in loader] == [1] * 6, "the next epoch has threads of its own"


def test_a_stuck_read_of_a_replacement_is_not_blamed_on_decoding() -> None:
    """As with a server that has died, whose samples are replaced by others that it does not deliver either."""
    source = MemorySource(jpeg(i % 3, i) if i != BAD else None for i in range(200))
    order = ShuffledOrder(size=200, shuffle=False)
    tap = Block(order.replacement(0, BAD, 0))
    assert tap.index > 100, "not one that is read ahead"
    with loader_of(TappedSource(source, tap), shuffle=False, timeout=0.5) as loader:
        steps, error = fault_of(loader)
        assert (steps, type(error)) == (2, LoaderTimeout)
        assert "the stage 'read' has been at one operation for " in str(error)
        tap.release.set()


@pytest.mark.parametrize("replaced", [False, True])
def test_a_stuck_decoder_ends_in_a_timeout_that_names_the_file(replaced: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Among the files of a chunk, and where a replacement of a bad file is stuck. Python decodes PNGs."""
    images = [png(np.full((8, 8, 3), i, np.uint8)) for i in range(24)]
    tap, decoded = Block(BAD), list[int]()
    decode = CpuDecoder.decode

    def stuck(self: CpuDecoder, data: NDArray[np.uint8], *arguments: Any) -> Any:
        decoded.append(images.index(data.tobytes()))
        if decoded.count(tap.index) > replaced:
            tap(decoded[-1])
        return decode(self, data, *arguments)

    if replaced:
        images[0] = b"no image"
        tap.index = ShuffledOrder(size=24, seed=0, shuffle=False).replacement(0, 0, 0)
    monkeypatch.setattr(CpuDecoder, "decode", stuck)
    with loader_of(MemorySource(images), shuffle=False, timeout=0.5, threads=1, batch_size=24) as loader:
        _, error = fault_of(loader)
        assert isinstance(error, LoaderTimeout)
        assert error.paths == (loader.dataset.path(tap.index),)
        expected = rf"the stage 'decode' has been at one operation for \d\.\d s, on {error.paths[0]}; raise"
        assert re.search(expected, str(error)), error
        assert pickle.loads(pickle.dumps(error)).paths == error.paths
        tap.release.set()


class LateServer:
    """Files behind a URL. A read fails once the loader has waited for `run.timeout_s`, and asks for the storage."""

    def __init__(self, source: Source) -> None:
        self.source, self.asked = source, threading.Event()
        self.classes, self.labels, self.shard_sizes = source.classes, source.labels, source.shard_sizes
        self.path, self.close = source.path, source.close

    def __len__(self) -> int:
        return len(self.source)

    @property
    def storage(self) -> Storage:
        self.asked.set()
        return open_storage("memory://photos")

    def read(self, indices: Sequence[int], allocate: Allocate) -> Payload:
        self.asked.clear()
        assert self.asked.wait(60)
        raise ServerFault("memory: its server is away")


def test_an_error_of_a_server_that_comes_late_is_raised_in_place_of_a_timeout() -> None:
    with loader_of(LateServer(MemorySource.of(1)), batch_size=1, threads=1, timeout=2.0) as loader:
        assert str(fault_of(loader)[1]) == "memory: its server is away"


def test_timeout_is_that_of_a_batch_not_of_an_epoch() -> None:
    with loader_of(MemorySource.of(12), timeout=3.0) as loader:
        for _ in loader:
            time.sleep(1.1)


@pytest.mark.parametrize("end", ["closed", "forgotten"])
def test_replacing_ends_with_the_epoch(end: str) -> None:
    """Every sample is bad and slow to read: nobody goes through the whole source for a batch that nobody wants."""
    reads: list[int] = []

    def before(index: int) -> None:
        reads.append(index)
        time.sleep(0.02)

    with nothing_left_behind():
        loader = loader_of(TappedSource(MemorySource([None] * 30_000), before), timeout=0.3)
        steps, error = fault_of(loader)
        assert (steps, type(error)) == (0, LoaderTimeout)
        if end == "closed":
            loader.close()
        del loader, error
    count = len(reads)
    assert 0 < count < 30_000
    time.sleep(0.1)
    assert len(reads) == count


def test_a_process_with_a_stuck_read_can_exit(interpreter: Interpreter) -> None:
    code = """
from tests.datasets import *
loader = loader_of(TappedSource(MemorySource.of(24), Block(9)), shuffle=False, timeout=0.5)
try:
    for _ in loader: pass
except gpuflow.LoaderTimeout as error:
    print(type(error).__name__)
    raise SystemExit(7)
"""
    done = interpreter.run(code, seconds=50)
    assert (done.returncode, done.stdout) == (7, "LoaderTimeout\n"), done.stderr
    assert "Traceback" not in done.stderr


def test_the_place_of_a_failure_does_not_depend_on_what_was_prefetched() -> None:
    """Two faults in one epoch: the earlier step's comes out, though the later one's is there first."""
    tap = Block(0)

    def before(index: int) -> None:
        if index == 1:
            tap.release.set()
            raise OSError("later")
        tap(index)
        raise OSError("earlier")

    source = TappedSource(MemorySource.of(24), before)
    with loader_of(source, shuffle=False, batch_size=1) as loader:
        steps, error = fault_of(loader)
    assert (steps, str(error)) == (0, "earlier")
