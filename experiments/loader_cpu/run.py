"""Compares loaders on this machine's CPU: `make bench`, or `python experiments/loader_cpu/run.py [--quick]`.

Writes results.csv in this file's folder, all throughput measurements to scaling.csv, and the plot.
README.md defines each metric.

    python experiments/loader_cpu/run.py --photos FOLDER       # a folder of classes of your own: images/s alone

With and without color_jitter, into NAME.csv, where NAME is the folder's.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpuflow.tools.bench import Job

HERE = Path(__file__).parent
CONFIG = HERE / "photos.yaml"
DATA = Path("data/bench")
TEN_THOUSAND = Path("data/bench_10k")
WORKLOAD = "random_resized_crop 224, flip, normalize; batch=64"
NO_ANTIALIAS = "pipelines.train.stages.random_resized_crop.antialias=false"

ARMS = {
    "gpuflow": ("gpuflow", ()),
    "gpuflow (processes)": ("gpuflow", ("run.processes=1000",)),
    "gpuflow (no antialias)": ("gpuflow", (NO_ANTIALIAS,)),
    "dataloader": ("dataloader", ()),
    "dataloader-uint8": ("dataloader-uint8", ()),
    "dataloader-uint8-raw": ("dataloader-uint8-raw", ()),
    "spdl": ("spdl", ()),
    "bare threads": (f"{HERE / 'bare_threads.py'}:run", ()),
}

OWN_ARMS = {name: ARMS[name] for name in ("gpuflow", "gpuflow (processes)", "dataloader", "dataloader-uint8")}
OWN_CONFIGS = {
    WORKLOAD.partition(";")[0]: CONFIG,
    "configs/photos.yaml, with color_jitter": HERE.parents[1] / "configs" / "photos.yaml",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two short repeats, to see that it runs")
    parser.add_argument("--photos", type=Path, help="measure images per second of this folder of classes alone")
    options = parser.parse_args()
    quick = options.quick
    if options.photos is not None:
        own_photographs(options.photos, quick)
        return
    data()
    rows = [
        *throughput(quick),
        *profile(1 if quick else 3),
        *first_batch(2 if quick else 7),
        *listing(2 if quick else 5),
        *order(),
        *memory(quick),
    ]
    from gpuflow.plots import bars
    from gpuflow.tools.bench import write_results

    write_results(HERE / "results.csv", rows)
    for path in bars.loader_cpu(HERE / "results.csv", HERE / "images_per_s"):
        print("wrote", path)


def data() -> None:
    """Create 2,000 sample photographs, and 10,000 files that are links to them."""
    from gpuflow.tools.samples import make_samples

    print(make_samples(DATA, 2000))
    for number in range(10_000):
        link = TEN_THOUSAND / f"class_{number % 10}" / f"{number:05}.jpg"
        if not link.exists():
            link.parent.mkdir(parents=True, exist_ok=True)
            link.hardlink_to(photographs()[number % 2000])


def photographs() -> list[Path]:
    return sorted(DATA.glob("*/*.jpg"))


def measured(jobs: dict[Job, str], quick: bool) -> dict[Job, list[float]]:
    """Images per second of jobs, each shown under its name."""
    from gpuflow.tools.bench import measure

    def show(job: Job, rate: float) -> None:
        print(f"{jobs[job]} {job.workers} workers  {rate:7.0f} images/s", flush=True)

    return measure(list(jobs), repeats=2 if quick else 5, progress=show)


def own_photographs(folder: Path, quick: bool) -> None:
    """Measure OWN_ARMS on a folder of classes with each of OWN_CONFIGS, and a worker for each core."""
    from gpuflow.plots import bars
    from gpuflow.tools.bench import Job, row, write_results

    source = (f"source.folder={folder}",)
    jobs = {
        Job(
            arm=arm,
            path=str(config),
            overrides=(*source, *overrides),
            pipeline="train",
            workers=len(os.sched_getaffinity(0)),
            seconds=1 if quick else 4,
        ): (name, workload)
        for workload, config in OWN_CONFIGS.items()
        for name, (arm, overrides) in OWN_ARMS.items()
    }

    rates = measured({job: f"{name:24} {workload:44}" for job, (name, workload) in jobs.items()}, quick)
    rows = [
        row(name, f"{folder.name}: {workload}", "images_per_s", rates[job], "images/s")
        for job, (name, workload) in jobs.items()
    ]
    write_results(HERE / f"{folder.name}.csv", rows)
    for path in bars.loader_cpu(HERE / f"{folder.name}.csv", HERE / folder.name):
        print("wrote", path)


def throughput(quick: bool) -> Iterator[dict[str, Any]]:
    """Measure every arm with several numbers of workers; the best setting of each arm counts."""
    from gpuflow.tools.bench import Job, row, write_results

    cores = len(os.sched_getaffinity(0))
    counts = sorted({cores, cores + 1}) if cores <= 4 else sorted({cores // 2, cores})
    jobs = {
        Job(
            arm=arm, path=str(CONFIG), overrides=overrides, pipeline="train", workers=count, seconds=1 if quick else 3
        ): name
        for count in counts
        for name, (arm, overrides) in ARMS.items()
    }

    rates = measured({job: f"{name:24}" for job, name in jobs.items()}, quick)
    scaling = [
        row(name, f"{WORKLOAD}; workers={job.workers}", "images_per_s", rates[job], "images/s")
        for job, name in jobs.items()
    ]
    write_results(HERE / "scaling.csv", scaling)
    for name in ARMS:
        best = max((job for job in jobs if jobs[job] == name), key=lambda job: statistics.median(rates[job]))
        print(f"{name}: best with {best.workers} workers")
        yield row(name, WORKLOAD, "images_per_s", rates[best], "images/s")


def first_batch(repeats: int) -> Iterator[dict[str, Any]]:
    """Measure seconds from `load`, or from building the data set, to the first batch of 10,000 files, minus imports."""
    yield from alternate({"gpuflow": GPUFLOW_FIRST, "dataloader": DATALOADER_FIRST}, "10,000-file folder", repeats)


def listing(repeats: int) -> Iterator[dict[str, Any]]:
    """Measure the time to load a CSV of a million rows."""
    path = Path("data/million.csv")
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        path.write_text("path,label\n" + "".join(f"shard_{n // 1000:04}/{n:07}.jpg,{n % 1000}\n" for n in range(10**6)))
    yield from alternate({"gpuflow": LISTING}, "listing of 1,000,000 rows", repeats)


def order() -> Iterator[dict[str, Any]]:
    """Measure the time to seek position 10^9 of 10^12."""
    yield from alternate({"gpuflow": ORDER}, "position 10^9 of 10^12", 3)


def memory(quick: bool) -> Iterator[dict[str, Any]]:
    """Measure the growth of resident memory over 20 epochs, after ten in which the pools fill."""
    yield from alternate({"gpuflow": MEMORY}, "20 epochs of 512 images", 1 if quick else 3)


def profile(repeats: int) -> Iterator[dict[str, Any]]:
    """Measure processor time by kind of thread, in microseconds per image, from the kernel's accounting."""
    yield from alternate({"gpuflow": PROFILE, "bare threads": PROFILE_BARE}, "cpu time by thread", repeats)


def alternate(scripts: dict[str, str], workload: str, repeats: int) -> Iterator[dict[str, Any]]:
    """Run the scripts in turn, `repeats` times each, in fresh processes; yield one row per metric that they print."""
    from gpuflow.tools.bench import row

    found: dict[tuple[str, str, str], list[float]] = {}
    for _ in range(repeats):
        for arm, script in scripts.items():
            code = script.replace("CONFIG", str(CONFIG)).replace("TEN_THOUSAND", str(TEN_THOUSAND))
            done = subprocess.run(
                [sys.executable, "-c", code], check=True, timeout=600, stdout=subprocess.PIPE, text=True
            )
            for metric, (value, unit) in json.loads(done.stdout.splitlines()[-1]).items():
                found.setdefault((arm, metric, unit), []).append(value)
    for (arm, metric, unit), values in found.items():
        print(f"{arm:24} {metric}: {statistics.median(values):.4g} {unit}")
        yield row(arm, workload, metric, values, unit)


GPUFLOW_FIRST = """
import gpuflow, json, time, os
import gpuflow.loader.assemble, gpuflow.stages
start = time.perf_counter()
loader = gpuflow.load("CONFIG", overrides=["source.folder=TEN_THOUSAND"])
next(iter(loader))
print(json.dumps({"first_batch_s": [time.perf_counter() - start, "s"]}), flush=True)
os._exit(0)
"""

DATALOADER_FIRST = """
import json, time, os, torch
from torchvision import datasets, transforms as t
start = time.perf_counter()
normalize = t.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
steps = t.Compose([t.RandomResizedCrop(224), t.RandomHorizontalFlip(), t.ToTensor(), normalize])
folder = datasets.ImageFolder("TEN_THOUSAND", steps)
loader = torch.utils.data.DataLoader(folder, 64, shuffle=True, num_workers=len(os.sched_getaffinity(0)))
next(iter(loader))
print(json.dumps({"first_batch_s": [time.perf_counter() - start, "s"]}), flush=True)
os._exit(0)
"""

LISTING = """
import json, time
from gpuflow.sources import open_source, source_spec
def peak():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) / 1000
before, start = peak(), time.perf_counter()
source = open_source(source_spec(listing="data/million.csv"))
seconds = time.perf_counter() - start
assert len(source) == 1_000_000
print(json.dumps({"listing_s": [seconds, "s"], "listing_mb": [peak() - before, "MB"]}))
"""

ORDER = """
import json, time, statistics
from gpuflow.loader.sampler import ShuffledOrder
def seek(epoch):
    start = time.perf_counter()
    ShuffledOrder(size=10**12, seed=0).indices(epoch, [10**9])
    return time.perf_counter() - start
seek(0)
print(json.dumps({"seek_ms": [1000 * statistics.median(seek(epoch) for epoch in range(1, 101)), "ms"]}))
"""

MEMORY = """
import json, gpuflow, numpy as np
def rss_kb():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmRSS"))
loader = gpuflow.load("CONFIG", overrides=["source.split={train: 0.256}"])
sizes = []
for epoch in range(30):
    for images, labels in loader:
        pass
    sizes.append(rss_kb())
slope = np.polyfit(np.arange(20), sizes[10:], 1)[0]
print(json.dumps({"rss_slope_kb": [float(slope), "kB/epoch"], "peak_rss_mb": [max(sizes) / 1000, "MB"]}))
loader.close()
"""

PROFILE = """
import gpuflow, json, os, threading, time
loader = gpuflow.load("CONFIG")
def cpu():
    tasks = os.listdir("/proc/self/task")
    return {int(t): int(open(f"/proc/self/task/{t}/schedstat").read().split()[0]) / 1000 for t in tasks}
kinds = {"MainThread": "consumer", "spdl_event_loop_thread": "spdl"}
spent, count, seconds = {}, 0, 0.0
for epoch in range(4):
    batches = iter(loader)
    for _ in range(4):
        next(batches)
    names = {thread.native_id: thread.name for thread in threading.enumerate()}
    before, start = cpu(), time.perf_counter()
    for _ in range(len(loader) - 8):
        count += len(next(batches)[0])
    seconds += time.perf_counter() - start
    for task, now in cpu().items():
        name = names.get(task, "other")
        kind = kinds.get(name, name.removeprefix("gpuflow_").split("_")[0])
        spent[kind] = spent.get(kind, 0.0) + now - before.get(task, now)
figures = {f"cpu_us_{kind}": [used / count, "us/image"] for kind, used in spent.items() if used / count > 0.5}
idle = len(os.sched_getaffinity(0)) * seconds * 1e6 / count - sum(spent.values()) / count
print(json.dumps({**figures, "cpu_us_idle": [idle, "us/image"]}), flush=True)
os._exit(0)
"""

PROFILE_BARE = """
import json, os, sys, time
sys.path.insert(0, ".")
from experiments.loader_cpu.bare_threads import run
from gpuflow.tools.bench import Job
cores = len(os.sched_getaffinity(0))
counts = run(Job(arm="", path="CONFIG", overrides=(), pipeline="train", workers=cores, seconds=0))
def work(seconds):
    count, start, cpu = 0, time.perf_counter(), time.process_time()
    while time.perf_counter() - start < seconds:
        count += next(counts)
    return count, time.perf_counter() - start, time.process_time() - cpu
work(1.0)
count, seconds, used = work(3.0)
idle = (cores * seconds - used) * 1e6 / count
print(json.dumps({"cpu_us_decode": [used * 1e6 / count, "us/image"], "cpu_us_idle": [idle, "us/image"]}), flush=True)
os._exit(0)
"""

if __name__ == "__main__":
    main()
