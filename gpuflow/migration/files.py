"""Files of other libraries, JSON, YAML and TOML, whose faults are located."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from gpuflow.config.yaml_file import Lines, read_yaml
from gpuflow.errors import UNSET, ConfigError, Key, Problem, suggest

__all__ = ["Document", "read_document", "read_toml"]

_MOST_BYTES = 1 << 20


class Document:
    """The mapping that a JSON or YAML file holds, and where its values stand."""

    def __init__(self, path: str, data: Mapping[str, Any], lines: Lines) -> None:
        self.path, self.data, self._lines = path, data, lines

    def place(self, *at: Key) -> str:
        """`config.json:12:`, of the innermost value of which the line is known."""
        line = next((self._lines[at[:end]] for end in range(len(at), 0, -1) if at[:end] in self._lines), None)
        return f"{self.path}:{line}:" if line else f"{self.path}:"

    def unknown(
        self, at: tuple[Key, ...], found: Mapping[str, Any], known: Iterable[str], owner: str
    ) -> Iterator[Problem]:
        """A problem for each key that is not known. owner: whose keys these are."""
        known = sorted(known)
        for key in found:
            if key not in known:
                close = suggest(key, known, else_all=False)
                action = f"{close} it is left out with --partial".lstrip() if close else "it is left out with --partial"
                rule = f"is not a key of {owner} that gpuflow knows"
                yield Problem(self.place(*at, key), rule, found[key], action, (*at, key), "import.unknown_key")

    def error(self, rule: str, *at: Key, value: object = UNSET, action: str = "") -> ConfigError:
        return ConfigError([Problem(self.place(*at), rule, value, action, at, "import.source")])


def read_document(path: str) -> Document:
    """Read a JSON or YAML file: YAML contains JSON.

    Raises:
        ConfigError: there is no such file, or it holds no mapping.
    """
    _check_size(path)
    try:
        return Document(path, *read_yaml(path, holds="keys"))
    except ConfigError:
        data = _json_of(path)  # which may be indented by tabs, as YAML may not
        if data is None:
            raise
        return Document(path, data, {})


def _json_of(path: str) -> dict[str, Any] | None:
    """The mapping that a file holds as JSON; None if it holds none."""
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return data if isinstance(data, dict) else None


def read_toml(path: str) -> dict[str, Any]:
    """Read a TOML file.

    Raises:
        ConfigError: there is no such file, or it is not valid.
    """
    _check_size(path)
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        problem = Problem(f"{path}:", f"cannot be read as UTF-8 text: {error}", code="config.file")
        raise ConfigError([problem]) from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError([Problem(f"{path}:", f"is not valid TOML: {error}", code="config.file")]) from error


def _check_size(path: str) -> None:
    """Raise ConfigError if there is no such file, or if it is larger than any file of transforms."""
    if not Path(path).exists():
        raise _no_file(path)
    if (size := Path(path).stat().st_size) > _MOST_BYTES:
        rule = f"must be a file of at most {_MOST_BYTES:,} bytes"
        raise ConfigError([Problem(f"{path}:", rule, size, "name the file of the transforms", code="config.file")])


def _no_file(path: str) -> ConfigError:
    """The error of a missing file, with one of its folder that has a similar name, if there is one."""
    siblings = [str(sibling) for sibling in Path(path).parent.glob(f"*{Path(path).suffix}")]
    action = suggest(path, siblings, else_all=False) or "check the path"
    return ConfigError([Problem(f"{path}:", "no such file", action=action, code="config.file")])
