"""Trains with DistributedDataParallel on gpuflow: torchrun --nproc-per-node 2 ddp_after.py FOLDER."""

import os
import sys
from dataclasses import replace
from pathlib import Path

import torch
from loop import BATCH, EPOCHS, MEAN, STD, new_model, report, train
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from torchvision import transforms as T
from torchvision.datasets import ImageFolder

import gpuflow

CONFIG = Path(__file__).with_name("photos.yaml")

torch.distributed.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
rank, local_rank = torch.distributed.get_rank(), int(os.environ["LOCAL_RANK"])
if torch.cuda.is_available():
    torch.cuda.set_device(local_rank)
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
sampler: DistributedSampler[int] = DistributedSampler(dataset)
dataloader = DataLoader(dataset, batch_size=BATCH // 2, sampler=sampler)
loader = gpuflow.wrap(
    dataloader, CONFIG, transforms_gpu=transforms_gpu, parallel_type="ddp", local_rank=local_rank, name="train"
)
model = DistributedDataParallel(new_model(dataset.classes))
optimizer = torch.optim.Adam(model.parameters(), lr=3e-4)
for epoch in range(EPOCHS):
    sampler.set_epoch(epoch)
    result = train(model, loader, optimizer)
    if rank == 0:
        report(replace(result, images=result.images * torch.distributed.get_world_size()))
    loader.reset()
torch.distributed.destroy_process_group()
