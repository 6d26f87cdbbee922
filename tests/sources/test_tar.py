"""The tar source: WebDataset's samples, the cached index, and shards that are damaged or change."""

from __future__ import annotations

import io
import json
import os
import tarfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpuflow.errors import SourceError
from gpuflow.loader.sampler import ShardedOrder
from gpuflow.sources import Source, open_source, source_spec
from gpuflow.sources.storage import local
from gpuflow.sources.tar import expand_braces
from gpuflow.sources.tar_members import load_arrays, save_arrays
from tests.sources.conftest import FileServer, ReadAll, tar_bytes
from tests.texts import outline

MakeTar = Callable[..., bytes]
Members = Sequence[tuple[str, bytes]]


@pytest.fixture(autouse=True)
def in_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def shard(make_tar: MakeTar) -> Callable[..., Source]:
    """A source of one shard, s.tar."""

    def make(members: Members, form: int = tarfile.USTAR_FORMAT, **fields: object) -> Source:
        Path("s.tar").write_bytes(make_tar(members, form))
        return open_source(source_spec(tar="s.tar", **fields))

    return make


def write_shards(make_tar: MakeTar, count: int = 4, per_shard: int = 5) -> None:
    for number in range(count):
        members = []
        for i in range(per_shard):
            members += [(f"{i:04}.jpg", f"{number}/{i}".encode() * 300), (f"{i:04}.cls", str(i).encode())]
        Path(f"{number:02}.tar").write_bytes(make_tar(members))


def refused(**fields: object) -> str:
    with pytest.raises(SourceError) as caught:
        open_source(source_spec(**fields))
    return outline(caught.value)


# Names of shards.


@pytest.mark.parametrize(
    ("pattern", "paths"),
    [
        ("a.tar", ["a.tar"]),
        ("{08..11}.tar", ["08.tar", "09.tar", "10.tar", "11.tar"]),
        ("{8..11}.tar", ["8.tar", "9.tar", "10.tar", "11.tar"]),
        ("{000..002}.tar", ["000.tar", "001.tar", "002.tar"]),
        ("{b,a}.tar", ["b.tar", "a.tar"]),
        ("x{,-more}.tar", ["x.tar", "x-more.tar"]),
        ("{a,b}/{0..1}.tar", ["a/0.tar", "a/1.tar", "b/0.tar", "b/1.tar"]),
        ("s3://bucket/{3..3}.tar", ["s3://bucket/3.tar"]),
    ],
)
def test_braces(pattern: str, paths: list[str]) -> None:
    assert expand_braces(pattern) == paths


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("{0..1.tar", "source.tar, got '{0..1.tar'"),
        ("{a,{b,c}}.tar", "source.tar, got '{a,{b,c}}.tar'"),
        ("{01}.tar", "source.tar, got {01} in '{01}.tar'"),
        ("{9..1}.tar", "source.tar, got {9..1} in '{9..1}.tar'"),
    ],
)
def test_wrong_braces(pattern: str, message: str) -> None:
    assert refused(tar=pattern) == message


# What is read.


def test_keys_labels_and_order(shard: Callable[..., Source], read_all: ReadAll) -> None:
    source = shard(
        [
            *(("b/2.cls", b"1\n"), ("b/2.jpg", b"two"), ("b/2.txt", b"a caption"), ("b/2.seg.png", b"a mask")),
            *(("a.x/1.JPEG", b"one"), ("a.x/1.json", b'{"label": 0, "w": 3}'), ("._1.jpg", b"a resource fork")),
            *(("3.webp", b"three"), ("3.json", b'{"cls": "2"}'), ("readme", b"text"), ("note.json", b"[1]")),
            *(("4.png", b"four"), ("4.cls", b"1"), ("4.json", b"not looked at"), ("5.bmp", b""), ("5.cls", b"0")),
        ]
    )
    assert [source.path(i) for i in range(len(source))] == [
        f"s.tar/{name}" for name in ("b/2.jpg", "a.x/1.JPEG", "3.webp", "4.png", "5.bmp")
    ]
    assert source.labels.tolist() == [1, 0, 2, 1, 0]
    assert source.labels.dtype == np.int64
    assert source.classes == ("0", "1", "2")
    assert source.shard_sizes == (5,)
    assert read_all(source) == [b"two", b"one", b"three", b"four", "empty file"]
    assert read_all(source, [3, 0, 0]) == [b"four", b"two", b"two"]
    source.close()


def test_class_names(shard: Callable[..., Source]) -> None:
    members = [("1.jpg", b"x"), ("1.cls", b"dog"), ("2.jpg", b"x"), ("2.json", b'{"cls": "cat"}')]
    assert shard(members).labels.tolist() == [1, 0]
    given = shard(members, classes=("dog", "cat", "owl"))
    assert (given.labels.tolist(), given.classes) == ([0, 1], ("dog", "cat", "owl"))


LONG = "directory/" * 30 + "é" * 60


@pytest.mark.parametrize("form", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_long_names(form: int, shard: Callable[..., Source], read_all: ReadAll) -> None:
    members = [("0.jpg", b"zero"), ("0.cls", b"0"), (f"{LONG}.jpg", b"one"), (f"{LONG}.cls", b"1"), ("2.jpg", b"two")]
    source = shard([*members, ("2.cls", b"2")], form)
    assert [source.path(i) for i in range(3)] == ["s.tar/0.jpg", f"s.tar/{LONG}.jpg", "s.tar/2.jpg"]
    assert read_all(source) == [b"zero", b"one", b"two"]


def test_members_that_are_no_files(read_all: ReadAll) -> None:
    with tarfile.open("s.tar", "w", format=tarfile.PAX_FORMAT, pax_headers={"comment": "for all"}) as archive:
        for name, kind in (("dir.jpg", tarfile.DIRTYPE), ("link.old", tarfile.SYMTYPE), ("pipe.jpg", tarfile.FIFOTYPE)):
            header = tarfile.TarInfo(name)
            header.type, header.linkname = kind, "dir.jpg/" + "x" * 200
            archive.addfile(header)
        for name, data in (("1.jpg", b"one"), ("1.cls", b"0")):
            header = tarfile.TarInfo(name)
            header.size, header.pax_headers = len(data), {"mtime": "1.5"}
            archive.addfile(header, io.BytesIO(data))
    source = open_source(source_spec(tar="s.tar"))
    assert read_all(source) == [b"one"]
    assert source.path(0) == "s.tar/1.jpg"


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_hard_links_have_the_bytes_of_their_file(form: int, read_all: ReadAll) -> None:
    """`tar` writes one of several files that share their content, and links in place of the others."""
    folder = Path((50 if form == tarfile.USTAR_FORMAT else 200) * "x")
    folder.mkdir()
    (folder / "0.jpg").write_bytes(b"zero")
    (folder / "0.cls").write_bytes(b"5")
    (folder / "1.jpg").write_bytes(b"one")
    for name in ("1.cls", "2.cls"):
        (folder / name).hardlink_to(folder / "0.cls")
    (folder / "2.jpg").hardlink_to(folder / "1.jpg")
    with tarfile.open("s.tar", "w", format=form) as archive:
        archive.add(folder)
        assert any(member.islnk() for member in archive.getmembers())
    source = open_source(source_spec(tar="s.tar"))
    by_name = {source.path(i).rpartition("/")[2]: data for i, data in enumerate(read_all(source))}
    assert by_name == {"0.jpg": b"zero", "1.jpg": b"one", "2.jpg": b"one"} and source.labels.tolist() == 3 * [5]


def test_a_mark_of_the_encoding_is_no_part_of_a_label(shard: Callable[..., Source]) -> None:
    members = [("1.jpg", b"one"), ("1.cls", b"cat"), ("2.jpg", b"two"), ("2.cls", b"\xef\xbb\xbfcat\r\n")]
    source = shard(members)
    assert (source.classes, source.labels.tolist()) == (("cat",), [0, 0])


@pytest.mark.parametrize("label", [b'{"label": null, "cls": 3}', b'{"cls": 3}', b'{"label": 3, "cls": null}'])
def test_the_label_of_a_json_member(label: bytes, shard: Callable[..., Source]) -> None:
    assert shard([("1.jpg", b"one"), ("1.json", label)]).labels.tolist() == [3]


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE])
def test_an_image_that_is_a_link_to_elsewhere_is_an_error(kind: bytes, make_tar: MakeTar) -> None:
    with tarfile.open("s.tar", "w") as archive:
        header = tarfile.TarInfo("1.jpg")
        header.type, header.linkname = kind, "/photos/1.jpg"
        archive.addfile(header)
    assert refused(tar="s.tar", fields={"image": None}) == "s.tar/1.jpg, got a link to '/photos/1.jpg'"


def test_an_image_with_dots_in_its_name_is_an_error_where_its_key_has_no_image(shard: Callable[..., Source]) -> None:
    members = [("1.jpg", b"one"), ("1.cls", b"0"), ("a/IMG_1.2.JPG", b"two"), ("a/IMG_1.2.cls", b"1")]
    with pytest.raises(SourceError) as caught:
        shard(members)
    assert outline(caught.value) == "s.tar/a/IMG_1.2.JPG"
    assert len(shard([*members[:2], ("1.thumb.jpg", b"small"), ("._1.2.jpg", b"of macOS")])) == 1


@pytest.mark.parametrize("first", [[], [("1.jpg", b"one"), ("1.cls", b"0")]], ids=["empty", "full"])
def test_tars_that_were_joined_as_files_are_an_error(first: Members, make_tar: MakeTar, read_all: ReadAll) -> None:
    one, two = make_tar(first), make_tar([("2.jpg", b"two"), ("2.cls", b"0")])
    Path("s.tar").write_bytes(one + two)
    assert refused(tar="s.tar") == "s.tar"
    Path("s.tar").write_bytes(two + bytes(3 << 20) + b"no header")
    assert read_all(open_source(source_spec(tar="s.tar"))) == [b"two"]


def test_a_shard_without_end_blocks_may_have_been_cut_off(make_tar: MakeTar, read_all: ReadAll) -> None:
    Path("s.tar").write_bytes(make_tar([("1.jpg", b"one"), ("1.cls", b"0"), ("2.jpg", b"two")])[: 4 * 512])
    with pytest.warns(UserWarning, match=r"^s\.tar: ends without the zeros that end a tar; if it was cut off, samples"):
        source = open_source(source_spec(tar="s.tar"))
    assert read_all(source) == [b"one"]


def test_several_shards(make_tar: MakeTar, read_all: ReadAll) -> None:
    write_shards(make_tar)
    Path("02.tar").write_bytes(make_tar([]))
    source = open_source(source_spec(tar="{00..03}.tar"))
    assert source.shard_sizes == (5, 5, 0, 5)
    assert [source.path(i) for i in (0, 5, 10, 14)] == [
        *("00.tar/0000.jpg", "01.tar/0000.jpg", "03.tar/0000.jpg", "03.tar/0004.jpg")
    ]
    assert read_all(source, [14, 0, 5]) == [b"3/4" * 300, b"0/0" * 300, b"1/0" * 300]
    order = ShardedOrder(shard_sizes=source.shard_sizes, window=4)
    assert sorted(order.indices(0, np.arange(15)).tolist()) == list(range(15))


def test_open_files_are_bounded_shared_and_closed(make_tar: MakeTar, read_all: ReadAll) -> None:
    write_shards(make_tar, count=80, per_shard=2)
    source = open_source(source_spec(tar="{00..79}.tar"))
    before = len(os.listdir("/proc/self/fd"))
    rng = np.random.default_rng(0)

    def read(turn: int) -> bool:
        wanted = rng.permutation(160)[:40].tolist()
        expected = [f"{i // 2}/{i % 2}".encode() * 300 for i in wanted]
        return read_all(source, wanted) == expected

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(read, range(100)))
    assert len(os.listdir("/proc/self/fd")) - before <= 32
    source.close()
    assert len(os.listdir("/proc/self/fd")) == before


# The cache.


def test_the_index_is_cached(make_tar: MakeTar, cache_home: Path, read_all: ReadAll) -> None:
    write_shards(make_tar)
    first = open_source(source_spec(tar="{00..03}.tar"))
    [cache] = (cache_home / "gpuflow").iterdir()
    assert cache.suffix == ".npz"
    written = cache.stat().st_mtime_ns
    again = open_source(source_spec(tar="{00..03}.tar", classes=10))
    assert cache.stat().st_mtime_ns == written
    assert len(again.classes) == 10
    assert [again.path(i) for i in range(20)] == [first.path(i) for i in range(20)]
    assert again.labels.tolist() == first.labels.tolist()
    assert again.shard_sizes == first.shard_sizes
    assert read_all(again) == read_all(first)


def test_a_shard_of_another_size_or_time_is_indexed_again(make_tar: MakeTar, cache_home: Path) -> None:
    write_shards(make_tar)
    open_source(source_spec(tar="00.tar"))
    Path("00.tar").write_bytes(make_tar([("x.jpg", b"x"), ("x.cls", b"0")]))
    assert len(open_source(source_spec(tar="00.tar"))) == 1
    os.utime("00.tar", ns=(1, 1))
    open_source(source_spec(tar="00.tar"))
    assert len(list((cache_home / "gpuflow").iterdir())) == 3


def test_another_shard_of_the_same_size_and_time_is_indexed_again(make_tar: MakeTar) -> None:
    """Archives are padded to 10 KiB, and programs that copy them may set the time."""
    for first, second in ((b"0", b"1"), (b"1", b"0")):
        Path("00.tar").write_bytes(make_tar([("x.jpg", b"x"), ("x.cls", first), ("y.jpg", b"y"), ("y.cls", second)]))
        os.utime("00.tar", ns=(1, 1))
        assert open_source(source_spec(tar="00.tar")).labels.tolist() == [int(first), int(second)]


def test_the_index_of_a_shard_whose_server_names_no_version_is_not_kept(
    server: FileServer, make_tar: MakeTar, cache_home: Path
) -> None:
    for tags, kept in ((False, 0), (True, 2)):
        server.tags = tags
        for first, second in ((b"0", b"1"), (b"1", b"0")):
            server.files["/0.tar"] = make_tar([("x.jpg", b"x"), ("x.cls", first), ("y.jpg", b"y"), ("y.cls", second)])
            assert open_source(source_spec(tar=f"{server.url}/0.tar")).labels.tolist() == [int(first), int(second)]
        assert len(list((cache_home / "gpuflow").glob("*.npz"))) == kept


@pytest.mark.parametrize("damage", [b"", b"garbage", b"\x80\x04N.", None])
def test_a_damaged_cache_is_made_again(
    damage: bytes | None, make_tar: MakeTar, cache_home: Path, read_all: ReadAll
) -> None:
    write_shards(make_tar)
    expected = read_all(open_source(source_spec(tar="{00..03}.tar")))
    [cache] = (cache_home / "gpuflow").iterdir()
    whole = cache.read_bytes()
    cache.write_bytes(whole[: len(whole) // 2] if damage is None else damage)
    assert read_all(open_source(source_spec(tar="{00..03}.tar"))) == expected
    assert cache.read_bytes() == whole


def test_a_cache_with_a_damaged_header_is_no_cache(tmp_path: Path) -> None:
    """Of a large array numpy parses the header before the archive's checksum is compared."""
    file = tmp_path / "cache.npz"
    save_arrays(str(file), {"sizes": np.arange(5000)})
    for old, new in ((b", }", b",  "), (b"<i8", b"<,8")):
        damaged = tmp_path / "damaged.npz"
        damaged.write_bytes(file.read_bytes().replace(old, new, 1))
        assert load_arrays(str(damaged)) is None
    assert load_arrays(str(file)) is not None


def test_a_cache_of_other_arrays_is_made_again(make_tar: MakeTar, cache_home: Path) -> None:
    write_shards(make_tar)
    open_source(source_spec(tar="00.tar"))
    [cache] = (cache_home / "gpuflow").iterdir()
    with cache.open("wb") as file:
        np.savez(file, images=np.array([{"an": "object"}], dtype=object))
    assert len(open_source(source_spec(tar="00.tar"))) == 5


def test_without_a_place_for_the_cache(make_tar: MakeTar, cache_home: Path) -> None:
    write_shards(make_tar)
    (cache_home / "gpuflow").write_bytes(b"in the way")
    assert len(open_source(source_spec(tar="00.tar"))) == 5


# Shards that change.


def changed(path: str, before: int, now: int) -> str:
    return (
        f"{path}: shard must stay as it was indexed, but has changed ({before} bytes then, {now} now); "
        "open the source again, and write new shards under new names"
    )


def refuses_to_read(source: Source, indices: Sequence[int]) -> str:
    with pytest.raises(SourceError) as caught:
        source.read(indices, lambda size: np.empty(size, np.uint8))
    return str(caught.value)


def rewrite(path: str, data: bytes) -> None:
    """Write into the same file, as `cp` and `tar -cf` do. The clock of its time ticks every few milliseconds."""
    before = os.stat(path).st_mtime_ns
    with open(path, "r+b") as file:
        file.write(data)
        file.truncate()
    os.utime(path, ns=(before + 1_000_000, before + 1_000_000))


def test_a_shard_rewritten_in_place_while_open(make_tar: MakeTar, read_all: ReadAll) -> None:
    """Its size stays the same, and other images lie where those of the index lay."""
    write_shards(make_tar, count=2)
    source = open_source(source_spec(tar="{00..01}.tar"))
    expected = read_all(source)
    size = os.path.getsize("00.tar")
    rewrite("00.tar", make_tar([member for i in range(5) for member in other_sample(4 - i)]))
    assert os.path.getsize("00.tar") == size
    descriptors = len(os.listdir("/proc/self/fd"))
    assert refuses_to_read(source, [2]) == changed("00.tar", size, size)
    assert refuses_to_read(source, [7, 3]) == changed("00.tar", size, size)
    assert read_all(source, range(5, 10)) == expected[5:]
    assert len(os.listdir("/proc/self/fd")) < descriptors, "the changed shard is closed"


def other_sample(number: int) -> Members:
    return [(f"{number:04}.jpg", f"x/{number}".encode() * 300), (f"{number:04}.cls", str(number).encode())]


def test_a_shard_that_is_written_to_while_a_range_of_it_is_read(
    make_tar: MakeTar, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_shards(make_tar, count=1)
    source = open_source(source_spec(tar="00.tar"))
    size, read = os.path.getsize("00.tar"), local._read_ranges

    def write_then_read(*arguments: Any) -> int:
        rewrite("00.tar", b"other" * (size // 5))
        return int(read(*arguments))

    monkeypatch.setattr(local, "_read_ranges", write_then_read)
    assert refuses_to_read(source, [0]) == changed("00.tar", size, size)


def test_a_shard_replaced_by_another_file_while_open(make_tar: MakeTar, read_all: ReadAll) -> None:
    """The open file is still the one that was indexed."""
    write_shards(make_tar, count=1)
    source = open_source(source_spec(tar="00.tar"))
    expected = read_all(source)
    Path("new.tar").write_bytes(make_tar([]))
    os.replace("new.tar", "00.tar")
    assert read_all(source) == expected


def test_a_shard_that_changes_before_it_is_opened(make_tar: MakeTar, read_all: ReadAll) -> None:
    write_shards(make_tar)
    source = open_source(source_spec(tar="{00..02}.tar"))
    size = os.path.getsize("00.tar")
    os.truncate("00.tar", 5000)
    os.unlink("01.tar")
    assert refuses_to_read(source, [0]) == changed("00.tar", size, 5000)
    assert read_all(source, range(5, 15)) == [*["no such file"] * 5, *(f"2/{i}".encode() * 300 for i in range(5))]


def test_a_shard_cut_short_while_open(make_tar: MakeTar, read_all: ReadAll) -> None:
    write_shards(make_tar)
    source = open_source(source_spec(tar="{00..01}.tar"))
    read_all(source)
    size = os.path.getsize("00.tar")
    os.truncate("00.tar", 2 * 2048 + 512 + 300)
    assert refuses_to_read(source, [4]) == changed("00.tar", size, 2 * 2048 + 512 + 300)


def test_a_shard_that_changes_while_it_is_indexed(make_tar: MakeTar, monkeypatch: pytest.MonkeyPatch) -> None:
    write_shards(make_tar, count=1)
    pread = os.pread

    def write_then_read(*arguments: int) -> bytes:
        data = pread(*arguments)
        rewrite("00.tar", make_tar([member for i in range(5) for member in other_sample(4 - i)]))
        return data

    monkeypatch.setattr(os, "pread", write_then_read)
    assert refused(tar="00.tar") == "00.tar"


# What is refused.


def test_missing_shards(make_tar: MakeTar, in_directory: Path) -> None:
    write_shards(make_tar)
    assert refused(tar="0O.tar") == "0O.tar"
    assert refused(tar="{00..06}.tar") == "04.tar"
    (in_directory / "dir.tar").mkdir()
    assert refused(tar="dir.tar") == "dir.tar"


def test_files_that_are_no_tar(make_tar: MakeTar) -> None:
    Path("s.tar").write_bytes(b"\x1f\x8b\x08 compressed" + bytes(600))
    assert refused(tar="s.tar") == "s.tar, got a file that starts with b'\\x1f\\x8b\\x08 comp'"
    Path("s.tar").write_bytes(b"")
    assert refused(tar="s.tar") == "s.tar, got an empty file"
    Path("s.tar").write_bytes(make_tar([]))
    assert refused(tar="s.tar") == "s.tar, got none"


def test_damaged_tars(make_tar: MakeTar) -> None:
    whole = make_tar([("1.jpg", b"x" * 1000), ("1.cls", b"0")])
    Path("s.tar").write_bytes(whole[:1000])
    assert refused(tar="s.tar") == "s.tar"
    Path("s.tar").write_bytes(whole[:1700])
    assert refused(tar="s.tar") == "s.tar"
    Path("s.tar").write_bytes(whole[:1600] + b"!" + whole[1601:])
    assert refused(tar="s.tar") == "s.tar, got bad checksum"


def with_size(size: int) -> bytes:
    """A shard whose second member's header gives this size."""
    first = make_members([("1.jpg", b"x"), ("1.cls", b"0")])
    header = tarfile.TarInfo("note.txt")
    header.size = size
    return first + header.tobuf(tarfile.GNU_FORMAT) + bytes(2048)


def make_members(members: Members) -> bytes:
    """A tar without its end."""
    return tar_bytes(members)[: len(members) * 1024]


@pytest.mark.parametrize("size", [-1, -512, -1024, -(2**40)])
def test_a_negative_size_ends_the_index(size: int) -> None:
    """It would lead back to a header that was read before, for ever."""
    Path("s.tar").write_bytes(with_size(size))
    assert refused(tar="s.tar") == f"s.tar, got a size of {size}"


@pytest.mark.parametrize("size", ["-1", "1_0", "+1", "x", "", "9" * 30])
def test_a_size_in_an_extended_header_that_is_no_number(size: str) -> None:
    Path("s.tar").write_bytes(pax_member("1.jpg", b"one", {"size": size}))
    assert refused(tar="s.tar") == f"s.tar, got a size of {size}"


def pax_member(name: str, data: bytes, records: Mapping[str, str]) -> bytes:
    """A member whose own header says that it has no bytes, after an extended header with these records."""
    text = b"".join(pax_record(key, value) for key, value in records.items())
    extended = tarfile.TarInfo("PaxHeader")
    extended.type, extended.size = tarfile.XHDTYPE, len(text)
    header = tarfile.TarInfo(name)
    padded = [part + bytes(-len(part) % 512) for part in (text, data)]
    return extended.tobuf() + padded[0] + header.tobuf() + padded[1]


def pax_record(key: str, value: str) -> bytes:
    rest = f" {key}={value}\n".encode()
    length = len(rest) + 1
    while len(str(length)) + len(rest) != length:
        length += 1
    return str(length).encode() + rest


def test_the_size_of_an_extended_header_counts(read_all: ReadAll) -> None:
    """As tars have it for members above 8 GiB."""
    members = [pax_member("1.jpg", b"one" * 300, {"size": "900"}), pax_member("1.cls", b"0", {"size": "1"})]
    Path("s.tar").write_bytes(b"".join(members) + make_members([("2.jpg", b"two"), ("2.cls", b"1")]) + bytes(1024))
    assert read_all(open_source(source_spec(tar="s.tar"))) == [b"one" * 300, b"two"]


def test_damaged_extended_header(make_tar: MakeTar) -> None:
    whole = make_tar([(f"{LONG}.jpg", b"x"), (f"{LONG}.cls", b"0")], tarfile.PAX_FORMAT)
    Path("s.tar").write_bytes(whole[:512] + b"x" + whole[513:])
    assert refused(tar="s.tar") == "s.tar"


@pytest.mark.parametrize(
    ("members", "message"),
    [
        (
            [("1.jpg", b"x"), ("1.cls", b"0"), ("d/2.jpg", b"x"), ("d/2.json", b'{"text": ""}')],
            "s.tar/d/2.jpg, got none",
        ),
        ([("1.cls", b"0"), ("2.jpg", b"x"), ("2.cls", b"0")], "s.tar/1.cls, got none"),
        ([("1.json", b'{"label": 3}'), ("2.jpg", b"x"), ("2.cls", b"0")], "s.tar/1.json, got none"),
        ([("1.jpg", b"x"), ("1.cls", b"0"), ("1.png", b"x")], "s.tar/1.png"),
        ([("1.jpg", b"x"), ("1.cls", b"0"), ("1.cls", b"1")], "s.tar/1.cls"),
        ([("1.jpg", b"x"), ("1.cls", b" ")], "s.tar/1.cls"),
        ([("1.jpg", b"x"), ("1.cls", b"\xff")], "s.tar/1.cls, got b'\\xff'"),
        (
            [("1.jpg", b"x"), ("1.json", b"{")],
            "s.tar/1.json, got an error: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)",
        ),
        ([("1.jpg", b"x"), ("1.json", b'{"label": true}')], "s.tar/1.json, got true"),
    ],
)
def test_located_errors(members: Members, message: str, make_tar: MakeTar) -> None:
    Path("s.tar").write_bytes(make_tar(members))
    assert refused(tar="s.tar") == message


def test_labels_out_of_range_and_unknown(make_tar: MakeTar) -> None:
    write_shards(make_tar)
    assert refused(tar="{00..03}.tar", classes=3) == "00.tar/0003.jpg, got 3"
    Path("s.tar").write_bytes(make_tar([("1.jpg", b"x"), ("1.cls", b"dgo")]))
    assert refused(tar="s.tar", classes=("dog", "cat")) == "s.tar/1.jpg, got 'dgo'"


def test_sparse_members() -> None:
    header = tarfile.TarInfo("1.jpg")
    header.type = tarfile.GNUTYPE_SPARSE
    Path("s.tar").write_bytes(header.tobuf(tarfile.GNU_FORMAT) + bytes(1024))
    assert refused(tar="s.tar") == "s.tar/1.jpg"


@pytest.mark.parametrize(
    "records",
    [
        {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.name": "1.jpg", "size": "600"},
        {"GNU.sparse.size": "9999", "GNU.sparse.numblocks": "1", "size": "600"},
    ],
    ids=["1.0", "0.1"],
)
def test_sparse_members_of_extended_headers(records: Mapping[str, str]) -> None:
    Path("s.tar").write_bytes(pax_member("1.jpg", b"x" * 600, records) + make_members([("1.cls", b"0")]))
    assert refused(tar="s.tar") == "s.tar/1.jpg"


def test_of_a_label_and_a_cls_the_label_counts_and_a_member_cls_before_both(shard: Callable[..., Source]) -> None:
    both = b'{"cls": "from cls", "label": "from label"}'
    source = shard([("1.jpg", b"x"), ("1.json", both), ("2.jpg", b"x"), ("2.json", both), ("2.cls", b"member")])
    assert [source.classes[label] for label in source.labels] == ["from label", "member"]


def test_labels_of_json_survive_the_cache(make_tar: MakeTar) -> None:
    members = [("1.jpg", b"x"), ("1.json", json.dumps({"label": "chat à poil"}).encode())]
    Path("s.tar").write_bytes(make_tar(members))
    for _ in range(2):
        assert open_source(source_spec(tar="s.tar")).classes == ("chat à poil",)


def test_other_extensions_are_images_where_they_are_named(shard: Callable[..., Source]) -> None:
    """With an index in the cache for each choice."""
    members = [("a.jpg", b"1"), ("a.cls", b"0"), ("b.heic", b"2"), ("b.cls", b"1")]
    assert len(shard(members, extensions=("heic",))) == 2
    assert len(shard(members, extensions=("heic",))) == 2
    with pytest.raises(SourceError, match=r"member must have an image \(jpg, jpeg, png, webp, bmp\), got none"):
        shard(members)
    fields = {"image": {"type": "image"}, "label": {"type": "label"}}
    assert len(shard(members, extensions=("heic",), fields=fields)) == 2
