"""The README, the Makefile, CI, the pins and the command line say the same."""

from __future__ import annotations

import ast
import csv
import re
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()
MAKEFILE = (ROOT / "Makefile").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
FIRST_SCREEN = "\n".join(README.splitlines()[:40])

pages = pytest.mark.parametrize("page", [README, CONTRIBUTING], ids=["README", "CONTRIBUTING"])


def blocks(page: str, language: str) -> list[str]:
    """The fenced code blocks of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL)


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z]+):", MAKEFILE, flags=re.MULTILINE))


def pins() -> dict[str, str]:
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


def base_name(requirement: str) -> str:
    return re.split(r"[<>=!\[;]", requirement)[0].strip()


def commands_in_readme() -> set[str]:
    return set(re.findall(r"^\| `gpuflow ([a-z-]+)[ `]", README, flags=re.MULTILINE))


@pytest.mark.parametrize("command", ["make demo", "make test", "make check"])
def test_first_screen_names_the_commands(command: str) -> None:
    assert re.search(rf"^{command}\b", FIRST_SCREEN, flags=re.MULTILINE)


@pages
def test_every_make_command_is_a_target(page: str) -> None:
    code = "\n".join([*blocks(page, "bash"), *re.findall(r"`([^`\n]+)`", page)])
    named = set(re.findall(r"^make ([a-z]+)", code, flags=re.MULTILINE))
    assert named
    assert named <= make_targets()


def test_help_lists_every_target() -> None:
    described = set(re.findall(r"^([a-z]+):.*## \w", MAKEFILE, flags=re.MULTILINE))
    phony = re.search(r"^\.PHONY: (.*)$", MAKEFILE, flags=re.MULTILINE)
    assert phony is not None
    assert described == make_targets() == set(phony[1].split())
    assert ".DEFAULT_GOAL := help" in MAKEFILE


def test_ci_runs_the_checks_and_the_tests() -> None:
    script = ROOT / ".ci" / "run"
    assert script.stat().st_mode & 0o111, "chmod +x .ci/run"
    commands = [line for line in script.read_text().splitlines() if line and not line.startswith(("#", "set ", "cd "))]
    assert commands == ["make check", "make test"]


def test_pins_hold_the_tested_pair_and_every_dependency() -> None:
    assert (pins()["torch"], pins()["torchvision"]) == ("2.11.0", "0.26.0")
    extras = PROJECT["optional-dependencies"]
    needed = [
        *PROJECT["dependencies"],
        *(entry for name in ("dev", "plots", "samples", "turbo") for entry in extras[name]),
    ]
    assert {base_name(requirement) for requirement in needed} <= set(pins())


def test_extras_that_are_named_exist() -> None:
    from gpuflow import errors

    texts = [README, *(path.read_text() for path in sorted((ROOT / "gpuflow").rglob("*.py")))]
    named = {
        extra
        for text in texts
        for group in re.findall(r"(?:gpuflow|'\.)\[([a-z,]+)\]", text)
        for extra in group.split(",")
    }
    raised = {
        call.args[2].value
        for text in texts[1:]
        for call in ast.walk(ast.parse(text))
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Name)
        and call.func.id == errors.MissingExtra.__name__
        and isinstance(call.args[2], ast.Constant)
    }
    assert {"remote", "samples"} <= named | raised
    assert named | raised <= set(PROJECT["optional-dependencies"])


@pages
def test_relative_links_exist(page: str) -> None:
    links = [link for link in re.findall(r"\]\(([^)]+)\)", page) if "://" not in link]
    assert links
    for link in links:
        assert (ROOT / link.split("#")[0]).exists(), f"{link} is linked and does not exist"


def test_commands_are_those_of_the_command_line() -> None:
    import typer

    from gpuflow import cli

    [app] = [value for value in vars(cli).values() if isinstance(value, typer.Typer)]
    command = typer.main.get_command(app)
    assert commands_in_readme() == set(getattr(command, "commands"))  # noqa: B009


def test_stages_are_those_of_the_table() -> None:
    from gpuflow.stages import STAGES

    section = README.split("## Stages")[1].split("\n## ")[0]
    assert re.findall(r"^\| `([a-z_]+)` \|", section, flags=re.MULTILINE) == list(STAGES)


@pytest.mark.parametrize("text", blocks(README, "yaml"))
def test_yaml_blocks_are_valid_configs(text: str, tmp_path: Path) -> None:
    from gpuflow.config import read_config
    from gpuflow.stages import STAGES

    assert isinstance(yaml.safe_load(text), dict)
    (tmp_path / "readme.yaml").write_text(text)
    read_config(tmp_path / "readme.yaml", STAGES)


@pytest.mark.parametrize("text", blocks(README, "python"))
def test_python_blocks_parse(text: str) -> None:
    ast.parse(text)


def test_measured_table_is_that_of_results_csv() -> None:
    """Each figure of the README's table, and each ratio, comes from experiments/loader_cpu/results.csv."""
    with (ROOT / "experiments/loader_cpu/results.csv").open(newline="") as file:
        rates = {row["arm"]: float(row["value"]) for row in csv.DictReader(file) if row["metric"] == "images_per_s"}
    section = README.split("## Measured", 1)[1].split("\n## ", 1)[0]
    table = re.findall(r"^\| `([^`]+)`[^|]*\| ([\d,]+) \| ([\d.]+)x \|$", section, flags=re.MULTILINE)
    assert len(table) == 7
    for arm, rate, ratio in table:
        assert rate == f"{rates[arm]:,.0f}"
        assert ratio == f"{rates[arm] / rates['dataloader']:.2f}"


def test_measured_figures_of_many_cores_are_those_of_results_csv() -> None:
    with (ROOT / "experiments/many_cores/results.csv").open(newline="") as file:
        rates = {(row["arm"], row["workload"].rpartition("; ")[2]): float(row["value"]) for row in csv.DictReader(file)}
    ours, theirs = rates["gpuflow", "run.processes=16"], rates["dataloader", "workers=16"]
    told = f"gpuflow loads {ours:,.0f} images/s and DataLoader with PIL images {theirs:,.0f}"
    assert told in " ".join(README.split())


def test_measured_table_on_a_gpu_is_that_of_results_csv() -> None:
    with (ROOT / "experiments/gpu_path/results.csv").open(newline="") as file:
        values = {
            (row["arm"], row["metric"], row["workload"].partition(";")[0]): row["value"] for row in csv.DictReader(file)
        }
    section = README.split("| on a GPU |", 1)[1].split("\n\n", 1)[0]
    table = re.findall(r"^\| (\S.*?) \| ([\d.,]+) \| ([\d.,]+) \|$", section, flags=re.MULTILINE)
    loader = "random_resized_crop 224, flip, normalize to 16 bits nhwc"
    metrics = [
        ("images_per_s", loader, "{:,.0f}"),
        ("step_ratio", "resnet18", "{:.3f}"),
        ("step_ratio", "resnet50", "{:.3f}"),
        ("cpu_s_per_1000_of_loader", "resnet50", "{:.3f}"),
        ("gpu_mem_mb", "resnet50", "{:,.0f}"),
        ("gpu_mem_mb", loader, "{:,.0f}"),
    ]
    for (_, *shown), (metric, workload, form) in zip(table, metrics, strict=True):
        assert shown == [form.format(float(values[arm, metric, workload])) for arm in ("gpuflow", "dali")]


def service_figures(form: str) -> dict[tuple[str, ...], float]:
    """By arm, groups of the workload's form, and metric: of experiments/service/results.csv."""
    with (ROOT / "experiments/service/results.csv").open(newline="") as file:
        return {
            (row["arm"], *found.groups(), row["metric"]): float(row["value"])
            for row in csv.DictReader(file)
            if (found := re.fullmatch(form, row["workload"]))
        }


ON_TWO_CORES = r"resnet18 by (\w+), 2 cores; 500x375; clients=(\d+)"
ON_A_GPU = r"resnet50 by torch( \(CUDA graphs\))?, H100, (\d+) cores; (\w+); clients=(\d+)"


def test_measured_table_of_serving_is_that_of_results_csv() -> None:
    values = service_figures(ON_TWO_CORES)
    section = README.split("| the same model |", 1)[1].split("\n\n", 1)[0]
    table = re.findall(r"^\| (\S.*), (\w+) \| ([\d.]+) \| ([\d.]+) \|$", section, flags=re.MULTILINE)
    assert len(table) == 4
    for name, engine, *shown in table:
        arm = "graph-cpu" if "gpuflow" in name else "plain"
        assert shown == [f"{values[arm, engine, '10', metric]:.1f}" for metric in ("qps", "tp99_ms")]


def test_table_of_experiments_service_is_that_of_results_csv() -> None:
    values = service_figures(ON_TWO_CORES)
    text = (ROOT / "experiments/service/README.md").read_text()
    table = re.findall(r"^\| (\d+) \| (\w+) \|" + r" ([\d.]+) \|" * 6 + "$", text, flags=re.MULTILINE)
    assert len(table) == 6
    for clients, engine, *shown in table:
        expected: list[str] = []
        for metric in ("qps", "tp99_ms"):
            plain, graph = (values[arm, engine, clients, metric] for arm in ("plain", "graph-cpu"))
            expected += [f"{plain:.1f}", f"{graph:.1f}", f"{graph / plain:.2f}"]
        assert shown == expected


def test_table_of_a_service_on_a_gpu_is_that_of_results_csv() -> None:
    values = service_figures(ON_A_GPU)
    text = (ROOT / "experiments/service/README.md").read_text()
    table = re.findall(
        r"^\| (\d+) \| (\d+x\d+) \| (torch|CUDA graphs), (\d+) \|" + r" ([\d.]+) \|" * 6 + "$", text, flags=re.MULTILINE
    )
    assert len(table) == 22
    for clients, photographs, engine, cores, *shown in table:
        label = None if engine == "torch" else " (CUDA graphs)"
        expected: list[str] = []
        for metric in ("qps", "tp99_ms"):
            where = label, cores, photographs, clients, metric
            plain, graph = (values[arm, *where] for arm in ("plain", "graph-gpu"))
            expected += [f"{plain:.1f}", f"{graph:.1f}", f"{graph / plain:.2f}"]
        assert shown == expected
