"""The reference: its examples print what they show; every key and every stage's picture stands in it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import BaseModel

from gpuflow.config.models import ModelSpec, RunSpec, SaveSpec, ServeSpec, TensorrtSpec, TrainSpec
from gpuflow.stages import STAGES
from tests.pages import ROOT, sections_of
from tests.pages import run_blocks as run_files
from tests.photographs import make_trees
from tests.test_docs import hooks

PAGE = "reference/api.md"
SECTIONS = dict(sections_of(PAGE))
COMMANDS = [section for section in SECTIONS if section]


def test_the_reference_begins_with_what_people_call() -> None:
    assert COMMANDS == [
        "Load",
        "The loader's methods",
        "Wrap a DataLoader",
        "Transform images in memory",
        "Write a stage or a source",
        "Serve",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("section", COMMANDS)
def test_an_example_prints_what_the_page_shows(section: str, tmp_path: Path) -> None:
    if section == "Serve":
        pytest.importorskip("torchpipe", reason="the predictor runs a graph of torchpipe")
    make_trees(tmp_path)
    (tmp_path / "photo.jpg").write_bytes((tmp_path / "photos/zelkova/tree00_1.jpg").read_bytes())
    [example, text] = SECTIONS[section]
    command = SimpleNamespace(section=section, language="bash", name="", text=f"python {example.name}")
    blocks: Any = [*SECTIONS[""], example, command]
    assert run_files(blocks, tmp_path, {}) == text.text


def keys_of(model: type[BaseModel], place: str) -> Iterator[tuple[str, str]]:
    """Yield (place of the block, key) for each key of a block and of the blocks in it."""
    inner = {"model": ModelSpec, "save_every": SaveSpec, "tensorrt": TensorrtSpec}
    for name, field in model.model_fields.items():
        yield place, field.alias or name
        block = inner.get(name)
        if block is not None and issubclass(block, BaseModel) and str(block.__name__) in str(field.annotation):
            yield from keys_of(block, f"{place}.{name}")


def built() -> str:
    """Return the page of keys as the build makes it."""
    file = SimpleNamespace(src_uri="reference/yaml.md", generated_by=None)
    text = (ROOT / "docs/reference/yaml.md").read_text()
    page: str = hooks().on_page_markdown(text, page=SimpleNamespace(file=file, meta={}), config=None, files=None)
    return page


def test_every_key_of_train_run_and_serve_has_its_type_and_meaning() -> None:
    page = built()
    keys = [*keys_of(TrainSpec, "train"), *keys_of(RunSpec, "run"), *keys_of(ServeSpec, "serve")]
    assert ("serve.model.tensorrt", "min_batch") in keys and ("train.save_every", "steps") in keys
    for place, key in keys:
        table = page.split(f"### `{place}`\n")[1].split("\n### ")[0].split("\n## ")[0].split("\nIn more detail")[0]
        [row] = [line for line in table.splitlines() if line.startswith(f"| `{key}` |")]
        _, _, kind, default, meaning, _ = row.replace("\\|", "").split("|")
        assert kind.strip() and len(meaning.split()) > 1, row
        assert place == "serve" or default.strip() or "default" in meaning or key in NO_DEFAULT, row


NO_DEFAULT = {"bad_file", "audit", "memory_limit", "amp", "ema", "steps", "minutes"}
"""What is left out by default, as the meaning of each shows."""


def test_each_block_of_keys_stands_once() -> None:
    page = built()
    for place in ("train", "serve", "serve.model", "run", "pipelines.NAME"):
        assert page.count(f"### `{place}`\n") == 1, place


def test_the_stages_without_a_picture_are_named() -> None:
    module = hooks()
    assert set(STAGES) - set(module.stage_pictures()) == {"decode", "normalize"}
    page = built()
    for stage, path in module.stage_pictures().items():
        section = page.split(f"### `- {stage}`\n")[1].split("\n### ")[0]
        assert f"](../{path})" in section, stage


@pytest.mark.slow
@pytest.mark.parametrize("stage", hooks().stage_pictures())
def test_a_stage_has_a_small_picture(stage: str) -> None:
    pytest.importorskip("skimage", reason="the photograph is one of scikit-image's")
    module = hooks().pictures_module()
    data = module.picture(stage)
    assert data.startswith(b"\xff\xd8") and len(data) <= module.LARGEST_BYTES
    assert 1 <= len(module.captions(stage)) <= 3
