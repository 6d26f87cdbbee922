"""The HTTP service of `gpuflow serve`."""
