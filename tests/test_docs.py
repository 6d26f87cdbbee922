"""The README, the documentation, the Makefile, CI, the pins and the command line agree."""

from __future__ import annotations

import ast
import csv
import importlib.util
import re
import shutil
import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import yaml

from gpuflow.tools.samples import make_samples

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()
BENCHMARKS = (ROOT / "docs/benchmarks.md").read_text()
MAKEFILE = (ROOT / "Makefile").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
FIRST_SCREEN = README.split("\n## One file")[0]

PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text()
    for path in [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
}
pages = pytest.mark.parametrize("page", PAGES)


def blocks(page: str, language: str) -> list[str]:
    """The fenced code blocks of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL)


def code_blocks(language: str) -> pytest.MarkDecorator:
    """A parametrization by every code block of one language on any page."""
    found = [
        pytest.param(text, id=f"{page}:{number}")
        for page, content in PAGES.items()
        for number, text in enumerate(blocks(content, language))
    ]
    return pytest.mark.parametrize("text", found)


def code(page: str) -> str:
    """The shell commands of a page: its bash blocks and its inline code, one a line."""
    return "\n".join([*blocks(page, "bash"), *re.findall(r"`([^`\n]+)`", page)])


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", MAKEFILE, flags=re.MULTILINE))


def pins() -> dict[str, str]:
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


def base_name(requirement: str) -> str:
    return re.split(r"[<>=!\[;]", requirement)[0].strip()


def commands_in_table() -> set[str]:
    return set(re.findall(r"^\| `gpuflow ([a-z-]+)[ `]", PAGES["docs/reference/commands.md"], flags=re.MULTILINE))


def command_line() -> dict[str, Any]:
    """The commands of gpuflow by name."""
    import typer

    from gpuflow import cli

    [app] = [value for value in vars(cli).values() if isinstance(value, typer.Typer)]
    return dict(getattr(typer.main.get_command(app), "commands"))  # noqa: B009


@pytest.mark.parametrize("command", ["make demo", "make test", "make check"])
def test_first_screen_names_the_commands(command: str) -> None:
    assert re.search(rf"^{command}\b", FIRST_SCREEN, flags=re.MULTILINE)


@pages
def test_every_make_command_is_a_target(page: str) -> None:
    named = set(re.findall(r"^make ([a-z-]+)", code(PAGES[page]), flags=re.MULTILINE))
    assert named or page not in ("README.md", "CONTRIBUTING.md")
    assert named <= make_targets()


def test_help_lists_every_target() -> None:
    described = set(re.findall(r"^([a-z-]+):.*## \w", MAKEFILE, flags=re.MULTILINE))
    phony = re.search(r"^\.PHONY: (.*)$", MAKEFILE, flags=re.MULTILINE)
    assert phony is not None
    assert described == make_targets() == set(phony[1].split())
    assert ".DEFAULT_GOAL := help" in MAKEFILE


def test_ci_runs_the_checks_the_tests_and_the_documentation() -> None:
    script = ROOT / ".ci" / "run"
    assert script.stat().st_mode & 0o111, "chmod +x .ci/run"
    commands = [line for line in script.read_text().splitlines() if line and not line.startswith(("#", "set ", "cd "))]
    assert commands[:3] == ["make --jobs 3 check docs collect", "make test", "make test-portable"]
    assert "tests.native.fuzz" in commands[3] and len(commands) == 4


def test_the_workflow_runs_what_ci_runs() -> None:
    job = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]["ci"]
    assert job["strategy"]["matrix"] == {"python": ["3.11", "3.12", "3.13", "3.14"]}
    assert [step.get("run") or step["uses"].partition("@")[0] for step in job["steps"]] == [
        "actions/checkout",
        "actions/setup-python",
        ".ci/run",
    ]


def test_versions_of_python_that_run_are_those_that_are_named() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    named = [text.rpartition(" ")[2] for text in PROJECT["classifiers"] if "Python :: 3." in text]
    assert workflow["jobs"]["ci"]["strategy"]["matrix"]["python"] == named
    assert PROJECT["requires-python"] == f">={named[0]}"


def test_the_bounds_run_in_the_workflow() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    jobs = workflow["jobs"]
    assert jobs["versions"]["strategy"]["matrix"] == {"target": ["test-oldest", "test-latest"]}
    assert jobs["versions"]["steps"][-1] == {"run": "make ${{ matrix.target }}"}
    assert jobs["unbounded"]["steps"][-1] == {"run": "make test-latest UNBOUNDED=1"}
    assert jobs["unbounded"]["if"] == "github.event_name == 'schedule'" and workflow[True]["schedule"]


def test_bounds_are_those_that_the_makefile_runs() -> None:
    """Without the upper bounds, the requirements of the pattern are bounded below alone; no other one has both."""
    extras = PROJECT["optional-dependencies"]
    pattern = re.search(r"^BOUNDED := (.*)$", MAKEFILE, flags=re.MULTILINE)
    jobs = re.search(r"^JOBS := (.*)$", MAKEFILE, flags=re.MULTILINE)
    assert pattern is not None and jobs is not None
    needed = [*PROJECT["dependencies"], *(entry for job in jobs[1].split() for entry in extras[job])]
    assert all(re.search(">=|==", entry) for entry in needed), "test-oldest needs a minimum of each"
    bounded = {base_name(entry) for entry in needed if "<" in entry}
    assert bounded == {base_name(entry) for entry in needed if re.fullmatch(pattern[1], entry)}
    assert bounded == {"torch", "torchvision", "uvicorn"}


def test_every_test_runs_in_the_workflow() -> None:
    """Those that .ci/run leaves out run in another job."""
    job = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]["other-tests"]
    assert job["steps"][-1] == {"run": "make ${{ matrix.target }}"}
    assert job["strategy"]["matrix"] == {"target": ["test-slow", "test-experiments"]}
    recipes = {
        target: MAKEFILE.split(f"\n{target}:")[1].split("\n\n")[0].partition("$(PYTEST) ")[2]
        for target in ("test", "test-slow", "test-experiments")
    }
    assert recipes == {
        "test": '--ignore tests/experiments -m "not slow and not integrations"',
        "test-slow": '--ignore tests/experiments -m "slow and not integrations"',
        "test-experiments": "tests/experiments",
    }


def test_hooks_of_pre_commit_run_the_checks_and_download_nothing() -> None:
    [repository] = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert repository["repo"] == "local"
    assert {hook["language"] for hook in repository["hooks"]} == {"system"}
    recipe = MAKEFILE.split("\ncheck:")[1].split("\n\n")[0].splitlines()[1:]
    checks = [line.strip().replace("$(BIN)", ".venv/bin").removesuffix(" .") for line in recipe]
    assert [hook["entry"] for hook in repository["hooks"]] == checks


@pytest.mark.parametrize("name", ["SECURITY.md", "CITATION.cff"])
def test_no_person_and_no_address_is_named(name: str) -> None:
    text = (ROOT / name).read_text()
    assert not re.search(r"://|www\.|@", text)


def test_citation_is_of_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["authors"] == [{"name": "The gpuflow authors"}]
    assert (citation["version"], citation["license"]) == (PROJECT["version"], PROJECT["license"])


def test_pins_hold_the_tested_pair_and_every_dependency() -> None:
    assert (pins()["torch"], pins()["torchvision"]) == ("2.11.0", "0.26.0")
    extras = PROJECT["optional-dependencies"]
    needed = [
        *PROJECT["dependencies"],
        *(entry for name in ("dev", "docs", "plots", "samples") for entry in extras[name]),
    ]
    assert {base_name(requirement) for requirement in needed} <= set(pins())


def test_extras_that_are_named_exist() -> None:
    from gpuflow import errors

    modules = [path.read_text() for path in sorted((ROOT / "gpuflow").rglob("*.py"))]
    named = {
        extra
        for text in [*PAGES.values(), *modules]
        for group in re.findall(r"(?:gpuflow|'\.)\[([a-z,]+)\]", text)
        for extra in group.split(",")
    }
    raised = {
        call.args[2].value
        for text in modules
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
    links = [link for link in re.findall(r"\]\(([^)]+)\)", PAGES[page]) if "://" not in link]
    assert links or page not in ("README.md", "CONTRIBUTING.md")
    for link in links:
        assert ((ROOT / page).parent / link.split("#")[0]).exists(), f"{link} is linked and does not exist"


@pytest.mark.parametrize(
    "page", [*PAGES, *(path.relative_to(ROOT).as_posix() for path in sorted(ROOT.glob("experiments/**/*.md")))]
)
def test_a_page_has_one_title(page: str) -> None:
    """mkdocs takes each line that begins with # for a heading, also without a space after it."""
    text = re.sub(r"^( *)```.*?^\1```", "", (ROOT / page).read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#.*", text, flags=re.MULTILINE)
    assert [line for line in headings if not re.match(r"#{1,6} \S", line)] == []
    assert len([line for line in headings if line.startswith("# ")]) == 1


def test_commands_are_those_of_the_command_line() -> None:
    assert commands_in_table() == set(command_line())


@pages
def test_every_command_and_option_exists(page: str) -> None:
    known = command_line()
    for name, rest in re.findall(r"(?:^|-m )gpuflow ([a-z][a-z-]+)([^\n#]*)", code(PAGES[page]), flags=re.MULTILINE):
        assert name in known, f"gpuflow {name} is not a command"
        options = {option for parameter in known[name].params for option in parameter.opts}
        assert set(re.findall(r"(?<=\s)--[a-z0-9-]+", rest)) <= options, f"gpuflow {name}{rest}"


def test_stages_are_those_of_the_table() -> None:
    from gpuflow.stages import STAGES

    section = PAGES["docs/reference/yaml.md"].split("## Stages")[1].split("\n## ")[0]
    assert re.findall(r"^\| `([a-z_]+)` \|", section, flags=re.MULTILINE) == list(STAGES)


def test_keys_of_run_are_those_of_the_table() -> None:
    from gpuflow.config import RunSpec

    section = PAGES["docs/reference/yaml.md"].split("## How it runs")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (`[a-z_`, ]+`) \|", section, flags=re.MULTILINE)
    assert {key for row in rows for key in re.findall(r"[a-z_]+", row)} - {"run"} == set(RunSpec.model_fields)


def test_usual_extensions_are_those_of_the_code() -> None:
    from gpuflow.sources.folder import EXTENSIONS
    from gpuflow.sources.tar import IMAGE_EXTENSIONS

    [row] = re.findall(r"^\| `extensions` \|.*", PAGES["docs/reference/yaml.md"], flags=re.MULTILINE)
    assert f"of a folder: {', '.join(EXTENSIONS).replace('.', '')}; in shards: {', '.join(IMAGE_EXTENSIONS)} |" in row


def test_every_key_of_a_source_is_explained() -> None:
    from gpuflow.sources import KINDS

    section = PAGES["docs/reference/yaml.md"].split("## Sources")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (`[a-z_`, ]+`) \|", section, flags=re.MULTILINE)
    keys = {key for kind in KINDS.values() for key in kind.key_fields()}
    assert {key for row in rows for key in re.findall(r"[a-z_]+", row)} == keys
    section = PAGES["docs/sources.md"].split("\n## ")[0]
    assert re.findall(r"^\| `([a-z_]+): ", section, flags=re.MULTILINE) == list(KINDS)


@code_blocks("yaml")
def test_yaml_blocks_are_valid_configs(text: str, tmp_path: Path) -> None:
    """A whole file, or a part of one: a list of stages, or blocks without a source or pipelines."""
    from gpuflow.config import read_config
    from gpuflow.stages import STAGES

    part = yaml.safe_load(text)
    if isinstance(part, list):
        part = {"pipelines": {"train": {"stages": part}}}
    assert isinstance(part, dict)
    whole = {
        "source": {"folder": "data/photos"},
        "pipelines": {"train": {"stages": ["decode", {"center_crop": {"size": 8}}]}},
    } | part
    if whole == part:
        (tmp_path / "page.yaml").write_text(text)
    else:
        (tmp_path / "page.yaml").write_text(yaml.safe_dump(whole))
    read_config(tmp_path / "page.yaml", STAGES)


def test_the_config_of_the_readme_is_a_whole_file() -> None:
    [text] = blocks(README, "yaml")
    assert set(yaml.safe_load(text)) >= {"source", "preprocess", "pipelines", "serve", "run"}


@pages
def test_inline_code_stands_on_one_line(page: str) -> None:
    """Which the checks of commands rely on."""
    prose = re.sub(r"^```.*?^```", "", PAGES[page], flags=re.MULTILINE | re.DOTALL)
    assert [line for line in prose.splitlines() if line.count("`") % 2] == []


@code_blocks("python")
def test_python_blocks_parse(text: str) -> None:
    ast.parse(text)


# --- the site --------------------------------------------------------------------------------------------------------


def named(entry: Any) -> list[str]:
    """Return the pages of a part of the navigation."""
    if isinstance(entry, str):
        return [entry]
    return [page for part in (entry.values() if isinstance(entry, dict) else entry) for page in named(part)]


NO_GUIDES = {"benchmarks.md", "limits.md"}
WITHOUT_OUTPUT = {"remote.md", "tuning.md", "write_source.md"}
"""Guides that show no output yet: this list must only become shorter."""


def guides() -> list[str]:
    """Return the pages of the navigation's groups of guides."""
    groups = [group for group in yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"] if "Home" not in group]
    pages = [page for group in groups if not {"Reference", "Project"} & set(group) for page in named(group)]
    return [page for page in pages if page not in NO_GUIDES]


@pytest.mark.parametrize("page", guides())
def test_a_guide_is_short_and_shows_output(page: str) -> None:
    text = PAGES[f"docs/{page}"]
    assert len(text.split()) < 900
    assert bool(blocks(text, "text")) is (page not in WITHOUT_OUTPUT)


def test_guides_without_output_are_pages() -> None:
    assert set(guides()) >= WITHOUT_OUTPUT


def test_every_page_is_in_the_navigation_and_nothing_needs_a_network() -> None:
    settings = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    assert sorted(named(settings["nav"])) == sorted(page.removeprefix("docs/") for page in PAGES)
    assert settings["strict"] is True
    assert settings["theme"]["font"] is False
    assert {
        name for entry in settings["plugins"] for name in named([entry] if isinstance(entry, str) else list(entry))
    } == {
        "search",
        "mkdocstrings",
    }
    assert not {"site_url", "repo_url"} & set(settings)
    assert all((ROOT / "docs" / file).is_file() for file in settings["extra_css"] + settings["extra_javascript"])


def hooks() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_hooks", ROOT / "docs/hooks.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "tag",
    [
        '<script src="https://example.org/a.js"></script>',
        '<link rel="stylesheet" href="https://example.org/a.css">',
        '<img alt="" src="//example.org/a.png">',
    ],
)
def test_a_page_that_loads_from_the_network_fails_the_build(tag: str) -> None:
    from mkdocs.exceptions import BuildError

    page = SimpleNamespace(file=SimpleNamespace(src_uri="gpu.md"))
    module = hooks()
    fine = '<a href="https://example.org">there</a><script src="assets/a.js"></script>'
    assert module.on_post_page(fine, page=page, config=None) == fine
    with pytest.raises(BuildError, match=r"gpu\.md loads from the network"):
        module.on_post_page(f"<p>{tag}</p>", page=page, config=None)


@pytest.mark.parametrize(
    ("page", "link", "expected"),
    [
        ("gpu.md", "[a](../experiments/gpu_path/results.csv)", "[a](experiments/gpu_path/results.csv)"),
        ("reference/yaml.md", "[a](../gpu.md#memory)", "[a](../gpu.md#memory)"),
        ("gpu.md", "[a](../experiments/service)", "[a](experiments/service/README.md)"),
        ("gpu.md", "[the stages](../stages)", "the stages"),
        ("gpu.md", "[a](nowhere.md)", "[a](nowhere.md)"),
        ("gpu.md", "[a](https://example.org/b)", "[a](https://example.org/b)"),
    ],
)
def test_links_into_the_repository_lead_to_the_sites_copy(page: str, link: str, expected: str) -> None:
    file = SimpleNamespace(src_uri=page, generated_by=None)
    assert hooks().on_page_markdown(link, page=SimpleNamespace(file=file, meta={}), config=None, files=None) == expected


def test_the_reference_names_every_command_key_and_name() -> None:
    import gpuflow.serve
    import gpuflow.spec
    from gpuflow.config import RunSpec
    from gpuflow.stages import STAGES

    module = hooks()
    for public in (gpuflow, gpuflow.serve, gpuflow.spec):
        assert re.findall(r"^::: (\S+)$", module.names(public.__name__), flags=re.MULTILINE) == [
            f"{public.__name__}.{name}" for name in public.__all__
        ]
    assert re.findall(r"^### gpuflow (\S+)$", module.commands(), flags=re.MULTILINE) == list(command_line())
    keys = module.yaml_keys()
    run = module.yaml_keys("run")
    assert set(re.findall(r"^\| `([a-z_]+)` \|", run, flags=re.MULTILINE)) == set(RunSpec.model_fields)
    for name in STAGES:
        assert f"### `- {name}`\n" in keys


# --- figures ---------------------------------------------------------------------------------------------------------


def test_measured_table_is_that_of_results_csv() -> None:
    """Each figure of the table, and each ratio, comes from experiments/loader_cpu/results.csv."""
    with (ROOT / "experiments/loader_cpu/results.csv").open(newline="") as file:
        rates = {row["arm"]: float(row["value"]) for row in csv.DictReader(file) if row["metric"] == "images_per_s"}
    section = BENCHMARKS.split("## On two cores", 1)[1].split("\n## ", 1)[0]
    table = re.findall(r"^\| `([^`]+)`[^|]*\| ([\d,]+) \| ([\d.]+)x \|$", section, flags=re.MULTILINE)
    assert len(table) == 7
    for arm, rate, ratio in table:
        assert rate == f"{rates[arm]:,.0f}"
        assert ratio == f"{rates[arm] / rates['dataloader']:.2f}"


def test_measured_table_of_ordinary_photographs_is_that_of_web_csv() -> None:
    with (ROOT / "experiments/loader_cpu/web.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    workloads = list(dict.fromkeys(row["workload"] for row in rows))
    rates = {(row["arm"], row["workload"]): float(row["value"]) for row in rows}
    section = BENCHMARKS.split("## Ordinary photographs on two cores", 1)[1].split("\n## ", 1)[0]
    number = r" \| ([\d,]+) \| ([\d.]+)x"
    table = re.findall(rf"^\| `([^`]+)`[^|]*{number}{number} \|$", section, flags=re.MULTILINE)
    assert len(table) == 4 and len(workloads) == 2
    for arm, *figures in table:
        for workload, rate, ratio in zip(workloads, figures[::2], figures[1::2], strict=True):
            assert rate == f"{rates[arm, workload]:,.0f}"
            assert ratio == f"{rates[arm, workload] / rates['dataloader', workload]:.2f}"


def test_measured_table_on_a_gpu_is_that_of_results_csv() -> None:
    with (ROOT / "experiments/gpu_path/results.csv").open(newline="") as file:
        values = {
            (row["arm"], row["metric"], row["workload"].partition(";")[0]): row["value"] for row in csv.DictReader(file)
        }
    section = (ROOT / "experiments/gpu_path/README.md").read_text().split("| on a GPU,", 1)[1].split("\n\n", 1)[0]
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


def service_figures(form: str) -> dict[tuple[str | None, ...], float]:
    """By arm, groups of the workload's form, and metric: of experiments/service/results.csv."""
    with (ROOT / "experiments/service/results.csv").open(newline="") as file:
        return {
            (row["arm"], *found.groups(), row["metric"]): float(row["value"])
            for row in csv.DictReader(file)
            if (found := re.fullmatch(form, row["workload"]))
        }


ON_TWO_CORES = r"resnet18 by (\w+), 2 cores; 500x375; clients=(\d+)"
ON_A_GPU = r"resnet50 by torch \(CUDA graphs\), H200, 16 cores; (\w+); clients=(\d+)"


def test_measured_table_of_serving_is_that_of_results_csv() -> None:
    values = service_figures(ON_TWO_CORES)
    section = BENCHMARKS.split("| the same model |", 1)[1].split("\n\n", 1)[0]
    table = re.findall(r"^\| (\S.*), (\w+) \| ([\d.]+) \| ([\d.]+) \|$", section, flags=re.MULTILINE)
    assert len(table) == 4
    for name, engine, *shown in table:
        arm = "graph-cpu" if "gpuflow" in name else "plain"
        assert shown == [f"{values[arm, engine, '10', metric]:.1f}" for metric in ("qps", "tp99_ms")]


def test_short_table_of_the_readme_is_that_of_the_results() -> None:
    def values(experiment: str, file: str = "results.csv") -> dict[tuple[str, str, str], str]:
        with (ROOT / f"experiments/{experiment}/{file}").open(newline="") as text:
            return {(row["arm"], row["metric"], row["workload"]): row["value"] for row in csv.DictReader(text)}

    def pair(
        experiment: str, arms: tuple[str, str], metric: str, workload: str, form: str, file: str = "results.csv"
    ) -> list[str]:
        """The two arms' figures of the one workload whose words begin or end so."""
        found = [
            [
                value
                for (name, of, words), value in values(experiment, file).items()
                if (name, of) == (arm, metric) and (words.startswith(workload) or words.endswith(workload))
            ]
            for arm in arms
        ]
        return [format(float(value), form) for [value] in found]

    dali, scaling = ("gpuflow", "dali"), "random_resized_crop 224, flip, normalize; batch=128; workers=16"
    threads, transfer = ("gpuflow default", "dataloader-pil"), "transfer: same; workers=16"
    expected = [
        pair("worker_scaling", threads, "images_per_s", f"same: {scaling}", ",.0f"),
        pair("worker_scaling", threads, "images_per_s", f"web: {scaling}", ",.0f"),
        pair("worker_scaling", ("gpuflow", "spdl-io"), "images_per_s", transfer, ",.0f", "workloads.csv"),
        pair("worker_scaling", ("gpuflow-gpu", "dali-mixed"), "images_per_s", transfer, ",.0f", "workloads.csv"),
        pair("peers", ("gpuflow", "dataloader-tensors"), "images_per_s", f"500x375: {scaling}", ",.0f"),
        pair("peers", ("gpuflow-gpu", "dali-mixed"), "images_per_s", f"500x375: {scaling}", ",.0f", "gpu.csv"),
        pair("loader_cpu", ("gpuflow", "dataloader"), "images_per_s", "", ",.0f"),
        pair("real_data", dali, "images_per_s", "web; alone", ",.0f"),
        pair("real_data", dali, "step_ratio", "web; resnet50", ".3f"),
        pair("real_data", dali, "step_ratio", "web; resnet18", ".3f"),
        pair("real_data", dali, "step_ratio", "same; resnet18", ".3f"),
        pair("service", ("graph-cpu", "plain"), "qps", "resnet18 by torch, 2 cores; 500x375; clients=10", ".1f"),
        pair("service", ("graph-gpu", "plain"), "qps", "H200, 3 cores; 500x375; clients=10", ",.0f"),
    ]
    table = FIRST_SCREEN.split("| question |", 1)[1].split("\n\n", 1)[0]
    assert [
        list(row) for row in re.findall(r"([\d.,]*\d)[^|\d]* instead of (?:DALI's )?([\d.,]*\d)", table)
    ] == expected


@pytest.mark.slow
def test_first_lines_of_the_readme_print_what_it_shows(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    make_samples(tmp_path / "data/photos", 2000)
    command = [sys.executable, "-c", blocks(FIRST_SCREEN, "python")[0]]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == blocks(FIRST_SCREEN, "text")[0]


def test_ratios_of_a_service_on_a_gpu_are_those_of_results_csv() -> None:
    """`10 callers 7 to 12 times ... 1.3 to 2.0 times for 10 callers`: the ratios of both sizes, rounded."""
    values = service_figures(ON_A_GPU)
    expected = []
    for base, form in (("plain-eager", "{1} callers {0} times"), ("plain", "{0} times for {1}")):
        for clients in ("10", "40"):
            where = [(size, clients, "qps") for size in ("500x375", "1080x1080")]
            ratios = sorted(values["graph-gpu", *one] / values[base, *one] for one in where)
            digits = 0 if base == "plain-eager" else 1
            expected.append(form.format(" to ".join(f"{ratio:.{digits}f}" for ratio in ratios), clients))
    text = " ".join(BENCHMARKS.split()).replace("as many requests/s", "").replace("  ", " ")
    assert all(words in text for words in expected), expected


def test_levels_of_other_libraries_are_those_of_the_parity_report() -> None:
    log = (ROOT / "experiments/service/parity_h100.log").read_text()
    levels = dict(re.findall(r"^val against (\w+)\b[^@]*?\n  normalize, whole +(\d+)", log, flags=re.MULTILINE))
    pages = ("torchvision", "timm", "torchpipe")
    text = " ".join(" ".join(PAGES[f"docs/from_{library}.md"] for library in pages).split())
    assert f"the report has {levels['torchvision']} levels on those photographs" in text
    assert f"Against PIL images it has {levels['pillow']} level." in text
    assert f"against those the report has {levels['pillow']} level, for a bilinear resize" in text
    assert f"up to {levels['torchpipe_cpu']} levels away" in text


def linked(path: Path) -> set[Path]:
    """Return the files of the repository that a page links to."""
    found = re.findall(r"\]\(([^()\s#:]+)(?:#[^()\s]*)?\)", path.read_text()) if path.suffix == ".md" else []
    return {(path.parent / link).resolve() for link in found}


EXPERIMENTS = sorted(
    {
        path.parent if (path.parent / "README.md").exists() else path.parents[1]
        for path in (ROOT / "experiments").rglob("results.csv")
    }
)


@pytest.mark.parametrize("folder", EXPERIMENTS, ids=lambda path: path.relative_to(ROOT / "experiments").as_posix())
def test_results_are_two_links_away_and_beside_the_command_that_repeats_them(folder: Path) -> None:
    first = linked(ROOT / "README.md")
    assert folder / "README.md" in first.union(*map(linked, first))
    command = r"^(?:\S+=\S+ |timeout \d+ )*python (experiments/\S+\.py)(.*)"
    scripts = re.findall(command, code(commands_of(folder)), flags=re.MULTILINE)
    assert any(folder == (ROOT / script).parent for script, _ in scripts)
    for script, options in scripts:
        text = (ROOT / script).read_text()
        assert [option for option in re.findall(r" (--[a-z-]+)", options) if f'"{option}"' not in text] == []


def commands_of(folder: Path) -> str:
    """Return the README of an experiment, with the lines of each command joined."""
    return (folder / "README.md").read_text().replace("\\\n", " ")


def test_the_tree_in_the_architecture_names_every_module() -> None:
    """`kernels/` and the stages, which have their own table, stand there as folders."""
    tree = blocks((ROOT / "ARCHITECTURE.md").read_text(), "text")[0]
    names = re.findall(r"[\w*]+\.py", tree)
    modules = [path for path in (ROOT / "gpuflow").rglob("*.py") if path.name not in ("__init__.py", "__main__.py")]
    shown = [path for path in modules if path.parent.name not in ("kernels", "stages", "plots")]
    assert len(shown) > 100
    assert [path for path in shown if not any(fnmatch(path.name, name) for name in names)] == []
