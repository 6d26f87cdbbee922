"""Ends a training at a chosen step, as a killed process does, within the process of the test."""

from __future__ import annotations

from gpuflow.training.trainer import TrainerEvents


class Killed(BaseException):
    """Stands for anything that ends a run in the middle of an epoch."""


class KillAt(TrainerEvents):
    """Ends the run within a step, before a checkpoint of that step. Steps of validation count, too."""

    def __init__(self, step: int) -> None:
        self.left = step

    def step(self, loss: float, images_per_s: float) -> None:
        self.left -= 1
        if self.left == 0:
            raise Killed
