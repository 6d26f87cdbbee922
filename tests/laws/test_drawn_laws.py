"""Laws of weights and mixes: exactly the sequence that their pure function gives, on any ranks, threads and resumes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

import gpuflow
from gpuflow.sources import Payload
from tests.datasets import RAW, Row, deadline, epoch_rows, flat, interleave, jpeg, loader_of, make_photos, rows

BATCH = 3
KINDS = [
    *("weights", "weights without replacement", "mix", "mix by batch", "mix of parts"),
    *("balance", "balance of a column", "balance without replacement", "mix in balance"),
]


@pytest.fixture(autouse=True)
def _in_time() -> Iterator[None]:
    with deadline(120):
        yield


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two folders of other classes, weights of the first one's samples, and a listing of all with a column of sites."""
    root = tmp_path_factory.mktemp("photos")
    make_photos(root / "a", classes=2, each=5)
    for number in range(4):
        for label in ("class_1", "class_7"):
            (root / "b" / label).mkdir(parents=True, exist_ok=True)
            (root / "b" / label / f"{number}.jpg").write_bytes(jpeg(number, 50 + number))
    (root / "a" / "class_1" / "000.jpg").rename(root / "a" / "class_0" / "999.jpg")
    files = sorted(root.rglob("*.jpg"))
    rows = (f"{file},{file.parent.name},{'north' if i < 3 else 'south'}\n" for i, file in enumerate(files))
    (root / "list.csv").write_text("path,label,site\n" + "".join(rows))
    (root / "weights.txt").write_text("\n".join(f"{i % 4}" for i in range(10)) + "\n")
    return root


def source_of(kind: str, photos: Path) -> dict[str, Any]:
    a, b, file = str(photos / "a"), str(photos / "b"), str(photos / "weights.txt")
    if kind.startswith("balance"):
        balance = {"column": "site"} if "column" in kind else "class"
        without = {"replacement": False, "samples": 7} if "without" in kind else {"samples": 17}
        return {"listing": str(photos / "list.csv"), "weights": {"balance": balance, **without}}
    if kind.startswith("weights"):
        without = {"replacement": False} if "without" in kind else {"samples": 17}
        return {"folder": a, "weights": {"file": file, **without}}
    first: dict[str, Any] = {"folder": a, "weights": {"balance": "class"} if "balance" in kind else {"file": file}}
    if kind == "mix of parts":
        parts = [{"source": {"folder": a}, "weight": 2}, {"source": {"folder": b}}]
        return {"mix": parts, "unite_classes": True, "samples": 19, "split": {"train": 0.5, "rest": 0.5}}
    parts = [{"source": first, "weight": 2}, {"source": {"folder": b}}]
    return {"mix": parts, "unite_classes": True, "samples": 20, "by": "batch" if kind == "mix by batch" else "sample"}


@pytest.fixture(scope="module", params=KINDS)
def config(request: pytest.FixtureRequest, photos: Path) -> Path:
    path = photos / f"{request.param.replace(' ', '_')}.yaml"
    train = {"stages": list(RAW), "batch": {"size": BATCH}, "shuffle": True}
    path.write_text(
        yaml.safe_dump(
            {"source": source_of(request.param, photos), "pipelines": {"train": train}, "run": {"threads": 2}}
        )
    )
    return path


def load(config: Path, *overrides: str, rank: int = 0, world_size: int = 1, state: Any = None) -> gpuflow.Loader:
    loader = gpuflow.load(config, "train", rank=rank, world_size=world_size, overrides=overrides)
    if state:
        loader.load_state_dict(json.loads(json.dumps(state)))
    return loader


@pytest.fixture(scope="module")
def reference(config: Path) -> list[list[Row]]:
    """The samples of two epochs on one rank and one thread."""
    with load(config, "run.threads=1") as loader:
        return [flat(epoch_rows(loader)) for _ in range(2)]


def test_the_sequence_is_the_one_of_the_order(config: Path, reference: list[list[Row]]) -> None:
    with load(config) as loader:
        order = loader._plan.order
        for epoch in range(2):
            indices = order.indices(epoch, np.arange(order.size))
            assert [row[0] for row in reference[epoch]] == indices.tolist()
            assert [row[1] for row in reference[epoch]] == loader.dataset.labels[indices].tolist()


@pytest.mark.parametrize("world_size", [1, 3])
def test_ranks_and_threads_change_nothing(world_size: int, config: Path, reference: list[list[Row]]) -> None:
    found = []
    for rank in range(world_size):
        with load(config, "run.threads=3", "run.prefetch=1", rank=rank, world_size=world_size) as loader:
            found.append([epoch_rows(loader) for _ in range(2)])
    for epoch in range(2):
        assert interleave([rank[epoch] for rank in found]) == reference[epoch]


def test_resume_at_every_step_equals_no_interruption(config: Path, reference: list[list[Row]]) -> None:
    """Saved on two ranks, resumed on one, and at one step on three."""
    with load(config, world_size=2) as loader:
        states = [loader.state_dict()]
        for _ in loader:
            states.append(loader.state_dict())
    for step, state in enumerate(states[:-1]):
        found, ranks = [], 3 if step == 1 else 1
        for rank in range(ranks):
            with load(config, rank=rank, world_size=ranks, state=state) as loader:
                found.append(epoch_rows(loader))
        assert interleave(found) == reference[0][step * BATCH * 2 :]
    with load(config, state=states[-1]) as loader:
        assert rows(next(iter(loader))) == reference[1][:BATCH]


def test_a_state_of_another_draw_is_refused(config: Path) -> None:
    other = "mix.1.weight=3" if "mix" in config.stem else "weights.samples=5"
    with load(config) as loader:
        state = loader.state_dict()
    with load(config, f"source.{other}") as loader, pytest.raises(gpuflow.StateError):
        loader.load_state_dict(state)


def test_batches_of_a_mix_by_batch_have_one_source(config: Path, reference: list[list[Row]]) -> None:
    sources = np.array([row[0] >= 10 for row in reference[0]])
    if config.stem == "mix_by_batch":
        assert len(sources) == 21, "whole batches"
        assert [len(set(sources[i : i + BATCH].tolist())) for i in range(0, 21, BATCH)] == [1] * 7
    if config.stem == "mix":
        assert sources.sum() == 7


def test_a_pipeline_that_does_not_shuffle_reads_each_sample_once(config: Path) -> None:
    with load(config, "pipelines.train.shuffle=false") as loader:
        assert [row[0] for row in flat(epoch_rows(loader))] == list(range(len(loader.dataset)))


@pytest.mark.filterwarnings("ignore:.* samples are bad so far:UserWarning")
def test_without_shuffle_a_bad_sample_of_a_mix_is_replaced_by_one_of_its_source(config: Path) -> None:
    with load(config, "pipelines.train.shuffle=false") as loader:
        order, count = loader._plan.order, len(loader.dataset)
        for bad in (2, count - 1):
            with loader_of(_WithBad(loader.dataset, bad), RAW, batch_size=BATCH, order=order) as damaged:
                found = [row[0] for row in flat(epoch_rows(damaged))]
            stand_in = found[bad]
            assert found == [*range(bad), stand_in, *range(bad + 1, count)] and stand_in != bad
            assert config.stem not in ("mix", "mix_by_batch") or (stand_in < 10) == (bad < 10)


@pytest.mark.filterwarnings("ignore:.* samples are bad so far:UserWarning")
def test_a_bad_sample_is_replaced_by_one_of_its_source_and_changes_no_other(
    config: Path, reference: list[list[Row]]
) -> None:
    with load(config) as loader:
        order = loader._plan.order
        bad = reference[0][4][0]
        with loader_of(_WithBad(loader.dataset, bad), RAW, batch_size=BATCH, order=order) as damaged:
            found = flat(epoch_rows(damaged))
    for mine, sound in zip(found, reference[0], strict=True):
        if sound[0] == bad:
            assert mine[0] != bad
            assert "mix" not in config.stem or (mine[0] < 10) == (bad < 10) or config.stem == "mix_of_parts"
        else:
            assert mine == sound


class _WithBad:
    """A source with one sample that cannot be read."""

    def __init__(self, source: Any, bad: int) -> None:
        self._source, self._bad = source, bad
        self.labels, self.classes, self.shard_sizes, self.storage = source.labels, source.classes, None, None

    def __len__(self) -> int:
        return len(self.labels)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._source, name)

    def path(self, index: int) -> str:
        return str(self._source.path(index))

    def close(self) -> None:
        pass

    def read(self, indices: Any, allocate: Any) -> Payload:
        payload: Payload = self._source.read(indices, allocate)
        bad = [index == self._bad for index in indices]
        return replace(
            payload,
            errors=["no such file" if b else e for b, e in zip(bad, payload.errors, strict=True)],
            sizes=[0 if b else s for b, s in zip(bad, payload.sizes, strict=True)],
        )
