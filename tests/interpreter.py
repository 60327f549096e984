"""Changes of Triton's interpreter for these tests: it does less work again and again."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable

import numpy as np
import triton.language as tl
from triton._utils import validate_block_shape
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter


def install() -> None:
    """Change the interpreter of this process."""
    _refuse_ranges_that_do_not_compile()
    _call_builtins_directly()
    _patch_the_language_once()
    _look_types_up_once()
    _make_shapes_once()
    _skip_conversions_to_the_same_type()
    _do_not_compute_overflow()


def _refuse_ranges_that_do_not_compile() -> None:
    """Let the interpreter refuse ranges that the compiler refuses."""
    make = interpreter.InterpreterBuilder.create_make_range

    def checked(self: object, ret_ty: object, start: int, stop: int) -> object:
        if (stop - start).bit_count() != 1:
            raise ValueError(f"arange({start}, {stop}): its length must be a power of two")
        return make(self, ret_ty, start, stop)

    interpreter.InterpreterBuilder.create_make_range = checked


def _call_builtins_directly() -> None:
    """Bind the interpreter to Triton's functions without a check and a copy of each call."""

    def patch(
        owner: object, name: str, member: Callable[..., object], _: object, scope: object
    ) -> None:
        function = getattr(member, "__wrapped__", member)

        def call(*args: object, **options: object) -> object:
            options["_semantic"] = interpreter.interpreter_semantic
            return function(*args, **options)

        scope.set_attr(owner, name, call)

    interpreter._patch_attr = patch


def _patch_the_language_once() -> None:
    """Replace Triton's functions by the interpreter's for good, as nothing compiles here.

    Each launch and each call of a jitted function replaced them all: a third of the time.
    """
    patch = interpreter._patch_lang
    replaced: set[str] = set()

    @functools.cache
    def modules(fn: Callable[..., object]) -> frozenset[str]:
        languages = (tl, tl.core)
        used = fn.__globals__.values()
        return frozenset(one.__name__ for one in languages if any(one is value for value in used))

    def patch_once(fn: Callable[..., object]) -> interpreter._LangPatchScope:
        if not (modules(fn) and modules(fn) <= replaced):
            patch(fn)
            replaced.update(modules(fn))
        return interpreter._LangPatchScope()  # restores nothing

    interpreter._patch_lang = patch_once


def _look_types_up_once() -> None:
    """Cache NumPy's type of each scalar type. Each lookup built the table again."""
    look_up = functools.cache(interpreter._get_np_dtype)

    def numpy_type(dtype: tl.dtype) -> np.dtype:
        element = dtype.element_ty if isinstance(dtype, tl.block_type) else dtype
        return np.dtype(np.uint64) if isinstance(element, tl.pointer_type) else look_up(element)

    interpreter._get_np_dtype = numpy_type


def _make_shapes_once() -> None:
    """Share the shapes of tensors and of their types, which do not change."""

    @functools.lru_cache(maxsize=None, typed=True)
    def type_shape(*sizes: int) -> tuple[tl.tuple, int]:
        return tl.tuple(sizes), validate_block_shape(sizes)

    def make_block_type(self: tl.block_type, element_ty: tl.dtype, shape: Iterable) -> None:
        self.element_ty = element_ty
        sizes = [one.value if isinstance(one, tl.constexpr) else one for one in shape]
        if not sizes:
            raise TypeError("0d block_type is forbidden")
        self.shape, self.numel = type_shape(*sizes)

    @functools.cache
    def tensor_shape(sizes: tuple[int, ...]) -> tuple[tl.tuple, tl.constexpr]:
        return tl.tuple([tl.constexpr(one) for one in sizes]), tl.constexpr(math.prod(sizes))

    def make_tensor(self: tl.tensor, handle: object, type: tl.dtype) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = tensor_shape(tuple(type.shape) if type.is_block() else ())

    tl.block_type.__init__ = make_block_type
    tl.block_type.name = property(lambda self: f"<{self.shape}, {self.element_ty}>")
    tl.tensor.__init__ = make_tensor


def _skip_conversions_to_the_same_type() -> None:
    """Take operands of equal types and shapes as they are, and convert each constant once."""
    convert = TritonSemantic.binary_op_type_checking_impl
    broadcast = TritonSemantic.broadcast_impl_value
    constants: dict[tuple, tl.tensor] = {}

    def convert_others(
        self: TritonSemantic, lhs: object, rhs: object, *given: bool, **options: bool
    ) -> tuple[tl.tensor, tl.tensor]:
        divides = len(given) > 3 or options
        if type(lhs) is not tl.tensor or divides or lhs.dtype.is_ptr():
            return convert(self, lhs, rhs, *given, **options)
        if type(rhs) is tl.tensor:
            if lhs.dtype is rhs.dtype:
                return broadcast_others(self, lhs, rhs)
            return convert(self, lhs, rhs, *given, **options)
        # Shapes are shared and kept, so that their numbers are theirs alone.
        key = (lhs.dtype.name, id(lhs.shape), type(rhs), rhs, given)
        constant = constants.get(key)
        if constant is None:
            same, constant = convert(self, lhs, rhs, *given, **options)
            if same is not lhs:
                return same, constant
            constants[key] = constant
        return lhs, constant

    def broadcast_others(
        self: TritonSemantic, lhs: tl.tensor, rhs: tl.tensor
    ) -> tuple[tl.tensor, tl.tensor]:
        if lhs.shape is rhs.shape:
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    TritonSemantic.binary_op_type_checking_impl = convert_others
    TritonSemantic.broadcast_impl_value = broadcast_others


def _do_not_compute_overflow() -> None:
    """Skip results in 64 bits, which are for an assertion that only debugging turns on."""
    TritonSemantic.binary_op_sanitize_overflow_impl = lambda *_: None
