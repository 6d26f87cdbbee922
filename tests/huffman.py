"""Finds out which baseline JPEGs are complete, by reading one Huffman code after the other."""

from __future__ import annotations

import re

from gpuflow.decode.chunk_files import engine_sampling
from gpuflow.decode.codecs import probe
from tests.images import as_array
from tests.reference.headers import scan_start

__all__ = ["reads_to_its_end"]

_EXTRA_BLOCKS = 3
_MARKER = re.compile(rb"\xff[^\x00]")


_Table = dict[tuple[int, int], int]
"""The symbol of each (number of bits, code)."""


def _tables(data: bytes, end: int) -> dict[int, _Table]:
    """The Huffman tables by their class * 16 + number."""
    found, at = dict[int, _Table](), 2
    while at < end:
        marker, length = data[at + 1], int.from_bytes(data[at + 2 : at + 4])
        body = data[at + 4 : at + 2 + length] if marker == 0xC4 else b""
        while body:
            counts, symbols, code = body[1:17], iter(body[17:]), 0
            table = _Table()
            for bits, count in enumerate(counts, 1):
                for _ in range(count):
                    table[bits, code] = next(symbols)
                    code += 1
                code <<= 1
            found[body[0]] = table
            body = body[17 + sum(counts) :]
        at += 2 + length
    return found


def reads_to_its_end(data: bytes) -> bool:
    """Whether a file that the engines may decode has all its blocks, and no more than the bits that fill its last
    byte look like: the rule of complete.c (ITU-T T.81, F.2.2)."""
    array = as_array(data)
    header, (start, interval) = probe(array), scan_start(array)
    sampling = engine_sampling(array)
    assert sampling is not None
    across, down = (sampling >> 4, sampling & 15) if sampling else (1, 1)
    units = -(-header.width // (8 * across)) * -(-header.height // (8 * down))
    if interval >= units:
        interval = 0  # there is no marker
    components = 3 if sampling else 1
    tables, chosen = _tables(data, start), data[start - 2 - 2 * components : start - 3 : 2]
    owners = [0] * (across * down) + list(range(1, components))
    parts, at = list[bytes](), start
    while True:  # the data between two markers
        marker = _MARKER.search(data, at)
        if marker is None:
            return False
        parts.append(data[at : marker.start()].replace(b"\xff\x00", b"\xff"))
        code = data[marker.end() - 1]
        if not 0xD0 <= code <= 0xD7:
            break
        if code != 0xD0 + (len(parts) - 1) % 8:
            return False
        at = marker.end()
    if data[marker.start() :].lstrip(b"\xff")[:1] != b"\xd9":
        return False
    if len(parts) != (-(-units // interval) if interval else 1):
        return False
    for number, part in enumerate(parts):
        expected = len(owners) * (min(interval, units - number * interval) if interval else units)
        bits = "".join(f"{byte:08b}" for byte in part)
        most = expected if interval else len(bits)
        blocks, place = _blocks(bits, most, owners, [(tables[both >> 4], tables[16 + (both & 15)]) for both in chosen])
        if blocks < expected or (interval and len(bits) - place >= 8):
            return False
        if not interval and blocks > expected + _EXTRA_BLOCKS:
            return False
    return True


def _blocks(bits: str, most: int, owners: list[int], tables: list[tuple[_Table, _Table]]) -> tuple[int, int]:
    """The number of blocks that can be read, and where the last code that was read ends."""
    blocks = coefficient = place = 0
    while blocks < most:
        table = tables[owners[blocks % len(owners)]][coefficient > 0]
        code = (
            (size, table[size, int(bits[place : place + size], 2)])
            for size in range(1, min(16, len(bits) - place) + 1)
            if (size, int(bits[place : place + size], 2)) in table
        )
        size, symbol = next(code, (0, 0))
        run, more = (0, symbol) if coefficient == 0 else (symbol >> 4, symbol & 15)
        if not size or place + size + more > len(bits):
            break
        if coefficient and not more and run not in (0, 15):
            break
        coefficient = 64 if coefficient and symbol == 0 else coefficient + run + 1
        if coefficient > 64:
            break
        place += size + more
        if coefficient == 64:
            blocks, coefficient = blocks + 1, 0
    return blocks, place
