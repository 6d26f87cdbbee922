"""The command line: help, exit codes, what goes to stdout, and Ctrl-C."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from gpuflow.cli import app
from tests.commands import Run, command_here
from tests.datasets import deadline, make_photos, truncate, write_config
from tests.images import encode, photo

COMMANDS = ["samples", "check", "explain", "show", "train", "bench", "scan", "load-test"]
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


def test_the_help_lists_every_command() -> None:
    result = CliRunner().invoke(app, ["--help"])
    assert result.exit_code == 0
    assert all(re.search(rf"\b{command}\b", result.output) for command in COMMANDS)


def test_an_unknown_command_or_option_exits_2(gpuflow: Run) -> None:
    assert gpuflow("chekc").code == 2
    assert gpuflow("check", "--nothing", "x.yaml").code == 2


def test_help_needs_no_torch() -> None:
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.argv[1:] = ['train', '--help']\ntry:\n    {MAIN}\n"
         "except SystemExit: assert 'torch' not in sys.modules"],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


# --- check and explain ------------------------------------------------------------------------------------------------


def test_check_of_a_valid_file(gpuflow: Run, config: Path) -> None:
    done = gpuflow("check", config)
    assert done.code == 0
    assert done.err == ""
    assert done.out.splitlines() == [
        "train: decode() -> random_resized_crop(size=24) -> normalize()  gives float32 24x24x3 nchw",
        "val: decode() -> resize(shorter=36) -> center_crop(size=24) -> normalize()  gives float32 24x24x3 nchw",
        f"valid: {config}",
    ]


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


def test_brackets_in_errors_are_text_not_markup(gpuflow: Run, config: Path) -> None:
    done = gpuflow("check", config, "source.folder=[red]")
    assert done.code == 1
    assert "[red]" in done.err or "['red']" in done.err


def test_explain_says_what_runs(gpuflow: Run, config: Path) -> None:
    done = gpuflow("explain", config)
    assert (done.code, done.err) == (0, "")
    for word in ("one sampling", "pixel by pixel", "12 samples, 3 classes", "decode thread(s)", "decoder", "shuffled"):
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
        assert gpuflow("train", config, "--device", "cpu", "--max-steps", 4).code == 0
        assert not all(torch.equal(whole[name], value) for name, value in final_weights(config).items())
        done = gpuflow("train", config, "--device", "cpu", "--resume")
        assert done.code == 0
        assert "at step 6" in done.out
        assert all(torch.equal(whole[name], value) for name, value in final_weights(config).items())
    finally:
        torch.set_num_threads(threads)


def test_train_size_sets_every_size(gpuflow: Run, config: Path) -> None:
    """The checkpoint's hash is that of the stages at 32 pixels, not at the 24 of the file."""
    done = gpuflow("train", config, "--device", "cpu", "--max-steps", 1)
    assert done.code == 0
    explained = gpuflow("explain", config, "pipelines.val.stages.center_crop.size=32").out
    fingerprint = done.out.split()[-1]
    assert fingerprint in explained
    assert fingerprint not in gpuflow("explain", config).out


def test_train_says_that_the_port_of_its_metrics_is_taken(gpuflow: Run, config: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = gpuflow("train", config, "--device", "cpu", "--metrics-port", port)
    assert done.code == 1
    assert f"metrics cannot be served at 127.0.0.1:{port}: " in done.err


def test_train_refuses_another_preprocessing(gpuflow: Run, config: Path) -> None:
    first = gpuflow("train", config, "--device", "cpu", "--max-steps", 1).out.split()[-1]
    done = gpuflow("train", config, "--resume", "pipelines.val.stages.resize.shorter=40")
    assert done.code == 1
    assert re.fullmatch(
        rf"error: {config.parent}/run/last\.pt: was trained with preprocessing {first}, the configuration's is "
        r"[0-9a-f]{16}; restore the stages or set another train\.out\n",
        done.err,
    )


def test_train_of_an_unknown_model(gpuflow: Run, config: Path) -> None:
    done = gpuflow("train", config, "train.model=resnet81")
    assert done.code == 1
    assert done.err == (
        f"error: {config}: train.model is not a torchvision classification model, got 'resnet81'; "
        "did you mean 'resnet18'?\n"
    )


def test_ctrl_c_in_training_exits_130(config: Path) -> None:
    command = [sys.executable, "-c", MAIN, "train", str(config), "--device", "cpu", "train.epochs=100000"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline().startswith("epoch 1")
            time.sleep(0.2)
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 130
    assert "Traceback" not in err


# --- bench ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--against", "dataloder"], "--against: 'dataloder' is nothing to compare with; did you mean 'dataloader'?"),
        (["--workers", "1,x"], "--workers: must be numbers >= 1 separated by commas, got '1,x'"),
        (["--workers", "0"], "--workers: must be numbers >= 1 separated by commas, got '0'"),
    ],
)
def test_bench_refuses_what_it_cannot_measure(arguments: list[str], text: str, gpuflow: Run, config: Path) -> None:
    done = gpuflow("bench", config, *arguments)
    assert (done.code, done.out, done.err) == (1, "", f"error: {text}\n")


def test_bench_of_an_unknown_pipeline(gpuflow: Run, config: Path) -> None:
    done = gpuflow("bench", config, "--pipeline", "vall")
    assert done.code == 1
    assert done.err == f"error: {config}: pipelines has no pipeline 'vall'; did you mean 'val'?\n"
