"""A loop as in timm's train.py: arguments are a folder with photographs, the log, the number of epochs, `resume`."""

from __future__ import annotations

import os
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import timm
import torch
from timm.data import FastCollateMixup, create_dataset
from timm.loss import SoftTargetCrossEntropy
from timm.optim import create_optimizer_v2
from timm.utils import AverageMeter, accuracy

from gpuflow.integrations.timm import create_loader
from tests.integrations.killing import Log

folder, path, epochs = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
log, device = Log(path), torch.device("cpu")
torch.manual_seed(0)
model = timm.create_model("test_vit", pretrained=False, num_classes=3, img_size=32)
optimizer = create_optimizer_v2(model, opt="sgd", lr=0.01)
mixing = FastCollateMixup(mixup_alpha=0.8, cutmix_alpha=1.0, label_smoothing=0.1, num_classes=3)
common: dict[str, Any] = {"input_size": (3, 32, 32), "batch_size": 4, "device": device, "num_workers": 2}
dataset_train = create_dataset("", root=str(folder / "photos"), split="")
loader_train = create_loader(
    dataset_train, **common, is_training=True, re_prob=0.25, re_mode="pixel", collate_fn=mixing, interpolation="bicubic"
)
loader_eval = create_loader(str(folder / "x.yaml"), **common)
loss_of, mixup_off_epoch, start_epoch, saved = SoftTargetCrossEntropy(), 1, 0, folder / "last.pt"
if "resume" in sys.argv:
    checkpoint = torch.load(saved, weights_only=True)
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    loader_train.load_state_dict(checkpoint["loader"])
    start_epoch = checkpoint["loader"]["epoch"]

done = 0
for epoch in range(start_epoch, epochs):
    if hasattr(loader_train.sampler, "set_epoch"):
        loader_train.sampler.set_epoch(epoch)
    if mixup_off_epoch and epoch >= mixup_off_epoch and loader_train.mixup_enabled:
        loader_train.mixup_enabled = False
    model.train()
    losses = AverageMeter()
    last_idx = len(loader_train) - 1
    for batch_idx, (images, target) in enumerate(loader_train):
        assert batch_idx <= last_idx
        loss = loss_of(model(images), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.update(loss.item(), images.size(0))
        done += 1
        log.write(epoch=epoch, loss=loss.item(), labels=target.tolist())
        if done % 2 == 0:
            state = {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "loader": loader_train.state_dict(),
            }
            torch.save(state, saved.with_suffix(".new"))
            os.replace(saved.with_suffix(".new"), saved)
        log.kill_if_due()
    model.eval()
    metrics: OrderedDict[str, float] = OrderedDict()
    with torch.inference_mode():
        for images, target in loader_eval:
            metrics["top1"] = accuracy(model(images), target)[0].item()

torch.save(model.state_dict(), path.with_suffix(".pt"))
