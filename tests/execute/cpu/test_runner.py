"""The CPU runner: a bad sample affects no other sample, results share no memory, and whole pipelines run."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import Any, ClassVar

import cv2
import numpy as np
import pytest
import torch

from gpuflow.errors import LoaderError
from gpuflow.execute.cpu.runner import CpuRunner, run_files
from gpuflow.pipeline import stage as s
from gpuflow.pipeline.views import STORAGE, as_batch, slot_shape
from gpuflow.runtime.threads import StopFlag, stop_flag, use_stop_flag
from gpuflow.sources import Payload
from gpuflow.stages import (
    Affine,
    CenterCrop,
    ColorJitter,
    Decode,
    Flip,
    GaussianBlur,
    Normalize,
    Pad,
    Perspective,
    RandomCrop,
    RandomResizedCrop,
    Resize,
    Torchvision,
    WarpAffine,
)
from tests.images import jpeg, photo, png
from tests.running import alone, decoded, images, keys_of, program_of, run

TRAIN = (
    Decode(),
    RandomResizedCrop(size=32),
    Flip(horizontal=0.5),
    ColorJitter(brightness=0.2, contrast=0.2, saturation=0.2),
    Normalize(),
)
VAL = (Decode(), Resize(shorter=40), CenterCrop(size=32), Normalize())
SAMPLES = tuple(jpeg(photo(40 + 7 * i, 90 - 5 * i, seed=i)) for i in range(8))


@pytest.mark.parametrize("stages", [TRAIN, VAL], ids=["train", "val"])
def test_a_runner_gives_the_same_result_every_time_and_on_any_thread(stages: tuple[s.Stage, ...]) -> None:
    program = program_of(*stages)
    expected = images(program, SAMPLES)
    results: dict[int, torch.Tensor] = {}

    def work(number: int) -> None:
        results[number] = images(program, SAMPLES)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert all(torch.equal(results[number], expected) for number in range(4))
    runner, slots = CpuRunner(program), np.empty((8, 3, 32, 32), np.float32)
    for _ in range(3):
        slots.fill(np.nan)
        assert runner.run(Payload.of(SAMPLES), keys_of(8), slots) == [None] * 8
        assert torch.equal(torch.from_numpy(slots), expected)


def test_val_is_torchvisions() -> None:
    for data, result in zip(SAMPLES, images(program_of(*VAL), SAMPLES), strict=True):
        image = decoded(data)
        for stage in VAL[1:]:
            image = stage.torchvision()(image)
        assert torch.equal(result, image)


def test_files_get_the_random_keys_of_their_places_in_epoch_0() -> None:
    data = [jpeg(photo(75, 101, seed=i)) for i in range(5)]
    batch, faults = run_files(program_of(*TRAIN), data)
    assert faults == [None] * 5
    assert torch.equal(batch, images(program_of(*TRAIN), data, keys_of(5)))


def test_no_samples() -> None:
    batch, faults = run(program_of(*TRAIN), [])
    assert batch.shape == (0, 3, 32, 32)
    assert faults == []


def test_slots_hold_the_batch_and_nothing_else_is_written() -> None:
    program = program_of(*VAL)
    memory = np.full((10, *slot_shape(program.result)), 7, np.float32)
    CpuRunner(program).run(Payload.of(SAMPLES), keys_of(8), memory[1:9])
    assert (memory[[0, 9]] == 7).all()
    assert torch.equal(torch.from_numpy(memory[1:9]), images(program, SAMPLES))


def test_results_do_not_share_scratch_memory() -> None:
    """The decoder's buffer and the resize buffer are reused by the next image."""
    for stages in (VAL[:3], (Decode(), CenterCrop(size=32)), (*VAL[:3], Torchvision(name="Identity"))):
        program = program_of(*stages)
        runner = CpuRunner(program)
        slots = [np.zeros((1, *slot_shape(program.result)), np.uint8) for _ in SAMPLES]
        for data, slot in zip(SAMPLES, slots, strict=True):
            runner.run(Payload.of([data]), keys_of(1), slot)
        assert torch.equal(as_batch(np.concatenate(slots), program.result), images(program, SAMPLES))


def test_encoded_bytes_stay_as_they_are() -> None:
    payload, program = Payload.of(SAMPLES), program_of(*TRAIN)
    before = payload.buffer.copy()
    payload.buffer.flags.writeable = False
    CpuRunner(program).run(payload, keys_of(8), np.empty((8, 3, 32, 32), np.float32))
    assert np.array_equal(payload.buffer, before)


@pytest.mark.parametrize("first", [Perspective(probability=0.0), Affine(), CenterCrop(size=40)], ids=repr)
def test_decoded_images_stay_as_they_are_where_a_stage_writes_to_its_own(first: s.Stage) -> None:
    erasing = Torchvision(name="RandomErasing", parameters=(("p", 1.0), ("inplace", True)))
    program = program_of(Decode(), first, erasing, CenterCrop(size=32))
    given = [photo(40, 40, seed=i) for i in range(4)]
    kept = [image.copy() for image in given]
    slots = np.empty((4, *slot_shape(program.result)), np.uint8)
    assert not any(CpuRunner(program).run_images(given, keys_of(4), slots))
    assert not np.array_equal(slots.reshape(4, -1)[0], kept[0][4:36, 4:36].reshape(-1)), "it erased something"
    assert all(np.array_equal(a, b) for a, b in zip(given, kept, strict=True))


@pytest.mark.parametrize("place", range(8))
def test_a_bad_sample_changes_no_other(place: int) -> None:
    program = program_of(*TRAIN)
    expected = images(program, SAMPLES)
    for bad in (b"", b"text", SAMPLES[place][:-30], SAMPLES[place][:40]):
        broken = [*SAMPLES[:place], bad, *SAMPLES[place + 1 :]]
        batch, faults = run(program, broken)
        assert [i for i, fault in enumerate(faults) if fault] == [place]
        assert all(torch.equal(batch[i], expected[i]) for i in range(8) if i != place)


def test_nothing_but_bad_samples() -> None:
    _, faults = run(program_of(*TRAIN), [b"", b"no", b"\xff\xd8\xff"])
    assert list(map(str, faults)) == [
        "decode: empty: the file has no bytes",
        "decode: not an image: begins with 6e 6f; gpuflow decodes JPEG, PNG, WebP, BMP and PNM",
        "decode: truncated: the header breaks off after 3 bytes",
    ]


@pytest.mark.parametrize(
    ("stages", "size"),
    [
        ((RandomCrop(size=30),), "20x90"),
        ((Flip(), RandomCrop(size=30)), "20x90"),
        ((Resize(longer=45), RandomCrop(size=30)), "10x45"),
        ((Resize(longer=80), Resize(longer=45), RandomCrop(size=30)), "9x45"),
        ((ColorJitter(), RandomCrop(size=30)), "20x90"),
        ((ColorJitter(), Resize(longer=45), ColorJitter(), RandomCrop(size=30)), "10x45"),
        ((Torchvision(name="Pad", parameters=(("padding", 1),)), RandomCrop(size=30)), "22x92"),
        ((Torchvision(name="Identity"), Resize(longer=45), ColorJitter(), RandomCrop(size=30)), "10x45"),
    ],
    ids=str,
)
def test_a_crop_that_does_not_fit_names_the_size_it_met(stages: tuple[s.Stage, ...], size: str) -> None:
    _, faults = run(program_of(Decode(), *stages), [jpeg(photo(20, 90)), png(photo(90, 90))])
    assert str(faults[0]) == f"random_crop: the crop is larger than the image, which has {size} pixels here"
    assert faults[1] is None


@pytest.mark.parametrize("dtype", STORAGE)
@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_slots_and_batches(dtype: str, layout: str) -> None:
    spec = s.ImageSpec(shape=(4, 5, 3), dtype=dtype, layout=layout)  # type: ignore[arg-type]
    slots = np.zeros((2, *slot_shape(spec)), STORAGE[dtype])
    assert slots.shape == ((2, 3, 4, 5) if layout == "nchw" else (2, 4, 5, 3))
    batch = as_batch(slots, spec)
    assert batch.shape == (2, 3, 4, 5)
    assert batch.dtype == getattr(torch, dtype)
    slots[1] = 1
    assert (batch[1] != 0).all()
    assert (batch[0] == 0).all()


def test_one_pixel_images_go_through_everything() -> None:
    for size in ((1, 1), (1, 2), (2, 1), (1, 300), (300, 1)):
        for data in (jpeg(photo(*size)), png(photo(*size))):
            for stages in (TRAIN, (*TRAIN[:1], Resize(shorter=33), *TRAIN[1:]), VAL):
                batch = images(program_of(*stages), [data] * 4)
                assert batch.isfinite().all()


@pytest.mark.parametrize("interpolation", ["nearest", "bilinear"])
def test_a_crop_may_show_nothing_of_a_warped_image(interpolation: Any) -> None:
    warp = WarpAffine(matrix=((0.8, -0.2, 1.0), (0.1, 1.2, 3.0)), size=8, interpolation=interpolation)
    data = png(photo(40, 60))
    (warped,) = images(program_of(Decode(), warp), [data])
    (padding,) = images(program_of(Decode(), warp, Pad(padding=(0, 0, 0, 30), fill=9), CenterCrop(size=4)), [data])
    assert padding.shape == (3, 4, 4) and (padding == 9).all()
    padded = torch.nn.functional.pad(warped, (12, 12, 12, 12))
    places = {bytes(padded[:, y : y + 4, x : x + 4].numpy().tobytes()) for y in range(29) for x in range(29)}
    crops = images(program_of(Decode(), warp, RandomCrop(size=4, padding=12)), [data] * 60)
    assert {bytes(crop.numpy().tobytes()) for crop in crops} <= places
    assert any(not crop.any() for crop in crops) and any(bool(crop.any()) for crop in crops)


def test_the_order_of_stages_is_kept() -> None:
    data = png(photo(40, 60))
    jitter = ColorJitter(contrast=(2.0, 2.0))
    (first,) = images(program_of(Decode(), jitter, CenterCrop(size=20)), [data])
    (second,) = images(program_of(Decode(), CenterCrop(size=20), jitter), [data])
    assert not torch.equal(first, second)
    assert torch.equal(first, jitter.torchvision()(decoded(data))[:, 10:30, 20:40])
    assert torch.equal(second, jitter.torchvision()(alone(CenterCrop(size=20), data)))


def test_opencvs_number_of_threads_does_not_matter() -> None:
    program = program_of(*VAL)
    before = cv2.getNumThreads()
    expected = images(program, SAMPLES)
    try:
        for threads in (0, 1, 2):
            cv2.setNumThreads(threads)
            assert torch.equal(images(program, SAMPLES), expected)
    finally:
        cv2.setNumThreads(before)


@pytest.mark.parametrize(("error", "is_bad"), [(ValueError, True), (RuntimeError, True), (KeyError, False)])
def test_what_an_opaque_stage_raises_is_bad_only_where_it_refuses_an_image(
    error: type[Exception], is_bad: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(stage: Torchvision, image: torch.Tensor, seed: int) -> torch.Tensor:
        raise error("not this one")

    monkeypatch.setattr(Torchvision, "apply", refuse)
    program = program_of(Decode(), CenterCrop(size=8), Torchvision(name="RandomInvert"))
    slots = np.empty((1, *slot_shape(program.result)), np.uint8)
    runner = CpuRunner(program)
    if is_bad:
        (fault,) = runner.run(Payload.of([SAMPLES[0]]), keys_of(1), slots)
        assert fault is not None
        assert (fault.stage, fault.reason) == ("torchvision", f"{error.__name__}: not this one")
        return
    with pytest.raises(error):
        runner.run(Payload.of([SAMPLES[0]]), keys_of(1), slots)


@pytest.mark.parametrize(
    ("progressive", "stages"),
    [
        (False, (Decode(), Resize(height=64, width=64))),
        (True, (Decode(), Resize(height=64, width=64))),
        (False, (Decode(), Affine(degrees=20), Resize(height=64, width=64))),
        (False, (Decode(), GaussianBlur(kernel_size=23, sigma=5.0), Resize(height=64, width=64))),
    ],
    ids=["baseline", "progressive", "warp", "blur"],
)
def test_a_stop_flag_ends_the_work_on_a_huge_image(progressive: bool, stages: tuple[s.Stage, ...]) -> None:
    """In a part of the time that it would take, and nothing else is wrong afterwards."""
    data = jpeg(np.tile(photo(500, 500, seed=1), (10, 10, 1)), progressive=progressive)
    program = program_of(*stages)
    runner, payload, keys = CpuRunner(program, 2), Payload.of([data]), keys_of(1)
    slots = np.zeros((1, *slot_shape(program.result)), STORAGE[program.result.dtype])
    begun = time.perf_counter()
    assert runner.run(payload, keys, slots) == [None]
    whole = time.perf_counter() - begun
    flag, before, thread = StopFlag(), stop_flag(), threading.get_ident()

    def stop_once_it_runs() -> None:
        while runner.place(thread) is None:
            time.sleep(0.001)
        flag.set()

    stopper = threading.Thread(target=stop_once_it_runs, daemon=True)
    use_stop_flag(flag)
    try:
        stopper.start()
        begun = time.perf_counter()
        with pytest.raises(LoaderError, match="the epoch was ended"):
            runner.run(payload, keys, slots)
        assert time.perf_counter() - begun < whole / 4 + max(0.3, whole / 4)
    finally:
        use_stop_flag(before)
        stopper.join(60)
    assert runner.run(payload, keys, slots) == [None]
    runner.clear()


# --- stages that return something else than they say ------------------------------------------------------------------

WRONG: dict[str, Any] = {
    "uint8 [3, 8, 5]": lambda image: image.repeat(1, 2, 1),
    "uint8 [3, 3, 5]": lambda image: image[:, :-1],
    "uint8 [1, 4, 5]": lambda image: image[:1],
    "uint8 [4, 5]": lambda image: image[0],
    "float32 [3, 4, 5]": lambda image: image.float(),
    "ndarray": lambda image: image.numpy(),
}


@dataclass(frozen=True, kw_only=True, repr=False)
class Wrong(s.Opaque):
    """Returns what `output` does not say."""

    stage_name: ClassVar[str] = "wrong"
    kind: str

    def apply(self, image: torch.Tensor, seed: int) -> torch.Tensor:
        return WRONG[self.kind](image)  # type: ignore[no-any-return]


@pytest.mark.parametrize("last", [[], [Normalize()]], ids=["last", "in between"])
@pytest.mark.parametrize("kind", WRONG)
def test_another_result_than_declared_ends_the_run(kind: str, last: list[s.Stage]) -> None:
    program = program_of(Decode(), Resize(height=4, width=5), Wrong(kind=kind), *last)
    with pytest.raises(LoaderError) as caught:
        run(program, [png(photo(9, 9))])
    rule = "wrong: Wrong.apply must return uint8 [3, 4, 5], as its output says"
    assert str(caught.value) == f"{rule}, got {kind}; return that, or override output"


def test_a_result_of_any_size_has_the_channels_that_are_declared() -> None:
    program = program_of(Decode(), Wrong(kind="uint8 [1, 4, 5]"), Resize(height=4, width=5))
    with pytest.raises(LoaderError, match=r"must return uint8 \[3, H, W\], as its output says, got uint8 \[1, 9, 9\]"):
        run(program, [png(photo(9, 9))])
