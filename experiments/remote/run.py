"""Measures loading from a server that answers each request 20 ms late, without and with a cache on a local disk.

    gpuflow samples data/bench -n 2000
    python experiments/remote/run.py data/bench

It starts the server in a separate process, with the photographs as single files and in shards. Writes results.csv in
this file's folder.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.request import urlopen

HERE = Path(__file__).parent
SHARDS = 8
ARMS = ("without a cache", "first epoch", "second epoch", "another run")
UNITS = {"images_per_s": "images/s", "requests": "requests", "downloaded_mb": "MB"}
COUNTS = "/-/counts"
Figures = dict[str, float]


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("photos", type=Path, help="one directory for each class")
    parser.add_argument("--latency", type=float, default=20.0, metavar="MS")
    parser.add_argument("--repeats", type=int, choices=range(1, 100), default=3, metavar="N")
    parser.add_argument("--out", type=Path, default=HERE / "results.csv", metavar="FILE")
    options = parser.parse_args(arguments)
    from gpuflow.tools.bench import row, write_results

    found: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        data = Path(folder) / "data"
        write_data(options.photos, data)
        with server(data, options.latency / 1000) as url:
            workloads = {
                "files": f"{{listing: '{url}/list.csv'}}",
                "shards": f"{{tar: '{url}/{{0..{SHARDS - 1}}}.tar'}}",
            }
            for workload, source in workloads.items():
                epochs([f"source={source}"], url, 1)  # shards are indexed once, and connections opened
                for number in range(options.repeats):
                    cache = f"{source[:-1]}, cache: {{dir: '{folder}/cache {workload} {number}', size: 20GB}}}}"
                    measured = [
                        *epochs([f"source={source}"], url, 1),
                        *epochs([f"source={cache}"], url, 2),
                        *epochs([f"source={cache}"], url, 1),
                    ]
                    for arm, figures in zip(ARMS, measured, strict=True):
                        print(f"{workload:8} {arm:16} " + "  ".join(f"{k} {v:,.0f}" for k, v in figures.items()))
                        for metric, value in figures.items():
                            found[arm, workload, metric].append(value)
    rows = [
        row(arm, f"{workload}, {options.latency:g} ms", metric, values, UNITS[metric])
        for (arm, workload, metric), values in found.items()
    ]
    write_results(options.out, rows)


def epochs(overrides: Sequence[str], url: str, count: int) -> list[Figures]:
    """What some epochs of a new loader took."""
    import gpuflow

    figures = []
    with gpuflow.load(HERE / "photos.yaml", "train", device="cpu", overrides=overrides) as loader:
        for _ in range(count):
            counts(url)
            start, images = time.perf_counter(), 0
            for batch in loader:
                images += len(batch.indices)
            seconds = time.perf_counter() - start
            figures.append({"images_per_s": images / seconds, **counts(url)})
    return figures


def write_data(photos: Path, data: Path) -> None:
    """Photographs as single files with a listing, and in shards."""
    classes = sorted(path.name for path in photos.iterdir() if path.is_dir())
    files = sorted(path for name in classes for path in (photos / name).iterdir())
    (data / "files").mkdir(parents=True)
    with (data / "list.csv").open("w") as listing:
        for i, path in enumerate(files):
            (data / f"files/{i}.jpg").write_bytes(path.read_bytes())
            listing.write(f"files/{i}.jpg,{classes.index(path.parent.name)}\n")
    for shard in range(SHARDS):
        with tarfile.open(data / f"{shard}.tar", "w") as archive:
            for i in range(shard, len(files), SHARDS):
                label = str(classes.index(files[i].parent.name)).encode()
                for name, content in ((f"{i}.jpg", files[i].read_bytes()), (f"{i}.cls", label)):
                    member = tarfile.TarInfo(name)
                    member.size = len(content)
                    archive.addfile(member, io.BytesIO(content))


# --- the server -------------------------------------------------------------------------------------------------------


@contextmanager
def server(data: Path, seconds: float) -> Iterator[str]:
    """A server of the files of a folder, in a separate process; yields its URL."""
    command = [sys.executable, __file__, "serve", str(data), str(seconds)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.terminate()


def counts(url: str) -> Figures:
    """What the server answered since the last call."""
    with urlopen(url + COUNTS, timeout=60) as answer:
        figures: Figures = json.load(answer)
    return figures


def serve(data: str, seconds: float) -> None:
    from aiohttp import web

    figures = {"requests": 0, "downloaded_mb": 0.0}

    async def answer(request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(seconds)
        return web.FileResponse(Path(data) / request.match_info["path"])

    async def count(request: web.Request, response: web.StreamResponse) -> None:
        if request.path != COUNTS:
            figures["requests"] += 1
            if request.method == "GET":
                figures["downloaded_mb"] += (response.content_length or 0) / 1e6

    async def tell(request: web.Request) -> web.Response:
        answer = dict(figures)
        figures.update(requests=0, downloaded_mb=0.0)
        return web.json_response(answer)

    async def run() -> None:
        app = web.Application()
        app.add_routes([web.get(COUNTS, tell), web.get("/{path:.*}", answer)])
        app.on_response_prepare.append(count)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        print(runner.addresses[0][1], flush=True)
        await asyncio.Event().wait()

    asyncio.run(run())


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        serve(sys.argv[2], float(sys.argv[3]))
    else:
        main(sys.argv[1:])
