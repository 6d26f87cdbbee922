"""Requests over HTTP, on the session that fsspec opens: files, ranges, what a server says of a file, and pages."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from http.client import responses
from typing import Any, NamedTuple, final

from gpuflow.sources.storage.base import HTTP, Shard

_CONNECT_SECONDS, _REQUEST_SECONDS = 5.0, 300.0
"""Limits of a connection and of a large file. A server whose queue of connections is full drops those that come; the
client asks again after 1, 3, 7, 15, ... s, and a new attempt comes sooner than its later ones."""
_PAGE = "text/html"
_SPAN = re.compile(r"bytes (\d+)-(\d+)/(\d+|\*)")
_TAGS = ("ETag", "etag", "Content-MD5", "md5Hash", "Last-Modified", "LastModified", "mtime", "updated", "created")
"""What changes with an object, by the names that servers and file systems of fsspec give it."""


_FIRST_DELAY, _LONGEST_DELAY = 0.1, 5.0
"""Seconds between two attempts of a server that does not say how long to wait."""
_TRIED, _ENDED, _STALLED = 0.7, 0.95, 0.25
"""Parts of `run.timeout_s`, so that the error of the server comes before that of the loader, which names no cause."""
_LONGEST_STALL = 30.0

_limit: ContextVar[float] = ContextVar("_limit", default=120.0)


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Open storages of servers with `run.timeout_s` while the block runs. Those that are open keep their limits."""
    token = _limit.set(seconds)
    try:
        yield
    finally:
        _limit.reset(token)


@dataclass(frozen=True, slots=True)
class TimeLimits:
    """How long a storage tries a server, in seconds.

    timeout: `run.timeout_s`, of which the others are parts. tried: after this time no new attempt begins. ended: the
    last attempt ends. stalled: a connection that sends nothing for this long is closed, and the attempt has failed.
    """

    timeout: float

    @classmethod
    def current(cls) -> TimeLimits:
        """Return the limits of the surrounding `time_limit`."""
        return cls(_limit.get())

    @property
    def tried(self) -> float:
        return _TRIED * self.timeout

    @property
    def ended(self) -> float:
        return _ENDED * self.timeout

    @property
    def stalled(self) -> float:
        return min(_LONGEST_STALL, _STALLED * self.timeout)


def delay_before(attempt: int) -> float:
    """Draw the seconds to wait before an attempt, the second being number 1. Random, so that not all processes come at
    once."""
    return random.uniform(0.5, 1.0) * min(_LONGEST_DELAY, _FIRST_DELAY * 2.0 ** min(attempt - 1, 10))


class Refusal(Exception):
    """An answer that is not the file. code: its status. retry_after: the seconds that the server asks to wait, or 0."""

    def __init__(self, code: int, retry_after: float = 0.0) -> None:
        self.code = code
        self.retry_after = retry_after
        super().__init__(f"its server answered {code} {responses.get(code, '')}".rstrip())


class NoRanges(Exception):
    """The server sends a whole file where a range was asked for."""


class Fetched(NamedTuple):
    """The bytes of a file or a range. now: what the server said of the whole file with them, or None."""

    data: bytes
    now: Shard | None = None


def data_of(answer: Fetched | str) -> bytes | str:
    """Return the bytes alone, or why they cannot be read."""
    return answer if isinstance(answer, str) else answer.data


@final
class HttpRequests:
    """Coroutines that send one request each. They raise Refusal, NoRanges, and exceptions of aiohttp.

    Args:
        fs: the file system of fsspec, which has the session and the user's options.
    """

    def __init__(self, fs: Any) -> None:
        self._fs = fs

    async def get(self, url: str, start: int | None = None, end: int | None = None) -> Fetched:
        """Return a whole file, or its bytes from `start` up to `end`."""
        if start is None or end is None:
            data, headers, _ = await self._send("GET", url)
            return Fetched(data, shard_of(url, headers, len(data)))
        data, headers, status = await self._send("GET", url, start, end)
        if status == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
            return Fetched(b"")
        first, last, size = _span(headers)
        if first != start or len(data) != last + 1 - first:
            raise OSError(f"its server sent {len(data)} bytes from {first} on for bytes {start} to {end - 1}")
        return Fetched(data, None if size is None else shard_of(url, headers, size))

    async def info(self, url: str) -> Shard | None:
        """Return what the server says of a file; None if it does not say its size."""
        _, headers, _ = await self._send("HEAD", url)
        size = headers.get("Content-Length", "")
        return shard_of(url, headers, int(size)) if size.isdecimal() else None

    async def shard(self, url: str) -> Shard | None:
        """As `info`, of a file that will be read in ranges: it asks for one."""
        _, headers, status = await self._send("GET", url, 0, 1)
        if status == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:  # an empty file
            return shard_of(url, headers, 0)
        *_, size = _span(headers)
        return None if size is None else shard_of(url, headers, size)

    async def page(self, url: str) -> str:
        """Return the text of a page; empty for another file."""
        data, headers, _ = await self._send("GET", url)
        return data.decode(errors="replace") if headers.get("Content-Type", _PAGE).startswith(_PAGE) else ""

    async def _send(
        self, method: str, url: str, start: int = 0, end: int | None = None
    ) -> tuple[bytes, Mapping[str, str], int]:
        """Send a request; return the body, the headers and the status of its answer: 200, 206 or 416."""
        from aiohttp import ClientResponseError, InvalidURL, TooManyRedirects

        options = {"allow_redirects": True, **self._fs.kwargs}
        headers = {
            **options.pop("headers", {}),
            "Accept-Encoding": "identity",
        }  # so that lengths and tags are the file's
        if end is not None:
            headers["Range"] = f"bytes={start}-{end - 1}"
        session = await self._fs.set_session()
        try:
            async with session.request(method, self._fs.encode_url(url), headers=headers, **options) as answer:
                if answer.status >= 300 and (
                    end is None or answer.status != HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE
                ):
                    raise Refusal(answer.status, _retry_after(answer.headers))
                if end is not None and answer.status == HTTPStatus.OK:
                    raise NoRanges
                return await answer.read(), answer.headers, answer.status
        except InvalidURL:  # its text has the URL
            raise ValueError("its address is not valid") from None
        except TooManyRedirects:
            raise Refusal(HTTPStatus.FOUND) from None
        except ClientResponseError as fault:  # an answer that is not HTTP; its status is not that of the server
            raise OSError(f"its server sent no valid answer: {fault.message}") from None


def shard_of(path: str, info: Mapping[str, Any], size: int | None) -> Shard | None:
    """Return what a server says of a file; None if it does not say its size."""
    if size is None:
        return None
    tag = next((info[tag] for tag in _TAGS if info.get(tag)), "")
    text = str(tag.timestamp() if isinstance(tag, datetime) else tag)
    return Shard(path=path, size=int(size), stamp=text.removeprefix("W/").strip('"'))  # as listings write it


def options_of(limits: TimeLimits) -> dict[str, Any]:
    """Return how fsspec connects to servers, under what the user's configuration of fsspec says."""
    from aiohttp import ClientTimeout
    from fsspec.config import conf

    known: dict[str, Any] = {}
    for protocol in HTTP:
        known |= conf.get(protocol, {}).get("client_kwargs", {})
    connect = min(_CONNECT_SECONDS, limits.stalled)
    total = max(_REQUEST_SECONDS, limits.timeout)
    timeout = ClientTimeout(total=total, sock_connect=connect, sock_read=limits.stalled)
    return {"client_kwargs": {"timeout": timeout, **known}}


def _span(headers: Mapping[str, str]) -> tuple[int, int, int | None]:
    """Return the first and the last byte of an answer, and the size of the whole file if the server says it."""
    found = _SPAN.fullmatch(headers.get("Content-Range", ""))
    if found is None:
        raise OSError(f"its server sent a range without saying which: {headers.get('Content-Range', '')[:60]!r}")
    first, last, size = found.groups()
    return int(first), int(last), None if size == "*" else int(size)


def _retry_after(headers: Mapping[str, str]) -> float:
    """Return the seconds that a server asks to wait, written as a number or as a time; 0 if it does not ask."""
    text = headers.get("Retry-After", "").strip()
    if text.isascii() and text.isdecimal():
        return float(text[:9])  # more digits are as good as never
    try:
        when = _time(text)
        now = _time(headers.get("Date", "")) if headers.get("Date") else datetime.now(UTC)
    except (ValueError, TypeError, OverflowError):
        return 0.0
    return max(0.0, (when - now).total_seconds())


def _time(text: str) -> datetime:
    when = parsedate_to_datetime(text)
    return when if when.tzinfo else when.replace(tzinfo=UTC)
