"""The members of a tar file, from its headers, the samples that they form, and the index of shards on disk."""

from __future__ import annotations

import hashlib
import json
import os
import re
import tarfile
import warnings
import zipfile
from codecs import BOM_UTF8
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from tokenize import TokenError
from typing import Any, NamedTuple, final

import numpy as np

from gpuflow.arrays import Array, Ints
from gpuflow.errors import SourceError
from gpuflow.runtime.files import atomic_write, cache_folder
from gpuflow.sources.listing_text import parsed_json
from gpuflow.sources.storage import PathTable, PathTableBuilder, ReadAt, Shard, is_remote

_SCAN_FORMAT = 5
"""The version of what `samples_of` finds, and of the arrays that are cached of it."""

_BLOCK_BYTES = 512
_PAX_TYPES = (tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE)
_DIGITS = re.compile(r"[0-9]{1,19}")
_SEARCHED_BYTES = 1 << 20
"""Bytes that are read at a time where zeros are expected."""


class Member(NamedTuple):
    """A file in a tar, and the place of its bytes.

    link: the path to which it is a symbolic link, or a hard link where no file before it in the tar has that path; it
        then has no bytes.
    """

    name: str
    start: int
    size: int
    link: str = ""


def key_of(name: str) -> tuple[str, str]:
    """Return the key that a sample's members share, which is the path up to the first dot of the file's name, and a
    member's suffix; an empty key or suffix for a member of no sample.

    Examples:
        >>> key_of("train/0001.mask.PNG")
        ('train/0001', 'mask.png')
    """
    directory, slash, file = name.rpartition("/")
    stem, _, suffix = file.partition(".")
    return directory + slash + stem if stem else "", suffix.lower()


class Sample(NamedTuple):
    """An image and, by suffix, the other members of its key: all that were asked for, and the contents of some."""

    image: Member
    members: Mapping[str, Member]
    contents: Mapping[str, bytes]


def samples_of(
    shard: Shard,
    read_at: ReadAt,
    *,
    images: Collection[str],
    contents: Collection[str],
    others: Collection[str] = (),
    required: Collection[str] = (),
) -> list[Sample]:
    """Scan a shard for its samples, in the order of their images.

    Args:
        images: the suffixes of images.
        contents: the suffixes of members whose contents are read.
        others: those of members whose places alone are wanted.
        required: contents that every sample has.

    Raises SourceError for two members of one key and suffix, two images of one key, a member without an image, a link
    (`Member.link`), and an image whose name has dots before its extension if its key has no image.
    """
    found: dict[str, Member] = {}
    dotted: dict[str, Member] = {}
    members: dict[str, dict[str, Member]] = {}
    texts: dict[str, dict[str, bytes]] = {}
    for member in members_of(shard, read_at):
        key, suffix = key_of(member.name)
        is_asked_for = suffix in contents or suffix in others
        if not key or not (is_asked_for or suffix in images):
            if key and suffix.rpartition(".")[2] in images:
                dotted.setdefault(key, member)
            continue
        if member.link:
            raise SourceError(
                f"{shard.path}/{member.name}: member must be a file, or a hard link to one before it in the shard, got "
                f"a link to {member.link!r}; make the shard with tar --dereference"
            )
        held, name = (members.setdefault(key, {}), suffix) if is_asked_for else (found, key)
        if name in held:
            raise SourceError(
                f"{shard.path}/{member.name}: key must be unique in its shard, but {held[name].name} has the same; "
                "rename or remove one"
            )
        held[name] = member
        if suffix in contents:  # now, because a server's shard is read from its start to its end
            texts.setdefault(key, {})[suffix] = read_at(member.start, member.size)
    for key, member in dotted.items():
        if key not in found:
            raise SourceError(
                f"{shard.path}/{member.name}: name must have one dot, that of its extension: a key ends at the first "
                f"dot, and {key!r} has no image; rename it and what belongs to it"
            )
    for key in [key for key in members if key not in found]:
        for suffix, member in members[key].items():
            here = f"{shard.path}/{member.name}"
            may_be_alone = suffix == "json" and suffix in contents and suffix not in required
            if may_be_alone and label_in(json_of(texts[key][suffix], here)) is None:
                continue  # it may be about the shard as a whole
            raise SourceError(f"{here}: member must have an image ({', '.join(images)}), got none; add or remove it")
    return [Sample(image, members.get(key, {}), texts.get(key, {})) for key, image in found.items()]


def no_label(image: str, key: str) -> SourceError:
    """Return the error for an image at this place without a label."""
    return SourceError(
        f'{image}: image must have a label, got none; add {key}.cls, or {key}.json with the key "label" or "cls"'
    )


def text_of(content: bytes, here: str) -> str:
    """Decode the text of a member at this place. Raises SourceError."""
    try:
        return content.removeprefix(BOM_UTF8).decode()
    except UnicodeDecodeError as fault:
        raise SourceError(f"{here}: must be UTF-8 text, got {content[:20]!r}; correct it") from fault


def json_of(content: bytes, here: str) -> Any:
    """Parse a JSON member at this place. Raises SourceError."""
    try:
        return parsed_json(content)
    except ValueError as fault:
        raise SourceError(f"{here}: must be valid JSON, got an error: {fault}; correct it") from fault


def label_in(value: Any) -> Any:
    """Return the label in the value of a JSON member; None if it has none."""
    if not isinstance(value, dict):
        return None
    label = value.get("label")
    return value.get("cls") if label is None else label


def members_of(shard: Shard, read_at: ReadAt) -> Iterator[Member]:
    """Yield the files of a tar from its headers: ustar, GNU long names and pax.

    A hard link to a file before it, as `tar` writes files that share their content, has the place of that file.
    """
    offset = 0
    files: dict[str, Member] = {}
    renamed: dict[str, str] = {}
    everywhere: dict[str, str] = {}
    while block := read_at(offset, _BLOCK_BYTES):
        header = _header(block, shard, offset)
        if header is None:
            _require_end(shard, read_at, offset)
            return
        attributes = everywhere | renamed
        size = _size(header, attributes, shard, offset)
        start = offset + _BLOCK_BYTES
        has_data = header.isreg() or header.type not in tarfile.SUPPORTED_TYPES or header.type in _EXTRA_TYPES
        offset = start + (-(-size // _BLOCK_BYTES) * _BLOCK_BYTES if has_data else 0)
        if has_data and start + size > shard.size:
            raise _truncated(shard, start + size)
        if header.type == tarfile.GNUTYPE_LONGNAME:
            renamed["path"] = _text(read_at(start, size).partition(b"\0")[0])
        elif header.type in _PAX_TYPES:
            renamed |= _pax(read_at(start, size), shard, start)
        elif header.type == tarfile.XGLTYPE:
            everywhere |= _pax(read_at(start, size), shard, start)
        elif header.type == tarfile.GNUTYPE_LONGLINK:
            renamed["linkpath"] = _text(read_at(start, size).partition(b"\0")[0])
        else:
            name = attributes.get("path", header.name)
            target = attributes.get("linkpath", header.linkname)
            renamed = {}
            if header.type == tarfile.GNUTYPE_SPARSE or any(key.startswith("GNU.sparse") for key in attributes):
                raise SourceError(f"{shard.path}/{name}: member must not be sparse; make the shard without --sparse")
            if header.isreg():
                files[name] = member = Member(name, start, size)
                yield member
            elif header.islnk() and target in files:
                files[name] = member = files[target]._replace(name=name)
                yield member
            elif header.islnk() or header.issym():
                yield Member(name, start, 0, target)
    if not offset:
        raise SourceError(f"{shard.path}: must be an uncompressed tar, got an empty file; replace it")
    warnings.warn(
        f"{shard.path}: ends without the zeros that end a tar; if it was cut off, samples are missing: make it again",
        stacklevel=2,
    )


def _header(block: bytes, shard: Shard, offset: int) -> tarfile.TarInfo | None:
    """Parse the header of the member that begins at `offset`; None for zeros, which end a tar."""
    try:
        return tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
    except tarfile.HeaderError as fault:
        if block.count(0) == _BLOCK_BYTES and (offset or shard.size % _BLOCK_BYTES == 0):
            return None
        if not offset:
            raise SourceError(
                f"{shard.path}: must be an uncompressed tar, got a file that starts with {block[:8]!r}; "
                f"unpack or replace it"
            ) from fault
        if len(block) < _BLOCK_BYTES:
            raise _truncated(shard, offset + _BLOCK_BYTES) from fault
        raise _damaged(shard, offset, f"got: {fault}") from fault


def _size(header: tarfile.TarInfo, attributes: Mapping[str, str], shard: Shard, offset: int) -> int:
    """Return the size of a member. An extended header, if there is one, overrides its header."""
    size = header.size
    extended = attributes.get("size")
    if header.isreg() and extended is not None:
        size = int(extended) if _DIGITS.fullmatch(extended) else -1
    if size < 0:
        raise _damaged(shard, offset, f"got a size of {size if extended is None else extended}")
    return size


def _require_end(shard: Shard, read_at: ReadAt, offset: int) -> None:
    """Raise SourceError if another tar begins after the end of the first one, as in files that `cat` joined."""
    while offset < shard.size and (data := read_at(offset, _SEARCHED_BYTES)):
        zeros = len(data) - len(data.lstrip(b"\0"))
        if zeros < len(data):
            begin = offset + zeros - (offset + zeros) % _BLOCK_BYTES
            try:
                tarfile.TarInfo.frombuf(read_at(begin, _BLOCK_BYTES), "utf-8", "surrogateescape")
            except tarfile.HeaderError:
                return
            raise SourceError(
                f"{shard.path}: must be one tar, but another one begins at byte {begin}; join tars with "
                "tar --concatenate, or list them in source.tar"
            )
        offset += len(data)


_EXTRA_TYPES = (*_PAX_TYPES, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK)


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")


def _pax(data: bytes, shard: Shard, start: int) -> dict[str, str]:
    """Parse the records of an extended header, each `length key=value` and a line end."""
    records = {}
    while data:
        length = data.partition(b" ")[0]
        if not length.isdigit() or not len(length) < int(length) <= len(data):
            raise SourceError(f"{shard.path}: extended header at byte {start} must be valid; the shard is damaged")
        key, _, value = data[len(length) + 1 : int(length) - 1].partition(b"=")
        records[_text(key)] = _text(value)
        data = data[int(length) :]
    return records


def _damaged(shard: Shard, offset: int, got: str) -> SourceError:
    return SourceError(
        f"{shard.path}: member header at byte {offset} must be valid, {got}; the shard is damaged, make it again"
    )


def _truncated(shard: Shard, needed: int) -> SourceError:
    return SourceError(
        f"{shard.path}: must be complete, but its last member ends at byte {needed} of {shard.size}; copy it again"
    )


# --- arrays of members, and their cache -------------------------------------------------------------------------------


@final
class MemberTable:
    """Collects the names and places of members, shard by shard."""

    def __init__(self) -> None:
        self._names = PathTableBuilder()
        self._places = [np.zeros((0, 2), np.int64)]

    def add(self, members: Sequence[Member]) -> None:
        """Append the members of the next shard."""
        self._names.add([member.name for member in members])
        self._places.append(np.array([(member.start, member.size) for member in members], np.int64).reshape(-1, 2))

    def arrays(self, prefix: str = "") -> dict[str, Array]:
        """Return the table as arrays, whose names begin with `prefix`; `Places.of` reads them."""
        names = self._names.build()
        places = np.concatenate(self._places)
        return {
            f"{prefix}names": np.frombuffer(names.blob, np.uint8),
            f"{prefix}name_starts": names.starts,
            f"{prefix}starts": places[:, 0].copy(),
            f"{prefix}sizes": places[:, 1].copy(),
        }


class Places(NamedTuple):
    """The names of members, and where each begins in its shard and how long it is, in bytes."""

    names: PathTable
    starts: Ints
    sizes: Ints

    @classmethod
    def of(cls, arrays: Mapping[str, Array], prefix: str = "") -> Places:
        """Return what `MemberTable.arrays` gave."""
        names = PathTable(arrays[f"{prefix}names"].tobytes(), arrays[f"{prefix}name_starts"])
        return cls(names, arrays[f"{prefix}starts"], arrays[f"{prefix}sizes"])


def cached_arrays(
    name: str, shards: Sequence[Shard], asked: Sequence[Any], names: Set[str], make: Callable[[], dict[str, Array]]
) -> dict[str, Array]:
    """Load the arrays of shards from the user's cache folder; where it lacks them, make and store them.

    The cache is for these very shards: another size or time of a shard is another file. A file that was copied, moved
    or given other rights counts as another one, too. If a server does not say when a shard was changed, nothing is
    stored: otherwise the index of an older shard would be taken for its own.

    Args:
        name: begins the name of the file.
        asked: what was asked of the shards, as values of JSON.
        names: those of the arrays.
        make: makes the arrays.
    """
    path = None
    if all(shard.stamp for shard in shards):
        files = [(s.path if is_remote(s.path) else os.path.abspath(s.path), s.size, s.stamp, s.made) for s in shards]
        text = json.dumps([_SCAN_FORMAT, files, *asked])
        path = str(cache_folder() / f"{name}-{hashlib.blake2b(text.encode(), digest_size=16).hexdigest()}.npz")
    arrays = load_arrays(path)
    if arrays is None or set(arrays) != names:
        arrays = make()
        save_arrays(path, arrays)
    return arrays


DAMAGED_ARRAY = (ValueError, TypeError, EOFError, SyntaxError, TokenError)
"""What numpy raises for a damaged .npy file: it parses its header as Python."""


def load_arrays(path: str | None) -> dict[str, Array] | None:
    """Load cached arrays; None if there are none, or if they are damaged."""
    if path is None:
        return None
    try:
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as arrays:
            return dict(arrays)
    except (OSError, KeyError, RuntimeError, zipfile.BadZipFile, *DAMAGED_ARRAY):
        return None


def save_arrays(path: str | None, arrays: Mapping[str, Array]) -> None:
    """Write the cache. If that fails, or without a path, the next run indexes the shards again."""
    if path is None:
        return
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with atomic_write(path) as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]
    except OSError:
        return
