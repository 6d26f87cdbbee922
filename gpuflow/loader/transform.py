"""Runs a pipeline's stages without a loader: on decoded images, and fields of theirs, that the caller holds."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NoReturn, final

import numpy as np
import torch
from numpy.typing import ArrayLike

from gpuflow.arrays import Array, Bytes, Floats, Ints
from gpuflow.config import Config
from gpuflow.config.resources import threads_of
from gpuflow.errors import BadSampleError, ConfigError, Key, LoaderTimeout, Problem, show
from gpuflow.execute.cpu.runner import CpuRunner
from gpuflow.execute.cpu.targets import TargetMapper
from gpuflow.execute.gpu.device_stream import DeviceStream, allocate_slots
from gpuflow.execute.gpu.passes import Pass, passes_of
from gpuflow.loader.batch import names_of_detectors
from gpuflow.loader.records import target_mapper, to_tensors
from gpuflow.pipeline.records import GEOMETRIC, Column, Field, FieldType, Ragged, Records, RecordValue, values_of
from gpuflow.pipeline.rng import epoch_number
from gpuflow.pipeline.stage import Keys, Mixing
from gpuflow.pipeline.views import AnyProgram, ViewsProgram, as_images, named_programs, programs_of, slot_of, slots_of
from gpuflow.runtime.cuda import CudaCapture
from gpuflow.runtime.memory import SlotPool
from gpuflow.runtime.ranks import Ranks
from gpuflow.runtime.threads import DaemonPool
from gpuflow.sources import SourceSpec

if TYPE_CHECKING:
    from gpuflow.execute.gpu.repeated_passes import RepeatedPasses

Images = torch.Tensor | Sequence[torch.Tensor]
Result = torch.Tensor | dict[str, torch.Tensor]

_CALLERS = 2
"""Calls at a time: while one draws random parameters, the threads work on the images of another."""
_END_SECONDS = 5.0
_KEPT_BATCHES = 2
"""Free batches whose memory is kept: mapping it anew takes as long as filling it."""
_KEPT_STREAMS = 4
"""Streams whose memory is kept, the ones that were used last."""


def build_transform(config: Config, name: str, device: str | torch.device | None) -> Transform:
    """Return the stages of one pipeline of a configuration, as a callable. See `gpuflow.transform`."""
    program = config.any_program(name)

    def refused(rule: str, *keys: Key, action: str = "") -> ConfigError:
        path = ("pipelines", name, *keys)
        return ConfigError([Problem(f"{config.path}:", rule, action=action, path=path, code="config.conflict")])

    if program.decoder.library is not None:
        raise refused("decodes and resizes by itself, so it has no stages for decoded images", "preset")
    for i, stage in enumerate(() if isinstance(program, ViewsProgram) else program.pipeline.stages):
        if isinstance(stage, Mixing):
            rule = "mixes the images and labels of a whole batch, and a transform gets no labels"
            raise refused(rule, "stages", i, stage.stage_name, action="remove the stage, or use gpuflow.load")
    targets = target_mapper(config, name, _moved_fields(config.source))
    target = Ranks.on_host().device(device)
    runner: _CpuRunner | _GpuRunner
    if target.type == "cuda":
        found: list[tuple[Pass, ...]] = []
        for one in programs_of(program):
            passes = passes_of(one)
            if isinstance(passes, str):
                keys = "views" if isinstance(program, ViewsProgram) else "stages"
                raise refused(f"cannot run on a GPU: {passes}", keys, action="use device='cpu'")
            found.append(passes)
        target = torch.device("cuda", torch.cuda.current_device()) if str(target) == "cuda" else target
        runner = _GpuRunner(program, found, target)
    else:
        runner = _CpuRunner(program, threads_of(config.run), config.run.timeout_s)
    return Transform(program, config.source.seed, target, runner, targets)


@final
class Transform:
    """Runs the stages of one pipeline, after decoding, on batches of decoded images. Any thread may call it.

    Made by `gpuflow.transform`. `close`, or leaving a `with` block, ends its threads; so does collection.
    """

    def __init__(
        self,
        program: AnyProgram,
        seed: int,
        device: torch.device,
        runner: _CpuRunner | _GpuRunner,
        targets: TargetMapper | None = None,
    ) -> None:
        """Take the parts that `build_transform` makes. targets: maps fields that follow the moves of pixels."""
        self._program, self._seed, self._runner, self._targets = program, seed, runner, targets
        self.device = device
        self._channels = programs_of(program)[0].specs[1].shape[2]
        self._record_values = program.record_values
        self._finalizer = weakref.finalize(self, runner.close)

    @property
    def preprocessing(self) -> str:
        """Return the fingerprint of the pipeline's stages and all their parameters, 16 hex digits, as a loader's."""
        return self._program.pipeline.fingerprint

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a transform cannot be pickled or copied: it has threads; make it in the process that calls it, as in the "
            "worker_init_fn of a DataLoader"
        )

    def __repr__(self) -> str:
        return f"<gpuflow.Transform {self._program.pipeline!r}; on {self.device}>"

    def __call__(
        self,
        images: Images,
        *,
        epoch: int,
        positions: ArrayLike | torch.Tensor,
        fields: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run the stages on N images, which stay as they are.

        Args:
            images: uint8 [N, C, H, W], or N tensors [C, H, W] of any sizes, on this transform's device, with the
                channels in the order that `decode` has.
            epoch: from 0.
            positions: [N], each sample's place in the epoch's sequence over all ranks. Random stages draw by the file's
                seed, the epoch and the position, so equal ones give equal pixels.
            fields: what belongs to the images, by name: N values each, on any device. Those that the source declares as
                boxes (xyxy [M, 4], or torchvision's `BoundingBoxes` of any format), their labels (integers [M]), masks
                (uint8 or bool [M, H, W] where the source has an instance each, else levels [H, W]) and keypoints ([M,
                K, 3]) follow the images. Stages take their numbers from others. The rest comes back as it is.

        Returns:
            A tensor [N, C, H, W] in the dtype and memory format that a loader's batches have; of a pipeline with views
            a dict, name to tensor [count, N, C, H, W]. On a GPU the work is queued on the current stream. If the source
            has boxes, masks or keypoints, a pair of this tensor and a dict of the given fields, on its device, in the
            forms of `Batch.fields`. `pipelines.NAME.targets` says which boxes are kept.

        Raises:
            ValueError: images, positions or fields of another form, or a field that is missing.
            BadSampleError: an image that the stages cannot take, such as one that is smaller than a crop, a value of a
                field that a stage cannot use, a box outside its image, or a keypoint of no known visibility.
            LoaderTimeout: threads that took longer than run.timeout_s.
        """
        number = epoch_number(epoch, 63)
        images = images if isinstance(images, torch.Tensor) else list(images)
        shapes = self._checked_shapes(images)
        count = len(images)
        places = np.asarray(positions.cpu() if isinstance(positions, torch.Tensor) else positions)
        if places.shape != (count,) or (count and places.dtype.kind not in "iu"):
            shown = f"{places.dtype} {list(places.shape)}"
            raise ValueError(f"positions must be integers [{count}], one for each image, got {shown}")
        outside = places[(places < 0) | (places >= 2**63)]
        if len(outside):
            raise ValueError(f"positions must be within [0, 2**63), got {outside[0]}")
        fields = {} if fields is None else fields
        if not isinstance(fields, Mapping):
            raise ValueError(f"fields must be a dict, with N values for each name, got {type(fields).__name__}")
        values = self._values(fields, count)
        keys = Keys(self._seed, number, places.astype(np.int64), values=values)
        if self._targets is None:
            return self._runner.run_stages(images, shapes, keys)
        sizes = np.array([shape[1:] for shape in shapes], np.int64).reshape(-1, 2)
        moved = self._moved(self._targets, fields, sizes, keys)
        return self._runner.run_stages(images, shapes, keys), {**fields, **moved}

    def _moved(self, targets: TargetMapper, fields: Mapping[str, Any], sizes: Ints, keys: Keys) -> dict[str, Any]:
        """Return those of the fields that follow the images, as a batch has them. sizes [N, 2]: of the images. Raises
        ValueError or BadSampleError."""
        chosen, columns = _columns_of(targets.fields, fields, sizes)
        found = replace(targets, fields=chosen).map(Records(columns, [None] * len(sizes)), keys, sizes)
        _raise_first_record(found.errors)
        return to_tensors(found.columns, lambda arrays: [torch.from_numpy(x).to(self.device) for x in arrays])

    def _values(self, fields: Mapping[str, Any], count: int) -> Mapping[RecordValue, Floats]:
        """Return what the stages take from these fields of `count` samples. Raises ValueError or BadSampleError."""
        if not (wanted := self._record_values):
            return {}
        columns: dict[str, Column] = {}
        types = {} if self._targets is None else {field.name: field.type for field in self._targets.fields}
        for name in dict.fromkeys(value.field for value in wanted):
            if name not in fields:
                shown = ", ".join(fields) or "none"
                raise ValueError(f"fields must have {name!r}, which a stage takes from each record, got {shown}")
            columns[name] = _column(name, types.get(name, "any"), fields[name], count)
        values, errors = values_of(wanted, Records(columns, [None] * count))
        _raise_first_record(errors)
        return values

    def _checked_shapes(self, images: Images) -> list[torch.Size]:
        """Return the shape [C, H, W] of each image. Raises ValueError unless every image is what the stages take."""
        if isinstance(images, torch.Tensor):
            if images.ndim != 4:
                raise ValueError(f"images must be [N, C, H, W], or a list of [C, H, W], got {list(images.shape)}")
            return self._checked_shapes([*images[:1]]) * len(images)
        shapes, given = [], list[Any](images)
        for i, image in enumerate(given):
            if isinstance(image, torch.Tensor):
                shape, dtype, device = image.shape, image.dtype, image.device
                fits = len(shape) == 3 and shape[0] == self._channels and 0 not in shape
                if fits and dtype == torch.uint8 and device == self.device:
                    shapes.append(shape)
                    continue
                shown = f"{str(dtype).removeprefix('torch.')} {list(shape)} on {device}"
            else:
                shown = type(image).__name__
            raise ValueError(
                f"images[{i}] must be a tensor, uint8 [{self._channels}, H, W] on {self.device}, got {shown}"
            )
        return shapes

    def close(self) -> None:
        """End the threads; a later call starts new ones."""
        self._runner.close()

    def __enter__(self) -> Transform:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _raise_first(faults: Sequence[BadSampleError | None]) -> None:
    for i, fault in enumerate(faults):
        if fault is not None:
            raise fault.located(i, f"images[{i}]")


def _raise_first_record(errors: Sequence[str | None]) -> None:
    _raise_first([None if error is None else BadSampleError("record", error) for error in errors])


@final
class _CpuRunner:
    """Runs a program on its own threads; with one thread, on the caller's."""

    def __init__(self, program: AnyProgram, threads: int, timeout_seconds: float) -> None:
        self._program, self._threads, self._timeout_seconds = program, threads, timeout_seconds
        self._begin()

    def _begin(self) -> None:
        self._pid, self._lock = os.getpid(), threading.Lock()
        self._runner = CpuRunner(self._program, self._threads if self._threads > 1 else 0)
        shape, dtype = slot_of(self._program)
        self._results, self._largest = SlotPool((0, *shape), dtype, _KEPT_BATCHES), 0
        self._pool: DaemonPool | None = None

    def run_stages(self, images: Images, shapes: Sequence[torch.Size], keys: Keys) -> Result:
        """Return the batch of N checked images. shapes: [C, H, W] of each image. Raises BadSampleError."""
        if self._pid != os.getpid():  # in a forked child, without its parent's threads, which may have held these locks
            self._begin()
        arrays = [image.permute(1, 2, 0).numpy() for image in images]
        memory = self._memory(len(arrays))
        try:
            faults = self._run_within_limit(arrays, keys, slots_of(self._program, memory))
        except BaseException:
            self._results.clear()  # threads may still be writing
            raise
        _raise_first(faults)
        return as_images(self._program, memory)

    def _memory(self, count: int) -> Array:
        """Return memory for the results of `count` images, used again once no tensor refers to it.

        A batch of less than half the largest one's size gets new memory: kept results would else hold a whole batch's.
        """
        shape, dtype = slot_of(self._program)
        if 2 * count < self._largest:
            return np.empty((count, *shape), dtype)
        self._largest = max(self._largest, count)
        return self._results.acquire(count)

    def _run_within_limit(self, arrays: Sequence[Bytes], keys: Keys, slots: Any) -> list[BadSampleError | None]:
        """Run the stages, and return for each image None, or why it is bad. Raises LoaderTimeout."""
        if self._threads == 1 or len(arrays) < 2:
            return self._runner.run_images(arrays, keys, slots)
        with self._lock:
            self._pool = self._pool or DaemonPool(_CALLERS, "transform")
            future = self._pool.submit(self._runner.run_images, arrays, keys, slots)
        try:
            return future.result(self._timeout_seconds)
        except TimeoutError as error:
            if future.done() and future.exception() is error:
                raise  # a stage's own
            raise LoaderTimeout(
                f"the stages did not finish {len(arrays)} images within run.timeout_s = {self._timeout_seconds:g} s; "
                "raise run.timeout_s if that is to be expected"
            ) from None
        finally:
            future.cancel()

    def close(self) -> None:
        if self._pid != os.getpid():
            return
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.end(_END_SECONDS)
        self._runner.clear()
        self._results.clear()


@final
class _GpuRunner:
    """Runs the passes of a program, or of each view, on the caller's current stream.

    passes: for each program its passes.
    """

    def __init__(self, program: AnyProgram, passes: Sequence[Sequence[Pass]], device: torch.device) -> None:
        self._program, self._passes, self._device = program, passes, device
        self._of_stream = lru_cache(_KEPT_STREAMS)(self._begin)

    def run_stages(self, images: Images, shapes: Sequence[torch.Size], keys: Keys) -> Result:
        """Queue the work on N checked images, and return their batch. As `_CpuRunner.run_stages`."""
        from gpuflow.execute.gpu.device_passes import interleaved

        device_stream, passes = self._of_stream(torch.cuda.current_stream(self._device))
        results: dict[str, torch.Tensor] = {}
        with device_stream.queued():
            held = interleaved(images, device_stream, shapes)
            for (view, count, one), own in zip(named_programs(self._program), passes, strict=True):
                slots = allocate_slots(device_stream, count * len(images), one.result)
                results[view] = slots.view(count, len(images), *slots.shape[1:])
                for number, rows in enumerate(results[view]):
                    _raise_first(own.run_images(held, keys.of_view(view, number) if view else keys, rows))
        return results if isinstance(self._program, ViewsProgram) else results[""][0]

    def _begin(self, stream: torch.cuda.Stream) -> tuple[DeviceStream, list[RepeatedPasses]]:
        from gpuflow.execute.gpu.repeated_passes import RepeatedPasses

        device_stream, capture = DeviceStream(self._device, stream), CudaCapture(self._device)

        def captured(launch: Callable[[], None]) -> Callable[[], None]:
            return capture(launch, runs_before=1)[0]

        return device_stream, [RepeatedPasses(one, device_stream, captured) for one in self._passes]

    def close(self) -> None:
        self._of_stream.cache_clear()


def _moved_fields(source: SourceSpec) -> tuple[Field, ...]:
    """Return the boxes, masks and keypoints that a source declares, or that its kind has. The source is not read for
    them."""
    return tuple(
        Field(
            name=name,
            type=kind,
            labels=spec.labels or "",
            instances=kind == "mask" and not spec.is_mask_file,
            fill=spec.fill or 0,
            flip_pairs=spec.flip_pairs or (),
        )
        for name, spec in source.fields_in_full
        for kind in GEOMETRIC
        if kind == spec.type
    )


def _columns_of(
    schema: Sequence[Field], fields: Mapping[str, Any], sizes: Ints
) -> tuple[tuple[Field, ...], dict[str, Column]]:
    """Return those of the fields of a schema that are there, and their values for N samples.

    Args:
        schema: what may be there.
        fields: N values by name, as `Transform.__call__` takes them.
        sizes: height and width of the images, [N, 2].

    Raises:
        ValueError: a value of another form, with its place, or a field under the name that it has in targets.
        BadSampleError: a keypoint of another visibility than 0, 1 and 2, as in a source.
    """
    for own, name in names_of_detectors(schema).items():
        if own and own not in fields and name in fields:
            raise ValueError(
                f"fields must have {own!r}, the name that the source declares, in place of {name!r}, which would not "
                "follow the images"
            )
    chosen: list[Field] = []
    columns: dict[str, Column] = {}
    for field in schema:
        if field.name not in fields:
            continue
        column = _column(field.name, field.type, fields[field.name], len(sizes))
        if field.type == "mask":
            read = _instances if field.instances else _levels
            rows = enumerate(zip(column, sizes.tolist(), strict=True))
            column = [read(field.name, i, value, size) for i, (value, size) in rows]
        columns[field.name] = column
        labels = field.labels if field.labels in fields else ""
        if labels:
            columns[labels] = _labels(labels, _values(labels, fields[labels], len(sizes)))
        chosen.append(replace(field, labels=labels))
    return tuple(chosen), columns


def _column(name: str, kind: FieldType, given: Any, count: int) -> Any:
    """Return the `count` values of a field, one for each image: boxes and keypoints as `Ragged`, others as a list with
    arrays in place of tensors. Raises ValueError; BadSampleError as `_keypoints`."""
    values = _values(name, given, count)
    if kind == "boxes":
        return _boxes(name, values)
    if kind == "keypoints":
        return _keypoints(name, values)
    return list(map(_without_tensor, values))


def for_numpy(value: torch.Tensor) -> torch.Tensor:
    """Return the same numbers as numpy takes them: without a gradient, and float32 instead of bfloat16.

    Examples:
        >>> for_numpy(torch.ones(2, dtype=torch.bfloat16, requires_grad=True)).numpy()
        array([1., 1.], dtype=float32)
    """
    return (value.float() if value.dtype == torch.bfloat16 else value).detach()


def _without_tensor(value: Any) -> Any:
    return for_numpy(value).cpu().numpy() if isinstance(value, torch.Tensor) else value


def _values(name: str, given: Any, count: int) -> list[Any]:
    rule = f"fields[{name!r}] must have {count} values, one for each image, got"
    try:
        values = list(given)
    except TypeError:
        raise ValueError(f"{rule} {show(given)}") from None
    if len(values) != count:
        raise ValueError(f"{rule} {len(values)}")
    return values


def _array(name: str, i: int, value: Any, *shape: int | str) -> Array:
    """Return sample i's value as an array of numbers of this shape, in which a letter stands for any length."""
    rule = f"fields[{name!r}][{i}] must be numbers [{', '.join(map(str, shape))}], got"
    try:
        array = np.asarray(_without_tensor(value))
    except ValueError:
        raise ValueError(f"{rule} rows of several lengths") from None
    if array.ndim == 1 and not len(array):  # an empty list has no rows
        array = np.zeros([length if isinstance(length, int) else 0 for length in shape], array.dtype)
    fits = array.ndim == len(shape) and all(
        isinstance(wanted, str) or wanted == got for wanted, got in zip(shape, array.shape, strict=True)
    )
    if not fits or array.dtype.kind not in "biuf":
        raise ValueError(f"{rule} {array.dtype} {list(array.shape)}")
    return array


def _boxes(name: str, values: Sequence[Any]) -> Ragged:
    from torchvision import tv_tensors
    from torchvision.transforms.v2 import functional

    corners = tv_tensors.BoundingBoxFormat.XYXY
    parts = []
    for i, value in enumerate(values):
        if isinstance(value, tv_tensors.BoundingBoxes) and value.format != corners:
            if tv_tensors.is_rotated_bounding_format(value.format):
                rule = "must be boxes whose sides are along the image's"
                raise ValueError(f"fields[{name!r}][{i}] {rule}, got the format {value.format.value}")
            plain = value.as_subclass(torch.Tensor).double()
            value = functional.convert_bounding_box_format(plain, old_format=value.format, new_format=corners)
        parts.append(_array(name, i, value, "M", 4).astype(np.float32))
    return Ragged.of(parts, np.zeros((0, 4), np.float32))


def _labels(name: str, values: Sequence[Any]) -> Ragged:
    parts = []
    for i, value in enumerate(values):
        array = _array(name, i, value, "M")
        if len(array) and array.dtype.kind not in "iu":
            raise ValueError(f"fields[{name!r}][{i}] must be integers [M], got {array.dtype} {list(array.shape)}")
        if array.dtype == np.uint64 and (array > np.iinfo(np.int64).max).any():
            raise ValueError(f"fields[{name!r}][{i}] must fit into int64, got {show(array.max().item())}")
        parts.append(array.astype(np.int64))
    return Ragged.of(parts, np.zeros(0, np.int64))


def _keypoints(name: str, values: Sequence[Any]) -> Ragged:
    """Return keypoints [M, K, 3] of each sample as a column. Raises ValueError; BadSampleError for an unknown
    visibility."""
    parts = [_array(name, i, value, "M", "K", 3).astype(np.float32) for i, value in enumerate(values)]
    for i, part in enumerate(parts):
        finite, known = np.isfinite(part).all(axis=(1, 2)), np.isin(part[:, :, 2], (0, 1, 2)).all(axis=1)
        for j in np.flatnonzero(finite & ~known)[:1].tolist():  # of others it is said where they are mapped
            rule = f"{name}[{j}] must have a visibility of 0, 1 or 2, got {show(part[j, :, 2].tolist())}"
            raise BadSampleError("record", rule).located(i, f"images[{i}]")
    # rows without any instance say a number, too, unless they are an empty list
    numbers = {part.shape[1] for part in parts if len(part)} or {max((part.shape[1] for part in parts), default=0)}
    if len(numbers) > 1:
        shown = ", ".join(map(str, sorted(numbers)))
        raise ValueError(f"fields[{name!r}] must have the same number of keypoints in each row, got {shown}")
    count = numbers.pop()
    empty = np.zeros((0, count, 3), np.float32)
    return Ragged.of([part if len(part) else empty for part in parts], empty)


def _instances(name: str, i: int, value: Any, size: Sequence[int]) -> list[Any]:
    """Return one mask for each instance."""
    return list((_array(name, i, value, "M", *size) != 0).astype(np.uint8))


def _levels(name: str, i: int, value: Any, size: Sequence[int]) -> Bytes:
    mask = _array(name, i, value, *size)
    if mask.dtype.kind == "f" or not 0 <= int(mask.min()) <= int(mask.max()) <= 255:
        raise ValueError(
            f"fields[{name!r}][{i}] must be whole numbers of 0 to 255, got {mask.dtype} of {mask.min()} to {mask.max()}"
        )
    return mask.astype(np.uint8)
