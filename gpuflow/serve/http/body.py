"""Bodies of requests: read within limits into encoded images, or read off.

A server that closes a connection on which bytes are still to come makes the kernel reset it, and a client that is busy
sending never sees its answer. So an answer that comes early is sent whole, and what the client still sends is read and
dropped, within bounds, before the connection may close.
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

__all__ = ["Edge", "Limits", "Refused", "check_headers", "read_images"]

_TAKEN = "image/*, application/octet-stream, multipart/form-data"
_DROPPED_BODIES, _DROPPED_BYTES = 8, 64_000_000
_DROPPING_SECONDS, _LAST_SECONDS = 30.0, 3.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What a service takes.

    max_body_bytes: of one request. max_images: in one request.
    max_queue: images under way at a time; a request whose body is being read counts as one.
    max_held_bytes: of all bodies at a time; one alone is always taken.
    timeout_s: seconds that a body may take to arrive, and from then on its answer.
    """

    max_body_bytes: int = 32_000_000
    max_images: int = 64
    max_queue: int = 256
    max_held_bytes: int = 512_000_000
    timeout_s: float = 30.0

    def __post_init__(self) -> None:
        for name in ("max_body_bytes", "max_images", "max_queue", "max_held_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"Limits.{name} must be >= 1, got {getattr(self, name)}")
        if not 0 < self.timeout_s < float("inf"):
            raise ValueError(f"Limits.timeout_s must be a number of seconds > 0, got {self.timeout_s}")


class Refused(HTTPException):
    """A request that gets no predictions. kind: one of metrics.KINDS. reason: the rule, the value, what to do."""

    def __init__(self, status: int, kind: str, reason: str, headers: dict[str, str] | None = None) -> None:
        self.kind = kind
        super().__init__(status, reason, headers)


# --- reading ----------------------------------------------------------------------------------------------------------


def check_headers(request: Request, limits: Limits) -> None:
    """Refuse by its headers what need not be read: 413, 415."""
    kind = _media_type(request)
    if kind not in ("", "application/octet-stream", "multipart/form-data") and not kind.startswith("image/"):
        hint = "; with curl use -F image=@FILE" if kind == "application/x-www-form-urlencoded" else ""
        reason = f"Content-Type must be one of {_TAKEN}, got {kind!r}{hint}"
        raise Refused(415, "unsupported_type", reason, {"Accept-Post": _TAKEN})
    announced = request.headers.get("content-length", "0")
    if announced.isdecimal() and int(announced) > limits.max_body_bytes:
        raise _too_large(limits)


async def read_images(request: Request, limits: Limits, hold: Callable[[int], None]) -> tuple[list[bytes], bool]:
    """The encoded images of a request, and whether it may have several: a form rather than an image.

    Args:
        hold: told the number of bytes of each piece, before the next one is read; may refuse.

    Raises:
        Refused: 400, 408, 413 or 422. ClientDisconnect: nobody is there any more.
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


def _too_large(limits: Limits) -> Refused:
    return Refused(413, "too_large", f"a body may have {limits.max_body_bytes:,} bytes, and this one has more")


async def _pieces(request: Request, limits: Limits, hold: Callable[[int], None]) -> AsyncGenerator[bytes, None]:
    size = 0
    async for piece in request.stream():
        size += len(piece)
        if size > limits.max_body_bytes:
            raise _too_large(limits)
        hold(len(piece))
        yield piece


async def _files(request: Request, pieces: AsyncGenerator[bytes, None], limits: Limits) -> list[bytes]:
    _, options = parse_options_header(request.headers["content-type"])
    if b"boundary" not in options:
        raise _bad_form("its Content-Type names no boundary")
    form = _Form(most=min(limits.max_images, limits.max_queue))
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
    """Collects the files of a form, at most so many."""

    def __init__(self, *, most: int) -> None:
        self.files: list[bytearray] = []
        self.ended = False
        self._most = most
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
        if len(self.files) == self._most:
            raise Refused(413, "too_large", f"a request may have {self._most} images, and this one has more")

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
            raise _bad_form(f"its field {name!r} is no file; files have a filename, parameters belong into the URL")
        self.files.append(bytearray())

    def _more_data(self, data: bytes, start: int, end: int) -> None:
        self.files[-1] += data[start:end]

    def _end(self) -> None:
        self.ended = True


def _bad_form(reason: str) -> Refused:
    return Refused(400, "bad_request", f"the form cannot be read: {reason}")


# --- reading off ------------------------------------------------------------------------------------------------------


class Edge:
    """Around an app: counts what comes and goes, and reads off what clients still send when they are answered.

    closing: whether connections are to end with their answer.
    """

    def __init__(self, app: ASGIApp, *, metrics: Metrics, limits: Limits, closing: Callable[[], bool]) -> None:
        self._app, self._metrics, self._closing = app, metrics, closing
        self._most = max(_DROPPED_BODIES * limits.max_body_bytes, _DROPPED_BYTES)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun = time.perf_counter()
        exchange = _Exchange(scope, receive, send, most=self._most, closing=self._closing)
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
    """One request and its answer. over: whether nothing more of the body is to come."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, *, most: int, closing: Callable[[], bool]) -> None:
        self._receive, self._send, self._most, self._closing = receive, send, most, closing
        headers = dict(scope["headers"])
        self._chunked = b"transfer-encoding" in headers
        self._announced = int(headers.get(b"content-length", b"0"))
        self._asks_first = b"100-continue" in headers.get(b"expect", b"").lower()
        self.over = not self._chunked and self._announced == 0
        self.received = self.sent = self.status = 0
        self.answered = 0.0

    async def receive(self) -> Message:
        self._asks_first = False
        message = await self._receive()
        if message["type"] == "http.request":
            self.received += len(message.get("body", b""))
            self.over = not message.get("more_body", False)
        else:
            self.over = True
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            if self._asks_first:  # and is told no: the body does not come
                self.over = True
                message = _with_close(message)
            elif self._closing() or (not self.over and (self._chunked or self._announced > self._most)):
                message = _with_close(message)
        else:
            self.sent += len(message.get("body", b""))
            if not message.get("more_body", False):
                self.answered = time.perf_counter()
                if not self.over:
                    await self._send({**message, "more_body": True})
                    await self._read_off()
                    message = {"type": "http.response.body", "body": b"", "more_body": False}
        await self._send(message)

    async def _read_off(self) -> None:
        try:
            async with asyncio.timeout(_LAST_SECONDS if self._closing() else _DROPPING_SECONDS):
                while not self.over and self.received < self._most:
                    await self.receive()
        except TimeoutError:
            pass  # the client has had its answer for as long


def _with_close(message: Message) -> Message:
    return {**message, "headers": [*message["headers"], (b"connection", b"close")]}
