"""Rounds in which loaders are disturbed: workers killed, files changed, a store that fails. See rounds.py."""

from __future__ import annotations

import csv
import json
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, final

from gpuflow.errors import ServerFault
from tests.chaos.accounting import (
    LIMIT_SECONDS,
    Consumer,
    Disturber,
    Report,
    Setting,
    Undisturbed,
    Versions,
    nothing_left,
)
from tests.chaos.http_store import FaultyStore
from tests.datasets import VAL, jpeg, make_photos, write_config
from tests.sources.conftest import tar_bytes

CLASSES, EACH = 3, 14
COUNT = CLASSES * EACH


# --- workers ----------------------------------------------------------------------------------------------------------


def kills(seed: int, directory: Path) -> Report:
    """Workers are killed and stopped while epochs run, and the epochs resumed by others: every row is as undisturbed.

    The pipeline is random, so that a sample's pixels depend on its position, too.
    """
    rng, counts = random.Random(seed), Counter[str]()
    make_photos(directory / "photos", classes=CLASSES, each=EACH)
    config = write_config(directory / "kills.yaml", directory / "photos", seed=rng.randrange(1000))
    undisturbed = Undisturbed(config)
    assert undisturbed.size == COUNT
    with nothing_left(), Consumer(config, undisturbed, Setting.draw(rng)) as consumer:
        for _ in range(2):
            with Disturber(rng, counts) as disturber:
                consumer.resume(Setting.draw(rng, processes=(1, 2, 2, 3)))
                if rng.random() < 0.8:
                    consumer.await_workers()
                for _ in range(rng.randint(1, 2)):
                    _disturbed_epoch(consumer, disturber, rng)
            consumer.resume(Setting.draw(rng))
            consumer.begin()
            consumer.run(rng.randint(1, 8))
    return _report(consumer.counts + counts)


def _disturbed_epoch(consumer: Consumer, disturber: Disturber, rng: random.Random) -> None:
    consumer.begin()
    left_at = rng.choice((None, 1, 2, 4))
    while consumer.run(1) == "batch":
        rng.choice((disturber.kill, disturber.pause, lambda: None, lambda: None))()
        left_at = None if left_at is None else left_at - 1
        if left_at == 0:
            consumer.restore()
            consumer.begin()


# --- files ------------------------------------------------------------------------------------------------------------


@final
class Photos:
    """Labelled photographs in a folder, what is done to their files, and what may come of it.

    `truth` records each change before it is made. At most `most` files are damaged at a time.
    """

    def __init__(self, directory: Path, rng: random.Random, *, classes: int = CLASSES, each: int = EACH) -> None:
        self.folder, self._rng, self._most = directory / "photos", rng, 3
        self._files = make_photos(self.folder, classes=classes, each=each)
        self._first = [file.read_bytes() for file in self._files]
        others = make_photos(directory / "others", classes=classes, each=each)
        for index, file in enumerate(others):
            file.write_bytes(jpeg(index // each, index + 1000))
        self._second = [file.read_bytes() for file in others]
        self._spare = directory / "spare.jpg"
        self._damaged: list[int] = []
        self._changed: set[int] = set()
        self.config = write_config(directory / "photos.yaml", self.folder, train=VAL)
        others_config = write_config(directory / "others.yaml", directory / "others", train=VAL)
        self.truth = Versions(Undisturbed(self.config), Undisturbed(others_config))
        self.counts: Counter[str] = Counter()

    def write_listing(self, path: Path) -> None:
        """A CSV of the files, in the folder's order."""
        with path.open("w", newline="") as file:
            csv.writer(file).writerows((str(photo), photo.parent.name) for photo in self._files)

    def may_damage(self, index: int) -> bool:
        """Whether fewer than the most files are damaged, or this one is."""
        return index in self._damaged or len(self._damaged) < self._most

    def change(self) -> None:
        """Do something to one file."""
        if len(self._damaged) >= self._most:
            return self.repair(self._damaged[0])
        index = self._rng.randrange(len(self._files))
        changes: dict[str, Callable[[int], None]] = {
            "deleted": self.delete,
            "truncated": self.truncate,
            "garbage": self.overwrite,
            "replaced": self.replace,
            "rewritten": self.rewrite,
        }
        name = self._rng.choice(sorted(changes))
        self.counts[name] += 1
        changes[name](index)

    def delete(self, index: int) -> None:
        self._damage(index)
        self._files[index].unlink(missing_ok=True)

    def truncate(self, index: int) -> None:
        self._damage(index)
        if self._files[index].exists():
            size = self._files[index].stat().st_size
            os.truncate(self._files[index], self._rng.choice((0, size // 3, max(0, size - 100))))

    def overwrite(self, index: int) -> None:
        self._damage(index)
        self._files[index].write_bytes(b"no image")

    def replace(self, index: int) -> None:
        """By another photograph of the same class, so that a reader gets one of them or the other."""
        self.truth.allow_other(index)
        self._put(index, self._second[index])

    def rewrite(self, index: int) -> None:
        """The same in place, so that a reader may get a part."""
        self._changed.add(index)
        self.truth.suspect(index)
        self.truth.allow_other(index)
        data = self._second[index]
        with self._files[index].open("wb", buffering=0) as file:
            file.write(data[: len(data) // 2])
            file.write(data[len(data) // 2 :])

    def repair(self, index: int) -> None:
        """Put the first version back."""
        self._put(index, self._first[index])
        self._changed.discard(index)
        if index in self._damaged:
            self._damaged.remove(index)

    def repair_all(self) -> None:
        """To be called when no epoch is under way: from then on every sample has its first version again."""
        for index in tuple(self._changed):
            self.repair(index)
        self.truth.forget()

    def _damage(self, index: int) -> None:
        self.truth.suspect(index)
        self._changed.add(index)
        if index not in self._damaged:
            self._damaged.append(index)

    def _put(self, index: int, data: bytes) -> None:
        self._changed.add(index)
        self._spare.write_bytes(data)
        self._spare.replace(self._files[index])


def files(seed: int, directory: Path) -> Report:
    """Files are deleted, truncated, replaced and rewritten while epochs run, under each policy.

    Every position has its sample, in a version that its file had; or the sample was touched and is counted as bad.
    """
    rng = random.Random(seed)
    photos = Photos(directory, rng)
    config, policy = photos.config, ("replace", "skip", "raise")[seed % 3]
    if rng.random() < 0.5:
        listing = directory / "listing.csv"
        photos.write_listing(listing)
        config = write_config(
            directory / "listing.yaml", directory, source={"listing": str(listing), "seed": 0}, train=VAL
        )
    bad_file = directory / "bad.jsonl"
    setting = Setting.draw(rng, processes=(0, 0, 0, 1))
    with (
        nothing_left(),
        Consumer(config, photos.truth, setting, policy=policy, overrides=(f"run.bad_file={bad_file}",)) as consumer,
    ):
        for _ in range(3):
            bad_file.write_bytes(b"")
            _damaged_epoch(consumer, photos, rng)
            listed = {json.loads(line)["index"] for line in bad_file.read_text().splitlines()}
            assert listed <= photos.truth.suspects, f"good samples are listed as bad: {listed}"
            consumer.leave()
            photos.repair_all()
            consumer.resume(Setting.draw(rng, processes=(0, 0, 0, 1)))
            consumer.begin()
            assert consumer.run() == "over", "what is whole again comes again"
    return _report(consumer.counts + photos.counts)


def _damaged_epoch(consumer: Consumer, photos: Photos, rng: random.Random) -> None:
    """One epoch in which files change before each step; if a bad sample ends it, the rest of it undamaged."""
    photos.change()
    consumer.begin()
    while (outcome := consumer.step()) == "batch":
        for _ in range(rng.randint(0, 3)):
            photos.change()
        time.sleep(rng.choice((0.0, 0.0, 0.005)))
    if outcome == "failed":
        suspects = set(photos.truth.suspects)
        photos.repair_all()
        consumer.resume(Setting.draw(rng))
        consumer.begin()
        assert consumer.run() == "over"
        photos.truth.suspect(*suspects)  # the list of bad samples has what was found before


def shards(seed: int, directory: Path) -> Report:
    """Tar files are truncated, deleted, replaced and rewritten in place while epochs run.

    No sample comes with the bytes or the label of another one: it is itself, or bad and replaced, or the change ends
    the epoch, which goes on once the files are as they were.
    """
    rng, counts = random.Random(seed), Counter[str]()
    config = _tars(directory)
    truth = Versions(Undisturbed(config))
    paths = sorted((directory / "shards").glob("*.tar"))
    whole = [path.read_bytes() for path in paths]
    moved = [_tar(number, turn=1) for number in range(len(paths))]
    assert [len(data) for data in moved] == [len(data) for data in whole]
    with nothing_left():
        for _ in range(2):
            with Consumer(config, truth, Setting.draw(rng)) as consumer:
                consumer.begin()
                outcome = consumer.run(1)
                for number in rng.sample(range(len(paths)), 2):
                    if outcome == "batch":
                        truth.suspect(*_members(number))
                        name = rng.choice(("truncated", "deleted", "replaced", "rewritten"))
                        counts[name] += 1
                        _change_shard(name, paths[number], moved[number], consumer, rng)
                        outcome = consumer.run(rng.randint(0, 2))
                if outcome == "batch":
                    outcome = consumer.run()
                if outcome == "over":
                    consumer.begin()
                    outcome = consumer.run()
                _restore(paths, whole)
                if outcome == "failed":
                    consumer.resume(Setting.draw(rng))
                    consumer.begin()
                    assert consumer.run() == "over"
                counts += consumer.counts
            truth.forget()
            with Consumer(config, truth, Setting.draw(rng)) as consumer:
                consumer.begin()
                assert consumer.run() == "over"
                counts += consumer.counts
    return _report(counts)


def _restore(paths: Sequence[Path], contents: Sequence[bytes]) -> None:
    for path, data in zip(paths, contents, strict=True):
        path.write_bytes(data)


def _change_shard(name: str, path: Path, moved: bytes, consumer: Consumer, rng: random.Random) -> None:
    match name:
        case "truncated":
            os.truncate(path, rng.randrange(len(moved)))
        case "deleted":
            path.unlink()
        case "replaced":
            spare = path.with_suffix(".spare")
            spare.write_bytes(moved)
            spare.replace(path)
        case "rewritten":
            _await_full(consumer)  # a read that is under way may get the bytes of both
            path.write_bytes(moved)
        case _:
            raise AssertionError(name)


def _await_full(consumer: Consumer) -> None:
    """Wait until the loaders read nothing, because all batches that may be in flight are."""

    def reads() -> list[int]:
        return [loader.stats()["stages"]["read"]["samples"] for loader in consumer.loaders]

    end, before = time.monotonic() + LIMIT_SECONDS, list[int]()
    while (now := reads()) != before and time.monotonic() < end:
        before = now
        time.sleep(0.5)


SHARDS, IN_SHARD = 4, 10


def _tars(directory: Path) -> Path:
    (directory / "shards").mkdir()
    for number in range(SHARDS):
        (directory / "shards" / f"{number}.tar").write_bytes(_tar(number))
    tar = str(directory / "shards" / f"{{0..{SHARDS - 1}}}.tar")
    return write_config(
        directory / "shards.yaml", directory, source={"tar": tar, "window": 2 * IN_SHARD, "seed": 0}, train=VAL
    )


def _tar(number: int, turn: int = 0) -> bytes:
    """One shard. turn: each label's photograph is that of the sample `turn` places later."""
    members = []
    for place in range(IN_SHARD):
        index = number * IN_SHARD + (place + turn) % IN_SHARD
        members += [(f"{place}.jpg", jpeg(index % CLASSES, index)), (f"{place}.cls", str(place % CLASSES).encode())]
    return tar_bytes(members)


def _members(number: int) -> range:
    return range(number * IN_SHARD, (number + 1) * IN_SHARD)


# --- a store that fails -----------------------------------------------------------------------------------------------


def store(seed: int, directory: Path) -> Report:
    """A web server is slow, fails for a while, loses some files, and is gone for a while.

    What fails for a while is as undisturbed; what is lost is replaced; a store that is gone ends the epoch with an
    error, from which it goes on once the store is back.
    """
    rng, counts = random.Random(seed), Counter[str]()
    kind = ("folder", "listing", "tar")[seed % 3]
    with FaultyStore(seed, {}) as server:
        local, remote, paths = _stored(kind, directory, server)
        truth = Versions(Undisturbed(local))
        processes = (2,) if kind == "listing" else (0,)  # which must not be used: they cannot read from a server
        setting = Setting.draw(rng, processes=processes)
        with nothing_left(descriptors=False), Consumer(remote, truth, setting) as consumer:
            consumer.await_workers()
            for _ in range(2):
                server.faults_left = Counter(dict.fromkeys(server.files, 2))
                consumer.begin()
                assert consumer.run() == "over", "no file fails more than twice"
                consumer.resume(Setting.draw(rng, processes=processes))
            if kind != "tar":
                for index in rng.sample(range(truth.size), 3):
                    server.gone.add(paths[index])
                    truth.suspect(index)
                consumer.begin()
                assert consumer.run() == "over"
                assert consumer.counts["replaced"] == 3
                server.gone.clear()
            counts += consumer.counts
        truth.forget()
        slow = Setting(threads=1, readers=0, prefetch=1, batch=2)  # most of the epoch is not read ahead
        few = ("run.timeout_s=10",)
        with nothing_left(descriptors=False), Consumer(remote, truth, slow, overrides=few) as consumer:
            consumer.begin()
            assert consumer.run(1) == "batch"
            server.down = True
            try:
                consumer.run()
            except ServerFault:
                counts["outages"] += 1
            else:
                raise AssertionError("an epoch ended well without its store")
            server.down = False
            consumer.resume(Setting(ranks=2))
            consumer.begin()
            assert consumer.run() == "over", "the store is back"
            counts += consumer.counts
        counts.update({f"served_{name}": count for name, count in server.served.items()})
    return _report(counts)


def _stored(kind: str, directory: Path, server: FaultyStore) -> tuple[Path, Path, list[str]]:
    """The configurations of the same samples here and on the server, and the path there of each sample."""
    source: dict[str, Any]
    if kind == "tar":
        local = _tars(directory)
        for path in sorted((directory / "shards").glob("*.tar")):
            server.files[f"/shards/{path.name}"] = path.read_bytes()
        paths = [f"/shards/{index // IN_SHARD}.tar" for index in range(SHARDS * IN_SHARD)]
        source = {"tar": f"{server.url}/shards/{{0..{SHARDS - 1}}}.tar", "window": 2 * IN_SHARD}
    else:
        folder = directory / "photos"
        photos = make_photos(folder, classes=CLASSES, each=8)
        paths = [f"/{photo.relative_to(directory).as_posix()}" for photo in photos]
        server.files |= {path: photo.read_bytes() for path, photo in zip(paths, photos, strict=True)}
        local = write_config(directory / "local.yaml", folder, train=VAL)
        source = {"folder": f"{server.url}/photos"}
        if kind == "listing":  # on this machine, of addresses
            listing = directory / "listing.csv"
            labels = [photo.parent.name for photo in photos]
            listing.write_text("".join(f"{server.url}{p},{label}\n" for p, label in zip(paths, labels, strict=True)))
            source = {"listing": str(listing)}
    return local, write_config(directory / "remote.yaml", "", source={**source, "seed": 0}, train=VAL), paths


def _report(counts: Counter[str]) -> Report:
    return {name: float(count) for name, count in sorted(counts.items())}
