"""How many hardware queues CUDA uses. Work in a queue waits for the work before it, also for that of other streams."""

from __future__ import annotations

import logging
import os
import sys

_LOG = logging.getLogger(__name__)
VARIABLE, QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS", 32
"""CUDA's variable, whose default is 8, and its largest value. nvJPEG, the loader, a training and NCCL have more streams
than 8. With 8 queues a call of nvJPEG next to a training took up to 38 ms, with 32 up to 21 (measured in
experiments/ranks/NOTES.md)."""
_late = False


def request_queues() -> None:
    """Have CUDA use as many hardware queues as it can, if the environment does not say how many.

    To be called when gpuflow is imported: CUDA reads the variable once, when the process first uses a GPU.
    """
    global _late
    torch = sys.modules.get("torch")
    if VARIABLE in os.environ:
        return
    if torch is not None and torch.cuda.is_initialized():
        _late = True
    else:
        os.environ[VARIABLE] = str(QUEUES)


def warn_if_late() -> None:
    """Log once that this process used the GPU before it imported gpuflow, what that costs, and how to mend it."""
    global _late
    if _late:
        _late = False
        _LOG.warning(
            "this process used the GPU before it imported gpuflow, so CUDA has 8 hardware queues, and decoding and "
            "training may wait for each other: a ResNet-18 under DDP on two H200 kept 0.69 of its speed, with %d "
            "queues 0.94; put `import gpuflow` before the first use of CUDA, or begin the script with "
            'import os; os.environ["%s"] = "%d"',
            QUEUES,
            VARIABLE,
            QUEUES,
        )
