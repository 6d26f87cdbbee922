"""experiments/epoch_time: every arm trains on the same images, a run continues, its tables are complete."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.datasets import make_photos
from tests.experiments.scripts import imported

HERE = Path(__file__).parents[2] / "experiments" / "epoch_time"
MODEL, SIZE, BATCH, CLASSES, EACH = "shufflenet_v2_x0_5", 32, 4, 3, 6


@pytest.fixture(scope="module")
def scripts() -> Iterator[dict[str, Any]]:
    with imported(HERE, ["run", "arms"]) as modules:
        yield modules


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("photos")
    make_photos(folder, classes=CLASSES, each=EACH)
    return str(folder)


def job(arm: str, folder: str, parallel: str = "none") -> dict[str, Any]:
    sizes = {"size": SIZE, "batch": BATCH, "epochs": 1, "workers": 1, "seed": 0}
    return {"arm": arm, "model": MODEL, "train": folder, "val": folder, "device": "cpu", "parallel": parallel, **sizes}


def record(arm: str, run_s: float, repeat: int = 0, parallel: str = "none", **metrics: Any) -> dict[str, Any]:
    made = {"arm": arm, "model": "m", "parallel": parallel, "repeat": repeat, "device": "cuda"}
    made |= {"count": 9, "size": 224, "batch": 2, "epochs": 2}
    origin = dict.fromkeys(("machine", "versions", "commit", "date"), "")
    return {"job": made, "metrics": {"run_s": run_s, **metrics}, "gpus": 1 if parallel == "none" else 2, **origin}


@pytest.mark.parametrize("arm", ["dataloader-pil", "dataloader-tensors", "gpuflow", "gpuflow-wrap", "dali"])
def test_every_arm_gives_the_same_images_in_the_same_form(arm: str, scripts: dict[str, Any], folder: str) -> None:
    """Training leaves the last incomplete batch out, validation does not, and gives torchvision's pixels."""
    if arm == "dali" and importlib.util.find_spec("nvidia.dali") is None:
        pytest.skip("nvidia-dali is not installed")
    arms = scripts["arms"]
    made = arms.Job(**job(arm, folder))
    train, val = arms.LOADERS[arm](made, arms.place_of(made))
    for loader, images_of_an_epoch in ((train, 16), (val, CLASSES * EACH)):
        batches = list(loader)
        labels = torch.cat([labels for _, labels in batches])
        assert len(labels) == images_of_an_epoch and set(labels.tolist()) <= set(range(CLASSES))
        assert all(images.shape[1:] == (3, SIZE, SIZE) and images.dtype == torch.float32 for images, _ in batches)
    expected, _ = next(iter(arms.dataloader_tensors(made, arms.place_of(made))[1]))
    images, _ = next(iter(val))
    assert (images - expected).abs().mean() < 0.05, "each epoch begins with the first file"


def test_a_training_has_all_metrics(scripts: dict[str, Any], folder: str) -> None:
    metrics, rank = scripts["arms"].measure(scripts["arms"].Job(**job("gpuflow", folder)))
    assert (rank, set(metrics)) == (0, {"epoch_1_s", "accuracy_1", "accuracy", "run_s", "images_per_s"})
    assert metrics["images_per_s"] == pytest.approx(16 / metrics["epoch_1_s"])
    assert metrics["run_s"] > metrics["epoch_1_s"]


@pytest.mark.slow
@pytest.mark.parametrize("arm", ["gpuflow", "gpuflow-wrap", "dataloader-tensors"])
def test_two_ranks_train_on_an_epoch_together(arm: str, folder: str) -> None:
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(HERE / "arms.py")]
    done = subprocess.run(
        [sys.executable, *command, json.dumps(job(arm, folder, "ddp"))],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    [answer] = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    metrics = answer["metrics"]
    assert metrics["images_per_s"] == pytest.approx(16 / metrics["epoch_1_s"])


def test_arms_alternate_and_what_is_measured_is_not_measured_again(
    scripts: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run, measured = scripts["run"], []

    def measure(job: dict[str, Any], _: Any) -> dict[str, Any]:
        measured.append((job["repeat"], job["arm"]))
        if len(measured) == 3:
            raise subprocess.TimeoutExpired("arms.py", 1)
        return {**record(job["arm"], 10.0 if job["arm"] == run.BASE else 5.0), "job": job}

    monkeypatch.setattr(run, "measured", measure)
    arguments = ["run.py", "--arms", "dataloader-pil", "gpuflow", "--models", "m", "--repeats", "2"]
    monkeypatch.setattr(sys, "argv", [*arguments, "--device", "cpu", "--out", str(tmp_path)])
    with pytest.raises(SystemExit, match="Failed; the same command measures the rest"):
        run.main()
    assert measured == [(0, "dataloader-pil"), (0, "gpuflow"), (1, "gpuflow"), (1, "dataloader-pil")]
    run.main()
    assert measured[4:] == [(1, "gpuflow")]
    lines = run.tables_of(tmp_path / "results.csv").splitlines()
    assert lines[2] == "| arm | whole run, s | share of DataLoader's time |"
    assert lines[4:] == ["| dataloader-pil | 10.0 | 100% |", "| gpuflow | 5.0 | 50% |"]
    assert "\n".join(lines) in capsys.readouterr().out


def test_shares_are_those_of_the_same_repeat(scripts: dict[str, Any]) -> None:
    times = {("dataloader-pil", 0): 10.0, ("gpuflow", 0): 5.0, ("gpuflow", 1): 6.0, ("dataloader-pil", 1): 20.0}
    rows = scripts["run"].rows_of([record(arm, time, repeat) for (arm, repeat), time in times.items()])
    shares = {row["arm"]: (row["low"], row["high"], row["repeats"]) for row in rows if row["metric"] == "time_share"}
    assert shares == {"dataloader-pil": ("1", "1", 2), "gpuflow": ("0.3", "0.5", 2)}
    assert {row["metric"]: row["unit"] for row in rows} == {"run_s": "s", "time_share": "share"}


def test_a_table_has_the_epochs_in_order_or_the_memory_of_each_gpu(scripts: dict[str, Any]) -> None:
    run = scripts["run"]
    epochs: dict[str, Any] = {f"epoch_{number}_s": float(number) for number in range(1, 12)}
    records = [record("gpuflow", 66.0, accuracy=0.981, accuracy_1=0.5, **epochs)]
    memory: dict[str, Any] = {"gpu0_reserved_mb": 2000.0, "gpu1_reserved_mb": 1000.0}
    records.append(record("gpuflow", 33.0, parallel="dp", images_per_s=9000.0, accuracy=1.0, **epochs, **memory))
    lines = run.tables(run.rows_of(records)).splitlines()
    titles = " | ".join(f"epoch {number}, s" for number in range(1, 12))
    assert lines[2] == f"| arm | {titles} | whole run, s | accuracy |"
    assert lines[4].endswith("| 11.0 | 66.0 | 98.1% |")
    assert lines[6] == "**m, 9 photographs at 224; batch=2; epochs=2; gpus=2 by DataParallel**"
    assert lines[8].startswith("| arm | gpu0 reserved, MB | gpu1 reserved, MB | images/s | whole run, s |")
    assert lines[10] == "| gpuflow | 2,000 | 1,000 | 9,000 | 33.0 | 100.0% |"


@pytest.mark.parametrize("results", ["results.csv", "several_gpus/results.csv"])
def test_tables_of_the_readme_are_those_of_results_csv(results: str, scripts: dict[str, Any]) -> None:
    """Until there is a file of results, the README says so."""
    _, _, rest = (HERE / "README.md").read_text().partition(f"<!-- tables of {results}, printed by run.py -->")
    path, shown = HERE / results, rest.partition("<!-- end of the tables -->")[0].strip()
    assert shown == (scripts["run"].tables_of(path) if path.exists() else "Not measured yet.")
