"""The output of `gpuflow explain`: stages, shapes, folding, threads, decoder and device."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import yaml
from rich.console import Console

import gpuflow
from gpuflow.config import read_config
from gpuflow.decode.codecs import decoder_description
from gpuflow.sources import fingerprint_of, open_source, source_spec
from gpuflow.stages import STAGES
from gpuflow.tools.explain import explain
from gpuflow.tools.samples import make_detection_samples
from tests.datasets import make_photos, write_config
from tests.images import encode
from tests.packages.toning.toning import MaskBlue


def explained(path: Path, *overrides: str) -> str:
    console = Console(width=220, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    try:
        stages = {**STAGES, "mask_blue": MaskBlue}
        console.print(explain(read_config(path, stages, overrides)), soft_wrap=True)
        return console.export_text()
    finally:
        console.file.close()


@pytest.fixture
def config(tmp_path: Path) -> Path:
    make_photos(tmp_path / "photos", classes=3, each=4)
    val = [{"decode": {}}, {"resize": {"shorter": 32}}, {"center_crop": {"size": 24}}, {"normalize": {}}]
    serve = {"stages": val, "model": {"file": "model.onnx"}}
    return write_config(tmp_path / "x.yaml", tmp_path / "photos", val=val, serve=serve)


def test_names_every_stage_with_what_it_gives_and_runs_as(config: Path) -> None:
    lines = [line.split() for line in explained(config).splitlines()]
    table = [" ".join(line) for line in lines]
    for expected in (
        "stage gives runs as",
        "decode() uint8 ?x?x3 hwc 1 decode",
        "random_resized_crop(size=24) uint8 24x24x3 hwc 2 one resampling",
        "flip(horizontal=0.5) uint8 24x24x3 hwc 2 one resampling",
        "color_jitter(brightness=0.2, contrast=0.2) uint8 24x24x3 hwc 3 pixel by pixel",
        "normalize() float32 24x24x3 nchw 3 pixel by pixel",
        "resize(shorter=32) uint8 ?x?x3 hwc 2 one resampling",
    ):
        assert expected in table


def test_says_where_and_on_what_it_runs(config: Path, tmp_path: Path) -> None:
    lines = [" ".join(line.split()) for line in explained(config).splitlines()]
    programs = read_config(config, STAGES).programs
    whole = open_source(source_spec(folder=str(tmp_path / "photos")))
    for expected in (
        f"preprocessing {programs['train'].pipeline.fingerprint}",
        f"preprocessing {programs['val'].pipeline.fingerprint}",
        f"source {tmp_path}/photos: 12 samples, 3 classes",
        f"fingerprint {fingerprint_of(whole)}; ranks of a process group compare it, this command does not",
        "batch 4 images of float32 24x24x3 nchw (0.0 MB), 3 ahead",
        "order shuffled, seed 0",
        "order as in the source, seed 0",
        "bad samples replace (by default, as samples are drawn)",
        "bad samples skip (by default, as samples are not drawn and batch.drop_last is false)",
        "device cpu, 2 decode thread(s)",
        f"decoder {decoder_description()}",
        "model model.onnx (auto)",
    ):
        assert expected in lines


def test_says_who_decodes(config: Path) -> None:
    expected = "3 decode thread(s), and 2 decode process(es) that take over when started"
    assert expected in explained(config, "run.threads=3", "run.processes=2")
    assert "process(es)" not in explained(config, "run.threads=3", "run.processes=2", "run.readers=1")
    assert "process(es)" not in explained(config, "run.processes=2", "source.folder=memory://photos"), (
        "threads read URLs"
    )


def test_says_what_the_cpu_shares_in(config: Path) -> None:
    share = "pipelines.train.stages.decode.cpu_share=0.25"
    assert "; 25% of each batch at first on the CPU, by 2 thread(s)" in explained(config, share)
    fixed = explained(config, share, "run.deterministic=true")
    assert "; 25% of each batch on the CPU, by 2 thread(s)" in fixed
    assert "of each batch" not in explained(config)


OPAQUE = "pipelines.val.stages.3={torchvision: {name: RandomInvert}}"


def test_says_what_runs_in_python_for_each_image(config: Path) -> None:
    assert "in Python" not in explained(config)
    text = explained(config, OPAQUE, "run.threads=2")
    assert "in Python for each image" in text
    lines = [" ".join(line.split()) for line in text.splitlines() if line.startswith("  in Python")]
    cost, remedy = "for each image, between native calls", "stages of gpuflow and JPEGs avoid that"
    alone = f"{cost}, on one thread at a time; {remedy}"
    assert lines == [f"in Python torchvision: {alone}, run.processes: N spreads it over cores"]
    assert f"{cost}, in all decode processes at once; {remedy}\n" in explained(config, OPAQUE, "run.processes=2")
    assert f"{alone}\n" in explained(config, OPAQUE, "run.readers=1"), "there are no processes then"


@pytest.mark.parametrize(
    ("override", "part"),
    [
        ("pipelines.train.stages.decode.formats=[tiff, gif]", "decode of tiff, gif"),
        ("pipelines.train.stages.3=mask_blue", "mask_blue"),
        ("pipelines.train.stages.3={rand_augment: {}}", ""),
    ],
)
def test_names_decoders_and_stages_in_python(config: Path, override: str, part: str) -> None:
    parts = [line for line in explained(config, override).splitlines() if line.startswith("  in Python")]
    assert [line.partition(":")[0].split(maxsplit=2)[2] for line in parts] == [part] * bool(part)


def test_says_which_images_are_no_jpegs(config: Path, tmp_path: Path) -> None:
    pixels = np.zeros((40, 50, 3), np.uint8)
    for number, form in enumerate(("PNG", "PNG", "WEBP")):
        (tmp_path / f"photos/class_0/{number}.png").write_bytes(encode(pixels, form))
    text = explained(config)
    counted = "3 of 15 images that were looked at (png, webp)"
    assert text.count(f"  in Python      {counted}: each is decoded whole, between native calls") == 2
    assert counted not in explained(config, OPAQUE).split("\nval\n")[1], "what costs more is said alone"


def test_mixing_stages_run_on_whole_batches_and_make_labels_probabilities(config: Path) -> None:
    text = explained(config, "pipelines.train.stages.4={cutmix: {}}")
    assert "cutmix() uint8 24x24x3 hwc 4 on whole batches" in [" ".join(line.split()) for line in text.splitlines()]
    assert text.count("labels         float32, the probability of each class, as samples of a batch are mixed") == 1
    assert "mixed" not in explained(config)


def test_a_source_that_is_not_there_is_no_error(config: Path, tmp_path: Path) -> None:
    text = explained(config, f"source.folder={tmp_path}/absent")
    assert f"source.folder must be a directory, got '{tmp_path}/absent', which does not exist; check the path" in text


def test_says_how_it_took_the_first_row_of_a_listing(tmp_path: Path) -> None:
    files = make_photos(tmp_path / "photos", classes=1, each=3)
    listing = tmp_path / "list.csv"
    config = write_config(tmp_path / "y.yaml", "", source={"listing": str(listing)})
    rows = "".join(f"{file},0\n" for file in files)
    for header, note in (
        ("id,breed\n", "header id,breed: paths from 'id', labels from 'breed'"),
        ("", "no header, its first row is a sample"),
    ):
        listing.write_text(header + rows)
        assert f"{listing}: 3 samples, 1 classes; {note}\n" in explained(config)


def test_no_processes_for_files_behind_urls(tmp_path: Path) -> None:
    listing = tmp_path / "list.csv"
    listing.write_text("".join(f"memory://photos/{i}.jpg,0\n" for i in range(3)))
    config = write_config(tmp_path / "y.yaml", "", source={"listing": str(listing)})
    text = explained(config, "run.threads=8", "run.processes=8", "run.readers=0")
    assert "8 decode thread(s)\n" in text


def test_says_how_samples_are_drawn(config: Path, tmp_path: Path) -> None:
    (tmp_path / "w.txt").write_text("1\n" * 12)
    folder = tmp_path / "photos"
    weights = f"source={{folder: {folder}, weights: {{file: {tmp_path}/w.txt, replacement: false}}}}"
    assert "drawn by weights without replacement, seed 0" in explained(config, weights)
    mixed = explained(config, f"source={{mix: [{{source: {{folder: {folder}}}}}, {{source: {{folder: {folder}}}}}]}}")
    assert "each sample drawn from 2 sources in the proportions of their weights, shuffled, seed 0" in mixed
    assert f"{folder} and {folder}: 24 samples, 3 classes" in mixed


def test_counts_classes_and_how_often_an_epoch_draws_them(config: Path, tmp_path: Path) -> None:
    """Counted again from a loader's epoch."""
    (tmp_path / "photos/class_0/000.jpg").rename(tmp_path / "photos/class_2/999.jpg")
    files = sorted((tmp_path / "photos").rglob("*.jpg"))
    sites = ["a" if i < 3 else "b" for i in range(len(files))]
    rows = (f"{file},{file.parent.name},{site}\n" for file, site in zip(files, sites, strict=True))
    (tmp_path / "list.csv").write_text("path,label,site\n" + "".join(rows))
    plain = explained(config)
    assert plain.count("  classes        class_0: 3, class_1: 4, class_2: 5\n") == 2 and "  drawn " not in plain
    balanced = "source.weights={balance: class, samples: 600}"
    by_site = f"source={{listing: {tmp_path}/list.csv, weights: {{balance: {{column: site}}, samples: 600}}}}"
    once = "source.weights={balance: class, replacement: false, samples: 6}"
    until = "each class drawn equally often until its samples are used up, without replacement, seed 0\n"
    assert until in explained(config, once)
    for override, groups, order in (
        (balanced, None, "each class drawn equally often, with replacement"),
        (by_site, sites, "each value of site drawn equally often, with replacement"),
    ):
        with gpuflow.load(config, "train", overrides=[override]) as loader:
            indices = loader._plan.order.indices(0, np.arange(600)).tolist()
            drawn = Counter(groups[i] if groups else f"class_{loader.dataset.labels[i]}" for i in indices)
        assert min(drawn.values()) > 500 / len(drawn)
        counted = ", ".join(f"{name}: {count}" for name, count in sorted(drawn.items()))
        text = explained(config, override)
        assert (
            text.count(f"  drawn          {counted} in epoch 0{'; of site there are a: 3, b: 9' * bool(groups)}\n") == 1
        )
        assert f"  order          {order}, seed 0\n" in text
    assert f"  drawn          {config}: source.weights.file must be" in explained(
        config, "source.weights={file: no.txt}"
    )


def test_of_many_classes_counts_the_largest_and_the_smallest(config: Path, tmp_path: Path) -> None:
    file = next((tmp_path / "photos").rglob("*.jpg"))
    rows = "".join(f"{file},{label}\n" * (label + 1) for label in range(40))
    (tmp_path / "list.csv").write_text(rows)
    counts = "39: 40, 38: 39, 37: 38, 36: 37, 35: 36, ..., 4: 5, 3: 4, 2: 3, 1: 2, 0: 1"
    assert f"  classes        {counts}\n" in explained(config, f"source={{listing: {tmp_path}/list.csv}}")


def test_splits_are_counted(config: Path) -> None:
    text = explained(config, "source.split={train: 0.75, val: 0.25}")
    moves = "adding or removing files moves samples between the parts"
    assert f"9 samples, 3 classes, split train of train 9, val 3; {moves}" in text
    assert f"3 samples, 3 classes, split val of train 9, val 3; {moves}" in text
    assert moves not in explained(config)


def test_serving_may_end_with_the_images(config: Path) -> None:
    lines = [" ".join(line.split()) for line in explained(config, "serve.model=null").splitlines()]
    assert "model none, images only" in lines


def described(tmp_path: Path, source: dict[str, object]) -> str:
    path = write_config(tmp_path / "fields.yaml", tmp_path)
    document = yaml.safe_load(path.read_text())
    document["source"] = source
    path.write_text(yaml.safe_dump(document))
    return explained(path)


def test_names_the_fields_and_what_was_left_out(tmp_path: Path) -> None:
    make_detection_samples(tmp_path / "shapes", 6)
    text = described(
        tmp_path,
        {
            "coco": str(tmp_path / "shapes/instances.json"),
            "images": str(tmp_path / "shapes/images"),
            "split": {"train": 0.5, "val": 0.5},
        },
    )
    assert "fields         image, boxes (labels 'labels' of 3 classes), mask (an instance each); no label\n" in text
    assert (
        "3 samples, 3 classes, split train of train 3, val 3 (not stratified: samples have not one class each); "
        in text
    )
    assert " annotations, 0 images without any" in text
    listing: dict[str, object] = {"listing": str(tmp_path / "shapes/listing.jsonl")}
    text = described(tmp_path, listing | {"fields": {"tags": {"type": "label", "kind": "classes", "column": "labels"}}})
    assert "fields         image, label (classes)\n" in text
    text = described(
        tmp_path, listing | {"fields": {"shapes": {"type": "mask", "kind": "polygons", "column": "polygons"}}}
    )
    assert "fields         image, shapes (mask, an instance each); no label\n" in text


def test_an_image_and_a_label_are_no_news(config: Path) -> None:
    assert "fields" not in explained(config)
