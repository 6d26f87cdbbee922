"""The adapter to torchpipe: the versions that it knows, and what happens on one that it does not know."""

from __future__ import annotations

import importlib.metadata

from gpuflow.torchpipe.adapter import TESTED_VERSIONS, turn_off_logger, unique_prefix

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
