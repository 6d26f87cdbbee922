"""Refuses a `.pt2` file that would run code when torch opens it.

`torch.export.load` unpickles entries of the archive, evaluates text in it as Python, imports modules that it names and
loads compiled libraries. None of this is needed for a graph of torch's operators with weights, which is what
`gpuflow export` writes. So only the entries, operators and names that such a graph has are let through: what is not
known to be harmless is refused. Read from torch 2.11: `torch/export/pt2_archive`, `torch/_export/serde`, `torch/fx`.
"""

from __future__ import annotations

import io
import json
import re
import zipfile
from collections.abc import Callable, Iterator
from typing import Any

import torch

__all__ = ["refuse_code"]

_ENTRIES = re.compile(
    r"archive_format|archive_version|byteorder|\.data/(version|serialization_id)|extra/[^/]+|models/model\.json"
    r"|data/weights/(weight_\d+|model_weights_config\.json)|data/constants/(tensor_\d+|model_constants_config\.json)"
    r"|data/sample_inputs/model\.pt"
)
"""What `torch.export.save` writes. Others are compiled libraries, pickled objects, and formats of before torch 2.8."""
_CONFIGS = "data/weights/model_weights_config.json", "data/constants/model_constants_config.json"
_MODEL, _SAMPLE_INPUTS = "models/model.json", "data/sample_inputs/model.pt"

_OPERATORS = re.compile(
    r"torch\.ops\.(aten|torchvision|quantized_decomposed)\._?[a-z][a-z0-9_]*\.[A-Za-z]\w*"
    r"|torch\.ops\.higher_order\.(cond|while_loop|wrap_with_autocast|wrap_with_set_grad_enabled)"
    r"|_operator\.(getitem|add|sub|mul|floordiv|truediv|mod|neg|pow|eq|ne|lt|le|gt|ge|and_|or_)"
    r"|math\.(ceil|floor|trunc)|torch\.sym_(float|int|ite|max|min|not|sqrt|sum)"
)
_FORBIDDEN_OPERATORS = re.compile(r"torch\.ops\.aten\.from_file\..*")
"""`from_file` maps any file of this machine, and can write to it."""
_SYMBOL = re.compile(r"Symbol\('([a-z]+\d+)'(?:, [a-z]+=(?:True|False))*\)", re.ASCII)
_SIZE = re.compile(r"L\['\w+'\](?:\[\d+\])*\.(?:size|stride|storage_offset)\(\)(?:\[\d+\])?", re.ASCII)
_FLOAT = re.compile(r"Float\('[-+]?\d+(?:\.\d*)?(?:e[-+]?\d+)?', precision=\d+\)", re.ASCII)
_EXPRESSION = re.compile(r"([-\w+*/%(), <>=&|~]|(?<=\d)\.(?=\d))*", re.ASCII)
"""torch has sympy evaluate it as Python: numbers, operations, and the names below; no attributes and no text."""
_EXPRESSION_NAMES = re.compile(
    r"[suz]s?\d+|zuf\d+|zf\d+|Add|Mul|Pow|Mod|Integer|Rational|Min|Max|Abs|floor|ceiling"
    r"|Eq|Ne|Lt|Le|Gt|Ge|Equality|Unequality|GreaterThan|LessThan|StrictGreaterThan|StrictLessThan"
    r"|And|Or|Not|true|false|True|False"
    r"|FloorDiv|ModularIndexing|Where|PythonMod|CleanDiv|CeilToInt|FloorToInt|CeilDiv|LShift|RShift|PowByNatural"
    r"|FloatPow|FloatTrueDiv|IntTrueDiv|TruncToFloat|TruncToInt|RoundToInt|RoundDecimal|ToFloat|Identity"
)
_NAME = re.compile(r"[A-Za-z_]\w*|", re.ASCII)
_DOTTED = re.compile(r"[\w.\- ]*", re.ASCII)
"""Names of parameters and modules. torch writes them and all others into Python text, which it runs."""
_TREE_TYPES = (None, "builtins.tuple", "builtins.list", "builtins.dict")


def refuse_code(path: str) -> None:
    """Raise ValueError, with the place within the file, if opening a file by `torch.export.load` could run code.

    What is let through is still a program: it computes what it likes, with torch's operators, on what it is given.

    Raises:
        ValueError: the file is one of those. Others: it is no archive of `torch.export.save`.
    """
    from torch.export.pt2_archive import PT2ArchiveReader

    with PT2ArchiveReader(path) as archive:  # torch's own, so that both see the same entries
        names = archive.get_file_names()
        with zipfile.ZipFile(path) as listed:  # torch falls back to this one for older formats
            others = {name.partition("/")[2] or name for name in listed.namelist()} - set(names)
        for name in (*names, *sorted(others)):
            if name in others or not _ENTRIES.fullmatch(name):
                raise _refusal(f"the entry {name}")
        for name in _CONFIGS:
            for weight in json.loads(archive.read_bytes(name))["config"].values():
                if weight["use_pickle"] or not re.fullmatch(r"(weight|tensor)_\d+", weight["path_name"]):
                    raise _refusal(f"a pickled object in {name}")
        try:  # torch does the same, but then goes on without weights_only
            torch.load(io.BytesIO(archive.read_bytes(_SAMPLE_INPUTS)), weights_only=True)
        except Exception as error:
            raise _refusal(f"a pickled object in {_SAMPLE_INPUTS}") from error
        for found in _code_in(json.loads(archive.read_bytes(_MODEL))):
            raise _refusal(f"{found} in {_MODEL}")


def _refusal(what: str) -> ValueError:
    return ValueError(
        f"torch could run code of this file's author to open it: it has {what}; "
        "let gpuflow export write the file, or take an .onnx file"
    )


def _code_in(value: Any, key: str = "") -> Iterator[str]:
    """What of a serialized graph is not known to be harmless; `key` is that of the innermost mapping."""
    if isinstance(value, dict):
        if "inputs" in value and "target" in value:
            yield from _unless(_is_operator, "the operator", value["target"])
        for name, item in value.items():
            if name == "metadata":
                continue  # stack traces and names of modules, which are looked up and never called
            if key.endswith("_values"):
                yield from _unless(_NAME.fullmatch, "the name", name)
            yield from _code_in(item, name)
    elif isinstance(value, list):
        for item in value:
            yield from _code_in(item, key)
    elif isinstance(value, str):
        match key:
            case "expr_str":
                yield from _unless(_is_expression, "the expression", value)
            case "guards_code":
                yield from _unless(_is_guard, "the guard", value)
            case "as_operator":
                yield from _unless(_is_operator, "the operator", value)
            case "in_spec" | "out_spec":
                yield from _unless(_is_tree, "the structure", value)
            case "name" | "as_name" | "forward_arg_names" | "user_input_name" | "verifiers":
                yield from _unless(_NAME.fullmatch, "the name", value)
            case "fqn" | "parameter_name" | "buffer_name" | "tensor_constant_name":
                yield from _unless(_DOTTED.fullmatch, "the name", value)
            case "custom_obj_name" | "class_fqn":
                yield "an object of the class " + repr(value)
            case _:  # a text argument of an operator, or a field that torch only compares
                pass


def _unless(allowed: Callable[[str], object], what: str, text: str) -> Iterator[str]:
    if not allowed(text):
        yield f"{what} {text[:80]!r}"


def _is_operator(target: str) -> bool:
    return _OPERATORS.fullmatch(target) is not None and _FORBIDDEN_OPERATORS.fullmatch(target) is None


def _is_expression(text: str) -> bool:
    text = _FLOAT.sub("1", _SYMBOL.sub(r"\1", text))
    names = re.findall(r"[^\W\d]\w*", text)
    return _EXPRESSION.fullmatch(text) is not None and all(map(_EXPRESSION_NAMES.fullmatch, names))


def _is_guard(text: str) -> bool:
    """Whether a condition on the inputs compares their sizes."""
    return _is_expression(_SIZE.sub("s0", text))


def _is_tree(text: str) -> bool:
    """Whether a serialized structure of arguments has only tuples, lists and dicts with plain keys."""

    def plain(node: Any) -> bool:
        keys = json.loads(node["context"] or "null")
        if keys is not None and not (isinstance(keys, list) and all(map(_is_plain_key, keys))):
            return False
        return node["type"] in _TREE_TYPES and all(map(plain, node["children_spec"]))

    return plain(json.loads(text)[1])


def _is_plain_key(key: object) -> bool:
    return isinstance(key, str) and _NAME.fullmatch(key) is not None
