"""Sample data: the same arguments make the same files on any number of threads, and no other file is overwritten."""

from __future__ import annotations

import importlib.metadata
import os
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from gpuflow.errors import ConfigError
from gpuflow.tools.samples import PHOTOS, encoded, make_detection_samples, make_samples

COUNT = 20


def tree(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*.jpg")}


def recording(threads: list[str], make: Callable[..., bytes]) -> Callable[..., bytes]:
    """What `make` does, with the name of its thread noted."""

    def recorded(*arguments: Any) -> bytes:
        threads.append(threading.current_thread().name)
        return make(*arguments)

    return recorded


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("samples") / "photos"
    make_samples(root, COUNT)
    return root


def test_files_are_a_pure_function_of_count_and_seed(made: Path, tmp_path: Path) -> None:
    assert len(tree(made)) == COUNT
    make_samples(tmp_path / "again", COUNT)
    assert tree(tmp_path / "again") == tree(made)
    make_samples(tmp_path / "other", COUNT, seed=1)
    assert not set(tree(tmp_path / "other").values()) & set(tree(made).values())


@pytest.mark.parametrize("make", [make_samples, make_detection_samples])
def test_files_are_made_on_the_cores_that_this_process_may_use(
    make: Callable[[Path, int], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0})
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    threads: list[str] = []
    monkeypatch.setattr("gpuflow.tools.samples.encoded", recording(threads, encoded))
    monkeypatch.setattr("gpuflow.tools.samples.encoded", recording(threads, encoded))
    make(tmp_path, 4)
    assert len(threads) == 4 and len(set(threads)) == 1


def test_a_smaller_count_makes_the_first_of_the_same_files(made: Path, tmp_path: Path) -> None:
    samples = make_samples(tmp_path, 3)
    assert tree(tmp_path).items() < tree(made).items()
    assert [path.name for path in sorted(tmp_path.glob("[!.]*"))] == list(samples.classes)


def test_layout_and_format(made: Path) -> None:
    files = sorted(made.rglob("*.jpg"), key=lambda path: path.name)
    assert [path.name for path in files] == [f"{i:06d}.jpg" for i in range(COUNT)]
    assert [path.parent.name for path in files] == [list(PHOTOS)[i % len(PHOTOS)] for i in range(COUNT)]
    for path in files:
        with Image.open(path) as image:
            assert (image.format, image.mode) == ("JPEG", "RGB")
            assert image.size in {(500, 375), (375, 500), (500, 333), (500, 500)}
            assert np.asarray(image.convert("L")).max() > 20, f"{path} is blank"


def test_photographs_stand_in_the_wheels_themselves() -> None:
    shipped = {
        str(file)
        for project in ("scikit-image", "scikit-learn")
        for file in importlib.metadata.distribution(project).files or ()
    }
    assert set(PHOTOS.values()) <= shipped


def test_an_interrupted_call_goes_on(tmp_path: Path) -> None:
    class Interrupt(Exception):
        pass

    def stop(completed: int) -> None:
        if completed == 5:
            raise Interrupt

    with pytest.raises(Interrupt):
        make_samples(tmp_path / "photos", COUNT, progress=stop)
    there = len(tree(tmp_path / "photos"))
    samples = make_samples(tmp_path / "photos", COUNT)
    assert there >= 5
    assert samples.made == COUNT - there
    assert not list(tmp_path.rglob("*.partial"))


def test_a_second_call_makes_nothing_and_says_so(made: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in made.rglob("*")}
    seen: list[int] = []
    samples = make_samples(made, COUNT, progress=lambda completed: seen.append(completed))
    assert seen == [i + 1 for i in range(COUNT)]
    assert {path: path.stat().st_mtime_ns for path in made.rglob("*")} == before
    assert (samples.made, samples.total_bytes) == (0, sum(map(len, tree(made).values())))
    assert re.fullmatch(rf"{made}: 20 images, 15 classes, \d\.\d MB \(0 new\)", str(samples))


def test_refuses_a_directory_that_holds_something_else(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(ConfigError) as caught:
        make_samples(tmp_path, 2)
    assert str(caught.value) == (
        f"{tmp_path} must be absent, empty or filled by the same command before, but holds 'thesis.txt'; "
        "name another directory or remove this one"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_refuses_samples_of_other_parameters(made: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        make_samples(made, COUNT + 1, seed=2)
    assert str(caught.value) == (
        f"{made} must be absent, empty or filled by the same command before, but holds samples made with "
        "count=20 (not 21), seed=0 (not 2); name another directory or remove this one"
    )


def test_refuses_samples_of_another_kind(made: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        make_detection_samples(made, 2)
    assert "samples made with kind=None (not 'detection'), count=20 (not 2), photos=None (not " in str(caught.value)
