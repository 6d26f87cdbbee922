"""Triton kernels, each beside its plain-PyTorch reference."""

__all__: list[str] = []
