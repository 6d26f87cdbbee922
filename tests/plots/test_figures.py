"""Every figure: the same bytes from the same results.csv, all text inside the figure, located errors."""

from __future__ import annotations

import csv
import itertools
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from plots import bars, lines, real_data, style

Draw = Callable[[Path, Path], list[Path]]
ARMS = {**dict.fromkeys(style.ARMS), "an arm of its own": None}
LOADERS = (1500.0, 1510.0, 1495.0, 500.0, 495.0, 490.0, 10.0, 480.0, 1600.0, 1700.0, 12_345.0)
SCALED = (1300.0, 1310.0, 1320.0, 1330.0, 300.0, 310.0, 305.0, 306.0, 307.0, 1900.0, 700.0, 1800.0)
RATES = dict(zip(ARMS, (*LOADERS, *SCALED, 50.0, 12.0, 96.0, 1234.0, 95.0, 0.0), strict=True))
TRAINED = {"run_s": 0.1, "time_share": 0.0001, "accuracy": 0.0001}
METRICS = {"images_per_s": 1.0, "step_ratio": 0.0001, "qps": 1.0, "tp50_ms": 2.0, "tp99_ms": 30.0, **TRAINED}
"""For each metric the factor from the rate to its value."""
ON_KINDS = [f"{kind}; {workload}" for kind in ("sizes", "my own", "web") for workload in ("alone", "resnet50", "vit")]
SERVED = ("plain", "graph-cpu", "graph-gpu")
TRAINING = ("dataloader-pil", "dataloader-tensors", "gpuflow")


def results(path: Path, *workloads: str, arms: tuple[str, ...] = tuple(ARMS)) -> Path:
    """A results.csv with invented rates for every arm and workload."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(style.Result.__slots__)
        numbered = enumerate(workloads, start=1)
        for (i, workload), arm, (metric, factor) in itertools.product(numbered, arms, METRICS.items()):
            rate = RATES[arm] * i * factor
            machine, versions = "a machine with a rather long name, " * 3, "torch 2.11.0, spdl 0.8.0"
            spread = [rate, "images/s", rate * 0.9, rate * 1.2]
            writer.writerow([arm, workload, metric, *spread, 3, machine, versions, "abc1234", "2030-01-01"])
    return path


def texts(svg: Path) -> set[str]:
    """The texts of an SVG figure, which matplotlib writes as comments next to their outlines."""
    return set(re.findall(r"<!-- (.*?) -->", svg.read_text()))


CASES = {
    "scaling": (lines.worker_scaling, [f"train 128; batch=64; workers={n}" for n in (1, 2, 4, 8)], tuple(ARMS)),
    "scaling panels": (lines.worker_scaling, [f"{k}; workers={n}" for k in ("a", "b") for n in (1, 9)], tuple(ARMS)),
    "one number of workers": (lines.worker_scaling, ["train; workers=4"], tuple(ARMS)),
    "bars": (bars.loader_cpu, ["train 128; workers=2"], tuple(ARMS)),
    "gpu": (bars.gpu_path, ["random_resized_crop 224; batch=256"], tuple(ARMS)),
    "panels": (bars.loader_cpu, ["train 128; workers=2", "val 128; workers=2", "val 224; workers=2"], tuple(ARMS)),
    "devices": (bars.extension, ["cpu, 375x500", "cuda, 375x500"], ("gpuflow", "spdl", "plain")),
    "kinds": (real_data.draw, ON_KINDS, ("gpuflow", "dali")),
    "kinds without training": (real_data.draw, ["same; alone"], tuple(ARMS)),
    "trainings": (bars.epoch_time, ["resnet18; epochs=5", "resnet50; epochs=5"], TRAINING),
    "load": (lines.load_test, [f"{size}; clients={n}" for size in ("small", "large") for n in (1, 5, 40)], SERVED),
    "one number of clients": (lines.load_test, ["photos; batch=1; clients=10"], ("service",)),
}
cases = pytest.mark.parametrize(("draw", "workloads", "arms"), CASES.values(), ids=CASES)


@pytest.mark.slow
@cases
def test_same_results_same_bytes(draw: Draw, workloads: list[str], arms: tuple[str, ...], tmp_path: Path) -> None:
    path = results(tmp_path / "results.csv", *workloads, arms=arms)
    first = draw(path, tmp_path / "a" / "figure.v1")
    second = draw(path, tmp_path / "b" / "figure.v1")
    assert [file.name for file in first] == ["figure.v1.svg", "figure.v1.png"]
    assert [file.read_bytes() for file in first] == [file.read_bytes() for file in second]
    assert b"<dc:date>" not in first[0].read_bytes()


@pytest.mark.slow
@cases
def test_nothing_is_clipped(draw: Draw, workloads: list[str], arms: tuple[str, ...], tmp_path: Path) -> None:
    """A text that extends beyond the figure leaves ink at its edge."""
    _, png = draw(results(tmp_path / "results.csv", *workloads, arms=arms), tmp_path / "figure")
    with Image.open(png) as image:
        pixels_HWC = np.asarray(image.convert("RGB"))
    ink_HW = (pixels_HWC != 255).any(axis=2)
    ink_HW[8:-8, 8:-8] = False
    assert not ink_HW.any()


def test_a_ratio_stands_at_every_bar_but_the_baseline(tmp_path: Path) -> None:
    arms = ("gpuflow", "dataloader", "bare threads")
    svg, _ = bars.loader_cpu(results(tmp_path / "results.csv", "train; workers=2", arms=arms), tmp_path / "figure")
    assert {"1,500   3.0x", "500", "12,345   25x"} <= texts(svg)


def test_kinds_have_a_row_each_with_the_engines_and_the_ratios(tmp_path: Path) -> None:
    path = results(tmp_path / "results.csv", *ON_KINDS, arms=("gpuflow", "dali", "engines"))
    rows = path.read_text().splitlines()
    kept = [line for line in rows if not (line.startswith("engines") and "step_ratio" in line)]
    path.write_text("\n".join(kept) + "\n")
    svg, _ = real_data.draw(path, tmp_path / "figure")
    found = re.findall(r"<!-- (.*?) -->", svg.read_text())
    kinds = [f"web: {real_data.KINDS['web']}", f"sizes: {real_data.KINDS['sizes']}", "my own"]
    assert [text for text in found if text in kinds] == kinds, "web first, own folders last"
    assert {"JPEG engines alone", "1,600", "1,500", "480", "ResNet-50", "vit"} <= set(found)
    assert {"0.300", "0.450", "0.096"} <= set(found)


IDEAL = "ideal: gpuflow, 1 worker x N"


def test_the_legend_of_one_workload_has_the_last_values(tmp_path: Path) -> None:
    workloads, arms = [f"train; workers={n}" for n in (1, 2, 4)], ("gpuflow", "spdl")
    svg, _ = lines.worker_scaling(results(tmp_path / "results.csv", *workloads, arms=arms), tmp_path / "figure")
    assert {"gpuflow  4,500", "SPDL  30", "1", "2", "4", IDEAL} <= texts(svg)


def test_each_workload_has_a_panel_and_all_share_a_legend(tmp_path: Path) -> None:
    workloads = ["decode: own; workers=1", "transfer: own; workers=1", "web; batch=2; workers=1"]
    svg, _ = lines.worker_scaling(
        results(tmp_path / "results.csv", *workloads, arms=("gpuflow", "spdl")), tmp_path / "figure"
    )
    found = re.findall(r"<!-- (.*?) -->", svg.read_text())
    titles = ["decode and resize: own", "decode, resize, batch, normalize, transfer: own", "web; batch=2"]
    for text in (*titles, "gpuflow", "SPDL", IDEAL):
        assert found.count(text) == 1, text


def test_the_ideal_line_ends_at_the_number_of_cores_and_needs_one_worker(tmp_path: Path) -> None:
    path = results(tmp_path / "results.csv", *[f"w; workers={n}" for n in (1, 4, 16)], arms=("gpuflow",))
    svg, _ = lines.worker_scaling(path, tmp_path / "figure")
    path.write_text(path.read_text().replace("a machine with a rather long name, ", "4 cores of X"))
    on_four, _ = lines.worker_scaling(path, tmp_path / "four")
    ends = [max(float(x) for x in re.findall(r"L (\d+\.\d+) ", dashed(file))) for file in (svg, on_four)]
    assert ends[1] < ends[0]
    path.write_text("".join(line for line in path.read_text().splitlines(True) if "workers=1," not in line))
    without, _ = lines.worker_scaling(path, tmp_path / "without")
    assert IDEAL not in texts(without)


def dashed(svg: Path) -> str:
    """The path of the dashed line."""
    paths: list[str] = re.findall(r"<path [^>]*>", svg.read_text())
    return next(path for path in paths if "dasharray" in path)


def test_a_panel_is_of_one_machine(tmp_path: Path) -> None:
    path = results(tmp_path / "results.csv", *[f"w; workers={n}" for n in (1, 2)], arms=("gpuflow", "spdl"))
    machine = '"' + "a machine with a rather long name, " * 3 + '"'
    rows = [line.replace(machine, "A" if "workers=1" in line else "B") for line in path.read_text().splitlines()]
    path.write_text("\n".join(rows) + "\n")
    with pytest.raises(ValueError, match="machine") as caught:
        lines.worker_scaling(path, tmp_path / "figure")
    assert str(caught.value) == f"{path} must have 'w' of one machine, got A and B; measure all of it on one"


def test_loads_are_labelled_with_their_last_values(tmp_path: Path) -> None:
    workloads = [f"{size}; batch=1; clients={n}" for size in ("small", "large") for n in (1, 5, 10)]
    svg, _ = lines.load_test(results(tmp_path / "results.csv", *workloads, arms=SERVED), tmp_path / "figure")
    found = texts(svg)
    assert {"small; batch=1", "large; batch=1"} <= found, "a row of panels each"
    assert {"cv2, one lock  150", "graph, GPU decode  3,702", "TP50  300", "TP99  4,500"} <= found
    assert {"cv2, one lock  300", "TP99  222,120"} <= found


def test_a_training_has_its_share_of_the_time_its_seconds_and_its_accuracy(tmp_path: Path) -> None:
    svg, _ = bars.epoch_time(results(tmp_path / "results.csv", "resnet18", arms=("gpuflow",)), tmp_path / "figure")
    assert {"gpuflow", "resnet18", "15%   150.0 s   accuracy 15.0%"} <= texts(svg)


def test_a_load_without_any_answer_has_no_latency(tmp_path: Path) -> None:
    path = results(tmp_path / "results.csv", "w; clients=1", "w; clients=5", arms=("service", "plain"))
    rows = path.read_text().splitlines()
    kept = [line for line in rows if not ("_ms" in line and "clients=5" in line and line.startswith("service"))]
    path.write_text("\n".join(kept) + "\n")
    svg, _ = lines.load_test(path, tmp_path / "figure")
    assert {"service  190", "TP50  190", "TP50  200"} <= texts(svg)


@pytest.mark.parametrize(
    ("draw", "workloads", "text"),
    [
        (lines.worker_scaling, ["train 128"], "workload must end in `; workers=N`, got 'train 128'"),
        (
            lines.worker_scaling,
            ["train; workers=1", "train; workers=1"],
            "must have one row for 'gpuflow' in 'train; workers=1', got several",
        ),
        (
            bars.loader_cpu,
            ["train; workers=1", "train; workers=1"],
            "must have one row for 'gpuflow' in 'train; workers=1', got several",
        ),
        (real_data.draw, ["same; resnet18"], "must have a workload that ends in `; alone`, found none"),
        (
            real_data.draw,
            ["same; alone", "same; alone"],
            "must have one row for 'gpuflow' in 'same; alone', got several",
        ),
        (lines.load_test, ["photos"], "workload must end in `; clients=N`, got 'photos'"),
        (
            lines.load_test,
            ["photos; clients=1", "photos; clients=1"],
            "must have one row for 'gpuflow' in 'photos; clients=1', got several",
        ),
    ],
)
def test_errors_name_the_file_and_the_rule(draw: Draw, workloads: list[str], text: str, tmp_path: Path) -> None:
    path = results(tmp_path / "results.csv", *workloads, arms=("gpuflow",))
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        draw(path, tmp_path / "figure")
    assert str(caught.value) == f"{path} {text}"


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = results(tmp_path / "results.csv", "train; workers=1")
    figures = lines.load_test, lines.worker_scaling
    style.main("plots.lines", *figures, arguments=["worker_scaling", str(path), str(tmp_path / "out")])
    assert capsys.readouterr().out == f"{tmp_path / 'out.svg'}\n{tmp_path / 'out.png'}\n"
    with pytest.raises(SystemExit, match="2"):
        style.main("plots.lines", *figures, arguments=[str(path), str(tmp_path / "out")])
    assert "worker_scaling" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="1"):
        style.main("plots.lines", lines.worker_scaling, arguments=[str(tmp_path / "absent.csv"), str(tmp_path / "out")])
    assert "absent.csv" in capsys.readouterr().err
