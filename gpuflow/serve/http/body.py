"""Request bodies: read within limits into encoded images, or discarded.

If a server closes a connection while the client still sends, the kernel resets the connection and the client never sees
its answer. So an answer that is ready before the body has arrived is sent at once, and the rest of the body is read and
discarded, within limits, before the connection may close.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gpuflow.serve.http.metrics import Metrics

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks

__all__ = ["BodyMiddleware", "Refused", "RequestLimits", "check_headers", "read_images"]

_ACCEPTED = "image/*, application/octet-stream, multipart/form-data"
_DISCARDED_BODIES, _DISCARDED_BYTES = 8, 64_000_000
"""How much of a body is discarded at most: this multiple of the largest body, and no less than these bytes."""
_DISCARD_SECONDS, _SHUTDOWN_DISCARD_SECONDS = 30.0, 3.0


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestLimits:
    """Limits on the requests of a service.

    max_body_bytes: of one request. max_images: in one request.
    max_queue: images in flight at a time; a request whose body is being read counts as one.
    max_held_bytes: of all bodies in memory at a time; a single one is always accepted.
    timeout_s: seconds for a body to arrive, and again as many for its answer.
    """

    max_body_bytes: int = 32_000_000
    max_images: int = 64
    max_queue: int = 256
    max_held_bytes: int = 512_000_000
    timeout_s: float = 30.0

    def __post_init__(self) -> None:
        for name in ("max_body_bytes", "max_images", "max_queue", "max_held_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"RequestLimits.{name} must be >= 1, got {getattr(self, name)}")
        if not 0 < self.timeout_s < float("inf"):
            raise ValueError(f"RequestLimits.timeout_s must be a number of seconds > 0, got {self.timeout_s}")


class Refused(HTTPException):
    """A request is refused. kind: one of metrics.KINDS. reason: the rule, the value and the next action."""

    def __init__(self, status: int, kind: str, reason: str, headers: dict[str, str] | None = None) -> None:
        self.kind = kind
        super().__init__(status, reason, headers)


# --- reading ----------------------------------------------------------------------------------------------------------


def check_headers(request: Request, limits: RequestLimits) -> None:
    """Refuse a request by its headers alone, before its body is read: 413, 415."""
    kind = _media_type(request)
    if kind not in ("", "application/octet-stream", "multipart/form-data") and not kind.startswith("image/"):
        hint = "; with curl use -F image=@FILE" if kind == "application/x-www-form-urlencoded" else ""
        reason = f"Content-Type must be one of {_ACCEPTED}, got {kind!r}{hint}"
        raise Refused(415, "unsupported_type", reason, {"Accept-Post": _ACCEPTED})
    announced = request.headers.get("content-length", "0")
    if announced.isdecimal() and int(announced) > limits.max_body_bytes:
        raise _too_large(limits)


async def read_images(request: Request, limits: RequestLimits, hold: Callable[[int], None]) -> tuple[list[bytes], bool]:
    """The encoded images of a request, and whether it is a form, which may have several, rather than one image.

    Args:
        hold: called with the size of each part of the body, before the next one is read; may raise Refused.

    Raises:
        Refused: 400, 408, 413 or 422. ClientDisconnect: the client has closed the connection.
    """
    pieces = _pieces(request, limits, hold)
    try:
        async with asyncio.timeout(limits.timeout_s):
            if _media_type(request) == "multipart/form-data":
                return await _files(request, pieces, limits), True
            return [b"".join([piece async for piece in pieces])], False
    except TimeoutError:
        reason = f"the body did not arrive within {limits.timeout_s:g} s"
        raise Refused(408, "slow_body", reason, {"Connection": "close"}) from None


def _media_type(request: Request) -> str:
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


def _too_large(limits: RequestLimits) -> Refused:
    return Refused(
        413,
        "too_large",
        f"the body must have at most {limits.max_body_bytes:,} bytes; send a smaller file or fewer files",
    )


async def _pieces(request: Request, limits: RequestLimits, hold: Callable[[int], None]) -> AsyncGenerator[bytes, None]:
    size = 0
    async for piece in request.stream():
        size += len(piece)
        if size > limits.max_body_bytes:
            raise _too_large(limits)
        hold(len(piece))
        yield piece


async def _files(request: Request, pieces: AsyncGenerator[bytes, None], limits: RequestLimits) -> list[bytes]:
    _, options = parse_options_header(request.headers["content-type"])
    if b"boundary" not in options:
        raise _bad_form("its Content-Type names no boundary")
    form = _Form(max_files=min(limits.max_images, limits.max_queue))
    try:
        parser = MultipartParser(options[b"boundary"], form.callbacks())
        async for piece in pieces:
            parser.write(piece)
    except FormParserError as error:
        raise _bad_form(str(error)) from error
    if not form.ended:
        raise _bad_form("it ends before its closing boundary")
    if not form.files:
        raise Refused(422, "bad_image", "the form has no file")
    return [bytes(file) for file in form.files]


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
            raise Refused(
                413, "too_large", f"a request must have at most {self._max_files} images; send several requests"
            )

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
        if b"filename" not in options:
            name = options.get(b"name", b"").decode(errors="replace")
            raise _bad_form(f"its field {name!r} is not a file; give files a filename, parameters belong in the URL")
        self.files.append(bytearray())

    def _more_data(self, data: bytes, start: int, end: int) -> None:
        self.files[-1] += data[start:end]

    def _end(self) -> None:
        self.ended = True


def _bad_form(reason: str) -> Refused:
    return Refused(400, "bad_request", f"the form cannot be read: {reason}")


# --- discarding -------------------------------------------------------------------------------------------------------


class BodyMiddleware:
    """Wraps an app: counts requests and bytes, and discards what a client still sends after its answer.

    closing: whether each connection shall be closed after its answer.
    """

    def __init__(self, app: ASGIApp, *, metrics: Metrics, limits: RequestLimits, closing: Callable[[], bool]) -> None:
        self._app, self._metrics, self._closing = app, metrics, closing
        self._max_discarded = max(_DISCARDED_BODIES * limits.max_body_bytes, _DISCARDED_BYTES)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun = time.perf_counter()
        exchange = _Exchange(scope, receive, send, max_bytes=self._max_discarded, closing=self._closing)
        try:
            await self._app(scope, exchange.receive, exchange.send)
        except Exception:
            exchange.status = 500
            self._metrics.error("internal")
            raise
        finally:
            self._metrics.answer(
                scope["path"],
                status=exchange.status,
                seconds=(exchange.answered or time.perf_counter()) - begun,
                received=exchange.received,
                sent=exchange.sent,
            )


class _Exchange:
    """One request and its answer. body_ended: whether nothing more of the body will arrive."""

    def __init__(
        self, scope: Scope, receive: Receive, send: Send, *, max_bytes: int, closing: Callable[[], bool]
    ) -> None:
        self._receive, self._send, self._max_bytes, self._closing = receive, send, max_bytes, closing
        headers = dict(scope["headers"])
        self._chunked = b"transfer-encoding" in headers
        self._announced = int(headers.get(b"content-length", b"0"))
        self._expects_continue = b"100-continue" in headers.get(b"expect", b"").lower()
        self.body_ended = not self._chunked and self._announced == 0
        self.received = self.sent = self.status = 0
        self.answered = 0.0

    async def receive(self) -> Message:
        self._expects_continue = False
        message = await self._receive()
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
        try:
            async with asyncio.timeout(_SHUTDOWN_DISCARD_SECONDS if self._closing() else _DISCARD_SECONDS):
                while not self.body_ended and self.received < self._max_bytes:
                    await self.receive()
        except TimeoutError:
            pass  # the client has had its answer all that time


def _with_close(message: Message) -> Message:
    return {**message, "headers": [*message["headers"], (b"connection", b"close")]}
