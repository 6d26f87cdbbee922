"""Threads, worker processes, shared memory, admission, the CPU budget and metrics. Knows no image."""
