"""Tests a trained model in PyTorch, on images that OpenCV decodes and resizes: not the pixels of its training."""

import sys

import cv2
import torch
from loop import BATCH, MEAN, STD, evaluate, new_model, report
from torch.utils.data import DataLoader
from torchvision import transforms as T
from torchvision.datasets import ImageFolder


def load(path: str) -> torch.Tensor:
    image = cv2.resize(cv2.imread(path), (64, 64))  # type: ignore[arg-type]
    return torch.from_numpy(cv2.cvtColor(image, cv2.COLOR_BGR2RGB)).permute(2, 0, 1) / 255


folder = sys.argv[1]
dataset = ImageFolder(f"{folder}/val", T.Normalize(MEAN, STD), loader=load)
loader = DataLoader(dataset, batch_size=BATCH, num_workers=2)
model = new_model(dataset.classes, f"{folder}/model.pt")
report(evaluate(model, loader))
