"""Tests a trained model with the transforms that it was trained with, in plain PyTorch."""

import sys

from loop import BATCH, MEAN, STD, evaluate, new_model, report
from torch.utils.data import DataLoader
from torchvision import transforms as T
from torchvision.datasets import ImageFolder

folder = sys.argv[1]
transform = T.Compose([T.Resize((64, 64)), T.ToTensor(), T.Normalize(MEAN, STD)])
dataset = ImageFolder(f"{folder}/val", transform)
loader = DataLoader(dataset, batch_size=BATCH, num_workers=2)
model = new_model(dataset.classes, f"{folder}/model.pt")
report(evaluate(model, loader))
