"""Runs operations of Triton's interpreter without looking at types: imported by quick_interpreter.py.

What an operation on tensors does to their arrays depends on the types of its operands and on numbers alone. So the
first call with some types records what the interpreter asks of its builder, and later calls run the same functions of
numpy on other arrays. An operation that looks at values, or returns anything but a tensor, runs as before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

__all__ = ["check_overflow", "form_of", "recorded"]

_Run = Callable[..., Any]
_forms: dict[tuple[Any, ...], object] = {}
_number_types = frozenset((int, float, bool, str, type(None)))
_lowest, _highest = np.minimum.reduce, np.maximum.reduce
_EXACT = {"add": np.add, "sub": np.subtract, "mul": np.multiply}


_STEPS = ("binary_op", "ternary_op", "unary_op", "cast_impl")
_LOADS = ("create_load", "create_masked_load")
_EFFECTS = ("create_masked_store", "create_get_program_id", "create_get_num_programs")


class _LooksAtValuesError(Exception):
    """An operation's steps depend on the values of its operands, or are none that `_Recorder` knows."""


def form_of(handle: Any, type: Any) -> object:
    """The same object for all tensors of which an operation takes the same steps: nothing differs but their values."""
    array = handle.data
    key = type.name, getattr(type, "sizes", None), handle.dtype.name, array.dtype, array.shape
    return _forms.setdefault(key, object())


def check_overflow(builder: Any, a: Any, b: Any, operation: str) -> None:
    """Raise if the result of an operation on two tensors of whole numbers does not fit, as the interpreter does."""
    scalar = a.type.scalar
    exact, least, most = _EXACT[operation], scalar.get_int_min_value(), scalar.get_int_max_value()
    text = f"int{scalar.int_bitwidth} overflow detected for operation {operation}"
    _check(a.handle.data, b.handle.data, exact, least, most, text)
    if isinstance(builder, _Recorder):
        builder.check(a.handle, b.handle, exact, least, most, text)


def _check(a: Any, b: Any, exact: np.ufunc, least: int, most: int, text: str) -> None:
    wide = exact(a, b, dtype=np.int64)
    assert least <= _lowest(wide, None) and _highest(wide, None) <= most, text


class _Recorder(InterpreterBuilder):  # type: ignore[misc]
    """A builder that computes as the interpreter's does, and notes what it was asked for."""

    def __init__(self, arguments: Sequence[Any]) -> None:
        super().__init__()
        actual = interpreter.interpreter_builder
        self.grid_dim, self.grid_idx = actual.grid_dim, actual.grid_idx
        self.names: dict[int, str] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.same: dict[str, Any] = {}
        """For an array that repeats another one's values: that one."""
        self.steps: list[tuple[str | None, str, list[Any]]] = []
        self.values: dict[str, Any] = {}
        self.kept: list[Any] = []  # so that no other handle gets the id of one
        for place, argument in enumerate(arguments):
            if isinstance(argument, tl.tensor):
                name = f"x{place}"
                self.names[id(argument.handle)] = name
                self.shapes[name] = argument.handle.data.shape

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name.startswith("create_") or name in _STEPS:
            return lambda *arguments: self.run(name, found, arguments)
        return found

    def run(self, name: str, method: _Run, arguments: tuple[Any, ...]) -> Any:
        before = len(self.steps)
        result = method(*arguments)
        handles = [x for x in arguments if isinstance(x, TensorHandle)]
        if isinstance(result, TensorHandle) and id(result) in self.names:
            return result  # a step that this one consists of has been noted
        if result is None and len(self.steps) > before:
            return result
        if name not in _EFFECTS + _LOADS and not any(id(x) in self.names for x in handles):
            return result  # a constant
        self.note(name, arguments, result)
        return result

    def array(self, handle: Any) -> str:
        """The name of a handle's array in the recorded function."""
        if id(handle) not in self.names:
            self.kept.append(handle)
            self.names[id(handle)] = self.constant(handle.data)
            self.shapes[self.names[id(handle)]] = handle.data.shape
        return self.names[id(handle)]

    def handle(self, handle: Any) -> str:
        return f"TensorHandle({self.array(handle)}, {self.constant(handle.dtype)})"

    def constant(self, value: Any) -> str:
        name = f"c{len(self.values)}"
        self.values[name] = value
        return name

    def operands(self, handles: Sequence[Any], shape: tuple[int, ...]) -> list[str]:
        """The arrays of an operation on each element, which repeats the smaller ones by itself."""
        arrays = [self.array(handle) for handle in handles]
        plain = [self.same.get(array, array) for array in arrays]
        return plain if np.broadcast_shapes(*(self.shapes[array] for array in plain)) == shape else arrays

    def note(self, name: str, arguments: tuple[Any, ...], result: Any) -> None:
        shape = result.data.shape if isinstance(result, TensorHandle) else ()
        if name in ("binary_op", "ternary_op", "unary_op"):
            *handles, operation = arguments
            arrays = self.operands(handles, shape)
            text = f"{self.constant(operation)}({', '.join(arrays)})"
            if operation(*(handle.data for handle in handles)).dtype != result.data.dtype:
                text += f".astype({self.constant(result.data.dtype)})"
        elif name == "cast_impl" and not _is_custom(*arguments):
            arrays = [self.array(arguments[0])]
            text = f"{arrays[0]}.astype({self.constant(result.data.dtype)})"
        elif name in ("create_bitcast", "create_int_to_ptr", "create_ptr_to_int"):
            arrays = [self.array(arguments[0])]
            text = f"{arrays[0]}.view({self.constant(result.data.dtype)})"
        elif name == "create_addptr":
            arrays = self.operands(arguments, shape)
            bytes_each = max(1, arguments[0].get_element_ty().primitive_bitwidth // 8)
            width = self.constant(np.uint64(bytes_each))
            offset = f"{arrays[1]}.astype(uint64)" + ("" if bytes_each == 1 else f" * {width}")
            text = f"{arrays[0]} + {offset}"
        elif name in ("create_expand_dims", "create_reshape"):
            arrays = [self.array(arguments[0])]
            text = f"{arrays[0]}.reshape({shape})"
        elif name in ("create_broadcast", "create_splat"):
            source = arguments[-1 if name == "create_splat" else 0]
            arrays = [self.array(source)]
            text = f"broadcast_to({arrays[0]}, {shape})"
            if source.data.dtype != result.data.dtype:
                text += f".astype({self.constant(result.data.dtype)})"
        elif name == "create_idiv":
            arrays = self.operands(arguments, shape)
            text = "({0} - fmod({0}, {1})) // {1}".format(*arrays)
        elif name == "create_masked_load":
            pointers, mask, other = arguments[:3]
            arrays = [self.array(pointers), self.array(mask)]
            none = np.zeros(pointers.data.shape, result.data.dtype)
            arrays.append(self.constant(none) if other is None else self.array(other))
            text = f"load({', '.join(arrays)}, {self.constant(result.data.dtype)})"
        elif name == "create_masked_store":
            arrays = [self.array(handle) for handle in arguments[:3]]
            text = f"store({', '.join(arrays)})"
        else:
            arrays = [self.array(x) for x in arguments if isinstance(x, TensorHandle)]
            given = [self.handle(x) if isinstance(x, TensorHandle) else self.constant(x) for x in arguments]
            text = f"builder.{name}({', '.join(given)})" + ("" if result is None else ".data")
        target = None
        if isinstance(result, TensorHandle):
            target = f"r{len(self.steps)}"
            self.names[id(result)] = target
            self.shapes[target] = shape
            self.kept.append(result)
            if name in ("create_broadcast", "create_splat") and ".astype" not in text:
                self.same[target] = self.same.get(arrays[0], arrays[0])
        self.steps.append((target, text, arrays))

    def check(self, a: Any, b: Any, *how: Any) -> None:
        """Note a check for a result that does not fit."""
        if id(a) in self.names or id(b) in self.names:
            arrays = self.operands((a, b), np.broadcast_shapes(a.data.shape, b.data.shape))
            self.steps.append((None, f"check({', '.join(arrays)}, {', '.join(map(self.constant, how))})", arrays))


def _is_custom(source: Any, target: Any) -> bool:
    """Whether the interpreter casts in its own way."""
    pair: set[str] = {source.dtype.scalar.name, target.scalar.name}
    return pair == {"bf16", "fp32"}


def _function(recorder: _Recorder, arguments: Sequence[Any], result: Any) -> _Run:
    """The recorded steps as a function of the operation's arguments."""
    names = ", ".join(f"a{i}" for i in range(len(arguments)))
    space: dict[str, Any] = {
        **recorder.values, "check": _check, "builder": interpreter.interpreter_builder,
        "new": object.__new__, "tensor": tl.tensor, "TensorHandle": TensorHandle, "result": result,
        "broadcast_to": np.broadcast_to, "uint64": np.uint64, "fmod": np.fmod,
        "load": interpreter._interpreter.load, "store": interpreter._interpreter.store,
    }  # fmt: skip
    own = next((f"a{i}" for i, argument in enumerate(arguments) if argument is result), None)
    if own is not None and all(target is not None for target, _, _ in recorder.steps):
        lines = [f"return {own}"]
    elif not isinstance(result, tl.tensor):
        raise _LooksAtValuesError
    else:
        final = None if result.handle is None else recorder.array(result.handle)
        needed, kept = {final}, list[str]()
        for target, text, arrays in reversed(recorder.steps):
            if target is None or target in needed:
                needed.update(arrays)
                kept.append(text if target is None else f"{target} = {text}")
        lines = [f"x{i} = a{i}.handle.data" for i in range(len(arguments)) if f"x{i}" in needed]
        lines += reversed(kept)
        if final is None:
            lines.append("return result")
        else:
            space.update(recorder.values, type_=result.type, scalar=result.dtype, shape=result.shape)
            space.update(numel=result.numel, dtype=result.handle.dtype, form=result.form)
            lines += ["t, h = new(tensor), new(TensorHandle)", f"h.data, h.dtype, h.attr = {final}, dtype, {{}}"]
            lines.append("t.handle, t.type, t.dtype, t.shape, t.numel, t.form = h, type_, scalar, shape, numel, form")
            lines.append("return t")
    exec(f"def function({names}):\n    " + "\n    ".join(lines), space)
    function: _Run = space["function"]
    return function


def _key(value: Any) -> Any:
    """What an operation may do differently because of an argument that is no tensor."""
    kind = value.__class__
    if kind in _number_types:
        return kind, repr(value) if kind is float else value  # -0.0 equals 0.0
    if kind is tl.constexpr:
        return tl.constexpr, _key(value.value)
    if isinstance(value, tl.dtype):
        return tl.dtype, value.name, getattr(value, "sizes", None)
    if kind is slice and value == slice(None):
        return slice
    if kind in (tuple, list, tl.tuple):
        return kind, tuple(_key(x) for x in value)
    raise _LooksAtValuesError


_recording: list[Any] = []


def note_a_look(tensor: Any) -> None:
    """To be called where an operation may look at a value."""
    if _recording and id(tensor.handle) in _recording[-1].builder.names:
        _recording[-1].looked = True


def recorded(member: _Run, semantic: Any) -> _Run:
    """The operation `member` of triton.language, which runs its recorded steps where there are some."""
    programs: dict[Any, _Run | None] = {}
    tensor = tl.tensor

    def call(*arguments: Any, **options: Any) -> Any:
        if _recording:
            options["_semantic"] = _recording[-1]
            return member(*arguments, **options)
        values: tuple[Any, ...] = arguments
        if options:
            options.pop("_semantic", None)
            values = (*arguments, *options.values())
        try:
            key = tuple([x.form if x.__class__ is tensor else x if x.__class__ is int else _key(x) for x in values])
        except _LooksAtValuesError:
            return member(*arguments, **options, _semantic=semantic)
        if options:
            key = (*key, *options)
        program = programs.get(key)
        if program is not None:
            return program(*values)
        if key in programs:
            return member(*arguments, **options, _semantic=semantic)
        return record(key, arguments, options, values)

    def record(key: Any, arguments: tuple[Any, ...], options: dict[str, Any], values: tuple[Any, ...]) -> Any:
        recorder = _Recorder(values)
        recording = TritonSemantic(recorder)
        recording.looked = False
        _recording.append(recording)
        try:
            result = member(*arguments, **options, _semantic=recording)
        finally:
            _recording.pop()
        programs[key] = None
        if not recording.looked:
            with suppress(_LooksAtValuesError):
                programs[key] = _function(recorder, values, result)
        return result

    return call
