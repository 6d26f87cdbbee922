"""The service that a round attacks: `python -m tests.chaos.service TIMEOUT_S`. Its model answers with mean colours."""

from __future__ import annotations

import sys

from gpuflow.config import ModelSpec
from gpuflow.serve.http.app import RequestLimits
from gpuflow.serve.http.server import run
from gpuflow.serve.predictor import Predictor
from gpuflow.torchpipe.graph import chain
from tests.datasets import VAL, program
from tests.serve.fakes import CLASSES, FakeEngine, Nap

MAX_BODY_BYTES, MAX_HELD_BYTES, MAX_QUEUE = 2_000_000, 16_000_000, 32


def load() -> Predictor:
    folded = program(VAL)
    engine = FakeEngine(before=Nap(0.002), batch=8)
    model = ModelSpec(file="x.pt", batch=engine.batch)
    graph = chain(folded, model, origin="chaos.yaml", threads=2, processes=2, device="cpu")
    return Predictor(graph, [engine], image=folded.result, pipeline=folded.pipeline, classes=CLASSES)


if __name__ == "__main__":
    run(
        load,
        name="chaos.yaml",
        port=0,
        limits=RequestLimits(
            max_body_bytes=MAX_BODY_BYTES,
            max_held_bytes=MAX_HELD_BYTES,
            max_queue=MAX_QUEUE,
            timeout_s=float(sys.argv[1]),
        ),
        report=lambda text: print(text, flush=True),
    )
