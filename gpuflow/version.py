"""The version of the installed package."""

import importlib.metadata

__all__ = ["__version__"]

__version__ = importlib.metadata.version("gpuflow")
