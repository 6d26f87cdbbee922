"""`gpuflow.wrap`: turns a DataLoader whose dataset gives encoded bytes into a loader of gpuflow."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal, Self, final

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate
from torchvision import transforms as v1
from torchvision.transforms import v2

from gpuflow.arrays import Bytes
from gpuflow.config import AddedStages, Config, read_config
from gpuflow.config.yaml_file import read_yaml
from gpuflow.decode.preset import Preset
from gpuflow.errors import ConfigError, LoaderError, Problem
from gpuflow.loader.assemble import build_loader
from gpuflow.loader.batch import Batch
from gpuflow.loader.loader import Loader
from gpuflow.loader.sampler import ListedEpochs
from gpuflow.migration.dataloader import PLACE, SamplerDraws, files_hash, problem, source_of
from gpuflow.migration.from_torchvision import read_transform
from gpuflow.pipeline.stage import Stage
from gpuflow.pipeline.views import ViewsProgram
from gpuflow.runtime.ranks import Ranks
from gpuflow.vocabulary import stage_table

_CPU, _GPU = "transforms_cpu", "transforms_gpu"
_USUAL_BATCH = 64
"""Samples for which memory is planned where a batch sampler does not say."""


def wrap(
    dataloader: DataLoader[Any],
    config: str | Path,
    transforms_cpu: Any = None,
    transforms_gpu: Any = None,
    cpu_percentage: float | Literal["auto"] = "auto",
    parallel_type: Literal["ddp", "dp"] | None = "ddp",
    local_rank: int | None = None,
    *,
    name: str | None = None,
    device: str | torch.device | None = None,
    overrides: Sequence[str] = (),
    thread_safe: bool = False,
) -> WrappedLoader:
    """Return a loader of gpuflow in place of a DataLoader of PyTorch, with its samples, its sampler and its batches.

    The file's stages, followed by those that the transforms stand for, run on each image in the same way wherever it
    is decoded, with random numbers drawn for each sample. The file's source, batch and shuffle are not used, except for
    `source.seed`.

    Examples:
        >>> from gpuflow.decode.codecs import TEST_JPEG
        >>> from torch.utils.data import DataLoader
        >>> pipelines = "{val: {stages: [decode: {}, resize: {height: 24, width: 32}], batch: {size: 2}}}"
        >>> _ = Path("x.yaml").write_text(f"source: {{folder: photos}}\\npipelines: {pipelines}")
        >>> with wrap(DataLoader([(TEST_JPEG.tobytes(), 7)] * 3, batch_size=2), "x.yaml", device="cpu") as wrapped:
        ...     [labels.tolist() for images, labels in wrapped]
        [[7, 7], [7]]

    Args:
        dataloader: over an ImageFolder with `loader=gpuflow.bytes_loader` and no transform, a Subset of one, or any
            map-style dataset of (encoded bytes, label), which is then asked for its samples. Its sampler, batch
            sampler, batch size and drop_last stay in force; worker processes are not started.
        config: a gpuflow YAML file. Its stages decode and resize, and may do more.
        transforms_gpu: what follows: a Compose of torchvision, a list, or one transform.
        transforms_cpu: the same for images that the CPU decodes. Both must stand for the same stages.
        cpu_percentage: the part of each batch that the CPU decodes next to a GPU, 0 to 1: `decode.cpu_share`. `auto`:
            what the file says.
        parallel_type: `ddp`: this is one of several processes, each with a GPU; `dp` or None: the only one.
        local_rank: the GPU that batches are delivered on; by default torchrun's LOCAL_RANK under `ddp`, else the
            current GPU. Without a GPU that torch sees, batches stay on the CPU.
        name: the pipeline; may be left out if the file has one.
        device: where batches are delivered, in place of `local_rank`.
        overrides: as in `gpuflow.load`.
        thread_safe: several threads may call the dataset's `__getitem__` at once. By default one call follows the
            other, as in each process of a DataLoader, so a slow disk or server costs the sum of all waits. Several
            threads decode in any case, and read the files of an ImageFolder.

    Raises:
        ConfigError: the file, an argument, or a transform that has no stage, each with its place.
    """
    _check_dataloader(dataloader)
    _check_arguments(cpu_percentage, parallel_type, local_rank)
    checked, chosen = _configured(config, name, transforms_cpu, transforms_gpu, cpu_percentage, overrides)
    source = source_of(dataloader.dataset, thread_safe=thread_safe)
    draws = SamplerDraws(dataloader, len(source))
    ranks = _ranks(draws, parallel_type)
    epochs = ListedEpochs(
        draws.draw,
        lambda: len(dataloader),
        samples=len(source),
        batch_size=dataloader.batch_size or getattr(dataloader.batch_sampler, "batch_size", None) or _USUAL_BATCH,
        rank=ranks.rank,
        world_size=ranks.world_size,
        drawn=draws.drawn,
    )
    target = _device(parallel_type, local_rank) if device is None else device
    loader = build_loader(checked, chosen, rank=0, world_size=1, device=target, whole=source, listed=epochs)
    return WrappedLoader(loader, dataloader, draws)


@final
class WrappedLoader:
    """Iterates the batches of a DataLoader, made by gpuflow: `for images, labels in loader`. Made by `gpuflow.wrap`.

    Each `for` has the sampler draw a new epoch, in full, as the DataLoader would: for equal seeds of torch the order is
    the same. `sampler.set_epoch` works as before. A `break` leaves no thread behind; an exception, also one of the
    dataset, is raised in the loop.

    dataset, sampler, batch_sampler, batch_size, drop_last: the DataLoader's. classes: the class names; empty if the
    dataset has none. pipeline: the stages, those of the transforms included. preprocessing: the fingerprint of the
    stages and all their parameters, 16 hex digits.
    """

    def __init__(self, loader: Loader, dataloader: DataLoader[Any], draws: SamplerDraws) -> None:
        self._loader, self._dataloader, self._draws = loader, dataloader, draws
        self._files_hash = files_hash(dataloader.dataset)
        self.dataset: Any = dataloader.dataset
        self.sampler: Any = dataloader.sampler
        self.batch_sampler: Any = dataloader.batch_sampler
        self.batch_size, self.drop_last = dataloader.batch_size, dataloader.drop_last
        self.classes, self.pipeline = loader.classes, loader.pipeline
        self.preprocessing = loader.preprocessing

    def __len__(self) -> int:
        """Return the steps of an epoch: the DataLoader's length."""
        return len(self._dataloader)

    def __iter__(self) -> Iterator[Batch]:
        if files_hash(self.dataset) != self._files_hash:
            raise LoaderError(
                "the dataset has other samples or labels than when gpuflow.wrap read them; call gpuflow.wrap again, "
                f"then set_epoch({self._loader.upcoming_epoch}) of what it returns"
            )
        return iter(self._loader)

    def reset(self) -> None:
        """End the running epoch, if there is one; the next `for` begins the next one. Calling this is never needed."""
        self._loader.reset()

    def set_epoch(self, epoch: int) -> None:
        """Make the next `for` run this epoch, and tell the sampler, if it has a `set_epoch`."""
        self._draws.set_epoch(epoch)
        self._loader.set_epoch(epoch)

    def __repr__(self) -> str:
        return f"<gpuflow.WrappedLoader of {type(self.dataset).__name__} in {len(self)} steps; {self.pipeline!r}>"

    # --- state --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return where training stands, as a JSON value, after the batches that the loop got. `position` counts steps.

        Within an epoch it holds the states of torch's generators from before the sampler drew, a few kB, and a hash of
        what it drew. So an epoch of samplers that draw from torch (DataLoader(shuffle=True), WeightedRandomSampler) or
        are functions of `set_epoch` (DistributedSampler) is resumed exactly. For a sampler that draws from elsewhere,
        the `for` after `load_state_dict` raises StateError, unless it gives the same order again.

        Between epochs it holds the generators that the DataLoader and its samplers were given. Without one the next
        epoch is drawn from torch's own, which is the script's to save and restore (torch.get_rng_state).
        """
        state = self._loader.state_dict()
        return {**state, "sampler": self._draws.state(within_epoch=bool(state["position"]))}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue exactly where `state` was taken: with the same number of ranks, dataset and batches.

        Raises:
            StateError: it is of another seed, dataset or preprocessing, or no state at all.
        """
        self._loader.load_state_dict(state)
        self._draws.restore(state.get("sampler") or {}, within_epoch=bool(state["position"]))

    # --- statistics and shutdown ----------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """See `gpuflow.Loader.stats`."""
        return self._loader.stats()

    def close(self) -> None:
        """End the threads and free the memory. Batches that the loop already has stay valid."""
        self._loader.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# --- checks -----------------------------------------------------------------------------------------------------------


def _check_dataloader(dataloader: Any) -> None:
    """Raise ConfigError if this is no DataLoader whose batches gpuflow can make."""
    if not isinstance(dataloader, DataLoader):
        raise problem("dataloader", "must be a torch.utils.data.DataLoader", type(dataloader).__name__)
    if type(dataloader).__iter__ is not DataLoader.__iter__:
        action = "wrap the DataLoader before another library prepares it, on several ranks with a DistributedSampler"
        raise problem("dataloader", "must iterate as a DataLoader does", type(dataloader).__name__, action)
    if isinstance(dataloader.dataset, IterableDataset):
        action = "use gpuflow.load with source.tar for shards"
        raise problem("dataloader.dataset", "must be a map-style dataset, and is an IterableDataset", action=action)
    if dataloader.batch_sampler is None:
        raise problem("dataloader.batch_size", "must be a number of samples", None, "set it")
    if dataloader.collate_fn is not default_collate:
        name = getattr(dataloader.collate_fn, "__qualname__", type(dataloader.collate_fn).__name__)
        rule = f"must be the default, because gpuflow makes the batches, and is {name}"
        action = "remove it; mixup and cutmix are stages"
        raise problem("dataloader.collate_fn", rule, action=action)
    try:
        len(dataloader)
    except (TypeError, NotImplementedError) as error:
        action = "give it a __len__, the number of batches of an epoch"
        raise problem("dataloader.batch_sampler", "must have a length", action=action) from error


def _check_arguments(cpu_percentage: Any, parallel_type: Any, local_rank: Any) -> None:
    if cpu_percentage != "auto" and not (type(cpu_percentage) in (int, float) and 0 <= cpu_percentage <= 1):
        action = "0.3 stands for 30%"
        raise problem("cpu_percentage", "must be auto or within [0, 1]", cpu_percentage, action)
    if parallel_type not in ("ddp", "dp", None):
        action = "None is for a single GPU"
        raise problem("parallel_type", "must be ddp, dp or None", parallel_type, action)
    if local_rank is not None and not (type(local_rank) is int and local_rank >= 0):
        raise problem("local_rank", "must be the number of a GPU", local_rank, "pass LOCAL_RANK as a whole number")


# --- the configuration ------------------------------------------------------------------------------------------------


def _configured(
    path: str | Path,
    name: str | None,
    transforms_cpu: Any,
    transforms_gpu: Any,
    cpu_percentage: float | Literal["auto"],
    overrides: Sequence[str],
) -> tuple[Config, str]:
    """Return the file with the stages of the transforms, checked, and the pipeline's name."""
    stages = stage_table()
    if Path(path).suffix == ".toml":
        raise problem("config", "must be a YAML file", os.fspath(path), f"gpuflow import {path} > FILE.yaml")
    on_gpu, on_cpu = (
        None if transforms is None else stages_of(transforms, argument, stages, tensor=tensor)
        for transforms, argument, tensor in ((transforms_gpu, _GPU, True), (transforms_cpu, _CPU, False))
    )
    if on_gpu is not None and on_gpu.resize is not None:
        raise problem(_GPU, "cannot have cv2_resize, because the file resizes", action="remove it")
    if on_cpu is not None and on_gpu is not None:
        _check_same(on_cpu, on_gpu)
    chosen = _pipeline(path, name)
    found = on_gpu or on_cpu
    given = _CPU if on_gpu is None else _GPU
    added = None if found is None else AddedStages(pipeline=chosen, entries=found.entries, place=PLACE, path=(given,))
    share = [] if cpu_percentage == "auto" else [f"pipelines.{chosen}.stages.decode.cpu_share={cpu_percentage}"]
    config = read_config(path, stages, overrides, added)
    program = config.any_program(chosen)
    if isinstance(program, ViewsProgram):
        if found is not None:
            action = "write the stages into the file's views"
            raise problem(given, f"cannot follow the views of the pipeline {chosen!r}", action=action)
        return config, chosen
    if isinstance(program.decoder, Preset):
        if share and cpu_percentage:
            rule = f"must be auto or 0 with preset: {program.decoder.name}, which decodes in one place"
            raise problem("cpu_percentage", rule, cpu_percentage, "remove it")
    elif share:
        config = read_config(path, stages, [*overrides, *share], added)
    if on_cpu is not None and on_cpu.resize is not None:
        specs = program.specs[: len(program.specs) - len(on_cpu.entries)]
        _check_resize(on_cpu.resize, specs[-1].shape[:2], str(path))
    return config, chosen


def _pipeline(path: str | Path, name: str | None) -> str:
    """Return the name of the pipeline to use: as given, or of the only one that the file has."""
    if name is not None:
        return name
    pipelines = read_yaml(str(path))[0].get("pipelines")
    names = list(map(str, pipelines)) if isinstance(pipelines, dict) else []
    if len(names) > 1:
        raise problem("name", f"must be one of the pipelines of {path}: {', '.join(names)}", None, "pass name=")
    return names[0] if names else "train"


def _check_same(on_cpu: Found, on_gpu: Found) -> None:
    """Raise ConfigError, at the first difference, if two lists of transforms stand for different stages."""
    for i, (cpu, gpu) in enumerate(zip_longest(on_cpu.entries, on_gpu.entries)):
        if cpu != gpu:
            cpu_text, gpu_text = ("nothing" if entry is None else _shown(entry) for entry in (cpu, gpu))
            rule = f"must stand for the same stages as {_GPU}; stage {i} of the two is {cpu_text} and {gpu_text}"
            raise problem(_CPU, rule, action="make them equal, or leave out transforms_cpu")


def _shown(entry: Mapping[str, Any]) -> str:
    [(name, parameters)] = entry.items()
    return f"{name}({', '.join(f'{key}={value}' for key, value in parameters.items())})"


def _check_resize(resize: Cv2Resize, size: tuple[int | None, ...], path: str) -> None:
    if size != (resize.height, resize.width):
        wanted = f"resize: {{height: {resize.height}, width: {resize.width}}}"
        shown = " x ".join("varying" if side is None else str(side) for side in size)
        rule = f"is cv2_resize to {resize.height} x {resize.width}, and the stages of {path} give images of {shown}"
        raise problem(_CPU, rule, action=f"write {wanted} there")


# --- ranks and devices ------------------------------------------------------------------------------------------------


def _ranks(draws: SamplerDraws, parallel_type: str | None) -> Ranks:
    """Return which of how many parts of an epoch the sampler gives: as it says itself, else one for each process."""
    for sampler in draws.samplers:
        rank, count = getattr(sampler, "rank", None), getattr(sampler, "num_replicas", None)
        if isinstance(rank, int) and isinstance(count, int):
            return Ranks(rank=rank, world_size=count)
    return Ranks.of_process() if parallel_type == "ddp" else Ranks()


def _device(parallel_type: str | None, local_rank: int | None) -> torch.device:
    """Return the GPU that batches are delivered on; the CPU where torch sees none."""
    visible = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not visible:
        return torch.device("cpu")
    if local_rank is None:
        local_rank = Ranks.on_host().local_rank if parallel_type == "ddp" else None
    if local_rank is None:
        return torch.device("cuda", torch.cuda.current_device())
    if local_rank >= visible:
        rule = f"must be below the number of GPUs that torch sees, {visible}"
        raise problem("local_rank", rule, local_rank, f"start {visible} processes on this host")
    return torch.device("cuda", local_rank)


# --- the transforms ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TensorToTensor:
    """Turns levels of 0-255 into numbers of 0-1: a tensor divided by 255, as torchpipe's training integration does.

    In `gpuflow.wrap` it stands where torchvision has ToTensor.

    Examples:
        >>> TensorToTensor()(torch.tensor([0, 51, 255], dtype=torch.uint8)).tolist()
        [0.0, 0.2..., 1.0]
    """

    def __call__(self, image: torch.Tensor) -> torch.Tensor:
        return image.to(torch.float32) / 255


@dataclass(frozen=True, slots=True)
class Cv2Resize:
    """Resizes an image [H, W, C] of numpy with OpenCV. See `cv2_resize`."""

    height: int
    width: int

    def __call__(self, image: Bytes) -> Bytes:
        import cv2

        return np.asarray(cv2.resize(image, (self.width, self.height)), np.uint8)


def cv2_resize(size: tuple[int, int]) -> Cv2Resize:
    """Return OpenCV's bilinear resize of an array [H, W, C] to `size`, (height, width).

    In `transforms_cpu` of `gpuflow.wrap` it names the size that the stages of the file resize to. Those stages say with
    which pixels: `preset: torchpipe_cpu` has OpenCV's.

    Examples:
        >>> cv2_resize((24, 32))(np.zeros((48, 48, 3), np.uint8)).shape
        (24, 32, 3)
    """
    height, width = size
    return Cv2Resize(height, width)


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """Holds the stages that transforms stand for, as in YAML. resize: the `cv2_resize` that they begin with."""

    entries: tuple[Mapping[str, Any], ...]
    resize: Cv2Resize | None


def stages_of(transforms: Any, name: str, table: Mapping[str, type[Stage]], *, tensor: bool) -> Found:
    """Return the stages that transforms stand for.

    Args:
        transforms: a Compose of torchvision, a list or one transform.
        tensor: whether they get tensors, not PIL images.
        name: the argument that they were given as, for problems.
        table: the vocabulary.

    Raises:
        ConfigError: every transform that no stage equals.
    """
    parts = _parts(transforms)
    listed = [transforms] if parts is None else parts
    first = listed[0] if listed and isinstance(listed[0], Cv2Resize) else None
    rule, action = "must be the first transform, because the file decodes and resizes", "move it to the front"
    problems = [
        Problem(PLACE, rule, action=action, path=(name, i), code="config.conflict")
        for i, transform in enumerate(listed)
        if i and isinstance(transform, Cv2Resize)
    ]
    known = [v1.ToPILImage() if isinstance(one, Cv2Resize) else _known(one) for one in listed]
    found = read_transform(v1.Compose(known), f"{PLACE} {name}", table, tensor=tensor)
    if problems := [*problems, *found.gaps]:
        raise ConfigError(problems)
    [(_, *entries)] = found.pipelines.values()  # without decode
    return Found(entries=tuple(entry.as_yaml for entry in entries), resize=first)


def _parts(transform: Any) -> list[Any] | None:
    """Return the transforms that a Compose of v1 or v2, a list or a Sequential holds; None for a single one."""
    if isinstance(transform, (v1.Compose, v2.Compose)):
        return list(transform.transforms)
    return list(transform) if isinstance(transform, (list, tuple, torch.nn.Sequential)) else None


def _known(transform: Any) -> Any:
    """Return a transform with the ToTensor of torchvision.transforms in place of TensorToTensor and of v2's ToTensor.

    That of v2 leaves tensors as they are, but the images that the user wrote it for were no tensors.
    """
    if isinstance(transform, (TensorToTensor, v2.ToTensor)):
        return v1.ToTensor()
    parts = _parts(transform)
    return transform if parts is None else v1.Compose(list(map(_known, parts)))
