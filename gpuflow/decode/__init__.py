"""Encoded bytes to pixels: header checks, CPU decoders, and the binding of nvJPEG."""

__all__: list[str] = []
