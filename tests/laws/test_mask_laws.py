"""Laws of masks that are files: only the decoders that the field names may read it."""

from __future__ import annotations

import io
import json
import tarfile
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image

import gpuflow
from gpuflow.execute.cpu.masks import decode_mask
from gpuflow.pipeline.records import MaskFile
from gpuflow.sources.field_spec import MaskFormat
from tests.images import encode, jpeg, photo

SIZE = (16, 12)
MASK = np.arange(SIZE[0] * SIZE[1], dtype=np.uint8).reshape(SIZE) % 7
NAMES: dict[MaskFormat, str] = {"bmp": "BMP", "gif": "GIF", "jpeg": "JPEG", "pnm": "PPM", "tiff": "TIFF"}
"""Pillow's name of each format that `fields.NAME.formats` takes."""
UNSAVED = {
    "CUR": b"\0\0\2\0\1\0",
    "DCX": b"\xb1\x68\xde\x3a",
    "FITS": b"SIMPLE  =                    T",
    "FLI": b"\x12\x11\0\0\x11\xaf",
    "FTEX": b"FTEX",
    "GBR": b"\0\0\0\x20\0\0\0\2",
    "IPTC": b"\x1c\3\x3c",
    "PCD": b"\0" * 2048 + b"PCD_",
    "PIXAR": b"\x80\xe8\0\0",
    "PSD": b"8BPS\0\1",
    "QOI": b"qoif\0\0\0\x0c\0\0\0\x10\4\0",
    "SUN": b"\x59\xa6\x6a\x95",
    "WMF": b"\xd7\xcd\xc6\x9a\0\0",
    "XPM": b"/* XPM */",
    "XVThumb": b"P7 332\n",
}
"""How files begin of formats that Pillow opens and does not write."""


def file_of(name: str) -> bytes:
    """A mask of a format of Pillow's, or how one begins."""
    for mode in ("L", "RGB", "1", "F") if name in Image.SAVE else ():
        try:
            return encode(Image.fromarray(MASK).convert(mode), name)
        except (OSError, ValueError, KeyError):  # of a format that has no such pixels
            continue
    return UNSAVED.get(name, b"") + bytes(64)


def files() -> dict[str, bytes]:
    """A mask of each format that Pillow can open."""
    Image.init()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some of these formats are old
        return {name: file_of(name) for name in sorted(Image.OPEN)}


# --- kinds of sources -------------------------------------------------------------------------------------------------


def listing(folder: Path, masks: Mapping[str, bytes]) -> dict[str, Any]:
    (folder / "image.jpg").write_bytes(jpeg(photo(*SIZE)))
    lines = []
    for i, data in enumerate(masks.values()):
        (folder / f"{i}.png").write_bytes(data)
        lines.append(json.dumps({"path": "image.jpg", "mask": f"{i}.png"}))
    (folder / "list.jsonl").write_text("\n".join(lines))
    return {"listing": str(folder / "list.jsonl"), "fields": {"image": {"column": "path"}, "mask": {}}}


def tar(folder: Path, masks: Mapping[str, bytes]) -> dict[str, Any]:
    with tarfile.open(folder / "0.tar", "w") as shard:
        for i, mask in enumerate(masks.values()):
            for name, data in ((f"{i:03d}.jpg", jpeg(photo(*SIZE))), (f"{i:03d}.mask.png", mask)):
                member = tarfile.TarInfo(name)
                member.size = len(data)
                shard.addfile(member, io.BytesIO(data))
    return {"tar": str(folder / "0.tar"), "fields": {"image": None, "mask": {}}}


def parquet(folder: Path, masks: Mapping[str, bytes]) -> dict[str, Any]:
    pq = pytest.importorskip("pyarrow.parquet")
    pq.write_table(arrow_table(masks), folder / "0.parquet")
    return {"hf": str(folder / "0.parquet"), "fields": {"image": None, "mask": {}}}


def arrow(folder: Path, masks: Mapping[str, bytes]) -> dict[str, Any]:
    pa = pytest.importorskip("pyarrow")
    table = arrow_table(masks)
    with pa.OSFile(str(folder / "data.arrow"), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data.arrow"}]}))
    return {"hf": str(folder), "fields": {"image": None, "mask": {}}}


def arrow_table(masks: Mapping[str, bytes]) -> Any:
    pa = pytest.importorskip("pyarrow")
    return pa.table({"image": [jpeg(photo(*SIZE))] * len(masks), "mask": list(masks.values())})


SOURCES: tuple[Callable[[Path, Mapping[str, bytes]], dict[str, Any]], ...] = (listing, tar, parquet, arrow)


def reasons_of(folder: Path, block: dict[str, Any]) -> tuple[list[int], dict[int, str]]:
    """Which samples come, and why each other one is bad."""
    stages = [{"decode": None}, {"center_crop": {"size": list(SIZE)}}]
    run = {"on_error": "skip", "bad_file": str(folder / "bad.jsonl"), "threads": 1}
    config = {"source": block, "pipelines": {"val": {"stages": stages, "batch": {"size": 64}}}, "run": run}
    (folder / "x.yaml").write_text(yaml.safe_dump(config))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # most of them are bad
        with gpuflow.load(folder / "x.yaml", "val") as loader:
            came = [index for batch in loader for index in batch.indices.tolist()]
    listed = map(json.loads, (folder / "bad.jsonl").read_text().splitlines())
    return came, {found["index"]: found["reason"] for found in listed}


# --- the laws ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.__name__)
def test_a_mask_of_any_other_format_reaches_no_decoder(
    source: Callable[..., dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    masks, reached = files(), list[str]()
    for name in masks.keys() - {"PNG"}:
        monkeypatch.setitem(Image.OPEN, name, (lambda *_, name=name: reached.append(name), None))
    came, reasons = reasons_of(tmp_path, source(tmp_path, masks))
    assert reached == []
    assert [list(masks)[i] for i in came] == ["PNG"]
    for i, name in enumerate(masks):
        if name != "PNG":
            assert reasons[i].startswith("mask must be a PNG, got ") and reasons[i].endswith("convert it to PNG"), name
    for key, name in NAMES.items():
        assert f"name it in the field's formats: [{key}]" in reasons[list(masks).index(name)]


def test_a_field_names_the_formats_of_its_masks(tmp_path: Path) -> None:
    masks = files()
    block = listing(tmp_path, masks)
    block["fields"]["mask"] = {"formats": list(NAMES)}
    came, reasons = reasons_of(tmp_path, block)
    assert {list(masks)[i] for i in came} == {"PNG", *NAMES.values()}
    assert len(came) + len(reasons) == len(masks)


@pytest.mark.parametrize("key", NAMES)
def test_each_format_gives_the_levels_of_a_png(key: MaskFormat) -> None:
    levels = decode_mask(MaskFile(file_of(NAMES[key])), SIZE, (key,))
    assert np.abs(levels.astype(int) - MASK).max() <= (8 if key == "jpeg" else 0)
