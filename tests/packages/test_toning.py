"""A stage of another package that draws for each sample: in YAML, on the CPU, and in passes for a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch

from gpuflow.execute.gpu.passes import passes_of
from gpuflow.pipeline.program import OpaqueStep, PointwiseStep, ResamplingStep
from gpuflow.stages import CenterCrop, Decode, Normalize, Solarize
from tests.datasets import make_photos, write_config
from tests.forking import Interpreter
from tests.images import photo, png
from tests.packages.toning.toning import MaskBlue, Tone
from tests.running import images, keys_of, program_of

PACKAGE = Path(__file__).parent / "toning"


def test_entry_points_bring_the_stages_into_yaml(tmp_path: Path, interpreter: Interpreter) -> None:
    make_photos(tmp_path / "photos", classes=1, each=4)
    stages = [{"decode": {}}, {"center_crop": {"size": 16}}, {"tone": {"power": [0.4, 0.5]}}, "mask_blue"]
    config = write_config(tmp_path / "x.yaml", tmp_path / "photos", train=stages)
    code = """
import json, sys, gpuflow
sys.path.insert(0, sys.argv[1])
with gpuflow.load(sys.argv[2], "train") as train:
    (images, _), = list(train)
print(json.dumps([list(images.shape), int(images[:, 2].max()), int(images[:, :2].max())]))
"""
    done = interpreter.run(code, str(PACKAGE), str(config))
    assert done.returncode == 0, done.stderr
    shape, blue, others = json.loads(done.stdout)
    assert (shape[1:], blue) == ([3, 16, 16], 0) and others > 0


def test_each_sample_has_its_own_tables() -> None:
    """Different results of one image, which do not depend on what else is in the batch."""
    program = program_of(Decode(), CenterCrop(size=20), Tone())
    data, keys = png(photo(24, 24)), keys_of(6, seed=1)
    batch = images(program, [data] * 6, keys)
    assert len({image.numpy().tobytes() for image in batch}) == 6
    assert torch.equal(images(program, [data], keys[3])[0], batch[3])
    drawn = Tone().draw(keys.stage("tone", 0))[3]
    levels = np.rint((photo(24, 24)[2:22, 2:22] / 255) ** drawn[:3] * 255)
    mixed = 0.9 * levels + 0.1 * drawn[3] * levels[..., (1, 2, 0)]
    expected = np.clip(np.floor(mixed + 0.5), 0, 255)
    assert np.abs(batch[3].permute(1, 2, 0).numpy() - expected).max() <= 1, "float32 near a half"


def test_its_stages_run_on_a_gpu_or_send_only_themselves_to_the_cpu() -> None:
    passes = passes_of(program_of(Decode(), CenterCrop(size=20), Solarize(), Tone(), MaskBlue(), Normalize()))
    assert not isinstance(passes, str), passes
    assert [type(one.step) for one in passes] == [ResamplingStep, PointwiseStep, OpaqueStep, PointwiseStep]
    assert isinstance(passes[1].step, PointwiseStep)
    assert passes[1].step.stages == (Solarize(), Tone()), "in one pass"
