"""Trains classification models for `gpuflow train`, and saves checkpoints."""
