"""Generates mutants of a Python file: copies with one small fault each, by rules that know no module.

swap_axis: `y` for `x`, `height` for `width`, index 0 for index 1, and the reverse.
drop_term: one operand of `+`, `-`, `*`, `and`, `or`, ... is left out.
constant_for_draw: a part of a random key, or the drawn number, becomes a constant.
off_by_one: an integer is one larger; `<` is `<=`, `>` is `>=`, and the reverse.
omit_call: a statement that only calls something is left out; `max(a, b)` is `a`.
omit_raise: an error is not raised.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["RULES", "Mutant", "mutants_of"]

RULES = ("swap_axis", "drop_term", "constant_for_draw", "off_by_one", "omit_call", "omit_raise")

_PAIRS = (("y", "x"), ("height", "width"), ("vertical", "horizontal"), ("top", "left"), ("bottom", "right"))
_TWIN = {**dict(_PAIRS), **{b: a for a, b in _PAIRS}}
_KEYED = {"key64", "permute", "stage", "StageKeys", "Keys"}
"""Functions whose arguments decide what is drawn."""
_DRAWS = {"uniform", "random", "integers"}
_NEIGHBOUR = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">"}
_FIRST_OF = {"max", "min", "abs", "sorted", "reversed", "maximum", "minimum", "clip", "round", "floor", "ceil"}


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One change of one file. function: the qualified name of the innermost function around it, "" outside of any."""

    path: str
    function: str
    line: int
    rule: str
    start: int
    end: int
    after: str
    statement: str
    number: int
    """Which of the equal changes in this function it is."""

    @property
    def id(self) -> str:
        """The same for the same change, however the lines around it move."""
        parts = (self.path, self.function, self.rule, self.statement, self.after, str(self.number))
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:10]

    def apply(self, text: str) -> str:
        return text[: self.start] + self.after + text[self.end :]


def mutants_of(path: str, text: str) -> list[Mutant]:
    """All mutants of a file, in the order of the text."""
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    seen: dict[tuple[str, str, str, str], int] = {}
    found: list[Mutant] = []
    for node, function, rule, after in _changes(ast.parse(text), ""):
        start, end = (_offset(text, starts, *place) for place in _span(node))
        before = " ".join(text[start:end].split())
        key = (function, rule, before, after)
        seen[key] = seen.get(key, -1) + 1
        found.append(
            Mutant(
                path=path,
                function=function,
                line=node.lineno,
                rule=rule,
                start=start,
                end=end,
                after=after,
                statement=before,
                number=seen[key],
            )
        )
    return sorted(found, key=lambda mutant: (mutant.start, mutant.rule, mutant.after))


def _span(node: ast.expr | ast.stmt) -> tuple[tuple[int, int], tuple[int, int]]:
    assert node.end_lineno is not None and node.end_col_offset is not None
    return (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)


def _offset(text: str, starts: list[int], line: int, column: int) -> int:
    """The index of a place that ast names by line and by bytes of UTF-8 within it."""
    row = text[starts[line - 1] : starts[line]]
    return starts[line - 1] + len(row.encode()[:column].decode())


def _changes(node: ast.AST, function: str) -> Iterator[tuple[ast.expr | ast.stmt, str, str, str]]:
    """(node, function around it, rule, text to put in the node's place) of everything below a node."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        inner = f"{function}.{node.name}".lstrip(".")
        for default in (*node.args.defaults, *(value for value in node.args.kw_defaults if value is not None)):
            yield from _changes(default, function)
        for statement in node.body:
            yield from _changes(statement, f"{inner}.<locals>" if _is_definition(statement) else inner)
        return
    if isinstance(node, ast.ClassDef):
        for statement in node.body:
            yield from _changes(statement, f"{function}.{node.name}".lstrip("."))
        return
    if isinstance(node, ast.JoinedStr | ast.Assert | ast.Import | ast.ImportFrom) or _is_all(node):
        return
    if isinstance(node, ast.expr | ast.stmt):
        for rule, after in _here(node):
            yield node, function, rule, after
    for name, value in ast.iter_fields(node):
        if name == "annotation":
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                inner = function.removesuffix(".<locals>")
                yield from _changes(child, f"{inner}.<locals>" if _is_definition(child) and inner else function)


def _is_definition(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)


def _is_all(node: ast.AST) -> bool:
    return isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets)


def _here(node: ast.expr | ast.stmt) -> Iterator[tuple[str, str]]:
    """(rule, text to put in the node's place) of the changes at this node itself."""
    match node:
        case ast.Name(id=name, ctx=ast.Load()) if name in _TWIN:
            yield "swap_axis", _TWIN[name]
        case ast.Attribute(value=value, attr=name, ctx=ast.Load()) if name in _TWIN:
            yield "swap_axis", f"{ast.unparse(value)}.{_TWIN[name]}"
        case ast.Subscript(value=value, slice=index, ctx=ast.Load()):
            for other in _other_indices(index):
                yield "swap_axis", f"{ast.unparse(value)}[{other}]"
        case ast.BinOp(left=left, op=op, right=right) if not _is_union(node):
            if not isinstance(op, ast.Pow | ast.Mod):
                yield "drop_term", f"({ast.unparse(left)})"
            if isinstance(op, ast.Add | ast.Mult | ast.BitAnd | ast.BitOr | ast.BitXor):
                yield "drop_term", f"({ast.unparse(right)})"
        case ast.BoolOp(values=values):
            for dropped in values:
                rest = [value for value in values if value is not dropped]
                changed = rest[0] if len(rest) == 1 else ast.BoolOp(op=node.op, values=rest)
                yield "drop_term", f"({ast.unparse(changed)})"
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _NEIGHBOUR:
            yield "off_by_one", f"{ast.unparse(left)} {_NEIGHBOUR[type(op)]} {ast.unparse(right)}"
        case ast.Constant(value=int(value)) if not isinstance(value, bool):
            yield "off_by_one", str(value + 1)
        case ast.Call(func=func, args=args):
            yield from _of_call(node, _name_of(func), args)
        case ast.Expr(value=ast.Call() | ast.Await()):
            yield "omit_call", "pass"
        case ast.Raise(exc=ast.expr()):
            yield "omit_raise", "pass"


def _of_call(node: ast.Call, name: str, args: list[ast.expr]) -> Iterator[tuple[str, str]]:
    if name in _KEYED:
        for i, argument in enumerate(args):
            if not isinstance(argument, ast.Constant | ast.Starred):
                rest = [ast.unparse(other) if j != i else "0" for j, other in enumerate(args)]
                keywords = [ast.unparse(keyword) for keyword in node.keywords]
                yield "constant_for_draw", f"{ast.unparse(node.func)}({', '.join([*rest, *keywords])})"
    if name in _DRAWS:
        yield "constant_for_draw", f"({ast.unparse(node)} * 0 + 0.5)"
    if name in _FIRST_OF and args and not isinstance(args[0], ast.Starred):
        for argument in args if name != "clip" else args[:1]:
            yield "omit_call", f"({ast.unparse(argument)})"


def _other_indices(index: ast.expr) -> Iterator[str]:
    """The same index with 0 for 1 or 1 for 0 in one place of it."""
    match index:
        case ast.Constant(value=0 | 1 as value) if not isinstance(value, bool):
            yield str(1 - value)
        case ast.Tuple(elts=parts):
            for i, part in enumerate(parts):
                for other in _other_indices(part):
                    yield ", ".join([*map(ast.unparse, parts[:i]), other, *map(ast.unparse, parts[i + 1 :])])


def _name_of(func: ast.expr) -> str:
    return func.attr if isinstance(func, ast.Attribute) else func.id if isinstance(func, ast.Name) else ""


def _is_union(node: ast.BinOp) -> bool:
    """`A | B` of types, as in an alias or in isinstance, or a text that is put together."""
    names = [_name_of(side) for side in (node.left, node.right)]
    is_text = any(isinstance(side, ast.JoinedStr) for side in (node.left, node.right))
    none = any(isinstance(side, ast.Constant) and side.value is None for side in (node.left, node.right))
    return (
        is_text
        or none
        or (isinstance(node.op, ast.BitOr) and any(name[:1].isupper() or name in _TYPES for name in names))
    )


_TYPES = {"int", "str", "float", "bytes", "bool", "list", "dict", "tuple", "type", "slice"}
