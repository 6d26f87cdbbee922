"""YAML text to data with line numbers, loaded safely: no tag can run anything. The only file that imports yaml."""

from __future__ import annotations

import re
from collections.abc import Iterator
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
    """The YAML files of a folder that an error may suggest: hidden ones belong to other tools."""
    return [str(file) for file in sorted(folder.glob("*.yaml")) if not file.name.startswith(".")]


def read_yaml(path: str, *, holds: str = "source and pipelines") -> tuple[dict[str, Any], Lines]:
    """The mapping that a file holds, and the lines of its values. holds: its keys, for the error if it is none.

    Raises:
        ConfigError: there is no such file, or it is not valid YAML, or holds no mapping.
    """

    def error(
        rule: str, value: object = UNSET, action: str = "", *, line: str = "", code: Code = "config.file"
    ) -> ConfigError:
        return ConfigError([Problem(f"{path}{line}:", rule, value, action, code=code)])

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
        line = f":{cause.problem_mark.line + 1}" if cause.problem_mark else ""
        raise error(
            f"is not valid YAML: {cause.problem}", action=_advice(cause), line=line, code="config.yaml"
        ) from cause
    except yaml.reader.ReaderError as cause:
        line = f":{text.count(chr(10), 0, cause.position) + 1}"
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
    """What to do about the usual mistakes; empty for others."""
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
    """The value of an override. Raises ConfigError, without a place, where it is not valid YAML."""
    try:
        return yaml.load(text, _Loader) if text else ""
    except (yaml.YAMLError, ValueError) as cause:
        rule = f"the value is not valid YAML: {getattr(cause, 'problem', None) or cause}"
        raise ConfigError([Problem.of((), rule, code="config.yaml")]) from cause
    except RecursionError:
        raise ConfigError([Problem.of((), f"the value {_CYCLE}", code="config.yaml")]) from None


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
    text, kind = node.value, node.tag.rpartition(":")[2]
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
        size = 1 + sum(size_of(child) for child in _children(node))
        sizes[id(node)] = size
        if size - len(sizes) > _MAX_ALIASED:
            raise yaml.MarkedYAMLError(
                problem=f"its aliases stand for more than {_MAX_ALIASED:,} values; write out what is needed",
                problem_mark=node.start_mark,
            )
        return size

    size_of(root)


def _children(node: yaml.Node) -> Iterator[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        for pair in node.value:
            yield from pair
    elif isinstance(node, yaml.SequenceNode):
        yield from node.value


def _lines(loader: _Loader, node: yaml.Node | None, at: tuple[Key, ...] = ()) -> Iterator[tuple[tuple[Key, ...], int]]:
    """(path, line) of every value in a YAML tree; a key's line for a value in a mapping."""
    if isinstance(node, yaml.MappingNode):
        for key_node, value in node.value:
            key = loader.construct_object(key_node, deep=True)
            yield (*at, key), key_node.start_mark.line + 1
            yield from _lines(loader, value, (*at, key))
    elif isinstance(node, yaml.SequenceNode):
        for i, value in enumerate(node.value):
            yield (*at, i), value.start_mark.line + 1
            yield from _lines(loader, value, (*at, i))
