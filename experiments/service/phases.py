"""Where the time of a served batch goes, on a GPU: `python experiments/service/phases.py`.

Callers send requests in a closed loop, as in run.py, while the parts of the node that decodes and runs the model are
timed. Prints for each number of callers the mean milliseconds that a batch takes, and of which parts.
"""

from __future__ import annotations

import argparse
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from run import CONFIG, make_photographs, models

from gpuflow.execute.file_checks import FileChecks
from gpuflow.execute.gpu import GpuRunner
from gpuflow.execute.nvjpeg_decoders import NvjpegDecoderPool
from gpuflow.sources import Payload
from gpuflow.torchpipe import nodes
from gpuflow.torchpipe.gpu_preprocessor import GpuPreprocessor
from gpuflow.torchpipe.request_queue import RequestQueue

_ANSWER = 60.0
_WARM_UP = 1.0


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
        FileChecks.complete = lambda self, rows, *_: _all_of(rows)  # type: ignore[method-assign]
    times.method("check files", FileChecks, "complete")
    times.method("prepare (with the check)", GpuRunner, "prepare")
    times.method("call nvJPEG", NvjpegDecoderPool, "decode")
    times.method("launch (with nvJPEG)", GpuRunner, "launch")
    times.method("preprocess (all above, and wait)", GpuPreprocessor, "run")
    times.method("answer (with the model)", nodes.ModelNode, "answer")
    times.method("wait for requests", RequestQueue, "next_batch")
    import gpuflow.serve
    from gpuflow.runtime.threads import QuickSwitching

    QuickSwitching()  # as `gpuflow serve` does
    predictor = gpuflow.serve.load(CONFIG, device="cuda", overrides=[*model.overrides, *options.set])
    for engine in nodes.SESSIONS[next(iter(nodes.SESSIONS))].engines:
        engine.run = times.of("model", engine.run)  # type: ignore[method-assign]
    files = [path.read_bytes() for path in sorted(Path(photographs).iterdir())]
    for clients in map(int, options.clients.split(",")):
        _loop(predictor, files, clients, _WARM_UP)
        times.seconds.clear()
        before = sum(predictor.batches.values())
        answers, seconds = _loop(predictor, files, clients, options.seconds)
        batches = sum(predictor.batches.values()) - before
        print(f"{clients} callers: {answers / seconds:.0f} requests/s, {answers / batches:.1f} in a batch, of which")
        print(f"  {1000 * seconds / batches:6.2f} ms  all")
        for name, spent in sorted(times.seconds.items(), key=lambda pair: -pair[1]):
            print(f"  {1000 * spent / batches:6.2f} ms  {name}", flush=True)
    os._exit(0)


def _all_of(rows: Any) -> Any:
    import numpy as np

    return np.ones(len(rows), bool)


def _loop(predictor: Any, files: list[bytes], clients: int, seconds: float) -> tuple[int, float]:
    """Answers, and seconds."""
    counts, begun = [0] * clients, time.perf_counter()

    def send(client: int) -> None:
        while time.perf_counter() < begun + seconds:
            predictor.submit(files[(client * 7 + counts[client]) % len(files)]).result(_ANSWER)
            counts[client] += 1

    threads = [threading.Thread(target=send, args=(client,)) for client in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(counts), time.perf_counter() - begun


if __name__ == "__main__":
    main()
