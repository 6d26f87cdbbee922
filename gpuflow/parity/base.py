"""What a way is, and what several of them share."""

from __future__ import annotations

import importlib.util
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import torch

from gpuflow.config import Config
from gpuflow.errors import BadSampleError, MissingExtra
from gpuflow.parity.images import Encoded
from gpuflow.parity.prefixes import Prefix
from gpuflow.pipeline.program import Program

__all__ = ["BATCH", "Result", "Results", "Way", "missing_gpu", "missing_torchpipe", "served"]

Result = torch.Tensor | BadSampleError
"""An image [C, H, W], or why there is none."""
Results = Generator[Result, None, None]
BATCH = 16
"""How many images training has in a batch, and how many requests a graph has at a time."""


class Way(Protocol):
    """One way from encoded bytes to a tensor."""

    def describe(self) -> str:
        """What decodes and what resizes, with versions."""

    def missing(self) -> str | None:
        """Why it cannot run here, in words; None if it can."""

    def refuses(self, prefix: Prefix) -> str | None:
        """Why it cannot run a pipeline up to there, in words; None if it can."""

    def run(self, prefix: Prefix, images: Sequence[Encoded]) -> Results:
        """One result an image, in order, as the program's `result` says."""


def missing_gpu(device: str) -> str | None:
    """Why nothing runs on a device, `cpu` or `cuda`, in words; None if something does."""
    return "torch sees no NVIDIA GPU here" if device == "cuda" and not torch.cuda.is_available() else None


def missing_torchpipe(feature: str) -> str | None:
    """Why torchpipe cannot run, in words; None if it can. feature: what needs it."""
    return str(MissingExtra(feature, "torchpipe", "serve")) if importlib.util.find_spec("torchpipe") is None else None


def served(config: Config, program: Program, device: str, images: Sequence[Encoded]) -> Results:
    """What comes out of a program's graph, without a model."""
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
