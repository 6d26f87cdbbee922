"""What a reader finds in another library's transforms: stages, and what no stage equals.

Also what all readers share: files of other libraries, Python objects that a user names, and how far pixels are apart.
"""

from __future__ import annotations

import importlib
import json
import sys
import tomllib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

import cv2
import numpy as np
from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError

from gpuflow.arrays import Floats
from gpuflow.config.words import problems_of
from gpuflow.config.yaml_file import Lines, read_yaml
from gpuflow.decode.codecs import pixels_of_test_image
from gpuflow.errors import UNSET, Code, ConfigError, GpuflowError, Key, Problem, reason_of, suggest
from gpuflow.pipeline.parameters import IMAGENET

_SIZE = 480, 361
"""Width and height of the test picture."""


def apart(transform: Callable[[Any], Any], stage: Callable[[Any], Any]) -> str:
    """Return how far two transforms of a PIL image are apart on the test picture, in words.

    Args:
        transform: of another library, which may do anything, fail included.
        stage: what stands for it.
    """
    from PIL import Image

    try:
        image = cv2.resize(pixels_of_test_image("rgb"), _SIZE, interpolation=cv2.INTER_CUBIC)
        wanted, again, found = (_levels(run(Image.fromarray(image))) for run in (transform, transform, stage))
    except Exception as error:  # a user's code may raise anything
        return f"not measured: on a test picture it raises {reason_of(error, with_type=True)}"
    if wanted.shape != again.shape or (wanted != again).any():
        return "not measured: it draws random numbers"
    if wanted.shape != found.shape:
        sizes = " and ".join("x".join(map(str, image.shape)) for image in (wanted, found))
        return f"which gives another shape on a test picture: {sizes}"
    levels = np.abs(wanted - found)
    if not levels.any():
        return "0 levels apart on a test picture"
    return f"up to {levels.max():.0f} levels apart on a test picture, {levels.mean():.2f} on average"


def _levels(image: Any) -> Floats:
    """Return a PIL image, an array or a tensor [C, H, W] as levels [H, W, C]; floats are taken as 0 to 1."""
    import torch

    if isinstance(image, torch.Tensor):
        image = image.detach().permute(1, 2, 0) if image.ndim == 3 else image
        scale = 255 if image.is_floating_point() else 1
        return np.asarray(image.double().numpy() * scale)
    return np.asarray(image, np.float64)


_MOST_BYTES = 1 << 20


class Keys(BaseModel):
    """Names the keys of a file that a reader takes, with their types and their values where the file has none."""

    model_config = ConfigDict(strict=True, frozen=True, allow_inf_nan=False)


Model = TypeVar("Model", bound=Keys)


def of_length(rule: str, *lengths: int) -> AfterValidator:
    """Return the check that a list has one of these lengths. rule: what it must be."""

    def check(value: tuple[Any, ...]) -> tuple[Any, ...]:
        if len(value) not in lengths:
            raise ValueError(rule)
        return value

    return AfterValidator(check)


class Document:
    """Holds the mapping of a JSON or YAML file, and the lines of its values.

    Examples:
        >>> Path("config.json").write_text('{"size": 224}')
        13
        >>> read_document("config.json").error("must be above 300", "size", value=224)
        ConfigError('config.json:1: size must be above 300, got 224')
    """

    def __init__(self, path: str, data: Mapping[str, Any], lines: Lines) -> None:
        self.path, self.data, self._lines = path, data, lines

    def place(self, *at: Key) -> str:
        """Return `config.json:12:`, the place of the innermost value of which the line is known."""
        line = next((self._lines[at[:end]] for end in range(len(at), 0, -1) if at[:end] in self._lines), None)
        return f"{self.path}:{line}:" if line else f"{self.path}:"

    def unknown(
        self, at: tuple[Key, ...], found: Mapping[str, Any], known: Collection[str], owner: str
    ) -> Iterator[Problem]:
        """Yield a problem for each key that is not known. owner: whose keys these are."""
        for key in found:
            if key not in known:
                yield unknown_key(self.place(*at, key), (*at, key), found[key], known, owner)

    def error(self, rule: str, *at: Key, value: object = UNSET, action: str = "") -> ConfigError:
        """Return the error of a value that no reader can take. at: the keys that lead to it."""
        return source_error(self.place(*at), rule, value, action, at)

    def parsed(self, model: type[Model], given: Mapping[str, Any], *at: Key) -> Model:
        """Return keys as their model. at: the keys that lead to them.

        Raises:
            ConfigError: every value of another type.
        """
        values = {key: tuple(value) if isinstance(value, list) else value for key, value in given.items()}
        try:
            return model.model_validate(values)
        except ValidationError as error:
            faults = [(problem, (*at, *problem.path)) for problem in problems_of(error, model, values)]
            problems = [replace(one, place=self.place(*path), path=path, code="import.source") for one, path in faults]
            raise ConfigError(problems) from error

    def gap(self, rule: str, *at: Key, nearest: str, apart: str = "") -> Problem:
        """Return what `gap` does, at the value that these keys lead to."""
        return gap(self.place(*at), rule, nearest, apart, at)


def source_error(
    place: str,
    rule: str,
    value: object = UNSET,
    action: str = "",
    path: tuple[Key, ...] = (),
    code: Code = "import.source",
) -> ConfigError:
    """Return the error of a source that cannot be read, with the parts of its only problem.

    Examples:
        >>> source_error("x.toml:", "is not valid TOML", action="correct it")
        ConfigError('x.toml: is not valid TOML; correct it')
    """
    return ConfigError([Problem(place, rule, value, action, path, code)])


def unknown_key(place: str, path: tuple[Key, ...], value: object, known: Collection[str], owner: str) -> Problem:
    """Return the problem of a key that is not known. owner: whose key it is.

    Examples:
        >>> print(unknown_key("x.json:", ("siz",), 224, ["size"], "a processor"))
        x.json: siz is not a key of a processor that gpuflow knows, got 224; did you mean 'size'? ...
    """
    action = f"{suggest(path[-1], known, else_all=False)} it is left out with --partial".lstrip()
    return Problem(place, f"is not a key of {owner} that gpuflow knows", value, action, path, "import.unknown_key")


def read_document(path: str) -> Document:
    """Read a JSON or YAML file: YAML contains JSON.

    Raises:
        ConfigError: there is no such file, or it holds no mapping.
    """
    _check_size(path)
    try:
        return Document(path, *read_yaml(path, holds="keys"))
    except ConfigError:
        with suppress(OSError, ValueError, RecursionError):
            data = json.loads(Path(path).read_text(encoding="utf-8"))  # may be indented by tabs, as YAML may not
            if isinstance(data, dict):
                return Document(path, data, {})
        raise


def read_toml(path: str) -> dict[str, Any]:
    """Read a TOML file.

    Raises:
        ConfigError: there is no such file, or it is not valid.
    """
    _check_size(path)
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise source_error(f"{path}:", f"cannot be read as UTF-8 text: {error}", code="config.file") from error
    except tomllib.TOMLDecodeError as error:
        raise source_error(f"{path}:", f"is not valid TOML: {error}", code="config.file") from error


def _check_size(path: str) -> None:
    """Raise ConfigError if there is no such file, or if it is larger than any file of transforms."""
    if not Path(path).exists():
        siblings = [str(sibling) for sibling in Path(path).parent.glob(f"*{Path(path).suffix}")]
        action = suggest(path, siblings, else_all=False) or "check the path"
        raise source_error(f"{path}:", "no such file", action=action, code="config.file")
    if (size := Path(path).stat().st_size) > _MOST_BYTES:
        rule = f"must be a file of at most {_MOST_BYTES:,} bytes"
        raise source_error(f"{path}:", rule, size, "name the file of the transforms", code="config.file")


class MissingLibrary(GpuflowError, ImportError):
    """Says that a library whose transforms are imported, or compared with, is not installed."""


def needs(library: str, source: str) -> Any:
    """Import another library, and return its module. source: what needs it, as the user named it.

    Raises:
        MissingLibrary: it is not installed.

    Examples:
        >>> needs("absent_library", "timm:resnet50")
        Traceback (most recent call last):
        gpuflow.migration.imported.MissingLibrary: timm:resnet50: needs absent_library, ...
    """
    try:
        return importlib.import_module(library)
    except ImportError as error:
        package = library.partition(".")[0]
        raise MissingLibrary(
            f"{source}: needs {package}, which cannot be imported ({error}); pip install {package}"
        ) from error


def named_transform(name: str) -> Any:
    """Return the transform that `module:attribute` names, whose module's code runs, or that of weights without a colon.

    Raises:
        ConfigError: there is no such module, attribute or weights, or the module's code fails.
    """
    return _attribute(name) if ":" in name else _weights_transform(name)


def _attribute(name: str) -> Any:
    """Return the object that `module:attribute` names. The current directory is searched for modules, too."""
    module_name, _, path = name.partition(":")

    def error(rule: str, action: str = "") -> ConfigError:
        return source_error(f"{name}:", rule, action=action)

    if not module_name or not path:
        raise error("must be module:attribute", "name a transform at the top of a module, such as train:transform")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    found: Any
    try:
        found = importlib.import_module(module_name)
    except ModuleNotFoundError as cause:
        action = "run gpuflow in the directory of that file, or set PYTHONPATH"
        raise error(f"no module {cause.name!r} can be imported", action) from cause
    except SystemExit as cause:
        action = "put what the program does under if __name__ == '__main__'"
        raise error(f"the code of module {module_name!r} ends the program", action) from cause
    except Exception as cause:  # the module's code may raise anything
        raise error(f"the code of module {module_name!r} raises {type(cause).__name__}: {cause}") from cause
    for part in path.split("."):
        if not hasattr(found, part):
            known = [key for key in vars(found) if not key.startswith("_")] if hasattr(found, "__dict__") else []
            raise error(f"{module_name!r} has no attribute {part!r}", suggest(part, known, else_all=False))
        found = getattr(found, part)
    if not callable(found) or isinstance(found, type):
        raise error(
            f"must be a transform that can be called with an image, got {type(found).__name__}",
            "name an object such as a Compose",
        )
    return found


def _weights_transform(name: str) -> Any:
    """Return the transforms of torchvision's weights, such as `ResNet50_Weights.IMAGENET1K_V2`."""
    from torchvision import models

    enums = {enum.__name__: enum for enum in map(models.get_model_weights, models.list_models())}
    cls, _, member = name.partition(".")
    if member in (found := getattr(enums.get(cls), "__members__", {})):
        return found[member].transforms()
    action = suggest(name, [f"{cls}.{known}" for known in found] or enums, else_all=bool(found))
    action = action or "give module:attribute, or weights such as ResNet50_Weights.IMAGENET1K_V2"
    raise source_error(f"{name}:", "names no weights of torchvision", action=action)


PILLOW_13 = (
    "Pillow 13 resizes the columns of a tall image before its rows: with bicubic filters 3 to 16 levels apart at hard "
    "edges. CMYK files are up to 3 levels apart, because Pillow converts them by another formula."
)
IMAGENET_MEAN, IMAGENET_STD = IMAGENET["mean"], IMAGENET["std"]


@dataclass(frozen=True, slots=True)
class Entry:
    """Stands for an entry of a list of stages: the stage's key in YAML, its parameters, and a comment after it.

    Examples:
        >>> Entry("flip", {"horizontal": 0.5}).as_yaml
        {'flip': {'horizontal': 0.5}}
    """

    stage: str
    parameters: Mapping[str, Any]
    comment: str = ""

    @property
    def as_yaml(self) -> dict[str, Any]:
        """Return the entry as `make_stage` takes it."""
        return {self.stage: dict(self.parameters)}


def entry_of(stage: str, comment: str = "", /, **parameters: Any) -> Entry:
    """Return an entry without the parameters that are None.

    Examples:
        >>> entry_of("flip", horizontal=0.5, vertical=None).as_yaml
        {'flip': {'horizontal': 0.5}}
    """
    return Entry(stage, {key: value for key, value in parameters.items() if value is not None}, comment)


@dataclass(frozen=True, kw_only=True, slots=True)
class PresetEntry:
    """Stands for torchpipe's own operators, which decode and resize: the keys of a preset."""

    preset: str
    height: int
    width: int
    color: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Imported:
    """Holds what a reader found.

    source: what was imported, as the user named it. matches: sentences that say which behaviour the stages have.
    pipelines: the entries of `train`, of `val`, or of both. gaps: what no stage equals, with the nearest stage, which
    is among the entries if its parameters are known. preset: of all pipelines. model: the keys of `serve.model`.
    batch_size: samples of a batch of each pipeline. seed: the source's.
    """

    source: str
    matches: tuple[str, ...]
    pipelines: Mapping[Literal["train", "val"], Sequence[Entry]]
    gaps: tuple[Problem, ...] = ()
    preset: PresetEntry | None = None
    model: Mapping[str, Any] | None = None
    batch_size: int = 64
    seed: int = 0


State = TypeVar("State")


@dataclass(frozen=True, kw_only=True, slots=True)
class Step(Generic[State]):
    """Holds what a transform becomes: the value that readers of chains of transforms fold.

    state: what is known of the image after it. entries: stages of levels. floats: what comes after those, from the
    entry on that makes floats. gaps: what no stage equals. notes: sentences on how the stages differ from it.
    """

    state: State
    entries: tuple[Entry, ...] = ()
    floats: tuple[Entry, ...] = ()
    gaps: tuple[Problem, ...] = ()
    notes: tuple[str, ...] = ()

    def behind(self, *gaps: Problem) -> Step[State]:
        """Return this step with gaps before its own."""
        return replace(self, gaps=(*gaps, *self.gaps))

    def then(self, after: Step[State]) -> Step[State]:
        """Return this step and the one that was read from its state, as one."""
        joined = {key: getattr(self, key) + getattr(after, key) for key in ("entries", "floats", "gaps", "notes")}
        return replace(after, **joined)


def gap(place: str, rule: str, nearest: str, apart: str = "", path: tuple[Key, ...] = ()) -> Problem:
    """Return the problem of something that no stage equals.

    Args:
        place: where it stands.
        rule: what it is, and why no stage equals it.
        nearest: the nearest stage, or what to do in its place.
        apart: how far that is from it.
        path: the keys that lead to it in its file.
    """
    action = f"nearest: {nearest}{f' ({apart})' if apart else ''}"
    return Problem(place, rule, action=action, path=path, code="import.stage")


PILLOW_FILTERS = ("nearest", "lanczos", "bilinear", "bicubic", "box", "hamming")
"""Pillow's filters, by their numbers."""
FILTERS = ("bilinear", "bicubic")
"""Those that the stage `resize` has, too."""


def filter_keys(name: str, *, antialias: bool = True) -> dict[str, Any]:
    """Return the keys of `resize` for a filter, without defaults; of the most similar filter if it has none such.

    Examples:
        >>> filter_keys("lanczos"), filter_keys("bilinear", antialias=False)
        ({'interpolation': 'bicubic'}, {'antialias': False})
    """
    keys = {"interpolation": "bicubic"} if name in ("bicubic", "lanczos") else {}
    return keys if antialias else {**keys, "antialias": False}


def decode(**parameters: Any) -> Entry:
    """Return the first stage of all that is imported. parameters: besides its color."""
    return entry_of("decode", color="rgb", **parameters)


def normalize(
    mean: Sequence[float] = (0, 0, 0), std: Sequence[float] = (1, 1, 1), *, dtype: str = "float32", named: bool = True
) -> Entry:
    """Return the stage that scales pixels to 0-1 and normalizes them.

    named: write `imagenet` where the numbers are those of ImageNet, which is right for RGB.

    Examples:
        >>> normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)).as_yaml
        {'normalize': {'mean': 'imagenet', 'std': 'imagenet'}}
    """
    given = {"mean": numbers(mean), "std": numbers(std)}
    written = {key: "imagenet" if named and tuple(one) == IMAGENET[key] else one for key, one in given.items()}
    return entry_of("normalize", **written, dtype=None if dtype == "float32" else dtype)


def each_channel(numbers: Sequence[float], *, gray: bool) -> tuple[float, ...]:
    """Return a number for each channel, three or one; the libraries repeat a single one. gray: there is one channel.

    Examples:
        >>> each_channel([0.5], gray=False), each_channel([0.5], gray=True)
        ((0.5, 0.5, 0.5), (0.5,))
    """
    return (*numbers,) * (3 if len(numbers) == 1 and not gray else 1)


def size_of(sides: float | Sequence[float]) -> int | list[int]:
    """Return a size as YAML has it: one number for a square, else [height, width].

    Examples:
        >>> size_of(224), size_of((224, 224)), size_of((224, 320))
        (224, 224, [224, 320])
    """
    given = [int(side) for side in (sides if isinstance(sides, Sequence) else [sides])]
    height, width = given if len(given) == 2 else given * 2
    return height if height == width else [height, width]


def numbers(values: Any) -> list[float | int]:
    """Return numbers, or a single one, as a list of numbers as people write them.

    Examples:
        >>> numbers(0.5), numbers((1.0, 1 / 3))
        ([0.5], [1, 0.3333333333])
    """
    return [number(value) for value in np.ravel(values)]


def span(values: Any) -> Any:
    """Return a range as YAML has it: one number for a range around zero, else [low, high].

    Examples:
        >>> span((-10, 10)), span((-5, 20))
        (10, [-5, 20])
    """
    low, high = numbers(values)
    return high if low == -high else [low, high]


def number(value: float) -> float | int:
    """Return a number as people write it: a float32 in as few digits as it needs, others without the last digits.

    Examples:
        >>> number(224.0), number(np.float32(0.1)), number(0.1 + 0.2)
        (224, 0.1, 0.3)
    """
    exact = float(value)
    single = np.float32(exact)
    short = float(str(single)) if float(single) == exact else float(f"{exact:.10g}")
    return int(short) if short.is_integer() else short
