"""Holds all that decides how a loader runs as one value, and decides where its pipeline is decoded.

That is by the GPU's JPEG engines, by its CUDA kernels, on the CPU, or on both.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from gpuflow.config import Config
from gpuflow.config.resources import share_threads_of, threads_of
from gpuflow.errors import ConfigError, Problem
from gpuflow.execute.gpu.backend import CPU_ASKED_FOR, DECODE_BYTES, Placement, passes_text, place_on_gpu
from gpuflow.execute.gpu.decode_buffers import BUFFERS
from gpuflow.execute.gpu.decode_calls import later_images
from gpuflow.execute.gpu.device_stream import ChunkRunner, DeviceStream
from gpuflow.execute.gpu.passes import passes_of_each
from gpuflow.loader.sampler import ListedEpochs, Order, Steps
from gpuflow.pipeline.views import AnyProgram, ViewsProgram, slot_bytes_of
from gpuflow.runtime.cuda import warn_if_late
from gpuflow.sources import Source
from gpuflow.torchpipe.adapter import missing_operators

if TYPE_CHECKING:
    from gpuflow.execute.cpu.targets import TargetMapper
    from gpuflow.loader.bad_samples import BadSamples
    from gpuflow.loader.records import TurnedImages


_SMOOTHING = 1 / 16
"""The weight of the newest batch. A change takes about ten batches to show: those that were begun before it."""
_LATE_STEP = 1 / 64
"""The fraction by which the part shrinks after a batch that the CPU delayed."""


class Share:
    """Decides which part of each batch the CPU decodes next to a GPU's engines. For one thread.

    The engines take a batch's first rows. The CPU takes the others, a few at a time and some batches ahead. It takes
    some of each batch, not a batch from time to time, so that neither waits long for the slower one. While the consumer
    waits, the part moves until the engines and the CPU need the same time.

    Args:
        part: to begin with, 0 to 1.
        threads: that decode it.
        adapts: false leaves the part as it is.

    Examples:
        >>> Share(0.25, threads=4, adapts=False).rows(32)
        8
    """

    def __init__(self, part: float, *, threads: int, adapts: bool) -> None:
        self.part, self.threads, self.adapts = part, threads, adapts
        self._images, self._seconds = 0.0, 0.0
        self.begin()

    def begin(self) -> None:
        """Begin an epoch."""
        self._last: float | None = None

    def rows(self, count: int) -> int:
        """Return how many rows of a batch of `count` the CPU decodes. One at least is left to the engines."""
        return max(0, min(round(self.part * count), count - 1))

    def update(self, own: int, *, late: bool, wanted: bool, rate: float) -> None:
        """Adapt the part after a batch, of which the engines had `own` rows.

        late: the CPU's rows were the last. wanted: the consumer's GPU has nothing to do without the batch.
        rate: images a second that the CPU's threads would decode if they never waited.
        """
        now, last = time.perf_counter(), self._last
        bound_by_engines = wanted and not late
        self._last = now if bound_by_engines else None
        if not self.adapts:
            return
        if late:
            self.part -= _LATE_STEP * self.part
        elif bound_by_engines and last is not None and rate:
            self._images += own - _SMOOTHING * self._images
            self._seconds += now - last - _SMOOTHING * self._seconds
            if self._seconds:
                engines = self._images / self._seconds
                self.part += _SMOOTHING * (rate / (rate + engines) - self.part)


_CALLERS = 4
"""While one reads and draws, and others wait for images that Python decodes, another keeps all threads busy."""
_LARGEST_CHUNK, _LARGEST_SHARED_CHUNK = 32, 256


@dataclass(frozen=True, kw_only=True, slots=True)
class LoaderPlan:
    """Holds what a loader delivers, and how. `gpuflow.loader.assemble` makes it from a configuration.

    Args:
        program, source: what is done to which samples.
        order: which sample comes when.
        seed: of all random draws.
        batch_size: samples a step.
        drop_last: leave out an incomplete last step.
        rank, world_size: of this process.
        rank_given: whether the caller chose them, perhaps those of a subgroup; else they are those of the process.
        device: where batches are delivered.
        device_stream: to that device if it is a GPU, else None.
        gpu: decodes on the GPU; None where the CPU decodes.
        threads: that decode, or that launch work on the GPU.
        readers: threads that only read, for storage that is waited for; with 0 each decoding thread reads its own
            chunks, so that no chunk passes from thread to thread.
        processes: worker processes that the decoding threads leave chunks to where the CPU decodes; they read, too.
        share: the part of each batch that the CPU decodes next to `gpu`, on separate threads, or None.
        prefetch: finished batches that wait for the consumer.
        timeout_seconds: how long the consumer waits for one.
        bad: counts bad samples and says what becomes of them.
        audit: `run.audit`, the file that lists what is delivered.
        targets: maps the fields of the source's records; None if it has no fields besides image and label.
        turned: counts images that EXIF data turn, where that may matter for `targets`; None elsewhere.
        left_out: how many instances of its samples the source leaves out, because their annotations are incomplete.
        nvtx: mark the stages' operations and the consumer's wait for a profiler.
        identity: names all that decides which samples come when and as what, except for the files themselves; states of
            other loaders are refused by it.
    """

    program: AnyProgram
    source: Source
    order: Order
    seed: int
    batch_size: int
    drop_last: bool = False
    rank: int = 0
    world_size: int = 1
    rank_given: bool = True
    device: torch.device
    device_stream: DeviceStream | None = None
    gpu: ChunkRunner | None = None
    threads: int
    readers: int = 0
    processes: int = 0
    share: Share | None = None
    prefetch: int
    timeout_seconds: float = 120.0
    bad: BadSamples
    audit: str | None = None
    targets: TargetMapper | None = None
    turned: TurnedImages | None = None
    left_out: int = 0
    nvtx: bool = False
    identity: str = ""

    @property
    def steps(self) -> Steps | ListedEpochs:
        """Return the steps of a whole epoch."""
        if isinstance(self.order, ListedEpochs):
            return self.order
        return Steps(
            size=self.order.size,
            batch_size=self.batch_size,
            rank=self.rank,
            world_size=self.world_size,
            drop_last=self.drop_last,
        )

    @property
    def shares_chunks(self) -> bool:
        """Return True if the threads share the images of each chunk: on the CPU, if no worker processes decode."""
        return self.gpu is None and not self.processes

    @property
    def callers(self) -> int:
        """Return how many threads of Python work on chunks. A few are enough if native threads share the images."""
        return min(self.threads, _CALLERS) if self.shares_chunks else self.threads

    @property
    def chunk_size(self) -> int:
        """Return the number of samples of a chunk. Large chunks are few items for SPDL, and for the interpreter."""
        if self.gpu is not None or (self.shares_chunks and not self.readers):
            return min(_LARGEST_SHARED_CHUNK, self.batch_size)
        in_flight = self.batch_size * (self.prefetch + 1)
        return min(_LARGEST_CHUNK, self.batch_size, -(-in_flight // self.threads))


def place(config: Config, name: str, device: torch.device, batch_size: int) -> Placement:
    """Decide where a pipeline of a configuration runs on a device.

    Raises:
        ConfigError: `decode.backend` is gpu and the GPU cannot decode the pipeline; a preset cannot run on this device;
            or `run.memory_limit` is too small.
    """
    program = _program_of(config, name)
    decoder = program.decoder
    if decoder.needs_gpu:
        return _by_torchpipe(config, name, str(decoder.library), device)
    backend = decoder.backend
    if device.type != "cuda":
        placement = Placement(None, None, "the loader's device is the CPU")
    else:
        warn_if_late()
        device_stream = DeviceStream(device)
        placement = Placement(device_stream, None, CPU_ASKED_FOR)
        if backend != "cpu":
            decode_bytes, later = memory_for_decoding(config, name, batch_size)
            placement = place_on_gpu(
                program,
                device_stream,
                decode_bytes,
                images=batch_size,
                buffers=1,
                later_images=later,
                threads=threads_of(config.run),
                decoder_calls=config.run.decoder_calls,
            )
    if backend == "gpu" and placement.gpu is None:
        keys = "decode" if isinstance(program, ViewsProgram) else "stages[0].decode"
        at = f"{config.path}: pipelines.{name}.{keys}.backend"
        raise ConfigError([Problem(at, f"is gpu, but {placement.reason}; use auto or cpu")])
    return placement


def explain_gpu(config: Config, name: str) -> str:
    """Return a text that says what decodes a pipeline for this machine's GPU, or for any if it has none."""
    program = _program_of(config, name)
    if program.decoder.needs_gpu:
        return str(program.decoder.library)
    if program.decoder.backend == "cpu":
        return f"decoded on the CPU: {CPU_ASKED_FOR}"
    if torch.cuda.is_available():
        placement = place(config, name, torch.device("cuda"), 1)
        return placement.reason if placement.gpu is not None else f"decoded on the CPU: {placement.reason}"
    passes = passes_of_each(program)
    if isinstance(passes, str):
        return f"decoded on the CPU: {passes}"
    others = "CUDA kernels" if program.decoder.backend == "gpu" else "decoded on the CPU"
    return f"JPEG engines, then {passes_text(program, passes)}; {others} if it has none"


def _program_of(config: Config, name: str) -> AnyProgram:
    """Return the program of a pipeline, or of `serve`, which is explained here, too."""
    return config.views[name] if name in config.views else config.programs[name]


def _by_torchpipe(config: Config, name: str, library: str, device: torch.device) -> Placement:
    """Place a preset on its GPU. Raise ConfigError if it cannot run there, because it has no other place."""

    def fault(rule: str) -> ConfigError:
        preset = config.pipelines[name].preset
        return ConfigError([Problem(f"{config.path}: pipelines.{name}.preset", f"is {preset}, {rule}")])

    if device.type != "cuda":
        raise fault("which needs a GPU, but the loader's device is the CPU; use device cuda, or torchpipe_cpu")
    if device.index not in (None, 0):
        raise fault(
            f"which knows the first GPU alone, but the device is {device}; set CUDA_VISIBLE_DEVICES to that one"
        )
    if (missing := missing_operators("a preset")) is not None:
        raise fault(f"and {missing}")
    from gpuflow.torchpipe.running_graph import PresetRunner

    device_stream, run = DeviceStream(device), config.run
    runner = PresetRunner(
        config.programs[name],
        device_stream,
        origin=config.path,
        threads=threads_of(run),
        timeout_seconds=run.timeout_s,
    )
    return Placement(device_stream, runner, library)


def memory_for_decoding(config: Config, name: str, batch_size: int) -> tuple[int, int]:
    """Return the bytes of each buffer of decoded pixels, and how many images of later batches may be decoded already.

    What `run.memory_limit` leaves after the batches in flight is for the buffers, and for such images if all of these
    fit.
    """
    limit, later = config.run.memory_limit, later_images(batch_size)
    if limit is None:
        return DECODE_BYTES, later
    image_bytes = slot_bytes_of(_program_of(config, name))
    batches, batch_bytes = config.run.prefetch + 2, batch_size * image_bytes  # with the one that the consumer holds
    left = limit - batches * batch_bytes
    if left // BUFFERS <= 0:
        rule = (
            f"must be more than {batches * batch_bytes:,} bytes, got {limit:,}: {batches} batches of {batch_bytes:,} "
            f"bytes exist at a time in {name!r}; raise it, or lower run.prefetch or batch.size"
        )
        raise ConfigError([Problem(f"{config.path}: run.memory_limit", rule)])
    if left - later * image_bytes >= BUFFERS * DECODE_BYTES:
        return DECODE_BYTES, later
    return min(left // BUFFERS, DECODE_BYTES), 0


def cpu_share_of(config: Config, name: str) -> Share | None:
    """Return what the CPU decodes of each batch next to a GPU's engines, `decode.cpu_share`; None for nothing."""
    part, run = config.any_program(name).decoder.cpu_share, config.run
    return Share(part, threads=share_threads_of(run), adapts=not run.deterministic) if part else None
