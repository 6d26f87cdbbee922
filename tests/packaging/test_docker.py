"""The Dockerfile and the compose file follow the rules that the documentation promises."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from gpuflow.cli import app
from gpuflow.serve.http.limits import ROUTES

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "Dockerfile").read_text()
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text())


def stages(text: str) -> list[list[tuple[str, str]]]:
    """Return the instructions of each stage of a Dockerfile, which begins with FROM, as words and arguments."""
    lines = re.sub(r"^#.*\n", "", text, flags=re.MULTILINE).replace("\\\n", " ").splitlines()
    found: list[list[tuple[str, str]]] = []
    for word, _, rest in (line.strip().partition(" ") for line in lines if line.strip()):
        if word == "FROM":
            found.append([])
        if found:
            found[-1].append((word, rest.strip()))
    return found


def faults(text: str) -> list[str]:
    """Return the rules of images that a Dockerfile breaks."""
    *_, last = all_stages = stages(text)
    final = dict(last)
    user, entry = final.get("USER", "root"), final.get("ENTRYPOINT", "")
    health = re.search(r"http://127\.0\.0\.1:8888(/\w+)", final.get("HEALTHCHECK", ""))
    images = [stage[0][1].split()[0] for stage in all_stages]
    own = {stage[0][1].split()[-1] for stage in all_stages} | {"${VARIANT}"}
    rules = {
        "the user must be a number other than 0": re.fullmatch(r"[1-9]\d*(:\d+)?", user),
        "HEALTHCHECK must ask a route of the service": health is not None and health[1] in ROUTES,
        "an image must have a tag other than latest": all(
            image in own or (":" in image and not image.endswith(":latest")) for image in images
        ),
        "ENTRYPOINT must run gpuflow without a shell, for SIGTERM": entry.startswith("[")
        and json.loads(entry) == ["gpuflow"],
        "a list of packages must be removed where it is loaded": all(
            "rm -rf /var/lib/apt/lists" in rest for stage in all_stages for word, rest in stage if "apt-get" in rest
        ),
    }
    return [rule for rule, holds in rules.items() if not holds]


def test_the_image_follows_the_rules() -> None:
    assert faults(DOCKERFILE) == []


@pytest.mark.parametrize(
    ("old", "new", "rule"),
    [
        ("USER 10001:10001\n", "", "the user must be a number other than 0"),
        ("USER 10001:10001\n", "USER root\n", "the user must be a number other than 0"),
        ("/readyz", "/ready", "HEALTHCHECK must ask a route of the service"),
        ("python:3.11-slim-bookworm AS cpu", "python AS cpu", "an image must have a tag other than latest"),
        ("3.11-slim-bookworm AS cpu", "latest AS cpu", "an image must have a tag other than latest"),
        ('["gpuflow"]', "gpuflow", "ENTRYPOINT must run gpuflow without a shell, for SIGTERM"),
        (" && rm -rf /var/lib/apt/lists/*", "", "a list of packages must be removed where it is loaded"),
    ],
)
def test_a_broken_rule_is_found(old: str, new: str, rule: str) -> None:
    assert old in DOCKERFILE
    assert faults(DOCKERFILE.replace(old, new)) == [rule]


def test_both_variants_are_stages_and_the_build_context_has_what_is_copied() -> None:
    names = [stage[0][1].split()[-1] for stage in stages(DOCKERFILE)]
    assert {"cpu", "cuda"} <= set(names)
    copied = {
        path
        for stage in stages(DOCKERFILE)
        for word, rest in stage
        if word == "COPY" and not rest.startswith("--from")
        for path in rest.split()[:-1]
    }
    context = (ROOT / ".dockerignore").read_text().splitlines()
    assert context[0] == "*"
    assert copied == {line[1:] for line in context if line.startswith("!")}
    assert [path for path in copied if not (ROOT / path).exists()] == []


def test_the_compose_file_makes_photographs_trains_and_serves() -> None:
    services = COMPOSE["services"]
    commands = getattr(typer.main.get_command(app), "commands")  # noqa: B009
    assert [service["command"][0] for service in services.values()] == ["samples", "train", "serve"]
    for name, service in services.items():
        known = {option for parameter in commands[name].params for option in parameter.opts}
        assert {word for word in service["command"] if word.startswith("-")} <= known
        assert [word for word in service["command"] if word.endswith(".yaml") and not (ROOT / word).is_file()] == []
        assert service["read_only"] is True and service["cap_drop"] == ["ALL"]
    waits = {name: service.get("depends_on", {}) for name, service in services.items()}
    done = {"condition": "service_completed_successfully"}
    assert waits == {"samples": {}, "train": {"samples": done}, "serve": {"train": done}}


def test_volumes_are_where_the_user_of_the_image_may_write() -> None:
    """Docker gives a new volume the owner of the folder that the image has in its place."""
    made = re.search(r"install -d -o gpuflow -g gpuflow (.+)", DOCKERFILE)
    assert made is not None
    for service in COMPOSE["services"].values():
        writable = [volume.split(":")[1] for volume in service["volumes"] if not volume.endswith(":ro")]
        assert writable and set(writable) <= set(made[1].split())
