"""The process of `gpuflow serve`: opens the port, loads the model, and answers all admitted requests before it ends.

The port is open before the model is loaded. After the first SIGTERM, SIGHUP or Ctrl-C new requests are refused and
admitted ones are answered, each within its time limits; the second signal ends the process at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NoReturn, cast, final

from gpuflow.errors import MissingExtra
from gpuflow.runtime.threads import DaemonPool, QuickSwitching
from gpuflow.serve.http.app import RequestLimits, Service, check_origins, create_app
from gpuflow.serve.predictor import Predictor

try:
    import prometheus_client
    import uvicorn
    from fastapi import FastAPI
except ModuleNotFoundError as error:
    raise MissingExtra("the service", str(error.name), "serve") from error

from gpuflow.serve.http.connections import Connections

_BACKLOG, _ACCEPTED_AT_A_TIME = 2048, 1
"""Connections that the system keeps waiting, and those that asyncio accepts before the limit on them is applied."""
_IDLE_SECONDS = 75
_MOST_RECORDS, _PERIOD_SECONDS = 5, 60.0
_NO_PROGRESS_SECONDS, _REFUSE_SECONDS, _CLOSE_SECONDS, _ABORT_SECONDS = 10.0, 0.2, 5, 0.5
"""At the end: how long a body may make no progress, how long late requests still get a 503, how long connections may
take to close, and how long before that those of clients that do not read are aborted."""
_LOGGING: dict[str, Any] = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {"plain": {"format": "%(asctime)s %(message)s"}},
    "filters": {"few": {"()": "gpuflow.serve.http.server.FewRecords"}},
    "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "plain"}},
    "loggers": {
        "python_multipart": {"handlers": ["stderr"], "level": "ERROR", "propagate": False, "filters": ["few"]},
        "asyncio": {"handlers": ["stderr"], "level": "WARNING", "propagate": False, "filters": ["few"]},
        "uvicorn.error": {"handlers": ["stderr"], "level": "WARNING", "propagate": False, "filters": ["few"]},
        "uvicorn.access": {"handlers": ["stderr"], "level": "INFO", "propagate": False},
    },
}


def run(
    load: Callable[[], Predictor],
    *,
    name: str,
    host: str = "127.0.0.1",
    port: int = 8888,
    limits: RequestLimits = RequestLimits(),  # noqa: B008
    cors: Sequence[str] = (),
    access_log: bool = False,
    report: Callable[[str], None],
) -> NoReturn:
    """Serve until a signal comes, then end the process with code 0.

    Args:
        load: makes the predictor; called on a thread.
        name: the path of the configuration.
        port: 0 selects a free one.
        cors: the origins whose pages may send requests.
        report: gets a line at the start, when the model is loaded, at each signal and at the end. A line that it cannot
            write, because the disk is full or its reader has ended, is left out.

    Raises:
        ValueError: host and port cannot be listened on, or `cors` is not valid. Also anything that `load` raises.
    """
    check_origins(cors)
    listener, say = _listen(host, port), _written_or_left_out(report)
    prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]
    QuickSwitching(0.00002)  # until the process ends
    loading = DaemonPool(1, "load").submit(load)
    app = create_app(loading, limits, cors=cors, name=Path(name).stem)
    service: Service = app.state.service
    server = make_server(app, access_log=access_log, log_config=_LOGGING)
    say(f"serving {name} at {_url(listener)}; loading the model")
    with asyncio.Runner(loop_factory=server.config.get_loop_factory()) as runner:
        runner.run(_serve(server, listener, service, loading, say))
    if loading.done():
        loading.result()
    _end(0)  # Python's own exit would wait for threads that load or hang, or abort threads that return to Python


def make_server(app: FastAPI, *, access_log: bool, log_config: dict[str, Any] | None) -> Server:
    """Return the server of an application that `create_app` made, for `serve` or `run` with a list of sockets."""
    service: Service = app.state.service
    connections = Connections(service.limits, service.metrics)
    config = uvicorn.Config(
        app,
        http=cast("type[asyncio.Protocol]", connections.protocol),
        loop="asyncio",
        log_config=log_config,
        access_log=access_log,
        lifespan="off",
        ws="none",
        proxy_headers=False,
        server_header=False,
        backlog=_ACCEPTED_AT_A_TIME,
        timeout_keep_alive=_IDLE_SECONDS,
        timeout_graceful_shutdown=_CLOSE_SECONDS,
    )
    return Server(config, connections)


async def _serve(
    server: Server,
    listener: socket.socket,
    service: Service,
    loading: Future[Predictor],
    report: Callable[[str], None],
) -> None:
    """Serve until a signal arrives and all admitted requests are answered, or the model cannot be loaded."""
    loop, begun = asyncio.get_running_loop(), time.monotonic()
    signalled = asyncio.Event()

    def on_signal(number: signal.Signals) -> None:
        if signalled.is_set():
            report(f"{number.name} again: exiting at once, {service.occupancy.active} requests unanswered")
            _end(128 + number)
        active = service.occupancy.active
        report(f"{number.name}: new requests are refused, {active} still to answer; send it again to exit at once")
        service.draining = True
        signalled.set()

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup has it ignored
            loop.add_signal_handler(number, on_signal, number)
    serving, stopping = loop.create_task(server.serve([listener])), loop.create_task(signalled.wait())
    loaded = asyncio.wrap_future(loading)
    events: set[asyncio.Future[Any]] = {serving, stopping, loaded}
    await asyncio.wait(events, return_when=asyncio.FIRST_COMPLETED)
    if loaded.done() and loaded.exception() is None:
        predictor = loaded.result()
        took = f"ready after {time.monotonic() - begun:.1f} s"
        report(f"{took}: the model gets {predictor.image}, preprocessing {predictor.preprocessing}")
        await asyncio.wait(events - {loaded}, return_when=asyncio.FIRST_COMPLETED)
    if signalled.is_set():
        deadline = time.monotonic() + 2 * service.limits.timeout_s + _CLOSE_SECONDS
        while service.occupancy.active and time.monotonic() < deadline:
            service.occupancy.stop_stalled_body(_NO_PROGRESS_SECONDS)
            await asyncio.sleep(0.01)
        await asyncio.sleep(_REFUSE_SECONDS)
    server.should_exit = True
    await serving
    stopping.cancel()
    if signalled.is_set():
        active = service.occupancy.active
        report(f"stopped; {active} requests unanswered" if active else "stopped; all requests answered")


class Server(uvicorn.Server):
    """Does not handle signals: uvicorn would stop listening at the first one, and raise it again at the end.

    Where no connection can be accepted because the process has too many files open, closes some that wait.
    """

    def __init__(self, config: uvicorn.Config, connections: Connections) -> None:
        super().__init__(config)
        self._connections = connections

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().set_exception_handler(self._handle_error)
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(_BACKLOG)  # asyncio set the backlog to the number that it accepts at a time

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Shut down as uvicorn does, but neither cancel nor log requests whose clients do not read the answer."""
        seconds = self.config.timeout_graceful_shutdown or 0
        timer = asyncio.get_running_loop().call_later(seconds - _ABORT_SECONDS, self._connections.abort_unread)
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()

    def _handle_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if isinstance(context.get("exception"), OSError) and "socket" in context:  # from accept
            self._connections.make_room()
        loop.default_exception_handler(context)


@final
class FewRecords(logging.Filter):
    """Passes a few log records a minute from each line of code; the next one says how many were left out.

    clock: seconds that only rise.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._lines: dict[tuple[str, int], tuple[float, int]] = {}  # when the period began, records since then

    def filter(self, record: logging.LogRecord) -> bool:
        line, now = (record.pathname, record.lineno), self._clock()
        begun, count = self._lines.get(line, (now, 0))
        if now - begun >= _PERIOD_SECONDS:
            if count > _MOST_RECORDS:
                record.msg = f"{record.getMessage()} ({count - _MOST_RECORDS:,} more like this were not logged)"
                record.args = ()
            begun, count = now, 0
        self._lines[line] = begun, count + 1
        return count < _MOST_RECORDS


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        # asyncio turns Nagle's algorithm off, 40 ms an answer, where the socket says that it is TCP.
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address)
            listener.listen(_BACKLOG)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise ValueError(f"cannot listen on {host}, port {port}: {reason}; choose others by --host, --port") from error
    return listener


def _written_or_left_out(report: Callable[[str], None]) -> Callable[[str], None]:
    """Return `report` without the errors of a full disk or an unread pipe, for which rich raises SystemExit."""

    def say(text: str) -> None:
        with contextlib.suppress(OSError, SystemExit):
            report(text)

    return say


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if listener.family == socket.AF_INET6 else f"http://{host}:{port}"


def _end(code: int) -> NoReturn:
    """End the process without waiting for its threads."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # such as a full disk
            stream.flush()
    os._exit(code)
