"""Kernels of gated delta nets for prompts, which are cut into chunks of tokens.

One chunk ends where a request's snapshot does. Within a chunk, updates solve a triangular system
(`_solve_kernel`, `_reads_kernel`, all chunks side by side). States then pass from chunk to chunk
(`_scan_kernel`), a few columns in each program."""

# mypy: allow-incomplete-defs
# Kernels annotate constexpr parameters only.

from __future__ import annotations

import triton
import triton.language as tl

from .convolution import silu
from .parts import decay_of, dot, next_row
from .step import tokens_of

_TILE = tl.constexpr(16)  # rows of a system that are solved one by one


@triton.jit
def _solve_kernel(
    mixed_ptr,
    y_ptr,
    stride,
    decay_ptr,
    time_ptr,
    update_ptr,
    total_ptr,
    chunk_ptr,
    K_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    K_SIZE: tl.constexpr,
    V_SIZE: tl.constexpr,
    K_BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    EXACT: tl.constexpr,
    RATE: tl.constexpr,
):
    """Solve the system of a chunk and a head of values, which does not depend on the state.

    Writes a matrix [CHUNK, CHUNK], by which updates are made of what values add to what keys stood
    for (zeros above its diagonal are not written), and the sums of decays [CHUNK]. The system is
    cut into four rows of tiles. Those on the diagonal are inverted row by row, the others follow:
    as exact as in fp32, since updates of like keys would lose much more with tf32."""
    tl.static_assert(CHUNK == 4 * _TILE)
    V_HEADS: tl.constexpr = K_HEADS * GROUP
    chunk, head = tl.program_id(0), tl.program_id(1)
    begin, end = tl.load(chunk_ptr + chunk * 4), tl.load(chunk_ptr + chunk * 4 + 1)
    if begin == end:
        return
    gate_ptr = y_ptr + 2 * K_HEADS * K_SIZE + 2 * V_HEADS * V_SIZE + head
    a_log, time = tl.load(decay_ptr + head), tl.load(time_ptr + head)
    d0, b0 = _gates(gate_ptr, stride, a_log, time, begin, end, V_HEADS, RATE)
    d1, b1 = _gates(gate_ptr, stride, a_log, time, begin + 16, end, V_HEADS, RATE)
    d2, b2 = _gates(gate_ptr, stride, a_log, time, begin + 32, end, V_HEADS, RATE)
    d3, b3 = _gates(gate_ptr, stride, a_log, time, begin + 48, end, V_HEADS, RATE)
    t0 = tl.cumsum(d0, 0)
    t1 = tl.cumsum(d1, 0) + tl.sum(d0, 0)
    t2 = tl.cumsum(d2, 0) + (tl.sum(d0, 0) + tl.sum(d1, 0))
    t3 = tl.cumsum(d3, 0) + (tl.sum(d0, 0) + tl.sum(d1, 0) + tl.sum(d2, 0))
    row = tl.arange(0, _TILE)
    own_ptr = total_ptr + (chunk.to(tl.int64) * V_HEADS + head) * CHUNK + row
    tl.store(own_ptr, t0)
    tl.store(own_ptr + 16, t1)
    tl.store(own_ptr + 32, t2)
    tl.store(own_ptr + 48, t3)

    is_before = row[:, None] > row[None, :]
    s0 = _system(0, 0, t0, t0, b0, mixed_ptr, begin, end, head, K_HEADS, GROUP, K_SIZE,
                  V_SIZE, K_BLOCK, EXACT)  # fmt: skip
    s1 = _system(1, 1, t1, t1, b1, mixed_ptr, begin, end, head, K_HEADS, GROUP, K_SIZE,
                  V_SIZE, K_BLOCK, EXACT)  # fmt: skip
    s2 = _system(2, 2, t2, t2, b2, mixed_ptr, begin, end, head, K_HEADS, GROUP, K_SIZE,
                  V_SIZE, K_BLOCK, EXACT)  # fmt: skip
    s3 = _system(3, 3, t3, t3, b3, mixed_ptr, begin, end, head, K_HEADS, GROUP, K_SIZE,
                  V_SIZE, K_BLOCK, EXACT)  # fmt: skip
    s0, s1 = tl.where(is_before, s0, 0.0), tl.where(is_before, s1, 0.0)
    s2, s3 = tl.where(is_before, s2, 0.0), tl.where(is_before, s3, 0.0)
    x0, x1, x2, x3 = -s0, -s1, -s2, -s3
    for i in range(2, _TILE):
        x0, x1 = next_row(s0, x0, i, _TILE), next_row(s1, x1, i, _TILE)
        x2, x3 = next_row(s2, x2, i, _TILE), next_row(s3, x3, i, _TILE)
    one = tl.where(row[:, None] == row[None, :], 1.0, 0.0)
    x0, x1, x2, x3 = x0 + one, x1 + one, x2 + one, x3 + one
    s10 = _system(1, 0, t1, t0, b1, mixed_ptr, begin, end, head, K_HEADS, GROUP, K_SIZE,
                  V_SIZE, K_BLOCK, EXACT)  # fmt: skip
    s21 = _system(2, 1, t2, t1, b2, mixed_ptr, begin, end, head, K_HEADS, GROUP, K_SIZE,
                  V_SIZE, K_BLOCK, EXACT)  # fmt: skip
    s32 = _system(3, 2, t3, t2, b3, mixed_ptr, begin, end, head, K_HEADS, GROUP, K_SIZE,
                  V_SIZE, K_BLOCK, EXACT)  # fmt: skip
    s20 = _system(2, 0, t2, t0, b2, mixed_ptr, begin, end, head, K_HEADS, GROUP, K_SIZE,
                  V_SIZE, K_BLOCK, EXACT)  # fmt: skip
    s31 = _system(3, 1, t3, t1, b3, mixed_ptr, begin, end, head, K_HEADS, GROUP, K_SIZE,
                  V_SIZE, K_BLOCK, EXACT)  # fmt: skip
    s30 = _system(3, 0, t3, t0, b3, mixed_ptr, begin, end, head, K_HEADS, GROUP, K_SIZE,
                  V_SIZE, K_BLOCK, EXACT)  # fmt: skip
    x10 = -dot(x1, dot(s10, x0, True), True)
    x21 = -dot(x2, dot(s21, x1, True), True)
    x32 = -dot(x3, dot(s32, x2, True), True)
    x20 = -dot(x2, dot(s20, x0, True) + dot(s21, x10, True), True)
    x31 = -dot(x3, dot(s31, x1, True) + dot(s32, x21, True), True)
    x30 = -dot(
        x3,
        dot(s30, x0, True) + dot(s31, x10, True) + dot(s32, x20, True),
        EXACT,
    )

    dtype = update_ptr.dtype.element_ty
    own_ptr = update_ptr + (chunk.to(tl.int64) * V_HEADS + head) * (CHUNK * CHUNK)
    own_ptr += row[:, None] * CHUNK + row[None, :]
    LINE: tl.constexpr = _TILE * CHUNK  # a row of tiles
    tl.store(own_ptr, (x0 * b0[None, :]).to(dtype))
    tl.store(own_ptr + LINE, (x10 * b0[None, :]).to(dtype))
    tl.store(own_ptr + LINE + 16, (x1 * b1[None, :]).to(dtype))
    tl.store(own_ptr + 2 * LINE, (x20 * b0[None, :]).to(dtype))
    tl.store(own_ptr + 2 * LINE + 16, (x21 * b1[None, :]).to(dtype))
    tl.store(own_ptr + 2 * LINE + 32, (x2 * b2[None, :]).to(dtype))
    tl.store(own_ptr + 3 * LINE, (x30 * b0[None, :]).to(dtype))
    tl.store(own_ptr + 3 * LINE + 16, (x31 * b1[None, :]).to(dtype))
    tl.store(own_ptr + 3 * LINE + 32, (x32 * b2[None, :]).to(dtype))
    tl.store(own_ptr + 3 * LINE + 48, (x3 * b3[None, :]).to(dtype))


@triton.jit
def _system(
    tile, other, total, other_total, beta, mixed_ptr, begin, end, head,
    K_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    K_SIZE: tl.constexpr,
    V_SIZE: tl.constexpr,
    K_BLOCK: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    """Return how much of the updates of other tokens the updates of a tile's tokens take back."""
    tl.debug_barrier()  # keys are loaded again: those of all tiles do not fit into registers
    column = (K_HEADS + head // GROUP) * K_SIZE
    k = _rows(mixed_ptr, begin + tile * _TILE, end, column, K_HEADS, GROUP, K_SIZE, V_SIZE,
              K_BLOCK, _TILE)  # fmt: skip
    other_k = _rows(mixed_ptr, begin + other * _TILE, end, column, K_HEADS, GROUP, K_SIZE, V_SIZE,
                    K_BLOCK, _TILE)  # fmt: skip
    between = tl.exp(tl.minimum(total[:, None] - other_total[None, :], 0.0))
    return beta[:, None] * between * dot(k, tl.trans(other_k), EXACT)


@triton.jit
def _reads_kernel(
    mixed_ptr,
    total_ptr,
    read_ptr,
    chunk_ptr,
    K_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    K_SIZE: tl.constexpr,
    V_SIZE: tl.constexpr,
    K_BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    EXACT: tl.constexpr,
):
    """Write what each query of a chunk reads of each update, [CHUNK, CHUNK]."""
    V_HEADS: tl.constexpr = K_HEADS * GROUP
    chunk, head = tl.program_id(0), tl.program_id(1)
    begin, end = tl.load(chunk_ptr + chunk * 4), tl.load(chunk_ptr + chunk * 4 + 1)
    if begin == end:
        return
    column = head // GROUP * K_SIZE
    q = _rows(mixed_ptr, begin, end, column, K_HEADS, GROUP, K_SIZE, V_SIZE, K_BLOCK, CHUNK)
    column += K_HEADS * K_SIZE
    k = _rows(mixed_ptr, begin, end, column, K_HEADS, GROUP, K_SIZE, V_SIZE, K_BLOCK, CHUNK)
    row = tl.arange(0, CHUNK)
    own = chunk.to(tl.int64) * V_HEADS + head
    total = tl.load(total_ptr + own * CHUNK + row)
    is_known = row[:, None] >= row[None, :]
    between = tl.exp(tl.where(is_known, total[:, None] - total[None, :], float("-inf")))
    reads = dot(q, tl.trans(k), EXACT) * between * (K_SIZE**-0.5)
    square = row[:, None] * CHUNK + row[None, :]
    tl.store(read_ptr + own * (CHUNK * CHUNK) + square, reads.to(read_ptr.dtype.element_ty))


@triton.jit
def _scan_kernel(
    mixed_ptr,
    total_ptr,
    update_ptr,
    from_update_ptr,
    out_ptr,
    state_ptr,
    chunk_start_ptr,
    start_ptr,
    length_ptr,
    read_ptr,
    write_ptr,
    keep_ptr,
    after_ptr,
    K_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    K_SIZE: tl.constexpr,
    V_SIZE: tl.constexpr,
    K_BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    EXACT: tl.constexpr,
    V_BLOCK: tl.constexpr,
    MOST: tl.constexpr,
):
    """Compute some columns of a head's state, of all chunks of a request."""
    V_HEADS: tl.constexpr = K_HEADS * GROUP
    KEYS: tl.constexpr = K_HEADS * K_SIZE
    VALUES: tl.constexpr = V_HEADS * V_SIZE
    CHANNELS: tl.constexpr = 2 * KEYS + VALUES
    request, head = tl.program_id(0), tl.program_id(1)
    first, length, start, read = tokens_of(request, start_ptr, length_ptr, read_ptr)
    if length <= MOST:
        return
    write = tl.load(write_ptr + request).to(tl.int64)
    keep = tl.load(keep_ptr + request).to(tl.int64)
    after = tl.load(after_ptr + request)
    key = tl.arange(0, K_BLOCK)
    value = tl.program_id(2) * V_BLOCK + tl.arange(0, V_BLOCK)
    is_value = value < V_SIZE
    live = (key < K_SIZE)[:, None] & is_value[None, :]
    inside = head * (K_SIZE * V_SIZE) + key[:, None] * V_SIZE + value[None, :]
    SLOT: tl.constexpr = V_HEADS * K_SIZE * V_SIZE
    state = tl.load(state_ptr + read * SLOT + inside, mask=live & (start > 0), other=0.0)
    state = state.to(tl.float32)
    row = tl.arange(0, CHUNK)
    square = row[:, None] * CHUNK + row[None, :]
    is_lower = row[:, None] >= row[None, :] // _TILE * _TILE
    dtype = mixed_ptr.dtype.element_ty
    first_chunk = tl.load(chunk_start_ptr + request)
    num_before = tl.cdiv(after, CHUNK)  # chunks up to the snapshot
    for index in range(num_before + tl.cdiv(length - after, CHUNK)):
        is_before = index < num_before
        begin = tl.where(is_before, index * CHUNK, after + (index - num_before) * CHUNK)
        end = first + tl.minimum(begin + CHUNK, tl.where(is_before, after, length))
        begin += first
        token = begin + row
        is_token = token < end
        own = (first_chunk + index).to(tl.int64) * V_HEADS + head
        column = head // GROUP * K_SIZE
        q = _rows(mixed_ptr, begin, end, column, K_HEADS, GROUP, K_SIZE, V_SIZE, K_BLOCK, CHUNK)
        column += KEYS
        k = _rows(mixed_ptr, begin, end, column, K_HEADS, GROUP, K_SIZE, V_SIZE, K_BLOCK, CHUNK)
        total = tl.load(total_ptr + own * CHUNK + row)
        updates = tl.load(update_ptr + own * (CHUNK * CHUNK) + square, mask=is_lower, other=0.0)
        reads = tl.load(from_update_ptr + own * (CHUNK * CHUNK) + square)
        value_ptr = token.to(tl.int64)[:, None] * CHANNELS + 2 * KEYS + head * V_SIZE
        is_there = is_token[:, None] & is_value[None, :]
        v = tl.load(mixed_ptr + value_ptr + value[None, :], mask=is_there, other=0.0)
        since = tl.exp(total)[:, None]
        rounded = state.to(dtype)
        known = dot(k, rounded, EXACT) * since
        wanted = (v.to(tl.float32) - known).to(dtype)
        update = dot(updates, wanted, EXACT)
        out = dot(q, rounded, EXACT) * (since * (K_SIZE**-0.5))
        out += dot(reads, update.to(dtype), EXACT)
        place = token.to(tl.int64)[:, None] * VALUES + head * V_SIZE + value[None, :]
        tl.store(out_ptr + place, out.to(dtype), mask=is_there)
        # Decays of tokens beyond the end are zero, so that the least sum is the last.
        least = tl.min(total, 0)
        left = (update * tl.exp(least - total)[:, None]).to(dtype)
        state = state * tl.exp(least) + dot(tl.trans(k), left, EXACT)
        if is_before & (index + 1 == num_before):
            kept = state.to(state_ptr.dtype.element_ty)
            tl.store(state_ptr + keep * SLOT + inside, kept, mask=live)
    tl.store(state_ptr + write * SLOT + inside, state.to(state_ptr.dtype.element_ty), mask=live)


@triton.jit
def _gated_norm_kernel(
    out_ptr,
    y_ptr,
    stride,
    channels,
    norm_ptr,
    eps,
    chunk_ptr,
    V_HEADS: tl.constexpr,
    V_SIZE: tl.constexpr,
    V_BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Normalize and gate a head of a chunk's outputs."""
    chunk, head = tl.program_id(0), tl.program_id(1)
    begin, end = tl.load(chunk_ptr + chunk * 4), tl.load(chunk_ptr + chunk * 4 + 1)
    if begin == end:
        return
    token = (begin + tl.arange(0, CHUNK)).to(tl.int64)[:, None]
    value = tl.arange(0, V_BLOCK)
    live = (token < end) & (value < V_SIZE)[None, :]
    column = head * V_SIZE + value
    own = out_ptr + token * (V_HEADS * V_SIZE) + column[None, :]
    x = tl.load(own, mask=live, other=0.0)
    z = tl.load(y_ptr + token * stride + channels + column[None, :], mask=live, other=0.0)
    norm = tl.load(norm_ptr + value, mask=value < V_SIZE, other=0.0).to(tl.float32)
    dtype = x.dtype
    x = x.to(tl.float32)
    x *= tl.rsqrt(tl.sum(x * x, 1) / V_SIZE + eps)[:, None]
    x = norm[None, :] * x.to(dtype).to(tl.float32) * silu(z.to(tl.float32))
    tl.store(own, x.to(dtype), mask=live)


@triton.jit
def _rows(
    mixed_ptr, begin, end, column,
    K_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    K_SIZE: tl.constexpr,
    V_SIZE: tl.constexpr,
    K_BLOCK: tl.constexpr,
    COUNT: tl.constexpr,
):  # fmt: skip
    """Return queries or keys of tokens, which begin at a column, [COUNT, K_BLOCK]."""
    CHANNELS: tl.constexpr = K_HEADS * (2 * K_SIZE + GROUP * V_SIZE)
    token = begin + tl.arange(0, COUNT)
    key = tl.arange(0, K_BLOCK)
    own = mixed_ptr + token.to(tl.int64)[:, None] * CHANNELS + column + key[None, :]
    live = (token < end)[:, None] & (key < K_SIZE)[None, :]
    return tl.load(own, mask=live, other=0.0)


@triton.jit
def _gates(
    gate_ptr, stride, a_log, time, begin, end,
    V_HEADS: tl.constexpr,
    RATE: tl.constexpr,
):  # fmt: skip
    """Return the decays of tokens and their rates of updates, [TILE]."""
    token = begin + tl.arange(0, _TILE)
    live = token < end
    own = gate_ptr + token.to(tl.int64) * stride
    b = tl.load(own, mask=live, other=0.0).to(tl.float32)
    a = tl.load(own + V_HEADS, mask=live, other=0.0).to(tl.float32)
    decay = tl.where(live, decay_of(a, a_log, time), 0.0)
    return decay, tl.where(live, RATE * tl.sigmoid(b), 0.0)
