"""What a package that adds stages or sources imports: the kinds of stages and sources, and their values.

These names stay from one version to the next. They are defined in `gpuflow.pipeline`, `gpuflow.sources` and
`gpuflow.errors`.
"""

from gpuflow.errors import Problem, SourceError
from gpuflow.pipeline import stage
from gpuflow.pipeline.records import Field, MaskFile, Polygons, Ragged, Records, Rle
from gpuflow.pipeline.stage import *  # noqa: F403
from gpuflow.sources import Allocate, Payload, RecordSource, Source, SourceSpec, lay_out, source_spec

__all__ = [
    "Allocate",
    "Field",
    "MaskFile",
    "Payload",
    "Polygons",
    "Problem",
    "Ragged",
    "RecordSource",
    "Records",
    "Rle",
    "Source",
    "SourceError",
    "SourceSpec",
    "lay_out",
    "source_spec",
]
__all__ += stage.__all__
