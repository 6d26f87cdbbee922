"""A pipeline whose stages take fields of records: what the file must say, and what has images alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gpuflow.config import read_config
from gpuflow.errors import ConfigError
from gpuflow.pipeline.stage import FromRecord
from gpuflow.stages import STAGES, WarpAffine
from tests.config.files import fault, read
from tests.datasets import make_photos
from tests.faces import FIELDS, TARGET, face_config, make_faces
from tests.texts import outline

ALIGN = {"matrix": {"field": "align"}}
BY_POINTS = {"source": {"field": "landmarks"}, "target": TARGET}
STAGE = "pipelines.train.stages[1].warp_affine"


@pytest.fixture(scope="module")
def listing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_faces(tmp_path_factory.mktemp("faces"))


def test_a_field_is_part_of_the_stage_and_of_the_fingerprint(listing: Path, tmp_path: Path) -> None:
    found = {}
    for field in ("align", "other"):
        fields = {**FIELDS, field: {"type": "any"}}
        path = face_config(tmp_path / "x.yaml", listing, {"matrix": {"field": field}}, fields=fields)
        config = read_config(path, STAGES)
        stage = config.programs["train"].pipeline.stages[1]
        assert stage == WarpAffine(matrix=FromRecord(field), size=(28, 32), border="edge")
        assert f"matrix={{field: {field}}}" in repr(stage)
        found[config.programs["train"].pipeline.fingerprint] = config
    assert len(found) == 2


@pytest.mark.parametrize(
    ("warp", "fields", "text"),
    [
        (
            {"matrix": {"field": "alin"}},
            FIELDS,
            f"{STAGE}.matrix.field config.conflict, got 'alin'",
        ),
        (
            {"matrix": {"field": "map"}},
            FIELDS,
            f"{STAGE}.matrix.field config.conflict, got 'map'",
        ),
        (
            ALIGN,
            {"label": None, "align": {"type": "keypoints", "column": "points"}},
            f"{STAGE}.matrix.field config.conflict",
        ),
        (
            BY_POINTS,
            {"landmarks": {"type": "boxes", "column": "boxes"}},
            f"{STAGE}.source.field config.conflict",
        ),
        (
            {"matrix": {"fields": "align"}},
            FIELDS,
            f"{STAGE}.matrix.fields config.unknown_key",
        ),
        ({"matrix": {}}, FIELDS, f"{STAGE}.matrix config.missing_key"),
        ({"matrix": {"field": 3}}, FIELDS, f"{STAGE}.matrix.field config.type, got 3"),
        (
            {"matrix": [[1, 2], [3, 4]]},
            FIELDS,
            f"{STAGE}.matrix config.type, got [[1, 2], [3, 4]]",
        ),
        (
            {**ALIGN, **BY_POINTS},
            FIELDS,
            f"{STAGE} config.conflict",
        ),
    ],
    ids=["typo", "undeclared", "matrix type", "points type", "key", "no key", "no text", "numbers", "both"],
)
def test_errors(listing: Path, tmp_path: Path, warp: Any, fields: Any, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_config(face_config(tmp_path / "x.yaml", listing, warp, fields=fields), STAGES)
    outlines = outline(caught.value).splitlines()
    assert text in [one.partition(": ")[2] for one in outlines]
    assert all(one.startswith(f"{tmp_path / 'x.yaml'}:") for one in outlines)


def test_a_folder_declares_no_fields(tmp_path: Path) -> None:
    make_photos(tmp_path / "data")
    with pytest.raises(ConfigError) as caught:
        read_config(face_config(tmp_path / "x.yaml", "", ALIGN, source={"folder": str(tmp_path / "data")}), STAGES)
    assert f"{STAGE}.matrix.field config.conflict, got 'align'" in outline(caught.value)


def test_a_service_has_no_records(listing: Path, tmp_path: Path) -> None:
    serve = {"stages": ["decode", {"warp_affine": {**BY_POINTS, "size": 20}}]}
    with pytest.raises(ConfigError) as caught:
        read_config(face_config(tmp_path / "x.yaml", listing, ALIGN, serve=serve), STAGES)
    assert outline(caught.value).partition(": ")[2] == "serve.stages[1].warp_affine config.conflict"


def test_errors_in_views_name_the_view(listing: Path, tmp_path: Path) -> None:
    path = face_config(tmp_path / "x.yaml", listing, ALIGN)
    text = path.read_text().partition("pipelines:")[0]
    views = "{a: {stages: [{warp_affine: {matrix: {field: b}, size: 9}}]}}"
    path.write_text(f"{text}pipelines: {{train: {{views: {views}, batch: {{size: 4}}}}}}\n")
    with pytest.raises(ConfigError) as caught:
        read_config(path, STAGES)
    (problem,) = caught.value.problems
    assert problem.path == ("pipelines", "train", "views", "a", "stages", 0, "warp_affine", "matrix", "field")


# --- mixing ----------------------------------------------------------------------------------------------------------

MIXED = "pipelines: {train: {stages: [decode, center_crop: {size: 8}, normalize, cutmix, mixup]}}"


@pytest.mark.parametrize(
    "source",
    [
        "{listing: a.csv, fields: {image, label, boxes}}",
        "{tar: a.tar, fields: {image, label, boxes, name: {type: text}}}",
        "{listing: a.csv, fields: {image, label: {kind: classes}}}",
        "{listing: a.csv, fields: {image, label: {kind: vector}}}",
        "{hf: a, fields: {image}}",
        "{folder: a, fields: {image}}",
        "{coco: a.json, images: a}",
        "{coco: a.json, images: a, fields: {image, mask}}",
        "{mix: [{source: {coco: a.json, images: a}}, {source: {coco: b.json, images: b}}]}",
    ],
)
def test_samples_that_cannot_be_mixed_are_known_before_the_source_is_open(source: str) -> None:
    """As `gpuflow.load` says it of an open source, at the line of each mixing stage."""
    assert fault(f"source: {source}\n{MIXED}\n") == (
        "x.yaml:2: pipelines.train.stages[3].cutmix config.conflict\n"
        "x.yaml:2: pipelines.train.stages[4].mixup config.conflict"
    )


@pytest.mark.parametrize(
    "source",
    [
        "{folder: a}",
        "{listing: a.csv}",
        "{hf: a}",
        "{listing: a.csv, fields: {image, label}}",
        "{listing: a.csv, fields: {image, class: {type: label, kind: class}}}",
    ],
)
def test_samples_with_one_class_each_are_mixed(source: str) -> None:
    assert len(read(f"source: {source}\n{MIXED}\n").programs["train"].mixings) == 2
