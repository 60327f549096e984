"""Parts of the kernels of gated delta nets."""

# mypy: allow-incomplete-defs
# Kernels annotate constexpr parameters only.

from __future__ import annotations

import triton
import triton.language as tl

from toolkit.kernels.recurrent import EPS

UNIT_EPS = tl.constexpr(EPS)
_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def next_row(system, inverse, i, COUNT: tl.constexpr):
    """Solve row `i` of (1 + system)⁻¹ - 1, once those above it are solved."""
    is_row = (tl.arange(0, COUNT) == i)[:, None]
    line = -tl.sum(tl.where(is_row, system, 0.0), 0)
    line += tl.sum(line[:, None] * inverse, 0)
    return tl.where(is_row, line[None, :], inverse)


@triton.jit
def decay_of(a, a_log, time):
    """Return the logarithm of a state's decay."""
    x = a + time
    return -tl.exp(a_log) * tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(x)))


@triton.jit
def dot(a, b, EXACT: tl.constexpr):
    """Return a @ b in fp32. The interpreter multiplies bits of bf16, so they are widened."""
    if _INTERPRETED:
        out = tl.dot(a.to(tl.float32), b.to(tl.float32))
    else:
        out = tl.dot(a, b, input_precision="tf32x3" if EXACT else "tf32")
    return out
