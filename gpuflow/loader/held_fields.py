"""The fields of samples that a caller holds decoded, as columns that follow an image's stages: see `Transform`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from gpuflow.arrays import Array, Bytes, Ints
from gpuflow.errors import BadSampleError, show
from gpuflow.pipeline.records import Column, Field, Ragged
from gpuflow.sources import SourceSpec

_IN_TARGETS = {"boxes": "boxes", "mask": "masks", "keypoints": "keypoints"}
"""What `Batch.targets` and torchvision's detectors call fields of these types."""


def moved_fields(source: SourceSpec) -> tuple[Field, ...]:
    """The boxes, masks and keypoints that a source declares, or that its kind has. The source is not read for them."""
    found = list[Field]()
    for name, spec in source.fields_in_full:
        match spec.type:
            case "boxes":
                found.append(Field(name=name, type="boxes", labels=spec.labels or ""))
            case "mask":
                found.append(Field(name=name, type="mask", instances=not spec.is_mask_file, fill=spec.fill or 0))
            case "keypoints":
                found.append(Field(name=name, type="keypoints", flip_pairs=spec.flip_pairs or ()))
            case _:
                pass  # images, labels, numbers, texts and other objects have no coordinates
    return tuple(found)


def columns_of(
    schema: Sequence[Field], fields: Mapping[str, Any], sizes: Ints
) -> tuple[tuple[Field, ...], dict[str, Column]]:
    """Those of the fields of a schema that are there, and their values for N samples.

    Args:
        schema: what may be there.
        fields: N values by name, as `Transform.__call__` takes them.
        sizes: height and width of the images, [N, 2].

    Raises:
        ValueError: a value of another form, with its place, or a field under the name that it has in targets.
        BadSampleError: a keypoint of another visibility than 0, 1 and 2, as in a source.
    """
    _check_names(schema, fields)
    chosen: list[Field] = []
    columns: dict[str, Column] = {}
    for field in schema:
        if field.name not in fields:
            continue
        values = _values(field.name, fields[field.name], len(sizes))
        labels = ""
        match field.type:
            case "boxes":
                columns[field.name] = _boxes(field.name, values)
                if field.labels in fields:
                    labels = field.labels
                    columns[labels] = _labels(labels, _values(labels, fields[labels], len(sizes)))
            case "keypoints":
                columns[field.name] = keypoints_of(field.name, values)
            case "mask":
                read = _instances if field.instances else _levels
                columns[field.name] = [
                    read(field.name, i, value, size)
                    for i, (value, size) in enumerate(zip(values, sizes.tolist(), strict=True))
                ]
            case other:
                raise AssertionError(f"a field of type {other} does not move")
        chosen.append(replace(field, labels=labels))
    return tuple(chosen), columns


def _check_names(schema: Sequence[Field], fields: Mapping[str, Any]) -> None:
    """Raise ValueError if a declared field is given under the name that torchvision's targets use: it would not follow
    the images."""
    declared = {name for field in schema for name in (field.name, field.labels)}
    for field in schema:
        known = "" if field.type == "mask" and not field.instances else _IN_TARGETS[field.type]
        for own, name in ((field.name, known), (field.labels, "labels")):
            if own and own not in fields and name in fields and name not in declared:
                raise ValueError(
                    f"fields must have {own!r}, the name that the source declares, in place of {name!r}, which would "
                    "not follow the images"
                )


def without_tensors(name: str, given: Any, count: int) -> list[Any]:
    """The `count` values of a field, one for each image, with arrays in place of tensors. Raises ValueError."""
    return [_as_array(value) if isinstance(value, torch.Tensor) else value for value in _values(name, given, count)]


def for_numpy(value: torch.Tensor) -> torch.Tensor:
    """The same numbers as numpy takes them: without a gradient, and float32 instead of bfloat16."""
    return (value.float() if value.dtype == torch.bfloat16 else value).detach()


def _as_array(value: torch.Tensor) -> Array:
    array: Array = for_numpy(value).cpu().numpy()
    return array


def _values(name: str, given: Any, count: int) -> list[Any]:
    rule = f"fields[{name!r}] must have {count} values, one for each image, got"
    try:
        values = list(given)
    except TypeError:
        raise ValueError(f"{rule} {show(given)}") from None
    if len(values) != count:
        raise ValueError(f"{rule} {len(values)}")
    return values


def _array(name: str, i: int, value: Any, *shape: int | str) -> Array:
    """Sample i's value as an array of numbers of this shape, in which a letter stands for any length."""
    form = ", ".join(map(str, shape))
    if isinstance(value, torch.Tensor):
        array = _as_array(value)
    else:
        try:
            array = np.asarray(value)
        except ValueError:  # rows of several lengths
            raise ValueError(f"fields[{name!r}][{i}] must be numbers [{form}], got rows of several lengths") from None
    if array.ndim == 1 and not len(array):  # an empty list has no rows
        array = np.zeros([length if isinstance(length, int) else 0 for length in shape], array.dtype)
    fits = len(array.shape) == len(shape) and all(
        isinstance(wanted, str) or wanted == got for wanted, got in zip(shape, array.shape, strict=True)
    )
    if not fits or array.dtype.kind not in "biuf":
        shown = f"{array.dtype} {list(array.shape)}"
        raise ValueError(f"fields[{name!r}][{i}] must be numbers [{form}], got {shown}")
    return array


def _boxes(name: str, values: Sequence[Any]) -> Ragged:
    from torchvision import tv_tensors
    from torchvision.transforms.v2 import functional

    corners = tv_tensors.BoundingBoxFormat.XYXY
    parts = []
    for i, value in enumerate(values):
        if isinstance(value, tv_tensors.BoundingBoxes) and value.format != corners:
            if tv_tensors.is_rotated_bounding_format(value.format):
                rule = "must be boxes whose sides are along the image's"
                raise ValueError(f"fields[{name!r}][{i}] {rule}, got the format {value.format.value}")
            plain = value.as_subclass(torch.Tensor).double()
            value = functional.convert_bounding_box_format(plain, old_format=value.format, new_format=corners)
        parts.append(_array(name, i, value, "M", 4).astype(np.float32))
    return Ragged.of(parts, np.zeros((0, 4), np.float32))


def _labels(name: str, values: Sequence[Any]) -> Ragged:
    parts = []
    for i, value in enumerate(values):
        array = _array(name, i, value, "M")
        if len(array) and array.dtype.kind not in "iu":
            raise ValueError(f"fields[{name!r}][{i}] must be integers [M], got {array.dtype} {list(array.shape)}")
        if array.dtype == np.uint64 and (array > np.iinfo(np.int64).max).any():
            raise ValueError(f"fields[{name!r}][{i}] must fit into int64, got {show(array.max().item())}")
        parts.append(array.astype(np.int64))
    return Ragged.of(parts, np.zeros(0, np.int64))


def keypoints_of(name: str, values: Sequence[Any]) -> Ragged:
    """Keypoints [M, K, 3] of each sample as a column. Raises ValueError; BadSampleError for an unknown visibility."""
    parts = [_array(name, i, value, "M", "K", 3).astype(np.float32) for i, value in enumerate(values)]
    for i, part in enumerate(parts):
        finite, known = np.isfinite(part).all(axis=(1, 2)), np.isin(part[:, :, 2], (0, 1, 2)).all(axis=1)
        for j in np.flatnonzero(finite & ~known)[:1].tolist():  # of others it is said where they are mapped
            rule = f"{name}[{j}] must have a visibility of 0, 1 or 2, got {show(part[j, :, 2].tolist())}"
            raise BadSampleError("record", rule).located(i, f"images[{i}]")
    # rows without any instance say a number, too, unless they are an empty list
    numbers = {part.shape[1] for part in parts if len(part)} or {max((part.shape[1] for part in parts), default=0)}
    if len(numbers) > 1:
        shown = ", ".join(map(str, sorted(numbers)))
        raise ValueError(f"fields[{name!r}] must have the same number of keypoints in each row, got {shown}")
    count = numbers.pop()
    empty = np.zeros((0, count, 3), np.float32)
    return Ragged.of([part if len(part) else empty for part in parts], empty)


def _instances(name: str, i: int, value: Any, size: Sequence[int]) -> list[Any]:
    """One mask for each instance."""
    masks = _array(name, i, value, "M", *size) != 0
    return list(masks.astype(np.uint8))


def _levels(name: str, i: int, value: Any, size: Sequence[int]) -> Bytes:
    mask = _array(name, i, value, *size)
    if mask.dtype.kind == "f" or not 0 <= int(mask.min()) <= int(mask.max()) <= 255:
        raise ValueError(
            f"fields[{name!r}][{i}] must be whole numbers of 0 to 255, got {mask.dtype} of {mask.min()} to {mask.max()}"
        )
    return mask.astype(np.uint8)
