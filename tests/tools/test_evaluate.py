"""Evaluations: the numbers are scikit-learn's, and the same on any number of ranks."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import (
    average_precision_score,
    confusion_matrix,
    precision_recall_fscore_support,
    top_k_accuracy_score,
)

from gpuflow.errors import ConfigError
from gpuflow.runtime.ranks import Group, Ranks
from gpuflow.tools.predict import Evaluation, Row, RowPredictor, evaluate
from tests.commands import Run, command_here, document_of
from tests.datasets import VAL, deadline, write_config
from tests.ranks import ROOT, torchrun
from tests.serve.models import save_program
from tests.tools.test_predict import BAD, CLASSES, Colours, make_setup


@pytest.fixture(autouse=True)
def _limited() -> Iterator[None]:
    with deadline(300):
        yield


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_setup(tmp_path_factory.mktemp("evaluate"))


@pytest.fixture
def gpuflow_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    return command_here(monkeypatch, capsys)


def evaluated(config: Path, *overrides: str, **given: Any) -> tuple[Evaluation, list[tuple[int, dict[int, float]]]]:
    """The evaluation, and for each good sample its label and the probabilities of the outputs."""
    with closing(RowPredictor(config, overrides, device="cpu", **given)) as predictor:
        found = evaluate(predictor, Group(Ranks(), predictor.device))
        rows = [row for rows in predictor.predict(range(len(predictor.source))) for row in rows]
    return found, [(row.label, dict(row.top)) for row in rows if row.top and row.label is not None]


def test_the_numbers_are_those_of_scikit_learn(config: Path) -> None:
    found, samples = evaluated(config)
    labels = [label for label, _ in samples]
    predicted = [max(top, key=top.__getitem__) for _, top in samples]
    assert 0 < int(found.confusion.trace()) < len(samples) == 17
    assert np.array_equal(found.confusion, confusion_matrix(labels, predicted, labels=range(4)))
    precision, recall, *_ = precision_recall_fscore_support(labels, predicted, labels=range(4), zero_division=np.nan)
    np.testing.assert_allclose(found.shares, (recall, precision))
    assert [row.index for row in found.bad] == BAD
    found, _ = evaluated(config, top_k=2)
    scores = [[top[output] for output in range(4)] for _, top in samples]
    assert found.top == round(top_k_accuracy_score(labels, scores, k=2, labels=range(4), normalize=False))
    assert found.top > int(found.confusion.trace())


def test_the_command_writes_tables_and_a_picture(config: Path, tmp_path: Path, gpuflow_command: Run) -> None:
    pytest.importorskip("matplotlib")
    done = gpuflow_command("evaluate", config, "--device", "cpu", "--out", tmp_path / "out")
    assert done.code == 0, done.err
    assert done.out.startswith("17 samples of 4 classes, without 2 bad ones\ntop-1  ")
    found, _ = evaluated(config)
    with (tmp_path / "out" / "confusion.csv").open() as file:
        header, *rows = csv.reader(file)
    assert header == ["label", *(f"{number} {name}" for number, name in enumerate(CLASSES))]
    assert [[int(cell) for cell in row[1:]] for row in rows] == found.confusion.tolist()
    with (tmp_path / "out" / "classes.csv").open() as file:
        shares = [(float(row["recall"]), float(row["precision"])) for row in csv.DictReader(file)]
    np.testing.assert_array_equal(np.transpose(shares), found.shares)
    with (tmp_path / "out" / "bad.csv").open() as file:
        assert [int(row["index"]) for row in csv.DictReader(file)] == BAD
    assert (tmp_path / "out" / "confusion.png").read_bytes().startswith(b"\x89PNG")
    done = gpuflow_command("evaluate", config, "--device", "cpu", "--out", tmp_path / "out", "--json")
    document = document_of("evaluate", done)
    assert (document["samples"], document["bad"], document["k"]) == (17, 2, 4)
    assert document["top_1"] == found.confusion.trace() / 17
    assert [row["class"] for row in document["classes"]] == list(CLASSES)
    assert [row["recall"] for row in document["classes"]] == found.shares[0].tolist()
    assert sorted(Path(file).name for file in document["files"])[:2] == ["bad.csv", "classes.csv"]


@pytest.mark.slow
def test_two_ranks_give_the_same_numbers_and_rows(config: Path, tmp_path: Path, gpuflow_command: Run) -> None:
    def files(out: Path) -> dict[str, bytes]:
        return {file.name: file.read_bytes() for file in out.iterdir() if not file.name.startswith(".")}

    commands: dict[str, tuple[str, ...]] = {"evaluate": (), "predict": ("--format", "csv", "--part-rows", "8")}
    for command, options in commands.items():
        arguments = (command, config, "--device", "cpu", *options, "--out")
        alone = gpuflow_command(*arguments, tmp_path / command / "1")
        done = torchrun("gpuflow", *arguments, tmp_path / command / "2", seconds=120)
        assert (alone.code, done.code) == (0, 0), done.err
        assert files(tmp_path / command / "1") == files(tmp_path / command / "2")
        if command == "evaluate":
            assert done.out.replace("/2/", "/1/") == alone.out


@pytest.fixture(scope="module")
def several(config: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with the same photographs and model, whose samples have several classes."""
    folder, files = tmp_path_factory.mktemp("several"), sorted(config.parent.rglob("*.jpg"))
    rows = ["|".join(name for k, name in enumerate(CLASSES) if i % (k + 2) == 0) for i in range(len(files))]
    lines = [f"{file},{row}\n" for file, row in zip(files, rows, strict=True)]
    (folder / "rows.csv").write_text("path,label\n" + "".join(lines))
    label = {"kind": "classes", "separator": "|"}
    fields = {"image": {"column": "path"}, "label": label}
    source = {"listing": str(folder / "rows.csv"), "classes": list(CLASSES), "fields": fields}
    model = {"file": str(config.with_name("a.pt2")), "batch": 4}
    return write_config(folder / "x.yaml", Path(), source=source, serve={"stages": list(VAL), "model": model})


def test_several_classes_have_the_mean_average_precision_of_scikit_learn(
    several: Path, tmp_path: Path, gpuflow_command: Run
) -> None:
    with closing(RowPredictor(several, device="cpu", logits=True)) as predictor:
        rows = [row for rows in predictor.predict(range(len(predictor.source))) for row in rows if row.top]
        labels = predictor.source.labels[[row.index for row in rows]]
    assert len(rows) == 17 and labels.shape == (17, 4) and 0 < labels.mean() < 1
    expected = average_precision_score(labels, [row.logits for row in rows], average="macro")
    done = gpuflow_command("evaluate", several, "--device", "cpu", "--out", tmp_path / "out")
    assert done.code == 0, done.err
    first, second, *_ = done.out.splitlines()
    assert (first, second) == ("17 samples of 4 classes, without 2 bad ones", f"map  {expected:.4f}")
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["bad.csv"]
    with (tmp_path / "out" / "bad.csv").open() as file:
        assert len(list(csv.DictReader(file))) == 2


@pytest.mark.slow
def test_two_ranks_give_the_same_mean_average_precision(several: Path, tmp_path: Path, gpuflow_command: Run) -> None:
    arguments = ("evaluate", several, "--device", "cpu", "--out", tmp_path)
    alone = gpuflow_command(*arguments)
    done = torchrun("gpuflow", *arguments, seconds=120)
    assert (done.code, done.out) == (0, alone.out), done.err


def test_labels_that_are_not_those_of_the_model(config: Path, tmp_path: Path) -> None:
    photos, model = config.parent / "photos", {"file": str(config.with_name("a.pt2"))}

    def refused(text: str, **source: Any) -> None:
        path = write_config(tmp_path / "x.yaml", photos, source=source, serve={"stages": list(VAL), "model": model})
        with pytest.raises(ConfigError, match=text):
            evaluated(path)

    numbers = tmp_path / "numbers.csv"
    numbers.write_text(f"path,age\n{photos}/class_0/000.jpg,3.5\n")
    text = "must have one or several classes for each sample, to compare predictions with, got "
    refused(f"{text}no labels; add classes", folder=str(photos), fields={"image": {}})
    label = {"kind": "number", "column": "age"}
    refused(f"{text}numbers; see val_mae", listing=str(numbers), fields={"image": {"column": "path"}, "label": label})
    (tmp_path / "a.csv").write_text(f"path,label\n{photos}/class_0/000.jpg,cat\n")
    refused(r"must have the model's classes, .*'cat'", listing=str(tmp_path / "a.csv"))
    (tmp_path / "a.csv").write_text(f"path,label\n{photos}/class_0/000.jpg,7\n")
    save_program(tmp_path / "b.pt2", Colours(), torch.zeros(2, 3, 24, 24))
    model |= {"file": str(tmp_path / "b.pt2"), "preprocessing": "trust"}
    refused("must have labels below 4, the number of the model's outputs, got 7", listing=str(tmp_path / "a.csv"))


def test_the_page_shows_what_is_printed(config: Path, tmp_path: Path) -> None:
    page = (ROOT / "docs" / "predict.md").read_text()
    confusion = np.array([[57, 1, 2], [4, 16, 0], [2, 0, 18]])
    found = Evaluation(
        classes=("apple", "pear", "plum"), confusion=confusion, top=100, top_k=3, bad=[Row(1, "a"), Row(2, "b")]
    )
    assert f"```text\n{found}\n```" in page
    with closing(RowPredictor(config, device="cpu", top_k=2)) as predictor:
        assert f"\n{','.join(predictor.table([]))}\n" in page
        last = predictor.identity.splitlines()[-1]
        assert f"columns for top 5 by softmax, logits: False, embeddings: None in place of {last}" in page
