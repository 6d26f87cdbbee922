"""The folder source: one directory per class, with the order and the labels of torchvision's ImageFolder.

Unlike there, names that begin with a dot are left out: `.ipynb_checkpoints` is no class, and `._1.jpg` no image. With
`splits` each of these is a directory that holds the classes' directories; the first one says which classes there are.
Where `fields` declare no label, images may lie at any depth.
"""

from __future__ import annotations

import os
import random
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import ClassVar, final

import numpy as np

from gpuflow.errors import Problem, SourceError, near_word
from gpuflow.sources.field_spec import IMAGES_ALONE, FieldSpec, conflict
from gpuflow.sources.record_table import TableSource, WholeFiles
from gpuflow.sources.spec import Cached, Extent, Samples, WithExtensions, WithSplits
from gpuflow.sources.storage import (
    CachedStorage,
    LocalStorage,
    PathTableBuilder,
    RemoteStorage,
    Storage,
    is_remote,
    open_remote,
)
from gpuflow.sources.storage.local import ancestors, cannot_be_listed, identity_of, is_directory, missing_path, walk
from gpuflow.sources.tar import extents_in_shards

EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
"""The extensions of ImageFolder, in its order; upper and lower case are equal."""


def images_below(directory: Path) -> list[Path]:
    """Find all images below a directory, found by suffix and sorted. Empty if there is no such
    directory.

    Examples:
        >>> Path("photos/cat").mkdir(parents=True)
        >>> Path("photos/cat/1.JPG").touch()
        >>> images_below(Path("photos"))
        [PosixPath('photos/cat/1.JPG')]
    """
    return sorted(path for path in directory.rglob("*") if path.suffix.lower() in EXTENSIONS and path.is_file())


_OTHER_KINDS = {
    ".csv": "listing",
    ".jsonl": "listing",
    ".ndjson": "listing",
    ".json": "listing",
    ".tar": "tar",
    ".parquet": "hf",
    ".arrow": "hf",
}

_PARTS = frozenset(("train", "training", "val", "valid", "validation", "dev", "test", "testing"))
"""Usual names of directories that hold the parts of a source, each with directories of the classes."""
_NAMED = 6
"""The most empty class directories that an error names."""


@final
@dataclass(frozen=True, kw_only=True)
class Folder(WithExtensions, WithSplits, Cached, Samples):
    """A directory with one directory for each class.

    Args:
        folder: a directory with one directory for each class.
    """

    kind = "folder"
    instead: ClassVar[Mapping[str, str]] = {"classes": "its directories name the classes"}
    by_class = True
    has_columns = False

    folder: str

    def open(self) -> TableSource:
        """Index the folder, ordered by class, then by directory, then by file name."""
        storage: Storage
        tree_of: Callable[[str, tuple[str, ...], bool], Iterator[tuple[str, list[str]]]]
        extensions = self.image_extensions
        labelled = not self.declared or any(field.type == "label" for _, field in self.declared)
        if is_remote(self.folder):
            root = self.folder.rstrip("/")
            storage = remote = open_remote(root, self.cache)
            tree_of = partial(_remote_tree, remote)
        else:
            root = os.path.expanduser(self.folder)
            storage = LocalStorage()
            tree_of = _local_tree
        table = PathTableBuilder()
        codes = list[int]()
        counts = list[int]()
        classes = dict[str, int]()
        splits = dict[str, tuple[int, int]]()
        for split in self.splits or ("",):
            first = sum(counts)
            below = f"{split}/" if split else ""
            empty = list[str]()
            for name, images in tree_of(os.path.join(root, split) if split else root, extensions, labelled):
                if labelled and splits and name not in classes:
                    raise SourceError(
                        f"{root}/{split}/{name}: must be a class of the first split, {self.splits[0]}"
                        f"{near_word(name, classes)}; rename the directory, or name the split that has all classes "
                        "first"
                    )
                table.add([below + image for image in images])
                codes.append(classes.setdefault(name, len(classes)))
                counts.append(len(images))
                if labelled and not images:
                    empty.append(below + name)
            if empty:
                raise _without_images(root, empty, extensions)
            if sum(counts) == first:
                place = os.path.join(root, split).rstrip("/")
                raise SourceError(f"{place}: must hold an image ({', '.join(extensions)}), got none; check the path")
            if split:
                splits[split] = first, sum(counts)
        if labelled and not self.splits:
            _warn_of_parts(root, classes)
        labels = np.repeat(np.array(codes, np.int64) * labelled, counts)
        files = WholeFiles(storage, table.build(os.path.join(root, "")))
        return TableSource(files, labels, tuple(classes) if labelled else (), has_labels=labelled, splits=splits)

    def find_images(self, limit: int, deadline: float, chance: random.Random) -> list[Extent]:
        """See the base. The folder may also be flat, or hold tar shards."""
        waiting = [os.path.expanduser(self.folder)]
        shards = list[str]()
        images: list[Extent] = []
        while waiting and len(images) < limit and time.monotonic() < deadline:
            with os.scandir(waiting.pop(chance.randrange(len(waiting)))) as entries:
                for entry in islice(entries, limit):
                    if entry.is_dir():
                        waiting.append(entry.path)
                    elif entry.name.lower().endswith(self.image_extensions):
                        images.append(Extent(entry.path))
                    elif entry.name.endswith(".tar"):
                        shards.append(entry.path)
        return images or extents_in_shards(shards, self.extensions, limit, deadline, chance)

    def field_problems(self, field: FieldSpec) -> Iterator[Problem]:
        given = field.given
        if field.type not in ("image", "label"):
            yield conflict(
                (),
                f"must be an image or a label in a source.folder, got {field.type}",
                "name the files in a source.listing, which has columns for other fields",
            )
        elif given and (field.type, given, field.kind) != ("label", ["kind"], "class"):
            yield conflict((), "has no keys in a source.folder", f"remove {', '.join(given)}, or use a source.listing")

    @property
    def image_extensions(self) -> tuple[str, ...]:
        """Return how the names of the images end, each with its dot."""
        return (*EXTENSIONS, *(f".{name}" for name in self.extensions))


def _without_images(root: str, empty: Sequence[str], extensions: Sequence[str]) -> SourceError:
    """Return the error for class directories without an image, of which there is at least one."""
    others = f"; nor do {', '.join(empty[1:_NAMED])}" if len(empty) > 1 else ""
    others += f" and {len(empty) - _NAMED} more" if len(empty) > _NAMED else ""
    return SourceError(
        f"{root}/{empty[0]}: a class directory must hold an image ({', '.join(extensions)}), got none{others}; "
        f"add images or remove the directory"
    )


def _warn_of_parts(root: str, classes: Collection[str]) -> None:
    """Warn if all classes have names that directories of parts usually have."""
    if len(classes) > 1 and _PARTS.issuperset(map(str.lower, classes)):
        names = ", ".join(classes)
        warnings.warn(
            f"source.folder {root} has the classes {names}, which are usually parts of a source; if they are, write "
            f"splits: [{names}]",
            stacklevel=3,
        )


def _local_tree(root: str, extensions: tuple[str, ...], labelled: bool) -> Iterator[tuple[str, list[str]]]:
    """Yield each class and its images, as paths relative to the root; without labels first the images in the root."""
    try:
        with os.scandir(root) as entries:
            visible = [entry for entry in entries if not entry.name.startswith(".")]
            known = [(entry.name, is_directory(entry, extensions)) for entry in visible]
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
    except OSError as fault:
        raise cannot_be_listed(root, fault) from fault
    above = ancestors(root)
    classes = sorted(
        name for name, is_class in known if is_class and identity_of(os.path.join(root, name)) not in above
    )
    if not labelled:
        yield "", sorted(name for name, is_class in known if not is_class and name.lower().endswith(extensions))
    elif not classes:
        raise SourceError(
            f"{root}: must hold one directory per class, got none ({len(known)} files); move the images into class "
            f"directories, name them in a source.listing, or {IMAGES_ALONE}"
        )
    start = len(os.path.join(root, ""))
    for name in classes:
        images = []
        for directory, files in sorted(walk(os.path.join(root, name), above, extensions)):
            below = directory[start:]
            images += [f"{below}/{file}" for file in sorted(files) if file.lower().endswith(extensions)]
        yield name, images


def _remote_tree(
    storage: RemoteStorage | CachedStorage, root: str, extensions: tuple[str, ...], labelled: bool
) -> Iterator[tuple[str, list[str]]]:
    """Yield what `_local_tree` yields. A class is a directory that holds a file: object stores have no other ones."""
    classes: dict[str, list[tuple[str, str, str]]] = {}
    found = storage.find(root)
    for name, path, *_ in found:
        directory, _, file = name.rpartition("/")
        if (directory or not labelled) and not any(part.startswith(".") for part in name.split("/")):
            images = classes.setdefault(directory.partition("/")[0], [])
            if file.lower().endswith(extensions):
                images.append((directory, file, path))
    if labelled and not classes:
        raise SourceError(
            f"{root}: must hold one directory per class, got none ({len(found)} files); check the address"
            f"{f', or {IMAGES_ALONE}' * bool(found)}"
        )
    for name in sorted(classes):
        yield name, [path for *_, path in sorted(classes[name])]
