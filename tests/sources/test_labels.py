"""Labels from texts, and the names that an error suggests."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from gpuflow.errors import SourceError, near_word
from gpuflow.sources import open_source, source_spec
from gpuflow.sources.base import spread
from gpuflow.sources.folder import images_below
from gpuflow.sources.labels import resolve_labels
from gpuflow.sources.storage.local import missing_path
from gpuflow.sources.tar import expand_braces
from tests.texts import outline


def test_classes_have_the_order_of_their_names() -> None:
    names = [f"class {number * 7 % 50:02}" for number in range(50)]
    classes, labels = resolve_labels(names, None, str, "list.csv")
    assert list(classes) == sorted(names)
    assert [classes[label] for label in labels] == names


def test_labels_are_names_where_names_are_integers() -> None:
    """Otherwise a first label that is misspelt would make numbers of all of them, of which most would be valid."""
    classes = ("0", "1", "10", "2")
    assert resolve_labels(["2", "10"], classes, str, "list.csv")[1].tolist() == [3, 2]
    with pytest.raises(SourceError) as caught:
        resolve_labels(["3", "2"], classes, str, "list.csv")
    assert outline(caught.value) == "0, got '3'"
    assert resolve_labels(["3", "2"], ("a", "b", "c", "d"), str, "list.csv")[1].tolist() == [3, 2]


@pytest.mark.parametrize(
    ("text", "separator", "others"),
    [
        ("cat|dog", "|", ["cat", "dog"]),
        ("dog; cat", ";", ["dog", "cat"]),
        ("cat,dog", ",", ["cat", "dog"]),
        ("1|3", "|", ["x"]),
    ],
)
def test_several_labels_in_one_are_no_class(text: str, separator: str, others: list[str]) -> None:
    with pytest.raises(SourceError) as found:
        resolve_labels([*others, text], None, str, "list.csv")
    hint = f'{{kind: classes, separator: "{separator}"}}'
    assert hint in str(found.value)
    assert outline(found.value).startswith(f"{len(others)}, got several in one, ")
    names = (*others, text)
    assert resolve_labels([*others, text], names, str, "list.csv")[0] == names
    with pytest.raises(SourceError) as found:
        resolve_labels([text], ("cat", "dog"), str, "list.csv")
    assert hint in str(found.value)
    assert outline(found.value).startswith("0, got ")


def test_a_name_with_a_comma_is_a_class() -> None:
    names = ["tench, Tinca tinca", "tench", "cat|", "|", "3, three"]
    assert sorted(resolve_labels(names, None, str, "list.csv")[0]) == sorted(names)


@pytest.mark.parametrize("fields", [{}, {"label": {}}])
def test_outer_spaces_count_where_they_are_part_of_a_given_name(
    fields: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "list.jsonl").write_text(
        "".join(json.dumps({"path": "a.jpg", "label": label}) + "\n" for label in ("a", "a ", " a", " b "))
    )
    spec = source_spec(listing="list.jsonl", classes=("b", "a ", "a"), fields=fields)
    assert open_source(spec).labels.tolist() == [2, 1, 2, 0]
    without_names = open_source(source_spec(listing="list.jsonl", fields=fields))
    assert without_names.classes == ("a", "b") and without_names.labels.tolist() == [0, 0, 0, 1]


def test_a_missing_path_is_compared_with_its_own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data" / "photos").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert missing_path("data/photoz/a") == "; did you mean 'data/photos/a'?"
    assert missing_path("dta/photos") == "; did you mean 'data/photos'?"
    assert missing_path("data/other") == f"; relative paths start from {tmp_path}"
    assert missing_path(f"{tmp_path}/data/other") == "; check the path"


def test_numbers_in_braces_are_as_wide_as_the_widest_end() -> None:
    assert expand_braces("{008..9}") == ["008", "009"]
    assert expand_braces("{00..10}") == [f"{number:02}" for number in range(11)]
    assert expand_braces("{0..10}") == [f"{number}" for number in range(11)]


def test_up_to_twenty_words_are_listed() -> None:
    words = [f"word{number:02}" for number in range(21)]
    assert all(word in near_word("zzz", words[:20]) for word in words[:20])
    assert near_word("zzz", words) == ""
    assert near_word("zzz", []) == ""


def test_a_directory_that_cannot_be_listed_gives_no_hint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data" / "photos").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "access", lambda path, mode: str(path) != "data")
    assert missing_path("data/photoz") == f"; relative paths start from {tmp_path}"


def test_how_many_shards_are_missing(tmp_path: Path) -> None:
    (tmp_path / "0.tar").write_bytes(b"")
    with pytest.raises(SourceError) as caught:
        open_source(source_spec(tar=f"{tmp_path}/{{0..1}}.tar"))
    assert outline(caught.value) == f"{tmp_path}/1.tar"
    with pytest.raises(SourceError) as caught:
        open_source(source_spec(tar=f"{tmp_path}/1.tar"))
    assert outline(caught.value) == f"{tmp_path}/1.tar"


@pytest.mark.parametrize(
    ("total", "count", "expected"),
    [(10, 4, [0, 3, 6, 9]), (3, 10, [0, 1, 2]), (1, 1, [0]), (0, 5, []), (100, 2, [0, 99])],
)
def test_numbers_spread_evenly(total: int, count: int, expected: list[int]) -> None:
    assert spread(total, count) == expected


def test_images_are_found_by_suffix_at_any_depth(tmp_path: Path) -> None:
    for name in ("b/c/2.JPG", "a/1.png", "a/note.txt", "3.jpeg"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    (tmp_path / "4.jpg").mkdir()
    assert images_below(tmp_path) == [tmp_path / name for name in ("3.jpeg", "a/1.png", "b/c/2.JPG")]
    assert images_below(tmp_path / "absent") == []
