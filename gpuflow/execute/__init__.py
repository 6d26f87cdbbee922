"""Runs a program on a chunk of samples, on the CPU or on a GPU."""

__all__: list[str] = []
