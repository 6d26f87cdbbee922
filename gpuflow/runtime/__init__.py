"""Runs threads and worker processes, and shares memory, cores and GPUs among them. Knows no image."""
