"""YAML text to data with line numbers, loaded safely, so no tag can run anything; and back. Nothing else imports yaml.

Overrides such as `run.threads=8` or `pipelines.train.stages.resize.shorter=160` change the data. An override changes a
value everywhere that YAML's anchors share it, so that val and serve stay equal. `preprocess` only holds shared lists:
an override there that changes no pipeline is an error.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import yaml

from gpuflow.errors import UNSET, Code, ConfigError, Key, Problem, show, suggest

Lines = dict[tuple[Key, ...], int]
"""The line of each value, by its path; a key's line for a value in a mapping."""

_MAX_ALIASED = 100_000
_MAX_KEYS = 10_000
"""Of all mappings of a file. A file of many more keys takes seconds to parse, and nobody has written it by hand."""
_CYCLE = "is nested too deeply, or an alias stands inside what it names"


def _yaml_files(folder: Path) -> list[str]:
    """List the YAML files of a folder that an error may suggest: hidden ones belong to other tools."""
    return [str(file) for file in sorted(folder.glob("*.yaml")) if not file.name.startswith(".")]


def read_yaml(path: str, *, holds: str = "source and pipelines") -> tuple[dict[str, Any], Lines]:
    """Read the mapping that a file holds, and the lines of its values. holds: its keys, for the error if it is none.

    Raises:
        ConfigError: there is no such file, or it is not valid YAML, or holds no mapping.

    Examples:
        >>> _ = Path("val.yaml").write_text("run:\\n  threads: 8\\n")
        >>> data, lines = read_yaml("val.yaml")
        >>> data, lines["run", "threads"]
        ({'run': {'threads': 8}}, 2)
    """

    def error(
        rule: str, value: object = UNSET, action: str = "", *, line: int | None = None, code: Code = "config.file"
    ) -> ConfigError:
        place = f"{path}:" if line is None else f"{path}:{line}:"
        return ConfigError([Problem(place, rule, value, action, code=code, line=line)])

    text = ""
    try:
        text = Path(path).read_text(encoding="utf-8")
        loader = _Loader(text)
        node = loader.get_single_node()
        data = loader.construct_document(node) if node is not None else None
        lines = dict(_lines(loader, node))
    except FileNotFoundError:
        siblings = _yaml_files(Path(path).parent)
        action = suggest(path, siblings) if siblings else "give the path of a YAML file"
        raise error("no such file", action=action) from None
    except IsADirectoryError:
        files = _yaml_files(Path(path))
        action = f"name a file in it, such as {files[0]}" if files else "give the path of a YAML file"
        raise error("is a directory", action=action) from None
    except OSError as cause:
        raise error(f"cannot be read: {cause.strerror}") from cause
    except UnicodeDecodeError as cause:
        raise error(f"is not UTF-8 text: {cause}", action="save it as UTF-8") from cause
    except yaml.MarkedYAMLError as cause:
        line = cause.problem_mark.line + 1 if cause.problem_mark else None
        raise error(
            f"is not valid YAML: {cause.problem}", action=_advice(cause), line=line, code="config.yaml"
        ) from cause
    except yaml.reader.ReaderError as cause:
        line = text.count(chr(10), 0, cause.position) + 1
        rule = f"is not valid YAML: it has the control character U+{cause.character:04X}"
        raise error(rule, action="remove it", line=line, code="config.yaml") from cause
    except RecursionError:
        raise error(_CYCLE, code="config.yaml") from None
    except (yaml.YAMLError, ValueError) as cause:
        raise error(f"is not valid YAML: {cause}", code="config.yaml") from cause
    if node is None:
        raise error(f"is empty; write a mapping with {holds}", code="config.type")
    if not isinstance(data, dict):
        raise error(f"must be a mapping with {holds}", data, code="config.type")
    return data, lines


def _advice(fault: yaml.MarkedYAMLError) -> str:
    """Suggest what to do about the usual mistakes; return an empty text for others."""
    problem = str(fault.problem)
    begun = f"line {fault.context_mark.line + 1}" if fault.context_mark else "a line above"
    if r"'\t'" in problem:
        return "indent by spaces, not by tabs"
    if problem.startswith("expected <block end>"):
        return f"indent it as its neighbours in the block that begins on {begun}"
    if problem.startswith("expected ',' or"):
        return f"close the bracket that opens on {begun}"
    if problem.startswith("mapping values"):
        return "begin a new line for the second key, or put the text in quotes"
    return ""


def parse_value(text: str) -> Any:
    """Parse the value of an override. Raises ConfigError, without a place, where it is not valid YAML.

    Examples:
        >>> parse_value("[1e-3, true, auto]")
        [0.001, True, 'auto']
    """
    try:
        return yaml.load(text, _Loader) if text else ""
    except (yaml.YAMLError, ValueError) as cause:
        rule = f"the value is not valid YAML: {getattr(cause, 'problem', None) or cause}"
        raise ConfigError([Problem.of((), rule, code="config.yaml")]) from cause
    except RecursionError:
        raise ConfigError([Problem.of((), f"the value {_CYCLE}", code="config.yaml")]) from None


def in_one_line(value: Any) -> str:
    """Return a value on one line of YAML.

    Examples:
        >>> in_one_line({"size": [224, 224], "mean": "imagenet"})
        '{size: [224, 224], mean: imagenet}'
    """
    plain = json.loads(json.dumps(value))  # without lists that two keys share, which YAML would name
    text: str = yaml.safe_dump(plain, default_flow_style=True, sort_keys=False, width=math.inf, allow_unicode=True)
    return text.removesuffix("...\n").strip()


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """Safe YAML in which 1e-3 is a number, a key that stands twice is an error, and aliases add a limited size.

    Numbers that YAML 1.1 reads in base 8 or 60, such as 010 and 1:30, are errors: few people expect 8 and 90.
    """

    _keys = 0

    def compose_node(self, parent: yaml.Node | None, index: object) -> yaml.Node | None:
        if isinstance(parent, yaml.MappingNode) and index is None:
            self._keys += 1
            if self._keys > _MAX_KEYS:
                raise yaml.MarkedYAMLError(
                    problem=f"it has more than {_MAX_KEYS:,} keys; write fewer, or long lists",
                    problem_mark=self.peek_event().start_mark,
                )
        return super().compose_node(parent, index)

    def get_single_node(self) -> yaml.Node | None:
        node = super().get_single_node()
        if node is not None:
            _refuse_alias_bomb(node)
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except ValueError as cause:  # such as a date without such a day, or a number of 5,000 digits
            raise yaml.MarkedYAMLError(
                problem=f"{cause}; put it in quotes if it is text", problem_mark=node.start_mark
            ) from cause
        except (LookupError, TypeError, AttributeError) as cause:  # PyYAML expects that a tag fits
            tag = node.tag.rpartition(":")[2]
            raise yaml.MarkedYAMLError(
                problem=f"the tag !!{tag} does not fit its value; remove the tag", problem_mark=node.start_mark
            ) from cause

    def compose_mapping_node(self, anchor: str | None) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen: dict[tuple[str, str], yaml.Mark] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == "tag:yaml.org,2002:merge":
                continue
            if (first := seen.setdefault((key.tag, key.value), key.start_mark)) is not key.start_mark:
                raise yaml.MarkedYAMLError(
                    problem=f"key {key.value!r} stands twice, first on line {first.line + 1}; keep one",
                    problem_mark=key.start_mark,
                )
        return node


def _number(loader: _Loader, node: yaml.ScalarNode) -> int | float:
    text = node.value
    kind = node.tag.rpartition(":")[2]
    if ":" in text or (kind == "int" and _OCTAL.match(text)):
        base = 60 if ":" in text else 8
        raise ValueError(f"{show(text)} is a number in base {base} in YAML; write a decimal number")
    number: int | float = getattr(yaml.SafeLoader, f"construct_yaml_{kind}")(loader, node)
    return number


_OCTAL = re.compile(r"[-+]?0[0-9_]")
for _kind in ("int", "float"):
    _Loader.add_constructor(f"tag:yaml.org,2002:{_kind}", _number)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:[0-9][0-9_]*)(?:\.[0-9_]*)?[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)


def _refuse_alias_bomb(root: yaml.Node) -> None:
    """Raise MarkedYAMLError if aliases make a document of more than `_MAX_ALIASED` values out of the written ones.

    Each written node is visited once. The checks that follow visit a value once for each alias that leads to it.

    Raises:
        RecursionError: an alias stands inside what it names.
    """
    sizes: dict[int, int] = {}

    def size_of(node: yaml.Node) -> int:
        if (known := sizes.get(id(node))) is not None:
            return known
        children: Iterable[yaml.Node] = node.value if isinstance(node, yaml.SequenceNode) else ()
        if isinstance(node, yaml.MappingNode):
            children = chain.from_iterable(node.value)
        size = 1 + sum(map(size_of, children))
        sizes[id(node)] = size
        if size - len(sizes) > _MAX_ALIASED:
            raise yaml.MarkedYAMLError(
                problem=f"its aliases stand for more than {_MAX_ALIASED:,} values; write out what is needed",
                problem_mark=node.start_mark,
            )
        return size

    size_of(root)


def _lines(loader: _Loader, node: yaml.Node | None, at: tuple[Key, ...] = ()) -> Iterator[tuple[tuple[Key, ...], int]]:
    """Yield (path, line) of every value in a YAML tree; a key's line for a value in a mapping."""
    if isinstance(node, yaml.MappingNode):
        for key_node, value in node.value:
            key = loader.construct_object(key_node, deep=True)
            yield (*at, key), key_node.start_mark.line + 1
            yield from _lines(loader, value, (*at, key))
    elif isinstance(node, yaml.SequenceNode):
        for i, value in enumerate(node.value):
            yield (*at, i), value.start_mark.line + 1
            yield from _lines(loader, value, (*at, i))


class Overrides:
    """Changes the data of a file in place, and remembers which override set which value.

    Args:
        data: what the file holds.

    Examples:
        >>> data = {"stages": ["decode", {"resize": {"shorter": 256}}]}
        >>> Overrides(data).apply("stages.resize.shorter=160")
        >>> data
        {'stages': ['decode', {'resize': {'shorter': 160}}]}
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
                holder = target
                target = target.get(key) if isinstance(target, dict) else target[key]
        if at[0] == "preprocess" and not self._is_used(holder):
            rule = "cannot be overridden here: what has it by an anchor keeps the file's value"
            action = "override pipelines.NAME.stages and serve.stages"
            raise ConfigError([Problem.of(tuple(at), rule, action=action, code="config.override")])
        holder[at[-1]] = value
        self._set.append((holder, at[-1], override))

    def _is_used(self, container: Any) -> bool:
        """Return True if an anchor puts a mapping or list also outside `preprocess`."""
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
        """Return the override that set the value at a path, or one that it lies in."""
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
    """Return the keys that lead from `target` to what a word of a dotted path means, or what is wrong with it.

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
