"""A `.pt2` file that runs code when torch opens it is refused before; what `gpuflow export` writes is not."""

from __future__ import annotations

import io
import json
import pickle
import re
import zipfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import torch
from torch import nn
from torch._export.serde import schema
from torch.export.pt2_archive import PT2ArchiveReader, PT2ArchiveWriter

from gpuflow.engines.program_file import _KEYS, _TEXTS, _is_expression, drop_origins, refuse_code
from gpuflow.errors import ConfigError
from tests.serve.models import Models, engine, save_program

Entries = dict[str, bytes]
WEIGHTS, MODEL = "data/weights/model_weights_config.json", "models/model.json"


class Payload:
    """Unpickled, it creates a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.marker,)


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.weights = nn.Parameter(torch.ones(2))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        count = images.shape[0]
        channels = images.reshape(count * 3, -1).mean(1)  # whose length is an expression
        logits: torch.Tensor = self.linear(channels.reshape(count, 3)) * self.weights
        return logits


@pytest.fixture(scope="module")
def entries(tmp_path_factory: pytest.TempPathFactory) -> Entries:
    """The entries of a sound archive."""
    path = save_program(tmp_path_factory.mktemp("programs") / "sound.pt2", Small(), torch.zeros(2, 3, 4, 4))
    with PT2ArchiveReader(str(path)) as archive:
        return {name: archive.read_bytes(name) for name in archive.get_file_names() if not name.startswith(".data")}


def write(path: Path, entries: Entries) -> Path:
    with PT2ArchiveWriter(str(path)) as archive:
        for name, content in entries.items():
            archive.write_bytes(name, content)
    return path


def pickled(marker: Path) -> bytes:
    buffer = io.BytesIO()
    torch.save((Payload(marker),), buffer)
    return buffer.getvalue()


def edit(entries: Entries, name: str, change: Callable[[Any], None]) -> Entries:
    """The entries with one JSON entry changed."""
    value = json.loads(entries[name])
    change(value)
    return entries | {name: json.dumps(value).encode()}


def first_weight(value: Any) -> Any:
    return next(iter(value["config"].values()))


def nodes(value: Any) -> Any:
    return value["graph_module"]["graph"]["nodes"]


def sizes(value: Any) -> Any:
    """The sizes of the images."""
    return value["graph_module"]["graph"]["tensor_values"]["images"]["sizes"]


def call(value: Any) -> Any:
    return value["graph_module"]["module_call_graph"][0]["signature"]


# --- files whose code runs ------------------------------------------------------------------------------------------


def pickled_weight(entries: Entries, marker: Path) -> Entries:
    path = "data/weights/" + first_weight(json.loads(entries[WEIGHTS]))["path_name"]
    return edit(entries, WEIGHTS, lambda c: first_weight(c).update(use_pickle=True)) | {path: pickled(marker)}


def pickled_constant(entries: Entries, marker: Path) -> Entries:
    name = "data/constants/model_constants_config.json"
    meta = {"path_name": "tensor_0", "is_param": False, "use_pickle": True, "tensor_meta": None}
    changed = edit(entries, name, lambda c: c["config"].update(x=meta))
    return changed | {"data/constants/tensor_0": pickled(marker)}


def old_weights(entries: Entries, marker: Path) -> Entries:
    return entries | {"data/weights/model.pt": pickled(marker)}


def old_constants(entries: Entries, marker: Path) -> Entries:
    return entries | {"data/constants/model.pt": pickled(marker)}


def sample_inputs(entries: Entries, marker: Path) -> Entries:
    return entries | {"data/sample_inputs/model.pt": pickled(marker)}


def expression(entries: Entries, marker: Path) -> Entries:
    text = f"exec(\"open({str(marker)!r}, 'w')\") or 1"

    def change(model: Any) -> None:
        sizes(model)[0] = {"as_expr": {"expr_str": text, "hint": {"as_int": 2}}}

    return edit(entries, MODEL, change)


def expression_of_the_tensor(name: str) -> Callable[[Entries, Path], Entries]:
    """The expression, in the sizes of a tensor that has this name in the whole file."""

    def attack(entries: Entries, marker: Path) -> Entries:
        renamed = entries | {MODEL: entries[MODEL].replace(b'"images"', f'"{name}"'.encode())}

        def change(model: Any) -> None:
            size = model["graph_module"]["graph"]["tensor_values"][name]["sizes"][0]
            size["as_expr"]["expr_str"] = f"[open({str(marker)!r}, 'w'), {size['as_expr']['expr_str']}][1]"

        return edit(renamed, MODEL, change)

    attack.__name__ = f"tensor_{name}"
    return attack


RUN_WHEN_OPENED = [
    pickled_weight,
    pickled_constant,
    old_weights,
    old_constants,
    sample_inputs,
    expression,
    *map(expression_of_the_tensor, ("metadata", "target", "inputs", "expr_str", "as_string", "type")),
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("attack", RUN_WHEN_OPENED, ids=lambda attack: attack.__name__)
def test_code_in_a_file_does_not_run(
    attack: Callable[[Entries, Path], Entries], entries: Entries, tmp_path: Path
) -> None:
    marker = tmp_path / "marker"
    path = write(tmp_path / "m.pt2", attack(entries, marker))
    with pytest.raises(ConfigError, match="torch could run code of this file's author to open it: it has "):
        engine(path)
    assert not marker.exists()
    with suppress(Exception):  # what torch says of it afterwards differs
        torch.export.load(path)
    assert marker.exists(), "this is a file whose code torch runs"


def texts(value: Any, place: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """The places of all plain values and of all names in a JSON value; a name's place ends with "name of"."""
    if isinstance(value, dict):
        for name, item in value.items():
            yield (*place, name, "name of")
            yield from texts(item, (*place, name))
    elif isinstance(value, list):
        for number, item in enumerate(value):
            yield from texts(item, (*place, number))
    else:
        yield place


def with_text(value: Any, place: tuple[str | int, ...], text: str) -> Any:
    """A copy of a JSON value with this text at that place."""
    copied = inner = json.loads(json.dumps(value))
    *way, last = place[:-1] if place[-1] == "name of" else place
    for step in way:
        inner = inner[step]
    if place[-1] == "name of":
        inner[text] = inner.pop(last)
    else:
        inner[last] = text
    return copied


@pytest.mark.filterwarnings("ignore")
def test_no_text_in_a_program_runs_when_it_is_let_through(entries: Entries, tmp_path: Path) -> None:
    """Every value and every name in the file is replaced in turn by text that creates a file if it is evaluated."""
    marker, path, let_through, renamed = tmp_path / "marker", tmp_path / "m.pt2", set(), set()
    for name in (MODEL, WEIGHTS):
        model = json.loads(entries[name])
        for place in texts(model):
            changed = with_text(model, place, f"[open({str(marker)!r}, 'w'), 2][1]")
            write(path, entries | {name: json.dumps(changed).encode()})
            try:
                refuse_code(str(path))
            except Exception:
                continue
            fields = tuple(step for step in place if isinstance(step, str))
            if place[-1] != "name of":  # fields of other names are skipped, and torch misses the one that was renamed
                let_through.add(fields[-1])
            elif fields in renamed:  # torch has opened a file with another name for this field of another node
                continue
            renamed.add(fields)
            with suppress(Exception):
                torch.export.load(path)
            assert not marker.exists(), place
    assert let_through == {"stack_trace", "nn_module_stack", "torch_fn", "torch_version", "type"}


def test_every_text_of_the_schema_has_a_rule() -> None:
    in_no_program = schema.AOTInductorModelPickleData, schema.ExternKernelNode, schema.ExternKernelNodes
    kinds = {kind for kind in vars(schema).values() if isinstance(kind, type) and is_dataclass(kind)}
    for kind in kinds.difference(in_no_program):
        for name, of_field in get_type_hints(kind, vars(schema)).items():
            if name not in ("metadata", "_type"):  # which is checked by itself, and which is no field
                keys, values = re.subn(r"dict\[str, ", "", str(of_field))[::-1]
                assert keys == 0 or name in _KEYS, f"{kind.__name__}.{name}"
                assert not re.search(r"\bstr\b", values) or name in _TEXTS, f"{kind.__name__}.{name}"


def test_an_archive_of_the_old_format_is_refused(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    with zipfile.ZipFile(tmp_path / "m.pt2", "w") as archive:
        archive.writestr("version", "8.1")
        archive.writestr("serialized_state_dict.pt", pickle.dumps(Payload(marker)))
    with pytest.raises(ConfigError, match=r"m\.pt2: cannot be read as a program of torch\.export"):
        engine(tmp_path / "m.pt2")
    assert not marker.exists()


# --- everything that torch writes into Python text, imports or calls --------------------------------------------------


def in_model(change: Callable[[Any], None]) -> Callable[[Entries], Entries]:
    return lambda entries: edit(entries, MODEL, change)


def tree(node: dict[str, Any]) -> str:
    return json.dumps([1, {"context": None, "children_spec": [], **node}])


def from_function(name: str) -> Callable[[Entries], Entries]:
    """The first node comes from a function of this name."""
    return in_model(lambda m: nodes(m)[0]["metadata"].update(source_fn_stack=f"images,torch.flatten;x,{name}"))


QUOTE = "a'); import os; ('"


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda e: e | {"data/aotinductor/model/x.so": b""}, "the entry data/aotinductor/model/x.so"),
        (lambda e: e | {"data/constants/custom_obj_0": b""}, "the entry data/constants/custom_obj_0"),
        (lambda e: e | {"models/other.json": e[MODEL]}, "the entry models/other.json"),
        (in_model(lambda m: nodes(m)[0].update(target="torch.os.system")), "the operator 'torch.os.system'"),
        (in_model(lambda m: nodes(m)[0].update(target="torch.load")), "the operator 'torch.load'"),
        (
            in_model(lambda m: nodes(m)[0].update(target="torch.ops.aten.from_file.default")),
            "the operator 'torch.ops.aten.from_file.default'",
        ),
        (
            in_model(lambda m: nodes(m)[0].update(target="torch.ops.aten.save.default")),
            "the operator 'torch.ops.aten.save.default'",
        ),
        (from_function("torch.ctypes.cdll./tmp/library"), "the source_fn_stack 'images,torch.flatten;x,torch.ctypes"),
        (from_function("torchvision.ctypes.cdll.x"), "the source_fn_stack "),
        (from_function("torch.nn.functional.torch.ctypes.cdll.x"), "the source_fn_stack "),
        (from_function("torch.nnx.functional.torch.ctypes.cdll.x"), "the source_fn_stack "),
        (from_function("#extension:x"), "the source_fn_stack "),
        pytest.param(
            in_model(lambda m: nodes(m)[0].update(name=QUOTE)),
            f"the name {QUOTE!r}",
            marks=pytest.mark.skipif("name" not in schema.Node.__annotations__, reason="torch 2.9 reads no such name"),
        ),
        (in_model(lambda m: nodes(m)[0]["inputs"][0].update(name=QUOTE)), f"the name {QUOTE!r}"),
        (in_model(lambda m: call(m).update(forward_arg_names=[QUOTE])), f"the name {QUOTE!r}"),
        (in_model(lambda m: call(m).update(in_spec=tree({"type": "collections.defaultdict"}))), "the structure "),
        (
            in_model(
                lambda m: call(m).update(out_spec=tree({"type": "builtins.dict", "context": json.dumps([QUOTE])}))
            ),
            "the structure ",
        ),
        (
            in_model(
                lambda m: call(m).update(
                    in_spec=tree({"type": "builtins.dict", "context": '{"__enum__": 1, "fqn": "antigravity:x"}'})
                )
            ),
            "the structure ",
        ),
        (
            in_model(
                lambda m: m["graph_module"]["signature"]["input_specs"][0]["parameter"].update(parameter_name='a".b')
            ),
            "the name 'a\".b'",
        ),
        (
            in_model(lambda m: m["graph_module"]["graph"]["sym_int_values"].update({QUOTE: {"as_int": 1}})),
            f"the name {QUOTE!r}",
        ),
        (in_model(lambda m: m.update(guards_code=["print(1)"])), "the guard 'print(1)'"),
        (in_model(lambda m: m.update(guards_code=["L['x'].__class__"])), "the guard \"L['x'].__class__\""),
        (
            in_model(lambda m: sizes(m).__setitem__(0, {"as_expr": {"expr_str": "s77.__class__", "hint": None}})),
            "the expression 's77.__class__'",
        ),
        (
            in_model(lambda m: sizes(m).__setitem__(0, {"as_expr": {"expr_str": "s77", "hint": {"as_int": "2"}}})),
            "'2' as the value of SymExprHint.as_int",
        ),
        (in_model(lambda m: sizes(m).__setitem__(0, {})), "0 values in place of one SymInt"),
        (
            in_model(lambda m: next(iter(m["range_constraints"].values())).update(min_val="0")),
            "'0' as the value of RangeConstraint",
        ),
        (in_model(lambda m: m["graph_module"]["graph"].update(nodes="x")), "'x' as the value of Graph.nodes"),
        (
            lambda e: edit(e, WEIGHTS, lambda c: first_weight(c).update(path_name="../weight_0")),
            "the path '../weight_0'",
        ),
    ],
)
def test_what_is_not_known_to_be_harmless_is_refused(
    change: Callable[[Entries], Entries], what: str, entries: Entries, tmp_path: Path
) -> None:
    path = write(tmp_path / "m.pt2", change(entries))
    with pytest.raises(ValueError, match="torch could run code") as caught:
        refuse_code(str(path))
    assert f"it has {what}" in str(caught.value)


def test_conditions_on_sizes_pass(entries: Entries, tmp_path: Path) -> None:
    guards = ["L['images'].size()[0] <= 2 * L['images'].size()[3]", "L['args'][0].stride()[1] == 1"]
    refuse_code(str(write(tmp_path / "m.pt2", in_model(lambda m: m.update(guards_code=guards))(entries))))


@pytest.mark.parametrize(
    "name", ["permute", "_operator.iadd", "torch.nn.modules.conv.Conv2d", "torch._C._nn.gelu", "torchvision.ops.misc.A"]
)
def test_functions_that_nodes_come_from_pass(name: str, entries: Entries, tmp_path: Path) -> None:
    refuse_code(str(write(tmp_path / "m.pt2", from_function(name)(entries))))


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")  # torch says so once in a process
def test_the_origin_of_nodes_is_dropped(entries: Entries, tmp_path: Path) -> None:
    program = torch.export.load(write(tmp_path / "m.pt2", from_function("torch.nn.Linear")(entries)))
    assert any("source_fn_stack" in node.meta for node in program.graph.nodes)
    drop_origins(program)
    assert all(set(node.meta) == {"val"} for node in program.graph.nodes)
    assert program.module()(torch.zeros(5, 3, 4, 4)).shape == (5, 2)


def test_sound_files_pass(models: Models, entries: Entries, tmp_path: Path) -> None:
    refuse_code(str(write(tmp_path / "m.pt2", entries)))
    for path in (models.pt2, models.folded_pt2):
        refuse_code(str(path))


@pytest.mark.parametrize(
    ("text", "sound"),
    [
        ("s77", True),
        ("Symbol('s77', positive=True, integer=True)", True),
        ("Mul(Integer(64), Symbol('s77', positive=True, integer=True))", True),
        ("Mul(Float('0.5', precision=53), Symbol('zuf0'))", True),
        ("FloorDiv(2*s0 + 1, Max(2, u1)) + 1.5", True),
        ("__import__('os')", False),
        ("exec(s0)", False),
        ("s0.real", False),
        ("1.real", False),
        ("Symbol('s0', positive=exec)", False),
        ("Float('1', precision=s0)", False),
        ("'text'", False),
        ("[s0]", False),
        ("1" * 50_000 + "!", False),
    ],
)
def test_expressions_are_numbers_symbols_and_known_functions(text: str, sound: bool) -> None:
    assert _is_expression(text) is sound
