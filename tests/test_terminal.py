"""What the commands print on a terminal: whole words, and no progress bar where results come after it."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

import pytest
from rich.console import ConsoleDimensions

from gpuflow import cli
from tests.datasets import make_photos, write_config

TRAIN = [
    {"decode": {}},
    {"random_resized_crop": {"size": [32, 32], "scale": [0.5, 1.0]}},
    {"color_jitter": {"brightness": 0.2, "contrast": 0.2, "saturation": 0.2}},
    {"normalize": {"mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}},
]
VAL = [{"decode": {}}, {"resize": {"shorter": 36}}, {"center_crop": {"size": 32}}, {"normalize": {}}]

pytestmark = pytest.mark.filterwarnings("ignore:.* samples are bad so far:UserWarning")


class Terminal(io.StringIO):
    """Is written to as a terminal."""

    def isatty(self) -> bool:
        return True

    def screen(self, width: int) -> list[str]:
        """The lines that people see in the end, those that were scrolled away included."""
        lines, row, column = [""], 0, 0
        for part in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|[^\x1b]", self.getvalue()):
            if part == "\n":
                row, column = row + 1, 0
            elif part == "\r":
                column = 0
            elif part[0] == "\x1b":
                if part[-1] == "A":
                    row -= int(part[2:-1] or 1)
                elif part[-1] == "K":
                    lines[row] = ""
                continue
            else:
                if column == width:
                    row, column = row + 1, 0
                lines += [""] * (row + 1 - len(lines))
                lines[row] = lines[row][:column].ljust(column) + part + lines[row][column + 1 :]
                column += 1
            lines += [""] * (row + 1 - len(lines))
        return [line.rstrip() for line in lines]


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """In the working directory, so that no path is longer than a line."""
    monkeypatch.chdir(tmp_path)
    make_photos(Path("photos"), classes=3, each=4)
    sorted(Path("photos").rglob("*.jpg"))[4].write_bytes(b"no image")
    fit = {"model": "squeezenet1_1", "epochs": 2, "out": "run"}
    return write_config(Path("x.yaml"), Path("photos"), train=TRAIN, val=VAL, fit=fit)


def terminal_of(monkeypatch: pytest.MonkeyPatch, width: int, out: io.StringIO | None = None) -> Terminal:
    """A terminal that stderr goes to, and stdout unless it goes elsewhere."""
    terminal = Terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(sys, "stdout", terminal if out is None else out)
    monkeypatch.setattr(sys, "stderr", terminal)
    for console in (cli._out, cli._err):  # made when this process was started, perhaps without a terminal
        monkeypatch.setattr(console, "is_interactive", console.is_terminal)
        monkeypatch.setattr(console, "size", ConsoleDimensions(width, 40))
    return terminal


def shown(monkeypatch: pytest.MonkeyPatch, *arguments: object, width: int = 80, out: io.StringIO | None = None) -> str:
    """The screen after a command whose stdout goes there, or elsewhere."""
    terminal = terminal_of(monkeypatch, width, out)
    monkeypatch.setattr(sys, "argv", ["gpuflow", *map(str, arguments)])
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)
    with pytest.raises(SystemExit):
        cli.main()
    return "\n".join(terminal.screen(width))


@pytest.mark.parametrize("width", [60, 80])
@pytest.mark.parametrize("command", ["check", "explain"])
def test_no_word_is_broken(command: str, width: int, config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = io.StringIO()
    assert shown(monkeypatch, command, config, out=elsewhere) == ""
    whole = elsewhere.getvalue()
    assert "\x1b" not in whole
    assert max(map(len, whole.splitlines())) > 80, "lines of a file are not broken"
    screen = shown(monkeypatch, command, config, width=width)
    assert max(map(len, screen.splitlines())) <= width
    words = [{word.rstrip(",") for word in text.split() if "─" not in word} for text in (whole, screen)]
    assert words[0] - words[1] <= {"stage"}, "the heading of the table, which a narrow terminal gets as a list"


def test_an_error_is_broken_between_words(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = shown(monkeypatch, "check", config, "run.threads=none", "run.no_such_key=3").splitlines()
    assert len(lines) > 2 and all(len(line) <= 80 for line in lines)
    assert "error: override 'run.threads=none': run.threads must be an integer or auto, got" in lines


def test_a_bar_stays_below_the_results(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = shown(monkeypatch, "scan", config).splitlines()
    assert [line.startswith("samples ━") for line in lines].count(True) == 1
    assert "".join(lines[:2]).startswith('{"index": 4, "path": "photos/class_1/')
    assert lines[-2].startswith("samples ━") and lines[-1] == "12 samples, 1 bad"
    screen = shown(monkeypatch, "train", config, "--device", "cpu", "train.epochs=1", width=60)
    assert "━" not in screen, "a bar that is longer than a line would leave parts there"
    assert re.findall(r"^epoch +(\d+) +(\w+)", screen, flags=re.MULTILINE) == [("1", "train"), ("1", "val")]


def test_results_go_to_a_file_while_the_bar_is_on_the_terminal(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = io.StringIO()
    screen = shown(monkeypatch, "scan", config, out=rows)
    assert rows.getvalue().startswith('{"index": 4, ') and rows.getvalue().count("\n") == 1
    assert "index" not in screen and "samples ━" in screen


@pytest.mark.parametrize("width", [60, 80])
def test_a_bar_is_one_line_and_results_stand_above_it(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = terminal_of(monkeypatch, width)
    with cli._bar() as bar:
        task = bar.add_task("epoch 1 train", total=3, note="loss 0.123  1,234 images/s  " + "a long note " * 9)
        for i in range(3):
            bar.refresh()
            cli._print(f"result {i}")
            print(f"by print {i}")
            print(f"a warning {i}", file=sys.stderr)
            bar.update(task, advance=1, refresh=True)
    *results, last = filter(None, terminal.screen(width))
    assert results == [f"{text} {i}" for i in range(3) for text in ("result", "by print", "a warning")]
    assert last.startswith("epoch 1 train ━") and "3/3" in last
