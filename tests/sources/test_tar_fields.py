"""Shards with declared fields: keys of the .json member, separate members, and what is missing or wrong."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpuflow.errors import ConfigError, SourceError
from gpuflow.pipeline.records import Field, MaskFile, Ragged
from gpuflow.sources import (
    Source,
    fields_of,
    fingerprint_of,
    has_labels,
    left_out_of,
    open_source,
    records_of,
    source_spec,
)
from tests.sources.conftest import ReadAll, tar_bytes
from tests.texts import outline

Members = list[tuple[str, bytes]]


@pytest.fixture(autouse=True)
def in_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def sample(key: str, row: Any, **others: bytes) -> Members:
    members = [(f"{key}.jpg", f"image {key}".encode()), (f"{key}.json", json.dumps(row).encode())]
    return members + [(f"{key}.{suffix.replace('_', '.')}", data) for suffix, data in others.items()]


def opened(members: Members, **keys: Any) -> Source:
    Path("s.tar").write_bytes(tar_bytes(members))
    return open_source(source_spec(tar="s.tar", **keys))


def refused(members: Members, **keys: Any) -> str:
    with pytest.raises(SourceError) as caught:
        opened(members, **keys)
    return outline(caught.value)


def two() -> Members:
    first = {"boxes": [[1, 2, 3, 4]], "kinds": ["cat"], "weight": 2.5}
    second = {"boxes": [[0, 0, 1, 1], [5, 6, 7, 8]], "kinds": ["dog", "cat"], "weight": 1}
    return [
        *sample("0001", first, txt="ein Kätzchen".encode(), cls=b"7", mask_png=b"first"),
        *sample("0002", second, txt=b"dog and cat", cls=b"3", mask_png=b"second"),
    ]


FIELDS = {
    "image": {},
    "label": {},
    "boxes": {"labels": "kinds"},
    "weight": {"type": "number"},
    "text": {},
    "mask": {},
}


@pytest.mark.parametrize("time", ["first", "cached"])
def test_every_suffix_has_its_field(read_all: ReadAll, time: str) -> None:
    source = opened(two(), fields=FIELDS)
    if time == "cached":
        source = open_source(source_spec(tar="s.tar", fields=FIELDS))
    assert read_all(source) == [b"image 0001", b"image 0002"]
    assert source.labels.tolist() == [7, 3] and has_labels(source)
    assert source.shard_sizes == (2,)
    assert fields_of(source) == (
        Field(name="boxes", type="boxes", labels="kinds", classes=("cat", "dog")),
        Field(name="weight", type="number"),
        Field(name="text", type="text"),
        Field(name="mask", type="mask"),
    )
    records = records_of(source, [1, 0])
    assert records.errors == [None, None]
    boxes, kinds = records.columns["boxes"], records.columns["kinds"]
    assert isinstance(boxes, Ragged) and isinstance(kinds, Ragged)
    assert boxes[0].tolist() == [[0, 0, 1, 1], [5, 6, 7, 8]] and boxes[1].tolist() == [[1, 2, 3, 4]]
    assert kinds[0].tolist() == [1, 0] and kinds[1].tolist() == [0]
    assert np.asarray(records.columns["weight"]).tolist() == [1, 2.5]
    assert records.columns["text"] == ["dog and cat", "ein Kätzchen"]
    assert records.columns["mask"] == [MaskFile(b"second"), MaskFile(b"first")]
    source.close()


def test_columns_with_a_dot_are_suffixes() -> None:
    members = [*two(), ("0001.wide.json", b"[1, 2]"), ("0002.wide.json", b"null")]
    members += [("0001.seg", b"a"), ("0002.seg", b"")]
    fields = {"extra": {"type": "any", "column": ".wide.json"}, "mask": {"column": ".seg"}}
    source = opened(members, fields=fields)
    records = records_of(source, [0, 1])
    assert records.columns["extra"] == [[1, 2], None]
    assert records.columns["mask"] == [MaskFile(b"a"), MaskFile(b"")]
    assert records.errors == [None, "mask s.tar/0002.seg: empty file"]
    assert not has_labels(source) and source.labels.tolist() == [0, 0]


def test_a_suffix_has_no_upper_case() -> None:
    """Suffixes of members are those of WebDataset, which lowers them."""
    source = opened([*sample("a", {}), ("a.Caption", b"a cat")], fields={"text": {"column": ".Caption"}})
    assert records_of(source, [0]).columns["text"] == ["a cat"]


def test_several_classes_and_vectors() -> None:
    members = [*sample("a", {}, cls=b"cat|dog"), *sample("b", {}, cls=b"")]
    source = opened(members, fields={"label": {"kind": "classes"}})
    assert source.classes == ("cat", "dog")
    assert source.labels.tolist() == [[1, 1], [0, 0]] and source.labels.dtype == np.uint8
    kinds = {"kind": "classes", "separator": ";"}
    assert opened([*sample("a", {}, cls=b"cat; dog")], fields={"label": kinds}).classes == ("cat", "dog")
    keyed = opened([*sample("a", {"kinds": "cat; dog"})], fields={"label": {**kinds, "column": "kinds"}})
    assert keyed.classes == ("cat", "dog")
    members = [*sample("a", {"point": [1, 2]}), *sample("b", {"point": [3, 4]})]
    source = opened(members, fields={"label": {"kind": "vector", "column": "point"}})
    assert source.labels.tolist() == [[1, 2], [3, 4]] and source.labels.dtype == np.float32


def test_only_image_and_label_are_the_same_samples_as_without_fields() -> None:
    plain = opened(two())
    declared = open_source(source_spec(tar="s.tar", fields={"image": {}, "label": {}}))
    assert fingerprint_of(declared) == fingerprint_of(plain)
    assert declared.labels.tolist() == plain.labels.tolist() and declared.classes == plain.classes
    assert fingerprint_of(open_source(source_spec(tar="s.tar", fields=FIELDS))) != fingerprint_of(plain)


def test_other_extensions_are_images_where_they_are_named() -> None:
    """With an index in the cache for each choice."""
    members = [*two(), ("0003.heic", b"image 0003"), *((f"0003.{x}", b"7") for x in ("cls", "txt", "mask.png"))]
    members.append(("0003.json", json.dumps({"boxes": [], "kinds": [], "weight": 1}).encode()))
    assert len(opened(members, fields=FIELDS, extensions=("heic",))) == 3
    with pytest.raises(SourceError, match=r"/0003\.cls: member must have an image \(jpg, jpeg, png, webp, bmp\), got"):
        open_source(source_spec(tar="s.tar", fields=FIELDS))


def test_a_cache_of_other_arrays_is_made_again(cache_home: Path, read_all: ReadAll) -> None:
    expected = read_all(opened(two(), fields=FIELDS))
    [cache] = (cache_home / "gpuflow").iterdir()
    with cache.open("wb") as file:
        np.savez(file, images=np.zeros(3, np.uint8))
    assert read_all(open_source(source_spec(tar="s.tar", fields=FIELDS))) == expected


def test_what_one_declaration_lets_pass_is_an_error_for_another() -> None:
    """Whichever was asked for first: a .json without an image matters only where fields are read from it."""
    members = [*two(), ("0003.json", b"{}")]
    fields = {"label": None, "weight": {"type": "number"}}
    for _ in range(2):
        assert refused(members, fields=fields) == "s.tar/0003.json, got none"
        assert len(open_source(source_spec(tar="s.tar", fields={"label": None}))) == 2


def test_samples_have_the_order_of_their_images() -> None:
    members = [("b.cls", b"0"), ("a.jpg", b"a"), ("a.cls", b"1"), ("b.jpg", b"b")]
    source = opened(members, fields={"label": None})
    assert [source.path(i) for i in range(2)] == ["s.tar/a.jpg", "s.tar/b.jpg"] and source.labels.tolist() == [1, 0]


def test_what_is_missing() -> None:
    members = [member for member in two() if member[0] != "0002.txt"]
    assert refused(members, fields=FIELDS) == "s.tar/0002.jpg, got none (1 of 2 samples)"
    members = [member for member in two() if member[0] != "0001.mask.png"]
    assert refused(members, fields=FIELDS) == "s.tar/0001.jpg, got none (1 of 2 samples)"
    members = [member for member in two() if member[0] != "0002.jpg"]
    assert refused(members, fields=FIELDS) == "s.tar/0002.json, got none"
    assert refused(two(), fields={"boxes": {"column": "boxs"}}) == "s.tar/0001.json, got boxes, kinds, weight"
    members = [member for member in two() if member[0] != "0001.cls"]
    assert refused(members, fields=FIELDS) == "s.tar/0001.jpg, got none"


def test_what_is_wrong() -> None:
    assert refused([*sample("a", {"boxes": [[1, 2, 3]]})], fields={"boxes": {}}) == "s.tar/a.json, got [1, 2, 3]"
    assert refused([("a.jpg", b"i"), ("a.json", b"{")], fields={"boxes": {}}).startswith("s.tar/a.json, got an error: ")
    deep = b"[" * 100_000 + b"]" * 100_000
    assert refused([("a.jpg", b"i"), ("a.json", deep)], fields={"boxes": {}}) == (
        "s.tar/a.json, got an error: it is nested too deeply"
    )
    assert refused([*sample("a", {}, cls=deep)], fields={"label": {"kind": "vector"}}).startswith(
        "s.tar/a.cls, got '[[["
    )
    assert refused([*sample("a", [])], fields={"boxes": {}}) == "s.tar/a.json, got []"
    source = opened([*sample("a", {"boxes": [[4, 2, 3, 8]]})], fields={"boxes": {}})
    reason = "s.tar/a.json: boxes[0] must have x1 < x2 and y1 < y2, got [4.0, 2.0, 3.0, 8.0]"
    assert left_out_of(source) == {0: (1, reason)}
    with pytest.raises(ConfigError, match=r"source\.fields\.image\.column must not be given in a source\.tar"):
        source_spec(tar="s.tar", fields={"image": {"column": "jpg"}})


def test_fields_may_share_a_member_that_they_read_alike() -> None:
    members = [("1.jpg", b"one"), ("1.txt", b"cat\n")]
    fields: Any = {"label": {"kind": "classes", "column": ".txt"}, "text": None}
    assert refused(members, fields=fields) == "s.tar"
    fields = {"text": None, "caption": {"type": "text", "column": ".txt"}}
    columns = records_of(opened(members, fields=fields), [0]).columns
    assert columns["caption"] == columns["text"] == ["cat\n"]


def test_two_fields_do_not_both_read_the_member_of_their_type() -> None:
    """A field without a column does not read the key of its name, as those of other types do."""
    fields: Any = {"caption": {"type": "text"}, "url": {"type": "text"}}
    members = [*sample("1", {"url": "u", "caption": "c"}), ("1.txt", b"a cat")]
    assert refused(members, fields=fields) == "s.tar"
    fields["url"]["column"] = "url"
    columns = records_of(opened(members, fields=fields), [0]).columns
    assert (columns["caption"], columns["url"]) == (["a cat"], ["u"])
    fields = {"mask": None, "edges": {"type": "mask"}}
    assert refused([("1.jpg", b"one"), ("1.mask.png", b"m")], fields=fields) == "s.tar"


def test_a_shard_that_changed_is_an_error_of_the_source_not_of_a_sample() -> None:
    source = opened(two(), fields=FIELDS)
    data = Path("s.tar").read_bytes()
    Path("s.tar").write_bytes(data + bytes(512))
    with pytest.raises(SourceError, match="shard must stay as it was indexed"):
        records_of(source, [0])


def test_tar_files_of_the_library_are_read() -> None:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, data in two():
            header = tarfile.TarInfo(name)
            header.size = len(data)
            archive.addfile(header, io.BytesIO(data))
    Path("p.tar").write_bytes(stream.getvalue())
    source = open_source(source_spec(tar="p.tar", fields=FIELDS))
    assert records_of(source, [0]).columns["text"] == ["ein Kätzchen"]


# --- an image and a label, declared or not ----------------------------------------------------------------------------

PAIR = [("1.jpg", b"x"), ("1.cls", b"0")]


@pytest.mark.parametrize(
    "members",
    [
        [("1.JPG", b"x"), ("1.CLS", b"0"), ("2.png", b"y"), ("2.json", b'{"cls": 3}')],
        [("1.jpg", b"x"), ("1.json", b'{"label": " a "}')],
        [("1.jpg", b"x"), ("1.json", b'{"label": 2}'), ("2.jpg", b"x"), ("2.json", b'{"label": "2"}')],
        [*PAIR, ("1.json", b"{")],
        [*PAIR, ("meta.json", b'{"made": 2024}')],
        [*PAIR, ("meta.json", b"[1]")],
        [*PAIR, (".jpg", b"x"), ("a/.cls", b"x")],
        [("2.cls", b"0"), ("1.jpg", b"x"), ("1.cls", b"1"), ("2.jpg", b"y")],
    ],
)
def test_an_image_and_a_label_are_the_same_declared_or_not(members: Members, read_all: ReadAll) -> None:
    plain = opened(members)
    declared = open_source(source_spec(tar="s.tar", fields={"image": None, "label": None}))
    assert (plain.classes, plain.labels.tolist()) == (declared.classes, declared.labels.tolist())
    assert [plain.path(i) for i in range(len(plain))] == [declared.path(i) for i in range(len(declared))]
    assert read_all(plain) == read_all(declared)


@pytest.mark.parametrize(
    "members",
    [
        [("1.jpg", b"x")],
        [("1.jpg", b"x"), ("1.cls", b"\xff")],
        [("1.jpg", b"x"), ("1.json", b"{")],
        [("1.jpg", b"x"), ("1.json", b"[1]")],
        [("1.jpg", b"x"), ("1.json", b'{"label": null}')],
        [("1.jpg", b"x"), ("1.json", b'{"label": true}')],
        [*PAIR, ("1.png", b"x")],
        [*PAIR, ("1.cls", b"1")],
        [*PAIR, ("2.cls", b"0")],
        [*PAIR, ("2.json", b'{"label": 3}')],
        [*PAIR, ("meta.json", b"{")],
    ],
)
def test_a_faulty_image_or_label_is_the_same_error_declared_or_not(members: Members) -> None:
    assert refused(members) == refused(members, fields={"image": None, "label": None})
