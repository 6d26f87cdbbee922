"""Compares which files training and serving accept, by the formats and limits of their stages `decode`."""

from __future__ import annotations

from gpuflow.config import Config

__all__ = ["compare_accepted"]

_LIMITS = ("max_pixels", "max_scans")


def compare_accepted(config: Config, name: str) -> tuple[list[str], list[str]]:
    """Compare the pipeline's stage `decode` with that of serving: few images are of such a format or near a limit.

    Returns:
        faults: files that training accepts and serving refuses. notes: files that serving alone accepts.
    """
    faults: list[str] = []
    notes: list[str] = []
    if config.serve is None:
        return faults, notes
    trained, served = config.programs[name].decoder, config.programs["serve"].decoder
    if trained.library is not None or served.library is not None:  # such as a preset, which takes no notice of formats
        return faults, notes
    place, reason = f"{config.path}: serve.stages[0].decode", "else serving refuses files that training accepts"
    if missing := ", ".join(form for form in trained.formats if form not in served.formats):
        rule = f"{place}.formats must name {missing} as {name} does, {reason}, got {list(served.formats)}"
        faults.append(f"{rule}; add what is missing, or remove it from {name}")
    if more := ", ".join(form for form in served.formats if form not in trained.formats):
        notes.append(f"serving alone accepts files of decode.formats: {more}")
    for field in _LIMITS:
        most, least = getattr(served, field), getattr(trained, field)
        if most < least:
            rule = f"{place}.{field} must be at least {least} as in {name}, {reason}, got {most}"
            faults.append(f"{rule}; raise it, or lower that of {name}")
        elif most > least:
            notes.append(f"serving alone accepts files above decode.{field} of {name}: {most} in place of {least}")
    return faults, notes
