"""Iterates a loader as a node of torchdata; saves its state every second batch. Arguments: a folder, the log, epochs,
`resume`."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torchdata import nodes

import gpuflow
from tests.integrations.killing import Log

folder, log, epochs = Path(sys.argv[1]), Log(Path(sys.argv[2])), int(sys.argv[3])
loader = nodes.Loader(nodes.IterableWrapper(gpuflow.load(folder / "x.yaml")))
if "resume" in sys.argv:
    loader.load_state_dict(torch.load(folder / "state.pt", weights_only=True))

done, epoch = 0, -1
while True:
    for batch in loader:
        epoch = batch.epoch
        done += 1
        log.write(epoch=batch.epoch, indices=batch.indices.tolist())
        if done % 2 == 0:
            torch.save(loader.state_dict(), folder / "state.pt")
        log.kill_if_due()
    if epoch + 1 >= epochs:
        break
