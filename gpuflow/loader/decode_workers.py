"""Chunks that worker processes read and decode, straight into the slots of a batch.

Threads run native calls at the same time, but Python code one after the other. So where a pipeline runs Python code for
each image, or `run.processes` asks for it, a loader starts worker processes and hands chunks to them once they are
ready; until then, and where they cannot run the pipeline, its own threads do the work. Either way `CpuRunner` does it,
and the pixels are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gpuflow.execute import cpu_workers
from gpuflow.execute.cpu_workers import Outcome, ReadRequest, Setup
from gpuflow.pipeline.stage import Keys
from gpuflow.pipeline.views import AnyProgram, ViewSlots
from gpuflow.runtime.worker_pool import WorkerConnection, WorkerPool
from gpuflow.sources import Source, without_records

__all__ = ["DecodeWorkers"]


class DecodeWorkers:
    """Worker processes that read and decode for one loader. Any thread may call any method.

    Args:
        threads: chunks at a time, of all workers together.
        processes: the workers that share them.
    """

    def __init__(self, program: AnyProgram, source: Source, *, threads: int, processes: int) -> None:
        shares = [len(range(worker, threads, processes)) for worker in range(processes)]
        self._pool = WorkerPool(
            cpu_workers.__name__,
            connections=shares,
            setup=Setup(program, without_records(source)),
            task="decode",
        )

    def run(self, indices: Sequence[int], keys: Keys, slots: Any, start: int, *, sizes: bool = False) -> Outcome | None:
        """Read and decode samples into slots [start, start + n) of a batch's (`slots_of`); None if no worker can.

        The slots then hold anything, and the caller has to decode into them itself. Raises only what ends the caller's
        own wait. sizes: whether to report the images' sizes.
        """

        def exchange(worker: WorkerConnection) -> Outcome | None:
            memory = slots.memory if isinstance(slots, ViewSlots) else slots
            shared = worker.send(ReadRequest(indices, keys, start, len(memory), sizes), memory)
            outcome: Outcome | None = worker.answer() if shared else None
            return outcome

        return self._pool.request(exchange)

    def counts(self) -> dict[str, int]:
        """Workers `at_work`, and `starting`: not ready for chunks yet."""
        return self._pool.counts()

    def close(self) -> None:
        """Kill the workers."""
        self._pool.close()
