"""Makes Triton's interpreter several times as fast: imported by the scripts that run kernels in it.

The interpreter of Triton 3.6 spends nearly all of its time on values that never change: it looks through all of
triton.language at each call of one kernel function by another, and it builds the same types, shapes and tables anew for
each operation on a tensor. What is replaced here computes the same values, each of them once.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpretedFunction, InterpreterBuilder, InterpreterError

from gpuflow.execute.kernels import color, resample, warp
from tests.execute.kernels.recorded import check_overflow, form_of, note_a_look, recorded

__all__ = ["use_few_slices", "use_large_tiles"]

_replaced: list[Any] = []
_blocks: dict[tuple[str, tuple[int, ...]], dict[str, Any]] = {}
_numpy_types: dict[str, Any] = {}

_common_types: dict[tuple[Any, ...], Any] = {}
_constants: dict[tuple[Any, ...], Any] = {}

_new_block = tl.block_type.__init__
_numpy_type = interpreter._get_np_dtype
_broadcast_any = TritonSemantic.broadcast_impl_value
_computation_type = TritonSemantic.computation_type_impl
_operands_any = TritonSemantic.binary_op_type_checking_impl
_check_overflow_any = TritonSemantic.binary_op_sanitize_overflow_impl
_patch_lang_tensor = interpreter._patch_lang_tensor
_to_tensor_any = TritonSemantic.to_tensor
_splat_any = InterpreterBuilder.create_splat
_operations: dict[Any, list[tuple[str, Any]]] = {}
_equal = tl.dtype.__eq__
_NO_SHAPE, _ONE = tl.tuple([]), tl.constexpr(1)


def use_large_tiles() -> None:
    """Have each program of the geometric kernels make 32 by 32 pixels of a result: it takes no longer than for a few.

    For scripts that test what uses the kernels, and for kernels' own tests once they have run the tiles that they have.
    """
    for kernel in (resample, warp):
        vars(kernel).update(ROWS=32, COLUMNS=32)


def use_few_slices() -> None:
    """Have two programs measure an image's colours, in several steps: a small image has nothing to do for more."""
    vars(color).update(_SLICES=2)


def _call(self: Any, *arguments: Any, **options: Any) -> Any:
    """As InterpretedFunction.__call__, but without looking through the language each time.

    The launch of the outer function has replaced what the interpreter replaces; the functions of triton.language itself
    need that once.
    """
    if not _replaced and tl not in self.fn.__globals__.values():
        _replaced.append(interpreter._patch_lang(self.fn))
    try:
        return self.rewrite()(*arguments, **options)
    except Exception as error:
        raise InterpreterError(repr(error)) from error


def _block(self: Any, element_ty: Any, shape: Any) -> None:
    """As block_type.__init__; also the shape as plain numbers, and what a tensor of this type takes from it."""
    sizes = tuple(size.value if isinstance(size, tl.constexpr) else size for size in shape)
    known = _blocks.get((element_ty.name, sizes))
    if known is None:
        _new_block(self, element_ty, shape)
        tensor_shape = tl.tuple([tl.constexpr(size) for size in sizes])
        more = {"sizes": sizes, "tensor_shape": tensor_shape, "tensor_numel": tl.constexpr(self.numel)}
        known = {**vars(self), **more}
        _blocks[element_ty.name, sizes] = known
    vars(self).update(known)


def _tensor(self: Any, handle: Any, type: Any) -> None:
    """As tensor.__init__."""
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = (type.tensor_shape, type.tensor_numel) if type.is_block() else (_NO_SHAPE, _ONE)
    self.form = None if handle is None else form_of(handle, type)


def _to_ir(self: Any, builder: Any) -> Any:
    """As block_type.to_ir: the interpreter's builder gives a type back as it is."""
    return self


def _same(self: Any, other: Any) -> bool:
    """As dtype.__eq__."""
    return self is other or _equal(self, other)


def _broadcast(self: Any, lhs: Any, rhs: Any) -> Any:
    """As TritonSemantic.broadcast_impl_value."""
    if lhs.type.is_block() and rhs.type.is_block() and lhs.type.sizes == rhs.type.sizes:
        return lhs, rhs
    return _broadcast_any(self, lhs, rhs)


def _operands(
    self: Any,
    lhs: Any,
    rhs: Any,
    allow_lhs_ptr: bool = False,
    allow_rhs_ptr: bool = False,
    arithmetic_check: bool = True,
    div_or_mod: bool = False,
) -> Any:
    """As TritonSemantic.binary_op_type_checking_impl: equal types stay, and a number becomes a tensor once."""
    if arithmetic_check:
        if isinstance(lhs, tl.tensor) and isinstance(rhs, tl.tensor):
            if lhs.dtype is rhs.dtype and not div_or_mod and not lhs.dtype.is_ptr():
                return (lhs, rhs) if _form(lhs) == _form(rhs) else self.broadcast_impl_value(lhs, rhs)
        elif isinstance(lhs, tl.tensor) and isinstance(rhs, (int, float)) and not lhs.dtype.is_ptr():
            constant = _constant(self, lhs, rhs, div_or_mod, first=True)
            if constant is not None:
                return lhs, constant
        elif isinstance(rhs, tl.tensor) and isinstance(lhs, (int, float)) and not rhs.dtype.is_ptr():
            constant = _constant(self, rhs, lhs, div_or_mod, first=False)
            if constant is not None:
                return constant, rhs
    return _operands_any(self, lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)


def _form(tensor: Any) -> tuple[int, ...]:
    """The shape of a tensor in plain numbers, () for a scalar."""
    sizes: tuple[int, ...] = tensor.type.sizes if tensor.type.is_block() else ()
    return sizes


def _constant(self: Any, tensor: Any, number: float, div_or_mod: bool, *, first: bool) -> Any:
    """A number as the tensor that an operation with `tensor` takes, or None if the operation casts `tensor`, too.

    first: whether `tensor` is the operation's first operand.
    """
    key = type(number), str(number), tensor.dtype.name, _form(tensor), div_or_mod, first  # -0.0 equals 0.0
    if key not in _constants:
        pair = (tensor, number) if first else (number, tensor)
        made = _operands_any(self, *pair, arithmetic_check=True, div_or_mod=div_or_mod)
        cast, constant = made if first else reversed(made)
        _constants[key] = constant if cast is tensor else None
    return _constants[key]


def _sanitize_overflow(self: Any, lhs: Any, rhs: Any, binary_op: Any) -> None:
    """As TritonSemantic.binary_op_sanitize_overflow_impl."""
    if 8 <= lhs.type.scalar.int_bitwidth < 64:
        check_overflow(self.builder, lhs, rhs, binary_op.__name__)
    else:
        _check_overflow_any(self, lhs, rhs, binary_op)


def _common_type(self: Any, a_ty: Any, a_is_scalar: bool, b_ty: Any, b_is_scalar: bool, div_or_mod: bool) -> Any:
    """As TritonSemantic.computation_type_impl."""
    key = (a_ty.name, a_is_scalar, b_ty.name, b_is_scalar, div_or_mod)
    if key not in _common_types:
        _common_types[key] = _computation_type(self, a_ty, a_is_scalar, b_ty, b_is_scalar, div_or_mod)
    return _common_types[key]


def _get_np_dtype(tt_dtype: Any) -> Any:
    """As the interpreter's function of this name."""
    element = tt_dtype.element_ty if isinstance(tt_dtype, tl.block_type) else tt_dtype
    if element.name not in _numpy_types:
        _numpy_types[element.name] = _numpy_type(element)
    return _numpy_types[element.name]


def _patch_builtin(package: Any, builder: Any, scope: Any) -> None:
    """As the interpreter's function of this name."""
    if package not in _operations:
        semantic = TritonSemantic(builder)
        members = [(name, member) for name, member in inspect.getmembers(package) if tl.core.is_builtin(member)]
        _operations[package] = [(name, recorded(member, semantic)) for name, member in members]
    for name, operation in _operations[package]:
        scope.set_attr(package, name, operation)


def _patch_tensor(tensor: Any, scope: Any) -> None:
    """As the interpreter's _patch_lang_tensor; says when an operation looks at a value."""
    _patch_lang_tensor(tensor, scope)
    for name in ("__bool__", "__index__"):
        scope.set_attr(tensor, name, _looking(getattr(tensor, name)))


def _looking(method: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def look(self: Any) -> Any:
        if self.handle.data.size == 1:
            note_a_look(self)
        return method(self)

    return look


def _splat(self: Any, type_: Any, value: Any) -> Any:
    """As InterpreterBuilder.create_splat, but truth values stay what they are: Triton 3.9 refuses a mask of numbers."""
    made = _splat_any(self, type_, value)
    if value.data.dtype == np.bool_:
        made.data = made.data.astype(np.bool_)
    return made


def _to_tensor(self: Any, x: Any, check_type: bool = True) -> Any:
    """As TritonSemantic.to_tensor."""
    return x if x.__class__ is tl.tensor else _to_tensor_any(self, x, check_type)


InterpretedFunction.__call__ = _call
tl.block_type.__init__ = _block
tl.block_type.to_ir = _to_ir
tl.tensor.__init__ = _tensor
tl.dtype.__eq__ = _same
TritonSemantic.broadcast_impl_value = _broadcast
TritonSemantic.binary_op_type_checking_impl = _operands
TritonSemantic.binary_op_sanitize_overflow_impl = _sanitize_overflow
TritonSemantic.computation_type_impl = _common_type
interpreter._get_np_dtype = _get_np_dtype
InterpreterBuilder.create_splat = _splat
interpreter._patch_builtin = _patch_builtin
interpreter._patch_lang_tensor = _patch_tensor
TritonSemantic.to_tensor = _to_tensor
