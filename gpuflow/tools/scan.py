"""`gpuflow scan`: reads and decodes every sample of a source once and names what is wrong or odd."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from gpuflow.decode.codecs import CpuDecoder, Header, probe
from gpuflow.errors import BadSampleError
from gpuflow.pipeline.stage import Decoder
from gpuflow.sources import Source

__all__ = ["Finding", "scan"]

_CHUNK = 32
_SUFFIXES = {"jpeg": ("jpg", "jpeg", "jpe", "jfif"), "png": ("png",), "webp": ("webp",), "bmp": ("bmp",)}


@dataclass(frozen=True, slots=True)
class Finding:
    """One sample worth a look.

    kind: `unreadable`, `corrupt` or `oversize`, which are bad; `cmyk` or `misnamed`, which decode all the same.
    """

    index: int
    path: str
    kind: str
    bad: bool
    reason: str

    def row(self) -> dict[str, Any]:
        """As a JSON object."""
        return asdict(self)


def scan(
    source: Source, decoder: Decoder, *, threads: int, progress: Callable[[int], None] = lambda samples: None
) -> Iterator[Finding]:
    """Findings in the source's order.

    Args:
        source: what to read, all of it.
        decoder: the decode stage whose limits count.
        threads: how many decode at once.
        progress: told how many more samples are through.
    """
    local = threading.local()

    def look(indices: list[int]) -> list[Finding]:
        if not hasattr(local, "decoder"):
            local.decoder = CpuDecoder(decoder.color)
        payload = source.read(indices, lambda size: np.empty(size, np.uint8))
        findings: list[Finding] = []
        for i, index in enumerate(indices):
            path = source.path(index)
            if (error := payload.errors[i]) is not None:
                findings.append(Finding(index, path, "unreadable", True, error))
                continue
            try:
                if decoder.library is not None:
                    decoder.decode(payload.sample(i))
                    continue
                header = probe(payload.sample(i), max_pixels=decoder.max_pixels, max_scans=decoder.max_scans)
                local.decoder.decode(payload.sample(i), header)
            except BadSampleError as fault:
                kind = "oversize" if fault.code == "sample.too_large" else "corrupt"
                findings.append(Finding(index, path, kind, True, fault.reason))
            else:
                findings.extend(_odd(index, path, header))
        return findings

    chunks = (list(range(start, min(start + _CHUNK, len(source)))) for start in range(0, len(source), _CHUNK))
    with ThreadPoolExecutor(threads, thread_name_prefix="gpuflow_scan") as pool:
        waiting: list[tuple[int, Future[list[Finding]]]] = []
        try:
            for chunk in chunks:
                waiting.append((len(chunk), pool.submit(look, chunk)))
                if len(waiting) > 2 * threads:
                    yield from _next(waiting, progress)
            while waiting:
                yield from _next(waiting, progress)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _next(waiting: list[tuple[int, Future[list[Finding]]]], progress: Callable[[int], None]) -> list[Finding]:
    count, future = waiting.pop(0)
    findings = future.result()
    progress(count)
    return findings


def _odd(index: int, path: str, header: Header) -> Iterator[Finding]:
    """What decodes, but not everywhere."""
    if header.format == "jpeg" and header.channels == 4:
        yield Finding(index, path, "cmyk", False, "CMYK JPEG; it is converted to RGB, other decoders may refuse it")
    name = path.rpartition("/")[2]
    suffix = name.rpartition(".")[2].lower() if "." in name else ""
    if suffix and suffix not in _SUFFIXES[header.format]:
        yield Finding(index, path, "misnamed", False, f"is {header.format.upper()} but is named .{suffix}")
