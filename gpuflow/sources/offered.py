"""Sources of other packages: entry points of the group `gpuflow.sources`, each a key of the block `source`.

The entry point names a callable `open(value, spec)` that returns a `Source`. value: what the YAML file gives under the
key, as YAML gives it: text, a number, a list or a mapping. spec: the whole block; `classes` and `fields` are the
source's to obey, while gpuflow divides it by `split` and `seed`.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
from collections.abc import Mapping

from gpuflow.errors import GpuflowError, SourceError
from gpuflow.runtime.entry_points import entry_points
from gpuflow.sources.base import Source, SourceSpec

__all__ = ["offered_sources", "open_offered"]

_MEMBERS = ("__len__", "classes", "labels", "shard_sizes", "storage", "on", "path", "read", "close")


def offered_sources() -> dict[str, importlib.metadata.EntryPoint]:
    """What other packages offer, by the key in YAML. Nothing is imported.

    Raises:
        GpuflowError: two packages offer a source of the same name, or one offers a key that gpuflow has.
    """
    known = {field.name for field in dataclasses.fields(SourceSpec)}
    found: dict[str, importlib.metadata.EntryPoint] = {}
    for entry in entry_points("gpuflow.sources"):
        if entry.name in known or entry.name in found:
            raise GpuflowError(
                f"source {entry.name!r} of {entry.value} is already known; rename it or uninstall its package"
            )
        found[entry.name] = entry
    return found


def open_offered(spec: SourceSpec, offered: Mapping[str, importlib.metadata.EntryPoint] | None = None) -> Source:
    """Open the source of another package that a spec names. offered: what there is; by default what is installed.

    Raises SourceError: it is not installed, cannot be imported or opened, or is no source.
    """
    entries = offered_sources() if offered is None else offered
    [(name, value)] = dict(spec.other).items()
    if name not in entries:
        raise SourceError(f"source.{name}: no installed package offers it; install the one that does")
    entry = entries[name]
    try:
        source = entry.load()(value, spec)
    except (ImportError, AttributeError) as error:
        raise SourceError(f"source.{name}: {entry.value} cannot be used: {error}; repair its package") from error
    except OSError as error:
        raise SourceError(f"source.{name}: {error}; check the path") from error
    if missing := [member for member in _MEMBERS if not hasattr(source, member)]:
        raise SourceError(
            f"source.{name}: {entry.value} must return a source, and its result has no {', '.join(missing)}; "
            "repair its package"
        )
    opened: Source = source
    return opened
