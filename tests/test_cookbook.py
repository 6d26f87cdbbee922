"""Every job of the cookbook runs as its page says, on a folder that the page did not make.

Those with Lightning and transformers run in tests/integrations/test_cookbook_trainers.py. The file for Docker is
compared with the commands of gpuflow. The script for Slurm runs with commands in place of Slurm's.
"""

from __future__ import annotations

import csv
import json
import os
import re
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml

from gpuflow.config import read_config
from gpuflow.stages import STAGES
from tests.pages import ROOT, blocks_of, environment_of, run_blocks, sections_of
from tests.photographs import BAD, CLASSES, make_captions, make_scans, make_trees
from tests.test_cluster_files import parsed

PAGES = ("cookbook_training.md", "cookbook_loops.md")
SIZES = {"128": "32", "146": "36", "96": "32"}
"""The pages say that these may be changed; small ones train in seconds."""
Check = Callable[[Path, str], object]


def table(path: Path) -> list[dict[str, str]]:
    """Return the rows of a CSV file."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def fine_tuned(folder: Path, printed: str) -> None:
    assert BAD in printed and "training leaves these files out" in printed
    assert len(table(folder / "runs/mine/metrics.csv")) == 3
    state = torch.load(folder / "runs/mine/best.pt", weights_only=True)
    assert state["model"]["fc.weight"].shape[0] == len(CLASSES)


def folds(folder: Path, printed: str) -> None:
    parts = [(folder / f"runs/fold{fold}/best.pt").is_file() for fold in range(3)]
    assert parts == [True] * 3
    assert printed.splitlines()[-1].endswith("of 3 folds")


def groups(folder: Path, printed: str) -> None:
    parts: dict[str, set[str]] = {}
    for row in table(folder / "parts.csv"):
        parts.setdefault(row["path"].rpartition("/")[2].partition("_")[0], set()).add(row["part"])
    assert len(parts) == 6 and all(len(names) == 1 for names in parts.values())
    assert {name for names in parts.values() for name in names} == {"train", "val"}


def predictions(folder: Path, printed: str) -> None:
    [bad] = [row for row in table(folder / "predictions/part-00000.csv") if not row["class"]]
    assert bad["path"] == BAD and f"not read: [('{BAD}'" in printed
    assert len(table(folder / "predictions/part-00000.csv")) == 36


def confusion(folder: Path, printed: str) -> None:
    rows = list(csv.reader((folder / "runs/evaluate/confusion.csv").read_text().splitlines()))
    assert [row[0].partition(" ")[2] for row in rows[1:]] == list(CLASSES)
    assert sum(int(number) for row in rows[1:] for number in row[1:]) == int(
        printed.split(" samples of")[0].split()[-1]
    )


def segmented(folder: Path, printed: str) -> None:
    assert "slide-0.jpg has no mask" in printed and re.search(r"epoch 1: mean IoU (0\.|1\.000)", printed)
    assert (folder / "masks.html").stat().st_size > 10_000


def distilled(folder: Path, printed: str) -> None:
    stored = table(folder / "logits.csv")
    assert len(stored) == 35 and BAD not in {row["path"] for row in stored}
    assert {len(json.loads(row["logits"])) for row in stored} == {3}
    first, second = (line.rpartition(" ")[2] for line in printed.splitlines()[-2:])
    assert float(second) < float(first)


CHECKS: dict[str, Check] = {
    "Fine-tune a model": fine_tuned,
    "K-fold": folds,
    "Split by group": groups,
    "Class balance": lambda folder, printed: (
        "each class drawn equally often" in printed and (folder / "runs/balance/best.pt").is_file()
    ),
    "Predictions to CSV": predictions,
    "Confusion matrix": confusion,
    "Semantic segmentation": segmented,
    "Two views": lambda folder, printed: "epoch 1: loss" in printed and (folder / "simclr.pt").is_file(),
    "Distillation from stored logits": distilled,
    "Captions with a tokenizer": lambda folder, printed: "(8, 3, 32, 32) (8, " in printed,
}


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A cache of torch that has weights, so that nothing is downloaded."""
    import torchvision

    cache = tmp_path_factory.mktemp("torch")
    (cache / "hub/checkpoints").mkdir(parents=True)
    torch.save(torchvision.models.resnet18().state_dict(), cache / "hub/checkpoints/resnet18-f37072fd.pth")
    return str(cache)


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_the_jobs_of_a_page_run(page: str, weights: str, tmp_path: Path) -> None:
    make_trees(tmp_path)
    make_scans(tmp_path)
    make_captions(tmp_path)
    for section, blocks in sections_of(page):
        printed = run_blocks(blocks, tmp_path, {"TORCH_HOME": weights}, SIZES)
        if section:
            assert CHECKS[section](tmp_path, printed) is not False, f"{section}:\n{printed}"


def test_every_job_has_a_check() -> None:
    pages = (*PAGES, "cookbook_run.md")
    jobs = {block.section for page in pages for block in blocks_of(page)} - {""}
    assert jobs == {*CHECKS, "Lightning", "Hugging Face's Trainer", "Docker", "Slurm"}
    index = (ROOT / "docs/cookbook.md").read_text()
    assert len(re.findall(r"^\| \[", index, flags=re.MULTILINE)) == len(jobs) == 14


def test_the_index_shows_what_its_command_prints(tmp_path: Path) -> None:
    [mine] = [block for block in blocks_of("cookbook_training.md") if block.name == "mine.yaml"]
    (tmp_path / "mine.yaml").write_text(mine.text)
    command, text = blocks_of("cookbook.md")
    done = subprocess.run(
        ["bash", "-c", command.text],
        cwd=tmp_path,
        env=environment_of({}),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (done.returncode, done.stderr) == (1, text.text)


def block_named(name: str) -> str:
    """Return the text of a file of the last page."""
    [block] = [block for block in blocks_of("cookbook_run.md") if block.name == name]
    return block.text


def test_the_image_has_the_files_of_the_job_and_starts_the_service() -> None:
    lines = [line.split(maxsplit=1) for line in block_named("Dockerfile").splitlines()[1:]]
    assert [instruction for instruction, _ in lines] == ["FROM", "COPY", "COPY", "CMD"]
    home = "/gpuflow/"
    assert f"WORKDIR {home.rstrip('/')}" in (ROOT / "Dockerfile").read_text()
    for _, copied in lines[1:3]:
        source, target = copied.split()
        assert target == home + source
    [mine] = [block for block in blocks_of("cookbook_training.md") if block.name == "mine.yaml"]
    assert yaml.safe_load(mine.text)["serve"]["model"]["file"] == lines[2][1].split()[0]
    given = parsed(shlex.join(["gpuflow", *json.loads(lines[3][1])]))
    assert (str(given["path"]), given["host"], given["port"]) == ("mine.yaml", "0.0.0.0", 8888)


@pytest.mark.parametrize("code", [0, 1, 75])
def test_the_array_trains_a_fold_a_task_and_requeues_after_75(code: int, tmp_path: Path) -> None:
    script = block_named("folds.sbatch")
    assert script.startswith("#!/bin/bash\n") and "#SBATCH --array=0-4\n" in script
    (tmp_path / "folds.sbatch").write_text(script)
    commands = {"srun": 'exec "$@"', "gpuflow": f'printf "%s|" "$@"; echo; exit {code}', "scontrol": 'echo "$*"'}
    for name, text in commands.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    slurm = {"SLURM_ARRAY_TASK_ID": "3", "SLURM_ARRAY_JOB_ID": "41", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "folds.sbatch"],
        cwd=tmp_path,
        env={**os.environ, **slurm},
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    assert (done.returncode, done.stderr) == (code, "")
    first, *rest = done.stdout.splitlines()
    assert rest == ["requeue 41_3"] * (code == 75)
    arguments = first.rstrip("|").split("|")
    assert parsed(shlex.join(["gpuflow", *arguments]))["resume"] == "auto"
    [mine] = [block for block in blocks_of("cookbook_training.md") if block.name == "mine.yaml"]
    (tmp_path / "mine.yaml").write_text(mine.text)
    overrides = [argument for argument in arguments if "=" in argument]
    config = read_config(tmp_path / "mine.yaml", STAGES, overrides)
    assert config.source.rule is not None and config.source.rule.fold == 3
    assert config.train.out == "runs/fold3"
