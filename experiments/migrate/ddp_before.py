"""Trains with DistributedDataParallel in plain PyTorch: torchrun --nproc-per-node 2 ddp_before.py FOLDER."""

import os
import sys
from dataclasses import replace

import torch
from loop import BATCH, EPOCHS, MEAN, STD, new_model, report, train
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from torchvision import transforms as T
from torchvision.datasets import ImageFolder

torch.distributed.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
rank, local_rank = torch.distributed.get_rank(), int(os.environ["LOCAL_RANK"])
if torch.cuda.is_available():
    torch.cuda.set_device(local_rank)
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
sampler: DistributedSampler[int] = DistributedSampler(dataset)
loader = DataLoader(dataset, batch_size=BATCH // 2, sampler=sampler, num_workers=1)
model = DistributedDataParallel(new_model(dataset.classes))
optimizer = torch.optim.Adam(model.parameters(), lr=3e-4)
for epoch in range(EPOCHS):
    sampler.set_epoch(epoch)
    result = train(model, loader, optimizer)
    if rank == 0:
        report(replace(result, images=result.images * torch.distributed.get_world_size()))
torch.distributed.destroy_process_group()
