"""Builds a loader from a checked configuration. Every part of a loader is chosen here."""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np
import torch

from gpuflow.config import BatchSpec, Config
from gpuflow.config.models import mixing_problems, require_record_fields
from gpuflow.config.resources import decode_processes_of, readers_of, threads_of
from gpuflow.errors import BadSampleError, ConfigError, Problem, SourceError, show
from gpuflow.loader.bad_samples import BadSamples
from gpuflow.loader.loader import Loader
from gpuflow.loader.plan import LoaderPlan, cpu_share_of, place
from gpuflow.loader.records import TurnedImages, target_mapper
from gpuflow.loader.sampler import (
    ListedEpochs,
    MixedOrder,
    MixInOrder,
    Order,
    ShardedOrder,
    ShuffledOrder,
    WeightedOrder,
)
from gpuflow.pipeline.rng import key64
from gpuflow.pipeline.targets import TargetRules
from gpuflow.runtime.ranks import Ranks
from gpuflow.sources import (
    Division,
    Mix,
    MixSource,
    Source,
    SourceSpec,
    divide,
    fields_of,
    has_one_class,
    is_read_remotely,
    left_out_of,
    open_source,
    subset,
    unwrapped,
    weights_of,
)
from gpuflow.sources.split_spec import pairs
from gpuflow.sources.storage import time_limit

if TYPE_CHECKING:
    from gpuflow.config import PipelineSpec


_LAUNCHERS = 3
"""Threads that launch chunks on the GPU: two may be in nvJPEG's calls while the third one prepares the next chunk."""


def build_loader(
    config: Config,
    name: str,
    *,
    rank: int,
    world_size: int,
    device: str | torch.device | None,
    whole: Source | None = None,
    rank_given: bool = True,
    listed: ListedEpochs | None = None,
    report: Callable[[BadSampleError], None] | None = None,
) -> Loader:
    """Return the loader of one pipeline. See `gpuflow.load`.

    whole: the opened source, if other loaders read it, too. rank_given: see `LoaderPlan`. listed: epochs of `whole`, in
    place of the file's split, order and batches. report: see `BadSamples`.
    """
    program = config.any_program(name)
    pipeline = config.pipelines[name]
    try:
        rank, world_size = operator.index(rank), operator.index(world_size)
    except TypeError:
        raise ValueError(f"rank and world_size must be integers, got {show(rank)} and {show(world_size)}") from None
    if not 0 <= rank < world_size:
        raise ValueError(f"rank must be within [0, world_size), got rank {rank} of {world_size}; give both, or neither")
    target = Ranks.on_host().device(device)
    batch_size = _batch_size(config, name, pipeline.batch, world_size) if listed is None else listed.batch_size
    drop_last = pipeline.batch.drop_last and listed is None
    placement = place(config, name, target, batch_size)
    source = open_split(config, name, whole) if listed is None or whole is None else whole
    _require_classes(config, name, source)
    require_record_fields(config, name, source)
    left_out = _left_out(config, name, source)
    order = order_of(config, source, pipeline, batch_size) if listed is None else listed
    if drop_last and order.size < batch_size * world_size:
        rule = (
            f"leaves no step: {order.size} samples do not fill one of {batch_size} x {world_size} rank(s); take a "
            "smaller size or drop_last: false"
        )
        raise ConfigError([Problem(f"{config.path}: pipelines.{name}.batch", rule)])
    run, seed = config.run, config.source.seed
    remote = is_read_remotely(source)
    read_here = listed is not None and source.storage is None  # by the caller's own code
    on_gpu = placement.gpu is not None
    targets = target_mapper(config, name, fields_of(source))
    if run.audit is not None and listed is not None:
        rule, action = "needs an order of gpuflow's, not that of a sampler", "remove it, or use gpuflow.load"
        raise ConfigError([Problem(f"{config.path}:", rule, run.audit, action, ("run", "audit"), "config.conflict")])
    plan = LoaderPlan(
        audit=run.audit,
        program=program,
        source=source,
        order=order,
        seed=seed,
        batch_size=batch_size,
        drop_last=drop_last,
        rank=rank,
        world_size=world_size,
        rank_given=rank_given,
        device=target,
        threads=_LAUNCHERS if on_gpu else threads_of(run),
        prefetch=run.prefetch,
        timeout_seconds=run.timeout_s,
        bad=_bad_samples(
            config, config.on_error_of(name, drawn=None if listed is None else listed.drawn)[0], len(source), report
        ),
        targets=targets,
        turned=TurnedImages(source) if targets is not None and targets.leaves_orientation_open else None,
        left_out=left_out,
        readers=readers_of(config, gpu=on_gpu, remote=remote),
        processes=0 if on_gpu else decode_processes_of(config, name, len(source), remote=remote or read_here),
        share=cpu_share_of(config, name) if on_gpu else None,
        nvtx=run.nvtx,
        identity=_identity(config, name, source, batch_size),
        device_stream=placement.device_stream,
        gpu=placement.gpu,
    )
    return Loader(plan)


def open_split(config: Config, name: str, whole: Source | None = None) -> Source:
    """Return the part of the source that a pipeline reads. Errors name the file."""
    whole = open_whole(config) if whole is None else whole
    part = config.split_of(name)
    with _naming_file(config):
        return whole if part is None else subset(whole, config.source, part, config.part_names)


def open_whole(config: Config) -> Source:
    """Return the source, indexed. Errors name the file."""
    with _naming_file(config):
        return open_source(config.source)


def division_of(config: Config, whole: Source) -> Division:
    """Return the part of each sample of the opened source, all in one without a name if it has no parts.

    Errors name the file.
    """
    if not config.part_names:
        return Division(("",), np.zeros(len(whole), np.int64))
    with _naming_file(config):
        return divide(whole, config.source, config.part_names)


@contextmanager
def _naming_file(config: Config) -> Iterator[None]:
    """Put the configuration's file before the text of a SourceError, and try servers as long as the file says."""
    try:
        with time_limit(config.run.timeout_s):
            yield
    except SourceError as error:
        raise SourceError(f"{config.path}: {error}") from error


def order_of(config: Config, source: Source, pipeline: PipelineSpec, batch_size: int) -> Order:
    """Return the order of the samples. Weights and mixes are drawn only if the pipeline shuffles. Errors name the
    file."""
    spec = config.source
    if not pipeline.shuffle:
        if isinstance(source, MixSource):
            return MixInOrder(source.sizes, seed=spec.seed)
        return ShuffledOrder(size=len(source), seed=spec.seed, shuffle=False)
    with _naming_file(config):
        if isinstance(source, MixSource):
            assert isinstance(spec, Mix)
            return _mixed_order(spec, source, batch_size)
        return _shuffled(spec, source, spec.seed)


def _shuffled(spec: SourceSpec, source: Source, seed: int) -> Order:
    """Return the shuffled order of one source, or of its part."""
    weights = weights_of(spec, source)
    if weights is not None:
        assert spec.weights is not None
        most = len(weights) if spec.weights.replacement else int(np.count_nonzero(weights))
        size = spec.weights.samples or most
        if not spec.weights.replacement and size > most:
            raise SourceError(
                f"source.weights.samples must be at most the {most} samples with a weight above 0, got {size}; lower "
                "it, or set replacement: true"
            )
        return WeightedOrder(weights, size=size, seed=seed, replacement=spec.weights.replacement)
    if source.shard_sizes is not None:
        return ShardedOrder(shard_sizes=source.shard_sizes, seed=seed, window=spec.shard_window(unwrapped(source)))
    return ShuffledOrder(size=len(source), seed=seed)


def _mixed_order(spec: Mix, source: MixSource, batch_size: int) -> MixedOrder:
    orders = []
    for i, (part_spec, part) in enumerate(zip(spec.sources, source.parts, strict=True)):
        try:
            orders.append(_shuffled(part_spec, part, key64("part", spec.seed, i)))
        except SourceError as error:
            raise SourceError(f"source.mix[{i}]: {error}") from error
    order = MixedOrder(
        orders,
        source.sizes,
        [entry.weight for entry in spec.mix],
        samples=spec.samples or len(source),
        seed=spec.seed,
        run=batch_size if spec.by == "batch" else 1,
    )
    for i, count in enumerate(order.counts):
        if not count:
            what = "samples" if spec.by == "sample" else f"batches of {batch_size}"
            raise SourceError(
                f"source.mix[{i}].weight must give it a part of the {sum(order.counts)} {what} of an epoch, got "
                f"{spec.mix[i].weight:g}, which gives none; raise it, or source.samples"
            )
    return order


def _require_classes(config: Config, name: str, source: Source) -> None:
    """Raise ConfigError if a pipeline mixes samples whose labels are not one class each, or that carry more fields.

    For a source whose fields are not declared, this is known once it is open.
    """
    fields, classes = [field.name for field in fields_of(source)], has_one_class(source) and bool(source.classes)
    problems = list(mixing_problems(name, config.any_program(name), fields, one_class=classes))
    if has_one_class(source) and not source.classes and not fields:
        rule, action = "mixes labels, but how many classes there are is not known", "give the dataset `classes`, a list"
        problems = [replace(problem, rule=rule, action=f"{action} of their names") for problem in problems]
    if problems:
        raise ConfigError([replace(problem, place=f"{config.path}:") for problem in problems])


def _left_out(config: Config, name: str, source: Source) -> int:
    """Return how many instances the source leaves out. Raises SourceError if `targets.invalid` is `raise`."""
    left_out = left_out_of(source).values()
    count = sum(each.instances for each in left_out)
    if count and config.pipelines[name].targets.invalid == "raise":
        raise SourceError(
            f"{config.path}: pipelines.{name}.targets.invalid is raise, and {count:,} instances of {len(left_out):,} "
            f"samples are incomplete; the first: {next(iter(left_out)).reason}; correct them, or set invalid: drop"
        )
    return count


def _batch_size(config: Config, name: str, batch: BatchSpec, world_size: int) -> int:
    if batch.size is not None:
        return batch.size
    assert batch.global_size is not None
    if batch.global_size % world_size:
        where = f"{config.path}: pipelines.{name}.batch.global"
        raise ConfigError([Problem(where, f"must be divisible by the {world_size} ranks, got {batch.global_size}")])
    return batch.global_size // world_size


def _bad_samples(
    config: Config, policy: str, samples: int, report: Callable[[BadSampleError], None] | None
) -> BadSamples:
    _require_other_file(config)
    most, of = config.run.max_bad, None
    if isinstance(most, float):
        most, of = int(Fraction(str(most)) * samples), samples  # 0.29 * 100 is less than 29 in floating point
    try:
        return BadSamples(policy=policy, limit=most, path=config.run.bad_file, samples=of, report=report)
    except OSError as error:
        problem = f"cannot be written: {error.strerror}: {error.filename!r}; name a file in a directory that exists"
        raise ConfigError([Problem(f"{config.path}: run.bad_file", problem)]) from error


def _require_other_file(config: Config) -> None:
    """Raise ConfigError if bad samples would be appended to a file that the source is read from."""
    path = config.run.bad_file
    if not path:
        return
    rule = config.source.rule
    lists = [] if rule is None else [("split", file) for file in (rule.file, *dict(pairs(rule.files)).values())]
    for source in config.source.sources:
        weights = source.weights.file if source.weights is not None else None
        for key, read in ((source.kind, source.where), ("weights.file", weights), *lists):
            if read and os.path.realpath(path) == os.path.realpath(os.path.expanduser(read)):
                problem = f"must not be the file of source.{key}, got {path!r}; name another file"
                raise ConfigError([Problem(f"{config.path}: run.bad_file", problem)])


def _identity(config: Config, name: str, source: Source, batch_size: int) -> str:
    """Return a hash of what decides the order of samples and their pixels: stages, split, shuffle.

    The files are not part of it: the source's fingerprint identifies them, and their folder may change.
    """
    spec = config.source
    split = (spec.fractions or spec.splits, config.split_of(name))
    kind = (spec.kind, split, spec.shard_window(unwrapped(source)) if source.shard_sizes else None)
    shuffle, rules = config.pipelines[name].shuffle, config.pipelines[name].targets.rules
    changed = () if rules == TargetRules() else (repr(rules),)
    if isinstance(spec, Mix) and shuffle:
        kinds = [(entry.weight, entry.source.kind, entry.source.shard_window()) for entry in spec.mix]
        changed = (*changed, (kinds, spec.samples, spec.by, batch_size if spec.by == "batch" else None))
    return f"{key64(name, kind, shuffle, config.any_program(name).pipeline.fingerprint, *changed):016x}"
