"""Sources: for each index the encoded bytes and the label of a sample, from local or remote files.

`source_spec` makes the `SourceSpec` of a block `source`. `open_source` indexes the files that it describes; `subset`
selects one of its splits. Both return a `Source`.
"""

from __future__ import annotations

from typing import Any

from gpuflow.errors import ConfigError
from gpuflow.sources.base import (
    RecordSource,
    Source,
    fields_of,
    fingerprint_of,
    has_labels,
    has_one_class,
    is_read_remotely,
    left_out_of,
    records_of,
    without_records,
)
from gpuflow.sources.coco import Coco
from gpuflow.sources.folder import Folder
from gpuflow.sources.hf import Hf, HfSource
from gpuflow.sources.listing import Listing
from gpuflow.sources.mix import Mix, MixSource
from gpuflow.sources.spec import (
    BalanceSpec,
    Extent,
    NotMeasuredError,
    SourceSpec,
    WeightsSpec,
    offered_kinds,
    spec_class,
)
from gpuflow.sources.split import Division, Subset, divide, parts_csv, subset
from gpuflow.sources.split_spec import GroupSpec, SplitSpec
from gpuflow.sources.storage import SPARE_BYTES, Allocate, CachedStorage, Payload, lay_out
from gpuflow.sources.tar import Tar
from gpuflow.sources.weights import balanced_groups, check_weights_file, weights_of

__all__ = [
    "KINDS",
    "SPARE_BYTES",
    "Allocate",
    "BalanceSpec",
    "Division",
    "Extent",
    "Folder",
    "GroupSpec",
    "HfSource",
    "Mix",
    "MixSource",
    "NotMeasuredError",
    "Payload",
    "RecordSource",
    "Source",
    "SourceSpec",
    "SplitSpec",
    "Subset",
    "WeightsSpec",
    "all_kinds",
    "balanced_groups",
    "cache_counts",
    "check_weights_file",
    "divide",
    "fields_of",
    "fingerprint_of",
    "has_labels",
    "has_one_class",
    "is_read_remotely",
    "lay_out",
    "left_out_of",
    "open_source",
    "parts_csv",
    "records_of",
    "source_spec",
    "spec_class",
    "subset",
    "unwrapped",
    "weights_of",
    "without_records",
]

KINDS: dict[str, type[SourceSpec]] = {
    "folder": Folder,
    "listing": Listing,
    "tar": Tar,
    "coco": Coco,
    "hf": Hf,
    "mix": Mix,
}


def all_kinds() -> dict[str, type[SourceSpec]]:
    """Return the spec classes of all kinds of sources, by the keys that say where samples are: of gpuflow and of the
    packages that are installed.

    Raises GpuflowError: a package offers a key that is known already.
    """
    return KINDS | offered_kinds({key for spec in KINDS.values() for key in spec.key_fields()})


def source_spec(**keys: Any) -> SourceSpec:
    """Return the spec of a source with these keys of the block `source`; None stands for a key that is not given.

    Raises ConfigError with all problems.

    Examples:
        >>> source_spec(tar="shards/{000..012}.tar", window=1000).kind
        'tar'
        >>> source_spec(tar="shards/{000..012}.tar", windw=1000)
        Traceback (most recent call last):
            ...
        gpuflow.errors.ConfigError: source.windw is not a key here; did you mean 'window'?
    """
    spec, problems = spec_class(keys, all_kinds())
    if spec is None or problems:
        raise ConfigError([problem.below("source") for problem in problems])
    given = {key: value for key, value in keys.items() if value is not None}
    return spec.of(given, lambda block: block if isinstance(block, SourceSpec) else source_spec(**block))


def open_source(spec: SourceSpec) -> Source:
    """Index the whole source that `spec` describes, see `SourceSpec.open`.

    Examples:
        >>> from pathlib import Path
        >>> Path("list.csv").write_text("1.jpg,cat\\n2.jpg,dog\\n3.jpg,cat\\n")
        30
        >>> source = open_source(source_spec(listing="list.csv"))
        >>> source.classes, source.labels.tolist(), source.path(1)
        (('cat', 'dog'), [0, 1, 0], '2.jpg')
    """
    return spec.open()


def unwrapped(source: Source) -> Source:
    """Return the source that a part belongs to; another source as it is."""
    return source.source if isinstance(source, Subset) else source


def cache_counts(source: Source) -> dict[str, int] | None:
    """Count what came from `source.cache` and from the server, see `CachedStorage.counts`; of a mix that of all its
    sources.

    None without a cache.
    """
    whole = unwrapped(source)
    storages = [part.storage for part in (whole.parts if isinstance(whole, MixSource) else [whole])]
    counts = [storage.counts() for storage in storages if isinstance(storage, CachedStorage)]
    return {name: sum(each[name] for each in counts) for name in counts[0]} if counts else None
