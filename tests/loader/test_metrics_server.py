"""The numbers of loaders as Prometheus reads them."""

from __future__ import annotations

import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

import gpuflow
from gpuflow.errors import LoaderError
from tests.datasets import make_photos, nothing_left_behind, write_config


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("photos")
    make_photos(folder / "photos", classes=2, each=6)
    return write_config(folder / "x.yaml", folder / "photos")


def scrape(port: int) -> dict[tuple[str, ...], float]:
    """Values by name, pipeline, rank and stage."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    return {(sample.name, *sample.labels.values()): sample.value for family in families for sample in family.samples}


def test_counters_run_over_epochs_and_have_pipeline_rank_and_stage(config: Path) -> None:
    with (
        nothing_left_behind(),
        gpuflow.load(config, "train", rank=1, world_size=2) as train,
        gpuflow.load(config, "val") as val,
        gpuflow.serve_metrics({"train": train, "val": val}, port=0) as server,
    ):
        for _ in range(2):
            list(train)
        found = scrape(server.port)
    prefix = "gpuflow_loader_"
    assert found[f"{prefix}epoch", "train", "1"] == 1
    assert found[f"{prefix}batches_total", "train", "1"] == 4
    assert found[f"{prefix}batches_total", "val", "0"] == 0
    assert found[f"{prefix}wait_seconds_total", "train", "1"] > 0
    assert found[f"{prefix}bad_samples_total", "train", "1"] == 0
    assert found[f"{prefix}stage_images_total", "train", "1", "decode"] == 16
    assert found[f"{prefix}stage_busy_seconds_total", "train", "1", "decode"] > 0
    assert found[f"{prefix}stage_threads", "train", "1", "decode"] == 2
    assert found[f"{prefix}stage_read_bytes_total", "train", "1", "read"] > 0


def test_each_rank_of_a_host_has_its_own_port(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with gpuflow.load(config) as loader, gpuflow.serve_metrics(loader, port=0) as server:
        monkeypatch.setenv("LOCAL_RANK", "1")
        message = f"^metrics cannot be served at 127.0.0.1:{server.port}: .*; choose another port$"
        with pytest.raises(LoaderError, match=message):
            gpuflow.serve_metrics(loader, port=server.port - 1)


@pytest.mark.parametrize(
    ("address", "port", "message"),
    [
        ("127.0.0.1", 70000, r"metrics cannot be served at port 70000: it must be within \[0, 65535\]"),
        (
            "256.1.1.1",
            0,
            r"metrics cannot be served at 256\.1\.1\.1:0: .*; address must be one of this host, .*",
        ),
    ],
)
def test_an_address_and_a_port_that_do_not_exist(config: Path, address: str, port: int, message: str) -> None:
    with gpuflow.load(config) as loader, pytest.raises(LoaderError, match=f"^{message}$"):
        gpuflow.serve_metrics(loader, port=port, address=address)


def test_a_loader_sums_its_epoch_up_and_marks_ranges(config: Path) -> None:
    with gpuflow.load(config, overrides=["run.nvtx=true"]) as loader:
        assert loader.summary() == ""
        assert len(list(loader)) == 3
        assert loader.summary().startswith("the step waited ")
