"""`gpuflow load-test`: how much a service answers, how fast, and what that takes of its machine.

The load is a closed loop: a client sends its next request when it has the answer to the last one, over one connection
that is kept. So a slow service is asked less often, and the latencies do not say what requests would have waited that
come at a rate of their own.

The clients are threads in processes of their own, so that they share no interpreter with anybody. They still share the
cores with a service on the same machine, which is why their processor time stands beside its. Run as
`python -m gpuflow.tools.load_test`, this module is such a process.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import math
import os
import sys
import threading
import time
from asyncio.subprocess import PIPE, Process
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import urlsplit

from gpuflow.errors import GpuflowError

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["Latency", "Load", "Point", "choose_files", "measure", "notes", "render", "rows"]

_MOST_FILES = 256
_CORES_A_PROCESS = 4
_PAUSE_SECONDS = 0.05
"""How long a client rests after a failure: one that is refused at once would otherwise do nothing but ask."""
_START_SECONDS, _SAMPLE_SECONDS = 60.0, 0.1
_WORTH_MENTIONING = 0.05
_BOUNDARY = "gpuflow-load-test-1f0c83a5"
_BAD_IMAGE, _NO_CONNECTION, _TIMEOUT = "bad image", "connection", "timeout"


# --- values -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """So many clients that ask a service for predictions.

    url: of the service; what it is asked is /predict, unless the URL has a path. request_batch: images in a request:
    one is its body, several are the files of a form. seconds: what is measured, after `warm_up_s` that do not count.
    timeout_s: for an answer.
    """

    url: str
    clients: int
    request_batch: int = 1
    seconds: float = 10.0
    warm_up_s: float = 1.0
    timeout_s: float = 60.0

    def __post_init__(self) -> None:
        if not _is_address(self.url):
            raise ValueError(f"Load.url must be like http://127.0.0.1:8888, got {self.url!r}")
        for name in ("clients", "request_batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"Load.{name} must be >= 1, got {getattr(self, name)}")
        if not 0 < self.seconds < math.inf:
            raise ValueError(f"Load.seconds must be a number of seconds > 0, got {self.seconds}")

    @property
    def host(self) -> str:
        return urlsplit(self.url).hostname or ""

    @property
    def port(self) -> int:
        parts = urlsplit(self.url)
        return parts.port or (443 if parts.scheme == "https" else 80)

    @property
    def target(self) -> str:
        """What is asked for: path and query."""
        parts = urlsplit(self.url)
        path = "/predict" if parts.path in ("", "/") else parts.path
        return f"{path}?{parts.query}" if parts.query else path


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # of a port that is no number
        return False


@dataclass(frozen=True, kw_only=True, slots=True)
class Latency:
    """Of the requests that were answered, in milliseconds. tpN: N% of them took no longer, the nearest rank."""

    mean_ms: float
    tp50_ms: float
    tp90_ms: float
    tp99_ms: float

    @classmethod
    def of(cls, milliseconds: Sequence[float]) -> Self | None:
        """None where nothing was answered."""
        if not milliseconds:
            return None
        ranked = sorted(milliseconds)
        tp50, tp90, tp99 = (ranked[math.ceil(percent * len(ranked) / 100) - 1] for percent in (50, 90, 99))
        return cls(mean_ms=math.fsum(ranked) / len(ranked), tp50_ms=tp50, tp90_ms=tp90, tp99_ms=tp99)


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """What came of a load. What cannot be known is None.

    qps: requests that were answered by 200, a second; images_per_s: the images in them.
    errors: the others, by HTTP status, or `connection` or `timeout`; `bad image`: images of a form that got no answer.
    cpu_percent, rss_mb: of the service, 100% for each core that is busy, and the most memory at a time.
    gpu_percent: of the busiest GPU. clients_cpu_percent: of the clients themselves, where they run.
    """

    load: Load
    qps: float
    images_per_s: float
    latency: Latency | None
    errors: Mapping[str, int]
    clients_cpu_percent: float
    cpu_percent: float | None = None
    rss_mb: float | None = None
    gpu_percent: float | None = None


# --- measuring --------------------------------------------------------------------------------------------------------


def choose_files(directory: Path) -> tuple[str, ...]:
    """The images in a directory and below it, by their suffixes; evenly chosen where there are many.

    Raises:
        ValueError: there are none.
    """
    from gpuflow.sources.choose import images_below
    from gpuflow.sources.folder import EXTENSIONS

    found = images_below(directory)
    if not found:
        raise ValueError(f"--data: must be a directory of images ({', '.join(EXTENSIONS)}), got {str(directory)!r}")
    count = min(len(found), _MOST_FILES)
    return tuple(str(found[i * len(found) // count]) for i in range(count))


def measure(load: Load, files: Sequence[str], *, pids: Sequence[int] | None = None) -> Point:
    """Put a load on a service.

    Args:
        files: the images that are sent, in turns. pids: the service's processes, by default those of this machine
            that listen where the URL says; none leave its figures out.

    Raises:
        GpuflowError: the service does not answer one request before the load begins, or a client broke.
    """
    from gpuflow.tools.usage import listeners

    _check(load, files)
    return asyncio.run(_measure(load, files, listeners(load.host, load.port) if pids is None else tuple(pids)))


def _check(load: Load, files: Sequence[str]) -> None:
    """One request, so that a service that is not there, or is none, is told apart from one that is slow."""
    client = _Client(load, _bodies(files[: load.request_batch], load.request_batch), 0)
    problem, _ = client.ask()
    client.close()
    if problem in (_NO_CONNECTION, _TIMEOUT):
        raise GpuflowError(f"{load.url}: nobody answers ({client.reason}); start a service with gpuflow serve FILE")
    if problem is not None:
        raise GpuflowError(f"{load.url}: answers {problem} to {files[0]}: {client.reason}")


async def _measure(load: Load, files: Sequence[str], pids: Sequence[int]) -> Point:
    count = min(load.clients, max(1, len(os.sched_getaffinity(0)) // _CORES_A_PROCESS))
    processes = [await _start() for _ in range(count)]
    try:
        async with _limit(_START_SECONDS):
            for number, process in enumerate(processes):
                mine = list(range(number, load.clients, count))
                await _tell(process, {"load": asdict(load), "files": list(files), "clients": mine})
            for process in processes:
                await _ready(process)
        begin = time.monotonic() + load.warm_up_s
        for process in processes:
            await _tell(process, begin)
        watch = asyncio.create_task(_watch(pids, begin, begin + load.seconds))
        async with _limit(load.warm_up_s + load.seconds + load.timeout_s + _START_SECONDS):
            answers = [await _result(process) for process in processes]
            seen = await watch
    finally:
        for process in processes:
            if process.returncode is None:
                process.kill()
                await process.wait()
    latencies = [milliseconds for answer in answers for milliseconds in answer["latencies_ms"]]
    errors = sum((Counter(answer["errors"]) for answer in answers), Counter[str]())
    qps = len(latencies) / load.seconds
    return Point(
        load=load,
        qps=qps,
        images_per_s=qps * load.request_batch - errors[_BAD_IMAGE] / load.seconds,
        latency=Latency.of(latencies),
        errors=dict(sorted(errors.items())),
        clients_cpu_percent=100 * math.fsum(answer["cpu_s"] for answer in answers) / load.seconds,
        **seen,
    )


@asynccontextmanager
async def _limit(seconds: float) -> AsyncIterator[None]:
    """What is inside may take so long."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        raise GpuflowError(f"load-test: its clients did not get on within {seconds:g} s; use fewer clients") from None


async def _start() -> Process:
    command = (sys.executable, "-m", "gpuflow.tools.load_test")
    return await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE, stderr=PIPE)


async def _tell(process: Process, value: object) -> None:
    assert process.stdin is not None
    process.stdin.write(json.dumps(value).encode() + b"\n")
    await process.stdin.drain()


async def _ready(process: Process) -> None:
    assert process.stdout is not None
    if not await process.stdout.readline():
        await _result(process)


async def _result(process: Process) -> dict[str, Any]:
    out, errors = await process.communicate()
    if process.returncode != 0:
        raise GpuflowError(f"load-test: a client process failed:\n{errors.decode(errors='replace').strip()[-2000:]}")
    return json.loads(out)  # type: ignore[no-any-return]


async def _watch(pids: Sequence[int], begin: float, end: float) -> dict[str, float | None]:
    """What the service takes from `begin` to `end`: cpu_percent, rss_mb and gpu_percent."""
    from gpuflow.tools.nvml import GpuUtilization, load_nvml
    from gpuflow.tools.usage import usage_of

    with closing(GpuUtilization(load_nvml())) as gpus:
        await asyncio.sleep(begin - time.monotonic())
        first, rates, most = usage_of(pids), [], 0
        while time.monotonic() < end:
            await asyncio.sleep(min(_SAMPLE_SECONDS, max(0.0, end - time.monotonic())))
            rates.append(gpus.percents())
            most = max(most, used.rss_bytes if (used := usage_of(pids)) is not None else 0)
        last = usage_of(pids)
    if not pids or first is None or last is None:
        return {}
    means = [math.fsum(rate) / len(rates) for rate in zip(*rates, strict=False)]
    return {
        "cpu_percent": 100 * (last.cpu_s - first.cpu_s) / (end - begin),
        "rss_mb": most / 1e6,
        "gpu_percent": max(means, default=None),
    }


# --- results ----------------------------------------------------------------------------------------------------------


def rows(points: Sequence[Point], *, arm: str, workload: str) -> list[dict[str, Any]]:
    """Rows of a results.csv, a figure each."""
    from gpuflow.tools.bench import row

    made = []
    for point in points:
        where = f"{workload}; batch={point.load.request_batch}; clients={point.load.clients}"
        for metric, (value, unit) in _figures(point).items():
            made += [row(arm, where, metric, [value], unit)] if value is not None else []
    return made


def _figures(point: Point) -> dict[str, tuple[float | None, str]]:
    """Metric -> value and unit."""
    return {
        "qps": (point.qps, "requests/s"),
        "images_per_s": (point.images_per_s, "images/s"),
        **{name: (getattr(point.latency, name, None), "ms") for name in ("mean_ms", "tp50_ms", "tp90_ms", "tp99_ms")},
        "errors": (sum(point.errors.values()), "errors"),
        "cpu_percent": (point.cpu_percent, "%"),
        "rss_mb": (point.rss_mb, "MB"),
        "gpu_percent": (point.gpu_percent, "%"),
        "clients_cpu_percent": (point.clients_cpu_percent, "%"),
    }


def render(points: Sequence[Point]) -> Table:
    """A table for people."""
    from rich.table import Table

    several = points[0].load.request_batch > 1
    heads = ["clients", "req/s", *(["images/s"] if several else []), "mean", "TP50", "TP90", "TP99", "errors"]
    heads += ["CPU %", "MB", "GPU %", "own CPU %"]
    units = "latencies in ms; CPU: 100% is a busy core; own: of the clients"
    table = Table(*heads, box=None, pad_edge=False, collapse_padding=True, caption=units, caption_justify="left")
    for column in table.columns:
        column.justify = "right"
    for point in points:
        figures = {name: value for name, (value, _) in _figures(point).items() if several or name != "images_per_s"}
        table.add_row(str(point.load.clients), *map(_text, figures.values()))
    return table


def _text(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}" if value >= 100 or value == round(value) else f"{value:.1f}"


def notes(points: Sequence[Point], *, gpus_asked: bool = True) -> list[str]:
    """What one should know about these figures. gpus_asked: whether nvidia-ml-py, which asks the GPUs, is installed."""
    made = []
    for point in points:
        if point.errors:
            kinds = ", ".join(f"{kind}: {count}" for kind, count in point.errors.items())
            made.append(f"{point.load.clients} clients, errors: {kinds}")
    if all(point.cpu_percent is None for point in points):
        made.append("CPU, memory and GPU of the service are left out: no process here is known to be it (--pid)")
        return made
    if not gpus_asked:
        made.append("GPU % is left out: nvidia-ml-py is not installed; pip install 'gpuflow[gpu]'")
    cores = len(os.sched_getaffinity(0))
    most = max(point.clients_cpu_percent for point in points)
    if most > _WORTH_MENTIONING * 100 * cores:
        made.append(
            f"the clients took up to {most:.0f}% of the {100 * cores}% that they share with the service; "
            "with a machine or cores of their own they would leave it more"
        )
    return made


# --- a client ---------------------------------------------------------------------------------------------------------


class _Client:
    """One connection that is asked over again. Counts what is answered from `begin` to `end`.

    bodies: what it sends in turns, from a place on that depends on its number. reason: why the last one failed.
    """

    def __init__(self, load: Load, bodies: Sequence[bytes], number: int) -> None:
        kind = http.client.HTTPSConnection if load.url.startswith("https:") else http.client.HTTPConnection
        self._connection = kind(load.host, load.port, timeout=load.timeout_s)
        self._load, self._bodies, self._next = load, bodies, number * 7919
        form = f"multipart/form-data; boundary={_BOUNDARY}"
        self._headers = {"Content-Type": "application/octet-stream" if load.request_batch == 1 else form}
        self.latencies_ms: list[float] = []
        self.errors: Counter[str] = Counter()
        self.reason = ""

    def run(self, begin: float, end: float) -> None:
        """Ask until `end`; what is under way then does not count."""
        while (sent := time.monotonic()) < end:
            problem, bad_images = self.ask()
            answered = time.monotonic()
            if begin <= answered < end:
                if problem is None:
                    self.latencies_ms.append((answered - sent) * 1000)
                self.errors.update({problem or _BAD_IMAGE: bad_images if problem is None else 1})
            if problem is not None:
                time.sleep(_PAUSE_SECONDS)
        self.close()

    def ask(self) -> tuple[str | None, int]:
        """Send the next body. Returns the kind of error, None for an answer; and how many images that answer lacks."""
        body = self._bodies[self._next % len(self._bodies)]
        self._next += 1
        try:
            self._connection.request("POST", self._load.target, body, self._headers)
            answer = self._connection.getresponse()
            content = answer.read()
        except (OSError, http.client.HTTPException) as error:
            self._connection.close()  # the next request opens it again
            self.reason = str(error) or type(error).__name__
            return (_TIMEOUT if isinstance(error, TimeoutError) else _NO_CONNECTION), 0
        if answer.status != 200:
            self.reason = content.decode(errors="replace")[:500]
            return str(answer.status), 0
        if self._load.request_batch == 1:
            return None, 0
        return None, sum("error" in result for result in json.loads(content)["results"])

    def close(self) -> None:
        self._connection.close()


def _bodies(files: Sequence[str], batch: int) -> list[bytes]:
    """The files one by one, or as forms of `batch` files each, the last one filled up from the start."""
    images = [Path(file).read_bytes() for file in files]
    if batch == 1:
        return images
    starts = range(0, len(images), batch)
    return [_form([images[(start + i) % len(images)] for i in range(batch)]) for start in starts]


def _form(images: Sequence[bytes]) -> bytes:
    """multipart/form-data by RFC 7578."""
    parts = []
    for number, image in enumerate(images):
        disposition = f'Content-Disposition: form-data; name="image"; filename="{number}"'
        parts += [f"--{_BOUNDARY}\r\n{disposition}\r\n\r\n".encode(), image, b"\r\n"]
    return b"".join([*parts, f"--{_BOUNDARY}--\r\n".encode()])


def _main() -> None:
    """A process of clients: a task on stdin, `ready` on stdout, the time of the beginning, then the result."""
    task = json.loads(sys.stdin.readline())
    load = Load(**task["load"])
    bodies = _bodies(task["files"], load.request_batch)
    clients = [_Client(load, bodies, number) for number in task["clients"]]
    print("ready", flush=True)
    begin = float(sys.stdin.readline())
    end = begin + load.seconds
    threads = [threading.Thread(target=client.run, args=(begin, end), daemon=True) for client in clients]
    for thread in threads:
        thread.start()
    time.sleep(max(0.0, begin - time.monotonic()))
    cpu = time.process_time()
    time.sleep(max(0.0, end - time.monotonic()))
    cpu = time.process_time() - cpu
    for thread in threads:
        thread.join(max(0.0, end + load.timeout_s - time.monotonic()))
    latencies = [latency for client in clients for latency in client.latencies_ms]
    errors = sum((client.errors for client in clients), Counter[str]())
    print(json.dumps({"latencies_ms": latencies, "errors": errors, "cpu_s": cpu}), flush=True)


if __name__ == "__main__":
    _main()
