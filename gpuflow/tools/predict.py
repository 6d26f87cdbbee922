"""Runs a model over all samples of a source.

`gpuflow predict` writes a row for each to files of a folder; `gpuflow evaluate` says how often the model is right.
"""

from __future__ import annotations

import csv
import hashlib
import importlib.util
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike

from gpuflow.arrays import Floats, Ints
from gpuflow.config import BatchSpec, PipelineSpec, read_config
from gpuflow.engines import class_names, open_engine, read_checked_info, warm_up_all
from gpuflow.engines.base import activation_of, class_difference, noise_images, top_outputs
from gpuflow.engines.pytorch import TorchEngine
from gpuflow.errors import ConfigError, MissingExtra, Problem, StateError
from gpuflow.loader.assemble import build_loader, open_split
from gpuflow.loader.batch import Batch
from gpuflow.loader.sampler import ListedEpochs
from gpuflow.runtime.files import atomic_write, locked_folder
from gpuflow.runtime.ranks import Group, Ranks, device_of_rank, gather
from gpuflow.serve.predictor import NOT_FINITE, check_block
from gpuflow.sources import SourceSpec, fingerprint_of, has_one_class, source_spec, without_records
from gpuflow.training.objective import mean_average_precision
from gpuflow.vocabulary import stage_table

_KINDS = {".csv": "listing", ".jsonl": "listing", ".ndjson": "listing", ".parquet": "hf", ".arrow": "hf"}


@dataclass(frozen=True, slots=True)
class Row:
    """The prediction for one sample, or why there is none.

    index: of the sample in the source, or in the part of it that is read. path: the place of the sample.
    label: the number of its class; None if that is not known.
    top: number and probability of the most likely outputs, the most likely first, or all outputs with their numbers;
        empty for a bad sample.
    logits, embedding: what the model and the layer gave; empty where that was not asked for.
    stage, reason: the stage that gave a bad sample up, and the rule that it broke; None for others.
    """

    index: int
    path: str
    label: int | None = None
    top: Sequence[tuple[int, float]] = ()
    logits: Sequence[float] = ()
    embedding: Sequence[float] = ()
    stage: str | None = None
    reason: str | None = None


class RowPredictor:
    """Predicts samples of a source, by the stages and the model of a file's block `serve`.

    gpuflow's loader reads and decodes the samples: their pixels are those of validation and of the service. Its batches
    are those of the model, `serve.model.batch` samples each. `close` ends its threads.

    Args:
        path, overrides: as of `gpuflow.load`.
        pipeline: the pipeline whose part of the source is read.
        data: images without labels in place of the source, see `source_of`.
        device: by default a GPU if torch sees one.
        top_k: the number of outputs in a row; all if the model has fewer.
        logits: whether tables have the logits.
        embeddings: the layer whose output tables have.
        progress: called after each batch with `completed` and `total` samples, and a `note` of how many are bad.

    classes: the names of the outputs. identity: what decides the rows, a text of several lines. done, bad: how many
    samples have a row, and how many of these are bad.

    Raises:
        ConfigError, SourceError: the file, the model or the source cannot be used.
    """

    def __init__(
        self,
        path: str | Path,
        overrides: Sequence[str] = (),
        *,
        pipeline: str = "val",
        data: str | None = None,
        device: str | None = None,
        top_k: int = 5,
        logits: bool = False,
        embeddings: str | None = None,
        progress: Callable[..., object] = lambda **numbers: None,
    ) -> None:
        config = read_config(path, stage_table(), overrides)
        model = check_block(config).model
        assert model is not None
        program, part = config.programs["serve"], None
        if data is not None:
            config = replace(config, source_block=source_of(data))
        else:
            config.any_program(pipeline)
            part = config.split_of(pipeline)
        if embeddings is not None:
            model = model.model_copy(update={"cuda_graphs": False, "compile": False})  # which run no hooks
        spec = PipelineSpec(split=part or "all", batch=BatchSpec(size=model.batch), on_error="skip")
        self.config = config = replace(config, pipelines={**config.pipelines, "serve": spec})
        self.batch, self.ranks = model.batch, Ranks.from_environment()
        self.device = device_of_rank(device, self.ranks)
        info = read_checked_info(model, program.pipeline)
        names, self.activation = class_names(model, info), activation_of(model, info)
        self.source = without_records(open_split(config, "serve"))
        self._engine = open_engine(model, image=program.result, device=self.device)
        self._embeddings: torch.Tensor | None = None
        if embeddings is not None:
            if not (isinstance(self._engine, TorchEngine) and model.file.endswith(".pt")):
                rule, action = "needs a checkpoint (.pt), whose layers have names", "name one in serve.model.file"
                raise ConfigError([Problem("--embeddings:", rule, model.file, action)])
            self._engine.layer(embeddings).register_forward_hook(self._keep)
        warm_up_all([self._engine], model.file)
        outputs = self._engine.run(noise_images(1, program.result, self.device)).shape[1]
        self.has_names, self.classes = names is not None, names or tuple(map(str, range(outputs)))
        if embeddings is not None and self._embeddings is None:
            raise ConfigError([Problem("--embeddings:", "must be a layer that runs and gives a tensor", embeddings)])
        self.top_k, self._has_logits = min(top_k, len(self.classes)), logits
        if self.activation == "none":
            self.top_k = len(self.classes)
        digest = hashlib.sha256(Path(model.file).read_bytes()).hexdigest()
        self.identity = (
            f"source {fingerprint_of(self.source)} of {len(self.source)} samples\n"
            f"preprocessing {program.pipeline.fingerprint}\n"
            f"model {digest[:16]} in {model.precision} by {model.runtime}, in batches of {self.batch}\n"
            f"columns for top {self.top_k} by {self.activation}, logits: {logits}, embeddings: {embeddings}\n"
        )
        self._progress, self.done, self.bad = progress, 0, 0
        self._batches, self._bad = list[Ints](), dict[int, Row]()
        listed = ListedEpochs(
            lambda epoch, start: (np.concatenate(self._batches), [*map(len, self._batches)]),
            lambda: len(self._batches),
            samples=len(self.source),
            batch_size=self.batch,
            rank=0,
            world_size=1,
            drawn=False,
        )
        self._loader = build_loader(
            config,
            "serve",
            rank=0,
            world_size=1,
            device=self.device,
            whole=self.source,
            listed=listed,
            report=lambda fault: self._bad.update(
                {fault.index: Row(fault.index, fault.path, stage=fault.stage, reason=fault.reason)}
            ),
        )
        self.close = self._loader.close

    def _keep(self, layer: object, inputs: object, output: object) -> None:
        self._embeddings = output if isinstance(output, torch.Tensor) else None

    def predict(self, indices: ArrayLike) -> Iterator[list[Row]]:
        """Yield the rows of these samples in their order, those of a batch at a time. An index must not come twice.

        The same batches give the same rows. In other batches the last digits of their numbers may differ.
        """
        samples = np.asarray(indices, np.int64)
        self._batches = np.split(samples, range(self.batch, len(samples), self.batch))
        for batch, part in zip(self._loader if len(samples) else (), self._batches, strict=False):
            good = {row.index: row for row in self._predicted(batch)} if len(batch.indices) else {}
            rows = [good.get(index) or self._bad[index] for index in part.tolist()]
            self.count(rows, of=len(samples))
            yield rows

    def predict_parts(self, parts: Sequence[range]) -> Iterator[tuple[range, list[Row]]]:
        """Yield each part of the samples with its rows. All parts but the last must be whole batches."""
        left, rows = list(parts), list[Row]()
        for some in self.predict(np.concatenate([[], *parts])):
            rows += some
            if len(rows) == len(left[0]):
                yield left.pop(0), rows
                rows = []

    def count(self, rows: Sequence[Row], *, of: int) -> None:
        """Count rows that are done, and show the progress."""
        self.done, self.bad = self.done + len(rows), self.bad + sum(not row.top for row in rows)
        self._progress(completed=self.done, total=of, note=f"{self.bad} bad")

    def _predicted(self, batch: Batch) -> Iterator[Row]:
        logits, count = self._engine.run(batch.images), len(batch.indices)
        values, outputs = (found.tolist() for found in top_outputs(logits, self.activation, self.top_k))
        columns = (
            batch.indices.tolist(),
            batch.labels.tolist() if has_one_class(self.source) else [None] * count,
            logits.tolist() if self._has_logits else [()] * count,
            [()] * count if self._embeddings is None else self._embeddings[:count].flatten(1).tolist(),
        )
        for index, label, *given, shares, numbers in zip(*columns, values, outputs, strict=True):
            path = self.source.path(index)
            if all(map(math.isfinite, shares)):
                yield Row(index, path, label, tuple(zip(numbers, shares, strict=True)), *given)
            else:
                yield Row(index, path, stage="model", reason=NOT_FINITE)

    def table(self, rows: Sequence[Row]) -> dict[str, list[Any]]:
        """Return rows as columns: index, path, class and probability (class_2, ... of the less likely), stage, reason.

        With the activation `none` a column for each output, by its name or `output_0`, has its number in their place.
        `logits` and `embedding` are among them if they were asked for. A bad sample has None in place of a prediction.
        """
        table: dict[str, list[Any]] = {"index": [row.index for row in rows], "path": [row.path for row in rows]}
        for k in range(self.top_k):
            name, end = self.classes[k] if self.has_names else f"output_{k}", f"_{k + 1}" if k else ""
            if self.activation != "none":
                table[f"class{end}"] = [self.classes[row.top[k][0]] if row.top else None for row in rows]
                name = f"probability{end}"
            table[name] = [row.top[k][1] if row.top else None for row in rows]
        if self._has_logits:
            table["logits"] = [row.logits or None for row in rows]
        if self._embeddings is not None:
            table["embedding"] = [row.embedding or None for row in rows]
        return {**table, "stage": [row.stage for row in rows], "reason": [row.reason for row in rows]}


def source_of(data: str) -> SourceSpec:
    """Return the source of images without labels, by the end of a path, a pattern or a URL.

    It is a folder of images at any depth, a CSV or JSON-lines file with the column path, tar shards, or Parquet files.

    Examples:
        >>> [type(source_of(data)).__name__ for data in ("photos", "list.csv", "https://host/{0..9}.tar")]
        ['Folder', 'Listing', 'Tar']
    """
    name = PurePath(data.lower().partition("?")[0])
    kind = "tar" if ".tar" in name.name else _KINDS.get(name.suffix, "folder")
    return source_spec(**{kind: data, "fields": {"image": {"column": "path"} if kind == "listing" else {}}})


Predict = Callable[[Sequence[range]], Iterator[tuple[range, list[Row]]]]
"""Gives the rows of parts of the samples: see `RowPredictor.predict_parts`."""


# --- files ------------------------------------------------------------------------------------------------------------


def write_predictions(
    predictor: RowPredictor, out: Path, *, form: str, part_rows: int, predict_parts: Predict | None = None
) -> None:
    """Write the rows of all samples to `out`: part-00000.parquet (or .csv) and so on, each whole or not at all.

    Parts that are there already stay: a run that was killed goes on behind its last part. Each of several ranks writes
    some of the parts.

    Args:
        form: csv or parquet.
        part_rows: rows of a part, rounded up to whole batches.
        predict_parts: takes the place of `predictor.predict_parts`; the parts may come in any order.

    Raises:
        StateError: the folder holds other files, or the rows of another source, model, preprocessing or options.
        ConfigError: another run writes there.
        MissingExtra: pyarrow is not installed.
    """
    if form == "parquet" and not importlib.util.find_spec("pyarrow"):
        raise MissingExtra("writing Parquet", "pyarrow", "hf")
    samples, size = len(predictor.source), math.ceil(part_rows / predictor.batch) * predictor.batch
    starts = range(0, samples, size)[predictor.ranks.rank :: predictor.ranks.world_size]
    parts = {range(start, min(start + size, samples)): out / f"part-{start // size:05}.{form}" for start in starts}
    out.mkdir(parents=True, exist_ok=True)  # a rank that does not lock it may come first
    try:
        with nullcontext() if predictor.ranks.rank else locked_folder(out):
            _claim(out, f"{predictor.identity}files of {size} rows as {form}\n")
            left = [part for part, file in parts.items() if not file.exists()]
            for part, rows in (predict_parts or predictor.predict_parts)(left):
                for killed in out.glob(f".{parts[part].name}.*"):
                    killed.unlink()
                write_table(parts[part], predictor.table(rows))
    except BlockingIOError as error:
        rule, action = "is in use by another run of gpuflow predict", "wait for it, or name another folder"
        raise ConfigError([Problem("--out:", rule, str(out), action)]) from error


def _claim(out: Path, identity: str) -> None:
    """Write down which run the folder is of. Raises StateError if it is of another one, or of none."""
    others = [entry.name for entry in out.iterdir() if not entry.name.startswith(".")]
    record = out / "run.txt"  # looked for after the others, because another rank may write it
    known = record.read_text() if record.exists() else min(others, default="")
    if not known:
        with atomic_write(record, text=True) as file:
            file.write(identity)
    for theirs, ours in zip_longest(known.splitlines(), identity.splitlines()) if known else ():
        if theirs != ours:
            rule = f"holds other files than those of this run: {theirs} in place of {ours}"
            raise StateError(f"{out}: {rule}; name another folder")


def write_table(path: Path, table: Mapping[str, Sequence[Any]]) -> None:
    """Write columns as a CSV or Parquet file, by the name's end, whole or not at all. Lists in CSV are JSON."""
    if path.suffix == ".csv":
        with atomic_write(path, text=True) as text:
            rows = csv.writer(text, lineterminator="\n")
            rows.writerow(table)
            rows.writerows(zip(*table.values(), strict=True))
        return
    import pyarrow as pa
    from pyarrow import parquet

    types = {"index": pa.int64(), **dict.fromkeys(("logits", "embedding"), pa.list_(pa.float32()))}
    for name in table.keys() - types:
        is_number = any(isinstance(cell, float) for cell in table[name])
        types[name] = pa.float32() if is_number or name.startswith("probability") else pa.string()
    columns = {name: pa.array(map(_as_text, table[name]), types[name]) for name in table}
    with atomic_write(path) as file:
        parquet.write_table(pa.table(columns), file)


def _as_text(cell: Any) -> Any:
    """Return the name of a file, which need not be UTF-8, as atomic_write would write it; other values as they are."""
    return cell.encode(errors="backslashreplace").decode() if isinstance(cell, str) else cell


# --- evaluation -------------------------------------------------------------------------------------------------------

_WORST = 5


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Evaluation:
    """The predictions of a model for labelled samples.

    classes: names, of labels and outputs. confusion [K, K]: samples by label (row) and most likely output (column).
    top: samples whose label is among the `top_k` most likely outputs. bad: the samples without a prediction.
    ranked: the number of samples with a prediction and the mean average precision, where samples have several classes;
        confusion and top are zero then.
    """

    classes: tuple[str, ...]
    confusion: Ints
    top: int
    top_k: int
    bad: list[Row]
    ranked: tuple[int, float] | None = None

    @property
    def shares(self) -> tuple[Floats, Floats]:
        """Return recall and precision by class; NaN where there are no samples.

        Recall is the share of the class's samples that are predicted as it, precision the share of such predictions
        that are right.
        """
        with np.errstate(invalid="ignore"):
            recall, precision = (self.confusion.diagonal() / self.confusion.sum(axis=axis) for axis in (1, 0))
        return recall, precision

    def as_dict(self) -> dict[str, Any]:
        """Return the mean average precision, or the shares of right predictions, of all samples and by class, which
        `--json` prints."""
        if self.ranked:
            return {"samples": self.ranked[0], "bad": len(self.bad), "map": self.ranked[1]}
        samples, counts = int(self.confusion.sum()), self.confusion.sum(axis=1)
        rows = zip(self.classes, counts.tolist(), *(share.tolist() for share in self.shares), strict=True)
        return {
            "samples": samples,
            "bad": len(self.bad),
            "top_1": int(self.confusion.trace()) / max(1, samples),
            "k": self.top_k,
            "top_k": self.top / max(1, samples),
            "classes": [dict(zip(("class", "samples", "recall", "precision"), row, strict=True)) for row in rows],
        }

    def __str__(self) -> str:
        """Return shares of right predictions, and the classes of the lowest recall; or the mean average precision."""
        found = self.as_dict()
        lines = [f"{found['samples']:,} samples of {len(self.classes)} classes, without {found['bad']:,} bad ones"]
        if self.ranked:
            return f"{lines[0]}\nmap  {found['map']:.4f}"
        recall = self.shares[0]
        lines += [
            f"top-1  {found['top_1']:.4f}",
            f"top-{self.top_k}  {found['top_k']:.4f}",
        ]
        worst = [found["classes"][i] for i in np.argsort(recall, kind="stable")[:_WORST]]
        lines += [f"  recall {row['recall']:.4f}  precision {row['precision']:.4f}  {row['class']}" for row in worst]
        return "\n".join(lines)

    def write(self, out: Path) -> list[Path]:
        """Write confusion.csv, classes.csv and bad.csv, or bad.csv alone if samples have several classes.

        Returns their paths.
        """
        out.mkdir(parents=True, exist_ok=True)
        tables = dict[str, Mapping[str, Any]]()
        if self.ranked is None:
            names = [f"{number} {name}" for number, name in enumerate(self.classes)]  # two classes may have one name
            rows = self.as_dict()["classes"]
            tables["confusion"] = {"label": names, **dict(zip(names, self.confusion.T, strict=True))}
            tables["classes"] = {key: [row[key] for row in rows] for key in rows[0]}
        tables["bad"] = {key: [getattr(row, key) for row in self.bad] for key in ("index", "path", "stage", "reason")}
        for name, table in tables.items():
            write_table(out / f"{name}.csv", table)
        return [out / f"{name}.csv" for name in tables]


def evaluate(predictor: RowPredictor, group: Group) -> Evaluation:
    """Compare the predictions for all samples with their labels. The rows need logits if samples have several classes.

    The ranks take the batches in turn, so that each batch, and the sums, are the same on any number of ranks.

    group: the ranks that share the samples.

    Raises ConfigError unless each sample has one or several of the model's classes.
    """
    _require_classes(predictor)
    count, indices, ranks = len(predictor.classes), np.arange(len(predictor.source)), predictor.ranks
    sums, bad = np.zeros(count * count + 1, np.int64), list[Row]()
    ranked = list[Any]()
    for rows in predictor.predict(indices[indices // predictor.batch % ranks.world_size == ranks.rank]):
        for row in rows:
            if not row.top:
                bad.append(row)
            elif row.label is None:
                ranked.append((row.index, row.logits))
            else:
                sums[row.label * count + row.top[0][0]] += 1
                sums[-1] += row.label in dict(row.top)
    shared = torch.from_numpy(sums).to(predictor.device)
    group.sum(shared)
    *confusion, top = shared.tolist()
    ranked = gather(ranked)
    labels, scores = predictor.source.labels[[index for index, _ in ranked]], np.array([row for _, row in ranked])
    return Evaluation(
        classes=predictor.classes,
        confusion=np.reshape(confusion, (count, count)),
        top=top,
        top_k=predictor.top_k,
        bad=sorted(gather(bad), key=lambda row: row.index),
        ranked=None if has_one_class(predictor.source) else (len(ranked), mean_average_precision(scores, labels)),
    )


def _require_classes(predictor: RowPredictor) -> None:
    """Raise ConfigError unless each sample has one or several of the model's classes."""
    source, count = predictor.source, len(predictor.classes)
    rule = action = ""
    if not has_one_class(source) and source.labels.dtype != np.uint8:
        held, action = "no labels", "add classes"
        if source.labels.dtype.kind == "f":
            held, action = "numbers", "see val_mae in the metrics.csv of gpuflow train"
        rule = f"must have one or several classes for each sample, to compare predictions with, got {held}"
    elif predictor.activation == "none":
        rule, action = "must have numbers, as the model does", "set serve.model.activation"
    elif difference := class_difference(source.classes, predictor.classes if predictor.has_names else ()):
        rule = f"must have the model's classes, {difference}"
    elif (most := source.labels.shape[1] - 1 if source.labels.ndim > 1 else source.labels.max()) >= count:
        rule = f"must have labels below {count}, the number of the model's outputs, got {most}"
    if rule:
        raise ConfigError([Problem(f"{predictor.config.path}: source", rule, action=action)])
