"""gpuflow in Ray Train on a cluster of two nodes of this machine, one of which is killed.

`make test-ray REPEATS=20` repeats the test of a lost node, each time at another step.
"""

from __future__ import annotations

import functools
import json
import os
import random
from pathlib import Path
from typing import Any

import pytest

from tests.datasets import make_photos, write_config
from tests.elastic import require_each_sample_once

pytest.importorskip("ray.train.torch", reason="ray is not installed")

pytestmark = pytest.mark.ray

REPEATS = int(os.environ.get("REPEATS", "1"))


@pytest.mark.parametrize("repeat", range(REPEATS))
def test_after_a_node_is_lost_each_sample_counts_once(repeat: int, cluster: Any, scripts: Any, tmp_path: Path) -> None:
    kill_at = random.Random(repeat).randrange(1, 24)
    launch = functools.partial(scripts.launch.by_ray, cluster=cluster)
    require_each_sample_once(scripts, launch, tmp_path, kill="node", kill_at=kill_at)


# --- nodes that differ ------------------------------------------------------------------------------------------------


def attempt_faults(config: dict[str, str]) -> None:
    """Write, in each worker, the errors that it gets where rank 1 finds something else than rank 0."""
    import tempfile

    import ray.train
    from torch import nn

    from gpuflow.errors import GpuflowError
    from gpuflow.integrations import ray as adapter
    from gpuflow.loader import loader as loader_module

    module: Any = loader_module
    rank = ray.train.get_context().get_world_rank()
    texts: dict[str, str] = {}

    def attempt(name: str, *overrides: str, path: str = config["file"]) -> None:
        try:
            with adapter.load(path, overrides=overrides) as loader:
                next(iter(loader))
                texts[name] = "no error"
        except GpuflowError as error:
            texts[name] = f"{type(error).__name__}: {error}"

    attempt("equal")
    version, module.__version__ = module.__version__, f"9.{rank}"
    attempt("version")
    module.__version__ = version
    attempt("files", f"source.folder={config['out']}/{rank}/others")
    attempt("file", path=config["file"] if rank == 0 else config["file"] + "s")
    attempt("folder", f"source.folder={config['photos' if rank == 0 else 'nothing']}")
    with tempfile.TemporaryDirectory() as empty:
        ray.train.report({}, checkpoint=ray.train.Checkpoint.from_directory(empty))
    with adapter.load(config["file"]) as loader:
        try:
            adapter.restore(loader, nn.Linear(1, 1))
        except GpuflowError as error:
            texts["checkpoint"] = f"{type(error).__name__}: {error}"
    Path(config["out"], f"{rank}.json").write_text(json.dumps(texts))


def test_nodes_that_differ_are_named_on_all_ranks(cluster: Any, scripts: Any, tmp_path: Path) -> None:
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    make_photos(tmp_path / "photos")
    for rank in range(2):
        make_photos(tmp_path / str(rank) / "others", each=8 - rank)
    file = write_config(tmp_path / "x.yaml", tmp_path / "photos")
    folders = {name: str(tmp_path / name) for name in ("photos", "nothing")}
    with scripts.launch.second_node(cluster):
        TorchTrainer(
            attempt_faults,
            train_loop_config={**folders, "file": str(file), "out": str(tmp_path)},
            scaling_config=ScalingConfig(num_workers=2),
            run_config=RunConfig(name="run", storage_path=str(tmp_path / "ray")),
        ).fit()
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert first == second
    assert first["equal"] == "no error"
    assert first["file"].startswith("LoaderError: rank 1 on node ") and f"ConfigError: {file}s: " in first["file"]
    assert first["folder"].startswith("LoaderError: rank 1 on node ") and f"{tmp_path / 'nothing'}" in first["folder"]
    assert first["folder"].endswith("; every node needs the file and its images at the same path, or at a URL")
    assert first["files"].startswith("LoaderError: the ranks differ in what they load as 'train': rank 0: 24 samples ")
    assert "rank 0: 24 samples" in first["version"] and "gpuflow 9.0" in first["version"]
    assert first["checkpoint"].startswith("StateError: ") and "gpuflow.integrations.ray.report" in first["checkpoint"]
