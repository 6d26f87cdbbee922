"""The table of paths, as it is built."""

from __future__ import annotations

import pytest

from gpuflow.sources.paths import PathTableBuilder


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
