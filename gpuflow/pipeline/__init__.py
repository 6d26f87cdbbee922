"""Values: what an image is, what a stage promises, pipelines, random keys, and programs folded from pipelines."""

__all__: list[str] = []
