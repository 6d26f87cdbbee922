"""`gpuflow doctor`: judges whether a machine is set up well for loading images, and says what to change.

One pure function for each topic turns values of `gpuflow.tools.machine` into findings.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Literal

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from gpuflow.decode.libjpeg_turbo import OPENCV_COST, REMEDY
from gpuflow.runtime.cuda import QUEUES, QUEUES_VARIABLE
from gpuflow.sources.storage import is_remote
from gpuflow.tools.machine import MODULES, Cores, Driver, Gpu, Machine, Memory, ResourceLimits, Software

if TYPE_CHECKING:
    from gpuflow.tools.rates import CpuDecoders, Data, DecodeRate, DiskRate, JpegEngines

Status = Literal["ok", "note", "problem"]

TESTED = {"torch": "2.11.0", "torchvision": "0.26.0"}
"""The versions that gpuflow is tested with."""
_PAIR = " ".join(f"{name}=={version}" for name, version in TESTED.items())
FILES_A_THREAD = 32
"""The most files that one thread of the loader has open at the same time."""

_SPARE_FILES = 64
"""File descriptors for the rest of the process: pipes, libraries, checkpoints."""
_SMALL_SHARED_MEMORY = 1 << 30
_FEW_IMAGES, _SHORT_SECONDS = 200, 0.4
_MUCH_FASTER, _FAIR_SHARE = 1.3, 0.75
_IN_MEMORY = ("tmpfs", "ramfs")
_NETWORK = ("nfs", "cifs", "smb", "lustre", "ceph", "gpfs", "beegfs", "glusterfs", "fuse", "9p", "afs", "virtiofs")
_NEARER = "copy the data to local NVMe, or pack it into tar shards, which saves opening each file"
_FASTER = "keep the data on a faster disk, such as local NVMe; what fits into memory is cached after the first epoch"
_GPU_ADVICE = "see whether nvidia-smi works; start a container with --gpus all"
_HOW_TO_MEND = {
    "torch": f"pip install --force-reinstall {_PAIR}",
    "torchvision": f"pip install --force-reinstall {_PAIR}; the two must be built for each other",
    "cv2": "pip uninstall opencv-python, then pip install --force-reinstall opencv-python-headless, which needs no "
    "libraries of the desktop",
    "spdl.pipeline": "pip install --force-reinstall spdl-core",
}
_SLOW_VARIABLES = {
    "CUDA_LAUNCH_BLOCKING": "makes every kernel wait for the last one",
    "TRITON_INTERPRET": "runs the kernels in Python instead of on the GPU",
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "makes every tensor wait for the GPU's allocator",
}
"""What environment variables do where they are 1."""
_SOFTWARE, _HOST, _MEASURED = "Software and GPU", "Cores and limits", "Measured here, about a second each"
_HEADINGS = {
    **dict.fromkeys(("cores", "open files", "shared memory", "locked memory"), _HOST),
    **dict.fromkeys(("images", "disk", "cores' rate", "GPU's rate", "limit"), _MEASURED),
}
_COLOURS: dict[Status, str] = {"ok": "green", "note": "yellow", "problem": "bold red"}
_GAP, _LEAST_TEXT = 2, 20
"""Columns between those of a table, and the least for the text of a finding."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The judgement on one topic.

    status: `ok`; `note`: worth knowing, or could be better; `problem`: gpuflow fails, or is much slower than
    it could be. advice: what to change, None where nothing needs to change.
    """

    topic: str
    status: Status
    text: str
    advice: str | None = None


def judge(machine: Machine) -> list[Finding]:
    """Return all findings, ordered by topic. The comparison of disk and decoder comes last."""
    has_gpu = bool(machine.gpus)
    findings = [
        *_software(machine.software),
        *_gpu(machine.driver, machine.gpus, machine.gpu_error, machine.software, machine.environment),
        *_engines(machine.engines, has_gpu),
        *_c_code(machine.c_code),
        *_decoder(machine.decoders),
        *_environment(machine.environment, has_gpu),
        *_cores(machine.cores),
        *_open_files(machine.limits, machine.cores.threads),
        *_shared_memory(machine.shared_memory),
        *_locked_memory(machine.limits, has_gpu),
    ]
    if machine.software.broken:  # nothing was measured
        return findings
    return [
        *findings,
        *_data(machine.data, machine.data_error, has_gpu),
        *_disk(machine),
        *_core_rates(machine.core_rates, machine.cores),
        *_gpu_rate(machine.engines),
        *_limit(machine.disk, machine.core_rates, machine.engines),
    ]


# --- software and GPU -------------------------------------------------------------------------------------------------


def _software(software: Software) -> Iterator[Finding]:
    yield Finding("Python", "ok", software.python)
    versions = {name: software.versions.get(name, "none").partition("+")[0] for name in TESTED}
    found = ", ".join(f"{name} {software.versions.get(name, 'none')}" for name in TESTED)
    if versions == TESTED:
        yield Finding("torch", "ok", f"{found}: the tested pair")
    else:
        tested = " and ".join(f"{name} {version}" for name, version in TESTED.items())
        yield Finding(
            "torch", "note", f"{found}; gpuflow is tested with {tested}", f"if something fails: pip install {_PAIR}"
        )
    yield Finding("SPDL", "ok", f"spdl-core {software.versions.get('spdl-core', 'none')}")
    for module, error in software.broken.items():
        yield Finding(MODULES[module], "problem", f"{module} cannot be imported: {error}", _HOW_TO_MEND[module])


def _gpu(
    driver: Driver | None,
    gpus: Sequence[Gpu],
    gpu_error: str | None,
    software: Software,
    environment: Mapping[str, str],
) -> Iterator[Finding]:
    if driver is not None and not driver.asked:
        yield Finding(
            "driver",
            "note",
            "not asked, because nvidia-ml-py is not installed",
            "pip install 'gpuflow[gpu]' if this machine has an NVIDIA GPU",
        )
    elif driver is not None and driver.error is None:
        yield Finding("driver", "ok", f"NVIDIA {driver.version}, for CUDA up to {driver.cuda}")
    elif driver is not None:
        yield Finding(
            "driver",
            "problem",
            f"the NVIDIA driver does not answer: {driver.error}",
            "restart the machine if the driver was just updated; in a container, update the image's libraries",
        )
    if gpus:
        yield Finding("GPU", "ok", f"{_gpu_names(gpus)}; torch is built for CUDA {software.cuda}")
    elif not software.broken:
        yield _no_gpu(driver, gpu_error, software, environment)


def _gpu_names(gpus: Sequence[Gpu]) -> str:
    kinds = Counter((gpu.name, f"{gpu.memory_bytes / 2**30:.0f} GiB") for gpu in gpus)
    return ", ".join(f"{count} x {name}, {memory}" for (name, memory), count in kinds.items())


def _no_gpu(
    driver: Driver | None, gpu_error: str | None, software: Software, environment: Mapping[str, str]
) -> Finding:
    """Say why torch sees no GPU."""
    if driver is not None and not driver.asked:
        if gpu_error is None:
            return Finding("GPU", "ok", "none that torch can use; gpuflow runs on the CPU")
        return Finding("GPU", "problem", f"torch can use none: {gpu_error}", _GPU_ADVICE)
    if driver is None or not driver.gpus:
        return Finding("GPU", "ok", "none here; gpuflow runs on the CPU")
    idle = _counted(driver.gpus, "GPU")
    if software.cuda is None:
        return Finding(
            "GPU",
            "problem",
            f"this torch is built without CUDA, so {idle} cannot be used",
            f"pip install --force-reinstall {_PAIR}, not from an index of CPU builds",
        )
    if environment.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        hidden = f"CUDA_VISIBLE_DEVICES={environment['CUDA_VISIBLE_DEVICES']!r} hides {idle}"
        return Finding("GPU", "note", f"{hidden}; gpuflow runs on the CPU", "unset it to use the GPU")
    if driver.cuda and int(driver.cuda.partition(".")[0]) < int(software.cuda.partition(".")[0]):
        return Finding(
            "GPU",
            "problem",
            f"the driver runs CUDA up to {driver.cuda}, and torch is built for CUDA {software.cuda}, so {idle} cannot "
            "be used",
            f"update the driver, or install a torch that is built for CUDA {driver.cuda.partition('.')[0]}",
        )
    why = gpu_error or "it does not say why"
    return Finding("GPU", "problem", f"torch cannot use {idle}: {why}", _GPU_ADVICE)


def _engines(engines: JpegEngines | None, has_gpu: bool) -> Iterator[Finding]:
    if engines is None:
        return
    library = f"libnvjpeg {engines.version}, {engines.path}"
    if not has_gpu:
        text = f"libnvjpeg {engines.version}, unused without a GPU" if engines.path else "none without a GPU"
        yield Finding("JPEG engines", "ok", text)
    elif not engines.path:
        yield Finding(
            "JPEG engines",
            "problem",
            "no libnvjpeg, so the cores decode while the GPU's engines stay idle",
            "pip install 'gpuflow[gpu]'",
        )
    elif engines.error is not None:
        yield Finding(
            "JPEG engines",
            "note",
            f"{library}: cannot be used: {engines.error}; the cores decode",
            "see which processes use the GPU (nvidia-smi)",
        )
    elif engines.backend != "hardware":
        text = f"none on this GPU: the cores decode, or its kernels ({library}) where decode.backend is gpu"
        yield Finding("JPEG engines", "note", text, "A100, H100 and H200 are GPUs with engines")
    elif engines.rate is None:
        yield Finding("JPEG engines", "ok", f"{library}: not tried, because they take none of the images")
    else:
        yield Finding("JPEG engines", "ok", library)


def _c_code(used: bool | None) -> Iterator[Finding]:
    if used:
        yield Finding("C code", "ok", "queues the GPU's work without Python's interpreter")
    elif used is not None:
        yield Finding(
            "C code",
            "note",
            "Python queues the GPU's work, and a training's launches wait for the interpreter more often",
            "install a driver of CUDA 12.4 or newer",
        )


def _decoder(decoders: CpuDecoders | None) -> Iterator[Finding]:
    if decoders is None:
        return
    if decoders.libjpeg_turbo is None:
        yield Finding(
            "CPU decoder",
            "note",
            f"OpenCV {decoders.opencv}, which decodes whole images: {OPENCV_COST} ({decoders.refusal})",
            REMEDY,
        )
    else:
        yield Finding(
            "CPU decoder",
            "ok",
            f"libjpeg-turbo {decoders.libjpeg_turbo} (JPEG, only the region of a crop), OpenCV {decoders.opencv} "
            "(the rest)",
        )


def _environment(environment: Mapping[str, str], has_gpu: bool) -> Iterator[Finding]:
    if not has_gpu:
        return
    for variable, effect in _SLOW_VARIABLES.items():
        if environment.get(variable) == "1":
            yield Finding("environment", "problem", f"{variable}=1 {effect}", "unset it")
    queues = environment.get(QUEUES_VARIABLE, "")
    if queues.isdigit() and int(queues) < QUEUES:
        yield Finding(
            "environment",
            "note",
            f"{QUEUES_VARIABLE}={queues}: decoding and training may share a hardware queue and wait for each other",
            f"unset it, so that gpuflow sets it to {QUEUES}, unless the training needs it",
        )


# --- cores and limits -------------------------------------------------------------------------------------------------


def _cores(cores: Cores) -> Iterator[Finding]:
    have = _counted(cores.usable, "core")
    if cores.usable < cores.present:
        have = f"{cores.usable} of {_counted(cores.present, 'core')}"
    threads = _counted(cores.threads, "thread")
    if cores.ranks > 1:
        threads += f" in each of {cores.ranks} ranks"
    if cores.quota is not None and cores.threads * cores.ranks > max(1.0, cores.quota):
        yield Finding(
            "cores",
            "problem",
            f"{have}, but a control group grants the time of {cores.quota:g}; gpuflow decodes with {threads}, and "
            "Linux halts all of the process again and again",
            f"set run.threads: {max(1, int(cores.quota / cores.ranks))}, or raise the container's CPU limit",
        )
        return
    granted = "" if cores.quota is None else f", of which a control group grants the time of {cores.quota:g}"
    text = f"{have}{granted}; gpuflow decodes with {threads}"
    if cores.threads > cores.usable:
        yield Finding("cores", "note", f"{text}, more than there are cores", "set run.threads: auto")
    elif cores.usable < cores.present:
        yield Finding(
            "cores",
            "note",
            text,
            "if decoding is the limit, ask for more: Slurm's --cpus-per-task, a container's cpuset, taskset",
        )
    else:
        yield Finding("cores", "ok", text)


def _open_files(limits: ResourceLimits, threads: int) -> Iterator[Finding]:
    soft, hard, others = limits.open_files, limits.open_files_hard, limits.open_now + _SPARE_FILES
    least, most = threads + others, threads * FILES_A_THREAD + others
    if soft is None or soft >= most:
        yield Finding("open files", "ok", f"{_limit_of(soft)}; gpuflow needs at most {most:,}")
        return
    advice = f"ulimit -n {most}"
    if hard is not None and hard < most:
        advice = (
            f"the hard limit is {hard:,}: raise nofile in /etc/security/limits.conf, or start the container with "
            f"--ulimit nofile={most}"
        )
    have = f"{_limit_of(soft)}; {_counted(threads, 'thread')}"
    if soft < least:
        text = f"{have} need at least {least:,}, and a file that cannot be opened ends the epoch"
        yield Finding("open files", "problem", text, advice)
    else:
        yield Finding("open files", "note", f"{have} hold up to {most:,}, and wait where there are fewer", advice)


def _limit_of(limit: int | None) -> str:
    return "no limit" if limit is None else f"limit {limit:,}"


def _shared_memory(memory: Memory | None) -> Iterator[Finding]:
    if memory is None:
        return
    text = f"/dev/shm: {_gib(memory.free_bytes)} free of {_gib(memory.size_bytes)}"
    if memory.free_bytes >= _SMALL_SHARED_MEMORY:
        yield Finding("shared memory", "ok", text)
    else:
        yield Finding(
            "shared memory",
            "note",
            f"{text}; gpuflow needs none, but DataLoader's workers and NCCL fail where there is too little",
            "start the container with --shm-size=8g, or delete what is left over in /dev/shm",
        )


def _locked_memory(limits: ResourceLimits, has_gpu: bool) -> Iterator[Finding]:
    if has_gpu:
        limit = "no limit" if limits.locked_bytes is None else f"limit {_gib(limits.locked_bytes)}"
        yield Finding("locked memory", "ok", f"{limit}; CUDA's pinned memory does not count, NCCL's on InfiniBand does")


# --- rates ------------------------------------------------------------------------------------------------------------


def _data(data: Data | None, error: str | None, has_gpu: bool) -> Iterator[Finding]:
    if error is not None:
        yield Finding("images", "problem", error)
    if data is None:
        return
    size = f"{data.width}x{data.height} pixels (median), {data.mean_bytes / 1000:.0f} kB (mean)"
    text = f"{data.images} {f'of {data.where}' if data.where else 'made for the measurement'}, {size}"
    if data.bad:
        status: Status = "problem" if data.bad == data.images else "note"
        yield Finding(
            "images", status, f"{text}; {data.bad} of them cannot be decoded", "gpuflow scan FILE lists what is bad"
        )
    elif has_gpu and data.for_engines < data.images:
        rest = data.images - data.for_engines
        yield Finding(
            "images",
            "note",
            f"{text}; {rest} of them are not for the JPEG engines, and the cores decode or rewrite those",
            "save them as baseline JPEGs (not progressive, PNG or CMYK) if decoding is the limit",
        )
    else:
        yield Finding("images", "ok", text)


def _disk(machine: Machine) -> Iterator[Finding]:
    source = machine.source
    if source is None:
        yield Finding("disk", "note", "not measured", "gpuflow doctor FILE, or --data DIR, measures it")
    elif (reason := f"{source} is remote" if is_remote(source) else machine.unmeasured) is not None:
        yield Finding("disk", "note", f"not measured: {reason}", "gpuflow bench FILE measures all of it")
    for rate in machine.disk:
        if rate.images == 0:
            yield Finding(
                "disk",
                "problem",
                f"none of {_counted(rate.unreadable, 'image')} could be read",
                "check that the files exist and that you may read them",
            )
            continue
        text = (
            f"{_rate(rate.images_per_s)} images/s, {_rate(rate.bytes_per_s / 1e6)} MB/s: {rate.images:,} read by "
            f"{_counted(rate.readers, 'thread')} from {rate.filesystem}, {_coldness(rate)}"
        )
        if rate.unreadable:
            yield Finding("disk", "note", f"{text}; {rate.unreadable} could not be read", "gpuflow scan FILE says why")
        else:
            yield Finding("disk", "ok", text)


def _coldness(rate: DiskRate) -> str:
    """Say whether the bytes came from disk or from the page cache, which only root can empty completely."""
    if rate.filesystem in _IN_MEMORY:
        return "which is in memory"
    if rate.cached is None:
        return "which does not tell whether they were cached"
    if rate.cached == 0:
        return "cold (dropped from the page cache first)"
    if rate.cached == rate.images:
        return "all of them still in the page cache"
    return f"{rate.cached / rate.images:.0%} of them from the page cache"


def _core_rates(rates: Sequence[DecodeRate], cores: Cores) -> Iterator[Finding]:
    for rate in rates:
        text = f"{_rate(rate.images_per_s)} images/s decoded whole by {_counted(rate.at_once, 'thread')}"
        due = min(rate.at_once, cores.usable, cores.quota or cores.usable)
        if rate is rates[-1] and rate.cores is not None and rate.cores < _FAIR_SHARE * due:
            yield Finding(
                "cores' rate",
                "note",
                f"{text}, which got the time of {rate.cores:.1f} cores instead of {due:g}",
                "look what else runs here (top), or whether the machine limits this process; then measure again",
            )
        else:
            yield Finding("cores' rate", "ok", text)


def _gpu_rate(engines: JpegEngines | None) -> Iterator[Finding]:
    if engines is not None and engines.rate is not None:
        rate = engines.rate
        yield Finding(
            "GPU's rate",
            "ok",
            f"{_rate(rate.images_per_s)} images/s decoded whole on the GPU, {rate.at_once} a call from pinned memory",
        )


def _limit(
    disk: Sequence[DiskRate], core_rates: Sequence[DecodeRate], engines: JpegEngines | None
) -> Iterator[Finding]:
    """Say which of disk and decoder is slower."""
    if not disk or not core_rates or disk[0].images == 0:
        return
    decoder, name = core_rates[-1], "the cores"
    if engines is not None and engines.rate is not None and engines.backend == "hardware":
        decoder, name = engines.rate, "the engines"
    first, best = disk[0], max(disk, key=lambda rate: rate.images_per_s)
    read, decoded = first.images_per_s, decoder.images_per_s
    if first.images < _FEW_IMAGES and first.images / read < _SHORT_SECONDS:
        yield Finding(
            "limit",
            "note",
            f"{_counted(first.images, 'image')} are too few to compare disk and decoder",
            f"name a source with more; {2 * _FEW_IMAGES} are enough",
        )
    elif read >= decoded:
        text = f"decoding: the disk delivers {_rate(read)} images/s, more than the {_rate(decoded)} that {name} decode"
        if first.cached and first.filesystem not in _IN_MEMORY:
            text += "; a disk that is not cached may deliver fewer"
        yield Finding("limit", "ok", f"{text}; gpuflow bench FILE measures it with crops and all")
    else:
        text = f"the disk: it delivers {_rate(read)} images/s, fewer than the {_rate(decoded)} that {name} decode"
        if best.images_per_s > _MUCH_FASTER * read:
            advice = (
                f"set run.readers: {best.readers}; with {best.readers} threads the disk delivers "
                f"{_rate(best.images_per_s)} images/s"
            )
        else:
            advice = _NEARER if first.filesystem.startswith(_NETWORK) else _FASTER
        if decoder is not core_rates[-1] and read < core_rates[-1].images_per_s:
            advice += "; without that decoding on the GPU gains nothing"
        yield Finding("limit", "note", text, advice)


# --- words ------------------------------------------------------------------------------------------------------------


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def _rate(value: float) -> str:
    """Return a rate with three significant digits, the precision of a short measurement."""
    return f"{float(f'{value:.3g}'):,.0f}" if value >= 10 else f"{value:.2g}"


def _gib(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"


def report(findings: Sequence[Finding]) -> RenderableType:
    """Render findings under headings, each with its advice, and the numbers of problems and notes."""
    width = max(len(finding.topic) for finding in findings)
    parts: list[RenderableType] = []
    for heading, group in groupby(findings, lambda finding: _HEADINGS.get(finding.topic, _SOFTWARE)):
        parts += [Text(heading, style="bold"), _Section(tuple(group), width), Text()]
    counts = Counter(finding.status for finding in findings)
    return Group(*parts, Text(", ".join(_counted(counts[status], status) for status in ("problem", "note"))))


@dataclass(frozen=True, slots=True)
class _Section:
    """The findings under one heading: a table, or in a narrow terminal a list. width: columns of the longest topic."""

    findings: tuple[Finding, ...]
    width: int

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        first = len("problem")
        narrow = options.max_width < first + self.width + 2 * _GAP + _LEAST_TEXT
        table = Table.grid(padding=(0, _GAP, 0, 0))
        table.add_column(width=first)
        table.add_column(width=self.width)
        table.add_column(overflow="fold")
        for topic, same in groupby(self.findings, lambda finding: finding.topic):
            for i, finding in enumerate(same):
                status = Text(finding.status, style=_COLOURS[finding.status])
                if narrow:
                    yield Text.assemble(status, f" {topic}", overflow="fold")
                    yield Padding(_words(finding), (0, 0, 0, _GAP))
                else:
                    table.add_row(status, Text("" if i else topic), _words(finding))
        if not narrow:
            yield table


def _words(finding: Finding) -> RenderableType:
    """Render the text, and the advice on the next line after an arrow."""
    text = Text(finding.text, overflow="fold")
    if finding.advice is None:
        return text
    advice = Table.grid(padding=(0, 1, 0, 0))
    advice.add_row(Text("->"), Text(finding.advice, style="bold", overflow="fold"))
    return Group(text, advice)
