"""The source `hf`: what Hugging Face's `datasets` saved, or Parquet files, with a column of images. pyarrow reads them.

`save_to_disk` writes Arrow files: an image is a range of bytes of one, and any sample is as cheap to read as any other.
In Parquet files a row group is decoded as a whole, so neighbouring samples are cheaper to read together.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Self, final

from gpuflow.errors import Problem, SourceError, near_word
from gpuflow.sources.base import Source
from gpuflow.sources.field_spec import Fields, FieldSpec, GivenClasses, columns_of, conflict
from gpuflow.sources.hf_tables import (
    Cells,
    Table,
    broken,
    features_of,
    is_of_bytes,
    open_cells,
    open_table,
    place_of,
    pyarrow,
    rows_of,
)
from gpuflow.sources.labels import Locate
from gpuflow.sources.listing_text import parsed_json
from gpuflow.sources.record_table import SourceBuilder, TableSource
from gpuflow.sources.spec import Named, WithSplits, WithWindow
from gpuflow.sources.storage import LocalStorage, is_remote
from gpuflow.sources.storage.local import ancestors, identity_of, matching, missing_path, walk

Classes = tuple[str, ...]


@final
class HfSource(TableSource):
    """The samples of a dataset, in the order of its files and their rows. `Hf` opens it."""

    files: Cells

    @property
    def window(self) -> int | None:
        """Return how many neighbouring samples are shuffled among each other; None if any two may be."""
        return self.files.window


@final
@dataclass(frozen=True, kw_only=True)
class Hf(WithWindow, WithSplits, Named):
    """A dataset that Hugging Face's `datasets` saved (`save_to_disk`), or Parquet files.

    Args:
        hf: a dataset that Hugging Face's `datasets` saved (`save_to_disk`), or Parquet files: one, a
            directory of them, or a pattern.
        image: the column of the images; by default `image`, or the one that has images.
        label: the column of the labels; by default `label`, or the one that has classes.
    """

    kind = "hf"

    hf: str
    image: str | None = None
    label: str | None = None

    def problems(self) -> Iterator[Problem]:
        yield from super().problems()
        for key in ("image", "label") if self.fields else ():
            if getattr(self, key) is not None:
                yield conflict(key, "must not stand next to fields", f"move it there: {key}: {{column: NAME}}")

    def open(self) -> HfSource:
        """Index the dataset. Raises SourceError, or MissingExtra without pyarrow."""
        if is_remote(self.hf):
            raise SourceError(
                f"source.hf must be a path of this machine, got {self.hf!r}; copy the dataset to a local disk"
            )
        pyarrow()
        storage = LocalStorage()
        found = _find(os.path.expanduser(self.hf), self.splits)
        tables = list[Table]()
        splits = dict[str, tuple[int, int]]()
        row = 0
        for name, paths in found.items():
            first = row
            for path in paths:
                tables.append(open_table(storage, path))
                row += tables[-1].rows
            splits[name] = first, row
        if not row:
            raise SourceError(f"{self.hf}: must hold at least one sample, got none; check what is in it")
        source = _Reader(self, tables, storage).source(splits)
        self.check_window(source)
        return source

    def shard_window(self, source: Source | None = None) -> int:
        if self.window is None and isinstance(source, HfSource) and source.window is not None:
            return source.window
        return super().shard_window(source)

    def with_one_column(self, name: str, column: str, kind: Literal["number", "any"] = "number") -> Self:
        if self.fields or not (self.image or self.label):
            return super().with_one_column(name, column, kind)
        image: Fields = {"image": FieldSpec(column=self.image)} if self.image else {}
        return replace(self, image=None, label=None, fields=image).with_one_column(name, column, kind)


# --- files ------------------------------------------------------------------------------------------------------------


def _find(root: str, names: Sequence[str]) -> dict[str, list[str]]:
    """Find the files of each split that is named; without names all of them, under an empty name."""
    if not os.path.isdir(root):
        paths = [root]
        fixed = os.path.dirname(root)
        if not os.path.exists(root):
            fixed = os.path.dirname(_WILDCARD.split(root, maxsplit=1)[0])
            paths = matching(root, fixed)
        if not paths:
            raise SourceError(
                f"source.hf must be a directory, a file or a pattern, got {root!r}, which does not exist"
                f"{missing_path(root)}"
            )
        return _by_name(paths, names, fixed) if names else {"": paths}
    known = _loaded(os.path.join(root, "dataset_dict.json"), "splits")
    if known is not None:
        if not names:
            raise SourceError(
                f"{root}: holds the splits {', '.join(known)}; name those to read: splits: [{', '.join(known)}], or "
                f"give the directory of one: {os.path.join(root, str(known[0]))}"
            )
        if lacking := [name for name in names if name not in known]:
            raise SourceError(f"{root}: has no split {lacking[0]!r}{near_word(lacking[0], known)}")
        return {name: _saved(os.path.join(root, name)) for name in names}
    if os.path.exists(os.path.join(root, "state.json")):
        if names:
            raise SourceError(
                f"{root}: is one split without parts of its own; leave out splits, or divide it: split: "
                "{train: 0.9, val: 0.1}"
            )
        return {"": _saved(root)}
    paths = _below(root)
    if not paths:
        raise SourceError(
            f"{root}: must hold state.json or dataset_dict.json, which save_to_disk writes, or .parquet files, got "
            f"none; check source.hf"
        )
    return _by_name(paths, names, root) if names else {"": paths}


def _below(root: str) -> list[str]:
    """Find the Parquet files in a directory and below it."""
    top = root.rstrip("/") or "/"
    found = walk(top, ancestors(top) - {identity_of(top)}, (_PARQUET,))
    return sorted(
        os.path.join(directory, file) for directory, files in found for file in files if file.endswith(_PARQUET)
    )


_PARQUET = ".parquet"
_WILDCARD = re.compile(r"[*?[]")


def _by_name(paths: Sequence[str], names: Sequence[str], root: str) -> dict[str, list[str]]:
    """Sort Parquet files by split: `train-00000-of-00002.parquet`, `train.parquet` or `train/0.parquet` below
    `root`."""
    found = dict[str, list[str]]()
    split_of = dict[str, str]()
    for name in names:
        own = [path for path in paths if _is_of_split(os.path.relpath(path, root), name)]
        if not own:
            raise SourceError(
                f"source.splits: no file of the split {name!r}, such as {name}-00000-of-00001.parquet, among "
                f"{len(paths)} files like {paths[0]}; correct the name"
            )
        for path in own:
            if split_of.setdefault(path, name) != name:
                raise SourceError(
                    f"{path}: file must be of one split, got the names of {split_of[path]!r} and {name!r}; rename it"
                )
        found[name] = own
    return found


def _is_of_split(path: str, name: str) -> bool:
    """Return True if a file has the name of a split, or lies in a directory that has."""
    *directories, file = path.split(os.sep)
    return name in directories or file.startswith((f"{name}-", f"{name}."))


def _saved(folder: str) -> list[str]:
    """Return the Arrow files of one split, as its state.json lists them."""
    files = _loaded(os.path.join(folder, "state.json"), "_data_files")
    if files is None:
        raise SourceError(
            f"{folder}: must hold the state.json that save_to_disk writes, got none; copy or save it again"
        )
    if _loaded(os.path.join(folder, "state.json"), "_indices_data_files", optional=True):
        raise SourceError(f"{folder}: holds a selection of rows in a file of its own; load it and save it again")
    return [os.path.join(folder, str(file["filename"])) for file in files]


def _loaded(path: str, key: str, *, optional: bool = False) -> list[Any] | None:
    """Load a list from a JSON file; None where there is no such file. Raises SourceError."""
    try:
        with open(path, encoding="utf-8") as file:
            value = parsed_json(file.read())
        return list(value.get(key) or ()) if optional else list(value[key])
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as fault:
        raise SourceError(
            f"{path}: must be what save_to_disk writes, got an error: {fault!r}; save it again"
        ) from fault


# --- columns ----------------------------------------------------------------------------------------------------------


@final
class _Reader:
    """Reads the small columns of a dataset's files, and finds where those of images lie."""

    def __init__(self, spec: Hf, tables: Sequence[Table], storage: LocalStorage) -> None:
        self._spec = spec
        self._tables = tables
        self._storage = storage
        self._rows = rows_of(tables)
        self._schema = tables[0].schema
        self._all_features = [features_of(table.schema) for table in tables]
        self._features = self._all_features[0]
        self._where = spec.hf
        self._locate = Locate(lambda i: place_of(self._rows, i))
        for table in tables[1:]:
            if table.form != tables[0].form:
                raise SourceError(
                    f"{table.shard.path}: must be an {tables[0].form} file like {tables[0].shard.path}, got "
                    f"{table.form}; name the files of one form: source.hf: 'DIRECTORY/*.parquet'"
                )

    def source(self, splits: Mapping[str, tuple[int, int]]) -> HfSource:
        spec = self._spec
        image = next((field.column or name for name, field in spec.declared if field.type == "image"), spec.image)
        cells = self._cells(image)
        declared = spec.declared or (("label", FieldSpec(type="label", column=self._label_column())),)
        columns = columns_of(declared)
        for column in columns:
            self._check_column(column, "the column")
        builder = SourceBuilder(declared, spec.classes, self._where, self._locate, known=self._classes_of)
        for block in self._blocks(columns, builder.class_columns):
            builder.add(block, len(next(iter(block.values()))))
        masks = {name: self._cells(field.column or name) for name, field in declared if field.is_mask_file}
        return builder.source(HfSource, cells, int(self._rows.ends[-1]), masks, splits=splits)

    def _cells(self, name: str | None) -> Cells:
        column = self._image_column(name)
        try:
            return open_cells(self._tables, self._storage, column, self._spec.window)
        except (pyarrow().ArrowException, OSError) as error:
            raise broken(self._where, self._tables[0].form, error) from error

    def _image_column(self, name: str | None) -> str:
        """Find the column of images of this name, or the only one. Raises SourceError."""
        of_images = [field.name for field in self._schema if is_of_bytes(field.type, self._tables[0])]
        if name is None:
            called = [column for column in of_images if _type_of(self._features.get(column)) == "Image"] or of_images
            name = "image" if "image" in of_images or len(called) != 1 else called[0]
        self._check_column(name, "the column of images")
        if name not in of_images:
            kind = self._schema.field(name).type if name in self._schema.names else "a member of a structure"
            raise SourceError(
                f"{self._where}: the column {name!r} must hold encoded images (bytes, or the structure of datasets' "
                f"Image), got {kind}; name another one with image: NAME ({', '.join(of_images) or 'none holds bytes'})"
            )
        return name

    def _label_column(self) -> str:
        """Find the column of labels that `label` names, or the only one. Raises SourceError."""
        name = self._spec.label
        if name is None:
            classes = [column for column in self._schema.names if self._class_names(column) is not None]
            name = "label" if "label" in self._schema.names or len(classes) != 1 else classes[0]
            if name not in self._schema.names:
                raise SourceError(
                    f"{self._where}: must have a column of labels, got {', '.join(self._schema.names)}; name it with "
                    "label: NAME, or declare fields: {image: } without a label"
                )
        self._check_column(name, "the column of labels")
        return name

    def _check_column(self, column: str, what: str) -> None:
        names = self._schema.names
        if column not in names and column.partition(".")[0] not in names:
            raise SourceError(
                f"{self._where}: must have {what} {column!r}, got {', '.join(names)}{near_word(column, names)}"
            )
        whole = column if column in names else column.partition(".")[0]
        if names.count(whole) > 1:
            raise SourceError(
                f"{self._where}: must have the column {whole!r} once, got {', '.join(names)}; rename or remove one"
            )
        for table, features in zip(self._tables, self._all_features, strict=True):
            self._check_same(table, features, whole)
        if column not in names:
            name, _, member = column.partition(".")
            self._check_member(name, member, self._schema.field(name).type)

    def _check_same(self, table: Table, features: Mapping[str, Any], column: str) -> None:
        """Raise SourceError unless a table has a column as the first table has it."""
        here = table.shard.path
        first = self._tables[0].shard.path
        if (count := table.schema.names.count(column)) != 1:
            raise SourceError(
                f"{here}: must have the column {column!r} once, as {first} has it, got {count or 'none'} among "
                f"{', '.join(table.schema.names)}; write it again, or name one of these files"
            )
        kind = table.schema.field(column).type
        wanted = self._schema.field(column).type
        if kind != wanted:
            raise SourceError(
                f"{here}: the column {column!r} must be {wanted}, as in {first}, got {kind}; write it again, or name "
                "one of these files"
            )
        if features.get(column) != self._features.get(column):
            raise SourceError(
                f"{here}: the column {column!r} must have the features and classes that it has in {first}; write it "
                "again, or name one of these files"
            )

    def _check_member(self, column: str, member: str, kind: Any) -> None:
        """Raise SourceError unless the structures in a column, or in its lists, have this member."""
        while member:
            while hasattr(kind, "value_type"):
                kind = kind.value_type
            known = [kind.field(i).name for i in range(kind.num_fields)] if hasattr(kind, "num_fields") else []
            first, _, member = member.partition(".")
            if first not in known:
                held = f"got {', '.join(known)}{near_word(first, known)}" if known else f"got {kind}"
                raise SourceError(f"{self._where}: the column {column!r} must have the member {first!r}, {held}")
            column = f"{column}.{first}"
            kind = kind.field(first).type

    def _class_names(self, column: str) -> Classes | None:
        """Return the names that `datasets` knows for the values of a column, or of the items of its lists."""
        feature: Any = self._features
        for key in (column,) if column in self._features else column.split("."):
            feature = _item(feature)
            feature = feature.get(key) if isinstance(feature, dict) else None
        feature = _item(feature)
        names = feature.get("names") if _type_of(feature) == "ClassLabel" else None
        return tuple(map(str, names)) if isinstance(names, list) else None

    def _classes_of(self, column: str, given: GivenClasses) -> GivenClasses:
        """Return the classes that a column's values are of: what is given, else the names that `datasets` knows."""
        names = self._class_names(column)
        if names is None or isinstance(given, tuple):
            return given
        if isinstance(given, int) and given != len(names):
            raise SourceError(f"{self._where}: {column} has {len(names)} classes, and classes says {given}; remove it")
        return names

    def _blocks(self, columns: Sequence[str], labels: Sequence[str]) -> Iterator[dict[str, list[Any]]]:
        """Yield blocks of the values of columns, as lists of what JSON has. `a.b` is the member b of column a.

        labels: those whose numbers are replaced by the names that `datasets` knows for them.
        """
        if not columns:
            return
        whole = {column: column if column in self._schema.names else column.partition(".")[0] for column in columns}
        read = list(dict.fromkeys(whole.values()))
        for column in read:
            if not _is_plain(self._schema.field(column).type):
                kind = self._schema.field(column).type
                raise SourceError(
                    f"{self._where}: the column {column!r} must be numbers, text or lists of them, got {kind}; "
                    "convert it, or leave it out of source.fields"
                )
        first = 0
        for table in self._tables:
            for batch in self._read(table, read):
                held = {name: batch.column(name).to_pylist() for name in read}
                block = {
                    column: held[name]
                    if column == name
                    else [_member(value, column[len(name) + 1 :]) for value in held[name]]
                    for column, name in whole.items()
                }
                yield block | {column: self._with_names(column, block[column], first) for column in labels}
                first += batch.num_rows

    def _with_names(self, column: str, values: list[Any], first: int) -> list[Any]:
        """Return labels, or lists of them, by their names where `datasets` knows those. first: the number of
        values[0]."""
        names = self._class_names(column)
        locate = self._locate
        if names is None:
            return values
        return [
            [_name(label, names, locate.row, i, column, j) for j, label in enumerate(value)]
            if isinstance(value, list)
            else _name(value, names, locate.value, i, column)
            for i, value in enumerate(values, start=first)
        ]

    def _read(self, table: Table, columns: Sequence[str]) -> Any:
        try:
            yield from table.batches(columns)
        except (pyarrow().ArrowException, OSError) as error:
            raise broken(table.shard.path, table.form, error) from error


def _name(label: Any, names: Classes, locate: Callable[..., str], *at: Any) -> Any:
    """Return the name of a label that is a number, anything else as it is. Raises SourceError for one that has no
    name."""
    if type(label) is int and not 0 <= label < len(names):
        raise SourceError(
            f"{locate(*at)} must be one of the {len(names)} classes, 0..{len(names) - 1}, got {label}; correct it, or "
            "declare fields without it"
        )
    return names[label] if type(label) is int else label


def _type_of(feature: Any) -> Any:
    return feature.get("_type") if isinstance(feature, dict) else None


def _item(feature: Any) -> Any:
    """Return the feature of the items of a list, however `datasets` wrote it; others as they are."""
    while True:
        if isinstance(feature, list) and feature:
            feature = feature[0]
        elif _type_of(feature) in ("Sequence", "List", "LargeList"):
            feature = feature.get("feature")
        else:
            return feature


def _member(value: Any, path: str) -> Any:
    """Return `a.b` of a structure, or of each structure in a list."""
    for key in path.split("."):
        if isinstance(value, list):
            value = [item.get(key) if isinstance(item, dict) else None for item in value]
        else:
            value = value.get(key) if isinstance(value, dict) else None
    return value


def _is_plain(kind: Any) -> bool:
    """Return True if the values of an Arrow type are those of JSON."""
    types = pyarrow().types
    if types.is_struct(kind):
        return all(_is_plain(field.type) for field in kind)
    if hasattr(kind, "value_type"):  # of lists and dictionaries
        return _is_plain(kind.value_type)
    simple = (types.is_integer, types.is_floating, types.is_boolean, types.is_null, _is_text)
    return any(test(kind) for test in simple)


def _is_text(kind: Any) -> bool:
    types = pyarrow().types
    return any(test(kind) for test in (types.is_string, types.is_large_string, types.is_string_view))
