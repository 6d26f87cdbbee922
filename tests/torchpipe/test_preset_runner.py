"""Training on torchpipe's operators: exactly the pixels that torchpipe's own nodes give, for every kind of file."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path

import numpy as np
import pytest
import torch

import gpuflow
import gpuflow.serve
from gpuflow.config import read_config
from gpuflow.decode.preset import Preset
from gpuflow.engines.pytorch import load_checkpoint
from gpuflow.errors import BadSampleError, LoaderTimeout
from gpuflow.pipeline.program import Program
from gpuflow.sources import Payload
from gpuflow.stages import STAGES, Flip, Normalize, RandomCrop
from gpuflow.torchpipe.running_graph import PresetRunner
from gpuflow.training.trainer import Trainer, TrainerEvents
from tests.datasets import make_photos
from tests.host_stream import HostStream
from tests.hostile import BAD, HOSTILE
from tests.images import jpeg, photo
from tests.running import keys_of, program_of, run
from tests.serve.models import ARCH

FILES = {**HOSTILE, **{name: data for name, (data, _) in BAD.items()}}
UNKNOWN = {"webp", "webp lossless", "gif", "empty", "text", "cut short", "huge"}


def runner(program: Program, seconds: float = 20) -> PresetRunner:
    return PresetRunner(program, HostStream(), origin="x.yaml", threads=2, timeout_seconds=seconds)  # type: ignore[arg-type]


def payload(files: list[bytes], *, unreadable: int | None = None) -> Payload:
    sizes = [len(data) for data in files]
    errors = ["permission denied" if i == unreadable else None for i in range(len(files))]
    buffer = np.frombuffer(b"".join(files), np.uint8)
    return Payload(buffer=buffer, offsets=[0, *accumulate(sizes)][:-1], sizes=sizes, errors=errors)


@pytest.mark.parametrize(
    ("height", "width", "color", "stages"),
    [(40, 30, "rgb", "[]"), (128, 101, "bgr", "[]"), (64, 64, "rgb", "[normalize: {dtype: float16, layout: nhwc}]")],
)
def test_the_loaders_images_equal_those_of_torchpipes_nodes(
    height: int, width: int, color: str, stages: str, tmp_path: Path
) -> None:
    folder = tmp_path / "photos" / "all"
    folder.mkdir(parents=True)
    for i, data in enumerate(FILES.values()):
        (folder / f"{i:02}.jpg").write_bytes(data)
    block = f"preset: torchpipe_cpu, height: {height}, width: {width}, color: {color}, stages: {stages}"
    path = tmp_path / "x.yaml"
    path.write_text(
        f"source: {{folder: {tmp_path}/photos}}\n"
        f"pipelines: {{val: {{{block}, batch: {{size: 30}}}}}}\n"
        f"serve: {{{block}}}\nrun: {{threads: 2, max_bad: 9}}\n"
    )
    names = list(FILES)
    with gpuflow.load(path, "val") as loader, pytest.warns(UserWarning, match="are bad so far"):
        batches = list(loader)
    trained = {
        names[index]: image for batch in batches for index, image in zip(batch.indices, batch.images, strict=True)
    }
    assert set(names) - set(trained) == UNKNOWN
    with gpuflow.serve.load(path, preprocess_only=True) as predictor:
        served = predictor.preprocess(FILES[name] for name in trained)
        for name in UNKNOWN:
            with pytest.raises(BadSampleError):
                predictor.preprocess(FILES[name])
    assert torch.equal(torch.stack(list(trained.values())), served)
    assert served.stride()[1:] == batches[0].images.stride()[1:]


def test_a_model_trained_on_a_preset_is_served_on_it(tmp_path: Path) -> None:
    make_photos(tmp_path / "photos", classes=2, each=4)
    preset = "preset: torchpipe_cpu, height: 32, width: 32, stages"
    path = tmp_path / "x.yaml"
    path.write_text(
        f"source: {{folder: {tmp_path}/photos}}\n"
        "pipelines:\n"
        f"  train: {{{preset}: [flip: {{horizontal: 0.5}}, normalize], batch: {{size: 4}}, shuffle: true}}\n"
        f"  val: {{{preset}: [normalize], batch: {{size: 8}}}}\n"
        f"train: {{model: {ARCH}, epochs: 1, lr: 0.01, out: {tmp_path}/run}}\n"
        f"serve: {{{preset}: [normalize], model: {{file: {tmp_path}/run/last.pt}}}}\n"
        "run: {threads: 2}\n"
    )
    Trainer(read_config(path, STAGES), device="cpu").run(TrainerEvents(), max_steps=1)
    with gpuflow.load(path, "val") as loader, gpuflow.serve.load(path) as predictor:
        ((images, _),) = loader
        logits = predictor(sorted((tmp_path / "photos").rglob("*.jpg")))
    with torch.inference_mode():
        expected = load_checkpoint(f"{tmp_path}/run/last.pt")[0](images)
    assert torch.allclose(logits, expected, atol=1e-5)


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_images_with_random_crops_and_flips_equal_those_of_the_cpu(layout: str) -> None:
    """On a CPU, with torchpipe_cpu in place of the GPU's operators."""
    program = program_of(
        Preset(name="torchpipe_cpu", height=40, width=50),
        Flip(horizontal=0.5, vertical=0.5),
        RandomCrop(size=(30, 33)),
        Flip(vertical=0.5),
        Normalize(layout=layout),  # type: ignore[arg-type]
    )
    files, keys = list(FILES.values()), keys_of(len(FILES), seed=3, epoch=2, first=10**9)
    expected, faults = run(program, files, keys)
    ours = runner(program)
    slots = ours.slots(len(files))
    found = ours.launch(ours.prepare(payload(files), keys), slots)
    assert [fault is None for fault in found] == [fault is None for fault in faults]
    assert {name for name, fault in zip(FILES, found, strict=True) if fault is not None} == UNKNOWN
    good = [i for i, fault in enumerate(found) if fault is None]
    assert torch.equal(slots[good], expected[good])
    assert (slots.dtype, slots.stride()) == (expected.dtype, expected.stride())
    assert (ours.engine_images, ours.cpu_images) == (len(good), 0)


def test_a_preset_alone_gives_whole_levels() -> None:
    program = program_of(Preset(name="torchpipe_cpu", height=12, width=10))
    ours = runner(program)
    slots = ours.slots(1)
    assert ours.launch(ours.prepare(payload([HOSTILE["png"]]), keys_of(1)), slots) == [None]
    assert slots.dtype == torch.uint8
    assert torch.equal(slots, run(program, [HOSTILE["png"]])[0])


def test_an_unreadable_file_is_bad() -> None:
    ours = runner(program_of(Preset(name="torchpipe_cpu", height=12, width=10)))
    files = [HOSTILE["png"], b"", HOSTILE["bmp"]]
    first, second, third = ours.launch(ours.prepare(payload(files, unreadable=1), keys_of(3)), ours.slots(3))
    assert (first, str(second), third) == (None, "read: permission denied", None)


def test_a_graph_that_hangs() -> None:
    """More work than it can do before this thread looks for the answers."""
    ours = runner(program_of(Preset(name="torchpipe_cpu", height=12, width=10)), seconds=1e-9)
    large = jpeg(photo(1500, 2000))
    with pytest.raises(LoaderTimeout) as caught:
        ours.prepare(payload([large] * 30), keys_of(30))
    assert str(caught.value) == (
        "torchpipe gave no image within run.timeout_s = 1e-09 s; raise that if it is too short"
    )
