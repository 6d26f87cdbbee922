# mypy: disable-error-code="assignment, import-untyped, no-untyped-def, untyped-decorator"
"""Finds out on the GPU which baseline JPEGs hold the data of all their blocks, by reading their Huffman codes.

See decode/complete.py, which describes the files. No coefficient is computed: a code and the bits that belong to it are
skipped, and blocks are counted.

Huffman codes can only be read one after the other, but a reader that starts at a wrong place soon finds the right
places by itself: in half of all tries within 700 bits of a photograph, in nine of ten within 2,400. So a file's data
are cut into parts of 8,192 bits or more. Each lane of a program reads one part, at first from where the part begins,
then from where the lane before it ended, until no lane's beginning changes any more (A. Weissenborn and B. Schmidt,
"Accelerating JPEG decompression on GPUs", HiPC 2021). Between restart markers, whose places are known, each interval is
a part, and nothing is read twice.

The format: ITU-T T.81, annexes B, C and F.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from gpuflow.decode.complete import FIELDS

__all__ = ["LARGE_BYTES", "MARGIN_BYTES", "Workspace", "complete_files"]

MARGIN_BYTES = 16
"""A file's part of the working memory for data is this much larger than its compressed data."""
_TILE, _TILE_WARPS = 1 << 14, 16
"""Bytes that a program copies at a time, and its warps."""
_PART_BITS = 8192
"""The smallest number of bits that a lane reads, if the file has more."""
_LANES = (128, 512)
"""Lanes of the programs for files of at most that many parts, and for larger ones."""
LARGE_BYTES = _PART_BITS * _LANES[0] // 8
"""A file of more bytes is one of the larger ones."""
_SHORT = tl.constexpr(10)
"""Codes of at most this many bits are looked up by their first bits."""
_SHORT_CODES = tl.constexpr(1 << 10)
_LONG_CODES = tl.constexpr(256 << 5)
"""Longer ones are looked up by how far they are behind those, in units of the last of 16 bits: at most 256 symbols."""
_TABLE = tl.constexpr((1 << 10) + (256 << 5))
_STEPS = tl.constexpr(4)
"""Codes that each lane reads before the lanes agree on whether one of them continues."""
_MAX_SEGMENTS, _MAX_TABLES, _MAX_FILL = tl.constexpr(256), tl.constexpr(64), tl.constexpr(64)
_MAX_BITS = tl.constexpr(1 << 22)
"""Limits on what a file that was made to keep a GPU busy can ask for: segments and Huffman tables in its header, fill
bytes before its last marker, and bits that one lane reads one after the other, which takes up to 2 s. A file that needs
more counts as incomplete."""
_MAX_EXTRA = tl.constexpr(3)
"""The bits that fill up the last byte may look like this many blocks."""


@triton.jit
def _tables(files, tables, limits, FIELD_COUNT: tl.constexpr, TILE: tl.constexpr):
    """Build one of the four tables of one file: of DC 0, DC 1, AC 0 and AC 1.

    An entry is the number of bits of a code and of what belongs to it, and, times 32, by how many coefficients it
    advances: 0 for the end of the block. An entry of 0 is an invalid code.
    """
    p = files + tl.program_id(0).to(tl.int64) * FIELD_COUNT
    file, end = tl.load(p).to(tl.pointer_type(tl.uint8)), tl.load(p + 2).to(tl.int32)
    wanted = tl.program_id(1) // 2 * 16 + tl.program_id(1) % 2
    at, found, segments, seen = tl.full((), 2, tl.int32), tl.full((), 0, tl.int32), 0, 0
    while (at + 4 <= end) & (segments < _MAX_SEGMENTS):
        segments += 1
        marker = tl.load(file + at + 1).to(tl.int32)
        length = tl.load(file + at + 2).to(tl.int32) * 256 + tl.load(file + at + 3).to(tl.int32)
        if marker == 0xFF:  # a fill byte before the marker
            at += 1
        else:
            if marker == 0xC4:
                table, after = at + 4, tl.minimum(at + 2 + length, end)
                while (table + 17 <= after) & (seen < _MAX_TABLES):
                    seen += 1
                    if tl.load(file + table).to(tl.int32) == wanted:
                        found = table
                    table += 17 + tl.sum(tl.load(file + table + 1 + tl.arange(0, 16)).to(tl.int32), axis=0)
            at += 2 + tl.maximum(length, 2)
    number = tl.program_id(0) * 4 + tl.program_id(1)
    limit, total = tl.full((), 0, tl.int32), tl.full((), 0, tl.int32)
    if found > 0:
        for bits in tl.static_range(1, 17):
            total += tl.load(file + found + bits).to(tl.int32) << (16 - bits)
            if bits == _SHORT:
                limit = tl.minimum(total, 1 << 16)
        stop = _SHORT_CODES + tl.minimum(tl.maximum(total - limit, 0), _LONG_CODES)
        for start in range(0, stop, TILE):
            entry = start + tl.arange(0, TILE)
            code = tl.where(entry < _SHORT_CODES, entry << (16 - _SHORT), limit + entry - _SHORT_CODES)
            first, symbols, size, place = 0, 0, entry * 0, entry * 0
            for bits in tl.static_range(1, 17):
                count = tl.load(file + found + bits).to(tl.int32)
                inside = (code >= first) & (code < first + (count << (16 - bits)))
                size = tl.where(inside, bits, size)
                place = tl.where(inside, symbols + ((code - first) >> (16 - bits)), place)
                first += count << (16 - bits)
                symbols += count
            known = (size > 0) & (found + 17 + place < end)
            symbol = tl.load(file + found + 17 + place, known, 0).to(tl.int32)
            run, more = symbol >> 4, symbol & 15
            step = tl.where(symbol == 0, 0, run + 1)
            known &= (more > 0) | (run == 0) | (run == 15)
            if wanted < 16:
                step, more = entry * 0 + 1, symbol & 31
                known &= symbol < 16
            tl.store(tables + number.to(tl.int64) * _TABLE + entry, tl.where(known, size + more + step * 32, 0))
    tl.store(limits + number, limit)


@triton.jit
def _unstuff(files, data, places, sizes, FIELD_COUNT: tl.constexpr, TILE: tl.constexpr):
    """Copy one file's compressed data without stuffed zeros and restart markers, and note where intervals begin.

    Writes the number of bytes, or -1 if there is a marker that should not be there.
    """
    p = files + tl.program_id(0).to(tl.int64) * FIELD_COUNT
    scan, restarts = tl.load(p + 2), tl.load(p + 7).to(tl.int32)
    source = tl.load(p).to(tl.pointer_type(tl.uint8)) + scan
    length = (tl.load(p + 1) - scan).to(tl.int32)
    target, place = data + tl.load(p + 8), places + tl.load(p + 9)
    copied, seen, start, ended, wrong = 0, 0, 0, 0, 0
    tl.store(place, 0)
    while (start < length) & (ended == 0):
        at = start + tl.arange(0, TILE)
        byte = tl.load(source + at, at < length, 0).to(tl.int32)
        next_byte = tl.load(source + at + 1, at + 1 < length, 0xFF).to(tl.int32)
        previous = tl.load(source + at - 1, (at > 0) & (at < length), 0).to(tl.int32)
        restart = (byte == 0xFF) & (next_byte >= 0xD0) & (next_byte < 0xD8)
        marker = (byte == 0xFF) & (next_byte != 0) & (restart == 0)
        end = tl.min(tl.where(marker, at, length), axis=0)
        inside = at < end
        restart &= inside
        number = seen + tl.cumsum(restart.to(tl.int32), axis=0) - 1
        wrong += tl.sum((restart & ((next_byte & 7) != (number & 7))).to(tl.int32), axis=0)
        second = (previous == 0xFF) & ((byte == 0) | ((byte >= 0xD0) & (byte < 0xD8)))
        kept = inside & (restart == 0) & (second == 0)
        to = copied + tl.cumsum(kept.to(tl.int32), axis=0) - 1
        tl.store(target + to, byte.to(tl.uint8), kept)
        tl.store(place + number + 1, to + 1, restart & (number < restarts))
        copied += tl.sum(kept.to(tl.int32), axis=0)
        seen += tl.sum(restart.to(tl.int32), axis=0)
        if end < tl.minimum(start + TILE, length):
            fill = 0
            while (tl.load(source + end + 1, end + 1 < length, 0).to(tl.int32) == 0xFF) & (fill < _MAX_FILL):
                end += 1
                fill += 1
            found = tl.load(source + end + 1, end + 1 < length, 0).to(tl.int32)
            ended += tl.where(found == 0xD9, 1, 2)
        start += TILE
    tl.store(place + restarts + 1, copied)
    sound = (ended == 1) & (wrong == 0) & (seen == restarts)
    tl.store(sizes + tl.program_id(0), tl.where(sound, copied, -1))


@triton.jit
def _swapped(word):
    """The 32 bits of four bytes of which the first one comes first."""
    swapped = (word >> 24) | ((word >> 8) & 0xFF00) | ((word << 8) & 0xFF0000) | (word << 24)
    return swapped.to(tl.uint64)


@triton.jit
def _read(
    words, last, tables, limit_0, limit_1, limit_2, limit_3, dc, ac, luma, blocks, bits, c, k, active, stop, end, want
):  # fmt: skip
    """Read codes in each active lane from a bit on, until its place is not before `stop`, or it has read `want` blocks.

    c, k: block of the coded unit and coefficient of the block at the beginning. end: of all bits that it may read.
    dc, ac: the number of the table of each component, one bit each.

    After an invalid code, a lane continues after the next bit as if a unit began there: it may have begun at a wrong
    place. Returns place, c and k where each lane ended, the number of blocks that it ended before the first invalid
    code, and whether there was none.
    """
    n, next_word = bits * 0, (bits >> 5) + 2
    high = _swapped(tl.load(words + tl.minimum(next_word - 2, last), active, 0))
    low = _swapped(tl.load(words + tl.minimum(next_word - 1, last), active, 0))
    ahead = ((high << 32) | low) << (bits & 31).to(tl.uint64)
    have = 64 - (bits & 31)
    upcoming = tl.load(words + tl.minimum(next_word, last), active, 0)
    valid = active
    active &= (bits < stop) & (n < want)
    while tl.max(active.to(tl.int32), axis=0) > 0:
        for _ in tl.static_range(_STEPS):
            component = tl.maximum(c - luma + 1, 0)
            table = tl.where(k == 0, (dc >> component) & 1, 2 + ((ac >> component) & 1))
            limit = tl.where(table < 2, tl.where(table == 0, limit_0, limit_1), tl.where(table == 2, limit_2, limit_3))
            code = (ahead >> 48).to(tl.int32)
            short = code < limit
            place = tl.where(short, code >> (16 - _SHORT), _SHORT_CODES + tl.minimum(code - limit, _LONG_CODES - 1))
            entry = tl.load(tables + table * _TABLE + place, active, 0).to(tl.int32)
            step = entry >> 5
            reached = tl.where(step == 0, 64, k + step)
            sound = (entry > 0) & (reached <= 64)
            size = tl.where(active, tl.where(sound, entry & 31, 1), 0)
            active &= bits + size <= end
            size = tl.where(active, size, 0)
            valid &= sound | (active == 0)
            block = active & sound & (reached == 64)
            bits += size
            n += (block & valid).to(tl.int32)
            k = tl.where(block | (active & (sound == 0)), 0, tl.where(active, reached, k))
            c = tl.where(block, tl.where(c + 1 == blocks, 0, c + 1), tl.where(sound | (active == 0), c, 0))
            ahead = ahead << size.to(tl.uint64)
            have -= size
            refill = active & (have <= 32)
            ahead = tl.where(refill, ahead | (_swapped(upcoming) << tl.maximum(32 - have, 0).to(tl.uint64)), ahead)
            have += tl.where(refill, 32, 0)
            next_word += refill.to(tl.int32)
            upcoming = tl.load(words + tl.minimum(next_word, last), refill, upcoming)
            active &= (bits < stop) & (n < want)
    return bits, c, k, n, valid


@triton.jit(do_not_specialize=["begin_number"])
def _count(
    files, tables, limits, data, places, sizes, ends, found, begin_number,
    FIELD_COUNT: tl.constexpr, LANES: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """Whether one file's data hold all its blocks. begin_number: that of the first program's file."""
    number = begin_number + tl.program_id(0)
    p = files + number.to(tl.int64) * FIELD_COUNT
    size = tl.load(sizes + number)
    if size >= 0:
        file, components = tl.load(p).to(tl.pointer_type(tl.uint8)), tl.load(p + 3).to(tl.int32)
        luma, interval = tl.load(p + 4).to(tl.int32), tl.load(p + 6).to(tl.int32)
        restarts = tl.load(p + 7).to(tl.int32)
        chosen = file + tl.load(p + 2) - 2 - 2 * components  # the first component's tables in the scan's header
        dc, ac = tl.full((), 0, tl.int32), tl.full((), 0, tl.int32)
        for component in range(components):
            both = tl.load(chosen + 2 * component).to(tl.int32)
            dc |= ((both >> 4) & 1) << component
            ac |= (both & 1) << component
            if (both & 0xEE) != 0:  # a table that `_tables` does not build
                size = 0
        blocks = luma + components - 1
        expected = (tl.load(p + 5) * blocks).to(tl.int32)
        every = (1 << components) - 1
        if ((dc == 0) | (dc == every)) & ((ac == 0) | (ac == every)):  # all blocks are alike to the reader
            luma, blocks = 1, 1
        words = (data + tl.load(p + 8)).to(tl.pointer_type(tl.uint32))
        last, total = (size + 3) // 4, size * 8
        table = tables + number.to(tl.int64) * (4 * _TABLE)
        limit = limits + number * 4
        limit_0, limit_1, limit_2, limit_3 = tl.load(limit), tl.load(limit + 1), tl.load(limit + 2), tl.load(limit + 3)
        lane = tl.arange(0, LANES)
        nothing = lane * 0
        if restarts > 0:
            place, intervals = places + tl.load(p + 9), restarts + 1
            each = interval * (expected // tl.load(p + 5).to(tl.int32))
            missing, read = 0, 0
            for first in range(0, intervals, LANES):
                own = first + lane
                inside = own < intervals
                start = tl.load(place + own, inside, 0) * 8
                end = tl.load(place + own + 1, inside, 0) * 8
                read += tl.max(end - start, axis=0)
                inside &= read <= _MAX_BITS
                want = tl.minimum(expected - own * each, each)
                at, _, _, n, _ = _read(
                    words, last, table, limit_0, limit_1, limit_2, limit_3, dc, ac, luma, blocks,
                    start, nothing, nothing, inside, end, end, want,
                )  # fmt: skip
                missing += tl.sum((inside & ((n < want) | (end - at >= 8))).to(tl.int32), axis=0)
            tl.store(found + number, tl.where((missing == 0) & (size > 0) & (read <= _MAX_BITS), 1, 0))
        else:
            part = tl.maximum((total + LANES - 1) // LANES, PART)
            inside = lane * part < total
            stop = tl.minimum((lane + 1) * part, total)
            own = ends + number.to(tl.int64) * LANES + lane
            begin = lane.to(tl.int64) * part * 512  # bit, block and coefficient
            finish, count, new, bad = begin, nothing, inside, lane < 0
            read = 0
            while (tl.max(new.to(tl.int32), axis=0) > 0) & (read <= _MAX_BITS):
                read += part
                at, c, k, n, valid = _read(
                    words, last, table, limit_0, limit_1, limit_2, limit_3, dc, ac, luma, blocks,
                    (begin >> 9).to(tl.int32), ((begin >> 6) & 7).to(tl.int32), (begin & 63).to(tl.int32),
                    new, stop, nothing + total, nothing + (1 << 30),
                )  # fmt: skip
                finish = tl.where(new, at.to(tl.int64) * 512 + c * 64 + k, finish)
                count, bad = tl.where(new, n, count), tl.where(new, valid == 0, bad)
                tl.debug_barrier()
                tl.store(own, finish)
                tl.debug_barrier()
                before = tl.load(own - 1, inside & (lane > 0), 0)
                new = inside & (lane > 0) & (before != begin)
                begin = tl.where(new, before, begin)
            first_bad = tl.min(tl.where(inside & bad, lane, LANES), axis=0)
            counted = tl.sum(tl.where(inside & (lane <= first_bad), count, 0), axis=0)
            enough = (counted >= expected) & (counted <= expected + _MAX_EXTRA)
            tl.store(found + number, tl.where(enough & (tl.max(new.to(tl.int32), axis=0) == 0), 1, 0))


@dataclass(frozen=True, slots=True)
class Workspace:
    """Device memory in which `complete_files` works, for N files at a time.

    tables int16 [N, 4, entries], limits int32 [N, 4]: of each file's Huffman codes. sizes int32 [N]: of its data.
    data uint8 [bytes]: these, without stuffed zeros. ends int64 [N, lanes]: where each lane of the programs ended.
    """

    tables: torch.Tensor
    limits: torch.Tensor
    sizes: torch.Tensor
    data: torch.Tensor
    ends: torch.Tensor

    @classmethod
    def of(cls, files: int, data_bytes: int, device: torch.device) -> Workspace:
        """data_bytes: MARGIN_BYTES more for each file than its compressed data at least."""

        def memory(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        return cls(
            memory(files, 4, _TABLE.value, dtype=torch.int16),
            memory(files, 4, dtype=torch.int32),
            memory(files, dtype=torch.int32),
            memory(data_bytes, dtype=torch.uint8),
            memory(files, _LANES[-1], dtype=torch.int64),
        )


def complete_files(files: torch.Tensor, large: int, places: int, workspace: Workspace) -> torch.Tensor:
    """Which baseline JPEGs hold all data of their images: uint8 [N], 0 or 1. Queues four kernels at most.

    files: int64 [N, len(FIELDS)]; the files' headers must have passed `header_scan` or `codecs.engine_sampling`.
    large: how many of them, which are the first ones, have more than LARGE_BYTES. It decides on speed alone.
    places: the size of the working memory for places: at least two more a file than it should have restart markers.
    workspace: for at least N files and their data.

    A file counts as incomplete, too, if it needs a Huffman table 2 or 3, or has data that no encoder writes.
    """
    count, fields = len(files), len(FIELDS)
    starts = torch.empty(places, dtype=torch.int32, device=files.device)
    found = torch.zeros(count, dtype=torch.uint8, device=files.device)
    tables, limits, sizes, data = workspace.tables, workspace.limits, workspace.sizes, workspace.data
    tables[:count].zero_()
    shared: dict[str, Any] = {"FIELD_COUNT": fields, "enable_fp_fusion": True}
    _tables[count, 4](files, tables, limits, TILE=1024, num_warps=4, **shared)
    _unstuff[count,](files, data, starts, sizes, TILE=_TILE, num_warps=_TILE_WARPS, **shared)
    for begin, end, lanes in ((0, large, _LANES[1]), (large, count, _LANES[0])):
        if begin < end:
            _count[end - begin,](
                files, tables, limits, data, starts, sizes, workspace.ends, found, begin,
                LANES=lanes, PART=_PART_BITS, num_warps=lanes // 32, **shared,
            )  # fmt: skip
    return found
