"""experiments/peers: each arm that imports loads every photograph once, with its label; results are kept."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from plots import bars
from tests.experiments.scripts import imported

HERE = Path(__file__).parents[2] / "experiments" / "peers"
PHOTOGRAPHS, BATCH = 48, 16
WITHOUT_PEERS = ("gpuflow", "gpuflow-tar", "dataloader", "dataloader-tensors", "spdl")


@pytest.fixture(scope="module")
def scripts() -> Iterator[dict[str, Any]]:
    with imported(HERE, ["inputs", "arms", "run"]) as modules:
        yield modules


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Photographs of one level and one class each: class n has the level 5 n + 5."""
    folder = tmp_path_factory.mktemp("peers") / "photos"
    for label in range(PHOTOGRAPHS):
        path = folder / f"{label:02}" / "0.jpg"
        path.parent.mkdir(parents=True)
        Image.new("RGB", (90 + label, 70), (5 * label + 5,) * 3).save(path, quality=95)
    return folder


def started(script: str, *arguments: str) -> str:
    command = [sys.executable, str(HERE / script), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout


def answer(photos: Path, arm: str, scripts: dict[str, Any], **job: Any) -> dict[str, Any]:
    """Run an arm on the photographs in its format. Skips if its library does not import, or a GPU is missing."""
    fields = {"arm": arm, "input": "", "workers": 2, "batch": BATCH, **job}
    found: dict[str, Any] = json.loads(started("arms.py", json.dumps(fields)).splitlines()[-1])
    if "missing" in found:
        assert arm not in WITHOUT_PEERS
        pytest.skip(f"{arm}: {found['missing']}")
    form = scripts["arms"].ARMS[arm].input
    source = photos if form == "folder" else photos.with_name(f"photos.{form}")
    if not source.exists():
        started("inputs.py", form, str(photos), str(source))
    text = started("arms.py", json.dumps({**fields, "input": str(source)}))
    found = json.loads(text.splitlines()[-1])
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "arm",
    [
        *WITHOUT_PEERS,
        *("torchcodec", "torchdata", "timm", "dali", "webdataset", "litdata", "streaming", "grain", "hf-datasets"),
        *("ray", "dali-mixed", "gpuflow-gpu"),
    ],
)
def test_an_epoch_has_every_photograph_once_with_its_label(arm: str, scripts: dict[str, Any], photos: Path) -> None:
    found = answer(photos, arm, scripts, seconds=0)["result"]
    assert sorted(found["labels"]) == list(range(PHOTOGRAPHS)) != found["labels"]
    assert [255 * level for level in found["levels"]] == pytest.approx([5 * n + 5 for n in found["labels"]], abs=1.1)
    assert found["shapes"] == [[BATCH, 3, 224, 224]] * 3 and set(found["dtypes"]) == {"torch.float32"}


@pytest.mark.slow
def test_an_arm_prints_the_metrics_of_the_table(scripts: dict[str, Any], photos: Path) -> None:
    found = answer(photos, "gpuflow", scripts, warm_up=0.1, seconds=0.5)
    assert {*found["result"], "busy_cores_before"} == set(scripts["run"].UNITS)
    assert all(value > 0 for value in found["result"].values()) and found["version"].startswith("gpuflow ")


def test_every_arm_is_tested(scripts: dict[str, Any]) -> None:
    (cases,) = (
        mark.args[1]
        for mark in test_an_epoch_has_every_photograph_once_with_its_label.pytestmark
        if mark.name == "parametrize"
    )
    assert set(cases) == set(scripts["arms"].ARMS)


def test_photographs_of_a_size_have_several_names(scripts: dict[str, Any], tmp_path: Path) -> None:
    scripts["run"].make_photographs(tmp_path, (50, 40), 16)
    files = list(tmp_path.glob("*/*.jpg"))
    assert len(files) == 64 and len({file.stat().st_ino for file in files}) == 16
    with Image.open(files[0]) as image:
        assert image.size == (50, 40)


def test_what_is_measured_is_not_measured_again(
    scripts: dict[str, Any],
    photos: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """An arm that does not import is named, one that failed is measured by the next call."""
    run, asked = scripts["run"], []
    photos.with_name("500x375_48").symlink_to(photos)

    def start(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        asked.append(job := json.loads(command[-1]))
        if job["arm"] == "grain":
            return subprocess.CompletedProcess(command, 0, '{"missing": "No module named grain"}')
        if len(asked) == 2:
            raise subprocess.CalledProcessError(1, command)
        metrics = {"images_per_s": 1000 + len(asked)}
        return subprocess.CompletedProcess(
            command, 0, "a library's text\n" + json.dumps({"result": metrics, "version": "x 1"})
        )

    monkeypatch.setattr(run.subprocess, "run", start)
    for name, value in {"machine": "here", "versions": "some", "commit": "abc"}.items():
        monkeypatch.setattr(run, name, lambda value=value: value)
    arguments = ["--kinds", "500x375", "--arms", "gpuflow", "dataloader", "grain", "dali-mixed", "--repeats", "1"]
    arguments += ["--workers", "3", "--count", "48", "--photos", str(photos.parent), "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["run.py", *arguments])
    run.main()
    assert "not measured: dataloader: failed, the same command measures it again" in capsys.readouterr().out
    run.main()
    assert "not measured: grain: No module named grain" in capsys.readouterr().out
    assert [job["arm"] for job in asked] == ["gpuflow", "dataloader", "grain", "dali-mixed", "dataloader", "grain"]
    with (tmp_path / "results.csv").open(newline="") as file:
        rows = {row["arm"]: row for row in csv.DictReader(file) if row["metric"] == "images_per_s"}
    assert {arm: row["value"] for arm, row in rows.items()} == {"gpuflow": "1001", "dataloader": "1005"}
    assert rows["gpuflow"]["versions"] == rows["dataloader"]["versions"] == "some x 1"
    assert "dali-mixed" in (tmp_path / "gpu.csv").read_text()
    svg, _ = bars.loader_cpu(tmp_path / "results.csv", tmp_path / "figure")
    assert "1,001" in svg.read_text()
