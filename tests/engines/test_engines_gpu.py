"""Engines on an NVIDIA GPU: the CPU's logits, CUDA graphs, compilation, instances at the same time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gpuflow.config import ModelSpec
from gpuflow.engines import Engine, open_engine, open_engines
from gpuflow.engines.pytorch import TorchEngine, padded_sizes
from gpuflow.errors import ConfigError
from gpuflow.runtime.threads import DaemonPool
from tests.serve.models import FLOAT, UINT8, Models, noise

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no NVIDIA GPU"),
]

GPU = torch.device("cuda", 0)
TOLERANCE = 5e-3  # torch lets convolutions round to TF32


def on_gpu(file: Path, image: Any = FLOAT, **settings: Any) -> Engine:
    return open_engine(ModelSpec.model_validate({"file": str(file), **settings}), image=image, device=GPU)


def expected(models: Models, count: int) -> torch.Tensor:
    """The logits on the CPU."""
    with torch.inference_mode():
        logits: torch.Tensor = models.module()(noise(count))
    return logits


@pytest.mark.parametrize("file", ["checkpoint", "pt2"])
def test_logits_are_those_of_the_cpu(file: str, models: Models) -> None:
    running = on_gpu(getattr(models, file), batch=5)
    running.warm_up()
    for count in (1, 2, 5):
        logits = running.run(noise(count).to(GPU))
        assert (logits.device.type, logits.dtype) == ("cpu", torch.float32)
        torch.testing.assert_close(logits, expected(models, count), rtol=0, atol=TOLERANCE)
    assert running.describe()["device"] == torch.cuda.get_device_name(GPU)
    running.close()


def test_a_folded_model(models: Models) -> None:
    images = noise(3, UINT8)
    reference = open_engine(ModelSpec(file=str(models.folded_pt2)), image=UINT8, device=torch.device("cpu"))
    ours = on_gpu(models.folded_pt2, UINT8, cuda_graphs=True).run(images.to(GPU))
    torch.testing.assert_close(ours, reference.run(images), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("file", ["checkpoint", "pt2"])
@pytest.mark.parametrize("warm", [True, False])
def test_cuda_graphs_give_the_same_logits(file: str, warm: bool, models: Models) -> None:
    """At every batch size, in any order, with earlier batches' images left in the padding."""
    eager = on_gpu(getattr(models, file), batch=12, cuda_graphs=False)
    graphs = on_gpu(getattr(models, file), batch=12, cuda_graphs=True)
    if warm:
        graphs.warm_up()
    assert graphs.describe()["cuda_graphs"] == ([1, 2, 3, 6, 12] if warm else [])
    for count in (12, 1, 7, 2, 12, 3, 11, 1, 6):
        images = noise(count).to(GPU)
        torch.testing.assert_close(graphs.run(images), eager.run(images), rtol=0, atol=TOLERANCE)
    graphs.close()


@pytest.mark.parametrize("precision", ["float32", "float16", "bfloat16"])
def test_graphs_are_the_default_and_equal_the_plain_run_bit_for_bit(precision: str, models: Models) -> None:
    """At every padded size and every number of images below it: a graph replays the kernels of the plain run."""
    eager = on_gpu(models.checkpoint, batch=16, precision=precision, cuda_graphs=False)
    graphs = on_gpu(models.checkpoint, batch=16, precision=precision)
    for running in (eager, graphs):
        running.warm_up()
    assert (eager.describe()["cuda_graphs"], graphs.describe()["cuda_graphs"]) == ([], [1, 2, 4, 8, 16])
    for count in range(1, 17):
        images = noise(count).to(GPU)
        assert torch.equal(graphs.run(images), eager.run(images)), count
    graphs.close()


class AsksTheGpu(nn.Module):
    """A model that waits for a value of the GPU, which no CUDA graph can, if its batch has at least `least` images."""

    def __init__(self, least: int) -> None:
        super().__init__()
        self._least = least

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        logits = images.mean(dim=(2, 3))
        return logits * (2.0 if len(images) >= self._least and logits.sum().item() > 1e9 else 1.0)


def test_sizes_that_cannot_be_captured_run_without_a_graph(caplog: pytest.LogCaptureFixture) -> None:
    settings: dict[str, Any] = {"image": FLOAT, "batch": 8, "device": GPU, "sizes": padded_sizes(8)}
    running = TorchEngine(AsksTheGpu(4), cuda_graphs="auto", **settings)
    running.warm_up()
    assert running.describe()["cuda_graphs"] == [1, 2]
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("the model: batches of 4, 8 run without a CUDA graph, and slower: ")
    for count in range(1, 9):
        images = noise(count).to(GPU)
        torch.testing.assert_close(running.run(images), images.mean(dim=(2, 3)).cpu())
    with pytest.raises(ConfigError, match=r"serve\.model\.cuda_graphs cannot be used for batches of 4, 8: "):
        TorchEngine(AsksTheGpu(4), cuda_graphs=True, **settings).warm_up()


def test_a_failed_capture_does_not_keep_memory() -> None:
    """torch's allocator must reuse memory that two streams have used; it does not while it believes in a capture."""
    image = replace(FLOAT, shape=(512, 512, 3))
    running = TorchEngine(AsksTheGpu(1), image=image, batch=8, device=GPU, sizes=padded_sizes(8), cuda_graphs="auto")
    running.warm_up()
    assert running.describe()["cuda_graphs"] == []
    images = noise(8, image)

    def work() -> int:
        for _ in range(50):
            running.run(images.to(GPU))
        torch.cuda.synchronize(GPU)
        return torch.cuda.memory_reserved(GPU)

    work()
    before = work()
    assert work() - before < 10 * images.nbytes


@pytest.mark.parametrize("precision", ["float16", "bfloat16"])
@pytest.mark.parametrize("cuda_graphs", [True, False])
def test_16_bits(precision: str, cuda_graphs: bool, models: Models) -> None:
    running = on_gpu(models.checkpoint, precision=precision, cuda_graphs=cuda_graphs)
    torch.testing.assert_close(running.run(noise(3).to(GPU)), expected(models, 3), rtol=0, atol=0.05)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's compiler
@pytest.mark.parametrize("cuda_graphs", [True, False])
def test_compiled(cuda_graphs: bool, models: Models) -> None:
    running = on_gpu(models.checkpoint, batch=4, compile=True, cuda_graphs=cuda_graphs)
    running.warm_up()
    for count in (1, 3, 4):
        logits = running.run(noise(count).to(GPU))
        torch.testing.assert_close(logits, expected(models, count), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("cuda_graphs", [True, False])
def test_instances_at_the_same_time(cuda_graphs: bool, models: Models) -> None:
    """Each thread makes its images on its own stream, just before the engine reads them."""
    settings = {"instances": 3, "batch": 8, "cuda_graphs": cuda_graphs}
    model = ModelSpec.model_validate({"file": str(models.checkpoint), **settings})
    engines = open_engines(model, image=FLOAT, device=GPU)
    wanted = {count: expected(models, count) for count in range(1, 9)}

    def work(running: Engine, stride: int) -> None:
        running.warm_up()
        with torch.cuda.stream(torch.cuda.Stream(GPU)):  # type: ignore[no-untyped-call]
            for step in range(100):
                count = step * stride % 8 + 1
                logits = running.run(noise(count).to(GPU, non_blocking=True))
                torch.testing.assert_close(logits, wanted[count], rtol=0, atol=TOLERANCE)

    pool = DaemonPool(3, "test")
    done = [pool.submit(work, running, stride) for stride, running in enumerate(engines, start=1)]
    for future in done:
        future.result(120)
    pool.shutdown()


def test_onnxruntime_on_cuda(models: Models) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
        pytest.skip("onnxruntime here has no CUDA provider; it is in onnxruntime-gpu")
    for file, image in ((models.onnx, FLOAT), (models.folded_onnx, UINT8)):
        reference = open_engine(ModelSpec(file=str(file)), image=image, device=torch.device("cpu"))
        running = on_gpu(file, image)
        running.warm_up()
        images = noise(3, image)
        torch.testing.assert_close(running.run(images.to(GPU)), reference.run(images), rtol=0, atol=TOLERANCE)
