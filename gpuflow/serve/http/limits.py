"""Limits on requests, what requests take up together, and the metrics of a service, in Prometheus' text format.

Requests take up places in the queue, and bytes in memory. The metrics:

gpuflow_requests_total{route, status}   answers; with the status 499 requests whose connection ended before the answer,
                                        closed by the client, or by the service as `evicted` or `unread`;
                                        the route of a browser's OPTIONS before a request is `other`
gpuflow_errors_total{kind}              refused requests, closed connections, and images that cannot be decoded
gpuflow_images_total                    images answered with predictions
gpuflow_request_seconds{route}          from a request's headers to the end of its answer, if that was a 200
gpuflow_batch_size                      images in a batch of the model
gpuflow_queue_length                    images in flight
gpuflow_held_bytes                      bodies in memory: being read, or not decoded yet
gpuflow_received_bytes_total, gpuflow_sent_bytes_total   bodies without headers
gpuflow_ready                           1 while requests are admitted and /readyz last found the decoders working
process_*                               CPU seconds, memory and files of this process
"""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector
from starlette.exceptions import HTTPException

if TYPE_CHECKING:
    from gpuflow.serve.predictor import Predictor

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
    """A request is refused. kind: one of KINDS. reason: the rule, the value and the next action."""

    def __init__(self, status: int, kind: str, reason: str, headers: dict[str, str] | None = None) -> None:
        self.kind = kind
        super().__init__(status, reason, headers)


def busy(kind: str, reason: str, seconds: float = 1.0) -> Refused:
    """Return a 503 that says to try again after this time, in whole seconds.

    Examples:
        >>> busy("queue_full", "the queue is full", 1.2).headers
        {'Retry-After': '2'}
    """
    return Refused(503, kind, reason, {"Retry-After": str(max(1, math.ceil(seconds)))})


def whole_number(name: str, values: Sequence[str]) -> int | None:
    """Return the number in a header or a parameter of a request; None if there is none. values: all that it has.

    Raises Refused.

    Examples:
        >>> whole_number("top_k", ["5"])
        5
    """
    if not values:
        return None
    if len(values) > 1 or not re.fullmatch("[1-9][0-9]{0,8}", values[0]):
        rule = f"{name} must be one whole number from 1 to 999999999"
        raise Refused(400, "bad_request", f"{rule}, got {', '.join(values)!r}")
    return int(values[0])


@final
class Occupancy:
    """Counts what the requests of a service take up. All methods are called on the event loop's thread.

    predictor: what answers; None while it is loaded.
    active: requests that are admitted and not answered yet. reserved: their images that the predictor does not count
    yet. pixels: of the images that it has. body_bytes: of bodies that are being read or were read, and whose images the
    predictor does not have yet. arriving: requests whose bodies are being read.
    """

    def __init__(self, limits: RequestLimits) -> None:
        self.limits = limits
        self.predictor: Predictor | None = None
        self.active = self.reserved = self.pixels = self.body_bytes = 0
        self.arriving: set[Reservation] = set()

    @property
    def queue_length(self) -> int:
        """Return the number of images in flight and of those whose request has just arrived."""
        return self.reserved + (self.predictor.in_flight if self.predictor else 0)

    @property
    def held_bytes(self) -> int:
        """Return the size of all bodies in memory."""
        return self.body_bytes + (self.predictor.held_bytes if self.predictor else 0)

    def seconds_for(self, images: int) -> float:
        """Return how long the predictor takes for these images, by its recent rate; 0 if that is not known."""
        return self.predictor.seconds_for(images) if self.predictor else 0.0

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
        predictor = self._occupancy.predictor
        if seconds > _SHARE * left and not (predictor and predictor.newest_first):
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


# --- metrics ----------------------------------------------------------------------------------------------------------

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
KINDS = (
    "bad_image",
    "bad_request",
    "connections",
    "disconnected",
    "draining",
    "evicted",
    "internal",
    "loading",
    "method",
    "model",
    "no_picture",
    "not_found",
    "overloaded",
    "queue_full",
    "slow_body",
    "slow_head",
    "timeout",
    "too_large",
    "unread",
    "unsupported_type",
)
"""The values of `error.kind` in an answer. Three are counted only: `disconnected` for clients that closed the
connection before the answer, `evicted` for connections that the service closed because there were too many, and
`unread` for those that it closed because the client did not read its answers."""
ROUTES = (
    *("/", "/healthz", "/metrics", "/openapi.json", "/predict", "/readyz", "/seen", "/v2", "/v2/health/live"),
    *("/v2/health/ready", "/v2/models/{name}", "/v2/models/{name}/infer", "/v2/models/{name}/ready"),
)
TIMED = ("/predict", "/seen", "/v2/models/{name}/infer")
"""The routes whose answers are timed: those that take images."""
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_SIZES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0)


class Metrics:
    """The counters of one service, in a separate registry.

    Args:
        queue: number of images in flight.
        held: bytes of bodies in memory.
        ready: whether requests are admitted.
        batches: how often the model ran, by batch size.
    """

    def __init__(
        self,
        *,
        queue: Callable[[], int],
        held: Callable[[], int],
        ready: Callable[[], bool],
        batches: Callable[[], Mapping[int, int]],
    ) -> None:
        self._registry = registry = CollectorRegistry()
        self._requests = Counter("gpuflow_requests", "Answers.", ["route", "status"], registry=registry)
        self._errors = Counter("gpuflow_errors", "Refused requests and bad images.", ["kind"], registry=registry)
        self.images = Counter("gpuflow_images", "Images answered with predictions.", registry=registry)
        self._seconds = Histogram(
            "gpuflow_request_seconds",
            "From a request's headers to the end of its answer, if that was a 200.",
            ["route"],
            buckets=_SECONDS,
            registry=registry,
        )
        self._received = Counter("gpuflow_received_bytes", "Bytes of requests' bodies.", registry=registry)
        self._sent = Counter("gpuflow_sent_bytes", "Bytes of answers' bodies.", registry=registry)
        Gauge("gpuflow_queue_length", "Images in flight.", registry=registry).set_function(queue)
        Gauge("gpuflow_held_bytes", "Bytes of bodies in memory.", registry=registry).set_function(held)
        Gauge("gpuflow_ready", "Whether requests are admitted.", registry=registry).set_function(ready)
        registry.register(_Batches(batches))
        ProcessCollector(registry=registry)
        for kind in KINDS:
            self._errors.labels(kind)
        for route in TIMED:
            self._seconds.labels(route)

    def answer(self, path: str, *, status: int, seconds: float, received: int, sent: int) -> None:
        """Count one answer. received, sent: bytes of the bodies."""
        path = re.sub("^/v2/models/[^/]+(/versions/[^/]+)?", "/v2/models/{name}", path)  # clients choose these
        route = path if path in ROUTES else "other"
        self._requests.labels(route, str(status)).inc()
        self._received.inc(received)
        self._sent.inc(sent)
        if status == 200 and route in TIMED:
            self._seconds.labels(route).observe(seconds)

    def error(self, kind: str) -> None:
        """Count one error. kind: one of KINDS."""
        assert kind in KINDS
        self._errors.labels(kind).inc()

    def exposition(self) -> bytes:
        """Return all metrics in the text format, of the type CONTENT_TYPE."""
        return generate_latest(self._registry)


class _Batches(Collector):
    """The predictor's own counts of batches, as a histogram."""

    def __init__(self, batches: Callable[[], Mapping[int, int]]) -> None:
        self._batches = batches

    def collect(self) -> Iterator[HistogramMetricFamily]:
        counts = self._batches()
        buckets = [(str(size), sum(n for images, n in counts.items() if images <= size)) for size in _SIZES]
        buckets.append(("+Inf", sum(counts.values())))
        images = sum(images * n for images, n in counts.items())
        yield HistogramMetricFamily(
            "gpuflow_batch_size", "Images in a batch of the model.", buckets=buckets, sum_value=images
        )
