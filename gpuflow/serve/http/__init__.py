"""The HTTP service of `gpuflow serve`."""

__all__: list[str] = []
