"""Trains with DataParallel, on all GPUs that torch sees, in plain PyTorch; on a CPU it passes batches through."""

import sys

import torch
from loop import BATCH, EPOCHS, MEAN, STD, new_model, report, train
from torch.utils.data import DataLoader, WeightedRandomSampler
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
sampler = WeightedRandomSampler([1.0] * len(dataset), len(dataset))
loader = DataLoader(dataset, batch_size=BATCH, sampler=sampler, num_workers=2)
model = torch.nn.DataParallel(new_model(dataset.classes))
optimizer = torch.optim.Adam(model.parameters(), lr=3e-4)
for _ in range(EPOCHS):
    report(train(model, loader, optimizer))
