"""Limits on requests, and what requests take up together: places in the queue, bytes in memory."""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import final

from starlette.exceptions import HTTPException

MALFORMED, OVER_LIMIT, CLOSED_HERE = "gpuflow.malformed", "gpuflow.over_limit", "gpuflow.closed_here"
"""Keys of a request's state: why the rest of its body cannot be read; that its connection is one too many; that the
service closed its connection, and not the client."""

TIMEOUT_HEADER = "X-Request-Timeout-Ms"
"""How long the caller waits for its answer, from the head of its request on."""
_SHARE = 0.8
"""The share of a request's time that it may take by prediction: a batch may take longer than those before it."""
STALLED_SECONDS, PROGRESS_BYTES = 1.0, 65_536
"""A body or an answer that made less progress than these bytes in this time is stalled. Such a body is refused where
memory is short, and a connection may be closed for another one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestLimits:
    """Limits on the requests of a service.

    max_body_bytes: of one request. max_images: in one request.
    max_queue: images in flight; a request takes its places once its body has arrived.
    max_pixels: of one image, by its header. max_queue_pixels: of all images in flight.
    max_scans: of a JPEG; encoders write at most about twenty, and each takes as long as a whole image.
    max_held_bytes: of all bodies in memory, until their images are decoded; a single one is always accepted.
    timeout_s: seconds for a body to arrive, and again as many for its answer; a request may ask for fewer by
    TIMEOUT_HEADER.
    max_connections: open at once; fewer where the process may not open that many files.
    head_s: seconds for the head of a request to arrive.
    """

    max_body_bytes: int = 32_000_000
    max_images: int = 64
    max_queue: int = 256
    max_pixels: int = 50_000_000
    max_scans: int = 20
    max_queue_pixels: int = 2_000_000_000
    max_held_bytes: int = 512_000_000
    timeout_s: float = 30.0
    max_connections: int = 1000
    head_s: float = 10.0

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if name in ("timeout_s", "head_s"):
                if not 0 < value < float("inf"):
                    raise ValueError(f"RequestLimits.{name} must be a number of seconds > 0, got {value}")
            elif value < 1:
                raise ValueError(f"RequestLimits.{name} must be >= 1, got {value}")


class Refused(HTTPException):
    """A request is refused. kind: one of metrics.KINDS. reason: the rule, the value and the next action."""

    def __init__(self, status: int, kind: str, reason: str, headers: dict[str, str] | None = None) -> None:
        self.kind = kind
        super().__init__(status, reason, headers)


def busy(kind: str, reason: str, seconds: float = 1.0) -> Refused:
    """Return a 503 that says to try again after this time, in whole seconds."""
    return Refused(503, kind, reason, {"Retry-After": str(max(1, math.ceil(seconds)))})


def allowed_seconds(values: Sequence[str]) -> float:
    """Return for how long the caller of a request waits, by the values of its TIMEOUT_HEADER; without one, infinity.

    Raises Refused.
    """
    if not values:
        return math.inf
    if len(values) > 1 or not re.fullmatch("[1-9][0-9]{0,8}", values[0]):
        rule = f"{TIMEOUT_HEADER} must be a whole number of milliseconds, from 1 to 999999999"
        raise Refused(400, "bad_request", f"{rule}, got {', '.join(values)!r}")
    return int(values[0]) / 1000


@final
class Occupancy:
    """What the requests of a service take up. All methods are called on the event loop's thread.

    Args:
        in_flight: images that the predictor has and did not answer yet.
        decoding_bytes: of those it did not decode yet.
        seconds_for: how long the predictor takes for a number of images, by its recent rate; 0 if that is not known.
        newest_first: whether a new image does not wait for those in flight.

    active: requests that are admitted and not answered yet. reserved: their images that the predictor does not count
    yet. pixels: of the images that it has. body_bytes: of bodies that are being read or were read, and whose images the
    predictor does not have yet. arriving: requests whose bodies are being read.
    """

    def __init__(
        self,
        limits: RequestLimits,
        *,
        in_flight: Callable[[], int],
        decoding_bytes: Callable[[], int],
        seconds_for: Callable[[int], float],
        newest_first: Callable[[], bool],
    ) -> None:
        self.limits = limits
        self.active = self.reserved = self.pixels = self.body_bytes = 0
        self._in_flight, self._decoding_bytes = in_flight, decoding_bytes
        self.seconds_for, self.newest_first = seconds_for, newest_first
        self.arriving: set[Reservation] = set()

    @property
    def queue_length(self) -> int:
        """Return the number of images in flight and of those whose request has just arrived."""
        return self.reserved + self._in_flight()

    @property
    def held_bytes(self) -> int:
        """Return the size of all bodies in memory."""
        return self.body_bytes + self._decoding_bytes()

    def busy(self, kind: str, reason: str) -> Refused:
        """Return a 503 that says to try again once the images in flight are answered, or have no time left."""
        return busy(kind, reason, min(self.seconds_for(self.queue_length), self.limits.timeout_s))

    @contextmanager
    def admit(self, allowed: float = math.inf) -> Iterator[Reservation]:
        """Count a request, as long as it lasts. It takes no place yet, but a full queue refuses it. Raises Refused.

        allowed: seconds for which its caller waits for the answer.
        """
        reservation = Reservation(self, allowed)
        reservation.check_places(1)
        self.active += 1
        try:
            yield reservation
        finally:
            self.active -= 1
            reservation.release()

    def stop_stalled_body(self, seconds: float = STALLED_SECONDS) -> bool:
        """Refuse the largest body that has been stalled for longer than this. Return whether there was one."""
        stalled = [each for each in self.arriving if each.is_stalled(seconds)]
        if stalled:
            max(stalled, key=lambda each: each.size).stop_body()
        return bool(stalled)


@final
class Reservation:
    """One request's places in the queue, and the bytes of its body.

    size: of the part of the body that is counted. stopped: whether its body was refused to make room for others.
    """

    def __init__(self, occupancy: Occupancy, allowed: float) -> None:
        self.size, self.stopped = 0, False
        self._ends = time.monotonic() + allowed
        self._occupancy, self._images = occupancy, 0
        self._progress = 0, 0.0
        self._limit: asyncio.Timeout | None = None

    @property
    def seconds(self) -> float:
        """Return the seconds that this request has for its next step, its body or its answer; 0 if none are left."""
        return max(0.0, min(self._occupancy.limits.timeout_s, self._ends - time.monotonic()))

    def shorten(self, seconds: float) -> None:
        """Let the request end after these seconds at the latest."""
        self._ends = min(self._ends, time.monotonic() + seconds)

    # --- the body -----------------------------------------------------------------------------------------------------

    @contextmanager
    def arriving(self, limit: asyncio.Timeout) -> Iterator[None]:
        """Count this request among those whose bodies are being read. `stop_body` ends its time limit."""
        self._limit, self._progress = limit, (0, time.monotonic())
        self._occupancy.arriving.add(self)
        try:
            yield
        finally:
            self._occupancy.arriving.discard(self)
            self._limit = None

    def hold(self, size: int) -> None:
        """Count a part of the body that was read. If all bodies together are too large, those that are stalled are
        refused, or else this one. Raises Refused."""
        occupancy, most = self._occupancy, self._occupancy.limits.max_held_bytes
        while (held := occupancy.held_bytes) + size > most and held > self.size:
            if not occupancy.stop_stalled_body():
                raise occupancy.busy("queue_full", f"request bodies take {held:,} of {most:,} bytes")
        occupancy.body_bytes += size
        self.size += size
        if self.size - self._progress[0] >= PROGRESS_BYTES:
            self._progress = self.size, time.monotonic()

    def is_stalled(self, seconds: float) -> bool:
        return not self.stopped and time.monotonic() - self._progress[1] > seconds

    def stop_body(self) -> None:
        """Stop waiting for the rest of the body and give its bytes back."""
        assert self._limit is not None
        self.stopped = True
        self._limit.reschedule(0.0)
        self._release_body()

    def _release_body(self) -> None:
        self._occupancy.body_bytes -= self.size
        self.size = 0

    # --- the queue ----------------------------------------------------------------------------------------------------

    def check_places(self, images: int) -> None:
        """Raise Refused if the queue has no room for this number of images, or would take too long."""
        length, most = self._occupancy.queue_length, self._occupancy.limits.max_queue
        rest = f", and the request has {images} images" if images > 1 else ""
        if length + images > most:
            raise self._occupancy.busy("queue_full", f"the queue is full: {length} of {most} places taken{rest}")
        seconds, left = self._occupancy.seconds_for(length + images), self.seconds
        if seconds > _SHARE * left and not self._occupancy.newest_first():
            reason = f"the answer would take {seconds:.1f} s, and the request has {left:.1f} s: {length} images wait"
            raise self._occupancy.busy("overloaded", f"{reason}{rest}")

    def reserve(self, images: int, pixels: int) -> None:
        """Take places for the images of a body that has arrived. Raises Refused if the queue is full, or has no room
        for their pixels."""
        self.check_places(images)
        taken, most = self._occupancy.pixels, self._occupancy.limits.max_queue_pixels
        if pixels > most:
            reason = f"the images of a request must have at most {most:,} pixels, got {pixels:,}; send several requests"
            raise Refused(413, "too_large", reason)
        if taken + pixels > most:
            raise self._occupancy.busy("queue_full", f"the queue is full: its images have {taken:,} of {most:,} pixels")
        self._occupancy.reserved += images
        self._images = images

    def submit_one(self, size: int) -> None:
        """Stop counting an image of this size and its bytes, because the predictor counts them from now on."""
        self._occupancy.reserved -= 1
        self._images -= 1
        size = min(size, self.size)
        self._occupancy.body_bytes -= size
        self.size -= size

    def release(self) -> None:
        """Release all places and bytes."""
        self._occupancy.reserved -= self._images
        self._images = 0
        self._release_body()
