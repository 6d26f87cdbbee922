"""Delivers batches: sampling order, reading, decoding, assembly, epochs, state and placement."""
