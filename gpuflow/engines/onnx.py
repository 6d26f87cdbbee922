"""The engine `onnxruntime`: an `.onnx` file on onnxruntime's CPU or CUDA provider."""

from __future__ import annotations

from typing import Any

import torch

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
    model_error,
    read_model,
)
from gpuflow.errors import ConfigError, MissingExtra, Problem
from gpuflow.pipeline.stage import ImageSpec

_DTYPES = {"tensor(float)": "float32", "tensor(float16)": "float16", "tensor(uint8)": "uint8"}
_KIND = "an ONNX model"


class OnnxEngine:
    """One session of onnxruntime.

    Args:
        path: the model.
        image: what the pipeline gives.
        batch: the largest one.
        device: `cpu`, or `cuda` for onnxruntime's CUDA provider.
        threads: of an operator, on a CPU.
    """

    def __init__(self, path: str, *, image: ImageSpec, batch: int, device: torch.device, threads: int) -> None:
        ort = _onnxruntime()
        self.batch = batch
        self._path, self._image, self._device, self._threads = path, image, device, threads
        options = ort.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
        options.log_severity_level = 3  # errors
        providers = _providers(ort, device)
        self._session: Any = read_model(path, lambda: ort.InferenceSession(path, options, providers=providers), _KIND)
        found = self._session.get_modelmeta().custom_metadata_map
        self.info = read_model(path, lambda: ModelInfo.from_json(found.get(METADATA_KEY)), _KIND)
        self._input, self._output = self._input_and_output()
        if device.type == "cuda" and self._session.get_providers()[0] != providers[0][0]:
            raise model_error(path, "cannot run on onnxruntime's CUDA provider here; its log on stderr says why")

    def _input_and_output(self) -> tuple[str, str]:
        """Return the names of the one input and of the logits. Raises ConfigError unless the input takes the images."""
        inputs = self._session.get_inputs()
        if len(inputs) != 1:
            raise model_error(self._path, f"must take one input, images [N, C, H, W], takes {len(inputs)}")
        (entry,) = inputs
        dtype = _DTYPES.get(entry.type, entry.type)
        check_input(self._path, self._image, self.info, shape=entry.shape, dtype=dtype)
        if isinstance(fixed := entry.shape[0], int):
            check_batch_sizes(self._path, self.batch, fewest=fixed, most=fixed)
        names = [output.name for output in self._session.get_outputs()]
        if len(names) != 1 and "logits" not in names:
            rule = f"must give logits [N, classes] alone, or by the name logits, gives {', '.join(names)}"
            raise model_error(self._path, rule)
        return entry.name, "logits" if "logits" in names else names[0]

    def warm_up(self) -> None:
        for size in {1, self.batch}:
            self.run(black_images(size, self._image, self._device))

    def bind_thread(self) -> None:
        """Run once on a GPU, where onnxruntime creates library handles at a thread's first run."""
        if self._device.type == "cuda":
            self.warm_up()

    def run(self, images: torch.Tensor) -> torch.Tensor:
        check_batch(images, self._image, self.batch)
        images = images.contiguous()
        if self._device.type == "cpu":
            (logits,) = self._session.run([self._output], {self._input: images.numpy()})
            return check_logits(torch.from_numpy(logits), len(images)).float()
        binding = self._session.io_binding()
        torch.cuda.current_stream(self._device).synchronize()  # onnxruntime uses its own stream
        dtype = images.new_empty(0, device="cpu").numpy().dtype
        device_id = self._device.index or 0
        binding.bind_input(self._input, "cuda", device_id, dtype, tuple(images.shape), images.data_ptr())
        binding.bind_output(self._output, "cpu")
        self._session.run_with_iobinding(binding)
        return check_logits(torch.from_numpy(binding.copy_outputs_to_cpu()[0]), len(images)).float()

    def describe(self) -> dict[str, Any]:
        return {
            "engine": "onnxruntime",
            "onnxruntime": _onnxruntime().__version__,
            "device": "cpu" if self._device.type == "cpu" else torch.cuda.get_device_name(self._device),
            "batch": self.batch,
            "precision": "as exported",
            "providers": self._session.get_providers(),
            "threads": self._threads,
            "file": self._path,
        }

    def close(self) -> None:
        self._session = None


def open_all(model: ModelSpec, *, image: ImageSpec, device: torch.device) -> list[OnnxEngine]:
    """Return engines as `open_engines` does. Each has its own session, because onnxruntime's threads belong to a
    session."""
    threads = cores_per_instance(model.instances)
    return [
        OnnxEngine(model.file, image=image, batch=model.batch, device=device, threads=threads)
        for _ in range(model.instances)
    ]


def info_of(path: str) -> ModelInfo:
    """Return the metadata of an `.onnx` file."""
    try:
        import onnx
    except ImportError as error:
        raise MissingExtra("reading an .onnx file", "onnx", "serve") from error
    model = read_model(path, lambda: onnx.load(path, load_external_data=False), _KIND)
    found = {entry.key: entry.value for entry in model.metadata_props}
    return read_model(path, lambda: ModelInfo.from_json(found.get(METADATA_KEY)), _KIND)


def _onnxruntime() -> Any:
    try:
        import onnxruntime
    except ImportError as error:
        raise MissingExtra("the engine onnxruntime", "onnxruntime", "serve") from error
    return onnxruntime


def _providers(ort: Any, device: torch.device) -> list[tuple[str, dict[str, Any]]]:
    if device.type == "cpu":
        return [("CPUExecutionProvider", {})]
    if "CUDAExecutionProvider" not in ort.get_available_providers():
        rule = "is onnxruntime, which has no CUDA here; install onnxruntime-gpu in its place, or serve on the CPU"
        raise ConfigError([Problem("serve.model.engine", rule)])
    return [("CUDAExecutionProvider", {"device_id": device.index or 0}), ("CPUExecutionProvider", {})]
