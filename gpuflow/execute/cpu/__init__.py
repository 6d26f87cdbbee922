"""Runs programs on the CPU, for training and for serving."""
