"""The command line: help, exit codes, what goes to stdout, and Ctrl-C."""

from __future__ import annotations

import errno
import importlib.metadata
import json
import os
import platform
import re
import resource
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from textwrap import indent
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

from gpuflow.cli import app
from gpuflow.errors import ExitCode, SystemFault
from tests.commands import REFERENCE, Run, command_here, document_of, documented
from tests.datasets import deadline, make_photos, truncate, write_config
from tests.forking import Interpreter
from tests.images import encode, photo

COMMANDS = [
    *(
        "samples",
        "check",
        "import",
        "schema",
        "explain",
        "show",
        "split",
        "doctor",
        "predict",
        "evaluate",
        "train",
        "audit",
        "bench",
        "scan",
        "export",
        "parity",
    ),
    *("serve", "load-test"),
]
ROOT = Path(__file__).parents[1]
MAIN = "from gpuflow.cli import main; main()"


@pytest.fixture(autouse=True)
def _in_time() -> Iterator[None]:
    with deadline(100):
        yield


@pytest.fixture
def gpuflow(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs the console script in this process."""
    return command_here(monkeypatch, capsys)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    make_photos(tmp_path / "photos", classes=3, each=4)
    stages = [{"decode": {}}, {"random_resized_crop": {"size": 24}}, {"normalize": {}}]
    val = [{"decode": {}}, {"resize": {"shorter": 36}}, {"center_crop": {"size": 24}}, {"normalize": {}}]
    fit = {"model": "resnet18", "epochs": 2, "lr": 0.05, "out": str(tmp_path / "run"), "size": 32}
    return write_config(tmp_path / "x.yaml", tmp_path / "photos", train=stages, val=val, fit=fit)


# --- help -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_says_what_it_does(command: str) -> None:
    result = CliRunner().invoke(app, [command, "--help"])
    assert result.exit_code == 0
    words = " ".join(result.output.split())
    assert "Usage:" in words
    assert len(words) > 200


def test_paragraphs_of_the_help_fill_the_width() -> None:
    result = CliRunner(env={"COLUMNS": "80"}).invoke(app, ["import", "--help"])
    paragraph = result.output.partition("module:attribute names")[2].partition("\n" + " " * 80)[0]
    _, *lines, _ = (line.rstrip() for line in paragraph.splitlines())
    assert len(lines) >= 3 and min(map(len, lines)) > 60


def test_the_help_lists_every_command() -> None:
    result = CliRunner().invoke(app, ["--help"])
    assert result.exit_code == 0
    listed = re.findall(r"^│ ([a-z][a-z-]*)  +[A-Z]", result.output, re.MULTILINE)
    assert sorted(listed) == sorted(COMMANDS)


def test_the_help_groups_every_command_by_job() -> None:
    output = CliRunner(env={"COLUMNS": "100"}).invoke(app, ["--help"]).output
    panels = re.findall(r"─ ([A-Z][a-z ]+) ─", output)
    assert panels[0] == "Options" and len(panels) == 6
    assert "Commands" not in panels, "a command needs a job: _command in cli.py"


@pytest.mark.parametrize("command", COMMANDS)
def test_the_example_in_the_help_can_be_called(command: str) -> None:
    group: Any = typer.main.get_command(app)
    words = " ".join(CliRunner(env={"COLUMNS": "200"}).invoke(app, [command, "--help"]).output.split())
    example = re.search(r"Example: (gpuflow .*)", words)
    assert example is not None
    _, name, *arguments = shlex.split(example[1])
    assert name == command
    group.commands[command].make_context(name, arguments)
    files = [word for word in arguments if word.startswith("configs/")]
    assert all((ROOT / file).is_file() for file in files)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="slow in emulation")
def test_the_help_takes_half_a_second_at_most() -> None:
    """Of processor time, the best of three, as other processes may use the cores."""
    seconds = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-m", "gpuflow", "--help"], check=True, capture_output=True, timeout=60)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(seconds) < 0.5


def test_the_version_is_that_of_the_package(gpuflow: Run) -> None:
    done = gpuflow("--version")
    assert (done.code, done.out) == (0, f"gpuflow {importlib.metadata.version('gpuflow')}\n")


def test_an_unknown_command_or_option_exits_2(gpuflow: Run) -> None:
    assert gpuflow("chekc").code == 2
    assert gpuflow("check", "--nothing", "x.yaml").code == 2


def test_the_table_of_exit_codes_is_complete() -> None:
    rows = re.findall(r"^\| (\d+) \| `(\w+)` \|", REFERENCE, flags=re.MULTILINE)
    assert [(int(code), name) for code, name in rows] == [(code.value, code.name) for code in ExitCode]


@pytest.mark.parametrize(
    ("code", "arguments"),
    [
        (ExitCode.DONE, ["check", "x.yaml"]),
        (ExitCode.DONE, ["explain", "x.yaml"]),
        (ExitCode.DONE, ["scan", "x.yaml"]),
        (ExitCode.FAILED, ["check", "x.yaml", "run.threads=0"]),
        (ExitCode.FAILED, ["explain", "x.yaml", "source.folder=nowhere"]),
        (ExitCode.FAILED, ["scan", "x.yaml", "pipelines.train.stages.decode.max_pixels=2000"]),
        (ExitCode.FAILED, ["audit", "nowhere.jsonl"]),
        (ExitCode.USAGE, ["chekc"]),
        (ExitCode.USAGE, ["check"]),
        (ExitCode.USAGE, ["check", "x.yaml", "--nothing"]),
        (ExitCode.USAGE, ["samples", "made", "-n", "0"]),
        (ExitCode.SAVED, ["train", "x.yaml", "--device", "cpu", "train.model=squeezenet1_1"]),
        (ExitCode.INTERRUPTED, ["explain", "x.yaml", "run.threads=3"]),
    ],
    ids=lambda value: " ".join(value[:3]) if isinstance(value, list) else value.name,
)
def test_exit_codes(
    code: ExitCode, arguments: list[str], gpuflow: Run, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(config: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.chdir(config.parent)
    if code is ExitCode.SAVED:
        monkeypatch.setattr("gpuflow.runtime.preemption.Preemption.requested", lambda self: True)
    if code is ExitCode.INTERRUPTED:
        monkeypatch.setattr("gpuflow.tools.explain.explain", interrupt)
    assert gpuflow(*arguments).code == code


# --- JSON -------------------------------------------------------------------------------------------------------------


JSON_COMMANDS = {
    "check": ["--leaks", "source.split={train: 0.5, val: 0.5}"],
    "explain": [],
    "scan": ["pipelines.train.stages.decode.max_pixels=2000"],
    "doctor": [],
    "bench": ["--workers", "1", "--against", "", "--workloads", "batch", "--seconds", "0.1", "--repeats", "1"],
    "parity": ["--images", "1", "--against", "val", "pillow"],
}
JSON_OF_OTHER_TESTS = {"audit", "evaluate", "load-test"}
"""Commands that need a log, a model or a service; their documents are in tests/tools."""


def test_every_command_with_json_is_documented() -> None:
    group: Any = typer.main.get_command(app)
    taking = {
        name for name, command in group.commands.items() if "--json" in {o for p in command.params for o in p.opts}
    }
    assert taking == JSON_OF_OTHER_TESTS | set(JSON_COMMANDS) == {name for name in COMMANDS if documented(name)}


@pytest.mark.parametrize("command", JSON_COMMANDS)
def test_a_document_has_the_documented_keys(
    command: str, gpuflow: Run, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(config.parent)
    document_of(command, gpuflow(command, config, *JSON_COMMANDS[command], "--json"))


def test_figures_of_a_document_are_numbers(gpuflow: Run, config: Path) -> None:
    found = json.loads(gpuflow("explain", config, "--json").out)["pipelines"]
    assert list(found) == ["train", "val"]
    [view] = found["val"]["views"]
    assert (view["name"], view["count"], len(view["stages"])) == ("", 1, 4)
    assert view["stages"][2] == {
        "stage": "center_crop(size=32)",
        "gives": {
            "shape": [32, 32, 3],
            "dtype": "uint8",
            "layout": "hwc",
            "device": "cpu",
            "color": "rgb",
            "shorter": None,
        },
        "runs_as": "2 one resampling",
    }
    assert found["val"]["facts"]["bad_samples"].startswith("skip ")
    document = json.loads(gpuflow("scan", config, "pipelines.train.stages.decode.max_pixels=2000", "--json").out)
    bad = [row["kind"] for row in document["findings"]].count("oversize")
    assert (document["samples"], document["bad"], document["exit_code"]) == (12, bad, 1)
    document = json.loads(gpuflow("check", config, "pipelines.train.shuffle=false", "--json").out)
    assert [note.partition(" ")[0] for note in document["notes"]] == ["pipelines.train"]
    assert document["pipelines"]["train"]["on_error"] == "skip", "as samples are not drawn"


def test_errors_are_in_the_document(gpuflow: Run, config: Path) -> None:
    text = config.read_text().replace("threads: ", "threads: -")
    config.write_text(text)
    line = 1 + next(i for i, one in enumerate(text.splitlines()) if "threads: -" in one)
    done = gpuflow("check", config, "--json", "source.folder=[1]")
    document = json.loads(done.out)
    assert (done.code, set(document)) == (1, documented("all"))
    first, second = document["errors"]
    assert set(first) == documented("errors")
    assert (first["place"], first["path"], first["line"]) == (f"{config}:{line}", "run.threads", line)
    assert (first["code"], first["value"]) == ("config.range", -2)
    assert (second["place"], second["path"], second["line"]) == ("override 'source.folder=[1]'", "source.folder", None)
    assert (second["code"], second["value"]) == ("config.type", [1])
    assert done.err == f"error: {first['text']}\nerror: {second['text']}\n"


@pytest.mark.parametrize(
    ("arguments", "exit_code", "code", "place"),
    [
        (["bench", "x.yaml", "--workers", "0"], 1, "config.range", "--workers"),
        (["scan", "x.yaml", "source.folder=nowhere"], 1, "SourceError", ""),
        (["check", "y.yaml"], 1, "config.file", "y.yaml"),
        (["check", "x.yaml", "--nothing"], 2, "usage", ""),
        (["explain"], 2, "usage", ""),
    ],
)
def test_a_command_that_fails_prints_one_document(
    arguments: list[str],
    exit_code: int,
    code: str,
    place: str,
    gpuflow: Run,
    config: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(config.parent)
    done = gpuflow(*arguments, "--json")
    document = json.loads(done.out)
    assert set(document) == documented("all")
    assert (done.code, document["exit_code"]) == (exit_code, exit_code)
    [error] = document["errors"]
    assert (error["code"], error["place"]) == (code, place) and error["text"]


def test_what_was_found_before_an_error_is_in_the_document(gpuflow: Run, config: Path) -> None:
    done = gpuflow("explain", config, "source.folder=/nowhere", "--json")
    document = json.loads(done.out)
    assert (done.code, document["exit_code"], len(document["errors"])) == (1, 1, 1)
    assert list(document["pipelines"]) == ["train", "val"]
    assert document["errors"][0]["text"] in done.err
    assert "bad samples" in gpuflow("explain", config, "source.folder=/nowhere").out


def test_a_document_holds_no_password(gpuflow: Run, config: Path) -> None:
    done = gpuflow("check", config, "source.folder=[http://me:secret@host/]", "--json")
    assert json.loads(done.out)["errors"][0]["value"] == ["http://***@host/"]
    assert "secret" not in done.out.replace("source.folder=[http://me:***@host/]", "")


NO_TORCH = """
import json, sys
from gpuflow.cli import main
commands = json.loads(sys.argv[1])
for sys.argv[1:] in commands:
    try:
        main()
    except SystemExit:
        assert "torch" not in sys.modules, sys.argv
    else:
        raise AssertionError("main returned")
"""


def test_these_need_no_torch() -> None:
    """It takes most of the time of a command that only reads text."""
    commands = [["train", "--help"], ["check", str(ROOT / "configs/demo.yaml")], ["schema"], ["audit", "missing"]]
    command = [sys.executable, "-c", NO_TORCH, json.dumps(commands)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr


def test_a_warning_is_one_line() -> None:
    code = (
        "import warnings; from gpuflow import cli\n"
        "def app():\n"
        "    warnings.warn('2 of 16 samples are bad so far')\n"
        "    warnings.warn_explicit('of gpuflow', UserWarning, cli.__file__, 1)\n"
        "cli.app = app; cli.main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stderr == "<string>:3: UserWarning: 2 of 16 samples are bad so far\nwarning: of gpuflow\n"


# --- check and explain ------------------------------------------------------------------------------------------------


def test_check_of_a_valid_file(gpuflow: Run, config: Path) -> None:
    done = gpuflow("check", config)
    assert done.code == 0
    assert done.err == ""
    assert done.out.splitlines() == [
        "train: decode() -> random_resized_crop(size=32) -> normalize()  gives float32 32x32x3 nchw",
        "val: decode() -> resize(shorter=36) -> center_crop(size=32) -> normalize()  gives float32 32x32x3 nchw",
        "train: on_error replace (by default, as samples are drawn)",
        "val: on_error skip (by default, as samples are not drawn and batch.drop_last is false)",
        f"valid: {config}",
    ]


def test_commands_of_a_file_with_serve_alone(gpuflow: Run, tmp_path: Path) -> None:
    """Those that need a source say so."""
    path = tmp_path / "x.yaml"
    path.write_text("serve: {stages: [{decode: {}}, {resize: {height: 4, width: 4}}], model: {file: m.onnx}}\n")
    for command in (["check"], ["explain"], ["export", "--toml", str(tmp_path / "x.toml")]):
        done = gpuflow(command[0], path, *command[1:])
        assert (done.code, done.err) == (0, ""), command
    missing = f"error: {path}: has no block source; add source: {{folder: ...}} and pipelines: {{val: ...}}\n"
    for needs in ("train", "bench", "scan", "parity", "show"):
        done = gpuflow(needs, path, *(["--out", str(tmp_path / "out")] if needs in ("bench", "parity", "show") else []))
        assert (done.code, done.err.removeprefix("\n")) == (1, missing), needs


def test_check_says_that_the_source_is_not_here(gpuflow: Run, config: Path) -> None:
    for given, hint in (("$HOME/photos", "variables such as $HOME are not replaced"), ("/no/photos", "check the path")):
        done = gpuflow("check", config, f"source.folder={given}")
        assert done.code == 0
        assert f"note: the source is not on this machine: '{given}'; {hint}" in done.out


def test_check_reads_a_file_of_weights(gpuflow: Run, config: Path, tmp_path: Path) -> None:
    file = tmp_path / "weights.txt"
    override = f"source.weights.file={file}"
    done = gpuflow("check", config, override)
    assert done.code == 0
    assert f"note: source.weights.file is not on this machine: '{file}'" in done.out
    for text, rule in (
        ("1\nx\n", f"{file}:2: must be a number, got 'x'; correct it"),
        ("1\n-1\n", f"{file}:2: the weight of sample 1 must be a finite number >= 0, got -1; correct it"),
        ("0\n0\n", f"{file}: at least one weight must be above 0, got zeros alone; correct them"),
    ):
        file.write_text(text)
        done = gpuflow("check", config, override)
        assert (done.code, done.err) == (1, f"error: {config}: source.weights: {rule}\n")
    file.write_text("1\n2\n")  # how many samples the source has is not known
    done = gpuflow("check", config, override)
    assert done.code == 0
    assert "source.weights" not in done.out


def test_check_lists_every_error_with_its_line(gpuflow: Run, tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(
        "source: {folder: photos}\n"
        "pipelines:\n"
        "  train:\n"
        "    stages:\n"
        "      - decode: {}\n"
        "      - resise: {shorter: 32}\n"
        "      - center_crop: {size: 0}\n"
        "    batch: {size: 4}\n"
    )
    done = gpuflow("check", path)
    assert done.code == 1
    assert done.out == ""
    assert done.err.splitlines() == [
        f"error: {path}:6: pipelines.train.stages[1].resise is not a stage; did you mean 'resize'?",
        f"error: {path}:7: pipelines.train.stages[2].center_crop.size must be >= 1, got 0",
    ]


def test_check_of_an_override(gpuflow: Run, config: Path) -> None:
    assert gpuflow("check", config, "run.threads=3").code == 0
    done = gpuflow("check", config, "run.threads=0")
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith("error: override 'run.threads=0': run.threads must be ")


def test_check_of_a_file_that_is_not_there(gpuflow: Run, config: Path) -> None:
    done = gpuflow("check", config.with_name("y.yaml"))
    assert done.code == 1
    assert done.err == f"error: {config.with_name('y.yaml')}: no such file; did you mean '{config}'?\n"


@pytest.mark.parametrize("name", ["t[new].yaml", "t[/red].yaml", "t\\[new].yaml", "[red]t[/].yaml"])
def test_brackets_in_file_names_are_text_not_markup(gpuflow: Run, config: Path, name: str) -> None:
    named = config.parent / name  # some are in a folder of their own
    named.parent.mkdir(exist_ok=True)
    named.write_bytes(config.read_bytes())
    assert gpuflow("check", named).out.splitlines()[-1] == f"valid: {named}"
    assert gpuflow("show", named, "-n", 1, "--out", f"{named}.html").out == f"wrote {named}.html: 1 samples of train\n"
    named.unlink()
    assert gpuflow("check", named).err.startswith(f"error: {named}: no such file")


def test_brackets_in_errors_are_text_not_markup(gpuflow: Run, config: Path) -> None:
    done = gpuflow("check", config, "source.folder=[red]")
    assert done.code == 1
    assert "[red]" in done.err or "['red']" in done.err


def test_explain_says_what_runs(gpuflow: Run, config: Path) -> None:
    done = gpuflow("explain", config)
    assert (done.code, done.err) == (0, "")
    for word in (
        "one resampling",
        "pixel by pixel",
        "12 samples, 3 classes",
        "decode thread(s)",
        "decoder",
        "shuffled",
    ):
        assert word in done.out


# --- samples and scan -------------------------------------------------------------------------------------------------


def test_samples_makes_what_is_asked_for(gpuflow: Run, tmp_path: Path) -> None:
    done = gpuflow("samples", tmp_path / "made", "-n", 3)
    assert done.code == 0
    assert done.out.startswith(f"{tmp_path / 'made'}: 3 images, ")
    assert len(list((tmp_path / "made").rglob("*.jpg"))) == 3


def test_samples_makes_shapes_for_detection(gpuflow: Run, tmp_path: Path) -> None:
    done = gpuflow("samples", tmp_path / "made", "-n", 3, "--kind", "detection")
    assert done.code == 0 and "3 images, 3 classes" in done.out
    made = sorted(path.name for path in (tmp_path / "made").iterdir() if not path.name.startswith("."))
    assert made == ["images", "instances.json", "listing.jsonl", "masks"]


def test_samples_refuses_a_directory_of_something_else(gpuflow: Run, config: Path) -> None:
    done = gpuflow("samples", config.parent, "-n", 3)
    assert (done.code, done.out) == (1, "")
    assert f"\nerror: {config.parent} must be absent, empty or " in done.err


def test_scan_of_a_clean_source(gpuflow: Run, config: Path) -> None:
    done = gpuflow("scan", config)
    assert (done.code, done.out) == (0, "")
    assert "12 samples, 0 bad" in done.err


def test_scan_of_a_source_that_is_not_there(gpuflow: Run, config: Path) -> None:
    done = gpuflow("scan", config, "source.folder=/nowhere")
    assert done.code == 1
    assert done.err.startswith(f"error: {config}: source.folder must be a directory, got '/nowhere'")


def test_scan_lists_findings_as_json_lines(gpuflow: Run, config: Path) -> None:
    files = sorted((config.parent / "photos").rglob("*.jpg"))
    truncate(files[4])
    files[7].write_bytes(b"")
    files[9].rename(files[9].with_suffix(".png"))
    done = gpuflow("scan", config)
    assert done.code == 1
    found = [json.loads(line) for line in done.out.splitlines()]
    assert [(row["index"], row["kind"], row["bad"]) for row in found] == [
        (4, "corrupt", True),
        (7, "unreadable", True),
        (9, "misnamed", False),
    ]
    assert list(found[0]) == ["index", "path", "kind", "bad", "reason"]
    assert found[1]["path"] == str(files[7])
    assert "12 samples, 2 bad" in done.err


def test_scan_says_which_formats_to_name(gpuflow: Run, config: Path) -> None:
    for file, form in zip(sorted((config.parent / "photos").rglob("*.jpg")), ("TIFF", "TIFF", "GIF"), strict=False):
        file.write_bytes(encode(photo(60, 70), form))
    done = gpuflow("scan", config)
    assert [json.loads(line).get("needs") for line in done.out.splitlines()] == ["tiff", "tiff", "gif"]
    text = "decode: {formats: [gif, tiff]} has them decoded, with pip install 'gpuflow[formats]'"
    assert f"1 gif, 2 tiff: {text}" in done.err
    assert gpuflow("scan", config, "pipelines.train.stages.decode.formats=[gif, tiff]").code == 0


def test_scan_counts_odd_samples_as_sound_and_heeds_max_pixels(gpuflow: Run, config: Path) -> None:
    file = min((config.parent / "photos").rglob("*.jpg"))
    file.rename(file.with_suffix(".bmp"))
    assert gpuflow("scan", config).code == 0
    done = gpuflow("scan", config, "pipelines.train.stages.decode.max_pixels=2000")
    assert done.code == 1
    assert {json.loads(line)["kind"] for line in done.out.splitlines()} >= {"oversize"}


# --- train ------------------------------------------------------------------------------------------------------------


def final_weights(config: Path) -> dict[str, torch.Tensor]:
    state = torch.load(config.parent / "run" / "last.pt", weights_only=True)
    return dict(state["model"])


def test_a_resumed_training_ends_with_the_same_weights(gpuflow: Run, config: Path) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        done = gpuflow("train", config, "--device", "cpu")
        assert done.code == 0
        lines = done.out.splitlines()
        assert [re.sub(r"[\d.,]+", "#", line) for line in lines[:-1]] == [
            f"epoch #  {name:5}  loss #  accuracy #  # images/s" for name in ("train", "val") * 2
        ]
        assert re.fullmatch(rf"saved {config.parent}/run/last\.pt at step 6, preprocessing [0-9a-f]{{16}}", lines[-1])
        whole = final_weights(config)
        done = gpuflow("train", config, "--device", "cpu", "--max-steps", 4)
        assert (done.code, done.out) == (1, "")
        assert done.err.startswith(f"error: {config}: train.out holds the checkpoint of another run, got ")
        assert "; --resume goes on with that run, --force overwrites it, " in done.err
        done = gpuflow("train", config, "--device", "cpu", "--max-steps", 4, "--force")
        assert done.code == 0
        assert done.out.splitlines()[-2].endswith(" images/s  (steps 1 to 1 of 3)")
        assert not all(torch.equal(whole[name], value) for name, value in final_weights(config).items())
        done = gpuflow("train", config, "--device", "cpu", "--resume")
        assert done.code == 0
        assert "at step 6" in done.out
        assert [re.sub(r"[\d,]+ images/s", "", line) for line in done.out.splitlines()[:-1]] == [
            re.sub(r"[\d,]+ images/s", "", line) for line in lines[2:-1]
        ], "those of the whole epoch"
        assert all(torch.equal(whole[name], value) for name, value in final_weights(config).items())
        done = gpuflow("train", config, "--device", "cpu", "--resume")
        checkpoint = config.parent / "run" / "last.pt"
        assert done.out == (
            f"nothing left to train: {checkpoint} is at step 6, after train.epochs = 2; raise train.epochs to go on\n"
        )
    finally:
        torch.set_num_threads(threads)


def test_train_goes_on_or_starts_anew_and_not_both(gpuflow: Run, config: Path) -> None:
    done = gpuflow("train", config, "--resume", "--force")
    assert (done.code, done.err) == (1, "error: train: needs at most one of --resume and --force, got both\n")


def test_train_counts_bad_samples(gpuflow: Run, config: Path) -> None:
    """One that is replaced lowers no figure, so nothing else would say that it is bad."""
    min((config.parent / "photos").rglob("*.jpg")).write_bytes(b"no image")
    with pytest.warns(UserWarning, match="1 of"):  # of so few it is many
        done = gpuflow("train", config, "--device", "cpu", "pipelines.train.batch.drop_last=false", "train.epochs=1")
    assert done.code == 0
    lines = [line for line in done.out.splitlines() if line.startswith("epoch")]
    assert [line.split()[2] for line in lines] == ["train", "val"], "both read all files"
    assert all(line.endswith(" images/s  bad samples so far: 1, which gpuflow scan lists") for line in lines)


def test_a_directory_that_cannot_be_made_is_not_said_to_be_full(gpuflow: Run, config: Path) -> None:
    done = gpuflow("train", config, "--device", "cpu", f"train.out={config}/run")
    assert done.code == 1
    assert f"{config}: train.out cannot be written: Not a directory: '{config}/run'" in done.err
    assert done.err.endswith("; name another directory\n")


def test_every_command_takes_train_size(gpuflow: Run, config: Path) -> None:
    """The checkpoint's hash is that of the stages at 32 pixels, not at the 24 of the file."""
    done = gpuflow("train", config, "--device", "cpu", "--max-steps", 1)
    assert done.code == 0
    fingerprint = done.out.split()[-1]
    assert fingerprint in gpuflow("explain", config).out
    assert fingerprint not in gpuflow("explain", config, "train.size=null").out


def test_train_says_that_the_port_of_its_metrics_is_taken(gpuflow: Run, config: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = gpuflow("train", config, "--device", "cpu", "--metrics-port", port)
    assert done.code == 1
    assert f"metrics cannot be served at 127.0.0.1:{port}: " in done.err


def test_an_order_class_by_class_is_noted(gpuflow: Run, config: Path) -> None:
    note = "note: pipelines.train takes one class of the folder after the other; set pipelines.train.shuffle to true\n"
    assert note not in gpuflow("check", config).out
    assert note in gpuflow("check", config, "pipelines.train.shuffle=false").out
    train = ("train", config, "--device", "cpu", "--max-steps", 1, "--force")
    assert note not in gpuflow(*train).err
    assert note in gpuflow(*train, "pipelines.train.shuffle=false").err


def test_train_refuses_another_preprocessing(gpuflow: Run, config: Path) -> None:
    first = gpuflow("train", config, "--device", "cpu", "--max-steps", 1).out.split()[-1]
    done = gpuflow("train", config, "--resume", "pipelines.val.stages.resize.shorter=40")
    assert done.code == 1
    assert re.fullmatch(
        rf"error: {config.parent}/run/last\.pt: was trained with preprocessing {first}, the configuration says "
        r"[0-9a-f]{16}; restore the configuration or set another train\.out\n",
        done.err,
    )


def test_train_of_an_unknown_model(gpuflow: Run, config: Path) -> None:
    done = gpuflow("train", config, "train.model=resnet81")
    assert done.code == 1
    assert done.err == (
        f"error: {config}: train.model is not a torchvision classification model, got 'resnet81'; "
        "did you mean 'resnet18'?\n"
    )


def test_ctrl_c_in_training_exits_130(config: Path, interpreter: Interpreter) -> None:
    arguments = ("train", str(config), "--device", "cpu", "train.epochs=100000", "train.model=squeezenet1_1")
    with interpreter.start(MAIN, *arguments) as process:
        process.await_output("epoch 1")
        time.sleep(0.2)
        os.kill(process.pid, signal.SIGINT)
        process.wait()
    assert process.returncode == 130
    assert "Traceback" not in process.stderr
    assert process.stderr.endswith(f"interrupted; --resume goes on from {config.parent}/run/last.pt\n")


FINALIZER = """
class Interrupted:
    def __del__(self):
        raise KeyboardInterrupt

Interrupted()
time.sleep(60)
"""
CONTEXT = """
try:
    raise KeyboardInterrupt
finally:
    raise RuntimeError("trying to pop from empty mode stack")
"""


@pytest.mark.parametrize("body", [FINALIZER, CONTEXT])
def test_ctrl_c_is_not_lost(body: str) -> None:
    """In a finalizer, where Python prints it and goes on, and where a context that it left half closed raises."""
    code = f"import time\nfrom gpuflow.cli import app, main\n@app.command()\ndef wait():{indent(body, '    ')}\nmain()"
    done = subprocess.run([sys.executable, "-c", code, "wait"], capture_output=True, text=True, timeout=50, check=False)
    assert (done.returncode, done.stderr) == (130, "interrupted\n")


# --- bench ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--against", "dataloader,dataloader"], "--against: must name each once, got 'dataloader,dataloader'"),
        (["--against", "dataloder"], "--against: must be a known name, got 'dataloder'; did you mean 'dataloader'?"),
        (["--workloads", "batch,decode,batch"], "--workloads: must name each once, got 'batch,decode,batch'"),
        (["--workers", "1,x"], "--workers: must be numbers >= 1 separated by commas, each once, got '1,x'"),
        (["--workers", "0"], "--workers: must be numbers >= 1 separated by commas, each once, got '0'"),
        (["--workers", "1,2,1"], "--workers: must be numbers >= 1 separated by commas, each once, got '1,2,1'"),
    ],
)
def test_bench_refuses_what_it_cannot_measure(arguments: list[str], text: str, gpuflow: Run, config: Path) -> None:
    done = gpuflow("bench", config, *arguments)
    assert (done.code, done.out, done.err) == (1, "", f"error: {text}\n")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_bench_refuses_a_workload_that_needs_a_gpu_where_there_is_none(gpuflow: Run, config: Path) -> None:
    rule = "needs a GPU, and torch sees none here"
    done = gpuflow("bench", config, "--workloads", "batch,transfer")
    assert (done.code, done.err) == (1, f"error: --workloads: transfer {rule}; leave it out\n")


def test_bench_of_an_unknown_pipeline(gpuflow: Run, config: Path) -> None:
    done = gpuflow("bench", config, "--pipeline", "vall")
    assert done.code == 1
    assert done.err == f"error: {config}: pipelines has no pipeline 'vall'; did you mean 'val'?\n"


def test_bench_of_a_source_that_is_not_there_has_no_bar_and_no_traceback(gpuflow: Run, config: Path) -> None:
    """Of all workloads, one is left out with a note where torch sees no GPU."""
    done = gpuflow("bench", config, "source.folder=/nowhere", "--workers", "1")
    *notes, first, second = filter(None, done.err.splitlines())
    left_out = "note: transfer is left out: it needs a GPU, and torch sees none here"
    assert notes == ([] if torch.cuda.is_available() else [left_out])
    assert (done.code, first) == (1, "error: bench: gpuflow with 1 worker(s) failed:")
    assert second.startswith(f"{config}: source.folder must be a directory, got '/nowhere'")


# --- serve ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("block", "text"),
    [
        ("", ": has no block serve; add serve: {stages: ..., model: ...}"),
        (
            "serve: {stages: [decode, {resize: {height: 24, width: 24}}, normalize]}\n",
            ": serve has no model; add model:",
        ),
    ],
)
def test_serve_needs_a_block_with_a_model_before_it_listens(block: str, text: str, gpuflow: Run, config: Path) -> None:
    config.write_text(config.read_text() + block)
    done = gpuflow("serve", config, "--port", "0")
    assert done.code == 1
    assert done.err.startswith(f"error: {config}{text}"), "and no line says that it serves"


# --- what cannot be written, and faults of the machine ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "option", "file"),
    [
        (["show", "x.yaml", "--out"], "--out", "x.html"),
        (["export", "x.yaml", "--toml"], "--toml", "x.toml"),
        (["import", "torchvision:ResNet50_Weights.IMAGENET1K_V2", "--out"], "--out", "x.yaml"),
        (["samples"], "DIR", "x"),
        (["bench", "x.yaml", "--out"], "--out", "x"),
        (["parity", "x.yaml", "--out"], "--out", "x"),
        (["load-test", "--data", "photos", "--out"], "--out", "x"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_an_output_that_cannot_be_written_is_said_first(
    gpuflow: Run, config: Path, monkeypatch: pytest.MonkeyPatch, command: list[str], option: str, file: str
) -> None:
    monkeypatch.chdir(config.parent)
    done = gpuflow(*command, f"x.yaml/{file}")
    text = f"error: {option}: x.yaml/{file} must be in a directory, and x.yaml is none\n"
    assert (done.code, done.out, done.err) == (1, "", text)


def test_an_output_that_is_a_directory_or_needs_one(gpuflow: Run, config: Path) -> None:
    folder = config.parent / "photos"
    done = gpuflow("show", config, "--out", folder)
    assert done.err == f"error: --out: {folder} must be a file, and is a directory\n"
    done = gpuflow("parity", config, "--out", config)
    assert done.err == f"error: --out: {config} must be a directory\n"


def test_an_output_does_not_replace_a_pipe_or_a_link(gpuflow: Run, config: Path, tmp_path: Path) -> None:
    pipe, link, file = (tmp_path / name for name in ("pipe", "link", "old"))
    os.mkfifo(pipe)
    done = gpuflow("import", "torchvision:ResNet18_Weights.DEFAULT", "--out", pipe)
    assert (done.code, done.err) == (1, f"error: --out: {pipe} must be a file, and is a device or a pipe\n")
    assert pipe.is_fifo()
    file.write_text("old")
    link.symlink_to(file)
    assert gpuflow("show", config, "--out", link).code == 0
    assert link.is_symlink()
    assert file.read_text() != "old"
    elsewhere = tmp_path / "not" / "made" / "yet.yaml"
    link.unlink()
    link.symlink_to(elsewhere)
    assert gpuflow("import", "torchvision:ResNet18_Weights.DEFAULT", "--out", link).code == 0
    assert link.is_symlink()
    assert elsewhere.read_text().startswith("# Imported by gpuflow")
    elsewhere.write_text("edited")
    done = gpuflow("import", "torchvision:ResNet18_Weights.DEFAULT", "--out", link)
    rule = "exists and is not overwritten; remove it, or name another"
    assert (done.code, done.out, done.err) == (1, "", f"error: --out: {link} {rule}\n")
    assert elsewhere.read_text() == "edited"


def test_export_makes_the_folder_of_its_output(gpuflow: Run, config: Path) -> None:
    config.write_text(config.read_text() + "serve: {stages: [decode, {resize: {height: 24, width: 24}}, normalize]}\n")
    out = config.parent / "made" / "graphs" / "x.toml"
    done = gpuflow("export", config, "--toml", out)
    assert (done.code, done.err) == (0, "")
    assert out.is_file()
    link = config.parent / "link.toml"
    link.symlink_to(out)
    out.write_text("old")
    assert gpuflow("export", config, "--toml", link).code == 0
    assert link.is_symlink()
    assert out.read_text() != "old"


@pytest.mark.parametrize("command", [["show"], ["train"], ["export", "--toml", "x.toml"]], ids=lambda value: value[0])
@pytest.mark.parametrize("device", ["foo", "cuda:x", "meta"])
def test_a_device_that_does_not_exist(
    gpuflow: Run, config: Path, monkeypatch: pytest.MonkeyPatch, command: list[str], device: str
) -> None:
    monkeypatch.chdir(config.parent)
    name, *options = command
    done = gpuflow(name, config, *options, "--device", device)
    text = f"error: device must be cpu, cuda, or one GPU such as cuda:0, got {device!r}\n"
    assert (done.code, done.out, done.err) == (1, "", text)


def test_a_gpu_that_the_machine_does_not_have(gpuflow: Run, config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    done = gpuflow("show", config, "--device", "cuda:2")
    assert done.err == "error: device 'cuda:2' is not there: torch sees 2 GPU(s), numbered from 0\n"


def test_a_failed_system_call_names_its_file(gpuflow: Run, config: Path) -> None:
    (config.parent / "nowhere").symlink_to("missing")
    done = gpuflow("show", config, "-n", 1, "--out", config.parent / "nowhere" / "x.html")
    assert (done.code, done.err) == (1, f"error: {config.parent / 'nowhere'}: File exists\n")


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (MemoryError(), "error: MemoryError\n"),
        (torch.OutOfMemoryError("CUDA out of memory"), "error: CUDA out of memory\n"),
        (SystemFault(errno.EPIPE, "Broken pipe; check its other end", "x.tar"), "error: x.tar: Broken pipe; check its"),
        (OSError(errno.ENOSPC, "No space left on device"), "error: No space left on device\n"),
        (BrokenPipeError(errno.EPIPE, "Broken pipe"), ""),
    ],
    ids=lambda value: type(value).__name__,
)
def test_faults_of_the_machine_are_a_line(
    gpuflow: Run, config: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, text: str
) -> None:
    def fail(config: object) -> None:
        raise error

    monkeypatch.setattr("gpuflow.tools.explain.explain", fail)
    done = gpuflow("explain", config)
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith(text) and bool(done.err) == bool(text)


def test_a_fault_of_the_code_keeps_its_traceback(gpuflow: Run, config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(config: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr("gpuflow.tools.explain.explain", fail)
    with pytest.raises(RuntimeError, match="a bug"):
        gpuflow("explain", config)


def test_a_reader_that_closes_the_pipe_is_no_fault(config: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-c", MAIN, "check", str(config)]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, check=False, timeout=60)
    os.close(writing)
    assert (done.returncode, done.stderr) == (1, "")


def test_file_names_that_are_not_text(gpuflow: Run, config: Path) -> None:
    photo_file = min((config.parent / "photos").rglob("*.jpg"))
    photo_file.rename(photo_file.with_name(os.fsdecode(b"caf\xe9.jpg")))
    named = config.rename(config.with_name(os.fsdecode(b"\xe9.yaml")))
    out = config.with_name("x.html")
    assert gpuflow("show", named, "-n", 12, "--out", out).code == 0
    page = out.read_text(encoding="utf-8")
    assert "caf\\udce9.jpg" in page and "<title>\\udce9.yaml" in page
    done = gpuflow("check", named)
    assert done.out.splitlines()[-1] == f"valid: {config.parent}/\\udce9.yaml"
