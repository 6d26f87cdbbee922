"""The common style of figures: reading results, one fixed colour per arm, deterministic files."""

from __future__ import annotations

import csv
import itertools
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import matplotlib as mpl
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure

from plots import style

ROOT = Path(__file__).parents[2]

HEADER = "arm,workload,metric,value,unit,low,high,repeats,machine,versions,commit,date"


def write(path: Path, *rows: str, header: str = HEADER) -> Path:
    path.write_text("\n".join([header, *rows]) + "\n")
    return path


def test_reads_the_rows_of_one_metric(tmp_path: Path) -> None:
    path = write(
        tmp_path / "results.csv",
        "gpuflow,train; workers=2,images_per_s,100,images/s,90,110,5,a machine,torch 2.11.0,abc,2030-01-01",
        "gpuflow,train; workers=2,peak_rss_mb,900,MB,,,1,a machine,torch 2.11.0,abc,2030-01-01",
    )
    [speed] = style.read_results(path, metric="images_per_s")
    assert (speed.arm, speed.value, speed.low, speed.high, speed.repeats) == ("gpuflow", 100.0, 90.0, 110.0, 5)
    [memory] = style.read_results(path, metric="peak_rss_mb")
    assert (memory.low, memory.value, memory.high) == (900.0, 900.0, 900.0)


def test_names_missing_columns(tmp_path: Path) -> None:
    path = write(tmp_path / "results.csv", header=HEADER.replace(",low", "").replace(",date", ""))
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        style.read_results(path, metric="images_per_s")
    assert str(caught.value) == f"{path} must have the columns {HEADER.replace(',', ', ')}; it lacks low, date"


def test_names_a_missing_metric(tmp_path: Path) -> None:
    path = write(tmp_path / "results.csv")
    with pytest.raises(
        ValueError, match=r"results.csv must have rows of the metric qps, found none; run the experiment"
    ):
        style.read_results(path, metric="qps")


def test_names_the_line_of_a_bad_number(tmp_path: Path) -> None:
    path = write(tmp_path / "results.csv", "gpuflow,w,qps,fast,1/s,,,1,m,v,c,d")
    with pytest.raises(ValueError, match=r"results.csv:2 value, low, high and repeats must be numbers: .*'fast'"):
        style.read_results(path, metric="qps")


def test_splits_a_workload() -> None:
    assert style.split_workload("train 224; batch=64; workers=2") == ("train 224", {"batch": "64", "workers": "2"})
    assert style.split_workload("workers=2") == ("", {"workers": "2"})


NEW = style.Result(
    arm="new",
    workload="",
    metric="",
    value=1,
    unit="",
    low=1,
    high=1,
    repeats=1,
    machine="",
    versions="",
    commit="",
    date="",
)


def test_the_footer_names_the_libraries_of_all_arms_once() -> None:
    figure, versions = Figure(), ("torch 2.11.0", "torch 2.11.0 av 18.1.0", "torch 2.11.0", "torch 2.11.0 dali 2.4.0")
    style.footer(figure, [replace(NEW, versions=names, commit="abc1234") for names in versions])
    assert [text.get_text() for text in figure.texts] == ["torch 2.11.0, av 18.1.0, dali 2.4.0  |  abc1234"]


def test_every_arm_keeps_its_colour() -> None:
    for path in ROOT.glob("experiments/*/results.csv"):
        with path.open(encoding="utf-8", newline="") as file:
            measured = {row["arm"] for row in csv.DictReader(file)} & set(style.ARMS)
        assert len({style.ARMS[arm].color for arm in measured}) == len(measured), path
    arms = style.arms_of([NEW])
    assert list(arms) == ["new"]
    assert arms["new"].color not in {arm.color for arm in style.ARMS.values()}


@given(st.lists(st.floats(0, 100), min_size=1, max_size=8), st.floats(0.1, 20))
def test_spread_apart_keeps_the_order_and_the_gap(places: list[float], gap: float) -> None:
    moved = style.spread_apart(places, gap)
    ranked = [moved[i] for i in sorted(range(len(places)), key=places.__getitem__)]
    assert all(b - a >= gap - 1e-6 for a, b in itertools.pairwise(ranked))
    assert sum(moved) == pytest.approx(sum(places))
    if all(b - a > gap for a, b in itertools.pairwise(sorted(places))):
        assert moved == pytest.approx(places)
    assert min(style.spread_apart(places, gap, lowest=50)) >= 50


def test_the_style_applies_only_inside_its_block() -> None:
    before = dict(mpl.rcParams)
    with style.new_figure(4, 3) as figure:
        figure.subplots()
    assert dict(mpl.rcParams) == before


def test_plots_never_import_gpuflow() -> None:
    code = "import sys, plots.lines, plots.bars; print('gpuflow' in sys.modules, 'torch' in sys.modules)"
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
