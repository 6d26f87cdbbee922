"""Prints the size of the code by package, and fails if it exceeds `tokens` under [tool.gpuflow] in pyproject.toml.

The size is the number of Python tokens without comments and docstrings: `python .ci/size.py`. An f-string is one token
on every version of Python. A literal counts once more for each 200 characters.
"""

from __future__ import annotations

import ast
import sys
import tokenize
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("gpuflow", "stages", "plots")
LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}
START, END = getattr(tokenize, "FSTRING_START", -1), getattr(tokenize, "FSTRING_END", -1)
"""Of an f-string, from Python 3.12 on; before, it is one string."""
LONG = 200


def main() -> None:
    """Print a row for each package, and the total."""
    packages: dict[str, list[int]] = {}
    for path in sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")):
        row = packages.setdefault(str(path.parent.relative_to(ROOT)), [0, 0])
        row[0] += 1
        row[1] += sum(tokens(path))
    for name, (files, count) in packages.items():
        print(f"{name:28} {files:4} files {count:8,} tokens")
    files, total = (sum(row[column] for row in packages.values()) for column in (0, 1))
    most = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["gpuflow"]["tokens"]
    print(f"{'total':28} {files:4} files {total:8,} tokens, at most {most:,}")
    if total > most:
        sys.exit("the code is larger than allowed; delete something, or raise tool.gpuflow.tokens in pyproject.toml")


def tokens(path: Path) -> Iterator[int]:
    """Yield the weight of each token of a module."""
    documented, inside = docstring_lines(path), 0
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type == START:
                yield int(not inside)
                inside += 1
            elif token.type == END:
                inside -= 1
            elif not inside and token.type not in LAYOUT and token.start[0] not in documented:
                yield 1 + (len(token.string) // LONG if token.type == tokenize.STRING else 0)


def docstring_lines(path: Path) -> set[int]:
    """Return the numbers of the lines of all docstrings."""
    lines: set[int] = set()
    for node in ast.walk(ast.parse(path.read_bytes())):
        holders = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        if isinstance(node, holders) and ast.get_docstring(node, clean=False) is not None:
            first = node.body[0]
            lines.update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return lines


if __name__ == "__main__":
    main()
