"""Loaders for the trainers of other libraries.

lightning.py    a LightningDataModule
adapter.py      what these loaders have in common
accelerate.py   a loader that takes its rank, its device and its checkpoints from an Accelerator
timm.py         timm's `create_loader`
ray.py          a loader in each worker of Ray Train, and checkpoints with its state
"""
