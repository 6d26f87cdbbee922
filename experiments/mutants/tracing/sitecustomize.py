"""Writes "test, tab, file:function" to the file $GPUFLOW_TRACE once for each function of gpuflow that a test calls.

Python imports this by itself in the processes that a test starts, where PYTHONPATH names this folder.
"""

from __future__ import annotations

import inspect
import os
import sys
import threading
from types import CodeType, FrameType


def start(path: str, root: str) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    prefix, environ, write = f"{root}/gpuflow/", os.environ, os.write
    known: set[tuple[str, CodeType]] = set()
    is_function = inspect.CO_OPTIMIZED  # and not the body of a module or class, which runs at import

    def called(frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if not code.co_filename.startswith(prefix) or not code.co_flags & is_function:
            return
        test = environ.get("PYTEST_CURRENT_TEST", "").rpartition(" (")[0]
        if (test, code) not in known:
            known.add((test, code))
            write(file, f"{test}\t{code.co_filename[len(root) + 1 :]}:{code.co_qualname}\n".encode())

    threading.settrace(called)
    sys.settrace(called)


if "GPUFLOW_TRACE" in os.environ:
    start(os.environ["GPUFLOW_TRACE"], os.environ["PYTHONPATH"].partition(":")[0])
