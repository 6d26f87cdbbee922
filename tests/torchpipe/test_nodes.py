"""The nodes without torchpipe, on plain dicts: what they write, and that one item's error leaves the others alone."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import onnx
import pytest
import torch

from gpuflow.decode.preset import Preset
from gpuflow.errors import BadSampleError, ConfigError, PredictorError
from gpuflow.pipeline.stage import Stage
from gpuflow.stages import CenterCrop, Decode, Normalize, Resize
from gpuflow.torchpipe import nodes as serve_nodes
from gpuflow.torchpipe.graph import lower, stages_to_json
from gpuflow.torchpipe.nodes import SESSIONS, ModelNode, PreprocessNode, Session
from gpuflow.torchpipe.request_queue import Request
from tests.hostile import BAD
from tests.images import jpeg, photo
from tests.running import images, program_of
from tests.serve.fakes import CLASSES, Break, FakeEngine, mean_color, threads_of_a_new_thread

STAGES = (Decode(), Resize(shorter=20), CenterCrop(size=16), Normalize())
GOOD, OTHER = jpeg(photo(30, 40)), jpeg(photo(33, 33))
OnThread = Callable[..., Any]


@pytest.fixture
def on_thread() -> Iterator[OnThread]:
    """Calls functions on one thread, as torchpipe does; preprocessing sets torch's threads there."""
    with ThreadPoolExecutor(1) as pool:
        yield lambda function, *arguments: pool.submit(function, *arguments).result(timeout=60)


@pytest.fixture(autouse=True)
def no_sessions() -> Iterator[None]:
    yield
    SESSIONS.pop("test", None)


def preprocess_node(on_thread: OnThread, stages: Sequence[Stage] = STAGES, **parameters: str) -> PreprocessNode:
    node = PreprocessNode()
    given = {"stages": stages_to_json(stages), "device": "cpu", "on_error": "pass", "batch": "8", "session": "test"}
    on_thread(node.init, {**given, **parameters})
    return node


def model_node(engine: FakeEngine | None = None, stages: Sequence[Stage] = STAGES) -> ModelNode:
    SESSIONS["test"] = Session([engine] if engine is not None else [])
    node = ModelNode()
    parameters = {"stages": stages_to_json(stages), "device": "cpu", "batch": "4", "session": "test"}
    node.init({**parameters, "_independent_index": "0"})
    return node


def item_of(data: bytes | torch.Tensor, **more: Any) -> dict[str, Any]:
    return {"data": data, **more}


def request() -> tuple[Request, list[Request]]:
    done: list[Request] = []
    return Request(GOOD, done.append, wrap=lambda value: value), done


# --- preprocessing ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("normalize", [Normalize(), Normalize(layout="nhwc", dtype="bfloat16")], ids=repr)
def test_an_image_equals_that_of_validation(normalize: Normalize, on_thread: OnThread) -> None:
    stages = (*STAGES[:-1], normalize)
    item = item_of(GOOD)
    on_thread(preprocess_node(on_thread, stages).forward, [item])
    expected = images(program_of(*stages), [GOOD])
    assert torch.equal(item["result"], expected)
    assert item["result"].dtype == expected.dtype
    assert item["result"].stride() == expected.stride()
    assert "error" not in item


def test_the_error_of_an_image_is_written_into_its_item_alone(on_thread: OnThread) -> None:
    items = [item_of(data) for data in [GOOD, *(data for data, _ in BAD.values()), OTHER]]
    on_thread(preprocess_node(on_thread).forward, items)
    assert [item.get("error") for item in items] == [None, *(reason for _, reason in BAD.values()), None]
    assert all(item["result"].numel() == 0 for item in items[1:-1])
    assert torch.equal(torch.cat([items[0]["result"], items[-1]["result"]]), images(program_of(*STAGES), [GOOD, OTHER]))


def test_data_of_a_wrong_type_is_an_error_of_its_item_too(on_thread: OnThread) -> None:
    items = [item_of("photo.jpg"), item_of(GOOD)]  # type: ignore[arg-type]
    on_thread(preprocess_node(on_thread).forward, items)
    assert items[0]["error"].startswith("preprocessing failed: TypeError(")
    assert items[1]["result"].shape == (1, 3, 16, 16)


class Fragile:
    """A `Preprocessor` that raises for all files if one of them is `refused`, and counts its calls."""

    def __init__(self, error: BaseException, refused: bytes) -> None:
        self.error, self.refused, self.calls = error, refused, list[int]()

    def run(self, files: Sequence[bytes]) -> list[torch.Tensor | BadSampleError]:
        self.calls.append(len(files))
        if self.refused in files:
            raise self.error
        return [torch.full((1, 3, 16, 16), float(len(data))) for data in files]

    def check(self) -> None: ...

    def close(self) -> None: ...


@pytest.mark.parametrize("error", [RuntimeError("no kernel"), MemoryError(), SystemExit(3)], ids=repr)
def test_an_exception_of_one_of_several_files_leaves_the_others(on_thread: OnThread, error: BaseException) -> None:
    node = preprocess_node(on_thread)
    bad, reason = BAD["text"]
    for refused, kind, text in (
        (bad, BadSampleError, reason),
        (GOOD, PredictorError, f"preprocessing failed: {error!r}"),
    ):
        SESSIONS["test"].preprocessor = fragile = Fragile(error, refused)
        files = [b"1" * (i + 1) for i in range(8)]
        files[5] = refused
        found = on_thread(node.images, files)
        assert isinstance(found[5], kind) and str(found[5]) == text, "what is bad on the CPU is bad"
        assert [float(one.mean()) for one in found if isinstance(one, torch.Tensor)] == [1, 2, 3, 4, 5, 7, 8]
        assert fragile.calls == [8, 4, 4, 2, 1, 1, 2]


def test_a_node_that_raises_takes_one_image_at_a_time(on_thread: OnThread) -> None:
    node = preprocess_node(on_thread, on_error="raise")
    assert (node.max(), preprocess_node(on_thread).max()) == (1, 8)
    with pytest.raises(BadSampleError) as caught:
        on_thread(node.forward, [item_of(b"")])
    assert str(caught.value) == "decode: empty: the file has no bytes"


def test_a_cancelled_request_is_not_decoded(on_thread: OnThread) -> None:
    made, done = request()
    made.future.cancel()
    item = item_of(b"", requests=[made])
    on_thread(preprocess_node(on_thread).forward, [item])
    assert (item["result"].numel(), done) == (0, [made])


def test_an_image_of_a_running_graph_is_the_items_result_and_a_fault_the_requests_answer(on_thread: OnThread) -> None:
    node = preprocess_node(on_thread, on_error="raise")
    made, done = request()
    item = item_of(b"", requests=[made])
    on_thread(node.forward, [item])
    assert item["result"].shape == (1, 3, 16, 16)
    assert (made.future.done(), made.held_bytes, done) == (False, 0, []), "the model's node has its turn"
    bad = Request(b"", done.append, wrap=lambda value: value)
    with pytest.raises(BadSampleError) as caught:
        on_thread(node.forward, [item_of(b"", requests=[bad])])
    assert bad.future.exception(0) is caught.value
    assert done == [bad]


def test_one_torch_thread_for_the_nodes_thread_and_other_threads_unchanged(on_thread: OnThread) -> None:
    before = torch.get_num_threads(), threads_of_a_new_thread()
    for _ in range(2):
        preprocess_node(on_thread)
        assert on_thread(torch.get_num_threads) == 1
        assert (torch.get_num_threads(), threads_of_a_new_thread()) == before


# --- the model --------------------------------------------------------------------------------------------------------


def test_items_become_one_batch() -> None:
    engine = FakeEngine()
    batch = torch.randn(3, 3, 16, 16)
    items = [item_of(image[None]) for image in batch]
    model_node(engine).forward(items)
    assert engine.counts == [3]
    assert torch.equal(torch.stack([item["result"] for item in items]), mean_color(batch))
    assert SESSIONS["test"].batches == {3: 1}


def test_the_batch_keeps_the_memory_format() -> None:
    formats = []

    def model(given: torch.Tensor) -> torch.Tensor:
        formats.append(given.is_contiguous(memory_format=torch.channels_last))
        return mean_color(given)

    node = model_node(FakeEngine(model), (*STAGES[:-1], Normalize(layout="nhwc")))
    batch = torch.randn(3, 3, 16, 16).to(memory_format=torch.channels_last)
    node.forward([item_of(batch[i : i + 1]) for i in range(3)])
    node.forward([item_of(batch[:1])])
    assert formats == [True, True]


def test_a_bad_item_leaves_the_batch_and_its_neighbours_are_served() -> None:
    engine = FakeEngine()
    batch = torch.randn(2, 3, 16, 16)
    bad = item_of(torch.empty(0), error="decode: truncated: 1: 2")
    items = [item_of(batch[:1]), bad, item_of(batch[1:])]
    model_node(engine).forward(items)
    assert engine.counts == [2]
    assert torch.equal(torch.stack([items[0]["result"], items[2]["result"]]), mean_color(batch))
    assert (bad["error"], bad["result"].numel()) == ("decode: truncated: 1: 2", 0)


def test_a_request_gets_the_answer_and_its_item_none() -> None:
    batch = torch.randn(2, 3, 16, 16)
    requests = [request() for _ in batch]
    items = [item_of(image[None], requests=[made]) for image, (made, _) in zip(batch, requests, strict=True)]
    model_node(FakeEngine()).forward(items)
    assert torch.equal(torch.stack([made.future.result(0) for made, _ in requests]), mean_color(batch))
    assert all(done == [made] for made, done in requests)
    assert all(item["result"].numel() == 0 for item in items)


def test_a_batch_of_nothing_but_bad_items_does_not_run() -> None:
    engine = FakeEngine()
    item = item_of(torch.empty(0), error="decode: x")
    model_node(engine).forward([item])
    assert engine.counts == []
    assert item["error"] == "decode: x"


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), SystemExit(3)], ids=repr)
def test_a_model_that_fails_fails_every_request_of_the_batch(error: BaseException) -> None:
    node = model_node(FakeEngine(before=Break(error)))
    made, _ = request()
    items = [item_of(torch.randn(1, 3, 16, 16), requests=[made]), item_of(torch.randn(1, 3, 16, 16))]
    node.forward(items)
    fault = made.future.exception(0)
    assert isinstance(fault, PredictorError)
    assert str(fault) == items[1]["error"] == f"the model failed on a batch of 2: {error!r}"
    assert fault.__cause__ is error


class Clock:
    """Replaces the clock of the nodes."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("gpuflow.torchpipe.nodes.time", clock)
    return clock


def test_a_model_that_keeps_failing_is_reported_until_it_works(clock: Clock) -> None:
    fails = True

    def model(images: torch.Tensor) -> torch.Tensor:
        if fails:
            raise RuntimeError("no memory")
        return mean_color(images)

    node = model_node(FakeEngine(model))

    def run() -> None:
        node.forward([item_of(torch.randn(1, 3, 16, 16))])

    for _ in range(2):
        run()
        SESSIONS["test"].check()
    run()
    with pytest.raises(PredictorError) as caught:
        SESSIONS["test"].check()
    assert str(caught.value) == "the model failed on the last 3 batches: RuntimeError('no memory')"
    clock.now += 61
    SESSIONS["test"].check()
    run()
    with pytest.raises(PredictorError):
        SESSIONS["test"].check()
    fails = False
    run()
    SESSIONS["test"].check()


def test_logits_may_be_modified() -> None:
    with torch.inference_mode():
        constant = torch.zeros(1, 3)
    item = item_of(torch.randn(1, 3, 16, 16))
    model_node(FakeEngine(lambda given: constant)).forward([item])
    item["result"] += 1
    assert constant.sum() == 0
    assert not item["result"].is_inference()


def test_a_request_for_the_image_gets_it_and_the_others_run() -> None:
    engine = FakeEngine()
    batch = torch.randn(3, 3, 16, 16)
    items = [item_of(image[None]) for image in batch]
    wanted = Request(GOOD, lambda request: None, wrap=lambda value: value, wants_image=True)
    items[1]["requests"] = [wanted]
    model_node(engine).forward(items)
    assert engine.counts == [2]
    assert torch.equal(wanted.future.result(0), batch[1])
    assert torch.equal(items[2]["result"], mean_color(batch)[2])


def test_without_a_model_the_images_are_the_result() -> None:
    batch = torch.randn(2, 3, 16, 16)
    items = [item_of(image[None]) for image in batch]
    model_node().forward(items)
    assert torch.equal(torch.stack([item["result"] for item in items]), batch)


def test_images_of_torchpipes_operators_become_the_models_input() -> None:
    """On the CPU [H, W, 3] of uint8; on the GPU [1, 3, H, W] of floats, or [H, W, 3] if DecodeMat decoded."""
    head = Preset(name="torchpipe_gpu", height=5, width=7)
    levels = torch.rand(2, 3, 5, 7) * 255
    items = [item_of(levels[:1]), item_of(levels[1].permute(1, 2, 0))]
    model_node(None, (head, Normalize(layout="nhwc"))).forward(items)
    expected = Normalize().module()(levels)
    assert torch.equal(torch.stack([item["result"] for item in items]), expected)
    rounded = item_of(levels[:1])
    model_node(None, (head,)).forward([rounded])
    assert torch.equal(rounded["result"], levels[0].round().to(torch.uint8))
    pixels = torch.from_numpy(photo(5, 7))
    whole = item_of(pixels)
    model_node(None, (Preset(name="torchpipe_cpu", height=5, width=7),)).forward([whole])
    assert torch.equal(whole["result"], pixels.permute(2, 0, 1))


@pytest.mark.parametrize(("layout", "memory"), [("nchw", torch.contiguous_format), ("nhwc", torch.channels_last)])
def test_behind_torchpipes_operators_the_model_gets_the_memory_format_of_the_stages(
    layout: Literal["nchw", "nhwc"], memory: torch.memory_format
) -> None:
    given: list[torch.Tensor] = []

    def model(batch: torch.Tensor) -> torch.Tensor:
        given.append(batch)
        return mean_color(batch)

    head = Preset(name="torchpipe_gpu", height=5, width=7)
    node = model_node(FakeEngine(model), (head, Normalize(layout=layout)))
    levels = torch.rand(2, 3, 5, 7) * 255
    for count in (1, 2):
        node.forward([item_of(levels[:1]), item_of(levels[1].permute(1, 2, 0))][:count])
    assert [len(batch) for batch in given] == [1, 2]
    assert all(batch.is_contiguous(memory_format=memory) for batch in given)


def test_a_cancelled_request_gets_no_answer_but_is_done() -> None:
    made, done = request()
    item = item_of(torch.randn(1, 3, 16, 16), requests=[made])
    made.future.cancel()
    model_node(FakeEngine()).forward([item])
    assert made.future.cancelled()
    assert done == [made]


# --- sessions ---------------------------------------------------------------------------------------------------------


def test_closing_releases_engines_and_buffers(on_thread: OnThread) -> None:
    engine = FakeEngine()
    model = model_node(engine)
    preprocess = preprocess_node(on_thread, session="test")
    preprocessor = weakref.ref(SESSIONS["test"].preprocessor)
    SESSIONS["test"].close()
    assert engine.closed and preprocessor() is None
    assert SESSIONS["test"].engines == ()
    with pytest.raises(AssertionError):
        preprocess.images([GOOD])
    assert model._engine is None


def test_instances_on_a_gpu_share_one_preprocessor(on_thread: OnThread, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[OnGpu] = []

    class OnGpu:
        closed = False

        def __init__(self, program: object, batch: int, device: torch.device) -> None:
            made.append(self)
            self.device = device

        def run(self, files: Sequence[bytes]) -> list[torch.Tensor | BadSampleError]:
            return [torch.full((1, 3, 16, 16), float(len(data))) for data in files]

        def close(self) -> None:
            self.closed = True

    monkeypatch.setattr(serve_nodes, "_gpu_preprocessor", OnGpu)
    SESSIONS["test"] = Session([])
    instances = [preprocess_node(on_thread, device="cuda", session="test") for _ in range(2)]
    for node in instances:
        items = [item_of(GOOD), item_of(OTHER)]
        on_thread(node.forward, items)
        assert [item["result"][0, 0, 0, 0] for item in items] == [len(GOOD), len(OTHER)]
    SESSIONS["test"].close()
    assert [(one.device.type, one.closed) for one in made] == [("cuda", True)]


def test_instances_of_a_node_from_a_file_share_one_opening_of_its_model(models: Any) -> None:
    config = models.read("serve.model.instances=2", "serve.model.batch=2")
    parameters = lower(config).as_dict()["model"]
    nodes = []
    for index in range(2):
        nodes.append(ModelNode())
        nodes[-1].init({**parameters, "node_name": "model", "_independent_index": str(index)})
    engines = SESSIONS.pop("of node model").engines
    assert len(engines) == 2
    assert [node._engine for node in nodes] == list(engines)
    assert engines[0].info.classes is not None and len(engines[0].info.classes) == len(CLASSES)
    photo_of = images(config.programs["serve"], [GOOD])
    item = item_of(photo_of)
    nodes[1].forward([item])
    assert torch.allclose(item["result"], models.module()(photo_of)[0], atol=1e-4)


@pytest.mark.parametrize(
    ("overrides", "recorded", "refusal"),
    [
        (["serve.stages.resize.shorter=40"], True, "was trained with preprocessing"),
        (["serve.stages.resize.shorter=40", "serve.model.preprocessing=trust"], True, "was trained with preprocessing"),
        (["serve.stages.resize.shorter=40", "serve.model.force=true"], True, None),
        ([], False, "does not record what preprocessing"),
        (["serve.model.preprocessing=trust"], False, None),
    ],
)
def test_a_graph_from_a_file_refuses_a_model_of_other_or_unknown_preprocessing(
    overrides: list[str], recorded: bool, refusal: str | None, models: Any, tmp_path: Path
) -> None:
    file = models.onnx
    if not recorded:
        plain = onnx.load(models.onnx)
        del plain.metadata_props[:]
        onnx.save(plain, file := tmp_path / "plain.onnx")
    config = models.read(*overrides, f"serve.model.file={file}", "serve.model.instances=1")
    parameters = {**lower(config).as_dict()["model"], "node_name": "foreign", "_independent_index": "0"}
    node = ModelNode()
    if refusal is None:
        node.init(parameters)
        SESSIONS.pop("of node foreign").close()
    else:
        with pytest.raises(ConfigError, match=refusal):
            node.init(parameters)
        assert "of node foreign" not in SESSIONS
