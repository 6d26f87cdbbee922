"""Each way alone: its results equal those of its library, and it says why it cannot run."""

from __future__ import annotations

import dataclasses
import io
import struct
import sys
import zlib
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as tv

from gpuflow.decode.codecs import decoder_description
from gpuflow.errors import BadSampleError
from gpuflow.parity.images import Encoded, hostile_images
from gpuflow.parity.others import NAIVE, ways_of
from gpuflow.parity.ways import Prefix, Result, Training, Way, prefixes_of
from gpuflow.sources import source_spec
from gpuflow.stages import Normalize
from tests.datasets import RAW, VAL, Entries
from tests.images import encode, photo, png_chunk
from tests.parity.conftest import read
from tests.running import images as cpu_images

SAMPLES = {sample.name: sample.data for sample in hostile_images()}
SOME = ["jpeg 4:2:0", "jpeg EXIF 6", "text", "jpeg gray", "png with alpha", "jpeg cut short", "jpeg 400x3"]
GOOD = [name for name in SOME if name not in ("text", "jpeg cut short")]
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


def setup(folder: Path, val: Entries = VAL, serve: Entries | None = VAL) -> tuple[dict[str, Way], list[Prefix]]:
    """Every way of a configuration, and the prefixes for the images `SOME`."""
    config = read(folder / "photos", folder, val, serve)
    return dict(ways_of(config, "val")), list(prefixes_of(config.programs["val"], encoded()))


def encoded() -> list[Encoded]:
    return [SAMPLES[name] for name in SOME]


def results(way: Way, prefix: Prefix) -> dict[str, Result]:
    found = dict(zip(SOME, way.run(prefix, encoded()), strict=True))
    for name, size in zip(SOME, prefix.sizes, strict=True):
        result = found[name]
        if size is not None and isinstance(result, torch.Tensor):
            found[name] = result[:, : size[0], : size[1]]
    return found


def tensors(way: Way, prefix: Prefix) -> dict[str, torch.Tensor]:
    return {name: result for name, result in results(way, prefix).items() if isinstance(result, torch.Tensor)}


# --- ours -------------------------------------------------------------------------------------------------------------


def test_val_is_the_pipeline(folder: Path) -> None:
    ways, prefixes = setup(folder)
    found = results(ways["val"], prefixes[-1])
    good = torch.stack([found[name] for name in GOOD])  # type: ignore[misc]
    assert torch.equal(good, cpu_images(prefixes[-1].program, [SAMPLES[name].tobytes() for name in GOOD]))
    for name, reason in (("text", "decode: not an image"), ("jpeg cut short", "decode: truncated: no end-of-image")):
        assert isinstance(found[name], BadSampleError)
        assert str(found[name]).startswith(reason)
    assert ways["val"].describe() == decoder_description()


def test_val_gives_results_that_outlive_their_batch(folder: Path) -> None:
    ways, prefixes = setup(folder)
    many = encoded() * 20
    found = list(ways["val"].run(prefixes[-1], many))
    first, last = found[0], found[-len(SOME)]
    assert isinstance(first, torch.Tensor) and isinstance(last, torch.Tensor)
    assert torch.equal(first, last)


def test_serve_is_the_graph_up_to_each_stage_of_one_size(folder: Path) -> None:
    ways, prefixes = setup(folder)
    refusals = [ways["serve"].refuses(prefix) for prefix in prefixes]
    assert refusals == ["a graph gives images of one size, and after this stage they differ"] * 2 + [None, None]
    for prefix in prefixes[2:]:
        found, expected = results(ways["serve"], prefix), results(ways["val"], prefix)
        assert list(found) == list(expected)
        assert all(torch.equal(found[name], expected[name]) for name in GOOD)  # type: ignore[arg-type]
        assert {name for name in SOME if isinstance(found[name], BadSampleError)} == {"text", "jpeg cut short"}
    assert ways["serve"].describe().startswith("omniback 0.")


def test_where_serving_has_other_stages_its_whole_counts(folder: Path) -> None:
    other = [*VAL[:2], {"center_crop": {"size": [24, 20]}}, VAL[3]]
    ways, prefixes = setup(folder, serve=other)
    assert ways["serve"].refuses(prefixes[2]) == "serving has center_crop(size=(24, 20)) at this stage"
    assert ways["serve"].refuses(prefixes[3]) is None
    assert tensors(ways["serve"], prefixes[3])["jpeg gray"].shape == (3, 24, 20)


def test_where_the_model_may_do_the_rest(folder: Path) -> None:
    ways, prefixes = setup(folder, serve=RAW)
    assert ways["serve"].refuses(prefixes[2]) is None
    assert ways["serve"].refuses(prefixes[3]) == "serving ends before this stage, which a model can contain"
    assert tensors(ways["serve"], prefixes[2])["jpeg gray"].dtype == torch.uint8


def test_serving_that_lacks_a_stage_that_no_model_has_is_compared_as_a_whole(folder: Path) -> None:
    equalize: dict[str, Any] = {"equalize": {}}
    for missing in ([equalize], [equalize, VAL[3]]):
        ways, prefixes = setup(folder, val=[*RAW, *missing], serve=RAW)
        assert ways["serve"].refuses(prefixes[2]) is None
        assert [ways["serve"].refuses(one) for one in prefixes[3:-1]] == ["serving ends before this stage"] * (
            len(missing) - 1
        )
        assert ways["serve"].refuses(prefixes[-1]) is None
        assert tensors(ways["serve"], prefixes[-1])["jpeg gray"].dtype == torch.uint8


def test_where_serving_has_more_stages(folder: Path) -> None:
    ways, prefixes = setup(folder, val=RAW, serve=VAL)
    assert tensors(ways["serve"], prefixes[2])["jpeg gray"].dtype == torch.float32


# --- others -----------------------------------------------------------------------------------------------------------


def pil(name: str) -> Image.Image:
    return Image.open(io.BytesIO(SAMPLES[name].tobytes())).convert("RGB")


def test_torchvision_transforms_tensors_and_pillow_pil_images(folder: Path) -> None:
    ways, prefixes = setup(folder)
    transform = v2.Compose([v2.Resize(32), v2.CenterCrop(24), Normalize().torchvision()])
    for way, prepare in (("torchvision", tv.pil_to_tensor), ("pillow", lambda image: image)):
        found = results(ways[way], prefixes[3])
        assert {name for name in SOME if isinstance(found[name], BadSampleError)} == {"text", "jpeg cut short"}
        for name in GOOD:
            assert torch.equal(found[name], transform(prepare(pil(name))))  # type: ignore[arg-type]
            assert type(found[name]) is torch.Tensor
    decoded = tensors(ways["pillow"], prefixes[0])["jpeg EXIF 6"]
    assert torch.equal(decoded, tv.pil_to_tensor(pil("jpeg EXIF 6")))


def test_torchcodec_decodes_for_the_same_transforms(folder: Path) -> None:
    ways, prefixes = setup(folder)
    if (reason := ways["torchcodec"].missing()) is not None:
        pytest.skip(reason)
    found, ours = tensors(ways["torchcodec"], prefixes[-1]), tensors(ways["torchvision"], prefixes[-1])
    assert set(found) == set(GOOD)
    for name in ("jpeg 4:2:0", "jpeg gray", "jpeg 400x3"):
        assert torch.equal(found[name], ours[name]), name
    turned = tv.pil_to_tensor(ImageOps.exif_transpose(Image.open(io.BytesIO(SAMPLES["jpeg EXIF 6"].tobytes()))))
    decoded = tensors(ways["torchcodec"], prefixes[0])["jpeg EXIF 6"]
    assert torch.equal(decoded[:, :, :40], turned[:, : decoded.shape[1], :40])


@pytest.mark.parametrize("color", ["gray", "bgr"])
def test_torchvision_decodes_as_the_decoder_says(color: str, folder: Path) -> None:
    ways, prefixes = setup(folder, val=[{"decode": {"color": color, "orientation": "apply"}}, *RAW[1:]], serve=None)
    found, ours = tensors(ways["torchvision"], prefixes[0]), tensors(ways["val"], prefixes[0])
    for name in GOOD:
        assert (found[name].int() - ours[name].int()).abs().max() <= 1, name
    assert ours["jpeg EXIF 6"].shape == (1 if color == "gray" else 3, 60, 40)


def test_filters_that_pil_lacks_give_no_warning(folder: Path) -> None:
    resize = {"resize": {"height": 20, "width": 20, "antialias": False}}
    ways, prefixes = setup(folder, val=[{"decode": {}}, resize], serve=None)
    assert len(tensors(ways["pillow"], prefixes[1])) == len(GOOD)  # warnings are errors here


def test_opencv_is_imdecode_and_resize(folder: Path) -> None:
    ways, prefixes = setup(folder)
    decode, resize, crop, whole = (tensors(ways["opencv"], prefix) for prefix in prefixes)
    pixels: Any = cv2.imdecode(SAMPLES["jpeg 4:2:0"], cv2.IMREAD_COLOR_RGB)
    assert np.array_equal(decode["jpeg 4:2:0"].permute(1, 2, 0).numpy(), pixels)
    small = cv2.resize(pixels, (43, 32))
    assert np.array_equal(resize["jpeg 4:2:0"].permute(1, 2, 0).numpy(), small)
    assert np.array_equal(crop["jpeg 4:2:0"].permute(1, 2, 0).numpy(), small[4:28, 10:34])
    assert torch.equal(whole["jpeg 4:2:0"], Normalize().torchvision()(crop["jpeg 4:2:0"]).as_subclass(torch.Tensor))
    turned: Any = cv2.imdecode(SAMPLES["jpeg EXIF 6"], cv2.IMREAD_COLOR_RGB)
    assert np.array_equal(decode["jpeg EXIF 6"].permute(1, 2, 0).numpy()[:, :40], turned[:40])
    assert isinstance(results(ways["opencv"], prefixes[0])["text"], BadSampleError)


def test_opencv_reports_what_a_stage_refuses_as_training_does(folder: Path) -> None:
    """A crop that is larger than the image, for example."""
    ways, prefixes = setup(folder, val=(RAW[0], {"random_crop": {"size": 40}}))
    ours, theirs = (results(ways[name], prefixes[-1]) for name in ("val", "opencv"))
    assert str(theirs["jpeg 400x3"]) == str(ours["jpeg 400x3"])
    assert "the crop is larger than the image" in str(theirs["jpeg 400x3"])


def test_opencv_makes_every_move_and_runs_every_stage(folder: Path) -> None:
    flip, grayscale = {"flip": {"horizontal": 1.0, "vertical": 1.0}}, {"torchvision": {"name": "Grayscale"}}
    padded = {"center_crop": {"size": [90, 100]}}
    ways, prefixes = setup(folder, val=[{"decode": {}}, flip, padded, grayscale], serve=None)
    found, ours = (tensors(ways[way], prefixes[-1]) for way in ("opencv", "val"))
    for name in ("jpeg 4:2:0", "jpeg gray", "png with alpha"):
        assert torch.equal(found[name], ours[name])


def test_torchpipes_operators_go_straight_to_the_final_size(folder: Path) -> None:
    ways, prefixes = setup(folder)
    assert [ways["torchpipe_cpu"].refuses(prefix) is None for prefix in prefixes] == [False, False, False, True]
    found = tensors(ways["torchpipe_cpu"], prefixes[3])
    decoded: Any = cv2.imdecode(SAMPLES["jpeg 4:2:0"], cv2.IMREAD_COLOR_RGB)
    pixels = cv2.resize(decoded, (24, 24))
    expected = Normalize().torchvision()(torch.from_numpy(pixels).permute(2, 0, 1))
    assert torch.equal(found["jpeg 4:2:0"], expected)
    operators = "S[DecodeMat,ResizeMat,CvtColorMat,Mat2Tensor]"
    assert ways["torchpipe_cpu"].describe().endswith(f"{operators} straight to 24x24, without crops")


# --- what cannot run --------------------------------------------------------------------------------------------------


@no_gpu
@pytest.mark.usefixtures("operators")
def test_what_needs_a_gpu(folder: Path) -> None:
    ways, _ = setup(folder)
    missing = {name: way.missing() for name, way in ways.items() if name != "torchcodec"}
    gpu = ("val@cuda", "serve@cuda", "torchpipe_gpu", "torchvision@cuda")
    assert missing == {name: "torch sees no NVIDIA GPU here" if name in gpu else None for name in missing}
    assert set(NAIVE) < set(ways)


def test_torchcodec_that_does_not_import(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ways, _ = setup(folder)
    monkeypatch.setitem(sys.modules, "torchcodec.decoders", None)
    assert ways["torchcodec"].missing() == (
        "it needs torchcodec 0.16 or newer: import of torchcodec.decoders halted; None in sys.modules; "
        "pip install 'torchcodec>=0.16'"
    )


def test_pipelines_that_a_way_cannot_run(folder: Path) -> None:
    ways, _ = setup(folder, val=[{"decode": {"color": "gray"}}, *RAW[1:]], serve=None)
    assert ways["torchpipe_cpu"].missing() == "torchpipe's operators give no gray images"
    assert ways["serve"].missing() == f"{folder}/y.yaml has no block serve"
    ways, _ = setup(folder, val=[{"decode": {"backend": "gpu"}}, *RAW[1:]], serve=None)
    assert ways["val"].missing() == "decode(backend='gpu') runs only on a GPU"
    ways, _ = setup(folder, val=[{"decode": {}}, {"random_crop": {"size": 2}}], serve=None)
    assert ways["torchvision"].missing() == "random_crop(size=2) is random, so torchvision draws something else"


@pytest.mark.parametrize("name", ["torchpipe_cpu", "torchpipe_gpu"])
@pytest.mark.usefixtures("operators")
def test_a_pipeline_that_begins_with_a_preset(name: str, photos: Path, tmp_path: Path) -> None:
    from gpuflow.config import read_config
    from gpuflow.stages import STAGES

    block = f"{{preset: {name}, height: 20, width: 30, stages: [normalize]}}"
    path = tmp_path / "x.yaml"
    path.write_text(f"source: {{folder: {photos}}}\npipelines: {{val: {block}}}\nserve: {block}\n")
    ways = ways_of(read_config(path, STAGES), "val")
    head = f"preset(name='{name}', height=20, width=30)"
    assert ways["torchvision"].missing() == f"{head} is not torchvision's"
    assert ways["opencv"].missing() == f"{head} decodes and resizes by itself"
    assert ways[name].missing() == "the pipeline itself begins with it"
    for way in "val", "serve":
        assert ways[way].missing() == (None if name == "torchpipe_cpu" else f"{head} runs only on a GPU")


def test_whatever_pillow_raises_is_its_refusal(folder: Path) -> None:
    """A broken chunk of a PNG is a SyntaxError in Pillow; other parsers raise struct.error, IndexError and others."""
    ways, prefixes = setup(folder)
    rng = np.random.default_rng(0)
    packed = zlib.compress(b"".join(b"\0" + rng.bytes(3 * 50) for _ in range(40)))
    header = struct.pack(">IIBBBBB", 50, 40, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", packed[:900]), (b"\0\1\2\3", b""), (b"IDAT", packed[900:]), (b"IEND", b""))
    data = b"\x89PNG\r\n\x1a\n" + b"".join(png_chunk(name, body) for name, body in chunks)
    broken = np.frombuffer(data, np.uint8)
    with pytest.raises(SyntaxError), Image.open(io.BytesIO(broken.tobytes())) as image:
        image.load()
    (refused,) = ways["pillow"].run(prefixes[-1], [broken])
    assert isinstance(refused, BadSampleError)
    assert refused.stage == "torchvision"


def test_pillow_composites_over_the_background_too(folder: Path) -> None:
    entries = [{"decode": {"background": [255, 0, 9]}}, *VAL[1:]]
    ways, prefixes = setup(folder, entries, entries)
    data = [SAMPLES["png with alpha"]]
    ours, theirs = (next(iter(ways[name].run(prefixes[0], data))) for name in ("val", "pillow"))
    assert isinstance(ours, torch.Tensor) and isinstance(theirs, torch.Tensor)
    height, width = theirs.shape[1:]
    assert (ours[:, :height, :width].float() - theirs.float()).abs().max() <= 1


def test_named_formats_are_the_same_image_in_each_way(folder: Path) -> None:
    pixels = np.asarray(cv2.GaussianBlur(photo(60, 80), (9, 9), 3), np.uint8)
    files = [np.frombuffer(encode(pixels, form), np.uint8) for form in ("TIFF", "JPEG2000", "PNG")]
    stages: Entries = [{"decode": {"formats": ["tiff", "jp2"]}}, *VAL[1:]]
    config = read(folder / "photos", folder, stages, stages)
    ways = dict(ways_of(config, "val"))
    prefix = list(prefixes_of(config.programs["val"], files))[-1]
    for name in ("val", "torchvision", "serve"):
        tiff, jp2, png = ways[name].run(prefix, files)
        assert isinstance(tiff, torch.Tensor) and isinstance(jp2, torch.Tensor) and isinstance(png, torch.Tensor)
        assert torch.equal(tiff, png) and torch.equal(jp2, png), name


@pytest.mark.parametrize(
    "source", [{"hf": "ds", "splits": ["train", "val"]}, {"hf": "ds"}, {"coco": "x.json", "images": "x"}]
)
def test_the_loader_runs_on_images_of_our_own_whatever_the_source(source: dict[str, Any], folder: Path) -> None:
    config = read(folder / "photos", folder)
    config = dataclasses.replace(config, source_block=source_spec(**source))
    prefix = list(prefixes_of(config.programs["val"], encoded()))[-1]
    found = list(Training(config, "val", "cpu").run(prefix, encoded()))
    assert [isinstance(one, torch.Tensor) for one in found] == [name in GOOD for name in SOME]
