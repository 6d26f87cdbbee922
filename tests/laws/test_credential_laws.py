"""Laws of credentials in URLs: nothing that comes out holds them, of good and bad samples, in any kind of source."""

from __future__ import annotations

import json
import logging
import traceback
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

import gpuflow
from gpuflow.sources import KINDS
from tests.commands import command_here
from tests.datasets import jpeg, write_config
from tests.sources.conftest import FileServer, tar_bytes

SECRET = "S3CReT"
QUERIES = {
    "presigned": f"X-Amz-Algorithm=AWS4&X-Amz-Credential={SECRET}%2Faws4_request&X-Amz-Signature={SECRET}",
    "sas": f"sv=2024-01-01&sig={SECRET}%2B%2F%3D&se=2030-01-01T00%3A00%3A00Z",
    "token": f"id=7&token={SECRET}",
    "bare": SECRET,
}


@pytest.fixture
def server() -> Iterator[FileServer]:
    """It takes no notice of queries. The second of its images is damaged, and the third is not there."""
    running = FileServer()
    photos = {f"/photos/a/{i}.jpg": jpeg(0, i) for i in range(6)}
    photos["/photos/a/1.jpg"] = b"no image"
    members = [m for path, data in photos.items() for m in ((path[8:], data), (path[8:-3] + "cls", b"0"))]
    images = [{"id": i, "file_name": path[8:]} for i, path in enumerate(photos)]
    document = {"images": images, "annotations": [], "categories": []}
    running.files = {**photos, "/0.tar": tar_bytes(members), "/coco.json": json.dumps(document).encode()}
    running.gone = {"/photos/a/2.jpg"}
    running.tags = True

    def without_query(handler: BaseHTTPRequestHandler) -> bool:
        handler.path = urlsplit(handler.path).path
        return False

    running.outage = without_query
    yield running
    running.close()


def rows(url: str, query: str) -> str:
    return "path,label\n" + "".join(f"{url}/photos/a/{i}.jpg?{query},0\n" for i in range(6))


def source_of(kind: str, server: FileServer, tmp_path: Path) -> dict[str, Any]:
    url = server.url.replace("//", f"//user:{SECRET}@")
    listing = tmp_path / "list.csv"
    match kind.split(", "):
        case ["listing", name]:
            listing.write_text(rows(server.url, QUERIES[name]))
            return {"listing": str(listing)}
        case ["user"]:
            listing.write_text(rows(url, "id=7"))
            return {"listing": str(listing)}
        case ["remote listing"]:
            server.files["/list.csv"] = rows(url, QUERIES["sas"]).encode()
            return {"listing": f"{url}/list.csv"}
        case ["folder"]:
            return {"folder": f"{url}/photos"}
        case ["tar"]:
            return {"tar": f"{url}/0.tar?{QUERIES['presigned']}"}
        case ["coco"]:
            return {"coco": f"{url}/coco.json", "images": f"{url}/photos"}
        case ["mix"]:
            return {"mix": [{"source": {"folder": f"{url}/photos"}}]}
        case _:
            raise AssertionError(kind)


LISTINGS = [*(f"listing, {name}" for name in QUERIES), "user", "remote listing"]
BLOCKS = [*LISTINGS, *(kind for kind in KINDS if kind not in ("listing", "hf"))]
"""hf reads local files alone."""


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], str]]:
    """All that was logged and warned of."""
    with caplog.at_level(logging.INFO), warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        yield lambda: "\n".join([caplog.text, *(str(warning.message) for warning in found)])


def failing(code: int) -> Callable[[BaseHTTPRequestHandler], bool]:
    def answer(handler: BaseHTTPRequestHandler) -> bool:
        handler.send_error(code)
        return True

    return answer


@pytest.mark.parametrize(
    ("kind", "cached"), [*((kind, False) for kind in BLOCKS), ("listing, sas", True), ("tar", True), ("mix", True)]
)
def test_a_loader_says_no_credentials(
    server: FileServer, kind: str, cached: bool, tmp_path: Path, said: Callable[[], str]
) -> None:
    source = source_of(kind, server, tmp_path)
    if cached:
        block = source["mix"][0]["source"] if kind == "mix" else source
        block["cache"] = {"dir": str(tmp_path / "cache"), "size": "16MiB"}
    bad = tmp_path / "bad.jsonl"
    run = {"bad_file": str(bad), "timeout_s": 2.0}
    file = write_config(tmp_path / "x.yaml", "", source=source, run=run)
    out = []
    with gpuflow.load(file, "val", device="cpu") as loader:
        assert sum(len(batch.indices) for batch in loader) in (4, 5), "of shards one image is damaged, none is missing"
        out += [repr(loader.stats()), repr(loader.state_dict()), bad.read_text()]
        out += [loader.dataset.path(i) for i in range(6)]
        for code in (503, 403):
            server.outage = failing(code)
            out.append(raised(lambda: list(loader)))
    for code in (503, 403, 200):
        server.outage = failing(code) if code != 200 else lambda handler: False
        # a server that fails is waited for, by every policy for bad samples
        for overrides in ([],) if code == 503 else ([], ["run.on_error=raise"], ["run.max_bad=0"]):
            out.append(raised(partial(everything, file, overrides)))
    text = "\n".join([*out, said()])
    assert SECRET not in text
    assert server.url.partition("//")[2] in text


def everything(file: Path, overrides: list[str]) -> None:
    with gpuflow.load(file, "val", device="cpu", overrides=overrides) as loader:
        list(loader)


def raised(work: Callable[[], object]) -> str:
    """The error with its causes, as Python prints it; nothing where there is none."""
    try:
        work()
    except Exception as error:
        return "".join(traceback.format_exception(error, limit=0))
    return ""


@pytest.mark.parametrize("kind", ["listing, presigned", "folder", "tar"])
def test_the_commands_say_no_credentials(
    server: FileServer,
    kind: str,
    tmp_path: Path,
    said: Callable[[], str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    server.files["/photos/a/1.jpg"] = jpeg(0, 1)
    server.gone = set()
    file = write_config(tmp_path / "x.yaml", "", source=source_of(kind, server, tmp_path), run={"timeout_s": 4.0})
    before = set(tmp_path.rglob("*"))
    run = command_here(monkeypatch, capsys)
    done = [
        run(*command)
        for command in (
            ["check", file],
            ["explain", file],
            ["scan", file],
            ["show", file, "--count", 2, "--out", tmp_path / "show.html"],
            ["parity", file, "--images", 2],
            ["doctor", file],
            ["check", file, "source.seed=-1"],
            ["explain", file, f"source.folder=http://u:{SECRET}@127.0.0.1:1/?sig={SECRET}"],
        )
    ]
    written = [path.read_text(errors="replace") for path in set(tmp_path.rglob("*")) - before if path.is_file()]
    text = "\n".join([said(), *written, *(f"{one.out}{one.err}" for one in done)])
    assert server.url.partition("//")[2] in text
    assert SECRET not in text


@pytest.mark.parametrize(
    "url",
    [
        f"https://user:{SECRET}@host/a.jpg",
        f"https://{SECRET}@host/a.jpg",
        f"https://user:x@{SECRET}@host/a.jpg",
        f"https://user:{SECRET}/x@host/a.jpg",
        f"https://user:{SECRET}?x@host/a.jpg",
        f"ftp://user:{SECRET}@host:21/a.jpg",
        *(f"https://host/a.jpg?{query}" for query in QUERIES.values()),
        *(f"https://host/it's a 'b'.jpg?{query}" for name, query in QUERIES.items() if name != "bare"),
        f"https://host/a.jpg#access_token={SECRET}",
        f"https://host/a;jsessionid={SECRET}?x=1",
        f"https://host/a.jpg?url=https://user:{SECRET}@host/b.jpg",
    ],
)
@pytest.mark.parametrize("form", ["{}", "{}: no such file", "cannot read '{}'; check it", "({}), or <{}>.", "[{!r}]"])
def test_no_text_of_a_url_has_its_credentials(url: str, form: str) -> None:
    errors = [
        gpuflow.SourceError(form.format(url, url)),
        gpuflow.BadSampleError("read", form.format(url, url), index=3, path=url),
        gpuflow.ConfigError([gpuflow.errors.Problem("x.yaml:", "must be a folder", url, form.format(url, url))]),
        gpuflow.errors.SystemFault(24, form.format(url, url), url),
        gpuflow.errors.LoaderTimeout(form.format(url, url), [url]),
    ]
    for error in errors:
        known = [str(error), repr(error), *map(str, error.args), *map(str, vars(error).values())]
        assert not any(SECRET in text for text in known if not text.startswith("(Problem("))
        assert "host" in str(error)
