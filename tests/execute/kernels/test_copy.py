"""The kernel that copies images in Triton's interpreter, which needs numpy < 2.4 and its own process."""

from __future__ import annotations

from tests.execute.kernels.interpreted import differences_of


def test_every_byte_is_copied_and_no_other_changes() -> None:
    assert differences_of("interpret_copy.py") == {"7 images": 0.0}
