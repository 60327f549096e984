"""Head norms, rotation and the write to the cache, in one kernel after the QKV projection."""

# mypy: allow-incomplete-defs
# Kernels annotate constexpr parameters only.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .fp8 import FP8, to_fp8
from .pdl import release, supported, wait

TILE = 2048  # most elements per program. Fewer if the GPU would not be full
PROGRAMS = 1024


def qk_norm_rope_write(
    qkv: Tensor,
    positions: Tensor,
    cos_sin: Tensor | None,
    slot_mapping: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    num_heads: int,
    num_kv_heads: int,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """Norm and rotate queries and keys, store keys and values in the cache, return the queries.

    qkv: `[num_tokens, (num_heads + 2 * num_kv_heads) * head_size]`, rows q | k | v, each
    contiguous; positions: int32 or int64 `[num_tokens]`; cos_sin: `[max_model_len, 2, rotary_size /
    2]`, contiguous, or None: pairs (i, i + rotary_size / 2) of the first `rotary_size` dimensions
    are rotated (Su et al., arXiv:2104.09864, in GPT-NeoX's order). q_weight, k_weight:
    `[head_size]`, both or none: RMS norm of each head before the rotation (Qwen3). slot_mapping,
    k_cache, v_cache: see `reference.write_kv`; the caches have qkv's dtype or FP8, for which values
    are clamped. Tokens with negative slots are not stored, but have queries.

    NOTE: on Hopper the kernel reads positions and slots before the kernel ahead of it ends (see
    `pdl`): they must be older.

    Everything is computed in fp32 and rounded once. Returns `[num_tokens, num_heads, head_size]`: a
    view of `qkv` if there is nothing to compute. Raises ValueError for unsupported layouts."""
    num_tokens = qkv.shape[0]
    block_size, _, head_size = k_cache.shape[1:]
    normed, rotated = q_weight is not None, cos_sin is not None
    if k_cache.dtype != v_cache.dtype or k_cache.dtype not in (qkv.dtype, FP8):
        raise ValueError(
            f"the caches must be in {qkv.dtype} or {FP8}, not {k_cache.dtype} and {v_cache.dtype}"
        )
    if k_cache.stride() != v_cache.stride() or k_cache.stride(3) != 1 or qkv.stride(1) != 1:
        raise ValueError(
            "rows and heads must be contiguous, and the caches must have the same strides"
        )
    if qkv.shape[1] != (num_heads + 2 * num_kv_heads) * head_size:
        raise ValueError(
            f"rows of {qkv.shape[1]} are not {num_heads} + 2 * {num_kv_heads} heads of {head_size}"
        )
    q = qkv[:, : num_heads * head_size].view(num_tokens, num_heads, head_size)
    first = num_heads
    if normed or rotated:
        q, first = torch.empty(q.shape, dtype=q.dtype, device=q.device), 0
    half = cos_sin.shape[2] if cos_sin is not None else _power_of_two(head_size) // 2
    half_pad = _power_of_two(half)
    rest_pad = _power_of_two(head_size - 2 * half) if head_size > 2 * half else 0
    heads = num_heads + 2 * num_kv_heads - first
    rows = _power_of_two(-(-num_tokens * heads // PROGRAMS))
    rows = max(1, min(rows, TILE // (2 * half_pad + rest_pad)))
    pdl = supported(qkv.device)
    _qk_norm_rope_write_kernel[(-(-num_tokens * heads // rows),)](
        qkv,
        q,
        positions,
        cos_sin if rotated else qkv,
        slot_mapping,
        k_cache,
        v_cache,
        q_weight if normed else qkv,
        k_weight if normed else qkv,
        eps,
        num_tokens,
        qkv.stride(0),
        *k_cache.stride()[:3],
        BLOCK_SIZE=block_size,
        Q_HEADS=num_heads,
        KV_HEADS=num_kv_heads,
        FIRST=first,
        HEAD_SIZE=head_size,
        HALF=half,
        HALF_PAD=half_pad,
        REST_PAD=rest_pad,
        ROWS=rows,
        NORMED=normed,
        ROTATED=rotated,
        PDL=pdl,
        launch_pdl=pdl,
        num_warps=4 if rows * head_size >= 1024 else 1,
    )
    return q


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()


@triton.jit
def _head_weight(q_weight_ptr, k_weight_ptr, dim, in_part, is_q):
    """Load the norm's weights of each row's head, `[rows, dims]`."""
    q_weight = tl.load(q_weight_ptr + dim, mask=in_part, other=0.0).to(tl.float32)
    k_weight = tl.load(k_weight_ptr + dim, mask=in_part, other=0.0).to(tl.float32)
    return tl.where(is_q[:, None], q_weight[None, :], k_weight[None, :])


@triton.jit
def _store_part(
    part,
    dim,
    in_part,
    q_ptr,
    k_cache_ptr,
    v_cache_ptr,
    q_row,
    cache_row,
    is_q,
    is_k,
    is_v,
):
    """Store some dimensions of each row's head: a query in q, a key or value in its cache."""
    query = part.to(q_ptr.dtype.element_ty)
    if k_cache_ptr.dtype.element_ty == tl.float8e4nv:
        cached = to_fp8(part)
    else:
        cached = query
    tl.store(q_ptr + q_row[:, None] + dim[None, :], query, mask=is_q[:, None] & in_part[None, :])
    tl.store(
        k_cache_ptr + cache_row[:, None] + dim[None, :],
        cached,
        mask=is_k[:, None] & in_part[None, :],
    )
    tl.store(
        v_cache_ptr + cache_row[:, None] + dim[None, :],
        cached,
        mask=is_v[:, None] & in_part[None, :],
    )


@triton.jit(do_not_specialize=["num_tokens"])
def _qk_norm_rope_write_kernel(
    qkv_ptr,
    q_ptr,
    position_ptr,
    cos_sin_ptr,
    slot_ptr,
    k_cache_ptr,
    v_cache_ptr,
    q_weight_ptr,
    k_weight_ptr,
    eps,
    num_tokens,
    qkv_stride,
    cache_stride_block,
    cache_stride_slot,
    cache_stride_head,
    BLOCK_SIZE: tl.constexpr,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    FIRST: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
    REST_PAD: tl.constexpr,
    ROWS: tl.constexpr,
    NORMED: tl.constexpr,
    ROTATED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Transform ROWS (token, head) pairs, from head FIRST up.

    A head is two rotated halves and a rest."""
    HEADS: tl.constexpr = Q_HEADS + 2 * KV_HEADS - FIRST
    pair = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = (pair // HEADS).to(tl.int64)
    head = FIRST + pair % HEADS
    live = token < num_tokens
    is_q = live & (head < Q_HEADS)
    is_k = live & (head >= Q_HEADS) & (head < Q_HEADS + KV_HEADS)
    is_v = live & (head >= Q_HEADS + KV_HEADS)
    dim = tl.arange(0, HALF_PAD)
    in_first = dim < HALF
    in_second = in_first & (HALF + dim < HEAD_SIZE)
    slot = tl.load(slot_ptr + token, mask=live, other=-1)
    if ROTATED:
        is_rotated = is_q | is_k
        position = tl.load(position_ptr + token, mask=is_rotated, other=0).to(tl.int64)
        angle = cos_sin_ptr + (position * (2 * HALF))[:, None] + dim[None, :]
        rotates = is_rotated[:, None] & in_first[None, :]
        cos = tl.load(angle, mask=rotates, other=1.0).to(tl.float32)
        sin = tl.load(angle + HALF, mask=rotates, other=0.0).to(tl.float32)
    wait(PDL)
    release(PDL)

    source = qkv_ptr + (token * qkv_stride + head * HEAD_SIZE)[:, None]
    first = tl.load(source + dim[None, :], mask=live[:, None] & in_first[None, :], other=0.0).to(
        tl.float32
    )
    second = tl.load(
        source + HALF + dim[None, :], mask=live[:, None] & in_second[None, :], other=0.0
    )
    second = second.to(tl.float32)
    if REST_PAD:
        rest_dim = 2 * HALF + tl.arange(0, REST_PAD)
        in_rest = rest_dim < HEAD_SIZE
        rest = tl.load(source + rest_dim[None, :], mask=live[:, None] & in_rest[None, :], other=0.0)
        rest = rest.to(tl.float32)
    if NORMED:
        square_sum = tl.sum(first * first, 1) + tl.sum(second * second, 1)
        if REST_PAD:
            square_sum += tl.sum(rest * rest, 1)
        scale = tl.rsqrt(square_sum / HEAD_SIZE + eps)[:, None]
        is_normed = (is_q | is_k)[:, None]
        weight = _head_weight(q_weight_ptr, k_weight_ptr, dim, in_first, is_q)
        first = tl.where(is_normed, first * scale * weight, first)
        weight = _head_weight(q_weight_ptr, k_weight_ptr, HALF + dim, in_second, is_q)
        second = tl.where(is_normed, second * scale * weight, second)
        if REST_PAD:
            weight = _head_weight(q_weight_ptr, k_weight_ptr, rest_dim, in_rest, is_q)
            rest = tl.where(is_normed, rest * scale * weight, rest)
    if ROTATED:
        first, second = first * cos - second * sin, second * cos + first * sin

    q_row = (token * Q_HEADS + head) * HEAD_SIZE
    stored = slot >= 0
    is_k &= stored
    is_v &= stored
    slot = tl.where(stored, slot, 0)
    kv_head = tl.where(head < Q_HEADS + KV_HEADS, head - Q_HEADS, head - Q_HEADS - KV_HEADS)
    cache_row = (
        slot // BLOCK_SIZE * cache_stride_block
        + slot % BLOCK_SIZE * cache_stride_slot
        + kv_head * cache_stride_head
    )
    _store_part(
        first, dim, in_first, q_ptr, k_cache_ptr, v_cache_ptr, q_row, cache_row, is_q, is_k, is_v
    )
    _store_part(
        second,
        HALF + dim,
        in_second,
        q_ptr,
        k_cache_ptr,
        v_cache_ptr,
        q_row,
        cache_row,
        is_q,
        is_k,
        is_v,
    )
    if REST_PAD:
        _store_part(
            rest,
            rest_dim,
            in_rest,
            q_ptr,
            k_cache_ptr,
            v_cache_ptr,
            q_row,
            cache_row,
            is_q,
            is_k,
            is_v,
        )
