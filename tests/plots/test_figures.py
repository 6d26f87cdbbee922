"""Every figure: the same bytes from the same results.csv, all text inside the page, located errors."""

from __future__ import annotations

import csv
import itertools
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from plots import gpu_path, loader_cpu, style, worker_scaling

Draw = Callable[[Path, Path], list[Path]]
ARMS = {**dict.fromkeys(style.ARMS), "an arm of its own": None}
RATES = dict(zip(ARMS, (1500.0, 1495.0, 500.0, 495.0, 490.0, 10.0, 480.0, 12_345.0, 0.0), strict=True))


def results(path: Path, *workloads: str, arms: tuple[str, ...] = tuple(ARMS)) -> Path:
    """A results.csv with made-up rates: every arm on every workload."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(style.Result.__slots__)
        for (i, workload), arm in itertools.product(enumerate(workloads, start=1), arms):
            rate = RATES[arm] * i
            machine, versions = "a machine with a rather long name, " * 3, "torch 2.11.0, spdl 0.8.0"
            spread = [rate, "images/s", rate * 0.9, rate * 1.2]
            writer.writerow([arm, workload, "images_per_s", *spread, 3, machine, versions, "abc1234", "2030-01-01"])
    return path


def texts(svg: Path) -> set[str]:
    """The texts of a figure, which matplotlib notes beside their outlines."""
    return set(re.findall(r"<!-- (.*?) -->", svg.read_text()))


CASES = {
    "scaling": (worker_scaling.draw, [f"train 128; batch=64; workers={n}" for n in (1, 2, 4, 8)]),
    "one number of workers": (worker_scaling.draw, ["train; workers=4"]),
    "bars": (loader_cpu.draw, ["train 128; workers=2"]),
    "gpu": (gpu_path.draw, ["random_resized_crop 224; batch=256"]),
    "panels": (loader_cpu.draw, ["train 128; workers=2", "val 128; workers=2", "val 224; workers=2"]),
}
cases = pytest.mark.parametrize(("draw", "workloads"), CASES.values(), ids=CASES)


@cases
def test_same_results_same_bytes(draw: Draw, workloads: list[str], tmp_path: Path) -> None:
    path = results(tmp_path / "results.csv", *workloads)
    first = draw(path, tmp_path / "a" / "figure.v1")
    second = draw(path, tmp_path / "b" / "figure.v1")
    assert [file.name for file in first] == ["figure.v1.svg", "figure.v1.png"]
    assert [file.read_bytes() for file in first] == [file.read_bytes() for file in second]
    assert b"<dc:date>" not in first[0].read_bytes()


@cases
def test_nothing_is_clipped(draw: Draw, workloads: list[str], tmp_path: Path) -> None:
    """A text that runs off the page leaves ink at its edge."""
    _, png = draw(results(tmp_path / "results.csv", *workloads), tmp_path / "figure")
    with Image.open(png) as image:
        pixels_HWC = np.asarray(image.convert("RGB"))
    ink_HW = (pixels_HWC != 255).any(axis=2)
    ink_HW[8:-8, 8:-8] = False
    assert not ink_HW.any()


def test_a_ratio_stands_at_every_bar_but_the_baseline(tmp_path: Path) -> None:
    arms = ("gpuflow", "dataloader", "bare threads")
    svg, _ = loader_cpu.draw(results(tmp_path / "results.csv", "train; workers=2", arms=arms), tmp_path / "figure")
    assert {"1,500   3.0x", "500", "12,345   25x"} <= texts(svg)


def test_lines_are_labelled_with_their_last_value(tmp_path: Path) -> None:
    workloads, arms = [f"train; workers={n}" for n in (1, 2, 4)], ("gpuflow", "spdl")
    svg, _ = worker_scaling.draw(results(tmp_path / "results.csv", *workloads, arms=arms), tmp_path / "figure")
    assert {"gpuflow  4,500", "SPDL  30", "ideal scaling"} <= texts(svg)


@pytest.mark.parametrize(
    ("draw", "workloads", "text"),
    [
        (worker_scaling.draw, ["train 128"], "workload must end in `; workers=N`, got 'train 128'"),
        (
            worker_scaling.draw,
            ["train; workers=1", "train; workers=1"],
            "must have one row for 'gpuflow' with 1 workers, got several",
        ),
        (
            worker_scaling.draw,
            ["train; workers=1", "val; workers=1"],
            "must hold one workload besides `workers`, got 'train', 'val'",
        ),
        (
            loader_cpu.draw,
            ["train; workers=1", "train; workers=1"],
            "must have one row for 'gpuflow' in 'train; workers=1', got several",
        ),
    ],
)
def test_errors_name_the_file_and_the_rule(draw: Draw, workloads: list[str], text: str, tmp_path: Path) -> None:
    path = results(tmp_path / "results.csv", *workloads, arms=("gpuflow",))
    if "val; workers=1" in workloads:
        path.write_text(path.read_text().replace("gpuflow,val", "spdl,val"))
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        draw(path, tmp_path / "figure")
    assert str(caught.value) == f"{path} {text}"


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = results(tmp_path / "results.csv", "train; workers=1")
    style.main(worker_scaling.draw, "plots.worker_scaling", [str(path), str(tmp_path / "out")])
    assert capsys.readouterr().out == f"{tmp_path / 'out.svg'}\n{tmp_path / 'out.png'}\n"
    with pytest.raises(SystemExit, match="1"):
        style.main(worker_scaling.draw, "plots.worker_scaling", [str(tmp_path / "absent.csv"), str(tmp_path / "out")])
    assert "absent.csv" in capsys.readouterr().err
