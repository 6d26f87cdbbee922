"""The engine `torch`: a checkpoint of `gpuflow train` (`.pt`) or a program of `torch.export` (`.pt2`).

On a GPU and with `compile` only a few batch sizes run, and smaller batches are padded up to them: for each new size
cuDNN selects kernels again, which takes a tenth of a second with a ResNet-50. On a GPU the work on each of these sizes
is captured as a CUDA graph, if the model allows it and the graph gives the same logits.
"""

from __future__ import annotations

import logging
import warnings
import zipfile
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import PurePath
from typing import Any, Literal, TypeVar

import torch
from torch import nn

from gpuflow.config import ModelSpec
from gpuflow.engines.base import (
    METADATA_KEY,
    ModelInfo,
    black_images,
    check_batch,
    check_batch_sizes,
    check_input,
    check_logits,
    cores_per_instance,
    difference,
    model_error,
    noise_images,
    read_model,
    reading_fault,
    run_in_thread,
)
from gpuflow.engines.model_library import build_model
from gpuflow.engines.program_file import drop_origins, refuse_code
from gpuflow.errors import ConfigError, Problem, reason_of, suggest
from gpuflow.pipeline.stage import ImageSpec
from gpuflow.runtime.cuda import CudaCapture
from gpuflow.runtime.threads import DaemonPool, use_torch_threads

EXTRA_FILE = f"{METADATA_KEY}.json"
"""The file inside a `.pt2` that holds its `ModelInfo`."""
CHECKPOINT_VERSION = 1
"""Of the files that training writes and serving reads."""
_MAX_SIZES = 8  # torch.compile stops compiling a function after this many variants
_ANY_NUMBER = 1 << 31  # an exported axis without a largest size has an infinite one
_COMPILE_SECONDS = 1800.0
_LOG = logging.getLogger(__name__)
_RUNS_BEFORE_CAPTURE = 3
_TOLERANCES = {torch.float16: 0.05, torch.bfloat16: 0.05}
_FLOAT32_TOLERANCE = 5e-3  # torch lets convolutions round to TF32

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Captured:
    """Holds the work on batches of one size. images: its input [N, C, H, W]. replay: runs it. logits: its output [N,
    K]."""

    images: torch.Tensor
    replay: Callable[[], object]
    logits: torch.Tensor


Capture = Callable[[Callable[[], torch.Tensor]], tuple[Callable[[], object], torch.Tensor]]
"""Captures work on a GPU. Returns what replays it, and what the work returned, whose memory each replay fills."""


def tolerance(dtype: torch.dtype, logits: torch.Tensor) -> float:
    """Return how far a replay's logits may be from those of a plain run of a model in this dtype."""
    finite = logits[logits.isfinite()]
    return _TOLERANCES.get(dtype, _FLOAT32_TOLERANCE) * max(1.0, float(finite.abs().max()) if len(finite) else 0.0)


def padded_sizes(batch: int) -> tuple[int, ...]:
    """Return the batch sizes that run on a GPU or are compiled, ascending: `batch`, half of it, and so on; at most
    eight.

    Examples:
        >>> padded_sizes(6)
        (1, 2, 3, 6)
    """
    return tuple(sorted({-(-batch >> halvings) for halvings in range(_MAX_SIZES)}))


class TorchEngine:
    """Runs a module; on a GPU, on its own stream. `run` sets the number of torch's threads of the calling thread.

    Args:
        module: in eval mode; it is moved to the device.
        image: what the pipeline gives.
        batch: the largest one.
        info: metadata of the module.
        precision: dtype to which weights and images are cast; None casts nothing.
        sizes: batch sizes to pad to, ascending up to `batch`; None pads nothing.
        cuda_graphs: `warm_up` captures each of `sizes` as a CUDA graph, compares it with the plain run, and with `auto`
            does without those that fail, with True raises ConfigError; batches before that run without.
        compiled: the result of `torch.compile` of the module, which replaces the module in `warm_up`.
        threads: that torch may use; None leaves its setting alone.
        file: that the module was loaded from.
        capture: captures the work on one size, after a few runs; by default as a CUDA graph.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        image: ImageSpec,
        batch: int,
        device: torch.device,
        info: ModelInfo | None = None,
        precision: str | None = None,
        sizes: tuple[int, ...] | None = None,
        cuda_graphs: bool | Literal["auto"] = False,
        compiled: nn.Module | None = None,
        threads: int | None = None,
        file: str = "",
        capture: Capture | None = None,
    ) -> None:
        assert sizes is None or sizes[-1] == batch
        assert sizes is not None or not cuda_graphs
        self.info, self.batch = info or ModelInfo(), batch
        self._image, self._device, self._sizes = image, device, sizes
        self._dtype: torch.dtype = getattr(torch, precision or image.dtype)
        self._module: nn.Module | None = module.to(device, self._dtype) if precision else module.to(device)
        self._compiled = compiled
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._capture = capture
        if cuda_graphs and capture is None:
            assert self._stream is not None
            # The graphs share memory: one runs at a time, and its logits are copied before the next one runs.
            self._capture = partial(CudaCapture(device, self._stream), runs_before=_RUNS_BEFORE_CAPTURE)
        self._graphs: dict[int, Captured] = {}
        self._graphs_required = cuda_graphs is True
        self._threads, self._file = threads, file
        self._about = {"file": file, "precision": precision or "as it is", "compile": compiled is not None}

    def warm_up(self) -> None:
        """Run each batch size once. Compile the module and capture the CUDA graphs first, if asked for.

        The largest batch comes first, because the others reuse its memory.

        Raises ConfigError where a graph is required and fails.
        """
        run: Callable[[Callable[[], str | None]], str | None] = run_in_thread
        if self._compiled is not None:
            self._module, run = self._compiled, _run_in_lasting_thread
        failed: dict[str, list[int]] = {}
        for size in sorted(self._sizes or {1, self.batch}, reverse=True):
            if self._capture is not None and (fault := run(partial(self._capture_size, size))) is not None:
                failed.setdefault(fault, []).append(size)
            run(partial(self._run_once, size))
        for fault, sizes in failed.items():
            which = ", ".join(map(str, sorted(sizes)))
            if self._graphs_required:
                rule = f"cannot be used for batches of {which}: {fault}"
                at = ("serve", "model", "cuda_graphs")
                raise ConfigError([Problem.of(at, rule, action="use auto or false", code="config.rule")])
            name = self._file or "the model"
            _LOG.warning("%s: batches of %s run without a CUDA graph, and slower: %s", name, which, fault)

    def bind_thread(self) -> None:
        """Run each size without a CUDA graph once: torch selects cuDNN's kernels again on each thread, in 0.1 s a
        size."""
        if self._stream is not None:
            for size in reversed(self._sizes or (1, self.batch)):
                if size not in self._graphs:
                    self._run_once(size)

    def _run_once(self, size: int) -> None:
        self.run(black_images(size, self._image, self._device))

    def run(self, images: torch.Tensor) -> torch.Tensor:
        check_batch(images, self._image, self.batch)
        if self._threads is not None:
            use_torch_threads(self._threads)
        with torch.inference_mode():
            if self._stream is None:
                logits = self._forward(images).float()
            else:
                self._stream.wait_stream(torch.cuda.current_stream(self._device))
                with torch.cuda.stream(self._stream):
                    images.record_stream(self._stream)
                    logits = self._forward(images).float().cpu()
        return logits[: len(images)].clone()  # an inference tensor could not be written to outside of inference mode

    def _forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the logits of the images, followed by those of the padding."""
        assert self._module is not None, "a closed engine does not run"
        count = len(images)
        size = count if self._sizes is None else self._sizes[bisect_left(self._sizes, count)]
        if (graph := self._graphs.get(size)) is not None:
            graph.images[:count].copy_(images)
            graph.replay()
            return graph.logits
        if size > count:
            images = nn.functional.pad(images, (0, 0, 0, 0, 0, 0, 0, size - count))
        return check_logits(self._module(images.to(self._dtype)), size)

    def _capture_size(self, size: int) -> str | None:
        """Capture the work on `size` images, and compare it with the plain run on the same images.

        Returns why batches of this size are run without a graph; None if they are run with one.
        """
        module, capture = self._module, self._capture
        assert module is not None and capture is not None
        self._graphs.pop(size, None)
        noise = noise_images(size, self._image, self._device)
        plain = self.run(noise)  # also sets torch's threads; its errors are those of the model
        try:
            with torch.inference_mode():
                static = black_images(size, self._image, self._device).to(self._dtype)
                self._graphs[size] = Captured(static, *capture(lambda: module(static)))
            apart = difference(self.run(noise), plain)
        except Exception as error:  # a model's code and torch may raise any during a capture
            self._graphs.pop(size, None)
            return reason_of(error, with_type=True)
        if apart > (allowed := tolerance(self._dtype, plain)):
            del self._graphs[size]
            return f"its logits differ from those of the plain run by {apart:.3g}, more than {allowed:.3g}"
        return None

    def layer(self, name: str) -> nn.Module:
        """Return a layer of the model by its name. Its hooks do not run where a CUDA graph is replayed.

        Raises ConfigError if there is none.
        """
        assert self._module is not None, "a closed engine has no layers"
        layers: dict[str, nn.Module] = {known: layer for known, layer in self._module.named_modules() if known}
        if name not in layers:
            raise ConfigError([Problem("--embeddings:", "must be a layer of the model", name, suggest(name, layers))])
        return layers[name]

    def describe(self) -> dict[str, Any]:
        name = torch.cuda.get_device_name(self._device) if self._stream is not None else "cpu"
        return {
            "engine": "torch",
            "torch": torch.__version__,
            "device": name,
            "batch": self.batch,
            "cuda_graphs": sorted(self._graphs),
            "threads": self._threads,
            **self._about,
        }

    def close(self) -> None:
        self._module, self._compiled, self._capture = None, None, None
        self._graphs.clear()


@lru_cache(maxsize=1)
def _lasting_thread() -> DaemonPool:
    return DaemonPool(1, "programs", lambda: use_torch_threads(1))  # loading needs no more; compiled code sets its own


def _run_in_lasting_thread(work: Callable[[], T]) -> T:
    """Call `work` on the one thread that loads programs and compiles, which never ends.

    Where torch 2.11 sees no GPU, it keeps an object of the last thread that did either, and uses it the next time: it
    crashes if that thread has ended. Compiled code runs on any thread with the same number of torch's threads; with
    another number torch would compile it again.
    """
    return _lasting_thread().submit(work).result(_COMPILE_SECONDS)


# --- files ------------------------------------------------------------------------------------------------------------


def open_all(model: ModelSpec, *, image: ImageSpec, device: torch.device) -> list[TorchEngine]:
    """Return engines as `open_engines` does. All of them share one module, which has no state."""
    path, precision = model.file, None
    if model.cuda_graphs is True and device.type != "cuda":
        rule = f"is true and needs an NVIDIA GPU, but the device is {device}; use auto"
        raise ConfigError([Problem("serve.model.cuda_graphs", rule)])
    if path.endswith(".pt"):
        module, info = load_checkpoint(path)
        precision = model.precision
    else:
        info = info_of(path)
        module = _run_in_lasting_thread(lambda: _load_program(model, image, info, device))
    compiled: Any = torch.compile(module, dynamic=False) if model.compile else None
    threads = cores_per_instance(model.instances) if device.type == "cpu" or model.compile else None
    return [
        TorchEngine(
            module,
            image=image,
            batch=model.batch,
            device=device,
            info=info,
            precision=precision,
            sizes=padded_sizes(model.batch) if model.compile or device.type == "cuda" else None,
            cuda_graphs=model.cuda_graphs if device.type == "cuda" else False,
            compiled=compiled,
            threads=threads,
            file=path,
        )
        for _ in range(model.instances)
    ]


def info_of(path: str) -> ModelInfo:
    """Return the metadata of a `.pt` or `.pt2` file."""
    if path.endswith(".pt"):
        return _checkpoint_info(path, read_checkpoint(path))
    return read_model(path, lambda: _program_info(path), "a program of torch.export")


def load_checkpoint(path: str) -> tuple[nn.Module, ModelInfo]:
    """Return the model of a checkpoint, in eval mode and in the memory format of training.

    Its weights are the moving average of the training, where the checkpoint has one.
    """
    state = read_checkpoint(path)

    def build() -> nn.Module:
        module = build_model(state["arch"], len(state["classes"]) or state["outputs"])
        module.load_state_dict(state.get("ema") or state["model"])
        return module.eval().to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]

    return read_model(path, build, f"a checkpoint of {state['arch']}"), _checkpoint_info(path, state)


def read_checkpoint(
    path: str,
    device: str | torch.device = "cpu",
    more: Sequence[str] = (),
    action: str = "export a model of your own as .pt2",
) -> dict[str, Any]:
    """Return the values of a checkpoint of `gpuflow train`, with its tensors on a device.

    Args:
        more: keys that must be there besides those that serving reads.
        action: what to do about a file that is damaged or of another kind.

    Raises:
        ConfigError: there is none, or it is damaged, or another program or a newer gpuflow wrote it.
    """
    what = "a checkpoint of gpuflow train"
    if _is_torchscript(path):  # torch.load warns of it, and advises weights_only=False, which runs code
        raise model_error(path, f"is not {what} but TorchScript, which gpuflow does not run; export the model as .pt2")
    try:
        state = torch.load(path, map_location=device, weights_only=True)
    except Exception as error:  # of torch's readers, which have no common base
        raise model_error(path, f"cannot be read as {what}: {reading_fault(error)}; {action}") from error
    values: dict[str, Any] = state if isinstance(state, dict) else {}
    missing = [key for key in ("arch", "classes", "model", "preprocessing", *more) if key not in values]
    if missing:
        raise model_error(path, f"is not {what}: it has no {', '.join(missing)}; {action}")
    if (version := values.get("version", CHECKPOINT_VERSION)) != CHECKPOINT_VERSION:
        reads = f"this gpuflow reads version {CHECKPOINT_VERSION}; upgrade gpuflow"
        raise model_error(path, f"is a checkpoint of version {version}, {reads}")
    return values


def _is_torchscript(path: str) -> bool:
    """Return True for a file that `torch.jit.save` wrote."""
    if not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as archive:
        return any(PurePath(name).name == "constants.pkl" for name in archive.namelist())


def _checkpoint_info(path: str, state: dict[str, Any]) -> ModelInfo:
    named = {**state, "classes": state["classes"] or None}  # a model of numbers has outputs without names
    return read_model(path, lambda: ModelInfo.of(named), f"a checkpoint of {state['arch']}")


def _program_info(path: str) -> ModelInfo:
    with zipfile.ZipFile(path) as archive:
        names = [name for name in archive.namelist() if PurePath(name).name == EXTRA_FILE]
        return ModelInfo.from_json(archive.read(names[0]).decode() if names else None)


def _load_program(model: ModelSpec, image: ImageSpec, info: ModelInfo, device: torch.device) -> nn.Module:
    path = model.file

    def load() -> torch.export.ExportedProgram:
        refuse_code(path)
        with warnings.catch_warnings():
            # torch maps the weights read-only and warns about it; nothing writes to them.
            warnings.filterwarnings("ignore", "The given buffer is not writable", UserWarning)
            program = torch.export.load(path)
        drop_origins(program)
        return program

    program = read_model(path, load, "a program of torch.export")
    inputs = [node for node in program.graph.nodes if node.name in program.graph_signature.user_inputs]
    if len(inputs) != 1:
        raise model_error(path, f"must take one input, images [N, C, H, W], takes {len(inputs)}")
    example = inputs[0].meta["val"]
    shape = [side if isinstance(side, int) else None for side in example.shape]
    check_input(path, image, info, shape=shape, dtype=str(example.dtype).removeprefix("torch."))
    fewest, most = _batch_sizes(program, example.shape[0])
    check_batch_sizes(path, model.batch, fewest=fewest, most=most)
    if device.type != "cpu":
        from torch.export.passes import move_to_device_pass

        program = move_to_device_pass(program, device)
    # Guards, which repeat the checks of the input, cannot run on several threads: instances then fail now and then.
    return program.module(check_guards=False)


def _batch_sizes(program: torch.export.ExportedProgram, axis: int | torch.SymInt) -> tuple[int, int | None]:
    """Return the fewest and the most images that a program takes; None for any number."""
    if isinstance(axis, int):
        return axis, axis
    if (found := program.range_constraints.get(axis.node.expr)) is None:
        return 1, None
    fewest = int(found.lower)  # 0 and 2 where the exporter named no bound; 1 is taken then, too
    return 1 if fewest <= 2 else fewest, int(found.upper) if found.upper < _ANY_NUMBER else None
