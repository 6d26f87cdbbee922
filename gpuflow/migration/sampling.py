"""Draws the batches of a DataLoader's sampler, as the DataLoader does, and draws an epoch again to resume it."""

from __future__ import annotations

import base64
import hashlib
import operator
import warnings
from collections.abc import Mapping
from contextlib import suppress
from itertools import chain, islice
from typing import Any, final

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from gpuflow.arrays import Ints
from gpuflow.errors import LoaderError, StateError


@final
class SamplerDraws:
    """The batches of each epoch of a DataLoader with a batch sampler.

    They are those that the DataLoader would have given: random numbers are drawn from the same generators in the same
    order. samples: in the dataset.
    """

    def __init__(self, dataloader: DataLoader[Any], samples: int) -> None:
        self._dataloader, self._samples = dataloader, samples
        self._begun = False
        self._state: dict[str, Any] = {}
        self._last: tuple[int, str, list[int]] | None = None
        self._warned = False

    def __len__(self) -> int:
        return len(self._dataloader)

    def draw(self, epoch: int, start: int) -> tuple[Ints, list[int]]:
        """The samples of an epoch, and how many are in each batch.

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
        """A hash of the order of the epoch that was drawn last, and torch's generators before it was drawn; whether an
        epoch was drawn before it. Between epochs the generators as they are, without an order."""
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
        """The batch sampler, and the sampler that it groups."""
        batch_sampler = self._dataloader.batch_sampler
        grouped = getattr(batch_sampler, "sampler", None)  # which may be an array
        return [batch_sampler] if grouped is None else [batch_sampler, grouped]

    @property
    def drawn(self) -> bool:
        """Return False if the DataLoader gives each sample once, as without `shuffle`, a sampler and `drop_last`."""
        batches = self._dataloader.batch_sampler
        return type(batches) is not BatchSampler or type(batches.sampler) is not SequentialSampler or batches.drop_last

    def _batches(self) -> tuple[Ints, list[int]]:
        dataloader, count = self._dataloader, len(self)
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
        """The generators besides torch's own that the DataLoader and its samplers draw from."""
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
