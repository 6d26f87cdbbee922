"""`gpuflow scan`: reads and decodes every sample of a source once and names what is wrong or odd."""

from __future__ import annotations

import itertools
import math
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import cv2
import numpy as np

from gpuflow.arrays import Bytes
from gpuflow.decode.codecs import CpuDecoder, Header, probe
from gpuflow.decode.optional_formats import LABELS
from gpuflow.errors import BadSampleError
from gpuflow.execute.cpu.runner import header_of
from gpuflow.execute.cpu.targets import TargetMapper
from gpuflow.pipeline.records import RecordValue, values_of
from gpuflow.pipeline.stage import Decoder
from gpuflow.sources import Division, Source, left_out_of, records_of
from gpuflow.tools.duplicates import Contents, equal_pairs, near_pairs
from gpuflow.tools.show import Shown

_CHUNK = 32
_POLL_SECONDS = 0.1
_PICTURES, _PICTURE_SIDE = 100, 224
"""The most pairs on a page, and the longer side of their pictures in pixels."""
_SUFFIXES = {
    "jpeg": ("jpg", "jpeg", "jpe", "jfif"),
    "png": ("png",),
    "webp": ("webp",),
    "bmp": ("bmp",),
    "pnm": ("pnm", "ppm", "pgm", "pbm"),
    "tiff": ("tif", "tiff"),
    "gif": ("gif",),
    "avif": ("avif",),
    "heic": ("heic", "heif", "hif"),
    "jxl": ("jxl",),
    "jp2": ("jp2", "j2k", "j2c", "jpc", "jpf", "jpx"),
    "png16": ("png",),
    "webp_animated": ("webp",),
}
_KINDS = {"sample.too_large": "oversize", "sample.unsupported": "unsupported"}
"""The kind of a finding for each code that has one; others are `corrupt`."""
_KNOWN_SUFFIXES = {suffix for several in _SUFFIXES.values() for suffix in several}


@dataclass(frozen=True, slots=True)
class Finding:
    """One sample to look at.

    kind: `unreadable`, `corrupt`, `unsupported`, `oversize`, `format`, `record` (its boxes, its mask or another field)
    or `timeout`, which are bad; `cmyk` or `misnamed`, which decode all the same; `incomplete`, of which instances are
    left out; and `turned`, whose boxes, masks or keypoints may be those of the upright photograph.
    needs: of the kind `format`, what `decode.formats` must name for it to be decoded.
    other: of the kinds `leak` and `near`, which `gpuflow.tools.duplicates` finds, the sample of another part.
    """

    index: int
    path: str
    kind: str
    bad: bool
    reason: str
    needs: str = ""
    other: int | None = None

    def row(self) -> dict[str, Any]:
        """Return the finding as a JSON object.

        Examples:
            >>> Finding(3, "3.jpg", "unreadable", True, "no such file").row()
            {'index': 3, 'path': '3.jpg', 'kind': 'unreadable', 'bad': True, 'reason': 'no such file'}
        """
        return {key: value for key, value in asdict(self).items() if value not in ("", None)}


def scan(
    source: Source,
    decoder: Decoder,
    *,
    threads: int,
    record_values: Sequence[RecordValue] = (),
    mapper: TargetMapper | None = None,
    contents: Contents | None = None,
    timeout_seconds: float = 120.0,
    progress: Callable[[int], None] = lambda samples: None,
) -> Iterator[Finding]:
    """Yield findings in the source's order.

    Args:
        source: what to read, all of it.
        decoder: the decode stage whose limits count.
        threads: how many decode at once.
        record_values: what stages take from the records, which must be of their forms.
        mapper: maps the fields of records, which must fit their images; None if there are none.
        contents: gets all samples that can be read.
        timeout_seconds: a file that takes longer is a finding, and another thread continues with the next one.
        progress: called with the number of samples that were finished since the last call.
    """
    starts = iter(range(0, len(source), _CHUNK))
    scanner, waiting = _Scanner(source, decoder, record_values, mapper, contents), list[_Chunk]()
    for _ in range(threads):
        scanner.add_thread()
    try:
        while True:
            for start in itertools.islice(starts, max(0, 2 * threads + 1 - len(waiting))):
                waiting.append(_Chunk(range(start, min(start + _CHUNK, len(source)))))
                scanner.submit(waiting[-1])
            if not waiting:
                return
            if not waiting[0].over.wait(_POLL_SECONDS):
                for chunk in filter(lambda chunk: chunk.is_late(timeout_seconds), list(waiting)):
                    place = waiting.index(chunk) + 1
                    waiting[place:place] = scanner.give_up(chunk, timeout_seconds)
                continue
            first = waiting.pop(0)
            if first.error is not None:
                raise first.error
            yield from first.findings
            progress(first.count)
    finally:
        scanner.close()


class Duplicates:
    """Compares all samples of a source that was scanned, and holds the equal and the similar ones.

    max_bits: how many of 64 bits differ at most between the hashes of similar images.
    leaks: those whose bytes an earlier part has. repeated: how many repeat the bytes of one of their own part.
    across: those that look like one of an earlier part, the most similar ones first. within: the same of one part.
    """

    def __init__(self, source: Source, division: Division, contents: Contents, max_bits: int) -> None:
        self.source, self.division = source, division
        self.leaks, self.repeated = equal_pairs(contents.digests, division)
        leaked = {pair.index for pair in self.leaks}
        self.across, self.within = (
            sorted((pair for pair in pairs if pair.index not in leaked), key=lambda pair: (pair.bits, pair.index))
            for pairs in near_pairs(contents, division, max_bits)
        )

    def findings(self) -> Iterator[Finding]:
        """Yield a finding for each sample that is in an earlier part, or looks like one there."""
        for kind, pairs in (("leak", self.leaks), ("near", self.across)):
            for pair in pairs:
                reason = pair.describe(self.source, self.division)
                yield Finding(pair.index, self.source.path(pair.index), kind, False, reason, other=pair.other)

    def notes(self) -> Iterator[str]:
        """Yield a line for each kind of duplicates that there are."""
        counts = {
            "samples with the bytes of one in an earlier part": len(self.leaks),
            "samples with the bytes of one in their own part": self.repeated,
            "warning: samples that look like one in an earlier part": len(self.across),
            "samples that look like one in their own part": len(self.within),
        }
        return (f"{text}: {count:,}" for text, count in counts.items() if count)

    def pictures(self, decoder: Decoder) -> list[Shown]:
        """Return the first pairs of similar images for `gpuflow.tools.show.page`, those of two parts first."""
        shown = []
        for pair in [*self.across, *self.within][:_PICTURES]:
            samples = [pair.index, pair.other]
            payload = self.source.read(samples, lambda size: np.empty(size, np.uint8))
            images = {self.division.describe(one): _small(decoder, payload.sample(i)) for i, one in enumerate(samples)}
            text, path = pair.describe(self.source, self.division), self.source.path(pair.index)
            shown.append(Shown(index=pair.index, path=path, label=text, valid=True, images=images))
        return shown


def _small(decoder: Decoder, data: Bytes) -> Bytes:
    """Decode an image and make it small: uint8 HWC, RGB or gray."""
    if decoder.library is not None:
        image = decoder.decode(data)
    else:
        image, _ = CpuDecoder(decoder.color, background=decoder.background).decode(data, header_of(data, decoder))
    scale = min(1, _PICTURE_SIDE / max(image.shape[:2]))
    height, width = (max(1, round(side * scale)) for side in image.shape[:2])
    small = np.asarray(cv2.resize(image, (width, height), interpolation=cv2.INTER_AREA), np.uint8)
    return small.reshape(height, width, -1)[..., :: -1 if decoder.color == "bgr" else 1]


class _Chunk:
    """Samples that one thread scans, in order. `lock` guards all fields.

    stage: what the thread does, since the time `since`, for the next sample; for all of them while it reads.
    findings, count: of the samples that are done. over: set when no more follow. late: the thread is given up.
    """

    def __init__(self, indices: Sequence[int]) -> None:
        self.indices = indices
        self.lock, self.over = threading.Lock(), threading.Event()
        self.stage, self.since = "read", math.inf
        self.findings: list[Finding] = []
        self.count = 0
        self.error: BaseException | None = None
        self.late = False

    def is_late(self, seconds: float) -> bool:
        return not self.over.is_set() and time.monotonic() - self.since > seconds

    def begin(self, stage: str) -> bool:
        """Note what the thread does next. False if the chunk is over, because the thread took too long."""
        with self.lock:
            self.stage, self.since = stage, time.monotonic()
            return not self.over.is_set()

    def end(self, findings: Sequence[Finding], count: int, error: BaseException | None = None) -> None:
        """Add findings, of this many samples; the chunk is over once all are done, or if there is an error."""
        with self.lock:
            if not self.over.is_set():
                self.findings += findings
                self.count, self.error = self.count + count, error
                if error is not None or self.count == len(self.indices):
                    self.over.set()


@dataclass(eq=False)
class _Scanner:
    """Threads that scan chunks. One that hangs is given up, and another one takes its place."""

    source: Source
    decoder: Decoder
    record_values: Sequence[RecordValue]
    mapper: TargetMapper | None
    contents: Contents | None

    def __post_init__(self) -> None:
        self._left_out = left_out_of(self.source)
        self._tagged = self.mapper is not None and self.mapper.leaves_orientation_open
        self._work: queue.SimpleQueue[_Chunk | None] = queue.SimpleQueue()
        self._threads, self._closing = 0, False

    def add_thread(self) -> None:
        threading.Thread(target=self._serve, name=f"gpuflow_scan_{self._threads}", daemon=True).start()
        self._threads += 1

    def submit(self, chunk: _Chunk) -> None:
        self._work.put(chunk)

    def close(self) -> None:
        """End the threads, without waiting for them."""
        self._closing = True
        for _ in range(self._threads):
            self._work.put(None)

    def give_up(self, chunk: _Chunk, seconds: float) -> list[_Chunk]:
        """Give up a late chunk's thread. Returns chunks of its other samples, which are submitted.

        Which file of several hangs while they are read is not known, so then each of them is tried alone.
        """
        with chunk.lock:
            if chunk.over.is_set():
                return []
            chunk.late, indices = True, chunk.indices
            chunk.over.set()
            if chunk.stage == "read" and len(indices) > 1:
                rest = [_Chunk([index]) for index in indices]
            else:
                index = indices[chunk.count]
                reason = f"the stage {chunk.stage!r} did not end within {seconds:g} s"
                chunk.findings.append(Finding(index, self.source.path(index), "timeout", True, reason))
                chunk.count += 1
                rest = [_Chunk(after)] if (after := indices[chunk.count :]) else []
        self.add_thread()
        for other in rest:
            self.submit(other)
        return rest

    def _serve(self) -> None:
        decoder = CpuDecoder(self.decoder.color, background=self.decoder.background)
        while (chunk := self._work.get()) is not None and not self._closing:
            try:
                self._scan(chunk, decoder)
            except BaseException as error:
                chunk.end([], 0, error)
            if chunk.late:
                return  # another thread has taken its place

    def _scan(self, chunk: _Chunk, decoder: CpuDecoder) -> None:
        chunk.begin("read")
        payload = self.source.read(chunk.indices, lambda size: np.empty(size, np.uint8))
        records = records_of(self.source, chunk.indices)
        _, errors = values_of(self.record_values, records)
        for i, index in enumerate(chunk.indices):
            if not chunk.begin("decode") or self._closing:
                return
            findings, size = self._look(index, payload.errors[i], payload.sample(i), decoder)
            if left_out := self._left_out.get(index):
                text = f"{left_out.instances} instance(s) left out; the first: {left_out.reason}"
                findings.append(Finding(index, self.source.path(index), "incomplete", False, text))
            reason = errors[i]
            if reason is None and size is not None and self.mapper is not None:
                (reason,) = self.mapper.check(records.take(np.array([i])), np.array([size], np.int64))
            if reason is not None and not any(finding.bad for finding in findings):
                findings.append(Finding(index, self.source.path(index), "record", True, reason))
            chunk.end(findings, 1)

    def _look(
        self, index: int, error: str | None, data: Bytes, cpu_decoder: CpuDecoder
    ) -> tuple[list[Finding], tuple[int, int] | None]:
        """Return what is wrong or odd about one sample, and the height and width of its image, if they are known."""
        decoder, path, tag = self.decoder, self.source.path(index), 1
        if error is not None:
            return [Finding(index, path, "unreadable", True, error)], None
        image: Bytes | None = None
        try:
            if decoder.library is not None:
                image = decoder.decode(data)
                return [], None
            header = header_of(data, decoder, orientation=self._tagged)
            if self._tagged:
                header, tag = replace(header, orientation=1), header.orientation
            image, _ = cpu_decoder.decode(data, header)
        except BadSampleError as fault:
            if fault.code == "sample.format":
                return [self._unnamed(index, path, data, fault)], None
            return [Finding(index, path, _KINDS.get(fault.code, "corrupt"), True, fault.reason)], None
        finally:
            if self.contents is not None:
                self.contents.add(index, data, image, decoder.color)
        turned = f"EXIF orientation {tag}, which decode ignores by default; the annotations may be of the upright image"
        findings = [Finding(index, path, "turned", False, turned)] if tag != 1 else []
        return [*_odd(index, path, header), *findings], header.upright_size

    def _unnamed(self, index: int, path: str, data: Bytes, fault: BadSampleError) -> Finding:
        """Return the finding of a format that `decode.formats` does not name, or of its header if that is bad, too."""
        try:
            decoder = self.decoder
            needs = probe(data, max_pixels=decoder.max_pixels, max_scans=decoder.max_scans, formats=LABELS).format
        except BadSampleError as other:
            return Finding(index, path, _KINDS.get(other.code, "corrupt"), True, other.reason)
        return Finding(index, path, "format", True, fault.reason, needs)


def _odd(index: int, path: str, header: Header) -> Iterator[Finding]:
    """Yield what decodes, but not everywhere."""
    if header.format == "jpeg" and header.channels == 4:
        yield Finding(index, path, "cmyk", False, "CMYK JPEG; it is converted to RGB, other decoders may refuse it")
    name = path.rpartition("/")[2]
    suffix = name.rpartition(".")[2].lower() if "." in name else ""
    if suffix in _KNOWN_SUFFIXES and suffix not in _SUFFIXES[header.format]:
        yield Finding(index, path, "misnamed", False, f"is {header.format.upper()} but is named .{suffix}")
