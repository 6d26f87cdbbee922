"""Decodes encoded bytes to pixels: header checks, CPU decoders, and the nvJPEG binding."""
