"""`--on ray` on a cluster of two nodes of this machine: rows and answers are those of the commands without Ray."""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import requests
import torch

from gpuflow.config import Config, read_config
from gpuflow.errors import ConfigError, LoaderError
from gpuflow.runtime.threads import DaemonPool
from gpuflow.serve.http.limits import RequestLimits
from gpuflow.stages import STAGES
from gpuflow.tools.predict import Row, RowPredictor, write_predictions
from tests.datasets import make_photos
from tests.serve.models import save_program
from tests.tools.test_predict import BATCH, Colours, contents, make_setup

pytest.importorskip("ray.serve", reason="ray is not installed")

from gpuflow.integrations import ray as on_ray

pytestmark = pytest.mark.ray

SECONDS = 240.0


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_setup(tmp_path_factory.mktemp("ray"))


def predicted(
    config: Path, out: Path, *overrides: str, on_part: Callable[[], None] = lambda: None, **options: Any
) -> int:
    """Write predictions by actors, calling a function after each part; returns how many rows were new."""
    with closing(RowPredictor(config, overrides, device="cpu")) as predictor:
        there = {"path": config, "overrides": overrides, "device": "cpu", **options}

        def parts_there(parts: Sequence[range]) -> Iterator[tuple[range, list[Row]]]:
            for part in on_ray.predict_parts(predictor, there, parts):
                yield part
                on_part()

        write_predictions(predictor, out, form="csv", part_rows=BATCH, predict_parts=parts_there)
        return predictor.done


@pytest.fixture(scope="module")
def expected(config: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of a run without Ray."""
    out = tmp_path_factory.mktemp("expected")
    with closing(RowPredictor(config, device="cpu")) as predictor:
        write_predictions(predictor, out, form="csv", part_rows=BATCH)
    return contents(out)


# --- predict ----------------------------------------------------------------------------------------------------------


def test_the_command_writes_the_files_of_one_without_ray(cluster: Any, config: Path, tmp_path: Path) -> None:
    def run(out: str, *more: str) -> str:
        command = ["predict", "x.yaml", "source.folder=photos", "--out", str(tmp_path / out), "--format", "csv", *more]
        done = subprocess.run(
            [sys.executable, "-m", "gpuflow", *command],
            cwd=config.parent,
            timeout=SECONDS,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert run("there", "--on", "ray", cluster.address) == f"wrote 19 rows to {tmp_path}/there, 2 of bad samples\n"
    assert run("here") == f"wrote 19 rows to {tmp_path}/here, 2 of bad samples\n"
    assert contents(tmp_path / "there") == contents(tmp_path / "here")
    assert run("there", "--on", "ray", cluster.address) == f"nothing left to predict: {tmp_path}/there has all rows\n"


def kill_once(flag: str, **progress: Any) -> None:
    """End the process of an actor, the first one that gets here."""
    try:
        os.close(os.open(flag, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return
    os.kill(os.getpid(), signal.SIGKILL)


def test_after_a_killed_worker_each_sample_has_one_row(
    cluster: Any, config: Path, expected: dict[str, bytes], tmp_path: Path
) -> None:
    flag = tmp_path / "killed"
    assert predicted(config, tmp_path / "out", progress=partial(kill_once, str(flag))) == 19
    assert flag.exists()
    assert contents(tmp_path / "out") == expected
    assert predicted(config, tmp_path / "out") == 0


def kill_always(**progress: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_part_that_ends_its_process_each_time_is_given_up(cluster: Any, config: Path, tmp_path: Path) -> None:
    with pytest.raises(LoaderError, match=r"^samples \d+ to \d+ ended their process 6 times; "):
        predicted(config, tmp_path / "out", progress=kill_always)


def note_node(folder: str, **progress: Any) -> None:
    """Write down that an actor of this node works, slowly."""
    import ray

    Path(folder, ray.get_runtime_context().get_node_id()).touch()
    time.sleep(0.5)


def test_after_a_lost_node_each_sample_has_one_row(cluster: Any, scripts: Any, tmp_path: Path) -> None:
    config, nodes = make_setup(tmp_path), tmp_path / "nodes"
    make_photos(tmp_path / "photos", classes=4, each=30)
    nodes.mkdir()
    with closing(RowPredictor(config, device="cpu")) as predictor:
        write_predictions(predictor, tmp_path / "here", form="csv", part_rows=BATCH)
    lost: list[str] = []
    with scripts.launch.second_node(cluster) as node:

        def lose() -> None:
            if not lost and len([*nodes.iterdir()]) == 2:
                cluster.remove_node(node, allow_graceful=False)
                lost.append(node.node_id)

        assert predicted(config, tmp_path / "out", on_part=lose, progress=partial(note_node, str(nodes))) == 120
    assert lost
    assert contents(tmp_path / "out") == contents(tmp_path / "here")


def test_nodes_that_differ_are_named(cluster: Any, config: Path, tmp_path: Path) -> None:
    place = r"^node [\d.]+: "
    everywhere = r"; every node needs the same gpuflow, and the file, the model and the images at the same path"
    with pytest.raises(LoaderError, match=rf"{place}ConfigError: .*nothing\.yaml: no such file.*{everywhere}"):
        predicted(config, tmp_path / "a", path=tmp_path / "nothing.yaml")
    data = str(config.parent / "photos" / "class_0")
    with pytest.raises(LoaderError, match=rf"{place}LoaderError: has source \w+ of 5 samples in place of source "):
        predicted(config, tmp_path / "b", data=data)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(on_ray, "__version__", "9.9")
        with pytest.raises(LoaderError, match=rf"{place}LoaderError: has gpuflow \S+ in place of gpuflow 9\.9"):
            predicted(config, tmp_path / "c")
    assert not [*tmp_path.glob("*/part*")]


def test_a_cluster_that_is_not_there() -> None:
    rule = r"--on ray: must name a cluster that can be reached: .*, got '127\.0\.0\.1:1'; start it with "
    with pytest.raises(ConfigError, match=rule), on_ray.connected("127.0.0.1:1"):
        pass


# --- a cluster without room -------------------------------------------------------------------------------------------


@contextmanager
def all_taken() -> Iterator[Callable[[], None]]:
    """Takes the only core of the cluster; gives what frees it."""
    import ray

    class Taken:
        def begin(self) -> None:
            """Return once this has the core."""

    taken: Any = ray.remote(num_cpus=1)(Taken).remote()
    ray.get(taken.begin.remote(), timeout=SECONDS)
    try:
        yield lambda: ray.kill(taken)
    finally:
        ray.kill(taken)


class CallOnce(logging.Handler):
    """Calls a function at the first line of a log."""

    def __init__(self, function: Callable[[], None]) -> None:
        super().__init__()
        self.function, self.lines = function, list[str]()

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())
        if len(self.lines) == 1:
            self.function()


NO_ROOM = r"run\.ray_wait_s: the cluster must have a process at work within {} s, got none for \d+ s, and {{.*}} free"


def test_a_prediction_says_that_it_waits_and_goes_on_once_there_is_room(
    cluster: Any, config: Path, expected: dict[str, bytes], tmp_path: Path
) -> None:
    with all_taken() as free:
        said = CallOnce(free)
        logging.getLogger(on_ray.__name__).addHandler(said)
        try:
            assert predicted(config, tmp_path / "out", "run.ray_wait_s=200") == 19
        finally:
            logging.getLogger(on_ray.__name__).removeHandler(said)
    assert re.fullmatch(NO_ROOM.format(200), said.lines[0])
    assert contents(tmp_path / "out") == expected


def test_a_prediction_without_room_ends_after_the_limit(cluster: Any, config: Path, tmp_path: Path) -> None:
    command = ["predict", str(config), "run.ray_wait_s=10", "--out", str(tmp_path), "--on", "ray", cluster.address]
    with all_taken():
        done = subprocess.run(
            [sys.executable, "-m", "gpuflow", *command], timeout=SECONDS, capture_output=True, text=True
        )
    action = "end other work there, add a node, or raise run.ray_wait_s"
    assert done.returncode == 1
    assert re.search(f"^error: {NO_ROOM.format(10)}; {action}$", done.stderr, re.MULTILINE), done.stderr


def test_a_call_may_take_longer_while_a_process_is_at_work(cluster: Any) -> None:
    DaemonPool(1, "test").submit(on_ray._beat, "at work")
    assert on_ray._result(lambda: time.sleep(15), "at work", 10.0) is None


# --- serve ------------------------------------------------------------------------------------------------------------


@contextmanager
def serving(config: Path, *arguments: object) -> Iterator[tuple[subprocess.Popen[str], list[str]]]:
    """Run `gpuflow serve` until its first lines say that it answers; gives the process and its lines so far."""
    command = [sys.executable, "-m", "gpuflow", "serve", str(config), "--device", "cpu", *map(str, arguments)]
    lines: list[str] = []
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        errors = process.stderr
        threading.Thread(target=lambda: lines.extend(errors), daemon=True).start()
        try:
            wait(lambda: process.poll() is not None or any(line.startswith(("ready", "serving")) for line in lines))
            yield process, lines
        finally:
            process.kill()


def wait(condition: Callable[[], object]) -> None:
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end, "the condition was never true"
        time.sleep(0.1)


def serve_here(config: Config, **limited: Any) -> None:
    """Serve by replicas from this process."""
    limits = asdict(RequestLimits(**limited))
    where: dict[str, Any] = {"host": "127.0.0.1", "port": 8151, "device": "cpu"}
    on_ray.serve_replicas(config, (), limits=limits, cors=(), access_log=False, report=print, **where)


def answers(url: str, photo: bytes) -> list[tuple[int, Any]]:
    """Status and JSON of good and bad requests."""
    text = {"Content-Type": "image/jpeg"}
    asked = [
        requests.post(f"{url}/predict", photo, headers=text, timeout=SECONDS),
        requests.post(f"{url}/predict?top_k=2", files={"a": photo, "b": b"no image"}, timeout=SECONDS),
        requests.post(f"{url}/predict", b"no image", headers=text, timeout=SECONDS),
        requests.post(f"{url}/predict?top=2", photo, headers=text, timeout=SECONDS),
        requests.post(f"{url}/predict", b"x" * 200_000, headers=text, timeout=SECONDS),
        requests.post(f"{url}/predict", photo, headers={"Content-Type": "text/plain"}, timeout=SECONDS),
        requests.get(f"{url}/predict", timeout=SECONDS),
        *(requests.get(url + path, timeout=SECONDS) for path in ("/nothing", "/healthz", "/readyz", "/v2/models/x")),
    ]
    return [(answer.status_code, answer.json()) for answer in asked]


def test_replicas_answer_as_the_service_does_and_are_replaced_without_a_failed_request(
    cluster: Any, config: Path, tmp_path: Path
) -> None:
    photo = (config.parent / "photos" / "class_1" / "000.jpg").read_bytes()
    limit = ("--max-body-mb", "0.1")
    with serving(config, "--port", 0, *limit) as (process, lines):
        wait(lambda: any(line.startswith("ready") for line in lines))
        here = answers(lines[0].split()[3].rstrip(";"), photo)
        process.send_signal(signal.SIGTERM)
        assert process.wait(SECONDS) == 0
    assert {status for status, _ in here} == {200, 400, 404, 405, 413, 415, 422}

    torch.manual_seed(4)
    other = save_program(tmp_path / "b.pt2", Colours(), torch.zeros(2, 3, 24, 24))
    there = ("--port", 8151, *limit, "--on", "ray", cluster.address)
    url, statuses, stop = "http://127.0.0.1:8151", list[int](), threading.Event()

    def ask() -> None:
        while not stop.wait(0.05):
            statuses.append(requests.post(f"{url}/predict", photo, timeout=SECONDS).status_code)

    with serving(config, *there) as (first, lines):
        assert answers(url, photo) == here, "".join(lines)
        asking = threading.Thread(target=ask)
        asking.start()
        changed = (f"serve.model.file={other}", "serve.model.preprocessing=trust")
        with serving(config, *changed, *there) as (second, more):
            assert first.wait(SECONDS) == 0 and "has replaced" in lines[-1], "".join(more)
            wait(lambda: answers(url, photo)[0] != here[0])
            stop.set()
            asking.join(SECONDS)
            assert set(statuses) == {200} and len(statuses) > 10
            second.send_signal(signal.SIGTERM)
            assert second.wait(SECONDS) == 0 and more[-1] == "stopped\n"


def test_a_service_without_room_ends_after_the_limit_and_is_deleted(cluster: Any, config: Path) -> None:
    from ray import serve

    file = config.with_name("without_room.yaml")
    file.write_text(config.read_text())
    with all_taken(), pytest.raises(LoaderError, match=f"^--on ray: {NO_ROOM.format(10)}; "):
        serve_here(read_config(file, STAGES, ["run.ray_wait_s=10"]), timeout_s=1.0)
    wait(lambda: "without_room" not in serve.status().applications)


def test_a_replica_that_cannot_start_is_named(cluster: Any, config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_ray, "__version__", "9.9")
    with pytest.raises(LoaderError, match=r"^node [\d.]+: LoaderError: has gpuflow \S+ in place of gpuflow 9\.9; "):
        serve_here(read_config(config, STAGES))
