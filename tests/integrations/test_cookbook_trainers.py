"""The cookbook's jobs with trainers of other libraries run as their page says, on a folder that it did not make."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.pages import blocks_of, run_blocks
from tests.photographs import make_trees
from tests.test_cookbook import SIZES, weights

__all__ = ["weights"]

MINE = [block for block in blocks_of("cookbook_training.md") if block.name == "mine.yaml"]


def run_job(section: str, folder: Path, cache: str) -> str:
    """Run a job. Return what it prints."""
    make_trees(folder)
    blocks = [block for block in blocks_of("cookbook_run.md") if block.section == section]
    return run_blocks([*MINE, *blocks], folder, {"TORCH_HOME": cache, "HF_HUB_OFFLINE": "1"}, SIZES)


def test_a_model_of_lightning_is_evaluated_by_gpuflow(tmp_path: Path, weights: str) -> None:
    pytest.importorskip("lightning", reason="lightning is not installed")
    printed = run_job("Lightning", tmp_path, weights)
    assert "top-1" in printed
    assert (tmp_path / "runs/lightning/served.pt").is_file()


def test_the_trainer_of_transformers_trains_on_a_loader(tmp_path: Path, weights: str) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    printed = run_job("Hugging Face's Trainer", tmp_path, weights)
    assert "eval_accuracy" in printed
    names = json.loads((tmp_path / "runs/trainer/last/config.json").read_text())["id2label"]
    assert list(names.values()) == ["Acer", "birch, silver", "zelkova"]
