"""`gpuflow show`: the samples that a loop gets first, drawn on one page."""

from __future__ import annotations

import base64
import re
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from gpuflow.config import Config, read_config
from gpuflow.loader.assemble import build_loader
from gpuflow.stages import STAGES
from gpuflow.tools.show import Shown, Target, _label, page, samples_of
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


def test_views_stand_in_one_row_with_their_names() -> None:
    views = {"global 1": photo(40, 40), "local 1": photo(20, 20)}
    text = page("title", "stages", [Shown(index=0, path="x", label="y", valid=True, images=views)])
    assert 'class="samples views"' in text
    assert [one.shape[0] for one in pictures(text)] == [40, 20]
    assert "<figcaption>global 1</figcaption>" in text
