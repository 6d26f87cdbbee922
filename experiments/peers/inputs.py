"""Writes the photographs of a folder in the formats that some loaders read: `python inputs.py FORMAT FOLDER OUT`.

FORMAT: tar (WebDataset's shards), litdata or mds (Streaming's shards). All hold the encoded bytes of the files and the
number of each file's class, in one random order.
"""

from __future__ import annotations

import io
import os
import random
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

SHARDS = 64
"""The largest number of tar shards. WebDataset needs at least one for each worker."""


def samples_of(folder: str) -> list[tuple[str, int]]:
    """Return the path and the class of each photograph, in a random order."""
    names = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir())
    samples = [(str(path), label) for label, name in enumerate(names) for path in sorted(Path(folder, name).iterdir())]
    random.Random(0).shuffle(samples)
    return samples


def write_tar(folder: str, out: Path) -> None:
    samples = samples_of(folder)
    out.mkdir(parents=True)
    for shard in range(min(SHARDS, len(samples))):
        with tarfile.open(out / f"{shard:03}.tar", "w") as file:
            for number in range(shard, len(samples), SHARDS):
                path, label = samples[number]
                for ending, data in (("jpg", Path(path).read_bytes()), ("cls", str(label).encode())):
                    member = tarfile.TarInfo(f"{number:07}.{ending}")
                    member.size = len(data)
                    file.addfile(member, io.BytesIO(data))


def litdata_sample(sample: tuple[str, int]) -> dict[str, Any]:
    """Return a photograph as LitData stores it: an unchanged JPEG file, with its class."""
    from PIL import Image

    return {"image": Image.open(sample[0]), "label": sample[1]}


def write_litdata(folder: str, out: Path) -> None:
    import litdata

    workers = len(os.sched_getaffinity(0))
    litdata.optimize(litdata_sample, samples_of(folder), str(out), chunk_bytes="64MB", num_workers=workers)


def write_mds(folder: str, out: Path) -> None:
    from streaming import MDSWriter

    with MDSWriter(out=str(out), columns={"image": "jpeg", "label": "int"}) as writer:
        for path, label in samples_of(folder):
            writer.write({"image": Path(path).read_bytes(), "label": label})


FORMATS: dict[str, Callable[[str, Path], None]] = {"tar": write_tar, "litdata": write_litdata, "mds": write_mds}


def main() -> None:
    name, folder, out = sys.argv[1:]
    unfinished = Path(f"{out}.unfinished")
    FORMATS[name](folder, unfinished)
    unfinished.rename(out)


if __name__ == "__main__":
    main()
