"""Holds a batch: as the training loop gets it (`Batch`), while it is filled (`Assembly`), and its chunks (`Chunk`)."""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Iterable, Iterator, KeysView, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from gpuflow.arrays import Array, Bools, Bytes, Ints
from gpuflow.errors import suggest
from gpuflow.pipeline.records import Column, Field, Records
from gpuflow.pipeline.stage import Keys
from gpuflow.sources import Payload


class RaggedTensor:
    """Holds a different number of rows for each sample of a batch. `ragged[i]` is a view of the rows of sample i.

    values: the rows of all samples, [M, ...]. offsets: int64 [N + 1]; sample i has the rows offsets[i] to
    offsets[i + 1]. Both are on the batch's device.

    Examples:
        >>> rows = RaggedTensor(torch.tensor([5, 6, 7]), torch.tensor([0, 2, 2, 3]))
        >>> [row.tolist() for row in rows]
        [[5, 6], [], [7]]
    """

    __slots__ = ("_bounds", "offsets", "values")

    def __init__(self, values: torch.Tensor, offsets: torch.Tensor, bounds: Sequence[int] | None = None) -> None:
        """Hold the rows. bounds: the offsets as Python integers, so that nothing waits for a GPU to know them."""
        self.values, self.offsets = values, offsets
        self._bounds = list(bounds) if bounds is not None else offsets.tolist()

    def __len__(self) -> int:
        return len(self._bounds) - 1

    def __getitem__(self, i: int) -> torch.Tensor:
        count, i = len(self), operator.index(i)
        if not -count <= i < count:
            raise IndexError(f"sample {i} of a batch of {count}")
        i %= count
        return self.values[self._bounds[i] : self._bounds[i + 1]]

    def __iter__(self) -> Iterator[torch.Tensor]:
        return map(self.__getitem__, range(len(self)))

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """Keep the memory until a stream has done what is queued on it now, as `torch.Tensor.record_stream`."""
        self.values.record_stream(stream)
        self.offsets.record_stream(stream)

    def __repr__(self) -> str:
        return f"RaggedTensor({len(self)} samples, values {list(self.values.shape)} {self.values.dtype})"


class Batch(tuple[torch.Tensor, Any]):
    """Holds the pair (images, labels), which a training loop unpacks, and attributes that describe its samples.

    A source without labels gives the pair (images, field) if `fields` has one entry, else (images, targets), whose
    second item is what `targets()` returns. In place of images, a pipeline with views has a dict of them.

    images: [N, C, H, W] in the dtype and memory layout that the pipeline ends with. views: name to tensor
    [count, N, C, H, W]. labels: int64 [N]; where the pipeline mixes samples, probabilities of the classes, float32
    [N, classes].
    valid: bool [N], false where a sample was wrapped around to fill the last step of several ranks.
    indices: int64 [N], each sample's index in the source. step: of the epoch, from 0. epoch: from 0.
    fields: what the samples carry besides these, by name; `batch["boxes"]` is `batch.fields["boxes"]`. Fields of one
        size are tensors, boxes and what belongs to them are `RaggedTensor`s, texts and other objects are lists.

    Examples:
        >>> batch = Batch((torch.zeros(2, 3, 8, 8), torch.tensor([4, 0])), fields={"score": torch.tensor([0.5, 1.0])})
        >>> images, labels = batch
        >>> images is batch.images, labels.tolist(), batch["score"].tolist()
        (True, [4, 0], [0.5, 1.0])
    """

    valid: torch.Tensor
    indices: torch.Tensor
    step: int
    epoch: int
    fields: Mapping[str, Any] = MappingProxyType({})
    _schema: Sequence[Field] = ()
    _names: Callable[[], list[str]]

    def __new__(cls, pair: Iterable[Any], **known: Any) -> Batch:
        """Return a batch of `tuple(pair)`, as tools need that rebuild a container around moved tensors; attributes are
        then lost."""
        self = super().__new__(cls, pair)
        vars(self).update(known)
        return self

    @property
    def images(self) -> torch.Tensor:
        return self[0]

    @property
    def views(self) -> dict[str, torch.Tensor]:
        """Return the images by the names of the views, if the pipeline has views; there is no `images` then."""
        views: Any = self[0]
        assert isinstance(views, dict), "its pipeline has no views"
        return views

    @property
    def labels(self) -> torch.Tensor:
        labels: torch.Tensor = self[1]
        return labels

    @property
    def names(self) -> list[str]:
        """Return for each sample its path, its URL, or its name in a shard or table. They are looked up by each call.

        Of a bad sample that was replaced, it is the name of the sample in its place.
        """
        return self._names()

    def __getitem__(self, key: str | int | slice) -> Any:  # type: ignore[override]
        if not isinstance(key, str):
            return super().__getitem__(key)
        if key not in self.fields:
            known = suggest(key, self.fields) if self.fields else "the source declares no fields"
            raise KeyError(f"no field {key!r}; {known}")
        return self.fields[key]

    def __contains__(self, key: object) -> bool:
        return key in self.fields if isinstance(key, str) else super().__contains__(key)

    def get(self, key: str, default: Any = None) -> Any:
        """Return a field, or `default` where there is none of this name.

        Examples:
            >>> Batch((torch.zeros(1), torch.zeros(1))).get("score", "no score")
            'no score'
        """
        return self.fields.get(key, default)

    def keys(self) -> KeysView[str]:
        """Return the names of the fields."""
        return self.fields.keys()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle copies of the tensors: the fields of a batch share one block of memory, which torch.save refuses."""
        known = {**vars(self), "fields": _copied(dict(self.fields))}
        if "_names" in known:  # a source may not be pickled
            known["_names"] = partial(list, self.names)
        return partial(Batch, **known), (_copied(tuple(self)),)

    def targets(self, *, background: bool = True) -> list[dict[str, Any]]:
        """Return for each sample the dict that torchvision's detectors take: boxes, labels, masks, keypoints, image_id.

        background: count the labels of boxes from 1, because these detectors keep 0 for the background; without it they
        are those of the field, views like everything else here.
        """
        return targets_of(self[0], self.indices, self.fields, self._schema, background=background)


def _copied(value: Any) -> Any:
    """Return a copy of images, fields or targets in which no two tensors share memory."""
    match value:
        case RaggedTensor():
            return RaggedTensor(value.values.clone(), value.offsets.clone())
        case torch.Tensor():
            return value.clone()
        case dict():
            return {key: _copied(item) for key, item in value.items()}
        case list() | tuple():
            return type(value)(map(_copied, value))
        case _:
            return value


def targets_of(
    images: torch.Tensor | Mapping[str, torch.Tensor],
    indices: torch.Tensor,
    fields: Mapping[str, Any],
    schema: Sequence[Field],
    *,
    background: bool = True,
) -> list[dict[str, Any]]:
    """Return what `Batch.targets` returns, for a batch that is not made yet."""
    from torchvision import tv_tensors

    canvas = images.shape[-2:] if isinstance(images, torch.Tensor) else (0, 0)  # views carry no boxes
    classes: dict[str, Any] = {
        "boxes": partial(tv_tensors.BoundingBoxes, format="XYXY", canvas_size=canvas),
        "mask": tv_tensors.Mask,
    }
    renamed = names_of_detectors(schema)
    columns: dict[str, tuple[Any, Any]] = {"image_id": (indices, None)}
    for declared in schema:
        name = renamed.get(declared.name, declared.name)
        columns[name] = fields[declared.name], classes.get(declared.type)
        if declared.labels:
            labels = fields[declared.labels]
            counted = _counted_from_1(labels) if background else labels
            columns[renamed.get(declared.labels, declared.labels)] = counted, None
    return [
        {name: column[i] if wrap is None else wrap(column[i]) for name, (column, wrap) in columns.items()}
        for i in range(len(indices))
    ]


def names_of_detectors(schema: Sequence[Field]) -> dict[str, str]:
    """Return the columns that get the names which detectors expect, each the first of its kind.

    A column that has such a name already keeps it; no other one gets it. The labels of boxes without any are "".
    """
    boxes = [declared for declared in schema if declared.type == "boxes"]
    columns = {
        "boxes": [declared.name for declared in boxes],
        "labels": [declared.labels for declared in boxes],
        "keypoints": [declared.name for declared in schema if declared.type == "keypoints"],
        "masks": [declared.name for declared in schema if declared.type == "mask" and declared.instances],
    }
    own = {name for declared in schema for name in (declared.name, declared.labels)}
    return {names[0]: expected for expected, names in columns.items() if names and expected not in own}


def _counted_from_1(labels: RaggedTensor) -> RaggedTensor:
    return RaggedTensor(labels.values + 1, labels.offsets, labels._bounds)


@dataclass(slots=True)
class Assembly:
    """Holds a batch while it is being filled. Rows are samples.

    indices, valid [B]: of each row's sample.
    labels [B]: looked up once all samples are read and bad ones are replaced; mixed labels are [B, classes].
    read_labels [B, ...]: those that came with the samples; None if the source knows them by index.
    kept [B]: false where a bad sample was skipped.
    unfinished: chunks that are not decoded yet.
    slots [B, ...]: the pixels, allocated for the first chunk: an array, on the GPU a tensor, or `ViewSlots` of either;
        of a whole batch of views on the GPU a dict of tensors.
    offloaded: how many of its last rows the CPU decodes next to a GPU. offload_memory: where it decodes them to.
    sent: labels, valid and indices on the GPU, views of one block of memory. They and the slots are complete once the
        event `ready` has passed.
    pieces: mapped records of some rows, a tuple of the rows and columns each. fields: the whole of them, as in `Batch`.
    decoded: done once all chunks are decoded, or there is an error, or the epoch is being ended.
    """

    step: int
    positions: Ints
    indices: Ints
    valid: Bools
    kept: Bools
    unfinished: int
    labels: Array = field(default_factory=lambda: np.empty(0, np.int64))
    read_labels: Array | None = None
    slots: Any = None
    offloaded: int = 0
    offload_memory: Bytes | None = None
    sent: Sequence[torch.Tensor] = ()
    ready: torch.cuda.Event | None = None
    pieces: list[tuple[Ints, Mapping[str, Column]]] = field(default_factory=list)
    fields: Mapping[str, Any] = field(default_factory=dict)
    error: BaseException | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)
    decoded: Future[None] = field(default_factory=Future)

    @property
    def first_offloaded(self) -> int:
        """Return the first row that is offloaded; the number of rows if none is."""
        return len(self.positions) - self.offloaded

    def add_labels(self, start: int, labels: Array | None) -> None:
        """Set the labels of the rows from `start` on to those that came with their samples, if they did."""
        if labels is None:
            return
        with self.lock:
            if self.read_labels is None:
                self.read_labels = np.zeros((len(self.positions), *labels.shape[1:]), labels.dtype)
            self.read_labels[start : start + len(labels)] = labels

    def fail(self, error: BaseException) -> None:
        """Remember the first error; the loader raises it in place of this batch."""
        with self.lock:
            self.error = self.error or error
        self.end()

    def end(self) -> None:
        """Stop waiting for the chunks of this batch. A second call does nothing."""
        with suppress(InvalidStateError):
            self.decoded.set_result(None)


@dataclass(slots=True)
class Chunk:
    """Names rows [start, stop) of a batch, and holds what is known of them. It is the item that travels through SPDL.

    replacement: while a bad sample is being replaced, the index of the sample that is tried in its place.
    keys: the random keys of its samples, once they are known. records: those of its samples, if stages take values.
    """

    batch: Assembly
    start: int
    stop: int
    last: bool
    payload: Payload | None = None
    prepared: Any = None
    replacement: int | None = None
    keys: Keys | None = None
    records: Records | None = None

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def indices(self) -> list[int]:
        """Return which samples its rows hold."""
        found: list[int] = self.batch.indices[self.start : self.stop].tolist()
        return found

    @property
    def slots(self) -> Any:
        """Return its rows of the batch's slots."""
        whole = len(self) == len(self.batch.positions)
        return self.batch.slots if whole else self.batch.slots[self.start : self.stop]
