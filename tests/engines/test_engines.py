"""Engines: the same logits from every file format, the checks before a model runs, and the texts of errors."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, final

import onnx
import pytest
import torch
from torch import nn

from gpuflow.config import ModelSpec
from gpuflow.engines import (
    Engine,
    ModelInfo,
    class_names,
    open_engines,
    read_info,
    refuse_other_preprocessing,
    warm_up_all,
)
from gpuflow.engines.base import (
    METADATA_KEY,
    black_images,
    cores_per_instance,
    difference,
    noise_images,
    run_in_thread,
)
from gpuflow.engines.onnx import OnnxEngine
from gpuflow.engines.pytorch import TorchEngine, load_checkpoint, padded_sizes, tolerance
from gpuflow.errors import ConfigError, MissingExtra
from gpuflow.pipeline.stage import ImageSpec, Pipeline
from gpuflow.runtime.threads import DaemonPool, available_threads
from gpuflow.stages import CenterCrop, Decode, Normalize, Resize
from tests.datasets import deadline
from tests.forking import Python
from tests.serve.models import CPU, FLOAT, SIDE, UINT8, Models, engine, noise, save_program
from tests.texts import outline

ROOT = Path(__file__).parents[2]
FILES = ("checkpoint", "pt2", "onnx")
each_file = pytest.mark.parametrize("file", FILES)


def file_of(models: Models, name: str) -> Path:
    path = getattr(models, name)
    assert isinstance(path, Path)
    return path


def refuse(info: ModelInfo, pipeline: Pipeline, *, force: bool = False, trust: bool = False) -> None:
    refuse_other_preprocessing(info, pipeline, "m.onnx", force=force, trust=trust)


def fault(act: Callable[[], object]) -> str:
    with pytest.raises(ConfigError) as caught:
        act()
    return str(caught.value)


def broken_rule(act: Callable[[], object]) -> str:
    """Return the outline of the error; its text is in errors.json."""
    with pytest.raises(ConfigError) as caught:
        act()
    return outline(caught.value)


# --- logits -----------------------------------------------------------------------------------------------------------


@each_file
@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_every_file_gives_the_logits_of_torch(models: Models, file: str, layout: Any) -> None:
    image = replace(FLOAT, layout=layout)
    with torch.inference_mode():
        expected = [models.module()(noise(count, image)) for count in (1, 2, 5)]
    running = engine(file_of(models, file), image, batch=5)
    for count, logits in zip((1, 2, 5), expected, strict=True):
        ours = running.run(noise(count, image))
        assert (ours.dtype, ours.device, ours.shape) == (torch.float32, CPU, (count, 3))
        torch.testing.assert_close(ours, logits, rtol=0, atol=1e-4)
        ours += 1  # a plain tensor: it can be written to
    running.close()


@pytest.mark.parametrize("file", ["folded_pt2", "folded_onnx"])
def test_a_folded_model_takes_pixels(models: Models, file: str) -> None:
    images = noise(5, UINT8)
    with torch.inference_mode():
        expected = models.module()(Normalize().module()(images))
    ours = engine(file_of(models, file), UINT8).run(images)
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-4)


@each_file
def test_ready_within_20_seconds(models: Models, file: str) -> None:
    with deadline(100):
        start = time.process_time()
        running = engine(file_of(models, file))
        running.warm_up()
        assert time.process_time() - start < 20
        running.run(noise(1))


@each_file
def test_instances_run_at_the_same_time(models: Models, file: str) -> None:
    model = ModelSpec(file=str(file_of(models, file)), instances=2, batch=4)
    with torch.inference_mode():
        expected = models.module()(noise(4))
    engines = open_engines(model, image=FLOAT, device=CPU)
    assert len(engines) == 2

    def work(running: Engine) -> None:
        for _ in range(5):
            torch.testing.assert_close(running.run(noise(4)), expected, rtol=0, atol=1e-4)

    pool = DaemonPool(2, "test")
    done = [pool.submit(work, running) for running in engines]
    for future in done:
        future.result(60)
    pool.shutdown()


@pytest.mark.parametrize("precision", ["float16", "bfloat16"])
def test_a_checkpoint_may_run_in_16_bits(models: Models, precision: str) -> None:
    with torch.inference_mode():
        expected = models.module()(noise(2))
    running = engine(models.checkpoint, precision=precision)
    torch.testing.assert_close(running.run(noise(2)), expected, rtol=0, atol=0.05)
    assert not torch.equal(running.run(noise(2)), expected)
    assert running.describe()["precision"] == precision


# --- metadata ---------------------------------------------------------------------------------------------------------


def test_describe_of_torch(models: Models) -> None:

    (first, _) = open_engines(ModelSpec(file=str(models.checkpoint), instances=2, batch=8), image=FLOAT, device=CPU)
    assert first.describe() == {
        "engine": "torch",
        "torch": torch.__version__,
        "device": "cpu",
        "batch": 8,
        "cuda_graphs": [],
        "threads": max(1, available_threads() // 2),
        "file": str(models.checkpoint),
        "precision": "float32",
        "compile": False,
    }
    assert engine(models.pt2).describe()["precision"] == "as it is"


def test_describe_of_onnxruntime(models: Models) -> None:

    import onnxruntime

    assert engine(models.onnx, batch=8).describe() == {
        "engine": "onnxruntime",
        "onnxruntime": onnxruntime.__version__,
        "device": "cpu",
        "batch": 8,
        "precision": "as exported",
        "providers": ["CPUExecutionProvider"],
        "threads": max(1, available_threads() // 2),
        "file": str(models.onnx),
    }


@pytest.mark.parametrize("file", [*FILES, "folded_pt2", "folded_onnx"])
def test_files_state_their_preprocessing(models: Models, file: str) -> None:
    pipeline = models.read().programs["serve"].pipeline
    folded = file.startswith("folded")
    before = Pipeline("serve", pipeline.stages[:-1]) if folded else pipeline
    info = ModelInfo(
        classes=("class_0", "class_1", "class_2"),
        preprocessing=before.fingerprint,
        stages=before.lines,
        folded=pipeline.lines[-1] if folded else None,
        activation="softmax",
    )
    assert engine(file_of(models, file), UINT8 if folded else FLOAT).info == info
    assert read_info(str(file_of(models, file))) == info


def test_a_file_without_metadata(models: Models, tmp_path: Path) -> None:
    plain = onnx.load(models.onnx)
    del plain.metadata_props[:]
    onnx.save(plain, tmp_path / "plain.onnx")
    module = models.module().to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
    program = save_program(tmp_path / "plain.pt2", module, noise(2))
    for path in (tmp_path / "plain.onnx", program):
        assert engine(path).info == read_info(str(path)) == ModelInfo()


def test_info_survives_json() -> None:
    info = ModelInfo(classes=("é", "b"), preprocessing="0" * 16, stages=("decode()",), folded="normalize()")
    assert ModelInfo.from_json(info.to_json()) == info
    assert ModelInfo.from_json(ModelInfo().to_json()) == ModelInfo.from_json(None) == ModelInfo.from_json("")
    assert '"gpuflow": "' in info.to_json()


def test_names_of_classes_that_are_not_utf_8_can_be_written_and_sent() -> None:
    """A folder's name may be any bytes; Python has lone surrogates for those that are no text."""
    info = ModelInfo.of({"classes": [b"caf\xe9".decode("utf-8", "surrogateescape"), "tea"]})
    assert info.classes == ("caf\ufffd", "tea")
    assert ModelInfo.from_json(info.to_json().encode().decode()) == info


BAD_METADATA = {
    "[1]": "its metadata must be a mapping, got [1]",
    "{bad": "Expecting property name enclosed in double quotes",
    '{"classes": 5}': "classes in its metadata must be a list of texts, got 5",
    '{"classes": ["a", 5]}': "classes in its metadata must be a list of texts, got ['a', 5]",
    '{"stages": "decode"}': "stages in its metadata must be a list of texts, got 'decode'",
    '{"preprocessing": 1}': "preprocessing in its metadata must be a text, got 1",
    '{"folded": {}}': "folded in its metadata must be a text, got {}",
}


@pytest.mark.parametrize(("text", "reason"), BAD_METADATA.items(), ids=BAD_METADATA)
def test_metadata_of_another_form_names_the_file(text: str, reason: str, models: Models, tmp_path: Path) -> None:
    model, path = onnx.load(models.onnx), tmp_path / "m.onnx"
    (entry,) = [entry for entry in model.metadata_props if entry.key == METADATA_KEY]
    entry.value = text
    onnx.save(model, path)
    for act in (lambda: read_info(str(path)), lambda: engine(path)):
        assert fault(act).startswith(f"{path}: cannot be read as an ONNX model: {reason}")


def test_a_checkpoint_of_other_classes_names_the_file(models: Models, tmp_path: Path) -> None:
    state = torch.load(models.checkpoint, weights_only=True) | {"classes": 5}
    torch.save(state, tmp_path / "m.pt")
    expected = (
        f"{tmp_path}/m.pt: cannot be read as a checkpoint of squeezenet1_1: classes in its metadata must be a list"
    )
    assert fault(lambda: read_info(str(tmp_path / "m.pt"))).startswith(expected)


# --- other preprocessing ----------------------------------------------------------------------------------------------


def test_other_preprocessing_is_refused_with_a_diff() -> None:
    trained = Pipeline("val", (Decode(), Resize(shorter=256), CenterCrop(size=224), Normalize()))
    ours = Pipeline("serve", (Decode(), Resize(shorter=224, antialias=False), CenterCrop(size=224)))
    info = ModelInfo(preprocessing=trained.fingerprint, stages=trained.lines)
    decode = "decode(color='rgb', orientation='ignore', max_pixels=179000000)"
    assert trained.lines[0] == decode
    head = (
        f"m.onnx: was trained with preprocessing {trained.fingerprint}, the stages of serve are {ours.fingerprint}; "
        "take the stages that it was trained with, or set serve.model.force=true"
    )
    assert fault(lambda: refuse(info, ours)).splitlines() == [
        head,
        "--- what the model was trained with",
        "+++ the stages of serve",
        "@@ -1,4 +1,3 @@",
        " " + decode,
        "-resize(height=None, width=None, shorter=256, longer=None, interpolation='bilinear', antialias=True)",
        "+resize(height=None, width=None, shorter=224, longer=None, interpolation='bilinear', antialias=False)",
        " center_crop(size=224)",
        "-normalize(mean='imagenet', std='imagenet', dtype='float32', layout='nchw')",
    ]
    unlisted = ModelInfo(preprocessing=trained.fingerprint)
    assert fault(lambda: refuse(unlisted, ours)) == head


def test_the_stage_that_is_inside_the_model_is_named_in_words() -> None:
    whole = Pipeline("serve", (Decode(), CenterCrop(size=8), Normalize()))
    before = Pipeline("serve", whole.stages[:-1])
    info = ModelInfo(preprocessing=before.fingerprint, stages=before.lines, folded=whole.lines[-1])
    refuse(info, before)
    assert broken_rule(lambda: refuse(info, whole)) == "m.onnx: config.rule"
    other = Pipeline("serve", (Decode(), CenterCrop(size=9), Normalize()))
    assert "\n-center_crop(size=8)\n" in fault(lambda: refuse(info, other))


@pytest.mark.parametrize(
    ("recorded", "force", "trust", "passes"),
    [
        ("the same", False, False, True),
        ("another", False, False, False),
        ("another", False, True, False),
        ("another", True, False, True),
        ("none", False, False, False),
        ("none", False, True, True),
        ("none", True, False, True),
    ],
)
def test_what_a_file_records_and_what_is_trusted(recorded: str, force: bool, trust: bool, passes: bool) -> None:
    pipeline = Pipeline("serve", (Decode(), CenterCrop(size=8)))
    records = {"the same": Pipeline("val", pipeline.stages).fingerprint, "another": "0" * 16, "none": None}
    info = ModelInfo(preprocessing=records[recorded])
    if passes:
        refuse(info, pipeline, force=force, trust=trust)
    else:
        text = fault(lambda: refuse(info, pipeline, force=force, trust=trust))
        assert text.startswith(
            "m.onnx: was trained with preprocessing" if records[recorded] else "m.onnx: does not record"
        )


def test_a_file_without_a_record_is_refused_with_what_to_do() -> None:
    pipeline = Pipeline("serve", (Decode(), CenterCrop(size=8)))
    assert broken_rule(lambda: refuse(ModelInfo(), pipeline)) == "m.onnx: config.rule"


@pytest.mark.parametrize("form", ["list", "file", "file with a byte order mark"])
def test_the_names_of_classes_may_be_given(form: str, models: Models, tmp_path: Path) -> None:
    listed = tmp_path / "classes.txt"
    listed.write_text("Fuß\nb c\n c\n", encoding="utf-8-sig" if "mark" in form else "utf-8")
    given: Any = ("Fuß", "b c", "c") if form == "list" else str(listed)
    info = read_info(str(models.onnx))
    assert class_names(ModelSpec(file="m.onnx"), info) == info.classes
    assert class_names(ModelSpec(file="m.onnx", classes=given), info) == ("Fuß", "b c", "c")
    engine(models.onnx, classes=given)
    assert broken_rule(lambda: engine(models.onnx, classes=("a", "b"))) == "serve.model.classes config.rule"


def test_names_in_another_order_than_the_file_records() -> None:
    info = ModelInfo(classes=("ant", "bee", "cat"))
    for given in (info.classes, ("Ameise", "Biene", "Katze"), ("bee", "cat", "dog")):
        assert class_names(ModelSpec(file="m.onnx", classes=given), info) == given
    assert (
        broken_rule(lambda: class_names(ModelSpec(file="m.onnx", classes=("ant", "cat", "bee")), info))
        == "serve.model.classes config.rule"
    )


def test_a_file_of_names_that_is_none(tmp_path: Path) -> None:
    listed = tmp_path / "classes.txt"
    model = ModelSpec(file="m.onnx", classes=str(listed))
    text = (
        "serve.model.classes must be a list of names, or a text file with one on each line, or a JSON file: [Errno 2]"
    )
    assert fault(lambda: class_names(model, ModelInfo())).startswith(text)
    listed.write_text("a\n\nb\n")
    assert broken_rule(lambda: class_names(model, ModelInfo())) == f"{listed}:2: config.rule"


@pytest.mark.parametrize(
    "content",
    [
        '["cat", " dog ", "Fuß"]',
        '{"2": "Fuß", "0": "cat", "1": "dog"}',
        '{"0": ["n01", "cat"], "1": ["n02", "dog"], "2": ["n03", "Fuß"]}',
        '{"model_type": "vit", "label2id": {"cat": 0}, "id2label": {"0": "cat", "1": "dog", "2": "Fuß"}}',
    ],
)
def test_names_in_a_json_file(content: str, tmp_path: Path) -> None:
    listed = tmp_path / "names.JSON"
    listed.write_text(content, encoding="utf-8-sig")
    assert class_names(ModelSpec(file="m.onnx", classes=str(listed)), ModelInfo()) == ("cat", "dog", "Fuß")


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("[1,\n", ":2: is not valid JSON: Expecting value"),
        ("", ":1: is not valid JSON: Expecting value"),
        ("[" * 100_000, ": cannot be read as JSON: "),
        ("[" + "1" * 5000 + "]", ": cannot be read as JSON: "),
        ("3", ": must be a list of names, or an object of them by the numbers of outputs"),
        ("[]", ": must be a list of names, or an object of them by the numbers of outputs"),
        ('{"id2label": {}}', ": id2label must be a list of names, or an object of them by the numbers of outputs"),
        ('{"0": "a", "2": "b"}', ": must have the numbers of all outputs as keys, 0 to 1, got '2'"),
        ('{"1": "a", "2": "b"}', ": must have the numbers of all outputs as keys, 0 to 1, got '2'"),
        ('{"0": "a", "1": "b", "0": "c"}', ": cannot be read as JSON: a key stands twice in an object"),
        ('{"0": "a", "01": "b"}', ": must have the numbers of all outputs as keys, 0 to 1, got '01'"),
        ('{"cat": 0}', ": must have the numbers of all outputs as keys, 0 to 0, got 'cat'"),
        ('["a", 3]', ": must name output 1 by a text that is not empty, got 3"),
        ('{"0": []}', ": must name output 0 by a text that is not empty, got []"),
        ('{"id2label": {"0": " "}}', ": id2label must name output 0 by a text that is not empty, got ' '"),
        ('{"0": {"name": "cat"}}', ": must name output 0 by a text that is not empty, got "),
    ],
)
def test_a_json_file_of_names_that_is_none(content: str, text: str, tmp_path: Path) -> None:
    listed = tmp_path / "names.json"
    listed.write_text(content)
    found = fault(lambda: class_names(ModelSpec(file="m.onnx", classes=str(listed)), ModelInfo()))
    assert found.startswith(f"{listed}{text}")


# --- batches ----------------------------------------------------------------------------------------------------------


@each_file
def test_batch_limits(models: Models, file: str) -> None:
    running = engine(file_of(models, file), batch=3)
    assert running.batch == 3
    assert len(running.run(noise(3))) == 3
    for count in (0, 4):
        with pytest.raises(ValueError, match="1 to 3 images") as caught:
            running.run(torch.zeros(count, 3, SIDE, SIDE))
        assert str(caught.value) == f"an engine takes 1 to 3 images, its serve.model.batch, got {count}"


@each_file
def test_images_of_another_shape_or_dtype(models: Models, file: str) -> None:
    running = engine(file_of(models, file))
    for images, got in (
        (torch.zeros(2, 3, SIDE, SIDE + 1), "float32 [2, 3, 32, 33]"),
        (torch.zeros(2, SIDE, SIDE, 3), "float32 [2, 32, 32, 3]"),
        (torch.zeros(2, 3, SIDE, SIDE, dtype=torch.uint8), "uint8 [2, 3, 32, 32]"),
    ):
        with pytest.raises(ValueError, match="an engine takes") as caught:
            running.run(images)
        assert str(caught.value) == f"an engine takes float32 [N, 3, 32, 32], got {got}"


@pytest.mark.parametrize(
    ("batch", "sizes"),
    [
        (1, (1,)),
        (3, (1, 2, 3)),
        (16, (1, 2, 4, 8, 16)),
        (24, (1, 2, 3, 6, 12, 24)),
        (256, (2, 4, 8, 16, 32, 64, 128, 256)),
    ],
)
def test_batch_sizes_that_are_compiled_or_captured(batch: int, sizes: tuple[int, ...]) -> None:
    assert padded_sizes(batch) == sizes


class Recorder(nn.Module):
    """Sums each image, and records the batches that it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[torch.Tensor] = []

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.seen.append(images.clone())
        return images.float().sum(dim=(2, 3))


@pytest.mark.parametrize("image", [FLOAT, UINT8], ids=["float32", "uint8"])
def test_batches_are_padded_to_the_next_size(image: ImageSpec) -> None:
    module = Recorder()
    running = TorchEngine(module, image=image, batch=12, device=CPU, sizes=padded_sizes(12))
    for count in range(1, 13):
        images = noise(count, image)
        logits = running.run(images)
        torch.testing.assert_close(logits, images.float().sum(dim=(2, 3)))
        seen = module.seen.pop()
        assert len(seen) == min(size for size in padded_sizes(12) if size >= count)
        assert torch.equal(seen[:count], images) and not seen[count:].any()
        assert seen.stride()[1:] == images.stride()[1:]
    running.warm_up()
    assert [len(seen) for seen in module.seen] == sorted(padded_sizes(12), reverse=True)
    running.close()


# --- CUDA graphs, with something that takes their place on a CPU ------------------------------------------------------


@final
class FakeGraphs:
    """Takes the place of CUDA graphs: a replay computes into the memory of the capture.

    refused: sizes whose capture raises. spoiled: sizes whose replay gives other logits, by this much.
    """

    def __init__(self, *, refused: tuple[int, ...] = (), spoiled: dict[int, float] | None = None) -> None:
        self.refused, self.spoiled = refused, spoiled or {}
        self.captured: list[int] = []
        self.replayed: list[int] = []

    def __call__(self, work: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        logits = work()
        size = len(logits)
        self.captured.append(size)
        if size in self.refused:
            raise RuntimeError("operation not permitted when stream is capturing\nmore lines")

        def replay() -> None:
            self.replayed.append(size)
            logits.copy_(work() + self.spoiled.get(size, 0.0))

        return replay, logits


def with_graphs(graphs: FakeGraphs, *, required: bool = False, module: nn.Module | None = None) -> TorchEngine:
    return TorchEngine(
        module or Recorder(),
        image=FLOAT,
        batch=8,
        device=CPU,
        sizes=padded_sizes(8),
        cuda_graphs=True if required else "auto",
        capture=graphs,
        file="m.pt",
    )


def test_every_padded_size_is_captured_and_compared_with_the_plain_run(caplog: pytest.LogCaptureFixture) -> None:
    graphs = FakeGraphs()
    running = with_graphs(graphs)
    plain = [running.run(noise(count)) for count in range(1, 9)]
    assert not graphs.replayed, "before the warm-up"
    running.warm_up()
    assert graphs.captured == [8, 4, 2, 1]
    assert set(graphs.replayed) == {8, 4, 2, 1}
    assert running.describe()["cuda_graphs"] == [1, 2, 4, 8]
    graphs.replayed.clear()
    assert all(torch.equal(running.run(noise(count)), plain[count - 1]) for count in range(1, 9))
    assert graphs.replayed == [1, 2, 4, 4, 8, 8, 8, 8]
    assert not caplog.records
    running.close()


def test_sizes_that_cannot_be_captured_or_differ_run_without_a_graph(caplog: pytest.LogCaptureFixture) -> None:
    """One line for each reason says which sizes, and all logits are those of the plain run."""
    graphs = FakeGraphs(refused=(8, 2), spoiled={4: 1e6})
    running = with_graphs(graphs)
    plain = [running.run(noise(count)) for count in range(1, 9)]
    running.warm_up()
    assert running.describe()["cuda_graphs"] == [1]
    graphs.replayed.clear()
    assert all(torch.equal(running.run(noise(count)), plain[count - 1]) for count in range(1, 9))
    assert graphs.replayed == [1]
    first, second = (record.getMessage() for record in caplog.records)
    assert first == (
        "m.pt: batches of 2, 8 run without a CUDA graph, and slower: "
        "RuntimeError: operation not permitted when stream is capturing"
    )
    assert second.startswith(
        "m.pt: batches of 4 run without a CUDA graph, and slower: its logits differ from those of "
    )
    assert "the plain run by 1e+06, more than " in second
    running.close()


@pytest.mark.parametrize(
    ("graphs", "text"),
    [
        (FakeGraphs(refused=(8,)), "RuntimeError: operation not permitted when stream is capturing"),
        (FakeGraphs(spoiled={8: float("nan")}), "its logits differ from those of the plain run by inf, more than "),
    ],
    ids=["refused", "differs"],
)
def test_a_graph_that_is_required_and_fails_is_an_error(graphs: FakeGraphs, text: str) -> None:
    message = fault(with_graphs(graphs, required=True).warm_up)
    assert message.startswith(f"serve.model.cuda_graphs cannot be used for batches of 8: {text}")
    assert message.endswith("; use auto or false")


def test_a_model_that_fails_is_not_a_matter_of_graphs() -> None:
    class Broken(nn.Module):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            raise ArithmeticError("broken")

    with pytest.raises(ArithmeticError, match="broken"):
        with_graphs(FakeGraphs(), module=Broken()).warm_up()


def test_warming_up_again_compares_with_the_plain_run_again() -> None:
    graphs = FakeGraphs()
    running = with_graphs(graphs)
    running.warm_up()
    graphs.spoiled = {8: 1e6}
    running.warm_up()
    assert running.describe()["cuda_graphs"] == [1, 2, 4]


@pytest.mark.parametrize(
    ("replayed", "plain", "expected"),
    [
        ([1.0, 2.0], [1.0, 2.5], 0.5),
        ([math.nan, math.inf, 1.0], [math.nan, math.inf, 1.0], 0.0),
        ([math.nan, 1.0], [1.0, 1.0], math.inf),
        ([math.inf], [-math.inf], math.inf),
        ([1.0, 1.0], [1.0], math.inf),
    ],
)
def test_differences_of_logits(replayed: list[float], plain: list[float], expected: float) -> None:
    assert difference(torch.tensor(replayed), torch.tensor(plain)) == expected


def test_tolerances_grow_with_the_logits() -> None:
    assert tolerance(torch.float32, torch.tensor([0.1, -0.2])) == 5e-3
    assert tolerance(torch.bfloat16, torch.tensor([1.0, -20.0, math.inf])) == 0.05 * 20
    assert tolerance(torch.float32, torch.tensor([math.nan])) == 5e-3


def test_noise_is_the_same_at_every_call_and_of_the_pipelines_kind() -> None:
    for image in (FLOAT, UINT8, replace(FLOAT, layout="nhwc", dtype="bfloat16")):
        images, black = noise_images(3, image, CPU), black_images(3, image, CPU)
        assert (images.shape, images.dtype, images.stride()) == (black.shape, black.dtype, black.stride())
        assert torch.equal(images, noise_images(3, image, CPU)) and images.float().std() > 0.5


# --- threads ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_compiled_code_runs_on_any_thread(python_with_torch: Python) -> None:
    """It is compiled once, on a thread that never ends: torch crashes if one thread compiles after another one ended.

    With the backend `eager`, because a code generator takes most of a minute and the crash happens before it.
    """
    code = """
import sys, torch
from gpuflow.engines.base import run_in_thread
from gpuflow.engines.pytorch import TorchEngine, padded_sizes
from tests.serve.models import CPU, FLOAT, noise

class Sum(torch.nn.Module):
    def forward(self, images):
        return images.relu().sum(dim=(2, 3))

def engine(module):
    compiled = torch.compile(module, backend="eager", dynamic=False)
    sizes = padded_sizes(2)
    return TorchEngine(module, image=FLOAT, batch=2, device=CPU, sizes=sizes, compiled=compiled, threads=2)

for _ in range(2):
    running = engine(Sum())
    for count in (1, 2):
        eager = running.run(noise(count))
    running.warm_up()
    before = dict(torch._dynamo.utils.counters["frames"])
    for count in (1, 2):
        logits = run_in_thread(lambda: running.run(noise(count)))
        torch.testing.assert_close(logits, noise(count).relu().sum(dim=(2, 3)))
    assert dict(torch._dynamo.utils.counters["frames"]) == before, "compiled again"
assert running.describe()["compile"]
print(before)
"""
    done = python_with_torch(code, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "{'total': 2, 'ok': 2}\n"


def test_a_users_own_module(models: Models) -> None:
    module = models.module()
    running = TorchEngine(module, image=FLOAT, batch=4, device=CPU)
    with torch.inference_mode():
        assert torch.equal(running.run(noise(4)), module(noise(4)))
    assert running.info == ModelInfo()


def test_a_callers_thread_keeps_its_cores(models: Models) -> None:
    """The engine's thread gets its share of the cores; the caller's thread and new threads keep torch's setting."""
    before, default = torch.get_num_threads(), run_in_thread(torch.get_num_threads)
    running = TorchEngine(models.module(), image=FLOAT, batch=4, device=CPU, threads=default + 1)
    running.warm_up()
    assert torch.get_num_threads() == before

    def work() -> tuple[int, int]:
        running.run(noise(1))
        return torch.get_num_threads(), run_in_thread(torch.get_num_threads)

    assert run_in_thread(work) == (default + 1, default)
    assert torch.get_num_threads() == before


# --- files that cannot be served --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["no.pt", "no.pt2", "no.onnx"])
def test_a_missing_file(name: str) -> None:
    expected = f"{name}: no such file; train or export the model, or name it in serve.model.file"
    assert fault(lambda: engine(name)) == expected
    assert fault(lambda: read_info(name)) == expected


def test_rules_between_keys_are_checked_too() -> None:
    assert broken_rule(lambda: engine("m.engine")) == "serve.model.file config.range, got 'm.engine'"


def test_cuda_graphs_need_a_gpu(models: Models) -> None:
    assert broken_rule(lambda: engine(models.checkpoint, cuda_graphs=True)) == "serve.model.cuda_graphs config.rule"
    assert engine(models.checkpoint).describe()["cuda_graphs"] == []


@pytest.mark.parametrize("name", ["bad.pt", "bad.pt2", "bad.onnx"])
@pytest.mark.parametrize("content", [b"", b"nonsense"], ids=["empty", "nonsense"])
def test_a_file_that_is_no_model(name: str, content: bytes, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    what = {".pt": "a checkpoint of gpuflow train", ".pt2": "a program of torch.export", ".onnx": "an ONNX model"}
    assert fault(lambda: engine(path)).startswith(f"{path}: cannot be read as {what[path.suffix]}: ")


def test_what_runs_code_when_it_is_loaded_is_refused_without_advice_to_load_it(tmp_path: Path) -> None:
    path = tmp_path / "own.pt"
    torch.save({"model": Path}, path)
    assert broken_rule(lambda: engine(path)) == f"{path}: config.rule"


class Own(nn.Module):
    """A model that TorchScript can hold."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images.mean(dim=[2, 3])


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning", "ignore:.*torch.jit:FutureWarning")
def test_torchscript_is_refused_without_advice_to_load_it(tmp_path: Path) -> None:
    path = tmp_path / "script.pt"
    torch.jit.save(torch.jit.script(Own()), path)
    assert broken_rule(lambda: engine(path)) == f"{path}: config.rule"


class Pair(nn.Module):
    """A model with two outputs."""

    def forward(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        means = images.mean(dim=(2, 3))
        return means, means


class OneRow(nn.Module):
    """A model that gives one row for a whole batch."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images.mean(dim=(0, 2, 3))


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (Pair(), "its output must be one tensor, logits [N, classes], got a tuple"),
        (OneRow(), "its output must have a row for each of 1 images, got the shape [3]"),
    ],
    ids=["a tuple", "one row"],
)
def test_a_program_that_gives_no_logits(module: nn.Module, reason: str, tmp_path: Path) -> None:
    path = save_program(tmp_path / "m.pt2", module, noise(2))
    expected = f"{path}: fails on an image of float32 3x{SIDE}x{SIDE}: {reason}"
    assert fault(lambda: engine(path, preprocessing="trust")) == expected


def test_a_checkpoint_of_another_program(models: Models, tmp_path: Path) -> None:
    path = tmp_path / "own.pt"
    torch.save({"arch": "resnet18", "model": {}}, path)
    assert broken_rule(lambda: engine(path)) == f"{path}: config.rule"
    state = torch.load(models.checkpoint, weights_only=True)
    torch.save({**state, "classes": ["a", "b"]}, path)
    assert fault(lambda: engine(path)).startswith(f"{path}: cannot be read as a checkpoint of squeezenet1_1: Error(s)")
    torch.save({**state, "arch": "resnet81"}, path)
    assert broken_rule(lambda: engine(path)) == f"{path}: config.rule"


def test_an_old_checkpoint_without_its_stages(models: Models, tmp_path: Path) -> None:
    state = torch.load(models.checkpoint, weights_only=True)
    del state["stages"]
    torch.save(state, tmp_path / "old.pt")
    _, info = load_checkpoint(str(tmp_path / "old.pt"))
    assert info.stages is None
    assert info.preprocessing == models.read().programs["val"].pipeline.fingerprint


@pytest.mark.parametrize("file", ["pt2", "onnx"])
def test_a_model_for_other_images(models: Models, file: str) -> None:
    path = file_of(models, file)
    for image in (replace(FLOAT, shape=(SIDE, 48, 3)), replace(FLOAT, dtype="float16"), UINT8):
        assert broken_rule(lambda image=image: engine(path, image)) == f"{path}: config.rule"  # type: ignore[misc]


class ChannelsLast(nn.Module):
    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images.mean((1, 2))


@pytest.mark.parametrize("side", [SIDE, 48])
def test_a_model_whose_channels_are_last(side: int, tmp_path: Path) -> None:
    path = save_program(tmp_path / "nhwc.pt2", ChannelsLast(), torch.zeros(2, side, side, 3))
    assert broken_rule(lambda: engine(path, preprocessing="trust")) == f"{path}: config.rule"


@pytest.mark.parametrize("file", ["folded_pt2", "folded_onnx"])
def test_a_folded_model_behind_the_stage_that_is_inside_it(models: Models, file: str) -> None:
    path = file_of(models, file)
    assert broken_rule(lambda: engine(path, FLOAT)) == f"{path}: config.rule"


def test_a_checkpoint_that_fails_on_such_images(models: Models) -> None:
    gray = replace(FLOAT, shape=(SIDE, SIDE, 1))
    assert fault(lambda: engine(models.checkpoint, gray)).startswith(
        f"{models.checkpoint}: fails on an image of float32 1x32x32: Given groups=1, weight of size"
    )


def test_classes_and_logits_that_do_not_go_together(models: Models, tmp_path: Path) -> None:
    model, path = onnx.load(models.onnx), tmp_path / "two.onnx"
    (entry,) = [entry for entry in model.metadata_props if entry.key == METADATA_KEY]
    entry.value = ModelInfo(classes=("a", "b")).to_json()
    onnx.save(model, path)
    assert broken_rule(lambda: engine(path)) == f"{path}: config.rule"


def test_a_model_that_gives_no_logits(tmp_path: Path) -> None:
    path = save_program(tmp_path / "map.pt2", nn.Conv2d(3, 2, 1), noise(2))
    assert broken_rule(lambda: engine(path)) == f"{path}: config.rule"


class Unstable(nn.Module):
    """As exported without `eval()`: statistics of the batch in place of those of training, or dropout."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self._what = what
        self.weight = nn.Parameter(torch.randn(SIDE * SIDE, 3, generator=torch.Generator().manual_seed(0)))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if self._what == "batch norm":
            images = nn.functional.batch_norm(images, None, None, training=True)
        features = images[:, 0].flatten(1)
        if self._what == "dropout":
            features = nn.functional.dropout(features, training=True)
        return features @ self.weight


@pytest.mark.parametrize(("what", "batch"), [("batch norm", 4), ("dropout", 4), ("dropout", 1)])
def test_a_model_in_training_mode(what: str, batch: int, tmp_path: Path) -> None:
    path = save_program(tmp_path / "train.pt2", Unstable(what), noise(2))
    text = fault(lambda: engine(path, batch=batch))
    when = "next to another one than alone" if batch > 1 else "the second time"
    assert text.startswith(f"{path}: gives an image other logits {when}, by up to ")
    assert text.endswith(", as models in training mode do; export it in eval mode (model.eval())")


def test_a_model_that_gives_probabilities(tmp_path: Path) -> None:
    layers = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Softmax(dim=1)
    path = save_program(tmp_path / "softmax.pt2", nn.Sequential(*layers), noise(2))
    assert broken_rule(lambda: engine(path)) == f"{path}: config.rule"
    engine(save_program(tmp_path / "log.pt2", nn.Sequential(*layers[:2], nn.LogSoftmax(dim=1)), noise(2)))


def test_a_model_with_one_output_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    layers = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 1)
    path = save_program(tmp_path / "one.pt2", nn.Sequential(*layers), noise(2))
    engine(path)
    assert [record.getMessage() for record in caplog.records if record.name == "gpuflow.engines.base"] == [
        f"{path} gives one output for an image, whose probability among all outputs is always 1: take the logits of a "
        "prediction, or export a model with an output for each class"
    ]
    caplog.clear()
    for activation in ("sigmoid", "none"):
        engine(path, activation=activation)
    assert not [record for record in caplog.records if record.name == "gpuflow.engines.base"]


class Two(nn.Module):
    def forward(self, images: torch.Tensor, masks: torch.Tensor) -> torch.Tensor:
        return (images * masks).sum(dim=(2, 3))


def export_onnx(path: Path, module: nn.Module, *inputs: torch.Tensor, dynamic: bool) -> Path:
    batch = {0: torch.export.Dim("batch")} if dynamic else None
    shapes = tuple(batch for _ in inputs)
    program: Any = torch.onnx.export(module, inputs, dynamo=True, dynamic_shapes=shapes, verbose=False)
    program.save(path)
    return path


@pytest.mark.filterwarnings("ignore")  # of torch's exporter
def test_a_model_of_two_inputs_or_one_batch_size(tmp_path: Path) -> None:
    two = save_program(tmp_path / "two.pt2", Two(), noise(2), noise(2))
    two_onnx = export_onnx(tmp_path / "two.onnx", Two(), noise(2), noise(2), dynamic=True)
    for path in (two, two_onnx):
        assert broken_rule(lambda path=path: engine(path)) == f"{path}: config.rule"  # type: ignore[misc]
    fixed = export_onnx(tmp_path / "fixed.onnx", nn.AdaptiveAvgPool2d(1), noise(2), dynamic=False)
    expected = f"{fixed}: takes only batches of 2; export it with a dynamic batch axis"
    assert fault(lambda: engine(fixed)) == expected


@pytest.mark.filterwarnings("ignore")  # of torch's exporter
@pytest.mark.parametrize("suffix", ["pt2", "onnx"])
def test_a_model_of_one_image_at_a_time_needs_batches_of_one(suffix: str, tmp_path: Path) -> None:
    path, module = tmp_path / f"one.{suffix}", nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
    if suffix == "pt2":
        save_program(path, module, noise(1), dynamic=False)
    else:
        export_onnx(path, module, noise(1), dynamic=False)
    assert broken_rule(lambda: engine(path, batch=5)) == f"{path}: config.rule"
    assert engine(path, batch=1).run(noise(1)).shape == (1, 3)


@pytest.mark.parametrize(
    ("least", "most", "expected"),
    [
        (None, 8, "takes at most 8 image(s) at a time, serve.model.batch is 9; set it to 8"),
        (3, None, "takes only batches of 3 or more; export it with a dynamic batch axis"),
        (2, None, ""),
    ],
)
def test_the_batch_axis_of_a_program_has_bounds(
    least: int | None, most: int | None, expected: str, tmp_path: Path
) -> None:
    path, module = tmp_path / "m.pt2", nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
    bounds = {name: value for name, value in (("min", least), ("max", most)) if value is not None}
    shapes = ({0: torch.export.Dim("batch", **bounds)},)
    torch.export.save(torch.export.export(module.eval(), (noise(4),), dynamic_shapes=shapes), path)
    if expected:
        assert fault(lambda: engine(path, batch=9)).startswith(f"{path}: {expected}")
    else:
        running = engine(path, batch=9)
        assert [len(running.run(noise(count))) for count in (1, 2, 9)] == [1, 2, 9]


class Transposed(nn.Module):
    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images.mean(dim=(2, 3)).T


class FeaturesAndLogits(nn.Module):
    def forward(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return images.amax(dim=(2, 3)), images.mean(dim=(2, 3))


@pytest.mark.filterwarnings("ignore")  # of torch's exporter
def test_an_onnx_model_that_gives_no_logits_or_more_than_these(tmp_path: Path) -> None:
    transposed = export_onnx(tmp_path / "transposed.onnx", Transposed(), noise(2), dynamic=True)
    assert broken_rule(lambda: engine(transposed)) == f"{transposed}: config.rule"
    two = export_onnx(tmp_path / "both.onnx", FeaturesAndLogits(), noise(2), dynamic=True)
    model = onnx.load(two)
    features, mean = (output.name for output in model.graph.output)
    assert fault(lambda: engine(two)) == (
        f"{two}: must give logits [N, classes] alone, or by the name logits, gives {features}, {mean}"
    )
    model.graph.output[1].name = "logits"
    for node in model.graph.node:
        node.output[:] = ["logits" if name == mean else name for name in node.output]
    onnx.save(model, two)
    torch.testing.assert_close(engine(two).run(noise(2)), noise(2).mean(dim=(2, 3)))


class ManyAtATime(nn.Module):
    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if len(images) > 1:
            raise RuntimeError("one image at a time")
        return images.mean(dim=(2, 3))


def test_a_model_that_fails_on_its_batches_is_refused_with_its_name() -> None:
    running = TorchEngine(ManyAtATime(), image=FLOAT, batch=4, device=CPU)
    assert broken_rule(lambda: warm_up_all([running], "m.pt2")) == "m.pt2: config.rule"


@pytest.mark.filterwarnings("ignore")  # of torch's exporter
def test_instances_of_a_program_run_at_the_same_time(tmp_path: Path) -> None:
    """They share one module; torch's guards of an exported program failed now and then where two threads ran it."""
    path = save_program(tmp_path / "m.pt2", nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten()), noise(2))
    running = open_engines(
        ModelSpec(file=str(path), preprocessing="trust", batch=8, instances=2), image=FLOAT, device=CPU
    )
    images, interval = noise(3), sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(4) as pool:
            answers = list(pool.map(lambda n: running[n % 2].run(images), range(1000)))
    finally:
        sys.setswitchinterval(interval)
    assert all(torch.equal(answer, answers[0]) for answer in answers)


# --- what is not installed --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "act", "text"),
    [
        ("onnxruntime", engine, "the engine onnxruntime needs onnxruntime"),
        ("onnx", lambda path: read_info(str(path)), "reading an .onnx file needs onnx"),
    ],
)
def test_a_missing_library_names_its_extra(
    module: str, act: Callable[[Path], object], text: str, models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtra) as caught:
        act(models.onnx)
    assert str(caught.value) == f"{text}, which is not installed; pip install 'gpuflow[serve]'"


def test_no_cuda_in_onnxruntime(models: Models) -> None:
    cuda = torch.device("cuda")
    assert (
        broken_rule(lambda: OnnxEngine(str(models.onnx), image=FLOAT, batch=1, device=cuda, threads=1))
        == "serve.model.engine config.rule"
    )


def test_importing_loads_no_engines_library(python_with_torch: Python) -> None:
    code = """
import sys
import gpuflow.engines, gpuflow.engines.onnx, gpuflow.engines.tensorrt
heavy = {"onnx", "onnxruntime", "onnxscript", "tensorrt", "torchpipe", "torchvision"} & set(sys.modules)
assert not heavy, heavy
"""
    done = python_with_torch(code)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(("quota", "instances", "threads"), [(2.0, 1, 2), (2.0, 2, 1), (6.5, 2, 3), (None, 4, 16)])
def test_engines_share_the_cores_that_control_groups_grant(
    quota: float | None, instances: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(64)))
    monkeypatch.setattr("gpuflow.runtime.threads.cpu_quota", lambda: quota)
    assert cores_per_instance(instances) == threads


@pytest.mark.slow
def test_programs_are_loaded_again_and_compiled_after_one_was_loaded(models: Models, python_with_torch: Python) -> None:
    """Each of them on its own thread crashed where torch sees no GPU; so this runs without one."""
    code = f"""
import torch
from gpuflow.engines.base import run_in_thread
from gpuflow.engines.pytorch import TorchEngine
from tests.serve.models import CPU, FLOAT, engine, noise

for _ in range(3):
    logits = run_in_thread(lambda: engine({str(models.pt2)!r})).run(noise(1))
module = engine({str(models.pt2)!r})._module
compiled = torch.compile(module, backend="eager", dynamic=False)
running = TorchEngine(module, image=FLOAT, batch=1, device=CPU, sizes=(1,), compiled=compiled, threads=1)
running.warm_up()
torch.testing.assert_close(running.run(noise(1)), logits)
print("compiled")
"""
    done = python_with_torch(code, cwd=ROOT, CUDA_VISIBLE_DEVICES="")
    assert (done.returncode, done.stdout) == (0, "compiled\n"), done.stderr
