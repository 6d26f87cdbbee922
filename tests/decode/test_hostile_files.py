"""The C code that reads files of strangers, on thousands of damaged ones, under the compiler's sanitizers."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

import pytest

from tests import images
from tests.decode.test_chunk_headers import kinds

HERE = Path(__file__).parent
SOURCES = [HERE.parents[1] / "gpuflow" / "native" / f"{name}.c" for name in ("header_scan", "complete", "baseline")]
SANITIZE = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]


def compiler(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [*shlex.split(os.environ.get("CC", "cc")), "-std=gnu11", "-O1", "-g", *SANITIZE, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hostile")
    (folder / "empty.c").write_text("int main(void) { return 0; }\n")
    if compiler(str(folder / "empty.c"), "-o", str(folder / "empty")).returncode:
        pytest.skip("this compiler has no sanitizers")
    made = folder / "hostile"
    done = compiler(str(HERE / "hostile.c"), *map(str, SOURCES), "-lpthread", "-o", str(made))
    assert done.returncode == 0, done.stderr
    return made


def with_end_in_a_comment(progressive: bytes) -> bytes:
    """Without its end marker, of which a comment after the last scan has the bytes."""
    return progressive[:-2] + b"\xff\xfe\0\x0a" + b"\xff\xd9" + bytes(6) + bytes(12)


def test_no_damaged_file_has_anything_read_or_written_next_to_it(program: Path, tmp_path: Path) -> None:
    files = kinds()[:36] + [images.jpeg(images.photo(33, 51), kind, progressive=True) for kind in images.SUBSAMPLINGS]
    files += [with_end_in_a_comment(images.jpeg(images.photo(33, 51), "4:2:0", progressive=True))]
    for number, data in enumerate(files):
        (tmp_path / f"{number:03}").write_bytes(data)
    paths = sorted(map(str, tmp_path.iterdir()))
    done = subprocess.run([str(program), "400", *paths], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    ordinary, complete, rewritten, count = map(int, done.stdout.split())
    assert count == 400 * len(files)
    assert min(ordinary, complete, rewritten) > 100, done.stdout
