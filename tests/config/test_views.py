"""`pipelines.X.views`: what is read of it, and its errors with their places."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpuflow.config import Config, read_config
from gpuflow.errors import ConfigError
from gpuflow.pipeline.views import ViewsProgram
from gpuflow.stages import STAGES
from tests.texts import outline

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
        ("count: 2", "count: 0", "x.yaml:7: pipelines.train.views.global.count config.range, got 0"),
        (
            "    views:",
            "    stages: [decode, {center_crop: {size: 8}}]\n    views:",
            "x.yaml:6: pipelines.train.views config.conflict",
        ),
        (
            "    decode: {color: rgb}\n",
            "    preset: torchpipe_cpu\n    height: 8\n    width: 8\n",
            "x.yaml:7: pipelines.train.views config.conflict",
        ),
        (
            "[{random_resized_crop: {size: 13}}]",
            "[{flip: {horizontal: 0.5}}]",
            "x.yaml:11: pipelines.train.views.local.stages[0].flip stage.size",
        ),
        (
            "[{random_resized_crop: {size: 13}}]",
            "[]",
            "x.yaml:11: pipelines.train.views.local.stages stage.size",
        ),
        (
            "          - random_resized_crop: {size: 24}\n",
            "          - decode\n          - random_resized_crop: {size: 24}\n",
            "x.yaml:9: pipelines.train.views.global.stages[0].decode stage.order",
        ),
        (
            "          - random_resized_crop: {size: 24}\n",
            "          - random_resized_crop: {size: 0}\n",
            "x.yaml:9: pipelines.train.views.global.stages[0].random_resized_crop.size config.range, got 0",
        ),
        (
            "{color: rgb}",
            "{color: pink}",
            "x.yaml:4: pipelines.train.decode.color config.type, got 'pink'",
        ),
        (
            "{count: 6, stages: [{random_resized_crop: {size: 13}}]}",
            "{count: 6}",
            "x.yaml:11: pipelines.train.views.local config.missing_key",
        ),
        (
            "          - normalize\n",
            "          - normalize\n          - mixup\n",
            "x.yaml:11: pipelines.train.views.global.stages[2].mixup config.conflict",
        ),
        (
            "{folder: photos}",
            "{listing: x.jsonl, fields: {image: , boxes: {labels: kinds}, caption: {type: text}}}",
            "x.yaml:5: pipelines.train.views config.conflict",
        ),
        (
            "count: 6,",
            "counts: 6,",
            "x.yaml:11: pipelines.train.views.local.counts config.unknown_key",
        ),
    ],
)
def test_faults_have_their_places(file: Path, old: str, new: str, expected: str) -> None:
    assert old in TEXT
    with pytest.raises(ConfigError) as found:
        read(file, TEXT.replace(old, new))
    assert outline(found.value) == expected


def test_decode_without_views_and_no_views_at_all_are_faults(file: Path) -> None:
    text = "source: {folder: x}\npipelines:\n  train: {decode: {}, stages: [decode, {center_crop: {size: 8}}]}\n"
    with pytest.raises(ConfigError) as found:
        read(file, text)
    assert outline(found.value) == "x.yaml:3: pipelines.train.decode config.conflict"
    with pytest.raises(ConfigError) as found:
        read(file, "source: {folder: x}\npipelines:\n  train: {views: {}}\n")
    assert outline(found.value) == "x.yaml:3: pipelines.train.views config.missing_key"


def test_a_pipeline_may_have_the_name_views(tmp_path: Path) -> None:
    stages = "[decode, {random_resized_crop: {size: 8}}, normalize]"
    (tmp_path / "named.yaml").write_text(
        f"source: {{folder: x}}\npipelines: {{views: {{stages: {stages}, batch: {{size: 2}}}}}}\n"
    )
    assert list(read_config(tmp_path / "named.yaml", STAGES).programs) == ["views"]
