"""The release workflow, and what a package index shows of the project."""

from __future__ import annotations

import importlib.util
import re
import tomllib
import zipfile
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from tests.packaging.wheel import check_wheel

ROOT = Path(__file__).parents[2]
PROJECT = (ROOT / "pyproject.toml").read_text()
TAG = f"v{tomllib.loads(PROJECT)['project']['version']}"
ADDRESS = "https://host/owner/name"
JOBS = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())["jobs"]
CI = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]


def release() -> ModuleType:
    spec = importlib.util.spec_from_file_location("release", ROOT / ".github/release.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_links_of_the_readme_work_on_an_index() -> None:
    readme = (ROOT / "README.md").read_text()
    relative = [link for link in re.findall(r"\]\(([^)]+)\)", readme) if "://" not in link]
    page = release().with_addresses(readme, TAG, ADDRESS)
    links = re.findall(r"\]\(([^)]+)\)", page)
    assert [link for link in links if "://" not in link] == []
    assert len([link for link in links if link.startswith(ADDRESS)]) == len(relative) > 20
    assert re.sub(rf"{ADDRESS}/(?:blob|raw|tree)/{TAG}/", "", page) == readme


@pytest.mark.parametrize(
    ("link", "expected"),
    [
        ("[a](docs/gpu.md#memory)", f"[a]({ADDRESS}/blob/v1/docs/gpu.md#memory)"),
        ("[a](configs)", f"[a]({ADDRESS}/tree/v1/configs)"),
        ("| ![a](docs/a.png) |", f"| ![a]({ADDRESS}/raw/v1/docs/a.png) |"),
        ("[a](https://example.org/b)", "[a](https://example.org/b)"),
        ("[a](#start)", "[a](#start)"),
    ],
)
def test_a_relative_link_becomes_an_absolute_one(link: str, expected: str) -> None:
    assert release().with_addresses(link, "v1", ADDRESS) == expected


def test_an_index_gets_the_addresses_of_the_project() -> None:
    text = release().project_with_addresses(PROJECT, TAG, ADDRESS)
    assert release().project_with_addresses(text, TAG, ADDRESS) == text
    project = tomllib.loads(text)["project"]
    assert set(project["urls"]) == {"Source", "Documentation", "Changelog", "Issues"}
    assert all(url.startswith(ADDRESS) for url in project["urls"].values())
    assert project["readme"] == ".github/README.md"
    for path in re.findall(rf"{ADDRESS}/blob/{TAG}/(\S+)", " ".join(project["urls"].values())):
        assert (ROOT / path).exists()


def test_a_tag_of_another_version_is_refused() -> None:
    with pytest.raises(ValueError, match=r"the tag must be v[0-9.]+, for the version of pyproject.toml, got v9.9"):
        release().project_with_addresses(PROJECT, "v9.9", ADDRESS)


def test_nothing_is_published_before_all_is_built_and_tested() -> None:
    assert set(JOBS["publish"]["needs"]) == set(JOBS) - {"publish"}
    assert JOBS["test"]["needs"] == "wheels"
    commands = {name: [step.get("run", "") for step in job["steps"]] for name, job in JOBS.items()}
    prepared = [name for name, runs in commands.items() if any(".github/release.py" in run for run in runs)]
    assert prepared == ["sources", "wheels"]


def test_only_the_job_that_publishes_may_write() -> None:
    allowed = [name for name, job in JOBS.items() if "write" in job.get("permissions", {}).values()]
    assert allowed == ["publish"]
    assert JOBS["publish"]["permissions"]["id-token"] == "write"
    assert [job["timeout-minutes"] for job in JOBS.values() if job["timeout-minutes"] > 60] == []


def test_classifiers_name_the_versions_of_python_that_ci_runs() -> None:
    named = re.findall(r"Programming Language :: Python :: (3\.\d+)", PROJECT)
    assert named == CI["ci"]["strategy"]["matrix"]["python"] == JOBS["test"]["strategy"]["matrix"]["python"]


def test_ci_tests_the_wheel() -> None:
    assert CI["wheel"]["steps"][-1] == {"run": "make test-wheel"}


@pytest.mark.parametrize(
    ("name", "files", "rule"),
    [
        ("gpuflow-0.1.0-py3-none-any.whl", ("gpuflow/a.py",), "must have the tag cp311-abi3"),
        ("gpuflow-0.1.0-cp311-cp311-linux_x86_64.whl", ("gpuflow/a.py",), "must have the tag cp311-abi3"),
        ("gpuflow-0.1.0-cp311-abi3-linux_x86_64.whl", ("gpuflow/a.py", "tests/a.py"), "must hold gpuflow alone"),
    ],
)
def test_a_wheel_for_one_python_or_with_other_packages_is_refused(
    tmp_path: Path, name: str, files: tuple[str, ...], rule: str
) -> None:
    with zipfile.ZipFile(tmp_path / name, "w") as wheel:
        for file in (*files, "gpuflow/native/_library.abi3.so"):
            wheel.writestr(file, b"")
    with pytest.raises(SystemExit, match=rule):
        check_wheel(tmp_path / name, tmp_path)
