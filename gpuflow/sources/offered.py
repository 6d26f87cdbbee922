"""Sources of other packages: entry points of the group `gpuflow.sources`, each a key of the block `source`.

The entry point names a callable `open(value, spec)` that returns a `Source`. value: what the YAML file gives under the
key, as YAML gives it: text, a number, a list or a mapping. spec: the whole block; `classes` and `fields` are the
source's to obey, while gpuflow divides it by `split` and `seed`.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, ClassVar

from gpuflow.errors import GpuflowError, SourceError
from gpuflow.sources.base import Source
from gpuflow.sources.spec import Named, WithWindow
from gpuflow.version import entry_points

_MEMBERS = ("__len__", "classes", "labels", "shard_sizes", "storage", "path", "read", "close")


@dataclass(frozen=True, kw_only=True)
class Offered(WithWindow, Named):
    """A source of another package. `offered_kinds` makes a subclass for each, with its key."""

    entry: ClassVar[importlib.metadata.EntryPoint]
    is_path = False
    has_other_fields = True

    @property
    def where(self) -> str:
        return f"{self.kind}: {getattr(self, self.kind)}"

    def open(self) -> Source:
        try:
            source = self.entry.load()(getattr(self, self.kind), self)
        except (ImportError, AttributeError) as error:
            fault = f"{self.entry.value} cannot be used: {error}; repair its package"
            raise SourceError(f"source.{self.kind}: {fault}") from error
        except OSError as error:
            raise SourceError(f"source.{self.kind}: {error}; check the path") from error
        if missing := [member for member in _MEMBERS if not hasattr(source, member)]:
            raise SourceError(
                f"source.{self.kind}: {self.entry.value} must return a source, and its result has no "
                f"{', '.join(missing)}; repair its package"
            )
        opened: Source = source
        self.check_window(opened)
        return opened


def offered_kinds(known: Collection[str]) -> dict[str, type[Offered]]:
    """Return what other packages offer, by the key in YAML. Nothing is imported. known: the keys that gpuflow has.

    Raises:
        GpuflowError: two packages offer a source of the same name, or one offers a key that gpuflow has.
    """
    kinds: dict[str, type[Offered]] = {}
    for entry in entry_points("gpuflow.sources"):
        if entry.name in known or entry.name in kinds:
            raise GpuflowError(
                f"source {entry.name!r} of {entry.value} is already known; rename it or uninstall its package"
            )
        kinds[entry.name] = _kind_of(entry)
    return kinds


@functools.cache
def _kind_of(entry: importlib.metadata.EntryPoint) -> type[Offered]:
    text = f"A source of another package: {entry.value}."
    members = {"kind": entry.name, "entry": entry, "__doc__": f"{text}\n\nArgs:\n    {entry.name}: {text}\n"}
    return dataclasses.make_dataclass(
        "Offered", [(entry.name, Any)], bases=(Offered,), namespace=members, frozen=True, kw_only=True
    )
