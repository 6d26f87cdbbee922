"""The measurements of `gpuflow doctor`: reading and decoding, what is counted, and failures."""

from __future__ import annotations

import os
import tarfile
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from gpuflow.config import resources
from gpuflow.decode.nvjpeg import BACKENDS
from gpuflow.errors import SourceError
from gpuflow.sources import NotMeasuredError, SourceSpec, source_spec
from gpuflow.tools import rates
from gpuflow.tools.rates import (
    at_once,
    core_rates,
    data,
    disk_rates,
    filesystem_of,
    find_images,
    jpeg_engines,
    probed,
)
from gpuflow.tools.samples import make_detection_samples
from tests.datasets import deadline, jpeg, make_photos, nothing_left_behind
from tests.images import jpeg as encoded
from tests.images import photo


@pytest.fixture(autouse=True)
def _in_time() -> Iterator[None]:
    with deadline(60):
        yield


def folder(path: Path) -> SourceSpec:
    return source_spec(folder=str(path))


# --- finding images ---------------------------------------------------------------------------------------------------


def test_images_of_a_folder_come_in_random_order_but_the_same_each_time(tmp_path: Path) -> None:
    files = make_photos(tmp_path, classes=3, each=8)
    (tmp_path / "class_0" / "notes.txt").write_text("no image")
    found = find_images(folder(tmp_path), limit=100)
    assert sorted(extent.path for extent in found) == sorted(map(str, files))
    assert found != sorted(found)
    assert found == find_images(folder(tmp_path), limit=100)
    assert len(find_images(folder(tmp_path), limit=10)) <= 8 + 10


@pytest.mark.parametrize(
    "spec", [source_spec(hf="data/saved"), source_spec(mix=({"source": {"folder": "data/saved"}},))]
)
def test_a_source_that_is_no_folder_is_measured_elsewhere(spec: SourceSpec) -> None:
    with pytest.raises(NotMeasuredError, match=r"^data/saved is no folder of images$"):
        find_images(spec, limit=9)


def test_images_of_a_flat_folder_and_links(tmp_path: Path) -> None:
    (tmp_path / "a.JPG").write_bytes(jpeg(0, 0))
    (tmp_path / "b.jpg").symlink_to(tmp_path / "a.JPG")
    assert {Path(extent.path).name for extent in find_images(folder(tmp_path), limit=9)} == {"a.JPG", "b.jpg"}


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    path = tmp_path / "shards" / "000.tar"
    path.parent.mkdir()
    images = make_photos(tmp_path / "photos", classes=1, each=6)
    with tarfile.open(path, "w") as tar:
        for image in images:
            tar.add(image, image.name)
            tar.add(__file__, image.with_suffix(".cls").name)
    return path


@pytest.mark.parametrize("kind", ["tar", "folder"])
def test_images_of_shards_are_ranges(kind: str, shard: Path) -> None:
    where = {"tar": f"{shard.parent}/{{000..000}}.tar", "folder": str(shard.parent)}[kind]
    found = find_images(source_spec(**{kind: where}), limit=100)
    contents = shard.read_bytes()
    read = {contents[start : start + (size or 0)] for _, start, size in found}
    assert read == {jpeg(0, i) for i in range(6)}
    assert len(find_images(folder(shard.parent), limit=4)) == 4
    _, files = disk_rates(folder(shard.parent), readers=[2])
    assert {file.tobytes() for file in files} == read


@pytest.mark.parametrize("kind", ["folder", "tar", "folder of shards"])
def test_images_of_declared_extensions(kind: str, tmp_path: Path) -> None:
    image, shard = tmp_path / "photos" / "a" / "0.HEIC", tmp_path / "shards" / "000.tar"
    for path in (image, shard):
        path.parent.mkdir(parents=True)
    image.write_bytes(jpeg(0, 0))
    with tarfile.open(shard, "w") as tar:
        tar.add(image, "0.HEIC")
    spec = {
        "folder": source_spec(folder=str(tmp_path / "photos"), extensions=("heic",)),
        "tar": source_spec(tar=str(shard), extensions=("heic",)),
        "folder of shards": source_spec(folder=str(shard.parent), extensions=("heic",)),
    }[kind]
    assert [extent.path for extent in find_images(spec, limit=9)] == [str(image if kind == "folder" else shard)]
    with pytest.raises(SourceError, match="holds no images"):
        find_images(source_spec(**{spec.kind: spec.where}), limit=9)


def test_images_of_a_listing(tmp_path: Path) -> None:
    files = make_photos(tmp_path / "photos", classes=2, each=3)
    (tmp_path / "list.csv").write_text("path,label\n" + "".join(f"{file},{i % 2}\n" for i, file in enumerate(files)))
    found = find_images(source_spec(listing=str(tmp_path / "list.csv")), limit=4)
    assert len(found) == 4
    assert {extent.path for extent in found} <= set(map(str, files))


def test_images_of_annotations(tmp_path: Path) -> None:
    make_detection_samples(tmp_path, 3)
    spec = source_spec(coco=str(tmp_path / "instances.json"), images=str(tmp_path / "images"))
    found = {extent.path for extent in find_images(spec, limit=100)}
    assert found == {str(path) for path in (tmp_path / "images").iterdir()}


def test_a_search_ends_in_time(tmp_path: Path) -> None:
    make_photos(tmp_path, classes=3, each=3)
    with pytest.raises(SourceError, match="holds no images"):
        find_images(folder(tmp_path), limit=100, seconds=0.0)


def test_nothing_to_find(tmp_path: Path) -> None:
    with pytest.raises(SourceError) as caught:
        find_images(folder(tmp_path), limit=9)
    assert str(caught.value) == f"{tmp_path}: holds no images; name a folder that does"
    with pytest.raises(SourceError) as caught:
        find_images(folder(tmp_path / "x"), limit=9)
    assert str(caught.value) == f"{tmp_path}/x: no such file or directory; check the path"
    (tmp_path / "junk.tar").write_bytes(b"junk" * 1000)
    with pytest.raises(SourceError, match=rf"^{tmp_path}/junk\.tar: not a tar file \(.*\); check what it is$"):
        find_images(folder(tmp_path), limit=9)


# --- reading them -----------------------------------------------------------------------------------------------------


def test_each_number_of_readers_gets_other_images(tmp_path: Path) -> None:
    files = make_photos(tmp_path, classes=2, each=20)
    with nothing_left_behind():
        measured, read = disk_rates(folder(tmp_path), readers=[1, 16])
    assert [(rate.readers, rate.images, rate.unreadable) for rate in measured] == [(1, 20, 0), (16, 20, 0)]
    assert sorted(data.tobytes() for data in read) == sorted(file.read_bytes() for file in files)
    mean = sum(file.stat().st_size for file in files) / len(files)
    for rate in measured:
        assert rate.images_per_s > 0
        assert rate.bytes_per_s / rate.images_per_s == pytest.approx(mean, rel=0.5)
        assert rate.cached is None or 0 <= rate.cached <= rate.images


def test_one_image_is_read_once(tmp_path: Path) -> None:
    make_photos(tmp_path, classes=1, each=1)
    measured, read = disk_rates(folder(tmp_path), readers=[2, 16])
    assert [(rate.readers, rate.images) for rate in measured] == [(2, 1)]
    assert len(read) == 1


def test_images_larger_than_the_buffer(tmp_path: Path) -> None:
    content = os.urandom(3 << 20)
    (tmp_path / "large.jpg").write_bytes(content)
    _, [read] = disk_rates(folder(tmp_path), readers=[1])
    assert read.tobytes() == content


def test_what_cannot_be_read_is_counted(tmp_path: Path) -> None:
    make_photos(tmp_path, classes=1, each=3)
    (tmp_path / "class_0" / "dangling.jpg").symlink_to("/nowhere")
    [rate], _ = disk_rates(folder(tmp_path), readers=[2])
    assert (rate.images, rate.unreadable) == (3, 1)


def test_what_was_in_the_page_cache_is_read_from_the_disk(tmp_path: Path) -> None:
    """Dropping them from the cache is a hint, which a busy kernel may pass over."""
    files, found = make_photos(tmp_path, classes=1, each=20), list[int]()
    for _ in range(10):
        for file in files:
            with file.open("rb") as written:
                os.fsync(written.fileno())  # what is yet to be written stays in the cache
                written.read()
        [rate], _ = disk_rates(folder(tmp_path), readers=[1])
        if rate.cached is None:
            pytest.skip(f"{rate.filesystem} does not tell what is cached")
        found.append(rate.cached)
        if rate.cached <= 5:
            return
    raise AssertionError(f"images that came from the cache, of 20 each time: {found}")


def test_storage_that_does_not_answer() -> None:
    released = threading.Event()
    with pytest.raises(SourceError) as caught:
        at_once([lambda: released.wait(20), lambda: True], "/mnt/photos", patience=0.2)
    released.set()
    assert str(caught.value) == "/mnt/photos: no answer within 0.2 s; check that the storage is there"


MOUNTS = [
    ("/", "ext4"),
    ("/data", "nfs4"),
    ("/data/my photos", "fuse.s3fs"),
    ("/database", "ext4"),
    ("/database", "xfs"),
]


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/home/x.jpg", "ext4"),
        ("/data/a/b.jpg", "nfs4"),
        ("/data", "nfs4"),
        ("/data/my photos/b.jpg", "fuse.s3fs"),
        ("/database/b.jpg", "xfs"),
    ],
)
def test_the_file_system_of_a_path(path: str, kind: str) -> None:
    assert filesystem_of(path, MOUNTS) == kind
    assert filesystem_of(path, []) == "unknown"


def test_the_file_system_of_shared_memory() -> None:
    assert filesystem_of("/dev/shm/x") == "tmpfs"


# --- decoding them ----------------------------------------------------------------------------------------------------


def arrays(*files: bytes) -> list[np.ndarray[tuple[int], np.dtype[np.uint8]]]:
    return [np.frombuffer(file, np.uint8) for file in files]


def test_images_made_on_the_spot_are_like_photographs() -> None:
    images = probed(rates.photographs(4))
    summary = data(images, bad=0, where=None)
    assert (summary.images, summary.width, summary.height, summary.for_engines) == (4, 500, 375, 4)
    assert 40_000 < summary.mean_bytes < 80_000
    assert len({image.data.tobytes() for image in images}) == 4


def test_the_figures_of_images() -> None:
    progressive = encoded(photo(30, 40), progressive=True)
    images = probed(arrays(encoded(photo(60, 80)), progressive, b"junk", encoded(photo(10, 10))))
    summary = data(images, bad=1, where="x")
    assert (summary.where, summary.images, summary.bad, summary.for_engines) == ("x", 4, 1, 2)
    assert (summary.width, summary.height) == (40, 30)
    assert summary.mean_bytes == sum(image.data.size for image in images) / 4


def test_cores_are_measured_and_bad_images_counted() -> None:
    good = encoded(photo(60, 80))
    broken = b"\xff\xd8\xff\xe0" + good[4:20] + good[-60:]
    with nothing_left_behind():
        measured, bad = core_rates(probed(arrays(good, b"", broken)), threads=[1, 2])
    assert [rate.at_once for rate in measured] == [1, 2]
    assert all(rate.images_per_s > 100 and rate.cores is not None and 0 < rate.cores < 3 for rate in measured)
    assert bad == 2


def test_nothing_to_decode() -> None:
    assert core_rates(probed(arrays(b"", b"junk")), threads=[1, 2]) == ((), 2)


def test_without_images_the_engines_are_only_looked_for() -> None:
    engines = jpeg_engines(())
    assert engines.rate is None
    assert (engines.error is None) == (engines.path != "") == (engines.version != "")


def test_many_readers_are_those_of_a_loader_from_urls() -> None:
    assert rates.MANY_READERS == resources._REMOTE_READERS


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_the_engines_of_a_gpu_are_measured() -> None:
    engines = jpeg_engines(probed(rates.photographs()))
    assert engines.error is None
    assert engines.rate is not None and engines.rate.at_once == 256
    assert engines.rate.images_per_s > 1000
    assert engines.backend in BACKENDS
    assert jpeg_engines(probed(arrays(encoded(photo(60, 80), progressive=True)))).rate is None


def test_a_batch_for_the_engines_repeats_few_images_up_to_a_gigabyte_of_pixels() -> None:
    [image] = probed(arrays(encoded(photo(60, 80))))
    assert image.header is not None
    assert [row[1:] for row in rates._engine_batch([image])] == [(60, 80)] * 256
    large = image._replace(header=replace(image.header, width=10_000, height=10_000))
    assert len(rates._engine_batch([large])) == 3
    assert rates._engine_batch([image._replace(header=None)]) == []
