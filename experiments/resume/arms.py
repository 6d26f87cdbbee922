"""Makes the loader of each arm of resume, as its library's documentation recommends for resuming within an epoch."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
BATCH = 8
"""Samples of a step on all ranks."""
WORKERS = 1
SIZE = 64

Batches = Iterator[tuple[list[int], torch.Tensor]]


def transform() -> Any:
    from torchvision.transforms import v2

    return v2.Compose(
        [
            v2.RandomResizedCrop(SIZE),
            v2.RandomHorizontalFlip(),
            v2.ToImage(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
        ]
    )


def photographs(folder: str) -> list[Path]:
    return sorted(Path(folder).glob("*/*"))


class Gpuflow:
    """A loader of gpuflow."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self.state_dict, self.load_state_dict = loader.state_dict, loader.load_state_dict

    def epoch(self, number: int) -> Batches:
        self._loader.set_epoch(number)
        for batch in self._loader:
            yield batch.indices[batch.valid].tolist(), batch.images[batch.valid]


def gpuflow(data: str, ranks: int) -> Gpuflow:
    import gpuflow

    return Gpuflow(gpuflow.load(HERE / "photos.yaml", overrides=[f"source.folder={data}"]))


class Photographs(torch.utils.data.Dataset[tuple[int, torch.Tensor]]):
    """A map-style dataset."""

    def __init__(self, folder: str) -> None:
        self._files, self._transform = photographs(folder), transform()

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        from PIL import Image

        return index, self._transform(Image.open(self._files[index]).convert("RGB"))


class StatefulDataLoader:
    """torchdata's, with its sampler for several ranks."""

    def __init__(self, data: str, ranks: int) -> None:
        from torchdata.stateful_dataloader import StatefulDataLoader as Loader
        from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

        dataset = Photographs(data)
        self._sampler = StatefulDistributedSampler(dataset, shuffle=True, seed=0)
        self._loader = Loader(dataset, batch_size=BATCH // ranks, sampler=self._sampler, num_workers=WORKERS)
        self.state_dict, self.load_state_dict = self._loader.state_dict, self._loader.load_state_dict

    def epoch(self, number: int) -> Batches:
        self._sampler.set_epoch(number)
        for indices, images in self._loader:
            yield indices.tolist(), images


class LitData:
    """LitData's StreamingDataLoader."""

    def __init__(self, data: str, ranks: int) -> None:
        import litdata

        prepare = transform()

        class Streamed(litdata.StreamingDataset):  # type: ignore[misc]  # LitData ships no types
            def __getitem__(self, index: Any) -> Any:
                from PIL import Image

                sample = super().__getitem__(index)
                return sample["index"], prepare(Image.open(io.BytesIO(sample["image"])).convert("RGB"))

        dataset = Streamed(data, shuffle=True, seed=0)
        self._loader = litdata.StreamingDataLoader(dataset, batch_size=BATCH // ranks, num_workers=WORKERS)
        self.state_dict, self.load_state_dict = self._loader.state_dict, self._loader.load_state_dict

    def epoch(self, number: int) -> Batches:
        """The loader itself counts epochs."""
        for indices, images in self._loader:
            yield indices.tolist(), images


def streamed(sample: tuple[int, str]) -> dict[str, Any]:
    return {"index": sample[0], "image": Path(sample[1]).read_bytes()}


def write_streamed(folder: str, out: str) -> None:
    """Write photographs in LitData's format."""
    import litdata

    samples = [(index, str(path)) for index, path in enumerate(photographs(folder))]
    litdata.optimize(streamed, samples, out, chunk_size=BATCH, num_workers=1)


ARMS: dict[str, Callable[[str, int], Any]] = {
    "gpuflow": gpuflow,
    "torchdata": StatefulDataLoader,
    "litdata": LitData,
}
