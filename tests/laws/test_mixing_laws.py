"""Laws of mixing stages, at equal batch composition: the same batch size and number of ranks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import gpuflow
from gpuflow.errors import ConfigError
from gpuflow.execute.mixing import mix_labels, soft_labels
from gpuflow.loader.loader import Loader
from gpuflow.loader.sampler import Steps
from gpuflow.pipeline import stage as s
from gpuflow.pipeline.program import MixingStep
from gpuflow.stages import STAGES, CenterCrop, Cutmix, Decode, Flip, Mixup, Normalize
from tests.datasets import Entries, MemorySource, jpeg, loader_of, program
from tests.mixing import by_definition
from tests.running import keys_of, program_of

COUNT, CLASSES, BATCH, SIDE = 23, 3, 6, 24
BEFORE: Entries = ({"decode": {}}, {"random_resized_crop": {"size": SIDE}}, {"normalize": {}})
MIXING = {name: stage for name, stage in STAGES.items() if issubclass(stage, s.Mixing)}
EXAMPLES = tuple(example for stage in MIXING.values() for example in stage.examples())

Row = tuple[int, bytes, bool, bytes]
"""(index, label, valid, pixels) of one sample, bit for bit."""

every_example = pytest.mark.parametrize("stage", EXAMPLES, ids=repr)


def entry(stage: s.Stage) -> Mapping[str, Any]:
    return {stage.stage_name: stage.params()}


def load(*stages: s.Stage, source: MemorySource | None = None, before: Entries = BEFORE, **run: Any) -> Loader:
    whole = source if source is not None else MemorySource.of(COUNT)
    return loader_of(whole, (*before, *map(entry, stages)), **{"batch_size": BATCH, **run})


def rows(batch: gpuflow.Batch) -> list[Row]:
    images, labels = batch
    return [
        (int(index), label.numpy().tobytes(), bool(valid), image.contiguous().view(torch.uint8).numpy().tobytes())
        for index, label, valid, image in zip(batch.indices, labels, batch.valid, images, strict=True)
    ]


def epoch_of(loader: Loader) -> list[gpuflow.Batch]:
    with loader:
        return list(loader)


def all_rows(batches: Sequence[gpuflow.Batch]) -> list[list[Row]]:
    return [rows(batch) for batch in batches]


# --- 1: what comes out ------------------------------------------------------------------------------------------------


def mixed_by_definition(
    stages: Sequence[s.Mixing], batch: gpuflow.Batch, positions: NDArray[np.int64], classes: int
) -> tuple[torch.Tensor, NDArray[np.float32]]:
    images, probabilities = batch.images, soft_labels(batch.labels.numpy(), classes)
    seen: dict[str, int] = {}
    for stage in stages:
        turn = seen[stage.stage_name] = seen.get(stage.stage_name, -1) + 1
        step = MixingStep(stage, turn, *images.shape[2:])
        mixture = step.draw(s.Keys(0, batch.epoch, positions), batch.valid.numpy())
        images, probabilities = (
            by_definition(images, mixture),
            mix_labels(probabilities, mixture, stage.label_smoothing),
        )
    return images, probabilities


@pytest.mark.parametrize(
    "stages", [*[(one,) for one in EXAMPLES], (Mixup(), Cutmix()), (Mixup(mode="elem"), Mixup(mode="elem"))], ids=repr
)
@pytest.mark.parametrize(("rank", "world_size"), [(0, 1), (1, 2)])
def test_a_batch_is_the_plain_batch_mixed_as_drawn(stages: tuple[s.Mixing, ...], rank: int, world_size: int) -> None:
    """In its pixels, memory layout and labels; which samples there are does not change."""
    run: dict[str, Any] = {"rank": rank, "world_size": world_size}
    plain, mixed = epoch_of(load(**run)), epoch_of(load(*stages, **run))
    assert len(plain) == len(mixed)
    steps = Steps(size=COUNT, batch_size=BATCH, rank=rank, world_size=world_size, drop_last=False)
    for batch, after in zip(plain, mixed, strict=True):
        positions, _ = steps.positions(batch.step)
        images, probabilities = mixed_by_definition(stages, batch, positions, CLASSES)
        assert torch.equal(after.images, images)
        assert (after.images.dtype, after.images.stride()) == (batch.images.dtype, batch.images.stride())
        assert after.labels.dtype == torch.float32
        assert np.array_equal(after.labels.numpy(), probabilities)
        assert torch.equal(after.indices, batch.indices) and torch.equal(after.valid, batch.valid)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_every_dtype_and_layout(dtype: str, layout: str) -> None:
    before = (*BEFORE[:-1], {"normalize": {"dtype": dtype, "layout": layout}})
    stage = Mixup(cutmix_alpha=1.0, mode="elem")
    steps = Steps(size=COUNT, batch_size=BATCH, rank=0, world_size=1, drop_last=False)
    for batch, after in zip(epoch_of(load(before=before)), epoch_of(load(stage, before=before)), strict=True):
        images, _ = mixed_by_definition([stage], batch, steps.positions(batch.step)[0], CLASSES)
        assert torch.equal(after.images, images)
        assert after.images.stride() == batch.images.stride()
    bytes_ = epoch_of(load(Cutmix(), before=BEFORE[:-1]))
    assert {batch.images.dtype for batch in bytes_} == {torch.uint8}


@every_example
def test_labels_are_probabilities(stage: s.Mixing) -> None:
    for batch in epoch_of(load(stage)):
        assert batch.labels.shape == (len(batch.images), CLASSES)
        assert (batch.labels >= 0).all()
        assert torch.allclose(batch.labels.sum(dim=1), torch.ones(len(batch.labels)), atol=1e-6)


def test_a_stage_that_never_mixes_changes_no_pixel() -> None:
    plain = epoch_of(load())
    for stage in (Mixup(probability=0.0), Cutmix(probability=0.0)):
        assert not stage.random
        for batch, after in zip(plain, epoch_of(load(stage)), strict=True):
            assert torch.equal(batch.images, after.images)
            assert torch.equal(torch.nn.functional.one_hot(batch.labels, CLASSES).float(), after.labels)


# --- 2: same keys, same output ----------------------------------------------------------------------------------------


@every_example
def test_threads_and_prefetch_change_nothing(stage: s.Mixing) -> None:
    alone = all_rows(epoch_of(load(stage, threads=1, prefetch=1)))
    for threads, prefetch in ((2, 3), (5, 1)):
        assert all_rows(epoch_of(load(stage, threads=threads, prefetch=prefetch))) == alone


def test_worker_processes_change_nothing() -> None:
    stage = Mixup(cutmix_alpha=1.0, mode="elem")
    assert all_rows(epoch_of(load(stage, processes=2))) == all_rows(epoch_of(load(stage)))


@every_example
@pytest.mark.parametrize("other", [{"seed": 1}, {"epoch": 1}, {"first": BATCH}], ids=str)
def test_other_keys_give_another_mixture(stage: s.Mixing, other: dict[str, int]) -> None:
    """Of a few batches: a stage may leave some as they are."""

    def drawn(**keys: int) -> list[Any]:
        found = []
        for turn in range(8):
            mixture = MixingStep(stage, turn, 40, 50).draw(keys_of(BATCH, **keys), np.ones(BATCH, bool))
            found += [*mixture.shares.tolist(), *mixture.boxes.ravel().tolist()]
        return found

    assert drawn() == drawn()
    assert drawn() != drawn(**other)


def test_a_mixing_stage_changes_no_other_stages_draws_and_namesakes_draw_for_themselves() -> None:
    first, second = program(tuple(map(entry, (Decode(), CenterCrop(size=8), Normalize(), Mixup(), Mixup())))).mixings
    keys, valid = keys_of(4), np.ones(4, bool)
    assert first.draw(keys, valid).weights.tolist() != second.draw(keys, valid).weights.tolist()


# --- 4: resume --------------------------------------------------------------------------------------------------------


@every_example
@pytest.mark.parametrize("world_size", [1, 2])
def test_resume_at_every_step_equals_no_interruption(stage: s.Mixing, world_size: int) -> None:
    run: dict[str, Any] = {"rank": world_size - 1, "world_size": world_size}
    states, whole = [], []
    with load(stage, **run) as loader:
        for batch in loader:
            whole.append(rows(batch))
            states.append(loader.state_dict())
    for step, state in enumerate(states[:-1], start=1):
        with load(stage, threads=1 + step % 2, **run) as loader:
            loader.load_state_dict(state)
            assert all_rows(list(loader)) == whole[step:]


# --- wrapped samples --------------------------------------------------------------------------------------------------


@given(stage=st.sampled_from(EXAMPLES), valid=st.lists(st.booleans(), min_size=1, max_size=9), seed=st.integers(0, 99))
def test_an_invalid_sample_is_nobodys_partner_and_stays_as_it_is(stage: s.Mixing, valid: list[bool], seed: int) -> None:
    mask = np.array(valid)
    mixture = MixingStep(stage, 0, 30, 20).draw(keys_of(len(mask), seed=seed), mask)
    moved = mixture.partners != np.arange(len(mask))
    assert mask[mixture.partners[moved]].all()
    assert not moved[~mask].any() and not mixture.changed[~mask].any()
    assert (mixture.shares[~moved] == 1).all() and (mixture.weights[~moved] == 1).all()
    inside = mixture.boxes[:, :2] + mixture.boxes[:, 2:] <= (30, 20)
    assert (mixture.boxes >= 0).all() and inside.all()


# --- 6: bad samples ---------------------------------------------------------------------------------------------------


def with_bad(bad: int) -> MemorySource:
    data = [jpeg(i % CLASSES, i) for i in range(COUNT)]
    return MemorySource(data[i] if i != bad else data[i][:200] for i in range(COUNT))


@every_example
@pytest.mark.parametrize("threads", [1, 3])
def test_a_replaced_sample_changes_itself_and_its_partner_only(stage: s.Mixing, threads: int) -> None:
    run: dict[str, Any] = {"shuffle": False, "threads": threads}
    sound = epoch_of(load(stage, **run))
    for bad in (0, 8, COUNT - 1):
        step, row = divmod(bad, BATCH)
        partner = len(sound[step].images) - 1 - row
        after = epoch_of(load(stage, source=with_bad(bad), **run))
        for n, (one, other) in enumerate(zip(all_rows(sound), all_rows(after), strict=True)):
            different = {i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b}
            assert different <= ({row, partner} if n == step else set())
            assert n != step or row in different


@every_example
def test_a_skipped_sample_changes_its_partner_only_which_stays_as_it_is(stage: s.Mixing) -> None:
    plain, sound = epoch_of(load(shuffle=False)), all_rows(epoch_of(load(stage, shuffle=False)))
    for bad in (0, 8):
        step, row = divmod(bad, BATCH)
        partner = BATCH - 1 - row
        seen = []
        for threads in (1, 3):
            source = with_bad(bad)
            after = epoch_of(load(stage, source=source, policy="skip", shuffle=False, threads=threads))
            seen.append(all_rows(after))
            assert len(after[step].images) == BATCH - 1
            alone = after[step].images[partner - (partner > row)]
            assert torch.equal(alone, plain[step].images[partner])
        assert seen[0] == seen[1]
        sound_step = [one for i, one in enumerate(sound[step]) if i not in (row, partner)]
        assert [one for i, one in enumerate(seen[0][step]) if i != partner - (partner > row)] == sound_step
        assert seen[0][:step] + seen[0][step + 1 :] == sound[:step] + sound[step + 1 :]


# --- draws ------------------------------------------------------------------------------------------------------------

DRAWS = 5000
Numbers = NDArray[np.float64]


def drawn(stage: s.Mixing, keys: s.Keys, size: int = 10**6) -> s.Mixture:
    return MixingStep(stage, 0, size, size).draw(keys, np.ones(len(keys.positions), bool))


def of_mixup(keys: s.Keys) -> Numbers:
    """Beta(1, 1) is uniform."""
    return drawn(Mixup(mode="elem"), keys).weights[:, None]


def of_cutmix(keys: s.Keys) -> Numbers:
    return drawn(Cutmix(mode="elem", correct_lambda=False), keys).shares[:, None]


INDEPENDENT: Mapping[str, Callable[[s.Keys], Numbers]] = {"mixup": of_mixup, "cutmix": of_cutmix}


def test_every_mixing_stage_of_the_table_is_here() -> None:
    assert set(INDEPENDENT) == set(MIXING)


@pytest.mark.parametrize("name", INDEPENDENT)
def test_numbers_are_uniform_and_independent_of_those_of_other_keys(name: str) -> None:
    def numbers(**keys: int) -> Numbers:
        return INDEPENDENT[name](keys_of(DRAWS, **keys))

    columns = [
        numbers(),
        numbers(seed=1),
        numbers(epoch=1),
        numbers(first=1),
        INDEPENDENT["mixup"](keys_of(DRAWS, seed=7)),
    ]
    for column in np.concatenate(columns, axis=1).T:
        distance = np.abs(np.sort(column) - (np.arange(DRAWS) + 0.5) / DRAWS).max()
        assert distance < 2.5 / np.sqrt(DRAWS)
    for a, b in itertools.combinations(np.concatenate(columns, axis=1).T, 2):
        assert abs(np.corrcoef(a, b)[0, 1]) < 5 / np.sqrt(DRAWS)


# --- where they may stand ---------------------------------------------------------------------------------------------


@every_example
def test_a_mixing_stage_cannot_serve(stage: s.Mixing) -> None:
    with pytest.raises(ConfigError) as caught:
        program_of(Decode(), CenterCrop(size=8), Normalize(), stage, name="serve", serving=True)
    assert str(caught.value) == (
        f"serve[3].{stage.stage_name} mixes the samples of a batch and cannot serve; "
        "name the stages that pipelines.val uses"
    )


@every_example
def test_mixing_stages_are_the_last_ones(stage: s.Mixing) -> None:
    name = stage.stage_name
    assert len(program_of(Decode(), CenterCrop(size=8), Normalize(), stage, Cutmix()).mixings) == 2
    with pytest.raises(ConfigError) as caught:
        program_of(Decode(), CenterCrop(size=8), Normalize(), stage, Flip())
    assert str(caught.value) == (
        f"test[4].flip works on one image but stands after {name}, which mixes whole batches; put flip before {name}"
    )
    with pytest.raises(ConfigError) as caught:
        program_of(Decode(), stage)
    assert str(caught.value) == (
        f"test[1].{name} takes images of one size but gets uint8 ?x?x3 hwc; "
        f"put a crop or a resize to a fixed size before {name}"
    )


@settings(max_examples=20)
@given(stage=st.sampled_from(EXAMPLES))
def test_images_keep_their_spec(stage: s.Mixing) -> None:
    stages = program_of(Decode(), CenterCrop(size=8), Normalize(layout="nhwc"), stage)
    assert stages.result == stages.specs[-2]
    assert [type(step).__name__ for step in stages.steps] == ["ResamplingStep", "PointwiseStep"]
