"""Sources: an index to (bytes, label), wherever the bytes live.

`open_source` indexes what a `SourceSpec` describes; `subset` picks one of its splits. Both give a `Source`.
"""

from __future__ import annotations

from collections.abc import Callable

from gpuflow.sources.base import Source, SourceSpec
from gpuflow.sources.folder import open_folder
from gpuflow.sources.listing import open_listing
from gpuflow.sources.payload import SPARE_BYTES, Allocate, Payload, lay_out
from gpuflow.sources.split import Subset, subset
from gpuflow.sources.tar import open_tar

__all__ = [
    "KINDS",
    "SPARE_BYTES",
    "Allocate",
    "Payload",
    "Source",
    "SourceSpec",
    "Subset",
    "lay_out",
    "open_source",
    "subset",
]

KINDS: dict[str, Callable[[SourceSpec], Source]] = {
    "folder": open_folder,
    "listing": open_listing,
    "tar": open_tar,
}


def open_source(spec: SourceSpec) -> Source:
    """Indexes the whole source that `spec` describes, all splits together.

    Raises:
        SourceError: it cannot be indexed; the text says where and why.
        MissingExtra: the path is a URL and fsspec is not installed.
    """
    return KINDS[spec.kind](spec)
