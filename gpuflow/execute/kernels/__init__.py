"""Triton kernels: sampling, warps, colours, neighbourhoods, masks and the check of Huffman codes."""

__all__: list[str] = []
