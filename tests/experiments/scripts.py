"""Imports the scripts of a folder of experiments, which import each other as if they ran there."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = ["imported"]


@contextmanager
def imported(folder: Path, names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The modules of a folder by name. Modules of the same names that others have imported are put back at the end."""
    sys.path.insert(0, str(folder))
    kept = {name: sys.modules.pop(name) for name in names if name in sys.modules}
    try:
        yield {name: importlib.import_module(name) for name in names}
    finally:
        sys.path.remove(str(folder))
        for name in names:
            sys.modules.pop(name, None)
        sys.modules.update(kept)
