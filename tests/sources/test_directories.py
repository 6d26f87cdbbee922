"""Patterns of files, through links to directories that lead back."""

from __future__ import annotations

import glob
import os
from pathlib import Path

import pytest

from gpuflow.errors import SourceError
from gpuflow.sources.storage.local import matching
from tests.datasets import deadline

FILES = ["x.p", "a/x.p", "a/b/x.p", "a/b/y.q", "a/.hidden/x.p", "a/.x.p", "[c]/x.p", "[c]/d*/x.p", "train/a/x.p"]


def made(root: Path) -> None:
    for file in FILES:
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).touch()


@pytest.mark.parametrize("start", ["", "./", "a/", "{}/", "{}/a/../"])
@pytest.mark.parametrize(
    "pattern",
    [
        *("*.p", "*/*.p", "**/*.p", "a/**/x.p", "*/**/*.p", "**/b/*", "**/*/*.p", "**/train/**/*.p", "**/**/x.p"),
        *("**/.hidden/x.p", "[[]c]/**/*.p", "**/d[*]/x.p", "a**/x.p", "none/**/x.p", "x.p/**/*.p"),
    ],
)
def test_what_a_pattern_of_glob_matches(
    start: str, pattern: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made(tmp_path)
    monkeypatch.chdir(tmp_path)
    start = start.format(tmp_path)
    assert matching(start + pattern, start) == sorted(set(glob.glob(start + pattern, recursive=True)))


@pytest.mark.parametrize("target", [".", "..", "../..", "to_another"])
def test_several_links_that_lead_back_take_no_longer(target: str, tmp_path: Path) -> None:
    """`glob` follows each of four links forty times, as often as the system allows, in each order."""
    made(tmp_path)
    for place in ("a/b", "train/a"):
        for i in range(4):
            back = {"a/b": "../../train/a", "train/a": "../../a/b"}[place] if target == "to_another" else target
            (tmp_path / place / f"link{i}").symlink_to(back)
    with deadline(5):
        found = matching(f"{tmp_path}/**/*.q", str(tmp_path))
    direct = [f"{tmp_path}/a/b/y.q"]
    assert found == direct + [f"{tmp_path}/train/a/link{i}/y.q" for i in range(4)] * (target == "to_another")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may list every directory")
def test_a_directory_that_cannot_be_listed(tmp_path: Path) -> None:
    made(tmp_path)
    (tmp_path / "a" / "b").chmod(0)
    try:
        with pytest.raises(SourceError, match="directory must be readable"):
            matching(f"{tmp_path}/**/*.p", str(tmp_path))
    finally:
        (tmp_path / "a" / "b").chmod(0o755)
