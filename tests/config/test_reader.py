"""config: YAML to values, every error with its file, line, key, rule and value, all errors at once."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuflow.config import BatchSpec, Config, read_config
from gpuflow.errors import UNSET, ConfigError
from gpuflow.sources import source_spec
from gpuflow.stages import (
    STAGES,
    CenterCrop,
    Decode,
    Flip,
    Normalize,
    RandomResizedCrop,
    Resize,
    Torchvision,
)
from tests.config.files import FULL, SMALL, fault, problems, read, stages_of, with_block
from tests.texts import outline

ROOT = Path(__file__).parents[2]

MISSING = "config.missing_key"
CROP = ("pipelines", "a", "stages", 1, "center_crop")


# --- what is read ----------------------------------------------------------------------------------------------------


def test_a_whole_file() -> None:
    config = read(FULL)
    assert list(config.programs) == ["train", "val", "serve"]
    assert config.program("train").pipeline.stages == (
        Decode(),
        RandomResizedCrop(size=224),
        Flip(horizontal=0.5),
        Torchvision(name="RandomPosterize", parameters=(("bits", 2),)),
        Normalize(),
    )
    assert config.program("val").pipeline.stages == (Decode(), Resize(shorter=256), CenterCrop(size=224), Normalize())
    assert config.programs["serve"].pipeline.stages == config.program("val").pipeline.stages
    assert config.programs["serve"].pipeline.name == "serve"
    assert config.pipelines["train"].batch == BatchSpec(size=256, drop_last=True)
    assert (config.pipelines["train"].shuffle, config.pipelines["val"].shuffle) == (True, False)
    assert config.source == source_spec(folder="photos", split=(("train", 0.9), ("val", 0.1)), seed=3)
    assert (config.train.lr, config.train.epochs, config.train.model) == (1e-3, 3, "resnet18")
    assert config.serve is not None and config.serve.model is not None
    assert (config.serve.model.file, config.serve.model.engine, config.serve.model.batch) == ("model.onnx", "auto", 16)
    assert config.path == "x.yaml"


def test_defaults() -> None:
    config = read(SMALL)
    assert config.serve is None
    run, val = config.run, config.pipelines["val"]
    assert (run.threads, run.prefetch, run.on_error, run.max_bad, run.bad_file) == ("auto", 3, None, None, None)
    assert (run.timeout_s, run.memory_limit, run.deterministic) == (120.0, None, False)
    assert (val.batch.size, val.batch.drop_last, val.shuffle, val.on_error) == (64, False, False, None)


def test_values_are_frozen() -> None:
    config = read(SMALL)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.path = "y"  # type: ignore[misc]
    with pytest.raises(ValueError, match="frozen"):
        config.run.prefetch = 4


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.name)
def test_shipped_files(path: Path) -> None:
    config = read_config(path, STAGES)
    assert config.programs or config.views


def test_unknown_pipelines_are_named() -> None:
    config = read(FULL)
    for name in ("vla", "zzzz", "serve"):
        with pytest.raises(ConfigError) as caught:
            config.program(name)
        assert outline(caught.value) == "x.yaml: pipelines config.unknown_key"


@pytest.mark.parametrize(
    ("text", "override", "path", "value", "code"),
    [
        (with_block("zzz: 1"), "", ("zzz",), UNSET, "config.unknown_key"),
        (with_block("run: {threads: 0}"), "", ("run", "threads"), 0, "config.range"),
        (with_block("run: {on_error: x}"), "", ("run", "on_error"), "x", "config.range"),
        (with_block("run: {prefetch: x}"), "", ("run", "prefetch"), "x", "config.type"),
        (with_block("source: {tar: x, root: y}"), "", ("source", "root"), UNSET, "config.conflict"),
        (with_block("source: {tar: x, split: {a: 2}}"), "", ("source", "split", "a"), 2.0, "config.range"),
        (with_block("source: {tar: x, split: {valid: 1}}"), "", ("pipelines", "val"), UNSET, "config.conflict"),
        (FULL, "pipelines.val.split=vla", ("pipelines", "val", "split"), "vla", "config.range"),
        (stages_of("decode, resie"), "", ("pipelines", "a", "stages", 1, "resie"), UNSET, "stage.unknown"),
        (stages_of("decode, center_crop"), "", ("pipelines", "a", "stages", 1, "center_crop"), UNSET, MISSING),
        (stages_of("decode, center_crop: {size: 0}"), "", (*CROP, "size"), 0, "config.range"),
        (stages_of("decode"), "", ("pipelines", "a", "stages", 0, "decode"), UNSET, "stage.size"),
        (stages_of("center_crop: {size: 8}"), "", ("pipelines", "a", "stages", 0, "center_crop"), UNSET, "stage.order"),
        (FULL, "run.threads.x=3", ("run", "threads"), UNSET, "config.override"),
        (FULL, "run.threads=0", ("run", "threads"), 0, "config.range"),
        ("- a", "", (), ["a"], "config.type"),
        ("a: [", "", (), UNSET, "config.yaml"),
    ],
)
def test_problems_are_values(text: str, override: str, path: tuple[str | int, ...], value: object, code: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(text, *([override] if override else []))
    problem = next(problem for problem in caught.value.problems if problem.path == path)
    assert (problem.value, problem.code) == (value, code)


def test_the_source_is_checked_whatever_else_is_wrong() -> None:
    assert fault(with_block("source: {folder: x, root: y}") + "run: {threads: 0}\n").splitlines() == [
        "x.yaml:4: source.root config.conflict",
        "x.yaml:5: run.threads config.range, got 0",
    ]


def test_blocks_that_are_missing() -> None:
    assert fault("run: {}\n") == ("x.yaml: config.missing_key\nx.yaml: config.missing_key")


STAGES_4 = "stages: [{decode: {}}, {resize: {height: 4, width: 4}}]"
SERVE = f"serve: {{{STAGES_4}}}\n"
VAL = f"pipelines: {{val: {{{STAGES_4}, batch: {{size: 1}}}}}}\n"


@pytest.mark.parametrize("start", ["", "source: null\n", "run: {threads: 1}\n"])
def test_a_file_with_serve_alone(start: str) -> None:
    config = read(start + SERVE)
    assert (config.source_block, config.sources, config.pipelines, list(config.programs)) == (None, (), {}, ["serve"])
    for ask in (lambda: config.source, lambda: config.program("val"), lambda: config.any_program("train")):
        with pytest.raises(ConfigError) as caught:
            ask()
        assert outline(caught.value) == "x.yaml: config.missing_key"


@pytest.mark.parametrize(
    ("block", "missing"),
    [
        ("source: {folder: x}\n", ["pipelines"]),
        (VAL, ["source"]),
        (f"source: null\n{VAL}", ["source"]),
        ("serve: null\n", ["source", "pipelines"]),
    ],
)
def test_source_and_pipelines_belong_together(block: str, missing: list[str]) -> None:
    text = block if "serve" in block else block + SERVE
    assert fault(text).splitlines() == ["x.yaml: config.missing_key"] * len(missing)
    assert all(repr(key) in problem.rule for key, problem in zip(missing, problems(text), strict=True))


def test_three_ways_to_share_a_source() -> None:
    assert read(with_block("source: {folder: a, split: {train: 0.7, val: 0.1, test: 0.2}}")).source.split == (
        ("train", 0.7),
        ("val", 0.1),
        ("test", 0.2),
    )


@pytest.mark.parametrize("name", ["my pipeline", "a[7]", "", "größe", "a.b"])
def test_faults_are_placed_whatever_the_pipelines_name(name: str) -> None:
    text = f"source: {{folder: x}}\npipelines:\n  '{name}':\n    stages:\n      - decode\n      - normalize\n"
    assert fault(text).startswith(f"x.yaml:6: pipelines.{name}.stages[1].normalize stage.size")


@pytest.mark.parametrize(
    ("block", "parts"),
    [
        ("source: {folder: a, split: {train: 0.7, val: 0.1, test: 0.2}}", {"val": "val"}),
        ("source: {folder: a}", {"val": None}),
        ("source: {folder: a}\npipelines: {x: {split: all, stages: [decode, center_crop: {size: 8}]}}", {"x": None}),
        (
            "source: {folder: a, split: {train: 0.8, valid: 0.2}}\npipelines:\n"
            "  train: {stages: &s [decode, center_crop: {size: 8}]}\n"
            "  val: {split: valid, stages: *s}\n  every: {split: all, stages: *s}\nserve: {stages: *s}",
            {"train": "train", "val": "valid", "every": None, "serve": None},
        ),
    ],
)
def test_the_part_that_a_pipeline_reads(block: str, parts: dict[str, str | None]) -> None:
    config = read(block if "pipelines" in block else with_block(block))
    assert {name: config.split_of(name) for name in config.programs} == parts


@pytest.mark.parametrize("parts", ["train: 0.8, valid: 0.2", "x: 1"])
def test_a_pipeline_that_reads_no_part_of_a_split_source(parts: str) -> None:
    """It would read every sample, those of the other parts included."""
    text = with_block(f"source: {{folder: a, split: {{{parts}}}}}")
    assert fault(text) == "x.yaml:2: pipelines.val config.conflict"


@pytest.mark.parametrize(
    ("run", "own", "expected"),
    [
        ("", "", {"train": "replace", "val": "skip"}),
        ("raise", "", {"train": "raise", "val": "raise"}),
        ("replace", "", {"train": "replace", "val": "replace"}),
        ("raise", "skip", {"train": "skip", "val": "skip"}),
        ("", "raise", {"train": "raise", "val": "raise"}),
    ],
)
def test_a_pipelines_own_policy_then_that_of_run_then_the_default(run: str, own: str, expected: dict[str, str]) -> None:
    overrides = [f"pipelines.{name}.on_error={own}" for name in expected if own]
    config = read(FULL, *overrides, *([f"run.on_error={run}"] if run else []))
    assert {name: config.on_error_of(name)[0] for name in config.pipelines} == expected


@pytest.mark.parametrize("name", ["train", "val", "test", "predict", "x"])
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("source", ["folder: a", "folder: a, weights: {file: w.txt}"])
def test_the_default_policy_depends_on_the_order_and_not_on_the_name(
    name: str, shuffle: bool, drop_last: bool, source: str
) -> None:
    batch = f"{{size: 4, drop_last: {str(drop_last).lower()}}}"
    stages = "[decode, {resize: {height: 8, width: 8}}]"
    pipeline = f"{{stages: {stages}, shuffle: {str(shuffle).lower()}, batch: {batch}}}"
    config = read(f"source: {{{source}}}\npipelines: {{{name}: {pipeline}}}\n")
    assert config.on_error_of(name)[0] == ("replace" if shuffle or drop_last else "skip")


def test_random_stages_do_not_serve() -> None:
    text = FULL.replace("serve:\n  stages: *eval", "serve:\n  stages: [decode, random_resized_crop: {size: 8}]")
    assert fault(text) == ("x.yaml:19: serve.stages[1].random_resized_crop stage.random")


def test_a_shared_fault_is_told_for_each_place_that_shares_it() -> None:
    assert fault(FULL.replace("shorter: 256", "shorter: 0")) == (
        "x.yaml:4: pipelines.val.stages[1].resize.shorter config.range, got 0\n"
        "x.yaml:4: serve.stages[1].resize.shorter config.range, got 0"
    )


def test_all_faults_at_once_in_the_order_of_lines() -> None:
    text = """\
run: {threads: 0}
pipelines:
  b:
    stages:
      - decode: {color: pink, max_pixels: 0}
      - resie: {}
  a:
    stages:
      - decode
      - resize: {shorter: 8,
                 interpolation: cubic}
      - flip: {horizontal: 3, vertical: -1}
    batch: {size: 0}
source:
  folder: x
  seed: -1
trian: {}
"""
    assert fault(text) == "\n".join(
        [
            "x.yaml:1: run.threads config.range, got 0",
            "x.yaml:5: pipelines.b.stages[0].decode.color config.type, got 'pink'",
            "x.yaml:6: pipelines.b.stages[1].resie stage.unknown",
            "x.yaml:11: pipelines.a.stages[1].resize.interpolation config.type, got 'cubic'",
            "x.yaml:12: pipelines.a.stages[2].flip.horizontal config.range, got 3",
            "x.yaml:12: pipelines.a.stages[2].flip.vertical config.range, got -1",
            "x.yaml:13: pipelines.a.batch.size config.range, got 0",
            "x.yaml:16: source.seed config.range, got -1",
            "x.yaml:17: trian config.unknown_key",
        ]
    )


# --- anything at all -------------------------------------------------------------------------------------------------

KEYS = [
    *("source", "pipelines", "run", "serve", "train", "preprocess", "stages", "batch", "size", "global", "folder"),
    *("split", "threads", "model", "file", "decode", "resize", "torchvision", "name", "shorter", "mean", "classes"),
]
scalars = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.sampled_from(KEYS), st.text(max_size=5), st.dates()
)
keys = st.one_of(st.sampled_from(KEYS), st.text(max_size=3), st.integers(0, 3), st.booleans(), st.none())
anything = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(keys, inner, max_size=4)),
    max_leaves=12,
)
documents = st.fixed_dictionaries(
    {},
    optional={
        "source": st.one_of(st.just({"folder": "x"}), anything),
        "pipelines": st.one_of(
            anything,
            st.dictionaries(
                keys, st.fixed_dictionaries({"stages": st.lists(st.dictionaries(keys, anything, max_size=2))})
            ),
        ),
        "run": anything,
        "serve": st.one_of(anything, st.fixed_dictionaries({"stages": st.lists(anything, max_size=3)})),
        "train": anything,
        "zzz": anything,
    },
)


@settings(max_examples=250)
@given(
    documents, st.lists(st.tuples(st.lists(st.sampled_from([*KEYS, "0", "1", ""]), min_size=1), scalars), max_size=2)
)
def test_any_document_is_read_or_refused_with_places(document: Any, overrides: list[tuple[list[str], Any]]) -> None:
    try:
        text = yaml.safe_dump(document)
    except yaml.YAMLError:
        return
    given_overrides = [f"{'.'.join(at)}={'' if isinstance(v, float) and math.isnan(v) else v}" for at, v in overrides]
    try:
        config = read(text, *given_overrides)
    except ConfigError as error:
        for problem in error.problems:
            assert problem.place.startswith(("x.yaml:", "override "))
            assert problem.rule
    else:
        assert config.programs


CARRYING = """\
source: {listing: list.jsonl, fields: {image: , boxes: {labels: classes}, caption: {type: text}}}
pipelines:
  train:
    targets: {min_area: 4, min_visibility: 0.25}
    stages:
      - decode
      - random_resized_crop: {size: 8}
      - torchvision: {name: RandomInvert}
serve: {stages: [decode, center_crop: {size: 8}, torchvision: {name: CenterCrop, size: 4}]}
"""


def test_stages_that_cannot_carry_a_field_are_located() -> None:
    rules = read(CARRYING).pipelines["train"].targets.rules
    assert (rules.min_area, rules.min_visibility) == (4.0, 0.25)
    turning = CARRYING.replace("{name: RandomInvert}", "{name: RandomRotation, degrees: 9}")
    assert fault(turning) == ("x.yaml:8: pipelines.train.stages[2].torchvision stage.order")
    assert read(turning.replace("boxes: {labels: classes}, ", "")).programs


@pytest.mark.parametrize("rule", ["min_area: -1", "min_visibility: 1.5"])
def test_rules_for_boxes_have_bounds(rule: str) -> None:
    key = rule.partition(":")[0]
    text = CARRYING.replace("{min_area: 4", f"{{{rule}", 1).replace(", min_visibility: 0.25", "")
    assert f"pipelines.train.targets.{key} config.range" in fault(text)


def test_arguments_of_other_types_are_named() -> None:
    with pytest.raises(TypeError, match=r"^path must be that of a YAML file, got \{'source': 1\}$"):
        read_config({"source": 1}, STAGES)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^overrides must be a list such as \['run.threads=8'\], got a text$"):
        read_config("x.yaml", STAGES, "run.threads=8")
    with pytest.raises(TypeError, match=r"^overrides\[1\] must be a text such as 'run.threads=8', got 3$"):
        read_config("x.yaml", STAGES, ["run.threads=8", 3])  # type: ignore[list-item]


# --- train.size -------------------------------------------------------------------------------------------------------


def sizes(config: Config, name: str) -> list[object]:
    return [stage.size for stage in config.programs[name].pipeline.stages if hasattr(stage, "size")]


def test_train_size_is_the_size_of_every_stage_that_has_one() -> None:
    """Also of those of `serve` that val shares with it."""
    config = read(FULL, "train.size=32")
    assert [sizes(config, name) for name in ("train", "val", "serve")] == [[32], [32], [32]]
    own = "serve.stages=[decode, {resize: {shorter: 64}}, {center_crop: {size: 48}}, normalize]"
    assert sizes(read(FULL, own, "train.size=32"), "serve") == [48]


def test_train_size_holds_for_overridden_lists_too() -> None:
    stages = (
        "pipelines.train.stages=[decode, {warp_affine: {matrix: [[1, 0, 0], [0, 1, 0]]}}, {center_crop: {size: 8}}]"
    )
    assert sizes(read(FULL, "train.size=16", stages), "train") == [None, 16], "a warp without a size keeps the image's"


@pytest.mark.parametrize("size", ["big", "true", "0"])
def test_a_train_size_that_is_none_is_one_fault(size: str) -> None:
    (problem,) = problems(FULL, f"train.size={size}")
    assert problem.place == f"override 'train.size={size}':" and problem.path == ("train", "size")


# --- texts ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["a\\0b", "a\\ud800b"])
def test_a_text_that_cannot_name_a_file_is_located(text: str) -> None:
    assert fault(with_block(f'source: {{folder: "{text}"}}')).startswith("x.yaml:4: source.folder config.type, got ")


def test_a_name_whose_bytes_are_no_text_is_taken() -> None:
    assert read(with_block(r'source: {folder: "caf\udce9"}')).source.where == "caf\udce9"


MANY = {
    "": "key{i}: 1",
    "source": "key{i}: 1",
    "run": "key{i}: 1",
    "pipelines": "p{i}: {{stagse: 1}}",
    "pipelines.val": "key{i}: 1",
    "pipelines.val.batch": "key{i}: 1",
    "source.fields": "f{i}: {{tpye: number}}",
    "source.mix": "- {{sorce: 1}}",
    "pipelines.val.views": "v{i}: {{stagse: 1}}",
    "pipelines.val.stages": "- random_stage{i}",
    "pipelines.val.stages[0].decode": "key{i}: 1",
    "preprocess": '- "\\0"',
}
"""An entry that is at fault, by the block that many of them stand in."""


@pytest.mark.parametrize("block", MANY)
def test_of_very_many_faults_the_first_hundred_are_listed(block: str) -> None:
    """To look for what each unknown name means takes time."""
    lines = [] if block.startswith("source") or not block else ["source: {folder: photos}"]
    indent = ""
    for key in block.split(".") if block else ():
        name, entry, _ = key.partition("[0]")
        lines.append(f"{indent}{name}:")
        lines += ["  folder: photos"] if block == "source.fields" and name == "source" else []
        indent += "    - " if entry else "  "
    indent = indent.replace("-", " ")
    text = "\n".join([*lines, *(indent + MANY[block].format(i=i) for i in range(1_000))]) + "\n"
    with pytest.raises(ConfigError) as caught:
        read(text)
    *listed, last = caught.value.problems
    assert len(listed) == 100
    assert outline(ConfigError([last])) == "x.yaml: config.rule"


def test_a_long_key_is_cut_in_an_error() -> None:
    assert fault(SMALL + f"? {'k' * 100_000}\n: 1\n") == (
        "x.yaml:5: kkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkk... config.unknown_key"
    )
