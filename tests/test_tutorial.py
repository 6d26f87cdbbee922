"""The tutorial prints what it shows: its commands run in its order; measured numbers and hashes may differ."""

from __future__ import annotations

import re
import socket
import subprocess
import time
from itertools import pairwise
from pathlib import Path
from urllib.request import urlopen

import pytest

from tests.pages import Block, blocks_of, environment_of, run_blocks

BLOCKS = blocks_of("tutorial.md")
MEASURED = (
    (r"127\.0\.0\.1:\d+", "ADDRESS"),
    (r"^\w+ 0\.\d\d$", "PREDICTION"),
    (r'"label":"\w+","index":\d+', "PREDICTION"),
    (r"\d+\.\d+(e-?\d+)?", "NUMBER"),
    (r"\d+ images/s", "RATE"),
    (r"\b[0-9a-f]{16}\b", "HASH"),
    (r"  (recall|precision) .*", "CLASS"),
)
"""What another machine, or another version of a library, may print in another way."""


def stable(text: str) -> list[str]:
    """Return the lines of a text without what is measured."""
    for pattern, name in MEASURED:
        text = re.sub(pattern, name, text, flags=re.MULTILINE)
    return [line.rstrip() for line in text.splitlines() if line.strip()]


def shown() -> list[tuple[Block, list[str]]]:
    """Return each block of commands with the lines of the output below it."""
    return [(first, stable(second.text)) for first, second in pairwise(BLOCKS) if second.language == "text"]


def require_lines(expected: list[str], printed: str) -> None:
    """Raise AssertionError if a line of the page is not printed, in its order; others may stand between."""
    lines = iter(stable(printed))
    for line in expected:
        assert line in lines, f"the page shows {line!r}, but the command printed:\n{printed}"


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def test_each_command_of_the_tutorial_shows_its_output() -> None:
    assert [block.text for block in BLOCKS if block.language == "bash"] == [block.text for block, _ in shown()]
    assert len(shown()) >= 9 and all(lines for _, lines in shown())


@pytest.mark.slow
def test_the_tutorial_prints_what_it_shows(tmp_path: Path) -> None:
    pytest.importorskip("torchpipe", reason="the tutorial serves by torchpipe")
    for block in BLOCKS:
        if block.name:
            (tmp_path / block.name).write_text(block.text)
    port = free_port()
    server = None
    try:
        for block, expected in shown():
            if block.text.startswith("gpuflow serve"):
                command = [*block.text.split(), "--port", str(port)]
                with (tmp_path / "serve.log").open("w") as log:
                    server = subprocess.Popen(command, cwd=tmp_path, env=environment_of({}), stdout=log, stderr=log)
                wait_until_ready(port, server)
                require_lines(expected, (tmp_path / "serve.log").read_text())
            else:
                at_port = Block(section=block.section, language="bash", text=block.text.replace(":8888", f":{port}"))
                require_lines(expected, run_blocks([at_port], tmp_path, {}))
    finally:
        if server is not None:
            server.terminate()
            server.wait(60)


def wait_until_ready(port: int, server: subprocess.Popen[bytes], seconds: float = 300) -> None:
    """Wait until the service answers. Raises TimeoutError."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and server.poll() is None:
        try:
            with urlopen(f"http://127.0.0.1:{port}/readyz", timeout=5):
                return
        except OSError:
            time.sleep(0.5)
    raise TimeoutError(f"the service did not get ready, it ended with {server.poll()}")
