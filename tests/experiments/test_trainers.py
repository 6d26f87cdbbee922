"""experiments/trainers: `gpuflow train` runs as an arm, a run continues, timm's commands have the same training."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpuflow.config import read_config
from gpuflow.stages import STAGES
from tests.experiments.scripts import imported

HERE = Path(__file__).parents[2] / "experiments" / "trainers"
SMALL = ["--device", "cpu", "--count", "60", "--size", "32", "--batch", "16", "--epochs", "1", "--model", "test_resnet"]


@pytest.fixture(scope="module")
def run() -> Iterator[Any]:
    with imported(HERE, ["run"]) as modules:
        yield modules["run"]


@pytest.fixture(scope="module")
def photos(run: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = run.photographs(tmp_path_factory.mktemp("photos"), 60)
    return folder


def test_gpuflow_train_is_an_arm(run: Any, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("timm")
    arguments = [
        *SMALL,
        "--arms",
        "gpuflow-train",
        "--seeds",
        "1",
        "--photos",
        str(photos.parent),
        "--out",
        str(tmp_path),
    ]
    run.main(arguments)
    assert "| gpuflow-train | " in capsys.readouterr().out and (tmp_path / "results.csv").exists()


def test_the_arms_have_one_training(run: Any, photos: Path, tmp_path: Path) -> None:
    """The parts of photos.yaml are the folders of timm, and its overrides are keys of the file."""
    [job] = run.jobs_of(run.parsed([*SMALL, "--arms", "gpuflow-train", "--seeds", "1"]))
    command = run.gpuflow_command(job, photos, tmp_path)
    start = command.index("train") + 1
    config = read_config(command[start], STAGES, command[start + 1 : command.index("--device")])
    assert (config.train.lr, config.train.epochs, config.train.model) == (0.02, 1, "timm:test_resnet")
    assert len(list((photos / "train").glob("*/*.jpg"))) == 60 and len(list((photos / "validation").glob("*/*"))) == 8
    timm = run.timm_command(job, Path("train.py"), photos, tmp_path)
    assert {"--lr=0.02", "--epochs=1", "--model=test_resnet", "--batch-size=16", "--img-size=32"} <= set(timm)


def test_a_run_goes_on_and_shows_mean_and_spread(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trained: list[tuple[int, str]] = []

    def train(job: dict[str, Any], _: Any) -> dict[str, float]:
        trained.append((job["seed"], job["arm"]))
        if len(trained) == 4:
            raise subprocess.CalledProcessError(1, "train.py")
        return {"accuracy": 0.5 + 0.1 * job["seed"], "seconds": 1.0}

    (tmp_path / "train.py").touch()
    monkeypatch.setattr(run, "trained", train)
    arguments = ["--seeds", "2", "--train-script", str(tmp_path / "train.py"), "--out", str(tmp_path)]
    with pytest.raises(SystemExit, match="Failed; the same command trains the rest"):
        run.main(arguments)
    assert trained == [(seed, arm) for seed in (0, 1) for arm in run.ARMS]
    run.main(arguments)
    assert trained[6:] == [(1, "timm")]
    *_, first, second, third = capsys.readouterr().out.splitlines()
    assert first == "| timm | 55.00% | 7.07% | 50.00% | 60.00% | 2 |"
    assert [line.split(" | ")[1] for line in (second, third)] == ["55.00%", "55.00%"]


def test_a_script_that_is_not_timms_is_refused(run: Any, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('something else')\n")
    with pytest.raises(ValueError, match=r"it is not the train\.py of timm"):
        run.patched(tmp_path / "train.py", tmp_path / "copy.py")
    with pytest.raises(SystemExit):
        run.parsed(["--train-script", str(tmp_path / "absent.py")])


def test_tables_of_the_readme_are_those_of_results_csv(run: Any) -> None:
    """Until there is a file of results, the README says so."""
    _, _, rest = (HERE / "README.md").read_text().partition("<!-- tables of results.csv, printed by run.py -->")
    shown, path = rest.partition("<!-- end of the tables -->")[0].strip(), HERE / "results.csv"
    assert shown == (run.tables_of(path) if path.exists() else "Not measured yet.")
