"""Trains a torchvision classification model on a loader's batches, with checkpoints that can be resumed."""

from __future__ import annotations

import errno
import glob
import math
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal, NoReturn

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from gpuflow.config import Config
from gpuflow.engines.pytorch import build_model
from gpuflow.errors import ConfigError, GpuflowError, Problem, StateError, reason_of, suggest
from gpuflow.loader.assemble import build_loader, open_whole
from gpuflow.pipeline.rng import key64
from gpuflow.runtime.files import locked_folder, replaced_file
from gpuflow.runtime.preemption import Preemption
from gpuflow.runtime.ranks import Group, Ranks, device_of_rank, process_group
from gpuflow.sources import Source, has_labels, has_one_class
from gpuflow.training.checkpoint import known_models, read_resumable, save_checkpoint, usual_sizes

_READ_SECONDS = 0.5
_LEARNING_RATE, _PER_SAMPLES = 0.1, 256
"""The learning rate for a step of 256 samples; for others in proportion (Goyal et al., 2017)."""
_AUXILIARY_WEIGHT = 0.3
"""The weight of the loss of an auxiliary classifier (Szegedy et al., 2015)."""
_STATISTICS_SAMPLES = 256
"""Training samples of a rank over which BatchNorm's statistics are recomputed after an epoch."""
_WARM_SHARE, _WARM_STEPS, _WARM_MOST = 0.05, 100, 0.3
"""The warm-up takes the first share of all steps, but at least this many steps, and at most the last share."""


@dataclass(frozen=True, slots=True)
class PassResult:
    """Holds the mean loss, share of correct predictions and images per second of one pass, for all ranks.

    With mixed labels, a prediction is correct if it is the class with the highest probability.

    Args:
        loss, accuracy: over `steps`.
        images_per_s: since this run began the pass.
        steps: the steps of the pass that loss and accuracy cover, from 0: all, unless a run ended or resumed within it.
        steps_in_pass: the number of all steps.
    """

    loss: float
    accuracy: float
    images_per_s: float
    steps: range
    steps_in_pass: int


class TrainerEvents:
    """Receives the events of a running trainer. These methods do nothing; the command line shows a progress bar."""

    def begin_pass(self, name: str, epoch: int, steps: int) -> None: ...

    def step(self, loss: float, images_per_s: float) -> None: ...

    def end_pass(self, name: str, epoch: int, result: PassResult) -> None: ...


class Trainer:
    """Trains the model of the block `train` on the pipeline `train`, and validates on `val` where the file has one.

    SGD with momentum 0.9; the learning rate is warmed up over the first 5% of the steps (in short runs over 100 steps,
    or 30%) and then follows a cosine. On the CPU, a run that is interrupted at any step and resumed ends with the same
    weights as an uninterrupted one.

    Where `train` mixes samples, the loss is the cross entropy with the mixed labels. Validation has class labels.

    Several processes (ranks) can train one model: each trains on the batches of its rank, and gradients are averaged.
    Rank 0 writes the checkpoints, from which any number of ranks can resume.

    Args:
        config: a checked configuration.
        device: where to train; by default a GPU if torch sees one.
        resume: continue from `<train.out>/last.pt`; `auto`: if there is one.
        force: start anew where there is such a checkpoint, which the new run's replaces.
        ranks: the rank of this process and the number of ranks; by default one rank.
        preemption: says when to save and end early.

    Raises:
        ConfigError, SourceError, StateError, LoaderError: the configuration cannot be trained or resumed, or neither
            `resume` nor `force` is set, and `train.out` holds the checkpoint of another run.
    """

    def __init__(
        self,
        config: Config,
        *,
        device: str | None = None,
        resume: bool | Literal["auto"] = False,
        force: bool = False,
        ranks: Ranks | None = None,
        preemption: Preemption | None = None,
    ) -> None:
        self._config, self._spec, self._ranks = config, config.train, ranks or Ranks()
        self.checkpoint = Path(self._spec.out) / "last.pt"
        with self._locating():
            self._found = _identity(self.checkpoint)  # the first save compares with it
        resume = self._found is not None if resume == "auto" else resume
        if self._found is not None and not (resume or force) and self._ranks.rank == 0:
            self._refuse_out(
                "holds the checkpoint of another run",
                "--resume goes on with that run, --force overwrites it, another directory keeps both",
            )
        self.device = device_of_rank(device, self._ranks)
        _refuse_untrainable(config)
        whole = open_whole(config)
        _require_classes(config, whole)
        self.loaders = {
            name: build_loader(
                config,
                name,
                rank=self._ranks.rank,
                world_size=self._ranks.world_size,
                device=self.device,
                whole=whole,
            )
            for name in ("train", "val")
            if name == "train" or name in config.pipelines
        }
        self.train_loader, self.val_loader = self.loaders["train"], self.loaders.get("val")
        classes = self.train_loader.classes
        torch.manual_seed(config.source.seed)
        self.model: nn.Module = _model(config, len(classes)).to(self.device)
        self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self._optimizer = torch.optim.SGD(
            self.model.parameters(),
            lr=self._highest_rate(),
            momentum=0.9,
            weight_decay=self._spec.weight_decay,
            nesterov=True,
        )
        self._steps_in_all = self._spec.epochs * len(self.train_loader)
        self.step, self.epoch = 0, 0
        self.preempted, self._preemption = False, preemption
        self._saved = 0, time.monotonic()
        self._epoch_sums: list[float] | None = None
        self.preprocessing = (self.val_loader or self.train_loader).preprocessing
        if resume:
            self._resume()

    def run(self, events: TrainerEvents, *, max_steps: int | None = None) -> PassResult | None:
        """Train to the end, or for `max_steps` steps, or until `preemption` requests the end: then `preempted` is true.

        Writes a checkpoint after each epoch, within it as `train.save_every` says, and at the end.

        Returns:
            The last validation's result, or None where there was none.

        Raises:
            GpuflowError: another rank ended, or did not answer within twice `run.timeout_s`. A rank whose loader stalls
                raises its own error after `run.timeout_s`, that is, earlier.
            ConfigError: `train.out` cannot be written, or another run writes there.
        """
        last_step = min(self._steps_in_all, self.step + max_steps if max_steps is not None else self._steps_in_all)
        timeout = 2 * self._config.run.timeout_s
        result = None
        self._saved = self.step, time.monotonic()
        with ExitStack() as stack:
            for loader in self.loaders.values():
                stack.enter_context(loader)
            stack.enter_context(self._holding_out())
            group = stack.enter_context(process_group(self._ranks, self.device, timeout_seconds=timeout))
            replica = group.replicate(self.model)
            while self.step < last_step and not self.preempted:
                whole = self._train_epoch(replica, group, events, last_step)
                if whole:
                    self._recompute_statistics()
                self._save_of_rank_0()
                group.wait()
                if whole and self.val_loader is not None and not self.preempted:
                    result = self._validate(group, events)
        return result

    def _train_epoch(self, replica: nn.Module, group: Group, events: TrainerEvents, last_step: int) -> bool:
        """Train until the epoch ends, to `last_step` or until the end is requested; return whether the epoch ended."""
        loader = self.train_loader
        self.epoch = loader.state_dict()["epoch"]
        replica.train()
        before, steps = self.step, loader.steps_left
        first, carried = 0, self._epoch_sums
        if carried is None and loader.state_dict()["position"] > 0:
            first = max(1, len(loader) - steps)
        totals = _PassTotals(self.device, self._ranks, carried or (0.0, 0.0, 0.0))
        events.begin_pass("train", self.epoch, min((self.epoch + 1) * len(loader), last_step) - self.step)
        for batch in loader:
            images, labels = batch
            for parameters in self._optimizer.param_groups:
                parameters["lr"] = self._learning_rate()
            self._seed_step()
            logits, auxiliary = self._logits(replica, images)
            loss = F.cross_entropy(logits, labels)
            for others in auxiliary:
                loss = loss + _AUXILIARY_WEIGHT * F.cross_entropy(others, labels)
            self._optimizer.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
            self._optimizer.step()
            self.step = before + batch.step + 1
            correct = logits.argmax(dim=1) == (labels if labels.ndim == 1 else labels.argmax(dim=1))
            totals.add(loss.detach() * len(labels), correct.sum(), len(labels))
            events.step(*totals.so_far())
            if self.step >= last_step or self._must_end():
                break
            if loader.state_dict()["epoch"] == self.epoch:  # otherwise the epoch's end follows, and its save
                self._save_if_due(totals, not first, group)
        whole = bool(loader.state_dict()["epoch"] != self.epoch)
        done = len(loader) - steps + self.step - before
        events.end_pass("train", self.epoch, totals.result(group, range(first, done), len(loader)))
        self._epoch_sums = None if whole or first else totals.of_all_ranks(group)
        return whole

    def _must_end(self) -> bool:
        self.preempted = self._preemption is not None and self._preemption.requested()
        return self.preempted

    def _logits(self, replica: nn.Module, images: torch.Tensor) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
        """Return the model's logits, and those of its auxiliary classifiers, which GoogLeNet and Inception v3 have.

        Raises GpuflowError for one image, on whose 1x1 features BatchNorm cannot train.
        """
        try:
            output = replica(images)
            return (output, ()) if isinstance(output, torch.Tensor) else (output[0], output[1:])
        except ValueError as error:
            if len(images) > 1 or "more than 1 value per channel" not in str(error):
                raise
            samples, size = self.train_loader.samples_per_epoch, self.train_loader.batch_size
            if size == 1:
                action = "set pipelines.train.batch.size to 2 or more"
            elif self._config.on_error_of("train") == "skip" and self.train_loader.stats()["bad"]:
                action = "set pipelines.train.on_error: replace, or remove the images that `gpuflow scan` lists"
            elif samples <= size:
                action = "add images to the pipeline train"
            else:
                action = "set pipelines.train.batch.drop_last: true, or another size"
            raise GpuflowError(
                f"{self._config.path}: a batch of epoch {self.epoch} has one image ({samples:,} samples in batches of "
                f"{size}), with which {self._spec.model} cannot train; {action}"
            ) from error

    @torch.no_grad()
    def _recompute_statistics(self) -> None:
        """Set BatchNorm's statistics to those of the present weights, over a few batches of training.

        Those that it keeps while it trains are averages over the last steps. Early in a run the weights change faster,
        and validation and serving with such averages would give losses far above that of guessing. The batches are the
        first ones of the epoch that has ended: a resumed run takes the same ones, and each of them was read before. The
        loader is then set back.
        """
        norms = [layer for layer in self.model.modules() if isinstance(layer, nn.modules.batchnorm._BatchNorm)]
        if not norms:
            return
        loader, state = self.train_loader, self.train_loader.state_dict()
        momenta = [norm.momentum for norm in norms]
        for norm in norms:
            norm.reset_running_stats()
            norm.momentum = None  # an average in which every batch counts the same
        self.model.train()
        self._seed_step()
        loader.set_epoch(self.epoch)
        loader.audited = False
        for images, _ in islice(loader, math.ceil(_STATISTICS_SAMPLES / loader.batch_size)):
            self._logits(self.model, images)
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
        loader.load_state_dict(state)
        loader.audited = True

    @torch.no_grad()
    def _validate(self, group: Group, events: TrainerEvents) -> PassResult:
        """Validate once, or until the end is requested.

        Samples that a rank repeats to fill its last step are not counted.
        """
        assert self.val_loader is not None
        group.share(self.model.buffers())  # batch statistics differ by rank; the checkpoint has those of rank 0
        self.model.eval()
        totals, done = _PassTotals(self.device, self._ranks), 0
        events.begin_pass("val", self.epoch, len(self.val_loader))
        self.val_loader.set_epoch(self.epoch)  # so that a resumed run draws the same
        for batch in self.val_loader:
            images, labels = batch
            logits = self.model(images)
            losses = F.cross_entropy(logits, labels, reduction="none").where(batch.valid, 0)
            totals.add(losses.sum(), ((logits.argmax(dim=1) == labels) & batch.valid).sum(), batch.valid.sum())
            events.step(*totals.so_far())
            done = batch.step + 1
            if self._must_end():
                break
        result = totals.result(group, range(done), len(self.val_loader))
        events.end_pass("val", self.epoch, result)
        return result

    def _highest_rate(self) -> float:
        """Return `train.lr`, by default in proportion to the samples of a step."""
        if self._spec.lr is not None:
            return self._spec.lr
        loader = self.train_loader
        samples = min(loader.samples_per_step, loader.samples_per_epoch)
        return _LEARNING_RATE * samples / _PER_SAMPLES

    def _learning_rate(self) -> float:
        highest, steps = self._highest_rate(), self._steps_in_all
        warm = max(1, round(max(_WARM_SHARE * steps, min(_WARM_STEPS, _WARM_MOST * steps))))
        if self.step < warm:
            return highest * (self.step + 1) / warm
        done = (self.step - warm) / max(1, steps - warm)
        return highest * 0.5 * (1 + math.cos(math.pi * done))

    def _seed_step(self) -> None:
        """Seed torch so that random layers, such as dropout, depend only on the step and rank, also after a resume."""
        torch.manual_seed(key64("step", self._config.source.seed, self.step, self._ranks.rank))

    # --- checkpoints ------------------------------------------------------------------------------------------------

    def save(self) -> Path:
        """Write `last.pt`, whole or not at all: weights, optimizer, the loader's state, the preprocessing's hash.

        Raises:
            ConfigError: `train.out` cannot be written.
        """
        with self._locating():
            save_checkpoint(
                self.checkpoint,
                self.model,
                arch=self._spec.model,
                loader=self.train_loader,
                val=self.val_loader,
                optimizer=self._optimizer,
                step=self.step,
                epoch_sums=self._epoch_sums,
            )
            self._found = _identity(self.checkpoint)
        return self.checkpoint

    def _save_of_rank_0(self) -> None:
        """Save on rank 0, and note on each rank when that was."""
        self._saved = self.step, time.monotonic()
        if self._ranks.rank == 0:
            self.save()

    def _save_if_due(self, totals: _PassTotals, sums_are_whole: bool, group: Group) -> None:
        """Save within an epoch as `train.save_every` says, with the sums of the epoch so far if all ranks' are known.

        By steps, all ranks add up their sums. By time, rank 0 alone decides, and no other rank waits for it: then a
        resumed epoch reports the rest of it.
        """
        every, (step, seconds) = self._spec.save_every, self._saved
        by_steps = every.steps is not None and self.step - step >= every.steps
        by_time = every.minutes is not None and time.monotonic() - seconds >= 60 * every.minutes
        if not (by_steps or by_time):
            return
        known = sums_are_whole and (by_steps or self._ranks.world_size == 1)
        self._epoch_sums = totals.of_all_ranks(group) if known else None
        self._save_of_rank_0()

    @contextmanager
    def _holding_out(self) -> Iterator[None]:
        """Hold `train.out` for this run alone, and remove what a killed run left half-written. Only rank 0 writes."""
        if self._ranks.rank != 0:
            yield
            return
        with ExitStack() as stack:
            with self._locating():
                stack.enter_context(locked_folder(self.checkpoint.parent))
                if self.checkpoint.is_dir():
                    raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(self.checkpoint))
                written = replaced_file(self.checkpoint)
                for partial in written.parent.glob(f".{glob.escape(written.name)}.*.partial"):
                    partial.unlink(missing_ok=True)
            if self._found != _identity(self.checkpoint):
                raise StateError(
                    f"{self.checkpoint}: another run has written it since this one started; go on with --resume, or "
                    "overwrite it with --force"
                )
            yield

    @contextmanager
    def _locating(self) -> Iterator[None]:
        """Name the key where `train.out` cannot be written."""
        try:
            yield
        except BlockingIOError as error:
            self._refuse_out(
                "is in use by another run of gpuflow train", "wait for it, or name another directory", error
            )
        except OSError as error:
            reason = f"cannot be written: {error.strerror}: {str(error.filename or self.checkpoint)!r}"
            refused = isinstance(error, PermissionError | FileNotFoundError | NotADirectoryError | IsADirectoryError)
            action = (
                "name another directory" if refused else "free space there or name another directory; --resume goes on"
            )
            self._refuse_out(reason, action, error)

    def _refuse_out(self, rule: str, action: str, cause: OSError | None = None) -> NoReturn:
        place = f"{self._config.path}:"
        problem = Problem(place, rule, self._spec.out, action, ("train", "out"), "config.rule")
        raise ConfigError([problem]) from cause

    def _resume(self) -> None:
        state = read_resumable(self.checkpoint, self.device)
        for key, ours in (("arch", self._spec.model), ("classes", list(self.train_loader.classes))):
            if state[key] != ours:
                raise StateError(
                    f"{self.checkpoint}: was trained with {key} {state[key]}, the configuration says {ours}; "
                    "restore the configuration or set another train.out"
                )
        if state["preprocessing"] != self.preprocessing:
            raise StateError(
                f"{self.checkpoint}: was trained with preprocessing {state['preprocessing']}, the configuration's is "
                f"{self.preprocessing}; restore the stages or set another train.out"
            )
        try:
            self.model.load_state_dict(state["model"])
            self._optimizer.load_state_dict(state["optimizer"])
            for parameters in self._optimizer.param_groups:  # what the configuration says now
                parameters["weight_decay"] = self._spec.weight_decay
        except (RuntimeError, ValueError, LookupError, TypeError, AttributeError) as error:
            rule = f"does not hold the weights of {self._spec.model} and its optimizer: {reason_of(error)}"
            raise StateError(f"{self.checkpoint}: {rule}; restore an older copy, or train without --resume") from error
        try:
            self.train_loader.load_state_dict(state["loader"])
        except StateError as error:
            reason = str(error).partition("; ")[0]
            action = "restore the files and the configuration that it was trained with, or set another train.out"
            raise StateError(f"{self.checkpoint}: {reason}; {action}") from error
        self._epoch_sums = state.get("epoch_sums")  # older checkpoints have none
        self.step = self._steps_done()

    def _steps_done(self) -> int:
        """Return the number of finished steps, counted in steps of the present number of ranks."""
        loader, left = self.train_loader, self.train_loader.steps_left
        done = (loader.upcoming_epoch + 1) * len(loader) - left
        if left == 0:  # what other ranks left of the epoch fills no step of these
            loader.set_epoch(loader.upcoming_epoch + 1)
            self._epoch_sums = None
        return done


class _PassTotals:
    """Sums over the batches of a pass. The sums stay on the device, because reading them waits for all queued work.

    Args:
        device: where the batches are.
        ranks: those that make the same pass.
        carried: what all ranks together summed up before this run: losses, correct predictions, images.
    """

    def __init__(self, device: torch.device, ranks: Ranks, carried: Sequence[float] = (0.0, 0.0, 0.0)) -> None:
        self._carried, self._ranks = carried, ranks
        first = carried if ranks.rank == 0 else (0.0, 0.0, 0.0)
        self._sums = torch.tensor(first, dtype=torch.float64, device=device)
        self._start = time.perf_counter()
        self._so_far, self._next_read = (0.0, 0.0), self._start

    def add(self, loss: torch.Tensor, correct: torch.Tensor, images: torch.Tensor | int) -> None:
        """Add one batch: the sum of its losses, its correct predictions, its images."""
        for i, value in enumerate((loss, correct, images)):
            self._sums[i].add_(value)

    def so_far(self) -> tuple[float, float]:
        """Return rank 0's mean loss and the images per second of all ranks, at most half a second old."""
        if (now := time.perf_counter()) >= self._next_read:
            loss, _, images = self._sums.tolist()
            rate = self._ranks.world_size * (images - self._carried[2]) / (time.perf_counter() - self._start)
            self._so_far = loss / max(1, images), rate
            self._next_read = now + _READ_SECONDS
        return self._so_far

    def of_all_ranks(self, group: Group) -> list[float]:
        """Return the sums of all ranks: losses, correct predictions, images."""
        sums = self._sums.clone()
        group.sum(sums)
        return sums.tolist()

    def result(self, group: Group, steps: range, steps_in_pass: int) -> PassResult:
        """Return the means over all ranks, which cover these steps."""
        loss, correct, images = self.of_all_ranks(group)
        rate = (images - self._carried[2]) / (time.perf_counter() - self._start)
        return PassResult(loss / max(1, images), correct / max(1, images), rate, steps, steps_in_pass)


def _identity(path: Path) -> tuple[int, int] | None:
    """Return what differs once another file has taken this path; None if no file is there."""
    if not path.is_file():
        return None
    stat = path.stat()
    return stat.st_ino, stat.st_mtime_ns


def _refuse_untrainable(config: Config) -> None:
    """Raise ConfigError where a pipeline does not give what torchvision's models take: float32 images in colour,
    and in validation one class each."""
    problems = []
    for name in ("train", "val"):
        if name in config.views:
            rule = "give several images of each sample, and gpuflow train takes one"
            action = "give it stages, or iterate gpuflow.load in a training loop of your own"
            path = ("pipelines", name, "views")
            problems.append(Problem(f"{config.path}:", rule, action=action, path=path, code="config.conflict"))
        if name not in config.programs:
            continue
        image, path = config.programs[name].result, ("pipelines", name, "stages")
        if image.dtype != "float32":
            rule = f"must give float32 images to train a model on, give {image.dtype}"
            action = "end them with - normalize: {mean: imagenet, std: imagenet}"
            problems.append(Problem(f"{config.path}:", rule, action=action, path=path, code="config.conflict"))
        if image.shape[-1] != 3:
            rule = f"must give images of 3 channels, which {config.train.model} takes, give {image.shape[-1]}"
            action = "decode with color: rgb"
            problems.append(Problem(f"{config.path}:", rule, action=action, path=path, code="config.conflict"))
        if name == "val" and config.programs[name].mixings:
            rule, action = "must not mix samples to validate with", "remove its mixing stages"
            problems.append(Problem(f"{config.path}:", rule, action=action, path=path, code="config.conflict"))
    if problems:
        raise ConfigError(problems)


def _require_classes(config: Config, source: Source) -> None:
    """Raise ConfigError unless each sample of the source has one class, which is what a classifier learns."""
    if has_one_class(source):
        return
    action = "iterate gpuflow.load in a training loop of your own"
    if not has_labels(source):
        gives, action = "no label", f"declare a label in source.fields, or {action}"
    elif source.labels.dtype == np.uint8:
        gives = "several classes (a label of the kind classes)"
        action += ", with torch's binary_cross_entropy_with_logits as the loss (docs/labels.md)"
    else:
        one = source.labels.ndim == 1
        gives = "a number (a label of the kind number)" if one else "several numbers (a label of the kind vector)"
        action += ", with a loss such as torch's mse_loss (docs/labels.md)"
    rule = f"must give gpuflow train one class for each sample, gives {gives}"
    raise ConfigError([Problem(f"{config.path}:", rule, action=action, path=("source",), code="config.conflict")])


def _model(config: Config, classes: int) -> nn.Module:
    """Return the model of `train.model`. Raises ConfigError unless torchvision has it, and it takes the images of train
    and val."""
    known, name = known_models(), config.train.model
    at, path = f"{config.path}:", ("train", "model")
    if name not in known:
        rule = "is not a torchvision classification model"
        raise ConfigError([Problem(at, rule, name, suggest(name, known), path, "config.range")])
    model, problems = build_model(name, classes), []
    for pipeline in ("train", "val"):
        height, width, _ = config.programs[pipeline].result.shape if pipeline in config.programs else (None, None, 3)
        if height is None or width is None:
            continue
        if fault := _size_fault(model, height, width, training=pipeline == "train"):
            fitting = [size for size in usual_sizes(name) if not _size_fault(model, size, size, training=True)]
            action = f"set train.size={fitting[0]}, or another size or model" if fitting else "take another model"
            rule = f"must take the images of {pipeline}, which have {height}x{width} pixels: {fault}"
            problems.append(Problem(at, rule, name, action, path, "config.conflict"))
    if problems:
        raise ConfigError(problems)
    return model


def _size_fault(model: nn.Module, height: int, width: int, *, training: bool) -> str:
    """Return why a model does not take images of this size; empty if it does. Runs it on tensors that have no
    values."""
    weights = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    shapes = {name: torch.empty_like(value, device="meta") for name, value in weights.items()}
    model.train(training)
    try:
        torch.func.functional_call(model, shapes, torch.empty(2, 3, height, width, device="meta"))
    except (RuntimeError, ValueError, AssertionError) as error:
        return reason_of(error)
    finally:
        model.train()
    return ""
