"""The HTTP service."""

__all__: list[str] = []
