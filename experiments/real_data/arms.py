"""The process of one arm: run.py starts it and asks it to measure. In between, its loader is full and idle.

Messages of run.py: a job (`dict`), then ("prepare", workload) or ("measure", workload), at last None. Each is answered
by ("ok", value) or ("failed", text). The answer to a job and to "prepare" is the arm's `about`.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import dali_loader
import engines
import psutil
import torch

import gpuflow  # before the first use of the GPU: it requests as many hardware queues as CUDA has, for each arm

HERE = Path(__file__).parent
WARM_STEPS, WARM_SECONDS, START_SECONDS = 8, 0.3, 60.0
"""Unmeasured steps and seconds before each measurement, and how long a loader's worker processes may take to start."""
TUNE_SECONDS = 1.0
Metrics = dict[str, float]


# --- measuring --------------------------------------------------------------------------------------------------------


class Meter:
    """Measures on one device in batches of one size. seconds: of a measurement."""

    def __init__(self, device: str, batch: int, seconds: float) -> None:
        self.device, self.batch, self.seconds = torch.device(device), batch, seconds
        self._memory_mb = 0.0

    def rate(self, step: Callable[[], object]) -> Metrics:
        """Images per second, and processor seconds of this process and its descendants for 1,000 images."""
        self.warm(step, WARM_SECONDS)
        cpu, images = cpu_seconds(), 0
        start = time.perf_counter()
        while images == 0 or time.perf_counter() - start < self.seconds:
            step()
            images += self.batch
        self.finish()
        spent = time.perf_counter() - start
        return {"images_per_s": images / spent, "cpu_s_per_1000": (cpu_seconds() - cpu) / images * 1000}

    def warm(self, step: Callable[[], object], seconds: float) -> None:
        start, steps = time.perf_counter(), 0
        while steps < WARM_STEPS or time.perf_counter() - start < seconds:
            step()
            steps += 1
        self.finish()

    def finish(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Add what any library allocates on the GPU inside the block to `memory_mb`."""
        free = self._free_bytes()
        yield
        self._memory_mb += (free - self._free_bytes()) / 1e6

    @property
    def memory_mb(self) -> float:
        return self._memory_mb

    def _free_bytes(self) -> int:
        return torch.cuda.mem_get_info()[0] if self.device.type == "cuda" else 0


def cpu_seconds() -> float:
    """Processor seconds of this process and its descendants."""
    process, seconds = psutil.Process(), 0.0
    for one in [process, *process.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            times = one.cpu_times()
            seconds += times.user + times.system
    return seconds


# --- loaders ----------------------------------------------------------------------------------------------------------


class Loader(Protocol):
    """Batches without end. The first call of `next` starts the loader. dtype: of its images."""

    dtype: torch.dtype

    def next(self) -> tuple[Any, Any]: ...

    def is_started(self) -> bool: ...

    def is_warm(self) -> bool:
        """Whether later epochs load as fast as this one: no file is new to the loader any more."""

    def counts(self) -> Metrics:
        """Numbers of images decoded so far: `engine_images`, `cpu_images`; empty if the loader does not count."""

    def close(self) -> None: ...


class Gpuflow:
    """gpuflow's loader with photos.yaml."""

    dtype = torch.bfloat16

    def __init__(self, job: dict[str, Any]) -> None:
        self._job, self._batches, self._given = job, self._endless(), 0
        self._loader: Any = None

    def _endless(self) -> Iterator[tuple[Any, Any]]:
        overrides = [f"source.folder={self._job['folder']}", f"pipelines.train.batch.size={self._job['batch']}"]
        device = None if self._job["device"] == "cpu" else self._job["device"]
        self._loader = gpuflow.load(HERE / "photos.yaml", device=device, overrides=[*overrides, *self._job["set"]])
        while True:
            yield from self._loader

    def next(self) -> tuple[Any, Any]:
        images, labels = next(self._batches)
        self._given += 1
        return images, labels

    def is_warm(self) -> bool:
        return self._given >= len(self._loader)

    def is_started(self) -> bool:
        return not self._loader.stats().get("processes", {}).get("starting")

    def stats(self) -> dict[str, Any]:
        """The loader's, see `gpuflow.loader.Loader.stats`; empty before the first batch."""
        return {} if self._loader is None else dict(self._loader.stats())

    def counts(self) -> Metrics:
        stats = self.stats()
        return {name: stats[name] for name in ("engine_images", "cpu_images") if name in stats}

    def close(self) -> None:
        if self._loader is not None:
            self._loader.close()


class Dali:
    """DALI with the hw_decoder_load and the files that `tune` found."""

    dtype = torch.float16

    def __init__(self, job: dict[str, Any]) -> None:
        tuned = job["tuned"]
        self._batches = dali_loader.batches(tuned["files"], tuned["labels"], job["batch"], tuned["load"])

    def next(self) -> tuple[Any, Any]:
        images, labels = next(self._batches)
        return images, labels

    def is_started(self) -> bool:
        return True

    def is_warm(self) -> bool:
        return True

    def counts(self) -> Metrics:
        return {}

    def close(self) -> None:
        """DALI's threads end with the process."""


def tune_dali(job: dict[str, Any]) -> dict[str, Any]:
    """The files that DALI decodes, and the hw_decoder_load with which it is fastest alone.

    In a separate process, because DALI keeps the GPU memory of an ended pipeline.
    """
    import nvidia.dali

    files, labels, left_out = dali_loader.readable(Path(job["folder"]))
    load = job.get("load")
    if load is None:
        meter, rates = Meter(job["device"], job["batch"], TUNE_SECONDS), {}
        for candidate in dali_loader.LOADS:
            batches = dali_loader.batches(files, labels, job["batch"], candidate)
            meter.warm(functools.partial(next, batches), TUNE_SECONDS)
            rates[candidate] = meter.rate(functools.partial(next, batches))["images_per_s"]
            batches.close()
        print(f"  DALI by hw_decoder_load: { {key: round(value) for key, value in rates.items()} }", flush=True)
        load = max(rates, key=rates.__getitem__)
    return {
        "files": files,
        "labels": labels,
        "load": load,
        "setting": f"hw_decoder_load={load}, {left_out} of {left_out + len(files)} names left out",
        "versions": f"dali {nvidia.dali.__version__}",
    }


# --- arms -------------------------------------------------------------------------------------------------------------


class Training:
    """A step of a torchvision model as users write it: bf16 autocast, channels_last, SGD, on the default stream.

    model: a torchvision model; after `compiled_` its forward pass and its loss are compiled, and after `graphed_` they
        and the backward pass are replayed as CUDA graphs, too.
    """

    def __init__(self, model: str, meter: Meter, dtype: torch.dtype) -> None:
        import torchvision

        device = meter.device
        how, _, name = model.rpartition("_")
        network = getattr(torchvision.models, name)().to(device)
        network = network.to(memory_format=torch.channels_last)

        def loss_of(images: Any, labels: Any) -> Any:
            with torch.autocast(device.type, torch.bfloat16):
                return torch.nn.functional.cross_entropy(network(images), labels)

        mode = "reduce-overhead" if how == "graphed" else None
        self._loss_of = torch.compile(loss_of, mode=mode) if how else loss_of
        self._optimizer = torch.optim.SGD(network.parameters(), 0.1, momentum=0.9)
        images = torch.randn((meter.batch, 3, 224, 224), device=device).to(dtype)
        labels = torch.randint(0, 1000, (meter.batch,), device=device)
        self._resident = images.contiguous(memory_format=torch.channels_last), labels

    def resident_step(self) -> None:
        self.step(*self._resident)

    def fed_step(self, loader: Loader) -> None:
        self.step(*loader.next())

    def step(self, images: Any, labels: Any) -> None:
        self._optimizer.zero_grad(set_to_none=True)
        self._loss_of(images, labels).backward()
        self._optimizer.step()


class TrainingArm:
    """Measures a loader alone and while it feeds a training; without a loader, the training on a resident batch.

    The loader's first epoch is not measured, unless the job says so. The training runs on a resident batch before its
    first batch from the loader, so that its own GPU memory is allocated by then. The rate on the resident batch is
    measured just before that of the fed training, in this process.
    """

    def __init__(self, job: dict[str, Any], meter: Meter, loader: Loader | None, about: dict[str, Any]) -> None:
        self.about = about
        self._meter, self._loader, self._warm_up = meter, loader, float(job["warm_up"])
        self._first_epoch = bool(job["first_epoch"])
        self._training: Training | None = None

    def prepare(self, workload: str) -> None:
        if workload != "alone":
            self._training = None  # its memory is used again
            self._training = Training(
                workload, self._meter, torch.bfloat16 if self._loader is None else self._loader.dtype
            )
            self._meter.warm(self._training.resident_step, self._warm_up)
        if self._loader is not None:
            with self._meter.watched():
                start, step = time.perf_counter(), self._fed_step(workload)
                self._meter.warm(step, self._warm_up)
                while not self._loader.is_started() and time.perf_counter() - start < START_SECONDS:
                    step()
                while not self._first_epoch and not self._loader.is_warm():
                    step()

    def measure(self, workload: str) -> Metrics:
        if workload == "alone":
            return self._counted(self._fed_step(workload))
        assert self._training is not None
        resident = self._meter.rate(self._training.resident_step)
        if self._loader is None:
            return resident
        with self._meter.watched():
            fed = self._counted(self._fed_step(workload))
        return {
            **fed,
            "resident_images_per_s": resident["images_per_s"],
            "step_ratio": fed["images_per_s"] / resident["images_per_s"],
            "gpu_mem_mb": self._meter.memory_mb,
        }

    def _fed_step(self, workload: str) -> Callable[[], object]:
        assert self._loader is not None
        if workload == "alone":
            return self._loader.next
        assert self._training is not None
        return functools.partial(self._training.fed_step, self._loader)

    def _counted(self, step: Callable[[], object]) -> Metrics:
        """A rate, with the share of the images that the JPEG engines decoded."""
        assert self._loader is not None
        before = self._loader.counts()
        metrics = self._meter.rate(step)
        decoded = {name: count - before.get(name, 0) for name, count in self._loader.counts().items()}
        if total := sum(decoded.values()):
            metrics["engine_share"] = decoded["engine_images"] / total
        return metrics

    def close(self) -> None:
        if self._loader is not None:
            self._loader.close()


class EnginesArm:
    """Measures the JPEG engines alone, with the number of concurrent callers that decodes most."""

    def __init__(self, job: dict[str, Any], meter: Meter, about: dict[str, Any]) -> None:
        self.about = about
        self._seconds, self._callers = meter.seconds, job.get("callers")
        self._engines = engines.Engines(Path(job["folder"]), by_pixels=job["arm"] == "engines sorted")

    def prepare(self, workload: str) -> None:
        rates = {count: self._engines.rate(TUNE_SECONDS, count) for count in engines.CALLERS}
        self._callers = self._callers or max(rates, key=rates.__getitem__)
        self.about["setting"] = f"calls={engines.CALL}, callers={self._callers}"
        self.about["choice"] = {"callers": self._callers}

    def measure(self, workload: str) -> Metrics:
        assert self._callers is not None
        rate = self._engines.rate(self._seconds, self._callers)
        return {"images_per_s": rate, "engine_share": self._engines.share}

    def close(self) -> None:
        """The decoders end with the process."""


def set_constant(place: str, value: str) -> None:
    """Set a constant of a module, such as gpuflow.execute.gpu.runner.LONG_WAIT. Raises AttributeError."""
    module, _, name = place.rpartition(".")
    owner = importlib.import_module(module)
    getattr(owner, name)  # a misspelt one would change nothing
    setattr(owner, name, ast.literal_eval(value))


def open_arm(job: dict[str, Any]) -> TrainingArm | EnginesArm:
    """The arm of a job. Its `about` holds the GPU's name, its setting, versions, and what it chose by measurement."""
    for place, value in job.get("constants", {}).items():
        set_constant(place, value)
    meter = Meter(job["device"], job["batch"], job["seconds"])
    about: dict[str, Any] = {"device": "", "setting": "", "versions": "", "choice": {}}
    if meter.device.type == "cuda":
        torch.zeros(1, device=meter.device)  # makes the context, whose memory is not the loader's
        torch.backends.cudnn.benchmark = True
        about["device"] = torch.cuda.get_device_name()
    match job["arm"]:
        case "gpuflow":
            return TrainingArm(job, meter, Gpuflow(job), about | {"setting": ", ".join(job["set"])})
        case "dali":
            tuned = job["tuned"]
            about |= {name: tuned[name] for name in ("setting", "versions")} | {"choice": {"load": tuned["load"]}}
            return TrainingArm(job, meter, Dali(job), about)
        case "resident":
            return TrainingArm(job, meter, None, about)
        case "engines" | "engines sorted":
            return EnginesArm(job, meter, about)
        case other:
            raise ValueError(f"no arm {other!r}")


def serve(connection: Connection) -> None:
    """Answer run.py's messages until it says None or ends."""
    try:
        job = connection.recv()
        if job["arm"] == "tune dali":
            connection.send(("ok", tune_dali(job)))
            return
        arm = open_arm(job)
        connection.send(("ok", arm.about))
        while (message := connection.recv()) is not None:
            action, workload = message
            if action == "measure":
                connection.send(("ok", arm.measure(workload)))
            else:
                arm.prepare(workload)
                connection.send(("ok", arm.about))
        arm.close()
    except EOFError:
        return
    except (Exception, SystemExit):
        connection.send(("failed", traceback.format_exc()))


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])))
    sys.stdout.flush()
    os._exit(0)  # do not wait for the threads of other libraries
