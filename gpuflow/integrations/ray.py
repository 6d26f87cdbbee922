"""gpuflow on a cluster of Ray: loaders in the workers of Ray Train, and `--on ray` of two commands.

Each worker of Ray Train loads its share of the samples, and checkpoints hold the loader's state. `gpuflow predict` runs
in actors of Ray Data, `gpuflow serve` in replicas of Ray Serve.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import re
import secrets
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import wait
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

import gpuflow
from gpuflow.config import Config, read_config
from gpuflow.engines.base import reading_fault
from gpuflow.errors import ConfigError, LoaderError, MissingExtra, Problem, StateError, reason_of
from gpuflow.loader.loader import Loader
from gpuflow.runtime.ranks import gather
from gpuflow.runtime.threads import DaemonPool, QuickSwitching
from gpuflow.serve.predictor import open_predictor
from gpuflow.tools.predict import Row, RowPredictor
from gpuflow.training.checkpoint import inner_model, write_checkpoint
from gpuflow.version import __version__
from gpuflow.vocabulary import stage_table

try:
    import ray.train.torch
    from ray.exceptions import RayError
    from ray.experimental import internal_kv
except ImportError as error:
    raise MissingExtra("gpuflow.integrations.ray", "Ray Train", "ray") from error


_FILE = "gpuflow.pt"


def load(path: str | Path, name: str = "train", *, overrides: Sequence[str] = ()) -> Loader:
    """Return the loader of this worker's rank, as `gpuflow.load` does, on the device that Ray Train gave the worker.

    Every worker calls it, in the same order for several loaders. If one of them fails, all of them raise its error, so
    none waits for the others.

    Args:
        path: the YAML file, at the same path on every node.
        name: the pipeline.
        overrides: dotted assignments such as `run.threads=8`.

    Raises:
        LoaderError: on at least one node the file is missing or faulty, or its source cannot be read. It names the
            ranks and nodes, and what each of them raised.
    """
    device = ray.train.torch.get_device()
    loader = cause = None
    try:
        loader = gpuflow.load(path, name, device=device if device.type == "cuda" else None, overrides=overrides)
    except Exception as error:  # of any kind: the other workers must hear of it
        cause = error
    failures = gather([_on_node(cause) if cause else ""])
    if loader is not None:
        if not any(failures):
            return loader
        loader.close()
    found = "; ".join(f"rank {rank} on {text}" for rank, text in enumerate(failures) if text)
    raise LoaderError(f"{found}; every node needs the file and its images at the same path, or at a URL") from cause


def report(
    loader: Loader,
    metrics: Mapping[str, Any],
    model: nn.Module,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    **more: Any,
) -> None:
    """Report metrics and a checkpoint with the states of loader, model and optimizer to Ray Train.

    Every worker calls it after the same step; rank 0 writes the checkpoint. The model is not sharded (no FSDP).

    Args:
        metrics: for `ray.train.report`.
        model: also as wrapped by DistributedDataParallel or torch.compile.
        more: further values that `restore` returns, such as the step: numbers, strings, tensors, lists of them.

    Raises:
        ValueError: `more` has what `torch.load` refuses with `weights_only=True`, such as numbers of numpy.
    """
    state = {
        "loader": loader.state_dict(),
        "model": inner_model(model).state_dict(),
        "optimizer": None if optimizer is None else optimizer.state_dict(),
    }
    checkpoint = None
    with tempfile.TemporaryDirectory() as folder:
        if loader.rank == 0:
            write_checkpoint(Path(folder) / _FILE, {**more, **state})
            checkpoint = ray.train.Checkpoint.from_directory(folder)
        ray.train.report(dict(metrics), checkpoint=checkpoint)


def restore(loader: Loader, model: nn.Module, *, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Any]:
    """Set loader, model and optimizer to the last checkpoint that the run reported, on any number of workers.

    Every worker calls it before its first step. The next `for` goes on with the samples that are left.

    Returns:
        The further values that `report` was given; empty at the start of a run, which changes nothing.

    Raises:
        StateError: the checkpoint is not one of `report`, or of other files, stages or seed than the loader's.
    """
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is None:
        return {}
    with checkpoint.as_directory() as folder:
        try:
            state = torch.load(Path(folder) / _FILE, map_location="cpu", weights_only=True)
        except Exception as error:  # of torch's readers, which have no common base
            raise StateError(
                f"{checkpoint.path}: cannot be read as a checkpoint of gpuflow.integrations.ray.report: "
                f"{reading_fault(error)}; give RunConfig another name to start anew"
            ) from error
    loader.load_state_dict(state.pop("loader"))
    inner_model(model).load_state_dict(state.pop("model"))
    if (optimizer_state := state.pop("optimizer")) and optimizer is not None:
        optimizer.load_state_dict(optimizer_state)
    return dict(state)


# --- the cluster of a command -----------------------------------------------------------------------------------------

_RETRIES = 5
"""How often a part is predicted again whose process or node was lost. Ray Data itself has no limit."""
_SAME = "every node needs the same gpuflow, and the file, the model and the images at the same path, or at a URL"


@contextmanager
def connected(address: str | None) -> Iterator[None]:
    """Use the cluster whose head is at HOST:PORT, by default RAY_ADDRESS; without one a new cluster.

    Raises:
        ConfigError: it cannot be reached, has another version of Ray or Python, or takes another token.
        MissingExtra: Ray Data or Ray Serve is not installed.
    """
    try:
        import ray.data
        import ray.serve
    except ImportError as error:
        raise MissingExtra("--on ray", "Ray with ray.data and ray.serve", "ray") from error
    address = address or os.environ.get("RAY_ADDRESS")
    try:
        if address:
            host, _, port = address.rpartition(":")
            socket.create_connection((host, int(port)), timeout=10).close()  # Ray would try for minutes
        # By default Ray would connect to the last cluster of this machine, also where that has ended.
        ray.init(address or "local", log_to_driver=False, logging_level=logging.ERROR, include_dashboard=False)
    except (OSError, RuntimeError, ValueError, RayError) as error:
        rule = f"must name a cluster that can be reached: {reason_of(error)}"
        action = "start it with ray start --head; if its nodes need a token, set RAY_AUTH_MODE=token here, too"
        raise ConfigError([Problem("--on ray:", rule, address or "a new one", action)]) from error
    try:
        yield
    finally:
        ray.shutdown()


def _resources(device: str | None) -> tuple[dict[str, int], int]:
    """Return what a process gets, a GPU with its share of a node's cores or else all cores, and how many have room."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    cores = [[int(node.get(kind, 0)) for kind in ("CPU", "GPU")] for node in nodes]
    if device != "cpu" and any(gpus for _, gpus in cores):
        each = max(1, min(cpus // gpus for cpus, gpus in cores if gpus))
        return {"num_cpus": each, "num_gpus": 1}, sum(min(gpus, cpus // each) for cpus, gpus in cores)
    each = min((cpus for cpus, _ in cores if cpus), default=1)
    return {"num_cpus": each}, sum(cpus // each for cpus, _ in cores)


def _beat(key: str) -> None:
    """Change a value of the cluster every second, on a thread of a process that the cluster runs."""
    while True:
        internal_kv._internal_kv_put(key, secrets.token_bytes(8))
        time.sleep(1)


def _result(call: Callable[[], Any], key: str, wait_s: float) -> Any:
    """Return the result of a call that needs processes of the cluster. While there are none, a log says so each minute.

    key: of `_beat` in these processes.

    Raises LoaderError: there was none for `wait_s` seconds.
    """
    pool, pause, waited, last = DaemonPool(1, "ray"), min(60.0, wait_s / 10), 0.0, None
    result = pool.submit(call)
    try:
        while not wait([result], pause).done:
            beat = internal_kv._internal_kv_get(key)
            waited, last = waited + pause if beat == last else 0.0, beat
            rule = f"run.ray_wait_s: the cluster must have a process at work within {wait_s:g} s"
            text = f"{rule}, got none for {waited:g} s, and {ray.available_resources()} free"
            if waited >= wait_s:
                raise LoaderError(f"{text}; end other work there, add a node, or raise run.ray_wait_s")
            if waited:
                logging.getLogger(__name__).warning(text)
    finally:
        pool.end(0)
    return result.result()


def _threads(config: Config, resources: Mapping[str, int]) -> list[str]:
    """Return the override that gives a process the threads of its cores, unless the file says how many there are."""
    return [f"run.threads={resources['num_cpus']}"] if config.run.threads == "auto" else []


def _identity(text: str) -> str:
    """Return what must be equal on all nodes: the version of gpuflow, and this text."""
    return f"gpuflow {__version__}\n{text}"


def _on_node(error: Exception) -> str:
    return f"node {ray.util.get_node_ip_address()}: {type(error).__name__}: {error}"


def _require_equal(theirs: str, ours: str) -> None:
    """Raise LoaderError with the first line that a node has and the command has not."""
    for one, other in zip(theirs.splitlines(), ours.splitlines(), strict=True):
        if one != other:
            raise LoaderError(f"has {one} in place of {other}")


# --- predict ----------------------------------------------------------------------------------------------------------


def predict_parts(
    predictor: RowPredictor, options: Mapping[str, Any], parts: Sequence[range]
) -> Iterator[tuple[range, list[Row]]]:
    """Yield parts of the samples with their rows, in the order in which actors of Ray Data finish them.

    A part whose process or node is lost is predicted again, up to `_RETRIES` times.

    Args:
        predictor: of this process, which the actors must agree with.
        options: the arguments of RowPredictor in the actors.

    Raises:
        LoaderError: a node has other files or another gpuflow, a part fails or ends its process each time, or no actor
            ran for `run.ray_wait_s`.
    """
    if not parts:
        return
    (resources, room), run = _resources(options["device"]), predictor.config.run
    more = _threads(predictor.config, resources)
    if isinstance(run.max_bad, float):  # which a loader applies to the samples that it draws
        more.append(f"run.max_bad={int(run.max_bad * len(predictor.source))}")
    options = {**options, "overrides": [*options["overrides"], *more]}
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    ray.data.DataContext.get_current().enable_progress_bars = False
    key = secrets.token_hex(8)
    answers = ray.data.from_items(
        [{"start": part.start, "stop": part.stop} for part in parts], override_num_blocks=len(parts)
    ).map_batches(
        _PartPredictor,
        fn_constructor_args=(key, _identity(predictor.identity), os.getcwd(), options),
        batch_size=1,
        compute=ray.data.ActorPoolStrategy(min_size=1, max_size=len(parts), initial_size=max(1, min(room, len(parts)))),
        **resources,
    )
    total, left = sum(map(len, parts)), iter(answers.iter_rows())
    try:
        while answer := _result(lambda: next(left, None), key, run.ray_wait_s):
            found = json.loads(answer["rows"])
            if isinstance(found, str):
                raise LoaderError(found)
            rows = [Row(**row) for row in found]
            predictor.count(rows, of=total)
            yield range(answer["start"], answer["stop"]), rows
    except RayError as error:
        raise LoaderError(f"--on ray: {reason_of(error, with_type=True)}") from error


class _PartPredictor:
    """Predicts parts in an actor. It answers with its failure, whose reason Ray would hide."""

    def __init__(self, run: str, identity: str, folder: str, options: Mapping[str, Any]) -> None:
        DaemonPool(1, "ray").submit(_beat, run)
        self._run, self._fault = run, ""
        try:
            os.chdir(folder)
            self._predictor = RowPredictor(**options)
            _require_equal(_identity(self._predictor.identity), identity)
        except Exception as error:  # of any kind: the command must hear of it
            self._fault = f"{_on_node(error)}; {_SAME}"

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        part = range(int(batch["start"][0]), int(batch["stop"][0]))
        answer: Any = self._fault or self._fault_of_tries(part)
        if not answer:
            try:
                ((_, rows),) = self._predictor.predict_parts([part])
                answer = [asdict(row) for row in rows]
            except Exception as error:
                answer = f"{_on_node(error)}; {_SAME}"
        return {**batch, "rows": [json.dumps(answer)]}

    def _fault_of_tries(self, part: range) -> str:
        """Count the tries of this part, in all processes. Return what is wrong if there were too many."""
        key = f"gpuflow predict {self._run} {part.start}"
        lost = int(internal_kv._internal_kv_get(key) or 0)
        internal_kv._internal_kv_put(key, str(lost + 1))
        if lost <= _RETRIES:
            return ""
        return f"samples {part.start} to {part.stop - 1} ended their process {lost} times; predict them without Ray"


# --- serve ------------------------------------------------------------------------------------------------------------


def serve_replicas(
    config: Config,
    overrides: Sequence[str],
    *,
    host: str,
    port: int,
    limits: Mapping[str, Any],
    cors: Sequence[str],
    access_log: bool,
    device: str | None,
    report: Callable[[str], None],
) -> None:
    """Serve a configuration by replicas of Ray Serve until a signal comes, which answers what was taken.

    A second call with a file of this name replaces the replicas one after the other, and ends the first call.

    Raises LoaderError: the replicas cannot start, because a node has other files or another gpuflow, or none did within
    `run.ray_wait_s`.
    """
    from ray import serve

    (resources, _), name, model = _resources(device or "cpu"), Path(config.path).stem, config.serve_block().model
    assert model is not None
    options = {"path": str(config.path), "overrides": [*overrides, *_threads(config, resources)], "device": device}
    replicas = serve.deployment(
        serve.ingress()(_Replica),
        name="predictor",
        ray_actor_options=resources,
        max_ongoing_requests=2 * limits["max_queue"],  # replicas refuse more than max_queue images themselves
        autoscaling_config={"max_replicas": 100, "target_ongoing_requests": model.batch * model.instances},
        graceful_shutdown_timeout_s=2 * limits["timeout_s"],
        max_constructor_retry_count=1,
        logging_config={"enable_access_log": access_log},
    )
    serve.start(http_options={"host": host, "port": port})
    owner, key = secrets.token_bytes(8), f"gpuflow serve {name}"
    bound = replicas.bind(_identity_of(config), os.getcwd(), options, limits, cors, name)
    try:
        _result(lambda: serve.run(bound, name=name), key, config.run.ray_wait_s)
    except (RuntimeError, RayError) as error:
        messages = "\n".join(one.message for one in serve.status().applications[name].deployments.values())
        faults = re.findall(r"LoaderError: (node .*)", messages)
        if internal_kv._internal_kv_get(key) is None:  # it replaces no other one
            serve.delete(name, _blocking=False)
        raise LoaderError(faults[-1] if faults else f"--on ray: {reason_of(error)}") from error
    signalled = threading.Event()

    def on_signal(number: int, frame: object) -> None:
        signalled.set()
        signal.signal(number, signal.SIG_DFL)  # the second one ends the process

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, on_signal)
    internal_kv._internal_kv_put(key, owner)
    report(f"serving {config.path} by Ray Serve")
    while not signalled.wait(1):
        if internal_kv._internal_kv_get(key) != owner:
            report("another gpuflow serve has replaced this service")
            return
    report("new requests are refused, taken ones are answered; send the signal again to exit at once")
    serve.delete(name)
    report("stopped")


def _identity_of(config: Config) -> str:
    model = config.serve_block().model
    assert model is not None
    digest = hashlib.sha256(Path(model.file).read_bytes()).hexdigest()
    return _identity(f"preprocessing {config.programs['serve'].pipeline.fingerprint}\nmodel {digest[:16]}")


class _Replica:
    """Answers requests in a replica, by the application of `gpuflow serve`."""

    def __init__(
        self,
        identity: str,
        folder: str,
        options: Mapping[str, Any],
        limits: Mapping[str, Any],
        cors: Sequence[str],
        name: str,
    ) -> None:
        try:
            from gpuflow.serve.http.app import RequestLimits, create_app  # predict does without its packages

            os.chdir(folder)
            config = read_config(options["path"], stage_table(), options["overrides"])
            _require_equal(_identity_of(config), identity)
            self._predictor = open_predictor(config, device=options["device"])
        except Exception as error:
            raise LoaderError(f"{_on_node(error)}; {_SAME}") from error
        QuickSwitching(0.00002)  # until the process ends
        self._app = create_app(self._predictor, RequestLimits(**limits), cors=cors, name=name)

    def __serve_build_asgi_app__(self) -> Any:  # Ray Serve calls it after the constructor
        return self._app

    async def check_health(self) -> None:
        """Have Ray Serve replace this replica if its decoders or its model fail."""
        await asyncio.to_thread(self._predictor.check)
