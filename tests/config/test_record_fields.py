"""A pipeline whose stages take fields of records: what the file must say, and what has images alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gpuflow.config import read_config
from gpuflow.errors import ConfigError
from gpuflow.pipeline.stage import FromRecord
from gpuflow.stages import STAGES, WarpAffine
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
