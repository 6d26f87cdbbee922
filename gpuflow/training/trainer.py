"""Trains a model of torchvision or timm on a loader's batches, with checkpoints to resume: a reference trainer."""

from __future__ import annotations

import copy
import errno
import glob
import math
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from gpuflow.config import Config
from gpuflow.engines.model_library import load_pretrained, named_model, size_fault, usual_sizes
from gpuflow.errors import ConfigError, GpuflowError, Problem, StateError, reason_of
from gpuflow.loader.assemble import build_loader, open_whole
from gpuflow.pipeline.rng import key64
from gpuflow.runtime.files import atomic_write, locked_folder, replaced_file
from gpuflow.runtime.preemption import Preemption
from gpuflow.runtime.ranks import Group, Ranks, device_of_rank, gather, process_group
from gpuflow.training.checkpoint import read_resumable, save_checkpoint
from gpuflow.training.objective import Objective, conflict, mean_average_precision, objective_of
from gpuflow.training.results import Results

_READ_SECONDS = 0.5
_RATES = {"sgd": (0.1, 256), "adamw": (1e-3, 1024)}
"""The learning rate for a step of this many samples; for others in proportion (Goyal 2017; Touvron 2021)."""
_DECAYS = {"sgd": 1e-4, "adamw": 0.05}
_AUXILIARY_WEIGHT = 0.3
"""The weight of the loss of an auxiliary classifier (Szegedy et al., 2015)."""
_STATISTICS_SAMPLES = 256
"""Training samples of a rank over which BatchNorm's statistics are recomputed after an epoch."""
_WARM_SHARE, _WARM_STEPS, _WARM_MOST = 0.05, 100, 0.3
"""The warm-up takes the first share of all steps, but at least this many steps, and at most the last share."""
_BEST = "best.pt"


@dataclass(frozen=True, slots=True)
class PassResult:
    """Holds the mean loss, measures such as the accuracy, and images per second of one pass, for all ranks.

    Args:
        loss, measures: over `steps`. See `Objective.measures`.
        images_per_s: since this run began the pass.
        steps: the steps of the pass that loss and measures cover, from 0: all, unless a run ended or resumed within it.
        steps_in_pass: the number of all steps.
    """

    loss: float
    measures: Mapping[str, float]
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

    The block says how: loss, optimizer, schedule, moving average. By default, the learning rate of SGD with momentum
    0.9 is warmed up over the first 5% of the steps (in short runs over 100 steps, or 30%) and then follows a cosine. On
    the CPU, a run that is interrupted at any step and resumed ends with the same weights as an uninterrupted one.

    Where `train` mixes samples, the loss takes the mixed labels. Validation has the labels of the source.

    `<train.out>` gets last.pt; best.pt, a copy of the checkpoint with the best validation so far; metrics.csv with a
    row for each epoch; and classes.csv with recall and precision of each class.

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
            files = [self.checkpoint.with_name(name) for name in (_BEST, Results.METRICS, Results.CLASSES)]
            left = [file for file in files if file.exists()]
        resume = self._found is not None if resume == "auto" else resume
        if not (resume or force) and self._ranks.rank == 0:
            action = "--force overwrites it, another directory keeps both"
            if self._found is not None:
                action = f"--resume goes on with that run, {action}"
                raise self._out_error("holds the checkpoint of another run", action)
            if left:
                raise self._out_error(f"holds {left[0].name} of another run", action)
        self._stale = [] if resume else left  # the first save removes them
        self.device = device_of_rank(device, self._ranks)
        _refuse_untrainable(config)
        whole = open_whole(config)
        self._objective = objective_of(config, whole)
        names = [name for name in ("train", "val") if name == "train" or name in config.pipelines]
        rank, size = self._ranks.rank, self._ranks.world_size
        self.loaders = {
            name: build_loader(config, name, rank=rank, world_size=size, device=self.device, whole=whole)
            for name in names
        }
        self.train_loader, self.val_loader = self.loaders["train"], self.loaders.get("val")
        torch.manual_seed(config.source.seed)
        self.model: nn.Module = _model(config, self._objective.outputs)
        if not resume:
            wanted, outputs = self._spec.pretrained, self._objective.outputs
            self._origin = load_pretrained(self.model, self._spec.model, outputs, wanted, f"{config.path}:")
        self.model.to(self.device, memory_format=torch.channels_last)  # type: ignore[call-overload]
        self._optimizer = self._new_optimizer()
        self._average = copy.deepcopy(self.model) if self._spec.ema is not None else None
        self._results = Results(self.checkpoint.parent, tensorboard=self._spec.tensorboard)
        self._history: list[dict[str, float]] = []
        self._unvalidated: dict[str, float] | None = None
        self._best: dict[str, float] | None = None
        self._steps_in_all = self._spec.epochs * len(self.train_loader)
        self.step, self.epoch = 0, 0
        self.preempted, self._preemption = False, preemption
        self._epoch_sums: list[float] | None = None
        self.preprocessing = (self.val_loader or self.train_loader).preprocessing
        if resume:
            self._resume()

    @property
    def header(self) -> list[str]:
        """Return lines that name what is trained: model, data, device and folder."""
        spec, loader, outputs = self._spec, self.train_loader, self._objective.outputs
        count = sum(weight.numel() for weight in self.model.parameters())
        what = "numbers each" if self._objective.labels == "numbers" else "classes"
        validated = f"{self.val_loader.samples_per_epoch:,} to validate" if self.val_loader else "none to validate"
        more = (f", {spec.amp}" if spec.amp else "") + (f", ema {spec.ema:g}" if spec.ema else "")
        return [
            f"model     {spec.model}, {count:,} parameters, {self._origin}",
            f"data      {' and '.join(source.where for source in self._config.sources)}: {loader.samples_per_epoch:,} "
            f"samples to train, {validated}, {outputs:,} {what}",
            f"training  {spec.epochs:,} epochs of {len(loader):,} steps of {loader.samples_per_step:,} samples: "
            f"{self._objective.loss}, {spec.optimizer}, {spec.schedule} from {self._highest_rate():.3g}{more}",
            f"device    {self.device}" + (f", {self._ranks.world_size} ranks" if self._ranks.world_size > 1 else ""),
            f"folder    {self.checkpoint.parent}",
        ]

    def next_command(self, file: str, overrides: Sequence[str]) -> list[str]:
        """Return the command that follows this run: the same with --resume, or after the last epoch what uses it."""
        command, best = [file, *overrides], self.checkpoint.with_name(_BEST)
        if self.step < self._steps_in_all or self._unvalidated is not None:
            return ["gpuflow", "train", *command, "--resume"]
        model = str(best if best.exists() else self.checkpoint)
        if self._config.serve is None:
            return ["gpuflow", "export", *command, "--checkpoint", model, "--pt2", f"{model}2"]
        name = "evaluate" if self.val_loader is not None and self._objective.labels != "numbers" else "serve"
        return ["gpuflow", name, *command, f"serve.model.file={model}"]

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
        last_step = min(self._steps_in_all, self.step + (max_steps or self._steps_in_all))
        timeout = 2 * self._config.run.timeout_s
        result = None
        self._saved = self.step, time.monotonic()
        with ExitStack() as stack:
            for loader in self.loaders.values():
                stack.enter_context(loader)
            stack.enter_context(self._holding_out())
            stack.callback(self._results.close)
            group = stack.enter_context(process_group(self._ranks, self.device, timeout_seconds=timeout))
            replica = group.replicate(self.model)
            self._write_results()  # what a killed run left undone after its last save
            if self._unvalidated is not None:
                result = self._complete_epoch(group, events)
            while self.step < last_step and not self.preempted:
                whole = self._train_epoch(replica, group, events, last_step)
                if whole:
                    self._recompute_statistics()
                if not whole or self.val_loader is not None:
                    self._save_of_rank_0()
                group.wait()
                if whole and (self.val_loader is None or not self.preempted):
                    result = self._complete_epoch(group, events)
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
        totals = _PassTotals(self.device, self._ranks, self._objective, carried)
        events.begin_pass("train", self.epoch, min((self.epoch + 1) * len(loader), last_step) - self.step)
        for batch in loader:
            images, labels = batch
            for parameters in self._optimizer.param_groups:
                parameters["lr"] = self._learning_rate()
            self._seed_step()
            with self._autocast():
                logits, auxiliary = self._logits(replica, images)
            losses = self._objective.losses(logits, labels, smoothed=True)
            for others in auxiliary:
                losses = losses + _AUXILIARY_WEIGHT * self._objective.losses(others, labels, smoothed=True)
            self._optimizer.zero_grad(set_to_none=True)
            losses.mean().backward()  # type: ignore[no-untyped-call]
            self._optimizer.step()
            self.step = before + batch.step + 1
            self._update_average()
            totals.add(losses.detach(), logits.detach(), labels, torch.ones_like(losses, dtype=torch.bool))
            events.step(*totals.so_far())
            if self.step >= last_step or self._must_end():
                break
            if loader.state_dict()["epoch"] == self.epoch:  # otherwise the epoch's end follows, and its save
                self._save_if_due(totals, not first, group)
        whole = bool(loader.state_dict()["epoch"] != self.epoch)
        done = len(loader) - steps + self.step - before
        result = totals.result(group, range(first, done), len(loader))
        events.end_pass("train", self.epoch, result)
        self._epoch_sums = None if whole or first else totals.of_all_ranks(group)
        if whole:
            about = {"epoch": self.epoch + 1, "step": self.step, "lr": self._optimizer.param_groups[0]["lr"]}
            self._unvalidated = {**about, "images_per_s": result.images_per_s, **_columns("train", result)}
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
            elif self._config.on_error_of("train")[0] == "skip" and self.train_loader.stats()["bad"]:
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

        Those of training are averages over the last steps, in which weights change: early in a run, validation with
        them would give losses far above that of guessing. The batches are the first ones of the epoch that has ended,
        which a resumed run takes, too. The model of averaged weights gets its statistics in the same way.
        """
        models = [model for model in (self.model, self._average) if model is not None]
        layers = [layer for model in models for layer in model.modules()]
        norms = [layer for layer in layers if isinstance(layer, nn.modules.batchnorm._BatchNorm)]
        if not norms:
            return
        loader, state = self.train_loader, self.train_loader.state_dict()
        momenta = [norm.momentum for norm in norms]
        for norm in norms:
            norm.reset_running_stats()
            norm.momentum = None  # an average in which every batch counts the same
        loader.set_epoch(self.epoch)
        loader.audited = False
        for model in models:
            model.train()
        for images, _ in islice(loader, math.ceil(_STATISTICS_SAMPLES / loader.batch_size)):
            for model in models:
                self._seed_step()
                with self._autocast():
                    self._logits(model, images)
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
        loader.load_state_dict(state)
        loader.audited = True

    def _complete_epoch(self, group: Group, events: TrainerEvents) -> PassResult | None:
        """Validate an epoch, unless the end is requested in between, and save with its results.

        If a run ends before, its checkpoint says that the epoch is not validated, and the next run begins with that.
        """
        assert self._unvalidated is not None
        row, result, counts = self._unvalidated, None, None
        if self.val_loader is not None:
            result, counts = self._validate(group, events)
            if len(result.steps) < result.steps_in_pass:
                return result
            row = {**row, **_columns("val", result)}
            if self._objective.is_better(result.measures, self._best):
                self._best = {**result.measures, "step": self.step}
        self._history.append(row)
        self._unvalidated = None
        if self._ranks.rank == 0:
            with self._locating():  # before the save: if the run is killed in between, the next one does it again
                self._results.add_epoch(row, self.train_loader.classes, counts)
        self._save_of_rank_0()
        self._write_results()
        return result

    def _write_results(self) -> None:
        """Write metrics.csv, and copy last.pt to best.pt if it is the best one. Only rank 0 writes."""
        if not self._history or self._ranks.rank != 0:
            return
        with self._locating():
            self._results.write_epochs(self._history)
            if self._best is not None and self._best["step"] == self.step and self._unvalidated is None:
                with self.checkpoint.open("rb") as last, atomic_write(self.checkpoint.with_name(_BEST)) as best:
                    shutil.copyfileobj(last, best)

    @torch.no_grad()
    def _validate(self, group: Group, events: TrainerEvents) -> tuple[PassResult, list[list[int]] | None]:
        """Validate once, or until the end is requested. Return the result, and `Objective.counts` if there are classes.

        Samples that a rank repeats to fill its last step are not counted.
        """
        assert self.val_loader is not None
        model = self.model if self._average is None else self._average
        group.share(model.buffers())  # batch statistics differ by rank; the checkpoint has those of rank 0
        model.eval()
        totals, done, ranked = _PassTotals(self.device, self._ranks, self._objective), 0, list[Any]()
        counts = torch.zeros((3, self._objective.outputs), dtype=torch.int64, device=self.device)
        events.begin_pass("val", self.epoch, len(self.val_loader))
        self.val_loader.set_epoch(self.epoch)  # so that a resumed run draws the same
        for batch in self.val_loader:
            images, labels = batch
            with self._autocast():
                logits = model(images)
            totals.add(self._objective.losses(logits, labels), logits, labels, batch.valid)
            if self._objective.labels != "numbers":
                counts += self._objective.counts(logits, labels, batch.valid)
            if self._objective.labels == "classes":
                ranked.append(torch.stack([logits.float(), labels])[:, batch.valid].cpu().numpy())
            events.step(*totals.so_far())
            done = batch.step + 1
            if self._must_end():
                break
        result = totals.result(group, range(done), len(self.val_loader))
        if ranked:
            measure = mean_average_precision(*np.concatenate(gather(ranked), axis=1))
            result = replace(result, measures={**result.measures, "map": measure})
        events.end_pass("val", self.epoch, result)
        group.sum(counts)
        return result, None if self._objective.labels == "numbers" else counts.tolist()

    # --- steps ------------------------------------------------------------------------------------------------------

    def _new_optimizer(self) -> torch.optim.Optimizer:
        """Return the optimizer that `train.optimizer` names."""
        spec, rate, weights = self._spec, self._highest_rate(), list(self.model.parameters())
        decay = _DECAYS[spec.optimizer] if spec.weight_decay is None else spec.weight_decay
        if spec.optimizer == "sgd":
            return torch.optim.SGD(weights, lr=rate, momentum=0.9, weight_decay=decay, nesterov=True)
        matrices: dict[str, Any] = {"params": [weight for weight in weights if weight.ndim > 1]}
        others = {"params": [weight for weight in weights if weight.ndim <= 1], "weight_decay": 0.0}
        return torch.optim.AdamW([matrices, others], rate, weight_decay=decay)

    def _autocast(self) -> torch.autocast:
        """Return the context in which the model runs: in bfloat16 if `train.amp` says so. It needs no loss scaling."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self._spec.amp is not None)

    @torch.no_grad()
    def _update_average(self) -> None:
        """Move the moving average towards the weights of this step; integers, such as counts of batches, are copied."""
        if self._average is None or self._spec.ema is None:
            return
        decay = min(self._spec.ema, (1 + self.step) / (10 + self.step))
        pairs = list(zip(self._average.state_dict().values(), self.model.state_dict().values(), strict=True))
        floats = [pair for pair in pairs if pair[0].is_floating_point()]
        torch._foreach_lerp_([average for average, _ in floats], [value for _, value in floats], 1 - decay)
        for average, value in pairs:
            if not average.is_floating_point():
                average.copy_(value)

    def _highest_rate(self) -> float:
        """Return `train.lr`, by default in proportion to the samples of a step."""
        if self._spec.lr is not None:
            return self._spec.lr
        loader, (rate, per_samples) = self.train_loader, _RATES[self._spec.optimizer]
        samples = min(loader.samples_per_step, loader.samples_per_epoch)
        return rate * samples / per_samples

    def _learning_rate(self) -> float:
        """Return the learning rate of the next step, which depends on its number alone."""
        spec, highest, steps = self._spec, self._highest_rate(), self._steps_in_all
        if spec.warmup_epochs is None:
            warm = max(1, round(max(_WARM_SHARE * steps, min(_WARM_STEPS, _WARM_MOST * steps))))
        else:
            warm = round(spec.warmup_epochs * len(self.train_loader))
        if self.step < warm:
            return highest * (self.step + 1) / warm
        if spec.schedule == "step":
            every = spec.step_epochs or max(1, spec.epochs // 3)
            return highest * (spec.step_factor or 0.1) ** (self.step // (every * len(self.train_loader)))
        done = (self.step - warm) / max(1, steps - warm)
        return highest * 0.5 * (1 + math.cos(math.pi * done))

    def _seed_step(self) -> None:
        """Seed torch so that random layers, such as dropout, depend only on the step and rank, also after a resume."""
        torch.manual_seed(key64("step", self._config.source.seed, self.step, self._ranks.rank))

    # --- checkpoints ------------------------------------------------------------------------------------------------

    def save(self) -> Path:
        """Write `last.pt`, whole or not at all: weights, moving average, optimizer, the loader's state, the
        preprocessing's hash, and the results so far. Raises ConfigError if `train.out` cannot be written.
        """
        with self._locating():
            save_checkpoint(
                self.checkpoint,
                self.model,
                arch=self._spec.model,
                loader=self.train_loader,
                val=self.val_loader,
                optimizer=self._optimizer,
                outputs=self._objective.outputs if self._objective.labels == "numbers" else None,
                activation=self._objective.activation,
                step=self.step,
                epoch_sums=self._epoch_sums,
                optimizer_name=self._spec.optimizer,
                history=self._history,
                unvalidated=self._unvalidated,
                best=self._best,
                **({} if self._average is None else {"ema": self._average.state_dict()}),
            )
            for file in self._stale:
                file.unlink(missing_ok=True)
            self._stale = []
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
        by_steps = self.step - step >= (every.steps or math.inf)
        by_time = time.monotonic() - seconds >= 60 * (every.minutes or math.inf)
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
                for name in (self.checkpoint.name, _BEST, Results.METRICS, Results.CLASSES):
                    written = replaced_file(self.checkpoint.with_name(name))
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
            action = "wait for it, or name another directory"
            raise self._out_error("is in use by another run of gpuflow train", action) from error
        except OSError as error:
            reason = f"cannot be written: {error.strerror}: {str(error.filename or self.checkpoint)!r}"
            refused = isinstance(error, PermissionError | FileNotFoundError | NotADirectoryError | IsADirectoryError)
            action = (
                "name another directory" if refused else "free space there or name another directory; --resume goes on"
            )
            raise self._out_error(reason, action) from error

    def _out_error(self, rule: str, action: str) -> ConfigError:
        return ConfigError([Problem(f"{self._config.path}:", rule, self._spec.out, action, ("train", "out"))])

    def _resume(self) -> None:
        state = read_resumable(self.checkpoint, self.device)
        ours = {
            "arch": self._spec.model,
            "classes": [] if self._objective.labels == "numbers" else list(self.train_loader.classes),
            "outputs": self._objective.outputs,
            "optimizer_name": self._spec.optimizer,
            "preprocessing": self.preprocessing,
        }
        state = {"outputs": len(state["classes"]), "optimizer_name": "sgd", **state}  # older checkpoints have neither
        for key, value in ours.items():
            if state[key] != value:
                name = key.removesuffix("_name")
                raise StateError(
                    f"{self.checkpoint}: was trained with {name} {state[key]}, the configuration says {value}; "
                    "restore the configuration or set another train.out"
                )
        try:
            self.model.load_state_dict(state["model"])
            if self._average is not None:
                self._average.load_state_dict(state.get("ema") or state["model"])
            decays = [parameters["weight_decay"] for parameters in self._optimizer.param_groups]
            self._optimizer.load_state_dict(state["optimizer"])
            for parameters, decay in zip(self._optimizer.param_groups, decays, strict=True):
                parameters["weight_decay"] = decay  # what the configuration says now
        except (RuntimeError, ValueError, LookupError, TypeError, AttributeError) as error:
            rule = f"does not hold the weights of {self._spec.model} and its optimizer: {reason_of(error)}"
            raise StateError(f"{self.checkpoint}: {rule}; restore an older copy, or train without --resume") from error
        try:
            self.train_loader.load_state_dict(state["loader"])
        except StateError as error:
            reason = str(error).partition("; ")[0]
            action = "restore the files and the configuration that it was trained with, or set another train.out"
            raise StateError(f"{self.checkpoint}: {reason}; {action}") from error
        sums = state.get("epoch_sums") or []  # older checkpoints have none of these, or other sums
        self._epoch_sums = sums if len(sums) == 2 + self._objective.sums_per_batch else None
        self._history, self._best = state.get("history") or [], state.get("best")
        self._unvalidated = state.get("unvalidated")
        self.step = self._steps_done()
        self._origin = f"{self.checkpoint} at step {self.step:,}"
        if self._unvalidated is not None:
            self.epoch = int(self._unvalidated["epoch"]) - 1

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
        objective: computes what is summed up besides losses and images.
        carried: what all ranks together summed up before this run: losses, sums of the objective, images.
    """

    def __init__(
        self, device: torch.device, ranks: Ranks, objective: Objective, carried: Sequence[float] | None = None
    ) -> None:
        self._ranks, self._objective = ranks, objective
        self._images_before = carried[-1] if carried else 0.0
        first = carried if carried and ranks.rank == 0 else [0.0] * (2 + objective.sums_per_batch)
        self._sums = torch.tensor(first, dtype=torch.float64, device=device)
        self._start = time.perf_counter()
        self._so_far, self._next_read = (0.0, 0.0), self._start

    def add(self, losses: torch.Tensor, logits: torch.Tensor, labels: torch.Tensor, valid: torch.Tensor) -> None:
        """Add one batch: its losses [N], logits and labels, and which samples count."""
        loss, images = losses.where(valid, 0).sum(dtype=torch.float64), valid.sum(dtype=torch.float64)
        self._sums += torch.cat([loss[None], self._objective.sums(logits, labels, valid), images[None]])

    def so_far(self) -> tuple[float, float]:
        """Return rank 0's mean loss and the images per second of all ranks, at most half a second old."""
        if (now := time.perf_counter()) >= self._next_read:
            loss, *_, images = self._sums.tolist()
            rate = self._ranks.world_size * (images - self._images_before) / (time.perf_counter() - self._start)
            self._so_far = loss / max(1, images), rate
            self._next_read = now + _READ_SECONDS
        return self._so_far

    def of_all_ranks(self, group: Group) -> list[float]:
        """Return the sums of all ranks: losses, sums of the objective, images."""
        sums = self._sums.clone()
        group.sum(sums)
        return sums.tolist()

    def result(self, group: Group, steps: range, steps_in_pass: int) -> PassResult:
        """Return the means over all ranks, which cover these steps."""
        loss, *sums, images = self.of_all_ranks(group)
        rate = (images - self._images_before) / (time.perf_counter() - self._start)
        return PassResult(loss / max(1, images), self._objective.results(sums, images), rate, steps, steps_in_pass)


def _columns(name: str, result: PassResult) -> dict[str, float]:
    """Return loss and measures as columns of metrics.csv, such as `val_loss` and `val_accuracy`."""
    return {f"{name}_{key}": value for key, value in {"loss": result.loss, **result.measures}.items()}


def _identity(path: Path) -> tuple[int, int] | None:
    """Return what differs once another file has taken this path; None if no file is there."""
    stat = path.stat() if path.is_file() else None
    return None if stat is None else (stat.st_ino, stat.st_mtime_ns)


def _refuse_untrainable(config: Config) -> None:
    """Raise ConfigError where a pipeline does not give what classifiers take: float32 images in colour, and none that
    are mixed in validation."""
    problems = []

    def refuse(name: str, rule: str, action: str, key: str = "stages") -> None:
        problems.append(conflict(config, ("pipelines", name, key), rule, action))

    for name in ("train", "val"):
        if name in config.views:
            rule = "give several images of each sample, and gpuflow train takes one"
            refuse(name, rule, "give it stages, or iterate gpuflow.load in a training loop of your own", "views")
        if name not in config.programs:
            continue
        image = config.programs[name].result
        if image.dtype != "float32":
            rule = f"must give float32 images to train a model on, give {image.dtype}"
            refuse(name, rule, "end them with - normalize: {mean: imagenet, std: imagenet}")
        if image.shape[-1] != 3:
            rule = f"must give images of 3 channels, which {config.train.model} takes, give {image.shape[-1]}"
            refuse(name, rule, "decode with color: rgb")
        if name == "val" and config.programs[name].mixings:
            refuse(name, "must not mix samples to validate with", "remove its mixing stages")
    if problems:
        raise ConfigError(problems)


def _model(config: Config, outputs: int) -> nn.Module:
    """Return the model of `train.model`, with new weights. Raises ConfigError unless there is one, and it takes the
    images of train and val."""
    name, problems = config.train.model, []
    model = named_model(name, outputs, f"{config.path}:")
    for pipeline in ("train", "val"):
        height, width, _ = config.programs[pipeline].result.shape if pipeline in config.programs else (None, None, 3)
        if height is None or width is None:
            continue
        if fault := size_fault(model, height, width, training=pipeline == "train"):
            fitting = [size for size in usual_sizes(name) if not size_fault(model, size, size, training=True)]
            action = f"set train.size={fitting[0]}, or another size or model" if fitting else "take another model"
            rule = f"must take the images of {pipeline}, which have {height}x{width} pixels: {fault}"
            problems.append(conflict(config, ("train", "model"), rule, action, name))
    if problems:
        raise ConfigError(problems)
    return model
