"""Laws of the shipped configurations: each can be checked and folded without a GPU and without its data."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path

import pytest

from gpuflow.config import Config, read_config
from gpuflow.pipeline.views import STORAGE, slot_shape
from gpuflow.stages import STAGES
from gpuflow.torchpipe.graph import lower, program_from_json, to_toml
from tests.forking import Python

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))

each_config = pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)


@pytest.fixture
def config(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    monkeypatch.chdir(tmp_path)  # where none of the data is
    return read_config(path, STAGES)


def test_there_are_configs() -> None:
    assert {"demo.yaml", "dino.yaml", "photos.yaml", "simclr.yaml"} <= {path.name for path in CONFIGS}


@each_config
def test_checks_and_folds(path: Path, config: Config) -> None:
    assert {*config.programs, *config.views} == {*config.pipelines, *(["serve"] if config.serve else [])}
    of_views = [program for several in config.views.values() for program in several.programs]
    for program in [*config.programs.values(), *of_views]:
        assert program.result.fixed
        assert slot_shape(program.result)
        assert program.result.dtype in STORAGE


@each_config
def test_serving_sees_what_validation_sees(path: Path, config: Config) -> None:
    if config.serve is not None and "val" in config.programs:
        assert config.programs["serve"].pipeline.stages == config.programs["val"].pipeline.stages


@each_config
def test_validation_skips_bad_samples_and_training_replaces_them(path: Path, config: Config) -> None:
    expected = {name: "replace" if spec.shuffle else "skip" for name, spec in config.pipelines.items()}
    assert {name: config.on_error_of(name)[0] for name in config.pipelines} == expected


@each_config
def test_lowers_to_a_serving_graph_without_its_model(path: Path, config: Config) -> None:
    if config.serve is not None:
        graph = lower(config)
        assert list(graph.as_dict()) == ["preprocess", "model"]
        assert tomllib.loads(to_toml(graph, file="x.toml")) == graph.as_dict()
        stages = graph.as_dict()["model"]["stages"]
        assert program_from_json(stages, STAGES).pipeline == config.programs["serve"].pipeline


@each_config
def test_reads_the_same_twice(path: Path, config: Config) -> None:
    again = read_config(path, STAGES)
    assert again == config
    assert {name: program.pipeline.fingerprint for name, program in again.programs.items()} == {
        name: program.pipeline.fingerprint for name, program in config.programs.items()
    }


@each_config
def test_header_says_what_it_is_for(path: Path) -> None:
    header = path.read_text().partition("\n\n")[0].splitlines()
    assert all(line.startswith("#") for line in header)
    words = [line[1:].split()[0] for line in header if line[1:].strip()]
    assert [word for word in words if word in ("purpose", "hardware", "expected", "command")] == [
        "purpose",
        "hardware",
        "expected",
        "command",
    ]
    assert f"configs/{path.name}" in header[-1]


def test_all_check_and_explain_in_a_process_that_sees_no_gpu(tmp_path: Path, python_with_torch: Python) -> None:
    code = """
import sys
from gpuflow.cli import main
for path in sys.argv[2:]:
    for command in "check", "explain":
        sys.argv[1:] = [command, path]
        try:
            main()
        except SystemExit as end:
            absent = command == "explain" and "\\nsource:" in open(path).read()
            assert end.code == (1 if absent else 0), (command, path, end.code)
"""
    done = python_with_torch(code, "-", *map(str, CONFIGS), cwd=tmp_path, CUDA_VISIBLE_DEVICES="", COLUMNS="200")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("valid: ") == len(CONFIGS)
    assert done.stdout.count("does not exist") >= len(CONFIGS), "explain shows the rest, and that the data is not there"
    with_source = [path for path in CONFIGS if "\nsource:" in path.read_text()]
    assert done.stderr.count("which does not exist") == len(with_source), "once, although several pipelines read it"
    assert os.listdir(tmp_path) == []
