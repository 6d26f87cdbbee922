"""Objects of Python that a user names: `module:attribute`, which runs the module's code, and torchvision's weights."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

from gpuflow.errors import ConfigError, GpuflowError, Problem, suggest

__all__ = ["MissingLibrary", "named_transform", "needs"]


class MissingLibrary(GpuflowError, ImportError):
    """A library whose transforms are imported, or compared with, is not installed."""


def needs(library: str, source: str) -> Any:
    """Import another library.

    Raises:
        MissingLibrary: it is not installed.
    """
    try:
        return importlib.import_module(library)
    except ImportError as error:
        package = library.partition(".")[0]
        raise MissingLibrary(
            f"{source}: needs {package}, which cannot be imported ({error}); pip install {package}"
        ) from error


def named_transform(name: str) -> Any:
    """The transform that `module:attribute` names, whose module's code runs, or that of weights without a colon.

    Raises:
        ConfigError: there is no such module, attribute or weights, or the module's code fails.
    """
    return _attribute(name) if ":" in name else _weights_transform(name)


def _attribute(name: str) -> Any:
    """Modules are looked for in the current directory, too."""
    module_name, _, path = name.partition(":")

    def error(rule: str, action: str = "") -> ConfigError:
        return ConfigError([Problem(f"{name}:", rule, action=action, code="import.source")])

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
    """The transforms of torchvision's weights, such as `ResNet50_Weights.IMAGENET1K_V2`."""
    from torchvision import models

    enums = {enum.__name__: enum for enum in map(models.get_model_weights, models.list_models())}
    cls, _, member = name.partition(".")
    if member in (found := getattr(enums.get(cls), "__members__", {})):
        return found[member].transforms()
    action = suggest(name, [f"{cls}.{known}" for known in found] or enums, else_all=bool(found))
    action = action or "give module:attribute, or weights such as ResNet50_Weights.IMAGENET1K_V2"
    raise ConfigError([Problem(f"{name}:", "names no weights of torchvision", action=action, code="import.source")])
