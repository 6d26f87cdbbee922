"""Laws of records: order, resume, ranks, bad samples and workers hold for every field as they do for images."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

import gpuflow
from gpuflow.loader.batch import RaggedTensor, targets_of
from gpuflow.loader.records import Blocks
from gpuflow.pipeline.records import Field, MaskFile
from gpuflow.pipeline.targets import TargetRules
from tests.datasets import Entries, MemorySource, deadline, fault_of, flat, interleave, loader_of
from tests.datasets import rows as image_rows
from tests.records import FIELDS, MemoryRecords, png

COUNT = 23
ENTRIES: Entries = (
    {"decode": {}},
    {"random_resized_crop": {"size": (24, 20), "scale": (0.3, 1.0)}},
    {"flip": {}},
    {"normalize": {}},
)


@pytest.fixture(autouse=True)
def _in_time() -> Iterator[None]:
    with deadline(120):
        yield


@pytest.fixture(scope="module")
def source() -> MemoryRecords:
    return MemoryRecords.of(COUNT)


def plain(value: Any) -> Any:
    """A value of a field that compares bit for bit."""
    return (value.dtype, tuple(value.shape), value.numpy().tobytes()) if isinstance(value, torch.Tensor) else value


def rows(batch: gpuflow.Batch) -> list[Any]:
    """Each sample of a batch: its image, label and fields; the third item says whether it is valid."""
    return [
        (*image, {name: plain(column[i]) for name, column in batch.fields.items()})
        for i, image in enumerate(image_rows(batch))
    ]


def steps_of(loader: gpuflow.Loader) -> list[list[Any]]:
    return [rows(batch) for batch in loader]


@pytest.fixture(scope="module")
def reference(source: MemoryRecords) -> list[list[list[Any]]]:
    with loader_of(source, ENTRIES, threads=1, prefetch=1) as loader:
        return [steps_of(loader) for _ in range(2)]


def test_every_sample_has_its_own_record(source: MemoryRecords, reference: list[list[list[Any]]]) -> None:
    for index, label, _, _, fields in flat(reference[0]):
        row = source.rows[index]
        assert label == source.labels[index]
        assert (fields["caption"], fields["extra"]) == (row["caption"], row["extra"])
        assert np.frombuffer(fields["weight"][2])[0] == row["weight"]
        counts = {fields[name][1][0] for name in ("boxes", "box_labels", "masks", "points")}
        assert len(counts) == 1 and counts.pop() <= len(row["boxes"])
        assert fields["masks"][1][1:] == fields["levels"][1] == (24, 20)


def test_without_geometry_a_record_comes_as_it_is(source: MemoryRecords) -> None:
    entries: Entries = ({"decode": {}}, {"resize": {"height": 30, "width": 30}})
    with loader_of(source, entries, rules=TargetRules(min_area=0)) as loader:
        for batch in loader:
            for i, index in enumerate(batch.indices.tolist()):
                row = source.rows[index]
                assert batch["box_labels"][i].tolist() == row["box_labels"].tolist()
                assert len(batch["boxes"][i]) == len(row["boxes"]) == len(batch["masks"][i])


@pytest.mark.parametrize("threads", [2, 5])
@pytest.mark.parametrize("batch_size", [1, 4, 64])
def test_threads_and_chunks_change_no_record(
    threads: int, batch_size: int, source: MemoryRecords, reference: list[list[list[Any]]]
) -> None:
    with loader_of(source, ENTRIES, threads=threads, batch_size=batch_size) as loader:
        assert [flat(steps_of(loader)) for _ in range(2)] == [flat(epoch) for epoch in reference]


def test_worker_processes_change_no_record(source: MemoryRecords, reference: list[list[list[Any]]]) -> None:
    with loader_of(source, ENTRIES, processes=2) as loader:
        loader._feed.decoder.start_workers()
        workers = loader._feed.decoder.workers
        assert workers is not None
        while not workers.counts()["at_work"]:
            torch.randn(10)
        assert flat(steps_of(loader)) == flat(reference[0])


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_together_see_the_one_sequence(
    world_size: int, source: MemoryRecords, reference: list[list[list[Any]]]
) -> None:
    ranks = []
    for rank in range(world_size):
        with loader_of(source, ENTRIES, rank=rank, world_size=world_size) as loader:
            ranks.append(steps_of(loader))
    assert interleave(ranks) == flat(reference[0])


def test_resume_at_every_step_equals_no_interruption(source: MemoryRecords, reference: list[list[list[Any]]]) -> None:
    with loader_of(source, ENTRIES) as loader:
        states = [loader.state_dict()]
        states += [loader.state_dict() for _ in loader]
    for step, state in enumerate(states[:-1]):
        with loader_of(source, ENTRIES, threads=3) as loader:
            loader.load_state_dict(json.loads(json.dumps(state)))
            assert flat(steps_of(loader)) == flat(reference[0][step:])


# --- bad records ------------------------------------------------------------------------------------------------------


def spoilt(kind: str, index: int) -> MemoryRecords:
    """A source one of whose records is bad."""
    source = MemoryRecords.of(COUNT)
    row = source.rows[index] = dict(source.rows[index])
    match kind:
        case "error":
            source.errors[index] = "masks: no such file"
        case "nan":
            row["boxes"] = row["boxes"].copy()
            row["boxes"][0, 0] = np.nan
        case "degenerate":
            row["boxes"] = row["boxes"][:, [2, 1, 0, 3]]
        case "outside":
            row["boxes"] = row["boxes"] + np.float32(500)
        case "labels":
            row["box_labels"] = row["box_labels"][:-1]
        case "size":
            row["levels"] = png(np.zeros((7, 7), np.uint8))
        case "file":
            row["levels"] = MaskFile(b"no image")
        case "instances":
            row["masks"] = row["masks"][:-1]
        case "points":
            row["points"] = row["points"][:-1]
    return source


REASONS = {
    "error": "masks: no such file",
    "nan": "boxes[0] must have finite numbers",
    "degenerate": "boxes[0] must have x1 < x2 and y1 < y2",
    "outside": "boxes[0] lies outside the image of",
    "labels": "box_labels has 2 rows, and boxes has 3",
    "size": "levels has 7x7 pixels, and its image",
    "file": "levels must be a PNG, got bytes that begin with ",
    "instances": "masks has 2 rows, and boxes has 3",
    "points": "points has 2 rows, and boxes has 3",
}


@pytest.mark.parametrize("kind", REASONS)
def test_a_bad_record_is_a_bad_sample(kind: str, tmp_path: Path, reference: list[list[list[Any]]]) -> None:
    """`replace` gives another sample whole: its image, its label and its fields. All others stay as they are."""
    source, bad_file = spoilt(kind, 7), tmp_path / "bad.jsonl"
    with loader_of(source, ENTRIES, bad_file=bad_file) as loader:
        found = flat(steps_of(loader))
        assert loader.stats()["bad"] == 1
    (listed,) = map(json.loads, bad_file.read_text().splitlines())
    assert (listed["index"], listed["stage"]) == (7, "record") and listed["reason"].startswith(REASONS[kind])
    for ours, sound in zip(found, flat(reference[0]), strict=True):
        if sound[0] == 7:
            assert ours[0] != 7 and ours[4]["extra"] == {"number": ours[0]} and ours[1] == source.labels[ours[0]]
        else:
            assert ours == sound


@pytest.mark.filterwarnings("ignore:.* samples are bad so far")
def test_replacements_with_bad_records_are_replaced_again(tmp_path: Path) -> None:
    source = MemoryRecords.of(COUNT)
    source.errors = {i: "gone" for i in range(COUNT) if i != 5}
    with loader_of(source, ENTRIES, bad_file=tmp_path / "bad.jsonl") as loader:
        assert {row[0] for row in flat(steps_of(loader))} == {5}
    assert len((tmp_path / "bad.jsonl").read_text().splitlines()) == COUNT - 1


def test_skipping_bad_records_leaves_the_others_rows(reference: list[list[list[Any]]]) -> None:
    with loader_of(spoilt("nan", 7), ENTRIES, policy="skip") as loader:
        assert flat(steps_of(loader)) == [row for row in flat(reference[0]) if row[0] != 7]


def test_raising_names_the_record() -> None:
    with loader_of(spoilt("size", 7), ENTRIES, policy="raise") as loader:
        _, error = fault_of(loader)
    assert isinstance(error, gpuflow.BadSampleError) and (error.stage, error.index) == ("record", 7)


def test_a_bad_image_is_replaced_with_its_record() -> None:
    source = MemoryRecords.of(COUNT)
    source.source.images[7] = b"no image"
    with loader_of(source, ENTRIES) as loader:
        for row in flat(steps_of(loader)):
            assert row[0] != 7 and row[4]["extra"] == {"number": row[0]}


# --- the batch --------------------------------------------------------------------------------------------------------


def test_fields_lie_in_one_block(source: MemoryRecords) -> None:
    with loader_of(source, ENTRIES, batch_size=COUNT) as loader:
        (batch,) = loader
    tensors = [
        tensor
        for column in batch.fields.values()
        if not isinstance(column, list)
        for tensor in ([column.values, column.offsets] if isinstance(column, RaggedTensor) else [column])
    ]
    assert len(tensors) == 2 * 4 + 2
    start = min(tensor.data_ptr() for tensor in tensors)
    end = max(tensor.data_ptr() + tensor.nbytes for tensor in tensors)
    assert end - start <= sum(tensor.nbytes for tensor in tensors) + 16 * len(tensors)


def test_large_blocks_are_used_again_once_no_batch_holds_them() -> None:
    blocks, array = Blocks(keep=2), np.arange(2**20, dtype=np.int32)
    small = np.arange(6, dtype=np.float32).reshape(2, 3)
    first, of_first = blocks.pack([array, small])
    second, _ = blocks.pack([array + 1, small])
    assert first.data_ptr() != second.data_ptr()
    place = first.data_ptr()
    del first
    third, _ = blocks.pack([array + 2, small])
    assert third.data_ptr() != place, "a tensor of the first block is left"
    assert torch.equal(of_first, torch.from_numpy(small))
    del of_first
    fourth, _ = blocks.pack([array + 3, small])
    assert fourth.data_ptr() == place
    for tensor, added in ((second, 1), (third, 2), (fourth, 3)):
        assert torch.equal(tensor, torch.from_numpy(array + added))


def test_a_small_block_is_no_larger_than_its_tensors() -> None:
    (tensor,) = Blocks(keep=2).pack([np.arange(4)])
    assert tensor.untyped_storage().nbytes() == tensor.nbytes


def test_targets_are_what_torchvisions_detectors_take(source: MemoryRecords) -> None:
    from torchvision import tv_tensors

    with loader_of(source, ENTRIES, batch_size=COUNT) as loader:
        (batch,) = loader
    for i, target in enumerate(batch.targets()):
        boxes = target["boxes"]
        assert isinstance(boxes, tv_tensors.BoundingBoxes) and boxes.canvas_size == (24, 20)
        assert boxes.format == tv_tensors.BoundingBoxFormat.XYXY and boxes.dtype == torch.float32
        assert boxes.data_ptr() == batch["boxes"][i].data_ptr()
        assert isinstance(target["masks"], tv_tensors.Mask) and target["masks"].shape == (len(boxes), 24, 20)
        assert isinstance(target["levels"], tv_tensors.Mask) and target["levels"].shape == (24, 20)
        assert target["keypoints"].shape == (len(boxes), 2, 3)
        assert target["labels"].tolist() == [label + 1 for label in batch["box_labels"][i].tolist()]
        assert int(target["image_id"]) == int(batch.indices[i])
        assert target["caption"] == f"number {int(batch.indices[i])}"
    from_0 = [target["labels"].tolist() for target in batch.targets(background=False)]
    assert from_0 == [labels.tolist() for labels in batch["box_labels"]]


def test_fields_of_one_name_in_targets_keep_their_own() -> None:
    fields = (
        Field(name="bb", type="boxes", labels="kinds"),
        Field(name="labels", type="text"),
        Field(name="left", type="keypoints"),
        Field(name="right", type="keypoints"),
        Field(name="shapes", type="mask", instances=True),
        Field(name="masks", type="mask"),
    )
    ragged = {
        "bb": torch.zeros(2, 4),
        "kinds": torch.tensor([3, 4]),
        "left": torch.zeros(2, 5, 3),
        "right": torch.zeros(2, 6, 3),
        "shapes": torch.zeros(2, 8, 9, dtype=torch.uint8),
    }
    given = {name: RaggedTensor(values, torch.tensor([0, 2])) for name, values in ragged.items()}
    others = {"labels": ["a cat"], "masks": torch.zeros(1, 8, 9, dtype=torch.uint8)}
    (target,) = targets_of(torch.zeros(1, 3, 8, 9), torch.tensor([5]), {**given, **others}, fields)
    assert (target.pop("labels"), target["kinds"].tolist()) == ("a cat", [4, 5])
    assert {name: list(value.shape) for name, value in target.items()} == {
        "image_id": [],
        "boxes": [2, 4],
        "kinds": [2],
        "keypoints": [2, 5, 3],
        "right": [2, 6, 3],
        "shapes": [2, 8, 9],
        "masks": [8, 9],
    }


def test_a_source_without_labels_gives_images_and_targets() -> None:
    """The boxes and their labels are two fields of a batch."""
    source = MemoryRecords.of(9, FIELDS[:1])
    source.has_labels = False
    with loader_of(source, ENTRIES, batch_size=9) as loader:
        ((images, targets),) = loader
    assert images.shape == (9, 3, 24, 20)
    assert [sorted(target) for target in targets] == [["boxes", "image_id", "labels"]] * 9


@pytest.mark.parametrize("field", [Field(name="boxes", type="boxes"), *FIELDS[2:]], ids=lambda field: field.type)
def test_the_only_field_besides_the_image_is_the_second_item(field: Field) -> None:
    source = MemoryRecords.of(9, (field,))
    source.has_labels = False
    with loader_of(source, ENTRIES, batch_size=4) as loader:
        for batch in loader:
            images, second = batch
            assert images is batch.images and second is batch[field.name]
            assert len(batch.targets()) == len(second) == len(batch.indices)
    source.has_labels = True
    with loader_of(source, ENTRIES, batch_size=4) as loader:
        assert all(torch.equal(batch[1], batch.labels) for batch in loader)


def test_an_image_and_a_label_are_the_same_with_fields_and_without(
    source: MemoryRecords, reference: list[list[list[Any]]]
) -> None:
    with loader_of(source.source, ENTRIES) as loader:
        assert loader._plan.targets is None
        alone = [image_rows(batch) for batch in loader]
        batch = next(iter(loader))
    assert flat(alone) == [row[:4] for row in flat(reference[0])]
    assert batch.fields == {} and batch.targets()[0].keys() == {"image_id"}
    with pytest.raises(KeyError, match="no field 'boxes'"):
        batch["boxes"]


def test_records_of_texts_need_no_sizes_that_moves_could_change() -> None:
    source = MemoryRecords.of(9, (Field(name="caption", type="text"),))
    with loader_of(source, ENTRIES, batch_size=9) as loader:
        (batch,) = loader
    assert batch["caption"] == [f"number {i}" for i in batch.indices.tolist()]


def test_instances_in_an_image_file_are_its_levels() -> None:
    source = MemoryRecords.of(4, FIELDS[:2])
    for i, row in enumerate(source.rows):
        levels = np.zeros(source_size(source.source, i), np.uint8)
        for k, box in enumerate(row["boxes"].astype(int)):
            levels[box[1] : box[3] + 1, box[0] : box[2] + 1] = k + 1
        row["masks"] = png(levels)
    entries: Entries = ({"decode": {}}, {"resize": {"height": 40, "width": 40}})
    with loader_of(source, entries, batch_size=4, rules=TargetRules(min_area=0)) as loader:
        (batch,) = loader
    assert [len(masks) for masks in batch["masks"]] == [len(boxes) for boxes in batch["boxes"]]


def source_size(source: MemorySource, i: int) -> tuple[int, int]:
    import cv2

    image = cv2.imdecode(np.frombuffer(source.images[i] or b"", np.uint8), cv2.IMREAD_COLOR)
    assert image is not None
    height, width, _ = image.shape
    return height, width


def test_ragged_tensors_index_like_lists() -> None:
    ragged = RaggedTensor(torch.arange(5), torch.tensor([0, 2, 2, 5]))
    assert [rows.tolist() for rows in ragged] == [[0, 1], [], [2, 3, 4]]
    assert ragged[-1].tolist() == [2, 3, 4] and len(ragged) == 3
    with pytest.raises(IndexError):
        ragged[3]
    assert repr(ragged) == "RaggedTensor(3 samples, values [5] torch.int64)"
    assert [rows.tolist() for rows in pickle.loads(pickle.dumps(ragged))] == [[0, 1], [], [2, 3, 4]]


def test_a_batch_of_a_mix_has_the_classes_of_the_loader_and_one_number_of_keypoints(tmp_path: Path) -> None:
    """Also where the sources number the classes of their boxes otherwise, or have no instance at all."""
    parts = []
    for number, kinds in enumerate((["cat", "dog"], ["dog", "owl"], [])):
        rows = []
        for i in range(4):
            path = tmp_path / f"{number}{i}.png"
            path.write_bytes(png(np.zeros((32, 32), np.uint8)).data)
            boxes = [[1, 1, 20 + k, 30] for k in range(len(kinds))]
            points = [[5, 5, 2, 6, 6, 1]] * len(kinds)
            rows.append({"path": path.name, "boxes": boxes, "kinds": kinds, "points": points})
        (tmp_path / f"{number}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        fields = {"boxes": {"labels": "kinds"}, "points": {"type": "keypoints"}}
        parts.append({"source": {"listing": str(tmp_path / f"{number}.jsonl"), "fields": fields}})
    for order in (parts, parts[::-1]):
        resize = {"resize": {"height": 32, "width": 32}}
        train = {"stages": [{"decode": {}}, resize], "batch": {"size": 3}, "shuffle": True}
        names = ["owl", "cat", "dog"]
        (tmp_path / "x.yaml").write_text(
            yaml.safe_dump({"source": {"mix": order, "classes": names}, "pipelines": {"train": train}})
        )
        with gpuflow.load(tmp_path / "x.yaml", "train") as loader:
            assert loader.classes == tuple(names)
            for batch in loader:
                for i, index in enumerate(batch.indices.tolist()):
                    kinds = [["cat", "dog"], ["dog", "owl"], []][int(Path(loader.dataset.path(index)).name[0])]
                    assert [names[label] for label in batch["kinds"][i].tolist()] == kinds
                    assert batch["points"][i].shape == (len(kinds), 2, 3)
