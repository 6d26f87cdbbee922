"""Applies overrides to a file's data: `run.threads=8`, `pipelines.train.stages.resize.shorter=160`.

An override changes a value everywhere that YAML's anchors share it, so that val and serve stay equal. `preprocess` only
holds shared lists: an override there that changes no pipeline is an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gpuflow.config.yaml_file import parse_value
from gpuflow.errors import ConfigError, Key, Problem, show, suggest


class Overrides:
    """Changes the data of a file in place, and remembers which override set which value.

    Args:
        data: what the file holds.
    """

    def __init__(self, data: dict[str, Any]) -> None:
        self._data = data
        self._set: list[tuple[Any, Key, str]] = []
        """(container, key, override). Anchors share containers, so an override may show in several places."""

    def apply(self, override: str) -> None:
        """Apply one `key.key=value`. Raises ConfigError, without a place, where it leads nowhere or is no YAML."""
        keys, equals, text = override.partition("=")
        if not equals or not keys.strip():
            rule = "must be of the form key.key=value, such as run.threads=8"
            raise ConfigError([Problem.of((), rule, code="config.override")])
        value = parse_value(text)
        at: list[Any] = []
        holder: Any = None
        target: Any = self._data
        for word in keys.strip().split("."):
            if target is None:
                target = holder[at[-1]] = {}
                self._set.append((holder, at[-1], override))
            if isinstance(holder, list) and target == word:
                target = holder[at[-1]] = {word: None}
            found = _enter(target, word)
            if isinstance(found, Problem):
                raise ConfigError([found.below(*at)])
            for key in found:
                at.append(key)
                holder, target = target, target.get(key) if isinstance(target, dict) else target[key]
        if at[0] == "preprocess" and not self._is_used(holder):
            rule = "cannot be overridden here: what has it by an anchor keeps the file's value"
            action = "override pipelines.NAME.stages and serve.stages"
            raise ConfigError([Problem.of(tuple(at), rule, action=action, code="config.override")])
        holder[at[-1]] = value
        self._set.append((holder, at[-1], override))

    def _is_used(self, container: Any) -> bool:
        """Whether a mapping or list stands outside `preprocess`, by an anchor."""
        waiting = [value for key, value in self._data.items() if key != "preprocess"]
        seen: set[int] = set()
        while waiting:
            value = waiting.pop()
            if value is container:
                return True
            if isinstance(value, (dict, list)) and id(value) not in seen:
                seen.add(id(value))
                waiting += value.values() if isinstance(value, dict) else value
        return False

    def at(self, path: Sequence[Key]) -> str | None:
        """The override that set the value at a path, or one that it lies in."""
        found = None
        value: Any = self._data
        for key in path:
            found = next((text for held, k, text in reversed(self._set) if held is value and k == key), found)
            inside = key in value if isinstance(value, dict) else isinstance(value, list) and isinstance(key, int)
            if not inside:
                break
            value = value[key]
        return found


def _enter(target: Any, word: str) -> list[Key] | Problem:
    """The keys that lead from `target` to what a word of a dotted path means, or what is wrong with it.

    A stage that stands in a list as its name alone is given a mapping to hold parameters.
    """

    def problem(rule: str, action: str = "") -> Problem:
        return Problem.of((), rule, action=action, code="config.override")

    if isinstance(target, dict):
        return [word]
    if not isinstance(target, list):
        return problem(f"is {show(target)}, neither a mapping nor a list, and has no {word!r}")
    if word.isdecimal():
        entries = f"its entries are 0 to {len(target) - 1}" if target else "it is empty"
        return [int(word)] if int(word) < len(target) else problem(f"has no entry {word}", entries)
    if word in target:
        target[target.index(word)] = {word: None}
    names = [str(name) for entry in target for name in (entry if isinstance(entry, dict) else [entry])]
    if word not in names:
        return problem(f"has no {word!r}", suggest(word, names) if names else "it is empty")
    return [next(i for i, entry in enumerate(target) if isinstance(entry, dict) and word in entry), word]
