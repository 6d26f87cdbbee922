"""Triton kernels, each with its reference in plain PyTorch."""

__all__: list[str] = []
