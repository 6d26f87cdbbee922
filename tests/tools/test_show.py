"""`gpuflow show`: the samples that a loop gets first, drawn on one page."""

from __future__ import annotations

import base64
import json
import re
from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
import yaml
from numpy.typing import NDArray

from gpuflow.config import Config, read_config
from gpuflow.loader.assemble import build_loader
from gpuflow.stages import STAGES
from gpuflow.tools.samples import make_detection_samples
from gpuflow.tools.show import _COLOURS, _PAIRED, Shown, Target, _label, page, samples_of
from tests.commands import command_here
from tests.datasets import make_photos, write_config
from tests.images import photo


@pytest.fixture
def file(tmp_path: Path) -> Path:
    make_photos(tmp_path / "photos", classes=3, each=4)
    return write_config(tmp_path / "x.yaml", tmp_path / "photos")


def read(file: Path, *overrides: str) -> Config:
    return read_config(file, STAGES, overrides)


def pictures(text: str) -> list[NDArray[np.uint8]]:
    """The images of a page, RGB."""
    found: list[NDArray[np.uint8]] = []
    for data in re.findall(r'href="data:image/png;base64,([^"]+)"', text):
        decoded = cv2.imdecode(np.frombuffer(base64.b64decode(data), np.uint8), cv2.IMREAD_UNCHANGED)
        assert decoded is not None
        found.append(np.asarray(decoded[..., ::-1] if decoded.ndim == 3 else decoded[..., None], np.uint8))
    return found


def test_the_samples_are_those_that_a_loop_gets_first(file: Path) -> None:
    whole = "pipelines.train.stages.normalize.dtype=float16"
    shown = samples_of(read(file, whole), "train", 6, epoch=3)
    pixels = read(file, "pipelines.train.stages.normalize.mean=[0,0,0]", "pipelines.train.stages.normalize.std=[1,1,1]")
    with build_loader(pixels, "train", rank=0, world_size=1, device="cpu") as loader:
        loader.set_epoch(3)
        batches = list(loader)
        images = torch.cat([batch.images for batch in batches])[:6].mul(255).round()
        assert [one.index for one in shown] == torch.cat([batch.indices for batch in batches])[:6].tolist()
        assert [one.path for one in shown] == [loader.dataset.path(one.index) for one in shown]
        assert [one.label for one in shown] == [loader.classes[loader.dataset.labels[one.index]] for one in shown]
    for one, image in zip(shown, images, strict=True):
        assert list(one.images) == [""]
        assert np.abs(one.images[""].astype(int) - image.permute(1, 2, 0).numpy()).max() <= 1


def test_bgr_images_are_shown_in_their_colours_and_gray_ones_gray(file: Path) -> None:
    stages = "pipelines.val.stages"
    plain = [f"{stages}.normalize.mean=[0,0,0]", f"{stages}.normalize.std=[1,1,1]"]
    rgb = samples_of(read(file, *plain), "val", 2)
    bgr = samples_of(read(file, *plain, f"{stages}.decode.color=bgr"), "val", 2)
    gray = [f"{stages}.decode.color=gray", f"{stages}.normalize.mean=[0]", f"{stages}.normalize.std=[1]"]
    (one,) = samples_of(read(file, *gray), "val", 1)
    assert all(np.array_equal(a.images[""], b.images[""]) for a, b in zip(rgb, bgr, strict=True))
    assert one.images[""].shape[2] == 1
    assert pictures(page("x", "", [one]))[0].shape == one.images[""].shape


def test_the_command_writes_a_page_even_of_a_source_that_fills_no_batch(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gpuflow, out = command_here(monkeypatch, capsys), tmp_path / "pages" / "x.html"
    large = ("pipelines.train.batch.size=1000", "pipelines.train.batch.drop_last=true")
    done = gpuflow("show", file, *large, "-n", 30, "--out", out)
    assert (done.code, done.out) == (0, f"wrote {out}: 12 samples of train\n")
    text = out.read_text()
    assert len(pictures(text)) == 12
    assert "x.yaml: train, epoch 0" in text
    wrong = gpuflow("show", file, "--pipeline", "trian")
    assert wrong.code == 1
    assert "has no pipeline 'trian'; did you mean 'train'?" in wrong.err


def test_a_pipeline_with_a_dot_in_its_name_is_shown(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file.write_text(file.read_text().replace("train:", "v1.train:"))
    done = command_here(monkeypatch, capsys)("show", file, "--pipeline", "v1.train", "--out", tmp_path / "x.html")
    assert (done.code, done.out) == (0, f"wrote {tmp_path / 'x.html'}: 12 samples of v1.train\n")


def luminance(colour: str) -> float:
    levels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (level / 12.92 if level <= 0.03928 else ((level + 0.055) / 1.055) ** 2.4 for level in levels)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_names_of_objects_can_be_read_on_every_colour() -> None:
    """With a contrast of 4.5 to 1 at least."""
    boxes = [Target(name=f"n{i}", colour=i, box=(1.0, 20.0, 30.0, 30.0)) for i in range(len(_COLOURS))]
    text = page("", "", [Shown(index=0, path="", label="", valid=True, images={"": photo(40, 60)}, targets=boxes)])
    plates = re.findall(r'fill="(#\w{6})"/><text [^>]*fill="(#\w+)"', text)
    assert [plate for plate, _ in plates] == list(_COLOURS)
    for plate, ink in plates:
        light, dark = sorted([luminance(plate), luminance("#" + 2 * ink[1:])], reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 4.5, (plate, ink)


def test_pictures_have_names_and_rows_of_views_can_be_scrolled_by_keys() -> None:
    target = Target(name="<cat>", box=(0.0, 0.0, 9.0, 9.0))
    images = {"left": photo(9, 9), "right": photo(9, 9)}
    sample = Shown(index=7, path="a.jpg", label="pets", valid=True, images=images, targets=[target, target])
    text = page("", "", [sample])
    names = re.findall(r'<svg [^>]*role="img" aria-label="([^"]+)"', text)
    assert names == [f"sample 7; pets; {view}; &lt;cat&gt;" for view in images]
    assert '<div class="row" tabindex="0" role="group" aria-label="views of sample 7">' in text
    (alone,) = re.findall(r'<div class="row"[^>]*>', page("", "", [replace(sample, images={"": photo(9, 9)})]))
    assert alone == '<div class="row">', "which has nothing to scroll"


def test_labels_are_written_in_words() -> None:
    classes = ("cat", "dog", "emu", "fox")
    assert _label(torch.tensor([2]), 0, classes) == "emu"
    assert _label(torch.tensor([2]), 0, ()) == "2"
    assert _label(torch.tensor([0.25]), 0, ()) == "0.25"
    assert _label(torch.tensor([[0.0, 0.62, 0.0, 0.38]]), 0, classes) == "dog 0.62, fox 0.38"
    assert _label(torch.tensor([[1.0, 0.0, 0.0, 1.0]]), 0, classes) == "fox, cat"
    assert _label(torch.zeros(1, 4), 0, classes) == "none"
    assert _label(torch.tensor([[0.5, 2.0]]), 0, classes) == "0.5, 2"


def test_targets_are_drawn_where_they_are() -> None:
    image, mask = photo(40, 60), np.zeros((40, 60), bool)
    mask[5:10, 20:30] = True
    points = np.array([[12.0, 7.0, 2.0], [50.0, 30.0, 0.0]])
    target = Target(name="<cat>", box=(20.0, 5.0, 30.0, 10.0), mask=mask, keypoints=points)
    sample = Shown(index=7, path="a&b.jpg", label="x", valid=False, images={"": image}, targets=[target])
    text = page("title", "stages", [sample])
    (drawn,) = pictures(text)
    assert np.array_equal(drawn[~mask], image[~mask])
    assert (drawn[mask] != image[mask]).any(axis=1).all()
    assert 'x="20.00" y="5.00" width="10.00" height="5.00"' in text
    assert text.count("<circle") == 1
    assert 'cx="12.00" cy="7.00"' in text
    assert "&lt;cat&gt;" in text
    assert "7: a&amp;b.jpg" in text
    assert "wrapped" in text


def test_keypoints_have_numbers_and_flip_pairs_two_colours_with_a_legend() -> None:
    points = np.array([[9.0, 5.0, 2.0], [12.0, 7.0, 2.0], [50.0, 30.0, 1.0], [3.0, 3.0, 0.0]])
    target = Target(colour=2, keypoints=points, pairs=((2, 1),))
    sample = Shown(index=0, path="a.jpg", label="", valid=True, images={"": photo(40, 60)}, targets=[target])
    text = page("title", "stages", [sample])
    drawn = re.findall(r'<circle cx="([\d.]+)" [^>]* fill="([^"]+)"/><text class="point"[^>]*>(\d)</text>', text)
    assert drawn == [("9.00", "#fff", "0"), ("12.00", _PAIRED[1], "1"), ("50.00", _PAIRED[0], "2")]
    assert f'<b style="color:{_PAIRED[0]}">\u25cf</b> 2 and <b style="color:{_PAIRED[1]}">\u25cf</b> 1</p>' in text
    plain = page("title", "stages", [replace(sample, targets=[replace(target, pairs=())])])
    assert plain.count(f'fill="{_COLOURS[2]}"') == 3 and "flips exchange" not in plain


def test_a_batchs_keypoints_are_shown_with_the_pairs_of_their_field(tmp_path: Path) -> None:
    """With boxes and masks; a flip that exchanged two keypoints leaves each name at its side of the object."""
    cv2.imwrite(str(tmp_path / "a.png"), np.full((20, 30, 3), 90, np.uint8))
    square = [[[2, 2, 28, 2, 28, 18, 2, 18]]]
    row = {"path": "a.png", "boxes": [[2, 2, 28, 18]], "outline": square, "hands": [[[5, 9, 2], [20, 9, 1]]]}
    (tmp_path / "list.jsonl").write_text(json.dumps(row) + "\n")
    fields = {
        "boxes": {},
        "hands": {"type": "keypoints", "flip_pairs": [[0, 1]]},
        "outline": {"type": "mask", "kind": "polygons"},
    }
    stages = [{"decode": {}}, {"flip": {"horizontal": 1.0}}, {"center_crop": {"size": [20, 30]}}]
    source = {"listing": str(tmp_path / "list.jsonl"), "fields": fields}
    document = {"source": source, "pipelines": {"train": {"stages": stages, "batch": {"size": 1}}}}
    (tmp_path / "x.yaml").write_text(yaml.safe_dump(document))
    (sample,) = samples_of(read(tmp_path / "x.yaml"), "train", 1)
    (target,) = (target for target in sample.targets if target.keypoints is not None)
    assert target.pairs == ((0, 1),) and target.keypoints is not None
    assert target.keypoints[:, 0].tolist() == [10, 25]


def test_views_stand_in_one_row_with_their_names() -> None:
    views = {"global 1": photo(40, 40), "local 1": photo(20, 20)}
    text = page("title", "stages", [Shown(index=0, path="x", label="y", valid=True, images=views)])
    assert 'class="samples views"' in text
    assert [one.shape[0] for one in pictures(text)] == [40, 20]
    assert "<figcaption>global 1</figcaption>" in text


def test_boxes_and_masks_of_a_batch_are_drawn_where_the_shapes_are(tmp_path: Path) -> None:
    """The shapes of the samples have one colour a class, so the pixel at an octagon's or rectangle's centre tells."""
    colours = {"rectangle": 0, "triangle": 1, "octagon": 2}  # the largest channel of each
    make_detection_samples(tmp_path, 6)
    stages = [
        {"decode": {}},
        {"affine": {"degrees": 10, "scale": [0.7, 1.2]}},
        {"flip": {"horizontal": 0.5}},
        {"letterbox": {"size": 128}},
        {"normalize": {}},
    ]
    (tmp_path / "x.yaml").write_text(
        yaml.safe_dump(
            {
                "source": {"coco": str(tmp_path / "instances.json"), "images": str(tmp_path / "images")},
                "pipelines": {"train": {"stages": stages, "targets": {"min_area": 40}, "batch": {"size": 4}}},
            }
        )
    )
    shown = samples_of(read(tmp_path / "x.yaml"), "train", 6, epoch=2)
    seen = 0
    for sample in shown:
        assert sample.label == ""
        boxes, masks = sample.targets[: len(sample.targets) // 2], sample.targets[len(sample.targets) // 2 :]
        for target, masked in zip(boxes, masks, strict=True):
            assert target.box is not None and masked.mask is not None and masked.mask.shape == (128, 128)
            x1, y1, x2, y2 = target.box
            rows, columns = np.nonzero(masked.mask)
            assert x1 - 1 <= columns.min() and columns.max() <= x2 and y1 - 1 <= rows.min() and rows.max() <= y2
            colour = np.median(sample.images[""][masked.mask], axis=0)
            assert (colour.argmax(), target.colour, masked.colour) == (colours[target.name],) * 3
            seen += 1
    assert seen >= 8
    text = page("x", "", shown)
    assert text.count('fill="none"') == seen == text.count("</text>")


def test_masks_of_levels_keypoints_and_other_fields_of_a_batch_are_shown(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    image, mask = np.full((20, 30, 3), 90, np.uint8), np.zeros((20, 30), np.uint8)
    mask[:, 10:20], mask[:, 20:] = 1, 3
    cv2.imwrite(str(tmp_path / "images/a.png"), image)
    cv2.imwrite(str(tmp_path / "images/a_mask.png"), mask)
    row = {"path": "images/a.png", "mask": "images/a_mask.png", "points": [[[4.5, 6.5, 2], [1, 1, 0]]], "text": "<one>"}
    (tmp_path / "list.jsonl").write_text(json.dumps(row) + "\n")
    fields = {
        "image": {"column": "path"},
        "mask": {},
        "points": {"type": "keypoints"},
        "text": {},
    }
    pipeline = {"stages": [{"decode": {}}, {"flip": {"horizontal": 1.0}}, {"center_crop": {"size": [20, 30]}}]}
    source = {"listing": str(tmp_path / "list.jsonl"), "fields": fields}
    document = {"source": source, "pipelines": {"train": {**pipeline, "batch": {"size": 1}}}}
    (tmp_path / "x.yaml").write_text(yaml.safe_dump(document))
    (sample,) = samples_of(read(tmp_path / "x.yaml"), "train", 4)
    one, three, points = sample.targets
    assert one.mask is not None and three.mask is not None and points.keypoints is not None
    assert np.array_equal(one.mask, mask[:, ::-1] == 1) and np.array_equal(three.mask, mask[:, ::-1] == 3)
    assert (one.colour, three.colour) == (0, 2)
    assert points.keypoints[0].tolist() == [25.5, 6.5, 2]
    assert sample.notes == ["text: <one>"]
    text = page("x", "", [sample])
    (drawn,) = pictures(text)
    assert len(np.unique(drawn.reshape(-1, 3), axis=0)) == 3
    assert 'cx="25.50" cy="6.50"' in text and "text: &lt;one&gt;" in text


@pytest.mark.parametrize("with_boxes", [True, False])
def test_all_fields_of_masks_and_keypoints_are_drawn(with_boxes: bool, tmp_path: Path) -> None:
    """Without boxes, fields may have different numbers of rows."""
    cv2.imwrite(str(tmp_path / "a.png"), np.full((20, 30, 3), 90, np.uint8))
    boxes = [[0, 0, 10, 20], [10, 0, 30, 20]]
    wide, narrow = ([[[x1 + d, 0, x2 - d, 0, x2 - d, 20, x1 + d, 20]] for x1, _, x2, _ in boxes] for d in (0, 3))
    hands, feet = [[[2, 3, 2]], [[12, 3, 2]]], [[[4, 5, 2]], [[14, 5, 2]]]
    row = {"path": "a.png", "boxes": boxes, "wide": wide, "narrow": narrow, "hands": hands, "feet": feet}
    if not with_boxes:
        row |= {"narrow": narrow[:1], "feet": []}
    (tmp_path / "list.jsonl").write_text(json.dumps(row) + "\n")
    masks, points = {"type": "mask", "kind": "polygons"}, {"type": "keypoints"}
    fields = {"wide": masks, "narrow": masks, "hands": points, "feet": points} | ({"boxes": {}} if with_boxes else {})
    pipeline = {"stages": [{"decode": {}}, {"center_crop": {"size": [20, 30]}}], "batch": {"size": 1}}
    source = {"listing": str(tmp_path / "list.jsonl"), "fields": fields}
    (tmp_path / "x.yaml").write_text(yaml.safe_dump({"source": source, "pipelines": {"train": pipeline}}))
    (sample,) = samples_of(read(tmp_path / "x.yaml"), "train", 1)
    drawn = [(one.colour, int(one.mask.sum())) for one in sample.targets if one.mask is not None]
    seen = [(one.colour, one.keypoints[0, 0]) for one in sample.targets if one.keypoints is not None]
    if with_boxes:
        assert sorted(drawn) == [(0, 80), (0, 200), (1, 280), (1, 400)]
        assert sorted(seen) == [(0, 2), (0, 4), (1, 12), (1, 14)]
    else:
        assert sorted(drawn) == [(0, 80), (0, 200), (1, 400)]
        assert sorted(seen) == [(0, 2), (1, 12)]


def test_every_view_of_a_sample_is_shown_in_levels(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    document = yaml.safe_load(file.read_text())
    crop = {"center_crop": {"size": 24}}
    document["pipelines"]["train"] = {
        "views": {
            "global": {"count": 2, "stages": [crop, {"normalize": {}}]},
            "local": {"stages": [{"center_crop": {"size": 12}}]},
        },
        "batch": {"size": 4},
    }
    file.write_text(yaml.safe_dump(document))
    shown = samples_of(read(file), "train", 5)
    assert [list(one.images) for one in shown] == [["global 1", "global 2", "local"]] * 5
    for one in shown:
        assert np.array_equal(one.images["global 1"], one.images["global 2"]), "without draws"
        assert np.abs(one.images["global 1"][6:18, 6:18].astype(int) - one.images["local"]).max() <= 1
    done = command_here(monkeypatch, capsys)("show", file, "-n", 2, "--out", tmp_path / "x.html")
    assert done.code == 0, done.err
    assert (tmp_path / "x.html").read_text().count("<figcaption>global 2</figcaption>") == 2
