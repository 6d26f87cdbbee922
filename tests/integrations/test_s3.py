"""Sources on S3, against a real server on this machine: moto's, through s3fs and botocore."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tarfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import fsspec
import numpy as np
import pytest

import gpuflow
from gpuflow.errors import SourceError
from gpuflow.sources import Source, SourceSpec, open_source, source_spec
from gpuflow.sources.storage import CachedStorage
from tests.datasets import epoch_rows, jpeg, write_config

s3fs = pytest.importorskip("s3fs", reason="needs s3fs, which is not installed")
moto = pytest.importorskip("moto.server", reason="needs moto[server], which is not installed")

ROOT = Path(__file__).parents[2]
SAMPLES = 12
PHOTOS = {f"photos/{'ab'[i % 2]}/{i:02}.jpg": jpeg(i % 2, i) for i in range(SAMPLES)}


def shard(first: int) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        for i in range(first, first + 6):
            for name, data in ((f"{i}.jpg", jpeg(i % 2, i)), (f"{i}.cls", str(i % 2).encode())):
                header = tarfile.TarInfo(name)
                header.size = len(data)
                archive.addfile(header, io.BytesIO(data))
    return stream.getvalue()


FILES = {**PHOTOS, "0.tar": shard(0), "1.tar": shard(6)}


class Bucket:
    """A bucket of moto's server. `failures[key]` answers to a GET of an object are `status`; `requests` counts them."""

    def __init__(self, application: Callable[..., Any]) -> None:
        self._application = application
        self.failures: dict[str, int] = {}
        self.status = "500 Internal Server Error"
        self.requests: Counter[str] = Counter()
        self._lock = threading.Lock()

    def serve(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Any:
        key = environ["PATH_INFO"].removeprefix("/data/")
        with self._lock:
            if environ["REQUEST_METHOD"] == "GET":
                self.requests[key] += 1
                if self.failures.get(key, 0) > 0:
                    self.failures[key] -= 1
                    start_response(self.status, [("Content-Length", "0")])
                    return [b""]
        return self._application(environ, start_response)


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Bucket]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    running = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    running.start()
    host, port = running.get_host_and_port()
    serving = running._server
    watched = Bucket(serving.app)
    serving.app = watched.serve
    options = {"endpoint_url": f"http://{host}:{port}", "key": "k", "secret": "s"}
    monkeypatch.setitem(fsspec.config.conf, "s3", options)
    s3fs.S3FileSystem.clear_instance_cache()
    urlopen(Request(f"{options['endpoint_url']}/moto-api/reset", method="POST"), timeout=60).close()
    system = fsspec.filesystem("s3")
    system.mkdir("data")
    system.pipe({f"data/{name}": data for name, data in FILES.items()})
    watched.requests.clear()
    yield watched
    s3fs.S3FileSystem.clear_instance_cache()
    running.stop()


def read_all(source: Source) -> list[bytes | str]:
    payload = source.read(range(len(source)), lambda size: np.zeros(size, np.uint8))
    return [error or payload.sample(i).tobytes() for i, error in enumerate(payload.errors)]


KINDS: dict[str, dict[str, Any]] = {"folder": {"folder": "s3://data/photos"}, "tar": {"tar": "s3://data/{0..1}.tar"}}
EXPECTED = {
    "folder": [PHOTOS[name] for name in sorted(PHOTOS)],
    "tar": [jpeg(i % 2, i) for i in range(SAMPLES)],
}
kinds = pytest.mark.parametrize("kind", list(KINDS))


@kinds
def test_what_is_read(bucket: Bucket, kind: str) -> None:
    source = open_source(source_spec(**KINDS[kind]))
    assert len(source) == SAMPLES
    assert source.labels.tolist() == ([0] * 6 + [1] * 6 if kind == "folder" else [0, 1] * 6)
    assert read_all(source) == EXPECTED[kind]


@kinds
def test_batches_are_those_of_local_files(bucket: Bucket, tmp_path: Path, kind: str) -> None:
    for name, data in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(data)
    here = {key: value.replace("s3://data", str(tmp_path)) for key, value in KINDS[kind].items()}
    cache = {"dir": str(tmp_path / "cache"), "size": "16MiB"}
    local = write_config(tmp_path / "local.yaml", "", source=here)
    with gpuflow.load(local, "train", device="cpu") as loader:
        expected = [epoch_rows(loader) for _ in range(2)]
    for more in ({}, {"cache": cache}, {"cache": cache}):
        path = write_config(tmp_path / "s3.yaml", "", source={**KINDS[kind], **more})
        with gpuflow.load(path, "train", device="cpu") as loader:
            assert [epoch_rows(loader) for _ in range(2)] == expected


@kinds
def test_what_is_in_the_cache_is_not_asked_for(bucket: Bucket, tmp_path: Path, kind: str) -> None:
    spec = source_spec(**KINDS[kind], cache={"dir": str(tmp_path / "cache"), "size": 16 << 20})
    assert read_all(open_source(spec)) == EXPECTED[kind]
    source = open_source(spec)
    assert read_all(source) == EXPECTED[kind]
    assert isinstance(source.storage, CachedStorage)
    assert source.storage.counts()["downloaded_bytes"] == 0
    objects = {name: count for name, count in bucket.requests.items() if name.endswith((".jpg", ".tar"))}
    assert objects == dict.fromkeys(PHOTOS if kind == "folder" else ["0.tar", "1.tar"], 1)


@kinds
def test_an_object_that_was_written_again(bucket: Bucket, tmp_path: Path, kind: str) -> None:
    spec = source_spec(**KINDS[kind], cache={"dir": str(tmp_path / "cache"), "size": 16 << 20})
    assert read_all(open_source(spec)) == EXPECTED[kind]
    system = fsspec.filesystem("s3")
    system.pipe({"data/photos/a/00.jpg": jpeg(0, 77), "data/0.tar": shard(0).replace(jpeg(0, 0), jpeg(0, 0)[::-1])})
    found = read_all(open_source(spec))
    assert found[0] == (jpeg(0, 77) if kind == "folder" else jpeg(0, 0)[::-1])
    assert found[1:] == EXPECTED[kind][1:]


@kinds
@pytest.mark.parametrize("status", ["500 Internal Server Error", "503 Slow Down"])
def test_a_server_that_fails_for_a_while(bucket: Bucket, kind: str, status: str) -> None:
    source = open_source(source_spec(**KINDS[kind]))
    bucket.status = status
    bucket.failures.update({"photos/a/02.jpg": 2, "0.tar": 2})
    assert read_all(source) == EXPECTED[kind]
    assert bucket.failures == {"photos/a/02.jpg": 0 if kind == "folder" else 2, "0.tar": 0 if kind == "tar" else 2}


@pytest.mark.parametrize("cached", [False, True])
def test_objects_that_cannot_be_read_are_errors_of_their_own(bucket: Bucket, tmp_path: Path, cached: bool) -> None:
    cache = {"dir": str(tmp_path / "cache"), "size": 16 << 20} if cached else None
    source = open_source(source_spec(folder="s3://data/photos", cache=cache))
    fsspec.filesystem("s3").rm("data/photos/a/04.jpg")
    bucket.status = "403 Forbidden"
    bucket.failures["photos/b/03.jpg"] = 1000
    found = read_all(source)
    assert found[2] == "no such file"
    assert found[7] == "PermissionError: Forbidden"
    assert bucket.failures["photos/b/03.jpg"] == 999, "it is not asked for again"
    assert [answer for i, answer in enumerate(found) if i not in (2, 7)] == [
        data for i, data in enumerate(EXPECTED["folder"]) if i not in (2, 7)
    ]


def refused(spec: SourceSpec) -> str:
    with pytest.raises(SourceError) as caught:
        open_source(spec)
    return str(caught.value)


def test_what_is_not_there(bucket: Bucket) -> None:
    assert refused(source_spec(folder="s3://data/none")) == (
        "s3://data/none: must hold one directory per class, got none (0 files); check the address"
    )
    assert refused(source_spec(tar="s3://data/{0..2}.tar")) == (
        "s3://data/2.tar: no such file (1 of 3 shards cannot be read); check source.tar"
    )
    assert refused(source_spec(listing="s3://elsewhere/list.csv")) == (
        "s3://elsewhere/list.csv: no such file; check the address"
    )


def test_without_credentials(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    endpoint = fsspec.config.conf["s3"]["endpoint_url"]
    fsspec.filesystem("s3").chmod("data/0.tar", "public-read")
    monkeypatch.setitem(fsspec.config.conf, "s3", {"endpoint_url": endpoint})
    message = refused(source_spec(tar="s3://data/0.tar"))
    assert message.startswith("s3://data/0.tar: NoCredentialsError: Unable to locate credentials")
    monkeypatch.setitem(fsspec.config.conf, "s3", {"endpoint_url": endpoint, "anon": True})
    assert len(open_source(source_spec(tar="s3://data/0.tar"))) == 6


@pytest.mark.parametrize(
    "names",
    [
        ("AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"),
        ("FSSPEC_S3_ENDPOINT_URL", "FSSPEC_S3_KEY", "FSSPEC_S3_SECRET"),
    ],
)
def test_the_environment_names_the_server_and_the_key(bucket: Bucket, names: tuple[str, ...]) -> None:
    script = """
from gpuflow.sources import SourceSpec, open_source, source_spec
print(len(open_source(source_spec(folder="s3://data/photos"))))
"""
    values = dict(zip(names, (fsspec.config.conf["s3"]["endpoint_url"], "k", "s"), strict=True))
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, env=os.environ | values, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.stdout == f"{SAMPLES}\n", done.stderr
