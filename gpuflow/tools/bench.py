"""`gpuflow bench`: measures images per second by number of workers, for gpuflow and for other loaders on the same job.

Every measurement runs in a new process. Within each repeat the loaders (arms) alternate, so that a machine that becomes
slower affects all of them. Run as `python -m gpuflow.tools.bench JOB`, this module is such a process.
"""

from __future__ import annotations

import csv
import datetime
import io
import json
import os
import platform
import runpy
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from gpuflow.errors import GpuflowError, LoaderError, did_you_mean, is_system_fault
from gpuflow.runtime.files import atomic_write

__all__ = ["ARMS", "COLUMNS", "Job", "machine", "measure", "read_log", "versions", "write_log", "write_results"]

COLUMNS = [
    "arm",
    "workload",
    "metric",
    "value",
    "unit",
    "low",
    "high",
    "repeats",
    "machine",
    "versions",
    "commit",
    "date",
]
_PROCESS_SECONDS = 600.0
_TRIES = 100
"""Bad samples in a row before an arm gives up."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One measurement: an arm with `workers` workers runs for `seconds` after a warm-up of `warm_up` seconds.

    arm: a name in `ARMS`, or `path/to/file.py:function`: a function that takes the job and yields numbers of images.
    """

    arm: str
    path: str
    overrides: tuple[str, ...]
    pipeline: str
    workers: int
    seconds: float
    warm_up: float = 1.5


def measure(
    jobs: Sequence[Job], *, repeats: int, progress: Callable[[Job, float], None] = lambda job, rate: None
) -> dict[Job, list[float]]:
    """Images per second of each job, measured `repeats` times. Jobs alternate, each in a new process."""
    rates: dict[Job, list[float]] = {job: [] for job in jobs}
    for repeat in range(repeats):
        for job in jobs if repeat % 2 == 0 else reversed(jobs):
            rate = _in_process(job)
            rates[job].append(rate)
            progress(job, rate)
    return rates


def _in_process(job: Job) -> float:
    command = [sys.executable, "-m", "gpuflow.tools.bench", json.dumps(asdict(job))]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PROCESS_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise GpuflowError(
            f"bench: {job.arm} with {job.workers} worker(s) took more than {_PROCESS_SECONDS:g} s"
        ) from None
    if done.returncode != 0:
        raise GpuflowError(f"bench: {job.arm} with {job.workers} worker(s) failed:\n{done.stderr.strip()[-2000:]}")
    return float(json.loads(done.stdout.splitlines()[-1]))


# --- the arms ---------------------------------------------------------------------------------------------------------


def _gpuflow(job: Job) -> Iterable[int]:
    from gpuflow.config import read_config
    from gpuflow.loader.assemble import build_loader
    from gpuflow.vocabulary import stage_table

    config = read_config(job.path, stage_table(), [*job.overrides, f"run.threads={job.workers}"])
    loader = build_loader(config, job.pipeline, rank=0, world_size=1, device=None)
    started = False
    while True:
        for images, _ in loader:
            started = started or not loader.stats().get("processes", {}).get("starting")
            if started:
                yield len(images)


class _Samples:
    """The same samples as a PyTorch data set: decodes to a PIL image or a uint8 tensor, then torchvision transforms."""

    def __init__(self, job: Job, *, pil: bool, normalize: bool) -> None:
        from gpuflow.config import read_config
        from gpuflow.loader.assemble import open_split
        from gpuflow.pipeline.stage import Mixing
        from gpuflow.vocabulary import stage_table

        config = read_config(job.path, stage_table(), job.overrides)
        self.source = open_split(config, job.pipeline)
        batch = config.pipelines[job.pipeline].batch
        self.batch_size = batch.size or batch.global_size or 1
        self._pil = pil
        stages = [stage for stage in config.programs[job.pipeline].pipeline.stages[1:] if not isinstance(stage, Mixing)]
        self._transforms = [stage.torchvision() for stage in stages if normalize or stage.stage_name != "normalize"]
        self.rest = [stage.torchvision() for stage in stages if not normalize and stage.stage_name == "normalize"]

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        """A sample, or the next one that is no bad one: gpuflow's own loader takes another one, too."""
        reason = ""
        for place in range(index, index + _TRIES):
            try:
                return self._sample(place % len(self))
            except Exception as error:  # Pillow's readers and transforms raise many kinds
                if is_system_fault(error):
                    raise
                reason = f"{type(error).__name__}: {error}"
        raise LoaderError(f"{_TRIES} samples in a row are bad; gpuflow scan lists them; the last one: {reason}")

    def _sample(self, index: int) -> tuple[Any, Any]:
        import torch
        from PIL import Image
        from torchvision.io import ImageReadMode, decode_image

        from gpuflow.parity.others import FORMATS

        path = self.source.path(index)
        if os.path.isfile(path):
            with open(path, "rb") as file:
                data = file.read()
        else:
            data = self.source.read([index], lambda size: np.empty(size, np.uint8)).sample(0).tobytes()
        if self._pil:
            image: Any = Image.open(io.BytesIO(data), formats=FORMATS).convert("RGB")
        else:
            image = decode_image(torch.frombuffer(bytearray(data), dtype=torch.uint8), ImageReadMode.RGB)
        for transform in self._transforms:
            image = transform(image)
        return image, self.source.labels[index].tolist()


def _dataloader(job: Job, *, pil: bool = True, normalize: bool = True) -> Iterable[int]:
    import torch

    samples = _Samples(job, pil=pil, normalize=normalize)
    loader: Any = torch.utils.data.DataLoader(
        samples,  # type: ignore[arg-type]
        batch_size=samples.batch_size,
        shuffle=True,
        drop_last=len(samples) >= samples.batch_size,
        num_workers=job.workers,
        prefetch_factor=4,
        persistent_workers=True,
    )
    while True:
        for images, _ in loader:
            for transform in samples.rest:
                images = transform(images)
            yield len(images)


def _spdl(job: Job) -> Iterable[int]:
    """SPDL as in its introduction: one item per sample, a concurrent decode, an aggregate, a collate."""
    import torch
    from spdl.pipeline import PipelineBuilder

    samples = _Samples(job, pil=False, normalize=True)

    def indices() -> Iterator[int]:
        while True:
            yield from np.random.default_rng(0).permutation(len(samples)).tolist()

    def collate(items: list[tuple[Any, int]]) -> Any:
        images, labels = zip(*items, strict=True)
        return torch.stack(images), torch.tensor(labels, device="cpu")

    builder: Any = PipelineBuilder()
    pipeline = (
        builder.add_source(indices())
        .pipe(samples.__getitem__, concurrency=job.workers)
        .aggregate(samples.batch_size)
        .pipe(collate)
        .add_sink(3)
        .build(num_threads=job.workers)
    )
    with pipeline.auto_stop():
        for images, _ in pipeline.get_iterator(timeout=60):
            yield len(images)


ARMS: dict[str, Callable[[Job], Iterable[int]]] = {
    "gpuflow": _gpuflow,
    "dataloader": _dataloader,
    "dataloader-uint8": lambda job: _dataloader(job, pil=False, normalize=True),
    "dataloader-uint8-raw": lambda job: _dataloader(job, pil=False, normalize=False),
    "spdl": _spdl,
}
"""gpuflow; DataLoader with PIL images; DataLoader with uint8 tensors, normalized in the workers; the same, normalized
by the consumer for a whole batch; SPDL with one item per sample. The others run equal torchvision transforms."""


def _arm(name: str) -> Callable[[Job], Iterable[int]]:
    """The arm of this name, or the function at `path/to/file.py:function`."""
    path, colon, function = name.rpartition(":")
    return runpy.run_path(path)[function] if colon else ARMS[name]


def check_arms(names: Sequence[str]) -> None:
    """Raise ValueError for an unknown arm, or one that is named twice."""
    for i, name in enumerate(names):
        if name not in ARMS:
            raise ValueError(f"--against: {name!r} is nothing to compare with{did_you_mean(name, ARMS)}")
        if name in names[:i]:
            raise ValueError(f"--against: {name!r} is named twice; name it once")


def rate(batches: Iterable[int], *, warm_up: float, seconds: float) -> float:
    """Items per second over `seconds`, measured after `warm_up` seconds."""
    iterator = iter(batches)
    next(iterator)
    start = time.perf_counter()
    while time.perf_counter() - start < warm_up:
        next(iterator)
    count, start = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - start) < seconds:
        count += next(iterator)
    return count / elapsed


# --- results ----------------------------------------------------------------------------------------------------------


def machine() -> str:
    """A description of this machine: cores that the process may use, processor, memory."""
    model = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            model = next((line.partition(":")[2].strip() for line in file if line.startswith("model name")), model)
    except OSError:
        pass
    memory = psutil.virtual_memory().total / 2**30
    return f"{len(os.sched_getaffinity(0))} cores of {model}, {memory:.0f} GiB"


def versions() -> str:
    """Versions of the packages that the figures depend on."""
    from importlib.metadata import version

    packages = {"torch": "torch", "torchvision": "torchvision", "spdl": "spdl-core", "opencv": "opencv-python-headless"}
    words = [f"{name} {version(package)}" for name, package in packages.items()]
    return " ".join([f"python {platform.python_version()}", *words])


def commit() -> str:
    """The commit of the working directory, with a + if it has changes; empty outside a repository."""
    command = ["git", "describe", "--always", "--dirty=+", "--abbrev=9"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip()


def row(arm: str, workload: str, metric: str, values: Sequence[float], unit: str) -> dict[str, Any]:
    """One figure with its spread, and where it was measured."""
    return {
        "arm": arm,
        "workload": workload,
        "metric": metric,
        "unit": unit,
        **spread(values),
        "machine": machine(),
        "versions": versions(),
        "commit": commit(),
        "date": datetime.date.today().isoformat(),
    }


def spread(values: Sequence[float]) -> dict[str, Any]:
    """The median of `values`, the lowest, the highest, and how many there are."""
    numbers = {"value": statistics.median(values), "low": min(values), "high": max(values)}
    texts = {key: f"{number:.5g}" if abs(number) < 1000 else f"{number:.0f}" for key, number in numbers.items()}
    return {**texts, "repeats": len(values)}


def write_results(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Write rows as a tidy CSV."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path, text=True) as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def read_log(path: Path) -> list[dict[str, Any]]:
    """The records of a log, which has a line of JSON for each, without a last line that was written in part."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def write_log(path: Path, records: Iterable[dict[str, Any]]) -> None:
    """Replace a log by one of these records."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path, text=True) as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


def rate_of(fields: dict[str, Any]) -> float:
    """Measure a job in this process. fields: those of `Job`, as JSON has them."""
    job = Job(**{**fields, "overrides": tuple(fields["overrides"])})
    return rate(_arm(job.arm)(job), warm_up=job.warm_up, seconds=job.seconds)


def _main() -> None:
    try:
        result = rate_of(json.loads(sys.argv[1]))
    except GpuflowError as error:
        sys.exit(str(error))
    print(json.dumps(result), flush=True)
    os._exit(0)  # do not wait for persistent workers of another loader


if __name__ == "__main__":
    _main()
