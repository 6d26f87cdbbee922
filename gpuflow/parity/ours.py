"""gpuflow's own ways: the loader of training, and the serving graph."""

from __future__ import annotations

import importlib.metadata
import json
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from gpuflow.config import BatchSpec, Config, PipelineSpec
from gpuflow.decode.codecs import decoder_description
from gpuflow.decode.preset import Preset, is_preset_on_gpu
from gpuflow.errors import BadSampleError
from gpuflow.loader.assemble import build_loader
from gpuflow.loader.placement import explain_gpu
from gpuflow.parity.base import BATCH, Results, missing_gpu, missing_torchpipe, served
from gpuflow.parity.images import Encoded, InMemory
from gpuflow.parity.prefixes import Prefix
from gpuflow.pipeline.program import Program
from gpuflow.sources import Folder
from gpuflow.torchpipe.graph import PRESET_OPERATORS

__all__ = ["Serving", "Training"]


@dataclass(frozen=True, slots=True)
class Training:
    """The loader of a pipeline, with batches as in training."""

    config: Config
    name: str
    device: str

    def describe(self) -> str:
        if self.device == "cuda":
            return explain_gpu(self.config, self.name)
        decoder = self.config.programs[self.name].decoder
        return decoder.library or decoder_description()

    def missing(self) -> str | None:
        decoder = self.config.programs[self.name].decoder
        by_torchpipe = is_preset_on_gpu(decoder)
        if self.device == "cpu" and (by_torchpipe or decoder.backend == "gpu"):
            return f"{decoder!r} runs only on a GPU"
        return missing_gpu(self.device) or (missing_torchpipe(preset=True) if by_torchpipe else None)

    def refuses(self, prefix: Prefix) -> str | None:
        return None

    def run(self, prefix: Prefix, images: Sequence[Encoded]) -> Results:
        """Run the loader. It replaces bad samples, and its list of bad samples gives the reason for each."""
        with tempfile.TemporaryDirectory(prefix="gpuflow_") as folder:
            listed = Path(folder) / "bad.jsonl"
            stages = PipelineSpec(stages=(), batch=BatchSpec(size=BATCH), on_error="replace")
            config = replace(
                self.config,
                source_block=Folder(folder="", seed=self.config.source.seed),  # the samples are in memory
                pipelines={self.name: stages},
                programs={self.name: prefix.program},
                run=self.config.run.model_copy(
                    update={"bad_file": str(listed), "max_bad": None, "memory_limit": None, "audit": None}
                ),
            )
            source = InMemory(images)
            with build_loader(config, self.name, rank=0, world_size=1, device=self.device, whole=source) as loader:
                batches, done = iter(loader), 0
                while done < len(images):
                    with warnings.catch_warnings():  # many samples are bad on purpose
                        warnings.simplefilter("ignore", UserWarning)
                        batch = next(batches)
                    for i, index in enumerate(batch.indices.tolist(), start=done):
                        yield batch.images[i - done] if index == i else _fault(listed, i)
                    done += len(batch.indices)


def _fault(listed: Path, index: int) -> BadSampleError:
    """Read from the loader's list of bad samples why a sample is bad."""
    rows = map(json.loads, listed.read_text(encoding="utf-8").splitlines())
    return next(BadSampleError(row["stage"], row["reason"]) for row in rows if row["index"] == index)


@dataclass(frozen=True, slots=True)
class Serving:
    """The graph of the block `serve`, with as many concurrent requests as training has images in a batch."""

    config: Config
    name: str
    device: str

    def describe(self) -> str:
        decoder = self.config.programs["serve"].decoder
        if isinstance(decoder, Preset):
            return f"torchpipe {importlib.metadata.version('torchpipe')}: {PRESET_OPERATORS[decoder.name]}"
        description = explain_gpu(self.config, "serve") if self.device == "cuda" else decoder_description()
        return f"omniback {importlib.metadata.version('omniback')}: {description}"

    def missing(self) -> str | None:
        if self.config.serve is None:
            return f"{self.config.path} has no block serve"
        decoder = self.config.programs["serve"].decoder
        if self.device == "cpu" and is_preset_on_gpu(decoder):
            return f"{decoder!r} runs only on a GPU"
        return missing_torchpipe(preset=isinstance(decoder, Preset)) or missing_gpu(self.device)

    def refuses(self, prefix: Prefix) -> str | None:
        program = self._program(prefix)
        if isinstance(program, str):
            return program
        fixed = prefix.program.specs[prefix.count].fixed
        return None if fixed else "a graph gives images of one size, and after this stage they differ"

    def _program(self, prefix: Prefix) -> Program | str:
        """The program that the graph runs for a prefix, or a text that says why the graph has no such prefix.

        If serving and training differ, the whole of serving is compared with the whole of training. This is not so if
        serving lacks the last stage alone, and a model can contain that one; `missing_stage` checks that it does. Where
        a stage runs, such as `decode.backend`, is no such difference.
        """
        serve, pipeline = self.config.programs["serve"], self.config.programs[self.name].pipeline
        served, wanted, count = serve.pipeline.lines, pipeline.lines, prefix.count
        if served == wanted[:count]:
            return serve
        if count == len(wanted):
            may_be_in_model = served == wanted[:-1] and pipeline.stages[-1].module() is not None
            return "serving ends before this stage, which a model can contain" if may_be_in_model else serve
        if served[:count] == wanted[:count]:
            return prefix.program
        lines = zip(serve.pipeline.stages, served, wanted, strict=False)
        other = next((stage for stage, line, want in lines if line != want), None)
        return "serving ends before this stage" if other is None else f"serving has {other!r} at this stage"

    def run(self, prefix: Prefix, images: Sequence[Encoded]) -> Results:
        program = self._program(prefix)
        assert isinstance(program, Program)
        yield from served(self.config, program, self.device, images)
