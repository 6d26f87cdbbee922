"""Runs fuzz.c: the C library on random programs and on damaged JPEGs, under the compiler's sanitizers.

`python -m tests.native.fuzz --minutes 10` compiles it, and runs batches of cases in three forms: with the sanitizers of
memory and undefined behaviour on one thread; the same on 8 threads with GPUFLOW_NATIVE=portable, whose results must
have the same bits; and with the sanitizer of threads. It prints which case fails, and the command that runs it again.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path

import numpy as np

from tests import images
from tests.decode.test_chunk_headers import kinds

HERE = Path(__file__).parent
NATIVE = HERE.parents[1] / "gpuflow" / "native"
INCLUDED = ("chunk", "mask")
"""C files that fuzz.c includes."""
NO_IMAGES = ("gpu_call", "read", "rng")
MEMORY, THREADS = "address,undefined,float-cast-overflow", "thread"
ALL, SLOWER = 3000, 300
"""Cases of a batch, and how many of these the sanitizer of threads runs."""


class FuzzError(Exception):
    """A case failed; the message says which."""


def build(folder: Path, sanitizers: str) -> Path:
    """Compile fuzz.c.

    Raises:
        FuzzError: the compiler fails, or has no sanitizers.
    """
    sources = [path for path in NATIVE.glob("*.c") if path.stem not in (*INCLUDED, *NO_IMAGES)]
    flags = [
        "-std=gnu11",
        "-O1",
        "-g",
        "-Wall",
        "-Wextra",
        "-ffp-contract=off",
        "-fno-math-errno",
        "-fno-trapping-math",
    ]
    flags += [f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all", f"-I{NATIVE}"]
    made = folder / f"fuzz-{sanitizers.split(',')[0]}"
    command: list[str | Path] = [*shlex.split(os.environ.get("CC", "cc")), *flags, HERE / "fuzz.c", *sorted(sources)]
    command += ["-lpthread", "-lm", "-ldl", "-o", made]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode:
        raise FuzzError(done.stderr)
    return made


def corpus(folder: Path) -> list[str]:
    """Write JPEGs of many kinds, and return their paths and those of the kept ones."""
    size = images.photo(33, 51)
    files = kinds()[:36] + [images.jpeg(size, kind, progressive=True) for kind in images.SUBSAMPLINGS]
    files += [images.tiny_jpeg(97, 131, [(4, 1), (1, 1), (1, 1)]), images.tiny_jpeg(53, 71, [(1, 2), (1, 1), (1, 1)])]
    files += [images.tiny_jpeg(33, 41, [(2, 2), (1, 1), (1, 1)], separate=True), images.with_restarts(size, 1)]
    files += [images.jpeg(images.photo(150, 130), "4:4:4", progressive=True), images.jpeg(images.photo(1, 101))]
    jpegs = [data for data in files if data[:2] == b"\xff\xd8"]
    # Its end marker is gone, of which a comment after the last scan has the bytes.
    jpegs.append(images.jpeg(size, progressive=True)[:-2] + b"\xff\xfe\0\x0a" + b"\xff\xd9" + bytes(18))
    for number, data in enumerate(jpegs):
        (folder / f"{number:03}.jpg").write_bytes(data)
    return [*map(str, sorted(folder.glob("*.jpg"))), *map(str, sorted((HERE / "corpus").glob("*.jpg")))]


def pillow_library() -> str:
    """Return the path of the libjpeg-turbo in Pillow's wheel."""
    paths = [path.locate() for path in metadata.files("pillow") or () if path.name.startswith("libjpeg")]
    return str(paths[0]) if paths else "libjpeg.so.62"


class Fuzz:
    """The compiled programs, and what they are given. threads: the program with the sanitizer of threads, or None."""

    def __init__(self, folder: Path, memory: Path, threads: Path | None, library: str, seed: int) -> None:
        self._memory, self._threads, self._library, self._seed = memory, threads, library, seed
        self._files = corpus(folder)

    def _run(self, program: Path, cases: tuple[int, int], form: str, threads: int, hashes: bool) -> list[str]:
        """Run cases [first, last), and return what the program prints."""
        library = self._library if program == self._memory else pillow_library()  # no two sanitizers in a process
        arguments = [str(self._seed), *map(str, cases), "1000", str(threads), str(int(hashes)), library]
        command = [str(program), *arguments, *self._files]
        done = subprocess.run(
            command,
            env={**os.environ, "GPUFLOW_NATIVE": form},
            capture_output=True,
            text=True,
            timeout=1200,
            check=False,
        )
        if done.returncode:
            again = f"python -m tests.native.fuzz --seed {self._seed} --library {self._library} --case NUMBER"
            raise FuzzError(f"{done.stderr[-6000:]}\nRun the case again: {again}")
        return done.stdout.splitlines()

    def batch(self, first: int, count: int) -> list[int]:
        """Run cases in all forms, and return their number and the counters of fuzz.c.

        Raises:
            FuzzError: a sanitizer ends the program, or the results differ between forms.
        """
        cases = (first, first + count)
        fast, portable = (
            self._run(self._memory, cases, form, threads, False)[-1] for form, threads in (("", 1), ("portable", 8))
        )
        if fast.split()[-1] != portable.split()[-1]:
            forms = (self._run(self._memory, cases, form, 1, True)[:-1] for form in ("", "portable"))
            differ = [one.split()[0] for one, other in zip(*forms, strict=True) if one != other]
            raise FuzzError(f"results of cases {differ} of seed {self._seed} differ between forms, or between runs")
        if self._threads is not None:
            self._run(self._threads, (first, first + max(1, count * SLOWER // ALL)), "", 8, False)
        return list(map(int, fast.split()[:-1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=time.time_ns() % 10**9)
    parser.add_argument("--case", type=int, help="run this case alone")
    parser.add_argument("--library", help="a libjpeg-turbo; by default Pillow's")
    chosen = parser.parse_args()
    library = chosen.library if chosen.library and Path(chosen.library).exists() else pillow_library()
    print(f"seed {chosen.seed}, {library}" + (": no instrumented libjpeg-turbo" if library != chosen.library else ""))
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        try:
            fuzz = Fuzz(folder, build(folder, MEMORY), build(folder, THREADS), library, chosen.seed)
            if chosen.case is not None:
                print(fuzz.batch(chosen.case, 1))
                return
            begin, first, counters = time.monotonic(), 0, np.zeros(7, int)
            while (spent := time.monotonic() - begin) < 60 * chosen.minutes:
                counters += fuzz.batch(first, ALL)
                first += ALL
                spent = time.monotonic() - begin
                print(f"{first:,} cases, {first / spent:.0f}/s; JPEGs and stopped samples: {counters[1:].tolist()}")
        except FuzzError as error:
            sys.exit(str(error))


if __name__ == "__main__":
    main()
