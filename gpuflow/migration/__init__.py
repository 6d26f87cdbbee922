"""Moving in: an existing DataLoader of PyTorch, with its dataset, sampler and transforms, fed by gpuflow."""

__all__: list[str] = []
