"""A training script as people have it: ImageFolder, a DataLoader, a small network, two epochs. `after.py` moves in."""

import sys

import torch
from torch import nn
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

import gpuflow

torch.manual_seed(0)
transform = v2.Compose(
    [v2.RandomResizedCrop(24), v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize([0.5] * 3, [0.25] * 3)]
)
dataset = ImageFolder(sys.argv[1], transform)
loader = gpuflow.load("photos.yaml", "train")
model = nn.Sequential(
    nn.Conv2d(3, 8, 3, stride=2), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, len(dataset.classes))
)
optimizer = torch.optim.Adam(model.parameters(), lr=0.02)

for epoch in range(2):
    correct = count = 0
    for images, labels in loader:
        logits = model(images)
        loss = nn.functional.cross_entropy(logits, labels)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        correct += int((logits.argmax(dim=1) == labels).sum())
        count += len(labels)
    print(f"epoch {epoch}: {count} images, accuracy {correct / count:.3f}")
