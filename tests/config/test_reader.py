"""config: YAML to values, every error with its file, line, key, rule and value, all errors at once."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuflow.config import BatchSpec, Config, read_config
from gpuflow.errors import UNSET, ConfigError
from gpuflow.pipeline.stage import Stage
from gpuflow.sources import SourceSpec
from gpuflow.stages import (
    STAGES,
    CenterCrop,
    ColorJitter,
    Decode,
    Flip,
    Normalize,
    RandomCrop,
    RandomResizedCrop,
    Resize,
    Torchvision,
)

ROOT = Path(__file__).parents[2]

FULL = """\
source: {folder: photos, split: {train: 0.9, val: 0.1}, seed: 3}
preprocess: &eval
  - decode
  - resize: {shorter: 256}
  - center_crop: {size: 224}
  - normalize: {mean: imagenet, std: imagenet}
pipelines:
  train:
    stages:
      - decode: {color: rgb, backend: auto}
      - random_resized_crop: {size: 224}
      - flip: {horizontal: 0.5}
      - torchvision: {name: RandomPosterize, bits: 2}
      - normalize
    batch: {size: 256, drop_last: true}
    shuffle: true
  val: {stages: *eval, batch: {size: 64}}
serve:
  stages: *eval
  model: {file: model.onnx}
train: {lr: 1e-3, epochs: 3}
run: {threads: auto, prefetch: 3}
"""
SMALL = """\
source: {folder: photos}
pipelines:
  val:
    stages: [decode, center_crop: {size: 8}]
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Files are named as from their directory, so that messages are short."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def read(text: str, *overrides: str) -> Config:
    Path("x.yaml").write_text(text, encoding="utf-8")
    return read_config("x.yaml", STAGES, overrides)


def fault(text: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        read(text, *overrides)
    assert str(caught.value) == "\n".join(map(str, caught.value.problems))
    return str(caught.value)


def with_block(block: str) -> str:
    """SMALL with one top-level block in the place of its own one, or behind it."""
    name = block.partition(":")[0]
    kept = {"source": "source: {folder: photos}\n", "pipelines": SMALL.partition("\n")[2]}
    kept.pop(name, None)
    return "".join(kept.values()) + block + "\n"


def stages_of(text: str) -> str:
    """A file whose pipeline `a` has these stages, in flow style, on line 2."""
    return f"source: {{folder: photos}}\npipelines: {{a: {{stages: [{text}]}}}}\n"


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
    assert config.source == SourceSpec(folder="photos", split=(("train", 0.9), ("val", 0.1)), seed=3)
    assert (config.train.lr, config.train.epochs, config.train.model) == (1e-3, 3, "resnet18")
    assert config.serve is not None
    assert (config.serve.model.file, config.serve.model.engine, config.serve.model.batch) == ("model.onnx", "auto", 16)
    assert config.path == "x.yaml"


def test_defaults() -> None:
    config = read(SMALL)
    assert config.serve is None
    run, val = config.run, config.pipelines["val"]
    assert (run.threads, run.prefetch, run.on_error, run.max_bad, run.bad_file) == ("auto", 3, "replace", None, None)
    assert (run.timeout_s, run.memory_limit, run.deterministic) == (120.0, None, False)
    assert (val.batch.size, val.batch.drop_last, val.shuffle, val.on_error) == (64, False, False, None)


def test_values_are_frozen() -> None:
    config = read(SMALL)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.path = "y"  # type: ignore[misc]
    with pytest.raises(ValueError, match="frozen"):
        config.run.prefetch = 4  # type: ignore[misc]


@pytest.mark.parametrize("number", ["1e-3", "1E-3", "1.0e-3", "+1e-3", "0.001", "1_0e-4"])
def test_a_number_may_be_written_as_python_does(number: str) -> None:
    assert read(with_block(f"train: {{lr: {number}}}")).train.lr == pytest.approx(1e-3)


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


def test_text_in_any_alphabet_and_line_end() -> None:
    config = read(SMALL.replace("photos", "Fotos/größe/写真").replace("\n", "\r\n"))
    assert config.source.folder == "Fotos/größe/写真"


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.name)
def test_shipped_files(path: Path) -> None:
    assert read_config(path, STAGES).programs


def test_unknown_pipelines_are_named() -> None:
    config = read(FULL)
    for name, hint in (("vla", "did you mean 'val'?"), ("zzzz", "known: train, val"), ("serve", "known: train, val")):
        with pytest.raises(ConfigError) as caught:
            config.program(name)
        assert str(caught.value) == f"x.yaml: pipelines has no pipeline {name!r}; {hint}"


# --- files that are none ---------------------------------------------------------------------------------------------


def test_a_missing_file(here: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        read_config("photos.yaml", STAGES)
    assert str(caught.value) == "photos.yaml: no such file; give the path of a YAML file"
    Path("photo.yaml").write_text(SMALL)
    with pytest.raises(ConfigError) as caught:
        read_config("photos.yaml", STAGES)
    assert str(caught.value) == "photos.yaml: no such file; did you mean 'photo.yaml'?"
    with pytest.raises(ConfigError) as caught:
        read_config(here, STAGES)
    assert str(caught.value) == f"{here}: cannot be read as UTF-8 text: [Errno 21] Is a directory: '{here}'"
    Path("latin.yaml").write_bytes(b"source: {folder: gr\xf6\xdfe}\n")
    with pytest.raises(ConfigError) as caught:
        read_config("latin.yaml", STAGES)
    assert str(caught.value).startswith("latin.yaml: cannot be read as UTF-8 text: 'utf-8' codec can't decode byte")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "x.yaml: must be a mapping with source and pipelines, got null"),
        ("# nothing\n", "x.yaml: must be a mapping with source and pipelines, got null"),
        ("- source\n", "x.yaml: must be a mapping with source and pipelines, got ['source']"),
        ("photos", "x.yaml: must be a mapping with source and pipelines, got 'photos'"),
        ("a: 1\nb: c: d\n", "x.yaml:2: is not valid YAML: mapping values are not allowed here"),
        ("a: [1, 2\nb: 3\n", "x.yaml:2: is not valid YAML: expected ',' or ']', but got ':'"),
        ("a: {\n", "x.yaml:2: is not valid YAML: expected the node content, but found '<stream end>'"),
        ("a: 'b\n", "x.yaml:2: is not valid YAML: found unexpected end of stream"),
        ("a: *b\n", "x.yaml:1: is not valid YAML: found undefined alias 'b'"),
        ("a: 1\n---\nb: 2\n", "x.yaml:2: is not valid YAML: but found another document"),
        ("a: 1\n\tb: 2\n", "x.yaml:2: is not valid YAML: found character '\\t' that cannot start any token"),
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
        ("a: 2020-99-99\n", "x.yaml: is not valid YAML: month must be in 1..12"),
        ("a: &a [*a]\n", "x.yaml: is nested too deeply, or an alias stands inside what it names"),
        ("a: &a {b: *a}\n", "x.yaml: is nested too deeply, or an alias stands inside what it names"),
        ("a: " + "[" * 3000, "x.yaml: is nested too deeply, or an alias stands inside what it names"),
    ],
)
def test_files_that_are_no_yaml_or_no_mapping(text: str, expected: str) -> None:
    assert fault(text) == expected


def test_a_tag_runs_nothing(here: Path) -> None:
    fault(f"a: !!python/object/apply:os.mkdir ['{here}/made']\n")
    assert not (here / "made").exists()


MISSING = "config.missing_key"
CROP = ("pipelines", "a", "stages", 1, "center_crop")

# --- keys and values -------------------------------------------------------------------------------------------------

SOURCE_KEYS = "folder, listing, tar, root, classes, split, seed, window"
BYTES = "bytes, or text with a unit such as 512MB or 2GiB"
RUN_KEYS = "threads, readers, processes, prefetch, on_error, max_bad, bad_file, timeout_s, memory_limit, deterministic"


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        # misspelt, at every level
        ("trian: {}", "trian is not a key here; did you mean 'train'?"),
        ("zzz: {}", "zzz is not a key here; known: pipelines, preprocess, run, serve, source, train"),
        ("run: {thread: 3}", "run.thread is not a key here; did you mean 'threads'?"),
        ("train: {modle: x}", "train.modle is not a key here; did you mean 'model'?"),
        ("source: {folder: x, splt: {}}", "source.splt is not a key here; did you mean 'split'?"),
        (
            "pipelines: {a: {stages: [decode, center_crop: {size: 8}], bach: {}}}",
            "pipelines.a.bach is not a key here; did you mean 'batch'?",
        ),
        (
            "pipelines: {a: {stages: [decode, center_crop: {size: 8}], batch: {sise: 3}}}",
            "pipelines.a.batch.sise is not a key here; did you mean 'size'?",
        ),
        (
            "serve: {stages: [decode, center_crop: {size: 8}], model: {file: x, engin: auto}}",
            "serve.model.engin is not a key here; did you mean 'engine'?",
        ),
        # not text
        ("1: {}", "[1] is a key that is not text; put it in quotes"),
        ("run: {2: 3}", "run[2] is a key that is not text; put it in quotes"),
        (
            "pipelines: {1: {stages: [decode, center_crop: {size: 8}]}}",
            "pipelines[1] is a key that is not text; put it in quotes",
        ),
        # of the wrong type
        ("source: 3", f"source must be a mapping with {SOURCE_KEYS}, got 3"),
        ("source: {folder: 3}", "source.folder must be text, got 3"),
        ("source: {folder: x, split: [1]}", "source.split must be a mapping, each value a number, got [1]"),
        ("source: {folder: x, split: {a: b}}", "source.split.a must be a number, got 'b'"),
        (
            "source: {folder: x, classes: [1, 2]}",
            "source.classes must be an integer or a list, each text, got [1, 2]",
        ),
        ("run: 3", f"run must be a mapping with {RUN_KEYS}, got 3"),
        ("run: [a]", f"run must be a mapping with {RUN_KEYS}, got ['a']"),
        ("run: {threads: aut}", "run.threads must be an integer or auto, got 'aut'"),
        ("run: {prefetch: true}", "run.prefetch must be an integer, got true"),
        ("run: {prefetch: 1.5}", "run.prefetch must be an integer, got 1.5"),
        ("run: {prefetch: null}", "run.prefetch must be an integer, got null"),
        ("run: {max_bad: x}", "run.max_bad must be an integer or a number, got 'x'"),
        ("run: {bad_file: 3}", "run.bad_file must be text, got 3"),
        ("run: {deterministic: 1}", "run.deterministic must be true or false, got 1"),
        ("run: {memory_limit: [1]}", f"run.memory_limit must be {BYTES}, got [1]"),
        ("run: {memory_limit: 3 parsecs}", f"run.memory_limit must be {BYTES}, got '3 parsecs'"),
        ("train: {lr: fast}", "train.lr must be a number, got 'fast'"),
        ("train: {lr: .nan}", "train.lr must be a number, got nan"),
        ("train: {lr: .inf}", "train.lr must be a number, got inf"),
        ("train: {epochs: 2020-01-01}", "train.epochs must be an integer, got datetime.date(2020, 1, 1)"),
        (
            "run: {bad_file: [aaaaaaaaaaaaaaaaaaaaaaaaaaaaaa, bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb]}",
            "run.bad_file must be text, got ['aaaaaaaaaaaaaaaaaaaaaaaaaaaaaa', 'bbbbbbbbbbbbbbbbbbbbb...",
        ),
        (
            "pipelines: 3",
            "pipelines must be a mapping, each value a mapping with "
            "preset, height, width, color, stages, batch, shuffle, on_error, got 3",
        ),
        (
            "pipelines: {a: 3}",
            "pipelines.a must be a mapping with preset, height, width, color, stages, batch, shuffle, on_error, got 3",
        ),
        ("pipelines: {a: {stages: 3}}", "pipelines.a.stages must be a list, got 3"),
        (
            "pipelines: {a: {stages: [decode, center_crop: {size: 8}], batch: 3}}",
            "pipelines.a.batch must be a mapping with size, global, drop_last, got 3",
        ),
        ("serve: [1]", "serve must be a mapping with preset, height, width, color, stages, model, got [1]"),
        # missing
        ("pipelines: {a: {}}", "pipelines.a needs the key 'stages': a list"),
        ("serve: {}", "serve needs the key 'stages': a list, or a preset"),
        ("serve: {stages: [decode, center_crop: {size: 8}], model: {}}", "serve.model needs the key 'file': text"),
        # out of range
        ("run: {threads: 0}", "run.threads must be >= 1, got 0"),
        ("run: {max_bad: -1}", "run.max_bad must be >= 0, got -1"),
        ("run: {max_bad: 1.5}", "run.max_bad must be <= 1, got 1.5"),
        ("run: {timeout_s: 0}", "run.timeout_s must be > 0, got 0"),
        ("run: {memory_limit: 0}", "run.memory_limit must be >= 1, got 0"),
        ("run: {on_error: skp}", "run.on_error must be one of raise, replace, skip, got 'skp'; did you mean 'skip'?"),
        ("run: {on_error: zzz}", "run.on_error must be one of raise, replace, skip, got 'zzz'"),
        ("run: {on_error: 3}", "run.on_error must be one of raise, replace, skip, got 3"),
        ("train: {lr: 0}", "train.lr must be > 0, got 0"),
        ("source: {folder: x, seed: -1}", "source.seed must be >= 0, got -1"),
        ("source: {listing: x, classes: 0}", "source.classes must be >= 1, got 0"),
        (
            "source: {folder: x, root: y}",
            "source.root must go with source.listing, got source.folder; remove root",
        ),
        (
            "source: {folder: x, classes: 3}",
            "source.classes must go with listing or tar, got source.folder; its directories name the classes",
        ),
        (
            "source: {listing: x, classes: [a, a]}",
            "source.classes must be distinct names, at least one, got ['a', 'a']",
        ),
        # against each other
        ("source: {}", "source needs exactly one of folder, listing and tar, got none of them"),
        ("source: {folder: a, tar: b}", "source needs exactly one of folder, listing and tar, got folder and tar"),
        ("source: {folder: a, split: {a: 0}}", "source.split.a must be a fraction within (0, 1], got 0.0"),
        (
            "source: {folder: a, split: {a: 0.7, b: 0.4}}",
            "source.split must add up to at most 1, got 1.1; lower a fraction",
        ),
        ("pipelines: {}", "pipelines must name at least one pipeline, such as train, got none"),
        (
            "pipelines: {serve: {stages: [decode, center_crop: {size: 8}]}}",
            "pipelines.serve takes the name of the block serve; give this pipeline another one",
        ),
        (
            "pipelines: {a: {stages: [decode, center_crop: {size: 8}], batch: {size: 1, global: 2}}}",
            "pipelines.a.batch needs size (of a rank) or global (of all ranks), one of them",
        ),
        (
            "pipelines: {a: {stages: [decode, center_crop: {size: 8}], batch: {drop_last: true}}}",
            "pipelines.a.batch needs size (of a rank) or global (of all ranks), one of them",
        ),
    ],
)
def test_values(block: str, expected: str) -> None:
    text = with_block(block)
    line = text.splitlines().index(block) + 1
    assert fault(text) == f"x.yaml:{line}: {expected}"


@pytest.mark.parametrize(
    ("text", "override", "path", "value", "code"),
    [
        (with_block("zzz: 1"), "", ("zzz",), UNSET, "config.unknown_key"),
        (with_block("run: {threads: 0}"), "", ("run", "threads"), 0, "config.range"),
        (with_block("run: {on_error: x}"), "", ("run", "on_error"), "x", "config.range"),
        (with_block("run: {prefetch: x}"), "", ("run", "prefetch"), "x", "config.type"),
        (with_block("source: {tar: x, root: y}"), "", ("source", "root"), UNSET, "config.conflict"),
        (with_block("source: {tar: x, split: {a: 2}}"), "", ("source", "split", "a"), 2.0, "config.range"),
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
        "x.yaml:4: source.root must go with source.listing, got source.folder; remove root",
        "x.yaml:5: run.threads must be >= 1, got 0",
    ]


def test_blocks_that_are_missing() -> None:
    assert fault("run: {}\n") == (
        "x.yaml: needs the key 'source': a mapping with " + SOURCE_KEYS + "\n"
        "x.yaml: needs the key 'pipelines': a mapping, each value a mapping with "
        "preset, height, width, color, stages, batch, shuffle, on_error"
    )


def test_three_ways_to_share_a_source() -> None:
    assert read(with_block("source: {folder: a, split: {train: 0.7, val: 0.1, test: 0.2}}")).source.split == (
        ("train", 0.7),
        ("val", 0.1),
        ("test", 0.2),
    )


@pytest.mark.parametrize(
    ("stages", "expected"),
    [
        ("", "pipelines.a.stages must name at least one stage, got an empty list; start with decode: {}"),
        ("3", "pipelines.a.stages[0] must be one stage such as `resize: {shorter: 256}`, got 3"),
        ("null", "pipelines.a.stages[0] must be one stage such as `resize: {shorter: 256}`, got null"),
        ("{}", "pipelines.a.stages[0] must be one stage such as `resize: {shorter: 256}`, got {}"),
        (
            "{decode: {}, flip: {}}",
            "pipelines.a.stages[0] must be one stage such as `resize: {shorter: 256}`, got {'decode': {}, 'flip': {}}",
        ),
        ("decode, resie: {shorter: 8}", "pipelines.a.stages[1].resie is not a stage; did you mean 'resize'?"),
        ("decode, 5: {}", "pipelines.a.stages[1][5] is not a stage; known: " + ", ".join(sorted(STAGES))),
        ("decode, zzz", "pipelines.a.stages[1].zzz is not a stage; known: " + ", ".join(sorted(STAGES))),
        ("decode, resize: 8", "pipelines.a.stages[1].resize must be a mapping of parameters, got 8"),
        (
            "decode, resize: {shorte: 8}",
            "pipelines.a.stages[1].resize.shorte is not a key of resize; did you mean 'shorter'?",
        ),
        (
            "decode, flip: {1: 8}",
            "pipelines.a.stages[1].flip[1] is not a key of flip; known: horizontal, vertical",
        ),
        (
            "decode, center_crop",
            "pipelines.a.stages[1].center_crop needs the key 'size': an integer or [an integer, an integer]",
        ),
        (
            "decode, center_crop: {size: [1, 2, 3]}",
            "pipelines.a.stages[1].center_crop.size must be an integer or [an integer, an integer], got [1, 2, 3]",
        ),
        (
            "decode, center_crop: {size: 8.0}",
            "pipelines.a.stages[1].center_crop.size must be an integer or [an integer, an integer], got 8.0",
        ),
        ("decode, center_crop: {size: 0}", "pipelines.a.stages[1].center_crop.size must be >= 1, got 0"),
        (
            "decode, resize: {height: 8}",
            "pipelines.a.stages[1].resize needs height and width, or shorter, or longer; give one of these",
        ),
        (
            "decode, resize: {shorter: 8, antialias: 1}",
            "pipelines.a.stages[1].resize.antialias must be true or false, got 1",
        ),
        (
            "decode, resize: {shorter: 8, interpolation: cubic}",
            "pipelines.a.stages[1].resize.interpolation must be one of nearest, bilinear, bicubic, got 'cubic'",
        ),
        ("decode: {color: rbg}", "pipelines.a.stages[0].decode.color must be one of rgb, bgr, gray, got 'rbg'"),
        (
            "decode, flip: {horizontal: 2}",
            "pipelines.a.stages[1].flip.horizontal must be a probability within [0, 1], got 2",
        ),
        ("decode, flip: {horizontal: yes}", "pipelines.a.stages[1].flip.horizontal must be a number, got true"),
        ("decode, flip: {horizontal: .nan}", "pipelines.a.stages[1].flip.horizontal must be a number, got nan"),
        (
            "decode, center_crop: {size: 8}, normalize: {mean: [a]}",
            "pipelines.a.stages[2].normalize.mean must be imagenet or a list, each a number, got ['a']",
        ),
        ("decode, torchvision", "pipelines.a.stages[1].torchvision needs the key 'name': text"),
        (
            "decode, torchvision: {name: Padd}",
            "pipelines.a.stages[1].torchvision.name must be a transform of one image in torchvision.transforms.v2, "
            "got 'Padd'; did you mean 'Pad'?",
        ),
        (
            "decode, torchvision: {name: Pad}",
            "pipelines.a.stages[1].torchvision Pad does not take these parameters: "
            "Pad.__init__() missing 1 required positional argument: 'padding'",
        ),
        (
            "decode, torchvision: {name: Pad, 3: 4, padding: 1}",
            "pipelines.a.stages[1].torchvision takes keys that are text, got 3",
        ),
        # stages against each other
        (
            "center_crop: {size: 8}",
            "pipelines.a.stages[0].center_crop takes an image but gets encoded bytes; start the list with "
            "decode: {color: rgb}",
        ),
        (
            "normalize, decode",
            "pipelines.a.stages[0].normalize takes an image but gets encoded bytes; start the list with decode: "
            "{color: rgb}",
        ),
        (
            "decode, center_crop: {size: 8}, decode",
            "pipelines.a.stages[2].decode must be the first stage and stand once; remove this one",
        ),
        (
            "decode, normalize, center_crop: {size: 8}",
            "pipelines.a.stages[2].center_crop takes uint8 pixels but gets float32; put center_crop before normalize",
        ),
        (
            "decode",
            "pipelines.a.stages[0].decode leaves images of varying size (uint8 ?x?x3 hwc), which no batch can hold; "
            "add center_crop, random_crop, random_resized_crop or resize with height and width",
        ),
        (
            "decode, resize: {shorter: 8}, center_crop: {size: 9}",
            "pipelines.a.stages[2].center_crop crops 9x9 from an image whose shorter side is 8, which is smaller; "
            "crop less or resize to more",
        ),
        (
            "decode: {color: gray}, center_crop: {size: 8}, normalize",
            "pipelines.a.stages[2].normalize has 3 values of mean but gets 1 channel(s)",
        ),
        (
            "decode, torchvision: {name: ToPILImage}",
            "pipelines.a.stages[1].torchvision ToPILImage does not take uint8 ?x?x3 hwc: the result is not one "
            "CHW image",
        ),
    ],
)
def test_stages(stages: str, expected: str) -> None:
    assert fault(stages_of(stages)) == f"x.yaml:2: {expected}"


@pytest.mark.parametrize("name", ["my pipeline", "a[7]", "", "größe", "a.b"])
def test_faults_are_placed_whatever_the_pipelines_name(name: str) -> None:
    text = f"source: {{folder: x}}\npipelines:\n  '{name}':\n    stages:\n      - decode\n      - normalize\n"
    assert fault(text).startswith(f"x.yaml:6: pipelines.{name}.stages[1].normalize leaves images of varying size")


def test_random_stages_do_not_serve() -> None:
    text = FULL.replace("serve:\n  stages: *eval", "serve:\n  stages: [decode, random_resized_crop: {size: 8}]")
    assert fault(text) == (
        "x.yaml:19: serve.stages[1].random_resized_crop is random and cannot serve; "
        "name the stages that pipelines.val uses"
    )


def test_a_shared_fault_is_told_for_each_place_that_shares_it() -> None:
    assert fault(FULL.replace("shorter: 256", "shorter: 0")) == (
        "x.yaml:4: pipelines.val.stages[1].resize.shorter must be >= 1, got 0\n"
        "x.yaml:4: serve.stages[1].resize.shorter must be >= 1, got 0"
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
            "x.yaml:1: run.threads must be >= 1, got 0",
            "x.yaml:5: pipelines.b.stages[0].decode.color must be one of rgb, bgr, gray, got 'pink'",
            "x.yaml:6: pipelines.b.stages[1].resie is not a stage; did you mean 'resize'?",
            "x.yaml:11: pipelines.a.stages[1].resize.interpolation must be one of nearest, bilinear, bicubic, "
            "got 'cubic'",
            "x.yaml:12: pipelines.a.stages[2].flip.horizontal must be a probability within [0, 1], got 3",
            "x.yaml:12: pipelines.a.stages[2].flip.vertical must be a probability within [0, 1], got -1",
            "x.yaml:13: pipelines.a.batch.size must be >= 1, got 0",
            "x.yaml:16: source.seed must be >= 0, got -1",
            "x.yaml:17: trian is not a key here; did you mean 'train'?",
        ]
    )


# --- overrides -------------------------------------------------------------------------------------------------------


def test_overrides() -> None:
    config = read(
        FULL,
        "run.threads=8",
        "train.lr=1e-4",
        "pipelines.train.stages.flip.vertical=0.25",
        "pipelines.train.stages.1.random_resized_crop.size=[160, 128]",
        "pipelines.train.stages.normalize.dtype=float16",
        "pipelines.train.stages.torchvision.bits=3",
        "pipelines.train.batch={global: 64}",
        "source.folder=else=where",
        "serve.model.engine=onnxruntime",
        "run.bad_file=",
    )
    assert (config.run.threads, config.train.lr) == (8, 1e-4)
    assert config.program("train").pipeline.stages == (
        Decode(),
        RandomResizedCrop(size=(160, 128)),
        Flip(horizontal=0.5, vertical=0.25),
        Torchvision(name="RandomPosterize", parameters=(("bits", 3),)),
        Normalize(dtype="float16"),
    )
    assert config.pipelines["train"].batch == BatchSpec(**{"global": 64})
    assert config.source.folder == "else=where"
    assert config.serve is not None and config.serve.model.engine == "onnxruntime"
    assert config.run.bad_file == ""


def test_an_override_of_a_shared_list_changes_all_who_share_it() -> None:
    config = read(FULL, "pipelines.val.stages.resize.shorter=300", "serve.stages.center_crop.size=200")
    for name in ("val", "serve"):
        assert config.programs[name].pipeline.stages[1:3] == (Resize(shorter=300), CenterCrop(size=200))
    assert config.program("train") == read(FULL).program("train")


def test_overrides_of_stages_that_are_no_more_than_a_name() -> None:
    config = read(FULL, "pipelines.val.stages.decode.max_pixels=9", "pipelines.val.stages.resize={longer: 300}")
    assert config.program("val").pipeline.stages[:2] == (Decode(max_pixels=9), Resize(longer=300))
    config = read(
        FULL, "pipelines.val.stages.1={resize: {longer: 300}}", "pipelines.new.stages=[decode, center_crop: {size: 8}]"
    )
    assert config.program("val").pipeline.stages[1] == Resize(longer=300)
    assert config.program("new").pipeline.stages == (Decode(), CenterCrop(size=8))
    listed = read(with_block("source: {listing: x, classes: [a, b]}"), "source.classes.1=c")
    assert listed.source.classes == ("a", "c")


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("run.threads", ": must be of the form key.key=value, such as run.threads=8"),
        ("=3", ": must be of the form key.key=value, such as run.threads=8"),
        ("", ": must be of the form key.key=value, such as run.threads=8"),
        ("run.threads={", ": the value is not valid YAML: expected the node content, but found '<stream end>'"),
        ("run.threads=2020-99-99", ": the value is not valid YAML: month must be in 1..12"),
        ("run.threads={a: 1, a: 2}", ": the value is not valid YAML: key 'a' stands twice, first on line 1; keep one"),
        (
            "run.threads=!!python/name:os.system",
            ": the value is not valid YAML: could not determine a constructor for the tag "
            "'tag:yaml.org,2002:python/name:os.system'",
        ),
        ("run.threads=0", ": run.threads must be >= 1, got 0"),
        ("run.thread=3", ": run.thread is not a key here; did you mean 'threads'?"),
        ("run=3", f": run must be a mapping with {RUN_KEYS}, got 3"),
        ("run.threads.x=3", ": run.threads is 'auto', neither a mapping nor a list, and has no 'x'"),
        ("run..x=3", ": run. is not a key here; known: " + ", ".join(sorted(RUN_KEYS.split(", ")))),
        ("x.y=3", ": x is not a key here; known: pipelines, preprocess, run, serve, source, train"),
        ("pipelines.train.stages.9.flip={}", ": pipelines.train.stages has no entry 9; its entries are 0 to 4"),
        (
            "pipelines.train.stages.²=flip",
            ": pipelines.train.stages has no '²'; known: decode, flip, normalize, random_resized_crop, torchvision",
        ),
        ("pipelines.train.stages.flp.vertical=1", ": pipelines.train.stages has no 'flp'; did you mean 'flip'?"),
        (
            "pipelines.train.stages.flip.vertical=2",
            ": pipelines.train.stages[2].flip.vertical must be a probability within [0, 1], got 2",
        ),
        (
            "pipelines.train.stages.flip={vertical: 2}",
            ": pipelines.train.stages[2].flip.vertical must be a probability within [0, 1], got 2",
        ),
        ("pipelines.train.stages.2=flop", ": pipelines.train.stages[2].flop is not a stage; did you mean 'flip'?"),
    ],
)
def test_bad_overrides(override: str, expected: str) -> None:
    assert fault(FULL, override) == f"override {override!r}{expected}"


def test_lists_that_hold_no_stages_are_entered_by_number() -> None:
    assert fault(with_block("pipelines: {a: {stages: [{}]}}"), "pipelines.a.stages.flip.vertical=1") == (
        "override 'pipelines.a.stages.flip.vertical=1': pipelines.a.stages has no 'flip'; it is empty"
    )
    assert fault(with_block("pipelines: {a: {stages: []}}"), "pipelines.a.stages.0=flip") == (
        "override 'pipelines.a.stages.0=flip': pipelines.a.stages has no entry 0; it is empty"
    )


def test_faults_of_a_shared_override_name_it_everywhere() -> None:
    override = "pipelines.val.stages.resize.shorter=0"
    assert fault(FULL, override) == (
        f"override '{override}': pipelines.val.stages[1].resize.shorter must be >= 1, got 0\n"
        f"override '{override}': serve.stages[1].resize.shorter must be >= 1, got 0"
    )


def test_the_files_faults_come_first_and_a_later_override_wins() -> None:
    assert fault(SMALL + "run: {prefetch: 0}\n", "run.threads=0", "run.threads=-1") == (
        "x.yaml:5: run.prefetch must be >= 1, got 0\noverride 'run.threads=-1': run.threads must be >= 1, got -1"
    )


# --- any stage survives the way through YAML -------------------------------------------------------------------------

numbers = st.floats(0, 1).map(lambda value: round(value, 4))
pairs = st.tuples(numbers, numbers).map(lambda pair: (min(pair), max(pair)))
sizes = st.one_of(st.integers(1, 2000), st.tuples(st.integers(1, 2000), st.integers(1, 2000)))
filters = {"interpolation": st.sampled_from(["nearest", "bilinear", "bicubic"]), "antialias": st.booleans()}
jitters = st.one_of(numbers, pairs)
one_more = st.lists(st.floats(0.01, 2), min_size=3, max_size=3).map(tuple)
STRATEGIES: dict[str, st.SearchStrategy[Stage]] = {
    "decode": st.builds(
        Decode,
        color=st.sampled_from(["rgb", "bgr", "gray"]),
        backend=st.sampled_from(["auto", "cpu", "gpu"]),
        cpu_share=numbers,
        orientation=st.sampled_from(["ignore", "apply"]),
        max_pixels=st.integers(1, 10**12),
    ),
    "resize": st.one_of(
        st.builds(Resize, height=st.integers(1, 999), width=st.integers(1, 999), **filters),
        st.builds(Resize, shorter=st.integers(1, 999), **filters),
        st.builds(Resize, longer=st.integers(1, 999), **filters),
    ),
    "center_crop": st.builds(CenterCrop, size=sizes),
    "random_crop": st.builds(RandomCrop, size=sizes, padding=st.integers(0, 50)),
    "random_resized_crop": st.builds(
        RandomResizedCrop,
        size=sizes,
        scale=pairs.map(lambda pair: (max(pair[0], 0.01), max(pair[1], 0.01))),
        ratio=pairs.map(lambda pair: (pair[0] + 0.1, pair[1] * 3 + 0.1)),
        **filters,
    ),
    "flip": st.builds(Flip, horizontal=numbers, vertical=numbers),
    "color_jitter": st.builds(
        ColorJitter,
        brightness=jitters,
        contrast=jitters,
        saturation=jitters,
        hue=st.one_of(numbers.map(lambda x: x / 2), pairs.map(lambda pair: (pair[0] - 0.5, pair[1] - 0.5))),
    ),
    "normalize": st.builds(
        Normalize,
        mean=st.one_of(st.just("imagenet"), one_more),
        std=st.one_of(st.just("imagenet"), one_more),
        dtype=st.sampled_from(["float32", "float16", "bfloat16"]),
        layout=st.sampled_from(["nchw", "nhwc"]),
    ),
    "torchvision": st.one_of(
        st.builds(
            lambda degrees, fill: Torchvision(name="RandomRotation", parameters=(("degrees", degrees), ("fill", fill))),
            st.tuples(st.floats(-90, 0), st.floats(0, 90)),
            st.integers(0, 255),
        ),
        st.just(Torchvision(name="AutoAugment")),
    ),
}


def test_every_stage_has_a_strategy() -> None:
    assert set(STRATEGIES) == set(STAGES)


def dump(value: Any) -> Any:
    """What YAML says for a value: lists for tuples."""
    return [dump(item) for item in value] if isinstance(value, tuple) else value


def as_entry(stage: Stage) -> dict[str, Any]:
    """A stage as an entry of a YAML list."""
    values = {field.name: dump(getattr(stage, field.name)) for field in dataclasses.fields(stage)}
    if stage.open_field is not None:
        values |= dict(values.pop(stage.open_field))
    return {stage.stage_name: {key: value for key, value in values.items() if value is not None}}


def around(stage: Stage) -> Iterator[Stage]:
    """A pipeline that checks, with the stage in it."""
    if stage.stage_name != "decode":
        yield Decode()
    if stage.stage_name == "normalize":
        yield CenterCrop(size=8)
    yield stage
    if stage.stage_name not in ("normalize", "center_crop", "random_crop"):
        yield Resize(height=8, width=8)


@pytest.mark.parametrize("name", STRATEGIES)
def test_any_stage_reads_back_equal_from_yaml(name: str) -> None:
    @settings(max_examples=30)
    @given(STRATEGIES[name], st.booleans())
    def check(stage: Stage, flow: bool) -> None:
        stages = tuple(around(stage))
        document = {"source": {"folder": "x"}, "pipelines": {"p": {"stages": [as_entry(stage) for stage in stages]}}}
        pipeline = read(yaml.safe_dump(document, default_flow_style=flow)).program("p").pipeline
        assert pipeline.stages == stages
        assert eval(repr(pipeline.stages[stages.index(stage)]), dict(STAGES)) == stage
        by_override = [
            f"pipelines.p.stages.{i}={yaml.safe_dump(as_entry(s), default_flow_style=True)}"
            for i, s in enumerate(stages)
        ]
        blank = yaml.safe_dump({**document, "pipelines": {"p": {"stages": ["decode"] * len(stages)}}})
        again = read(blank, *by_override).program("p").pipeline
        assert again == pipeline
        assert again.fingerprint == pipeline.fingerprint

    check()


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


# --- serve.model ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "runtime"),
    [
        ("file: a/m.onnx", "onnxruntime"),
        ("file: m.pt", "torch"),
        ("file: m.pt2", "torch"),
        ("file: m.onnx, engine: onnxruntime", "onnxruntime"),
        ("file: m.onnx, engine: tensorrt, precision: float16, via: torchpipe", "tensorrt"),
        ("file: m.pt, engine: torch, precision: bfloat16, compile: true, cuda_graphs: true", "torch"),
        ("file: m.onnx, engine: tensorrt, tensorrt: {min_batch: 16, opt_batch: 16, cache: engines}", "tensorrt"),
    ],
)
def test_the_engine_of_a_file(keys: str, runtime: str) -> None:
    config = read(with_block(f"serve: {{stages: [decode, center_crop: {{size: 8}}], model: {{{keys}}}}}"))
    assert config.serve is not None and config.serve.model is not None
    assert config.serve.model.runtime == runtime


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ("file: m.engine", "file must end in .onnx, .pt or .pt2, got 'm.engine'"),
        (
            "file: m.onnx, engine: torch",
            "engine is torch, which takes .pt and .pt2 files, but the model's file is 'm.onnx'; use auto",
        ),
        (
            "file: m.pt, engine: tensorrt",
            "engine is tensorrt, which takes .onnx files, but the model's file is 'm.pt'; use auto",
        ),
        ("file: m.onnx, compile: true", "compile is for the engine torch, but this one is onnxruntime; remove it"),
        (
            "file: m.onnx, engine: tensorrt, cuda_graphs: true",
            "cuda_graphs is for the engine torch, but this one is tensorrt; remove it",
        ),
        (
            "file: m.pt2, precision: float16",
            "precision is float16, but torch runs .pt2 files as they were exported; remove it",
        ),
        (
            "file: m.onnx, precision: bfloat16",
            "precision is bfloat16, but onnxruntime runs .onnx files as they were exported; remove it",
        ),
        ("file: m.onnx, via: torchpipe", "via is for the engine tensorrt, but this one is onnxruntime; remove it"),
        (
            "file: m.onnx, engine: tensorrt, via: torchpipe, precision: bfloat16",
            "precision is bfloat16, which torchpipe does not build; use float16, float32 or via: python",
        ),
        (
            "file: m.onnx, engine: tensorrt, via: torchpipe, tensorrt: {opt_batch: 8}",
            "tensorrt.opt_batch has no effect with via: torchpipe, which tunes for batch; remove it",
        ),
        (
            "file: m.onnx, engine: tensorrt, batch: 4, tensorrt: {min_batch: 5}",
            "tensorrt.min_batch must be <= serve.model.batch, which is 4, got 5",
        ),
        (
            "file: m.onnx, engine: tensorrt, batch: 4, tensorrt: {min_batch: 2, opt_batch: 8}",
            "tensorrt.opt_batch must be within min_batch and batch, 2 to 4, got 8",
        ),
    ],
)
def test_rules_between_keys_of_a_model(keys: str, text: str) -> None:
    block = f"serve: {{stages: [decode, center_crop: {{size: 8}}], model: {{{keys}}}}}"
    found = fault(with_block(block))
    assert re.sub(r"^x\.yaml:\d+: ", "", found) == f"serve.model.{text}"


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


@settings(max_examples=150)
@given(st.text(alphabet="ab: {}[]\n-&*!'\"|>#,<0e.~?%@=", max_size=40))
def test_any_text_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        read(text)
    with pytest.raises(ConfigError):
        read(SMALL + "zzz: 1\n", text)
