"""Where bytes are: a local disk, or any file system that fsspec speaks.

Both offer the same few reads. A short-lived fault (a network file system that hiccups, a server that answers 503) is
tried again up to three times, all faulty files of a call together; what stays unreadable is an error text in the
payload and spoils no other file.
"""

from gpuflow.sources.storage.base import ReadAt, Shard, Storage, is_remote, parent_of
from gpuflow.sources.storage.local import LocalStorage
from gpuflow.sources.storage.remote import RemoteStorage

__all__ = ["LocalStorage", "ReadAt", "RemoteStorage", "Shard", "Storage", "is_remote", "open_storage", "parent_of"]


def open_storage(path: str) -> Storage:
    """The file system that a path or URL lives on."""
    return RemoteStorage(path) if is_remote(path) else LocalStorage()
