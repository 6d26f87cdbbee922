"""`gpuflow bench`: measures images per second by number of workers, for gpuflow and for other loaders on the same work.

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
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import psutil

from gpuflow.errors import ConfigError, GpuflowError, LoaderError, Problem, is_system_fault, suggest
from gpuflow.runtime.files import atomic_write
from gpuflow.tools.machine import usage_of

if TYPE_CHECKING:
    from rich.table import Table

    from gpuflow.config import Config
    from gpuflow.pipeline.program import Program


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
WORKLOADS = ("pipeline", "decode", "batch", "normalize", "transfer")
"""The file's pipeline as it is; decode and resize to its size, one image a batch; the same in its batches; these
normalized; these copied to the GPU."""
_BUSY_SHARE, _IDLE_SECONDS = 0.1, 0.3
"""Of all cores, the most that other processes may use, and for how long that is looked at before a measurement."""
_PROCESS_SECONDS = 600.0
_TRIES = 100
"""Bad samples in a row before an arm gives up."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One measurement: an arm with `workers` workers runs for `seconds` after a warm-up of `warm_up` seconds.

    arm: a name in `ARMS`, or `path/to/file.py:function`: a function that takes the job and yields numbers of images.
    workload: a name in `WORKLOADS`.
    """

    arm: str
    path: str
    overrides: tuple[str, ...]
    pipeline: str
    workers: int
    seconds: float
    warm_up: float = 1.5
    workload: str = "pipeline"

    @property
    def device(self) -> str:
        return "cuda" if self.workload == "transfer" else "cpu"


def measure(
    jobs: Sequence[Job],
    *,
    repeats: int,
    progress: Callable[[Job, float], None] = lambda job, rate: None,
    busy: Callable[[Job, float], None] = lambda job, share: None,
) -> dict[Job, list[float]]:
    """Measure images per second of each job `repeats` times. Jobs alternate, each in a new process.

    busy: called where other processes use more than a tenth of all cores, before or during a measurement, with that
    share.
    """
    rates: dict[Job, list[float]] = {job: [] for job in jobs}
    for repeat in range(repeats):
        for job in jobs if repeat % 2 == 0 else reversed(jobs):
            before = psutil.cpu_percent(interval=_IDLE_SECONDS) / 100
            rate, during = _in_process(job)
            rates[job].append(rate)
            if max(before, during) > _BUSY_SHARE:
                busy(job, max(before, during))
            progress(job, rate)
    return rates


def _in_process(job: Job) -> tuple[float, float]:
    command = [sys.executable, "-m", "gpuflow.tools.bench", json.dumps(asdict(job))]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PROCESS_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise GpuflowError(
            f"bench: {job.arm} with {job.workers} worker(s) took more than {_PROCESS_SECONDS:g} s"
        ) from None
    if done.returncode != 0:
        raise GpuflowError(f"bench: {job.arm} with {job.workers} worker(s) failed:\n{done.stderr.strip()[-2000:]}")
    rate, others = json.loads(done.stdout.splitlines()[-1])
    return rate, others


class CpuTimes(NamedTuple):
    """Seconds: of a clock, of all cores in use, and of them by this process and its children."""

    clock: float
    busy: float
    own: float


def _cpu_times() -> CpuTimes:
    times, own = psutil.cpu_times(), usage_of([os.getpid()])
    idle = times.idle + times.iowait + times.guest + times.guest_nice  # a guest's time is in user, too
    return CpuTimes(time.perf_counter(), sum(times) - idle, own.cpu_s if own else 0.0)


def share_of_others(begin: CpuTimes, end: CpuTimes, *, cores: int) -> float:
    """Return the share of all cores that other processes used from `begin` to `end`, 0 to 1.

    Examples:
        >>> share_of_others(CpuTimes(0.0, 5.0, 1.0), CpuTimes(10.0, 20.0, 11.0), cores=2)
        0.25
    """
    seconds, busy, own = (after - before for before, after in zip(begin, end, strict=True))
    return min(max(0.0, (busy - own) / (seconds * cores)), 1.0)  # times are counted in ticks, now and then late


# --- the workloads ----------------------------------------------------------------------------------------------------


def workload_problem(config: Config, pipeline: str, workload: str) -> str:
    """Return why a pipeline cannot be measured as this workload; empty where it can."""
    if workload == "pipeline":
        return ""
    program = config.programs[pipeline]
    if program.decoder.library is not None:
        return f"needs gpuflow's decoder, and {pipeline} begins with {program.decoder.stage_name}"
    if workload == "normalize" and not _normalizing(program):
        return f"needs a stage that normalizes, and {pipeline} has none"
    if workload == "transfer":
        import torch

        if not torch.cuda.is_available():
            return "needs a GPU, and torch sees none here"
    return ""


def _normalizing(program: Program) -> list[dict[str, Any]]:
    """Return the stages that normalize, as entries of a file."""
    stages = [stage for stage in program.pipeline.stages if stage.stage_name == "normalize"]
    return [{stage.stage_name: stage.params()} for stage in stages]


def _config_of(job: Job, *overrides: str) -> Config:
    """Read the file of a job, with its pipeline changed to the workload."""
    from gpuflow.config import read_config
    from gpuflow.vocabulary import stage_table

    every = [*job.overrides, *overrides]
    config = read_config(job.path, stage_table(), every)
    if job.workload == "pipeline":
        return config
    program = config.programs[job.pipeline]
    height, width, _ = program.result.shape
    decode = {**program.decoder.params(), "max_scans": program.decoder.max_scans, "backend": "cpu"}
    stages = [{program.decoder.stage_name: decode}, {"resize": {"height": height, "width": width}}]
    if job.workload in ("normalize", "transfer"):
        stages += _normalizing(program)
    every += [f"pipelines.{job.pipeline}.stages={json.dumps(stages)}"]
    every += [f"pipelines.{job.pipeline}.batch={{size: 1}}"] if job.workload == "decode" else []
    return read_config(job.path, stage_table(), every)


# --- the arms ---------------------------------------------------------------------------------------------------------


def _gpuflow(job: Job) -> Iterable[int]:
    from gpuflow.loader.assemble import build_loader

    config = _config_of(job, f"run.threads={job.workers}")
    loader = build_loader(config, job.pipeline, rank=0, world_size=1, device=job.device)
    loader.audited = False
    started = False
    while True:
        for images, _ in loader:
            started = started or not loader.stats().get("processes", {}).get("starting")
            if started:
                yield len(images)


class _Samples:
    """The same samples as a PyTorch data set: decodes to a PIL image or a uint8 tensor, then torchvision transforms."""

    def __init__(self, job: Job, *, pil: bool, normalize: bool) -> None:
        from gpuflow.loader.assemble import open_split
        from gpuflow.pipeline.stage import Mixing

        config = _config_of(job)
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
        """Return a sample, or the next one that is no bad one: gpuflow's own loader takes another one, too."""
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
        from torchvision.transforms.functional import pil_to_tensor

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
        return pil_to_tensor(image) if isinstance(image, Image.Image) else image, self.source.labels[index].tolist()


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
        pin_memory=job.device == "cuda",
        persistent_workers=True,
    )
    while True:
        for images, _ in loader:
            for transform in samples.rest:
                images = transform(images)
            yield len(images.to(job.device, non_blocking=True))


def _spdl(job: Job) -> Iterable[int]:
    """Yield from SPDL as in its introduction: one item per sample, a concurrent decode, an aggregate, a collate."""
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
    builder.add_source(indices()).pipe(samples.__getitem__, concurrency=job.workers)
    builder.aggregate(samples.batch_size).pipe(collate)
    if job.device == "cuda":
        builder.pipe(lambda batch: (batch[0].cuda(), batch[1]))
    pipeline = builder.add_sink(3).build(num_threads=job.workers)
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
    """Return the arm of this name, or the function at `path/to/file.py:function`."""
    path, colon, function = name.rpartition(":")
    return runpy.run_path(path)[function] if colon else ARMS[name]


def names_of(option: str, text: str, known: Collection[str]) -> list[str]:
    """Return the names in a text, separated by commas. Raise ConfigError for one that is unknown or named twice.

    Examples:
        >>> names_of("--against", "spdl, dataloader", ARMS)
        ['spdl', 'dataloader']
    """
    names = [word.strip() for word in text.split(",") if word.strip()]
    for name in names:
        if name not in known:
            problem = Problem(f"{option}:", "must be a known name", name, suggest(name, known), code="config.range")
            raise ConfigError([problem])
    if len(set(names)) < len(names):
        raise ConfigError([Problem(f"{option}:", "must name each once", text, code="config.conflict")])
    return names


def _copied(batches: Iterable[int]) -> Iterator[int]:
    """Wait for each batch's copy to the GPU."""
    import torch

    for count in batches:
        torch.cuda.current_stream().synchronize()
        yield count


def rate(batches: Iterable[int], *, warm_up: float, seconds: float) -> float:
    """Return the items per second over `seconds`, measured after `warm_up` seconds."""
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
    """Return a description of this machine: cores that the process may use, processor, memory."""
    model = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            model = next((line.partition(":")[2].strip() for line in file if line.startswith("model name")), model)
    except OSError:
        pass
    memory = psutil.virtual_memory().total / 2**30
    return f"{len(os.sched_getaffinity(0))} cores of {model}, {memory:.0f} GiB"


def versions() -> str:
    """Return the versions of the packages that the figures depend on."""
    from importlib.metadata import version

    packages = {"torch": "torch", "torchvision": "torchvision", "spdl": "spdl-core", "opencv": "opencv-python-headless"}
    words = [f"{name} {version(package)}" for name, package in packages.items()]
    return " ".join([f"python {platform.python_version()}", *words])


def commit() -> str:
    """Return the commit of the working directory, with a + if it has changes; empty outside a repository."""
    command = ["git", "describe", "--always", "--dirty=+", "--abbrev=9"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip()


def row(arm: str, workload: str, metric: str, values: Sequence[float], unit: str) -> dict[str, Any]:
    """Return one figure with its spread, and where it was measured."""
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
    """Return the median of `values`, the lowest, the highest, and how many there are.

    Examples:
        >>> spread([120.0, 100.0, 90.0])
        {'value': '100', 'low': '90', 'high': '120', 'repeats': 3}
    """
    numbers = {"value": statistics.median(values), "low": min(values), "high": max(values)}
    texts = {key: f"{number:.5g}" if abs(number) < 1000 else f"{number:.0f}" for key, number in numbers.items()}
    return {**texts, "repeats": len(values)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """The rates of one job, in images per second.

    images_per_s: the median. ratio: gpuflow's median divided by it. other_processes: the largest share of all cores
    that other processes used, where it was more than a tenth.
    """

    workload: str
    workers: int
    arm: str
    images_per_s: float
    lowest: float
    highest: float
    ratio: float
    other_processes: float | None


def figures(rates: Mapping[Job, Sequence[float]], busy: Mapping[Job, float]) -> list[Figure]:
    """Return the figures of each job. busy: the largest share that other processes used."""
    medians = {job: statistics.median(values) for job, values in rates.items()}
    return [
        Figure(
            workload=job.workload,
            workers=job.workers,
            arm=job.arm,
            images_per_s=medians[job],
            lowest=min(values),
            highest=max(values),
            ratio=medians[replace(job, arm="gpuflow")] / medians[job],
            other_processes=busy.get(job),
        )
        for job, values in rates.items()
    ]


def table(rows: Sequence[Figure]) -> Table:
    """Return figures as a table for the terminal, with what other processes used if that was much."""
    from rich.table import Table

    busy = any(row.other_processes for row in rows)
    heads = ["workers", "arm", "images/s", "lowest", "highest", "gpuflow / arm", *(["other processes"] if busy else [])]
    made = Table(*heads, box=None, pad_edge=False)
    for column in made.columns:
        column.justify = "left" if column.header == "arm" else "right"
    for row in rows:
        rates = [f"{value:,.0f}" for value in (row.images_per_s, row.lowest, row.highest)]
        others = ["" if row.other_processes is None else f"{row.other_processes:.0%}"] if busy else []
        made.add_row(str(row.workers), row.arm, *rates, "" if row.arm == "gpuflow" else f"{row.ratio:.2f}", *others)
    return made


def write_results(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Write rows as a tidy CSV."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path, text=True) as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


class Log:
    """Records of measurements, each of which is a line of JSON in a file as soon as it is made.

    An interrupted run reads them and continues. A last line that was written in part is dropped.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
        self.records: list[dict[str, Any]] = [json.loads(line) for line in lines if line.endswith("\n")]
        self.discard(lambda record: False)

    def append(self, record: dict[str, Any]) -> None:
        """Add a record."""
        self.records.append(record)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")

    def discard(self, is_old: Callable[[dict[str, Any]], bool]) -> None:
        """Forget the records for which `is_old` returns True."""
        self.records = [record for record in self.records if not is_old(record)]
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(self._path, text=True) as file:
            file.writelines(json.dumps(record) + "\n" for record in self.records)


def rate_of(fields: dict[str, Any]) -> tuple[float, float]:
    """Measure a job in this process. fields: those of `Job`, as JSON has them.

    Returns:
        Images per second, and the share of all cores that other processes used meanwhile.
    """
    job = Job(**{**fields, "overrides": tuple(fields["overrides"])})
    begin, batches = _cpu_times(), _arm(job.arm)(job)
    found = rate(_copied(batches) if job.device == "cuda" else batches, warm_up=job.warm_up, seconds=job.seconds)
    return found, share_of_others(begin, _cpu_times(), cores=psutil.cpu_count() or 1)


def _main() -> None:
    try:
        result = rate_of(json.loads(sys.argv[1]))
    except GpuflowError as error:
        sys.exit(str(error))
    print(json.dumps(result), flush=True)
    for child in psutil.Process().children(recursive=True):  # workers that would go on during the next measurement
        with suppress(psutil.NoSuchProcess):
            child.kill()
    os._exit(0)


if __name__ == "__main__":
    _main()
