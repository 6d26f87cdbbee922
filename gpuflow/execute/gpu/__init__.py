"""Runs programs on a GPU."""
