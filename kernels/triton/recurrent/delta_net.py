"""Gated delta nets.

Requests with one token in a step and those with more are computed by different kernels, which read
on the device how many each has: a prompt may end with one token, too. Each kernel leaves the other
requests alone. One token: one kernel for the layer, which reads and writes each state once.

More: tokens are cut into chunks of CHUNK, one of which ends where a request's snapshot does. Within
a chunk, updates solve a triangular system (`_solve_kernel`, all chunks side by side). States then
pass from chunk to chunk (`_scan_kernel`), a few columns in each program.

Definitions: `toolkit.kernels.recurrent`."""

# mypy: allow-incomplete-defs
# Kernels annotate constexpr parameters only.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from toolkit.kernels.recurrent import CHUNK, EPS

from ..pdl import release, supported, wait
from ..sizes import power_of_two
from .convolution import convolve_one, convolve_prompts, silu, tokens_of
from .step import RecurrentStep

VALUES_AT_ONCE = 64  # columns of a state that a program updates together
FEW_PROGRAMS = 128  # of a step: no more than multiprocessors. Then each updates twice as many.
VALUES_EACH = 32  # columns of a state that a program passes from chunk to chunk
_TILE = tl.constexpr(16)  # rows of a system that are solved one by one
_EPS = tl.constexpr(EPS)
_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


class DeltaNet:
    """A layer: `recurrent.short_convolution`, `gated_delta_rule` and `gated_norm`.

    kernel: [channels, width]; a_log, time: fp32 [v_heads]; norm: [v_size]; rate: see
    `describe.DeltaNet`; windows: [slots, width - 1, channels] in the type of the rows; states:
    [slots, v_heads, k_size, v_size]."""

    def __init__(
        self,
        kernel: Tensor,
        a_log: Tensor,
        time: Tensor,
        norm: Tensor,
        eps: float,
        rate: float,
        windows: Tensor,
        states: Tensor,
        num_k_heads: int,
    ) -> None:
        self._kernel, self._gates, self._norm = kernel, (a_log, time), norm
        self._eps, self._rate = eps, rate
        self._windows, self._states = windows, states
        _, self._v_heads, self._k_size, self._v_size = states.shape
        self._k_heads = num_k_heads
        self._channels, self._width = kernel.shape
        self._block = power_of_two(self._v_size)
        self._sizes = {
            "K_HEADS": num_k_heads,
            "GROUP": self._v_heads // num_k_heads,
            "K_SIZE": self._k_size,
            "V_SIZE": self._v_size,
            "K_BLOCK": max(16, power_of_two(self._k_size)),
        }

    def __call__(self, y: Tensor, step: RecurrentStep) -> Tensor:
        """Return [num_tokens, v_heads · v_size]. y: [num_tokens, q | k | v | z | b | a]."""
        out = torch.empty(len(y), self._v_heads * self._v_size, dtype=y.dtype, device=y.device)
        if step.has_prompts:
            self._compute_prompts(y, step, out)
        pdl = supported(y.device)
        is_wide = step.num_reqs * self._k_heads <= FEW_PROGRAMS
        _delta_step_kernel[(step.num_reqs, self._k_heads)](
            y,
            y.stride(0),
            out,
            self._kernel,
            *self._gates,
            self._norm,
            self._eps,
            self._windows,
            self._states,
            step.starts,
            step.lengths,
            step.reads,
            step.writes,
            step.keeps,
            **self._sizes,
            RATE=self._rate,
            V_BLOCK=min(2 * VALUES_AT_ONCE if is_wide else VALUES_AT_ONCE, self._block),
            NORM_BLOCK=self._block,
            WIDTH=self._width,
            PDL=pdl,
            launch_pdl=pdl,
            num_warps=16 if is_wide else 4,
        )
        return out

    def _compute_prompts(self, y: Tensor, step: RecurrentStep, out: Tensor) -> None:
        """Compute the requests with more than one token."""
        mixed = torch.empty(len(y), self._channels, dtype=y.dtype, device=y.device)
        convolve_prompts(y, mixed, self._kernel, None, self._windows, step, has_silu=True)
        shape = (2, step.max_chunks, self._v_heads, CHUNK, CHUNK)
        systems = torch.empty(shape, dtype=y.dtype, device=y.device)
        chunks, heads = step.max_chunks, self._v_heads
        gates = y, y.stride(0), *self._gates
        is_exact = y.dtype == torch.float32
        _solve_kernel[(chunks, heads)](
            mixed,
            *gates,
            *systems,
            step.chunks,
            **self._sizes,
            RATE=self._rate,
            CHUNK=CHUNK,
            EXACT=is_exact,
            num_warps=4,
        )
        block = min(VALUES_EACH, max(16, self._block))
        _scan_kernel[(step.num_reqs, heads, -(-self._v_size // block))](
            mixed,
            *gates,
            *systems,
            out,
            self._states,
            step.chunks,
            step.chunk_starts,
            step.starts,
            step.lengths,
            step.reads,
            step.writes,
            step.keeps,
            step.after,
            **self._sizes,
            V_BLOCK=block,
            CHUNK=CHUNK,
            EXACT=is_exact,
            num_warps=4,
            num_stages=1 if is_exact else 2,  # for the shared memory of small GPUs
        )
        _gated_norm_kernel[(chunks, heads)](
            out,
            y,
            y.stride(0),
            self._channels,
            self._norm,
            self._eps,
            step.chunks,
            V_HEADS=heads,
            V_SIZE=self._v_size,
            V_BLOCK=self._block,
            CHUNK=CHUNK,
            num_warps=4,
        )


@triton.jit
def _delta_step_kernel(
    y_ptr,
    stride,
    out_ptr,
    kernel_ptr,
    decay_ptr,
    time_ptr,
    norm_ptr,
    eps,
    window_ptr,
    state_ptr,
    start_ptr,
    length_ptr,
    read_ptr,
    write_ptr,
    keep_ptr,
    K_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    K_SIZE: tl.constexpr,
    V_SIZE: tl.constexpr,
    K_BLOCK: tl.constexpr,
    RATE: tl.constexpr,
    V_BLOCK: tl.constexpr,
    NORM_BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute one token of one head of keys, with its heads of values.

    No other program has their channels, so that a window can be replaced where it is."""
    wait(PDL)
    release(PDL)
    request, head = tl.program_id(0), tl.program_id(1)
    token, count, is_first, read = tokens_of(request, start_ptr, length_ptr, read_ptr)
    if count != 1:
        return
    write = tl.load(write_ptr + request).to(tl.int64)
    keep = tl.load(keep_ptr + request).to(tl.int64)
    KEYS: tl.constexpr = K_HEADS * K_SIZE
    V_HEADS: tl.constexpr = K_HEADS * GROUP
    VALUES: tl.constexpr = V_HEADS * V_SIZE
    CHANNELS: tl.constexpr = 2 * KEYS + VALUES
    MATRIX: tl.constexpr = K_SIZE * V_SIZE
    row_ptr = y_ptr + token.to(tl.int64) * stride
    key = tl.arange(0, K_BLOCK)
    is_key = key < K_SIZE

    channel = head * K_SIZE + key
    x = tl.load(row_ptr + channel, mask=is_key, other=0.0)
    q = convolve_one(
        x, channel, is_key, kernel_ptr, window_ptr, CHANNELS, is_first, read, write, keep, WIDTH
    )
    channel += KEYS
    x = tl.load(row_ptr + channel, mask=is_key, other=0.0)
    k = convolve_one(
        x, channel, is_key, kernel_ptr, window_ptr, CHANNELS, is_first, read, write, keep, WIDTH
    )
    q, k = silu(q).to(x.dtype).to(tl.float32), silu(k).to(x.dtype).to(tl.float32)
    q *= tl.rsqrt(tl.sum(q * q, 0) + _EPS) * (K_SIZE**-0.5)
    k *= tl.rsqrt(tl.sum(k * k, 0) + _EPS)

    for i in range(GROUP):
        v_head = head * GROUP + i
        gate_ptr = row_ptr + CHANNELS + VALUES + v_head
        beta = RATE * tl.sigmoid(tl.load(gate_ptr).to(tl.float32))
        a = tl.load(gate_ptr + V_HEADS).to(tl.float32)
        decay = tl.exp(_decay(a, tl.load(decay_ptr + v_head), tl.load(time_ptr + v_head)))
        own_ptr = out_ptr + token.to(tl.int64) * VALUES + v_head * V_SIZE
        squares = 0.0
        for first in range(0, V_SIZE, V_BLOCK):
            value = first + tl.arange(0, V_BLOCK)
            is_value = value < V_SIZE
            inside = key[:, None] * V_SIZE + value[None, :]
            live = is_key[:, None] & is_value[None, :]
            state = tl.load(
                state_ptr + (read * V_HEADS + v_head) * MATRIX + inside,
                mask=live & (is_first == 0),
                other=0.0,
            ).to(tl.float32)
            place = 2 * KEYS + v_head * V_SIZE + value
            new = tl.load(row_ptr + place, mask=is_value, other=0.0)
            v = convolve_one(
                new, place, is_value, kernel_ptr, window_ptr, CHANNELS,
                is_first, read, write, keep, WIDTH,
            )  # fmt: skip
            v = silu(v).to(new.dtype).to(tl.float32)
            state *= decay
            update = (v - tl.sum(state * k[:, None], 0)) * beta
            state += k[:, None] * update[None, :]
            out = tl.sum(state * q[:, None], 0).to(new.dtype)
            after = state.to(state_ptr.dtype.element_ty)
            tl.debug_barrier()  # as in `convolve_one`
            tl.store(state_ptr + (write * V_HEADS + v_head) * MATRIX + inside, after, mask=live)
            if keep >= 0:
                kept_ptr = state_ptr + (keep * V_HEADS + v_head) * MATRIX
                tl.store(kept_ptr + inside, after, mask=live)
            tl.store(own_ptr + value, out, mask=is_value)
            squares += tl.sum(out.to(tl.float32) * out.to(tl.float32), 0)
        tl.debug_barrier()
        value = tl.arange(0, NORM_BLOCK)
        is_value = value < V_SIZE
        out = tl.load(own_ptr + value, mask=is_value, other=0.0)
        dtype = out.dtype
        z = tl.load(row_ptr + CHANNELS + v_head * V_SIZE + value, mask=is_value, other=0.0)
        norm = tl.load(norm_ptr + value, mask=is_value, other=0.0).to(tl.float32)
        unit = (out.to(tl.float32) * tl.rsqrt(squares / V_SIZE + eps)).to(dtype)
        out = norm * unit.to(tl.float32) * silu(z.to(tl.float32))
        tl.store(own_ptr + value, out.to(dtype), mask=is_value)


@triton.jit
def _solve_kernel(
    mixed_ptr,
    y_ptr,
    stride,
    decay_ptr,
    time_ptr,
    update_ptr,
    read_ptr,
    chunk_ptr,
    K_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    K_SIZE: tl.constexpr,
    V_SIZE: tl.constexpr,
    K_BLOCK: tl.constexpr,
    RATE: tl.constexpr,
    CHUNK: tl.constexpr,
    EXACT: tl.constexpr,
):
    """Write what does not depend on the state, of a chunk and a head of values.

    Two matrices [CHUNK, CHUNK]: updates are the first times (values - what keys stood for), and
    outputs add the second times updates."""
    V_HEADS: tl.constexpr = K_HEADS * GROUP
    chunk, head = tl.program_id(0), tl.program_id(1)
    begin, end = tl.load(chunk_ptr + chunk * 3), tl.load(chunk_ptr + chunk * 3 + 1)
    if begin == end:
        return
    column = head // GROUP * K_SIZE
    k = _unit_rows(mixed_ptr, begin, end, K_HEADS * K_SIZE + column, K_HEADS, GROUP, K_SIZE,
                   V_SIZE, K_BLOCK, CHUNK)  # fmt: skip
    q = _unit_rows(mixed_ptr, begin, end, column, K_HEADS, GROUP, K_SIZE, V_SIZE, K_BLOCK,
                   CHUNK)  # fmt: skip
    total, beta = _gates(y_ptr, stride, decay_ptr, time_ptr, begin, end, head, K_HEADS, GROUP,
                         K_SIZE, V_SIZE, CHUNK)  # fmt: skip
    beta *= RATE
    row = tl.arange(0, CHUNK)
    first = (chunk.to(tl.int64) * V_HEADS + head) * (CHUNK * CHUNK)
    square = row[:, None] * CHUNK + row[None, :]
    is_known = row[:, None] >= row[None, :]
    between = tl.exp(tl.where(is_known, total[:, None] - total[None, :], float("-inf")))
    reads = _dot(q, tl.trans(k), EXACT) * between * (K_SIZE**-0.5)
    tl.store(read_ptr + first + square, reads.to(read_ptr.dtype.element_ty))
    likeness = _dot(k, tl.trans(k), EXACT)
    is_before = row[:, None] > row[None, :]
    system = tl.where(is_before, beta[:, None] * between * likeness, 0.0)
    updates = _inverse(system, CHUNK) * beta[None, :]
    tl.store(update_ptr + first + square, updates.to(update_ptr.dtype.element_ty))


@triton.jit
def _inverse(system, CHUNK: tl.constexpr):
    """Return the inverse of 1 + system, which is zero on and above its diagonal.

    Tiles on the diagonal are solved row by row. With D their inverse and N = D · (the rest), the
    result is (1 - N)(1 + N²) D: N has four rows of tiles, so its fourth power is zero. Powers of
    the whole system would grow beyond fp32 where many keys are alike. Products are as exact as in
    fp32: with tf32, updates of like keys lose up to 20 times what rounding to bf16 costs."""
    row = tl.arange(0, CHUNK)
    is_inside = row[:, None] // _TILE == row[None, :] // _TILE
    inside = tl.where(is_inside, system, 0.0)
    # Rows that are not solved hold what the products' layout was chosen for: with another, they
    # would spill 2 kB of registers.
    diagonal = tl.where(row[:, None] == row[None, :], 1.0, inside)
    for i in range(1, _TILE):  # replace a row of each tile, once those above it are solved
        is_row = (row % _TILE == i)[:, None]
        line = tl.sum(tl.where(is_row, inside, 0.0), 0)
        known = tl.sum(line[:, None] * diagonal, 0)
        is_wanted = is_row & is_inside & (row[:, None] > row[None, :])
        diagonal = tl.where(is_wanted, -known[None, :], diagonal)
    rest = _dot(diagonal, system - inside, True)
    square = _dot(rest, rest, True)
    power = diagonal + _dot(square, diagonal, True)
    return power - _dot(rest, power, True)


@triton.jit
def _scan_kernel(
    mixed_ptr,
    y_ptr,
    stride,
    decay_ptr,
    time_ptr,
    update_ptr,
    from_update_ptr,
    out_ptr,
    state_ptr,
    chunk_ptr,
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
    V_BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    EXACT: tl.constexpr,
):
    """Compute some columns of a head's state, of all chunks of a request."""
    V_HEADS: tl.constexpr = K_HEADS * GROUP
    KEYS: tl.constexpr = K_HEADS * K_SIZE
    VALUES: tl.constexpr = V_HEADS * V_SIZE
    CHANNELS: tl.constexpr = 2 * KEYS + VALUES
    request, head = tl.program_id(0), tl.program_id(1)
    first, length, is_first, read = tokens_of(request, start_ptr, length_ptr, read_ptr)
    if length <= 1:
        return
    write = tl.load(write_ptr + request).to(tl.int64)
    keep = tl.load(keep_ptr + request).to(tl.int64)
    kept_end = first + tl.load(after_ptr + request)
    key = tl.arange(0, K_BLOCK)
    value = tl.program_id(2) * V_BLOCK + tl.arange(0, V_BLOCK)
    is_value = value < V_SIZE
    live = (key < K_SIZE)[:, None] & is_value[None, :]
    inside = head * (K_SIZE * V_SIZE) + key[:, None] * V_SIZE + value[None, :]
    SLOT: tl.constexpr = V_HEADS * K_SIZE * V_SIZE
    state = tl.load(
        state_ptr + read * SLOT + inside, mask=live & (is_first == 0), other=0.0
    ).to(tl.float32)  # fmt: skip
    row = tl.arange(0, CHUNK)
    square = row[:, None] * CHUNK + row[None, :]
    dtype = mixed_ptr.dtype.element_ty
    first_chunk = tl.load(chunk_start_ptr + request)
    num_chunks = tl.load(chunk_start_ptr + request + 1) - first_chunk
    for index in range(num_chunks):
        chunk = first_chunk + index
        begin, end = tl.load(chunk_ptr + chunk * 3), tl.load(chunk_ptr + chunk * 3 + 1)
        token = begin + row
        is_token = token < end
        k = _unit_rows(mixed_ptr, begin, end, KEYS + head // GROUP * K_SIZE, K_HEADS, GROUP, K_SIZE,
                       V_SIZE, K_BLOCK, CHUNK)  # fmt: skip
        total, _ = _gates(y_ptr, stride, decay_ptr, time_ptr, begin, end, head, K_HEADS, GROUP,
                          K_SIZE, V_SIZE, CHUNK)  # fmt: skip
        matrix = (chunk.to(tl.int64) * V_HEADS + head) * (CHUNK * CHUNK) + square
        updates = tl.load(update_ptr + matrix)
        reads = tl.load(from_update_ptr + matrix)
        value_ptr = token.to(tl.int64)[:, None] * CHANNELS + 2 * KEYS + head * V_SIZE
        is_there = is_token[:, None] & is_value[None, :]
        v = tl.load(mixed_ptr + value_ptr + value[None, :], mask=is_there, other=0.0)
        since = tl.exp(total)[:, None]
        rounded = state.to(dtype)
        known = _dot(k, rounded, EXACT) * since
        wanted = (v.to(tl.float32) - known).to(dtype)
        update = _dot(updates, wanted, EXACT)
        q = _unit_rows(mixed_ptr, begin, end, head // GROUP * K_SIZE, K_HEADS, GROUP, K_SIZE,
                       V_SIZE, K_BLOCK, CHUNK)  # fmt: skip
        out = _dot(q, rounded, EXACT) * (since * (K_SIZE**-0.5))
        out += _dot(reads, update.to(dtype), EXACT)
        own = token.to(tl.int64)[:, None] * VALUES + head * V_SIZE + value[None, :]
        tl.store(out_ptr + own, out.to(dtype), mask=is_there)
        # Decays of tokens beyond the end are zero, so that the least sum is the last.
        least = tl.min(total, 0)
        left = (update * tl.exp(least - total)[:, None]).to(dtype)
        state = state * tl.exp(least) + _dot(tl.trans(k), left, EXACT)
        if end == kept_end:
            kept = state.to(state_ptr.dtype.element_ty)
            tl.store(state_ptr + keep * SLOT + inside, kept, mask=live & (keep >= 0))
    tl.store(
        state_ptr + write * SLOT + inside, state.to(state_ptr.dtype.element_ty), mask=live
    )  # fmt: skip


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
    begin, end = tl.load(chunk_ptr + chunk * 3), tl.load(chunk_ptr + chunk * 3 + 1)
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
def _unit_rows(
    mixed_ptr, begin, end, column,
    K_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    K_SIZE: tl.constexpr,
    V_SIZE: tl.constexpr,
    K_BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Return a chunk's queries or keys, which begin at a column, of length 1, [CHUNK, K_BLOCK]."""
    CHANNELS: tl.constexpr = K_HEADS * (2 * K_SIZE + GROUP * V_SIZE)
    token = begin + tl.arange(0, CHUNK)
    key = tl.arange(0, K_BLOCK)
    own = mixed_ptr + token.to(tl.int64)[:, None] * CHANNELS + column + key[None, :]
    live = (token < end)[:, None] & (key < K_SIZE)[None, :]
    rows = tl.load(own, mask=live, other=0.0)
    x = rows.to(tl.float32)
    return (x * tl.rsqrt(tl.sum(x * x, 1) + _EPS)[:, None]).to(rows.dtype)


@triton.jit
def _gates(
    y_ptr, stride, decay_ptr, time_ptr, begin, end, head,
    K_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    K_SIZE: tl.constexpr,
    V_SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Return a chunk's sums of decays and its rates of updates, [CHUNK]."""
    V_HEADS: tl.constexpr = K_HEADS * GROUP
    token = begin + tl.arange(0, CHUNK)
    live = token < end
    first: tl.constexpr = 2 * K_HEADS * K_SIZE + 2 * V_HEADS * V_SIZE
    own = y_ptr + token.to(tl.int64) * stride + first + head
    b = tl.load(own, mask=live, other=0.0).to(tl.float32)
    a = tl.load(own + V_HEADS, mask=live, other=0.0).to(tl.float32)
    decay = _decay(a, tl.load(decay_ptr + head), tl.load(time_ptr + head))
    total = tl.cumsum(tl.where(live, decay, 0.0), 0)
    return total, tl.where(live, tl.sigmoid(b), 0.0)


@triton.jit
def _decay(a, a_log, time):
    """Return the logarithm of a state's decay."""
    x = a + time
    return -tl.exp(a_log) * tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(x)))


@triton.jit
def _dot(a, b, EXACT: tl.constexpr):
    """Return a @ b in fp32. The interpreter multiplies bits of bf16, so they are widened."""
    if _INTERPRETED:
        out = tl.dot(a.to(tl.float32), b.to(tl.float32))
    else:
        out = tl.dot(a, b, input_precision="tf32x3" if EXACT else "tf32")
    return out
