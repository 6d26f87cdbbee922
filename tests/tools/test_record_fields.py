"""Commands on a pipeline whose stages take numbers from records: they work, or say why not."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console
from torch import nn

from gpuflow.config import read_config
from gpuflow.errors import ConfigError
from gpuflow.parity import study
from gpuflow.serve import export
from gpuflow.stages import STAGES
from gpuflow.tools import bench
from gpuflow.tools.explain import explain
from gpuflow.tools.show import samples_of
from tests.commands import command_here
from tests.datasets import deadline
from tests.faces import COUNT, by_opencv, face_config, image_of, make_faces, matrix_of

ALIGN = {"matrix": {"field": "align"}}


@pytest.fixture(autouse=True)
def _in_time() -> Iterator[None]:
    with deadline(60):
        yield


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("faces")
    return face_config(root / "x.yaml", make_faces(root / "data"), ALIGN)


def test_show_draws_warped_images(path: Path) -> None:
    for shown in samples_of(read_config(path, STAGES), "val", COUNT):
        expected = by_opencv(image_of(shown.index), matrix_of(shown.index))
        assert np.abs(shown.images[""].astype(int) - expected).max() <= 1
        assert any(note.startswith("align: [[") for note in shown.notes)


def test_explain_names_the_field(path: Path) -> None:
    console = Console(file=io.StringIO(), width=200)
    console.print(explain(read_config(path, STAGES)))
    assert isinstance(console.file, io.StringIO)
    assert "warp_affine(matrix={field: align}" in console.file.getvalue()


def test_bench_loads_it(path: Path) -> None:
    job = bench.Job(arm="gpuflow", path=str(path), overrides=(), pipeline="train", workers=1, seconds=0.1)
    assert list(islice(bench.ARMS["gpuflow"](job), 2)) == [4, 4]


def test_scan_names_maps_that_cannot_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    listing = make_faces(tmp_path / "data", {3: {"align": [[1, 1, 0], [1, 1, 0]]}})
    config = face_config(tmp_path / "x.yaml", listing, ALIGN)
    done = command_here(monkeypatch, capsys, "scan")(config)
    (found,) = map(json.loads, done.out.splitlines())
    assert done.code == 1
    assert (found["index"], found["kind"]) == (3, "record")
    assert found["reason"] == "align must be invertible, got [[1, 1, 0], [1, 1, 0]]"


def test_parity_and_export_have_images_alone(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = read_config(path, STAGES)
    at = f"{path}: pipelines.val.stages[1].warp_affine.matrix takes numbers from each sample's record, and"
    with pytest.raises(ConfigError) as caught:
        study(config, "val")
    assert str(caught.value) == f"{at} parity has images alone; give numbers in place of the field"
    info = SimpleNamespace(preprocessing=config.programs["val"].pipeline.fingerprint)
    monkeypatch.setattr(export, "load_checkpoint", lambda path: (nn.Identity(), info))
    (tmp_path / "last.pt").touch()
    with pytest.raises(ConfigError) as caught:
        export.export_model(config, tmp_path / "m.pt2", checkpoint=tmp_path / "last.pt")
    assert str(caught.value) == f"{at} a served model gets images alone; name stages under serve that take no field"
