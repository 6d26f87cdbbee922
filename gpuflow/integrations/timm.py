"""`create_loader` with timm's signature: its parameters as stages, and the attributes that timm's scripts use."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from gpuflow.config import check_config, read_config
from gpuflow.config.yaml_file import read_yaml
from gpuflow.errors import ConfigError, Problem
from gpuflow.integrations import LoaderAdapter
from gpuflow.loader.assemble import build_loader
from gpuflow.loader.batch import Batch
from gpuflow.loader.loader import Loader
from gpuflow.migration.from_timm import DataConfig, evaluation, mixing, training_entries, unequal
from gpuflow.migration.imported import Entry
from gpuflow.runtime.ranks import Ranks
from gpuflow.vocabulary import stage_table

_PLACE = "timm.create_loader:"
_DEFAULTS = DataConfig()
_DTYPES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
_USE_TIMM = "use timm's loader for it"
_SQUASH = f"pass crop_mode='squash', or {_USE_TIMM}"
_MIX_ACTION = "leave it out, and mix in the loop with timm's Mixup"
Size = int | tuple[int, ...] | list[int]


def create_loader(
    dataset: Any,
    input_size: Size,
    batch_size: int,
    is_training: bool = False,
    no_aug: bool = False,
    re_prob: float = 0.0,
    re_mode: str = "const",
    re_count: int = 1,
    re_split: bool = False,
    train_crop_mode: str | None = None,
    scale: Sequence[float] | None = None,
    ratio: Sequence[float] | None = None,
    hflip: float = 0.5,
    vflip: float = 0.0,
    color_jitter: float | Sequence[float] | None = 0.4,
    color_jitter_prob: float | None = None,
    grayscale_prob: float = 0.0,
    gaussian_blur_prob: float = 0.0,
    auto_augment: str | None = None,
    num_aug_repeats: int = 0,
    num_aug_splits: int = 0,
    interpolation: str = "bilinear",
    mean: Sequence[float] = _DEFAULTS.mean,
    std: Sequence[float] = _DEFAULTS.std,
    num_workers: int = 1,
    distributed: bool = False,
    crop_pct: float | None = None,
    crop_mode: str | None = None,
    crop_border_pixels: int | None = None,
    collate_fn: Callable[..., Any] | None = None,
    pin_memory: bool = False,
    fp16: bool = False,
    img_dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cuda",
    use_prefetcher: bool = True,
    use_multi_epochs_loader: bool = False,
    persistent_workers: bool = True,
    worker_seeding: str = "all",
    tf_preprocessing: bool = False,
    *,
    augment: Sequence[Mapping[str, Any]] = (),
    seed: int = 0,
    **schedule: Any,
) -> TimmLoader:
    """Return a loader as timm's `create_loader` makes it: normalized images and labels on `device`.

    The parameters are timm's. `num_workers`, `pin_memory`, `use_multi_epochs_loader`, `persistent_workers` and
    `worker_seeding` say how timm's worker processes run and change no pixel; here they are without effect, `run` in a
    YAML file says how many threads there are. What a sample draws depends on the seed, the epoch and its place alone.

    Examples:
        >>> create_loader("photos.yaml", 224, 32, num_aug_repeats=3)
        Traceback (most recent call last):
        gpuflow.errors.ConfigError: timm.create_loader: num_aug_repeats must be 0, got 3; use timm's loader for it

    Args:
        dataset: timm's dataset of a folder, an ImageFolder, or the path of a YAML file, whose `source` and `run` are
            taken. The dataset's own transform is not used.
        augment: stages in the place of `auto_augment`, as in a file: `[{"rand_augment": {"magnitude": 9}}]`. As with
            `auto_augment`, there is no colour jitter then.
        seed: of the order and of what stages draw, where `dataset` is no file.

    Raises:
        ConfigError: each parameter that gpuflow cannot honour, with what to do instead.
        TypeError: timm has no such parameter either.
    """
    given = {**locals(), **schedule}
    if unknown := sorted(schedule.keys() - _SCHEDULE.split()):
        raise TypeError(f"create_loader() has no parameter {unknown[0]!r}")
    size, channels = _size(input_size, len(mean))
    mixed: Any = collate_fn
    if problems := [*_refused(given, size, channels), *_unmixable(mixed)]:
        raise ConfigError(problems)
    dtype = "float16" if fp16 else _DTYPES[img_dtype]
    normalizing = Entry("normalize", {"mean": list(mean), "std": list(std), "dtype": dtype})
    if is_training:
        shown = {**given, "color_jitter": None} if augment else given
        entries = [*training_entries(shown, input_size if isinstance(input_size, int) else size, normalizing)]
    else:
        wanted = DataConfig(
            input_size=(3, *size),
            interpolation=interpolation,
            crop_pct=crop_pct or _DEFAULTS.crop_pct,
            crop_mode="squash" if crop_mode == "squash" else "center",
        )
        (_, *entries, _), _ = evaluation(wanted, _PLACE)
        entries.append(normalizing)
    stages: list[dict[str, Any]] = [{"decode": {"color": _COLORS[channels]}}, *(entry.as_yaml for entry in entries)]
    if is_training and not no_aug:
        place = 1 + max(i for i, stage in enumerate(stages) if stage.keys() & _MOVES)
        stages[place:place] = map(dict, augment)
    name = "train" if is_training else "val"
    ranks = Ranks.of_process() if distributed else Ranks()

    def build(enabled: bool) -> Loader:
        mixes = [] if mixed is None else [_mixing_stage(mixed, enabled)]
        pipeline = {
            "stages": [*stages, *mixes],
            "batch": {"size": batch_size, "drop_last": is_training},
            "shuffle": is_training,
        }
        with tempfile.TemporaryDirectory() as folder:
            data = {**_source_and_run(dataset, Path(folder), seed), "pipelines": {name: pipeline}}
            loader = build_loader(
                check_config(data, stage_table(), place=_PLACE.removesuffix(":")),
                name,
                rank=ranks.rank,
                world_size=ranks.world_size,
                device=torch.device(device) if use_prefetcher else None,
                rank_given=not distributed,
            )
        classes = None if mixed is None else mixed.num_classes
        if classes is not None and len(loader.classes) != classes:
            loader.close()
            rule = f"must mix labels of the source's {len(loader.classes)} classes"
            raise ConfigError([_problem("collate_fn", rule, classes, "set num_classes of FastCollateMixup")])
        return loader

    return TimmLoader(build, mixes=mixed is not None)


class TimmLoader(LoaderAdapter):
    """A `Loader` with the attributes of timm's: `mixup_enabled`, `sampler` and `batch_sampler`, `dataset`.

    Args:
        build: makes the loader with or without mixing.
        mixes: whether there is anything to mix.
    """

    def __init__(self, build: Callable[[bool], Loader], *, mixes: bool) -> None:
        super().__init__(build(mixes))
        self._build, self._mixes, self._mixing, self._wanted = build, mixes, mixes, mixes
        self.sampler = self.batch_sampler = EpochSampler(self)

    def __iter__(self) -> Iterator[Batch]:
        if self.loader.upcoming_position == 0:
            self._rebuild(mixing=self._wanted)
        return iter(self.loader)

    @property
    def mixup_enabled(self) -> bool:
        """Return whether samples are mixed. Without FastCollateMixup they never are, and setting it changes nothing.

        With false, labels stay probabilities. A change holds from the next epoch on.
        """
        return self._wanted

    @mixup_enabled.setter
    def mixup_enabled(self, enabled: bool) -> None:
        self._wanted = enabled and self._mixes

    def _rebuild(self, *, mixing: bool) -> None:
        """Make another loader if samples are to be mixed no more, or again. It ends the epoch of the former one."""
        if mixing != self._mixing:
            epoch = self.loader.upcoming_epoch
            self.loader.close()
            self.loader, self._mixing = self._build(mixing), mixing
            self.loader.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "mixup_enabled": self._mixing, "mixup_next": self._wanted}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `Loader.load_state_dict`."""
        mixing = bool(state.get("mixup_enabled", self._wanted)) and self._mixes
        self._rebuild(mixing=mixing)
        super().load_state_dict(state)
        self.mixup_enabled = bool(state.get("mixup_next", mixing))


class EpochSampler:
    """The members that timm's scripts use of a sampler: `set_epoch`, and the number of samples of this rank."""

    def __init__(self, loader: TimmLoader) -> None:
        self._loader = loader

    def __len__(self) -> int:
        return len(self._loader) * self._loader.batch_size

    def set_epoch(self, epoch: int) -> None:
        """See `Loader.set_epoch`."""
        self._loader.set_epoch(epoch)


# --- what cannot be honoured ------------------------------------------------------------------------------------------

_SCHEDULE = (
    "input_size_choices batch_size_choices batch_choice_weights batch_choice_seed batch_choice_schedule "
    "batch_schedule_epochs batch_schedule_spread batch_schedule_random_mix num_batches"
)
"""Of timm's batches of several sizes: only the first one turns them on."""


def _problem(name: str, rule: str, value: object, action: str = "") -> Problem:
    return Problem(_PLACE, rule, value, action, (name,), "config.conflict")


_NOTHING = (None, False, 0, "")
_MOVES = {"random_resized_crop", "center_crop", "random_crop", "flip"}
_COLORS = {1: "gray", 3: "rgb"}
"""By the number of channels."""


def _refused(given: Mapping[str, Any], size: tuple[int, int], channels: int) -> Iterator[Problem]:
    """Yield a problem for each parameter that says something that gpuflow does not do."""
    augments, evaluates = given["is_training"] and not given["no_aug"], not given["is_training"]
    centered, sizes = evaluates and given["crop_mode"] != "squash", "input_size_choices"
    interpolations = ("bilinear", "bicubic", *(["random"] if given["no_aug"] else []))
    choose = "choose bilinear, as --train-interpolation bilinear"
    rules: Sequence[tuple[bool, str, Collection[Any], str, str]] = (
        (True, "tf_preprocessing", _NOTHING, "is not offered, and must be false", _USE_TIMM),
        (True, "num_aug_repeats", _NOTHING, "must be 0", _USE_TIMM),
        (True, "num_aug_splits", _NOTHING, "must be 0", _USE_TIMM),
        (True, "img_dtype", _DTYPES, "must be float32, float16 or bfloat16", ""),
        (not augments, "interpolation", interpolations, "must be one of bilinear, bicubic", choose),
        (bool(given["augment"]), "auto_augment", _NOTHING, "must be None where augment is given", ""),
        (evaluates, "crop_border_pixels", _NOTHING, "must be 0", _USE_TIMM),
        (evaluates, "crop_mode", (None, "center", "squash"), "must be 'center' or 'squash'", _USE_TIMM),
        (centered and size[0] != size[1], "input_size", (), "must be a square where crop_mode is 'center'", _SQUASH),
        (
            bool(given.get(sizes)),
            sizes,
            (),
            "is not offered: all batches have one size",
            f"leave it out, or {_USE_TIMM}",
        ),
        (channels not in _COLORS, "input_size", (), "must have 1 or 3 channels", ""),
    )
    for applies, name, allowed, rule, action in rules:
        if applies and (value := given[name]) not in allowed:
            yield _problem(name, rule, str(value) if name == "img_dtype" else value, action)
    for name, rule, nearest in unequal(given) if augments else ():
        yield _problem(name, rule, given[name], f"choose {nearest}, or {_USE_TIMM}")


def _size(input_size: Size, channels: int) -> tuple[tuple[int, int], int]:
    """Return (height, width), and the number of channels."""
    if isinstance(input_size, int):
        return (input_size, input_size), channels
    return (input_size[-2], input_size[-1]), input_size[0] if len(input_size) == 3 else channels


# --- mixing -----------------------------------------------------------------------------------------------------------


def _unmixable(collate: Any) -> Iterator[Problem]:
    """Yield what keeps gpuflow from mixing as `collate_fn` does."""
    if collate is None:
        return
    if type(collate).__name__ != "FastCollateMixup":
        rule = "must be None or timm's FastCollateMixup: batches are not collated in Python"
        yield _problem("collate_fn", rule, getattr(collate, "__name__", type(collate).__name__))
        return
    rules: Sequence[tuple[str, Collection[Any], str]] = (
        ("cutmix_minmax", (None,), "must have no cutmix_minmax"),
        ("multi_label", (False,), "must have multi_label=False"),
        ("mode", ("batch", "pair", "elem"), "must have mode batch, pair or elem"),
    )
    for name, allowed, rule in rules:
        if (value := getattr(collate, name, False)) not in allowed:
            yield _problem("collate_fn", rule, value, _MIX_ACTION)


def _mixing_stage(mixed: Any, enabled: bool) -> dict[str, Any]:
    given = {
        "mixup": mixed.mixup_alpha,
        "cutmix": mixed.cutmix_alpha,
        "mixup_prob": mixed.mix_prob if enabled else 0.0,
        "mixup_switch_prob": mixed.switch_prob,
        "mixup_mode": mixed.mode,
        "smoothing": mixed.label_smoothing,
    }
    return mixing(given, correct_lambda=mixed.correct_lam).as_yaml


# --- the source -------------------------------------------------------------------------------------------------------


def _source_and_run(dataset: Any, folder: Path, seed: int) -> dict[str, Any]:
    """Return these blocks of a file for the samples of a dataset, which it lists in a folder."""
    if not isinstance(dataset, (str, Path)):
        return {"source": {**_listed(dataset, folder / "samples.jsonl"), "seed": seed}}
    read_config(dataset, stage_table())  # reports the file's own faults, with their lines
    read, _ = read_yaml(str(dataset))
    return {"source": read["source"], "run": read.get("run", {})}


def _listed(dataset: Any, listing: Path) -> dict[str, Any]:
    """Write the samples of a dataset as a listing, and return the keys of its source."""
    samples, classes = _samples(dataset)
    classes = [name if name and name == name.strip() else json.dumps(name) for name in classes]  # listings strip blanks
    with listing.open("w", encoding="utf-8") as file:
        for path, label in samples:
            file.write(json.dumps({"path": str(Path(path).absolute()), "label": classes[label]}) + "\n")
    return {"listing": str(listing), "classes": classes}


def _samples(dataset: Any) -> tuple[Iterable[tuple[str, int]], list[str]]:
    """Return the paths and labels of timm's or torchvision's dataset of files, and the names of its classes."""
    reader = getattr(dataset, "reader", dataset)
    samples, places = getattr(reader, "samples", None), getattr(reader, "class_to_idx", None)
    kind, mapped = type(dataset).__name__, getattr(dataset, "target_transform", None)

    def refused(rule: str, value: object, action: str) -> ConfigError:
        return ConfigError([_problem("dataset", rule, value, action)])

    if samples is None or places is None:
        rule = "must be a dataset of files with `samples` and `class_to_idx`, or the path of a YAML file"
        raise refused(rule, kind, "name the data in the block source of a YAML file")
    if mapped is not None:
        raise refused("must have no target_transform", mapped, "map the labels in the loop")
    if (numbers := sorted(places.values())) != list(range(len(places))):
        raise refused("must have class_to_idx with the numbers from 0 on, each once", numbers, "number the classes so")
    return samples, sorted(places, key=places.__getitem__)
