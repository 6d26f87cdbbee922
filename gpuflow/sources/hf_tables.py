"""Arrow and Parquet files: their schemas, the values of small columns, and the places of the cells with images.

An Arrow file of `datasets` is not compressed, so each cell is a range of bytes of the file, and is read as one. In a
Parquet file cells are compressed together in row groups, of which a process keeps the ones it read last, decoded.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, NamedTuple, Protocol, final

import numpy as np

from gpuflow.arrays import Bools, Bytes, Ints
from gpuflow.errors import MissingExtra, SourceError, is_system_fault, reason_of, system_fault
from gpuflow.sources.base import names_of
from gpuflow.sources.listing_text import parsed_json
from gpuflow.sources.storage import Allocate, LocalStorage, Payload, Range, Shard, Shards, Storage
from gpuflow.sources.storage.local import retry

_NO_CELL = "has no image: its cell is null, or a path without the image"
_END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"
_LARGEST_GROUP = 1 << 30
_WINDOW_BYTES = 256_000_000
_LONGEST_WINDOW = 8192


def pyarrow() -> Any:
    """Import pyarrow. Raises MissingExtra where it is not installed."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise MissingExtra("source.hf", "pyarrow", "hf") from error
    return pyarrow


def place_of(rows: Shards, index: int) -> str:
    """Return the place of a row, for messages."""
    file, row = rows.place(index)
    return f"{file.path}[{row}]"


# --- tables -----------------------------------------------------------------------------------------------------------


class Table(Protocol):
    """What is known of one file, which is not kept open. form: `Arrow` or `Parquet`."""

    form: str
    shard: Shard
    schema: Any
    rows: int

    def batches(self, columns: Sequence[str]) -> Iterator[Any]:
        """Yield the record batches of all rows, with these columns alone. Raises SourceError if the file has
        changed."""


def open_table(storage: Storage, path: str) -> Table:
    """Open a file of either format: Arrow if its name says so, else Parquet. Raises SourceError."""
    pa = pyarrow()
    [shard] = storage.inspect([path])
    if isinstance(shard, str):
        raise SourceError(f"{path}: {shard}; check source.hf")
    kind = _ArrowTable if path.lower().endswith(".arrow") else _ParquetTable
    try:
        return kind(shard)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:  # that of a column's name
        raise broken(path, kind.form, error) from error


def broken(path: str, form: str, error: BaseException) -> BaseException:
    """Return the error for a file that is damaged or cut short; a fault of the environment as it is raised."""
    if is_system_fault(error):
        return system_fault(error, path)
    reason = reason_of(error).rstrip(".")
    return SourceError(f"{path}: must be a whole {form} file, got an error: {reason}; copy or write it again")


@final
class _ArrowTable:
    form = "Arrow"

    def __init__(self, shard: Shard) -> None:
        pa = pyarrow()
        self.shard = shard
        self.mapped = pa.memory_map(shard.path).read_buffer()
        if bytes(self.mapped[:6]) == b"ARROW1":
            raise pa.ArrowInvalid("it has Arrow's file format, and not the stream format that datasets writes")
        if bytes(self.mapped[-8:]) != _END_OF_STREAM:
            raise pa.ArrowInvalid("it has no end, so a part of it is missing")
        self.schema = pa.ipc.open_stream(self.mapped).schema
        self.rows = sum(batch.num_rows for batch in self.batches([]))

    def batches(self, columns: Sequence[str]) -> Iterator[Any]:
        pa = pyarrow()
        file = pa.BufferReader(self.mapped)
        for batch in pa.ipc.open_stream(file):
            _check_buffers(batch)
            yield _checked(batch.select(list(columns)) if columns else batch, bool(columns))
        if file.tell() != self.mapped.size:
            raise pa.ArrowInvalid("it has an end before its last bytes")


@final
class _ParquetTable:
    form = "Parquet"

    def __init__(self, shard: Shard) -> None:
        self.shard = shard
        with _parquet_file(shard, LocalStorage()) as file:
            self.schema = file.schema_arrow
            self.metadata = file.metadata
        self.rows = self.metadata.num_rows
        if self.rows != sum(self.metadata.row_group(group).num_rows for group in range(self.metadata.num_row_groups)):
            raise pyarrow().ArrowInvalid(f"its row groups have not the file's {self.rows:,} rows together")

    def batches(self, columns: Sequence[str]) -> Iterator[Any]:
        with _parquet_file(self.shard, LocalStorage(), self.metadata) as file:
            for group in range(file.num_row_groups):
                yield from _row_group(file, group, columns).to_batches()


def _checked(batch: Any, full: bool = True) -> Any:
    """Return a record batch, or a table, whose offsets, lengths and texts are sound. Raises ArrowInvalid for others.

    Arrow itself takes them as they are in the file: a damaged one changes other samples, or ends the process.

    full: check them all; else only that the columns have as many rows as the batch.
    """
    batch.validate(full=full)
    return batch


def _check_buffers(batch: Any) -> None:
    """Raise ArrowInvalid if two buffers of a record batch overlap, as they do if the place of one is damaged."""
    buffers = [buffer for column in batch.columns for buffer in column.buffers() if buffer is not None and buffer.size]
    spans = sorted((buffer.address, buffer.address + buffer.size) for buffer in buffers)
    if any(end > start for (_, end), (start, _) in pairwise(spans)):
        raise pyarrow().ArrowInvalid("two of its columns lie in the same bytes")


def _row_group(file: Any, group: int, columns: Sequence[str]) -> Any:
    """Return columns of a row group as a table, which agrees with what the file says of it. Raises ArrowInvalid."""
    table = _checked(file.read_row_group(group, columns=list(columns), use_threads=False))
    if table.num_rows != (rows := file.metadata.row_group(group).num_rows):
        raise pyarrow().ArrowInvalid(f"row group {group} has {table.num_rows} of {rows} rows")
    return table


@contextmanager
def _parquet_file(shard: Shard, local: LocalStorage, metadata: Any = None) -> Iterator[Any]:
    """Open a Parquet file. Raises SourceError at the end if it has changed since it was found."""
    try:
        place = local.place(shard.path)
        with pyarrow().parquet.ParquetFile(place, metadata=metadata, page_checksum_verification=True) as file:
            yield file
    finally:  # after the read: what was read before a change is right
        [now] = local.inspect([shard.path])
        if isinstance(now, Shard) and now != shard:
            raise shard.changed(now.size)


def features_of(schema: Any) -> dict[str, Any]:
    """Return what `datasets` wrote of the columns; empty in a file of other software."""
    try:
        known = parsed_json((schema.metadata or {})[b"huggingface"])["info"]["features"]
    except (KeyError, ValueError, TypeError):
        return {}
    return known if isinstance(known, dict) else {}


class _Group(NamedTuple):
    """Cells in memory. Cell i is data[offsets[i] : offsets[i + 1]]. valid: which are not null; None if all are."""

    offsets: Ints
    data: Bytes
    valid: Bools | None


def _group(array: Any) -> tuple[_Group, int]:
    """Return the cells of an Arrow array of bytes, or of `datasets`' images; and the address of their data."""
    pa = pyarrow()
    if pa.types.is_struct(array.type):
        array = array.flatten()[array.type.get_field_index("bytes")]
    if pa.types.is_binary_view(array.type):
        array = array.cast(pa.large_binary())
    wide = pa.types.is_large_binary(array.type) or pa.types.is_large_string(array.type)
    _, offsets, data = array.buffers()
    kind = np.dtype(np.int64 if wide else np.int32)
    used = (array.offset + len(array) + 1) * kind.itemsize  # the buffer may be longer
    all_offsets = np.frombuffer(offsets, np.uint8)[:used].view(kind)[array.offset :]
    valid = array.is_valid().to_numpy(zero_copy_only=False) if array.null_count else None
    values = np.zeros(0, np.uint8) if data is None else np.frombuffer(data, np.uint8)
    return _Group(all_offsets.astype(np.int64), values, valid), 0 if data is None else data.address


def is_of_bytes(kind: Any, table: Table) -> bool:
    """Return True if a column of this type of a table can hold encoded images."""
    types = pyarrow().types
    if types.is_struct(kind):
        place = kind.get_field_index("bytes")
        return place >= 0 and is_of_bytes(kind.field(place).type, table)
    views = types.is_binary_view(kind) and isinstance(table, _ParquetTable)  # in Arrow's files they are no ranges
    return views or types.is_binary(kind) or types.is_large_binary(kind)


def rows_of(tables: Sequence[Table]) -> Shards:
    """Return which rows the tables have."""
    return Shards(tuple(table.shard for table in tables), np.cumsum([table.rows for table in tables]))


def open_cells(tables: Sequence[Table], storage: Storage, column: str, window: int | None) -> Cells:
    """Open a column of images of several files of one format. window: see `SourceSpec`. Raises SourceError."""
    rows = rows_of(tables)
    if isinstance(tables[0], _ParquetTable):
        return _parquet_cells([table for table in tables if isinstance(table, _ParquetTable)], rows, column, window)
    return _arrow_cells([table for table in tables if isinstance(table, _ArrowTable)], rows, storage, column)


# --- Arrow ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class _Cells:
    """Cells of rows of files."""

    rows: Shards

    def path(self, index: int) -> str:
        return place_of(self.rows, index)

    def entries(self) -> bytes:
        return names_of([file.path for file in self.rows.files])

    def names(self) -> list[str]:
        return self.rows.names(row for size in self.rows.sizes for row in range(size))


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class ArrowCells(_Cells):
    """Cells that are ranges of bytes of files. starts, lengths: int64 [n]; starts is -1 for a null."""

    shard_sizes = None
    window = None

    storage: Storage
    starts: Ints
    lengths: Ints

    def read(self, indices: Sequence[int], allocate: Allocate) -> Payload:
        places = np.asarray(indices, dtype=np.int64)
        starts = self.starts[places].tolist()
        payload = self.storage.read_ranges(self.rows.of(places), starts, self.lengths[places].tolist(), allocate)
        if -1 not in starts:
            return payload
        errors = [_NO_CELL if start < 0 else error for start, error in zip(starts, payload.errors, strict=True)]
        return replace(payload, errors=errors)

    def ranges(self, indices: Sequence[int]) -> list[Range]:
        return self.rows.ranges(indices, self.starts, self.lengths)

    def numbers(self) -> Sequence[Ints]:
        return (self.lengths,)

    def parts(self) -> Iterator[bytes]:
        yield self.lengths.tobytes()

    def close(self) -> None:
        self.storage.close()


def _arrow_cells(tables: Sequence[_ArrowTable], rows: Shards, storage: Storage, column: str) -> ArrowCells:
    starts, lengths = list[Ints](), list[Ints]()
    for table in tables:
        first = table.mapped.address
        size = table.mapped.size
        for batch in table.batches([column]):
            group, address = _group(batch.column(0))
            if len(group.data) and not first <= address < first + size:
                raise SourceError(
                    f"{table.shard.path}: must not be compressed; save the dataset again without compression"
                )
            start = group.offsets[:-1] + (address - first)
            length = np.diff(group.offsets)
            if group.valid is not None:
                start, length = np.where(group.valid, start, -1), np.where(group.valid, length, 0)
            starts.append(start)
            lengths.append(length)
    none = np.zeros(0, np.int64)
    return ArrowCells(
        storage=storage, rows=rows, starts=np.concatenate([none, *starts]), lengths=np.concatenate([none, *lengths])
    )


# --- Parquet ----------------------------------------------------------------------------------------------------------


@final
class _Entry:
    """A row group that is read, or will be by the thread that holds `lock`."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.group: _Group | None = None


@final
class _GroupCache:
    """The row groups that this process read last, up to a number of bytes. Any thread may ask for one."""

    def __init__(self, kept_bytes: int) -> None:
        self._kept_bytes = kept_bytes
        self._bytes = 0
        self._lock = threading.Lock()
        self._entries: OrderedDict[int, _Entry] = OrderedDict()
        self.loads = 0

    def __reduce__(self) -> tuple[type[_GroupCache], tuple[int]]:
        return _GroupCache, (self._kept_bytes,)  # another process reads its own

    def get(self, number: int, load: Callable[[int], _Group]) -> _Group:
        with self._lock:
            entry = self._entries.setdefault(number, _Entry())
            self._entries.move_to_end(number)
        with entry.lock:
            if entry.group is not None:
                return entry.group
            group = load(number)
            with self._lock:
                self.loads += 1
                entry.group = group
                if self._entries.get(number) is entry:
                    self._bytes += group.data.nbytes
                self._shrink(number)
        return group

    def _shrink(self, kept: int) -> None:
        """Forget the oldest groups until the others are small enough, but not the one to be kept. The caller holds
        the lock."""
        for number, entry in list(self._entries.items()):
            if self._bytes <= self._kept_bytes or number == kept:
                break
            if entry.group is not None:
                self._bytes -= entry.group.data.nbytes
                del self._entries[number]

    def clear(self) -> None:
        with self._lock:
            self._entries.clear()
            self._bytes = 0


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class ParquetCells(_Cells):
    """Cells of row groups.

    column: the path of the leaf column. owners [G]: the file of each row group. firsts [F]: each file's first group.
    ends [G]: the number of rows up to the end of each row group. stored [G]: bytes of all its columns, not compressed.
    window: how many neighbouring rows are shuffled among each other.
    cache: the row groups that are kept: those of two windows, as the next one begins while the last batches of the one
        before are read again for bad samples.
    local: where the files are, also after the process has changed to another directory.
    """

    column: str
    local: LocalStorage
    owners: Ints
    firsts: Ints
    ends: Ints
    stored: Ints
    window: int
    cache: _GroupCache
    storage: None = field(default=None, init=False)

    @property
    def shard_sizes(self) -> tuple[int, ...]:
        return tuple(np.diff(self.ends, prepend=0).tolist())

    def read(self, indices: Sequence[int], allocate: Allocate) -> Payload:
        places = np.asarray(indices, dtype=np.int64)
        owners = np.searchsorted(self.ends, places, side="right")
        groups: dict[int, _Group | str] = {number: self._get(number) for number in np.unique(owners).tolist()}
        within = places - (self.ends[owners] - np.diff(self.ends, prepend=0)[owners])
        cells: list[Bytes | str] = []
        for number, i in zip(owners.tolist(), within.tolist(), strict=True):
            group = groups[number]
            if isinstance(group, str):
                cells.append(group)
            elif group.valid is not None and not group.valid[i]:
                cells.append(_NO_CELL)
            else:
                cell = group.data[group.offsets[i] : group.offsets[i + 1]]
                cells.append(cell if len(cell) else "empty file")
        return Payload.of(cells, allocate)

    def _get(self, number: int) -> _Group | str:
        """Load a row group; or return why it cannot be read. Raises what `Storage` says."""
        pa = pyarrow()
        path = self.rows.files[int(self.owners[number])].path
        permanent = (FileNotFoundError, PermissionError, SourceError, pa.ArrowInvalid)
        try:
            return retry(lambda: self.cache.get(number, self._load), lambda fault: isinstance(fault, permanent))
        except SourceError:
            raise
        except (OSError, MemoryError, pa.ArrowException) as error:
            if is_system_fault(error):
                raise system_fault(error, path) from error
            row_group = number - int(self.firsts[self.owners[number]])
            return f"its row group {row_group} cannot be read: {reason_of(error)}"

    def _load(self, number: int) -> _Group:
        owner = int(self.owners[number])
        shard = self.rows.files[owner]
        with _parquet_file(shard, self.local) as file:
            table = _row_group(file, number - int(self.firsts[owner]), [self.column])
        column = table.column(0)
        return _group(column.chunk(0) if column.num_chunks == 1 else column.combine_chunks())[0]

    def numbers(self) -> Sequence[Ints]:
        return (np.concatenate([self.ends, self.stored]),)

    def parts(self) -> Iterator[bytes]:
        yield from (column.tobytes() for column in self.numbers())

    def close(self) -> None:
        self.cache.clear()


Cells = ArrowCells | ParquetCells
"""One column of images: the encoded bytes of each sample."""


def _parquet_cells(tables: Sequence[_ParquetTable], rows: Shards, column: str, window: int | None) -> ParquetCells:
    owners = list[int]()
    sizes = list[int]()
    stored = list[int]()
    firsts = list[int]()
    kind = tables[0].schema.field(column).type
    leaf = f"{column}.bytes" if pyarrow().types.is_struct(kind) else column
    for number, table in enumerate(tables):
        metadata = table.metadata
        firsts.append(len(owners))
        for group in range(metadata.num_row_groups):
            about = metadata.row_group(group)
            size = about.total_byte_size  # column(i) knows that of one column, but ends the process if it is damaged
            if size > _LARGEST_GROUP:
                raise SourceError(
                    f"{table.shard.path}: row group {group} must have at most 1 GiB, as its images are read at once, "
                    f"got {size / 2**30:.1f} GiB in {about.num_rows} rows; write smaller row groups "
                    "(row_group_size=100)"
                )
            owners.append(number)
            sizes.append(about.num_rows)
            stored.append(size)
    total = sum(stored)
    mean = max(1.0, total / max(1, sum(sizes)))
    window = window or max(1, min(_LONGEST_WINDOW, int(_WINDOW_BYTES / mean)))
    return ParquetCells(
        rows=rows,
        column=leaf,
        local=LocalStorage(),
        owners=np.array(owners, np.int64),
        firsts=np.array(firsts, np.int64),
        ends=np.cumsum(sizes, dtype=np.int64),
        stored=np.array(stored, np.int64),
        window=window,
        cache=_GroupCache(2 * int(window * mean + max(stored, default=0))),
    )
