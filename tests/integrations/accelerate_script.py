"""Trains with Accelerate; saves its state every second step, and after the step of a scheduler's signal.

Arguments: a folder with x.yaml, the log, epochs, steps whose gradients are accumulated, `resume`. Each rank writes to a
log of its own; rank 0 also what it gathered of the pipeline val.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn

import gpuflow
from gpuflow.integrations import accelerate as gpuflow_accelerate
from tests.integrations.killing import Log

folder, path, epochs = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=int(sys.argv[4]))
log = Log(path.with_suffix(f".{accelerator.process_index}.jsonl"))
torch.manual_seed(0)
model = nn.Sequential(nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(48, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
train = gpuflow_accelerate.load(accelerator, folder / "x.yaml", "train")
val = gpuflow_accelerate.load(accelerator, folder / "x.yaml", "val")
assert accelerator.prepare(train) is train
model, optimizer = accelerator.prepare(model, optimizer)
if "resume" in sys.argv:
    accelerator.load_state(str(folder / "state"))

steps = 0
with gpuflow.Preemption() as preemption:
    for epoch in range(train.state_dict()["epoch"], epochs):
        train.set_epoch(epoch)
        for batch in train:
            images, labels = batch
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.cross_entropy(model(images), labels))
                optimizer.step()
                optimizer.zero_grad()
            synced = accelerator.sync_gradients
            log.write(epoch=epoch, of_loader=batch.epoch, indices=batch.indices.tolist(), synced=synced)
            steps += 1
            if steps % 2 == 0:
                accelerator.save_state(str(folder / "state"))
            log.kill_if_due()
            if preemption.requested():
                accelerator.save_state(str(folder / "state"))
                sys.exit(os.EX_TEMPFAIL)

gathered = torch.cat([accelerator.gather_for_metrics(batch.indices) for batch in val])
if accelerator.is_main_process:
    path.with_suffix(".val.json").write_text(json.dumps(gathered.tolist()))
    torch.save(accelerator.unwrap_model(model).state_dict(), path.with_suffix(".pt"))
accelerator.end_training()
