"""Activation functions, alone or as a gate, and the soft cap of logits."""

# mypy: allow-incomplete-defs
# Kernels annotate constexpr parameters only.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .pdl import release, supported, wait

KINDS = ("silu", "gelu", "gelu_tanh", "gelu_quick", "relu", "relu2")
"""`gelu` is exact. `gelu_tanh` and `gelu_quick`, x * sigmoid(1.702 x), are its approximations
(Hendrycks & Gimpel, arXiv:1606.08415). `relu2` is relu squared (So et al., arXiv:2109.08668)."""

CHUNK = 1024
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


def gated_activation(gate_up: Tensor, kind: str, out: Tensor | None = None) -> Tensor:
    """Return act(gate) * up for rows gate | up (Shazeer, arXiv:2002.05202), computed in fp32.

    gate_up: `[num_tokens, 2 * size]`, contiguous. Returns `[num_tokens, size]`. Raises ValueError
    for a kind that is not in KINDS."""
    return _activate(gate_up, kind, gate_up.shape[-1] // 2, True, out)


def activation(x: Tensor, kind: str, out: Tensor | None = None) -> Tensor:
    """Return act(x), computed in fp32. x: contiguous. Raises ValueError for a kind not in KINDS."""
    return _activate(x, kind, x.shape[-1], False, out)


def soft_cap_(logits: Tensor, cap: float) -> None:
    """Replace logits by cap * tanh(logits / cap), in fp32 (Gemma 2, arXiv:2408.00118).

    logits: `[n, vocab_size]`, whose rows may be apart, as a view of padded ones. Raises ValueError
    for rows that are not contiguous."""
    num_rows, size = logits.shape
    if logits.stride(1) != 1:
        raise ValueError("each row of the logits must be contiguous")
    pdl = supported(logits.device)
    _soft_cap_kernel[(num_rows, -(-size // CHUNK))](
        logits,
        logits.stride(0),
        size,
        cap,
        CHUNK=CHUNK,
        PDL=pdl,
        launch_pdl=pdl,
        num_warps=4,
    )


def gate_rows(x: Tensor, gate: Tensor) -> None:
    """Multiply x [rows, size] by sigmoid(gate), in place. Rows of `gate` may be apart."""
    _multiply(x, gate, is_logit=True)


def multiply_rows(x: Tensor, y: Tensor) -> None:
    """Multiply x [rows, size] by y, in place. Rows of `y` may be apart."""
    _multiply(x, y, is_logit=False)


def _multiply(x: Tensor, gate: Tensor, *, is_logit: bool) -> None:
    num_rows, size = x.shape
    pdl = supported(x.device)
    _gate_rows_kernel[(num_rows, -(-size // CHUNK))](
        x,
        gate,
        gate.stride(0),
        size,
        LOGIT=is_logit,
        CHUNK=CHUNK,
        PDL=pdl,
        launch_pdl=pdl,
        num_warps=4,
    )


def add_gated(y: Tensor, shared: Tensor, x: Tensor, gate: Tensor) -> None:
    """Add shared * sigmoid(x · gate) to y, in place: one gate for each row, computed in fp32.

    y, shared: [rows, size]; x: [rows, columns]; gate: [1, columns]."""
    pdl = supported(y.device)
    _add_gated_kernel[(len(y),)](
        y,
        shared,
        x,
        gate,
        y.shape[1],
        x.shape[1],
        CHUNK=CHUNK,
        PDL=pdl,
        launch_pdl=pdl,
        num_warps=4,
    )


def check_kind(kind: str) -> None:
    if kind not in KINDS:
        raise ValueError(f"activation {kind!r} is not one of {', '.join(KINDS)}")


def _activate(x: Tensor, kind: str, size: int, gated: bool, out: Tensor | None) -> Tensor:
    check_kind(kind)
    if not x.is_contiguous():
        raise ValueError("the activation's input must be contiguous")
    if out is None:
        out = torch.empty((*x.shape[:-1], size), dtype=x.dtype, device=x.device)
    pdl = supported(x.device)
    _activation_kernel[(x.numel() // x.shape[-1], -(-size // CHUNK))](
        x,
        out,
        size,
        KIND=kind,
        GATED=gated,
        CHUNK=CHUNK,
        PDL=pdl,
        launch_pdl=pdl,
        num_warps=4,
    )
    return out


@triton.jit
def sigmoid(x):
    """Return 1 / (1 + exp(-x)) for fp32 x, or 0 where it has no normal number.

    Elsewhere the compiler's own code has the same bits. It guards each step against numbers that
    are not normal: 13 instructions instead of 4."""
    if INTERPRETED:
        y = tl.sigmoid(x)
    else:
        y = tl.inline_asm_elementwise(
            """{
            .reg .f32 y;
            mul.f32 y, $1, 0fBFB8AA3B;
            ex2.approx.ftz.f32 y, y;
            add.f32 y, y, 0f3F800000;
            rcp.approx.ftz.f32 $0, y;
            }""",
            "=r,r",
            [x],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    return y


@triton.jit
def apply(x, KIND: tl.constexpr):
    """Return act(x) for fp32 x. 1 + tanh(y) = 2 * sigmoid(2y)."""
    if KIND == "silu":
        y = x * sigmoid(x)
    elif KIND == "gelu":
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif KIND == "gelu_tanh":
        y = x * sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    elif KIND == "gelu_quick":
        y = x * sigmoid(1.702 * x)
    else:
        y = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
        if KIND == "relu2":
            y *= y
    return y


@triton.jit
def gated(gate, up, KIND: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr):
    """Return act(gate) * up in fp32, or with a LIMIT `gates.ClampedSwiGLU`."""
    if LIMIT > 0:
        gate = tl.minimum(gate, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        up = tl.clamp(up, -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        y = gate * sigmoid(ALPHA * gate) * (up + 1.0)
    else:
        y = apply(gate, KIND) * up
    return y


@triton.jit
def _activation_kernel(
    x_ptr,
    out_ptr,
    size,
    KIND: tl.constexpr,
    GATED: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute one chunk of one row."""
    column = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    live = column < size
    row = tl.program_id(0).to(tl.int64)
    wait(PDL)
    release(PDL)
    x_row = x_ptr + row * (2 * size if GATED else size)
    y = apply(tl.load(x_row + column, mask=live).to(tl.float32), KIND)
    if GATED:
        y *= tl.load(x_row + size + column, mask=live).to(tl.float32)
    tl.store(out_ptr + row * size + column, y.to(out_ptr.dtype.element_ty), mask=live)


@triton.jit
def _gate_rows_kernel(
    x_ptr,
    gate_ptr,
    stride,
    size,
    LOGIT: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Gate one chunk of one row."""
    column = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    live = column < size
    row = tl.program_id(0).to(tl.int64)
    own = x_ptr + row * size + column
    wait(PDL)
    release(PDL)
    x = tl.load(own, mask=live, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + row * stride + column, mask=live, other=0.0).to(tl.float32)
    if LOGIT:
        gate = sigmoid(gate)
    tl.store(own, (x * gate).to(x_ptr.dtype.element_ty), mask=live)


@triton.jit
def _add_gated_kernel(
    y_ptr, shared_ptr, x_ptr, gate_ptr, size, columns, CHUNK: tl.constexpr, PDL: tl.constexpr
):
    """Add one row to another, times its gate."""
    row = tl.program_id(0).to(tl.int64)
    offset = tl.arange(0, CHUNK)
    wait(PDL)
    release(PDL)
    sums = tl.zeros((CHUNK,), tl.float32)
    for begin in range(0, columns, CHUNK):
        column = begin + offset
        x = tl.load(x_ptr + row * columns + column, mask=column < columns, other=0.0)
        gate = tl.load(gate_ptr + column, mask=column < columns, other=0.0)
        sums += x.to(tl.float32) * gate.to(tl.float32)
    share = sigmoid(tl.sum(sums, 0))
    for begin in range(0, size, CHUNK):
        column = begin + offset
        own = row * size + column
        y = tl.load(y_ptr + own, mask=column < size, other=0.0).to(tl.float32)
        y += share * tl.load(shared_ptr + own, mask=column < size, other=0.0).to(tl.float32)
        tl.store(y_ptr + own, y.to(y_ptr.dtype.element_ty), mask=column < size)


@triton.jit
def _soft_cap_kernel(logits_ptr, stride, size, cap, CHUNK: tl.constexpr, PDL: tl.constexpr):
    """Cap one chunk of one row. tanh(x) = 2 * sigmoid(2x) - 1."""
    column = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    live = column < size
    row = logits_ptr + tl.program_id(0).to(tl.int64) * stride + column
    wait(PDL)
    release(PDL)
    x = tl.load(row, mask=live, other=0.0).to(tl.float32)
    y = cap * (2.0 * tl.sigmoid(2.0 * x / cap) - 1.0)
    tl.store(row, y.to(logits_ptr.dtype.element_ty), mask=live)
