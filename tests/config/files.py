"""YAML files for the tests of the configuration, and what reading them gives."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpuflow.config import Config, read_config
from gpuflow.errors import ConfigError, Problem
from gpuflow.stages import STAGES
from tests.texts import outline

FULL = """\
source: {folder: photos, split: {train: 0.9, val: 0.1}, seed: 3}
preprocess: &eval
  - decode
  - resize: {shorter: 256}
  - center_crop: {size: 224}
  - normalize: {mean: imagenet, std: imagenet}
pipelines:
  train:
    stages:
      - decode: {color: rgb, backend: auto}
      - random_resized_crop: {size: 224}
      - flip: {horizontal: 0.5}
      - torchvision: {name: RandomPosterize, bits: 2}
      - normalize
    batch: {size: 256, drop_last: true}
    shuffle: true
  val: {stages: *eval, batch: {size: 64}}
serve:
  stages: *eval
  model: {file: model.onnx}
train: {lr: 1e-3, epochs: 3}
run: {threads: auto, prefetch: 3}
"""
SMALL = """\
source: {folder: photos}
pipelines:
  val:
    stages: [decode, center_crop: {size: 8}]
"""


def read(text: str, *overrides: str) -> Config:
    Path("x.yaml").write_text(text, encoding="utf-8")
    return read_config("x.yaml", STAGES, overrides)


def problems(text: str, *overrides: str) -> tuple[Problem, ...]:
    """Return what is wrong with a file."""
    with pytest.raises(ConfigError) as caught:
        read(text, *overrides)
    return caught.value.problems


def fault(text: str, *overrides: str) -> str:
    """Return the outline of what is wrong with a file. Pins its text."""
    return outline(ConfigError(problems(text, *overrides)))


def with_block(block: str) -> str:
    """SMALL with this top-level block, which replaces the one of the same name; without one it is added at the end."""
    name = block.partition(":")[0]
    kept = {"source": "source: {folder: photos}\n", "pipelines": SMALL.partition("\n")[2]}
    kept.pop(name, None)
    return "".join(kept.values()) + block + "\n"


def stages_of(text: str) -> str:
    """A file whose pipeline `a` has these stages, in flow style, on line 2."""
    return f"source: {{folder: photos}}\npipelines: {{a: {{stages: [{text}]}}}}\n"
