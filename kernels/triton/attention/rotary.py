"""Head norms, rotation and the write to the cache, in one kernel after the QKV projection."""

# mypy: allow-incomplete-defs
# Kernels annotate constexpr parameters only.

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...reference import HeadNorm
from ..pdl import release, supported, wait
from ..products.fp8 import FP8, to_fp8
from ..sizes import power_of_two

TILE = 2048  # most elements per program. Fewer if the GPU would not be full
PROGRAMS = 1024


class Transform(NamedTuple):
    """Transform of heads, as in `reference.qk_norm_rope_write`."""

    cos_sin: Tensor | None = None
    q_cos_sin: Tensor | None = None
    norm: HeadNorm | None = None
    clip: float = 0.0

    def check(self, num_tokens: int, num_heads: int, num_kv_heads: int, head_size: int) -> None:
        tables = [table for table in (self.cos_sin, self.q_cos_sin) if table is not None]
        half = tables[0].shape[2] if tables else 0
        if any(x.shape != (num_tokens, 2, half) or not x.is_contiguous() for x in tables):
            raise ValueError(
                f"angles of {num_tokens} tokens must be contiguous [{num_tokens}, 2, half], not "
                f"{[list(table.shape) for table in tables]}"
            )
        if self.q_cos_sin is not None and self.cos_sin is None:
            raise ValueError("queries are rotated only if keys are")
        if self.norm is None:
            return
        weights = self.norm.q_weight, self.norm.k_weight
        rows = {(1, 1), (num_heads, num_kv_heads or 1)}
        if (len(weights[0]), len(weights[1])) not in rows or not all(
            x.shape[1:] == (head_size,) and x.is_contiguous() for x in weights
        ):
            raise ValueError(
                f"the norm's weights must be contiguous, for one head or {num_heads} and "
                f"{num_kv_heads} heads of {head_size}, not {[list(x.shape) for x in weights]}"
            )

    def arguments(self, unused: Tensor) -> dict[str, object]:
        """Return arguments of kernels. `unused` stands for pointers that are not read."""
        norm = self.norm
        return {
            "cos_sin_ptr": unused if self.cos_sin is None else self.cos_sin,
            "q_cos_sin_ptr": self.q_cos_sin,
            "q_weight_ptr": unused if norm is None else norm.q_weight,
            "k_weight_ptr": unused if norm is None else norm.k_weight,
            "eps": 0.0 if norm is None else norm.eps,
            "NORMED": norm is not None,
            "CENTERED": norm is not None and norm.is_centered,
            "LAST": norm is not None and norm.is_last,
            "VALUES": norm is not None and norm.norms_values,
            "PER_HEAD": norm is not None and len(norm.q_weight) > 1,
            "CLIP": self.clip,
        }


def rotate_(heads: Tensor, cos_sin: Tensor) -> None:
    """Compute `reference.rotate_`. heads: `[num_tokens, parts, num_heads, size]`."""
    num_tokens, parts, num_heads, size = heads.shape
    if heads.stride(3) != 1 or heads.stride(2) != size or not cos_sin.is_contiguous():
        raise ValueError("heads of a part must be next to each other, and angles contiguous")
    _rotate_kernel[(num_tokens, parts)](
        heads,
        cos_sin,
        heads.stride(0),
        heads.stride(1),
        NUM_HEADS=num_heads,
        HALF=size // 2,
        HEAD_BLOCK=power_of_two(num_heads),
        HALF_BLOCK=power_of_two(size // 2),
        num_warps=4,
    )


def qk_norm_rope_write(
    qkv: Tensor,
    slot_mapping: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    num_heads: int,
    num_kv_heads: int,
    cos_sin: Tensor | None = None,
    q_cos_sin: Tensor | None = None,
    norm: HeadNorm | None = None,
    clip: float = 0.0,
) -> Tensor:
    """Norm and rotate queries and keys, store keys and values in the cache, return the queries.

    qkv: `[num_tokens, (num_heads + 2 * num_kv_heads) * head_size]`, rows q | k | v, each
    contiguous; cos_sin: `[num_tokens, 2, rotary_size / 2]`, contiguous, or None: pairs (i, i +
    rotary_size / 2) of the first `rotary_size` dimensions are rotated (Su et al., arXiv:2104.09864,
    in GPT-NeoX's order). slot_mapping, k_cache, v_cache: see `reference.write_kv`; the caches have
    qkv's dtype or FP8, for which values are clamped. Tokens with negative slots are not stored, but
    have queries. With 0 KV heads, rows are queries alone. See `reference.qk_norm_rope_write` for
    the rest.

    NOTE: on Hopper the kernel reads angles and slots before the kernel ahead of it ends (see
    `pdl`): they must be older.

    Everything is computed in fp32 and rounded once. Returns `[num_tokens, num_heads, head_size]`: a
    view of `qkv` if there is nothing to compute. Raises ValueError for unsupported layouts."""
    num_tokens = qkv.shape[0]
    block_size, _, head_size = k_cache.shape[1:]
    transform = Transform(cos_sin, q_cos_sin, norm, clip)
    transform.check(num_tokens, num_heads, num_kv_heads, head_size)
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
    if norm is not None or cos_sin is not None or clip:
        q, first = torch.empty(q.shape, dtype=q.dtype, device=q.device), 0
    half = cos_sin.shape[2] if cos_sin is not None else power_of_two(head_size) // 2
    half_pad = power_of_two(half)
    rest_pad = power_of_two(head_size - 2 * half) if head_size > 2 * half else 0
    heads = num_heads + 2 * num_kv_heads - first
    most = max(1, TILE // power_of_two(2 * half_pad + rest_pad))
    rows = min(power_of_two(-(-num_tokens * heads // PROGRAMS)), most)
    pdl = supported(qkv.device)
    _qk_norm_rope_write_kernel[(-(-num_tokens * heads // rows),)](
        qkv,
        q,
        slot_mapping,
        k_cache,
        v_cache,
        num_tokens,
        qkv.stride(0),
        *k_cache.stride()[:3],
        **transform.arguments(qkv),
        BLOCK_SIZE=block_size,
        Q_HEADS=num_heads,
        KV_HEADS=num_kv_heads,
        FIRST=first,
        HEAD_SIZE=head_size,
        HALF=half,
        HALF_PAD=half_pad,
        REST_PAD=rest_pad,
        ROWS=rows,
        ROTATED=cos_sin is not None,
        PDL=pdl,
        launch_pdl=pdl,
        num_warps=4 if rows * head_size >= 1024 else 1,
    )
    return q


@triton.jit
def _rotate_kernel(
    head_ptr,
    cos_sin_ptr,
    token_stride,
    part_stride,
    NUM_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
):
    """Rotate the heads of one part of a token."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, HEAD_BLOCK)
    pair = tl.arange(0, HALF_BLOCK)
    angle_ptr = cos_sin_ptr + token * 2 * HALF + pair
    cos = tl.load(angle_ptr, mask=pair < HALF, other=0.0)[None, :]
    sin = tl.load(angle_ptr + HALF, mask=pair < HALF, other=0.0)[None, :]
    first_ptr = head_ptr + token * token_stride + tl.program_id(1) * part_stride
    first_ptr += head[:, None] * (2 * HALF) + pair[None, :]
    stored = (head[:, None] < NUM_HEADS) & (pair[None, :] < HALF)
    first = tl.load(first_ptr, mask=stored, other=0.0).to(tl.float32)
    second = tl.load(first_ptr + HALF, mask=stored, other=0.0).to(tl.float32)
    kind = head_ptr.dtype.element_ty
    tl.store(first_ptr, (first * cos - second * sin).to(kind), mask=stored)
    tl.store(first_ptr + HALF, (second * cos + first * sin).to(kind), mask=stored)


@triton.jit
def clipped(x, CLIP: tl.constexpr):
    """Clamp fp32 numbers to ±CLIP, unless that is 0."""
    if CLIP > 0:
        x = tl.clamp(x, -CLIP, CLIP, propagate_nan=tl.PropagateNan.ALL)
    return x


@triton.jit
def _head_weight(
    q_weight_ptr,
    k_weight_ptr,
    head,
    dim,
    in_part,
    is_q,
    is_k,
    Q_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    PER_HEAD: tl.constexpr,
):
    """Load the norm's weights of each row's head, `[rows, dims]`: 1 for values."""
    if PER_HEAD:
        q_rows = q_weight_ptr + (head * HEAD_SIZE)[:, None] + dim[None, :]
        k_rows = k_weight_ptr + ((head - Q_HEADS) * HEAD_SIZE)[:, None] + dim[None, :]
        q_weight = tl.load(q_rows, mask=is_q[:, None] & in_part[None, :], other=0.0).to(tl.float32)
        k_weight = tl.load(k_rows, mask=is_k[:, None] & in_part[None, :], other=0.0).to(tl.float32)
    else:
        q_weight = tl.load(q_weight_ptr + dim, mask=in_part, other=0.0).to(tl.float32)[None, :]
        k_weight = tl.load(k_weight_ptr + dim, mask=in_part, other=0.0).to(tl.float32)[None, :]
    return tl.where(is_q[:, None], q_weight, tl.where(is_k[:, None], k_weight, 1.0))


@triton.jit
def _normed(
    first,
    second,
    rest,
    q_weight_ptr,
    k_weight_ptr,
    eps,
    head,
    is_q,
    is_k,
    Q_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
    REST_PAD: tl.constexpr,
    CENTERED: tl.constexpr,
    PER_HEAD: tl.constexpr,
    VALUES: tl.constexpr,
):
    """Norm the heads that are queries or keys, and values if VALUES, in their three parts."""
    dim = tl.arange(0, HALF_PAD)
    in_first = dim < HALF
    in_second = in_first & (HALF + dim < HEAD_SIZE)
    if REST_PAD:
        rest_dim = 2 * HALF + tl.arange(0, REST_PAD)
        in_rest = rest_dim < HEAD_SIZE
    is_normed = (is_q | is_k)[:, None]
    if VALUES:
        is_normed = is_normed | True
    if CENTERED:
        total = tl.sum(first, 1) + tl.sum(second, 1)
        if REST_PAD:
            total += tl.sum(rest, 1)
        mean = (total / HEAD_SIZE)[:, None]
        first = tl.where(is_normed & in_first[None, :], first - mean, first)
        second = tl.where(is_normed & in_second[None, :], second - mean, second)
        if REST_PAD:
            rest = tl.where(is_normed & in_rest[None, :], rest - mean, rest)
    square_sum = tl.sum(first * first, 1) + tl.sum(second * second, 1)
    if REST_PAD:
        square_sum += tl.sum(rest * rest, 1)
    scale = tl.rsqrt(square_sum / HEAD_SIZE + eps)[:, None]
    weight = _head_weight(
        q_weight_ptr, k_weight_ptr, head, dim, in_first, is_q, is_k, Q_HEADS, HEAD_SIZE, PER_HEAD
    )
    first = tl.where(is_normed, first * scale * weight, first)
    weight = _head_weight(
        q_weight_ptr,
        k_weight_ptr,
        head,
        HALF + dim,
        in_second,
        is_q,
        is_k,
        Q_HEADS,
        HEAD_SIZE,
        PER_HEAD,
    )
    second = tl.where(is_normed, second * scale * weight, second)
    if REST_PAD:
        weight = _head_weight(
            q_weight_ptr,
            k_weight_ptr,
            head,
            rest_dim,
            in_rest,
            is_q,
            is_k,
            Q_HEADS,
            HEAD_SIZE,
            PER_HEAD,
        )
        rest = tl.where(is_normed, rest * scale * weight, rest)
    return first, second, rest


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
    slot_ptr,
    k_cache_ptr,
    v_cache_ptr,
    num_tokens,
    qkv_stride,
    cache_stride_block,
    cache_stride_slot,
    cache_stride_head,
    cos_sin_ptr,
    q_cos_sin_ptr,
    q_weight_ptr,
    k_weight_ptr,
    eps,
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
    CENTERED: tl.constexpr,
    LAST: tl.constexpr,
    VALUES: tl.constexpr,
    PER_HEAD: tl.constexpr,
    CLIP: tl.constexpr,
    ROTATED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Transform ROWS (token, head) pairs, from head FIRST up.

    A head is two rotated halves and a rest. `q_cos_sin_ptr` may be None."""
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
        angle = (token * (2 * HALF))[:, None] + dim[None, :]
        rotates = (is_q | is_k)[:, None] & in_first[None, :]
        cos = tl.load(cos_sin_ptr + angle, mask=rotates, other=1.0).to(tl.float32)
        sin = tl.load(cos_sin_ptr + angle + HALF, mask=rotates, other=0.0).to(tl.float32)
        if q_cos_sin_ptr is not None:
            q_rotates = is_q[:, None] & in_first[None, :]
            q_cos = tl.load(q_cos_sin_ptr + angle, mask=q_rotates, other=1.0).to(tl.float32)
            q_sin = tl.load(q_cos_sin_ptr + angle + HALF, mask=q_rotates, other=0.0).to(tl.float32)
            cos, sin = tl.where(q_rotates, q_cos, cos), tl.where(q_rotates, q_sin, sin)
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
    rest = second
    if REST_PAD:
        rest_dim = 2 * HALF + tl.arange(0, REST_PAD)
        in_rest = rest_dim < HEAD_SIZE
        rest = tl.load(source + rest_dim[None, :], mask=live[:, None] & in_rest[None, :], other=0.0)
        rest = rest.to(tl.float32)
    first, second, rest = clipped(first, CLIP), clipped(second, CLIP), clipped(rest, CLIP)
    for is_last in tl.static_range(2):
        if NORMED and is_last == LAST:
            first, second, rest = _normed(
                first,
                second,
                rest,
                q_weight_ptr,
                k_weight_ptr,
                eps,
                head,
                is_q,
                is_k,
                Q_HEADS,
                HEAD_SIZE,
                HALF,
                HALF_PAD,
                REST_PAD,
                CENTERED,
                PER_HEAD,
                VALUES,
            )
        if ROTATED and not is_last:
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
