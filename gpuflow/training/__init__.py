"""`gpuflow train`."""
