"""gpuflow.wrap: the DataLoader's order and batches, gpuflow's pixels, resume, bad samples, and located errors."""

from __future__ import annotations

import io
import json
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torchvision import transforms as v1
from torchvision.datasets import ImageFolder

import gpuflow
from gpuflow.errors import BadSampleError, ConfigError, LoaderError, StateError, TooManyBadSamples
from tests.datasets import flat, jpeg, make_photos, nothing_left_behind, rows, truncate
from tests.texts import outline, pin

COUNT = 24
FILE = """\
source: {{folder: unused, seed: 3}}
pipelines:
  all:
    stages:
      - decode: {{color: rgb}}
      - resize: {{height: 32, width: 28}}
{more}
run: {{threads: 2}}
"""
AUGMENT = [v1.RandomCrop(24), v1.RandomHorizontalFlip(), v1.RandomRotation(15), v1.ColorJitter(0.2, 0.2, 0.2, 0.1)]
GPU = v1.Compose([*AUGMENT, gpuflow.TensorToTensor(), v1.Normalize([0.5] * 3, [0.25] * 3)])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("wrap")
    make_photos(root / "photos", classes=3, each=COUNT // 3)
    (root / "x.yaml").write_text(FILE.format(more=""))
    return root


@pytest.fixture(scope="module")
def photos(folder: Path) -> ImageFolder:
    return ImageFolder(str(folder / "photos"), loader=gpuflow.bytes_loader)


@pytest.fixture(scope="module")
def config(folder: Path) -> Path:
    return folder / "x.yaml"


class Numbers(Dataset[int]):
    """A dataset whose samples are their indices: what a DataLoader gives is its sampler's order."""

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> int:
        return index


class Growing:
    """A batch sampler whose batches have 1, 2, 3, ... samples, drawn by Python's generator."""

    batch_size = 2  # so that most batches are larger

    def __init__(self, seed: int | None = 0) -> None:
        self._random = random.Random(seed)

    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Iterator[list[int]]:
        for size in range(1, 5):
            yield [self._random.randrange(COUNT) for _ in range(size)]


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(5)


Make = Callable[[Any], DataLoader[Any]]
LOADERS: dict[str, Make] = {
    "in order": lambda data: DataLoader(data, batch_size=5),
    "shuffle": lambda data: DataLoader(data, batch_size=5, shuffle=True),
    "persistent workers": lambda data: DataLoader(data, 5, shuffle=True, num_workers=1, persistent_workers=True),
    "generator": lambda data: DataLoader(data, batch_size=5, shuffle=True, generator=seeded()),
    "drop_last": lambda data: DataLoader(data, batch_size=5, shuffle=True, drop_last=True),
    "own generator": lambda data: DataLoader(data, batch_size=5, sampler=RandomSampler(data, generator=seeded())),
    "weights": lambda data: DataLoader(data, 7, sampler=WeightedRandomSampler([1.0, 3.0] * (COUNT // 2), 40)),
    "subset": lambda data: DataLoader(data, batch_size=4, sampler=SubsetRandomSampler(range(0, COUNT, 2))),
    "batches": lambda data: DataLoader(data, batch_sampler=Growing()),
    "rank": lambda data: DataLoader(data, batch_size=2, sampler=DistributedSampler(data, num_replicas=3, rank=1)),
}


def set_epoch(loader: Any, epoch: int) -> None:
    """What a training loop does before each epoch."""
    if isinstance(loader.sampler, DistributedSampler):
        loader.sampler.set_epoch(epoch)


@pytest.mark.parametrize("name", LOADERS)
def test_batches_are_those_of_the_dataloader(name: str, photos: ImageFolder, config: Path) -> None:
    plain = LOADERS[name](Numbers())
    expected: list[list[int]] = []
    torch.manual_seed(1)
    for epoch in range(2):
        set_epoch(plain, epoch)
        expected += [batch.tolist() for batch in plain]
    dataloader, found = LOADERS[name](photos), []
    torch.manual_seed(1)
    with gpuflow.wrap(dataloader, config, transforms_gpu=GPU) as loader:
        for epoch in range(2):
            set_epoch(loader, epoch)
            for images, labels in (batches := iter(loader)):
                assert images.shape[1:] == (3, 24, 24) and images.dtype == torch.float32
                found.append(labels.tolist())
            del batches
        assert len(loader) == len(dataloader) == len(plain)
    assert found == [[photos.targets[i] for i in batch] for batch in expected]


@pytest.mark.parametrize("name", ["shuffle", "persistent workers", "generator", "weights", "batches", "rank"])
def test_a_resumed_epoch_equals_an_uninterrupted_one(name: str, photos: ImageFolder, config: Path) -> None:
    torch.manual_seed(2)
    with gpuflow.wrap(LOADERS[name](photos), config, transforms_gpu=GPU) as loader:
        set_epoch(loader, 0)
        list(loader)
        set_epoch(loader, 1)
        whole, states = [], []
        for batch in loader:
            whole.append(rows(batch))
            states.append(json.loads(json.dumps(loader.state_dict())))
    torch.manual_seed(99)
    with gpuflow.wrap(LOADERS[name](photos), config, transforms_gpu=GPU) as loader:
        loader.load_state_dict(states[1])
        set_epoch(loader, 1)
        assert loader.state_dict() == states[1]
        if name == "batches":
            with pytest.raises(StateError) as caught:
                iter(loader)
            assert "epoch 1" in pin(caught.value)
            return
        assert [rows(batch) for batch in loader] == whole[2:]
        assert (states[-1]["position"], list(states[-1]["sampler"])) == (0, ["generators", "begun"])


@pytest.mark.parametrize("name", ["persistent workers", "generator"])
def test_a_resumed_run_draws_the_next_epoch_from_the_generator_that_the_dataloader_was_given(
    name: str, photos: ImageFolder, config: Path
) -> None:
    with gpuflow.wrap(LOADERS[name](photos), config, transforms_gpu=GPU) as loader:
        list(loader)
        state = json.loads(json.dumps(loader.state_dict()))
        torch.manual_seed(7)
        second = [rows(batch) for batch in loader]
        torch.manual_seed(8)
        before = torch.get_rng_state()
        loader.load_state_dict(state)
        assert torch.equal(torch.get_rng_state(), before), "torch's own is the script's"
        torch.manual_seed(7)
        assert [rows(batch) for batch in loader] == second
    with gpuflow.wrap(LOADERS[name](photos), config, transforms_gpu=GPU) as loader:
        loader.load_state_dict(state)
        torch.manual_seed(7)
        assert [rows(batch) for batch in loader] == second


def test_pixels_are_those_of_load_and_do_not_depend_on_the_number_of_ranks(
    photos: ImageFolder, config: Path, folder: Path
) -> None:
    more = """\
      - random_crop: {size: 24}
      - flip: {horizontal: 0.5}
      - rotate: {degrees: 15, interpolation: nearest}
      - color_jitter: {brightness: 0.2, contrast: 0.2, saturation: 0.2, hue: 0.1}
      - normalize: {mean: [0.5, 0.5, 0.5], std: [0.25, 0.25, 0.25]}
    batch: {size: 4}
"""
    (folder / "y.yaml").write_text(FILE.format(more=more).replace("unused", str(folder / "photos")))
    with gpuflow.load(folder / "y.yaml", "all") as loader:
        expected = flat(map(rows, loader))
    with gpuflow.wrap(DataLoader(photos, batch_size=7), config, transforms_gpu=GPU, cpu_percentage=0.3) as wrapped:
        assert flat(map(rows, wrapped)) == expected
        assert wrapped.preprocessing == loader.preprocessing
    ranks = []
    for rank in range(2):
        sampler: Any = DistributedSampler(photos, num_replicas=2, rank=rank, shuffle=False)
        with gpuflow.wrap(DataLoader(photos, batch_size=3, sampler=sampler), config, transforms_gpu=GPU) as wrapped:
            ranks.append(flat(map(rows, wrapped)))
    assert [row for both in zip(*ranks, strict=True) for row in both] == expected


@pytest.mark.filterwarnings("ignore:1 of 3 samples are bad so far:UserWarning")
def test_a_bad_sample_is_replaced_by_one_of_the_sampler_and_no_batch_is_dropped(tmp_path: Path, config: Path) -> None:
    files = make_photos(tmp_path, classes=3, each=4)
    truncate(files[2])
    photos = ImageFolder(str(tmp_path), loader=gpuflow.bytes_loader)
    train = Subset(photos, [1, 2, 3])
    with gpuflow.wrap(DataLoader(train, batch_size=2), config, overrides=["run.on_error=replace"]) as loader:
        batches = [batch.indices.tolist() for batch in loader]
        assert loader.stats()["bad"] == 1
    assert [len(batch) for batch in batches] == [2, 1]
    assert batches[0][0] == 0 and batches[0][1] in (0, 2) and batches[1] == [2]
    with gpuflow.wrap(DataLoader(train, batch_size=2), config, overrides=["run.on_error=raise"]) as loader:
        with pytest.raises(BadSampleError) as caught:
            list(loader)
        assert caught.value.path == str(files[2])


@pytest.mark.filterwarnings("ignore:1 of 4 samples are bad so far:UserWarning")
@pytest.mark.parametrize(("ranks", "where"), [(1, ""), (2, " on rank 1")])
def test_a_batch_of_bad_samples_alone_is_an_error(ranks: int, where: str, tmp_path: Path, config: Path) -> None:
    truncate(make_photos(tmp_path, classes=1, each=4)[1])
    photos = ImageFolder(str(tmp_path), loader=gpuflow.bytes_loader)
    sampler: Any = DistributedSampler(photos, num_replicas=ranks, rank=ranks - 1, shuffle=False)
    dataloader = DataLoader(photos, batch_size=1, sampler=sampler)
    with (
        gpuflow.wrap(dataloader, config, overrides=["run.on_error=skip"]) as loader,
        pytest.raises(TooManyBadSamples) as caught,
    ):
        list(loader)
    assert f"step {2 - ranks} of epoch 0 holds nothing but bad samples{where}; the first" in str(caught.value)


@pytest.mark.filterwarnings("ignore:1 of 8 samples are bad so far:UserWarning")
@pytest.mark.parametrize(
    ("arguments", "policy"),
    [
        ({}, "skip"),
        ({"sampler": "SequentialSampler"}, "skip"),
        ({"drop_last": True}, "replace"),
        ({"shuffle": True}, "replace"),
        ({"sampler": "RandomSampler"}, "replace"),
    ],
)
def test_without_on_error_bad_samples_are_replaced_where_samples_are_drawn(
    arguments: dict[str, Any], policy: str, tmp_path: Path, config: Path
) -> None:
    truncate(make_photos(tmp_path, classes=1, each=8)[3])
    photos = ImageFolder(str(tmp_path), loader=gpuflow.bytes_loader)
    if "sampler" in arguments:
        arguments = {"sampler": getattr(torch.utils.data, arguments["sampler"])(photos)}
    with gpuflow.wrap(DataLoader(photos, batch_size=4, **arguments), config) as loader:
        indices = [index for batch in loader for index in batch.indices.tolist()]
    assert len(indices) == (7 if policy == "skip" else 8) and len(set(indices)) == 7


class Encoded(Dataset[tuple[bytes, int]]):
    """Samples that only the dataset can give. `fault`: raised by sample 3, once it is read in an epoch."""

    classes = ("a", "b", "c")

    def __init__(self, fault: Exception | None = None, label: Callable[[int], Any] = lambda index: index % 3) -> None:
        self._fault, self._label = fault, label

    def __len__(self) -> int:
        return 9

    def __getitem__(self, index: int) -> tuple[bytes, Any]:
        if index == 3 and self._fault is not None:
            raise self._fault
        return jpeg(index % 3, index), self._label(index)


class Several(Encoded):
    """Its `__getitems__`, which a DataLoader calls, gives other labels than `__getitem__`."""

    def __getitems__(self, indices: list[int]) -> list[tuple[bytes, Any]]:
        return [(data, label + 10) for data, label in map(self.__getitem__, indices)]


class SeveralOfAFolder(ImageFolder):  # type: ignore[misc]
    def __getitems__(self, indices: list[int]) -> list[tuple[Any, int]]:
        return [(data, label + 10) for data, label in map(self.__getitem__, indices)]


def relabel(subset: Subset[Any]) -> None:
    """Give the second sample another label, in place."""
    samples: Any = subset.dataset
    path, label = samples.samples[1]
    samples.samples[1] = (path, label + 1)


@pytest.mark.parametrize(
    "change",
    [
        relabel,
        lambda subset: setattr(subset, "indices", [5, 6, 7]),
        lambda subset: setattr(subset.dataset, "target_transform", lambda label: label + 1),
    ],
    ids=["label", "subset", "target_transform"],
)
def test_a_dataset_that_changes_is_an_error_and_no_old_samples(
    change: Callable[[Subset[Any]], None], folder: Path, config: Path
) -> None:
    subset = Subset(ImageFolder(str(folder / "photos"), loader=gpuflow.bytes_loader), [0, 1, 2])
    dataloader = DataLoader(subset, batch_size=2)
    with gpuflow.wrap(dataloader, config) as loader:
        assert [labels.tolist() for _, labels in loader] == [[0, 0], [0]]
        change(subset)
        with pytest.raises(
            LoaderError, match=r"other samples or labels .* call gpuflow.wrap again, then set_epoch\(1\)"
        ):
            next(iter(loader))
    dataset: Any = subset.dataset
    with gpuflow.wrap(dataloader, config) as loader:
        expected = [dataset[i][1] for i in subset.indices]
        assert [int(label) for _, labels in loader for label in labels] == expected


@pytest.mark.parametrize("subset", [False, True])
def test_getitems_is_preferred_as_by_a_dataloader(subset: bool, folder: Path, config: Path) -> None:
    files = SeveralOfAFolder(str(folder / "photos"), loader=gpuflow.bytes_loader)
    whole: Dataset[Any]
    for whole in (Several(), files):
        part = Subset(whole, [0, 1, 2]) if subset else whole
        dataloader = DataLoader(part, batch_size=4, collate_fn=lambda pairs: [label for _, label in pairs])
        with gpuflow.wrap(DataLoader(part, batch_size=4), config) as loader:
            assert [labels.tolist() for _, labels in loader] == list(dataloader)


def test_a_dataset_without_paths_is_read_through_its_getitem(config: Path) -> None:
    with gpuflow.wrap(DataLoader(Encoded(), batch_size=4, shuffle=True), config) as loader:
        assert loader.classes == ("a", "b", "c")
        for _ in range(2):
            for images, labels in loader:
                brightest = images.float().mean(dim=(2, 3)).argmax(dim=1)
                assert labels.dtype == torch.int64 and torch.equal(brightest, labels)
    vectors = Encoded(label=lambda index: torch.tensor([index, 0.5]))
    with gpuflow.wrap(DataLoader(vectors, batch_size=4), config) as loader:
        (_, labels), *_ = loader
        assert labels.tolist() == [[float(i), 0.5] for i in range(4)]


class Counted(Encoded):
    """The largest number of calls of `__getitem__` at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._lock = threading.Lock()

    def __getitem__(self, index: int) -> tuple[bytes, Any]:
        with self._lock:
            self.now += 1
            self.most = max(self.most, self.now)
        time.sleep(0.02)
        with self._lock:
            self.now -= 1
        return super().__getitem__(index)


@pytest.mark.parametrize("thread_safe", [False, True])
def test_a_dataset_is_called_by_one_thread_at_a_time_unless_it_is_thread_safe(thread_safe: bool, config: Path) -> None:
    """Also by two loaders of one dataset, of which each has a part, and where it raises."""
    dataset = Counted()
    parts = [Subset(dataset, part) for part in ([0, 1, 2, 3, 4], [4, 5, 6, 7, 8])]
    loaders = [
        gpuflow.wrap(DataLoader(part, batch_size=1), config, overrides=["run.threads=4"], thread_safe=thread_safe)
        for part in parts
    ]
    with loaders[0], loaders[1]:
        batches = list(zip(*loaders, strict=True))
    assert len(batches) == 5
    assert (dataset.most > 1) is thread_safe


def test_a_sampler_that_is_not_told_its_epoch_is_named_once(photos: ImageFolder, config: Path) -> None:
    def epochs(count: int, told: Callable[[Any, int], object], **options: Any) -> None:
        sampler: DistributedSampler[Any] = DistributedSampler(photos, num_replicas=2, rank=0, **options)
        with gpuflow.wrap(DataLoader(photos, batch_size=4, sampler=sampler), config) as loader:
            for epoch in range(count):
                told(loader, epoch)
                list(loader)

    with pytest.warns(UserWarning, match="gave epoch") as caught:
        epochs(3, lambda loader, epoch: None)
    assert [str(one.message) for one in caught] == [
        "DistributedSampler gave epoch 1 the order of epoch 0: its epoch is still 0; call its set_epoch before each "
        "epoch, or that of what gpuflow.wrap returned"
    ]
    epochs(2, set_epoch)
    epochs(2, lambda loader, epoch: loader.set_epoch(epoch))
    epochs(2, lambda loader, epoch: loader.set_epoch(0))  # the same epoch on purpose
    epochs(2, lambda loader, epoch: None, shuffle=False)


def test_the_classes_of_mixed_labels_are_those_of_the_dataset(folder: Path) -> None:
    mixes = folder / "mixes.yaml"
    mixes.write_text(FILE.format(more="      - normalize\n      - mixup: {label_smoothing: 0.3}"))
    with gpuflow.wrap(DataLoader(Encoded(), batch_size=4), mixes) as loader:
        assert [labels.shape for _, labels in loader] == [(4, 3), (4, 3), (1, 3)]
    for label in (3, -1):
        wrong = Encoded(label=lambda index, label=label: label if index == 5 else 0)  # type: ignore[misc]
        text = rf"dataset\[5\] has the label {label}, which is none of the 3 classes 0 to 2; correct the label"
        with gpuflow.wrap(DataLoader(wrong, batch_size=4), mixes) as loader, pytest.raises(LoaderError, match=text):
            list(loader)
    nameless = Encoded()
    nameless.classes = ()  # type: ignore[assignment]
    text = r"mixup mixes labels, but how many classes there are is not known; give the dataset `classes`, a list of"
    with pytest.raises(ConfigError, match=text):
        gpuflow.wrap(DataLoader(nameless, batch_size=4), mixes)


class Drawn(Dataset[tuple[bytes, int]]):
    """Returns a random label on every call, and an image whose gray level equals it. Index 0 has a damaged image."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> tuple[bytes, int]:
        label = random.randrange(250)
        data = io.BytesIO()
        Image.new("L", (8, 8), label).save(data, "PNG")
        return (data.getvalue()[:20] if index == 0 else data.getvalue()), label


@pytest.mark.parametrize(
    "label", [torch.tensor(3.0, dtype=torch.bfloat16), torch.tensor(3.0, requires_grad=True), torch.tensor(3.0)]
)
def test_a_label_may_be_any_tensor_of_one_number(label: torch.Tensor, config: Path) -> None:
    with gpuflow.wrap(DataLoader(Encoded(label=lambda index: label), batch_size=3), config) as loader:
        assert next(iter(loader)).labels.tolist() == [3.0] * 3


@pytest.mark.parametrize("label", [[[1], [2, 3]], (1, 2), [1, 2], "a"])
def test_a_label_that_is_no_number_and_no_array_is_an_error(config: Path, label: Any) -> None:
    """A DataLoader gives a tuple or list of labels as one tensor for each place, and not as one for all."""
    with pytest.raises(ConfigError, match=r"must give \(bytes, label\) for each sample, and sample 0 is"):
        gpuflow.wrap(DataLoader(Encoded(label=lambda index: label), batch_size=3), config)


@pytest.mark.filterwarnings("ignore:1 of 4 samples are bad so far:UserWarning")
def test_labels_belong_to_their_images_where_an_index_gives_another_sample_each_time(config: Path) -> None:
    sampler = WeightedRandomSampler([1.0] * 4, 60)  # so that the same index is read again while batches wait
    with gpuflow.wrap(DataLoader(Drawn(), batch_size=6, sampler=sampler), config) as loader:
        brightness, labels = zip(*((images[:, 0, 4, 4].long(), labels) for images, labels in loader), strict=True)
        assert torch.cat(labels).tolist() == torch.cat(brightness).tolist() and loader.stats()["bad"] > 0


@pytest.mark.filterwarnings("ignore:1 of 9 samples are bad so far:UserWarning")
def test_what_a_dataset_raises_is_raised_and_a_file_that_it_cannot_read_is_bad(config: Path) -> None:
    with gpuflow.wrap(DataLoader(Encoded(KeyError("lost")), batch_size=2), config) as loader:
        batches = iter(loader)
        next(batches)
        with pytest.raises(KeyError, match="lost") as caught:
            next(batches)
        assert caught.value.__notes__ == ["raised by dataset[3], which gpuflow.wrap read"]
    with gpuflow.wrap(DataLoader(Encoded(FileNotFoundError("gone")), batch_size=3), config) as loader:
        labels = [batch.labels.tolist() for batch in loader]
        assert loader.stats()["bad"] == 1 and [len(some) for some in labels] == [3, 2, 3]
    mixed = Encoded(label=lambda index: 0 if index < 5 else 0.5)
    with gpuflow.wrap(DataLoader(mixed, batch_size=3), config) as loader, pytest.raises(LoaderError) as shape:
        list(loader)
    assert str(shape.value) == (
        "dataset[5] has a label of float32 [], and the first sample has one of int64 []; give all samples labels of "
        "one form"
    )


def test_a_break_a_reset_and_an_error_leave_no_thread(photos: ImageFolder, config: Path) -> None:
    dataloader = DataLoader(photos, batch_size=2)
    gpuflow.wrap(dataloader, config).close()
    with nothing_left_behind():
        loader = gpuflow.wrap(dataloader, config)
        for _ in loader:
            break
        loader.reset()
        assert loader.state_dict()["epoch"] == 1
        assert len(list(loader)) == 12
        loader.reset()
        assert loader.state_dict()["epoch"] == 2
        loader.close()


def test_the_dataloaders_attributes_stay(photos: ImageFolder, config: Path) -> None:
    sampler: Any = DistributedSampler(photos, num_replicas=2, rank=0)
    with gpuflow.wrap(DataLoader(photos, 5, sampler=sampler, drop_last=True), config, transforms_gpu=GPU) as loader:
        assert loader.dataset is photos and loader.sampler is sampler and loader.batch_sampler.sampler is sampler
        assert (loader.batch_size, loader.drop_last, loader.classes) == (5, True, tuple(photos.classes))
        loader.set_epoch(4)
        assert sampler.epoch == 4 and loader.state_dict()["epoch"] == 4
        assert repr(loader).startswith("<gpuflow.WrappedLoader of ImageFolder in 2 steps; all: decode() -> resize(")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no NVIDIA GPU")
def test_batches_are_on_the_gpu_of_the_local_rank(photos: ImageFolder, config: Path) -> None:
    last = torch.cuda.device_count() - 1
    before = [torch.cuda.memory_allocated(other) for other in range(last)]
    dataloader = DataLoader(photos, batch_size=6)
    with gpuflow.wrap(dataloader, config, transforms_gpu=GPU, cpu_percentage=0.3, local_rank=last) as loader:
        assert {images.device for images, _ in loader} == {torch.device("cuda", last)}
    assert all(torch.cuda.memory_allocated(other) <= held for other, held in enumerate(before))


# --- bad input --------------------------------------------------------------------------------------------------------


class Prepared(DataLoader[Any]):
    """Iterates in another way, as what Accelerate makes of a DataLoader does."""

    def __iter__(self) -> Any:
        return iter(())


class Endless:
    """A batch sampler without a length, or with a wrong one."""

    def __iter__(self) -> Iterator[list[int]]:
        while True:
            yield [0]


class WrongLength(Endless):
    def __len__(self) -> int:
        return 2


class Stream(torch.utils.data.IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(())


def faults(photos: ImageFolder) -> dict[str, tuple[Any, dict[str, Any], str]]:
    """Return by name the DataLoader, the other arguments and the outline of the error."""
    sound = DataLoader(photos, batch_size=4)
    pixels = ImageFolder(photos.root)
    changed = ImageFolder(photos.root, loader=gpuflow.bytes_loader, transform=v1.ToTensor())
    resize = gpuflow.cv2_resize((32, 32))
    return {
        "no DataLoader": (photos, {}, "dataloader config.conflict, got 'ImageFolder'"),
        "other batches": (
            Prepared(photos),
            {},
            "dataloader config.conflict, got 'Prepared'",
        ),
        "iterable": (
            DataLoader(Stream()),
            {},
            "dataloader.dataset config.conflict",
        ),
        "no batches": (
            DataLoader(photos, batch_size=None),
            {},
            "dataloader.batch_size config.conflict, got null",
        ),
        "collate_fn": (
            DataLoader(photos, collate_fn=list),
            {},
            "dataloader.collate_fn config.conflict",
        ),
        "no length": (
            DataLoader(photos, batch_sampler=Endless()),
            {},
            "dataloader.batch_sampler config.conflict",
        ),
        "no samples": (
            DataLoader(Subset(photos, [])),
            {},
            "dataloader.dataset config.type",
        ),
        "pixels": (
            DataLoader(pixels),
            {},
            "dataloader.dataset config.type",
        ),
        "transform": (
            DataLoader(changed),
            {},
            "dataloader.dataset.transform config.type, got ToTensor()",
        ),
        "share": (
            sound,
            {"cpu_percentage": 30},
            "cpu_percentage config.conflict, got 30",
        ),
        "type": (
            sound,
            {"parallel_type": "fsdp"},
            "parallel_type config.conflict, got 'fsdp'",
        ),
        "rank": (
            sound,
            {"local_rank": "0"},
            "local_rank config.conflict, got '0'",
        ),
        "resize on GPU": (
            sound,
            {"transforms_gpu": [resize]},
            "transforms_gpu config.conflict",
        ),
        "size": (
            sound,
            {"transforms_cpu": [resize, *GPU.transforms]},
            "transforms_cpu config.conflict",
        ),
        "crop": (
            sound,
            {"transforms_gpu": v1.Compose([v1.RandomHorizontalFlip(), v1.RandomCrop(40)])},
            "transforms_gpu.random_crop stage.order",
        ),
        "different": (
            sound,
            {"transforms_gpu": AUGMENT, "transforms_cpu": [v1.ToPILImage(), *AUGMENT[:2], v1.RandomRotation(20)]},
            "transforms_cpu config.conflict",
        ),
    }


NAMES = (
    *("no DataLoader", "other batches", "iterable", "no batches", "collate_fn", "no length", "no samples"),
    *("pixels", "transform", "share", "type", "rank", "resize on GPU", "size", "crop", "different"),
)


@pytest.mark.parametrize("name", NAMES)
def test_bad_input_is_an_error_with_its_place(name: str, photos: ImageFolder, config: Path) -> None:
    known = faults(photos)
    assert set(known) == set(NAMES)
    dataloader, arguments, expected = known[name]
    with pytest.raises(ConfigError) as caught:
        gpuflow.wrap(dataloader, config, **arguments)
    assert outline(caught.value) == f"gpuflow.wrap: {expected}"


def test_files_that_wrap_does_not_take(photos: ImageFolder, config: Path, tmp_path: Path) -> None:
    sound = DataLoader(photos, batch_size=4)
    with pytest.raises(ConfigError) as caught:
        gpuflow.wrap(sound, "gpu_decode_train.toml")
    assert outline(caught.value) == "gpuflow.wrap: config config.conflict, got 'gpu_decode_train.toml'"
    two = tmp_path / "two.yaml"
    two.write_text(
        config.read_text().replace("run:", "  val:\n    stages: [decode, {resize: {height: 8, width: 8}}]\nrun:")
    )
    with pytest.raises(ConfigError) as caught:
        gpuflow.wrap(sound, two)
    assert outline(caught.value) == "gpuflow.wrap: name config.conflict, got null"
    gpuflow.wrap(sound, two, name="val").close()
    preset = tmp_path / "preset.yaml"
    preset.write_text(
        "source: {folder: x}\npipelines: {train: {preset: torchpipe_cpu, height: 32, width: 32, stages: []}}\n"
    )
    with gpuflow.wrap(sound, preset, transforms_gpu=GPU, cpu_percentage=0) as loader:
        assert next(iter(loader))[0].shape == (4, 3, 24, 24)
    with pytest.raises(ConfigError) as caught:
        gpuflow.wrap(sound, preset, cpu_percentage=0.3)
    assert outline(caught.value) == "gpuflow.wrap: cpu_percentage config.conflict, got 0.3"
    views = tmp_path / "views.yaml"
    views.write_text(
        "source: {folder: x}\npipelines: {train: {decode: {}, views: {a: {stages: [resize: {height: 8, width: 8}]}}}}\n"
    )
    with gpuflow.wrap(sound, views) as loader:
        assert next(iter(loader)).views["a"].shape == (1, 4, 3, 8, 8)
    with pytest.raises(ConfigError) as caught:
        gpuflow.wrap(sound, views, transforms_gpu=GPU)
    assert outline(caught.value) == "gpuflow.wrap: transforms_gpu config.conflict"


@pytest.mark.parametrize(
    ("sampler", "value"),
    [
        ([[0, 1], [COUNT]], f" {COUNT}, "),
        ([[0], []], "number 1;"),
        ([[0.9], [1]], "got 0.9"),
        ([[(0, 224)]], "got (0, 224)"),
        (WrongLength(), " 2 batches"),
    ],
)
def test_a_faulty_sampler_is_an_error(sampler: Any, value: str, photos: ImageFolder, config: Path) -> None:
    with gpuflow.wrap(DataLoader(photos, batch_sampler=sampler), config) as loader:
        with pytest.raises(LoaderError) as caught:
            iter(loader)
        assert value in pin(caught.value)


@pytest.mark.parametrize("order", [np.arange(COUNT)[::-1].copy(), torch.arange(COUNT).flip(0)])
def test_a_sampler_may_be_an_array(order: Any, photos: ImageFolder, config: Path) -> None:
    with gpuflow.wrap(DataLoader(photos, batch_size=4, sampler=order), config) as loader:
        assert torch.cat([batch.indices for batch in loader]).tolist() == order.tolist()


def test_states_of_others_are_refused(photos: ImageFolder, config: Path) -> None:
    with gpuflow.wrap(DataLoader(photos, batch_size=4), config) as loader:
        next(iter(loader))
        state = loader.state_dict()
        assert (state["position"], list(state["sampler"])) == (1, ["order", "generators", "begun"])
        for broken in ({**state, "sampler": None}, {**state, "sampler": {"order": ""}}, {**state, "seed": 7}, {}):
            with pytest.raises(StateError):
                loader.load_state_dict(broken)
        for texts in ([], ["x"], ["eA=="]):
            loader.load_state_dict({**state, "sampler": {**state["sampler"], "generators": texts}})
            with pytest.raises(StateError):
                iter(loader)
    with gpuflow.wrap(DataLoader(photos, batch_size=3), config) as loader:
        loader.load_state_dict(state)
        with pytest.raises(StateError, match="drew another order"):
            iter(loader)
