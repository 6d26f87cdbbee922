"""The pairs of ways to compare, their limits, and the collection of each pair's differences."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from gpuflow.arrays import Bytes
from gpuflow.config import Config, ModelSpec
from gpuflow.engines import Engine, class_names, open_engine, read_info, refuse_other_preprocessing
from gpuflow.engines.base import black_images
from gpuflow.errors import BadSampleError, ConfigError, GpuflowError, MissingExtra, Problem, near_word
from gpuflow.execute.cpu.native_chunk import run_pointwise
from gpuflow.parity.images import ParityImage
from gpuflow.parity.measure import Differences, Scale, Tally, differences, levels_apart
from gpuflow.parity.others import NAIVE, is_library
from gpuflow.parity.report import Logits, Pair, Picture, Row
from gpuflow.parity.ways import Prefix, Result, Way
from gpuflow.pipeline.program import Program
from gpuflow.pipeline.stage import Keys, Pipeline, Pointwise, Stage
from gpuflow.runtime.threads import DaemonPool

_SECONDS = 600.0
_CPU = torch.device("cpu")

Answers = Sequence[torch.Tensor | None]
"""Logits [K] of several images; None for a result that the model cannot take."""


@dataclass(frozen=True, slots=True)
class StudyModel:
    """Names a model file, the number of stages of the pipeline that precede the model, and its training's classes."""

    file: str
    count: int
    classes: tuple[str, ...] | None


def find_model(config: Config, program: Program, path: Path | None) -> tuple[StudyModel | None, str]:
    """Find the model at `path`, else the model that `serve` names; None if there is none. Also returns a description.

    Raises:
        ConfigError: the file is no model, or was trained with other preprocessing and `force` is not set, or the names
            of classes do not go with it.
        MissingExtra: `path` is given and the library to run it is not installed.
    """
    block = config.serve.model if config.serve is not None else None
    if path is None and block is None:
        return None, "none: the file names no model; name one with --model"
    file = str(path) if path is not None or block is None else block.file
    if path is None and not Path(file).is_file():
        return None, f"none: {file} is not there; train or export it, or name another one with --model"
    if problems := [replace(problem, place="--model:", path=()) for problem in ModelSpec(file=file).problems()]:
        raise ConfigError(problems)
    if path is not None and not path.is_file():
        action = "train or export the model, or leave the option out"
        raise ConfigError([Problem("--model:", "must be the file of a model, and there is no such file", file, action)])
    try:
        info, stages = read_info(file), program.pipeline.stages
    except MissingExtra as error:
        if path is not None:
            raise
        return None, f"none: {error}"
    prefixes = [Pipeline(program.pipeline.name, stages[:count]) for count in range(len(stages), 0, -1)]
    served = config.programs["serve"].pipeline.lines if path is None else program.pipeline.lines
    default = next((one for one in prefixes if one.lines == served), program.pipeline)
    before = next((one for one in prefixes if one.fingerprint == info.preprocessing), default)
    force = block is not None and block.force
    trust = path is not None or (block is not None and block.preprocessing == "trust")
    refuse_other_preprocessing(info, before, file, force=force, trust=trust)
    if path is None and block is not None:
        class_names(block, info)
    note = f"{file}, on the CPU, on the output of {before.stages[-1].stage_name}"
    if force and info.preprocessing not in (None, before.fingerprint):
        note += "; serve.model.force is set: the file records other preprocessing than these stages"
    return StudyModel(file, len(before.stages), info.classes), note


def missing_stage(config: Config, program: Program, path: Path | None) -> str | None:
    """Return that serving lacks a program's last stage; None if it has it, or its model records that one.

    Only of a stage that a model can contain (`gpuflow export --fold-normalize`). A file without a record may lack it.
    The model is the one that `serve` names, or the one at `path` if there is none.
    """
    last, before = program.pipeline.stages[-1], program.pipeline.lines[:-1]
    if config.serve is None or config.programs["serve"].pipeline.lines != before or last.module() is None:
        return None
    named = config.serve.model
    file = named.file if named is not None and (path is None or Path(named.file).is_file()) else path
    folded, reason = None, "no model is named" if file is None else f"{file} is not there"
    if file is not None and Path(file).is_file():
        try:
            folded = read_info(str(file)).folded
            reason = f"{file} records {'no such stage' if folded is None else folded}"
        except MissingExtra as error:
            reason = f"{file} cannot be read: {error}"
    if folded == program.pipeline.lines[-1]:
        return None
    return (
        f"{config.path}: serve.stages must end with {last!r} as {program.pipeline.name} does, unless the model "
        f"contains it, and {reason}; add the stage, or name a model that gpuflow export --fold-normalize wrote, by "
        "serve.model.file or --model"
    )


@contextmanager
def classifier(file: str, program: Program, *, batch: int) -> Iterator[Callable[[Sequence[Result]], Answers]]:
    """Run a model on the CPU: give a function from at most `batch` results to their logits.

    All batches have one size, so that equal images get equal logits.

    Args:
        file: the model file.
        program: the program whose results are its input.
        batch: the batch size.
    """
    with ExitStack() as stack:
        thread = DaemonPool(1, "parity_model")  # an engine sets torch's thread count for its thread
        stack.callback(thread.shutdown)
        model, image = ModelSpec(file=file, batch=batch), program.result
        engine: Engine = thread.submit(open_engine, model, image=image, device=_CPU).result(_SECONDS)
        stack.callback(engine.close)

        def classify(results: Sequence[Result]) -> Answers:
            images = black_images(batch, image, _CPU)
            form, taken = (images.shape[1:], images.dtype), []
            for row, result in enumerate(results):
                if isinstance(result, torch.Tensor) and (result.shape, result.dtype) == form:
                    images[row] = result.cpu()
                    taken.append(row)
            logits = thread.submit(engine.run, images).result(_SECONDS)
            return [logits[row] if row in taken else None for row in range(len(results))]

        yield classify


class LogitTally:
    """Gathers differences of logits over images of one kind, `own` or `hostile`.

    Examples:
        >>> tally = LogitTally()
        >>> tally.add(torch.tensor([1.0, 2.0]), torch.tensor([1.5, 1.0]))
        >>> tally.result("own")
        Logits(kind='own', images=1, max=1.0, mean=0.75, flips=1)
    """

    def __init__(self) -> None:
        self._images: list[tuple[float, float, bool]] = []
        """The largest and the mean difference of each, and whether its class differs."""

    def add(self, a: torch.Tensor, b: torch.Tensor) -> None:
        """Add the logits [K] of one image from both ways."""
        apart = differences(a, b)
        self._images.append((float(apart.max()), float(apart.mean()), bool(a.argmax() != b.argmax())))

    def result(self, kind: str) -> Logits | None:
        """Return the summary; None if there was no image."""
        if not self._images:
            return None
        highest, means, flips = zip(*self._images, strict=True)
        mean = sum(means) / len(means)
        return Logits(kind=kind, images=len(means), max=max(highest), mean=mean, flips=sum(flips))


CPU_AND_GPU = 2.0
"""Levels by which the CPU and a GPU may differ."""

_OURS = (("val", "serve"), ("val", "val@cuda"), ("val@cuda", "serve@cuda"))
_SERVING = {"serve", "serve@cuda"}
_REFERENCE = "torchvision"
_PICTURES = 2
"""Number of images of each kind that are shown for a pair."""
_ROUNDING = 0.01
"""Levels up to which two floats count as equal: their last bits depend on the order of operations."""
_SPREAD = ", which colour stages may spread"
"""What is said of a limit that grows after stages, see `_spread`."""


@dataclass(frozen=True, slots=True)
class Rule:
    """Limits the differences of a pair of ways.

    kind: `ours` for two of gpuflow's ways, `reference` for one of them and torchvision, `library` for one of them and
    another library, `asked` for two that the user named, `nothing` for no limit. levels: the limit that the user gave;
    by default `library` has the sum of the stages' tolerances, and `asked` 0. Limits that no user gave grow with what a
    stage makes of a difference.

    Examples:
        >>> Rule("ours").words(same_device=True), Rule("asked", 2).allowed([], same_device=True)
        ('equal: both run on the same device', 2)
    """

    kind: Literal["ours", "reference", "library", "asked", "nothing"]
    levels: float | None = None

    def allowed(self, stages: Sequence[Stage], *, same_device: bool) -> float | None:
        """Return the limit in levels after these stages; 0 for equal, None for no limit."""
        match self.kind:
            case "ours":
                return 0.0 if same_device else reduce(_spread, stages, CPU_AND_GPU)
            case "library" | "asked" if self.levels is not None:
                return self.levels
            case "reference" | "library":
                return reduce(lambda levels, stage: _spread(levels, stage) + stage.tolerance, stages, 0.0)
        return 0.0 if self.kind == "asked" else None

    def words(self, *, same_device: bool) -> str:
        """Return the limit as text; empty if there is none."""
        match self.kind:
            case "ours" if same_device:
                return "equal: both run on the same device"
            case "ours":
                return f"at most {CPU_AND_GPU:g} levels{_SPREAD}: one runs on the CPU, one on a GPU"
            case "library" | "asked" if self.levels:
                return f"at most {self.levels:g} levels, as asked for"
            case "reference" | "library" if self.levels is None or self.kind == "reference":
                return f"at most the sum of the stages' tolerances{_SPREAD}"
        return "" if self.kind == "nothing" else "equal, as asked for"


def _spread(levels: float, stage: Stage) -> float:
    """Return how far apart two levels are after a stage if they are at most `levels` apart before it.

    It is `levels`, unless the stage maps each level to one that depends on nothing else: posterize makes 32 of 1.
    """
    if not isinstance(stage, Pointwise) or stage.random:
        return levels
    ramp = np.repeat(np.arange(256, dtype=np.uint8).reshape(16, 16, 1), 3, axis=2)
    side = np.array([len(ramp)])
    operations = stage.operations(stage.draw(Keys(0, 0, np.arange(1)).stage(stage.key_name, 0)), side, side)
    if operations is None:
        return levels
    mapped = run_pointwise(ramp, operations, 0, None, planes=False).reshape(256, 3).astype(int)
    apart = (np.abs(mapped[step:] - mapped[:-step]).max() for step in range(1, min(int(levels), 255) + 1))
    return max(levels, *map(float, apart))


def pairs_of(
    ways: Mapping[str, Way], against: tuple[str, str] | None, tolerance: float | None
) -> tuple[list[PairComparison], dict[str, str | None]]:
    """Return the pairs to compare here, and for each needed way None or the reason why it cannot run here.

    Args:
        ways: all ways by name.
        against: two ways to compare, and no others; None for the default pairs.
        tolerance: the levels by which the ways in `against` may differ; by default 0, and the sum of the stages'
            tolerances if the second one is another library's.

    Raises:
        GpuflowError: a requested way is unknown or cannot run, or no pair with a limit can be compared.
    """
    if against is not None:
        for way in against:
            if way not in ways:
                raise GpuflowError(f"--against: there is no way {way!r}{near_word(way, ways)}")
            if (reason := ways[way].missing()) is not None:
                raise GpuflowError(f"--against: {way} cannot run here: {reason}")
        a, b = against
        pairs = [PairComparison(a, b, Rule("library" if is_library(b) else "asked", tolerance), ways[b])]
        alike = [way for way in ways if way.startswith(f"{b}, ")]
        pairs += [PairComparison(a, way, Rule("nothing"), ways[way]) for way in alike]
        return pairs, dict.fromkeys((*against, *alike))
    missing = {name: way.missing() for name, way in ways.items()}
    base = "val" if missing["val"] is None else "val@cuda"
    wanted = [*((a, b, Rule("ours")) for a, b in _OURS), (base, _REFERENCE, Rule("reference"))]
    pairs = [PairComparison(a, b, rule, ways[b]) for a, b, rule in wanted if missing[a] is missing[b] is None]
    if not pairs:
        reasons = "; ".join(f"{way}: {reason}" for way, reason in missing.items() if reason and way not in NAIVE)
        raise GpuflowError(f"parity: no two ways can be compared here: {reasons}")
    naive = [PairComparison(base, way, Rule("nothing"), ways[way]) for way in NAIVE if missing[way] is None]
    return [*pairs, *naive], missing


class PairComparison:
    """Collects the differences of a pair: call `begin`, `add` and `end` for each stage, then `result`.

    second: the way `b`, which is asked what may make its results differ.
    """

    def __init__(self, a: str, b: str, rule: Rule, second: Way) -> None:
        self.a, self.b, self._rule, self._second = a, b, rule, second
        self._rows: list[Row] = []
        self._skipped: list[tuple[str, str]] = []
        self._logits = {"own": LogitTally(), "hostile": LogitTally()}
        self._worst: dict[str, list[tuple[float, Picture]]] = {"own": [], "hostile": []}
        self._same_device = True

    @property
    def judged(self) -> bool:
        """Return True if the pair has a limit."""
        return self._rule.kind != "nothing"

    @property
    def judges_serving(self) -> bool:
        """Return True if the pair has a limit, and one of the two ways is serving."""
        return self.judged and len({self.a, self.b} & _SERVING) == 1

    def begin(self, prefix: Prefix, scale: Scale, refusals: Mapping[str, str | None]) -> bool:
        """Begin a stage. Returns whether both ways can run it. refusals: for each way None, or why it cannot."""
        stage = prefix.program.pipeline.stages[prefix.count - 1]
        for way in (self.a, self.b):
            if (reason := refusals[way]) is not None:
                self._skipped.append((stage.stage_name, reason))
                return False
        self._prefix, self._stage, self._scale = prefix, stage, scale
        self._tallies = {"own": Tally(), "hostile": Tally()}
        self._pixels, self._apart, self._value = 0, 0, 0.0
        self._refused: list[str] = []
        self._alone: list[tuple[str, str]] = []
        self._reference_refuses: list[tuple[str, str]] = []
        self._worst = {"own": [], "hostile": []}
        self._causes: dict[str, list[str]] = {}
        return True

    def add(
        self, samples: Sequence[ParityImage], sizes: Sequence[tuple[int, int] | None], *both: Sequence[Result]
    ) -> None:
        """Compare both ways' results for several images. sizes: rows and columns to compare in each, None for all."""
        for sample, size, a, b in zip(samples, sizes, *both, strict=True):
            faults = [(way, x) for way, x in ((self.a, a), (self.b, b)) if isinstance(x, BadSampleError)]
            if len(faults) == 2:
                self._refused.append(sample.name)
                continue
            if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
                if (a.shape, a.dtype) == (b.shape, b.dtype):
                    self._compare(sample, size, a, b)
                    continue
                reason = f"{self.a} gives {_form(a)}, {self.b} gives {_form(b)}"
                may_differ = a.shape[0] != b.shape[0] and self._rule.kind == "library"
            else:
                ((way, fault),) = faults
                reason = f"{way} refuses it: {fault.stage}: {fault.reason}"
                may_differ = way == self.b
            # torchvision may refuse any image, another library any but the user's: it keeps one or four channels, too.
            kind = self._rule.kind
            excused = may_differ and (kind == "reference" or (kind == "library" and sample.kind != "own"))
            if isinstance(a, torch.Tensor) and not excused:
                self._find_cause(sample, size, a)
            (self._reference_refuses if excused else self._alone).append((sample.name, reason))

    def _compare(self, sample: ParityImage, size: tuple[int, int] | None, a: torch.Tensor, b: torch.Tensor) -> None:
        self._same_device = self._same_device and a.device.type == b.device.type
        a, b = _cut(a, size), _cut(b, size)
        levels = levels_apart(a, b, self._scale)
        if not self._within(levels):
            self._find_cause(sample, size, a)
        kind = _kind(sample)
        self._tallies[kind].add(levels)
        largest = levels.max(axis=0)
        self._pixels += largest.size
        self._apart += int((largest > max(_ROUNDING, self._scale.noise)).sum())
        if levels.size:
            self._value = max(self._value, float(differences(a, b).max()))
        if not self._prefix.program.specs[self._prefix.count].fixed:
            return
        score, worst = float(levels.mean() if self._rule.kind == "nothing" else levels.max()), self._worst[kind]
        if len(worst) < _PICTURES or score > worst[-1][0]:
            color = self._prefix.program.decoder.color
            shown = [_rgb(self._scale.levels(image), color) for image in (a, b)]
            worst.append((score, Picture(sample.name, shown[0], shown[1], largest.astype(np.float32))))
            worst.sort(key=lambda one: one[0], reverse=True)
            del worst[_PICTURES:]

    def _within(self, levels: Differences) -> bool:
        """Return True if differences are not more than allowed after these stages."""
        stages = self._prefix.program.pipeline.stages[: self._prefix.count]
        allowed = self._rule.allowed(stages, same_device=self._same_device)
        return allowed is None or not levels.size or float(levels.max()) <= allowed + self._noise

    @property
    def _noise(self) -> float:
        return max(self._scale.noise, _ROUNDING if self._rule.kind == "library" else 0.0)

    def _find_cause(self, sample: ParityImage, size: tuple[int, int] | None, a: torch.Tensor) -> None:
        """Note the first cause without which the second way's result is like the first one's."""
        if not self.judged:
            return
        for cause, b in self._second.causes(self._prefix, sample.data):
            alike = b is None
            if isinstance(b, torch.Tensor) and (a.shape, a.dtype) == (b.shape, b.dtype):
                alike = self._within(levels_apart(_cut(a, size), _cut(b, size), self._scale))
            if alike:
                self._causes.setdefault(cause, []).append(sample.name)
                return

    def add_logits(self, samples: Sequence[ParityImage], first: Answers, second: Answers) -> None:
        """Compare the model's logits for several images from both ways."""
        for sample, a, b in zip(samples, first, second, strict=True):
            if a is not None and b is not None:
                self._logits[_kind(sample)].add(a, b)

    def end(self) -> None:
        """End a stage, after all images were added."""
        own, hostile = self._tallies["own"], self._tallies["hostile"]
        stages = self._prefix.program.pipeline.stages[: self._prefix.count]
        self._rows.append(
            Row(
                stage=self._stage.stage_name,
                number=self._prefix.count,
                allowed=self._rule.allowed(stages, same_device=self._same_device),
                noise=self._noise,
                images=own.images + hostile.images,
                differ=own.differ + hostile.differ,
                own=own.result(),
                hostile=hostile.result(),
                refused=tuple(self._refused),
                alone=tuple(self._alone),
                reference_refuses=tuple(self._reference_refuses),
                causes=tuple((cause, tuple(images)) for cause, images in self._causes.items()),
                pixels=self._apart / max(self._pixels, 1),
                value=self._value,
            )
        )

    def result(self, faults: Sequence[str] = (), notes: Sequence[str] = ()) -> Pair:
        """Return the pair's results, with pictures of its last stage. faults, notes: see `Pair`."""
        return Pair(
            a=self.a,
            b=self.b,
            asked=self._rule.words(same_device=self._same_device),
            rows=tuple(self._rows),
            logits=tuple(one for kind, tally in self._logits.items() if (one := tally.result(kind)) is not None),
            skipped=tuple(self._skipped),
            faults=tuple(faults),
            notes=tuple(notes),
            pictures=tuple(picture for worst in self._worst.values() for _, picture in worst),
        )


def _cut(image: torch.Tensor, size: tuple[int, int] | None) -> torch.Tensor:
    """Return the rows and columns to compare."""
    rows, columns = size or image.shape[1:]
    return image[:, :rows, :columns].cpu()


def _kind(sample: ParityImage) -> str:
    return "own" if sample.kind == "own" else "hostile"


def _form(image: torch.Tensor) -> str:
    return f"{str(image.dtype).removeprefix('torch.')} {'x'.join(map(str, image.shape))}"


def _rgb(image: Bytes, color: str) -> Bytes:
    """Convert HWC pixels to RGB. If there are not three channels, show the first one as gray."""
    if image.shape[2] != 3:
        return np.repeat(image[..., :1], 3, axis=2)
    return np.ascontiguousarray(image[..., ::-1]) if color == "bgr" else image
