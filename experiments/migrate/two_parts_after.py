"""Tests a trained model in PyTorch, on images that the graph of the service decodes, resizes and normalizes."""

import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from loop import BATCH, DEVICE, evaluate, new_model, report
from torchvision.datasets import ImageFolder

import gpuflow.serve

CONFIG = Path(__file__).with_name("photos.yaml")

folder = sys.argv[1]
dataset = ImageFolder(f"{folder}/val", loader=gpuflow.bytes_loader)
model = new_model(dataset.classes, f"{folder}/model.pt")
with gpuflow.serve.load(CONFIG, device=DEVICE, preprocess_only=True) as predict:

    def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for start in range(0, len(dataset), BATCH):
            part = dataset.samples[start : start + BATCH]
            yield predict.preprocess(path for path, _ in part), torch.tensor([label for _, label in part])

    report(evaluate(model, batches()))
