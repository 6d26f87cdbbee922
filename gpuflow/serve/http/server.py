"""The process of `gpuflow serve`: opens the port, loads the model, and answers all admitted requests before it ends.

The port is open before the model is loaded. After the first SIGTERM, SIGHUP or Ctrl-C new requests are refused and
admitted ones are answered, each within its time limits; the second signal ends the process at once.

A server that waits for its clients without a limit can be stopped by a few of them. Here a connection that waits for
its client gives way: the head of a request has to arrive within seconds, a client that reads nothing of its answers for
some seconds is cut off, and where no further connection can be opened, the one that has waited the longest for its
client, to send or to read, is closed. Neither may one client keep the others waiting: a connection is read in small
parts, and a body in tiny chunks, each of which takes as long to parse as a large one, is refused.
"""

from __future__ import annotations

import asyncio
import fcntl
import http
import itertools
import json
import logging
import math
import os
import resource
import signal
import socket
import struct
import sys
import termios
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, cast, final

import psutil

from gpuflow.errors import MissingExtra
from gpuflow.runtime.threads import DaemonPool, QuickSwitching
from gpuflow.serve.http.app import RequestLimits, Service, check_origins, create_app
from gpuflow.serve.http.limits import CLOSED_HERE, MALFORMED, OVER_LIMIT, PROGRESS_BYTES, STALLED_SECONDS, Metrics
from gpuflow.serve.predictor import Predictor

try:
    import h11
    import prometheus_client
    import uvicorn
    from fastapi import FastAPI
    from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle
except ModuleNotFoundError as error:
    raise MissingExtra("the service", str(error.name), "serve") from error

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
        name: {"handlers": ["stderr"], "level": level, "propagate": False, "filters": filters}
        for name, level, filters in (
            ("python_multipart", "ERROR", ["few"]),
            ("asyncio", "WARNING", ["few"]),
            ("uvicorn.error", "WARNING", ["few"]),
            ("uvicorn.access", "INFO", []),
        )
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
        http=cast("type[asyncio.Protocol]", partial(Connection, connections=connections)),
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

    @contextmanager
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
        with suppress(OSError, SystemExit):
            report(text)

    return say


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if listener.family == socket.AF_INET6 else f"http://{host}:{port}"


def _end(code: int) -> NoReturn:
    """End the process without waiting for its threads."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # such as a full disk
            stream.flush()
    os._exit(code)


# --- connections ------------------------------------------------------------------------------------------------------

_SPARE = 16
"""Connections above the limit that still get an answer."""
_SPARE_FILES = 64
"""File descriptors that are left for other purposes."""
_LINGER_SECONDS = 1.0
"""How long a connection stays open after a refusal, so that the client reads it."""
_LOOK_AT, _CHECK_SECONDS = 8, 1.0
"""_LOOK_AT: of how many waiting connections one is chosen. _CHECK_SECONDS: between two looks at a connection."""
_UNREAD_SECONDS = 10.0
"""How long a client may take for the next byte of its answers."""
_READ_BYTES = 1 << 15
"""The largest number of bytes that are read and parsed at a time, because other connections wait for that."""
_SMALLEST_CHUNK = 32
"""The least average number of bytes of a body's chunks, with what frames them, where a read has several of them."""


@final
class Connections:
    """The open connections of a service, and which of them wait for their clients."""

    def __init__(self, limits: RequestLimits, metrics: Metrics) -> None:
        self.limits, self.metrics = limits, metrics
        self._open: set[Connection] = set()
        self._waiting: dict[Connection, tuple[float, bool]] = {}  # since when, and `transferring`; oldest first
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._files = files if files != resource.RLIM_INFINITY else sys.maxsize
        self._most, self._checked = limits.max_connections, -math.inf

    def __len__(self) -> int:
        return len(self._open)

    def most(self) -> int:
        """Return how many connections there may be: the limit, or as many as the process may still open files."""
        if time.monotonic() - self._checked > _CHECK_SECONDS:
            self._checked = time.monotonic()
            with suppress(OSError):  # there is no descriptor left to count them with
                others = psutil.Process().num_fds() - len(self)
                room = self._files - others - min(_SPARE_FILES, self._files // 4)
                self._most = max(1, min(self.limits.max_connections, room))
        return self._most

    def add(self, connection: Connection) -> bool:
        """Count a new connection, and close another one if there are too many. Return whether it is one too many."""
        self._open.add(connection)
        most = self.most()
        if len(self) <= most:
            return False
        is_full = len(self) > most + _SPARE
        now = time.monotonic()
        for waiting, (since, transferring) in itertools.islice(self._waiting.items(), _LOOK_AT):
            stalled = not transferring or now - since > STALLED_SECONDS
            if is_full or (stalled and not waiting.waits_for_service):
                waiting.abort("evicted")
                return False
        if is_full:
            connection.abort("evicted")
        return True

    def make_room(self) -> None:
        """Close some connections that wait for their clients."""
        for waiting in list(itertools.islice(self._waiting, _LOOK_AT)):
            waiting.abort("evicted")

    def abort_unread(self) -> None:
        """Close the connections whose clients have not read all of their answers."""
        for connection in list(self._open):
            if connection.unsent:
                connection.abort("unread")

    def remove(self, connection: Connection) -> None:
        self._open.discard(connection)
        self._waiting.pop(connection, None)

    def set_waiting(self, connection: Connection, *, transferring: bool) -> None:
        """Record that a connection waits for its client from now on. transferring: for a body, or to read an answer."""
        self._waiting.pop(connection, None)
        self._waiting[connection] = time.monotonic(), transferring

    def set_active(self, connection: Connection) -> None:
        """Record that a connection does not wait for its client."""
        self._waiting.pop(connection, None)


@final
class Connection(H11Protocol):
    """A connection that answers malformed and late requests as the application answers all others, and counts them."""

    def __init__(self, *, connections: Connections, **given: Any) -> None:
        super().__init__(**given)
        self._connections = connections
        self._refused = self._head_begun = False
        self._head_timer: asyncio.TimerHandle | None = None
        self._body_bytes = 0
        self._reading: RequestResponseCycle | None = None
        self._unread_timer: asyncio.TimerHandle | None = None
        self._unread, self._read_at = 0, 0.0  # bytes at the last check, and when there were last fewer than before
        self._unread_since_mark = 0  # bytes when this connection last counted as one that makes progress

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.max_size = _READ_BYTES  # type: ignore[attr-defined]  # of asyncio's transports for sockets
        if self._connections.add(self):
            self.app_state = {**self.app_state, OVER_LIMIT: True}
        self._connections.set_waiting(self, transferring=False)
        self._limit_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.remove(self)
        self._end_timer()
        if self._unread_timer is not None:
            self._unread_timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        self._body_bytes += len(data)
        if self._is_in_tiny_chunks(data):
            self._refuse_body(f"the body has chunks of fewer than {_SMALLEST_CHUNK} bytes; send larger ones")
            return
        super().data_received(data)
        self._follow(has_data=True)

    def _is_in_tiny_chunks(self, data: bytes) -> bool:
        """Return True if parsing this part of a chunked body would take too long. A chunk has two ends of lines."""
        if self.conn.their_state is not h11.SEND_BODY or len(data) < _SMALLEST_CHUNK**2:
            return False
        chunked = any(name == b"transfer-encoding" for name, _ in self.headers)
        return chunked and data.count(b"\r\n") * _SMALLEST_CHUNK > 2 * len(data)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._follow(has_data=False)
        self._watch_unread()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._connections.set_waiting(self, transferring=True)
        self._watch_unread()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._in_request and not self.cycle.more_body and not self.transport.is_closing():
            self._connections.set_active(self)

    def _follow(self, *, has_data: bool) -> None:
        """Find out whether this connection waits for its client now, and limit the time that a head may take."""
        if self._refused or self.transport.is_closing():
            return
        if not self._in_request:
            if has_data and not self._head_begun:
                self._head_begun = True
                self._limit_head()
                self._connections.set_waiting(self, transferring=False)
            elif not has_data:
                self._connections.set_waiting(self, transferring=self.unsent > 0)
            return
        self._head_begun = False
        self._end_timer()
        if not self.cycle.more_body:
            if not self.flow.write_paused:
                self._connections.set_active(self)
        elif self._reading is not self.cycle or self._body_bytes >= PROGRESS_BYTES:
            self._reading, self._body_bytes = self.cycle, 0
            self._connections.set_waiting(self, transferring=True)

    def send_400_response(self, msg: str) -> None:
        """Refuse what h11 cannot parse. If the application reads the body, it answers itself."""
        error = sys.exc_info()[1]
        reason = f"the request is not valid HTTP/1.1: {error}"
        if not self._in_request:
            status = getattr(error, "error_status_hint", 400)
            self._refuse(status if status < 500 else 400, "bad_request", reason)
            return
        self._refuse_body(reason)

    def _refuse_body(self, reason: str) -> None:
        """Read no more of a body. If the application waits for it, it answers with this reason."""
        self._refused = True
        if not self._in_request or self.cycle.response_started:
            self.transport.close()
            return
        self.cycle.keep_alive = False
        if not self.cycle.more_body:
            return  # what follows the last request of a connection has no meaning
        self.cycle.scope["state"][MALFORMED] = reason
        self.cycle.message_event.set()

    def abort(self, kind: str) -> None:
        """Close the connection at once. kind: what that is counted as."""
        self._refused = True
        if self._in_request:
            self.cycle.scope["state"][CLOSED_HERE] = True
        self._connections.metrics.error(kind)
        self._connections.remove(self)
        self.transport.abort()

    @property
    def unsent(self) -> int:
        """Return the size of the answers that the system has not taken, because the client does not read the others."""
        return self.transport.get_write_buffer_size()

    @property
    def waits_for_service(self) -> bool:
        """Return True if the client has read its answers, and has sent data that the service has not read."""
        return not self.unsent and self._buffered_bytes(termios.FIONREAD) > 0

    @property
    def _in_request(self) -> bool:
        cycle: RequestResponseCycle | None = self.cycle
        return cycle is not None and not cycle.response_complete

    def _watch_unread(self) -> None:
        """Check from time to time that the client reads its answers, as long as some of them are unsent."""
        if not self.unsent:
            return
        self._unread, self._read_at = self._unread_bytes(), time.monotonic()
        if self._unread_timer is None:
            self._unread_since_mark = self._unread
            self._unread_timer = self.loop.call_later(_CHECK_SECONDS, self._check_unread)
        if self.transport.is_closing():
            self._connections.set_waiting(self, transferring=True)

    def _check_unread(self) -> None:
        self._unread_timer = None
        if not self.unsent:
            return
        unread, now = self._unread_bytes(), time.monotonic()
        if unread < self._unread:
            self._read_at = now
        elif now - self._read_at >= _UNREAD_SECONDS:
            self.abort("unread")
            return
        self._unread = unread
        if self._unread_since_mark - unread >= PROGRESS_BYTES:
            self._unread_since_mark = unread
            if self.flow.write_paused or self.transport.is_closing():
                self._connections.set_waiting(self, transferring=True)
        self._unread_timer = self.loop.call_later(_CHECK_SECONDS, self._check_unread)

    def _unread_bytes(self) -> int:
        """Return the size of the unsent data, and of those that the client's system has not confirmed."""
        return self.unsent + self._buffered_bytes(termios.TIOCOUTQ)

    def _buffered_bytes(self, request: int) -> int:
        """Return the size of what one of the system's buffers holds for this socket; 0 if the socket is closed."""
        with suppress(OSError):
            found = fcntl.ioctl(self.transport.get_extra_info("socket").fileno(), request, bytes(4))
            return int(struct.unpack("i", found)[0])
        return 0

    def _limit_head(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self._connections.limits.head_s, self._end_late_head)

    def _end_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _end_late_head(self) -> None:
        self._head_timer = None
        if self._head_begun:
            seconds = self._connections.limits.head_s
            self._refuse(408, "slow_head", f"the head of the request did not arrive within {seconds:g} s")
        else:
            self.transport.close()

    def _refuse(self, status: int, kind: str, reason: str) -> None:
        """Answer without the application, then close the connection."""
        self._refused = True
        self._end_timer()
        self._unset_keepalive_if_required()
        if self.transport.is_closing() or self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.close()
            return
        body = json.dumps({"error": {"kind": kind, "reason": reason}}, ensure_ascii=False).encode()
        headers = [
            *self.server_state.default_headers,
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        phrase = http.HTTPStatus(status).phrase.encode()
        response = h11.Response(status_code=status, headers=headers, reason=phrase)
        for event in (response, h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self._watch_unread()
        self._connections.metrics.error(kind)
        self._connections.metrics.answer("", status=status, seconds=0.0, received=0, sent=len(body))
        with suppress(OSError):  # the client has gone
            self.transport.write_eof()
        self._head_timer = self.loop.call_later(_LINGER_SECONDS, self.transport.close)
