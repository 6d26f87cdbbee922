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
            f"{STAGE}.matrix.field must name a field of source.fields, got 'alin'; did you mean 'align'?",
        ),
        (
            {"matrix": {"field": "map"}},
            FIELDS,
            f"{STAGE}.matrix.field must name a field of source.fields, got 'map'; declare it there: map: {{type: any}}",
        ),
        (
            ALIGN,
            {"label": None, "align": {"type": "keypoints", "column": "points"}},
            f"{STAGE}.matrix.field must name a field of type any, got align, which is of type keypoints; "
            "name another field",
        ),
        (
            BY_POINTS,
            {"landmarks": {"type": "boxes", "column": "boxes"}},
            f"{STAGE}.source.field must name a field of type any or keypoints, got landmarks, which is of type boxes; "
            "name another field",
        ),
        (
            {"matrix": {"fields": "align"}},
            FIELDS,
            f"{STAGE}.matrix.fields is not a key here; did you mean 'field'?",
        ),
        ({"matrix": {}}, FIELDS, f"{STAGE}.matrix needs the key 'field': the name of a field in source.fields"),
        ({"matrix": {"field": 3}}, FIELDS, f"{STAGE}.matrix.field must be text, got 3"),
        (
            {"matrix": [[1, 2], [3, 4]]},
            FIELDS,
            f"{STAGE}.matrix must be [[a number, a number, a number], [a number, a number, a number]] or "
            "{field: NAME}, got [[1, 2], [3, 4]]",
        ),
        (
            {**ALIGN, **BY_POINTS},
            FIELDS,
            f"{STAGE} needs a matrix, or source and target; give one of these",
        ),
    ],
    ids=["typo", "undeclared", "matrix type", "points type", "key", "no key", "no text", "numbers", "both"],
)
def test_errors(listing: Path, tmp_path: Path, warp: Any, fields: Any, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_config(face_config(tmp_path / "x.yaml", listing, warp, fields=fields), STAGES)
    texts = [str(problem) for problem in caught.value.problems]
    assert text in [one.partition(": ")[2] for one in texts]
    assert all(one.startswith(f"{tmp_path / 'x.yaml'}:") for one in texts)


def test_a_folder_declares_no_fields(tmp_path: Path) -> None:
    make_photos(tmp_path / "data")
    with pytest.raises(ConfigError, match=r"must name a field of source\.fields, got 'align'; declare it there"):
        read_config(face_config(tmp_path / "x.yaml", "", ALIGN, source={"folder": str(tmp_path / "data")}), STAGES)


def test_a_service_has_no_records(listing: Path, tmp_path: Path) -> None:
    serve = {"stages": ["decode", {"warp_affine": {**BY_POINTS, "size": 20}}]}
    with pytest.raises(ConfigError) as caught:
        read_config(face_config(tmp_path / "x.yaml", listing, ALIGN, serve=serve), STAGES)
    (problem,) = caught.value.problems
    assert str(problem).partition(": ")[2] == (
        "serve.stages[1].warp_affine takes source from a sample's record, which no request has; give numbers in place "
        "of the field, or remove the stage"
    )


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
OTHERS = "mixes images and labels, but samples also have {}; remove the stage or these fields"
NO_CLASS = "mixes labels, but the samples do not have one class each; remove the stage or declare a class"


@pytest.mark.parametrize(
    ("source", "rule"),
    [
        ("{listing: a.csv, fields: {image, label, boxes}}", OTHERS.format("boxes")),
        ("{tar: a.tar, fields: {image, label, boxes, name: {type: text}}}", OTHERS.format("boxes, name")),
        ("{listing: a.csv, fields: {image, label: {kind: classes}}}", NO_CLASS),
        ("{listing: a.csv, fields: {image, label: {kind: vector}}}", NO_CLASS),
        ("{hf: a, fields: {image}}", NO_CLASS),
        ("{folder: a, fields: {image}}", NO_CLASS),
        ("{coco: a.json, images: a}", OTHERS.format("boxes")),
        ("{coco: a.json, images: a, fields: {image, mask}}", OTHERS.format("mask")),
        ("{mix: [{source: {coco: a.json, images: a}}, {source: {coco: b.json, images: b}}]}", OTHERS.format("boxes")),
    ],
)
def test_samples_that_cannot_be_mixed_are_known_before_the_source_is_open(source: str, rule: str) -> None:
    """As `gpuflow.load` says it of an open source, at the line of each mixing stage."""
    at = "x.yaml:2: pipelines.train.stages"
    assert fault(f"source: {source}\n{MIXED}\n") == f"{at}[3].cutmix {rule}\n{at}[4].mixup {rule}"


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
