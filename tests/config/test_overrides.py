"""overrides: dotted assignments, and the problems that they cause."""

from __future__ import annotations

import pytest

from gpuflow.config import BatchSpec
from gpuflow.stages import CenterCrop, Decode, Flip, Normalize, RandomResizedCrop, Resize, Torchvision
from tests.config.files import FULL, SMALL, fault, read, with_block

# --- overrides -------------------------------------------------------------------------------------------------------


def test_overrides() -> None:
    config = read(
        FULL,
        "run.threads=8",
        "train.lr=1e-4",
        "pipelines.train.stages.flip.vertical=0.25",
        "pipelines.train.stages.1.random_resized_crop.size=[160, 128]",
        "pipelines.train.stages.normalize.dtype=float16",
        "pipelines.train.stages.torchvision.bits=3",
        "pipelines.train.batch={global: 64}",
        "source.folder=else=where",
        "serve.model.engine=onnxruntime",
        "run.bad_file=",
    )
    assert (config.run.threads, config.train.lr) == (8, 1e-4)
    assert config.program("train").pipeline.stages == (
        Decode(),
        RandomResizedCrop(size=(160, 128)),
        Flip(horizontal=0.5, vertical=0.25),
        Torchvision(name="RandomPosterize", parameters=(("bits", 3),)),
        Normalize(dtype="float16"),
    )
    assert config.pipelines["train"].batch == BatchSpec(**{"global": 64})  # type: ignore[arg-type]
    assert config.source.where == "else=where"
    assert config.serve is not None and config.serve.model is not None
    assert config.serve.model.engine == "onnxruntime"
    assert config.run.bad_file == ""


def test_an_override_of_a_shared_list_changes_all_who_share_it() -> None:
    config = read(FULL, "pipelines.val.stages.resize.shorter=300", "serve.stages.center_crop.size=200")
    for name in ("val", "serve"):
        assert config.programs[name].pipeline.stages[1:3] == (Resize(shorter=300), CenterCrop(size=200))
    assert config.program("train") == read(FULL).program("train")


SHARED = """\
source: {folder: x}
preprocess: &eval [decode, resize: {height: 8, width: 8}, normalize]
pipelines: {val: {stages: *eval}}
serve: {stages: *eval}
"""
MERGED = """\
source: {folder: x}
preprocess: {size: &size {height: 8}}
pipelines: {val: {stages: [decode, resize: {<<: *size, width: 8}]}}
"""


def test_an_override_of_what_preprocess_holds_changes_all_who_share_it() -> None:
    config = read(SHARED, "preprocess.resize.height=9", "preprocess.2={normalize: {dtype: float16}}")
    for name in ("val", "serve"):
        assert config.programs[name].pipeline.stages[1:] == (Resize(height=9, width=8), Normalize(dtype="float16"))


@pytest.mark.parametrize(
    ("text", "override", "at"),
    [
        (SHARED, "preprocess=[decode, center_crop: {size: 8}]", "preprocess"),
        (SMALL, "preprocess=[decode]", "preprocess"),
        (MERGED, "preprocess.size.height=9", "preprocess.size.height"),
    ],
)
def test_an_override_that_no_pipeline_would_see_is_an_error(text: str, override: str, at: str) -> None:
    assert fault(text, override) == f"override {override!r}: {at} config.override"


def test_overrides_of_stages_that_are_no_more_than_a_name() -> None:
    config = read(FULL, "pipelines.val.stages.decode.max_pixels=99999", "pipelines.val.stages.resize={longer: 300}")
    assert config.program("val").pipeline.stages[:2] == (Decode(max_pixels=99_999), Resize(longer=300))
    config = read(
        FULL,
        "pipelines.val.stages.1={resize: {longer: 300}}",
        *("pipelines.new.stages=[decode, center_crop: {size: 8}]", "pipelines.new.split=all"),
    )
    assert config.program("val").pipeline.stages[1] == Resize(longer=300)
    assert config.program("new").pipeline.stages == (Decode(), CenterCrop(size=8))
    listed = read(with_block("source: {listing: x, classes: [a, b]}"), "source.classes.1=c")
    assert listed.source.classes == ("a", "c")


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("run.threads", ": config.override"),
        ("=3", ": config.override"),
        ("", ": config.override"),
        ("run.threads={", ": config.yaml"),
        ("run.threads=2020-99-99", ": config.yaml"),
        ("run.threads={a: 1, a: 2}", ": config.yaml"),
        ("run.threads=!!python/name:os.system", ": config.yaml"),
        ("run.threads=0", ": run.threads config.range, got 0"),
        ("run.thread=3", ": run.thread config.unknown_key"),
        ("run=3", ": run config.type, got 3"),
        ("run.threads.x=3", ": run.threads config.override"),
        ("run..x=3", ": run. config.unknown_key"),
        ("x.y=3", ": x config.unknown_key"),
        ("pipelines.train.stages.9.flip={}", ": pipelines.train.stages config.override"),
        ("pipelines.train.stages.²=flip", ": pipelines.train.stages config.override"),
        ("pipelines.train.stages.flp.vertical=1", ": pipelines.train.stages config.override"),
        ("pipelines.train.stages.flip.vertical=2", ": pipelines.train.stages[2].flip.vertical config.range, got 2"),
        ("pipelines.train.stages.flip={vertical: 2}", ": pipelines.train.stages[2].flip.vertical config.range, got 2"),
        ("pipelines.train.stages.2=flop", ": pipelines.train.stages[2].flop stage.unknown"),
    ],
)
def test_bad_overrides(override: str, expected: str) -> None:
    assert fault(FULL, override) == f"override {override!r}{expected}"


def test_a_stage_that_is_only_a_name_is_entered_by_its_number() -> None:
    config = read(FULL, "pipelines.val.stages.0.decode.max_scans=9")
    assert config.program("val").pipeline.stages[0] == Decode(max_scans=9)
    override = "pipelines.val.stages.0.resize.shorter=8"
    assert fault(FULL, override) == f"override '{override}': pipelines.val.stages[0] config.override"


def test_lists_that_hold_no_stages_are_entered_by_number() -> None:
    assert fault(with_block("pipelines: {a: {stages: [{}]}}"), "pipelines.a.stages.flip.vertical=1") == (
        "override 'pipelines.a.stages.flip.vertical=1': pipelines.a.stages config.override"
    )
    assert fault(with_block("pipelines: {a: {stages: []}}"), "pipelines.a.stages.0=flip") == (
        "override 'pipelines.a.stages.0=flip': pipelines.a.stages config.override"
    )


def test_faults_of_a_shared_override_name_it_everywhere() -> None:
    override = "pipelines.val.stages.resize.shorter=0"
    assert fault(FULL, override) == (
        f"override '{override}': pipelines.val.stages[1].resize.shorter config.range, got 0\n"
        f"override '{override}': serve.stages[1].resize.shorter config.range, got 0"
    )


def test_the_files_faults_come_first_and_a_later_override_wins() -> None:
    assert fault(SMALL + "run: {prefetch: 0}\n", "run.threads=0", "run.threads=-1") == (
        "x.yaml:5: run.prefetch config.range, got 0\noverride 'run.threads=-1': run.threads config.range, got -1"
    )
