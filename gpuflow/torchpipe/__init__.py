"""Everything that touches torchpipe: the graph, its nodes, its own decoders as a preset, and the adapter."""

__all__: list[str] = []
