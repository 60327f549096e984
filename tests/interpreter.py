"""Changes of Triton's interpreter for these tests: it does less work again and again."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import triton.language as tl
from triton.runtime import interpreter


def refuse_ranges_that_do_not_compile() -> None:
    """Let the interpreter refuse ranges that the compiler refuses."""
    make = interpreter.InterpreterBuilder.create_make_range

    def checked(self: object, ret_ty: object, start: int, stop: int) -> object:
        if (stop - start).bit_count() != 1:
            raise ValueError(f"arange({start}, {stop}): its length must be a power of two")
        return make(self, ret_ty, start, stop)

    interpreter.InterpreterBuilder.create_make_range = checked


def patch_the_language_once_per_launch() -> None:
    """Skip the replacement of Triton's functions by the interpreter's where they are replaced.

    It took a third of the time: each call of a jitted function repeated what the launch had done.
    """
    patch = interpreter._patch_lang
    replaced: set[str] = set()  # modules of the running launch

    @functools.cache
    def modules(fn: Callable[..., object]) -> frozenset[str]:
        languages = (tl, tl.core)
        used = fn.__globals__.values()
        return frozenset(one.__name__ for one in languages if any(one is value for value in used))

    def patch_once(fn: Callable[..., object]) -> interpreter._LangPatchScope:
        if modules(fn) and modules(fn) <= replaced:
            return interpreter._LangPatchScope()
        scope = patch(fn)
        replaced.update(modules(fn))
        restore = scope.restore

        def end_launch() -> None:
            restore()
            replaced.clear()

        scope.restore = end_launch  # only a launch calls it
        return scope

    interpreter._patch_lang = patch_once


def look_types_up_once() -> None:
    """Cache NumPy's type of each scalar type. Each lookup built the table again."""
    look_up = functools.cache(interpreter._get_np_dtype)

    def numpy_type(dtype: tl.dtype) -> np.dtype:
        element = dtype.element_ty if isinstance(dtype, tl.block_type) else dtype
        return np.dtype(np.uint64) if isinstance(element, tl.pointer_type) else look_up(element)

    interpreter._get_np_dtype = numpy_type
