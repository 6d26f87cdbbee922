"""The HTTP service: predictions, refused requests, the queue, time limits, disconnected clients, metrics."""

from __future__ import annotations

import contextlib
import gc
import gzip
import io
import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import requests
import torch
from PIL import Image
from prometheus_client.parser import text_string_to_metric_families
from starlette.routing import Route

import gpuflow.serve
from gpuflow.decode.codecs import probe
from gpuflow.serve.http import app, limits
from gpuflow.serve.http.app import RequestLimits, create_app
from gpuflow.serve.model_input import most_pixels
from gpuflow.serve.predictor import Predictor
from gpuflow.torchpipe.graph import Graph, chain
from tests import images
from tests.datasets import RAW, VAL, jpeg, program, write_config
from tests.forking import Python
from tests.hostile import BAD, HOSTILE
from tests.images import patch_png, png
from tests.serve.fakes import CLASSES, Break, FakeEngine, Gate, Nap, mean_color
from tests.serve.services import Live, answer_of, predictor_of, served, wait

PHOTO = jpeg(0, 0)
TYPES = "image/*, application/octet-stream, multipart/form-data"


@pytest.fixture(scope="module")
def small() -> Iterator[Live]:
    """A service whose logits are the mean colour, with bodies of at most 10 kB and three images."""
    with served(FakeEngine(), RequestLimits(max_body_bytes=10_000, max_images=3)) as service:
        yield service


def error(answer: requests.Response) -> tuple[int, str, str]:
    """Status, kind and reason of a refused request."""
    content = answer.json()
    return answer.status_code, content["error"]["kind"], content["error"]["reason"]


def samples(live: Live) -> dict[tuple[str, ...], float]:
    """Every metric by its name and the values of its labels, in their order."""
    answer = live.get("/metrics")
    assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
    found = {}
    for family in text_string_to_metric_families(answer.text):
        for sample in family.samples:
            found[sample.name, *(value for _, value in sorted(sample.labels.items()))] = sample.value
    return found


# --- predictions ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["image/jpeg", "image/png", "IMAGE/JPEG; x=y", "application/octet-stream", ""])
def test_an_image_as_the_body(live: Live, kind: str) -> None:
    answer = live.ask(PHOTO, Content_Type=kind)
    assert answer.status_code == 200
    assert live.predictor is not None
    expected = live.predictor(PHOTO, top_k=5)
    predictions = answer.json()["predictions"]
    assert answer.json() == {"predictions": predictions}
    assert [(entry["label"], entry["probability"]) for entry in predictions] == list(expected)
    assert [CLASSES[entry["index"]] for entry in predictions] == [label for label, _ in expected]
    assert answer.headers["Server-Timing"].startswith("total;dur=")


def encoded(form: str, side: int) -> bytes:
    data = io.BytesIO()
    Image.new("RGB", (side, side)).save(data, form)
    return data.getvalue()


def test_a_preset_decodes_no_file_of_an_unknown_size_or_above_the_limit(tmp_path: Path) -> None:
    """torchpipe's operators would decode files of any size, and of formats that gpuflow does not know."""
    serve = {"preset": "torchpipe_cpu", "height": 20, "width": 30}
    config = write_config(tmp_path / "x.yaml", "photos", serve=serve)
    limits = RequestLimits(max_pixels=2000)
    with gpuflow.serve.load(config, model=mean_color) as predictor, served(predictor, limits) as live:
        for form in ("JPEG", "PNG"):
            assert live.ask(encoded(form, 44)).status_code == 200, form
            assert "= 2,025 pixels are more than" in error(live.ask(encoded(form, 45)))[2], form
        for form in ("GIF", "TIFF", "JPEG2000"):
            assert live.ask(encoded(form, 44)).status_code == 422, form
        for data in (encoded("PPM", 44), encoded("JPEG", 44)[:-2]):
            assert error(live.ask(data))[:2] == (422, "bad_image")


@pytest.mark.parametrize("activation", ["sigmoid", "none"])
def test_models_of_several_classes_and_of_numbers(activation: Any, tmp_path: Path) -> None:
    serve = {"stages": ["decode", {"resize": {"height": 20, "width": 30}}]}
    config = write_config(tmp_path / "x.yaml", "photos", serve=serve)
    with gpuflow.serve.load(config, model=mean_color) as predictor, served(predictor) as live:
        predictor.activation = activation
        logits = predictor(PHOTO)
        found = live.ask(PHOTO, "/predict?top_k=2").json()["predictions"]
    if activation == "none":
        assert [(entry["index"], entry["value"]) for entry in found] == list(enumerate(logits.tolist()))
    else:
        values, indices = logits.sigmoid().topk(2)
        expected = list(zip(indices.tolist(), values.tolist(), strict=True))
        assert [(entry["index"], entry["probability"]) for entry in found] == expected


def test_the_number_of_labels(live: Live) -> None:
    assert len(live.ask(PHOTO, "/predict?top_k=2").json()["predictions"]) == 2
    assert len(live.ask(PHOTO, "/predict?top_k=1000").json()["predictions"]) == 3


def test_a_form_gives_results_in_its_order(live: Live) -> None:
    photos = [jpeg(i % 3, i) for i in range(6)]
    answer = live.form(*photos, path="/predict?top_k=3")
    assert answer.status_code == 200
    assert answer.json() == {"results": [live.ask(photo).json() for photo in photos]}
    assert list(live.form(PHOTO).json()) == ["results"]


@pytest.mark.parametrize("one_node", [False, True], ids=["two nodes", "one node"])
def test_the_files_of_a_form_are_one_batch(one_node: bool) -> None:
    """A bad one changes nothing for the others, and a form that is larger than a batch is as few batches as it can."""
    engine = FakeEngine(batch=16)
    photos = [jpeg(i % 3, i) for i in range(20)]
    with predictor_of(engine, one_node=one_node, threads=3, timeout_ms=60_000) as predictor, served(predictor) as live:
        assert len(live.form(*photos[:16]).json()["results"]) == 16
        assert engine.counts == [16]
        results = live.form(*photos[:3], b"hello", photos[3]).json()["results"]
        assert ["error" in result for result in results] == [False, False, False, True, False]
        assert engine.counts == [16, 4]
        assert len(live.form(*photos).json()["results"]) == 20
        assert sorted(engine.counts) == [4, 4, 16, 16]


def bad_image(reason: str) -> dict[str, Any]:
    """The answer for a file that training refuses with this reason. The service takes fewer pixels."""
    stage, _, text = reason.partition(": ")
    text = text.replace("max_pixels = 179,000,000", "max_pixels = 50,000,000")
    return {"error": {"kind": "bad_image", "stage": stage, "reason": text}}


def test_bad_images_among_hostile_ones(live: Live) -> None:
    """Each file gets the same answer as alone."""
    files = [(name, data, "") for name, data in HOSTILE.items()] + [(name, *BAD[name]) for name in BAD]
    order = np.random.default_rng(0).permutation(len(files))
    answer = live.form(*(files[i][1] for i in order))
    assert answer.status_code == 200
    for i, result in zip(order, answer.json()["results"], strict=True):
        name, data, reason = files[i]
        if reason:
            assert result == bad_image(reason)
        else:
            assert result == live.ask(data).json(), name


@pytest.mark.parametrize("name", BAD)
def test_a_bad_image_alone(live: Live, name: str) -> None:
    data, reason = BAD[name]
    expected = bad_image(reason)
    answer = live.ask(data)
    assert (answer.status_code, answer.json()) == (422, expected)
    answer = live.form(data)
    assert (answer.status_code, answer.json()) == (422, expected | {"results": [expected]})


def test_a_form_of_bad_images_only(live: Live) -> None:
    answer = live.form(b"", b"hello")
    assert error(answer) == (422, "bad_image", "none of 2 files is an image")
    assert [result["error"]["stage"] for result in answer.json()["results"]] == ["decode", "decode"]


@pytest.mark.parametrize("text", ["/etc/passwd", "file:///etc/passwd", "http://127.0.0.1/x.jpg"])
def test_no_path_and_no_url_is_read(live: Live, text: str) -> None:
    for answer in (live.ask(text.encode()), live.form(text.encode())):
        assert answer.status_code == 422
        assert answer.json()["error"]["reason"].startswith("not an image: begins with ")
    parts = {"x": (text, PHOTO)}
    assert requests.post(f"{live.url}/predict", files=parts, timeout=20).status_code == 200
    assert error(live.ask(b"", f"/predict?url={text}"))[:2] == (400, "bad_request")


def test_long_headers_are_read_on_another_thread(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    """A PNG of 200,000 chunks takes 0.2 s to look through, and one thread answers all callers."""
    threads = list[str]()

    def watched(*arguments: Any, **settings: Any) -> Any:
        threads.append(threading.current_thread().name)
        return probe(*arguments, **settings)

    monkeypatch.setattr(app, "probe", watched)
    noise = np.random.default_rng(0).integers(0, 256, (400, 400, 3), np.uint8)
    assert (
        live.ask(PHOTO).status_code
        == live.ask(png(noise)).status_code
        == live.form(PHOTO, png(noise)).status_code
        == 200
    )
    loop, first, *others = threads
    assert first.startswith("asyncio_") and first != loop
    assert len(others) == 2 and loop not in others


# --- the picture ------------------------------------------------------------------------------------------------------


def test_the_picture_of_the_models_input(live: Live) -> None:
    """The pixels that normalize got."""
    with predictor_of(FakeEngine(), stages=RAW) as raw:
        expected = raw.preprocess(PHOTO)
    for answer in (live.ask(PHOTO, "/seen"), live.form(PHOTO, path="/seen")):
        assert (answer.status_code, answer.headers["Content-Type"]) == (200, "image/png")
        pixels = cv2.imdecode(np.frombuffer(answer.content, np.uint8), cv2.IMREAD_COLOR_RGB)
        assert torch.equal(torch.from_numpy(pixels).permute(2, 0, 1), expected)


def test_seen_takes_one_image(live: Live) -> None:
    assert error(live.form(PHOTO, PHOTO, path="/seen")) == (400, "bad_request", "/seen takes one image, got 2")
    assert error(live.ask(b"", "/seen")) == (422, "bad_image", "empty: the file has no bytes")


def test_a_model_inside_torchpipe_has_no_picture() -> None:
    folded = program(VAL)
    first = chain(folded, None, origin="x.yaml", threads=1, device="cpu").nodes["preprocess"]
    last = {"backend": "Identity", "instance_num": "1"}
    graph = Graph(nodes={"preprocess": first, "model": last}, origin="x.yaml", preprocessing="0" * 16)
    with Predictor(graph, image=folded.result) as predictor, served(predictor) as live:
        reason = "the model runs inside torchpipe, which does not return its input; set serve.model.via=python"
        assert error(live.ask(PHOTO, "/seen")) == (501, "no_picture", reason)
        assert live.ask(PHOTO).status_code == 200


# --- refused ----------------------------------------------------------------------------------------------------------

PNG, FORM = "image/png", "multipart/form-data"
CURL = "application/x-www-form-urlencoded"
REFUSED = [
    ("POST", "/predict?topk=2", PNG, 400, "/predict has no parameter 'topk'; did you mean 'top_k'?"),
    ("POST", "/seen?top_k=2", PNG, 400, "/seen has no parameter 'top_k'"),
    ("POST", "/predict?top_k=1&top_k=2", PNG, 400, "top_k must be one whole number from 1 to 999999999, got '1, 2'"),
    ("POST", "/predict?top_k=0", PNG, 400, "top_k must be one whole number from 1 to 999999999, got '0'"),
    ("POST", "/predict", FORM, 400, "the form cannot be read: its Content-Type names no boundary"),
    ("POST", "/predict", "text/plain", 415, f"Content-Type must be one of {TYPES}, got 'text/plain'"),
    ("GET", "/predict", "", 405, "GET /predict: Method Not Allowed"),
    ("POST", "/metrics", "", 405, "POST /metrics: Method Not Allowed"),
    ("POST", "/perdict", PNG, 404, "POST /perdict: Not Found; did you mean '/predict'?"),
    ("POST", "/predict/", PNG, 404, "POST /predict/: Not Found; did you mean '/predict'?"),
    ("GET", "/docs", "", 404, "GET /docs: Not Found"),
]
KINDS = {400: "bad_request", 404: "not_found", 405: "method", 413: "too_large", 415: "unsupported_type"}


@pytest.mark.parametrize(("method", "path", "kind", "status", "reason"), REFUSED)
def test_refused(live: Live, method: str, path: str, kind: str, status: int, reason: str) -> None:
    headers = {"Content-Type": kind} if kind else {}
    answer = requests.request(method, live.url + path, data=PHOTO, headers=headers, timeout=20)
    assert error(answer) == (status, KINDS[status], reason)
    assert ("Accept-Post" in answer.headers) == (status == 415)
    assert ("Allow" in answer.headers) == (status == 405)


def test_an_image_that_curl_sends_without_naming_its_type(live: Live) -> None:
    """`curl --data-binary @FILE` says that it sends the fields of a form."""
    assert live.ask(PHOTO, Content_Type=CURL).json() == live.ask(PHOTO).json()
    assert live.ask(b"", Content_Type=CURL).status_code == 422
    answer = live.ask(b"url=http://x/y.jpg", Content_Type=CURL)
    advice = f"got a text as '{CURL}', curl's default; send an image: --data-binary @FILE or -F image=@FILE"
    assert error(answer) == (415, "unsupported_type", f"Content-Type must be one of {TYPES}, {advice}")


def test_a_compressed_body_is_refused(live: Live) -> None:
    answer = live.ask(gzip.compress(PHOTO), Content_Encoding="gzip")
    reason = "a body must not be compressed, got Content-Encoding 'gzip'; send it as it is"
    assert error(answer) == (415, "unsupported_type", reason)
    assert answer.headers["Accept-Encoding"] == "identity"
    assert live.ask(PHOTO, Content_Encoding="identity").ok


def test_a_second_line_that_says_that_a_body_is_compressed(live: Live) -> None:
    head = (
        f"POST /predict HTTP/1.1\nContent-Type: image/jpeg\nContent-Length: {len(PHOTO)}\nContent-Encoding: identity\n"
    )
    for encoding, expected in (("gzip", 415), ("identity", 200)):
        with live.connect(f"{head}Content-Encoding: {encoding}", PHOTO) as connection:
            status, _, body = answer_of(connection)
        assert status == expected, body
        if status == 415:
            assert b"got Content-Encoding 'identity, gzip'" in body


def test_a_file_whose_name_is_not_ascii(live: Live) -> None:
    """Some clients send only `filename*=`."""
    head = "--x\r\nContent-Disposition: form-data; name=\"a\"; filename*=utf-8''%C3%A9.jpg\r\n\r\n"
    body = head.encode() + PHOTO + b"\r\n--x--\r\n"
    answer = live.ask(body, Content_Type=f"{FORM}; boundary=x")
    assert answer.json() == {"results": [live.ask(PHOTO).json()]}


def form(*parts: str, end: str = "--x--\r\n") -> bytes:
    """The body of a form whose boundary is x."""
    return ("".join(f"--x\r\nContent-Disposition: form-data; {part}\r\n" for part in parts) + end).encode()


FILE, FIELD = 'name="a"; filename="a.jpg"\r\n\r\nabc', 'name="top_k"\r\n\r\n5'
FORMS = [
    (form(FILE, end=""), 400, "the form cannot be read: it ends before its closing boundary"),
    (
        form(FILE, FIELD),
        400,
        "the form cannot be read: its field 'top_k' is not a file; give files a filename, parameters belong in the URL",
    ),
    (form("abc"), 400, "the form cannot be read: "),
    (PHOTO, 400, "the form cannot be read: "),
    (form(*[FILE] * 4), 413, "a request must have at most 3 images; send several requests"),
    (form(FILE + "\r\n--xy" * 1000), 413, "a request must have at most 3 images; send several requests"),
    (form(), 422, "the form has no file"),
]


@pytest.mark.parametrize(("body", "status", "reason"), FORMS)
def test_refused_forms(small: Live, body: bytes, status: int, reason: str) -> None:
    answer = small.ask(body, Content_Type=f"{FORM}; boundary=x")
    assert error(answer)[:2] == (status, KINDS.get(status, "bad_image"))
    assert error(answer)[2].startswith(reason)


# --- bodies that are too large ----------------------------------------------------------------------------------------

TOO_LARGE = (413, "too_large", "the body must have at most 10,000 bytes; send a smaller file or fewer files")


@pytest.mark.parametrize("size", [10_001, 5_000_000])
def test_a_body_that_is_too_large(small: Live, size: int) -> None:
    """The client sends all of it before it reads, gets the answer, and continues on the same connection."""
    with requests.Session() as session:
        for _ in range(2):
            answer = session.post(
                f"{small.url}/predict", data=bytes(size), headers={"Content-Type": "image/png"}, timeout=20
            )
            assert error(answer) == TOO_LARGE
        assert session.post(f"{small.url}/predict", data=PHOTO, headers={"Content-Type": "image/png"}, timeout=20).ok
    assert small.service.occupancy.held_bytes == small.service.occupancy.active == small.service.occupancy.reserved == 0


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_may_have_exactly_the_limit(small: Live, chunked: bool) -> None:
    for size, status in ((9_999, 422), (10_000, 422), (10_001, 413)):
        data = iter([bytes(size - 1), b"x"]) if chunked else bytes(size)
        assert small.ask(data).status_code == status, size


@pytest.mark.parametrize("kind", ["image/png", "multipart/form-data; boundary=x"])
def test_a_body_of_chunks_that_is_too_large(small: Live, kind: str) -> None:
    """Its size is not announced."""
    head = form('name="a"; filename="a.jpg"\r\n\r\n', end="") if "boundary" in kind else b""
    answer = small.ask(iter([head, *[bytes(100_000)] * 50]), Content_Type=kind)
    assert error(answer) == TOO_LARGE
    assert answer.headers["Connection"] == "close"


def test_a_client_that_expects_continue_is_refused_before_it_sends(small: Live) -> None:
    request = "POST /predict HTTP/1.1\nContent-Type: image/png\nContent-Length: 20000\nExpect: 100-continue"
    with small.connect(request) as connection:
        status, headers, _ = answer_of(connection)
        assert (status, headers["connection"]) == (413, "close")
        assert connection.recv(1) == b""


def test_a_client_that_never_stops_sending_is_disconnected(small: Live) -> None:
    """It has got its answer long before."""
    request = "POST /predict HTTP/1.1\nContent-Type: image/png\nContent-Length: 900000000"
    with small.connect(request) as connection:
        status, headers, _ = answer_of(connection)
        assert (status, headers["connection"]) == (413, "close")
        sent = 0
        with contextlib.suppress(ConnectionError):
            while sent < 500_000_000:
                sent += connection.send(bytes(1_000_000))
        assert 300_000 < sent < 500_000_000


def test_other_early_answers_reach_the_client_too(small: Live) -> None:
    """The body is discarded for every request that is refused without reading it."""
    for path, kind, status in (("/nothing", "image/png", 404), ("/predict", "text/plain", 415)):
        answer = small.ask(bytes(5_000_000), path, Content_Type=kind, Connection="close")
        assert answer.status_code == status


# --- the queue --------------------------------------------------------------------------------------------------------


def test_a_full_queue() -> None:
    gate = Gate()
    with (
        served(FakeEngine(before=gate, batch=1), RequestLimits(max_queue=3, max_images=9)) as live,
        ThreadPoolExecutor(4) as pool,
    ):
        taken = [pool.submit(live.ask, PHOTO), pool.submit(live.form, PHOTO)]
        wait(lambda: live.queue_length == 2)
        answer = live.form(PHOTO, PHOTO)
        reason = "the queue is full: 2 of 3 places taken, and the request has 2 images"
        assert error(answer) == (503, "queue_full", reason)
        assert answer.headers["Retry-After"] == "1"
        assert error(live.form(*[PHOTO] * 4))[:2] == (413, "too_large"), "would never fit"
        taken.append(pool.submit(live.ask, PHOTO))
        wait(lambda: live.queue_length == 3)
        for answer in (live.ask(PHOTO), live.ask(PHOTO, "/seen")):
            assert error(answer) == (503, "queue_full", "the queue is full: 3 of 3 places taken")
        assert live.get("/readyz").ok
        gate.open()
        assert [future.result(timeout=20).status_code for future in taken] == [200, 200, 200]
        assert live.ask(PHOTO).ok
        assert live.service.occupancy.queue_length == live.service.occupancy.active == 0


def test_large_images_are_refused_by_their_headers() -> None:
    """Of a few bytes a decoder can make gigabytes, or work for minutes."""
    large = patch_png(png(np.zeros((1, 1, 3), np.uint8)), width=13_000, height=13_000)
    progressive = images.jpeg(images.photo(16, 16), progressive=True)
    scan = progressive[progressive.rindex(b"\xff\xda") : -2]
    with served(FakeEngine()) as live:
        for data, reason in (
            (large, "13000x13000 = 169,000,000 pixels are more than max_pixels = 50,000,000"),
            (progressive[:-2] + 20 * scan + progressive[-2:], "more than max_scans = 20 scans"),
        ):
            for path in ("/predict", "/seen"):
                assert error(live.ask(data, path)) == (422, "bad_image", reason)
            results = live.form(PHOTO, data, PHOTO).json()["results"]
            assert ["error" in result for result in results] == [False, True, False]
            assert results[0] == results[2]
        assert live.service.occupancy.pixels == live.service.occupancy.queue_length == 0


def test_pixels_in_flight_are_limited() -> None:
    gate, header = Gate(), probe(np.frombuffer(PHOTO, np.uint8))
    one = header.width * header.height
    with (
        served(FakeEngine(before=gate, batch=1), RequestLimits(max_queue_pixels=3 * one)) as live,
        ThreadPoolExecutor(2) as pool,
    ):
        taken = [pool.submit(live.form, PHOTO, PHOTO)]
        wait(lambda: live.service.occupancy.pixels == 2 * one)
        answer = live.form(PHOTO, PHOTO)
        reason = f"the queue is full: its images have {2 * one:,} of {3 * one:,} pixels"
        assert error(answer) == (503, "queue_full", reason)
        assert answer.headers["Retry-After"] == "1"
        assert error(live.form(*[PHOTO] * 4))[:2] == (413, "too_large"), "would never fit"
        taken.append(pool.submit(live.ask, PHOTO))
        wait(lambda: live.service.occupancy.pixels == 3 * one)
        gate.open()
        assert [future.result(timeout=20).status_code for future in taken] == [200, 200]
        wait(lambda: live.service.occupancy.pixels == 0)
        assert live.form(PHOTO, PHOTO).ok


def test_a_long_image_counts_with_the_pixels_that_it_is_resized_to() -> None:
    gate, stages = Gate(), program(VAL).pipeline
    with served(FakeEngine(before=gate, batch=1)) as live, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(live.ask, png(np.zeros((400, 2, 3), np.uint8)))
        wait(lambda: live.service.occupancy.pixels > 0)
        assert live.service.occupancy.pixels == most_pixels(stages, 400, 2) > 100 * 800
        gate.open()
        assert answer.result(timeout=20).ok


def test_a_slow_client_takes_no_place_and_is_refused_in_time() -> None:
    with served(FakeEngine(), RequestLimits(max_queue=1, timeout_s=3.0)) as live, contextlib.ExitStack() as clients:
        request = "POST /predict HTTP/1.1\nContent-Type: image/jpeg\nContent-Length: 1000"
        slow = [clients.enter_context(live.connect(request, bytes(size))) for size in (0, 10)]
        wait(lambda: live.service.occupancy.active == 2)
        assert live.queue_length == 0
        assert live.ask(PHOTO).ok
        for connection in slow:
            status, headers, body = answer_of(connection)
            assert (status, headers["connection"]) == (408, "close")
            assert json.loads(body)["error"] == {"kind": "slow_body", "reason": "the body did not arrive within 3 s"}
            assert connection.recv(1) == b"", "closed soon after"


def test_a_place_is_taken_once_the_body_is_there() -> None:
    gate = Gate()
    request = f"POST /predict HTTP/1.1\nContent-Type: image/jpeg\nContent-Length: {len(PHOTO)}"
    with (
        served(FakeEngine(before=gate, batch=1), RequestLimits(max_queue=1)) as live,
        ThreadPoolExecutor(1) as pool,
        live.connect(request, PHOTO[:-1]) as late,
    ):
        wait(lambda: live.service.occupancy.active == 1)
        first = pool.submit(live.ask, PHOTO)
        assert gate.reached.wait(timeout=20)
        late.sendall(PHOTO[-1:])
        status, _, body = answer_of(late)
        reason = "the queue is full: 1 of 1 places taken"
        assert (status, json.loads(body)["error"]) == (503, {"kind": "queue_full", "reason": reason})
        gate.open()
        assert first.result(timeout=20).ok


def test_bodies_in_memory_are_limited() -> None:
    with served(FakeEngine(), RequestLimits(max_held_bytes=30_000)) as live:
        request = "POST /predict HTTP/1.1\nContent-Type: image/jpeg\nContent-Length: 25000"
        with live.connect(request, bytes(24_000)) as connection:
            wait(lambda: live.service.occupancy.held_bytes == 24_000)
            answer = live.ask(bytes(10_000))
            assert error(answer) == (503, "queue_full", "request bodies take 24,000 of 30,000 bytes")
            connection.sendall(bytes(1000))
            assert answer_of(connection)[0] == 422
        assert live.service.occupancy.held_bytes == 0
        assert samples(live)["gpuflow_held_bytes",] == 0
        assert live.ask(bytes(40_000)).status_code == 422, "a single one is always accepted"


def test_a_stalled_body_gives_its_memory_to_others() -> None:
    with served(FakeEngine(), RequestLimits(max_held_bytes=30_000)) as live:
        request = "POST /predict HTTP/1.1\nContent-Type: image/jpeg\nContent-Length: 25000"
        with live.connect(request, bytes(24_000)) as stalled:
            wait(lambda: live.service.occupancy.held_bytes == 24_000)
            wait(lambda: live.ask(bytes(10_000)).status_code == 422)
            status, headers, body = answer_of(stalled)
        assert (status, headers["connection"]) == (408, "close")
        reason = "the body arrived too slowly while the service is busy or shuts down; send it again later"
        assert json.loads(body)["error"] == {"kind": "slow_body", "reason": reason}
        assert live.service.occupancy.held_bytes == 0


def test_requests_that_got_no_answer_in_time_hold_no_memory() -> None:
    """The model is still at the first one."""
    gate, size = Gate(), 1_000_000
    limits = RequestLimits(timeout_s=3.0, max_held_bytes=12_000_000)
    predictor = predictor_of(FakeEngine(before=gate, batch=1), one_node=True)
    with predictor, served(predictor, limits) as live, ThreadPoolExecutor(12) as pool:
        first = pool.submit(live.ask, PHOTO)
        assert gate.reached.wait(timeout=20)
        late = [pool.submit(live.ask, bytes(size)) for _ in range(10)]
        wait(lambda: live.service.occupancy.held_bytes == 10 * size)
        assert error(live.ask(bytes(3 * size)))[:2] == (503, "queue_full"), "bodies that wait are counted"
        assert {answer.result(timeout=20).status_code for answer in [first, *late]} == {504}
        wait(lambda: live.service.occupancy.held_bytes == 0)
        assert live.queue_length == 1
        gate.open()
        wait(lambda: live.queue_length == 0)


def test_invalid_limits() -> None:
    for name, value, text in (
        ("max_connections", 0, "RequestLimits.max_connections must be >= 1, got 0"),
        ("head_s", 0.0, "RequestLimits.head_s must be a number of seconds > 0, got 0.0"),
        ("max_queue", 0, "RequestLimits.max_queue must be >= 1, got 0"),
        ("max_body_bytes", -1, "RequestLimits.max_body_bytes must be >= 1, got -1"),
        ("timeout_s", 0.0, "RequestLimits.timeout_s must be a number of seconds > 0, got 0.0"),
        ("timeout_s", float("inf"), "RequestLimits.timeout_s must be a number of seconds > 0, got inf"),
    ):
        with pytest.raises(ValueError, match=r"^RequestLimits\.") as caught:
            RequestLimits(**{name: value})  # type: ignore[arg-type]
        assert str(caught.value) == text


# --- answers that do not arrive ---------------------------------------------------------------------------------------


def test_an_answer_that_does_not_arrive_in_time(caplog: pytest.LogCaptureFixture) -> None:
    gate = Gate()
    engine = FakeEngine(before=gate, batch=1)
    with served(engine, RequestLimits(timeout_s=0.3)) as live, ThreadPoolExecutor(3) as pool:
        answers = list(pool.map(live.ask, [PHOTO] * 3))
        assert {error(answer)[:2] for answer in answers} == {(504, "timeout")}
        assert answers[0].json()["error"]["reason"].startswith("no answer within 0.3 s, with ")
        assert samples(live)["gpuflow_queue_length",] >= 1, "the model still runs the first"
        gate.open()
        wait(lambda: live.queue_length == 0)
        assert live.ask(PHOTO).ok
    assert engine.counts == [1, 1], "the others were cancelled"
    gc.collect()
    assert caplog.text == "", "asyncio logs what nobody has read"


def test_a_client_that_disconnects() -> None:
    gate = Gate()
    engine = FakeEngine(before=gate, batch=1)
    request = f"POST /predict HTTP/1.1\nContent-Type: image/jpeg\nContent-Length: {len(PHOTO)}"
    with served(engine) as live, ThreadPoolExecutor(1) as pool:
        first = pool.submit(live.ask, PHOTO)
        assert gate.reached.wait(timeout=20)
        with live.connect(request, PHOTO), live.connect(request, PHOTO[:100]):
            wait(lambda: live.service.occupancy.active == 3)
        wait(lambda: live.service.occupancy.active == 1)
        gate.open()
        assert first.result(timeout=20).ok
        wait(lambda: live.queue_length == 0)
        counts = samples(live)
        assert counts["gpuflow_errors_total", "disconnected"] == 2
        assert counts["gpuflow_requests_total", "/predict", "499"] == 2
    assert engine.counts == [1], "requests of disconnected clients are dropped"


def test_clients_that_have_gone_free_their_places_at_once() -> None:
    """Those that wait decoded for the model, too."""
    gate = Gate()
    engine = FakeEngine(before=gate, batch=2)
    request = f"POST /predict HTTP/1.1\nContent-Type: image/jpeg\nContent-Length: {len(PHOTO)}"
    with served(engine, RequestLimits(max_queue=7)) as live, ThreadPoolExecutor(6) as pool:
        first = pool.submit(live.ask, PHOTO)
        assert gate.reached.wait(timeout=20)
        with contextlib.ExitStack() as clients:
            for _ in range(6):
                clients.enter_context(live.connect(request, PHOTO))
            wait(lambda: live.service.occupancy.held_bytes == 0 and live.queue_length == 7)
            assert error(live.ask(PHOTO))[:2] == (503, "queue_full")
        wait(lambda: live.queue_length == 1)
        others = [pool.submit(live.ask, PHOTO) for _ in range(5)]
        wait(lambda: live.queue_length == 6)
        gate.open()
        assert [answer.result(timeout=20).status_code for answer in (first, *others)] == [200] * 6
    assert sum(engine.counts) == 6


# --- deadlines --------------------------------------------------------------------------------------------------------


def test_a_request_may_ask_for_less_time() -> None:
    gate, headers = Gate(), {"X_Request_Timeout_Ms": "300"}
    with served(FakeEngine(before=gate, batch=1)) as live:
        answer = live.ask(PHOTO, **headers)
        assert error(answer)[:2] == (504, "timeout")
        assert answer.json()["error"]["reason"].startswith("no answer within 0.")
        request = "POST /predict HTTP/1.1\nContent-Type: image/jpeg\nContent-Length: 9\nX-Request-Timeout-Ms: 300"
        with live.connect(request) as slow:
            assert answer_of(slow)[0] == 408
        gate.open()
        assert live.ask(PHOTO, X_Request_Timeout_Ms="999999999").ok


@pytest.mark.parametrize("value", ["", "0", "-1", "+1", "1.5", "1e3", "0x10", "010", "1,2", "٣", "1000000000", "1 s"])
@pytest.mark.parametrize("path", ["/predict", "/seen"])
def test_a_time_that_is_no_number_of_milliseconds(live: Live, path: str, value: str) -> None:
    answer = live.ask(PHOTO, path, X_Request_Timeout_Ms=value.encode())  # type: ignore[arg-type]
    assert error(answer)[:2] == (400, "bad_request")
    rule = "X-Request-Timeout-Ms must be one whole number from 1 to 999999999, got "
    assert answer.json()["error"]["reason"].startswith(rule)


def test_two_times_are_refused(live: Live) -> None:
    lines = "POST /predict HTTP/1.1\nContent-Length: 0\nX-Request-Timeout-Ms: 5\nX-Request-Timeout-Ms: 5"
    with live.connect(lines) as connection:
        assert answer_of(connection)[0] == 400


def test_a_request_that_would_take_longer_than_it_may_is_refused_at_once() -> None:
    """By the rate that was measured a second ago, and Retry-After follows it."""
    gate = Gate()
    with served(FakeEngine(before=gate, batch=1)) as live, ThreadPoolExecutor(8) as pool:
        taken = [pool.submit(live.ask, PHOTO) for _ in range(4)]
        wait(lambda: live.queue_length == 4)
        live.service.occupancy.seconds_for = lambda images: 2.1 * images  # type: ignore[method-assign]
        answer = live.ask(PHOTO, X_Request_Timeout_Ms="13000")
        assert error(answer)[:2] == (503, "overloaded")
        assert re.fullmatch(
            r"the answer would take 10\.5 s, and the request has (12\.\d|13\.0) s: 4 images wait",
            answer.json()["error"]["reason"],
        )
        assert answer.headers["Retry-After"] == "9", "in whole seconds, rounded up"
        live.service.occupancy.seconds_for = lambda images: 100.0 * images  # type: ignore[method-assign]
        assert live.ask(PHOTO, "/seen").headers["Retry-After"] == "30", "then all that wait are answered, or late"
        gate.open()
        assert [answer.result(timeout=20).status_code for answer in taken] == [200] * 4


def test_a_request_that_can_no_longer_be_answered_is_refused_before_the_model_runs() -> None:
    engine = FakeEngine(before=Nap(1.0), batch=1)
    with served(engine) as live, ThreadPoolExecutor(4) as pool:
        assert live.ask(PHOTO).ok
        first = pool.submit(live.ask, PHOTO)
        wait(lambda: live.queue_length == 1)
        begun = time.monotonic()
        late = live.ask(PHOTO, X_Request_Timeout_Ms="1500")
        assert time.monotonic() - begun < 1.45, "as soon as that is known"
        assert error(late)[:2] == (503, "overloaded")
        assert late.json()["error"]["reason"].startswith("no answer was possible within 1.")
        assert int(late.headers["Retry-After"]) >= 1
        assert first.result(timeout=20).ok
    assert engine.counts == [1, 1]


@pytest.mark.slow
@pytest.mark.parametrize(("allowed_ms", "answered", "of_capacity"), [(None, 0.8, 0.8), (2000, 0.9, 0.85)])
@pytest.mark.parametrize("one_node", [False, True])
def test_a_service_at_ten_times_its_capacity_answers_most_of_what_it_computes(
    one_node: bool, allowed_ms: int | None, answered: float, of_capacity: float
) -> None:
    """Callers give up after two seconds, and ask again."""
    seconds, batch, nap = 12.0, 2, 0.5
    engine, headers = FakeEngine(before=Nap(nap), batch=batch), {"Content-Type": "image/jpeg", "Connection": "close"}
    if allowed_ms is not None:
        headers["X-Request-Timeout-Ms"] = str(allowed_ms)
    predictor = predictor_of(engine, one_node=one_node)

    def ask(port: int) -> int:
        good = 0
        while time.monotonic() < end:
            client = HTTPConnection("127.0.0.1", port, timeout=2.0)
            with contextlib.suppress(TimeoutError), contextlib.closing(client):
                client.request("POST", "/predict", PHOTO, headers)
                status = client.getresponse().status
                good += status == 200
                if status == 503:
                    time.sleep(0.5)
        return good

    with predictor, served(predictor) as live, ThreadPoolExecutor(80) as pool:
        end = time.monotonic() + seconds
        good = sum(pool.map(ask, [live.port] * 80))
    assert good >= answered * sum(engine.counts)
    assert good >= of_capacity * seconds * batch / nap


def test_a_model_that_fails() -> None:
    broken = Break(RuntimeError("no memory"))
    with served(FakeEngine(before=broken)) as live:
        expected = "the model failed on a batch of 1: RuntimeError('no memory')"
        assert error(live.ask(PHOTO)) == (500, "model", expected)
        assert error(live.form(PHOTO, b""))[:2] == (500, "model")
        broken.error = KeyboardInterrupt()
        assert error(live.ask(PHOTO))[:2] == (500, "model")
        assert live.ask(b"").status_code == 422


def test_a_model_that_keeps_failing_is_not_ready() -> None:
    with served(FakeEngine(before=Break(RuntimeError("no memory")))) as live:
        for _ in range(3):
            assert live.ask(PHOTO).status_code == 500
        answer = live.get("/readyz")
        reason = "the model failed on the last 3 batches: RuntimeError('no memory')"
        assert (answer.status_code, answer.json()) == (503, {"status": "failing", "ready": False, "reason": reason})
        assert live.get("/healthz").ok


NOT_FINITE = "the model gave logits that are not finite numbers"
DARK = -1.5
"""The mean of a black image after `normalize` is below this."""


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_logits_that_are_not_finite(value: float) -> None:
    with served(FakeEngine(lambda images: torch.full((len(images), 3), value))) as live:
        assert error(live.ask(PHOTO)) == (500, "model", NOT_FINITE)
        assert live.get("/healthz").ok


def test_logits_of_some_images_of_a_form_that_are_not_finite() -> None:
    """The model gives NaN for images that are mostly black."""
    black, failed = images.jpeg(np.zeros((40, 40, 3), np.uint8)), {"kind": "model", "reason": NOT_FINITE}

    def model(pixels: torch.Tensor) -> torch.Tensor:
        return torch.where(pixels.mean((1, 2, 3))[:, None] < DARK, torch.nan, mean_color(pixels))

    with served(FakeEngine(model)) as live:
        answer, alone = live.form(PHOTO, black, b"hello", black, PHOTO), live.ask(PHOTO).json()
        assert answer.status_code == 200
        results = answer.json()["results"]
        assert [results[i] for i in (0, 4)] == [alone, alone]
        assert [results[i] for i in (1, 3)] == [{"error": failed}] * 2
        assert results[2]["error"]["kind"] == "bad_image"
        counts = samples(live)
        assert (counts["gpuflow_errors_total", "model"], counts["gpuflow_errors_total", "bad_image"]) == (2, 1)
        assert error(live.form(black)) == error(live.form(black, b"hello")) == (500, "model", NOT_FINITE)
        assert samples(live)["gpuflow_errors_total", "model"] == 4


def test_an_error_in_the_service_itself(caplog: pytest.LogCaptureFixture) -> None:
    """Here: fewer names than outputs. The traceback is in the log, not in the answer."""
    with predictor_of(FakeEngine(), classes=("red",)) as predictor, served(predictor) as live:
        expected = (500, "internal", "internal error; the log of the service has the traceback")
        assert error(live.ask(PHOTO)) == expected
        assert samples(live)["gpuflow_errors_total", "internal"] == 1
        assert samples(live)["gpuflow_requests_total", "/predict", "500"] == 1
        wait(lambda: "IndexError" in caplog.text)


def test_a_closed_predictor() -> None:
    predictor = predictor_of(FakeEngine())
    predictor.close()
    with served(predictor) as live:
        assert error(live.ask(PHOTO)) == (500, "model", "the predictor is closed; load it again")
        assert live.service.occupancy.queue_length == 0


# --- loading and shutting down ----------------------------------------------------------------------------------------


def test_while_the_model_is_loaded() -> None:
    loading: Future[Predictor] = Future()
    with served(loading) as live, predictor_of(FakeEngine()) as predictor:
        assert live.get("/healthz").json() == {"status": "alive", "live": True}
        assert live.get("/").ok
        answer = live.get("/readyz")
        assert (answer.status_code, answer.json()) == (503, {"status": "loading", "ready": False})
        answer = live.ask(PHOTO)
        assert error(answer) == (503, "loading", "the model is still being loaded")
        assert answer.headers["Retry-After"] == "5"
        assert samples(live)["gpuflow_ready",] == 0
        loading.set_result(predictor)
        ready = {
            "status": "ready",
            "ready": True,
            "image": "float32 24x24x3 nchw",
            "preprocessing": predictor.preprocessing,
        }
        assert live.get("/readyz").json() == ready
        assert samples(live)["gpuflow_ready",] == 1
        assert live.ask(PHOTO).ok


def test_while_the_service_shuts_down() -> None:
    gate = Gate()
    with served(FakeEngine(before=gate)) as live, ThreadPoolExecutor(1) as pool:
        taken = pool.submit(live.ask, PHOTO)
        assert gate.reached.wait(timeout=20)
        live.service.draining = True
        answer = live.get("/readyz")
        assert (answer.status_code, answer.json()) == (503, {"status": "draining", "ready": False})
        answer = live.ask(PHOTO)
        assert error(answer) == (503, "draining", "the service is shutting down; retry later or on another server")
        assert (answer.headers["Retry-After"], answer.headers["Connection"]) == ("5", "close")
        assert live.get("/healthz").ok
        gate.open()
        assert taken.result(timeout=20).ok


# --- metrics ----------------------------------------------------------------------------------------------------------


def test_every_answer_is_counted() -> None:
    engine = FakeEngine(batch=4)
    with served(engine, RequestLimits(max_body_bytes=20_000)) as live:
        files = [jpeg(i % 3, i) for i in range(5)]
        sent = 0
        bodies = 0
        for answer in (
            live.form(*files, b"hello"),
            live.ask(PHOTO),
            live.ask(b""),
            live.ask(bytes(30_000)),
            live.ask(PHOTO, Content_Type="text/html"),
            live.ask(PHOTO, "/seen"),
            live.get("/nowhere"),
            requests.head(f"{live.url}/healthz", timeout=20),
        ):
            sent += len(answer.content)
            bodies += int(answer.request.headers.get("Content-Length", 0))
        counts = samples(live)
    requests_counted = {key[1:]: value for key, value in counts.items() if key[0] == "gpuflow_requests_total"}
    assert requests_counted == {
        ("/predict", "200"): 2,
        ("/predict", "422"): 1,
        ("/predict", "413"): 1,
        ("/predict", "415"): 1,
        ("/seen", "200"): 1,
        ("other", "404"): 1,
        ("/healthz", "200"): 1,
    }
    errors = {key[1]: value for key, value in counts.items() if key[0] == "gpuflow_errors_total" and value}
    assert errors == {"bad_image": 2, "too_large": 1, "unsupported_type": 1, "not_found": 1}
    assert counts["gpuflow_images_total",] == 6
    assert counts["gpuflow_request_seconds_count", "/predict"] == 2
    assert 0 < counts["gpuflow_request_seconds_sum", "/predict"] < 20
    assert counts["gpuflow_request_seconds_bucket", "+Inf", "/seen"] == 1
    assert counts["gpuflow_batch_size_sum",] == sum(engine.counts) == 6
    assert counts["gpuflow_batch_size_count",] == len(engine.counts)
    for size in (1, 2, 4):
        assert counts["gpuflow_batch_size_bucket", str(float(size))] == sum(n <= size for n in engine.counts)
    assert counts["gpuflow_received_bytes_total",] == bodies
    assert counts["gpuflow_sent_bytes_total",] == sent + len('{"status":"alive","live":true}')
    assert counts["gpuflow_queue_length",] == 0
    assert counts["process_resident_memory_bytes",] > 1e6


def test_pages_of_another_origin(live: Live) -> None:
    origin = "https://example.org"
    headers = {"Origin": origin, "Access-Control-Request-Method": "POST"}
    headers["Access-Control-Request-Headers"] = "authorization, content-type, x-request-timeout-ms"
    with served(FakeEngine(), cors=[origin]) as open_to_one:
        asked = requests.options(f"{open_to_one.url}/predict", headers=headers, timeout=20)
        assert (asked.status_code, asked.headers["Access-Control-Allow-Origin"]) == (200, origin)
        for body, status in ((PHOTO, 200), (b"", 422)):
            answer = open_to_one.ask(body, Origin=origin)
            assert (answer.status_code, answer.headers["Access-Control-Allow-Origin"]) == (status, origin)
        assert "Access-Control-Allow-Origin" not in open_to_one.ask(PHOTO, Origin="https://other.org").headers
        counts = samples(open_to_one)
        assert counts["gpuflow_requests_total", "/predict", "200"] == 2
        assert counts["gpuflow_requests_total", "other", "200"] == 1, "the question before the request"
        assert counts["gpuflow_request_seconds_count", "/predict"] == 2
    assert requests.options(f"{live.url}/predict", headers=headers, timeout=20).status_code == 405
    assert "Access-Control-Allow-Origin" not in live.ask(PHOTO, Origin=origin).headers


def test_pages_of_another_origin_see_why_no_route_answers() -> None:
    origin = "https://example.org"

    def asked(live: Live) -> tuple[int, str, str | None, str | None]:
        answer = live.ask(PHOTO, Origin=origin)
        allowed, exposed = (answer.headers.get(f"Access-Control-{key}") for key in ("Allow-Origin", "Expose-Headers"))
        return (*error(answer)[:2], allowed, exposed)

    seen = origin, "Retry-After, Server-Timing"
    limits, gate = RequestLimits(max_connections=1), Gate()
    with served(FakeEngine(before=gate), limits, cors=[origin]) as live, ThreadPoolExecutor(1) as pool:
        taken = pool.submit(live.ask, PHOTO)
        wait(lambda: live.service.occupancy.active == 1)
        assert asked(live) == (503, "connections", *seen)
        other = live.ask(PHOTO, Origin="https://other.org")
        assert (other.status_code, other.headers.get("Access-Control-Allow-Origin")) == (503, None)
        gate.open()
        assert taken.result(timeout=20).ok
        with socket.create_connection(("127.0.0.1", live.port), timeout=20) as client:
            lengths = "Content-Length: 0\r\nTransfer-Encoding: chunked"
            client.sendall(
                f"POST /predict HTTP/1.1\r\nHost: x\r\nOrigin: {origin}\r\n{lengths}\r\n\r\n0\r\n\r\n".encode()
            )
            status, headers, _ = answer_of(client)
        assert (status, headers["access-control-allow-origin"]) == (400, origin)
    with predictor_of(FakeEngine(), classes=("red",)) as predictor, served(predictor, cors=[origin]) as live:
        assert asked(live) == (500, "internal", *seen)


@pytest.mark.parametrize("origin", ["example.org", "https://example.org/", "https://a.org/x", "null", "https://a b"])
def test_a_value_that_is_no_origin(origin: str) -> None:
    with pytest.raises(ValueError, match="--cors") as caught:
        create_app(Future[Predictor](), cors=[origin])
    rule = "must be an origin without a path, such as https://example.org, or *"
    assert str(caught.value) == f"--cors: {rule}, got {origin!r}"


def test_the_openapi_description(live: Live) -> None:
    described: dict[str, Any] = live.get("/openapi.json").json()
    assert {path: list(methods) for path, methods in described["paths"].items()} == {
        "/predict": ["post"],
        "/seen": ["post"],
    }
    names = [parameter["name"] for parameter in described["paths"]["/predict"]["post"]["parameters"]]
    assert names == ["X-Request-Timeout-Ms", "top_k"]
    body = described["paths"]["/predict"]["post"]["requestBody"]
    assert list(body["content"]) == ["image/*", "application/octet-stream", "multipart/form-data"]


def test_the_description_names_every_status_that_the_service_gives(live: Live) -> None:
    """Collected from the code, with the 431 of h11. 404, 405 and 499 are not of a route's method, or not sent."""
    described: dict[str, Any] = live.get("/openapi.json").json()
    statuses = {
        path: {int(status) for status in methods["post"]["responses"]} for path, methods in described["paths"].items()
    }
    code = "".join(path.read_text() for path in Path(app.__file__).parent.glob("*.py"))
    given = {
        int(status)
        for status in re.findall(r"(?:Refused|_refuse)\(\s*(\d{3})|status_code=(\d{3})", code)
        for status in status
        if status
    }
    given.add(431)
    assert given >= {400, 408, 413, 415, 422, 500, 501, 503, 504}
    assert statuses == {"/predict": (given | {200}) - {501}, "/seen": given | {200}}
    for path in statuses:
        operation = described["paths"][path]["post"]
        assert "X-Request-Timeout-Ms" in [parameter["name"] for parameter in operation["parameters"]]
        assert "Retry-After" in operation["responses"]["503"]["headers"]


def test_every_route_has_metrics() -> None:
    routes = [route for route in create_app(Future[Predictor]()).routes if isinstance(route, Route)]
    paths = {re.sub("/models/model(/versions/1)?", "/models/{name}", route.path): route.methods for route in routes}
    assert sorted(paths) == sorted(limits.ROUTES)
    assert {path for path, methods in paths.items() if "POST" in (methods or ())} == set(limits.TIMED)


@pytest.mark.parametrize("value", ["3.0", "+3", "-3", " 3", "3 ", "", "1_0", "true", "1e2", "٣", "0x3", "9" * 10])
def test_a_number_of_labels_that_is_none(live: Live, value: str) -> None:
    answer = requests.post(f"{live.url}/predict", data=PHOTO, params={"top_k": value}, timeout=20)
    reason = f"top_k must be one whole number from 1 to 999999999, got {value!r}"
    assert error(answer) == (400, "bad_request", reason)


@pytest.mark.parametrize("scheme", ["http", "HTTPS"])
def test_a_target_in_absolute_form(live: Live, scheme: str) -> None:
    """As a client sends it to a proxy."""
    before = samples(live).get(("gpuflow_requests_total", "/predict", "200"), 0)
    start = f"{scheme}://example.org:80"
    lines = f"POST {start}/predict?top_k=1 HTTP/1.1\nContent-Length: {len(PHOTO)}"
    with live.connect(lines, PHOTO) as connection:
        status, _, body = answer_of(connection)
    assert (status, len(json.loads(body)["predictions"])) == (200, 1)
    assert samples(live)["gpuflow_requests_total", "/predict", "200"] == before + 1
    for target, expected in (("", 200), ("/", 200), ("/healthz", 200), ("/http://a/healthz", 404)):
        with live.connect(f"GET {start}{target} HTTP/1.1") as connection:
            assert answer_of(connection)[0] == expected, target


def test_fifty_clients_at_a_time(live: Live) -> None:
    """Good and bad requests together: each gets the same answer as alone."""
    assert live.predictor is not None
    photos = [jpeg(i % 3, i) for i in range(5)]
    expected = [live.ask(photo).json() for photo in photos]
    before = time.monotonic()

    def client(number: int) -> None:
        for turn in range(4):
            which = (number + turn) % 8
            if which < 5:
                assert live.ask(photos[which]).json() == expected[which]
            elif which == 5:
                assert live.ask(b"nothing").status_code == 422
            elif which == 6:
                assert live.ask(PHOTO, Content_Type="text/plain").status_code == 415
            else:
                answer = live.form(photos[0], b"", photos[1])
                assert [answer.json()["results"][i] for i in (0, 2)] == expected[:2]

    with ThreadPoolExecutor(50) as pool:
        list(pool.map(client, range(50)))
    assert time.monotonic() - before < 30
    assert max(live.predictor.batches) > 1, "requests share batches"
    assert (
        live.service.occupancy.active == live.service.occupancy.queue_length == live.service.occupancy.held_bytes == 0
    )


def test_libraries_that_are_not_installed(python_with_torch: Python) -> None:
    code = """
import importlib.abc, sys

class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == absent:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

absent = ""
sys.meta_path.insert(0, Absent())
import gpuflow
for absent in ("fastapi", "uvicorn"):
    try:
        import gpuflow.serve.http.server
    except gpuflow.MissingExtra as error:
        print(error)
"""
    done = python_with_torch(code)
    assert done.stdout.splitlines() == [
        f"the service needs {name}, which is not installed; pip install 'gpuflow[serve]'"
        for name in ("fastapi", "uvicorn")
    ]
