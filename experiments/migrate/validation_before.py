"""Trains and validates after each epoch, in plain PyTorch."""

import sys

import torch
from loop import BATCH, EPOCHS, MEAN, STD, evaluate, new_model, report, train
from torch.utils.data import DataLoader
from torchvision import transforms as T
from torchvision.datasets import ImageFolder

folder = sys.argv[1]
transform = T.Compose(
    [
        T.Resize((72, 72)),
        T.RandomCrop(64),
        T.RandomHorizontalFlip(),
        T.RandomGrayscale(),
        T.RandomRotation(15),
        T.ColorJitter(0.2, 0.2, 0.2),
        T.ToTensor(),
        T.Normalize(MEAN, STD),
    ]
)
dataset = ImageFolder(f"{folder}/train", transform)
val_transform = T.Compose([T.Resize((64, 64)), T.ToTensor(), T.Normalize(MEAN, STD)])
val_dataset = ImageFolder(f"{folder}/val", val_transform)
loader = DataLoader(dataset, batch_size=BATCH, shuffle=True, drop_last=True, num_workers=2)
val_loader = DataLoader(val_dataset, batch_size=BATCH, num_workers=2)
model = new_model(dataset.classes)
optimizer = torch.optim.Adam(model.parameters(), lr=3e-4)
for _ in range(EPOCHS):
    train(model, loader, optimizer)
    report(evaluate(model, val_loader))
