"""The C library gives the same bits by each compiler, on each kind of processor; no compiler has a warning."""

from __future__ import annotations

import os
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PLATFORMS = {
    "gcc, portable": ("gcc", "portable", (), "gcc"),
    "clang": ("clang", "", (), "clang"),
    "clang, portable": ("clang", "portable", (), "clang"),
    "aarch64": (
        "aarch64-linux-gnu-gcc",
        "",
        ("qemu-aarch64", "-L", "/usr/aarch64-linux-gnu"),
        "gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user",
    ),
}
"""A compiler, GPUFLOW_NATIVE, what runs programs, and the packages of apt."""

pytestmark = pytest.mark.slow


def _outputs(folder: Path, compiler: str, variant: str, runner: tuple[str, ...]) -> str:
    (extension,) = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["ext-modules"]
    program = folder / "outputs"
    sources = [Path(__file__).with_name("outputs.c"), *(ROOT / source for source in extension["sources"])]
    command = [compiler, *extension["extra-compile-args"], f"-I{ROOT / 'gpuflow/native'}", *map(str, sources)]
    command += ["-o", str(program), "-pthread", *(f"-l{name}" for name in extension["libraries"])]
    compiled = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert (compiled.returncode, compiled.stderr) == (0, "")
    environment = {**os.environ, "GPUFLOW_NATIVE": variant}
    return subprocess.run(
        [*runner, str(program)], env=environment, capture_output=True, text=True, timeout=300, check=True
    ).stdout


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> str:
    return _outputs(tmp_path_factory.mktemp("gcc"), "gcc", "", ())


@pytest.mark.parametrize("name", PLATFORMS)
def test_every_platform_gives_the_same_bits(name: str, expected: str, tmp_path: Path) -> None:
    compiler, variant, runner, packages = PLATFORMS[name]
    for program in (compiler, *runner[:1]):
        if shutil.which(program) is None:
            pytest.skip(f"needs {program}: sudo apt install {packages}")
    assert _outputs(tmp_path, compiler, variant, runner) == expected


def test_sums_are_rounded_once(expected: str) -> None:
    assert expected.endswith("wrong sums 0\n")
