"""experiments/real_data: its photographs are of the kinds that it names, its arms take turns, its log is resumed."""

from __future__ import annotations

import csv
import itertools
import json
import pydoc
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from gpuflow.decode.chunk_files import engine_sampling
from gpuflow.decode.codecs import probe
from gpuflow.execute.gpu.runner import GpuRunner
from gpuflow.loader import lowering
from gpuflow.tools.bench import COLUMNS
from tests import images
from tests.datasets import make_photos
from tests.experiments.scripts import imported

ROOT = Path(__file__).parents[2]
HERE = ROOT / "experiments" / "real_data"
SCRIPTS = (
    "run",
    "arms",
    "compare",
    "dali_loader",
    "engines",
    "calls",
    "photos",
    "next_to_training",
    "gpu_time",
    "other_process",
    "rewriting",
)
COUNT = 10_000
"""Plans that shares are counted over. A share of 3% then has a standard deviation of 0.17%."""


@pytest.fixture(scope="module")
def scripts() -> Iterator[dict[str, Any]]:
    with imported(HERE, SCRIPTS) as modules:
        yield modules


# --- photographs ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def picture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one small picture to cut photographs from."""
    folder = tmp_path_factory.mktemp("pictures")
    levels = np.random.default_rng(0).integers(0, 256, (6, 8, 3), np.uint8)
    Image.fromarray(levels).resize((160, 120)).save(folder / "own.png")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "shares"),
    [
        ("same", {"4:2:0": 1.0, "progressive": 0.0}),
        ("samplings", {"4:4:4": 0.15, "4:2:2": 0.05, "4:2:0": 0.8, "progressive": 0.0}),
        ("sizes", {"4:2:0": 1.0, "progressive": 0.0}),
        ("progressive", {"4:2:0": 1.0, "progressive": 0.03}),
        ("progressive20", {"4:2:0": 1.0, "progressive": 0.2}),
        ("turned", {"4:2:0": 1.0, "turned": 0.5}),
        ("web", {"4:4:4": 0.15, "4:2:2": 0.05, "progressive": 0.03, "L": 0.01, "CMYK": 0.002, "PNG": 0.005}),
    ],
)
def test_shares_of_a_kind(kind: str, shares: dict[str, float], scripts: dict[str, Any]) -> None:
    photos = scripts["photos"]
    plans = [photos.plan(photos.KINDS[kind], 0, number) for number in range(COUNT)]
    found = Counter(word for plan in plans for word in (plan.sampling, plan.mode, plan.format))
    found["progressive"] = sum(plan.progressive for plan in plans)
    found["turned"] = sum(plan.orientation > 1 for plan in plans)
    assert {plan.orientation for plan in plans} == ({1, 3, 6, 8} if kind == "turned" else {0})
    for name, share in shares.items():
        assert found[name] / COUNT == pytest.approx(share, abs=0.012 if share < 1 else 0), name
    assert (found["L"] > 0, found["PNG"] > 0) == (kind == "web",) * 2


def test_sizes_are_spread_about_their_median(scripts: dict[str, Any]) -> None:
    photos = scripts["photos"]
    longest = [max(plan.width, plan.height) for n in range(4000) for plan in [photos.plan(photos.KINDS["web"], 1, n)]]
    assert np.median(longest) == pytest.approx(500, rel=0.05)
    assert np.std(np.log(longest)) == pytest.approx(0.5, rel=0.1)
    assert min(longest) >= 80 and max(longest) <= 3000
    same = {(plan.width, plan.height) for n in range(99) for plan in [photos.plan(photos.KINDS["same"], 1, n)]}
    assert same == {(500, 375), (375, 500), (500, 333), (500, 500)}


def test_files_are_what_their_plans_say(scripts: dict[str, Any], picture: Path) -> None:
    photos = scripts["photos"]
    factors = {"4:2:0": 0x22, "4:2:2": 0x21, "4:4:4": 0x11}
    with Image.open(picture / "own.png") as image:
        source = image.convert("RGB")
    kind = photos.Kind(yuv444=0.3, yuv422=0.3, progressive=0.3, gray=0.2, png=0.2, cmyk=0.2, turned=0.5)
    seen = set()
    for number in range(24):
        plan = photos.plan(kind, 0, number)
        data = np.frombuffer(photos.encode(source, plan, np.random.default_rng(0)), np.uint8)
        header = probe(data, orientation=True)
        assert (*header.upright_size, header.format) == (plan.height, plan.width, plan.format.lower())
        assert header.progressive == plan.progressive
        if plan.format == "JPEG":
            assert header.orientation == plan.orientation
            assert header.channels == {"RGB": 3, "L": 1, "CMYK": 4}[plan.mode]
        if plan.sampling and not plan.progressive:
            assert engine_sampling(data) == factors[plan.sampling]
        seen.add((plan.format, plan.mode, plan.sampling, plan.progressive))
    assert len(seen) > 8


def test_photographs_are_a_function_of_their_arguments(scripts: dict[str, Any], picture: Path, tmp_path: Path) -> None:
    photos = scripts["photos"]
    assert photos.make_photos("same", tmp_path / "a", count=3, names=3, source=picture) == 3
    assert photos.make_photos("same", tmp_path / "a", count=3, names=3, source=picture) == 0, "kept"
    made = sorted((tmp_path / "a").rglob("*.jpg"))
    assert [path.name for path in made[:3]] == ["000000.jpg", "000000_01.jpg", "000000_02.jpg"]
    assert len(made) == 9
    assert [path.stat().st_nlink for path in made] == [3] * 9
    assert len({path.stat().st_ino for path in made}) == 3
    assert photos.make_photos("same", tmp_path / "b", count=2, names=1, source=picture) == 2
    again = sorted((tmp_path / "b").rglob("*.jpg"))
    assert [path.read_bytes() for path in again] == [made[0].read_bytes(), made[3].read_bytes()]
    with pytest.raises(SystemExit, match=r"must be absent or hold photographs of .*; remove it or name another"):
        photos.make_photos("web", tmp_path / "a", count=3, names=3, source=picture)


def test_without_pictures_an_error_says_what_to_do(
    scripts: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    photos = scripts["photos"]
    with pytest.raises(SystemExit, match=r"--from .* must be a folder with pictures .*, found none"):
        photos.find_pictures(tmp_path)
    assert len(photos.find_pictures(None)) > 5
    monkeypatch.setattr(photos, "_PICTURES", {"no_such_package": ("a.png",)})
    with pytest.raises(SystemExit, match=r"pip install scikit-image scikit-learn, or name a folder .*: --from DIR"):
        photos.find_pictures(None)


def test_a_folder_that_is_there_is_measured_as_it_is(scripts: dict[str, Any], picture: Path, tmp_path: Path) -> None:
    run = scripts["run"]
    (tmp_path / "holidays").mkdir()
    words = ["--photos", str(tmp_path), "--from", str(picture), "--count", "2", "--names", "1"]
    options = run.parsed(words)
    for _ in range(2):
        run.provide_photographs(options, "holidays")
        run.provide_photographs(options, "same")
        run.provide_photographs(run.parsed(words[:2]), "same")
    assert list((tmp_path / "holidays").iterdir()) == []
    assert len(list((tmp_path / "same").rglob("*.jpg"))) == 2
    with pytest.raises(SystemExit, match=r"no such kind and no folder .*; did you mean 'same'"):
        run.provide_photographs(options, "sames")


# --- turns and the log ------------------------------------------------------------------------------------------------


class FakeArm:
    """Writes what it is asked into a list that all arms share. fails: the action that fails."""

    def __init__(self, name: str, seen: list[str], failure: type[Exception], fails: str = "") -> None:
        self.name, self._seen, self._failure, self._fails = name, seen, failure, fails

    def prepare(self, workload: str) -> None:
        self._note(f"{self.name} prepares {workload}")

    def measure(self, workload: str) -> dict[str, float]:
        self._note(f"{self.name} {workload}")
        return {"images_per_s": 1.0}

    def _note(self, text: str) -> None:
        if text == self._fails:
            raise self._failure("no")
        self._seen.append(text)


EVERY_TURN = set(itertools.product("ab", "xy", range(2)))


def test_arms_take_turns(scripts: dict[str, Any]) -> None:
    run, seen, recorded = scripts["run"], list[str](), list[Any]()
    arms = [FakeArm(name, seen, run.ArmFailed) for name in "ab"]
    failures = run.take_turns(
        arms, ["x", "y"], 2, EVERY_TURN - {("b", "y", 0)}, lambda arm, *rest: recorded.append((arm.name, *rest))
    )
    assert failures == []
    assert seen[:6] == ["a prepares x", "b prepares x", "a x", "b x", "b x", "a x"]
    assert seen[6:] == ["a prepares y", "b prepares y", "a y", "b y", "a y"]
    assert recorded[2] == ("b", "x", 1, {"images_per_s": 1.0})
    assert len(recorded) == 7


@pytest.mark.parametrize("fails", ["b prepares x", "b x"])
def test_an_arm_that_fails_stops_no_other(fails: str, scripts: dict[str, Any]) -> None:
    run, seen = scripts["run"], list[str]()
    arms = [FakeArm(name, seen, run.ArmFailed, fails) for name in "ab"]
    failures = run.take_turns(arms, ["x", "y"], 2, EVERY_TURN, lambda *found: None)
    assert failures == ["b, x: no"]
    assert [text for text in seen if text.startswith("a")] == [
        "a prepares x",
        "a x",
        "a x",
        "a prepares y",
        "a y",
        "a y",
    ]
    assert not [text for text in seen if text.startswith("b") and text != "b prepares x"]


def test_what_is_done_has_no_turn(scripts: dict[str, Any]) -> None:
    seen: list[str] = []
    scripts["run"].take_turns([FakeArm("a", seen, ValueError)], ["x"], 3, set(), lambda *found: None)
    assert seen == []


def record(row: str, arm: str, workload: str, repeat: int, **metrics: float) -> dict[str, Any]:
    key: dict[str, Any] = {"row": row, "arm": arm, "workload": workload, "repeat": repeat}
    origin = {
        "machine": "a GPU",
        "versions": "v",
        "commit": "c",
        "date": "2030-01-01",
        "setting": "s",
        "command": "run",
    }
    return key | origin | {"metrics": metrics, "choice": {}}


def test_the_log_outlives_a_cut_off(scripts: dict[str, Any], tmp_path: Path) -> None:
    run, path = scripts["run"], tmp_path / "out" / "measurements.jsonl"
    log = run.Log(path)
    log.append(record("web", "gpuflow", "alone", 0, images_per_s=1.0))
    log.append(record("web", "dali", "alone", 0, images_per_s=2.0))
    with path.open("a") as file:
        file.write('{"row": "web", "ar')
    log = run.Log(path)
    assert run.done(log) == {("web", "gpuflow", "alone", 0), ("web", "dali", "alone", 0)}
    log.append(record("web", "dali", "alone", 1, images_per_s=3.0))
    log.discard(lambda old: old["arm"] == "gpuflow")
    assert [json.loads(line)["repeat"] for line in path.read_text().splitlines()] == [0, 1]
    assert run.Log(path).records == log.records


def test_rows_have_median_and_range_and_where_they_were_measured(scripts: dict[str, Any], tmp_path: Path) -> None:
    records = [record("web", "gpuflow", "resnet18", n, images_per_s=100.0 * n, step_ratio=n / 4) for n in range(1, 4)]
    records[2]["machine"] = "another GPU"
    records.append(record("web", "dali", "resnet18", 0, images_per_s=100.0))
    scripts["run"].write_csv(tmp_path / "results.csv", records)
    with (tmp_path / "results.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == [*COLUMNS, "setting", "command"]
    figures = [(row["arm"], row["metric"], row["low"], row["value"], row["high"], row["repeats"]) for row in rows]
    assert figures == [
        ("gpuflow", "images_per_s", "100", "200", "300", "3"),
        ("gpuflow", "step_ratio", "0.25", "0.5", "0.75", "3"),
        ("dali", "images_per_s", "100", "100", "100", "1"),
    ]
    assert {row["workload"] for row in rows} == {"web; resnet18"}
    assert [row["machine"] for row in rows] == ["a GPU / another GPU"] * 2 + ["a GPU"]
    assert list(scripts["run"].comparisons(records, "web")) == [
        f"{'web':14} {'resnet18':18} gpuflow / dali: 2.000",
    ]


ARM_PROGRAM = """
import sys
from multiprocessing.connection import Connection

connection = Connection(int(sys.argv[1]))
job = connection.recv()
about = {"device": "", "setting": "fake", "versions": "", "choice": {"load": 1}}
connection.send(("failed", "cannot start") if job["arm"] == "dali" else ("ok", about))
count = 0
while (message := connection.recv()) is not None:
    action, workload = message
    if job["arm"] == "resident" and action == "measure":
        sys.exit(3)
    count += action == "measure"
    connection.send(("ok", about if action == "prepare" else {"images_per_s": count * 10.0}))
"""
"""An arm that measures nothing: DALI's cannot start, and the one with a resident batch ends while it measures."""


def test_a_row_is_measured_by_processes_and_resumed(
    scripts: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = scripts["run"]
    (tmp_path / "arm.py").write_text(ARM_PROGRAM)
    monkeypatch.setattr(run, "ARM_PROGRAM", tmp_path / "arm.py")
    options = run.parsed(["--repeats", "2", "--out", str(tmp_path)])
    row = run.Row("web", tmp_path, ("resident", "gpuflow", "dali", "engines"), ("resnet18", "alone"))
    log = run.Log(tmp_path / "log")
    failures = run.measure_row(row, options, log)
    assert len(failures) == 2
    assert failures[0].startswith("web: dali: cannot start")
    assert failures[1].startswith("web: resident, resnet18: its process ended with 3")
    expected = {("web", "gpuflow", name, n) for name in ("resnet18", "alone") for n in (0, 1)}
    expected |= {("web", "engines", "alone", n) for n in (0, 1)}
    assert run.done(log) == expected
    assert log.records[0]["setting"] == "batch=256, 1.5 s, fake"
    assert "web            resnet18           gpuflow                 10 images/s" in capsys.readouterr().out

    log.discard(lambda old: old["arm"] == "gpuflow" and old["workload"] == "alone" and old["repeat"] == 1)
    row = run.Row("web", tmp_path, ("gpuflow", "engines"), ("resnet18", "alone"))
    assert run.measure_row(row, options, log) == []
    assert run.done(log) == expected
    assert len(log.records) == len(expected), "only what was missing was measured again"
    assert run.choice_of(log, "web", "gpuflow") == {"load": 1}


def test_an_arm_that_does_not_answer_is_killed(
    scripts: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = scripts["run"]
    (tmp_path / "arm.py").write_text("import time\ntime.sleep(1000)\n")
    monkeypatch.setattr(run, "ARM_PROGRAM", tmp_path / "arm.py")
    monkeypatch.setattr(run, "LIMIT_SECONDS", 0.1)
    options = run.parsed(["--repeats", "2", "--out", str(tmp_path)])
    row = run.Row("web", tmp_path, ("gpuflow",), ("alone",))
    failures = run.measure_row(row, options, run.Log(tmp_path / "log"))
    assert failures == ["web: gpuflow: did not answer within 0.1 s to its job"]


def test_workloads_of_a_row(scripts: dict[str, Any]) -> None:
    run = scripts["run"]
    arms = ("resident", "engines", "dali")
    row = run.row_of("web", run.parsed([]), arms)
    assert row.folder == Path("/dev/shm/real/web")
    trainings = (*run.TRAININGS, run.COMPILED)
    assert [row.workloads_of(arm) for arm in arms] == [trainings, ("alone",), (*trainings, "alone")]
    assert run.row_of("sizes", run.parsed([]), arms).workloads == ("resnet18", "resnet50", "alone")
    chosen = run.row_of("mine", run.parsed(["--workloads", "alone", "compiled_resnet18"]), arms)
    assert chosen.workloads == ("compiled_resnet18", "alone")


@pytest.mark.slow
def test_the_script_measures_a_loader_on_the_cpu(
    scripts: dict[str, Any],
    picture: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["--device", "cpu", "--rows", "same", "--arms", "gpuflow", "dali", "--workloads", "alone", "--batch", "4"]
    words += ["--seconds", "0.1", "--warm-up", "0.1", "--repeats", "2", "--count", "8", "--names", "2"]
    words += ["--from", str(picture), "--photos", str(tmp_path / "photos"), "--out", str(tmp_path), "--set"]
    monkeypatch.setattr(sys, "argv", [str(HERE / "run.py"), "--resume", *words, "run.processes=0"])
    for printed in (2, 0):  # the second start finds nothing to measure
        scripts["run"].main()
        assert capsys.readouterr().out.count("images/s") == printed
        with (tmp_path / "results.csv").open(newline="") as file:
            [row] = [row for row in csv.DictReader(file) if row["metric"] == "images_per_s"]
        assert (row["arm"], row["workload"], row["repeats"]) == ("gpuflow", "same; alone", "2")
        assert row["setting"] == "batch=4, 0.1 s, run.processes=0"
        assert "experiments/real_data/run.py --resume" in row["command"]


def test_settings_are_keys_constants_and_variables(scripts: dict[str, Any]) -> None:
    compare = scripts["compare"]
    assert compare.setting_of("base") == compare.Setting("base")
    setting = compare.setting_of("x:run.prefetch=1,gpuflow.loader.lowering._OFFLOADED_AHEAD=3,OMP_NUM_THREADS=1")
    assert setting.keys == ["run.prefetch=1"]
    assert setting.constants == {"gpuflow.loader.lowering._OFFLOADED_AHEAD": "3"}
    assert setting.environment == {"OMP_NUM_THREADS": "1"}
    with pytest.raises(SystemExit, match=r"'run\.prefetch' must be KEY=VALUE"):
        compare.setting_of("x:run.prefetch")


def test_a_constant_gets_another_value(scripts: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    set_constant = scripts["arms"].set_constant
    monkeypatch.setattr(lowering, "_OFFLOADED_AHEAD", 8)
    set_constant("gpuflow.loader.lowering._OFFLOADED_AHEAD", "3")
    assert lowering._OFFLOADED_AHEAD == 3
    with pytest.raises(AttributeError, match="_OFFLOADED"):
        set_constant("gpuflow.loader.lowering._OFFLOADED", "3")


def test_settings_are_compared_in_turns(
    scripts: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program = ARM_PROGRAM.replace("count * 10.0", "count * 10.0 * int(os.environ.get('FACTOR', '1'))")
    (tmp_path / "arm.py").write_text(f"import os\n{program}")
    monkeypatch.setattr(scripts["run"], "ARM_PROGRAM", tmp_path / "arm.py")
    words = [str(tmp_path), "base", "more:FACTOR=7", "--workloads", "alone", "--repeats", "3"]
    scripts["compare"].main(words)
    printed = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in printed[:6]] == ["base", "more", "more", "base", "base", "more"]
    assert [" ".join(line.split()) for line in printed[6:]] == [
        "alone base 20 (10, 20, 30)",
        "alone more 140 (70, 140, 210)",
    ]
    scripts["compare"].main([*words, "--repeats", "2", "--processes", "2"])
    printed = capsys.readouterr().out.splitlines()
    assert Counter(line.split()[1] for line in printed[:8]) == dict.fromkeys(["base", "more", "base/2", "more/2"], 2)
    assert [" ".join(line.split()) for line in printed[8:]] == [
        "alone base 15 (10, 20; 10, 20)",
        "alone more 105 (70, 140; 70, 140)",
    ]
    with pytest.raises(SystemExit, match="names must differ, got base, base"):
        scripts["compare"].main([str(tmp_path), "base", "base"])


class CountingLoader:
    """Counts the calls of `next`: of 4 images, the engines decode 3."""

    dtype = torch.float32

    def __init__(self, seen: list[str]) -> None:
        self._seen, self._count, self._closed = seen, 0, False

    def next(self) -> tuple[Any, Any]:
        self._seen.append("batch")
        self._count += 1
        return None, None

    def is_started(self) -> bool:
        return self._count >= 20

    def is_warm(self) -> bool:
        return self._count >= 30

    def counts(self) -> dict[str, float]:
        return {"engine_images": 3 * self._count, "cpu_images": self._count}

    def close(self) -> None:
        self._seen.append("closed")


def test_a_training_is_measured_on_a_resident_batch_and_fed(
    scripts: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    arms, seen = scripts["arms"], list[str]()

    class Training:
        def __init__(self, model: str, meter: Any, dtype: torch.dtype) -> None:
            seen.append(f"{model} {dtype}")

        def resident_step(self) -> None:
            seen.append("resident")

        def fed_step(self, loader: CountingLoader) -> None:
            loader.next()

    monkeypatch.setattr(arms, "Training", Training)
    monkeypatch.setattr(arms, "WARM_SECONDS", 0.0)
    job = {"warm_up": 0.0, "first_epoch": False}
    meter = arms.Meter("cpu", 4, 0.01)
    arm = arms.TrainingArm(job, meter, CountingLoader(seen), {})
    arm.prepare("resnet18")
    assert seen[:9] == ["resnet18 torch.float32", *["resident"] * 8], "the training's memory comes before the loader's"
    assert seen[9:] == ["batch"] * 30, "until the loader's processes have started, and its first epoch is over"
    del seen[:]
    metrics = arm.measure("resnet18")
    assert seen == sorted(seen, reverse=True), "first resident, then fed"
    assert metrics["step_ratio"] == metrics["images_per_s"] / metrics["resident_images_per_s"]
    assert metrics["engine_share"] == 0.75
    assert set(metrics) <= set(scripts["run"].UNITS)
    arm.prepare("alone")
    assert set(arm.measure("alone")) == {"images_per_s", "cpu_s_per_1000", "engine_share"}
    arm.close()
    assert seen[-1] == "closed"

    del seen[:]
    arms.TrainingArm({**job, "first_epoch": True}, meter, CountingLoader(seen), {}).prepare("alone")
    assert seen == ["batch"] * 20

    arm = arms.TrainingArm(job, meter, None, {})
    arm.prepare("resnet50")
    assert set(arm.measure("resnet50")) == {"images_per_s", "cpu_s_per_1000"}
    arm.close()


def test_parts_of_the_loaders_work_are_timed_in_all_threads(
    scripts: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    script = scripts["next_to_training"]
    before = {place: pydoc.locate(place) for place in script.PARTS}
    assert all(callable(function) for function in before.values())
    monkeypatch.setattr("gpuflow.execute.gpu.runner.GpuRunner.launch", lambda runner: time.sleep(0.01))
    launch, parts = GpuRunner.launch, script.Parts()
    runner: Any = object.__new__(GpuRunner)
    with parts.timed():
        runner.launch()
        thread = threading.Thread(target=lambda: runner.launch())
        thread.start()
        thread.join()
    assert GpuRunner.launch is launch, "all is as it was"
    (line,) = parts.lines(batches=4)
    assert line.split()[:3] == ["launch", "0.50", "a"]
    for span, computing in parts.spans["launch"]:
        assert span > 9 > computing, "it sleeps"


def test_gaps_between_a_trainings_kernels_have_a_cause(scripts: dict[str, Any]) -> None:
    def kernel(start: float, duration: float, stream: int, call: int, name: str = "step") -> dict[str, Any]:
        ids = {"stream": stream, "correlation": call}
        return {"cat": "kernel", "name": name, "ts": start, "dur": duration, "args": ids}

    calls = [(0, 1), (5, 2), (1500, 3), (1501, 4), (10, 5)]
    events = [
        {"cat": "cuda_runtime", "name": "launch", "ts": ts, "dur": 400, "tid": call // 5, "args": {"correlation": call}}
        for ts, call in calls
    ]
    events += [
        kernel(10, 90, 7, 1),
        kernel(110, 890, 7, 2),  # 10 us after the one before it, asked for long before
        kernel(1510, 490, 7, 3),  # asked for 500 us after the end of the one before it
        kernel(2000, 1000, 7, 4),
        kernel(200, 300, 9, 5, "convert"),
    ]
    found = scripts["gpu_time"].milliseconds_of(events, steps=2)
    assert found == pytest.approx(
        {
            "all": 1.495,
            "long gaps, queued late": 0.255,
            "other streams: convert": 0.15,
            "short gaps, held up": 0.005,
            "the training's kernels": 1.235,
        }
    )
    lines = list(scripts["gpu_time"].calls_by_thread(events, steps=2))
    assert [" ".join(line.split()) for line in lines] == [
        "a thread of the training: 2 calls a step, 0.80 ms",
        "launch 2.0 0.80 ms, longest 0.40",
        "another thread: 0 calls a step, 0.20 ms",
        "launch 0.5 0.20 ms, longest 0.40",
    ]


# --- the engines and DALI ---------------------------------------------------------------------------------------------


def test_calls_have_one_sampling_and_all_files_in_proportion(scripts: dict[str, Any]) -> None:
    engines = scripts["engines"]
    samplings = np.repeat([0x22, 0x11, 0x21], [400, 75, 25])
    sizes = np.random.default_rng(0).integers(80, 3000, (500, 2))
    none = np.zeros(0, np.uint8)
    files = engines.Files(none, np.arange(500), np.ones(500, np.int64), sizes, samplings, 7)
    calls = engines.calls_of(files, size=32, by_pixels=False)
    assert {len(call) for call in calls} == {32}
    assert all(len(set(samplings[call])) == 1 for call in calls)
    found = Counter(samplings[np.concatenate(calls)].tolist())
    for sampling, share in ((0x22, 0.8), (0x11, 0.15), (0x21, 0.05)):
        assert found[sampling] / sum(found.values()) == pytest.approx(share, abs=0.01)
    assert set(np.concatenate(calls).tolist()) == set(range(500))
    ordered = engines.calls_of(files, size=32, by_pixels=True)
    assert [sorted(call) for call in ordered] == [sorted(call) for call in calls]
    assert all((np.diff(sizes[call].prod(axis=1)) <= 0).all() for call in ordered)


def test_files_for_the_engines(scripts: dict[str, Any], picture: Path, tmp_path: Path) -> None:
    photos, engines = scripts["photos"], scripts["engines"]
    with Image.open(picture / "own.png") as image:
        for number, kind in enumerate(
            (photos.Kind(), photos.Kind(progressive=1), photos.Kind(png=1), photos.Kind(gray=1))
        ):
            plan = photos.plan(kind, 0, number)
            (tmp_path / f"{number}.jpg").write_bytes(
                photos.encode(image.convert("RGB"), plan, np.random.default_rng(0))
            )
    (tmp_path / "damaged.jpg").write_bytes(b"\xff\xd8\xff")
    (tmp_path / "1_again.jpg").hardlink_to(tmp_path / "1.jpg")
    (tmp_path / ".marker").write_text("")
    paths = engines.distinct_files(tmp_path)
    assert len(paths) == 5
    files = engines.read_files(paths)
    assert files.samplings.tolist() == [0x22, 0]
    assert files.refused == 3
    for place, name in enumerate(("0.jpg", "3.jpg")):
        start, length = int(files.starts[place]), int(files.lengths[place])
        assert files.data[start : start + length].tobytes() == (tmp_path / name).read_bytes()
        assert start % 16 == 0


def test_callers_share_the_calls(scripts: dict[str, Any]) -> None:
    taken: list[int] = []
    calls = [np.arange(number + 1) for number in range(3)]
    rate = scripts["engines"].call_rate([lambda call: taken.append(len(call))] * 2, calls, 0.05)
    assert rate > 0
    counts = Counter(taken)
    assert max(counts.values()) - min(counts.values()) <= 1


def test_arguments_of_a_call(scripts: dict[str, Any]) -> None:
    engines = scripts["engines"]
    contents = [np.full(size, size, np.uint8) for size in (5, 16, 17)]
    sizes = np.array([[10, 10], [1, 7], [20, 30]])
    files = engines.placed(contents, sizes, np.array([0x22, 0, 0x11]), 4)
    assert files.starts.tolist() == [0, 16, 32]
    data, lengths, images = engines.arguments(files, 1000, 4096, np.array([2, 0, 0]))
    assert data.tolist() == [1032, 1000, 1000]
    assert lengths.tolist() == [17, 5, 5]
    assert images[:, 0].tolist() == [4096, 4096 + 2048, 4096 + 2048 + 512], "1800 and 300 bytes in steps of 256"
    assert images[:, 4].tolist() == [90, 30, 30]
    assert {array.dtype for array in (data, lengths, images)} == {np.dtype(np.uint64)}


MIX = {0x22: 700, 0x11: 150, 0x21: 50}


@pytest.fixture(scope="module")
def mixed(scripts: dict[str, Any]) -> Any:
    """900 photographs of three samplings. The content of each is its number."""
    samplings = np.repeat(list(MIX), list(MIX.values()))
    sizes = np.random.default_rng(0).integers(80, 3000, (len(samplings), 2))
    contents = [np.frombuffer(number.to_bytes(2), np.uint8) for number in range(len(samplings))]
    return scripts["calls"].Photographs(scripts["engines"].placed(contents, sizes, samplings, 0))


def test_photographs_are_shuffled_with_their_sizes_and_samplings(scripts: dict[str, Any], mixed: Any) -> None:
    files = mixed.files
    sizes = np.random.default_rng(0).integers(80, 3000, (900, 2))
    numbers = [int.from_bytes(files.data[start : start + 2].tobytes()) for start in files.starts[:900]]
    assert sorted(numbers) == list(range(900)) != numbers
    assert np.array_equal(files.sizes[:900], sizes[numbers])
    assert np.array_equal(files.samplings[:900], np.repeat(list(MIX), list(MIX.values()))[numbers])
    assert mixed.samplings == list(MIX)
    for number, sampling in enumerate(MIX, 900):
        blank = files.data[files.starts[number] : files.starts[number] + files.lengths[number]]
        header = probe(blank)
        assert (header.size, engine_sampling(blank)) == ((16, 16), sampling)
        assert files.sizes[number].tolist() == [16, 16]


@pytest.mark.parametrize("chunks", [1, 2, 4])
def test_calls_of_windows_have_each_file_once(chunks: int, scripts: dict[str, Any], mixed: Any) -> None:
    calls, pixels = scripts["calls"], mixed.files.sizes.prod(axis=1)
    taken: dict[str, list[set[int]]] = {}
    for order, fill in itertools.product(calls.ORDERS, calls.FILLS):
        made = calls.calls_of_windows(mixed, mixed.all, chunks=chunks, order=order, fill=fill)
        found = [call.files[: call.images] for call in made]
        assert sorted(np.concatenate(found).tolist()) == list(range(900))
        assert all(len(set(mixed.files.samplings[call.files])) == 1 for call in made)
        assert all((call.files[call.images :] >= 900).all() for call in made)
        assert all(len({number // (chunks * 256) for number in files.tolist()}) == 1 for files in found)
        if order != "in order":
            assert all((np.diff(pixels[files]) <= 0).all() for files in found)
        sizes: dict[Any, set[int]] = {}
        for call in made:
            sizes.setdefault(call.state, set()).add(len(call.files))
        if fill == "not filled":
            assert list(sizes) == [0]
        else:
            assert all(len(found) == 1 for found in sizes.values()), "a state has calls of one size"
            assert {n for found in sizes.values() for n in found} <= set(calls.CALL_SIZES)
            assert fill != "filled to 128" or len(sizes) == 3
        taken.setdefault(order, [set(files.tolist()) for files in found])
    assert taken["in order"] == taken["descending"] != taken["by size"]


def test_parts_measure_calls_that_hold_their_files(
    scripts: dict[str, Any], mixed: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    calls, names = scripts["calls"], list[str]()
    for part in calls.ENGINE_PARTS.values():
        for name, cycle in part(mixed):
            names.append(name)
            assert all(call.images <= len(call.files) for call in cycle)
            assert max(call.files.max() for call in cycle) < len(mixed.files.starts)
    assert len(names) == len(set(names))
    assert {"calls of 256", "7 photographs and 121 fillers", "4:2:0 and 4:4:4 alternating, one state"} <= set(names)
    assert "windows of 4x256, by size, 9 calls" in names
    alone = calls.Photographs(
        scripts["engines"].placed([np.zeros(3, np.uint8)] * 9, np.full((9, 2), 64), np.full(9, 0x22), 0)
    )
    assert [name for name, _ in calls.samplings_part(alone)] == ["only 4:2:0, calls of 128"]

    seen: list[int] = []
    lines = [("some", [*calls.plain([np.arange(3)]), mixed.filled(0x11, mixed.first(0x11, 2), 8, 0)])]
    calls.measure(lines, lambda cycle: lambda: seen.append(len(cycle)), mixed.files, 0.0)
    assert seen == [2, 2], "once before the measurement, once in it"
    assert "some" in (printed := capsys.readouterr().out) and "images/s" in printed


def test_progressive_files_on_the_cpu(scripts: dict[str, Any], picture: Path, tmp_path: Path) -> None:
    photos, engines, calls = scripts["photos"], scripts["engines"], scripts["calls"]
    with Image.open(picture / "own.png") as image:
        source = image.convert("RGB")
    kinds = (photos.Kind(), photos.Kind(progressive=1), photos.Kind(png=1), photos.Kind(progressive=1, cmyk=1))
    for number, kind in enumerate(kinds):
        data = photos.encode(source, photos.plan(kind, 0, number), np.random.default_rng(0))
        (tmp_path / f"{number}.jpg").write_bytes(data)
    files = engines.read_files(engines.distinct_files(tmp_path), calls.sampling_or_progressive)
    assert files.samplings.tolist() == [0x22, calls.PROGRESSIVE]
    assert {name: found.tolist() for name, found in calls.by_format(files).items()} == {
        "progressive": [1],
        "baseline": [0],
    }
    contents = calls.contents_of(files, np.arange(2))
    images = [calls.on_the_cpu(data) for data in contents]
    assert [image.shape[:2] for image in images] == [tuple(size) for size in files.sizes.tolist()]
    assert calls.largest_difference(images, contents) == 0
    changed = images[0].copy()
    changed[0, 0, 0] ^= 4
    assert calls.largest_difference([changed], contents[:1]) == 4
    assert [len(cycle[0].files) for _, cycle in calls.cuda_lines(files, "cuda")] == [8, 32, 49, 50, 64, 128] * 2
    assert calls.cpu_rate(contents, 2, 0.01) > 0


def test_parts_are_chosen_by_name(scripts: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    calls = scripts["calls"]
    assert calls.parsed(["x"]).parts == list(calls.PARTS)
    assert calls.parsed(["x", "windows", "cuda"]).parts == ["windows", "cuda"]
    with pytest.raises(SystemExit):
        calls.parsed(["x", "window"])
    assert "got window; did you mean 'windows'?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("bad", "most_tries"), [({"k0", "k1", "k2"}, 12), ({"j7"}, 20), (set[str](), 4), ({"j0", "j9"}, 30)]
)
def test_files_that_dali_does_not_decode_are_found(
    bad: set[str], most_tries: int, scripts: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    dali, tries = scripts["dali_loader"], list[int]()
    paths = [Path(f"j{n}") for n in range(20)] + [Path(f"k{n}") for n in range(3)]
    monkeypatch.setattr(dali, "kind_of", lambda path: path.name[0])

    def decodes(some: Sequence[Path]) -> bool:
        tries.append(len(some))
        return not any(path.name in bad for path in some)

    good, refused = dali.without_unreadable(paths, decodes)
    assert {path.name for path in refused} == bad
    assert [*good, *refused] == sorted(paths, key=lambda path: (path.name in bad, paths.index(path)))
    assert len(tries) <= most_tries


def test_dali_gets_the_names_that_it_decodes_with_their_labels(
    scripts: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dali = scripts["dali_loader"]
    for name in ("b/1.jpg", "b/2.jpg", "a/3.jpg"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("no image")
    (tmp_path / "b" / "2_01.jpg").hardlink_to(tmp_path / "b" / "2.jpg")
    monkeypatch.setattr(dali, "decodes", lambda paths: not any(path.name.startswith("2") for path in paths))
    files, labels, left_out = dali.readable(tmp_path)
    assert dict(zip(files, labels, strict=True)) == {str(tmp_path / "a/3.jpg"): 0, str(tmp_path / "b/1.jpg"): 1}
    assert left_out == 2


def test_what_progressive_photographs_cost_is_printed_and_written(
    scripts: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for number, progressive in enumerate((True, False, True)):
        (tmp_path / f"{number}.jpg").write_bytes(
            images.jpeg(images.photo(40, 60, seed=number), progressive=progressive)
        )
    out, threads = tmp_path / "out.csv", torch.get_num_threads()
    monkeypatch.setattr(sys, "argv", ["rewriting.py", str(tmp_path), "--repeats", "2", "--out", str(out)])
    scripts["rewriting"].main()
    torch.set_num_threads(threads)
    assert capsys.readouterr().out.count(" ms an image") == 3
    with out.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["arm"] for row in rows] == ["decoded", "preprocessed", "rewritten"]
    assert all(row["workload"].startswith("2 progressive JPEGs") and float(row["value"]) > 0 for row in rows)
    (tmp_path / "0.jpg").unlink()
    (tmp_path / "2.jpg").unlink()
    with pytest.raises(SystemExit) as end:
        scripts["rewriting"].main()
    torch.set_num_threads(threads)
    assert end.value.code == 2
    assert "has no progressive JPEGs; photos.py makes them" in capsys.readouterr().err


@pytest.mark.slow
def test_a_loader_in_another_process_paces_a_training(
    scripts: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a model of one layer: on a processor, each step of torchvision's takes a second in bfloat16."""

    def tiny() -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.AvgPool2d(56), torch.nn.Flatten(), torch.nn.Linear(48, 1000))

    make_photos(tmp_path / "photos", classes=2, each=4)
    monkeypatch.setattr("torchvision.models.tiny", tiny, raising=False)
    monkeypatch.setattr(scripts["other_process"], "RESIDENT_SECONDS", 0.05)
    monkeypatch.setattr(scripts["arms"], "WARM_SECONDS", 0.0)
    words = [str(tmp_path / "photos"), "--device", "cpu", "--model", "tiny", "--batch", "2"]
    scripts["other_process"].main([*words, "--repeats", "1", "--seconds", "0.1"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["paced by another process", "fed by this process"]
