"""Notes SIGTERM and SIGUSR1, by which schedulers say that a training must end soon."""

from __future__ import annotations

import signal
import time
from collections import deque
from typing import TYPE_CHECKING, Any, Self

from gpuflow.runtime.ranks import group_ranks

if TYPE_CHECKING:
    import torch


_SAME_SECONDS = 1.0
"""A signal to a whole process group also reaches torchrun, which then sends it to its processes once more."""
_STEPS_LATER = 2
"""On GPUs an answer is read after this many steps, because reading it at once would wait for all queued work."""


class Preemption:
    """Says whether a scheduler has asked for the end of a training, on all ranks at the same step.

    Within its `with` block, the first SIGTERM or SIGUSR1 is noted, and the loop continues. It saves and leaves when
    `requested` returns True. Another such signal more than a second later ends the process at once. Only the main
    thread of a process can begin such a block.

        with gpuflow.Preemption() as preemption:
            for images, labels in train:
                ...
                if preemption.requested():
                    gpuflow.save_checkpoint("last.pt", model, arch="resnet50", loader=train, optimizer=optimizer)
                    sys.exit(os.EX_TEMPFAIL)
    """

    def __init__(self) -> None:
        self._noted: float | None = None
        self._answers: deque[tuple[torch.Tensor, torch.cuda.Event]] = deque()

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._note) for number in (signal.SIGTERM, signal.SIGUSR1)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: Any) -> None:
        if self._noted is None:
            self._noted = time.monotonic()
        elif time.monotonic() - self._noted > _SAME_SECONDS:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    def requested(self) -> bool:
        """Return True once any rank was asked to end. Every rank calls this after each step, and gets the same answer.

        The ranks are those of an initialised `torch.distributed`, whose processes exchange one number.

        Examples:
            >>> with Preemption() as preemption:
            ...     signal.raise_signal(signal.SIGTERM)
            ...     preemption.requested()
            True
        """
        asked, group = self._noted is not None, group_ranks()
        if group is None or group[1] == 1:
            return asked
        import torch
        import torch.distributed as dist

        on_cpu = dist.get_backend_config().startswith("cpu")
        answer = torch.full((1,), asked, dtype=torch.int32, device="cpu" if on_cpu else "cuda")
        dist.all_reduce(answer)
        if on_cpu:
            return bool(answer)
        copied = answer.to("cpu", non_blocking=True)
        self._answers.append((copied, torch.cuda.current_stream().record_event()))
        if len(self._answers) <= _STEPS_LATER:
            return False
        answer, event = self._answers.popleft()
        event.synchronize()
        return bool(answer)
