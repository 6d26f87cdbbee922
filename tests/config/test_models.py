"""models: keys, types, bounds, and the rules between keys."""

from __future__ import annotations

import re

import pytest

from tests.config.files import KIND_WORDS, PIPELINE_KEYS, RUN_KEYS, SOURCE_KEYS, fault, read, with_block

BYTES = "bytes, or text with a unit such as 512MB or 2GiB"


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
        ("source: {folder: x, split: {val: b}}", "source.split.val must be a number, got 'b'"),
        (
            "source: {listing: x, classes: [1, 2]}",
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
        (f"run: {{memory_limit: {'9' * 400}GB}}", f"run.memory_limit must be {BYTES}, got '{'9' * 56}..."),
        ("run: {memory_limit: 3 parsecs}", f"run.memory_limit must be {BYTES}, got '3 parsecs'"),
        ("source: {folder: x, cache: y}", "source.cache must be a mapping with dir, size, got 'y'"),
        ("source: {folder: x, cache: {dir: y, size: [1]}}", f"source.cache.size must be {BYTES}, got [1]"),
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
            f"pipelines must be a mapping, each value a mapping with {PIPELINE_KEYS}, got 3",
        ),
        ("pipelines: {a: 3}", f"pipelines.a must be a mapping with {PIPELINE_KEYS}, got 3"),
        ("pipelines: {a: {stages: 3}}", "pipelines.a.stages must be a list, got 3"),
        (
            "pipelines: {a: {stages: [decode, center_crop: {size: 8}], batch: 3}}",
            "pipelines.a.batch must be a mapping with size, global, drop_last, got 3; write {size: 3}",
        ),
        (
            "serve: [1]",
            "serve must be a mapping with preset, height, width, color, stages, model, got [1]; write {stages: [...]}",
        ),
        ("source: photos", f"source must be a mapping with {SOURCE_KEYS}, got 'photos'; write {{folder: photos}}"),
        (
            "pipelines: {a: [decode]}",
            f"pipelines.a must be a mapping with {PIPELINE_KEYS}, got ['decode']; write {{stages: [...]}}",
        ),
        # of another block
        ("source: {folder: x, threads: 2}", "source.threads is not a key here; write it as run.threads"),
        ("lr: 3", "lr is not a key here; write it as train.lr"),
        ("run: {shuffle: true}", "run.shuffle is not a key here; write it as pipelines.NAME.shuffle"),
        (
            "train: {batch: 4}",
            "train.batch is not a key here; write it as pipelines.NAME.batch or serve.model.batch",
        ),
        # missing
        ("source: {folder: x, cache: {size: 1GB}}", "source.cache needs the key 'dir': text"),
        ("pipelines: {a: {}}", "pipelines.a needs the key 'stages': a list, or views"),
        ("serve: {}", "serve needs the key 'stages': a list, or a preset"),
        ("serve: {stages: [decode, center_crop: {size: 8}], model: {}}", "serve.model needs the key 'file': text"),
        # out of range
        ("run: {threads: 0}", "run.threads must be >= 1, got 0"),
        ("run: {max_bad: -1}", "run.max_bad must be >= 0, got -1"),
        ("run: {max_bad: 1.5}", "run.max_bad must be <= 1, got 1.5"),
        ("run: {timeout_s: 0}", "run.timeout_s must be > 0, got 0"),
        ("run: {timeout_s: 1.0e+10}", "run.timeout_s must be <= 1,000,000, got 10000000000.0"),
        ("run: {prefetch: 1000000000}", "run.prefetch must be <= 1,024, got 1000000000"),
        ("run: {threads: 100000}", "run.threads must be <= 1,024, got 100000"),
        ("train: {size: 70000}", "train.size must be <= 65,535, got 70000"),
        (
            "pipelines: {a: {stages: [decode, center_crop: {size: 8}], batch: {size: 100000000000000000000}}}",
            "pipelines.a.batch.size must be <= 1,000,000, got 100000000000000000000",
        ),
        (
            "serve: {stages: [decode, center_crop: {size: 8}], model: {file: m.pt, timeout_ms: 1.0e+14}}",
            "serve.model.timeout_ms must be <= 60,000, got 100000000000000.0",
        ),
        ("run: {memory_limit: 0}", "run.memory_limit must be >= 1, got 0"),
        ("run: {on_error: skp}", "run.on_error must be one of raise, replace, skip, got 'skp'; did you mean 'skip'?"),
        ("run: {on_error: zzz}", "run.on_error must be one of raise, replace, skip, got 'zzz'"),
        ("run: {on_error: 3}", "run.on_error must be one of raise, replace, skip, got 3"),
        ("train: {lr: 0}", "train.lr must be > 0, got 0"),
        ("source: {folder: x, seed: -1}", "source.seed must be >= 0, got -1"),
        ("source: {listing: x, classes: 0}", "source.classes must be >= 1, got 0"),
        (
            "source: {folder: 's3://x', cache: {dir: y, size: 2 MB}}",
            "source.cache.size must be at least 16MiB, got 2000000",
        ),
        (
            "source: {folder: x, root: y}",
            "source.root must go with source.listing, got source.folder; remove root",
        ),
        (
            "source: {folder: x, classes: 3}",
            "source.classes must go with source.listing, source.tar, source.hf or source.mix, got source.folder; its "
            "directories name the classes",
        ),
        (
            "source: {folder: x, cache: {dir: y, size: 1 GB}}",
            "source.cache must go with URLs, got 'x', whose files are not copied; remove cache",
        ),
        ("source: {mix: [{source: {folder: x}}], classes: 3}", "source.classes must be a list, each text, got 3"),
        (
            "source: {listing: x, classes: [a, a]}",
            "source.classes must be distinct names, at least one, got ['a', 'a']",
        ),
        # against each other
        ("source: {}", f"source needs exactly one of {KIND_WORDS}, got none of them"),
        (
            "source: {extensions: [heic]}",
            f"source needs exactly one of {KIND_WORDS}, got none of them",
        ),
        (
            "source: {folder: a, tar: b}",
            f"source needs exactly one of {KIND_WORDS}, got folder and tar",
        ),
        ("source: {folder: a, split: {val: 0}}", "source.split.val must be a fraction within (0, 1], got 0.0"),
        (
            "source: {folder: a, split: {val: 0.7, b: 0.4}}",
            "source.split must add up to at most 1, got 1.1; lower a fraction",
        ),
        (
            "source: {folder: a, split: {val: 0.5, all: 0.5}}",
            "source.split.all takes the name that means the whole source, all; give this part another one",
        ),
        (
            "pipelines: {a: {stages: [decode, center_crop: {size: 8}], split: nix}}",
            "pipelines.a.split must name a part of source.split, or all, got 'nix'; known: all",
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


# --- serve.model ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "runtime"),
    [
        ("file: a/m.onnx", "onnxruntime"),
        ("file: m.pt", "torch"),
        ("file: m.pt2", "torch"),
        ("file: m.onnx, engine: onnxruntime", "onnxruntime"),
        ("file: m.onnx, cuda_graphs: auto", "onnxruntime"),
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
