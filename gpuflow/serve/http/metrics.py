"""The metrics of a service, in Prometheus' text format.

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

import re
from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector

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
