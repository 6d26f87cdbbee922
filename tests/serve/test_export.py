"""`gpuflow export`: the files that it writes, their checks, and that a file which fails them is not kept."""

from __future__ import annotations

import errno
import json
import re
import resource
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
import yaml
from numpy.typing import NDArray
from torch import nn

import gpuflow
from gpuflow.config import Config, read_config
from gpuflow.errors import ConfigError, GpuflowError, MissingExtra, SourceError, SystemFault
from gpuflow.pipeline import stage as s
from gpuflow.pipeline.stage import Pipeline
from gpuflow.serve import export
from gpuflow.serve.export import TOLERANCE, Check, _locating, export_model
from gpuflow.stages import STAGES
from tests.commands import Run, command_here
from tests.datasets import make_photos, truncate
from tests.serve.models import SIDE, UINT8, Models, engine


@pytest.fixture
def gpuflow_export(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs `gpuflow export` in this process."""
    return command_here(monkeypatch, capsys, "export")


def fault(act: Callable[[], object], kind: type[Exception] = ConfigError) -> str:
    with pytest.raises(kind) as caught:
        act()
    return str(caught.value)


# --- files ------------------------------------------------------------------------------------------------------------


def test_the_command_reports_its_checks(models: Models, gpuflow_export: Run, tmp_path: Path) -> None:
    out = tmp_path / "made" / "m.onnx"
    done = gpuflow_export(models.config, "--onnx", out, "--fold-normalize", "--opset", 19)
    assert (done.code, done.err) == (0, "")
    random, real, wrote, folded = done.out.splitlines()
    assert random.startswith("5 random images: logits differ by at most ") and random.endswith("top-1 agrees on 5")
    assert real.startswith("12 real images: logits differ by at most ") and real.endswith("top-1 agrees on 12")
    pipeline = Pipeline("serve", models.read().programs["serve"].pipeline.stages[:-1])
    assert (
        wrote
        == f"wrote {out} from {models.checkpoint}: takes uint8 [N, 3, 32, 32], preprocessing {pipeline.fingerprint}"
    )
    assert folded == (
        "normalize(mean='imagenet', std='imagenet', dtype='float32', layout='nchw') is inside: "
        "serve it with stages that end before it"
    )
    assert [path.name for path in out.parent.iterdir()] == ["m.onnx"]
    model = onnx.load(out)
    assert [entry.version for entry in model.opset_import if entry.domain == ""] == [19]
    (images,), (logits,) = model.graph.input, model.graph.output
    assert (images.name, logits.name) == ("images", "logits")
    assert images.type.tensor_type.elem_type == onnx.TensorProto.UINT8
    batch, *sides = images.type.tensor_type.shape.dim
    assert (batch.dim_param, [side.dim_value for side in sides]) == ("batch", [3, SIDE, SIDE])
    onnx.checker.check_model(model)


def test_the_files_contain_their_metadata(models: Models) -> None:
    pipeline = models.read().programs["serve"].pipeline
    expected = {
        "gpuflow": gpuflow.__version__,
        "classes": ["class_0", "class_1", "class_2"],
        "preprocessing": pipeline.fingerprint,
        "stages": list(pipeline.lines),
        "folded": None,
        "activation": "softmax",
    }
    properties = {entry.key: entry.value for entry in onnx.load(models.onnx).metadata_props}
    assert json.loads(properties["gpuflow"]) == expected
    with zipfile.ZipFile(models.pt2) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith("gpuflow.json")]
        assert json.loads(archive.read(name)) == expected


def test_a_checkpoint_lists_the_stages_of_validation(models: Models) -> None:
    state = torch.load(models.checkpoint, weights_only=True)
    assert state["stages"] == list(models.read().programs["val"].pipeline.lines)


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")  # torch's own, once a process
def test_a_program_has_a_dynamic_batch(models: Models) -> None:
    program = torch.export.load(models.pt2).module()
    for count in (1, 2, 7):
        assert program(torch.zeros(count, 3, SIDE, SIDE)).shape == (count, 3)


# --- which stages -----------------------------------------------------------------------------------------------------


def test_a_checkpoint_of_other_stages_is_refused(models: Models, tmp_path: Path) -> None:
    config = models.read("pipelines.val.stages.resize.shorter=40", "serve.stages.resize.shorter=40")
    text = fault(lambda: export_model(config, tmp_path / "m.pt2"))
    assert text.startswith(f"{models.checkpoint}: was trained with preprocessing ")
    assert "\n-resize(height=None, width=None, shorter=36," in text
    assert "\n+resize(height=None, width=None, shorter=40," in text
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("folded", [False, True])
def test_a_forced_export_states_the_stages_of_training(models: Models, folded: bool, tmp_path: Path) -> None:
    overrides = ["pipelines.val.stages.resize.shorter=40", "serve.stages.resize.shorter=40", "serve.model.force=true"]
    done = export_model(models.read(*overrides), tmp_path / "m.pt2", fold_normalize=folded)
    trained = models.read().programs["val"].pipeline
    assert (done.info.preprocessing, done.info.stages) == (trained.fingerprint, trained.lines)
    assert (done.info.folded is not None) is folded


def test_a_file_that_already_serves_a_folded_model_exports_by_val(models: Models, tmp_path: Path) -> None:
    document = yaml.safe_load(models.config.read_text())
    del document["serve"]["stages"][-1]
    (tmp_path / "x.yaml").write_text(yaml.safe_dump(document))
    done = export_model(read_config(tmp_path / "x.yaml", STAGES), tmp_path / "m.pt2", fold_normalize=True)
    assert engine(done.path, UINT8).info == done.info
    assert done.info.preprocessing == read_config(tmp_path / "x.yaml", STAGES).programs["serve"].pipeline.fingerprint


def without(models: Models, tmp_path: Path, change: Callable[[dict[str, Any]], None]) -> Config:
    """The configuration after `change`."""
    document = yaml.safe_load(models.config.read_text())
    change(document)
    (tmp_path / "x.yaml").write_text(yaml.safe_dump(document))
    return read_config(tmp_path / "x.yaml", STAGES)


def test_a_configuration_without_stages_for_the_model(models: Models, tmp_path: Path) -> None:
    def change(document: dict[str, Any]) -> None:
        del document["serve"], document["pipelines"]["val"]

    config = without(models, tmp_path, change)
    assert fault(lambda: export_model(config, tmp_path / "m.pt2")) == (
        f"{config.path}: must have a pipeline val or a block serve, whose stages the exported model goes with"
    )


@dataclass(frozen=True, kw_only=True, repr=False)
class Invert(s.Pointwise):
    """A stage without a form inside a model; its subclasses have a wrong form."""

    stage_name: ClassVar[str] = "invert"

    def output(self, spec: s.ImageSpec) -> s.ImageSpec:
        return spec.replace(dtype="float32", layout="hwc")

    def table(self) -> NDArray[Any]:
        return np.tile(np.arange(255, -1, -1, np.float32), (3, 1))


class Float(nn.Module):
    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images.float()


class Wrong(Invert):
    def module(self) -> nn.Module:
        return Float()


class Bytes(Invert):
    def module(self) -> nn.Module:
        return nn.Identity()


@pytest.mark.parametrize(
    ("stage", "kind", "text"),
    [
        (
            Invert,
            ConfigError,
            "{path}: the pipeline serve ends with invert(), which has no form inside a model; "
            "export without --fold-normalize",
        ),
        (
            Bytes,
            ConfigError,
            "torch cannot export this model: Input type (unsigned char) and bias type (float) should be the same; "
            "serve the checkpoint itself",
        ),
        (Wrong, GpuflowError, "invert(): its form inside a model differs from the stage itself"),
    ],
)
def test_a_last_stage_that_cannot_be_folded(
    stage: type[Invert], kind: type[Exception], text: str, models: Models, tmp_path: Path
) -> None:
    document = yaml.safe_load(models.config.read_text())
    for block in (document["serve"], document["pipelines"]["val"]):
        block["stages"][-1] = {"invert": {}}
    document["serve"]["model"]["force"] = True
    (tmp_path / "x.yaml").write_text(yaml.safe_dump(document))
    config = read_config(tmp_path / "x.yaml", {**STAGES, "invert": stage})
    found = fault(lambda: export_model(config, tmp_path / "m.pt2", fold_normalize=True), kind)
    assert found == text.format(path=config.path)


@pytest.mark.parametrize("folded", [False, True])
def test_images_of_half_precision_are_not_what_a_file_takes(models: Models, folded: bool, tmp_path: Path) -> None:
    half = [f"{block}.stages.normalize.dtype=float16" for block in ("serve", "pipelines.val")]
    config = models.read(*half, "serve.model.force=true")
    assert fault(lambda: export_model(config, tmp_path / "m.pt2", fold_normalize=folded)) == (
        f"{config.path}: the pipeline serve gives float16, which the checkpoint's float32 weights do not take in a "
        "file; export with dtype: float32 in normalize, or serve the checkpoint itself"
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["m.pt2", "m.onnx"])
def test_a_file_for_which_the_disk_has_no_space(name: str, models: Models, tmp_path: Path) -> None:
    out = tmp_path / name
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))  # every longer file fails as on a full disk
    try:
        with pytest.raises(OSError, match="File too large") as caught:
            export_model(models.read(), out)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert caught.value.filename == str(out)
    assert list(tmp_path.iterdir()) == []


def test_weights_that_no_onnx_file_can_hold(
    models: Models, gpuflow_export: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are in a second file in its directory. Another export replaces both files."""
    monkeypatch.setattr(export, "_MOST_IN_ONNX", 1)
    out, other = tmp_path / "m.onnx", tmp_path / "m.onnx.0123abcd.data"
    other.write_bytes(b"of no model")
    first = export_model(models.read(), out).weights
    assert first is not None and first.is_file() and re.fullmatch(r"m\.onnx\.[0-9a-f]{8}\.data", first.name)
    assert out.stat().st_size < first.stat().st_size
    done = gpuflow_export(models.config, "--onnx", out)
    (second,) = {*tmp_path.iterdir()} - {out, other}
    assert (done.code, second != first) == (0, True)
    assert done.out.splitlines()[-1] == f"wrote {second}: its weights; keep both files in one folder, under these names"
    image = torch.zeros(2, 3, SIDE, SIDE)
    with monkeypatch.context() as failing:
        failing.setattr(export, "TOLERANCE", -1.0)
        with pytest.raises(GpuflowError, match="is not what"):
            export_model(models.read(), out)
    assert {*tmp_path.iterdir()} == {out, other, second}
    files = out, models.onnx
    runs = [onnxruntime.InferenceSession(str(path)).run(None, {"images": image.numpy()})[0] for path in files]
    np.testing.assert_array_equal(*runs)


def test_a_link_stays_and_its_file_is_written(models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The form is that of the link's name, and weights in a second file lie where the first one does."""
    monkeypatch.setattr(export, "_MOST_IN_ONNX", 1)
    (tmp_path / "files").mkdir()
    link, file = tmp_path / "m.onnx", tmp_path / "files" / "of_may"
    link.symlink_to("files/of_may")
    weights = export_model(models.read(), link).weights
    assert link.is_symlink()
    assert {*tmp_path.iterdir()} == {link, file.parent}
    assert {*file.parent.iterdir()} == {file, weights}
    onnx.load(str(file))


def test_a_full_disk_is_a_fault_of_the_system() -> None:
    with pytest.raises(SystemFault) as caught, _locating(Path("made/m.pt2")):
        raise OSError(errno.ENOSPC, "No space left on device", "made/.m.pt2.01234567.pt2")
    assert str(caught.value) == f"[Errno {errno.ENOSPC}] No space left on device; free disk space: 'made/m.pt2'"


# --- checking ---------------------------------------------------------------------------------------------------------


def test_a_model_that_fails_the_check_is_not_written(models: Models, gpuflow_export: Run, tmp_path: Path) -> None:
    """With a NaN among the weights, no logit is within the tolerance."""
    state = torch.load(models.checkpoint, weights_only=True)
    state["model"]["classifier.1.bias"][0] = torch.nan
    broken, out = tmp_path / "broken.pt", tmp_path / "m.pt2"
    torch.save(state, broken)
    out.write_bytes(b"an earlier one")
    done = gpuflow_export(models.config, "--pt2", out, "--checkpoint", broken)
    assert (done.code, done.out) == (1, "")
    assert done.err == (
        f"error: {out}: is not what {broken} computes, so it is not written: 5 random images: "
        "logits differ by at most nan, allowed 0.0001; top-1 agrees on 5\n"
    )
    assert out.read_bytes() == b"an earlier one"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["broken.pt", "m.pt2"]


def test_the_tolerance_is_stated_in_each_check(models: Models, tmp_path: Path) -> None:
    done = export_model(models.read(), tmp_path / "m.pt2")
    assert [check.images for check in done.checks] == ["random", "real"]
    for check in done.checks:
        assert 0 <= check.difference <= check.allowed
        assert check.allowed >= TOLERANCE
    check = Check(images="real", count=8, difference=1.26e-6, allowed=3e-4, agree=7)
    assert str(check) == "8 real images: logits differ by at most 1.3e-06, allowed 0.0003; top-1 agrees on 7"


def test_images_from_a_directory(models: Models, tmp_path: Path) -> None:
    """In place of the source, which may be on another machine; files that cannot be decoded are left out."""
    files = make_photos(tmp_path / "images", classes=2, each=3)
    truncate(files[0])
    (tmp_path / "images" / "notes.txt").write_text("no image")
    config = models.read("source.folder=/no/where")
    done = export_model(config, tmp_path / "m.pt2", data=tmp_path / "images")
    assert done.checks[1].count == 5


def test_no_images_to_check_on(models: Models, tmp_path: Path) -> None:
    out = tmp_path / "m.pt2"
    config = models.read("source.folder=/no/where")
    text = fault(lambda: export_model(config, out), SourceError)
    assert text.endswith("; check the path; or name a directory of images to check the model on: --data")
    (tmp_path / "empty").mkdir()
    assert fault(lambda: export_model(config, out, data=tmp_path / "empty")) == (
        f"{tmp_path}/empty: has no image that can be decoded to check the model on; try --data"
    )
    for file in make_photos(tmp_path / "bad", classes=3, each=1):
        truncate(file)
    bad = models.read(f"source.folder={tmp_path}/bad")
    assert fault(lambda: export_model(bad, out)) == (
        f"{bad.path}: source has no image that can be decoded to check the model on; try --data"
    )


@pytest.mark.parametrize(("opener", "method"), [("open_split", "read"), ("open_engine", "run")])
def test_an_error_leaves_no_source_or_engine_open(
    opener: str, method: str, models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[bool] = []

    class Failing:
        classes = ()

        def __init__(self, *arguments: object, **settings: object) -> None:
            pass

        def __len__(self) -> int:
            return 1

        def close(self) -> None:
            closed.append(True)

    def fail(self: object, *arguments: object) -> None:
        raise MemoryError

    setattr(Failing, method, fail)
    monkeypatch.setattr(export, opener, Failing)
    with pytest.raises(MemoryError):
        export_model(models.read(), tmp_path / "m.pt2")
    assert closed == [True]


# --- options ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((), "export: needs exactly one of --onnx, --pt2"),
        (("--onnx", "a.onnx", "--pt2", "a.pt2"), "export: needs exactly one of --onnx, --pt2"),
        (("--onnx", "a.pt2"), "--onnx: must name a .onnx file, got 'a.pt2'"),
        (("--pt2", "a"), "--pt2: must name a .pt2 file, got 'a'"),
    ],
)
def test_exactly_one_output(arguments: tuple[str, ...], text: str, models: Models, gpuflow_export: Run) -> None:
    done = gpuflow_export(models.config, *arguments)
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith(f"error: {text}")


def test_a_missing_checkpoint(models: Models, tmp_path: Path) -> None:
    """By default that of serve.model.file; if there is none, the last one of the training."""
    out = f"train.out={tmp_path}/none"
    for name, override in (
        ("best.pt", f"serve.model.file={tmp_path}/none/best.pt"),
        ("last.pt", "serve.model.file=m.onnx"),
        ("last.pt", "serve.model=null"),
    ):
        config = models.read(out, override)
        assert fault(lambda config=config: export_model(config, tmp_path / "m.pt2")) == (  # type: ignore[misc]
            f"{tmp_path}/none/{name}: no such checkpoint; run gpuflow train first, or name one with --checkpoint"
        )


def test_opsets_that_torch_writes(models: Models, tmp_path: Path, gpuflow_export: Run) -> None:
    for opset in (17, 26):
        assert fault(lambda opset=opset: export_model(models.read(), tmp_path / "m.onnx", opset=opset)) == (  # type: ignore[misc]
            f"--opset must be within 18 and 25, got {opset}"
        )
    assert gpuflow_export(models.config, "--onnx", tmp_path / "m.onnx", "--opset", 17).code == 2


@pytest.mark.parametrize("package", ["onnx", "onnxruntime", "onnxscript"])
def test_exporting_to_onnx_is_an_extra(
    package: str, models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    assert fault(lambda: export_model(models.read(), tmp_path / "m.onnx"), MissingExtra) == (
        f"exporting to ONNX needs {package}, which is not installed; pip install 'gpuflow[export]'"
    )
