"""`gpuflow.transform`: the stages on batches that the caller holds give what a loader gives for the same pixels."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from torchvision.io import ImageReadMode, decode_image

import gpuflow
from gpuflow.errors import BadSampleError, ConfigError, LoaderError, LoaderTimeout
from gpuflow.execute.cpu.runner import CpuRunner
from gpuflow.loader.transform import _CpuRunner
from tests.datasets import TRAIN, VAL, Entries, deadline, nothing_left_behind, pixels, write_config
from tests.forking import Interpreter
from tests.texts import pin

JITTER_FIRST: Entries = (
    {"decode": {}},
    {"color_jitter": {"brightness": 0.4, "hue": 0.2}},
    {"random_crop": {"size": 24}},
    {"torchvision": {"name": "RandomErasing", "p": 0.9}},
    {"normalize": {"dtype": "bfloat16", "layout": "nhwc"}},
)
GRAY: Entries = ({"decode": {"color": "gray"}}, {"random_resized_crop": {"size": 20}})
PIPELINES = {"train": TRAIN, "val": VAL, "jitter first": JITTER_FIRST, "gray": GRAY}


@pytest.fixture(autouse=True)
def _in_time() -> Iterator[None]:
    with deadline(60):
        yield


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As PNG, so that every decoder gives the same pixels."""
    root = tmp_path_factory.mktemp("photos")
    for label in range(2):
        (root / f"class{label}").mkdir()
        for number in range(6):
            cv2.imwrite(str(root / f"class{label}" / f"{number}.png"), pixels(label, number)[..., ::-1])
    return root


def config_of(folder: Path, photos: Path, stages: Entries = TRAIN, **run: Any) -> Path:
    return write_config(folder / "x.yaml", photos, train=stages, seed=5, run=run, batch={"size": 5})


def held(loader: gpuflow.Loader, batch: gpuflow.Batch, *, gray: bool) -> list[torch.Tensor]:
    """The same samples, decoded by torchvision, or by OpenCV in gray, where torchvision weighs colours otherwise."""
    paths = [loader.dataset.path(int(index)) for index in batch.indices]
    if gray:
        return [torch.from_numpy(cv2.imread(path, cv2.IMREAD_GRAYSCALE))[None] for path in paths]
    return [decode_image(path, ImageReadMode.RGB) for path in paths]


def random_images(count: int = 7, height: int = 40, width: int = 44) -> torch.Tensor:
    return torch.randint(256, (count, 3, height, width), dtype=torch.uint8, generator=torch.manual_seed(0))


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("name", PIPELINES)
def test_the_same_pixels_give_what_the_loader_gives(photos: Path, tmp_path: Path, name: str, threads: int) -> None:
    path = config_of(tmp_path, photos, PIPELINES[name], threads=threads)
    with gpuflow.load(path) as loader, gpuflow.transform(path) as transform:
        for epoch in range(2):
            for batch in loader:
                first = batch.step * 5
                images = held(loader, batch, gray=name == "gray")
                result = transform(images, epoch=epoch, positions=range(first, first + len(images)))
                assert torch.equal(result, batch.images)
                assert result.dtype == batch.images.dtype
                assert result.stride() == batch.images.stride()
        assert transform.preprocessing == loader.preprocessing


def test_a_batch_a_list_and_any_memory_format_give_the_same(photos: Path, tmp_path: Path) -> None:
    images = random_images()
    writes = {"torchvision": {"name": "RandomErasing", "p": 1.0, "inplace": True}}
    stages = [JITTER_FIRST[0], writes, *JITTER_FIRST[1:]]
    with gpuflow.transform(config_of(tmp_path, photos, stages)) as transform:
        expected = transform(images, epoch=1, positions=range(7))
        before = images.clone()
        for other in (list(images), images.contiguous(memory_format=torch.channels_last), [*images.unbind()]):
            assert torch.equal(transform(other, epoch=1, positions=torch.arange(7)), expected)
        assert torch.equal(images, before), "the caller's images stay as they are"
        alone = [transform(images[i : i + 1], epoch=1, positions=[i]) for i in range(7)]
        assert torch.equal(torch.cat(alone), expected)
        assert not torch.equal(transform(images, epoch=2, positions=range(7)), expected)
        assert transform(images[:0], epoch=1, positions=[]).shape == (0, 3, 24, 24)


def test_results_that_are_kept_do_not_change_and_memory_of_others_is_used_again(photos: Path, tmp_path: Path) -> None:
    images = random_images()
    for stages in (VAL, JITTER_FIRST):
        with gpuflow.transform(config_of(tmp_path, photos, stages)) as transform:
            kept, addresses = [], set()
            for epoch in range(12):
                result = transform(images, epoch=epoch, positions=range(7))
                addresses.add(result.data_ptr())
                if epoch % 3 == 0:
                    kept.append((epoch, result, result.clone()))
                elif epoch % 3 == 1:
                    kept.append((epoch, result[2:3], result[2:3].clone()))
            assert len(addresses) < 12
            assert len({result.untyped_storage().data_ptr() for _, result, _ in kept}) == len(kept)
            assert all(torch.equal(result, copy) for _, result, copy in kept)
            one = transform(images[:1], epoch=0, positions=[0])
            assert one.untyped_storage().nbytes() == one.nbytes, "a single image does not keep a batch's memory"


VIEWS = {
    "global": {"count": 2, "stages": list(TRAIN[1:])},
    "local": {"count": 3, "stages": [{"random_resized_crop": {"size": 9}}]},
}


@pytest.mark.parametrize("threads", [1, 2])
def test_views_are_those_of_the_loader(photos: Path, tmp_path: Path, threads: int) -> None:
    train = {"views": VIEWS, "batch": {"size": 5}}
    path = write_config(tmp_path / "x.yaml", photos, pipelines={"train": train}, run={"threads": threads})
    with gpuflow.load(path) as loader, gpuflow.transform(path) as transform:
        for batch in loader:
            images, first = held(loader, batch, gray=False), batch.step * 5
            views = transform(images, epoch=0, positions=range(first, first + len(images)))
            assert list(views) == list(batch.views)
            for name, view in views.items():
                assert torch.equal(view, batch.views[name])
                assert view.stride() == batch.views[name].stride()


def test_the_file_needs_no_source_and_the_draws_have_its_seed(tmp_path: Path) -> None:
    path = config_of(tmp_path, tmp_path / "missing")
    images = random_images()
    with gpuflow.transform(path) as a, gpuflow.transform(path, overrides=["source.seed=6"]) as b:
        assert repr(a) == f"<gpuflow.Transform {a._program.pipeline!r}; on cpu>"
        assert not torch.equal(a(images, epoch=0, positions=range(7)), b(images, epoch=0, positions=range(7)))


@pytest.mark.parametrize(
    ("images", "positions", "shown"),
    [
        (random_images().float(), range(7), "images[0], got float32 [3, 40, 44] on cpu"),
        (random_images()[:, :1], range(7), "images[0], got uint8 [1, 40, 44] on cpu"),
        (
            [*random_images(2), torch.zeros((0, 3), dtype=torch.uint8)],
            range(3),
            "images[2], got uint8 [0, 3] on cpu",
        ),
        ([*random_images(1), b"jpeg"], range(2), "images[1], got bytes"),
        (random_images()[0], range(3), "images, got [3, 40, 44]"),
        (
            torch.zeros((1, 3, 8, 8), dtype=torch.uint8, device="meta"),
            [0],
            "images[0], got uint8 [3, 8, 8] on meta",
        ),
        (random_images(), range(6), "positions, got int64 [6]"),
        (random_images(2), [0.5, 1], "positions, got float64 [2]"),
        (random_images(2), [0, -1], "positions, got -1"),
    ],
)
def test_other_input_is_refused(photos: Path, tmp_path: Path, images: Any, positions: Any, shown: str) -> None:
    with gpuflow.transform(config_of(tmp_path, photos)) as transform:
        with pytest.raises(ValueError, match="must be") as found:
            transform(images, epoch=0, positions=positions)
        place, _, value = shown.partition(", ")
        text = pin(found.value)
        assert text.startswith(f"{place} must be ") and text.endswith(f", {value}")


@pytest.mark.parametrize(
    ("epoch", "shown"), [(-1, "-1"), (0.5, "0.5"), (1.0, "1.0"), ("0", "'0'"), (None, "null"), (2**63, str(2**63))]
)
def test_an_epoch_is_a_whole_number(photos: Path, tmp_path: Path, epoch: Any, shown: str) -> None:
    with gpuflow.transform(config_of(tmp_path, photos)) as transform:
        with pytest.raises(ValueError, match=r"^epoch must be") as found:
            transform(random_images(1), epoch=epoch, positions=[0])
        assert pin(found.value).endswith(f", got {shown}")
        expected = transform(random_images(1), epoch=3, positions=[0])
        others: tuple[Any, ...] = np.int32(3), torch.tensor(3)
        for other in others:
            assert torch.equal(transform(random_images(1), epoch=other, positions=[0]), expected)
        with pytest.raises(ValueError, match=r"^positions must be .*, got 9223372036854775808$") as found:
            transform(random_images(1), epoch=3, positions=np.array([2**63], np.uint64))
        pin(found.value)
        assert len(transform(random_images(1), epoch=2**63 - 1, positions=[2**62])) == 1


@pytest.mark.parametrize("threads", [1, 2])
def test_an_image_that_a_stage_cannot_take_is_named(photos: Path, tmp_path: Path, threads: int) -> None:
    path = config_of(tmp_path, photos, ({"decode": {}}, {"random_crop": {"size": 32}}), threads=threads)
    images = [*random_images(5), random_images(1, 20, 50)[0], *random_images(2)]
    with gpuflow.transform(path) as transform:
        with pytest.raises(BadSampleError) as found:
            transform(images, epoch=0, positions=range(8))
        assert "20x50 pixels" in pin(found.value)
        assert (found.value.stage, found.value.index, found.value.path) == ("random_crop", 5, "images[5]")
        del images[5]
        assert transform(images, epoch=0, positions=range(7)).shape == (7, 3, 32, 32), "it works on"


def test_threads_end(photos: Path, tmp_path: Path) -> None:
    with nothing_left_behind():
        transform = gpuflow.transform(config_of(tmp_path, photos))
        transform(random_images(), epoch=0, positions=range(7))
        transform.close()
        transform(random_images(), epoch=0, positions=range(7))
        del transform


def test_a_wait_for_stages_ends(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()
    monkeypatch.setattr(CpuRunner, "run_images", lambda *_: over.wait(30) and [])
    with gpuflow.transform(config_of(tmp_path, photos, timeout_s=0.1)) as transform:
        try:
            with pytest.raises(LoaderTimeout, match=r"did not finish 7 images within run\.timeout_s = 0\.1 s"):
                transform(random_images(), epoch=0, positions=range(7))
        finally:
            over.set()


def test_threads_that_are_late_do_not_write_into_later_results(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with gpuflow.transform(config_of(tmp_path, photos)) as transform:
        expected = transform(random_images(), epoch=0, positions=range(7))
        late, runner = threading.Event(), transform._runner
        assert isinstance(runner, _CpuRunner)
        run_images = CpuRunner.run_images

        def slow(self: Any, images: Any, keys: Any, slots: Any) -> Any:
            late.wait(30)
            slots[...] = 7
            return run_images(self, images, keys, slots)

        monkeypatch.setattr(CpuRunner, "run_images", slow)
        runner._timeout_seconds = 0.1
        with pytest.raises(LoaderTimeout):
            transform(random_images(), epoch=1, positions=range(7))
        monkeypatch.undo()
        runner._timeout_seconds = 30
        late.set()
        for _ in range(5):
            result = transform(random_images(), epoch=0, positions=range(7))
            assert torch.equal(result, expected), "threads that are late write elsewhere"


def test_an_error_of_a_stage_is_raised_as_it_is(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise TimeoutError("a stage's own")

    monkeypatch.setattr(CpuRunner, "run_images", fail)
    with (
        gpuflow.transform(config_of(tmp_path, photos)) as transform,
        pytest.raises(TimeoutError, match="a stage's own"),
    ):
        transform(random_images(), epoch=0, positions=range(7))


FORK = """
import os, signal, sys, torch, gpuflow
images = torch.randint(256, (7, 3, 40, 44), dtype=torch.uint8)
transform = gpuflow.transform(sys.argv[1])
expected = transform(images, epoch=0, positions=range(7))
locks = transform._runner._lock, transform._runner._results._lock
for lock in locks:
    lock.acquire()  # as another thread may at this moment
if (child := os.fork()) == 0:
    signal.alarm(20)
    print(torch.equal(transform(images, epoch=0, positions=range(7)), expected), flush=True)
    os._exit(0)
os.waitpid(child, 0)
for lock in locks:
    lock.release()
"""


def test_it_works_in_a_forked_child(photos: Path, tmp_path: Path, interpreter: Interpreter) -> None:
    """As in a worker of a DataLoader that runs it on what it collates."""
    done = interpreter.run(FORK, str(config_of(tmp_path, photos)))
    assert done.stdout == "True\n", done.stderr


@pytest.mark.parametrize("send", [pickle.dumps, copy.copy, copy.deepcopy])
def test_one_that_is_sent_to_another_process_says_what_to_do(
    send: Callable[[object], object], photos: Path, tmp_path: Path
) -> None:
    """As a DataLoader does whose workers are not forked."""
    with gpuflow.transform(config_of(tmp_path, photos)) as transform, pytest.raises(TypeError) as caught:
        send(transform)
    assert str(caught.value) == (
        "a transform cannot be pickled or copied: it has threads; make it in the process that calls it, as in the "
        "worker_init_fn of a DataLoader"
    )


def test_a_pipeline_that_cannot_run_so_is_refused(photos: Path, tmp_path: Path) -> None:
    path = config_of(tmp_path, photos)
    with pytest.raises(ConfigError, match="has no pipeline 'trian'; did you mean 'train'"):
        gpuflow.transform(path, "trian")
    preset = ["pipelines.train={preset: torchpipe_cpu, height: 32, width: 32, stages: []}"]
    with pytest.raises(ConfigError, match=r"pipelines\.train\.preset decodes and resizes by itself"):
        gpuflow.transform(path, overrides=preset)
    mixed = config_of(tmp_path, photos, (*TRAIN, {"mixup": {}}))
    with pytest.raises(ConfigError) as found:
        gpuflow.transform(mixed)
    assert f"pipelines.train.stages[{len(TRAIN)}].mixup mixes the images and labels of a whole batch" in str(
        found.value
    )
    assert gpuflow.transform(mixed, "val").preprocessing


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_a_gpu_device_cuda_is_an_error(photos: Path, tmp_path: Path) -> None:
    with pytest.raises(LoaderError, match="torch sees no GPU here"):
        gpuflow.transform(config_of(tmp_path, photos), device="cuda")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no NVIDIA GPU")
@pytest.mark.parametrize("name", ["train", "val", "gray"])
def test_on_a_gpu_it_gives_what_the_cpu_gives(photos: Path, tmp_path: Path, name: str) -> None:
    path = config_of(tmp_path, photos, PIPELINES[name])
    channels = 1 if name == "gray" else 3
    images = [torch.from_numpy(np.ascontiguousarray(pixels(0, i)[..., :channels])).permute(2, 0, 1) for i in range(9)]
    with gpuflow.transform(path) as here, gpuflow.transform(path, device="cuda") as there:
        expected = here(images, epoch=2, positions=range(9))
        for given in ([image.cuda() for image in images], [image.contiguous().cuda() for image in images]):
            with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
                result = there(given, epoch=2, positions=range(9))
                found = result.cpu()
            assert result.dtype == expected.dtype
            for layout in (torch.contiguous_format, torch.channels_last):
                assert result.is_contiguous(memory_format=layout) == expected.is_contiguous(memory_format=layout)
            level = 1.0 if expected.dtype == torch.uint8 else 1 / (255 * 0.224)
            assert (found.double() - expected.double()).abs().max() <= 2.01 * level
        with pytest.raises(ValueError, match=r"images\[0\] must be a tensor, uint8 .* on cuda:0, got .* on cpu"):
            there(images, epoch=2, positions=range(9))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no NVIDIA GPU")
@pytest.mark.parametrize("in_views", [False, True])
def test_on_a_gpu_batches_in_a_row_are_what_single_ones_are(photos: Path, tmp_path: Path, in_views: bool) -> None:
    stages: Entries = (
        {"decode": {}},
        {"random_resized_crop": {"size": 40}},
        {"rand_augment": {}},
        {"gaussian_blur": {"kernel_size": 5, "probability": 0.5}},
        {"random_erasing": {"probability": 0.5}},
        {"normalize": {}},
    )
    views = {"views": {"large": {"count": 2, "stages": list(stages[1:])}}}
    pipelines = {"pipelines": {"train": {"batch": {"size": 5}, **(views if in_views else {"stages": list(stages)})}}}
    path = write_config(tmp_path / "x.yaml", photos, seed=5, **pipelines)
    whole = torch.stack([torch.from_numpy(pixels(0, i)[:40, :44].copy()) for i in range(8)]).cuda().permute(0, 3, 1, 2)
    mixed = [torch.from_numpy(pixels(0, i)).cuda().permute(2, 0, 1) for i in range(8)]
    calls: list[tuple[int, int, Any]] = [(epoch, 8 * step, whole) for epoch in range(2) for step in range(21)]
    calls += [(2, 8 * step, mixed if step % 3 else whole) for step in range(12)]
    with gpuflow.transform(path, device="cuda") as in_a_row:
        found = [in_a_row(given, epoch=epoch, positions=range(first, first + 8)) for epoch, first, given in calls]
    for (epoch, first, given), result in zip(calls, found, strict=True):
        with gpuflow.transform(path, device="cuda") as alone:
            expected = alone(given, epoch=epoch, positions=range(first, first + 8))
        pairs = zip(result.values(), expected.values(), strict=True) if in_views else [(result, expected)]
        assert all(torch.equal(one, other) for one, other in pairs), (epoch, first)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no NVIDIA GPU")
def test_on_a_gpu_memory_is_kept_for_few_streams(photos: Path, tmp_path: Path) -> None:
    stages: Entries = ({"decode": {}}, {"random_resized_crop": {"size": 224}}, {"rand_augment": {}}, {"normalize": {}})
    images = random_images(64).cuda()
    streams: list[Any] = [torch.cuda.Stream() for _ in range(12)]  # type: ignore[no-untyped-call]
    with gpuflow.transform(config_of(tmp_path, photos, stages), device="cuda") as transform:
        expected, kept = transform(images, epoch=0, positions=range(64)), []
        for stream in streams:
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                firsts = (128, 64, 192, 0)
                results = [transform(images, epoch=0, positions=range(first, first + 64)) for first in firsts]
            torch.cuda.synchronize()
            assert torch.equal(results[-1], expected)
            kept.append(torch.cuda.memory_allocated())
    assert kept[-1] <= kept[4] + 1e6


ON_A_GPU: dict[str, tuple[Entries, int]] = {
    "warps": (
        (
            {"decode": {}},
            {"rotate": {"degrees": 40, "border": "reflect"}},
            {"flip": {"horizontal": 0.5}},
            {"perspective": {"distortion_scale": 0.4, "probability": 1.0, "border": "edge"}},
            {"affine": {"degrees": 20, "shear": 10, "fill": 114}},
            {"letterbox": {"size": 50}},
        ),
        1,
    ),
    "nearest": (
        ({"decode": {}}, {"affine": {"degrees": 30, "interpolation": "nearest"}}, {"center_crop": {"size": 30}}),
        0,
    ),
    "colours": (
        (
            {"decode": {}},
            {"center_crop": {"size": 30}},
            {"color_jitter": {"brightness": 0.4, "contrast": 0.4, "saturation": 0.4, "hue": 0.1}},
            {"autocontrast": {}},
            {"equalize": {}},
            {"grayscale": {"probability": 0.3}},
            {"posterize": {"bits": 4, "probability": 0.5}},
            {"solarize": {"probability": 0.5}},
        ),
        0,
    ),
    "local": (
        (
            {"decode": {}},
            {"center_crop": {"size": 30}},
            {"gaussian_blur": {"kernel_size": 9, "sigma": [0.2, 2.0]}},
            {"sharpness": {"amount": 0.7}},
        ),
        1,
    ),
    "rand_augment": (({"decode": {}}, {"center_crop": {"size": 30}}, {"rand_augment": {}}), 1),
    "trivial_augment": (({"decode": {}}, {"center_crop": {"size": 30}}, {"trivial_augment": {}}), 1),
    "auto_augment": (({"decode": {}}, {"center_crop": {"size": 30}}, {"auto_augment": {}}), 1),
}


def test_the_pipelines_of_the_test_on_a_gpu_are_valid(photos: Path, tmp_path: Path) -> None:
    for stages, _ in ON_A_GPU.values():
        with gpuflow.transform(config_of(tmp_path, photos, stages)) as transform:
            assert len(transform(random_images(), epoch=0, positions=range(7))) == 7


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no NVIDIA GPU")
@pytest.mark.parametrize("name", ON_A_GPU)
def test_stages_on_a_gpu_give_what_they_give_on_the_cpu(photos: Path, tmp_path: Path, name: str) -> None:
    """But for the few pixels whose place in the image lies between two, where the nearest one is looked up."""
    stages, most = ON_A_GPU[name]
    path = config_of(tmp_path, photos, stages)
    images = [torch.from_numpy(pixels(0, i)).permute(2, 0, 1) for i in range(60)]
    with gpuflow.transform(path) as here, gpuflow.transform(path, device="cuda") as there:
        for epoch in range(3):
            expected = here(images, epoch=epoch, positions=range(60)).int()
            found = there([image.cuda() for image in images], epoch=epoch, positions=range(60)).cpu().int()
            apart = (found - expected).abs().amax(1) > most
            assert apart.double().mean() < 0.001, f"{apart.sum()} of {apart.numel()} pixels"
