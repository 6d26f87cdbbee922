"""Tests a trained model as it is served: decoding, resize, normalize and the model in one graph."""

import sys
import time
from pathlib import Path

import torch
from loop import DEVICE, Result, report
from torchvision.datasets import ImageFolder

import gpuflow.serve

CONFIG = Path(__file__).with_name("photos.yaml")

folder = sys.argv[1]
dataset = ImageFolder(f"{folder}/val", loader=gpuflow.bytes_loader)
labels = torch.tensor(dataset.targets)
overrides = [f"serve.model.file={folder}/model.pt"]
with gpuflow.serve.load(CONFIG, device=DEVICE, overrides=overrides) as predict:
    start = time.perf_counter()
    logits = predict(path for path, _ in dataset.samples).cpu()
    seconds = time.perf_counter() - start
loss = torch.nn.functional.cross_entropy(logits, labels).item()
accuracy = (logits.argmax(dim=1) == labels).float().mean().item()
report(Result(loss, accuracy, len(labels), seconds))
