"""Holds the C code of this package: one library, built with it, whose functions run without Python's interpreter."""
