"""schema: what editors complete and check is what gpuflow reads."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import pytest
import yaml
from jsonschema import Draft202012Validator
from typer.testing import CliRunner

from gpuflow.cli import app
from gpuflow.config.schema import docstring_of, json_schema
from gpuflow.pipeline.stage import Bounds, Pointwise
from gpuflow.stages import STAGES
from tests.config.files import FULL, SMALL

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
COMMITTED = ROOT / "configs" / "gpuflow.schema.json"
CACHED = SMALL.replace("photos", "'s3://photos', cache: {dir: cache, size: 200 GB}")
SCHEMA = json_schema(STAGES)
VALIDATOR = Draft202012Validator(SCHEMA)


def test_the_committed_schema_is_the_one_that_the_command_prints() -> None:
    printed = CliRunner().invoke(app, ["schema"])
    assert printed.exit_code == 0
    assert COMMITTED.read_text(encoding="utf-8") == printed.stdout, "run: gpuflow schema > configs/gpuflow.schema.json"
    assert json.loads(printed.stdout) == SCHEMA


def test_it_is_a_schema() -> None:
    assert SCHEMA["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    Draft202012Validator.check_schema(SCHEMA)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_each_config_names_the_schema_and_fits_it(path: Path) -> None:
    first = path.read_text(encoding="utf-8").splitlines()[0]
    start, _, name = first.partition("$schema=")
    assert start == "# yaml-language-server: "
    assert (path.parent / name).resolve() == COMMITTED
    VALIDATOR.validate(yaml.safe_load(path.read_text(encoding="utf-8")))


def mappings(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every mapping with fixed keys: not of names of pipelines, splits and fields, nor in `preprocess`."""
    if isinstance(value, dict):
        if at != ("pipelines",) and at[-1:] not in (("split",), ("fields",)):
            yield at
        for key, item in value.items():
            if key != "preprocess":
                yield from mappings(item, (*at, key))
    elif isinstance(value, list):
        for i, item in enumerate(value):
            yield from mappings(item, (*at, i))


def numbers(schema: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """The schema of each number in a schema, with the keys that lead to it."""
    if isinstance(schema, dict):
        if schema.get("type") in ("integer", "number"):
            yield at, schema
        for key, item in schema.items():
            yield from numbers(item, (*at, key))
    elif isinstance(schema, list):
        for i, item in enumerate(schema):
            yield from numbers(item, (*at, i))


@pytest.mark.parametrize("name", STAGES)
def test_each_number_of_a_stage_has_a_smallest_and_a_largest_value(name: str) -> None:
    for at, found in numbers(SCHEMA["$defs"][f"stage.{name}"]):
        assert "maximum" in found and ("minimum" in found or "exclusiveMinimum" in found), at


MISSPELT: tuple[Callable[[dict[str, Any]], None], ...] = (
    lambda held: held.update(zzz=1),
    lambda held: held.update({f"{next(iter(held), 'x')}x": 1}),
)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_a_misspelt_key_does_not_fit(path: Path) -> None:
    document = json.loads(json.dumps(yaml.safe_load(path.read_text(encoding="utf-8"))))
    places = list(mappings(document))
    assert len(places) > (15 if "pipelines" in document else 5)
    for at in places:
        for misspell in MISSPELT:
            wrong = copy.deepcopy(document)
            held = wrong
            for key in at:
                held = held[key]
            misspell(held)
            assert not VALIDATOR.is_valid(wrong), f"{at} takes an unknown key"


@pytest.mark.parametrize(
    "text", [FULL, SMALL, SMALL + "run: {memory_limit: 2 GiB, max_bad: 0.5}\nserve: null\n", CACHED]
)
def test_what_gpuflow_reads_fits(text: str) -> None:
    VALIDATOR.validate(yaml.safe_load(text.replace("1e-3", "0.001")))


@pytest.mark.parametrize(
    "block",
    [
        "run: {threads: 0}",
        "run: {threads: many}",
        "run: {timeout_s: 0}",
        "run: {max_bad: 1.5}",
        "run: {memory_limit: [1]}",
        "run: {on_error: skp}",
        "train: {epochs: 1.5}",
        "source: {folder: x, seed: -1}",
        "source: {folder: x, cache: {dir: y}}",
        "source: {folder: x, cache: {dir: y, size: big}}",
        "source: {folder: x, split: {a: 2}}",
        "source: {listing: x, classes: 0}",
        "pipelines: {a: {}}",
        "pipelines: {a: {stages: [decod]}}",
        "pipelines: {a: {stages: [center_crop]}}",
        "pipelines: {a: {stages: [center_crop: {}]}}",
        "pipelines: {a: {stages: [center_crop: {size: [1, 2, 3]}]}}",
        "pipelines: {a: {stages: [center_crop: {size: [1, 0]}]}}",
        "pipelines: {a: {stages: [decode: {color: pink}]}}",
        "pipelines: {a: {stages: [decode: {cpu_share: 1.1}]}}",
        "pipelines: {a: {stages: [flip: {horizontal: 2}]}}",
        "pipelines: {a: {stages: [color_jitter: {hue: 0.6}]}}",
        "pipelines: {a: {stages: [{decode: {}, flip: {}}]}}",
        "pipelines: {a: {stages: [{}]}}",
        "pipelines: {a: {stages: [torchvision: {bits: 2}]}}",
        "serve: {stages: [decode], model: {}}",
        "serve: {stages: [decode], model: {file: x, batch: 0}}",
    ],
)
def test_wrong_values_do_not_fit(block: str) -> None:
    document = yaml.safe_load(SMALL)
    assert VALIDATOR.is_valid(document)
    assert not VALIDATOR.is_valid(document | yaml.safe_load(block))


def test_every_key_is_described_in_words() -> None:
    for name, definition in {"": SCHEMA, **SCHEMA["$defs"]}.items():
        if name == "stages":
            continue
        assert definition["description"], name
        for key, value in definition.get("properties", {}).items():
            text = value.get("description", "")
            assert text[-1:] == "." and text[0] in "`[" + text[0].upper(), f"{name}.{key}: {text!r}"


@dataclass(frozen=True, kw_only=True, repr=False)
class Reduce(Pointwise):
    """Keep the highest bits.

    Longer words about it.

    Args:
        bits: how many
            are kept.
        mode: what for.
    """

    stage_name: ClassVar[str] = "reduce"

    bits: Annotated[int, Bounds(least=1, most=8)]
    mode: Literal["fast", "exact"] = "fast"
    weights: tuple[float, ...] | None = None
    secret: object = object()


def test_a_stage_of_another_package_is_in_it() -> None:
    found = json_schema({**STAGES, "reduce": Reduce})
    assert found["$defs"]["stage.reduce"] == {
        "type": "object",
        "description": "Keep the highest bits.",
        "properties": {
            "bits": {"description": "How many are kept.", "type": "integer", "minimum": 1, "maximum": 8},
            "mode": {"description": "What for.", "enum": ["fast", "exact"], "default": "fast"},
            "weights": {
                "anyOf": [{"type": "array", "items": {"type": "number"}}, {"type": "null"}],
                "default": None,
            },
            "secret": {},  # neither its type nor its default can stand in a YAML file
        },
        "required": ["bits"],
        "additionalProperties": False,
    }
    document = yaml.safe_load(SMALL)
    document["pipelines"]["val"]["stages"].append({"reduce": {"bits": 3}})
    assert Draft202012Validator(found).is_valid(document)
    assert not VALIDATOR.is_valid(document)


def test_docstrings() -> None:
    assert docstring_of(Reduce) == ("Keep the highest bits.", {"bits": "How many are kept.", "mode": "What for."})

    class Bare:
        pass

    assert docstring_of(Bare)[1] == {}
