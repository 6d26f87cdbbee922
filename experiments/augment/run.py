"""Measures how many images a second gpuflow and its peers augment: photographs that are decoded already, to 224 pixels.

    python experiments/augment/run.py --out experiments/augment/results.csv
    python experiments/augment/run.py --device cuda --batch 256 --arms gpuflow torchvision-batch

Arms alternate within each repeat. A figure is printed as it comes. In the file, rows of arms that were not measured
stay, so that arms can be measured one after the other. See README.md for what each arm runs.
"""

from __future__ import annotations

import argparse
import csv
import functools
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch

import gpuflow
from gpuflow.config import read_config
from gpuflow.execute.gpu import repeated_passes
from gpuflow.stages import STAGES, RandomErasing
from gpuflow.tools.bench import COLUMNS, row, write_results
from gpuflow.tools.samples import make_samples

HERE = Path(__file__).parent
CONFIG = HERE / "recipes.yaml"
RECIPES = ("timm", "view", "geometry")
THREADS = 2
HEIGHT, WIDTH = 375, 500
BATCHES = 3
"""The number of batches of photographs, which are taken in turn."""
WARM_UP_CALLS, COMPILED_CALLS = 2, 16
"""Calls before an arm is measured; of a compiled one, which compiles anew for operations that it draws for the first
time."""
MEAN_LEVELS = [124, 116, 104]
"""ImageNet's mean colour, which erased boxes get."""

Images = list[torch.Tensor]
"""Photographs uint8 [3, H, W], interleaved in memory, as decoders leave them."""
Run = Callable[[Images], torch.Tensor]
Make = Callable[[str, torch.device], Run]


class Missing(Exception):
    """An arm that has no such recipe, or that is not installed. Says why."""


# --- the arms: each makes a function from photographs to a float32 batch [N, 3, 224, 224] -----------------------------


def of_gpuflow(recipe: str, device: torch.device) -> Run:
    transform, steps = gpuflow.transform(CONFIG, recipe, device=device), itertools.count()

    def run(images: Images) -> torch.Tensor:
        first = next(steps) * len(images)
        result: torch.Tensor = transform(images, epoch=0, positions=range(first, first + len(images)))
        return result

    return run


def of_gpuflow_without_replay(recipe: str, device: torch.device) -> Run:
    """Draw for each batch alone, and launch its kernels one by one."""
    run = of_gpuflow(recipe, device)

    def first(images: Images) -> torch.Tensor:
        can_be_repeated = repeated_passes._can_be_repeated
        repeated_passes._can_be_repeated = lambda passes: False
        try:
            return run(images)  # the first call of a stream makes its passes
        finally:
            repeated_passes._can_be_repeated = can_be_repeated

    calls = itertools.chain([first], itertools.repeat(run))
    return lambda images: next(calls)(images)


def torchvision_transforms(recipe: str) -> list[Any]:
    """The recipe's stages after decoding, each as torchvision's transform."""
    stages = read_config(CONFIG, STAGES).programs[recipe].pipeline.stages
    return [_erasing(stage) if isinstance(stage, RandomErasing) else stage.torchvision() for stage in stages[1:]]


def _erasing(stage: RandomErasing) -> Any:
    """torchvision's, which the stage itself does not name."""
    from torchvision.transforms import v2

    return v2.RandomErasing(stage.probability, stage.scale, stage.ratio, value=MEAN_LEVELS)


def of_torchvision_loop(recipe: str, device: torch.device) -> Run:
    """One image at a time; on a CPU in as many threads as gpuflow has."""
    transforms = torchvision_transforms(recipe)

    def one(image: torch.Tensor) -> torch.Tensor:
        for transform in transforms:
            image = transform(image)
        return image

    if device.type == "cuda":
        return lambda images: torch.stack([one(image) for image in images])
    pool = ThreadPoolExecutor(THREADS, initializer=torch.set_num_threads, initargs=(1,))
    return lambda images: torch.stack(list(pool.map(one, images)))


@contextmanager
def torch_threads() -> Iterator[None]:
    """Let PyTorch's operations use as many threads as gpuflow has."""
    torch.set_num_threads(THREADS)
    try:
        yield
    finally:
        torch.set_num_threads(1)


def of_torchvision_batch(recipe: str, device: torch.device) -> Run:
    """All images of a batch get the same random numbers, which training does not want."""
    transforms = torchvision_transforms(recipe)

    def run(images: Images) -> torch.Tensor:
        with torch_threads():
            batch = torch.stack(images)
            for transform in transforms:
                batch = transform(batch)
        return batch

    return run


def of_cvcuda(recipe: str, device: torch.device, *, batched: bool) -> Run:
    """`cvcuda.tv.Compose` of torchvision's transforms: on each image, or on a batch with the same random numbers."""
    if device.type != "cuda":
        raise Missing("CV-CUDA runs on a GPU")
    try:
        from cvcuda.tv import Compose
    except ImportError as error:
        raise Missing(f"CV-CUDA cannot be imported: {error}") from None
    try:
        compose = Compose(torchvision_transforms(recipe))
    except TypeError as error:
        raise Missing(f"CV-CUDA has not all of it: {error}") from None
    if batched:
        return lambda images: compose(torch.stack(images).contiguous())
    return lambda images: torch.stack([compose(image.contiguous()) for image in images])


def of_opencv(recipe: str, device: torch.device) -> Run:
    """Threads that crop, resize without antialiasing, flip and normalize into the batch."""
    if recipe != "geometry" or device.type != "cpu":
        raise Missing("OpenCV has the geometry alone, on a CPU")
    from torchvision.transforms.v2 import RandomResizedCrop

    mean, std = (np.array(x, np.float32) * 255 for x in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    pool, rng = ThreadPoolExecutor(THREADS), np.random.default_rng(0)
    boxes = RandomResizedCrop(224)

    def one(image: torch.Tensor, flipped: bool, target: torch.Tensor) -> None:
        box = boxes.make_params([image])
        y, x, height, width = (box[name] for name in ("top", "left", "height", "width"))
        pixels = image.permute(1, 2, 0).numpy()[y : y + height, x : x + width]
        small = cv2.resize(pixels, (224, 224), interpolation=cv2.INTER_LINEAR)
        small = cv2.flip(small, 1) if flipped else small
        normal = (small.astype(np.float32) - mean) / std
        target.numpy()[:] = normal.transpose(2, 0, 1)

    def run(images: Images) -> torch.Tensor:
        batch = torch.empty(len(images), 3, 224, 224)
        list(pool.map(one, images, (rng.random(len(images)) < 0.5).tolist(), batch))
        return batch

    cv2.setNumThreads(1)
    return run


def of_kornia(recipe: str, device: torch.device) -> Run:
    """Batches in float32. Its rand_augment draws the operations once for a batch."""
    try:
        import kornia.augmentation as k
        from kornia.augmentation.auto import RandAugment
    except ImportError as error:
        raise Missing(f"kornia cannot be imported: {error}") from None
    scale = (0.4, 1.0) if recipe == "view" else (0.08, 1.0)
    stages: list[Any] = [k.RandomResizedCrop((224, 224), scale=scale), k.RandomHorizontalFlip(p=0.5)]
    if recipe == "timm":
        stages += [RandAugment(n=2, m=9), k.RandomErasing(p=0.25, value=0.45)]
    if recipe == "view":
        stages += [
            k.ColorJitter(0.4, 0.4, 0.2, 0.1, p=0.8),
            k.RandomGrayscale(p=0.2),
            k.RandomGaussianBlur((23, 23), (0.1, 2.0), p=0.5),
            k.RandomSolarize(thresholds=(0.5, 0.5), additions=(0.0, 0.0), p=0.2),
        ]
    stages.append(k.Normalize(torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])))
    module = torch.nn.Sequential(*stages).to(device)
    call: Any = torch.compile(module) if device.type == "cuda" else module

    def run(images: Images) -> torch.Tensor:
        with torch_threads():
            result: torch.Tensor = call(torch.stack(images).float() / 255)
        return result

    return run


def of_dali(recipe: str, device: torch.device) -> Run:
    """random_resized_crop, then crop_mirror_normalize, on images that are in the GPU's memory."""
    if recipe != "geometry" or device.type != "cuda":
        raise Missing("DALI has the geometry alone here, on a GPU")
    if find_spec("nvidia.dali" if find_spec("nvidia") else "dali") is None:
        raise Missing("DALI is not installed")
    from nvidia.dali import fn, pipeline_def, types
    from nvidia.dali.plugin.pytorch import feed_ndarray

    given: list[Images] = []

    build: Any = pipeline_def(batch_size=256, num_threads=THREADS, device_id=device.index or 0, prefetch_queue_depth=1)

    def graph() -> Any:
        images = fn.external_source(lambda: given[-1], device="gpu", layout="HWC", batch=True)
        images = fn.random_resized_crop(images, size=224, random_area=(0.08, 1.0))
        mirror = fn.random.coin_flip(probability=0.5)
        mean, std = [255 * x for x in (0.485, 0.456, 0.406)], [255 * x for x in (0.229, 0.224, 0.225)]
        return fn.crop_mirror_normalize(images, mirror=mirror, dtype=types.FLOAT, mean=mean, std=std)

    pipeline = build(graph)(exec_async=False, exec_pipelined=False)
    pipeline.build()

    def run(images: Images) -> torch.Tensor:
        given[:] = [[image.permute(1, 2, 0) for image in images]]
        (result,) = pipeline.run()
        batch = torch.empty(len(images), 3, 224, 224, device=device)
        feed_ndarray(result.as_tensor(), batch, cuda_stream=torch.cuda.current_stream())
        return batch

    return run


ARMS: dict[str, Make] = {
    "gpuflow": of_gpuflow,
    "gpuflow-without-replay": of_gpuflow_without_replay,
    "torchvision-loop": of_torchvision_loop,
    "torchvision-batch": of_torchvision_batch,
    "cvcuda-loop": functools.partial(of_cvcuda, batched=False),
    "cvcuda-batch": functools.partial(of_cvcuda, batched=True),
    "kornia": of_kornia,
    "opencv": of_opencv,
    "dali": of_dali,
}
ON_CPU = ("gpuflow", "torchvision-loop", "opencv", "kornia")
ON_CUDA = ("gpuflow", "torchvision-loop", "torchvision-batch", "cvcuda-loop", "cvcuda-batch", "kornia", "dali")


# --- measuring --------------------------------------------------------------------------------------------------------


def photographs(count: int, device: torch.device) -> list[Images]:
    """Batches of `count` decoded photographs, all of one size: kornia and torchvision-batch take no other."""
    with tempfile.TemporaryDirectory() as folder:
        make_samples(folder, count * BATCHES)
        paths = sorted(Path(folder).rglob("*.jpg"))
        pixels = [cv2.imread(str(path), cv2.IMREAD_COLOR_RGB) for path in paths]
    same = [cv2.resize(image, (WIDTH, HEIGHT), interpolation=cv2.INTER_AREA) for image in pixels if image is not None]
    np.random.default_rng(0).shuffle(same)
    images = [torch.from_numpy(image).to(device).permute(2, 0, 1) for image in same]
    return [images[i : i + count] for i in range(0, count * BATCHES, count)]


def seconds_of(run: Run, batches: Iterator[Images], seconds: float, device: torch.device) -> float:
    """The time of one call: the mean over calls that take at least `seconds` together.

    On a GPU they are queued one after the other, as a training queues its work; the last one's end counts.
    """
    calls, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds or calls < 2:
        run(next(batches))
        calls += 1
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / calls


def gpu_seconds_of(run: Callable[[], object], calls: int = 5) -> list[float]:
    """The time that kernels and copies of each of some calls take on the GPU together, on all streams."""
    from torch.profiler import ProfilerActivity, profile

    taken = []
    for _ in range(calls):
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            run()
            torch.cuda.synchronize()
        taken.append(sum(event.self_device_time_total for event in profiler.key_averages()) / 1e6)
    return taken


def resnet50_step(count: int, device: torch.device) -> Callable[[], object]:
    """A training step of a ResNet-50 on `count` images of 224 pixels, channels last, in bfloat16."""
    from torchvision.models import resnet50

    model = resnet50(weights=None).to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    images = torch.randn(count, 3, 224, 224, device=device).contiguous(memory_format=torch.channels_last)
    labels = torch.randint(1000, (count,), device=device)

    def step() -> None:
        with torch.autocast(device.type, dtype=torch.bfloat16):
            loss = torch.nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    for _ in range(3):
        step()
    return step


def measure_gpu_time(recipes: Sequence[str], batches: Sequence[Images], device: torch.device) -> list[dict[str, Any]]:
    """What gpuflow's stages take of the GPU next to a training step on as many images."""
    count, rows = len(batches[0]), []
    steps = gpu_seconds_of(resnet50_step(count, device))
    rows.append(row("resnet50 step", f"224; device=cuda; batch={count}", "gpu_ms", [1e3 * x for x in steps], "ms"))
    for recipe in recipes:
        run, turns = of_gpuflow(recipe, device), itertools.cycle(batches)
        for _ in range(WARM_UP_CALLS):
            run(next(turns))
        taken = gpu_seconds_of(lambda run=run, turns=turns: run(next(turns)))  # type: ignore[misc]
        workload = f"{recipe} 224; device=cuda; batch={count}"
        rows.append(row("gpuflow", workload, "gpu_ms", [1e3 * x for x in taken], "ms"))
        share = statistics.median(taken) / statistics.median(steps)
        print(f"{recipe:9} takes {share:.2%} of the GPU time of a ResNet-50 step", flush=True)
    return rows


def measure(
    recipe: str, names: Sequence[str], batches: Sequence[Images], options: argparse.Namespace, device: torch.device
) -> list[dict[str, Any]]:
    """One row for each arm that has the recipe."""
    runs: dict[str, Run] = {}
    for name in names:
        try:
            run = ARMS[name](recipe, device)
            compiles = name == "kornia" and device.type == "cuda"
            start = time.perf_counter()
            for images in itertools.islice(itertools.cycle(batches), COMPILED_CALLS if compiles else WARM_UP_CALLS):
                run(images)
            if compiles:
                print(f"{recipe:9} {name:18} compiled in {time.perf_counter() - start:.0f} s", flush=True)
            runs[name] = run
        except Missing as reason:
            print(f"{recipe:9} {name:18} left out: {reason}", flush=True)
    rates: dict[str, list[float]] = {name: [] for name in runs}
    turns = itertools.cycle(batches)
    for repeat in range(options.repeats):
        for name in runs if repeat % 2 == 0 else reversed(runs):
            rate = options.batch / seconds_of(runs[name], turns, options.seconds, device)
            rates[name].append(rate)
            print(f"{recipe:9} {name:18} {rate:8.1f} images/s", flush=True)
    workload = f"{recipe} 224; device={device.type}; batch={options.batch}; threads={THREADS}"
    return [row(name, workload, "images_per_s", values, "images/s") for name, values in rates.items()]


def save(path: Path, rows: Sequence[dict[str, Any]], device: torch.device) -> None:
    """Write rows in place of those of the same arms and workloads; of a GPU with its name."""
    if device.type == "cuda":
        rows = [{**one, "machine": f"{torch.cuda.get_device_name(device)}, {one['machine']}"} for one in rows]
    write_results(path, [*kept(path, rows), *rows])


def kept(path: Path, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows that a file has of other arms and workloads."""
    if not path.exists():
        return []
    measured = {(one["arm"], one["workload"]) for one in rows}
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        assert reader.fieldnames == COLUMNS
        return [one for one in reader if (one["arm"], one["workload"]) not in measured]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--arms", nargs="+", choices=ARMS)
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=list(RECIPES))
    parser.add_argument("--batch", type=int, help="64 on a CPU, 256 on a GPU")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each arm in each repeat, at least")
    parser.add_argument("--out", type=Path, default=HERE / "results.csv")
    options = parser.parse_args(arguments)
    options.batch = options.batch or (64 if options.device == "cpu" else 256)
    device = torch.device(options.device)
    torch.set_num_threads(1)  # else each thread of torchvision-loop starts a team, which makes it several times slower
    names = options.arms or (ON_CPU if options.device == "cpu" else ON_CUDA)
    batches = photographs(options.batch, device)
    for recipe in options.recipes:
        rows = measure(recipe, names, batches, options, device)
        save(options.out, rows, device)
        values = {one["arm"]: float(one["value"]) for one in rows}
        if "gpuflow" in values:
            slower = {name: values["gpuflow"] / value for name, value in values.items() if name != "gpuflow"}
            print(recipe, *(f"gpuflow/{name} {ratio:.2f}" for name, ratio in slower.items()), flush=True)
    if device.type == "cuda":
        save(options.out, measure_gpu_time(options.recipes, batches, device), device)


if __name__ == "__main__":
    main()
