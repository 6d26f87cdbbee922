"""Reads files from a local disk or from any file system that fsspec supports.

Both offer the same read operations. A read that fails temporarily is retried, all failed files of a call together: on
this machine up to three times, from a server as long as `time_limit` allows. A file that is missing or stays unreadable
becomes an error text in the payload and does not affect other files; a server that stays away raises ServerFault.
"""

from gpuflow.sources.storage.base import (
    SPARE_BYTES,
    Allocate,
    Paths,
    PathTable,
    PathTableBuilder,
    Payload,
    Range,
    ReadAt,
    Shard,
    Shards,
    Storage,
    is_over_http,
    is_remote,
    lay_out,
    parent_of,
)
from gpuflow.sources.storage.cached import CachedStorage, new_copies
from gpuflow.sources.storage.disk_cache import CacheSpec
from gpuflow.sources.storage.http import time_limit
from gpuflow.sources.storage.local import LocalStorage
from gpuflow.sources.storage.remote import RemoteStorage

__all__ = [
    "SPARE_BYTES",
    "Allocate",
    "CacheSpec",
    "CachedStorage",
    "LocalStorage",
    "PathTable",
    "PathTableBuilder",
    "Paths",
    "Payload",
    "Range",
    "ReadAt",
    "RemoteStorage",
    "Shard",
    "Shards",
    "Storage",
    "is_over_http",
    "is_remote",
    "lay_out",
    "new_copies",
    "open_remote",
    "open_storage",
    "parent_of",
    "time_limit",
]


def open_storage(path: str, cache: CacheSpec | None = None) -> Storage:
    """Open the file system that a path or URL lives on. cache: where files behind URLs are kept; local files are
    not."""
    return open_remote(path, cache) if is_remote(path) else LocalStorage()


def open_remote(url: str, cache: CacheSpec | None) -> RemoteStorage | CachedStorage:
    """Open the file system that a URL lives on."""
    storage = RemoteStorage(url)
    return storage if cache is None else CachedStorage(storage, cache)
