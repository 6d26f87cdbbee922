"""`pipelines.X.views`: what is read of it, and its errors with their places."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpuflow.config import Config, read_config
from gpuflow.errors import ConfigError
from gpuflow.pipeline.views import ViewsProgram
from gpuflow.stages import STAGES

TEXT = """\
source: {folder: photos}
pipelines:
  train:
    decode: {color: rgb}
    views:
      global:
        count: 2
        stages:
          - random_resized_crop: {size: 24}
          - normalize
      local: {count: 6, stages: [{random_resized_crop: {size: 13}}]}
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return Path("x.yaml")


def read(file: Path, text: str = TEXT, *overrides: str) -> Config:
    file.write_text(text)
    return read_config(file, STAGES, overrides)


def views_of(config: Config) -> ViewsProgram:
    program = config.any_program("train")
    assert isinstance(program, ViewsProgram)
    return program


def test_views_are_read(file: Path) -> None:
    config = read(file)
    program = views_of(config)
    assert [(view.name, view.count, str(result)) for view, result in program.results] == [
        ("global", 2, "float32 24x24x3 nchw"),
        ("local", 6, "uint8 13x13x3 hwc"),
    ]
    assert not config.programs
    assert repr(program.pipeline) == (
        "train: global x 2 (decode() -> random_resized_crop(size=24) -> normalize()); "
        "local x 6 (decode() -> random_resized_crop(size=13))"
    )
    assert len(program.pipeline.lines) == 5
    with pytest.raises(ConfigError, match=r"pipelines\.train\.views are several images of each sample"):
        config.program("train")


def test_fields_that_do_not_follow_pixels_are_taken(file: Path) -> None:
    fields = "{listing: x.jsonl, fields: {image: , label: , caption: {type: text}, weight: {type: number}}}"
    assert len(views_of(read(file, TEXT.replace("{folder: photos}", fields))).programs) == 2


def test_the_fingerprint_covers_what_changes_the_pixels_and_not_the_order(file: Path) -> None:
    fingerprint = views_of(read(file)).pipeline.fingerprint
    changes = (
        "pipelines.train.views.local.count=7",
        "pipelines.train.views.global.stages.random_resized_crop.size=25",
        "pipelines.train.decode.max_pixels=1000",
    )
    assert len({fingerprint, *(views_of(read(file, TEXT, change)).pipeline.fingerprint for change in changes)}) == 4
    head, blocks = TEXT.split("      global:\n")
    other, local = blocks.split("      local:")
    turned = f"{head}      local:{local}      global:\n{other}"
    assert views_of(read(file, turned)).pipeline.fingerprint == fingerprint


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("count: 2", "count: 0", "x.yaml:7: pipelines.train.views.global.count must be >= 1, got 0"),
        (
            "    views:",
            "    stages: [decode, {center_crop: {size: 8}}]\n    views:",
            "x.yaml:6: pipelines.train.views stands in place of stages, and there are both; remove one of them",
        ),
        (
            "    decode: {color: rgb}\n",
            "    preset: torchpipe_cpu\n    height: 8\n    width: 8\n",
            "x.yaml:7: pipelines.train.views cannot follow a preset; remove the preset, or use stages",
        ),
        (
            "[{random_resized_crop: {size: 13}}]",
            "[{flip: {horizontal: 0.5}}]",
            "x.yaml:11: pipelines.train.views.local.stages[0].flip leaves images of varying size (uint8 ?x?x3 hwc), "
            "which no batch can hold; add center_crop, random_crop, random_resized_crop, letterbox or resize with "
            "height and width",
        ),
        (
            "[{random_resized_crop: {size: 13}}]",
            "[]",
            "x.yaml:11: pipelines.train.views.local.stages leaves images of varying size (uint8 ?x?x3 hwc), "
            "which no batch can hold; add center_crop, random_crop, random_resized_crop, letterbox or resize with "
            "height and width",
        ),
        (
            "          - random_resized_crop: {size: 24}\n",
            "          - decode\n          - random_resized_crop: {size: 24}\n",
            "x.yaml:9: pipelines.train.views.global.stages[0].decode is shared by all views; write its parameters as "
            "decode: {...} next to views",
        ),
        (
            "          - random_resized_crop: {size: 24}\n",
            "          - random_resized_crop: {size: 0}\n",
            "x.yaml:9: pipelines.train.views.global.stages[0].random_resized_crop.size must be >= 1, got 0",
        ),
        (
            "{color: rgb}",
            "{color: pink}",
            "x.yaml:4: pipelines.train.decode.color must be one of rgb, bgr, gray, got 'pink'",
        ),
        (
            "{count: 6, stages: [{random_resized_crop: {size: 13}}]}",
            "{count: 6}",
            "x.yaml:11: pipelines.train.views.local needs the key 'stages': a list",
        ),
        (
            "          - normalize\n",
            "          - normalize\n          - mixup\n",
            "x.yaml:11: pipelines.train.views.global.stages[2].mixup mixes the samples of a batch, and views are not "
            "mixed; remove the stage, or use no views",
        ),
        (
            "{folder: photos}",
            "{listing: x.jsonl, fields: {image: , boxes: {labels: kinds}, caption: {type: text}}}",
            "x.yaml:5: pipelines.train.views move the pixels in several ways, and boxes cannot follow; use stages in "
            "place of views, or a source without these fields",
        ),
        (
            "count: 6,",
            "counts: 6,",
            "x.yaml:11: pipelines.train.views.local.counts is not a key here; did you mean 'count'?",
        ),
    ],
)
def test_faults_have_their_places(file: Path, old: str, new: str, expected: str) -> None:
    assert old in TEXT
    with pytest.raises(ConfigError) as found:
        read(file, TEXT.replace(old, new))
    assert expected in str(found.value)
    assert len(found.value.problems) == 1


def test_decode_without_views_and_no_views_at_all_are_faults(file: Path) -> None:
    text = "source: {folder: x}\npipelines:\n  train: {decode: {}, stages: [decode, {center_crop: {size: 8}}]}\n"
    with pytest.raises(ConfigError, match=r"decode is for views, and there are none; put decode before the stages"):
        read(file, text)
    with pytest.raises(ConfigError, match=r"pipelines\.train\.views must name at least one view, got none"):
        read(file, "source: {folder: x}\npipelines:\n  train: {views: {}}\n")


def test_a_pipeline_may_have_the_name_views(tmp_path: Path) -> None:
    stages = "[decode, {random_resized_crop: {size: 8}}, normalize]"
    (tmp_path / "named.yaml").write_text(
        f"source: {{folder: x}}\npipelines: {{views: {{stages: {stages}, batch: {{size: 2}}}}}}\n"
    )
    assert list(read_config(tmp_path / "named.yaml", STAGES).programs) == ["views"]
