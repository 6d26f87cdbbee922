"""Laws of serving: the graph gives the same tensors as validation, for any image, stages and concurrent requests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import gpuflow
import gpuflow.serve
from gpuflow.decode.optional_formats import missing_library
from gpuflow.pipeline.stage import Stage
from gpuflow.serve.predictor import Predictor
from gpuflow.torchpipe.graph import chain
from tests.datasets import write_config
from tests.decode.test_optional_formats import BY_FORMAT, data_of, turned
from tests.hostile import BAD, HOSTILE
from tests.laws.test_stage_laws import EXAMPLES, SAMPLES, pipeline_around
from tests.running import images, program_of

PIPELINES: dict[str, list[dict[str, Any]]] = {
    "as photos.yaml": [{"decode": {}}, {"resize": {"shorter": 40}}, {"center_crop": {"size": 32}}, {"normalize": {}}],
    "turned by EXIF": [{"decode": {"orientation": "apply"}}, {"resize": {"height": 30, "width": 20}}],
    "larger": [{"decode": {}}, {"resize": {"height": 130, "width": 97, "interpolation": "bicubic"}}, {"normalize": {}}],
    "channels_last bfloat16": [
        {"decode": {"color": "bgr"}},
        {"resize": {"height": 17, "width": 33, "antialias": False}},
        {"normalize": {"mean": [0.5] * 3, "std": [0.2] * 3, "dtype": "bfloat16", "layout": "nhwc"}},
    ],
    "gray": [{"decode": {"color": "gray"}}, {"resize": {"longer": 24}}, {"center_crop": {"size": 16}}],
}


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("hostile") / "photos" / "all"
    root.mkdir(parents=True)
    for i, data in enumerate(HOSTILE.values()):
        (root / f"{i:03d}.jpg").write_bytes(data)
    return sorted(root.iterdir())


def crops(stages: Sequence[dict[str, Any]]) -> bool:
    return any("center_crop" in stage for stage in stages)


@pytest.mark.parametrize("stages", PIPELINES.values(), ids=PIPELINES)
def test_serving_gives_validations_tensors(stages: list[dict[str, Any]], hostile: list[Path], tmp_path: Path) -> None:
    config = write_config(
        tmp_path / "x.yaml", hostile[0].parents[1], val=stages, serve={"stages": stages}, batch={"size": 7}
    )
    with gpuflow.load(config, "val") as loader:
        batches = [(batch.indices.tolist(), batch.images.clone()) for batch in loader]
    seen = [index for indices, _ in batches for index in indices]
    wanted = torch.cat([batch for _, batch in batches])
    assert len(seen) == len(hostile) or crops(stages), "only a crop may ask too much of an image"
    with gpuflow.serve.load(config, preprocess_only=True) as predictor:
        served = predictor.preprocess(hostile[index] for index in seen)
        one = predictor.preprocess(hostile[seen[0]].read_bytes())
    assert torch.equal(served, wanted)
    assert torch.equal(one, wanted[0])
    assert (served.dtype, served.stride()) == (wanted.dtype, wanted.stride())


def test_files_of_named_formats_serve_as_they_validate(tmp_path: Path) -> None:
    """One file of each format that can be decoded here, an upright and a turned TIFF, and a damaged one."""
    here = [form for form in BY_FORMAT if missing_library([form]) is None]
    good = {form: data_of(name) for form, name in BY_FORMAT.items() if form in here}
    bad = [good["avif"][:-40], good["gif"][:-40]]
    sound = [*good.values(), turned("tiff", 6)]
    files = [sound[0], bad[0], *sound[1:4], bad[1], *sound[4:]]
    folder = tmp_path / "photos" / "all"
    folder.mkdir(parents=True)
    for i, data in enumerate(files):
        (folder / f"{i:02d}.tif").write_bytes(data)
    decode = {"decode": {"orientation": "apply", "background": [255, 0, 9], "formats": here}}
    stages: list[dict[str, Any]] = [decode, {"resize": {"height": 30, "width": 20}}, {"normalize": {}}]
    config = write_config(tmp_path / "x.yaml", folder.parent, val=stages, serve={"stages": stages}, batch={"size": 4})
    with gpuflow.load(config, "val") as loader:
        with pytest.warns(UserWarning, match="samples are bad so far"):
            wanted = torch.cat([batch.images.clone() for batch in loader])
        assert loader.stats()["bad"] == len(bad)
    with gpuflow.serve.load(config, preprocess_only=True) as predictor:
        assert torch.equal(predictor.preprocess(sound), wanted)
        for data in bad:
            with pytest.raises(gpuflow.BadSampleError):
                predictor.preprocess(data)


@pytest.mark.parametrize("stage", [stage for stage in EXAMPLES if not stage.random], ids=repr)
def test_every_stage_serves_as_it_validates(stage: Stage) -> None:
    program = program_of(*pipeline_around(stage), name="serve", serving=True)
    graph = chain(program, None, origin="x.yaml", threads=2, device="cpu")
    with Predictor(graph, image=program.result) as predictor:
        served = predictor.preprocess(SAMPLES)
    assert torch.equal(served, images(program, SAMPLES))
    assert served.dtype == getattr(torch, program.result.dtype)


def test_a_bad_image_at_any_place_changes_no_other(hostile: list[Path], tmp_path: Path) -> None:
    stages = PIPELINES["turned by EXIF"]
    config = write_config(tmp_path / "x.yaml", "photos", serve={"stages": stages})
    good = [path.read_bytes() for path in hostile[:5]]

    def model(batch: torch.Tensor) -> torch.Tensor:
        return batch.flatten(1)

    with gpuflow.serve.load(config, model=model) as predictor:
        alone = predictor(good)
        for place, (bad, reason) in enumerate(BAD.values()):
            found = predictor.predict([*good[:place], bad, *good[place:]])
            fault = found.pop(place)
            assert isinstance(fault, gpuflow.BadSampleError)
            assert f"{fault.stage}: {fault.reason}" == reason
            assert (fault.index, fault.path) == (place, "bytes")
            logits = [answer.logits for answer in found if not isinstance(answer, gpuflow.BadSampleError)]
            assert torch.equal(torch.stack(logits), alone)
