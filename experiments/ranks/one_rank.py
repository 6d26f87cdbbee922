"""One process of run.py: trains on its GPU with each arm in turn, together with the other ranks, and measures that."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import itertools
import json
import os
import socket
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, final
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from calls_in_c import calls_in_c
from numpy.typing import NDArray

import gpuflow
from gpuflow.execute.gpu.nvjpeg_decoders import NvjpegDecoder
from gpuflow.pipeline.stage import Keys
from gpuflow.sources import Payload

CONFIG = Path(__file__).parents[1] / "gpu_path" / "photos.yaml"
WARM_UP_STEPS, STEPS_AHEAD = 10, 8
"""Unmeasured steps before each measurement; how many steps the loop runs ahead of the GPU."""
COMPUTING_SHARE, COMPUTING_SECONDS = 0.3, 0.001
"""Which part of each such period the thread of `busy interpreter` computes."""
BEFORE_CAPTURE = 12
"""The steps that DDP needs before a graph can be captured."""
WAIT_SECONDS = 120.0
Record = dict[str, Any]


# --- arms -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to train.

    fed: on the loader's batches; otherwise on a batch that stays on the GPU. ddp: with DistributedDataParallel.
    calls: `run.decoder_calls` of the loader. without: parts of the loader that are left out, of `PARTS`.
    other_thread: what another thread does meanwhile, see `Rank.other_thread`.
    """

    fed: bool = False
    ddp: bool = True
    calls: str = "auto"
    without: tuple[str, ...] = ()
    other_thread: str = "nothing"


ARMS = {
    "resident": Arm(),
    "gpuflow": Arm(fed=True),
    "gpuflow with two calls": Arm(fed=True, calls="2"),
    "gpuflow without decoding": Arm(fed=True, without=("decoding",)),
    "gpuflow without decoding and sampling": Arm(fed=True, without=("decoding", "resampling")),
    "decoding only": Arm(other_thread="decoding"),
    "calls in C": Arm(other_thread="calls in C"),
    "calls in C without DDP": Arm(other_thread="calls in C", ddp=False),
    "busy interpreter": Arm(other_thread="computing"),
    "resident without DDP": Arm(ddp=False),
    "gpuflow without DDP": Arm(fed=True, ddp=False),
}
"""Arms by name; their figures are compared with those of the first."""


def _decode_nothing(decoder: Any, files: Any, *rest: Any, **options: Any) -> NDArray[np.bool_]:
    return np.ones(len(files.data), bool)


def _resample_nothing(*arguments: Any, **options: Any) -> None:
    """The slots keep what their memory held before."""


PARTS: dict[str, dict[str, Callable[..., Any]]] = {
    "decoding": {
        "gpuflow.execute.gpu.nvjpeg_decoders.NvjpegDecoder.decode": _decode_nothing,
    },
    "resampling": {"gpuflow.execute.gpu.device_passes.resample_all": _resample_nothing},
}
"""Parts of the loader's work on the GPU: the functions that do it, and what replaces them to leave it out."""


@contextmanager
def left_out(parts: Sequence[str]) -> Iterator[None]:
    with ExitStack() as patches:
        for part in parts:
            for place, stand_in in PARTS[part].items():
                patches.enter_context(patch(place, stand_in))
        yield


@contextmanager
def computing(share: float) -> Iterator[Callable[[], object]]:
    """Another thread computes in Python for this share of the time."""
    stop = threading.Event()

    def compute() -> None:
        while not stop.is_set():
            end = time.perf_counter() + share * COMPUTING_SECONDS
            while time.perf_counter() < end:
                sum(range(50))
            time.sleep((1 - share) * COMPUTING_SECONDS)

    thread = threading.Thread(target=compute, daemon=True)
    thread.start()
    try:
        yield lambda: None
    finally:
        stop.set()
        thread.join(WAIT_SECONDS)


def one_chunk(runner: Any, files: Sequence[bytes], device: torch.device) -> Callable[[], None]:
    """A function that prepares and launches one chunk. Nothing uses the result."""

    def pinned(size: int) -> NDArray[np.uint8]:
        memory: NDArray[np.uint8] = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda").numpy()
        return memory

    def decode() -> None:
        faults = runner.launch(runner.prepare(payload, keys, range(len(files))), slots)
        assert not any(faults), faults

    payload, keys = Payload.of(files, pinned), Keys(0, 0, np.arange(len(files)))
    slots = runner.slots(len(files))
    return decode


@contextmanager
def decoding(decode: Callable[[], None], device: torch.device) -> Iterator[Callable[[], object]]:
    """Another thread decodes and samples one chunk for each call of the function."""

    def decode_one_more() -> None:
        under_way.append(decoder.submit(decode))
        if len(under_way) > STEPS_AHEAD:
            under_way.popleft().result(WAIT_SECONDS)

    under_way = deque[Future[None]]()
    with ThreadPoolExecutor(1, initializer=lambda: use(device)) as decoder:
        yield decode_one_more
        for future in under_way:
            future.result(WAIT_SECONDS)


# --- measuring --------------------------------------------------------------------------------------------------------


class Figures(NamedTuple):
    """What one rank measured with one arm. The last two are NaN without calls of nvJPEG."""

    images_per_s: float
    interval_ms: float
    interval_p95_ms: float
    call_ms: float
    two_at_a_time: float


def combined(ranks: Sequence[Figures]) -> dict[str, float]:
    """The metrics of all ranks together. The slowest counts, because the others wait for it."""
    metrics = {
        "images_per_s": min(one.images_per_s for one in ranks) * len(ranks),
        "interval_ms": max(one.interval_ms for one in ranks),
        "interval_p95_ms": max(one.interval_p95_ms for one in ranks),
    }
    calling = [one for one in ranks if one.call_ms > 0]
    if calling:
        metrics["call_ms"] = statistics.median(one.call_ms for one in calling)
        metrics["two_at_a_time"] = statistics.mean(one.two_at_a_time for one in calling)
    return metrics


@final
class Calls:
    """The calls of nvJPEG in this process: when each began and ended."""

    def __init__(self) -> None:
        self.spans: list[tuple[float, float]] = []

    def recorded(self) -> AbstractContextManager[object]:
        """Until its end every call is recorded."""
        decode = NvjpegDecoder.decode

        def timed(decoder: NvjpegDecoder, *arguments: Any, **options: Any) -> NDArray[np.bool_]:
            start = time.perf_counter()
            try:
                return decode(decoder, *arguments, **options)
            finally:
                self.spans.append((start, time.perf_counter()))

        return patch.object(NvjpegDecoder, "decode", timed)

    @property
    def median_ms(self) -> float:
        """NaN without calls."""
        return statistics.median(end - start for start, end in self.spans) * 1000 if self.spans else float("nan")

    @property
    def overlapping(self) -> float:
        """Which share of the calls overlaps another one; NaN without calls."""
        spans = sorted(self.spans)
        starts = [start for start, _ in spans[1:]] + [float("inf")]
        latest = itertools.accumulate([float("-inf"), *(end for _, end in spans)], max)
        over = [
            start < before or end > following
            for (start, end), before, following in zip(spans, latest, starts, strict=False)
        ]
        return statistics.mean(over) if over else float("nan")


@final
class Clock:
    """When the work queued so far is done, in the time of the GPU; on a CPU it is done at once."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"

    def mark(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def wait(self, mark: Any) -> None:
        if self._on_gpu:
            mark.synchronize()

    def synchronize(self) -> None:
        if self._on_gpu:
            torch.cuda.synchronize()

    def intervals_ms(self, marks: Sequence[Any]) -> list[float]:
        pairs = itertools.pairwise(marks)
        return [a.elapsed_time(b) if self._on_gpu else (b - a) * 1000 for a, b in pairs]


@final
class Training:
    """A torchvision model that is trained in bf16 autocast and channels_last memory, on the default stream.

    On a CPU it is trained in float32, because few CPUs compute in bf16.

    model: its name; after `compiled_` its forward pass and its loss are compiled. See `GraphTraining` for `graph_`.
    """

    def __init__(self, model: str, device: torch.device, batch: int, *, ddp: bool) -> None:
        import torchvision

        torch.manual_seed(0)
        make = getattr(torchvision.models, model.removeprefix("compiled_"))
        self._module = make().to(device, memory_format=torch.channels_last)
        self._initial = {name: value.clone() for name, value in self._module.state_dict().items()}
        on_gpu, network = device.type == "cuda", self._module
        if ddp:
            network = torch.nn.parallel.DistributedDataParallel(self._module, device_ids=[device] if on_gpu else None)

        def loss_of(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            with torch.autocast(device.type, torch.bfloat16, enabled=on_gpu):
                return torch.nn.functional.cross_entropy(network(images if on_gpu else images.float()), labels)

        self._loss_of = torch.compile(loss_of) if model.startswith("compiled_") else loss_of
        self._optimizer = torch.optim.SGD(self._module.parameters(), 0.1, momentum=0.9)
        self._labels = torch.randint(0, 1000, (batch,), device=device)

    def reset(self) -> None:
        """Start again: batches of an arm that leaves decoding out may have made the weights infinite."""
        self._module.load_state_dict(self._initial)
        for state in self._optimizer.state.values():
            state["momentum_buffer"].zero_()  # in place, because a captured graph has its address

    def step(self, images: torch.Tensor) -> None:
        loss = self._loss_of(images, self._labels)
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()


@final
class GraphTraining:
    """A `Training` whose step is captured as one CUDA graph, on the first images that it gets."""

    def __init__(self, model: str, device: torch.device, batch: int, *, ddp: bool) -> None:
        self._side, self._graph = torch.cuda.Stream(device), torch.cuda.CUDAGraph()  # type: ignore[no-untyped-call]
        self._images: torch.Tensor | None = None
        with torch.cuda.stream(self._side):  # as DDP requires it
            self._training = Training(model, device, batch, ddp=ddp)

    def reset(self) -> None:
        self._training.reset()

    def step(self, images: torch.Tensor) -> None:
        if self._images is None:
            self._images = images.clone()
            self._capture(self._images)
        self._images.copy_(images)
        self._graph.replay()

    def _capture(self, images: torch.Tensor) -> None:
        self._side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side):
            for _ in range(BEFORE_CAPTURE):
                self._training.step(images)
        torch.cuda.current_stream().wait_stream(self._side)
        torch.cuda.synchronize()
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):  # the loader's threads work meanwhile
            self._training.step(images)


def training_of(model: str, device: torch.device, batch: int, *, ddp: bool) -> Training | GraphTraining:
    """The training of a model by its name, which may begin with `graph_` or `compiled_`."""
    if model.startswith("graph_"):
        return GraphTraining(model.removeprefix("graph_"), device, batch, ddp=ddp)
    return Training(model, device, batch, ddp=ddp)


# --- one process ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What the processes of one workload measure.

    device: "cuda" or "cpu". seconds: of a measurement with a resident batch; every arm takes as many steps.
    warm_up: batches that each loader loads first. settling: steps that it feeds after that, before the first repeat.
    arms: of each repeat, in order; the first one is `resident`.
    missing: the (arm, repeat) whose figures are not in the log yet. origin: where and when this is measured.
    """

    ranks: int
    model: str
    photos: str
    device: str
    batch: int
    seconds: float
    warm_up: int
    settling: int
    workload: str
    arms: tuple[tuple[int, tuple[str, ...]], ...]
    missing: frozenset[tuple[str, int]]
    log: Path
    origin: dict[str, str]


def use(device: torch.device) -> None:
    """Make a GPU the current one of this thread."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


@final
class Rank:
    """This process's loader and trainings, in a process group."""

    def __init__(self, job: Job, device: torch.device, stack: ExitStack) -> None:
        self._job, self._device, self._clock = job, device, Clock(device)
        self._calls = Calls()
        stack.enter_context(self._calls.recorded())
        arms = [ARMS[name] for _, names in job.arms for name in names]
        self.trainings = {
            ddp: training_of(job.model, device, job.batch, ddp=ddp) for ddp in sorted({arm.ddp for arm in arms})
        }
        shape = (job.batch, 3, 224, 224)
        resident = torch.randn(shape, device=device).to(torch.bfloat16, memory_format=torch.channels_last)
        self.resident = itertools.repeat(resident)
        self._loaders = {calls: self._opened(calls, stack) for calls in {"auto"} | {arm.calls for arm in arms}}
        self._batches = {calls: self._endless(loader, stack) for calls, loader in self._loaders.items()}
        for calls in sorted({arm.calls for arm in arms if arm.fed}):
            for _ in range(job.warm_up):
                next(self._batches[calls])

    def _opened(self, calls: str, stack: ExitStack) -> gpuflow.Loader:
        job = self._job
        keys = {"source.folder": job.photos, "pipelines.train.batch.size": job.batch, "run.decoder_calls": calls}
        overrides = [f"{key}={value}" for key, value in keys.items()]
        loader = gpuflow.load(CONFIG, device=self._device, overrides=overrides)
        stack.callback(loader.close)
        return loader

    @staticmethod
    def _endless(loader: gpuflow.Loader, stack: ExitStack) -> Iterator[torch.Tensor]:
        batches = (images for _ in itertools.count() for images, _ in loader)
        stack.callback(batches.close)
        return batches

    def batches_of(self, arm: Arm) -> Iterator[torch.Tensor]:
        return self._batches[arm.calls] if arm.fed else self.resident

    def other_thread(self, what: str) -> AbstractContextManager[Callable[[], object]]:
        """What another thread does meanwhile. Gives a function to call before each step."""
        match what:
            case "nothing":
                return contextlib.nullcontext(lambda: None)
            case "computing":
                return computing(COMPUTING_SHARE)
            case "decoding" | "calls in C":
                loader = self._loaders["auto"]
                source = loader.dataset
                files = [Path(source.path(index)).read_bytes() for index in range(self._job.batch)]
                decode = one_chunk(loader._plan.gpu, files, self._device)
                if what == "decoding":
                    return decoding(decode, self._device)
                repeated: AbstractContextManager[Callable[[], object]] = calls_in_c(
                    decode, self._device, ahead=STEPS_AHEAD, seconds=WAIT_SECONDS
                )
                return repeated
            case _:
                raise AssertionError(what)

    def measure(self, name: str, steps: int) -> Figures:
        arm, clock, marks, start = ARMS[name], self._clock, list[Any](), 0.0
        training, batches = self.trainings[arm.ddp], self.batches_of(arm)
        training.reset()
        with left_out(arm.without), self.other_thread(arm.other_thread) as before_step:
            for number in range(-WARM_UP_STEPS, steps):
                if number == 0:
                    clock.synchronize()
                    dist.barrier()
                    clock.synchronize()
                    self._calls.spans.clear()
                    start = time.perf_counter()
                before_step()
                training.step(next(batches))
                marks.append(clock.mark())
                if len(marks) > STEPS_AHEAD:
                    clock.wait(marks[-1 - STEPS_AHEAD])
            clock.synchronize()
            seconds = time.perf_counter() - start
            calls = self._calls.median_ms, self._calls.overlapping
        intervals = clock.intervals_ms(marks[WARM_UP_STEPS:])
        median, p95 = (float(np.quantile(intervals, share)) for share in (0.5, 0.95))
        return Figures(steps * self._job.batch / seconds, median, p95, *calls)

    def measure_all(self, name: str, steps: int) -> dict[str, float]:
        """All ranks measure an arm together; each gets the same figures."""
        own = torch.tensor(self.measure(name, steps), dtype=torch.float64, device=self._device)
        every = [torch.empty_like(own) for _ in range(self._job.ranks)]
        dist.all_gather(every, own)
        return combined([Figures(*figures.tolist()) for figures in every])


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def join_group(number: int, ranks: int, device: torch.device, port: int) -> None:
    """Make this process rank `number` of a process group."""
    on_gpu = device.type == "cuda"
    use(device)
    torch.backends.cudnn.benchmark = True
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=number,
        world_size=ranks,
        timeout=datetime.timedelta(seconds=WAIT_SECONDS),
        device_id=device if on_gpu else None,
    )


def only_rank(options: argparse.Namespace, device: torch.device, arms: Sequence[str], stack: ExitStack) -> Rank:
    """The rank of this process in a process group of one, for scripts that call `Rank.measure` themselves.

    options: photos, model, batch and warm_up, see `Job`.
    """
    join_group(0, 1, device, free_port())
    job = Job(
        ranks=1,
        model=options.model,
        photos=str(options.photos),
        device=device.type,
        batch=options.batch,
        seconds=0.0,
        warm_up=options.warm_up,
        settling=0,
        workload="",
        arms=((0, tuple(arms)),),
        missing=frozenset(),
        log=Path(os.devnull),
        origin={},
    )
    return Rank(job, device, stack)


def append(log: Path, record: Record) -> None:
    with log.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")


def main(number: int, job: Job, port: int) -> None:
    """The process of rank `number`."""
    device = torch.device("cuda", number) if job.device == "cuda" else torch.device("cpu")
    join_group(number, job.ranks, device, port)
    with ExitStack() as stack:
        rank = Rank(job, device, stack)
        for name in {ARMS[one].calls: one for _, names in job.arms for one in names if ARMS[one].fed}.values():
            rank.measure_all(name, job.settling)
        rate = rank.measure_all("resident", WARM_UP_STEPS)["images_per_s"] / job.ranks
        steps = max(2, round(job.seconds * rate / job.batch))
        for repeat, names in job.arms:
            resident = 0.0
            for name in names:
                metrics = rank.measure_all(name, steps)
                resident = resident or metrics["images_per_s"]
                metrics["step_ratio"] = metrics["images_per_s"] / resident
                if number == 0:
                    show(job.workload, name, metrics)
                    if (name, repeat) in job.missing:
                        measured = {"workload": job.workload, "arm": name, "repeat": repeat, "metrics": metrics}
                        append(job.log, {**measured, **job.origin})
        dist.barrier()
    os._exit(0)  # without waiting for threads of NCCL


def show(workload: str, name: str, metrics: dict[str, float]) -> None:
    text = f"{workload}: {name:38}{metrics['images_per_s']:9,.0f} images/s {metrics['step_ratio']:.3f}"
    text += f"  interval {metrics['interval_ms']:.1f} (95%: {metrics['interval_p95_ms']:.1f}) ms"
    if "call_ms" in metrics:
        text += f"  call {metrics['call_ms']:.1f} ms, {metrics['two_at_a_time']:.0%} overlap"
    print(text, flush=True)
