"""Runs several ways on the same images, stage by stage, and measures the differences of each pair."""

from __future__ import annotations

import datetime
import importlib.metadata
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from itertools import islice
from pathlib import Path

import cv2
import torch

from gpuflow.config import Config
from gpuflow.config.models import refuse_record_fields
from gpuflow.decode.libjpeg_turbo import find_libjpeg_turbo
from gpuflow.decode.nvjpeg import find_nvjpeg
from gpuflow.errors import GpuflowError, MissingExtra
from gpuflow.parity.images import ParityImage, hostile_images, own_images
from gpuflow.parity.measure import Scale
from gpuflow.parity.others import NAIVE, libraries_of, ways_of
from gpuflow.parity.pairs import Answers, PairComparison, classifier, find_model, missing_stage, pairs_of
from gpuflow.parity.report import Report, WayNote
from gpuflow.parity.ways import Prefix, Result, Way, prefixes_of
from gpuflow.pipeline.program import fold, trace
from gpuflow.pipeline.stage import Mixing, Pipeline

_LIMITS = ("max_pixels", "max_scans")


def compare_accepted(config: Config, name: str) -> tuple[list[str], list[str]]:
    """Compare the pipeline's stage `decode` with that of serving: few images are of such a format or near a limit.

    Returns:
        faults: files that training accepts and serving refuses. notes: files that serving alone accepts.
    """
    faults: list[str] = []
    notes: list[str] = []
    if config.serve is None:
        return faults, notes
    trained, served = config.programs[name].decoder, config.programs["serve"].decoder
    if trained.library is not None or served.library is not None:  # such as a preset, which takes no notice of formats
        return faults, notes
    place, reason = f"{config.path}: serve.stages[0].decode", "else serving refuses files that training accepts"
    if missing := ", ".join(form for form in trained.formats if form not in served.formats):
        rule = f"{place}.formats must name {missing} as {name} does, {reason}, got {list(served.formats)}"
        faults.append(f"{rule}; add what is missing, or remove it from {name}")
    if more := ", ".join(form for form in served.formats if form not in trained.formats):
        notes.append(f"serving alone accepts files of decode.formats: {more}")
    for field in _LIMITS:
        most, least = getattr(served, field), getattr(trained, field)
        if most < least:
            rule = f"{place}.{field} must be at least {least} as in {name}, {reason}, got {most}"
            faults.append(f"{rule}; raise it, or lower that of {name}")
        elif most > least:
            notes.append(f"serving alone accepts files above decode.{field} of {name}: {most} in place of {least}")
    return faults, notes


_CHUNK = 16
_FAILURES = (GpuflowError, ImportError, OSError, RuntimeError)
"""Exceptions that a naive way may fail with; its libraries have no common base class."""
_PACKAGES = (
    *("torch", "torchvision", "torchcodec", "pillow", "numpy", "torchpipe", "onnxruntime"),
    *("timm", "transformers", "albumentations"),
)


def study(
    config: Config,
    name: str = "val",
    *,
    count: int = 64,
    data: Path | None = None,
    against: tuple[str, str] | None = None,
    tolerance: float | None = None,
    model: Path | None = None,
    ways: Mapping[str, Way] | None = None,
    command: str = "",
    progress: Callable[[int, int, str], None] = lambda done, total, stage: None,
) -> Report:
    """Run the ways on images and compare them.

    Args:
        config: a checked configuration.
        name: the pipeline of validation.
        count: the number of the user's own images.
        data: a directory to read them from instead of the source.
        against: two ways to compare, and no others; the second one may be another library's source.
        tolerance: the levels by which these may differ; by default 0, or the sum of the stages' tolerances for another
            library.
        model: the model file for logits; by default `serve.model.file` if it exists.
        ways: the ways by name; by default all.
        command: the command line, for the report.
        progress: called with the number of images done, the number of all images, and the current stage.

    Raises:
        ConfigError: the file lacks the pipeline, or the model was trained with other preprocessing.
        SourceError: the source cannot be indexed. GpuflowError: a requested way cannot run here; without a request,
            serving cannot, and the file has a block `serve`.
    """
    config = _without_mixing(config, name)
    program = config.program(name)
    refuse_record_fields(config, name, "parity has images alone", "give numbers in place of the field")
    ways = {**(ways_of(config, name) if ways is None else ways), **libraries_of(against or (), program)}
    pairs, missing = pairs_of(ways, against, tolerance)
    if against is None and config.serve is not None and not any(pair.judges_serving for pair in pairs):
        raise GpuflowError(
            f"parity: {name} and serve cannot be compared here: {missing['serve']}; to leave serving out, name two "
            "other ways by --against"
        )
    study_model, model_note = find_model(config, program, model)
    faults, pair_notes = compare_accepted(config, name)
    faults += filter(None, [missing_stage(config, program, model)])
    classes = None if study_model is None else study_model.classes
    samples = [*own_images(config, name, count, data=data, classes=classes), *hostile_images()]
    prefixes = list(prefixes_of(program, [sample.data for sample in samples], seed=config.source.seed))
    done, total = 0, len(prefixes) * len(samples)
    for prefix in prefixes:
        with ExitStack() as stack:
            classify = None
            if study_model is not None and study_model.count == prefix.count:
                classify = stack.enter_context(classifier(study_model.file, prefix.program, batch=_CHUNK))
            for images in _measure(
                prefix,
                samples,
                pairs,
                ways,
                missing,
                classify,
                may_fail=[pair.b for pair in pairs if not pair.judged] if against else NAIVE,
            ):
                done += images
                progress(done, total, program.pipeline.stages[prefix.count - 1].stage_name)
        pairs = [pair for pair in pairs if missing[pair.a] is missing[pair.b] is None]
    found = tuple(pair.result(faults, pair_notes) if pair.judges_serving else pair.result() for pair in pairs)
    for pair in found:
        if pair.asked and not pair.rows:
            reasons = "; ".join(f"after {stage}: {reason}" for stage, reason in pair.skipped)
            raise GpuflowError(f"parity: {pair.a} and {pair.b} have no stage in common: {reasons}")
    kinds = [sample.kind for sample in samples]
    return Report(
        file=config.path,
        pipeline=name,
        stages=program.pipeline.lines,
        preprocessing=program.pipeline.fingerprint,
        pairs=found,
        ways=tuple(
            WayNote(name=way, about=ways[way].describe() if reason is None else "", missing=reason)
            for way, reason in missing.items()
        ),
        images={kind: kinds.count(kind) for kind in dict.fromkeys(kinds)},
        model=model_note,
        versions=_versions(),
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        command=command,
    )


def _without_mixing(config: Config, name: str) -> Config:
    """Return the configuration without the pipeline's mixing stages, which work on batches, not on images."""
    pipeline = config.program(name).pipeline
    images = Pipeline(name, tuple(stage for stage in pipeline.stages if not isinstance(stage, Mixing)))
    if images.stages == pipeline.stages:
        return config
    return replace(config, programs={**config.programs, name: fold(images, trace(images))})


def _measure(
    prefix: Prefix,
    samples: Sequence[ParityImage],
    pairs: Sequence[PairComparison],
    ways: Mapping[str, Way],
    missing: dict[str, str | None],
    classify: Callable[[Sequence[Result]], Answers] | None,
    *,
    may_fail: Sequence[str],
) -> Iterator[int]:
    """Run all ways up to one stage, a few images at a time, and compare the results. Yields numbers of images done.

    If a way that may fail does fail, the reason is stored in `missing` and its pairs are not finished.
    """
    scale = Scale.of(prefix.program)
    refusals = {name: ways[name].refuses(prefix) for name, reason in missing.items() if reason is None}
    pairs = [pair for pair in pairs if pair.begin(prefix, scale, refusals)]
    data = [sample.data for sample in samples]
    with ExitStack() as stack:
        names = dict.fromkeys(name for pair in pairs for name in (pair.a, pair.b))
        running = {name: stack.enter_context(closing(ways[name].run(prefix, data))) for name in names}
        for start in range(0, len(samples), _CHUNK):
            part = slice(start, start + _CHUNK)
            found: dict[str, Sequence[Result]] = {}
            for name, run in running.items():
                try:
                    found[name] = list(islice(run, len(samples[part])))
                except _FAILURES as error:
                    if name not in may_fail:
                        raise
                    missing[name] = f"failed: {error}"
            running = {name: run for name, run in running.items() if name in found}
            pairs = [pair for pair in pairs if pair.a in found and pair.b in found]
            answers = {name: classify(results) for name, results in found.items()} if classify is not None else {}
            for pair in pairs:
                pair.add(samples[part], prefix.sizes[part], found[pair.a], found[pair.b])
                if classify is not None:
                    pair.add_logits(samples[part], answers[pair.a], answers[pair.b])
            yield len(samples[part])
    for pair in pairs:
        pair.end()


def _versions() -> dict[str, str]:
    """Return the versions of everything that affects pixels."""
    from gpuflow.version import __version__

    found = {"gpuflow": __version__, "python": platform.python_version(), "opencv": cv2.__version__}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    if (turbojpeg := find_libjpeg_turbo()) is not None:
        found["libjpeg-turbo"] = turbojpeg.version
    if torch.cuda.is_available():
        found["GPU"], found["CUDA"] = torch.cuda.get_device_name(), str(torch.version.cuda)
        try:
            found["nvjpeg"] = find_nvjpeg().version
        except MissingExtra:
            found["nvjpeg"] = "none"
    return found
