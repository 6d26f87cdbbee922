"""Loaders of pipelines with views: each view is what its stages alone give, in every way of running them."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from rich.console import Console
from torchvision.io import decode_image

import gpuflow
from gpuflow.config import read_config
from gpuflow.config.stage_entries import as_tuples, make_stage
from gpuflow.decode.codecs import CpuDecoder
from gpuflow.errors import ConfigError
from gpuflow.execute.cpu.runner import CpuRunner
from gpuflow.execute.gpu.nvjpeg_decoders import JpegBatch, NvjpegDecoder
from gpuflow.loader.plan import explain_gpu
from gpuflow.pipeline.program import Program, fold, trace
from gpuflow.pipeline.stage import Keys, Pipeline
from gpuflow.pipeline.views import (
    STORAGE,
    View,
    ViewsPipeline,
    ViewsProgram,
    as_batch,
    as_images,
    slot_of,
    slot_shape,
    slots_of,
)
from gpuflow.sources import Payload
from gpuflow.stages import STAGES
from gpuflow.tools.explain import explain
from gpuflow.training.trainer import Trainer
from tests.datasets import deadline, make_photos, nothing_left_behind, truncate

GLOBAL: list[Any] = [{"random_resized_crop": {"size": 24}}, {"flip": {"horizontal": 0.5}}, {"normalize": {}}]
LOCAL: list[Any] = [
    {"color_jitter": {"brightness": 0.4, "hue": 0.1}},
    {"random_resized_crop": {"size": [13, 11], "scale": [0.05, 0.4]}},
]
HALF: list[Any] = [
    {"torchvision": {"name": "RandomErasing", "p": 1.0, "inplace": True}},  # writes to the image that it gets
    {"resize": {"height": 7, "width": 9}},
    {"normalize": {"dtype": "bfloat16", "layout": "nhwc"}},
]
VIEWS: dict[str, Any] = {
    "half": {"stages": HALF},
    "global": {"count": 2, "stages": GLOBAL},
    "local": {"count": 3, "stages": LOCAL},
}
LEVELS: dict[str, Any] = {"mean": [0, 0, 0], "std": [1 / 255] * 3}  # so that a difference of 1 is a level
SCALED: dict[str, Any] = {
    "global": {"count": 2, "stages": [*GLOBAL[:2], {"normalize": LEVELS}]},
    "coloured": {
        "count": 3,
        "stages": [
            {"random_resized_crop": {"size": [13, 11]}},
            {"color_jitter": {"brightness": 0.2}},
            {"gaussian_blur": {"kernel_size": 3}},
            {"normalize": {**LEVELS, "dtype": "float16", "layout": "nhwc"}},
        ],
    },
    "turned": {"stages": [{"affine": {"degrees": 30}}, {"center_crop": {"size": 20}}]},
}
"""Views that a GPU can run."""
Batches = list[tuple[dict[str, torch.Tensor], list[int], list[int]]]


@pytest.fixture(autouse=True)
def _in_time() -> Iterator[None]:
    with deadline(90):
        yield


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("photos")
    make_photos(root, classes=2, each=6)
    return root


def config_of(folder: Path, photos: Path, views: dict[str, Any] | None = None, **run: Any) -> Path:
    train = {"views": views or VIEWS, "batch": {"size": 5}, "shuffle": True}
    path = folder / "x.yaml"
    document = {"source": {"folder": str(photos), "seed": 3}, "pipelines": {"train": train}}
    path.write_text(yaml.safe_dump({**document, "run": {"threads": 2, **run}}, sort_keys=False))
    return path


def epoch_of(loader: gpuflow.Loader, *, first: int = 0) -> Batches:
    return [
        ({name: view.clone() for name, view in batch.views.items()}, batch.indices.tolist(), batch.labels.tolist())
        for batch in loader
    ][first:]


def program_of(entries: list[Any]) -> Program:
    """These stages after decoding, as a program alone."""
    pipeline = Pipeline("alone", tuple(make_stage(as_tuples(entry), STAGES) for entry in [{"decode": {}}, *entries]))
    return fold(pipeline, trace(pipeline))


def equal(a: Batches, b: Batches) -> bool:
    return len(a) == len(b) and all(
        x[1:] == y[1:] and x[0].keys() == y[0].keys() and all(torch.equal(x[0][name], y[0][name]) for name in x[0])
        for x, y in zip(a, b, strict=True)
    )


def test_a_batch_has_the_views_in_their_dtypes_and_memory_formats(photos: Path, tmp_path: Path) -> None:
    with gpuflow.load(config_of(tmp_path, photos)) as loader:
        batch = next(iter(loader))
        _, labels = batch
        views = batch.views
        assert list(views) == ["half", "global", "local"] and labels.shape == (5,)
    shapes = {name: (tuple(view.shape), view.dtype) for name, view in views.items()}
    assert shapes == {
        "global": ((2, 5, 3, 24, 24), torch.float32),
        "local": ((3, 5, 3, 13, 11), torch.uint8),
        "half": ((1, 5, 3, 7, 9), torch.bfloat16),
    }
    assert views["global"].is_contiguous()
    for name in ("local", "half"):
        assert views[name].permute(0, 1, 3, 4, 2).is_contiguous()
        assert views[name][0].is_contiguous(memory_format=torch.channels_last)
    assert not torch.equal(views["global"][0], views["global"][1]), "each number has draws of its own"


def test_a_view_is_what_its_stages_alone_give_with_the_same_keys(photos: Path, tmp_path: Path) -> None:
    with gpuflow.load(config_of(tmp_path, photos)) as loader:
        for batch in loader:
            files = [np.fromfile(loader.dataset.path(int(i)), np.uint8) for i in batch.indices]
            keys = Keys(3, 0, batch.step * 5 + np.arange(len(files)))
            for name, block in VIEWS.items():
                alone = program_of(block["stages"])
                for number in range(block.get("count", 1)):
                    slots = np.empty((len(files), *slot_shape(alone.result)), STORAGE[alone.result.dtype])
                    assert not any(CpuRunner(alone).run(Payload.of(files), keys.of_view(name, number), slots))
                    assert torch.equal(batch.views[name][number], as_batch(slots, alone.result))


def test_other_views_do_not_change_what_a_view_draws(photos: Path, tmp_path: Path) -> None:
    with gpuflow.load(config_of(tmp_path, photos)) as loader:
        expected = epoch_of(loader)
    fewer = {"other": {"stages": GLOBAL}, "local": {"count": 4, "stages": LOCAL}}
    with gpuflow.load(config_of(tmp_path, photos, fewer)) as loader:
        for (views, *rows), (others, *other_rows) in zip(epoch_of(loader), expected, strict=True):
            assert rows == other_rows
            assert torch.equal(views["local"][:3], others["local"])


@pytest.mark.parametrize("run", [{"threads": 1}, {"threads": 4}, {"processes": 2}, {"readers": 2}])
def test_threads_and_processes_do_not_change_the_pixels(photos: Path, tmp_path: Path, run: dict[str, Any]) -> None:
    with gpuflow.load(config_of(tmp_path, photos)) as loader:
        expected = [epoch_of(loader), epoch_of(loader)]
    with gpuflow.load(config_of(tmp_path, photos, **run)) as loader:
        assert equal(epoch_of(loader), expected[0])
        if "processes" in run:
            workers = loader._feed.decoder.workers
            assert workers is not None
            workers._pool.wait_until_ready(120)
            assert workers.counts()["at_work"]
        assert equal(epoch_of(loader), expected[1])


@pytest.mark.parametrize("step", [0, 1, 2])
def test_a_resumed_epoch_goes_on_with_the_same_views(photos: Path, tmp_path: Path, step: int) -> None:
    path = config_of(tmp_path, photos)
    with gpuflow.load(path) as loader:
        expected = epoch_of(loader)
    with gpuflow.load(path) as loader:
        batches = iter(loader)
        for _ in range(step):
            next(batches)
        state = json.loads(json.dumps(loader.state_dict()))
    with gpuflow.load(path) as loader:
        loader.load_state_dict(state)
        assert equal(epoch_of(loader), expected[step:])
    other = config_of(tmp_path, photos, {"global": VIEWS["global"]})
    with gpuflow.load(other) as loader, pytest.raises(gpuflow.StateError):
        loader.load_state_dict(state)


def test_ranks_share_the_sequence(photos: Path, tmp_path: Path) -> None:
    path = config_of(tmp_path, photos)
    with gpuflow.load(path, overrides=["pipelines.train.batch.size=6"]) as loader:
        whole = epoch_of(loader)
    with (
        gpuflow.load(path, rank=0, world_size=2, overrides=["pipelines.train.batch.size=3"]) as first,
        gpuflow.load(path, rank=1, world_size=2, overrides=["pipelines.train.batch.size=3"]) as second,
    ):
        parts = list(zip(epoch_of(first), epoch_of(second), strict=True))
    joined: Batches = [
        ({name: torch.cat([a[0][name], b[0][name]], dim=1) for name in a[0]}, a[1] + b[1], a[2] + b[2])
        for a, b in parts
    ]
    assert equal(joined, whole)


@pytest.mark.filterwarnings("ignore:.* samples are bad so far")
@pytest.mark.parametrize("policy", ["replace", "skip", "raise"])
def test_bad_samples(photos: Path, tmp_path: Path, policy: str) -> None:
    with gpuflow.load(config_of(tmp_path, photos)) as loader:
        expected = epoch_of(loader)
    root = tmp_path / "damaged"
    truncate(make_photos(root, classes=2, each=6)[4])
    with gpuflow.load(config_of(tmp_path, root, on_error=policy)) as loader:
        if policy == "raise":
            with pytest.raises(gpuflow.BadSampleError, match="sample 4"):
                epoch_of(loader)
            return
        found = epoch_of(loader)
        assert loader.stats()["bad"] == 1
    for (views, indices, _), (others, places, _) in zip(found, expected, strict=True):
        assert 4 not in indices
        for name, view in views.items():
            for row, place in enumerate(places):
                if place != 4:
                    mine = row if policy == "replace" else indices.index(place)
                    assert torch.equal(view[:, mine], others[name][:, row])


@pytest.mark.filterwarnings("ignore:.* samples are bad so far")
def test_a_crop_that_does_not_fit_makes_the_sample_bad(photos: Path, tmp_path: Path) -> None:
    views = {"global": VIEWS["global"], "large": {"stages": [{"random_crop": {"size": 45}}]}}
    with gpuflow.load(config_of(tmp_path, photos, views)) as loader:
        found = epoch_of(loader)
        sizes = [decode_image(loader.dataset.path(i)).shape[1:] for i in range(12)]
        small = {i for i, size in enumerate(sizes) if min(size) < 45}
        assert 0 < len(small) == loader.stats()["bad"]
    assert sum(len(indices) for _, indices, _ in found) == 12
    assert not small & {index for _, indices, _ in found for index in indices}


def test_each_image_is_decoded_once(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, decode = [0], CpuDecoder.decode

    def counted(*arguments: Any) -> Any:
        calls[0] += 1
        return decode(*arguments)

    monkeypatch.setattr(CpuDecoder, "decode", counted)
    with gpuflow.load(config_of(tmp_path, photos)) as loader:
        epoch_of(loader)
    assert calls[0] == 12


def test_a_batch_that_is_kept_is_never_overwritten(photos: Path, tmp_path: Path) -> None:
    with nothing_left_behind(), gpuflow.load(config_of(tmp_path, photos)) as loader:
        held = [next(iter(loader)).views for _ in range(6)]
        before = [{name: view.clone() for name, view in views.items()} for views in held]
        for _ in range(3):
            epoch_of(loader)
        assert all(torch.equal(a[name], b[name]) for a, b in zip(held, before, strict=True) for name in a)
        del held, before


def test_slots_and_tensors_of_any_number_of_samples_are_the_same_memory() -> None:
    programs = [program_of(stages) for stages in (GLOBAL, LOCAL, HALF)]
    views = tuple(View(name, count, one.pipeline) for name, count, one in zip("abc", (2, 3, 1), programs, strict=True))
    both = ViewsProgram(pipeline=ViewsPipeline("x", views), programs=tuple(programs))
    shape, dtype = slot_of(both)
    for count in (1, 2, 7):
        memory = np.zeros((count, *shape), dtype)
        slots, images = slots_of(both, memory), as_images(both, memory)
        assert isinstance(images, dict)
        for number, (view, spec) in enumerate(zip(images.values(), [one.result for one in programs], strict=True)):
            slots.views[number][...] = number + 1
            for i in range(len(view)):
                assert torch.equal(view[i], as_batch(slots.views[number][i], spec))
        part = slots[count - 1 : count]
        for number, (view, whole) in enumerate(zip(part.views, slots.views, strict=True)):
            view[...] = 9
            assert (whole[:, :-1] == number + 1).all() and (whole[:, -1:] == 9).all()


@pytest.mark.parametrize("labelled", [True, False])
@pytest.mark.parametrize("run", [{}, {"processes": 1}])
def test_a_batch_has_the_fields_of_its_samples(
    photos: Path, tmp_path: Path, labelled: bool, run: dict[str, Any]
) -> None:
    files = sorted(photos.rglob("*.jpg"))
    rows = [{"image": str(file), "label": i % 2, "caption": file.name, "weight": i / 4} for i, file in enumerate(files)]
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    fields = {"image": None, "caption": {"type": "text"}, "weight": {"type": "number"}}
    document = yaml.safe_load(config_of(tmp_path, photos, **run).read_text())
    document["source"] = {
        "listing": str(tmp_path / "x.jsonl"),
        "fields": fields | ({"label": None} if labelled else {}),
    }
    (tmp_path / "x.yaml").write_text(yaml.safe_dump(document, sort_keys=False))
    with gpuflow.load(tmp_path / "x.yaml") as loader:
        for epoch in range(2):
            for batch in loader:
                assert batch.epoch == epoch
                indices = batch.indices.tolist()
                assert [view.shape[1] for view in batch.views.values()] == [len(indices)] * 3
                assert batch["caption"] == [rows[i]["caption"] for i in indices]
                assert batch["weight"].tolist() == [rows[i]["weight"] for i in indices]
                assert [target["caption"] for target in batch.targets()] == batch["caption"]
                if labelled:
                    assert batch.labels.tolist() == [rows[i]["label"] for i in indices]
                else:
                    assert batch[1] == batch.targets()
            workers = loader._feed.decoder.workers
            if workers is not None:
                workers._pool.wait_until_ready(120)


def test_annotations_of_coco_do_not_follow_views(photos: Path, tmp_path: Path) -> None:
    image = {"id": 1, "file_name": next(photos.rglob("*.jpg")).relative_to(photos).as_posix(), "width": 9, "height": 9}
    known = {"images": [image], "annotations": [], "categories": [{"id": 1, "name": "thing"}]}
    (tmp_path / "x.json").write_text(json.dumps(known))
    document = yaml.safe_load(config_of(tmp_path, photos).read_text())
    document["source"] = {"coco": str(tmp_path / "x.json"), "images": str(photos)}
    (tmp_path / "x.yaml").write_text(yaml.safe_dump(document))
    with pytest.raises(
        ConfigError, match=r"x\.yaml: pipelines\.train\.views move the pixels in several ways, and boxes"
    ):
        gpuflow.load(tmp_path / "x.yaml")


def test_explain_and_placement_say_where_views_are_made(photos: Path, tmp_path: Path) -> None:
    config = read_config(config_of(tmp_path, photos), STAGES)
    assert explain_gpu(config, "train") == (
        "decoded on the CPU: in view 'half', torchvision(name='RandomErasing', parameters=(('inplace', True), "
        "('p', 1.0))) comes before the images have one size; put a crop or a resize to a fixed size first"
    )
    console = Console(width=160, file=io.StringIO())
    with console.capture() as capture:
        console.print(explain(config))
    text = capture.get()
    assert "global x 2" in text and "half x 1" in text and "2 x float32 24x24x3 nchw and local, 3 x uint8" in text


def test_what_takes_one_image_of_a_sample_refuses_views(photos: Path, tmp_path: Path) -> None:
    config = read_config(config_of(tmp_path, photos), STAGES)
    with pytest.raises(ConfigError, match=r"pipelines\.train\.views give several images of each sample"):
        Trainer(config)
    with pytest.raises(ConfigError, match=r"pipelines\.train\.decode\.backend is gpu, but the loader's device is the"):
        gpuflow.load(config_of(tmp_path, photos), overrides=["pipelines.train.decode.backend=gpu"])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no NVIDIA GPU")
@pytest.mark.parametrize(("share", "decoded"), [(0.0, 12), (0.4, 3 + 3 + 1)])
def test_on_a_gpu_each_file_is_decoded_once_for_all_views(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float, decoded: int
) -> None:
    """The views are within two levels of the CPU's, and those of the CPU's share of a batch are its own."""
    counts, decode = list[int](), NvjpegDecoder.decode

    def counted(decoder: NvjpegDecoder, files: JpegBatch, *others: Any) -> Any:
        counts.append(len(files.data))
        return decode(decoder, files, *others)

    monkeypatch.setattr(NvjpegDecoder, "decode", counted)
    path = config_of(tmp_path, photos, SCALED, deterministic=True)
    overrides = [f"pipelines.train.decode.cpu_share={share}"]
    with gpuflow.load(path) as here, gpuflow.load(path, device="cuda", overrides=overrides) as there:
        pairs = list(zip(here, there, strict=True))
        stats = there.stats()
    assert sum(counts) == decoded and (stats["engine_images"], stats["cpu_images"]) == (decoded, 0)
    for a, b in pairs:
        assert a.labels.tolist() == b.labels.tolist() and a.indices.tolist() == b.indices.tolist()
        own = len(a.labels) - round(share * len(a.labels))
        for name, view in a.views.items():
            found = b.views[name]
            assert found.is_cuda and (found.dtype, found.stride()) == (view.dtype, view.stride())
            apart = (found.cpu().float() - view.float()).abs()
            assert apart.mean() < 0.25 and (apart > 2).float().mean() < 0.005, name
            assert torch.equal(found[:, own:].cpu(), view[:, own:]), name


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no NVIDIA GPU")
def test_views_that_a_gpu_cannot_run_are_made_by_the_cpu(photos: Path, tmp_path: Path) -> None:
    path = config_of(tmp_path, photos)
    with gpuflow.load(path) as here, gpuflow.load(path, device="cuda") as there:
        for a, b in zip(here, there, strict=True):
            assert a.labels.tolist() == b.labels.tolist()
            for name, view in a.views.items():
                assert b.views[name].is_cuda
                assert b.views[name].stride() == view.stride()
                assert torch.equal(b.views[name].cpu(), view)
