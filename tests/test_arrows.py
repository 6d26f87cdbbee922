"""Which way imports run: the engine knows no stage, one file a foreign library, figures know nothing but CSV.

Which package may import which is import-linter's to say: `lint-imports`, with its layers in pyproject.toml.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

from gpuflow.pipeline import stage as spec
from gpuflow.stages import STAGES

ROOT = Path(__file__).parents[1]
ENGINE = sorted(
    path
    for path in (ROOT / "gpuflow").rglob("*.py")
    if not {"stages", "plots"} & set(path.relative_to(ROOT / "gpuflow").parts)
)
STAGE_FILES = sorted((ROOT / "stages").glob("*.py"))
PLOTS = sorted((ROOT / "plots").glob("*.py"))
EXPERIMENTS = sorted((ROOT / "experiments").rglob("*.py"))


@cache
def imports(path: Path) -> set[str]:
    """Every module that a file imports, anywhere in it; `from a import b` counts as a and as a.b."""
    found = set[str]()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: imports are absolute"
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def importers(files: list[Path], package: str) -> set[str]:
    """Names of the files that import a package or something in it."""
    return {
        str(path.relative_to(ROOT))
        for path in files
        if any(name == package or name.startswith(f"{package}.") for name in imports(path))
    }


def test_the_files_are_found() -> None:
    assert len(ENGINE) > 100
    shared = {"__init__", "policy_parts", "timm_parts", "torch_parts"}
    assert {path.stem for path in STAGE_FILES} >= shared
    assert len(STAGE_FILES) == len(STAGES) + len(shared), (
        "a file a stage, the table, what policies share, timm's part and torch's"
    )
    assert PLOTS and EXPERIMENTS


def test_one_file_reads_yaml() -> None:
    assert importers([*ENGINE, *STAGE_FILES, *PLOTS], "yaml") == {"gpuflow/config/yaml_file.py"}


def test_documents_are_checked_with_pydantic_where_they_are_read() -> None:
    """Those of users, of other libraries and of a service's callers."""
    files = importers([*ENGINE, *STAGE_FILES, *PLOTS], "pydantic")
    names = "models", "reader", "schema", "words"
    importers_of = {f"gpuflow/migration/{name}.py" for name in ("from_huggingface", "from_timm", "imported")}
    assert files == {f"gpuflow/config/{name}.py" for name in names} | importers_of | {
        "gpuflow/serve/http/open_inference.py"
    }


def test_one_file_lowers_to_spdl() -> None:
    """The benchmark runs SPDL as a loader to compare with."""
    assert importers([*ENGINE, *STAGE_FILES, *PLOTS], "spdl") == {
        "gpuflow/loader/lowering.py",
        "gpuflow/tools/bench.py",
    }


def test_one_file_runs_torchpipe() -> None:
    """omniback is its scheduler."""
    for package in "torchpipe", "omniback":
        assert importers([*ENGINE, *STAGE_FILES, *PLOTS], package) == {"gpuflow/torchpipe/adapter.py"}


def test_the_engine_gets_the_table_of_stages_as_an_argument() -> None:
    """torchpipe makes the nodes of a graph, and hands them nothing but text."""
    assert importers(ENGINE, "gpuflow.stages") == {"gpuflow/vocabulary.py"}
    fetch = {"integrations/lightning.py", "integrations/ray.py", "integrations/timm.py", "migration/wrap.py"}
    fetch |= {"__init__.py", "cli.py", "tools/bench.py", "tools/predict.py", "serve/__init__.py", "torchpipe/nodes.py"}
    assert importers(ENGINE, "gpuflow.vocabulary") == {f"gpuflow/{name}" for name in fetch}


def test_the_engine_mentions_no_stage_by_name() -> None:
    """Neither a class of a stage nor its name where code compares or looks up. Texts for people may name one."""
    classes = {stage.__name__ for stage in STAGES.values()} - set(spec.__all__)  # a move may be called as a stage
    for path in ENGINE:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Name):
                assert node.id not in classes, f"{path}:{node.lineno}: names the stage {node.id}"
            if not isinstance(node, (ast.Compare, ast.Subscript)):
                continue
            for part in ast.walk(node):
                if isinstance(part, ast.Constant) and part.value in STAGES:
                    if str(path.relative_to(ROOT)) in TRANSLATORS:
                        continue
                    place = f"{path.relative_to(ROOT)}: {part.value}"
                    assert place in EXCUSED, f"{path}:{node.lineno}: asks for the stage {part.value!r} by name"


EXCUSED = {
    "gpuflow/tools/bench.py: normalize",
    "gpuflow/tools/bench.py: decode",
    "gpuflow/config/schema.py: decode",
    "gpuflow/migration/sources.py: torchvision",
}
"""The comparison normalizes by the batch, as people do who use the other loaders, and has workloads so named; views
share the key `decode`; what is imported may be of the library that a stage is named after."""
TRANSLATORS = {
    "gpuflow/integrations/timm.py",
    "gpuflow/migration/from_albumentations.py",
    "gpuflow/migration/from_timm.py",
    "gpuflow/migration/from_torchvision.py",
}
"""These make stages of another library's parameters, some of which have the same names."""


def test_packages_import_from_lower_layers_alone() -> None:
    """Every import counts, lazy ones and those for type checking too. The layers stand in pyproject.toml."""
    code = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout


def test_stages_import_values_of_the_pipeline_alone() -> None:
    for path in STAGE_FILES:
        ours = {name for name in imports(path) if name.startswith("gpuflow")}
        assert all(name.split(".")[1:2] in ([], ["arrays"], ["errors"], ["pipeline"], ["stages"]) for name in ours), (
            f"{path}: {ours}"
        )


def test_figures_read_csv_and_nothing_of_ours() -> None:
    for path in PLOTS:
        ours = {name for name in imports(path) if name.split(".")[0] in ("gpuflow", "stages", "experiments", "tests")}
        assert all(name.startswith("gpuflow.plots") for name in ours), f"{path}: imports {ours}"


def test_nothing_imports_an_experiment_or_a_test() -> None:
    files = [*ENGINE, *STAGE_FILES, *PLOTS, *EXPERIMENTS]
    assert importers(files, "experiments") == importers(files, "tests") == set()
