"""The table of paths, as it is built."""

from __future__ import annotations

import os
import pickle

import pytest

from gpuflow.sources.storage import Paths, PathTableBuilder


@pytest.mark.parametrize(
    ("paths", "absolute"),
    [
        (["/a.jpg"], True),
        (["a.jpg", "/b.jpg"], True),
        (["a.jpg", "http://server/b.jpg"], True),
        (["a.jpg", "b/c.jpg"], False),
        (["a/"], False),
    ],
    ids=str,
)
def test_knows_whether_a_path_is_absolute(paths: list[str], absolute: bool) -> None:
    builder = PathTableBuilder()
    builder.add(paths)
    assert builder.has_absolute == absolute
    builder.add(["relative.jpg"])
    assert builder.has_absolute == absolute


@pytest.mark.parametrize("path", ["", "a\0b"])
def test_refuses_a_path_that_no_file_can_have(path: str) -> None:
    with pytest.raises(ValueError, match="a path is empty or holds a NUL"):
        PathTableBuilder().add(["a.jpg", path])


@pytest.mark.parametrize("prefix", ["", "/photos/"])
def test_takes_paths_that_another_process_gets_too(prefix: str) -> None:
    builder, names = PathTableBuilder(), ["a.jpg", "b/c.jpg", "\u00e9 \udcff.jpg"]
    builder.add(names)
    table = builder.build(prefix)
    for indices in ([2, 0, 0, 1], [1], []):
        right = [os.fsencode(prefix + names[i]) for i in indices]
        taken: Paths = pickle.loads(pickle.dumps(table.take(indices)))
        assert list(taken) == right and len(taken) == len(right)
        assert [taken[i] for i in range(len(right))] == right and taken[-2:] == right[-2:]
    assert [table[i] for i in range(3)] == [prefix + name for name in names]
