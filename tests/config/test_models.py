"""models: keys, types, bounds, and the rules between keys."""

from __future__ import annotations

import re

import pytest

from tests.config.files import fault, read, with_block


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        # misspelt, at every level
        ("trian: {}", "trian config.unknown_key"),
        ("zzz: {}", "zzz config.unknown_key"),
        ("run: {thread: 3}", "run.thread config.unknown_key"),
        ("train: {modle: x}", "train.modle config.unknown_key"),
        ("source: {folder: x, splt: {}}", "source.splt config.unknown_key"),
        ("pipelines: {a: {stages: [decode, center_crop: {size: 8}], bach: {}}}", "pipelines.a.bach config.unknown_key"),
        (
            "pipelines: {a: {stages: [decode, center_crop: {size: 8}], batch: {sise: 3}}}",
            "pipelines.a.batch.sise config.unknown_key",
        ),
        (
            "serve: {stages: [decode, center_crop: {size: 8}], model: {file: x, engin: auto}}",
            "serve.model.engin config.unknown_key",
        ),
        # not text
        ("1: {}", "[1] config.unknown_key"),
        ("run: {2: 3}", "run[2] config.unknown_key"),
        ("pipelines: {1: {stages: [decode, center_crop: {size: 8}]}}", "pipelines[1] config.unknown_key"),
        # of the wrong type
        ("source: 3", "source config.type, got 3"),
        ("source: {folder: 3}", "source.folder config.type, got 3"),
        ("source: {folder: x, split: [1]}", "source.split config.type, got [1]"),
        ("source: {folder: x, split: {val: b}}", "source.split.val config.type, got 'b'"),
        ("source: {listing: x, classes: [1, 2]}", "source.classes config.type, got [1, 2]"),
        ("run: 3", "run config.type, got 3"),
        ("run: [a]", "run config.type, got ['a']"),
        ("run: {threads: aut}", "run.threads config.type, got 'aut'"),
        ("run: {prefetch: true}", "run.prefetch config.type, got true"),
        ("run: {prefetch: 1.5}", "run.prefetch config.type, got 1.5"),
        ("run: {prefetch: null}", "run.prefetch config.type, got null"),
        ("run: {max_bad: x}", "run.max_bad config.type, got 'x'"),
        ("run: {bad_file: 3}", "run.bad_file config.type, got 3"),
        ("run: {deterministic: 1}", "run.deterministic config.type, got 1"),
        ("run: {memory_limit: [1]}", "run.memory_limit config.type, got [1]"),
        (
            f"run: {{memory_limit: {'9' * 400}GB}}",
            "run.memory_limit config.type, got '99999999999999999999999999999999999999999999999999999999...",
        ),
        ("run: {memory_limit: 3 parsecs}", "run.memory_limit config.type, got '3 parsecs'"),
        ("source: {folder: x, cache: y}", "source.cache config.type, got 'y'"),
        ("source: {folder: x, cache: {dir: y, size: [1]}}", "source.cache.size config.type, got [1]"),
        ("train: {lr: fast}", "train.lr config.type, got 'fast'"),
        ("train: {lr: .nan}", "train.lr config.type, got nan"),
        ("train: {lr: .inf}", "train.lr config.type, got inf"),
        ("train: {epochs: 2020-01-01}", "train.epochs config.type, got datetime.date(2020, 1, 1)"),
        (
            "run: {bad_file: [aaaaaaaaaaaaaaaaaaaaaaaaaaaaaa, bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb]}",
            "run.bad_file config.type, got ['aaaaaaaaaaaaaaaaaaaaaaaaaaaaaa', 'bbbbbbbbbbbbbbbbbbbbb...",
        ),
        ("pipelines: 3", "pipelines config.type, got 3"),
        ("pipelines: {a: 3}", "pipelines.a config.type, got 3"),
        ("pipelines: {a: {stages: 3}}", "pipelines.a.stages config.type, got 3"),
        (
            "pipelines: {a: {stages: [decode, center_crop: {size: 8}], batch: 3}}",
            "pipelines.a.batch config.type, got 3",
        ),
        ("serve: [1]", "serve config.type, got [1]"),
        ("source: photos", "source config.type, got 'photos'"),
        ("pipelines: {a: [decode]}", "pipelines.a config.type, got ['decode']"),
        # of another block
        ("source: {folder: x, threads: 2}", "source.threads config.unknown_key"),
        ("lr: 3", "lr config.unknown_key"),
        ("run: {shuffle: true}", "run.shuffle config.unknown_key"),
        ("train: {batch: 4}", "train.batch config.unknown_key"),
        # missing
        ("source: {folder: x, cache: {size: 1GB}}", "source.cache config.missing_key"),
        ("pipelines: {a: {}}", "pipelines.a config.missing_key"),
        ("serve: {}", "serve config.missing_key"),
        ("serve: {stages: [decode, center_crop: {size: 8}], model: {}}", "serve.model config.missing_key"),
        # out of range
        ("run: {threads: 0}", "run.threads config.range, got 0"),
        ("run: {max_bad: -1}", "run.max_bad config.range, got -1"),
        ("run: {max_bad: 1.5}", "run.max_bad config.range, got 1.5"),
        ("run: {timeout_s: 0}", "run.timeout_s config.range, got 0"),
        ("run: {timeout_s: 1.0e+10}", "run.timeout_s config.range, got 10000000000.0"),
        ("run: {prefetch: 1000000000}", "run.prefetch config.range, got 1000000000"),
        ("run: {threads: 100000}", "run.threads config.range, got 100000"),
        ("train: {size: 70000}", "train.size config.range, got 70000"),
        (
            "pipelines: {a: {stages: [decode, center_crop: {size: 8}], batch: {size: 100000000000000000000}}}",
            "pipelines.a.batch.size config.range, got 100000000000000000000",
        ),
        (
            "serve: {stages: [decode, center_crop: {size: 8}], model: {file: m.pt, timeout_ms: 1.0e+14}}",
            "serve.model.timeout_ms config.range, got 100000000000000.0",
        ),
        ("run: {memory_limit: 0}", "run.memory_limit config.range, got 0"),
        ("run: {on_error: skp}", "run.on_error config.range, got 'skp'"),
        ("run: {on_error: zzz}", "run.on_error config.range, got 'zzz'"),
        ("run: {on_error: 3}", "run.on_error config.type, got 3"),
        ("train: {lr: 0}", "train.lr config.range, got 0"),
        ("source: {folder: x, seed: -1}", "source.seed config.range, got -1"),
        ("source: {listing: x, classes: 0}", "source.classes config.range, got 0"),
        ("source: {folder: 's3://x', cache: {dir: y, size: 2 MB}}", "source.cache.size config.range, got 2000000"),
        ("source: {folder: x, root: y}", "source.root config.conflict"),
        ("source: {folder: x, classes: 3}", "source.classes config.conflict"),
        ("source: {folder: x, cache: {dir: y, size: 1 GB}}", "source.cache config.conflict"),
        ("source: {mix: [{source: {folder: x}}], classes: 3}", "source.classes config.type, got 3"),
        ("source: {listing: x, classes: [a, a]}", "source.classes config.range, got ['a', 'a']"),
        # against each other
        ("source: {}", "source config.conflict"),
        ("source: {extensions: [heic]}", "source config.conflict"),
        ("source: {folder: a, tar: b}", "source config.conflict"),
        ("source: {folder: a, split: {val: 0}}", "source.split.val config.range, got 0.0"),
        ("source: {folder: a, split: {val: 0.7, b: 0.4}}", "source.split config.conflict"),
        ("source: {folder: a, split: {val: 0.5, all: 0.5}}", "source.split.all config.conflict"),
        (
            "pipelines: {a: {stages: [decode, center_crop: {size: 8}], split: nix}}",
            "pipelines.a.split config.range, got 'nix'",
        ),
        ("pipelines: {}", "pipelines config.missing_key"),
        ("pipelines: {serve: {stages: [decode, center_crop: {size: 8}]}}", "pipelines.serve config.conflict"),
        (
            "pipelines: {a: {stages: [decode, center_crop: {size: 8}], batch: {size: 1, global: 2}}}",
            "pipelines.a.batch config.conflict",
        ),
        (
            "pipelines: {a: {stages: [decode, center_crop: {size: 8}], batch: {drop_last: true}}}",
            "pipelines.a.batch config.conflict",
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
    ("keys", "expected"),
    [
        ("file: m.engine", "file config.range, got 'm.engine'"),
        ("file: m.onnx, engine: torch", "engine config.conflict"),
        ("file: m.pt, engine: tensorrt", "engine config.conflict"),
        ("file: m.onnx, compile: true", "compile config.conflict"),
        ("file: m.onnx, engine: tensorrt, cuda_graphs: true", "cuda_graphs config.conflict"),
        ("file: m.pt2, precision: float16", "precision config.conflict"),
        ("file: m.onnx, precision: bfloat16", "precision config.conflict"),
        ("file: m.onnx, via: torchpipe", "via config.conflict"),
        ("file: m.onnx, engine: tensorrt, via: torchpipe, precision: bfloat16", "precision config.conflict"),
        (
            "file: m.onnx, engine: tensorrt, via: torchpipe, tensorrt: {opt_batch: 8}",
            "tensorrt.opt_batch config.conflict",
        ),
        (
            "file: m.onnx, engine: tensorrt, batch: 4, tensorrt: {min_batch: 5}",
            "tensorrt.min_batch config.conflict, got 5",
        ),
        (
            "file: m.onnx, engine: tensorrt, batch: 4, tensorrt: {min_batch: 2, opt_batch: 8}",
            "tensorrt.opt_batch config.conflict, got 8",
        ),
    ],
)
def test_rules_between_keys_of_a_model(keys: str, expected: str) -> None:
    block = f"serve: {{stages: [decode, center_crop: {{size: 8}}], model: {{{keys}}}}}"
    found = fault(with_block(block))
    assert re.sub(r"^x\.yaml:\d+: ", "", found) == f"serve.model.{expected}"
