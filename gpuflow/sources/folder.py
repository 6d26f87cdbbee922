"""The folder source: one directory per class, with the order and the labels of torchvision's ImageFolder."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np

from gpuflow.errors import SourceError
from gpuflow.sources.base import SourceSpec
from gpuflow.sources.files import FileSource
from gpuflow.sources.hints import missing_path
from gpuflow.sources.paths import PathTableBuilder
from gpuflow.sources.storage import LocalStorage, RemoteStorage, Storage, is_remote

__all__ = ["EXTENSIONS", "open_folder"]

EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
"""The extensions of ImageFolder, in its order; upper and lower case are equal."""

_OTHER_KINDS = {".csv": "listing", ".jsonl": "listing", ".ndjson": "listing", ".json": "listing", ".tar": "tar"}


def open_folder(spec: SourceSpec) -> FileSource:
    """Index `spec.folder`, ordered by class, then by directory, then by file name."""
    assert spec.folder is not None
    storage: Storage
    if is_remote(spec.folder):
        root = spec.folder.rstrip("/")
        storage = remote = RemoteStorage(root)
        tree = _remote_tree(remote, root)
    else:
        root = os.path.expanduser(spec.folder)
        storage = LocalStorage()
        tree = _local_tree(root)
    table, classes, counts = PathTableBuilder(), [], []
    for name, images in tree:
        table.add(images)
        classes.append(name)
        counts.append(len(images))
    empty = [name for name, count in zip(classes, counts, strict=True) if not count]
    if empty:
        others = f" (nor do {len(empty) - 1} more classes)" if len(empty) > 1 else ""
        raise SourceError(
            f"{root}/{empty[0]}: a class directory must hold an image ({', '.join(EXTENSIONS)}), got none{others}; "
            f"add images or remove the directory"
        )
    labels = np.repeat(np.arange(len(classes), dtype=np.int64), counts)
    return FileSource(storage, table.build(os.path.join(root, "")), labels, tuple(classes))


def _local_tree(root: str) -> Iterator[tuple[str, list[str]]]:
    """Yield each class and its images, as paths relative to the root."""
    try:
        with os.scandir(root) as entries:
            known = [(entry.name, entry.is_dir()) for entry in entries]
    except FileNotFoundError as fault:
        raise SourceError(
            f"source.folder must be a directory, got {root!r}, which does not exist{missing_path(root)}"
        ) from fault
    except NotADirectoryError as fault:
        kind = _OTHER_KINDS.get(os.path.splitext(root)[1].lower())
        action = f"did you mean source.{kind}?" if kind else "name the directory that holds one directory per class"
        raise SourceError(f"source.folder must be a directory, got {root!r}, which is a file; {action}") from fault
    except PermissionError as fault:
        raise SourceError(f"source.folder must be readable, got {root!r}: permission denied") from fault
    classes = sorted(name for name, is_directory in known if is_directory)
    if not classes:
        raise SourceError(
            f"{root}: must hold one directory per class, got none ({len(known)} files); "
            f"move the images into class directories, or name them in a source.listing"
        )
    start = len(os.path.join(root, ""))
    for name in classes:
        images = []
        for directory, _, files in sorted(os.walk(os.path.join(root, name), followlinks=True)):
            below = directory[start:]
            images += [f"{below}/{file}" for file in sorted(files) if file.lower().endswith(EXTENSIONS)]
        yield name, images


def _remote_tree(storage: RemoteStorage, root: str) -> Iterator[tuple[str, list[str]]]:
    """Like `_local_tree`. A class is a directory that holds a file, because object stores have no other directories."""
    classes: dict[str, list[tuple[str, str]]] = {}
    found = storage.find(root)
    for path in found:
        directory, _, file = path.rpartition("/")
        if directory:
            images = classes.setdefault(directory.partition("/")[0], [])
            if file.lower().endswith(EXTENSIONS):
                images.append((directory, file))
    if not classes:
        raise SourceError(
            f"{root}: must hold one directory per class, got none ({len(found)} files); check the address"
        )
    for name in sorted(classes):
        yield name, [f"{directory}/{file}" for directory, file in sorted(classes[name])]
