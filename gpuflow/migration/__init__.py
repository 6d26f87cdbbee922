"""Moving in: reads other libraries' transforms, writes them as a YAML file (`gpuflow import`), and wraps DataLoaders.

sources            chooses the reader of a source, writes the YAML file, runs the real transforms for parity
from_torchvision   transforms in Python, v1 and v2, and torchvision's weights
from_timm, from_huggingface, from_albumentations, from_torchpipe   configurations in names and files
imported           what a reader finds: entries of stages, and gaps, which no stage equals; reads what users name
                   (module:attribute, JSON, YAML and TOML), and measures how far pixels are apart
wrap               gpuflow.wrap and the transforms that it takes;   dataloader  the dataset and the sampler
"""

from gpuflow.migration.imported import Imported
from gpuflow.migration.sources import Written, read_source, read_sources

__all__ = ["Imported", "Written", "read_source", "read_sources"]
