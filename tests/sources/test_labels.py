"""Labels from texts, and the names that an error suggests."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpuflow.sources.hints import missing_path
from gpuflow.sources.labels import resolve_labels
from gpuflow.sources.tar import expand_braces


def test_classes_have_the_order_of_their_names() -> None:
    names = [f"class {number * 7 % 50:02}" for number in range(50)]
    classes, labels = resolve_labels(names, None, str, "list.csv")
    assert list(classes) == sorted(names)
    assert [classes[label] for label in labels] == names


def test_a_missing_path_is_compared_with_its_own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data" / "photos").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert missing_path("data/photoz/a") == "; did you mean 'data/photos/a'?"
    assert missing_path("dta/photos") == "; did you mean 'data/photos'?"
    assert missing_path("data/other") == f"; relative paths start from {tmp_path}"
    assert missing_path(f"{tmp_path}/data/other") == "; check the path"


def test_numbers_in_braces_are_as_wide_as_the_widest_end() -> None:
    assert expand_braces("{008..9}") == ["008", "009"]
    assert expand_braces("{0..10}") == [f"{number:02}" for number in range(11)]
