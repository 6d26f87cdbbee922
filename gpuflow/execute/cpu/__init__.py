"""Runs programs on the processor."""
