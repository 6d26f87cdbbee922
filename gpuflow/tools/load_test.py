"""`gpuflow load-test`: measures throughput, latency and resource use of a prediction service under load.

The load is a closed loop: each client keeps one connection open and sends its next request after it has received the
answer to the last one. A slow service therefore receives fewer requests, and the latencies do not include the queueing
that requests at a fixed rate would cause.

The clients are threads in separate processes, so that they do not share an interpreter with the service or with the
measurement. On the same machine they share its cores, which is why the results contain their processor time too.
Run as `python -m gpuflow.tools.load_test`, this module is one such process of clients.
"""

from __future__ import annotations

import http.client
import json
import math
import os
import select
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from pathlib import Path
from subprocess import PIPE, Popen, TimeoutExpired
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import urlsplit

from gpuflow.errors import GpuflowError
from gpuflow.sources.base import spread

if TYPE_CHECKING:
    from rich.table import Table


_MOST_FILES = 256
_CORES_A_PROCESS = 4
_PAUSE_SECONDS = 0.05
"""Pause of a client after a failure. Without it a client that is refused at once would use a whole core."""
_START_SECONDS, _SAMPLE_SECONDS, _PSS_SECONDS = 60.0, 0.1, 0.5
_WORTH_MENTIONING = 0.05
_BOUNDARY = "gpuflow-load-test-1f0c83a5"
_BAD_IMAGE, _NO_CONNECTION, _TIMEOUT, _NO_RESULTS = "bad image", "connection", "timeout", "200 without results"


# --- values -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """Clients that send requests to a service, and for how long.

    url: of the service; requests go to /predict unless the URL has a path. request_batch: images in a request: one is
    sent as its body, several as the files of a form. seconds: length of the measurement, which starts after a warm-up
    of `warm_up_s`. timeout_s: the longest wait for an answer.
    """

    url: str
    clients: int
    request_batch: int = 1
    seconds: float = 10.0
    warm_up_s: float = 1.0
    timeout_s: float = 60.0

    def __post_init__(self) -> None:
        if not _is_address(self.url):
            raise ValueError(f"--url: must be like http://127.0.0.1:8888, got {self.url!r}")

    @property
    def host(self) -> str:
        return urlsplit(self.url).hostname or ""

    @property
    def port(self) -> int:
        parts = urlsplit(self.url)
        return parts.port or (443 if parts.scheme == "https" else 80)

    @property
    def target(self) -> str:
        """Return the path and query of the requests.

        Examples:
            >>> Load(url="http://127.0.0.1:8888", clients=4).target
            '/predict'
        """
        parts = urlsplit(self.url)
        path = "/predict" if parts.path in ("", "/") else parts.path
        return f"{path}?{parts.query}" if parts.query else path


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        is_sendable = url.isascii() and url.isprintable() and " " not in url
        return is_sendable and parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # the port is not a number
        return False


@dataclass(frozen=True, kw_only=True, slots=True)
class Latency:
    """Latencies of the answered requests in milliseconds. tpN: N% of them took at most this long (nearest rank)."""

    mean_ms: float
    tp50_ms: float
    tp90_ms: float
    tp99_ms: float

    @classmethod
    def of(cls, milliseconds: Sequence[float]) -> Self | None:
        """Summarise latencies; return None where no request was answered.

        Examples:
            >>> Latency.of([10.0, 20.0, 30.0, 100.0])
            Latency(mean_ms=40.0, tp50_ms=20.0, tp90_ms=100.0, tp99_ms=100.0)
        """
        if not milliseconds:
            return None
        ranked = sorted(milliseconds)
        tp50, tp90, tp99 = (ranked[math.ceil(percent * len(ranked) / 100) - 1] for percent in (50, 90, 99))
        return cls(mean_ms=math.fsum(ranked) / len(ranked), tp50_ms=tp50, tp90_ms=tp90, tp99_ms=tp99)


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """The measured values for one load. A value that cannot be measured is None.

    qps: requests per second that were answered with status 200; images_per_s: the images in them.
    errors: numbers of other results by HTTP status, `connection`, `timeout` or `200 without results`, for an answer to
    a form that is not a service's; `bad image`: images of a form without a prediction. cpu_percent: of
    the service, 100% for each busy core. pss_mb: the highest memory of the service, in which pages that its processes
    share count once; not known of another user's. gpu_percent: of the busiest GPU. clients_cpu_percent: processor use
    of the clients.
    """

    load: Load
    qps: float
    images_per_s: float
    latency: Latency | None
    errors: Mapping[str, int]
    clients_cpu_percent: float
    cpu_percent: float | None = None
    pss_mb: float | None = None
    gpu_percent: float | None = None


# --- measuring --------------------------------------------------------------------------------------------------------


def choose_files(directory: Path) -> tuple[str, ...]:
    """Return the images in a directory and below it, recognised by suffix; an evenly spread choice of many.

    Raises:
        ValueError: there are none.
    """
    from gpuflow.sources.folder import EXTENSIONS, images_below

    found = images_below(directory)
    if not found:
        raise ValueError(f"--data: must be a directory of images ({', '.join(EXTENSIONS)}), got {str(directory)!r}")
    return tuple(str(found[i]) for i in spread(len(found), _MOST_FILES))


def measure(load: Load, files: Sequence[str], *, pids: Sequence[int] | None = None) -> Point:
    """Measure a service under a load.

    Args:
        files: the images to send, in turn.
        pids: the service's processes, by default those of this machine that listen on the URL's port. With no processes
            the service's own use of the machine is not measured.

    Raises:
        GpuflowError: the service does not answer a first request, or a process of clients failed.
    """
    from gpuflow.tools.machine import listeners

    _check(load, files)
    if pids is None:
        pids = listeners(load.host, load.port)
    count = min(load.clients, max(1, len(os.sched_getaffinity(0)) // _CORES_A_PROCESS))
    command = (sys.executable, "-m", "gpuflow.tools.load_test")
    with ExitStack() as stack:
        processes: list[Any] = []
        for number in range(count):
            processes.append(stack.enter_context(Popen(command, stdin=PIPE, stdout=PIPE, stderr=PIPE, text=True)))
            stack.callback(processes[-1].kill)
            _send(
                processes[-1],
                {"load": asdict(load), "files": list(files), "clients": list(range(number, load.clients, count))},
            )
        for process in processes:
            if not select.select([process.stdout], [], [], _START_SECONDS)[0]:
                raise _no_progress(_START_SECONDS)
            if not process.stdout.readline():
                _result(process, _START_SECONDS)
        begin = time.monotonic() + load.warm_up_s
        for process in processes:
            _send(process, begin)
        seen = _watch(pids, begin, begin + load.seconds)
        answers = [_result(process, load.timeout_s + _START_SECONDS) for process in processes]
    clients = [client for answer in answers for client in answer["clients"]]
    latencies = [milliseconds for several, _ in clients for milliseconds in several]
    errors = sum((Counter(counts) for _, counts in clients), Counter[str]())
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


def _check(load: Load, files: Sequence[str]) -> None:
    """Send one request first, to report a missing or different service instead of measuring it."""
    client = _Client(load, _bodies(files[: load.request_batch], load.request_batch), 0)
    problem, _ = client.ask()
    client.close()
    if problem in (_NO_CONNECTION, _TIMEOUT):
        raise GpuflowError(f"{load.url}: no service answers ({client.reason}); start a service with gpuflow serve FILE")
    if problem is not None:
        raise GpuflowError(f"{load.url}: answers {problem} to {files[0]}: {client.reason}")


def _no_progress(seconds: float) -> GpuflowError:
    return GpuflowError(f"load-test: its clients made no progress within {seconds:g} s; use fewer clients")


def _send(process: Any, value: object) -> None:
    print(json.dumps(value), file=process.stdin, flush=True)


def _result(process: Popen[str], seconds: float) -> dict[str, Any]:
    """Return what a process of clients found. Raise GpuflowError if it failed, or does not end in time."""
    try:
        out, errors = process.communicate(timeout=seconds)
    except TimeoutExpired:
        raise _no_progress(seconds) from None
    if process.returncode != 0:
        raise GpuflowError(f"load-test: a client process failed:\n{errors.strip()[-2000:]}")
    return json.loads(out)  # type: ignore[no-any-return]


def _watch(pids: Sequence[int], begin: float, end: float) -> dict[str, float | None]:
    """Return the service's use of the machine from `begin` to `end`: cpu_percent, pss_mb and gpu_percent."""
    from gpuflow.tools.machine import GpuUtilization, load_nvml, usage_of

    with closing(GpuUtilization(load_nvml())) as gpus:
        time.sleep(max(0.0, begin - time.monotonic()))
        first, rates, read_at = usage_of(pids, pss=True), [], time.monotonic()
        used = [first]
        while time.monotonic() < end:
            time.sleep(min(_SAMPLE_SECONDS, max(0.0, end - time.monotonic())))
            rates.append(gpus.percents())
            if time.monotonic() - read_at >= _PSS_SECONDS:
                read_at = time.monotonic()
                used.append(usage_of(pids, pss=True))
        last = usage_of(pids)
    if not pids or first is None or last is None:
        return {}
    known = [one.pss_bytes for one in used if one is not None and one.pss_bytes is not None]
    means = [math.fsum(rate) / len(rates) for rate in zip(*rates, strict=False)]
    return {
        "cpu_percent": 100 * (last.cpu_s - first.cpu_s) / (end - begin),
        "pss_mb": max(known) / 1e6 if known else None,
        "gpu_percent": max(means, default=None),
    }


# --- results ----------------------------------------------------------------------------------------------------------


def rows(points: Sequence[Point], *, arm: str, workload: str) -> list[dict[str, Any]]:
    """Return rows of a results.csv, one for each figure."""
    from gpuflow.tools.bench import row

    made = []
    for point in points:
        where = f"{workload}; batch={point.load.request_batch}; clients={point.load.clients}"
        for metric, (value, unit) in _figures(point).items():
            made += [row(arm, where, metric, [value], unit)] if value is not None else []
    return made


def _figures(point: Point) -> dict[str, tuple[float | None, str]]:
    """Return the value and the unit of each metric."""
    return {
        "qps": (point.qps, "requests/s"),
        "images_per_s": (point.images_per_s, "images/s"),
        **{name: (getattr(point.latency, name, None), "ms") for name in ("mean_ms", "tp50_ms", "tp90_ms", "tp99_ms")},
        "errors": (sum(point.errors.values()), "errors"),
        "cpu_percent": (point.cpu_percent, "%"),
        "pss_mb": (point.pss_mb, "MB"),
        "gpu_percent": (point.gpu_percent, "%"),
        "clients_cpu_percent": (point.clients_cpu_percent, "%"),
    }


def render(points: Sequence[Point]) -> Table:
    """Render the figures as a table for the terminal."""
    from rich.table import Table

    several = points[0].load.request_batch > 1
    heads = ["clients", "req/s", *(["images/s"] if several else []), "mean", "TP50", "TP90", "TP99", "errors"]
    heads += ["CPU %", "MB", "GPU %", "own CPU %"]
    units = (
        "latencies in ms; CPU: 100% is a busy core; own: of the clients\n"
        "MB: PSS, in which memory that processes share counts once; only root reads that of other users"
    )
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
    """Return remarks on these figures. gpus_asked: whether nvidia-ml-py, which reads the GPU use, is installed."""
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
    """Sends requests over one connection, one after another, and records the answers between `begin` and `end`.

    bodies: the request bodies, sent in turn from a position that depends on `number`. reason: why the last one failed.
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
        """Send requests until `end`. An answer that arrives later is not counted."""
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
        """Send the next body. Returns the kind of error, None for an answer, and the number of images without one."""
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
        try:
            return None, sum("error" in result for result in json.loads(content)["results"])
        except (ValueError, KeyError, TypeError):  # of another service, or of a proxy
            self.reason = content.decode(errors="replace")[:500]
            return _NO_RESULTS, 0

    def close(self) -> None:
        self._connection.close()


def _bodies(files: Sequence[str], batch: int) -> list[bytes]:
    """Return each file as a body, or forms of `batch` files; the last form is filled up with the first files."""
    images = [Path(file).read_bytes() for file in files]
    if batch == 1:
        return images
    starts = range(0, len(images), batch)
    return [_form([images[(start + i) % len(images)] for i in range(batch)]) for start in starts]


def _form(images: Sequence[bytes]) -> bytes:
    """Return a multipart/form-data body (RFC 7578)."""
    parts = []
    for number, image in enumerate(images):
        disposition = f'Content-Disposition: form-data; name="image"; filename="{number}"'
        parts += [f"--{_BOUNDARY}\r\n{disposition}\r\n\r\n".encode(), image, b"\r\n"]
    return b"".join([*parts, f"--{_BOUNDARY}--\r\n".encode()])


def _main() -> None:
    """Run a process of clients: read a task, write `ready`, read the start time, write the result."""
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
    answered = [(client.latencies_ms, client.errors) for client in clients]
    print(json.dumps({"clients": answered, "cpu_s": cpu}), flush=True)


if __name__ == "__main__":
    _main()
