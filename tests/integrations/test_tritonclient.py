"""NVIDIA's client of Triton calls the service by the Open Inference Protocol, over HTTP."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

triton = pytest.importorskip("tritonclient.http", reason="tritonclient is not installed")

from gpuflow.serve.http.app import RequestLimits  # noqa: E402
from gpuflow.serve.predictor import Prediction  # noqa: E402
from tests.datasets import jpeg, make_photos  # noqa: E402
from tests.serve.fakes import FakeEngine, Gate  # noqa: E402
from tests.serve.services import Live, served  # noqa: E402

PHOTOS = [jpeg(i % 3, i) for i in range(5)]


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with served(FakeEngine(batch=8)) as service:
        yield service


def client(live: Live, **settings: Any) -> Any:
    return triton.InferenceServerClient(live.url.removeprefix("http://"), **settings)


def images(*files: bytes, name: str = "image", column: bool = False) -> list[Any]:
    values = np.array([*files, b""], object)[:-1].reshape((-1, 1) if column else -1)
    tensor = triton.InferInput(name, values.shape, "BYTES")
    tensor.set_data_from_numpy(values)
    return [tensor]


def logits(live: Live, *files: bytes) -> list[list[float]]:
    assert live.predictor is not None
    answers = live.predictor.predict(files)
    return [answer.logits.tolist() for answer in answers if isinstance(answer, Prediction)]


def test_health_and_metadata(live: Live) -> None:
    with client(live) as caller:
        assert caller.is_server_live() and caller.is_server_ready()
        assert caller.is_model_ready("model") and caller.is_model_ready("model", "1")
        assert not caller.is_model_ready("other") and not caller.is_model_ready("model", "2")
        assert caller.get_server_metadata()["extensions"] == ["binary_tensor_data"]
        assert [output["name"] for output in caller.get_model_metadata("model")["outputs"]] == [
            *("logits", "probabilities", "labels")
        ]


@pytest.mark.parametrize("column", [False, True])
def test_several_images_have_the_bits_of_predict(live: Live, column: bool) -> None:
    with client(live) as caller:
        answer = caller.infer("model", images(*PHOTOS, column=column), request_id="7", timeout=20_000_000)
        assert answer.get_response()["id"] == "7"
        assert answer.as_numpy("logits").dtype == np.float32
        assert answer.as_numpy("logits").tolist() == logits(live, *PHOTOS)
        probabilities = torch.tensor(logits(live, *PHOTOS)).softmax(dim=1)
        np.testing.assert_allclose(answer.as_numpy("probabilities"), probabilities, rtol=1e-6)
        assert live.predictor is not None
        labels = live.predictor(PHOTOS, top_k=1)
        assert answer.as_numpy("labels").tolist() == [[label.encode()] for ((label, _),) in labels]


@pytest.mark.parametrize("binary", [False, True])
def test_outputs_by_name(live: Live, binary: bool) -> None:
    asked = [triton.InferRequestedOutput(name, binary_data=binary) for name in ("labels", "logits")]
    with client(live) as caller:
        answer = caller.infer("model", images(PHOTOS[0]), outputs=asked)
    assert answer.as_numpy("logits").tolist() == logits(live, PHOTOS[0])
    assert answer.as_numpy("labels").shape == (1, 1)
    assert answer.as_numpy("probabilities") is None


def test_many_calls_at_a_time(live: Live) -> None:
    with client(live, concurrency=4) as caller:
        calls = [caller.async_infer("model", images(PHOTOS[i % 5])) for i in range(20)]
        for i, call in enumerate(calls):
            assert call.get_result().as_numpy("logits").tolist() == logits(live, PHOTOS[i % 5])

    def call_alone(number: int) -> None:  # a client is of one thread
        with client(live) as caller:
            answer = caller.infer("model", images(PHOTOS[number % 5]))
            assert answer.as_numpy("logits").tolist() == logits(live, PHOTOS[number % 5])

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(call_alone, range(24)))


def refused(live: Live, *arguments: Any, **settings: Any) -> tuple[str, str]:
    with client(live) as caller, pytest.raises(triton.InferenceServerException) as caught:
        caller.infer(*arguments, **settings)
    return caught.value.status(), caught.value.message()


def test_errors_reach_the_caller_as_text(live: Live) -> None:
    assert refused(live, "modle", images(PHOTOS[0]))[0] == "404"
    assert refused(live, "model", images(PHOTOS[0], name="INPUT"))[1].startswith("request.inputs[0].name: ")
    status, reason = refused(live, "model", images(PHOTOS[0], b"hello"))
    assert (status, reason[:47]) == ("400", "image (sample 1): decode: not an image: begins ")
    numbers = triton.InferInput("image", [1, 2], "FP32")
    numbers.set_data_from_numpy(np.zeros((1, 2), np.float32))
    assert refused(live, "model", [numbers])[1].startswith("request.inputs[0].datatype: ")
    asked = [triton.InferRequestedOutput("logits", class_count=2)]
    assert "classification" in refused(live, "model", images(PHOTOS[0]), outputs=asked)[1]
    reason = refused(live, "model", images(PHOTOS[0]), request_compression_algorithm="gzip")[1]
    assert reason.startswith("a body must not be compressed")
    shared = triton.InferInput("image", [1], "BYTES")
    shared.set_shared_memory("region", 10)
    assert "shared_memory_region" in refused(live, "model", [shared])[1]


def test_the_example_of_the_page_runs(
    live: Live, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (Path(__file__).parents[2] / "docs" / "kserve.md").read_text()
    [code] = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    make_photos(tmp_path / "data" / "photos", classes=2, each=1)
    monkeypatch.chdir(tmp_path)
    code = (
        code.replace("127.0.0.1:8888", f"127.0.0.1:{live.port}")
        .replace('"demo"', '"model"')
        .replace("500_000", "20_000_000")
    )
    exec(compile(code, "kserve.md", "exec"), {})
    first, second = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"\[\[b'\w+'\], \[b'\w+'\]\]", first)
    assert second.startswith("(2, 3) [0.")


def test_a_deadline_in_microseconds() -> None:
    gate = Gate()
    with served(FakeEngine(before=gate), RequestLimits()) as live:
        status, reason = refused(live, "model", images(PHOTOS[0]), timeout=200_000)
        assert status in ("503", "504") and reason.startswith("no answer "), reason
        gate.open()
