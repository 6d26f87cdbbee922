"""Trains on one GPU, or on the CPU, on gpuflow: the eight steps of the older integration, each marked."""

import sys
from pathlib import Path

import torch
from loop import BATCH, EPOCHS, MEAN, STD, new_model, report, train
from torch.utils.data import DataLoader
from torchvision import transforms as T
from torchvision.datasets import ImageFolder

import gpuflow  # step 2

CONFIG = Path(__file__).with_name("photos.yaml")  # step 1

folder = sys.argv[1]
augmentations = [  # step 4: no resize, which the file has
    T.RandomCrop(64),
    T.RandomHorizontalFlip(),
    T.RandomGrayscale(),
    T.RandomRotation(15),
    T.ColorJitter(0.2, 0.2, 0.2),
]
transforms_gpu = T.Compose([*augmentations, gpuflow.TensorToTensor(), T.Normalize(MEAN, STD)])
transforms_cpu = T.Compose(  # step 5: may be left out
    [gpuflow.cv2_resize((72, 72)), T.ToPILImage(), *augmentations, T.ToTensor(), T.Normalize(MEAN, STD)]
)
dataset = ImageFolder(f"{folder}/train", loader=gpuflow.bytes_loader)  # step 3
dataloader = DataLoader(dataset, batch_size=BATCH, shuffle=True, drop_last=True)
loader = gpuflow.wrap(  # step 6
    dataloader, CONFIG, transforms_cpu, transforms_gpu, cpu_percentage=0.3, parallel_type=None, name="train"
)
model = new_model(dataset.classes)
optimizer = torch.optim.Adam(model.parameters(), lr=3e-4)
for _ in range(EPOCHS):
    report(train(model, loader, optimizer))
    loader.reset()  # step 8; validation_*.py have step 7
