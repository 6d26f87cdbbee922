"""Refuses a `.pt2` file that would run code when torch opens it.

`torch.export.load` unpickles entries of the archive, evaluates text in it as Python, imports modules that it names and
loads compiled libraries. None of this is needed for a graph of torch's operators with weights, which is what
`gpuflow export` writes. So only the entries, operators and names that such a graph has are let through: what is not
known to be harmless is refused. Read from torch 2.11: `torch/export/pt2_archive`, `torch/_export/serde`, `torch/fx`.
"""

from __future__ import annotations

import io
import json
import math
import operator
import re
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass
from functools import cache
from types import ModuleType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import torch
from torch._export.serde import schema
from torch._export.serde.union import _Union

_ENTRIES = re.compile(
    r"archive_format|archive_version|byteorder|\.data/(version|serialization_id)|extra/[^/]+|models/model\.json"
    r"|data/weights/(weight_\d+|model_weights_config\.json)|data/constants/(tensor_\d+|model_constants_config\.json)"
    r"|data/sample_inputs/model\.pt"
)
"""Matches what `torch.export.save` writes: no compiled library, no pickled object, no format older than torch 2.9."""
_CONFIGS = "data/weights/model_weights_config.json", "data/constants/model_constants_config.json"
_MODEL, _SAMPLE_INPUTS = "models/model.json", "data/sample_inputs/model.pt"

_OPERATORS = re.compile(
    r"torch\.ops\.(aten|torchvision|quantized_decomposed)\._?[a-z][a-z0-9_]*\.[A-Za-z]\w*"
    r"|torch\.ops\.higher_order\.(cond|while_loop|wrap_with_autocast|wrap_with_set_grad_enabled)"
    r"|_operator\.(getitem|add|sub|mul|floordiv|truediv|mod|neg|pow|eq|ne|lt|le|gt|ge|and_|or_)"
    r"|math\.(ceil|floor|trunc)|torch\.sym_(float|int|ite|max|min|not|sqrt|sum)"
)
_FORBIDDEN_OPERATORS = re.compile(r"torch\.ops\.aten\.(from_file|save)\..*")
"""`from_file` maps any file of this machine, and can write to it; TorchScript's `save` writes one."""
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
_ORIGINS = "stack_trace", "nn_module_stack", "source_fn_stack", "torch_fn", "custom", "from_node"
"""What a node's metadata may say about where the node comes from."""
_OWN_MODULES = "torch", "operator", "math"
_ROOTS = {"torch.nn": torch.nn, "torch": torch, "_operator": operator, "math": math}
"""Where torch looks a function up, by how its name begins; the first one counts."""


def refuse_code(path: str) -> None:
    """Raise ValueError, with the place within the file, if opening a file by `torch.export.load` could run code.

    What is let through is still a program: it may compute anything with torch's operators on its input.

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
            config = json.loads(archive.read_string(name))
            for found in _code_in(schema.PayloadConfig, config, "PayloadConfig"):
                raise _refusal(f"{found} in {name}")
            if any(weight["use_pickle"] for weight in config["config"].values()):
                raise _refusal(f"a pickled object in {name}")
        try:  # torch does the same, but then goes on without weights_only
            torch.load(io.BytesIO(archive.read_bytes(_SAMPLE_INPUTS)), weights_only=True)
        except Exception as error:
            raise _refusal(f"a pickled object in {_SAMPLE_INPUTS}") from error
        for found in _code_in(schema.ExportedProgram, json.loads(archive.read_string(_MODEL)), "ExportedProgram"):
            raise _refusal(f"{found} in {_MODEL}")


def drop_origins(program: torch.export.ExportedProgram) -> None:
    """Remove what the nodes of a program say about where they come from: torch.compile uses it to generate code."""
    for module in program.graph_module.modules():
        if isinstance(module, torch.fx.GraphModule):
            module.meta.pop("custom", None)
            for node in module.graph.nodes:
                for name in _ORIGINS:
                    node.meta.pop(name, None)


def _refusal(what: str) -> ValueError:
    return ValueError(
        f"torch could run code of this file's author to open it: it has {what}; "
        "let gpuflow export write the file, or take an .onnx file"
    )


# --- a value of each type of torch's schema ---------------------------------------------------------------------------


def _code_in(kind: Any, value: Any, place: str) -> Iterator[str]:
    """Yield what is not known to be harmless in a value that torch reads as this type of its schema.

    The rule for a text follows from the field of the schema that it belongs to; names that the file's author chose have
    no influence on it. torch does not check the types of values, so that it takes a text for a number: here each value
    must be of its type. Fields that the schema does not have are skipped, as torch skips them.

    Args:
        place: the class of the schema, and its field, that the value belongs to.
    """
    field, arguments = place.rpartition(".")[2], get_args(kind)
    container = get_origin(kind)
    if container in (Union, UnionType):
        assert arguments[1:] == (type(None),), f"torch's schema has no union but Optional, got {kind} at {place}"
        if value is not None:
            yield from _code_in(arguments[0], value, place)
    elif container is list and isinstance(value, list):
        for item in value:
            yield from _code_in(arguments[0], item, place)
    elif field == "metadata" and isinstance(value, dict):
        for name, text in value.items():
            if not isinstance(text, str) or (name == "source_fn_stack" and not _is_stack(text)):
                yield f"the {name} {str(text)[:80]!r}"
    elif container is dict and isinstance(value, dict):
        for name, item in value.items():
            yield from _unless(_KEYS.get(field, _is_nothing), "the name", name)
            yield from _code_in(arguments[1], item, place)
    elif isinstance(kind, type) and is_dataclass(kind) and isinstance(value, dict):
        types = _types_of(kind)
        if issubclass(kind, _Union) and len(value) != 1:
            yield f"{len(value)} values in place of one {kind.__name__}"
        for name, of_field in types.items():
            if name in value:
                yield from _code_in(of_field, value[name], f"{kind.__name__}.{name}")
    elif kind is str and isinstance(value, str):
        what, allowed = _TEXTS.get(field, ("the text", _is_nothing))
        yield from _unless(allowed, what, value)
    elif not _is_number(kind, value):
        yield f"{str(value)[:80]!r} as the value of {place}"


@cache
def _types_of(kind: type) -> dict[str, Any]:
    """Return the types of the fields of a class of the schema."""
    return get_type_hints(kind, vars(schema))


def _is_number(kind: Any, value: Any) -> bool:
    """Return True for a number, or a truth value, that torch reads as this type."""
    if kind is bool:
        return isinstance(value, bool)
    if kind is float:
        return type(value) in (int, float) or value in ("Infinity", "-Infinity", "NaN")
    return kind is not str and isinstance(kind, type) and issubclass(kind, int) and type(value) is int


def _unless(allowed: Callable[[str], object], what: str, text: str) -> Iterator[str]:
    if not allowed(text):
        yield f"{what} {text[:80]!r}"


# --- texts ------------------------------------------------------------------------------------------------------------


def _is_anything(text: str) -> bool:
    """Return True for a text argument of an operator, and for what torch only compares."""
    return True


def _is_nothing(text: str) -> bool:
    """Return False for objects of other classes than tensors, and for fields that torch 2.11 does not have."""
    return False


def _is_operator(target: str) -> bool:
    return _OPERATORS.fullmatch(target) is not None and _FORBIDDEN_OPERATORS.fullmatch(target) is None


def _is_stack(text: str) -> bool:
    """Return True if torch finds the functions that a node comes from in its own modules."""
    return all(_is_in_torch(entry.rpartition(",")[2]) for entry in text.split(";"))


def _is_in_torch(target: str) -> bool:
    """Return True if torch finds the function of this name by reading attributes of its own modules alone.

    Reading those of others can run code: `torch.ctypes.cdll` loads the library that an attribute of it names.
    """
    if _is_operator(target):
        return True
    root = next((root for root in _ROOTS if target.startswith(root)), None)
    if root is None:
        return not target.startswith("#")  # torch keeps the text; after # it calls what an extension has registered
    found: object = _ROOTS[root]
    for name in target.split(".")[1 + root.count(".") :]:
        if not isinstance(found, ModuleType) or found.__name__.partition(".")[0] not in _OWN_MODULES:
            return False
        found = getattr(found, name, None)
        if found is None:
            break  # torch keeps the text
    return True


def _is_expression(text: str) -> bool:
    text = _FLOAT.sub("1", _SYMBOL.sub(r"\1", text))
    names = re.findall(r"[^\W\d]\w*", text)
    return _EXPRESSION.fullmatch(text) is not None and all(map(_EXPRESSION_NAMES.fullmatch, names))


def _is_guard(text: str) -> bool:
    """Return True for a condition on the inputs that compares their sizes."""
    return _is_expression(_SIZE.sub("s0", text))


def _is_tree(text: str) -> bool:
    """Return True for a serialized structure of arguments of only tuples, lists and dicts with plain keys."""

    def plain(node: Any) -> bool:
        keys = json.loads(node["context"] or "null")
        if keys is not None and not (isinstance(keys, list) and all(map(_is_plain_key, keys))):
            return False
        return node["type"] in _TREE_TYPES and all(map(plain, node["children_spec"]))

    return plain(json.loads(text)[1])


def _is_plain_key(key: object) -> bool:
    return isinstance(key, str) and _NAME.fullmatch(key) is not None


_TEXTS: dict[str, tuple[str, Callable[[str], object]]] = {
    field: (what, is_harmless)
    for what, is_harmless, fields in (
        ("the expression", _is_expression, "expr_str"),
        ("the guard", _is_guard, "guards_code"),
        ("the operator", _is_operator, "target as_operator"),
        ("the structure", _is_tree, "in_spec out_spec"),
        ("the name", _NAME.fullmatch, "name as_name forward_arg_names field_names user_input_name verifiers"),
        ("the name", _DOTTED.fullmatch, "fqn parameter_name buffer_name tensor_constant_name"),
        ("an object of the class", _is_nothing, "custom_obj_name class_fqn"),
        ("the path", re.compile(r"(weight|tensor)_\d+").fullmatch, "path_name"),
        ("the text", _is_anything, "as_string as_strings"),
        ("the device", _is_anything, "type"),
        ("the version", _is_anything, "torch_version"),
    )
    for field in fields.split()
}
"""What each field of the schema that is a text is called, and which texts are harmless in it."""
_KEYS: dict[str, Callable[[str], object]] = {
    **dict.fromkeys(("tensor_values", "sym_int_values", "sym_float_values", "sym_bool_values"), _NAME.fullmatch),
    **dict.fromkeys(("as_string_to_argument", "range_constraints"), _NAME.fullmatch),
    **dict.fromkeys(("treespec_namedtuple_fields", "opset_version", "config"), _DOTTED.fullmatch),
    "custom_obj_values": _is_nothing,
}
"""Which names are harmless in each mapping of the schema."""
