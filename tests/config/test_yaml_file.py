"""yaml_file: text to data, safely, with the line of each fault."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuflow.config import BatchSpec, read_config
from gpuflow.errors import ConfigError
from gpuflow.stages import STAGES
from tests.config.files import SMALL, fault, read, with_block
from tests.datasets import deadline

# --- files that are none ---------------------------------------------------------------------------------------------


def test_a_missing_file(here: Path) -> None:
    Path(".photos.yaml").write_text(SMALL)  # a hidden file, such as those of tools, is not what was meant
    with pytest.raises(ConfigError) as caught:
        read_config("photos.yaml", STAGES)
    assert str(caught.value) == "photos.yaml: no such file; give the path of a YAML file"
    Path("photo.yaml").write_text(SMALL)
    with pytest.raises(ConfigError) as caught:
        read_config("photos.yaml", STAGES)
    assert str(caught.value) == "photos.yaml: no such file; did you mean 'photo.yaml'?"
    with pytest.raises(ConfigError) as caught:
        read_config(here, STAGES)
    assert str(caught.value) == f"{here}: is a directory; name a file in it, such as {here}/photo.yaml"
    Path("latin.yaml").write_bytes(b"source: {folder: gr\xf6\xdfe}\n")
    with pytest.raises(ConfigError) as caught:
        read_config("latin.yaml", STAGES)
    assert str(caught.value).startswith("latin.yaml: is not UTF-8 text: 'utf-8' codec can't decode byte")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "x.yaml: is empty; write a mapping with source and pipelines"),
        ("# nothing\n", "x.yaml: is empty; write a mapping with source and pipelines"),
        ("null\n", "x.yaml: must be a mapping with source and pipelines, got null"),
        ("- source\n", "x.yaml: must be a mapping with source and pipelines, got ['source']"),
        ("photos", "x.yaml: must be a mapping with source and pipelines, got 'photos'"),
        (
            "a: 1\nb: c: d\n",
            "x.yaml:2: is not valid YAML: mapping values are not allowed here; begin a new line for the second key, or "
            "put the text in quotes",
        ),
        (
            "a: [1, 2\nb: 3\n",
            "x.yaml:2: is not valid YAML: expected ',' or ']', but got ':'; close the bracket that opens on line 1",
        ),
        (
            "a:\n  - 1\n   - 2\n- 3\n",
            "x.yaml:4: is not valid YAML: expected <block end>, but found '-'; indent it as its neighbours in the "
            "block that begins on line 1",
        ),
        ("a: {\n", "x.yaml:2: is not valid YAML: expected the node content, but found '<stream end>'"),
        ("a: 'b\n", "x.yaml:2: is not valid YAML: found unexpected end of stream"),
        ("a: *b\n", "x.yaml:1: is not valid YAML: found undefined alias 'b'"),
        ("a: 1\n---\nb: 2\n", "x.yaml:2: is not valid YAML: but found another document"),
        (
            "a: 1\n\tb: 2\n",
            "x.yaml:2: is not valid YAML: found character '\\t' that cannot start any token; indent by spaces, not by "
            "tabs",
        ),
        ("[a, b]: 1\n", "x.yaml:1: is not valid YAML: found unhashable key"),
        (
            "run: {}\nsource: {}\nrun: {}\n",
            "x.yaml:3: is not valid YAML: key 'run' stands twice, first on line 1; keep one",
        ),
        (
            "run: {prefetch: 3,\n  prefetch: 4}\n",
            "x.yaml:2: is not valid YAML: key 'prefetch' stands twice, first on line 1; keep one",
        ),
        (
            "a: !!python/object/apply:os.system ['true']\n",
            "x.yaml:1: is not valid YAML: could not determine a constructor for the tag "
            "'tag:yaml.org,2002:python/object/apply:os.system'",
        ),
        (
            "a: !!python/name:os.system\n",
            "x.yaml:1: is not valid YAML: could not determine a constructor for the tag "
            "'tag:yaml.org,2002:python/name:os.system'",
        ),
        ("a: !stage {}\n", "x.yaml:1: is not valid YAML: could not determine a constructor for the tag '!stage'"),
        (
            "a: 1\nb: 2020-99-99\n",
            "x.yaml:2: is not valid YAML: month must be in 1..12; put it in quotes if it is text",
        ),
        ("a: 1\nb: \a\n", "x.yaml:2: is not valid YAML: it has the control character U+0007; remove it"),
        ("a: &a [*a]\n", "x.yaml: is nested too deeply, or an alias stands inside what it names"),
        ("a: &a {b: *a}\n", "x.yaml: is nested too deeply, or an alias stands inside what it names"),
        ("a: " + "[" * 3000, "x.yaml: is nested too deeply, or an alias stands inside what it names"),
    ],
)
def test_files_that_are_no_yaml_or_no_mapping(text: str, expected: str) -> None:
    assert fault(text) == expected


@pytest.mark.parametrize("value", ["!!int ''", "!!int [1]", "!!float ''", "!!bool maybe", "!!timestamp soon"])
def test_a_tag_that_does_not_fit_its_value_is_located(value: str) -> None:
    tag = value.split()[0]
    rule = f"is not valid YAML: the tag {tag} does not fit its value; remove the tag"
    assert fault(f"a: 1\nb: {value}\n") == f"x.yaml:2: {rule}"
    assert f"the value {rule}" in fault(SMALL, f"source.seed={value}")


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
    text = fault(with_block(f"train: {{epochs: {number}}}"))
    assert f"is a number in base {base} in YAML; write a decimal number; put it in quotes if it is text" in text
    assert len(text) < 250 and text.startswith("x.yaml:5: ")
    assert read(with_block("train: {epochs: 0x1f, lr: 0.5}")).train.epochs == 31


def test_yaml_merges() -> None:
    base = "base: &base {shorter: 9, antialias: false}\n"
    text = SMALL.replace("[decode,", "[decode, resize: {<<: *base, shorter: 12},")
    assert "base is not a key here" in fault(base + text)
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
    assert problem.code == "config.yaml"
    assert problem.rule == (
        "is not valid YAML: its aliases stand for more than 100,000 values; write out what is needed"
    )
    with deadline(30):
        assert "aliases stand for more than" in fault(SMALL, f"run={{{_bomb(entry).replace(chr(10), ',')[12:-1]}}}")


def test_a_file_of_very_many_keys_is_refused_while_it_is_parsed() -> None:
    with deadline(30):
        text = fault(SMALL + "".join(f"key_{i}: 1\n" for i in range(60_000)))
    assert text == "x.yaml:9998: is not valid YAML: it has more than 10,000 keys; write fewer, or long lists"


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
