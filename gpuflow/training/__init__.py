"""`gpuflow train`."""

__all__: list[str] = []
