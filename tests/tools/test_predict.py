"""Predictions of whole sources: rows, files that go on after a kill, other folders, and every kind of input."""

from __future__ import annotations

import csv
import importlib.util
import itertools
import json
import math
import os
import signal
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gpuflow
from gpuflow.config import ModelSpec, read_config
from gpuflow.engines import ModelInfo, open_engine
from gpuflow.engines.model_library import build_model
from gpuflow.errors import ConfigError, MissingExtra, SourceError, StateError
from gpuflow.stages import STAGES
from gpuflow.tools.predict import Row, RowPredictor, write_predictions
from tests.commands import Run, command_here
from tests.datasets import VAL, deadline, make_photos, truncate, write_config
from tests.serve.models import save_program

CLASSES = ("class_0", "class_1", "class_2", "class_3")
BATCH = 4
with_pyarrow = pytest.mark.skipif(
    importlib.util.find_spec("pyarrow") is None, reason="the package pyarrow is not installed"
)

known_bad = pytest.mark.filterwarnings("ignore:.* samples are bad so far")


@pytest.fixture(autouse=True)
def _limited() -> Iterator[None]:
    with deadline(300):
        yield


@pytest.fixture
def gpuflow_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    return command_here(monkeypatch, capsys)


class Colours(nn.Module):
    """Logits from the mean colour of an image."""

    def __init__(self, *, outputs: int = 4) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.linear = nn.Linear(3, outputs)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.linear(images.mean((2, 3)))
        return logits


def make_setup(root: Path) -> Path:
    """19 photographs in four classes, of which three are bad, and a file that serves a model of their colours."""
    files = make_photos(root / "photos", classes=4, each=5)
    files[19].unlink()
    truncate(files[4])
    files[12].write_bytes(b"no image")
    config = root / "x.yaml"
    model = {"file": str(root / "a.pt2"), "batch": BATCH}
    write_config(config, root / "photos", serve={"stages": list(VAL), "model": model})
    pipeline = read_config(config, STAGES).programs["serve"].pipeline
    info = ModelInfo(classes=CLASSES, preprocessing=pipeline.fingerprint, stages=pipeline.lines)
    save_program(root / "a.pt2", Colours(), torch.zeros(2, 3, 24, 24), info=info)
    return config


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_setup(tmp_path_factory.mktemp("predict"))


BAD = [4, 12]


def rows_of(config: Path, *overrides: str, **given: Any) -> list[Row]:
    with closing(RowPredictor(config, overrides, device="cpu", **given)) as predictor:
        return [row for rows in predictor.predict(range(len(predictor.source))) for row in rows]


def write(config: Path, out: Path, *overrides: str, part_rows: int = BATCH, form: str = "csv", **given: Any) -> int:
    """Write the predictions; returns how many rows were new."""
    with closing(RowPredictor(config, overrides, device="cpu", **given)) as predictor:
        write_predictions(predictor, out, form=form, part_rows=part_rows)
        return predictor.done


def contents(out: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(out.iterdir()) if not file.name.startswith(".")}


def parts_of(out: Path) -> list[list[dict[str, str]]]:
    return [list(csv.DictReader(file.read_text().splitlines())) for file in sorted(out.glob("part-*.csv"))]


def read(out: Path) -> list[dict[str, str]]:
    return list(itertools.chain(*parts_of(out)))


# --- rows -------------------------------------------------------------------------------------------------------------


@known_bad
def test_rows_are_those_of_a_plain_loop_over_the_loader(config: Path) -> None:
    rows = rows_of(config)
    model = ModelSpec(file=str(config.with_name("a.pt2")), batch=BATCH)
    image = read_config(config, STAGES).programs["val"].result
    engine = open_engine(model, image=image, device=torch.device("cpu"))
    expected = {}
    with gpuflow.load(config, "val") as loader:
        for batch in loader:
            probabilities, outputs = engine.run(batch.images).softmax(1).topk(4)
            for i, index in enumerate(batch.indices.tolist()):
                top = tuple(zip(outputs[i].tolist(), probabilities[i].tolist(), strict=True))
                expected[index] = (int(batch.labels[i]), top)
        paths = [loader.dataset.path(index) for index in range(len(loader.dataset))]
    assert [row.index for row in rows] == list(range(19))
    assert [row.path for row in rows] == paths
    assert {row.index: (row.label, row.top) for row in rows if row.top} == expected
    assert len(expected) == 17 and len({top[0][0] for _, top in expected.values()}) > 1


def test_bad_samples_are_rows_with_a_reason(config: Path) -> None:
    rows = {row.index: row for row in rows_of(config) if not row.top}
    assert sorted(rows) == BAD
    assert {row.stage for row in rows.values()} == {"decode"}
    assert all(row.reason and row.path.endswith(".jpg") and row.logits == () for row in rows.values())


def test_a_batch_of_bad_samples_alone_and_the_order_of_indices(config: Path, tmp_path: Path) -> None:
    with closing(RowPredictor(config, device="cpu")) as predictor:
        found = [[row.index for row in rows] for rows in predictor.predict([12, 4])]
        assert found == [[12, 4]]
        again = [row for rows in predictor.predict([18, 12, 0, 7, 3]) for row in rows]
        assert [row.index for row in again] == [18, 12, 0, 7, 3]
        assert [bool(row.top) for row in again] == [True, False, True, True, True]
        assert list(predictor.predict([])) == []


def test_run_on_error_does_not_end_it(config: Path) -> None:
    assert len(rows_of(config, "run.on_error=raise")) == 19


def test_a_part_of_the_source(config: Path) -> None:
    overrides = ("source.split={train: 0.5, val: 0.5}",)
    parts = {name: [row.path for row in rows_of(config, *overrides, pipeline=name)] for name in ("train", "val")}
    assert not set(parts["train"]) & set(parts["val"])
    assert len(parts["train"]) + len(parts["val"]) == 19


def test_logits_that_are_not_finite_are_a_reason(config: Path, tmp_path: Path) -> None:
    class Broken(Colours):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            mean = images.mean((2, 3))
            logits: torch.Tensor = self.linear(mean)
            return logits / torch.where(mean[:, 2:] > mean[:, :1] + 0.5, 0.0, 1.0) * 0.5

    file = save_program(tmp_path / "b.pt2", Broken(), torch.zeros(2, 3, 24, 24))
    overrides = (f"serve.model.file={file}", "serve.model.preprocessing=trust")
    rows = rows_of(config, *overrides)
    assert {row.stage for row in rows if 10 <= row.index < 15 and row.index != 12} == {"model"}
    assert all(row.top for row in rows if row.index not in BAD and not 10 <= row.index < 15)


def test_no_names_and_more_classes_than_the_model_has(config: Path, tmp_path: Path) -> None:
    file = save_program(tmp_path / "b.pt2", Colours(outputs=7), torch.zeros(2, 3, 24, 24))
    overrides = (f"serve.model.file={file}", "serve.model.preprocessing=trust")
    write(config, tmp_path / "out", *overrides, top_k=50)
    rows = read(tmp_path / "out")
    assert "class_7" in rows[0] and "class_8" not in rows[0]
    assert {rows[0][name] for name in rows[0] if name.startswith("class")} == set("0123456")
    assert math.isclose(sum(float(rows[0][name]) for name in rows[0] if name.startswith("prob")), 1, abs_tol=1e-5)


def test_several_classes_have_a_probability_each(config: Path) -> None:
    for row in rows_of(config, "serve.model.activation=sigmoid", logits=True):
        if row.logits:
            expected = torch.tensor(row.logits).sigmoid()
            assert [output for output, _ in row.top] == expected.argsort(descending=True)[: len(row.top)].tolist()
            assert [value for _, value in row.top] == [float(expected[output]) for output, _ in row.top]


@pytest.mark.parametrize("form", ["csv", pytest.param("parquet", marks=with_pyarrow)])
def test_numbers_have_a_column_each(form: str, config: Path, tmp_path: Path) -> None:
    write(config, tmp_path, "serve.model.activation=none", form=form, top_k=2, part_rows=20)
    (file,) = tmp_path.glob("part-*")
    if form == "csv":
        rows = csv.DictReader(file.read_text().splitlines())
        found: list[dict[str, Any]] = [{name: cell or None for name, cell in row.items()} for row in rows]
    else:
        from pyarrow import parquet

        found = parquet.read_table(file).to_pylist()
    assert list(found[0]) == ["index", "path", *CLASSES, "stage", "reason"]
    for row, cells in zip(rows_of(config, logits=True), found, strict=True):
        numbers = [float(cells[name]) for name in CLASSES if cells[name] is not None]
        assert numbers == list(row.logits)


# --- files ------------------------------------------------------------------------------------------------------------


def test_csv_files_have_all_rows(config: Path, tmp_path: Path) -> None:
    assert write(config, tmp_path / "out", top_k=2, logits=True, part_rows=7) == 19
    assert [*contents(tmp_path / "out")] == ["part-00000.csv", "part-00001.csv", "part-00002.csv", "run.txt"]
    found = read(tmp_path / "out")
    for row, cells in zip(rows_of(config, top_k=2, logits=True), found, strict=True):
        assert (cells["index"], cells["path"]) == (str(row.index), row.path)
        if row.top:
            assert json.loads(cells["logits"]) == list(row.logits)
            assert [cells["class"], cells["class_2"]] == [CLASSES[output] for output, _ in row.top]
            assert [float(cells[name]) for name in ("probability", "probability_2")] == [p for _, p in row.top]
            assert cells["stage"] == cells["reason"] == ""
        else:
            assert (cells["stage"], cells["reason"]) == (row.stage, row.reason)
            assert cells["class"] == cells["probability"] == cells["logits"] == ""


@with_pyarrow
def test_parquet_files_have_the_same_rows(config: Path, tmp_path: Path) -> None:
    from pyarrow import parquet

    write(config, tmp_path / "a", form="csv", top_k=2, logits=True)
    write(config, tmp_path / "b", form="parquet", top_k=2, logits=True)
    tables = [parquet.read_table(file) for file in sorted((tmp_path / "b").glob("*.parquet"))]
    assert len({str(table.schema) for table in tables}) == 1
    found = [row for table in tables for row in table.to_pylist()]
    for cells, text in zip(found, read(tmp_path / "a"), strict=True):
        assert {name: "" if value is None else str(value) for name, value in cells.items()} == text


@pytest.mark.skipif(importlib.util.find_spec("pyarrow") is not None, reason="pyarrow is installed")
def test_without_pyarrow_the_extra_is_named(config: Path, tmp_path: Path) -> None:
    with pytest.raises(MissingExtra, match="pyarrow"):
        write(config, tmp_path / "out", form="parquet")
    assert not (tmp_path / "out").exists()


KILLED = """
import os, signal, sys
from pathlib import Path
from gpuflow.tools.predict import RowPredictor, write_predictions
config, out = sys.argv[1:]
kill = lambda completed, **rest: completed > 9 and os.kill(os.getpid(), signal.SIGKILL)
write_predictions(RowPredictor(config, device="cpu", progress=kill), Path(out), form="csv", part_rows=4)
"""


@pytest.mark.slow
def test_a_killed_run_goes_on_and_a_finished_one_changes_nothing(config: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = subprocess.run([sys.executable, "-c", KILLED, config, out], timeout=200, check=False, capture_output=True)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    assert [*contents(out)] == ["part-00000.csv", "part-00001.csv", "run.txt"]
    (out / ".part-00002.csv.0123abcd.partial").write_text("half")
    before = {file: file.stat().st_mtime_ns for file in out.glob("part-*")}
    assert write(config, out) == 11
    assert {file: file.stat().st_mtime_ns for file in before} == before
    assert not [*out.glob(".part*")]
    write(config, tmp_path / "whole")
    assert contents(out) == contents(tmp_path / "whole")
    before = {file: file.stat().st_mtime_ns for file in out.iterdir() if file.name != ".lock"}
    assert write(config, out) == 0
    assert {file: file.stat().st_mtime_ns for file in out.iterdir() if file.name != ".lock"} == before


def test_a_folder_of_another_run_is_refused(config: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    write(config, out)
    before = contents(out)
    other = save_program(tmp_path / "b.pt2", Colours(outputs=4), torch.zeros(2, 3, 24, 24))
    changes: list[tuple[str, ...]] = [
        (f"serve.model.file={other}", "serve.model.preprocessing=trust"),
        ("serve.stages.resize.shorter=30", "serve.model.force=true"),
        ("serve.model.batch=2",),
    ]
    for overrides in changes:
        with pytest.raises(StateError, match="name another folder"):
            write(config, out, *overrides)
    with pytest.raises(StateError, match=r"out: holds other files .* columns for top 4.* in place of .* top 2"):
        write(config, out, top_k=2)
    with pytest.raises(StateError, match="source"):
        write(config, out, data=str(config.parent / "photos" / "class_0"))
    assert contents(out) == before


def test_a_folder_of_other_files_is_refused(config: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.md").write_text("mine")
    with pytest.raises(StateError, match=r"notes\.md"):
        write(config, tmp_path)
    assert [*contents(tmp_path)] == ["notes.md"]


def test_two_runs_at_once_are_refused(config: Path, tmp_path: Path) -> None:
    from gpuflow.runtime.files import locked_folder

    with locked_folder(tmp_path / "out"), pytest.raises(ConfigError, match="in use by another run"):
        write(config, tmp_path / "out")


# --- inputs -----------------------------------------------------------------------------------------------------------


def test_images_without_labels(config: Path, tmp_path: Path) -> None:
    photos = sorted((config.parent / "photos" / "class_0").iterdir())[:4]
    folder = tmp_path / "new"
    places = [folder / "b.jpg", folder / "a" / "deep" / "c.jpg", folder / "a" / "d.jpg", folder / "z" / "e.jpg"]
    for photo, place in zip(photos, places, strict=True):
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(photo.read_bytes())
    (folder / "notes.txt").write_text("no image")
    (tmp_path / "list.csv").write_text("path\nnew/b.jpg\nnew/a/deep/c.jpg\nnew/a/d.jpg\nnew/z/e.jpg\nnew/missing.jpg\n")
    (tmp_path / "paths.csv").write_text("".join(f"{place}\n" for place in places))
    (tmp_path / "list.jsonl").write_text('{"path": "new/b.jpg"}\n{"path": "new/z/e.jpg"}\n')
    with tarfile.open(tmp_path / "shard.tar", "w") as tar:
        for place in places:
            tar.add(place, place.relative_to(folder))

    expected = {row.path.rpartition("/")[2]: row.top for row in rows_of(config) if row.index < 4}
    top = {place.name: expected[photo.name] for photo, place in zip(photos, places, strict=True)}

    def found(data: str) -> dict[str, Any]:
        return {row.path.rpartition("/")[2]: row.top for row in rows_of(config, data=str(tmp_path / data))}

    # other batches: the last digits may differ
    approx = {name: [(o, pytest.approx(p, rel=1e-5)) for o, p in pairs] for name, pairs in top.items()}

    def same(rows: dict[str, Any], names: list[str]) -> None:
        assert {name: list(pairs) for name, pairs in rows.items()} == {name: approx[name] for name in names}

    same(found("new"), ["b.jpg", "d.jpg", "c.jpg", "e.jpg"])
    listed = found("list.csv")
    assert listed.pop("missing.jpg") == ()
    same(listed, [*approx])
    same(found("paths.csv"), [*approx])
    same(found("list.jsonl"), ["b.jpg", "e.jpg"])
    same(found("shard.tar"), [*approx])
    assert all(row.label is None for row in rows_of(config, data=str(folder)))


def test_a_folder_without_images_is_refused(config: Path, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="must hold an image"):
        rows_of(config, data=str(tmp_path))


@pytest.mark.parametrize("form", ["csv", pytest.param("parquet", marks=with_pyarrow)])
def test_a_name_that_is_no_text(config: Path, tmp_path: Path, form: str) -> None:
    photo = config.parent / "photos" / "class_0" / "000.jpg"
    (tmp_path / "new").mkdir()
    Path(os.fsdecode(os.fsencode(tmp_path / "new") + b"/\xff.jpg")).write_bytes(photo.read_bytes())
    write(config, tmp_path / "out", data=str(tmp_path / "new"), form=form)
    if form == "parquet":
        from pyarrow import parquet

        [row] = parquet.read_table(tmp_path / "out" / "part-00000.parquet").to_pylist()
    else:
        [row] = read(tmp_path / "out")
    assert row["path"].endswith(r"\udcff.jpg") and row["class"]


# --- embeddings -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoint(config: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("checkpoint") / "last.pt"
    fingerprint = read_config(config, STAGES).programs["serve"].pipeline.fingerprint
    weights = build_model("resnet18", 4).state_dict()
    torch.save({"arch": "resnet18", "classes": list(CLASSES), "model": weights, "preprocessing": fingerprint}, path)
    return path


@known_bad
def test_embeddings_are_the_output_of_a_layer(config: Path, checkpoint: Path, tmp_path: Path) -> None:
    override = f"serve.model.file={checkpoint}"
    write(config, tmp_path / "out", override, embeddings="avgpool", logits=True, part_rows=100)
    found = {int(row["index"]): row for row in read(tmp_path / "out")}
    model = build_model("resnet18", 4).eval()
    model.load_state_dict(torch.load(checkpoint)["model"])
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    layers: list[torch.Tensor] = []
    model.get_submodule("avgpool").register_forward_hook(lambda module, inputs, output: layers.append(output))
    with gpuflow.load(config, "val") as loader:
        for batch in loader:
            with torch.inference_mode():
                logits = model(batch.images)
            for i, index in enumerate(batch.indices.tolist()):
                row = found[index]
                assert torch.allclose(torch.tensor(json.loads(row["embedding"])), layers[-1][i].flatten(), atol=1e-5)
                assert torch.allclose(torch.tensor(json.loads(row["logits"])), logits[i], atol=1e-5)
    assert found[4]["embedding"] == found[4]["logits"] == "" and found[4]["reason"]


def test_a_layer_that_is_not_there(config: Path, checkpoint: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"--embeddings: must be a layer of the model, got 'avgpol'; did you mean 'avgpool'\?"
    ):
        rows_of(config, f"serve.model.file={checkpoint}", embeddings="avgpol")
    with pytest.raises(ConfigError, match=r"--embeddings: needs a checkpoint"):
        rows_of(config, embeddings="linear")


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_command(config: Path, tmp_path: Path, gpuflow_command: Run) -> None:
    arguments = ("predict", config, "--out", tmp_path / "out", "--format", "csv", "--device", "cpu", "--part-rows", "7")
    done = gpuflow_command(*arguments)
    assert (done.code, done.out) == (0, f"wrote 19 rows to {tmp_path}/out, 2 of bad samples\n"), done.err
    assert list(map(len, parts_of(tmp_path / "out"))) == [8, 8, 3]
    done = gpuflow_command(*arguments)
    assert (done.code, done.out) == (0, f"nothing left to predict: {tmp_path}/out has all rows\n"), done.err
    done = gpuflow_command(*arguments, "--top-k", "1")
    assert done.code == 1 and "name another folder" in done.err


def test_a_file_without_serve_or_source(config: Path, tmp_path: Path, gpuflow_command: Run) -> None:
    bare = write_config(tmp_path / "y.yaml", config.parent / "photos")
    done = gpuflow_command("predict", bare, "--out", tmp_path / "out")
    assert done.code == 1 and "has no block serve" in done.err
    done = gpuflow_command("predict", config, "--out", tmp_path / "out", "--pipeline", "vla")
    assert done.code == 1 and "did you mean 'val'?" in done.err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("address", [(), ("10.0.0.1:6379",)])
@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="ray is installed")
def test_without_ray_the_extra_is_named(
    address: tuple[str, ...], config: Path, tmp_path: Path, gpuflow_command: Run
) -> None:
    done = gpuflow_command("predict", "--on", "ray", *address, config, "--out", tmp_path / "out", "--format", "csv")
    assert done.code == 1 and done.err.endswith("which is not installed; pip install 'gpuflow[ray]'\n")
    done = gpuflow_command("predict", config, "--out", tmp_path / "out", "--on", "spark")
    assert done.code == 1 and "error: --on: must be ray, got 'spark'" in done.err
    assert not (tmp_path / "out").exists()
