"""Keys that several kinds of sources have, each with its rules: a kind's spec inherits those that it uses."""

from __future__ import annotations

import random
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from gpuflow.errors import Problem, SourceError, redacted
from gpuflow.pipeline.bounds import Bounds, out_of_bounds
from gpuflow.sources.base import Extent, NotMeasuredError, Samples, Source, SourceSpec, is_read_remotely
from gpuflow.sources.files import FileSource
from gpuflow.sources.storage import CacheSpec, is_remote


@dataclass(frozen=True, kw_only=True)
class Named(Samples):
    """Samples whose classes may be named.

    Args:
        classes: how many classes there are, or their names; by default as many as occur.
    """

    classes: Annotated[int, Bounds(least=1, limit=10_000_000)] | tuple[str, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class WithSplits(SourceSpec):
    """A source with splits that have names.

    Args:
        splits: the names of the dataset's own splits that are the named parts. Those of a folder are directories in it,
            each with directories of the classes.
    """

    splits: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class WithWindow(SourceSpec):
    """A source in which neighbouring samples may be cheaper to read together.

    Args:
        window: how many neighbouring samples are shuffled among each other; by default 8192, and of Parquet files as
            many as take 256 MB, at most 8192.
    """

    window: Annotated[int, Bounds(least=1)] | None = None

    def shard_window(self, source: Source | None = None) -> int:
        return super().shard_window(source) if self.window is None else self.window

    def check_window(self, source: Source) -> None:
        """Raise SourceError, and close the source, if there is a window and neighbours are not read together."""
        if self.window is not None and source.shard_sizes is None:
            source.close()
            raise SourceError(
                f"source.window must go with shards or Parquet files, got {self.where!r}, where any sample is as cheap "
                "to read as its neighbour; remove window"
            )


@dataclass(frozen=True, kw_only=True)
class WithExtensions(SourceSpec):
    """A source whose images are known by their extensions.

    Args:
        extensions: names of files that are images, too, such as heic; see `decode.formats`.
    """

    extensions: tuple[str, ...] = ()

    def problems(self) -> Iterator[Problem]:
        yield from super().problems()
        if wrong := [name for name in self.extensions if not (name.isalnum() and name.islower())]:
            rule = "must be file extensions in lower case without a dot, such as heic"
            yield Problem.of("extensions", rule, wrong[0], code="config.range")


@dataclass(frozen=True, kw_only=True)
class Cached(SourceSpec):
    """A source whose files may be behind URLs.

    Args:
        cache: where files behind URLs are kept on a local disk; by default they are not.
    """

    lists_urls: ClassVar[bool] = False
    """Whether a file may list URLs of images, so that it shows only when the source is open where they are."""

    cache: CacheSpec | None = None

    def __post_init__(self) -> None:
        cache: Any = self.cache
        if isinstance(cache, Mapping):
            object.__setattr__(self, "cache", CacheSpec(**cache))
        super().__post_init__()

    def problems(self) -> Iterator[Problem]:
        yield from super().problems()
        if self.cache is not None:
            yield from (problem.below("cache") for problem in out_of_bounds(self.cache))
            if not self.lists_urls and not is_remote(self.folder_of_images):
                rule = f"must go with URLs, got {self.folder_of_images!r}, whose files are not copied"
                yield Problem.of("cache", rule, action="remove cache", code="config.conflict")


@dataclass(frozen=True, kw_only=True)
class Listed(Cached):
    """A source whose images are the files that one file lists, which may be URLs."""

    lists_urls = True

    @abstractmethod
    def index(self) -> FileSource:
        """Index the source. Raises SourceError."""

    def open(self) -> FileSource:
        source = self.index()
        if self.cache is not None and not any(storage.remote for storage in source.storages):
            source.close()
            raise SourceError(
                f"source.cache must go with URLs, got {self.where!r}, which lists local files, and these are not "
                "copied; remove cache"
            )
        return source

    def find_images(self, limit: int, deadline: float, chance: random.Random) -> list[Extent]:
        source = self.open()
        try:
            if is_read_remotely(source):
                raise NotMeasuredError(f"{redacted(self.where)} lists files behind URLs")
            return [Extent(source.path(i)) for i in chance.sample(range(len(source)), min(limit, len(source)))]
        finally:
            source.close()
