"""Damaged and hostile input of every kind that gpuflow reads: only its own exceptions, in bounded time and memory.

A target takes a random generator and a folder, makes one input, and feeds it. It raises only if it found something.
"""

from __future__ import annotations

import asyncio
import base64
import json
import random
import resource
import struct
import tarfile
import time
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import yaml

import gpuflow
from gpuflow.config import read_config
from gpuflow.errors import BadSampleError, ConfigError, ServerFault, SourceError, StateError
from gpuflow.serve.http.app import RequestLimits, create_app
from gpuflow.serve.predictor import Predictor
from gpuflow.sources import SourceSpec, open_source, source_spec
from gpuflow.sources.storage import time_limit
from gpuflow.stages import STAGES, Decode, Resize
from tests.chaos.accounting import Report
from tests.damaged import pool
from tests.datasets import RAW, TRAIN, VAL, jpeg, make_photos, write_config
from tests.running import program_of, run
from tests.serve.fakes import FakeEngine
from tests.serve.services import predictor_of
from tests.sources.conftest import tar_bytes

CPU_SECONDS = 10.0
"""The most processor time for one input. The slowest takes a tenth of a second."""
GROWTH_KIB = 600_000
"""The most memory for all inputs of a target together."""

Target = Callable[[random.Random, Path], None]


def fuzz(name: str, seed: int, directory: Path, count: int = 0) -> Report:
    """Feed a target with `count` inputs, by default as many as CI does. Names the input that found something."""
    target, usual = TARGETS[name]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    slowest = 0.0
    for number in range(count or usual):
        start = time.process_time()
        try:
            target(random.Random(f"{name} {seed} {number}"), directory)
        except Exception as error:
            error.add_note(f"target {name}, seed {seed}, input {number}")
            raise
        slowest = max(slowest, time.process_time() - start)
        assert slowest < CPU_SECONDS, f"target {name}, seed {seed}, input {number} took {slowest:.1f} s"
    growth = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert growth < GROWTH_KIB, f"target {name}, seed {seed} took {growth / 1024:.0f} MiB"
    return {"inputs": float(count or usual), "slowest_s": slowest, "growth_mb": growth * 1024 / 1e6}


# --- making inputs ----------------------------------------------------------------------------------------------------


def mutated(rng: random.Random, data: bytes, words: Sequence[bytes] = (), *, within: int | None = None) -> bytes:
    """A few random changes of bytes: bits, numbers, insertions, deletions, repetitions, words of the format."""
    found = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4, 8))):
        end = min(len(found), within or len(found))
        at = rng.randrange(end + 1)
        size = min(rng.choice((1, 1, 2, 4, 16, 200)), end - at)
        match rng.randrange(7):
            case 0 if at < end:
                found[at] ^= 1 << rng.randrange(8)
            case 1 if size:
                found[at : at + size] = rng.choice((bytes(size), b"\xff" * size, rng.randbytes(size)))
            case 2:
                del found[at : at + size]
            case 3:
                found[at:at] = found[at : at + size] * rng.choice((1, 3, 50))
            case 4 if words:
                found[at : at + size] = rng.choice(words)
            case 5 if at + 4 <= end:
                order = rng.choice("<>")
                number = rng.choice((0, 1, 0x7FFF, 0xFFFF, 1 << 20, (1 << 31) - 1, 1 << 31, (1 << 32) - 1))
                found[at : at + 4] = struct.pack(f"{order}I", number)
            case 6:
                del found[at:]
            case _:
                pass  # a change that needs more bytes than there are
    return bytes(found)


# --- headers ----------------------------------------------------------------------------------------------------------


@cache
def _decoding() -> Any:
    return program_of(Decode(max_pixels=1_000_000), Resize(height=24, width=24))


_MARKERS = [bytes((0xFF, marker)) for marker in (0xC0, 0xC2, 0xC4, 0xD8, 0xD9, 0xDA, 0xDB, 0xDD, 0xE1, 0xFE)]
_IMAGE_WORDS = (
    *_MARKERS,
    b"IHDR",
    b"IDAT",
    b"IEND",
    b"acTL",
    b"eXIf",
    b"RIFF",
    b"WEBP",
    b"VP8 ",
    b"VP8L",
    b"VP8X",
    b"BM",
)


def headers(rng: random.Random, directory: Path) -> None:
    """Images of every format, damaged mostly near their start: pixels or a BadSampleError, and the next one as ever."""
    data = rng.choice(pool())
    damaged = mutated(rng, data, _IMAGE_WORDS, within=rng.choice((64, 700, None)))
    _, faults = run(_decoding(), [damaged])
    assert faults[0] is None or isinstance(faults[0], BadSampleError)


# --- tars -------------------------------------------------------------------------------------------------------------


def tars(rng: random.Random, directory: Path) -> None:
    """Tar files with damaged headers, their checksums mended or not: indexed and read, or a SourceError."""
    names = rng.choice(
        (("0.jpg", "0.cls", "1.jpg", "1.cls"), ("a/0.jpg", "a/0.json"), (f"{'n' * 150}.jpg", f"{'n' * 150}.cls"))
    )
    content = {"jpg": jpeg(0, 0), "cls": b"1", "json": b'{"label": 2}'}
    form = rng.randrange(3) if len(names[0]) < 100 else rng.choice((tarfile.GNU_FORMAT, tarfile.PAX_FORMAT))
    data = tar_bytes([(name, content[name.rpartition(".")[2]]) for name in names], form=form)
    found = bytearray(mutated(rng, data, (b"\0" * 512, b"ustar", b"7777777", b"-1", b"\x80", b"\xff" * 12)))
    for at in range(0, len(found) - 511, 512):
        if rng.random() < 0.8 and any(found[at : at + 100]):
            if rng.random() < 0.2:
                found[at + 124 : at + 136] = rng.choice(
                    (b"-0000000001\0", b"77777777777\0", b"\xff" * 12, b"\x80" + bytes(11))
                )
            if rng.random() < 0.1:
                found[at + 156] = rng.choice(b"0123456789xgLKSV\0")
            found[at + 148 : at + 156] = b" " * 8
            found[at + 148 : at + 156] = b"%06o\0 " % sum(found[at : at + 512])
    path = directory / f"{rng.getrandbits(64):x}.tar"
    path.write_bytes(found)
    try:
        _read_all(source_spec(tar=str(path)))
    finally:
        path.unlink()


def _read_all(spec: SourceSpec) -> None:
    """Index a source, or get a SourceError; then read all of it, or get a ServerFault of a server that is away."""
    try:
        with time_limit(1.0):
            source = open_source(spec)
    except (SourceError, ConfigError):
        return
    try:
        assert len(source) == len(source.labels) > 0
        assert 0 <= int(source.labels.min()) <= int(source.labels.max()) < len(source.classes)
        for index in range(min(len(source), 8)):
            try:
                payload = source.read([index], lambda size: np.empty(size, np.uint8))
            except ServerFault:
                assert source.path(index).startswith("http://127.0.0.1:1/")
                continue
            assert payload.errors[0] is None or isinstance(payload.errors[0], str)
            assert isinstance(source.path(index), str)
    finally:
        source.close()


# --- listings ---------------------------------------------------------------------------------------------------------

_CSV_WORDS = (
    b'"',
    b",",
    b"\n",
    b"\r",
    b"\0",
    b"\xef\xbb\xbf",
    b"\xff",
    b"-1",
    b"1_0",
    b"\xd9\xa1",
    b"99999999999999999999",
)
_CSV_ROWS = (
    b"path,label",
    b"a.jpg,0",
    b"b.jpg,1",
    b'"c,d.jpg",2',
    b"e.jpg,dog",
    b"http://127.0.0.1:1/x.jpg,0",
    b"",
    b",",
)
_JSON_ROWS = (b'{"path": "a.jpg", "label": 0}', b'{"path": "b.jpg", "label": "dog"}', b"[]", b'{"path": 1}', b"{", b"")


def listings(rng: random.Random, directory: Path) -> None:
    """CSV and JSON-lines files of damaged rows: indexed and read, or a SourceError."""
    suffix = rng.choice((".csv", ".jsonl"))
    known = _CSV_ROWS if suffix == ".csv" else _JSON_ROWS
    rows = [rng.choice(known[:5]) for _ in range(rng.randint(0, 6))]
    data = b"\n".join(rows) + b"\n"
    path = directory / f"{rng.getrandbits(64):x}{suffix}"
    path.write_bytes(mutated(rng, data, (*_CSV_WORDS, *known)) if rng.random() < 0.9 else data)
    try:
        _read_all(source_spec(listing=str(path), classes=rng.choice((None, None, 3))))
    finally:
        path.unlink()


# --- YAML -------------------------------------------------------------------------------------------------------------

_YAML_WORDS = (
    *(
        b"&a ",
        b"*a",
        b"<<: ",
        b"!!python/object/apply:os.system [x]",
        b"!!binary x",
        b"? ",
        b"- ",
        b"{",
        b"}",
        b"[",
        b"]",
    ),
    *(b": ", b"|\n", b"\t", b"~", b"-1", b"1e999", b".nan", b"0x10", b"2001-01-01", b"yes", b"''", b"\0", b"---\n"),
    *("\u2028".encode(), b"%YAML 1.1\n---\n"),
)


def configurations(rng: random.Random, directory: Path) -> None:
    """YAML files and overrides, damaged in their text or in their values: a configuration or a ConfigError."""
    stages = rng.choice((TRAIN, VAL, RAW))
    path = write_config(directory / f"{rng.getrandbits(64):x}.yaml", directory, train=stages, fit={"epochs": 2}, run={})
    overrides = []
    if rng.random() < 0.5:
        path.write_bytes(mutated(rng, path.read_bytes(), _YAML_WORDS))
    else:
        document = yaml.safe_load(path.read_text())
        for _ in range(rng.randint(1, 3)):
            document = _altered(rng, document)
        path.write_text(yaml.safe_dump(document))
    if rng.random() < 0.3:
        keys = (
            "run.threads",
            "pipelines.train.stages.resize.shorter",
            "pipelines.train.stages[1]",
            "source",
            "a..b",
            "",
        )
        overrides = [f"{rng.choice(keys)}={rng.choice(_YAML_WORDS).decode()}"]
    try:
        read_config(path, STAGES, overrides)
    except ConfigError as refused:
        if not refused.problems:
            raise AssertionError("an error of a configuration names no problem") from refused
    finally:
        path.unlink()


_VALUES: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    10**30,
    1.5,
    float("inf"),
    float("nan"),
    "",
    "x",
    "\0",
    [],
    {},
    [[[]]],
    {"": 1},
)


def _altered(rng: random.Random, value: Any) -> Any:
    """The same JSON value with one part replaced, removed or added."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(list(value))
        match rng.randrange(8):
            case 0:
                return {name: item for name, item in value.items() if name != key}
            case 1:
                return {**value, rng.choice(("x", "", 1, "size")): rng.choice(_VALUES)}
            case _:
                return {**value, key: _altered(rng, value[key])}
    if isinstance(value, list) and value and rng.random() < 0.8:
        at = rng.randrange(len(value))
        return [*value[:at], _altered(rng, value[at]), *value[at + 1 :]]
    return rng.choice(_VALUES)


# --- states -----------------------------------------------------------------------------------------------------------


@cache
def _loader(directory: Path) -> gpuflow.Loader:
    """One for all inputs; what a refused state does to it shows in the next ones."""
    make_photos(directory / "photos", classes=3, each=3)
    return gpuflow.load(write_config(directory / "states.yaml", directory / "photos"), rank=0, world_size=1)


def states(rng: random.Random, directory: Path) -> None:
    """States with altered values: a StateError that changes nothing, or a place from which the loader goes on."""
    loader = _loader(directory)
    loader.load_state_dict(loader.state_dict())
    loader.set_epoch(rng.randrange(3))
    before = loader.state_dict()
    altered = json.loads(json.dumps({**before, "position": rng.choice((0, 4, 9))}))
    for _ in range(rng.randint(1, 3)):
        altered = _altered(rng, altered)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a state that says nothing of the files
            loader.load_state_dict(altered)
    except StateError:
        assert loader.state_dict() == before
        return
    epoch, position = (loader.state_dict()[key] for key in ("epoch", "position"))
    assert isinstance(epoch, int) and isinstance(position, int)
    assert epoch >= 0 and 0 <= position <= 9
    came = [int(index) for batch in loader for index in batch.indices]
    assert len(came) == len(set(came)) == 9 - position


# --- forms ------------------------------------------------------------------------------------------------------------


@cache
def _app() -> tuple[Any, Predictor]:
    predictor = predictor_of(FakeEngine())
    return create_app(predictor, RequestLimits(max_body_bytes=200_000, max_images=4, timeout_s=60)), predictor


_FORM_WORDS = (
    b"\r\n",
    b"--",
    b"--b",
    b"--b--",
    b"\r\n\r\n",
    b";",
    b'"',
    b"filename=",
    b"filename*=UTF-8''x",
    b"\0",
    b"name=",
)


def forms(rng: random.Random, directory: Path) -> None:
    """Bodies of forms and their headers, in any pieces: an answer, never a 500."""
    part = b'--b\r\nContent-Disposition: form-data; name="f"; filename="1.jpg"\r\nContent-Type: image/jpeg\r\n\r\n'
    body = b"".join(part + jpeg(0, 0) + b"\r\n" for _ in range(rng.randint(0, 5))) + b"--b--\r\n"
    kind = b"multipart/form-data; boundary=b"
    body = mutated(rng, body, _FORM_WORDS, within=rng.choice((150, None)))
    if rng.random() < 0.3:
        kind = (
            mutated(rng, kind, (b"boundary=", b";", b'"', b"=", b"boundary=" + b"b" * 300))
            .replace(b"\n", b"")
            .replace(b"\r", b"")
        )
    pieces = []
    while body:
        size = rng.choice((1, 7, 100, 5000, len(body)))
        pieces.append(body[:size])
        body = body[size:]
    status, answer = asyncio.run(_request(_app()[0], kind, pieces))
    assert status in (200, 400, 413, 415, 422), f"{status}: {answer!r}"
    assert isinstance(json.loads(answer), dict)


_TENSOR_WORDS = (
    b'"shape":[2,1]',
    b'"data":[]',
    b"[",
    b"{",
    b"}",
    b",",
    b'"',
    b"null",
    b"1e400",
    b"-1",
    b"\\ud800",
    b"\0" * 4,
)


def tensors(rng: random.Random, directory: Path) -> None:
    """Requests of the Open Inference Protocol, and lengths of their JSON: an answer, never a 500."""
    images = [jpeg(0, 0)] * rng.randint(1, 5)
    tensor = b"".join(len(data).to_bytes(4, "little") + data for data in images)
    given: dict[str, Any] = {"parameters": {"binary_data_size": len(tensor)}}
    if rng.random() < 0.5:
        tensor, given = b"", {"data": [base64.b64encode(data).decode() for data in images]}
    image = {"name": "image", "datatype": "BYTES", "shape": [len(images)], **given}
    outputs = [{"name": name, "parameters": {"binary_data": rng.random() < 0.5}} for name in ("logits", "labels")]
    text = json.dumps({"id": "1", "inputs": [image], "outputs": outputs, "parameters": {"timeout": 30_000_000}})
    body = mutated(rng, text.encode() + tensor, _TENSOR_WORDS, within=rng.choice((300, None)))
    length = rng.choice((len(text), len(text), 0, len(body), len(body) + 1, 10**17, rng.randrange(len(text))))
    header = (b"inference-header-content-length", str(length).encode())
    status, answer = asyncio.run(_request(_app()[0], b"", [body], path="/v2/models/model/infer", more=(header,)))
    assert status in (200, 400, 413), f"{status}: {answer!r}"
    if status != 200:
        assert isinstance(json.loads(answer)["error"], str)


async def _request(
    app: Any, kind: bytes, pieces: list[bytes], *, path: str = "/predict", more: Sequence[tuple[bytes, bytes]] = ()
) -> tuple[int, bytes]:
    """POST to an ASGI application: the status and the body of its answer."""
    left, ended = iter(pieces), asyncio.Event()
    status, answer, over = 0, b"", False

    async def receive() -> dict[str, Any]:
        nonlocal over
        if over:
            await ended.wait()
            return {"type": "http.disconnect"}
        piece = next(left, None)
        over = piece is None
        return {"type": "http.request", "body": piece or b"", "more_body": not over}

    async def send(message: dict[str, Any]) -> None:
        nonlocal status, answer
        status, answer = message.get("status", status), answer + message.get("body", b"")

    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(b"host", b"x"), (b"content-type", kind), (b"transfer-encoding", b"chunked"), *more],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 2),
    }
    await app(scope, receive, send)
    ended.set()
    return status, answer


TARGETS: dict[str, tuple[Target, int]] = {
    "headers": (headers, 1500),
    "tars": (tars, 400),
    "listings": (listings, 400),
    "configurations": (configurations, 300),
    "states": (states, 60),
    "forms": (forms, 300),
    "tensors": (tensors, 300),
}
"""Each target, and how many inputs CI gives it."""
