"""The kernel of gated delta nets for requests that may have drafts, in this step or the one before.

A separate kernel for the part that does not depend on the state makes it no faster."""

# mypy: allow-incomplete-defs
# Kernels annotate constexpr parameters only.

from __future__ import annotations

import triton
import triton.language as tl

from ..pdl import release, wait
from .convolution import silu
from .parts import UNIT_EPS, decay_of, dot, next_row
from .step import drafts_of, snapshot_of, tokens_of


@triton.jit
def _verify_kernel(
    y_ptr,
    stride,
    out_ptr,
    kernel_ptr,
    decay_ptr,
    time_ptr,
    norm_ptr,
    eps,
    input_ptr,
    state_ptr,
    start_ptr,
    length_ptr,
    read_ptr,
    write_ptr,
    keep_ptr,
    kept_ptr,
    begin_ptr,
    written_ptr,
    K_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    K_SIZE: tl.constexpr,
    V_SIZE: tl.constexpr,
    K_BLOCK: tl.constexpr,
    RATE: tl.constexpr,
    V_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    PDL: tl.constexpr,
    MOST: tl.constexpr,
    NORM_BLOCK: tl.constexpr,
    COUNT: tl.constexpr,
    EXACT: tl.constexpr,
):
    """Compute a head of values of a request that may have drafts, in this step or the one before.

    Its tokens and those drafts that were accepted are a chunk, as in a prompt, after the rows of
    the inputs before: [COUNT] rows."""
    wait(PDL)
    release(PDL)
    request, head = tl.program_id(0), tl.program_id(1)
    first, count, start, read = tokens_of(request, start_ptr, length_ptr, read_ptr)
    if (count < 1) | (count > MOST):
        return
    end = start + count
    begin, written = drafts_of(request, start, end, begin_ptr, written_ptr)
    KEYS: tl.constexpr = K_HEADS * K_SIZE
    V_HEADS: tl.constexpr = K_HEADS * GROUP
    VALUES: tl.constexpr = V_HEADS * V_SIZE
    CHANNELS: tl.constexpr = 2 * KEYS + VALUES
    COLUMNS: tl.constexpr = CHANNELS + 2 * V_HEADS
    MATRIX: tl.constexpr = K_SIZE * V_SIZE
    SLOT: tl.constexpr = V_HEADS * MATRIX
    BEFORE: tl.constexpr = WIDTH - 1
    key = tl.arange(0, K_BLOCK)
    is_key = key < K_SIZE
    write = tl.load(write_ptr + request).to(tl.int64)
    keep, kept = snapshot_of(request, begin, written, keep_ptr, kept_ptr)

    row = tl.arange(0, COUNT)
    position = begin - BEFORE + row
    is_token = (row >= BEFORE) & (position < end)
    is_new = is_token & (position >= start)
    q_channel = head // GROUP * K_SIZE + key
    q, q_input = _convolved(
        y_ptr, stride, input_ptr, kernel_ptr, q_channel, is_key, position, is_token, first, start,
        end, read, CHANNELS, COLUMNS, ROWS, WIDTH,
    )  # fmt: skip
    k, k_input = _convolved(
        y_ptr, stride, input_ptr, kernel_ptr, KEYS + q_channel, is_key, position, is_token, first,
        start, end, read, CHANNELS, COLUMNS, ROWS, WIDTH,
    )  # fmt: skip
    dtype = q_input.dtype
    q = (q * tl.rsqrt(tl.sum(q * q, 1) + UNIT_EPS)[:, None]).to(dtype)
    k = (k * tl.rsqrt(tl.sum(k * k, 1) + UNIT_EPS)[:, None]).to(dtype)
    token = (first + position - start).to(tl.int64)
    gate_ptr = y_ptr + token * stride + CHANNELS + VALUES + head
    old_ptr = input_ptr + (read * ROWS + position % ROWS) * COLUMNS + CHANNELS + head
    is_old = is_token & (position < start)
    b = tl.load(gate_ptr, mask=is_new, other=0.0) + tl.load(old_ptr, mask=is_old, other=0.0)
    a = tl.load(gate_ptr + V_HEADS, mask=is_new, other=0.0)
    a += tl.load(old_ptr + V_HEADS, mask=is_old, other=0.0)
    decay = decay_of(a.to(tl.float32), tl.load(decay_ptr + head), tl.load(time_ptr + head))
    decay = tl.where(is_token, decay, 0.0)
    beta = tl.where(is_token, RATE * tl.sigmoid(b.to(tl.float32)), 0.0)

    total = tl.cumsum(decay, 0)
    is_before = row[:, None] > row[None, :]
    between = tl.exp(tl.minimum(total[:, None] - total[None, :], 0.0))
    system = beta[:, None] * between * dot(k, tl.trans(k), EXACT)
    system = tl.where(is_before, system, 0.0)
    inverse = -system
    for i in range(BEFORE + 2, BEFORE + end - begin):
        inverse = next_row(system, inverse, i, COUNT)
    is_same = row[:, None] == row[None, :]
    inverse = (inverse + tl.where(is_same, 1.0, 0.0)) * beta[None, :]
    reads = dot(q, tl.trans(k), EXACT) * between * (K_SIZE**-0.5)
    reads = tl.where(is_before | is_same, reads, 0.0)
    since = tl.exp(total)[:, None]
    is_late = (position >= 0) & (position >= written - BEFORE) & (position < end)
    is_late &= (position >= start) | (read != write)
    is_kept = (position >= 0) & (position >= kept - BEFORE) & (position < kept)
    own = (write * ROWS + position % ROWS) * COLUMNS
    kept_own = (keep * ROWS + position % ROWS) * COLUMNS
    squares = tl.zeros((COUNT,), tl.float32)
    for v_first in range(0, V_SIZE, V_BLOCK):
        value = v_first + tl.arange(0, V_BLOCK)
        is_value = value < V_SIZE
        inside = head * MATRIX + key[:, None] * V_SIZE + value[None, :]
        live = is_key[:, None] & is_value[None, :]
        state = tl.load(state_ptr + read * SLOT + inside, mask=live & (begin > 0), other=0.0)
        state = state.to(tl.float32)
        v_channel = 2 * KEYS + head * V_SIZE + value
        v, v_input = _convolved(
            y_ptr, stride, input_ptr, kernel_ptr, v_channel, is_value, position, is_token, first,
            start, end, read, CHANNELS, COLUMNS, ROWS, WIDTH,
        )  # fmt: skip
        rounded = state.to(dtype)
        wanted = (v - dot(k, rounded, EXACT) * since).to(dtype)
        update = dot(inverse.to(dtype), wanted, EXACT)
        out = dot(q, rounded, EXACT) * (since * (K_SIZE**-0.5))
        out += dot(reads.to(dtype), update.to(dtype), EXACT)
        after = _state_after(state, k, update, total, position, written, EXACT)
        after = after.to(state_ptr.dtype.element_ty)
        tl.store(state_ptr + write * SLOT + inside, after, mask=live)
        v_live, v_ptr = is_value[None, :], input_ptr + v_channel[None, :]
        tl.store(v_ptr + own[:, None], v_input, mask=v_live & is_late[:, None])
        if kept > 0:
            after = _state_after(state, k, update, total, position, kept, EXACT)
            after = after.to(state_ptr.dtype.element_ty)
            tl.store(state_ptr + keep * SLOT + inside, after, mask=live)
            tl.store(v_ptr + kept_own[:, None], v_input, mask=v_live & is_kept[:, None])
        out = out.to(dtype)
        out_row = out_ptr + token[:, None] * VALUES + head * V_SIZE + value[None, :]
        tl.store(out_row, out, mask=is_new[:, None] & v_live)
        squares += tl.sum(out.to(tl.float32) * out.to(tl.float32), 1)

    q_live = (is_key & (head % GROUP == 0))[None, :]
    q_ptr = input_ptr + q_channel[None, :]
    tl.store(q_ptr + own[:, None], q_input, mask=q_live & is_late[:, None])
    tl.store(q_ptr + own[:, None] + KEYS, k_input, mask=q_live & is_late[:, None])
    own_ptr = input_ptr + own + CHANNELS + head
    tl.store(own_ptr, b, mask=is_late & is_token)
    tl.store(own_ptr + V_HEADS, a, mask=is_late & is_token)
    if kept > 0:
        tl.store(q_ptr + kept_own[:, None], q_input, mask=q_live & is_kept[:, None])
        tl.store(q_ptr + kept_own[:, None] + KEYS, k_input, mask=q_live & is_kept[:, None])

    tl.debug_barrier()  # outputs are read by other threads
    value = tl.arange(0, NORM_BLOCK)
    is_value = value < V_SIZE
    is_out = is_new[:, None] & is_value[None, :]
    place = head * V_SIZE + value[None, :]
    out_row = out_ptr + token[:, None] * VALUES + place
    out = tl.load(out_row, mask=is_out, other=0.0).to(tl.float32)
    z_ptr = y_ptr + token[:, None] * stride + CHANNELS + place
    z = tl.load(z_ptr, mask=is_out, other=0.0).to(tl.float32)
    norm = tl.load(norm_ptr + value, mask=is_value, other=0.0).to(tl.float32)
    unit = (out * tl.rsqrt(squares / V_SIZE + eps)[:, None]).to(dtype)
    out = norm[None, :] * unit.to(tl.float32) * silu(z)
    tl.store(out_row, out.to(dtype), mask=is_out)


@triton.jit
def _convolved(
    y_ptr, stride, input_ptr, kernel_ptr, channel, live, position, is_token, first, start, end,
    read,
    CHANNELS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Return silu of the convolutions of tokens, rounded, in fp32, and the inputs of positions."""
    total = tl.zeros((position.shape[0], channel.shape[0]), tl.float32)
    for i in tl.static_range(WIDTH):
        at = position - (WIDTH - 1) + i
        is_wanted = (at >= 0) & (at < end)
        if i < WIDTH - 1:
            is_wanted &= is_token
        row = (first + at - start).to(tl.int64)
        new_ptr = y_ptr + row[:, None] * stride + channel[None, :]
        x = tl.load(new_ptr, mask=(is_wanted & (at >= start))[:, None] & live[None, :], other=0.0)
        row = (read * ROWS + at % ROWS) * COLUMNS
        old_ptr = input_ptr + row[:, None] + channel[None, :]
        x += tl.load(old_ptr, mask=(is_wanted & (at < start))[:, None] & live[None, :], other=0.0)
        weight = tl.load(kernel_ptr + i * CHANNELS + channel, mask=live, other=0.0)
        total += x.to(tl.float32) * weight.to(tl.float32)[None, :]
    y = tl.where(is_token[:, None], silu(total), 0.0)
    return y.to(x.dtype).to(tl.float32), x


@triton.jit
def _state_after(state, k, update, total, position, end, EXACT: tl.constexpr):
    """Return the state after the tokens before position `end`."""
    is_there = position < end
    least = tl.min(tl.where(is_there, total, 0.0), 0)  # decays add up
    left = update * tl.where(is_there, tl.exp(tl.minimum(least - total, 0.0)), 0.0)[:, None]
    return state * tl.exp(least) + dot(tl.trans(k), left.to(k.dtype), EXACT)
