"""Writes which samples a loader delivers, step by step, for `gpuflow audit`."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from gpuflow.errors import LoaderError, reason_of
from gpuflow.loader.batch import Assembly
from gpuflow.loader.drawn_orders import MixedOrder, WeightedOrder
from gpuflow.loader.sampler import Order, Steps


def audit_log(path: str, pipeline: str, order: Order, steps: Steps, epoch: int) -> Callable[[Assembly], None]:
    """Return what appends a line of JSON for each batch of a `for`, to a file of this rank: of rank 3 `audit.3.jsonl`.

    A line has `pipeline`, `epoch`, `begun` (the time of the `for`), `drawn` (whether a sample may come several times in
    an epoch) and the fields of `Steps`, such as `rank` and `start`. Of the step it has the number `step` within the
    `for`, `positions` [from, up to] and `indices`, the sample at each of these positions, -1 where a bad one was left
    out. `bad` are pairs: a place in `indices`, and the bad sample that belongs there. Samples that fill the last step
    of several ranks are not listed.

    Args:
        path: `run.audit`.
        order, steps: of the samples, and of the `for`.

    Raises:
        LoaderError: a line cannot be written.
    """
    of_rank = Path(path).with_suffix(f".{steps.rank}{Path(path).suffix}")
    drawn = isinstance(order, WeightedOrder | MixedOrder)
    of_loop = {"pipeline": pipeline, "epoch": epoch, "begun": time.time(), "drawn": drawn, **dataclasses.asdict(steps)}

    def append(batch: Assembly) -> None:
        positions = batch.positions[batch.valid]
        indices = np.where(batch.kept, batch.indices, -1)[batch.valid]
        expected = order.indices(epoch, positions)
        bad = np.flatnonzero(indices != expected)
        of_step = {
            "step": batch.step,
            "positions": [int(positions[0]), int(positions[-1]) + 1] if len(positions) else [0, 0],
            "indices": indices.tolist(),
            "bad": np.stack((bad, expected[bad]), axis=1).tolist(),
        }
        try:
            of_rank.parent.mkdir(parents=True, exist_ok=True)
            with of_rank.open("a") as file:  # the line before may be incomplete, if its process was killed
                file.write("\n" + json.dumps({**of_loop, **of_step}, separators=(",", ":")))
        except OSError as error:
            raise LoaderError(f"run.audit cannot be written: {reason_of(error)}; name another file") from error

    return append
