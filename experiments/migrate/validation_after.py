"""Trains and validates after each epoch on gpuflow, and saves a checkpoint for the scripts that test it."""

import sys
from pathlib import Path

import torch
from loop import ARCH, BATCH, EPOCHS, MEAN, STD, evaluate, new_model, report, train
from torch.utils.data import DataLoader
from torchvision import transforms as T
from torchvision.datasets import ImageFolder

import gpuflow

CONFIG = Path(__file__).with_name("photos.yaml")

folder = sys.argv[1]
augmentations = [
    T.RandomCrop(64),
    T.RandomHorizontalFlip(),
    T.RandomGrayscale(),
    T.RandomRotation(15),
    T.ColorJitter(0.2, 0.2, 0.2),
]
transforms_gpu = T.Compose([*augmentations, gpuflow.TensorToTensor(), T.Normalize(MEAN, STD)])
dataset = ImageFolder(f"{folder}/train", loader=gpuflow.bytes_loader)
val_transforms = T.Compose([gpuflow.TensorToTensor(), T.Normalize(MEAN, STD)])
val_dataset = ImageFolder(f"{folder}/val", loader=gpuflow.bytes_loader)
dataloader = DataLoader(dataset, batch_size=BATCH, shuffle=True, drop_last=True)
val_dataloader = DataLoader(val_dataset, batch_size=BATCH)
loader = gpuflow.wrap(dataloader, CONFIG, transforms_gpu=transforms_gpu, parallel_type=None, name="train")
val_loader = gpuflow.wrap(val_dataloader, CONFIG, transforms_gpu=val_transforms, parallel_type=None, name="val")
model = new_model(dataset.classes)
optimizer = torch.optim.Adam(model.parameters(), lr=3e-4)
for _ in range(EPOCHS):
    train(model, loader, optimizer)
    report(evaluate(model, val_loader))
    loader.reset()
    val_loader.reset()
gpuflow.save_checkpoint(f"{folder}/model.pt", model, arch=ARCH, loader=loader, val=val_loader)
