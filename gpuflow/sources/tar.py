"""The tar source: WebDataset-style shards whose members share a key, `0001.jpg` with `0001.cls` or `0001.json`.

A key is a member's path up to the first dot of its file name. The headers are walked once; where each image lies is
cached in the user's cache folder (`~/.cache/gpuflow`), and from then on a sample is one read at an offset.
"""

from __future__ import annotations

import functools
import json
import os
import random
import re
import tarfile
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import final

import numpy as np

from gpuflow.arrays import Array, Ints
from gpuflow.errors import Problem, SourceError, redacted
from gpuflow.pipeline.records import Field, LeftOut, Records
from gpuflow.sources.base import Extent
from gpuflow.sources.field_spec import FieldSpec
from gpuflow.sources.fingerprint import fingerprint, relative
from gpuflow.sources.hints import missing_path
from gpuflow.sources.keys import Cached, Named, WithExtensions, WithWindow
from gpuflow.sources.labels import Codes, resolve_labels
from gpuflow.sources.paths import PathTable, PathTableBuilder
from gpuflow.sources.payload import Allocate, Payload
from gpuflow.sources.record_table import NO_FIELDS, RecordTable
from gpuflow.sources.storage import CachedStorage, ReadAt, Shard, Storage, is_remote, open_storage
from gpuflow.sources.tar_fields import read_fields
from gpuflow.sources.tar_members import (
    SCAN_FORMAT,
    Member,
    Sample,
    cache_path,
    json_of,
    key_of,
    label_in,
    load_arrays,
    no_label,
    samples_of,
    save_arrays,
    text_of,
)

IMAGE_EXTENSIONS = ("jpg", "jpeg", "png", "webp", "bmp")

_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d+)\.\.(\d+)")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Index:
    """The places and labels of all samples, as arrays.

    images: the images' member names.
    starts, sizes: each image's offset and size in its shard, in bytes.
    codes: each sample's label, as an index into `values`.
    values: the distinct labels as written, in order of first occurrence.
    shard_sizes: number of samples in each shard.
    """

    images: PathTable
    starts: Ints
    sizes: Ints
    codes: Ints
    values: list[str]
    shard_sizes: Ints


@final
class TarSource:
    """The samples of one or more shards. `Tar` opens it."""

    def __init__(
        self,
        storage: Storage,
        shards: Sequence[Shard],
        index: _Index,
        classes: tuple[str, ...],
        labels: Array,
        *,
        has_labels: bool = True,
        table: RecordTable = NO_FIELDS,
    ) -> None:
        self.storage, self._shards, self._index = storage, tuple(shards), index
        self.has_labels, self._table = has_labels, table
        self._ends = np.cumsum(index.shard_sizes)
        self.classes, self.labels = classes, labels
        self.shard_sizes: tuple[int, ...] = tuple(index.shard_sizes.tolist())

    @cached_property
    def fingerprint(self) -> str:
        """See `gpuflow.sources.fingerprint`. Names and sizes of the images, names and lengths of the shards."""
        index, known = self._index, self._table.digest()
        return fingerprint(self.entries, self.labels, self.classes, index.sizes, index.shard_sizes, known=known)

    @property
    def entries(self) -> bytes:
        """See `gpuflow.sources.fingerprint.entries_of`."""
        shards = relative([shard.path for shard in self._shards])
        return b"".join([self._index.images.blob, *(os.fsencode(shard) + b"\0" for shard in shards)])

    def __len__(self) -> int:
        return len(self.labels)

    def path(self, index: int) -> str:
        shard = self._shards[int(np.searchsorted(self._ends, index, side="right"))]
        return redacted(f"{shard.path}/{self._index.images[index]}")

    def read(self, indices: Sequence[int], allocate: Allocate) -> Payload:
        places = np.asarray(indices, dtype=np.int64)
        shards = [self._shards[i] for i in np.searchsorted(self._ends, places, side="right").tolist()]
        starts, sizes = self._index.starts[places].tolist(), self._index.sizes[places].tolist()
        return self.storage.read_ranges(shards, starts, sizes, allocate)

    @property
    def fields(self) -> tuple[Field, ...]:
        return self._table.fields

    def records(self, indices: Sequence[int]) -> Records:
        return self._table.records(indices)

    @property
    def left_out(self) -> Mapping[int, LeftOut]:
        return self._table.left_out

    def without_records(self) -> TarSource:
        classes, labels, has_labels = self.classes, self.labels, self.has_labels
        return TarSource(
            self.storage, self._shards, self._index, classes, labels, has_labels=has_labels, table=NO_FIELDS
        )

    def close(self) -> None:
        self.storage.close()
        self._table.close()


@final
@dataclass(frozen=True, kw_only=True)
class Tar(WithExtensions, WithWindow, Cached, Named):
    """WebDataset-style shards.

    Args:
        tar: a path with brace ranges: `shards/{000..012}.tar`.
    """

    kind = "tar"

    tar: str

    def open(self) -> TarSource:
        return _open(self)

    def find_images(self, limit: int, deadline: float, chance: random.Random) -> list[Extent]:
        shards = expand_braces(os.path.expanduser(self.tar))
        return extents_in_shards(shards, self.extensions, limit, deadline, chance)

    def field_problems(self, field: FieldSpec) -> Iterator[Problem]:
        if field.type == "image" and field.column is not None:
            rule, action = "must not be given in a source.tar", "the image is the member with an image's suffix"
            yield Problem.of("column", rule, action=action, code="config.conflict")

    @property
    def image_suffixes(self) -> tuple[str, ...]:
        """Return the suffixes of the members that are images, without a dot."""
        return (*IMAGE_EXTENSIONS, *self.extensions)


def extents_in_shards(
    shards: Sequence[str], extensions: Sequence[str], limit: int, deadline: float, chance: random.Random
) -> list[Extent]:
    """Return where images of local shards lie, see `SourceSpec.find_images`. extensions: see `Tar`."""
    suffixes = tuple(f".{name}" for name in (*IMAGE_EXTENSIONS, *extensions))
    images: list[Extent] = []
    for path in chance.sample(shards, len(shards)):
        try:
            with tarfile.open(path, "r:") as shard:
                for member in shard:
                    if member.isreg() and member.name.lower().endswith(suffixes):
                        images.append(Extent(path, member.offset_data, member.size))
                    if len(images) == limit or time.monotonic() > deadline:
                        return images
        except tarfile.TarError as fault:
            raise SourceError(f"{path}: not a tar file ({fault}); check what it is") from fault
    return images


def _open(spec: Tar) -> TarSource:
    """Index `spec.tar`, or load the index from the cache. Samples have the order of shards, then of members."""
    pattern = spec.tar if is_remote(spec.tar) else os.path.expanduser(spec.tar)
    names = expand_braces(pattern)
    storage = open_storage(pattern, spec.cache)
    shards = _inspected(storage, names)
    if spec.declared:
        source = _with_fields(spec, storage, shards)
        _warn_of_small_cache(spec, storage, shards, len(source))
        return source
    extensions = spec.image_suffixes
    cache = cache_path("tar", shards, SCAN_FORMAT, *spec.extensions)
    index = _index_of(load_arrays(cache))
    if index is None:
        index = _build_index(storage, shards, extensions)
        save_arrays(cache, _arrays_of(index))
    if not len(index.codes):
        raise SourceError(
            f"{spec.tar}: must hold at least one image ({', '.join(extensions)}), got none; check what is in it"
        )
    ends = np.cumsum(index.shard_sizes)

    def locate(code: int) -> str:
        first = int(np.argmax(index.codes == code))
        return f"{shards[int(np.searchsorted(ends, first, side='right'))].path}/{index.images[first]}"

    classes, labels = resolve_labels(index.values, spec.classes, locate, spec.tar)
    _warn_of_small_cache(spec, storage, shards, len(labels))
    return TarSource(storage, shards, index, classes, labels[index.codes])


def _with_fields(spec: Tar, storage: Storage, shards: Sequence[Shard]) -> TarSource:
    """The shards with the fields that `spec` declares."""
    found = read_fields(spec, storage, shards, spec.image_suffixes)
    index = _Index(
        images=found.images,
        starts=found.starts,
        sizes=found.sizes,
        codes=np.zeros(0, np.int64),
        values=[],
        shard_sizes=found.shard_sizes,
    )
    return TarSource(
        storage, shards, index, found.classes, found.labels, has_labels=found.has_labels, table=found.table
    )


def expand_braces(pattern: str) -> list[str]:
    """Expand a pattern to paths: `{08..11}` counts with leading zeros, `{0..11}` without, `{a,b}` lists names; several
    braces combine."""
    parts = _BRACES.split(pattern)
    if any("{" in text or "}" in text for text in parts[::2]):
        raise SourceError(f"source.tar must have matching braces without nesting, got {pattern!r}; correct it")
    choices = [_choices(part, pattern) if i % 2 else [part] for i, part in enumerate(parts)]
    return ["".join(chosen) for chosen in product(*choices)]


def _choices(body: str, pattern: str) -> list[str]:
    span = _RANGE.fullmatch(body)
    if span is None:
        if "," not in body:
            raise SourceError(
                f"source.tar must have {{first..last}} or {{a,b}} in braces, got {{{body}}} in {pattern!r}; correct it"
            )
        return body.split(",")
    first, last = span[1], span[2]
    if int(first) > int(last):
        raise SourceError(f"source.tar must count upwards, got {{{body}}} in {pattern!r}; swap the ends")
    padded = any(end.startswith("0") and len(end) > 1 for end in (first, last))
    width = max(len(first), len(last)) if padded else 0
    return [f"{number:0{width}d}" for number in range(int(first), int(last) + 1)]


def _inspected(storage: Storage, names: Sequence[str]) -> list[Shard]:
    found = storage.inspect(names)
    shards = [shard for shard in found if isinstance(shard, Shard)]
    if len(shards) < len(names):
        bad = [(name, why) for name, why in zip(names, found, strict=True) if isinstance(why, str)]
        name, why = bad[0]
        count = f" ({len(bad)} of {len(names)} shards cannot be read)" if len(names) > 1 else ""
        hint = missing_path(name) if why == "no such file" and not is_remote(name) else "; check source.tar"
        raise SourceError(f"{name}: {why}{count}{hint}")
    return shards


def _warn_of_small_cache(spec: Tar, storage: Storage, shards: Sequence[Shard], samples: int) -> None:
    """Blocks serve several samples of a window. A cache that does not hold one downloads them for each sample."""
    cache = spec.cache
    if cache is None or not isinstance(storage, CachedStorage):
        return
    window = spec.shard_window()
    size = sum(shard.size for shard in shards) * min(window, samples) // samples
    if size > cache.size:
        warnings.warn(
            f"source.cache.size must hold the {window:,} samples of source.window ({size / 1e6:,.0f} MB), "
            f"got {cache.size / 1e6:,.0f} MB: shuffled batches will download blocks more than once; raise it, or lower "
            "source.window",
            stacklevel=2,
        )


def _build_index(storage: Storage, shards: Sequence[Shard], extensions: tuple[str, ...]) -> _Index:
    images, codes, values = PathTableBuilder(), [], Codes()
    starts: list[Ints] = []
    sizes: list[Ints] = []
    counts = []
    for labelled in storage.scan(shards, functools.partial(_labelled_images, extensions=extensions)):
        images.add([image.name for image, _ in labelled])
        starts.append(np.array([image.start for image, _ in labelled], dtype=np.int64))
        sizes.append(np.array([image.size for image, _ in labelled], dtype=np.int64))
        codes.append(np.array([values[label] for _, label in labelled], dtype=np.int64))
        counts.append(len(labelled))
    return _Index(
        images=images.build(),
        starts=np.concatenate(starts),
        sizes=np.concatenate(sizes),
        codes=np.concatenate(codes),
        values=[str(value) for value in values],
        shard_sizes=np.array(counts, dtype=np.int64),
    )


def _labelled_images(shard: Shard, read_at: ReadAt, extensions: tuple[str, ...]) -> list[tuple[Member, str]]:
    """The images of one shard and their labels as written."""
    samples = samples_of(shard, read_at, images=extensions, contents=("cls", "json"))
    return [(sample.image, _label(shard, sample)) for sample in samples]


def _label(shard: Shard, sample: Sample) -> str:
    """The label as written in a sample's .cls member, else in its .json member."""
    image, members, contents = sample
    here, label = f"{shard.path}/{image.name}", None
    if "cls" in members:
        here = f"{shard.path}/{members['cls'].name}"
        label = text_of(contents["cls"], here)
    elif "json" in members:
        here = f"{shard.path}/{members['json'].name}"
        label = label_in(json_of(contents["json"], here))
    if label is None:
        raise no_label(f"{shard.path}/{image.name}", key_of(image.name)[0])
    if type(label) not in (int, str):
        raise SourceError(f"{here}: label must be an integer or a class name, got {json.dumps(label)}; correct it")
    text = str(label).strip()
    if not text:
        raise SourceError(f"{here}: label must not be empty; give a class name or a number")
    return text


def _index_of(arrays: Mapping[str, Array] | None) -> _Index | None:
    """The cached index; None if there is none or it lacks something."""
    if arrays is None:
        return None
    try:
        return _Index(
            images=PathTable(arrays["images"].tobytes(), arrays["image_starts"]),
            starts=arrays["starts"],
            sizes=arrays["sizes"],
            codes=arrays["codes"],
            values=json.loads(arrays["values"].tobytes()),
            shard_sizes=arrays["shard_sizes"],
        )
    except (ValueError, KeyError):
        return None


def _arrays_of(index: _Index) -> dict[str, Array]:
    """What `_index_of` reads."""
    return {
        "images": np.frombuffer(index.images.blob, dtype=np.uint8),
        "image_starts": index.images.starts,
        "starts": index.starts,
        "sizes": index.sizes,
        "codes": index.codes,
        "values": np.frombuffer(json.dumps(index.values).encode(), dtype=np.uint8),
        "shard_sizes": index.shard_sizes,
    }
