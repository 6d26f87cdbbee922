"""Serving by torchpipe: the graph, its nodes, torchpipe's own decoders as a preset, and the adapter to torchpipe."""
