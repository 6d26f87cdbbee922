"""Serves the numbers of running loaders over HTTP in Prometheus' text format.

All have the labels pipeline and rank; counters run from the making of the loader, over all epochs.

gpuflow_loader_epoch                          the running epoch, or the last one
gpuflow_loader_batches_total                  batches that the loop got
gpuflow_loader_wait_seconds_total             how long the loop waited for them
gpuflow_loader_bad_samples_total              bad samples
gpuflow_loader_stage_images_total{stage}      images that a stage finished
gpuflow_loader_stage_busy_seconds_total{stage}  seconds that its threads worked, together
gpuflow_loader_stage_threads{stage}           its threads
gpuflow_loader_stage_read_bytes_total{stage}  bytes that it read
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Self
from wsgiref.simple_server import WSGIServer

from gpuflow.errors import LoaderError, MissingExtra
from gpuflow.loader.loader import Loader
from gpuflow.runtime.ranks import Ranks

if TYPE_CHECKING:
    from prometheus_client import Metric


_STOP_SECONDS, _HIGHEST_PORT = 5.0, 65535


def serve_metrics(loaders: Loader | Mapping[str, Loader], *, port: int, address: str = "127.0.0.1") -> MetricsServer:
    """Serve the numbers of loaders to Prometheus, at `http://address:port/metrics`, until `close`.

    Each rank serves its own: the one with the local rank r of its host listens at port + r. `address="0.0.0.0"` lets
    other hosts in; there is no password.

    Args:
        loaders: one, or several by the value that the label `pipeline` gets.
        port: of local rank 0; 0 is any free one.
        address: of the network interface.

    Raises:
        MissingExtra: prometheus-client is not installed.
        LoaderError: the port is taken, or none; the address is not one of this host.
    """
    try:
        from prometheus_client import CollectorRegistry, start_http_server
    except ImportError as error:
        raise MissingExtra("serving metrics", "prometheus-client", "metrics") from error
    named = {loaders.pipeline.name: loaders} if isinstance(loaders, Loader) else dict(loaders)
    registry = CollectorRegistry()
    registry.register(_Collector(named))
    own = port + (Ranks.on_host().local_rank or 0) if port else 0
    if not 0 <= own <= _HIGHEST_PORT:
        raise LoaderError(f"metrics cannot be served at port {own}: it must be within [0, {_HIGHEST_PORT}]")
    try:
        server, thread = start_http_server(own, address, registry)
    except OSError as error:
        taken = error.errno in (errno.EADDRINUSE, errno.EACCES)
        action = "choose another port" if taken else "address must be one of this host, such as 127.0.0.1"
        raise LoaderError(f"metrics cannot be served at {address}:{own}: {error.strerror}; {action}") from error
    return MetricsServer(server, thread)


class MetricsServer:
    """Serves metrics until `close`. port: where."""

    def __init__(self, server: WSGIServer, thread: threading.Thread) -> None:
        self._server, self._thread = server, thread
        self.port = int(server.server_port)

    def close(self) -> None:
        """End the server and its thread."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(_STOP_SECONDS)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Collector:
    """Reads the loaders when Prometheus asks."""

    def __init__(self, loaders: Mapping[str, Loader]) -> None:
        self._loaders = loaders

    def collect(self) -> Iterator[Metric]:
        from prometheus_client.core import CounterMetricFamily as Counter
        from prometheus_client.core import GaugeMetricFamily as Gauge

        families: list[Any] = [
            kind(f"gpuflow_loader_{name}", text, labels=["pipeline", "rank", *labels])
            for kind, name, text, *labels in (
                (Gauge, "epoch", "The running epoch, or the last one."),
                (Counter, "batches", "Batches that the loop got."),
                (Counter, "wait_seconds", "Seconds that the loop waited for batches."),
                (Counter, "bad_samples", "Bad samples."),
                (Counter, "stage_images", "Images that a stage finished.", "stage"),
                (Counter, "stage_busy_seconds", "Seconds that a stage's threads worked.", "stage"),
                (Gauge, "stage_threads", "Threads of a stage.", "stage"),
                (Counter, "stage_read_bytes", "Bytes that a stage read.", "stage"),
            )
        ]
        for pipeline, loader in self._loaders.items():
            labels, totals = [pipeline, str(loader.rank)], loader.totals()
            for family, value in zip(families[:4], totals[:4], strict=True):
                family.add_metric(labels, value)
            for stage, (done, threads) in totals.stages.items():
                values = done.samples, done.busy_s, threads, done.read_bytes
                for family, value in zip(families[4:], values, strict=True):
                    family.add_metric([*labels, stage], value)
        yield from families
