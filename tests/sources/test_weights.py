"""Weights of samples: from columns and files, for parts of a source, and what is wrong with them."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpuflow.errors import ConfigError, SourceError
from gpuflow.sources import SourceSpec, open_source, source_spec, subset, weights_of
from tests.sources.conftest import tar_bytes, with_columns
from tests.texts import outline

LISTING = "path,label,w\n" + "".join(f"{i}.jpg,{i % 2},{i / 2}\n" for i in range(6))


@pytest.fixture
def listing(tmp_path: Path) -> Path:
    (tmp_path / "list.csv").write_text(LISTING)
    return tmp_path / "list.csv"


def weights(spec: SourceSpec, part: str = "") -> list[float]:
    source = open_source(spec)
    found = weights_of(spec, subset(source, spec, part) if part else source)
    assert found is not None
    return [float(value) for value in found]


def spec(listing: Path, **weights: Any) -> SourceSpec:
    return source_spec(listing=str(listing), weights=weights)


def test_a_column_and_files_of_all_kinds_give_the_same(listing: Path, tmp_path: Path) -> None:
    expected = [0.0, 0.5, 1.0, 1.5, 2.0, 2.5]
    assert weights(spec(listing, column="w")) == expected
    (tmp_path / "w.txt").write_text("".join(f"{value}\n" for value in expected))
    (tmp_path / "w.csv").write_text("id,w\n" + "".join(f"{i},{value}\n" for i, value in enumerate(expected)))
    np.save(tmp_path / "w.npy", np.array(expected, np.float32))
    assert weights(spec(listing, file=str(tmp_path / "w.txt"))) == expected
    assert weights(spec(listing, file=str(tmp_path / "w.csv"), column="w")) == expected
    assert weights(spec(listing, file=str(tmp_path / "w.npy"))) == expected
    lines = "".join(f'{{"path": "{i}.jpg", "label": 0, "w": {value}}}\n' for i, value in enumerate(expected))
    (tmp_path / "list.jsonl").write_text(lines)
    assert weights(spec(tmp_path / "list.jsonl", column="w")) == expected


def test_a_column_of_a_header_in_other_letters(tmp_path: Path) -> None:
    (tmp_path / "list.csv").write_text("Path,Label,W\na.jpg,0,0.5\nb.jpg,1,2\n")
    (tmp_path / "w.csv").write_text("Id,W\n0,3\n1,4\n")
    assert (
        weights(spec(tmp_path / "list.csv", column="w")) == weights(spec(tmp_path / "list.csv", column="W")) == [0.5, 2]
    )
    assert weights(spec(tmp_path / "list.csv", file=str(tmp_path / "w.csv"), column="w")) == [3, 4]


def test_only_line_ends_end_a_line_of_a_file(listing: Path, tmp_path: Path) -> None:
    """Python's `splitlines` ends one at U+0085 and U+2028, too."""
    names = ["a\u0085", "\u2028b", "c\x0b", '"d\ne"', "f", "g"]
    text = "\ufeffid,w\r\n" + "".join(f"{name},{i}\r\n" for i, name in enumerate(names))
    (tmp_path / "w.csv").write_bytes(text.encode())
    assert weights(spec(listing, file=str(tmp_path / "w.csv"), column="w")) == [0, 1, 2, 3, 4, 5]


def test_a_part_has_the_weights_of_its_samples(listing: Path) -> None:
    whole = source_spec(listing=str(listing), weights={"column": "w"}, split={"train": 0.5, "val": 0.5})
    source = open_source(whole)
    for part in ("train", "val"):
        paths = [subset(source, whole, part).path(i) for i in range(3)]
        assert weights(whole, part) == [int(Path(path).stem) / 2 for path in paths]


SCATTERED = [
    ("a.json", b'{"w": 0.5}'),
    ("b.jpg", b"b"),
    ("b.json", b'{"w": 2}'),
    ("b.cls", b"0"),
    ("c.cls", b"1"),
    ("a.jpg", b"a"),
    ("a.cls", b"1"),
    ("c.jpg", b"c"),
    ("c.json", b'{"w": 3}'),
]
"""Members that are not sorted by their keys: the images come in the order b, a, c."""


@pytest.mark.parametrize("fields", [{}, {"image": None, "label": None, "w": {"type": "number"}}])
def test_weights_of_shards_belong_to_the_samples_whose_key_they_have(fields: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "s.tar").write_bytes(tar_bytes(SCATTERED))
    whole = source_spec(tar=str(tmp_path / "s.tar"), fields=fields, weights={"column": "w"})
    source = open_source(whole)
    assert [Path(source.path(i)).name for i in range(3)] == ["b.jpg", "a.jpg", "c.jpg"]
    assert source.labels.tolist() == [0, 1, 1]
    assert weights(whole) == [2, 0.5, 3]


def test_weights_of_shards_whose_masks_have_the_suffix_of_images(tmp_path: Path) -> None:
    (tmp_path / "s.tar").write_bytes(tar_bytes([*SCATTERED, *((f"{key}.png", b"mask") for key in "abc")]))
    fields: dict[str, Any] = {"label": None, "mask": {"column": ".png"}}
    assert weights(source_spec(tar=str(tmp_path / "s.tar"), fields=fields, weights={"column": "w"})) == [2, 0.5, 3]


@pytest.mark.parametrize(
    ("rows", "differ", "first", "second"),
    [([0, 1, 5, 4, 3, 2], 2, "/2.jpg", "/5.jpg"), ([0, 1, 2], 3, "/3.jpg", "")],
    ids=["another order", "fewer samples"],
)
def test_a_column_of_other_samples_is_refused(
    rows: list[int], differ: int, first: str, second: str, listing: Path
) -> None:
    whole = spec(listing, column="w")
    source = open_source(whole)
    header, *lines = LISTING.splitlines(keepends=True)
    listing.write_text("".join([header, *(lines[i] for i in rows)]))
    with pytest.raises(SourceError) as error:
        weights_of(whole, source)
    assert str(error.value) == (
        f"source.weights: {listing}: must give the same samples with the column 'w' as without it, but sample "
        f"{differ} is {str(listing.parent) + second if second else 'none'} and not {listing.parent}{first}; "
        "write its values into a file, and name that with the key file"
    )


def test_a_source_without_weights_has_none(listing: Path) -> None:
    plain = source_spec(listing=str(listing))
    assert weights_of(plain, open_source(plain)) is None


@pytest.mark.parametrize(
    ("third", "got"), [("nan", "nan"), ("-1", "-1"), ("inf", "inf")], ids=["NaN", "negative", "infinite"]
)
def test_a_weight_that_is_no_finite_number_from_0_on(third: str, got: str, listing: Path, tmp_path: Path) -> None:
    (tmp_path / "w.txt").write_text(f"1\n1\n{third}\n1\n1\n1\n")
    with pytest.raises(SourceError) as error:
        weights(spec(listing, file=str(tmp_path / "w.txt")))
    assert outline(error.value) == f"source.weights, got {got}"
    listing.write_text(LISTING.replace("2.jpg,0,1.0", f"2.jpg,0,{third}"))
    with pytest.raises(SourceError) as error:
        weights(spec(listing, column="w"))
    assert outline(error.value) == f"source.weights, got {got}"


def test_weights_that_are_all_zero(listing: Path, tmp_path: Path) -> None:
    (tmp_path / "w.txt").write_text("0\n" * 6)
    with pytest.raises(SourceError) as error:
        weights(spec(listing, file=str(tmp_path / "w.txt")))
    assert outline(error.value) == "source.weights, got zeros alone"


# --- balance ----------------------------------------------------------------------------------------------------------

SITES = ["north", "south", "south", "south", "north", "south"]


def balanced(keys: dict[str, Any], balance: Any, part: str = "") -> list[float]:
    return weights(source_spec(**keys, weights={"balance": balance}), part)


def test_in_balance_weights_are_those_of_scikit_learn(listing: Path) -> None:
    class_weight = pytest.importorskip("sklearn.utils.class_weight", reason="scikit-learn is not installed")
    labels = np.array([0, 1, 1, 2, 1, 0])
    listing.write_text("".join(f"{i}.jpg,{label}\n" for i, label in enumerate(labels)))
    found = np.array(balanced({"listing": str(listing)}, "class"))
    expected = class_weight.compute_sample_weight("balanced", labels)
    assert np.allclose(found / found.sum(), expected / expected.sum(), rtol=1e-12)


def with_sites(kind: str, folder: Path, sites: list[Any]) -> dict[str, Any]:
    return with_columns(kind, folder, {"site": sites})


@pytest.mark.parametrize("kind", ["csv", "jsonl", "tar", "coco", "hf"])
def test_each_value_of_a_column_has_the_same_weight(kind: str, tmp_path: Path) -> None:
    found = balanced(with_sites(kind, tmp_path, SITES), {"column": "site"})
    assert found == [1 / SITES.count(site) for site in SITES]
    assert balanced(with_sites(kind, tmp_path, [3, 3, 5]), {"column": "site"}) == [0.5, 0.5, 1]


def test_a_part_is_balanced_among_its_own_samples(listing: Path) -> None:
    sites = [SITES[i % 6] for i in range(30)]
    listing.write_text("path,label,site\n" + "".join(f"{i}.jpg,{i % 2},{site}\n" for i, site in enumerate(sites)))
    keys = {"listing": str(listing), "split": {"train": 0.6, "val": 0.4}}
    for part in ("train", "val"):
        whole = source_spec(**keys)
        source = subset(open_source(whole), whole, part)
        own = [sites[int(Path(source.path(i)).stem)] for i in range(len(source))]
        assert balanced(keys, {"column": "site"}, part) == [1 / own.count(site) for site in own]
        labels = source.labels.tolist()
        assert balanced(keys, "class", part) == [1 / labels.count(label) for label in labels]


@pytest.mark.parametrize("value", [None, "", " ", [1], {"a": 1}, float("nan")])
def test_a_value_that_names_no_group(value: Any, tmp_path: Path) -> None:
    keys = with_sites("jsonl", tmp_path, [*SITES, value])
    with pytest.raises(SourceError) as error:
        balanced(keys, {"column": "site"})
    assert outline(error.value).startswith("source.weights.balance, got ")
    assert "l.jsonl:7: site must be text" in str(error.value)


def test_balance_needs_one_class_each_or_a_column(tmp_path: Path) -> None:
    for keys in (
        with_sites("coco", tmp_path, SITES),
        {**with_sites("csv", tmp_path, SITES), "fields": {"image": {"column": "path"}}},
    ):
        with pytest.raises((SourceError, ConfigError)) as error:
            balanced(keys, "class")
        assert outline(error.value).startswith("source.weights.balance")
    with pytest.raises(
        SourceError, match=r"^source\.weights\.balance: .*header must have the column 'sit' once.*did you mean 'site'"
    ):
        balanced(with_sites("csv", tmp_path, SITES), {"column": "sit"})


def archive() -> bytes:
    file = io.BytesIO()
    np.savez(file, np.ones(6))
    return file.getvalue()


def damaged(old: bytes, new: bytes) -> bytes:
    file = io.BytesIO()
    np.save(file, np.ones(6))
    return file.getvalue().replace(old, new)


FILES = [
    ("w.txt", "1\n2\n", {}, ", got 2"),
    ("w.txt", "1\n2\nx\n", {}, ", got 'x'"),
    ("w.txt", "1,2\n", {}, ", got 2 fields"),
    (
        "w.csv",
        "id,weight\n0,1\n",
        {"column": "weigt"},
        ", got id, weight",
    ),
    ("w.csv", "id,w\n0\n", {"column": "w"}, ", got no such field"),
    (
        "w.csv",
        'id,w\n0,"1\n',
        {"column": "w"},
        ", got unexpected end of data",
    ),
    ("w.txt", b"1\n\xe9\n", {}, ", got byte 0xe9"),
    ("w.npy", "text", {}, "cannot be read"),
    ("w.npy", archive(), {}, "cannot be read: it is an archive of arrays (.npz); check the file"),
    ("w.npy", damaged(b"}", b" "), {}, "cannot be read: ('EOF in multi-line statement', (2, 0)); check the file"),
    ("w.npy", damaged(b"<f8", b"<,8"), {}, "cannot be read: invalid syntax"),
    ("w.npy", damaged(b" 'shape", b"B'shape"), {}, "cannot be read: "),
]


@pytest.mark.parametrize(("name", "text", "keys", "expected"), FILES)
def test_a_file_that_is_wrong(
    name: str, text: str | bytes, keys: dict[str, str], expected: str, listing: Path, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(SourceError) as error:
        weights(spec(listing, file=str(tmp_path / name), **keys))
    assert str(error.value).startswith(f"source.weights: {tmp_path}/{name}")
    assert expected in (str(error.value) if name == "w.npy" else outline(error.value))


def test_a_file_that_is_missing_and_a_column_that_is(listing: Path, tmp_path: Path) -> None:
    (tmp_path / "weights.txt").write_text("1\n" * 6)
    with pytest.raises(SourceError, match=r"source\.weights\.file must be a file.*did you mean"):
        weights(spec(listing, file=str(tmp_path / "weight.txt")))
    with pytest.raises(SourceError, match=r"source\.weights: .*list\.csv:1: header must have the column 'v' once, got"):
        weights(spec(listing, column="v"))


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"listing": "x", "weights": {}}, "source.weights config.missing_key"),
        ({"listing": "x", "weights": {"column": "w", "file": "w.npy"}}, "source.weights.column config.conflict"),
        ({"listing": "x", "weights": {"column": "w", "samples": 0}}, "source.weights.samples config.range, got 0"),
        ({"folder": "x", "weights": {"column": "w"}}, "source.weights config.conflict"),
        ({"folder": "x", "weights": {"balance": {"column": "w"}}}, "source.weights config.conflict"),
        ({"listing": "x", "weights": {"balance": "class", "column": "w"}}, "source.weights.balance config.conflict"),
        ({"folder": "x", "weights": {"balance": "class", "file": "w.npy"}}, "source.weights.balance config.conflict"),
    ],
)
def test_keys_that_do_not_go_together(keys: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError) as error:
        source_spec(**keys)
    assert outline(error.value) == expected
