"""A dataset of PyTorch as a source: files that gpuflow reads itself, or encoded bytes that the dataset gives."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, final
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch.utils.data import Subset
from torchvision.datasets import DatasetFolder

from gpuflow.arrays import Array, Bytes
from gpuflow.errors import ConfigError, LoaderError, Problem, is_system_fault, show, system_fault
from gpuflow.loader.transform import for_numpy
from gpuflow.sources import Allocate, Payload, Source
from gpuflow.sources.base import fingerprint
from gpuflow.sources.files import FileSource
from gpuflow.sources.labels import loses_digits
from gpuflow.sources.paths import PathTableBuilder
from gpuflow.sources.storage import LocalStorage

PLACE = "gpuflow.wrap:"
"""Where its arguments are, for problems."""


def bytes_loader(path: str | os.PathLike[str]) -> bytes:
    """The content of a file: the `loader` that an ImageFolder for `gpuflow.wrap` has.

    torchpipe's training integration calls it `cv2_loader`.
    """
    return Path(path).read_bytes()


def source_of(dataset: Any, *, thread_safe: bool) -> Source:
    """Return the samples of a dataset, in its order.

    The files of an ImageFolder, or of a Subset of one, are read by gpuflow. Any other dataset is asked for its samples:
    by several threads at once if it is thread-safe.

    Raises:
        ConfigError: it does not give encoded bytes and labels.
    """
    if len(dataset) == 0:
        raise _refused("must have samples, got none", action="check the folder, or the indices of the subset")
    found = _files(dataset)
    if found is None:
        return DatasetSource(dataset, nullcontext() if thread_safe else _lock_of(dataset))
    samples, folder = found
    table = PathTableBuilder()
    table.add([os.fspath(path) for path, _ in samples])
    labels = np.array([label for _, label in samples], np.int64)
    return FileSource(LocalStorage(), table.build(), labels, tuple(folder.classes), root=os.fspath(folder.root))


def files_hash(dataset: Any) -> int | None:
    """A hash, in this process, of the files and labels that gpuflow reads itself; None if the dataset is asked for its
    samples."""
    found = _files(dataset)
    return None if found is None else hash(tuple(map(tuple, found[0])))


def _refused(rule: str, value: object = None, action: str = "", path: tuple[str, ...] = ()) -> ConfigError:
    got = {} if value is None else {"value": value}
    at = ("dataloader", "dataset", *path)
    return ConfigError([Problem(PLACE, rule, action=action, path=at, code="config.type", **got)])


def _files(dataset: Any) -> tuple[list[tuple[str, int]], DatasetFolder] | None:
    """The (path, label) of each sample and the folder they are in; None if only the dataset can give its samples."""
    if isinstance(dataset, Subset) and _reads_as(dataset, Subset):
        found = _files(dataset.dataset)
        return None if found is None else ([found[0][i] for i in dataset.indices], found[1])
    if not isinstance(dataset, DatasetFolder):
        return None
    if dataset.transform is not None:
        action = "pass it as transforms_gpu, and give the dataset none"
        raise _refused(
            "must be None, because the dataset gives encoded bytes", dataset.transform, action, ("transform",)
        )
    plain = _reads_as(dataset, DatasetFolder) and dataset.target_transform is None
    if not plain or dataset.loader is not bytes_loader:
        return None
    samples = dataset.samples
    return (samples, dataset) if all(isinstance(label, int) for _, label in samples) else None


def _reads_as(dataset: Any, kind: type) -> bool:
    """Whether its samples are those of this class, and not what a subclass makes of them."""
    methods = "__getitem__", "__getitems__"
    return all(getattr(type(dataset), name, None) is getattr(kind, name, None) for name in methods)


_LOCKS: WeakValueDictionary[int, threading.Lock] = WeakValueDictionary()
"""One for each dataset that is in use, by its id."""


def _lock_of(dataset: Any) -> threading.Lock:
    """Return the lock that all loaders of a dataset share, and those of its Subsets."""
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    return _LOCKS.setdefault(id(dataset), threading.Lock())


@final
class DatasetSource:
    """The samples of a map-style dataset, each (encoded bytes, label), read on gpuflow's threads.

    lock: held while the dataset is called.

    A label is known once its sample was read, and may be another one the next time: payloads have the labels of their
    samples, `labels` has zeros. All labels have the form of the first.
    """

    shard_sizes = None
    storage = None

    def __init__(self, dataset: Any, lock: AbstractContextManager[object]) -> None:
        self._dataset, self._lock = dataset, lock
        _, first = self._sample(0)
        self.labels: Array = np.zeros((len(dataset), *first.shape), first.dtype)
        self.classes = tuple(map(str, getattr(dataset, "classes", ())))

    @property
    def fingerprint(self) -> str:
        """Of the number of samples and the classes: nothing else is known without reading."""
        return fingerprint(b"", np.empty(0, np.int64), self.classes, [len(self)])

    def __len__(self) -> int:
        return len(self.labels)

    def path(self, index: int) -> str:
        return f"dataset[{index}]"

    def read(self, indices: Sequence[int], allocate: Allocate) -> Payload:
        files: list[bytes | Bytes] = []
        errors: list[str | None] = []
        labels = np.zeros((len(indices), *self.labels.shape[1:]), self.labels.dtype)
        for i, index in enumerate(indices):
            try:
                data, label = self._sample(index)
            except OSError as error:
                if is_system_fault(error):
                    raise system_fault(error, self.path(index)) from error
                files.append(b"")
                errors.append(f"cannot be read: {error}")
                continue
            if (label.shape, label.dtype) != (self.labels.shape[1:], self.labels.dtype):
                raise LoaderError(
                    f"{self.path(index)} has a label of {label.dtype} {list(label.shape)}, and the first sample has "
                    f"one of {self.labels.dtype} {list(self.labels.shape[1:])}; give all samples labels of one form"
                )
            labels[i] = label
            files.append(data)
            errors.append(None)
        return replace(Payload.of(files, allocate), errors=errors, labels=labels)

    def _sample(self, index: int) -> tuple[bytes | Bytes, Array]:
        """Raises what the dataset does, with a note that names the sample."""
        try:
            several = getattr(self._dataset, "__getitems__", None)  # which a DataLoader prefers
            with self._lock:
                sample = several([index])[0] if several else self._dataset[index]
        except Exception as error:
            error.add_note(f"raised by {self.path(index)}, which gpuflow.wrap read")
            raise
        pair = tuple(sample) if isinstance(sample, (tuple, list)) else (sample,)
        data = _encoded(pair[0])
        label = _label(pair[1]) if len(pair) == 2 else None
        if data is None or label is None:
            shown = ", ".join(show(part) if isinstance(part, float) else type(part).__name__ for part in pair)
            raise _refused(
                f"must give (bytes, label) for each sample, and sample {index} is ({shown})",
                action="pass loader=gpuflow.bytes_loader to ImageFolder, or return the file's bytes and a number or "
                "tensor that int64 or float32 holds",
            )
        return data, label

    def close(self) -> None:
        """The dataset is the caller's."""


def _encoded(data: Any) -> bytes | Bytes | None:
    """Encoded bytes as they are, also those of torchvision.io.read_file; None for anything else."""
    if isinstance(data, (bytes, bytearray)):
        return bytes(data)
    array = data.numpy() if isinstance(data, torch.Tensor) and data.device.type == "cpu" else data
    return array if isinstance(array, np.ndarray) and array.dtype == np.uint8 and array.ndim == 1 else None


def _label(label: Any) -> Array | None:
    """A number or an array of numbers as int64 or float32; None for anything else, and for numbers that they cannot
    hold. Tuples and lists are something else, because a DataLoader gives these one tensor for each of their places."""
    if isinstance(label, (tuple, list)):
        return None
    try:
        array = np.asarray(for_numpy(label) if isinstance(label, torch.Tensor) else label)
    except (TypeError, ValueError):  # such as lists of different lengths, or a tensor on a GPU
        return None
    if array.dtype.kind == "f":
        return None if loses_digits(array).any() else array.astype(np.float32)
    if array.dtype.kind not in "biu" or (array.dtype.kind == "u" and (array > np.iinfo(np.int64).max).any()):
        return None
    return array.astype(np.int64)
