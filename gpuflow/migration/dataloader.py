"""What gpuflow.wrap takes of a DataLoader: its dataset as a source, and the batches that its sampler draws."""

from __future__ import annotations

import base64
import hashlib
import operator
import os
import threading
import warnings
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from typing import Any, final
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, Subset
from torchvision.datasets import DatasetFolder

from gpuflow.arrays import Array, Bytes, Ints
from gpuflow.errors import (
    UNSET,
    Code,
    ConfigError,
    LoaderError,
    Problem,
    StateError,
    is_system_fault,
    show,
    system_fault,
)
from gpuflow.loader.transform import for_numpy
from gpuflow.sources import Allocate, Payload, Source
from gpuflow.sources.base import fingerprint
from gpuflow.sources.labels import loses_digits
from gpuflow.sources.record_table import TableSource, WholeFiles
from gpuflow.sources.storage import LocalStorage, PathTableBuilder

PLACE = "gpuflow.wrap:"
"""Where its arguments are, for problems."""


def bytes_loader(path: str | os.PathLike[str]) -> bytes:
    """Return the content of a file: the `loader` that an ImageFolder for `gpuflow.wrap` has.

    torchpipe's training integration calls it `cv2_loader`.

    Examples:
        >>> Path("image.jpg").write_bytes(b"encoded")
        7
        >>> bytes_loader("image.jpg")
        b'encoded'
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
    files = WholeFiles(LocalStorage(), table.build(), os.fspath(folder.root))
    return TableSource(files, labels, tuple(folder.classes))


def files_hash(dataset: Any) -> int | None:
    """Return a hash, in this process, of the files and labels that gpuflow reads itself.

    None if the dataset is asked for its samples.
    """
    found = _files(dataset)
    return None if found is None else hash(tuple(map(tuple, found[0])))


def problem(
    path: str, rule: str, value: object = UNSET, action: str = "", code: Code = "config.conflict"
) -> ConfigError:
    """Return the error of an argument of `gpuflow.wrap`, or of one of its attributes: dataloader.batch_size.

    Examples:
        >>> problem("dataloader.batch_size", "must be a number of samples", None, "set it")
        ConfigError('gpuflow.wrap: dataloader.batch_size must be a number of samples, got null; set it')
    """
    return ConfigError([Problem(PLACE, rule, value, action, tuple(path.split(".")), code)])


def _refused(rule: str, value: object = UNSET, action: str = "", path: str = "dataloader.dataset") -> ConfigError:
    """Return the error of a dataset."""
    return problem(path, rule, value, action, "config.type")


def _files(dataset: Any) -> tuple[list[tuple[str, int]], DatasetFolder] | None:
    """Return the (path, label) of each sample, and their folder; None if only the dataset can give its samples."""
    if isinstance(dataset, Subset) and _reads_as(dataset, Subset):
        found = _files(dataset.dataset)
        return None if found is None else ([found[0][i] for i in dataset.indices], found[1])
    if not isinstance(dataset, DatasetFolder):
        return None
    if dataset.transform is not None:
        rule, action = "must be None, because the dataset gives encoded bytes", "pass it as transforms_gpu instead"
        raise _refused(rule, dataset.transform, action, "dataloader.dataset.transform")
    plain = _reads_as(dataset, DatasetFolder) and dataset.target_transform is None
    if not plain or dataset.loader is not bytes_loader:
        return None
    samples = dataset.samples
    return (samples, dataset) if all(isinstance(label, int) for _, label in samples) else None


def _reads_as(dataset: Any, kind: type) -> bool:
    """Return True if its samples are those of this class, and not what a subclass makes of them."""
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
    """Reads the samples of a map-style dataset, each (encoded bytes, label), on gpuflow's threads.

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
        """Return the hash of the number of samples and of the classes: nothing else is known without reading."""
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
        """Return a sample's bytes and label. Raises what the dataset does, with a note that names the sample."""
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
        """Do nothing: the dataset belongs to the caller."""


def _encoded(data: Any) -> bytes | Bytes | None:
    """Return encoded bytes as they are, also those of torchvision.io.read_file; None for anything else."""
    if isinstance(data, (bytes, bytearray)):
        return bytes(data)
    array = data.numpy() if isinstance(data, torch.Tensor) and data.device.type == "cpu" else data
    return array if isinstance(array, np.ndarray) and array.dtype == np.uint8 and array.ndim == 1 else None


def _label(label: Any) -> Array | None:
    """Return a number or an array of numbers as int64 or float32.

    None for anything else, and for numbers that these types cannot hold. Tuples and lists are something else, because
    a DataLoader gives them one tensor for each of their places.
    """
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


# --- the sampler ------------------------------------------------------------------------------------------------------


@final
class SamplerDraws:
    """Draws the batches of each epoch of a DataLoader with a batch sampler.

    They are those that the DataLoader would have given: random numbers are drawn from the same generators in the same
    order. samples: the number of samples of the dataset.
    """

    def __init__(self, dataloader: DataLoader[Any], samples: int) -> None:
        self._dataloader, self._samples = dataloader, samples
        self._begun = False
        self._state: dict[str, Any] = {}
        self._last: tuple[int, str, list[int]] | None = None
        self._warned = False

    def draw(self, epoch: int, start: int) -> tuple[Ints, list[int]]:
        """Return the samples of an epoch, and how many are in each batch.

        start: with a number above 0 the epoch of the state that was restored is drawn again.

        Raises:
            StateError: the sampler drew another order than the state's. LoaderError: it gave what is no batch.
        """
        wanted = self._state if start else None
        with torch.random.fork_rng(devices=[], enabled=wanted is not None):
            if wanted is not None:
                self._set_generators(wanted["generators"])
                self._begun = wanted["begun"]
            begun, generators = self._begun, self._generators()
            indices, sizes = self._batches()
        order = _digest(indices, sizes)
        if wanted is not None and order != wanted["order"]:
            raise StateError(
                f"the sampler drew another order for epoch {epoch} than the one that the state was taken in; call its "
                f"set_epoch({epoch}), or seed what it draws from as before, or start a new epoch with "
                f"set_epoch({epoch + 1})"
            )
        self._state = {"order": order, "generators": generators, "begun": begun}
        self._warn_of_the_same_order(epoch, order)
        return indices, sizes

    def _warn_of_the_same_order(self, epoch: int, order: str) -> None:
        """Warn if a sampler that shuffles by its epoch, such as DistributedSampler, was not given the next one."""
        by_epoch = [
            one
            for one in self.samplers
            if hasattr(one, "set_epoch")
            and isinstance(getattr(one, "epoch", None), int)
            and getattr(one, "shuffle", True)
        ]
        now = epoch, order, [one.epoch for one in by_epoch]
        last, self._last = self._last, now
        if by_epoch and last is not None and last[0] != epoch and last[1:] == now[1:] and not self._warned:
            self._warned = True
            warnings.warn(
                f"{type(by_epoch[-1]).__name__} gave epoch {epoch} the order of epoch {last[0]}: its epoch is still "
                f"{now[2][-1]}; call its set_epoch before each epoch, or that of what gpuflow.wrap returned",
                stacklevel=2,
            )

    def state(self, *, within_epoch: bool) -> dict[str, Any]:
        """Return a hash of the last order, torch's generators before it was drawn, and whether one was drawn before.

        Between epochs, return the generators as they are, without an order.
        """
        return dict(self._state) if within_epoch else {"generators": self._generators(), "begun": self._begun}

    def restore(self, state: Mapping[str, Any], *, within_epoch: bool) -> None:
        """Have the next epoch drawn as the one of this state. Raises StateError if it is none.

        Between epochs this sets the generators that the DataLoader and its samplers were given, and not torch's own.
        """
        try:
            if not within_epoch:
                self._set_generators([str(text) for text in state["generators"]], with_torchs_own=False)
                self._begun = bool(state["begun"])
                return
            self._state = {
                "order": str(state["order"]),
                "generators": [str(text) for text in state["generators"]],
                "begun": bool(state.get("begun", False)),
            }
        except (KeyError, TypeError) as error:
            raise StateError(f"not a wrapped loader's state: {error!r}; pass what state_dict() returned") from error

    def set_epoch(self, epoch: int) -> None:
        """Pass the epoch on to the samplers that want to know it."""
        for sampler in self.samplers:
            with suppress(AttributeError):
                sampler.set_epoch(epoch)

    @property
    def samplers(self) -> list[Any]:
        """Return the batch sampler, and the sampler that it groups."""
        batch_sampler = self._dataloader.batch_sampler
        grouped = getattr(batch_sampler, "sampler", None)  # which may be an array
        return [batch_sampler] if grouped is None else [batch_sampler, grouped]

    @property
    def drawn(self) -> bool:
        """Return False if the DataLoader gives each sample once, as without `shuffle`, a sampler and `drop_last`."""
        batches = self._dataloader.batch_sampler
        return type(batches) is not BatchSampler or type(batches.sampler) is not SequentialSampler or batches.drop_last

    def _batches(self) -> tuple[Ints, list[int]]:
        dataloader, count = self._dataloader, len(self._dataloader)
        assert dataloader.batch_sampler is not None
        iterator = iter(dataloader.batch_sampler)
        if not (self._begun and dataloader.persistent_workers):  # the seed of a DataLoader's workers
            torch.empty((), dtype=torch.int64, device="cpu").random_(generator=dataloader.generator)
        self._begun = True
        batches = [list(batch) for batch in islice(iterator, count + 1)]
        sizes = [len(batch) for batch in batches]
        if len(batches) > count:
            raise LoaderError(
                f"the sampler gave more than the {count} batches that its length says; correct its length"
            )
        if 0 in sizes:
            raise LoaderError(f"the sampler gave an empty batch, number {sizes.index(0)}; leave it out")
        try:
            indices = np.fromiter(map(operator.index, chain.from_iterable(batches)), np.int64)
        except (TypeError, ValueError) as error:
            wrong = next((index for index in chain.from_iterable(batches) if not hasattr(index, "__index__")), None)
            raise LoaderError(f"the sampler must give indices of the dataset, whole numbers, got {wrong!r}") from error
        if len(indices) and not 0 <= indices.min() <= indices.max() < self._samples:
            wrong = next(i for i in indices.tolist() if not 0 <= i < self._samples)
            raise LoaderError(f"the sampler gave the index {wrong}, and the dataset has {self._samples} samples")
        return indices, sizes

    def _own_generators(self) -> list[torch.Generator]:
        """Return the generators besides torch's own that the DataLoader and its samplers draw from."""
        found = [getattr(holder, "generator", None) for holder in (self._dataloader, *self.samplers)]
        return list(dict.fromkeys(one for one in found if isinstance(one, torch.Generator)))

    def _generators(self) -> list[str]:
        states = [one.get_state() for one in (torch.default_generator, *self._own_generators())]
        return [base64.b64encode(state.numpy().tobytes()).decode() for state in states]

    def _set_generators(self, texts: list[str], *, with_torchs_own: bool = True) -> None:
        own = self._own_generators()
        if len(texts) != 1 + len(own):
            raise StateError("the state was taken with a sampler of other generators; build the DataLoader as before")
        try:
            states = [torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8) for text in texts]
            for generator, state in zip([torch.default_generator, *own], states, strict=True):
                if with_torchs_own or generator is not torch.default_generator:
                    generator.set_state(state)
        except (ValueError, RuntimeError) as error:
            raise StateError(f"the state's generators are damaged: {error}; pass what state_dict() returned") from error


def _digest(indices: Ints, sizes: list[int]) -> str:
    digest = hashlib.blake2b(np.array(sizes, np.int64).tobytes(), digest_size=8)
    digest.update(indices.tobytes())
    return digest.hexdigest()
