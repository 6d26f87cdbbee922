"""The files of docs/cluster: they parse, their commands are gpuflow's, and the script for Slurm requeues after 75."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from gpuflow.cli import app

FOLDER = Path(__file__).parents[1] / "docs/cluster"
COMMANDS: Any = typer.main.get_command(app)


def parsed(command: str) -> dict[str, Any]:
    """Parse a command as the shell and gpuflow do, and return its parameters."""
    _, name, *arguments = shlex.split(command)
    return dict(COMMANDS.commands[name].make_context(name, arguments).params)


@pytest.mark.parametrize("name", ["slurm.sbatch", "torchrun.sh"])
def test_scripts_parse_and_their_commands_are_gpuflows(name: str) -> None:
    text = (FOLDER / name).read_text()
    subprocess.run(["bash", "-n", FOLDER / name], check=True, timeout=20)
    [command] = re.findall(r"gpuflow train [^'\n]*", text)
    assert parsed(command)["resume"] == "auto"


def test_the_script_for_slurm_requeues_once_all_ranks_have_saved(tmp_path: Path) -> None:
    commands = {
        "srun": 'SLURM_PROCID=9 SLURM_LOCALID=1 exec "$@"',
        "gpuflow": 'echo "$RANK $LOCAL_RANK of $WORLD_SIZE at $MASTER_ADDR: $*"; exit "$CODE"',
        "scontrol": 'if [ "$1" = show ]; then printf "node4\\nnode5\\n"; else echo "scontrol $*"; fi',
    }
    for name, text in commands.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    slurm = {
        "SLURM_JOB_ID": "41",
        "SLURM_NTASKS": "16",
        "SLURM_NTASKS_PER_NODE": "8",
        "SLURM_JOB_NODELIST": "node[4-5]",
    }
    for code in (0, 1, 75):
        environment = {**os.environ, **slurm, "PATH": f"{tmp_path}:{os.environ['PATH']}", "CODE": f"{code}"}
        done = subprocess.run(
            ["bash", FOLDER / "slurm.sbatch"], env=environment, capture_output=True, text=True, timeout=20, check=False
        )
        lines = ["9 1 of 16 at node4: train configs/photos.yaml --resume auto"]
        assert (done.returncode, done.stderr) == (code, "")
        assert done.stdout.splitlines() == lines + ["scontrol requeue 41"] * (code == 75)


def test_the_job_set_restarts_after_75_without_counting() -> None:
    spec = yaml.safe_load((FOLDER / "jobset.yaml").read_text())["spec"]
    [job] = (each["template"]["spec"] for each in spec["replicatedJobs"])
    pod = job["template"]["spec"]
    [container] = pod["containers"]
    assert parsed(container["args"][0].partition("exec ")[2])["resume"] == "auto"
    assert pod["terminationGracePeriodSeconds"] >= 60
    assert pod["restartPolicy"] == "Never"
    [rule] = job["podFailurePolicy"]["rules"]
    assert rule["action"] == "FailJob"
    assert rule["onExitCodes"] == {"containerName": container["name"], "operator": "In", "values": [os.EX_TEMPFAIL]}
    [restart] = spec["failurePolicy"]["rules"]
    assert (restart["action"], restart["onJobFailureReasons"]) == (
        "RestartJobSetAndIgnoreMaxRestarts",
        ["PodFailurePolicy"],
    )
    variables = {variable["name"]: variable["value"] for variable in container["env"]}
    assert variables["WORLD_SIZE"] == str(job["completions"]) == str(job["parallelism"])


def test_the_inference_service_starts_the_service_on_its_port() -> None:
    predictor = yaml.safe_load((FOLDER / "kserve.yaml").read_text())["spec"]["predictor"]
    [container] = predictor["containers"]
    given = parsed(shlex.join(["gpuflow", *container["args"]]))
    [port] = container["ports"]
    assert given["port"] == port["containerPort"] == container["readinessProbe"]["httpGet"]["port"]
    assert given["host"] == "0.0.0.0"
