"""The folder source: the samples and the order of ImageFolder, and located errors."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from torchvision.datasets import ImageFolder
from torchvision.datasets.folder import IMG_EXTENSIONS

from gpuflow.errors import ConfigError, SourceError
from gpuflow.pipeline.rng import key64
from gpuflow.sources import fingerprint_of, has_labels, open_source, source_spec, subset
from gpuflow.sources.folder import EXTENSIONS
from tests.sources.conftest import ReadAll
from tests.texts import outline


def plant(root: Path, *names: str) -> Path:
    """Creates files that hold their own names."""
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(os.fsencode(name))
    return root


def fails(text: str, **fields: object) -> None:
    with pytest.raises(SourceError) as caught:
        open_source(source_spec(**fields))
    assert outline(caught.value) == text


def test_order_and_labels_are_those_of_image_folder(tmp_path: Path, read_all: ReadAll) -> None:
    root = plant(
        tmp_path / "photos",
        *("b/2.JPG", "b/10.png", "b/1.jpeg", "b/readme.txt", "a/z/1.webp", "a/z-1/1.bmp", "a/z/q/2.jpg", "a/y.ppm"),
        *("a/Z.tif", "a/a.tiff", "a/é.jpg", "a/x.jpg/inner.pgm", "C/shown.jpg", "top.jpg", "a/b.jpg.txt"),
    )
    other = plant(tmp_path / "other", "linked/3.jpg", "linked/sub/4.jpg")
    (root / "a" / "link").symlink_to(other / "linked")
    (root / "d").symlink_to(other / "linked")
    (root / "b" / "link.jpg").symlink_to(other / "linked" / "3.jpg")
    (root / "b" / "odd\udcff.jpg").write_bytes(b"b/odd")
    source, expected = open_source(source_spec(folder=str(root))), ImageFolder(str(root))
    assert [(source.path(i), int(source.labels[i])) for i in range(len(source))] == expected.samples
    assert list(source.classes) == expected.classes == ["C", "a", "b", "d"]
    assert source.labels.dtype == np.int64
    assert source.shard_sizes is None
    assert read_all(source) == [Path(path).read_bytes() for path, _ in expected.samples]


def test_images_without_labels_lie_at_any_depth(tmp_path: Path, read_all: ReadAll) -> None:
    root = plant(tmp_path / "new", "b.jpg", "a.txt", ".hidden.jpg", "a/z/1.png", "a-b/2.jpg", "a/3.jpg", "empty/4.txt")
    source = open_source(source_spec(folder=str(root), fields={"image": {}}))
    assert read_all(source) == [b"b.jpg", b"a/3.jpg", b"a/z/1.png", b"a-b/2.jpg"]
    assert not has_labels(source) and source.classes == ()
    fails(
        f"{root}/empty, got none",
        folder=str(root / "empty"),
        fields={"image": {}},
    )


def test_extensions_are_those_of_image_folder() -> None:
    assert EXTENSIONS == IMG_EXTENSIONS


def test_other_extensions_are_images_where_they_are_named(tmp_path: Path) -> None:
    root = plant(tmp_path / "photos", "a/1.jpg", "a/2.HEIC", "a/3.avif", "b/4.gif", "b/5.png", "b/6xheic")
    source = open_source(source_spec(folder=str(root), extensions=("heic", "avif")))
    names = [os.path.relpath(source.path(i), root) for i in range(len(source))]
    assert names == ["a/1.jpg", "a/2.HEIC", "a/3.avif", "b/5.png"]
    assert len(open_source(source_spec(folder=str(root)))) == 2


@pytest.mark.parametrize("extension", ["jpg", "heic"])
def test_a_link_that_cannot_be_examined_counts_as_an_image_by_its_name(extension: str, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / f"0.{extension}").symlink_to("x" * 300)  # longer than a name may be
    source = open_source(source_spec(folder=str(tmp_path), extensions=("heic",)))
    assert [source.path(i) for i in range(len(source))] == [f"{tmp_path}/a/0.{extension}"]


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"folder": "x", "extensions": (".heic",)}, "source.extensions config.range, got '.heic'"),
        ({"listing": "x.csv", "extensions": ("heic",)}, "source.extensions config.conflict"),
    ],
)
def test_wrong_extensions(fields: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        source_spec(**fields)
    assert outline(caught.value) == text


def test_a_trailing_slash_and_a_relative_root_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(tmp_path / "photos", "a/1.jpg")
    monkeypatch.chdir(tmp_path)
    assert open_source(source_spec(folder="photos/")).path(0) == "photos/a/1.jpg"
    assert open_source(source_spec(folder="photos")).path(0) == "photos/a/1.jpg"


def test_missing_root_names_its_nearest_sibling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(tmp_path / "photos", "a/1.jpg")
    monkeypatch.chdir(tmp_path)
    rule = "source.folder, got"
    fails(f"{rule} 'fotos', which does not exist", folder="fotos")
    fails(f"{rule} 'fotos/a', which does not exist", folder="fotos/a")
    fails(f"{rule} 'xyz', which does not exist", folder="xyz")
    fails(f"{rule} '{tmp_path}/xyz', which does not exist", folder=f"{tmp_path}/xyz")


def test_root_that_is_a_file(tmp_path: Path) -> None:
    plant(tmp_path, "a.jpg", "list.csv", "s.tar")
    rule = f"source.folder, got '{tmp_path}/"
    fails(
        f"{rule}a.jpg', which is a file",
        folder=str(tmp_path / "a.jpg"),
    )
    fails(f"{rule}list.csv', which is a file", folder=str(tmp_path / "list.csv"))
    fails(f"{rule}s.tar', which is a file", folder=str(tmp_path / "s.tar"))


def test_no_class_directories(tmp_path: Path) -> None:
    plant(tmp_path, "1.jpg", "2.jpg")
    fails(
        f"{tmp_path}, got none (2 files)",
        folder=str(tmp_path),
    )


def test_class_without_images(tmp_path: Path) -> None:
    plant(tmp_path, "a/1.jpg", "b/readme.txt")
    with pytest.raises(FileNotFoundError):
        ImageFolder(str(tmp_path))
    fails(f"{tmp_path}/b, got none", folder=str(tmp_path))
    (tmp_path / "c").mkdir()
    (tmp_path / "d" / "x.jpg").mkdir(parents=True)
    fails(f"{tmp_path}/b, got none", folder=str(tmp_path))
    for i in range(9):
        (tmp_path / f"e{i}").mkdir()
    fails(f"{tmp_path}/b, got none", folder=str(tmp_path))


def test_names_that_begin_with_a_dot_are_left_out(tmp_path: Path) -> None:
    """Notebooks, desktops and editors make them, and they would shift all labels."""
    hidden = ("a/.ipynb_checkpoints/1.jpg", "a/._1.jpg", "b/.x/2.jpg", ".trash/4.jpg")
    root = plant(tmp_path, "a/1.jpg", "b/3.jpg", *hidden)
    source = open_source(source_spec(folder=str(root)))
    assert source.classes == ("a", "b")
    assert [source.path(i).removeprefix(f"{root}/") for i in range(len(source))] == ["a/1.jpg", "b/3.jpg"]


def test_a_link_to_an_ancestor_is_not_followed(tmp_path: Path) -> None:
    root = plant(tmp_path / "data/photos", "a/1.jpg", "a/sub/2.jpg", "b/3.jpg")
    plant(tmp_path, "other/4.jpg")
    for place, target in {
        "a/up": "..",
        "a/self": ".",
        "a/sub/again": "../../a",
        "a/above": "../..",
        "b/above": str(tmp_path),
        "whole": ".",
        "a/end": "/",
    }.items():
        (root / place).symlink_to(target)
    source = open_source(source_spec(folder=str(root)))
    assert [source.path(i)[len(str(root)) + 1 :] for i in range(len(source))] == ["a/1.jpg", "a/sub/2.jpg", "b/3.jpg"]
    assert source.classes == ("a", "b")
    (tmp_path / "link").symlink_to(root)
    assert len(open_source(source_spec(folder=str(tmp_path / "link")))) == 3


def test_links_that_point_at_each_other_end(tmp_path: Path) -> None:
    plant(tmp_path, "a/1.jpg", "b/2.jpg")
    (tmp_path / "a/to_b").symlink_to("../b")
    (tmp_path / "b/to_a").symlink_to("../a")
    (tmp_path / "a/x").symlink_to("y")
    (tmp_path / "a/y").symlink_to("x")
    (tmp_path / "a/z.jpg").symlink_to("z.jpg")
    source = open_source(source_spec(folder=str(tmp_path)))
    assert [source.path(i)[len(str(tmp_path)) + 1 :] for i in range(len(source))] == [
        *("a/1.jpg", "a/z.jpg", "a/to_b/2.jpg", "b/2.jpg", "b/to_a/1.jpg", "b/to_a/z.jpg")
    ]


def test_two_links_to_their_own_directory_end(tmp_path: Path) -> None:
    """Followed, they are 2^40 directories."""
    plant(tmp_path, "a/1.jpg")
    (tmp_path / "a/one").symlink_to(".")
    (tmp_path / "a/two").symlink_to(".")
    assert len(open_source(source_spec(folder=str(tmp_path)))) == 1


def test_a_directory_that_cannot_be_listed_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One whose path is too long, which root may not list either."""
    plant(tmp_path, "a/1.jpg")
    monkeypatch.chdir(tmp_path / "a")
    name, deep = "d" * 250, str(tmp_path / "a")
    for _ in range(17):
        os.mkdir(name)
        os.chdir(name)
        deep = f"{deep}/{name}"
        if len(deep) > 4096:
            break
    Path("2.jpg").write_bytes(b"unseen")
    with pytest.raises(SourceError, match="file name too long") as caught:
        open_source(source_spec(folder=str(tmp_path)))
    assert str(caught.value).startswith(f"{deep}: ")


def test_a_name_that_is_not_utf8_in_a_split(tmp_path: Path) -> None:
    plant(tmp_path, *(f"{label}/{i}.jpg" for label in ("caf\udce9", "b") for i in range(10)))
    spec = source_spec(folder=str(tmp_path), split={"train": 0.8, "val": 0.2})
    whole = open_source(spec)
    parts = [subset(whole, spec, name) for name in ("train", "val")]
    assert [np.bincount(part.labels).tolist() for part in parts] == [[8, 8], [2, 2]]
    assert key64("split", 0, "caf\udce9") != key64("split", 0, "caf\udcea")


def test_an_unreadable_file_is_an_error_of_its_own_sample_only(tmp_path: Path, read_all: ReadAll) -> None:
    names = [f"a/{i}.jpg" for i in range(9)]
    source = open_source(source_spec(folder=str(plant(tmp_path, *names))))
    (tmp_path / "a/1.jpg").unlink()
    (tmp_path / "a/2.jpg").unlink()
    (tmp_path / "a/2.jpg").mkdir()
    (tmp_path / "a/3.jpg").write_bytes(b"")
    (tmp_path / "a/4.jpg").unlink()
    os.mkfifo(tmp_path / "a/4.jpg")
    (tmp_path / "a/5.jpg").unlink()
    (tmp_path / "a/5.jpg").symlink_to("5.jpg")
    (tmp_path / "a/6.jpg").unlink()
    (tmp_path / "a/6.jpg").symlink_to("0.jpg/x")
    (tmp_path / "a/7.jpg").chmod(0)
    denied = "permission denied" if os.geteuid() else b"a/7.jpg"
    before = len(os.listdir("/proc/self/fd"))
    assert read_all(source) == [
        *(b"a/0.jpg", "no such file", "is a directory", "empty file", "not a regular file", "too many symbolic links"),
        *("no such file", denied, b"a/8.jpg"),
    ]
    assert len(os.listdir("/proc/self/fd")) == before


def test_order_of_the_indices_and_repeats(tmp_path: Path, read_all: ReadAll) -> None:
    source = open_source(source_spec(folder=str(plant(tmp_path, *(f"a/{i:03}.jpg" for i in range(100))))))
    wanted = [99, 0, 5, 5, *range(100)]
    assert read_all(source, wanted) == [f"a/{i:03}.jpg".encode() for i in wanted]
    assert read_all(source, []) == []
    source.close()


def test_a_temporary_failure_is_retried(read_all: ReadAll) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:  # a socket's path must be short
        root = plant(Path(directory), "a/1.jpg", "a/2.jpg", "a/3.jpg")
        source = open_source(source_spec(folder=directory))
        first, second = root / "a/1.jpg", root / "a/2.jpg"
        first.unlink()
        second.unlink()
        with socket.socket(socket.AF_UNIX) as one, socket.socket(socket.AF_UNIX) as two:
            one.bind(str(first))  # opening a socket fails with ENXIO, which is not one of the permanent errors
            two.bind(str(second))

            def heal() -> None:
                (root / "new").write_bytes(b"back")
                (root / "new").replace(first)

            timer = threading.Timer(0.08, heal)
            timer.start()
            results = read_all(source)
            timer.join()
        assert results == [b"back", "no such device or address; tried 4 times", b"a/3.jpg"]


def test_an_exception_of_the_allocator_leaves_no_file_open(tmp_path: Path) -> None:
    source = open_source(source_spec(folder=str(plant(tmp_path, "a/1.jpg", "a/2.jpg"))))

    def refuse(size: int) -> NDArray[np.uint8]:
        raise MemoryError(size)

    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(MemoryError):
        source.read([0, 1], refuse)
    assert len(os.listdir("/proc/self/fd")) == before


def test_many_threads_with_few_descriptors(tmp_path: Path) -> None:
    """Running out of file descriptors slows reading and affects no result."""
    plant(tmp_path, *(f"a/{i:03}.jpg" for i in range(64)))
    script = f"""
import resource, numpy as np
from concurrent.futures import ThreadPoolExecutor
from gpuflow.sources import open_source, source_spec
source = open_source(source_spec(folder={str(tmp_path)!r}))
def read(turn):
    return source.read(range(64), lambda size: np.empty(size, np.uint8)).errors
with ThreadPoolExecutor(8) as threads:
    list(threads.map(read, range(8)))
    resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
    assert all(error is None for errors in threads.map(read, range(200)) for error in errors)
"""
    subprocess.run([sys.executable, "-c", script], check=True, cwd=Path(__file__).parents[2])


# Splits that are directories.


def planted(root: Path) -> Path:
    """Folders of training and validation, as of ImageNet; no photograph of b is for validation."""
    return plant(
        root, "train/a/1.jpg", "train/b/1.jpg", "train/b/2.jpg", "train/ç d/1.jpg", "val/ç d/1.jpg", "val/a/z.jpg"
    )


def test_splits_are_folders_with_the_classes_of_the_first(tmp_path: Path, read_all: ReadAll) -> None:
    root = planted(tmp_path / "photos")
    spec = source_spec(folder=str(root), splits=("train", "val"))
    whole = open_source(spec)
    train, val = (subset(whole, spec, name) for name in spec.splits)
    expected = ImageFolder(str(root / "train"))
    assert train.classes == val.classes == tuple(expected.classes) == ("a", "b", "ç d")
    assert [(train.path(i), int(train.labels[i])) for i in range(len(train))] == expected.samples
    found = [(val.path(i), int(val.labels[i])) for i in range(len(val))]
    assert found == [(f"{root}/val/a/z.jpg", 0), (f"{root}/val/ç d/1.jpg", 2)]
    assert read_all(val) == [b"val/a/z.jpg", "val/ç d/1.jpg".encode()]
    assert whole.labels.tolist() == [0, 1, 1, 2, 0, 2]
    other = planted(tmp_path / "moved")
    assert fingerprint_of(open_source(source_spec(folder=str(other), splits=spec.splits))) == fingerprint_of(whole)


def test_parts_that_are_read_as_classes_are_a_warning(tmp_path: Path) -> None:
    root = planted(tmp_path / "photos")
    with pytest.warns(UserWarning, match=r"has the classes train, val, which .* write splits: \[train, val\]"):
        assert open_source(source_spec(folder=str(root))).classes == ("train", "val")
    plant(root, "bus/1.jpg")
    assert open_source(source_spec(folder=str(root))).classes == ("bus", "train", "val")


def test_a_split_has_no_classes_that_the_first_has_not(tmp_path: Path) -> None:
    plant(planted(tmp_path), "val/c d/1.jpg")
    fails(
        f"{tmp_path}/val/c",
        folder=str(tmp_path),
        splits=("train", "val"),
    )


def test_a_split_without_images_or_directory(tmp_path: Path) -> None:
    (planted(tmp_path) / "val" / "b").mkdir()
    with pytest.raises(SourceError) as caught:
        open_source(source_spec(folder=str(tmp_path), splits=("train", "val")))
    assert outline(caught.value) == f"{tmp_path}/val/b, got none"
    fails(
        f"source.folder, got '{tmp_path}/vals', which does not exist",
        folder=str(tmp_path),
        splits=("train", "vals"),
    )


def test_splits_behind_a_url(tmp_path: Path) -> None:
    root = planted(tmp_path)
    spec = source_spec(folder=f"file://{root}", splits=("train", "val"))
    val = subset(open_source(spec), spec, "val")
    assert [(val.path(i), int(val.labels[i])) for i in range(len(val))] == [
        (f"file://{root}/val/a/z.jpg", 0),
        (f"file://{root}/val/ç d/1.jpg", 2),
    ]


def test_a_mix_of_folders_with_splits(tmp_path: Path) -> None:
    entries = tuple({"source": {"folder": str(planted(tmp_path / name))}} for name in "xy")
    spec = source_spec(mix=entries, splits=("train", "val"))
    whole = open_source(spec)
    assert [len(subset(whole, spec, name)) for name in spec.splits] == [8, 4]
