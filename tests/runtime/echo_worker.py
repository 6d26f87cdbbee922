"""What the worker processes of test_worker_requests.py run: they answer each request with it, or do what it says.

Prepared with a path, they start once there is such a file.
"""

from __future__ import annotations

import os
import pickle
import time
from pathlib import Path
from typing import Any

from gpuflow.runtime.worker_pool import READY, ParentConnection

__all__ = ["prepare", "work"]


def prepare(setup: bytes) -> Any:
    return pickle.loads(setup)


def work(connection: ParentConnection, prepared: Any) -> None:
    if prepared == "end":
        os._exit(1)
    while isinstance(prepared, Path) and not prepared.exists():
        time.sleep(0.01)
    connection.send(prepared if prepared == "refuse" else READY)
    while True:
        message = connection.recv()
        if message == "end":
            os._exit(1)
        connection.send((prepared, message, os.getpid()))
