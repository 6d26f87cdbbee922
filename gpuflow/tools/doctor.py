"""`gpuflow doctor`: judges whether a machine is set up well for loading images, and says what to change.

One pure function for each topic judges the values of `gpuflow.tools.machine`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Literal

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from gpuflow.runtime.cuda import QUEUES, QUEUES_VARIABLE
from gpuflow.sources.storage import is_remote
from gpuflow.tools.machine import MODULES, Machine

if TYPE_CHECKING:
    from gpuflow.tools.rates import DiskRate

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
"""The effects of environment variables that are 1."""
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


Judgements = Iterator[tuple[Status, str] | tuple[Status, str, str]]
"""The findings of one topic: a status, a text and, if something should change, an advice."""


# --- software and GPU -------------------------------------------------------------------------------------------------


def _python(machine: Machine) -> Judgements:
    yield "ok", machine.software.python


def _torch(machine: Machine) -> Judgements:
    found = {name: machine.software.versions.get(name, "none") for name in TESTED}
    text = ", ".join(f"{name} {version}" for name, version in found.items())
    if {name: version.partition("+")[0] for name, version in found.items()} == TESTED:
        yield "ok", f"{text}: the tested pair"
    else:
        tested = " and ".join(f"{name} {version}" for name, version in TESTED.items())
        yield "note", f"{text}; gpuflow is tested with {tested}", f"if something fails: pip install {_PAIR}"
    yield from _broken("torch", machine)


def _spdl(machine: Machine) -> Judgements:
    yield "ok", f"spdl-core {machine.software.versions.get('spdl-core', 'none')}"


def _broken(module: str, machine: Machine) -> Judgements:
    if module in machine.software.broken:
        yield "problem", f"{module} cannot be imported: {machine.software.broken[module]}", _HOW_TO_MEND[module]


def _driver(machine: Machine) -> Judgements:
    driver = machine.driver
    if driver is None:
        return
    if not driver.asked:
        remedy = "pip install 'gpuflow[gpu]' if this machine has an NVIDIA GPU"
        yield "note", "not asked, because nvidia-ml-py is not installed", remedy
    elif driver.error is None:
        yield "ok", f"NVIDIA {driver.version}, for CUDA up to {driver.cuda}"
    else:
        remedy = "restart the machine if the driver was just updated; in a container, update the image's libraries"
        yield "problem", f"the NVIDIA driver does not answer: {driver.error}", remedy


def _gpu(machine: Machine) -> Judgements:
    if machine.gpus:
        kinds = Counter((gpu.name, f"{gpu.memory_bytes / 2**30:.0f} GiB") for gpu in machine.gpus)
        names = ", ".join(f"{count} x {name}, {memory}" for (name, memory), count in kinds.items())
        yield "ok", f"{names}; torch is built for CUDA {machine.software.cuda}"
    elif not machine.software.broken:
        yield from _no_gpu(machine)


def _no_gpu(machine: Machine) -> Judgements:
    """Say why torch sees no GPU."""
    driver, cuda, hidden = machine.driver, machine.software.cuda, machine.environment.get("CUDA_VISIBLE_DEVICES")
    if driver is None or (driver.asked and not driver.gpus):
        yield "ok", "none here; gpuflow runs on the CPU"
        return
    idle = _counted(driver.gpus, "GPU")
    if not driver.asked:
        if machine.gpu_error is None:
            yield "ok", "none that torch can use; gpuflow runs on the CPU"
        else:
            yield "problem", f"torch can use none: {machine.gpu_error}", _GPU_ADVICE
    elif cuda is None:
        remedy = f"pip install --force-reinstall {_PAIR}, not from an index of CPU builds"
        yield "problem", f"this torch is built without CUDA, so {idle} cannot be used", remedy
    elif hidden in ("", "-1"):
        yield (
            "note",
            f"CUDA_VISIBLE_DEVICES={hidden!r} hides {idle}; gpuflow runs on the CPU",
            "unset it to use the GPU",
        )
    elif driver.cuda and int(driver.cuda.partition(".")[0]) < int(cuda.partition(".")[0]):
        text = f"the driver runs CUDA up to {driver.cuda}, and torch is built for CUDA {cuda}"
        remedy = f"update the driver, or install a torch that is built for CUDA {driver.cuda.partition('.')[0]}"
        yield "problem", f"{text}, so {idle} cannot be used", remedy
    else:
        yield "problem", f"torch cannot use {idle}: {machine.gpu_error or 'it does not say why'}", _GPU_ADVICE


def _engines(machine: Machine) -> Judgements:
    engines = machine.engines
    if engines is None:
        return
    library = f"libnvjpeg {engines.version}, {engines.path}"
    if not machine.gpus:
        yield "ok", f"libnvjpeg {engines.version}, unused without a GPU" if engines.path else "none without a GPU"
    elif not engines.path:
        text = "no libnvjpeg, so the cores decode while the GPU's engines stay idle"
        yield "problem", text, "pip install 'gpuflow[gpu]'"
    elif engines.error is not None:
        text = f"{library}: cannot be used: {engines.error}; the cores decode"
        yield "note", text, "see which processes use the GPU (nvidia-smi)"
    elif engines.backend != "hardware":
        text = f"none on this GPU: the cores decode, or its kernels ({library}) where decode.backend is gpu"
        yield "note", text, "A100, H100 and H200 are GPUs with engines"
    elif engines.rate is None:
        yield "ok", f"{library}: not tried, because they take none of the images"
    else:
        yield "ok", library


def _c_code(machine: Machine) -> Judgements:
    if machine.c_code:
        yield "ok", "queues the GPU's work without Python's interpreter"
    elif machine.c_code is not None:
        text = "Python queues the GPU's work, and a training's launches wait for the interpreter more often"
        yield "note", text, "install a driver of CUDA 12.4 or newer"


def _decoder(machine: Machine) -> Judgements:
    decoders = machine.decoders
    if decoders is None:
        return
    from gpuflow.decode.libjpeg_turbo import OPENCV_COST, REMEDY  # needs OpenCV, which may be what is broken

    whole = f"OpenCV {decoders.opencv}"
    if decoders.libjpeg_turbo is None:
        yield "note", f"{whole}, which decodes whole images: {OPENCV_COST} ({decoders.refusal})", REMEDY
    else:
        yield "ok", f"libjpeg-turbo {decoders.libjpeg_turbo} (JPEG, only the region of a crop), {whole} (the rest)"


def _environment(machine: Machine) -> Judgements:
    if not machine.gpus:
        return
    for variable, effect in _SLOW_VARIABLES.items():
        if machine.environment.get(variable) == "1":
            yield "problem", f"{variable}=1 {effect}", "unset it"
    queues = machine.environment.get(QUEUES_VARIABLE, "")
    if queues.isdigit() and int(queues) < QUEUES:
        text = "decoding and training may share a hardware queue and wait for each other"
        remedy = f"unset it, so that gpuflow sets it to {QUEUES}, unless the training needs it"
        yield "note", f"{QUEUES_VARIABLE}={queues}: {text}", remedy


# --- cores and limits -------------------------------------------------------------------------------------------------


def _cores(machine: Machine) -> Judgements:
    cores = machine.cores
    have = _counted(cores.usable, "core")
    if cores.usable < cores.present:
        have = f"{cores.usable} of {_counted(cores.present, 'core')}"
    threads = _counted(cores.threads, "thread")
    if cores.ranks > 1:
        threads += f" in each of {cores.ranks} ranks"
    if cores.quota is not None and cores.threads * cores.ranks > max(1.0, cores.quota):
        yield (
            "problem",
            f"{have}, but a control group grants the time of {cores.quota:g}; gpuflow decodes with {threads}, and "
            "Linux halts all of the process again and again",
            f"set run.threads: {max(1, int(cores.quota / cores.ranks))}, or raise the container's CPU limit",
        )
        return
    granted = "" if cores.quota is None else f", of which a control group grants the time of {cores.quota:g}"
    text = f"{have}{granted}; gpuflow decodes with {threads}"
    if cores.threads > cores.usable:
        yield "note", f"{text}, more than there are cores", "set run.threads: auto"
    elif cores.usable < cores.present:
        remedy = "if decoding is the limit, ask for more: Slurm's --cpus-per-task, a container's cpuset, taskset"
        yield "note", text, remedy
    else:
        yield "ok", text


def _open_files(machine: Machine) -> Judgements:
    limits, threads = machine.limits, machine.cores.threads
    soft, hard, others = limits.open_files, limits.open_files_hard, limits.open_now + _SPARE_FILES
    least, most = threads + others, threads * FILES_A_THREAD + others
    limit = "no limit" if soft is None else f"limit {soft:,}"
    if soft is None or soft >= most:
        yield "ok", f"{limit}; gpuflow needs at most {most:,}"
        return
    advice = f"ulimit -n {most}"
    if hard is not None and hard < most:
        advice = (
            f"the hard limit is {hard:,}: raise nofile in /etc/security/limits.conf, or start the container with "
            f"--ulimit nofile={most}"
        )
    have = f"{limit}; {_counted(threads, 'thread')}"
    if soft < least:
        yield "problem", f"{have} need at least {least:,}, and a file that cannot be opened ends the epoch", advice
    else:
        yield "note", f"{have} hold up to {most:,}, and wait where there are fewer", advice


def _shared_memory(machine: Machine) -> Judgements:
    memory = machine.shared_memory
    if memory is None:
        return
    text = f"/dev/shm: {_gib(memory.free_bytes)} free of {_gib(memory.size_bytes)}"
    if memory.free_bytes >= _SMALL_SHARED_MEMORY:
        yield "ok", text
    else:
        text += "; gpuflow needs none, but DataLoader's workers and NCCL fail where there is too little"
        yield "note", text, "start the container with --shm-size=8g, or delete what is left over in /dev/shm"


def _locked_memory(machine: Machine) -> Judgements:
    if machine.gpus:
        locked = machine.limits.locked_bytes
        limit = "no limit" if locked is None else f"limit {_gib(locked)}"
        yield "ok", f"{limit}; CUDA's pinned memory does not count, NCCL's on InfiniBand does"


# --- rates ------------------------------------------------------------------------------------------------------------


def _data(machine: Machine) -> Judgements:
    data = machine.data
    if machine.data_error is not None:
        yield "problem", machine.data_error
    if data is None:
        return
    size = f"{data.width}x{data.height} pixels (median), {data.mean_bytes / 1000:.0f} kB (mean)"
    text = f"{data.images} {f'of {data.where}' if data.where else 'made for the measurement'}, {size}"
    rest = data.images - data.for_engines
    if data.bad:
        status: Status = "problem" if data.bad == data.images else "note"
        yield status, f"{text}; {data.bad} of them cannot be decoded", "gpuflow scan FILE lists what is bad"
    elif machine.gpus and rest > 0:
        text += f"; {rest} of them are not for the JPEG engines, and the cores decode or rewrite those"
        yield "note", text, "save them as baseline JPEGs (not progressive, PNG or CMYK) if decoding is the limit"
    else:
        yield "ok", text


def _disk(machine: Machine) -> Judgements:
    source = machine.source
    if machine.software.broken:
        return
    if source is None:
        yield "note", "not measured", "gpuflow doctor FILE, or --data DIR, measures it"
    elif (reason := f"{source} is remote" if is_remote(source) else machine.unmeasured) is not None:
        yield "note", f"not measured: {reason}", "gpuflow bench FILE measures all of it"
    for rate in machine.disk:
        if rate.images == 0:
            text = f"none of {_counted(rate.unreadable, 'image')} could be read"
            yield "problem", text, "check that the files exist and that you may read them"
            continue
        text = (
            f"{_rate(rate.images_per_s)} images/s, {_rate(rate.bytes_per_s / 1e6)} MB/s: {rate.images:,} read by "
            f"{_counted(rate.readers, 'thread')} from {rate.filesystem}, {_coldness(rate)}"
        )
        if rate.unreadable:
            yield "note", f"{text}; {rate.unreadable} could not be read", "gpuflow scan FILE says why"
        else:
            yield "ok", text


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


def _core_rates(machine: Machine) -> Judgements:
    rates, cores = machine.core_rates, machine.cores
    for rate in rates:
        text = f"{_rate(rate.images_per_s)} images/s decoded whole by {_counted(rate.at_once, 'thread')}"
        due = min(rate.at_once, cores.usable, cores.quota or cores.usable)
        if rate is rates[-1] and rate.cores is not None and rate.cores < _FAIR_SHARE * due:
            text += f", which got the time of {rate.cores:.1f} cores instead of {due:g}"
            remedy = "look what else runs here (top), or whether the machine limits this process; then measure again"
            yield "note", text, remedy
        else:
            yield "ok", text


def _gpu_rate(machine: Machine) -> Judgements:
    if machine.engines is not None and (rate := machine.engines.rate) is not None:
        yield (
            "ok",
            f"{_rate(rate.images_per_s)} images/s decoded whole on the GPU, {rate.at_once} a call from pinned memory",
        )


def _limit(machine: Machine) -> Judgements:
    """Say which of disk and decoder is slower."""
    disk, engines = machine.disk, machine.engines
    if not disk or not machine.core_rates or disk[0].images == 0:
        return
    cores = decoder = machine.core_rates[-1]
    name = "the cores"
    if engines is not None and engines.rate is not None and engines.backend == "hardware":
        decoder, name = engines.rate, "the engines"
    first, best = disk[0], max(disk, key=lambda rate: rate.images_per_s)
    read, decoded = first.images_per_s, decoder.images_per_s
    if first.images < _FEW_IMAGES and first.images / read < _SHORT_SECONDS:
        text = f"{_counted(first.images, 'image')} are too few to compare disk and decoder"
        yield "note", text, f"name a source with more; {2 * _FEW_IMAGES} are enough"
    elif read >= decoded:
        text = f"decoding: the disk delivers {_rate(read)} images/s, more than the {_rate(decoded)} that {name} decode"
        if first.cached and first.filesystem not in _IN_MEMORY:
            text += "; a disk that is not cached may deliver fewer"
        yield "ok", f"{text}; gpuflow bench FILE measures it with crops and all"
    else:
        text = f"the disk: it delivers {_rate(read)} images/s, fewer than the {_rate(decoded)} that {name} decode"
        if best.images_per_s > _MUCH_FASTER * read:
            advice = (
                f"set run.readers: {best.readers}; with {best.readers} threads the disk delivers "
                f"{_rate(best.images_per_s)} images/s"
            )
        else:
            advice = _NEARER if first.filesystem.startswith(_NETWORK) else _FASTER
        if decoder is not cores and read < cores.images_per_s:
            advice += "; without that decoding on the GPU gains nothing"
        yield "note", text, advice


# --- all topics -------------------------------------------------------------------------------------------------------


_TOPICS: Mapping[str, Mapping[str, Callable[[Machine], Judgements]]] = {
    "Software and GPU": {
        "Python": _python,
        "torch": _torch,
        "SPDL": _spdl,
        **{MODULES[module]: partial(_broken, module) for module in MODULES if module != "torch"},
        "driver": _driver,
        "GPU": _gpu,
        "JPEG engines": _engines,
        "C code": _c_code,
        "CPU decoder": _decoder,
        "environment": _environment,
    },
    "Cores and limits": {
        "cores": _cores,
        "open files": _open_files,
        "shared memory": _shared_memory,
        "locked memory": _locked_memory,
    },
    "Measured here, about a second each": {
        "images": _data,
        "disk": _disk,
        "cores' rate": _core_rates,
        "GPU's rate": _gpu_rate,
        "limit": _limit,
    },
}
"""The functions that judge each topic, by heading and topic."""


def judge(machine: Machine) -> list[Finding]:
    """Return all findings, ordered by topic. The comparison of disk and decoder comes last."""
    judges = ((topic, judge) for topics in _TOPICS.values() for topic, judge in topics.items())
    return [Finding(topic, *judgement) for topic, judge in judges for judgement in judge(machine)]


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
    headings = {topic: heading for heading, topics in _TOPICS.items() for topic in topics}
    for heading, group in groupby(findings, lambda finding: headings[finding.topic]):
        parts += [Text(heading, style="bold"), _Section(tuple(group), width), Text()]
    counts = Counter(finding.status for finding in findings)
    return Group(*parts, Text(", ".join(_counted(counts[status], status) for status in ("problem", "note"))))


@dataclass(frozen=True, slots=True)
class _Section:
    """The findings under one heading: a table, or in a narrow terminal a list. width: columns of the longest topic."""

    findings: tuple[Finding, ...]
    width: int

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        first, topic = len("problem"), ""
        for finding in self.findings:
            status = Text(finding.status, style=_COLOURS[finding.status])
            if options.max_width < first + self.width + 2 * _GAP + _LEAST_TEXT:
                yield Text.assemble(status, f" {finding.topic}", overflow="fold")
                yield Padding(_words(finding), (0, 0, 0, _GAP))
                continue
            row = Table.grid(padding=(0, _GAP, 0, 0))
            for width in (first, self.width, None):
                row.add_column(width=width, overflow="fold")
            row.add_row(status, Text("" if finding.topic == topic else finding.topic), _words(finding))
            yield row
            topic = finding.topic


def _words(finding: Finding) -> RenderableType:
    """Render the text, and the advice on the next line after an arrow."""
    text = Text(finding.text, overflow="fold")
    if finding.advice is None:
        return text
    advice = Table.grid(padding=(0, 1, 0, 0))
    advice.add_row(Text("->"), Text(finding.advice, style="bold", overflow="fold"))
    return Group(text, advice)
