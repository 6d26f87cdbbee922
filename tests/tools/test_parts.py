"""Parts on the command line: their sizes in check, explain and split, frozen parts, and folds in a training loop."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import pytest
import torch
import yaml

import gpuflow
from gpuflow.errors import ConfigError, StateError
from tests.commands import Run, command_here
from tests.datasets import make_photos, write_config
from tests.texts import outline

STAGES = ["decode", {"resize": {"shorter": 32}}, {"center_crop": {"size": 24}}, "normalize"]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    return command_here(monkeypatch, capsys)


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    make_photos(tmp_path / "photos", classes=3, each=8)
    return write_config(Path("x.yaml"), "photos", train=STAGES, val=STAGES, split={"folds": 4, "fold": 1, "test": 0.2})


def test_commands_say_the_sizes_of_parts(run: Run, config: Path) -> None:
    sizes = "train 15, val 5, test 4"
    assert f"source.split: {sizes}; test lacks 1 of 3 classes: class_2\n" in run("check", config).out
    explained = run("explain", config).out
    assert f"15 samples, 3 classes, split train of {sizes}\n" in explained
    assert f"5 samples, 3 classes, split val of {sizes}\n" in explained
    assert run("split", config).out == f"{sizes}\n"
    stable = run("split", config, "source.split={parts: {train: 0.5, val: 0.4}}").out
    assert stable == "train 14 (+- 2.4), val 8 (+- 2.4); 2 in no part\n"


def test_check_reads_no_image_and_no_source_elsewhere(run: Run, config: Path) -> None:
    for file in Path("photos").rglob("*.jpg"):
        file.chmod(0)
    assert "source.split" not in run("check", config, "source.split.group=content").out
    assert run("check", config, "source.folder=elsewhere").code == 0
    done = run("check", config, "source.split.folds=50")
    assert done.code == 1 and done.err.startswith("error: x.yaml: source.split.folds must be at most")


def test_check_recommends_parts(run: Run, config: Path) -> None:
    done = run("check", config, "source.split={train: 0.9, val: 0.1}")
    assert "split: {parts: {train: 0.9, val: 0.1}}" in done.out and done.code == 0


def test_a_class_that_a_part_lacks_is_named(run: Run, config: Path) -> None:
    names = sorted(str(path.relative_to("photos")) for path in Path("photos").rglob("*.jpg"))
    Path("train.txt").write_text("\n".join(names[:10]))
    Path("val.txt").write_text("\n".join(names[10:12]))
    lists = "source.split={files: {train: train.txt, val: val.txt}}"
    first, _, third = sorted(path.name for path in Path("photos").iterdir())
    text = f"train lacks 1 of 3 classes: {third}, val lacks 2 of 3 classes: {first}, {third}"
    assert f"source.split: train 10, val 2; 12 in no part; {text}\n" in run("check", config, lists).out
    assert f"  parts          {text}\n" in run("explain", config, lists).out
    folds = "source.split={folds: 3, fold: 0, group: {path: '^([^/]+)/'}, stratify: label}"
    with pytest.warns(UserWarning, match="^source.split: group "):
        done = run("check", config, folds)
    assert done.code == 1 and "x.yaml: source.split.stratify must leave train each class that val has" in done.err


def test_a_frozen_split_gives_the_same_batches(run: Run, config: Path) -> None:
    assert run("split", config, "--out", "out/parts.csv").out.endswith("wrote out/parts.csv: 24 samples\n")
    rows = list(csv.DictReader(Path("out/parts.csv").read_text().splitlines()))
    assert list(rows[0]) == ["path", "label", "part", "fold"]
    assert {row["fold"] for row in rows if row["part"] == "train"} == {"0", "2", "3"}
    frozen = {"column": "part", "file": "out/parts.csv"}
    listing = {"listing": "out/parts.csv", "root": "photos", "split": {"column": "part"}}
    with gpuflow.load(config, "val") as loader:
        wanted = [batch.images for batch in loader]
    for source in ({"folder": "photos", "split": frozen}, listing):
        document = yaml.safe_load(config.read_text()) | {"source": source}
        Path("frozen.yaml").write_text(yaml.safe_dump(document))
        with gpuflow.load("frozen.yaml", "val") as loader:
            assert all(torch.equal(batch.images, images) for batch, images in zip(loader, wanted, strict=True))
    again = run("split", config, "--out", "out/parts.csv")
    assert again.code == 1 and again.err.startswith("error: --out: out/parts.csv exists and is not overwritten")


def test_bad_samples_are_not_appended_to_the_lists(run: Run, config: Path) -> None:
    run("split", config, "--out", "parts.csv")
    split = "source.split={column: part, file: parts.csv}"
    with pytest.raises(ConfigError, match=r"run\.bad_file must not be the file of source\.split, got 'parts\.csv'"):
        gpuflow.load(config, "train", overrides=[split, "run.bad_file=parts.csv"])


def test_split_needs_parts(run: Run, config: Path) -> None:
    done = run("split", config, "source.split={}", "pipelines.val.split=all")
    assert (done.code, done.err) == (1, "error: x.yaml: source must have parts; add source.split or source.splits\n")


def test_a_state_of_another_fold_is_refused(config: Path) -> None:
    with gpuflow.load(config, "train") as loader:
        next(iter(loader))
        state = loader.state_dict()
    with gpuflow.load(config, "train", overrides=["source.split.fold=2"]) as other, pytest.raises(StateError):
        other.load_state_dict(state)
    with gpuflow.load(config, "train", overrides=["source.split.fold=1"]) as same:
        same.load_state_dict(state)


@pytest.mark.parametrize(
    ("split", "message"),
    [
        ({"colum": "part"}, "x.yaml:LINE: source.split.colum config.unknown_key"),
        ({"folds": 3, "fold": 0, "tset": 0.1}, "x.yaml:LINE: source.split.tset config.unknown_key"),
        ({"parts": {"train": "x"}}, "x.yaml:LINE: source.split.parts.train config.type, got 'x'"),
        ({"parts": {"train": 0.5, "all": 0.5}}, "x.yaml:LINE: pipelines.val config.conflict\n"),
        ({"train": "x"}, "x.yaml:LINE: source.split.train config.type, got 'x'"),
        ({"folds": 2.5, "fold": 0}, "x.yaml:LINE: source.split.folds config.type, got 2.5"),
        ({"parts": {"train": 1.0}, "stable": "no"}, "x.yaml:LINE: source.split.stable config.type, got 'no'"),
        ({"files": {"train": 3}}, "x.yaml:LINE: source.split.files.train config.type, got 3"),
        ({"parts": {"train": 1}, "group": 3}, "x.yaml:LINE: source.split.group config.type, got 3"),
        ({"column": "part", "fold": -1}, "x.yaml:LINE: source.split.fold config.range, got -1"),
    ],
)
def test_errors_name_the_line(split: dict[str, object], message: str, config: Path) -> None:
    document = yaml.safe_load(config.read_text())
    document["source"]["split"] = split
    config.write_text(yaml.safe_dump(document))
    with pytest.raises(ConfigError) as caught:
        gpuflow.load(config, "train")
    assert message in re.sub(r"yaml:\d+", "yaml:LINE", outline(caught.value))
