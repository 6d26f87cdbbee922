"""Runs a page of the documentation: its files are written, its commands run, in the page's order."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
NO_CHANGES: Mapping[str, str] = {}

_PARTS = re.compile(r"^## (?P<title>[^\n]+)$|^```(?P<language>\w+)\n(?P<text>.*?)^```", flags=re.MULTILINE | re.DOTALL)
_NAME = re.compile(r"^# (\w+(?:\.\w+)?)$", flags=re.MULTILINE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """A code block. section: the heading above it, empty before the first one."""

    section: str
    language: str
    text: str

    @property
    def name(self) -> str:
        """Return the name of the file that one of the first two lines names; an empty text if none does."""
        found = _NAME.search("\n".join(self.text.splitlines()[:2]))
        return found[1] if found else ""


def blocks_of(page: str) -> list[Block]:
    """Return the code blocks of a page of docs/."""
    section, found = "", []
    for part in _PARTS.finditer((ROOT / "docs" / page).read_text()):
        section = part["title"] or section
        if part["language"]:
            found.append(Block(section=section, language=part["language"], text=part["text"]))
    return found


def sections_of(page: str) -> Iterator[tuple[str, list[Block]]]:
    """Yield each heading of a page with its blocks; those before the first heading belong to an empty one."""
    blocks = blocks_of(page)
    for section in dict.fromkeys(block.section for block in blocks):
        yield section, [block for block in blocks if block.section == section]


def run_blocks(
    blocks: list[Block], folder: Path, environment: Mapping[str, str], sizes: Mapping[str, str] = NO_CHANGES
) -> str:
    """Write the files that blocks name to a folder, then run the blocks of commands there. Return what they print.

    sizes: numbers of pixels in the files, and what to write in their place.

    Raises AssertionError if a command fails, or a block of code has neither a name nor commands.
    """
    for block in blocks:
        assert block.name or block.language in ("bash", "text"), f"{block.section}: name the file of {block.text}"
        if block.name:
            (folder / block.name).write_text(re.sub(r"\d+", lambda found: sizes.get(found[0], found[0]), block.text))
    printed = ""
    for block in blocks:
        if block.language == "bash" and not block.name:
            done = subprocess.run(
                ["bash", "-euo", "pipefail", "-c", block.text],
                cwd=folder,
                env=environment_of(environment),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=1200,
                check=False,
            )
            assert done.returncode == 0, f"{block.section}:\n{block.text}\n{done.stdout}"
            printed += done.stdout
    return printed


def environment_of(more: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of commands, in which `gpuflow` and `python` are those of this interpreter."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "2", **more}
