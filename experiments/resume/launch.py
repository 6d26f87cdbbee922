"""Starts a training under torchrun or Ray, and ends all its processes."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import psutil
from training import HERE, Job, train_by_ray

STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""Gives each attempt a separate store. In a shared one Gloo finds addresses of processes that ended, and waits for
them: pytorch/pytorch issue 135712."""

SECONDS = 600
"""After which a training under torchrun that has not ended is killed, or a node of Ray that does not start."""


def by_torchrun(job: Job) -> None:
    """Run a job on two ranks: on two nodes, each with an agent, if one of them is to be killed, else on one node.

    Raises:
        RuntimeError: it failed, or goes on.
    """
    (Path(job.folder) / "logs").mkdir(parents=True)
    log = Path(job.folder) / "output.log"
    with ExitStack() as ended:
        output = ended.enter_context(log.open("wb"))
        agents: list[subprocess.Popen[bytes]] = []
        for options in two_nodes() if job.kill == "node" else [["--standalone", "--nproc-per-node=2"]]:
            command = [sys.executable, "-m", "torch.distributed.run", *options, "--max-restarts=3"]
            agent = subprocess.Popen(
                [*command, str(HERE / "training.py"), json.dumps(asdict(job))],
                env={**os.environ, **STORE, "OMP_NUM_THREADS": "1", "VICTIM": str(len(agents))},
                stdout=output,
                stderr=output,
            )
            ended.callback(kill_with_workers, agent)
            agents.append(agent)
        try:
            code: int | None = agents[0].wait(SECONDS)
        except subprocess.TimeoutExpired:
            code = None
    if code != 0:
        text = log.read_text(errors="replace")[-4000:]
        raise RuntimeError(f"{job}: {'it goes on' if code is None else f'exit code {code}'}: {text}")


def two_nodes() -> list[list[str]]:
    """Return the options of two agents on this machine, of which the first hosts the rendezvous."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    endpoint = [f"--rdzv-endpoint=127.0.0.1:{port}", f"--rdzv-id={port}", "--local-addr=127.0.0.1"]
    # One node begins without the other after the last call; one that is lost is noticed after three seconds.
    rendezvous = "last_call_timeout=10,keep_alive_interval=1,keep_alive_max_attempt=3"
    return [
        ["--nnodes=1:2", "--nproc-per-node=1", "--rdzv-backend=c10d", *endpoint, f"--rdzv-conf={rendezvous},{host}"]
        for host in ("is_host=true", "is_host=false")
    ]


def kill_with_workers(agent: subprocess.Popen[bytes]) -> None:
    """End an agent and its workers, which are in other process groups."""
    with suppress(psutil.NoSuchProcess):
        for process in [psutil.Process(agent.pid), *psutil.Process(agent.pid).children(recursive=True)]:
            process.kill()
    agent.wait()


# --- Ray --------------------------------------------------------------------------------------------------------------

NODE = {"num_cpus": 1, "object_store_memory": 100 << 20}
NEW_NODE_SECONDS = 25
"""Ray Train looks for new nodes every 20 s. A training that starts before that does without them."""


@contextmanager
def ray_cluster() -> Iterator[Any]:
    """Yield a cluster of Ray on this machine: its head is one node of one CPU."""
    os.environ |= {
        "PYTHONPATH": str(HERE),  # of the workers, which import training.py
        "OMP_NUM_THREADS": "1",
        # A restart first waits this long for two workers, because Ray does not know yet that the node is lost.
        "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "30",
        # How often Ray asks the workers what they reported: steps are short here.
        "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
    }
    import ray
    from ray.cluster_utils import Cluster

    faults = {"health_check_period_ms": 1000, "health_check_failure_threshold": 3}  # to notice a lost node soon
    cluster = Cluster(
        initialize_head=True, head_node_args={**NODE, "include_dashboard": False, "_system_config": faults}
    )
    try:
        ray.init(address=cluster.address, log_to_driver=False)
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


@contextmanager
def second_node(cluster: Any) -> Iterator[Any]:
    """Add a node of one CPU to a cluster, and remove it at the end if it is still there."""
    node = cluster.add_node(wait=False, **NODE)
    try:
        cluster.wait_for_nodes(SECONDS)
        yield node
    finally:
        if node in cluster.worker_nodes:
            cluster.remove_node(node, allow_graceful=False)


def by_ray(job: Job, cluster: Any) -> None:
    """Run a job of gpuflow on one or two workers, on the head of a cluster and a second node."""
    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    (Path(job.folder) / "logs").mkdir(parents=True)
    with second_node(cluster):
        time.sleep(NEW_NODE_SECONDS)
        TorchTrainer(
            train_by_ray,
            train_loop_config=asdict(replace(job, safe=ray.get_runtime_context().get_node_id())),
            scaling_config=ScalingConfig(num_workers=(1, 2)),
            run_config=RunConfig(
                name="run", storage_path=f"{job.folder}/ray", failure_config=FailureConfig(max_failures=3)
            ),
        ).fit()
