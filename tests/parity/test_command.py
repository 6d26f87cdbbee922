"""The command `gpuflow parity`: what it prints and writes, and how it exits."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gpuflow.cli import app
from tests.commands import Run, command_here
from tests.datasets import deadline
from tests.forking import Python


@pytest.fixture(autouse=True)
def _in_time() -> Iterator[None]:
    with deadline(60):
        yield


@pytest.fixture
def parity(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], config: Path, tmp_path: Path) -> Run:
    """Runs the command in this process on the file, with output to its own folder."""
    return command_here(monkeypatch, capsys, "parity", config, "--out", tmp_path / "out")


def test_help() -> None:
    result = CliRunner().invoke(app, ["parity", "--help"])
    assert result.exit_code == 0
    assert "torchpipe_gpu" in result.output


def test_equal_ways_exit_0_and_write_a_report(parity: Run, tmp_path: Path, config: Path) -> None:
    done = parity("--images", 3)
    assert done.code == 0, done.err
    assert "PASS: val and serve, val and torchvision agree as they must" in done.out
    assert f"wrote {tmp_path}/out/parity.json\nwrote {tmp_path}/out/report.html\n" in done.out
    found = json.loads((tmp_path / "out" / "parity.json").read_text())
    assert found["verdict"] == "pass"
    assert found["images"] == {"own": 3, "hostile": 38, "bad": 4}
    assert found["command"] == f"gpuflow parity {config} --out {tmp_path}/out --images 3"
    page = (tmp_path / "out" / "report.html").read_text()
    assert page.count("data:image/png;base64,") >= 3 * 4
    assert "PASS" in page


def test_a_breach_exits_1(parity: Run, tmp_path: Path) -> None:
    done = parity("--images", 0, "serve.stages.resize.interpolation=bicubic")
    assert done.code == 1
    assert "BREACH: val against serve after resize" not in done.out  # varying sizes: the graph shows the whole alone
    assert "BREACH: val against serve after normalize" in done.out
    assert done.err.count("error:") == 0
    assert json.loads((tmp_path / "out" / "parity.json").read_text())["verdict"] == "breach"


def test_two_ways_and_a_tolerance(parity: Run, tmp_path: Path) -> None:
    assert parity("--images", 2, "--against", "val", "opencv").code == 1
    done = parity("--images", 2, "--against", "val", "pillow", "--tolerance", 2)
    assert done.code == 0
    (pair,) = json.loads((tmp_path / "out" / "parity.json").read_text())["pairs"]
    assert (pair["a"], pair["b"], pair["asked"]) == ("val", "pillow", "at most 2 levels, as asked for")


def test_faults(parity: Run, tmp_path: Path) -> None:
    done = parity("--tolerance", 2)
    assert (done.code, done.err) == (1, "error: --tolerance: goes with --against A B, got 2 alone\n")
    done = parity("--against", "val", "sevre")
    assert (done.code, done.err.strip()) == (1, "error: --against: there is no way 'sevre'; did you mean 'serve'?")
    done = parity("--data", tmp_path / "out")
    assert (done.code, done.err.splitlines()[-1]) == (
        1,
        f"error: --data must be a directory with images, got '{tmp_path}/out'",
    )
    assert not (tmp_path / "out").exists()


def test_the_process_ends_without_the_exit_handlers_of_torchpipe(
    config: Path, tmp_path: Path, python_with_torch: Python
) -> None:
    """They could wait 0.1 s for each thread. `abort` is called where those run that were there before the command."""
    code = (
        "import ctypes, sys\n"
        "libc = ctypes.CDLL(None)\n"
        "libc.on_exit(libc.abort, None)\n"
        f"sys.argv = ['gpuflow', 'parity', {str(config)!r}, 'run.threads=1', '--images', '0', '--out', "
        f"{str(tmp_path / 'out')!r}, '--against', 'val', 'serve']\n"
        "from gpuflow.cli import main\n"
        "main()\n"
    )
    done = python_with_torch(code)
    assert (done.returncode, "PASS" in done.stdout) == (0, True), done.stderr
