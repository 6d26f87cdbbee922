"""Laws of what the engine does not know: a move, a step or a kind of stage is an error everywhere, never skipped."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import pytest

from gpuflow.arrays import Ints
from gpuflow.execute.cpu.runner import CpuRunner
from gpuflow.execute.gpu.passes import passes_of
from gpuflow.parity.others import _moved
from gpuflow.pipeline import stage as s
from gpuflow.pipeline.program import Program, ResamplingStep, fold
from gpuflow.sources import Payload
from gpuflow.stages import CenterCrop, Decode, Flip, Normalize
from gpuflow.tools.explain import _step_words
from tests.images import jpeg, photo
from tests.running import keys_of, program_of, run

PHOTO = jpeg(photo(40, 50))


@dataclass(frozen=True, slots=True)
class Twist:
    """A move of another version of gpuflow."""

    turns: int = 1


@dataclass(frozen=True, kw_only=True, repr=False)
class Twisted(s.Geometry):
    stage_name: ClassVar[str] = "twisted"

    def output(self, spec: s.ImageSpec) -> s.ImageSpec:
        return spec

    def draw(self, keys: s.StageKeys, height: Ints, width: Ints) -> tuple[s.Move, ...]:
        return (Twist(),)  # type: ignore[return-value]


@dataclass(frozen=True, kw_only=True, repr=False)
class Mixed(s.Stage):
    """A stage of none of the kinds."""

    stage_name: ClassVar[str] = "mixed"

    def output(self, spec: s.ImageSpec) -> s.ImageSpec:
        return spec


@dataclass(frozen=True, kw_only=True, repr=False)
class Tint(s.Pointwise):
    """A stage that says nothing about pixels."""

    stage_name: ClassVar[str] = "tint"


@dataclass(frozen=True, slots=True)
class OddStep:
    """A step that no lowering knows."""

    stage: s.Stage

    def draw(self, keys: s.Keys, *sizes: Ints) -> Any:
        return np.zeros((len(keys.positions), 0))


def program_with_odd_step() -> Program:
    program = program_of(Decode(), CenterCrop(size=8), Normalize())
    odd: Any = OddStep(Normalize())
    return replace(program, steps=(*program.steps[:1], odd))


def on_the_cpu() -> None:
    run(program_of(Decode(), CenterCrop(size=8), Twisted()), [PHOTO])


def on_the_cpu_after_other_stages() -> None:
    """Where sizes are not known before the image is decoded."""
    program = program_of(Decode(), CenterCrop(size=8), Twisted())
    (step,) = program.steps
    assert isinstance(step, ResamplingStep)
    step.draw(keys_of(1), np.array([40]), np.array([50]))


def in_a_service() -> None:
    pytest.importorskip("omniback")
    from gpuflow.torchpipe.graph import chain
    from gpuflow.torchpipe.running_graph import RunningGraph

    program = program_of(Decode(), CenterCrop(size=8), Flip(horizontal=1.0), name="serve", serving=True)
    graph = RunningGraph(chain(program, None, origin="x.yaml", threads=1, device="cpu"))
    with pytest.MonkeyPatch.context() as patch:  # only stages that are installed are served
        patch.setattr(Flip, "draw", Twisted.draw)
        try:
            graph.submit([PHOTO], wrap=lambda image: image, wants_image=True)[0].result(30)
        finally:
            assert graph.close(30)


def in_parity() -> None:
    _moved(photo(4, 5), Twist())  # type: ignore[arg-type]


def a_step_on_the_cpu() -> None:
    CpuRunner(program_with_odd_step()).run(Payload.of([PHOTO]), keys_of(1), np.zeros((1, 3, 8, 8), np.float32))


def a_step_lowered_to_a_gpu() -> None:
    passes_of(program_with_odd_step())


def a_step_explained() -> None:
    _step_words(OddStep(Normalize()), 1)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "use",
    [
        on_the_cpu,
        on_the_cpu_after_other_stages,
        in_a_service,
        in_parity,
        a_step_on_the_cpu,
        a_step_lowered_to_a_gpu,
        a_step_explained,
    ],
    ids=lambda use: use.__name__,
)
def test_what_is_not_known_is_an_error(use: Callable[[], None]) -> None:
    with pytest.raises(Exception, match=r"Expected code to be unreachable, but got: (Twist|OddStep)"):
        use()


def test_a_stage_of_no_known_kind_is_not_folded() -> None:
    pipeline = s.Pipeline("p", (Decode(), CenterCrop(size=8), Mixed()))
    spec = s.ImageSpec(shape=(8, 8, 3))
    with pytest.raises(TypeError) as caught:
        fold(pipeline, (s.ENCODED, s.ImageSpec(shape=(None, None, 3)), spec, spec))
    kinds = "Geometry, Pointwise, Local, Policy, Opaque or Mixing"
    assert str(caught.value) == f"mixed() is of no kind of stage; derive it from {kinds}"


def test_a_pointwise_stage_says_what_it_does_to_pixels() -> None:
    with pytest.raises(TypeError) as caught:
        program_of(Decode(), CenterCrop(size=8), Tint())
    assert str(caught.value) == "tint() must define operations or table; if it has neither, derive it from Opaque"
