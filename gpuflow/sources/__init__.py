"""Sources: for each index the encoded bytes and the label of a sample, from local or remote files.

`open_source` indexes the files that a `SourceSpec` describes; `subset` selects one of its splits. Both return a
`Source`.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from gpuflow.sources.base import MixEntry, Source, SourceSpec, WeightsSpec, is_read_remotely
from gpuflow.sources.coco import open_coco
from gpuflow.sources.fingerprint import fingerprint_of
from gpuflow.sources.folder import open_folder
from gpuflow.sources.hf import HfSource, open_hf
from gpuflow.sources.listing import open_listing
from gpuflow.sources.mix import MixSource, open_mix
from gpuflow.sources.offered import offered_sources, open_offered
from gpuflow.sources.payload import SPARE_BYTES, Allocate, Payload, lay_out
from gpuflow.sources.record_source import (
    RecordSource,
    fields_of,
    has_labels,
    has_one_class,
    left_out_of,
    records_of,
    without_records,
)
from gpuflow.sources.split import Subset, subset
from gpuflow.sources.storage import CachedStorage
from gpuflow.sources.tar import open_tar
from gpuflow.sources.weights import check_weights_file, read_weights

__all__ = [
    "KINDS",
    "SPARE_BYTES",
    "Allocate",
    "HfSource",
    "MixEntry",
    "MixSource",
    "Payload",
    "RecordSource",
    "Source",
    "SourceSpec",
    "Subset",
    "WeightsSpec",
    "cache_counts",
    "check_weights_file",
    "fields_of",
    "fingerprint_of",
    "has_labels",
    "has_one_class",
    "is_read_remotely",
    "lay_out",
    "left_out_of",
    "offered_sources",
    "open_source",
    "records_of",
    "subset",
    "unwrapped",
    "weights_of",
    "window_of",
    "without_records",
]

KINDS: dict[str, Callable[[SourceSpec], Source]] = {
    "folder": open_folder,
    "listing": open_listing,
    "tar": open_tar,
    "coco": open_coco,
    "hf": open_hf,
    "mix": lambda spec: open_mix(spec, open_source),
}


def open_source(spec: SourceSpec) -> Source:
    """Index the whole source that `spec` describes, all splits together.

    Raises:
        SourceError: it cannot be indexed; the message says where and why.
        MissingExtra: the path is a URL and fsspec is not installed.
    """
    return open_offered(spec) if spec.other else KINDS[spec.kind](spec)


def unwrapped(source: Source) -> Source:
    """The source that a part is of; another source as it is."""
    return source.source if isinstance(source, Subset) else source


def cache_counts(source: Source) -> dict[str, int] | None:
    """What came from `source.cache` and from the server, see `CachedStorage.counts`; of a mix that of all its sources.

    None without a cache.
    """
    whole = unwrapped(source)
    storages = [part.storage for part in (whole.parts if isinstance(whole, MixSource) else [whole])]
    counts = [storage.counts() for storage in storages if isinstance(storage, CachedStorage)]
    return {name: sum(each[name] for each in counts) for name in counts[0]} if counts else None


def window_of(spec: SourceSpec, source: Source | None = None) -> int:
    """How many neighbouring samples of a source with shards are shuffled among each other."""
    own = unwrapped(source) if source is not None else None
    if spec.window is None and isinstance(own, HfSource) and own.window is not None:
        return own.window
    return spec.shard_window


def weights_of(spec: SourceSpec, source: Source) -> NDArray[np.float64] | None:
    """The weight of each sample of a source, or of a part of it; None where `spec` gives no weights.

    Raises:
        SourceError: a weight cannot be read, is negative or not finite, or all of the part are 0.
    """
    if isinstance(source, Subset):
        return read_weights(spec, source.source, open_source, source.indices)
    return read_weights(spec, source, open_source, np.arange(len(source)))
