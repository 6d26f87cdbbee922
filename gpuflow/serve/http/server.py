"""The process of `gpuflow serve`: opens the port, loads the model, and answers all admitted requests before it ends.

The port is open before the model is loaded. After the first SIGTERM or Ctrl-C new requests are refused and admitted
ones are answered, each within its time limits; the second signal ends the process at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, NoReturn

from gpuflow.errors import MissingExtra
from gpuflow.runtime.threads import DaemonPool, QuickSwitching
from gpuflow.serve.http.app import RequestLimits, Service, create_app
from gpuflow.serve.predictor import Predictor

try:
    import prometheus_client
    import uvicorn
except ModuleNotFoundError as error:
    raise MissingExtra("the service", str(error.name), "serve") from error

__all__ = ["run"]

_BACKLOG = 2048
_IDLE_SECONDS = 75
_REFUSE_SECONDS, _CLOSE_SECONDS = 0.2, 5
"""At the end: how long late requests still get a 503, and how long connections may take to close."""
_LOGGING: dict[str, Any] = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {"plain": {"format": "%(asctime)s %(message)s"}},
    "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "plain"}},
    "loggers": {
        "uvicorn.error": {"handlers": ["stderr"], "level": "WARNING", "propagate": False},
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
    access_log: bool = False,
    report: Callable[[str], None],
) -> NoReturn:
    """Serve until a signal comes, then end the process with code 0.

    Args:
        load: makes the predictor; called on a thread. name: of the configuration. port: 0 selects a free one.
        report: gets a line at the start, when the model is loaded, at each signal and at the end.

    Raises:
        ValueError: host and port cannot be listened on. Also anything that `load` raises.
    """
    listener = _listen(host, port)
    prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]
    QuickSwitching()  # until the process ends
    loading = DaemonPool(1, "load").submit(load)
    app = create_app(loading, limits)
    service: Service = app.state.service
    server = _Server(
        uvicorn.Config(
            app,
            log_config=_LOGGING,
            access_log=access_log,
            lifespan="off",
            ws="none",
            proxy_headers=False,
            server_header=False,
            backlog=_BACKLOG,
            timeout_keep_alive=_IDLE_SECONDS,
            timeout_graceful_shutdown=_CLOSE_SECONDS,
        )
    )
    report(f"serving {name} at {_url(listener)}; loading the model")
    with asyncio.Runner(loop_factory=server.config.get_loop_factory()) as runner:
        runner.run(_serve(server, listener, service, loading, report))
    if loading.done():
        loading.result()
    _end(0)  # Python's own exit would wait for threads that load or hang, or abort threads that return to Python


async def _serve(
    server: _Server,
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
            report(f"{number.name} again: exiting at once, {service.active} requests unanswered")
            _end(128 + number)
        report(
            f"{number.name}: new requests are refused, {service.active} still to answer; send it again to exit at once"
        )
        service.draining = True
        signalled.set()

    for number in (signal.SIGTERM, signal.SIGINT):
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
        while service.active and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        await asyncio.sleep(_REFUSE_SECONDS)
    server.should_exit = True
    await serving
    stopping.cancel()
    if signalled.is_set():
        report("stopped; " + (f"{service.active} requests unanswered" if service.active else "all requests answered"))


class _Server(uvicorn.Server):
    """Does not handle signals: uvicorn would stop listening at the first one, and raise it again at the end."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


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


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if listener.family == socket.AF_INET6 else f"http://{host}:{port}"


def _end(code: int) -> NoReturn:
    """End the process without waiting for its threads."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
