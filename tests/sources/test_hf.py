"""The source `hf`, in short: tests/integrations has what needs `datasets`."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from gpuflow.errors import MissingExtra, SourceError
from gpuflow.sources import SourceSpec, open_source
from tests.datasets import jpeg
from tests.sources.conftest import ReadAll


@pytest.mark.skipif(importlib.util.find_spec("pyarrow") is not None, reason="pyarrow is installed")
def test_without_pyarrow_the_extra_is_named(tmp_path: Path) -> None:
    with pytest.raises(MissingExtra, match=r"source\.hf needs pyarrow.*pip install 'gpuflow\[hf\]'"):
        open_source(SourceSpec(hf=str(tmp_path)))


def test_a_parquet_file(tmp_path: Path, read_all: ReadAll) -> None:
    pa = pytest.importorskip("pyarrow", reason="the package pyarrow is not installed")
    import pyarrow.parquet as pq

    data = [jpeg(0, i) for i in range(9)]
    pq.write_table(pa.table({"image": [*data[:8], None], "label": ["b", "a", "b"] * 3}), tmp_path / "x.parquet")
    source = open_source(SourceSpec(hf=str(tmp_path / "x.parquet")))
    assert (source.classes, source.labels.tolist()) == (("a", "b"), [1, 0, 1] * 3)
    assert read_all(source, [7, 8, 0]) == [data[7], "has no image: its cell is null", data[0]]
    (tmp_path / "x.parquet").write_bytes((tmp_path / "x.parquet").read_bytes()[:-9])
    with pytest.raises(
        SourceError, match=r"x\.parquet: must be a whole Parquet file, got an error: .*; copy or write it"
    ):
        open_source(SourceSpec(hf=str(tmp_path / "x.parquet")))
