"""Threads, worker processes, shared memory, CUDA, the CPU budget and metrics. Knows no image."""
