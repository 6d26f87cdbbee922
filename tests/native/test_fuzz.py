"""The C library under the compiler's sanitizers, on a few thousand cases of `make fuzz`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.native.fuzz import MEMORY, Fuzz, FuzzError, build, pillow_library


@pytest.mark.slow  # .ci/run has half a minute of new cases
def test_no_random_case_reads_or_writes_outside_of_its_memory(tmp_path: Path) -> None:
    """Also, results have the same bits on processors without AVX2, and on 8 threads."""
    try:
        program = build(tmp_path, MEMORY)
    except FuzzError as error:
        if "sanitize" not in str(error) and "asan" not in str(error) and "ubsan" not in str(error):
            raise
        pytest.skip(f"this compiler has no sanitizers: {str(error).splitlines()[-1]}")
    Fuzz(tmp_path, program, None, pillow_library(), seed=568089517).batch(11331, 1)  # an infinite number of a matrix
    counters = Fuzz(tmp_path, program, None, pillow_library(), seed=1).batch(0, 4000)
    assert counters[0] == 4000
    ordinary, complete, rewritten, accepted, regions, stopped = counters[1:]
    assert min(ordinary, complete, rewritten, accepted, regions, stopped) > 20, counters
