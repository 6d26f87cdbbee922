"""The policy by which the cores of this process are divided among threads and processes."""

from __future__ import annotations

from gpuflow.config.models import Config, RunSpec
from gpuflow.pipeline.program import NativeStep, Program
from gpuflow.pipeline.views import AnyProgram, programs_of
from gpuflow.runtime.threads import available_threads
from gpuflow.sources.spec import Offered

_REMOTE_READERS = 16
_GPU_READERS = 2
_MORE_GPU_READERS = 3
_FEWEST_CORES_FOR_MORE_GPU_READERS = 12
"""With these a third reader lets the cores rewrite progressive files while others are read: 22,700 instead of 18,200
photographs a second if 20% are progressive, and no difference if none are (experiments/real_data/NOTES.md)."""
_WORTH_PROCESSES = 10_000
"""Samples from which on processes are started for Python code, which takes seconds."""
_CORES_FOR_ONE_SHARE_THREAD = 4
"""More threads slow down what launches, reads and trains by more than they add (experiments/gpu_path/NOTES.md)."""


def threads_of(run: RunSpec) -> int:
    """Return `run.threads`. If it is auto, that is all that this process may use.

    Examples:
        >>> threads_of(RunSpec(threads=8))
        8
    """
    return available_threads() if run.threads == "auto" else run.threads


def processes_of(run: RunSpec, samples: int, *, in_python: bool) -> int:
    """Return `run.processes`. If it is auto: as many as threads if Python code runs for each of many images, else none.

    in_python: see `parts_in_python`. Threads run C code at the same time, but Python code one after the other.
    """
    threads = threads_of(run)
    if run.processes != "auto":
        return min(run.processes, threads)
    return threads if in_python and threads > 1 and samples >= _WORTH_PROCESSES else 0


def parts_in_python(config: Config, name: str) -> list[str]:
    """Return the parts of a pipeline that run in Python for each image; none if C code runs the whole pipeline.

    They are stages without a native form, decoders of a preset or of `decode.formats`, and sources of other packages.
    """
    parts = _stages_in_python(config.any_program(name))
    parts += [f"source.{spec.kind}" for spec in config.source.sources if isinstance(spec, Offered)]
    return list(dict.fromkeys(parts))


def _stages_in_python(program: AnyProgram) -> list[str]:
    decoder = program.decoder
    steps = [step for one in programs_of(program) for step in one.steps]
    parts = [step.stage.stage_name for step in steps if not isinstance(step, NativeStep)]
    if decoder.library is not None:
        parts.append(f"decode by {decoder.library}")
    if decoder.formats:
        parts.append(f"decode of {', '.join(decoder.formats)}")
    return parts


def serving_processes_of(run: RunSpec, program: Program) -> int:
    """Return how many processes preprocess where the CPU decodes for a service: as for a loader of many samples."""
    return processes_of(run, _WORTH_PROCESSES, in_python=bool(_stages_in_python(program)))


def decode_processes_of(config: Config, name: str, samples: int, *, remote: bool) -> int:
    """Return how many worker processes decode `samples` samples of a pipeline on the CPU, see `processes_of`.

    They read, too, so there are none where separate threads read, and none where the storage is remote: forked
    processes cannot use its connections.
    """
    if remote or readers_of(config, gpu=False, remote=remote):
        return 0
    return processes_of(config.run, samples, in_python=bool(parts_in_python(config, name)))


def readers_of(config: Config, *, gpu: bool, remote: bool) -> int:
    """Return `run.readers`. If it is auto: many for a network; on a GPU a few, which prepare chunks, too; else none.

    remote: whether the opened source's storage is: a local listing may name files behind URLs.
    """
    if config.run.readers != "auto":
        return config.run.readers
    if remote:
        return _REMOTE_READERS
    return gpu_readers_of(threads_of(config.run)) if gpu else 0


def gpu_readers_of(threads: int) -> int:
    """Return how many of `threads` threads read where a GPU decodes and `run.readers` is auto."""
    return _MORE_GPU_READERS if threads >= _FEWEST_CORES_FOR_MORE_GPU_READERS else _GPU_READERS


def share_threads_of(run: RunSpec) -> int:
    """Return how many threads decode the CPU's part of each batch next to a GPU (`cpu_share`)."""
    return max(1, available_threads() // _CORES_FOR_ONE_SHARE_THREAD) if run.threads == "auto" else run.threads
