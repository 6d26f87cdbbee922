"""Times the first batch and the first epochs: `taskset -c 0-3 python experiments/real_data/epochs.py FOLDER`.

`PYTHONPATH` chooses the commit of gpuflow, `taskset` the cores. Prints the seconds from `load` to the first batch, and
the images per second of each epoch.
"""

import argparse
import time
from pathlib import Path

import torch

import gpuflow

CONFIG = Path(__file__).with_name("photos.yaml")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="photographs, in a folder for each class")
    parser.add_argument("--epochs", type=int, default=4)
    options = parser.parse_args()
    torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    begun, first, rates = time.perf_counter(), 0.0, []
    with gpuflow.load(CONFIG, overrides=[f"source.folder={options.folder.resolve()}"], device="cuda") as loader:
        for _ in range(options.epochs):
            start, images = time.perf_counter(), 0
            for _, labels in loader:
                if not first:
                    torch.cuda.synchronize()
                    first = time.perf_counter() - begun
                images += len(labels)
            torch.cuda.synchronize()
            rates.append(images / (time.perf_counter() - start))
    print(f"first batch after {first:.2f} s; images/s of each epoch:", *(f"{rate:,.0f}" for rate in rates))


if __name__ == "__main__":
    main()
