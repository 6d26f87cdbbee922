"""Whole studies: equal ways pass, others breach at the named stage, and naive ways never breach."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gpuflow.config import Config, read_config
from gpuflow.engines import ModelInfo
from gpuflow.errors import BadSampleError, ConfigError, GpuflowError
from gpuflow.parity import Report, study
from gpuflow.parity.images import Encoded
from gpuflow.parity.measure import Levels
from gpuflow.parity.others import NAIVE, ways_of
from gpuflow.parity.pairs import LogitTally, Rule
from gpuflow.parity.report import Logits, Pair, Row, breaches, figures, notes, verdict
from gpuflow.parity.ways import Prefix, Result, Results, Way
from gpuflow.stages import STAGES, Normalize
from tests.datasets import RAW, VAL, Entries
from tests.parity.conftest import read
from tests.serve.models import save_program
from tests.texts import outline, pin

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
BAD = ("empty file", "jpeg cut short", "jpeg of 60000x60000", "text")


class Changed(Way):
    """A way that applies `change` to another way's results; `number` counts images."""

    def __init__(self, way: Way, change: Callable[[int, Result], Result]) -> None:
        self._way, self._change = way, change

    def describe(self) -> str:
        return f"changed {self._way.describe()}"

    def missing(self) -> str | None:
        return None

    def run(self, prefix: Prefix, images: Sequence[Encoded]) -> Results:
        for number, result in enumerate(self._way.run(prefix, images)):
            yield self._change(number, result)


class Failing(Way):
    """A way that gives three images and then fails."""

    def describe(self) -> str:
        return "fails"

    def missing(self) -> str | None:
        return None

    def run(self, prefix: Prefix, images: Sequence[Encoded]) -> Results:
        yield from [BadSampleError("decode", "so it goes")] * 3
        raise GpuflowError("out of luck")


class Absent(Way):
    """A way that cannot run."""

    def describe(self) -> str:
        return "absent"

    def missing(self) -> str | None:
        return "it is left out"

    def run(self, prefix: Prefix, images: Sequence[Encoded]) -> Results:
        raise AssertionError("it cannot run")


def judged(config: Config, count: int = 0, model: Path | None = None, **ways: Way) -> Report:
    """A study without the naive ways, which take most of the time and never breach: two tests below have them.

    ways: in place of those of these names.
    """
    ways = {**ways_of(config, "val"), **dict.fromkeys(NAIVE, Absent()), **ways}
    return study(config, count=count, model=model, ways=ways)


def changed(config: Config, change: Callable[[int, Result], Result], name: str = "serve") -> Report:
    """A study of val against a changed val."""
    ways = dict(ways_of(config, "val"))
    return study(config, count=3, against=("val", name), ways={**ways, name: Changed(ways["val"], change)})


def pair(report: Report, b: str) -> Pair:
    return next(one for one in report.pairs if one.b == b)


def largest(row: Row) -> float:
    return round(row.max, 3)


# --- what agrees ------------------------------------------------------------------------------------------------------


@no_gpu
@pytest.mark.usefixtures("operators")
def test_one_list_of_stages_passes(photos: Path, tmp_path: Path) -> None:
    reported: list[tuple[int, int, str]] = []
    has_torchcodec = ways_of(read(photos, tmp_path, serve=VAL), "val")["torchcodec"].missing() is None
    report = study(
        read(photos, tmp_path, serve=VAL),
        count=5,
        progress=lambda *so_far: reported.append(so_far),
        command="gpuflow x",
    )
    assert not report.breach
    assert verdict(report) == (
        "PASS: val and serve, val and torchvision agree as they must; skipped: val@cuda, serve@cuda"
    )
    assert [(one.a, one.b, bool(one.asked)) for one in report.pairs] == [
        ("val", "serve", True),
        ("val", "torchvision", True),
        ("val", "pillow", False),
        *[("val", "torchcodec", False)] * has_torchcodec,
        ("val", "opencv", False),
        ("val", "torchpipe_cpu", False),
    ]
    serve = pair(report, "serve")
    assert [(row.stage, row.number, row.allowed, row.images, row.differ) for row in serve.rows] == [
        ("center_crop", 3, 0, 43, 0),
        ("normalize", 4, 0, 43, 0),
    ]
    assert all(sorted(row.refused) == list(BAD) and row.alone == row.reference_refuses == () for row in serve.rows)
    assert serve.skipped == tuple(
        (stage, "a graph gives images of one size, and after this stage they differ") for stage in ("decode", "resize")
    )
    reference = pair(report, "torchvision")
    assert [(row.stage, row.allowed) for row in reference.rows] == [
        ("decode", 1),
        ("resize", 2),
        ("center_crop", 2),
        ("normalize", 2),
    ]
    assert reference.rows[-1].own is not None and reference.rows[-1].own.max == 0
    assert [largest(row) for row in reference.rows] == [1, 1, 1, 1]  # CMYK
    assert pair(report, "opencv").rows[-1].max > 50
    assert report.images == {"own": 5, "hostile": 38, "bad": 4}
    assert report.preprocessing == read(photos, tmp_path).programs["val"].pipeline.fingerprint
    assert reported[-1] == (4 * 47, 4 * 47, "normalize")
    assert [so_far[0] for so_far in reported] == sorted(so_far[0] for so_far in reported)
    missing = {way.name: way.missing for way in report.ways if way.missing is not None}
    assert set(missing) - {"torchcodec"} == {"val@cuda", "serve@cuda", "torchpipe_gpu", "torchvision@cuda"}
    assert {"gpuflow", "torch", "opencv", "pillow", "torchpipe"} <= set(report.versions)


RESIZED = {"resize": {"height": 30, "width": 21, "interpolation": "bicubic"}}
STAGES_OF_ALL_KINDS: dict[str, list[dict[str, Any]]] = {
    "turned, bfloat16": [
        {"decode": {"orientation": "apply", "color": "bgr"}},
        RESIZED,
        {"normalize": {"mean": [0.5] * 3, "std": [0.2] * 3, "dtype": "bfloat16", "layout": "nhwc"}},
    ],
    "gray, longer side": [{"decode": {"color": "gray"}}, {"resize": {"longer": 24}}, {"center_crop": {"size": 16}}],
    "torchvision's own": [
        {"decode": {}},
        {"torchvision": {"name": "Pad", "padding": 2}},
        RESIZED,
        {"torchvision": {"name": "ToDtype", "dtype": "float32", "scale": True}},
    ],
}


@pytest.mark.parametrize("stages", STAGES_OF_ALL_KINDS.values(), ids=STAGES_OF_ALL_KINDS)
def test_other_stages_pass_too(stages: Entries, photos: Path, tmp_path: Path) -> None:
    report = judged(read(photos, tmp_path, stages, stages), count=2)
    assert not report.breach, verdict(report)
    assert all(row.images >= 38 for one in report.judged for row in one.rows)


def test_an_image_that_only_the_reference_refuses_is_no_breach(photos: Path, tmp_path: Path) -> None:
    """torchvision refuses an image of height 0, which resizing the longer side would make of a 400x3 image."""
    stages = STAGES_OF_ALL_KINDS["gray, longer side"]
    (decode, resize, _) = pair(judged(read(photos, tmp_path, stages)), "torchvision").rows
    assert decode.reference_refuses == ()
    assert {name for name, _ in resize.reference_refuses} == {"jpeg 400x3", "jpeg 2x300"}
    assert resize.reference_refuses[0][1].startswith("torchvision refuses it: torchvision: ")


def test_a_preset_is_trained_and_served_alike(photos: Path, tmp_path: Path) -> None:
    block = "{preset: torchpipe_cpu, height: 20, width: 30, stages: [normalize]}"
    path = tmp_path / "x.yaml"
    path.write_text(f"source: {{folder: {photos}}}\npipelines: {{val: {block}}}\nserve: {block}\n")
    report = judged(read_config(path, STAGES), count=2)
    assert not report.breach
    (one,) = report.judged
    assert [(row.stage, row.images, row.differ) for row in one.rows] == [("preset", 37, 0), ("normalize", 37, 0)]
    assert set(one.rows[0].refused) == {*BAD, "webp", "webp lossless", "webp with alpha"}


# --- what does not ----------------------------------------------------------------------------------------------------


def test_another_filter_is_a_breach(photos: Path, tmp_path: Path) -> None:
    other = [VAL[0], {"resize": {"shorter": 32, "interpolation": "bicubic"}}, *VAL[2:]]
    report = judged(read(photos, tmp_path, VAL, other), count=3)
    assert report.breach
    serve = pair(report, "serve")
    assert serve.breach and not pair(report, "torchvision").breach
    (row,) = serve.rows
    assert (row.number, row.images, row.breach) == (4, 41, True)
    assert row.differ > 30
    assert verdict(report) == f"BREACH: val against serve after normalize: {largest(row):.0f} levels apart, limit equal"


@pytest.mark.parametrize("color", ["rgb", "gray"])
def test_another_background_of_transparent_pixels_is_a_breach(color: str, photos: Path, tmp_path: Path) -> None:
    def pipeline(**decode: Any) -> Entries:
        return [{"decode": {"color": color, **decode}}, *RAW[1:]]

    white, black = {"background": [255] * 3}, {"background": [0] * 3}
    for val, serve in (({}, white), (white, {}), (black, white)):
        report = study(read(photos, tmp_path, pipeline(**val), pipeline(**serve)), count=0, against=("val", "serve"))
        (row,) = report.pairs[0].rows
        assert (row.images, row.differ, row.breach) == (38, 4, True)
    assert not judged(read(photos, tmp_path, pipeline(**white), pipeline(**white))).breach


def test_another_size_is_a_breach(photos: Path, tmp_path: Path) -> None:
    report = judged(read(photos, tmp_path, RAW, [*RAW[:2], {"center_crop": {"size": 20}}]), count=1)
    (row,) = pair(report, "serve").rows
    assert (row.images, row.differ, len(row.alone)) == (0, 0, 39)
    assert row.alone[0][1] == "val gives uint8 3x24x24, serve gives uint8 3x20x20"
    expected = "val against serve after center_crop: 39 images that only one of them accepts or gives in this form"
    assert list(breaches(pair(report, "serve"))) == [expected]


def test_one_level_in_one_pixel_is_a_breach_of_equality(photos: Path, tmp_path: Path) -> None:
    def change(number: int, result: Result) -> Result:
        if number == 1 and isinstance(result, torch.Tensor):
            result = result.clone()
            result[0, 5, 5] += 1 if result.dtype == torch.uint8 else 1 / 255 / 0.229
        return result

    report = changed(read(photos, tmp_path), change)
    (one,) = report.pairs
    assert (one.asked, one.breach) == ("equal, as asked for", True)
    decode, *_, whole = one.rows
    assert (decode.differ, decode.hostile and decode.hostile.max) == (1, 0)
    assert decode.own is not None and (decode.own.max, decode.own.p999) == (1, 0)
    assert whole.own is not None and whole.own.max == pytest.approx(1, abs=1e-4)
    assert whole.own.mean == pytest.approx(1 / (3 * 3 * 24 * 24), abs=1e-7)
    picture = one.pictures[0]
    assert picture.name.endswith(".jpg")
    assert picture.difference.sum() == picture.difference[5, 5] == pytest.approx(1, abs=1e-4)


def test_an_image_that_only_one_way_accepts_is_a_breach(photos: Path, tmp_path: Path) -> None:
    def change(number: int, result: Result) -> Result:
        return BadSampleError("decode", "not today") if number == 4 else result

    report = changed(read(photos, tmp_path), change)
    (one,) = report.pairs
    assert one.rows[0].alone == (("jpeg 4:2:2", "serve refuses it: decode: not today"),)
    assert all(row.breach for row in one.rows)
    only_gives = changed(
        read(photos, tmp_path), lambda _, x: x if isinstance(x, torch.Tensor) else torch.zeros(3, 2, 2)
    )
    assert {name for name, _ in only_gives.pairs[0].rows[-1].alone} == set(BAD)


def test_a_pair_of_which_no_image_can_be_compared_is_a_breach(photos: Path, tmp_path: Path) -> None:
    config = read(photos, tmp_path)
    ways, refuse = dict(ways_of(config, "val")), lambda _, result: BadSampleError("decode", "not today")
    report = study(
        config,
        count=2,
        against=("val", "serve"),
        ways={name: Changed(ways["val"], refuse) for name in ("val", "serve")},
    )
    assert all((row.images, len(row.refused), row.breach) == (0, 44, True) for row in report.pairs[0].rows)
    assert verdict(report).splitlines()[0] == "BREACH: val against serve after decode: no image could be compared"
    assert not judged(config, opencv=Changed(ways["val"], refuse)).breach


def test_a_naive_way_is_never_a_breach_unless_asked_for(photos: Path, tmp_path: Path) -> None:
    config = read(photos, tmp_path)
    assert not study(config, count=1).breach
    asked = study(config, count=1, against=("pillow", "opencv"))
    assert asked.breach
    assert [(one.a, one.b, one.asked) for one in asked.pairs] == [("pillow", "opencv", "equal, as asked for")]
    assert [way.name for way in asked.ways] == ["pillow", "opencv"]
    near = study(config, count=1, against=("val", "pillow"), tolerance=2)
    assert not near.breach
    assert near.pairs[0].asked == "at most 2 levels, as asked for"
    assert study(config, count=1, against=("val", "pillow"), tolerance=1).breach


def test_a_way_agrees_with_itself(photos: Path, tmp_path: Path) -> None:
    report = study(read(photos, tmp_path), count=1, against=("val", "val"))
    assert not report.breach, verdict(report)
    assert all((row.images, row.differ, set(row.refused)) == (39, 0, set(BAD)) for row in report.pairs[0].rows)


def test_a_naive_way_that_fails_is_noted(photos: Path, tmp_path: Path) -> None:
    config = read(photos, tmp_path)
    report = judged(config, opencv=Failing())
    assert not report.breach
    assert "opencv" not in {one.b for one in report.pairs}
    assert next(way.missing for way in report.ways if way.name == "opencv") == "failed: out of luck"


def test_a_naive_way_that_is_asked_for_may_not_fail(photos: Path, tmp_path: Path) -> None:
    config = read(photos, tmp_path)
    with pytest.raises(GpuflowError, match="out of luck"):
        study(config, count=1, against=("val", "opencv"), ways={**ways_of(config, "val"), "opencv": Failing()})


def test_serving_without_the_last_stage_is_a_breach(photos: Path, tmp_path: Path) -> None:
    assert judged(read(photos, tmp_path, [*RAW, {"equalize": {}}], RAW), count=1).breach
    assert judged(read(photos, tmp_path, VAL, RAW), count=1).breach


@pytest.mark.parametrize("own", [{"backend": "cpu"}, {"max_scans": 200}], ids=str)
def test_serving_without_normalize_may_decode_elsewhere(own: dict[str, Any], photos: Path, tmp_path: Path) -> None:
    """The keys of decode that do not change the pixels are none that serving and its model must agree on."""
    config = read(photos, tmp_path, VAL, [{"decode": own}, *RAW[1:]])
    whole, before = config.programs["val"].pipeline, config.programs["serve"].pipeline
    model = nn.Sequential(Normalize().module(), nn.Flatten(), nn.Linear(3 * 24 * 24, 5))
    info = ModelInfo(preprocessing=before.fingerprint, stages=before.lines, folded=whole.lines[-1])
    folded = save_program(tmp_path / "f.pt2", model, torch.zeros(2, 3, 24, 24, dtype=torch.uint8), info=info)
    report = study(serving(config, file=str(folded)), count=1, against=("val", "serve"))
    assert not report.breach, verdict(report)
    (one,) = report.pairs
    assert [(row.stage, row.images, row.differ) for row in one.rows] == [("center_crop", 39, 0)]
    assert {logits.images for logits in one.logits} == {1, 38}
    assert study(config, count=1, against=("val", "serve")).breach, "no model contains normalize"


def serving(config: Config, **model: Any) -> Config:
    """The configuration with this block `serve.model`."""
    assert config.serve is not None
    return dataclasses.replace(
        config, serve=type(config.serve).model_validate({**config.serve.model_dump(), "model": model})
    )


def test_serving_without_normalize_needs_a_model_that_records_it(photos: Path, tmp_path: Path) -> None:
    config = read(photos, tmp_path, VAL, RAW)
    whole, before = config.programs["val"].pipeline, config.programs["serve"].pipeline
    head, floats = nn.Sequential(nn.Flatten(), nn.Linear(3 * 24 * 24, 5)), torch.zeros(2, 3, 24, 24)
    plain = save_program(
        tmp_path / "plain.pt2", head, floats, info=ModelInfo(preprocessing=whole.fingerprint, stages=whole.lines)
    )
    both, levels = nn.Sequential(Normalize().module(), head), floats.to(torch.uint8)
    info = ModelInfo(preprocessing=before.fingerprint, stages=before.lines, folded=whole.lines[-1])
    folded = save_program(tmp_path / "folded.pt2", both, levels, info=info)
    other = save_program(tmp_path / "other.pt2", both, levels, info=dataclasses.replace(info, folded="normalize(x)"))
    foreign = save_program(tmp_path / "foreign.pt2", both, levels)

    def fault(config: Config, model: Path | None = None) -> str | None:
        """Why no model contains normalize; None if the study passes."""
        report = study(config, count=0, against=("val", "serve"), model=model)
        (pair,) = report.pairs
        assert [(row.stage, row.breach) for row in pair.rows] == [("center_crop", False)]
        assert report.breach == pair.breach == bool(pair.faults)
        if not pair.faults:
            return None
        assert verdict(report) == f"BREACH: val against serve: {pair.faults[0]}"
        start, _, rest = pair.faults[0].partition(", unless the model contains it, and ")
        reason, _, action = rest.partition("; ")
        assert start == f"{tmp_path}/y.yaml: serve.stages must end with normalize() as val does"
        assert action == (
            "add the stage, or name a model that gpuflow export --fold-normalize wrote, by serve.model.file or --model"
        )
        return reason

    assert fault(config) == "no model is named"
    assert fault(config, plain) == f"{plain} records no such stage"
    assert fault(config, folded) is None
    assert fault(serving(config, file="gone.pt2")) == "gone.pt2 is not there"
    assert fault(serving(config, file="gone.pt2"), folded) is None
    assert fault(serving(config, file=str(folded))) is None
    assert fault(serving(config, file=str(folded), force=True)) is None
    for force in (False, True):
        assert fault(serving(config, file=str(plain), force=force)) == f"{plain} records no such stage"
    assert fault(serving(config, file=str(plain), force=True), folded) == f"{plain} records no such stage"
    assert fault(serving(config, file=str(other))) == f"{other} records normalize(x)"
    assert fault(serving(config, file=str(foreign), preprocessing="trust")) == f"{foreign} records no such stage"


@pytest.mark.parametrize(
    ("val", "serve", "field", "rule"),
    [
        ({"formats": ["png16", "gif"]}, {"formats": ["gif"]}, "formats", "name png16 as val does"),
        ({}, {"max_pixels": 25_000_000}, "max_pixels", "be at least 179000000 as in val"),
        ({}, {"max_scans": 99}, "max_scans", "be at least 100 as in val"),
    ],
)
def test_files_that_only_training_accepts_are_a_breach(
    val: dict[str, Any], serve: dict[str, Any], field: str, rule: str, photos: Path, tmp_path: Path
) -> None:
    def checked(ours: dict[str, Any], theirs: dict[str, Any]) -> Report:
        config = read(photos, tmp_path, [{"decode": ours}, *RAW[1:]], [{"decode": theirs}, *RAW[1:]])
        return study(config, count=0, against=("val", "serve"))

    (line,) = verdict(checked(val, serve)).splitlines()
    place = f"BREACH: val against serve: {tmp_path}/y.yaml: serve.stages[0].decode.{field}"
    start = f"{place} must {rule}, else serving refuses files that training accepts, got {serve[field]}; "
    assert line.startswith(start) and line.endswith(" of val" if field != "formats" else " from val")
    other = checked(serve, val)
    assert not other.breach
    (note,) = other.pairs[0].notes
    assert note.startswith("serving alone accepts files ") and f"decode.{field}" in note
    assert f"val against serve: {note}" in notes(other)
    alike = checked(val, val)
    assert not alike.breach and alike.pairs[0].notes == ()


def test_only_pairs_with_serving_are_judged_by_what_it_accepts(photos: Path, tmp_path: Path) -> None:
    gif: Entries = [{"decode": {"formats": ["gif"]}}, *RAW[1:]]
    config = read(photos, tmp_path, gif, RAW)
    report = judged(config, opencv=ways_of(config, "val")["opencv"])
    assert [(one.b, one.breach) for one in report.judged] == [("serve", True), ("torchvision", False)]
    assert [one.faults for one in report.naive] == [()]


@pytest.mark.usefixtures("operators")
def test_two_ways_without_a_common_stage(photos: Path, tmp_path: Path) -> None:
    with pytest.raises(GpuflowError) as caught:
        study(read(photos, tmp_path, VAL, RAW), count=0, against=("serve", "torchpipe_cpu"))
    text = pin(caught.value)
    assert all(f"after {stage}: " in text for stage in ("decode", "resize", "center_crop", "normalize"))


def test_a_way_of_ours_that_fails_fails_the_study(photos: Path, tmp_path: Path) -> None:
    config = read(photos, tmp_path, serve=VAL)
    with pytest.raises(GpuflowError, match="out of luck"):
        judged(config, serve=Failing())


def test_a_pipeline_that_mixes_is_compared_as_a_whole(photos: Path, tmp_path: Path) -> None:
    """Its mixing stages are left out: they work on batches."""
    mixed = [*VAL, {"mixup": {}}]
    same = study(read(photos, tmp_path, mixed, VAL), count=2)
    assert not same.breach, verdict(same)
    assert [(row.stage, row.images) for row in pair(same, "serve").rows] == [("center_crop", 40), ("normalize", 40)]
    other = {"normalize": {"mean": [0.1, 0.2, 0.3], "std": "imagenet"}}
    assert study(read(photos, tmp_path, mixed, [*RAW, other]), count=0, against=("val", "serve")).breach


def test_serving_that_cannot_run_here_is_no_pass(photos: Path, tmp_path: Path) -> None:
    """As without torchpipe, or with a preset for a GPU where there is none."""
    config, absent = read(photos, tmp_path, VAL, VAL), ways_of(read(photos, tmp_path), "val")["serve"]
    ways = {**ways_of(config, "val"), "serve": absent, "serve@cuda": absent}
    with pytest.raises(GpuflowError) as caught:
        study(config, count=1, ways=ways)
    assert f": {absent.missing()};" in pin(caught.value)
    assert not study(config, count=1, ways=ways, against=("val", "torchvision"), tolerance=2).breach


def test_nothing_to_compare(photos: Path, tmp_path: Path) -> None:
    config = read(photos, tmp_path, [*RAW, {"flip": {"horizontal": 0.5}}])
    ways = {name: way for name, way in ways_of(config, "val").items() if not name.endswith("cuda")}
    ways |= {name: ways_of(config, "val")["serve"] for name in ("val@cuda", "serve@cuda")}
    with pytest.raises(GpuflowError) as caught:
        study(config, ways=ways)
    text = pin(caught.value)
    assert all(f"{way}: {tmp_path}/y.yaml has no block" in text for way in ("serve", "val@cuda", "serve@cuda"))
    assert "torchvision: flip(horizontal=0.5)" in text


def test_ways_that_cannot_be_asked_for(photos: Path, tmp_path: Path) -> None:
    config = read(photos, tmp_path)
    with pytest.raises(GpuflowError) as caught:
        study(config, against=("val", "open_cv"))
    assert "'open_cv'; did you mean 'opencv'?" in pin(caught.value)
    with pytest.raises(GpuflowError) as caught:
        study(config, against=("val", "serve"))
    assert f"serve cannot run here: {tmp_path}/y.yaml" in pin(caught.value)


def test_a_file_without_val(photos: Path, tmp_path: Path) -> None:
    config = dataclasses.replace(read(photos, tmp_path), pipelines={})
    with pytest.raises(ConfigError, match="has no pipeline 'val'"):
        study(config)


# --- rules ------------------------------------------------------------------------------------------------------------


def test_what_each_rule_allows() -> None:
    stages = [STAGES["decode"](), STAGES["resize"](shorter=3), STAGES["center_crop"](size=2)]  # type: ignore[call-arg]
    ours = Rule("ours")
    assert (ours.allowed(stages, same_device=True), ours.allowed(stages, same_device=False)) == (0, 2)
    assert Rule("reference").allowed(stages[:1], same_device=True) == 1
    assert Rule("reference").allowed(stages, same_device=False) == 2
    assert Rule("asked", 3.5).allowed(stages, same_device=True) == 3.5
    assert Rule("library").allowed(stages, same_device=True) == 2
    assert Rule("library", 3.5).allowed(stages, same_device=True) == 3.5
    assert Rule("nothing").allowed(stages, same_device=True) is None
    words = {
        (kind, same): Rule(kind, 3.5).words(same_device=same)
        for kind in ("ours", "reference", "asked", "nothing")
        for same in (True, False)
    }
    spread = ", which colour stages may spread"
    assert words[("ours", True)] == "equal: both run on the same device"
    assert words[("ours", False)] == f"at most 2 levels{spread}: one runs on the CPU, one on a GPU"
    assert words[("reference", True)] == f"at most the sum of the stages' tolerances{spread}"
    assert words[("asked", False)] == "at most 3.5 levels, as asked for"
    assert words[("nothing", True)] == ""
    assert Rule("library").words(same_device=True) == f"at most the sum of the stages' tolerances{spread}"
    assert Rule("library", 3.5).words(same_device=True) == "at most 3.5 levels, as asked for"


@pytest.mark.parametrize(
    ("name", "parameters", "limit", "on_two_devices"),
    [
        ("posterize", {"bits": 3}, 32, 32),
        ("posterize", {"bits": 8}, 2, 2),
        ("posterize", {"bits": 3, "probability": 0.5}, 2, 2),  # what is drawn is not known here
        ("solarize", {"threshold": 60}, 137, 137),
        ("brightness", {"amount": [2.5, 2.5]}, 5, 5),
        ("brightness", {"amount": [0.5, 0.5]}, 2, 2),
        ("invert", {}, 2, 2),
        ("normalize", {}, 2, 2),
    ],
)
def test_a_limit_grows_where_a_stage_moves_levels_apart(
    name: str, parameters: dict[str, Any], limit: float, on_two_devices: float
) -> None:
    """Two neighbouring levels may lie on both sides of a step of posterize, or of solarize's threshold."""
    parameters = {key: tuple(value) if isinstance(value, list) else value for key, value in parameters.items()}
    stages = [STAGES["decode"](), STAGES["resize"](shorter=3), STAGES[name](**parameters)]  # type: ignore[call-arg]
    assert Rule("reference").allowed(stages, same_device=True) == limit
    assert Rule("library").allowed(stages, same_device=True) == limit
    assert Rule("ours").allowed(stages, same_device=False) == on_two_devices
    assert Rule("asked", 3.5).allowed(stages, same_device=True) == 3.5
    assert Rule("ours").allowed(stages, same_device=True) == 0


def test_a_breach_of_refused_images_alone_names_no_levels() -> None:
    row = Row(
        stage="resize", number=2, allowed=2, noise=0, images=3, differ=1, own=Levels(max=1, mean=1, p999=1),
        hostile=None, refused=(), alone=(("x", "serve refuses it"),), reference_refuses=(),
    )  # fmt: skip
    pair = Pair(a="val", b="torchvision", asked="equal", rows=(row,))
    assert list(breaches(pair)) == [
        "val against torchvision after resize: 1 images that only one of them accepts or gives in this form"
    ]
    more = dataclasses.replace(row, allowed=0)
    assert list(breaches(dataclasses.replace(pair, rows=(more,)))) == [
        "val against torchvision after resize: 1 levels apart, limit equal; "
        "1 images that only one of them accepts or gives in this form"
    ]


def test_rounding_to_16_bits_is_no_breach() -> None:
    row = Row(
        stage="normalize", number=1, allowed=2, noise=0.9, images=1, differ=1, own=None, hostile=None, refused=(),
        alone=(), reference_refuses=(),
    )  # fmt: skip

    def apart(levels: float, **changes: Any) -> bool:
        return dataclasses.replace(row, own=Levels(max=levels, mean=0, p999=0), **changes).breach

    assert not apart(2.8)
    assert apart(3)
    assert apart(0.5, allowed=0)
    assert not apart(100, allowed=None)
    assert apart(0, alone=(("x", "y"),))
    assert apart(0, images=0)
    assert not apart(0, images=0, allowed=None)


def test_a_verdict_gives_shares_of_pixels_as_percentages() -> None:
    row = Row(
        stage="normalize", number=1, allowed=2, noise=0, images=1, differ=1, own=Levels(max=9, mean=1, p999=9),
        hostile=None, refused=(), alone=(), reference_refuses=(), value=0.5,
    )  # fmt: skip
    for share, percent in ((1, "100%"), (0.996, "99.6%"), (0.00012, "0.012%")):
        pair = Pair(
            a="val", b="torchvision", asked="", rows=(dataclasses.replace(row, pixels=share),), logits=(), skipped=(),
            pictures=(),
        )  # fmt: skip
        assert f"0.5 after normalize, {percent} of the pixels" in figures(pair)


# --- logits -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A linear classifier of the pixels that does not record its preprocessing."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Flatten(), nn.Linear(3 * 24 * 24, 5))
    return save_program(tmp_path_factory.mktemp("model") / "m.pt2", module, torch.zeros(2, 3, 24, 24))


@pytest.mark.usefixtures("operators")
def test_logits_and_flips(model: Path, photos: Path, tmp_path: Path) -> None:
    config = read(photos, tmp_path, serve=VAL)
    report = judged(config, 4, model, torchpipe_cpu=ways_of(config, "val")["torchpipe_cpu"])
    assert report.model == f"{model}, on the CPU, on the output of normalize"
    own, hostile = pair(report, "serve").logits
    assert (own.kind, own.images, own.max, own.flips) == ("own", 4, 0, 0)
    assert (hostile.kind, hostile.images, hostile.max, hostile.flips) == ("hostile", 38, 0, 0)
    _, hostile = pair(report, "torchpipe_cpu").logits
    assert hostile.images == 35  # no WebP
    assert hostile.flips > 0 and hostile.max > hostile.mean > 0


def test_a_forced_model_is_named_as_one(photos: Path, tmp_path: Path) -> None:
    head = nn.Sequential(nn.Flatten(), nn.Linear(3 * 24 * 24, 5))
    info = ModelInfo(preprocessing="0123456789abcdef", stages=("decode()",))
    file = save_program(tmp_path / "m.pt2", head, torch.zeros(2, 3, 24, 24), info=info)
    report = judged(serving(read(photos, tmp_path, serve=VAL), file=str(file), force=True), count=1)
    assert report.model == (
        f"{file}, on the CPU, on the output of normalize; serve.model.force is set: the file records other "
        "preprocessing than these stages"
    )


def test_logits_that_are_no_numbers_are_infinitely_far_from_numbers() -> None:
    nan, inf = math.nan, math.inf
    tally = LogitTally()
    tally.add(torch.tensor([nan, 1.0, -inf]), torch.tensor([nan, 1.5, -inf]))
    assert tally.result("own") == Logits(kind="own", images=1, max=0.5, mean=0.5 / 3, flips=0)
    for ours, theirs in ((nan, 0.0), (0.0, inf), (-inf, inf)):
        tally = LogitTally()
        tally.add(torch.tensor([ours, 1.0]), torch.tensor([theirs, 1.0]))
        found = tally.result("own")
        assert found is not None and (found.max, found.mean) == (inf, inf)
        shown = Pair(a="val", b="serve", asked="", rows=(), logits=(found,)).as_dict()["logits"]
        assert (shown[0]["max"], shown[0]["mean"]) == (None, None)


def test_the_served_model_is_taken_by_itself(model: Path, photos: Path, tmp_path: Path) -> None:
    config = read(photos, tmp_path, serve=VAL)
    assert config.serve is not None
    blocks = config.serve.model_dump() | {"model": {"file": str(model)}}
    foreign = dataclasses.replace(config, serve=type(config.serve).model_validate(blocks))
    with pytest.raises(ConfigError, match="does not record what preprocessing it was trained with"):
        study(foreign, count=0, against=("val", "serve"))
    blocks["model"]["preprocessing"] = "trust"
    served = dataclasses.replace(config, serve=type(config.serve).model_validate(blocks))
    assert pair(study(served, count=0, against=("val", "serve")), "serve").logits[0].images == 38
    gone = dataclasses.replace(
        config, serve=type(config.serve).model_validate(blocks | {"model": {"file": "gone.onnx"}})
    )
    report = study(gone, count=0, against=("val", "serve"))
    assert report.model == "none: gone.onnx is not there; train or export it, or name another one with --model"
    assert report.pairs[0].logits == ()
    assert study(config, count=0, against=("val", "serve")).model == (
        "none: the file names no model; name one with --model"
    )


def test_names_of_classes_in_another_order_than_the_model_records(photos: Path, tmp_path: Path) -> None:
    config = read(photos, tmp_path, serve=VAL)
    info = ModelInfo(classes=("a", "b"), preprocessing=config.programs["serve"].pipeline.fingerprint)
    linear = nn.Sequential(nn.Flatten(), nn.Linear(3 * 24 * 24, 2))
    file = save_program(tmp_path / "m.pt2", linear, torch.zeros(2, 3, 24, 24), info=info)
    assert config.serve is not None
    blocks = config.serve.model_dump() | {"model": {"file": str(file), "classes": ("b", "a")}}
    config = dataclasses.replace(config, serve=type(config.serve).model_validate(blocks))
    with pytest.raises(ConfigError, match=r"^serve\.model\.classes must not name the outputs of .* in another order"):
        study(config, count=0, against=("val", "serve"))


def test_a_model_that_does_not_fit(model: Path, photos: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^--model: must end in \.onnx, \.pt or \.pt2, got 'x\.txt'$"):
        study(read(photos, tmp_path), count=0, model=Path("x.txt"))
    with pytest.raises(ConfigError) as caught:
        study(read(photos, tmp_path), count=0, model=Path("gone.onnx"))
    assert outline(caught.value) == "--model: config.rule, got 'gone.onnx'"
    with pytest.raises(ConfigError, match=r"takes images of float32 3x24x24 .*, serve\.stages give uint8 3x24x24"):
        study(read(photos, tmp_path, RAW), count=0, model=model)
