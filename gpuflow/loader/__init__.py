"""What users iterate: sampling order, reading, batch assembly, epochs, state and placement."""

__all__: list[str] = []
