"""Runs timm's train.py, patched as docs/timm_train.md says, and logs which samples each step trained on.

Arguments: the folder it works in, the log, the script, and its arguments.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gpuflow.integrations import timm
from gpuflow.loader.batch import Batch
from tests.integrations.killing import Log

log, create_loader = Log(Path(sys.argv[2])), timm.create_loader


class Logged(timm.TimmLoader):
    def __iter__(self) -> Iterator[Batch]:
        for batch in super().__iter__():
            yield batch
            log.write(epoch=batch.epoch, indices=batch.indices.tolist(), pixels=batch.images.double().sum().item())
            log.kill_if_due()


def logged(*arguments: Any, **options: Any) -> timm.TimmLoader:
    loader = create_loader(*arguments, **options)
    if options["is_training"]:
        loader.__class__ = Logged
    return loader


timm.create_loader = logged
sys.argv = sys.argv[3:]
runpy.run_path(sys.argv[0], run_name="__main__")
