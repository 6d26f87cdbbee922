"""Moving in: reads other libraries' transforms, writes them as a YAML file (`gpuflow import`), and wraps DataLoaders.

sources            which reader takes a source
from_torchvision   transforms in Python, v1 and v2, and torchvision's weights
from_timm, from_huggingface, from_albumentations, from_torchpipe   configurations in names and files
imported           what a reader finds: entries of stages, and gaps, which no stage equals
distance           how far a stage is from what it stands for, measured on a test picture
python_objects, files   what users name: module:attribute, JSON, YAML and TOML
yaml_text          the file
wrap               gpuflow.wrap, with transforms, dataset and sampling
"""

from gpuflow.migration.imported import Imported
from gpuflow.migration.sources import Written, read_source, read_sources

__all__ = ["Imported", "Written", "read_source", "read_sources"]
