"""The protocol of a way (one implementation of a pipeline), and functions that several ways share."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import torch

from gpuflow.config import Config
from gpuflow.errors import BadSampleError
from gpuflow.parity.images import Encoded
from gpuflow.parity.prefixes import Prefix
from gpuflow.pipeline.program import Program
from gpuflow.torchpipe.adapter import missing_operators, missing_scheduler

__all__ = ["BATCH", "Result", "Results", "Way", "missing_gpu", "missing_torchpipe", "served"]

Result = torch.Tensor | BadSampleError
"""An image [C, H, W], or the reason why there is none."""
Results = Generator[Result, None, None]
BATCH = 16
"""The batch size of training, and the number of concurrent requests to a graph."""


class Way(Protocol):
    """One implementation of a pipeline: it turns encoded bytes into a tensor."""

    def describe(self) -> str:
        """The libraries that decode and resize, with versions."""

    def missing(self) -> str | None:
        """A text that says why this way cannot run on this machine; None if it can."""

    def refuses(self, prefix: Prefix) -> str | None:
        """A text that says why this way cannot run this prefix of the pipeline; None if it can."""

    def run(self, prefix: Prefix, images: Sequence[Encoded]) -> Results:
        """Yield one result per image, in order, with the spec `prefix.program.result`."""


def missing_gpu(device: str) -> str | None:
    """A text that says why the device, `cpu` or `cuda`, is missing; None if it is there."""
    return "torch sees no NVIDIA GPU here" if device == "cuda" and not torch.cuda.is_available() else None


def missing_torchpipe(*, preset: bool) -> str | None:
    """Return a text that says what of torchpipe is missing to serve; None if nothing is."""
    missing = missing_operators("a preset") if preset else missing_scheduler()
    return None if missing is None else str(missing)


def served(config: Config, program: Program, device: str, images: Sequence[Encoded]) -> Results:
    """Run a program's serving graph, without a model, on the images."""
    from gpuflow.serve.predictor import Predictor, chain_here

    graph = chain_here(config, program, None, device=device)
    with Predictor(graph, image=program.result, timeout_seconds=config.run.timeout_s) as predictor:

        def ask(data: Encoded) -> Result:
            try:
                return predictor.preprocess(data.tobytes())
            except BadSampleError as fault:
                return fault

        with ThreadPoolExecutor(BATCH, thread_name_prefix="gpuflow_parity") as clients:
            for start in range(0, len(images), BATCH):
                yield from clients.map(ask, images[start : start + BATCH])
