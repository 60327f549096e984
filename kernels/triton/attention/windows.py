"""Attention among the tokens of short segments: windows of a tower for pictures."""

# mypy: allow-incomplete-defs
# Kernels annotate constexpr parameters only.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..sizes import power_of_two
from .attention_kernels import dot

MOST_TOKENS = 64  # of a segment: a program has all of its keys


def attend_short(qkv: Tensor, cos_sin: Tensor | None, starts: Tensor) -> Tensor:
    """Compute `reference.attend_segments` for segments of at most MOST_TOKENS tokens.

    qkv: 16 bits, contiguous. Rotates queries and keys where they are read, and not in place."""
    num_tokens, _, num_heads, size = qkv.shape
    if not qkv.is_contiguous() or (cos_sin is not None and not cos_sin.is_contiguous()):
        raise ValueError("queries, keys, values and angles must be contiguous")
    out = torch.empty(num_tokens, num_heads, size, dtype=qkv.dtype, device=qkv.device)
    _short_kernel[(starts.shape[0] - 1, num_heads)](
        qkv,
        qkv if cos_sin is None else cos_sin,
        starts,
        out,
        size**-0.5 * 1.4426950408889634,
        NUM_HEADS=num_heads,
        HALF=size // 2,
        HALF_BLOCK=max(16, power_of_two(size // 2)),
        TOKENS=MOST_TOKENS,
        ROTATED=cos_sin is not None,
        num_warps=4,
    )
    return out


@triton.jit
def _short_kernel(
    qkv_ptr,
    cos_sin_ptr,
    start_ptr,
    out_ptr,
    scale,
    NUM_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
    ROTATED: tl.constexpr,
):
    """Attend within one segment, for one head. Halves of heads are separate tiles: they rotate."""
    begin = tl.load(start_ptr + tl.program_id(0))
    end = tl.load(start_ptr + tl.program_id(0) + 1)
    token = begin + tl.arange(0, TOKENS)
    pair = tl.arange(0, HALF_BLOCK)
    live = (token < end)[:, None] & (pair < HALF)[None, :]
    width: tl.constexpr = NUM_HEADS * 2 * HALF
    row = token.to(tl.int64)[:, None]
    first = row * (3 * width) + tl.program_id(1) * 2 * HALF + pair[None, :]
    q1 = tl.load(qkv_ptr + first, mask=live, other=0.0)
    q2 = tl.load(qkv_ptr + first + HALF, mask=live, other=0.0)
    k1 = tl.load(qkv_ptr + first + width, mask=live, other=0.0)
    k2 = tl.load(qkv_ptr + first + width + HALF, mask=live, other=0.0)
    v1 = tl.load(qkv_ptr + first + 2 * width, mask=live, other=0.0)
    v2 = tl.load(qkv_ptr + first + 2 * width + HALF, mask=live, other=0.0)
    kind: tl.constexpr = qkv_ptr.dtype.element_ty
    if ROTATED:
        angle = row * (2 * HALF) + pair[None, :]
        cos = tl.load(cos_sin_ptr + angle, mask=live, other=0.0)
        sin = tl.load(cos_sin_ptr + angle + HALF, mask=live, other=0.0)
        q1, q2 = (q1 * cos - q2 * sin).to(kind), (q2 * cos + q1 * sin).to(kind)
        k1, k2 = (k1 * cos - k2 * sin).to(kind), (k2 * cos + k1 * sin).to(kind)
    scores = tl.zeros([TOKENS, TOKENS], tl.float32)
    scores = dot(q2, tl.trans(k2), dot(q1, tl.trans(k1), scores)) * scale
    scores = tl.where((token < end)[None, :], scores, float("-inf"))
    weights = tl.exp2(scores - tl.max(scores, 1)[:, None])
    total = tl.sum(weights, 1)[:, None]
    weights = weights.to(kind)
    target = row * width + tl.program_id(1) * 2 * HALF + pair[None, :]
    none = tl.zeros([TOKENS, HALF_BLOCK], tl.float32)
    tl.store(out_ptr + target, (dot(weights, v1, none) / total).to(kind), mask=live)
    tl.store(out_ptr + target + HALF, (dot(weights, v2, none) / total).to(kind), mask=live)
