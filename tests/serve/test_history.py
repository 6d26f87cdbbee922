"""Earlier requests do not change later ones: each answer equals that of a new decoder, among damaged files."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import cv2
import numpy as np
import pytest
import requests
import torch

from gpuflow.errors import BadSampleError, DecoderError
from gpuflow.serve.http import app as service_module
from gpuflow.serve.http.limits import RequestLimits
from gpuflow.serve.model_input import Pictures
from gpuflow.serve.predictor import Predictor
from gpuflow.torchpipe.graph import NO_MODEL, chain
from tests import damaged
from tests.datasets import RAW, program
from tests.running import run
from tests.serve.fakes import CLASSES, FakeEngine
from tests.serve.services import SECONDS, served

POOL = damaged.pool()
CALLERS, REQUESTS = 20, 30
PROGRAM = program(RAW)


@cache
def expected(number: int) -> tuple[int, Any, Any]:
    """The status and the answers of /predict and /seen, by a new decoder."""
    (image,), (fault,) = run(PROGRAM, [POOL[number]])
    if fault is not None:
        error = {"error": {"kind": "bad_image", "stage": fault.stage, "reason": fault.reason}}
        return 422, error, error
    values = image.float().mean(dim=(1, 2)).softmax(dim=0)
    ranked = sorted(range(3), key=lambda i: -float(values[i]))
    labels = [(CLASSES[i], round(float(values[i]), 4)) for i in ranked]
    return 200, labels, Pictures(PROGRAM.result, PROGRAM.pipeline).pixels(image).tobytes()


@pytest.fixture(scope="module", params=[0, 2], ids=["threads", "processes"])
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    engine = FakeEngine(batch=NO_MODEL.batch)
    graph = chain(PROGRAM, None, origin="x.yaml", threads=2, device="cpu", processes=request.param)
    predictor = Predictor(graph, [engine], image=PROGRAM.result, pipeline=PROGRAM.pipeline, classes=CLASSES)
    decoders = RequestLimits(max_pixels=179_000_000, max_scans=100)  # the service's own are lower
    with predictor, served(predictor, decoders) as live:
        yield live.url


def test_each_answer_equals_that_of_a_new_decoder(url: str, capfd: pytest.CaptureFixture[str]) -> None:
    def call(caller: int) -> int:
        rng, session = random.Random(caller), requests.Session()
        for _ in range(REQUESTS):
            number = rng.randrange(len(POOL))
            status, labels, picture = expected(number)
            path = rng.choice(["/predict", "/seen"])
            headers = {"Content-Type": "application/octet-stream"}
            answer = session.post(url + path, data=POOL[number], headers=headers, timeout=SECONDS)
            assert answer.status_code == status, (number, answer.text)
            if status != 200:
                assert answer.json() == labels
            elif path == "/seen":
                shown = cv2.imdecode(np.frombuffer(answer.content, np.uint8), cv2.IMREAD_COLOR_RGB)
                assert np.asarray(shown).tobytes() == picture
            else:
                found = [(entry["label"], round(entry["probability"], 4)) for entry in answer.json()["predictions"]]
                assert found == labels
        return REQUESTS

    with ThreadPoolExecutor(CALLERS) as pool:
        assert sum(pool.map(call, range(CALLERS))) == CALLERS * REQUESTS
    assert requests.get(f"{url}/readyz", timeout=SECONDS).json()["status"] == "ready"
    capfd.readouterr()  # the libraries' own warnings


def test_a_service_whose_decoder_fails_is_not_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_module, "_CHECK_SECONDS", 0.0)
    faults: list[Exception] = []

    def check() -> None:
        if faults:
            raise faults[0]

    predictor = Predictor(
        chain(PROGRAM, None, origin="x.yaml", threads=1, device="cpu"), image=PROGRAM.result, pipeline=PROGRAM.pipeline
    )
    monkeypatch.setattr(predictor, "check", check)
    with predictor, served(predictor) as live:
        assert live.get("/readyz").status_code == 200
        faults.append(DecoderError("OpenCV does not decode gpuflow's test image; end this process"))
        answer = live.get("/readyz")
        assert (answer.status_code, answer.json()) == (
            503,
            {"status": "failing", "ready": False, "reason": str(faults[0])},
        )
        assert "gpuflow_ready 0.0" in live.get("/metrics").text
        faults.clear()
        assert live.get("/readyz").status_code == 200


def test_what_decodes_one_image_and_what_decodes_several_decode_the_test_image(monkeypatch: pytest.MonkeyPatch) -> None:
    from gpuflow.decode.codecs import CpuDecoder

    checked: list[CpuDecoder] = []
    monkeypatch.setattr(CpuDecoder, "check", lambda decoder: checked.append(decoder))
    with Predictor(chain(PROGRAM, None, origin="x.yaml", threads=3, device="cpu"), image=PROGRAM.result) as predictor:
        predictor.check()
        assert len(set(map(id, checked))) == 2


def test_an_instance_whose_decoder_fails_gets_a_new_one(monkeypatch: pytest.MonkeyPatch) -> None:
    from gpuflow.decode.codecs import CpuDecoder

    broken: list[CpuDecoder] = []

    def check(self: CpuDecoder) -> None:
        if not broken or self is broken[0]:
            broken.append(self)
            raise DecoderError("it does not decode")

    monkeypatch.setattr(CpuDecoder, "check", check)
    with Predictor(chain(PROGRAM, None, origin="x.yaml", threads=1, device="cpu"), image=PROGRAM.result) as predictor:
        predictor.check()
        predictor.check()
        assert len(broken) == 1, "the first one was replaced"
        (image,) = predictor.preprocess([_good_file()])
        assert torch.equal(image, run(PROGRAM, [_good_file()])[0][0])


def _good_file() -> bytes:
    return next(data for i, data in enumerate(POOL) if expected(i)[0] == 200)


def test_an_error_of_the_environment_is_not_an_error_of_the_image(monkeypatch: pytest.MonkeyPatch) -> None:
    from gpuflow.execute.cpu.runner import CpuRunner

    def run_out(*arguments: Any) -> Any:
        raise MemoryError("not enough memory")

    with Predictor(chain(PROGRAM, None, origin="x.yaml", threads=1, device="cpu"), image=PROGRAM.result) as predictor:
        monkeypatch.setattr(CpuRunner, "run", run_out)
        with pytest.raises(Exception, match=r"preprocessing failed: MemoryError") as caught:
            predictor.preprocess([_good_file()])
        assert not isinstance(caught.value, BadSampleError)
