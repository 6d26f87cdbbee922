"""Sources: for each index the encoded bytes and the label of a sample, from local or remote files.

`open_source` indexes the files that a `SourceSpec` describes; `subset` selects one of its splits. Both return a
`Source`.
"""

from __future__ import annotations

from collections.abc import Callable

from gpuflow.sources.base import Source, SourceSpec, is_read_remotely
from gpuflow.sources.coco import open_coco
from gpuflow.sources.fingerprint import fingerprint_of
from gpuflow.sources.folder import open_folder
from gpuflow.sources.listing import open_listing
from gpuflow.sources.offered import offered_sources, open_offered
from gpuflow.sources.payload import SPARE_BYTES, Allocate, Payload, lay_out
from gpuflow.sources.record_source import (
    RecordSource,
    fields_of,
    has_labels,
    has_one_class,
    records_of,
    without_records,
)
from gpuflow.sources.split import Subset, subset
from gpuflow.sources.tar import open_tar

__all__ = [
    "KINDS",
    "SPARE_BYTES",
    "Allocate",
    "Payload",
    "RecordSource",
    "Source",
    "SourceSpec",
    "Subset",
    "fields_of",
    "fingerprint_of",
    "has_labels",
    "has_one_class",
    "is_read_remotely",
    "lay_out",
    "offered_sources",
    "open_source",
    "records_of",
    "subset",
    "without_records",
]

KINDS: dict[str, Callable[[SourceSpec], Source]] = {
    "folder": open_folder,
    "listing": open_listing,
    "tar": open_tar,
    "coco": open_coco,
}


def open_source(spec: SourceSpec) -> Source:
    """Index the whole source that `spec` describes, all splits together.

    Raises:
        SourceError: it cannot be indexed; the message says where and why.
        MissingExtra: the path is a URL and fsspec is not installed.
    """
    return open_offered(spec) if spec.other else KINDS[spec.kind](spec)
