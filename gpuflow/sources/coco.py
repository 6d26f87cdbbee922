"""The COCO source: images, and the boxes, masks and keypoints of their annotations, from one JSON file.

As pycocotools and torchvision's CocoDetection have it: samples in ascending order of the images' ids, annotations in
the order of the file, boxes as first corner and size. Categories become labels from 0 in ascending order of their ids.
Annotations with `iscrowd` are left out.
"""

from __future__ import annotations

import json
import os
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, ClassVar, final

import numpy as np

from gpuflow.arrays import Ints
from gpuflow.errors import Problem, SourceError, near_word, show
from gpuflow.pipeline.records import GEOMETRIC
from gpuflow.sources.field_spec import FieldPairs, FieldSpec, conflict
from gpuflow.sources.labels import Locate
from gpuflow.sources.listing_text import check_path, load, parsed_json, resolved
from gpuflow.sources.record_table import SourceBuilder, TableSource, WholeFiles
from gpuflow.sources.spec import Listed, Samples
from gpuflow.sources.storage import PathTableBuilder, is_remote, open_storage
from gpuflow.sources.storage.local import missing_path

_IMAGES = 4096
"""Number of images in one block."""
_SIDE = 2**31
"""The width and height of an entry must be less than this number of pixels; others are ignored."""
_OF_ANNOTATIONS = ("bbox", "segmentation", "keypoints", "labels")


@final
@dataclass(frozen=True, kw_only=True)
class Coco(Listed, Samples):
    """A file of annotations in COCO's format, and the images that it names.

    Args:
        coco: a file of annotations in COCO's format, such as instances_train2017.json.
        images: the directory of its images.
    """

    kind = "coco"
    instead: ClassVar[Mapping[str, str]] = {**Samples.instead, "classes": "its categories name the classes"}
    has_other_fields = True

    coco: str
    images: str

    def index(self) -> TableSource:
        """Index the file. All annotations are read and checked; images only when they are loaded."""
        place = self.coco if is_remote(self.coco) else os.path.expanduser(self.coco)
        document = _document(place)
        names = _categories(document, place)
        images = sorted(_checked_images(document, place), key=lambda image: image["id"])
        sample_of = {image["id"]: i for i, image in enumerate(images)}
        if len(sample_of) < len(images):
            twice = next(a["id"] for a, b in pairwise(images) if a["id"] == b["id"])
            raise SourceError(f"{place}: images must have unique ids, got {twice} twice; correct one")
        annotations = document["annotations"]
        held = _held_annotations(annotations, sample_of, names, place)
        declared = self.declared or _default_fields(annotations)
        declared = tuple((name, _with_column(field)) for name, field in declared)
        places = Locate(
            lambda i: f"{place}: image {images[i]['file_name']!r}",
            row=lambda i, column, j: f"{place}: annotations[{held[i][j]}].{column}",
        )
        builder = SourceBuilder(declared, tuple(names.values()), place, places, mixed_masks=True)
        has_keypoints = any(field.type == "keypoints" for _, field in declared)
        empty_keypoints = _empty_keypoints(document, place) if has_keypoints else []
        for first in range(0, len(images), _IMAGES):
            block = slice(first, first + _IMAGES)
            of_images = [[annotations[k] for k in numbers] for numbers in held[block]]
            builder.add(_columns(images[block], of_images, declared, names, empty_keypoints, place), len(of_images))
        table = PathTableBuilder()
        table.add([image["file_name"] for image in images])
        root = self.images if is_remote(self.images) else os.path.expanduser(self.images)
        if not is_remote(root) and not os.path.isdir(root):
            raise SourceError(f"source.images must be a directory, got {root!r}{missing_path(root)}")
        kept = sum(map(len, held))
        note = f"{kept:,} annotations, {sum(not numbers for numbers in held):,} images without any"
        if kept < len(annotations):
            note += f", {len(annotations) - kept:,} annotations of crowds left out"
        paths = resolved(table, root, places.sample)
        files = WholeFiles(open_storage(paths[0], self.cache), paths, root)
        source = builder.source(TableSource, files, len(images), {}, _sizes(images), note=note)
        source.classes = tuple(names.values())  # also where no boxes are declared
        return source

    def field_problems(self, field: FieldSpec) -> Iterator[Problem]:
        given = [key for key in field.given if key != "flip_pairs"]
        if field.type == "label":
            yield conflict((), "must not be declared for a source.coco", "its labels belong to boxes; remove it")
        elif field.type in ("image", *GEOMETRIC) and given:
            rule = f"must have no keys for {field.type} in a source.coco, got {', '.join(given)}"
            yield conflict((), rule, "remove them; the format says it all")

    def labels_of(self, field: FieldSpec) -> str | None:
        return "labels" if field.type == "boxes" else None

    @property
    def folder_of_images(self) -> str:
        return self.images

    @property
    def fields_in_full(self) -> FieldPairs:
        declared = self.declared or tuple((kind, FieldSpec(type=kind)) for kind in GEOMETRIC)
        return tuple((name, _with_column(field)) for name, field in declared)


def _document(place: str) -> dict[str, Any]:
    """Load the file, which has three lists."""
    data = load(place, "source.coco")
    try:
        document = parsed_json(data)
    except json.JSONDecodeError as fault:
        raise SourceError(f"{place}:{fault.lineno}: must be JSON, got an error: {fault.msg}; correct it") from fault
    except UnicodeDecodeError as fault:
        raise SourceError(f"{place}: must be UTF-8 text, got an error: {fault.reason}; convert it") from fault
    except ValueError as fault:
        raise SourceError(f"{place}: must be JSON, got an error: {fault}; correct it") from fault
    if not isinstance(document, dict):
        raise SourceError(f"{place}: must be an object with images, annotations and categories, got {show(document)}")
    for key in ("images", "annotations", "categories"):
        if not isinstance(document.get(key), list):
            hint = near_word(key, [str(known) for known in document]) if key not in document else ""
            raise SourceError(f"{place}: must have the list {key!r}, got {show(document.get(key))}{hint}")
    return document


def _categories(document: Mapping[str, Any], place: str) -> dict[int, str]:
    """Return the names of the categories by their ids, in ascending order."""
    names: dict[int, str] = {}
    for k, category in enumerate(document["categories"]):
        here = f"{place}: categories[{k}]"
        if not isinstance(category, dict) or type(category.get("id")) is not int:
            raise SourceError(f"{here} must have an id, a whole number, got {show(category)}; correct it")
        if not isinstance(category.get("name"), str):
            raise SourceError(f"{here} must have a name, got {show(category)}; correct it")
        if category["id"] in names:
            raise SourceError(f"{here} must have a unique id, got {category['id']} twice; correct one")
        if category["name"] in names.values():
            raise SourceError(f"{here} must have a unique name, got {show(category['name'])} twice; rename one")
        names[category["id"]] = category["name"]
    return dict(sorted(names.items()))


def _checked_images(document: Mapping[str, Any], place: str) -> list[dict[str, Any]]:
    images: list[Any] = document["images"]
    if not images:
        raise SourceError(f"{place}: must have at least one image, got none; add images")
    for k, image in enumerate(images):
        here = f"{place}: images[{k}]"
        if not isinstance(image, dict) or type(image.get("id")) is not int:
            raise SourceError(f"{here} must have an id, a whole number, got {show(image)}; correct it")
        name = image.get("file_name")
        if not isinstance(name, str) or not name:
            raise SourceError(f"{here} must have a file_name, got {show(name)}; correct it")
        check_path(name, here)
    return images


def _sizes(images: Sequence[Mapping[str, Any]]) -> Ints:
    """Return height and width of each image, zeros where its entry does not give both."""
    sizes = [(image.get("height"), image.get("width")) for image in images]
    known = [all(type(side) is int and 0 < side < _SIDE for side in size) for size in sizes]
    return np.array([size if one else (0, 0) for size, one in zip(sizes, known, strict=True)], np.int64)


def _held_annotations(
    annotations: Sequence[Any], sample_of: Mapping[int, int], names: Mapping[int, str], place: str
) -> list[array[int]]:
    """Collect the numbers of each sample's annotations in the file, without those of crowds. Checks all of them."""
    held = [array("q") for _ in sample_of]
    for k, annotation in enumerate(annotations):
        sample = _check_annotation(annotation, f"{place}: annotations[{k}]", sample_of, names)
        if not _is_crowd(annotation):
            held[sample].append(k)
    return held


def _check_annotation(annotation: Any, here: str, sample_of: Mapping[int, int], names: Mapping[int, str]) -> int:
    """Check an annotation. Return the sample that it belongs to."""
    if not isinstance(annotation, dict):
        raise SourceError(f"{here} must be an object, got {show(annotation)}; correct it")
    image = annotation.get("image_id")
    category = annotation.get("category_id")
    if type(image) is not int or image not in sample_of:
        raise SourceError(f"{here}.image_id must be the id of one of the images, got {show(image)}; add that image")
    if type(category) is not int or category not in names:
        raise SourceError(
            f"{here}.category_id must be the id of one of the categories, got {show(category)}; add that category"
        )
    if annotation.get("iscrowd") not in (None, 0, 1):
        raise SourceError(f"{here}.iscrowd must be 0 or 1, got {show(annotation['iscrowd'])}; correct it")
    if not _is_crowd(annotation) and "bbox" not in annotation:
        raise SourceError(f"{here} must have a bbox, got {', '.join(annotation)}; add it")
    return sample_of[image]


def _is_crowd(annotation: Mapping[str, Any]) -> bool:
    return bool(annotation.get("iscrowd"))


def _or_empty(value: Any) -> Any:
    """Return a value of an annotation; an empty list where it has none, or null."""
    return [] if value is None else value


def _default_fields(annotations: Sequence[Mapping[str, Any]]) -> FieldPairs:
    """Return boxes, and the masks and keypoints that annotations have."""
    fields = [("boxes", FieldSpec(type="boxes"))]
    kept = [annotation for annotation in annotations if not _is_crowd(annotation)]
    if any(annotation.get("segmentation") for annotation in kept):
        fields.append(("mask", FieldSpec(type="mask")))
    if any(annotation.get("keypoints") for annotation in kept):
        fields.append(("keypoints", FieldSpec(type="keypoints")))
    return tuple(fields)


def _with_column(field: FieldSpec) -> FieldSpec:
    """Return a field with COCO's key and form."""
    match field.type:
        case "boxes":
            return FieldSpec(type="boxes", column="bbox", format="xywh", labels="labels")
        case "mask":
            return FieldSpec(type="mask", column="segmentation", kind="polygons")
        case "keypoints":
            return replace(field, column="keypoints")
        case _:
            return field


def _empty_keypoints(document: Mapping[str, Any], place: str) -> list[float]:
    """Return the keypoints of an annotation without any: as many as others have, none of them labelled.

    Where no annotation has keypoints, as in a small part of a dataset, they are those that the categories name.
    """
    kept = [annotation.get("keypoints") for annotation in document["annotations"] if not _is_crowd(annotation)]
    counts = {len(points) for points in kept if isinstance(points, list) and points}
    if len(counts) > 1:
        raise SourceError(
            f"{place}: annotations must have equally many keypoints, got {' and '.join(map(str, sorted(counts)))} "
            f"numbers; leave the field keypoints out, or split the file"
        )
    if counts or all(kept):
        return [0] * next(iter(counts), 0)
    named = [category.get("keypoints") for category in document["categories"]]
    counts = {3 * len(names) for names in named if isinstance(names, list) and names}
    if len(counts) != 1:
        got = "several numbers of them in categories" if counts else "none"
        raise SourceError(
            f"{place}: must have keypoints in an annotation, or their names in a category, got {got}; leave the field "
            "keypoints out"
        )
    return [0] * counts.pop()


def _columns(
    images: Sequence[Mapping[str, Any]],
    annotations: Sequence[Sequence[Mapping[str, Any]]],
    declared: FieldPairs,
    names: Mapping[int, str],
    empty_keypoints: Sequence[float],
    place: str,
) -> dict[str, list[Any]]:
    """Return the columns of some images: values of the annotations of each, and of declared keys of the images
    themselves."""
    columns: dict[str, list[Any]] = {
        "bbox": [[one["bbox"] for one in of_image] for of_image in annotations],
        "segmentation": [[_or_empty(one.get("segmentation")) for one in of_image] for of_image in annotations],
        "keypoints": [[one.get("keypoints") or empty_keypoints for one in of_image] for of_image in annotations],
        "labels": [[names[one["category_id"]] for one in of_image] for of_image in annotations],
    }
    for name, field in declared:
        column = field.column or name
        if field.type in ("number", "text", "any"):
            if column in _OF_ANNOTATIONS:
                rule = f"must not take the key {column!r} of images, because annotations have such values, too"
                raise SourceError(f"{place}: field {name} {rule}; rename it in the images")
            columns[column] = _of_images(images, column, place)
    return columns


def _of_images(images: Sequence[Mapping[str, Any]], key: str, place: str) -> list[Any]:
    for image in images:
        if key not in image:
            hint = near_word(key, list(image))
            raise SourceError(
                f"{place}: image {image['file_name']!r} must have the key {key!r}, got {', '.join(image)}{hint}"
            )
    return [image[key] for image in images]
