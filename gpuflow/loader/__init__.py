"""What users iterate: sampling order, reading, batch assembly, epochs, state and placement."""
