"""The Open Inference Protocol (KServe v2) by requests made by hand: what it answers, and what it refuses."""

from __future__ import annotations

import base64
import gzip
import json
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import requests
import torch

from gpuflow.serve.http.app import RequestLimits
from gpuflow.serve.predictor import Prediction, Predictor
from gpuflow.version import __version__
from tests.datasets import jpeg
from tests.serve.fakes import CLASSES, FakeEngine, Gate
from tests.serve.services import SECONDS, Live, predictor_of, served, wait

LENGTH = "Inference-Header-Content-Length"
PHOTOS = [jpeg(i % 3, i) for i in range(5)]
MODEL = "/v2/models/model"


@pytest.fixture(scope="module")
def small() -> Iterator[Live]:
    """A service for bodies of at most 10 kB and three images."""
    with served(FakeEngine(), RequestLimits(max_body_bytes=10_000, max_images=3)) as service:
        yield service


def image(count: int, **more: Any) -> dict[str, Any]:
    return {"name": "image", "datatype": "BYTES", "shape": [count], **more}


def as_json(images: Sequence[bytes], **more: Any) -> bytes:
    data = [base64.b64encode(data).decode() for data in images]
    return json.dumps({"inputs": [image(len(images), data=data)], **more}).encode()


def as_binary(images: Sequence[bytes], **more: Any) -> tuple[bytes, int]:
    """The body of a request, and the length of its JSON."""
    tensor = b"".join(len(data).to_bytes(4, "little") + data for data in images)
    size = {"binary_data_size": len(tensor)}
    text = json.dumps({"inputs": [image(len(images), parameters=size)], **more}).encode()
    return text + tensor, len(text)


def infer(live: Live, body: bytes, length: object = None, **headers: str) -> requests.Response:
    extra = {name.replace("_", "-"): value for name, value in headers.items()}
    extra |= {} if length is None else {LENGTH: str(length)}
    return requests.post(f"{live.url}{MODEL}/infer", data=body, headers=extra, timeout=SECONDS)


def refused(answer: requests.Response) -> tuple[int, str]:
    assert answer.headers["Content-Type"] == "application/json"
    content = answer.json()
    assert list(content) == ["error"]
    return answer.status_code, content["error"]


def outputs(answer: requests.Response) -> dict[str, np.ndarray[Any, Any]]:
    """The outputs of an answer, from JSON and from binary tensors."""
    assert answer.status_code == 200, answer.text
    size = int(answer.headers[LENGTH])
    content, start, found = json.loads(answer.content[:size]), size, {}
    for output in content["outputs"]:
        if "data" in output:
            values = np.array(output["data"], np.float32 if output["datatype"] == "FP32" else object)
        else:
            end = start + output["parameters"]["binary_data_size"]
            part, start = answer.content[start:end], end
            values = np.frombuffer(part, "<f4") if output["datatype"] == "FP32" else np.array(texts(part), object)
        found[output["name"]] = values.reshape(output["shape"])
    assert start == len(answer.content)
    return found


def texts(tensor: bytes) -> list[str]:
    found = []
    while tensor:
        end = 4 + int.from_bytes(tensor[:4], "little")
        found.append(tensor[4:end].decode())
        tensor = tensor[end:]
    return found


def expected(live: Live, images: Sequence[bytes]) -> dict[str, np.ndarray[Any, Any]]:
    assert live.predictor is not None
    answers = live.predictor.predict(images)
    predictions = [answer for answer in answers if isinstance(answer, Prediction)]
    assert len(predictions) == len(images)
    return {
        "logits": torch.stack([each.logits for each in predictions]).numpy(),
        "probabilities": torch.stack([each.logits.softmax(dim=0) for each in predictions]).numpy(),
        "labels": np.array([[each.top(1)[0][0]] for each in predictions], object),
    }


def check_equal(found: dict[str, np.ndarray[Any, Any]], wanted: dict[str, np.ndarray[Any, Any]]) -> None:
    """Compare bits."""
    assert list(found) == list(wanted)
    for name, values in wanted.items():
        assert found[name].shape == values.shape
        assert found[name].tolist() == values.tolist()


# --- health and metadata ----------------------------------------------------------------------------------------------


def test_health_and_metadata(live: Live) -> None:
    assert live.get("/v2/health/live").json()["live"] is True
    for path in ("/v2/health/ready", f"{MODEL}/ready", f"{MODEL}/versions/1/ready"):
        assert (live.get(path).status_code, live.get(path).json()["ready"]) == (200, True)
    server = {"name": "gpuflow", "version": __version__, "extensions": ["binary_tensor_data"]}
    assert live.get("/v2").json() == server
    described = {
        "name": "model",
        "versions": ["1"],
        "platform": "gpuflow",
        "inputs": [{"name": "image", "datatype": "BYTES", "shape": [-1, 1]}],
        "outputs": [
            {"name": "logits", "datatype": "FP32", "shape": [-1, 3]},
            {"name": "probabilities", "datatype": "FP32", "shape": [-1, 3]},
            {"name": "labels", "datatype": "BYTES", "shape": [-1, 1]},
        ],
    }
    assert live.get(MODEL).json() == live.get(f"{MODEL}/versions/1").json() == described


@pytest.mark.parametrize("path", ["/v2/models/modle", "/v2/models/modle/ready", f"{MODEL}/versions/2"])
def test_another_model_or_version(live: Live, path: str) -> None:
    status, reason = refused(live.get(path))
    assert status == 404 and reason.startswith(f"GET {path}: Not Found; did you mean '/v2/models/model")
    answer = requests.post(f"{live.url}/v2/models/x/infer", data=as_json(PHOTOS[:1]), timeout=SECONDS)
    assert refused(answer)[0] == 404
    assert refused(live.get(f"{MODEL}/infer"))[0] == 405


def test_a_model_without_names_of_its_classes() -> None:
    with predictor_of(FakeEngine(), classes=None) as predictor, served(predictor) as live:
        assert live.get(MODEL).json()["outputs"][0]["shape"] == [-1, -1]
        found = outputs(infer(live, as_json(PHOTOS)))
        check_equal(found, expected(live, PHOTOS))
        assert set(found["labels"].ravel()) <= {"0", "1", "2"}


def test_while_the_model_is_loaded() -> None:
    loading: Future[Predictor] = Future()
    with served(loading) as live:
        assert live.get("/v2/health/live").status_code == 200
        for path in ("/v2/health/ready", f"{MODEL}/ready"):
            assert (live.get(path).status_code, live.get(path).json()["ready"]) == (503, False)
        assert live.get(MODEL).json()["outputs"][0]["shape"] == [-1, -1]
        answer = infer(live, as_json(PHOTOS))
        assert refused(answer) == (503, "the model is still being loaded")
        assert answer.headers["Retry-After"] == "5"


# --- answers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 5])
@pytest.mark.parametrize("binary_answer", [False, True])
def test_answers_have_the_bits_of_predict(live: Live, count: int, binary_answer: bool) -> None:
    images = PHOTOS[:count]
    asked = {"id": "7", "parameters": {"binary_data_output": binary_answer}}
    wanted = expected(live, images)
    for answer in (infer(live, as_json(images, **asked)), infer(live, *as_binary(images, **asked))):
        check_equal(outputs(answer), wanted)
        kind = "application/octet-stream" if binary_answer else "application/json"
        assert answer.headers["Content-Type"] == kind
        content = json.loads(answer.content[: int(answer.headers[LENGTH])])
        assert {**content, "outputs": 0} == {"id": "7", "model_name": "model", "model_version": "1", "outputs": 0}


def test_the_outputs_that_a_request_names(live: Live) -> None:
    wanted = expected(live, PHOTOS)
    asked = [{"name": "labels", "parameters": {"binary_data": True}}, {"name": "logits"}]
    answer = infer(live, as_json(PHOTOS, outputs=asked))
    check_equal(outputs(answer), {"labels": wanted["labels"], "logits": wanted["logits"]})
    assert set(wanted["labels"].ravel()) <= set(CLASSES)
    asked = [{"name": "logits", "parameters": {"binary_data": False}}]
    answer = infer(live, as_json(PHOTOS, outputs=asked, parameters={"binary_data_output": True}))
    assert answer.json()["outputs"][0]["data"] == wanted["logits"].ravel().tolist()
    answer = infer(live, as_json(PHOTOS[:1], outputs=[{"name": "logits"}] * 1000))
    assert list(outputs(answer)) == ["logits"] and len(answer.content) < 1000


@pytest.mark.parametrize("text", ["é\0", "x" * 1000])
def test_the_id_is_returned(live: Live, text: str) -> None:
    assert infer(live, as_json(PHOTOS[:1], id=text)).json()["id"] == text


def test_every_content_type_is_taken(live: Live) -> None:
    for kind in ("application/json", "application/octet-stream", "application/x-www-form-urlencoded", "text/plain"):
        assert infer(live, as_json(PHOTOS), Content_Type=kind).ok
    form = "multipart/form-data; boundary=x"
    assert infer(live, BODY, SIZE, Content_Type=form).ok


def test_shapes_of_several_images(live: Live) -> None:
    wanted = expected(live, PHOTOS)
    content = json.loads(as_json(PHOTOS))
    content["inputs"][0]["shape"] = [5, 1]
    check_equal(outputs(infer(live, json.dumps(content).encode())), wanted)


def test_base64_in_lines(live: Live) -> None:
    data = base64.encodebytes(PHOTOS[0]).decode()
    body = json.dumps({"inputs": [image(1, data=[data])]}).encode()
    check_equal(outputs(infer(live, body)), expected(live, PHOTOS[:1]))


def test_forty_callers_at_a_time(live: Live) -> None:
    wanted = [expected(live, [photo]) for photo in PHOTOS]

    def call(number: int) -> None:
        for turn in range(4):
            which = (number + turn) % 6
            if which == 5:
                assert refused(infer(live, *as_binary([PHOTOS[0], b"hello"])))[0] == 400
            else:
                body = as_binary([PHOTOS[which]]) if number % 2 else (as_json([PHOTOS[which]]), None)
                check_equal(outputs(infer(live, *body)), wanted[which])

    with ThreadPoolExecutor(40) as pool:
        list(pool.map(call, range(40)))
    occupancy = live.service.occupancy
    wait(lambda: occupancy.active == 0)
    assert occupancy.queue_length == occupancy.held_bytes == occupancy.pixels == 0


def test_requests_are_counted_under_one_name_of_a_model() -> None:
    with served(FakeEngine(batch=8)) as live:
        assert infer(live, as_json(PHOTOS)).ok
        for number in range(3):
            live.get(f"/v2/models/{number}")
        infer(live, b"{}")
        text = live.get("/metrics").text
    for line in (
        'gpuflow_requests_total{route="/v2/models/{name}/infer",status="200"} 1.0',
        'gpuflow_requests_total{route="/v2/models/{name}/infer",status="400"} 1.0',
        'gpuflow_requests_total{route="/v2/models/{name}",status="404"} 3.0',
        'gpuflow_request_seconds_count{route="/v2/models/{name}/infer"} 1.0',
        "gpuflow_images_total 5.0",
    ):
        assert line in text


# --- refused ----------------------------------------------------------------------------------------------------------

ONE = base64.b64encode(PHOTOS[0]).decode()
MOST = 1 << 53
REFUSED: list[tuple[object, str]] = [
    ([], "request: Input should be a valid dictionary or instance of _Request, got []"),
    ({}, "request.inputs: Field required, got {}"),
    ({"inputs": []}, "request.inputs[0]: Field required, got []"),
    (
        {"inputs": [image(1, data=[ONE])] * 2},
        "request.inputs: Tuple should have at most 1 item after validation, not 2, got ",
    ),
    ({"inputs": [image(1, data=[ONE], name="INPUT")]}, "request.inputs[0].name: Input should be 'image', got 'INPUT'"),
    (
        {"inputs": [image(1, data=[ONE], datatype="UINT8")]},
        "request.inputs[0].datatype: Input should be 'BYTES', got 'UINT8'",
    ),
    ({"inputs": [image(2, data=[ONE])]}, "inputs[0] must be 2 images up to byte "),
    ({"inputs": [image(1, data=[ONE, ONE])]}, "inputs[0] must be 1 images up to byte "),
    ({"inputs": [image(1)]}, "inputs[0] must be 1 images up to byte "),
    (
        {"inputs": [image(0, data=[])]},
        "request.inputs[0].shape[0]: Input should be greater than or equal to 1, got 0",
    ),
    ({"inputs": [image(-1, data=[])]}, "request.inputs[0].shape[0]: Input should be greater than or equal to 1"),
    (
        {"inputs": [image(MOST + 1, data=[])]},
        f"request.inputs[0].shape[0]: Input should be less than or equal to {MOST}",
    ),
    ({"inputs": [image(1, data=["a"])]}, "request.inputs[0].data[0]: Base64 decoding error: "),
    ({"inputs": [image(1, data=[[ONE]])]}, "request.inputs[0].data[0]: Input should be a valid bytes, got ["),
    ({"inputs": [image(1, data=[5])]}, "request.inputs[0].data[0]: Input should be a valid bytes, got 5"),
    (
        {"inputs": [image(1, data=[ONE])], "outputs": [{"name": "logit"}]},
        "request.outputs[0].name: Input should be 'logits', 'probabilities' or 'labels', got 'logit'",
    ),
    (
        {
            "inputs": [image(1, data=[ONE])],
            "outputs": [{"name": "logits", "parameters": {"shared_memory_region": "a"}}],
        },
        "request.outputs[0].parameters.shared_memory_region: Input should be None, got 'a'",
    ),
    (
        {"inputs": [image(1, data=[ONE])], "outputs": [{"name": "logits", "parameters": {"classification": 3}}]},
        "request.outputs[0].parameters.classification: Input should be None, got 3",
    ),
    (
        {"inputs": [image(1, data=[ONE])], "id": "\ud800"},
        "request.id: Input should be a valid string, unable to parse raw data as a unicode string, got '\\ud800'",
    ),
    ({"inputs": [image(1, data=[ONE])], "id": "x" * 1001}, "request.id: String should have at most 1000 characters"),
    (
        {"inputs": [image(1, data=[ONE])], "parameters": {"timeout": 0}},
        "request.parameters.timeout: Input should be greater than or equal to 1, got 0",
    ),
    (
        {"inputs": [image(1, data=[ONE])], "parameters": {"timeout": 10**400}},
        "request.parameters.timeout: Input should be less than or equal to ",
    ),
    (
        {"inputs": [image(1, data=[base64.b64encode(b"hello").decode()])]},
        "image (sample 0): decode: not an image: begins with 68 65 6c 6c; gpuflow decodes ",
    ),
]


@pytest.mark.parametrize(("content", "reason"), REFUSED)
def test_refused_requests(live: Live, content: object, reason: str) -> None:
    status, found = refused(infer(live, json.dumps(content).encode()))
    assert status == 400
    assert found.startswith(reason)
    assert len(found) < 400


@pytest.mark.parametrize(
    "body",
    [b"", b"{", PHOTOS[0], b"\xff\xfe", b"[" * 5000, b'{"id": ' + b"9" * 5000 + b"}", as_binary(PHOTOS)[0]],
    ids=["empty", "cut", "an image", "no UTF-16", "deep", "a long number", "binary without its header"],
)
def test_a_body_that_is_no_json(live: Live, body: bytes) -> None:
    status, reason = refused(infer(live, body))
    assert status == 400
    assert reason.startswith(f"the body must begin with JSON, whose length is {LENGTH}: ")


def test_json_of_many_parts_is_not_parsed(live: Live) -> None:
    """10,000 of them are: Python takes seconds and gigabytes for a body of short lists."""
    rule = "the JSON must have at most 10,000 commas and brackets; send images as base64 or binary"
    assert refused(infer(live, b'{"inputs":[' + b"[0]," * 5000 + b"0]}")) == (400, rule)
    assert refused(infer(live, b'{"inputs":[' + b"[0]," * 4998 + b"0]}"))[1].startswith(
        "request.inputs: Tuple should have "
    )


BODY, SIZE = as_binary(PHOTOS)


@pytest.mark.parametrize("length", [len(BODY) + 1, 10**17, 10**18, "9" * 5000, -1, "+1", "1.0", "٣", "1,1", "x"])
def test_a_length_of_the_json_that_is_none(live: Live, length: object) -> None:
    sent = {LENGTH: str(length).encode()}
    answer = requests.post(f"{live.url}{MODEL}/infer", data=BODY, headers=sent, timeout=SECONDS)
    status, reason = refused(answer)
    assert status == 400
    assert reason.startswith(f"{LENGTH} must be at most {len(BODY)}, the length of the body, got ")
    assert len(reason) < 200


@pytest.mark.parametrize("length", [0, 1, SIZE - 1, SIZE + 1, len(BODY)])
def test_another_length_of_the_json(live: Live, length: int) -> None:
    assert refused(infer(live, BODY, length))[0] == 400


@pytest.mark.parametrize("cut", [1, len(PHOTOS[-1]), len(PHOTOS[-1]) + 3, len(BODY) - SIZE])
def test_a_binary_tensor_that_is_cut_or_too_long(live: Live, cut: int) -> None:
    for body in (BODY[:-cut], BODY + bytes(cut)):
        status, reason = refused(infer(live, body, SIZE))
        assert status == 400 and reason.startswith(f"inputs[0] must be 5 images up to byte {len(body)}, got 5 ")


@pytest.mark.parametrize("size", [0xFFFFFFFF, 0x7FFFFFFF, 1 << 24])
@pytest.mark.parametrize("index", range(5))
def test_a_length_of_an_image_that_is_too_large(live: Live, index: int, size: int) -> None:
    start = SIZE + sum(4 + len(photo) for photo in PHOTOS[:index])
    body = BODY[:start] + size.to_bytes(4, "little") + BODY[start + 4 :]
    assert refused(infer(live, body, SIZE))[0] == 400


def test_a_bad_image_is_an_error_of_its_request(live: Live) -> None:
    status, reason = refused(infer(live, *as_binary([PHOTOS[0], PHOTOS[1][:-2], b""])))
    assert (status, reason[:26]) == (400, "image (sample 1): decode: ")


def test_more_images_than_the_limit(small: Live) -> None:
    rule = "a request must have at most 3 images; send several requests"
    assert refused(infer(small, as_json([b""] * 4))) == (413, rule)
    text = json.dumps({"inputs": [image(MOST)]}).encode()
    assert refused(infer(small, text + bytes(9000), len(text))) == (413, rule)


def test_a_large_body_and_a_compressed_one(small: Live) -> None:
    assert refused(infer(small, bytes(10_001)))[0] == 413
    chunks = iter([bytes(5000), bytes(5001)])
    assert refused(infer(small, chunks))[0] == 413  # type: ignore[arg-type]  # requests sends it in chunks
    answer = infer(small, gzip.compress(as_json(PHOTOS)), **{"Content-Encoding": "gzip"})
    reason = "a body must not be compressed, got Content-Encoding 'gzip'; send it as it is"
    assert refused(answer) == (415, reason)


def test_a_model_that_gives_no_numbers() -> None:
    engine = FakeEngine(lambda images: torch.full((len(images), 3), torch.nan))
    with served(engine) as live:
        assert refused(infer(live, as_json(PHOTOS))) == (500, "the model gave logits that are not finite numbers")


# --- the queue --------------------------------------------------------------------------------------------------------


def test_deadlines_and_a_full_queue() -> None:
    gate = Gate()
    limits = RequestLimits(max_queue=2, timeout_s=30)
    with served(FakeEngine(before=gate), limits) as live, ThreadPoolExecutor(1) as pool:
        taken = pool.submit(infer, live, as_json(PHOTOS[:1]))
        assert gate.reached.wait(timeout=20)
        status, reason = refused(infer(live, as_json(PHOTOS[:1], parameters={"timeout": 300_000})))
        assert status in (503, 504) and re.match(r"no answer (was possible )?within 0\.[0-3]\d* s", reason), reason
        wait(lambda: live.service.occupancy.active == 1)
        answer = infer(live, *as_binary(PHOTOS[:2]))
        assert refused(answer) == (503, "the queue is full: 1 of 2 places taken, and the request has 2 images")
        assert answer.headers["Retry-After"] == "1"
        answer = infer(live, as_json(PHOTOS[:1]), **{"X-Request-Timeout-Ms": "200"})
        assert refused(answer)[0] in (503, 504)
        live.service.draining = True
        assert live.get("/v2/health/ready").status_code == 503
        assert refused(infer(live, as_json(PHOTOS[:1])))[0] == 503
        gate.open()
        assert taken.result(timeout=20).ok


def test_probes_and_refusals_above_the_limit_of_connections() -> None:
    gate = Gate()
    with served(FakeEngine(before=gate), RequestLimits(max_connections=1)) as live, ThreadPoolExecutor(1) as pool:
        taken = pool.submit(infer, live, as_json(PHOTOS[:1]))
        assert gate.reached.wait(timeout=20)
        reason = "the service has too many connections; retry later, or keep one open for several requests"
        assert refused(infer(live, as_json(PHOTOS[:1]))) == (503, reason)
        assert live.get("/v2/health/live").ok and live.get("/v2/health/ready").ok
        gate.open()
        assert taken.result(timeout=20).ok


def test_an_error_of_the_service_itself() -> None:
    with predictor_of(FakeEngine(), classes=("red",)) as predictor, served(predictor) as live:
        reason = "internal error; the log of the service has the traceback"
        assert refused(infer(live, as_json([jpeg(2, 0)]))) == (500, reason)
