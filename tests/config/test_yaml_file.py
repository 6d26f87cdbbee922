"""yaml_file: text to data, safely, with the line of each fault."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuflow.config import BatchSpec, read_config
from gpuflow.errors import ConfigError
from gpuflow.stages import STAGES
from tests.config.files import SMALL, fault, problems, read, with_block
from tests.datasets import deadline
from tests.texts import outline, pin

# --- files that are none ---------------------------------------------------------------------------------------------


def test_a_missing_file(here: Path) -> None:
    Path(".photos.yaml").write_text(SMALL)  # a hidden file, such as those of tools, is not what was meant
    with pytest.raises(ConfigError) as caught:
        read_config("photos.yaml", STAGES)
    assert outline(caught.value) == "photos.yaml: config.file"
    Path("photo.yaml").write_text(SMALL)
    with pytest.raises(ConfigError) as caught:
        read_config("photos.yaml", STAGES)
    assert outline(caught.value) == "photos.yaml: config.file"
    with pytest.raises(ConfigError) as caught:
        read_config(here, STAGES)
    assert outline(caught.value) == f"{here}: config.file"
    Path("latin.yaml").write_bytes(b"source: {folder: gr\xf6\xdfe}\n")
    with pytest.raises(ConfigError) as caught:
        read_config("latin.yaml", STAGES)
    assert outline(caught.value) == "latin.yaml: config.file"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "x.yaml: config.type"),
        ("# nothing\n", "x.yaml: config.type"),
        ("null\n", "x.yaml: config.type, got null"),
        ("- source\n", "x.yaml: config.type, got ['source']"),
        ("photos", "x.yaml: config.type, got 'photos'"),
        ("a: 1\nb: c: d\n", "x.yaml:2: config.yaml"),
        ("a: [1, 2\nb: 3\n", "x.yaml:2: config.yaml"),
        ("a:\n  - 1\n   - 2\n- 3\n", "x.yaml:4: config.yaml"),
        ("a: {\n", "x.yaml:2: config.yaml"),
        ("a: 'b\n", "x.yaml:2: config.yaml"),
        ("a: *b\n", "x.yaml:1: config.yaml"),
        ("a: 1\n---\nb: 2\n", "x.yaml:2: config.yaml"),
        ("a: 1\n\tb: 2\n", "x.yaml:2: config.yaml"),
        ("[a, b]: 1\n", "x.yaml:1: config.yaml"),
        ("run: {}\nsource: {}\nrun: {}\n", "x.yaml:3: config.yaml"),
        ("run: {prefetch: 3,\n  prefetch: 4}\n", "x.yaml:2: config.yaml"),
        ("a: !!python/object/apply:os.system ['true']\n", "x.yaml:1: config.yaml"),
        ("a: !!python/name:os.system\n", "x.yaml:1: config.yaml"),
        ("a: !stage {}\n", "x.yaml:1: config.yaml"),
        ("a: 1\nb: 2020-99-99\n", "x.yaml:2: config.yaml"),
        ("a: 1\nb: \a\n", "x.yaml:2: config.yaml"),
        ("a: &a [*a]\n", "x.yaml: config.yaml"),
        ("a: &a {b: *a}\n", "x.yaml: config.yaml"),
        ("a: " + "[" * 3000, "x.yaml: config.yaml"),
    ],
)
def test_files_that_are_no_yaml_or_no_mapping(text: str, expected: str) -> None:
    assert fault(text) == expected


@pytest.mark.parametrize("value", ["!!int ''", "!!int [1]", "!!float ''", "!!bool maybe", "!!timestamp soon"])
def test_a_tag_that_does_not_fit_its_value_is_located(value: str) -> None:
    tag = value.split()[0]
    override = f"source.seed={value}"
    assert fault(f"a: 1\nb: {value}\n") == "x.yaml:2: config.yaml"
    assert fault(SMALL, override) == f"override {override!r}: config.yaml"
    assert tag in problems(SMALL, override)[0].rule


def test_a_tag_runs_nothing(here: Path) -> None:
    fault(f"a: !!python/object/apply:os.mkdir ['{here}/made']\n")
    assert not (here / "made").exists()


@pytest.mark.parametrize("number", ["1e-3", "1E-3", "1.0e-3", "+1e-3", "0.001", "1_0e-4"])
def test_a_number_may_be_written_as_python_does(number: str) -> None:
    assert read(with_block(f"train: {{lr: {number}}}")).train.lr == pytest.approx(1e-3)


@pytest.mark.parametrize(
    ("number", "base"), [("010", 8), ("-007", 8), ("1:30", 60), ("1:30.5", 60), (":".join(["59"] * 3000), 60)]
)
def test_numbers_that_yaml_reads_in_another_base_are_refused(number: str, base: int) -> None:
    """A label 007 would be 7, and 008 text; a seed 1:30 would be 90."""
    text = with_block(f"train: {{epochs: {number}}}")
    assert fault(text) == "x.yaml:5: config.yaml"
    (problem,) = problems(text)
    assert str(base) in problem.rule and len(str(problem)) < 250
    assert read(with_block("train: {epochs: 0x1f, lr: 0.5}")).train.epochs == 31


def test_yaml_merges() -> None:
    base = "base: &base {shorter: 9, antialias: false}\n"
    text = SMALL.replace("[decode,", "[decode, resize: {<<: *base, shorter: 12},")
    assert fault(base + text) == "x.yaml:1: base config.unknown_key"
    text = SMALL.replace("val:", "a:\n    batch: &b {size: 8}\n    stages: [decode, center_crop: {size: 4}]\n  val:")
    config = read(text + "    batch: {<<: *b, drop_last: true}\n")
    assert config.pipelines["val"].batch == BatchSpec(size=8, drop_last=True)
    nested = (
        "source: {folder: photos}\n"
        "preprocess: {x: {one: &one {size: 8}, two: &two {<<: *one, size: 9}}}\n"
        "pipelines: {a: {stages: [decode, center_crop: {size: 4}], batch: {<<: *two}}}\n"
    )
    assert read(nested).pipelines["a"].batch.size == 9


def _bomb(entry: str, levels: int = 12) -> str:
    """A block `preprocess` on line 1 in which each level holds the one before ten times: ten to the `levels` values."""
    lines = ["preprocess:", "  a0: &a0 {x: 1}", *(entry.format(n=n, before=n - 1) for n in range(1, levels))]
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize(
    "entry",
    [
        "  a{n}: &a{n} [" + ", ".join(["*a{before}"] * 10) + "]",
        "  a{n}: &a{n} {{" + ", ".join(f"k{i}: *a{{before}}" for i in range(10)) + "}}",
        "  a{n}: &a{n} {{<<: [" + ", ".join(["*a{before}"] * 10) + "]}}",
    ],
    ids=["lists", "mappings", "merges"],
)
def test_aliases_that_multiply_are_refused_at_once(entry: str) -> None:
    with deadline(30), pytest.raises(ConfigError) as caught:
        read(_bomb(entry) + SMALL)
    (problem,) = caught.value.problems
    line = int(problem.place.removeprefix("x.yaml:").removesuffix(":"))
    assert 5 <= line <= 8, "the level that passes the limit"
    assert problem.code == "config.yaml" and pin(ConfigError([replace(problem, place="")]))
    override = f"run={{{_bomb(entry).replace(chr(10), ',')[12:-1]}}}"
    with deadline(30):
        (problem,) = problems(SMALL, override)
    assert problem.code == "config.yaml" and "100,000" in problem.rule


def test_a_file_of_very_many_keys_is_refused_while_it_is_parsed() -> None:
    with deadline(30):
        text = fault(SMALL + "".join(f"key_{i}: 1\n" for i in range(60_000)))
    assert text == "x.yaml:9998: config.yaml"


def test_a_long_file_and_a_few_aliases_of_it_are_read() -> None:
    names = ", ".join(f"class_{i}" for i in range(22_000))
    source = f"preprocess: [&classes [{names}], *classes, *classes]\nsource: {{listing: x.csv, classes: *classes}}\n"
    config = read(source + SMALL.partition("\n")[2])
    assert isinstance(config.source.classes, tuple)
    assert len(config.source.classes) == 22_000


def test_text_in_any_alphabet_and_line_end() -> None:
    config = read(SMALL.replace("photos", "Fotos/größe/写真").replace("\n", "\r\n"))
    assert config.source.where == "Fotos/größe/写真"


@settings(max_examples=150)
@given(st.text(alphabet="ab: {}[]\n-&*!'\"|>#,<0e.~?%@=", max_size=40))
def test_any_text_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        read(text)
    with pytest.raises(ConfigError):
        read(SMALL + "zzz: 1\n", text)
