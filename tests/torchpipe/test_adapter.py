"""The adapter to torchpipe: the versions that it knows, and what happens on one that it does not know."""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path

import pytest

from gpuflow.errors import PredictorError
from gpuflow.torchpipe.adapter import TESTED_VERSIONS, missing_operators, turn_off_logger, unique_prefix
from tests.datasets import VAL, python, write_config
from tests.images import jpeg, photo

TO_CHECK = {
    "torchpipe": "check the operators and parameters in graph.py and tensorrt_node.py",
    "omniback": "check the logger's level offset in adapter.py, the clean-up at exit and that batching can be off",
}


def test_the_installed_versions_are_those_that_the_adapter_was_written_for() -> None:
    installed = {package: importlib.metadata.version(package) for package in TESTED_VERSIONS}
    actions = [
        f"{package} {version}: {TO_CHECK[package]}, then add the version in adapter.py"
        for package, version in installed.items()
        if version not in TESTED_VERSIONS[package]
    ]
    assert not actions, "; ".join(actions)


def test_the_logger_of_an_unknown_version_is_left_alone() -> None:
    not_touched = object()
    assert not turn_off_logger(not_touched, "0.0.0")


def test_no_two_graphs_have_the_same_prefix() -> None:
    assert unique_prefix() != unique_prefix()


# --- a torch for which torchpipe has no operators ---------------------------------------------------------------------

NEWER_TORCH = """
import importlib.metadata

version_of = importlib.metadata.version
importlib.metadata.version = lambda package: "2.99.1+cpu" if package == "torch" else version_of(package)
"""


def test_operators_that_are_missing_are_not_compiled(tmp_path: Path) -> None:
    """Neither for gpuflow, whose preset is refused, nor by the user's import. A graph without them runs."""
    code = """
import sys
import gpuflow, gpuflow.serve

plain, preset, image = sys.argv[1:]
with gpuflow.serve.load(plain, preprocess_only=True) as predictor:
    predictor.preprocess(image)
try:
    gpuflow.serve.load(preset, preprocess_only=True)
except gpuflow.PredictorError as error:
    print(error)
print("torchpipe" in sys.modules)
import torchpipe
print(torchpipe.SKIP_ALL)
"""
    (image := tmp_path / "a.jpg").write_bytes(jpeg(photo(40, 50)))
    plain = write_config(tmp_path / "plain.yaml", "photos", serve={"stages": list(VAL)})
    serve = {"preset": "torchpipe_cpu", "height": 20, "width": 30}
    preset = write_config(tmp_path / "preset.yaml", "photos", serve=serve)
    done = python(NEWER_TORCH + code, str(plain), str(preset), str(image))
    assert done.stdout.splitlines() == [
        "a preset or via: torchpipe needs torchpipe's operators, and torchpipe 0.2.25 has none for torch 2.99; "
        "install torch 2.11 or 2.12, or set TORCHPIPE_SKIP_ALL=0: then torchpipe compiles them, which takes minutes "
        "and may fail",
        "False",
        "1",
    ], done.stderr
    assert "JIT" not in done.stderr


def test_operators_that_the_user_has_compiled_or_wants_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.99.0" if name == "torch" else real(name))
    monkeypatch.delenv("TORCHPIPE_SKIP_ALL", raising=False)
    monkeypatch.setenv("OMNIBACK_CACHE_DIR", str(tmp_path))
    assert isinstance(missing_operators("a preset"), PredictorError)
    monkeypatch.setenv("TORCHPIPE_SKIP_ALL", "0")
    assert missing_operators("a preset") is None
    monkeypatch.delenv("TORCHPIPE_SKIP_ALL")
    (tmp_path / "torchpipe_core-torch299-cpu-abiflag1.so").touch()
    assert missing_operators("a preset") is None


def test_torchpipe_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchpipe", None)
    assert str(missing_operators("a preset")) == (
        "a preset needs torchpipe (x86-64 only), which is not installed; pip install 'gpuflow[serve]'"
    )
