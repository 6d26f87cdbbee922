"""Measures one arm in a separate process, which run.py starts: `python experiments/service/measure.py JOB`.

JOB is JSON. Prints JSON: the device's name, and metrics by workload, such as `{"500x375; clients=10": {"qps": 97.0}}`.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from plain import Plain

Request = bytes | tuple[bytes, ...]
"""One image, or several that are sent together."""
Predict = Callable[[Any], object]
"""Takes one Request."""
Figures = Iterator[tuple[str, dict[str, float]]]
"""Workload, metrics."""

_WARM_UP, _SAMPLE, _ANSWER = 0.4, 0.1, 60.0  # seconds
_PREPROCESSING_CALLERS = 16
QUIET_PERCENT = 15
"""How much of a core other processes may use in a valid measurement."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What one process measures.

    arm: a name of `ARMS`. photographs: directories. clients: numbers of threads that send requests. seconds: of each
    measurement. cores: how many cores are used; None for all. tries: how often a closed loop is measured at most, until
    no other process disturbs it. images: how many images a request has, one measurement for each.
    """

    arm: str
    config: str
    overrides: tuple[str, ...]
    device: str
    photographs: tuple[str, ...]
    clients: tuple[int, ...]
    seconds: float
    cores: int | None = None
    tries: int = 1
    images: tuple[int, ...] = (1,)


def main() -> None:
    fields: dict[str, Any] = json.loads(sys.argv[1])
    given: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in fields.items()}
    job = Job(**given)
    if job.cores is not None:  # before any library counts them
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: job.cores])
    figures = dict(ARMS[job.arm](job))
    print(json.dumps({"device": _name_of(job.device), "figures": figures}), flush=True)
    os._exit(0)  # does not wait for threads, which would delay the next measurement


def _name_of(device: str) -> str:
    if device == "cpu":
        return "cpu"
    import torch

    return torch.cuda.get_device_name(device)


# --- the arms ---------------------------------------------------------------------------------------------------------


def plain(job: Job) -> Figures:
    """(a) cv2 in each client's thread, then the model under one lock; the images of a request one after the other."""
    way = _plain(job)
    yield from _closed_loops(job, lambda request: way(request) if isinstance(request, bytes) else way.each(request))


def plain_batch(job: Job) -> Figures:
    """The same, with one batch of the model for all images of a request."""
    way = _plain(job)
    yield from _closed_loops(job, lambda request: way.batch([request] if isinstance(request, bytes) else request))


def _plain(job: Job) -> Plain:
    from plain import Plain

    _, _, (engine,) = _engines(job, "serve.model.instances=1")
    return Plain(engine, _device(job))


def graph(job: Job) -> Figures:
    """(b) on a CPU, (c) on a GPU: what `gpuflow serve` runs behind HTTP."""
    predictor = _load(job)

    def predict(request: Request) -> object:
        if isinstance(request, bytes):
            return predictor.submit(request).result(_ANSWER)
        return predictor.predict(request)

    yield from _closed_loops(job, predict, batches=lambda: predictor.batches)


def graph_cpu(job: Job) -> Figures:
    """(b) the graph that decodes on the CPU."""
    return graph(_decoding_on_the_cpu(job))


def engine_only(job: Job) -> Figures:
    """Batches of one size, back to back on all instances, of images already in memory."""
    from gpuflow.engines.base import black_images

    config, image, engines = _engines(job)
    assert config.serve is not None and config.serve.model is not None
    batch = config.serve.model.batch
    for count in sorted({1, 2, 4, 8, 16, batch}):
        if count <= batch:
            images = black_images(count, image, _device(job))
            callers = [partial(engine.run, images) for engine in engines]
            yield f"batch={count}", {"bound_per_s": count * _rate(callers, job.seconds)}


def decode_only(job: Job) -> Figures:
    """The graph without a model."""
    predictor = _load(job, preprocess_only=True)
    for directory in job.photographs:
        images = _images(directory)
        _first_requests(predictor.preprocess, images, _PREPROCESSING_CALLERS)
        callers = [_caller(predictor.preprocess, images, caller) for caller in range(_PREPROCESSING_CALLERS)]
        yield Path(directory).name, {"bound_per_s": _rate(callers, job.seconds)}


def decode_cpu_only(job: Job) -> Figures:
    return decode_only(_decoding_on_the_cpu(job))


def scheduler_only(job: Job) -> Figures:
    """The graph on the CPU with almost no work: an image of 8x8 pixels, and a model that does nothing."""
    import cv2
    import numpy as np
    import torch

    stages = ("serve.stages.resize.shorter=8", "serve.stages.center_crop.size=8")
    small = replace(job, device="cpu", overrides=(*job.overrides, *stages))
    predictor = _load(small, model=lambda images: torch.zeros(len(images), 10))
    done, encoded = cv2.imencode(".bmp", np.zeros((8, 8, 3), np.uint8))
    assert done
    data = encoded.tobytes()
    for clients in job.clients:
        callers = [lambda: predictor.submit(data).result(_ANSWER)] * clients
        yield f"clients={clients}", {"bound_per_s": _rate(callers, job.seconds)}


ARMS: dict[str, Callable[[Job], Figures]] = {
    "plain": plain,
    "plain-batch": plain_batch,
    "graph-cpu": graph_cpu,
    "graph-gpu": graph,
    "engine only": engine_only,
    "CPU decode only": decode_cpu_only,
    "GPU decode only": decode_only,
    "scheduler only": scheduler_only,
}


def _decoding_on_the_cpu(job: Job) -> Job:
    """`force`: the model was "trained" with `backend: auto`, and the CPU's pixels differ from the GPU's by a level."""
    on_cpu = ("serve.stages.decode.backend=cpu", "serve.model.force=true") if job.device != "cpu" else ()
    return replace(job, overrides=(*job.overrides, *on_cpu))


def _load(job: Job, **more: Any) -> Any:
    """The predictor that `gpuflow serve` runs behind HTTP."""
    import gpuflow.serve
    from gpuflow.runtime.threads import QuickSwitching

    QuickSwitching(0.00002)  # as `gpuflow serve` does
    return gpuflow.serve.load(job.config, device=job.device, overrides=job.overrides, **more)


def _engines(job: Job, *overrides: str) -> Any:
    """The configuration, the spec of its images, and its engines, warmed up."""
    from gpuflow import stage_table
    from gpuflow.config import read_config
    from gpuflow.engines import open_engines

    config = read_config(job.config, stage_table(), (*job.overrides, *overrides))
    assert config.serve is not None and config.serve.model is not None
    image = config.programs["serve"].result
    engines = open_engines(config.serve.model, image=image, device=_device(job))
    for engine in engines:
        engine.warm_up()
    return config, image, engines


def _device(job: Job) -> torch.device:
    import torch

    return torch.device(job.device)


def _images(directory: str) -> list[bytes]:
    return [path.read_bytes() for path in sorted(Path(directory).glob("*.jpg"))]


# --- measuring --------------------------------------------------------------------------------------------------------


def _closed_loops(job: Job, predict: Predict, batches: Callable[[], dict[int, int]] = dict) -> Figures:
    for directory, count in itertools.product(job.photographs, job.images):
        requests = requests_of(_images(directory), count)
        _first_requests(predict, requests, max(job.clients))
        for clients in job.clients:
            before: dict[int, int] = {}
            figures: dict[str, float] = {}
            for _ in range(job.tries):
                before = batches()
                figures = closed_loop(predict, requests, clients=clients, seconds=job.seconds)
                if figures["others_cpu_percent"] < QUIET_PERCENT:
                    break
            counts = {size: count - before.get(size, 0) for size, count in batches().items()}
            if runs := sum(counts.values()):
                figures["mean_batch"] = sum(size * count for size, count in counts.items()) / runs
            several = "" if job.images == (1,) else f"; images={count}"
            if several:
                figures["images_per_s"] = count * figures["qps"]
            yield f"{Path(directory).name}{several}; clients={clients}", figures


def requests_of(images: Sequence[bytes], count: int) -> Sequence[Request]:
    """Requests of `count` images each; a request of one image is its bytes."""
    if count == 1:
        return images
    repeated = [*images, *itertools.islice(itertools.cycle(images), count)]
    return [tuple(repeated[begin : begin + count]) for begin in range(len(images))]


def _first_requests(predict: Predict, requests: Sequence[Request], clients: int) -> None:
    """Requests that are not measured, which compile and allocate: one, then two for each client at the same time."""
    predict(requests[0])
    with ThreadPoolExecutor(clients) as pool:
        for answer in [pool.submit(predict, requests[number % len(requests)]) for number in range(2 * clients)]:
            answer.result(_ANSWER)


def closed_loop(predict: Predict, requests: Sequence[Request], *, clients: int, seconds: float) -> dict[str, float]:
    """Threads that each send the next request after an answer. Answers within `seconds` are counted.

    Each thread has had an answer before: if the model runs on the client's thread, torch first selects cuDNN's kernels
    for that thread, which takes longer than many answers.
    """
    from gpuflow.tools.load_test import Latency
    from gpuflow.tools.machine import GpuUtilization, load_nvml, usage_of

    begin = end = 0.0
    latencies: list[list[float]] = [[] for _ in range(clients)]
    failures: list[BaseException] = []

    def start() -> None:
        nonlocal begin, end
        begin = time.perf_counter() + _WARM_UP
        end = begin + seconds

    ready = threading.Barrier(clients + 1, start)

    def client(number: int) -> None:
        ask = _caller(predict, requests, number)
        try:
            ask()
            ready.wait(_ANSWER)
            while (sent := time.perf_counter()) < end:
                ask()
                if begin <= (answered := time.perf_counter()) < end:
                    latencies[number].append((answered - sent) * 1000)
        except BaseException as error:
            failures.append(error)
            ready.abort()

    threads = [threading.Thread(target=client, args=(number,), daemon=True) for number in range(clients)]
    for thread in threads:
        thread.start()
    with suppress(threading.BrokenBarrierError):  # after a failure, which is raised below
        ready.wait(_ANSWER)
    rates, memory = [], 0
    with closing(GpuUtilization(load_nvml())) as gpus:
        time.sleep(max(0.0, begin - time.perf_counter()))
        cpu, machine = time.process_time(), _machine_cpu()
        while (left := end - time.perf_counter()) > 0:
            time.sleep(min(_SAMPLE, left))
            rates.append(gpus.percents())
            used = usage_of([os.getpid()])
            memory = max(memory, used.rss_bytes if used is not None else 0)
        cpu, machine = time.process_time() - cpu, _machine_cpu() - machine
    for thread in threads:
        thread.join(_ANSWER)
    if failures:
        raise failures[0]
    found = [latency for each in latencies for latency in each]
    latency = Latency.of(found)
    if latency is None:
        raise RuntimeError(f"no answer within {seconds:g} s; use more --seconds")
    means = [sum(rate) / len(rates) for rate in zip(*rates, strict=True)]
    return {
        "qps": len(found) / seconds,
        "mean_ms": latency.mean_ms,
        "tp50_ms": latency.tp50_ms,
        "tp90_ms": latency.tp90_ms,
        "tp99_ms": latency.tp99_ms,
        "cpu_percent": 100 * cpu / seconds,
        "others_cpu_percent": max(0.0, 100 * (machine - cpu) / seconds),
        "rss_mb": memory / 1e6,
        **({"gpu_percent": max(means)} if means else {}),
    }


def _caller(predict: Predict, requests: Sequence[Request], number: int) -> Callable[[], object]:
    """A function that sends the next request at each call; clients begin at different ones."""
    place = number * 7919

    def ask() -> object:
        nonlocal place
        place += 1
        return predict(requests[place % len(requests)])

    return ask


def _rate(callers: Sequence[Callable[[], object]], seconds: float) -> float:
    """Calls a second of threads that each call one of `callers` repeatedly, after a warm-up."""
    begin = time.perf_counter() + _WARM_UP
    end = begin + seconds
    counts = [0] * len(callers)

    def repeat(number: int) -> None:
        while (now := time.perf_counter()) < end:
            callers[number]()
            counts[number] += begin <= now

    threads = [threading.Thread(target=repeat, args=(number,), daemon=True) for number in range(len(callers))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(_ANSWER)
    return sum(counts) / (time.perf_counter() - begin)


def _machine_cpu() -> float:
    """Processor seconds that all processes have used on this machine."""
    import psutil

    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system + times.irq + times.softirq)


if __name__ == "__main__":
    main()
