"""Request bodies: read within limits into encoded images, or discarded.

If a server closes a connection while the client still sends, the kernel resets the connection and the client never sees
its answer. So an answer that is ready before the body has arrived is sent at once, and the rest of the body is read and
discarded, within limits, before the connection may close.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gpuflow.serve.http.limits import (
    MALFORMED,
    OVER_LIMIT,
    Metrics,
    Occupancy,
    Refused,
    RequestLimits,
    Reservation,
)

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks


_ACCEPTED = "image/*, application/octet-stream, multipart/form-data"
_URL_ENCODED = "application/x-www-form-urlencoded"
_KNOWN = ("", "application/octet-stream", "multipart/form-data", _URL_ENCODED)
_PROBES = ("/healthz", "/readyz", "/metrics", "/v2/health/live", "/v2/health/ready")
"""Answered also on connections above the limit."""
_DISCARDED_BODIES, _DISCARDED_BYTES = 8, 64_000_000
"""How much of a body is discarded at most: this multiple of the largest body, and no less than these bytes."""
_DISCARD_SECONDS, _SHUTDOWN_DISCARD_SECONDS, _SLOW_DISCARD_SECONDS = 30.0, 3.0, 1.0
"""For how long: in general, while the service shuts down, and of a client that was too slow before."""


# --- reading ----------------------------------------------------------------------------------------------------------


def check_headers(request: Request, limits: RequestLimits) -> None:
    """Refuse a request by its headers alone, before its body is read: 413, 415."""
    kind = _media_type(request)
    if kind not in _KNOWN and not kind.startswith("image/"):
        raise _unsupported(f"got {kind!r}")
    encoding = ", ".join(request.headers.getlist("content-encoding")).strip().lower()
    if {name.strip() for name in encoding.split(",")} - {"", "identity"}:
        reason = f"a body must not be compressed, got Content-Encoding {encoding!r}; send it as it is"
        raise Refused(415, "unsupported_type", reason, {"Accept-Encoding": "identity"})
    announced = request.headers.get("content-length", "0")
    if announced.isdecimal() and int(announced) > limits.max_body_bytes:
        raise _too_large(limits)


async def read_images(request: Request, limits: RequestLimits, reservation: Reservation) -> tuple[list[bytes], bool]:
    """Return the encoded images of a request, and whether it is a form, which may have several.

    Args:
        reservation: counts each part of the body before the next one is read.

    Raises:
        Refused: 400, 408, 413, 415, 422 or 503. ClientDisconnect: the client has closed the connection.
    """
    pieces = _pieces(request, limits, reservation)
    kind, seconds = _media_type(request), reservation.seconds
    try:
        async with asyncio.timeout(seconds) as limit:
            with reservation.arriving(limit):
                if kind == "multipart/form-data":
                    return await _files(request, pieces, limits), True
                body = b"".join([piece async for piece in pieces])
    except TimeoutError:
        reason = f"the body did not arrive within {round(seconds, 3):g} s"
        if reservation.stopped:
            reason = "the body arrived too slowly while the service is busy or shuts down; send it again later"
        raise Refused(408, "slow_body", reason, {"Connection": "close"}) from None
    if kind == _URL_ENCODED and body[:12].isascii() and body[:12].decode("ascii").isprintable() and body:
        raise _unsupported(
            f"got a text as {kind!r}, curl's default; send an image: --data-binary @FILE or -F image=@FILE"
        )
    return [body], False


def _unsupported(got: str) -> Refused:
    reason = f"Content-Type must be one of {_ACCEPTED}, {got}"
    return Refused(415, "unsupported_type", reason, {"Accept-Post": _ACCEPTED})


def _media_type(request: Request) -> str:
    """Return the media type of a body; below /v2 none, because clients of that protocol send any."""
    kind = "" if request.url.path.startswith("/v2") else request.headers.get("content-type", "")
    return kind.partition(";")[0].strip().lower()


def _too_large(limits: RequestLimits) -> Refused:
    return Refused(
        413,
        "too_large",
        f"the body must have at most {limits.max_body_bytes:,} bytes; send a smaller file or fewer files",
    )


async def _pieces(request: Request, limits: RequestLimits, reservation: Reservation) -> AsyncGenerator[bytes, None]:
    size = 0
    async for piece in request.stream():
        size += len(piece)
        if size > limits.max_body_bytes:
            raise _too_large(limits)
        reservation.hold(len(piece))
        yield piece


async def _files(request: Request, pieces: AsyncGenerator[bytes, None], limits: RequestLimits) -> list[bytes]:
    _, options = parse_options_header(request.headers["content-type"])
    if b"boundary" not in options:
        raise _bad_form("its Content-Type names no boundary")
    max_files = min(limits.max_images, limits.max_queue)
    form, delimiter, delimiters = _Form(max_files=max_files), b"\r\n--" + options[b"boundary"], 0
    try:
        parser = MultipartParser(options[b"boundary"], form.callbacks())
        async for piece in pieces:
            delimiters += piece.count(delimiter)  # of each within a file the parser makes several calls of Python
            if delimiters > max_files + 1:
                raise too_many(max_files)
            parser.write(piece)
    except FormParserError as error:
        raise _bad_form(str(error)) from error
    if not form.ended:
        raise _bad_form("it ends before its closing boundary")
    if not form.files:
        raise Refused(422, "bad_image", "the form has no file")
    return [bytes(file) for file in form.files]


_EXTENDED_FILENAME = re.compile(rb";\s*filename\*\s*=", re.IGNORECASE)
"""RFC 5987's form of a name that is not ASCII, which the parser leaves out. The name is not read."""


class _Form:
    """Collects the files of a form, at most `max_files`."""

    def __init__(self, *, max_files: int) -> None:
        self.files: list[bytearray] = []
        self.ended = False
        self._max_files = max_files
        self._header, self._value, self._disposition = bytearray(), bytearray(), b""

    def callbacks(self) -> MultipartCallbacks:
        return {
            "on_part_begin": self._begin_part,
            "on_header_field": self._more_header,
            "on_header_value": self._more_value,
            "on_header_end": self._end_header,
            "on_headers_finished": self._begin_file,
            "on_part_data": self._more_data,
            "on_end": self._end,
        }

    def _begin_part(self) -> None:
        self._disposition = b""
        if len(self.files) == self._max_files:
            raise too_many(self._max_files)

    def _more_header(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _more_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _end_header(self) -> None:
        if self._header.lower() == b"content-disposition":
            self._disposition = bytes(self._value)
        self._header.clear()
        self._value.clear()

    def _begin_file(self) -> None:
        _, options = parse_options_header(self._disposition)
        if b"filename" not in options and not _EXTENDED_FILENAME.search(self._disposition):
            name = options.get(b"name", b"").decode(errors="replace")
            raise _bad_form(f"its field {name!r} is not a file; give files a filename, parameters belong in the URL")
        self.files.append(bytearray())

    def _more_data(self, data: bytes, start: int, end: int) -> None:
        self.files[-1] += data[start:end]

    def _end(self) -> None:
        self.ended = True


def too_many(most: int) -> Refused:
    """Return the refusal of a request with more images than this."""
    return Refused(413, "too_large", f"a request must have at most {most} images; send several requests")


def _bad_form(reason: str) -> Refused:
    return Refused(400, "bad_request", f"the form cannot be read: {reason}")


# --- discarding -------------------------------------------------------------------------------------------------------


def error_content(kind: str, reason: str, **more: str) -> dict[str, Any]:
    """Return the content of an error's answer on paths that are not below /v2."""
    return {"error": {"kind": kind, **more, "reason": reason}}


def error_at(path: str, kind: str, reason: str) -> dict[str, Any]:
    """Return the content of an error's answer on this path: below /v2 that of the Open Inference Protocol.

    Examples:
        >>> error_at("/predict", "timeout", "no answer"), error_at("/v2/models/m/infer", "timeout", "no answer")
        ({'error': {'kind': 'timeout', 'reason': 'no answer'}}, {'error': 'no answer'})
    """
    return {"error": reason} if path.startswith("/v2") else error_content(kind, reason)


_AUTHORITY = re.compile("https?://[^/]*", re.IGNORECASE)
"""The beginning of a target in absolute form, which clients send to proxies, and servers take (RFC 9112, 3.2.2)."""


class BodyMiddleware:
    """Wraps an app: counts requests and bytes, and discards what a client still sends after its answer.

    Refuses requests whose end is ambiguous, and those on connections above the limit, other than probes.

    closing: whether each connection shall be closed after its answer. shared: wraps a refusal, so that pages of other
    origins may read it.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        metrics: Metrics,
        occupancy: Occupancy,
        closing: Callable[[], bool],
        shared: Callable[[ASGIApp], ASGIApp] = lambda answer: answer,
    ) -> None:
        self._app, self._metrics, self._closing, self._shared = app, metrics, closing, shared
        self._occupancy = occupancy
        self._max_discarded = max(_DISCARDED_BODIES * occupancy.limits.max_body_bytes, _DISCARDED_BYTES)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if (authority := _AUTHORITY.match(scope["path"])) is not None:
            scope = {**scope, "path": scope["path"][authority.end() :] or "/"}
        begun = time.perf_counter()
        exchange = _Exchange(scope, receive, send, max_bytes=self._max_discarded, closing=self._closing)
        try:
            if (refused := _refusal(scope, self._occupancy)) is not None:
                self._metrics.error(refused.kind)
                content = error_at(scope["path"], refused.kind, refused.detail)
                headers = {**(refused.headers or {}), "Connection": "close"}
                answer = self._shared(JSONResponse(content, refused.status_code, headers))
                await answer(scope, exchange.receive, exchange.send)
            else:
                await self._app(scope, exchange.receive, exchange.send)
        except Exception:
            exchange.status = 500
            self._metrics.error("internal")
            raise
        finally:
            self._metrics.answer(
                scope["path"] if scope["method"] != "OPTIONS" else "",  # a browser's question before a request
                status=exchange.status,
                seconds=(exchange.answered or time.perf_counter()) - begun,
                received=exchange.received,
                sent=exchange.sent,
            )


def _refusal(scope: Scope, occupancy: Occupancy) -> Refused | None:
    """Return the refusal of a request that the application does not get, or None. Its connection is closed then."""
    names = {name for name, _ in scope["headers"]}
    if {b"content-length", b"transfer-encoding"} <= names:  # a proxy may see another end of it (RFC 9112, 6.1)
        return Refused(400, "bad_request", "a request must not have both Content-Length and Transfer-Encoding")
    if OVER_LIMIT in scope.get("state", {}) and scope["path"] not in _PROBES:
        reason = "the service has too many connections; retry later, or keep one open for several requests"
        return occupancy.busy("connections", reason)
    return None


class _Exchange:
    """One request and its answer. body_ended: whether nothing more of the body will arrive."""

    def __init__(
        self, scope: Scope, receive: Receive, send: Send, *, max_bytes: int, closing: Callable[[], bool]
    ) -> None:
        self._receive, self._send, self._max_bytes, self._closing = receive, send, max_bytes, closing
        headers = dict(scope["headers"])
        self._state = scope.get("state", {})
        self._chunked = b"transfer-encoding" in headers
        self._announced = int(headers.get(b"content-length", b"0"))
        self._expects_continue = b"100-continue" in headers.get(b"expect", b"").lower()
        self.body_ended = not self._chunked and self._announced == 0
        self.received = self.sent = self.status = 0
        self.answered = 0.0

    async def receive(self) -> Message:
        self._expects_continue = False
        message = await self._receive()
        if MALFORMED in self._state:
            self.body_ended = True
            raise Refused(400, "bad_request", self._state[MALFORMED], {"Connection": "close"})
        if message["type"] == "http.request":
            self.received += len(message.get("body", b""))
            self.body_ended = not message.get("more_body", False)
        else:
            self.body_ended = True
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            if self._expects_continue:  # and is refused, so that it does not send the body
                self.body_ended = True
                message = _with_close(message)
            elif self._closing() or (not self.body_ended and (self._chunked or self._announced > self._max_bytes)):
                message = _with_close(message)
        else:
            self.sent += len(message.get("body", b""))
            if not message.get("more_body", False):
                self.answered = time.perf_counter()
                if not self.body_ended:
                    await self._send({**message, "more_body": True})
                    await self._discard_body()
                    message = {"type": "http.response.body", "body": b"", "more_body": False}
        await self._send(message)

    async def _discard_body(self) -> None:
        seconds = _DISCARD_SECONDS
        if self._closing():
            seconds = _SHUTDOWN_DISCARD_SECONDS
        elif self.status == 408:
            seconds = _SLOW_DISCARD_SECONDS
        with suppress(TimeoutError, Refused):  # the client has had its answer all that time
            async with asyncio.timeout(seconds):
                while not self.body_ended and self.received < self._max_bytes:
                    await self.receive()


def _with_close(message: Message) -> Message:
    others = [(name, value) for name, value in message["headers"] if name != b"connection"]
    return {**message, "headers": [*others, (b"connection", b"close")]}
