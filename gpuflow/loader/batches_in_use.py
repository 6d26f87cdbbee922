"""Which of a loader's batches on a GPU are in use by the consumer or by queued GPU work, also across epochs."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field

import torch

from gpuflow.runtime.admission import Completion

__all__ = ["BatchesInUse", "Images", "Unused"]

Images = torch.Tensor | dict[str, torch.Tensor]
"""[B, C, H, W], or of a pipeline with views for each a tensor [count, B, C, H, W]."""

_MOST_QUERIES = 4
"""How often to ask, a millisecond or more apart, whether the consumer still refers to the images of a batch that the
GPU has finished with. If it still holds them then, it is assumed to keep them, and the loader continues."""


class Unused:
    """Done once a batch is not in use: the GPU has passed `event`, and the consumer does not refer to the images.

    Most loops drop a batch just after they get the next one. Without waiting for that, the loader would allocate memory
    for one more batch and keep it for the whole run. Images that the consumer keeps delay this by a few queries.
    """

    def __init__(self, event: Completion, images: weakref.ref[torch.Tensor]) -> None:
        self._event, self._images, self._queries_left = event, images, _MOST_QUERIES

    def query(self) -> bool:
        if not self._event.query():
            return False
        self._queries_left -= 1
        return self._images() is None or self._queries_left <= 0


@dataclass(slots=True)
class BatchesInUse:
    """The batches that the consumer got and that it, or GPU work that it queued, may still use.

    Their memory is not free when the next epoch begins, so they count as batches in flight there.

    last: the images of the newest one, if any. earlier: for each one before it, when it is not in use any more.
    """

    last: weakref.ref[torch.Tensor] | None = None
    earlier: list[Completion] = field(default_factory=list)

    def add(self, images: Images, event: Completion) -> Completion | None:
        """Add a batch that the consumer gets now. Returns when the one before is not in use any more, if there is one.

        event: after all work that the consumer has queued so far.
        """
        unused = None if self.last is None else Unused(event, self.last)
        if unused is not None:
            self.earlier = [*self._pending(), unused]
        self.last = weakref.ref(next(iter(images.values())) if isinstance(images, dict) else images)
        return unused

    def in_flight(self, event: Completion) -> list[Completion | None]:
        """For each batch in use, when it is not any more; None for the newest one, if the consumer still refers to it.

        event: as for `add`.
        """
        self.earlier = self._pending()
        if self.last is not None and self.last() is None:  # queued work may still use it
            self.last = None
            self.earlier.append(event)
        return [*self.earlier, *([] if self.last is None else [None])]

    def _pending(self) -> list[Completion]:
        return [one for one in self.earlier if not one.query()]
