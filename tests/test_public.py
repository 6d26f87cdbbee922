"""The public surface: what can be imported, what importing costs, stages of other packages."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import types
from pathlib import Path

import pytest

import gpuflow
from tests.datasets import make_photos, python, write_config
from tests.forking import Python

ROOT = Path(__file__).parents[1]
MODULES = sorted(
    module.name
    for module in pkgutil.walk_packages(gpuflow.__path__, "gpuflow.")
    if not module.name.startswith(("gpuflow.plots", "gpuflow.native._library"))
)


def test_everything_public_is_listed_and_there() -> None:
    assert gpuflow.__all__ == [
        "BadSampleError",
        "Batch",
        "ConfigError",
        "DecoderError",
        "GpuflowError",
        "Loader",
        "LoaderError",
        "LoaderTimeout",
        "MissingExtra",
        "PredictorError",
        "PredictorTimeout",
        "Preemption",
        "ServerFault",
        "SourceError",
        "StateError",
        "SystemFault",
        "TensorToTensor",
        "TooManyBadSamples",
        "Transform",
        "WrappedLoader",
        "bytes_loader",
        "cv2_resize",
        "load",
        "save_checkpoint",
        "serve_metrics",
        "stage_table",
        "transform",
        "wrap",
    ]
    for name in gpuflow.__all__:
        assert getattr(gpuflow, name) is not None
    public = {
        name
        for name, value in vars(gpuflow).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    }
    public -= {"TYPE_CHECKING", "annotations", "Any", "Literal", "Path", "Sequence"}
    assert public <= set(gpuflow.__all__)


def test_a_star_import_gives_what_is_listed() -> None:
    names: dict[str, object] = {}
    exec("from gpuflow import *", names)
    assert set(names) - {"__builtins__"} == set(gpuflow.__all__)


def test_lazy_names_are_the_real_ones() -> None:
    from gpuflow.loader.batch import Batch
    from gpuflow.loader.loader import Loader

    assert gpuflow.Batch is Batch
    assert gpuflow.Loader is Loader
    with pytest.raises(AttributeError) as caught:
        getattr(gpuflow, "loda")  # noqa: B009
    assert str(caught.value) == "module 'gpuflow' has no attribute 'loda'"


def test_there_are_modules() -> None:
    assert {"gpuflow.loader.loader", "gpuflow.sources.tar", "gpuflow.stages.flip", "gpuflow.cli"} <= set(MODULES)


@pytest.mark.parametrize("name", MODULES)
def test_every_module_imports_and_lists_what_it_offers_if_it_lists_names(name: str) -> None:
    try:
        module = importlib.import_module(name)
    except gpuflow.MissingExtra as error:
        pytest.skip(str(error))
    if not hasattr(module, "__all__"):
        return
    assert len(set(module.__all__)) == len(module.__all__)
    for public in module.__all__:
        assert hasattr(module, public), f"{name}.__all__ names {public}, which is not there"
    tree = ast.parse(Path(module.__file__ or "").read_text())
    defined = {
        node.name
        for node in tree.body
        if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef)) and not node.name.startswith("_")
    }
    if name not in PARTLY_INTERNAL:
        assert defined <= set(module.__all__), f"{name} defines {defined - set(module.__all__)}, which it does not list"


PARTLY_INTERNAL = {
    "gpuflow.tools.bench",  # the command line uses its parts
    "gpuflow.cli",  # one function a command
    "gpuflow.stages.center_crop",  # helpers of the other crops
    "gpuflow.sources.listing",
    "gpuflow.sources.tar",
}


def test_importing_is_cheap_and_changes_nothing() -> None:
    code = """
import os, sys, threading, warnings
before = len(os.listdir("/proc/self/fd")), warnings.filters[:], dict(os.environ)
import gpuflow, gpuflow.cli, gpuflow.errors
assert threading.active_count() == 1
assert (len(os.listdir("/proc/self/fd")), warnings.filters, dict(os.environ)) == before
heavy = {"torch", "torchvision", "cv2", "spdl", "yaml", "pydantic", "matplotlib", "fsspec"} & set(sys.modules)
assert not heavy, heavy
"""
    done = python(code)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_batch_on_the_cpu_imports_no_large_packages_but_torch(tmp_path: Path, python_with_torch: Python) -> None:
    """torchvision alone takes longer to import than everything else of a cold start."""
    make_photos(tmp_path / "photos", classes=2, each=4)
    config = write_config(tmp_path / "photos.yaml", tmp_path / "photos")
    code = """
import sys
import gpuflow
for pipeline in ("train", "val"):
    with gpuflow.load(sys.argv[1], pipeline) as loader:
        next(iter(loader))
heavy = {"torchvision", "torch._dynamo", "sympy", "triton", "matplotlib", "fsspec", "pyarrow"} & set(sys.modules)
assert not heavy, heavy
"""
    done = python_with_torch(code, str(config), CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stderr


def test_the_exception_tree_is_the_one_that_is_drawn() -> None:
    from gpuflow import errors

    drawn = [line for line in (errors.__doc__ or "").splitlines() if "GpuflowError" in line or "──" in line]
    names = [line.replace("│", " ").replace("├──", "").replace("└──", "").split()[0] for line in drawn]
    real = [name for name, found in vars(errors).items() if isinstance(found, type) and name.endswith(("Error", "out"))]
    assert set(names) >= set(real)
    for name in names:
        assert issubclass(getattr(errors, name), errors.GpuflowError)
    bases = {
        "ConfigError": ValueError,
        "SourceError": ValueError,
        "StateError": ValueError,
        "LoaderError": RuntimeError,
        "PredictorError": RuntimeError,
        "PredictorTimeout": TimeoutError,
    }
    bases |= {"LoaderTimeout": TimeoutError, "MissingExtra": ImportError, "BadSampleError": ValueError}
    for name, base in bases.items():
        assert issubclass(getattr(errors, name), base)


# --- stages of other packages -----------------------------------------------------------------------------------------

STAGE = '''
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from gpuflow.pipeline.stage import Opaque


@dataclass(frozen=True, kw_only=True, repr=False)
class Negative(Opaque):
    """Photographic negative."""

    stage_name: ClassVar[str] = "negative"

    strength: float = 1.0

    def faults(self) -> Iterator[tuple[str, str]]:
        if not 0 <= self.strength <= 1:
            yield "strength", f"must be within [0, 1], got {self.strength}"

    def apply(self, image, seed):
        return 255 - image
'''


def distribution(root: Path, entry_points: str, module: str = STAGE) -> Path:
    """A distribution as pip would leave it: a module, and metadata with entry points."""
    site = root / "site"
    metadata = site / "negative-1.0.dist-info"
    metadata.mkdir(parents=True)
    (site / "negative.py").write_text(module)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: negative\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[gpuflow.stages]\n{entry_points}\n")
    return site


def test_another_packages_stage_stands_in_yaml_like_ours(tmp_path: Path, python_with_torch: Python) -> None:
    site = distribution(tmp_path, "negative = negative:Negative")
    make_photos(tmp_path / "photos", classes=1, each=4)
    stages = [{"decode": {}}, {"resize": {"height": 24, "width": 24}}]
    plain = write_config(tmp_path / "plain.yaml", tmp_path / "photos", val=stages)
    inverted = write_config(tmp_path / "inverted.yaml", tmp_path / "photos", val=[*stages, {"negative": {}}])
    faulty = write_config(tmp_path / "faulty.yaml", tmp_path / "photos", val=[*stages, {"negative": {"strength": 2}}])
    code = """
import sys, gpuflow, torch
sys.path.insert(0, sys.argv[1])
assert list(gpuflow.stage_table())[-1] == "negative"
with gpuflow.load(sys.argv[2], "val") as plain, gpuflow.load(sys.argv[3], "val") as inverted:
    for (a, _), (b, _) in zip(plain, inverted, strict=True):
        assert torch.equal(255 - a, b)
    print(repr(inverted).split(";")[0])
try:
    gpuflow.load(sys.argv[4], "val")
except gpuflow.ConfigError as error:
    print(error)
"""
    done = python_with_torch(code, str(site), str(plain), str(inverted), str(faulty))
    assert done.returncode == 0, done.stderr
    shown, fault = done.stdout.splitlines()
    assert shown == "<gpuflow.Loader val: decode() -> resize(height=24, width=24) -> negative()"
    assert fault.startswith(f"{faulty}:")
    assert "negative.strength must be within [0, 1], got 2" in fault


def test_a_stage_name_that_is_taken_is_refused(tmp_path: Path) -> None:
    site = distribution(tmp_path, "flip = negative:Negative")
    code = """
import sys, gpuflow
sys.path.insert(0, sys.argv[1])
try:
    gpuflow.stage_table()
except gpuflow.GpuflowError as error:
    print(error)
"""
    done = python(code, str(site))
    assert done.stdout == "stage 'flip' of negative:Negative is already known; rename it or uninstall its package\n"


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        ("import no_such_package", "ModuleNotFoundError: No module named 'no_such_package'"),
        ("raise RuntimeError('too old')", "RuntimeError: too old"),
        ("", "AttributeError: module 'negative' has no attribute 'Negative'"),
    ],
)
def test_a_package_whose_stage_cannot_be_imported_is_named(module: str, reason: str, tmp_path: Path) -> None:
    site = distribution(tmp_path, "negative = negative:Negative", module)
    code = "import sys; sys.path.insert(0, sys.argv.pop(1)); from gpuflow.cli import main; main()"
    done = python(code, str(site), "schema")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        f"error: stage 'negative' of negative:Negative cannot be imported: {reason}; "
        "repair or uninstall the package 'negative'\n"
    )
