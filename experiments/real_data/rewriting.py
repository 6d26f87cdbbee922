"""What a progressive photograph costs the processor: `python experiments/real_data/rewriting.py FOLDER [--out FILE]`.

Decoded by libjpeg-turbo alone, preprocessed as a loader's worker does for a GPU that does not decode it, or rewritten
as a baseline JPEG, which a GPU's engines decode. One thread; each arm in turns over the folder's progressive
photographs.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gpuflow import stage_table
from gpuflow.config import read_config
from gpuflow.decode.chunk_files import rewrite_progressive
from gpuflow.decode.codecs import CpuDecoder, probe
from gpuflow.execute.cpu.runner import CpuRunner
from gpuflow.pipeline.stage import Keys
from gpuflow.pipeline.views import STORAGE, slot_shape
from gpuflow.sources import Payload
from gpuflow.tools.bench import row, write_results

_HERE = Path(__file__).parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    files = [np.fromfile(path, np.uint8) for path in sorted(options.folder.rglob("*.jpg"))]
    headers = [probe(data) for data in files]
    files = [data for data, header in zip(files, headers, strict=True) if header.progressive]
    if not files:
        parser.error(f"{options.folder} has no progressive JPEGs; photos.py makes them")
    arms = arms_for(files)
    found: dict[str, list[float]] = {name: [] for name in arms}
    for repeat in range(1 + options.repeats):
        for name, arm in arms.items():
            begun = time.perf_counter()
            arm()
            if repeat:  # the first time compiles the C code
                found[name].append(1000 * (time.perf_counter() - begun) / len(files))
    workload = f"{len(files)} progressive JPEGs of {np.mean([len(data) for data in files]) / 1000:.0f} kB"
    rows = [row(name, workload, "ms_per_image", values, "ms") for name, values in found.items()]
    for one in rows:
        print(f"{one['arm']:22} {one['value']} ({one['low']} to {one['high']}) ms an image")
    if options.out is not None:
        write_results(options.out, rows)


def arms_for(files: list[NDArray[np.uint8]]) -> dict[str, Callable[[], Any]]:
    """Each arm works on all files."""
    program = read_config(_HERE / "photos.yaml", stage_table()).programs["train"]
    runner, decoder = CpuRunner(program), CpuDecoder("rgb")
    slots = np.empty((len(files), *slot_shape(program.result)), STORAGE[program.result.dtype])
    keys = Keys(0, 0, np.arange(len(files)))
    payload = Payload.of(files, lambda size: np.empty(size, np.uint8))
    memory = np.empty(4 * len(payload.buffer), np.uint8)

    def rewrite() -> None:
        found = rewrite_progressive(payload, np.arange(len(files)), lambda size: memory)
        assert found.sizes.all()

    return {
        "decoded": lambda: [decoder.decode(data, probe(data)) for data in files],
        "preprocessed": lambda: runner.run(Payload.of(files), keys, slots),
        "rewritten": rewrite,
    }


if __name__ == "__main__":
    main()
