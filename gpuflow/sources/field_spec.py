"""How `source.fields` describes what a sample carries, and the rules between its keys."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from itertools import chain
from typing import Annotated, Any, Literal, get_args

from gpuflow.errors import Key, Problem, suggest
from gpuflow.pipeline.bounds import Bounds, out_of_bounds

Type = Literal["image", "label", "boxes", "mask", "keypoints", "number", "text", "any"]
TYPES: tuple[Type, ...] = get_args(Type)
GivenClasses = int | tuple[str, ...] | None
"""How many classes there are, or their names; None if the labels say it."""
MaskFormat = Literal["bmp", "gif", "jpeg", "pnm", "tiff"]


@dataclass(frozen=True, kw_only=True, slots=True)
class FieldSpec:
    """One field of a sample: what it is, and where the source has it.

    Args:
        type: what the field is; by default its name, if that is a type.
        column: the column of a listing, or the key in a shard's `.json` member, that holds it; a column of shards that
            starts with a dot is the suffix of a member. By default the field's name; in shards text is `.txt`, a mask's
            file `.mask.png`, and a label `.cls`.
        columns: of a label of the kind `vector`: two or more columns, each with one number of the vector, in place of
            `column`.
        kind: of a label: `class` (the default), `classes` (several a sample), `number` or `vector`. Of a mask: `file`
            (the default; an image whose levels are classes), `rle` or `polygons` (an instance each).
        format: of boxes: `xyxy` (the default; corners), `xywh` (first corner and size) or `cxcywh` (centre and size).
        labels: of boxes: the column with the label of each box; by default boxes have no labels.
        classes: of a label, or of boxes with labels: how many classes there are, or their names; by default
            `source.classes`, which belongs to the label, or to the boxes where no label is declared.
        separator: of a label of the kind `classes`: what separates the labels of a sample that are one text; by default
            `|` in a cell of CSV and in a `.cls` member, where they may also be a list in JSON.
        fill: of a mask of the kind `file`: the level of what padding, warps and other stages add around the image, such
            as the 255 that a loss ignores; by default 0.
        formats: of a mask of the kind `file`: which formats its files may have besides PNG. By default none: each is
            one more library that reads what strangers send.
        flip_pairs: of keypoints: pairs of their numbers, from 0, that change places where an image is flipped
            horizontally, such as the left eye and the right one; by default none.
    """

    type: Type | None = None
    column: str | None = None
    columns: tuple[str, ...] | None = None
    kind: Literal["class", "classes", "number", "vector", "file", "rle", "polygons"] | None = None
    format: Literal["xyxy", "xywh", "cxcywh"] | None = None
    labels: str | None = None
    classes: Annotated[int, Bounds(least=1, limit=10_000_000)] | tuple[str, ...] | None = None
    separator: str | None = None
    fill: Annotated[int, Bounds(least=0, most=255)] | None = None
    formats: tuple[MaskFormat, ...] | None = None
    flip_pairs: Annotated[tuple[tuple[int, int], ...], Bounds(least=0)] | None = None

    @property
    def given(self) -> list[str]:
        """Return the keys that are given, but for `type`."""
        return [field.name for field in fields(self) if field.name != "type" and getattr(self, field.name) is not None]

    @property
    def is_mask_file(self) -> bool:
        """Return True if it is a mask in a separate file."""
        return self.type == "mask" and self.kind in (None, "file")


FieldPairs = tuple[tuple[str, FieldSpec], ...]
"""Declared fields: the name and the spec of each."""
Fields = Mapping[str, FieldSpec | None] | FieldPairs
IMAGES_ALONE = "for images without labels declare fields: {image: {}}"
"""What errors say where labels are missing."""

_KEYS: dict[str, tuple[str, ...]] = {
    "image": ("column",),
    "label": ("column", "columns", "kind", "classes", "separator"),
    "boxes": ("column", "format", "labels", "classes"),
    "mask": ("column", "kind", "fill", "formats"),
    "keypoints": ("column", "flip_pairs"),
    "number": ("column",),
    "text": ("column",),
    "any": ("column",),
}
_KINDS = {"label": ("class", "classes", "number", "vector"), "mask": ("file", "rle", "polygons")}
_ONCE = ("image", "label", "boxes")


def conflict(path: Key | tuple[Key, ...], rule: str, action: str = "") -> Problem:
    """Return the problem of a key that does not go with others, its path from its block on."""
    return Problem.of(path, rule, action=action, code="config.conflict")


def classes_of_boxes(declared: FieldPairs, classes: GivenClasses) -> GivenClasses:
    """Return the classes of the boxes' labels: the boxes' own, else those of the source if no label is declared.

    classes: those of the source.
    """
    own = next((field.classes for _, field in declared if field.type == "boxes"), None)
    return classes if own is None and all(field.type != "label" for _, field in declared) else own


def columns_of(declared: FieldPairs) -> list[str]:
    """Return the columns whose values a source reads: of all fields but images and files, and of the labels of boxes.

    Examples:
        >>> columns_of(pairs_of_fields({"image": {"column": "path"}, "boxes": {"labels": "kinds"}, "label": None}))
        ['boxes', 'kinds', 'label']
    """
    columns = list[str]()
    for name, field in declared:
        if field.type != "image" and not field.is_mask_file:
            columns += field.columns or (field.column or name,)
        if field.labels is not None:
            columns.append(field.labels)
    return list(dict.fromkeys(columns))


def label_field(declared: FieldPairs, classes: GivenClasses) -> tuple[str, FieldSpec | None, GivenClasses]:
    """Return the column, the spec and the classes of the samples' labels; an empty name and None without a label.

    classes: those of the source, by default also of the label.

    Examples:
        >>> declared = pairs_of_fields({"kind": {"type": "label", "column": "species"}})
        >>> column, _, classes = label_field(declared, 3)
        >>> column, classes
        ('species', 3)
    """
    for name, field in declared:
        if field.type == "label":
            return field.column or name, field, classes if field.classes is None else field.classes
    return "", None, classes


def pairs_of_fields(given: Fields) -> FieldPairs:
    """Return the fields as pairs of name and spec, each with its type where the name says it.

    Examples:
        >>> [(name, spec.type) for name, spec in pairs_of_fields({"label": None, "crop": {"type": "boxes"}})]
        [('label', 'label'), ('crop', 'boxes')]
    """
    items: Iterable[tuple[str, Any]] = given.items() if isinstance(given, Mapping) else given
    pairs = []
    for name, value in items:
        keys = asdict(value) if isinstance(value, FieldSpec) else dict(value or ())
        if keys.get("type") is None and name in TYPES:
            keys["type"] = name
        if keys.get("classes") is not None and not isinstance(keys["classes"], int):
            keys["classes"] = tuple(keys["classes"])
        for key in ("columns", "formats"):
            if keys.get(key) is not None:
                keys[key] = tuple(keys[key])
        if keys.get("flip_pairs") is not None:
            keys["flip_pairs"] = tuple(map(tuple, keys["flip_pairs"]))
        pairs.append((name, FieldSpec(**keys)))
    return tuple(pairs)


def field_problems(pairs: FieldPairs, labels_of: Callable[[FieldSpec], str | None]) -> Iterator[Problem]:
    """Yield a problem for each broken rule between the keys of fields, its path from the mapping of fields on.

    Args:
        pairs: names and specs.
        labels_of: returns the column with the labels of boxes, None if they have none.
    """
    first: dict[str, str] = {}
    columns: dict[str, str] = {}
    for name, spec in pairs:
        if spec.type is None:
            action = f"{suggest(name, TYPES, else_all=False)} give the field a type: {', '.join(TYPES)}".strip()
            yield Problem.of(
                name, "needs the key 'type', because its name is no type", action=action, code="config.type"
            )
            continue
        yield from (problem.below(name) for problem in _key_problems(spec.type, spec, labels_of(spec)))
        if spec.type in _ONCE:
            other = first.setdefault(spec.type, name)
            if other != name:
                yield conflict(name, f"must be the only field of type {spec.type}, got {other} too", "remove one")
        for column in (name, labels_of(spec)):
            if column is not None and columns.setdefault(column, name) != name:
                rule = f"must have a unique name in a record, got {column!r} in {columns[column]} too"
                yield conflict(name, rule, "rename one")


def _key_problems(kind: Type, spec: FieldSpec, labels: str | None) -> Iterator[Problem]:
    """Yield a problem for each broken rule between the keys of one field with a type. labels: the column with the
    labels of boxes."""
    for key in spec.given:
        if key not in _KEYS[kind]:
            owners = " and ".join(one for one in TYPES if key in _KEYS[one])
            yield conflict(key, f"must go with {owners}, got a field of type {kind}", "remove it")
    if spec.kind is not None and kind in _KINDS and spec.kind not in _KINDS[kind]:
        action = suggest(spec.kind, _KINDS[kind], else_all=False)
        rule = f"must be one of {', '.join(_KINDS[kind])} for a {kind}"
        yield Problem.of("kind", rule, spec.kind, action, code="config.range")
    if isinstance(spec.classes, tuple) and (not spec.classes or len(set(spec.classes)) < len(spec.classes)):
        yield Problem.of("classes", "must be distinct names, at least one", spec.classes, code="config.range")
    yield from out_of_bounds(spec)
    if spec.classes is not None and kind == "boxes" and labels is None:
        yield conflict("classes", "must go with the key labels", "name the column of the labels: labels: COLUMN")
    if spec.classes is not None and kind == "label" and spec.kind in ("number", "vector"):
        yield conflict("classes", f"must go with kind: class or classes, got {spec.kind}", "remove it")
    if spec.separator is not None and kind == "label" and spec.kind != "classes":
        rule = f"must go with kind: classes, got {spec.kind or 'class'}"
        yield conflict("separator", rule, "set kind: classes or remove it")
    if spec.columns is not None and kind == "label":
        if spec.kind != "vector":
            rule = f"must go with kind: vector, got {spec.kind or 'class'}"
            yield conflict("columns", rule, "set kind: vector or remove it")
        if spec.column is not None:
            yield conflict("columns", "must not stand next to column", "remove one")
        if len(spec.columns) < 2 or len(set(spec.columns)) < len(spec.columns):
            yield Problem.of("columns", "must be distinct names, at least two", spec.columns, code="config.range")
    if spec.separator == "":
        yield Problem.of("separator", "must have at least one character", spec.separator, code="config.range")
    for key in ("fill", "formats") if kind == "mask" and not spec.is_mask_file else ():
        if getattr(spec, key) is not None:
            yield conflict(key, f"must go with kind: file, got {spec.kind}, whose pixels are 0 and 1", "remove it")
    for name in spec.formats or ():
        if name not in (known := get_args(MaskFormat)):
            rule = f"must be among {', '.join(known)}"
            action = suggest(name, known, else_all=False)
            yield Problem.of("formats", rule, name, action, code="config.range")
    if len(set(numbers := list(chain.from_iterable(spec.flip_pairs or ())))) < len(numbers):
        rule = "must name each keypoint at most once"
        yield Problem.of("flip_pairs", rule, spec.flip_pairs, code="config.range")
