"""Where the time of a served batch goes, on a GPU: `python experiments/service/phases.py`.

Callers send requests in a closed loop, as in run.py, while the parts of the node that decodes and runs the model are
timed. Prints for each number of callers the mean milliseconds that a batch takes, and of which parts.
"""

from __future__ import annotations

import argparse
import os
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
from measure import _ANSWER, _caller, _first_requests, _images, _rate
from run import CONFIG, make_photographs, models

from gpuflow.execute.gpu.chunk_scan import FileChecks
from gpuflow.execute.gpu.nvjpeg_decoders import NvjpegDecoderPool
from gpuflow.execute.gpu.runner import GpuRunner
from gpuflow.sources import Payload
from gpuflow.torchpipe import nodes
from gpuflow.torchpipe.request_queue import RequestQueue


class Times:
    """Adds up the seconds that functions take, by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    def of(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            begun = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds[name] += time.perf_counter() - begun

        return timed

    def method(self, name: str, owner: type, method: str) -> None:
        setattr(owner, method, self.of(name, getattr(owner, method)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", default="1,10,40")
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="overrides of photos.yaml")
    parser.add_argument("--without-check", action="store_true", help="take all files for complete")
    options = parser.parse_args()
    options.device, options.arch, options.engines, options.label = "cuda", None, "", ""
    photographs = make_photographs("500x375")
    (model,) = models(options, {"500x375": str(photographs)})
    times = Times()
    Payload.of = staticmethod(times.of("copy to pinned memory", Payload.of))  # type: ignore[method-assign]
    if options.without_check:
        FileChecks.complete = lambda self, rows, *_: np.ones(len(rows), bool)  # type: ignore[method-assign]
    times.method("check files", FileChecks, "complete")
    times.method("prepare (with the check)", GpuRunner, "prepare")
    times.method("call nvJPEG", NvjpegDecoderPool, "decode")
    times.method("launch (with nvJPEG)", GpuRunner, "launch")
    times.method("preprocess (all above, and wait)", nodes.GpuPreprocessor, "run")
    times.method("answer (with the model)", nodes.ModelNode, "answer")
    times.method("wait for requests", RequestQueue, "next_batch")
    import gpuflow.serve
    from gpuflow.runtime.threads import QuickSwitching

    QuickSwitching(0.00002)  # as `gpuflow serve` does
    predictor = gpuflow.serve.load(CONFIG, device="cuda", overrides=[*model.overrides, *options.set])
    for engine in nodes.SESSIONS[next(iter(nodes.SESSIONS))].engines:
        engine.run = times.of("model", engine.run)  # type: ignore[method-assign]
    requests = _images(str(photographs))

    def predict(data: bytes) -> object:
        return predictor.submit(data).result(_ANSWER)

    for clients in map(int, options.clients.split(",")):
        _first_requests(predict, requests, clients)
        before, begun = sum(predictor.batches.values()), time.perf_counter()
        times.seconds.clear()
        rate = _rate([_caller(predict, requests, number) for number in range(clients)], options.seconds)
        batches, seconds = sum(predictor.batches.values()) - before, time.perf_counter() - begun
        print(f"{clients} callers: {rate:.0f} requests/s, {rate * seconds / batches:.1f} in a batch, of which")
        print(f"  {1000 * seconds / batches:6.2f} ms  all")
        for name, spent in sorted(times.seconds.items(), key=lambda pair: -pair[1]):
            print(f"  {1000 * spent / batches:6.2f} ms  {name}", flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
