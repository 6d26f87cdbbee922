"""Finds all stages: gpuflow's own and those of other packages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpuflow.errors import GpuflowError, reason_of
from gpuflow.version import entry_points

if TYPE_CHECKING:
    from gpuflow.pipeline.stage import Stage


def stage_table() -> dict[str, type[Stage]]:
    """Return the vocabulary: gpuflow's own stages, then what other packages offer as entry points `gpuflow.stages`.

    Raises:
        GpuflowError: two packages offer a stage of the same name, or one cannot be imported.

    Examples:
        >>> stage_table()["resize"](shorter=256)
        resize(shorter=256)
    """
    from gpuflow.stages import STAGES

    table = dict(STAGES)
    for entry in entry_points("gpuflow.stages"):
        if entry.name in table:
            raise GpuflowError(
                f"stage {entry.name!r} of {entry.value} is already known; rename it or uninstall its package"
            )
        try:
            table[entry.name] = entry.load()
        except Exception as error:  # of another package's code, which may raise any
            package = repr(entry.dist.name) if entry.dist else "that offers it"
            raise GpuflowError(
                f"stage {entry.name!r} of {entry.value} cannot be imported: {reason_of(error, with_type=True)}; "
                f"repair or uninstall the package {package}"
            ) from error
    return table
