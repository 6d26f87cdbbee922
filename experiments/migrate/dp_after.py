"""Trains with DataParallel on gpuflow; the sampler is the script's own."""

import sys
from pathlib import Path

import torch
from loop import BATCH, EPOCHS, MEAN, STD, new_model, report, train
from torch.utils.data import DataLoader, WeightedRandomSampler
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
sampler = WeightedRandomSampler([1.0] * len(dataset), len(dataset))
dataloader = DataLoader(dataset, batch_size=BATCH, sampler=sampler)
loader = gpuflow.wrap(dataloader, CONFIG, transforms_gpu=transforms_gpu, parallel_type="dp", name="train")
model = torch.nn.DataParallel(new_model(dataset.classes))
optimizer = torch.optim.Adam(model.parameters(), lr=3e-4)
for _ in range(EPOCHS):
    report(train(model, loader, optimizer))
    loader.reset()
