"""torchvision: any transform by name; random numbers belong to the sample, and no other generator changes."""

from __future__ import annotations

import pickle
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torchvision.transforms import InterpolationMode, v2

from gpuflow.errors import ConfigError
from gpuflow.execute.cpu.workers import Setup
from gpuflow.stages import CenterCrop, Decode, Normalize, Resize, Torchvision
from gpuflow.stages.torch_parts import _DRAWS, _LIKE, SampleGenerator
from tests.datasets import python
from tests.images import jpeg, photo
from tests.running import RGB, images, keys_of, program_of

ROOT = Path(__file__).parents[2]
DATA = jpeg(photo(60, 80))
SIZED = RGB.replace(shape=(40, 50, 3))


def transform(name: str, **parameters: Any) -> Torchvision:
    return Torchvision(name=name, parameters=tuple(sorted(parameters.items())))


RANDOM = (
    transform("AugMix"),
    transform("AutoAugment"),
    transform("ColorJitter", brightness=0.5, hue=0.2),
    transform("ElasticTransform"),
    transform("GaussianBlur", kernel_size=5),
    transform("GaussianNoise"),
    transform("JPEG", quality=(20, 90)),
    transform("RandAugment"),
    transform("RandomAdjustSharpness", sharpness_factor=2.0),
    transform("RandomAffine", degrees=30, translate=(0.2, 0.2)),
    transform("RandomAutocontrast"),
    transform("RandomChannelPermutation"),
    transform("RandomEqualize"),
    transform("RandomErasing", p=0.9),
    transform("RandomGrayscale", p=0.5),
    transform("RandomPerspective"),
    transform("RandomPhotometricDistort"),
    transform("RandomRotation", degrees=20),
    transform("RandomResizedCrop", size=(32, 32)),
    transform("TrivialAugmentWide"),
)
every_random = pytest.mark.parametrize("stage", RANDOM, ids=lambda stage: stage.name)


def program(*stages: Any) -> Any:
    return program_of(Decode(), CenterCrop(size=40), *stages)


@every_random
def test_a_random_transform_is_a_pure_function_of_its_keys(stage: Torchvision) -> None:
    samples = [DATA] * 10
    state = torch.random.get_rng_state()
    first = images(program(stage), samples, keys_of(10))
    assert torch.equal(torch.random.get_rng_state(), state), "the user's generator is left alone"
    torch.rand(7)
    assert torch.equal(images(program(stage), samples, keys_of(10)), first)
    torch.random.set_rng_state(state)
    assert not torch.equal(images(program(stage), samples, keys_of(10, seed=1)), first)
    assert not torch.equal(images(program(stage), samples, keys_of(10, epoch=1)), first)
    assert stage.random


OWN_STREAM = ("AugMix", "GaussianNoise")
"""Transforms whose random operations draw other numbers if they get a generator."""


@pytest.mark.parametrize(
    "stage", [stage for stage in RANDOM if stage.name not in OWN_STREAM], ids=lambda stage: stage.name
)
def test_a_seed_gives_what_torchs_own_generator_gives(stage: Torchvision) -> None:
    image = torch.from_numpy(photo(40, 40)).permute(2, 0, 1).contiguous()
    for seed in range(5):
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            expected = stage.torchvision()(image)
        assert torch.equal(stage.apply(image, seed), expected)


def test_two_threads_at_once_give_what_one_gives() -> None:
    stages = (transform("RandomRotation", degrees=20), transform("RandomErasing", p=0.9), transform("AutoAugment"))
    samples = [DATA] * 16
    expected = images(program(*stages), samples)
    results: list[list[torch.Tensor]] = [[], []]

    def work(mine: list[torch.Tensor]) -> None:
        mine.extend(images(program(*stages), samples) for _ in range(4))

    threads = [threading.Thread(target=work, args=(mine,)) for mine in results]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert [len(mine) for mine in results] == [4, 4]
    assert all(torch.equal(batch, expected) for mine in results for batch in mine)


MEET = """
import threading, time
import torch, torch._ops
from gpuflow.stages import Torchvision

stage = Torchvision(name="RandomPerspective", parameters=(("p", 1.0),))
image = torch.zeros((3, 20, 20), dtype=torch.uint8)
seeds, results, find = (3, 4), {}, torch._ops._get_packet

def find_slowly(*arguments):
    found = find(*arguments)
    if threading.current_thread() is not threading.main_thread():
        time.sleep(0.1)
    return found

def work(seed):
    start.wait(20)
    results[seed] = stage.apply(image, seed)

start, torch._ops._get_packet = threading.Barrier(2), find_slowly
threads = [threading.Thread(target=work, args=(seed,)) for seed in seeds]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join(40)
print(sorted(results))
"""


@pytest.mark.slow
def test_two_threads_may_meet_an_operator_for_the_first_time_at_once() -> None:
    """torch looks an operator up at its first call, without a lock; here that takes long enough for both to do it."""
    done = python(MEET, cwd=ROOT)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[3, 4]\n", "")


@pytest.mark.slow
def test_worker_processes_share_one_import_of_torchvision() -> None:
    """It takes 1.4 s of processor time, which each worker would need after it has said that it is ready."""
    code = """
import pickle, sys
from gpuflow.execute.cpu.workers import prepare
stage = prepare(bytes.fromhex(sys.argv[1])).program.pipeline.stages[-1]
imported = set(sys.modules)
print("torchvision.transforms.v2" in imported)
import torch
stage.apply(torch.zeros((3, 20, 20), dtype=torch.uint8), 3)
print([name for name in set(sys.modules) - imported if name.startswith("torch")])
"""
    setup = Setup(program(transform("RandomPerspective")))
    done = python(code, pickle.dumps(setup).hex(), cwd=ROOT)
    assert (done.returncode, done.stdout) == (0, "True\n[]\n"), done.stderr


def test_every_function_that_takes_a_generator_gets_one() -> None:
    """Of torch's own list, without a module of the same name and what only networks call."""
    schemas = (schema for schema in torch._C._jit_get_all_schemas() if schema.name.startswith("aten::"))
    named = {schema.name[6:] for schema in schemas if any(x.name == "generator" for x in schema.arguments)}
    public = {name for name in named if hasattr(torch, name) or hasattr(torch.Tensor, name)}
    public |= set(_LIKE)  # those of torch 2.9 take none
    assert public - {"random", "rrelu", "rrelu_", "_fused_dropout"} == set(_DRAWS) | set(_LIKE)


def test_functions_that_resemble_a_tensor_draw_from_the_samples_generator() -> None:
    like = torch.zeros(100, dtype=torch.uint8)
    state = torch.random.get_rng_state()

    def draw() -> list[torch.Tensor]:
        with SampleGenerator(5) as mode:
            drawn = [
                torch.rand_like(like, dtype=torch.float32),
                torch.randn_like(like, dtype=torch.float64),
                torch.randint_like(like, 9),
                torch.randint_like(like, 200, 210),
                torch.randint_like(like, low=3, high=6),
            ]
        assert mode.used
        return drawn

    first, again = draw(), draw()
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert [drawn.dtype for drawn in first] == [torch.float32, torch.float64, *[torch.uint8] * 3]
    limits = [(int(drawn.min()), int(drawn.max())) for drawn in first[2:]]
    assert limits == [(0, 8), (200, 209), (3, 5)]


def test_deterministic_transforms_equal_torchvision_alone_and_inside() -> None:
    crop = images(program(), [DATA])[0]
    for stage, expected in [
        (transform("Pad", padding=3, fill=7), v2.Pad(3, fill=7)),
        (transform("Grayscale", num_output_channels=3), v2.Grayscale(3)),
        (
            transform("Resize", size=(20, 31), interpolation="bicubic"),
            v2.Resize((20, 31), InterpolationMode.BICUBIC),
        ),
        (transform("CenterCrop", size=20), v2.CenterCrop(20)),
        (transform("ToDtype", dtype="float32", scale=True), v2.ToDtype(torch.float32, scale=True)),
        (transform("ToDtype", dtype="float16", scale=True), v2.ToDtype(torch.float16, scale=True)),
        (transform("ToDtype", dtype="bfloat16", scale=True), v2.ToDtype(torch.bfloat16, scale=True)),
    ]:
        assert not stage.random
        (result,) = images(program(stage), [DATA])
        assert result.dtype == expected(crop).dtype
        assert torch.equal(result, expected(crop))
    (result,) = images(program(transform("Pad", padding=3), Resize(height=9, width=9), Normalize()), [DATA])
    padded = Resize(height=9, width=9).torchvision()(v2.Pad(3)(crop))
    assert torch.equal(result, Normalize().torchvision()(padded))


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_behind_normalize(layout: Any, dtype: Any) -> None:
    normalize = Normalize(dtype=dtype, layout=layout)
    stages = (normalize, transform("RandomErasing", p=1.0, value=3.0))
    batch = images(program(*stages), [DATA] * 6)
    plain = images(program(normalize), [DATA] * 6)
    assert program(*stages).result == program(normalize).result
    erased = batch != plain
    assert (batch[erased] == 3).all()
    assert erased.flatten(1).any(1).all()


def test_a_transform_that_takes_floats_alone_can_serve() -> None:
    to_float = transform("ToDtype", dtype="float32", scale=True)
    stage = transform("Normalize", mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))
    assert not stage.random
    serving = program_of(Decode(), CenterCrop(size=40), to_float, stage, serving=True)
    assert torch.equal(
        images(serving, [DATA])[0], stage.torchvision()(to_float.torchvision()(images(program(), [DATA])[0]))
    )


@pytest.mark.parametrize(
    ("stage", "shape"),
    [
        (transform("Pad", padding=(1, 2, 3, 4)), (46, 54, 3)),
        (transform("Grayscale"), (40, 50, 1)),
        (transform("Resize", size=(7, 9)), (7, 9, 3)),
        (transform("RandomResizedCrop", size=12), (12, 12, 3)),
        (transform("RandomResize", min_size=10, max_size=30), (None, None, 3)),
        (transform("ScaleJitter", target_size=(30, 30)), (None, None, 3)),
        (transform("RandomShortestSize", min_size=(20, 30)), (None, None, 3)),
        (transform("RandomZoomOut"), (None, None, 3)),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_specs_are_probed(stage: Torchvision, shape: tuple[int | None, int | None, int]) -> None:
    assert stage.output(SIZED).shape == shape
    if stage.name in ("Pad", "Grayscale"):
        assert stage.output(RGB).shape == (None, None, shape[2])


def test_an_unsized_result_meets_a_later_crop() -> None:
    stages = (transform("RandomResize", min_size=20, max_size=40), CenterCrop(size=20), Normalize())
    assert images(program(*stages), [DATA] * 12).shape == (12, 3, 20, 20)


@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        (
            {"name": "RandomRotatio"},
            "torchvision.name must be a transform of one image in torchvision.transforms.v2, got 'RandomRotatio'; "
            "did you mean 'RandomRotation'?",
        ),
        (
            {"name": "RandomRotation"},
            "torchvision RandomRotation does not take these parameters: "
            "RandomRotation.__init__() missing 1 required positional argument: 'degrees'",
        ),
        (
            {"name": "Pad", "parameters": (("padding", 1), ("pading", 1))},
            "torchvision Pad does not take these parameters: "
            "Pad.__init__() got an unexpected keyword argument 'pading'. Did you mean 'padding'?",
        ),
        (
            {"name": "Resize", "parameters": (("interpolation", "cubic"), ("size", 3))},
            "torchvision Resize does not take these parameters: 'cubic' is not a valid InterpolationMode",
        ),
        (
            {"name": "ToDtype", "parameters": (("dtype", "float31"),)},
            "torchvision ToDtype does not take these parameters: module 'torch' has no attribute 'float31'",
        ),
    ],
)
def test_errors(parameters: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Torchvision(**parameters)
    assert str(caught.value).replace(". Did you mean 'padding'?", "") == text.replace(". Did you mean 'padding'?", "")


def test_an_unknown_name_that_resembles_nothing_lists_what_there_is() -> None:
    with pytest.raises(ConfigError) as caught:
        Torchvision(name="zzz")
    text = str(caught.value)
    assert text.startswith(
        "torchvision.name must be a transform of one image in torchvision.transforms.v2, got 'zzz'; known: AugMix, "
    )
    assert "Compose" not in text


@pytest.mark.parametrize(
    ("stage", "text"),
    [
        (transform("ToPILImage"), "ToPILImage does not take uint8 40x50x3 hwc: the result is not one CHW image"),
        (transform("FiveCrop", size=3), "FiveCrop does not take uint8 40x50x3 hwc: the result is not one CHW image"),
        (
            transform("Normalize", mean=(0.5,), std=(0.5,)),
            "Normalize does not take uint8 40x50x3 hwc: Input tensor should be a float tensor. Got torch.uint8.",
        ),
        (
            transform("ToDtype", dtype="int64"),
            "ToDtype gives torch.int64; a batch holds uint8, float32, float16, bfloat16",
        ),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_results_that_no_batch_can_hold(stage: Torchvision, text: str) -> None:
    with pytest.raises(ValueError, match=stage.name) as caught:
        stage.output(SIZED)
    assert str(caught.value) == text


def test_random_never_raises_so_that_check_names_the_place() -> None:
    for stage in (transform("ToPILImage"), transform("Normalize", mean=(0.5,), std=(0.5,))):
        with pytest.raises(ConfigError) as caught:
            program_of(Decode(), stage, serving=True)
        assert str(caught.value).startswith("test[1].torchvision ")
